# SPDX-License-Identifier: Apache-2.0
"""Action distributions against torch.distributions, closed forms and counts of samples."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import distributions as td

from etude.errors import SpaceError
from etude.modules.distributions import (
    Bernoulli,
    Categorical,
    Composite,
    DiagGaussian,
    MultiCategorical,
    SquashedGaussian,
    distribution_for,
)

LOW, HIGH = np.array([-2.0, 0.0, 1.0], np.float32), np.array([2.0, 0.5, 9.0], np.float32)
BOX = spaces.Box(LOW, HIGH)
NESTED = spaces.Dict(
    {
        "legs": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(3, start=-1)]),
        "arm": spaces.Box(-1, 1, (2, 2), np.float64),
        "lamps": spaces.MultiBinary(2),
    }
)


def categorical(logits):
    return td.Categorical(logits=logits)


def multi(sizes):
    def make(logits):
        return [td.Categorical(logits=part) for part in logits.split(sizes, -1)]

    return make


def bernoulli(logits):
    return td.Independent(td.Bernoulli(logits=logits), 1)


def gaussian(inputs):
    mean, log_std = inputs.chunk(2, -1)
    return td.Independent(td.Normal(mean, log_std.exp()), 1)


def squashed(inputs):
    mean, log_std = inputs.chunk(2, -1)
    half, middle = torch.tensor((HIGH - LOW) / 2), torch.tensor((HIGH + LOW) / 2)
    return td.TransformedDistribution(
        td.Independent(td.Normal(mean, log_std.exp()), 1), [td.TanhTransform(), td.AffineTransform(middle, half, 1)]
    )


SIMPLE = [
    (spaces.Discrete(5, start=3), categorical, lambda a: a - 3),
    (spaces.Discrete(2), categorical, lambda a: a),
    (spaces.MultiBinary(4), bernoulli, lambda a: a.float()),
    (spaces.MultiBinary((2, 3)), bernoulli, lambda a: a.flatten(1).float()),
    (spaces.Box(-1, 1, (3,)), gaussian, lambda a: a),
    (spaces.Box(-np.inf, np.inf, (2, 2)), gaussian, lambda a: a.flatten(1)),
    (spaces.Box(-1, 1, (), np.float64), gaussian, lambda a: a.float().unsqueeze(-1)),
]
GROUPED = [
    (spaces.MultiDiscrete([3, 3, 3]), [3, 3, 3], 0),
    (spaces.MultiDiscrete([2, 5, 3], start=np.array([1, -1, 4])), [2, 5, 3], np.array([1, -1, 4])),
    (spaces.MultiDiscrete([[2, 3], [4, 2]]), [2, 3, 4, 2], 0),
]
EVERY = [*[case[0] for case in SIMPLE], *[case[0] for case in GROUPED], NESTED]


def draw(dist, rows=40, seed=0, scale=1.0):
    """Inputs, noise, and the actions that they give as tensors."""
    rng = np.random.default_rng(seed)
    inputs = (scale * rng.standard_normal((rows, dist.num_inputs))).astype(np.float32)
    action = dist.act(inputs, dist.noise(rng, (rows,)))
    return torch.from_numpy(inputs), {name: torch.from_numpy(column) for name, column in action.items()}


@pytest.mark.parametrize(
    ("space", "oracle", "convert"), SIMPLE, ids=lambda given: getattr(given, "__name__", str(given))
)
def test_equals_torch_distributions(space, oracle, convert):
    dist = distribution_for(space)
    inputs, action = draw(dist)
    other = inputs.flip(0)
    value = convert(action["action"])
    torch.testing.assert_close(dist.logp(inputs, action), oracle(inputs).log_prob(value))
    torch.testing.assert_close(dist.entropy(inputs), oracle(inputs).entropy())
    torch.testing.assert_close(dist.kl(inputs, other), td.kl_divergence(oracle(inputs), oracle(other)))


@pytest.mark.parametrize(("space", "sizes", "start"), GROUPED, ids=str)
def test_multi_discrete_is_a_product_of_categoricals(space, sizes, start):
    dist = distribution_for(space)
    assert isinstance(dist, MultiCategorical)
    inputs, action = draw(dist)
    other = inputs.flip(0)
    chosen = torch.as_tensor(action["action"].numpy() - start).flatten(1)
    parts, others = multi(sizes)(inputs), multi(sizes)(other)
    wanted = sum(part.log_prob(chosen[:, i]) for i, part in enumerate(parts))
    torch.testing.assert_close(dist.logp(inputs, action), wanted)
    torch.testing.assert_close(dist.entropy(inputs), sum(part.entropy() for part in parts))
    divergence = sum(td.kl_divergence(p, q) for p, q in zip(parts, others, strict=True))
    torch.testing.assert_close(dist.kl(inputs, other), divergence)


def well_inside(action):
    """Rows that are not so near a bound that float32 loses what tanh was taken of; most rows are."""
    half, middle = torch.tensor((HIGH - LOW) / 2), torch.tensor((HIGH + LOW) / 2)
    inside = (((action - middle) / half).abs() < 0.999).all(-1)
    assert inside.float().mean() > 0.7
    return inside


def test_squashed_gaussian_equals_transformed_normal():
    dist = distribution_for(BOX, squash=True)
    assert isinstance(dist, SquashedGaussian)
    inputs, action = draw(dist, scale=0.4)
    wanted = squashed(inputs.double()).log_prob(action["action"].double()).float()
    inside = well_inside(action["action"])
    torch.testing.assert_close(dist.logp(inputs, action)[inside], wanted[inside], rtol=1e-3, atol=1e-3)
    base = gaussian(inputs), gaussian(inputs.flip(0))
    torch.testing.assert_close(dist.kl(inputs, inputs.flip(0)), td.kl_divergence(*base))


def test_squashed_gaussian_entropy_is_the_mean_of_minus_logp():
    dist = distribution_for(BOX, squash=True)
    inputs = torch.tensor([[0.0, 1.0, -2.0, 0.0, -1.0, 0.5]])
    noise = torch.randn(400_000, 3, generator=torch.Generator().manual_seed(0))
    _, logp = dist.rsample(inputs.expand(400_000, -1), noise)
    assert dist.entropy(inputs).item() == pytest.approx(-logp.mean().item(), abs=0.01)


@pytest.mark.parametrize("log_std", [-4.0, 0.0, 1.0, 1.99])
@pytest.mark.parametrize("mean", [0.0, 1.0, -4.0])
def test_squashed_gaussian_entropy_and_its_gradient_are_those_of_a_fine_grid(mean, log_std):
    dist = distribution_for(spaces.Box(-1, 1, (1,), np.float32), squash=True)
    noise = torch.linspace(-10, 10, 100_001, dtype=torch.float64)
    weights = torch.exp(-noise.square() / 2)
    inputs = torch.tensor([[mean, log_std]], dtype=torch.float64, requires_grad=True)
    u = inputs[0, 0] + inputs[0, 1].exp() * noise
    slopes = 2 * (math.log(2) - u - torch.nn.functional.softplus(-2 * u))
    wanted = 0.5 * math.log(2 * math.pi * math.e) + inputs[0, 1] + (weights * slopes).sum() / weights.sum()
    found = dist.entropy(inputs)[0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)
    gradients = (torch.autograd.grad(value, inputs)[0] for value in (found, wanted))
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-3)


def test_squashed_gaussian_stays_finite_far_outside():
    dist = distribution_for(BOX, squash=True)
    inputs = torch.tensor([[50.0, -50.0, 0.0, 5.0, -40.0, 0.0]], requires_grad=True)
    action = dist.act(inputs.detach().numpy(), np.ones((1, 3), np.float32))
    assert BOX.contains(action["action"][0])
    assert action["action"][0, 0] == HIGH[0]
    logp = dist.logp(inputs, {"action": torch.from_numpy(action["action"])})
    drawn, drawn_logp = dist.rsample(inputs, torch.ones(1, 3))
    (logp + drawn_logp + dist.entropy(inputs) + drawn["action"].sum()).sum().backward()
    assert torch.isfinite(torch.stack([logp, drawn_logp])).all()
    assert torch.isfinite(inputs.grad).all()


@pytest.mark.parametrize("squash", [False, True])
def test_rsample_is_differentiable_and_agrees_with_act_and_logp(squash):
    dist = distribution_for(BOX, squash=squash)
    rng = np.random.default_rng(3)
    inputs = (0.5 * rng.standard_normal((10, 6))).astype(np.float32)
    noise = dist.noise(rng, (10,))
    tensor = torch.from_numpy(inputs).requires_grad_()
    action, logp = dist.rsample(tensor, torch.from_numpy(noise))
    np.testing.assert_allclose(action["action"].detach(), dist.act(inputs, noise)["action"], rtol=1e-5, atol=1e-6)
    inside = well_inside(action["action"]) if squash else slice(None)
    again = dist.logp(tensor, {"action": action["action"].detach()})
    torch.testing.assert_close(logp[inside], again[inside], rtol=1e-3, atol=1e-3)
    action["action"].sum().backward()
    assert (tensor.grad.abs() > 0).all()


@pytest.mark.parametrize("squash", [False, True])
def test_rsample_gradients(squash):
    dist = distribution_for(BOX, squash=squash)
    inputs = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    noise = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def outcome(x):
        action, logp = dist.rsample(x, noise)
        return action["action"], logp

    assert torch.autograd.gradcheck(outcome, (inputs,))


@pytest.mark.parametrize("space", [*EVERY, BOX], ids=str)
def test_gradients(space):
    dist = distribution_for(space, squash=space is BOX)
    inputs, action = draw(dist, rows=3)
    inputs, other = inputs.double().requires_grad_(), inputs.flip(0).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: dist.logp(x, action), (inputs,))
    assert torch.autograd.gradcheck(dist.entropy, (inputs,))
    assert torch.autograd.gradcheck(dist.kl, (inputs, other))


@pytest.mark.parametrize("space", EVERY, ids=str)
def test_time_axis(space):
    """[B, T] gives what [B * T] gives."""
    dist = distribution_for(space)
    inputs, action = draw(dist, rows=12)
    folded = inputs.reshape(3, 4, -1)
    actions = {name: column.reshape(3, 4, *column.shape[1:]) for name, column in action.items()}
    torch.testing.assert_close(dist.logp(folded, actions).flatten(), dist.logp(inputs, action))
    torch.testing.assert_close(dist.entropy(folded).flatten(), dist.entropy(inputs))
    torch.testing.assert_close(dist.kl(folded, folded.flip(0)).shape, torch.Size([3, 4]))


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("space", [*EVERY[:4], spaces.Box(-3, 1, (2, 2)), BOX, *EVERY[7:]], ids=str)
@pytest.mark.parametrize("greedy", [False, True])
def test_actions_have_the_spaces_shapes_and_dtypes(space, squash, greedy):
    dist = distribution_for(space, squash=squash)
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((6, dist.num_inputs)).astype(np.float32)
    noise = dist.noise(rng, (2, 3))
    assert noise.shape == (2, 3, dist.num_noise)
    assert noise.dtype == np.float32
    action = dist.act(inputs, None if greedy else noise.reshape(6, -1))
    leaves = dist.flatten(space.sample())
    assert list(action) == list(dist.flatten.leaves)
    for name, leaf in dist.flatten.leaves.items():
        assert action[name].shape == (6, *np.shape(leaves[name]))
        assert action[name].dtype == leaf.dtype
        if squash or not isinstance(leaf, spaces.Box):
            assert all(leaf.contains(value) for value in action[name])


def test_greedy_is_the_mode():
    assert distribution_for(spaces.Discrete(3, start=5)).act(np.array([[0, 2, 1]], np.float32), None)["action"] == [6]
    bits = distribution_for(spaces.MultiBinary(2)).act(np.array([[0.1, -0.1]], np.float32), None)["action"]
    np.testing.assert_array_equal(bits, [[1, 0]])
    choices = distribution_for(spaces.MultiDiscrete([2, 3])).act(np.array([[0, 1, -9, -7, -8]], np.float32), None)
    np.testing.assert_array_equal(choices["action"], [[1, 1]])
    inputs = np.array([[0.3, -0.3, 1, 1]], np.float32)
    mean = distribution_for(spaces.Box(-1, 1, (2,))).act(inputs, None)["action"]
    np.testing.assert_array_equal(mean, inputs[:, :2])
    mean[:] = 0
    assert inputs[0, 0] == np.float32(0.3)  # the action is no view of the inputs, which are recorded
    middle = distribution_for(spaces.Box(0, 4, (2,)), squash=True).act(np.zeros((1, 4), np.float32), None)["action"]
    np.testing.assert_array_equal(middle, [[2, 2]])


ROWS = 200_000


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    return ((counts - expected) ** 2 / expected).sum()


@pytest.mark.parametrize("logits", [[0.0, 1.0], [-1.0, 0.5, 2.0, 0.0], [0.0, -6.0, -3.0]])
def test_categorical_samples_follow_the_softmax(logits):
    dist = Categorical(spaces.Discrete(len(logits)), "action")
    inputs = np.tile(np.array(logits, np.float32), (ROWS, 1))
    counts = np.bincount(dist.act(inputs, dist.noise(np.random.default_rng(7), (ROWS,)))["action"])
    # The chi-square statistic exceeds 25 with a probability below 2e-5 at up to 3 degrees of freedom.
    assert chi_square(counts, torch.tensor(logits).softmax(0).numpy()) < 25


def test_multi_categorical_samples_are_independent():
    dist = MultiCategorical(spaces.MultiDiscrete([2, 3]), "action")
    logits = [0.0, 1.0, 0.5, -1.0, 0.0]
    inputs = np.tile(np.array(logits, np.float32), (ROWS, 1))
    action = dist.act(inputs, dist.noise(np.random.default_rng(7), (ROWS,)))["action"]
    counts = np.bincount(action[:, 0] * 3 + action[:, 1])
    first, second = torch.tensor(logits[:2]).softmax(0), torch.tensor(logits[2:]).softmax(0)
    assert chi_square(counts, torch.outer(first, second).flatten().numpy()) < 32  # 5 degrees of freedom: 6e-6


def test_bernoulli_samples_follow_the_sigmoid():
    dist = Bernoulli(spaces.MultiBinary(3), "action")
    logits = np.array([-3.0, 0.0, 1.0], np.float32)
    action = dist.act(np.tile(logits, (ROWS, 1)), dist.noise(np.random.default_rng(7), (ROWS,)))["action"]
    p = 1 / (1 + np.exp(-logits))
    z = (action.mean(0) - p) / np.sqrt(p * (1 - p) / ROWS)
    assert (np.abs(z) < 4.5).all()


def test_gaussian_samples_have_the_moments():
    dist = DiagGaussian(spaces.Box(-1, 1, (2,)), "action")
    inputs = np.tile(np.array([1.0, -2.0, math.log(0.5), math.log(3.0)], np.float32), (ROWS, 1))
    action = dist.act(inputs, dist.noise(np.random.default_rng(7), (ROWS,)))["action"]
    std = np.array([0.5, 3.0])
    assert (np.abs(action.mean(0) - [1, -2]) < 4.5 * std / math.sqrt(ROWS)).all()
    assert (np.abs(action.std(0) / std - 1) < 4.5 / math.sqrt(2 * ROWS)).all()


class AtTheEdge:
    """A generator that draws the smallest and the largest number there can be."""

    def standard_exponential(self, shape, dtype):
        return np.resize(np.array([0.0, 20.0], dtype), shape)

    def random(self, shape, dtype):
        return np.resize(np.array([0.0, 1 - 2.0**-24], dtype), shape)


def test_noise_is_finite_at_the_edges():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dist in (Categorical(spaces.Discrete(3), "action"), Bernoulli(spaces.MultiBinary(3), "action")):
            assert np.isfinite(dist.noise(AtTheEdge(), (4,))).all()


def test_composite_is_the_sum_of_its_parts():
    dist = distribution_for(NESTED)
    assert isinstance(dist, Composite)
    inputs, action = draw(dist)
    spans = {"action/legs/0": 4, "action/legs/1": 3, "action/arm": 8, "action/lamps": 2}
    assert dist.num_inputs == sum(spans.values())
    parts = dict(zip(dist.flatten.leaves, inputs.split([spans[name] for name in dist.flatten.leaves], -1), strict=True))
    wanted = gaussian(parts["action/legs/0"]).log_prob(action["action/legs/0"])
    wanted += categorical(parts["action/legs/1"]).log_prob(action["action/legs/1"] + 1)
    wanted += gaussian(parts["action/arm"]).log_prob(action["action/arm"].float().flatten(1))
    wanted += bernoulli(parts["action/lamps"]).log_prob(action["action/lamps"].float())
    torch.testing.assert_close(dist.logp(inputs, action), wanted)
    flags = np.zeros(dist.num_inputs, bool)
    flags[dist.log_std] = True
    for name, part in zip(parts, np.split(flags, np.cumsum([spans[n] for n in parts])[:-1]), strict=True):
        half = len(part) // 2
        wanted_flags = (
            [False] * half + [True] * half if name in ("action/legs/0", "action/arm") else [False] * len(part)
        )
        assert part.tolist() == wanted_flags


def test_errors():
    with pytest.raises(SpaceError, match=r"`action/x` is a Box of int32.*MultiDiscrete"):
        distribution_for(spaces.Dict({"x": spaces.Box(0, 9, (2,), np.int32)}))
    with pytest.raises(SpaceError, match=r"`action` is Box.*finite bounds.*don't squash"):
        distribution_for(spaces.Box(-np.inf, np.inf, (2,)), squash=True)
    with pytest.raises(SpaceError, match=r"`action` is Box.*index \[1\] has none"):
        distribution_for(spaces.Box(np.array([-1.0, 3.0]), np.array([1.0, 3.0]), dtype=np.float64), squash=True)
    with pytest.raises(SpaceError, match=r"`action/x` is Box\(.*, \(0,\), float32\), which holds no number"):
        distribution_for(spaces.Dict({"x": spaces.Box(-1, 1, (0,))}))
    with pytest.raises(SpaceError, match="is a Dict space without parts"):
        distribution_for(spaces.Dict({}))
    with pytest.raises(SpaceError, match="`action` is a Text space"):
        distribution_for(spaces.Text(3))


@pytest.mark.parametrize("mean", [0.0, 5.0, 6.5, 9.0, -8.0])
@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [
        (-2, 4, np.float32),
        (1000, 1001, np.float32),
        (-1e5, -1e5 + 1, np.float32),
        (-1, 1, np.float16),
        (0, 1e3, np.float64),
    ],
)
def test_weights_of_squashed_actions_have_mean_1(mean: float, low: float, high: float, dtype: Any) -> None:
    """Also where tanh rounds to 1, or actions to a bound, and draws can't be told apart."""
    dist = distribution_for(spaces.Box(low, high, (1,), dtype), squash=True)
    behaviour = np.tile(np.float32([mean, 0.0]), (200_000, 1))
    target = torch.from_numpy(behaviour + np.float32([0.4, -0.1]))
    action = dist.act(behaviour, dist.noise(np.random.default_rng(0), (200_000,)))
    given = {name: torch.from_numpy(column) for name, column in action.items()}
    weight = (dist.logp(target, given) - dist.logp(torch.from_numpy(behaviour), given)).exp()
    assert weight.mean().item() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("log_std", [-20.0, -14.5, -11.5, -3.0, 0.0, 2.0])
