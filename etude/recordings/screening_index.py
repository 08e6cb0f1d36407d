# SPDX-License-Identifier: Apache-2.0
"""What screening knows of a whole recording: where each agent's episode stands, and what to do where it is ill."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.arrays import ranges
from etude.recordings.format import Problem
from etude.recordings.spans import (
    KINDS,
    Plan,
    Prints,
    Span,
    Spans,
    all_of,
    clashes,
    in_time,
    overlapping,
    prints_of,
    settled,
    span_at,
    spans_of,
)
from etude.recordings.units import Units


class Index:
    """Made by one pass over the key columns: for each part, what is to be left out, linked and put in order.

    Args:
        units: The recording.
        keep_order: Segments out of order are left out, and ends that are not known stay so.
    """

    def __init__(self, units: Units, *, keep_order: bool) -> None:
        self._units = units
        roots = (col.OBS, col.ACTION, col.REWARD)
        self._printed = [name for root in roots for name in col.under(units.columns, root)]
        self._obs: dict[tuple[int, int], dict[str, NDArray[Any]] | None] = {}
        self.rows: list[int] = []
        """The rows of each part; 0 where nothing of it can be read."""
        self.plans: dict[int, Plan] = defaultdict(Plan)
        """Of the parts that have anything to be done."""
        self.left_out: Counter[str] = Counter()
        """Rows, by kind of fault."""
        self.met: Counter[str] = Counter()
        """Segments, by kind of fault; and what the reader of the format has left out already."""
        self.met.update(problem.kind for problem in units.problems)
        spans = self._read()
        ill = list(_groups(spans, _ill(spans)))
        prints = self._prints([span for group in ill if overlapping(group) for span in group])
        for group in ill:
            self._settle(group, prints, keep_order)
        self.plans = dict(self.plans)

    def _read(self) -> Spans:
        found: list[Spans] = []
        for k in range(len(self._units)):
            try:
                exp = self._units.keys(k)
            except DataError:  # met again when it is loaded, and counted then
                self.rows.append(0)
                continue
            self.rows.append(exp.num_steps)
            found.append(spans_of(k, exp))
        return in_time(all_of(found))

    def _prints(self, spans: Sequence[Span]) -> dict[Span, Prints]:
        """Numbers for the contents of steps, of each part once."""
        by_part: dict[int, list[Span]] = defaultdict(list)
        for span in spans:
            by_part[span.part].append(span)
        out: dict[Span, Prints] = {}
        for k, here in sorted(by_part.items()):
            try:
                exp = self._units.load_rest(k, self._printed)[0]
            except DataError:
                exp = None
            for span in here:
                start, stop = span.row + span.lookback, span.row + span.lookback + span.stop - span.start
                if exp is None or exp.num_steps != self.rows[k]:
                    out[span] = np.arange(stop - start) + hash((span, "unread"))  # like nothing else
                else:
                    out[span] = prints_of(exp, start, stop)
        return out

    def _settle(self, spans: Sequence[Span], prints: Mapping[Span, Prints], keep_order: bool) -> None:
        found = settled(spans, prints.__getitem__, keep_order=keep_order)
        for span, steps, kind in found.left_out:
            first = span.row if steps else span.row + span.lookback
            stop = span.row + span.lookback + steps
            self.plans[span.part].left_out.append((first, stop, kind))
            self.left_out[kind] += stop - first
            self.met[kind] += 1
        for span, following, skipped in found.links:
            last = span.row + span.lookback + span.stop - span.start - 1
            place = (last, following.part, following.row + following.lookback + skipped)
            self.plans[span.part].links.append(place)
        if not keep_order:
            self.met["out_of_order"] += len(found.moved)
            for span in found.moved:
                self.plans[span.part].in_order = True

    # -- asked for at loading ---------------------------------------------------------------------------------

    def places(self, k: int, exp: Experience) -> NDArray[np.int64]:
        """int64 ``[num_steps]``: the row of part ``k``, as it was when it was indexed, that each row of ``exp`` is.

        They differ only where less could be read with these columns; -1 is a row that was not there.
        """
        if exp.num_steps == self.rows[k]:
            return np.arange(exp.num_steps)
        known = self._units.keys(k)
        first: dict[Any, deque[int]] = defaultdict(deque)
        for key, row in zip(_heads(known), known.offsets.tolist(), strict=False):
            first[key].append(row)
        rows = [first[key].popleft() if first[key] else -exp.num_steps for key in _heads(exp)]
        at = np.arange(exp.num_steps) + np.repeat(np.array(rows, np.int64) - exp.offsets[:-1], exp.lengths)
        return np.maximum(at, -1)

    def obs_at(self, k: int, row: int, names: Sequence[str]) -> dict[str, NDArray[Any]] | None:
        """The observation in a row of part ``k``; None where it can't be read."""
        if (k, row) not in self._obs or not set(names) <= set(self._obs[k, row] or names):
            try:
                exp = self._units.load_rest(k, names)[0]
                whole = exp.num_steps == self.rows[k]
                self._obs[k, row] = {n: np.array(exp.steps[n][row]) for n in names} if whole else None
            except DataError:
                self._obs[k, row] = None
        return self._obs[k, row]


