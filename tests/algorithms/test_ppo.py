# SPDX-License-Identifier: Apache-2.0
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from test_league import Duel, first_and_last
from toy_envs import Echo, OwnNet

from etude.algorithms import PPO, PPOConfig
from etude.errors import SettingsError
from etude.experience import Experience
from etude.learners import Batch, Loss, ModuleLearner, Update
from etude.modules import Module, NetworkConfig, Output, make_module


def config(**given: Any) -> PPOConfig:
    return PPOConfig(**{"env": Echo, "seed": 0, "num_envs": 4, "num_steps": 128, "minibatch_size": 32, **given})


def a_batch(algorithm: PPO, size: int = 50) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "obs": rng.normal(size=(size, 2)).astype(np.float32),
        "action": rng.integers(0, 2, size),
        "logp": (rng.normal(size=size) * 0.5 - 0.7).astype(np.float32),
        "advantage": rng.normal(size=size).astype(np.float32),
        "value": rng.normal(size=size).astype(np.float32),
        "value_target": rng.normal(size=size).astype(np.float32),
    }


@pytest.mark.parametrize("value_clip", [None, 0.3])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.01])
def test_loss_is_the_papers(value_clip: float | None, entropy_weight: float) -> None:
    algorithm = PPO(config(value_clip=value_clip, entropy_weight=entropy_weight, clip=0.15, value_weight=0.7))
    batch = a_batch(algorithm)
    with torch.no_grad():
        out = algorithm.module(torch.from_numpy(batch["obs"]))
        loss = algorithm.loss(
            algorithm.module, Batch({n: torch.from_numpy(c) for n, c in batch.items()}, algorithm.module)
        )
    logits, value = out.dist_inputs.numpy().astype(float), out.value.numpy().astype(float)
    policy = error = entropy = 0.0
    outside = 0
    for i, action in enumerate(batch["action"]):
        p = np.exp(logits[i]) / np.exp(logits[i]).sum()
        ratio = p[action] / np.exp(float(batch["logp"][i]))
        advantage = float(batch["advantage"][i])
        outside += abs(ratio - 1) > 0.15
        policy -= min(ratio * advantage, float(np.clip(ratio, 0.85, 1.15)) * advantage)
        target, old = float(batch["value_target"][i]), float(batch["value"][i])
        errors = [(value[i] - target) ** 2]
        if value_clip is not None:
            errors.append((old + float(np.clip(value[i] - old, -0.3, 0.3)) - target) ** 2)
        error += max(errors)
        entropy -= float((p * np.log(p)).sum())
    assert 5 < outside < 50
    n = len(value)
    assert float(loss.parts["policy"]) == pytest.approx(policy / n, rel=1e-4)
    assert float(loss.parts["value"]) == pytest.approx(0.7 * error / n, rel=1e-4)
    if entropy_weight:
        assert float(loss.parts["entropy"]) == pytest.approx(-0.01 * entropy / n, rel=1e-4)
    else:
        assert "entropy" not in loss.parts


class Looks(PPO):
    """Keeps what it learned from, and learns nothing."""

    def update(self, learner: ModuleLearner, exp: Experience) -> Any:
        self.seen = exp
        return super().update(learner, exp)


