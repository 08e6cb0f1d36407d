# SPDX-License-Identifier: Apache-2.0
"""AWAC against its formulas written out, and on a recording of guesses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from offline_cases import moved, naive_critic, random_batch
from over_seeds import median_over_seeds, mistaken
from torch import Tensor
from torch.distributions import Normal

import etude
from etude import AWAC, AWACConfig, Experience, NetworkConfig, RecordingWriter, Segments, SettingsError
from etude.algorithms.critics import CriticModule
from etude.learners import Batch, Loss
from etude.modules import Module

SMALL = NetworkConfig(hidden=(16, 8), activation="relu")
LINE = spaces.Box(-np.inf, np.inf, (3,), np.float32)
BOX = spaces.Box(-2.0, 4.0, (2,), np.float32)


def made(action_space: Any = BOX, **given: Any) -> tuple[AWAC, CriticModule]:
    config = AWACConfig(**{"data": "none", "seed": 0, "network": SMALL, **given})
    algorithm = AWAC(config, saved_spaces={"main": (LINE, action_space)})
    assert isinstance(algorithm.module, CriticModule)
    moved(algorithm.module.target_critic)
    return algorithm, algorithm.module


def least(critic: Any, obs: Tensor, action: Tensor) -> Tensor:
    """The lower of both critics, of actions in the space's units, which are clipped and scaled to [-1, 1]."""
    scaled = (action.clip(-2, 4) - 1.0) / 3.0
    return torch.minimum(*(naive_critic(critic, k, obs, scaled) for k in range(2)))


def naive_losses(net: CriticModule, batch: Batch, beta: float, most: float) -> dict[str, Tensor]:
    """Eq. 3 and 13; the noise is drawn in the order in which the loss draws it."""
    noise = [torch.randn(32, 2) for _ in range(2)]
    mean, log_std = net.net(batch["obs"]).dist_inputs.chunk(2, -1)
    policy: Any = Normal(mean, log_std.exp())
    with torch.no_grad():
        next_mean, next_log_std = net.net(batch["next_obs"]).dist_inputs.chunk(2, -1)
        after = least(net.target_critic, batch["next_obs"], next_mean + next_log_std.exp() * noise[0])
        target = batch["reward"] + 0.9 * (1.0 - batch["terminated"].float()) * after
        value = least(net.critic, batch["obs"], mean + log_std.exp() * noise[1])
        weight = torch.exp(beta * (least(net.critic, batch["obs"], batch["action"]) - value)).clip(max=most)
    critic = torch.zeros(())
    for k in range(2):
        q = naive_critic(net.critic, k, batch["obs"], (batch["action"] - 1.0) / 3.0)
        critic = critic + ((target - q) ** 2).mean()
    return {"policy": -(weight * policy.log_prob(batch["action"]).sum(-1)).mean(), "critic": critic}


@pytest.mark.parametrize(("beta", "most"), [(2.0, 100.0), (30.0, 1.5), (0.0, 100.0)])
def test_losses_and_their_gradients_are_those_of_the_paper(beta: float, most: float) -> None:
    algorithm, net = made(beta=beta, max_weight=most, gamma=0.9)
    batch = random_batch(net, BOX, 3)
    torch.manual_seed(0)
    losses = naive_losses(net, batch, beta, most)
    torch.manual_seed(0)
    loss = algorithm.loss(net, batch)
    torch.testing.assert_close(loss.parts, losses, rtol=1e-4, atol=1e-5)
    named = {name: p for name, p in net.named_parameters() if p.requires_grad}
    total = dict(zip(named, torch.autograd.grad(loss.total, list(named.values()), retain_graph=True), strict=True))
    for part, owner in (("policy", "net."), ("critic", "critic.")):
        mine = {name: p for name, p in named.items() if name.startswith(owner)}
        for name, grad in zip(mine, torch.autograd.grad(losses[part], list(mine.values())), strict=True):
            assert grad.abs().sum() > 0
            torch.testing.assert_close(total[name], grad, rtol=1e-3, atol=1e-5)
    assert all(name.startswith(("net.", "critic.")) for name in named)


def columns(net: Module) -> dict[str, Any]:
    batch = random_batch(net, BOX, 3)
    return {name: batch[name] for name in ("obs", "next_obs", "action", "reward", "terminated")}


def test_targets_are_moving_averages() -> None:
    algorithm, net = made(tau=0.1)
    before = [p.clone() for p in net.target_critic.parameters()]
    algorithm.learner.only.update_from([columns(net)])
    for p, old, new in zip(net.target_critic.parameters(), before, net.critic.parameters(), strict=True):
        torch.testing.assert_close(p, 0.9 * old + 0.1 * new)


