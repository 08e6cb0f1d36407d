# SPDX-License-Identifier: Apache-2.0
"""Segments put into parts of bounded size, and the numbers in a part looked at."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.experience import Experience
from etude.filesystems import AnyPath
from etude.recordings.formats.parts import MAX_ROWS, Problem


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


class NotFinite(NamedTuple):
    """NaN or infinity in a column of a part."""

    segment: int
    """The first segment with it, and the step in that."""
    step: int
    column: str
    what: str
    rows: int
    """How many rows have it."""

    def problem(self, where: str, file: AnyPath | str, row: int) -> Problem:
        """As a Problem at a place, in words and as a row (from 0) of a file."""
        more = f" ({self.rows:,} rows like it)" if self.rows > 1 else ""
        text = f"{where}: column `{self.column}` {self.what}{more}. Leave the episode out, or mend what wrote it."
        return Problem("nan", text, str(file), row, self.column, self.rows, True)


def not_finite(exp: Experience) -> Iterator[NotFinite]:
    """What is not finite in observations, actions and rewards, the final observations among them."""
    for root in (col.OBS, col.ACTION, col.REWARD):
        for name, values in col.subtree(exp.steps, root).items():
            rows = bad_rows(np.asarray(values))
            if len(rows):
                i = int(np.searchsorted(exp.offsets, rows[0], side="right")) - 1
                value = np.asarray(values)[rows[0]]
                yield NotFinite(i, int(rows[0] - exp.offsets[i]), name, f"holds {shown(value)}", len(rows))
    known = np.flatnonzero(exp.segments.has_final_obs)
    for name, values in exp.final_obs.items():
        bad = known[bad_rows(np.asarray(values)[known])]
        if len(bad):
            what = f"holds {shown(np.asarray(values)[bad[0]])} in the observation that follows"
            yield NotFinite(int(bad[0]), int(exp.lengths[bad[0]]) - 1, name, what, len(bad))


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
