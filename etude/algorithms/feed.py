# SPDX-License-Identifier: Apache-2.0
"""Feeds, which supply the learner of each module with batches and measure the data flow."""

import dataclasses
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.spaces import Tuple
from numpy.typing import NDArray

from etude import columns as col
from etude.algorithms.config import OfflineConfig
from etude.connectors import Connector, Pipeline, overrides
from etude.connectors.pipeline import state_from_json
from etude.errors import DataError, SettingsError
from etude.experience import Experience, Segments
from etude.experience.arrays import check_scalars
from etude.files import shown
from etude.interruption import interruptible
from etude.learners.batch import as_tensors
from etude.modules import Module
from etude.recordings import Recording
from etude.recordings.action_units import ACTIONS, REWRITTEN
from etude.recordings.batches import DERIVED
from etude.recordings.pipeline import (
    CONNECTORS,
    PIECE_ROWS,
    SHUFFLE,
    Cuts,
    DataPipeline,
    InMemory,
    LoadingStats,
    PartSource,
    Plan,
    Preparation,
    Steps,
)
from etude.recordings.where import RowFilter
from etude.runners import Episode, ModuleOf
from etude.spaces import Space, leaf_dtype, leaf_shape, leaves

_FEW = 0.1
"""The learner is the slowest stage if it waits for at most this share of the time."""


_END: Any = object()


@dataclasses.dataclass(frozen=True)
class SegmentsOf:
    """Selects the segments that one of several modules learns from: those that `modules_of` assigns to it."""

    module_id: str
    module_ids: tuple[str, ...]
    module_of: ModuleOf | None

    def __call__(self, exp: Experience) -> Experience:
        """Return the segments of this module.

        Raises:
            DataError: a segment belongs to none of the modules.
        """
        of = modules_of(exp.segments, self.module_of, self.module_ids)
        if len(self.module_ids) == 1 and not of.any():  # a recording of one agent without a name
            return exp
        unknown = sorted({str(name) for name in of} - set(self.module_ids))
        if unknown:
            raise DataError(
                f"the recording has segments of {', '.join(unknown)}, but the `modules` are "
                f"{', '.join(self.module_ids)}: let `module_of` say which of these learns from each agent's. One that "
                "is not to be trained is named in `modules`, too, and left out of `modules_to_train`; `filter` can't "
                "leave it out."
            )
        return exp.select(of == self.module_id)


def modules_of(segments: Segments, module_of: ModuleOf | None, module_ids: Collection[str] = ()) -> NDArray[np.object_]:
    """The module id of each segment, object ``[segments]``; need not be the id of an existing module.

    Without ``module_of``, it is the module that acted or, if the recording does not state it, the agent's name. In
    episodes without a number, such as served ones, ``module_of`` may not know it. If the module that acted is one of
    ``module_ids``, that is then used for agents without a name, and if ``module_of`` fails.

    Raises:
        DataError: ``module_of`` fails.
    """
    if module_of is None:
        named = segments.module_id != None  # noqa: E711 - an array, element by element
        return np.where(named, segments.module_id, segments.agent_id)
    known: dict[tuple[Any, str], str] = {}
    of = np.empty(len(segments), object)
    names = (column.tolist() for column in (segments.agent_id, segments.episode_id, segments.module_id))
    for i, (agent, episode, acted) in enumerate(zip(*names, strict=True)):
        its = Episode.recorded(episode)
        number: int | None = its.number
        may_not_know = number is None and acted in module_ids
        if agent is None and may_not_know:
            of[i] = acted
            continue
        try:
            if (agent, episode) not in known:
                known[agent, episode] = module_of(agent, its)
            of[i] = known[agent, episode]
        except Exception as error:
            if not may_not_know:
                raise DataError(
                    f"module_of fails for agent {agent!r} of episode {episode!r}: {type(error).__name__}: {error}. "
                    "Only ids of Etude's own episodes say which `env` and `number` they had; others are None."
                ) from error
            of[i] = acted
    return of


