# SPDX-License-Identifier: Apache-2.0
"""TwinCritic: two action-value functions of their own weights, computed side by side."""

import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from etude.modules.activations import ACTIVATIONS
from etude.modules.encoders import Encoder
from etude.modules.memory import Memory
from etude.modules.networks import NetworkConfig
from etude.spaces import Space

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
        first = Encoder(obs_space, config.conv, config.conv_width)
        others = 0 if first.vector else NUM_CRITICS - 1  # without images there is nothing to learn in it
        more = [Encoder(obs_space, config.conv, config.conv_width) for _ in range(others)]
        self.encoders = nn.ModuleList([first, *more])
        self.memories = nn.ModuleList()
        width = first.width
        if config.recurrent is not None:
            kind, width = config.recurrent, config.recurrent_size
            self.memories.extend(Memory(encoder.width, kind, width) for encoder in (first, *more))
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
            assert isinstance(memory, Memory)
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
                assert isinstance(memory, Memory)
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
