# SPDX-License-Identifier: Apache-2.0
"""Find and open the Parquet files of a recording, and report their faults."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
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
from etude.experience.experience import impossible_times
from etude.experience.table import KEYS
from etude.files import AnyPath, arrow_path, relative, visible_files
from etude.recordings import footers
from etude.recordings.layout import HEADER_KEY, MANIFEST, FileFacts, Header, is_declared_in_order, loads
from etude.recordings.pieces import filtered
from etude.urls import first_line

REQUIRED: Final = (col.EPISODE_ID, col.T_INDEX, col.TERMINATED, col.TRUNCATED)
"""The columns that every recording in Etude's format has."""


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A Parquet file whose footer has been read."""

    path: AnyPath
    metadata: pq.FileMetaData
    schema: pa.Schema
    header: Header | None
    """None if the file is not Etude's, or another tool has rewritten it without the header."""
    version: int
    """The format version; 0 without a header."""
    facts: FileFacts | None
    """None if it is of format 1, or another tool has rewritten it."""
    checked: set[tuple[int, str]] = dataclasses.field(default_factory=set, compare=False)
    """Row groups and columns whose pages were checked as they were read; later epochs don't check them again."""

    @property
    def is_rewritten(self) -> bool:
        """Whether another tool wrote it last, so that the order of rows and the types of columns may differ."""
        return self.version == 0 or (self.version > 1 and not is_declared_in_order(self.metadata))

    def rewritten_segments(self) -> list[tuple[NDArray[np.int64], int, int]] | None:
        """For a file that another tool has rewritten, each row group's segment numbers and first and last ``t``.

        None if its rows are not in the order of Etude's writer, or if there is no header. For files that Etude wrote,
        the list is empty and nothing is read.
        """
        if not self.is_rewritten:
            return []
        if self.header is None or not {col.SEGMENT, col.T_INDEX} <= set(self.schema.names):
            return None
        found = []
        for group in range(self.metadata.num_row_groups):
            try:
                table = self.read_group(group, [col.SEGMENT, col.T_INDEX], None)
            except DataError:
                continue  # reported when all columns are read
            if any(column.null_count for column in table.columns):
                return None
            segment, t = table[col.SEGMENT].to_numpy(), table[col.T_INDEX].to_numpy()
            rises, follows = np.diff(segment), np.diff(t) > 0
            if not ((rises > 0) | ((rises == 0) & follows)).all():
                return None
            if len(segment):
                found.append((segment[np.append(True, rises > 0)], int(t[0]), int(t[-1])))
        return found

    def _opened(self, *, checked: bool = False) -> pq.ParquetFile:
        """Open the file anew each time: an open file keeps what was read from it, and handles are limited."""
        keys = [name for name in (col.EPISODE_ID, col.AGENT_ID, col.MODULE_ID) if name in self.schema.names]
        return footers.opened(self.path, self.metadata, keys, checked=checked)

    def read_group(self, group: int, names: Sequence[str], where: pc.Expression | None) -> pa.Table:
        """Read some columns of one row group; with ``where``, only the rows for which it holds.

        Raises:
            DataError: the bytes can't be decoded.
        """
        pages = {(group, name) for name in names}
        if where is not None:
            self._check_filter(where)
        try:
            if where is not None:
                checked = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
                path, system = arrow_path(self.path)
                fragment = ds.ParquetFileFormat(default_fragment_scan_options=checked).make_fragment(
                    str(path), filesystem=system or pa.fs.LocalFileSystem(), row_groups=[group]
                )
                return fragment.to_table(schema=self.schema, columns=list(names), filter=where)
            with self._opened(checked=pages <= self.checked) as parquet:
                table = parquet.read_row_group(group, columns=list(names))
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(group, error) from error
        self.checked.update(pages)
        return table

    def _check_filter(self, where: pc.Expression) -> None:
        """Raise a DataError if a filter is not an expression, or names columns that the file lacks."""
        try:
            ds.dataset(self.schema.empty_table()).to_table(filter=where)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise DataError(
                f"the filter {where!r} can't be applied to {self.path}: {first_line(error)}. Give an expression over "
                f'scalar columns, such as pyarrow.compute.field("t") < 3; it has {", ".join(self.schema.names)}.'
            ) from error

    def _unreadable(self, group: int, error: Exception) -> DataError:
        remedy = "Restore the file from a copy, or move it away to read the rest."
        if "Expected all lists to be of size" in str(error) and int(pa.__version__.split(".")[0]) < 26:
            remedy = f"PyArrow 26 can read it; this is {pa.__version__}. Update it: pip install 'pyarrow>=26'."
        return DataError(f"{self.path}: row group {group} can't be read ({first_line(error)}). {remedy}")

    def _has_context(self, group: int) -> bool:
        """Whether a row group contains lookback, which only format 1 has."""
        if self.version != 1 or col.LOOKBACK not in self.schema.names:
            return False
        keys = [name for name in self.schema.names if name in KEYS]
        return bool(self.load(group, keys, None).segments.lookback.any())

    def load(self, group: int, names: Sequence[str], where: pc.Expression | None) -> Experience:
        """Read some columns of one row group as experience; with ``where``, only the rows for which it holds.

        A segment that continues from the previous row group keeps the rest of its lookback.

        Raises:
            DataError: the bytes can't be decoded, or are not those of experience.
        """
        if where is not None and self._has_context(group):
            self._check_filter(where)
            steps = [name for name in names if name not in KEYS and not col.is_under(name, col.FINAL_OBS)]
            return filtered(self.load(group, self.schema.names, None), where, steps)
        table = self.read_group(group, names, where)
        try:
            exp = Experience.from_table(table)
        except DataError as error:
            raise DataError(f"{self.path}: row group {group}: {error}") from error
        if len(bad := impossible_times(exp)):
            t = exp.segments.t_start[bad[0]]
            raise DataError(f"{self.path}: row group {group}: column `{col.T_INDEX}` is {t}, but counts steps from 0.")
        marks = table[col.LOOKBACK] if self.version == 1 and col.LOOKBACK in table.column_names else None
        if group and marks is not None and len(marks) and not marks[0].is_valid:  # in the middle of a segment
            exp.segments.lookback[0] = self._lookback_before(group)
        np.minimum(exp.segments.lookback, exp.lengths, out=exp.segments.lookback)
        return exp

    def _lookback_before(self, group: int) -> int:
        """The number of leading rows of a row group that are lookback of a segment begun in an earlier row group."""
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
        """Read some columns of the first row of a row group, without decoding the rest.

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

    def names_for(self, roots: Sequence[str]) -> list[str]:
        """The stored columns to read for some step columns, given by name or root: keys are always included."""
        names: list[str] = self.schema.names
        finals = [col.moved(root, col.OBS, col.FINAL_OBS) for root in col.under(roots, col.OBS)]
        wanted = (*roots, *finals)
        return [name for name in names if name in KEYS or any(col.is_under(name, root) for root in wanted)]


def has_own_columns(names: Sequence[str]) -> bool:
    """Whether these are the column names of a recording in Etude's format, whichever tool has written it."""
    return set(REQUIRED) <= set(names) and all(col.under(names, root) for root in (col.OBS, col.ACTION))


