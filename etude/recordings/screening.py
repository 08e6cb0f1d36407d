# SPDX-License-Identifier: Apache-2.0
"""The one rule for bad data: what is looked for as units of a recording are loaded, and what is done about it.

Reading, info, convert, merge, training and off-policy evaluation all load units through `ScreenedUnits`; `validate`
lists what it would refuse. What is looked for: NaN and infinity in observations, actions and rewards; discrete values
outside their space (`etude.recordings.faulty_rows`); segments of which it is not known what follows; steps that are
there twice, or after the end of their episode, or behind later ones (`etude.recordings.spans`); and what can't be read.
Values are looked at in the columns that are asked for.

Some problems are harmless (`Problem.harmless`), such as a copy that is read once. They are logged as warnings, the
first of each kind, by the logger ``etude.recordings``.
"""

import logging
import shlex
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from etude.errors import DataError, SettingsError
from etude.experience import Experience
from etude.recordings.faulty_rows import Found, found_in, steps_lost, without
from etude.recordings.format import Problem
from etude.recordings.pieces import filtered, in_order
from etude.recordings.screening_index import ClashIndex, Index
from etude.recordings.spans import KINDS
from etude.recordings.units import Units
from etude.recordings.where import RowFilter

OnBad: TypeAlias = Literal["strict", "repair", "skip"]
MODES: Final = ("strict", "repair", "skip")
Counts: TypeAlias = tuple[Counter[str], Counter[str], tuple[Problem, ...], Experience | None]
"""Rows left out and faults met, by kind; what is harmless; and, from another process, the segments of the part."""

_log = logging.getLogger("etude.recordings")


def check_mode(mode: str | None) -> None:
    """Raise a SettingsError where ``mode`` is none of `MODES`, nor None."""
    if mode is not None and mode not in MODES:
        raise SettingsError(f"on_bad is {mode!r}; known are {', '.join(MODES)}, and None for not looking at values.")