def _heads(exp: Experience) -> list[tuple[Any, ...]]:
    s = exp.segments
    return list(zip(s.episode_id.tolist(), s.agent_id.tolist(), s.t_start.tolist(), strict=True))


def _ill(spans: Spans) -> NDArray[np.int64]:
    """The keys of episodes in which something clashes, or an end is known only from what goes on."""
    found = clashes(spans)
    unknown = (spans["key"][:-1] == spans["key"][1:]) & ~spans["known"][:-1]
    at = [found[kind] for kind in KINDS if kind != "gap"]
    return np.unique(spans["key"][np.concatenate([*at, np.flatnonzero(unknown)])])


def _groups(spans: Spans, keys: NDArray[np.int64]) -> Iterator[list[Span]]:
    """For each of ``keys``, its spans."""
    all_keys = np.ascontiguousarray(spans["key"])
    starts, stops = (np.searchsorted(all_keys, keys, side=side).tolist() for side in ("left", "right"))
    for start, stop in zip(starts, stops, strict=True):
        yield [span_at(spans, i) for i in range(start, stop)]


class ClashIndex:
    """Where the steps of the parts seen so far stand, for finding two that do not go together.

    It takes some 60 bytes of memory a segment, and the time to sort them. May not be used by several threads at once.

    Args:
        units: The recording.
        kinds: What `add` looks for, of `etude.recordings.spans.KINDS`.
    """

    def __init__(self, units: Units, kinds: Sequence[str] = ()) -> None:
        self._units, self._kinds = units, kinds
        self._runs: list[tuple[NDArray[np.int64], Spans]] = []  # each in time, with its keys
        self._added: set[int] = set()
        self._told: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all parts have been seen."""
        return len(self._added) == len(self._units)

    def add(self, k: int, exp: Experience) -> None:
        """Take in part ``k``, loaded, where it was not before.

        Raises:
            DataError: a segment of it does not go with another one; said again whatever is added later.
        """
        if k not in self._added:
            self._added.add(k)
            spans = in_time(spans_of(k, exp))
            self._told = self._told or (self._clash(spans) if self._kinds else None)
            self._runs.append((np.ascontiguousarray(spans["key"]), spans))
            while len(self._runs) > 1 and len(self._runs[-2][0]) < 2 * len(self._runs[-1][0]):
                (_, later), (_, earlier) = self._runs.pop(), self._runs.pop()
                merged = in_time(all_of([earlier, later]))
                self._runs.append((np.ascontiguousarray(merged["key"]), merged))
        if self._told is not None:
            raise DataError(self._told)

    def problems(self, kinds: Sequence[str] = KINDS) -> Iterator[Problem]:
        """All clashes of these kinds in what was seen, one for each kind, episode and agent."""
        spans = in_time(all_of(run for _, run in self._runs))
        names = _Names(self._units)
        for kind, at in clashes(spans).items():
            told: set[int] = set()
            for i in at.tolist() if kind in kinds else ():
                key = int(spans["key"][i])
                a, b = span_at(spans, i), span_at(spans, i + 1)
                if key not in told and names.are_alike(a, b):
                    told.add(key)
                    yield clash_problem(self._units, names, kind, a, b)

    def num_episodes(self) -> int:
        """How many episodes were seen."""
        return len(np.unique(np.concatenate([np.zeros(0, np.int64), *(run["episode"] for _, run in self._runs)])))

    def _clash(self, spans: Spans) -> str | None:
        """What is wrong with these spans, among themselves or with those seen before."""
        keys = np.ascontiguousarray(spans["key"])
        keys = keys[np.append(True, keys[1:] != keys[:-1])] if len(keys) else keys
        together = [spans]
        for run_keys, run in self._runs:
            starts, stops = (np.searchsorted(run_keys, keys, side=side) for side in ("left", "right"))
            some = stops > starts
            if some.any():
                together.append(run.take(ranges(starts[some], (stops - starts)[some])))
        both = in_time(all_of(together)) if len(together) > 1 else spans
        names = _Names(self._units)
        for kind, at in clashes(both).items():
            for i in at.tolist() if kind in self._kinds else ():
                a, b = span_at(both, i), span_at(both, i + 1)
                if names.are_alike(a, b):
                    return clash_problem(self._units, names, kind, a, b, with_remedy=False).message
        return None


class _Names:
    """Looks up whose spans are, which is needed only where something is wrong."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self._loaded: dict[int, Experience] = {}

    def part(self, k: int) -> Experience:
        """The segments of a part."""
        if k not in self._loaded:
            self._loaded[k] = self._units.keys(k)
        return self._loaded[k]

    def of(self, span: Span) -> tuple[str, str | None]:
        """Its episode and agent."""
        exp = self.part(span.part)
        i = int(np.searchsorted(exp.offsets, span.row, side="right")) - 1
        return exp.segments.episode_id[i], exp.segments.agent_id[i]

    def are_alike(self, a: Span, b: Span) -> bool:
        """Whether they are of one agent in one episode, and not only have equal hashes."""
        return self.of(a) == self.of(b)


