# SPDX-License-Identifier: Apache-2.0
"""Callbacks: user code that is called while episodes run, the episodes it gets, and the runner that calls it."""

import copy
import logging
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import ArrayLike, NDArray

from etude import columns as col
from etude.display import short
from etude.envs import Arena, Turn
from etude.envs.render import MediaLike, encoded
from etude.errors import DataError, EnvError, EtudeError, SettingsError
from etude.experience import Experience
from etude.experience.arrays import host
from etude.interruption import interruptible
from etude.modules import Module
from etude.runners.episodes import Episode, EpisodeTracker, Finished
from etude.runners.limits import Limit
from etude.runners.mapping import Share
from etude.runners.rollout import BLIND, SLOT, Rollout
from etude.settings import choice
from etude.spaces import Nester

_log = logging.getLogger("etude.runners")
_WARNED: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _WARNED:
        _WARNED.add(text)
        _log.warning(text)


class AgentFigures(NamedTuple):
    """The figures of an agent in its episode, see `RunningAgent`."""

    steps: int
    total: float
    reward: float
    terminated: bool
    truncated: bool


class RunningAgent:
    """One agent in a running episode.

    `obs`, `action` and `info` are available in `Callback.on_episode_start`, `Callback.on_episode_step` and
    `Callback.on_episode_end`; at other times they are None.
    """

    __slots__ = ("_kept", "_slot", "_source", "id", "module_id")

    def __init__(
        self,
        source: "CallbackRunner",
        slot: int,
        agent_id: str | None,
        module_id: str | None,
        kept: AgentFigures | None = None,
    ) -> None:
        self._source = source
        self._slot = slot
        self._kept = kept
        self.id = agent_id
        """The agent's name; None if agents have no names."""
        self.module_id = module_id
        """The module that acts for it; None if the module has no id."""

    @property
    def _figures(self) -> AgentFigures:
        return self._source.figures(self._slot) if self._kept is None else self._kept

    @property
    def steps(self) -> int:
        """The number of its steps in this episode whose results are known."""
        return self._figures.steps

    @property
    def return_so_far(self) -> float:
        """The sum of the rewards of these steps."""
        return self._figures.total

    @property
    def reward(self) -> float:
        """The reward of the last of these steps; 0.0 before the first."""
        return self._figures.reward

    @property
    def terminated(self) -> bool:
        """Whether the episode ended for it by the env's own rules."""
        return self._figures.terminated

    @property
    def truncated(self) -> bool:
        """Whether the episode was stopped for it from outside, for example by a time limit."""
        return self._figures.truncated

    @property
    def obs(self) -> Any:
        """Its newest observation, as the env returned it, nested as the space; None if the env returned none."""
        return self._source.obs(self._slot) if self._kept is None else None

    @property
    def action(self) -> Any:
        """The action that its module chose in its last step, nested as the module's action space; None before the
        first. Connectors may have changed it for the env."""
        return self._source.action(self._slot) if self._kept is None else None

    @property
    def info(self) -> Any:
        """The env's info dict for `obs`; {} if there was none, None if the env is in a worker process."""
        return self._source.info(self._slot) if self._kept is None else None

    def keep(self) -> None:
        """Store the current values: the episode is over for this agent."""
        self._kept = self._figures

    def state(self) -> list[Any]:
        """Its part of `RunningEpisode.state_dict`."""
        return [self._slot, self.id, self.module_id, None if self._kept is None else list(self._kept)]


