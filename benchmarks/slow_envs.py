# SPDX-License-Identifier: Apache-2.0
"""Envs whose steps cost what a benchmark asks for, and four CartPoles that are one env of four agents."""

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.spaces import Box, Discrete


class Costly(CartPoleEnv):
    """CartPole, each step of which takes ``cost`` seconds of CPU time longer.

    CPU time, so that a process that the machine puts off does no work meanwhile.
    """

    cost = 0.0

    def step(self, action: Any) -> Any:
        """As CartPole's."""
        if self.cost:
            until = time.thread_time() + self.cost
            while time.thread_time() < until:
                pass
        return super().step(action)


class Costly100(Costly):
    """100 microseconds longer."""

    cost = 100e-6


class Uneven(CartPoleEnv):
    """CartPole, each step of which takes 0.2 ms of CPU time longer, and one in twenty sleeps for 20 ms instead."""

    def reset(self, **given: Any) -> Any:
        """As CartPole's."""
        obs, info = super().reset(**given)
        self._draws = np.random.default_rng(self.np_random.integers(2**31))
        return obs, info

    def step(self, action: Any) -> Any:
        """As CartPole's."""
        if self._draws.random() < 0.05:
            time.sleep(20e-3)
        else:
            until = time.thread_time() + 0.2e-3
            while time.thread_time() < until:
                pass
        return super().step(action)


class FourCartPoles:
    """Four CartPoles as one env of four agents, in the form of a PettingZoo ParallelEnv.

    An agent whose pole falls leaves; the episode is over when all have left.
    """

    metadata: dict[str, Any] = {"name": "four_cartpoles"}  # noqa: RUF012
    possible_agents = ["cart_0", "cart_1", "cart_2", "cart_3"]  # noqa: RUF012

    def __init__(self) -> None:
        self._envs = {agent: gym.make("CartPole-v1").unwrapped for agent in self.possible_agents}
        self._steps = 0
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Box:
        """CartPole's."""
        return self._envs[agent].observation_space  # type: ignore[return-value]

    def action_space(self, agent: str) -> Discrete:
        """CartPole's."""
        return self._envs[agent].action_space  # type: ignore[return-value]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        """All four begin."""
        self.agents = list(self.possible_agents)
        self._steps = 0
        seeds = [None if seed is None else seed + i for i in range(len(self.agents))]
        obs = {agent: self._envs[agent].reset(seed=s)[0] for agent, s in zip(self.agents, seeds, strict=True)}
        return obs, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        """Those that are left step."""
        self._steps += 1
        late = self._steps >= 500
        obs, rewards, terminations, truncations = {}, {}, {}, {}
        for agent, action in actions.items():
            obs[agent], rewards[agent], terminations[agent], *_ = self._envs[agent].step(action)
            truncations[agent] = late
        self.agents = [agent for agent in self.agents if not (late or terminations.get(agent, False))]
        return obs, rewards, terminations, truncations, {agent: {} for agent in actions}

    def close(self) -> None:
        """Close all four."""
        for env in self._envs.values():
            env.close()
