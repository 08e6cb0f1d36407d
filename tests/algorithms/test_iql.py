# SPDX-License-Identifier: Apache-2.0
"""IQL against its formulas written out, and on recordings of mixed quality."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from offline_cases import mixed_cartpole, mixed_pendulum, moved, naive_critic, random_batch
from over_seeds import median_over_seeds, mistaken
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

import etude
from etude.algorithms import IQL, IQLConfig, Result
from etude.algorithms.critics import CriticModule
from etude.cli.main import main
from etude.errors import ModuleError, SettingsError
from etude.learners import Batch, Loss
from etude.modules import Module, NetworkConfig, Output

SMALL = NetworkConfig(hidden=(16, 8), activation="relu")
LINE = spaces.Box(-np.inf, np.inf, (3,), np.float32)
BOX, CHOICE = spaces.Box(-2.0, 4.0, (2,), np.float32), spaces.Discrete(3, start=1)


def made(action_space: Any, **given: Any) -> tuple[IQL, CriticModule]:
    config = IQLConfig(**{"data": "none", "seed": 0, "network": SMALL, **given})
    algorithm = IQL(config, saved_spaces={"main": (LINE, action_space)})
    assert isinstance(algorithm.module, CriticModule)
    moved(algorithm.module.target_critic)
    return algorithm, algorithm.module


def naive_losses(net: CriticModule, batch: Batch, expectile: float, beta: float, most: float) -> dict[str, Tensor]:
    """Eq. 5, 6 and 7 of the paper."""
    out, after = net.net(batch["obs"]), net.net(batch["next_obs"]).value.detach()
    if isinstance(net.action_space, spaces.Discrete):
        action = torch.eye(3)[batch["action"] - 1]
        dist: Any = Categorical(logits=out.dist_inputs)
        logp = dist.log_prob(batch["action"] - 1)
    else:
        action = (batch["action"] - 1.0) / 3.0
        mean, log_std = out.dist_inputs.chunk(2, -1)
        dist = Normal(mean, log_std.exp())
        logp = dist.log_prob(batch["action"]).sum(-1)
    q_target = torch.minimum(*(naive_critic(net.target_critic, k, batch["obs"], action) for k in range(2))).detach()
    u = q_target - out.value
    value = torch.stack([abs(expectile - float(x < 0)) * x**2 for x in u]).mean()
    target = batch["reward"] + 0.9 * torch.tensor([0.0 if done else 1.0 for done in batch["terminated"]]) * after
    critic = sum(((target - naive_critic(net.critic, k, batch["obs"], action)) ** 2).mean() for k in range(2))
    weight = torch.exp(beta * u.detach()).clip(max=most)
    assert isinstance(critic, Tensor)
    return {"policy": -(weight * logp).mean(), "value": value, "critic": critic}


@pytest.mark.parametrize("action_space", [BOX, CHOICE])
@pytest.mark.parametrize(("expectile", "beta", "most"), [(0.7, 3.0, 100.0), (0.9, 10.0, 2.0)])
def test_losses_and_their_gradients_are_those_of_the_paper(
    action_space: Any, expectile: float, beta: float, most: float
) -> None:
    algorithm, net = made(action_space, expectile=expectile, beta=beta, max_weight=most, gamma=0.9)
    batch = random_batch(net, action_space, 3)
    losses, loss = naive_losses(net, batch, expectile, beta, most), algorithm.loss(net, batch)
    torch.testing.assert_close(loss.parts, losses, rtol=1e-4, atol=1e-5)
    named = {name: p for name, p in net.named_parameters() if p.requires_grad}
    total = dict(zip(named, torch.autograd.grad(loss.total, list(named.values()), retain_graph=True), strict=True))
    for part, owner in (("policy", "net.policy"), ("value", "net.critic"), ("critic", "critic.")):
        mine = {n: p for n, p in named.items() if n.startswith((owner, "net.value_head" if part == "value" else owner))}
        grads = torch.autograd.grad(losses[part], list(mine.values()))
        for name, grad in zip(mine, grads, strict=True):
            torch.testing.assert_close(total[name], grad, rtol=1e-3, atol=1e-5)


def test_targets_are_moving_averages_and_nothing_else_trains_them() -> None:
    algorithm, net = made(CHOICE, tau=0.1)
    before = [p.clone() for p in net.target_critic.parameters()]
    algorithm.learner.only.update_from([columns(random_batch(net, CHOICE, 3))])
    for p, old, new in zip(net.target_critic.parameters(), before, net.critic.parameters(), strict=True):
        torch.testing.assert_close(p, 0.9 * old + 0.1 * new)
        assert not torch.equal(old, new)


def columns(batch: Batch) -> dict[str, Any]:
    return {name: batch[name] for name in ("obs", "next_obs", "action", "reward", "terminated")}


@pytest.mark.parametrize(
    "action_space",
    [
        spaces.MultiDiscrete([3, 2]),
        spaces.MultiBinary(4),
        spaces.Box(-np.inf, np.inf, (2,), np.float32),
        spaces.Dict({"turn": spaces.Discrete(3), "push": spaces.Box(-1, 1, (2, 2), np.float32)}),
    ],
)
def test_any_actions_can_be_learned(action_space: Any) -> None:
    algorithm, _ = made(action_space)
    action_space.seed(0)
    drawn = [action_space.sample() for _ in range(8)]
    if isinstance(action_space, spaces.Dict):
        action = {f"action/{name}": np.stack([row[name] for row in drawn]) for name in ("turn", "push")}
    else:
        action = {"action": np.stack(drawn)}
    rng = np.random.default_rng(0)
    obs, following = rng.normal(size=(2, 8, 3)).astype(np.float32)
    step = {"obs": obs, "next_obs": following, "reward": np.ones(8), "terminated": np.zeros(8, bool), **action}
    update = algorithm.learner.only.update_from([step] * 3)
    assert all(np.isfinite(value) for value in update.losses.values())


@pytest.mark.parametrize("given", [{"precision": "bfloat16"}, {"accumulate": 2}, {"squash": True}])
def test_other_ways_to_step(given: dict[str, Any]) -> None:
    algorithm, net = made(BOX, **given)
    update = algorithm.learner.only.update_from([columns(random_batch(net, BOX, 3))] * 4)
    assert all(np.isfinite(value) for value in update.losses.values())


# -- what is learned --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> str:
    return mixed_cartpole(tmp_path_factory.mktemp("cartpole") / "data")


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory: pytest.TempPathFactory) -> str:
    return mixed_pendulum(tmp_path_factory.mktemp("pendulum") / "data")


class WrongSign(IQL):
    """Takes each reward for a loss."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        batch.used["reward"] = -batch["reward"]
        return super().loss(module, batch)


