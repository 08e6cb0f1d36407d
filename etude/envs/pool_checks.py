# SPDX-License-Identifier: Apache-2.0
"""What is wrong with an env of a pool, in words."""

import re
import traceback
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from etude import columns as col
from etude.envs.pool_memory import Plan
from etude.errors import EnvError

NUMBERS = frozenset((float, int, bool, np.float64, np.float32, np.int64, np.bool_))
"""Classes of rewards that need no closer look."""

_UNPACKED = re.compile(r"values to unpack \(expected [25]")  # what Python says of old tuples


def check_reward(reward: Any) -> None:
    """Raise an EnvError where a reward is not one number. NaN and infinity are found elsewhere."""
    number = np.asarray(reward)
    if number.dtype.kind not in "bifu":
        raise EnvError(f"`reward` is {reward!r}, not a finite number.")
    if number.shape:
        raise EnvError(
            f"`reward` is {reward!r}, not a finite number: it has shape {number.shape}. Return one number, such as "
            "float(reward[0])."
        )


def check_flags(terminated: Any, truncated: Any) -> None:
    """Raise an EnvError where these are no truth values."""
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


# -- the old Gym API ------------------------------------------------------------------------------------------------


def reset_env(env: gym.Env[Any, Any], seed: int | None) -> tuple[Any, Any]:
    """Reset a Gymnasium env, and give the observation and the info.

    Raises:
        EnvError: it returns something else.
    """
    try:
        given = env.reset(seed=seed)
    except TypeError as error:
        if "unexpected keyword argument 'seed'" not in str(error):
            raise
        raise old_api(env, "its reset takes no `seed`") from None
    if isinstance(given, tuple) and len(given) == 2 and (given[1] is None or isinstance(given[1], Mapping)):
        return given
    raise old_api(env, f"its reset returned {_shown(given)}")


def not_five(env: object, given: Any) -> EnvError:
    """The error for a step that returned ``given``."""
    return old_api(env, f"its step returned {_shown(given)}")


def unpacked_wrongly(error: BaseException) -> bool:
    """Whether one of Gymnasium's wrappers failed to unpack what an env with the old API returned."""
    if not isinstance(error, ValueError) or not _UNPACKED.search(str(error)):
        return False
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return bool(last) and "gymnasium" in last[0].filename.replace("\\", "/").split("/")


def old_api(env: object, found: str) -> EnvError:
    """The error for an env that does not return what Gymnasium's envs return."""
    inner = getattr(env, "unwrapped", env)
    return EnvError(
        f"{type(inner).__name__} does not have Gymnasium's API: {found}. reset(seed=..., options=...) must return "
        "`(obs, info)`, and step(action) five values, `(obs, reward, terminated, truncated, info)`. Envs of the old "
        "Gym return `obs` and `(obs, reward, done, info)`: change that in the env, or wrap it in "
        "shimmy.GymV21CompatibilityV0(env=env)."
    )


def _shown(given: Any) -> str:
    if isinstance(given, tuple | list):
        return f"{len(given)} values ({', '.join(type(part).__name__ for part in given[:6])})"
    return f"one {type(given).__name__}"
