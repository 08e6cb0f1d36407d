# SPDX-License-Identifier: Apache-2.0
"""Engines: where the runners and learners of an algorithm live. The local one is here."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from etude.algorithms.play import dropped_by, make_runner, workers_of
from etude.algorithms.policies import spaces_in
from etude.algorithms.results import Evaluation
from etude.columns import Columns
from etude.envs import Arena, make_arena
from etude.errors import EngineError, how_to_install
from etude.experience import Experience
from etude.learners import Update
from etude.learners.loss import Figures
from etude.policies import PolicyLike
from etude.runners import Finished, Lengths, ModuleOf
from etude.spaces import Spaces


class Collector(Protocol):
    """What collects experience for an algorithm: a `Runner`, or many of them elsewhere; see there."""

    env_steps: int
    agent_steps: int

    @property
    def times(self) -> Mapping[str, float]:
        """Seconds by phase."""

    @property
    def turns(self) -> int:
        """Turns made."""

    def collect_each(
        self, *, num_steps: int | None = None, whole_episodes: bool = False, explore: bool = True
    ) -> dict[str | None, Experience]:
        """Act, and give what was lived through."""

    def take_finished(self) -> Finished:
        """What episodes brought that ended since this was last asked."""

    def stats(self) -> dict[str, float]:
        """What was counted since this was last asked."""

    def begin_anew(self) -> None:
        """Abandon the running episodes."""

    def set_policies(
        self, policies: PolicyLike | Mapping[str, PolicyLike], *, module_of: ModuleOf | None = None
    ) -> None:
        """Let these act from now on."""

    def state_dict(self) -> dict[str, Any]:
        """What the next collection depends on."""

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Go on from `state_dict`; says how."""

    def close(self) -> None:
        """Close the envs."""


class OfflineUpdate(NamedTuple):
    """What gradient steps from a recording brought."""

    updates: dict[str, Update]
    """By module id."""

    data: dict[str, float]
    """How the data flowed, see `Result.data`."""

    bottleneck: str
    """The slowest layer, see `Result.bottleneck`."""

    seconds: float
    """How long they took."""


Draw = Callable[[], tuple[Columns, Columns | Experience]]
"""Gives a batch from a replay, and the same as the module sees it."""

Learned = Callable[[Columns, Figures], None]
"""Takes a batch that was learned from, and what the loss kept of it, by row (`ModuleLearner.kept`)."""


class Engine(Protocol):
    """Where the runners and learners of an algorithm live: here (`LocalEngine`) or on a Ray cluster
    (`etude.ray.engine.RayEngine`).

    It is made with the algorithm. What it starts is started when it is first needed, so that an algorithm that was
    loaded to play starts nothing.
    """

    # -- acting ---------------------------------------------------------------------------------------------------

    def spaces(
        self, module_ids: list[str], module_of: ModuleOf | None, known: Mapping[str, Spaces] | None = None
    ) -> dict[str, Spaces]:
        """The spaces of each module on the env's side, see `etude.algorithms.policies.spaces_in`; makes the envs."""

    @property
    def has_envs(self) -> bool:
        """Whether the envs of training are made."""

    def runner(self) -> Collector:
        """Make what acts in these envs, and be ready to record where the settings say so."""

    def can_resume(self, state: Mapping[str, Any]) -> bool:
        """Whether ``state`` is of a runner of this engine."""

    def record(self, parts: Mapping[str, Experience]) -> None:
        """Record raw experience by module id, where the settings say so and runners do not record it themselves."""

    # -- learning -------------------------------------------------------------------------------------------------

    def update(self, parts: Mapping[str, Experience]) -> dict[str, Update] | None:
        """Let each module learn from raw experience (on-policy). None: what it brings is told by the next call."""

    def update_from(self, module_id: str, draw: Draw, num_batches: int, learned: Learned) -> Update:
        """Let one module learn from so many batches of a replay; ``learned`` is called with each, in order."""

    def update_from_given(self, module_id: str, batches: Iterable[Any]) -> Update:
        """Let one module learn from batches, see `ModuleLearner.update_from`."""

    def feeds(self) -> dict[str, Any]:
        """What feeds each module from the recording, a `Feed` of each, where learners are here."""

    def train(self) -> OfflineUpdate:
        """An iteration's gradient steps of each module, from the recording."""

    def pull(self) -> None:
        """Have here all that learners elsewhere know: before a checkpoint."""

    def push(self) -> None:
        """Let learners elsewhere know all that is here: after a load, or where modules have come or gone."""

    @property
    def is_asked(self) -> bool:
        """Whether the learners that the settings ask for were asked to learn; True where they are here."""

    # -- the rest -------------------------------------------------------------------------------------------------

    def evaluate(self, num_episodes: int, seed: int) -> tuple[Evaluation | None, Finished | None]:
        """Play whole episodes without exploring; gives those of the last call where they are played beside training."""

    def stats(self) -> dict[str, float]:
        """What was counted of learners since this was last asked, such as ``learner_restarts``."""

    def close(self) -> None:
        """Close the envs, and end all that was started."""


