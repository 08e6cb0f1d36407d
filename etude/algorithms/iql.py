# SPDX-License-Identifier: Apache-2.0
"""IQL: implicit Q-learning (Kostrikov, Nair & Levine 2021, "Offline reinforcement learning with implicit Q-learning",
arXiv 2110.06169)."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from etude.algorithms.config import SINGLE_STEPS, OfflineConfig
from etude.algorithms.critics import TRANSITION, CriticModule, looking_ahead, not_recurrent, of_kind, target_of
from etude.algorithms.nested import ModuleLike, OptimizerConfig
from etude.algorithms.offline import OfflineAlgorithm
from etude.learners import Batch, Loss, Schedule
from etude.modules import Module, NetworkConfig, make_module
from etude.settings import settings
from etude.spaces import Space


@settings
class IQLConfig(OfflineConfig):
    """Settings of IQL. The recording needs rewards and next observations."""

    expectile: float = 0.7
    """Expectile of the action values that estimates a state's value, above 0 and below 1. 0.5 is their mean (SARSA),
    close to 1 the best recorded action. Default: Kostrikov et al. 2021 for locomotion; 0.9 in their mazes."""

    beta: float = 3.0
    """Inverse temperature of the policy weights exp(beta * advantage), at least 0, in units of 1 / reward. 0 is BC.
    Default: Kostrikov et al. 2021 for locomotion; 10 in their mazes, 0.5 for human data."""

    max_weight: float = 100.0
    """Upper limit of a step's weight, at least 1. Default: the published code of Kostrikov et al. 2021."""

    gamma: float = 0.99
    """Discount factor, 0 to 1. Default: Kostrikov et al. 2021."""

    n_step: int = 1
    """Recorded rewards that a target sums before it bootstraps, at least 1. More propagate rewards faster, but are
    those of the behaviour policy. Default: as in the paper."""

    tau: float = 0.005
    """How far the critics' target networks move towards them after each gradient step, above 0, at most 1. Default:
    Kostrikov et al. 2021."""

    lr: Schedule = 3e-4
    """Learning rate of Adam, or a schedule. Default: Kostrikov et al. 2021, who lower the policy's to 0 by half a
    cosine over the run: `actor_lr=("cosine", (0, 3e-4), (1_000_000, 0.0))`."""

    optimizer: OptimizerConfig = OptimizerConfig(grad_clip=None)
    """Settings of the optimizer. Default: gradients are not clipped, as in Kostrikov et al. 2021."""

    batch_size: int = 256
    """Steps in a gradient step, at least 1. Default: Kostrikov et al. 2021."""

    updates_per_iteration: int = 1000
    """Gradient steps between two results, at least 1."""

    network: NetworkConfig = NetworkConfig(hidden=(256, 256), activation="relu")
    """The shape of policy, value function and critics. Default: Kostrikov et al. 2021."""

    unused: ClassVar[Mapping[str, str]] = SINGLE_STEPS

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(
            expectile=(0 < self.expectile < 1, "above 0 and below 1"),
            beta=(self.beta >= 0, "at least 0"),
            max_weight=(self.max_weight >= 1, "at least 1"),
            gamma=(0 <= self.gamma <= 1, "between 0 and 1"),
            n_step=(self.n_step >= 1, "at least 1"),
            tau=(0 < self.tau <= 1, "above 0 and at most 1"),
        )


class IQL(OfflineAlgorithm[IQLConfig]):
    """Implicit Q-learning: values recorded actions without querying others, and imitates the better ones; for any
    actions.

    A state's value is an upper expectile of its recorded actions' values, which stands in for their maximum.
    """

    name = "iql"
    Config = IQLConfig
    columns = TRANSITION

    def learner_connectors(self) -> list[Any]:
        """The connector that sums the rewards of `n_step` steps, if there are several."""
        return looking_ahead(self.config.n_step, self.config.gamma)

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """Make a policy and a value function with critics and target critics; see `CriticModule`."""
        config = self.config
        made = make_module(given, obs_space, action_space, config.network, squash=bool(config.network.squash))
        not_recurrent(made, self.name)
        if isinstance(made, CriticModule):
            return made
        return CriticModule(made.net, obs_space, action_space, made.dist, config.network)

    def loss(self, module: Module, batch: Batch) -> Loss:
        """The losses of Kostrikov et al. 2021: values by eq. 5, critics by eq. 6, policy by eq. 7.

        All use the weights before the step, so that values and advantages are computed once.
        """
        config, net = self.config, of_kind(module, CriticModule)
        obs, action = net.columns_of(batch.obs), net.encoded(batch.action)
        with torch.no_grad():
            worth = net.target_critic(obs, action).amin(0)
            target = target_of(batch, config.gamma, net.values(batch.next_obs))
        out = net(batch.obs)
        advantage = worth - (net.values(batch.obs) if out.value is None else out.value)
        share = torch.where(advantage.detach() < 0, 1.0 - config.expectile, config.expectile)
        weight = (config.beta * advantage.detach()).exp().clamp(max=config.max_weight)
        values = net.critic(obs, action)
        return Loss(
            policy=-(weight * out.logp(batch.action)).mean(),
            value=(share * advantage.square()).mean(),
            critic=(values - target).square().mean(1).sum(),
        ).log(weight=weight.mean(), q=values.mean())

    def after_step(self, module: Module) -> None:
        """Move the target critics."""
        of_kind(module, CriticModule).follower.follow(self.config.tau)
