# SPDX-License-Identifier: Apache-2.0
import time

import pytest

from etude.algorithms import BC, DQN, PPO, BCConfig, DQNConfig, PPOConfig, load
from etude.algorithms.play import play
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
    assert results[1].evaluation["episodes"] == config.evaluation.episodes
    assert results[1].times["evaluate"] > 0
    assert results[2].times["evaluate"] == 0
    alone.train()
    alone.train()
    expected = alone.evaluate(config.evaluation.episodes, seed=alone.runner_seed)
    found = results[1].evaluation
    assert (found["return_mean"], found["length_mean"], found["updates"]) == (
        expected.return_mean,
        expected.length_mean,
        expected.updates,
    )


def test_a_resumed_run_tells_the_latest_evaluation_on(tmp_path):
    algorithm = PPO(PPOConfig(env="CartPole-v1", num_envs=2, num_steps=64, seed=3, evaluation_interval=3))
    for _ in range(4):
        algorithm.train()
    algorithm.save(tmp_path)
    resumed = load(tmp_path)
    for _ in range(3):
        assert resumed.train().evaluation == algorithm.train().evaluation != {}


def test_training_is_the_same_with_evaluations_and_without():
    config = {"env": "CartPole-v1", "num_envs": 2, "num_steps": 64, "seed": 3}
    plain, watched = PPO(PPOConfig(**config)), PPO(PPOConfig(**config, evaluation_interval=1))
    for _ in range(3):
        assert plain.train().losses == watched.train().losses


class EvaluatesItself(PPO):
    """Evaluates after each update, as a user's code may."""

    def after_update(self, env_steps):
        self.own = self.evaluate(10, seed=0).seconds


ACTING = {"env": "CartPole-v1", "num_envs": 2, "num_steps": 64, "seed": 3}


@pytest.mark.parametrize("kind", ["ppo", "dqn", "bc", "own", "ray"])
def test_training_time_leaves_evaluations_out(kind, tmp_path, monkeypatch):
    if kind == "ppo":
        algorithm = PPO(PPOConfig(**ACTING, evaluation_interval=1))
    elif kind == "dqn":
        algorithm = DQN(DQNConfig(env="CartPole-v1", num_envs=2, iteration_steps=64, seed=3, evaluation_interval=1))
    elif kind == "own":
        algorithm = EvaluatesItself(PPOConfig(**ACTING))
    elif kind == "bc":
        PPO(PPOConfig(**ACTING)).record(tmp_path / "data", 5, seed=0)
        given = {"data": str(tmp_path / "data"), "env": "CartPole-v1", "evaluation_interval": 1, "seed": 0}
        algorithm = BC(BCConfig(**given, updates_per_iteration=3))
    else:  # evaluations elsewhere, for which training waits
        algorithm = PPO(PPOConfig(**ACTING, evaluation_interval=1))
        monkeypatch.setattr(algorithm, "evaluators", Elsewhere(algorithm), raising=False)
    before = algorithm.train().seconds
    for _ in range(2):
        begin = time.perf_counter()
        result = algorithm.train()
        whole = time.perf_counter() - begin
        evaluated = algorithm.own if kind == "own" else result.times["evaluate"]
        assert 0 < evaluated < whole
        assert 0 < result.seconds - before <= whole - evaluated
        before = result.seconds
    algorithm.close()


class Elsewhere:
    """Stands for runners of a cluster that play evaluations."""

    def __init__(self, algorithm):
        self.algorithm = algorithm

    def next(self, num_episodes, *, seed):
        found = play(self.algorithm.new_runner(None, num_episodes, seed), num_episodes, explore=False, updates=0)
        return found, None


def test_an_interval_that_is_refused():
    with pytest.raises(SettingsError, match="`evaluation.interval` is -1, but must be at least 0"):
        PPOConfig(env="CartPole-v1", evaluation_interval=-1)
