# SPDX-License-Identifier: Apache-2.0
"""IMPALA against its formulas written out, and learning: from its own steps, and from those of older weights."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from over_seeds import median_over_seeds, mistaken, return_over_seeds
from signalling import Signalling
from stale import Fork, Lagging, Pretend
from test_recurrent import OwnGRU, Recall
from toy_envs import Echo, OwnNet, Switchboard

from etude.algorithms import IMPALA, IMPALAConfig, Stop, load
from etude.connectors import Connector, VTrace
from etude.errors import SettingsError
from etude.experience import Experience
from etude.learners import Batch
from etude.modules import NetworkConfig


def config(**given: Any) -> IMPALAConfig:
    return IMPALAConfig(**{"env": Echo, "seed": 0, "num_steps": 128, **given})


@pytest.mark.parametrize("entropy_weight", [0.0, 0.02])
def test_loss_is_the_papers(entropy_weight: float) -> None:
    algorithm = IMPALA(config(entropy_weight=entropy_weight, value_weight=0.7, rho_bar=1.2))
    rng = np.random.default_rng(1)
    columns = {
        "obs": rng.normal(size=(50, 2)).astype(np.float32),
        "action": rng.integers(0, 2, 50),
        "logp": (rng.normal(size=50) * 0.5 - 0.7).astype(np.float32),
        "advantage": rng.normal(size=50).astype(np.float32),
        "value_target": rng.normal(size=50).astype(np.float32),
    }
    batch = Batch({name: torch.from_numpy(column) for name, column in columns.items()}, algorithm.module)
    with torch.no_grad():
        out = algorithm.module(torch.from_numpy(columns["obs"]))
        loss = algorithm.loss(algorithm.module, batch)
    logits, value = out.dist_inputs.numpy().astype(float), out.value.numpy().astype(float)
    policy = error = entropy = rho = kl = 0.0
    for i, action in enumerate(columns["action"]):
        p = np.exp(logits[i]) / np.exp(logits[i]).sum()
        policy -= columns["advantage"][i] * np.log(p[action])
        error += (value[i] - columns["value_target"][i]) ** 2
        entropy -= float((p * np.log(p)).sum())
        rho += min(1.2, p[action] / np.exp(float(columns["logp"][i])))
        kl += columns["logp"][i] - np.log(p[action])
    assert float(loss.parts["policy"]) == pytest.approx(policy / 50, rel=1e-4)
    assert float(loss.parts["value"]) == pytest.approx(0.7 * error / 50, rel=1e-4)
    assert ("entropy" in loss.parts) == (entropy_weight > 0)
    if entropy_weight:
        assert float(loss.parts["entropy"]) == pytest.approx(-entropy_weight * entropy / 50, rel=1e-4)
    logged = {name: float(figure) for name, figure in loss.logged.items()}
    assert logged == pytest.approx({"rho": rho / 50, "entropy": entropy / 50, "kl": kl / 50}, rel=1e-3)


def test_with_one_minibatch_an_iteration_is_one_gradient_step_from_all_of_it() -> None:
    algorithm = IMPALA(config(num_steps=333, num_minibatches=1))
    first, second = algorithm.train(), algorithm.train()
    assert (first.updates, second.updates, second.env_steps) == (1, 2, 666)
    assert first.losses.keys() == {"policy", "value", "entropy"}
    assert algorithm.learner.only.steps_trained == 666
    assert first.metrics["rho"] == pytest.approx(1, abs=1e-4)
    assert first.metrics["kl"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(("env", "sign"), [("Acrobot-v1", -1), ("CartPole-v1", 1)])
def test_advantages_are_lifted_where_they_are_negative_on_average(env: str, sign: int) -> None:
    seen: dict[bool, Any] = {}

    class Noting(IMPALA):
        def update(self, learner: Any, exp: Experience) -> Any:
            seen[self.config.lift_advantages] = exp.steps["advantage"]
            return super().update(learner, exp)

    for lift in (False, True):
        Noting(config(env=env, lift_advantages=lift)).train()
    assert seen[False].mean() * sign > 0.1
    expected = seen[False] - seen[False].mean() if sign < 0 else seen[False]
    np.testing.assert_allclose(seen[True], expected, atol=1e-6)


class Counts(VTrace):
    """Remembers the log-probabilities that it was computed with."""

    seen: list[Any]

    def offline(self, exp: Experience, module: Any = None) -> Experience:
        out = super().offline(exp, module)
        self.seen.append(out.steps["target_logp"])
        return out


class Watched(IMPALA):
    def learner_connectors(self) -> list[Any]:
        self.counts_trace = Counts(self.config.gamma)
        self.counts_trace.seen = []
        return [self.counts_trace]


@pytest.mark.parametrize(("epochs", "num_minibatches", "updates"), [(3, 1, 3), (3, None, 12), (1, 4, 4)])
def test_v_trace_is_computed_anew_before_each_epoch(epochs: int, num_minibatches: int | None, updates: int) -> None:
    size = {"minibatch_size": 32} if num_minibatches is None else {}
    algorithm = Watched(config(epochs=epochs, num_minibatches=num_minibatches, lr=0.05, **size))
    assert algorithm.train().updates == updates
    seen = algorithm.counts_trace.seen
    assert len(seen) == epochs
    for before, after in itertools.pairwise(seen):
        assert np.abs(before - after).max() > 0.01


class AddsToRewards(Connector):
    needs = ("reward",)

    def offline(self, exp: Experience, module: Any = None) -> Experience:
        return exp.with_steps(reward=exp.steps["reward"] + 1)


def test_connectors_of_the_learner_are_applied_to_the_same_experience_before_each_epoch() -> None:
    class Noting(IMPALA):
        def learner_connectors(self) -> list[Any]:
            return [AddsToRewards(), *super().learner_connectors()]

        def update_epochs(self, learner: Any, exp: Experience, **how: Any) -> Any:
            seen.append(exp.steps["reward"])
            return super().update_epochs(learner, exp, **how)

    seen: list[Any] = []
    algorithm = Noting(config(epochs=3))
    for _ in range(2):
        algorithm.train()
    for before, after in ((0, 1), (0, 2), (3, 4), (3, 5)):
        np.testing.assert_array_equal(seen[before], seen[after])
    assert not np.array_equal(seen[0], seen[3])


@pytest.mark.parametrize("memory", ["lstm", "gru"])
@pytest.mark.parametrize("max_seq_len", [2, 32])
def test_unchanged_weights_say_what_they_said_while_acting(memory: Any, max_seq_len: int) -> None:
    network = NetworkConfig(hidden=(16,), recurrent=memory, recurrent_size=16)
    algorithm = IMPALA(config(env=Recall, network=network, lr=0.0, num_steps=103, max_seq_len=max_seq_len))
    with torch.no_grad():
        for parameter in algorithm.module.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        metrics = algorithm.train().metrics
        assert metrics["kl"] == pytest.approx(0, abs=1e-5)
        assert metrics["rho"] == pytest.approx(1, abs=1e-5)


def test_older_weights_show_in_the_figures() -> None:
    algorithm = type("Late", (Lagging, IMPALA), {"lag": 3})(config(env="CartPole-v1", lr=0.03, num_minibatches=1))
    results = [algorithm.train() for _ in range(8)]
    assert results[0].metrics["rho"] == pytest.approx(1, abs=1e-4)
    assert results[-1].metrics["rho"] < 0.97


@pytest.mark.parametrize("given", [{"env": "Pendulum-v1"}, {"env": "Pendulum-v1", "squash": True}, {"module": OwnNet}])
def test_any_actions_and_networks_of_ones_own(given: dict[str, Any]) -> None:
    algorithm = IMPALA(config(**given))
    for _ in range(3):
        result = algorithm.train()
    assert np.isfinite([*result.losses.values(), result.metrics["rho"]]).all()
    assert result.updates == 3


def test_a_saved_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    network = NetworkConfig(hidden=(16,), recurrent="gru")
    algorithm = IMPALA(config(env=Recall, num_steps=101, network=network, epochs=2))
    for _ in range(2):
        algorithm.train()
    algorithm.save(tmp_path)
    other = load(tmp_path, env=Recall)
    for _ in range(2):
        results = [each.train() for each in (algorithm, other)]
        assert results[0].losses == results[1].losses
        assert results[0].metrics == results[1].metrics


def test_modules_have_settings_of_their_own() -> None:
    both = ("speaker", "listener")
    overrides = {"listener": {"rho_bar": 2.0, "epochs": 2, "entropy_weight": 0.0}}
    algorithm = IMPALA(config(env=Signalling, modules=both, overrides=overrides))
    result = algorithm.train()
    caps = [algorithm.learner.modules[name].connectors.connectors[0].rho_bar for name in both]  # type: ignore[attr-defined]
    assert caps == [1.0, 2.0]
    assert [algorithm.learner.modules[name].updates for name in both] == [1, 2]
    assert ("speaker/entropy" in result.losses, "listener/entropy" in result.losses) == (True, False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rho_bar": 0.0}, "`vtrace.rho_bar` is 0.0, but must be above 0"),
        ({"c_bar": 1.5}, "`vtrace.c_bar` is 1.5, but must be at most `rho_bar`"),
        ({"value_weight": -0.1}, "`value_weight` is -0.1, but must be at least 0"),
        ({"minibatch_size": 64}, "`minibatch_size` is 64, but must be left out, or `num_minibatches` be none"),
        ({"connectors": ("v_trace",)}, "where v_trace has no effect"),
    ],
)
def test_settings_are_checked(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        IMPALA(config(**given))


# -- learning -------------------------------------------------------------------------------------------------------


class Edit(Connector):
    """Spoils what the learner gets."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def offline(self, exp: Experience, module: Any = None) -> Experience:
        return exp.with_steps(advantage=exp.steps["advantage"] * np.float32(self.factor))


