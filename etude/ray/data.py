# SPDX-License-Identifier: Apache-2.0
"""The way from a recording to the learners on a cluster, on Ray Data."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import ray
from ray.data import DataIterator, ExecutionResources

from etude.algorithms.feed import Feed, Plan
from etude.algorithms.offline import OfflineAlgorithm
from etude.algorithms.ray_config import Ray
from etude.connectors import Pipeline
from etude.errors import SettingsError
from etude.experience import Experience
from etude.learners.batch import as_tensors
from etude.ray.data_source import TASK_BYTES, BlockLoader, RecordingSource, SharedJob, Shares
from etude.recordings.pipeline import Cuts, DataPipeline, Flow, Preparation, Steps
from etude.recordings.screening import Findings
from etude.spaces import leaf_dtype, leaf_shape, leaves

_PART_ROWS: Final = 65_536
_PART_BYTES: Final = 64 * 2**20
_MOST_PARTS: Final = 16
_STORE_SHARE: Final = 0.4
"""Of the object store, what all datasets of an algorithm may fill with blocks that nobody has taken yet."""

_log = logging.getLogger("etude.ray")


class RemoteRecording:
    """Stands for the recording at a learner: takes what was found bad, until that is told.

    Args:
        num_parts: Of the recording.
        loader: Of the learner.
    """

    is_in_memory = False
    columns: Final[list[str]] = []

    def __init__(self, num_parts: int, loader: BlockLoader) -> None:
        self.num_parts, self.loader = num_parts, loader
        self.found: dict[int, Findings] = {}

    def part(self, k: int, columns: Any = None, *, finals: bool = True) -> Experience:
        """None is loaded here."""
        raise NotImplementedError

    def counts(self, k: int) -> Any:
        """Of a part."""
        return self.found.get(k)

    def count(self, k: int, counts: Any) -> None:
        """Take them."""
        if counts is not None:
            self.found[k] = counts


@dataclasses.dataclass(frozen=True)
class Told:
    """What one learner has to tell of its share since it was last asked."""

    bad: Mapping[int, Findings]
    """By part: what was found bad, see `Recording.counts`."""
    left_out: int
    """Steps of an epoch that could not be learned from."""
    shares: Mapping[str, Mapping[int, Shares]]
    """Of the last epochs of each module, see `BlockLoader.shares`."""
    epochs: Mapping[str, int]
    """The size of this learner's share of an epoch of each module, as far as it is known."""
    parts: Mapping[str, set[int]]
    """See `BlockLoader.parts`, of each module whose first epoch has ended."""


@dataclasses.dataclass(frozen=True)
class ModuleShard:
    """How a learner is fed for one module."""

    split: DataIterator
    num_parts: int
    make: Steps | Cuts
    size: int
    """Of the learner's share of a batch."""
    by_segments: bool
    holds: bool
    flow: Flow
    epoch_size: int | None
    """Of the learner's share."""
    start: int
    fresh_from: int
    """The first of the learner's connectors that works at the learner."""
    prefetch: int


@dataclasses.dataclass(frozen=True)
class Shard:
    """What one learner needs to be fed; goes to its process."""

    modules: dict[str, ModuleShard]

    def feeds(self, algorithm: OfflineAlgorithm[Any]) -> dict[str, Feed]:
        """What feeds each module of a replica of the algorithm with this learner's share, without end.

        They raise, when batches are taken: DataError as on the local engine; EngineError if Ray Data fails.
        """
        out = {}
        for name, own in self.modules.items():
            with algorithm.settings_of(name):
                learner, device = algorithm.learner.modules[name], algorithm.config.compute.device
                loader = BlockLoader(own.split, own.prefetch, holds=own.holds)
                pipeline = DataPipeline(
                    RemoteRecording(own.num_parts, loader),
                    None,
                    Preparation(Pipeline([]), Pipeline([])),
                    own.make,
                    own.size,
                    own.flow,
                    by_segments=own.by_segments,
                    hold_prepared=own.holds,
                    epoch_size=own.epoch_size,
                    to_device=None if device == "cpu" else partial(as_tensors, device=device),
                    crew=loader,
                )
                fresh = learner.connectors.connectors[own.fresh_from :]
                out[name] = Feed(pipeline.batches(own.start), learner.module, fresh, pipeline)
        return out


