# SPDX-License-Identifier: Apache-2.0
"""Algorithms learn on a cluster: from two runners, and from a recording that two learners read."""

from contextlib import closing
from pathlib import Path

import pytest

import etude
from etude import BC, DQN, MARWIL, PPO, BCConfig, DQNConfig, MARWILConfig, Ray, Stop
from etude.algorithms.engine import Engine

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.learning]


@pytest.fixture(scope="module")
def expert(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a PPO that learned from two runners, with a recording of its episodes beside the checkpoint."""
    folder = tmp_path_factory.mktemp("expert")
    given = {"seed": 0, "window": 20, "connectors": ("normalize_obs",), "engine": Ray(num_runners=2)}
    config = etude.preset("ppo", "CartPole-v1", **given)
    with closing(PPO(config)) as algorithm:
        result = algorithm.fit(Stop(return_mean=450, env_steps=100_000))
        assert result.return_mean >= 450
        assert result.metrics["policy_lag"] < 130  # an iteration's gradient steps: nearly all is of the newest weights
        algorithm.save(folder / "run")
        algorithm.record(folder / "data", 60, seed=2)
    return folder


def test_ppo_learns_from_two_runners_and_goes_on_without_a_cluster(expert: Path) -> None:
    here = etude.load(expert / "run")
    assert here.evaluate(20, seed=1).return_mean >= 450
    result = here.train()
    assert result.resumed == "new episodes: the run went on with another engine"
    assert result.env_steps > 4096
    assert type(here.engine) is Engine


@pytest.mark.parametrize("kind", [BC, MARWIL])
def test_two_learners_clone_from_a_recording(kind: type[BC] | type[MARWIL], expert: Path) -> None:
    engine = Ray(num_learners=2, num_evaluation_runners=2)
    settings = BCConfig if kind is BC else MARWILConfig
    config = settings(data=str(expert / "data"), env="CartPole-v1", seed=0, evaluation_interval=2, engine=engine)
    with closing(kind(config)) as algorithm:
        result = algorithm.fit(Stop(return_mean=450, updates=2500))
        assert result.return_mean >= 450
        assert result.bottleneck
        assert result.data["wait"] >= 0


def test_dqn_learns_while_runners_act_on() -> None:
    config = DQNConfig(env="CartPole-v1", seed=0, num_envs=2, engine=Ray(num_runners=2, fragment_steps=32))
    with closing(DQN(config)) as algorithm:
        result = algorithm.fit(Stop(return_mean=150, env_steps=40_000))  # at random: 22
        assert result.return_mean >= 150
