# SPDX-License-Identifier: Apache-2.0
"""BC: behaviour cloning, that is, maximum likelihood of the recorded actions (Pomerleau 1989, "ALVINN")."""

from etude.algorithms.config import OfflineConfig
from etude.algorithms.offline import OfflineAlgorithm
from etude.learners import Batch, Loss
from etude.learners.schedules import Schedule
from etude.modules import Module
from etude.settings import settings


@settings
class BCConfig(OfflineConfig):
    """Settings of BC."""

    lr: Schedule = 1e-3
    """Learning rate of Adam."""

    entropy_weight: float = 0.0
    """Weight of the entropy, which is added to what is maximised: keeps the clone from becoming too sure."""


class BC(OfflineAlgorithm[BCConfig]):
    """Imitates the recorded actions. No env is needed, and no rewards."""

    name = "bc"
    needs_value = False

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The negative log-likelihood of the recorded actions."""
        out = batch.forward(module)
        imitation = -out.logp(batch.action).mean()
        if not self.config.entropy_weight:
            return Loss(imitation=imitation)
        return Loss(imitation=imitation, entropy=-self.config.entropy_weight * out.entropy().mean())