@pytest.mark.parametrize("normalize", [True, False])
def test_advantages_are_gae_of_recorded_values(normalize: bool) -> None:
    algorithm = Looks(config(gamma=0.9, lambda_=0.7, normalize_advantages=normalize, lr=0.0, num_steps=101))
    for _ in range(2):
        algorithm.train()
        exp = algorithm.seen
        bootstrap = algorithm.module.value_of(exp.final_obs)
        expected = np.zeros(exp.num_steps)
        for i in range(exp.num_segments):
            start, stop = exp.offsets[i], exp.offsets[i + 1]
            following = 0.0 if exp.segments.terminated[i] else float(bootstrap[i])
            total = 0.0
            for row in range(stop - 1, start - 1, -1):
                delta = exp.steps["reward"][row] + 0.9 * following - exp.steps["value"][row]
                total = delta + 0.9 * 0.7 * total
                expected[row] = total
                following = float(exp.steps["value"][row])
        targets = expected + exp.steps["value"]
        if normalize:
            expected = (expected - expected.mean()) / (expected.std() + 1e-8)
        np.testing.assert_allclose(exp.steps["advantage"], expected, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(exp.steps["value_target"], targets, rtol=1e-4, atol=1e-4)
        assert exp.segments.terminated.any()
        assert not exp.segments.terminated.all()


def test_kl_target_stops_an_iteration_early() -> None:
    epochs = 10
    free = PPO(config(lr=0.02, epochs=epochs)).train()
    tight = PPO(config(lr=0.02, epochs=epochs, kl_target=1e-4)).train()
    loose = PPO(config(lr=0.02, epochs=epochs, kl_target=1e4)).train()
    assert free.updates == loose.updates == epochs * 4
    assert tight.updates == 4
    assert tight.metrics["kl"] > 1.5e-4


class Notes(PPO):
    """Keeps what each pass over the steps reported; the first losses of the first pass are not finite."""

    spoiled = 0
    calls = 0

    def loss(self, module: Module, batch: Batch) -> Loss:
        loss = super().loss(module, batch)
        self.calls += 1
        return Loss(**{n: p * torch.nan for n, p in loss.parts.items()}) if self.calls <= self.spoiled else loss

    def update_epochs(self, learner: ModuleLearner, exp: Experience, **how: Any) -> Update:
        self.passes = [*getattr(self, "passes", []), super().update_epochs(learner, exp, **how)]
        return self.passes[-1]


@pytest.mark.parametrize("spoiled", [0, 1, 4, 6])
def test_all_epochs_are_reported_where_there_is_a_kl_target(spoiled: int) -> None:
    """4 epochs of 4 gradient steps; where the first 4 are skipped, the first epoch has no losses."""
    algorithm = Notes(config(lr=1e-3, epochs=4, kl_target=1e4))
    algorithm.spoiled = spoiled
    result = algorithm.train()
    assert len(algorithm.passes) == 4
    for name in ("policy", "value"):
        each = [update.losses[name] for update in algorithm.passes if not np.isnan(update.losses[name])]
        assert len(each) == (3 if spoiled >= 4 else 4)
        assert len(set(each)) == len(each)
        assert result.losses[name] == pytest.approx(np.mean(each))
    norms = [update.metrics["grad_norm"] for update in algorithm.passes if "grad_norm" in update.metrics]
    assert result.metrics["grad_norm"] == pytest.approx(np.mean(norms))
    assert result.metrics.get("skipped_steps", 0) == spoiled


class SaysKL(PPO):
    """Its loss logs the KL that it sees itself."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        log_ratio = batch.forward(module).logp(batch.action) - batch.logp
        return super().loss(module, batch).log(kl_of_loss=(log_ratio.exp() - 1 - log_ratio).mean())


def test_what_a_loss_logs_replaces_the_measured_figure_of_its_name() -> None:
    class SaysMore(PPO):
        def loss(self, module: Module, batch: Batch) -> Loss:
            return super().loss(module, batch).log(kl=123.0)

    measured, said = (cls(config(num_steps=64)).train().metrics for cls in (PPO, SaysMore))
    assert said["kl"] == 123.0 != measured["kl"]
    assert said["entropy"] == measured["entropy"]


@pytest.mark.parametrize(("start", "burn_in"), [("zeros", 0), ("zeros", 3), ("stored", 3)])
def test_a_recurrent_policys_kl_is_measured_in_the_states_of_the_loss(start: Any, burn_in: int) -> None:
    """With one gradient step of no size, the loss and the measure see one policy, all steps, and states made alike."""
    recurrent = {"network": NetworkConfig(hidden=(8,), recurrent="lstm"), "max_seq_len": 4, "lr": 0.0, "epochs": 1}
    algorithm = SaysKL(config(**recurrent, sequence_start=start, burn_in=burn_in, minibatch_size=64, num_minibatches=1))
    with torch.no_grad():  # else the memory hardly speaks at first
        for parameter in algorithm.module.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    result = algorithm.train()
    assert result.metrics["kl"] == pytest.approx(result.metrics["kl_of_loss"], rel=1e-3, abs=1e-9)
    assert (result.metrics["kl"] > 1e-4) == (start == "zeros")


def test_movement_is_measured_after_the_update() -> None:
    still = PPO(config(lr=0.0)).train()
    assert still.metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert still.metrics["clip_fraction"] == 0
    assert 0.6 < still.metrics["entropy"] <= np.log(2) + 1e-6


def test_results_count_what_was_done() -> None:
    algorithm = PPO(config(lr=((0, 1e-3), (256, 0.0)), num_steps=100, epochs=2))
    first, second, third = (algorithm.train() for _ in range(3))
    assert [r.iteration for r in (first, second, third)] == [1, 2, 3]
    assert [r.env_steps for r in (first, second, third)] == [100, 200, 300]
    assert [r.updates for r in (first, second, third)] == [8, 16, 24]
    rates = [r.metrics["lr"] for r in (first, second, third)]
    assert rates == pytest.approx([1e-3, 1e-3 * (156 / 256), 1e-3 * (56 / 256)])
    assert third.episodes == third.returns_counted > first.episodes
    assert third.length_mean == 10
    assert 0 <= third.return_min <= third.return_mean <= third.return_max <= 10
    assert first.losses.keys() == {"policy", "value"}
    assert {"grad_norm", "kl", "clip_fraction", "entropy", "lr"} <= first.metrics.keys()
    assert {"sample", "connect", "update"} <= first.times.keys()
    assert first.sample_steps_per_s > 0
    assert first.resumed is None
    assert first.to_dict()["iteration"] == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"clip": 0.0}, "`clip` is 0.0, but must be above 0"),
        ({"clip": ((0, 0.0), (9, 0.0))}, "`clip` is .*, but must be above 0"),
        ({"value_clip": -1.0}, "`value_clip` is -1.0, but must be above 0, or none"),
        ({"kl_target": 0.0}, "`kl_target` is 0.0"),
        ({"gamma": 1.5}, "`gamma` is 1.5, but must be between 0 and 1"),
        ({"num_envs": 0}, "`num_envs` is 0, but must be at least 1"),
        ({"threads": 0}, "`compute.threads` is 0"),
        ({"lr": ((5, 1.0), (0, 1.0))}, "a schedule is a number from 0 on, or points"),
        ({"env": None}, "PPO needs an env to act in: set `env`"),
        ({"connectors": ("frame_stak",)}, "there is no connector `frame_stak`. Nearest: `frame_stack`"),
    ],
)
def test_bad_settings(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        PPO(config(**given))


def test_the_clip_may_fall_to_0() -> None:
    with closing(PPO(config(clip=((0, 0.2), (1, 0.0))))) as ppo:
        ppo.train()
        assert np.isfinite(ppo.train().losses["policy"])


def test_connectors_learn_from_each_iteration_after_its_update() -> None:
    algorithm = Looks(config(connectors=("normalize_obs",), num_steps=100))
    collect = algorithm.runner.collect_each
    kept: list[Experience] = []

    def keeping(**asked: Any) -> dict[str | None, Experience]:
        parts = collect(**asked)
        kept.extend(parts.values())
        return parts

    algorithm.runner.collect_each = keeping  # type: ignore[method-assign]
    for _ in range(3):
        before = algorithm.connectors.state_dict()["connectors"][1]["state"]["obs"]
        algorithm.train()
        scale = np.sqrt(before["squares"] / before["count"] + 1e-8) if before["count"] else np.ones(2)
        expected = np.clip((kept[-1].steps["obs"] - before["mean"]) / scale, -10, 10)
        np.testing.assert_allclose(algorithm.seen.steps["obs"], expected, rtol=1e-4, atol=1e-4)
    learned = algorithm.connectors.state_dict()["connectors"][1]["state"]["obs"]
    assert learned["count"] == 300
    np.testing.assert_allclose(learned["mean"], np.concatenate([e.steps["obs"] for e in kept]).mean(0), rtol=1e-5)


class BuiltInAsOwn(torch.nn.Module):
    """The built-in network in a network of one's own, which acts through torch, and so returns values as it acts."""

    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        module = make_module(None, obs_space, action_space)
        self.net = module.net
        self.of: Any = module.forward

    def forward(self, obs: Any) -> Output:
        output: Output = self.of(obs)
        return Output(output.dist_inputs, output.value)


def test_a_network_of_ones_own_learns_what_the_same_built_in_network_learns() -> None:
    """Also from rows that older weights made, which wait for the end of their episodes."""
    given = {"env": "CartPole-v1", "whole_episodes": True, "lr": 1e-2, "connectors": ("normalize_obs",)}
    built_in, own = PPO(config(**given)), PPO(config(**given, module=BuiltInAsOwn))
    own.module.net.net.load_state_dict(built_in.module.net.state_dict())
    for _ in range(4):
        wanted, found = built_in.train(), own.train()
        assert found.losses == pytest.approx(wanted.losses, rel=1e-4)


@pytest.mark.parametrize(
    "given",
    [
        {"modules": {"first": OwnNet, "last": OwnNet}},
        {"modules": {"first": OwnNet, "last": None}},
        {"modules": ("first", "last"), "network": NetworkConfig(hidden=(8,), recurrent="gru", recurrent_size=8)},
    ],
)
def test_values_are_those_of_the_module_that_learns(given: dict[str, Any]) -> None:
    """Each module learns from all steps, but judges them by itself."""
    compared = []

    class Share(PPO):
        def assign(self, parts: dict[str, Experience]) -> dict[str, Experience]:
            return dict.fromkeys(parts, Experience.concat(list(parts.values())))

        def prepared(self, name: str, seen: Experience) -> Experience:
            exp = super().prepared(name, seen)
            obs, state = ({n: c for n, c in exp.steps.items() if n.startswith(root)} for root in ("obs", "state_in"))
            np.testing.assert_allclose(exp.steps["value"], self.policies[name].module.value_of(obs, state), atol=1e-5)
            compared.append(name)
            return exp

    Share(config(**given, env=Duel, module_of=first_and_last)).train()
    assert compared == ["first", "last"]