class LocalEngine:
    """This process, with env workers where the settings ask for them.

    Args:
        algorithm: An `Algorithm`. (Any, as it stands above this file; so it does in `engine_of`.)
    """

    is_asked = True

    def __init__(self, algorithm: Any) -> None:
        self._algorithm = algorithm
        self.arena: Arena | None = None
        """The envs of training."""

    @property
    def has_envs(self) -> bool:
        """Whether the envs of training are made."""
        return self.arena is not None

    def spaces(
        self, module_ids: list[str], module_of: ModuleOf | None, known: Mapping[str, Spaces] | None = None
    ) -> dict[str, Spaces]:
        """See `Engine`."""
        if self.arena is None:
            config = self._algorithm.config
            self.arena = make_arena(config.env, config.num_envs, workers_of(config), drop=dropped_by(config))
        return spaces_in(self.arena, module_ids, module_of, known)

    def runner(self) -> Collector:
        """See `Engine`."""
        algorithm, config = self._algorithm, self._algorithm.config
        assert self.arena is not None  # `spaces` has made it
        lengths = Lengths(config.trajectories.min_length, config.trajectories.max_length)
        runner = make_runner(
            config, self.arena, algorithm.policies, algorithm.runner_seed, algorithm.callbacks, lengths
        )
        runner.warn_of_lost_episodes = not config.workers.num_workers  # the state of envs in workers is never saved
        algorithm.recorder.open()
        return runner

    def can_resume(self, state: Mapping[str, Any]) -> bool:
        """See `Engine`."""
        return "rollouts" in state

    def record(self, parts: Mapping[str, Experience]) -> None:
        """See `Engine`."""
        if self._algorithm.recorder.is_on:
            with self._algorithm.timed("record"):
                self._algorithm.recorder.take(parts)

    def update(self, parts: Mapping[str, Experience]) -> dict[str, Update]:
        """See `Engine`."""
        updates: dict[str, Update] = self._algorithm.learn_each(parts)
        return updates

    def update_from(self, module_id: str, draw: Draw, num_batches: int, learned: Learned) -> Update:
        """See `Engine`."""
        learner = self._algorithm.learner.modules[module_id]

        def batches() -> Iterator[Columns | Experience]:
            for _ in range(num_batches):
                batch, shown = draw()
                yield shown
                learned(batch, learner.kept)

        return self.update_from_given(module_id, batches())

    def update_from_given(self, module_id: str, batches: Iterable[Any]) -> Update:
        """See `Engine`."""
        update: Update = self._algorithm.learner.modules[module_id].update_from(batches)
        return update

    def feeds(self) -> dict[str, Any]:
        """See `Engine`."""
        feeds: dict[str, Any] = self._algorithm.make_feeds()
        return feeds

    def train(self) -> OfflineUpdate:
        """See `Engine`."""
        update: OfflineUpdate = self._algorithm.train_on(self._algorithm.opened_feeds())
        return update

    def pull(self) -> None:
        """All is here."""

    def push(self) -> None:
        """All is here."""

    def evaluate(self, num_episodes: int, seed: int) -> tuple[Evaluation | None, Finished | None]:
        """See `Engine`."""
        played: tuple[Evaluation | None, Finished | None] = self._algorithm.evaluated(num_episodes, seed)
        return played

    def stats(self) -> dict[str, float]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Close the envs."""
        arena, self.arena = self.arena, None
        if arena is not None:
            arena.close()


def engine_of(algorithm: Any) -> Engine:
    """The engine that the algorithm's settings ask for.

    Raises:
        EngineError: it needs Ray, which is not installed.
        SettingsError: the settings do not go together.
    """
    if algorithm.config.engine == "local":
        return LocalEngine(algorithm)
    try:
        importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise EngineError(f"the ray engine needs Ray: {how_to_install('ray')}.") from error
    # By name: algorithms stand below the ray engine, and must be there without it.
    engine: Engine = importlib.import_module("etude.ray.engine").RayEngine(algorithm)
    return engine
