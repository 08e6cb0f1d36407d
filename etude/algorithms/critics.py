# SPDX-License-Identifier: Apache-2.0
"""What algorithms with critics share: the columns of steps that they need, the targets of critics, their modules."""

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
from etude.spaces import Space

M = TypeVar("M", bound=Module)

TRANSITION = (col.OBS, col.ACTION, col.REWARD, col.NEXT_OBS, col.TERMINATED)
"""The columns of single steps that critics learn from."""


def of_kind(module: Module, kind: type[M]) -> M:
    """The module, known to be of the kind that an algorithm needs.

    Raises:
        ModuleError: it is of another.
    """
    if not isinstance(module, kind):
        raise ModuleError(f"{type(module).__name__} is no {kind.__name__}: let make_module() give one.")
    return module


def check_box(
    action_space: Space,
    name: str = "SAC",
    others: str = "DQN or PPO for Discrete actions, PPO for others",
) -> None:
    """Raise a SettingsError where actions are no Box of floats, which algorithm ``name`` needs; ``others`` do not."""
    if not (isinstance(action_space, spaces.Box) and np.dtype(action_space.dtype).kind == "f"):
        raise SettingsError(
            f"the action space is {action_space}, but {name} draws the actions of a Box of floats only. Take {others}."
        )


def not_recurrent(module: Module, name: str) -> Module:
    """The module.

    Raises:
        SettingsError: it is recurrent, which critics of single steps can't be.
    """
    if module.recurrent:
        raise SettingsError(
            f"{type(module.net).__name__} is recurrent, but {name} learns from single steps, which have no order in "
            "time: take a network without a memory, or BC."
        )
    return module


def check_memories(policy: Module, config: NetworkConfig, name: str) -> None:
    """Raise a SettingsError where only one of the policy and the critics, which ``config`` shapes, has a memory."""
    if policy.recurrent != (config.recurrent is not None):
        has, lacks = ("policy", "critics") if policy.recurrent else ("critics", "policy")
        raise SettingsError(
            f"the {has} of {name} would have a memory, and the {lacks} none: give a `module` that is recurrent and "
            "set `network.recurrent`, which the critics are made by, or neither."
        )


def draw_by_gate(net: nn.Module) -> None:
    """Initialise each gate of a built-in network's recurrent layers by itself; see `RecurrentLayer.draw_by_gate`."""
    for part in net.modules():
        if isinstance(part, RecurrentLayer):
            part.draw_by_gate()


def looking_ahead(n_step: int, gamma: float) -> list[Connector]:
    """The connectors of the learner that sum ``n_step`` rewards; none for one."""
    return [NStep(n_step, gamma)] if n_step > 1 else []


def target_of(batch: Batch, gamma: float, value: Tensor) -> Tensor:
    """``[B]``: reward + gamma * ``value`` ``[B]`` of what was observed next; none where it terminated.

    Where `NStep` has looked ahead, the reward is a sum, and ``discount`` stands for gamma.
    """
    if "discount" in batch:
        return torch.addcmul(batch.reward, batch.discount, value)
    return torch.add(batch.reward, torch.where(batch[col.TERMINATED], 0.0, value), alpha=gamma)


class CriticModule(TargetedModule):
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
        self.follower = TargetNetwork(self.target_critic, self.critic)

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
