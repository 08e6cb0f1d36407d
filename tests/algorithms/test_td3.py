# SPDX-License-Identifier: Apache-2.0
"""TD3 against its formulas written out, and on Pendulum."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from offline_cases import moved, naive_critic, random_batch
from over_seeds import median_over_seeds
from torch import Tensor, nn
from torch.distributions import Normal

import etude
from etude import TD3, NetworkConfig, Output, SettingsError, SpaceError, Stop, TD3Config
from etude.algorithms.td3 import DeterministicModule, NoisyTanh
from etude.learners import Batch, Loss
from etude.modules import Module

LINE = spaces.Box(-np.inf, np.inf, (3,), np.float32)
BOX = spaces.Box(-2.0, 4.0, (2,), np.float32)
SMALL: dict[str, Any] = {
    "env": "Pendulum-v1",
    "seed": 0,
    "network": NetworkConfig(hidden=(16, 8), activation="relu"),
    "learning_starts": 64,
    "batch_size": 32,
    "capacity": 1000,
    "iteration_steps": 128,
}


def td3(**given: Any) -> TD3:
    return TD3(TD3Config(**{**SMALL, **given}))


def unplayed(action_space: Any = BOX, **given: Any) -> tuple[TD3, DeterministicModule]:
    """One that was not let into an env, with targets that differ from what they follow."""
    algorithm = TD3(TD3Config(**{**SMALL, **given}), saved_spaces={"main": (LINE, action_space)})
    assert isinstance(algorithm.module, DeterministicModule)
    moved(algorithm.module.target_critic)
    moved(algorithm.module.target.net)
    return algorithm, algorithm.module


def replayed(net: Module) -> Batch:
    """A batch as a replay with targets of several steps gives it."""
    batch = random_batch(net, BOX, 3)
    columns = {name: batch[name] for name in ("obs", "next_obs", "action", "reward", "terminated")}
    discount = torch.where(batch["terminated"], 0.0, torch.rand(32, generator=torch.Generator().manual_seed(0)))
    return Batch({**columns, "discount": discount}, net)


def naive_losses(net: DeterministicModule, batch: Batch) -> dict[str, Tensor]:
    """Algorithm 1, with actions in [-1, 1]."""
    action = (batch["action"] - 1.0) / 3.0
    with torch.no_grad():
        noise = (0.3 * torch.randn(32, 2)).clip(-0.4, 0.4)
        after = (torch.tanh(net.target.net(batch["next_obs"]).dist_inputs) + noise).clip(-1, 1)
        q = torch.minimum(*(naive_critic(net.target_critic, k, batch["next_obs"], after) for k in range(2)))
        target = batch["reward"] + batch["discount"] * q
    critic = torch.zeros(())
    for k in range(2):
        critic = critic + ((target - naive_critic(net.critic, k, batch["obs"], action)) ** 2).mean()
    policy = torch.tanh(net.net(batch["obs"]).dist_inputs)
    return {"critic": critic, "actor": -naive_critic(net.critic, 0, batch["obs"], policy).mean()}


def test_losses_and_their_gradients_are_those_of_the_paper() -> None:
    algorithm, net = unplayed(target_noise=0.3, target_noise_clip=0.4, policy_delay=1)
    batch = replayed(net)
    torch.manual_seed(0)
    losses = naive_losses(net, batch)
    torch.manual_seed(0)
    loss = algorithm.loss(net, batch)
    torch.testing.assert_close(loss.parts, losses, rtol=1e-4, atol=1e-5)
    groups = algorithm.parameter_groups(net)
    every = [p for group in groups.values() for p in group]
    assert {id(p) for p in every} == {id(p) for p in net.parameters() if p.requires_grad}
    total = dict(zip(every, torch.autograd.grad(loss.total, every, retain_graph=True), strict=True))
    for name, group in groups.items():
        for p, grad in zip(group, torch.autograd.grad(losses[name], list(group), retain_graph=True), strict=True):
            assert grad.abs().sum() > 0
            torch.testing.assert_close(total[p], grad, rtol=1e-3, atol=1e-5)


def columns(net: Module) -> dict[str, Any]:
    batch = replayed(net)
    return {name: batch[name] for name in ("obs", "next_obs", "action", "reward", "terminated", "discount")}


@pytest.mark.filterwarnings("ignore")  # of torch about itself, while it compiles
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_policy_and_targets_move_in_every_third_step_alone(compiled: bool) -> None:
    algorithm, net = unplayed(policy_delay=3, tau=0.1, compile=compiled)
    watched = {"actor": net.net, "critic": net.critic, "targets": net.target_critic, "target policy": net.target}
    moves = []
    for _ in range(6):
        before = {name: [p.clone() for p in part.parameters()] for name, part in watched.items()}
        losses = algorithm.learner.only.update_from([columns(net)]).losses
        now = [name for name, part in watched.items() if not all(map(torch.equal, before[name], part.parameters()))]
        assert ("actor" in losses) == ("actor" in now)
        moves.append(now)
        if "targets" in now:
            for name, source in (("targets", net.critic), ("target policy", net.net)):
                for p, old, new in zip(watched[name].parameters(), before[name], source.parameters(), strict=True):
                    torch.testing.assert_close(p, 0.9 * old + 0.1 * new)
    assert moves == [["critic"], ["critic"], list(watched)] * 2


def test_priorities_are_the_mean_errors_of_both_critics() -> None:
    algorithm = td3(prioritized=True)
    algorithm.train()
    net = algorithm.module
    assert isinstance(net, DeterministicModule)
    batch = Batch({name: torch.as_tensor(c) for name, c in algorithm.replay.sample(32).items()}, net)
    torch.manual_seed(0)
    loss = algorithm.loss(net, batch)
    torch.manual_seed(0)
    errors = algorithm._target(net, batch) - net.critic(net.columns_of(batch.obs), net.encoded(batch.action))
    torch.testing.assert_close(loss.kept["td_error"], errors.abs().mean(0).detach())
    torch.testing.assert_close(loss.parts["critic"], (batch["weight"] * errors.square()).mean(1).sum())


def test_what_explores_is_the_policy_with_noise_clipped_to_the_bounds() -> None:
    _, net = unplayed(action_noise=0.4, learning_starts=0)
    moved(net.net)
    obs = np.random.default_rng(0).normal(size=(4000, 3)).astype(np.float32)
    actions = []
    for explore in (False, True):
        actor = net.actor(explore=explore)
        actor.start(np.random.default_rng(0), 4000)
        actions.append(actor.step({"obs": obs})[0]["action"])
    chosen = torch.tanh(net(torch.from_numpy(obs)).dist_inputs).detach().numpy()
    np.testing.assert_allclose(actions[0], 1.0 + 3.0 * chosen, rtol=1e-4, atol=1e-4)
    assert actions[1].min() >= -2.0
    assert actions[1].max() <= 4.0
    assert (actions[1] == 4.0).any()
    inside = np.abs(chosen) < 0.1  # where 2 standard deviations are inside of the bounds
    assert (actions[1] - actions[0])[inside].std() == pytest.approx(0.4 * 3.0, rel=0.1)


def test_noise_has_the_density_of_a_normal_in_units_of_the_action() -> None:
    dist = NoisyTanh(BOX, "action", std=0.2)
    inputs, other = torch.randn(2, 50, 2)
    noise = 0.1 * torch.randn(50, 2)
    action = dist.act(inputs, noise)
    np.testing.assert_allclose(
        action["action"], dist.act(inputs.numpy(), noise.numpy())["action"], rtol=1e-4, atol=1e-5
    )
    normal: Any = Normal(1.0 + 3.0 * torch.tanh(inputs), 0.6)
    taken = action["action"]
    low, high = normal.cdf(torch.tensor(-2.0)).log(), (1 - normal.cdf(torch.tensor(4.0))).log()
    wanted = torch.where(taken == -2.0, low, torch.where(taken == 4.0, high, normal.log_prob(taken))).sum(-1)
    assert ((taken == -2.0) | (taken == 4.0)).any()
    torch.testing.assert_close(dist.logp(inputs, action), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dist.entropy(inputs), normal.entropy().sum(-1))
    to: Any = Normal(1.0 + 3.0 * torch.tanh(other), 0.6)
    torch.testing.assert_close(dist.kl(inputs, other), torch.distributions.kl_divergence(normal, to).sum(-1))


def test_weighted_actions_of_one_policy_have_the_mean_of_another_although_many_are_clipped() -> None:
    dist = NoisyTanh(spaces.Box(-1.0, 1.0, (1,), np.float32), "action", std=0.1)
    noise = torch.randn((100_000, 1), generator=torch.Generator().manual_seed(0))
    behind, other = (torch.full((100_000, 1), math.atanh(mean)) for mean in (0.95, 0.85))
    taken = dist.act(behind, noise)
    weight = (dist.logp(other, taken) - dist.logp(behind, taken)).exp()
    assert weight.mean().item() == pytest.approx(1.0, abs=0.02)
    wanted = dist.act(other, noise)["action"].mean().item()
    assert (weight * taken["action"][:, 0]).mean().item() == pytest.approx(wanted, abs=0.02)


def test_random_actions_are_recorded_with_the_density_of_their_box() -> None:
    algorithm = td3(learning_starts=600, iteration_steps=600)
    (exp,) = algorithm.collect(num_steps=16).values()
    np.testing.assert_allclose(exp.steps["logp"], -math.log(4.0), rtol=1e-6)


def test_actions_are_uniform_until_learning_starts() -> None:
    algorithm = td3(learning_starts=600, iteration_steps=600, updates_per_step=0.125)
    result = algorithm.train()
    actions = algorithm.replay.sample(600)["action"]
    assert result.updates == 0
    assert actions.std() == pytest.approx(4 / math.sqrt(12), abs=0.06)
    assert algorithm.train().updates == 75
    late = algorithm.collect(num_steps=16)["main"].steps["action"]
    assert np.abs(late).mean() < 0.8  # about 0 with noise of 0.2


class OwnPolicy(nn.Module):
    def __init__(self, obs_space: spaces.Box, action_space: spaces.Box) -> None:
        super().__init__()
        self.layer = nn.Linear(obs_space.shape[0], action_space.shape[0])

    def forward(self, obs: Tensor) -> Output:
        return Output(self.layer(obs))


@pytest.mark.parametrize(
    "given",
    [
        {"module": OwnPolicy},
        {"n_step": 3, "num_envs": 3},
        {"connectors": ("normalize_obs",)},
        {"network": NetworkConfig(hidden=(8,), recurrent="gru", recurrent_size=4), "burn_in": 2},
    ],
)
def test_other_policies_and_targets(given: dict[str, Any]) -> None:
    losses = td3(**given).train().losses
    assert set(losses) == {"actor", "critic"}
    assert all(math.isfinite(loss) for loss in losses.values())


def test_a_loaded_run_acts_with_the_noise_that_is_set_then(tmp_path: Path) -> None:
    algorithm = td3(policy_delay=3)
    algorithm.train()  # 64 steps: between two of the policy
    algorithm.save(tmp_path)
    loaded = etude.load(tmp_path, action_noise=0.7)
    assert loaded.module.dist.std == 0.7
    assert loaded.module.is_policy_due == algorithm.module.is_policy_due
    assert etude.load(tmp_path).train().losses == algorithm.train().losses


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(SettingsError, match="TD3 needs a Box of floats. Use DQN or PPO"):
        td3(env="CartPole-v1")
    with pytest.raises(SpaceError, match="need finite bounds"):
        unplayed(spaces.Box(-np.inf, np.inf, (1,), np.float32))
    with pytest.raises(SettingsError, match="`action_noise` is 0.0, but must be above 0"):
        td3(action_noise=0.0)
    with pytest.raises(SettingsError, match="`policy_delay` is 0"):
        td3(policy_delay=0)
    with pytest.raises(SettingsError, match="`network.squash` is False"):
        td3(squash=False)


QUICK: dict[str, Any] = {
    "env": "Pendulum-v1",
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
def test_td3_learns_pendulum() -> None:
    def score(seed: int) -> float:
        return TD3(TD3Config(seed=seed, **QUICK)).fit(Stop(return_mean=-250, env_steps=LIMIT)).return_mean

    assert median_over_seeds(score) >= -400  # at random: about -1,200


class WrongSign(TD3):
    """Takes each reward for a loss."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        batch.used["reward"] = -batch["reward"]
        return super().loss(module, batch)


class NoTarget(TD3):
    """Does not bootstrap."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        batch.used["discount"] = torch.zeros_like(batch["discount"])
        return super().loss(module, batch)


class Downhill(TD3):
    """Its policy looks for the worst actions."""

    def policy_loss(self, worth: Tensor, chosen: Tensor, action: Tensor) -> Loss:
        return Loss(actor=worth.mean())


class FrozenTarget(TD3):
    """Its targets stay what they were at first."""

    def after_step(self, module: Any) -> None:
        module.count_step(self.config.policy_delay)


@pytest.mark.learning
@pytest.mark.mistake
@pytest.mark.parametrize("mistaken", [WrongSign, NoTarget, Downhill, FrozenTarget])
def test_mistaken_ones_do_not(mistaken: type[TD3]) -> None:
    def score(seed: int) -> float:
        return mistaken(TD3Config(**QUICK | {"seed": seed})).fit(Stop(env_steps=LIMIT)).return_mean

    assert median_over_seeds(score, num=1) < -700
