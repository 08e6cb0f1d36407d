# SPDX-License-Identifier: Apache-2.0
"""Critics: two action-value functions side by side, actions as they see them, and target networks."""

import copy
import itertools
import math
from collections.abc import Mapping
from typing import Any, Self, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from etude.columns import ACTION
from etude.modules.distributions import Distribution
from etude.modules.module import Module
from etude.modules.network import ACTIVATIONS, Network, NetworkConfig, Numbers, ObsEncoder, OneHot, RecurrentLayer
from etude.spaces import Flattener, Space, leaves

M = TypeVar("M", bound=nn.Module)


def frozen_copy(module: M) -> M:
    """A copy of a module, in evaluation mode, whose parameters need no gradient: no optimizer is given them."""
    copied = copy.deepcopy(module).requires_grad_(False)
    copied.eval()
    return copied


class TargetNetwork:
    """Moves a `frozen_copy` towards what it was made from.

    Args:
        target: The copy.
        source: What it was made from.
    """

    def __init__(self, target: nn.Module, source: nn.Module) -> None:
        # looked up once: parameters stay the same objects, wherever their memory goes
        self._targets: list[torch.Tensor] = list(target.parameters())
        self._sources: list[torch.Tensor] = list(source.parameters())
        # buffers are other objects elsewhere, so that modules are asked for theirs
        self._owners = [
            (own, other)
            for own, other in zip(target.modules(), source.modules(), strict=True)
            if any(True for _ in own.buffers(recurse=False))
        ]

    @torch.no_grad()
    def follow(self, tau: float) -> None:
        """target = (1 - tau) target + tau source, for parameters; buffers are copied. With 1, the two are equal."""
        torch._foreach_lerp_(self._targets, self._sources, tau)
        for own, other in self._owners:
            for target, source in zip(own.buffers(recurse=False), other.buffers(recurse=False), strict=True):
                target.copy_(source)


class TargetedModule(Module):
    """A net that is trained with frozen copies beside it: target networks."""

    def train(self, mode: bool = True) -> Self:
        """Only a net of one's own has modes: all else is the same in both, and targets keep theirs."""
        self.training = mode
        if type(self.net) is not Network:  # to walk through it, twice a round, costs as much as an env step
            self.net.train(mode)
        return self


class FollowedModule(TargetedModule):
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
        self.target.eval()
        self.follower = TargetNetwork(self.target.net, net)


class Scaled(nn.Module):
    """The numbers of a Box in a row: those with finite bounds are scaled to [-1, 1] and clipped, as the env clips them.

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
        self.limit: Tensor
        with np.errstate(invalid="ignore"):  # of infinite bounds
            numbers = {
                "middle": np.where(bounded, (low + high) / 2, 0.0),
                "scale": np.where(bounded, (high - low) / 2, 1.0),
                "limit": np.where(bounded, 1.0, np.inf),
            }
        for name, values in numbers.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., *shape]`` to ``[..., width]``."""
        flat = x.reshape(*x.shape[: x.dim() - len(self._shape)], self.width).float()
        return ((flat - self.middle) / self.scale).clamp(-self.limit, self.limit)


class ActionEncoder(nn.Module):
    """All leaves of an action, one after the other: Boxes of floats scaled by their bounds, choices as ones and zeros.

    Args:
        space: What `distribution_for` handles.

    Attributes:
        width: The length of the vector.
    """

    def __init__(self, space: Space) -> None:
        super().__init__()
        self._columns_of = Flattener(space, ACTION)
        self._parts: dict[str, Scaled | OneHot | Numbers] = {
            name: _encoder_of(leaf) for name, leaf in leaves(space, ACTION).items()
        }
        self.encoders = nn.ModuleList(self._parts.values())
        self.width = sum(part.width for part in self._parts.values())

    def forward(self, action: Any) -> Tensor:
        """Actions nested as in the space, tensors ``[..., *shape]``, to ``[..., width]``."""
        columns = self._columns_of(action)
        encoded = [part(columns[name]) for name, part in self._parts.items()]
        return encoded[0] if len(encoded) == 1 else torch.cat(encoded, -1)


def _encoder_of(leaf: Space) -> Scaled | OneHot | Numbers:
    if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete):
        return OneHot(leaf)
    return Scaled(leaf) if isinstance(leaf, spaces.Box) else Numbers(leaf)


