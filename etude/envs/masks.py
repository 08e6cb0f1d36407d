# SPDX-License-Identifier: Apache-2.0
"""Action masks of envs that return them in ``info``."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from etude.columns import ACTION, ACTION_MASK
from etude.errors import EnvError
from etude.spaces import leaves


class InfoActionMask(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Moves ``info["action_mask"]``, which Taxi has for example, into the observation, where modules apply it.

    The observation becomes ``Dict(observation=..., action_mask=...)``, as in PettingZoo. The mask is MultiBinary, int8,
    with one number for each choice of the discrete parts of the action space, in their order: 1 if it is allowed.

    Args:
        env: Its ``info`` must contain the mask after each reset and step.

    Raises:
        EnvError: the action space has no discrete part; or the mask is missing, or does not fit the action space.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        gym.utils.RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)
        parts = leaves(env.action_space, ACTION).values()
        self._size = sum(spaces.flatdim(leaf) for leaf in parts if not isinstance(leaf, spaces.Box))
        if not self._size:
            raise EnvError(f"the action space {env.action_space} has no choices that a mask could forbid.")
        mask = spaces.MultiBinary(self._size)
        self.observation_space = spaces.Dict({"observation": env.observation_space, ACTION_MASK: mask})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the env; the observation includes the mask."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._masked(obs, info, "reset"), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the env; the observation includes the mask."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._masked(obs, info, "step"), reward, terminated, truncated, info

    def _masked(self, obs: Any, info: dict[str, Any], method: str) -> dict[str, Any]:
        name = type(self.env.unwrapped).__name__
        if ACTION_MASK not in info:
            raise EnvError(
                f"the info that {method} of {name} returns has no {ACTION_MASK!r} (it has {sorted(info)}): "
                "InfoActionMask is for envs that return one after each reset and step."
            )
        mask = np.asarray(info[ACTION_MASK])
        if mask.size != self._size or not ((mask == 0) | (mask == 1)).all():
            raise EnvError(
                f"info[{ACTION_MASK!r}] that {method} of {name} returns is {mask}: it needs {self._size} numbers, 0 or "
                f"1, one for each choice of {self.env.action_space}."
            )
        return {"observation": obs, ACTION_MASK: mask.reshape(-1).astype(np.int8)}
