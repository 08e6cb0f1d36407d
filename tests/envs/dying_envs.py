# SPDX-License-Identifier: Apache-2.0
"""Envs whose worker processes end."""

import multiprocessing
import os
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Dies(gym.Env[Any, Any]):
    """Ends its process in the first step."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        os._exit(7)


class Breaks(Dies):
    """Fails in the first step, and is of no use then."""

    is_broken = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        assert not self.is_broken
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        self.is_broken = True
        raise RuntimeError("it breaks")


def made_in_the_first_worker_alone() -> gym.Env[Any, Any]:
    """The first worker takes its time, and the second ends meanwhile."""
    if multiprocessing.current_process().name.endswith("-1"):
        time.sleep(1.0)
    else:
        os._exit(3)
    return Dies()
