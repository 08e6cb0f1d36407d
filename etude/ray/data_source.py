# SPDX-License-Identifier: Apache-2.0
"""A recording as a source of Ray Data: tasks that each read and prepare some parts, and the blocks that they return.

A row of a block is a step or a whole segment, so that it can be split between learners anywhere. Data about the block
and not its rows is in its schema's metadata: the time spent on each part, and the number of rows.

The processes that run the tasks import this file, which therefore imports no torch.
"""

import base64
import pickle
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import ray
import ray.cloudpickle
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from etude.columns import Columns
from etude.errors import EngineError, SettingsError
from etude.experience import Experience, Segments
from etude.recordings.batches import rows_of
from etude.recordings.pipeline import LoadingStats, Plan

TASK_BYTES: Final = 16 * 2**20
"""The approximate size of a task, so large that Ray's cost per task and block is small in comparison."""

_KEPT: Final = 8
_SPENT: Final = b"etude:spent"
_SCHEMA: Final = b"etude:segment"
_STEP: Final = "step/"  # so that no column has the name of a segment column
_SEGMENT: Final = "segment"

# -- blocks -------------------------------------------------------------------------------------------------------


def to_block(made: Sequence[Columns | Experience | None], spent: Sequence[LoadingStats]) -> pa.Table:
    """One block from the results of several parts: steps as rows of columns, or segments as rows of Experience.

    Raises:
        DataError: a column holds values that a recording can't store.
    """
    # The pickle only goes from one of Ray's processes to another; it is never in a file.
    about = {_SPENT: base64.b64encode(pickle.dumps(list(spent)))}
    there: list[Any] = [one for one in made if one is not None and _rows_in(one)]
    if not there:
        return pa.table({"nothing": pa.array([], pa.bool_())}).replace_schema_metadata(about)
    if isinstance(there[0], Experience):
        exp = Experience.concat(there)
        steps = exp.to_table().combine_chunks()
        rows = pa.LargeListArray.from_arrays(pa.array(exp.offsets), steps.to_batches()[0].to_struct_array())
        about[_SCHEMA] = base64.b64encode(steps.schema.serialize().to_pybytes())
        return pa.table({_SEGMENT: rows}).replace_schema_metadata(about)
    columns = {_STEP + name: np.concatenate([one[name] for one in there]) for name in there[0]}
    num = sum(map(_rows_in, there))
    table = Experience(columns, np.array([0, num]), Segments.of(1, episode_id=[""]), {}).to_table()
    kept = table.select([name for name in table.column_names if name.startswith(_STEP) or name in _KEYS])
    return kept.replace_schema_metadata(about)


_KEYS: Final = ("episode_id", "t")


def from_block(table: pa.Table) -> tuple[Columns | Experience, list[LoadingStats], float]:
    """The contents of a block or a share of it, what was spent on its parts, and the share's fraction, 0 to 1."""
    spent: list[LoadingStats] = pickle.loads(base64.b64decode(table.schema.metadata[_SPENT]))  # noqa: S301 - see `to_block`
    total = max(1, sum(one.rows for one in spent))
    if _SEGMENT not in table.column_names:
        exp = Experience.from_table(table)
        steps = {name.removeprefix(_STEP): column for name, column in exp.steps.items()}
        return steps, spent, table.num_rows / total
    lists = table[_SEGMENT].combine_chunks()
    lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(table.schema.metadata[_SCHEMA])))
    exp = Experience.from_table(pa.Table.from_arrays(lists.flatten().flatten(), schema=schema))
    return exp, spent, (exp.num_steps - int(exp.segments.lookback.sum())) / total


def _rows_in(made: Columns | Experience) -> int:
    """The number of steps, or of segments."""
    return len(made) if isinstance(made, Experience) else rows_of(made)


# -- tasks --------------------------------------------------------------------------------------------------------


def shared_job(job: Plan) -> Any:
    """A reference to the work of tasks on a part, in the object store once for all tasks.

    It is stored as bytes: if a process can't unpickle an object, Ray reports a system failure, and Ray Data retries
    without end.

    Raises:
        SettingsError: it contains something that can't be sent to other processes.
    """
    try:
        data = ray.cloudpickle.dumps(job)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise SettingsError(
            f"this can't be sent to the tasks of Ray Data: {error}. Create it on first use, where it is needed."
        ) from error
    return ray.put(data)


@lru_cache(_KEPT)
def _loaded(ref: Any) -> Plan:
    """The job, which each process unpickles once.

    Raises:
        EngineError: this process can't unpickle it, because a module can't be imported here.
    """
    data = ray.get(ref)
    try:
        with _uninterrupted():
            plan: Plan = ray.cloudpickle.loads(data)
    except Exception as error:
        from etude.ray.cluster import IMPORTABLE  # imports torch

        raise EngineError(
            "a process that reads data can't create the prelearner, a connector, a module or a source: "
            f"{type(error).__name__}: {error}. {IMPORTABLE}"
        ) from error
    return plan


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A context in which a task is not interrupted when it is no longer needed.

    Ray interrupts such tasks. If this happens while torch is imported, torch can't be imported again in that process,
    in which later tasks would fail.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class RecordingSource(Datasource):
    """Blocks of steps or segments. Each execution planned by Ray is the next epoch.

    Args:
        job: The work on a part, see `shared_job`.
        num_parts: The number of parts in the recording.
        parts_per_task: Maximum number of parts in a task; the first tasks read fewer, so that a batch is ready soon.
        seed: Seed of the order of parts in each epoch, as on the local engine. None: the order of the recording.
        epoch: The index of the first epoch.
    """

    def __init__(self, job: Any, num_parts: int, parts_per_task: int, seed: int | None, epoch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._job, self._num_parts, self._parts_per_task = job, num_parts, parts_per_task
        self._seed, self._epoch = seed, epoch

    def estimate_inmemory_data_size(self) -> int | None:
        """The size is unknown before reading."""
        return None

    def tasks(self) -> list[list[int]]:
        """The parts of each task in the next epoch."""
        order = list(range(self._num_parts))
        if self._seed is not None:  # see `etude.recordings.batches`
            order = np.random.default_rng([self._seed, self._epoch]).permutation(self._num_parts).tolist()
        out, at, size = [], 0, 1
        while at < len(order):
            out.append(order[at : at + size])
            at += size
            size = min(2 * size, self._parts_per_task)
        return out

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """The tasks of the next epoch; without ``data_context``, Ray only inspects them."""
        tasks = self.tasks()
        if data_context is not None:
            self._epoch += 1
        unknown = BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None, input_files=None)
        return [ReadTask(partial(_read, self._job, parts), unknown) for parts in tasks]


def _read(job: Any, parts: Sequence[int]) -> Iterator[pa.Table]:
    own = _loaded(job)
    made, spent = zip(*(own(k) for k in parts), strict=True)
    yield to_block(made, spent)
