# SPDX-License-Identifier: Apache-2.0
"""Experience as an Arrow table, a row a step, and back: the layout of recordings.

Key columns: ``episode_id``, ``agent_id``, ``module_id`` (dictionary-encoded strings) and ``t`` (int64). ``lookback``
(int32) is null but on the first row of each segment, where it holds how many leading rows are context; ``final_obs`` is
null but on the last row, and null there too where it is not known. ``terminated`` and ``truncated`` are True on a
segment's last row only. A step column of shape ``[n, ...]`` is a fixed-size list, flattened, with its shape in the
field's metadata; images (uint8 of two or more axes) are fixed-size binary, which is faster and smaller.
"""

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.experience.segments import Segments

if TYPE_CHECKING:
    from etude.experience.experience import Experience

SHAPE_KEY = b"etude:shape"
KEYS = (col.EPISODE_ID, col.AGENT_ID, col.MODULE_ID, col.T_INDEX, col.LOOKBACK, col.TERMINATED, col.TRUNCATED)


def to_table(exp: "Experience") -> pa.Table:
    """See `Experience.to_table`."""
    exp = exp.numpy()
    lengths, segments = exp.lengths, exp.segments
    start_rows, end_rows = exp.offsets[:-1], exp.offsets[1:] - 1
    columns: list[tuple[pa.Field, pa.Array]] = [
        _keyed(col.EPISODE_ID, segments.episode_id, lengths),
        _keyed(col.AGENT_ID, segments.agent_id, lengths),
        _keyed(col.MODULE_ID, segments.module_id, lengths),
        _plain(col.T_INDEX, pa.array(exp.t())),
        _plain(col.LOOKBACK, _sparse(segments.lookback.astype(np.int32), start_rows, exp.num_steps)),
    ]
    columns += [_column(name, np.asarray(values)) for name, values in exp.steps.items()]
    columns += [
        _plain(col.TERMINATED, pa.array(exp.at_ends(segments.terminated))),
        _plain(col.TRUNCATED, pa.array(exp.at_ends(segments.truncated))),
    ]
    known = segments.has_final_obs
    for name, values in exp.final_obs.items():
        renamed = col.FINAL_OBS + name[len(col.OBS) :]
        columns.append(_column(renamed, np.asarray(values)[known], end_rows[known], exp.num_steps))
    return pa.Table.from_arrays([array for _, array in columns], schema=pa.schema([field for field, _ in columns]))


def _plain(name: str, array: pa.Array) -> tuple[pa.Field, pa.Array]:
    return pa.field(name, array.type), array


def _keyed(name: str, values: NDArray[Any], lengths: NDArray[np.int64]) -> tuple[pa.Field, pa.Array]:
    codes = pa.array(values, pa.string()).dictionary_encode()
    indices = codes.indices.to_numpy(zero_copy_only=False)
    if codes.null_count:
        indices = np.where(np.asarray(codes.is_null()), -1, indices)
    repeated = np.repeat(indices, lengths).astype(np.int32)
    array = pa.DictionaryArray.from_arrays(pa.array(repeated, mask=repeated < 0), codes.dictionary)
    return _plain(name, array)


def _sparse(values: NDArray[Any], rows: NDArray[np.int64], num_rows: int) -> pa.Array:
    """Values at some rows, null at all others."""
    full = np.zeros(num_rows, values.dtype)
    full[rows] = values
    absent = np.ones(num_rows, bool)
    absent[rows] = False
    return pa.array(full, mask=absent)


def _column(
    name: str, values: NDArray[Any], rows: NDArray[np.int64] | None = None, num_rows: int | None = None
) -> tuple[pa.Field, pa.Array]:
    """A field and its array; with ``rows``, the values stand at those rows and all others are null."""
    if values.dtype.kind not in "biufO":
        raise DataError(f"column `{name}` has dtype {values.dtype}, which a recording can't keep. Convert it to numbers.")
    num_rows = len(values) if num_rows is None else num_rows
    absent = None
    if rows is not None:
        absent = np.ones(num_rows, bool)
        absent[rows] = False
        full = np.zeros((num_rows, *values.shape[1:]), values.dtype)
        full[rows] = values
        values = full
    if values.ndim == 1:
        try:
            return _plain(name, pa.array(values, mask=absent))
        except pa.ArrowInvalid as error:
            raise DataError(f"column `{name}` mixes types that a recording can't keep: {error}") from None
    shape = values.shape[1:]
    width = int(np.prod(shape))
    if width == 0:
        raise DataError(f"column `{name}` has rows of shape {list(shape)}: nothing to keep. Drop it first.")
    flat = np.ascontiguousarray(values).reshape(-1)
    field_metadata = {SHAPE_KEY: json.dumps(list(shape)).encode()}
    if values.dtype == np.uint8 and len(shape) >= 2:
        validity = None if absent is None else pa.array(~absent).buffers()[1]
        kind = pa.binary(width)
        array = pa.Array.from_buffers(kind, num_rows, [validity, pa.py_buffer(flat)])
    else:
        array = pa.FixedSizeListArray.from_arrays(
            pa.array(flat), width, mask=None if absent is None else pa.array(absent)
        )
    return pa.field(name, array.type, metadata=field_metadata), array


