# SPDX-License-Identifier: Apache-2.0
"""Settings about how long segments may be."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from etude.algorithms import PPO, PPOConfig
from etude.envs import Workers
from etude.errors import SettingsError


def test_an_iteration_of_which_nothing_is_left() -> None:
    algorithm = PPO(PPOConfig(env="CartPole-v1", min_trajectory_length=1000, num_steps=64, num_envs=2, seed=1))
    with pytest.raises(SettingsError, match=r"every segment .* shorter than `trajectories.min_length` \(1000\)"):
        algorithm.train()


def test_what_is_dropped_is_reported() -> None:
    config = PPOConfig(
        env="CartPole-v1", min_trajectory_length=15, whole_episodes=True, num_steps=200, num_envs=2, seed=1
    )
    result = PPO(config).train()
    assert result.metrics["dropped_steps"] > 0
    assert result.losses


def test_an_episode_is_reset_at_its_greatest_length() -> None:
    config = PPOConfig(
        env="CartPole-v1", max_trajectory_length=9, at_max_length="reset", num_steps=200, num_envs=2, seed=1
    )
    exp = PPO(config).runner.collect(num_steps=300)
    assert (exp.segments.t_start == 0).all() | (exp.lengths <= 9).all()
    assert exp.segments.truncated.any()
    assert exp.lengths.max() <= 9


def test_no_length_to_reset_at() -> None:
    with pytest.raises(SettingsError, match="there is no `trajectories.max_length` to reset at"):
        PPOConfig(env="CartPole-v1", at_max_length="reset")


class Endless(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 1.0, False, False, {}


@pytest.mark.parametrize(
    "given",
    [
        {"workers": Workers(max_steps=7)},
        {"workers": Workers(num_workers=2, mode="thread", max_steps=7, step_timeout=60)},
        {"max_trajectory_length": 7, "at_max_length": "reset"},
    ],
)
def test_evaluation_truncates_as_training_does(given: dict[str, Any]) -> None:
    algorithm = PPO(PPOConfig(env=Endless, num_envs=2, seed=1, **given))
    assert algorithm.evaluate(3).length_mean == 7
    algorithm.close()
