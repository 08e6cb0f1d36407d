# SPDX-License-Identifier: Apache-2.0
"""Training batches of single steps or of segments, from a stream in bounded memory or from experience in memory."""

import atexit
import itertools
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.arrays import Index
from etude.experience.experience import offsets_of, without_lookback
from etude.recordings.background import BackgroundThread
from etude.recordings.pieces import row_bytes

T = TypeVar("T", Columns, Experience)
Item = TypeVar("Item")

DERIVED: Final = (col.NEXT_OBS, col.TERMINATED, col.TRUNCATED)
"""Columns that batches can have in addition to the stored ones."""
Ahead: TypeAlias = Callable[[Iterator[Any]], Iterator[Any]]
"""A function that returns an iterator over the same blocks, possibly prepared ahead; see `Prefetched`."""

Pool: TypeAlias = Any
"""`RowPool`, `SegmentPool` or `WholeSegmentPool`: holds data in memory, and takes, cuts and joins blocks of it."""

NOTHING: Final = (
    "there are no steps to make batches of: the recording has none, or all of them were left out, by a filter, by a "
    "prelearner, by `on_bad`, or because none are of this module's agents."
)


def steps_of(exp: Experience, roots: Sequence[str]) -> Columns:
    """Return the columns ``roots`` of all steps except lookback; may include `DERIVED` ones.

    Raises:
        DataError: ``next_obs`` is requested, but unknown after a segment that did not terminate.
    """
    out: dict[str, Any] = {}
    for root in [roots] if isinstance(roots, str) else roots:
        if root in DERIVED and col.under(exp.steps, root):  # made by a connector
            out.update(col.subtree(exp.steps, root))
        elif root == col.NEXT_OBS:
            _check_next_obs(exp)
            out.update(col.renamed(exp.next_obs(), col.OBS, col.NEXT_OBS))
        elif root == col.TERMINATED:
            out[root] = exp.at_ends(exp.segments.terminated)
        elif root == col.TRUNCATED:
            out[root] = exp.at_ends(exp.segments.truncated)
        else:
            found = col.subtree(exp.steps, root)
            if not found:
                raise DataError(f"there is no column `{root}`; there are {', '.join([*exp.steps, *DERIVED])}.")
            out.update(found)
    if exp.segments.lookback.any():
        rows = np.flatnonzero(exp.trained())
        out = {name: column.take(rows, axis=0) for name, column in out.items()}
    return out


def _check_next_obs(exp: Experience) -> None:
    if not exp.final_obs:
        raise DataError("`next_obs` is wanted, but there are no observations.")
    unknown = np.flatnonzero(~exp.segments.has_final_obs & ~exp.segments.terminated)
    if len(unknown):
        i = int(unknown[0])
        last = int(exp.segments.t_start[i] + exp.lengths[i] - 1)
        raise DataError(
            f"the observation after t {last} of episode {exp.segments.episode_id[i]!r} was not recorded "
            f"({len(unknown)} such place(s)), so no value can be learned there. on_bad='repair' (--on-bad repair) "
            "leaves these steps out. Where episodes ended by their own rules, they are `terminated`."
        )


