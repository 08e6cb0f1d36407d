# SPDX-License-Identifier: Apache-2.0
"""Rows that lie in several parts, taken at random as if they lay in one."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from etude.columns import Columns
from etude.experience.experience import offsets_of

LARGE_ROW: Final = 4096
"""Bytes from which on a row is copied in the time that it takes to look up where it is."""

BLOCK_BYTES: Final = 8 * 2**20
BLOCK_ROWS: Final = 16_384
BLOCK_BATCHES: Final = 16
"""Rows are gathered and handed between threads in blocks: large enough to cost little, small enough to hold."""


def rows_of_block(row_bytes: int, batch_size: int) -> int:
    """The most rows of a block, at least 1."""
    return max(1, min(BLOCK_BYTES // row_bytes, max(BLOCK_BATCHES * batch_size, BLOCK_ROWS)))


class RowPool:
    """The rows of some parts, one after the other. Columns of large rows, such as images, stay where they are.

    Args:
        parts: At least one, with the same columns. They must not be written to while the pool is in use.
    """

    def __init__(self, parts: Sequence[Columns]) -> None:
        self._columns = {name: _pieces([part[name] for part in parts]) for name in parts[0]}
        lengths = [len(next(iter(part.values()))) if part else 0 for part in parts]
        self._offsets = offsets_of(np.array(lengths, np.int64))

    def __len__(self) -> int:
        return int(self._offsets[-1])

    @property
    def row_bytes(self) -> int:
        """The bytes of one row of all columns, at least 1."""
        return sum(pieces[0][:1].nbytes for pieces in self._columns.values()) or 1

    def take(self, index: NDArray[np.int64]) -> Columns:
        """A copy of the rows ``index``, in that order."""
        return {name: self._taken(pieces, index) for name, pieces in self._columns.items()}

    def blocks(self, index: NDArray[np.int64], batch_size: int) -> Iterator[Columns]:
        """A copy of the rows ``index``, in that order, in blocks of whole batches and bounded size."""
        step = max(1, rows_of_block(self.row_bytes, batch_size) // batch_size) * batch_size
        for at in range(0, len(index), step):
            yield self.take(index[at : at + step])

    def fitting(self, index: NDArray[np.int64], rows: int) -> int:
        """How many of ``index`` have at most ``rows`` rows together."""
        return min(rows, len(index))

    def _taken(self, pieces: list[NDArray[Any]], index: NDArray[np.int64]) -> NDArray[Any]:
        if len(pieces) == 1:
            return pieces[0].take(index, axis=0)
        part = np.searchsorted(self._offsets, index, side="right") - 1
        out = np.empty((len(index), *pieces[0].shape[1:]), pieces[0].dtype)
        for i, (p, row) in enumerate(zip(part.tolist(), (index - self._offsets[part]).tolist(), strict=True)):
            out[i] = pieces[p][row]
        return out


def _pieces(columns: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """A column of several parts as one array, or as it is where rows are large."""
    if len(columns) == 1:
        return columns
    is_alike = len({(column.dtype, column.shape[1:]) for column in columns}) == 1
    if is_alike and all(column[:1].nbytes >= LARGE_ROW for column in columns):
        return columns
    return [np.concatenate(columns)]
