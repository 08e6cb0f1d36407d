# SPDX-License-Identifier: Apache-2.0
"""Recurrent modules: the formulas written out, acting a step at a time, torch over time, and a user's own nets."""

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from etude.errors import DataError, ModuleError, SettingsError
from etude.modules import Module, Network, NetworkConfig, Output, TorchActor, make_module
from etude.modules.network import RecurrentLayer

VECTOR, THREE = spaces.Box(-1, 1, (4,)), spaces.Discrete(3)
KINDS = ["lstm", "gru"]


def module_of(kind, action_space=THREE, obs_space=VECTOR, value=True, **config):
    """A recurrent module with no parameter left at its initial zero."""
    config = {"hidden": (8,), "recurrent_size": 5, **config}
    torch.manual_seed(0)
    module = make_module(None, obs_space, action_space, NetworkConfig(recurrent=kind, **config), value=value)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.4 * torch.randn(parameter.shape)
    return module


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def naive_memory(kind, memory, x, state):
    """One step for one row, in float64, number by number.

    LSTM: Hochreiter & Schmidhuber 1997 with the forget gate of Gers et al. 2000; GRU: Cho et al. 2014; as torch writes
    them in the documentation of nn.LSTM and nn.GRU.
    """
    w = {name: p.detach().numpy().astype(float) for name, p in memory.cell.named_parameters()}
    w_x, w_h, b_x, b_h = w["weight_ih_l0"], w["weight_hh_l0"], w["bias_ih_l0"], w["bias_hh_l0"]
    n, h = memory.width, state["h"]
    after = {name: np.zeros(n) for name in state}

    def from_x(gate, k):
        return sum(w_x[gate * n + k, i] * x[i] for i in range(len(x))) + b_x[gate * n + k]

    def from_h(gate, k):
        return sum(w_h[gate * n + k, i] * h[i] for i in range(n)) + b_h[gate * n + k]

    for k in range(n):
        a = [from_x(gate, k) + from_h(gate, k) for gate in range(len(w_x) // n)]
        if kind == "lstm":
            after["c"][k] = sigmoid(a[1]) * state["c"][k] + sigmoid(a[0]) * np.tanh(a[2])
            after["h"][k] = sigmoid(a[3]) * np.tanh(after["c"][k])
        else:
            reset, update = sigmoid(a[0]), sigmoid(a[1])
            candidate = np.tanh(from_x(2, k) + reset * from_h(2, k))
            after["h"][k] = (1 - update) * candidate + update * h[k]
    return after


def naive(kind, net, obs):
    """Logits and values of one sequence ``[T, 4]``, and the states after each step.

    Each of the two has a memory of its own between the observation and its layers.
    """
    out, states = {}, [{} for _ in obs]
    heads = {"": (net.policy, net.policy_head), "value_": (net.critic, net.value_head)}
    for prefix, (trunk, head) in heads.items():
        state = {name: np.zeros(trunk.memory.width) for name in trunk.memory.names}
        rows = []
        for t, x in enumerate(obs.astype(float)):
            state = naive_memory(kind, trunk.memory, x, state)
            x = state["h"]
            for layer in trunk.linears:
                x = np.tanh(layer.weight.detach().numpy().astype(float) @ x + layer.bias.detach().numpy())
            rows.append(head.weight.detach().numpy() @ x + head.bias.detach().numpy())
            states[t] |= {prefix + name: part for name, part in state.items()}
        out[prefix] = np.array(rows)
    return out[""], out["value_"][:, 0], states


def initial(module, rows):
    return {f"state_in/{n}": np.zeros((rows, *v.shape), np.float32) for n, v in module.initial_state().items()}


def acted(actor, module, obs, seed=0):
    """Every step of sequences ``[N, T, ...]`` in turn: columns ``[N, T, ...]``, with the state that each step is in."""
    rows, steps = next(iter(obs.values())).shape[:2]
    actor.start(np.random.default_rng(seed), rows)
    state, turns = initial(module, rows), []
    for t in range(steps):
        now = {name: column[:, t] for name, column in obs.items()}
        action, extras = actor.step(now, state)
        turns.append({**action, **extras, **state})
        state = {f"state_in/{name}": extras[f"state_out/{name}"] for name in module.initial_state()}
    return {name: np.stack([turn[name] for turn in turns], 1) for name in turns[0]}


@pytest.mark.parametrize("kind", KINDS)
def test_acting_learning_and_the_formulas_agree(kind):
    module = module_of(kind)
    obs = np.random.default_rng(0).normal(size=(3, 6, 4)).astype(np.float32)
    out = module(torch.from_numpy(obs))
    assert out.dist_inputs.shape == (3, 6, 3)
    assert out.value.shape == (3, 6)
    columns = acted(module.actor(explore=True), module, {"obs": obs})
    for row in range(3):
        logits, values, states = naive(kind, module.net, obs[row])
        np.testing.assert_allclose(out.dist_inputs[row].detach(), logits, atol=1e-5)
        np.testing.assert_allclose(out.value[row].detach(), values, atol=1e-5)
        for name, last in out.state.items():
            np.testing.assert_allclose(last[row].detach(), states[-1][name], atol=1e-5)
        np.testing.assert_allclose(columns["dist_inputs"][row], logits, atol=1e-5)
        np.testing.assert_allclose(columns["value"][row], values, atol=1e-5)
        for t in range(6):
            for name in module.initial_state():
                np.testing.assert_allclose(columns[f"state_out/{name}"][row, t], states[t][name], atol=1e-5)


@pytest.mark.parametrize(
    ("config", "action_space", "obs_space"),
    [
        ({"hidden": ()}, THREE, VECTOR),
        ({"hidden": (32, 64), "activation": "relu", "recurrent_size": 64}, spaces.Box(-1, 1, (2,)), VECTOR),
        ({"state_dependent_std": True}, spaces.Tuple([spaces.Box(-1, 1, (2,)), THREE]), VECTOR),
        ({"separate": False}, spaces.MultiDiscrete([2, 3]), spaces.Tuple([VECTOR, spaces.Discrete(4, start=2)])),
        ({}, spaces.MultiBinary(3), spaces.Dict({"x": VECTOR, "action_mask": spaces.Box(0, 1, (3,), np.int8)})),
        ({"conv_width": 8}, THREE, spaces.Box(0, 255, (7, 7, 3), np.uint8)),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_acting_is_learning_for_every_shape_of_network(kind, config, action_space, obs_space):
    module = module_of(kind, action_space, obs_space, **config)
    obs_space.seed(1)
    rows = {1: 1, 70: 1, 5: 4}
    for n, steps in rows.items():
        samples = [[module.columns_of(obs_space.sample()) for _ in range(steps)] for _ in range(n)]
        obs = {
            name: np.array([[step[name] for step in row] for row in samples], leaf.dtype)
            for name, leaf in module.columns_of.leaves.items()
        }
        columns = acted(module.actor(explore=True), module, obs)
        out = module(module.obs_from({name: torch.from_numpy(column) for name, column in obs.items()}))
        np.testing.assert_allclose(columns["dist_inputs"], out.dist_inputs.detach(), atol=2e-5)
        np.testing.assert_allclose(columns["value"], out.value.detach(), atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_can_be_cut_anywhere(kind):
    module = module_of(kind)
    obs = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 7, 4)).astype(np.float32))
    whole = module(obs)
    for at in (1, 3, 6):
        first = module(obs[:, :at])
        rest = module(obs[:, at:], first.state)
        torch.testing.assert_close(torch.cat([first.dist_inputs, rest.dist_inputs], 1), whole.dist_inputs)
        for name, last in whole.state.items():
            torch.testing.assert_close(rest.state[name], last)


@pytest.mark.parametrize("far", [1e3, 1e30])
@pytest.mark.parametrize("kind", KINDS)
def test_gates_that_are_wide_open_or_shut(kind, far):
    module = module_of(kind, hidden=(), activation="linear")
    obs = {"obs": np.float32([[[far] * 4, [-far] * 4]])}
    columns = acted(module.actor(explore=False), module, obs)
    out = module(torch.from_numpy(obs["obs"]))
    np.testing.assert_allclose(columns["dist_inputs"], out.dist_inputs.detach(), atol=1e-5)


def test_what_is_recorded():
    for value in (True, False):
        module = module_of("lstm", value=value)
        actor = module.actor(explore=True)
        obs = {"obs": np.ones((4, 1, 4), np.float32)}
        columns = acted(actor, module, obs)
        assert ("value" in columns) == value
        extras = {name: columns[name][:, 0] for name in ("dist_inputs", "value") if name in columns}
        assert actor.logp(extras["dist_inputs"], {"action": columns["action"][:, 0]}).shape == (4,)
        for name, column in columns.items():
            assert len(column) == 4
            assert column.dtype == (np.int64 if name == "action" else np.float32)
        assert columns["state_out/h"].shape == columns["state_out/c"].shape == (4, 1, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_was_given_or_returned_is_written_to(kind):
    module = module_of(kind)
    actor = module.actor(explore=True)
    actor.start(np.random.default_rng(0), 6)
    rng = np.random.default_rng(1)
    state = {name: rng.normal(size=(6, 5)).astype(np.float32) for name in initial(module, 6)}
    kept_state = {name: column.copy() for name, column in state.items()}
    obs = [{"obs": rng.normal(size=(6, 4)).astype(np.float32)} for _ in range(2)]
    action, extras = actor.step(obs[0], state)
    kept = {name: column.copy() for name, column in {**action, **extras}.items()}
    actor.step(obs[1], {name: extras[name.replace("_in", "_out")] for name in state})
    for name, column in kept_state.items():
        np.testing.assert_array_equal(state[name], column)
    for name, column in {**action, **extras}.items():
        np.testing.assert_array_equal(column, kept[name])


@pytest.mark.parametrize("kind", KINDS)
def test_start_finds_new_weights(kind):
    module = module_of(kind)
    obs = {"obs": np.ones((2, 3, 4), np.float32)}
    actor = module.actor(explore=False)
    before = acted(actor, module, obs)["dist_inputs"]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3
    after = acted(actor, module, obs)["dist_inputs"]
    assert np.abs(after - before).max() > 0.1
    np.testing.assert_allclose(after, module(torch.from_numpy(obs["obs"])).dist_inputs.detach(), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("built_in", [True, False])
def test_values_of_recorded_steps_and_of_what_follows_them(kind, built_in):
    module = module_of(kind)
    if not built_in:
        module = make_module(Wrapped(module.net), VECTOR, THREE)
    obs = np.random.default_rng(0).normal(size=(40, 60, 4)).astype(np.float32)  # more rows than are computed at once
    columns = acted(module.actor(explore=True), module, {"obs": obs})
    flat = {name: column.reshape(-1, *column.shape[2:]) for name, column in columns.items()}
    state = {name: column for name, column in flat.items() if name.startswith("state_in")}
    np.testing.assert_allclose(module.value_of({"obs": obs.reshape(-1, 4)}, state), flat["value"], atol=1e-5)
    at = {name: column[:, :-1].reshape(-1, *column.shape[2:]) for name, column in columns.items()}
    state = {name: column for name, column in at.items() if name.startswith("state_in")}
    following = module.value_after(
        {"obs": obs[:, :-1].reshape(-1, 4)}, state, {"obs": obs[:, 1:].reshape(-1, 4)}
    ).reshape(40, -1)
    np.testing.assert_allclose(following, columns["value"][:, 1:], atol=1e-5)
    with pytest.raises(DataError, match=r"its state is unknown: there is no column 'state_in/h'. Collect the"):
        module.value_of({"obs": obs[:, 0]})


def test_parameters_are_those_of_torch():
    module = make_module(None, VECTOR, THREE, NetworkConfig(recurrent="lstm", recurrent_size=16))
    assert isinstance(module.net.policy.memory.cell, nn.LSTM)
    own = {name: tuple(p.shape) for name, p in module.named_parameters() if "memory" in name}
    shapes = {"weight_ih_l0": (64, 4), "weight_hh_l0": (64, 16), "bias_ih_l0": (64,), "bias_hh_l0": (64,)}
    expected = {
        f"net.{trunk}.memory.cell.{name}": shape for trunk in ("policy", "critic") for name, shape in shapes.items()
    }
    assert own == expected
    twin = copy.deepcopy(module)
    twin.load_state_dict(module.state_dict())
    x = torch.ones(2, 3, 4)
    torch.testing.assert_close(twin(x).value, module(x).value)
    with pytest.raises(SettingsError, match="`recurrent_size` is 0, but must be at least 1"):
        NetworkConfig(recurrent_size=0)
    with pytest.raises(SettingsError, match=r"NetworkConfig.recurrent is 'rnn', expected"):
        NetworkConfig(recurrent="rnn")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("inputs", "width"), [(1, 256), (2, 64), (64, 64), (512, 16)])
def test_few_inputs_can_move_a_wide_memory_as_far_as_many_move_a_narrow_one(kind, inputs, width):
    torch.manual_seed(0)
    layer = RecurrentLayer(inputs, kind, width)
    layer.draw_by_gate()
    with torch.no_grad():
        out, _ = layer(torch.randn(2000, 1, inputs), None)
        assert 0.1 < out.std() < 0.5
        state = torch.randn(2000, width)
        for gate in layer.cell.weight_hh_l0.split(width):
            torch.testing.assert_close((state @ gate.T).norm(dim=1), state.norm(dim=1))


def test_initial_states():
    feed_forward = make_module(None, VECTOR, THREE)
    assert not feed_forward.recurrent
    assert feed_forward.initial_state() == {}
    both = {"lstm": ["h", "c", "value_h", "value_c"], "gru": ["h", "value_h"]}
    cases = [(kind, config, names) for kind, names in both.items() for config in ({}, {"value": False})]
    cases += [("lstm", {"separate": False}, ["h", "c"])]
    for kind, config, names in cases:
        module = module_of(kind, **config)
        names = names if config == {} else [name for name in names if not name.startswith("value_")]
        assert module.recurrent
        state = module.initial_state()
        assert list(state) == names
        assert all(part.dtype == np.float32 and part.shape == (5,) and not part.any() for part in state.values())


class Wrapped(nn.Module):
    """A user's own net around the built-in one: acts through torch."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def initial_state(self):
        return self.net.initial_state()

    def forward(self, obs, state):
        out = self.net(obs, state)
        return Output(out.dist_inputs, out.value.unsqueeze(-1), out.state)


class Stacked(nn.Module):
    """A user's own: two layers of torch's GRU, and a count of the steps."""

    def __init__(self, obs_space, action_space):
        super().__init__()
        self.gru = nn.GRU(obs_space.shape[0], 6, 2, batch_first=True)
        self.head = nn.Linear(6, 4)

    def initial_state(self):
        return {"layers": torch.zeros(2, 6), "steps": torch.zeros(())}

    def forward(self, obs, state):
        assert obs.dim() == 3
        x, layers = self.gru(obs, state["layers"].transpose(0, 1).contiguous())
        out = self.head(x)
        count = state["steps"].unsqueeze(1) + torch.arange(1, obs.shape[1] + 1)
        after = {"layers": layers.transpose(0, 1), "steps": state["steps"] + obs.shape[1]}
        return Output(out[..., :3], out[..., 3] + count, after)


def test_a_users_own_recurrent_net():
    module = make_module(Stacked, VECTOR, THREE)
    assert {name: part.shape for name, part in module.initial_state().items()} == {"layers": (2, 6), "steps": ()}
    obs = np.random.default_rng(0).normal(size=(3, 6, 4)).astype(np.float32)
    actor = module.actor(explore=True)
    assert isinstance(actor, TorchActor)
    columns = acted(actor, module, {"obs": obs})
    out = module(torch.from_numpy(obs))
    np.testing.assert_allclose(columns["dist_inputs"], out.dist_inputs.detach(), atol=1e-5)
    np.testing.assert_allclose(columns["value"], out.value.detach(), atol=1e-5)
    assert columns["state_in/steps"].tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert columns["state_out/layers"].shape == (3, 6, 2, 6)


def test_a_subclass_of_the_network_acts_through_torch():
    class Changed(Network):
        def forward(self, obs, state=None):
            out = super().forward(obs, state)
            return Output(out.dist_inputs * 2, out.value, out.state)

    module = make_module(Changed(VECTOR, THREE, NetworkConfig(recurrent="gru")), VECTOR, THREE)
    assert module.recurrent
    assert isinstance(module.actor(explore=True), TorchActor)


class Claims(nn.Module):
    """Declares and returns what it is told."""

    def __init__(self, state, output=None):
        super().__init__()
        self.state, self.output = state, output

    def initial_state(self):
        return self.state

    def forward(self, obs, state):
        return self.output


class TakesNone(nn.Module):
    def initial_state(self):
        return {"h": torch.zeros(2)}

    def forward(self, obs):
        return Output()


H = {"h": torch.zeros(2)}


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (
            Claims(torch.zeros(2)),
            r'initial_state of Claims gave None: tensor\(.*, but must give zeros .*, such as {"h": torch.zer',
        ),
        (Claims({"a/b": torch.zeros(2)}), "initial_state of Claims gave 'a/b': .* by names without '/'"),
        (
            Claims({"h": torch.ones(2)}),
            r"gave 'h': tensor\(\[1., 1.\]\), but must give zeros of float32.*a learned start",
        ),
        (Claims({"h": torch.zeros(2).double()}), "must give zeros of float32"),
        (Claims({"h": 0.0}), r"gave 'h': 0.0, but must give zeros of float32"),
        (
            TakesNone(),
            r"TakesNone has an initial_state, but .* no argument named `state`: write forward\(self, obs, state\)",
        ),
    ],
)
def test_declared_states_are_checked(net, message):
    with pytest.raises(ModuleError, match=message):
        make_module(net, VECTOR, THREE)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            Output(torch.zeros(2, 3), None, {"h": torch.zeros(2, 2)}),
            r"`dist_inputs` of shape \(2, 3\).*needs \[2, 5, 3\]: keep the axes that observations have",
        ),
        (Output(torch.zeros(2, 5, 3)), r"gave a `state` of shapes None, but its.* need {'h': \(2, 2\)}: return Output"),
        (Output(torch.zeros(2, 5, 3), None, {"h": torch.zeros(1, 2, 2)}), r"of shapes {'h': \(1, 2, 2\)}, but"),
        (Output(torch.zeros(2, 5, 3), None, {"c": torch.zeros(2, 2)}), r"of shapes {'c': \(2, 2\)}, but"),
        (Output(torch.zeros(2, 5, 3), torch.zeros(2), H), r"a `state` of shapes {'h': \(2,\)}"),
        (Output(torch.zeros(2, 5, 3), torch.zeros(2), {"h": torch.zeros(2, 2)}), r"gave `value` of shape \(2,\) for a"),
    ],
)
def test_the_first_call_of_a_recurrent_net_is_checked(output, message):
    with pytest.raises(ModuleError, match=message):
        make_module(Claims(H, output), VECTOR, THREE)(torch.zeros(2, 5, 4))


def test_a_critic_alone_and_a_single_step():
    for value in (torch.zeros(3, 1), torch.zeros(3, 1, 1)):
        net = Claims(H, Output(None, value, {"h": torch.zeros(3, 2)}))
        assert make_module(net, VECTOR, THREE)(torch.zeros(3, 1, 4)).value.shape == (3, 1)


def test_calls_without_time_or_state_say_so():
    module = module_of("gru")
    with pytest.raises(
        ModuleError, match=r"Network is recurrent.* called with \[B, T, ...\], but `obs` has shape \(7, 4\)"
    ):
        module(torch.zeros(7, 4))
    with pytest.raises(ModuleError, match=r"In a loss, call batch.forward\(module\) rather than module\(batch.obs\)"):
        module(torch.zeros(7, 4))
    actor = module.actor(explore=True)
    actor.start(np.random.default_rng(0), 2)
    with pytest.raises(ModuleError, match=r"Network is recurrent: give step\(\) its state, as columns state_in/"):
        actor.step({"obs": np.zeros((2, 4), np.float32)})
    assert isinstance(module, Module)
