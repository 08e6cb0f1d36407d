# SPDX-License-Identifier: Apache-2.0
import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from offline_cases import Costly, costly_replay
from over_seeds import median_over_seeds, mistaken
from torch import nn
from toy_envs import Echo

import etude
from etude.algorithms import BC, MARWIL, PPO, BCConfig, MARWILConfig, PPOConfig, Result
from etude.cli.main import main
from etude.connectors import GAE, AdvantageWeights, Connect
from etude.errors import DataError, ModuleError, SettingsError
from etude.experience import Experience, Segments
from etude.learners import Batch, Loss
from etude.modules import Module, NetworkConfig, Output
from etude.recordings import RecordingWriter

MODES = pytest.mark.parametrize("mode", ["auto", "stream", "materialize_data"])


def record(path: Path, exp: Experience, obs_size: int, actions: int) -> str:
    space = gym.spaces.Box(-np.inf, np.inf, (obs_size,), np.float32)
    with RecordingWriter(path, obs_space=space, action_space=gym.spaces.Discrete(actions), env="Toy-v0") as writer:
        writer.write(exp)
    return str(path)


# -- weights, step by step --------------------------------------------------------------------------------------------

LENGTHS = [3, 40, 1, 12, 25, 8]
ENDS = ["terminated", "truncated", "terminated", "cut", "unknown", "truncated"]
GAMMA, LAMBDA, BETA, RATE, MOST = 0.9, 0.8, 1.5, 0.3, 4.0


def episodes() -> Experience:
    """Episode i is seen as [i / 6, t / 10], and ends in one of four ways; there are stale values, too."""
    rng = np.random.default_rng(0)
    offsets = np.cumsum([0, *LENGTHS])
    episode = np.repeat(np.arange(6), LENGTHS)
    t = np.arange(offsets[-1]) - np.repeat(offsets[:-1], LENGTHS)
    segments = Segments.of(
        6,
        episode_id=[f"e{i}" for i in range(6)],
        terminated=np.array([end == "terminated" for end in ENDS]),
        truncated=np.array([end in ("truncated", "unknown") for end in ENDS]),
        has_final_obs=np.array([end != "unknown" for end in ENDS]),
    )
    steps = {
        "obs": np.stack([episode / 6, t / 10], 1).astype(np.float32),
        "action": rng.integers(3, size=len(t)),
        "reward": rng.normal(size=len(t)),
        "value": np.full(len(t), 1e3, np.float32),
    }
    final = np.stack([np.arange(6) / 6, np.array(LENGTHS) / 10], 1).astype(np.float32)
    final[~segments.has_final_obs] = 0
    return Experience(steps, offsets.astype(np.int64), segments, {"obs": final})


def average(algorithm: MARWIL) -> float | None:
    """The moving average of squared advantages."""
    weights = algorithm.learner.only.connectors.connectors[-1]
    assert isinstance(weights, AdvantageWeights)
    return weights.mean_square


class Watched(MARWIL):
    """Checks each batch against the formulas, written out for one step after the other, with the values of now."""

    checked = 0
    mean: float | None = None

    def loss(self, module: Module, batch: Batch) -> Loss:
        obs = batch["obs"].numpy()
        with torch.no_grad():
            value = module(batch["obs"]).value
        assert value is not None
        episode, t = np.round(obs[:, 0] * 6).astype(int), np.round(obs[:, 1] * 10).astype(int)
        is_last = (np.diff(episode, append=-1) != 0) | (np.diff(t, append=-1) != 1)
        is_last |= (t + 1) % self.config.sequences.max_len == 0
        advantage = naive(module, episode, t, is_last, batch["reward"].tolist(), value.tolist())
        square = float(np.mean(np.square(advantage)))
        self.mean = square if self.mean is None else (1 - RATE) * self.mean + RATE * square
        weight = [min(np.exp(BETA * a / np.sqrt(self.mean)), MOST) for a in advantage]
        np.testing.assert_allclose(batch["weight"], weight, rtol=1e-3)
        np.testing.assert_allclose(batch["value_target"], np.add(advantage, value.tolist()), rtol=1e-3, atol=1e-4)
        self.checked += 1
        return super().loss(module, batch)


