# SPDX-License-Identifier: Apache-2.0
"""CQL against its formulas written out, and on recordings of mixed quality."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from offline_cases import mixed_cartpole, mixed_pendulum, moved, naive_critic, random_batch
from over_seeds import median_over_seeds, mistaken
from torch import Tensor
from torch.distributions import Normal

import etude
from etude.algorithms import CQL, CQLConfig
from etude.algorithms.cql import ConservativeModule, soft_maximum
from etude.algorithms.dqn import QModule
from etude.cli.main import main
from etude.errors import ModuleError, SettingsError
from etude.learners import Batch, Loss
from etude.modules import Module, NetworkConfig
from etude.modules.critics import TwinCritic

SMALL = NetworkConfig(hidden=(16, 8), activation="relu", separate=False)
LINE = spaces.Box(-np.inf, np.inf, (3,), np.float32)
BOX, CHOICE = spaces.Box(-2.0, 4.0, (2,), np.float32), spaces.Discrete(3, start=1)


def made(action_space: Any, **given: Any) -> tuple[CQL, Any]:
    config = CQLConfig(**{"data": "none", "seed": 0, "network": SMALL, **given})
    algorithm = CQL(config, saved_spaces={"main": (LINE, action_space)})
    net = algorithm.module
    assert isinstance(net, ConservativeModule | QModule)
    moved(net.target_critic if isinstance(net, ConservativeModule) else net.target)
    return algorithm, net


def columns(net: Module) -> dict[str, Any]:
    batch = random_batch(net, net.action_space, 3)
    return {name: batch[name] for name in ("obs", "next_obs", "action", "reward", "terminated")}


# -- Discrete actions -------------------------------------------------------------------------------------------------


def test_losses_of_discrete_actions_are_those_of_the_paper() -> None:
    algorithm, net = made(CHOICE, gamma=0.9, alpha=0.3)
    batch = random_batch(net, CHOICE, 3)
    q, after = net.net(batch["obs"]).dist_inputs, net.net(batch["next_obs"]).dist_inputs
    after_by_target = net.target.net(batch["next_obs"]).dist_inputs
    td, gap = torch.zeros(()), torch.zeros(())
    for i in range(32):
        best = int(after[i].argmax())
        target = batch["reward"][i] + (0.0 if batch["terminated"][i] else 0.9) * after_by_target[i, best].detach()
        error = q[i, batch["action"][i] - 1] - target
        td = td + (error.abs() - 0.5 if error.abs() > 1 else 0.5 * error**2) / 32
        gap = gap + (q[i].exp().sum().log() - q[i, batch["action"][i] - 1]) / 32
    loss = algorithm.loss(net, batch)
    expected = {"td": td, "conservative": 0.3 * gap}
    torch.testing.assert_close(loss.parts, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss.logged["gap"], gap.detach(), rtol=1e-4, atol=1e-5)
    parameters = [p for p in net.parameters() if p.requires_grad]
    own, naive = torch.autograd.grad(loss.total, parameters), torch.autograd.grad(td + 0.3 * gap, parameters)
    for a, b in zip(own, naive, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_targets_of_discrete_actions_are_moving_averages() -> None:
    algorithm, net = made(CHOICE, tau=0.1, dueling=True)
    before = [p.clone() for p in net.target.net.parameters()]
    algorithm.learner.only.update_from([columns(net)])
    for p, old, new in zip(net.target.net.parameters(), before, net.net.parameters(), strict=True):
        torch.testing.assert_close(p, 0.9 * old + 0.1 * new)


# -- Box actions ------------------------------------------------------------------------------------------------------


def naive_sample(net: ConservativeModule, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    mean, log_std = net.net(obs).dist_inputs.chunk(2, -1)
    normal: Any = Normal(mean, log_std.exp())
    drawn = mean + log_std.exp() * noise
    action = torch.tanh(drawn)
    return action, (normal.log_prob(drawn) - (1 - action.square()).log()).sum(-1)


def naive_losses(net: ConservativeModule, batch: Batch, alpha: float, tau: float) -> dict[str, Tensor]:
    """Eq. 4 and 30 with appendix F's estimate, and SAC's losses; noise is drawn in the order in which the loss does."""
    obs, following, temperature = batch["obs"], batch["next_obs"], net.log_temperature.detach().exp()
    recorded = (batch["action"] - 1.0) / 3.0
    with torch.no_grad():
        action, _ = naive_sample(net, following, torch.randn(32, 2))
        q = torch.minimum(*(naive_critic(net.target_critic, k, following, action) for k in range(2)))
        target = batch["reward"] + 0.9 * (1.0 - batch["terminated"].float()) * q
        noise, uniform = torch.randn(32, 2, 5, 2), torch.rand(32, 5, 2) * 2 - 1
    critic, conservative, gaps = torch.zeros(()), torch.zeros(()), []
    for k in range(2):
        total = torch.zeros(32)
        for j in range(5):
            for at, row in ((obs, noise[:, 0, j]), (following, noise[:, 1, j])):
                with torch.no_grad():
                    action, logp = naive_sample(net, at, row)
                total = total + (naive_critic(net.critic, k, obs, action) - logp).exp() / 15
            total = total + (naive_critic(net.critic, k, obs, uniform[:, j]) + 2 * math.log(2)).exp() / 15
        values = naive_critic(net.critic, k, obs, recorded)
        gaps.append((total.log() - values).mean())
        conservative = conservative + alpha * (gaps[-1] - tau)
        critic = critic + (values - target).square().mean()  # the published code has no 1/2
    action, logp = naive_sample(net, obs, torch.randn(32, 2))
    q = torch.minimum(*(naive_critic(net.critic, k, obs, action) for k in range(2)))
    return {
        "actor": (temperature * logp - q).mean(),
        "critic": critic,
        "conservative": conservative,
        "temperature": -(net.log_temperature * (logp.detach() - 2)).mean(),
        "alpha": -(net.log_alpha.exp() * (sum(gap.detach() for gap in gaps) / 2 - tau)).sum(),
    }


def test_losses_of_box_actions_and_their_gradients_are_those_of_the_paper() -> None:
    algorithm, net = made(BOX, gamma=0.9, alpha=0.7, threshold=1.5, num_actions=5, gradient_actions=None)
    with torch.no_grad():
        net.log_temperature.fill_(math.log(0.3))
    batch = random_batch(net, BOX, 3)
    torch.manual_seed(3)
    losses = naive_losses(net, batch, 0.7, 1.5)
    torch.manual_seed(3)
    loss = algorithm.loss(net, batch)
    torch.testing.assert_close(loss.parts, losses, rtol=1e-4, atol=1e-4)
    groups = algorithm.parameter_groups(net)
    assert groups is not None
    assert sorted(groups) == ["actor", "alpha", "critic", "temperature"]
    every = [p for group in groups.values() for p in group]
    total = dict(zip(every, torch.autograd.grad(loss.total, every, retain_graph=True), strict=True))
    naive = {**losses, "critic": losses["critic"] + losses["conservative"]}
    for name, group in groups.items():
        for p, grad in zip(group, torch.autograd.grad(naive[name], list(group), retain_graph=True), strict=True):
            torch.testing.assert_close(total[p], grad, rtol=1e-3, atol=1e-4)


def parts_of(net: ConservativeModule, batch: Batch) -> tuple[Any, ...]:
    inputs = net(batch.obs).dist_inputs.detach()
    return net.columns_of(batch.obs), (inputs, inputs.flip(0)), net.scaled(batch.action)


def test_the_gradient_through_some_actions_is_that_through_all_in_the_mean() -> None:
    _, net = made(BOX)
    with torch.no_grad():
        net.critic.weight_2.mul_(20)  # so that some actions count much more than others
    given = parts_of(net, random_batch(net, BOX, 3, size=4))
    parameters = list(net.critic.parameters())

    def gradient(num: int | None) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)  # the same actions each time; what is drawn of them is not
        state = torch.get_rng_state()
        maximum, values = soft_maximum(net, *given, 5, num)
        grads = torch.autograd.grad(maximum.sum(), parameters)
        torch.set_rng_state(state)
        return maximum.detach(), values.detach(), torch.cat([grad.flatten() for grad in grads])

    exact, values, whole = gradient(None)
    rand, sums = torch.rand, torch.zeros_like(whole)
    points = 64  # evenly spaced in place of random
    for i in range(points):
        calls = []

        def spaced(*size: Any, i: int = i, calls: list[int] = calls, **kwargs: Any) -> Tensor:
            calls.append(1)
            drawn = rand(*size, **kwargs)
            return drawn if len(calls) == 1 else torch.full_like(drawn, (i + 0.5) / points)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand", spaced)
            estimate, same, some = gradient(3)
        torch.testing.assert_close(estimate, exact, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(same, values, rtol=1e-4, atol=1e-4)
        sums += some / points
    assert (sums - whole).norm() < 0.03 * whole.norm()
    assert (some - whole).norm() > 0.03 * whole.norm()


def test_the_soft_maximum_is_the_logarithm_of_an_integral() -> None:
    _, net = made(spaces.Box(-3.0, 3.0, (1,), np.float32))
    with torch.no_grad():
        net.critic.weight_2.mul_(20)
    batch = random_batch(net, net.action_space, 3, size=6)
    torch.manual_seed(0)
    maximum = soft_maximum(net, *parts_of(net, batch), 4000, 1)[0].detach()
    grid = (torch.arange(2000) + 0.5) / 1000 - 1
    for k in range(2):
        for i in range(6):
            q = naive_critic(net.critic, k, batch["obs"][i].expand(2000, 3), grid[:, None]).detach()
            assert float(maximum[k, i]) == pytest.approx(float((q.exp().mean() * 2).log()), abs=0.1)


def test_many_actions_of_images_are_those_one_by_one() -> None:
    space = spaces.Dict({"image": spaces.Box(0, 255, (8, 8, 3), np.uint8), "speed": spaces.Box(-1, 1, (2,))})
    critic = TwinCritic(space, 1, NetworkConfig(hidden=(8,), conv_width=4))
    obs = {"obs/image": torch.randint(0, 255, (700, 8, 8, 3), dtype=torch.uint8), "obs/speed": torch.randn(700, 2)}
    for actions in (torch.randn(700, 5, 1), torch.randn(2, 700, 5, 1)):
        values = critic.many(obs, actions)
        for j in range(5):
            for k in range(2):
                own = critic(obs, actions[..., j, :] if actions.dim() == 3 else actions[k, :, j])[k]
                torch.testing.assert_close(values[k, :, j], own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "given",
    [
        {"precision": "bfloat16"},
        {"accumulate": 2},
        {"temperature": 0.1},
        {"threshold": 2.0, "gradient_actions": 1},
        {"gradient_actions": None, "num_actions": 1},
    ],
)
def test_other_ways_to_step(given: dict[str, Any]) -> None:
    algorithm, net = made(BOX, **given)
    update = algorithm.learner.only.update_from([columns(net)] * 4)
    assert all(np.isfinite(value) for value in (update.losses | update.metrics).values())
    assert ("alpha" in update.losses) == ("threshold" in given)
    assert ("temperature" in update.losses) == ("temperature" not in given)


def test_a_learned_alpha_holds_the_gap_where_it_is_told() -> None:
    high, low = (made(BOX, threshold=threshold, lr=1e-2) for threshold in (50.0, -50.0))
    step = columns(high[1])
    assert high[0].learner.only.update_from([step] * 20).metrics["alpha"] < 5
    assert low[0].learner.only.update_from([step] * 20).metrics["alpha"] > 5


# -- what is learned --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> str:
    return mixed_cartpole(tmp_path_factory.mktemp("cartpole") / "data")


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory: pytest.TempPathFactory) -> str:
    return mixed_pendulum(tmp_path_factory.mktemp("pendulum") / "data")


class WrongSign(CQL):
    """Takes each reward for a loss."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        batch.used["reward"] = -batch["reward"]
        return super().loss(module, batch)


