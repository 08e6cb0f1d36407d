# SPDX-License-Identifier: Apache-2.0
"""A recording as a source of Ray Data: tasks that each read and prepare some parts, and the blocks that they give.

A row is a step, or a whole segment, so that a block can be split between learners anywhere. What belongs to the block
rather than to its rows is in the metadata of its schema: what was spent on each part, and how many rows there were.
"""

import base64
import pickle
import re
import signal
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
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
from etude.recordings.layers import LAYERS, Spent
from etude.recordings.pieces import copied
from etude.recordings.pipeline import Job

TASK_BYTES: Final = 16 * 2**20
"""What a task reads, about: large enough that Ray's cost per task and block is small beside it."""
LARGE_ROW: Final = 1024
"""Bytes from which on rows are copied out of the object store at once: a buffer of them would fill it."""
_KEPT: Final = 8
_SPENT: Final = b"etude:spent"
_SCHEMA: Final = b"etude:segment"
_STEP: Final = "step/"  # so that no column has the name of a segment's fact
_SEGMENT: Final = "segment"
_UNFOUND: Final = re.compile(r"(ModuleNotFoundError|ImportError|AttributeError): .*")

# -- blocks -------------------------------------------------------------------------------------------------------


def to_block(made: Sequence[Columns | Experience | None], spent: Sequence[Spent]) -> pa.Table:
    """What was made of several parts as one block: steps as rows of columns, or segments as rows of Experience.

    Raises:
        DataError: a column holds what a recording can't keep.
    """
    # Ray brings the pickle from one of its processes to another; it is in no file.
    about = {_SPENT: base64.b64encode(pickle.dumps(list(spent)))}
    there: list[Any] = [one for one in made if one is not None and (len(one) if _is_exp(one) else rows_of(one))]
    if not there:
        return pa.table({"nothing": pa.array([], pa.bool_())}).replace_schema_metadata(about)
    if _is_exp(there[0]):
        exp = Experience.concat(there)
        steps = exp.to_table().combine_chunks()
        rows = pa.LargeListArray.from_arrays(pa.array(exp.offsets), steps.to_batches()[0].to_struct_array())
        about[_SCHEMA] = base64.b64encode(steps.schema.serialize().to_pybytes())
        return pa.table({_SEGMENT: rows}).replace_schema_metadata(about)
    columns = {_STEP + name: np.concatenate([one[name] for one in there]) for name in there[0]}
    num = sum(rows_of(one) for one in there)
    table = Experience(columns, np.array([0, num]), Segments.of(1, episode_id=[""]), {}).to_table()
    kept = table.select([name for name in table.column_names if name.startswith(_STEP) or name in _KEYS])
    return kept.replace_schema_metadata(about)


_KEYS: Final = ("episode_id", "t")


def from_block(table: pa.Table) -> tuple[Columns | Experience, list[Spent], float]:
    """What a block, or a share of it, holds; what was spent on its parts; and how much of the block it is, up to 1."""
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


def _is_exp(made: Any) -> bool:
    return isinstance(made, Experience)


# -- tasks --------------------------------------------------------------------------------------------------------


class SharedJob:
    """What tasks do with a part, in the object store, once for all of them; each process unpickles it once.

    It lies there as bytes: of an object that a process can't unpickle, Ray says that its system has failed, and Ray
    Data asks for the same again and again, without end.

    Raises:
        SettingsError: it holds what can't be sent to other processes.
    """

    def __init__(self, job: Job) -> None:
        try:
            data = ray.cloudpickle.dumps(job)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise SettingsError(
                f"tasks of Ray Data read and prepare, to which this can't be sent: {error}. A prelearner, a connector "
                "or a source holds it: make it where it is first used."
            ) from error
        self._ref, self._key = ray.put(data), uuid.uuid4().hex

    def get(self) -> Job:
        """The job.

        Raises:
            EngineError: this process can't make it, as what it is made of can't be imported here.
        """
        if self._key not in _jobs:
            data = ray.get(self._ref)
            try:
                with _uninterrupted():
                    _jobs[self._key] = ray.cloudpickle.loads(data)
            except Exception as error:
                raise EngineError(
                    "a process that reads can't make the prelearner, a connector, a module or a source: "
                    f"{type(error).__name__}: {error}. What they are made of must be importable on every node: see "
                    "`ray.runtime_env`."
                ) from error
            while len(_jobs) > _KEPT:
                _jobs.popitem(last=False)
        return _jobs[self._key]


_jobs: OrderedDict[str, Job] = OrderedDict()


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


class RecordingSource(Datasource):
    """Blocks of steps or segments. Ray plans each execution anew, which makes it the next epoch.

    Args:
        job: What is done with a part.
        num_parts: Of the recording.
        parts_per_task: At most; the first tasks read fewer, so that a batch is soon there.
        seed: Of the order of the parts in each epoch, which is that of the local engine. None: as they are recorded.
        epoch: The first.
    """

    def __init__(self, job: SharedJob, num_parts: int, parts_per_task: int, seed: int | None, epoch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._job, self._num_parts, self._parts_per_task = job, num_parts, parts_per_task
        self._seed, self._epoch = seed, epoch

    def estimate_inmemory_data_size(self) -> int | None:
        """Not known before it is read."""
        return None

    def tasks(self) -> list[list[int]]:
        """The parts that each task of the next epoch reads."""
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
        """The tasks of the next epoch; without ``data_context``, Ray only asks about them."""
        tasks = self.tasks()
        if data_context is not None:
            self._epoch += 1
        unknown = BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None, input_files=None)
        return [ReadTask(partial(_read, self._job, parts), unknown) for parts in tasks]


def _read(job: SharedJob, parts: Sequence[int]) -> Iterator[pa.Table]:
    own = job.get()
    made, spent = zip(*(own(k) for k in parts), strict=True)
    yield to_block(made, spent)


# -- what a learner gets ------------------------------------------------------------------------------------------

Shares: TypeAlias = dict[int, tuple[int, int]]
"""By the first part of a block: its steps, and those that this learner got."""


class BlockLoader:
    """Gives a learner its share of the blocks; see `etude.recordings.pipeline.Loaders`.

    Args:
        split: Of Ray Data: the blocks of this learner, epoch by epoch.
        prefetch: Blocks that are fetched ahead.
        holds: Everything is kept by the learner.
    """

    def __init__(self, split: DataIterator, prefetch: int, *, holds: bool) -> None:
        self._split, self._prefetch, self._holds = split, prefetch, holds
        self._epochs = 0
        self.shares: dict[int, Shares] = {}
        """Of the last two epochs that have ended, by their number. Learners are not all equally far."""
        self.parts: set[int] | None = None
        """Those of which a block came in the first epoch; None before its end."""

    def done(self, numbers: Any) -> Iterator[tuple[Any, Spent]]:
        """This learner's share of an epoch, in the order in which blocks come.

        Raises:
            EtudeError: what the work on a part has raised; an EngineError if something else went wrong there.
        """
        shares: Shares = {}
        came: set[int] = set()
        whole: Any = None  # blocks as they are; Ray takes it, but does not declare it
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
        """In memory of this process, if it is to stay."""
        columns = made.steps if isinstance(made, Experience) else made
        if not self._holds and sum(int(column[:1].nbytes) for column in columns.values()) < LARGE_ROW:
            return made
        return copied(made) if isinstance(made, Experience) else {name: np.array(c) for name, c in made.items()}

    def close(self) -> None:
        """Nothing: blocks end with the process of the learner."""


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
