# SPDX-License-Identifier: Apache-2.0
"""Checks of steps: values that can't be learned from, and steps that conflict with each other.

The steps of one agent in one episode must not be duplicated (``duplicate``), come after its end (``after_end``), or be
stored before earlier ones (``out_of_order``). Missing steps in its middle (``gap``) or at its end (``not_done``) are
harmless.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience, Segments
from etude.experience.arrays import ActionCodes, Index, not_finite, ranges
from etude.recordings.format import Problem
from etude.recordings.layout import FORMAT
from etude.recordings.opening import Units
from etude.spaces import Space, choices_of


class Fault(NamedTuple):
    """A fault that affects some rows."""

    kind: str
    """The kind of fault, as in `etude.recordings.Problem`: ``nan``, ``out_of_space``, ``forbidden_action``,
    ``out_of_bounds``, ``no_final_obs`` or ``impossible_logp``."""
    column: str
    rows: Index
    """The row indices, increasing; for a final observation, the last rows of its segments."""
    what: str
    """A description of the first row's fault."""
    harmless: bool = False
    """Whether it is only a warning, such as an unknown final observation after a segment that was truncated."""

    @property
    def is_final(self) -> bool:
        """Whether the fault is in a final observation."""
        return col.is_under(self.column, col.FINAL_OBS)


def find(exp: Experience, leaves: Mapping[str, Space]) -> Iterator[Fault]:
    """Find every fault in observations, actions, rewards and final observations.

    Args:
        exp: The experience to check. Its rows are searched for NaN and infinity only if the sum of a column is not
            finite.
        leaves: The simple spaces of observations and actions by column.
    """
    last = exp.offsets[1:] - 1
    known = np.flatnonzero(exp.segments.has_final_obs)
    for name, values in exp.steps.items():
        if col.is_under(name, col.OBS) or col.is_under(name, col.ACTION) or name == col.REWARD:
            yield from _faults_of(name, np.asarray(values), leaves.get(name))
    for name, values in exp.final_obs.items():
        renamed = col.moved(name, col.OBS, col.FINAL_OBS)
        for fault in _faults_of(renamed, np.asarray(values)[known], leaves.get(name)):
            yield fault._replace(rows=last[known[fault.rows]])
    is_unknown = ~exp.segments.has_final_obs & ~exp.segments.terminated
    for harmless, how in ((False, "continues, because no flag marks its end there"), (True, "was truncated")):
        unknown = np.flatnonzero(is_unknown & (exp.segments.truncated == harmless))
        if exp.final_obs and len(unknown):
            what = f"is unknown after the last step of episode {exp.segments.episode_id[unknown[0]]!r}, which {how}"
            name = next(iter(col.renamed(exp.final_obs, col.OBS, col.FINAL_OBS)))
            yield Fault("no_final_obs", name, last[unknown], what, harmless)


def _faults_of(name: str, values: NDArray[Any], leaf: Space | None) -> Iterator[Fault]:
    rows = not_finite(values)
    if len(rows):
        first = values[rows[0]].reshape(-1)
        at = int(np.argmax(~np.isfinite(first)))
        where = f" in component {at}" if values.ndim > 1 else ""
        yield Fault("nan", name, rows, f"holds {first[at]}{where}".replace("nan", "NaN"))
    outside = _rows_outside(values, leaf)
    if len(outside):
        yield Fault("out_of_space", name, outside, f"is {values[outside[0]]}, outside its space {leaf}")


