# SPDX-License-Identifier: Apache-2.0
"""Module and make_module: every combination of spaces, a user's own nets, and each message."""

import copy
import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from etude.errors import ModuleError
from etude.modules import Module, Network, NetworkConfig, NumPyActor, Output, TorchActor, make_module
from etude.modules.acting import CHUNK
from etude.modules.distributions import distribution_for
from etude.spaces import Flattener

SMALL = NetworkConfig(hidden=(8,), conv_width=8)
VECTOR, TWO = spaces.Box(-1, 1, (4,)), spaces.Discrete(2)


def columns_of(space, root, rows, seed=0):
    """Batched columns of random values of a space."""
    space.seed(seed)
    flatten = Flattener(space, root)
    values = [flatten(space.sample()) for _ in range(rows)]
    return {
        name: np.stack([np.asarray(value[name], leaf.dtype) for value in values])
        for name, leaf in flatten.leaves.items()
    }


def tensors(columns):
    return {name: torch.from_numpy(column) for name, column in columns.items()}


SIMPLE_OBS = [
    spaces.Box(-1, 1, (3,)),
    spaces.Box(-1, 1, ()),
    spaces.Box(-1, 1, (2, 2), np.float64),
    spaces.Box(0, 255, (8, 8, 3), np.uint8),
    spaces.Box(0, 1, (1, 9, 8)),
    spaces.Box(0, 255, (4,), np.uint8),
    spaces.Box(-9, 9, (2,), np.int64),
    spaces.Discrete(4, start=-2),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary((2, 2)),
]
SIMPLE_ACTION = [
    spaces.Box(-1, 1, (3,)),
    spaces.Box(-1, 1, (), np.float64),
    spaces.Box(-1, 1, (2, 2)),
    spaces.Discrete(4, start=-2),
    spaces.MultiDiscrete([2, 3], start=np.array([5, 0])),
    spaces.MultiBinary(3),
]


def nested(simple):
    def groups(inner):
        tuples = st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple)
        dicts = st.dictionaries(st.sampled_from(["a", "b", "c.d"]), inner, min_size=1, max_size=3).map(spaces.Dict)
        return tuples | dicts

    return st.recursive(st.sampled_from(simple), groups, max_leaves=4)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(nested(SIMPLE_OBS), nested(SIMPLE_ACTION), st.booleans(), st.booleans(), st.booleans())
def test_every_combination_of_spaces_acts_and_learns(obs_space, action_space, squash, explore, separate):
    config = NetworkConfig(hidden=(8,), conv_width=8, separate=separate)
    module = make_module(None, obs_space, action_space, config, squash=squash)
    obs = columns_of(obs_space, "obs", 5)
    actor = module.actor(explore=explore)
    actor.start(np.random.default_rng(0), 5)
    action, extras = actor.step(obs)
    said = actor.logp(extras["dist_inputs"], action)
    output = module(module.obs_from(tensors(obs)))
    np.testing.assert_allclose(extras["dist_inputs"], output.dist_inputs.detach(), atol=1e-5)
    np.testing.assert_allclose(module.value_of(obs), output.value.detach(), atol=1e-5)
    logp = output.logp(module.action_from(tensors(action)))
    if explore:
        np.testing.assert_allclose(said, logp.detach(), atol=1e-3, rtol=1e-3)
    else:
        assert (said == 0).all()
    (logp.sum() + output.entropy().sum() + output.kl(output.dist_inputs.detach()).sum() + output.value.sum()).backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in module.parameters())
    assert set(action) == set(Flattener(action_space, "action").leaves)


class Own(nn.Module):
    """A user's net: one argument, an Output."""

    def __init__(self, obs_space, action_space):
        super().__init__()
        self.body = nn.Linear(4, 2)
        self.critic = nn.Linear(4, 1)

    def forward(self, obs):
        return Output(dist_inputs=self.body(obs), value=self.critic(obs))


