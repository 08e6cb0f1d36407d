# SPDX-License-Identifier: Apache-2.0
"""What the entries of a list in msgpack have in common: where their numbers lie, and the bytes between them."""

import math
import re
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np

Path = tuple[str, ...]
MALFORMED = (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, msgpack.UnpackException)
DTYPE: Final = re.compile(r"[<>|=]?(b1|\?|[iu][1248]|f[248])")
"""The dtypes that are read: booleans, integers and floats."""

_INTS: Final = {0xCC: "u1", 0xCD: ">u2", 0xCE: ">u4", 0xCF: ">u8", 0xD0: "i1", 0xD1: ">i2", 0xD2: ">i4", 0xD3: ">i8"}
_FLOATS: Final = {0xCA: ">f4", 0xCB: ">f8"}
_NUMBERS: Final = _INTS | _FLOATS


class _Other(Exception):
    """An entry holds something that is no number: it is read the slow way."""


class Slot(NamedTuple):
    """Where one number or array lies in the bytes of an entry."""

    path: Path
    start: int
    size: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    kind: str
    """``fix`` and ``negfix``: integers in one byte; ``bool``: the bytes of false and true; else ``data``."""


class Template(NamedTuple):
    """The bytes of an entry: the slots, and the constant bytes between them."""

    size: int
    slots: tuple[Slot, ...]
    constants: tuple[tuple[int, bytes], ...]


def template_of(data: bytes, first: int) -> Template | None:
    """The template of the entry that begins at ``first``; None where it holds anything but numbers."""
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
    """The map of an array or scalar, the bytes of which come last in it."""
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
    """The dtype and shape of an array of ``size`` bytes.

    Raises:
        ValueError: it is not of plain numbers, or the sizes do not agree.
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