class Feed:
    """Batches for one module, processed just before use by its learner's connectors that use the module.

    Args:
        batches: Columns, or Experience for a recurrent module or for connectors that look along time.
        module: The module that learns.
        fresh: Connectors of its learner that are applied to each batch just before it is learned from.
        pipeline: The pipeline that the batches come from, if there is one.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        module: Module,
        fresh: Sequence[Connector] = (),
        pipeline: DataPipeline | None = None,
    ) -> None:
        self._batches = iter(batches)
        self._check = None if pipeline is not None else partial(check_batch, module=module)
        self._module, self._fresh, self.pipeline = module, fresh, pipeline
        self.waited = 0.0
        """Seconds that the learner waited for batches since the last `take_figures`."""
        self._connecting = 0.0
        self._depths: list[int] = []
        self._taken = LoadingStats()

    def take(self, num: int) -> Iterator[Any]:
        """Yield the next ``num`` batches, or fewer if they come to an end.

        Raises:
            DataError: not even one is left.
        """
        for i in range(num):
            if self.pipeline is not None and (depth := self.pipeline.depth) is not None:
                self._depths.append(depth)
            begin = time.perf_counter()
            batch: Any = self._next()
            if batch is _END:
                if not i:
                    raise DataError("the batches given have come to their end: give endless ones, or stop earlier.")
                return
            if self._check is not None:
                self._check(batch)
            if self._fresh:
                batch = self._seen(batch)
            self.waited += time.perf_counter() - begin
            yield batch

    @interruptible
    def _next(self) -> Any:
        return next(self._batches, _END)

    def _seen(self, exp: Experience) -> Any:
        begin = time.perf_counter()
        self._module.eval()
        for connector in self._fresh:
            if overrides(connector, "update"):
                connector.update(exp)
            exp = connector.offline(exp, self._module)
        self._module.train()
        self._connecting += time.perf_counter() - begin
        return exp if self._module.recurrent else exp.trained_steps()

    def take_figures(self) -> tuple[LoadingStats, float, list[int]]:
        """Time and data spent since the last call, seconds waited, and the number of blocks that were ready each
        time."""
        spent, waited, depths = LoadingStats(), self.waited, self._depths
        if self.pipeline is not None:
            spent.add(self.pipeline.spent)
        spent.seconds[CONNECTORS] += self._connecting
        new = LoadingStats(rows=spent.rows - self._taken.rows, bytes=spent.bytes - self._taken.bytes)
        for layer, seconds in spent.seconds.items():
            new.seconds[layer] = max(0.0, seconds - self._taken.seconds[layer])
        self._taken, self.waited, self._depths = spent, 0.0, []
        return new, waited, depths

    def close(self) -> None:
        """Stop the workers."""
        if self.pipeline is not None:
            self.pipeline.close()


def report(feeds: Mapping[str, Feed], seconds: float, num_workers: int) -> tuple[dict[str, float], str]:
    """Figures of an iteration's data flow, see `Result.data`, and the name of the slowest stage.

    Args:
        feeds: All feeds of the iteration.
        seconds: Duration of the updates, waiting included.
        num_workers: Number of workers that shared reading, decoding and connecting.
    """
    spent, waited, depths = LoadingStats(), 0.0, list[int]()
    for feed in feeds.values():
        own = feed.take_figures()
        spent.add(own[0])
        waited += own[1]
        depths += own[2]
    figures = dict(spent.seconds)
    figures["wait"] = waited
    figures["steps_per_s"] = spent.rows / seconds if seconds else 0.0
    if spent.bytes:
        figures["mb_per_s"] = spent.bytes / 1e6 / seconds if seconds else 0.0
    if depths:
        figures["queue"] = sum(depths) / len(depths)
    shared = {layer: took / (1 if layer == SHUFFLE else max(1, num_workers)) for layer, took in spent.seconds.items()}
    slowest = max(shared, key=shared.__getitem__)
    return figures, "update" if waited <= _FEW * seconds else slowest


MEMORY_LIMIT = 2**30
"""Bytes of observations and actions up to which ``mode="auto"`` holds the data in memory."""

Read = dict[tuple[str, ...], Experience]
"""The data of a recording that is held in memory, by the columns read. Several modules share it."""


def feed_of(algorithm: Any, name: str, read: Read) -> Feed:
    """The feed of one module, which begins at its learner's position in the data; for arguments and errors, see
    `plan_of`."""
    plan, device = plan_of(algorithm, name, read), algorithm.config.compute.device
    pipeline = DataPipeline(plan, to_device=None if device == "cpu" else partial(as_tensors, device=device))
    fresh = parted(algorithm.learner.modules[name].connectors)[1]
    return Feed(named_batches(name, pipeline, plan), algorithm.policies[name].module, fresh, pipeline)


def named_batches(name: str, pipeline: DataPipeline, plan: Plan) -> Iterator[Any]:
    """The batches of one module. If there are several modules, errors name it."""
    batches = pipeline.batches(plan.start)
    return batches if plan.prepare.select is None else _named(name, batches)


def _named(name: str, batches: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from batches
    except DataError as error:
        raise DataError(f"module {name!r}: {error}") from error


def plan_of(algorithm: Any, name: str, read: Read, *, loads_here: bool = True) -> Plan:
    """Plan how one module is fed. Connectors that learn from the recording do so here.

    Args:
        algorithm: An `OfflineAlgorithm`. The type is Any because that class imports this file.
        name: The module id.
        read: The data that other modules' feeds hold in memory; that of this feed is added.
        loads_here: Whether the recording is read in this process.

    Raises:
        SettingsError: the settings, the module and the connectors don't fit together.
        DataError: the recording can't be read, or lacks what is needed.
    """
    policy, learner = algorithm.policies[name], algorithm.learner.modules[name]
    recording: Recording = algorithm.recording
    in_env_units = recording.action_space != policy.module.action_space
    if in_env_units and recording.meta.get(ACTIONS) == REWRITTEN:
        raise DataError(
            f"{recording.path}: another tool has rewritten it, and dropped what says whether its actions are those "
            "that the env got, or those that the module chose before connectors mapped them. Give their space: "
            "data=Recording.open(Source(path, preset='etude', action_space=Box(-1, 1, shape)))."
        )
    with algorithm.settings_of(name):
        config: OfflineConfig = algorithm.config
        several, seed = config.agents.modules is not None, algorithm.runner_seed
        early, fresh = parted(learner.connectors)
        prepare = Preparation(
            policy.connectors,
            Pipeline(early),
            select=SegmentsOf(name, tuple(algorithm.policies), config.agents.module_of) if several else None,
            where=None if config.filter is None else RowFilter(config.filter),
            own=config.prelearner,
            in_env_units=in_env_units,
        )
        held = _held(config, recording, fresh, policy.module)
        make, size = _made(algorithm, policy.module, fresh)
        columns = _columns(algorithm, (*policy.connectors.connectors, *learner.connectors.connectors), early)
        source: PartSource = recording
        if loads_here and held != "nothing":
            if columns not in read:
                read[columns] = recording.read(columns=columns, next_obs=make.next_obs)
            source = InMemory(read[columns], sys.maxsize if held == "prepared" else PIECE_ROWS)
        if not algorithm.has_seen_data:
            _learn(
                name,
                config,
                prepare,
                partial(source.part, columns=columns, next_obs=make.next_obs),
                source.num_parts,
                recording.meta.get("filter"),
            )
        if several:
            seed = int(np.random.SeedSequence([seed, *name.encode()]).generate_state(1)[0])
        return Plan(
            source=source,
            columns=columns,
            prepare=prepare,
            make=make,
            batch_size=size,
            by_segments=policy.module.recurrent,
            hold_prepared=held == "prepared",
            buffer_size=config.reading.buffer_size,
            num_workers=config.reading.num_workers,
            worker_kind=config.reading.worker_kind,
            prefetch=0 if held == "prepared" else config.reading.prefetch,
            seed=seed,
            epoch_size=algorithm.epoch_sizes.get(name),
            start=learner.updates * config.optimizer.accumulate,
        )


def _made(algorithm: Any, module: Module, fresh: list[Connector]) -> tuple[Steps | Cuts, int]:
    """How to make batches, of steps or of segments, and their size: for a recurrent module in segments, otherwise in
    steps."""
    config, roots = algorithm.config, algorithm.columns
    length = config.sequences.max_len
    if not module.recurrent:
        return Cuts(length) if fresh else Steps(roots), config.batch_size
    derived = [root for root in roots if root in DERIVED]
    if fresh or derived:
        raise SettingsError(
            f"{algorithm.name} needs {'values along time' if fresh else ', '.join(derived)}, which recordings "
            "can't give a recurrent module: take a network without a memory, with `frame_stack` perhaps, or bc."
        )
    return Cuts(length, config.sequences.burn_in), max(1, config.batch_size // length)


def _columns(algorithm: Any, connectors: Iterable[Connector], early: list[Connector]) -> tuple[str, ...]:
    """The step columns to read."""
    config, there = algorithm.config, algorithm.recording.columns
    wanted = dict.fromkeys(root for root in algorithm.columns if root not in DERIVED)
    if col.NEXT_OBS in algorithm.columns:
        wanted[col.OBS] = None
    looking = [c for c in connectors if _looks(c)]
    wanted |= dict.fromkeys(root for connector in looking for root in connector.needs or ())
    if config.filter is not None:
        where = RowFilter(config.filter)
        where.check_names((), there)  # before the columns are reduced to those that are read
        wanted |= dict.fromkeys(where.columns_in(there))
    if config.prelearner is not None or any(connector.needs is None for connector in looking):
        return tuple(name for name in there if name in wanted or name not in col.LEARNERS)
    if any(_looks(connector) for connector in early):  # one of them may add the missing columns
        return tuple(root for root in wanted if col.under(there, root))
    return tuple(wanted)


def _held(config: OfflineConfig, recording: Recording, fresh: list[Connector], module: Module) -> str:
    """What is held in memory: ``nothing``, the ``recorded`` data, or what is ``prepared`` by the connectors."""
    modes = {"stream": "nothing", "materialize_data": "recorded", "materialize_mapped_data": "prepared"}
    mode = config.reading.mode
    if mode == "materialize_mapped_data" and fresh:
        raise SettingsError(
            f"`reading.mode` is materialize_mapped_data, but {fresh[0].name} uses the module, which changes "
            "during training, so its output can't be held. Use materialize_data, stream or auto."
        )
    if mode != "auto":
        return modes[mode]
    for held, like in (("prepared", module), ("recorded", recording)):
        parts = leaves(Tuple((like.obs_space, like.action_space)), "row").values()
        row = sum(int(np.prod(leaf_shape(leaf))) * leaf_dtype(leaf).itemsize for leaf in parts)
        most = MEMORY_LIMIT // (row + 64)
        if recording.rows_up_to(most) <= most:
            return held
    return "nothing"


def _learn(
    name: str,
    config: OfflineConfig,
    prepare: Preparation,
    part: Callable[[int], Experience],
    num_parts: int,
    stored: Any,
) -> None:
    """Let connectors learn statistics of observations from the recording, or load those ``stored`` in it."""
    if not prepare.learning:
        return
    if config.reading.obs_filter == "data":
        for index in prepare.learning:  # one after the other, as each learns from the output of those before it
            for k in range(num_parts):
                prepare.learn(index, part(k))
        return
    own = stored if config.agents.modules is None else (stored or {}).get(name)
    if own is None:
        whose = "" if config.agents.modules is None else f" of module {name!r}"
        raise DataError(
            f"{shown(config.data)} has no observation filter{whose} stored with it: take "
            "obs_filter='data', which reads the data once to compute it."
        )
    state_from_json(prepare.connectors, own)


def parted(to_learner: Pipeline) -> tuple[list[Connector], list[Connector]]:
    """The learner's connectors before the first that uses the module, and the rest."""
    connectors = to_learner.connectors
    first = next((i for i, connector in enumerate(connectors) if connector.uses_module), len(connectors))
    return connectors[:first], connectors[first:]