def test_make_module_takes_a_class_a_function_a_net_a_module_or_none():
    assert isinstance(make_module(None, VECTOR, TWO).net, Network)
    assert isinstance(make_module(Own, VECTOR, TWO).net, Own)
    assert isinstance(make_module(lambda o, a: Own(o, a), VECTOR, TWO).net, Own)
    net = Own(VECTOR, TWO)
    assert make_module(net, VECTOR, TWO).net is net
    module = make_module(net, VECTOR, TWO)
    assert make_module(module, VECTOR, TWO) is module
    assert make_module(lambda o, a: module, VECTOR, TWO) is module


def test_value_of_shape_b_1_is_squeezed():
    module = make_module(Own, VECTOR, TWO)
    assert module(torch.zeros(3, 4)).value.shape == (3,)
    assert module(torch.zeros(1, 4)).value.shape == (1,)
    assert module.value_of({"obs": np.zeros((3, 4), np.float32)}).shape == (3,)

    class Critic(nn.Module):
        def forward(self, obs):
            return Output(value=obs[:, :1])

    assert make_module(Critic(), VECTOR, TWO)(torch.zeros(3, 4)).value.shape == (3,)


def test_state_is_passed_where_the_net_takes_it():
    class Recurrent(Own):
        def forward(self, obs, state=None):
            count = obs.new_zeros(len(obs)) if state is None else state["count"]
            return Output(dist_inputs=self.body(obs), state={"count": count + 1})

    module = make_module(Recurrent, VECTOR, TWO)
    output = module(torch.zeros(3, 4))
    assert module(torch.zeros(3, 4), output.state).state["count"].tolist() == [2, 2, 2]


def test_values_of_sequences_keep_their_time_axis():
    class Sequence(Own):
        def forward(self, obs):
            return Output(dist_inputs=self.body(obs), value=self.critic(obs).squeeze(-1))

    module = make_module(Sequence, VECTOR, TWO)
    assert module(torch.zeros(3, 1, 4)).value.shape == (3, 1)
    assert make_module(Own, VECTOR, TWO)(torch.zeros(3, 1, 4)).value.shape == (3, 1)


def test_the_loss_compiles_without_graph_breaks():
    module = make_module(None, VECTOR, spaces.Tuple([TWO, spaces.Box(-1, 1, (2,))]), SMALL)
    obs, action = torch.ones(3, 4), (torch.tensor([0, 1, 1]), torch.zeros(3, 2))

    def loss(obs, action):
        output = module(obs)
        return (output.logp(action) + output.entropy() + output.value).sum()

    wanted = loss(obs, action)
    torch.testing.assert_close(torch.compile(loss, backend="eager", fullgraph=True)(obs, action), wanted)


def test_a_users_net_gets_float32_for_float64():
    module = make_module(Own, spaces.Box(-1, 1, (4,), np.float64), TWO)
    assert module.value_of({"obs": np.zeros((3, 4))}).dtype == np.float32


def test_a_users_net_gets_nested_observations():
    class Nested(nn.Module):
        def forward(self, obs):
            return Output(dist_inputs=obs["pair"][0] + obs["pair"][1], value=obs["one"])

    space = spaces.Dict(
        {"one": spaces.Box(-1, 1, ()), "pair": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (2,))])}
    )
    module = make_module(Nested(), space, TWO)
    obs = columns_of(space, "obs", 3)
    actor = module.actor(explore=False)
    actor.start(np.random.default_rng(0), 3)
    _, extras = actor.step(obs)
    np.testing.assert_allclose(extras["dist_inputs"], obs["obs/pair/0"] + obs["obs/pair/1"])
    np.testing.assert_array_equal(extras["value"], obs["obs/one"])


@pytest.mark.parametrize("net", [None, Own])
def test_value_of_many_rows(net):
    module = make_module(net, VECTOR, TWO)
    obs = np.random.default_rng(0).standard_normal((2 * CHUNK + 5, 4)).astype(np.float32)
    wanted = module(torch.from_numpy(obs)).value.detach()
    np.testing.assert_allclose(module.value_of({"obs": obs}), wanted, atol=1e-5)
    assert module.value_of({"obs": obs[:0]}).shape == (0,)


