# SPDX-License-Identifier: Apache-2.0
"""The way from a recording to the learner: parts, read and prepared by workers, a buffer, batches made ahead."""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from etude import columns as col
from etude.columns import Columns
from etude.experience import Experience
from etude.recordings.batches import Prefetched, Rows, batches_of, rows_of, steps_of
from etude.recordings.crew import Crew, WorkerKind
from etude.recordings.layers import CONNECTORS, SHUFFLE, Spent, loading
from etude.recordings.parted import Parted
from etude.recordings.preparation import Preparation
from etude.recordings.segment_batches import cut_segments, segment_batches_of


@dataclasses.dataclass(frozen=True)
class Steps:
    """Makes single steps of Experience: these columns, by name or root, or derived; and those ``added`` on the way."""

    roots: tuple[str, ...]

    def __call__(self, exp: Experience, added: Sequence[str]) -> Columns:
        """The steps that are trained on."""
        return steps_of(
            exp, [*self.roots, *(name for name in added if not any(col.is_under(name, root) for root in self.roots))]
        )

    def rows(self, made: Columns) -> int:
        """How many there are."""
        return rows_of(made)


@dataclasses.dataclass(frozen=True)
class Cuts:
    """Cuts Experience to segments of at most ``max_len`` steps to train on, after ``burn_in`` steps of lookback."""

    max_len: int
    burn_in: int = 0

    def __call__(self, exp: Experience, added: Sequence[str]) -> Experience:
        """These segments, with all their columns."""
        return cut_segments(exp, self.max_len, self.burn_in)

    def rows(self, made: Experience) -> int:
        """How many steps are trained on."""
        return int(made.num_steps - made.segments.lookback.sum())


@dataclasses.dataclass(frozen=True)
class Job:
    """What a worker does with a part."""

    source: Parted
    columns: tuple[str, ...] | None
    prepare: Preparation
    make: Any
    """`Steps` or `Cuts`."""

    def __call__(self, k: int) -> tuple[Any, Spent]:
        """What is made of part ``k``; None where nothing of it is wanted, found out before all of it is read."""
        spent = Spent(part=k)
        with loading(spent):
            if not self._is_wanted(k):
                spent.bad = self.source.counts(k)
                return None, spent
            exp = self.source.part(k, self.columns)
        with spent.on(CONNECTORS):
            chosen = self.prepare.chosen(exp)
            prepared = self.prepare(chosen)
            made = self.make(prepared, [name for name in prepared.steps if name not in chosen.steps])
        spent.rows = self.make.rows(made)
        spent.left_out = max(0, int(chosen.num_steps - chosen.segments.lookback.sum()) - spent.rows)
        spent.bad = self.source.counts(k)
        return made, spent

    def _is_wanted(self, k: int) -> bool:
        where = self.prepare.where
        if where is None or self.source.is_in_memory:
            return True
        return bool(where.holds(self.source.part(k, where.columns_in(self.source.columns))).any())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flow:
    """How the data flows."""

    buffer_size: int = 65_536
    """Rows that are shuffled together."""
    num_workers: int = 0
    """Workers that read and prepare; 0: the thread that makes batches does it."""
    worker_kind: WorkerKind = "threads"
    """What they are."""
    prefetch: int = 2
    """Blocks of batches made ahead by a thread; 0: none."""
    seed: int = 0
    """The order depends on this alone."""


class Loaders(Protocol):
    """Those who load parts, as a `Crew` does with a `Job`."""

    def done(self, numbers: Iterable[int]) -> Iterator[tuple[Any, Spent]]:
        """What comes of the parts of these numbers, in this order; of a part, all, a share, or nothing."""

    def close(self) -> Any:
        """Load no more."""


class _Loading:
    """What the threads of a pipeline share; they must not hold the pipeline itself, which ends them when it goes."""

    def __init__(self, source: Parted, crew: Loaders, by_segments: bool, epoch_size: int | None) -> None:
        self._source, self.crew, self._by_segments = source, crew, by_segments
        self.epoch_size = epoch_size
        self.left_out = 0
        self.spent = Spent()

    def parts(self, order: Iterable[int]) -> Iterator[Any]:
        """Parts, ready to be shuffled."""
        size = left_out = 0
        # the thread that waits for parts is the one that shuffles, whose own time is the rest of what a block takes
        for made, spent in _each_timed(self.crew.done(list(order)), lambda seconds: self.shuffled(-seconds)):
            self.spent.add(spent)
            if spent.part is not None:
                self._source.count(spent.part, spent.bad)
            if made is None:
                continue
            size += len(made) if self._by_segments else spent.rows
            left_out += spent.left_out
            yield made
        self.epoch_size, self.left_out = size, left_out

    def known_size(self) -> int:
        """Of an epoch; as if it had no end, before it is known."""
        return self.epoch_size or sys.maxsize

    def shuffled(self, seconds: float) -> None:
        """Count time."""
        self.spent.seconds[SHUFFLE] += seconds


