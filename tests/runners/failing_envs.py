# SPDX-License-Identifier: Apache-2.0
"""An env that fails at steps which its observations tell of, in several ways."""

import os
import signal
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

LENGTH = 12
"""Steps of each episode that does not fail."""


def fails_at(key: int, episode: int) -> int:
    """The step of an episode that fails, 0 to `LENGTH` - 1; beyond that, none does."""
    return int(np.random.default_rng([key, episode]).integers(0, 2 * LENGTH))


class Failing(gym.Env[Any, Any]):
    """Shows (key, episode, t); the key is of its seed. Step t earns t + 1."""

    observation_space = spaces.Box(-1, 2.0**32, (3,), np.float64)
    action_space = spaces.Discrete(2)
    how = "raise"

    def __init__(self) -> None:
        self.key, self.episode, self.t = -1, -1, 0

    def obs(self) -> Any:
        return np.array([self.key, self.episode, self.t], np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.key = seed
        self.episode, self.t = self.episode + 1, 0
        return self.obs(), {}

    def step(self, action: Any) -> Any:
        fails = self.t == fails_at(self.key, self.episode)
        if fails and self.how == "raise":
            raise RuntimeError("out of order")
        if fails and self.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        self.t += 1
        obs, reward = self.obs(), float(self.t)
        if fails and self.how == "nan":
            obs[1] = np.nan
        if fails and self.how == "inf":
            obs[2] = np.inf
        if fails and self.how == "shape":
            obs = obs[:2]
        if fails and self.how == "scalar":
            obs = np.float64(3.0)
        if fails and self.how == "reward":
            reward = np.nan
        return obs, reward, self.t == LENGTH, False, {}


class Dying(Failing):
    how = "die"


class GivingNaN(Failing):
    how = "nan"


class GivingInf(Failing):
    how = "inf"


class GivingShape(Failing):
    how = "shape"


class GivingScalar(Failing):
    how = "scalar"


class GivingReward(Failing):
    how = "reward"
