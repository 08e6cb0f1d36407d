# SPDX-License-Identifier: Apache-2.0
"""Segments as rows of rectangular columns, for modules that walk along time."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude.experience import arrays
from etude.experience.arrays import Array
from etude.experience.segments import Segments

if TYPE_CHECKING:
    from etude.experience.experience import Experience


class Padded(NamedTuple):
    """Columns ``[B, T, ...]``: a row a segment, its steps from the left, zeros (None for strings) behind them."""

    steps: dict[str, Array]
    """The columns, each ``[B, T, ...]``."""
    mask: NDArray[np.bool_]
    """bool ``[B, T]``: True on steps to train on; False on padding and on lookback."""
    lengths: NDArray[np.int64]
    """int64 ``[B]``: the steps of each row, lookback included."""
    segments: Segments
    """The B segments."""
    final_obs: dict[str, Array]
    """``[B, ...]``: the observation after each row's last step."""


def pad(exp: "Experience", max_len: int | None = None) -> Padded:
    """Pad segments to the longest of them; those over ``max_len`` are cut first, without overlap."""
    if max_len is not None and exp.num_segments and int(exp.lengths.max()) > max_len:
        exp = exp.cut(max_len)
    lengths = exp.lengths
    width = int(lengths.max()) if exp.num_segments else 0
    rows = exp.segment_of_step()
    flat = rows * width + (np.arange(exp.num_steps) - exp.offsets[:-1][rows])
    steps = {}
    for name, column in exp.steps.items():
        padded = arrays.zeros(exp.num_segments * width, column)
        arrays.put(padded, flat, column)
        steps[name] = padded.reshape((exp.num_segments, width, *column.shape[1:]))
    mask = np.zeros(exp.num_segments * width, bool)
    mask[flat] = exp.trained()
    return Padded(steps, mask.reshape(exp.num_segments, width), lengths, exp.segments, exp.final_obs)
