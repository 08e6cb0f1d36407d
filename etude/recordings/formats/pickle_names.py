# SPDX-License-Identifier: Apache-2.0
"""What may be named in a pickle of arrays, and what a call of it gives; nothing of NumPy is called by a pickle."""

import math
import re
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_DTYPE: Final = re.compile(r"[<>|=]?(?:b1|\?|[iu][1248]|f[248]|[bBhHiIqQefd])")


class Refused(Exception):
    """What the pickle asks for is not given; the text says what."""


class Symbol(str):
    """A name in a pickle that may stand there."""


_ARRAY_OF_BYTES: Final = Symbol("_frombuffer")
_RECONSTRUCT: Final = Symbol("_reconstruct")
_SCALAR: Final = Symbol("scalar")
_NDARRAY: Final = Symbol("ndarray")
_DTYPE_OF: Final = Symbol("dtype")
_ENCODE: Final = Symbol("encode")
_ORDERED: Final = Symbol("OrderedDict")
_BYTES: Final = Symbol("bytes")

NAMES: Final = {
    **{("numpy" + core, name): symbol for core in (".core.numeric", "._core.numeric")
       for name, symbol in (("_frombuffer", _ARRAY_OF_BYTES),)},
    **{("numpy" + core, name): symbol for core in (".core.multiarray", "._core.multiarray")
       for name, symbol in (("_reconstruct", _RECONSTRUCT), ("scalar", _SCALAR))},
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _DTYPE_OF,
    ("_codecs", "encode"): _ENCODE,
    ("collections", "OrderedDict"): _ORDERED,
    ("builtins", "bytes"): _BYTES,  # bytes() and bytearray(b"...") of early protocols
    ("builtins", "bytearray"): _BYTES,
    ("__builtin__", "bytes"): _BYTES,
    ("__builtin__", "bytearray"): _BYTES,
}  # fmt: skip


class Dtype:
    """A dtype in the making: its code, then its byte order."""

    def __init__(self, code: str) -> None:
        self.code = code

    def made(self) -> np.dtype[Any]:
        """The dtype itself."""
        return np.dtype(self.code)


class Array:
    """An array that ``_reconstruct`` began and whose state follows."""

    value: NDArray[Any] | None = None


def _call_frombuffer(raw: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> NDArray[Any]:
    if order not in ("C", "F") or axes is not None:
        raise Refused(f"an array in the order {str(order)[:20]!r}")
    return array_of(raw, dtype, shape, order)


def _call_reconstruct(kind: Any, shape: Any, code: Any) -> Array:
    if kind is not _NDARRAY:
        raise Refused("an array of a class of its own")
    return Array()


def _call_scalar(dtype: Any, raw: Any) -> Any:
    return array_of(raw, dtype, (), "C")[()]


def _call_dtype(code: Any, align: Any = False, copy: Any = True) -> Dtype:
    if not isinstance(code, str) or not _DTYPE.fullmatch(code):
        what = "an array of objects" if str(code).lstrip("|") in ("O", "O8") else f"the dtype {str(code)[:40]!r}"
        raise Refused(what)
    return Dtype(code)


def _call_encode(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise Refused(f"text in the encoding {str(encoding)[:20]!r}")
    return text.encode("latin1")


def _call_ordered() -> dict[Any, Any]:
    return {}


def _call_bytes(raw: Any = b"") -> bytes:
    if not isinstance(raw, bytes):
        raise Refused("bytes that are not made of bytes")
    return raw


CALLS: Final[dict[Symbol, Callable[..., Any]]] = {
    _ARRAY_OF_BYTES: _call_frombuffer,
    _RECONSTRUCT: _call_reconstruct,
    _SCALAR: _call_scalar,
    _DTYPE_OF: _call_dtype,
    _ENCODE: _call_encode,
    _ORDERED: _call_ordered,
    _BYTES: _call_bytes,
}


def array_of(raw: Any, dtype: Any, shape: Any, order: str) -> NDArray[Any]:
    """An array over bytes of the file; nothing is allocated before the sizes agree."""
    if isinstance(raw, np.ndarray) and raw.dtype == np.uint8:
        raw = raw.tobytes()
    if not isinstance(raw, bytes) or not isinstance(dtype, Dtype):
        raise Refused("an array that is not made of bytes and a dtype")
    if not isinstance(shape, tuple) or len(shape) > 32 or not all(type(n) is int and n >= 0 for n in shape):
        raise Refused(f"an array of the shape {str(shape)[:60]}")
    made = dtype.made()
    if math.prod(shape) * made.itemsize != len(raw):
        raise Refused(f"an array of shape {shape} and type {made} in {len(raw):,} bytes")
    array = np.frombuffer(raw, made).reshape(shape, order="F" if order == "F" else "C")
    return array.astype(made.newbyteorder("="), copy=False)
