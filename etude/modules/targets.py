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