class DataPipeline:
    """Endless batches for one module, each step once an epoch; equal for equal seeds, whatever workers there are.

    Args:
        source: Where the experience comes from.
        columns: The step columns to read, by name or root; None is all.
        prepare: What stands between; see `Preparation`.
        make: Whether batches are of steps or of segments, and which.
        batch_size: Steps in a batch; or, of segments with ``by_segments``, how many of these.
        hold_prepared: Keep in memory what came out of ``prepare``.
        epoch_size: The steps (or segments) of an epoch, where a run before has found that out.
        to_device: Brings a batch to where the learner is, ahead of it.
        crew: Those who load parts; None: workers of this process, as `flow` says.
    """

    def __init__(
        self,
        source: Parted,
        columns: tuple[str, ...] | None,
        prepare: Preparation,
        make: Steps | Cuts,
        batch_size: int,
        flow: Flow,
        *,
        by_segments: bool = False,
        hold_prepared: bool = False,
        epoch_size: int | None = None,
        to_device: Callable[[Columns], Any] | None = None,
        crew: Loaders | None = None,
    ) -> None:
        self.source, self._make, self._flow = source, make, flow
        self._size, self._by_segments, self._hold = batch_size, by_segments, hold_prepared
        if crew is None:
            crew = Crew(Job(source, columns, prepare, make), flow.num_workers, flow.worker_kind)
        self._loading = _Loading(source, crew, by_segments, epoch_size)
        self._to_device = to_device
        self._ahead: Prefetched[Any] | None = None
        self._moved: Prefetched[Any] | None = None

    @property
    def epoch_size(self) -> int | None:
        """The steps, or segments, of an epoch; None until the first has been read."""
        return self._loading.epoch_size

    @property
    def left_out(self) -> int:
        """Steps of an epoch that were to be trained on, but can't be: see `Spent.left_out`."""
        return self._loading.left_out

    @property
    def spent(self) -> Spent:
        """Since the beginning."""
        return self._loading.spent

    def batches(self, start: int = 0) -> Iterator[Any]:
        """From batch ``start`` on, as if those before it had been taken.

        Raises:
            DataError: something can't be read, or does not hold what is wanted.
        """
        flow = self._flow
        rows = 0 if self._hold else sys.maxsize  # what fits in the buffer is kept there
        source = Rows(self._loading.parts, self.source.num_parts, rows, self._loading.known_size)
        if isinstance(self._make, Steps):
            made: Iterator[Any] = batches_of(
                source,
                self._size,
                buffer_size=flow.buffer_size,
                seed=flow.seed,
                start=start,
                ahead=self._made_ahead,
            )
        else:
            made = segment_batches_of(
                source,
                self._size,
                buffer_size=flow.buffer_size,
                seed=flow.seed,
                start=start,
                by_segments=self._by_segments,
                ahead=self._made_ahead,
            )
        if self._to_device is None or not isinstance(self._make, Steps):
            return made
        self._moved = Prefetched(map(self._to_device, made), max(1, flow.prefetch))
        return self._moved

    def _made_ahead(self, blocks: Iterator[Any]) -> Iterator[Any]:
        blocks = _each_timed(blocks, self._loading.shuffled)
        if not self._flow.prefetch:
            return blocks
        self._ahead = Prefetched(blocks, self._flow.prefetch)
        return self._ahead

    @property
    def depth(self) -> int | None:
        """How many blocks of batches are ready; None where none are made ahead."""
        return None if self._ahead is None else self._ahead.depth

    def close(self) -> None:
        """End all workers; also done when the pipeline is forgotten."""
        if not isinstance(self._loading.crew, Crew):  # a thread of this one may wait for it
            self._loading.crew.close()
        for thread in (self._moved, self._ahead):
            if thread is not None:
                thread.close()
        self._loading.crew.close()


def _each_timed(items: Iterator[Any], note: Callable[[float], None]) -> Iterator[Any]:
    while True:
        begin = time.perf_counter()
        item = next(items, None)
        note(time.perf_counter() - begin)
        if item is None:
            return
        yield item
