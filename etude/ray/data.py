# SPDX-License-Identifier: Apache-2.0
"""Feeds learners on a cluster from a recording, with Ray Data.

See `etude.ray.data_source` for the tasks that read it, and their blocks.
"""

import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import ray
import ray.cloudpickle
from ray.data import DataIterator, ExecutionResources

from etude.algorithms.feed import Feed, named_batches, parted, plan_of
from etude.algorithms.offline import OfflineAlgorithm
from etude.algorithms.ray_config import Ray
from etude.columns import Columns
from etude.connectors import Pipeline
from etude.errors import EngineError, EtudeError, SettingsError
from etude.experience import Experience
from etude.learners.batch import as_tensors
from etude.ray.cluster import IMPORTABLE
from etude.ray.data_source import TASK_BYTES, RecordingSource, from_block, shared_job
from etude.recordings.layout import FORMAT
from etude.recordings.pieces import copied
from etude.recordings.pipeline import LAYERS, DataPipeline, LoadingStats, Plan, Preparation, Steps, with_context
from etude.recordings.screening import Findings
from etude.spaces import leaf_dtype, leaf_shape, leaves

LARGE_ROW: Final = 1024
"""Size in bytes from which rows are copied out of the object store at once, because a buffer of them would fill it."""
_UNFOUND: Final = re.compile(r"(ModuleNotFoundError|ImportError|AttributeError): .*")
_PART_ROWS: Final = 65_536
_PART_BYTES: Final = 64 * 2**20
_MOST_PARTS: Final = 16
_COUNTED_PARTS: Final = 1024
_SAMPLED_PARTS: Final = 32
_STORE_SHARE: Final = 0.4
"""The fraction of the object store that all of an algorithm's datasets together may fill with waiting blocks."""

_log = logging.getLogger("etude.ray")

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

    def done(self, numbers: Any) -> Iterator[tuple[Any, LoadingStats]]:
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
                share = LoadingStats(rows=round(part * total))
                for one in spent:
                    came.add(one.part or 0)
                    yield None, LoadingStats(part=one.part, bad=one.bad)
                    for layer in LAYERS:
                        share.seconds[layer] += one.seconds[layer] * part
                    share.bytes += round(one.bytes * part)
                    share.left_out += round(one.left_out * part)
                first = spent[0].part or 0
                shares[first] = (total, shares.get(first, (0, 0))[1] + share.rows)
                yield self._own(made), share
        except ray.exceptions.RayError as error:
            raise data_error(error) from None
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


def data_error(error: BaseException) -> EtudeError:
    """The original error inside Ray's wrappers."""
    cause: BaseException | None = error
    last = error
    while cause is not None:
        if isinstance(cause, EtudeError) and not isinstance(cause, ray.exceptions.RayError):
            return cause
        last = cause if str(cause) else last  # the last error in Ray Data's chain has no text
        cause = getattr(cause, "cause", None) or cause.__cause__
    then = ""
    if _UNFOUND.search(str(last)):
        then = f" {IMPORTABLE}"
    elif isinstance(last, ray.exceptions.ObjectLostError | ray.exceptions.NodeDiedError):
        then = " A node was lost: resume from the last checkpoint."
    return EngineError(f"Ray Data could not read or prepare the recording: {type(last).__name__}: {last}{then}")


class RemoteRecording:
    """Takes the recording's place at a learner: collects what was found bad, until it is reported.

    Args:
        num_parts: The number of parts in the recording.
        loader: The learner's loader of blocks.
    """

    is_in_memory = False
    columns: Final[list[str]] = []

    def __init__(self, num_parts: int, loader: BlockLoader) -> None:
        self.num_parts, self.loader = num_parts, loader
        self.found: dict[int, Findings] = {}

    def part(self, k: int, columns: Any = None, *, finals: bool = True, next_obs: bool = False) -> Experience:
        """Unused: a learner loads no parts itself."""
        raise NotImplementedError

    def counts(self, k: int) -> Any:
        """See `Recording.counts`."""
        return self.found.get(k)

    def count(self, k: int, counts: Any) -> None:
        """Collect the counts of a part."""
        if counts is not None:
            self.found[k] = counts


@dataclasses.dataclass(frozen=True)
class LearnerReport:
    """A learner's report on its share since the last one."""

    bad: Mapping[int, Findings]
    """By part: the bad rows that were found, see `Recording.counts`."""
    left_out: int
    """The number of steps in an epoch that could not be learned from."""
    shares: Mapping[str, Mapping[int, Shares]]
    """The last epochs of each module, see `BlockLoader.shares`."""
    epochs: Mapping[str, int]
    """The size of this learner's share of an epoch of each module, if known."""
    parts: Mapping[str, set[int]]
    """See `BlockLoader.parts`; for each module whose first epoch has ended."""


