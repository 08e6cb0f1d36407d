# SPDX-License-Identifier: Apache-2.0
"""APPO against its formulas written out, its target network, and learning, from steps of older weights too."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from over_seeds import median_over_seeds, mistaken, return_over_seeds
from signalling import Signalling
from stale import Lagging
from test_recurrent import OwnGRU, Recall
from toy_envs import Echo, OwnNet, Switchboard

import etude
from etude.algorithms import APPO, APPOConfig, Stop, load
from etude.connectors import Connector
from etude.errors import SettingsError
from etude.experience import Experience
from etude.learners import Batch, Loss
from etude.modules import Module, NetworkConfig
from etude.modules.critics import FollowedModule


def config(**given: Any) -> APPOConfig:
    return APPOConfig(**{"env": Echo, "seed": 0, "num_envs": 4, "num_steps": 128, "minibatch_size": 32, **given})


@pytest.mark.parametrize("target_interval", [None, 5])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.01])
def test_loss_is_the_papers(target_interval: int | None, entropy_weight: float) -> None:
    algorithm = APPO(
        config(target_interval=target_interval, entropy_weight=entropy_weight, clip=0.15, value_weight=0.7)
    )
    rng = np.random.default_rng(1)
    columns = {
        "obs": rng.normal(size=(50, 2)).astype(np.float32),
        "action": rng.integers(0, 2, 50),
        "logp": (rng.normal(size=50) * 0.5 - 0.7).astype(np.float32),
        "target_logp": (rng.normal(size=50) * 0.5 - 0.7).astype(np.float32),
        "advantage": rng.normal(size=50).astype(np.float32),
        "value_target": rng.normal(size=50).astype(np.float32),
    }
    batch = Batch({name: torch.from_numpy(column) for name, column in columns.items()}, algorithm.module)
    with torch.no_grad():
        out = algorithm.module(torch.from_numpy(columns["obs"]))
        loss = algorithm.loss(algorithm.module, batch)
    logits, value = out.dist_inputs.numpy().astype(float), out.value.numpy().astype(float)
    policy = error = entropy = rho = 0.0
    outside = 0
    against = columns["logp" if target_interval is None else "target_logp"]
    for i, action in enumerate(columns["action"]):
        p = np.exp(logits[i]) / np.exp(logits[i]).sum()
        ratio = p[action] / np.exp(float(against[i]))
        advantage = float(columns["advantage"][i])
        outside += abs(ratio - 1) > 0.15
        policy -= min(ratio * advantage, float(np.clip(ratio, 0.85, 1.15)) * advantage)
        error += (value[i] - float(columns["value_target"][i])) ** 2
        entropy -= float((p * np.log(p)).sum())
        rho += min(1.0, np.exp(float(columns["target_logp"][i] - columns["logp"][i])))
    assert 5 < outside < 50
    assert float(loss.parts["policy"]) == pytest.approx(policy / 50, rel=1e-4)
    assert float(loss.parts["value"]) == pytest.approx(0.7 * error / 50, rel=1e-4)
    assert ("entropy" in loss.parts) == (entropy_weight > 0)
    if entropy_weight:
        assert float(loss.parts["entropy"]) == pytest.approx(-0.01 * entropy / 50, rel=1e-4)
    assert float(loss.logged["clip_fraction"]) == pytest.approx(outside / 50)
    assert float(loss.logged["rho"]) == pytest.approx(rho / 50, rel=1e-4)
    assert float(loss.logged["entropy"]) == pytest.approx(entropy / 50, rel=1e-4)


class Looks(APPO):
    """Keeps what it learned from."""

    def update(self, learner: Any, exp: Experience) -> Any:
        self.seen = exp
        return super().update(learner, exp)


@pytest.mark.parametrize("normalize", [True, False])
def test_advantages_are_normalized_where_asked_for(normalize: bool) -> None:
    algorithm = Looks(config(normalize_advantages=normalize))
    algorithm.train()
    advantage = algorithm.seen.steps["advantage"]
    assert (abs(advantage.mean()) < 1e-5 and abs(advantage.std() - 1) < 1e-4) == normalize


def weights_of(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in module.parameters()])


def test_the_target_network_follows_after_the_next_step_if_one_was_skipped() -> None:
    class Skips(APPO):
        calls = 0

        def loss(self, module: Any, batch: Any) -> Any:
            self.calls += 1
            found = super().loss(module, batch)
            return Loss(**{name: part * (math.nan if self.calls == 6 else 1.0) for name, part in found.parts.items()})

    algorithm, moved = Skips(config(target_interval=6, epochs=2, lr=0.01)), []
    follow = algorithm.after_step

    def after_step(module: Any) -> None:
        before = weights_of(module.target)
        follow(module)
        if not torch.equal(before, weights_of(module.target)):
            moved.append(algorithm.learner.updates)

    algorithm.learner.only.after_step = after_step
    for _ in range(2):
        algorithm.train()
    assert moved == [7, 12]


@pytest.mark.parametrize("tau", [1.0, 0.25])
def test_the_target_network_follows_after_so_many_steps(tau: float) -> None:
    """8 gradient steps an iteration; the target is moved after the 6th, the 12th and the 18th."""
    algorithm = APPO(config(target_interval=6, tau=tau, epochs=2, lr=0.01))
    module, taken = algorithm.module, []
    assert isinstance(module, FollowedModule)
    moved = algorithm.after_step

    def after_step(module: Any) -> None:
        before = weights_of(module.target)
        moved(module)
        taken.append((before, weights_of(module.net), weights_of(module.target)))

    algorithm.learner.only.after_step = after_step
    start = weights_of(module.net)
    torch.testing.assert_close(weights_of(module.target), start, rtol=0, atol=0)
    for _ in range(2):
        algorithm.train()
    assert len(taken) == 16
    for i, (before, net, after) in enumerate(taken, 1):
        expected = (1 - tau) * before + tau * net if i % 6 == 0 else before
        torch.testing.assert_close(after, expected)
    assert not torch.equal(weights_of(module.net), weights_of(module.target))
    assert not any(parameter.requires_grad for parameter in module.target.parameters())


def test_the_ratio_and_the_trace_are_those_of_the_target_network() -> None:
    algorithm = Looks(config(target_interval=10_000, epochs=2, lr=0.01, normalize_advantages=False))
    for _ in range(3):
        algorithm.train()
    module, exp = algorithm.module, algorithm.seen
    assert isinstance(module, FollowedModule)
    with torch.no_grad():
        old = module.target(torch.from_numpy(exp.steps["obs"])).logp(torch.from_numpy(exp.steps["action"])).numpy()
    np.testing.assert_allclose(exp.steps["target_logp"], old, atol=1e-5)
    assert np.abs(exp.steps["logp"] - old).max() > 0.01  # those that acted had moved away from it


@pytest.mark.parametrize("given", [{}, {"target_interval": 3}])
@pytest.mark.parametrize(
    "what", [{"env": "Pendulum-v1"}, {"env": "Pendulum-v1", "squash": True}, {"module": OwnNet}, {"env": Switchboard}]
)
def test_any_actions_and_networks_of_ones_own(given: dict[str, Any], what: dict[str, Any]) -> None:
    algorithm = APPO(config(**given, **what))
    for _ in range(2):
        result = algorithm.train()
    assert np.isfinite([*result.losses.values(), result.metrics["rho"]]).all()
    assert algorithm.evaluate(2, seed=1).episodes == 2


@pytest.mark.parametrize("target_interval", [None, 5])
def test_a_saved_run_goes_on_as_if_it_had_not_stopped(target_interval: int | None, tmp_path: Path) -> None:
    network = NetworkConfig(hidden=(16,), recurrent="gru")
    algorithm = APPO(config(env=Recall, num_steps=101, network=network, epochs=2, target_interval=target_interval))
    for _ in range(2):
        algorithm.train()
    algorithm.save(tmp_path)
    other = load(tmp_path, env=Recall)
    for _ in range(2):
        results = [each.train() for each in (algorithm, other)]
        assert results[0].losses == results[1].losses
        assert results[0].metrics == results[1].metrics


def test_modules_have_settings_of_their_own() -> None:
    overrides = {"listener": {"target_interval": 3, "clip": 0.1}}
    algorithm = APPO(config(env=Signalling, modules=("speaker", "listener"), overrides=overrides))
    result = algorithm.train()
    speaker, listener = (algorithm.policies[name].module for name in ("speaker", "listener"))
    assert not isinstance(speaker, FollowedModule)
    assert isinstance(listener, FollowedModule)
    assert not torch.equal(weights_of(listener.target), weights_of(listener.net))
    assert {"speaker/rho", "listener/rho", "speaker/clip_fraction"} <= result.metrics.keys()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"clip": 0.0}, "`clip` is 0.0, but must be above 0"),
        ({"target_interval": 0}, "`target.interval` is 0, but must be at least 1, or none"),
        ({"tau": 0.0}, "`target.tau` is 0.0, but must be above 0 and at most 1"),
        ({"rho_bar": 0.0}, "`vtrace.rho_bar` is 0.0, but must be above 0"),
        ({"c_bar": 1.5}, "`vtrace.c_bar` is 1.5, but must be at most `rho_bar`"),
        ({"value_weight": -0.1}, "`value_weight` is -0.1, but must be at least 0"),
    ],
)
def test_settings_are_checked(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        config(**given)


# -- learning -------------------------------------------------------------------------------------------------------


class Flip(Connector):
    def offline(self, exp: Experience, module: Any = None) -> Experience:
        return exp.with_steps(advantage=-exp.steps["advantage"])


class WrongSign(APPO):
    def learner_connectors(self) -> list[Any]:
        return [*super().learner_connectors(), Flip()]


@pytest.mark.learning
@pytest.mark.parametrize(("algorithm", "learns"), [(APPO, True), mistaken(WrongSign, False)])
def test_appo_masters_cartpole(algorithm: type[APPO], learns: bool) -> None:
    stop = Stop(return_mean=450, env_steps=90_000 if learns else 20_000)
    found = return_over_seeds(algorithm, stop, env="CartPole-v1", window=20)
    assert found >= 350 if learns else found < 60  # at random: 22


@pytest.mark.learning
def test_appo_finds_its_way_where_every_step_costs_the_same() -> None:
    """Acrobot earns -500 until its goal is found by chance: what is learned before must not end exploration."""

    assert return_over_seeds(APPO, Stop(return_mean=-300, env_steps=60_000), env="Acrobot-v1") >= -350


class AgainstTheStart(APPO):
    """Its ratio is against the weights at the iteration's start, wherever the steps came from."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        return super().loss(module, Batch({**batch._columns, "logp": batch["target_logp"]}, module, size=batch.size))


