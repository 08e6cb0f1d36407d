# SPDX-License-Identifier: Apache-2.0
"""Evaluations on separate runners, while training goes on."""

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
    """Plays an algorithm's evaluations on separate runners, each of which plays some of the episodes.

    If a runner dies or hangs, its episodes are lost, and it is replaced up to `max_restarts` times.

    Args:
        algorithm: The algorithm whose modules play.
        settings: The engine's settings.
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
        return remote.options(**options).remote(self._config_ref, "cpu", own.step_timeout)

    def next(self, num_episodes: int, *, seed: int | None) -> tuple[Evaluation | None, Finished | None]:
        """Start new episodes with the current modules, without waiting, and return the results of the last ones.

        The result is None the first time, and if all of it was lost. See `finished`.

        Args:
            num_episodes: The number of whole episodes, divided evenly.
            seed: The seed of envs and actions, from which each runner's is derived. None draws one.
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
        """Wait for the last episodes and return their results, with the gradient steps of the modules that played.

        None if all of it was lost. The algorithm's metrics get ``evaluation_restarts``, the number of lost runners.

        Raises:
            EngineError: more runners were lost than allowed.
            Exception: raised by an env, a connector or a module; a note says where.
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
        finished = merged(played)
        return evaluation_of(finished, sum(faulty), updates=self._updates, seconds=max(seconds)), finished

    def close(self) -> None:
        """End the runners; their running episodes are lost. Does nothing the second time."""
        if connection() == self._home:  # otherwise they have ended with the cluster
            self.pool.kill()
