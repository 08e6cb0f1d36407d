# SPDX-License-Identifier: Apache-2.0
"""The built-in network: encoders, then fully connected layers, for every space."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from etude.columns import OBS
from etude.errors import SettingsError
from etude.modules.activations import ACTIVATIONS
from etude.modules.distributions import Distribution, distribution_for
from etude.modules.encoders import Encoder, orthogonal
from etude.modules.memory import Memory
from etude.modules.output import Output
from etude.settings import settings
from etude.spaces import Flattener, Space

State = dict[str, Tensor]
"""The state of a memory by name, ``[B, width]`` each."""

OF_VALUE = "value_"
"""Prefix of the names of the state of the value function's own memory."""


@settings
class NetworkConfig:
    """Shape of the built-in network."""

    hidden: tuple[int, ...] = (64, 64)
    """Widths of the fully connected layers, each at least 1; none: a linear map. Default: Schulman et al. 2017."""

    activation: Literal["tanh", "relu", "silu", "gelu", "elu", "linear"] = "tanh"
    """What follows each of these layers; gelu in its tanh form. Default: Schulman et al. 2017 (PPO)."""

    separate: bool = True
    """Policy and value function share no layers. Default: Huang et al. 2022, detail 13 of 37."""

    log_std_init: float = 0.0
    """Logarithm of the standard deviations of Box actions at the start. Default: Huang et al. 2022."""

    state_dependent_std: bool | None = None
    """The standard deviations of Box actions are outputs of the net, rather than parameters of their own. None: as the
    algorithm has them; with all but SAC and CQL, they are parameters."""

    conv: tuple[tuple[int, int, int], ...] | None = None
    """Convolutions for images, each (channels, kernel size, stride); None: Mnih et al. 2015 (DQN), or two small ones
    where a side has fewer than 36 pixels."""

    conv_width: int = 512
    """Numbers that an image is encoded in, at least 1. Default: Mnih et al. 2015 (DQN)."""

    recurrent: Literal["lstm", "gru"] | None = None
    """A memory between the encoder and the `hidden` layers, for envs whose observations do not show everything. With
    `separate`, policy and value function have a memory each."""

    recurrent_size: int = 64
    """Width of each memory, at least 1; an LSTM's state is twice as wide."""

    def __post_init__(self) -> None:
        if any(width < 1 for width in self.hidden):
            raise SettingsError(f"`hidden` is {self.hidden}: each width must be at least 1.")
        if self.conv_width < 1:
            raise SettingsError(f"`conv_width` is {self.conv_width}: it must be at least 1.")
        if self.recurrent_size < 1:
            raise SettingsError(f"`recurrent_size` is {self.recurrent_size}: it must be at least 1.")


class Trunk(nn.Module):
    """An encoder, a memory where the config asks for one, and fully connected layers."""

    def __init__(self, obs_space: Space, config: NetworkConfig) -> None:
        super().__init__()
        self.encoder = Encoder(obs_space, config.conv, config.conv_width)
        self.memory: Memory | None = None
        self.linears = nn.ModuleList()
        self.activation = ACTIVATIONS[config.activation].torch()
        self.width = self.encoder.width
        if config.recurrent is not None:
            self.memory = Memory(self.width, config.recurrent, config.recurrent_size)
            self.width = config.recurrent_size
        for width in config.hidden:
            layer = nn.Linear(self.width, width)
            orthogonal(layer, 1.0 if config.activation == "linear" else math.sqrt(2))
            self.linears.append(layer)
            self.width = width

    def forward(self, columns: Mapping[str, Tensor], state: State | None = None) -> tuple[Tensor, State]:
        """Columns of observations to ``[..., width]``, and the memory's state after them; {} without a memory."""
        x: Tensor = self.encoder(columns)
        after: State = {}
        if self.memory is not None:
            x, after = self.memory(x, state)
        for layer in self.linears:
            assert isinstance(layer, nn.Linear)
            x = self.activation(F.linear(x, layer.weight, layer.bias))  # calling the layer costs as much again
        return x, after


class Network(nn.Module):
    """Policy and value function for any spaces that Etude handles.

    Weights are orthogonal: gain sqrt(2) in hidden layers, 0.01 in the policy's head and 1 in the value's; biases are
    zero (Huang et al. 2022, "The 37 implementation details of PPO").

    Args:
        obs_space: Boxes, MultiBinary, Discrete and MultiDiscrete (one-hot), and Dict and Tuple of them.
        action_space: What `distribution_for` handles.
        config: The shape.
        dist: The distribution over the actions; the one that `distribution_for` gives where None.
        value: Whether there is a value function.
    """

    def __init__(
        self,
        obs_space: Space,
        action_space: Space,
        config: NetworkConfig | None = None,
        dist: Distribution | None = None,
        value: bool = True,
    ) -> None:
        super().__init__()
        config = config or NetworkConfig()
        dist = dist or distribution_for(action_space)
        self.activation = config.activation
        self._flatten = Flattener(obs_space, OBS)
        self.policy = Trunk(obs_space, config)
        self._make_head(dist, config)
        self.critic = Trunk(obs_space, config) if value and config.separate else None
        self.value_head: nn.Linear | None = None
        if value:
            self.value_head = nn.Linear((self.critic or self.policy).width, 1)
            orthogonal(self.value_head, 1.0)

    def initial_state(self) -> State:
        """The state of one row at the start of an episode: zeros; {} without a memory."""
        state = {} if self.policy.memory is None else self.policy.memory.initial_state()
        if self.critic is not None:
            state |= {OF_VALUE + name: zeros for name, zeros in state.items()}
        return state

    def _make_head(self, dist: Distribution, config: NetworkConfig) -> None:
        own_std = len(dist.log_std) > 0 and not config.state_dependent_std
        outputs = dist.num_inputs - (len(dist.log_std) if own_std else 0)
        self.policy_head = nn.Linear(self.policy.width, outputs)
        orthogonal(self.policy_head, 0.01)
        self.log_std: nn.Parameter | None = None
        self.order: Tensor | None
        self.register_buffer("order", None, persistent=False)
        if own_std:
            self.log_std = nn.Parameter(torch.full((len(dist.log_std),), config.log_std_init))
            others = np.setdiff1d(np.arange(dist.num_inputs), dist.log_std)
            order = np.argsort(np.concatenate([others, dist.log_std]))
            if (order != np.arange(dist.num_inputs)).any():
                self.order = torch.from_numpy(order)
        elif len(dist.log_std):
            with torch.no_grad():
                self.policy_head.bias[torch.from_numpy(dist.log_std)] = config.log_std_init

    def forward(self, obs: Any, state: State | None = None) -> Output:
        """Tensors nested as in the observation space, each ``[..., *shape]``, to ``dist_inputs`` and ``value``.

        With a memory, they are ``[B, T, *shape]``, and ``state`` is the state before the first of the T steps.
        """
        columns = self._flatten(obs)
        hidden, after = self.policy(columns, state)
        inputs: Tensor = self.policy_head(hidden)
        if self.log_std is not None:
            inputs = torch.cat([inputs, self.log_std.expand(*inputs.shape[:-1], -1)], -1)
            if self.order is not None:
                inputs = inputs.index_select(-1, self.order)
        value = None
        if self.value_head is not None:
            if self.critic is not None:
                own = state and {name: state[OF_VALUE + name] for name in after}
                hidden, of_value = self.critic(columns, own)
                after |= {OF_VALUE + name: part for name, part in of_value.items()}
            value = self.value_head(hidden).squeeze(-1)
        return Output(inputs, value, after or None)