class NoTarget(IQL):
    """Does not bootstrap."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        batch.used["terminated"] = torch.ones_like(batch["terminated"])
        return super().loss(module, batch)


QUICK: dict[str, Any] = {
    "seed": 0,
    "network": NetworkConfig(hidden=(64, 64), activation="relu"),
    "lr": 1e-3,
    "tau": 0.02,
    "gamma": 0.97,
    "updates_per_iteration": 1500,
}


@pytest.mark.learning
@pytest.mark.parametrize(
    ("algorithm", "least", "most"), [(IQL, 400, 500), mistaken(WrongSign, 0, 200), mistaken(NoTarget, 0, 320)]
)
def test_learns_cartpole_from_a_mixed_recording(cartpole: str, algorithm: type[IQL], least: int, most: int) -> None:
    def score(seed: int) -> float:
        trained = algorithm(IQLConfig(data=cartpole, **QUICK | {"seed": seed}))
        trained.train()
        return trained.evaluate(20, env="CartPole-v1", seed=5).return_mean  # BC: about 250

    assert least <= median_over_seeds(score) <= most


@pytest.mark.learning
@pytest.mark.parametrize(("algorithm", "least", "most"), [(IQL, -800, 0), mistaken(WrongSign, -2000, -1000)])
def test_learns_pendulum_from_a_mixed_recording(pendulum: str, algorithm: type[IQL], least: int, most: int) -> None:
    def score(seed: int) -> float:
        trained = algorithm(IQLConfig(data=pendulum, **QUICK | {"gamma": 0.95, "seed": seed}))
        trained.train()
        return trained.evaluate(20, env="Pendulum-v1", seed=5).return_mean  # BC: about -1,250

    assert least <= median_over_seeds(score) <= most


# -- going on, and what it is told ------------------------------------------------------------------------------------


def facts(result: Result) -> str:
    return json.dumps([result.updates, result.losses])


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(pendulum: str, tmp_path: Path) -> None:
    algorithm = IQL(IQLConfig(**{**QUICK, "data": pendulum, "updates_per_iteration": 7, "network": SMALL}))
    for _ in range(2):
        algorithm.train()
    algorithm.save(tmp_path)
    expected = [facts(algorithm.train()) for _ in range(3)]
    resumed = etude.load(tmp_path)
    assert [facts(resumed.train()) for _ in range(3)] == expected
    for a, b in zip(resumed.module.parameters(), algorithm.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_on_the_command_line(pendulum: str, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    flags = ["--data", pendulum, "--updates-per-iteration", "5", "--batch-size", "32", "--expectile", "0.8"]
    assert main(["train", "iql", *flags, "--stop.updates", "10", "--out", out, "--quiet"]) == 0
    loaded = etude.load(out)
    assert isinstance(loaded, IQL)
    assert (loaded.config.expectile, loaded.updates) == (0.8, 10)
    assert main(["evaluate", out, "--env", "Pendulum-v1", "--episodes", "1"]) == 0


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("expectile", 1.0, "above 0 and below 1"),
        ("beta", -1.0, "at least 0"),
        ("max_weight", 0.5, "at least 1"),
        ("gamma", 1.1, "between 0 and 1"),
        ("tau", 0.0, "above 0 and at most 1"),
    ],
)
def test_bad_settings(name: str, value: Any, rule: str) -> None:
    with pytest.raises(SettingsError, match=f"`{name}` is {value}, but must be {rule}"):
        IQLConfig(data="data", **{name: value})


class PolicyAlone(nn.Module):
    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, obs: Any) -> Output:
        return Output(self.linear(obs))


def test_networks_that_do_not_fit_are_refused() -> None:
    algorithm, net = made(CHOICE, module=PolicyAlone)
    with pytest.raises(ModuleError, match="PolicyAlone gives no values, which are learned here"):
        algorithm.loss(net, random_batch(net, CHOICE, 3))
    with pytest.raises(SettingsError, match="Network is recurrent, but iql learns from single steps"):
        made(CHOICE, network=NetworkConfig(recurrent="gru"))
    with pytest.raises(ModuleError, match="Module is not a CriticModule"):
        algorithm.loss(Module(net.net, LINE, CHOICE, net.dist), random_batch(net, CHOICE, 3))


class OneNet(nn.Module):
    """Policy and values share a layer."""

    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, obs: Any) -> Output:
        both = self.heads(torch.tanh(self.body(obs)))
        return Output(both[:, :3], both[:, 3])


def test_a_network_of_ones_own() -> None:
    algorithm, net = made(CHOICE, module=OneNet)
    update = algorithm.learner.only.update_from([columns(random_batch(net, CHOICE, 3))] * 2)
    assert set(update.losses) == {"policy", "value", "critic"}
