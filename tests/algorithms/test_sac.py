# SPDX-License-Identifier: Apache-2.0
"""SAC against its formulas written out, and on Pendulum."""

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control import PendulumEnv
from over_seeds import median_over_seeds
from setting_envs import Two
from torch import Tensor, nn
from torch.distributions import AffineTransform, Normal, TanhTransform, TransformedDistribution

import etude
from etude import SAC, NetworkConfig, Output, SACConfig, SettingsError, SpaceError, Stop
from etude.algorithms import ReplayConfig
from etude.algorithms.sac import SoftModule
from etude.learners import Batch, Loss
from etude.modules import Module
from etude.modules.critics import TwinCritic

SMALL: dict[str, Any] = {
    "env": "Pendulum-v1",
    "seed": 0,
    "network": NetworkConfig(hidden=(16, 8), activation="relu"),
    "learning_starts": 64,
    "batch_size": 32,
    "capacity": 1000,
    "iteration_steps": 128,
}


def sac(**given: Any) -> SAC:
    return SAC(SACConfig(**{**SMALL, **given}))


def soft(algorithm: SAC) -> SoftModule:
    assert isinstance(algorithm.module, SoftModule)
    return algorithm.module


def batch_of(algorithm: SAC, size: int = 32) -> Batch:
    columns = algorithm.replay.sample(size)
    return Batch({name: torch.as_tensor(column) for name, column in columns.items()}, algorithm.module)


def trained(**given: Any) -> tuple[SAC, SoftModule, Batch]:
    algorithm = sac(**given)
    algorithm.train()
    return algorithm, soft(algorithm), batch_of(algorithm)


def naive_q(critic: TwinCritic, which: int, obs: Tensor, action: Tensor) -> Tensor:
    x = torch.cat((obs, action), -1)
    weights = dict(critic.named_parameters())
    for i in range(3):
        x = x @ weights[f"weight_{i}"][which] + weights[f"bias_{i}"][which][0]
        x = torch.relu(x) if i < 2 else x
    return x[:, 0]