@pytest.mark.filterwarnings("ignore")  # of torch about itself, while it compiles
@pytest.mark.parametrize(
    "given",
    [
        {"squash": True},
        {"precision": "bfloat16"},
        {"actor_lr": 1e-5},
        pytest.param({"compile": True}, marks=pytest.mark.slow),
    ],
)
def test_other_ways_to_step(given: dict[str, Any]) -> None:
    algorithm, net = made(**given)
    update = algorithm.learner.only.update_from([columns(net)] * 4)
    assert set(update.losses) == {"policy", "critic"}
    assert all(np.isfinite(value) for value in update.losses.values())


@pytest.fixture(scope="module")
def guesses(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Episodes of two steps. In the first, a number is seen, and another is guessed, uniformly from -1 to 1. In the
    second, the guess is seen, and costs twice its distance to the number."""
    rng, num = np.random.default_rng(0), 1500
    number, guess = rng.choice([-0.6, 0.6], num), rng.uniform(-1, 1, num)
    obs, action, reward = np.zeros((2 * num, 3)), rng.uniform(-1, 1, (2 * num, 1)), np.zeros(2 * num)
    obs[:, 0] = np.repeat(number, 2)
    obs[1::2, 1], obs[1::2, 2] = guess, 1.0
    action[::2, 0], reward[1::2] = guess, -2.0 * np.abs(guess - number)
    steps = {"obs": obs.astype(np.float32), "action": action.astype(np.float32), "reward": reward}
    segments = Segments.of(num, episode_id=[str(i) for i in range(num)], terminated=np.ones(num, bool))
    path = tmp_path_factory.mktemp("guesses") / "data"
    with RecordingWriter(path, obs_space=LINE, action_space=spaces.Box(-1.0, 1.0, (1,), np.float32)) as writer:
        writer.write(Experience(steps, np.arange(0, 2 * num + 1, 2), segments, {"obs": np.zeros((num, 3), np.float32)}))
    return str(path)


class WrongSign(AWAC):
    """Takes each reward for a loss."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        batch.used["reward"] = -batch["reward"]
        return super().loss(module, batch)


class NoTarget(AWAC):
    """Does not bootstrap."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        batch.used["terminated"] = torch.ones_like(batch["terminated"])
        return super().loss(module, batch)


@pytest.mark.learning
@pytest.mark.parametrize(
    ("algorithm", "given", "least", "most"),
    [
        (AWAC, {}, 0.4, 1.0),
        (AWAC, {"beta": 0.0}, -0.15, 0.15),  # BC
        mistaken(WrongSign, {}, -1.0, -0.2),
        mistaken(NoTarget, {}, -0.15, 0.15),
    ],
)
def test_the_better_guesses_are_imitated(
    guesses: str, algorithm: type[AWAC], given: dict[str, Any], least: float, most: float
) -> None:
    def score(seed: int) -> float:
        network = NetworkConfig(hidden=(32,), activation="relu")
        settings: dict[str, Any] = {"network": network, "batch_size": 256, "lr": 3e-3, "tau": 0.05, "beta": 5.0}
        trained = algorithm(AWACConfig(data=guesses, seed=seed, updates_per_iteration=800, **settings | given))
        trained.train()
        said = trained.module(torch.tensor([[-0.6, 0.0, 0.0], [0.6, 0.0, 0.0]])).dist_inputs[:, 0].detach()
        return float(said[1] - said[0]) / 2

    assert least <= median_over_seeds(score) <= most


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(guesses: str, tmp_path: Path) -> None:
    algorithm = AWAC(AWACConfig(data=guesses, updates_per_iteration=7, network=SMALL, seed=0, batch_size=64))
    algorithm.train()
    algorithm.save(tmp_path)
    expected = [json.dumps(algorithm.train().losses) for _ in range(2)]
    resumed = etude.load(tmp_path)
    assert [json.dumps(resumed.train().losses) for _ in range(2)] == expected


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("beta", -1.0, "at least 0"),
        ("max_weight", 0.5, "at least 1"),
        ("gamma", 1.1, "between 0 and 1"),
        ("tau", 0.0, "above 0 and at most 1"),
        ("n_step", 0, "at least 1"),
    ],
)
def test_bad_settings(name: str, value: Any, rule: str) -> None:
    with pytest.raises(SettingsError, match=f"`{name}` is {value}, but must be {rule}"):
        AWACConfig(data="data", **{name: value})


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(SettingsError, match="AWAC needs a Box of floats. Use IQL"):
        made(spaces.Discrete(2))
    with pytest.raises(SettingsError, match="Network is recurrent, but awac learns from single steps"):
        made(network=NetworkConfig(recurrent="gru"))
