# SPDX-License-Identifier: Apache-2.0
"""Convert Arrow columns to NumPy arrays with a row per step; errors name the row."""

import math
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from etude.errors import DataError
from etude.recordings.format import most_rows

MOST_AXES: Final = 32
"""The most lists or structs inside each other; NumPy arrays can't have more axes."""

RowPlace: TypeAlias = Callable[[int], str]
"""Describes the location of a row, for errors."""


def one_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return a column as one array; copied only if it is in several pieces."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:  # combining them would copy it
        return column.chunk(0)
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # no chunks, or too many bytes for one
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    return array


Coded: TypeAlias = Callable[[pa.Array, str], NDArray[Any]]
"""Converts a text column, given with its path, to numbers."""


def flat(
    array: pa.Array, name: str, place: RowPlace, coded: Coded | None = None, *, with_nan: bool = False
) -> dict[str, NDArray[Any]]:
    """Convert a column to arrays ``[rows, ...]`` by path: one under ``name``, or one for each member of a struct.

    Args:
        array: The column.
        name: Its path.
        place: Describes the location of a row, for errors.
        coded: Converts text; with None, text is an error.
        with_nan: Read missing floats and decimals, also in lists, as NaN.

    Raises:
        DataError: it contains something other than numbers, empty rows, or lists of different lengths; the message
            names the row.
    """
    if pa.types.is_struct(array.type):
        _check_depth(array.type, name, place)
        check_nulls(array, name, place)
        out: dict[str, NDArray[Any]] = {}
        for i, field in enumerate(array.type):
            out |= flat(pc.struct_field(array, [i]), f"{name}/{field.name}", place, coded, with_nan=with_nan)
        return out
    if coded is not None and is_text(array.type):
        check_nulls(array, name, place)
        return {name: coded(array, name)}
    return {name: numbers(array, name, place, with_nan=with_nan)}