def naive(
    module: Module,
    episode: NDArray[Any],
    t: NDArray[Any],
    is_last: NDArray[Any],
    reward: list[float],
    value: list[float],
) -> list[float]:
    advantage = [0.0] * len(t)
    for i in reversed(range(len(t))):
        following, rest = (
            (after(module, episode[i], t[i], value[i]), 0.0) if is_last[i] else (value[i + 1], advantage[i + 1])
        )
        advantage[i] = reward[i] + GAMMA * following - value[i] + GAMMA * LAMBDA * rest
    return advantage


def after(module: Module, episode: int, t: int, value: float) -> float:
    """What follows the last step of a segment is worth."""
    if t + 1 == LENGTHS[episode] and ENDS[episode] == "terminated":
        return 0.0
    if t + 1 == LENGTHS[episode] and ENDS[episode] == "unknown":
        return value
    with torch.no_grad():
        following = module(torch.tensor([[episode / 6, (t + 1) / 10]])).value
    assert following is not None
    return float(following)


@MODES
@pytest.mark.parametrize("max_segment_length", [7, 1000])
def test_weights_are_those_of_the_paper_by_the_values_of_now(
    mode: Any, max_segment_length: int, tmp_path: Path
) -> None:
    config = MARWILConfig(
        data=record(tmp_path / "data", episodes(), 2, 3),
        mode=mode,
        batch_size=20,
        updates_per_iteration=30,
        lr=0.02,
        gamma=GAMMA,
        lambda_=LAMBDA,
        beta=BETA,
        average_rate=RATE,
        max_weight=MOST,
        max_segment_length=max_segment_length,
        seed=0,
    )
    algorithm = Watched(config)
    result = algorithm.train()
    assert algorithm.checked == 30
    assert average(algorithm) == pytest.approx(algorithm.mean, rel=1e-3)
    assert result.losses.keys() == {"policy", "value"}
    assert 0 < result.metrics["weight"] <= MOST


def test_the_loss_is_that_of_the_paper(tmp_path: Path) -> None:
    algorithm = MARWIL(MARWILConfig(data=record(tmp_path / "data", episodes(), 2, 3), value_weight=0.3, seed=0))
    rng = np.random.default_rng(0)
    obs, action = rng.normal(size=(9, 2)).astype(np.float32), rng.integers(3, size=9)
    weight, target = rng.random(9).astype(np.float32), rng.normal(size=9).astype(np.float32)
    columns = {"obs": obs, "action": action, "weight": weight, "value_target": target}
    loss = algorithm.loss(
        algorithm.module, Batch({k: torch.from_numpy(v) for k, v in columns.items()}, algorithm.module)
    )
    out = algorithm.module(torch.from_numpy(obs))
    assert out.dist_inputs is not None
    assert out.value is not None
    logits, value = out.dist_inputs.detach().numpy().astype(float), out.value.detach().numpy()
    logp = (logits - np.log(np.exp(logits).sum(1, keepdims=True)))[np.arange(9), action]
    assert loss.parts["policy"].item() == pytest.approx(-(weight * logp).mean(), rel=1e-5)
    assert loss.parts["value"].item() == pytest.approx(0.3 * np.square(value - target).mean(), rel=1e-5)


# -- what is learned --------------------------------------------------------------------------------------------------

SHARES = np.array([0.6, 0.3, 0.1])
PAID = np.array([0.0, 1.0, 3.0])
OFFSET = 10.0


def bandit() -> Experience:
    """Two states, the second paid better whatever is done: 200 steps in each, in episodes of 4."""
    action = np.concatenate(
        [np.random.default_rng(s).permutation(np.repeat(np.arange(3), [120, 60, 20])) for s in (0, 1)]
    )
    state = np.repeat([0, 1], 200)
    segments = Segments.of(100, episode_id=[f"e{i}" for i in range(100)], terminated=True)
    steps = {"obs": np.eye(2, dtype=np.float32)[state], "action": action, "reward": PAID[action] + OFFSET * state}
    return Experience(steps, np.arange(0, 401, 4), segments, {"obs": np.zeros((100, 2), np.float32)})


