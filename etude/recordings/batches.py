# SPDX-License-Identifier: Apache-2.0
"""Batches of single steps for training: from a stream in bounded memory, or at random from memory."""

import contextlib
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.arrays import Index
from etude.recordings.row_pool import RowPool, rows_of_block

T = TypeVar("T", Columns, Experience)
T_co = TypeVar("T_co", Columns, Experience, covariant=True)
Item = TypeVar("Item")

DERIVED: Final = (col.NEXT_OBS, col.TERMINATED, col.TRUNCATED)
"""Columns that batches can have beside those on the disk."""
Ahead: TypeAlias = Callable[[Iterator[Any]], Iterator[Any]]
"""Gives the same blocks, perhaps made ahead; see `Prefetched`."""

NOTHING: Final = (
    "there are no steps to make batches of: the recording has none, or all of them were left out, by a filter, by a "
    "prelearner, by `on_bad`, or because none are of this module's agents."
)


def steps_of(exp: Experience, roots: Sequence[str]) -> Columns:
    """The columns ``roots`` of all steps to train on, ``next_obs``, ``terminated`` and ``truncated`` among them.

    Raises:
        DataError: ``next_obs`` is wanted, and is not known after a segment that did not terminate.
    """
    out: dict[str, Any] = {}
    for root in roots:
        if root in DERIVED and col.under(exp.steps, root):  # a connector has made it
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
            f"what was observed after t {last} of episode {exp.segments.episode_id[i]!r} was not recorded "
            f"({len(unknown)} such place(s)). Train without `next_obs`, or leave this episode out."
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
    """Random batches of exactly ``batch_size`` steps from memory, endless by default; each step once an epoch.

    As `Recording.batches`, for experience that is in memory; its columns are not copied, but for ``next_obs``.

    Args:
        exp: The experience, in NumPy.
        batch_size: Steps in a batch, at least 1.
        columns: Step columns by name or root; also ``next_obs``, ``terminated`` and ``truncated``. None is all.
        seed: The order depends on this alone.
        epochs: How many times over; None is without end.
        start: The first batch to give, as if that many had been taken before.

    Raises:
        DataError: a column does not exist, or there are no steps.
    """
    steps = steps_of(exp, list(exp.steps) if columns is None else columns)
    source = Rows(lambda order: (steps for _ in order), 1, 0, lambda: rows_of(steps))
    return batches_of(source, batch_size, seed=seed, epochs=epochs, start=start)


class Rows(NamedTuple, Generic[T]):
    """Where batches come from: groups of rows that are loaded one at a time."""

    loaded: Callable[[Iterable[int]], Iterator[T]]
    """The rows of some groups, in the order asked."""
    num_groups: int
    """How many groups."""
    num_rows: int
    """The rows of all groups together, lookback included."""
    num_trained: Callable[[], int]
    """The rows that come in batches; asked for only where a restart needs it."""


def batches_of(
    source: Rows[Columns],
    batch_size: int,
    *,
    shuffle: bool = True,
    buffer_size: int = 1,
    seed: int = 0,
    epochs: int | None = None,
    start: int = 0,
    ahead: Ahead | None = None,
) -> Iterator[Columns]:
    """Batches from any source; see `Recording.batches` for the arguments, and `Ahead`."""
    first, skip = checked_start(source, batch_size, buffer_size, start)
    if shuffle:
        blocks = shuffled(source, RowPool, batch_size, buffer_size, seed, first, epochs)
    else:
        blocks = _epochs(lambda _: _in_order(source, batch_size), first, epochs)
    blocks = blocks if ahead is None else ahead(blocks)
    return _rebatched(blocks, batch_size, skip, are_views=not shuffle)


def checked_start(source: Rows[T], batch_size: int, buffer_size: int, start: int) -> tuple[int, int]:
    """The epoch that batch ``start`` is in, and the steps of that epoch before it."""
    for name, value, least in (("batch_size", batch_size, 1), ("buffer_size", buffer_size, 1), ("start", start, 0)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}.")
    return divmod(start * batch_size, max(1, source.num_trained())) if start else (0, 0)


class Pool(Protocol[T_co]):
    """Rows or segments in memory, which are given in random order."""

    def __len__(self) -> int:
        """How many rows or segments."""

    def take(self, index: Index) -> T_co:
        """A copy of these, in that order."""

    def blocks(self, index: Index, batch_size: int) -> Iterator[T_co]:
        """The same in blocks of bounded size."""

    def fitting(self, index: Index, rows: int) -> int:
        """How many of ``index``, from the first on, have at most ``rows`` rows together."""


def shuffled(
    source: Rows[T],
    pooled: Callable[[Sequence[T]], Pool[T]],
    batch_size: int,
    buffer_size: int,
    seed: int,
    first: int,
    epochs: int | None,
) -> Iterator[T]:
    """Blocks of one epoch after the other, shuffled; see `Recording.batches` for the arguments.

    ``pooled`` makes a pool of what was loaded, and ``first`` is the first epoch to give.
    """
    whole: Pool[T] | None = None
    if source.num_rows <= buffer_size:  # loaded once, in memory for all epochs
        parts = list(source.loaded(range(source.num_groups)))
        if not parts:
            raise DataError(NOTHING)
        whole = pooled(parts)
        parts.clear()

    def blocks(epoch: int) -> Iterator[T]:
        rng = np.random.default_rng([seed, epoch])
        if whole is not None:
            return whole.blocks(rng.permutation(len(whole)), batch_size)
        parts = source.loaded(rng.permutation(source.num_groups).tolist())
        return _through_buffer(parts, pooled, batch_size, buffer_size, rng)

    yield from _epochs(blocks, first, epochs)