class RunningEpisode:
    """An episode as callbacks get it, from its beginning to its end.

    ``obs``, ``action``, ``reward``, ``info``, ``terminated`` and ``truncated`` are those of its only agent. If agents
    have names, use the attributes of ``agents[name]`` instead.
    """

    def __init__(self, source: "CallbackRunner", episode: Episode, began: float) -> None:
        self._source = source
        self._began = began
        self._over: tuple[int, float] | None = None
        self.is_last_step = False
        """Whether the newest step is the episode's last one: see `env`."""
        self.id = episode.id
        """The ``episode_id`` in Experience."""
        self.env_index = episode.env
        """The index of the env copy, from 0."""
        self.number = episode.number
        """The index of the episode in that copy, from 0."""
        self.agents: dict[str | None, RunningAgent] = {}
        """The agents that have had an observation in this episode, by name; an agent without a name is at None."""
        self.unacted_reward = 0.0
        """The rewards of agents that never acted in this episode, known when it has ended."""
        self.data: dict[Any, Any] = {}
        """For data of your own, from one call to the next. It is saved with the run if it holds only plain data and
        arrays; otherwise a resumed run no longer calls callbacks for the episode."""
        self.values: dict[str, tuple[float, int]] = {}
        """Logged numbers by name: their sum and count."""
        self.histograms: dict[str, list[NDArray[np.float64]]] = {}
        """Values logged for histograms, by name."""
        self.media: dict[str, bytes] = {}
        """Logged PNGs and GIFs, the newest for each name."""

    def __repr__(self) -> str:
        return short(self, self.id, env_index=self.env_index, number=self.number, agents=[*self.agents])

    # -- attributes ---------------------------------------------------------------------------------------------

    @property
    def env(self) -> Any:
        """The env object; the ``VectorEnv`` if all copies step as one; None if the env is in another process.

        When the results of an episode's last step are there, it has begun its next episode, unless it is a `VectorEnv`
        that resets itself later.
        """
        found = self._source.arena.env_at(self.env_index)
        if self.is_last_step and found is not None:
            _warn_once(
                "episode.env or episode.render() was used in an episode's last step (in on_episode_end, or the last "
                "on_episode_step): the env may have begun its next episode there. For the end, use episode.info and "
                "episode.obs; let the env put what you need into its info."
            )
        return found

    @property
    def modules(self) -> Mapping[str | None, Module]:
        """All modules by id; a single module without an id is at None."""
        return {name: rollout.module for name, rollout in self._source.rollouts.items()}

    @property
    def t(self) -> int:
        """The number of env steps in this episode."""
        return self._source.t(self.env_index) if self._over is None else self._over[0]

    @property
    def duration(self) -> float:
        """Seconds since it began, without the time between collections."""
        return self._source.clock() - self._began if self._over is None else self._over[1]

    @property
    def is_over(self) -> bool:
        """Whether it has ended and `Callback.on_episode_end` has been called for it."""
        return self._over is not None

    @property
    def return_so_far(self) -> float:
        """The sum of the rewards of all agents."""
        return sum(agent.return_so_far for agent in self.agents.values()) + self.unacted_reward

    obs: Any
    """`RunningAgent.obs` of the only agent."""
    action: Any
    """`RunningAgent.action` of the only agent."""
    reward: float
    """`RunningAgent.reward` of the only agent."""
    info: Any
    """`RunningAgent.info` of the only agent."""
    terminated: bool
    """`RunningAgent.terminated` of the only agent."""
    truncated: bool
    """`RunningAgent.truncated` of the only agent."""

    if not TYPE_CHECKING:  # type checkers should find misspelled names

        def __getattr__(self, name: str) -> Any:
            if name not in RunningEpisode.__annotations__:
                raise AttributeError(f"'RunningEpisode' object has no attribute {name!r}", name=name, obj=self)
            if len(self.agents) != 1 or None not in self.agents:
                raise EtudeError(
                    f"the episode has the agents {list(self.agents)}: choose one, as in episode.agents[name].obs."
                    if self.agents
                    else "no agent is in the episode yet: wait for on_episode_start."
                )
            return getattr(self.agents[None], name)

    def render(self) -> Any:
        """Render the env and return the frame. The time is reported as ``render``.

        In an episode's last step, the frame is that of the next episode's start, as with `env`.

        Raises:
            EnvError: the env is in another process.
        """
        _ = self.env  # warns at the end of an episode
        return self._source.render(self.env_index)

    # -- logging ------------------------------------------------------------------------------------------------

    def log(self, name: str, value: float) -> None:
        """Log a number for the episode. Results have its mean, minimum and maximum over episodes in ``custom``.

        If it is logged several times in an episode, the episode counts with their mean.

        Raises:
            DataError: it is not a finite number.
        """
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = np.nan
        if not np.isfinite(number):
            raise DataError(f"episode.log({name!r}, {value!r}): the value must be a finite number.")
        total, count = self.values.get(name, (0.0, 0))
        self.values[name] = (total + number, count + 1)

    def log_histogram(self, name: str, values: ArrayLike) -> None:
        """Log values for a histogram over all episodes of an iteration, which TensorBoard shows.

        Raises:
            DataError: a value is not a finite number.
        """
        try:
            array = np.array(values, np.float64).reshape(-1)
        except (TypeError, ValueError):
            array = np.full(1, np.nan)
        if not np.isfinite(array).all():
            raise DataError(f"episode.log_histogram({name!r}, ...): the values must be finite numbers.")
        self.histograms.setdefault(name, []).append(array)

    def log_media(self, name: str, media: MediaLike, *, fps: float = 30.0) -> None:
        """Log an image or a clip, which TensorBoard shows. The newest of each iteration is kept for each name.

        Args:
            name: Its name.
            media: A frame, ``[H, W, 3]`` or any other form that envs render; a list of frames, or ``[T, H, W, C]``; or
                a matplotlib figure, which you must close.
            fps: Frames per second of a clip.

        Raises:
            DataError: it is none of these.
        """
        try:
            self.media[name] = encoded(media, fps)
        except DataError as error:
            raise DataError(f"episode.log_media({name!r}, ...) takes a frame, frames or a figure: {error}") from error

    # -- for the callback runner --------------------------------------------------------------------------------

    def keep(self) -> None:
        """Store the current values: the episode is over."""
        for agent in self.agents.values():
            agent.keep()
        self._over = (self.t, self.duration)

    def state_dict(self) -> dict[str, Any]:
        """Its own state, without the state that the arena and the tracker keep."""
        return {
            "env": self.env_index,
            "number": self.number,
            "agents": [agent.state() for agent in self.agents.values()],
            "unheld": self.unacted_reward,
            "duration": self.duration,
            "over": None if self._over is None else self._over[0],
            "values": {name: list(pair) for name, pair in self.values.items()},
            "histograms": {name: np.concatenate(parts) for name, parts in self.histograms.items()},
            "media": dict(self.media),
            "data": self.data,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        for slot, name, module_id, kept in state["agents"]:
            figures = None if kept is None else AgentFigures(*kept)
            self.agents[name] = RunningAgent(self._source, slot, name, module_id, figures)
        self.unacted_reward = state.get("unheld", 0.0)
        self._over = None if state["over"] is None else (state["over"], state["duration"])
        self.values = {name: (total, count) for name, (total, count) in state["values"].items()}
        self.histograms = {name: [values] for name, values in state["histograms"].items()}
        self.media, self.data = dict(state["media"]), state["data"]


EVENTS = ("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end", "on_segment")


class Callback:
    """Base class of callbacks: user code that is called while episodes run. Methods not overridden cost no time.

    The methods are called in this order for an episode: `on_episode_created`, `on_episode_start`, `on_episode_step`
    after each env step, including the last one, and `on_episode_end`. `on_segment` is called whenever steps of the
    episode have been collected, possibly after its end. Several callbacks are called in the order in which they are
    given.

    If an episode is cut because its env failed, only `on_segment` is still called, with the earlier steps. If it is
    abandoned because whole episodes are collected next, nothing more is called. In both cases, its logged values are
    dropped. When whole episodes are collected, callbacks are not called for episodes beyond the requested number.

    ``__init__`` must store its arguments as attributes of the same names, so that a checkpoint can make the callback
    again. An error in a callback is raised, with a note that names the method and the episode.
    """

    def on_episode_created(self, episode: RunningEpisode) -> None:
        """An episode begins: the env has been reset, but there are no observations and no modules chosen yet."""

    def on_episode_start(self, episode: RunningEpisode) -> None:
        """The first observations are available, and the modules have been chosen."""

    def on_episode_step(self, episode: RunningEpisode) -> None:
        """The env made a step, and its results are available."""

    def on_episode_end(self, episode: RunningEpisode) -> None:
        """The episode has ended for all its agents, and the env has begun its next one.

        For details of the end, use ``episode.info``.
        """

    def on_segment(self, segment: Experience, episode: RunningEpisode) -> None:
        """Steps of one agent have been collected.

        Args:
            segment: One segment, a view, as it is trained on and recorded.
            episode: Its episode, which may have ended.
        """

    def state_dict(self) -> dict[str, Any]:
        """The state to save in a checkpoint: plain data and arrays."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""


CallbackLike: TypeAlias = str | type[Callback] | Callback
"""``module:Class``; a class, which is called without arguments; or an object, which is used itself."""


def callback_from(spec: CallbackLike) -> Callback:
    """The callback that a setting names.

    Raises:
        SettingsError: it can't be found or made, or is not a callback.
    """
    try:
        found: Any = pkgutil.resolve_name(spec) if isinstance(spec, str) else spec
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"the callback {spec!r} can't be imported ({error}): write `module:Class`, with the module's folder on "
            "PYTHONPATH."
        ) from error
    if isinstance(found, type) and issubclass(found, Callback):
        try:
            found = found()
        except TypeError as error:
            raise SettingsError(
                f"the callback {found.__name__} can't be made without arguments: {error}. Give an object instead."
            ) from error
    if not isinstance(found, Callback):
        raise SettingsError(
            f"{spec!r} is not a callback: give an object or a class derived from etude.Callback, or `module:Class`."
        )
    for name in dir(type(found)):
        if name.startswith("on_") and name not in EVENTS and callable(getattr(type(found), name)):
            raise SettingsError(
                f"{type(found).__name__} has a method `{name}`, which is not an event. {choice(name, EVENTS)}"
            )
    return found


class GameReturns(Callback):
    """Logs ``game_return``, the return of a whole game, if an episode is one life, as with some Atari wrappers.

    The env must put the number of ``lives`` left into its infos. The return of a game is the sum of the returns of its
    lives; the episode's own return is still that of one life. A game ends with its last life, or when it is truncated.
    A game that is not played to its end, for example if a resumed run begins new episodes, is not counted.
    """

    def __init__(self) -> None:
        self._games: dict[int, tuple[float, int]] = {}  # by env: return of lost lives, lives left

    def on_episode_start(self, episode: RunningEpisode) -> None:
        """Drops the earlier lives if this one belongs to another game."""
        _, left = self._games.get(episode.env_index, (0.0, 0))
        if (episode.info or {}).get("lives", left) > left and self._games.pop(episode.env_index, None):
            _warn_once(
                "GameReturns: a new game began although lives were left, so the game before is not counted. Does the "
                "env's reset() begin a new game after each lost life? Then later lives are never played."
            )

    def on_episode_end(self, episode: RunningEpisode) -> None:
        """Adds the life's return, and logs the sum at the end of the game."""
        total, _ = self._games.pop(episode.env_index, (0.0, 0))
        total, left = total + episode.return_so_far, _lives(episode)
        if left and not episode.truncated:
            self._games[episode.env_index] = (total, left)
        else:
            episode.log("game_return", total)

    def state_dict(self) -> dict[str, Any]:
        """The running games."""
        return {"games": [[env, total, left] for env, (total, left) in self._games.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._games = {env: (total, left) for env, total, left in state["games"]}


def _lives(episode: RunningEpisode) -> int:
    info = episode.info
    if not isinstance(info, dict) or "lives" not in info:
        said = "which worker processes don't send" if info is None else f"which has only {sorted(info)}"
        raise EnvError(f"GameReturns needs `lives` in the env's info, {said}. Remove GameReturns for this env.")
    return int(info["lives"])


RENDER = "render"
CALLBACKS = "callbacks"
_LAST = ((col.REWARD, np.float64), (col.TERMINATED, np.bool_), (col.TRUNCATED, np.bool_))


class CallbackRunner:
    """Tracks the episodes of a runner turn by turn, and calls the methods that callbacks override.

    Args:
        callbacks: The callbacks, in the order in which they are called.
        arena: The arena in which the episodes run.
        tracker: The running episodes and their lengths.
        clock: Returns the seconds of collecting until now.
        rollouts: The collected rows, by module id.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        arena: Arena,
        tracker: EpisodeTracker,
        clock: Callable[[], float],
        rollouts: Mapping[str | None, Rollout],
    ) -> None:
        self._callbacks = list(callbacks)
        self._calls = {
            event: [getattr(c, event) for c in callbacks if getattr(type(c), event) is not getattr(Callback, event)]
            for event in EVENTS
        }
        self.arena, self._tracker = arena, tracker
        self.clock = clock
        self.rollouts = rollouts
        slots = arena.num_slots
        self._last = {name: np.zeros(slots, kind) for name, kind in _LAST}  # the results of each slot's last step
        self._rows = np.full(slots, -1)  # the row of each slot's newest observation in its rollout; -1: none
        self._before = np.full(slots, -1)  # the row before it, with the slot's last action
        self._turns: list[Turn] = []  # the newest
        self._is_called = False  # whether callbacks were called for these turns
        self._kind_of = {slot: i for i, kind in enumerate(arena.kinds) for slot in kind.slots}
        self._numbers = np.full(arena.num_envs, -1)  # of the running episodes, with or without callbacks
        self._running: list[RunningEpisode | None] = [None] * arena.num_envs
        self._ended: dict[tuple[int, int], RunningEpisode] = {}  # until `logged` has taken their values
        self._cut: list[RunningEpisode] = []  # since the last collection
        self._new: list[RunningEpisode] = []
        self._moved: list[NDArray[np.int64]] = []  # envs with new results
        self._seconds = {CALLBACKS: 0.0}

    # -- a turn -------------------------------------------------------------------------------------------------

    def begin(self, turn: Turn, at: float, limit: Limit) -> None:
        """Create the episodes that a turn begins, if ``limit`` wants them.

        Args:
            turn: The turn.
            at: When it came, in seconds of collecting.
            limit: Decides which episodes callbacks are called for.
        """
        if turn.first is None or turn.episode is None:
            return
        begin = perf_counter()
        envs = self.arena.env_of[turn.slots[turn.first]]
        numbers = turn.episode[turn.first]
        for env, number in zip(envs.tolist(), numbers.tolist(), strict=True):
            if number == self._numbers[env]:
                continue  # an agent that appears later than others
            self._numbers[env] = number
            self._running[env] = None
            if limit.follows(env):
                episode = RunningEpisode(self, self._tracker.episode(env, number), at)
                self._running[env] = episode
                self._new.append(episode)
                self._call("on_episode_created", episode)
        self._seconds[CALLBACKS] += perf_counter() - begin

    def note(self, turn: Turn, shares: Sequence[Share], ended: NDArray[np.int64]) -> None:
        """Process a turn whose rows have been stored, and end the episodes of the envs ``ended``."""
        begin = perf_counter()
        if self._is_called:
            self._turns, self._is_called = [], False
        self._turns.append(turn)
        slots, first = turn.slots, turn.first
        new = slots[:0] if first is None else slots[first]
        for share in shares:
            own = share.turn.slots
            self._before[own] = self._rows[own]
            self._rows[own] = share.rollout.pending + share.start + np.arange(len(own))
        for name, _ in _LAST:
            given = getattr(turn, name)
            self._last[name][slots] = False if given is None else given
        self._before[new], self._last[col.REWARD][new] = -1, 0.0
        for slot in new.tolist():
            running = self._running[self.arena.env_of[slot]]
            if running is not None:
                agent = self.arena.agents[slot]
                running.agents[agent] = RunningAgent(self, slot, agent, self._tracker.module_of[slot])
        if self._calls["on_episode_step"]:
            self._moved.append(self.arena.env_of[slots])
        for env in ended.tolist():
            episode = self._running[env]
            if episode is not None:
                if turn.unacted_reward is not None:
                    episode.unacted_reward = float(np.nansum(turn.unacted_reward[self.arena.env_of == env]))
                episode.is_last_step = True
                self._call("on_episode_step", episode)
                self._call("on_episode_end", episode)
                episode.keep()
                self._ended[env, episode.number] = episode
                self._running[env] = None
        self._seconds[CALLBACKS] += perf_counter() - begin

    def call(self) -> None:
        """Call `on_episode_start` and `on_episode_step`, after all rows of the turns have been stored."""
        begin = perf_counter()
        new, self._new = self._new, []
        for episode in new:
            self._call("on_episode_start", episode)
        if self._moved:
            for env in dict.fromkeys(np.concatenate(self._moved).tolist()):
                moved = self._running[env]
                if moved is not None and moved not in new:
                    self._call("on_episode_step", moved)
            self._moved = []
        self._is_called = True
        self._seconds[CALLBACKS] += perf_counter() - begin

    def find_rows(self) -> None:
        """Find the slots' newest rows again, after the rollouts moved their rows."""
        for rollout in self.rollouts.values():
            if rollout.rows.size:
                slots = rollout.rows.columns[SLOT][: rollout.rows.size]
                is_its = np.array([module == rollout.module_id for module in self._tracker.module_of])
                mine = np.flatnonzero(is_its[slots])
                self._rows[slots[mine]] = mine  # if a slot has several rows, the last one counts

    @interruptible
    def segments(self, parts: Iterable[Experience]) -> None:
        """Call `on_segment` for the collected steps. Rows are unknown from here until `find_rows`."""
        self._rows[:] = self._before[:] = -1
        cut, self._cut = self._cut, []
        if not self._calls["on_segment"]:
            return
        begin = perf_counter()
        episodes = {e.id: e for e in (*self._ended.values(), *cut, *self._running) if e is not None}
        for exp in (part.numpy() for part in parts):
            for i, episode_id in enumerate(exp.segments.episode_id):
                if episode_id in episodes:
                    self._call("on_segment", episodes[episode_id], exp[i])
        self._seconds[CALLBACKS] += perf_counter() - begin

    def _call(self, event: str, episode: RunningEpisode, *before: Any) -> None:
        for call in self._calls[event]:
            try:
                call(*before, episode)
            except Exception as error:
                error.add_note(
                    f"in {type(call.__self__).__name__}.{event}, for the episode {episode.id} of env "
                    f"{episode.env_index}, after {episode.t} steps"
                )
                raise

    # -- cut episodes -------------------------------------------------------------------------------------------

    def cut(self, envs: NDArray[np.int64]) -> None:
        """End the running episodes of these envs, which failed."""
        for env in envs.tolist():
            episode, self._running[env] = self._running[env], None
            if episode is not None:
                episode.keep()
                self._cut.append(episode)

    def abandon(self) -> None:
        """Drop all running episodes: every env begins a new one."""
        self._numbers[:] = -1
        self._new, self._moved, self._cut = [], [], []
        finished = self._tracker.finished()
        self._ended = {key: episode for key, episode in self._ended.items() if key in finished}

    # -- for episodes -------------------------------------------------------------------------------------------

    def figures(self, slot: int) -> AgentFigures:
        """The figures of a slot's agent in its running episode."""
        tracker, last = self._tracker, self._last.values()
        return AgentFigures(int(tracker.t[slot]), float(tracker.total[slot]), *(values[slot].item() for values in last))

    def t(self, env: int) -> int:
        """The steps of an env in its running episode."""
        return int(self._tracker.clock[env] if self._tracker.named else self._tracker.t[env])

    def obs(self, slot: int) -> Any:
        """The newest observation of a slot, as its env returned it."""
        row, columns = int(self._rows[slot]), self.rollouts[self._tracker.module_of[slot]].rows.columns
        if row < 0 or columns[BLIND][row]:
            return None
        return _nested(self.arena.kinds[self._kind_of[slot]].obs_space, col.OBS, columns, row)

    def action(self, slot: int) -> Any:
        """The last action of a slot, as its module chose it."""
        row, rollout = int(self._before[slot]), self.rollouts[self._tracker.module_of[slot]]
        return None if row < 0 else _nested(rollout.module.action_space, col.ACTION, rollout.rows.columns, row)

    def info(self, slot: int) -> Any:
        """The newest info of a slot."""
        if self._rows[slot] < 0:
            return None
        for turn in reversed(self._turns):
            if slot in turn.slots:
                return self.arena.info_of(turn, slot)
        return {}

    def render(self, env: int) -> Any:
        """See `RunningEpisode.render`."""
        drawn = self.arena.env_at(env)
        if drawn is None:
            raise EnvError(
                "episode.render() can't render an env in a worker process: use no workers, or worker threads, or make "
                "clips with etude.clip."
            )
        begin = perf_counter()
        frame = drawn.render()
        seconds = perf_counter() - begin
        self._seconds[RENDER] = self._seconds.get(RENDER, 0.0) + seconds
        self._seconds[CALLBACKS] -= seconds
        return frame[env] if isinstance(drawn, VectorEnv) and frame is not None else frame

    # -- results ------------------------------------------------------------------------------------------------

    def spend(self, times: dict[str, float]) -> float:
        """Add the seconds spent in callbacks and in rendering since the last call to ``times``; return their sum."""
        spent, self._seconds = self._seconds, {CALLBACKS: 0.0}
        for name, seconds in spent.items():
            times[name] = times.get(name, 0.0) + seconds
        return sum(spent.values())

    def logged(self, finished: Finished) -> Finished:
        """``finished`` with the values that callbacks logged in these episodes."""
        custom: dict[str, list[float]] = {}
        histograms: dict[str, list[NDArray[np.float64]]] = {}
        media: dict[str, bytes] = {}
        for key in zip(finished.envs.tolist(), finished.numbers.tolist(), strict=True):
            episode = self._ended.pop(key, None)
            if episode is None:
                continue
            for name, (total, count) in episode.values.items():
                custom.setdefault(name, []).append(total / count)
            for name, parts in episode.histograms.items():
                histograms.setdefault(name, []).extend(parts)
            media.update(episode.media)
        return finished._replace(
            custom={name: np.array(values) for name, values in sorted(custom.items())},
            histograms={name: np.concatenate(parts) for name, parts in sorted(histograms.items())},
            media=media,
        )

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The states of callbacks and of running episodes: plain data and arrays.

        Episodes whose ``data`` holds anything else are left out. Callbacks whose ``state_dict`` fails are also left
        out; ``left_out`` has the reasons, by their names.
        """
        states: list[Any] = []
        left_out: dict[str, str] = {}
        for callback in self._callbacks:
            name = type(callback).__qualname__
            try:
                states.append([name, copy.deepcopy(callback.state_dict())])
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001  user code: everything else is still saved
                left_out[name] = f"its state_dict() failed ({type(error).__name__}: {error})"
        episodes = [*self._ended.values(), *(episode for episode in self._running if episode is not None)]
        return {
            "callbacks": states,
            "left_out": left_out,
            "episodes": [copy.deepcopy(e.state_dict()) for e in episodes if is_plain(e.data)],
            "numbers": self._numbers.copy(),
            "last": {name: values.copy() for name, values in self._last.items()},
        }

    def load_own_states(self, state: dict[str, Any]) -> None:
        """Restore the callbacks of a `state_dict`: each gets the state of one of its class, in order."""
        states = list(state["callbacks"])
        for callback in self._callbacks:
            found = next((pair for pair in states if pair[0] == type(callback).__qualname__), None)
            if found is not None:
                states.remove(found)
                callback.load_state_dict(found[1])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the running episodes of a `state_dict`."""
        self._numbers[:] = state["numbers"]
        for name, values in self._last.items():
            values[...] = state["last"][name]
        for kept in state["episodes"]:
            env, number = kept["env"], kept["number"]
            episode = RunningEpisode(self, self._tracker.episode(env, number), self.clock() - kept["duration"])
            episode.load_state_dict(kept)
            if episode.is_over:
                self._ended[env, number] = episode
            else:
                self._running[env] = episode


def is_plain(value: Any) -> bool:
    """Whether a value is plain data or an array that a checkpoint can hold."""
    if isinstance(value, Mapping):
        return all(map(is_plain, value.keys())) and all(map(is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufcSU"
    return value is None or isinstance(value, bool | int | float | str | bytes | np.number | np.bool_)


def _nested(space: Any, root: str, columns: Mapping[str, NDArray[Any]], row: int) -> Any:
    return Nester(space, root)(
        {name: host(columns[name][row : row + 1]).copy()[0] for name in col.under(columns, root)}
    )
