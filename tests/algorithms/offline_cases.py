# SPDX-License-Identifier: Apache-2.0
"""Recordings of mixed quality, made by policies written by hand, and batches, for tests of offline algorithms."""

import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from etude.algorithms import PPO, PPOConfig
from etude.learners import Batch
from etude.modules import Module, Output


class Balances(nn.Module):
    """Pushes to where the pole falls: a good policy for CartPole."""

    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        self.push = nn.Parameter(torch.tensor([0.05, 0.2, 1.0, 0.7]))

    def forward(self, obs: Any) -> Output:
        right = 100 * (obs @ self.push)
        return Output(torch.stack([-right, right], -1))


class Guesses(nn.Module):
    """Any action alike; a normal number of deviation 1 for a Box."""

    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        self.inputs = nn.Parameter(torch.zeros(2))

    def forward(self, obs: Any) -> Output:
        return Output(self.inputs.expand(len(obs), 2))


class Swings(nn.Module):
    """A good policy for Pendulum: pumps energy until the pendulum is nearly up, then holds it there."""

    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.zeros(1))

    def forward(self, obs: Any) -> Output:
        cos, sin, speed = obs.unbind(-1)
        pumps = (15.0 - speed.square() / 2 - 15.0 * cos) * speed.sign()
        holds = -(8.0 * torch.atan2(sin, cos) + 2.0 * speed)
        mean = torch.where(cos > 0.85, holds, pumps).clamp(-2.0, 2.0)
        return Output(torch.stack([mean, self.log_std.expand_as(mean)], -1))


def mixed_cartpole(path: Path) -> str:
    """10 good episodes of 500 steps, and 1,000 random ones of about 22."""
    good, bad = (PPO(PPOConfig(env="CartPole-v1", num_envs=1, module=net)) for net in (Balances, Guesses))
    assert good.record(path, 10, seed=1).return_mean == 500
    assert bad.record(path, 1000, seed=2, explore=True, append=True).return_mean < 25
    return str(path)


def mixed_pendulum(path: Path) -> str:
    """10 good episodes of 200 steps, with noise, and 40 random ones."""
    good, bad = (PPO(PPOConfig(env="Pendulum-v1", num_envs=1, module=net)) for net in (Swings, Guesses))
    assert good.record(path, 10, seed=1, explore=True).return_mean > -350
    assert bad.record(path, 40, seed=2, explore=True, append=True).return_mean < -1000
    return str(path)


class Costly(gym.RewardWrapper[Any, Any]):
    """Pendulum with rewards 100 times as large: returns are from -20,000 to -150,000."""

    def __init__(self) -> None:
        super().__init__(gym.make("Pendulum-v1"))

    def reward(self, reward: Any) -> Any:
        return 100.0 * reward


def costly_replay(path: Path) -> str:
    """40 episodes of `Costly` by a policy that gets better, as it acts with less and less noise."""
    for i, std in enumerate((4.0, 2.0, 1.0, 0.5)):
        actor = PPO(PPOConfig(env=Costly, num_envs=1, module=Swings))
        actor.module.net.log_std.data.fill_(math.log(std))
        actor.record(path, 10, seed=i, explore=True, append=i > 0)
    return str(path)


def random_batch(module: Module, action_space: gym.Space[Any], obs_size: int, size: int = 32) -> Batch:
    """Random numbers for each column that critics need; a quarter of the steps terminated."""
    rng = np.random.default_rng(0)
    action_space.seed(0)
    columns = {
        "obs": rng.normal(size=(size, obs_size)).astype(np.float32),
        "next_obs": rng.normal(size=(size, obs_size)).astype(np.float32),
        "action": np.stack([action_space.sample() for _ in range(size)]),
        "reward": rng.normal(size=size).astype(np.float32),
        "terminated": np.arange(size) % 4 == 0,
    }
    return Batch({name: torch.from_numpy(column) for name, column in columns.items()}, module)


def naive_critic(critic: nn.Module, which: int, obs: Tensor, action: Tensor) -> Tensor:
    """One of the twin critics with two hidden layers, written out: ``[B]``."""
    x = torch.cat((obs, action), -1)
    weights = dict(critic.named_parameters())
    for i in range(3):
        x = x @ weights[f"weight_{i}"][which] + weights[f"bias_{i}"][which][0]
        x = torch.relu(x) if i < 2 else x
    return x[:, 0]


def moved(module: nn.Module) -> None:
    """Move a target network away from what it follows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