def test_read_only_arrays_raise_no_warning():
    module = make_module(Own, VECTOR, TWO)
    obs = np.zeros((3, 4), np.float32)
    obs.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.value_of({"obs": obs})
        actor = module.actor(explore=True)
        actor.start(np.random.default_rng(0), 3)
        actor.step({"obs": obs[::-1]})


def test_a_copy_has_its_own_values():
    module = make_module(None, VECTOR, TWO)
    obs = {"obs": np.ones((2, 4), np.float32)}
    before = module.value_of(obs)
    target = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 1
    assert (module.value_of(obs) != before).all()
    np.testing.assert_array_equal(target.value_of(obs), before)


def test_state_dict_round_trip():
    first, second = (make_module(None, spaces.Discrete(3), spaces.Box(-1, 1, (2,)), SMALL) for _ in range(2))
    second.load_state_dict(first.state_dict())
    x = torch.arange(3)
    torch.testing.assert_close(first(x).dist_inputs, second(x).dist_inputs)
    assert set(first.state_dict()) == {name for name, _ in first.named_parameters()}


def test_which_actor():
    assert isinstance(make_module(None, VECTOR, TWO).actor(explore=True), NumPyActor)
    assert isinstance(make_module(Own, VECTOR, TWO).actor(explore=True), TorchActor)
    image = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    assert isinstance(make_module(None, image, TWO, SMALL).actor(explore=True), TorchActor)

    class Changed(Network):
        def forward(self, obs, state=None):
            return Output(super().forward(obs).dist_inputs * 0)

    assert isinstance(make_module(Changed, VECTOR, TWO).actor(explore=True), TorchActor)


class Returns(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, obs):
        return self.output


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.zeros(3, 2), r"forward of Returns returned a Tensor: it must return an Output, such as"),
        (
            Output(torch.zeros(3, 5)),
            r"`dist_inputs` of shape \(3, 5\); the action space Discrete\(2\) with its Categorical needs \[batch, 2\]",
        ),
        (Output(torch.zeros(2)), r"`dist_inputs` of shape \(2,\)"),
        (
            Output(torch.zeros(3, 2), torch.zeros(3, 2)),
            r"`value` of shape \(3, 2\) for a batch of \(3,\): it must have shape \(3,\) or \(3, 1\)",
        ),
    ],
)
def test_the_first_call_is_checked(output, message):
    with pytest.raises(ModuleError, match=message):
        make_module(Returns(output), VECTOR, TWO)(torch.zeros(3, 4))


def test_errors():
    with pytest.raises(
        ModuleError, match=r"`module`: 3\(obs_space, action_space\) fails: .* Give a torch.nn.Module, or a class"
    ):
        make_module(3, VECTOR, TWO)
    with pytest.raises(ModuleError, match=r"`module`: Returns\(obs_space, action_space\) fails: TypeError"):
        make_module(Returns, VECTOR, TWO)
    with pytest.raises(ModuleError, match=r"gave a int, not a torch.nn.Module"):
        make_module(lambda o, a: 3, VECTOR, TWO)
    with pytest.raises(ModuleError, match=r"Returns gives no values, which are needed here: return Output\(value="):
        make_module(Returns(Output(torch.zeros(3, 2))), VECTOR, TWO).value_of({"obs": np.zeros((3, 4), np.float32)})
    with pytest.raises(ModuleError, match="gave no `dist_inputs`, so its actions have no probabilities"):
        Output(value=torch.zeros(3)).logp(torch.zeros(3))
    with pytest.raises(ModuleError, match=r"this Output has no distribution.*`make_module`"):
        Output(torch.zeros(3, 2)).entropy()
    critic = make_module(Returns(Output(value=torch.zeros(3))), VECTOR, TWO).actor(explore=True)
    critic.start(np.random.default_rng(0), 3)
    with pytest.raises(ModuleError, match="gave no `dist_inputs`"):
        critic.step({"obs": np.zeros((3, 4), np.float32)})
    assert isinstance(make_module(None, VECTOR, TWO), Module)


