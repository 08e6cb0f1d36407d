# SPDX-License-Identifier: Apache-2.0
"""Repairs for the modes ``repair`` and ``skip``: removing steps, and planning repairs of the order of steps."""

import dataclasses
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.arrays import Index, hashes_of, ranges
from etude.recordings.faults import HARMLESS, KINDS, Fault, Span, Spans, Timeline, clashes, distinct, span_at
from etude.recordings.opening import Units
from etude.recordings.pieces import cut_where, in_order, with_known_finals

Mask: TypeAlias = NDArray[np.bool_]


def without_faults(
    exp: Experience, faults: Sequence[Fault], *, whole_segments: bool, next_obs: bool
) -> tuple[Experience, Counter[str]]:
    """Remove the faulty steps from ``exp``.

    Args:
        exp: The experience to repair.
        faults: Its faults.
        whole_segments: Whether to remove whole segments with a fault, rather than single steps.
        next_obs: Whether each step needs its next observation, including the last step of a truncated episode.

    Returns:
        The remaining experience, and the number of steps removed by kind of fault.
    """
    lost = np.zeros(exp.num_steps, bool)
    counts: Counter[str] = Counter()
    for fault in faults:
        rows = _steps_lost(exp, fault, next_obs)
        rows = _segments_with(exp, rows) if whole_segments else rows
        counts[fault.kind] += int((~lost[rows]).sum())
        lost[rows] = True
    return (without(exp, lost, faults) if faults else exp), counts


def _segments_with(exp: Experience, rows: Index) -> Index:
    """The rows of all segments that one of ``rows`` is in, increasing."""
    which = np.unique(np.searchsorted(exp.offsets, rows, side="right") - 1)
    return ranges(exp.offsets[which], exp.lengths[which])


def _steps_lost(exp: Experience, fault: Fault, next_obs: bool = False) -> Index:
    """The rows to remove because of a fault, increasing.

    These are the faulty rows; the row before a bad observation, because this is its next observation; and, for a bad or
    unknown final observation, the last row of the segment, unless the episode terminated there, or was truncated there
    and ``next_obs`` is False.
    """
    segment = np.searchsorted(exp.offsets, fault.rows, side="right") - 1
    if fault.is_final:
        needs_none = exp.segments.terminated | (exp.segments.truncated & (not next_obs))
        return fault.rows[~needs_none[segment]]
    if not col.is_under(fault.column, col.OBS):
        return fault.rows
    before = fault.rows[fault.rows > exp.offsets[segment]] - 1
    return np.union1d(fault.rows, before)


def without(exp: Experience, lost: Mask, faults: Sequence[Fault]) -> Experience:
    """Remove steps from ``exp``. The steps after a gap form a new segment with the same episode and ``t``.

    The observation of a removed step becomes the final observation of the segment before it. No other data is made up.

    Args:
        exp: The experience.
        lost: The steps to remove, bool ``[num_steps]``.
        faults: The faults of ``exp``. Final observations among them are treated as unknown.
    """
    known, is_bad = exp.segments.has_final_obs.copy(), np.zeros(exp.num_steps, bool)
    for fault in faults:
        if fault.is_final:
            known[np.searchsorted(exp.offsets, fault.rows, side="right") - 1] = False
        else:
            is_bad[_steps_lost(exp, fault)] = True
    pieces, start, stop, parent = cut_where(with_known_finals(exp, known), ~lost)
    # If only what followed a truncation is unknown, the episode counts as truncated one step earlier.
    last = exp.offsets[1:][parent] - 1
    early = (stop == last) & exp.segments.truncated[parent] & ~known[parent] & ~is_bad[last]
    return pieces.with_segments(truncated=pieces.segments.truncated | early).select(~lost[start])


