# SPDX-License-Identifier: Apache-2.0
"""Priorities: how often each step of a replay is drawn, and how much it weighs then."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from etude.errors import DataError, SettingsError
from etude.experience.arrays import Index
from etude.experience.sum_tree import SumTree
from etude.settings import settings

_LEAST, _MOST = 1e-30, 1e30  # what a float32 can hold of weights, and a sum of many of them


@settings
class Priorities:
    """How steps are drawn in proportion to priorities (Schaul et al. 2016, "Prioritized Experience Replay").

    Step i has the probability ``p_i ** alpha / sum_k p_k ** alpha``. A step that was never given a priority has the
    greatest one there has been.
    """

    alpha: float = 0.6
    """How much priorities count, from 0 on; 0 draws uniformly. The paper's value for the proportional variant."""
    beta: float = 0.4
    """How much the weights make up for it at first, from 0 to 1. To anneal it, set `Replay.beta` at any time."""
    epsilon: float = 1e-6
    """Added to each priority that is given, so that each step can be drawn again."""


class Prioritized:
    """The priorities of the steps in ``capacity`` storage rows."""

    def __init__(self, priorities: Priorities, capacity: int) -> None:
        for name, least, most in (("alpha", 0.0, 100.0), ("beta", 0.0, 1.0), ("epsilon", _LEAST, _MOST)):
            value = getattr(priorities, name)
            if not least <= value <= most:
                raise SettingsError(f"Priorities.{name} is {value}, but it must be from {least:g} to {most:g}.")
        self.alpha, self.beta, self.epsilon = priorities.alpha, priorities.beta, priorities.epsilon
        self.tree = SumTree(capacity)
        """The weight of each row, which is its priority to the power of alpha; 0 where there is nothing to draw."""
        self._greatest = 1.0

    def add(self, start: int, num: int, unseen: list[int], seen: list[int]) -> None:
        """Steps were added: see `etude.experience.replay_storage.Added`."""
        self.tree.put(np.arange(start, start + num) % self.tree.size, self._greatest)
        if unseen:
            self.tree.put(np.array(unseen), 0.0)
        if seen:
            self.tree.put(np.array(seen), self._greatest)

    def draw(self, num: int, rng: np.random.Generator) -> tuple[Index, NDArray[np.float32]]:
        """Rows, one from each of ``num`` equal shares of the sum, and their weights in a loss."""
        rows = self.tree.find((np.arange(num) + rng.random(num)) * (self.tree.total / num))
        weights = self.tree.weights.take(rows).astype(np.float64)
        # (N * weight / total) ** -beta over the greatest of these, that of the least weight, in which the rest cancels
        return rows, ((weights / weights.min(initial=_MOST)) ** -self.beta).astype(np.float32)

    def update(self, rows: Index, priority: NDArray[np.float64]) -> None:
        """Set the priorities of rows; those that can't be drawn for now are passed over."""
        can = self.tree.weights.take(rows) > 0
        rows, priority = rows[can], priority[can]
        with np.errstate(over="ignore"):
            weights = ((priority + self.epsilon) ** self.alpha).clip(_LEAST, _MOST)
        self.tree.put(rows, weights)
        self._greatest = max(self._greatest, float(weights.max(initial=0.0)))

    def state_dict(self, num: int) -> dict[str, Any]:
        """The weights of the first ``num`` rows, which are all in use, copied, and the rest."""
        return {"weights": self.tree.weights[:num].copy(), "greatest": self._greatest, "beta": self.beta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        weights = state["weights"]
        self.tree.weights[: len(weights)] = weights
        self.tree.weights[len(weights) :] = 0.0
        self.tree.rebuild()
        self._greatest, self.beta = float(state["greatest"]), float(state["beta"])


def checked(index: ArrayLike, priority: ArrayLike, num_added: int) -> tuple[Index, NDArray[np.float64]]:
    """Indices of steps and their new priorities as arrays; a DataError where they can't be."""
    which, given = np.asarray(index, np.int64), np.asarray(priority, np.float64)
    if which.shape != given.shape or which.ndim != 1:
        raise DataError(f"indices of shape {which.shape}, priorities of shape {given.shape}: give one for each step.")
    fine = (given >= 0) & (given < np.inf)
    if not fine.all():
        bad = int(fine.argmin())
        raise DataError(f"priority {bad} is {given[bad]}: priorities are finite and from 0 on; give absolute errors.")
    there = (which >= 0) & (which < num_added)
    if not there.all():
        raise DataError(f"there is no step {which[there.argmin()]}: give the `index` that sample gave.")
    return which, given
