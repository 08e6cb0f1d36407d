# SPDX-License-Identifier: Apache-2.0
"""Env adapters: one interface to a running env of any API, and checks of what a Gymnasium env returns."""

import contextlib
import functools
import logging
import re
import traceback
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, final

import gymnasium as gym
import numpy as np

from etude import columns as col
from etude.errors import EnvError, SpaceError, described
from etude.spaces import Space, find_part, is_handled, without

OFF_POLICY_ACTION: Final = "off_policy_action"
"""The key in infos of the action that the env took instead of the one it was given."""


_log = logging.getLogger("etude.envs")


class AgentStep(NamedTuple):
    """One agent's row of a step. The agent waits for an action unless it is terminated or truncated."""

    agent: int
    """Its index in `EnvAdapter.agents`."""
    obs: Any
    """The observation, nested as the env returned it; the env may overwrite it in its next step. None, only in rows
    that end: the env gave no final observation."""
    reward: float
    """The total reward since the agent's last action; 0.0 where ``first``."""
    terminated: bool
    truncated: bool
    first: bool
    """Whether the row begins the agent's episode."""
    taken: Any = None
    """The action that the env took instead of the one sent, nested like the action space; None: the one sent."""


class EnvAdapter:
    """One running env, of any API.

    Its state is in plain attributes, so that snapshots include it.

    Args:
        env: The user's env.
        agents: Every agent that may ever appear, in a fixed order; ``(None,)`` for one unnamed agent.
        obs_spaces: The space of each agent's observations.
        action_spaces: The space of each agent's actions.
    """

    def __init__(
        self,
        env: Any,
        agents: tuple[str | None, ...],
        obs_spaces: tuple[Space, ...],
        action_spaces: tuple[Space, ...],
    ) -> None:
        self.env, self.agents, self.obs_spaces, self.action_spaces = env, agents, obs_spaces, action_spaces
        self.env_t = 0
        """The steps made in the running episode."""
        self.over = True
        """Whether the episode has ended for all agents, so that the env must be reset before the next step."""
        self.infos: Any = None
        """The infos of the env's last step or reset, unchanged."""

    def close(self) -> None:
        """Close the env if it has ``close``."""
        if callable(close := getattr(self.env, "close", None)):
            close()


@final
class GymAdapter(EnvAdapter):
    """The adapter of a Gymnasium env: one unnamed agent, which waits after every step.

    Workers call the env's own methods, because `AgentStep` rows would take a third of a simple env's time.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env, (None,), (env.observation_space,), (env.action_space,))
        warn_of_wrappers(env)


_CONNECTORS: Final = {
    "NormalizeObservation": "normalize_obs",
    "NormalizeReward": "normalize_reward",
    "ClipReward": "clip_reward",
    "TransformReward": "my_module:MyConnector",
}
"""Gymnasium's wrappers that should not be used with Etude, and the connectors to use instead."""


def warn_of_wrappers(env: Any) -> None:
    """Warn, once per process, about wrappers whose statistics are neither shared nor saved, or that change returns."""
    while isinstance(env, gym.Wrapper | gym.vector.VectorWrapper):
        name = type(env).__name__
        if name in _CONNECTORS and type(env).__module__.startswith("gymnasium."):
            _warn_of_wrapper(name)
        env = env.env
    if isinstance(env, gym.vector.SyncVectorEnv):
        warn_of_wrappers(env.envs[0])


@functools.cache
def _warn_of_wrapper(name: str) -> None:
    what = "returns and recordings are of changed rewards"
    if name.startswith("Normalize"):
        what = "each copy has statistics of its own, which evaluations and loaded policies lack"
    _log.warning(
        "The env is wrapped in Gymnasium's %s: %s. Use a connector instead: connectors=(%r,), or --connectors %s.",
        *(name, what, _CONNECTORS[name], _CONNECTORS[name]),
    )


def warn_of_masks(env: Any, obs_space: Space, infos: Any) -> None:
    """Warn, once per process and kind of env, that action masks have no effect if they are in the infos of a reset, or
    come from a method ``action_masks``, as MaskablePPO expects them, and observations hold none."""
    if find_part(obs_space, col.ACTION_MASK) is not None:
        return
    name = type(getattr(env, "unwrapped", env)).__name__
    if isinstance(infos, Mapping) and col.ACTION_MASK in infos:
        wrapped = "its single envs" if isinstance(env, gym.vector.VectorEnv) else "the env"
        _warn_of_masks(name, f"the infos hold an `{col.ACTION_MASK}`", f"Wrap {wrapped} in InfoActionMask")
        return
    with contextlib.suppress(Exception):  # no wrapper has it, and neither has the env; or a property fails
        if callable(env.get_wrapper_attr("action_masks")):
            remedy = f"Put the mask into `info[{col.ACTION_MASK!r}]` and wrap the env in InfoActionMask"
            _warn_of_masks(name, "the env has a method `action_masks`", remedy)


@functools.cache
def _warn_of_masks(env_name: str, found: str, remedy: str) -> None:
    _log.warning(
        "%s: %s, but observations hold no mask, so forbidden actions are taken. %s, or let its observation be a Dict "
        "with the parts `observation` and `%s`.",
        *(env_name, found, remedy, col.ACTION_MASK),
    )