# -- the order of steps ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Changes:
    """Planned changes to the segments of a part."""

    left_out: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Ranges of rows to leave out: the first row, and the row after the last."""
    continuations: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    """(last row of a segment, part, row): that row of that part holds the final observation of the segment."""
    in_order: bool = False
    """Whether the segments must be sorted by time."""


class RepairPlan:
    """Plans, in one pass over the key columns, what to leave out, link and sort in each part.

    The first of several identical duplicate steps is kept. If duplicates differ, none can be trusted, and both segments
    are left out. Segments after the end of their episode are left out as well.

    Args:
        units: The recording.
        keep_order: Whether to leave out segments that are out of order instead of sorting them.
    """

    def __init__(self, units: Units, *, keep_order: bool) -> None:
        self._units, self._keep_order = units, keep_order
        self._obs: dict[tuple[int, int], dict[str, NDArray[Any]] | None] = {}
        self._rows: list[int] = []  # of each part; 0 if nothing of it can be read
        self._plans: dict[int, Changes] = defaultdict(Changes)
        self.left_out: Counter[str] = Counter()
        """Rows left out, by kind of fault."""
        self.fault_counts: Counter[str] = Counter(problem.kind for problem in units.problems if not problem.harmless)
        """The number of faulty segments by kind, and of problems that the format's reader found."""
        timeline = Timeline(units)
        for k in range(len(units)):
            try:
                exp = units.keys(k)
            except DataError:  # counted when the part is loaded
                self._rows.append(0)
                continue
            self._rows.append(exp.num_steps)
            timeline.add(k, exp)
        spans = timeline.spans()
        self.harmless = tuple(timeline.problems(HARMLESS, spans))
        """Warnings about the order of steps."""
        to_repair, twice = _episodes_to_repair(spans)
        hashes = self._hashes([span for key in twice for span in to_repair[key]])
        for group in to_repair.values():
            self._plan_episode(group, hashes)
        self._plans = dict(self._plans)

    def _hashes(self, spans: Sequence[Span]) -> dict[Span, Index]:
        """Hash the contents of each step of the spans, int64 ``[steps]`` for each span. Each part is read once."""
        roots = (col.OBS, col.ACTION, col.REWARD, col.LOGP)
        names = [name for root in roots for name in col.under(self._units.columns, root)]
        by_part: dict[int, list[Span]] = defaultdict(list)
        for span in spans:
            by_part[span.part].append(span)
        out: dict[Span, Index] = {}
        for k, here in sorted(by_part.items()):
            try:
                exp = self._units.load_readable(k, names)[0]
            except DataError:
                exp = None
            for span in here:
                count = span.stop - span.start
                if exp is None or exp.num_steps != self._rows[k]:
                    out[span] = np.arange(count) + hash((span, "unread"))  # equal to no other
                else:
                    rows = {name: np.asarray(column)[span.row : span.row + count] for name, column in exp.steps.items()}
                    out[span] = hashes_of(rows).view(np.int64)
        return out

    def _plan_episode(self, spans: Sequence[Span], hashes: Mapping[Span, Index]) -> None:
        """Plan the repairs of one agent's episode.

        Args:
            spans: All spans of the episode.
            hashes: For the spans of episodes with duplicates, the hashes of their steps.
        """
        kept, lost = _verdicts(spans, hashes)
        while self._keep_order and (late := _out_of_order(kept)):  # once they are gone, their duplicates may be kept
            for span in late:
                self._leave_out(span, 0, span.stop - span.start, "out_of_order")
            spans = [span for span in spans if span not in late]
            kept, lost = _verdicts(spans, hashes)
        for span, start, stop, kind in lost:
            self._leave_out(span, start, stop, kind)
        for span in _out_of_order(kept):
            self.fault_counts["out_of_order"] += 1
            self._plans[span.part].in_order = True
        if self._keep_order and not any(kind == "duplicate" for *_, kind in lost):
            return
        heads = {span.start + cut: (span, cut) for span, cut in kept}
        for span, _ in kept:
            if not span.known and span.stop in heads:
                after, skipped = heads[span.stop]
                last = span.row + span.stop - span.start - 1
                self._plans[span.part].continuations.append((last, after.part, after.row + skipped))

    def _leave_out(self, span: Span, start: int, stop: int, kind: str) -> None:
        """Plan to leave out these steps of a span. Its lookback is left out together with its first step."""
        first = span.row + start - (span.lookback if stop and not start else 0)
        self._plans[span.part].left_out.append((first, span.row + stop))
        self.left_out[kind] += span.row + stop - first
        self.fault_counts[kind] += 1

    # -- applying the plan ------------------------------------------------------------------------------------

    def rows(self, k: int) -> int:
        """The number of rows of part ``k``, without those left out; 0 if the part can't be read."""
        plan = self._plans.get(k)
        return self._rows[k] - (sum(stop - start for start, stop in plan.left_out) if plan else 0)

    def rows_stored(self, k: int) -> int:
        """The number of rows of part ``k``; 0 if the part can't be read."""
        return self._rows[k]

    def applied(self, k: int, exp: Experience) -> Experience:
        """Return part ``k``, which is ``exp``, after the planned repairs."""
        if not exp.num_segments or k not in self._plans:
            return exp
        plan, at = self._plans[k], self._places(k, exp)
        if plan.continuations and exp.final_obs:
            exp = self._fill_final_obs(plan, exp, at)
        lost = np.zeros(exp.num_steps, bool)
        for start, stop in plan.left_out:
            lost |= (at >= start) & (at < stop)
        exp = without(exp, lost, ()) if lost.any() else exp
        return in_order(exp).join() if plan.in_order else exp

    def _fill_final_obs(self, plan: Changes, exp: Experience, at: Index) -> Experience:
        """Fill in unknown final observations from the rows where the episodes continue."""
        segments = exp.segments[np.arange(exp.num_segments)]
        finals = {name: np.array(column) for name, column in exp.final_obs.items()}
        for last, j, row in plan.continuations:
            here = np.flatnonzero(at[exp.offsets[1:] - 1] == last)
            if not len(here) or segments.has_final_obs[here[0]]:
                continue
            obs = self._obs_at(j, row, tuple(finals))
            if obs is not None:
                segments.has_final_obs[here[0]] = True
                for name, value in obs.items():
                    finals[name][here[0]] = value
        return Experience(exp.steps, exp.offsets, segments, finals)

    def _places(self, k: int, exp: Experience) -> Index:
        """For each row of ``exp``, the row of part ``k`` at the time of planning, int64 ``[num_steps]``.

        They differ only if fewer rows could be read with these columns; -1 marks rows that were not there then.
        """
        if exp.num_steps == self._rows[k]:
            return np.arange(exp.num_steps)
        known = self._units.keys(k)
        first: dict[Any, deque[int]] = defaultdict(deque)
        for key, row in zip(_heads(known), known.offsets.tolist(), strict=False):
            first[key].append(row)
        rows = [first[key].popleft() if first[key] else -exp.num_steps for key in _heads(exp)]
        at = np.arange(exp.num_steps) + np.repeat(np.array(rows, np.int64) - exp.offsets[:-1], exp.lengths)
        return np.maximum(at, -1)

    def _obs_at(self, k: int, row: int, names: Sequence[str]) -> dict[str, NDArray[Any]] | None:
        """The observation in a row of part ``k``, by column; None if it can't be read."""
        if (k, row) not in self._obs or not set(names) <= set(self._obs[k, row] or names):
            try:
                exp = self._units.load_readable(k, names)[0]
                whole = exp.num_steps == self._rows[k]
                self._obs[k, row] = {n: np.array(exp.steps[n][row]) for n in names} if whole else None
            except DataError:
                self._obs[k, row] = None
        return self._obs[k, row]


