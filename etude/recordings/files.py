# SPDX-License-Identifier: Apache-2.0
"""The Parquet files of a recording: found, opened, and their faults named."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs
import pyarrow.parquet as pq
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.table import KEYS
from etude.files import AnyPath, RemotePath, in_arrow, relative
from etude.recordings import footers
from etude.recordings.layers import reading
from etude.recordings.layout import HEADER_KEY, MANIFEST, FileFacts, Header, is_declared_in_order, loads
from etude.recordings.pieces import filtered
from etude.urls import first_line

REQUIRED: Final = (col.EPISODE_ID, col.T_INDEX, col.TERMINATED, col.TRUNCATED)
"""The columns without which nothing is a recording of Etude's."""


@dataclasses.dataclass(frozen=True)
class DataFile:
    """One Parquet file, its footer read."""

    path: AnyPath
    metadata: pq.FileMetaData
    schema: pa.Schema
    header: Header | None
    """None where the file is not one of Etude's, or another tool has written it anew and left the header out."""
    version: int
    """Of the format; 0 without a header."""
    facts: FileFacts | None
    """None where it is of format 1, or another tool has written it anew."""

    @property
    def num_rows(self) -> int:
        """Its rows."""
        return int(self.metadata.num_rows)

    @property
    def num_groups(self) -> int:
        """Its row groups."""
        return int(self.metadata.num_row_groups)

    @property
    def has_own_columns(self) -> bool:
        """Whether its columns are those of a recording."""
        return has_own_columns(self.schema.names)

    def segments_anew(self) -> list[tuple[NDArray[np.int64], int, int]] | None:
        """The numbers of the segments in each row group, and ``t`` of its first and last row, read from a file that
        another tool has written anew.

        None where its rows do not stand as Etude's writer puts them, or where there is no header, so that types may be
        others, too. Nothing is read, and there are no row groups, of files that Etude wrote.
        """
        if self.version < 2 or is_declared_in_order(self.metadata):
            return [] if self.version else None
        if not {col.SEGMENT, col.T_INDEX} <= set(self.schema.names):
            return None
        found = []
        for group in range(self.num_groups):
            try:
                table = self.read_group(group, [col.SEGMENT, col.T_INDEX], None)
            except DataError:
                continue  # it is said where all columns are read
            if any(column.null_count for column in table.columns):
                return None
            segment, t = table[col.SEGMENT].to_numpy(), table[col.T_INDEX].to_numpy()
            rises, follows = np.diff(segment), np.diff(t) > 0
            if not ((rises > 0) | ((rises == 0) & follows)).all():
                return None
            if len(segment):
                found.append((segment[np.append(True, rises > 0)], int(t[0]), int(t[-1])))
        return found

    def _opened(self) -> pq.ParquetFile:
        """Opened anew each time: an open file keeps what was read from it, and handles are few."""
        keys = [name for name in (col.EPISODE_ID, col.AGENT_ID, col.MODULE_ID) if name in self.schema.names]
        return footers.opened(self.path, self.metadata, keys)

    def read_group(self, group: int, names: Sequence[str], where: pc.Expression | None) -> pa.Table:
        """Some columns of one row group; with ``where``, only the rows for which it holds.

        Raises:
            DataError: the bytes can't be decoded.
        """
        if where is not None:
            self._check_filter(where)
            return self._scanned(group, list(names), where)
        try:
            with reading(partial(self._bytes_of, group, names)), self._opened() as parquet:
                return parquet.read_row_group(group, columns=list(names))
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(group, error) from error

    def _bytes_of(self, group: int, names: Sequence[str]) -> int:
        """What some columns of a row group take in the file."""
        found = self.metadata.row_group(group)
        roots, wanted = self._roots, set(names)
        return sum(found.column(i).total_compressed_size for i, root in enumerate(roots) if root in wanted)

    @cached_property
    def _roots(self) -> list[str]:
        """The column in the schema that each column of the file is a part of."""
        return [self.metadata.schema.column(i).path.split(".")[0] for i in range(self.metadata.num_columns)]

    def _scanned(self, group: int, columns: Sequence[str], where: pc.Expression) -> pa.Table:
        """Columns of the rows of one row group for which ``where`` holds."""
        try:
            checked = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
            path, system = in_arrow(self.path if isinstance(self.path, RemotePath) else self.path.absolute())
            fragment = ds.ParquetFileFormat(default_fragment_scan_options=checked).make_fragment(
                str(path), filesystem=system or pa.fs.LocalFileSystem(), row_groups=[group]
            )
            return fragment.to_table(schema=self.schema, columns=columns, filter=where)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(group, error) from error

    def _check_filter(self, where: pc.Expression) -> None:
        """Raise a DataError where a filter is none, or names what the file has not."""
        problem = None
        if not isinstance(where, pc.Expression):
            problem = f"it is a {type(where).__name__}"
        else:
            try:
                ds.dataset(self.schema.empty_table()).to_table(filter=where)
            except (pa.ArrowException, TypeError, ValueError) as error:
                problem = first_line(error)
        if problem is not None:
            raise DataError(
                f"the filter {where!r} can't be applied to {self.path}: {problem}. Give an expression over its scalar "
                f'columns, such as pyarrow.compute.field("t") < 3; it has {", ".join(self.schema.names)}.'
            )

    def _unreadable(self, group: int, error: Exception) -> DataError:
        return DataError(
            f"{self.path}: row group {group} can't be read ({first_line(error)}). Restore the file from a copy, "
            "or move it away to read the rest."
        )

    def load(self, group: int, names: Sequence[str], where: pc.Expression | None) -> Experience:
        """Some columns of one row group as Experience."""
        if where is not None and self._has_context(group):
            self._check_filter(where)
            steps = [name for name in names if name not in KEYS and not col.is_under(name, col.FINAL_OBS)]
            return filtered(self.load(group, self.schema.names, None), where, steps)
        return self.experience_of(self.read_group(group, names, where), group)

    def _has_context(self, group: int) -> bool:
        """Whether there is lookback in a row group, as only format 1 has it."""
        if self.version != 1 or col.LOOKBACK not in self.schema.names:
            return False
        keys = [name for name in self.schema.names if name in KEYS]
        return bool(self.load(group, keys, None).segments.lookback.any())

    def experience_of(self, table: pa.Table, group: int) -> Experience:
        """The table of a row group as Experience; a segment that began before it keeps the rest of its lookback.

        Raises:
            DataError: the table is not one of Experience.
        """
        exp = Experience.from_table(table)
        if (exp.segments.t_start < 0).any():
            t = int(exp.segments.t_start.min())
            raise DataError(f"{self.path}: row group {group}: column `{col.T_INDEX}` is {t}, but counts steps from 0.")
        if self.version == 1 and group and table.num_rows and not _is_marked(table):
            exp.segments.lookback[0] = self._lookback_before(group)
        np.minimum(exp.segments.lookback, exp.lengths, out=exp.segments.lookback)
        return exp

    def _lookback_before(self, group: int) -> int:
        """How many first rows of a row group are lookback of a segment that began in a row group before it."""
        rows = 0
        while group and col.LOOKBACK in self.schema.names:
            group -= 1
            marks = self.read_group(group, [col.LOOKBACK], None)[col.LOOKBACK]
            marked = np.flatnonzero(np.asarray(marks.is_valid()))
            if len(marked):
                last = int(marked[-1])
                return max(0, int(marks[last].as_py()) - (len(marks) - last) - rows)
            rows += len(marks)
        return 0

    def first_row(self, group: int, names: Sequence[str]) -> Experience:
        """Some columns of the first row of a row group, without decoding the rest.

        Raises:
            DataError: the bytes can't be decoded.
        """
        try:
            with self._opened() as parquet:
                for batch in parquet.iter_batches(batch_size=1, row_groups=[group], columns=list(names)):
                    return Experience.from_table(pa.Table.from_batches([batch]))
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(group, error) from error
        return Experience.from_table(self.schema.empty_table().select(list(names)))

    def names_for(self, roots: Sequence[str] | None) -> list[str]:
        """The columns on the disk for some wanted step columns, given by name or root: keys go with them always."""
        names: list[str] = self.schema.names
        if roots is None:
            return names
        finals = [col.FINAL_OBS + root[len(col.OBS) :] for root in roots if col.is_under(root, col.OBS)]
        wanted = (*roots, *finals)
        return [name for name in names if name in KEYS or any(col.is_under(name, root) for root in wanted)]


