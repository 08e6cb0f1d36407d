# SPDX-License-Identifier: Apache-2.0
"""Noisy networks, which explore by noise on their weights (Fortunato et al. 2018, "Noisy networks for exploration",
arXiv 1706.10295)."""

import copy
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from etude.columns import Columns
from etude.modules.module import Module, TorchActor
from etude.modules.network import Network


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


def noisy(layer: nn.Module) -> NoisyLinear:
    """A noisy layer of the same size as a linear one."""
    assert isinstance(layer, nn.Linear)
    return NoisyLinear(layer.in_features, layer.out_features)


class NoisyNetwork(Network):
    """The built-in network, with the same arguments, with noisy layers in place of all linear ones after the
    encoders."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for trunk, head in ((self.policy, "policy_head"), (self.critic, "value_head")):
            if trunk is not None:
                linears = nn.ModuleList(map(noisy, trunk.linears))
                del trunk.linears  # so that the parameters of a recurrent layer stay in front of these
                trunk.linears = linears
            if getattr(self, head) is not None:
                setattr(self, head, noisy(getattr(self, head)))


class NoisyActor(TorchActor):
    """Acts with new noise in each step, which is the same for all rows.

    Args:
        module: A module with noisy layers.
    """

    def __init__(self, module: Module) -> None:
        # layers of its own, with the same weights: others may act without noise meanwhile
        shared = (*module.parameters(), *module.buffers(), module.dist)
        own = copy.deepcopy(module, {id(part): part for part in shared})
        super().__init__(own, explore=True)
        self._layers = [part for part in own.net.modules() if isinstance(part, NoisyLinear)]

    def step(
        self, obs: Columns, state: Columns | None = None, *, ends: NDArray[np.bool_] | None = None
    ) -> tuple[Columns, Columns]:
        """See `Actor.step`."""
        for layer in self._layers:
            layer.noise = layer.draw(self.rng)
        return super().step(obs, state, ends=ends)
