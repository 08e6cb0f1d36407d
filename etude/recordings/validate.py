# SPDX-License-Identifier: Apache-2.0
"""Validation: every row of a recording looked at, every problem named with its place and a remedy."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from gymnasium import spaces

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.filesystems import AnyPath
from etude.recordings.faults import fault_of, lost_files
from etude.recordings.files import DataFile, find_files, open_files
from etude.recordings.formats.parts import Parts, Problem
from etude.recordings.manifest import Header, Manifest
from etude.recordings.opening import Found, found, place_of
from etude.recordings.pieces import continues
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
    check = _Check(recording.path)
    files = check.open(paths)
    for file in files:
        check.rows_of(file)
    check.ends(None)
    check.overlaps()
    return Report(where, len(paths), check.rows, len(check.episodes), tuple(check.problems))


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


class _Check:
    """The state of one validation: what is known so far of every agent's episode."""

    def __init__(self, path: AnyPath) -> None:
        self.path = path
        self.problems: list[Problem] = []
        self.rows = 0
        self.episodes: dict[str, int] = {}
        self._agents: dict[str | None, int] = {}
        self._files: list[DataFile] = []
        self._spans: list[np.ndarray] = []  # int64 rows: episode, agent, first t, stop t, file, row in file, done
        self._header: Header | None = None
        self._held: tuple[Experience, DataFile, int] | None = None  # the rows before, their file and first row

    def open(self, paths: list[AnyPath]) -> list[DataFile]:
        """The files that can be looked into."""
        files = []
        for path, file in zip(paths, open_files(paths), strict=True):
            if isinstance(file, DataError):
                self.problems.append(Problem("truncated_file", str(file), str(path), repairable=len(paths) > 1))
            else:
                files.append(file)
        manifest = None
        try:
            manifest = Manifest.read(self.path) if self.path.is_dir() else None
        except DataError as error:
            self.problems.append(Problem("manifest", str(error), str(self.path), repairable=True))
        if manifest:
            for lost in lost_files(self.path, manifest, files):
                self.problems.append(Problem(lost.kind, lost.message, str(lost.path), repairable=True))
        self._header = manifest.header if manifest else next((file.header for file in files if file.header), None)
        first = next((file for file in files if file.header), None)
        for file in files:
            fault = fault_of(file, first or file, self._header)
            if fault:
                self.problems.append(Problem(fault.kind, fault.message, str(file.path), repairable=len(files) > 1))
            else:
                self._files.append(file)
        return self._files

    def rows_of(self, file: DataFile) -> None:
        """Look at all rows of a file."""
        start = 0
        for group in range(file.num_groups):
            rows = file.metadata.row_group(group).num_rows
            try:
                table = file.read_group(group, file.schema.names, None)
                empty = list(self._empty(table, file, group, start))
                self.problems.extend(empty)
                exp = None if empty else file.experience_of(table, group)
            except (DataError, pa.ArrowException) as error:
                text = str(error) if str(file.path) in str(error) else f"{file.path}: row group {group}: {error}"
                self.problems.append(Problem("undecodable", text, str(file.path), None, None, rows, True, group))
                exp = None
            if exp is not None:
                self.rows += rows
            self.ends(exp)
            self._held = None
            if exp is not None and exp.num_segments:
                self._look(exp, file, group, start)
                self._held = exp, file, start
            start += rows

    def _empty(self, table: pa.Table, file: DataFile, group: int, start: int) -> Iterator[Problem]:
        """Nulls where there must be a value."""
        free = (col.AGENT_ID, col.MODULE_ID, col.LOOKBACK)
        for name in table.column_names:
            column = table[name]
            may_be = name in free or col.is_under(name, col.FINAL_OBS) or pa.types.is_string(column.type)
            if column.null_count and not may_be:
                row = start + int(np.argmax(np.asarray(column.is_null())))
                yield self._problem("empty", "is empty", file, group, row, name, column.null_count)

    def _look(self, exp: Experience, file: DataFile, group: int, start: int) -> None:
        """Check the values of a row group, and remember where its segments are."""
        for name, column in exp.steps.items():
            values = np.asarray(column)
            if col.is_under(name, col.OBS) or col.is_under(name, col.ACTION) or name == col.REWARD:
                self._check_finite(values, np.arange(start, start + len(values)), name, file, group)
        assert self._header is not None
        for name, leaf in {**self._header.obs_leaves(), **self._header.action_leaves()}.items():
            if name in exp.steps:
                self._check_discrete(np.asarray(exp.steps[name]), leaf, name, file, group, start)
        known = np.flatnonzero(exp.segments.has_final_obs)
        ends = exp.offsets[1:] - 1 + start
        for name, column in exp.final_obs.items():
            on_disk = col.FINAL_OBS + name[len(col.OBS) :]
            self._check_finite(np.asarray(column)[known], ends[known], on_disk, file, group)
        s = exp.segments
        episode = [self.episodes.setdefault(e, len(self.episodes)) for e in s.episode_id.tolist()]
        agent = [self._agents.setdefault(a, len(self._agents)) for a in s.agent_id.tolist()]
        own = s.lookback
        spans = [episode, agent, s.t_start + own, s.t_start + exp.lengths, np.full(len(s), self._files.index(file))]
        spans += [start + exp.offsets[:-1] + own, s.done]
        table = np.stack([np.asarray(column, np.int64) for column in spans], axis=1)
        self._spans.append(table[own < exp.lengths])  # lookback alone has no steps of its own

    def _check_finite(self, values: np.ndarray, rows: np.ndarray, name: str, file: DataFile, group: int) -> None:
        if values.dtype.kind != "f" or np.isfinite(values.sum(dtype=np.float64)):
            return
        flat = ~np.isfinite(values.reshape(len(values), -1))
        bad = np.flatnonzero(flat.any(axis=1))
        if len(bad):
            at = int(flat[bad[0]].argmax())
            what = f"holds {values.reshape(len(values), -1)[bad[0], at]} in component {at}"
            self.problems.append(self._problem("nan", what, file, group, int(rows[bad[0]]), name, len(bad)))

    def _check_discrete(self, values: np.ndarray, leaf: Any, name: str, file: DataFile, group: int, start: int) -> None:
        if isinstance(leaf, spaces.Discrete):
            low, high = int(leaf.start), int(leaf.start + leaf.n) - 1
        elif isinstance(leaf, spaces.MultiDiscrete):
            low, high = leaf.start, leaf.start + leaf.nvec - 1  # type: ignore[assignment]
        else:
            return
        outside = ((values < low) | (values > high)).reshape(len(values), -1).any(axis=1)
        if outside.any():
            row = int(outside.argmax())
            what = f"is {values[row]}, outside its space {leaf}"
            self.problems.append(
                self._problem("out_of_space", what, file, group, start + row, name, int(outside.sum()))
            )

    def ends(self, following: Experience | None) -> None:
        """Look at the rows before, now that ``following`` is known: what comes after each segment must be known."""
        if self._held is None:
            return
        exp, file, start = self._held
        unknown = np.flatnonzero(~exp.segments.has_final_obs & ~exp.segments.terminated)
        goes_on = following is not None and following.num_segments > 0 and continues(exp, following)
        if goes_on and len(unknown) and unknown[-1] == exp.num_segments - 1:
            unknown = unknown[:-1]
        if len(unknown) and exp.final_obs:
            row = start + int(exp.offsets[unknown[0] + 1]) - 1
            what = f"is empty at the end of a segment of episode {exp.segments.episode_id[unknown[0]]!r}"
            name = next(iter(col.renamed(exp.final_obs, col.OBS, col.FINAL_OBS)))
            self.problems.append(self._problem("no_final_obs", what, file, None, row, name, len(unknown)))

    def overlaps(self) -> None:
        """Steps that are there twice, and episodes that go on after their end."""
        if not self._spans:
            return
        spans = np.concatenate(self._spans)
        spans = spans[np.lexsort((spans[:, 5], spans[:, 4], spans[:, 2], spans[:, 1], spans[:, 0]))]
        a, b = spans[:-1], spans[1:]
        same = (a[:, 0] == b[:, 0]) & (a[:, 1] == b[:, 1])
        names = {code: episode for episode, code in self.episodes.items()}
        twice, ended = same & (b[:, 2] < a[:, 3]), same & (a[:, 6] == 1)
        behind = (b[:, 4] < a[:, 4]) | ((b[:, 4] == a[:, 4]) & (b[:, 5] < a[:, 5]))
        kinds = {"duplicate": twice, "after_end": ended & ~twice, "out_of_order": same & behind & ~twice & ~ended}
        for kind, is_bad in kinds.items():
            told: set[int] = set()
            for i in np.flatnonzero(is_bad):
                episode = int(b[i, 0])
                if episode not in told:
                    told.add(episode)
                    self._tell_pair(kind, names[episode], a[i], b[i])

    def _tell_pair(self, kind: str, episode: str, a: np.ndarray, b: np.ndarray) -> None:
        here, there = (f"{self._files[int(x[4])].path} row {int(x[5])}" for x in (b, a))
        if kind == "duplicate":
            what = f"{here}: episode {episode!r} has step t {int(b[2])} a second time; it is in {there} already"
            remedy = "Was a file copied, or an episode recorded twice? Move one of them away, or give it another id."
        elif kind == "after_end":
            what = f"{here}: episode {episode!r} goes on at t {int(b[2])}, after its end in {there}"
            remedy = "Two episodes may share one id: give each its own."
        else:
            what = f"{here}: episode {episode!r} goes on at t {int(b[2])}, but stands before t {int(a[2])}, in {there}"
            remedy = "Put the files in order by their names, or read it with on_bad='repair'."
        file = str(self._files[int(b[4])].path)
        problem = Problem(kind, f"{what}. {remedy}", file, int(b[5]), col.EPISODE_ID, int(b[3] - b[2]), True)
        self.problems.append(problem)

    def _problem(
        self, kind: str, what: str, file: DataFile, group: int | None, row: int, name: str, count: int
    ) -> Problem:
        place = f"{file.path}: " + (f"row group {group}, " if group is not None else "") + f"row {row}"
        more = f" ({count:,} rows like it)" if count > 1 else ""
        remedy = _REMEDIES[kind]
        message = f"{place}: column `{name}` {what}{more}. {remedy}"
        return Problem(kind, message, str(file.path), row, name, count, True, group)


_ABLE = {True: "repairable", False: "not repairable"}
_REMEDIES = {
    "empty": "Fill it, or leave these rows out with a filter.",
    "nan": "Leave the episode out with a filter, or mend the env that gave it.",
    "out_of_space": "Was it recorded with another space? Leave these rows out with a filter, or mend them.",
    "no_final_obs": "Train without `next_obs`, or leave the episode out.",
}
