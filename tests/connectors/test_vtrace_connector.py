# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import pytest
import torch
from connector_cases import ACTION_SPACES, OBS_SPACES, World, episodes
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn
from torch.distributions import Bernoulli, Categorical, Normal

from etude import columns as col
from etude.connectors import GAE, Pipeline, VTrace
from etude.errors import DataError, ModuleError, SettingsError
from etude.experience import Experience
from etude.modules import Module, NetworkConfig, Output, make_module
from etude.modules.critics import FollowedModule
from etude.spaces import Space

PAIRS = spaces.Box(-np.inf, np.inf, (2,), np.float32)


class Linear(nn.Module):
    """Logits and a value, each a linear map; remembers how many rows it was asked for at once."""

    def __init__(self, num_actions: int, seed: int = 0) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.logits = nn.Parameter(torch.tensor(rng.normal(size=(2, num_actions)) * 0.2, dtype=torch.float32))
        self.values = nn.Parameter(torch.tensor(rng.normal(size=2), dtype=torch.float32))
        self.asked: list[int] = []

    def forward(self, obs: torch.Tensor) -> Output:
        self.asked.append(len(obs))
        return Output(dist_inputs=obs @ self.logits, value=obs @ self.values)


def linear(num_actions: int = 10, seed: int = 0) -> Module:
    return make_module(Linear(num_actions, seed), PAIRS, spaces.Discrete(num_actions))


