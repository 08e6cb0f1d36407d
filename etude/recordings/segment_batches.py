# SPDX-License-Identifier: Apache-2.0
"""Batches of segments for losses that look along time: from a stream in bounded memory, or at random from memory."""

from collections.abc import Iterator, Sequence

import numpy as np

from etude.experience import Experience
from etude.experience.arrays import Index
from etude.experience.experience import without_lookback
from etude.recordings.batches import Ahead, Rows, checked_start, shuffled, steps_of
from etude.recordings.pieces import row_bytes
from etude.recordings.row_pool import rows_of_block


def sample_segments(
    exp: Experience,
    batch_size: int,
    max_len: int,
    *,
    columns: Sequence[str] | None = None,
    seed: int = 0,
    epochs: int | None = None,
    start: int = 0,
) -> Iterator[Experience]:
    """Batches of exactly ``batch_size`` steps in segments from memory; see `Recording.segment_batches`.

    Args:
        exp: The experience, in NumPy.
        batch_size: Steps in a batch, at least 1.
        max_len: The longest segment, at least 1.
        columns: Step columns by name or root; None is all.
        seed: The order depends on this alone.
        epochs: How many times over; None is without end. Every step comes once an epoch.
        start: The first batch to give, as if that many had been taken before.

    Raises:
        DataError: a column does not exist, or there are no steps.
    """
    cut = cut_segments(exp, max_len)
    if columns is not None:
        cut = Experience(steps_of(cut, columns), cut.offsets, cut.segments, cut.final_obs)
    source = Rows(lambda order: (cut for _ in order), 1, 0, lambda: cut.num_steps)
    return segment_batches_of(source, batch_size, seed=seed, epochs=epochs, start=start)


def cut_segments(exp: Experience, max_len: int, lookback: int = 0) -> Experience:
    """The steps of ``exp`` that are trained on, in segments of at most ``max_len``, after ``lookback`` of others."""
    return without_lookback(exp).join().cut(max_len, lookback=lookback)


def segment_batches_of(
    source: Rows[Experience],
    batch_size: int,
    *,
    buffer_size: int = 1,
    seed: int = 0,
    epochs: int | None = None,
    start: int = 0,
    by_segments: bool = False,
    ahead: Ahead | None = None,
) -> Iterator[Experience]:
    """Batches from any source of segments; see `Recording.segment_batches` for the arguments, and `Ahead`.

    With ``by_segments``, a batch is ``batch_size`` whole segments, which may have lookback, and ``start`` counts such.
    """
    first, skip = checked_start(source, batch_size, buffer_size, start)
    blocks = shuffled(source, SegmentPool, batch_size, buffer_size, seed, first, epochs)
    blocks = blocks if ahead is None else ahead(blocks)
    return _whole(blocks, batch_size, skip) if by_segments else _rebatched(blocks, batch_size, skip)


class SegmentPool:
    """The segments of some parts, one after the other; see `etude.recordings.batches.Pool`."""

    def __init__(self, parts: Sequence[Experience]) -> None:
        self._exp = Experience.concat(parts)

    def __len__(self) -> int:
        return len(self._exp)

    def take(self, index: Index) -> Experience:
        """A copy of the segments ``index``, in that order."""
        return self._exp.select(index)

    def blocks(self, index: Index, batch_size: int) -> Iterator[Experience]:
        """The same in blocks of a few batches and bounded size."""
        room = rows_of_block(row_bytes(self._exp), batch_size)
        ends = np.cumsum(self._exp.lengths[index])
        at, given = 0, 0
        while at < len(index):
            stop = max(at + 1, int(np.searchsorted(ends, given + room, side="right")))
            yield self._exp.select(index[at:stop])
            at, given = stop, int(ends[stop - 1])

    def fitting(self, index: Index, rows: int) -> int:
        """How many of the segments ``index``, from the first on, have at most ``rows`` rows together."""
        return int(np.searchsorted(np.cumsum(self._exp.lengths[index]), rows, side="right"))


def _rebatched(blocks: Iterator[Experience], batch_size: int, skip: int) -> Iterator[Experience]:
    """The steps of ``blocks`` but the first ``skip``, exactly ``batch_size`` at a time; the last may be fewer."""
    rest: Experience | None = None
    for block in blocks:
        if skip >= block.num_steps:
            skip -= block.num_steps
            continue
        if skip:
            _, block = block.split(skip)
            skip = 0
        rest = block if rest is None else Experience.concat([rest, block])
        while rest.num_steps >= batch_size:
            batch, rest = rest.split(batch_size)
            yield batch
    if rest is not None and rest.num_steps:
        yield rest


def _whole(blocks: Iterator[Experience], batch_size: int, skip: int) -> Iterator[Experience]:
    """The segments of ``blocks`` but the first ``skip``, exactly ``batch_size`` at a time; the last may be fewer."""
    rest: Experience | None = None
    for block in blocks:
        at = min(skip, len(block))
        skip -= at
        rest = block[at:] if rest is None else Experience.concat([rest, block[at:]])
        while len(rest) >= batch_size:
            batch, rest = rest[:batch_size], rest[batch_size:]
            yield batch
    if rest is not None and len(rest):
        yield rest