def sample_batches(
    exp: Experience,
    batch_size: int,
    *,
    columns: Sequence[str] | None = None,
    seed: int = 0,
    epochs: int | None = None,
    start: int = 0,
) -> Iterator[Columns]:
    """Iterate over random batches of exactly ``batch_size`` steps from memory, endlessly by default.

    Like `Recording.batches`, for experience in memory: each step comes once per epoch. Only ``next_obs`` is copied from
    ``exp``.

    Args:
        exp: The experience, in NumPy.
        batch_size: Steps per batch, at least 1.
        columns: Step columns by name or root; also ``next_obs``, ``terminated`` and ``truncated``. None is all.
        seed: Random seed; equal seeds give the same order.
        epochs: Number of epochs; None is endless.
        start: Index of the first batch, to resume as if that many batches had been taken before.

    Raises:
        DataError: a column does not exist, or there are no steps.
        ValueError: an argument is out of range.
    """
    steps = steps_of(exp, list(exp.steps) if columns is None else columns)
    groups = Groups(lambda order: (steps for _ in order), 1, 0, lambda: rows_of(steps))
    return batches_of(groups, RowPool, batch_size, seed=seed, epochs=epochs, start=start)


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
    """Iterate over batches of exactly ``batch_size`` steps in segments from memory; see `Recording.segment_batches`.

    Args:
        exp: The experience, in NumPy.
        batch_size: Steps per batch, at least 1.
        max_len: The longest segment in steps, at least 1.
        columns: Step columns by name or root; None is all.
        seed: Random seed; equal seeds give the same order.
        epochs: Number of epochs; None is endless. Every step comes once per epoch.
        start: Index of the first batch, to resume as if that many batches had been taken before.

    Raises:
        DataError: a column does not exist, or there are no steps.
        ValueError: an argument is out of range.
    """
    cut = cut_segments(exp, max_len)
    if columns is not None:
        cut = Experience(steps_of(cut, columns), cut.offsets, cut.segments, cut.final_obs)
    groups = Groups(lambda order: (cut for _ in order), 1, 0, lambda: cut.num_steps)
    return batches_of(groups, SegmentPool, batch_size, seed=seed, epochs=epochs, start=start)


def cut_segments(exp: Experience, max_len: int, lookback: int = 0) -> Experience:
    """Cut the steps of ``exp`` into segments of at most ``max_len``, each after ``lookback`` steps of context."""
    return without_lookback(exp).join().cut(max_len, lookback=lookback)


class Groups(NamedTuple, Generic[T]):
    """The source of batches: groups of rows that are loaded one at a time."""

    loaded: Callable[[Iterable[int]], Iterator[T]]
    """Loads the groups with these indices, in the order given."""
    num_groups: int
    """The number of groups."""
    num_rows: int
    """The rows of all groups together, including lookback."""
    num_trained: Callable[[], int]
    """Returns the number of rows that are used in batches; called only if batches do not start at 0."""


def batches_of(
    groups: Groups[T],
    pool: type[Pool],
    batch_size: float,
    *,
    shuffle: bool = True,
    buffer_size: int = 1,
    seed: int = 0,
    epochs: int | None = None,
    start: int = 0,
    ahead: Ahead | None = None,
) -> Generator[T, None, None]:
    """Iterate over batches from any source; see `Recording.batches` for the arguments.

    ``pool`` defines the unit of ``batch_size``: steps or whole segments. Of whole segments, ``batch_size`` may be a
    fraction, at least 1: it is then the mean size of a batch.

    Raises:
        DataError: there are no steps.
        ValueError: an argument is out of range.
    """
    given = (("batch_size", batch_size, 1), ("buffer_size", buffer_size, 1), ("start", start, 0), ("seed", seed, 0))
    for name, value, least in given:
        if not isinstance(value, int | np.integer) and not (name == "batch_size" and pool is WholeSegmentPool):
            raise ValueError(f"{name} must be a whole number, not {value!r}.")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}.")
    if epochs is not None and (not isinstance(epochs, int | np.integer) or epochs < 0):
        raise ValueError(f"epochs must be a whole number of at least 0, or None for endless batches, not {epochs!r}.")
    first, skip = divmod(int(start * batch_size), max(1, groups.num_trained())) if start else (0, 0)
    block_size = math.ceil(batch_size)

    def each_epoch() -> Iterator[T]:
        """The blocks of one epoch after another."""
        whole: Pool | None = None
        if shuffle and groups.num_rows <= buffer_size:  # loaded once, in memory for all epochs
            parts = list(groups.loaded(range(groups.num_groups)))
            if not parts:
                raise DataError(NOTHING)
            whole = pool(parts)
            parts.clear()
        for epoch in itertools.count(first) if epochs is None else range(first, epochs):
            rng = np.random.default_rng([seed, epoch])
            num_rows = 0
            if whole is not None:
                blocks = whole.blocks(rng.permutation(len(whole)), block_size)
            elif shuffle:
                loaded = groups.loaded(rng.permutation(groups.num_groups).tolist())
                blocks = _through_buffer(loaded, pool, block_size, buffer_size, rng)
            else:
                blocks = _in_order(groups.loaded(range(groups.num_groups)), pool, block_size)
            for block in blocks:
                num_rows += rows_of(block)
                yield block
            if not num_rows:
                raise DataError(NOTHING)

    blocks = each_epoch() if ahead is None else ahead(each_epoch())
    return _rebatched(blocks, pool, batch_size, start, skip, views=not shuffle)


