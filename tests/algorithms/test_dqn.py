# SPDX-License-Identifier: Apache-2.0
"""DQN against its formulas written out, and on CartPole."""

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from over_seeds import median_over_seeds, mistaken
from torch import Tensor, nn
from torch.nn import functional as F
from toy_envs import Toil

from etude import DQN, DQNConfig, NetworkConfig, Output, SettingsError, Stop
from etude.algorithms.dqn import QModule
from etude.learners import Batch, Loss
from etude.modules import Module
from etude.modules.actors import NoisyNetwork
from etude.modules.distributions import EpsilonGreedy

SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "seed": 0,
    "network": NetworkConfig(hidden=(16,), activation="relu", separate=False),
    "learning_starts": 64,
    "batch_size": 32,
    "capacity": 1000,
    "iteration_steps": 128,
    "num_envs": 2,
}


def dqn(**given: Any) -> DQN:
    return DQN(DQNConfig(**{**SMALL, **given}))


def batch_of(algorithm: DQN, size: int = 32) -> Batch:
    columns = algorithm.replay.sample(size)
    return Batch({name: torch.as_tensor(column) for name, column in columns.items()}, algorithm.module)


def moved(algorithm: DQN) -> QModule:
    """The module, after an iteration and with a target network that differs."""
    algorithm.train()
    module = algorithm.module
    assert isinstance(module, QModule)
    with torch.no_grad():
        for p in module.target.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    return module


def naive(net: nn.Module, obs: Tensor, *, dueling: bool) -> Tensor:
    """Q-values of the built-in network, from its weights."""
    weights = dict(net.named_parameters())
    hidden = torch.relu(obs @ weights["policy.linears.0.weight"].T + weights["policy.linears.0.bias"])
    q = hidden @ weights["policy_head.weight"].T + weights["policy_head.bias"]
    if dueling:
        value = hidden @ weights["value_head.weight"].T + weights["value_head.bias"]
        q = value + q - q.mean(1, keepdim=True)
    return q


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("double", [False, True])
def test_loss_is_that_of_the_papers(double: bool, dueling: bool) -> None:
    algorithm = dqn(double=double, dueling=dueling, n_step=1)
    module = moved(algorithm)
    batch = batch_of(algorithm)
    total = 0.0
    for i in range(32):
        q = naive(module.net, batch.obs[i : i + 1], dueling=dueling)[0]
        after = naive(module.target.net, batch.next_obs[i : i + 1], dueling=dueling)[0]
        chosen = naive(module.net, batch.next_obs[i : i + 1], dueling=dueling)[0] if double else after
        bootstrap = 0.0 if batch["terminated"][i] else 0.99 * after[int(chosen.argmax())].item()
        error = abs(batch.reward[i].item() + bootstrap - q[batch.action[i]].item())
        total += 0.5 * error**2 if error < 1 else error - 0.5
    assert bool(batch["terminated"].any())
    assert algorithm.loss(module, batch).total.item() == pytest.approx(total / 32, rel=1e-5)


def test_n_step_targets_discount_what_follows_by_as_many_steps() -> None:
    algorithm = dqn(n_step=3, gamma=0.9, double=False)
    module = moved(algorithm)
    batch = batch_of(algorithm, 256)
    ended = batch["terminated"]
    whole = ~ended & (batch.reward > 2.5)  # CartPole gives 1 a step: 1 + 0.9 + 0.81
    torch.testing.assert_close(batch.reward[whole], torch.full((int(whole.sum()),), 2.71))
    with torch.no_grad():
        target = batch.reward + 0.9**3 * naive(module.target.net, batch.next_obs, dueling=False).amax(1)
        q = naive(module.net, batch.obs, dueling=False).gather(1, batch.action[:, None])[:, 0]
    kept = {name: batch[name][whole] for name in ("obs", "action", "reward", "next_obs", "discount")}
    loss = algorithm.loss(module, Batch(kept, module)).total
    torch.testing.assert_close(loss, F.smooth_l1_loss(q[whole], target[whole]))


