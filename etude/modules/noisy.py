# SPDX-License-Identifier: Apache-2.0
"""Noisy networks, which explore by noise on their weights (Fortunato et al. 2018, "Noisy networks for exploration",
arXiv 1706.10295)."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from etude.columns import Columns
from etude.modules.acting import Actor
from etude.modules.module import Module, TorchActor
from etude.modules.network import Network, State, Trunk


class NoisyLinear(nn.Linear):
    """A linear layer with normally distributed weights, whose means and standard deviations are learned.

    The noise is factorised: one number per input and one per output (eq. 10 and 11). It is drawn in each call in
    training mode. In evaluation mode, the weights are their means.

    Args:
        inputs: Width of the input.
        outputs: Width of the output.
        std: Initial standard deviation, times the root of ``inputs``. Default: Fortunato et al. 2018.

    Attributes:
        noise: Noise of the inputs ``[inputs]`` and of the outputs ``[outputs]`` to use in either mode; None: as above.
    """

    noise: tuple[Tensor, Tensor] | None = None

    def __init__(self, inputs: int, outputs: int, std: float = 0.5) -> None:
        super().__init__(inputs, outputs)
        limit = 1.0 / math.sqrt(inputs)
        nn.init.uniform_(self.weight, -limit, limit)
        nn.init.uniform_(self.bias, -limit, limit)
        self.weight_std = nn.Parameter(torch.full_like(self.weight, std * limit))
        self.bias_std = nn.Parameter(torch.full_like(self.bias, std * limit))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., inputs]`` to ``[..., outputs]``."""
        mean, noise = F.linear(x, self.weight, self.bias), self.noise
        if noise is None:
            if not self.training:
                return mean
            device = self.weight.device
            noise = (
                _signed_root(torch.randn(self.in_features, device=device)),
                _signed_root(torch.randn(self.out_features, device=device)),
            )
        of_inputs, of_outputs = noise
        return mean + of_outputs * F.linear(x * of_inputs, self.weight_std, self.bias_std)

    def draw(self, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Draw noise for the attribute `noise`: of the inputs and of the outputs."""
        sizes = self.in_features, self.out_features
        drawn = (torch.from_numpy(rng.standard_normal(size, dtype=np.float32)) for size in sizes)
        of_inputs, of_outputs = (_signed_root(numbers.to(self.weight.device)) for numbers in drawn)
        return of_inputs, of_outputs


def _signed_root(x: Tensor) -> Tensor:
    return x.sign() * x.abs().sqrt()


class NoisyTrunk(Trunk):
    """A trunk with noisy layers in place of the linear ones.

    Args:
        plain: The trunk whose encoder and recurrent layer it uses.
    """

    def __init__(self, plain: Trunk) -> None:
        nn.Module.__init__(self)
        self.encoder, self.memory, self.activation, self.width = (
            plain.encoder,
            plain.memory,
            plain.activation,
            plain.width,
        )
        self.linears = nn.ModuleList(noisy(layer) for layer in plain.linears)

    def forward(self, columns: Mapping[str, Tensor], state: State | None = None) -> tuple[Tensor, State]:
        """See `Trunk.forward`."""
        x: Tensor = self.encoder(columns)
        after: State = {}
        if self.memory is not None:
            x, after = self.memory(x, state)
        for layer in self.linears:
            x = self.activation(layer(x))
        return x, after


def noisy(layer: nn.Module) -> NoisyLinear:
    """A noisy layer of the same size as a linear one."""
    assert isinstance(layer, nn.Linear)
    return NoisyLinear(layer.in_features, layer.out_features)


class NoisyNetwork(Network):
    """The built-in network, with the same arguments, with noisy layers in place of all linear ones after the
    encoders."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.policy = NoisyTrunk(self.policy)
        self.policy_head = noisy(self.policy_head)
        if self.critic is not None:
            self.critic = NoisyTrunk(self.critic)
        if self.value_head is not None:
            self.value_head = noisy(self.value_head)


class NoisyActor:
    """Acts with new noise in each step, which is the same for all rows.

    Args:
        module: A module with noisy layers.
    """

    def __init__(self, module: Module) -> None:
        self._actor: Actor = TorchActor(module, explore=True)
        self._layers = [part for part in module.net.modules() if isinstance(part, NoisyLinear)]
        self._rng = np.random.default_rng()

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        """See `Actor.start`."""
        self._rng = rng
        self._actor.start(rng, num_rows)

    def step(
        self, obs: Columns, state: Columns | None = None, *, ends: NDArray[np.bool_] | None = None
    ) -> tuple[Columns, Columns]:
        """See `Actor.step`."""
        for layer in self._layers:
            layer.noise = layer.draw(self._rng)
        try:
            return self._actor.step(obs, state, ends=ends)
        finally:
            for layer in self._layers:
                layer.noise = None

    def logp(self, dist_inputs: NDArray[np.float32] | None, action: Columns) -> NDArray[np.float32] | None:
        """See `Actor.logp`."""
        return self._actor.logp(dist_inputs, action)
