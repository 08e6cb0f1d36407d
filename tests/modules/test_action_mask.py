# SPDX-License-Identifier: Apache-2.0
"""Action masks against brute force: every action is listed, the forbidden ones dropped, the rest renormalised."""

import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from etude.errors import EnvError, ModuleError
from etude.modules import NetworkConfig, NumPyActor, Output, TorchActor, make_module
from etude.modules.distributions import FORBIDDEN
from etude.modules.network import ObsEncoder

DISCRETE = spaces.Discrete(5, start=2)
MULTI = spaces.MultiDiscrete([3, 2, 4], start=np.array([0, 5, -1]))
EVEN = spaces.MultiDiscrete([[2, 2], [2, 2]])
BITS = spaces.MultiBinary((2, 2))
HYBRID = spaces.Tuple(
    [spaces.Box(-1, 1, (2,)), spaces.Discrete(3), spaces.MultiBinary(2), spaces.MultiDiscrete([2, 3])]
)
NAMED = spaces.Dict({"z": spaces.Discrete(2), "a": spaces.Discrete(3)})
SPACES = [DISCRETE, MULTI, EVEN, BITS, HYBRID, NAMED]


def obs_space(size, mask=None):
    return spaces.Dict({"observation": spaces.Box(-1, 1, (3,)), "action_mask": mask or spaces.MultiBinary(size)})


def discrete_leaves(space):
    """The discrete parts in order: for each, its choices as runs ``(values, exclusive)``, and its column's name."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        return [(f"action/{key}", leaf) for key, leaf in parts if not isinstance(leaf, spaces.Box)]
    return [("action", space)]


def runs(leaf):
    """Each independent choice of a leaf: the values it can take. Bits have the one entry that says whether 1 may be."""
    if isinstance(leaf, spaces.Discrete):
        return [leaf.start + np.arange(leaf.n)]
    if isinstance(leaf, spaces.MultiDiscrete):
        starts = leaf.start.reshape(-1)
        return [start + np.arange(n) for start, n in zip(starts, leaf.nvec.reshape(-1), strict=True)]
    return [None] * int(np.prod(leaf.shape))


def entries(space):
    return sum(1 if values is None else len(values) for _, leaf in discrete_leaves(space) for values in runs(leaf))


def masks_for(space, rows, seed=0):
    """Random masks that leave each choice something; the first forbids as much as it may, the last nothing."""
    rng = np.random.default_rng(seed)
    out = (rng.random((rows, entries(space))) < 0.5).astype(np.int8)
    out[-1] = 1
    out[0] = 0
    at = 0
    for _, leaf in discrete_leaves(space):
        for values in runs(leaf):
            width = 1 if values is None else len(values)
            if values is not None:
                out[np.arange(rows), at + rng.integers(width, size=rows)] = 1
            at += width
    return out


def brute_force(space, logits, mask):
    """For one row: every independent choice as a dict of value → probability, from the logits of the discrete parts."""
    choices, at = [], 0
    for _, leaf in discrete_leaves(space):
        for values in runs(leaf):
            if values is None:
                one = 1 / (1 + np.exp(-float(logits[at]))) if mask[at] else 0.0
                choices.append({0: 1 - one, 1: one})
                at += 1
                continue
            weight = [float(np.exp(logits[at + i])) * bool(mask[at + i]) for i in range(len(values))]
            choices.append({int(v): w / sum(weight) for v, w in zip(values, weight, strict=True)})
            at += len(values)
    return choices


def chosen_values(space, action, row):
    return [int(v) for name, _ in discrete_leaves(space) for v in np.asarray(action[name][row]).reshape(-1)]


class Fixed(nn.Module):
    """Gives the logits it holds, whatever it sees."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.as_tensor(logits, dtype=torch.float32))

    def forward(self, obs):
        return Output(dist_inputs=self.logits * 1.0)


def positions(dist):
    return np.concatenate([np.arange(run.start, run.start + run.size) for run in dist.logits])


def masked_module(space, rows=12, seed=0):
    rng = np.random.default_rng(seed)
    mask = masks_for(space, rows, seed)
    module = make_module(None, obs_space(entries(space)), space)
    inputs = rng.normal(size=(rows, module.dist.num_inputs)).astype(np.float32)
    module = make_module(Fixed(inputs), obs_space(entries(space)), space)
    obs = {"obs/observation": np.zeros((rows, 3), np.float32), "obs/action_mask": mask}
    return module, obs, inputs


