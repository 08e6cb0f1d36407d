# SPDX-License-Identifier: Apache-2.0
"""Validation: every row of a recording looked at, every problem named with its place and a remedy."""

import dataclasses
from typing import TYPE_CHECKING, Any

from etude.errors import DataError, printable
from etude.recordings.faulty_rows import found_in
from etude.recordings.format import Problem, UnreadableError
from etude.recordings.opening import found, joined, place_of
from etude.recordings.screening import problem_of
from etude.recordings.screening_index import ClashIndex
from etude.recordings.units import Units

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
        """Nothing is wrong; there may be warnings."""
        return not self.errors

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems for which reading and training refuse the recording, unless ``on_bad`` says otherwise."""
        return tuple(problem for problem in self.problems if not problem.harmless)

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """The problems that do no harm."""
        return tuple(problem for problem in self.problems if problem.harmless)

    def __str__(self) -> str:
        head = f"{self.path}: {self.files} files, {self.rows:,} rows, {self.episodes:,} episodes"
        count = f"{len(self.errors)} problem(s)" if self.errors else "no problems"
        more = f", {len(self.warnings)} warning(s)" if self.warnings else ""
        lines = [f"  {kind}: {text}" for kind, text in self.summary().items()]
        each = [f"{problem} [{_ABLE[problem.repairable]}]" for problem in self.errors]
        warnings = [f"{one} [warning]" for one in self.warnings]
        return "\n".join(map(printable, [f"{head}: {count}{more}.", *lines, *each, *warnings]))

    def summary(self) -> dict[str, str]:
        """For each kind of problem, how many there are, of how many rows, and whether they can be repaired."""
        out = {}
        for kind in sorted({problem.kind for problem in self.errors}):
            alike = [problem for problem in self.errors if problem.kind == kind]
            able = sum(problem.repairable for problem in alike)
            some = f"{able:,} of them {_ABLE[True]}" if 0 < able < len(alike) else _ABLE[able > 0]
            rows = sum(problem.count for problem in alike)
            out[kind] = f"{len(alike):,} problem{'s' * (len(alike) > 1)}, {rows:,} row{'s' * (rows != 1)}; {some}"
        return out

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return {**dataclasses.asdict(self), "ok": self.ok}


def validate(path: "DataLike", *, filesystem: Any = None) -> Report:
    """Look at every row of the recording at ``path``, of whatever `Recording.open` takes, in bounded memory.

    It judges by the rule that reading and training go by (`etude.recordings.screening`): where the report is `ok`, they
    take the recording as it is. Also found are files that are missing, have other rows than listed, are cut off, can't
    be decoded or are of another format, and other spaces or columns than the rest. What can't be read does not hide the
    rest. `Problem.repairable` says what ``on_bad`` can mend, or leave out so that the rest can be used;
    `Problem.harmless`, what is only a warning.

    Raises:
        DataError: there is nothing at ``path`` that could be a recording.
    """
    faults: list[Problem] = []
    try:
        recordings = found(path, filesystem, faults)
        members = [recording.open() for recording in recordings]
    except DataError:
        if not faults:
            raise
        return Report(str(path), len({problem.file for problem in faults}), 0, 0, tuple(faults))
    where = str(place_of(path, filesystem, recordings))
    problems = list(faults)
    try:
        together = [joined(members)]
    except DataError as error:
        problems.append(Problem("not_together", str(error), where, count=0))
        together = [joined([member]) for member in members]
    looks = [_look(units, problems) for units in together]
    files = {str(file) for units in together for file in units.files}
    unread = {problem.file for problem in faults if problem.row is None}
    rows, episodes = (sum(counts) for counts in zip(*looks, strict=True))
    return Report(where, len(files | unread), rows, episodes, tuple(problems))


def _look(units: Units, problems: list[Problem]) -> tuple[int, int]:
    """Look at every unit, and add what is wrong to ``problems``; gives the rows and the episodes."""
    problems += units.problems
    rows, clashes = 0, ClashIndex(units)
    leaves = {**units.header.obs_leaves(), **units.header.action_leaves()}
    for k in range(len(units)):
        try:
            exp, more = units.load_rest(k)
        except UnreadableError as error:
            problems.append(error.problem)
            continue
        rows += exp.num_steps
        problems += more
        problems += (problem_of(units, k, exp, fault) for fault in found_in(exp, leaves))
        clashes.add(k, exp)
    problems += clashes.problems()
    return rows, clashes.num_episodes()


_ABLE = {True: "repairable", False: "not repairable"}
