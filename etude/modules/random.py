# SPDX-License-Identifier: Apache-2.0
"""RandomModule: a module that takes random actions."""

import copy

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray
from torch import nn

from etude.columns import ACTION, Columns
from etude.errors import ModuleError
from etude.modules.acting import Actor
from etude.modules.distributions import distribution_for
from etude.modules.module import Module
from etude.spaces import Space, leaves


class RandomModule(Module):
    """Samples actions like the action space's ``sample``; all choices that the action mask allows are equally likely.

    It has no parameters and can't be trained.

    Args:
        obs_space: The space of the observations.
        action_space: The space of the actions.
    """

    def __init__(self, obs_space: Space, action_space: Space) -> None:
        super().__init__(nn.Identity(), obs_space, action_space, distribution_for(action_space))

    def actor(self, *, explore: bool) -> Actor:
        """An actor that takes random actions, with or without ``explore``."""
        return _RandomActor(self)


class _RandomActor:
    def __init__(self, module: Module) -> None:
        self._dist = module.dist
        self._mask = module.mask
        self._boxes = {
            n: copy.deepcopy(b) for n, b in leaves(module.action_space, ACTION).items() if isinstance(b, Box)
        }
        self._rng: np.random.Generator | None = None

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        self._rng = rng
        for box in self._boxes.values():
            box.seed(int(rng.integers(2**31)))

    def step(
        self, obs: Columns, state: Columns | None = None, *, ends: NDArray[np.bool_] | None = None
    ) -> tuple[Columns, Columns]:
        if self._rng is None:
            raise ModuleError("this actor was not started: call its start(rng, num_rows) before step().")
        count = len(next(iter(obs.values())))
        inputs = np.zeros((count, self._dist.num_inputs), np.float32)
        if self._mask is not None:
            self._mask.apply_in_place(inputs, obs, ends)
        action = self._dist.act(inputs, self._dist.noise(self._rng, (count,)))
        for name, box in self._boxes.items():
            action[name] = np.stack([box.sample() for _ in range(count)]) if count else action[name]
        return action, {}

    def logp(self, dist_inputs: NDArray[np.float32] | None, action: Columns) -> NDArray[np.float32] | None:
        return None