def naive_policy(module: SoftModule, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Actions in [-1, 1] and their log-densities there: eq. 26 of appendix C."""
    mean, log_std = module.net(obs).dist_inputs.chunk(2, -1)
    normal: Any = Normal(mean, log_std.exp())
    drawn = mean + log_std.exp() * noise
    action = torch.tanh(drawn)
    return action, (normal.log_prob(drawn) - (1 - action.square()).log()).sum(-1)


def naive_losses(algorithm: SAC, batch: Batch, alpha: float) -> dict[str, Tensor]:
    """As the paper has them; the noise is drawn in the order in which the loss draws it."""
    module = soft(algorithm)
    noise = [torch.randn(32, 1) for _ in range(2)]
    with torch.no_grad():
        action, logp = naive_policy(module, batch.next_obs, noise[0])
        q = torch.minimum(*(naive_q(module.target_critic, k, batch.next_obs, action) for k in range(2)))
        target = batch.reward + 0.99 * ~batch["terminated"] * (q - alpha * logp)
    critic = torch.zeros(())
    for k in range(2):
        critic = critic + 0.5 * (naive_q(module.critic, k, batch.obs, batch.action / 2) - target).square().mean()
    action, logp = naive_policy(module, batch.obs, noise[1])
    q = torch.minimum(*(naive_q(module.critic, k, batch.obs, action) for k in range(2)))
    temperature = -(module.log_temperature * (logp.detach() - 1)).mean()
    return {"actor": (alpha * logp - q).mean(), "critic": critic, "temperature": temperature}


def test_losses_and_their_gradients_are_those_of_the_paper() -> None:
    algorithm, module, batch = trained()
    with torch.no_grad():
        for p in module.target_critic.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        module.log_temperature.fill_(math.log(0.3))
    groups = algorithm.parameter_groups(module)
    assert sorted(groups) == ["actor", "critic", "temperature"]
    torch.manual_seed(3)
    losses = naive_losses(algorithm, batch, 0.3)
    torch.manual_seed(3)
    loss = algorithm.loss(module, batch)
    torch.testing.assert_close(loss.parts, losses, rtol=1e-4, atol=1e-4)
    every = [p for group in groups.values() for p in group]
    of_the_sum = dict(zip(every, torch.autograd.grad(loss.total, every, retain_graph=True), strict=True))
    for name, group in groups.items():
        own = torch.autograd.grad(losses[name], list(group), retain_graph=True)
        for p, grad in zip(group, own, strict=True):
            assert grad.abs().sum() > 0
            torch.testing.assert_close(of_the_sum[p], grad, rtol=1e-3, atol=1e-4)


def test_each_part_moves_its_own_parameters_alone() -> None:
    algorithm, module, batch = trained()
    groups = algorithm.parameter_groups(module)
    loss = algorithm.loss(module, batch)
    for part in loss.parts:
        for name, group in groups.items():
            grads = torch.autograd.grad(loss.parts[part], list(group), retain_graph=True, allow_unused=True)
            touched = any(grad is not None and bool(grad.abs().sum() > 0) for grad in grads)
            assert touched == (name == part), (part, name)
    owned = {id(p) for group in groups.values() for p in group}
    assert {id(p) for p in module.parameters() if p.requires_grad} == owned
    assert not any(p.requires_grad for p in module.target_critic.parameters())


def test_targets_are_moving_averages() -> None:
    algorithm, module, _ = trained(tau=0.1)
    before = [p.clone() for p in module.target_critic.parameters()]
    algorithm.make_updates(1)
    for p, old, new in zip(module.target_critic.parameters(), before, module.critic.parameters(), strict=True):
        torch.testing.assert_close(p, 0.9 * old + 0.1 * new)


def test_sample_is_the_squashed_gaussian_of_actions_scaled_to_one() -> None:
    algorithm = sac()
    module = soft(algorithm)
    obs = torch.randn(64, 3)
    torch.manual_seed(0)
    action, logp = module.sample(obs)
    mean, log_std = module.net(obs).dist_inputs.chunk(2, -1)
    dist: Any = TransformedDistribution(
        Normal(mean, log_std.exp()), [TanhTransform(cache_size=1), AffineTransform(0.0, 2.0)]
    )  # Pendulum's bounds are -2 and 2
    inside = action.abs() < 0.999
    expected = dist.log_prob(2.0 * action) + math.log(2.0)
    torch.testing.assert_close(logp[inside[:, 0]], expected[inside].detach(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(module.scaled(2.0 * action), action)
    assert bool((action.abs() <= 1).all())


def test_actions_are_uniform_until_learning_starts() -> None:
    algorithm = sac(learning_starts=600, iteration_steps=600, updates_per_step=0.125)
    result = algorithm.train()
    actions = algorithm.replay.sample(600)["action"]
    assert result.updates == 0
    assert abs(actions.mean()) < 0.2
    assert actions.std() == pytest.approx(4 / math.sqrt(12), abs=0.06)
    assert soft(algorithm).acts_at_random
    assert algorithm.train().updates == 75
    assert not soft(algorithm).acts_at_random


def test_the_temperature_can_be_given() -> None:
    algorithm, module, batch = trained(temperature=0.25)
    assert sorted(algorithm.parameter_groups(module)) == ["actor", "critic"]
    loss = algorithm.loss(module, batch)
    assert sorted(loss.parts) == ["actor", "critic"]
    assert loss.logged["temperature"].item() == pytest.approx(0.25)


@pytest.mark.parametrize(("saved", "given"), [(0.2, 5.0), (None, 0.5), (0.2, None), (0.2, 0.2)])
def test_a_loaded_run_has_the_temperature_that_is_set_then(
    saved: float | None, given: float | None, tmp_path: Path
) -> None:
    algorithm, module, _ = trained(temperature=saved)
    algorithm.save(tmp_path)
    before = module.log_temperature.exp().item()
    loaded = etude.load(tmp_path, temperature=given)
    start = before if given is None else given
    assert loaded.module.log_temperature.exp().item() == pytest.approx(start)
    loaded.train()
    now = loaded.module.log_temperature.exp().item()
    assert now == pytest.approx(start) if given is not None else 0 < abs(now - before) < 0.1
    weights_alone = sac(temperature=0.05)
    weights_alone.load(tmp_path, "modules")
    assert soft(weights_alone).log_temperature.exp().item() == pytest.approx(0.05)


def by_side(agent: str, episode: Any) -> str:
    return "new" if agent == "left" and episode.number % 2 else agent


def test_each_module_has_the_temperature_of_its_own_settings(tmp_path: Path) -> None:
    def temperatures(algorithm: Any) -> list[float]:
        return [round(p.module.log_temperature.exp().item(), 6) for p in algorithm.policies.values()]

    given = {"env": Two, "modules": ("left", "right"), "temperature": 0.1, "overrides": {"right": {"temperature": 0.5}}}
    algorithm = sac(**given)
    algorithm.save(tmp_path)
    assert temperatures(etude.load(tmp_path, env=Two)) == [0.1, 0.5]
    loaded = etude.load(tmp_path, env=Two, temperature=0.2, overrides={"right": {"temperature": 0.7}})
    assert temperatures(loaded) == [0.2, 0.7]
    loaded.add_module("new", like="right", module_of=by_side)  # a copy has no overrides
    assert temperatures(loaded) == [0.2, 0.7, 0.2]


def test_the_temperature_falls_while_the_entropy_is_above_its_target() -> None:
    high, low = (sac(target_entropy=entropy, lr=1e-2) for entropy in (-20.0, 20.0))
    assert high.train().metrics["temperature"] < 1 < low.train().metrics["temperature"]


def test_priorities_are_the_mean_errors_of_both_critics() -> None:
    algorithm, module, batch = trained(prioritized=True)
    torch.manual_seed(0)
    loss = algorithm.loss(module, batch)
    torch.manual_seed(0)
    values = module.critic(module.columns_of(batch.obs), module.scaled(batch.action))
    target = algorithm._target(module, batch, module.log_temperature.detach().exp())
    errors = target - values
    torch.testing.assert_close(loss.kept["td_error"], errors.abs().mean(0).detach())
    expected = 0.5 * (batch["weight"] * errors.square()).mean(1).sum()
    torch.testing.assert_close(loss.parts["critic"], expected)


def test_images_are_encoded_by_each_critic_for_itself() -> None:
    space = spaces.Dict({"image": spaces.Box(0, 255, (8, 8, 3), np.uint8), "speed": spaces.Box(-1, 1, (2,))})
    critic = TwinCritic(space, 1, NetworkConfig(hidden=(8,), conv_width=4))
    obs = {"obs/image": torch.randint(0, 255, (5, 8, 8, 3), dtype=torch.uint8), "obs/speed": torch.randn(5, 2)}
    action = torch.randn(5, 1, requires_grad=True)
    critic(obs, action)[0].sum().backward()
    first, second = ([p.grad for p in encoder.parameters()] for encoder in critic.encoders)
    assert any(bool(grad.abs().sum() > 0) for grad in first if grad is not None)
    assert all(grad is None or bool((grad == 0).all()) for grad in second)
    critic.zero_grad()
    critic(obs, action, frozen=True).sum().backward()
    assert all(p.grad is None for p in critic.parameters())


class OwnPolicy(nn.Module):
    def __init__(self, obs_space: spaces.Box, action_space: spaces.Box) -> None:
        super().__init__()
        self.layer = nn.Linear(obs_space.shape[0], 2 * action_space.shape[0])

    def forward(self, obs: Tensor) -> Output:
        return Output(self.layer(obs))


@pytest.mark.parametrize("given", [{"module": OwnPolicy}, {"squash": False}, {"n_step": 3, "num_envs": 3}])
def test_other_policies_and_targets(given: dict[str, Any]) -> None:
    result = sac(**given).train()
    assert all(math.isfinite(loss) for loss in result.losses.values())
    assert set(result.losses) == {"actor", "critic", "temperature"}


class Endless(PendulumEnv):
    """Actions without bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(-np.inf, np.inf, (1,))


class Locked(PendulumEnv):
    """A second motor that can't move."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(np.array([-2.0, 0.5], np.float32), np.array([2.0, 0.5], np.float32))


def test_a_number_that_can_not_change_is_refused_unless_the_actions_are_rescaled() -> None:
    with pytest.raises(SpaceError, match=r"index \[1\] has none.* add the connector `rescale_action`"):
        sac(env=Locked)
    rescaled = sac(env=Locked, connectors=("rescale_action",))
    assert np.isfinite(rescaled.train().losses["critic"])
    assert rescaled.policy.act(np.zeros(3, np.float32), explore=True)[1] == 0.5


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(SettingsError, match="SAC needs a Box of floats. Use DQN or PPO"):
        sac(env="CartPole-v1")
    with pytest.raises(SettingsError, match="`temperature` is 0.0, but must be above 0, or none"):
        sac(temperature=0.0)
    with pytest.raises(SettingsError, match="`trajectories.min_length` is 2, but must be 1"):
        sac(min_trajectory_length=2)
    with pytest.raises(SpaceError, match="squashed actions need finite bounds"):
        sac(env=Endless)


QUICK: dict[str, Any] = {
    "env": "Pendulum-v1",
    "seed": 0,
    "network": NetworkConfig(hidden=(64, 64), activation="relu"),
    "batch_size": 128,
    "lr": 2e-3,
    "tau": 0.01,
    "gamma": 0.98,
    "learning_starts": 800,
    "iteration_steps": 800,
    "num_envs": 4,
    "updates_per_step": 0.5,
}
LIMIT = 10_400


@pytest.mark.learning
def test_sac_learns_pendulum() -> None:
    def score(seed: int) -> float:
        algorithm = SAC(SACConfig(**QUICK | {"seed": seed}))
        return algorithm.fit(Stop(return_mean=-250, env_steps=LIMIT)).return_mean  # at random: about -1,200

    assert median_over_seeds(score) >= -350


class WrongSign(SAC):
    """Takes each reward for a loss."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        batch.used["reward"] = -batch["reward"]
        return super().loss(module, batch)


class NoTarget(SAC):
    """Does not bootstrap."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        batch.used["discount"] = torch.zeros_like(batch["discount"])
        return super().loss(module, batch)


@pytest.mark.learning
@pytest.mark.mistake
@pytest.mark.parametrize("mistaken", [WrongSign, NoTarget])
def test_mistaken_ones_do_not(mistaken: type[SAC]) -> None:
    def score(seed: int) -> float:
        return mistaken(SACConfig(**QUICK | {"seed": seed})).fit(Stop(env_steps=LIMIT)).return_mean

    assert median_over_seeds(score, num=1) < -700


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_a_compiled_run_that_is_resumed_draws_what_one_that_was_not_draws(tmp_path: Path) -> None:
    replay = ReplayConfig(learning_starts=20, capacity=1000)
    settings: dict[str, Any] = {"iteration_steps": 60, "batch_size": 16, "replay": replay, "seed": 1, "threads": 1}
    config = SACConfig(env="Pendulum-v1", network=NetworkConfig(hidden=(8,)), compile=True, **settings)
    with closing(SAC(config)) as whole:
        whole.train()
        whole.save(tmp_path / "run")
        losses = whole.train().losses
        with closing(etude.load(tmp_path / "run")) as again:
            assert again.train().losses == losses
