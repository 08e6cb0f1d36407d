# SPDX-License-Identifier: Apache-2.0
"""QR-DQN against its formulas written out, and in envs that show a mistake."""

import functools
import subprocess
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from over_seeds import median_over_seeds, mistaken
from test_dqn import Masked
from toy_envs import Toil

from etude import QRDQN, NetworkConfig, QRDQNConfig, SettingsError, Stop
from etude.algorithms.qr_dqn import QuantileGreedy, QuantileModule, quantile_loss
from etude.learners import Batch, Loss
from etude.modules import Module

SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "seed": 0,
    "network": NetworkConfig(hidden=(16,), activation="relu", separate=False),
    "num_quantiles": 5,
    "learning_starts": 64,
    "batch_size": 32,
    "capacity": 1000,
    "iteration_steps": 128,
    "num_envs": 2,
}


def moved(**given: Any) -> tuple[QRDQN, QuantileModule, Batch]:
    """One after an iteration, with a target network that differs; and a batch."""
    algorithm = QRDQN(QRDQNConfig(**{**SMALL, **given}))
    algorithm.train()
    module = algorithm.module
    assert isinstance(module, QuantileModule)
    with torch.no_grad():
        for p in module.target.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    columns = {name: torch.as_tensor(column) for name, column in algorithm.replay.sample(32).items()}
    return algorithm, module, Batch(columns, module)


def naive(net: Any, obs: Any, *, dueling: bool) -> np.ndarray:
    """Quantiles ``[5, 2]`` of one observation, from the weights."""
    weights = {name: p.detach().numpy().astype(float) for name, p in net.named_parameters()}
    hidden = np.maximum(weights["policy.linears.0.weight"] @ obs + weights["policy.linears.0.bias"], 0)
    flat = weights["policy_head.weight"] @ hidden + weights["policy_head.bias"]
    quantiles = np.array([[flat[2 * i + a] for a in range(2)] for i in range(5)])
    if dueling:
        value = weights["value_head.weight"] @ hidden + weights["value_head.bias"]
        quantiles = value[0] + quantiles - quantiles.mean()
    return quantiles


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("double", [False, True])
def test_loss_is_that_of_the_paper(double: bool, dueling: bool) -> None:
    algorithm, module, batch = moved(double=double, dueling=dueling, n_step=1)
    total = 0.0
    for row in range(32):
        obs, following = batch.obs[row].numpy(), batch.next_obs[row].numpy()
        taken = naive(module.net, obs, dueling=dueling)[:, int(batch.action[row])]
        after = naive(module.target.net, following, dueling=dueling)
        by = naive(module.net, following, dueling=dueling) if double else after
        gamma = 0.0 if batch["terminated"][row] else 0.99
        target = float(batch.reward[row]) + gamma * after[:, int(by.mean(0).argmax())]
        for i in range(5):
            for j in range(5):
                u = target[j] - taken[i]
                huber = 0.5 * u**2 if abs(u) <= 1 else abs(u) - 0.5
                total += abs((2 * i + 1) / 10 - (u < 0)) * huber / 5
    assert bool(batch["terminated"].any())
    assert algorithm.loss(module, batch).total.item() == pytest.approx(total / 32, rel=1e-4)


def test_what_minimises_the_loss_are_the_quantiles() -> None:
    """Where errors are far above 1, Huber's loss is the absolute one."""
    samples = 100 * torch.randn(2000, generator=torch.Generator().manual_seed(0)) ** 3
    found = torch.zeros(1, 4, requires_grad=True)
    optimizer = torch.optim.Adam([found], lr=1.0)
    for _ in range(1500):
        optimizer.zero_grad()
        quantile_loss(found, samples.unsqueeze(0)).sum().backward()
        optimizer.step()
    np.testing.assert_allclose(found[0].detach(), np.quantile(samples, [1 / 8, 3 / 8, 5 / 8, 7 / 8]), atol=3)


def test_weights_of_a_prioritized_replay_scale_the_loss_and_errors_of_means_become_priorities() -> None:
    algorithm, module, batch = moved(prioritized=True)
    loss = algorithm.loss(module, batch)
    with torch.no_grad():
        after = module.target_values(batch.next_obs).gather(1, module.values(batch.next_obs).argmax(1)[:, None])[:, 0]
        value = module.values_of(module.values(batch.obs), batch.action)
    torch.testing.assert_close(
        loss.kept["td_error"], batch.reward + batch.discount * after - value, rtol=1e-4, atol=1e-5
    )
    assert batch["weight"].min() < 1
    halved = Batch({name: batch[name] for name in batch._columns} | {"weight": batch["weight"] / 2}, module)
    torch.testing.assert_close(algorithm.loss(module, halved).total, loss.total / 2)


