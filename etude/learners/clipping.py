# SPDX-License-Identifier: Apache-2.0
"""Gradient clipping on flat gradients."""

from typing import Literal, TypeAlias

import torch

from etude.learners.flat import FlatParameters

ClipBy: TypeAlias = Literal["global_norm", "norm", "value"]
"""``global_norm``: scale all gradients together so that their joint L2 norm is at most the limit (Pascanu et al. 2013).
``norm``: the same for each tensor by itself. ``value``: cap each element."""


def clip(groups: list[FlatParameters], grads: list[torch.Tensor], limit: float, by: ClipBy) -> torch.Tensor:
    """Clip gradients in place to ``limit``; gives their joint L2 norm before. ``grads[i]`` is that of ``groups[i]``."""
    norm = _global_norm(grads)
    if by == "global_norm":
        scale = _scale(norm, limit)
        for grad in grads:
            grad.mul_(scale)
    elif by == "value":
        for grad in grads:
            grad.clamp_(-limit, limit)
    else:
        for group, grad in zip(groups, grads, strict=True):
            for part in group.split(grad):
                part.mul_(_scale(torch.linalg.vector_norm(part), limit))
    return norm


def _global_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    norms: list[torch.Tensor] = [torch.linalg.vector_norm(grad) for grad in grads]
    return norms[0] if len(norms) == 1 else torch.stack(norms).square().sum().sqrt()


def _scale(norm: torch.Tensor, limit: float) -> torch.Tensor:
    return limit / norm.clamp(min=limit)
