# SPDX-License-Identifier: Apache-2.0
"""Evaluations by runners apart from those of training, while training goes on."""

import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import RayError

from etude.algorithms.config import AlgorithmConfig
from etude.algorithms.play import evaluation_of, played, runner_for
from etude.algorithms.ray_config import Ray
from etude.algorithms.results import Evaluation
from etude.errors import EngineError, SettingsError
from etude.ray.faults import cause_of, first_line, raise_from, was_lost
from etude.ray.fragments import merged
from etude.ray.policies import Acting, acting_of, sent
from etude.ray.pulse import Pulse, hung
from etude.ray.start import check_connected, connection
from etude.runners import Finished, Runner
from etude.threads import for_acting, hold

if TYPE_CHECKING:
    from etude.algorithms.algorithm import Algorithm

_log = logging.getLogger("etude.ray")
_TICK = 0.5  # seconds between two looks at who hangs


class EvaluationActor:
    """Plays whole episodes, in a process of a cluster.

    Args:
        config: Of the algorithm, for the local engine.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        hold(for_acting(config.threads))
        self._config = config
        self._runner: Runner | None = None

    def play(self, acting: Acting, num_episodes: int, seed: int) -> tuple[Finished, int, float]:
        """What so many episodes brought, how many broke off beside them, and the seconds that they took."""
        begin = time.perf_counter()
        config, env = self._config, self._config.env
        assert env is not None
        modules = None if acting.is_only else tuple(acting.policies)
        config = dataclasses.replace(config, modules=modules, module_of=acting.module_of)
        self._runner = runner = runner_for(config, env, num_episodes, acting.policies, seed)
        try:
            parts, faulty = played(runner, num_episodes, explore=False)
        finally:
            self._runner = None
        return merged(parts), faulty, time.perf_counter() - begin

    @ray.method(concurrency_group="pulse")
    def turns(self) -> int:
        """Turns made of what is played; -1 where nothing is. Answered while it plays."""
        return -1 if self._runner is None else self._runner.turns


class EvaluationRunners:
    """Plays an algorithm's evaluations on runners of their own, each with a part of the episodes.

    One that dies or hangs costs its part of the episodes, and is made anew, as often as `max_restarts` says. They have
    `step_timeout` as those of training have, while an evaluation is waited for.

    Args:
        algorithm: Whose modules play.
        settings: Of the cluster.
    """

    def __init__(self, algorithm: "Algorithm[Any]", settings: Ray) -> None:
        if algorithm.config.env is None:
            raise SettingsError("there is no env to evaluate in: set `env`.")
        self._algorithm, self._settings = algorithm, settings
        self._home = connection()
        nobody = {"module": None, "modules": None, "module_of": None, "overrides": None, "modules_to_train": None}
        self._config_ref = sent(algorithm.config, **nobody)
        self._actors = [self._make() for _ in range(settings.num_evaluation_runners)]
        self._pulses = [Pulse() for _ in self._actors]
        self._asked: dict[Any, int] = {}  # by reference, the runner
        self._since = 0.0  # when they were
        self._updates = 0
        self.restarts = 0
        """Of evaluation runners, over the lifetime: each has cost its part of the episodes."""

    def _make(self) -> Any:
        own = self._settings
        remote: Any = ray.remote
        actor = remote(concurrency_groups={"pulse": 1})(EvaluationActor)
        return actor.options(num_cpus=own.cpus_per_runner, resources=dict(own.resources_per_runner or {})).remote(
            self._config_ref
        )

    def next(self, num_episodes: int, *, seed: int | None) -> tuple[Evaluation | None, Finished | None]:
        """What the last episodes brought, see `finished`; and let the modules play as they are now, without waiting.

        None the first time, and where all of it was lost.

        Args:
            num_episodes: How many whole episodes, dealt out evenly.
            seed: Of envs and actions; each runner's is drawn from it. None draws one.
        """
        check_connected(self._home)
        found = self.finished() if self._asked else None
        self._start(num_episodes, seed)
        return (None, None) if found is None else found

    def _start(self, num_episodes: int, seed: int | None) -> None:
        """Let the modules play as they are now; returns while they do."""
        algorithm = self._algorithm
        ref, self._updates = ray.put(acting_of(algorithm)), algorithm.updates
        seeds = np.random.SeedSequence(seed).generate_state(len(self._actors), np.uint64) >> np.uint64(1)
        self._since = time.monotonic()
        for i, actor in enumerate(self._actors):
            self._pulses[i].ask(actor, self._since)
            own = num_episodes // len(self._actors) + (i < num_episodes % len(self._actors))
            if own:
                self._asked[actor.play.remote(ref, own, int(seeds[i]))] = i

    def finished(self) -> tuple[Evaluation, Finished] | None:
        """What the episodes brought that were started last, with the gradient steps of who played; waits for them.

        None where all of it was lost. The algorithm's metrics are told how many runners were: ``evaluation_restarts``.

        Raises:
            EngineError: runners were lost more often than they may be.
            Exception: what an env, a connector or a module raised, with a note of where.
        """
        asked, self._asked = self._asked, {}
        before, parts = self.restarts, dict[int, tuple[Finished, int, float]]()
        while asked:
            ready, _ = ray.wait(list(asked), num_returns=1, timeout=_TICK)
            if not ready:
                self._end_hanging(asked)
            for i in [asked.pop(ref) for ref in ready]:
                try:
                    parts[i] = ray.get(ready[0])
                except RayError as error:
                    if not was_lost(cause_of(error)):
                        raise_from(error, f"evaluation runner {i}")
                    self._replace(i, error)
        self._algorithm.metrics.log("evaluation_restarts", float(self.restarts - before), by="sum")
        if not parts:
            return None
        played, faulty, seconds = zip(*(parts[i] for i in sorted(parts)), strict=True)
        evaluation = evaluation_of(played, sum(faulty), updates=self._updates, seconds=max(seconds))
        return evaluation, merged(played)

    def _end_hanging(self, asked: dict[Any, int]) -> None:
        """Replace runners that have made no turn for too long, and wait no more for what was asked of them."""
        limit, now = self._settings.step_timeout, time.monotonic()
        for ref, i in list(asked.items()):
            silence = self._pulses[i].still_for(self._actors[i], self._since, now)
            # one that has never answered may not have been started for want of room
            if limit is not None and self._pulses[i].turns is not None and silence > limit:
                del asked[ref]
                self._replace(i, TimeoutError(hung(limit)))

    def _replace(self, i: int, error: Exception) -> None:
        _log.warning("evaluation runner %d was lost, with its part of the episodes: %s", i, first_line(error))
        ray.kill(self._actors[i])
        if self.restarts >= self._settings.max_restarts:
            raise EngineError(
                f"evaluation runner {i} was lost, and `ray.max_restarts` ({self._settings.max_restarts}) are used up. "
                f"The cause: {first_line(error)}"
            ) from error
        self.restarts += 1
        self._actors[i], self._pulses[i] = self._make(), Pulse()

    def close(self) -> None:
        """End the runners; what they play is lost. Does nothing the second time."""
        actors, self._actors, self._asked = self._actors, [], {}
        for actor in actors if connection() == self._home else []:
            ray.kill(actor)
