# SPDX-License-Identifier: Apache-2.0
"""A2C against its formulas written out, against PPO where both are one, and on CartPole."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from over_seeds import median_over_seeds, mistaken
from test_learning import Edit, Ended
from test_masked import Countdown
from toy_envs import Echo, Toil

from etude import A2C, PPO, A2CConfig, NetworkConfig, PPOConfig, SettingsError, Stop
from etude.experience import Experience
from etude.learners import Batch, ModuleLearner


def config(**given: Any) -> A2CConfig:
    return A2CConfig(**{"env": Echo, "seed": 0, "num_envs": 4, "num_steps": 60, **given})


@pytest.mark.parametrize("entropy_weight", [0.0, 0.03])
def test_loss_is_the_papers(entropy_weight: float) -> None:
    algorithm = A2C(config(entropy_weight=entropy_weight, value_weight=0.7))
    rng = np.random.default_rng(1)
    columns = {
        "obs": rng.normal(size=(50, 2)).astype(np.float32),
        "action": rng.integers(0, 2, 50),
        "advantage": rng.normal(size=50).astype(np.float32),
        "value_target": rng.normal(size=50).astype(np.float32),
    }
    with torch.no_grad():
        algorithm.module.net.policy_head.weight.normal_()  # type: ignore[union-attr, operator]
        out = algorithm.module(torch.from_numpy(columns["obs"]))
        batch = Batch({name: torch.from_numpy(column) for name, column in columns.items()}, algorithm.module)
        loss = algorithm.loss(algorithm.module, batch)
    logits, value = out.dist_inputs.numpy().astype(float), out.value.numpy().astype(float)
    policy = error = entropy = 0.0
    for i, action in enumerate(columns["action"]):
        p = np.exp(logits[i]) / np.exp(logits[i]).sum()
        policy -= np.log(p[action]) * float(columns["advantage"][i])
        error += (value[i] - float(columns["value_target"][i])) ** 2
        entropy -= float((p * np.log(p)).sum())
    expected = {"policy": policy / 50, "value": 0.7 * error / 50}
    if entropy_weight:
        expected["entropy"] = -0.03 * entropy / 50
    assert {name: float(part) for name, part in loss.parts.items()} == pytest.approx(expected, rel=1e-4)
    assert float(loss.logged["entropy"]) == pytest.approx(entropy / 50, rel=1e-4)


class Looks(A2C):
    """Keeps what it learned from."""

    def update(self, learner: ModuleLearner, exp: Experience) -> Any:
        self.seen = exp
        return super().update(learner, exp)


def test_advantages_are_those_of_all_rewards_that_were_seen() -> None:
    algorithm = Looks(config(gamma=0.9, lr=0.0, num_steps=68))
    for _ in range(2):
        result = algorithm.train()
        exp = algorithm.seen
        after = algorithm.module.value_of(exp.final_obs)
        for i in range(exp.num_segments):
            total = 0.0 if exp.segments.terminated[i] else float(after[i])
            for row in reversed(range(exp.offsets[i], exp.offsets[i + 1])):
                total = exp.steps["reward"][row] + 0.9 * total
                assert exp.steps["value_target"][row] == pytest.approx(total, rel=1e-4, abs=1e-4)
                assert exp.steps["advantage"][row] == pytest.approx(total - exp.steps["value"][row], rel=1e-3, abs=1e-3)
        assert exp.segments.terminated.any()
        assert not exp.segments.terminated.all()
    assert result.updates == 2


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"env": "Pendulum-v1", "lambda_": 0.9, "entropy_weight": 0.02},
        {"network": NetworkConfig(hidden=(8,), recurrent="gru", recurrent_size=4), "env": "CartPole-v1"},
        {"normalize_advantages": True, "connectors": ("normalize_obs",), "env": "CartPole-v1"},
    ],
)
def test_it_is_ppo_with_one_epoch_of_one_batch(given: dict[str, Any]) -> None:
    """There the ratio is 1 and nothing is clipped."""
    mine = A2C(config(entropy_weight=0.01, **given) if "entropy_weight" not in given else config(**given))
    alike = {"epochs": 1, "num_minibatches": 1, "lambda_": 1.0, "normalize_advantages": False, "lr": 7e-4}
    alike |= {"entropy_weight": 0.01, "adam_betas": (0.0, 0.99), "env": Echo, "seed": 0, "num_envs": 4, "num_steps": 60}
    ppo = PPO(PPOConfig(**alike | given))
    for _ in range(5):
        mine.train()
        ppo.train()
    others = dict(ppo.module.named_parameters())
    for name, parameter in mine.module.named_parameters():
        torch.testing.assert_close(parameter, others[name], rtol=1e-3, atol=1e-5, msg=name)


def test_what_is_masked_is_never_done_and_learned_with() -> None:
    algorithm = A2C(config(env=Countdown))
    losses = [algorithm.train().losses for _ in range(3)]
    assert all(np.isfinite(list(each.values())).all() for each in losses)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 2}, "`epochs` is 2, but has no effect here: an iteration makes one gradient step"),
        ({"minibatch_size": 8}, "`minibatch_size` is 8, but has no effect here"),
        ({"num_minibatches": 4}, "`num_minibatches` is 4, but has no effect here"),
        ({"value_weight": -1.0}, "`value_weight` is -1.0, but must be at least 0"),
    ],
)
def test_bad_settings(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        config(**given)


LIMIT = 60_000


def on_cartpole(algorithm: type[A2C], seed: int) -> float:
    given = {"num_envs": 16, "num_steps": 160, "lr": 3e-3, "window": 20}
    trained = algorithm(A2CConfig(env="CartPole-v1", seed=seed, **given))
    return trained.fit(Stop(return_mean=300, env_steps=LIMIT)).return_mean


@pytest.mark.learning
def test_a2c_learns_cartpole() -> None:
    assert median_over_seeds(lambda seed: on_cartpole(A2C, seed)) >= 200


class WrongSign(A2C):
    def learner_connectors(self) -> list[Any]:
        return [*super().learner_connectors(), Edit(advantage=np.negative)]


class WrongStep(A2C):
    def learner_connectors(self) -> list[Any]:
        return [*super().learner_connectors(), Edit(advantage=lambda column: np.roll(column, 1))]


class NeverBootstraps(A2C):
    def learner_connectors(self) -> list[Any]:
        return [Ended(True), *super().learner_connectors()]


class AlwaysBootstraps(A2C):
    def learner_connectors(self) -> list[Any]:
        return [Ended(False), *super().learner_connectors()]


@pytest.mark.learning
@pytest.mark.mistake
def test_with_the_wrong_sign_it_does_not() -> None:
    assert median_over_seeds(lambda seed: on_cartpole(WrongSign, seed), num=1) < 60  # at random: 22


@pytest.mark.learning
@pytest.mark.parametrize(("algorithm", "learns"), [(A2C, True), mistaken(WrongSign, False), mistaken(WrongStep, False)])
def test_credit_goes_to_the_step_that_earned_it(algorithm: type[A2C], learns: bool) -> None:
    def score(seed: int) -> float:
        given = A2CConfig(env=Echo, seed=seed, num_envs=16, num_steps=160, gamma=0.0, window=50, lr=3e-3)
        return algorithm(given).fit(Stop(return_mean=9.5, env_steps=15_000)).return_mean  # at random: 5 of 10

    found = median_over_seeds(score)
    assert found >= 9 if learns else found < 7


@pytest.mark.learning
@pytest.mark.parametrize(
    ("algorithm", "terminates", "works_if"),
    [
        (A2C, False, True),
        (A2C, True, False),
        mistaken(AlwaysBootstraps, True, True),
        mistaken(NeverBootstraps, False, False),
    ],
)
def test_what_follows_counts_where_an_episode_was_truncated_alone(
    algorithm: type[A2C], terminates: bool, works_if: bool
) -> None:
    def works(seed: int) -> float:
        given = A2CConfig(env=functools.partial(Toil, terminates=terminates), seed=seed, gamma=0.9, lr=1e-2)
        trained = algorithm(given)
        trained.fit(Stop(env_steps=12_000))
        exp = trained.collect(num_steps=2000)["main"]
        return float(exp.steps["action"][exp.steps["obs"][:, 0] == 1].mean())

    found = median_over_seeds(works)
    assert found > 0.8 if works_if else found < 0.2
