# SPDX-License-Identifier: Apache-2.0
"""Checks of steps: values that can't be learned from, and steps that conflict with each other.

The steps of one agent in one episode must not be duplicated (``duplicate``), come after its end (``after_end``), or be
stored before earlier ones (``out_of_order``). Missing steps in its middle (``gap``) are harmless.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience, Segments
from etude.experience.arrays import Index, not_finite, ranges
from etude.recordings.format import Problem
from etude.recordings.units import Units
from etude.spaces import Space


class Fault(NamedTuple):
    """A fault that affects some rows."""

    kind: str
    """The kind, as in `etude.recordings.Problem`: ``nan``, ``out_of_space`` or ``no_final_obs``."""
    column: str
    rows: Index
    """The row indices, increasing; for a final observation, the last rows of its segments."""
    what: str
    """A description of the first row's fault."""
    harmless: bool = False
    """Whether it only matters if requested: ``next_obs`` after a segment that was truncated."""

    @property
    def is_final(self) -> bool:
        """Whether it concerns final observations."""
        return col.is_under(self.column, col.FINAL_OBS)


def find(exp: Experience, leaves: Mapping[str, Space]) -> Iterator[Fault]:
    """Find every fault in observations, actions, rewards and final observations.

    Args:
        exp: The experience to check. The sum of each column shows whether it is finite; only if not, rows are checked.
        leaves: The simple spaces of observations and actions by column.
    """
    last = exp.offsets[1:] - 1
    known = np.flatnonzero(exp.segments.has_final_obs)
    for name, values in exp.steps.items():
        if col.is_under(name, col.OBS) or col.is_under(name, col.ACTION) or name == col.REWARD:
            yield from _of_values(name, np.asarray(values), leaves.get(name))
    for name, values in exp.final_obs.items():
        renamed = col.FINAL_OBS + name[len(col.OBS) :]
        for fault in _of_values(renamed, np.asarray(values)[known], leaves.get(name)):
            yield fault._replace(rows=last[known[fault.rows]])
    is_unknown = ~exp.segments.has_final_obs & ~exp.segments.terminated
    for harmless, how in ((False, "continues, because no flag marks its end there"), (True, "was truncated")):
        unknown = np.flatnonzero(is_unknown & (exp.segments.truncated == harmless))
        if exp.final_obs and len(unknown):
            what = f"is not known after the last step of episode {exp.segments.episode_id[unknown[0]]!r}, which {how}"
            name = next(iter(col.renamed(exp.final_obs, col.OBS, col.FINAL_OBS)))
            yield Fault("no_final_obs", name, last[unknown], what, harmless)


def _of_values(name: str, values: NDArray[Any], leaf: Space | None) -> Iterator[Fault]:
    rows = not_finite(values)
    if len(rows):
        first = values[rows[0]].reshape(-1)
        at = int(np.argmax(~np.isfinite(first)))
        where = f" in component {at}" if values.ndim > 1 else ""
        yield Fault("nan", name, rows, f"holds {first[at]}{where}".replace("nan", "NaN"))
    outside = outside_of(values, leaf)
    if outside is not None and len(outside):
        what = f"is {values[outside[0]]}, outside its space {leaf}"
        yield Fault("out_of_space", name, outside, what)


def outside_of(values: NDArray[Any], leaf: Space | None) -> Index | None:
    """The rows of a discrete column that are outside its space; None if it is not discrete."""
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


_REMEDIES: Final = {
    "nan": "Leave the episode out with a filter, or mend the env that gave it.",
    "out_of_space": "Was it recorded with another space? Leave these rows out with a filter, or mend them.",
    "no_final_obs": "Value functions can't be learned from that step: on_bad='repair' (--on-bad repair) leaves it out. "
    "Where the episode ended by its own rules, it is `terminated`, and nothing is missing.",
    "duplicate": "Was a file copied, or an episode recorded twice? Move one of them away, or give it another id.",
    "after_end": "Two episodes may share one id: give each its own.",
    "out_of_order": "Put the files in order by their names, or read it with on_bad='repair'.",
}


def problem_of(units: Units, k: int, exp: Experience, fault: Fault) -> Problem:
    """Describe a fault of some rows of unit ``k``, which is ``exp``."""
    row, count = int(fault.rows[0]), len(fault.rows)
    place = units.place(k, row, exp)
    more = f" ({count:,} rows like it)" if count > 1 else ""
    text = f"{place.words}: column `{fault.column}` {fault.what}{more}. {_REMEDIES[fault.kind]}"
    return Problem(fault.kind, text, place.file, place.row, fault.column, count, True, place.row_group, fault.harmless)


# -- the order of steps ----------------------------------------------------------------------------------------------


KINDS: Final = ("duplicate", "after_end", "out_of_order", "gap")


