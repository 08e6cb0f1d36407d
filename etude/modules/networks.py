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

    state_dependent_std: bool = False
    """The standard deviations of Box actions are outputs of the net, rather than parameters of their own."""

    conv: tuple[tuple[int, int, int], ...] | None = None
    """Convolutions for images, each (channels, kernel size, stride); None: Mnih et al. 2015 (DQN), or two small ones
    where a side has fewer than 36 pixels."""

    conv_width: int = 512
    """Numbers that an image is encoded in, at least 1. Default: Mnih et al. 2015 (DQN)."""

    recurrent: Literal["lstm", "gru"] | None = None
    """Memory behind the layers, for envs that do not show all at once. Policy and value function then share layers and
    memory, whatever `separate` says."""

    recurrent_size: int = 64
    """Numbers that the memory holds (an LSTM holds them twice), at least 1. Default: as wide as a layer."""

    def __post_init__(self) -> None:
        if any(width < 1 for width in self.hidden):
            raise SettingsError(f"`hidden` is {self.hidden}: each width must be at least 1.")
        if self.conv_width < 1:
            raise SettingsError(f"`conv_width` is {self.conv_width}: it must be at least 1.")
        if self.recurrent_size < 1:
            raise SettingsError(f"`recurrent_size` is {self.recurrent_size}: it must be at least 1.")


class Trunk(nn.Module):
    """An encoder and the fully connected layers on top of it."""

    def __init__(self, obs_space: Space, config: NetworkConfig) -> None:
        super().__init__()
        self.encoder = Encoder(obs_space, config.conv, config.conv_width)
        self.linears = nn.ModuleList()
        self.activation = ACTIVATIONS[config.activation].torch()
        self.width = self.encoder.width
        for width in config.hidden:
            layer = nn.Linear(self.width, width)
            orthogonal(layer, 1.0 if config.activation == "linear" else math.sqrt(2))
            self.linears.append(layer)
            self.width = width

    def forward(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Columns of an observation to ``[..., width]``."""
        x: Tensor = self.encoder(columns)
        for layer in self.linears:
            assert isinstance(layer, nn.Linear)
            x = self.activation(F.linear(x, layer.weight, layer.bias))  # calling the layer costs as much again
        return x


class Network(nn.Module):
    """Policy and value function for any spaces that Etude handles.

    Weights are orthogonal: gain sqrt(2) in hidden layers, 0.01 in the policy's head and 1 in the value's and in the
    memory; biases are zero (Huang et al. 2022, "The 37 implementation details of PPO").

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
        self.memory: Memory | None = None
        if config.recurrent is not None:
            self.memory = Memory(self.policy.width, config.recurrent, config.recurrent_size)
        self._make_head(dist, config)
        self.critic = Trunk(obs_space, config) if value and config.separate and self.memory is None else None
        self.value_head: nn.Linear | None = None
        if value:
            self.value_head = nn.Linear((self.critic or self.memory or self.policy).width, 1)
            orthogonal(self.value_head, 1.0)

    def initial_state(self) -> dict[str, Tensor]:
        """What the memory of one row holds at the start of an episode: zeros; {} where there is none."""
        return {} if self.memory is None else self.memory.initial_state()

    def _make_head(self, dist: Distribution, config: NetworkConfig) -> None:
        own_std = len(dist.log_std) > 0 and not config.state_dependent_std
        outputs = dist.num_inputs - (len(dist.log_std) if own_std else 0)
        self.policy_head = nn.Linear((self.memory or self.policy).width, outputs)
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

    def forward(self, obs: Any, state: dict[str, Tensor] | None = None) -> Output:
        """Tensors nested as in the observation space, each ``[..., *shape]``, to ``dist_inputs`` and ``value``.

        Where there is a memory, they are ``[B, T, *shape]``, and ``state`` is that before the first of T steps.
        """
        columns = self._flatten(obs)
        hidden = self.policy(columns)
        after = None
        if self.memory is not None:
            hidden, after = self.memory(hidden, state)
        inputs: Tensor = self.policy_head(hidden)
        if self.log_std is not None:
            inputs = torch.cat([inputs, self.log_std.expand(*inputs.shape[:-1], -1)], -1)
            if self.order is not None:
                inputs = inputs.index_select(-1, self.order)
        if self.value_head is None:
            return Output(inputs, state=after)
        value = self.value_head(hidden if self.critic is None else self.critic(columns)).squeeze(-1)
        return Output(inputs, value, after)
