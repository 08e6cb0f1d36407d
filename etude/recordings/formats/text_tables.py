# SPDX-License-Identifier: Apache-2.0
"""Tables in CSV and JSON files: small ones as tables in memory, larger ones converted to Arrow files in the cache."""

import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from etude.errors import DataError
from etude.files import AnyPath, RemotePath, input_stream
from etude.recordings import cache
from etude.recordings.format import MAX_ROWS

VERSION: Final = 1
"""Of what is converted; a change of it makes the cache's entries anew."""
MOST_OPENED: Final = 500
"""A line of JSON with more brackets is looked at before Arrow reads it."""
_BLOCK: Final = 2**22
"""Bytes that are decoded at one time."""
_TABLE: Final = "table.arrow"
_KINDS: Final = (
    pa.null(), pa.int64(), pa.bool_(), pa.date32(), pa.time32("s"), pa.timestamp("s"), pa.timestamp("ns"),
    pa.float64(), pa.string(), pa.binary(),
)  # fmt: skip
"""The types that Arrow tries for a column of CSV, one after the other."""


def key_of(path: AnyPath, kind: str) -> str:
    """The cache's name for what the file is converted to, as it is now."""
    return cache.key_of([path], "text table", VERSION, kind, pa.__version__)


def converted(path: AnyPath, kind: str, key: str) -> Path:
    """The Arrow file with the rows of a text file, in record batches; made where it is not there.

    Args:
        path: The text file.
        kind: ``csv`` or ``json``.
        key: What `key_of` gave when the recording was opened.

    Raises:
        DataError: the text can't be read, or has changed since then.
    """

    def make(folder: Path) -> None:
        if key_of(path, kind) != key:
            raise DataError(f"{path}: has changed since it was opened. Open it again.")
        _convert(path, kind, folder / _TABLE)

    return cache.entry(key, make) / _TABLE


def read(path: AnyPath, kind: str) -> pa.Table:
    """All rows of a text file; raises what Arrow and `json` raise."""
    if kind == "csv":
        return _csv(path)
    if _is_array(path):
        with input_stream(path) as file:
            return pa.Table.from_pylist(json.loads(file.read()))
    size = min(max(path.stat().st_size, 2**20), 2**26)
    _check_depth(path)
    try:
        return pa.json.read_json(_input(path), read_options=pa.json.ReadOptions(block_size=size))
    except pa.ArrowInvalid:
        _check_lines(path)
        raise


def _convert(path: AnyPath, kind: str, target: Path) -> None:
    try:
        if kind == "csv":
            _convert_csv(path, target)
        elif _is_array(path):
            _write_whole(path, kind, target)
        else:
            _check_depth(path)
            _convert_lines(path, target)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):  # read whole, it may go; or tell its row
        _write_whole(path, kind, target)


# -- CSV ----------------------------------------------------------------------------------------------------------


def _csv(path: AnyPath) -> pa.Table:
    parse = _separated(path)
    try:
        return pa.csv.read_csv(_input(path), parse_options=parse)
    except pa.ArrowInvalid:
        # Types are taken from the first block, but numbers that are whole at first may have a fraction later: once more
        # in one block. What is broken is so again, and without threads its row is known.
        size = min(max(path.stat().st_size * 20, 2**20), 2**31 - 1)
        options = pa.csv.ReadOptions(block_size=size, use_threads=False)
        return pa.csv.read_csv(_input(path), read_options=options, parse_options=parse)


def _separated(path: AnyPath) -> pa.csv.ParseOptions:
    return pa.csv.ParseOptions(delimiter="\t" if ".tsv" in path.suffixes else ",")