class ScreenedUnits:
    """Loads parts without what is bad in them.

    ``strict`` raises a DataError at the first fault. ``repair`` mends what can be without making anything up, and
    leaves out the rest. ``skip`` leaves out whole segments (where the disk has one in pieces: the piece), and files
    that can't be read. What was left out is counted. None looks at nothing but steps that are there twice, which no
    mode lets through: they would become episodes that never happened.

    ``repair`` and ``skip`` need to know first where each episode's steps are: before the first part, the key columns of
    all parts are read once. Of Etude's own recordings that is little; other formats may have to decode their rows.
    ``strict`` and None learn it as parts are loaded. It takes some 60 bytes of memory a segment. May be used from
    several threads.

    Args:
        units: What to look at.
        mode: ``strict``, ``repair``, ``skip`` or None.
        path: Where the recording is, for messages.
        has_path: The shell finds it at ``path``; a `Source`, for instance, is found by Python alone.
        faults: What could not be opened and is not among ``units``.
        index: What was learned of the whole by another process.
        is_elsewhere: This is a worker process. What it finds is for the one that counts (`count`).
    """

    def __init__(
        self,
        units: Units,
        mode: OnBad | None,
        path: str = "",
        faults: Sequence[Problem] = (),
        *,
        has_path: bool = True,
        index: Index | None = None,
        is_elsewhere: bool = False,
    ) -> None:
        check_mode(mode)
        self.units = units
        self.mode = mode
        self._path = path or str(units.files[0] if units.files else "the recording")
        self._lists = f"etude data validate {shlex.quote(self._path)}" if has_path else "Recording.validate()"
        self._leaves = {**units.header.obs_leaves(), **units.header.action_leaves()}
        self._lock = threading.RLock()
        self._index = index
        self._clashes: ClashIndex | None = None
        if mode in ("strict", None):
            self._clashes = self._new_clashes()
        self._faults = list(faults)
        self._lost: dict[int, Counter[str]] = {}  # by part: the rows left out at loading, by kind
        self._met: dict[int, Counter[str]] = {}  # by part: the faults met at loading
        self._harmless: dict[int, tuple[Problem, ...]] = {}  # by part; -1 is the whole
        self._is_elsewhere = is_elsewhere
        self._keys: dict[int, Experience] = {}  # by part: its segments, for the process that counts
        self._logged: set[str] = set()
        self._has_begun = False

    def _new_clashes(self) -> ClashIndex:
        return ClashIndex(self.units, KINDS[:3] if self.mode == "strict" else KINDS[:1])

    def rows(self, k: int) -> int:
        """The steps of part ``k`` without those left out for their order; rows with bad values count until loaded."""
        if self._clashes is not None:
            return self.units.rows(k)
        index = self._indexed()
        return index.rows[k] - (index.plans[k].rows() if k in index.plans else 0)

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

    @property
    def warnings(self) -> list[str]:
        """What was met so far that is harmless, one text for each kind."""
        with self._lock:
            found = [problem for problems in self._harmless.values() for problem in problems]
        by_kind: dict[str, list[Problem]] = {}
        for problem in found:
            by_kind.setdefault(problem.kind, []).append(problem)
        more = {kind: f" ({len(alike) - 1:,} more like it)" if alike[1:] else "" for kind, alike in by_kind.items()}
        return [f"{alike[0].message.rstrip('.')}{more[kind]}." for kind, alike in by_kind.items()]

    def counts(self, k: int) -> Counts:
        """What was found as part ``k`` was loaded: for `count` in another process."""
        with self._lock:
            found = self._lost.get(k, Counter()), self._met.get(k, Counter()), self._harmless.get(k, ())
            return *found, self._keys.pop(k, None)

    def count(self, k: int, counts: Counts) -> None:
        """Take in what was found as part ``k`` was loaded, here or in another process; nothing is counted twice.

        Raises:
            DataError: a segment of the part does not go with one of another part.
        """
        lost, met, harmless, keys = counts
        with self._lock:
            if keys is not None:
                self._add(k, keys, self._clashes)
            self._lost[k] = self._lost.get(k, Counter()) | lost  # the larger of each: columns may differ
            self._met[k] = self._met.get(k, Counter()) | met
            self._note(k, harmless)

    def _note(self, k: int, harmless: Iterable[Problem]) -> None:
        """Keep what is harmless in part ``k``, and log the first of each kind."""
        known = dict.fromkeys([*self._harmless.get(k, ()), *harmless])
        self._harmless[k] = tuple(known)
        for problem in known if not self._is_elsewhere and self.mode is not None else ():
            if problem.kind not in self._logged:
                self._logged.add(problem.kind)
                _log.warning("%s", problem.message)

    def sent(self) -> "ScreenedUnits":
        """The same for a worker process. What can't be learned from one part after the other is learned now."""
        index = self._indexed() if self._clashes is None else None
        has_path = self._lists.startswith("etude")
        sent = ScreenedUnits(
            self.units, self.mode, self._path, self._faults, has_path=has_path, index=index, is_elsewhere=True
        )
        return sent

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_clashes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.RLock()
        self._clashes = self._new_clashes() if self.mode in ("strict", None) else None

    def report(self) -> str:
        """What was met and left out so far, in words; empty where nothing was."""
        met, lost = self.met, self.left_out
        if not met:
            return ""
        listed = [f"{kind} {count:,} times ({lost.get(kind, 0):,} rows left out)" for kind, count in met.items()]
        return f"{self._path}: {', '.join(listed)}. `{self._lists}` lists them."

    # -- loading ----------------------------------------------------------------------------------------------

    def load(
        self,
        k: int,
        columns: Sequence[str],
        where: pc.Expression | str | None = None,
        clashes: ClashIndex | None = None,
        *,
        finals: bool = True,
    ) -> Experience:
        """Part ``k`` without what is bad in it; see `etude.recordings.units.Units`.

        Args:
            k: Which.
            columns: The step columns, each by its name.
            where: Only rows for which this holds: an expression of pyarrow's, or the text of a `RowFilter`. Some of
                Etude's files are read by what Parquet can look at of it.
            clashes: From `pass_over`, with ``where``: the order of the rows that are left is looked at in it.
            finals: With False, what was observed after segments may be left out; that of images takes long to decode.

        Raises:
            DataError: with ``strict``, there is a fault: named are its place, how many rows have it, and what to do. In
                all modes but ``repair`` and ``skip``, a step is there twice.
            SettingsError: ``where`` is a text that is no condition on the steps of this recording.
        """
        where = RowFilter(where) if isinstance(where, str) else where
        if self._clashes is not None:
            return self._checked(k, columns, where, clashes, finals)
        exp = self._mended(k, columns if where is None else None)
        if isinstance(where, RowFilter):
            return _filtered(exp, where, columns)
        return exp if where is None else filtered(exp, where, columns)

    def pass_over(self) -> ClashIndex | None:
        """What one pass with a filter looks at the order of steps in; None where the mode settles that before."""
        return None if self._clashes is None else self._new_clashes()

    def _mended(self, k: int, columns: Sequence[str] | None) -> Experience:
        index = self._indexed()
        exp, lost, met, harmless = self._loaded(k, columns)
        if exp.num_segments and k in index.plans:
            exp = self._planned(k, exp, index)
        found = list(found_in(exp, self._leaves))
        met += Counter({kind: sum(len(f.rows) for f in found if f.kind == kind) for kind in {f.kind for f in found}})
        exp, more = (_repaired if self.mode == "repair" else _skipped)(exp, found)
        self.count(k, (lost + more, met, harmless, None))
        return exp

    def nothing(self, columns: Sequence[str] | None) -> Experience:
        """See `etude.recordings.units.Units.nothing`."""
        return self.units.nothing(self.units.columns if columns is None else columns)

    def _loaded(
        self, k: int, columns: Sequence[str] | None
    ) -> tuple[Experience, Counter[str], Counter[str], tuple[Problem, ...]]:
        """What can be read of part ``k``, the rows that can't be, how many faults that is, and what is harmless."""
        try:
            exp, problems = self.units.load_rest(k, columns)
        except DataError:
            return self.nothing(columns), Counter(unreadable=self._rows_lost(k)), Counter(unreadable=1), ()
        lost: Counter[str] = Counter()
        for problem in problems:
            if not problem.harmless:
                lost[problem.kind] += problem.count
        met = Counter(problem.kind for problem in problems if not problem.harmless)
        return exp, lost, met, tuple(problem for problem in problems if problem.harmless)

    def _rows_lost(self, k: int) -> int:
        """The rows of a part that can't be read, as far as that is known."""
        try:
            return self._indexed().rows[k] or self.units.rows(k)
        except DataError:
            return 0

    def _indexed(self) -> Index:
        with self._lock:
            if self._index is None:
                self._begin()
                self._index = Index(self.units, keep_order=self.mode == "skip")
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

    def _checked(
        self,
        k: int,
        columns: Sequence[str],
        where: pc.Expression | RowFilter | None,
        clashes: ClashIndex | None,
        finals: bool,
    ) -> Experience:
        self._begin()
        problems: list[Problem] = []
        if isinstance(where, RowFilter):
            exp = self._steps_where(k, columns, where)
        elif where is not None:
            exp = self.units.load(k, columns, where)
        elif self.units.own is not None:
            exp = self.units.load(k, columns, finals=finals and bool(columns))
        else:
            exp, problems = self.units.load_rest(k, columns)
            bad = next((problem for problem in problems if not problem.harmless), None)
            if bad is not None:
                self.units.load(k, columns)  # which knows what has caused it
                raise DataError(bad.message)
        with self._lock:
            if where is None and self._is_elsewhere:
                self._keys[k] = Experience({}, exp.offsets, exp.segments, {})
            self._add(k, exp, clashes if where is not None else self._clashes)
        if self.mode == "strict":
            for found in found_in(exp, self._leaves):
                if found.kind == "no_final_obs" and where is not None:
                    continue  # the filter has cut there
                if not found.harmless:
                    raise DataError(self._said(k, exp, found))
                problems.append(problem_of(self.units, k, exp, found))
            with self._lock:
                self._note(k, problems)
        return exp

    def _steps_where(self, k: int, columns: Sequence[str], where: RowFilter) -> Experience:
        """Columns of the steps of part ``k`` for which ``where`` holds."""
        where.check_names((), self.units.columns)
        names = list(dict.fromkeys([*columns, *where.columns_in(self.units.columns)]))
        in_arrow = None
        if self.units.own is not None:  # what is joined has other episode ids here than on the disk
            columns_of = self.units.nothing(names).steps
            in_arrow = where.in_arrow({name: values.dtype for name, values in columns_of.items() if values.ndim == 1})
        return _filtered(self.units.load(k, names, in_arrow), where, columns)

    def _begin(self) -> None:
        """Look at what is known of the whole before the first part."""
        with self._lock:
            if self._faults and self.mode == "strict":
                raise DataError(self._faults[0].message)
            if not self._has_begun:
                problems = self.units.problems
                bad = next((problem for problem in problems if not problem.harmless), None)
                if self.mode == "strict" and bad is not None:
                    raise DataError(bad.message)
                self._note(-1, (problem for problem in problems if problem.harmless))
                self._has_begun = True

    def _add(self, k: int, exp: Experience, clashes: ClashIndex | None) -> None:
        if clashes is None:
            return
        was_complete = clashes.is_complete
        try:
            clashes.add(k, exp)
        except DataError as error:
            raise DataError(f"{error} {_REMEDY}") from None
        if clashes is self._clashes and clashes.is_complete and not was_complete and self.mode == "strict":
            self._note(-1, clashes.problems(["gap"]))

    def _said(self, k: int, exp: Experience, found: Found) -> str:
        row, count = int(found.rows[0]), len(found.rows)
        rows = (
            f"{count:,} of {exp.num_steps:,} rows {'is' if count == 1 else 'are'} affected (`{self._lists}` lists them)"
        )
        place = self.units.place(k, row, exp)
        return f"{place.words}: `{found.column}` {found.what}. {rows}. {_REMEDY}"