def forbidden_actions(exp: Experience, leaves: Mapping[str, Space]) -> Iterator[Fault]:
    """Find actions that the action mask of the same step forbids; see `etude.modules.distributions.ActionMask`."""
    parts = {name: leaf for name, leaf in leaves.items() if col.is_under(name, col.ACTION)}
    codes = {name: ActionCodes(leaf) for name, leaf in parts.items() if choices_of(leaf) is not None}
    if col.OBS_MASK not in exp.steps or not codes.keys() <= exp.steps.keys():
        return
    masks, stop = np.asarray(exp.steps[col.OBS_MASK]).reshape(exp.num_steps, -1), 0
    if masks.dtype == object or sum(own.width for own in codes.values()) != masks.shape[1]:
        return  # a part of another meaning
    for name, own in codes.items():
        start, stop = stop, stop + own.width
        rows = np.flatnonzero(((own({col.ACTION: exp.steps[name]}) != 0) & (masks[:, start:stop] == 0)).any(axis=1))
        if len(rows):
            yield Fault(
                "forbidden_action", name, rows, f"is {exp.steps[name][rows[0]]}, which `{col.OBS_MASK}` forbids there"
            )


def _rows_outside(values: NDArray[Any], leaf: Space | None) -> Index:
    """The indices of the rows of a discrete column that are outside its space."""
    if isinstance(leaf, spaces.Discrete):
        low, high = int(leaf.start), int(leaf.start + leaf.n) - 1
    elif isinstance(leaf, spaces.MultiDiscrete):
        low, high = leaf.start, leaf.start + leaf.nvec - 1  # type: ignore[assignment]
    elif isinstance(leaf, spaces.MultiBinary):
        low, high = 0, 1
    else:
        return np.zeros(0, np.int64)
    if not len(values) or values.dtype == object:
        return np.zeros(0, np.int64)
    if isinstance(low, int) and low <= values.min() and values.max() <= high:
        return np.zeros(0, np.int64)
    return np.flatnonzero(((values < low) | (values > high)).reshape(len(values), -1).any(axis=1))


def impossible_logp(exp: Experience, leaves: Mapping[str, Space]) -> Index:
    """The rows whose ``logp`` can't be the log-probability of a sampled action; none if there is no such column.

    It must be finite, and, if all action spaces are discrete, at most 0, up to rounding.
    """
    logp = np.asarray(exp.steps.get(col.LOGP, np.zeros(0)))
    if logp.ndim != 1 or logp.dtype.kind not in "fiu":
        return np.arange(len(logp) if logp.dtype.kind == "O" else 0)
    actions = [leaf for name, leaf in leaves.items() if col.is_under(name, col.ACTION)]
    is_density = not actions or any(isinstance(leaf, spaces.Box) for leaf in actions)
    return np.flatnonzero(~np.isfinite(logp) | (logp > (np.inf if is_density else _ROUNDED)))


def logp_fault(exp: Experience, leaves: Mapping[str, Space]) -> Iterator[Fault]:
    """Find log-probabilities that only `etude.evaluation.evaluate_on` refuses; training does not need them."""
    rows = impossible_logp(exp, leaves)
    if len(rows):
        what = f"is {exp.steps[col.LOGP][rows[0]]}, which is not the logarithm of a probability"
        yield Fault("impossible_logp", col.LOGP, rows, what, harmless=True)


def beyond_bounds(exp: Experience, leaves: Mapping[str, Space]) -> Iterator[Fault]:
    """Find values outside the bounds of ``leaves``, the spaces given by the user; the data may have other units."""
    for name, leaf in leaves.items():
        if name not in exp.steps or not isinstance(leaf, spaces.Box) or leaf.dtype.kind != "f":
            continue
        values = np.asarray(exp.steps[name])
        distance = leaf.high.astype(np.float64) - leaf.low
        slack = np.where(np.isfinite(distance), distance * _ROUNDED, 0)
        outside = ((values < leaf.low - slack) | (values > leaf.high + slack)) & np.isfinite(values)
        rows = np.flatnonzero(outside.reshape(len(values), -1).any(axis=1))
        if len(rows):
            yield Fault("out_of_bounds", name, rows, f"is {values[rows[0]]}, outside the bounds of {leaf}", True)


_ROUNDED: Final = 1e-3
"""The rounding error that is allowed: of a log-probability above 0, as in bfloat16, and of a value outside its bounds,
relative to the distance between them."""