Shard: TypeAlias = dict[str, Plan]
"""Everything that one learner needs for its data, by module; it is sent to the learner's process."""


def feeds_of(shard: Shard, algorithm: OfflineAlgorithm[Any]) -> dict[str, Feed]:
    """The feeds of each module of an algorithm's replica with a learner's share, endless.

    Taking batches raises a DataError as on the local engine, or an EngineError if Ray Data fails.
    """
    out = {}
    for name, plan in shard.items():
        with algorithm.settings_of(name):
            learner, device = algorithm.learner.modules[name], algorithm.config.compute.device
            to_device = None if device == "cpu" else partial(as_tensors, device=device)
            assert isinstance(plan.source, RemoteRecording)
            pipeline = DataPipeline(plan, to_device=to_device, loaders=plan.source.loader)
            out[name] = Feed(
                named_batches(name, pipeline, plan), learner.module, parted(learner.connectors)[1], pipeline
            )
    return out


def open_shards(algorithm: OfflineAlgorithm[Any], settings: Ray, nodes: list[str] | None = None) -> list[Shard]:
    """Open a shard for each of `settings.num_learners` learners: different, equal shares of each module's epochs.

    Args:
        algorithm: The algorithm, with its current progress. Connectors that have not learned from the recording yet
            do so here.
        settings: The engine's settings.
        nodes: The ids of the learners' nodes. If there are several, learners prefer blocks on their own nodes.

    Raises:
        SettingsError: the settings, the module and the connectors are incompatible, or a batch can't be shared.
        DataError: the recording can't be read, or lacks required columns.
    """
    num = settings.num_learners
    shards: list[Shard] = [{} for _ in range(num)]
    for name, plan in _plans(algorithm).items():
        with algorithm.settings_of(name):
            holds, num_parts = plan.hold_prepared, plan.source.num_parts
            size, by_segments = _share_of_batch(plan, num)
            epoch_size = None if plan.epoch_size is None else plan.epoch_size // num
            first = 0 if holds or not epoch_size else int(plan.start * size) // epoch_size
            source = RecordingSource(
                shared_job(plan), num_parts, _parts_per_task(plan), None if holds else plan.seed, first
            )
            for shard, split in zip(shards, _splits(source, settings, nodes, len(algorithm.policies)), strict=True):
                loader = BlockLoader(split, settings.data.prefetch_batches, holds=holds)
                shard[name] = dataclasses.replace(
                    plan,
                    source=RemoteRecording(num_parts, loader),
                    prepare=Preparation(Pipeline([]), Pipeline([])),
                    batch_size=size,
                    by_segments=by_segments,
                    epoch_size=epoch_size,
                )
    return shards


def _splits(source: RecordingSource, settings: Ray, nodes: list[str] | None, num_modules: int) -> list[DataIterator]:
    """The blocks of each learner, epoch by epoch; nothing is read until they are iterated."""
    num_cpus = _cpus(settings.data.num_cpus)
    dataset = ray.data.read_datasource(
        source,
        override_num_blocks=max(1, len(source.tasks())),
        num_cpus=num_cpus,
        concurrency=None if num_cpus else 1,
    )
    context = dataset.context  # only of this dataset
    context.enable_progress_bars = False
    context.target_max_block_size = 2 * TASK_BYTES  # Ray's first estimate of a task's memory
    is_spread = len(set(nodes or ())) > 1
    options = context.execution_options
    options.preserve_order = not is_spread
    store = ray.cluster_resources().get("object_store_memory", 0.0)  # type: ignore[no-untyped-call]
    options.resource_limits = ExecutionResources.for_limits(object_store_memory=_STORE_SHARE * store / num_modules)
    return list(dataset.streaming_split(settings.num_learners, equal=True, locality_hints=nodes if is_spread else None))


def _cpus(wanted: float) -> float:
    """The CPUs that a task requests; 0 if runners and learners have taken all, so that it can start at all."""
    free = ray.available_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    if free >= wanted:
        return wanted
    _log.warning(
        "the cluster has %g CPUs left, but each task that reads data should have %g (ray.data.num_cpus): the tasks "
        "share CPUs with others, one at a time. Use a larger cluster, or lower ray.cpus_per_learner.",
        free,
        wanted,
    )
    return 0.0


def _share_of_batch(plan: Plan, num: int) -> tuple[float, bool]:
    """One learner's share of a batch, and whether it consists of whole segments, perhaps a fraction of them on average.

    All learners have equally many rows in an epoch, so their batches must be equally large; otherwise some would wait
    for the next epoch before the others.
    """
    if num == 1:
        return plan.batch_size, plan.by_segments
    if isinstance(plan.make, Steps):
        if plan.batch_size % num:
            raise SettingsError(f"`batch_size` is {plan.batch_size}, but must be a multiple of {num} learners.")
        return plan.batch_size // num, False
    mean_length = 1.0 if plan.by_segments else _mean_length(plan)
    share = plan.batch_size / num / mean_length
    if share < 1 and not plan.by_segments:
        _log.warning(
            "`batch_size` is %d, but each of %d learners takes at least one whole segment, of %.0f steps on average: "
            "gradient steps have about %.0f steps. Raise `batch_size`, or lower `sequences.max_len`.",
            *(plan.batch_size, num, mean_length, num * mean_length),
        )
    return max(1.0, share), True