_REMEDIES: Final = {
    "duplicate": " Was a file copied, or an episode recorded twice? Move one of them away, or give it another id.",
    "after_end": " Two episodes may share one id: give each its own.",
    "out_of_order": " Put the files in order by their names, or read it with on_bad='repair'.",
    "gap": "",
}


def clash_problem(units: Units, names: _Names, kind: str, a: Span, b: Span, *, with_remedy: bool = True) -> Problem:
    """Two spans of one agent in one episode that do not go together, ``a`` the earlier by time, in words."""
    steps = {"duplicate": b.start - a.start, "out_of_order": 0}.get(kind, a.stop - a.start - 1)
    first = units.place(a.part, a.row + a.lookback + steps, names.part(a.part))
    second = units.place(b.part, b.row + b.lookback, names.part(b.part))
    episode, agent = names.of(b)
    who = f"episode {episode!r}" + (f", agent {agent!r}" if agent is not None else "")
    what = {
        "duplicate": f"has step t {b.start} a second time; it is in {first.words} already",
        "after_end": f"goes on at t {b.start}, after its end in {first.words}",
        "out_of_order": f"goes on at t {b.start} before its beginning, which is in {first.words}: it is out of order",
        "gap": f"goes on at t {b.start}, but its steps from t {a.stop} on are missing: it is cut there",
    }[kind]
    text = f"{second.words}: {who} {what}.{_REMEDIES[kind] if with_remedy else ''}"
    rows, is_gap = b.stop - b.start, kind == "gap"
    return Problem(
        kind, text, second.file, second.row, col.EPISODE_ID, 1 if is_gap else rows, True, second.row_group, is_gap
    )