def open_shards(algorithm: OfflineAlgorithm[Any], settings: Ray, nodes: list[str] | None = None) -> list[Shard]:
    """One for each of `settings.num_learners` learners: different, equal shares of each epoch of each module.

    Args:
        algorithm: Says where its learners stand; connectors learn from the recording here, if they have not.
        settings: Of the engine.
        nodes: The ids of the nodes that the learners are on: if these are several, blocks go to where they lie.

    Raises:
        SettingsError: the settings, the module and the connectors do not go together; or a batch can't be shared.
        DataError: the recording can't be read, or does not hold what is wanted.
    """
    num = settings.num_learners
    shards: list[dict[str, ModuleShard]] = [{} for _ in range(num)]
    for name, plan in _plans(algorithm).items():
        with algorithm.settings_of(name):
            holds = plan.held == "prepared"
            size, by_segments = _share_of_batch(plan, num)
            epoch_size = None if plan.epoch_size is None else plan.epoch_size // num
            make = partial(
                ModuleShard,
                num_parts=plan.source.num_parts,
                make=plan.make,
                size=size,
                by_segments=by_segments,
                holds=holds,
                flow=dataclasses.replace(plan.flow, num_workers=0),
                epoch_size=epoch_size,
                start=plan.start,
                fresh_from=len(algorithm.learner.modules[name].connectors.connectors) - len(plan.fresh),
                prefetch=settings.data.prefetch_batches,
            )
            first = 0 if holds or not epoch_size else plan.start * size // epoch_size
            seed = None if holds else plan.flow.seed
            source = RecordingSource(SharedJob(plan.job), plan.source.num_parts, _parts_per_task(plan), seed, first)
            for shard, split in zip(shards, _splits(source, settings, nodes, len(algorithm.policies)), strict=True):
                shard[name] = make(split)
    return [Shard(shard) for shard in shards]


def _splits(source: RecordingSource, settings: Ray, nodes: list[str] | None, num_modules: int) -> list[DataIterator]:
    """The blocks of each learner, epoch by epoch; nothing is read before they are asked for."""
    num_cpus = _cpus(settings.data.num_cpus)
    dataset = ray.data.read_datasource(
        source,
        override_num_blocks=max(1, len(source.tasks())),
        num_cpus=num_cpus,
        concurrency=None if num_cpus else 1,
    )
    context = dataset.context  # this dataset's own
    context.enable_progress_bars = False
    context.target_max_block_size = 2 * TASK_BYTES  # what Ray takes a task to need before it knows
    is_spread = len(set(nodes or ())) > 1
    options = context.execution_options
    options.preserve_order = not is_spread
    store = ray.cluster_resources().get("object_store_memory", 0.0)  # type: ignore[no-untyped-call]
    options.resource_limits = ExecutionResources.for_limits(object_store_memory=_STORE_SHARE * store / num_modules)
    return list(dataset.streaming_split(settings.num_learners, equal=True, locality_hints=nodes if is_spread else None))


def _cpus(wanted: float) -> float:
    """What a task asks for; nothing if runners and learners have taken all that there are: it would never begin."""
    free = ray.available_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    if free >= wanted:
        return wanted
    _log.warning(
        "the cluster has %g CPUs left, and tasks that read are to have %g each (ray.data.num_cpus): they share those "
        "of others, one at a time. Give the cluster more, or learners less (ray.cpus_per_learner).",
        free,
        wanted,
    )
    return 0.0


