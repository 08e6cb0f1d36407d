# SPDX-License-Identifier: Apache-2.0
"""Schedules: a number that is constant, or that changes as training goes on."""

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from etude.errors import SettingsError

Schedule: TypeAlias = float | tuple[tuple[int, float] | Literal["cosine"], ...]
"""A constant; or points ``((step, value), ...)`` with straight lines between them, and the last value after them. With
``"cosine"`` in front of the points, half a period of a cosine is between them: ``("cosine", (0, 3e-4), (10**6, 0.0))``.

Steps are environment steps, or gradient steps where an algorithm learns from a recording."""


def value_at(schedule: Schedule, step: int) -> float:
    """The value of a schedule after ``step`` steps over the lifetime of a run."""
    if isinstance(schedule, int | float):
        return float(schedule)
    steps, values = zip(*points_of(schedule), strict=True)
    if schedule[0] != "cosine":
        return float(np.interp(step, steps, values))
    at = float(np.interp(step, steps, range(len(steps))))
    at = math.floor(at) + (1 - math.cos(math.pi * (at % 1))) / 2
    return float(np.interp(at, range(len(steps)), values))


def points_of(schedule: Schedule) -> list[tuple[int, float]]:
    """The points of a schedule; of a constant, one at step 0."""
    if isinstance(schedule, int | float):
        return [(0, float(schedule))]
    return [point for point in schedule if not isinstance(point, str)]


def check_schedule(name: str, schedule: Schedule | Sequence[Sequence[float]]) -> None:
    """Raise a SettingsError where ``schedule`` is neither a number from 0 on nor points of them in order of steps."""
    try:
        points: Sequence[Sequence[float]] = [(0, schedule)] if isinstance(schedule, int | float) else schedule  # type: ignore[assignment]
        points = points[1:] if points[0] == "cosine" else points  # type: ignore[comparison-overlap]
        steps, values = [float(point[0]) for point in points], [float(point[1]) for point in points]
        fine = all(len(point) == 2 for point in points) and steps == sorted(set(steps)) and len(steps) > 0
        fine = fine and all(0 <= value < math.inf for value in values)
    except (TypeError, IndexError, ValueError):
        fine = False
    if not fine:
        raise SettingsError(
            f"{name} is {schedule!r}, but a schedule is a number from 0 on, or points of (step, such a number) in "
            'rising order of steps, such as ((0, 3e-4), (100000, 0.0)); with "cosine" in front, a cosine goes from '
            "point to point instead of a straight line."
        )