def tensors(obs):
    return {name: torch.from_numpy(column) for name, column in obs.items()}


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_probabilities_entropy_and_kl_are_those_of_what_is_allowed(space):
    module, obs, inputs = masked_module(space)
    other, _, _ = masked_module(space, seed=0)
    with torch.no_grad():
        other.net.logits[:] = torch.from_numpy(inputs[::-1].copy())
    out, before = (m(m.obs_from(tensors(obs))) for m in (module, other))
    actor = module.actor(explore=True)
    actor.start(np.random.default_rng(3), 12)
    action, extras = actor.step(obs)
    np.testing.assert_array_equal(extras["dist_inputs"], out.dist_inputs.detach())
    logp = out.logp(module.action_from(tensors(action)))
    box = ~np.isin(np.arange(module.dist.num_inputs), positions(module.dist))
    for row in range(12):
        p = brute_force(space, inputs[row, positions(module.dist)], obs["obs/action_mask"][row])
        q = brute_force(space, inputs[-1 - row, positions(module.dist)], obs["obs/action_mask"][row])
        wanted = sum(np.log(c[v]) for c, v in zip(p, chosen_values(space, action, row), strict=True))
        entropy = -sum(w * np.log(w) for c in p for w in c.values() if w)
        kl = sum(w * np.log(w / d[v]) for c, d in zip(q, p, strict=True) for v, w in c.items() if w)
        if box.any():
            mean, log_std = (torch.from_numpy(part) for part in np.split(inputs[row, box], 2))
            past, past_std = (torch.from_numpy(part) for part in np.split(inputs[-1 - row, box], 2))
            normal, old = (
                torch.distributions.Normal(mean, log_std.exp()),
                torch.distributions.Normal(past, past_std.exp()),
            )
            wanted += normal.log_prob(torch.from_numpy(action["action/0"][row])).sum().item()
            entropy += normal.entropy().sum().item()
            kl += torch.distributions.kl_divergence(old, normal).sum().item()
        assert logp[row].item() == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        assert out.entropy()[row].item() == pytest.approx(entropy, rel=1e-4, abs=1e-5)
        assert out.kl(before.dist_inputs)[row].item() == pytest.approx(kl, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("space", [DISCRETE, MULTI, BITS], ids=str)
def test_the_probabilities_of_all_actions_add_up_to_one(space):
    module, obs, _ = masked_module(space)
    ((_, leaf),) = discrete_leaves(space)
    values = [(0, 1) if v is None else v for v in runs(leaf)]
    total = torch.zeros(12)
    for combination in itertools.product(*values):
        action = torch.as_tensor(np.array(combination).reshape(leaf.shape)).expand(12, *leaf.shape)
        total += module(module.obs_from(tensors(obs))).logp(action).exp()
    torch.testing.assert_close(total, torch.ones(12))


@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_what_is_forbidden_is_never_done(space, explore):
    """10^5 actions of each; the logits speak for what is forbidden."""
    rows = 1000
    mask = masks_for(space, rows)
    module = make_module(None, obs_space(entries(space)), space)
    inputs = np.zeros((rows, module.dist.num_inputs), np.float32)
    inputs[:, positions(module.dist)] = np.where(mask, -3.0, 9.0)
    module = make_module(Fixed(inputs), obs_space(entries(space)), space)
    actor = module.actor(explore=explore)
    actor.start(np.random.default_rng(0), rows)
    obs = {"obs/observation": np.zeros((rows, 3), np.float32), "obs/action_mask": mask}
    seen = set()
    for _ in range(100 if explore else 1):
        action, _ = actor.step(obs)
        at = 0
        for name, leaf in discrete_leaves(space):
            column = action[name].reshape(rows, -1)
            for i, values in enumerate(runs(leaf)):
                if values is None:
                    assert not column[mask[:, at] == 0, i].any()
                    at += 1
                else:
                    index = column[:, i] - values[0]
                    assert mask[np.arange(rows), at + index].all()
                    seen |= set((at + index).tolist())
                    at += len(values)
    if explore and space is not BITS:
        assert len(seen) == sum(
            len(values) for _, leaf in discrete_leaves(space) for values in runs(leaf) if values is not None
        )


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_gradients_flow_to_what_is_allowed_alone(space):
    module, obs, inputs = masked_module(space)
    allowed = np.ones(inputs.shape, bool)
    allowed[:, positions(module.dist)] = obs["obs/action_mask"] != 0
    actor = module.actor(explore=True)
    actor.start(np.random.default_rng(3), 12)
    action, _ = actor.step(obs)
    other = torch.where(
        torch.from_numpy(allowed), torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0)), FORBIDDEN
    )

    def grad(what):
        module.zero_grad()
        what(module(module.obs_from(tensors(obs)))).sum().backward()
        return module.net.logits.grad.numpy()

    for what in (
        lambda out: out.logp(module.action_from(tensors(action))),
        lambda out: out.entropy(),
        lambda out: out.kl(other),
        lambda out: out.dist.kl(out.dist_inputs, other),
    ):
        found = grad(what)
        assert np.isfinite(found).all()
        assert (found[~allowed] == 0).all()
        assert (found[allowed] != 0).mean() > 0.5


