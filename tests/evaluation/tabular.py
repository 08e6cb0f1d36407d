# SPDX-License-Identifier: Apache-2.0
"""A Markov decision process of three states whose values are known exactly, and policies that are tables."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from etude.algorithms import PPO, PPOConfig
from etude.experience import Experience, Segments
from etude.modules import Output

STATES, ENDS, GAMMA = 3, 0.25, 0.9
START = np.array([0.5, 0.5, 0.0])
MOVES = np.array(
    [[[0.1, 0.6, 0.3], [0.7, 0.1, 0.2]], [[0.3, 0.3, 0.4], [0.0, 0.2, 0.8]], [[0.5, 0.4, 0.1], [0.1, 0.9, 0]]]
)
"""``[state, action, next state]``, where the episode goes on."""
REWARDS = np.array([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.5]])

PLAYS = np.array([[0.0, 0.0], [0.3, 0.0], [0.0, 0.2]])
"""Logits of the policy that plays."""
WANTS = np.array([[0.5, 0.0], [0.0, 0.7], [0.0, 0.9]])
"""Logits of the policy that is evaluated."""


class Chain(gym.Env[Any, Any]):
    """Ends after each step with probability `ENDS`; the observation is the state as one-hot."""

    observation_space = spaces.Box(0, 1, (STATES,), np.float32)
    action_space = spaces.Discrete(2)

    def _seen(self) -> Any:
        return np.eye(STATES, dtype=np.float32)[self.state]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.state = int(self.np_random.choice(STATES, p=START))
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        reward = REWARDS[self.state, action]
        self.state = int(self.np_random.choice(STATES, p=MOVES[self.state, action]))
        return self._seen(), float(reward), bool(self.np_random.random() < ENDS), False, {}


class Table(nn.Module):
    """Logits of two actions by state."""

    def __init__(self, logits: Any) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits, dtype=torch.float32))

    def forward(self, obs: torch.Tensor) -> Output:
        return Output(dist_inputs=obs @ self.logits, value=torch.zeros(len(obs)))


def policy(logits: Any) -> PPO:
    """An algorithm with this policy."""
    return PPO(PPOConfig(env=Chain, module=Table(logits), seed=0, num_envs=1))


def probabilities(logits: Any) -> Any:
    p = np.exp(logits)
    return p / p.sum(1, keepdims=True)


def exact(logits: Any, gamma: float = GAMMA) -> tuple[float, Any, Any]:
    """The value of an episode, of states, and of actions in them, in closed form."""
    pi = probabilities(logits)
    moves = np.einsum("sa,sat->st", pi, MOVES) * (1 - ENDS)
    values = np.linalg.solve(np.eye(STATES) - gamma * moves, (pi * REWARDS).sum(1))
    return float(START @ values), values, REWARDS + gamma * (1 - ENDS) * MOVES @ values


def played(episodes: int, seed: int, logits: Any = PLAYS) -> Experience:
    """Episodes of a policy, all played side by side."""
    rng = np.random.default_rng(seed)
    pi = probabilities(logits)
    state = rng.choice(STATES, episodes, p=START)
    running, steps = np.ones(episodes, bool), []
    final = np.zeros(episodes, np.int64)
    while running.any():
        action = (rng.random(episodes) < pi[state, 1]).astype(np.int64)
        following = (rng.random((episodes, 1)) > MOVES[state, action].cumsum(1)).sum(1).clip(max=STATES - 1)
        steps.append((running.copy(), state, action))
        ends = running & (rng.random(episodes) < ENDS)
        final[ends] = following[ends]
        running &= ~ends
        state = following
    runs, states, actions = (np.stack(column, 1) for column in zip(*steps, strict=True))
    s, a = states[runs], actions[runs]
    columns = {
        "obs": np.eye(STATES, dtype=np.float32)[s],
        "action": a,
        "reward": REWARDS[s, a],
        "logp": np.log(pi[s, a]).astype(np.float32),
    }
    offsets = np.concatenate([[0], runs.sum(1).cumsum()]).astype(np.int64)
    segments = Segments.of(episodes, episode_id=[f"{seed}-{i}" for i in range(episodes)], terminated=True)
    return Experience(columns, offsets, segments, {"obs": np.eye(STATES, dtype=np.float32)[final]})