def has_own_columns(names: Sequence[str]) -> bool:
    """Whether columns of these names are those of a recording, whoever has written them."""
    return set(REQUIRED) <= set(names) and all(col.under(names, root) for root in (col.OBS, col.ACTION))


def data_files(folder: AnyPath) -> list[AnyPath]:
    """The Parquet files under ``folder`` in the order of their names; hidden ones are left out."""
    found = [path for path in folder.rglob("*.parquet") if path.is_file()]
    return sorted(p for p in found if not any(part[0] in "._" for part in relative(p, folder).parts))


def recordings_in(folder: AnyPath) -> dict[AnyPath, list[AnyPath]]:
    """The recordings under ``folder``: each folder that holds Parquet files, in the order of their names, and these."""
    found: dict[AnyPath, list[AnyPath]] = {}
    for file in data_files(folder):
        inside = relative(file, folder).parent
        found.setdefault(folder / str(inside) if inside.parts else folder, []).append(file)
    return dict(sorted(found.items()))


def find_files(path: AnyPath) -> list[AnyPath]:
    """The data files of the recording at ``path``, a folder or one Parquet file.

    Raises:
        DataError: there is nothing, or nothing that is a recording.
    """
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder. Give the folder that a recording was written to.")
    files = [path] if path.is_file() and path.suffix == ".parquet" else recordings_in(path).get(path, [])
    if not files:
        if path.is_file():
            raise DataError(
                f"{path}: is not a recording that is known here. Give a folder of Parquet files, or one Parquet file; "
                "or read it as a table, with a Source that says which column is what, or by a function of yours "
                "(docs/custom-sources.md)."
            )
        if (path / MANIFEST).exists():
            raise DataError(f"{path}: this recording has no data: {MANIFEST} is there, but no Parquet file.")
        raise DataError(
            f"{path}: holds no Parquet file, nor a recording of another tool that is known here. Give the folder "
            "that a recording was written to."
        )
    return files


