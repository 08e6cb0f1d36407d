# SPDX-License-Identifier: Apache-2.0
"""The built-in network: encoders, initial weights, shapes, settings."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from etude.connectors import Pipeline
from etude.errors import SettingsError
from etude.modules import Network, NetworkConfig, distribution_for, make_module
from etude.modules.network import Image, Numbers, ObsEncoder, OneHot, _warn_of_conv, _warn_of_pixels
from etude.spaces import channels_come_first, is_image

TWO = spaces.Discrete(2)


def one_row(encoder, **columns):
    return encoder({name: torch.as_tensor(np.asarray(value))[None] for name, value in columns.items()})[0].tolist()


def test_leaves_are_encoded_as_documented():
    encoder = ObsEncoder(spaces.Discrete(4, start=2), None, 8)
    assert one_row(encoder, obs=3) == [0, 1, 0, 0]
    encoder = ObsEncoder(spaces.MultiDiscrete([2, 3], start=np.array([0, 5])), None, 8)
    assert one_row(encoder, obs=[1, 7]) == [0, 1, 0, 0, 1]
    encoder = ObsEncoder(spaces.MultiBinary((2, 2)), None, 8)
    assert one_row(encoder, obs=np.array([[1, 0], [0, 1]], np.int8)) == [1, 0, 0, 1]
    encoder = ObsEncoder(spaces.Box(0, 255, (3,), np.uint8), None, 8)
    assert one_row(encoder, obs=np.array([0, 51, 255], np.uint8)) == pytest.approx([0, 0.2, 1])
    encoder = ObsEncoder(spaces.Box(0, np.array([4, 2]), (2,), np.uint8), None, 8)
    assert one_row(encoder, obs=np.array([1, 2], np.uint8)) == [0.25, 0.5]
    encoder = ObsEncoder(spaces.Box(0, 0, (1,), np.uint8), None, 8)
    assert one_row(encoder, obs=np.array([0], np.uint8)) == [0]
    encoder = ObsEncoder(spaces.Box(-1, 1, (), np.float64), None, 8)
    assert one_row(encoder, obs=np.float64(0.5)) == [0.5]


def test_leaves_are_concatenated_in_the_spaces_order():
    space = spaces.Dict({"b": TWO, "a": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.MultiBinary(1)])})
    encoder = ObsEncoder(space, None, 8)
    columns = {"obs/b": 1, "obs/a/0": np.array([3, 4], np.float32), "obs/a/1": np.array([1], np.int8)}
    parts = {"obs/b": [0, 1], "obs/a/0": [3, 4], "obs/a/1": [1]}
    encoded = encoder({name: torch.as_tensor(value)[None] for name, value in columns.items()})[0].tolist()
    assert encoded == [x for name in encoder.parts for x in parts[name]]
    assert encoder.width == 5


@pytest.mark.parametrize(
    ("space", "width"),
    [
        (spaces.Discrete(4, start=2), 4),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), 14),
        (spaces.MultiBinary((2, 2)), 4),
        (spaces.Box(0, 255, (2, 3), np.uint8), 6),
        (spaces.Box(-1, 1, (), np.float64), 1),
        (spaces.Box(-5, 5, (2,), np.int32), 2),
    ],
    ids=str,
)
def test_numpy_encoding_equals_torch(space, width):
    space.seed(0)
    values = np.stack([space.sample() for _ in range(5)])
    part = OneHot(space) if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else Numbers(space)
    out = np.full((5, width + 2), 7, np.float32)
    part.write(values, out[:, 1:-1])
    assert part.width == width
    np.testing.assert_array_equal(out[:, 1:-1], part(torch.from_numpy(values)))
    assert (out[:, [0, -1]] == 7).all()


@pytest.mark.parametrize("shape", [(84, 84, 4), (4, 84, 84), (7, 7, 3), (3, 7, 7), (36, 40, 1), (5, 5, 5)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_images(shape, dtype):
    space = spaces.Box(0, 255 if dtype == np.uint8 else 1, shape, dtype)
    assert is_image(space)
    net = Network(space, TWO, NetworkConfig(conv_width=16, hidden=(8,)))
    space.seed(0)
    x = torch.from_numpy(np.stack([space.sample() for _ in range(2)]))
    output = net(x)
    assert output.dist_inputs.shape == (2, 2)
    assert output.value.shape == (2,)
    sequence = net(torch.stack([x, x, x], 1))
    torch.testing.assert_close(sequence.dist_inputs, output.dist_inputs[:, None].expand(-1, 3, -1))


@pytest.mark.parametrize(
    ("shape", "is_first"),
    [((7, 7, 3), False), ((7, 7, 9), False), ((9, 7, 7), True), ((20, 20, 60), False), ((3, 60, 80), True),
     ((60, 80, 3), False), ((20, 20, 20), False), ((4, 84, 84), True)],
)  # fmt: skip
def test_where_the_channels_are(shape, is_first):
    assert channels_come_first(spaces.Box(0, 1, shape)) is is_first


@pytest.mark.parametrize(
    ("shape", "channels", "is_first"),
    [((2, 8, 8), 2, True), ((3, 8, 10), 3, True), ((10, 9, 3), 3, False), ((8, 8, 2), 2, False), ((5, 6), 1, False)],
)
@pytest.mark.parametrize("connectors", [("frame_stack:4",), ("frame_stack:2", "frame_stack:2", "normalize_obs")])
def test_stacks_have_their_channels_where_their_frames_have_them(shape, channels, is_first, connectors):
    space, _ = Pipeline(connectors).spaces(spaces.Box(0, 1, shape), TWO)
    size = shape[1:] if is_first else shape[:2]
    assert space.shape == ((4 * channels, *size) if is_first else (*size, 4 * channels))
    assert is_image(space)
    assert Image(space, None, 16).layers[0].in_channels == 4 * channels


def test_channels_may_come_first_or_last():
    last = Image(spaces.Box(0, 255, (12, 10, 3), np.uint8), None, 16)
    first = Image(spaces.Box(0, 255, (3, 12, 10), np.uint8), None, 16)
    first.load_state_dict(last.state_dict())
    x = torch.randint(0, 256, (2, 12, 10, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(last(x), first(x.permute(0, 3, 1, 2)))


def test_bytes_are_divided_by_their_largest_bound():
    many, few = (Image(spaces.Box(0, high, (8, 8, 2), np.uint8), None, 16) for high in (255, 5))
    few.load_state_dict(many.state_dict())
    x = torch.randint(0, 6, (2, 8, 8, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(few(x), many(x * 51))


def test_pictures_that_get_no_convolutions_are_told(caplog):
    _warn_of_pixels.cache_clear()
    for shape, told in (((84, 84), "`frame_stack:1`"), ((4, 84, 84, 3), "instead of a wrapper"), ((84, 4), None)):
        caplog.clear()
        for _ in range(2):
            ObsEncoder(spaces.Dict({"camera": spaces.Box(0, 255, shape, np.uint8)}), None, 8)
        assert len(caplog.messages) == (told is not None)
        assert told is None or ("`obs/camera`" in caplog.text and told in caplog.text)
    caplog.clear()
    _warn_of_conv.cache_clear()
    make_module(None, spaces.Box(-1, 1, (3,)), spaces.Discrete(2), NetworkConfig(conv=((4, 3, 1),)))
    assert len(caplog.messages) == 1  # though policy and value function have a network each
    assert "`network.conv` has no effect" in caplog.text


def test_tiny_pictures_are_plain_numbers():
    assert not is_image(spaces.Box(0, 1, (2, 3, 4)))
    assert not is_image(spaces.Box(0, 1, (84, 84)))
    assert ObsEncoder(spaces.Box(0, 1, (2, 3, 4)), None, 8).width == 24


def test_nature_network_has_its_published_size():
    encoder = Image(spaces.Box(0, 255, (84, 84, 4), np.uint8), None, 512)
    assert [tuple(p.shape) for p in encoder.parameters() if p.dim() > 1] == [
        (32, 4, 8, 8),
        (64, 32, 4, 4),
        (64, 64, 3, 3),
        (512, 3136),
    ]


def test_weights_are_orthogonal():
    torch.manual_seed(0)
    net = Network(spaces.Box(-1, 1, (4,)), spaces.Discrete(3), NetworkConfig(hidden=(32, 32)))
    for trunk in (net.policy, net.critic):
        for layer in trunk.linears:
            gram = layer.weight.T @ layer.weight
            torch.testing.assert_close(gram, 2 * torch.eye(layer.in_features), atol=1e-4, rtol=0)
            assert (layer.bias == 0).all()
    gram = net.policy_head.weight @ net.policy_head.weight.T
    torch.testing.assert_close(gram, 1e-4 * torch.eye(3), atol=1e-7, rtol=0)
    assert net.value_head.weight.norm().item() == pytest.approx(1)


def test_weights_may_begin_as_torch_draws_them():
    torch.manual_seed(0)
    space = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    config = NetworkConfig(weight_init="torch", recurrent="lstm", state_dependent_std=True, log_std_init=-2.0)
    net = Network(space, spaces.Box(-1, 1, (2,)), config)
    image = next(iter(net.policy.encoder.parts.values()))
    for layer in (*net.policy.linears, *net.critic.linears, net.value_head, image.layers[0], image.layers[-2]):
        limit = layer.weight[0].numel() ** -0.5  # LeCun et al. 1998, as torch.nn.Linear says
        for drawn in (layer.weight, layer.bias):
            assert 0.5 * limit < drawn.abs().max() <= limit or drawn.numel() == 1
    assert net.policy.memory.cell.weight_hh_l0.abs().max() <= 64**-0.5
    assert net.policy_head.weight.abs().mean() > 0.03  # the orthogonal one is hundreds of times smaller
    assert net.policy_head.bias[2:].tolist() == [-2.0, -2.0]


@pytest.mark.parametrize("separate", [True, False])
def test_separate_or_shared(separate):
    net = Network(spaces.Box(-1, 1, (4,)), TWO, NetworkConfig(separate=separate))
    output = net(torch.ones(3, 4))
    output.value.sum().backward()
    touched = {name for name, p in net.named_parameters() if p.grad is not None}
    assert any(name.startswith("policy.") for name in touched) != separate
    layers = 2 * (4 * 64 + 64 + 64 * 64 + 64) if separate else 4 * 64 + 64 + 64 * 64 + 64
    assert sum(p.numel() for p in net.parameters()) == layers + 64 * 2 + 2 + 64 + 1


@pytest.mark.parametrize("dependent", [True, False])
def test_standard_deviations(dependent):
    space = spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(3), spaces.Box(-1, 1, ())])
    dist = distribution_for(space)
    config = NetworkConfig(log_std_init=-0.5, state_dependent_std=dependent)
    net = Network(spaces.Box(-1, 1, (4,)), space, config, dist)
    generator = torch.Generator().manual_seed(0)
    inputs = net(torch.randn(5, 4, generator=generator)).dist_inputs
    assert inputs.shape == (5, dist.num_inputs)
    log_std = inputs[:, dist.log_std]
    if dependent:
        assert net.log_std is None
        assert 0 < (log_std + 0.5).abs().max() < 0.1
    else:
        assert (log_std == -0.5).all()
        net.log_std.data = torch.tensor([1.0, 2.0, 3.0])
        changed = net(torch.randn(5, 4, generator=generator)).dist_inputs
        assert changed[:, dist.log_std].tolist() == [[1.0, 2.0, 3.0]] * 5
    others = np.setdiff1d(np.arange(dist.num_inputs), dist.log_std)
    assert (inputs[:, others].abs() < 0.1).all()


def test_no_hidden_layers_and_no_value():
    net = Network(spaces.Box(-1, 1, (4,)), TWO, NetworkConfig(hidden=()), value=False)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    output = net(x)
    torch.testing.assert_close(output.dist_inputs, x @ net.policy_head.weight.T)
    assert output.value is None
    assert len(list(net.parameters())) == 2


def test_default_settings_come_from_ppo():
    config = NetworkConfig()
    assert (config.hidden, config.activation, config.separate) == ((64, 64), "tanh", True)
    assert math.isclose(config.log_std_init, 0)


def test_errors():
    with pytest.raises(SettingsError, match=r"`hidden` is \(64, 0\), but must be widths of at least 1"):
        NetworkConfig(hidden=(64, 0))
    with pytest.raises(SettingsError, match=r"NetworkConfig.activation is 'sine', expected 'tanh' \| 'relu'"):
        NetworkConfig(activation="sine")
    with pytest.raises(SettingsError, match="`conv_width` is 0"):
        NetworkConfig(conv_width=0)
    with pytest.raises(SettingsError, match=r"`conv`: a kernel of 8 does not fit on the 7 x 7 pixels.*smaller kernels"):
        Network(spaces.Box(0, 1, (7, 7, 3)), TWO, NetworkConfig(conv=((16, 8, 1),)))
