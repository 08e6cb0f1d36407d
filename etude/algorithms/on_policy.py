# SPDX-License-Identifier: Apache-2.0
"""OnPolicyAlgorithm: collect, learn from exactly that, forget."""

from typing import Any, TypeVar

from etude.algorithms.acting import ActingAlgorithm
from etude.algorithms.config import OnPolicyConfig
from etude.algorithms.reporting import together
from etude.experience import Experience
from etude.learners import ModuleLearner, Update

C = TypeVar("C", bound=OnPolicyConfig)


class OnPolicyAlgorithm(ActingAlgorithm[C]):
    """Learns from the steps that its own module has just made. Define `loss` and `learner_connectors`."""

    def training_step(self) -> Update:
        """Collect, prepare, update: one iteration."""
        parts = self.collect(num_steps=self.config.num_steps, whole_episodes=self.config.whole_episodes)
        self.before_update(self.env_steps)
        updates = {}
        for name, exp in self.learner.chosen(self.assign(parts)).items():
            student = self.students[name]
            with self.timed("connect"):
                seen = student.connectors.offline(exp)
                batch = student.to_learner.offline(seen, student.module)
            with self.timed("update"), self.settings_of(name):
                learn = self.update if student.module.own_loss is None else self.go_over
                updates[name] = learn(student.learner, batch)
            student.connectors.update(exp)
            student.to_learner.update(seen)
        several = len(self.students) > 1
        return Update(
            together({name: update.losses for name, update in updates.items()}, several=several),
            together({name: update.metrics for name, update in updates.items()}, several=several) | self.counts,
        )

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
        by_count = config.num_minibatches is not None
        own: dict[str, Any] = {
            "minibatch_size": None if by_count else config.minibatch_size,
            "num_minibatches": config.num_minibatches,
            "epochs": config.epochs,
            "max_seq_len": config.max_seq_len,
            "burn_in": config.burn_in,
            "sequence_start": config.sequence_start,
        }
        return learner.update(exp, **(own | how))
