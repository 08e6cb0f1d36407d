# SPDX-License-Identifier: Apache-2.0
"""What an update brought."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

Figures: TypeAlias = dict[str, torch.Tensor]
"""Scalars by name."""


class Update(NamedTuple):
    """What an update brought: means over its gradient steps, without those that were skipped."""

    losses: dict[str, float]
    """Each part of the loss; NaN where every step was skipped."""
    metrics: dict[str, float]
    """What the loss logs, ``grad_norm`` (before clipping) where gradients are clipped, and ``skipped_steps`` where some
    were skipped because the loss or its gradients were not finite."""


def mean_of(updates: Sequence[Update]) -> Update:
    """Several updates as one: the mean of each figure over those that have it; ``skipped_steps`` are added up."""

    def means(parts: list[dict[str, float]]) -> dict[str, float]:
        names = dict.fromkeys(name for part in parts for name in part)
        values = {name: [part[name] for part in parts if name in part] for name in names}
        return {name: sum(some) / (1 if name == "skipped_steps" else len(some)) for name, some in values.items()}

    return Update(means([update.losses for update in updates]), means([update.metrics for update in updates]))


def means_of(rows: list[Figures]) -> dict[str, float]:
    """The mean of each figure over the gradient steps that have it; moved to the host once."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not names:
        return {}
    means = [torch.stack([row[name] for row in rows if name in row]).to(torch.float64).mean() for name in names]
    return dict(zip(names, torch.stack(means).tolist(), strict=True))