NUM_CRITICS = 2
_CHUNK = 2048
"""Rows that are computed at once where there are many: what lies between layers then stays in the cache, which makes it
twice as fast."""


class TwinCritic(nn.Module):
    """Two functions Q(observation, action), for the clipped double-Q of Fujimoto et al. 2018, "Addressing function
    approximation error in actor-critic methods".

    Their layers are stacked, so that each is one batched product for both. Weights are drawn as in
    ``torch.nn.Linear``, for each critic by itself. Images are encoded by each for itself. With a memory (a network that
    is ``recurrent``), it stands behind the encoder, and both critics see what it gives; with images, each has its own.

    Args:
        obs_space: What it sees.
        action_size: Numbers in an action.
        config: The shape: ``hidden``, ``activation`` and those of convolutions.
    """

    def __init__(self, obs_space: Space, action_size: int, config: NetworkConfig) -> None:
        super().__init__()
        first = ObsEncoder(obs_space, config.conv, config.conv_width)
        others = 0 if first.vector else NUM_CRITICS - 1  # without images there is nothing to learn in it
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
            self.activation.inplace = True  # a tenth of a forward
        self._width = width
        widths = [width + action_size, *config.hidden, 1]
        self._num_layers = len(widths) - 1
        for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            limit = 1.0 / math.sqrt(inputs)
            weight, bias = torch.empty(NUM_CRITICS, inputs, outputs), torch.empty(NUM_CRITICS, 1, outputs)
            self.register_parameter(f"weight_{i}", nn.Parameter(weight.uniform_(-limit, limit)))
            self.register_parameter(f"bias_{i}", nn.Parameter(bias.uniform_(-limit, limit)))

    def forward(
        self, obs: Mapping[str, Tensor], action: Tensor, *, frozen: bool = False, first_only: bool = False
    ) -> Tensor:
        """``[2, B]``: what each critic says.

        Args:
            obs: Columns of observations, each ``[B, *shape]``.
            action: ``[B, action_size]``.
            frozen: Gradients flow to ``action`` alone.
            first_only: Ask the first critic alone: ``[1, B]``.
        """
        encoded, _ = self.encode(obs, num=1 if first_only else NUM_CRITICS)
        return self.values(encoded, action, frozen=frozen, first_only=first_only)

    def initial_state(self) -> dict[str, Tensor]:
        """The state of the memories at the start of an episode: zeros; {} without a memory."""
        states: dict[str, Tensor] = {}
        for i, memory in enumerate(self.memories):
            assert isinstance(memory, RecurrentLayer)
            states |= {f"{i}_{name}": zeros for name, zeros in memory.initial_state().items()}
        return states

    def encode(
        self, obs: Mapping[str, Tensor], state: Mapping[str, Tensor] | None = None, *, num: int = NUM_CRITICS
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What the critics see in observations, ``[..., width]``, and the state after them.

        Args:
            obs: Columns of observations, each ``[B, *shape]``; with a memory ``[B, T, *shape]``.
            state: With a memory: its state before them.
            num: For so many critics, the first ones.
        """
        parts: list[Tensor] = []
        after: dict[str, Tensor] = {}
        for i, encoder in enumerate(self.encoders[:num]):
            x = encoder(obs)
            if self.memories:
                memory = self.memories[i]
                assert isinstance(memory, RecurrentLayer)
                x, last = memory(x, state and {name: state[f"{i}_{name}"] for name in memory.names})
                after |= {f"{i}_{name}": part for name, part in last.items()}
            parts.append(x)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1), after

    def values(self, encoded: Tensor, action: Tensor, *, frozen: bool = False, first_only: bool = False) -> Tensor:
        """As `forward`, of what `encode` gives: ``[B, width]``."""
        num = 1 if first_only else NUM_CRITICS
        if frozen:
            encoded = encoded.detach()
        inputs = [torch.cat((part, action), -1) for part in torch.split(encoded, self._width, -1)[:num]]
        x = inputs[0].expand(num, -1, -1) if len(inputs) == 1 else torch.stack(inputs)
        return self._values(x, frozen)

    def many(self, obs: Mapping[str, Tensor], actions: Tensor) -> Tensor:
        """``[2, B, n]``: what each critic says of several actions for each observation, which is encoded once.

        Args:
            obs: Columns of observations, each ``[B, *shape]``.
            actions: ``[B, n, action_size]``; or ``[2, B, n, action_size]``, others for each critic.
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
        return x.squeeze(-1)