class Span(NamedTuple):
    """The steps of one segment, without lookback."""

    start: int
    """The first ``t``."""
    stop: int
    """One more than the last ``t``."""
    place: int
    """The index of its part times 2^40, plus the row in that part of the segment's first row, including lookback."""
    lookback: int
    terminated: bool
    truncated: bool
    known: bool
    """Whether the final observation is known or not needed."""

    @property
    def done(self) -> bool:
        """Whether the episode ended here."""
        return self.terminated or self.truncated

    @property
    def part(self) -> int:
        """The index of its part."""
        return self.place >> _ROW_BITS

    @property
    def row(self) -> int:
        """The row of its first step in the part."""
        return (self.place & _ROW_MASK) + self.lookback


Spans: TypeAlias = NDArray[Any]
"""Many spans: a structured array with the fields of `Span`, and ``key`` from `keys_of`."""

_ROW_BITS: Final = 40
_ROW_MASK: Final = (1 << _ROW_BITS) - 1
_DTYPE: Final = np.dtype(
    [
        *(("key", "i8"), ("start", "i8"), ("stop", "i8"), ("place", "i8"), ("lookback", "i4")),
        *(("terminated", "?"), ("truncated", "?"), ("known", "?")),
    ]
)
_ODD: Final = 0x5851F42D4C957F2D
"""Any large odd number: sums with hashes multiplied by it collide as rarely as hashes do."""


def keys_of(segments: Segments) -> Index:
    """Hash the episode and agent of each segment; equal ones have equal hashes within one process.

    Hashes take a fifth of the memory of the names. Before acting on equal hashes, compare the names.
    """
    keys: Index = segments.episode_id.mapped(hash, np.int64) * _ODD + segments.agent_id.mapped(hash, np.int64)
    return keys


def spans_of(k: int, exp: Experience, keys: Index | None = None) -> Spans:
    """The segments of part ``k`` that have steps of their own, with ``keys`` or by default those from `keys_of`."""
    s = exp.segments
    spans = np.zeros(len(s), _DTYPE)
    spans["key"] = keys_of(s) if keys is None else keys
    spans["start"], spans["stop"] = s.t_start + s.lookback, s.t_start + exp.lengths
    spans["place"], spans["lookback"] = (k << _ROW_BITS) + exp.offsets[:-1], s.lookback
    spans["terminated"], spans["truncated"], spans["known"] = s.terminated, s.truncated, s.has_final_obs | s.terminated
    is_own = s.lookback < exp.lengths
    return spans if is_own.all() else spans.take(np.flatnonzero(is_own))


def in_time(runs: Iterable[Spans]) -> Spans:
    """Sort spans by key, then by time."""
    raw = np.dtype((np.void, _DTYPE.itemsize))  # plain bytes are copied in one go
    spans = np.concatenate([np.zeros(0, raw), *(run.view(raw) for run in runs)]).view(_DTYPE)
    order = np.argsort(np.ascontiguousarray(spans["key"]), kind="stable")  # fast if the runs are sorted
    found = spans.take(order)  # fifty times as fast as indexing a structured array
    same = np.flatnonzero(found["key"][:-1] == found["key"][1:])
    if len(same):
        a, b = found.take(same), found.take(same + 1)
        rises = (a["start"] < b["start"]) | ((a["start"] == b["start"]) & (a["place"] < b["place"]))
        if not rises.all():
            return spans.take(np.lexsort((spans["place"], spans["start"], spans["key"])))
    return found


def clashes(spans: Spans) -> dict[str, Index]:
    """For each of `KINDS`, the spans that conflict with the next one, in stored order of the latter.

    Args:
        spans: Sorted by `in_time`.
    """
    a, b = spans[:-1], spans[1:]
    same = a["key"] == b["key"]
    twice = same & (b["start"] < a["stop"])
    ended = same & (a["terminated"] | a["truncated"]) & ~twice
    misplaced = same & (b["place"] < a["place"]) & ~twice & ~ended
    gap = same & (b["start"] > a["stop"]) & ~ended
    found = {}
    for kind, bad in zip(KINDS, (twice, ended, misplaced, gap), strict=True):
        at = np.flatnonzero(bad)
        found[kind] = at[np.argsort(b["place"][at])]
    return found


def span_at(spans: Spans, i: int) -> Span:
    """Return one of the spans."""
    return Span(*(spans[name][i].item() for name in Span._fields))


