# SPDX-License-Identifier: Apache-2.0
"""Envs that show what no array can hold. Workers import this file, so it imports little."""

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces

UNHANDLED: dict[str, Any] = {
    "Text": spaces.Text(5),
    "Graph": spaces.Graph(spaces.Discrete(2), spaces.Discrete(2)),
    "Sequence": spaces.Sequence(spaces.Discrete(3)),
    "OneOf": spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (1,))]),
}


class Talking(gym.Env[Any, Any]):
    """Shows numbers, a mode, and something that no array can hold, somewhere inside."""

    def __init__(self, kind: str = "Text", inside: bool = False) -> None:
        said: Any = UNHANDLED[kind]
        if inside:
            said = spaces.Dict({"now": said, "loud": spaces.Discrete(2)})
        box = spaces.Box(-1, 1, (3,), np.float32)
        self.observation_space = spaces.Dict({"mode": spaces.Discrete(4), "numbers": box, "said": said})
        self.action_space = spaces.Discrete(2)

    def look(self) -> Any:
        self.t += 1
        return {**self.observation_space.sample(), "mode": self.t % 4}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.look(), {}

    def step(self, action: Any) -> Any:
        return self.look(), 1.0, False, self.t == 9, {}


class Graphs(Talking):
    def __init__(self) -> None:
        super().__init__("Graph")


class Sequences(Talking):
    def __init__(self) -> None:
        super().__init__("Sequence")


class OneOfs(Talking):
    def __init__(self) -> None:
        super().__init__("OneOf")


class Inside(Talking):
    def __init__(self) -> None:
        super().__init__(inside=True)


class Pair:
    """Two agents, one of whom is told something."""

    possible_agents: ClassVar[list[str]] = ["hears", "deaf"]

    def __init__(self) -> None:
        numbers = spaces.Box(-1, 1, (2,), np.float32)
        self.observation_spaces = {
            "hears": spaces.Dict({"numbers": numbers, "said": spaces.Text(4)}),
            "deaf": spaces.Dict({"numbers": numbers}),
        }
        self.action_spaces = dict.fromkeys(self.possible_agents, spaces.Discrete(2))

    def look(self) -> Any:
        numbers = np.zeros(2, np.float32)
        return {"hears": {"numbers": numbers, "said": "go"}, "deaf": {"numbers": numbers}}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self.look(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.look(), dict.fromkeys(action, 1.0), {"__all__": self.t == 5}, {"__all__": False}, {}
