# SPDX-License-Identifier: Apache-2.0
"""Steps that can't be learned from: found in a piece of Experience, and cut out of it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.experience import Experience
from etude.experience.arrays import Index, ranges, take
from etude.experience.experience import offsets_of
from etude.spaces import Space

Mask = NDArray[np.bool_]


class Found(NamedTuple):
    """A fault of some rows."""

    kind: str
    """As in `etude.recordings.Problem`: ``nan``, ``out_of_space`` or ``no_final_obs``."""
    column: str
    rows: Index
    """The rows, rising; for a final observation, the last rows of its segments."""
    what: str
    """What the first of them is, in words."""
    harmless: bool = False
    """It matters only to those who ask for it: ``next_obs`` after a segment that was truncated."""

    @property
    def is_final(self) -> bool:
        """Whether it is about observations that follow the last step of a segment."""
        return col.is_under(self.column, col.FINAL_OBS)


def found_in(exp: Experience, leaves: Mapping[str, Space]) -> Iterator[Found]:
    """Every fault of the columns that are there: of observations, actions, rewards and final observations.

    Args:
        exp: What to look at. One sum over each column tells that it is finite; only where not, rows are looked for.
        leaves: The simple spaces of observations and actions by column.
    """
    last = exp.offsets[1:] - 1
    known = np.flatnonzero(exp.segments.has_final_obs)
    for name, values in exp.steps.items():
        if col.is_under(name, col.OBS) or col.is_under(name, col.ACTION) or name == col.REWARD:
            yield from _of_values(name, np.asarray(values), leaves.get(name))
    for name, values in exp.final_obs.items():
        renamed = col.FINAL_OBS + name[len(col.OBS) :]
        for found in _of_values(renamed, np.asarray(values)[known], leaves.get(name)):
            yield found._replace(rows=last[known[found.rows]])
    is_unknown = ~exp.segments.has_final_obs & ~exp.segments.terminated
    for harmless, how in ((False, "goes on"), (True, "was truncated")):
        unknown = np.flatnonzero(is_unknown & (exp.segments.truncated == harmless))
        if exp.final_obs and len(unknown):
            what = f"is not known after the last step of episode {exp.segments.episode_id[unknown[0]]!r}, which {how}"
            name = next(iter(col.renamed(exp.final_obs, col.OBS, col.FINAL_OBS)))
            yield Found("no_final_obs", name, last[unknown], what, harmless)


def _of_values(name: str, values: NDArray[Any], leaf: Space | None) -> Iterator[Found]:
    rows = bad_rows(values)
    if len(rows):
        yield Found("nan", name, rows, "holds " + shown(values[rows[0]]).replace("nan", "NaN"))
    outside = outside_of(values, leaf)
    if outside is not None and len(outside):
        what = f"is {values[outside[0]]}, outside its space {leaf}"
        yield Found("out_of_space", name, outside, what)


def outside_of(values: NDArray[Any], leaf: Space | None) -> Index | None:
    """The rows of a discrete column that are outside their space; None where it is not discrete."""
    if isinstance(leaf, spaces.Discrete):
        low, high = int(leaf.start), int(leaf.start + leaf.n) - 1
    elif isinstance(leaf, spaces.MultiDiscrete):
        low, high = leaf.start, leaf.start + leaf.nvec - 1  # type: ignore[assignment]
    elif isinstance(leaf, spaces.MultiBinary):
        low, high = 0, 1
    else:
        return None
    if not len(values) or values.dtype == object:
        return np.zeros(0, np.int64)
    if isinstance(low, int) and low <= values.min() and values.max() <= high:
        return np.zeros(0, np.int64)
    return np.flatnonzero(((values < low) | (values > high)).reshape(len(values), -1).any(axis=1))


def steps_lost(exp: Experience, found: Found) -> Index:
    """The steps that have to go for a fault, rising.

    Those with it; the step before a bad observation, whose outcome it is; the last step of a segment where what
    follows is not known, unless the episode terminated there.
    """
    segment = np.searchsorted(exp.offsets, found.rows, side="right") - 1
    if found.is_final:
        return found.rows[~exp.segments.terminated[segment]]
    if not col.is_under(found.column, col.OBS):
        return found.rows
    before = found.rows[found.rows > exp.offsets[segment]] - 1
    return np.union1d(found.rows, before)


def without(exp: Experience, lost: Mask, found: Sequence[Found]) -> Experience:
    """``exp`` without some steps: what follows them is a segment of its own, of the same episode and with its ``t``.

    Observations of lost steps become the final observations of what is before them. Nothing else is made up.

    Args:
        exp: The whole.
        lost: bool ``[num_steps]``: the steps to leave out.
        found: Faults; final observations among them are taken for unknown.
    """
    segments, offsets = exp.segments, exp.offsets
    known = segments.has_final_obs.copy()
    for fault in found:
        if fault.is_final:
            known[np.searchsorted(offsets, fault.rows, side="right") - 1] = False
    kept = ~lost
    is_first, is_last = np.zeros((2, exp.num_steps), bool)
    is_first[offsets[:-1]] = is_last[offsets[1:] - 1] = True
    start = np.flatnonzero(kept & (is_first | np.append(True, lost[:-1])))
    stop = np.flatnonzero(kept & (is_last | np.append(lost[1:], True))) + 1
    parent = np.searchsorted(offsets, start, side="right") - 1
    into = start - offsets[:-1][parent]
    lookback = np.clip(segments.lookback[parent] - into, 0, stop - start)
    some = (lookback < stop - start) | (segments.lookback[parent] == exp.lengths[parent])
    start, stop, parent, into, lookback = start[some], stop[some], parent[some], into[some], lookback[some]
    at_end = stop == offsets[1:][parent]
    outcome_lost = stop == offsets[1:][parent] - 1
    own = segments[parent]
    cut = own.replace(
        t_start=own.t_start + into,
        lookback=lookback,
        terminated=own.terminated & at_end,
        truncated=own.truncated & (at_end | outcome_lost),  # a time limit a step earlier: bootstrapped all the same
        has_final_obs=np.where(at_end, known[parent], True),
    )
    rows = ranges(start, stop - start)
    finals = {name: _finals(exp, name, parent, stop, at_end & known[parent], at_end) for name in exp.final_obs}
    return Experience({name: take(c, rows) for name, c in exp.steps.items()}, offsets_of(stop - start), cut, finals)


def _finals(exp: Experience, name: str, parent: Index, stop: Index, given: Mask, at_end: Mask) -> NDArray[Any]:
    final = np.asarray(exp.final_obs[name])
    values = np.full((len(parent), *final.shape[1:]), None if final.dtype == object else 0, final.dtype)
    values[given] = final[parent[given]]
    values[~at_end] = np.asarray(exp.steps[name])[stop[~at_end]]
    return values


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
