# SPDX-License-Identifier: Apache-2.0
"""Critics: twin action-value functions, encoders of their actions, and target networks."""

import copy
import itertools
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Self, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from etude.columns import ACTION
from etude.modules.distributions import Distribution
from etude.modules.module import Module
from etude.modules.network import (
    ACTIVATIONS,
    ColumnEncoder,
    Network,
    NetworkConfig,
    Numbers,
    ObsEncoder,
    OneHot,
    RecurrentLayer,
)
from etude.spaces import Flattener, Space, leaves

M = TypeVar("M", bound=nn.Module)


def frozen_copy(module: M) -> M:
    """A copy of a module in evaluation mode, whose parameters need no gradients."""
    copied = copy.deepcopy(module).requires_grad_(False)
    copied.eval()
    return copied


_averaging: Callable[[float], Callable[[list[Tensor], list[Tensor], None], None]] = cache(get_ema_multi_avg_fn)
"""For a decay, the function that sets targets to decay * targets + (1 - decay) * sources."""


class TargetNetwork:
    """Moves a `frozen_copy` towards its source.

    Args:
        target: The copy.
        source: The module it was copied from.
    """

    def __init__(self, target: nn.Module, source: nn.Module) -> None:
        # looked up once: parameters stay the same objects even if their memory moves
        self._targets: list[torch.Tensor] = list(target.parameters())
        self._sources: list[torch.Tensor] = list(source.parameters())
        # buffers are replaced when a module moves to another device, so they are looked up each time
        self._owners = [
            (own, other)
            for own, other in zip(target.modules(), source.modules(), strict=True)
            if any(True for _ in own.buffers(recurse=False))
        ]

    @torch.no_grad()
    def follow(self, tau: float) -> None:
        """Set target = (1 - tau) target + tau source for parameters, and copy buffers. With tau = 1, both are equal."""
        if self._targets:
            _averaging(1.0 - tau)(self._targets, self._sources, None)
        for own, other in self._owners:
            for target, source in zip(own.buffers(recurse=False), other.buffers(recurse=False), strict=True):
                target.copy_(source)


class TargetedModule(Module):
    """A module with target networks: frozen copies that stay in evaluation mode."""

    follower: TargetNetwork
    """Updates the target networks."""

    def train(self, mode: bool = True) -> Self:
        """Set the mode of a user's network only: the built-in one is the same in both modes."""
        self.training = mode
        if type(self.net) is not Network:  # visiting its parts, twice per round, costs as much as an env step
            self.net.train(mode)
        return self


class FollowedModule(TargetedModule):
    """A network and its target network: a frozen copy of the whole network, which ``follower`` updates.

    Args:
        net: The network, recurrent or not; see `Module`.
        obs_space: The space of its observations.
        action_space: The space of its actions.
        dist: The distribution that its ``dist_inputs`` parameterise.
    """

    def __init__(self, net: nn.Module, obs_space: Space, action_space: Space, dist: Distribution) -> None:
        super().__init__(net, obs_space, action_space, dist)
        self.target = Module(frozen_copy(net), obs_space, action_space, dist)
        self.target.eval()
        self.follower = TargetNetwork(self.target.net, net)
        self.seen_updates: int | None = None
        """The learner's `updates` at the last gradient step that was not skipped; None: there was none yet in this
        process."""


