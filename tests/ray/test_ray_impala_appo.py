# SPDX-License-Identifier: Apache-2.0
"""IMPALA and APPO on a cluster: steps that older weights made, and target networks wherever there is learning."""

from typing import Any

import pytest
import torch

from etude.algorithms import APPO, IMPALA, APPOConfig, IMPALAConfig, Ray, Stop
from etude.modules.critics import FollowedModule

pytestmark = pytest.mark.usefixtures("cluster")


def weights_of(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


@pytest.mark.learning
def test_appo_masters_cartpole_while_runners_act_on() -> None:
    config = APPOConfig(env="CartPole-v1", seed=0, window=20, engine=Ray(num_runners=2))
    algorithm = APPO(config)
    try:
        lags = []
        for result in algorithm.iterate(Stop(return_mean=450, env_steps=150_000)):
            lags.append(result.metrics["policy_lag"])
        assert result.return_mean >= 450
        assert max(lags) >= 32  # an iteration's gradient steps: what is learned from was made before the latest
        assert 0.5 < result.metrics["rho"] < 1
    finally:
        algorithm.close()


@pytest.mark.learning
def test_impala_improves_on_cartpole_while_runners_act_on() -> None:
    config = IMPALAConfig(env="CartPole-v1", seed=0, window=20, engine=Ray(num_runners=2))
    algorithm = IMPALA(config)
    try:
        result = algorithm.fit(Stop(return_mean=150, env_steps=100_000))  # at random: 22
        assert result.return_mean >= 150
        assert result.metrics["policy_lag"] >= 1
    finally:
        algorithm.close()


@pytest.mark.parametrize("num_learners", [0, 2])
def test_target_networks_here_are_those_that_learn(num_learners: int) -> None:
    """Moved in every 8th gradient step, of which an iteration makes 12: in the 8th, and in the 16th and 24th."""
    given: dict[str, Any] = {"env": "CartPole-v1", "seed": 0, "num_envs": 4, "num_steps": 128}
    engine = Ray(num_runners=1, num_learners=num_learners)
    algorithm = APPO(APPOConfig(**given, num_minibatches=4, epochs=3, target_interval=8, engine=engine))
    try:
        module = algorithm.module
        assert isinstance(module, FollowedModule)
        start = weights_of(module.target).clone()
        assert algorithm.train().updates == 12
        first = weights_of(module.target).clone()
        assert not torch.equal(first, start)
        assert not torch.equal(first, weights_of(module.net))
        assert algorithm.train().updates == 24
        torch.testing.assert_close(weights_of(module.target), weights_of(module.net), rtol=0, atol=0)
    finally:
        algorithm.close()


def test_several_epochs_are_learned_by_several_learners() -> None:
    """V-trace is computed anew at each, from its share."""
    config = IMPALAConfig(env="CartPole-v1", seed=0, num_steps=128, epochs=3, engine=Ray(num_runners=1, num_learners=2))
    algorithm = IMPALA(config)
    try:
        results = [algorithm.train() for _ in range(2)]
        assert [result.updates for result in results] == [3, 6]
        steps, seconds = results[1].env_steps - results[0].env_steps, results[1].seconds - results[0].seconds
        assert results[1].sample_steps_per_s == pytest.approx(steps / seconds)  # not those of waiting for them
        assert 0.5 < results[-1].metrics["rho"] <= 1
    finally:
        algorithm.close()