class WrongSign(MARWIL):
    def learner_connectors(self) -> list[Any]:
        return [Negated(self.config.gamma, self.config.lambda_), *super().learner_connectors()[1:]]


class Negated(GAE):
    def offline(self, exp: Experience, module: Module | None = None) -> Experience:
        exp = super().offline(exp, module)
        return exp.with_steps(advantage=-exp.steps["advantage"])


class Stale(MARWIL):
    """Advantages come from the value function as it was at the start."""

    def learner_connectors(self) -> list[Any]:
        return [OfOld(self.config.gamma, self.config.lambda_), *super().learner_connectors()[1:]]

    def setup(self) -> None:
        super().setup()
        of_old = self.learner.only.connectors.connectors[0]
        assert isinstance(of_old, OfOld)
        of_old.module = copy.deepcopy(self.module)


class OfOld(GAE):
    module: Module | None = None

    def offline(self, exp: Experience, module: Module | None = None) -> Experience:
        target = super().offline(exp, module).steps["value_target"]
        return super().offline(exp, self.module).with_steps(value_target=target)


@pytest.mark.parametrize(
    ("algorithm", "beta", "max_weight", "is_right"),
    [
        (MARWIL, 1.0, 20.0, True),
        (MARWIL, 0.4, 20.0, True),
        (MARWIL, 1.0, 2.0, True),
        (MARWIL, 0.0, 20.0, True),
        (WrongSign, 1.0, 20.0, False),
        (Stale, 1.0, 20.0, False),
    ],
)
def test_the_policy_is_the_recorded_one_tilted_by_advantages(
    algorithm: type[MARWIL], beta: float, max_weight: float, is_right: bool, tmp_path: Path
) -> None:
    """Wang et al. 2018: the policy that is learned is ``mu(a) exp(beta A(a) / c)``, normalised."""
    config = MARWILConfig(
        data=record(tmp_path / "data", bandit(), 2, 3),
        seed=0,
        beta=beta,
        max_weight=max_weight,
        gamma=0.0,
        network=NetworkConfig(hidden=()),
        batch_size=400,
        updates_per_iteration=350,
        lr=0.08,
        average_rate=0.03,
        grad_clip=None,
    )
    trained = algorithm(config)
    trained.train()
    advantage = PAID - SHARES @ PAID
    c = np.sqrt(SHARES @ advantage**2)
    expected = SHARES * np.minimum(np.exp(beta * advantage / c), max_weight)
    expected /= expected.sum()
    with torch.no_grad():
        inputs = trained.module(torch.eye(2)).dist_inputs
    assert inputs is not None
    learned = inputs.softmax(-1).numpy()
    error = np.abs(learned - expected).max()
    assert (error < 0.02) if is_right else (error > 0.1), learned
    if beta and is_right:
        assert average(trained) == pytest.approx(c**2, rel=0.05)


# -- beta = 0 is BC ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("echo") / "data"
    PPO(PPOConfig(env=Echo, seed=0, num_envs=1)).record(path, 40, seed=1, explore=True)
    return str(path)


@MODES
def test_with_beta_0_it_is_bc_to_the_last_bit(recording: str, mode: Any) -> None:
    same: Any = {"data": recording, "seed": 3, "batch_size": 48, "updates_per_iteration": 20, "mode": mode}
    bc, marwil = BC(BCConfig(**same)), MARWIL(MARWILConfig(**same, beta=0.0))
    for _ in range(3):
        a, b = bc.train(), marwil.train()
        assert a.losses["imitation"] == b.losses["policy"]
    weights, others = bc.module.state_dict(), marwil.module.state_dict()
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert not marwil.learner.only.connectors.connectors
    weighed = MARWIL(MARWILConfig(**same, beta=1e-3)).module.state_dict()
    assert weighed.keys() > weights.keys()


