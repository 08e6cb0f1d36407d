# SPDX-License-Identifier: Apache-2.0
"""A game of two: a speaker sees a target and says a word; a listener hears the word and must name the target."""

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

TARGETS, WORDS, ROUNDS = 4, 6, 8


class Signalling(ParallelEnv):
    """Both are paid 1 where the listener names the target that the speaker saw. A round is two steps.

    In even steps only the speaker's action counts, in odd ones only the listener's. By chance they are paid a quarter
    of ROUNDS, and no listener can do better that doesn't understand its speaker.
    """

    metadata: dict[str, Any] = {"name": "signalling"}  # noqa: RUF012

    def __init__(self) -> None:
        self.possible_agents = ["speaker", "listener"]
        self.observation_spaces = {
            "speaker": spaces.Box(0, 1, (TARGETS,), np.float32),
            "listener": spaces.Discrete(WORDS + 1),
        }
        self.action_spaces = {"speaker": spaces.Discrete(WORDS), "listener": spaces.Discrete(TARGETS)}

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None or not hasattr(self, "_draws"):
            self._draws = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self._t, self._word = 0, WORDS
        self._target = int(self._draws.integers(TARGETS))
        return self._obs(), {agent: {} for agent in self.agents}

    def _obs(self) -> dict[str, Any]:
        return {"speaker": np.eye(TARGETS, dtype=np.float32)[self._target], "listener": self._word}

    def step(self, actions: dict[str, Any]) -> Any:
        reward = 0.0
        if self._t % 2:
            reward = float(actions["listener"] == self._target)
            self._target, self._word = int(self._draws.integers(TARGETS)), WORDS
        else:
            self._word = int(actions["speaker"])
        self._t += 1
        over = self._t == 2 * ROUNDS
        everyone = list(self.agents)
        if over:
            self.agents = []
        obs = self._obs()
        return (
            {agent: obs[agent] for agent in everyone},
            dict.fromkeys(everyone, reward),
            dict.fromkeys(everyone, over),
            dict.fromkeys(everyone, False),
            {agent: {} for agent in everyone},
        )