@pytest.mark.parametrize(
    ("obs", "facts"),
    [
        (np.zeros(4, np.float32), ["ndarray", "(4,)", "module(torch.as_tensor(obs)[None])"]),
        (np.zeros((3, 4), np.float32), ["ndarray", "(3, 4)", "module(torch.as_tensor(obs)"]),
        ([0.0] * 4, ["list", "module(torch.as_tensor(obs)[None])"]),
        (torch.zeros(4), ["(4,)", "[B, 4]", "module(torch.as_tensor(obs)[None])"]),
        (torch.zeros(3, 5), ["(3, 5)", "[B, 4]"]),
        ({"obs": torch.zeros(3, 4)}, ["dict", "[B, 4]"]),
        (None, ["NoneType", "[B, 4]"]),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_observations_of_another_form_are_named(obs, facts, dtype):
    module = make_module(None, spaces.Box(-1, 1, (4,), dtype), spaces.Discrete(2))
    for _ in range(2):
        with pytest.raises(ModuleError) as caught:
            module(obs)
        assert all(fact in str(caught.value) for fact in facts), str(caught.value)
        assert "last layer" not in str(caught.value)
    assert module(torch.zeros(3, 4)).value.shape == (3,)
    with pytest.raises(ModuleError, match="torch"):
        module(np.zeros((3, 4), dtype))


def test_nested_observations_of_another_form_are_named():
    space = spaces.Dict({"camera": spaces.Box(0, 255, (8, 8, 3), np.uint8), "speed": spaces.Box(-1, 1, (2,))})
    module = make_module(None, space, spaces.Discrete(2))
    good = {"camera": torch.zeros(2, 8, 8, 3, dtype=torch.uint8), "speed": torch.zeros(2, 2)}
    for obs, fact in (
        (good | {"speed": np.zeros((2, 2))}, "`obs/speed`"),
        (good | {"camera": torch.zeros(2, 3, 8, 8, dtype=torch.uint8)}, "`obs/camera`"),
        ({"camera": good["camera"]}, "speed"),
        (torch.zeros(2, 2), "Tensor"),
    ):
        with pytest.raises(ModuleError) as caught:
            module(obs)
        assert fact in str(caught.value)
    assert module(good).value.shape == (2,)


def test_an_error_inside_a_net_stays_what_it_is():
    class Broken(nn.Module):
        def forward(self, obs):
            raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="of its own"):
        make_module(Broken(), spaces.Box(-1, 1, (4,)), spaces.Discrete(2))(torch.zeros(3, 4))


def test_training_mode_is_of_all_parts_and_a_net_may_have_a_say() -> None:
    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> "Frozen":
            return super().train(False)

    for inner in (nn.Sequential, Frozen):
        net = nn.Sequential(nn.Linear(2, 3), inner(nn.Dropout(), nn.BatchNorm1d(3)))
        module = Module(net, spaces.Box(-1, 1, (2,)), spaces.Discrete(3), distribution_for(spaces.Discrete(3)))
        for mode in (False, True, True, False):
            module.train(mode)
            parts = [module, net, net[0], net[1], net[1][0], net[1][1]]
            assert [part.training for part in parts] == [mode] * 3 + [mode and inner is not Frozen] * 3


@pytest.mark.parametrize("space", [spaces.Discrete(10**13), spaces.MultiDiscrete([10**13, 2])])
def test_spaces_whose_network_does_not_fit_into_memory_are_told(space):
    with pytest.raises(ModuleError, match=r"the built-in network for .*Discrete.* can't be made .* by a wrapper"):
        make_module(None, space, spaces.Discrete(2))
