# SPDX-License-Identifier: Apache-2.0
"""QModule: a net whose outputs are the values of actions, with its target network."""

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from etude.columns import ACTION
from etude.errors import SettingsError
from etude.modules.distributions import FORBIDDEN
from etude.modules.distributions.epsilon_greedy import EpsilonGreedy
from etude.modules.module import Module
from etude.modules.networks import Network
from etude.modules.output import Output
from etude.modules.targets import Follower, frozen_copy
from etude.spaces import Space

_ALLOWED_ABOVE = FORBIDDEN / 2


class QModule(Module):
    """Acts epsilon-greedily on the values of a Discrete space's actions: the net's ``dist_inputs``.

    Where the net gives a ``value``, too, its ``dist_inputs`` are advantages: Q = value + advantage - mean(advantage)
    (the dueling network of Wang et al. 2016, "Dueling network architectures", eq. 9), which have the same best action.
    A frozen copy of the net, the target network, belongs to the module and so to its checkpoints.

    Args:
        net: Called with observations, returns an `Output`.
        obs_space: What the net sees.
        action_space: What it chooses from.

    Raises:
        SettingsError: the action space is not Discrete.
    """

    dist: EpsilonGreedy

    def __init__(self, net: nn.Module, obs_space: Space, action_space: Space) -> None:
        if not isinstance(action_space, spaces.Discrete):
            raise SettingsError(
                f"the action space is {action_space}, but values can be learned only of the actions of a Discrete "
                "space. Take SAC for Box actions, or PPO for any."
            )
        super().__init__(net, obs_space, action_space, EpsilonGreedy(action_space, ACTION))
        self.target = Module(frozen_copy(net), obs_space, action_space, self.dist)
        self.follower = Follower(self.target.net, net)

    def train(self, mode: bool = True) -> "QModule":
        """The target network stays in evaluation mode; the built-in net is the same in both."""
        self.training = mode
        if type(self.net) is not Network:  # to walk through it, twice a round, costs as much as an env step
            self.net.train(mode)
        return self

    def values(self, obs: Any) -> Tensor:
        """float32 ``[B, n]``: the value of each action; those that the action mask forbids are far below all others."""
        return action_values(self(obs))

    def target_values(self, obs: Any) -> Tensor:
        """The same by the target network."""
        return action_values(self.target(obs))

    def values_of(self, values: Tensor, action: Tensor) -> Tensor:
        """``[B]``: of ``values`` ``[B, n]``, those of the actions that were taken."""
        return values.gather(-1, self.dist.index_of(action).unsqueeze(-1)).squeeze(-1)

    def best_of(self, values: Tensor, by: Tensor | None = None) -> Tensor:
        """``[B]``: of ``values`` ``[B, n]`` the greatest, or that of the action which ``by`` ``[B, n]`` finds best.

        Where an action mask allows nothing, as it may after the last step of an episode, it is 0.
        """
        if by is None:
            best = values.amax(-1)
        else:
            best = values.gather(-1, by.argmax(-1, keepdim=True)).squeeze(-1)
        return best if self.mask is None else torch.where(best > _ALLOWED_ABOVE, best, 0.0)


def action_values(output: Output) -> Tensor:
    """``[B, n]``: the values of actions that a net's output says; see `QModule`."""
    _, advantages = output.bound()
    if output.value is None:
        return advantages
    allowed = advantages > _ALLOWED_ABOVE
    sums = torch.where(allowed, advantages, 0.0).sum(-1, keepdim=True)
    centred = output.value.unsqueeze(-1) + advantages - sums / allowed.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(allowed, centred, advantages)
