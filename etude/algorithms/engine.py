# SPDX-License-Identifier: Apache-2.0
"""Engines, which run the runners and learners of an algorithm. This file has the local one."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from etude.algorithms.play import Played, dropped_by, make_runner, workers_of
from etude.algorithms.policies import spaces_in
from etude.envs import Arena, make_arena
from etude.errors import EngineError, how_to_install
from etude.experience import Experience
from etude.learners import ModuleLearner, Update
from etude.learners.loss import Figures
from etude.runners import ModuleOf, Runner
from etude.spaces import Spaces


class OfflineUpdate(NamedTuple):
    """The result of an offline iteration's gradient steps."""

    updates: dict[str, Update]
    """Updates by module id."""

    data: dict[str, float]
    """Figures of the data flow, see `Result.data`."""

    bottleneck: str
    """The slowest stage, see `Result.bottleneck`."""

    seconds: float
    """Duration in seconds."""


Learned = Callable[[Figures], None]
"""Called after a batch was learned from, with what the loss kept for each row (`ModuleLearner.kept`)."""


class Engine:
    """Runs the runners and learners of an algorithm: in this process, with env workers if the settings ask for them.
    `etude.ray.engine.RayEngine` inherits from it and moves some or all of them to a Ray cluster.

    It is made with the algorithm, but starts processes only when they are needed, so that an algorithm loaded only to
    act starts none.

    Args:
        algorithm: An `Algorithm`. The type is Any because that class imports this file, as in `engine_of`.
    """

    def __init__(self, algorithm: Any) -> None:
        self._algorithm = algorithm
        self._arena: Arena | None = None
        self.is_asked = True
        """Whether the learners that the settings ask for were used; always True for learners in this process."""
        self.samples_in_background = False
        """Whether envs are stepped all the time, not just while the learner waits for experience."""

    # -- acting ---------------------------------------------------------------------------------------------------

    @property
    def has_envs(self) -> bool:
        """Whether the training envs are made."""
        return self._arena is not None

    def spaces(
        self, module_ids: list[str], module_of: ModuleOf | None, before: Mapping[str, Spaces] | None = None
    ) -> dict[str, Spaces]:
        """The spaces of each module on the env's side, see `etude.algorithms.policies.spaces_in`; makes the envs."""
        if self._arena is None:
            config = self._algorithm.config
            self._arena = make_arena(config.env, config.num_envs, workers_of(config), drop=dropped_by(config))
        return spaces_in(self._arena, module_ids, module_of, before)

    def runner(self) -> Runner:
        """Make the runner for these envs, and prepare recording if the settings ask for it."""
        algorithm, config = self._algorithm, self._algorithm.config
        assert self._arena is not None  # `spaces` has made it
        lengths = config.trajectories.lengths()
        runner = make_runner(
            config, self._arena, algorithm.policies, algorithm.runner_seed, algorithm.callbacks, lengths
        )
        runner.warn_of_lost_episodes = not config.workers.num_workers  # the state of envs in workers is never saved
        algorithm.recorder.open()
        return runner

    def can_resume(self, state: Mapping[str, Any]) -> bool:
        """Whether ``state`` is of a runner of this engine."""
        return "rollouts" in state

    @property
    def is_repeatable(self) -> bool:
        """Whether runs with equal seeds collect equal steps, whatever their timing."""
        workers = self._algorithm.config.workers
        return not workers.num_workers or workers.min_batch == workers.num_workers * workers.envs_per_worker

    # -- learning -------------------------------------------------------------------------------------------------

    def update(self, parts: Mapping[str, Experience]) -> dict[str, Update] | None:
        """Update each module from raw experience (on-policy). Returns None if a later call returns the result."""
        algorithm, updates = self._algorithm, dict[str, Update]()
        for name, exp in parts.items():
            seen = algorithm.connected(name, exp)
            batch = algorithm.prepared(name, seen)
            with algorithm.timed("update"):
                updates[name] = algorithm.learn(name, batch)
            algorithm.policies[name].connectors.update(exp)
            learner = algorithm.learner.modules[name]
            learner.connectors.update(seen, learner.module)
        return updates

    def update_from(self, module_id: str, batches: Iterable[Any], learned: Learned | None = None) -> Update:
        """Update one module from batches, see `ModuleLearner.update_from`; ``learned`` is called after each, in
        order."""
        learner: ModuleLearner = self._algorithm.learner.modules[module_id]
        if learned is None:
            return learner.update_from(batches)

        def noted() -> Iterator[Any]:
            for batch in batches:
                yield batch
                learned(learner.kept)

        return learner.update_from(noted())

    def train(self) -> OfflineUpdate:
        """Make an iteration's gradient steps of each module from the recording."""
        update: OfflineUpdate = self._algorithm.train_on(self._algorithm.opened_feeds())
        return update

    def pull(self) -> None:
        """Fetch the state of remote learners, before a checkpoint; nothing if there are none."""

    def push(self) -> None:
        """Send the state here to remote learners, after loading or after modules were added or removed."""

    # -- the rest -------------------------------------------------------------------------------------------------

    def evaluate(self, num_episodes: int, seed: int) -> Played | None:
        """Play whole episodes without exploration. If they run in parallel with training, return those of the previous
        call, or None."""
        played: Played | None = self._algorithm.evaluated(num_episodes, seed)
        return played

    def last_evaluation(self) -> Played | None:
        """Wait for the evaluation that the last call of `evaluate` started in parallel with training, and return it."""
        # the algorithm is an `OfflineAlgorithm`: no other starts one in this process
        played: Played | None = self._algorithm.evaluated_beside()
        return played

    def stats(self) -> dict[str, float]:
        """Counts of remote learners since the last call, such as ``learner_restarts``; {} if there are none."""
        return {}

    def close(self) -> None:
        """Close the envs, and stop every process that was started."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()


def engine_of(algorithm: Any) -> Engine:
    """Make the engine that the algorithm's settings ask for.

    Raises:
        EngineError: it needs Ray, which is not installed.
        SettingsError: the settings contradict each other.
    """
    if algorithm.config.engine == "local":
        return Engine(algorithm)
    try:
        importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise EngineError(f"the ray engine needs Ray: {how_to_install('ray')}.") from error
    # Imported by name: algorithms may not import the ray engine, and must work without it.
    engine: Engine = importlib.import_module("etude.ray.engine").RayEngine(algorithm)
    return engine
