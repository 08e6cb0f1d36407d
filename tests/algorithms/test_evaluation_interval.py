# SPDX-License-Identifier: Apache-2.0
import pytest

from etude.algorithms import DQN, PPO, DQNConfig, PPOConfig
from etude.errors import SettingsError


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (PPO, PPOConfig(env="CartPole-v1", num_envs=2, num_steps=64, seed=3, evaluation_interval=2)),
        (DQN, DQNConfig(env="CartPole-v1", num_envs=2, iteration_steps=64, seed=3, evaluation_interval=2)),
    ],
)
def test_every_so_many_iterations_an_evaluation_is_in_the_result(cls, config):
    algorithm, alone = cls(config), cls(config)
    results = [algorithm.train() for _ in range(4)]
    assert results[0].evaluation == {}
    assert results[1].evaluation == results[2].evaluation
    assert results[1].evaluation["episodes"] == config.evaluation_episodes
    assert results[1].times["evaluate"] > 0
    assert results[2].times["evaluate"] == 0
    alone.train()
    alone.train()
    expected = alone.evaluate(config.evaluation_episodes, seed=alone._seed)
    found = results[1].evaluation
    assert (found["return_mean"], found["length_mean"], found["updates"]) == (
        expected.return_mean,
        expected.length_mean,
        expected.updates,
    )


def test_training_is_the_same_with_evaluations_and_without():
    config = {"env": "CartPole-v1", "num_envs": 2, "num_steps": 64, "seed": 3}
    plain, watched = PPO(PPOConfig(**config)), PPO(PPOConfig(**config, evaluation_interval=1))
    for _ in range(3):
        assert plain.train().losses == watched.train().losses


def test_an_interval_that_is_refused():
    with pytest.raises(SettingsError, match="`evaluation_interval` is -1, but must be at least 0"):
        PPOConfig(env="CartPole-v1", evaluation_interval=-1)
