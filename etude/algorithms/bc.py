# SPDX-License-Identifier: Apache-2.0
"""BC: behaviour cloning, that is, maximum likelihood of the recorded actions (Pomerleau 1989, "ALVINN")."""

from collections.abc import Mapping
from typing import ClassVar

from etude.algorithms.config import NO_VALUE, OfflineConfig
from etude.algorithms.offline import OfflineAlgorithm
from etude.learners import Batch, Loss
from etude.learners.optim import Schedule
from etude.modules import Module
from etude.settings import settings


@settings
class BCConfig(OfflineConfig):
    """Settings of BC."""

    lr: Schedule = 1e-3
    """Learning rate of Adam, or a schedule of it: points of (gradient steps, rate)."""

    unused: ClassVar[Mapping[str, str]] = NO_VALUE

    entropy_weight: Schedule = 0.0
    """Weight of the entropy, which is added to what is maximised, at least 0: keeps the clone from becoming too sure.
    Or a schedule of it: points of (gradient steps, weight)."""


class BC(OfflineAlgorithm[BCConfig]):
    """Imitates the recorded actions. No env is needed, and no rewards."""

    name = "bc"
    Config = BCConfig
    needs_value = False

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The negative log-likelihood of the recorded actions."""
        out = batch.forward(module)
        imitation = -out.logp(batch.action).mean()
        if not self.config.entropy_weight:
            return Loss(imitation=imitation)
        return Loss(imitation=imitation, entropy=-self.scheduled("entropy_weight", module) * out.entropy().mean())
