# SPDX-License-Identifier: Apache-2.0
"""Envs that fail, hang or wait on purpose, for runners on a cluster. Files tell them when, and whose turn it is."""

import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import ray
from gymnasium import spaces

from etude import Callback


def claimed(path: str) -> bool:
    """Whether this is the first to ask for ``path``, over all processes."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Walk(gym.Env[Any, Any]):
    """Episodes of ``length`` steps, whose observations are drawn from the env's own stream."""

    def __init__(self, length: int = 5) -> None:
        self.observation_space = spaces.Box(-10, 10, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.length, self.t = length, 0

    def obs(self) -> Any:
        return self.np_random.random(2, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.obs(), float(action), self.t >= self.length, False, {}


class OnceBad(Walk):
    """In the first process to come to its 20th step, or a later one, something happens.

    Args:
        folder: Where files say what has happened.
        what: ``hang`` for ever; ``hold`` Python's lock for ever; ``die`` by SIGKILL; ``raise`` a ValueError.
        again: Also in all later processes.
        at: The step.
    """

    def __init__(self, folder: str, what: str, *, again: bool = False, at: int = 20) -> None:
        super().__init__()
        self.folder, self.what, self.again, self.at, self.steps = folder, what, again, at, 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps == self.at and (claimed(f"{self.folder}/{self.what}") or self.again):
            if self.what == "hang":
                threading.Event().wait()
            elif self.what == "hold":
                ctypes.PyDLL(None).pause()
            elif self.what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a wheel came off")
        return super().step(action)


class Slow(Walk):
    """Takes so many seconds for each step."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self.seconds)
        return super().step(action)


class Gated(Walk):
    """One of all envs waits at its ``at``-th step until a file ``go`` is there."""

    def __init__(self, folder: str, at: int = 10) -> None:
        super().__init__()
        self.folder, self.at, self.steps = Path(folder), at, 0
        self.is_slow = claimed(f"{folder}/slow")

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        while self.is_slow and self.steps >= self.at and not (self.folder / "go").exists():
            time.sleep(0.005)
        return super().step(action)


class Unmade(Walk):
    """Can't be made."""

    def __init__(self) -> None:
        raise RuntimeError("no wheels")


class SlowlyMade(Walk):
    """The first of all that are made waits for ever, while it is."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        if claimed(f"{folder}/made"):
            threading.Event().wait()


class UnmadeLater(OnceBad):
    """Dies once; and where it has, it can't be made again."""

    def __init__(self, folder: str) -> None:
        if Path(f"{folder}/die").exists():
            raise RuntimeError("no wheels left")
        super().__init__(folder, "die")


class Wide(Walk):
    """Its observations are so large that they are not sent along with a report, but lie where they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-10, 10, (4000,), np.float32)

    def obs(self) -> Any:
        return self.np_random.random(4000, np.float32)


def another_listens(agent: str, episode: Any) -> str:
    """The module `another` acts in place of `listener`."""
    return "another" if agent == "listener" else agent


def of_nobody(agent: Any, episode: Any) -> str:
    """Knows whose an env's first episode is, and no more."""
    if episode.number:
        raise LookupError("who is that?")
    return "only"


class Giver:
    """An actor that puts things into the store, which are lost when it ends."""

    def give(self, thing: Any) -> list[Any]:
        """References to things."""
        return [ray.put(thing)]


class Noting(Callback):
    """Logs how long episodes were."""

    def on_episode_end(self, episode: Any) -> None:
        """At the end of each."""
        episode.log("length", float(episode.t))
