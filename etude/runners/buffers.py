# SPDX-License-Identifier: Apache-2.0
"""Preallocated columns that a runner writes its turns into: ``[slots, T, ...]``, so that segments lie in one piece."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.envs import Columns


class Buffers:
    """Columns ``[num_slots, capacity, ...]`` that grow as needed. A column is made when it is first written."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        self.num_slots = num_slots
        self.capacity = capacity
        self.columns: Columns = {}

    def add(self, name: str, dtype: type[np.generic]) -> None:
        """Make a column of one number a step, all zeros."""
        self.columns[name] = np.zeros((self.num_slots, self.capacity), dtype)

    def write(self, t: int, values: Mapping[str, NDArray[Any]]) -> None:
        """Write one turn, ``[num_slots, ...]`` for each column, at time ``t``."""
        if t >= self.capacity:
            self._grow(t + 1)
        columns = self.columns
        for name, value in values.items():
            if name not in columns:
                columns[name] = np.zeros((self.num_slots, self.capacity, *value.shape[1:]), value.dtype)
            columns[name][:, t] = value

    def _grow(self, needed: int) -> None:
        capacity = max(needed, 2 * self.capacity)
        for name, column in self.columns.items():
            grown = np.zeros((self.num_slots, capacity, *column.shape[2:]), column.dtype)
            grown[:, : self.capacity] = column
            self.columns[name] = grown
        self.capacity = capacity

    def flat(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Times ``start`` to ``stop`` of a column as ``[num_slots * (stop - start), ...]``, a slot after the other.

        A view where they are the whole buffer.
        """
        column = self.columns[name]
        return column[:, start:stop].reshape(self.num_slots * (stop - start), *column.shape[2:])

    def rows(self, name: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Some rows of a column seen as ``[num_slots * capacity, ...]``: a view where they are all of them."""
        column = self.columns[name]
        flat = column.reshape(-1, *column.shape[2:])
        return flat if len(rows) == len(flat) else flat.take(rows, axis=0)