class Reckless(CQL):
    """Pays for actions that were not recorded."""

    def loss(self, module: Module, batch: Batch) -> Loss:
        loss = super().loss(module, batch)
        loss.parts["conservative"] = -0.5 * loss.parts["conservative"]
        return loss


QUICK: dict[str, Any] = {
    "seed": 0,
    "network": NetworkConfig(hidden=(64, 64), activation="relu", separate=False),
    "lr": 1e-3,
    "tau": 0.02,
    "gamma": 0.97,
    "updates_per_iteration": 2000,
}


@pytest.mark.learning
@pytest.mark.parametrize(
    ("algorithm", "least", "most"), [(CQL, 400, 500), mistaken(WrongSign, 0, 200), mistaken(Reckless, 0, 200)]
)
def test_learns_cartpole_from_a_mixed_recording(cartpole: str, algorithm: type[CQL], least: int, most: int) -> None:
    def score(seed: int) -> float:
        trained = algorithm(CQLConfig(data=cartpole, **QUICK | {"seed": seed}))
        trained.train()
        return trained.evaluate(20, env="CartPole-v1", seed=5).return_mean  # BC: about 250

    assert least <= median_over_seeds(score) <= most


@pytest.mark.learning
def test_learns_pendulum_from_a_mixed_recording(pendulum: str) -> None:
    def score(seed: int) -> float:
        given = QUICK | {"gamma": 0.95, "updates_per_iteration": 1500, "seed": seed}
        trained = CQL(CQLConfig(data=pendulum, num_actions=4, alpha=1.0, **given))
        trained.train()
        return trained.evaluate(20, env="Pendulum-v1", seed=5).return_mean

    assert median_over_seeds(score) >= -1000  # BC: about -1,250; with rewards negated: -1,600


