# SPDX-License-Identifier: Apache-2.0
"""Screening: checks of data as it is loaded, and what happens to bad data.

Reading, info, convert, merge, training and off-policy evaluation all load units through `Screened`; `validate` lists
what it would refuse. The checks, from `etude.recordings.faults`, look for NaN and infinity in observations,
actions and rewards; discrete values outside their space; segments with an unknown continuation; duplicate steps, steps
after the end of their episode, and steps out of order; and unreadable data. Values are checked in the requested columns
only.

Some problems are harmless (`Problem.harmless`), such as a copy of a file, which is read once. The logger
``etude.recordings`` logs the first problem of each kind as a warning.
"""

import dataclasses
import itertools
import logging
import shlex
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np
import pyarrow.compute as pc

from etude import columns as col
from etude.display import counted
from etude.errors import DataError, SettingsError, printable
from etude.experience import Experience
from etude.files import AnyPath
from etude.recordings.faults import (
    HARMLESS,
    KINDS,
    Fault,
    Timeline,
    beyond_bounds,
    distinct,
    find,
    forbidden_actions,
    logp_fault,
    problem_of,
)
from etude.recordings.format import MAPPING, Problem, UnreadableError
from etude.recordings.formats.source import Source
from etude.recordings.opening import GivenSpaces, Places, Units, check_stated, opened
from etude.recordings.pieces import filtered
from etude.recordings.repair import RepairPlan, without_faults
from etude.recordings.where import RowFilter
from etude.spaces import Space

if TYPE_CHECKING:
    from etude.recordings.opening import DataLike

OnBad: TypeAlias = Literal["strict", "repair", "skip"]
MODES: Final = ("strict", "repair", "skip")


@dataclasses.dataclass
class Findings:
    """The faults found when a part was loaded."""

    lost: Counter[str] = dataclasses.field(default_factory=Counter)
    """The number of rows left out, by kind of fault."""
    fault_counts: Counter[str] = dataclasses.field(default_factory=Counter)
    """The number of faults, by kind."""
    harmless: tuple[Problem, ...] = ()
    """Problems that are only warnings."""
    keys: Experience | None = None
    """The segments of the part without columns, if it was loaded in another process."""


_log = logging.getLogger("etude.recordings")


def check_mode(mode: str | None) -> None:
    """Raise a SettingsError if ``mode`` is neither one of `MODES` nor None."""
    if mode is not None and mode not in MODES:
        raise SettingsError(f"on_bad is {mode!r}, but must be one of {', '.join(MODES)}, or None to skip most checks.")