def test_the_best_mean_is_chosen_of_those_that_are_allowed() -> None:
    dist = QuantileGreedy(spaces.Discrete(3, start=2), "action", 2)
    inputs = np.array([[0, 3, 9, 5, 3, -9], [0, 3, -1e30, 5, 3, -1e30], [8, 3, 0, 0, 3, 1]], np.float32)
    assert dist.act(inputs, None)["action"].tolist() == [3, 3, 2]  # means 2.5 3 0; 2.5 3; 4 3 0.5
    assert dist.act(torch.from_numpy(inputs), None)["action"].tolist() == [3, 3, 2]
    dist.epsilon = 1.0
    rows = np.repeat(inputs[1:2], 1000, 0)
    assert set(dist.act(rows, dist.noise(np.random.default_rng(0), (1000,)))["action"]) == {2, 3}
    logp = dist.logp(torch.from_numpy(inputs[1:2]), {"action": torch.tensor([3])})
    assert float(logp.exp()) == pytest.approx(0.5)


@pytest.mark.parametrize("dueling", [False, True])
def test_what_a_mask_forbids_is_neither_done_nor_bootstrapped_from(dueling: bool) -> None:
    algorithm, module, batch = moved(env=Masked, dueling=dueling, n_step=1, gamma=0.5)
    with torch.no_grad():
        allowed = batch.next_obs["action_mask"].bool()
        after = module.target.net(batch.next_obs)
        quantiles = after.dist_inputs.reshape(32, 5, 3)
        quantiles = (quantiles * allowed.unsqueeze(1)).sum(2)  # of the one that is allowed; 0 without one
        if dueling:
            quantiles = torch.where(allowed.any(1, True), after.value[:, None] + quantiles - quantiles.mean(1, True), 0)
        target = batch.reward[:, None] + 0.5 * quantiles
        own = module.net(batch.obs)
        taken = own.dist_inputs.reshape(32, 5, 3)[torch.arange(32), :, batch.action - 2]
        if dueling:
            taken = own.value[:, None] + taken - taken.mean(1, True)
    assert not allowed.any(1).all()
    torch.testing.assert_close(algorithm.loss(module, batch).total, quantile_loss(taken, target).mean())


@pytest.mark.parametrize(
    "given",
    [
        {"noisy": True, "dueling": True, "prioritized": True},
        {"network": NetworkConfig(hidden=(8,), recurrent="gru", recurrent_size=4, separate=False)},
        {"connectors": ("normalize_obs",), "num_quantiles": 1},
    ],
)
def test_with_other_settings(given: dict[str, Any]) -> None:
    losses = QRDQN(QRDQNConfig(**SMALL | given)).train().losses
    assert list(losses) == ["td"]
    assert np.isfinite(losses["td"])


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(SettingsError, match="`num_quantiles` is 0, but must be at least 1"):
        QRDQNConfig(env="CartPole-v1", num_quantiles=0)
    with pytest.raises(SettingsError, match="only of the actions of a Discrete space. Take SAC"):
        QRDQN(QRDQNConfig(**SMALL | {"env": "Pendulum-v1"}))


class Gamble(gym.Env[Any, Any]):
    """One step: action 0 earns 3 or loses 3, action 1 earns 0.5."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> Any:
        earned = 0.5 if action else float(self.np_random.choice([-3.0, 3.0]))
        return np.ones(1, np.float32), earned, True, False, {}


QUICK: dict[str, Any] = {
    "n_step": 1,
    "target_interval": 1,
    "tau": 0.05,
    "lr": 3e-3,
    "network": NetworkConfig(hidden=(16,)),
    "num_quantiles": 8,
    "learning_starts": 200,
    "iteration_steps": 1500,
}


class Backwards(QRDQN):
    """Takes the highest quantile for the lowest."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        assert isinstance(module, QuantileModule)
        taken = module.quantiles(batch.forward(module)).flip(1)
        taken = taken.gather(2, batch.action[:, None, None].expand(-1, taken.shape[1], 1)).squeeze(2)
        return Loss(td=quantile_loss(taken, batch.reward[:, None].expand_as(taken)).mean())


