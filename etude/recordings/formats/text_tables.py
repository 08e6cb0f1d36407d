# SPDX-License-Identifier: Apache-2.0
"""Tables that can't be read from the middle: CSV, JSON and Arrow streams.

They are converted to Arrow files: small ones in memory, larger ones in the cache.
"""

import codecs
import contextlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json

from etude.files import AnyPath, RemotePath, input_file, input_stream
from etude.recordings import cache
from etude.recordings.formats.arrow import check_names, kind_with, plain, without_views, write_batches

VERSION: Final = 8
"""Version of the conversion; changing it invalidates cache entries."""
MOST_OPENED: Final = 500
"""Lines of JSON with more opening brackets are checked before Arrow reads them."""
_BLOCK: Final = 2**22
"""Bytes that are decoded at a time."""
_HEAD: Final = 2**16
"""Bytes of a CSV file that show how it is written."""
_DECIMAL: Final = r'(?m)(?:^|;)[ "]*[+-]?(?:0MARK\d+|\d+MARK(?!\d{3}(?!\d))\d+)(?:[eE][+-]?\d+)?[ "]*(?=;|\r?$)'
"""A cell with a decimal mark that can't be a separator of thousands."""
_TABLE: Final = "table.arrow"
_KINDS: Final = (
    pa.null(), pa.int64(), pa.bool_(), pa.date32(), pa.time32("s"), pa.timestamp("s"), pa.timestamp("ns"),
    pa.float64(), pa.string(), pa.binary(),
)  # fmt: skip
"""The types that Arrow tries for a CSV column, one after another."""


def converted(path: AnyPath, kind: str, texts: Sequence[str] = (), *, in_memory: bool) -> Callable[[], pa.NativeFile]:
    """Convert a file to an Arrow file of record batches, in memory or in the cache.

    Args:
        path: The file.
        kind: One of `CONVERTERS`.
        texts: Columns of a CSV file to read as text, whatever is in them.
        in_memory: Convert the file at once, and keep the result in memory, unless it is large.

    Returns:
        A function that opens the Arrow file. It raises a DataError if ``path`` can't be read or has changed since this
        call, and can be pickled.
    """
    origin = cache.SourceFiles([path], "text table", VERSION, kind, pa.__version__, *texts)
    make = partial(_convert, path, kind, texts, in_memory)
    return partial(cache.CachedFiles(origin, make, in_memory=in_memory).opened, _TABLE)


