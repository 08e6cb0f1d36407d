# SPDX-License-Identifier: Apache-2.0
"""Columns that RLlib packed: pickles of arrays and plain values, either plain or as base64 of LZ4 frames.

Nothing is unpickled by `pickle`, because pickles are programs. `unpickle` has a stack of its own. It supports the
opcodes that plain values and NumPy arrays need, calls only the functions below, which stand for a few names of NumPy,
and refuses everything else by name.

A `pickle.Unpickler` whose ``find_class`` returns only these functions would be faster but less safe, even behind a list
of allowed opcodes. It hashes the keys of a dict before they can be checked, and the process crashes if a key is a tuple
nested a million deep (4 KB in a file). A memo index, or the length of bytes, makes it allocate gigabytes before it
finds that the data is short. Its BUILD changes attributes of whatever is on its stack. Preventing all this takes a
stack like this one anyway. `pickletools.genops` would list the opcodes, but takes longer than everything else.

Sources: the opcodes are described in Python's ``pickletools``; the frame's layout in
https://github.com/lz4/lz4/blob/dev/doc/lz4_Frame_format.md.
"""

import base64
import binascii
import math
import pickletools
import re
import struct
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etude.errors import DataError

PACKED: Final = "BCJNG"
"""The prefix of every packed text: the magic number of LZ4 frames in base64."""

_MAGIC: Final = b"\x04\x22\x4d\x18"
_MAX_BYTES: Final = 1 << 31
_MAX_RATIO: Final = 255  # the limit of LZ4 blocks: one byte stands for at most 255


class _Refused(Exception):
    """The pickle needs something unsupported, which the text names."""


# -- pickles ------------------------------------------------------------------------------------------------------

