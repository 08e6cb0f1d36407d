# SPDX-License-Identifier: Apache-2.0
"""Gradient clipping on flat gradients."""

from typing import Literal, TypeAlias

import torch

from etude.learners.flat import FlatParameters

ClipBy: TypeAlias = Literal["global_norm", "norm", "value"]
"""``global_norm``: scale all gradients together so that their joint L2 norm is at most the limit (Pascanu et al. 2013).
``norm``: the same for each tensor by itself. ``value``: cap each element."""


def clip(groups: list[FlatParameters], grads: list[torch.Tensor], limit: float, by: ClipBy) -> list[torch.Tensor]:
    """Gradients clipped to ``limit``; new tensors. ``grads[i]`` is the flat gradient of ``groups[i]``."""
    if by == "value":
        return [grad.clamp(-limit, limit) for grad in grads]
    if by == "norm":
        clipped = []
        for group, grad in zip(groups, grads, strict=True):
            parts = [part * _scale(torch.linalg.vector_norm(part), limit) for part in group.split(grad)]
            clipped.append(torch.cat([part.reshape(-1) for part in parts]))
        return clipped
    scale = _scale(global_norm(grads), limit)
    return [grad * scale for grad in grads]


def global_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """The L2 norm of all gradients together: a scalar."""
    norms = [torch.linalg.vector_norm(grad) for grad in grads]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _scale(norm: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.clamp((norm + 1e-6).reciprocal() * limit, max=1.0)