def _convert_csv(path: AnyPath, target: Path) -> None:
    """Types are taken from the first block; where a later one does not fit, it begins again with the next type."""
    options = pa.csv.ReadOptions(block_size=_BLOCK)
    types: dict[str, pa.DataType] = {}
    names: list[str] = []
    kinds: list[pa.DataType] = []
    while True:
        try:
            convert = pa.csv.ConvertOptions(column_types=types)
            with pa.csv.open_csv(_input(path), options, _separated(path), convert) as reader:
                names, kinds = reader.schema.names, reader.schema.types
                _write(target, reader.schema, (pa.Table.from_batches([batch]) for batch in reader))
            return
        except pa.ArrowInvalid as error:
            place = re.search(r"In CSV column #(\d+):.* CSV conversion error", str(error), re.DOTALL)
            column = int(place[1]) if place else len(names)
            if column >= len(names) or names.count(names[column]) > 1 or kinds[column] not in _KINDS[:-1]:
                raise
            kinds[column] = types[names[column]] = _KINDS[_KINDS.index(kinds[column]) + 1]


# -- JSON ---------------------------------------------------------------------------------------------------------


def _is_array(path: AnyPath) -> bool:
    """Whether a file holds one list of objects, not an object a line."""
    with input_stream(path) as file:
        return bool(file.read(256).lstrip().startswith(b"["))


def _convert_lines(path: AnyPath, target: Path) -> None:
    """Each block has types of its own: where they differ, all are decoded again as the types that hold for all."""
    tables = _line_tables(path, None)
    first = next(tables)
    schema, is_alike = first.schema, True

    def alike() -> Iterator[pa.Table]:
        nonlocal schema, is_alike
        yield first
        for table in tables:
            schema = pa.unify_schemas([schema, table.schema], promote_options="permissive")
            is_alike = is_alike and schema.equals(first.schema) and table.schema.equals(schema)
            if is_alike:
                yield table

    _write(target, schema, alike())
    if not is_alike:
        _write(target, schema, (table.select(schema.names) for table in _line_tables(path, schema)))


def _line_tables(path: AnyPath, schema: pa.Schema | None) -> Iterator[pa.Table]:
    """The rows of a file block by block; columns that a ``schema`` names are all there, of its types."""
    parse = pa.json.ParseOptions(explicit_schema=schema)
    for chunk in _line_blocks(path, _BLOCK):
        if not chunk.isspace():
            options = pa.json.ReadOptions(block_size=len(chunk) + 1, use_threads=False)
            yield pa.json.read_json(io.BytesIO(chunk), options, parse)


def _check_depth(path: AnyPath) -> None:
    """Raise a RecursionError or ValueError where a line is nested so deep that Arrow would end the process."""
    for chunk in _line_blocks(path, 2**23):
        data = np.frombuffer(chunk, np.uint8)
        ends = np.append(np.flatnonzero(data == ord("\n")) + 1, len(data))
        opened = np.searchsorted(np.flatnonzero((data == ord("[")) | (data == ord("{"))), ends)
        for i in np.flatnonzero(np.diff(opened, prepend=0) > MOST_OPENED).tolist():
            json.loads(chunk[ends[i - 1] if i else 0 : ends[i]])


def _check_lines(path: AnyPath) -> None:
    """Raise a ValueError that names the first line that is not JSON; Arrow counts from the last block."""
    with input_stream(path) as file:
        for number, line in enumerate(io.BufferedReader(file), 1):
            try:
                json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON: {error}") from error


def _line_blocks(path: AnyPath, size: int) -> Iterator[bytes]:
    """A file in blocks of whole lines."""
    with input_stream(path) as file:
        lines = io.BufferedReader(file)
        while chunk := lines.read(size) + lines.readline():
            yield chunk


# -- both -----------------------------------------------------------------------------------------------------------


def _input(path: AnyPath) -> Any:
    """What Arrow's readers of text take."""
    return input_stream(path) if isinstance(path, RemotePath) else path


def _write_whole(path: AnyPath, kind: str, target: Path) -> None:
    table = read(path, kind)
    _write(target, table.schema, [table])


def _write(target: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """An Arrow file of record batches of `MAX_ROWS` rows at most."""
    with pa.OSFile(str(target), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        waiting: list[pa.Table] = []
        rows = 0
        for table in tables:
            waiting.append(table)
            rows += table.num_rows
            if rows >= MAX_ROWS:
                writer.write_table(pa.concat_tables(waiting).combine_chunks(), MAX_ROWS)
                waiting, rows = [], 0
        if waiting:
            writer.write_table(pa.concat_tables(waiting).combine_chunks(), MAX_ROWS)
