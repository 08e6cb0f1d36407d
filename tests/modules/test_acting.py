# SPDX-License-Identifier: Apache-2.0
"""Actors: NumPy against torch, updates seen at once, noise, and what is recorded."""

import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from etude.errors import ModuleError
from etude.modules import Module, NetworkConfig, NumPyActor, TorchActor, make_module
from etude.modules.network import ACTIVATIONS

VECTOR, TWO, CONTINUOUS = spaces.Box(-1, 1, (4,)), spaces.Discrete(2), spaces.Box(-1, 1, (3,))
MIXED = spaces.Tuple([CONTINUOUS, spaces.Discrete(3)])


def randomised(module: Module, seed: int = 0) -> Module:
    """The module with no parameter left at its initial zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return module


def rows(n, seed=0):
    return {"obs": np.random.default_rng(seed).standard_normal((n, 4)).astype(np.float32)}


def started(actor, n, seed=0):
    actor.start(np.random.default_rng(seed), n)
    return actor


@pytest.mark.parametrize(
    ("activation", "separate", "hidden", "action_space", "dependent"),
    [
        *itertools.product(ACTIVATIONS, [True, False], [(), (16,), (32, 8, 16)], [TWO], [False]),
        *itertools.product(["tanh"], [True, False], [(16, 16)], [CONTINUOUS, MIXED], [True, False]),
    ],
)
def test_numpy_equals_torch(activation, separate, hidden, action_space, dependent):
    config = NetworkConfig(activation=activation, separate=separate, hidden=hidden, state_dependent_std=dependent)
    module = randomised(make_module(None, VECTOR, action_space, config))
    fast, slow = module.actor(explore=True), TorchActor(module, explore=True)
    assert isinstance(fast, NumPyActor)
    started(fast, 40), started(slow, 40)
    for n in (40, 3, 1, 70, 40):  # buffers grow, shrink and are used again
        obs = rows(n, seed=n)
        action, extras = fast.step(obs)
        wanted_action, wanted = slow.step(obs)
        logp, wanted_logp = fast.logp(extras["dist_inputs"], action), slow.logp(wanted["dist_inputs"], wanted_action)
        np.testing.assert_allclose(extras["dist_inputs"], wanted["dist_inputs"], atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(module.value_of(obs), wanted["value"], atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(logp, wanted_logp, atol=1e-4, rtol=1e-4)
        for name in action:
            np.testing.assert_allclose(action[name], wanted_action[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_far_from_zero(activation):
    x = np.array([-1e4, -90, -5, -1e-4, 0, 1e-4, 5, 90, 1e4], np.float32)
    wanted = ACTIVATIONS[activation].torch()(torch.from_numpy(x.copy()))
    write = ACTIVATIONS[activation].write
    if write is not None:
        out = np.empty_like(x)
        write(x, out)
        write(x, x)  # the same in place
        np.testing.assert_array_equal(x, out)
    np.testing.assert_allclose(x, wanted, atol=1e-6, rtol=1e-5)


def test_updates_in_place_are_seen_at_once():
    module = randomised(make_module(None, VECTOR, CONTINUOUS))
    actor = started(module.actor(explore=False), 5)
    obs = rows(5)
    before = actor.step(obs)[1]["dist_inputs"]
    optimizer = torch.optim.Adam(module.parameters(), 0.1)
    output = module(module.obs_from({"obs": torch.from_numpy(obs["obs"])}))
    (output.dist_inputs.sum() + output.value.sum()).backward()
    optimizer.step()
    output = module(torch.from_numpy(obs["obs"]))
    _, extras = actor.step(obs)
    assert np.abs(extras["dist_inputs"] - before).max() > 0.01
    np.testing.assert_allclose(extras["dist_inputs"], output.dist_inputs.detach(), atol=1e-5)
    np.testing.assert_allclose(module.value_of(obs), output.value.detach(), atol=1e-5)


def test_start_finds_parameters_that_moved():
    module = randomised(make_module(None, VECTOR, CONTINUOUS))
    actor = started(module.actor(explore=False), 5)
    obs = rows(5)
    actor.step(obs)
    parameters = list(module.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view(parameter.shape)
    flat *= 1.5
    started(actor, 5)
    wanted = module(torch.from_numpy(obs["obs"]))
    _, extras = actor.step(obs)
    np.testing.assert_allclose(extras["dist_inputs"], wanted.dist_inputs.detach(), atol=1e-5)
    np.testing.assert_allclose(module.value_of(obs), wanted.value.detach(), atol=1e-5)
    flat *= 1.5
    wanted = module(torch.from_numpy(obs["obs"]))
    np.testing.assert_allclose(actor.step(obs)[1]["dist_inputs"], wanted.dist_inputs.detach(), atol=1e-5)
    np.testing.assert_allclose(module.value_of(obs), wanted.value.detach(), atol=1e-5)


def test_parameters_of_another_dtype_are_copied_at_start():
    module = randomised(make_module(None, VECTOR, TWO)).double()
    actor = started(module.actor(explore=False), 5)
    with torch.no_grad():
        module.net.policy_head.bias += 1
    started(actor, 5)
    hidden = torch.from_numpy(rows(5)["obs"]).double()
    for layer in module.net.policy.linears:
        hidden = torch.tanh(layer(hidden))
    expected = module.net.policy_head(hidden).detach()
    np.testing.assert_allclose(actor.step(rows(5))[1]["dist_inputs"], expected, atol=1e-5)


@pytest.mark.parametrize("make", [None, lambda o, a: nn_wrapped(o, a)], ids=["numpy", "torch"])
def test_same_seed_same_actions_and_greedy_ignores_it(make):
    module = randomised(make_module(make, VECTOR, CONTINUOUS))
    obs = [rows(6, seed) for seed in range(100)]

    def actions(seed, explore):
        actor = started(module.actor(explore=explore), 6, seed)
        return np.stack([actor.step(o)[0]["action"] for o in obs])

    np.testing.assert_array_equal(actions(1, True), actions(1, True))
    assert (actions(1, True) != actions(2, True)).mean() > 0.99
    np.testing.assert_array_equal(actions(1, False), actions(2, False))


def nn_wrapped(obs_space, action_space):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_module(None, obs_space, action_space).net

        def forward(self, obs):
            return self.inner(obs)

    return Wrapped()


def test_noise_is_fresh_for_each_row_and_step():
    module = make_module(None, VECTOR, spaces.Box(-1, 1, (1,)))
    actor = started(module.actor(explore=True), 7)
    obs = {"obs": np.zeros((7, 4), np.float32)}
    drawn = np.concatenate([actor.step(obs)[0]["action"] for _ in range(150)])
    assert len(np.unique(drawn)) > 0.99 * len(drawn)
    # more rows than one block holds, and a batch that is wider than announced
    assert actor.step(rows(1000))[0]["action"].shape == (1000, 1)


def test_start_drops_left_over_noise():
    """What an actor draws depends on the generator's state at start, not on what was drawn before."""
    module = make_module(None, VECTOR, CONTINUOUS)
    actor = started(module.actor(explore=True), 5, seed=0)
    actor.step(rows(5))
    again = started(actor, 5, seed=4).step(rows(5))[0]["action"]
    fresh = started(module.actor(explore=True), 5, seed=4).step(rows(5))[0]["action"]
    np.testing.assert_array_equal(again, fresh)