# -- going on, and what it is told ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pendulum", "cartpole"])
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(
    kind: str, pendulum: str, cartpole: str, tmp_path: Path
) -> None:
    data = pendulum if kind == "pendulum" else cartpole
    given: Any = {"threshold": 1.0} if kind == "pendulum" else {}
    algorithm = CQL(CQLConfig(**QUICK | {"data": data, "updates_per_iteration": 7, "network": SMALL} | given))
    algorithm.train()
    algorithm.save(tmp_path)
    expected = [json.dumps(algorithm.train().losses) for _ in range(3)]
    resumed = etude.load(tmp_path)
    assert [json.dumps(resumed.train().losses) for _ in range(3)] == expected
    for name, value in algorithm.module.state_dict().items():
        assert torch.equal(value, resumed.module.state_dict()[name]), name


def test_a_loaded_run_has_the_weights_of_the_loss_that_are_set_then(pendulum: str, tmp_path: Path) -> None:
    algorithm = CQL(CQLConfig(**QUICK | {"data": pendulum, "updates_per_iteration": 1, "network": SMALL}))
    algorithm.train()
    algorithm.save(tmp_path)
    figures = etude.load(tmp_path, penalty={"alpha": 50.0}, temperature=0.25).train().metrics
    assert figures["alpha"] == pytest.approx(50.0)
    assert figures["temperature"] == pytest.approx(0.25)
    learned = etude.load(tmp_path, threshold=1.0)  # starts from the weight that was saved
    assert learned.train().metrics["alpha"] == pytest.approx(5.0)
    learned.save(tmp_path)
    assert learned.module.log_alpha.exp().item() != pytest.approx(5.0, abs=1e-6)
    assert etude.load(tmp_path, threshold=None).train().metrics["alpha"] == pytest.approx(5.0, abs=1e-6)


