# SPDX-License-Identifier: Apache-2.0
"""Rows that are context only, taken out of Experience."""

import numpy as np

from etude.experience.arrays import ranges, take
from etude.experience.experience import Experience, offsets_of


def without_lookback(exp: Experience) -> Experience:
    """The same without rows that are context only, and without segments that hold nothing else."""
    lookback = exp.segments.lookback
    if not lookback.any():
        return exp
    kept = np.flatnonzero(exp.lengths > lookback)
    starts, lengths = (exp.offsets[:-1] + lookback)[kept], (exp.lengths - lookback)[kept]
    rows, segments = ranges(starts, lengths), exp.segments[kept]
    segments = segments.replace(t_start=segments.t_start + segments.lookback, lookback=np.zeros(len(kept), np.int64))
    return Experience(
        {name: take(column, rows) for name, column in exp.steps.items()},
        offsets_of(lengths),
        segments,
        {name: take(column, kept) for name, column in exp.final_obs.items()},
    )