def said_by(module: Module, obs: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Log-probabilities of all actions and values of a `Linear`, in NumPy."""
    net = module.net
    assert isinstance(net, Linear)
    logits = np.asarray(obs, float) @ net.logits.detach().numpy().astype(float)
    highest = logits.max(-1, keepdims=True)
    logp = logits - highest - np.log(np.exp(logits - highest).sum(-1, keepdims=True))
    return logp, np.asarray(obs, float) @ net.values.detach().numpy().astype(float)


def naive(
    exp: Experience, module: Module, gamma: float, rho_bar: float, c_bar: float, lambda_: float
) -> tuple[list[float], list[float], list[float]]:
    """Espeholt et al. 2018, eq. 1 as it stands, and the advantage of 4.2, segment by segment, step by step."""
    targets, advantages, logps = [], [], []
    for segment in exp:
        n = segment.num_steps
        logp, value = said_by(module, segment.steps["obs"])
        own = logp[np.arange(n), segment.steps["action"]]
        ratio = np.exp(own - segment.steps["logp"])
        after = float(value[-1])
        if segment.segments.terminated[0]:
            after = 0.0
        elif segment.segments.has_final_obs[0]:
            after = float(said_by(module, segment.final_obs["obs"])[1][0])
        v = [*value, after]
        reward = segment.steps["reward"]
        found = []
        for s in range(n):
            total = v[s]
            for t in range(s, n):
                delta = min(rho_bar, ratio[t]) * (reward[t] + gamma * v[t + 1] - v[t])
                traces = float(np.prod([lambda_ * min(c_bar, ratio[i]) for i in range(s, t)]))
                total += gamma ** (t - s) * traces * delta
            found.append(total)
        found.append(after)
        advantages += [min(rho_bar, ratio[s]) * (reward[s] + gamma * found[s + 1] - v[s]) for s in range(n)]
        targets += found[:-1]
        logps += own.tolist()
    return targets, advantages, logps


@settings(max_examples=60, deadline=None)
@given(
    ends=st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["term", "trunc", "cut", "lost"])), max_size=6),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lambda_=st.sampled_from([0.0, 0.95, 1.0]),
    caps=st.sampled_from([(1.0, 1.0), (2.0, 0.5), (1e6, 1e6)]),
    max_len=st.integers(1, 9),
    lookback=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_against_equation_1(
    ends: list[tuple[int, str]],
    gamma: float,
    lambda_: float,
    caps: tuple[float, float],
    max_len: int,
    lookback: int,
    seed: int,
) -> None:
    exp = episodes(
        [n for n, _ in ends],
        terminated=[end == "term" for _, end in ends],
        truncated=[end == "trunc" for _, end in ends],
        has_final_obs=[end != "lost" for _, end in ends],
    )
    rng = np.random.default_rng(seed)
    others = rng.normal(-2.3, 0.7, exp.num_steps).astype(np.float32)  # the behaviour policy's
    stale = rng.normal(size=exp.num_steps).astype(np.float32)  # recorded values count for nothing
    exp = exp.with_steps(logp=others, value=stale).cut(max_len, lookback=lookback)
    module = linear(seed=seed)
    targets, advantages, logps = naive(exp, module, gamma, *caps, lambda_)

    out = VTrace(gamma, *caps, lambda_).offline(exp, module)

    close = {"rtol": 2e-3, "atol": 2e-3}
    np.testing.assert_allclose(out.steps["value_target"], np.array(targets), **close)
    np.testing.assert_allclose(out.steps["advantage"], np.array(advantages), **close)
    np.testing.assert_allclose(out.steps["target_logp"], np.array(logps), rtol=1e-4, atol=1e-4)
    assert {out.steps[name].dtype.name for name in ("advantage", "value_target", "target_logp")} == {"float32"}
    assert "advantage" not in exp.steps


def test_with_the_weights_that_acted_it_is_the_lambda_one_return() -> None:
    exp = episodes([5, 3, 7], terminated=[False, True, False], truncated=[True, False, False]).cut(4)
    module = linear()
    own = said_by(module, exp.steps["obs"])[0][np.arange(15), exp.steps["action"]].astype(np.float32)
    for lambda_ in (1.0, 0.8):
        made = VTrace(0.9, lambda_=lambda_).offline(exp.with_steps(logp=own), module)
        gae = GAE(0.9, lambda_).offline(exp, module)
        np.testing.assert_allclose(made.steps["value_target"], gae.steps["value_target"], rtol=1e-4, atol=1e-4)
        if lambda_ == 1.0:
            np.testing.assert_allclose(made.steps["advantage"], gae.steps["advantage"], rtol=1e-3, atol=1e-3)


def test_older_weights_are_corrected_for() -> None:
    """A choice that the module would never make counts for nothing: neither reward nor advantage."""
    module = linear(2)
    exp = episodes([4], terminated=True)
    exp = exp.with_steps(action=np.int64([0, 1, 0, 1]), logp=np.log(np.full(4, 0.5, np.float32)))
    net = module.net
    assert isinstance(net, Linear)
    with torch.no_grad():
        net.logits[:] = torch.tensor([[0.0, 0.0], [30.0, -30.0]])  # from t = 1 on, action 0 alone
    out = VTrace(1.0).offline(exp, module).steps
    value = said_by(module, exp.steps["obs"])[1]
    # at t = 0 it draws; at t = 1 and 3 what was done is never done: values stay as they are
    np.testing.assert_allclose(out["advantage"][[1, 3]], 0, atol=1e-5)
    np.testing.assert_allclose(out["value_target"][[1, 3]], value[[1, 3]], rtol=1e-5)
    np.testing.assert_allclose(out["value_target"][0], 0 + value[1], rtol=1e-4, atol=1e-5)  # reward t, then v
    np.testing.assert_allclose(out["value_target"][2], 2 + value[3], rtol=1e-4)


def lived(obs_space: Space, action_space: Space, seed: int = 0) -> Experience:
    pipeline = Pipeline([])
    pipeline.spaces(obs_space, action_space)
    pipeline.start(3)
    world = World(pipeline, obs_space, action_space, 3, seed, shy=False)
    for _ in range(12):
        world.turn()
    exp = world.finish()[0]
    return exp.with_steps(logp=np.random.default_rng(seed).normal(-1, 0.5, exp.num_steps).astype(np.float32))


def torch_logp(kind: str, inputs: torch.Tensor, steps: Any) -> torch.Tensor:
    """As torch.distributions has it."""
    action = {name: torch.as_tensor(steps[name]) for name in col.under(steps, "action")}
    if kind == "discrete":  # starts at 1
        return Categorical(logits=inputs).log_prob(action["action"] - 1)
    if kind == "box":
        return Normal(inputs[:, :2], inputs[:, 2:].exp()).log_prob(action["action"]).sum(-1)
    if kind == "multi_discrete":  # of 3 and 2 choices, from 0 and 5
        first, second = action["action"][:, 0], action["action"][:, 1] - 5
        return Categorical(logits=inputs[:, :3]).log_prob(first) + Categorical(logits=inputs[:, 3:]).log_prob(second)
    if kind == "multi_binary":
        return Bernoulli(logits=inputs).log_prob(action["action"].float()).sum(-1)
    jump, move = Categorical(logits=inputs[:, :2]), Normal(inputs[:, 2:4], inputs[:, 4:].exp())
    return jump.log_prob(action["action/jump"]) + move.log_prob(action["action/move"]).sum(-1)


@pytest.mark.parametrize("obs", ["vector64", "dict", "tuple", "image", "discrete"])
@pytest.mark.parametrize("kind", list(ACTION_SPACES))
def test_any_observations_and_actions(obs: str, kind: str) -> None:
    torch.manual_seed(0)
    exp = lived(OBS_SPACES[obs], ACTION_SPACES[kind])
    config = NetworkConfig(hidden=(8,), conv=((4, 2, 1),), conv_width=8)
    module = make_module(None, OBS_SPACES[obs], ACTION_SPACES[kind], config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
        seen = {name: torch.as_tensor(column) for name, column in col.subtree(exp.steps, "obs").items()}
        said = module(module.obs_from(seen))
        expected = torch_logp(kind, said.dist_inputs, exp.steps).numpy()
    out = VTrace(0.9).offline(exp, module)
    np.testing.assert_allclose(out.steps["target_logp"], expected, rtol=1e-4, atol=1e-4)
    # a step that ends its segment by termination: v = V + rho (r - V)
    last = exp.offsets[1:][exp.segments.terminated] - 1
    assert len(last)
    rho = np.minimum(1, np.exp(expected - exp.steps["logp"]))[last]
    value = said.value.numpy()[last]
    wanted = value + rho * (exp.steps["reward"][last] - value)
    np.testing.assert_allclose(out.steps["value_target"][last], wanted, rtol=1e-3, atol=1e-4)


def test_what_a_mask_forbids_now_was_never_done() -> None:
    obs_space = spaces.Dict({"action_mask": spaces.MultiBinary(3), "x": spaces.Box(-1, 1, (2,), np.float32)})
    exp = episodes([6], terminated=True)
    mask = np.int8([[1, 1, 1], [1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1], [1, 1, 1]])
    action = np.int64([0, 0, 1, 2, 2, 1])  # at t = 3 it is forbidden
    obs = {"obs/action_mask": mask, "obs/x": exp.steps["obs"]}
    final = {"obs/action_mask": np.ones((1, 3), np.int8), "obs/x": exp.final_obs["obs"]}
    steps = {**obs, "action": action, "reward": exp.steps["reward"], "logp": np.zeros(6, np.float32)}
    exp = Experience(steps, exp.offsets, exp.segments, final)
    module = make_module(None, obs_space, spaces.Discrete(3), NetworkConfig(hidden=(8,)))
    out = VTrace().offline(exp, module).steps
    np.testing.assert_allclose(out["target_logp"][[1, 2, 4]], 0, atol=1e-6)
    assert out["target_logp"][3] < -1e29
    assert out["advantage"][3] == 0
    assert np.isfinite(out["value_target"]).all()


def test_many_rows_go_through_the_module_in_chunks() -> None:
    exp = episodes([9] * 300)
    exp = exp.with_steps(logp=np.full(exp.num_steps, -2.3, np.float32))
    module = linear()
    whole = VTrace().offline(exp, module).steps
    net = module.net
    assert isinstance(net, Linear)
    assert sum(net.asked) == 2700 + 300  # the steps, and what followed the segments
    assert max(net.asked) <= 1024
    for i in (0, 113, 299):
        part = VTrace().offline(exp[i], module).steps
        for name in ("advantage", "value_target", "target_logp"):
            np.testing.assert_allclose(whole[name][9 * i : 9 * i + 9], part[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_recurrent_module_is_asked_in_the_states_that_were_recorded(kind: Any) -> None:
    torch.manual_seed(1)
    module = make_module(None, PAIRS, spaces.Discrete(10), NetworkConfig(hidden=(8,), recurrent=kind, recurrent_size=8))
    exp = episodes([4, 6], terminated=[True, False])
    rng = np.random.default_rng(0)
    names = list(module.initial_state())
    exp = exp.with_steps(
        logp=rng.normal(-2.3, 0.3, 10).astype(np.float32),
        **{f"state_in/{name}": rng.normal(size=(10, 8)).astype(np.float32) for name in names},
    )
    value, logp = np.zeros(10), np.zeros(10)
    with torch.no_grad():
        for t in range(10):
            state = {name: torch.from_numpy(exp.steps[f"state_in/{name}"][t])[None] for name in names}
            said = module(torch.from_numpy(exp.steps["obs"][t])[None, None], state)
            value[t], logp[t] = said.value, Categorical(logits=said.dist_inputs[0, 0]).logits[exp.steps["action"][t]]
        after = module(torch.from_numpy(exp.final_obs["obs"][1])[None, None], said.state).value.item()
    out = VTrace(0.9, rho_bar=1e6, c_bar=1e6).offline(exp, module).steps
    np.testing.assert_allclose(out["target_logp"], logp, rtol=1e-4, atol=1e-5)
    ratio = np.exp(logp - exp.steps["logp"])
    last = value[9] + ratio[9] * (exp.steps["reward"][9] + 0.9 * after - value[9])
    assert out["value_target"][9] == pytest.approx(last, rel=1e-4)
    before = value[8] + ratio[8] * (exp.steps["reward"][8] + 0.9 * last - value[8])
    assert out["value_target"][8] == pytest.approx(before, rel=1e-4)
    with pytest.raises(DataError, match="is recurrent, but its state is unknown: there is no column 'state_in/h'"):
        VTrace().offline(episodes([2]).with_steps(logp=np.zeros(2, np.float32)), module)


def test_the_target_network_says_the_probabilities_and_the_module_the_values() -> None:
    module = FollowedModule(Linear(10), PAIRS, spaces.Discrete(10), linear().dist)
    old = linear()  # what the target network still is
    net = module.net
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.3
    exp = episodes([5, 4], terminated=[True, False]).with_steps(logp=np.full(9, -2.0, np.float32))
    rows = np.arange(9), exp.steps["action"]
    for by_target, speaker in ((False, module), (True, old)):
        out = VTrace(by_target=by_target).offline(exp, module).steps
        expected = said_by(speaker, exp.steps["obs"])[0][rows]
        np.testing.assert_allclose(out["target_logp"], expected, rtol=1e-4, atol=1e-5)
        value = said_by(module, exp.steps["obs"])[1][4]  # the last step of the segment that terminated
        wanted = value + min(1, np.exp(expected[4] + 2.0)) * (4 - value)
        assert out["value_target"][4] == pytest.approx(wanted, rel=1e-4)
    with pytest.raises(ModuleError, match="needs the target network of the module, but a Module has none"):
        VTrace(by_target=True).offline(exp, old)


class Dropping(Linear):
    def forward(self, obs: torch.Tensor) -> Output:
        return super().forward(nn.functional.dropout(obs, 0.5, self.training))


def test_nothing_is_dropped_out_and_the_mode_stays() -> None:
    module = make_module(Dropping(10), PAIRS, spaces.Discrete(10))
    exp = episodes([50]).with_steps(logp=np.full(50, -2.3, np.float32), action=np.zeros(50, np.int64))
    expected = VTrace().offline(exp, linear()).steps
    for mode in (True, False):
        module.train(mode)
        out = VTrace().offline(exp, module).steps
        np.testing.assert_array_equal(out["value_target"], expected["value_target"])
        assert module.training is module.net.training is mode
        assert all(parameter.grad is None for parameter in module.parameters())


def test_a_target_network_drops_out_nothing_while_its_module_learns() -> None:
    module = FollowedModule(Dropping(10), PAIRS, spaces.Discrete(10), linear().dist)
    assert module.train() is module
    assert (module.net.training, module.target.training, module.target.net.training) == (True, False, False)
    exp = episodes([50]).with_steps(logp=np.full(50, -2.3, np.float32), action=np.zeros(50, np.int64))
    out = VTrace(by_target=True).offline(exp, module).steps
    expected = VTrace().offline(exp, linear()).steps
    np.testing.assert_array_equal(out["target_logp"], expected["target_logp"])
    assert (module.net.training, module.target.net.training) == (True, False)


def test_nothing_comes_of_nothing() -> None:
    out = VTrace().offline(episodes([]).with_steps(logp=np.zeros(0, np.float32)), linear())
    assert (out.num_steps, out.steps["advantage"].shape) == (0, (0,))


class Silent(Linear):
    def forward(self, obs: torch.Tensor) -> Output:
        return Output(dist_inputs=super().forward(obs).dist_inputs)


def test_what_is_missing_is_named() -> None:
    exp = episodes([2])
    with pytest.raises(DataError, match=r"VTrace needs the module, for values and probabilities: call offline"):
        VTrace().offline(exp)
    with pytest.raises(DataError, match="VTrace needs the column `logp`, but the experience has only obs, action"):
        VTrace().offline(exp, linear())
    with pytest.raises(ModuleError, match="Silent gives no values, which are needed here"):
        VTrace().offline(
            exp.with_steps(logp=np.zeros(2, np.float32)), make_module(Silent(3), PAIRS, spaces.Discrete(3))
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gamma": 1.5}, r"VTrace\.gamma must be between 0 and 1, not 1\.5"),
        ({"rho_bar": 0.0}, r"VTrace\.rho_bar must be above 0, not 0\.0"),
        ({"c_bar": 2.0}, r"VTrace\.c_bar must be at most rho_bar, which is 1\.0, not 2\.0"),
        ({"lambda_": -1.0}, r"VTrace\.lambda_ must be between 0 and 1, not -1"),
    ],
)
def test_settings_are_checked(given: dict[str, float], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        VTrace(**given)  # type: ignore[arg-type]
