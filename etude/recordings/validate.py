# SPDX-License-Identifier: Apache-2.0
"""Validation: every row of a recording looked at, every problem named with its place and a remedy."""

import dataclasses
from typing import TYPE_CHECKING, Any

from etude.errors import DataError
from etude.recordings.checks import Checks
from etude.recordings.files import find_files
from etude.recordings.formats.parts import Parts, Problem
from etude.recordings.opening import Found, found, place_of
from etude.recordings.tolerance import load_rest

if TYPE_CHECKING:
    from etude.recordings.opening import DataLike


@dataclasses.dataclass(frozen=True)
class Report:
    """What validation found."""

    path: str
    files: int
    rows: int
    """Rows that could be looked at."""
    episodes: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Nothing is wrong."""
        return not self.problems

    def __str__(self) -> str:
        head = f"{self.path}: {self.files} files, {self.rows:,} rows, {self.episodes:,} episodes"
        if self.ok:
            return f"{head}: no problems."
        lines = [f"  {kind}: {text}" for kind, text in self.summary().items()]
        each = [f"{problem} [{_ABLE[problem.repairable]}]" for problem in self.problems]
        return "\n".join([f"{head}: {len(self.problems)} problem(s).", *lines, *each])

    def summary(self) -> dict[str, str]:
        """For each kind of problem, how many there are, of how many rows, and whether they can be repaired."""
        out = {}
        for kind in sorted({problem.kind for problem in self.problems}):
            alike = [problem for problem in self.problems if problem.kind == kind]
            able = sum(problem.repairable for problem in alike)
            some = f"{able:,} of them {_ABLE[True]}" if 0 < able < len(alike) else _ABLE[able > 0]
            rows = sum(problem.count for problem in alike)
            out[kind] = f"{len(alike):,} problem{'s' * (len(alike) > 1)}, {rows:,} row{'s' * (rows > 1)}; {some}"
        return out

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return {**dataclasses.asdict(self), "ok": self.ok}


def validate(path: "DataLike", *, filesystem: Any = None) -> Report:
    """Look at every row of the recording at ``path``, of whatever `Recording.open` takes, in bounded memory.

    Found are: files that are missing, have other rows than listed, are cut off, can't be decoded or are of another
    format; other spaces or columns than the rest; empty rows, NaN and infinity in observations, actions and rewards;
    discrete values outside their space; steps that are there twice; episodes that go on after their end; segments that
    stand behind later ones of their episode; segments, other than terminated ones, of which it is not known what
    follows. What can't be read does not hide the rest. `Problem.repairable` says what `etude.recordings.screening` can
    mend, or leave out so that the rest can be used.

    Raises:
        DataError: there is nothing at ``path`` that could be a recording.
    """
    faults: list[Problem] = []
    try:
        recordings = found(path, filesystem, faults)
        where = str(place_of(path, filesystem, recordings))
        reports = [_validated(recording, where) for recording in recordings]
    except DataError:
        if not faults:
            raise
        return Report(str(path), len({problem.file for problem in faults}), 0, 0, tuple(faults))
    if faults:
        unread = len({problem.file for problem in faults if problem.row is None})  # of the others, lines
        reports.append(Report(where, unread, 0, 0, tuple(faults)))
    if len(reports) == 1:
        return reports[0]
    files, rows, episodes = (sum(getattr(r, name) for r in reports) for name in ("files", "rows", "episodes"))
    return Report(where, files, rows, episodes, tuple(p for report in reports[::-1] for p in report.problems))


def _validated(recording: Found, where: str) -> Report:
    if not recording.is_own or recording.path is None:
        return _report_of(where, recording.open())
    paths = [file for path in recording.files or [recording.path] for file in find_files(path)]
    checks = Checks(recording.path)
    files = checks.open(paths)
    for file in files:
        checks.rows_of(file)
    checks.ends(None)
    checks.overlaps()
    return Report(where, len(paths), checks.rows, len(checks.episodes), tuple(checks.problems))


def _report_of(where: str, parts: Parts) -> Report:
    """On another tool's recording."""
    problems = tuple(parts.problems())
    rows, episodes = 0, set()
    for k in range(parts.num_parts):
        try:
            exp = load_rest(parts, k, ())[0]
        except DataError:
            continue  # one of the problems
        rows += exp.num_steps
        episodes.update(exp.segments.episode_id.tolist())
    return Report(where, len(parts.files), rows, len(episodes), problems)


_ABLE = {True: "repairable", False: "not repairable"}
