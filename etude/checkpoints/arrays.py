# SPDX-License-Identifier: Apache-2.0
"""Arrays in a safetensors file: written from where they lie in memory, and read one at a time.

The format (https://huggingface.co/docs/safetensors): the length of the header as 8 bytes, little-endian; the header, a
JSON object of ``{"dtype", "shape", "data_offsets"}`` by name; the arrays' bytes.
"""

import hashlib
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from etude.errors import CheckpointError
from etude.files import AnyPath, put

MANIFEST = "checkpoint.json"
"""The file of a checkpoint that says what else belongs to it."""

_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}
_DTYPES = {name: np.dtype(dtype) for dtype, name in _NAMES.items()}
_METADATA = "__metadata__"
_LONGEST_HEADER = 100_000_000  # as in safetensors' own reader


def write_arrays(path: AnyPath, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Write C-contiguous arrays of native dtypes to a new file; the numbers are not copied on the way.

    Returns:
        What a manifest has to say of the file, for `Arrays`: its ``file`` name, its ``bytes``, the CRC-32 of the length
        and the ``header``, and that of each array, as ``crc32``.
    """
    ordered = sorted(arrays, key=lambda name: -arrays[name].itemsize)  # so that each array is aligned
    buffers = [arrays[name].reshape(-1).view(np.uint8).data for name in ordered]
    header: dict[str, Any] = {}
    end = 0
    for key, buffer in zip(ordered, buffers, strict=True):
        begin, end = end, end + len(buffer)
        shape, dtype = arrays[key].shape, _NAMES[arrays[key].dtype.name]
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    with ThreadPoolExecutor(1) as pool:  # neither summing nor writing holds the lock of the interpreter
        sums = pool.map(zlib.crc32, buffers)
        put(path, [head, *buffers])
        crc32 = dict(zip(ordered, sums, strict=True))
    return {"file": path.name, "bytes": len(head) + end, "header": zlib.crc32(head), "crc32": crc32}


class Arrays(Mapping[str, NDArray[Any]]):
    """The arrays of an open safetensors file, each read, and checked against its checksum, when it is asked for.

    Args:
        file: The file.
        state: What its manifest says of it; see `write_arrays`. Manifests of version 1 have the ``sha256`` of the whole
            file instead of sums of its parts: it is then read and checked at once.
        name: What the file is called in messages.

    Raises:
        CheckpointError: the file is not what the manifest says.
    """

    def __init__(self, file: BinaryIO, state: Mapping[str, Any], name: str) -> None:
        self._file, self._name = file, name
        size = file.seek(0, io.SEEK_END)
        if size != state["bytes"]:
            raise self._broken(f"it has {size:,} bytes, but {MANIFEST} says {state['bytes']:,}")
        file.seek(0)
        self._sums: Mapping[str, int] | None = None if "sha256" in state else state["crc32"]
        if "sha256" in state:
            data = file.read()
            if hashlib.sha256(data).hexdigest() != state["sha256"]:
                raise self._broken("its content does not match its checksum")
            self._file = io.BytesIO(data)
        length = self._file.read(8)
        self._start = 8 + int.from_bytes(length, "little")
        if self._start > min(size, _LONGEST_HEADER):
            raise self._broken("the length of its header is too large")
        text = self._file.read(self._start - 8)
        if self._sums is not None and zlib.crc32(length + text) != state["header"]:
            raise self._broken("its content does not match its checksum")
        try:
            self._entries = {key: _entry(value) for key, value in json.loads(text).items() if key != _METADATA}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._broken(f"its header can't be read ({type(error).__name__}: {error})") from error
        self._size = size - self._start

    def __getitem__(self, name: str) -> NDArray[Any]:
        dtype, shape, begin, end = self._entries[name]
        if not 0 <= begin <= end <= self._size:
            raise self._broken(f"`{name}` lies outside of it")
        array = np.empty(shape, dtype)
        buffer = array.reshape(-1).view(np.uint8).data
        self._file.seek(self._start + begin)
        done = 0
        while done < len(buffer):
            count = self._file.readinto(buffer[done:])  # type: ignore[attr-defined]
            if not count:
                raise self._broken("it ends too early")
            done += count
        if self._sums is not None and zlib.crc32(buffer) != self._sums.get(name):
            raise self._broken("its content does not match its checksum")
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _broken(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._name} is broken: {what}. Restore it from a copy.")


def _entry(value: Mapping[str, Any]) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    dtype, (begin, end) = _DTYPES[value["dtype"]], value["data_offsets"]
    shape = tuple(int(n) for n in value["shape"])
    count = 1
    for n in shape:
        count *= n
    if min(shape, default=0) < 0 or count * dtype.itemsize != int(end) - int(begin):
        raise ValueError("a shape does not fit its bytes")
    return dtype, shape, int(begin), int(end)
