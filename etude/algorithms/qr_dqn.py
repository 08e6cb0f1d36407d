# SPDX-License-Identifier: Apache-2.0
"""QR-DQN (Dabney et al. 2018, "Distributional reinforcement learning with quantile regression", arXiv 1710.10044)."""

from typing import Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional as F

from etude.algorithms.critics import of_kind
from etude.algorithms.dqn import DQN, DQNConfig, QModule, dueling
from etude.columns import ACTION, WEIGHT
from etude.experience.arrays import Array
from etude.learners import Batch, Loss
from etude.modules import Module, Output
from etude.modules.distributions import ALLOWED_ABOVE, EpsilonGreedy, Logits
from etude.settings import IntFrom1, settings


@settings
class QRDQNConfig(DQNConfig):
    """Settings of QR-DQN: those of DQN and one more."""

    num_quantiles: IntFrom1 = 50
    """Number of quantiles learned for each action's return, at least 1. For large numbers, the time of a gradient step
    grows with their square. Default: for small networks; Dabney et al. 2018 use 200 for Atari."""


class QuantileGreedy(EpsilonGreedy):
    """Epsilon-greedy choice by the means of quantiles.

    Inputs: for each quantile, the lowest first, the values of all ``n`` actions.

    Args:
        space: A Discrete space.
        root: The name of the action's column.
        num_quantiles: Number of quantiles per action.
    """

    def __init__(self, space: spaces.Discrete, root: str, num_quantiles: int) -> None:
        super().__init__(space, root)
        n = int(space.n)
        self.num_inputs = n * num_quantiles
        self.logits = (Logits(0, n, True, num_quantiles),)
        self._shape_of_inputs = (num_quantiles, n)

    def apart(self, inputs: Tensor) -> Tensor:
        """Inputs ``[..., num_inputs]`` reshaped to ``[..., quantiles, n]``."""
        return inputs.reshape(*inputs.shape[:-1], *self._shape_of_inputs)

    def act(self, inputs: Array, noise: Array | None) -> dict[str, Any]:
        return super().act(inputs.reshape(inputs.shape[0], *self._shape_of_inputs).mean(1), noise)

    def probabilities(self, inputs: Tensor) -> Tensor:
        return super().probabilities(self.apart(inputs).mean(-2))


class QuantileModule(QModule):
    """Acts epsilon-greedily on the mean of the quantiles of each action's return: the net's ``dist_inputs``.

    They are in the order of `QuantileGreedy`. If the net also returns a ``value``, it is added, and the mean of all of
    a state's ``dist_inputs`` is subtracted, as in a dueling network (see `QModule`).

    Args:
        net: Called with observations, returns an `Output`.
        obs_space: The observation space of the net.
        action_space: A Discrete action space.
        dist: The action distribution.
    """

    dist: QuantileGreedy

    def action_values(self, output: Output) -> Tensor:
        """The means of the quantiles, ``[B, n]``."""
        return self.quantiles(output).mean(-2)

    def quantiles(self, output: Output) -> Tensor:
        """The quantiles in a net's output, ``[B, quantiles, n]``; those of forbidden actions are far below all
        others."""
        return dueling(self.dist.apart(output.bound()[1]), output.value, (-2, -1))


class QRDQN(DQN):
    """DQN that learns the distribution of returns by its quantiles; all settings of DQN apply."""

    name = "qr_dqn"
    Config = QRDQNConfig
    kind: ClassVar[type[QModule]] = QuantileModule
    config: QRDQNConfig

    def distribution(self, action_space: spaces.Discrete) -> EpsilonGreedy:
        """Epsilon-greedy choice by the means of quantiles."""
        return QuantileGreedy(action_space, ACTION, self.config.num_quantiles)

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The loss of Dabney et al. 2018, eq. 10 with kappa 1, as in algorithm 1; priorities use the errors of the
        means."""
        net = of_kind(module, QuantileModule)
        with torch.no_grad():
            after = net.quantiles(batch.forward_next(net.target))
            by = net.quantiles(batch.forward_next(net)) if self.config.target.double else after
            after = _of(after, by.mean(1).argmax(-1))
            after = torch.where(after > ALLOWED_ABOVE, after, 0.0)  # a mask may allow nothing after the last step
            target = batch.reward.unsqueeze(1) + batch.discount.unsqueeze(1) * after
        taken = _of(net.quantiles(batch.forward(net)), net.dist.index_of(batch.action))
        losses = quantile_loss(taken, target)
        weighted = losses * batch[WEIGHT] if WEIGHT in batch else losses
        loss = Loss(td=weighted.mean()).log(q=taken.mean())
        return loss.keep(td_error=target.mean(1) - taken.mean(1)) if WEIGHT in batch else loss


def _of(quantiles: Tensor, index: Tensor) -> Tensor:
    """The quantiles of the actions at ``index`` ``[B]``, from ``quantiles`` ``[B, N, n]``: ``[B, N]``."""
    return quantiles.gather(2, index[:, None, None].expand(-1, quantiles.shape[1], 1)).squeeze(2)


def quantile_loss(quantiles: Tensor, target: Tensor) -> Tensor:
    """Quantile Huber loss with kappa 1, summed over quantiles and averaged over targets (eq. 9 and 10): ``[B]``.

    Args:
        quantiles: ``[B, N]``: the i-th estimates the quantile at (2 i - 1) / (2 N), i from 1.
        target: ``[B, M]``: samples of equal weight, without gradients.
    """
    num = quantiles.shape[1]
    midpoints = (torch.arange(num, device=quantiles.device) + 0.5) / num
    midpoints = midpoints.unsqueeze(1)
    errors = quantiles.unsqueeze(2) - target.unsqueeze(1)
    shares = torch.where(errors > 0, 1 - midpoints, midpoints)
    huber = F.smooth_l1_loss(errors, errors.new_zeros(()).expand_as(errors), reduction="none")
    return (shares * huber).mean(2).sum(1)