@pytest.mark.learning
@pytest.mark.parametrize("target_interval", [None, 128])
def test_appo_masters_cartpole_by_steps_that_are_four_iterations_old(target_interval: int | None) -> None:
    late, stop = type("Late", (Lagging, APPO), {}), Stop(return_mean=450, env_steps=90_000)
    found = return_over_seeds(late, stop, env="CartPole-v1", window=20, target_interval=target_interval)
    assert found >= 350


@pytest.mark.learning
@pytest.mark.parametrize(
    ("algorithm", "target_interval", "is_held"),
    [(APPO, None, True), (APPO, 128, True), mistaken(AgainstTheStart, None, False)],
)
def test_the_clip_holds_the_policy_near_the_one_that_made_the_steps(
    algorithm: type[APPO], target_interval: int | None, is_held: bool
) -> None:
    """By steps that are four iterations old; else four iterations go the same way before it shows where it leads."""

    def kl(seed: int) -> float:
        given = APPOConfig(env="CartPole-v1", seed=seed, target_interval=target_interval)
        late: APPO = type("Late", (Lagging, algorithm), {})(given)
        results = [late.train() for _ in range(20)]
        return max(result.metrics["kl"] for result in results[5:])

    found = median_over_seeds(kl)
    assert found < 0.2 if is_held else found > 0.3


