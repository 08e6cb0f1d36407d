# SPDX-License-Identifier: Apache-2.0
"""Experience as an Arrow table with one row per step, and back: the layout of recordings.

Key columns: ``episode_id``, ``agent_id``, ``module_id`` (dictionary-encoded strings), ``segment`` (int64, the same for
all rows of a segment) and ``t`` (int64). ``terminated`` and ``truncated`` are True only on a segment's last row.
``final_obs`` is null except on the last row of a segment whose final observation is known. If there is context,
``lookback`` (bool) is True on its rows; recordings have none.

A step column of shape ``[n, ...]`` is a flattened fixed-size list with its shape in the field's metadata; images (uint8
with two or more axes) are fixed-size binary, which is faster and smaller. ``final_obs`` of shape ``[n, ...]`` is a list
of variable size, because PyArrow before 26 can't read Parquet files with fixed-size lists that are null
(https://github.com/apache/arrow/issues/35692).
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.experience.arrays import Index, ranges, zeros
from etude.experience.ids import Ids

SHAPE_KEY = b"etude:shape"
IDS = (col.EPISODE_ID, col.AGENT_ID, col.MODULE_ID)
KEYS = (*IDS, col.SEGMENT, col.T_INDEX, col.LOOKBACK, col.TERMINATED, col.TRUNCATED)


def to_table(
    steps: Columns, offsets: Index, segments: Mapping[str, Any], final_obs: Columns, first_segment: int = 0
) -> pa.Table:
    """The parts of an Experience, in NumPy, as a table; ``segments`` are the columns of `Segments` by name.

    The number of a segment is ``first_segment`` plus the index of its first row.

    Raises:
        DataError: a column's name or values can't be stored in a recording.
    """
    lengths, num_steps = np.diff(offsets), int(offsets[-1])
    start_rows, end_rows = offsets[:-1], offsets[1:] - 1
    t = np.arange(num_steps) + np.repeat(segments["t_start"] - start_rows, lengths)
    columns: list[tuple[pa.Field, pa.Array]] = [
        *(_keyed(name, segments[name], lengths) for name in IDS),
        _plain(col.SEGMENT, pa.array(np.repeat(start_rows + first_segment, lengths))),
        _plain(col.T_INDEX, pa.array(t)),
    ]
    if segments["lookback"].any():
        is_context = np.zeros(num_steps, bool)
        is_context[ranges(start_rows, segments["lookback"])] = True
        columns.append(_plain(col.LOOKBACK, pa.array(is_context)))
    for name, values in steps.items():
        if name in KEYS or col.is_under(name, col.FINAL_OBS):
            raise DataError(f"a step column can't be called `{name}`: recordings use this name themselves. Rename it.")
        columns.append(_column(name, np.asarray(values)))
    for name in (col.TERMINATED, col.TRUNCATED):
        flags = np.zeros(num_steps, bool)
        flags[end_rows] = segments[name]
        columns.append(_plain(name, pa.array(flags)))
    known = segments["has_final_obs"]
    for name, values in final_obs.items():
        renamed = col.moved(name, col.OBS, col.FINAL_OBS)
        columns.append(_column(renamed, np.asarray(values)[known], end_rows[known], num_steps))
    return pa.Table.from_arrays([array for _, array in columns], schema=pa.schema([field for field, _ in columns]))


def _plain(name: str, array: pa.Array, *, nullable: bool = False) -> tuple[pa.Field, pa.Array]:
    return pa.field(name, array.type, nullable=nullable), array


def _keyed(name: str, ids: Ids, lengths: NDArray[np.int64]) -> tuple[pa.Field, pa.Array]:
    ids = Ids.concat([ids])  # a file stores the whole table of names
    absent = np.asarray(ids.names == None)  # noqa: E711 - an array
    mask = absent[ids.codes].repeat(lengths) if absent.any() else None
    codes = pa.array(ids.codes.astype(np.int32).repeat(lengths), mask=mask)
    array = pa.DictionaryArray.from_arrays(codes, pa.array(np.where(absent, "", ids.names), pa.string()))
    return _plain(name, array, nullable=name != col.EPISODE_ID)


def _column(
    name: str, values: NDArray[Any], rows: NDArray[np.int64] | None = None, num_rows: int | None = None
) -> tuple[pa.Field, pa.Array]:
    """A field and its array; with ``rows``, the values are at these rows and all other rows are null."""
    if values.dtype.kind not in "biufO" or not values.dtype.isnative or values.dtype.itemsize > 8:
        raise DataError(
            f"column `{name}` has dtype {values.dtype}, which a recording can't store. Convert it to numbers."
        )
    num_rows = len(values) if num_rows is None else num_rows
    nullable = rows is not None or values.dtype == object
    absent = None
    if rows is not None:
        absent = np.ones(num_rows, bool)
        absent[rows] = False
        if values.dtype == object and any(value is None for value in values.flat):
            raise DataError(f"column `{name}` holds None, which means an unknown observation. Use a string instead.")
    shape = values.shape[1:]
    width = int(np.prod(shape))
    if width == 0:
        raise DataError(f"column `{name}` has rows of shape {list(shape)}: there is nothing to store. Drop it first.")
    is_image = values.dtype == np.uint8 and len(shape) >= 2
    if absent is not None and (is_image or not shape):
        full = np.asarray(zeros(num_rows, values))
        full[rows] = values
        values = full
    if not shape:
        return _plain(name, _flat(name, values, absent), nullable=nullable)
    flat = np.ascontiguousarray(values).reshape(-1)
    field_metadata = {SHAPE_KEY: json.dumps(list(shape)).encode()}
    if is_image:
        validity = None if absent is None else pa.array(~absent).buffers()[1]
        kind = pa.binary(width)
        array = pa.Array.from_buffers(kind, num_rows, [validity, pa.py_buffer(flat)])
    else:
        items = _flat(name, flat)
        # Elements that can't be null are read a fifth faster from Parquet.
        element = pa.field("element", items.type, nullable=values.dtype == object)
        if absent is None:
            array = pa.FixedSizeListArray.from_arrays(items, type=pa.list_(element, width))
        else:
            starts = pa.array(np.append(0, np.cumsum(~absent) * width), pa.int32())
            array = pa.ListArray.from_arrays(starts, items, type=pa.list_(element), mask=pa.array(absent))
    return pa.field(name, array.type, nullable=nullable, metadata=field_metadata), array


def _flat(name: str, values: NDArray[Any], absent: NDArray[np.bool_] | None = None) -> pa.Array:
    """Numbers or strings as an Arrow array, null where ``absent``; None in strings becomes null."""
    try:
        array = pa.array(values, mask=absent)
    except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeEncodeError) as error:
        raise DataError(f"column `{name}` holds objects that a recording can't store: {error}") from None
    if values.dtype != object or pa.types.is_string(array.type):
        return array
    if pa.types.is_null(array.type):
        return array.cast(pa.string())  # None only: the type must not depend on the values
    raise DataError(f"column `{name}` holds objects that are not strings ({array.type}). Convert it to numbers.")


def from_table(table: pa.Table) -> tuple[Columns, Index, dict[str, Any], Columns]:
    """The steps, offsets, segments' columns and ``final_obs`` in a table; see `Experience.from_table`."""
    for name in (col.EPISODE_ID, col.T_INDEX):
        if name not in table.column_names:
            raise DataError(f"the table has no column `{name}`; it has {', '.join(table.column_names)}.")
    num_rows = table.num_rows
    names = [name for name in table.column_names if name not in KEYS and not col.is_under(name, col.FINAL_OBS)]
    steps = {name: to_numpy(table, name) for name in names}
    final_names = col.under(table.column_names, col.FINAL_OBS)
    ends_known = _valid(_one(table[final_names[0]])) if final_names else np.zeros(num_rows, bool)
    t = to_numpy(table, col.T_INDEX)
    ids = {name: _ids(table, name) for name in IDS}
    terminated, truncated = _flags(table, col.TERMINATED), _flags(table, col.TRUNCATED)
    starts = np.ones(num_rows, bool)  # a segment begins where a key changes, ``t`` jumps, or the row before is an end
    starts[1:] = (ends_known | terminated | truncated)[:-1]
    starts[1:] |= np.diff(t) != 1
    numbers = [to_numpy(table, name) for name in (col.SEGMENT,) if name in table.column_names]
    for key in (*(each.codes for each in ids.values()), *numbers):
        starts[1:] |= key[1:] != key[:-1]
    lookback = _one(table[col.LOOKBACK]) if col.LOOKBACK in table.column_names else None
    is_sparse = lookback is not None and not pa.types.is_boolean(lookback.type)  # as in format 1
    if is_sparse:
        starts |= _valid(lookback)
    offsets = np.append(np.flatnonzero(starts), num_rows).astype(np.int64) if num_rows else np.zeros(1, np.int64)
    first, last = offsets[:-1], offsets[1:] - 1
    context = np.zeros(len(first), np.int64)
    if lookback is not None and is_sparse:
        context = np.asarray(lookback.take(pa.array(first)).fill_null(0))
        if len(below := np.flatnonzero(context < 0)):
            raise DataError(f"column `{col.LOOKBACK}` is {context[below[0]]} in row {first[below[0]]}: it counts rows.")
    elif lookback is not None and num_rows:
        context = np.add.reduceat(_flags(table, col.LOOKBACK), first, dtype=np.int64)
    known = ends_known[last]
    final_obs = {}
    for name in final_names:
        rows = _rows_to_numpy(_one(table[name]).take(pa.array(last[known])), table.schema.field(name))
        final = np.full((len(first), *rows.shape[1:]), None if rows.dtype == object else 0, rows.dtype)
        final[known] = rows
        final_obs[col.as_obs(name)] = final
    segments = {
        **{name: Ids(each.names, each.codes[first].astype(np.int64)) for name, each in ids.items()},
        "t_start": t[first],
        "lookback": context,
        "terminated": terminated[last],
        "truncated": truncated[last],
        "has_final_obs": known,
    }
    return steps, offsets, segments, final_obs


