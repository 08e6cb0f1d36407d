# SPDX-License-Identifier: Apache-2.0
"""Callbacks: code of one's own that is called while episodes run, what it sees of them, and what calls it."""

import copy
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import ArrayLike, NDArray

from etude import columns as col
from etude.envs import Arena, Turn
from etude.errors import DataError, EnvError, EtudeError, SettingsError
from etude.experience import Experience
from etude.experience.arrays import host
from etude.modules import Module
from etude.runners.episodes import Episode, EpisodeTracker, Finished
from etude.runners.limits import Limit
from etude.runners.mapping import Share
from etude.runners.media import MediaLike, encoded
from etude.runners.rollout import BLIND, SLOT, Rollout
from etude.spaces import Nester


class _Kept(NamedTuple):
    """What stays known of an agent when its episode is over."""

    steps: int
    total: float
    reward: float
    terminated: bool
    truncated: bool


class RunningAgent:
    """One agent in a running episode.

    `obs`, `action` and `info` are there in `Callback.on_episode_start`, `Callback.on_episode_step` and
    `Callback.on_episode_end`; None at other times.
    """

    __slots__ = ("_kept", "_slot", "_source", "id", "module_id")

    def __init__(
        self,
        source: "CallbackRunner",
        slot: int,
        agent_id: str | None,
        module_id: str | None,
        kept: _Kept | None = None,
    ) -> None:
        self._source = source
        self._slot = slot
        self._kept = kept
        self.id = agent_id
        """Its name; None where agents have none."""
        self.module_id = module_id
        """What acts for it; None for a module without an id."""

    @property
    def steps(self) -> int:
        """The steps that it made in this episode, and whose results are known."""
        return int(self._source.figure("steps", self._slot)) if self._kept is None else self._kept.steps

    @property
    def return_so_far(self) -> float:
        """The sum of what they brought."""
        return float(self._source.figure("total", self._slot)) if self._kept is None else self._kept.total

    @property
    def reward(self) -> float:
        """What the last of them brought; 0.0 before there is one."""
        return float(self._source.figure("reward", self._slot)) if self._kept is None else self._kept.reward

    @property
    def terminated(self) -> bool:
        """The episode has ended for it, by the env's own rules."""
        return bool(self._source.figure("terminated", self._slot)) if self._kept is None else self._kept.terminated

    @property
    def truncated(self) -> bool:
        """The episode was stopped for it, from outside."""
        return bool(self._source.figure("truncated", self._slot)) if self._kept is None else self._kept.truncated

    @property
    def obs(self) -> Any:
        """What it was shown last, as the env gave it, nested where the space is; None where the env gave nothing."""
        return self._source.obs(self._slot) if self._kept is None else None

    @property
    def action(self) -> Any:
        """What its module chose in the last of its steps, nested as the module's action space; None before there is
        one. The env may have got another, behind connectors."""
        return self._source.action(self._slot) if self._kept is None else None

    @property
    def info(self) -> Any:
        """What the env said beside `obs`: a dict; {} where it said nothing, and None where worker processes keep it."""
        return self._source.info(self._slot) if self._kept is None else None

    def keep(self) -> None:
        """Know no more than this from now on."""
        self._kept = _Kept(self.steps, self.return_so_far, self.reward, self.terminated, self.truncated)

    def state(self) -> list[Any]:
        """For the episode's state."""
        return [self._slot, self.id, self.module_id, None if self._kept is None else list(self._kept)]


