# SPDX-License-Identifier: Apache-2.0
"""The encodings of a column in RLlib's tables: tensors of Ray Data, structs, lists, numbers, packed and pickled values.

Ray's extension types are taken by their storage and by what the field says of itself, so that Ray is not needed. Their
metadata is JSON, or, from some versions of Ray, a pickle, which is not read: the shape then follows from the lengths.
"""

import json
import math
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from etude.columns import Columns
from etude.errors import DataError
from etude.recordings.formats.packed import unpack, unpack_rows, unpickle
from etude.recordings.formats.rllib_columns import flat_entries

_TENSORS: Final = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2", "arrow.fixed_shape_tensor")
_VARIABLE: Final = "ray.data.arrow_variable_shaped_tensor"
_PICKLED: Final = "ray.data.arrow_pickled_object"


class RowError(DataError):
    """A row of a column can't be read; ``row`` counts from 0 in what was given."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


def is_coded(field: pa.Field) -> bool:
    """Whether the values of a column are packed or pickled, so that its type does not tell what they are."""
    kind = _storage(field.type)
    return _is_bytes(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)


def columns_of(values: pa.ChunkedArray, field: pa.Field, root: str) -> Columns:
    """A column as flat NumPy columns ``[N, ...]`` under ``root``.

    Raises:
        DataError: it holds no numbers, or rows of different shapes; a `RowError` where one row is the reason.
    """
    name, metadata = _extension(field)
    array = one_array(values, field.type)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if array.null_count:
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise RowError(row, f"`{root}` is empty in this row")
    if name in _TENSORS:
        return {root: _tensor(array, _shape(metadata), root)}
    if name == _VARIABLE:
        return {root: _variable(array, root)}
    if name == _PICKLED:
        return flat_entries(_each(array, unpickle, root), None, root)
    return _plain(array, root)


def one_array(values: pa.ChunkedArray | pa.Array, kind: pa.DataType) -> pa.Array:
    """A column as one array; copied only where it is in several pieces."""
    if not isinstance(values, pa.ChunkedArray):
        return values
    if values.num_chunks == 1:  # combining them would copy it
        return values.chunk(0)
    array = values.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # no chunks, or too many bytes for one
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], kind)
    return array


def _storage(kind: pa.DataType) -> pa.DataType:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _extension(field: pa.Field) -> tuple[str, bytes]:
    """The name of a field's extension type and what it says of itself; empty where it has none."""
    if isinstance(field.type, pa.FixedShapeTensorType):
        return field.type.extension_name, json.dumps({"shape": field.type.shape}).encode()
    if isinstance(field.type, pa.ExtensionType):
        return field.type.extension_name, field.type.__arrow_ext_serialize__()
    metadata = field.metadata or {}
    name = metadata.get(b"ARROW:extension:name", b"").decode("utf-8", "replace")
    return name, metadata.get(b"ARROW:extension:metadata", b"")


def _shape(metadata: bytes) -> tuple[int, ...] | None:
    """The shape of one row, or None where it is not said in JSON."""
    try:
        data = json.loads(metadata)
    except (ValueError, UnicodeDecodeError, RecursionError):
        return None
    shape = data.get("shape") if isinstance(data, dict) else data
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        return None
    return tuple(shape)


def _tensor(array: pa.Array, shape: tuple[int, ...] | None, root: str) -> NDArray[Any]:
    flat = _plain(array, root)[root]
    if shape is None:
        return flat
    if math.prod(shape) != math.prod(flat.shape[1:]) and len(flat):
        raise DataError(f"`{root}` has {math.prod(flat.shape[1:])} numbers a row, but its shape is {list(shape)}")
    return flat.reshape(len(flat), *shape)


def _variable(array: pa.Array, root: str) -> NDArray[Any]:
    if not pa.types.is_struct(array.type) or {"data", "shape"} - {f.name for f in array.type}:
        raise DataError(f"`{root}` is said to be a tensor of variable shape, but is {array.type}")
    if not len(array):
        return np.zeros(0, np.float32)
    shapes = _plain(array.field("shape"), root)[root]
    different = (shapes != shapes[0]).any(axis=1)
    if different.any():
        row = int(different.argmax())
        raise RowError(
            row, f"`{root}` has the shape {shapes[row].tolist()} in this row, but {shapes[0].tolist()} before"
        )
    if (shapes[0] < 0).any():
        raise DataError(f"`{root}` has the shape {shapes[0].tolist()}")
    return _tensor(array.field("data"), tuple(shapes[0].tolist()), root)


def _plain(array: pa.Array, root: str) -> Columns:
    kind = array.type
    if pa.types.is_dictionary(kind):
        array, kind = array.dictionary_decode(), kind.value_type
    if pa.types.is_struct(kind):
        out: Columns = {}
        for i in range(kind.num_fields):
            child = pa.chunked_array([array.field(i)])
            out |= columns_of(child, kind.field(i), f"{root}/{kind.field(i).name}")
        return out
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return {root: _lists(array, root)}
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or _is_bytes(kind):
        return flat_entries(_packed(array, root), None, root)
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return {root: np.asarray(array.to_numpy(zero_copy_only=False))}
    raise DataError(f"`{root}` is of the type {kind}, which holds no numbers")


def _lists(array: pa.Array, root: str) -> NDArray[Any]:
    lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
    if len(lengths) and lengths.min() != lengths.max():
        row = int((lengths != lengths[0]).argmax())
        raise RowError(row, f"`{root}` has {lengths[row]} entries in this row, but {lengths[0]} before")
    inner = array.flatten()
    if inner.null_count:
        row = int(np.flatnonzero(inner.is_null().to_numpy(zero_copy_only=False))[0]) // int(lengths[0])
        raise RowError(row, f"`{root}` has an empty entry in this row")
    flat = _plain(inner, root)
    if list(flat) != [root]:
        raise DataError(f"`{root}` is a list of {inner.type}, which is no array")
    values = flat[root]
    return values.reshape(len(array), int(lengths[0]) if len(lengths) else 0, *values.shape[1:])


def _packed(array: pa.Array, root: str) -> list[Any]:
    texts = array.to_pylist()
    try:
        return unpack_rows(texts)
    except DataError:
        return _each(array, unpack, root)


def _each(array: pa.Array, decode: Any, root: str) -> list[Any]:
    values = []
    for row, value in enumerate(array.to_pylist()):
        try:
            values.append(decode(value))
        except DataError as error:
            raise RowError(row, f"`{root}`: {error}") from error
    return values
