# SPDX-License-Identifier: Apache-2.0
"""What a learner gets of the blocks that Ray Data streams to it: parts, in place of workers of its own."""

import atexit
import contextlib
import dataclasses
import queue
import re
import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from time import monotonic
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import ray
from ray.data import DataIterator

from etude.columns import Columns
from etude.errors import EngineError, EtudeError
from etude.experience import Experience
from etude.ray.data_blocks import Loaded, from_block
from etude.recordings.layers import Spent
from etude.recordings.pieces import copied

_LARGE_ROW: Final = 1024
"""Bytes from which on rows are copied out of the object store at once, which a buffer of them would else fill."""
_PATIENCE: Final = 10.0
"""Seconds within which Ray Data is to end an execution."""
_OF_RAY_DATA: Final = "iter_threaded"
"""What Ray Data calls its threads that fetch blocks."""
_UNFOUND: Final = re.compile(r"(ModuleNotFoundError|ImportError|AttributeError): .*")
_POLL: Final = 0.1
"""Seconds after which who waits looks whether it is over."""


Cuts: TypeAlias = dict[int, tuple[int, int]]
"""By the first part of a block that was split between learners: its steps, and those that this learner got."""


class _Fetched(Iterator[pa.Table]):
    """Blocks that a thread fetches. Closing does not wait for one: Ray gives it perhaps when all learners want one."""

    def __init__(self, blocks: Generator[pa.Table], is_closed: threading.Event) -> None:
        self._ready: queue.Queue[Any] = queue.Queue(1)
        self._ended, self._is_closed = threading.Event(), is_closed
        self._thread = threading.Thread(target=self._fetch, args=(blocks,), name="etude-blocks", daemon=True)
        self._thread.start()

    def _fetch(self, blocks: Generator[pa.Table]) -> None:
        last: Any = None
        try:
            with contextlib.closing(blocks):  # which lets Ray Data's own threads end
                for block in blocks:
                    self._put(block)
                    if self._is_over():
                        return
        except BaseException as error:  # noqa: BLE001 - raised again where the blocks are taken
            last = error
        self._put(last)

    def _put(self, item: Any) -> None:
        while not self._is_over():
            try:
                return self._ready.put(item, timeout=_POLL)
            except queue.Full:
                continue

    def _is_over(self) -> bool:
        return self._ended.is_set() or self._is_closed.is_set() or not threading.main_thread().is_alive()

    def __next__(self) -> pa.Table:
        while not self._is_over():
            try:
                item = self._ready.get(timeout=_POLL)
            except queue.Empty:
                continue
            if isinstance(item, pa.Table):
                return item
            self.close()
            if item is not None:
                raise item
        raise StopIteration

    def close(self, patience: float = 0.0) -> None:
        """Fetch no more. Wait so many seconds, at most, for what is fetched now."""
        self._ended.set()
        if patience:
            self._thread.join(patience)


@dataclasses.dataclass
class Blocks:
    """One learner's share of the blocks of each epoch. Goes to the learner's process.

    Args:
        splits: What Ray Data gives it: of one dataset; or of two, which take turns, so that the next epoch begins while
            this one comes to its end.
        num_tasks: How many blocks an epoch has, over all learners.
        num_learners: How many these are, at least 1.
        is_alone: The process that trains is the learner: Ray Data waits for no other one.
        prefetch: Blocks that are fetched ahead.
        holds: Everything is kept by the learner, so that there is but one epoch.
    """

    splits: list[DataIterator]
    num_tasks: int
    num_learners: int
    is_alone: bool
    prefetch: int
    holds: bool

    def of(self, execution: int) -> Generator[pa.Table]:
        """The blocks of one execution.

        Raises:
            EtudeError: what the work on a part has raised.
            EngineError: something else went wrong there.
        """
        split = self.splits[execution % len(self.splits)]
        whole: Any = None  # blocks as they are; Ray takes it, but does not declare it
        batches = split.iter_batches(batch_size=whole, batch_format="pyarrow", prefetch_batches=self.prefetch)
        try:
            yield from batches
        except ray.exceptions.RayError as error:
            raise cause_of(error) from None