def _convert(path: AnyPath, kind: str, texts: Sequence[str], is_small: bool, folder: Path) -> None:
    convert = partial(CONVERTERS[kind], path, texts, folder / _TABLE)
    if not is_small:
        with contextlib.suppress(pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            convert(_BLOCK)
            return
    convert(min(max(path.stat().st_size * 20, 2**20), 2**31 - 1))  # what fails in blocks may work as a whole


# -- CSV ----------------------------------------------------------------------------------------------------------


def _convert_csv(path: AnyPath, texts: Sequence[str], target: Path, size: int) -> None:
    """Types come from the first block; if a later block does not fit, start again with the next type."""
    # Arrow reads 32 blocks ahead. Without threads, the row of an error is known.
    options = pa.csv.ReadOptions(block_size=_BLOCK // 4 if size == _BLOCK else size, use_threads=size == _BLOCK)
    parse, point = _dialect(path)
    types: dict[str, pa.DataType] = dict.fromkeys(texts, pa.string())
    names: list[str] = []
    kinds: list[pa.DataType] = []
    while True:
        try:
            convert = pa.csv.ConvertOptions(column_types=types, decimal_point=point)
            with pa.csv.open_csv(_input(path), options, parse, convert) as reader:
                names, kinds = reader.schema.names, reader.schema.types
                _check_texts(reader.schema)
                tables = (_blanks_as_nulls(pa.Table.from_batches([batch])) for batch in reader)
                write_batches(target, reader.schema, tables)
            return
        except pa.ArrowInvalid as error:
            place = re.search(r"In CSV column #(\d+):.* CSV conversion error", str(error), re.DOTALL)
            column = int(place[1]) if place else len(names)
            if column >= len(names) or names.count(names[column]) > 1 or kinds[column] not in _KINDS[:-1]:
                raise
            kinds[column] = types[names[column]] = _KINDS[_KINDS.index(kinds[column]) + 1]


def _check_texts(schema: pa.Schema) -> None:
    """Raise a ValueError if Arrow took the texts of a CSV column for bytes, because some are not UTF-8."""
    for field in schema:
        if pa.types.is_binary(field.type):
            raise ValueError(f"column `{field.name}` is not UTF-8 text: save the file as UTF-8")


def _blanks_as_nulls(table: pa.Table) -> pa.Table:
    """Replace texts that are blank or NaN by nulls: in a column of text, Arrow reads such cells as text."""
    for i, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            text = pc.utf8_lower(pc.utf8_trim_whitespace(table.column(i)))
            is_blank = pc.is_in(text, value_set=pa.array(["", "nan"]))
            table = table.set_column(i, field, pc.if_else(is_blank, pa.scalar(None, field.type), table.column(i)))
    return table


def _dialect(path: AnyPath) -> tuple[pa.csv.ParseOptions, str]:
    """Detect how a CSV file is written: how its cells are separated, and its decimal point.

    The separator is the one of comma, ``;``, tab and ``|`` that occurs most in the header, outside of quotes; in
    ``.tsv`` files, it is a tab. Numbers have decimal commas if the separator is ``;`` and the first rows have numbers
    such as 0,5, and no more numbers such as 0.5; 1,000 alone may be a thousand.
    """
    with input_stream(path) as file:
        head = file.read(_HEAD).decode("utf-8", "replace").lstrip("\ufeff\r\n")
    if "\0" in head:
        raise ValueError("it has zero bytes, as UTF-16 has: save the file as UTF-8")
    header = re.sub(r'"[^"]*"', "", head).partition("\n")[0]
    separator = "\t" if ".tsv" in path.suffixes else max(",;\t|", key=header.count)
    commas, points = (len(re.findall(_DECIMAL.replace("MARK", mark), head)) for mark in (",", r"\."))
    has_commas = separator == ";" and commas and commas >= points
    return pa.csv.ParseOptions(delimiter=separator), "," if has_commas else "."


# -- JSON ---------------------------------------------------------------------------------------------------------


def _convert_json(path: AnyPath, texts: Sequence[str], target: Path, size: int) -> None:
    with input_stream(path) as file:
        is_list = file.read(256).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")  # rather than lines
    if is_list:
        _convert_blocks(partial(_list_tables, path, size), target)
        return
    try:
        _convert_blocks(partial(_line_tables, path, size), target)
    except pa.ArrowInvalid:
        _check_lines(path)
        raise


def _convert_blocks(tables_of: Callable[[pa.Schema | None], Iterator[pa.Table]], target: Path) -> None:
    """Each block has its own types: if they differ, decode all blocks again with types that fit all."""
    tables = tables_of(None)
    first = next(tables, None)
    if first is None:
        raise ValueError("it is empty")
    schema, is_alike = first.schema, True

    def alike() -> Iterator[pa.Table]:
        nonlocal schema, is_alike
        yield first
        for table in tables:
            schema = pa.unify_schemas([schema, table.schema], promote_options="permissive")
            is_alike = is_alike and schema.equals(first.schema) and table.schema.equals(schema)
            if is_alike:
                yield table

    write_batches(target, schema, alike())
    if not is_alike:
        write_batches(target, schema, (table.select(schema.names) for table in tables_of(schema)))


def _line_tables(path: AnyPath, size: int, schema: pa.Schema | None) -> Iterator[pa.Table]:
    """Yield the rows of a file block by block; with a ``schema``, with all of its columns and types."""
    with input_stream(path) as file:
        lines = io.BufferedReader(file)
        while chunk := lines.read(size) + lines.readline():
            _check_for_arrow(chunk)
            yield _json(chunk, schema)


def _json(lines: bytes, schema: pa.Schema | None) -> pa.Table:
    """Read lines of JSON as a table. Without a ``schema``, times stay text, because JSON has no times."""
    options = pa.json.ReadOptions(block_size=len(lines) + 1, use_threads=False)
    table = pa.json.read_json(io.BytesIO(lines), options, pa.json.ParseOptions(explicit_schema=schema))
    if schema is None:
        texts = kind_with(pa.struct(table.schema), lambda kind: pa.string() if pa.types.is_timestamp(kind) else kind)
        if not (plain_schema := pa.schema(list(texts))).equals(table.schema):
            return _json(lines, plain_schema)
    return table


def _list_tables(path: AnyPath, block: int, schema: pa.Schema | None) -> Iterator[pa.Table]:
    """Like `_line_tables`, for a file that holds one list of objects."""
    rows: list[dict[str, Any]] = []
    size, is_empty = 0, True
    for row, num_chars in _elements(path):
        rows.append(row)
        size += num_chars
        if size >= block:
            yield _table_of(rows, schema)
            rows, size, is_empty = [], 0, False
    if rows or is_empty:
        yield _table_of(rows, schema)


def _table_of(rows: Sequence[Mapping[str, Any]], schema: pa.Schema | None) -> pa.Table:
    """Convert objects to a table with a column for each key that any of them has, or for each of ``schema``."""
    names = dict.fromkeys(name for row in rows for name in row) if schema is None else schema.names
    columns = {}
    for name in names:
        try:
            kind = None if schema is None else schema.field(name).type
            columns[name] = pa.array([row.get(name) for row in rows], kind)
        except (pa.ArrowException, OverflowError) as error:
            raise pa.ArrowInvalid(f"column `{name}`: {error}") from error
    return pa.table(columns)


def _elements(path: AnyPath) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the objects in the list that a file holds, and the number of characters of each."""
    scan, blank = json.JSONDecoder().raw_decode, re.compile(r"[ \t\r\n]*")
    with input_stream(path) as file:
        source = io.TextIOWrapper(io.BufferedReader(file), encoding="utf-8-sig")
        text, at, number, is_end = source.read(_BLOCK).lstrip()[1:], 0, 0, False
        while True:
            start = at = blank.match(text, at).end()  # type: ignore[union-attr]
            try:
                if text[at : at + 1] == "]":
                    break
                if number:
                    if text[at : at + 1] != ",":
                        raise json.JSONDecodeError("a comma is missing", text, at)
                    at = blank.match(text, at + 1).end()  # type: ignore[union-attr]
                row, stop = scan(text, at)
            except json.JSONDecodeError as error:
                if is_end:
                    raise ValueError(f"object {number + 1} of the list is not JSON: {error.msg}") from error
                more = source.read(max(_BLOCK, len(text) - start))  # doubles the text: an object may be long
                text, at, is_end = text[start:] + more, 0, not more
                continue
            number += 1
            if not isinstance(row, dict):
                raise ValueError(f"element {number} of the list is not an object")
            yield row, stop - at
            at = stop
        if (text[at + 1 :] + source.read(_BLOCK)).strip():
            raise ValueError(f"there is more after the list of {number:,} objects")


def _check_for_arrow(lines: bytes) -> None:
    """Raise a RecursionError or ValueError for lines that would crash Arrow: deeply nested ones, and ``null``."""
    if re.match(rb"(?:\xef\xbb\xbf)?\s*null", lines):
        raise ValueError("a line is null, and not an object")
    data = np.frombuffer(lines, np.uint8)
    ends = np.append(np.flatnonzero(data == ord("\n")) + 1, len(data))
    opened = np.searchsorted(np.flatnonzero((data == ord("[")) | (data == ord("{"))), ends)
    for i in np.flatnonzero(np.diff(opened, prepend=0) > MOST_OPENED).tolist():
        json.loads(lines[ends[i - 1] if i else 0 : ends[i]])


def _check_lines(path: AnyPath) -> None:
    """Raise a ValueError that names the first line that is not JSON; Arrow only counts from the last block."""
    with input_stream(path) as file:
        for number, line in enumerate(io.BufferedReader(file), 1):
            try:
                _ = line.isspace() or json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON: {error}") from error


# -- Arrow streams ----------------------------------------------------------------------------------------------------


def _convert_stream(path: AnyPath, texts: Sequence[str], target: Path, size: int) -> None:
    """Dictionary-encoded columns become plain."""
    with input_file(path) as source, pa.ipc.open_stream(source) as reader:
        check_names(reader.schema)

        def tables() -> Iterator[pa.Table]:
            for batch in reader:
                batch.validate(full=True)
                yield plain(without_views(pa.Table.from_batches([batch])))

        write_batches(target, plain(without_views(reader.schema.empty_table())).schema, tables())


# -- all kinds ------------------------------------------------------------------------------------------------------


def _input(path: AnyPath) -> Any:
    """The input for Arrow's text readers."""
    return input_stream(path) if isinstance(path, RemotePath) else path


CONVERTERS: Final[Mapping[str, Callable[[AnyPath, Sequence[str], Path, int], None]]] = {
    "csv": _convert_csv,
    "json": _convert_json,
    "stream": _convert_stream,
}
"""By kind, functions that convert a file to an Arrow file. Arguments: the file, the columns to read as text, the
target, and the number of bytes to decode at a time."""
