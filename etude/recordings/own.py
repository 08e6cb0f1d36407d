# SPDX-License-Identifier: Apache-2.0
"""Etude's own recordings as parts: the row groups of Parquet files."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.table import KEYS
from etude.files import AnyPath
from etude.recordings.faults import fault_of, lost_files, unlisted
from etude.recordings.files import DataFile, find_files, open_files
from etude.recordings.formats.parts import Parts, Place, Problem, UnreadableError
from etude.recordings.formats.source import ETUDE, Source
from etude.recordings.formats.table import open_parts
from etude.recordings.layout import FORMAT, Header
from etude.recordings.manifest import Manifest, read_manifest
from etude.recordings.pieces import continues


def open_own(path: AnyPath, given: Sequence[AnyPath] | None, faults: list[Problem] | None) -> Parts:
    """Open a recording in Etude's format; see `OwnParts`. One that another tool has written anew is read as a table.

    Raises:
        DataError: a file is broken or missing, or the files do not belong together.
    """
    own = OwnParts(path, given, faults)
    if own.is_in_order():
        return own
    header = own.known_header
    if header is None:
        return open_parts(Source(own.files, preset=ETUDE))
    table = open_parts(
        Source(own.files, preset=ETUDE, obs_space=header.obs_space, action_space=header.action_space, env=header.env)
    )
    table.header = dataclasses.replace(table.header, meta={**header.meta, **table.header.meta})
    return table


_TOLD: Final = {"truncated_file": 0, "missing_file": 1, "other_rows": 3}
"""In which order problems of files are told; all others stand between."""


class OwnParts:
    """The row groups of a recording in Etude's format. See `etude.recordings.formats.parts.Parts`.

    Args:
        path: The folder, or one file.
        given: The files, where they were given one by one; None is all under ``path``.
        faults: Where given, files that can't be used are left out and named here.

    Raises:
        DataError: a file is broken or missing, or the files do not belong together.
    """

    format = FORMAT

    def __init__(
        self, path: AnyPath, given: Sequence[AnyPath] | None = None, faults: list[Problem] | None = None
    ) -> None:
        self.path = path
        paths = find_files(path) if given is None else [file for one in given for file in find_files(one)]
        opened = dict(zip(paths, open_files(paths), strict=True))
        files = [file for file in opened.values() if isinstance(file, DataFile)]
        manifest = None if any(file.version > 1 for file in files) else self._manifest(path, faults)
        like = next((file for file in files if file.header), files[0] if files else None)
        wanted = manifest.header if manifest else like.header if like else None
        found: list[Problem] = []
        if manifest:
            found += unlisted(path, manifest, files)
        elif given is None and path.is_dir():
            found += lost_files(path, files, [file.name for file in paths])
        lost = {problem.file: problem.count for problem in found if problem.kind == "lost_rows"}
        lost |= {str(path / name): rows for name, rows in manifest.rows.items()} if manifest else {}
        faulty = {file.path: fault_of(file, like or file, wanted) for file in files}
        for name, file in opened.items():
            is_part = len(paths) > 1  # of one file alone, nothing would be left
            if isinstance(file, DataError):
                count = lost.get(str(name), 0)
                found.append(Problem("truncated_file", str(file), str(name), count=count, repairable=is_part))
            elif fault := faulty[name]:
                found.append(dataclasses.replace(fault, repairable=is_part))
        for problem in sorted(found, key=lambda problem: _TOLD.get(problem.kind, 2)):
            if problem.kind != "lost_rows":
                _refuse(problem, faults)
        self._files: tuple[DataFile, ...] = tuple(file for file in files if not faulty[file.path])
        if not self._files:
            assert faults  # no file is there, but for those with faults
            raise DataError(faults[0].message)
        self.known_header = manifest.header if manifest else _newest(self._files)
        """None where another tool has written all files anew, and left it out."""
        self._groups = [(file, group) for file in self._files for group in range(file.num_groups)]

    def _manifest(self, path: AnyPath, faults: list[Problem] | None) -> Manifest | None:
        try:
            return read_manifest(path) if path.is_dir() else None
        except DataError as error:
            _refuse(Problem("manifest", str(error), str(path), count=0, repairable=True), faults)
            return None

    @property
    def header(self) -> Header:
        """What the files say of the whole."""
        assert self.known_header is not None  # else `open_own` reads a table
        return self.known_header

    def is_in_order(self) -> bool:
        """Whether rows stand as Etude's writer puts them. Of files that another tool has written anew, this reads two
        columns: in each row group they must be in order, and no segment may lie in row groups that are apart.
        """
        groups: list[tuple[NDArray[np.int64], int, int]] = []
        for file in self._files:
            found = file.segments_anew()
            if found is None:
                return False
            groups += found
        every = np.concatenate([np.zeros(0, np.int64), *(segments for segments, _, _ in groups)])
        pairs = itertools.pairwise(groups)
        continued = sum(int(a[-1]) == int(b[0]) and last < first for (a, _, last), (b, first, _) in pairs)
        return bool(len(every) - len(np.unique(every)) == continued)

    @property
    def files(self) -> list[AnyPath]:
        """The data files, in order."""
        return [file.path for file in self._files]

    @property
    def columns(self) -> list[str]:
        """The step columns."""
        names = self._files[0].schema.names
        return [name for name in names if name not in KEYS and not col.is_under(name, col.FINAL_OBS)]

    @property
    def num_parts(self) -> int:
        """The row groups."""
        return len(self._groups)

    def rows(self, k: int) -> int:
        """Of row group ``k``, by its file's footer."""
        file, group = self._groups[k]
        return int(file.metadata.row_group(group).num_rows)

    def load(self, k: int, columns: Sequence[str] | None = None, where: pc.Expression | None = None) -> Experience:
        """Row group ``k``, whose last segment knows what follows it even in the next row group; views.

        Args:
            k: Which.
            columns: Step columns by name or root; None is all.
            where: Only rows for which this holds.
        """
        file, group = self._groups[k]
        names = self._files[0].names_for(columns)
        exp = file.load(group, names, where)
        segments = exp.segments
        if not exp.num_segments or segments.has_final_obs[-1] or segments.done[-1] or not exp.final_obs:
            return exp
        if k + 1 < len(self._groups):
            next_file, next_group = self._groups[k + 1]
            try:
                following = next_file.first_row(next_group, names)
            except DataError:  # it is said when that row group is loaded
                return exp
            if following.num_segments and continues(exp, following):
                segments.has_final_obs[-1] = True
                for name, values in exp.final_obs.items():
                    values[-1] = following.steps[name][0]
        return exp

    def load_rest(self, k: int, columns: Sequence[str] | None) -> tuple[Experience, list[Problem]]:
        """Row group ``k``, of which either all or nothing can be read.

        Raises:
            UnreadableError: nothing.
        """
        try:
            return self.load(k, columns), []
        except DataError as error:
            file, group = self._groups[k]
            place, rows = self.place(k, 0), self.rows(k)
            text = str(error) if str(file.path) in str(error) else f"{file.path}: row group {group}: {error}"
            empty = self._empty(k)
            problem = empty or Problem("undecodable", text, place.file, None, None, rows, True, group)
            raise UnreadableError(problem) from error

    def _empty(self, k: int) -> Problem | None:
        """The first column of row group ``k`` that is empty where there must be a value."""
        file, group = self._groups[k]
        free = (col.AGENT_ID, col.MODULE_ID, col.LOOKBACK)
        names = [
            field.name
            for field in file.schema
            if not (field.name in free or col.is_under(field.name, col.FINAL_OBS) or pa.types.is_string(field.type))
        ]
        try:
            table = file.read_group(group, names, None)
        except DataError:
            return None
        for name in names:
            if table[name].null_count:
                place, count = self.place(k, int(np.argmax(np.asarray(table[name].is_null())))), table[name].null_count
                more = f" ({count:,} rows like it)" if count > 1 else ""
                text = f"{place.words}: column `{name}` is empty{more}. Fill it, or leave these rows out with a filter."
                return Problem("empty", text, place.file, place.row, name, count, True, group)
        return None

    def steps(self, k: int, columns: Sequence[str]) -> Experience:
        """Row group ``k`` without what was observed after its segments, which takes long to decode of images."""
        file, group = self._groups[k]
        names = self._files[0].names_for(columns)
        return file.load(group, [name for name in names if not col.is_under(name, col.FINAL_OBS)], None)

    def keys(self, k: int) -> Experience:
        """Row group ``k`` without step columns, but as it is with them: reads key columns and one of ``final_obs``."""
        file, group = self._groups[k]
        names = [name for name in file.schema.names if name in KEYS]
        return file.load(group, [*names, *col.under(file.schema.names, col.FINAL_OBS)[:1]], None)

    def place(self, k: int, row: int) -> Place:
        """Where a row of row group ``k`` is; rows are counted from 0 in their file."""
        file, group = self._groups[k]
        row += sum(int(file.metadata.row_group(g).num_rows) for g in range(group))
        return Place(f"{file.path}, row group {group}, row {row}", str(file.path), row, group)

    def nothing(self, columns: Sequence[str] | None) -> Experience:
        """No rows, with these columns."""
        names = self._files[0].names_for(columns)
        return Experience.from_table(self._files[0].schema.empty_table().select(names))

    def episode_ids(self) -> set[str]:
        """The distinct ones; reads that one column."""
        ids: set[str] = set()
        for file, group in self._groups:
            column = file.read_group(group, [col.EPISODE_ID], None)[col.EPISODE_ID]
            ids.update(column.unique().to_pylist())
        return ids

    def problems(self) -> Iterator[Problem]:
        """None: files that can't be used are told when it is opened."""
        return iter(())


def _newest(files: Sequence[DataFile]) -> Header | None:
    """The header of the file that was finished last, as far as they tell; else of the first."""
    known = [file for file in files if file.header]
    newest = max(known, key=lambda file: file.facts.closed if file.facts else "", default=None)
    return newest.header if newest else None


def _refuse(problem: Problem, faults: list[Problem] | None) -> None:
    if faults is None:
        raise DataError(problem.message)
    faults.append(problem)