class Scaled(nn.Module):
    """Flattens a Box. Numbers are clipped to their bounds, as the env clips them, and scaled to [-1, 1] if both are
    finite.

    Args:
        space: A Box of floats.
    """

    def __init__(self, space: spaces.Box) -> None:
        super().__init__()
        low, high = space.low.reshape(-1).astype(np.float64), space.high.reshape(-1).astype(np.float64)
        bounded = np.isfinite(low) & np.isfinite(high) & (low < high)
        self._shape = space.shape
        self.width = len(low)
        self.middle: Tensor
        self.scale: Tensor
        self.least: Tensor
        self.most: Tensor
        with np.errstate(invalid="ignore"):  # of infinite bounds
            numbers = {
                "middle": np.where(bounded, (low + high) / 2, 0.0),
                "scale": np.where(bounded, (high - low) / 2, 1.0),
                "least": np.where(bounded, -1.0, np.where(low < high, low, -np.inf)),
                "most": np.where(bounded, 1.0, np.where(low < high, high, np.inf)),
            }
        for name, values in numbers.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., *shape]`` to ``[..., width]``."""
        flat = x.reshape(*x.shape[: x.dim() - len(self._shape)], self.width).float()
        return ((flat - self.middle) / self.scale).clamp(self.least, self.most)


class ActionEncoder(ColumnEncoder):
    """Encodes all leaves of an action as one vector: Boxes of floats scaled by their bounds, choices one-hot.

    Args:
        space: An action space that `distribution_for` supports.
    """

    def __init__(self, space: Space) -> None:
        super().__init__({name: _encoder_of(leaf) for name, leaf in leaves(space, ACTION).items()})
        self._columns_of = Flattener(space, ACTION)

    def forward(self, action: Any) -> Tensor:
        """Encode actions, nested as in the space, tensors ``[..., *shape]``, as ``[..., width]``."""
        return super().forward(self._columns_of(action))


def _encoder_of(leaf: Space) -> Scaled | OneHot | Numbers:
    if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete):
        return OneHot(leaf)
    return Scaled(leaf) if isinstance(leaf, spaces.Box) else Numbers(leaf)


NUM_CRITICS = 2
_CHUNK = 2048
"""Rows per chunk of a large batch: the results between layers stay in the cache, which is twice as fast."""


class TwinCritic(nn.Module):
    """Two functions Q(observation, action), for the clipped double-Q of Fujimoto et al. 2018, "Addressing function
    approximation error in actor-critic methods".

    The layers of both are stacked, so that each is one batched product. Weights are initialised as in
    ``torch.nn.Linear``, separately for each critic. Each critic has its own image encoder. If the network is
    ``recurrent``, the recurrent layer follows the encoder; both critics share it, but with images each has its own.

    Args:
        obs_space: The space of the observations.
        action_size: Size of an encoded action.
        config: The shape: ``hidden``, ``activation``, and the settings of convolutions and recurrent layers.
    """

    def __init__(self, obs_space: Space, action_size: int, config: NetworkConfig) -> None:
        super().__init__()
        first = ObsEncoder(obs_space, config.conv, config.conv_width)
        others = 0 if first.vector else NUM_CRITICS - 1  # without images, the encoder has no parameters
        more = [ObsEncoder(obs_space, config.conv, config.conv_width) for _ in range(others)]
        self.encoders = nn.ModuleList([first, *more])
        self.memories = nn.ModuleList()
        width = first.width
        if config.recurrent is not None:
            kind, width = config.recurrent, config.recurrent_size
            for encoder in (first, *more):
                memory = RecurrentLayer(encoder.width, kind, width)
                memory.draw_by_gate()
                self.memories.append(memory)
        self.activation = ACTIVATIONS[config.activation].torch()
        if isinstance(self.activation, nn.ReLU):
            self.activation.inplace = True  # saves a tenth of the forward's time
        self._width = width
        widths = [width + action_size, *config.hidden, 1]
        self._num_layers = len(widths) - 1
        for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            limit = 1.0 / math.sqrt(inputs)
            weight, bias = torch.empty(NUM_CRITICS, inputs, outputs), torch.empty(NUM_CRITICS, 1, outputs)
            self.register_parameter(f"weight_{i}", nn.Parameter(weight.uniform_(-limit, limit)))
            self.register_parameter(f"bias_{i}", nn.Parameter(bias.uniform_(-limit, limit)))

    def forward(self, obs: Mapping[str, Tensor], action: Tensor, *, frozen: bool = False) -> Tensor:
        """The value of each critic, ``[2, B]``.

        Args:
            obs: Columns of observations, each ``[B, *shape]``.
            action: ``[B, action_size]``.
            frozen: Let gradients flow only to ``action``.
        """
        return self.values(self.encode(obs)[0], action, frozen=frozen)

    def initial_state(self) -> dict[str, Tensor]:
        """The state of the recurrent layers at the start of an episode: zeros; {} without such layers."""
        states: dict[str, Tensor] = {}
        for i, memory in enumerate(self.memories):
            assert isinstance(memory, RecurrentLayer)
            states |= {f"{i}_{name}": zeros for name, zeros in memory.initial_state().items()}
        return states

    def encode(
        self, obs: Mapping[str, Tensor], state: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The encoded observations, ``[..., width]``, and the recurrent state after them.

        Args:
            obs: Columns of observations, each ``[B, *shape]``; with recurrent layers ``[B, T, *shape]``.
            state: The recurrent state before them.
        """
        parts: list[Tensor] = []
        after: dict[str, Tensor] = {}
        for i, encoder in enumerate(self.encoders):
            x = encoder(obs)
            if self.memories:
                memory = self.memories[i]
                assert isinstance(memory, RecurrentLayer)
                x, last = memory(x, state and {name: state[f"{i}_{name}"] for name in memory.names})
                after |= {f"{i}_{name}": part for name, part in last.items()}
            parts.append(x)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1), after

    def values(self, encoded: Tensor, action: Tensor, *, frozen: bool = False, first_only: bool = False) -> Tensor:
        """Like `forward`, for observations encoded by `encode`, ``[B, width]``; with ``first_only``, by the first
        critic only: ``[1, B]``."""
        num = 1 if first_only else NUM_CRITICS
        if frozen:
            encoded = encoded.detach()
        inputs = [torch.cat((part, action), -1) for part in torch.split(encoded, self._width, -1)[:num]]
        x = inputs[0].expand(num, -1, -1) if len(inputs) == 1 else torch.stack(inputs)
        return self._values(x, frozen)

    def many(self, obs: Mapping[str, Tensor], actions: Tensor) -> Tensor:
        """The value of each critic for n actions per observation, which is encoded once: ``[2, B, n]``.

        Args:
            obs: Columns of observations, each ``[B, *shape]``.
            actions: ``[B, n, action_size]``; or ``[2, B, n, action_size]``, with different ones for each critic.
        """
        n = actions.shape[-2]
        encoded = [encoder(obs) for encoder in self.encoders]
        states = encoded[0] if len(encoded) == 1 else torch.stack(encoded)
        lead = (NUM_CRITICS,) if states.dim() > 2 or actions.dim() > 3 else ()
        rows = max(1, _CHUNK // n)
        values = []
        for state, action in zip(torch.split(states, rows, -2), torch.split(actions, rows, -3), strict=True):
            size = (*lead, state.shape[-2], n, -1)
            x = torch.cat((state.unsqueeze(-2).expand(size), action.expand(size)), -1)
            x = x.flatten(-3, -2).expand(NUM_CRITICS, -1, -1)
            values.append(self._values(x, frozen=False).reshape(NUM_CRITICS, -1, n))
        return torch.cat(values, 1) if len(values) > 1 else values[0]

    def _values(self, x: Tensor, frozen: bool) -> Tensor:
        num = len(x)
        for i in range(self._num_layers):
            weight, bias = getattr(self, f"weight_{i}"), getattr(self, f"bias_{i}")
            if frozen:
                weight, bias = weight.detach(), bias.detach()
            if num < NUM_CRITICS:
                weight, bias = weight[:num], bias[:num]
            x = torch.bmm(x, weight).add_(bias)
            if i + 1 < self._num_layers:
                x = self.activation(x)
        return x.squeeze(-1).float()