# -- going on ---------------------------------------------------------------------------------------------------------


def facts(result: Result) -> str:
    clocks = ("seconds", "times", "data", "bottleneck", "sample_steps_per_s", "resumed", "turn_ms")
    row = result.to_dict().items()
    return json.dumps({k: v for k, v in row if k not in clocks and not k.startswith("duration")}, default=str)


@pytest.mark.parametrize(
    "given", [{"connectors": ("normalize_obs",)}, {"mode": "stream"}, {"lambda_": 0.9, "max_segment_length": 6}]
)
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(
    recording: str, given: dict[str, Any], tmp_path: Path
) -> None:
    config: Any = {"seed": 2, "batch_size": 48, "updates_per_iteration": 7, "env": Echo, "evaluation_episodes": 3}
    algorithm = MARWIL(MARWILConfig(data=recording, **config, **given))
    for _ in range(3):
        algorithm.train()
    algorithm.save(tmp_path)
    expected = [algorithm.train() for _ in range(5)]
    resumed = etude.load(tmp_path, env=Echo)
    assert [facts(resumed.train()) for _ in range(5)] == [facts(result) for result in expected]
    assert isinstance(resumed, MARWIL)
    assert average(resumed) == average(algorithm)
    for a, b in zip(resumed.module.parameters(), algorithm.module.parameters(), strict=True):
        assert torch.equal(a, b)


def spoiled(exp: Experience, connect: Connect) -> Experience:
    reward = exp.steps["reward"].copy()
    reward[5] = np.nan
    return connect(exp.with_steps(reward=reward))


def test_a_batch_that_is_not_finite_is_skipped_and_spoils_nothing(tmp_path: Path) -> None:
    data = record(tmp_path / "data", episodes(), 2, 3)
    config = MARWILConfig(data=data, batch_size=10, updates_per_iteration=18, seed=0, prelearner=spoiled)
    algorithm = MARWIL(config)
    result = algorithm.train()
    assert 2 <= result.metrics["skipped_steps"] <= 4  # of 18 batches, which are two epochs
    mean = average(algorithm)
    assert mean is not None
    assert np.isfinite(mean)
    assert all(np.isfinite(p.detach().numpy()).all() for p in algorithm.module.parameters())


# -- what it is told --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("beta", -1.0, "at least 0"),
        ("gamma", 1.1, "between 0 and 1"),
        ("lambda_", -0.1, "between 0 and 1"),
        ("value_weight", -1.0, "at least 0"),
        ("average_rate", 0.0, "above 0 and at most 1"),
        ("max_weight", 0.5, "at least 1"),
    ],
)
def test_bad_settings(name: str, value: Any, rule: str) -> None:
    with pytest.raises(SettingsError, match=f"`{name}` is {value}, but must be {rule}"):
        MARWILConfig(data="data", **{name: value})
    with pytest.raises(SettingsError, match="`sequences.max_len` is 0, but must be at least 1"):
        MARWILConfig(data="data", max_segment_length=0)


class PolicyAlone(nn.Module):
    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, obs: Any) -> Output:
        return Output(self.linear(obs))


def test_a_network_without_values_or_with_a_memory_is_refused(recording: str) -> None:
    with pytest.raises(ModuleError, match="PolicyAlone gives no values, which are needed here"):
        MARWIL(MARWILConfig(data=recording, module=PolicyAlone)).train()
    MARWIL(MARWILConfig(data=recording, module=PolicyAlone, beta=0.0)).train()
    with pytest.raises(SettingsError, match="marwil needs values along time, which recordings can't give a recurrent"):
        MARWIL(MARWILConfig(data=recording, network=NetworkConfig(recurrent="gru"))).train()


