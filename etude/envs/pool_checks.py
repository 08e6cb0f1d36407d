# SPDX-License-Identifier: Apache-2.0
"""What is wrong with an env of a pool, in words."""

from typing import Any

import numpy as np

from etude import columns as col
from etude.envs.pool_memory import Plan
from etude.errors import EnvError


def check_step(reward: Any, terminated: Any, truncated: Any) -> None:
    """Raise an EnvError where a step gave something else than a finite number and two flags."""
    number = np.asarray(reward)
    if number.shape or number.dtype.kind not in "bifu" or not np.isfinite(number):
        raise EnvError(f"`reward` is {reward!r}, not a finite number.")
    for name, flag in ((col.TERMINATED, terminated), (col.TRUNCATED, truncated)):
        if not isinstance(flag, bool | np.bool_):
            raise EnvError(f"`{name}` is {flag!r}, not True or False.")


def check_alike(plan: Plan, other: Plan, env: int) -> None:
    """Raise an EnvError where env number ``env`` has other agents or spaces than those before it."""
    mine, its = ((p.agents, p.obs_spaces, p.action_spaces) for p in (plan, other))
    for what, one, two in zip(("agents", "observation spaces", "action spaces"), mine, its, strict=True):
        if one != two:
            raise EnvError(f"the envs of a pool must be alike, but env {env} has the {what} {two}, and others {one}.")


def same_object(env: Any) -> EnvError:
    """The error for what makes ``env`` again and again."""
    return EnvError(f"the same {type(env).__name__} object is given each time: let a new one be made.")
