# SPDX-License-Identifier: Apache-2.0
"""Experience and batches in equal shares, one for each learner."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from etude.experience import Experience
from etude.experience.arrays import Index


def shares_of(exp: Experience, num: int, *, max_seq_len: int | None = None, burn_in: int = 0) -> list[Experience]:
    """``num`` parts that are one after the other what ``exp`` is, with equally many steps to be trained on.

    Segments are cut where that makes parts equal, within one step, as what connectors add to steps is there already.

    Args:
        exp: Prepared for the loss.
        num: How many.
        max_seq_len: Of a recurrent module: segments are cut only where its sequences would be, at multiples of it, so
            that each part begins within half a sequence of where they would be equal.
        burn_in: Of a recurrent module: steps before a cut that the next part has, too, as lookback.
    """
    if num == 1:
        return [exp]
    trained = exp.trained()
    done = np.append(0, np.cumsum(trained))
    wanted = done[-1] * np.arange(1, num) // num
    starts, begins = exp.offsets[:-1], exp.offsets[:-1] + exp.segments.lookback
    if max_seq_len is None:
        at = np.searchsorted(done, wanted, side="right") - 1  # as many before it as are wanted
        segment = np.searchsorted(starts, at, side="right") - 1
        at = np.where(at <= begins[segment], starts[segment], at)  # lookback goes with what it is for
    else:
        allowed = _cuts(exp, begins, max_seq_len)
        after = np.searchsorted(done[allowed], wanted)
        before = np.maximum(after - 1, 0)
        is_nearer = wanted - done[allowed[before]] < done[allowed[after]] - wanted
        at = allowed[np.where(is_nearer, before, after)]
    return _cut(exp, at, burn_in)


def _cuts(exp: Experience, begins: Index, max_seq_len: int) -> Index:
    """The rows that a recurrent module's sequences begin with, where no lookback is before them, and the end."""
    rows = np.arange(exp.num_steps)
    since = rows - np.repeat(begins, exp.lengths)
    is_inside = (since > 0) & (since % max_seq_len == 0)
    return np.unique(np.concatenate([exp.offsets, rows[is_inside]]))


def _cut(exp: Experience, at: Index, lookback: int) -> list[Experience]:
    bounds = np.unique(np.concatenate([exp.offsets, at]))
    parent = np.searchsorted(exp.offsets, bounds[:-1], side="right") - 1
    pieces = exp.pieces(parent, bounds[:-1], bounds[1:], lookback)
    borders = np.searchsorted(bounds, [0, *at.tolist(), exp.num_steps]).tolist()
    return [pieces[first:last] for first, last in pairwise(borders)]


def shares_of_batch(batch: Mapping[str, Any] | Experience, num: int, *, recurrent: bool) -> list[Any]:
    """``num`` parts of a batch, of equally many rows within one; for a recurrent module, of whole segments."""
    if isinstance(batch, Experience):
        if recurrent:
            return [batch[first:last] for first, last in pairwise(_evenly(len(batch), num))]
        batch = batch.steps
    borders = _evenly(len(next(iter(batch.values()))), num)
    return [{name: column[first:last] for name, column in batch.items()} for first, last in pairwise(borders)]


def _evenly(size: int, num: int) -> list[int]:
    return [size * i // num for i in range(num + 1)]
