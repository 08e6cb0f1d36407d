# SPDX-License-Identifier: Apache-2.0
"""Weights that come from elsewhere: a runner never takes older ones than it has."""

import copy

import pytest
import torch
from numbered_experience import module_for
from some_envs import numbered

from etude.envs import VectorArena
from etude.errors import CheckpointError, EtudeError
from etude.runners import Runner


def runner() -> Runner:
    from gymnasium.vector import AutoresetMode

    arena = VectorArena(numbered(2, AutoresetMode.NEXT_STEP), 2)
    return Runner(arena, module_for(arena), seed=1)


def filled(own: Runner, value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(weight, value) for name, weight in own.policies[None].module.state_dict().items()}


def held(own: Runner) -> float:
    (value,) = {
        value for weight in own.policies[None].module.state_dict().values() for value in weight.unique().tolist()
    }
    return value


def test_older_weights_are_refused_whatever_order_they_come_in() -> None:
    own = runner()
    taken = [own.take_weights(filled(own, number), number) for number in (3, 1, 5, 4, 5, 2)]
    assert taken == [True, False, True, False, True, False]
    assert held(own) == 5.0


def test_the_next_collection_acts_with_them() -> None:
    own, other = runner(), runner()
    weights = {name: weight + 0.5 for name, weight in own.policies[None].module.state_dict().items()}
    own.collect(num_steps=4)
    assert own.take_weights(weights, 1)
    other.policies[None].module.load_state_dict(weights)
    other.collect(num_steps=4)
    seen = torch.zeros(3, *own.policies[None].module.obs_space.shape)
    for a, b in zip(
        own.policies[None].module(seen).dist_inputs, other.policies[None].module(seen).dist_inputs, strict=True
    ):
        assert torch.equal(a, b)


def test_weights_of_another_module_are_refused_and_the_old_ones_stay() -> None:
    own = runner()
    own.take_weights(filled(own, 2.0), 2)
    weights = filled(own, 9.0)
    name = next(iter(weights))
    with pytest.raises(CheckpointError, match=f"weight `{name}` has the shape"):
        own.take_weights({**weights, name: weights[name][..., :1]}, 9)
    with pytest.raises(EtudeError, match=r"there is no module 'red'; the modules are \[None\]"):
        own.take_weights(weights, 9, "red")
    assert held(own) == 2.0
    assert own.take_weights(copy.deepcopy(weights), 3), "what failed must not count"


def test_shared_weights_are_acted_with_where_they_lie_and_only_buffers_are_copied() -> None:
    own, copied = runner(), runner()
    for each in (own, copied):
        each.policies[None].module.register_buffer("count", torch.zeros(2))
        each.collect(num_steps=4)
    weights = {name: weight + 0.25 for name, weight in own.policies[None].module.state_dict().items()}
    assert own.take_weights(weights, 1, shared=True)
    assert copied.take_weights(weights, 1)
    parameters = dict(own.policies[None].module.named_parameters())
    for name, weight in own.policies[None].module.state_dict().items():
        assert (weight.data_ptr() == weights[name].data_ptr()) == (name in parameters)
        assert torch.equal(weight, copied.policies[None].module.state_dict()[name])
    assert own.collect(num_steps=6).steps["action"].tolist() == copied.collect(num_steps=6).steps["action"].tolist()
    assert own.take_weights(filled(own, 3.0), 2)
    assert held(own) == 3.0


def test_shared_weights_of_another_dtype_are_copied() -> None:
    own = runner()
    weights = {name: weight.double() for name, weight in filled(own, 2.0).items()}
    assert own.take_weights(weights, 1, shared=True)
    assert {weight.dtype for weight in own.policies[None].module.state_dict().values()} == {torch.float32}
    assert held(own) == 2.0
