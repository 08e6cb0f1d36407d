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
    except RecursionError as error:  # what is as deep can't be shown either
        raise DataError("a space can't be read: it holds spaces in spaces too deep") from error
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError, OverflowError, IndexError) as error:
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


def map_of(space: Space) -> dict[str, Any]:
    """The map that RLlib writes for a space: the inverse of `space_of`.

    Raises:
        DataError: RLlib has no map for it: a MultiDiscrete whose numbers do not begin at 0.
    """
    if isinstance(space, spaces.Box):
        low, high = _text_of(space.low), _text_of(space.high)
        return {"space": "box", "low": low, "high": high, "shape": list(space.shape), "dtype": space.dtype.str}
    if isinstance(space, spaces.Discrete):
        return {"space": "discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        if space.start.any():
            raise DataError(f"RLlib's recordings can't hold {space}: the numbers of a MultiDiscrete begin at 0 there")
        return {"space": "multi-discrete", "nvec": _text_of(space.nvec), "dtype": space.dtype.str}
    if isinstance(space, spaces.MultiBinary):
        return {"space": "multi-binary", "n": space.n if isinstance(space.n, int) else list(space.shape)}
    if isinstance(space, spaces.Tuple):
        return {"space": "tuple", "spaces": [map_of(part) for part in space.spaces]}
    if isinstance(space, spaces.Dict):
        return {"space": "dict", "spaces": {str(key): map_of(part) for key, part in space.spaces.items()}}
    raise DataError(f"RLlib's recordings can't hold a {type(space).__name__} space")


def _text_of(array: NDArray[Any]) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(zlib.compress(file.getvalue())).decode()