class MeansOnly(QRDQN):
    """All quantiles are learned as means."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        assert isinstance(module, QuantileModule)
        taken = module.quantiles(batch.forward(module))
        taken = taken.gather(2, batch.action[:, None, None].expand(-1, taken.shape[1], 1)).squeeze(2)
        return Loss(td=(taken - batch.reward[:, None]).square().mean())


@pytest.mark.learning
@pytest.mark.parametrize(
    ("algorithm", "least", "most"), [(QRDQN, 4, 7), mistaken(Backwards, -7, -3), mistaken(MeansOnly, -1, 1)]
)
def test_how_far_apart_returns_are_is_learned(algorithm: type[QRDQN], least: float, most: float) -> None:
    def spread(seed: int) -> float:
        trained = algorithm(QRDQNConfig(env=Gamble, seed=seed, epsilon=0.5, **QUICK))
        trained.train()
        module = trained.module
        assert isinstance(module, QuantileModule)
        quantiles = module.quantiles(module(torch.ones(1, 1)))[0, :, 0].detach()
        assert trained.evaluate(5).return_mean == 0.5 or algorithm is not QRDQN
        return float(quantiles[-1] - quantiles[0])

    assert least <= median_over_seeds(spread) <= most


class AlwaysBootstraps(QRDQN):
    def loss(self, module: Module, batch: Batch) -> Loss:
        batch.used["discount"] = torch.full_like(batch["discount"], 0.9)
        return super().loss(module, batch)


class NeverBootstraps(QRDQN):
    def loss(self, module: Module, batch: Batch) -> Loss:
        batch.used["discount"] = torch.zeros_like(batch["discount"])
        return super().loss(module, batch)


@pytest.mark.learning
@pytest.mark.parametrize(
    ("algorithm", "terminates", "works_if"),
    [
        (QRDQN, False, True),
        (QRDQN, True, False),
        mistaken(AlwaysBootstraps, True, True),
        mistaken(NeverBootstraps, False, False),
    ],
)
def test_what_follows_counts_where_an_episode_was_truncated_alone(
    algorithm: type[QRDQN], terminates: bool, works_if: bool
) -> None:
    def works(seed: int) -> float:
        env = functools.partial(Toil, terminates=terminates)
        trained = algorithm(QRDQNConfig(env=env, seed=seed, gamma=0.9, epsilon=((0, 1.0), (800, 0.1)), **QUICK))
        trained.train()
        exp = trained.collect(num_steps=500, explore=False)["main"]
        return float(exp.steps["action"][exp.steps["obs"][:, 0] == 1].mean())

    found = median_over_seeds(works)
    assert found > 0.9 if works_if else found < 0.1


class WrongSign(QRDQN):
    """Takes each reward for a loss."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        batch.used["reward"] = -batch["reward"]
        return super().loss(module, batch)


@pytest.mark.learning
@pytest.mark.parametrize(("algorithm", "limit"), [(QRDQN, 16_000), mistaken(WrongSign, 6_000)])
def test_qr_dqn_learns_cartpole(algorithm: type[QRDQN], limit: int) -> None:
    def score(seed: int) -> float:
        given = {"n_step": 10, "epsilon": ((0, 1.0), (5000, 0.05)), "num_quantiles": 20}
        trained = algorithm(QRDQNConfig(env="CartPole-v1", seed=seed, **given))
        return trained.fit(Stop(return_mean=250, env_steps=limit)).return_mean

    found = median_over_seeds(score)
    assert found >= 180 if algorithm is QRDQN else found < 60  # at random: 22


MEMORY = """
import dataclasses, re
import etude

config = etude.preset("qr_dqn", "LunarLander-v3", env="CartPole-v1", seed=2)
replay = etude.ReplayConfig(capacity=2000, learning_starts=850)
config = dataclasses.replace(config, num_steps=850, replay=replay, compute=etude.ComputeConfig(threads=1))
algorithm = etude.QRDQN(config)
while not algorithm.updates:
    algorithm.train()
most = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())  # ru_maxrss is at least the parent's
print(int(most[1]) // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="how memory is used again depends on the C library")
def test_updates_use_the_memory_of_those_before_them() -> None:
    """The loss has several tensors of 15 MB. Small ones that were kept of each update lay between them, so that many
    updates took new memory: 2,100 MB in all, and 480 without."""
    done = subprocess.run([sys.executable, "-c", MEMORY], stdout=subprocess.PIPE, text=True, check=True)
    assert int(done.stdout) < 1_000
