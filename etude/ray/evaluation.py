# SPDX-License-Identifier: Apache-2.0
"""Evaluations by runners apart from those of training, while training goes on."""

from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from etude.algorithms.nested import AgentsConfig
from etude.algorithms.play import evaluation_of
from etude.algorithms.ray_config import Ray
from etude.algorithms.results import Evaluation
from etude.errors import SettingsError
from etude.ray.fragments import merged
from etude.ray.policies import acting_of, sent
from etude.ray.pool import RunnerPool
from etude.ray.runner_actor import RunnerActor
from etude.ray.start import check_connected, connection
from etude.runners import Finished

if TYPE_CHECKING:
    from etude.algorithms.algorithm import Algorithm


class EvaluationRunners:
    """Plays an algorithm's evaluations on runners of their own, each with a part of the episodes.

    One that dies or hangs costs its part of the episodes, and is replaced, as often as `max_restarts` says.

    Args:
        algorithm: Whose modules play.
        settings: Of the cluster.
    """

    def __init__(self, algorithm: "Algorithm[Any]", settings: Ray) -> None:
        if algorithm.config.env is None:
            raise SettingsError("there is no env to evaluate in: set `env`.")
        self._algorithm, self._settings = algorithm, settings
        self._home = connection()
        self._config_ref = sent(algorithm.config, module=None, agents=AgentsConfig(), callbacks=())
        self._updates = 0
        self.pool = RunnerPool(
            "evaluation runner", settings.num_evaluation_runners, self._make, settings, lambda member: None
        )

    def _make(self, number: int) -> Any:
        own, remote = self._settings, ray.remote(RunnerActor)
        options = {"num_cpus": own.cpus_per_runner, "resources": dict(own.resources_per_runner or {})}
        return remote.options(**options).remote(self._config_ref, number, "cpu", own.step_timeout)

    def next(self, num_episodes: int, *, seed: int | None) -> tuple[Evaluation | None, Finished | None]:
        """The results of the last episodes, see `finished`; lets the modules play as they are now, without waiting.

        None the first time, and if all of it was lost.

        Args:
            num_episodes: How many whole episodes, dealt out evenly.
            seed: Of envs and actions; each runner's is drawn from it. None draws one.
        """
        check_connected(self._home)
        found = self.finished() if any(member.requests for member in self.pool.members) else None
        members = self.pool.members
        ref, self._updates = ray.put(acting_of(self._algorithm)), self._algorithm.updates
        seeds = np.random.SeedSequence(seed).generate_state(len(members), np.uint64) >> np.uint64(1)
        for i, member in enumerate(members):
            own = num_episodes // len(members) + (i < num_episodes % len(members))
            if own:
                self.pool.request(member, member.actor.play.remote(ref, own, int(seeds[i])), steps=own)
        return (None, None) if found is None else found

    def finished(self) -> tuple[Evaluation, Finished] | None:
        """The results of the episodes that were started last, with the gradient steps of who played; waits for them.

        None if all of it was lost. The algorithm's metrics get the number of lost runners: ``evaluation_restarts``.

        Raises:
            EngineError: runners were lost more often than they may be.
            Exception: what an env, a connector or a module raised, with a note of where.
        """
        before, parts = self.pool.restarts, dict[int, tuple[Finished, int, float]]()
        while any(member.requests for member in self.pool.members):
            answer = self.pool.next(1.0)
            if answer is not None:
                parts[answer[0].number] = answer[2]
        self._algorithm.metrics.log("evaluation_restarts", float(self.pool.restarts - before), by="sum")
        if not parts:
            return None
        played, faulty, seconds = zip(*(parts[i] for i in sorted(parts)), strict=True)
        evaluation = evaluation_of(played, sum(faulty), updates=self._updates, seconds=max(seconds))
        return evaluation, merged(played)

    def close(self) -> None:
        """End the runners; what they play is lost. Does nothing the second time."""
        if connection() == self._home:  # else they have ended with the cluster
            self.pool.kill()
