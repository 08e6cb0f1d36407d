# SPDX-License-Identifier: Apache-2.0
"""TurnLoop: turns are taken from an arena into the logs, and answered, until a collection has what it wants."""

import warnings
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.columns import Columns
from etude.envs import Arena
from etude.errors import EtudeError
from etude.interruption import interruptible
from etude.runners.cast import Cast
from etude.runners.clock import Clock
from etude.runners.counting import Counter
from etude.runners.episodes import EpisodeBook, Key
from etude.runners.faults import check_chosen
from etude.runners.quota import Quota, Whole
from etude.runners.routes import Part
from etude.runners.watch import Watch

PHASES = ("env", "observe", "infer", "act", "note")
"""Where the time of turns goes: waiting for envs; connectors towards the module; the module; connectors back; keeping
what was lived through."""


class TurnLoop:
    """Lets a cast act in an arena, turn by turn.

    Args:
        arena: Where.
        cast: Who acts. Another may be put in its place between collections.
        book: Which episodes run.
        counter: Of steps.
        clock: Seconds of collecting.
        watch: Is told of all that happens; None: nobody is.
    """

    def __init__(
        self, arena: Arena, cast: Cast, book: EpisodeBook, counter: Counter, clock: Clock, watch: Watch | None
    ) -> None:
        self.arena = arena
        self.cast = cast
        self.book = book
        self.counter = counter
        self.clock = clock
        self.watch = watch
        self.parts: list[Part] = []
        """What the arena shows: in the logs, and not yet acted on."""
        self.overs: list[Key] = []
        """Episodes that have ended for all agents, but were not told of yet."""
        self.quota: Quota | None = None
        """Which episodes the running collection gives out; None: all, as far as they go."""
        self.times = dict.fromkeys(PHASES, 0.0)
        """Seconds by phase; with callbacks, also those in ``callbacks``, and where one of them draws, in ``render``."""
        self.turns = 0
        self.is_stopped = False
        """Another thread wants the running collection to end."""
        self._at = 0.0  # when the arena showed what it does
        self._warned = False

    # -- a collection -------------------------------------------------------------------------------------------

    def begin(self, quota: Quota | None) -> None:
        """Begin a collection in an arena that was just reset."""
        self.quota = quota
        self.book.abandon()
        self.counter.clear()
        self.overs.clear()
        self.cast.clear()
        if self.watch is not None:
            self.watch.abandon()
        self._receive()

    def resume(self, quota: Quota | None) -> None:
        """Begin one that goes on where the last ended.

        What was not acted on is taken into the logs once more, with the results that were kept for now.
        """
        self.quota = quota
        count = 0
        for part in self.parts:
            assert part.counted is not None
            count += int(np.count_nonzero(part.counted))
            part.start = part.track.note(part.turn, self._at, ~part.counted)
        self.counter.carry(count)
        if self.watch is not None:
            self.watch.seats.find()

    @interruptible
    def run_steps(self, num_steps: int) -> None:
        """Collect ``num_steps`` steps; the results of those that are too many are kept for the next collection."""
        while self.counter.steps < num_steps:
            self._act()
            self._receive()
        rows = [part.counted_rows() for part in self.parts]
        late = self.counter.late([part.turn.slots[r] for part, r in zip(self.parts, rows, strict=True)], num_steps)
        for part, some, is_late in zip(self.parts, rows, late, strict=True):
            _postpone(part, some[is_late])

    @interruptible
    def run_episodes(self, quota: Quota, wanted: int) -> None:
        """Collect until a quota has the steps or episodes that are wanted; of `Whole`, the others are kept."""
        if isinstance(quota, Whole):
            quota.start(wanted)
        while quota.is_owed:
            self._act()
            self._receive()
            if isinstance(quota, Whole) and not self._warned:
                self._warn_of_long_episodes(wanted)
        if isinstance(quota, Whole):
            for part in self.parts:
                _postpone(part, self._unfinished(part, quota))

    def _unfinished(self, part: Part, quota: Quota) -> NDArray[np.int64]:
        """The rows of a part with results in episodes that have not ended."""
        turn, rows = part.turn, part.counted_rows()
        if turn.episode is not None:
            return rows[~quota.delivered(self.arena.env_of[turn.slots[rows]], turn.episode[rows])]
        ended = np.zeros(len(turn.slots), bool)
        for flag in (turn.terminated, turn.truncated):
            if flag is not None:
                ended |= flag
        return rows[~ended[rows]]

    def _warn_of_long_episodes(self, wanted: int) -> None:
        held = sum(track.log.size for track in self.cast.tracks.values())
        if held > max(10 * wanted, 1000):
            self._warned = True
            warnings.warn(
                f"{held} steps of episodes that have not ended are held in memory, where {wanted} were asked for. If "
                "episodes may be that long, ask for more steps, or for fragments: whole_episodes=False.",
                stacklevel=4,
            )

    # -- a turn -------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Take what the arena shows into the logs."""
        if self.is_stopped:
            raise EtudeError("the collection was stopped.")
        begin = perf_counter()
        try:
            turns = self.arena.recv()
        except EtudeError as error:
            for part in self.parts:
                check_chosen(part.track.log, error)
            raise
        received = perf_counter()
        self._at, watch, book, quota = self.clock.now(), self.watch, self.book, self.quota
        self.parts = []
        for i, turn in enumerate(turns):
            if turn.lost is not None:
                self._cut(turn.lost)
            if turn.over is not None:
                self.overs += [(env, book.number_of(env)) for env in turn.over.tolist()]
            if quota is not None:
                quota.count(turn, *book.ends(turn))
            if turn.first is not None:
                book.begin(turn)
            if watch is not None:
                watch.begins(turn, self._at, quota)
            parts = self.cast.routes.parts(turn, i)
            for part in parts:
                part.start = part.track.note(part.turn, self._at)
            self.parts += parts
            if watch is not None:
                watch.shown(turn, parts)
        self.counter.count(turns)
        self.turns += 1
        times = self.times
        times["env"] += received - begin
        times["note"] += perf_counter() - received
        if watch is not None:
            watch.after()
            times["note"] -= watch.spend(times)

    def _act(self) -> None:
        """Answer what the arena shows."""
        times = self.times
        action: Columns = {}
        for i, part in enumerate(self.parts):
            track, whole = part.track, part.whole
            if not whole.waits:
                continue
            begin = perf_counter()
            if track.connectors.observes:
                seen = track.seen(part.turn)
                times["observe"] += perf_counter() - begin
                begin = perf_counter()
            else:
                seen = part.turn.obs
            chosen = track.act(part.turn, part.start, seen)
            chose = perf_counter()
            times["infer"] += chose - begin
            if track.connectors.acts:
                chosen = track.connectors.act(chosen)
                times["act"] += perf_counter() - chose
                chose = perf_counter()
            if part.rows is None:
                self.arena.send(whole, chosen)
            else:
                action = _put(action, chosen, part.rows, len(whole.slots))
                if i + 1 < len(self.parts) and self.parts[i + 1].whole is whole:
                    continue
                self.arena.send(whole, action)
                action = {}
            times["env"] += perf_counter() - chose

    def _cut(self, slots: NDArray[np.int64]) -> None:
        """The envs of these slots failed: their episodes end with the last step whose result came."""
        envs, numbers = self.book.running(slots)
        if self.watch is not None:
            self.watch.cut(envs)
        if self.quota is not None:
            self.quota.cut(envs, numbers)
        for track in self.cast.tracks.values():
            track.cut(slots)
        self.counter.cut(envs)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is shown and not yet acted on, and since when; plain data and arrays."""
        return {
            "counter": self.counter.state_dict(),
            "seconds": [self.clock.seconds, self._at],
            "parts": self.cast.routes.state_of(self.parts),
            "overs": [list(over) for over in self.overs],
        }

    def load_clock(self, state: Mapping[str, Any]) -> None:
        """Go on from the seconds of `state_dict`."""
        seconds, self._at = map(float, state["seconds"])
        self.clock.set(seconds)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict` of as many slots, but for what the arena shows: see `load_parts`."""
        self.counter.load_state_dict(state["counter"])
        self.overs = [(env, number) for env, number in state["overs"]]

    def load_parts(self, state: Mapping[str, Any]) -> None:
        """Take from an arena that goes on what it showed when `state_dict` was made."""
        self.parts = self.cast.routes.load_parts(state["parts"], self.arena.recv())


def _postpone(part: Part, late: NDArray[np.int64]) -> None:
    """Keep the results of ``late`` rows for the next collection."""
    part.counted = np.zeros(len(part.turn.slots), bool)
    if len(late):
        part.counted[late] = True
        part.track.silence(part.start + late)


def _put(whole: Columns, part: Columns, rows: NDArray[np.int64], count: int) -> Columns:
    """``whole`` with the rows of ``part`` put into it; made for ``count`` rows where it is empty."""
    for name, column in part.items():
        if name not in whole:
            whole[name] = np.zeros((count, *column.shape[1:]), column.dtype)
        whole[name][rows] = column
    return whole