def _heads(exp: Experience) -> list[tuple[Any, ...]]:
    s = exp.segments
    return list(zip(s.episode_id.tolist(), s.agent_id.tolist(), s.t_start.tolist(), strict=True))


def _episodes_to_repair(spans: Spans) -> tuple[dict[int, list[Span]], list[int]]:
    """Find the episodes that need repairs.

    Returns:
        By key, the spans of each episode with a conflict, or with an unknown final observation where it continues; and
        the keys of the episodes with duplicate steps.
    """
    found = clashes(spans)
    unknown = (spans["key"][:-1] == spans["key"][1:]) & ~spans["known"][:-1]
    at = [found[kind] for kind in KINDS if kind != "gap"]
    keys = distinct(spans["key"][np.concatenate([*at, np.flatnonzero(unknown)])])
    known = np.ascontiguousarray(spans["key"])
    starts, stops = (np.searchsorted(known, keys, side=side).tolist() for side in ("left", "right"))
    groups = zip(keys.tolist(), starts, stops, strict=True)
    to_repair = {key: [span_at(spans, i) for i in range(start, stop)] for key, start, stop in groups}
    return to_repair, distinct(spans["key"][found["duplicate"]]).tolist()


def _verdicts(
    spans: Sequence[Span], hashes: Mapping[Span, Index]
) -> tuple[list[tuple[Span, int]], list[tuple[Span, int, int, str]]]:
    """Decide what to leave out of an episode, whose spans may be in any order.

    Returns:
        The spans to keep, with the number of leading steps to leave out; and all steps to leave out, as ``(span, first
        step, step after the last, kind of fault)``.
    """
    kept: list[tuple[Span, int]] = []
    lost: list[tuple[Span, int, int, str]] = []
    refused: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.start, not s.known, s.place)):
        kind, cut = _verdict(span, kept, refused, hashes)
        if kind == "contradiction":
            for other, n in [(s, n) for s, n in kept if s.stop > span.start]:
                refused.append(other)
                lost.append((other, n, other.stop - other.start, kind))
            kept = [(s, n) for s, n in kept if s not in refused]
            refused.append(span)
        if kind:
            lost.append((span, 0, cut, kind))
        if cut < span.stop - span.start:
            kept.append((span, cut))
    return kept, lost


