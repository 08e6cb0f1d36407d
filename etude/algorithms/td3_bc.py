# SPDX-License-Identifier: Apache-2.0
"""TD3+BC (Fujimoto & Gu 2021, "A minimalist approach to offline reinforcement learning", arXiv 2106.06860)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from etude.algorithms.config import NO_STD, NO_VALUE, SINGLE_STEPS, ActorCriticRates, ModuleLike, OfflineConfig
from etude.algorithms.critics import (
    TRANSITION,
    CriticModule,
    check_box,
    looking_ahead,
    not_recurrent,
    of_kind,
    target_of,
)
from etude.algorithms.offline import OfflineAlgorithm
from etude.learners import Batch, Loss, Schedule
from etude.modules import Module, Network, NetworkConfig, make_module
from etude.modules.critics import TargetNetwork, frozen_copy
from etude.modules.distributions import SquashedGaussian
from etude.settings import settings
from etude.spaces import Space

_LOG_STD = math.log(0.1)
"""Of the noise where it explores: Fujimoto et al. 2018."""


@settings
class TD3BCConfig(OfflineConfig, ActorCriticRates):
    """Settings of TD3+BC. The recording needs rewards, and what was observed after each step.

    The paper also normalises observations: ``connectors=("normalize_obs",)``.
    """

    alpha: float = 2.5
    """Weight of what the critic says against the squared distance to the recorded actions, at least 0: 0 imitates, more
    trusts the critic more. Critics are divided by their mean magnitude, so that the scale of rewards does not matter.
    Default: Fujimoto & Gu 2021."""

    policy_delay: int = 2
    """Gradient steps of the critics for each of the policy and of all targets, at least 1. Default: Fujimoto et al.
    2018."""

    target_noise: float = 0.2
    """Standard deviation of the noise on the target policy's actions, at least 0, with actions scaled to [-1, 1].
    Default: Fujimoto et al. 2018."""

    target_noise_clip: float = 0.5
    """The most that this noise moves an action, at least 0. Default: Fujimoto et al. 2018."""

    gamma: float = 0.99
    """Discount of future rewards, 0 to 1. Default: Fujimoto & Gu 2021."""

    n_step: int = 1
    """Rewards that a target sums, as they were recorded, before a value stands for the rest, at least 1: more carry
    rewards back faster, but are of those who acted. Default: as in the paper."""

    tau: float = 0.005
    """How far targets move at a time, above 0, at most 1. Default: Fujimoto & Gu 2021."""

    lr: Schedule = 3e-4
    """Learning rate of Adam, or a schedule of it. Default: Fujimoto & Gu 2021."""

    grad_clip: float | None = None
    """Limit that gradients are clipped to, see `grad_clip_by`; None leaves them as they are, as in Fujimoto & Gu."""

    batch_size: int = 256
    """Steps in a gradient step, at least 1. Default: Fujimoto & Gu 2021."""

    updates_per_iteration: int = 1000
    """Gradient steps between two results, at least 1."""

    squash: bool = True
    """Hold actions inside their bounds by tanh; it can't be left out here."""

    network: NetworkConfig = NetworkConfig(hidden=(256, 256), activation="relu")
    """The shape of policy and critics. Default: Fujimoto & Gu 2021."""

    unused: ClassVar[Mapping[str, str]] = NO_STD | NO_VALUE | SINGLE_STEPS

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(
            alpha=(self.alpha >= 0, "at least 0"),
            policy_delay=(self.policy_delay >= 1, "at least 1"),
            target_noise=(self.target_noise >= 0, "at least 0"),
            target_noise_clip=(self.target_noise_clip >= 0, "at least 0"),
            gamma=(0 <= self.gamma <= 1, "between 0 and 1"),
            n_step=(self.n_step >= 1, "at least 1"),
            tau=(0 < self.tau <= 1, "above 0 and at most 1"),
            squash=(self.squash, "true: the policy is a tanh"),
        )


