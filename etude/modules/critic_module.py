# SPDX-License-Identifier: Apache-2.0
"""CriticModule: a policy over any actions with twin critics and their targets."""

from typing import Any

from torch import Tensor, nn

from etude.columns import OBS
from etude.errors import ModuleError
from etude.modules.action_encoder import ActionEncoder
from etude.modules.distributions import Distribution
from etude.modules.module import Module
from etude.modules.networks import Network, NetworkConfig
from etude.modules.targets import Follower, frozen_copy
from etude.modules.twin_critic import TwinCritic
from etude.spaces import Flattener, Space


class CriticModule(Module):
    """A policy, and perhaps values of observations, with twin critics of its actions and the critics' targets.

    Args:
        net: The policy, and what gives `values`.
        obs_space: What it sees.
        action_space: What it chooses from; any.
        dist: Of the actions.
        config: The shape of the critics.
    """

    def __init__(
        self, net: nn.Module, obs_space: Space, action_space: Space, dist: Distribution, config: NetworkConfig
    ) -> None:
        super().__init__(net, obs_space, action_space, dist)
        self.encoded = ActionEncoder(action_space)
        """Actions ``[B, width]`` as critics see them."""
        self.critic = TwinCritic(obs_space, self.encoded.width, config)
        self.target_critic = frozen_copy(self.critic)
        self.follower = Follower(self.target_critic, self.critic)
        self._columns_of = Flattener(obs_space, OBS)

    def columns_of(self, obs: Any) -> dict[str, Tensor]:
        """The columns of nested observations."""
        columns: dict[str, Tensor] = self._columns_of(obs)
        return columns

    def values(self, obs: Any) -> Tensor:
        """``[B]``: what observations are worth; the built-in net does not compute its policy for it.

        Raises:
            ModuleError: the net gives no values.
        """
        net = self.net
        if type(net) is Network and net.critic is not None and net.value_head is not None:
            value: Tensor = net.value_head(net.critic(self.columns_of(obs))[0]).squeeze(-1)
            return value
        given = self(obs).value
        if given is None:
            raise ModuleError(
                f"{type(net).__name__} gives no values, which are learned here: return Output(value=...) from its "
                "forward."
            )
        return given  # type: ignore[no-any-return]
