# SPDX-License-Identifier: Apache-2.0
"""Imitation learning: BC (behaviour cloning) and MARWIL (advantage-weighted imitation).

BC maximises the likelihood of the recorded actions (Pomerleau 1989, "ALVINN"). MARWIL weights each action by its
advantage (Wang et al. 2018, "Exponentially weighted imitation learning for batched historical data").
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch.nn import functional as F

from etude import columns as col
from etude.algorithms.config import NO_VALUE, ONE_RATE, ModuleLike, OfflineConfig
from etude.algorithms.offline import OfflineAlgorithm
from etude.connectors import GAE, AdvantageWeights
from etude.learners import Batch, Loss
from etude.learners.optim import Schedule
from etude.modules import Module, make_module
from etude.settings import FloatFrom0, FloatFrom1, Rate, UnitInterval, settings
from etude.spaces import Space


@settings
class BCConfig(OfflineConfig):
    """Settings of BC."""

    lr: Schedule = 1e-3
    """Learning rate of Adam, or a schedule: points of (gradient steps, rate)."""

    unused: ClassVar[Mapping[str, str]] = NO_VALUE | ONE_RATE

    entropy_weight: Schedule = 0.0
    """Weight of the entropy bonus, at least 0, or a schedule: points of (gradient steps, weight). The bonus keeps the
    clone from becoming too certain."""


class BC(OfflineAlgorithm[BCConfig]):
    """Behaviour cloning: imitates the recorded actions. Needs neither an env nor rewards."""

    needs_value = False

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The negative log-likelihood of the recorded actions."""
        out = batch.forward(module)
        imitation = -out.logp(batch.action).mean()
        if not self.config.entropy_weight:
            return Loss(imitation=imitation)
        return Loss(imitation=imitation, entropy=-self.scheduled("entropy_weight", module) * out.entropy().mean())


@settings
class MARWILConfig(OfflineConfig):
    """Settings of MARWIL. The recording needs rewards, unless ``beta`` is 0."""

    lr: Schedule = 1e-3
    """Learning rate of Adam, or a schedule: points of (gradient steps, rate)."""

    beta: FloatFrom0 = 1.0
    """How strongly better actions are favoured, at least 0. 0 weights all actions alike, which is BC bit for bit; with
    1, a step with an advantage of ``c`` (see `AdvantageWeights`) weighs e times one with an advantage of 0."""

    gamma: UnitInterval = 0.99
    """Discount factor, 0 to 1. Default: Schulman et al. 2017."""

    lambda_: UnitInterval = 1.0
    """Lambda of generalised advantage estimation, 0 to 1. Default: 1, which uses rewards as they were recorded (Wang et
    al. 2018)."""

    value_weight: FloatFrom0 = 1.0
    """Weight of the value loss, at least 0. Policy and value function share no layers unless `network.separate` is
    False."""

    average_rate: Rate = 0.01
    """Rate at which the moving average of squared advantages follows each batch, above 0, at most 1. The default
    follows the scale of rewards within a few hundred steps."""

    max_weight: FloatFrom1 = 20.0
    """Upper limit of a step's weight, at least 1. Default: Peng et al. 2019, "Advantage-weighted regression"."""

    needs: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("lambda_", "value_weight", "average_rate", "max_weight"), "beta"
    )


class MARWIL(OfflineAlgorithm[MARWILConfig]):
    """Advantage-weighted imitation for recordings of mixed quality: better actions get larger weights.

    See `AdvantageWeights` for the weights. Advantages are computed by the value function as it is at each gradient
    step. Segments are cut to `max_segment_length`, after which the value function estimates the rest: longer segments
    use more of the recorded rewards, shorter ones are shuffled better.
    """

    def learner_connectors(self) -> list[Any]:
        """Connectors that compute the weights of steps from advantages; none if ``beta`` is 0."""
        config = self.config
        if not config.beta:
            return []
        return [
            GAE(config.gamma, config.lambda_),
            AdvantageWeights(config.beta, config.average_rate, config.max_weight),
        ]

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """Make a module, with a value function unless ``beta`` is 0."""
        config = self.config
        value = config.beta > 0
        return make_module(
            given, obs_space, action_space, config.network, squash=bool(config.network.squash), value=value
        )

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The weighted negative log-likelihood of the recorded actions, and the squared error of the values."""
        out = batch.forward(module)
        logp = out.logp(batch.action)
        if not self.config.beta:
            return Loss(policy=-logp.mean())
        assert out.value is not None  # GAE has checked it
        weight = batch[col.WEIGHT]
        value = self.config.value_weight * F.mse_loss(out.value, batch[col.VALUE_TARGET])
        return Loss(policy=-(weight * logp).mean(), value=value).log(weight=weight.mean())
