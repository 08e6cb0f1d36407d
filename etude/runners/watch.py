# SPDX-License-Identifier: Apache-2.0
"""Watch: follows running episodes, and calls callbacks."""

import copy
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from etude import columns as col
from etude.envs import Arena, Turn
from etude.errors import EnvError
from etude.experience import Experience
from etude.runners.callbacks import EVENTS, Callback, overrides
from etude.runners.episodes import EpisodeBook, Finished, Quota
from etude.runners.routes import Part
from etude.runners.running import RunningAgent, RunningEpisode
from etude.runners.track import BLIND, SLOT, Track
from etude.spaces import Nester

RENDER = "render"
CALLBACKS = "callbacks"


class Watch:
    """Follows the episodes of a runner as its turns come, and calls what callbacks override.

    What is known of agents stands in arrays by slot, kept without a loop over slots; what they were shown and did is
    looked up in the logs when it is asked for.

    Args:
        callbacks: In the order in which they are called.
        arena: Whose episodes they are.
        book: Which episodes run.
        tracks: By module id.
        clock: Seconds of collecting until now.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        arena: Arena,
        book: EpisodeBook,
        tracks: Mapping[str | None, Track],
        clock: Callable[[], float],
    ) -> None:
        self._callbacks = list(callbacks)
        self._calls = {event: [getattr(c, event) for c in callbacks if overrides(c, event)] for event in EVENTS}
        self._arena = arena
        self._book = book
        self._tracks = list(tracks.values())
        self._index = {id(track): i for i, track in enumerate(self._tracks)}
        self.modules = {name: track.module for name, track in tracks.items()}
        self.clock = clock
        num_slots = arena.num_slots
        self.steps = np.zeros(num_slots, np.int64)
        """``[num_slots]``: the steps of each slot's running episode whose results came; so for the next four."""
        self.returns = np.zeros(num_slots)
        self.rewards = np.zeros(num_slots)
        self.terminated, self.truncated = np.zeros(num_slots, bool), np.zeros(num_slots, bool)
        self._rows = np.full(num_slots, -1)  # in its track's log: what is shown; -1 is nowhere
        self._before = np.full(num_slots, -1)  # and the row before, with what was done
        self._track_of = np.zeros(num_slots, np.int64)
        self._env_t = np.zeros(arena.num_envs, np.int64)
        self._numbers = np.full(arena.num_envs, -1)  # of the episodes that run, followed or not
        self._running: list[RunningEpisode | None] = [None] * arena.num_envs
        self._ended: dict[tuple[int, int], RunningEpisode] = {}  # until they are told of as finished
        self._turns: list[Turn] = []  # of the newest moment
        self._all_shown = False  # that moment is past
        self._new: list[RunningEpisode] = []
        self._moved: list[NDArray[np.int64]] = []  # envs that made a step, and are not over
        self._kind_of = {slot: i for i, kind in enumerate(arena.kinds) for slot in kind.slots}
        self._nest_obs = [Nester(kind.obs_space, col.OBS) for kind in arena.kinds]
        self._nest_action = [Nester(track.module.action_space, col.ACTION) for track in self._tracks]
        self._seconds = {CALLBACKS: 0.0}

    # -- a turn -------------------------------------------------------------------------------------------------

    def begins(self, turn: Turn, at: float, quota: Quota | None) -> None:
        """Create the episodes that a turn begins, which came ``at`` so many seconds of collecting.

        Where whole episodes are collected, those that nobody asked for are left out.
        """
        if turn.first is None:
            return
        begin = perf_counter()
        rows = np.flatnonzero(turn.first)
        slots = turn.slots[rows]
        envs = self._arena.env_of[slots]
        numbers = self._book.begun[slots] - 1 if turn.episode is None else turn.episode[rows]
        self.steps[slots] = 0
        for env, number in zip(envs.tolist(), numbers.tolist(), strict=True):
            if number == self._numbers[env]:
                continue  # an agent comes later than others
            self._numbers[env] = number
            self._env_t[env] = 0
            self._running[env] = None
            if quota is None or quota.owes(env):
                episode = RunningEpisode(self, self._book.episode(env, number), at)
                self._running[env] = episode
                self._new.append(episode)
                self._call("on_episode_created", episode)
        self._seconds[CALLBACKS] += perf_counter() - begin

    def shown(self, turn: Turn, parts: Sequence[Part]) -> None:
        """Take note of a turn that is in the logs, and end the episodes that it ends."""
        begin = perf_counter()
        if self._all_shown:
            self._turns, self._all_shown = [], False
        self._turns.append(turn)
        for part in parts:
            self._note(part)
        if self._calls["on_episode_step"]:
            self._moved.append(self._arena.env_of[turn.slots])
        for env in self._book.ends(turn)[0].tolist():
            episode = self._running[env]
            if episode is not None:
                self._call("on_episode_step", episode)
                self._call("on_episode_end", episode)
                episode.keep()
                self._ended[env, episode.number] = episode
                self._running[env] = None
        self._seconds[CALLBACKS] += perf_counter() - begin

    def _note(self, part: Part) -> None:
        turn, track = part.turn, part.track
        slots, first = turn.slots, turn.first
        self._before[slots] = self._rows[slots]
        self._rows[slots] = np.arange(part.start, part.start + len(slots))
        if turn.env_t is not None:
            self._env_t[self._arena.env_of[slots]] = turn.env_t
        self.terminated[slots] = False if turn.terminated is None else turn.terminated
        self.truncated[slots] = False if turn.truncated is None else turn.truncated
        self.rewards[slots] = turn.reward
        if first is None or not first.any():
            self.steps[slots] += 1
            self.returns[slots] += turn.reward
            return
        begun = slots[first]
        self.rewards[begun] = 0.0
        self.steps[slots] += 1
        self.returns[slots] += self.rewards[slots]
        self.steps[begun], self.returns[begun] = 0, 0.0
        self._before[begun] = -1
        self._track_of[begun] = self._index[id(track)]
        for slot in begun.tolist():
            self._enter(slot)

    def _enter(self, slot: int) -> None:
        episode = self._running[self._arena.env_of[slot]]
        if episode is not None:
            agent = self._arena.agents[slot]
            module_id = self._tracks[self._track_of[slot]].module_id
            episode.agents[agent] = RunningAgent(self, slot, agent, module_id)

    def after(self) -> None:
        """Start the episodes that have begun, and take note of the steps of the others: all turns are in the logs."""
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
        self._all_shown = True
        self._seconds[CALLBACKS] += perf_counter() - begin

    def segments(self, exp: Experience, envs: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """Steps were collected: segments of episodes that are the ``numbers``-th of ``envs``."""
        if not self._calls["on_segment"]:
            return
        begin = perf_counter()
        for i, (env, number) in enumerate(zip(envs.tolist(), numbers.tolist(), strict=True)):
            episode = self._running[env]
            if episode is None or episode.number != number:
                episode = self._ended.get((env, number))
            if episode is not None:
                self._call("on_segment", episode, exp[i])
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

    def lose(self, slots: NDArray[np.int64]) -> None:
        """The running episodes of these slots broke off."""
        for env in set(self._arena.env_of[slots].tolist()):
            self._running[env] = None

    def abandon(self) -> None:
        """Every env begins a new episode, whatever its number is."""
        self._numbers[:] = -1
        self._new, self._moved, self._turns = [], [], []
        finished = self._book.finished()
        self._ended = {key: episode for key, episode in self._ended.items() if key in finished}

    def forget(self) -> None:
        """The logs have been cut: nothing is where it was."""
        self._rows[:] = -1
        self._before[:] = -1

    def find(self) -> None:
        """Find again in the logs what is shown."""
        for i, track in enumerate(self._tracks):
            if track.log.size:
                slots = track.log.columns[SLOT][: track.log.size]
                mine = np.flatnonzero(self._track_of[slots] == i)
                self._rows[slots[mine]] = mine  # where a slot has several rows, the last one counts

    # -- what episodes ask for ----------------------------------------------------------------------------------

    def t(self, env: int) -> int:
        """The steps that an env made in its running episode."""
        return int(self._env_t[env] if self._book.named else self.steps[env])

    def obs(self, slot: int) -> Any:
        """What a slot is shown, as its env gave it."""
        row, log = int(self._rows[slot]), self._track(slot).log
        if row < 0 or log.flag(BLIND)[row]:
            return None
        nest = self._nest_obs[self._kind_of[slot]]
        return nest({name: log.columns[name][row].copy() for name in col.under(log.columns, col.OBS)})

    def action(self, slot: int) -> Any:
        """What was done before, as its module chose it."""
        row, log = int(self._before[slot]), self._track(slot).log
        if row < 0:
            return None
        nest = self._nest_action[self._track_of[slot]]
        return nest({name: log.columns[name][row].copy() for name in col.under(log.columns, col.ACTION)})

    def info(self, slot: int) -> Any:
        """What the env said beside."""
        for turn in reversed(self._turns):
            if slot in turn.slots:
                return self._arena.info_of(turn, slot)
        return {}

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

    def _track(self, slot: int) -> Track:
        return self._tracks[int(self._track_of[slot])]

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

        Episodes whose ``data`` holds anything else are left out.
        """
        episodes = [*self._ended.values(), *(episode for episode in self._running if episode is not None)]
        return {
            "callbacks": [[type(c).__qualname__, copy.deepcopy(c.state_dict())] for c in self._callbacks],
            "episodes": [copy.deepcopy(e.state_dict()) for e in episodes if is_plain(e.data)],
            **{name: getattr(self, name).copy() for name in _ARRAYS},
        }

    def load_callbacks(self, state: dict[str, Any]) -> None:
        """Let callbacks go on from `state_dict`: each gets the state of one of its class, in their order."""
        states = list(state["callbacks"])
        for callback in self._callbacks:
            found = next((pair for pair in states if pair[0] == type(callback).__qualname__), None)
            if found is not None:
                states.remove(found)
                callback.load_state_dict(found[1])

    def load_episodes(self, state: dict[str, Any]) -> None:
        """Go on following the episodes of `state_dict`."""
        for name in _ARRAYS:
            getattr(self, name)[:] = state[name]
        for kept in state["episodes"]:
            env, number = kept["env"], kept["number"]
            episode = RunningEpisode(self, self._book.episode(env, number), self.clock() - kept["duration"])
            episode.load_state_dict(kept)
            if episode.is_over:
                self._ended[env, number] = episode
            else:
                self._running[env] = episode


_ARRAYS = ("steps", "returns", "rewards", "terminated", "truncated", "_track_of", "_env_t", "_numbers")


def is_plain(value: Any) -> bool:
    """Whether a checkpoint can hold it."""
    if isinstance(value, Mapping):
        return all(map(is_plain, value.keys())) and all(map(is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufcSU"
    return value is None or isinstance(value, bool | int | float | str | bytes | np.number | np.bool_)
