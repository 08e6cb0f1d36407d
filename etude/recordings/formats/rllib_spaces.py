# SPDX-License-Identifier: Apache-2.0
"""The space maps inside RLlib's episodes; their arrays are ``.npy`` files, compressed with zlib, as base64 text."""

import base64
import io
import math
import zlib
from typing import Any, Final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude.errors import DataError
from etude.recordings.formats.msgpack_templates import DTYPE
from etude.spaces import Space

_MAX_BYTES: Final = 1 << 28
"""The most that the bounds of one space may take in memory."""


def space_of(data: Any) -> Space:
    """The space that an RLlib space map describes.

    Raises:
        DataError: it is of a kind that Etude does not know, or is broken.
    """
    try:
        return _space_of(data)
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        AssertionError,
        OverflowError,
        IndexError,
        RecursionError,
    ) as error:
        raise DataError(f"a space can't be read: {str(data)[:100]} ({type(error).__name__}: {error})") from error


def _space_of(data: Any) -> Space:
    kind = data["space"]
    if kind == "box":
        shape, dtype = tuple(data["shape"]), _dtype_of(data["dtype"])
        low, high = (np.broadcast_to(_array_of(data[side]), shape).astype(dtype) for side in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "discrete":
        return spaces.Discrete(int(data["n"]), start=int(data.get("start") or 0))
    if kind == "multi-discrete":
        dtype = _dtype_of(data.get("dtype", "<i8"))
        return spaces.MultiDiscrete(_array_of(data["nvec"]).astype(dtype), dtype.type)
    if kind == "multi-binary":
        n = data["n"]
        return spaces.MultiBinary(n if isinstance(n, int) else [int(i) for i in n])
    if kind == "tuple":
        return spaces.Tuple([_space_of(part) for part in data["spaces"]])
    if kind == "dict":
        return spaces.Dict([(key, _space_of(part)) for key, part in data["spaces"].items()])
    raise DataError(
        f"a space is of the kind {str(kind)[:40]!r}; Etude reads box, discrete, multi-discrete, "
        "multi-binary, tuple and dict"
    )


def _dtype_of(name: Any) -> np.dtype[Any]:
    if not isinstance(name, str) or not DTYPE.fullmatch(name):
        raise ValueError(f"its dtype is {str(name)[:40]!r}")
    return np.dtype(name).newbyteorder("=")


def _array_of(text: Any) -> NDArray[Any]:
    """The array in an array string; plain lists and numbers are taken as they are."""
    if not isinstance(text, str):
        array = np.asarray(text)
    else:
        try:
            unzip = zlib.decompressobj()
            raw = unzip.decompress(base64.b64decode(text, validate=True), _MAX_BYTES)
        except zlib.error as error:
            raise ValueError(f"its bounds are not zlib data ({error})") from error
        if unzip.unconsumed_tail:
            raise ValueError(f"its bounds take more than {_MAX_BYTES:,} bytes")
        array = _npy(raw)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"its bounds are of type {array.dtype}")
    return array


def _npy(raw: bytes) -> NDArray[Any]:
    """A ``.npy`` file; its shape is checked against its bytes before any memory is taken."""
    file = io.BytesIO(raw)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.kind not in "biuf" or math.prod(shape) * dtype.itemsize != len(raw) - file.tell():
        raise ValueError(f"its bounds say shape {shape} of {dtype}, which is not what their bytes hold")
    return np.frombuffer(raw, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")
