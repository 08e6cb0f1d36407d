# SPDX-License-Identifier: Apache-2.0
"""Small envs with many agents to learn in: all at once, with jobs of their own, and in turn."""

import math
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv


class CartPoles(ParallelEnv[str, Any, Any]):
    """A CartPole for each agent, in plain floats; an agent leaves when its pole falls, or all after ``max_steps``."""

    metadata = {"name": "cart_poles", "is_parallelizable": True}  # noqa: RUF012
    render_mode = None

    def __init__(self, num_agents: int = 4, max_steps: int = 500) -> None:
        self.possible_agents = [f"cart_{i}" for i in range(num_agents)]
        self.max_steps = max_steps
        high = np.array([4.8, np.inf, 0.42, np.inf], np.float32)
        self._obs_space, self._action_space = spaces.Box(-high, high, dtype=np.float32), spaces.Discrete(2)
        self.random = np.random.default_rng(0)

    def observation_space(self, agent: str) -> Any:
        return self._obs_space

    def action_space(self, agent: str) -> Any:
        return self._action_space

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.agents, self.t = list(self.possible_agents), 0
        obs = self.random.uniform(-0.05, 0.05, (len(self.agents), 4))
        self.state = dict(zip(self.agents, obs.tolist(), strict=True))
        return dict(zip(self.agents, obs.astype(np.float32), strict=True)), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        agents, self.t = self.agents, self.t + 1
        late = self.t >= self.max_steps
        states, fallen = [], {}
        for agent in agents:
            state = self.state[agent] = pushed(self.state[agent], bool(actions[agent]))
            states.append(state)
            fallen[agent] = abs(state[0]) > 2.4 or abs(state[2]) > 0.20943951
        obs = dict(zip(agents, np.array(states, np.float32), strict=True))
        self.agents = [] if late else [agent for agent in agents if not fallen[agent]]
        truncated = {agent: late and not fallen[agent] for agent in agents}
        return obs, dict.fromkeys(agents, 1.0), fallen, truncated, {agent: {} for agent in agents}

    def close(self) -> None:
        pass


def pushed(state: list[float], right: bool) -> list[float]:
    """CartPole's next state (Barto, Sutton and Anderson 1983; constants as in Gymnasium's, Euler's method)."""
    x, x_dot, angle, angle_dot = state
    cos, sin = math.cos(angle), math.sin(angle)
    push = ((10.0 if right else -10.0) + 0.05 * angle_dot * angle_dot * sin) / 1.1
    angle_acc = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos * cos / 1.1))
    x_acc = push - 0.05 * angle_acc * cos / 1.1
    return [x + 0.02 * x_dot, x_dot + 0.02 * x_acc, angle + 0.02 * angle_dot, angle_dot + 0.02 * angle_acc]


class TwoJobs:
    """Two agents with different spaces and easy jobs, by our own protocol: 10 steps, at best 10.0 for each.

    ``echo`` sees which of two lamps is lit, and names it (Discrete): 1.0 where right. ``aim`` sees a target in [-1, 1],
    and gives a number (Box): 1.0 less the distance.
    """

    possible_agents = ["echo", "aim"]  # noqa: RUF012
    observation_spaces = {  # noqa: RUF012
        "echo": spaces.Box(0, 1, (2,), np.float32),
        "aim": spaces.Box(-1, 1, (1,), np.float32),
    }
    action_spaces = {"echo": spaces.Discrete(2), "aim": spaces.Box(-1, 1, (1,), np.float32)}  # noqa: RUF012

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.t = 0
        return self.draw(), {}

    def step(self, action: dict[str, Any]) -> Any:
        distance = abs(float(action["aim"][0]) - self.target)
        reward = {"echo": float(action["echo"] == self.lamp), "aim": 1.0 - distance}
        self.t += 1
        return self.draw(), reward, {}, {"__all__": self.t == 10}, {}

    def draw(self) -> dict[str, Any]:
        self.lamp, self.target = int(self.random.integers(2)), float(self.random.uniform(-1, 1))
        return {"echo": np.eye(2, dtype=np.float32)[self.lamp], "aim": np.array([self.target], np.float32)}


class Nim(AECEnv[str, Any, Any]):
    """Two players in turn take one to three of a heap of sticks; who takes the last one wins: 1, the other -1.

    A player sees how many there are (one-hot) and can always win where that is no multiple of four.
    """

    metadata = {"name": "nim"}  # noqa: RUF012
    possible_agents = ["first", "second"]  # noqa: RUF012

    def __init__(self, most: int = 12) -> None:
        self.most = most
        self._obs_space, self._action_space = spaces.Box(0, 1, (most + 1,), np.float32), spaces.Discrete(3)
        self.random = np.random.default_rng(0)

    def observation_space(self, agent: str) -> Any:
        return self._obs_space

    def action_space(self, agent: str) -> Any:
        return self._action_space

    def observe(self, agent: str) -> Any:
        obs = np.zeros(self.most + 1, np.float32)
        obs[self.heap] = 1
        return obs

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.heap = int(self.random.integers(1, self.most + 1))
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self.agent_selection, self._skip_agent_selection = "first", None

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        other = "second" if agent == "first" else "first"
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        self.heap = max(self.heap - 1 - int(action), 0)
        if self.heap == 0:
            self.rewards[agent], self.rewards[other] = 1.0, -1.0
            self.terminations = dict.fromkeys(self.agents, True)
        self._accumulate_rewards()
        self.agent_selection = other
        self._deads_step_first()

    def close(self) -> None:
        pass
