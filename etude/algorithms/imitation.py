# SPDX-License-Identifier: Apache-2.0
"""Imitation: BC, behaviour cloning, and MARWIL, which imitates what turned out well.

BC is maximum likelihood of the recorded actions (Pomerleau 1989, "ALVINN"). MARWIL weighs each action by its advantage
(Wang et al. 2018, "Exponentially weighted imitation learning for batched historical data").
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch.nn import functional as F

from etude import columns as col
from etude.algorithms.config import NO_VALUE, ONE_RATE, OfflineConfig
from etude.algorithms.nested import ModuleLike
from etude.algorithms.offline import OfflineAlgorithm
from etude.connectors import GAE, AdvantageWeights
from etude.learners import Batch, Loss
from etude.learners.optim import Schedule
from etude.modules import Module, make_module
from etude.settings import settings
from etude.spaces import Space


@settings
class BCConfig(OfflineConfig):
    """Settings of BC."""

    lr: Schedule = 1e-3
    """Learning rate of Adam, or a schedule of it: points of (gradient steps, rate)."""

    unused: ClassVar[Mapping[str, str]] = NO_VALUE | ONE_RATE

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


@settings
class MARWILConfig(OfflineConfig):
    """Settings of MARWIL. The recording needs rewards, unless ``beta`` is 0."""

    lr: Schedule = 1e-3
    """Learning rate of Adam, or a schedule of it: points of (gradient steps, rate)."""

    beta: float = 1.0
    """How much more an action is imitated that turned out better than others, at least 0. 0 imitates all alike, which
    is BC to the last bit; with 1, a step with an advantage of ``c`` (see `AdvantageWeights`) weighs e times one with
    none."""

    gamma: float = 0.99
    """Discount of future rewards, 0 to 1. Default: Schulman et al. 2017."""

    lambda_: float = 1.0
    """Decay of generalised advantage estimation, 0 to 1. Default: 1, rewards as they were recorded (Wang et al.
    2018)."""

    value_weight: float = 1.0
    """Weight of the value loss, at least 0. Policy and values share no layers unless the network says so."""

    average_rate: float = 0.01
    """How far the moving average of squared advantages goes to those of each batch, above 0, at most 1. It follows the
    scale of rewards within a few hundred steps."""

    max_weight: float = 20.0
    """The most that a step can weigh, at least 1. Default: Peng et al. 2019, "Advantage-weighted regression"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(
            beta=(self.beta >= 0, "at least 0"),
            gamma=(0 <= self.gamma <= 1, "between 0 and 1"),
            lambda_=(0 <= self.lambda_ <= 1, "between 0 and 1"),
            value_weight=(self.value_weight >= 0, "at least 0"),
            average_rate=(0 < self.average_rate <= 1, "greater than 0, at most 1"),
            max_weight=(self.max_weight >= 1, "at least 1"),
        )


class MARWIL(OfflineAlgorithm[MARWILConfig]):
    """Learns from recordings of mixed quality: imitates each action the more, the better it turned out.

    See `AdvantageWeights` for how much each step weighs. Advantages come from the value function as it is at each
    gradient step. Segments are cut to `max_segment_length`, after which the value function says what the rest is worth:
    longer ones are truer to the rewards, shorter ones are mixed better.
    """

    name = "marwil"
    Config = MARWILConfig

    def learner_connectors(self) -> list[Any]:
        """What weighs steps, by advantages from the module as it is; nothing where ``beta`` is 0."""
        config = self.config
        if not config.beta:
            return []
        return [
            GAE(config.gamma, config.lambda_),
            AdvantageWeights(config.beta, config.average_rate, config.max_weight),
        ]

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """With a value function, unless ``beta`` is 0."""
        config = self.config
        value = config.beta > 0
        return make_module(
            given, obs_space, action_space, config.network, squash=bool(config.network.squash), value=value
        )

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The weighed log-likelihood of the recorded actions, and the squared error of the values."""
        out = batch.forward(module)
        logp = out.logp(batch.action)
        if not self.config.beta:
            return Loss(policy=-logp.mean())
        assert out.value is not None  # the advantages have seen to that
        weight = batch[col.WEIGHT]
        value = self.config.value_weight * F.mse_loss(out.value, batch[col.VALUE_TARGET])
        return Loss(policy=-(weight * logp).mean(), value=value).log(weight=weight.mean())
