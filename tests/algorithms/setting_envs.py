# SPDX-License-Identifier: Apache-2.0
"""The envs of the test of every setting. Workers import this file, so it imports little."""

import os
import threading
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Walk(gym.Env[Any, Any]):
    """A point that is pushed about in episodes of 3 to 12 steps; some end, some are truncated."""

    observation_space: Any = spaces.Box(-9, 9, (3,), np.float32)
    action_space: Any = spaces.Box(-1, 1, (1,), np.float32)
    least = 3

    def __init__(self, render_mode: str | None = None) -> None:
        self.at = np.zeros(3)

    def _look(self) -> Any:
        return self.at.clip(-9, 9).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.length = 0, int(self.np_random.integers(self.least, 13))
        self.at = self.np_random.normal(size=3)
        return self._look(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        push = float(np.sum(action))
        self.at = self.at + 0.3 * push + 0.1 * self.np_random.normal(size=3)
        ends, odd = self.t == self.length, self.length % 2 == 1
        return self._look(), 1.0 - abs(float(self.at[0])), ends and not odd, ends and odd, {}


class Choice(Walk):
    """The same with one of three pushes."""

    action_space = spaces.Discrete(3)

    def step(self, action: Any) -> Any:
        return super().step(float(action) - 1.0)


class Camera(Walk):
    """The same, seen as a picture."""

    observation_space = spaces.Box(0, 255, (8, 8, 1), np.uint8)

    def _look(self) -> Any:
        return np.full((8, 8, 1), np.clip(40 * self.at[0] + 128, 0, 255), np.uint8)


class ChoiceCamera(Camera, Choice):
    """Both."""


class Longer(Walk):
    """Episodes of 9 steps at least."""

    least = 9


class LongerChoice(Choice):
    """The same."""

    least = 9


class Flaky(Walk):
    """Fails now and then."""

    def step(self, action: Any) -> Any:
        if self.np_random.random() < 0.05:
            raise RuntimeError("out of order")
        return super().step(action)


class FailsAtFirst(Walk):
    """The first reset of a run fails."""

    failed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if not FailsAtFirst.failed:
            FailsAtFirst.failed = True
            raise RuntimeError("not ready")
        return super().reset(seed=seed)


class Stalls(Walk):
    """The first step of each copy takes a while."""

    stalled = False

    def step(self, action: Any) -> Any:
        if not self.stalled:
            self.stalled = True
            threading.Event().wait(1.0)
        return super().step(action)


class Costly(Walk):
    """Each step costs 1."""

    def step(self, action: Any) -> Any:
        obs, _, terminated, truncated, info = super().step(action)
        return obs, -1.0, terminated, truncated, info


class Tidy(Walk):
    """Needs a while to close, and leaves a file then."""

    def close(self) -> None:
        threading.Event().wait(1.0)
        Path(os.environ["ETUDE_TEST_OUT"], "closed").touch()


class NumberFlags(Walk):
    """Says 0 and 1 where it should say False and True."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, int(terminated), int(truncated), info


class Two:
    """Two points, pushed by an agent each; one of them leaves earlier."""

    kind: ClassVar[type[Walk]] = Walk
    possible_agents = ("left", "right")

    def __init__(self) -> None:
        self.walks = {name: self.kind() for name in self.possible_agents}
        self.observation_spaces = {name: walk.observation_space for name, walk in self.walks.items()}
        self.action_spaces = {name: walk.action_space for name, walk in self.walks.items()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        seeds = (None, None) if seed is None else (2 * seed, 2 * seed + 1)
        self.there = dict(self.walks)
        made = zip(self.walks.items(), seeds, strict=True)
        return {name: walk.reset(seed=own)[0] for (name, walk), own in made}, {}

    def step(self, action: Any) -> Any:
        done = {name: self.there[name].step(own) for name, own in action.items()}
        ended = {name: bool(one[2] or one[3]) for name, one in done.items()}
        self.there = {name: walk for name, walk in self.there.items() if not ended.get(name)}
        obs, rewards = ({name: one[i] for name, one in done.items()} for i in (0, 1))
        return obs, rewards, ended | {"__all__": not self.there}, {"__all__": False}, {}


class TwoChoices(Two):
    """The same with discrete actions."""

    kind = Choice


class TwoCameras(Two):
    """The same, seen as pictures."""

    kind = Camera


class TwoChoiceCameras(Two):
    """Both."""

    kind = ChoiceCamera
