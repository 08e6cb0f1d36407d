# SPDX-License-Identifier: Apache-2.0
"""LearnerActor: one learner on a cluster, with its own replica of the algorithm."""

import copy
import datetime
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
import ray.util
import torch.distributed

from etude.algorithms.acting import OnPolicyAlgorithm
from etude.algorithms.algorithm import Algorithm
from etude.algorithms.config import AlgorithmConfig
from etude.experience import Experience
from etude.interruption import when_parent_ends
from etude.learners import Update
from etude.learners.distributed import Team
from etude.ray.policies import as_arrays, learner_state, set_learner_state
from etude.spaces import Spaces
from etude.threads import for_acting, hold

if TYPE_CHECKING:  # importing Ray Data takes seconds, and not all need it
    from etude.algorithms.feed import Feed
    from etude.ray.data import Shard, Told


_store: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]  # public, but not declared so


class Standing(NamedTuple):
    """The progress of the trained algorithm, as far as losses may depend on it."""

    env_steps: int
    scheduled_at: int
    """The env steps for which schedules have their values."""
    rates: Mapping[str, Mapping[str, float]]
    """The learning rates of each module, by optimizer."""
    plain: Mapping[str, Any]
    """The algorithm's attributes that are numbers, texts or booleans."""
    connectors: Mapping[str, Mapping[str, Any]]
    """The states of the learner's connectors, by module id, if they work at the learners and learn from experience."""


class TrainedShare(NamedTuple):
    """The results of training on a learner's share of a recording."""

    updates: dict[str, Update]
    data: dict[str, float]
    """See `Result.data`."""
    bottleneck: str
    told: "Told"


class LearnerActor:
    """A replica of the trained algorithm that makes no envs, keeps no replay and records nothing.

    Args:
        rank: The index of this learner.
        kind: The class of the algorithm.
        config: Its settings, for the local engine, without callbacks and recording.
        spaces: The spaces of each module, on the env's side.
    """

    def __init__(
        self, rank: int, kind: type[Algorithm[Any]], config: AlgorithmConfig, spaces: dict[str, Spaces]
    ) -> None:
        when_parent_ends(lambda: os._exit(1))  # a thread may wait for data for ever
        self._rank, self._arguments = rank, (kind, config, spaces)
        self._feeds: dict[str, Feed] = {}
        self._store: Any = None

    def build(self) -> tuple[str, int]:
        """Create the replica; return the ids of the node and of the process.

        This is not done in the constructor, so that errors keep their type.
        """
        kind, config, spaces = self._arguments
        hold(for_acting(config.compute.threads))
        self._algorithm = kind(config, saved_spaces=spaces)
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def serve(self, size: int, timeout: float) -> tuple[str, int]:
        """Open the store at which ``size`` learners meet, on a free port; return its host and port."""
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._store = _store(host, 0, size, True, datetime.timedelta(seconds=timeout), wait_for_workers=False)
        return host, self._store.port

    def join(self, address: tuple[str, int], size: int, backend: str, timeout: float) -> None:
        """Join the process group of ``size`` learners that meet at ``address``, and learn together with them."""
        seconds = datetime.timedelta(seconds=timeout)
        store = self._store or _store(*address, size, False, seconds)
        torch.distributed.init_process_group(backend, store=store, rank=self._rank, world_size=size, timeout=seconds)
        team = Team()
        for learner in self._algorithm.learner.modules.values():
            learner.team = team
            for connector in learner.connectors.connectors:
                connector.sum_over_learners = team.sum_array_

    # -- state --------------------------------------------------------------------------------------------------

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the states of all modules' learners, by module id: see `learner_state`."""
        for name, own in state.items():
            set_learner_state(self._algorithm.learner.modules[name], own)

    def state(self) -> dict[str, Any]:
        """The state of the learner of each module, including its connectors if they learn here."""
        return {
            name: learner_state(own, connectors=bool(self._feeds))
            for name, own in self._algorithm.learner.modules.items()
        }

    # -- learning -----------------------------------------------------------------------------------------------

    def update(self, parts: Mapping[str, Experience], standing: Standing, connects: bool) -> dict[str, Update]:
        """Learn from this learner's share of experience, one module at a time; ``connects``: prepare it here first."""
        algorithm = self._stand(standing)
        assert isinstance(algorithm, OnPolicyAlgorithm)
        updates = {}
        for name, exp in parts.items():
            updates[name] = algorithm.learn(name, algorithm.prepared(name, exp) if connects else exp)
        return updates

    def update_from(
        self, batches: Sequence[Any], module_id: str, standing: Standing
    ) -> tuple[Update, list[dict[str, Any]]]:
        """Learn from this learner's share of each batch; also return what the loss kept of each, by row."""
        algorithm = self._stand(standing)
        learner, kept = algorithm.learner.modules[module_id], list[dict[str, Any]]()

        def given() -> Iterator[Any]:
            for batch in batches:
                yield batch
                kept.append(as_arrays(learner.kept))

        with algorithm.settings_of(module_id):
            return learner.update_from(given()), kept

    def open(self, shard: "Shard") -> None:
        """Use this share of the recording from now on."""
        self._feeds = shard.feeds(self._algorithm)  # type: ignore[arg-type]

    def train(self, num_updates: int, module_ids: Sequence[str], standing: Standing) -> TrainedShare:
        """Make gradient steps of each module, from its feed."""
        from etude.algorithms.feed import report
        from etude.ray.data import told

        algorithm = self._stand(standing)
        begin = time.perf_counter()
        updates = {}
        for name in module_ids:
            with algorithm.settings_of(name):
                batches = self._feeds[name].take(num_updates * algorithm.config.optimizer.accumulate)
                updates[name] = algorithm.learner.modules[name].update_from(batches)
        data, bottleneck = report(self._feeds, time.perf_counter() - begin, 0)
        return TrainedShare(updates, data, bottleneck, told(self._feeds))

    def _stand(self, standing: Standing) -> Algorithm[Any]:
        algorithm = self._algorithm
        algorithm.learner.set_env_steps(standing.scheduled_at)
        for name, rates in standing.rates.items():
            algorithm.learner.modules[name].lr.update(rates)
        for name, state in standing.connectors.items():
            algorithm.learner.modules[name].connectors.load_state_dict(copy.deepcopy(dict(state)))
        algorithm.env_steps = standing.env_steps
        vars(algorithm).update(standing.plain)
        algorithm.before_update(standing.env_steps)
        vars(algorithm).update(standing.plain)  # again, as the trained algorithm has called `before_update`, too
        return algorithm
