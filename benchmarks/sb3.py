# SPDX-License-Identifier: Apache-2.0
"""Stable-Baselines3 as a peer: the same work through its own public classes."""

import sys
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

from benchmarks.harness import ENV, Work

Columns = dict[str, Any]


def _ppo(num_envs: int, num_steps: int, env: str = ENV, **settings: Any) -> tuple[PPO, BaseCallback]:
    """A PPO (2x64 tanh, as is its default) that is ready to collect, and its callback."""
    model = PPO("MlpPolicy", make_vec_env(env, num_envs), n_steps=num_steps, device="cpu", seed=0, **settings)
    _, callback = model._setup_learn(1_000_000)
    return model, callback


def collecting(num_envs: int, num_steps: int, env: str = ENV) -> Work:
    """Collect ``num_steps`` of each env."""
    return _collecting(*_ppo(num_envs, num_steps, env, batch_size=64))


def _collecting(model: PPO, callback: BaseCallback) -> Work:
    env = model.env

    def work() -> int:
        assert env is not None
        model.collect_rollouts(env, callback, model.rollout_buffer, model.n_steps)
        return env.num_envs * model.n_steps

    return work


def iterating(num_envs: int, num_steps: int, env: str, minibatch_size: int, epochs: int) -> Work:
    """Collect ``num_steps`` of each env, and learn from them."""
    model, callback = _ppo(num_envs, num_steps, env, batch_size=minibatch_size, n_epochs=epochs)
    collect = _collecting(model, callback)

    def work() -> int:
        steps = collect()
        model.train()
        return steps

    return work


def stepping(num_steps: int, minibatch_size: int, epochs: int) -> Work:
    """Gradient steps of PPO."""
    model, callback = _ppo(8, num_steps // 8, batch_size=minibatch_size, n_epochs=epochs)
    assert model.env is not None
    model.collect_rollouts(model.env, callback, model.rollout_buffer, num_steps // 8)
    updates = epochs * num_steps // minibatch_size

    def work() -> int:
        model.train()
        return updates

    return work


def replaying(columns: Columns, batch_size: int) -> Work:
    """Random batches from a replay buffer that holds the columns obs, action, reward, next_obs and done."""
    num_steps = len(columns["reward"])
    space = Box(-np.inf, np.inf, columns["obs"].shape[1:], np.float32)
    buffer = ReplayBuffer(num_steps, space, Discrete(2), "cpu", handle_timeout_termination=False)
    buffer.observations[:, 0] = columns["obs"]
    buffer.next_observations[:, 0] = columns["next_obs"]
    buffer.actions[:, 0, 0] = columns["action"]
    buffer.rewards[:, 0] = columns["reward"]
    buffer.dones[:, 0] = columns["done"]
    buffer.pos, buffer.full = 0, True

    def work() -> int:
        for _ in range(10):
            buffer.sample(batch_size)
        return 10 * batch_size

    return work


class _Until(BaseCallback):
    """Stops at a mean return over the last 100 episodes."""

    def __init__(self, goal: float) -> None:
        super().__init__()
        self.goal = goal

    def _on_step(self) -> bool:
        episodes = self.model.ep_info_buffer
        assert episodes is not None
        return len(episodes) < 100 or sum(episode["r"] for episode in episodes) / len(episodes) < self.goal


def to_450(seed: int) -> None:
    """Train until the mean of the last 100 returns is 450, with the settings for CartPole of SB3's zoo."""
    model = PPO(
        "MlpPolicy",
        make_vec_env(ENV, 8, seed=seed),
        n_steps=32,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=20,
        ent_coef=0.0,
        learning_rate=lambda left: 1e-3 * left,
        clip_range=lambda left: 0.2 * left,
        device="cpu",
        seed=seed,
    )
    model.learn(100_000, callback=_Until(450))
    episodes = model.ep_info_buffer
    assert episodes is not None
    print(sum(episode["r"] for episode in episodes) / len(episodes))


if __name__ == "__main__":
    to_450(int(sys.argv[1]))
