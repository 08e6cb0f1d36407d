# SPDX-License-Identifier: Apache-2.0
"""Presets reach what the results say, within a number of steps that mistaken variants do not keep."""

import dataclasses
from contextlib import closing
from typing import Any

import gymnasium as gym
import pytest
from over_seeds import Median, median_over_seeds, mistaken

import etude

pytestmark = pytest.mark.learning


def steps_to(
    goal: float, kind: type[etude.Algorithm[Any]], config: etude.AlgorithmConfig, most: int, seeds: int = 3
) -> Median:
    """The median over seeds of the env steps until training reaches a mean return; ``most`` if it does not."""

    def steps(seed: int) -> float:
        with closing(kind(dataclasses.replace(config, seed=seed))) as algorithm:
            return algorithm.fit(etude.Stop(return_mean=goal, env_steps=most)).env_steps

    return median_over_seeds(steps, seeds)


def test_ppo_masters_cartpole_in_time() -> None:
    assert steps_to(450, etude.PPO, etude.preset("ppo", "CartPole-v1"), 100_000) < 84_000  # 70,000 for each seed


class InThousandths(gym.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> float:
        return 0.001 * float(reward)


@pytest.mark.parametrize("normalizes", [True, mistaken(False)], ids=["right", "no normalisation"])
def test_ppo_learns_from_small_rewards_because_advantages_are_normalised(normalizes: bool) -> None:
    """Else the entropy bonus outweighs them: the policy stays random, with episodes of about 95 steps."""
    config = etude.preset(
        "ppo",
        "CartPole-v1",
        env=lambda: InThousandths(gym.make("CartPole-v1")),
        entropy_weight=0.01,
        normalize_advantages=normalizes,
    )
    assert (steps_to(0.3, etude.PPO, config, 100_000, seeds=3 if normalizes else 1) < 100_000) is normalizes


class NeverBootstraps(etude.QRDQN):
    """Takes each step for the last one of its episode."""

    def loss(self, module: etude.Module, batch: etude.Batch) -> etude.Loss:
        batch.used["discount"] = 0 * batch["discount"]
        return super().loss(module, batch)


@pytest.mark.parametrize(
    ("kind", "interval", "learns"),
    [(etude.QRDQN, 250, True), mistaken(NeverBootstraps, 250, False), mistaken(etude.QRDQN, 1_000_000, False)],
    ids=["right", "no bootstrapping", "stale target"],
)
def test_qr_dqn_learns_acrobot_by_bootstrapping_from_a_target_that_moves(
    kind: type[etude.QRDQN], interval: int, learns: bool
) -> None:
    config = etude.preset("qr_dqn", "Acrobot-v1")
    config = dataclasses.replace(config, target=dataclasses.replace(config.target, interval=interval))
    assert (steps_to(-200, kind, config, 16_000, seeds=1) < 16_000) is learns  # 10,000 to 12,000 with seeds 0 to 3
