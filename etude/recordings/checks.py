# SPDX-License-Identifier: Apache-2.0
"""Checks: the rows of Etude's own files looked at one after the other, for problems with their place and a remedy."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.filesystems import AnyPath
from etude.recordings.faults import fault_of, lost_files
from etude.recordings.faulty_rows import outside_of
from etude.recordings.files import DataFile, open_files
from etude.recordings.formats.grouping import bad_rows, shown
from etude.recordings.formats.parts import Problem
from etude.recordings.manifest import Header, Manifest
from etude.recordings.pieces import continues

_REMEDIES = {
    "empty": "Fill it, or leave these rows out with a filter.",
    "nan": "Leave the episode out with a filter, or mend the env that gave it.",
    "out_of_space": "Was it recorded with another space? Leave these rows out with a filter, or mend them.",
    "no_final_obs": "Train without `next_obs`, or leave the episode out.",
}


class Checks:
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
        bad = bad_rows(values)
        if len(bad):
            what = f"holds {shown(values[bad[0]])}"
            self.problems.append(self._problem("nan", what, file, group, int(rows[bad[0]]), name, len(bad)))

    def _check_discrete(self, values: np.ndarray, leaf: Any, name: str, file: DataFile, group: int, start: int) -> None:
        outside = outside_of(values, leaf)
        if outside is not None and len(outside):
            row = int(outside[0])
            what = f"is {values[row]}, outside its space {leaf}"
            self.problems.append(self._problem("out_of_space", what, file, group, start + row, name, len(outside)))

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
