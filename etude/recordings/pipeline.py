# SPDX-License-Identifier: Apache-2.0
"""The data pipeline from a recording to the learner: parts are loaded by workers, shuffled, and batched ahead."""

import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar, Final, Generic, Literal, Protocol, TypeVar

import numpy as np

from etude import columns as col
from etude import spawning
from etude.columns import Columns
from etude.connectors import Connect, Pipeline, PreLearnerLike, overrides
from etude.errors import DataError, EtudeError, SettingsError, described
from etude.experience import Experience
from etude.recordings.batches import (
    Groups,
    Prefetched,
    RowPool,
    SegmentPool,
    WholeSegmentPool,
    batches_of,
    cut_segments,
    rows_of,
    steps_of,
)
from etude.recordings.pieces import pieces, row_bytes
from etude.recordings.where import RowFilter

R = TypeVar("R")

WorkerKind = Literal["threads", "processes"]


class LoadWorkers(Generic[R]):
    """Runs a job for each of many numbers, several at a time, and yields the results in order.

    Args:
        job: The function to run; for processes, it must be picklable.
        num_workers: The number of workers; 0 runs the job in the caller's thread.
        kind: Threads share memory, but wait for each other while a job holds Python's interpreter lock. Processes take
            a third of a second to start, and send their results through a pipe.

    Raises:
        SettingsError: ``job`` can't be sent to processes.
    """

    def __init__(self, job: Callable[[int], R], num_workers: int, kind: WorkerKind) -> None:
        self._job = job
        self._ahead = num_workers
        self._executor: Executor | None = None
        if not num_workers:
            return
        if kind == "threads":
            self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="etude-loader")
        else:
            context = multiprocessing.get_context("spawn")
            with spawning.no_current_folder():
                self._executor = ProcessPoolExecutor(
                    num_workers, mp_context=context, initializer=_begin, initargs=(_sendable(job),)
                )
            self._job = _do
        # Garbage collection must not wait for threads: it may run in one of them, or where one is just being started.
        self._end = weakref.finalize(self, self._executor.shutdown, wait=False, cancel_futures=True)

    def close(self) -> None:
        """End the workers, and wait until they have ended; garbage collection ends them as well."""
        if self._executor is not None and self._end.detach() is not None:
            self._executor.shutdown(cancel_futures=True)

    def done(self, numbers: Iterable[int]) -> Iterator[R]:
        """Yield the result for each number, in order; up to one more than the number of workers are held ahead."""
        if self._executor is None:
            for number in numbers:  # not `map`, which a StopIteration raised by the job would end silently
                yield self._job(number)
            return
        pending: deque[Future[R]] = deque()
        try:
            for number in numbers:
                with spawning.no_current_folder(), spawning.interrupts_blocked():  # it may start another process
                    pending.append(self._executor.submit(self._job, number))
                if len(pending) > self._ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenExecutor as error:
            raise EtudeError(
                "a worker process that loads data died: it was killed, perhaps for lack of memory (then use fewer "
                "num_workers), or it crashed. The run can be resumed from its last checkpoint."
            ) from error
        finally:
            for future in pending:
                future.cancel()


def _sendable(job: Callable[[int], R]) -> bytes:
    from multiprocessing.reduction import ForkingPickler

    try:
        return bytes(ForkingPickler.dumps(job))
    except Exception as error:
        raise SettingsError(
            f"num_workers are processes, but this can't be sent to them: {error}. Define functions and classes at the "
            "top of a module, or use worker_kind='threads'."
        ) from error


_own_job: Callable[[int], Any] | None = None


def _begin(job: bytes) -> None:
    """Initialize a worker process: take the job of the parent process, and end when the parent ends."""
    import pickle

    global _own_job
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # sent to the whole group: the parent saves, and ends its workers
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()  # even if it is killed
    _own_job = pickle.loads(job)  # noqa: S301 - from the process that started this one, not from a file


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _do(number: int) -> Any:
    assert _own_job is not None
    try:
        return _own_job(number)
    except EtudeError:
        raise
    except BaseException as error:  # noqa: BLE001 - the other process may not be able to read it
        shown = traceback.format_exc().rstrip()
        raise DataError(f"loading data failed in a worker process: {described(error)}\n{shown}") from None