def from_table(table: pa.Table) -> "Experience":
    """See `Experience.from_table`.

    Rows that a filter left out cut segments: a piece whose end is missing has no ``final_obs``.

    Raises:
        DataError: a key column is missing, or a column's type is not one that `to_table` makes.
    """
    from etude.experience.experience import Experience

    for name in (col.EPISODE_ID, col.T_INDEX):
        if name not in table.column_names:
            raise DataError(f"the table has no column `{name}`; it has {', '.join(table.column_names)}.")
    num_rows = table.num_rows
    names = [name for name in table.column_names if name not in KEYS and not col.is_under(name, col.FINAL_OBS)]
    steps = {name: to_numpy(table, name) for name in names}
    final_names = col.under(table.column_names, col.FINAL_OBS)
    ends_known = np.zeros(num_rows, bool)
    if final_names:
        ends_known = np.asarray(table[final_names[0]].is_valid())
    starts = _segment_starts(table, ends_known)
    offsets = np.append(starts, num_rows).astype(np.int64)
    if not num_rows:
        offsets = np.zeros(1, np.int64)
    first, last = offsets[:-1], offsets[1:] - 1
    known = ends_known[last]
    final_obs = {}
    for name in final_names:
        column = table[name].combine_chunks()
        rows = _rows_to_numpy(column.drop_null(), table.schema.field(name))
        final = np.zeros((len(first), *rows.shape[1:]), rows.dtype)
        if rows.dtype == object:
            final = np.full(len(first), None, object)
        final[known] = rows
        final_obs[col.OBS + name[len(col.FINAL_OBS) :]] = final
    lookback = _optional_ints(table, col.LOOKBACK)[first] if col.LOOKBACK in table.column_names else 0
    segments = Segments.of(
        len(first),
        episode_id=_strings_at(table, col.EPISODE_ID, first),
        agent_id=_strings_at(table, col.AGENT_ID, first),
        module_id=_strings_at(table, col.MODULE_ID, first),
        t_start=np.asarray(table[col.T_INDEX])[first],
        lookback=lookback,
        terminated=_flags(table, col.TERMINATED)[last],
        truncated=_flags(table, col.TRUNCATED)[last],
        has_final_obs=known,
    )
    return Experience(steps, offsets, segments, final_obs)


def _segment_starts(table: pa.Table, ends_known: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The rows at which a segment begins: a key changes, time jumps, the row before is an end, or one is marked."""
    if not table.num_rows:
        return np.zeros(0, np.int64)
    t = np.asarray(table[col.T_INDEX])
    starts = np.ones(table.num_rows, bool)
    starts[1:] = (t[1:] != t[:-1] + 1) | ends_known[:-1]
    for name in (col.TERMINATED, col.TRUNCATED):
        starts[1:] |= _flags(table, name)[:-1]
    for name in (col.EPISODE_ID, col.AGENT_ID, col.MODULE_ID):
        if name in table.column_names:
            codes = _codes(table[name])[0]
            starts[1:] |= codes[1:] != codes[:-1]
    if col.LOOKBACK in table.column_names:
        starts |= np.asarray(table[col.LOOKBACK].is_valid())
    return np.flatnonzero(starts)


def _codes(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """A string column as codes (-1 for null) and the strings they stand for."""
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    array = encoded.unify_dictionaries().combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.DictionaryArray.from_arrays(pa.array([], pa.int32()), [])
    codes = pc.fill_null(array.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return codes, np.asarray(array.dictionary.to_pylist(), object)


def _strings_at(table: pa.Table, name: str, rows: NDArray[np.int64]) -> NDArray[np.object_]:
    out = np.full(len(rows), None, object)
    if name in table.column_names and len(rows):
        codes, strings = _codes(table[name])
        chosen = codes[rows]
        out[chosen >= 0] = strings[chosen[chosen >= 0]]
    return out


def _flags(table: pa.Table, name: str) -> NDArray[np.bool_]:
    if name not in table.column_names:
        return np.zeros(table.num_rows, bool)
    return np.asarray(pc.fill_null(table[name], False)).astype(bool)


def _optional_ints(table: pa.Table, name: str) -> NDArray[np.int64]:
    return np.asarray(pc.fill_null(table[name], 0)).astype(np.int64)


def to_numpy(table: pa.Table, name: str) -> NDArray[Any]:
    """A column of ``table`` as ``[num_rows, ...]``; numbers without nulls share the table's memory where they can.

    Raises:
        DataError: the column holds nulls, or is of a type that Experience can't hold.
    """
    column = table[name]
    if column.null_count:
        row = int(np.argmax(np.asarray(column.is_null())))
        raise DataError(f"column `{name}` has {column.null_count} empty rows, the first of them row {row}.")
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    return _rows_to_numpy(array, table.schema.field(name))


def _rows_to_numpy(array: pa.Array, field: pa.Field) -> NDArray[Any]:
    kind = array.type
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], kind)
    if pa.types.is_fixed_size_list(kind) or pa.types.is_fixed_size_binary(kind):
        metadata = field.metadata or {}
        if pa.types.is_fixed_size_list(kind):
            flat = array.flatten().to_numpy(zero_copy_only=False)
            shape = [kind.list_size]
        else:
            width = kind.byte_width
            data = np.frombuffer(array.buffers()[1], np.uint8) if len(array) else np.zeros(0, np.uint8)
            flat = data[array.offset * width : (array.offset + len(array)) * width]
            shape = [width]
        if SHAPE_KEY in metadata:
            shape = json.loads(metadata[SHAPE_KEY])
        return flat.reshape((len(array), *shape))
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind):
        out = np.empty(len(array), object)
        out[:] = array.to_pylist()
        return out
    raise DataError(f"column `{field.name}` is of Arrow type {kind}, which Experience can't hold.")