def data_files(folder: AnyPath) -> list[AnyPath]:
    """The Parquet files under ``folder``, sorted by name; hidden ones are left out."""
    return visible_files(folder, "*.parquet")


def recordings_in(folder: AnyPath) -> dict[AnyPath, list[AnyPath]]:
    """The recordings under ``folder``: each folder with Parquet files, sorted by name, and its files."""
    found: dict[AnyPath, list[AnyPath]] = {}
    for file in data_files(folder):
        inside = relative(file, folder).parent
        found.setdefault(folder / str(inside) if inside.parts else folder, []).append(file)
    return dict(sorted(found.items()))


def find_files(path: AnyPath) -> list[AnyPath]:
    """Find the data files of the recording at ``path``, a folder or one Parquet file.

    Raises:
        DataError: nothing is there, or nothing that is a recording.
    """
    if not path.exists():
        where = "" if not isinstance(path, Path) or path.is_absolute() else f" in {Path.cwd()}"
        raise DataError(f"{path}: there is no such file or folder{where}. Give the folder of a recording.")
    files = [path] if path.is_file() and path.suffix == ".parquet" else recordings_in(path).get(path, [])
    if not files:
        if path.is_file():
            raise DataError(
                f"{path}: is not in a known recording format, or is damaged. Give a folder of Parquet files, or one "
                "Parquet file; or say which column of a table (.csv, .parquet, .json, .arrow) is what, with --columns "
                "or a Source; or read it by a function of yours (docs/custom-sources.md)."
            )
        if (path / MANIFEST).exists():
            raise DataError(f"{path}: this recording has no data: {MANIFEST} is there, but no Parquet file.")
        raise DataError(
            f"{path}: holds no Parquet file, nor a recording of another tool in a known format. Give the folder "
            "that a recording was written to."
        )
    return files


def open_file(path: AnyPath) -> DataFile:
    """Read a file's footer.

    Raises:
        DataError: it is not a complete Parquet file, or its header can't be read.
    """
    return _described(path, footers.footer(path))


def open_files(paths: Sequence[AnyPath]) -> Iterator["DataFile | DataError"]:
    """Read the files' footers in order, like `open_file`; errors are yielded in place of the file."""
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