PIECE_ROWS = 65_536
"""The maximum number of rows in a piece of experience in memory, unless it is a single segment."""


# -- the time that loading takes ------------------------------------------------------------------------------------

LOAD: Final = "load"
CONNECTORS: Final = "connectors"
SHUFFLE: Final = "shuffle"
LAYERS: Final = (LOAD, CONNECTORS, SHUFFLE)
"""Read and decode files to experience; apply prelearner and connectors; shuffle in the buffer and make batches."""


@dataclasses.dataclass
class LoadingStats:
    """Time, rows and bytes spent on loading."""

    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(LAYERS, 0.0))
    """Seconds by layer, summed over all workers."""
    rows: int = 0
    """The number of steps that came out of the connectors."""
    left_out: int = 0
    """The number of trainable steps that the connectors lost: too close to a cut, or dropped by the prelearner."""
    bytes: int = 0
    """Bytes of experience that were loaded from files, as they are in memory."""
    part: int | None = None
    """The index of the part, if it is about a single one."""
    bad: Any = None
    """The bad data found in the part; see `Recording.counts`."""

    def add(self, other: "LoadingStats") -> None:
        """Add what was spent elsewhere."""
        for layer, seconds in other.seconds.items():
            self.seconds[layer] += seconds
        self.rows += other.rows
        self.left_out += other.left_out
        self.bytes += other.bytes

    @contextmanager
    def on(self, layer: str) -> Iterator[None]:
        """Count the time of a ``with`` block for a layer."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[layer] += time.perf_counter() - begin


# -- the source, and what is made of its parts ----------------------------------------------------------------------


class PartSource(Protocol):
    """The source of a pipeline: a `Recording`, or experience in memory."""

    is_in_memory: bool

    @property
    def columns(self) -> list[str]:
        """The step columns."""

    @property
    def num_parts(self) -> int:
        """The number of parts."""

    def part(
        self, k: int, columns: Sequence[str] | None = None, *, finals: bool = True, next_obs: bool = False
    ) -> Experience:
        """Load part ``k``: whole segments; see `Recording.part`."""

    def counts(self, k: int) -> Any:
        """The bad data found in part ``k``, to be passed to `count`."""

    def count(self, k: int, counts: Any) -> None:
        """Add the bad data found in part ``k``, perhaps in another process; nothing is counted twice."""


class InMemory:
    """Experience in memory, split into parts of bounded size, with what a pipeline uses of a `Recording`."""

    is_in_memory = True

    def __init__(self, exp: Experience, max_rows: int = PIECE_ROWS) -> None:
        self.columns = list(exp.steps)
        self._pieces = list(pieces(exp, max_rows))
        self.num_parts = len(self._pieces)

    def part(
        self, k: int, columns: Sequence[str] | None = None, *, finals: bool = True, next_obs: bool = False
    ) -> Experience:
        """Return piece ``k`` with all its columns."""
        return self._pieces[k]

    def counts(self, k: int) -> None:
        """Return None: bad data was counted when the experience was read."""

    def count(self, k: int, counts: None) -> None:
        """Do nothing."""


class Preparation:
    """Selects the segments of a module and applies the connectors to them, except those that need the module.

    Args:
        connectors: The connectors between env and module.
        to_learner: The learner connectors that do not need the module.
        select: Returns the segments that a module learns from; None is all.
        where: A condition on steps; the others are left out.
        own: The user's prelearner, which wraps the connectors.
        in_env_units: Whether recorded actions are the env's rather than the module's, so that the connectors must map
            them back.
    """

    def __init__(
        self,
        connectors: Pipeline,
        to_learner: Pipeline,
        *,
        select: Connect | None = None,
        where: RowFilter | None = None,
        own: PreLearnerLike | None = None,
        in_env_units: bool = False,
    ) -> None:
        self.connectors, self.to_learner = connectors, to_learner
        self.select, self.where, self.own, self.in_env_units = select, where, own, in_env_units
        self._all = (*connectors.connectors, *to_learner.connectors)
        self.learning = [i for i, connector in enumerate(self._all) if overrides(connector, "update")]
        """The indices of connectors that learn from the recording, among those of both pipelines."""
        needed = [root for connector in self._all for root in connector.needs or ()]
        self._unused = [name for name in col.LEARNERS if name not in needed]

    @property
    def uses_final_obs(self) -> bool:
        """Whether final observations may be used."""
        connectors = [connector for connector in self._all if overrides(connector, "offline")]
        return self.own is not None or any(c.needs is None or col.under(c.needs, col.OBS) for c in connectors)

    def chosen(self, exp: Experience) -> Experience:
        """Return the segments that the module learns from, with the steps that meet the condition.

        Columns that the learner computes are left out unless a connector needs the recorded ones.
        """
        exp = exp if self.select is None else self.select(exp)
        exp = exp if self.where is None else self.where.chosen(exp)
        if exp.steps.keys().isdisjoint(self._unused):
            return exp
        return exp.only([name for name in exp.steps if name not in self._unused])

    def __call__(self, exp: Experience) -> Experience:
        """Prepare the segments that `chosen` returned; steps that must not be trained on become lookback.

        Raises:
            DataError: the user's prelearner fails, or does not return an Experience.
        """
        if self.own is None:
            return self.connect(exp)
        name = getattr(self.own, "__qualname__", repr(self.own))
        where = f"episode {exp.segments.episode_id[0]!r} and others" if exp.num_segments else "no segments"
        try:
            made = self.own(exp, self.connect)
        except EtudeError:
            raise
        except Exception as error:
            raise DataError(f"the prelearner {name} fails on {where}: {type(error).__name__}: {error}") from error
        if not isinstance(made, Experience):
            raise DataError(f"the prelearner {name} gives {type(made).__name__} for {where}: it must give Experience.")
        return made

    def connect(self, exp: Experience) -> Experience:
        """Apply all connectors."""
        exp = with_context(self._acted(exp), self.connectors.context)
        return self.to_learner.offline(self.connectors.offline(exp))

    def learn(self, index: int, exp: Experience) -> None:
        """Update a connector of `learning`, such as the statistics of `NormalizeObs`, from a part of the recording.
        Those before it must have learned from all parts already."""
        connector, before = self._all[index], Pipeline(self._all[:index])
        exp = self._acted(self.chosen(exp))
        looks_at_obs = connector.needs is None or col.OBS in connector.needs
        if looks_at_obs and not connector.hindsight:  # hindsight needs all steps of an episode
            exp = with_context(exp, before.context)
        connector.update(before.offline(exp))

    def _acted(self, exp: Experience) -> Experience:
        """Map the actions back to the module's, if they are the env's."""
        action = col.subtree(exp.steps, col.ACTION) if self.in_env_units else {}
        return exp.with_steps(**self.connectors.unact(action)) if action else exp


def _added(before: Experience, after: Experience) -> list[str]:
    """The columns that connectors have added, and those of `LEARNERS` that they have replaced."""
    is_new = {name: name not in before.steps for name in after.steps}
    is_new |= {name: after.steps[name] is not before.steps.get(name) for name in col.LEARNERS if name in after.steps}
    return [name for name, new in is_new.items() if new]


def with_context(exp: Experience, context: int) -> Experience:
    """Turn the first ``context`` steps of segments that begin in the middle of their episode into lookback.

    Connectors with memory can't know what came before these steps, so the steps are seen but not trained on.
    """
    lookback = np.where(exp.segments.t_start > 0, np.minimum(context, exp.lengths), 0)
    if (exp.segments.lookback >= lookback).all():
        return exp
    return exp.with_segments(lookback=np.maximum(exp.segments.lookback, lookback))


@dataclasses.dataclass(frozen=True)
class Steps:
    """Converts experience to single steps, with the columns ``roots`` (by name or root, or derived) and ``added``."""

    roots: tuple[str, ...]

    def __call__(self, exp: Experience, added: Sequence[str]) -> Columns:
        """Return the columns of the steps to train on."""
        return steps_of(
            exp, [*self.roots, *(name for name in added if not any(col.is_under(name, root) for root in self.roots))]
        )

    @property
    def next_obs(self) -> bool:
        """Whether it needs the next observation of each step."""
        return col.NEXT_OBS in self.roots

    def rows(self, made: Columns) -> int:
        """The number of steps."""
        return rows_of(made)


@dataclasses.dataclass(frozen=True)
class Cuts:
    """Cuts experience into segments of at most ``max_len`` steps to train on, after ``burn_in`` steps of lookback."""

    max_len: int
    burn_in: int = 0
    next_obs: ClassVar[bool] = False

    def __call__(self, exp: Experience, added: Sequence[str]) -> Experience:
        """Return the segments, with all their columns."""
        return cut_segments(exp, self.max_len, self.burn_in)

    def rows(self, made: Experience) -> int:
        """The number of steps to train on."""
        return int(made.num_steps - made.segments.lookback.sum())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a `DataPipeline`, which are also sent to its workers. Workers call it to process a part."""

    source: PartSource
    prepare: Preparation
    """Selects segments and applies connectors."""
    make: Steps | Cuts
    """Converts prepared experience to single steps or to segments."""
    batch_size: float
    """Steps in a batch, or segments if `by_segments`. Of segments, it may be a fraction: the mean over batches."""
    by_segments: bool = False
    columns: tuple[str, ...] | None = None
    """The step columns to read, by name or root; None is all."""
    hold_prepared: bool = False
    """Whether the results of `prepare` are kept in memory."""
    epoch_size: int | None = None
    """The number of steps (or segments) in an epoch, if known from an earlier run."""
    start: int = 0
    """Index of the first batch, for a run that is resumed."""
    buffer_size: int = 65_536
    """Rows that are shuffled together."""
    num_workers: int = 0
    """Workers that read and prepare parts; 0 does it in the thread that makes batches."""
    worker_kind: WorkerKind = "threads"
    """Whether the workers are threads or processes."""
    prefetch: int = 2
    """Blocks of batches that a thread prepares ahead; 0 uses no thread."""
    seed: int = 0
    """Random seed; equal seeds give the same order."""

    def __call__(self, k: int) -> tuple[Any, LoadingStats]:
        """Load, prepare and convert part ``k``; None if the columns of the condition show that no step meets it."""
        spent = LoadingStats(part=k)
        with spent.on(LOAD):
            if not self._is_wanted(k):
                spent.bad = self.source.counts(k)
                return None, spent
            next_obs = self.make.next_obs
            finals = next_obs or isinstance(self.make, Cuts) or self.prepare.uses_final_obs
            exp = self.source.part(k, self.columns, finals=finals, next_obs=next_obs)
        if not self.source.is_in_memory:
            spent.bytes = exp.num_steps * row_bytes(exp)
        with spent.on(CONNECTORS):
            chosen = self.prepare.chosen(exp)
            prepared = self.prepare(chosen)
            made: Any = self.make(prepared, _added(chosen, prepared))
        spent.rows = self.make.rows(made)
        spent.left_out = max(0, int(chosen.num_steps - chosen.segments.lookback.sum()) - spent.rows)
        spent.bad = self.source.counts(k)
        return made, spent

    def _is_wanted(self, k: int) -> bool:
        where = self.prepare.where
        if where is None or self.source.is_in_memory:
            return True
        return bool(where.holds(self.source.part(k, where.columns_in(self.source.columns), finals=False)).any())