def test_gradients_are_those_of_a_softmax_over_what_is_allowed():
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.5]], requires_grad=True)
    module = make_module(Fixed(logits.detach()), obs_space(4), spaces.Discrete(4))
    mask = {"obs/observation": torch.zeros(1, 3), "obs/action_mask": torch.tensor([[1, 0, 1, 1]])}
    out = module(module.obs_from(mask))
    (out.logp(torch.tensor([2])) + 0.5 * out.entropy()).sum().backward()
    few = logits[:, [0, 2, 3]]
    plain = torch.distributions.Categorical(logits=few)
    (plain.log_prob(torch.tensor([1])) + 0.5 * plain.entropy()).sum().backward()
    torch.testing.assert_close(module.net.logits.grad, logits.grad)


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_numpy_equals_torch(space, separate):
    torch.manual_seed(0)
    size = entries(space)
    module = make_module(None, obs_space(size), space, NetworkConfig(hidden=(16,), separate=separate))
    fast, slow = module.actor(explore=True), TorchActor(module, explore=True)
    assert isinstance(fast, NumPyActor)
    for actor in (fast, slow):
        actor.start(np.random.default_rng(0), 20)
    for n in (20, 1, 7):
        rng = np.random.default_rng(n)
        obs = {"obs/observation": rng.normal(size=(n, 3)).astype(np.float32), "obs/action_mask": masks_for(space, n)}
        (action, extras), (wanted_action, wanted) = fast.step(obs), slow.step(obs)
        np.testing.assert_allclose(extras["dist_inputs"], wanted["dist_inputs"], atol=1e-5)
        assert (extras["dist_inputs"][:, positions(module.dist)] == np.float32(FORBIDDEN)).any()
        for name in action:
            np.testing.assert_allclose(action[name], wanted_action[name], atol=1e-5)
        np.testing.assert_allclose(module.value_of(obs), wanted["value"], atol=1e-5)
        logp = fast.logp(extras["dist_inputs"], action)
        assert np.isfinite(logp).all()
        assert (logp > -50).all()


def test_masks_over_time():
    module = make_module(Fixed(np.zeros((2, 3, 5))), obs_space(5), DISCRETE)
    mask = torch.from_numpy(masks_for(DISCRETE, 6)).reshape(2, 3, 5)
    out = module({"observation": torch.zeros(2, 3, 3), "action_mask": mask})
    torch.testing.assert_close(out.dist_inputs == FORBIDDEN, mask == 0)


@pytest.mark.parametrize(
    "mask",
    [
        spaces.MultiBinary(4),
        spaces.MultiBinary((2, 2)),
        spaces.Box(0, 1, (4,), np.int8),
        spaces.Box(0, 1, (4,), np.float32),
        spaces.Box(0, 1, (4,), np.float64),
        spaces.MultiDiscrete([2, 2, 2, 2]),
    ],
    ids=str,
)
def test_every_kind_of_mask(mask):
    module = make_module(None, obs_space(4, mask), spaces.Discrete(4))
    values = np.array([[1, 0, 0, 1], [0, 1, 1, 1]]).astype(mask.dtype).reshape(2, *mask.shape)
    obs = {"obs/observation": np.zeros((2, 3), np.float32), "obs/action_mask": values}
    for actor in (module.actor(explore=False), TorchActor(module, explore=False)):
        actor.start(np.random.default_rng(0), 2)
        _, extras = actor.step(obs)
        assert (extras["dist_inputs"] == np.float32(FORBIDDEN)).tolist() == [
            [False, True, True, False],
            [True, False, False, False],
        ]