def test_weights_of_a_prioritized_replay_scale_the_loss_and_errors_become_priorities() -> None:
    algorithm = dqn(prioritized=True, priority_beta=((0, 0.5), (256, 1.0)))
    module = moved(algorithm)
    batch = batch_of(algorithm)
    loss = algorithm.loss(module, batch)
    errors = loss.kept["td_error"]
    assert batch["weight"].min() < 1
    torch.testing.assert_close(
        loss.total, (batch["weight"] * F.smooth_l1_loss(errors, torch.zeros(32), reduction="none")).mean()
    )
    assert len(torch.unique(batch["weight"])) > 10  # each error its own priority
    algorithm.train()
    assert algorithm.replay.beta == pytest.approx(0.5 + 0.5 * 240 / 256, abs=0.04)


def test_a_loss_that_keeps_no_errors_has_no_priorities() -> None:
    class Forgetful(DQN):
        def loss(self, module: Module, batch: Batch) -> Loss:
            return Loss(**super().loss(module, batch).parts)

    with pytest.raises(SettingsError, match=r"keep\(td_error=\.\.\.\)"):
        Forgetful(DQNConfig(**{**SMALL, "prioritized": True})).train()


def test_target_network_follows_every_so_many_steps_and_is_in_the_checkpoint() -> None:
    algorithm = dqn(target_interval=8, updates_per_step=0.25, iteration_steps=16, num_steps=16, learning_starts=0)
    module = algorithm.module
    assert isinstance(module, QModule)
    algorithm.train()
    algorithm.train()  # 4 steps a round, the first had too few to draw from
    equal = []
    for _ in range(4):
        before = {name: p.clone() for name, p in module.target.net.named_parameters()}
        algorithm.train()
        is_due = algorithm.updates % 8 == 0
        expected = dict(module.net.named_parameters()) if is_due else before
        for name, p in module.target.net.named_parameters():
            assert torch.equal(p, expected[name])
        equal.append(is_due)
    assert equal.count(True) == 2
    assert any(name.startswith("target.") for name in module.state_dict())
    assert not any(p.requires_grad for p in module.target.parameters())


def test_soft_target_is_a_moving_average() -> None:
    algorithm = dqn(target_interval=1, tau=0.1, learning_starts=0, iteration_steps=64, num_steps=64)
    module = algorithm.module
    assert isinstance(module, QModule)
    algorithm.train()
    before = [p.clone() for p in module.target.parameters()]
    algorithm.make_updates(1)
    for p, old, new in zip(module.target.parameters(), before, module.net.parameters(), strict=True):
        torch.testing.assert_close(p, 0.9 * old + 0.1 * new)


