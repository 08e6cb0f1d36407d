# SPDX-License-Identifier: Apache-2.0
"""TD3+BC against its formulas written out, and on a recording of mixed quality."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from offline_cases import mixed_pendulum, moved, naive_critic, random_batch
from over_seeds import median_over_seeds, mistaken
from torch import Tensor

import etude
from etude.algorithms import TD3BC, TD3BCConfig
from etude.algorithms.td3 import DeterministicModule
from etude.cli.main import main
from etude.errors import ModuleError, SettingsError
from etude.learners import Batch, Loss
from etude.modules import Module, NetworkConfig

SMALL = NetworkConfig(hidden=(16, 8), activation="relu")
LINE = spaces.Box(-np.inf, np.inf, (3,), np.float32)
BOX = spaces.Box(-2.0, 4.0, (2,), np.float32)


def made(action_space: Any = BOX, **given: Any) -> tuple[TD3BC, DeterministicModule]:
    config = TD3BCConfig(**{"data": "none", "seed": 0, "network": SMALL, **given})
    algorithm = TD3BC(config, saved_spaces={"main": (LINE, action_space)})
    assert isinstance(algorithm.module, DeterministicModule)
    moved(algorithm.module.target_critic)
    moved(algorithm.module.target.net)
    return algorithm, algorithm.module


def columns(net: Module) -> dict[str, Any]:
    batch = random_batch(net, BOX, 3)
    return {name: batch[name] for name in ("obs", "next_obs", "action", "reward", "terminated")}


def naive_losses(net: DeterministicModule, batch: Batch, alpha: float) -> dict[str, Tensor]:
    """TD3's algorithm 1 and eq. 5 of TD3+BC, with actions in [-1, 1]."""
    action = (batch["action"] - 1.0) / 3.0
    with torch.no_grad():
        noise = (0.3 * torch.randn(32, 2)).clip(-0.4, 0.4)
        after = (torch.tanh(net.target.net(batch["next_obs"]).dist_inputs) + noise).clip(-1, 1)
        q = torch.minimum(*(naive_critic(net.target_critic, k, batch["next_obs"], after) for k in range(2)))
        target = batch["reward"] + 0.9 * (1.0 - batch["terminated"].float()) * q
    critic = sum(((target - naive_critic(net.critic, k, batch["obs"], action)) ** 2).mean() for k in range(2))
    assert isinstance(critic, Tensor)
    policy = torch.tanh(net.net(batch["obs"]).dist_inputs)
    q = naive_critic(net.critic, 0, batch["obs"], policy)
    scale = alpha / q.abs().mean().detach()
    return {"critic": critic, "actor": -(scale * q - ((policy - action) ** 2).mean(1)).mean()}


def test_losses_and_their_gradients_are_those_of_the_papers() -> None:
    algorithm, net = made(gamma=0.9, alpha=1.7, target_noise=0.3, target_noise_clip=0.4, policy_delay=1)
    batch = random_batch(net, BOX, 3)
    torch.manual_seed(0)
    losses = naive_losses(net, batch, 1.7)
    torch.manual_seed(0)
    loss = algorithm.loss(net, batch)
    torch.testing.assert_close(loss.parts, losses, rtol=1e-4, atol=1e-5)
    groups = algorithm.parameter_groups(net)
    every = [p for group in groups.values() for p in group]
    total = dict(zip(every, torch.autograd.grad(loss.total, every, retain_graph=True), strict=True))
    for name, group in groups.items():
        for p, grad in zip(group, torch.autograd.grad(losses[name], list(group), retain_graph=True), strict=True):
            torch.testing.assert_close(total[p], grad, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of torch about itself, while it compiles
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_policy_and_targets_move_in_every_third_step_alone(compiled: bool) -> None:
    algorithm, net = made(policy_delay=3, tau=0.1, compile=compiled)
    watched = {"actor": net.net, "critic": net.critic, "targets": net.target_critic, "target policy": net.target}
    moves = []
    for _ in range(6):
        before = {name: [p.clone() for p in part.parameters()] for name, part in watched.items()}
        losses = algorithm.learner.only.update_from([columns(net)]).losses
        now = [n for n, part in watched.items() if any(map(differ, before[n], part.parameters()))]
        assert ("actor" in losses) == ("actor" in now)
        moves.append(now)
        if "targets" in now:
            for p, old, new in zip(
                net.target.net.parameters(), before["target policy"], net.net.parameters(), strict=True
            ):
                torch.testing.assert_close(p, 0.9 * old + 0.1 * new)
    every = list(watched)
    assert moves == [["critic"], ["critic"], every] * 2


def differ(a: Tensor, b: Tensor) -> bool:
    return not torch.equal(a, b)


def test_what_acts_is_the_policy_with_noise_where_it_explores() -> None:
    _, net = made()
    obs = {"obs": np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32)}
    actions = []
    for explore in (False, True):
        actor = net.actor(explore=explore)
        actor.start(np.random.default_rng(0), 500)
        actions.append(actor.step(obs)[0]["action"])
    expected = 1.0 + 3.0 * np.tanh(net(torch.from_numpy(obs["obs"])).dist_inputs.detach().numpy())
    np.testing.assert_allclose(actions[0], expected, rtol=1e-4, atol=1e-4)
    assert 0.25 < (actions[1] - actions[0]).std() < 0.35  # 0.1, times 3