def _mean_length(plan: Plan) -> float:
    """The mean length of the segments to learn from; it is the same on every call.

    Only the keys of rows are read, unless a prelearner may change them. If there are very many parts, or if reading
    one takes long, the mean is over some of them, evenly spread.
    """
    source, prepare = plan.source, plan.prepare
    is_own = getattr(source, "format", None) == FORMAT
    columns = () if prepare.where is None else prepare.where.columns_in(source.columns)
    num = min(source.num_parts, _COUNTED_PARTS if is_own and prepare.own is None else _SAMPLED_PARTS)
    steps = segments = 0
    for i in range(num):
        k = (2 * i + 1) * source.num_parts // (2 * num)
        if prepare.own is None:
            exp = prepare.chosen(source.part(k, columns, finals=False))
            made: Any = plan.make(with_context(exp, prepare.connectors.context), ())
        else:
            made, _ = plan(k)
        if made is not None:
            steps += plan.make.rows(made)
            segments += len(made)
    return steps / segments if steps else 1.0


def _parts_per_task(plan: Plan) -> int:
    """The number of parts that make a task read about `TASK_BYTES`, as far as their size is known in advance."""
    header = getattr(plan.source, "header", None)
    row = 64
    if header is not None:
        for space in (header.obs_space, header.action_space):
            parts = leaves(space, "row").values()
            row += sum(int(np.prod(leaf_shape(leaf))) * leaf_dtype(leaf).itemsize for leaf in parts)
    return max(1, min(_MOST_PARTS, TASK_BYTES // min(_PART_ROWS * row, _PART_BYTES)))


def _plans(algorithm: OfflineAlgorithm[Any]) -> dict[str, Plan]:
    return {name: plan_of(algorithm, name, {}, loads_here=False) for name in algorithm.policies}


# -- reports of learners ------------------------------------------------------------------------------------------


def report_of(feeds: Mapping[str, Feed]) -> LearnerReport:
    """The report of a learner's feeds since the last call."""
    pipelines = {name: feed.pipeline for name, feed in feeds.items() if feed.pipeline is not None}
    sources: dict[str, Any] = {name: pipeline.source for name, pipeline in pipelines.items()}
    bad: dict[int, Findings] = {}
    for source in sources.values():
        bad |= source.found
        source.found = {}
    sizes = {name: pipeline.epoch_size for name, pipeline in pipelines.items()}
    return LearnerReport(
        bad,
        sum(pipeline.left_out for pipeline in pipelines.values()),
        {name: dict(source.loader.shares) for name, source in sources.items()},
        {name: size for name, size in sizes.items() if size is not None},
        {name: source.loader.parts for name, source in sources.items() if source.loader.parts is not None},
    )


def count_without_blocks(
    algorithm: OfflineAlgorithm[Any], reports: Sequence[LearnerReport], done: dict[str, int]
) -> None:
    """Count what was found bad in parts without any good rows, whose empty blocks Ray drops.

    Args:
        algorithm: The algorithm that owns the recording.
        reports: The reports of all learners.
        done: The modules that are finished, with the number of steps in such parts that could not be learned from.
            Modules whose first epoch has ended at all learners are added.
    """
    ended = set.intersection(*(set(own.parts) for own in reports)) - set(done)
    for name, plan in _plans(algorithm).items() if ended else ():
        if name in ended:
            came = set.union(*(own.parts[name] for own in reports))
            empty = [plan(k)[1] for k in range(plan.source.num_parts) if k not in came]
            done[name] = sum(spent.left_out for spent in empty)
            for spent in empty:
                if spent.part is not None:
                    algorithm.recording.count(spent.part, spent.bad)


def unshared(reports: Sequence[LearnerReport]) -> int:
    """The number of steps in an epoch that no learner got, because rows or uncuttable segments can't be shared equally.

    It is that of the last epoch that all learners have finished, over all modules. Only blocks of which a learner got
    some rows are counted, so blocks with fewer rows than there are learners may be missed.
    """
    left = 0
    for name in reports[0].shares:
        ended = set.intersection(*(set(own.shares[name]) for own in reports))
        steps: dict[int, int] = {}
        for own in reports if ended else ():
            for first, (total, got) in own.shares[name][max(ended)].items():
                steps[first] = steps.get(first, total) - got
        left += sum(steps.values())
    return left