class WrongSign(IMPALA):
    def learner_connectors(self) -> list[Any]:
        return [*super().learner_connectors(), Edit(-1.0)]


class NothingCounts(IMPALA):
    """As if rho were 0."""

    def learner_connectors(self) -> list[Any]:
        return [*super().learner_connectors(), Edit(0.0)]


@pytest.mark.learning
@pytest.mark.parametrize(
    ("algorithm", "learns"), [(IMPALA, True), mistaken(WrongSign, False), mistaken(NothingCounts, False)]
)
def test_impala_masters_cartpole(algorithm: type[IMPALA], learns: bool) -> None:
    stop = Stop(return_mean=450, env_steps=200_000 if learns else 20_000)
    found = return_over_seeds(algorithm, stop, env="CartPole-v1", window=20)
    assert found >= 250 if learns else found < 60  # at random: 22


@pytest.mark.learning
def test_impala_finds_its_way_where_every_step_costs_the_same() -> None:
    """Acrobot earns -500 until its goal is found by chance: what is learned before must not end exploration."""

    stop = Stop(return_mean=-150, env_steps=60_000)
    assert return_over_seeds(IMPALA, stop, env="Acrobot-v1", window=20) >= -250


@pytest.mark.learning
def test_impala_masters_cartpole_by_steps_that_are_four_updates_old() -> None:
    late, stop = type("Late", (Lagging, IMPALA), {}), Stop(return_mean=300, env_steps=150_000)
    assert return_over_seeds(late, stop, env="CartPole-v1", window=20) >= 250


