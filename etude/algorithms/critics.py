# SPDX-License-Identifier: Apache-2.0
"""Shared parts of algorithms with critics: the columns they need, critic targets, their modules, checks."""

from typing import Any, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from etude import columns as col
from etude.connectors import Connector, NStep
from etude.errors import ModuleError, SettingsError
from etude.learners import Batch
from etude.modules import Module
from etude.modules.critics import ActionEncoder, TargetedModule, TargetNetwork, TwinCritic, frozen_copy
from etude.modules.distributions import Distribution
from etude.modules.network import Network, NetworkConfig, RecurrentLayer
from etude.spaces import Space, in_words

M = TypeVar("M", bound=Module)

TRANSITION = (col.OBS, col.ACTION, col.REWARD, col.NEXT_OBS, col.TERMINATED)
"""The columns of single steps from which critics learn."""


def of_kind(module: Module, kind: type[M]) -> M:
    """Return the module, which must be of the kind that an algorithm needs.

    Raises:
        ModuleError: it is of another kind.
    """
    if not isinstance(module, kind):
        raise ModuleError(f"{type(module).__name__} is no {kind.__name__}: let make_module() give one.")
    return module


def check_box(
    action_space: Space,
    name: str = "SAC",
    others: str = "DQN or PPO for Discrete actions, PPO for others",
) -> None:
    """Raise a SettingsError unless actions are a Box of floats, which algorithm ``name`` needs; it suggests
    ``others``."""
    if not (isinstance(action_space, spaces.Box) and np.dtype(action_space.dtype).kind == "f"):
        raise SettingsError(
            f"the action space is {in_words(action_space)}, but {name} draws the actions of a Box of floats only. "
            f"Take {others}."
        )


def not_recurrent(module: Module, name: str) -> Module:
    """Return the module.

    Raises:
        SettingsError: it is recurrent, which critics of single steps don't support.
    """
    if module.recurrent:
        raise SettingsError(
            f"{type(module.net).__name__} is recurrent, but {name} learns from single steps, which have no order in "
            "time: take a network without a memory, or BC."
        )
    return module


def check_memories(policy: Module, config: NetworkConfig, name: str) -> None:
    """Raise a SettingsError if only one of the policy and the critics, which ``config`` shapes, is recurrent."""
    if policy.recurrent != (config.recurrent is not None):
        has, lacks = ("policy", "critics") if policy.recurrent else ("critics", "policy")
        raise SettingsError(
            f"the {has} of {name} would have a memory, and the {lacks} none: give a `module` that is recurrent and "
            "set `network.recurrent`, which the critics are made by, or neither."
        )


def draw_by_gate(net: nn.Module) -> None:
    """Initialise each gate of a built-in network's recurrent layers separately; see `RecurrentLayer.draw_by_gate`."""
    for part in net.modules():
        if isinstance(part, RecurrentLayer):
            part.draw_by_gate()


def looking_ahead(n_step: int, gamma: float) -> list[Connector]:
    """The learner connectors that sum ``n_step`` rewards; none for 1."""
    return [NStep(n_step, gamma)] if n_step > 1 else []


def target_of(batch: Batch, gamma: float, value: Tensor) -> Tensor:
    """Bootstrapped targets: reward + gamma * ``value`` ``[B]`` of the next observation, or just the reward if
    terminated.

    If `NStep` has run, ``reward`` is a sum, and ``discount`` replaces gamma. Returns ``[B]``.
    """
    if "discount" in batch:
        return torch.addcmul(batch.reward, batch.discount, value)
    return torch.add(batch.reward, torch.where(batch[col.TERMINATED], 0.0, value), alpha=gamma)


class CriticModule(TargetedModule):
    """A policy, optionally with state values, with twin critics of its actions and target critics.

    Args:
        net: The network of the policy and of `values`.
        obs_space: The observation space.
        action_space: The action space, of any kind.
        dist: The action distribution.
        config: The shape of the critics.
    """

    def __init__(
        self, net: nn.Module, obs_space: Space, action_space: Space, dist: Distribution, config: NetworkConfig
    ) -> None:
        super().__init__(net, obs_space, action_space, dist)
        self.encoded = ActionEncoder(action_space)
        """Encodes actions as critics see them, ``[B, width]``."""
        self.critic = TwinCritic(obs_space, self.encoded.width, config)
        self.target_critic = frozen_copy(self.critic)
        self.follower = TargetNetwork(self.target_critic, self.critic)

    def values(self, obs: Any) -> Tensor:
        """The values of observations, ``[B]``; the built-in net skips its policy for this.

        Raises:
            ModuleError: the net returns no values.
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
