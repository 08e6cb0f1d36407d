# SPDX-License-Identifier: Apache-2.0
"""The gradients of the policy's loss and of the value's, each limited by itself."""

from collections.abc import Sequence
from itertools import groupby

import torch

from etude.learners.flat import FlatParameters
from etude.learners.loss import Loss

Reached = Sequence[frozenset[str]]
"""For each parameter, the sides of the loss (see `Loss.sides`) that have a gradient for it."""


def reached_by(loss: Loss, group: FlatParameters) -> Reached:
    """Which sides of ``loss`` reach each parameter of ``group``; the graph of the loss is kept."""
    found: list[set[str]] = [set() for _ in group.parameters]
    for name, side in loss.sides.items():
        if side.requires_grad:
            grads = torch.autograd.grad(side, group.parameters, retain_graph=True, allow_unused=True)
            for own, grad in zip(found, grads, strict=True):
                own |= {name} if grad is not None else set()
    return [frozenset(own) for own in found]


class Sides:
    """What the sides of a loss reach of the parameters of one optimizer.

    Where no parameter is reached by two sides, one backward pass gives all gradients, each side's in its own slices of
    the flat gradient. Where layers are shared, and each side is to be limited, each has a backward pass and a flat
    gradient of its own, and they are summed after they are limited: else a large value loss would leave the policy no
    part in the gradient of the shared layers.

    Args:
        group: The parameters.
        reached: By which sides.
        limited: Each side's gradient is to be limited.
    """

    def __init__(self, group: FlatParameters, reached: Reached, *, limited: bool) -> None:
        self._group, self._reached = group, reached
        self.names = sorted(frozenset().union(*reached))
        """The sides; one alone needs nothing of this."""
        self.limited = limited and len(self.names) > 1
        self.backs_apart = self.limited and any(len(own) > 1 for own in reached)
        """Each side has a backward pass and a flat gradient of its own."""
        if self.backs_apart:
            group.apart = [torch.zeros_like(group.grad) for _ in self.names[1:]]
        self.slices = self._slices()

    def _slices(self) -> dict[str, list[slice]]:
        """By side, where the parameters are that it alone reaches; all others by ``all``."""
        owners = [next(iter(own)) if len(own) == 1 else "all" for own in self._reached]
        if self.limited and not self.backs_apart:  # what no side has reached so far belongs to one of them, too
            owners = [self.names[0] if owner == "all" else owner for owner in owners]
        slices: dict[str, list[slice]] = {}
        start = 0
        for owner, members in groupby(zip(owners, self._group.sizes, strict=True), key=lambda pair: pair[0]):
            size = sum(own for _, own in members)
            slices.setdefault(owner, []).append(slice(start, start + size))
            start += size
        return slices

    def backward(self, loss: Loss, weight: float) -> None:
        """Add the gradients of each side, times ``weight``, to its own flat gradient."""
        for name, side in loss.sides.items():
            if not side.requires_grad:
                continue
            grads = torch.autograd.grad(side * weight, self._group.parameters, retain_graph=True, allow_unused=True)
            views = self._group.split(self._group.grads[self.names.index(name)])
            pairs = [(view, grad) for view, grad in zip(views, grads, strict=True) if grad is not None]
            torch._foreach_add_([view for view, _ in pairs], [grad for _, grad in pairs])

    def parts(self, grads: Sequence[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        """By side, where its gradient lies.

        Args:
            grads: The flat gradients: one for each side where they are apart, else one.
        """
        if self.backs_apart:
            return {name: [grad] for name, grad in zip(self.names, grads, strict=True)}
        return {name: [grads[0][own] for own in self.slices[name]] for name in self.names}
