# SPDX-License-Identifier: Apache-2.0
"""Noisy layers against the equations of Fortunato et al. 2018; what acts with them."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from etude.modules import NetworkConfig, make_module
from etude.modules.actors import NoisyActor, NoisyLinear, NoisyNetwork

BOX = spaces.Box(-1, 1, (3,), np.float32)


def root(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([math.copysign(math.sqrt(abs(one)), one) for one in x.tolist()])


def test_a_layer_is_that_of_the_paper() -> None:
    """Eq. 9 to 11, and the start of section 3.2."""
    layer = NoisyLinear(5, 3)
    assert bool((layer.weight.abs() <= 5**-0.5).all())
    assert bool((layer.weight_std == 0.5 * 5**-0.5).all())
    assert bool((layer.bias_std == 0.5 * 5**-0.5).all())
    with torch.no_grad():
        layer.weight_std.uniform_()
        layer.bias_std.uniform_()
    x = torch.randn(4, 5)
    torch.manual_seed(0)
    of_inputs, of_outputs = root(torch.randn(5)), root(torch.randn(3))
    weight = layer.weight + layer.weight_std * torch.outer(of_outputs, of_inputs)
    bias = layer.bias + layer.bias_std * of_outputs
    torch.manual_seed(0)
    y = layer(x)
    torch.testing.assert_close(y, x @ weight.T + bias)
    y.sum().backward()
    assert all(p.grad is not None and bool((p.grad != 0).any()) for p in layer.parameters())
    torch.testing.assert_close(layer.eval()(x), x @ layer.weight.T + layer.bias)
    layer.noise = (of_inputs, of_outputs)
    torch.testing.assert_close(layer(x), y)


def module(**given: Any) -> Any:
    config = NetworkConfig(**{"hidden": (6,), **given})
    return make_module(lambda obs, action: NoisyNetwork(obs, action, config), BOX, spaces.Discrete(2))


@pytest.mark.parametrize("given", [{}, {"separate": False}, {"recurrent": "gru"}, {"hidden": ()}])
def test_all_layers_behind_the_encoder_are_noisy(given: Any) -> None:
    made = module(**given)
    linear = [part for part in made.modules() if isinstance(part, torch.nn.Linear)]
    assert linear
    assert all(isinstance(part, NoisyLinear) for part in linear)
    obs = torch.randn(4, 7, 3) if made.recurrent else torch.randn(4, 3)
    made.train()
    assert not torch.equal(made(obs).dist_inputs, made(obs).dist_inputs)
    assert not torch.equal(made(obs).value, made(obs).value)
    made.eval()
    assert torch.equal(made(obs).dist_inputs, made(obs).dist_inputs)


def test_what_acts_has_other_noise_in_each_step_and_none_is_left() -> None:
    made = module().eval()
    obs = {"obs": np.ones((4, 3), np.float32)}
    said = []
    for _ in range(2):
        actor = NoisyActor(made)
        actor.start(np.random.default_rng(0), 4)
        said.append([actor.step(obs)[1]["dist_inputs"] for _ in range(3)])
    np.testing.assert_array_equal(said[0], said[1])  # the generator alone decides
    assert all((step == step[0]).all() for step in said[0])  # of all rows of a step
    assert len({step.tobytes() for step in said[0]}) == 3
    assert not any(isinstance(part, NoisyLinear) and part.noise for part in made.modules())