@pytest.mark.parametrize("given", [{"precision": "bfloat16"}, {"accumulate": 2}, {"policy_delay": 1}])
def test_other_ways_to_step(given: dict[str, Any]) -> None:
    algorithm, net = made(**given)
    update = algorithm.learner.only.update_from([columns(net)] * 4)
    assert set(update.losses) == {"actor", "critic"}
    assert all(np.isfinite(value) for value in update.losses.values())


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory: pytest.TempPathFactory) -> str:
    return mixed_pendulum(tmp_path_factory.mktemp("pendulum") / "data")


class WrongSign(TD3BC):
    """Takes each reward for a loss."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        batch.used["reward"] = -batch["reward"]
        return super().loss(module, batch)


class NoTarget(TD3BC):
    """Does not bootstrap."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        batch.used["terminated"] = torch.ones_like(batch["terminated"])
        return super().loss(module, batch)


@pytest.mark.learning
@pytest.mark.parametrize(
    ("algorithm", "given", "least", "most"),
    [
        (TD3BC, {}, -700, 0),
        (TD3BC, {"alpha": 0.0}, -2000, -900),  # BC
        mistaken(WrongSign, {}, -2000, -900),
        mistaken(NoTarget, {}, -2000, -800),
    ],
)
def test_learns_pendulum_from_a_mixed_recording(
    pendulum: str, algorithm: type[TD3BC], given: dict[str, Any], least: int, most: int
) -> None:
    settings: dict[str, Any] = {
        "network": NetworkConfig(hidden=(64, 64), activation="relu"),
        "lr": 1e-3,
        "tau": 0.02,
        "gamma": 0.95,
        "alpha": 40.0,
        "updates_per_iteration": 2000,
        "connectors": ("normalize_obs",),
    }

    def score(seed: int) -> float:
        trained = algorithm(TD3BCConfig(data=pendulum, **settings | given | {"seed": seed}))
        trained.train()
        return trained.evaluate(20, env="Pendulum-v1", seed=5).return_mean

    assert least <= median_over_seeds(score) <= most


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(pendulum: str, tmp_path: Path) -> None:
    config = TD3BCConfig(data=pendulum, updates_per_iteration=7, network=SMALL, seed=0, connectors=("normalize_obs",))
    algorithm = TD3BC(config)
    algorithm.train()
    algorithm.save(tmp_path)  # after 7 steps: between two of the policy
    expected = [json.dumps(algorithm.train().losses) for _ in range(3)]
    resumed = etude.load(tmp_path)
    assert [json.dumps(resumed.train().losses) for _ in range(3)] == expected
    for name, value in algorithm.module.state_dict().items():
        assert torch.equal(value, resumed.module.state_dict()[name]), name


def test_on_the_command_line(pendulum: str, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    flags = ["--data", pendulum, "--updates-per-iteration", "5", "--batch-size", "32", "--alpha", "4"]
    assert main(["train", "td3_bc", *flags, "--stop.updates", "10", "--out", out, "--quiet"]) == 0
    loaded = etude.load(out)
    assert isinstance(loaded, TD3BC)
    assert (loaded.config.alpha, loaded.updates) == (4.0, 10)
    assert main(["evaluate", out, "--env", "Pendulum-v1", "--episodes", "1"]) == 0


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("alpha", -1.0, "at least 0"),
        ("policy_delay", 0, "at least 1"),
        ("target_noise", -0.1, "at least 0"),
        ("target_noise_clip", -0.1, "at least 0"),
        ("gamma", 1.1, "between 0 and 1"),
        ("tau", 0.0, "above 0 and at most 1"),
        ("squash", False, "true: the policy always uses tanh"),
    ],
)
def test_bad_settings(name: str, value: Any, rule: str) -> None:
    with pytest.raises(SettingsError, match=rf"`(\w+\.)?{name}` is {value}, but must be {rule}"):
        TD3BCConfig(data="data", **{name: value})


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"TD3\+BC needs a Box of floats. Use IQL"):
        made(spaces.Discrete(2))
    with pytest.raises(SettingsError, match="Network is recurrent, but td3_bc learns from single steps"):
        made(network=NetworkConfig(recurrent="gru"))
    algorithm, net = made()
    with pytest.raises(ModuleError, match="Module is not a DeterministicModule"):
        algorithm.loss(net.target, random_batch(net, BOX, 3))
