# SPDX-License-Identifier: Apache-2.0
"""AWAC: advantage-weighted actor-critic (Nair et al. 2020, "AWAC: accelerating online reinforcement learning with
offline datasets", arXiv 2006.09359), learning from a recording."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from etude.algorithms.config import NO_VALUE, ModuleLike
from etude.algorithms.critics import (
    CriticModule,
    OfflineCriticAlgorithm,
    OfflineCriticConfig,
    check_box,
    of_kind,
    target_of,
)
from etude.columns import ACTION
from etude.learners import Batch, Loss, Schedule
from etude.modules import Module, Output
from etude.modules.distributions import DiagGaussian
from etude.settings import FloatFrom0, FloatFrom1, settings
from etude.spaces import Space


@settings
class AWACConfig(OfflineCriticConfig):
    """Settings of AWAC. The recording needs rewards and next observations."""

    beta: FloatFrom0 = 1.0
    """Inverse temperature of the policy weights exp(beta * advantage), at least 0, in units of 1 / reward. 0 is BC.
    Default: Nair et al. 2020 for locomotion, where 1 / beta is called lambda."""

    max_weight: FloatFrom1 = 100.0
    """Upper limit of a step's weight, at least 1. Default: as in IQL."""

    lr: Schedule = 3e-4
    """Learning rate of Adam, or a schedule. Default: Nair et al. 2020."""

    batch_size: int = 1024
    """Steps in each batch, at least 1. Default: Nair et al. 2020."""

    unused: ClassVar[Mapping[str, str]] = NO_VALUE


class AWAC(OfflineCriticAlgorithm[AWACConfig]):
    """Imitates recorded actions, weighted by how much its critics prefer them to the policy's; for Box actions."""

    needs_value = False

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """Make a policy with critics and target critics; see `CriticModule`."""
        check_box(action_space, "AWAC", "IQL, which learns any actions, or CQL for Discrete ones")
        return super().make_module(given, obs_space, action_space)

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The losses of Nair et al. 2020, algorithm 1: critics by eq. 3, with twins and targets; policy by eq. 13."""
        config, net = self.config, of_kind(module, CriticModule)
        encoded, action = batch.encode(net.critic), net.encoded(batch.action)
        out = batch.forward(net)
        values = net.critic.values(encoded, action)
        with torch.no_grad():
            after = _drawn(net, batch.forward_next(net))
            value = net.target_critic.values(batch.encode_next(net.target_critic), after).amin(0)
            target = target_of(batch, config.gamma, value)
            advantage = values.amin(0) - net.critic.values(encoded, _drawn(net, out)).amin(0)
            weight = (config.beta * advantage).exp().clamp(max=config.max_weight)
        return Loss(
            policy=-(weight * out.logp(batch.action)).mean(),
            critic=(values - target).square().mean(1).sum(),
        ).log(weight=weight.mean(), q=values.mean())


def _drawn(net: CriticModule, out: Output) -> Tensor:
    """Sample an action of the policy for each row, as critics see it: ``[B, width]``."""
    dist, inputs = out.bound()
    assert isinstance(dist, DiagGaussian)
    action, _ = dist.rsample(inputs, torch.randn(len(inputs), dist.num_noise, device=inputs.device))
    encoded: Tensor = net.encoded(action[ACTION])
    return encoded