def test_rewards_are_needed_unless_beta_is_0(tmp_path: Path) -> None:
    exp = episodes()
    del exp.steps["reward"]
    data = record(tmp_path / "data", exp, 2, 3)
    for mode in ("auto", "stream"):
        with pytest.raises(DataError, match="no column `reward`"):
            MARWIL(MARWILConfig(data=data, mode=mode)).train()
        MARWIL(MARWILConfig(data=data, mode=mode, beta=0.0, updates_per_iteration=2)).train()


def test_what_asks_the_module_cannot_be_held_in_memory(recording: str) -> None:
    with pytest.raises(SettingsError, match="gae uses the module, which changes during training, so its output can't"):
        MARWIL(MARWILConfig(data=recording, mode="materialize_mapped_data"))


def test_on_the_command_line(recording: str, tmp_path: Path) -> None:
    flags = ["--data", recording, "--env", "toy_envs:Echo", "--batch-size", "32", "--updates-per-iteration", "5"]
    out = tmp_path / "run"
    code = main(["train", "marwil", *flags, "--beta", "0.5", "--stop.updates", "10", "--out", str(out), "--quiet"])
    assert code == 0
    loaded = etude.load(out, env=Echo)
    assert isinstance(loaded, MARWIL)
    assert loaded.config.beta == 0.5
    assert loaded.updates == 10


# -- a recording of mixed quality -------------------------------------------------------------------------------------


class Balances(nn.Module):
    """Pushes to where the pole falls: a good policy for CartPole, written by hand."""

    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        self.push = nn.Parameter(torch.tensor([0.05, 0.2, 1.0, 0.7]))

    def forward(self, obs: Any) -> Output:
        right = 100 * (obs @ self.push)
        return Output(torch.stack([-right, right], -1))


class Guesses(nn.Module):
    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        self.inputs = nn.Parameter(torch.zeros(2))

    def forward(self, obs: Any) -> Output:
        return Output(self.inputs.expand(len(obs), 2))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """10 good episodes of CartPole with 5,000 steps, and 2,500 random ones with about 55,000."""
    path = tmp_path_factory.mktemp("mixed") / "data"
    good, bad = (PPO(PPOConfig(env="CartPole-v1", num_envs=1, module=net)) for net in (Balances, Guesses))
    assert good.record(path, 10, seed=1).return_mean == 500
    assert bad.record(path, 2500, seed=2, explore=True, append=True).return_mean < 25
    return str(path)


@pytest.mark.learning
@pytest.mark.parametrize(
    ("algorithm", "given", "least", "most"),
    [
        (MARWIL, {}, 400, 500),
        (MARWIL, {"beta": 0.0}, 0, 250),
        mistaken(WrongSign, {}, 0, 100),
    ],
)
def test_learns_from_a_mixed_recording_what_bc_can_not(
    mixed: str, algorithm: type[MARWIL], given: dict[str, Any], least: float, most: float
) -> None:
    """BC gets about 100 here, whichever its seed; this policy itself gets 500."""

    def score(seed: int) -> float:
        config = MARWILConfig(data=mixed, seed=seed, batch_size=2048, updates_per_iteration=800)
        trained = algorithm(dataclasses.replace(config, **given))
        trained.train()
        return trained.evaluate(20, env="CartPole-v1", seed=5).return_mean

    assert least <= median_over_seeds(score) <= most


@pytest.mark.learning
@pytest.mark.parametrize(("given", "least", "most"), [({}, -1e5, 0), ({"grad_clip_by": "global_norm"}, -2e5, -1.3e5)])
def test_large_returns_leave_the_policy_its_part_of_the_gradient(
    tmp_path: Path, given: dict[str, Any], least: float, most: float
) -> None:
    """The gradient of the values is 100,000 times that of the policy, which one limit for both would take away.

    The policy that acted here gets -18,000, one that does nothing some -120,000.
    """
    data = costly_replay(tmp_path)

    def score(seed: int) -> float:
        config = MARWILConfig(data=data, seed=seed, batch_size=256, updates_per_iteration=600)
        trained = MARWIL(dataclasses.replace(config, **given))
        trained.train()
        return trained.evaluate(20, env=Costly, seed=5).return_mean

    assert least <= median_over_seeds(score) <= most
