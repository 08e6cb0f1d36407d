# SPDX-License-Identifier: Apache-2.0
"""Batches of segments for losses that look along time: from a stream in bounded memory, or at random from memory."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from etude.errors import DataError
from etude.experience import Experience
from etude.experience.arrays import Index
from etude.experience.experience import without_lookback
from etude.recordings.batches import (
    BLOCK_BATCHES,
    BLOCK_BYTES,
    BLOCK_ROWS,
    NOTHING,
    Ahead,
    Rows,
    checked_start,
    steps_of,
)
from etude.recordings.pieces import row_bytes


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
    blocks = _epochs(source, batch_size, buffer_size, seed, first, epochs)
    blocks = blocks if ahead is None else ahead(blocks)
    return _whole(blocks, batch_size, skip) if by_segments else _rebatched(blocks, batch_size, skip)


def _epochs(
    source: Rows[Experience], batch_size: int, buffer_size: int, seed: int, first: int, epochs: int | None
) -> Iterator[Experience]:
    """Blocks of segments of one epoch after the other, in the order in which they are to be given."""
    whole = None
    if source.num_rows <= buffer_size:  # loaded once, in memory for all epochs
        parts = list(source.loaded(range(source.num_groups)))
        if not parts:
            raise DataError(NOTHING)
        whole = Experience.concat(parts)
    for epoch in itertools.count(first) if epochs is None else range(first, epochs):
        rng = np.random.default_rng([seed, epoch])
        if whole is not None:
            blocks = _in_blocks(whole, rng.permutation(len(whole)), batch_size)
        else:
            blocks = _shuffled(source, batch_size, buffer_size, rng)
        steps = 0
        for block in blocks:
            steps += block.num_steps
            yield block
        if not steps:
            raise DataError(NOTHING)


def _shuffled(
    source: Rows[Experience], batch_size: int, buffer_size: int, rng: np.random.Generator
) -> Iterator[Experience]:
    """One epoch through the buffer: filled with groups, emptied to half of its size at random, and so on."""
    parts: list[Experience] = []
    steps = 0
    order = rng.permutation(source.num_groups).tolist()
    for i, part in enumerate(source.loaded(order)):
        parts.append(part)
        steps += part.num_steps
        if steps >= buffer_size and i + 1 < len(order):
            pool = Experience.concat(parts)
            parts.clear()
            index = rng.permutation(len(pool))
            kept = int(np.searchsorted(np.cumsum(pool.lengths[index]), buffer_size // 2, side="right"))
            yield from _in_blocks(pool, index[kept:], batch_size)
            parts = [pool.select(index[:kept])]
            steps = parts[0].num_steps
    if not parts:
        return
    pool = Experience.concat(parts)
    parts.clear()
    yield from _in_blocks(pool, rng.permutation(len(pool)), batch_size)


def _in_blocks(exp: Experience, order: Index, batch_size: int) -> Iterator[Experience]:
    """The segments ``order`` of ``exp``, copied in blocks of a few batches and bounded size."""
    room = max(1, min(BLOCK_BYTES // row_bytes(exp), max(BLOCK_BATCHES * batch_size, BLOCK_ROWS)))
    ends = np.cumsum(exp.lengths[order])
    at, given = 0, 0
    while at < len(order):
        stop = max(at + 1, int(np.searchsorted(ends, given + room, side="right")))
        yield exp.select(order[at:stop])
        at, given = stop, int(ends[stop - 1])


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
