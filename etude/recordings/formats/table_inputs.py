# SPDX-License-Identifier: Apache-2.0
"""Tables from files and from memory, as groups of rows that are read one at a time."""

import abc
import dataclasses
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from etude.errors import DataError
from etude.files import AnyPath, RemotePath, Systems, expanded, input_file, input_stream, shown
from etude.recordings import footers
from etude.recordings.format import MAX_ROWS
from etude.recordings.formats.arrow import check_names
from etude.recordings.formats.source import is_paths
from etude.urls import first_line

SUFFIXES: Final = {
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".arrow", ".ipc", ".feather"), "ipc"),
}
MAGIC: Final = {b"PAR1": "parquet", b"ARROW1": "ipc"}
MOST_OPENED: Final = 500
"""A line of JSON with more brackets is looked at before Arrow reads it."""
BROKEN: Final = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError, RecursionError)


@dataclasses.dataclass(frozen=True)
class Group(abc.ABC):
    """Rows that are read together: a row group, a record batch, a file of text, a slice of a table in memory."""

    schema: pa.Schema
    num_rows: int
    file: AnyPath | None
    first: int
    """The place of its first row in the file, or in the table."""

    @abc.abstractmethod
    def read(self, names: Sequence[str]) -> pa.Table:
        """Some of the columns."""

    def place(self, row: int) -> str:
        """A row of the group in words."""
        return f"{self.file or 'the table'}, row {self.first + row}"


@dataclasses.dataclass(frozen=True)
class _ParquetGroup(Group):
    """Of a Parquet file."""

    metadata: pq.FileMetaData
    index: int

    def read(self, names: Sequence[str]) -> pa.Table:
        assert self.file is not None
        with footers.opened(self.file, self.metadata) as opened:
            table = opened.read_row_group(self.index, columns=list(names))
        if table.num_rows != self.num_rows:
            raise ValueError(f"row group {self.index} has {table.num_rows} rows, not {self.num_rows}")
        return table


@dataclasses.dataclass(frozen=True)
class _RecordBatch(Group):
    """A record batch of an Arrow file."""

    index: int

    def read(self, names: Sequence[str]) -> pa.Table:
        assert self.file is not None
        options = pa.ipc.IpcReadOptions(included_fields=[self.schema.get_field_index(name) for name in names])
        with input_file(self.file, mapped=True) as source:
            batch = pa.ipc.open_file(source, options=options).get_batch(self.index)
            batch.validate(full=True)
            return pa.Table.from_batches([batch]).select(list(names))


@dataclasses.dataclass(frozen=True)
class _Slice(Group):
    """Of a table in memory."""

    table: pa.Table

    def read(self, names: Sequence[str]) -> pa.Table:
        return self.table.select(list(names))


def groups_of(data: Any, filesystem: Any = None) -> Sequence[Group]:
    """The rows of ``data``: a path, URL, glob, folder, or list of such, in ``filesystem``; or a table in memory.

    Tables are pyarrow's, or of any library that hands them over in Arrow's way (``__arrow_c_stream__`` as pandas and
    polars have it, ``to_arrow()``, or ``iter_batches(batch_format="pyarrow")`` as a Ray dataset has it: all its rows
    are taken into memory).

    Raises:
        DataError: there is nothing there, or it can't be read.
    """
    if not is_paths(data):
        return _table_groups(_table(data), None)
    known: Systems = {}
    several = data if isinstance(data, list | tuple) else [data]
    files = [file for place in several for file in _files(place, filesystem, known)]
    list(footers.footers([file for file in files if isinstance(file, RemotePath) and _kind(file) == "parquet"]))
    return [group for file in files for group in _file_groups(file)]


def _files(given: Any, filesystem: Any, known: Systems) -> list[AnyPath]:
    found: list[AnyPath] = []
    for place in expanded(given, filesystem, known):
        path: Any = place.listed() if isinstance(place, RemotePath) and place.listing is None else place
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith((".", "_")))
            found += [p for p in inside if _kind(p)]
        elif path.is_file():
            found.append(path)
    if not found:
        raise DataError(f"{shown(given)}: there is no file of a table here. Known are {', '.join(SUFFIXES)}.")
    return found


def _kind(path: AnyPath) -> str | None:
    suffixes = [s for s in path.suffixes if s not in (".gz", ".bz2", ".zst")]
    kind = SUFFIXES.get(suffixes[-1]) if suffixes else None
    if kind is None:
        with path.open("rb") as file:
            head = file.read(6)
        kind = next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), None)
    return kind


def _file_groups(path: AnyPath) -> Iterator[Group]:
    try:
        kind = _kind(path)
        if kind == "parquet":
            yield from _parquet_groups(path)
        elif kind == "ipc":
            yield from _ipc_groups(path)
        elif kind is not None:
            yield from _table_groups(_text_table(path, kind), path)
    except BROKEN as error:
        raise unreadable(path, error) from error
    if kind is None:
        raise DataError(f"{path}: what kind of table this is can't be told. Known are {', '.join(SUFFIXES)}.")


