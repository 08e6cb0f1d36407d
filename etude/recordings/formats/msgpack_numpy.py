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
from collections.abc import Iterator, Mapping, Sequence
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

_INTS: Final = {0xCC: "u1", 0xCD: ">u2", 0xCE: ">u4", 0xCF: ">u8", 0xD0: "i1", 0xD1: ">i2", 0xD2: ">i4", 0xD3: ">i8"}
_FLOATS: Final = {0xCA: ">f4", 0xCB: ">f8"}
_NUMBERS: Final = _INTS | _FLOATS


class _Other(Exception):
    """An entry contains something other than numbers, so it is read the slow way."""


class Slot(NamedTuple):
    """The position of one number or array in the bytes of an entry."""

    path: Path
    start: int
    size: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    kind: str
    """``fix`` and ``negfix`` are integers in one byte; ``bool`` the bytes of false and true; ``plain`` a number with a
    tag; ``data`` the bytes of an array."""


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
    if byte <= 0x7F or byte >= 0xE0:
        out.append(Slot(path, at, 1, np.dtype("i1"), (), "fix" if byte <= 0x7F else "negfix"))
        return at + 1
    if byte in (0xC2, 0xC3):
        out.append(Slot(path, at, 1, np.dtype("u1"), (), "bool"))
        return at + 1
    if byte in _NUMBERS:
        dtype = np.dtype(_NUMBERS[byte])
        out.append(Slot(path, at + 1, dtype.itemsize, dtype, (), "plain"))
        return at + 1 + dtype.itemsize
    if byte & 0xF0 == 0x90:
        at += 1
        for i in range(byte & 0x0F):
            at = _slots(data, at, (*path, str(i)), out)
        return at
    if byte & 0xF0 == 0x80:
        return _map_slots(data, at, path, out)
    raise _Other


def _map_slots(data: bytes, at: int, path: Path, out: list[Slot]) -> int:
    size, start = data[at] & 0x0F, at
    at += 1
    if size and data[at : at + 4] == b"\xc4\x02nd":
        return _array_slot(data, start, path, out)
    for _ in range(size):
        length = data[at] & 0x1F
        if data[at] & 0xE0 != 0xA0:
            raise _Other
        key = data[at + 1 : at + 1 + length].decode()
        at = _slots(data, at + 1 + length, (*path, key), out)
    return at


def _array_slot(data: bytes, at: int, path: Path, out: list[Slot]) -> int:
    """Find the bytes of an array or scalar, which come last in its map."""
    unpacker = msgpack.Unpacker(raw=False)
    unpacker.feed(data[at : at + 256])
    head, key = {}, None
    for _ in range(unpacker.read_map_header()):
        key = unpacker.unpack()
        if key == b"data":
            break
        head[key] = unpacker.unpack()
    at += unpacker.tell()
    tags = {0xC4: 1, 0xC5: 2, 0xC6: 4}
    if key != b"data" or len(head) != (data[at - unpacker.tell()] & 0x0F) - 1 or data[at] not in tags:
        raise _Other
    width = tags[data[at]]
    size = int.from_bytes(data[at + 1 : at + 1 + width], "big")
    dtype, shape = header_of(head, size)
    if not size:
        raise _Other
    out.append(Slot(path, at + 1 + width, size, dtype, shape, "data"))
    return at + 1 + width + size


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
    """Decode the bytes of a value that a `MsgpackReader` has read, and so found that bytes back every size in it."""
    return msgpack.unpackb(raw, raw=False, strict_map_key=False, object_hook=_value_of, ext_hook=_refuse)


@contextlib.contextmanager
def well_formed() -> Iterator[None]:
    """Raise a DataError if a document that is read inside is invalid."""
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

    def raw(self) -> bytes:
        """Return the undecoded bytes of the next value."""
        start = self.place
        self.skip()
        return self.data[start : self.place]

    def next_is_list(self) -> bool:
        """Return whether the next value is a list."""
        byte = self._peek()
        return 0x90 <= byte <= 0x9F or byte in (0xDC, 0xDD)

    def next_is_map(self) -> bool:
        """Return whether the next value is a map."""
        byte = self._peek()
        return 0x80 <= byte <= 0x8F or byte in (0xDE, 0xDF)

    def _peek(self) -> int:
        if self.place >= len(self.data):
            raise DataError("the document ends too early")
        return self.data[self.place]

    def map_size(self) -> int:
        """Read the header of a map and return its number of entries; their keys and values follow."""
        return int(self._unpacker.read_map_header())

    def list_size(self) -> int:
        """Read the header of a list and return its number of entries, which follow."""
        return int(self._unpacker.read_array_header())

    def key(self) -> str | int:
        """Read the next value as a key of a map."""
        at = self._unpacker.tell()
        is_short_text = at < len(self.data) and self.data[at] & 0xE0 == 0xA0
        value = self._unpacker.unpack() if is_short_text else self.scalar()
        if not isinstance(value, str | int):
            raise DataError(f"a map has the key {str(value)[:40]!r}, which is neither text nor an integer")
        return value

    def scalar(self) -> Any:
        """Read the next value, which may be a map only if that stands for a number."""
        at = self._unpacker.tell()
        if at < len(self.data) and (0x80 <= self.data[at] <= 0x9F or 0xDC <= self.data[at] <= 0xDF):
            return self.value()
        return self._unpacker.unpack()

    def skip(self) -> None:
        """Skip the next value."""
        self._unpacker.skip()

    def value(self) -> Any:
        """Read the next value."""
        return decoded(self.raw())

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
            if slot.kind == "bool":
                if not ((values == 0xC2) | (values == 0xC3)).all():
                    return None
                columns[slot.path] = (values == 0xC3).reshape(num)
                continue
            if (slot.kind == "fix" and (values > 0x7F).any()) or (slot.kind == "negfix" and (values < 0xE0).any()):
                return None
            columns[slot.path] = _native(values.view(slot.dtype).reshape(num, *slot.shape), slot.kind != "data")
        return columns


def _native(values: NDArray[Any], plain: bool) -> NDArray[Any]:
    """Convert to native byte order; plain msgpack integers have no size of their own and become int64."""
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
    array = _native(np.frombuffer(raw, dtype).reshape(shape), False)
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
    out = np.empty((rows, sum(len(p) if isinstance(p, bytes) else p.shape[1] for p in parts)), np.uint8)
    at = 0
    for part in parts:
        size = len(part) if isinstance(part, bytes) else part.shape[1]
        out[:, at : at + size] = np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part
        at += size
    return out


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
