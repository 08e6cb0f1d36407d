# SPDX-License-Identifier: Apache-2.0
"""msgpack with NumPy arrays in it, as the package msgpack-numpy writes them; nothing is unpickled.

An array is a map with the binary keys ``nd type kind shape data``, a scalar one with ``nd type data``. Lists whose
entries only differ in their numbers, such as the steps of an episode, are read and written as columns without creating
an object for each entry: their bytes repeat with a fixed stride, so that each number of an entry is a strided view.

Source: the formats of msgpack (https://github.com/msgpack/msgpack/blob/master/spec.md) and of msgpack-numpy 0.4.
"""

import contextlib
import math
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack
import numpy as np
from numpy.typing import NDArray

from etude.errors import DataError

# -- the common layout of entries ------------------------------------------------------------------------------------


Path = tuple[str, ...]
MALFORMED = (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, msgpack.UnpackException)
DTYPE: Final = re.compile(r"[<>|=]?(b1|\?|[iu][1248]|f[248])")
"""The supported dtypes: booleans, integers and floats."""
LISTS: Final = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))
MAPS: Final = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))
"""The first bytes of lists and of maps."""
_NESTED: Final = LISTS | MAPS

_NUMBERS: Final = {
    **{0xCC: "u1", 0xCD: ">u2", 0xCE: ">u4", 0xCF: ">u8", 0xD0: "i1", 0xD1: ">i2", 0xD2: ">i4", 0xD3: ">i8"},
    **{0xCA: ">f4", 0xCB: ">f8"},
}
_ONE_BYTE: Final = {
    **dict.fromkeys(range(0x80), ("i1", 0x00, 0x7F)),
    **dict.fromkeys(range(0xE0, 0x100), ("i1", 0xE0, 0xFF)),
    **dict.fromkeys((0xC2, 0xC3), ("?", 0xC2, 0xC3)),
}
"""The values in one byte (small integers, false and true): their dtype, and the range of bytes for values like it."""


class _Other(Exception):
    """An entry contains something other than numbers, so it is read the slow way."""


class Slot(NamedTuple):
    """The position of one number or array in the bytes of an entry."""

    path: Path
    start: int
    size: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None = None
    """The shape of an array; None for a plain number."""
    limits: tuple[int, int] | None = None
    """The least and the largest byte of a value in one byte."""


class Template(NamedTuple):
    """The layout of an entry: the slots, and the constant bytes between them."""

    size: int
    slots: tuple[Slot, ...]
    constants: tuple[tuple[int, bytes], ...]