@pytest.mark.parametrize("action", [-1.0, 0.0, 0.5, 1.0])
def test_gradients_of_squashed_actions_are_finite(action: float, log_std: float) -> None:
    dist = distribution_for(spaces.Box(-1, 1, (1,), np.float32), squash=True)
    inputs = torch.tensor([[0.1, log_std]], requires_grad=True)
    logp = dist.logp(inputs, {"action": torch.tensor([[action]])})
    (found,) = torch.autograd.grad(logp.sum(), inputs)
    assert torch.isfinite(logp).all()
    assert torch.isfinite(found).all()
    at, far = inputs[0, 0].item(), math.atanh(1 - 1e-6)
    if abs(action) == 1 and log_std < 0:  # the derivative of log_ndtr is nearly minus its argument there
        assert found[0, 0].item() == pytest.approx((action * far - at) / math.exp(2 * log_std), rel=0.2)


def test_the_probability_of_squashed_actions_at_a_bound_is_that_of_all_beyond() -> None:
    dist = distribution_for(spaces.Box(-1, 1, (2,), np.float32), squash=True)
    inputs = torch.tensor([[9.0, 0.0, 0.5, -1.0]], requires_grad=True)
    logp = dist.logp(inputs, {"action": torch.tensor([[1.0, 0.0]])})
    far = math.atanh(1 - 1e-6)
    beyond = td.Normal(0.0, 1.0).cdf(torch.tensor((9.0 - far) / math.exp(0.5))).log()
    inside = td.Normal(0.0, math.exp(-1.0)).log_prob(torch.tensor(0.0))
    assert logp.item() == pytest.approx((beyond + inside).item(), abs=1e-5)
    logp.sum().backward()
    assert torch.isfinite(inputs.grad).all()
