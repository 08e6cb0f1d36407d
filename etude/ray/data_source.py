# SPDX-License-Identifier: Apache-2.0
"""A recording as a source of Ray Data: tasks that each read some parts, and prepare them in the same go."""

import dataclasses
import signal
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Generic, TypeVar

import numpy as np
import pyarrow as pa
import ray
import ray.cloudpickle
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from etude.errors import EngineError, SettingsError
from etude.ray.data_blocks import Loaded, to_block
from etude.recordings.pipeline import Job

TASK_BYTES: Final = 16 * 2**20
"""What a task reads, about: large enough that Ray's cost per task and block is small beside it."""
T = TypeVar("T")

_KEPT: Final = 8


@dataclasses.dataclass(frozen=True)
class Shared(Generic[T]):
    """What tasks work with, in the object store, once for all of them; each process makes it once.

    It lies there as bytes: of an object that a process can't make, Ray says that its system has failed, and Ray Data
    asks for the same again and again, without end.
    """

    ref: "ray.ObjectRef[bytes]"
    key: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def of(cls, thing: T) -> "Shared[T]":
        """Put it there.

        Raises:
            SettingsError: it holds what can't be sent to other processes.
        """
        try:
            data = ray.cloudpickle.dumps(thing)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise SettingsError(
                f"tasks of Ray Data read and prepare, to which this can't be sent: {error}. A prelearner, a connector "
                "or a source holds it: make it where it is first used."
            ) from error
        return cls(ray.put(data))

    def get(self) -> T:
        """The thing.

        Raises:
            EngineError: this process can't make it, as what it is made of can't be imported here.
        """
        if self.key not in _made:
            data = ray.get(self.ref)
            try:
                with _uninterrupted():
                    _made[self.key] = ray.cloudpickle.loads(data)
            except Exception as error:
                raise EngineError(
                    "a process that reads can't make the prelearner, a connector, a module or a source: "
                    f"{type(error).__name__}: {error}. What they are made of must be importable on every node: see "
                    "`ray.runtime_env`."
                ) from error
            while len(_made) > _KEPT:
                _made.popitem(last=False)
        found: T = _made[self.key]
        return found


_made: OrderedDict[str, Any] = OrderedDict()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Within it, a task that is not wanted any more goes on.

    Ray interrupts these; but torch, which is imported here, can't be imported again where that broke off, and the next
    tasks would find such a process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclasses.dataclass(frozen=True)
class Epochs:
    """Which parts a task reads, epoch by epoch: all of them in each, in an order of its own."""

    num_parts: int
    parts_per_task: int
    seed: int
    first: int = 0
    """The epoch that is executed first."""
    step: int = 1
    """From one execution to the next."""
    shuffled: bool = True

    def tasks(self, execution: int) -> list[list[int]]:
        """The parts of each task of an execution, counted from 0. The first tasks are small: a batch is soon there."""
        epoch = self.first + execution * self.step
        order = order_of(self.num_parts, self.seed, epoch) if self.shuffled else list(range(self.num_parts))
        out, at, size = [], 0, 1
        while at < len(order):
            out.append(order[at : at + size])
            at += size
            size = min(2 * size, self.parts_per_task)
        return out


def order_of(num_parts: int, seed: int, epoch: int) -> list[int]:
    """The order of parts in an epoch, the same as on the local engine, see `etude.recordings.batches`."""
    order: list[int] = np.random.default_rng([seed, epoch]).permutation(num_parts).tolist()
    return order


class RecordingSource(Datasource):
    """Blocks of steps or segments. Ray plans each execution anew, which makes it the next epoch.

    Args:
        read: Makes a block of the parts of these numbers; it works in Ray's tasks.
        epochs: Which these are.
    """

    def __init__(self, read: Callable[[Sequence[int]], pa.Table], epochs: Epochs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._read, self.epochs = read, epochs
        self._executions = 0

    def estimate_inmemory_data_size(self) -> int | None:
        """Not known before it is read."""
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """The tasks of the next execution; without ``data_context``, of the first, which Ray asks about only."""
        tasks = self.epochs.tasks(self._executions)
        if data_context is not None:
            self._executions += 1
        unknown = BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None, input_files=None)
        return [ReadTask(partial(_blocks, self._read, numbers), unknown) for numbers in tasks]


def _blocks(read: Callable[[Sequence[int]], pa.Table], numbers: Sequence[int]) -> Iterator[pa.Table]:
    yield read(numbers)


def prepared(job: Shared[Job], numbers: Sequence[int]) -> pa.Table:
    """The block of these parts, read and prepared."""
    own = job.get()
    return to_block([Loaded(*own(k)) for k in numbers])


def named(numbers: Sequence[int]) -> pa.Table:
    """Only the numbers, for actors that do the work."""
    return pa.table({"part": pa.array(numbers, pa.int64())})