class Timeline:
    """The spans of all steps seen so far, to find those that conflict.

    It takes about 60 bytes of memory per segment, and the time to sort them. Not thread-safe.

    Args:
        units: The recording.
        kinds: The kinds of conflict that `add` checks for, among `KINDS`.
    """

    def __init__(self, units: Units, kinds: Sequence[str] = ()) -> None:
        self._units, self._kinds = units, kinds
        self._spans: dict[int, Spans] = {}  # by part
        self._runs: list[tuple[Index, Index]] = []  # sorted keys, and the places of their spans
        self._several = [np.zeros(0, np.int64)]  # keys with several spans, as they were found
        self._names: dict[int, Experience] = {}  # by part; only of parts with conflicts
        self._told: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all parts have been seen."""
        return len(self._spans) == len(self._units)

    def add(self, k: int, exp: Experience) -> None:
        """Add loaded part ``k``, unless it was added before.

        Raises:
            DataError: a segment of it conflicts with another one; raised again by every later call.
        """
        if k not in self._spans:
            spans = self._spans[k] = spans_of(k, exp)
            if self._kinds and self._told is None:
                several = self._several_among(spans)
                self._several.append(several)
                found = self._problems(self._all_of(several), self._kinds)
                self._told = next((problem.message for problem in found), None)
        if self._told is not None:
            raise DataError(self._told)

    def spans(self) -> Spans:
        """All spans seen, sorted by `in_time`."""
        return in_time(self._spans.values())

    def problems(self, kinds: Sequence[str] = KINDS) -> Iterator[Problem]:
        """All conflicts of these kinds in what was seen: one for each kind, episode and agent."""
        for problem in self._problems(self._all_of(distinct(*self._several)) if self._kinds else self.spans(), kinds):
            remedy = _REMEDIES.get(problem.kind)
            yield dataclasses.replace(problem, message=f"{problem.message} {remedy}") if remedy else problem

    def _several_among(self, spans: Spans) -> Index:
        """The keys in ``spans``, which are new, that have several spans now."""
        keys = np.ascontiguousarray(spans["key"])
        order = np.argsort(keys, kind="stable")
        keys, places = keys[order], spans["place"][order]
        found = [keys[1:][keys[1:] == keys[:-1]]]
        for known, _ in self._runs:
            found.append(keys[known[np.minimum(np.searchsorted(known, keys), len(known) - 1)] == keys])
        while self._runs and len(self._runs[-1][0]) < 2 * len(keys):
            known, there = self._runs.pop()
            keys, places = np.concatenate([known, keys]), np.concatenate([there, places])
            order = np.argsort(keys, kind="stable")
            keys, places = keys[order], places[order]
        if len(keys):
            self._runs.append((keys, places))
        return distinct(*found)

    def _all_of(self, keys: Index) -> Spans:
        """The spans of these keys, sorted by `in_time`."""
        found = [np.zeros(0, np.int64)]
        for known, places in self._runs if len(keys) else ():
            starts, stops = (np.searchsorted(known, keys, side=side) for side in ("left", "right"))
            found.append(places[ranges(starts, stops - starts)])
        places = np.sort(np.concatenate(found))
        parts = places >> _ROW_BITS
        heads = np.flatnonzero(parts[1:] != parts[:-1]) + 1
        runs = []
        for here in np.split(places, heads) if len(places) else ():
            spans = self._spans[int(here[0]) >> _ROW_BITS]
            runs.append(spans.take(np.searchsorted(spans["place"], here)))
        return in_time(runs)

    def _problems(self, spans: Spans, kinds: Sequence[str]) -> Iterator[Problem]:
        """Like `problems`, for spans sorted by `in_time`, and without the remedy."""
        for kind, at in clashes(spans).items():
            told: set[int] = set()
            for i in at.tolist() if kind in kinds else ():
                a, b, key = span_at(spans, i), span_at(spans, i + 1), int(spans["key"][i])
                if key not in told and self._whose(a) == self._whose(b):  # not only equal hashes
                    told.add(key)
                    yield self._problem(kind, a, b)

    def _whose(self, span: Span) -> tuple[str, str | None]:
        """The episode and agent of a span."""
        if span.part not in self._names:
            self._names[span.part] = self._units.keys(span.part)
        exp = self._names[span.part]
        i = int(np.searchsorted(exp.offsets, span.row, side="right")) - 1
        return exp.segments.episode_id[i], exp.segments.agent_id[i]

    def _problem(self, kind: str, a: Span, b: Span) -> Problem:
        """Describe a conflict of two spans of one agent in one episode; ``a`` is the earlier in time."""
        steps = {"duplicate": b.start - a.start, "out_of_order": 0}.get(kind, a.stop - a.start - 1)
        episode, agent = self._whose(b)
        first = self._units.place(a.part, a.row + steps, self._names[a.part])
        second = self._units.place(b.part, b.row, self._names[b.part])
        who = f"episode {episode!r}" + (f", agent {agent!r}" if agent is not None else "")
        what = {
            "duplicate": f"has step t {b.start} a second time; it is in {first.words} already",
            "after_end": f"continues at t {b.start}, after its end in {first.words}",
            "out_of_order": f"continues at t {b.start} before its beginning, which is in {first.words}: it is out of "
            "order",
            "gap": f"continues at t {b.start}, but its steps from t {a.stop} on are missing: it is cut there",
        }[kind]
        text, is_gap = f"{second.words}: {who} {what}.", kind == "gap"
        rows = 1 if is_gap else b.stop - b.start
        return Problem(kind, text, second.file, second.row, col.EPISODE_ID, rows, True, second.row_group, is_gap)


def distinct(*keys: Index) -> Index:
    """All keys once, sorted. NumPy's own function can take minutes for hashes."""
    found = np.sort(np.concatenate(keys))
    return found[np.append(True, found[1:] != found[:-1])] if len(found) else found