def _looks(connector: Connector) -> bool:
    return overrides(connector, "offline") or overrides(connector, "update")


def check_batch(batch: Any, module: Module) -> None:
    """Check a batch of columns, or Experience.

    Raises:
        DataError: it is neither; a column of observations or actions is missing or does not fit the module's spaces;
            a reward or flag is not one number or boolean for each row; columns have different lengths, or no rows.
    """
    columns = batch.steps if isinstance(batch, Experience) else batch
    if not isinstance(columns, Mapping):
        raise DataError(f"a batch is a {type(batch).__name__}: give a mapping of columns by name, or Experience.")
    for name, column in columns.items():
        if not isinstance(column, np.ndarray | torch.Tensor):
            raise DataError(f"column `{name}` of a batch is a {type(column).__name__}: give a NumPy array or a tensor.")
    lengths = {name: len(column) for name, column in columns.items() if column.ndim}
    if len(lengths) < len(columns) or len(set(lengths.values())) != 1 or not next(iter(lengths.values())):
        raise DataError(f"the columns of a batch must have equally many rows, at least one; they have {lengths}.")
    check_scalars(columns, "a batch")
    for name in {col.TERMINATED, col.TRUNCATED} & columns.keys():
        if columns[name].dtype not in (torch.bool, np.bool_):
            raise DataError(f"column `{name}` of a batch is {columns[name].dtype}: give booleans, as {name} != 0.")
    spaces_by_root = {col.OBS: module.obs_space, col.ACTION: module.action_space}
    if col.under(columns, col.NEXT_OBS):
        spaces_by_root[col.NEXT_OBS] = module.obs_space
    for root, space in spaces_by_root.items():
        for name, leaf in leaves(space, root).items():
            if name not in columns:
                raise DataError(f"a batch has no column `{name}`; it has {', '.join(columns)}.")
            _check_column(name, columns[name], leaf)


def _check_column(name: str, column: Any, leaf: Space) -> None:
    wanted = leaf_shape(leaf)
    if tuple(column.shape[1:]) != wanted:
        raise DataError(f"column `{name}` of a batch has rows of shape {tuple(column.shape[1:])}, not {wanted}.")
    if leaf_dtype(leaf).kind == "f":
        return
    is_float = column.dtype.is_floating_point if isinstance(column, torch.Tensor) else column.dtype.kind == "f"
    if is_float:
        raise DataError(f"column `{name}` of a batch is {column.dtype}, but {leaf} has whole numbers.")
    if isinstance(leaf, spaces.Discrete):
        low, high = int(leaf.start), int(leaf.start + leaf.n) - 1
        least, most = int(column.min()), int(column.max())
        if least < low or most > high:
            raise DataError(f"column `{name}` of a batch goes from {least} to {most}, but {leaf} from {low} to {high}.")