_MAX_GROWTH: Final = 4
"""The most bytes that calls may create per byte of a pickle. An array's bytes appear in it once, and are copied."""
_VALUES: Final[dict[str, Callable[[bytes], Any]]] = {
    **{"NONE": lambda raw: None, "NEWTRUE": lambda raw: True, "NEWFALSE": lambda raw: False},
    **{"EMPTY_TUPLE": lambda raw: (), "EMPTY_LIST": lambda raw: [], "EMPTY_DICT": lambda raw: {}},
    **dict.fromkeys(("BININT1", "BININT2"), lambda raw: int.from_bytes(raw, "little")),
    **dict.fromkeys(("BININT", "LONG1"), lambda raw: int.from_bytes(raw, "little", signed=True)),
    "BINFLOAT": lambda raw: struct.unpack(">d", raw)[0],
    **dict.fromkeys(
        ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), lambda raw: raw.decode("utf-8", "surrogatepass")
    ),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"), lambda raw: raw),
}
"""Opcodes that push a value made from the bytes that follow them."""
_TAKEN: Final = {
    **{"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2, "STACK_GLOBAL": 2, "POP": 1},
    **{"TUPLE": -1, "APPENDS": -1, "SETITEMS": -1},
}
"""The number of values that an opcode pops; -1 is all since the last mark."""
_OTHERS: Final = ("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "GLOBAL", "REDUCE", "BUILD")
_KNOWN: Final = {*_VALUES, *_TAKEN, *_OTHERS, "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"}
_OPCODES: Final = {
    ord(op.code): (op.name, op.arg.n if op.arg else 0, _VALUES.get(op.name), _TAKEN.get(op.name, 0))
    for op in pickletools.opcodes
    if op.name in _KNOWN
}
"""By code: name, size of the argument (negative: see `_COUNTED`, or lines), function of its value, and `_TAKEN`."""
_COUNTED: Final = {
    **{pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4},
    **{pickletools.TAKEN_FROM_ARGUMENT4U: 4, pickletools.TAKEN_FROM_ARGUMENT8U: 8},
}
"""The size of the number that says how many bytes follow."""


def unpickle(data: bytes) -> Any:
    """Return the value of a pickle of plain values and arrays of numbers.

    Raises:
        DataError: it is broken, or contains anything else, which the message names.
    """
    try:
        return _finished(_read(data))
    except _Refused as error:
        raise DataError(f"a pickle holds {error}; only arrays of numbers and plain values are read") from error
    except (IndexError, ValueError, TypeError, KeyError, OverflowError, RecursionError, struct.error) as error:
        raise DataError(f"a pickle is broken ({type(error).__name__}: {str(error)[:100]})") from error


def _read(data: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    at = size = 0
    """The position in ``data``, and the number of bytes that calls have created."""
    name = ""
    while name != "STOP":
        code, raw = data[at], b""
        at += 1
        if code not in _OPCODES:
            raise _Refused(f"the opcode {chr(code)!r} (0x{code:02x})")
        name, width, make, taken = _OPCODES[code]
        if width:
            if name == "GLOBAL":
                width = data.index(b"\n", data.index(b"\n", at) + 1) + 1 - at
            elif width < 0:
                start = at + _COUNTED[width]
                width, at = int.from_bytes(data[at:start], "little"), start
            if width > len(data) - at:
                raise ValueError("it ends too early")
            raw = data[at : at + width]
            at += width
        if make is not None:
            stack.append(make(raw))
        elif taken:
            start = len(stack) - taken if taken > 0 else marks.pop()
            if not 0 <= start <= len(stack):
                raise ValueError("its stack is empty")
            items = stack[start:]
            del stack[start:]
            if name[0] == "T":
                stack.append(tuple(items))
            elif name == "STACK_GLOBAL":
                stack.append(_named(*items))
            elif name[0] == "S":
                _set_items(stack[-1], items)
            elif name != "POP":
                _append(stack[-1], items)
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            memo[int.from_bytes(raw, "little") if raw else len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(_flat(memo[int.from_bytes(raw, "little")]))
        elif name == "GLOBAL":
            stack.append(_named(*raw.decode("ascii").splitlines()))
        elif name in ("REDUCE", "BUILD"):
            argument = stack.pop()
            if name == "REDUCE":
                stack.append(_called(stack.pop(), argument))
            elif isinstance(stack[-1], _Dtype | _Array):
                stack[-1].build(argument)
            else:
                raise _Refused("the state of an object")
            size += _size(stack[-1])
            if size > _MAX_GROWTH * len(data):
                raise _Refused("more copies of the same bytes than are allowed")
    (value,) = stack
    return value


def _size(value: Any) -> int:
    """The bytes that a call has created."""
    value = value.value if isinstance(value, _Array) else value
    return len(value) if isinstance(value, bytes) else getattr(value, "nbytes", 0)


def _flat(value: Any) -> Any:
    """A memoized value for reuse, if it is small and flat; others, used many times, could grow without limit."""
    if isinstance(value, list | dict) or (
        isinstance(value, tuple) and (len(value) > 64 or any(isinstance(v, tuple | list | dict) for v in value))
    ):
        raise _Refused(f"the same {type(value).__name__} twice")
    return value


def _append(target: Any, items: list[Any]) -> None:
    if not isinstance(target, list):
        raise _Refused("items of something that is not a list")
    target.extend(items)


def _set_items(target: Any, items: list[Any]) -> None:
    if not isinstance(target, dict) or len(items) % 2:
        raise _Refused("items of something that is not a dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str | int | float | bool | None):
            raise _Refused("a dict with keys that are not plain values")
        target[key] = value


def _named(module: Any, name: Any) -> Any:
    found = _NAMES.get((module, name)) if isinstance(module, str) and isinstance(name, str) else None
    if found is None:
        raise _Refused(f"the name `{str(module)[:60]}.{str(name)[:60]}`")
    return found


def _called(function: Any, arguments: Any) -> Any:
    if not isinstance(function, FunctionType) or not isinstance(arguments, tuple):  # only `_NAMES` contains functions
        raise _Refused("a call of something that is not a function")
    return function(*arguments)


def _finished(value: Any) -> Any:
    """Replace placeholders of arrays by the arrays; names are not values."""
    if isinstance(value, list | tuple):
        return type(value)(_finished(v) for v in value)
    if isinstance(value, dict):
        return {key: _finished(v) for key, v in value.items()}
    if isinstance(value, _Array):
        if value.value is None:
            raise _Refused("an array without its bytes")
        return value.value
    if isinstance(value, _Dtype | FunctionType | type):
        raise _Refused("a dtype or function as a value")
    return value


# -- substitutes for NumPy's names ----------------------------------------------------------------------------------

_CODES: Final = re.compile(r"[<>|=]?(?:b1|\?|[iu][1248]|f[248]|[bBhHiIqQefd])")


class _Dtype:
    """A dtype under construction: its code, then its byte order."""

    def __init__(self, code: str) -> None:
        self.code = code

    def build(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise _Refused("the state of an object")
        if any(part is not None for part in state[2:5]):
            raise _Refused("a structured dtype")
        self.code = state[1] + self.code.lstrip("<>|=")


class _Array:
    """An array created by ``_reconstruct``, whose state follows."""

    value: NDArray[Any] | None = None

    def build(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5 or self.value is not None:
            raise _Refused("the state of an object")
        _, shape, dtype, fortran, raw = state
        self.value = _array(raw, dtype, shape, "F" if fortran else "C")


def _array(raw: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> NDArray[Any]:
    """An array over bytes of the file; nothing is allocated until the sizes agree."""
    if order not in ("C", "F") or axes is not None:
        raise _Refused(f"an array in the order {str(order)[:20]!r}")
    if isinstance(raw, np.ndarray) and raw.dtype == np.uint8:
        raw = raw.tobytes()
    if not isinstance(raw, bytes) or not isinstance(dtype, _Dtype):
        raise _Refused("an array that is not made of bytes and a dtype")
    if not isinstance(shape, tuple) or len(shape) > 32 or not all(type(n) is int and n >= 0 for n in shape):
        raise _Refused(f"an array of the shape {str(shape)[:60]}")
    made = np.dtype(dtype.code)
    if math.prod(shape) * made.itemsize != len(raw):
        raise _Refused(f"an array of shape {shape} and type {made} in {len(raw):,} bytes")
    return np.frombuffer(raw, made).reshape(shape, order=order).astype(made.newbyteorder("="), copy=False)


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    if kind is not _Array:
        raise _Refused("an array of a class of its own")
    return _Array()


def _scalar(dtype: Any, raw: Any) -> Any:
    return _array(raw, dtype, (), "C")[()]


def _dtype(code: Any, align: Any = False, copy: Any = True) -> _Dtype:
    if not isinstance(code, str) or not _CODES.fullmatch(code):
        what = "an array of objects" if str(code).lstrip("|") in ("O", "O8") else f"the dtype {str(code)[:40]!r}"
        raise _Refused(what)
    return _Dtype(code)


def _encode(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise _Refused(f"text in the encoding {str(encoding)[:20]!r}")
    return text.encode("latin1")


def _bytes(raw: Any = b"") -> bytes:
    if not isinstance(raw, bytes):
        raise _Refused("bytes that are not made of bytes")
    return raw


_NAMES: Final[dict[tuple[str, str], Any]] = {
    **{(f"numpy.{core}.numeric", "_frombuffer"): _array for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _reconstruct for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    **{("numpy", "ndarray"): _Array, ("numpy", "dtype"): _dtype},
    **{("_codecs", "encode"): _encode, ("collections", "OrderedDict"): lambda: {}},
    # bytes() and bytearray(b"...") of early protocols
    **{(builtins, name): _bytes for builtins in ("builtins", "__builtin__") for name in ("bytes", "bytearray")},
}


# -- packed text ----------------------------------------------------------------------------------------------------


def unpack(text: str | bytes) -> Any:
    """Return the value in packed text: an array, or plain values that contain arrays.

    Raises:
        DataError: it is not base64 of an LZ4 frame of such a pickle.
    """
    try:
        frame = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{text[:24]!r} is not a packed array: it is not base64 text ({error})") from error
    return unpickle(decompress(frame))


def decompress(frame: bytes) -> bytes:
    """Decompress an LZ4 frame.

    Raises:
        DataError: it is not one, it is broken, or it claims more content than possible.
    """
    if frame[:4] != _MAGIC or len(frame) < 7:
        raise DataError("it is not a packed array: it holds no LZ4 frame")
    limit = min(_MAX_BYTES, _MAX_RATIO * len(frame))
    try:
        if not frame[4] & 0x08:  # the header does not contain the length of the content
            return _streamed(frame, limit)
        size = int.from_bytes(frame[6:14], "little")
        if size > limit:
            raise DataError(f"an LZ4 frame of {len(frame):,} bytes claims to hold {size:,}, which is impossible")
        content: bytes = pa.decompress(frame, decompressed_size=size, codec="lz4", asbytes=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"an LZ4 frame can't be decoded ({str(error)[:200]})") from error
    return content


def _streamed(frame: bytes, limit: int) -> bytes:
    with pa.CompressedInputStream(pa.BufferReader(frame), "lz4") as stream:
        content: bytes = stream.read(limit + 1)
    if len(content) > limit:
        raise DataError(f"an LZ4 frame holds more than {limit:,} bytes")
    return content


def unpack_rows(texts: Sequence[str]) -> list[Any]:
    """Unpack many packed texts. Those that only differ in an array's bytes are decoded at once."""
    values: list[Any] = []
    known: dict[int, tuple[bytes, bytes, NDArray[Any]]] = {}  # by size: the bytes around an array, and it
    for text in texts:
        try:
            data = decompress(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError, TypeError):
            unpack(text)  # raises an error that says what is wrong
            raise
        like = known.get(len(data))
        if like is not None and data.startswith(like[0]) and data.endswith(like[1]):
            array = np.frombuffer(data, like[2].dtype, like[2].size, len(like[0]))
            values.append(array.reshape(like[2].shape))
            continue
        value = unpickle(data)
        values.append(value)
        if isinstance(value, np.ndarray) and value.flags.c_contiguous and value.nbytes:
            raw = value.tobytes()
            at = data.find(raw)
            if data.count(raw) == 1 and _is_payload(data, at, len(raw)):
                known[len(data)] = (data[:at], data[at + len(raw) :], value)
    return values


def _is_payload(data: bytes, at: int, size: int) -> bool:
    """Whether the bytes at ``at`` are a BYTEARRAY8 of this size, so that nothing else in the pickle depends on them."""
    return at >= 9 and data[at - 9 : at] == b"\x96" + size.to_bytes(8, "little")
