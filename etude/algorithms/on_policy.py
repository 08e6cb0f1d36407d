# SPDX-License-Identifier: Apache-2.0
"""OnPolicyAlgorithm: collect, learn from exactly that, forget."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from etude.algorithms.acting import ActingAlgorithm
from etude.algorithms.config import OnPolicyConfig
from etude.algorithms.reporting import together
from etude.experience import Experience
from etude.learners import ModuleLearner, Update

C = TypeVar("C", bound=OnPolicyConfig)


class OnPolicyAlgorithm(ActingAlgorithm[C]):
    """Learns from the steps that its own module has just made. Define `loss` and `learner_connectors`."""

    agreed: Mapping[str, int] = MappingProxyType({})
    """The minibatches of an epoch, by module id, where several learners have agreed on them."""

    def training_step(self) -> Update:
        """Collect, prepare, update: one iteration."""
        parts = self.collect(num_steps=self.config.num_steps, whole_episodes=self.config.whole_episodes)
        self.before_update(self.env_steps)
        chosen = self.learner.chosen(self.assign(parts))
        updates = self._learned(chosen) if self.learners is None else self._learned_away(chosen)
        several = len(self.students) > 1
        return Update(
            together({name: update.losses for name, update in updates.items()}, several=several),
            together({name: update.metrics for name, update in updates.items()}, several=several) | self.counts,
        )

    def _learned(self, parts: Mapping[str, Experience]) -> dict[str, Update]:
        """Each module's update, one after the other."""
        updates = {}
        for name, exp in parts.items():
            seen, batch = self._connected(name, exp)
            with self.timed("update"):
                updates[name] = self.learn(name, batch)
            self._tell(name, exp, seen)
        return updates

    def _learned_away(self, parts: Mapping[str, Experience]) -> dict[str, Update]:
        """The updates of all modules at once, by learners elsewhere."""
        assert self.learners is not None
        connected = {name: self._connected(name, exp) for name, exp in parts.items()}
        with self.timed("update"):
            updates = self.learners.update({name: batch for name, (_, batch) in connected.items()}, self.env_steps)
        for name, (seen, _) in connected.items():
            self._tell(name, parts[name], seen)
        self.counts |= self.learners.stats()
        return updates

    def _connected(self, name: str, exp: Experience) -> tuple[Experience, Experience]:
        """What a module saw, and what it learns from."""
        student = self.students[name]
        with self.timed("connect"):
            seen = student.connectors.offline(exp)
            return seen, student.to_learner.offline(seen, student.module)

    def _tell(self, name: str, exp: Experience, seen: Experience) -> None:
        """Let a module's connectors learn from what it has lived through."""
        self.students[name].connectors.update(exp)
        self.students[name].to_learner.update(seen)

    def learn(self, name: str, batch: Experience) -> Update:
        """Let one module learn from what its connectors have prepared."""
        learner, module = self.students[name].learner, self.students[name].module
        with self.settings_of(name):
            return self.update(learner, batch) if module.own_loss is None else self.go_over(learner, batch)

    def assign(self, parts: dict[str, Experience]) -> dict[str, Experience]:
        """Say which experience each module learns from, by module id; unless this is overridden, from its own.

        Args:
            parts: What each module has lived through, raw.
        """
        return parts

    def update(self, learner: ModuleLearner, exp: Experience) -> Update:
        """Let one module learn, by the algorithm's loss, from prepared experience."""
        return self.go_over(learner, exp)

    def go_over(self, learner: ModuleLearner, exp: Experience, **how: Any) -> Update:
        """Make gradient steps in shuffled minibatches, ``epochs`` times over the experience, as the config has it.

        Args:
            learner: The module's.
            exp: What the loss needs is in it.
            how: Other than the config has it, such as ``epochs``; see `ModuleLearner.update`.
        """
        config = self.config
        num = self.agreed.get(learner.name, config.num_minibatches)
        own: dict[str, Any] = {
            "minibatch_size": config.minibatch_size if num is None else None,
            "num_minibatches": num,
            "epochs": config.epochs,
            "max_seq_len": config.max_seq_len,
            "burn_in": config.burn_in,
            "sequence_start": config.sequence_start,
        }
        return learner.update(exp, **(own | how))
