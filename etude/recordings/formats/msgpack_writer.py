# SPDX-License-Identifier: Apache-2.0
"""Columns as msgpack lists with an entry a row, as the package msgpack-numpy writes them, without an object for each.

All entries of such a list have the same bytes but for their numbers: they are laid out as one array ``[rows, bytes]``,
the constant bytes repeated and the numbers put between them. `etude.recordings.formats.msgpack_numpy` reads them.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgpack
import numpy as np
from numpy.typing import NDArray

Entries: TypeAlias = NDArray[np.uint8]
"""``[rows, bytes]``: the bytes of each entry."""
Tree: TypeAlias = "NDArray[Any] | Mapping[str, Tree] | Sequence[Tree]"
"""Columns of the same number of rows, nested: a mapping becomes a map in each entry, a sequence a list."""


def packed(value: Any) -> bytes:
    """A plain value, or a NumPy scalar, as msgpack."""
    if isinstance(value, np.generic):
        value = {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}
    out: bytes = msgpack.packb(value)
    return out


def entries(tree: Tree, *, plain: bool = False) -> Entries:
    """The entries of columns.

    Args:
        tree: The columns, each ``[rows, ...]``, of booleans, integers or floats.
        plain: Single numbers, all floats, are msgpack's own; else they are NumPy's scalars, which keep their dtype.
    """
    parts: list[bytes | Entries] = []
    _add(tree, parts, plain)
    rows = next(len(part) for part in parts if not isinstance(part, bytes))
    out = np.empty((rows, sum(len(p) if isinstance(p, bytes) else p.shape[1] for p in parts)), np.uint8)
    at = 0
    for part in parts:
        size = len(part) if isinstance(part, bytes) else part.shape[1]
        out[:, at : at + size] = np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part
        at += size
    return out


def list_of(rows: Entries) -> bytes:
    """A list of these entries."""
    return list_header(len(rows)) + rows.tobytes()


def list_header(size: int) -> bytes:
    """What stands before the entries of a list."""
    if size < 16:
        return bytes([0x90 | size])
    return b"\xdc" + struct.pack(">H", size) if size < 1 << 16 else b"\xdd" + struct.pack(">I", size)


def map_header(size: int) -> bytes:
    """What stands before the keys and values of a map."""
    if size < 16:
        return bytes([0x80 | size])
    return b"\xde" + struct.pack(">H", size) if size < 1 << 16 else b"\xdf" + struct.pack(">I", size)


def _add(tree: Tree, parts: list[bytes | Entries], plain: bool) -> None:
    if isinstance(tree, Mapping):
        parts.append(map_header(len(tree)))
        for key, value in tree.items():
            parts.append(packed(key))
            _add(value, parts, plain)
    elif isinstance(tree, np.ndarray):
        _add_column(tree, parts, plain)
    else:
        parts.append(list_header(len(tree)))
        for value in tree:
            _add(value, parts, plain)


def _add_column(column: NDArray[Any], parts: list[bytes | Entries], plain: bool) -> None:
    if plain and column.ndim == 1:
        tag, dtype = (b"\xca", ">f4") if column.dtype == np.float32 else (b"\xcb", ">f8")
        parts += [tag, _bytes_of(column.astype(dtype))]
        return
    head: dict[bytes, Any] = {b"nd": column.ndim > 1, b"type": column.dtype.str}
    if column.ndim > 1:
        head |= {b"kind": b"", b"shape": list(column.shape[1:])}
    body = b"".join(packed(key) + packed(value) for key, value in head.items())
    data = _bytes_of(column)
    parts += [map_header(len(head) + 1) + body + packed(b"data") + _bin_header(data.shape[1]), data]


def _bin_header(size: int) -> bytes:
    if size < 1 << 8:
        return b"\xc4" + struct.pack(">B", size)
    return b"\xc5" + struct.pack(">H", size) if size < 1 << 16 else b"\xc6" + struct.pack(">I", size)


def _bytes_of(column: NDArray[Any]) -> Entries:
    column = np.ascontiguousarray(column)
    return column.reshape(len(column), -1).view(np.uint8).reshape(len(column), -1)