def test_on_the_command_line(pendulum: str, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    flags = ["--data", pendulum, "--updates-per-iteration", "5", "--batch-size", "32", "--alpha", "2"]
    assert main(["train", "cql", *flags, "--stop.updates", "10", "--out", out, "--quiet"]) == 0
    loaded = etude.load(out)
    assert isinstance(loaded, CQL)
    assert (loaded.config.penalty.alpha, loaded.updates) == (2.0, 10)
    assert main(["evaluate", out, "--env", "Pendulum-v1", "--episodes", "1"]) == 0


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("alpha", 0.0, "above 0, or none"),
        ("num_actions", 0, "at least 1"),
        ("gradient_actions", 0, "at least 1, or none"),
        ("temperature", 0.0, "above 0, or none"),
        ("gamma", 1.1, "between 0 and 1"),
        ("tau", 0.0, "above 0 and at most 1"),
        ("squash", False, "true: actions are always squashed"),
    ],
)
def test_bad_settings(name: str, value: Any, rule: str) -> None:
    with pytest.raises(SettingsError, match=rf"`(\w+\.)?{name}` is {value}, but must be {rule}"):
        CQLConfig(data="data", **{name: value})


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(SettingsError, match="CQL needs a Box of floats. Use IQL"):
        made(spaces.MultiDiscrete([2, 2]))
    for name in ("threshold", "alpha_lr", "num_actions", "gradient_actions", "temperature", "target_entropy"):
        with pytest.raises(SettingsError, match=rf"{name}` is 2.*, but has no effect for Discrete actions. Leave"):
            made(CHOICE, **{name: 2 if "actions" in name else 2.0})
    with pytest.raises(SettingsError, match="`dueling` is True, but has no effect for Box actions. Leave it out"):
        made(BOX, dueling=True)
    with pytest.raises(SettingsError, match="`target_entropy` is 1.0, but must be none where `temperature` is given"):
        made(BOX, temperature=0.1, target_entropy=1.0)
    for space in (BOX, CHOICE):
        with pytest.raises(SettingsError, match="Network is recurrent, but cql learns from single steps"):
            made(space, network=NetworkConfig(recurrent="gru"))
    algorithm, net = made(BOX)
    other = Module(net.net, LINE, BOX, net.dist)
    with pytest.raises(ModuleError, match="Module is not a ConservativeModule"):
        algorithm.loss(other, random_batch(other, BOX, 3))