class RayCrew:
    """Loads parts as an `etude.recordings.pipeline.Crew` does, but by Ray Data. Not for several threads at once."""

    def __init__(self, blocks: Blocks, job: Any = None) -> None:
        self._blocks, self._job = blocks, job
        self._executions = 0
        self._is_closed = threading.Event()
        weakref.finalize(self, self._is_closed.set)
        _OPEN.add(self)
        self._next: _Fetched | None = None
        self._streams: list[_Fetched] = []
        self._empty: dict[int, tuple[Any, Spent]] = {}
        self._epochs = 0
        self.cuts: dict[int, Cuts] = {}
        """Of the last whole epochs, by how many there were before. Learners are not all equally far."""
        self.parts: set[int] | None = None
        """Those of which a block came in the first epoch; None before its end."""

    def done(self, numbers: Iterable[int]) -> Iterator[tuple[Any, Spent]]:
        """This learner's share of an epoch: of parts, all, some or nothing, in the order in which they come."""
        stream, self._next = self._next or self._opened(), None
        self._streams = [stream]
        left = deque(numbers)
        cuts: Cuts = {}
        came: set[int] = set()
        begins_next = self._blocks.num_tasks // self._blocks.num_learners // 2
        try:
            for i, block in enumerate(stream):
                loads = list(from_block(block))
                parts = {loaded.spent.part for loaded in loads}
                came |= {part for part in parts if part is not None}
                while self._job is not None and left and left[0] not in parts:
                    yield self._without_block(left.popleft())
                while left and left[0] in parts:
                    left.popleft()
                for loaded in loads:
                    if loaded.cut_from is not None:
                        first, steps = loaded.cut_from
                        cuts[first] = (steps, cuts.get(first, (steps, 0))[1] + loaded.spent.rows)
                    yield self._own(loaded), loaded.spent
                if i == begins_next and len(self._blocks.splits) > 1:
                    self._next = self._opened()
                    self._streams.append(self._next)
        finally:
            stream.close()
        if self._is_closed.is_set():  # an epoch that has not come to its end must not look as if it had
            raise EngineError("no batch can be taken any more: what reads the recording was closed.")
        while self._job is not None and left:
            yield self._without_block(left.popleft())
        if self.parts is None:
            self.parts = came
        self.cuts[self._epochs] = cuts
        self.cuts.pop(self._epochs - 2, None)
        self._epochs += 1

    def _opened(self) -> "_Fetched":
        """The blocks of the next execution, the first of them fetched ahead, by a thread."""
        execution, self._executions = self._executions, self._executions + 1
        return _Fetched(self._blocks.of(execution), self._is_closed)

    def _without_block(self, k: int) -> tuple[Any, Spent]:
        """What was found out about a part that nothing was made of: Ray drops blocks without rows."""
        if k not in self._empty:
            self._empty[k] = self._job(k)
        made, spent = self._empty[k]
        return made, dataclasses.replace(spent, seconds=dict.fromkeys(spent.seconds, 0.0), bytes=0)

    def _own(self, loaded: Loaded) -> Any:
        """In memory of this process, where it is to stay."""
        made = loaded.made
        if made is None or not (self._blocks.holds or _row_bytes(made) >= _LARGE_ROW):
            return made
        return copied(made) if isinstance(made, Experience) else {name: np.array(c) for name, c in made.items()}

    def close(self) -> None:
        """Fetch no more; who waits for a block gets none."""
        self._is_closed.set()
        _OPEN.discard(self)
        for stream in self._streams:
            stream.close(_PATIENCE if self._blocks.is_alone else 0.0)
        if self._blocks.is_alone and not _OPEN:
            _let_end()


def _let_end() -> None:
    """Wait for Ray Data's own threads, which it can't be asked to do: one at work while Ray ends ends the process."""
    end = monotonic() + _PATIENCE / 5
    for thread in threading.enumerate():
        if thread.name == _OF_RAY_DATA and thread.is_alive():
            thread.join(max(0.0, end - monotonic()))


_OPEN: Final[weakref.WeakSet[RayCrew]] = weakref.WeakSet()


@atexit.register  # after Ray has: so this comes before its end
def _close_all() -> None:
    for crew in list(_OPEN):
        crew.close()


def _row_bytes(made: Columns | Experience) -> int:
    columns = made.steps if isinstance(made, Experience) else made
    return sum(int(column[:1].nbytes) for column in columns.values())


def cause_of(error: BaseException) -> EtudeError:
    """What went wrong, without what Ray has put around it."""
    cause: BaseException | None = error
    last = error
    while cause is not None:
        if isinstance(cause, EtudeError) and not isinstance(cause, ray.exceptions.RayError):
            return cause
        last = cause if str(cause) else last  # what Ray Data puts at the end says nothing
        cause = getattr(cause, "cause", None) or cause.__cause__
    unfound = _UNFOUND.search(str(last))
    if unfound is not None:
        return EngineError(
            f"a process of Ray Data can't make what it is to work with: {unfound[0]}. What that is made of must be "
            "importable on every node: see `ray.runtime_env`."
        )
    lost = isinstance(last, ray.exceptions.ObjectLostError | ray.exceptions.NodeDiedError)
    then = " A node was lost with it: go on from the last checkpoint." if lost else ""
    return EngineError(f"Ray Data could not read or prepare the recording: {type(last).__name__}: {last}{then}")