def rows_of(batch: Columns | Experience) -> int:
    """The number of rows in a batch."""
    if isinstance(batch, Experience):
        return batch.num_steps
    return len(next(iter(batch.values()))) if batch else 0


def _through_buffer(
    parts: Iterable[T], pool: type[Pool], batch_size: int, buffer_size: int, rng: np.random.Generator
) -> Iterator[T]:
    """One epoch: fill the buffer with parts, empty it at random to half its size, and repeat."""
    held: list[T] = []
    rows = 0
    for part in parts:
        if rows >= buffer_size:
            full = pool(held)
            held.clear()
            index = rng.permutation(len(full))
            kept = full.fitting(index, buffer_size // 2)
            yield from full.blocks(index[kept:], batch_size)
            held = [full.take(index[:kept])]
            rows = rows_of(held[0])
            del full
        held.append(part)
        rows += rows_of(part)
    if rows:
        full = pool(held)
        held.clear()
        yield from full.blocks(rng.permutation(len(full)), batch_size)


def _in_order(parts: Iterable[T], pool: type[Pool], batch_size: int) -> Iterator[T]:
    """Yield all rows in order, as blocks of views. They are copied later, while a thread may decode the next block."""
    for part in parts:
        step = max(1, rows_of_block(pool.row_bytes(part), batch_size) // batch_size) * batch_size
        yield from pool.cut(part, range(0, pool.count(part), step))


def _rebatched(
    blocks: Iterable[T], pool: type[Pool], batch_size: float, number: int, skip: int, *, views: bool
) -> Generator[T, None, None]:
    """Regroup ``blocks`` without the first ``skip`` items into batches of ``batch_size``; the last may be smaller.

    ``number`` is the index of the first batch. If ``batch_size`` is a fraction, the size of a batch depends on its
    index. Blocks that are ``views`` of something larger are copied.
    """
    own: Callable[[T], T] = _copied if views else lambda batch: batch
    rest: T | None = None
    for block in blocks:
        count = pool.count(block)
        first = min(skip, count)
        skip -= first
        held = 0 if rest is None else pool.count(rest)
        room = count - first + held
        ends = ((number + np.arange(int(room / batch_size) + 2)) * batch_size).astype(np.int64)
        ends = ends[ends <= ends[0] + room] - ends[0]
        number += len(ends) - 1
        parts: list[T] = pool.cut(block, np.maximum(ends + first - held, first).tolist())
        if rest is not None and held:
            joined = pool.concat([rest, parts.pop(0)])
            if not parts:
                rest = joined
                continue
            yield joined
        rest = parts.pop()
        yield from map(own, parts)
    if rest is not None and pool.count(rest):
        yield own(rest)


def _copied(batch: Any) -> Any:
    return {name: column.copy() for name, column in batch.items()}


# -- rows and segments in memory -------------------------------------------------------------------------------------

LARGE_ROW: Final = 4096
"""The row size in bytes from which copying a row takes at least as long as looking up where it is."""

BLOCK_BYTES: Final = 8 * 2**20
BLOCK_ROWS: Final = 16_384
BLOCK_BATCHES: Final = 16
"""Limits of blocks, in which rows are gathered and passed between threads: large for speed, small for memory."""


def rows_of_block(row_bytes: int, batch_size: int) -> int:
    """The maximum number of rows in a block, at least 1."""
    return max(1, min(BLOCK_BYTES // row_bytes, max(BLOCK_BATCHES * batch_size, BLOCK_ROWS)))


class RowPool:
    """Single rows in memory. Columns of large rows, such as images, are not concatenated.

    Args:
        parts: At least one, all with the same columns. They must not be modified while the pool is in use.
    """

    def __init__(self, parts: Sequence[Columns]) -> None:
        self._columns = {name: _pieces([part[name] for part in parts]) for name in parts[0]}
        self._row_bytes = sum(pieces[0][:1].nbytes for pieces in self._columns.values()) or 1
        self._offsets = offsets_of(np.array([rows_of(part) for part in parts], np.int64))

    def __len__(self) -> int:
        """The number of rows."""
        return int(self._offsets[-1])

    def take(self, index: Index) -> Columns:
        """Copy the rows at ``index``, in that order."""
        return {name: self._taken(pieces, index) for name, pieces in self._columns.items()}

    def blocks(self, index: Index, batch_size: int) -> Iterator[Columns]:
        """Yield the rows at ``index`` in blocks of a few batches and bounded size."""
        step = max(1, rows_of_block(self._row_bytes, batch_size) // batch_size) * batch_size
        for at in range(0, len(index), step):
            yield self.take(index[at : at + step])

    def fitting(self, index: Index, rows: int) -> int:
        """The number of leading items of ``index`` that have at most ``rows`` rows in total."""
        return min(rows, len(index))

    @staticmethod
    def row_bytes(block: Columns) -> int:
        """The bytes of one row over all columns, at least 1."""
        return sum(column[:1].nbytes for column in block.values()) or 1

    @staticmethod
    def count(block: Columns) -> int:
        """The size of ``block`` in the unit of ``batch_size``."""
        return rows_of(block)

    @staticmethod
    def cut(block: Columns, at: Sequence[int]) -> list[Columns]:
        """Split ``block`` at these positions into views; the last one ends with the block."""
        return [
            {name: column[a:b] for name, column in block.items()} for a, b in itertools.pairwise([*at, rows_of(block)])
        ]

    @staticmethod
    def concat(blocks: Sequence[Columns]) -> Columns:
        """Concatenate several blocks."""
        joined = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
        return {name: np.ascontiguousarray(column) for name, column in joined.items()}

    def _taken(self, pieces: list[NDArray[Any]], index: NDArray[np.int64]) -> NDArray[Any]:
        if len(pieces) == 1:
            return pieces[0].take(index, axis=0)
        part = np.searchsorted(self._offsets, index, side="right") - 1
        out = np.empty((len(index), *pieces[0].shape[1:]), pieces[0].dtype)
        for i, (p, row) in enumerate(zip(part.tolist(), (index - self._offsets[part]).tolist(), strict=True)):
            out[i] = pieces[p][row]
        return out


def _pieces(columns: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Concatenate the parts of a column, or keep them apart if rows are large."""
    if len(columns) == 1:
        return columns
    is_alike = len({(column.dtype, column.shape[1:]) for column in columns}) == 1
    if is_alike and all(column[:1].nbytes >= LARGE_ROW for column in columns):
        return columns
    return [np.concatenate(columns)]


class SegmentPool:
    """Segments in memory, with the methods of `RowPool`.

    ``batch_size`` counts steps. A batch may end inside a segment, which continues in the next batch.
    """

    def __init__(self, parts: Sequence[Experience]) -> None:
        self._exp = Experience.concat(parts)

    def __len__(self) -> int:
        """The number of segments."""
        return len(self._exp)

    def take(self, index: Index) -> Experience:
        """Copy the segments at ``index``, in that order."""
        return self._exp.select(index)

    def blocks(self, index: Index, batch_size: int) -> Iterator[Experience]:
        """Yield the segments at ``index`` in blocks of a few batches and bounded size."""
        room = rows_of_block(self.row_bytes(self._exp), batch_size)
        ends = np.cumsum(self._exp.lengths[index])
        at, given = 0, 0
        while at < len(index):
            stop = max(at + 1, int(np.searchsorted(ends, given + room, side="right")))
            yield self._exp.select(index[at:stop])
            at, given = stop, int(ends[stop - 1])

    def fitting(self, index: Index, rows: int) -> int:
        """The number of leading items of ``index`` that have at most ``rows`` rows in total."""
        return int(np.searchsorted(np.cumsum(self._exp.lengths[index]), rows, side="right"))

    @staticmethod
    def row_bytes(block: Experience) -> int:
        """The bytes of one row over all columns, at least 1."""
        return row_bytes(block)

    @staticmethod
    def count(block: Experience) -> int:
        """The size of ``block`` in the unit of ``batch_size``."""
        return block.num_steps

    @staticmethod
    def cut(block: Experience, at: Sequence[int]) -> list[Experience]:
        """Split ``block`` at these positions into views; the last one ends with the block."""
        bounds = np.union1d(block.offsets, at)
        start, stop = bounds[:-1], bounds[1:]
        pieces = block.pieces(np.searchsorted(block.offsets, start, side="right") - 1, start, stop)
        borders = [*np.searchsorted(pieces.offsets, at).tolist(), len(pieces)]
        return [pieces[a:b] for a, b in itertools.pairwise(borders)]

    @staticmethod
    def concat(blocks: Sequence[Experience]) -> Experience:
        """Concatenate several blocks."""
        return Experience.concat(blocks)


class WholeSegmentPool(SegmentPool):
    """Segments, which may have lookback; ``batch_size`` counts whole segments."""

    @staticmethod
    def count(block: Experience) -> int:
        return len(block)

    @staticmethod
    def cut(block: Experience, at: Sequence[int]) -> list[Experience]:
        return [block[a:b] for a, b in itertools.pairwise([*at, len(block)])]


# -- prefetching -----------------------------------------------------------------------------------------------------


_END: Final[Any] = object()


class Prefetched(Iterator[Item]):
    """An iterator of which a thread prepares up to ``depth`` items ahead; the thread ends with the iterator.

    At its exit, the process waits at most ten seconds for the item that is being made. An executor's thread could block
    the exit forever, by waiting for something that never comes, such as blocks from a cluster that is gone.
    """

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        self._thread = BackgroundThread("etude-reader")
        self._make = partial(next, items, _END)
        self._ahead: deque[Future[Item]] = deque()
        for _ in range(depth + 1):  # one of them is being made
            self._ahead.append(self._thread.submit(self._make))
        _READERS.add(self._thread)
        # Garbage collection must not wait for the thread: it may run in it.
        self._end = weakref.finalize(self, self._thread.end, cancel=True)

    @property
    def depth(self) -> int:
        """The number of items that are ready now."""
        return sum(item.done() for item in self._ahead)

    def close(self) -> None:
        """End the thread, and wait until it has ended."""
        if self._end.detach() is not None:
            self._thread.end(cancel=True)
            self._thread.join()

    def __next__(self) -> Item:
        if not self._end.alive:
            raise StopIteration
        first = self._ahead.popleft()
        try:
            item = first.result()
        except BaseException as error:
            if first.cancelled():  # another thread has closed it
                raise StopIteration from None
            if not first.done() or error is not first.exception():  # Ctrl-C here, which must not wait for the thread
                self._end()
                raise
            self.close()
            if isinstance(error, Exception):
                raise
            # Raised unchanged, it would end this thread, or the whole process, without a message.
            raise DataError(
                f"the code that makes batches raised {type(error).__name__}: {error}. A source, connector or "
                "prelearner must raise an Exception instead, and may not call sys.exit."
            ) from error
        self._ahead.append(self._thread.submit(self._make))
        if item is _END:
            self.close()
            raise StopIteration
        return item


_READERS: Final[WeakSet[BackgroundThread]] = WeakSet()
_EXIT_SECONDS: Final = 10.0


@atexit.register
def _end_all() -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    readers = list(_READERS)
    for thread in readers:
        thread.end(cancel=True)
    for thread in readers:
        thread.join(max(0.0, deadline - time.monotonic()))
