# SPDX-License-Identifier: Apache-2.0
"""Datasets of Ray Data for one module: what reads and prepares, and how that is split between learners."""

import copy
import dataclasses
import logging
from functools import partial
from typing import Any, Final

import numpy as np
import ray
from ray.data import ActorPoolStrategy, Dataset, ExecutionResources

from etude.algorithms.feed import Plan
from etude.algorithms.ray_config import RayData
from etude.connectors import Connector, overrides
from etude.errors import SettingsError
from etude.experience import Experience
from etude.learners import ModuleLearner
from etude.ray.data_modules import Asking, Board, Worker
from etude.ray.data_source import TASK_BYTES, Epochs, RecordingSource, Shared, named, prepared
from etude.ray.data_stream import Blocks
from etude.recordings.pipeline import Cuts, Flow, Job, Steps
from etude.spaces import leaf_dtype, leaf_shape, leaves

_PART_ROWS: Final = 65_536
_PART_BYTES: Final = 64 * 2**20
_MOST_PARTS: Final = 16
_STORE_SHARE: Final = 0.4
"""Of the object store, what all datasets of an algorithm may fill with blocks that nobody has taken yet."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Flowing:
    """How one module is fed, without what only the process that reads needs. Goes to learners' processes."""

    blocks: list[Blocks]
    """By learner."""
    num_parts: int
    make: Steps | Cuts
    size: int
    """Of a learner's share of a batch."""
    by_segments: bool
    holds: bool
    flow: Flow
    epoch_size: int | None
    """Of a learner's share."""
    start: int
    fresh_from: int
    """The first of the learner's connectors that works at the learner."""
    board: Any
    """Where weights are known, if connectors ask the module in actors."""
    period: int


def flowing(
    plan: Plan, learner: ModuleLearner, data: RayData, num_learners: int, nodes: list[str] | None, num_modules: int
) -> Flowing:
    """Make the datasets; nothing is read before somebody takes a batch.

    Args:
        plan: As on the local engine.
        learner: The module's, as it is now.
        data: Settings.
        num_learners: 0: this process learns.
        nodes: See `etude.ray.data.open_shards`.
        num_modules: How many modules are fed at the same time.

    Raises:
        SettingsError: the settings do not go together.
    """
    connectors = learner.connectors.connectors
    first_fresh = len(connectors) - len(plan.fresh)
    asking = _asking(plan.fresh, learner, data)
    holds = plan.held == "prepared" and asking is None
    num = max(1, num_learners)
    size, by_segments = _share(plan, num)
    epoch_size = None if plan.epoch_size is None else plan.epoch_size // num
    first = 0 if holds or not epoch_size else plan.start * size // epoch_size
    turns = 1 if holds or num_learners else 2  # who splits takes a second of a CPU to start: once is enough
    epochs = [
        Epochs(plan.source.num_parts, _parts_per_task(plan), plan.flow.seed, first + i, turns, shuffled=not holds)
        for i in range(turns)
    ]
    shared = Shared.of(plan.job)
    by_place = len(set(nodes or ())) > 1
    board: Any = None if asking is None else Board.remote()  # type: ignore[attr-defined]
    asked = None if asking is None else (Shared.of(asking), board)
    sets = [_dataset(shared, one, data, asked, num_modules * turns, in_order=not by_place) for one in epochs]
    splits = [_split(one, num_learners, nodes if by_place else None) for one in sets]
    num_tasks = len(epochs[0].tasks(0))
    return Flowing(
        blocks=[
            Blocks([s[i] for s in splits], num_tasks, num, num_learners == 0, data.prefetch_batches, holds)
            for i in range(num)
        ],
        num_parts=plan.source.num_parts,
        make=plan.make,
        size=size,
        by_segments=by_segments,
        holds=holds,
        flow=dataclasses.replace(plan.flow, num_workers=0),
        epoch_size=epoch_size,
        start=plan.start,
        fresh_from=first_fresh + (0 if asking is None else len(asking.connectors)),
        board=board,
        period=data.module_sync_period or 0,
    )