def _through_buffer(
    parts: Iterable[T],
    pooled: Callable[[Sequence[T]], Pool[T]],
    batch_size: int,
    buffer_size: int,
    rng: np.random.Generator,
) -> Iterator[T]:
    """One epoch: the buffer is filled with parts, emptied to half of its size at random, and so on."""
    held: list[T] = []
    rows = 0
    for part in parts:
        if rows >= buffer_size:
            pool = pooled(held)
            held.clear()
            index = rng.permutation(len(pool))
            kept = pool.fitting(index, buffer_size // 2)
            yield from pool.blocks(index[kept:], batch_size)
            held = [pool.take(index[:kept])]
            rows = rows_of(held[0])
            del pool
        held.append(part)
        rows += rows_of(part)
    if rows:
        pool = pooled(held)
        held.clear()
        yield from pool.blocks(rng.permutation(len(pool)), batch_size)


def _epochs(blocks: Callable[[int], Iterator[T]], first: int, epochs: int | None) -> Iterator[T]:
    """The ``blocks`` of one epoch after the other."""
    for epoch in itertools.count(first) if epochs is None else range(first, epochs):
        given = 0
        for block in blocks(epoch):
            given += rows_of(block)
            yield block
        if not given:
            raise DataError(NOTHING)


def _in_order(source: Rows[Columns], batch_size: int) -> Iterator[Columns]:
    """All rows in order, in blocks: views, to be copied when they are taken, while a thread may decode what comes
    next."""
    for rows in source.loaded(range(source.num_groups)):
        row_bytes = sum(column[:1].nbytes for column in rows.values()) or 1
        step = max(1, rows_of_block(row_bytes, batch_size) // batch_size) * batch_size
        for at in range(0, rows_of(rows), step):
            yield {name: column[at : at + step] for name, column in rows.items()}


def rows_of(batch: Columns | Experience) -> int:
    """The rows of a batch."""
    if isinstance(batch, Experience):
        return batch.num_steps
    return len(next(iter(batch.values()))) if batch else 0


def _joined(parts: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _rebatched(blocks: Iterator[Columns], batch_size: int, skip: int, *, are_views: bool) -> Iterator[Columns]:
    """The rows of ``blocks`` but the first ``skip``, exactly ``batch_size`` at a time, the last perhaps fewer; copied
    where the blocks ``are_views``."""
    rest: Columns = {}
    for block in blocks:
        rows, at = rows_of(block), min(skip, rows_of(block))
        skip -= at
        if rest:
            missing = batch_size - rows_of(rest)
            rest = _joined([rest, {name: column[:missing] for name, column in block.items()}])
            at = missing
            if rows_of(rest) == batch_size:
                yield rest
                rest = {}
        while at + batch_size <= rows:
            yield _own({name: column[at : at + batch_size] for name, column in block.items()}, are_views)
            at += batch_size
        if at < rows:
            rest = {name: column[at:] for name, column in block.items()}
    if rest:
        yield _own(rest, are_views)


def _own(batch: Columns, is_view: bool) -> Columns:
    return {name: column.copy() for name, column in batch.items()} if is_view else batch


class _Item(NamedTuple, Generic[Item]):
    """What a thread has made: an item, or how it came to its end."""

    value: Item | None = None
    error: BaseException | None = None


class Prefetched(Iterator[Item]):
    """An iterator whose items are made ahead by a thread, at most ``depth`` of them; the thread ends with it."""

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        ready: queue.Queue[_Item[Item]] = queue.Queue(depth)
        stop = threading.Event()
        thread = threading.Thread(target=_produce, args=(items, ready, stop), name="etude-reader", daemon=True)
        self._ready = ready
        self.close = weakref.finalize(self, _stop, ready, stop, thread)
        thread.start()

    @property
    def depth(self) -> int:
        """How many items are there now."""
        return self._ready.qsize()

    def __next__(self) -> Item:
        item = self._ready.get() if self.close.alive else _Item()
        if item.value is not None:
            return item.value
        self.close()
        if item.error is None:
            raise StopIteration
        if isinstance(item.error, Exception):
            raise item.error
        # Raised as it is, it would end this thread, or the whole process, without a word.
        raise DataError(
            f"what makes the batches raised {type(item.error).__name__}: {item.error}. A source, connector or "
            "prelearner must raise an Exception instead, and may not call sys.exit."
        ) from item.error


def _produce(items: Iterator[Item], ready: "queue.Queue[_Item[Item]]", stop: threading.Event) -> None:
    end: BaseException | None = None
    try:
        for item in items:
            ready.put(_Item(item))
            if stop.is_set():
                return
    except BaseException as error:  # noqa: BLE001 - raised again where the items are taken
        end = error
    ready.put(_Item(None, end))


def _stop(ready: "queue.Queue[Any]", stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    end = _Item[Any]()
    while thread.is_alive():
        try:
            item = ready.get(timeout=0.01)  # it may wait to put an item
        except queue.Empty:
            continue
        end = item if item.error is not None else end
    thread.join()
    with contextlib.suppress(queue.Full):
        ready.put_nowait(end)  # another thread may wait for an item, and would for ever
