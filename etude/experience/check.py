# SPDX-License-Identifier: Apache-2.0
"""The rules that every Experience keeps, and errors that name what breaks them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from etude import columns as col
from etude.errors import DataError
from etude.experience.arrays import Array, describe
from etude.experience.segments import NAMES

if TYPE_CHECKING:
    from etude.experience.experience import Experience


def validate(exp: "Experience", finite: Sequence[str]) -> None:
    """See `Experience.validate`."""
    _check_offsets(exp)
    _check_lengths(exp)
    _check_segments(exp)
    _check_final_obs(exp)
    check_finite(exp, finite)


def locate(exp: "Experience", row: int) -> str:
    """Where a row is, in words: its segment, episode and step."""
    i = int(np.searchsorted(exp.offsets, row, side="right")) - 1
    t = int(exp.segments.t_start[i]) + row - int(exp.offsets[i])
    agent = exp.segments.agent_id[i]
    return f"segment {i} (episode {exp.segments.episode_id[i]!r}{f', agent {agent!r}' if agent else ''}), t {t}"


def _check_offsets(exp: "Experience") -> None:
    offsets = exp.offsets
    if offsets.dtype != np.int64 or offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0:
        raise DataError(f"offsets must be int64, one-dimensional and start at 0: {offsets[:8]} ({offsets.dtype}).")
    falling = np.flatnonzero(np.diff(offsets) <= 0)
    if len(falling):
        i = int(falling[0])
        raise DataError(
            f"segment {i}: offsets do not rise ({offsets[i]} to {offsets[i + 1]}); it needs a step or more."
        )


def _check_lengths(exp: "Experience") -> None:
    for name, column in exp.steps.items():
        if len(column) != exp.num_steps:
            raise DataError(f"column `{name}` has {len(column)} rows, but the offsets end at {exp.num_steps}.")
    for name in NAMES:
        if len(getattr(exp.segments, name)) != exp.num_segments:
            raise DataError(
                f"segments.{name} has {len(getattr(exp.segments, name))} entries for {exp.num_segments} segments."
            )
    obs = col.under(exp.steps, col.OBS)
    if set(obs) != set(exp.final_obs):
        raise DataError(f"final_obs has the columns {sorted(exp.final_obs)}, but the observations are {sorted(obs)}.")
    for name, column in exp.final_obs.items():
        if len(column) != exp.num_segments:
            raise DataError(f"final_obs `{name}` has {len(column)} rows for {exp.num_segments} segments.")


def _check_segments(exp: "Experience") -> None:
    segments = exp.segments
    for i, episode_id in enumerate(segments.episode_id):
        if not isinstance(episode_id, str):
            raise DataError(f"segment {i}: episode_id is {episode_id!r}, not a string.")
    bad = np.flatnonzero((segments.lookback < 0) | (segments.lookback > exp.lengths) | (segments.t_start < 0))
    if len(bad):
        i = int(bad[0])
        raise DataError(
            f"segment {i} (episode {segments.episode_id[i]!r}): lookback {segments.lookback[i]} or t_start "
            f"{segments.t_start[i]} can't be, with {exp.lengths[i]} steps."
        )


def _check_final_obs(exp: "Experience") -> None:
    for name, final in exp.final_obs.items():
        if describe(final) != describe(exp.steps[name]):
            raise DataError(f"final_obs `{name}` is {describe(final)}, but its column is {describe(exp.steps[name])}.")


def check_finite(exp: "Experience", finite: Sequence[str]) -> None:
    """Raise a DataError for the first number that is not finite in columns under the roots ``finite``."""
    for root in finite:
        for name, column in col.subtree(exp.steps, root).items():
            row = _first_not_finite(column)
            if row is not None:
                raise DataError(f"column `{name}` holds {_shown(column, row)} at {locate(exp, row)}.")
    if col.OBS in finite:
        for name, final in exp.final_obs.items():
            known = np.flatnonzero(exp.segments.has_final_obs)
            row = _first_not_finite(final[known])
            if row is not None:
                i = int(known[row])
                raise DataError(
                    f"final_obs `{name}` holds {_shown(final, i)} in segment {i} "
                    f"(episode {exp.segments.episode_id[i]!r})."
                )


def _first_not_finite(column: Array) -> int | None:
    values = column if isinstance(column, np.ndarray) else column.detach().cpu().numpy()
    if values.dtype.kind != "f":
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        if np.isfinite(values.sum()):
            return None  # one sum is much cheaper than a mask; where it overflows, the mask decides
    bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
    return int(bad.argmax()) if bad.any() else None


def _shown(column: Array, row: int) -> str:
    values = np.asarray(column[row]).reshape(-1)
    at = int(np.argmax(~np.isfinite(values)))
    return f"{values[at]}" + (f" in component {at}" if np.asarray(column[row]).ndim else "")