@pytest.mark.learning
def test_appo_with_a_memory() -> None:
    def score(seed: int) -> float:
        given: dict[str, Any] = {"env": Recall, "module": OwnGRU, "gamma": 1.0, "lr": 3e-3, "window": 200}
        given |= {"num_steps": 512, "num_envs": 16, "minibatch_size": 128, "target_interval": 64, "seed": seed}
        late: APPO = type("Late", (Lagging, APPO), {"lag": 2})(config(**given))
        return late.fit(Stop(return_mean=0.95, env_steps=40_000)).return_mean

    assert median_over_seeds(score) >= 0.85  # without a memory: 0.5


@pytest.mark.parametrize("name", ["impala", "appo"])
def test_the_command_line_knows_it(name: str, tmp_path: Path) -> None:
    from etude.cli.main import main

    out = tmp_path / "run"
    args = ["--num-steps", "64", "--num-envs", "2", "--hidden", "8", "--seed", "1", "--quiet", "--out", str(out)]
    assert main(["train", name, "--env", "CartPole-v1", "--rho-bar", "1.5", "--stop.env-steps", "128", *args]) == 0
    assert main(["train", name, "--resume", str(out), "--stop.env-steps", "192", "--quiet"]) == 0
    again = etude.load(out)
    assert (again.name, again.env_steps, again.config.vtrace.rho_bar) == (name, 192, 1.5)