class Uncorrected(IMPALA):
    def learner_connectors(self) -> list[Any]:
        return [Pretend(), *super().learner_connectors()]


@pytest.mark.learning
@pytest.mark.parametrize(
    ("algorithm", "lag", "earned"), [(IMPALA, 0, 1.0), (IMPALA, 9999, 1.0), mistaken(Uncorrected, 9999, 0.7)]
)
def test_values_are_those_of_the_module_though_another_acts(algorithm: type[IMPALA], lag: int, earned: float) -> None:
    """All steps are those of the weights at the start, which draw: without the correction, going up does not pay."""

    def score(seed: int) -> float:
        stale = type("Stale", (Lagging, algorithm), {"lag": lag})(IMPALAConfig(env=Fork, seed=seed, lr=1e-2))
        stale.fit(Stop(env_steps=20_000))
        return stale.evaluate(5, seed=1).return_mean

    assert float(median_over_seeds(score)) == pytest.approx(earned)


@pytest.mark.learning
def test_impala_on_nested_observations_and_several_choices() -> None:
    def score(seed: int) -> float:
        settings = IMPALAConfig(env=Switchboard, seed=seed, gamma=0.0, lr=1e-2, window=30)
        return IMPALA(settings).fit(Stop(return_mean=9.0, env_steps=60_000)).return_mean  # at random: 4.2 of 10

    assert median_over_seeds(score) >= 8.5


@pytest.mark.learning
def test_impala_with_a_memory() -> None:
    def score(seed: int) -> float:
        given: dict[str, Any] = {"env": Recall, "module": OwnGRU, "gamma": 1.0, "lr": 5e-3, "window": 200}
        algorithm = IMPALA(config(num_steps=256, seed=seed, **given))
        return algorithm.fit(Stop(return_mean=0.95, env_steps=60_000)).return_mean

    assert median_over_seeds(score) >= 0.85  # without a memory: 0.5
