# SPDX-License-Identifier: Apache-2.0
"""The Parquet files of a recording: found, opened, and their faults named."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs
import pyarrow.parquet as pq

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.arrow import KEYS
from etude.recordings.formats import recognise_path, recognise_table
from etude.recordings.manifest import HEADER_KEY, MANIFEST, Header, Manifest

REQUIRED = (col.EPISODE_ID, col.T_INDEX, col.TERMINATED, col.TRUNCATED)


@dataclasses.dataclass(frozen=True)
class DataFile:
    """One Parquet file, its footer read."""

    path: Path
    metadata: pq.FileMetaData
    schema: pa.Schema
    header: Header | None
    """None where the file is not one of Etude's."""

    @property
    def num_rows(self) -> int:
        """Its rows."""
        return int(self.metadata.num_rows)

    @property
    def num_groups(self) -> int:
        """Its row groups."""
        return int(self.metadata.num_row_groups)

    def _opened(self) -> pq.ParquetFile:
        """Opened anew each time: an open file keeps what was read from it, and handles are few."""
        keys = [name for name in (col.EPISODE_ID, col.AGENT_ID, col.MODULE_ID) if name in self.schema.names]
        return pq.ParquetFile(self.path, metadata=self.metadata, read_dictionary=keys)

    def read_group(self, group: int, names: Sequence[str], where: pc.Expression | None) -> pa.Table:
        """Some columns of one row group; with ``where``, only the rows for which it holds.

        Raises:
            DataError: the bytes can't be decoded.
        """
        try:
            if where is None:
                with self._opened() as parquet:
                    return parquet.read_row_group(group, columns=list(names))
            fragment = ds.ParquetFileFormat().make_fragment(
                str(self.path.absolute()), filesystem=pa.fs.LocalFileSystem(), row_groups=[group]
            )
            return fragment.to_table(schema=self.schema, columns=list(names), filter=where)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{self.path}: row group {group} can't be read ({_first_line(error)}). Restore the file from a copy, "
                "or move it away to read the rest."
            ) from error

    def load(self, group: int, names: Sequence[str], where: pc.Expression | None) -> Experience:
        """Some columns of one row group as Experience."""
        table = self.read_group(group, names, where)
        exp = Experience.from_table(table)
        if where is None and group and table.num_rows and not _is_marked(table):
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
        """Some columns of the first row of a row group, without decoding the rest."""
        with self._opened() as parquet:
            for batch in parquet.iter_batches(batch_size=1, row_groups=[group], columns=list(names)):
                return Experience.from_table(pa.Table.from_batches([batch]))
        return Experience.from_table(self.schema.empty_table().select(list(names)))

    def names_for(self, roots: Sequence[str] | None) -> list[str]:
        """The columns on the disk for some wanted step columns, given by name or root: keys go with them always."""
        names: list[str] = self.schema.names
        if roots is None:
            return names
        finals = [col.FINAL_OBS + root[len(col.OBS) :] for root in roots if col.is_under(root, col.OBS)]
        wanted = (*roots, *finals)
        return [name for name in names if name in KEYS or any(col.is_under(name, root) for root in wanted)]


def data_files(folder: Path) -> list[Path]:
    """The Parquet files under ``folder`` in the order of their names; hidden ones are left out."""
    found = (path for path in folder.rglob("*.parquet") if path.is_file())
    return sorted(p for p in found if not any(part[0] in "._" for part in p.relative_to(folder).parts))


def find_files(path: Path) -> list[Path]:
    """The data files of the recording at ``path``, a folder or one Parquet file.

    Raises:
        DataError: there is nothing, or nothing that is a recording.
    """
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder. Give the folder that a recording was written to.")
    files = [path] if path.is_file() and path.suffix == ".parquet" else data_files(path)
    if not files:
        looks_like = recognise_path(path)
        if looks_like:
            raise DataError(f"{path}: this looks like {looks_like}, a format that this version can't read.")
        if path.is_file():
            raise DataError(f"{path}: is not a recording. Give a folder of Parquet files, or one Parquet file.")
        if (path / MANIFEST).exists():
            raise DataError(f"{path}: this recording has no data yet: {MANIFEST} is there, but no Parquet file.")
        raise DataError(f"{path}: holds no Parquet file. Give the folder that a recording was written to.")
    return files


def open_file(path: Path) -> DataFile:
    """Read a file's footer.

    Raises:
        DataError: it is not a whole Parquet file, or carries a header that can't be read.
    """
    try:
        metadata = pq.read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: is not a whole Parquet file: it was cut off or overwritten ({_first_line(error)}). "
            "Restore it from a copy, or move it away to read the rest."
        ) from error
    raw = (schema.metadata or {}).get(HEADER_KEY)
    return DataFile(path, metadata, schema, None if raw is None else _parse(raw, path))


def _parse(raw: bytes, path: Path) -> Header:
    try:
        data: Any = json.loads(raw)
    except ValueError as error:
        raise DataError(f"{path}: the recording's header in its footer is not JSON: {error}.") from error
    return Header.from_json(data, path)


def fault_of(file: DataFile, first: DataFile, wanted: Header | None) -> str | None:
    """What is wrong with a file's footer beside the recording's header and first file; None where nothing is."""
    if file.header is None or wanted is None:
        looks_like = recognise_table(file.schema)
        if looks_like:
            return f"{file.path}: this looks like {looks_like}, a format that this version can't read."
        return (
            f"{file.path}: is no part of a recording: it carries no Etude header; its columns are "
            f"{', '.join(file.schema.names[:12])}. Move it away."
        )
    own, other = file.header.to_json()["spaces"], wanted.to_json()["spaces"]
    for root in (col.OBS, col.ACTION):
        if own[root] != other[root]:
            mine, theirs = (h.obs_space if root == col.OBS else h.action_space for h in (file.header, wanted))
            return (
                f"{file.path}: its `{root}` space is {mine}, but the recording's is {theirs}. Recordings of different "
                "envs can't stand in one folder: move this file to its own."
            )
    missing = [name for name in (*REQUIRED, *first.schema.names) if name not in file.schema.names]
    if missing:
        return f"{file.path}: has no column `{missing[0]}`; it has {', '.join(file.schema.names)}. Restore it."
    for field in first.schema:
        own_type = file.schema.field(field.name).type
        if own_type != field.type:
            return (
                f"{file.path}: column `{field.name}` is of type {own_type}, but {field.type} in {first.path.name}. "
                "A recording has the same columns everywhere: move this file away."
            )
    return None


def missing_files(folder: Path, manifest: Manifest) -> list[str]:
    """What to say of each file that ``recording.json`` lists and that is not there, or has other rows."""
    return [
        f"{folder / name}: {MANIFEST} lists this file with {entry['rows']:,} rows, but it is not there. Put it "
        f"back, or take its entry out of {MANIFEST} to read the rest."
        for name, entry in manifest.files.items()
        if not (folder / name).is_file()
    ]


def _is_marked(table: pa.Table) -> bool:
    """Whether the first row says that a segment begins there; those that Etude wrote always do."""
    return col.LOOKBACK not in table.column_names or bool(table[col.LOOKBACK][0].is_valid)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