def _out_of_order(kept: Sequence[tuple[Span, int]]) -> list[Span]:
    """The spans that are stored after spans of later steps."""
    found, latest = [], -1
    for span, _ in sorted(kept, key=lambda entry: entry[0].place):
        if span.start < latest:
            found.append(span)
        latest = max(latest, span.start)
    return found


def _verdict(
    span: Span,
    kept: Sequence[tuple[Span, int]],
    refused: Sequence[Span],
    hashes: Mapping[Span, Index],
) -> tuple[str, int]:
    """Decide whether to leave out a span.

    Args:
        span: The span.
        kept: The earlier spans of the episode that are kept, with the number of leading steps that are left out.
        refused: The earlier spans of the episode that contradict others.
        hashes: The hashes of the steps of all these spans.

    Returns:
        The kind of fault, and the number of leading steps to leave out; an empty text and 0 if it is kept whole.
    """
    length = span.stop - span.start
    if any(other.stop > span.start for other in refused):
        return "contradiction", length
    if any(other.done and other.stop <= span.start for other, _ in kept):
        return "after_end", length
    twice = [other for other, _ in kept if other.stop > span.start]
    for other in twice:
        stop = min(other.stop, span.stop)
        same = np.array_equal(
            hashes[other][span.start - other.start : stop - other.start], hashes[span][: stop - span.start]
        )
        ends_twice = other.stop == span.stop and other.done and span.done
        ends = ends_twice and (other.terminated, other.truncated) != (span.terminated, span.truncated)
        ended = (other.done and span.stop > other.stop) or (span.done and other.stop > span.stop)
        if not same or ends or ended:
            return "contradiction", length
    if not twice:
        return "", 0
    return "duplicate", min(length, max(other.stop for other in twice) - span.start)