_REMEDIES: Final = {
    "nan": "Correct it where it comes from, or leave it out: on_bad='repair' (--on-bad repair).",
    "out_of_space": "Was it recorded with another space? Correct these rows, or leave them out.",
    "forbidden_action": "Does the mask belong to the observation in which the action was chosen, and does 1 mean "
    "allowed? Correct it, or leave these steps out: on_bad='repair' (--on-bad repair).",
    "no_final_obs": "Value functions can't be learned from that step: on_bad='repair' (--on-bad repair) leaves it out. "
    "If the episode ended by its own rules, mark it as `terminated`; then no final observation is needed.",
    "out_of_bounds": "The data does not state its spaces, so it is read by the space that was given: that of the "
    "Source, of Recording.open, or the env's. Does the data have other units? Then scale it first, or correct the "
    "space: Source(..., {root}_space=...) or Recording.open(path, {root}_space=...).",
    "impossible_logp": "Only `etude evaluate --on` with recorded probabilities refuses it. Probabilities of a table "
    "are mapped as `propensity`.",
    "duplicate": "Was a file copied, or an episode recorded twice? Remove one of them, or give it another id.",
    "duplicate of a table": "Was a file copied, or an episode recorded twice? Remove one of them, or give it another "
    "id. If the clock was set back, as in autumn, map times in UTC. If rows in order have the same time, leave `t` "
    "out.",
    "after_end": "Two episodes may share an id. Give each its own.",
    "after_end of a table": "Was a file copied? Is the flag set in every row of an episode, rather than the last? Or "
    "do two episodes share an id? Then give each its own: if it is the id of a machine or a person with several "
    "episodes, combine it with the number of the episode (docs/your-data.md, Mixed rows).",
    "out_of_order": "Rename the files so that their names sort by time, or read the recording with on_bad='repair'.",
}


def problem_of(units: Units, k: int, exp: Experience, fault: Fault) -> Problem:
    """Describe a fault as a `Problem`.

    Args:
        units: The recording.
        k: The index of the unit with the fault.
        exp: The experience of that unit.
        fault: The fault.
    """
    row, count = int(fault.rows[0]), len(fault.rows)
    place = units.place(k, row, exp)
    more = f" ({count:,} rows like it)" if count > 1 else ""
    remedy = "If nothing was earned there, write 0. " * (fault.kind == "nan" and fault.column == col.REWARD)
    remedy += _REMEDIES[fault.kind].replace("{root}", fault.column.partition(col.SEPARATOR)[0])
    text = f"{place.words}: column `{fault.column}` {fault.what}{more}. {remedy}"
    return Problem(fault.kind, text, place.file, place.row, fault.column, count, True, place.row_group, fault.harmless)


# -- the order of steps ----------------------------------------------------------------------------------------------


KINDS: Final = ("duplicate", "after_end", "out_of_order", "gap")
NOT_DONE: Final = "not_done"
HARMLESS: Final = ("gap", NOT_DONE)


class Span(NamedTuple):
    """The steps of one segment, without lookback."""

    key: int
    """From `keys_of`."""
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
"""Many spans: a structured array with the fields of `Span`."""

_ROW_BITS: Final = 40
_ROW_MASK: Final = (1 << _ROW_BITS) - 1
_DTYPE: Final = np.dtype(
    [
        *(("key", "i8"), ("start", "i8"), ("stop", "i8"), ("place", "i8"), ("lookback", "i4")),
        *(("terminated", "?"), ("truncated", "?"), ("known", "?")),
    ]
)
_ODD_FACTOR: Final = 0x5851F42D4C957F2D
"""A large odd number. Multiplying one of two hashes by it keeps collisions of their sum as rare as those of hashes."""