class ReducedEnv(NamedTuple):
    """An env without those parts of its observation that Etude can't handle."""

    env: Any
    drop: tuple[str, ...]
    """The parts to leave out, see `spaces.find_part`."""


def reduced_spaces(obs_spaces: tuple[Space, ...], drop: tuple[str, ...]) -> tuple[Space, ...]:
    """The agents' observation spaces without the parts in ``drop`` that Etude can't handle.

    Raises:
        SpaceError: no agent's observation has such a part.
    """
    for path in drop:
        if all(find_part(space, path) is None for space in obs_spaces):
            raise SpaceError(f"there is no `{path}` to drop in the observation space {obs_spaces[0]}.")
    unhandled = [
        [path for path in drop if (part := find_part(space, path)) is not None and not is_handled(part)]
        for space in obs_spaces
    ]
    return tuple(without(space, paths) for space, paths in zip(obs_spaces, unhandled, strict=True))


# -- what an env returns ----------------------------------------------------------------------------------------------

NUMBERS = frozenset((float, int, bool, np.float64, np.float32, np.int64, np.bool_))
"""Types of rewards that need no further check."""

FLAGS = frozenset((bool, np.bool_))
"""Types of flags that need no further check."""

_UNPACKED = re.compile(r"values to unpack \(expected [25]")  # Python's message for old tuples


class EnvValueError(EnvError):
    """A step returned a reward or a flag that is invalid; later ones may be valid."""


def check_info(info: Any) -> None:
    """Raise an EnvValueError if an info is not a dict."""
    if not isinstance(info, Mapping):
        raise EnvValueError(
            f"`info` is of type {type(info).__name__}, but must be a dict. Return {{}} if there is none."
        )


def check_reward(reward: Any, of: str = "") -> None:
    """Raise an EnvValueError if a reward is not one number. NaN and infinity are found elsewhere.

    ``of`` says in the message whose reward it is.
    """
    number = np.asarray(reward)
    if number.dtype.kind not in "bifu" or number.shape:
        raise EnvValueError(
            f"`reward`{of} is {reward!r}, not a finite number. Return one float from step, such as float(reward[0]) or "
            "the weighted sum of several objectives. The rewards of several agents are a dict by agent, as in "
            "PettingZoo's ParallelEnv."
        )


def check_flags(terminated: Any, truncated: Any, *, allow_numbers: bool = False, of: str = "") -> None:
    """Raise an EnvValueError if the flags are not booleans, nor numbers where these are allowed.

    ``of`` says in the message whose flags they are.
    """
    known = bool | np.bool_ | (int | float | np.number if allow_numbers else bool)
    for name, flag in ((col.TERMINATED, terminated), (col.TRUNCATED, truncated)):
        if not isinstance(flag, known):
            raise EnvValueError(f"`{name}`{of} is {flag!r}, not True or False.")


def warn_of_closing(name: str, error: BaseException) -> None:
    """Log that an env could not be closed. Its earlier results are not affected."""
    _log.warning("%s fails to close an env: %s", name, described(error))


# -- the old Gym API ------------------------------------------------------------------------------------------------


def reset_env(env: gym.Env[Any, Any], seed: int | None) -> tuple[Any, Any]:
    """Reset a Gymnasium env; return the observation and the info.

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


def bad_step_error(env: object, given: Any) -> EnvError:
    """The error for an env whose step returned ``given``."""
    return old_api(env, f"its step returned {_shown(given)}")


def make_error(name: str, error: BaseException) -> EnvError:
    """The error that the function ``name`` raised instead of making an env."""
    text = f"{name} fails to make an env: {described(error)}"
    if re.search(r"per process|only one (instance|emulator)|multiple \w+ instances", str(error), re.IGNORECASE):
        text += " If a process can have only one, give each its own: workers=Workers(num_workers=4, envs_per_worker=1)."
    return EnvError(text)


def not_one_env(env: object) -> EnvError:
    """The error for a vector env where one env is wanted."""
    return EnvError(
        f"a {type(env).__name__} steps its envs itself: leave workers out (num_workers=0), or give a function that "
        "makes one env."
    )


def unpacked_wrongly(error: BaseException) -> bool:
    """Whether one of Gymnasium's wrappers failed to unpack the return value of an env with the old API."""
    if not isinstance(error, ValueError) or not _UNPACKED.search(str(error)):
        return False
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return bool(last) and "gymnasium" in last[0].filename.replace("\\", "/").split("/")


def old_api(env: object, found: str) -> EnvError:
    """The error for an env that does not follow Gymnasium's API."""
    inner = getattr(env, "unwrapped", env)
    return EnvError(
        f"{type(inner).__name__} does not have Gymnasium's API: {found}. reset(seed=..., options=...) must return "
        "`(obs, info)`, and step(action) five values, `(obs, reward, terminated, truncated, info)`. Envs of the old "
        "Gym return `obs` and `(obs, reward, done, info)`: change that in the env, or wrap an env of the package `gym` "
        "in shimmy.GymV21CompatibilityV0(env=env)."
    )


def _shown(given: Any) -> str:
    if isinstance(given, tuple | list):
        return f"{len(given)} values ({', '.join(type(part).__name__ for part in given[:6])})"
    return f"one {type(given).__name__}"