def open_file(path: AnyPath) -> DataFile:
    """Read a file's footer.

    Raises:
        DataError: it is not a whole Parquet file, or carries a header that can't be read.
    """
    return _described(path, footers.footer(path))


def open_files(paths: Sequence[AnyPath]) -> Iterator["DataFile | DataError"]:
    """Read the files' footers, in order, as `open_file` does; what it would raise is given in the file's place."""
    for path, found in zip(paths, footers.footers(paths), strict=True):
        try:
            yield _described(path, footers.whole(found))
        except DataError as error:
            yield error


def _described(path: AnyPath, metadata: pq.FileMetaData) -> DataFile:
    schema = metadata.schema.to_arrow_schema()
    raw = (metadata.metadata or {}).get(HEADER_KEY)
    if raw is None:
        return DataFile(path, metadata, schema, None, 0, None)
    try:
        data = loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: the recording's header in its footer is not JSON: {error}.") from error
    header = Header.from_json(data, path)
    return DataFile(path, metadata, schema, header, data["version"], FileFacts.of(metadata))


def _is_marked(table: pa.Table) -> bool:
    """Whether the first row says that a segment begins there; those that Etude wrote always do."""
    return col.LOOKBACK not in table.column_names or bool(table[col.LOOKBACK][0].is_valid)
