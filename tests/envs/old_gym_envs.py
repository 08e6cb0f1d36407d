# SPDX-License-Identifier: Apache-2.0
"""Envs that do not have Gymnasium's API, and one whose rewards are arrays."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

MADE: list[Any] = []


class Plain(gym.Env[Any, Any]):
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        MADE.append(type(self))

    def obs(self) -> Any:
        return np.zeros(2, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.obs(), {}

    def step(self, action: Any) -> Any:
        return self.obs(), 0.0, False, False, {}


class BareReset(Plain):
    """Of two numbers: they look like a pair."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.obs()


class LongReset(BareReset):
    observation_space = spaces.Box(-1, 1, (5,), np.float32)

    def obs(self) -> Any:
        return np.zeros(5, np.float32)


class NoSeed(Plain):
    def reset(self) -> Any:  # type: ignore[override]
        return self.obs()


class FourValues(Plain):
    def step(self, action: Any) -> Any:
        return self.obs(), 0.0, False, {}


class NoValue(Plain):
    def step(self, action: Any) -> Any:
        return None


def limited() -> Any:
    return gym.wrappers.TimeLimit(FourValues(), 10)


def counted() -> Any:
    return gym.wrappers.RecordEpisodeStatistics(LongReset())


class ArrayReward(Plain):
    def step(self, action: Any) -> Any:
        return self.obs(), np.ones(1), False, False, {}


class NotInherited:
    observation_space, action_space = Plain.observation_space, Plain.action_space
    reset, step = BareReset.reset, FourValues.step


class Unpacks(Plain):
    """Makes a mistake of its own that looks alike."""

    def step(self, action: Any) -> Any:
        one, two, three, four, five = self.obs(), 1, 2, 3  # type: ignore[misc]
        return one, two, three, four, five