def keys_of(segments: Segments) -> Index:
    """Hash the episode and agent of each segment, int64 ``[segments]``.

    Hashes take a fifth of the memory of the names. Equal names have equal hashes within one process; the reverse need
    not hold, so compare the names as well.
    """
    keys: Index = segments.episode_id.mapped(hash, np.int64) * _ODD_FACTOR + segments.agent_id.mapped(hash, np.int64)
    return keys


def spans_of(k: int, exp: Experience) -> Spans:
    """The spans of part ``k``, which is ``exp``; segments with lookback only have none."""
    s = exp.segments
    spans = np.zeros(len(s), _DTYPE)
    spans["key"] = keys_of(s)
    spans["start"], spans["stop"] = s.t_start + s.lookback, s.t_start + exp.lengths
    spans["place"], spans["lookback"] = (k << _ROW_BITS) + exp.offsets[:-1], s.lookback
    spans["terminated"], spans["truncated"], spans["known"] = s.terminated, s.truncated, s.has_final_obs | s.terminated
    is_own = s.lookback < exp.lengths
    return spans if is_own.all() else spans.take(np.flatnonzero(is_own))


def sorted_by_key_and_time(runs: Iterable[Spans]) -> Spans:
    """Join spans, and sort them by key, then by start, then by place."""
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
    """Find the conflicts between neighbouring spans.

    Which of a table's duplicates comes first is decided by `etude.recordings.formats.sorting`, whose ``VERSION`` must
    rise if that changes.

    Args:
        spans: Spans sorted by `sorted_by_key_and_time`.

    Returns:
        For each of `KINDS`, the indices of the spans that conflict with the next one, in stored order of the next one.
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
    """Return span ``i``."""
    return Span(*spans[i].item())


class Timeline:
    """Collects the spans of all parts seen so far, and finds conflicts between them.

    It needs about 60 bytes of memory per segment, and the time to sort them. Not thread-safe.

    Args:
        units: The recording.
        kinds: The kinds of conflict that `add` checks for, among `KINDS`.
    """

    def __init__(self, units: Units, kinds: Sequence[str] = ()) -> None:
        self._units, self._kinds = units, kinds
        self._seen: set[int] = set()  # parts
        self._runs: list[tuple[Index, Spans]] = []  # sorted, with keys; each at most half as long as the one before
        self._names: dict[int, Experience] = {}  # by part; only of parts with conflicts
        self._conflict: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all parts have been seen."""
        return len(self._seen) == len(self._units)

    def add(self, k: int, exp: Experience) -> None:
        """Add loaded part ``k``, unless it was added before.

        Raises:
            DataError: a segment of it conflicts with another one; raised again by every later call.
        """
        if k not in self._seen:
            self._seen.add(k)
            run = sorted_by_key_and_time([spans_of(k, exp)])
            if self._kinds and self._conflict is None:
                alike = [more for known in self._runs if len(more := _of_keys(*known, run["key"]))]
                found = self.problems(self._kinds, sorted_by_key_and_time([run, *alike]) if alike else run)
                self._conflict = next((problem.message for problem in found), None)
            while self._kinds and self._runs and len(self._runs[-1][1]) < 2 * len(run):
                run = sorted_by_key_and_time([self._runs.pop()[1], run])
            self._runs.append((np.ascontiguousarray(run["key"]), run))
        if self._conflict is not None:
            raise DataError(self._conflict)

    def spans(self) -> Spans:
        """All spans seen, sorted by `sorted_by_key_and_time`."""
        return sorted_by_key_and_time(run for _, run in self._runs)

    def problems(self, kinds: Sequence[str] = (*KINDS, NOT_DONE), spans: Spans | None = None) -> Iterator[Problem]:
        """The problems of these kinds in all parts seen, or in ``spans``: at most one conflict for each kind, episode
        and agent, and one warning if some episodes do not end.
        """
        spans = self.spans() if spans is None else spans
        for kind, at in clashes(spans).items():
            reported: set[int] = set()
            for i in at.tolist() if kind in kinds else ():
                a, b = span_at(spans, i), span_at(spans, i + 1)
                if a.key not in reported and self._owner(a) == self._owner(b):  # not only equal hashes
                    reported.add(a.key)
                    yield self._problem(kind, a, b)
        if NOT_DONE in kinds and self._units.format != FORMAT:  # a run may end, and cut its own format, anywhere
            yield from self._not_done(spans)

    def _not_done(self, spans: Spans) -> Iterator[Problem]:
        is_last = np.append(spans["key"][1:] != spans["key"][:-1], True)[: len(spans)]
        # An unknown next observation is a fault of its own; and possibly only the first step of an episode was stored.
        is_cut = ~spans["terminated"] & ~spans["truncated"] & spans["known"] & (spans["stop"] > 1)
        cut = spans[is_last & is_cut]
        if len(cut):
            span = span_at(cut, int(cut["place"].argmin()))
            who, row = self._words(span), span.row + span.stop - span.start - 1
            place = self._units.place(span.part, row, self._names[span.part])
            what = "episodes" if self._owner(span)[1] is None else "agents in episodes"
            more = f" ({len(cut):,} {what} like it)" if len(cut) > 1 else ""
            text = (
                f"{place.words}: {who} is neither terminated nor truncated after its last step{more}: it was cut off, "
                "and the value of what follows must be estimated. If it ended there, its data should say how."
            )
            yield Problem(NOT_DONE, text, place.file, place.row, None, len(cut), True, place.row_group, harmless=True)

    def _words(self, span: Span) -> str:
        episode, agent = self._owner(span)
        return f"episode {episode!r}" + (f", agent {agent!r}" if agent is not None else "")

    def _owner(self, span: Span) -> tuple[str, str | None]:
        """The episode and agent of a span."""
        if span.part not in self._names:
            self._names[span.part] = self._units.keys(span.part)
        exp = self._names[span.part]
        i = int(np.searchsorted(exp.offsets, span.row, side="right")) - 1
        return exp.segments.episode_id[i], exp.segments.agent_id[i]

    def _problem(self, kind: str, a: Span, b: Span) -> Problem:
        """Describe a conflict of two spans of one agent in one episode; ``a`` is the earlier in time."""
        steps = {"duplicate": b.start - a.start, "out_of_order": 0}.get(kind, a.stop - a.start - 1)
        first = self._units.place(a.part, a.row + steps, self._names[a.part])
        second = self._units.place(b.part, b.row, self._names[b.part])
        what = {
            "duplicate": f"has step t {b.start} a second time; the first one is in {first.words}",
            "after_end": f"continues at t {b.start}, after its end in {first.words}",
            "out_of_order": f"continues at t {b.start}, but is stored before its earlier steps, which are in "
            f"{first.words}: it is out of order",
            "gap": f"continues at t {b.start}, but its steps from t {a.stop} on are missing: it is cut there",
        }[kind]
        remedy = _REMEDIES.get(f"{kind} of a {self._units.format}", _REMEDIES.get(kind, ""))
        text, is_gap = f"{second.words}: {self._words(b)} {what}. {remedy}".rstrip(), kind == "gap"
        rows = 1 if is_gap else b.stop - b.start
        return Problem(kind, text, second.file, second.row, col.EPISODE_ID, rows, True, second.row_group, is_gap)


def _of_keys(known: Index, spans: Spans, keys: Index) -> Spans:
    """The spans with one of ``keys``; ``known`` are the keys of all ``spans``, increasing."""
    starts = np.searchsorted(known, keys)
    starts = distinct(starts[known[np.minimum(starts, len(known) - 1)] == keys]) if len(known) else starts[:0]
    return spans.take(ranges(starts, np.searchsorted(known, known[starts], side="right") - starts))


def distinct(*keys: Index) -> Index:
    """The distinct keys, sorted. It replaces `numpy.unique`, which can take minutes for hashes."""
    found = np.sort(np.concatenate(keys))
    return found[np.append(True, found[1:] != found[:-1])] if len(found) else found