class DeterministicModule(CriticModule):
    """What TD3 learns (Fujimoto et al. 2018, "Addressing function approximation error in actor-critic methods").

    The policy is tanh of the means that the net gives, scaled to the bounds. The logarithms of standard deviations
    beside them are of the noise before tanh that it acts with where it explores; they are not learned.

    Args:
        net: The policy: ``dist_inputs`` are means, then log standard deviations.
        obs_space: What it sees.
        action_space: A Box with finite bounds.
        dist: Of the actions.
        config: The shape of the critics.

    Attributes:
        is_policy_due: Whether the next gradient step is one of the policy, too.
    """

    dist: SquashedGaussian

    def __init__(
        self, net: nn.Module, obs_space: Space, action_space: Space, dist: SquashedGaussian, config: NetworkConfig
    ) -> None:
        super().__init__(net, obs_space, action_space, dist, config)
        self.target = Module(frozen_copy(net), obs_space, action_space, dist)
        self.target.eval()
        self._policy_follower = TargetNetwork(self.target.net, net)
        self.is_policy_due = False
        self._steps: Tensor
        self.register_buffer("_steps", torch.zeros((), dtype=torch.int64))

    def action(self, obs: Any) -> Tensor:
        """``[B, action_size]``: the policy's actions, in [-1, 1]."""
        return _mode(self(obs).bound()[1])

    def target_action(self, obs: Any) -> Tensor:
        """The same by the target policy."""
        return _mode(self.target(obs).bound()[1])

    def follow(self, tau: float) -> None:
        """Move the targets of critics and policy."""
        self.follower.follow(tau)
        self._policy_follower.follow(tau)

    def count_step(self, delay: int) -> None:
        """Note that a gradient step was made; the policy is due in every ``delay``-th."""
        self._steps += 1
        self.update_due(delay)

    def update_due(self, delay: int) -> None:
        """Look anew whether the policy is due, as after weights were loaded: the count of steps is one of them."""
        self.is_policy_due = (int(self._steps) + 1) % delay == 0


def _mode(inputs: Tensor) -> Tensor:
    return torch.tanh(inputs.chunk(2, -1)[0])


class TD3BC(OfflineAlgorithm[TD3BCConfig]):
    """Twin delayed critics with a deterministic policy that stays near the recorded actions; for Box actions.

    Where it explores (recording, `evaluate(explore=True)`), it adds normal noise of 0.1 before the tanh.
    """

    name = "td3_bc"
    Config = TD3BCConfig
    columns = TRANSITION

    def learner_connectors(self) -> list[Any]:
        """What sums the rewards of `n_step` steps, where these are several."""
        return looking_ahead(self.config.n_step, self.config.gamma)

    def make_module(self, given: ModuleLike | None, obs_space: Space, action_space: Space) -> Module:
        """A policy with its target, critics with theirs; see `DeterministicModule`."""
        check_box(action_space, "TD3+BC", "IQL, which learns any actions, or CQL or DQN for Discrete ones")
        network = dataclasses.replace(self.config.network, log_std_init=_LOG_STD, state_dependent_std=False)
        made = make_module(given, obs_space, action_space, network, squash=True, value=False)
        not_recurrent(made, self.name)
        if isinstance(made, DeterministicModule):
            return made
        assert isinstance(made.dist, SquashedGaussian)
        if isinstance(made.net, Network) and made.net.log_std is not None:
            made.net.log_std.requires_grad_(False)
        module = DeterministicModule(made.net, obs_space, action_space, made.dist, network)
        module.update_due(self.config.policy_delay)
        return module

    def parameter_groups(self, module: Module) -> Mapping[str, Sequence[nn.Parameter]]:
        """Optimizers ``actor`` and ``critic``."""
        net = of_kind(module, DeterministicModule)
        return {
            "actor": [p for p in net.net.parameters() if p.requires_grad],
            "critic": [p for p in net.critic.parameters() if p.requires_grad],
        }

    def loss(self, module: Module, batch: Batch) -> Loss:
        """Critics: Fujimoto et al. 2018, algorithm 1; every `policy_delay` steps the policy: Fujimoto & Gu 2021, eq. 5.

        The policy's gradient does not reach the critics.
        """
        config, net = self.config, of_kind(module, DeterministicModule)
        obs, action = net.columns_of(batch.obs), net.encoded(batch.action)
        with torch.no_grad():
            following = net.target_action(batch.next_obs)
            noise = torch.randn_like(following) * config.target_noise
            following = following + noise.clamp(-config.target_noise_clip, config.target_noise_clip)
            after = net.target_critic(net.columns_of(batch.next_obs), following.clamp(-1.0, 1.0)).amin(0)
            target = target_of(batch, config.gamma, after)
        values = net.critic(obs, action)
        critic = (values - target).square().mean(1).sum()
        if not net.is_policy_due:
            return Loss(critic=critic).log(q=values.mean()).rest("actor")
        chosen = net.action(batch.obs)
        worth = net.critic(obs, chosen, frozen=True, first_only=True)
        scale = config.alpha / worth.detach().abs().mean()
        distance = (chosen - action).square().mean()
        return Loss(critic=critic, actor=distance - scale * worth.mean()).log(q=values.mean(), distance=distance)

    def after_step(self, module: Module) -> None:
        """Moves the targets where the policy was moved, and counts."""
        net = of_kind(module, DeterministicModule)
        if net.is_policy_due:
            net.follow(self.config.tau)
        net.count_step(self.config.policy_delay)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `get_state`."""
        super().set_state(state)
        for name, policy in self.policies.items():
            with self.settings_of(name):
                of_kind(policy.module, DeterministicModule).update_due(self.config.policy_delay)
