# SPDX-License-Identifier: Apache-2.0
"""A tree of sums over weights: draws in proportion to them, and changes, both for many at a time."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.experience.arrays import Index

_FAN = 32  # children of a node: matrix products of this size cost little more than the calls that make them
_TOP = 1024  # nodes of the top level, which is looked through as a whole
_PREFIX = np.triu(np.ones((_FAN, _FAN)))  # sums @ _PREFIX are running sums


class SumTree:
    """Weights by index, and the sums of blocks of 32, of 32 blocks, and so on, up to a level of at most 1,024.

    The proportional variant of Schaul et al. 2016, "Prioritized Experience Replay", appendix B.2.1, with many children
    to a node in place of two. Weights are float32, sums float64: 4.3 bytes a weight.

    Args:
        size: How many weights there are; all are 0 at first.
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
        """float32 ``[size]``: a view; change them with `put`."""
        return self._padded[: self.size]

    @property
    def total(self) -> float:
        """The sum of all weights."""
        self._refresh()
        return float(self._levels[-1].sum(dtype=np.float64))

    def put(self, index: Index, weights: NDArray[np.floating[Any]] | float) -> None:
        """Set the weights at ``index``, which must be finite and not negative; of those given twice, the last stays."""
        self._padded[index] = weights
        self._stale.append(index)
        self._num_stale += len(index)
        if self._num_stale > self.size >> 5:  # also so that the list does not grow without draws
            self.rebuild() if self._num_stale > self.size >> 2 else self._refresh()

    def rebuild(self) -> None:
        """All sums anew from the weights; the very same as those kept up to date, bit for bit."""
        for below, sums in zip(self._levels[:-1], self._sums, strict=True):
            np.add.reduce(below.reshape(-1, _FAN), axis=1, dtype=np.float64, out=sums)
        self._stale, self._num_stale = [], 0

    def find(self, values: NDArray[np.float64]) -> Index:
        """int64 ``[num]``: for each value in ``[0, total)``, the first index at which the running sum is above it.

        Weights of 0 are never found. Values that rounding has put at the end or beyond it find the last weight that is
        not 0. The total must not be 0.
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
        """Bring the sums over changed weights up to date: each is summed again, so that errors never add up."""
        if not self._stale:
            return
        index = self._stale[0] if len(self._stale) == 1 else np.concatenate(self._stale)
        self._stale, self._num_stale = [], 0
        for below, sums in zip(self._levels[:-1], self._sums, strict=True):
            index = index // _FAN
            sums[index] = np.add.reduce(below.reshape(-1, _FAN).take(index, axis=0), axis=1, dtype=np.float64)
