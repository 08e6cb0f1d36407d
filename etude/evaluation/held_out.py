# SPDX-License-Identifier: Apache-2.0
"""Held-out data as chunks of whole episodes, in bounded memory, as often as they are asked for."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience, Segments
from etude.experience.experience import without_lookback
from etude.recordings import Recording
from etude.recordings.pieces import copied, pieces, row_bytes

if TYPE_CHECKING:
    from etude.recordings import Source
    from etude.recordings.screening import OnBad

HeldOutLike: TypeAlias = "str | os.PathLike[str] | Source | Recording | Experience"
"""Where held-out episodes are: a path, or data that is open or in memory."""

CHUNK_ROWS = 16_384
CHUNK_BYTES = 64 * 2**20

NOT_DONE = "not done"
BROKEN = "with a gap or without their beginning"
NO_MODULE = "of agents that no module acts for"


class HeldOut:
    """The whole episodes of one module's agents.

    An agent's part in an episode is whole where its first step is known and its last one is done. Pieces of it are
    joined, in whatever order they come; those that wait for others are held in memory. Others are left out, and
    counted.

    Args:
        data: Where they are.
        columns: The step columns to read.
        mine: Says of each segment whether it is this module's.
        nobodys: Says of each segment whether it is no module's.
    """

    def __init__(
        self,
        data: Recording | Experience,
        columns: Sequence[str],
        mine: Callable[[Segments], NDArray[np.bool_]],
        nobodys: Callable[[Segments], NDArray[np.bool_]],
    ) -> None:
        self._data = data.numpy() if isinstance(data, Experience) else data
        self._columns = list(columns)
        self._mine, self._nobodys = mine, nobodys
        self.left_out: Counter[str] = Counter()
        """Agents' parts in episodes that are left out, by reason; known after a pass."""

    def chunks(self) -> Iterator[Experience]:
        """One pass over all of them, always in the same order: a segment each, without lookback."""
        self.left_out = Counter()
        waiting: dict[tuple[str, str | None], list[Experience]] = {}
        ready: list[Experience] = []
        for piece in self._pieces():
            self.left_out[NO_MODULE] += int(self._nobodys(piece.segments).sum())
            own = piece.select(self._mine(piece.segments))
            if own.num_segments:
                ready += _sorted_out(own, waiting)
            rows = sum(exp.num_steps for exp in ready)
            if rows and rows >= min(CHUNK_ROWS, CHUNK_BYTES // row_bytes(ready[0])):
                yield self._checked(Experience.concat(ready))
                ready = []
        if ready:
            yield self._checked(Experience.concat(ready))
        for parts in waiting.values():
            done = any(bool(part.segments.done[0]) for part in parts)
            self.left_out[BROKEN if done else NOT_DONE] += 1
        self.left_out = +self.left_out  # without those that are 0

    def _checked(self, exp: Experience) -> Experience:
        """The same, sure to have rewards that are numbers."""
        bad = np.flatnonzero(~np.isfinite(exp.steps[col.REWARD]))
        if len(bad):
            segment = int(np.searchsorted(exp.offsets, bad[0], side="right")) - 1
            t = bad[0] - exp.offsets[segment]
            raise DataError(
                f"{where(self._data)}: `reward` is {exp.steps[col.REWARD][bad[0]]} at t {t} of episode "
                f"{exp.segments.episode_id[segment]!r}: no return can be made of it. Mend it, or leave the "
                "episode out."
            )
        return exp

    def _pieces(self) -> Iterator[Experience]:
        if isinstance(self._data, Recording):
            yield from self._data.stream(columns=self._columns, max_rows=CHUNK_ROWS)
            return
        steps = {name: c for name, c in self._data.steps.items() if any(col.is_under(name, r) for r in self._columns)}
        yield from pieces(Experience(steps, self._data.offsets, self._data.segments, self._data.final_obs), CHUNK_ROWS)


def _sorted_out(own: Experience, waiting: dict[tuple[str, str | None], list[Experience]]) -> list[Experience]:
    """What of ``own`` is whole, or became so with what was waiting; the rest waits."""
    own = without_lookback(own)  # rows that the piece before has, too
    segments = own.segments
    whole = (segments.t_start == 0) & segments.done
    found = [own.select(whole)] if whole.any() else []
    for i in np.flatnonzero(~whole).tolist():
        key = (segments.episode_id[i], segments.agent_id[i])
        parts = waiting.setdefault(key, [])
        parts.append(copied(own[i]))
        joined = _joined(parts)
        if joined is not None:
            found.append(joined)
            del waiting[key]
    return found


def _joined(parts: Sequence[Experience]) -> Experience | None:
    """The episode that ``parts`` are all of; None where something is missing or there twice."""
    if not any(bool(part.segments.done[0]) for part in parts):
        return None
    order = sorted(parts, key=lambda part: int(part.segments.t_start[0]))
    t = 0
    for part in order:
        if int(part.segments.t_start[0]) != t:
            return None
        t += part.num_steps
    whole = Experience.concat(order).join()
    return whole if whole.num_segments == 1 and bool(whole.segments.done[0]) else None


def opened(data: HeldOutLike, on_bad: "OnBad" = "strict") -> Recording | Experience:
    """The data, opened with ``on_bad`` where it is a path or a `Source`.

    Raises:
        DataError: there is none, or it has no rewards.
    """
    held = data if isinstance(data, Recording | Experience) else Recording.open(data, on_bad=on_bad)
    columns = held.columns if isinstance(held, Recording) else list(held.steps)
    for root in (col.OBS, col.ACTION, col.REWARD):
        if not col.under(columns, root):
            raise DataError(
                f"{where(held)}: there is no column `{root}`, without which no policy can be evaluated; there are "
                f"{', '.join(columns)}."
            )
    return held


def where(data: Recording | Experience) -> str:
    """What messages call the data."""
    return str(data.path) if isinstance(data, Recording) else "the experience"
