# SPDX-License-Identifier: Apache-2.0
"""Watch: follows running episodes, and calls callbacks."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from etude.envs import Arena, Turn
from etude.errors import EnvError
from etude.experience import Experience
from etude.runners.callbacks import EVENTS, Callback, overrides
from etude.runners.episodes import EpisodeBook, Finished
from etude.runners.quota import Quota
from etude.runners.routes import Part
from etude.runners.running import RunningAgent, RunningEpisode
from etude.runners.seats import Seats
from etude.runners.track import Track

RENDER = "render"
CALLBACKS = "callbacks"


class Watch:
    """Follows the episodes of a runner as its turns come, and calls what callbacks override.

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
        self.cast(tracks)
        self.clock = clock
        self._numbers = np.full(arena.num_envs, -1)  # of the episodes that run, followed or not
        self._running: list[RunningEpisode | None] = [None] * arena.num_envs
        self._ended: dict[tuple[int, int], RunningEpisode] = {}  # until they are told of as finished
        self._cut: list[RunningEpisode] = []  # since steps were last collected
        self._new: list[RunningEpisode] = []
        self._moved: list[NDArray[np.int64]] = []  # envs that show something
        self._seconds = {CALLBACKS: 0.0}

    def cast(self, tracks: Mapping[str | None, Track]) -> None:
        """Follow the agents of these modules."""
        self.seats = Seats(self._arena, tracks)
        self.modules = {name: track.module for name, track in tracks.items()}

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
        for slot, env, number in zip(slots.tolist(), envs.tolist(), numbers.tolist(), strict=True):
            if number == self._numbers[env]:
                continue  # an agent comes later than others
            self._numbers[env] = number
            self._running[env] = None
            self.seats.begin(env, slot)
            if quota is None or quota.owes(env):
                episode = RunningEpisode(self, self._book.episode(env, number), at)
                self._running[env] = episode
                self._new.append(episode)
                self._call("on_episode_created", episode)
        self._seconds[CALLBACKS] += perf_counter() - begin

    def shown(self, turn: Turn, parts: Sequence[Part]) -> None:
        """Take note of a turn that is in the logs, and end the episodes that it ends."""
        begin = perf_counter()
        self.seats.note(turn, parts)
        if turn.first is not None:
            for slot in turn.slots[turn.first].tolist():
                self._enter(slot)
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

    def _enter(self, slot: int) -> None:
        episode = self._running[self._arena.env_of[slot]]
        if episode is not None:
            agent = self._arena.agents[slot]
            episode.agents[agent] = RunningAgent(self, slot, agent, self.seats.module_id(slot))

    def after(self) -> None:
        """Start the episodes that have begun, and tell of the steps of the others: all turns are in the logs."""
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
        self.seats.all_noted()
        self._seconds[CALLBACKS] += perf_counter() - begin

    def segments(self, parts: Iterable[Experience]) -> None:
        """Steps were collected."""
        cut, self._cut = self._cut, []
        if not self._calls["on_segment"]:
            return
        begin = perf_counter()
        episodes = {e.id: e for e in (*self._ended.values(), *cut, *self._running) if e is not None}
        for exp in parts:
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
        finished = self._book.finished()
        self._ended = {key: episode for key, episode in self._ended.items() if key in finished}

    # -- what episodes ask for ----------------------------------------------------------------------------------

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
            "seats": self.seats.state_dict(),
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
        self._numbers[:] = state["numbers"]
        self.seats.load_state_dict(state["seats"])
        for kept in state["episodes"]:
            env, number = kept["env"], kept["number"]
            episode = RunningEpisode(self, self._book.episode(env, number), self.clock() - kept["duration"])
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
