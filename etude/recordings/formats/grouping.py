# SPDX-License-Identifier: Apache-2.0
"""Segments put into parts of bounded size, and numbers that are not finite."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.recordings.format import MAX_ROWS


def grouped(lengths: NDArray[np.int64], limit: int = MAX_ROWS) -> NDArray[np.int64]:
    """Bounds of groups of consecutive segments of at most ``limit`` rows; a longer segment is alone in its group."""
    stops = np.cumsum(lengths)
    bounds = [0]
    while bounds[-1] < len(lengths):
        before = int(stops[bounds[-1] - 1]) if bounds[-1] else 0
        bounds.append(max(int(np.searchsorted(stops, before + limit, side="right")), bounds[-1] + 1))
    return np.array(bounds, np.int64)


def cut_long(
    offsets: NDArray[np.int64], limit: int = MAX_ROWS
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Pieces of at most ``limit`` rows: the segment that each is of, its first row, and the row after its last."""
    count = -(-np.diff(offsets) // limit)
    parent = np.repeat(np.arange(len(count)), count)
    nth = np.arange(len(parent)) - np.repeat(np.cumsum(count) - count, count)
    start = offsets[:-1][parent] + nth * limit
    return parent, start, np.minimum(start + limit, offsets[1:][parent])


def bad_rows(values: NDArray[Any]) -> NDArray[np.int64]:
    """The rows that hold NaN or infinity; where there are none, one sum tells it."""
    if values.dtype.kind != "f" or not len(values):
        return np.zeros(0, np.int64)
    with np.errstate(invalid="ignore", over="ignore"):
        if np.isfinite(values.sum()):
            return np.zeros(0, np.int64)
    return np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))


def shown(value: Any) -> str:
    """The first number of a row that is not finite, and its component."""
    flat = np.asarray(value).reshape(-1)
    at = int(np.argmax(~np.isfinite(flat)))
    return f"{flat[at]}" + (f" in component {at}" if np.asarray(value).ndim else "")
