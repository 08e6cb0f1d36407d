# SPDX-License-Identifier: Apache-2.0
"""Target networks: frozen copies that follow what is trained."""

import copy
from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def frozen_copy(module: M) -> M:
    """A copy of a module, in evaluation mode, whose parameters need no gradient: no optimizer is given them."""
    copied = copy.deepcopy(module).requires_grad_(False)
    copied.eval()
    return copied


class Follower:
    """Moves a `frozen_copy` towards what it was made from.

    Args:
        target: The copy.
        source: What it was made from.
    """

    def __init__(self, target: nn.Module, source: nn.Module) -> None:
        # looked up once: parameters stay the same objects, wherever their memory goes
        self._targets: list[torch.Tensor] = list(target.parameters())
        self._sources: list[torch.Tensor] = list(source.parameters())
        self._buffers = list(zip(target.buffers(), source.buffers(), strict=True))

    @torch.no_grad()
    def follow(self, tau: float) -> None:
        """target = (1 - tau) target + tau source, for parameters; buffers are copied. With 1, the two are equal."""
        torch._foreach_lerp_(self._targets, self._sources, tau)
        for target, source in self._buffers:
            target.copy_(source)