def _filtered(exp: Experience, where: RowFilter, columns: Sequence[str]) -> Experience:
    """Some columns of the steps for which ``where`` holds; steps that are left out cut segments."""
    exp = where.chosen(exp, looks_ahead=False)
    final_obs = {name: column for name, column in exp.final_obs.items() if name in columns}
    return Experience({name: exp.steps[name] for name in columns}, exp.offsets, exp.segments, final_obs)


_REMEDY: Final = "Repair with --on-bad=repair, leave it out with --on-bad=skip, or mend the file."

_REMEDIES: Final = {
    "nan": "Leave the episode out with a filter, or mend the env that gave it.",
    "out_of_space": "Was it recorded with another space? Leave these rows out with a filter, or mend them.",
    "no_final_obs": "Train without `next_obs`, or leave the episode out.",
}


def problem_of(units: Units, k: int, exp: Experience, found: Found) -> Problem:
    """A fault of some rows of unit ``k``, which is ``exp``, in words."""
    row, count = int(found.rows[0]), len(found.rows)
    place = units.place(k, row, exp)
    more = f" ({count:,} rows like it)" if count > 1 else ""
    text = f"{place.words}: column `{found.column}` {found.what}{more}. {_REMEDIES[found.kind]}"
    return Problem(found.kind, text, place.file, place.row, found.column, count, True, place.row_group, found.harmless)


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