class Masked(gym.Env[Any, Any]):
    """One action of three is allowed, another one each step; none at the end."""

    observation_space = spaces.Dict({"place": spaces.Box(0, 1, (3,)), "action_mask": spaces.MultiBinary(3)})
    action_space = spaces.Discrete(3, start=2)

    def _see(self) -> dict[str, Any]:
        allowed = np.eye(3, dtype=np.int8)[self.t % 3] if self.t < 5 else np.zeros(3, np.int8)
        return {"place": np.eye(3, dtype=np.float32)[self.t % 3], "action_mask": allowed}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._see(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action == 2 + self.t % 3
        self.t += 1
        return self._see(), 1.0, False, self.t == 5, {}


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("double", [False, True])
def test_what_a_mask_forbids_is_neither_done_nor_bootstrapped_from(double: bool, dueling: bool) -> None:
    algorithm = dqn(env=Masked, double=double, dueling=dueling, n_step=1, gamma=0.5)
    module = moved(algorithm)
    batch = batch_of(algorithm, 64)
    with torch.no_grad():
        allowed = batch.next_obs["action_mask"].bool()
        after = module.target.net({"place": batch.next_obs["place"], "action_mask": batch.next_obs["action_mask"]})
        q = after.dist_inputs
        if dueling:  # the mean is over the one that is allowed
            q = after.value.unsqueeze(-1).expand(-1, 3)
        bootstrap = torch.where(allowed, q, 0.0).sum(1)
    own = module.net(batch.obs)
    taken = own.value if dueling else own.dist_inputs.gather(1, batch.action[:, None] - 2)[:, 0]
    expected = F.smooth_l1_loss(taken, batch.reward + 0.5 * bootstrap)
    torch.testing.assert_close(algorithm.loss(module, batch).total, expected)
    assert not allowed.any(1).all()


def test_epsilon_greedy_takes_the_best_or_any_that_is_allowed() -> None:
    dist = EpsilonGreedy(spaces.Discrete(4, start=3), "action", epsilon=0.4)
    inputs = np.tile(np.array([[1.0, -1e30, 3.0, 2.0]], np.float32), (60_000, 1))
    actions = dist.act(inputs, dist.noise(np.random.default_rng(0), (60_000,)))["action"] - 3
    shares = np.bincount(actions, minlength=4) / 60_000
    expected = np.array([0.4 / 3, 0, 0.6 + 0.4 / 3, 0.4 / 3])
    np.testing.assert_allclose(shares, expected, atol=0.01)
    assert (dist.act(inputs, None)["action"] == 5).all()
    tensor = torch.from_numpy(inputs[:4])
    allowed = {"action": torch.tensor([3, 5, 6, 5])}
    torch.testing.assert_close(dist.logp(tensor, allowed).exp(), torch.tensor(expected).float()[[0, 2, 3, 2]])
    p = torch.tensor(expected[expected > 0]).float()
    torch.testing.assert_close(dist.entropy(tensor)[0], -(p * p.log()).sum())
    other = tensor.clone()
    other[:, 0] = 9.0  # the best there
    q = torch.tensor([0.6 + 0.4 / 3, 0.4 / 3, 0.4 / 3])
    torch.testing.assert_close(dist.kl(tensor, other)[0], (p * (p / q).log()).sum())


def test_an_epsilon_that_a_subclass_sets_is_the_one_in_results() -> None:
    class Fixed(DQN):
        def before_collect(self, env_steps: int) -> None:
            self.module.dist.epsilon = 0.3  # type: ignore[attr-defined]

    assert Fixed(dqn().config).train().metrics["epsilon"] == 0.3


def test_epsilon_follows_its_schedule() -> None:
    algorithm = dqn(epsilon=((0, 1.0), (256, 0.5)))
    assert algorithm.module.dist.epsilon == 1.0  # type: ignore[attr-defined]
    assert algorithm.train().metrics["epsilon"] == 0.78125  # of the last actions, in a round of 16 steps
    exp = algorithm.collect(num_steps=64)["main"]
    epsilon = algorithm.module.dist.epsilon  # type: ignore[attr-defined]
    assert 0.75 <= epsilon < 0.8  # as it was when the last steps were collected
    likely = {round(1 - epsilon / 2, 5), round(epsilon / 2, 5)}
    assert set(np.exp(exp.steps["logp"]).round(5).astype(float).round(5)) == likely


class OwnNet(nn.Module):
    def __init__(self, obs_space: spaces.Box, action_space: spaces.Discrete) -> None:
        super().__init__()
        self.layer = nn.Linear(obs_space.shape[0], int(action_space.n))

    def forward(self, obs: Tensor) -> Output:
        return Output(self.layer(obs))


def test_a_net_of_ones_own_gives_the_values() -> None:
    algorithm = dqn(module=OwnNet)
    module = moved(algorithm)
    obs = torch.ones(3, 4)
    torch.testing.assert_close(module.values(obs), module.net.layer(obs))  # type: ignore[operator]
    assert algorithm.train().losses["td"] > 0


def test_noise_on_the_weights_takes_the_place_of_epsilon() -> None:
    algorithm = dqn(noisy=True)
    module = moved(algorithm)
    assert isinstance(module.net, NoisyNetwork)
    assert module.dist.epsilon == 0.0
    assert dqn(noisy=True, epsilon=0.5).module.dist.epsilon == 0.5  # type: ignore[attr-defined]
    batch = batch_of(algorithm)
    losses = [algorithm.loss(module, batch).total.item() for _ in range(2)]
    assert losses[0] != losses[1]
    module.eval()
    assert torch.equal(module.values(batch.obs), module.values(batch.obs))
    assert not torch.equal(module.target_values(batch.obs), module.target_values(batch.obs))  # its own noise: eq. 16
    plays = [algorithm.evaluate(3, seed=1).return_mean for _ in range(2)]
    assert plays[0] == plays[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"noisy": True, "module": OwnNet}, "`noisy` is True, but must be false where you give a `module`"),
        ({"env": "Pendulum-v1"}, "only of the actions of a Discrete space. Take SAC"),
        ({"epsilon": 1.5}, "`epsilon` is 1.5, but must be between 0 and 1"),
        ({"tau": 0.0}, "`target.tau` is 0.0, but must be above 0"),
        ({"capacity": 8}, r"`replay.capacity` is 8, but must be at least `batch_size` \(32\)"),
        ({"updates_per_step": 0.0}, "`updates_per_step` is 0.0, but must be above 0"),
        (
            {"network": NetworkConfig(recurrent="gru"), "prioritized": True},
            "`replay.prioritized` is set, but Network is recur",
        ),
        ({"connectors": ("normalize_obs", "frame_stack:2")}, "frame_stack comes after normalize_obs"),
    ],
)
def test_what_can_not_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        dqn(**given)


