# SPDX-License-Identifier: Apache-2.0
"""Algorithms learn, within a number of env steps that mistaken ones do not keep; medians over several seeds.

Where a mistake would hide on CartPole, an env of its own shows it, and the mistake is made here to see that it does.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from offline_cases import Balances
from over_seeds import median_over_seeds, mistaken
from toy_envs import Echo, Switchboard, Toil

from etude.algorithms import BC, PPO, BCConfig, PPOConfig, Stop
from etude.connectors import Connector
from etude.experience import Experience

pytestmark = pytest.mark.learning


def test_ppo_masters_cartpole() -> None:
    def score(seed: int) -> float:
        algorithm = PPO(PPOConfig(env="CartPole-v1", seed=seed, window=20))
        result = algorithm.fit(Stop(return_mean=450, env_steps=100_000))
        assert result.returns_counted >= 20
        return min(result.return_mean, algorithm.evaluate(20, seed=seed).return_mean)

    assert median_over_seeds(score) >= 400


@pytest.mark.parametrize("mode", ["auto", "stream"])
def test_bc_clones_an_expert_from_a_recording_alone(mode: Any, tmp_path: Path) -> None:
    expert = PPO(PPOConfig(env="CartPole-v1", num_envs=1, module=Balances))
    assert expert.record(tmp_path / "data", 60, seed=2).return_mean == 500

    def score(seed: int) -> float:
        config = BCConfig(data=str(tmp_path / "data"), env="CartPole-v1", seed=seed, mode=mode)
        return BC(config).fit(Stop(return_mean=450, updates=1500)).return_mean

    assert median_over_seeds(score) >= 400


def test_ppo_improves_on_pendulum() -> None:
    shared: dict[str, Any] = {"env": "Pendulum-v1", "gamma": 0.9, "lr": 1e-3, "minibatch_size": 256, "window": 30}

    def score(seed: int) -> float:
        config = PPOConfig(seed=seed, connectors=("normalize_obs", "rescale_action"), **shared)
        return PPO(config).fit(Stop(return_mean=-500, env_steps=90_000)).return_mean  # at random: about -1,200

    assert median_over_seeds(score) >= -700


def test_ppo_on_nested_observations_and_several_choices() -> None:
    def score(seed: int) -> float:
        shared: dict[str, Any] = {"num_steps": 1024, "minibatch_size": 128, "lr": 1e-3, "gamma": 0.0, "lambda_": 0.0}
        config = PPOConfig(env=Switchboard, seed=seed, window=30, **shared)
        return PPO(config).fit(Stop(return_mean=9.0, env_steps=45_000)).return_mean  # at random: 4.2 of 10

    assert median_over_seeds(score) >= 8.5


class Edit(Connector):
    """Spoils what the learner gets."""

    def __init__(self, **edits: Any) -> None:
        self.edits = edits

    def offline(self, exp: Experience, module: Any = None) -> Experience:
        return exp.with_steps(**{name: edit(exp.steps[name]) for name, edit in self.edits.items()})


class WrongSign(PPO):
    def learner_connectors(self) -> list[Any]:
        return [*super().learner_connectors(), Edit(advantage=np.negative)]


class WrongStep(PPO):
    def learner_connectors(self) -> list[Any]:
        return [*super().learner_connectors(), Edit(advantage=lambda column: np.roll(column, 1))]


class Ended(Connector):
    """Takes every segment's end for one by the env's rules, or for none."""

    def __init__(self, terminated: bool) -> None:
        self.terminated = terminated

    def offline(self, exp: Experience, module: Any = None) -> Experience:
        segments = exp.segments.replace(terminated=np.full(len(exp), self.terminated))
        return Experience(exp.steps, exp.offsets, segments, exp.final_obs)


class NeverBootstraps(PPO):
    def learner_connectors(self) -> list[Any]:
        return [Ended(True), *super().learner_connectors()]


class AlwaysBootstraps(PPO):
    def learner_connectors(self) -> list[Any]:
        return [Ended(False), *super().learner_connectors()]


@pytest.mark.parametrize(("algorithm", "learns"), [(PPO, True), mistaken(WrongSign, False), mistaken(WrongStep, False)])
def test_credit_goes_to_the_step_that_earned_it(algorithm: type[PPO], learns: bool) -> None:
    def score(seed: int) -> float:
        config = PPOConfig(env=Echo, seed=seed, num_steps=1024, minibatch_size=128, lr=1e-3, gamma=0.0, window=50)
        return algorithm(config).fit(Stop(return_mean=9.5, env_steps=20_000)).return_mean  # at random: 5 of 10

    found = median_over_seeds(score)
    assert found >= 9 if learns else found < 7


@pytest.mark.parametrize("terminates", [False, True])
@pytest.mark.parametrize("algorithm", [PPO, mistaken(NeverBootstraps), mistaken(AlwaysBootstraps)])
def test_what_follows_counts_where_an_episode_was_truncated_alone(algorithm: type[PPO], terminates: bool) -> None:
    env = functools.partial(Toil, terminates=terminates)

    def works(seed: int) -> float:
        trained = algorithm(PPOConfig(env=env, seed=seed, num_steps=512, minibatch_size=64, gamma=0.9, lr=3e-3))
        for _ in range(12):
            trained.train()
        exp = trained.runner.collect(num_steps=2000)  # type: ignore[attr-defined]
        return float(exp.steps["action"][exp.steps["obs"][:, 0] == 1].mean())

    works_if = {PPO: not terminates, NeverBootstraps: False, AlwaysBootstraps: True}[algorithm]
    found = median_over_seeds(works)
    assert found > 0.8 if works_if else found < 0.2