class Loaders(Protocol):
    """Workers that load parts, such as `LoadWorkers` with a `Plan`."""

    def done(self, numbers: Iterable[int]) -> Iterator[tuple[Any, LoadingStats]]:
        """Yield the results for the parts with these numbers, in order: all of a part, a share of it, or nothing."""

    def close(self) -> Any:
        """Stop loading."""


class _Loading:
    """The state that a pipeline's threads share. They must not refer to the pipeline, whose deletion ends them."""

    def __init__(self, source: PartSource, loaders: Loaders, by_segments: bool, epoch_size: int | None) -> None:
        self._source, self.loaders, self._by_segments = source, loaders, by_segments
        self.epoch_size = epoch_size
        self.left_out = 0
        self.spent = LoadingStats()

    def parts(self, order: Iterable[int]) -> Iterator[Any]:
        """Yield parts, ready to be shuffled."""
        size = left_out = 0
        # Making a block is counted as shuffling, and includes the wait for parts, which is subtracted here.
        for made, spent in _each_timed(self.loaders.done(list(order)), lambda seconds: self.shuffled(-seconds)):
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
        """The size of an epoch; the largest integer until it is known."""
        return self.epoch_size or sys.maxsize

    def shuffled(self, seconds: float) -> None:
        """Count seconds of shuffling."""
        self.spent.seconds[SHUFFLE] += seconds