def numbers(array: pa.Array, name: str, place: RowPlace, *, with_nan: bool = False) -> NDArray[Any]:
    """Convert a column of numbers, or of lists of numbers of one length, to ``[rows, ...]``; see `flat`."""
    kind, shape, order = array.type, None, None
    if isinstance(kind, pa.BaseExtensionType):
        shape, order = getattr(kind, "shape", None), getattr(kind, "permutation", None)
        array, kind = array.storage, array.storage.type
    if pa.types.is_dictionary(kind):
        array = array.dictionary_decode()
        kind = array.type
    if not with_nan or not (pa.types.is_floating(innermost(kind)) or pa.types.is_decimal(innermost(kind))):
        check_nulls(array, name, place)
    if is_list(kind):
        _check_depth(kind, name, place)
        array = _with_lists(array) if array.null_count else array
        width = _width(array, name, place)
        inside = numbers(array.flatten(), name, lambda row: place(row // width), with_nan=with_nan)
        values = inside.reshape(len(array), -1, *inside.shape[1:])
        if shape and math.prod(shape) == width * math.prod(values.shape[2:]):
            values = values.reshape(len(array), *shape)
            return values if order is None else values.transpose(0, *_axes(order, name, place))
        return values
    if is_bytes(kind):
        return _bytes_of(array, name, place)
    if pa.types.is_decimal(kind):
        array = array.cast(pa.string()).cast(pa.float64())  # a direct cast rounds twice
    elif not is_number(kind):
        row = _no_number(array) if is_text(kind) else 0
        such = f", for instance {shown(array[row])!r}" if len(array) else ""
        advice = "Convert it" if not is_text(kind) else "Convert it to numbers, or give each text a number"
        raise DataError(f"{place(row)}: column `{name}` is of type {kind}{such}, not of numbers. {advice}.")
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _axes(order: Sequence[int], name: str, place: RowPlace) -> Iterable[int]:
    """The stored axes of a tensor, from 1, in the order in which they are used.

    Raises:
        DataError: the order is not its own inverse. PyArrow writes the inverse of what Arrow's format says.
    """
    if any(order[axis] != i for i, axis in enumerate(order)):
        raise DataError(
            f"{place(0)}: column `{name}` is a tensor whose axes are stored in the order {list(order)}, which tools "
            "read in different ways. Store it with its axes in order, as of numpy.ascontiguousarray(values)."
        )
    return [1 + axis for axis in order]


def innermost(kind: pa.DataType) -> pa.DataType:
    """The type of what a column's lists hold, or of the column itself."""
    while is_list(kind):
        kind = kind.value_type
    return kind


def _with_lists(array: pa.Array) -> pa.Array:
    """Replace missing lists by lists of missing numbers, as long as the first list."""
    there = array.drop_null()
    missing = pa.array([[None] * (len(there[0]) if len(there) else 1)], array.type)
    rows = pc.if_else(array.is_valid(), pa.array(np.arange(len(array))), len(array))
    return pa.concat_arrays([array, missing]).take(rows)


def _no_number(texts: pa.Array) -> int:
    """The first text that is not a number; one cell such as ``-`` turns a column of numbers into text."""
    is_one = pc.match_substring_regex(texts, r"^\s*[-+]?(\d+[.,]?\d*|[.,]\d+)([eE][-+]?\d+)?\s*$")
    return max(0, int(pc.index(is_one, False).as_py()))


def shown(value: pa.Scalar) -> str:
    """The start of a value, for a message."""
    try:
        return str(value.as_py())[:40]
    except (ValueError, OverflowError):  # a time that Python can't represent
        return "?"


def list_array(values: NDArray[Any]) -> pa.Array:
    """Convert numbers ``[rows, ...]`` to an Arrow array without copying: nested lists of fixed length."""
    array = pa.array(values.reshape(-1))
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def strings(array: pa.Array, name: str, place: RowPlace) -> NDArray[np.object_]:
    """Convert a column to texts ``[rows]``, None where it is empty. Values of 16 bytes that are not text are UUIDs.

    Raises:
        DataError: it can't be converted, or its bytes are not UTF-8.
    """
    out = np.empty(len(array), object)
    try:
        out[:] = array.cast(pa.string()).to_pylist()
    except (pa.ArrowException, UnicodeDecodeError) as error:
        if pa.types.is_fixed_size_binary(array.type) and array.type.byte_width == 16:
            out[:] = [None if one is None else str(uuid.UUID(bytes=one)) for one in array.to_pylist()]
            return out
        raise DataError(f"{place(0)}: column `{name}` ({array.type}) can't be read as text ({error}).") from error
    return out


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds text."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_bytes(kind: pa.DataType) -> bool:
    """Whether a column holds byte strings."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether a column holds lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_number(kind: pa.DataType) -> bool:
    """Whether a column holds integers, floats or booleans."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


_IMAGES: Final = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")
"""The first bytes of compressed images."""


def _bytes_of(array: pa.Array, name: str, place: RowPlace) -> NDArray[np.uint8]:
    """Convert byte strings of equal length to ``[rows, bytes]``."""
    advice, values = "decode what is compressed", array.to_pylist()
    width = _one_length(pc.binary_length(array), "bytes", advice, name, place)
    if values and all(value.startswith(_IMAGES) for value in values):
        raise DataError(f"{place(0)}: column `{name}` holds PNG or JPEG files, not numbers: {advice}.")
    return np.frombuffer(b"".join(values), np.uint8).reshape(len(array), width)


def _check_depth(kind: pa.DataType, name: str, place: RowPlace) -> None:
    depth = name.count("/")
    while is_list(kind):
        kind, depth = kind.value_type, depth + 1
    if depth > MOST_AXES:
        raise DataError(f"{place(0)}: column `{name[:80]}` is nested more than {MOST_AXES} deep. Leave it out.")


def check_nulls(array: pa.Array, name: str, place: RowPlace) -> None:
    """Raise a DataError that names the first row where a column is empty, if there is one."""
    if array.null_count:
        row = int(np.argmax(np.asarray(array.is_null())))
        more = f" ({array.null_count:,} rows like it)" if array.null_count > 1 else ""
        raise DataError(f"{place(row)}: column `{name}` is empty or NaN{more}. Fill it, or leave these rows out.")


def _width(array: pa.Array, name: str, place: RowPlace) -> int:
    """The length that all lists of a column have."""
    if pa.types.is_fixed_size_list(array.type):
        width = int(array.type.list_size)
    else:
        width = _one_length(pc.list_value_length(array), "numbers", "pad them, or split the column", name, place)
    if not width and len(array):
        raise DataError(f"{place(0)}: column `{name}` holds lists of no numbers. Leave it out.")
    return max(1, width)


def _one_length(lengths: pa.Array, unit: str, advice: str, name: str, place: RowPlace) -> int:
    """The length that all rows have; 0 if there are none."""
    found = np.asarray(lengths)
    other = np.flatnonzero(found != found[:1])
    if len(other):
        row = int(other[0])
        raise DataError(
            f"{place(row)}: column `{name}` has {found[row]} {unit}, but {found[0]} in the rows before it. All rows "
            f"must be of one length: {advice}."
        )
    return int(found[0]) if len(found) else 0


def check_names(fields: Iterable[pa.Field]) -> None:
    """Raise a UnicodeDecodeError if the name of a column, or of a member of a struct, is not UTF-8."""
    for field in fields:
        _ = field.name
        check_names(field.type.field(i) for i in range(field.type.num_fields))


def plain(table: pa.Table) -> pa.Table:
    """Decode dictionary-encoded columns, because each dictionary would only be valid for one batch."""
    return _with_kinds(table, lambda kind: kind.value_type if pa.types.is_dictionary(kind) else kind)


def without_views(table: pa.Table) -> pa.Table:
    """The table with plain text and bytes in place of views, such as those of polars, which Arrow can't select from."""
    return _with_kinds(table, kind_without_views)


def _with_kinds(table: pa.Table, kind_of: Callable[[pa.DataType], pa.DataType]) -> pa.Table:
    for i, field in enumerate(table.schema):
        if (kind := kind_of(field.type)) != field.type:  # a cast of all fails for lists that can't hold empty entries
            table = table.set_column(i, field.with_type(kind), table[i].cast(kind))
    return table


def kind_without_views(kind: pa.DataType) -> pa.DataType:
    """The type of a column; see `without_views`."""

    def plain_kind(inside: pa.DataType) -> pa.DataType:
        if pa.types.is_string_view(inside):
            return pa.string()
        return pa.binary() if pa.types.is_binary_view(inside) else inside

    return kind_with(kind, plain_kind)


def kind_with(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """The type of a column with ``change`` applied to what its lists, structs and dictionaries hold, or to itself."""
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, kind_with(kind.value_type, change), kind.ordered)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(kind_with(field.type, change)) for field in kind])
    if is_list(kind):
        inside = kind.value_field.with_type(kind_with(kind.value_type, change))
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(inside, kind.list_size)
        return pa.large_list(inside) if pa.types.is_large_list(kind) else pa.list_(inside)
    return change(kind)


# -- files -----------------------------------------------------------------------------------------------------------


def write_batches(target: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Write an Arrow file of record batches of bounded size; see `most_rows`."""
    with pa.OSFile(str(target), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        waiting: list[pa.Table] = []
        rows = size = 0

        def flush() -> None:
            nonlocal rows, size
            if waiting:
                writer.write_table(pa.concat_tables(waiting).combine_chunks(), most_rows(size / max(1, rows)))
            waiting.clear()
            rows = size = 0

        for table in tables:
            waiting.append(table)
            rows += table.num_rows
            size += table.nbytes
            if rows and rows >= most_rows(size / rows):
                flush()
        flush()
