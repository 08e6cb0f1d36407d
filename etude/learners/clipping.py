# SPDX-License-Identifier: Apache-2.0
"""Gradient clipping on flat gradients."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from etude.learners.flat import FlatParameters

ClipBy: TypeAlias = Literal["loss_norm", "global_norm", "norm", "value"]
"""``global_norm``: scale all gradients of an optimizer together so that their joint L2 norm is at most the limit
(Pascanu et al. 2013). ``loss_norm``: the same for the gradient of the policy's loss and for that of the value's, each
by itself (see `etude.learners.sides.Sides`). ``norm``: the same for each tensor by itself. ``value``: cap each
element."""


class Clipping(NamedTuple):
    """Gradients that are clipped together."""

    figure: str
    """What their norm is called among the metrics."""
    group: FlatParameters
    """Whose they are."""
    parts: Sequence[torch.Tensor]
    """Flat gradients, or slices of one."""
    limit: float | None

    @property
    def norm(self) -> torch.Tensor:
        """Their joint L2 norm."""
        norms = [torch.linalg.vector_norm(part) for part in self.parts]
        norm: torch.Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        return norm

    def clip(self, norm: float | torch.Tensor, by: ClipBy) -> None:
        """Clip them in place, if there is a limit; ``norm`` is their joint norm now."""
        if self.limit is None:
            return
        if by == "value":
            for part in self.parts:
                part.clamp_(-self.limit, self.limit)
        elif by == "norm":
            for part in self.group.split(self.parts[0]):
                part.mul_(_scale(torch.linalg.vector_norm(part), self.limit))
        elif isinstance(norm, torch.Tensor) or norm > self.limit:
            scale = self.scale(norm)
            for part in self.parts:
                part.mul_(scale)

    def scale(self, norm: float | torch.Tensor) -> float | torch.Tensor:
        """What scales a joint norm of ``norm`` to the limit."""
        return 1.0 if self.limit is None else _scale(norm, self.limit)


def norms_by_name(clippings: Sequence[Clipping], norms: Sequence[Any]) -> dict[str, Any]:
    """The norms as figures; those of several sides of a loss also together, as the root of the sum of their squares."""
    found = dict(zip([clipping.figure for clipping in clippings], norms, strict=True))
    if len(norms) > 1 and len({id(clipping.group) for clipping in clippings}) == 1:
        found["grad_norm"] = sum(norm * norm for norm in norms) ** 0.5
    return found


def _scale(norm: float | torch.Tensor, limit: float) -> float | torch.Tensor:
    return limit / (norm.clamp(min=limit) if isinstance(norm, torch.Tensor) else max(norm, limit))
