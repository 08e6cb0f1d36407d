# SPDX-License-Identifier: Apache-2.0
"""OnPolicyAlgorithm: the base class of algorithms that learn from the latest steps and then discard them."""

from collections import Counter
from typing import Any, TypeVar

from etude import columns as col
from etude.algorithms.acting import ActingAlgorithm
from etude.algorithms.config import OnPolicyConfig
from etude.algorithms.results import joined
from etude.algorithms.slips import arguments_checked
from etude.errors import SettingsError
from etude.experience import Experience
from etude.interruption import interruptible
from etude.learners import ModuleLearner, Update
from etude.threads import held

C = TypeVar("C", bound=OnPolicyConfig)


class OnPolicyAlgorithm(ActingAlgorithm[C]):
    """Base class of algorithms that learn from the steps that their own modules have just collected.

    Define `loss` and `learner_connectors`.
    """

    Config = OnPolicyConfig
    learns_on_device = True

    def training_step(self) -> Update:
        """Run one iteration: collect, prepare, update."""
        updates: dict[str, Update] | None = None
        counts: Counter[str] = Counter()
        while updates is None:  # remote learners that work in parallel report none at first
            self.before_collect(self.env_steps)
            parts = self.collect(
                num_steps=self.config.num_steps, whole_episodes=self.config.trajectories.whole_episodes
            )
            counts.update(self.counts)
            self.before_update(self.env_steps)
            updates = self.engine.update(self.learner.chosen(self.assign(parts)))
        return joined(updates, counts, self.engine.stats(), several=len(self.policies) > 1)

    def collect(self, *, num_steps: int, whole_episodes: bool = False, explore: bool = True) -> dict[str, Experience]:
        """Collect as `ActingAlgorithm.collect` does, without the column ``value``, which only some networks record.

        Recorded values may come from older weights (rows kept for whole episodes) or from another module (`assign`).
        The learner's connectors compute values with the module that learns.
        """
        parts = super().collect(num_steps=num_steps, whole_episodes=whole_episodes, explore=explore)
        for name, exp in parts.items():
            if col.VALUE in exp.steps:
                parts[name] = exp.only([column for column in exp.steps if column != col.VALUE])
        return parts

    @interruptible
    def connected(self, name: str, exp: Experience) -> Experience:
        """Raw experience as a module saw it: after the connectors between env and module."""
        with self.timed("connect"):
            seen = self.policies[name].connectors.offline(exp)
            return seen if self.learner.modules[name].connectors.takes_tensors else seen.numpy()

    @interruptible
    def prepared(self, name: str, seen: Experience) -> Experience:
        """What a module learns from: the output of the learner's connectors on what it saw."""
        learner = self.learner.modules[name]
        with self.timed("connect"), held(learner.threads.num):
            return learner.connectors.offline(seen, learner.module)

    @arguments_checked
    def learn(self, name: str, batch: Experience) -> Update:
        """Update one module from the output of its learner's connectors."""
        learner, module = self.learner.modules[name], self.policies[name].module
        with self.settings_of(name):
            update = self.update(learner, batch) if module.own_loss is None else self.update_epochs(learner, batch)
        if not isinstance(update, Update):
            raise SettingsError(
                f"{type(self).__name__}.update returned {update!r:.50}, but must return an Update, such as that of "
                "self.update_epochs(learner, exp)."
            )
        return update

    def assign(self, parts: dict[str, Experience]) -> dict[str, Experience]:
        """Choose the experience that each module learns from, by module id; by default, its own.

        Args:
            parts: The raw experience of each module.
        """
        return parts

    def update(self, learner: ModuleLearner, exp: Experience) -> Update:
        """Update one module from prepared experience, by the algorithm's loss."""
        return self.update_epochs(learner, exp)

    def update_epochs(self, learner: ModuleLearner, exp: Experience, **how: Any) -> Update:
        """Make gradient steps on shuffled minibatches for ``epochs`` passes over the experience, as the config says.

        Args:
            learner: The module's learner.
            exp: Experience with the columns that the loss needs.
            how: Arguments that differ from the config, such as ``epochs``; see `ModuleLearner.update`.
        """
        config = self.config
        num = config.num_minibatches
        own: dict[str, Any] = {
            "minibatch_size": config.minibatch_size if num is None else None,
            "num_minibatches": num,
            "epochs": config.epochs,
        }
        return learner.update(exp, **(own | self.sequences_of(learner) | how))

    def sequences_of(self, learner: ModuleLearner) -> dict[str, Any]:
        """How a recurrent module's sequences are cut and begun; see `ModuleLearner.update`."""
        sequences = self.config.sequences
        return {
            "max_seq_len": sequences.max_len,
            "burn_in": sequences.burn_in,
            "context": self.policies[learner.name].connectors.context,
            "sequence_start": sequences.start,
        }
