# SPDX-License-Identifier: Apache-2.0
"""LearnerActor: one of the learners of a cluster, with an algorithm of its own that it learns by."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from etude.algorithms.algorithm import Algorithm
from etude.algorithms.config import AlgorithmConfig
from etude.algorithms.on_policy import OnPolicyAlgorithm
from etude.experience import Experience
from etude.learners import Update
from etude.learners.distributed import Team
from etude.ray.policies import Weights, weights_of
from etude.ray.states import as_arrays, known_by, set_known
from etude.spaces import Spaces
from etude.threads import for_acting, hold

if TYPE_CHECKING:  # Ray Data takes seconds to be imported, and only some need it
    from etude.algorithms.feed import Feed
    from etude.ray.data import Shard, Told


class Standing(NamedTuple):
    """Where the algorithm that is trained stands, as far as losses may ask."""

    env_steps: int
    rates: Mapping[str, Mapping[str, float]]
    """The learning rates of each module, by optimizer."""
    plain: Mapping[str, Any]
    """Its attributes that are numbers, texts or truth values."""


class Trained(NamedTuple):
    """What a learner did with its share of a recording."""

    updates: dict[str, Update]
    data: dict[str, float]
    """See `Result.data`."""
    bottleneck: str
    told: "Told"


class LearnerActor:
    """A replica of the algorithm that is trained: it makes no envs, keeps no replay and records nothing.

    Args:
        kind: Of algorithm.
        config: Its settings, for the local engine, without callbacks and what is recorded.
        spaces: Of each module, on the env's side.
    """

    def __init__(self, kind: type[Algorithm[Any]], config: AlgorithmConfig, spaces: dict[str, Spaces]) -> None:
        self._made_of = (kind, config, spaces)
        self._feeds: dict[str, Feed] = {}
        self._connects = False  # connectors that need the module work here

    def build(self) -> None:
        """Make the replica. Not done when the actor is made, so that what fails here is raised as itself."""
        kind, config, spaces = self._made_of
        hold(for_acting(config.threads))
        self._algorithm = kind(config, saved_spaces=spaces)

    def join(self) -> None:
        """Learn in a team with the others of the process group that this process is in."""
        team = Team()
        for learner in self._algorithm.learner.modules.values():
            learner.team = team
            for connector in learner.connectors.connectors:
                connector.sum_over_learners = team.sum_array_

    # -- what it knows ------------------------------------------------------------------------------------------

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over all that learners know, by module id: see `known_by`."""
        for name, own in state.items():
            set_known(self._algorithm.learner.modules[name], own)

    def weights(self) -> Weights:
        """By module id, what its ``state_dict()`` holds."""
        return weights_of(self._algorithm.policies)

    def rest(self) -> dict[str, Any]:
        """By module id, what else its learner knows; and its connectors, where they learn here."""
        there = self._connects or bool(self._feeds)
        return {name: known_by(own, connectors=there) for name, own in self._algorithm.learner.modules.items()}

    # -- learning -----------------------------------------------------------------------------------------------

    def update(self, parts: Mapping[str, Experience], standing: Standing) -> dict[str, Update]:
        """Learn from this learner's share of prepared experience, one module after the other."""
        self._stand(standing)
        algorithm = self._algorithm
        assert isinstance(algorithm, OnPolicyAlgorithm)
        return {name: algorithm.learn(name, part) for name, part in parts.items()}

    def connect_and_update(self, seen: Mapping[str, Experience], standing: Standing) -> dict[str, Update]:
        """As `update`, from what modules saw, before the learners' connectors."""
        self._connects = True
        self._stand(standing)
        algorithm = self._algorithm
        assert isinstance(algorithm, OnPolicyAlgorithm)
        updates = {}
        for name, exp in seen.items():
            updates[name] = algorithm.learn(name, algorithm.prepared(name, exp))
            algorithm.learner.modules[name].connectors.update(exp)
        return updates

    def update_from(
        self, batches: Sequence[Any], module_id: str, standing: Standing
    ) -> tuple[Update, list[dict[str, Any]]]:
        """Learn from this learner's share of each batch; also gives what the loss kept of each, by row."""
        self._stand(standing)
        learner, kept = self._algorithm.learner.modules[module_id], list[dict[str, Any]]()

        def given() -> Iterator[Any]:
            for batch in batches:
                yield batch
                kept.append(as_arrays(learner.kept))

        with self._algorithm.settings_of(module_id):
            return learner.update_from(given()), kept

    def open(self, shard: "Shard") -> None:
        """Be fed by this share of the recording from now on."""
        for feed in self._feeds.values():
            feed.close()
        self._feeds = shard.feeds(self._algorithm)  # type: ignore[arg-type]

    def train(self, num_updates: int, module_ids: Sequence[str], standing: Standing) -> Trained:
        """Make gradient steps of each module, from what feeds it."""
        from etude.algorithms.feed import report
        from etude.ray.data import told

        self._stand(standing)
        begin = time.perf_counter()
        updates = {}
        for name in module_ids:
            with self._algorithm.settings_of(name):
                batches = self._feeds[name].take(num_updates * self._algorithm.config.accumulate)
                updates[name] = self._algorithm.learner.modules[name].update_from(batches)
        data, bottleneck = report(self._feeds, time.perf_counter() - begin, 0)
        return Trained(updates, data, bottleneck, told(self._feeds))

    def _stand(self, standing: Standing) -> None:
        algorithm = self._algorithm
        algorithm.learner.set_env_steps(standing.env_steps)
        for name, rates in standing.rates.items():
            algorithm.learner.modules[name].lr.update(rates)
        algorithm.env_steps = standing.env_steps
        algorithm.before_update(standing.env_steps)
        vars(algorithm).update(standing.plain)
