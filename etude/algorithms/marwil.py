# SPDX-License-Identifier: Apache-2.0
"""MARWIL: imitation of what turned out well (Wang et al. 2018, "Exponentially weighted imitation learning for batched
historical data")."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.nn import functional as F

from etude import columns as col
from etude.algorithms.components import Component
from etude.algorithms.config import ModuleLike, OfflineConfig
from etude.algorithms.offline import OfflineAlgorithm
from etude.connectors import GAE
from etude.experience import Experience
from etude.learners import Batch, Loss
from etude.learners.schedules import Schedule
from etude.modules import Module, make_module
from etude.settings import settings
from etude.spaces import Space

if TYPE_CHECKING:
    from etude.recordings import Recording


@settings
class MARWILConfig(OfflineConfig):
    """Settings of MARWIL. The recording needs rewards, unless ``beta`` is 0."""

    lr: Schedule = 1e-3
    """Learning rate of Adam."""

    beta: float = 1.0
    """How much more an action is imitated that turned out better than others, at least 0. 0 imitates all alike, which
    is BC to the last bit; with 1, a step with an advantage of ``c`` (see `MARWIL`) weighs e times one with none."""

    gamma: float = 0.99
    """Discount of future rewards, 0 to 1. Default: Schulman et al. 2017."""

    lambda_: float = 1.0
    """Decay of generalised advantage estimation, 0 to 1. Default: 1, rewards as they were recorded (Wang et al.
    2018)."""

    max_segment_length: int = 128
    """Longer segments are cut to so many steps, at least 1; the value function says what the rest is worth. Longer ones
    are truer to the rewards, shorter ones are mixed better. Default: measured on CartPole."""

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
            max_segment_length=(self.max_segment_length >= 1, "at least 1"),
            value_weight=(self.value_weight >= 0, "at least 0"),
            average_rate=(0 < self.average_rate <= 1, "greater than 0, at most 1"),
            max_weight=(self.max_weight >= 1, "at least 1"),
        )


class MARWIL(OfflineAlgorithm[MARWILConfig]):
    """Learns from recordings of mixed quality: imitates each action the more, the better it turned out.

    Each step weighs ``exp(beta * advantage / c)`` (Wang et al. 2018, algorithm 1), where ``c ** 2`` is a moving average
    of squared advantages, so that the scale of rewards does not matter. Advantages come from the value function as it
    is at each gradient step.
    """

    name = "marwil"

    def setup(self) -> None:
        """No advantage is known yet."""
        super().setup()
        self.gae = GAE(self.config.gamma, self.config.lambda_)
        """Gives advantages and value targets of a batch."""
        self.mean_square: float | None = None
        """The moving average of squared advantages; None before the first gradient step."""

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """With a value function, unless ``beta`` is 0."""
        config = self.config
        value = config.beta > 0
        return make_module(given, obs_space, action_space, config.network, squash=config.squash, value=value)

    def batches_of(self, data: "Experience | Recording", start: int) -> Iterator[Mapping[str, Any]]:
        """Batches of segments, whose steps are weighed when they are asked for; of single steps where ``beta`` is 0."""
        config = self.config
        if not config.beta:
            return super().batches_of(data, start)
        sizes, columns = (config.batch_size, config.max_segment_length), (*self.columns, col.REWARD)
        if not isinstance(data, Experience):
            return map(self._weighed, data.segment_batches(*sizes, columns=columns, seed=self._seed, start=start))
        from etude.recordings import sample_segments

        return map(self._weighed, sample_segments(data, *sizes, columns=columns, seed=self._seed, start=start))

    def _weighed(self, exp: Experience) -> Mapping[str, Any]:
        """The columns of a batch with the weight of each step, by the module as it is now."""
        config = self.config
        self.module.eval()
        exp = self.gae.offline(exp, self.module)
        self.module.train()
        advantage = exp.steps[col.ADVANTAGE]
        square = float(np.square(advantage).mean())
        before = square if self.mean_square is None else self.mean_square
        mean_square = before + config.average_rate * (square - before)
        if math.isfinite(mean_square):  # else the learner skips this batch, and the next ones are to be right again
            self.mean_square = mean_square
        exponent = advantage * (config.beta / (math.sqrt(mean_square) + 1e-8))
        weight = np.exp(np.minimum(exponent, math.log(config.max_weight)))
        return exp.with_steps(**{col.WEIGHT: weight}).steps

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The weighed log-likelihood of the recorded actions, and the squared error of the values."""
        out = module(batch.obs)
        logp = out.logp(batch.action)
        if not self.config.beta:
            return Loss(policy=-logp.mean())
        assert out.value is not None  # the advantages have seen to that
        weight = batch[col.WEIGHT]
        value = self.config.value_weight * F.mse_loss(out.value, batch[col.VALUE_TARGET])
        return Loss(policy=-(weight * logp).mean(), value=value).log(weight=weight.mean())

    def components(self) -> dict[str, Component]:
        """Also ``advantages``: their moving average."""
        own = Component(lambda: self.mean_square, lambda state: setattr(self, "mean_square", state))
        return {**super().components(), "advantages": own}