class RunningEpisode:
    """An episode that callbacks are called for, from its beginning until it is over.

    ``obs``, ``action``, ``reward``, ``info``, ``terminated`` and ``truncated`` are of its only agent; where there are
    several, ask one of ``agents``.
    """

    def __init__(self, source: "CallbackRunner", episode: Episode, began: float) -> None:
        self._source = source
        self._began = began
        self._over: tuple[int, float] | None = None
        self.id = episode.id
        """As in ``episode_id`` of Experience."""
        self.env_index = episode.env
        """Which copy of the env, from 0."""
        self.number = episode.number
        """Which of that copy's episodes, from 0."""
        self.agents: dict[str | None, RunningAgent] = {}
        """Those that were shown something in it so far, by name; None is that of an agent without one."""
        self.data: dict[Any, Any] = {}
        """Yours, for notes from one call to the next. It is saved with a run where it holds plain data and arrays only;
        else a resumed run does not follow the episode any more."""
        self.values: dict[str, tuple[float, int]] = {}
        """What was logged as numbers: their sum and how many there were."""
        self.histograms: dict[str, list[NDArray[np.float64]]] = {}
        """What was logged as histograms: arrays of values."""
        self.media: dict[str, bytes] = {}
        """What was logged as pictures: PNGs and GIFs, the newest of each name."""

    # -- what is known of it ------------------------------------------------------------------------------------

    @property
    def env(self) -> Any:
        """The env object. Where copies step as one ``VectorEnv`` of their own making, that; None where it lives in
        another process."""
        return self._source.env_at(self.env_index)

    @property
    def modules(self) -> Mapping[str | None, Module]:
        """All modules by id; one alone without an id is at None."""
        return {name: rollout.module for name, rollout in self._source.rollouts.items()}

    @property
    def t(self) -> int:
        """The steps that the env made in it."""
        return self._source.t(self.env_index) if self._over is None else self._over[0]

    @property
    def duration(self) -> float:
        """Seconds since it began, those left out in which nothing was collected."""
        return self._source.clock() - self._began if self._over is None else self._over[1]

    @property
    def is_over(self) -> bool:
        """It has ended, and `Callback.on_episode_end` was called for it."""
        return self._over is not None

    @property
    def return_so_far(self) -> float:
        """The sum of all rewards, of all agents."""
        return sum(agent.return_so_far for agent in self.agents.values())

    @property
    def obs(self) -> Any:
        """Of the only agent, see `RunningAgent.obs`."""
        return self._only.obs

    @property
    def action(self) -> Any:
        """Of the only agent, see `RunningAgent.action`."""
        return self._only.action

    @property
    def reward(self) -> float:
        """Of the only agent, see `RunningAgent.reward`."""
        return self._only.reward

    @property
    def info(self) -> Any:
        """Of the only agent, see `RunningAgent.info`."""
        return self._only.info

    @property
    def terminated(self) -> bool:
        """Of the only agent, see `RunningAgent.terminated`."""
        return self._only.terminated

    @property
    def truncated(self) -> bool:
        """Of the only agent, see `RunningAgent.truncated`."""
        return self._only.truncated

    @property
    def _only(self) -> RunningAgent:
        if len(self.agents) != 1 or None not in self.agents:
            raise EtudeError(
                f"the episode has the agents {list(self.agents)}: say which is meant, as in episode.agents[name].obs."
                if self.agents
                else "no agent is in the episode yet: wait for on_episode_start."
            )
        return self.agents[None]

    def render(self) -> Any:
        """What the env draws now. The time that it takes is reported as ``render``.

        Raises:
            EnvError: the env lives in another process.
        """
        return self._source.render(self.env_index)

    # -- what is logged -----------------------------------------------------------------------------------------

    def log(self, name: str, value: float) -> None:
        """Log a figure of the episode: results have it as ``custom``, with mean, least and greatest over episodes.

        Logged several times in one episode, their mean is its figure.

        Raises:
            DataError: it is no finite number.
        """
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = np.nan
        if not np.isfinite(number):
            raise DataError(f"episode.log({name!r}, {value!r}): the value must be a finite number.")
        total, count = self.values.get(name, (0.0, 0))
        self.values[name] = (total + number, count + 1)

    def log_histogram(self, name: str, values: ArrayLike) -> None:
        """Log any number of values, of which TensorBoard shows how they are spread over all episodes of an iteration.

        Raises:
            DataError: they are no finite numbers.
        """
        try:
            array = np.array(values, np.float64).reshape(-1)
        except (TypeError, ValueError):
            array = np.full(1, np.nan)
        if not np.isfinite(array).all():
            raise DataError(f"episode.log_histogram({name!r}, ...): the values must be finite numbers.")
        self.histograms.setdefault(name, []).append(array)

    def log_media(self, name: str, media: MediaLike, *, fps: float = 30.0) -> None:
        """Log a picture or a clip, which TensorBoard shows. Of each iteration, the newest by each name is kept.

        Args:
            name: What it is called.
            media: A frame, ``[H, W, 3]`` or whatever envs draw; a list of frames or ``[T, H, W, C]``; or a figure of
                matplotlib's, which is yours to close.
            fps: Frames a second.

        Raises:
            DataError: it is none of these.
        """
        try:
            self.media[name] = encoded(media, fps)
        except DataError as error:
            raise DataError(f"episode.log_media({name!r}, ...) takes a frame, frames or a figure: {error}") from error

    # -- for those who call callbacks ---------------------------------------------------------------------------

    def keep(self) -> None:
        """Know no more than this from now on: the episode is over."""
        for agent in self.agents.values():
            agent.keep()
        self._over = (self.t, self.duration)

    def state_dict(self) -> dict[str, Any]:
        """All that is known of it, but for what the arena and the logs know."""
        return {
            "env": self.env_index,
            "number": self.number,
            "agents": [agent.state() for agent in self.agents.values()],
            "duration": self.duration,
            "over": None if self._over is None else self._over[0],
            "values": {name: list(pair) for name, pair in self.values.items()},
            "histograms": {name: np.concatenate(parts) for name, parts in self.histograms.items()},
            "media": dict(self.media),
            "data": self.data,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        for slot, name, module_id, kept in state["agents"]:
            self.agents[name] = RunningAgent(
                self._source, slot, name, module_id, None if kept is None else _Kept(*kept)
            )
        self._over = None if state["over"] is None else (state["over"], state["duration"])
        self.values = {name: (total, count) for name, (total, count) in state["values"].items()}
        self.histograms = {name: [values] for name, values in state["histograms"].items()}
        self.media, self.data = dict(state["media"]), state["data"]


EVENTS = ("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end", "on_segment")


class Callback:
    """Code of one's own that is called while episodes run. Does nothing itself; what is not overridden costs nothing.

    For an episode the calls come in this order: `on_episode_created`, `on_episode_start`, `on_episode_step` after each
    step of its env, the last one included, `on_episode_end`; and `on_segment` whenever steps of it are collected, which
    happens after those steps, and may be after its end. Of several callbacks, the first one given is called first, each
    time.

    For an episode that is cut because its env failed, only `on_segment` is still called, with the steps before; for one
    that is abandoned because whole episodes are collected next, nothing more. What was logged in it counts for nothing.
    Where whole episodes are collected, episodes beyond those asked for are not followed.

    ``__init__`` keeps its arguments as attributes of the same names: so a checkpoint can make the callback again. An
    error goes through, with a note of where it came from.
    """

    def on_episode_created(self, episode: RunningEpisode) -> None:
        """An episode begins. No agent is in it yet: nobody knows which modules act in it, nor what is seen first.

        The env has been reset by then.
        """

    def on_episode_start(self, episode: RunningEpisode) -> None:
        """The first observations are there, and it is known which modules act."""

    def on_episode_step(self, episode: RunningEpisode) -> None:
        """The env made a step, and what it brought is there."""

    def on_episode_end(self, episode: RunningEpisode) -> None:
        """The episode has ended for all its agents. The env may have been reset by then, and is not in its last state.

        For what the env knows of the end, look at ``episode.info``, or into the env in `on_episode_step`.
        """

    def on_segment(self, segment: Experience, episode: RunningEpisode) -> None:
        """Steps of one agent were collected.

        Args:
            segment: One segment, a view: as it is learned from and recorded.
            episode: The episode that it is of, which may have ended.
        """

    def state_dict(self) -> dict[str, Any]:
        """What must not be lost when the run is saved and goes on later: plain data and arrays."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""


CallbackLike: TypeAlias = str | type[Callback] | Callback
"""``module:Class``, a class, which is made without arguments, or an object, which is used as it is."""


def callback_from(spec: CallbackLike) -> Callback:
    """Make a callback.

    Raises:
        SettingsError: it can't be found or made, or is no callback.
    """
    found: Any = _find(spec) if isinstance(spec, str) else spec
    if isinstance(found, type) and issubclass(found, Callback):
        try:
            return found()
        except TypeError as error:
            raise SettingsError(
                f"the callback {found.__name__} can't be made without arguments: {error}. Give an object of it."
            ) from error
    if not isinstance(found, Callback):
        raise SettingsError(
            f"{spec!r} is no callback: give an object or a class that inherits from etude.Callback, or `module:Class`."
        )
    return found


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"the callback {name!r} can't be imported ({error}): write `module:Class`, with the module's folder on "
            "PYTHONPATH."
        ) from error
    return found


def overrides(callback: Callback, method: str) -> bool:
    """Whether a callback does anything in a method of `Callback`."""
    return getattr(type(callback), method) is not getattr(Callback, method)


class GameReturns(Callback):
    """Logs ``game_return`` where an episode is one life of a game, as with the lives-based wrappers of Atari games.

    The env says in its infos, as ``lives``, how many are left. The return of a game is the sum of those of its lives;
    the episode's own return stays that of a life. A game ends with its last life, or when it is truncated. One that is
    not played to its end, as after a resume in new episodes, counts for nothing.
    """

    def __init__(self) -> None:
        self._games: dict[int, tuple[float, int]] = {}  # by env: the return of the lives lost, and the lives left

    def on_episode_start(self, episode: RunningEpisode) -> None:
        """Forgets the lives before, where this one is not of the same game."""
        _, left = self._games.get(episode.env_index, (0.0, 0))
        if (episode.info or {}).get("lives", left) > left:
            self._games.pop(episode.env_index, None)

    def on_episode_end(self, episode: RunningEpisode) -> None:
        """Adds up, and logs at the end of the game."""
        total, _ = self._games.pop(episode.env_index, (0.0, 0))
        total, left = total + episode.return_so_far, _lives(episode)
        if left and not episode.truncated:
            self._games[episode.env_index] = (total, left)
        else:
            episode.log("game_return", total)

    def state_dict(self) -> dict[str, Any]:
        """The games that are being played."""
        return {"games": [[env, total, left] for env, (total, left) in self._games.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._games = {env: (total, left) for env, total, left in state["games"]}


def _lives(episode: RunningEpisode) -> int:
    info = episode.info
    if not isinstance(info, dict) or "lives" not in info:
        said = "which worker processes keep to themselves" if info is None else f"which were {sorted(info)}"
        raise EnvError(f"GameReturns needs `lives` in the infos of the env, {said}. Leave it out for this env.")
    return int(info["lives"])


RENDER = "render"
CALLBACKS = "callbacks"
_LAST = ((col.REWARD, np.float64), (col.TERMINATED, np.bool_), (col.TRUNCATED, np.bool_))


class CallbackRunner:
    """Follows the episodes of a runner as its turns come, and calls what callbacks override.

    Args:
        callbacks: In the order in which they are called.
        arena: Whose episodes they are.
        tracker: Which episodes run, and how far.
        clock: Seconds of collecting until now.
        rollouts: By module id: what the slots were shown, and did.
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
        self._calls = {event: [getattr(c, event) for c in callbacks if overrides(c, event)] for event in EVENTS}
        self._arena, self._tracker = arena, tracker
        self.clock = clock
        self.rollouts = rollouts
        slots = arena.num_slots
        self._last = {name: np.zeros(slots, kind) for name, kind in _LAST}  # what the last step of each slot brought
        self._rows = np.full(slots, -1)  # in its rollout: what is shown; -1 is nowhere
        self._before = np.full(slots, -1)  # and the row before, with what was done
        self._turns: list[Turn] = []  # the newest
        self._is_called = False  # for these
        self._kind_of = {slot: i for i, kind in enumerate(arena.kinds) for slot in kind.slots}
        self._numbers = np.full(arena.num_envs, -1)  # of the episodes that run, followed or not
        self._running: list[RunningEpisode | None] = [None] * arena.num_envs
        self._ended: dict[tuple[int, int], RunningEpisode] = {}  # until they are told of as finished
        self._cut: list[RunningEpisode] = []  # since steps were last collected
        self._new: list[RunningEpisode] = []
        self._moved: list[NDArray[np.int64]] = []  # envs that show something
        self._seconds = {CALLBACKS: 0.0}

    # -- a turn -------------------------------------------------------------------------------------------------

    def begin(self, turn: Turn, at: float, limit: Limit) -> None:
        """Create the episodes that a turn begins, which came ``at`` so many seconds of collecting.

        Where whole episodes are collected, those that nobody asked for are left out.
        """
        if turn.first is None:
            return
        begin = perf_counter()
        envs = self._arena.env_of[turn.slots[turn.first]]
        numbers = self._tracker.number_in(turn)[turn.first]
        for env, number in zip(envs.tolist(), numbers.tolist(), strict=True):
            if number == self._numbers[env]:
                continue  # an agent comes later than others
            self._numbers[env] = number
            self._running[env] = None
            if limit.follows(env):
                episode = RunningEpisode(self, self._tracker.episode(env, number), at)
                self._running[env] = episode
                self._new.append(episode)
                self._call("on_episode_created", episode)
        self._seconds[CALLBACKS] += perf_counter() - begin

    def note(self, turn: Turn, shares: Sequence[Share], ended: NDArray[np.int64]) -> None:
        """Take note of a turn whose rows were kept, and end the episodes of the envs ``ended``."""
        begin = perf_counter()
        if self._is_called:
            self._turns, self._is_called = [], False
        self._turns.append(turn)
        slots, first = turn.slots, turn.first
        new = slots[:0] if first is None else slots[first]
        for share in shares:
            own = share.turn.slots
            self._before[own] = self._rows[own]
            self._rows[own] = np.arange(share.start, share.start + len(own))
        for name, _ in _LAST:
            given = getattr(turn, name)
            self._last[name][slots] = False if given is None else given
        self._before[new], self._last[col.REWARD][new] = -1, 0.0
        for slot in new.tolist():
            running = self._running[self._arena.env_of[slot]]
            if running is not None:
                agent = self._arena.agents[slot]
                running.agents[agent] = RunningAgent(self, slot, agent, self._tracker.module_of[slot])
        if self._calls["on_episode_step"]:
            self._moved.append(self._arena.env_of[slots])
        for env in ended.tolist():
            episode = self._running[env]
            if episode is not None:
                self._call("on_episode_step", episode)
                self._call("on_episode_end", episode)
                episode.keep()
                self._ended[env, episode.number] = episode
                self._running[env] = None
        self._seconds[CALLBACKS] += perf_counter() - begin

    def call(self) -> None:
        """Start the episodes that have begun, and tell of the steps of the others: all rows of the turns are kept."""
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
        """Find again what slots are shown: rows are not where they were."""
        for rollout in self.rollouts.values():
            if rollout.rows.size:
                slots = rollout.rows.columns[SLOT][: rollout.rows.size]
                is_its = np.array([module == rollout.module_id for module in self._tracker.module_of])
                mine = np.flatnonzero(is_its[slots])
                self._rows[slots[mine]] = mine  # where a slot has several rows, the last one counts

    def segments(self, parts: Iterable[Experience]) -> None:
        """Steps were given out, and what slots are shown is not known until they are found again."""
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

    # -- what breaks off ----------------------------------------------------------------------------------------

    def cut(self, envs: NDArray[np.int64]) -> None:
        """The running episodes of these envs were cut, as the envs failed."""
        for env in envs.tolist():
            episode, self._running[env] = self._running[env], None
            if episode is not None:
                episode.keep()
                self._cut.append(episode)

    def abandon(self) -> None:
        """Every env begins a new episode, whatever its number is."""
        self._numbers[:] = -1
        self._new, self._moved, self._cut = [], [], []
        finished = self._tracker.finished()
        self._ended = {key: episode for key, episode in self._ended.items() if key in finished}

    # -- what episodes ask for ----------------------------------------------------------------------------------

    def figure(self, name: str, slot: int) -> Any:
        """Of the running episode of a slot: ``steps``, ``total``, or what its last step brought."""
        values = {"steps": self._tracker.t, "total": self._tracker.total}
        return (values[name] if name in values else self._last[name])[slot].item()

    def t(self, env: int) -> int:
        """The steps that an env made in its running episode."""
        return int(self._tracker.clock[env] if self._tracker.named else self._tracker.t[env])

    def obs(self, slot: int) -> Any:
        """What a slot is shown, as its env gave it."""
        row, columns = int(self._rows[slot]), self._rollout(slot).rows.columns
        if row < 0 or (BLIND in columns and columns[BLIND][row]):
            return None
        return _nested(self._arena.kinds[self._kind_of[slot]].obs_space, col.OBS, columns, row)

    def action(self, slot: int) -> Any:
        """What was done before, as its module chose it."""
        row, rollout = int(self._before[slot]), self._rollout(slot)
        return None if row < 0 else _nested(rollout.module.action_space, col.ACTION, rollout.rows.columns, row)

    def info(self, slot: int) -> Any:
        """What the env said beside."""
        if self._rows[slot] < 0:
            return None
        for turn in reversed(self._turns):
            if slot in turn.slots:
                return self._arena.info_of(turn, slot)
        return {}

    def _rollout(self, slot: int) -> Rollout:
        module_id = self._tracker.module_of[slot]
        return self.rollouts[module_id]

    def env_at(self, env: int) -> Any:
        """The env object."""
        return self._arena.env_at(env)

    def render(self, env: int) -> Any:
        """What an env draws; see `RunningEpisode.render`."""
        drawn = self.env_at(env)
        if drawn is None:
            raise EnvError(
                "episode.render() can't draw an env that lives in a worker process: let envs live here, or in threads, "
                "or make clips with etude.clip."
            )
        begin = perf_counter()
        frame = drawn.render()
        seconds = perf_counter() - begin
        self._seconds[RENDER] = self._seconds.get(RENDER, 0.0) + seconds
        self._seconds[CALLBACKS] -= seconds
        return frame[env] if isinstance(drawn, VectorEnv) and frame is not None else frame

    # -- what is told -------------------------------------------------------------------------------------------

    def spend(self, times: dict[str, float]) -> float:
        """Add the seconds spent since this was last asked to ``times``, and give their sum: in callbacks; drawing."""
        spent, self._seconds = self._seconds, {CALLBACKS: 0.0}
        for name, seconds in spent.items():
            times[name] = times.get(name, 0.0) + seconds
        return sum(spent.values())

    def logged(self, finished: Finished) -> Finished:
        """With what callbacks logged in these episodes."""
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
        """What callbacks keep, and the episodes that they follow: plain data and arrays.

        Episodes whose ``data`` holds anything else are left out. So are callbacks whose ``state_dict`` fails:
        ``left_out`` has the reasons, by their names.
        """
        states, left_out = self._states()
        episodes = [*self._ended.values(), *(episode for episode in self._running if episode is not None)]
        return {
            "callbacks": states,
            "left_out": left_out,
            "episodes": [copy.deepcopy(e.state_dict()) for e in episodes if is_plain(e.data)],
            "numbers": self._numbers.copy(),
            "last": {name: values.copy() for name, values in self._last.items()},
        }

    def _states(self) -> tuple[list[Any], dict[str, str]]:
        states: list[Any] = []
        left_out: dict[str, str] = {}
        for callback in self._callbacks:
            name = type(callback).__qualname__
            try:
                states.append([name, copy.deepcopy(callback.state_dict())])
            except Exception as error:  # noqa: BLE001  a user's own code: the rest is saved all the same
                left_out[name] = f"its state_dict() failed ({type(error).__name__}: {error})"
        return states, left_out

    def load_own_states(self, state: dict[str, Any]) -> None:
        """Let callbacks go on from `state_dict`: each gets the state of one of its class, in their order."""
        states = list(state["callbacks"])
        for callback in self._callbacks:
            found = next((pair for pair in states if pair[0] == type(callback).__qualname__), None)
            if found is not None:
                states.remove(found)
                callback.load_state_dict(found[1])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on following the episodes of `state_dict`."""
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
    """Whether a checkpoint can hold it."""
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
