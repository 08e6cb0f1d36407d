# SPDX-License-Identifier: Apache-2.0
"""IQL: implicit Q-learning (Kostrikov, Nair & Levine 2021, "Offline reinforcement learning with implicit Q-learning",
arXiv 2110.06169)."""

from typing import Annotated, Any

import torch
from torch import Tensor

from etude.algorithms.critics import CriticModule, OfflineCriticAlgorithm, OfflineCriticConfig, of_kind, target_of
from etude.errors import ModuleError
from etude.learners import Batch, Loss, Schedule
from etude.modules import Module, Network
from etude.settings import FloatFrom0, FloatFrom1, Rule, settings


@settings
class IQLConfig(OfflineCriticConfig):
    """Settings of IQL. The recording needs rewards and next observations."""

    expectile: Annotated[float, Rule(lambda value: 0 < value < 1, "above 0 and below 1")] = 0.7
    """Expectile of the action values that estimates a state's value, above 0 and below 1. 0.5 is their mean (SARSA),
    close to 1 the best recorded action. Default: Kostrikov et al. 2021 for locomotion; 0.9 in their mazes."""

    beta: FloatFrom0 = 3.0
    """Inverse temperature of the policy weights exp(beta * advantage), at least 0, in units of 1 / reward. 0 is BC.
    Default: Kostrikov et al. 2021 for locomotion; 10 in their mazes, 0.5 for human data."""

    max_weight: FloatFrom1 = 100.0
    """Upper limit of a step's weight, at least 1. Default: the published code of Kostrikov et al. 2021."""

    lr: Schedule = 3e-4
    """Learning rate of Adam, or a schedule. Default: Kostrikov et al. 2021, who lower the policy's to 0 by half a
    cosine over the run: `actor_lr=("cosine", (0, 3e-4), (1_000_000, 0.0))`."""


class IQL(OfflineCriticAlgorithm[IQLConfig]):
    """Implicit Q-learning, for any actions: evaluates only recorded actions, and imitates the better ones.

    A state's value is an upper expectile of its recorded actions' values, which stands in for their maximum.
    """

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The losses of Kostrikov et al. 2021: values by eq. 5, critics by eq. 6, policy by eq. 7.

        All use the weights before the step, so that values and advantages are computed once.
        """
        config, net = self.config, of_kind(module, CriticModule)
        obs, action = net.columns_of(batch.obs), net.encoded(batch.action)
        with torch.no_grad():
            worth = net.target_critic(obs, action).amin(0)
            target = target_of(batch, config.gamma, values_of(net, batch.next_obs))
        out = net(batch.obs)
        advantage = worth - (values_of(net, batch.obs) if out.value is None else out.value)
        share = torch.where(advantage.detach() < 0, 1.0 - config.expectile, config.expectile)
        weight = (config.beta * advantage.detach()).exp().clamp(max=config.max_weight)
        values = net.critic(obs, action)
        return Loss(
            policy=-(weight * out.logp(batch.action)).mean(),
            value=(share * advantage.square()).mean(),
            critic=(values - target).square().mean(1).sum(),
        ).log(weight=weight.mean(), q=values.mean())


def values_of(module: CriticModule, obs: Any) -> Tensor:
    """The values of observations, ``[B]``; the built-in net skips its policy for this.

    Raises:
        ModuleError: the net returns no values.
    """
    net = module.net
    if type(net) is Network and net.critic is not None and net.value_head is not None:
        value: Tensor = net.value_head(net.critic(module.columns_of(obs))[0]).squeeze(-1)
        return value
    given = module(obs).value
    if given is None:
        raise ModuleError(
            f"{type(net).__name__} gives no values, which are learned here: return Output(value=...) from its forward."
        )
    return given  # type: ignore[no-any-return]
