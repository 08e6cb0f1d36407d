# SPDX-License-Identifier: Apache-2.0
"""DeterministicModule: a policy over Box actions that is not drawn from, its target, and twin critics with theirs."""

from typing import Any

import torch
from torch import Tensor, nn

from etude.modules.critic_module import CriticModule
from etude.modules.distributions import SquashedGaussian
from etude.modules.module import Module
from etude.modules.networks import NetworkConfig
from etude.modules.targets import Follower, frozen_copy
from etude.spaces import Space


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
        self._policy_follower = Follower(self.target.net, net)
        self.is_policy_due = False
        self._steps: Tensor
        self.register_buffer("_steps", torch.zeros((), dtype=torch.int64))

    def train(self, mode: bool = True) -> "DeterministicModule":
        """The target network stays in evaluation mode."""
        super().train(mode)
        self.target.eval()
        return self

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
