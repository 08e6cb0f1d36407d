# SPDX-License-Identifier: Apache-2.0
"""Random actions: a module that takes only these, and a module that takes them at first."""

import copy

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray
from torch import nn

from etude.columns import ACTION, STATE_OUT, Columns, is_under
from etude.modules.acting import Actor, SamplingActor
from etude.modules.distributions import distribution_for
from etude.modules.module import Module
from etude.spaces import Space, choices_of, leaf_shape, leaves


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


class _RandomActor(SamplingActor):
    def __init__(self, module: Module) -> None:
        super().__init__(module.dist, explore=True)
        self._mask = module.mask
        self._leaves = leaves(module.action_space, ACTION)
        self._boxes = {name: copy.deepcopy(leaf) for name, leaf in self._leaves.items() if isinstance(leaf, Box)}

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        super().start(rng, num_rows)
        for box in self._boxes.values():
            box.seed(int(rng.integers(2**31)))

    def step(
        self, obs: Columns, state: Columns | None = None, *, ends: NDArray[np.bool_] | None = None
    ) -> tuple[Columns, Columns]:
        count = len(next(iter(obs.values())))
        inputs = np.zeros((count, self._dist.num_inputs), np.float32)
        if self._mask is not None:
            self._mask.apply_in_place(inputs, obs, ends)
        action = self._dist.act(inputs, self._dist.noise(self.rng, (count,)))
        for name, box in self._boxes.items():
            action[name] = np.stack([box.sample() for _ in range(count)]) if count else action[name]
        return action, {}

    def logp(self, dist_inputs: NDArray[np.float32] | None, action: Columns) -> NDArray[np.float32] | None:
        """The log-probabilities, or log-densities, of random actions; None if a mask may forbid choices, or if there is
        a Box without bounds."""
        if self._mask is not None or not all(box.is_bounded() for box in self._boxes.values()):
            return None
        logp = -sum(_log_size(leaf) for leaf in self._leaves.values())
        return np.full(len(next(iter(action.values()))), logp, np.float32)


class RandomFirstModule(Module):
    """Mixin for modules that can act at random at first, as the start of a replay requires; inherit from it and
    another.

    Attributes:
        acts_at_random: Whether exploring actions are drawn from the whole action space instead of the policy.
    """

    acts_at_random = False

    def actor(self, *, explore: bool) -> Actor:
        """The actor; if it explores, it acts at random as long as ``acts_at_random`` is set."""
        usual = super().actor(explore=explore)
        return _RandomFirstActor(self, usual) if explore else usual


class _RandomFirstActor:
    """Acts at random as long as the module's ``acts_at_random`` is set."""

    def __init__(self, module: RandomFirstModule, usual: Actor) -> None:
        self._module = module
        self._usual = usual
        self._random = RandomModule(module.obs_space, module.action_space).actor(explore=True)

    @property
    def _actor(self) -> Actor:
        return self._random if self._module.acts_at_random else self._usual

    def start(self, rng: np.random.Generator, num_rows: int) -> None:
        self._actor.start(rng, num_rows)
        if self._module.acts_at_random and self._module.recurrent:
            self._usual.start(rng, num_rows)

    def step(
        self, obs: Columns, state: Columns | None = None, *, ends: NDArray[np.bool_] | None = None
    ) -> tuple[Columns, Columns]:
        """See `Actor.step`; the state of a recurrent policy is updated during random actions, too."""
        action, extras = self._actor.step(obs, state, ends=ends)
        if self._module.acts_at_random and self._module.recurrent:
            _, usual = self._usual.step(obs, state, ends=ends)
            extras |= {name: column for name, column in usual.items() if is_under(name, STATE_OUT)}
        return action, extras

    def logp(self, dist_inputs: NDArray[np.float32] | None, action: Columns) -> NDArray[np.float32] | None:
        return self._actor.logp(dist_inputs, action)


def _log_size(leaf: Space) -> float:
    """The logarithm of the number of choices, or of the volume of a Box of floats."""
    if isinstance(leaf, Box):
        return float(np.log(leaf.high.astype(np.float64) - leaf.low.astype(np.float64)).sum())
    choices = choices_of(leaf)
    assert choices is not None  # only Boxes have none
    return float(np.log(np.broadcast_to(choices[1], leaf_shape(leaf))).sum())