def test_results_are_not_overwritten_by_the_next_step():
    module = randomised(make_module(None, VECTOR, CONTINUOUS))
    actor = started(module.actor(explore=True), 5)
    action, extras = actor.step(rows(5, 0))
    kept = action["action"].copy(), extras["dist_inputs"].copy()
    actor.step(rows(5, 1))
    np.testing.assert_array_equal(action["action"], kept[0])
    np.testing.assert_array_equal(extras["dist_inputs"], kept[1])


def test_what_is_recorded():
    module = randomised(make_module(None, VECTOR, TWO))
    obs = rows(9)
    for actor in (module.actor(explore=True), TorchActor(module, explore=True)):
        started(actor, 9)
        action, extras = actor.step(obs)
        logp = actor.logp(extras["dist_inputs"], action)
        assert set(extras) == ({"dist_inputs", "value"} if isinstance(actor, TorchActor) else {"dist_inputs"})
        assert all(column.dtype == np.float32 and len(column) == 9 for column in (*extras.values(), logp))
        assert logp.shape == (9,)
        logits = torch.from_numpy(extras["dist_inputs"])
        wanted = torch.distributions.Categorical(logits=logits).log_prob(torch.from_numpy(action["action"]))
        np.testing.assert_allclose(logp, wanted, atol=1e-6)


def test_a_step_before_start_says_so():
    with pytest.raises(ModuleError, match=r"not started: call its start\(rng, num_rows\) before step\(\)"):
        make_module(None, VECTOR, TWO).actor(explore=True).step(rows(2))