class DataPipeline:
    """Endless batches for one module, each step once per epoch; they depend on the seed, but not on the workers.

    Args:
        plan: What to load, and how.
        to_device: Moves a batch to the learner's device, ahead of time.
        loaders: The workers that load parts; None uses workers of this process, according to ``plan``.
    """

    def __init__(
        self, plan: Plan, *, to_device: Callable[[Columns], Any] | None = None, loaders: Loaders | None = None
    ) -> None:
        self.source, self._plan = plan.source, plan
        loaders = LoadWorkers(plan, plan.num_workers, plan.worker_kind) if loaders is None else loaders
        self._loading = _Loading(plan.source, loaders, plan.by_segments, plan.epoch_size)
        self._to_device = to_device
        self._ahead: Prefetched[Any] | None = None
        self._moved: Prefetched[Any] | None = None

    @property
    def epoch_size(self) -> int | None:
        """The number of steps, or segments, in an epoch; None until the first epoch has been read."""
        return self._loading.epoch_size

    @property
    def left_out(self) -> int:
        """The number of trainable steps of an epoch that were lost; see `LoadingStats.left_out`."""
        return self._loading.left_out

    @property
    def spent(self) -> LoadingStats:
        """The time, rows and bytes spent since the beginning."""
        return self._loading.spent

    def batches(self, start: int = 0) -> Iterator[Any]:
        """Iterate over batches from index ``start`` on, as if those before it had been taken.

        Raises:
            DataError: something can't be read, or lacks a requested column.
        """
        plan = self._plan
        rows = 0 if plan.hold_prepared else sys.maxsize  # an epoch that fits in the buffer stays there
        groups = Groups(self._loading.parts, self.source.num_parts, rows, self._loading.known_size)
        pool = WholeSegmentPool if plan.by_segments else SegmentPool
        made: Iterator[Any] = batches_of(
            groups,
            RowPool if isinstance(plan.make, Steps) else pool,
            plan.batch_size,
            buffer_size=plan.buffer_size,
            seed=plan.seed,
            start=start,
            ahead=self._made_ahead,
        )
        if self._to_device is None or not isinstance(plan.make, Steps):
            return made
        self._moved = Prefetched(map(self._to_device, made), max(1, plan.prefetch))
        return self._moved

    def _made_ahead(self, blocks: Iterator[Any]) -> Iterator[Any]:
        blocks = _each_timed(blocks, self._loading.shuffled)
        if not self._plan.prefetch:
            return blocks
        self._ahead = Prefetched(blocks, self._plan.prefetch)
        return self._ahead

    @property
    def depth(self) -> int | None:
        """The number of blocks that are ready; None if blocks are not prepared ahead."""
        return None if self._ahead is None else self._ahead.depth

    def close(self) -> None:
        """End all workers; garbage collection does so as well."""
        if not isinstance(self._loading.loaders, LoadWorkers):  # a thread of this pipeline may be waiting for these
            self._loading.loaders.close()
        for thread in (self._moved, self._ahead):
            if thread is not None:
                thread.close()
        self._loading.loaders.close()


def _each_timed(items: Iterator[Any], note: Callable[[float], None]) -> Iterator[Any]:
    while True:
        begin = time.perf_counter()
        item = next(items, None)
        note(time.perf_counter() - begin)
        if item is None:
            return
        yield item