def template_of(data: bytes, first: int) -> Template | None:
    """Return the template of the entry at ``first``; None if it contains anything but numbers."""
    slots: list[Slot] = []
    try:
        end = _slots(data, first, (), slots)
    except (_Other, *MALFORMED):
        return None
    slots = [slot._replace(start=slot.start - first) for slot in slots]
    if len({slot.path for slot in slots}) != len(slots):
        return None
    edges = [0, *(edge for slot in slots for edge in (slot.start, slot.start + slot.size)), end - first]
    constants = [(a, data[first + a : first + b]) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
    return Template(end - first, tuple(slots), tuple(constants))


def _slots(data: bytes, at: int, path: Path, out: list[Slot]) -> int:
    """Find the numbers of the value at ``at``; returns where it ends."""
    byte = data[at]
    if byte in _ONE_BYTE:
        kind, *limits = _ONE_BYTE[byte]
        out.append(Slot(path, at, 1, np.dtype(kind), limits=(limits[0], limits[1])))
        return at + 1
    if byte in _NUMBERS:
        dtype = np.dtype(_NUMBERS[byte])
        out.append(Slot(path, at + 1, dtype.itemsize, dtype))
        return at + 1 + dtype.itemsize
    if byte & 0xF0 == 0x90:
        at += 1
        for i in range(byte & 0x0F):
            at = _slots(data, at, (*path, str(i)), out)
        return at
    if byte & 0xF0 != 0x80:
        raise _Other
    if byte != 0x80 and data[at + 1 : at + 5] == b"\xc4\x02nd":
        return _array_slot(data, at, path, out)
    at += 1
    for _ in range(byte & 0x0F):
        if data[at] & 0xE0 != 0xA0:
            raise _Other
        start, at = at + 1, at + 1 + (data[at] & 0x1F)
        at = _slots(data, at, (*path, data[start:at].decode()), out)
    return at


def _array_slot(data: bytes, at: int, path: Path, out: list[Slot]) -> int:
    """Find the bytes of an array or scalar, which come last in its map."""
    unpacker = msgpack.Unpacker(raw=False)
    unpacker.feed(data[at : at + 256])
    head = {}
    for _ in range(unpacker.read_map_header() - 1):
        key = unpacker.unpack()
        head[key] = unpacker.unpack()
    if unpacker.unpack() != b"data":
        raise _Other
    at += unpacker.tell()
    width = {0xC4: 1, 0xC5: 2, 0xC6: 4}[data[at]]
    start = at + 1 + width
    size = int.from_bytes(data[at + 1 : start], "big")
    if not size:
        raise _Other
    out.append(Slot(path, start, size, *header_of(head, size)))
    return start + size


def header_of(head: dict[Any, Any], size: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype and shape of an array of ``size`` bytes.

    Raises:
        ValueError: it does not hold plain numbers, or the sizes do not agree.
    """
    kind, name = head.get(b"kind", b""), head.get(b"type")
    if kind not in (b"", "") or not isinstance(name, str) or not DTYPE.fullmatch(name):
        what = "an object array, which would need unpickling" if kind in (b"O", "O") else f"of type {str(name)[:40]!r}"
        raise ValueError(f"an array is {what}; only booleans, integers and floats are read")
    dtype = np.dtype(name)
    shape = head.get(b"shape", []) if head.get(b"nd") else []
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape) or len(shape) > 32:
        raise ValueError(f"an array has the shape {str(shape)[:60]}")
    if math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"an array of shape {shape} and type {name} has {size} bytes")
    return dtype, tuple(shape)


# -- reading ---------------------------------------------------------------------------------------------------------


Columns = dict[Path, NDArray[Any]]


def unpack(data: bytes) -> Any:
    """Decode the document ``data``: plain values, dicts, lists and NumPy arrays.

    Raises:
        DataError: it is not valid msgpack, or contains an object array, which would need unpickling.
    """
    with well_formed():
        return MsgpackReader(data).value()


def decoded(raw: bytes | memoryview) -> Any:
    """Decode a value that a `MsgpackReader` has read, which checks that no size in it exceeds the bytes."""
    return msgpack.unpackb(raw, raw=False, strict_map_key=False, object_hook=_value_of, ext_hook=_refuse)


@contextlib.contextmanager
def well_formed() -> Iterator[None]:
    """Raise a DataError if a document that is read inside the block is invalid."""
    try:
        yield
    except MALFORMED as error:
        text = str(error) or type(error).__name__
        raise DataError(f"not valid msgpack of numbers and arrays ({text[:200]})") from error


class MsgpackReader:
    """Reads a document from beginning to end, inside `well_formed`."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._unpacker = msgpack.Unpacker(
            raw=False, strict_map_key=False, max_buffer_size=max(1, len(data)), object_hook=_value_of, ext_hook=_refuse
        )
        self._unpacker.feed(data)

    @property
    def place(self) -> int:
        """The number of bytes read so far."""
        place: int = self._unpacker.tell()
        return place

    def next_is(self, kinds: Collection[int]) -> bool:
        """Return whether the next value is one of `LISTS` or `MAPS`."""
        return self.data[self.place] in kinds

    def keys(self) -> Iterator[str | int]:
        """Yield the keys of the next value, a map; read the value of each before the next key."""
        for _ in range(self._unpacker.read_map_header()):
            key = self.scalar()
            if not isinstance(key, str | int):
                raise DataError(f"a map has the key {str(key)[:40]!r}, which is neither text nor an integer")
            yield key

    def list_size(self) -> int:
        """Read the header of a list and return its number of entries, which follow."""
        return int(self._unpacker.read_array_header())

    def skip(self) -> None:
        """Skip the next value."""
        self._unpacker.skip()

    def raw(self) -> bytes:
        """Return the undecoded bytes of the next value."""
        start = self.place
        self.skip()
        return self.data[start : self.place]

    def value(self) -> Any:
        """Read the next value."""
        return decoded(self.raw())

    def scalar(self) -> Any:
        """Read the next value; faster than `value` if it is not a list or map."""
        return self.value() if self.next_is(_NESTED) else self._unpacker.unpack()

    def entries(self, template: Template | None = None) -> tuple[Columns | None, Template | None]:
        """Read the next list as columns by path, if its entries have the same layout; else skip it.

        Args:
            template: The layout of entries of an earlier such list; tried first.

        Returns:
            The columns ``[N, ...]`` (the path of a bare number or array is ``()``), and the template that fitted.
        """
        num, first = self.list_size(), self.place
        if num == 0:
            return None, None
        columns = self._fitted(first, num, template) if template else None
        if columns is None:
            template = template_of(self.data, first)
            columns = self._fitted(first, num, template) if template else None
        if columns is not None and template is not None:
            self._unpacker.read_bytes(num * template.size)
            return columns, template
        for _ in range(num):
            self.skip()
        return None, None

    def _fitted(self, first: int, num: int, template: Template) -> Columns | None:
        """The columns, if all entries match the template."""
        if first + num * template.size > len(self.data):
            return None
        entries = np.frombuffer(self.data, np.uint8, num * template.size, first).reshape(num, template.size)
        for start, constant in template.constants:
            if not (entries[:, start : start + len(constant)] == np.frombuffer(constant, np.uint8)).all():
                return None
        columns: Columns = {}
        for slot in template.slots:
            values = np.ascontiguousarray(entries[:, slot.start : slot.start + slot.size])
            if slot.limits is not None and ((values < slot.limits[0]) | (values > slot.limits[1])).any():
                return None
            if slot.dtype.kind == "b" and slot.shape is None:
                columns[slot.path] = (values == 0xC3).reshape(num)
            else:
                own = values.view(slot.dtype).reshape(num, *(slot.shape or ()))
                columns[slot.path] = _native(own, plain=slot.shape is None)
        return columns


def _native(values: NDArray[Any], *, plain: bool) -> NDArray[Any]:
    """Convert to native byte order; plain msgpack integers become int64, or uint64 if they may need it."""
    if plain and values.dtype.kind in "iu":
        return values.astype(np.uint64 if values.dtype.itemsize == 8 and values.dtype.kind == "u" else np.int64)
    return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))