def shape_of(field: pa.Field) -> list[int] | None:
    """The shape of a row according to a field's metadata; None if it is missing or invalid."""
    try:
        shape = json.loads((field.metadata or {}).get(SHAPE_KEY, b"null"))
    except (ValueError, RecursionError):
        return None
    return shape if isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape) else None


def _one(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array."""
    if column.num_chunks == 1:
        return column.chunk(0)
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], column.type)
    return array


def _bits(bitmap: pa.Buffer | None, array: pa.Array) -> NDArray[np.bool_]:
    """A bitmap of ``array`` as bools; NumPy unpacks it several times faster than Arrow."""
    if bitmap is None or not len(array):
        return np.ones(len(array), bool)
    stop = array.offset + len(array)
    packed = np.frombuffer(bitmap, np.uint8, count=-(-stop // 8))
    return np.unpackbits(packed, count=stop, bitorder="little")[array.offset :].view(np.bool_)


def _valid(array: pa.Array) -> NDArray[np.bool_]:
    """Mark the values of ``array`` that are not null."""
    if array.null_count in (0, len(array)):
        return np.full(len(array), not array.null_count)
    return _bits(array.buffers()[0], array)


def _ids(table: pa.Table, name: str) -> Ids:
    """A string column as Ids, whose codes have Arrow's integer dtype."""
    column = table[name] if name in table.column_names else None
    if column is None or column.null_count == len(column):
        return Ids.of(None, table.num_rows)
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    array = _one(encoded.unify_dictionaries() if encoded.num_chunks > 1 else encoded)
    if len(array.dictionary.unique()) < len(array.dictionary) or array.dictionary.null_count:
        array = array.cast(pa.string()).dictionary_encode()  # other writers may have stored a name twice
    codes = array.indices.fill_null(len(array.dictionary)) if array.null_count else array.indices
    return Ids(np.array([*array.dictionary.to_pylist(), None], object), codes.to_numpy(zero_copy_only=False))


def _flags(table: pa.Table, name: str) -> NDArray[np.bool_]:
    if name not in table.column_names:
        return np.zeros(table.num_rows, bool)
    array = _one(table[name])
    return _rows_to_numpy(array.fill_null(False) if array.null_count else array, table.schema.field(name)).astype(
        np.bool_, copy=False
    )


def to_numpy(table: pa.Table, name: str) -> NDArray[Any]:
    """A column of ``table`` as ``[num_rows, ...]``; numbers without nulls share the table's memory if possible.

    Raises:
        DataError: the column holds nulls, or has a type that Experience can't hold.
    """
    column = table[name]
    if column.null_count and not _may_be_none(column.type):
        row = int(np.argmax(np.asarray(column.is_null())))
        raise DataError(f"column `{name}` has {column.null_count} empty rows, the first of them row {row}.")
    return _rows_to_numpy(_one(column), table.schema.field(name))


def _may_be_none(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind))


