# SPDX-License-Identifier: Apache-2.0
"""From a recording and the settings to what feeds each module."""

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Literal

import numpy as np
from gymnasium.spaces import Tuple

from etude import columns as col
from etude.algorithms.config import OfflineConfig
from etude.algorithms.feeding import Feed, SegmentsOf
from etude.connectors import Connector, Pipeline, overrides
from etude.connectors.pipeline import state_from_json
from etude.errors import DataError, SettingsError
from etude.experience import Experience
from etude.files import shown
from etude.learners import ModuleLearner
from etude.learners.batch import as_tensors
from etude.modules import Module
from etude.policies import Policy
from etude.recordings import Recording
from etude.recordings.batches import DERIVED
from etude.recordings.parted import PIECE_ROWS, InMemory, Parted
from etude.recordings.pipeline import Cuts, DataPipeline, Flow, Job, Steps
from etude.recordings.preparation import Preparation
from etude.recordings.where import RowFilter
from etude.spaces import leaf_dtype, leaf_shape, leaves

MEMORY_LIMIT = 2**30
"""Bytes of observations and actions, up to which ``mode="auto"`` holds the data in memory."""

Held = Literal["nothing", "recorded", "prepared"]
"""What is in memory: nothing, what was recorded, or what connectors have made of it."""

_MADE_UP = (col.VALUE, col.ADVANTAGE, col.VALUE_TARGET)
"""What was recorded of these is of the module that acted then; who learns makes their own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How one module is fed: what a `DataPipeline` is made of, wherever its parts are loaded."""

    source: Parted
    columns: tuple[str, ...]
    prepare: Preparation
    make: Steps | Cuts
    size: int
    """Steps in a batch, or segments."""
    by_segments: bool
    fresh: list[Connector]
    """Connectors that see each batch just before it is learned from."""
    held: Held
    flow: Flow
    epoch_size: int | None
    start: int
    """The first batch to give."""

    @property
    def job(self) -> Job:
        """What is done with a part."""
        return Job(self.source, self.columns, self.prepare, self.make)


