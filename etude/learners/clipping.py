# SPDX-License-Identifier: Apache-2.0
"""Gradient clipping on flat gradients."""

from typing import Literal, TypeAlias

import torch

from etude.learners.flat import FlatParameters

ClipBy: TypeAlias = Literal["global_norm", "norm", "value"]
"""``global_norm``: scale all gradients of an optimizer together so that their joint L2 norm is at most the limit
(Pascanu et al. 2013). ``norm``: the same for each tensor by itself. ``value``: cap each element."""


def clip(group: FlatParameters, grad: torch.Tensor, limit: float | None, by: ClipBy) -> torch.Tensor:
    """Clip the flat gradient ``grad`` of ``group`` in place to ``limit``, if any; gives its L2 norm before."""
    norm: torch.Tensor = torch.linalg.vector_norm(grad)
    if limit is None:
        return norm
    if by == "global_norm":
        grad.mul_(_scale(norm, limit))
    elif by == "value":
        grad.clamp_(-limit, limit)
    else:
        for part in group.split(grad):
            part.mul_(_scale(torch.linalg.vector_norm(part), limit))
    return norm


def _scale(norm: torch.Tensor, limit: float) -> torch.Tensor:
    return limit / norm.clamp(min=limit)