def _rows_to_numpy(array: pa.Array, field: pa.Field) -> NDArray[Any]:
    kind = array.type
    metadata = field.metadata or {}
    is_list = pa.types.is_list(kind) and SHAPE_KEY in metadata
    if is_list or pa.types.is_fixed_size_list(kind) or pa.types.is_fixed_size_binary(kind):
        if is_list:
            flat, shape = array.flatten().to_numpy(zero_copy_only=False), shape_of(field) or []
            lengths = np.unique(array.value_lengths().to_numpy(zero_copy_only=False))
            if len(lengths) and (len(lengths) > 1 or lengths[0] != np.prod(shape)):
                listed = " and of ".join(map(str, lengths[:2]))
                raise DataError(f"column `{field.name}` has lists of {listed} values, but rows of shape {shape}.")
        elif pa.types.is_fixed_size_list(kind):
            flat = array.flatten().to_numpy(zero_copy_only=False)
            shape = [kind.list_size]
        else:
            width = kind.byte_width
            data = np.frombuffer(array.buffers()[1], np.uint8) if len(array) else np.zeros(0, np.uint8)
            flat = data[array.offset * width : (array.offset + len(array)) * width]
            shape = [width]
        said: Any = metadata.get(SHAPE_KEY, json.dumps(shape))
        try:
            shape = json.loads(said)
            return np.asarray(flat.reshape((len(array), *shape)))
        except (ValueError, TypeError, RecursionError) as error:
            raise DataError(
                f"column `{field.name}` of Arrow type {kind} has rows of shape {said!r} by its metadata: {error}."
            ) from error
    if pa.types.is_boolean(kind):
        return _bits(array.buffers()[1], array)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    if _may_be_none(kind):
        out = np.empty(len(array), object)
        out[:] = array.to_pylist()
        return out
    raise DataError(f"column `{field.name}` has the Arrow type {kind}, which Experience can't hold.")
