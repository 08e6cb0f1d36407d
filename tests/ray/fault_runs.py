# SPDX-License-Identifier: Apache-2.0
"""What runs from the command line need in order to fail: envs, a callback, a connector, a loss."""

import os
import threading
from pathlib import Path
from typing import Any

from runner_envs import Walk

import etude


class Stuck(Walk):
    """Hangs for ever in its 100th step, and tells so by the file that the environment names."""

    steps = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps == 100:
            Path(os.environ["STUCK"]).touch()
            threading.Event().wait()
        return super().step(action)


class Wheel(Walk):
    """Fails in each step."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        raise ValueError("a wheel came off")


class Drawer(etude.Callback):
    """Fails at the end of an episode."""

    def on_episode_end(self, episode: Any) -> None:
        """At the end of each."""
        raise KeyError("no such drawer")


def pipe(obs: Any) -> Any:
    """A connector that fails."""
    raise IndexError("a pipe burst")


class Lossy(etude.PPO):
    """Its loss fails."""

    def loss(self, module: Any, batch: Any) -> Any:
        """At once."""
        raise ArithmeticError("at a loss")