def _asking(fresh: list[Connector], learner: ModuleLearner, data: RayData) -> Asking | None:
    """Those of the connectors that ask the module, and work in actors where it is set so."""
    if data.module_sync_period is None:
        return None
    last = max((i for i, connector in enumerate(fresh) if connector.uses_module), default=None)
    if last is None:
        raise SettingsError("`ray.data.module_sync_period` is set, but no connector asks the module: leave it out.")
    for connector in fresh[: last + 1]:
        if overrides(connector, "update"):
            raise SettingsError(
                f"`ray.data.module_sync_period` is set, but {connector.name} learns from the data and would have to "
                "in several places: leave it out."
            )
    module = copy.deepcopy(learner.module).cpu()
    return Asking(module, list(fresh[: last + 1]), learner.updates)


def _share(plan: Plan, num: int) -> tuple[int, bool]:
    """One learner's share of a batch, and whether it is of whole segments. All have equally many rows of an epoch: what
    each takes for a batch must be equally many, too, or one would wait for the next epoch before the others."""
    if num == 1:
        return plan.size, plan.by_segments
    if isinstance(plan.make, Steps):
        if plan.size % num:
            raise SettingsError(f"`batch_size` is {plan.size}, which {num} learners can't share: take a multiple.")
        return plan.size // num, False
    if plan.by_segments:
        return max(1, round(plan.size / num)), True
    return max(1, round(plan.size / num / _mean_length(plan))), True


def _mean_length(plan: Plan) -> float:
    """Of segments, in the first part that has some."""
    job = plan.job
    for k in range(plan.source.num_parts):
        made, _ = job(k)
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


def _dataset(
    job: Shared[Job],
    epochs: Epochs,
    data: RayData,
    asked: tuple[Shared[Asking], Any] | None,
    num_sets: int,
    *,
    in_order: bool,
) -> Dataset:
    num_tasks = len(epochs.tasks(0))
    in_actors = data.concurrency is not None or asked is not None
    num_cpus = _cpus(data.num_cpus)
    found: Dataset = ray.data.read_datasource(
        RecordingSource(named if in_actors else partial(prepared, job), epochs),
        override_num_blocks=max(1, num_tasks),
        num_cpus=0 if in_actors else num_cpus,
        concurrency=None if num_cpus and not in_actors else 1,
    )
    context = found.context  # this dataset's own
    context.enable_progress_bars = False
    context.target_max_block_size = 2 * TASK_BYTES  # what Ray takes a task to need before it knows
    options = context.execution_options
    options.preserve_order = in_order
    store = ray.cluster_resources().get("object_store_memory", 0.0)  # type: ignore[no-untyped-call]
    options.resource_limits = ExecutionResources.for_limits(object_store_memory=_STORE_SHARE * store / num_sets)
    if not in_actors:
        return found
    least, most = data.concurrency if isinstance(data.concurrency, tuple) else (data.concurrency or 1,) * 2
    mapped: Dataset = found.map_batches(
        Worker,
        fn_constructor_args=(job, *(asked or ())),
        # Ray Data refuses None with GPUs; the rows are numbers of parts, as many to a block
        batch_size=max(map(len, epochs.tasks(0)), default=1) if data.num_gpus else None,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(min_size=least, max_size=most),
        num_cpus=num_cpus,
        num_gpus=data.num_gpus,
    )
    return mapped


def _cpus(wanted: float) -> float:
    """What a task asks for; nothing, where runners and learners have taken all that there are: it would never begin."""
    free = ray.available_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    if free >= wanted:
        return wanted
    logger.warning(
        "the cluster has %g CPUs left, and tasks that read are to have %g each (ray.data.num_cpus): they share those "
        "of others, one at a time. Give the cluster more, or learners less (ray.cpus_per_learner).",
        free,
        wanted,
    )
    return 0.0


def _split(dataset: Dataset, num_learners: int, nodes: list[str] | None) -> list[Any]:
    if num_learners == 0:
        return [dataset.iterator()]
    return dataset.streaming_split(num_learners, equal=True, locality_hints=nodes)
