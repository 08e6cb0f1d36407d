# SPDX-License-Identifier: Apache-2.0
"""Acting on tensors: the same actions as in NumPy for the same noise, and noise of the same distribution."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from etude.errors import EnvError, ModuleError
from etude.experience.arrays import host_columns
from etude.modules import Distribution, NetworkConfig, distribution_for, make_module
from etude.modules.actors import HostActor, TensorActor, tensor_actor
from etude.modules.distributions import FORBIDDEN, EpsilonGreedy

CPU = torch.device("cpu")
ROWS = 4000


def greedy(epsilon: float) -> EpsilonGreedy:
    return EpsilonGreedy(spaces.Discrete(4, start=3), "action", epsilon)


DISTS: dict[str, Any] = {
    "categorical": distribution_for(spaces.Discrete(5)),
    "categorical from -2, int32": distribution_for(spaces.Discrete(3, start=-2, dtype=np.int32)),
    "greedy": greedy(0.0),
    "epsilon": greedy(0.4),
    "many choices": distribution_for(spaces.MultiDiscrete([2, 4, 3], start=[0, 1, 0])),
    "a table of choices": distribution_for(spaces.MultiDiscrete([[3, 3], [3, 3]])),
    "bits": distribution_for(spaces.MultiBinary([2, 3])),
    "normal": distribution_for(spaces.Box(-1, 1, (2, 2), np.float64)),
    "squashed": distribution_for(spaces.Box(np.array([-3, 0]), np.array([1, 5]), dtype=np.float32), squash=True),
    "together": distribution_for(
        spaces.Dict({"move": spaces.Box(-1, 1, (2,)), "jump": spaces.Discrete(3), "keys": spaces.MultiBinary(2)})
    ),
}


@pytest.mark.parametrize("name", DISTS)
@pytest.mark.parametrize("explores", [True, False])
def test_actions_are_those_of_numpy_for_the_same_noise(name: str, explores: bool) -> None:
    dist, rng = DISTS[name], np.random.default_rng(1)
    inputs = rng.normal(size=(ROWS, dist.num_inputs)).astype(np.float32)
    for run in dist.logits:  # some choices are forbidden; ties are made
        if run.exclusive:
            inputs[::3, run.start] = FORBIDDEN
            inputs[::5, run.start : run.start + 2] = 1.0
    noise = dist.noise(rng, (ROWS,)) if explores else None
    found = dist.act(torch.from_numpy(inputs), None if noise is None else torch.from_numpy(noise))
    wanted = dist.act(inputs, noise)
    assert found.keys() == wanted.keys()
    for part, column in host_columns(found).items():
        assert column.dtype == wanted[part].dtype
        if column.dtype.kind == "f":
            np.testing.assert_allclose(column, wanted[part], rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(column, wanted[part])


@pytest.mark.parametrize("name", DISTS)
def test_noise_is_drawn_from_the_same_distribution(name: str) -> None:
    dist, n = DISTS[name], 40_000
    drawn = dist.noise_tensor(torch.Generator().manual_seed(1), n)
    assert (drawn.dtype, tuple(drawn.shape)) == (torch.float32, (n, dist.num_noise))
    assert drawn.isfinite().all()
    found, wanted = np.sort(drawn.numpy(), 0), np.sort(dist.noise(np.random.default_rng(2), (n,)), 0)
    for own, other in zip(found.T, wanted.T, strict=True):  # Kolmogorov-Smirnov, two samples
        at = np.concatenate([own, other])
        gap = np.abs(np.searchsorted(own, at, "right") - np.searchsorted(other, at, "right")).max() / n
        assert gap < 1.95 * np.sqrt(2 / n)  # less than once in a thousand


def module_of(obs: Any, action: Any, **network: Any) -> Any:
    torch.manual_seed(3)
    return make_module(None, obs, action, NetworkConfig(hidden=(16,), **network)).eval()


BOX = spaces.Box(-1, 1, (3,))
MASKED = spaces.Dict({"numbers": BOX, "action_mask": spaces.MultiBinary(4)})


def sample(space: Any, rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    space.seed(seed)
    drawn = [space.sample() for _ in range(rows)]
    if not isinstance(space, spaces.Dict):
        return {"obs": torch.from_numpy(np.stack(drawn))}
    columns = {f"obs/{key}": torch.from_numpy(np.stack([one[key] for one in drawn])) for key in space}
    if "obs/action_mask" in columns:
        columns["obs/action_mask"][:, 1::2] = 1
    return columns


@pytest.mark.parametrize(
    ("obs", "action", "network"),
    [
        (BOX, spaces.Discrete(4), {}),
        (BOX, spaces.Box(-2, 2, (2,)), {}),
        (spaces.Box(-1, 1, (3,), np.float64), spaces.Discrete(4), {}),
        (MASKED, spaces.Discrete(4), {}),
        (MASKED, spaces.MultiDiscrete([2, 2]), {}),
        (BOX, spaces.Discrete(4), {"recurrent": "lstm", "recurrent_size": 8}),
    ],
)
def test_a_module_does_on_tensors_what_it_does_in_numpy(obs: Any, action: Any, network: dict[str, Any]) -> None:
    module, rows = module_of(obs, action, **network), 50
    actor, usual = tensor_actor(module, CPU, explore=False), module.actor(explore=False)
    assert isinstance(actor, TensorActor)
    for each in (actor, usual):
        each.start(np.random.default_rng(0), rows)
    state = {f"state_in/{n}": torch.randn(rows, *part.shape) for n, part in module.initial_state().items()}
    seen = sample(obs, rows)
    found, extras = actor.step(seen, state or None)  # type: ignore[arg-type]
    wanted, others = usual.step(host_columns(seen), host_columns(state) or None)
    assert all(isinstance(column, torch.Tensor) for column in (*found.values(), *extras.values()))
    for name, column in host_columns(found | {name: extras[name] for name in others}).items():
        np.testing.assert_allclose(column, (wanted | others)[name], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(host_columns(extras)["value"], values_of(module, seen, state), rtol=1e-4, atol=1e-5)


def values_of(module: Any, obs: Any, state: Any) -> Any:
    own = module.value_of(host_columns(obs), host_columns(state))
    there = module.value_of(obs, state)
    assert isinstance(there, torch.Tensor)
    np.testing.assert_allclose(there.numpy(), own, rtol=1e-4, atol=1e-5)
    return own


def test_draws_have_the_probabilities_that_are_recorded() -> None:
    module = module_of(BOX, spaces.Discrete(4))
    actor = tensor_actor(module, CPU, explore=True)
    actor.start(np.random.default_rng(0), 20_000)
    obs: Any = {"obs": torch.full((20_000, 3), 0.7)}
    action, extras = actor.step(obs)
    found = np.bincount(host_columns(action)["action"], minlength=4) / 20_000
    every: Any = {"action": torch.arange(4)}
    logp = actor.logp(extras["dist_inputs"][:4], every)
    np.testing.assert_allclose(found, np.exp(host_columns({"logp": logp})["logp"]), atol=0.015)


def test_equal_seeds_draw_equal_actions_and_others_do_not() -> None:
    module = module_of(BOX, spaces.Box(-1, 1, (2,)))

    def drawn(seed: int) -> Any:
        actor = tensor_actor(module, CPU, explore=True)
        actor.start(np.random.default_rng(seed), 5)
        return [host_columns(actor.step(sample(BOX, 5))[0])["action"] for _ in range(3)]  # type: ignore[arg-type]

    first, again, other = drawn(1), drawn(1), drawn(2)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first[0], first[1])


def test_an_env_may_write_into_its_actions() -> None:
    actor = tensor_actor(module_of(BOX, spaces.Box(-1, 1, (2,))), CPU, explore=False)
    action: Any = actor.step(sample(BOX, 5))[0]["action"]  # type: ignore[arg-type]
    action.clamp_(-0.1, 0.1)


def test_a_mask_that_allows_nothing_is_named_unless_the_episode_is_over() -> None:
    actor = tensor_actor(module_of(MASKED, spaces.Discrete(4)), CPU, explore=False)
    seen: Any = sample(MASKED, 3)
    seen["obs/action_mask"][1] = 0
    with pytest.raises(EnvError, match="allows nothing in row 1 of 3"):
        actor.step(seen)
    actor.step(seen, ends=np.array([False, True, False]))


def test_a_module_elsewhere_is_refused_with_what_to_set() -> None:
    module = module_of(BOX, spaces.Discrete(4))
    with pytest.raises(ModuleError, match=r"tensors on meta, but the weights of Network are on cpu.*device='meta'"):
        tensor_actor(module, torch.device("meta"), explore=True)
    actor = tensor_actor(module, CPU, explore=True)
    with pytest.raises(ModuleError, match="was not started"):
        actor.step(sample(BOX, 3))  # type: ignore[arg-type]
    module.to("meta")
    with pytest.raises(ModuleError, match="are on meta"):
        actor.start(np.random.default_rng(0), 3)


def test_a_module_with_an_actor_of_its_own_acts_on_the_host() -> None:
    from etude.modules.actors import RandomModule

    module = RandomModule(BOX, spaces.Discrete(4))
    actor, usual = tensor_actor(module, CPU, explore=True), module.actor(explore=True)
    assert isinstance(actor, HostActor)
    for each in (actor, usual):
        each.start(np.random.default_rng(5), 6)
    action, extras = actor.step(sample(BOX, 6))  # type: ignore[arg-type]
    wanted, others = usual.step(host_columns(sample(BOX, 6)))
    np.testing.assert_array_equal(host_columns(action)["action"], wanted["action"])
    for name, column in others.items():
        np.testing.assert_array_equal(host_columns(extras)[name], column)


class OnlyNumPy(Distribution):
    """A user's own, of before there were envs of tensors."""

    noise = act = logp = entropy = kl = lambda self, *_: None  # type: ignore[assignment]


def test_a_distribution_without_tensors_says_what_it_lacks() -> None:
    own = OnlyNumPy(spaces.Discrete(2), "action", num_inputs=2, num_noise=2, logits=())
    with pytest.raises(ModuleError, match="OnlyNumPy can't act in an env of tensors, since it has no `noise_tensor`"):
        own.noise_tensor(torch.Generator(), 1)
