# SPDX-License-Identifier: Apache-2.0
"""Endless batches of rows in random order, made of chunks that come in any order."""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from etude.columns import Columns
from etude.recordings.row_pool import RowPool

POOL_BYTES = 256 * 2**20
"""Rows that take more than this together are shuffled within as much; others are kept, and shuffled whole."""


def shuffled(
    chunks: Callable[[], Iterator[Columns]], batch_size: int, seed: int, most_bytes: int = POOL_BYTES
) -> Iterator[Columns]:
    """Batches of exactly ``batch_size`` rows, each row about once a pass.

    Args:
        chunks: Makes one pass over the data.
        batch_size: Rows in a batch, at least 1. Where there are fewer rows, some come twice.
        seed: The order depends on this alone.
        most_bytes: How much is held in memory, a chunk more at most.
    """
    rng = np.random.default_rng(seed)
    whole: RowPool | None = None
    while whole is None:
        pool: list[Columns] = []
        emptied = False
        for chunk in chunks():
            pool.append(chunk)
            if sum(column.nbytes for part in pool for column in part.values()) > most_bytes:
                rows = RowPool(pool)
                order = rng.permutation(len(rows))
                yield from _batches(rows, order[len(order) // 2 :], batch_size)
                pool, emptied = [rows.take(order[: len(order) // 2])], True
        rows = RowPool(pool)
        if emptied:
            yield from _batches(rows, rng.permutation(len(rows)), batch_size)
        else:
            whole = rows
    while True:
        yield from _batches(whole, rng.permutation(len(whole)), batch_size)


def _batches(rows: RowPool, order: NDArray[np.int64], batch_size: int) -> Iterator[Columns]:
    """The rows in an order, ``batch_size`` at a time; the last batch is filled up from the first."""
    filled = np.resize(order, -(-len(order) // batch_size) * batch_size)
    for at in range(0, len(filled), batch_size):
        yield rows.take(filled[at : at + batch_size])
