# SPDX-License-Identifier: Apache-2.0
"""Log: what slots showed and did, a row each time one of them had its turn, in order of arrival."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.columns import Columns


class Log:
    """Columns ``[capacity, ...]`` that grow as needed, filled up to ``size``. A column is made when first written."""

    def __init__(self, capacity: int = 256) -> None:
        self.columns: Columns = {}
        self.size = 0
        self._capacity = capacity

    def append(self, count: int, values: Mapping[str, NDArray[Any]]) -> int:
        """Add ``count`` rows, ``values`` in them, and give the first one's number.

        Other flags are False there; what other columns hold means nothing until it is written.
        """
        start = self.size
        self.size = stop = start + count
        if stop > self._capacity:
            self._grow(stop)
        self.write(slice(start, stop), values)
        return start

    def write(self, rows: slice, values: Mapping[str, NDArray[Any]]) -> None:
        """Write columns of some rows."""
        columns = self.columns
        for name, value in values.items():
            if name not in columns:
                columns[name] = np.zeros((self._capacity, *value.shape[1:]), value.dtype)
            columns[name][rows] = value

    def flag(self, name: str) -> NDArray[np.bool_]:
        """A column of flags, made if there is none yet: False in all rows."""
        if name not in self.columns:
            self.columns[name] = np.zeros(self._capacity, bool)
        return self.columns[name]

    def _grow(self, needed: int) -> None:
        self._capacity = max(needed, 2 * self._capacity)
        for name, column in self.columns.items():
            grown = np.zeros((self._capacity, *column.shape[1:]), column.dtype)
            grown[: len(column)] = column
            self.columns[name] = grown

    def take(self, name: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """A copy of some rows of a column."""
        return self.columns[name].take(rows, axis=0)

    def keep(self, rows: NDArray[np.int64]) -> None:
        """Leave only ``rows``, in this order."""
        for column in self.columns.values():
            column[: len(rows)] = column.take(rows, axis=0)
            if column.dtype == bool:
                column[len(rows) : self.size] = False
        self.size = len(rows)

    def state_dict(self) -> Columns:
        """The filled rows, copied."""
        return {name: column[: self.size].copy() for name, column in self.columns.items()}

    def load_state_dict(self, columns: Columns, size: int) -> None:
        """Hold exactly ``size`` rows of ``columns``; ValueError where these are no such columns."""
        for name, column in columns.items():
            if column.dtype.kind not in "biuf" or len(column) != size:
                raise ValueError(f"`{name}` does not hold {size} rows of numbers")
        self.columns, self.size = {}, 0
        self.append(size, columns)
