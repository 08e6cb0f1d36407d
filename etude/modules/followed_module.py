# SPDX-License-Identifier: Apache-2.0
"""FollowedModule: any net, with a target network that follows it."""

from torch import nn

from etude.modules.distributions import Distribution
from etude.modules.module import Module
from etude.modules.targets import Follower, frozen_copy
from etude.spaces import Space


class FollowedModule(Module):
    """A net and its target network: a frozen copy of all of it, policy and values, moved by ``follower``.

    Args:
        net: Called with observations, returns an `Output`; recurrent or not.
        obs_space: What it sees.
        action_space: What it chooses from.
        dist: What its ``dist_inputs`` parameterise.
    """

    def __init__(self, net: nn.Module, obs_space: Space, action_space: Space, dist: Distribution) -> None:
        super().__init__(net, obs_space, action_space, dist)
        self.target = Module(frozen_copy(net), obs_space, action_space, dist)
        self.follower = Follower(self.target.net, net)

    def train(self, mode: bool = True) -> "FollowedModule":
        """The target network stays in evaluation mode."""
        super().train(mode)
        self.target.eval()
        return self
