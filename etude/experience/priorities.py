# SPDX-License-Identifier: Apache-2.0
"""Prioritized sampling from a replay buffer: priorities, importance weights and the sum tree."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from etude.errors import CheckpointError, DataError
from etude.experience.arrays import Index
from etude.settings import FloatAbove0, FloatFrom0, UnitInterval, settings

_LEAST, _MOST = 1e-30, 1e30  # weights and sums of many weights within float32's range
_FAN = 32  # children of a node; matrix products of this size cost little more than the call itself
_TOP = 1024  # nodes of the top level, which is searched as a whole
_PREFIX = np.triu(np.ones((_FAN, _FAN)))  # sums @ _PREFIX are running sums


@settings
class Priorities:
    """Settings of prioritized sampling (Schaul et al. 2016, "Prioritized Experience Replay").

    Step i is sampled with the probability ``p_i ** alpha / sum_k p_k ** alpha``. A new step has the greatest priority
    so far.
    """

    alpha: FloatFrom0 = 0.6
    """Exponent of the priorities, at least 0; 0 samples uniformly. Default: the paper's for proportional priorities."""
    beta: UnitInterval = 0.4
    """Exponent of the importance weights at the start, 0 to 1. To anneal it, set `Replay.beta` at any time."""
    epsilon: FloatAbove0 = 1e-6
    """Added to each given priority, above 0, so that a step of priority 0 can still be sampled."""


