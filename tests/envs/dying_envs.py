# SPDX-License-Identifier: Apache-2.0
"""Envs whose worker processes end."""

import multiprocessing
import os
import time
from pathlib import Path
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


class TwoLives:
    """Agent "a" ends first, and then the process does; in the second life, "b" ends first, and "a" goes on.

    An observation is the number of the life times 100, plus the step.

    Args:
        mark: A file; the first life is the one that makes it.
    """

    possible_agents = ("a", "b")
    observation_spaces = dict.fromkeys(possible_agents, spaces.Box(0, 999, (1,), np.float32))
    action_spaces = dict.fromkeys(possible_agents, spaces.Discrete(2))

    def __init__(self, mark: Path) -> None:
        self.mark, self.life = mark, 1 + mark.exists()

    def obs(self, *agents: str) -> dict[str, Any]:
        return {agent: np.array([100 * self.life + self.t], np.float32) for agent in agents}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self.obs("a", "b"), {}

    def step(self, action: dict[str, int]) -> Any:
        self.t += 1
        if self.life == 1:
            if self.t == 2:
                self.mark.touch()
                os._exit(7)
            return self.obs("a", "b"), {"a": -5.0}, {"a": True}, {}, {}
        there = ("a", "b") if self.t <= 2 else ("a",)
        return self.obs(*there), dict.fromkeys(there, 1.0), {"b": self.t == 2, "a": self.t == 4}, {}, {}


class FailsAfterAnEnd:
    """Agent "a" wins in its second step; nobody acts next, and the step that follows fails.

    Args:
        others: Whether agent "b" has begun, too.
    """

    possible_agents = ("a", "b")
    observation_spaces = dict.fromkeys(possible_agents, spaces.Box(0, 9, (1,), np.float32))
    action_spaces = dict.fromkeys(possible_agents, spaces.Discrete(2))

    def __init__(self, others: bool) -> None:
        self.others = others

    def obs(self, *agents: str) -> dict[str, Any]:
        return {agent: np.array([self.t], np.float32) for agent in agents}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self.obs("a", *["b"] * self.others), {}

    def step(self, action: dict[str, int]) -> Any:
        self.t += 1
        if self.t == 1:
            return self.obs("a"), {"a": 1.0}, {}, {}, {}
        if self.t == 2:
            return self.obs("a"), {"a": 10.0}, {"a": True}, {}, {}
        raise RuntimeError("the simulator fails")