def _share_of_batch(plan: Plan, num: int) -> tuple[int, bool]:
    """One learner's share of a batch, and whether it is of whole segments. All have equally many rows of an epoch: what
    each takes for a batch must be equally many, too, or one would wait for the next epoch before the others."""
    if num == 1:
        return plan.size, plan.by_segments
    if isinstance(plan.make, Steps):
        if plan.size % num:
            raise SettingsError(f"`batch_size` is {plan.size}, which {num} learners can't share: take a multiple.")
        return plan.size // num, False
    mean_length = 1.0 if plan.by_segments else _mean_length(plan)
    return max(1, round(plan.size / num / mean_length)), True


def _mean_length(plan: Plan) -> float:
    """Of segments, in the first part that has some."""
    for k in range(plan.source.num_parts):
        made, _ = plan.job(k)
        if isinstance(made, Experience) and len(made):
            return made.num_steps / len(made)
    return 1.0


def _parts_per_task(plan: Plan) -> int:
    """So many that a task reads about `TASK_BYTES`, as far as that is known beforehand."""
    header = getattr(plan.source, "header", None)
    row = 64
    if header is not None:
        for space in (header.obs_space, header.action_space):
            parts = leaves(space, "row").values()
            row += sum(int(np.prod(leaf_shape(leaf))) * leaf_dtype(leaf).itemsize for leaf in parts)
    return max(1, min(_MOST_PARTS, TASK_BYTES // min(_PART_ROWS * row, _PART_BYTES)))


def _plans(algorithm: OfflineAlgorithm[Any]) -> dict[str, Plan]:
    opening = algorithm.opening()
    plans = {}
    for name, policy in algorithm.policies.items():
        with algorithm.settings_of(name):
            learner = algorithm.learner.modules[name]
            plans[name] = opening.plan(name, policy, learner, algorithm.config, loads_here=False)
    return plans


# -- what learners tell -------------------------------------------------------------------------------------------


def told(feeds: Mapping[str, Feed]) -> Told:
    """What a learner's feeds have to tell."""
    pipelines = {name: feed.pipeline for name, feed in feeds.items() if feed.pipeline is not None}
    sources: dict[str, Any] = {name: pipeline.source for name, pipeline in pipelines.items()}
    bad: dict[int, Findings] = {}
    for source in sources.values():
        bad |= source.found
        source.found = {}
    sizes = {name: pipeline.epoch_size for name, pipeline in pipelines.items()}
    return Told(
        bad,
        sum(pipeline.left_out for pipeline in pipelines.values()),
        {name: dict(source.loader.shares) for name, source in sources.items()},
        {name: size for name, size in sizes.items() if size is not None},
        {name: source.loader.parts for name, source in sources.items() if source.loader.parts is not None},
    )


def count_without_blocks(algorithm: OfflineAlgorithm[Any], tolds: Sequence[Told], done: dict[str, int]) -> None:
    """Count what was found bad in parts of which nothing was left: Ray drops their blocks, which have no rows.

    Args:
        algorithm: Whose recording it is.
        tolds: Of each learner.
        done: The modules of which this was done, with the steps in such parts that could not be learned from; others,
            whose first epoch all learners have ended, are added.
    """
    ended = set.intersection(*(set(own.parts) for own in tolds)) - set(done)
    for name, plan in _plans(algorithm).items() if ended else ():
        if name in ended:
            came, job = set.union(*(own.parts[name] for own in tolds)), plan.job
            empty = [job(k)[1] for k in range(plan.source.num_parts) if k not in came]
            done[name] = sum(spent.left_out for spent in empty)
            for spent in empty:
                if spent.part is not None:
                    algorithm.recording.count(spent.part, spent.bad)


def unshared(tolds: Sequence[Told]) -> int:
    """Steps of an epoch that no learner got, as there are fewer than learners, or they are segments that can't be cut.

    Of the last epoch that all learners have ended, over all modules. Counted in blocks of which a learner got some: one
    with fewer rows than there are learners may go unseen.
    """
    left = 0
    for name in tolds[0].shares:
        ended = set.intersection(*(set(own.shares[name]) for own in tolds))
        steps: dict[int, int] = {}
        for own in tolds if ended else ():
            for first, (total, got) in own.shares[name][max(ended)].items():
                steps[first] = steps.get(first, total) - got
        left += sum(steps.values())
    return left