def unreadable(path: AnyPath | None, error: BaseException) -> DataError:
    """What to say where bytes make no sense."""
    return DataError(
        f"{path or 'the table'}: can't be read ({first_line(error, None)}). Restore it from a copy, or leave it out."
    )


def _parquet_groups(path: AnyPath) -> Iterator[Group]:
    metadata = footers.footer(path)
    schema = metadata.schema.to_arrow_schema()
    check_names(schema)
    first = 0
    for k in range(metadata.num_row_groups):
        rows = metadata.row_group(k).num_rows
        yield _ParquetGroup(schema, rows, path, first, metadata, k)
        first += rows


def _ipc_groups(path: AnyPath) -> Iterator[Group]:
    with path.open("rb") as file:
        is_file = file.read(6) == b"ARROW1"
    if not is_file:  # a stream: no way to its middle
        with input_file(path) as source:
            table = pa.ipc.open_stream(source).read_all()
        table.validate(full=True)
        check_names(table.schema)
        yield from _table_groups(table, path)
        return
    with input_file(path, mapped=True) as source:
        reader = pa.ipc.open_file(source)
        schema, num = reader.schema, reader.num_record_batches
        check_names(schema)
        sizes = [reader.get_batch(k).num_rows for k in range(num)]
    first = 0
    for k, rows in enumerate(sizes):
        yield _RecordBatch(schema, rows, path, first, k)
        first += rows


def _text_table(path: AnyPath, kind: str) -> pa.Table:
    if kind == "csv":
        return _csv(path)
    with input_stream(path) as file:
        head = file.read(256)
        if head.lstrip().startswith(b"["):
            return pa.Table.from_pylist(json.loads(head + file.read()))
    size = min(max(path.stat().st_size, 2**20), 2**26)
    _check_depth(path)
    try:
        return pa.json.read_json(_input(path), read_options=pa.json.ReadOptions(block_size=size))
    except pa.ArrowInvalid:
        _check_lines(path)
        raise


def _check_depth(path: AnyPath) -> None:
    """Raise a RecursionError or ValueError where a line is nested so deep that Arrow would end the process."""
    with input_stream(path) as file:
        lines = io.BufferedReader(file)
        while chunk := lines.read(2**23) + lines.readline():
            data = np.frombuffer(chunk, np.uint8)
            ends = np.append(np.flatnonzero(data == ord("\n")) + 1, len(data))
            opened = np.searchsorted(np.flatnonzero((data == ord("[")) | (data == ord("{"))), ends)
            for i in np.flatnonzero(np.diff(opened, prepend=0) > MOST_OPENED).tolist():
                json.loads(chunk[ends[i - 1] if i else 0 : ends[i]])


def _csv(path: AnyPath) -> pa.Table:
    parse = pa.csv.ParseOptions(delimiter="\t" if ".tsv" in path.suffixes else ",")
    try:
        return pa.csv.read_csv(_input(path), parse_options=parse)
    except pa.ArrowInvalid:
        # Types are taken from the first block, but numbers that are whole at first may have a fraction later: once more
        # in one block. What is broken is so again, and without threads its row is known.
        size = min(max(path.stat().st_size * 20, 2**20), 2**31 - 1)
        options = pa.csv.ReadOptions(block_size=size, use_threads=False)
        return pa.csv.read_csv(_input(path), read_options=options, parse_options=parse)


def _input(path: AnyPath) -> Any:
    """What Arrow's readers of text take."""
    return input_stream(path) if isinstance(path, RemotePath) else path


def _check_lines(path: AnyPath) -> None:
    """Raise a ValueError that names the first line that is not JSON; Arrow counts from the last block."""
    with input_stream(path) as file:
        for number, line in enumerate(io.BufferedReader(file), 1):
            try:
                json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON: {error}") from error


def _table(data: Any) -> pa.Table:
    try:
        if isinstance(data, pa.Table):
            table = data
        elif isinstance(data, pa.RecordBatch):
            table = pa.Table.from_batches([data])
        elif hasattr(data, "__arrow_c_stream__"):
            table = pa.RecordBatchReader.from_stream(data).read_all()
        elif callable(getattr(data, "iter_batches", None)):
            batches = list(data.iter_batches(batch_size=None, batch_format="pyarrow"))
            table = pa.concat_tables(batches, promote_options="default")
        elif callable(getattr(data, "to_arrow", None)):
            table = data.to_arrow()
        else:
            raise DataError(f"a {type(data).__name__} is neither a path nor a table that Arrow can take over.")
        table.validate(full=True)
    except BROKEN as error:
        raise unreadable(None, error) from error
    return table


def _table_groups(table: pa.Table, path: AnyPath | None) -> Sequence[Group]:
    slices = [(first, table.slice(first, MAX_ROWS)) for first in range(0, max(1, table.num_rows), MAX_ROWS)]
    return [_Slice(table.schema, part.num_rows, path, first, part) for first, part in slices]