class Prioritized:
    """The priorities of the steps in ``capacity`` storage rows."""

    def __init__(self, priorities: Priorities, capacity: int) -> None:
        self.alpha, self.beta, self.epsilon = priorities.alpha, priorities.beta, priorities.epsilon
        self.tree = SumTree(capacity)
        """The weight of each row: its priority to the power of alpha; 0 for rows without a step."""
        self._greatest = 1.0

    def add(self, start: int, num: int) -> None:
        """Give ``num`` rows from ``start`` on the greatest weight so far. After the last row comes row 0."""
        self.tree.put(np.arange(start, start + num) % self.tree.size, self._greatest)

    def draw(self, num: int, rng: np.random.Generator) -> tuple[Index, NDArray[np.float32]]:
        """Sample a row from each of ``num`` equal shares of the total weight.

        Returns:
            The rows, int64 ``[num]``, and their importance weights, float32 ``[num]``, divided by their maximum.
        """
        rows = self.tree.find((np.arange(num) + rng.random(num)) * (self.tree.total / num))
        weights = self.tree.weights.take(rows).astype(np.float64)
        # (N * weight / total) ** -beta divided by its maximum, which belongs to the least weight: N and total cancel
        return rows, ((weights / weights.min(initial=_MOST)) ** -self.beta).astype(np.float32)

    def update(self, rows: Index, priority: NDArray[np.float64]) -> None:
        """Set the priorities of rows, finite and at least 0."""
        with np.errstate(over="ignore"):
            weights = ((priority + self.epsilon) ** self.alpha).clip(_LEAST, _MOST)
        self.tree.put(rows, weights)
        self._greatest = max(self._greatest, float(weights.max(initial=0.0)))

    def state_dict(self, num: int) -> dict[str, Any]:
        """A copy of the weights of the first ``num`` rows, which are all in use, and the other state."""
        weights = self.tree.weights[:num].copy()
        return {"weights": weights, "greatest": self._greatest, "alpha": self.alpha, "beta": self.beta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`. Weights that were saved with another alpha are converted to this one.

        Raises:
            CheckpointError: the state was saved with an alpha of 0, and this alpha is not 0.
        """
        weights, greatest = state["weights"], float(state["greatest"])
        saved = float(state.get("alpha", self.alpha))  # older states lack it
        if saved != self.alpha:
            if not saved:
                raise CheckpointError(
                    f"the replay was saved with a priority alpha of 0, which keeps no priorities, but this one has "
                    f"{self.alpha:g}: make it with 0."
                )
            power = self.alpha / saved
            with np.errstate(over="ignore"):
                changed = (np.append(weights, greatest).astype(np.float64) ** power).clip(_LEAST, _MOST)
            weights, greatest = changed[:-1], float(changed[-1])
        self.tree.weights[: len(weights)] = weights
        self.tree.weights[len(weights) :] = 0.0
        self.tree.rebuild()
        self._greatest, self.beta = greatest, float(state["beta"])


def checked(index: ArrayLike, priority: ArrayLike, num_added: int) -> tuple[Index, NDArray[np.float64]]:
    """Indices and new priorities of steps as arrays; raises a DataError if they are invalid."""
    which, given = np.asarray(index, np.int64), np.asarray(priority, np.float64)
    if which.shape != given.shape or which.ndim != 1:
        raise DataError(f"indices of shape {which.shape}, priorities of shape {given.shape}: give one for each step.")
    fine = (given >= 0) & (given < np.inf)
    if not fine.all():
        bad = int(fine.argmin())
        raise DataError(
            f"priority {bad} is {given[bad]}: priorities must be finite and at least 0; give absolute errors."
        )
    there = (which >= 0) & (which < num_added)
    if not there.all():
        raise DataError(f"there is no step {which[there.argmin()]}: give the `index` that sample returned.")
    return which, given


class SumTree:
    """Weights by index, with the sums of blocks of 32, of 32 blocks, and so on, up to a level of at most 1,024 sums.

    This is the proportional variant of Schaul et al. 2016, "Prioritized Experience Replay", appendix B.2.1, with many
    children per node in place of two. Weights are float32, sums float64: 4.3 bytes per weight.

    Args:
        size: The number of weights; all are 0 at first.
    """

    def __init__(self, size: int) -> None:
        shape = [size]
        while shape[-1] > _TOP:
            shape.append(-(-shape[-1] // _FAN))
        rows = shape[-1]
        self._sums: list[NDArray[Any]] = []
        for _ in shape[1:]:
            self._sums.insert(0, np.zeros(rows))
            rows *= _FAN
        self._padded = np.zeros(rows, np.float32)
        self._levels: list[NDArray[Any]] = [self._padded, *self._sums]
        self._stale: list[Index] = []
        self._num_stale = 0
        self.size = size

    @property
    def weights(self) -> NDArray[np.float32]:
        """float32 ``[size]``: a view; change the weights only with `put`."""
        return self._padded[: self.size]

    @property
    def total(self) -> float:
        """The sum of all weights."""
        self._refresh()
        return float(self._levels[-1].sum(dtype=np.float64))

    def put(self, index: Index, weights: NDArray[np.floating[Any]] | float) -> None:
        """Set the weights at ``index``, finite and at least 0. If an index occurs twice, the last weight counts."""
        self._padded[index] = weights
        self._stale.append(index)
        self._num_stale += len(index)
        if self._num_stale > self.size >> 5:  # without draws, the list must not grow forever
            self.rebuild() if self._num_stale > self.size >> 2 else self._refresh()

    def rebuild(self) -> None:
        """Recompute all sums from the weights. They are bit for bit the sums that updates give."""
        for below, sums in zip(self._levels[:-1], self._sums, strict=True):
            np.add.reduce(below.reshape(-1, _FAN), axis=1, dtype=np.float64, out=sums)
        self._stale, self._num_stale = [], 0

    def find(self, values: NDArray[np.float64]) -> Index:
        """int64 ``[num]``: for each value in ``[0, total)``, the first index whose running sum exceeds it.

        Weights of 0 are never found. Values at or beyond the end, due to rounding, find the last weight that is not 0.
        The total must not be 0.
        """
        self._refresh()
        running = self._levels[-1].cumsum(dtype=np.float64)
        values = np.minimum(values, np.nextafter(running[-1], 0.0))
        node: Index = running.searchsorted(values, side="right")
        if not self._sums:
            return node.astype(np.int64, copy=False)
        values = values - np.append(0.0, running).take(node)
        first = np.arange(0, len(values) * _FAN, _FAN)
        for level in self._levels[-2::-1]:
            block = level.reshape(-1, _FAN).take(node, axis=0)
            running = block.astype(np.float64, copy=False) @ _PREFIX
            values = np.minimum(values, np.nextafter(running[:, -1], 0.0))
            child = (running > values[:, None]).argmax(axis=1)
            if level is not self._padded:
                at = first + child
                values = np.maximum(values - running.reshape(-1).take(at) + block.reshape(-1).take(at), 0.0)
            node = node * _FAN + child
        return node

    def _refresh(self) -> None:
        """Recompute the sums over changed weights, in full, so that rounding errors don't accumulate."""
        if not self._stale:
            return
        index = self._stale[0] if len(self._stale) == 1 else np.concatenate(self._stale)
        self._stale, self._num_stale = [], 0
        for below, sums in zip(self._levels[:-1], self._sums, strict=True):
            index = index // _FAN
            sums[index] = np.add.reduce(below.reshape(-1, _FAN).take(index, axis=0), axis=1, dtype=np.float64)
