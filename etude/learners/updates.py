# SPDX-License-Identifier: Apache-2.0
"""What an update brought."""

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch

from etude.learners.team import Team

Figures: TypeAlias = dict[str, Any]
"""Scalars by name: tensors, or numbers."""


class Update(NamedTuple):
    """What an update brought: means over its gradient steps, without those that were skipped."""

    losses: dict[str, float]
    """Each part of the loss; NaN where every step was skipped."""
    metrics: dict[str, float]
    """What the loss logs, ``grad_norm`` (before clipping) where gradients are clipped, and ``skipped_steps`` where some
    were skipped because the loss or its gradients were not finite; ``threads``, of the CPU, where the learner chose."""


def mean_of(updates: Sequence[Update]) -> Update:
    """Several updates as one: the mean of each figure over those that have it; ``skipped_steps`` are added up, and of
    ``threads`` there is the last.

    Losses of updates in which every step was skipped, which are NaN, count only where there are no others.
    """

    def values_of(parts: list[dict[str, float]]) -> dict[str, list[float]]:
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: [part[name] for part in parts if name in part] for name in names}

    losses = {
        name: [value for value in values if not math.isnan(value)] or values
        for name, values in values_of([update.losses for update in updates]).items()
    }
    metrics = values_of([update.metrics for update in updates])
    others = {"skipped_steps": sum(metrics.pop("skipped_steps"))} if "skipped_steps" in metrics else {}
    if "threads" in metrics:
        others["threads"] = metrics.pop("threads")[-1]
    return Update(
        {name: sum(values) / len(values) for name, values in losses.items()},
        {name: sum(values) / len(values) for name, values in metrics.items()} | others,
    )


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
        values = _numbers([value for _, _, value in flat])
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
    columns = {name: [row[name] for row in rows if name in row] for name in names}
    values = iter(_numbers([value for column in columns.values() for value in column]))
    return {name: sum(islice(values, len(column))) / len(column) for name, column in columns.items()}


def _numbers(scalars: Sequence[torch.Tensor | float]) -> list[float]:
    """Scalars as numbers, moved to the host at once."""
    tensors = [scalar for scalar in scalars if isinstance(scalar, torch.Tensor)]
    found = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(found) if isinstance(scalar, torch.Tensor) else scalar for scalar in scalars]