LIMIT = 20_000


@pytest.mark.learning
def test_dqn_learns_cartpole() -> None:
    def score(seed: int) -> float:
        algorithm = DQN(DQNConfig(env="CartPole-v1", seed=seed, n_step=10, epsilon=((0, 1.0), (5000, 0.05))))
        return algorithm.fit(Stop(return_mean=300, env_steps=LIMIT)).return_mean

    assert median_over_seeds(score) >= 250


class WrongSign(DQN):
    """Takes each reward for a loss."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        batch.used["reward"] = -batch["reward"]
        return super().loss(module, batch)


@pytest.mark.learning
@pytest.mark.mistake
def test_with_the_wrong_sign_it_does_not() -> None:
    def score(seed: int) -> float:
        algorithm = WrongSign(DQNConfig(env="CartPole-v1", seed=seed, n_step=10, epsilon=((0, 1.0), (5000, 0.05))))
        return algorithm.fit(Stop(env_steps=6_000)).return_mean

    assert median_over_seeds(score) < 60  # at random: 22


class Arms(gym.Env[Any, Any]):
    """One step: the last of eight arms pays best, the others pay little. Who always pulls the best so far is stuck."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.ones(1, np.float32), 1.0 if action == 7 else 0.4, True, False, {}


class Silent(QModule):
    """Acts without the noise that it learns with."""

    has_own_actor = False


class ActsWithoutNoise(DQN):
    kind = Silent


@pytest.mark.learning
@pytest.mark.parametrize(
    ("algorithm", "noisy", "finds_it"),
    [(DQN, True, True), (DQN, False, False), mistaken(ActsWithoutNoise, True, False)],
)
def test_noise_finds_what_greed_does_not_and_then_becomes_less(
    algorithm: type[DQN], noisy: bool, finds_it: bool
) -> None:
    net = NetworkConfig(hidden=(16,), activation="relu", separate=False)
    given: dict[str, Any] = {"env": Arms, "noisy": noisy, "epsilon": 0.0, "n_step": 1, "network": net, "lr": 5e-3}
    given |= {"learning_starts": 64, "iteration_steps": 3000, "target_interval": 20}

    def score(seed: int) -> float:
        trained = algorithm(DQNConfig(seed=seed, **given))
        trained.train()
        return float(trained.collect(num_steps=400)["main"].steps["reward"].mean())

    found = median_over_seeds(score)
    assert found >= 0.9 if finds_it else found < 0.7


class AlwaysBootstraps(DQN):
    """As if no episode ever ended."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        batch.used["discount"] = torch.full_like(batch["discount"], 0.9)
        return super().loss(module, batch)


class NeverBootstraps(DQN):
    """As if nothing followed."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        batch.used["discount"] = torch.zeros_like(batch["discount"])
        return super().loss(module, batch)


@pytest.mark.learning
@pytest.mark.parametrize(
    ("algorithm", "terminates", "works_if"),
    [
        (DQN, False, True),
        (DQN, True, False),
        mistaken(AlwaysBootstraps, True, True),
        mistaken(NeverBootstraps, False, False),
    ],
)
def test_what_follows_counts_where_an_episode_was_truncated_alone(
    algorithm: type[DQN], terminates: bool, works_if: bool
) -> None:
    given: dict[str, Any] = {"env": functools.partial(Toil, terminates=terminates), "gamma": 0.9, "n_step": 1}
    given |= {"target_interval": 1, "tau": 0.05, "epsilon": ((0, 1.0), (800, 0.1)), "lr": 3e-3}
    given |= {"network": NetworkConfig(hidden=(16,)), "learning_starts": 200, "iteration_steps": 1500}

    def works(seed: int) -> float:
        trained = algorithm(DQNConfig(seed=seed, **given))
        trained.train()
        exp = trained.runner.collect(num_steps=500, explore=False)  # type: ignore[attr-defined]
        return float(exp.steps["action"][exp.steps["obs"][:, 0] == 1].mean())

    found = median_over_seeds(works)
    assert found > 0.9 if works_if else found < 0.1