def _value_of(value: dict[Any, Any]) -> Any:
    """Return a map, or the array or scalar that it stands for."""
    if b"nd" not in value:
        if b"complex" in value:
            raise ValueError("it holds a complex number")
        return value
    raw = value.get(b"data")
    if not isinstance(raw, bytes):
        raise ValueError("an array has no bytes")
    dtype, shape = header_of(value, len(raw))
    array = _native(np.frombuffer(raw, dtype).reshape(shape), plain=False)
    return array[()] if not value[b"nd"] else array


def _refuse(code: int, data: bytes) -> Any:
    raise ValueError(f"it holds an extension value of type {code}")


# -- writing ---------------------------------------------------------------------------------------------------------


_PACKER: Final = msgpack.Packer()

Entries: TypeAlias = NDArray[np.uint8]
"""``[rows, bytes]``: the bytes of each entry."""
Tree: TypeAlias = "NDArray[Any] | Mapping[str, Tree] | Sequence[Tree]"
"""Nested columns with the same number of rows: a mapping becomes a map in each entry, a sequence a list."""


def packed(value: Any) -> bytes:
    """Pack a plain value, or a NumPy scalar, as msgpack."""
    if isinstance(value, np.generic):
        value = {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}
    out: bytes = msgpack.packb(value)
    return out


def entries(tree: Tree, *, plain: bool = False) -> Entries:
    """Pack columns as entries.

    Args:
        tree: The columns, each ``[rows, ...]``, of booleans, integers or floats.
        plain: Pack scalars, which must be floats, as msgpack's own; by default as NumPy scalars, which keep their
            dtype.
    """
    parts: list[bytes | Entries] = []
    _add(tree, parts, plain)
    rows = next(len(part) for part in parts if not isinstance(part, bytes))
    arrays = [np.broadcast_to(np.frombuffer(p, np.uint8), (rows, len(p))) if isinstance(p, bytes) else p for p in parts]
    return np.concatenate(arrays, axis=1)


def list_of(rows: Entries) -> bytes:
    """Pack entries as a list."""
    return list_header(len(rows)) + rows.tobytes()


def list_header(size: int) -> bytes:
    """The bytes before the entries of a list."""
    header: bytes = _PACKER.pack_array_header(size)
    return header


def map_header(size: int) -> bytes:
    """The bytes before the keys and values of a map."""
    header: bytes = _PACKER.pack_map_header(size)
    return header


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
