# SPDX-License-Identifier: Apache-2.0
"""Etude's own recordings as parts: the row groups of Parquet files."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.compute as pc

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.arrow import KEYS
from etude.recordings.faults import fault_of, lost_files
from etude.recordings.files import DataFile, find_files, open_file
from etude.recordings.formats.parts import Problem
from etude.recordings.manifest import FORMAT, Header, Manifest
from etude.recordings.pieces import continues


class OwnParts:
    """The row groups of a recording in Etude's format. See `etude.recordings.formats.parts.Parts`.

    Raises:
        DataError: a file is broken or missing, or the files do not belong together.
    """

    format = FORMAT

    def __init__(self, path: Path) -> None:
        self.path = path
        files = [open_file(file) for file in find_files(path)]
        manifest = Manifest.read(path) if path.is_dir() else None
        header = manifest.header if manifest else next((file.header for file in files if file.header), None)
        for file in files:
            fault = fault_of(file, files[0], header)
            if fault:
                raise DataError(fault.message)
        assert header is not None  # a file without one is a fault
        if manifest:
            for lost in lost_files(path, manifest, files):
                raise DataError(lost.message)
        self.header: Header = header
        self._files: tuple[DataFile, ...] = tuple(files)
        self._groups = [(file, group) for file in self._files for group in range(file.num_groups)]

    @property
    def files(self) -> list[Path]:
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
            following = next_file.first_row(next_group, names)
            if following.num_segments and continues(exp, following):
                segments.has_final_obs[-1] = True
                for name, values in exp.final_obs.items():
                    values[-1] = following.steps[name][0]
        return exp

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

        yield from validate(self.path).problems