def test_the_network_does_not_see_the_mask():
    assert ObsEncoder(obs_space(4), None, 8).width == 3
    module = make_module(None, obs_space(4), spaces.Discrete(4))
    obs = {"observation": torch.ones(2, 3), "action_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])}
    out = module(obs)
    torch.testing.assert_close(out.value[0], out.value[1])
    torch.testing.assert_close(out.dist_inputs[0, 2:], out.dist_inputs[1, 2:])
    columns = {f"obs/{name}": column.numpy() for name, column in obs.items()}
    np.testing.assert_allclose(module.value_of(columns), out.value.detach(), atol=1e-6)


def test_observations_without_the_key_are_not_masked():
    inner = spaces.Dict({"inner": obs_space(4)})
    for space in (spaces.Box(-1, 1, (4,)), inner, spaces.Tuple([obs_space(4)])):
        assert make_module(None, space, spaces.Discrete(4)).mask is None


@pytest.mark.parametrize("make", [lambda m: m.actor(explore=True), lambda m: TorchActor(m, explore=True)])
def test_a_row_in_which_nothing_is_allowed_is_named(make):
    module = make_module(None, obs_space(4), spaces.Discrete(4))
    mask = np.array([[1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]], np.int8)
    obs = {"obs/observation": np.zeros((3, 3), np.float32), "obs/action_mask": mask}
    actor = make(module)
    actor.start(np.random.default_rng(0), 3)
    with pytest.raises(EnvError, match=r"`obs/action_mask` allows nothing in row 2 of 3: its entries 0 to 3 are all 0"):
        actor.step(obs)
    with pytest.raises(EnvError, match=r"allows nothing in row 2 of 3"):
        actor.step(obs, ends=np.array([True, True, False]))
    action, _ = actor.step(obs, ends=np.array([False, False, True]))  # nobody acts there any more
    assert action["action"][1] == 3
    assert len(action["action"]) == 3


def test_each_choice_needs_something_allowed_but_bits_do_not():
    module = make_module(None, obs_space(entries(HYBRID)), HYBRID)
    actor = module.actor(explore=True)
    actor.start(np.random.default_rng(0), 2)
    obs = {"obs/observation": np.zeros((2, 3), np.float32), "obs/action_mask": np.ones((2, 10), np.int8)}
    obs["obs/action_mask"][:, 3:5] = 0  # both bits
    assert not actor.step(obs)[0]["action/2"].any()
    obs["obs/action_mask"][1, 7:] = 0
    with pytest.raises(EnvError, match="allows nothing in row 1 of 2: its entries 7 to 9 are all 0"):
        actor.step(obs)
    bits = make_module(None, obs_space(4), BITS).actor(explore=True)
    bits.start(np.random.default_rng(0), 2)
    obs["obs/action_mask"] = np.zeros((2, 4), np.int8)
    assert not bits.step(obs)[0]["action"].any()


@pytest.mark.parametrize(
    ("mask", "action", "message"),
    [
        (
            spaces.MultiBinary(4),
            spaces.Discrete(6),
            r"`obs/action_mask` is MultiBinary\(4\). It must hold 6 numbers that are 0 or 1, one for each choice of "
            r"`action` Discrete\(6\), in this order: 1 where it is allowed, 0 where .* the mask can't be used",
        ),
        (spaces.MultiBinary(3), NAMED, r"must hold 5 .* each choice of `action/\w` Discrete.*, `action/\w` Discrete"),
        (spaces.Dict({"a": spaces.MultiBinary(3)}), NAMED, r"`obs/action_mask` is Dict.* must hold 5 numbers"),
        (spaces.Box(-10, 10, (6,)), spaces.Discrete(6), r"`obs/action_mask` is Box.* 6 numbers that are 0 or 1"),
        (spaces.MultiDiscrete([3, 2]), spaces.Discrete(2), "2 numbers that are 0 or 1"),
        (
            spaces.MultiBinary(2),
            spaces.Box(-1, 1, (2,)),
            r"`action` Box.* has no choices that a mask could forbid: ren",
        ),
    ],
)
def test_masks_that_do_not_fit(mask, action, message):
    with pytest.raises(ModuleError, match=message):
        make_module(None, obs_space(0, mask), action)


def test_a_mask_and_nothing_else_is_nothing_to_see():
    with pytest.raises(ModuleError, match="the observation has no part except 'action_mask'"):
        make_module(None, spaces.Dict({"action_mask": spaces.MultiBinary(2)}), spaces.Discrete(2))
