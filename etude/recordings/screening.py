# SPDX-License-Identifier: Apache-2.0
"""Bad data kept from training: parts of a recording looked at as they are loaded; refused, mended or left out.

What is looked for: NaN and infinity in observations, actions and rewards; discrete values outside their space;
segments of which it is not known what follows; steps that are there twice; episodes that go on after their end;
segments that stand behind later ones of their episode; and what can't be read. Values are looked at in the columns
that are asked for.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.errors import DataError, SettingsError
from etude.experience import Experience
from etude.filesystems import AnyPath
from etude.recordings.faulty_rows import Found, found_in, steps_lost, without
from etude.recordings.formats.parts import Parts, Problem
from etude.recordings.manifest import Header
from etude.recordings.own import OwnParts
from etude.recordings.pieces import in_order
from etude.recordings.screening_index import Index, StrictIndex
from etude.recordings.tolerance import load_rest, where_is

OnBad: TypeAlias = Literal["strict", "repair", "skip"]
MODES: Final = ("strict", "repair", "skip")
Counts: TypeAlias = tuple[Counter[str], Counter[str]]
"""Rows left out and faults met, by kind."""


def check_mode(mode: str | None) -> None:
    """Raise a SettingsError where ``mode`` is none of `MODES`, nor None."""
    if mode is not None and mode not in MODES:
        raise SettingsError(f"on_bad is {mode!r}; known are {', '.join(MODES)}, and none for not looking.")


class ScreenedParts:
    """Parts without what is bad in them; see `etude.recordings.formats.parts.Parts`.

    ``strict`` raises a DataError at the first fault. ``repair`` mends what can be without making anything up, and
    leaves out the rest. ``skip`` leaves out whole segments (where the disk has one in pieces: the piece), and files
    that can't be read. What was left out is counted.

    ``repair`` and ``skip`` need to know first where each episode's steps are: before the first part, the key columns of
    all parts are read once. Of Etude's own recordings that is little; other formats may have to decode their rows.
    ``strict`` learns it as parts are loaded. It takes some 200 bytes of memory a segment. May be used from several
    threads.

    Args:
        parts: What to look at.
        mode: ``strict``, ``repair`` or ``skip``.
        path: Where the recording is, for messages.
        faults: What could not be opened and is not among ``parts``.
    """

    def __init__(self, parts: Parts, mode: OnBad, path: str = "", faults: Sequence[Problem] = ()) -> None:
        check_mode(mode)
        self.parts = parts
        self.mode = mode
        self._path = path or str(parts.files[0] if parts.files else "the recording")
        self._leaves = {**parts.header.obs_leaves(), **parts.header.action_leaves()}
        self._lock = threading.RLock()
        self._index: Index | None = None
        self._strict = StrictIndex() if mode == "strict" else None
        self._faults = list(faults)
        self._lost: dict[int, Counter[str]] = {}  # by part: the rows left out at loading, by kind
        self._met: dict[int, Counter[str]] = {}  # by part: the faults met at loading

    # -- what it is -------------------------------------------------------------------------------------------

    @property
    def format(self) -> str:
        """Of the parts."""
        return self.parts.format

    @property
    def header(self) -> Header:
        """Of the parts."""
        return self.parts.header

    @property
    def files(self) -> list[AnyPath]:
        """Of the parts; those that can't be opened are not among them."""
        return self.parts.files

    @property
    def columns(self) -> list[str]:
        """Of the parts."""
        return self.parts.columns

    @property
    def num_parts(self) -> int:
        """Of the parts: one that is left out as a whole has no rows."""
        return self.parts.num_parts

    def rows(self, k: int) -> int:
        """The steps of part ``k`` without those left out for their order; rows with bad values count until loaded."""
        if self.mode == "strict":
            return self.parts.rows(k)
        index = self._indexed()
        return index.rows[k] - (index.plans[k].rows() if k in index.plans else 0)

    def problems(self) -> Iterator[Problem]:
        """All of them, mended or not."""
        yield from self._faults
        yield from self.parts.problems()

    # -- what was found ---------------------------------------------------------------------------------------

    @property
    def left_out(self) -> dict[str, int]:
        """The rows left out so far, by kind of fault. A part that is loaded again is not counted again."""
        return self._total(self._lost, [(p.kind, p.count) for p in self._faults], rows=True)

    @property
    def met(self) -> dict[str, int]:
        """The faults met so far by kind, mended ones included: segments, rows or files."""
        return self._total(self._met, [(p.kind, 1) for p in self._faults], rows=False)

    def _total(
        self, loaded: Mapping[int, Counter[str]], first: Sequence[tuple[str, int]], *, rows: bool
    ) -> dict[str, int]:
        total: Counter[str] = Counter()
        with self._lock:
            for kind, count in first:
                total[kind] += count
            for counted in loaded.values():
                total += counted
            if self._index is not None:
                total += self._index.left_out if rows else self._index.met
        return {kind: count for kind, count in sorted(total.items()) if count}

    def counts(self, k: int) -> Counts:
        """The rows left out and the faults met as part ``k`` was loaded, by kind: for `count` in another process."""
        with self._lock:
            return self._lost.get(k, Counter()), self._met.get(k, Counter())

    def count(self, k: int, counts: Counts) -> None:
        """Take in what was found as part ``k`` was loaded, here or in another process; nothing is counted twice."""
        lost, met = counts
        with self._lock:
            self._lost[k] = self._lost.get(k, Counter()) | lost  # the larger of each: columns may differ
            self._met[k] = self._met.get(k, Counter()) | met

    def index(self) -> None:
        """Learn now where all episodes are, for one that will not load all parts: a worker process.

        What is wrong with that is raised at the first `load`, where ``strict`` is wanted.
        """
        if self._strict is None:
            self._indexed()
            return
        with self._lock:
            self._strict.add_all(self.parts)

    def report(self) -> str:
        """What was met and left out so far, in words; empty where nothing was."""
        met, lost = self.met, self.left_out
        if not met:
            return ""
        listed = [f"{kind} {count:,} times ({lost.get(kind, 0):,} rows left out)" for kind, count in met.items()]
        return f"{self._path}: {', '.join(listed)}. `etude data validate {self._path}` lists them."

    # -- loading ----------------------------------------------------------------------------------------------

    def load(self, k: int, columns: Sequence[str] | None = None) -> Experience:
        """Part ``k`` without what is bad in it; see `etude.recordings.formats.parts.Parts`.

        Raises:
            DataError: with ``strict``, there is a fault: named are its place, how many rows have it, and what to do.
        """
        if self._strict is not None:
            return self._checked(k, columns)
        index = self._indexed()
        exp, lost, met = self._loaded(k, columns)
        if exp.num_segments and k in index.plans:
            exp = self._planned(k, exp, index)
        found = list(found_in(exp, self._leaves))
        met += Counter({kind: sum(len(f.rows) for f in found if f.kind == kind) for kind in {f.kind for f in found}})
        exp, more = (_repaired if self.mode == "repair" else _skipped)(exp, found)
        self.count(k, (lost + more, met))
        return exp

    def nothing(self, columns: Sequence[str] | None) -> Experience:
        """No rows, with these columns.

        Raises:
            DataError: no part can be read.
        """
        if isinstance(self.parts, OwnParts):
            return self.parts.nothing(columns)
        for k in range(self.num_parts):
            try:
                return self.parts.load(k, columns)[:0]
            except DataError:
                if k + 1 == self.num_parts:
                    raise
        raise DataError(f"{self._path}: there is nothing in it.")

    def _loaded(self, k: int, columns: Sequence[str] | None) -> tuple[Experience, Counter[str], Counter[str]]:
        """What can be read of part ``k``, the rows that can't be, and how many faults that is."""
        try:
            exp, problems = load_rest(self.parts, k, columns)
        except DataError:
            return self.nothing(columns), Counter(unreadable=self._rows_lost(k)), Counter(unreadable=1)
        counts: Counter[str] = Counter()
        for problem in problems:
            counts[problem.kind] += problem.count
        return exp, counts, Counter(problem.kind for problem in problems)

    def _rows_lost(self, k: int) -> int:
        """The rows of a part that can't be read, as far as that is known."""
        try:
            return self._indexed().rows[k] or self.parts.rows(k)
        except DataError:
            return 0

    def _indexed(self) -> Index:
        with self._lock:
            if self._index is None:
                self._index = Index(self.parts, keep_order=self.mode == "skip")
            return self._index

    def _planned(self, k: int, exp: Experience, index: Index) -> Experience:
        plan, at = index.plans[k], index.places(k, exp)
        if plan.links and exp.final_obs:
            exp = self._linked(k, exp, at, index)
        lost = np.zeros(exp.num_steps, bool)
        for start, stop, _ in plan.left_out:
            lost |= (at >= start) & (at < stop)
        exp = without(exp, lost, ()) if lost.any() else exp
        return in_order(exp).join() if plan.in_order else exp

    def _linked(self, k: int, exp: Experience, at: NDArray[np.int64], index: Index) -> Experience:
        """Final observations that are not known taken from where the episode goes on."""
        segments = exp.segments[np.arange(exp.num_segments)]
        finals = {name: np.array(column) for name, column in exp.final_obs.items()}
        for last, j, row in index.plans[k].links:
            here = np.flatnonzero(at[exp.offsets[1:] - 1] == last)
            if not len(here) or segments.has_final_obs[here[0]]:
                continue
            obs = index.obs_at(j, row, tuple(finals))
            if obs is not None:
                segments.has_final_obs[here[0]] = True
                for name, value in obs.items():
                    finals[name][here[0]] = value
        return Experience(exp.steps, exp.offsets, segments, finals)

    # -- strict -----------------------------------------------------------------------------------------------

    def _checked(self, k: int, columns: Sequence[str] | None) -> Experience:
        assert self._strict is not None
        if self._faults:
            raise DataError(self._faults[0].message)
        exp = self.parts.load(k, columns)
        try:
            with self._lock:
                self._strict.add(self.parts, k, exp)
        except DataError as error:
            raise DataError(f"{error} {self._remedy()}") from None
        for found in found_in(exp, self._leaves):
            if found.kind == "no_final_obs":  # a truncated episode's: an error only to who asks for `next_obs`
                found = found.of(exp, ~exp.segments.truncated)
            if not len(found.rows):
                continue
            row, count = int(found.rows[0]), len(found.rows)
            rows = f"{count:,} of {exp.num_steps:,} rows {'is' if count == 1 else 'are'} affected"
            lists = f"(`etude data validate {self._path}` lists them)"
            where = where_is(self.parts, k, row, exp)
            raise DataError(f"{where}: `{found.column}` {found.what}. {rows} {lists}. {self._remedy()}")
        return exp

    def _remedy(self) -> str:
        return "Repair with --on-bad=repair, leave it out with --on-bad=skip, or mend the file."


def _repaired(exp: Experience, found: Sequence[Found]) -> tuple[Experience, Counter[str]]:
    lost = np.zeros(exp.num_steps, bool)
    counts: Counter[str] = Counter()
    for fault in found:
        rows = steps_lost(exp, fault)
        counts[fault.kind] += int((~lost[rows]).sum())
        lost[rows] = True
    return (without(exp, lost, found) if found else exp), counts


def _skipped(exp: Experience, found: Sequence[Found]) -> tuple[Experience, Counter[str]]:
    touched = np.zeros(exp.num_segments, bool)
    counts: Counter[str] = Counter()
    for fault in found:
        which = np.unique(np.searchsorted(exp.offsets, fault.rows, side="right") - 1)
        counts[fault.kind] += int(exp.lengths[which[~touched[which]]].sum())
        touched[which] = True
    return (exp.select(~touched) if touched.any() else exp), counts
