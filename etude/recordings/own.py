# SPDX-License-Identifier: Apache-2.0
"""Etude's own recordings as parts: the row groups of Parquet files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow.compute as pc

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.arrow import KEYS
from etude.filesystems import AnyPath
from etude.recordings.faults import fault_of, lost_files
from etude.recordings.files import DataFile, find_files, open_files
from etude.recordings.formats.parts import Problem
from etude.recordings.manifest import FORMAT, Header, Manifest
from etude.recordings.pieces import continues


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
        self._given = given
        paths = find_files(path) if given is None else [file for one in given for file in find_files(one)]
        manifest = self._manifest(path, faults)
        listed = {path / name: entry["rows"] for name, entry in manifest.files.items()} if manifest else {}
        files = list(_usable(zip(paths, open_files(paths), strict=True), listed, faults))
        header = manifest.header if manifest else next((file.header for file in files if file.header), None)
        like = next((file for file in files if file.header), files[0] if files else None)
        for file in list(files):
            fault = fault_of(file, like or file, header)
            if fault:
                _refuse(Problem(fault.kind, fault.message, str(file.path), count=file.num_rows), faults)
                files.remove(file)
        for lost in lost_files(path, manifest, files) if manifest else ():
            _refuse(Problem(lost.kind, lost.message, str(lost.path), count=listed.get(lost.path, 0)), faults)
        if header is None or not files:
            assert faults  # a file without a header is a fault
            raise DataError(faults[0].message)
        self.header: Header = header
        self._files: tuple[DataFile, ...] = tuple(files)
        self._groups = [(file, group) for file in self._files for group in range(file.num_groups)]

    def _manifest(self, path: AnyPath, faults: list[Problem] | None) -> Manifest | None:
        try:
            return Manifest.read(path) if path.is_dir() else None
        except DataError as error:
            _refuse(Problem("manifest", str(error), str(path), count=0), faults)
            return None

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

    def where_is(self, k: int, row: int) -> str:
        """A row of row group ``k`` in words; rows are counted from 0 in their file."""
        file, group = self._groups[k]
        before = sum(int(file.metadata.row_group(g).num_rows) for g in range(group))
        return f"{file.path}, row group {group}, row {before + row}"

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
        """Every fault, found by looking at every row."""
        from etude.recordings.validate import validate

        yield from validate(self.path if self._given is None else list(self._given)).problems


def _usable(
    files: Iterable[tuple[AnyPath, DataFile | DataError]],
    listed: Mapping[AnyPath, int],
    faults: list[Problem] | None,
) -> Iterator[DataFile]:
    """The files that can be opened."""
    for path, file in files:
        if isinstance(file, DataFile):
            yield file
        else:
            _refuse(Problem("truncated_file", str(file), str(path), count=listed.get(path, 0)), faults)


def _refuse(problem: Problem, faults: list[Problem] | None) -> None:
    if faults is None:
        raise DataError(problem.message)
    faults.append(problem)