@dataclasses.dataclass
class Opening:
    """Opens the way from a recording to the learners of some modules, which share what is held in memory."""

    recording: Recording
    algorithm: str
    """Its name, for messages."""
    roots: tuple[str, ...]
    """The columns that the loss needs."""
    module_ids: tuple[str, ...]
    seed: int
    was_seen: bool
    """Connectors have learned from the recording in a run before."""
    epochs: Mapping[str, int]
    """The size of an epoch of each module, where a run before has found it out."""

    def __post_init__(self) -> None:
        self._read: dict[tuple[str, ...], Experience] = {}

    def feed(self, name: str, policy: Policy, learner: ModuleLearner, config: OfflineConfig) -> Feed:
        """What feeds one module, from where its learner stands; see `plan` for what is raised."""
        plan = self.plan(name, policy, learner, config)
        pipeline = DataPipeline(
            plan.source,
            plan.columns,
            plan.prepare,
            plan.make,
            plan.size,
            plan.flow,
            by_segments=plan.by_segments,
            hold_prepared=plan.held == "prepared",
            epoch_size=plan.epoch_size,
            to_device=None if config.device == "cpu" else partial(as_tensors, device=config.device),
        )
        return Feed(pipeline.batches(plan.start), policy.module, plan.fresh, pipeline)

    def plan(
        self, name: str, policy: Policy, learner: ModuleLearner, config: OfflineConfig, *, loads_here: bool = True
    ) -> Plan:
        """How one module is fed. Connectors that learn from the recording do so here.

        Raises:
            SettingsError: the settings, the module and the connectors do not go together.
            DataError: the recording can't be read, or does not hold what is wanted.
        """
        early, fresh = _parted(learner.connectors)
        select = None
        if config.modules is not None and (len(self.module_ids) > 1 or config.module_of is not None):
            select = SegmentsOf(name, self.module_ids, config.module_of)
        where = None if config.filter is None else RowFilter(config.filter)
        prepare = Preparation(policy.connectors, Pipeline(early), select=select, where=where, own=config.prelearner)
        held = self._held(config, fresh)
        make, size = self._made(config, policy.module, fresh)
        columns = self._columns(config, (*policy.connectors.connectors, *learner.connectors.connectors), early)
        source = self._source(config, columns, held if loads_here else "nothing")
        if not self.was_seen:
            self._learn(name, config, prepare, source, columns)
        seed = self.seed
        if config.modules is not None:
            seed = int(np.random.SeedSequence([seed, *name.encode()]).generate_state(1)[0])
        return Plan(
            source=source,
            columns=columns,
            prepare=prepare,
            make=make,
            size=size,
            by_segments=policy.module.recurrent,
            fresh=fresh,
            held=held,
            flow=Flow(
                buffer_size=config.buffer_size,
                num_workers=config.num_workers,
                worker_kind=config.worker_kind,
                prefetch=0 if held == "prepared" else config.prefetch,
                seed=seed,
            ),
            epoch_size=self.epochs.get(name),
            start=learner.updates * config.accumulate,
        )

    def _made(self, config: OfflineConfig, module: Module, fresh: list[Connector]) -> tuple[Steps | Cuts, int]:
        """Whether batches are of steps or of segments, and how many of these."""
        length = config.max_segment_length
        if not module.recurrent:
            return Cuts(length) if fresh else Steps(self.roots), config.batch_size
        derived = [root for root in self.roots if root in DERIVED]
        if fresh or derived:
            raise SettingsError(
                f"{self.algorithm} needs {'values along time' if fresh else ', '.join(derived)}, which recordings "
                "can't give a recurrent module: take a network without a memory, with `frame_stack` perhaps, or bc."
            )
        return Cuts(length, config.burn_in), max(1, config.batch_size // length)

    def _columns(
        self, config: OfflineConfig, connectors: Iterable[Connector], early: list[Connector]
    ) -> tuple[str, ...]:
        """The step columns to read."""
        wanted = dict.fromkeys(root for root in self.roots if root not in DERIVED)
        if col.NEXT_OBS in self.roots:
            wanted[col.OBS] = None
        looking = [c for c in connectors if _looks(c)]
        there = self.recording.columns
        if config.prelearner is not None or any(connector.needs is None for connector in looking):
            return tuple(name for name in there if name in wanted or name not in _MADE_UP)
        wanted |= dict.fromkeys(root for connector in looking for root in connector.needs or ())
        if config.filter is not None:
            wanted |= dict.fromkeys(RowFilter(config.filter).columns_in(there))
        if any(_looks(connector) for connector in early):  # what is not there, one of them may add
            return tuple(root for root in wanted if col.under(there, root))
        return tuple(wanted)

    def _held(self, config: OfflineConfig, fresh: list[Connector]) -> Held:
        if config.mode == "materialize_mapped_data" and fresh:
            raise SettingsError(
                f"`mode` is materialize_mapped_data, but {fresh[0].name} asks the module, which changes while it "
                "learns: what it gives can't be held. Take materialize_data, stream or auto."
            )
        match config.mode:
            case "auto":
                return "prepared" if self._fits_in_memory() else "nothing"
            case "stream":
                return "nothing"
            case "materialize_data":
                return "recorded"
        return "prepared"

    def _fits_in_memory(self) -> bool:
        parts = leaves(Tuple((self.recording.obs_space, self.recording.action_space)), "row").values()
        row = sum(int(np.prod(leaf_shape(leaf))) * leaf_dtype(leaf).itemsize for leaf in parts)
        most = MEMORY_LIMIT // (row + 64)
        return self.recording.rows_up_to(most) <= most

    def _source(self, config: OfflineConfig, columns: tuple[str, ...], held: Held) -> Parted:
        if held == "nothing":
            return self.recording
        if columns not in self._read:
            self._read[columns] = self.recording.read(columns=columns)
        return InMemory(self._read[columns], sys.maxsize if held == "prepared" else PIECE_ROWS)

    def _learn(
        self, name: str, config: OfflineConfig, prepare: Preparation, source: Parted, columns: tuple[str, ...]
    ) -> None:
        """Let connectors learn from the recording what they know of observations."""
        learning = (*prepare.connectors.connectors, *prepare.to_learner.connectors)
        if not any(overrides(connector, "update") for connector in learning):
            return
        if config.obs_filter == "data":
            for k in range(source.num_parts):
                prepare.learn(source.part(k, columns))
            return
        stored = self.recording.meta.get("filter")
        if stored is None:
            raise DataError(
                f"{shown(config.data)} has no observation filter stored with it: take obs_filter='data', which reads "
                "the data once for it."
            )
        state_from_json(prepare.connectors, stored[name] if config.modules is not None else stored)


def _parted(to_learner: Pipeline) -> tuple[list[Connector], list[Connector]]:
    """The learner's connectors before the first that asks the module, and those from there on."""
    connectors = to_learner.connectors
    first = next((i for i, connector in enumerate(connectors) if connector.uses_module), len(connectors))
    return connectors[:first], connectors[first:]


def _looks(connector: Connector) -> bool:
    return overrides(connector, "offline") or overrides(connector, "update")
