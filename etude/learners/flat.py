# SPDX-License-Identifier: Apache-2.0
"""Parameters and their gradients in one flat piece of memory each.

An optimizer step, a norm or a copy is then one operation instead of one for each tensor, which is what a step of a
small network costs most (see the benchmarks). Parameters keep their shapes: they become views.
"""

from collections.abc import Sequence

import torch
from torch import nn

from etude.errors import ModuleError


class FlatParameters:
    """The flat buffers of some parameters of one dtype on one device.

    ``flat`` is a parameter that shares its memory with all of them, and ``flat.grad`` with all their gradients: it can
    be given to any optimizer that works element by element, such as Adam.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        first = self.parameters[0]
        kinds = {(p.dtype, p.device) for p in self.parameters}
        if len(kinds) > 1:
            raise ModuleError(
                f"parameters of one optimizer must share dtype and device, but these are of {sorted(map(str, kinds))}. "
                "Convert the module (float32 is usual), or give each kind an optimizer of its own."
            )
        self.sizes = [p.numel() for p in self.parameters]
        self.shapes = [p.shape for p in self.parameters]
        with torch.no_grad():
            data = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        self.flat = nn.Parameter(data, requires_grad=first.requires_grad)
        self.flat.grad = torch.zeros_like(data)
        for parameter, value in zip(self.parameters, self.split(self.flat.data), strict=True):
            parameter.data = value
        self._grads = self.split(self.flat.grad)
        self.apart: list[torch.Tensor] = []
        """Further flat gradients, of parts of a loss whose gradients are limited apart."""

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A flat tensor as views in the parameters' shapes."""
        parts = torch.split(flat, self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    @property
    def grad(self) -> torch.Tensor:
        """The flat gradient."""
        grad = self.flat.grad
        assert grad is not None
        return grad

    @property
    def grads(self) -> list[torch.Tensor]:
        """The flat gradient, then those `apart`."""
        return [self.grad, *self.apart]

    def keep_grads_in(self, memory: torch.Tensor) -> None:
        """Let `grads` lie in ``memory``, one-dimensional and of their size together, from the next step on."""
        grad, *self.apart = torch.split(memory, self.flat.numel())
        self.flat.grad = grad
        self._grads = self.split(grad)

    def join_grads(self) -> None:
        """Add the gradients `apart` to the flat one."""
        for other in self.apart:
            self.grad.add_(other)

    def attach_grads(self) -> None:
        """Set all gradients to zero, in place, and let every parameter's ``grad`` be its part of the flat one.

        Whatever took a ``grad`` away since (``module.zero_grad()`` does) is so undone.
        """
        for flat in self.grads:
            flat.zero_()
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            parameter.grad = grad