class Screened:
    """The parts of a recording, loaded such that bad data is refused, repaired or left out.

    ``strict`` raises a DataError at the first fault. ``repair`` repairs what it can without inventing data, and leaves
    out the rest. ``skip`` leaves out whole segments (or the piece, if a segment is stored in pieces) and unreadable
    files. Rows left out are counted. None checks only for duplicate steps, which no mode accepts: they would be read as
    episodes that never happened.

    ``repair`` and ``skip`` must know where each episode's steps are, so they read the key columns of all parts once
    before the first part. For Etude's own recordings, this is cheap; other formats may have to decode their rows.
    ``strict`` and None collect these positions as parts are loaded. They take about 60 bytes of memory per segment.
    Thread-safe.

    Args:
        path: Where the recording is.
        units: The units to check.
        mode: ``strict``, ``repair``, ``skip`` or None.
        faults: Problems with files that could not be opened and are not among ``units``.
    """

    def __init__(
        self, path: AnyPath | Places, units: Units, mode: OnBad | None, faults: Sequence[Problem] = ()
    ) -> None:
        self.path = path
        self._units, self._mode, self._faults = units, mode, list(faults)
        is_path, how = not isinstance(path, Places), " --env ENV" if units.given else ""
        self._lists = f"etude data validate {shlex.quote(str(path))}{how}" if is_path else "Recording.validate()"
        self._leaves = units.header.leaves()
        self._bounded = _bounded(units)
        self._lock = threading.RLock()
        self._plan: RepairPlan | None = None
        self._timeline = self._new_timeline()
        self._found: dict[int, Findings] = {}  # by part; -1 is the whole recording
        self._is_in_worker = False
        self._logged = {f"{MAPPING} "}  # kinds of problem with a column's root, and `_BEGUN`

    def __getstate__(self) -> dict[str, Any]:
        """The state for a worker process, including the plan of repairs, which needs all parts and is made now.

        The main process counts what the worker finds (see `count`).
        """
        plan = self._repair_plan() if self._timeline is None else None
        with self._lock:
            whole = {k: findings for k, findings in self._found.items() if k < 0}
        new = {"_found": whole, "_logged": set(), "_is_in_worker": True, "_plan": plan}
        return {**self.__dict__, **new, "_lock": None, "_timeline": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock, self._timeline = threading.RLock(), self._new_timeline()

    def share_findings(self, other: "Screened") -> None:
        """From now on, count the faults found by this object or by ``other``, which has the same parts, for both."""
        self._lock, self._found, self._logged = other._lock, other._found, other._logged

    def _rows(self, k: int) -> int:
        """The number of rows of part ``k``, without those left out for their order.

        Rows with bad values are included, because they are found only when the part is loaded.
        """
        return self._units.rows(k) if self._timeline is not None else self._repair_plan().rows(k)

    # -- faults found -----------------------------------------------------------------------------------------

    @property
    def left_out(self) -> dict[str, int]:
        """The rows that ``on_bad`` has left out so far, by kind of fault. Reading more parts may add to it."""
        lost = [findings.lost for _, findings in self._findings()]
        return _total(*lost, *(Counter({problem.kind: problem.count}) for problem in self._faults))

    @property
    def met(self) -> dict[str, int]:
        """The number of faults (segments, rows or files) that ``on_bad`` has found so far by kind, repaired or not."""
        met = [findings.fault_counts for _, findings in self._findings()]
        return _total(*met, Counter(problem.kind for problem in self._faults))

    def _findings(self) -> list[tuple[int, Findings]]:
        with self._lock:
            return list(self._found.items())

    @property
    def unread_parts(self) -> int:
        """The number of files and parts left out so far whose number of rows is unknown."""
        found = [findings for k, findings in self._findings() if k >= 0]
        parts = sum(findings.fault_counts["unreadable"] for findings in found if not findings.lost["unreadable"])
        return parts + sum(not problem.count for problem in self._faults if problem.kind in _UNREAD)

    @property
    def warnings(self) -> list[str]:
        """Harmless findings so far, such as copies that are read only once: one text for each kind."""
        by_kind: dict[str, list[Problem]] = {}
        for _, findings in self._findings():
            for problem in findings.harmless:
                by_kind.setdefault(problem.message if problem.kind == MAPPING else problem.kind, []).append(problem)
        more = {kind: f" ({len(alike) - 1:,} more like it)" if alike[1:] else "" for kind, alike in by_kind.items()}
        return [f"{alike[0].message.rstrip('.')}{more[kind]}." for kind, alike in by_kind.items()]

    def check_on_bad(self, given: OnBad | None) -> None:
        """Raise a SettingsError for an ``on_bad``, other than the default, that these were not opened with."""
        if given not in ("strict", self._mode):
            raise SettingsError(
                f"`on_bad` is {given!r}, but has no effect on a Recording that was opened with {self._mode!r}: open it "
                f"with Recording.open(path, on_bad={given!r})."
            )

    @property
    def leaves_out(self) -> bool:
        """Whether ``on_bad`` leaves bad data out, so that the steps read depend on the columns requested."""
        return self._mode in ("repair", "skip")

    def counts(self, k: int) -> Findings:
        """The faults found in part ``k``, to be passed to `count` in another process."""
        with self._lock:
            found = self._found.get(k, Findings())
            if found.keys is not None:
                self._found[k] = dataclasses.replace(found, keys=None)  # they are sent only once
            return found

    def count(self, k: int, more: Findings | None) -> None:
        """Add the faults found in part ``k``, here or in another process; nothing is counted twice.

        The first harmless problem of each kind is logged, separately for observations, actions and other columns.

        Raises:
            DataError: a segment of the part conflicts with a segment of another part.
        """
        if more is None:
            return
        with self._lock:
            if more.keys is not None and not self._is_in_worker:
                self._add(k, more.keys, self._timeline)
            found = self._found.setdefault(k, Findings())
            found.lost |= more.lost  # the larger count of each kind: the columns may differ
            found.fault_counts |= more.fault_counts
            found.harmless = tuple(dict.fromkeys([*found.harmless, *more.harmless]))
            found.keys = more.keys if self._is_in_worker else None
            for problem in found.harmless if not self._is_in_worker and self._mode is not None else ():
                key = f"{problem.kind} {(problem.column or '').partition(col.SEPARATOR)[0]}"
                if key not in self._logged:
                    self._logged.add(key)
                    _log.warning("%s", problem.message)

    def left_out_report(self) -> str:
        """A summary of what ``on_bad`` has found and left out so far; empty if it found nothing."""
        met, lost = self.met, self.left_out
        rows = {
            kind: "an unknown number of" if kind in _UNREAD and not lost.get(kind) else f"{lost.get(kind, 0):,}"
            for kind in met
        }
        listed = [f"{kind} {count:,} times ({rows[kind]} rows left out)" for kind, count in met.items()]
        return f"{self.path}: {', '.join(listed)}. `{self._lists}` lists them." if met else ""

    # -- loading ----------------------------------------------------------------------------------------------

    def _load(
        self,
        k: int,
        columns: Sequence[str],
        where: pc.Expression | str | None = None,
        clashes: Timeline | None = None,
        *,
        finals: bool = True,
        next_obs: bool = False,
    ) -> Experience:
        """Load part ``k`` without bad data; see `etude.recordings.opening.Units`.

        Args:
            k: Index of the part.
            columns: Full names of the step columns.
            where: Keep only the rows for which this holds: a pyarrow expression, or the text of a `RowFilter`. For
                Etude's own files, row groups that can't match are not read.
            clashes: Checks the order of the remaining rows, from `_new_timeline`; needed only with ``where``.
            finals: If False, final observations may be left out; those of images are slow to decode.
            next_obs: Whether the next observation of each step is needed: ``repair`` and ``skip`` then also leave out
                the last step of a truncated episode if the observation after it is unknown.

        Raises:
            DataError: there is a fault (mode ``strict``) or a duplicate step (modes ``strict`` and None). The message
                says where it is, how many rows have it, and what to do.
            SettingsError: ``where`` is a text that is not a valid condition on the steps of this recording.
        """
        where = RowFilter(where) if isinstance(where, str) else where
        if self._timeline is None:
            exp = self._load_repaired(k, columns if where is None else None, finals or where is not None, next_obs)
            if isinstance(where, RowFilter):
                return where.chosen(exp, looks_ahead=next_obs).only(columns)
            return exp if where is None else filtered(exp, where, columns, looks_ahead=next_obs)
        self._begin()
        problems: list[Problem] = []
        if isinstance(where, RowFilter):
            exp = self._steps_where(k, columns, where, next_obs)
        elif where is not None and next_obs:
            exp = filtered(self._units.load(k), where, columns, looks_ahead=True)
        elif where is not None:
            exp = self._units.load(k, columns, where)
        elif self._units.own is not None:
            exp = self._units.load(k, columns, finals=finals and bool(columns))
        else:
            exp, problems = self._units.load_readable(k, columns)
            bad = next((problem for problem in problems if not problem.harmless), None)
            if bad is not None:
                self._units.load(k, columns)  # raises the error that caused it
                raise DataError(bad.message)
        with self._lock:
            self._add(k, exp, clashes if where is not None else self._timeline)
        wrong = _wrong_values(self._units, k, exp, self._leaves)
        checks = (wrong, logp_fault(exp, self._leaves), beyond_bounds(exp, self._bounded))
        faults = itertools.chain(*checks) if self._mode == "strict" else ()
        for fault in faults:
            is_needed = next_obs and fault.kind == "no_final_obs"
            if fault.kind == "no_final_obs" and where is not None and not (is_needed and fault.harmless):
                continue  # the filter cut the segment there
            problem = problem_of(self._units, k, exp, fault)
            if is_needed or not fault.harmless:
                raise DataError(f"{problem.message} `{self._lists}` lists all problems. {_REMEDY}")
            problems.append(problem)
        keys = exp.only(()) if where is None and self._is_in_worker else None
        self.count(k, Findings(harmless=tuple(problems) if self._mode == "strict" else (), keys=keys))
        return exp

    def _new_timeline(self) -> Timeline | None:
        """Return a checker of the order of steps for one pass, such as one with a filter.

        None in the modes ``repair`` and ``skip``, which check the order beforehand.
        """
        if self.leaves_out:
            return None
        return Timeline(self._units, KINDS[:3] if self._mode == "strict" else KINDS[:1])

    def _repair_plan(self) -> RepairPlan:
        with self._lock:
            if self._plan is None:
                self._begin()
                self._plan = plan = RepairPlan(self._units, keep_order=self._mode == "skip")
                self.count(-1, Findings(plan.left_out, plan.fault_counts, plan.harmless))
            return self._plan

    def _load_repaired(self, k: int, columns: Sequence[str] | None, finals: bool, next_obs: bool) -> Experience:
        plan = self._repair_plan()
        try:
            exp, problems = self._units.load_readable(k, columns)
        except UnreadableError as error:
            exp = self._units.nothing(self._units.columns if columns is None else columns)
            problems = [dataclasses.replace(error.problem, kind="unreadable", count=self._rows_lost(k))]
        found = Findings(harmless=tuple(problem for problem in problems if problem.harmless))
        for problem in problems:
            if not problem.harmless:
                found.lost[problem.kind] += problem.count
                found.fault_counts[problem.kind] += 1
        found.harmless += tuple(problem_of(self._units, k, exp, f) for f in beyond_bounds(exp, self._bounded))
        exp = plan.applied(k, exp)
        if not finals:  # they are not requested, so nothing is left out because of them
            exp = Experience(exp.steps, exp.offsets, exp.segments, {})
        faults = [fault for fault in _wrong_values(self._units, k, exp, self._leaves) if next_obs or not fault.harmless]
        for fault in faults:
            found.fault_counts[fault.kind] += len(fault.rows)
        exp, lost = without_faults(exp, faults, whole_segments=self._mode == "skip", next_obs=next_obs)
        found.lost += lost
        self.count(k, found)
        return exp

    def _rows_lost(self, k: int) -> int:
        """The number of rows of an unreadable part; 0 if it is unknown."""
        try:
            return self._repair_plan().rows_stored(k) or self._units.rows(k)
        except DataError:
            return 0

    def _steps_where(self, k: int, columns: Sequence[str], where: RowFilter, next_obs: bool) -> Experience:
        """Load these columns of the steps of part ``k`` for which ``where`` holds."""
        where.check_names((), self._units.columns)
        names = list(dict.fromkeys([*columns, *where.columns_in(self._units.columns)]))
        # Joined recordings have other episode ids here than on disk.
        episodes = where.episodes() if self._units.own is not None else None
        return where.chosen(self._units.load(k, names, episodes), looks_ahead=next_obs).only(columns)

    def _begin(self) -> None:
        """Raise or count the problems of the whole recording, before the first part is loaded."""
        with self._lock:
            if self._faults and self._mode == "strict":
                raise DataError(self._faults[0].message)
            if _BEGUN not in self._logged:
                problems = self._units.problems
                bad = next((problem for problem in problems if not problem.harmless), None)
                if self._mode == "strict" and bad is not None:
                    raise DataError(bad.message)
                self._logged.add(_BEGUN)
                self.count(-1, Findings(harmless=tuple(problem for problem in problems if problem.harmless)))
                if self._faults:
                    more = f" {len(self._faults) - 1:,} more like it." if self._faults[1:] else ""
                    _log.warning("left out: %s%s `%s` lists all.", self._faults[0].message, more, self._lists)

    def _add(self, k: int, exp: Experience, clashes: Timeline | None) -> None:
        if clashes is None:
            return
        was_complete = clashes.is_complete
        try:
            clashes.add(k, exp)
        except DataError as error:
            raise DataError(f"{error} {_REMEDY}") from None
        if clashes is self._timeline and clashes.is_complete and not was_complete and self._mode == "strict":
            self.count(-1, Findings(harmless=tuple(clashes.problems(HARMLESS))))


_BEGUN: Final = "begun"
_UNREAD: Final = ("unreadable", "truncated_file")


def _wrong_values(units: Units, k: int, exp: Experience, leaves: Mapping[str, Space]) -> Iterator[Fault]:
    """Find the faults of ``exp``, read from unit ``k``.

    Action masks are not checked in Etude's own recordings: they are the env's, and connectors may have changed what the
    numbers of the module's actions mean.
    """
    yield from find(exp, leaves)
    if not units.is_own(k):
        yield from forbidden_actions(exp, leaves)


def _bounded(units: Units) -> dict[str, Space]:
    """The simple spaces, by column, that are the user's. The data may exceed their bounds."""
    return {n: leaf for n, leaf in units.header.leaves().items() if n.partition(col.SEPARATOR)[0] in units.claimed}


def _total(*counted: Counter[str]) -> dict[str, int]:
    return dict(sorted(sum(counted, Counter[str]()).items()))


_REMEDY: Final = "Repair with --on-bad=repair, leave it out with --on-bad=skip, or fix the file."


# -- validation ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `validate`."""

    path: str
    files: int
    rows: int
    """The number of readable rows."""
    episodes: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether there are no errors; there may be warnings."""
        return not self.errors

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems for which reading and training refuse the recording, unless ``on_bad`` says otherwise."""
        return tuple(problem for problem in self.problems if not problem.harmless)

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """The harmless problems."""
        return tuple(problem for problem in self.problems if problem.harmless)

    def __str__(self) -> str:
        numbers = (self.files, "file"), (self.rows, "row"), (self.episodes, "episode")
        head = f"{self.path}: {', '.join(counted(*number) for number in numbers)}"
        count = counted(len(self.errors), "problem") if self.errors else "no problems"
        more = f", {counted(len(self.warnings), 'warning')}" if self.warnings else ""
        lines = [f"  {kind}: {text}" for kind, text in self.summary().items()]
        each = [f"{problem} [{_ABLE[problem.repairable]}]" for problem in self.errors]
        warnings = [f"{one} [warning]" for one in self.warnings]
        return "\n".join(map(printable, [f"{head}: {count}{more}.", *lines, *each, *warnings]))

    def summary(self) -> dict[str, str]:
        """For each kind of error, how many there are, how many rows they affect, and whether they can be repaired."""
        out = {}
        for kind in sorted({problem.kind for problem in self.errors}):
            alike = [problem for problem in self.errors if problem.kind == kind]
            able = sum(problem.repairable for problem in alike)
            repair = f"{able:,} of them {_ABLE[True]}" if 0 < able < len(alike) else _ABLE[able > 0]
            rows = sum(problem.count for problem in alike)
            out[kind] = f"{counted(len(alike), 'problem')}, {counted(rows, 'row')}; {repair}"
        return out

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return {**dataclasses.asdict(self), "ok": self.ok}


def validate(
    path: "DataLike", *, filesystem: Any = None, obs_space: Space | None = None, action_space: Space | None = None
) -> Report:
    """Check every row of a recording, in bounded memory; the arguments are those of `Recording.open`.

    The checks are those of reading and training (`etude.recordings.screening`), so a recording whose report is `ok` can
    be read and trained on without ``on_bad``. In addition, files are reported that are missing, truncated or
    undecodable, whose format, spaces or columns differ from those of the rest, or whose number of rows is not the one
    listed. An unreadable file does not hide other problems. `Problem.repairable` says whether ``on_bad`` can repair a
    problem or leave out the bad rows; `Problem.harmless` marks warnings.

    Raises:
        DataError: there is no recording at ``path``, or several that do not belong together; or the data does not fit a
            given space, or states another one. If a `Source` can't be opened, the report says why.
    """
    return report_on(path, lambda: (obs_space, action_space), filesystem)


def report_on(path: "DataLike", given: GivenSpaces, filesystem: Any = None, env: str | None = None) -> Report:
    """Like `validate`, but ``given`` returns the spaces, which are those of ``env``, if it is given."""
    faults: list[Problem] = []
    try:
        place, units = opened(path, filesystem, faults, given, of_env=env is not None)
        check_stated(place, units, given, env)
    except DataError as error:
        if not faults and not isinstance(path, Source):
            raise
        if all(str(error) != fault.message for fault in faults):
            faults.append(Problem("unreadable", str(error), str(Places(path)), count=0))
        return Report(str(Places(path)), len({fault.file for fault in faults}), 0, 0, tuple(faults))
    problems = list(faults)
    rows, episodes = _check_units(units, problems)
    unread = {fault.file for fault in faults if fault.row is None}
    return Report(str(place), len({*map(str, units.files), *unread}), rows, episodes, tuple(problems))


def _check_units(units: Units, problems: list[Problem]) -> tuple[int, int]:
    """Check every unit, and add its problems to ``problems``. Returns the numbers of readable rows and episodes."""
    problems += units.problems
    rows, episodes, timeline = 0, [np.zeros(0, np.int64)], Timeline(units)
    leaves, bounded = units.header.leaves(), _bounded(units)
    for k in range(len(units)):
        try:
            exp, more = units.load_readable(k)
        except UnreadableError as error:
            problems.append(error.problem)
            continue
        rows += exp.num_steps
        problems += more
        wrong = _wrong_values(units, k, exp, leaves)
        faults = (*wrong, *logp_fault(exp, leaves), *beyond_bounds(exp, bounded))
        problems += (problem_of(units, k, exp, fault) for fault in faults)
        timeline.add(k, exp)
        episodes.append(distinct(exp.segments.episode_id.mapped(hash, np.int64)))
    problems += timeline.problems()
    return rows, len(distinct(*episodes))


_ABLE = {True: "repairable", False: "not repairable"}
