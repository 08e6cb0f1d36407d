# SPDX-License-Identifier: Apache-2.0
"""Envs that are learned in a second, each of which a certain mistake would spoil; and networks of a user's own."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from etude.modules import Output
from etude.modules.distributions import distribution_for


class Echo(gym.Env[Any, Any]):
    """Reward 1 for doing what is shown, which changes at each step: credit given to another step teaches nothing."""

    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def _look(self) -> Any:
        self.shown = int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self.shown]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._look(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        reward = float(action == self.shown)
        return self._look(), reward, self.t == 10, False, {}


class Toil(gym.Env[Any, Any]):
    """One step an episode. In state 0, work (action 1) costs 0.1 now and leads to state 1, where all is well paid.

    Working pays only where what follows counts: where the episode is truncated, and not where it terminates.
    """

    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, *, terminates: bool = False) -> None:
        self.terminates = terminates

    def _look(self) -> Any:
        return np.eye(2, dtype=np.float32)[self.state]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.state = int(self.np_random.integers(2))
        return self._look(), {}

    def step(self, action: Any) -> Any:
        reward = 1.0 if self.state else (-0.1 if action else 0.2)
        self.state = int(self.state or action)
        return self._look(), reward, self.terminates, not self.terminates, {}


class Switchboard(gym.Env[Any, Any]):
    """Dict observations, nested, with a picture; MultiDiscrete actions: repeat what the picture and the number say."""

    observation_space = spaces.Dict(
        {
            "panel": spaces.Dict({"lamp": spaces.Discrete(3), "noise": spaces.Box(-1, 1, (2,), np.float64)}),
            "picture": spaces.Box(0, 255, (2, 2), np.uint8),
        }
    )
    action_space = spaces.MultiDiscrete([3, 2])

    def _look(self) -> Any:
        self.lamp, self.light = int(self.np_random.integers(3)), int(self.np_random.integers(2))
        return {
            "panel": {"lamp": np.int64(self.lamp), "noise": self.np_random.uniform(-1, 1, 2)},
            "picture": np.full((2, 2), 255 * self.light, np.uint8),
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._look(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        reward = 0.5 * float(action[0] == self.lamp) + 0.5 * float(action[1] == self.light)
        return self._look(), reward, False, self.t == 10, {}


def make_acrobot() -> gym.Env[Any, Any]:
    """In turn, with a limit on time and connectors to come: what has no vectorised version."""
    return gym.make("Acrobot-v1", max_episode_steps=60)


class OwnNet(nn.Module):
    """A user's own, made for any vector observation; a parameter shared by actor and critic, dropout and all."""

    def __init__(self, obs_space: Any, action_space: Any, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs_space.shape[0], width), nn.Tanh(), nn.Dropout(0.1))
        self.policy = nn.Linear(width, distribution_for(action_space).num_inputs)
        self.critic = nn.Linear(width, 1)

    def forward(self, obs: torch.Tensor) -> Output:
        hidden = self.body(obs)
        return Output(dist_inputs=self.policy(hidden), value=self.critic(hidden))


def double(obs: Any) -> Any:
    return obs * 2
