# SPDX-License-Identifier: Apache-2.0
"""A recording as a Ray Data source: tasks that each read and prepare some parts, and the blocks that they return.

A row is a step or a whole segment, so that a block can be split between learners anywhere. Data about the block and not
its rows is in its schema's metadata: the time spent on each part, and the number of rows.
"""

import base64
import pickle
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import ray
import ray.cloudpickle
from ray.data import DataIterator, Datasource, ReadTask
from ray.data.block import BlockMetadata

from etude.columns import Columns
from etude.errors import EngineError, EtudeError, SettingsError
from etude.experience import Experience, Segments
from etude.recordings.batches import rows_of
from etude.recordings.pieces import copied
from etude.recordings.pipeline import LAYERS, Plan, Spent

TASK_BYTES: Final = 16 * 2**20
"""The approximate size of a task, so large that Ray's cost per task and block is small in comparison."""
LARGE_ROW: Final = 1024
"""Size in bytes from which rows are copied out of the object store at once, because a buffer of them would fill it."""
_KEPT: Final = 8
_SPENT: Final = b"etude:spent"
_SCHEMA: Final = b"etude:segment"
_STEP: Final = "step/"  # so that no column has the name of a segment column
_SEGMENT: Final = "segment"
_UNFOUND: Final = re.compile(r"(ModuleNotFoundError|ImportError|AttributeError): .*")

# -- blocks -------------------------------------------------------------------------------------------------------


def to_block(made: Sequence[Columns | Experience | None], spent: Sequence[Spent]) -> pa.Table:
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


def from_block(table: pa.Table) -> tuple[Columns | Experience, list[Spent], float]:
    """The contents of a block or a share of it, what was spent on its parts, and the share's fraction, 0 to 1."""
    spent: list[Spent] = pickle.loads(base64.b64decode(table.schema.metadata[_SPENT]))  # noqa: S301 - see `to_block`
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
            f"the tasks of Ray Data that read and prepare data can't be sent this: {error}. It is part of a "
            "prelearner, a connector or a source: create it on first use instead."
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
        raise EngineError(
            "a process that reads data can't create the prelearner, a connector, a module or a source: "
            f"{type(error).__name__}: {error}. Their code must be importable on every node: see `ray.runtime_env`."
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
        parts_per_task: The most parts of a task; the first tasks read fewer, so that a batch is ready soon.
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


# -- what a learner gets ------------------------------------------------------------------------------------------

Shares: TypeAlias = dict[int, tuple[int, int]]
"""By the first part of a block: the number of its steps, and of those that this learner got."""


class BlockLoader:
    """Loads a learner's share of the blocks; see `etude.recordings.pipeline.Loaders`.

    Args:
        split: The blocks of this learner, epoch by epoch.
        prefetch: The number of blocks to fetch ahead.
        holds: Whether the learner keeps everything.
    """

    def __init__(self, split: DataIterator, prefetch: int, *, holds: bool) -> None:
        self._split, self._prefetch, self._holds = split, prefetch, holds
        self._epochs = 0
        self.shares: dict[int, Shares] = {}
        """The last two finished epochs, by number; learners may be in different epochs."""
        self.parts: set[int] | None = None
        """The parts with blocks in the first epoch; None before its end."""

    def done(self, numbers: Any) -> Iterator[tuple[Any, Spent]]:
        """This learner's share of an epoch, in the order in which blocks arrive.

        Raises:
            EtudeError: raised by the work on a part; an EngineError for any other failure there.
        """
        shares: Shares = {}
        came: set[int] = set()
        whole: Any = None  # unchanged blocks; Ray accepts None, but does not declare it
        try:
            for table in self._split.iter_batches(
                batch_size=whole, batch_format="pyarrow", prefetch_batches=self._prefetch
            ):
                made, spent, part = from_block(table)
                total = sum(one.rows for one in spent)
                share = Spent(rows=round(part * total))
                for one in spent:
                    came.add(one.part or 0)
                    yield None, Spent(part=one.part, bad=one.bad)
                    for layer in LAYERS:
                        share.seconds[layer] += one.seconds[layer] * part
                    share.bytes += round(one.bytes * part)
                    share.left_out += round(one.left_out * part)
                first = spent[0].part or 0
                shares[first] = (total, shares.get(first, (0, 0))[1] + share.rows)
                yield self._own(made), share
        except ray.exceptions.RayError as error:
            raise cause_of(error) from None
        self.parts = came if self.parts is None else self.parts
        self.shares[self._epochs] = shares
        self.shares.pop(self._epochs - 2, None)
        self._epochs += 1

    def _own(self, made: Columns | Experience) -> Any:
        """A copy in this process's memory if it is kept, or if its rows are large."""
        columns = made.steps if isinstance(made, Experience) else made
        if not self._holds and sum(int(column[:1].nbytes) for column in columns.values()) < LARGE_ROW:
            return made
        return copied(made) if isinstance(made, Experience) else {name: np.array(c) for name, c in made.items()}

    def close(self) -> None:
        """Do nothing: blocks end with the learner's process."""


def cause_of(error: BaseException) -> EtudeError:
    """The original error inside Ray's wrappers."""
    cause: BaseException | None = error
    last = error
    while cause is not None:
        if isinstance(cause, EtudeError) and not isinstance(cause, ray.exceptions.RayError):
            return cause
        last = cause if str(cause) else last  # the last error in Ray Data's chain has no text
        cause = getattr(cause, "cause", None) or cause.__cause__
    unfound = _UNFOUND.search(str(last))
    if unfound is not None:
        return EngineError(
            f"a process of Ray Data can't create the objects that it needs: {unfound[0]}. Their code must be "
            "importable on every node: see `ray.runtime_env`."
        )
    lost = isinstance(last, ray.exceptions.ObjectLostError | ray.exceptions.NodeDiedError)
    then = " A node was lost: resume from the last checkpoint." if lost else ""
    return EngineError(f"Ray Data could not read or prepare the recording: {type(last).__name__}: {last}{then}")
