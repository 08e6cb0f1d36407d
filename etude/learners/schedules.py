# SPDX-License-Identifier: Apache-2.0
"""Schedules: a number that stays, or that changes with the environment steps sampled so far."""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from etude.errors import SettingsError

Schedule: TypeAlias = float | tuple[tuple[int, float], ...]
"""A constant, or points ``((env_steps, value), ...)`` with straight lines between and the last value after them."""


def value_at(schedule: Schedule, env_steps: int) -> float:
    """The value of a schedule after ``env_steps`` environment steps over the lifetime of a run."""
    if isinstance(schedule, int | float):
        return float(schedule)
    steps, values = zip(*schedule, strict=True)
    return float(np.interp(env_steps, steps, values))


def check_schedule(name: str, schedule: Schedule | Sequence[Sequence[float]]) -> None:
    """Raise a SettingsError where ``schedule`` is neither a number from 0 on nor points of them in order of steps."""
    try:
        points = [(0, schedule)] if isinstance(schedule, int | float) else schedule
        steps, values = [float(point[0]) for point in points], [float(point[1]) for point in points]
        fine = all(len(point) == 2 for point in points) and steps == sorted(set(steps)) and len(steps) > 0
        fine = fine and all(0 <= value < math.inf for value in values)
    except (TypeError, IndexError, ValueError):
        fine = False
    if not fine:
        raise SettingsError(
            f"{name} is {schedule!r}, but a schedule is a number from 0 on, or points of (env_steps, such a number) in "
            "rising order of steps, such as ((0, 3e-4), (100000, 0.0))."
        )
