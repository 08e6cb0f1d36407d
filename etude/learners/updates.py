# SPDX-License-Identifier: Apache-2.0
"""What an update brought."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from etude.learners.team import Team

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


class Found(NamedTuple):
    """What one learner of a team found in the steps of an update."""

    names: list[str]
    """Of the parts of the loss."""
    rows: list[int]
    """Those that it had in each step that was made."""
    figures: list[list[tuple[int, str, float]]]
    """Of each kind: the number of the step, the name, and the mean over these rows."""


def found_by_all(team: Team, names: Iterable[str], rows: list[int], *kinds: list[Figures]) -> list[Found]:
    """What each learner of a team found, by rank; see `Found`."""
    figures = []
    for kind in kinds:
        flat = [(i, name, value) for i, step in enumerate(kind) for name, value in step.items()]
        values = torch.stack([value.double() for _, _, value in flat]).tolist() if flat else []
        figures.append([(i, name, value) for (i, name, _), value in zip(flat, values, strict=True)])
    return team.gathered(Found(list(names), rows, figures))


def joined_means(found: Sequence[Found], kind: int) -> dict[str, float]:
    """As `means_of`, where what a step has is the mean over everyone's rows."""
    sums: dict[tuple[str, int], list[float]] = {}
    for own in found:
        for i, name, value in own.figures[kind]:
            if own.rows[i]:
                total = sums.setdefault((name, i), [0.0, 0.0])
                total[0] += own.rows[i] * value
                total[1] += own.rows[i]
    steps: dict[str, list[float]] = {}
    for (name, _), (total_value, weight) in sums.items():
        steps.setdefault(name, []).append(total_value / weight)
    return {name: sum(values) / len(values) for name, values in steps.items()}


def means_of(rows: list[Figures]) -> dict[str, float]:
    """The mean of each figure over the gradient steps that have it; moved to the host once."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not names:
        return {}
    means = [torch.stack([row[name] for row in rows if name in row]).to(torch.float64).mean() for name in names]
    return dict(zip(names, torch.stack(means).tolist(), strict=True))
