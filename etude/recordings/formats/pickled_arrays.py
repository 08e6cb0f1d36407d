# SPDX-License-Identifier: Apache-2.0
"""Arrays that RLlib packed as text: base64 of an LZ4 frame of a pickle, decoded without unpickling.

Source of the frame's layout: https://github.com/lz4/lz4/blob/dev/doc/lz4_Frame_format.md.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etude.errors import DataError
from etude.recordings.formats.pickle_machine import unpickle

PACKED: Final = "BCJNG"
"""What every packed text begins with: the magic number of LZ4 frames in base64."""

_MAGIC: Final = b"\x04\x22\x4d\x18"
_MAX_BYTES: Final = 1 << 31
_MAX_RATIO: Final = 255  # no LZ4 block can hold more: one byte stands for 255 at most


def unpack(text: str | bytes) -> Any:
    """The value in packed text: an array, or plain values with arrays in them.

    Raises:
        DataError: it is not base64 of an LZ4 frame of such a pickle.
    """
    try:
        frame = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        shown = text[:24] if isinstance(text, str) else bytes(text[:24]).decode("latin1")
        raise DataError(f"{shown!r} is not a packed array: it is no base64 text ({error})") from error
    return unpickle(decompress(frame))


def decompress(frame: bytes) -> bytes:
    """The content of an LZ4 frame.

    Raises:
        DataError: it is none, it is broken, or it says that it holds more than it can.
    """
    if frame[:4] != _MAGIC or len(frame) < 7:
        raise DataError("it is not a packed array: it holds no LZ4 frame")
    limit = min(_MAX_BYTES, _MAX_RATIO * len(frame))
    try:
        if not frame[4] & 0x08:  # the header does not say how long the content is
            return _streamed(frame, limit)
        size = int.from_bytes(frame[6:14], "little")
        if size > limit:
            raise DataError(f"an LZ4 frame of {len(frame):,} bytes says that it holds {size:,}, which can't be")
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
    """The values of many packed texts. Those that differ only in an array's bytes are decoded at once."""
    values: list[Any] = []
    known: dict[int, tuple[bytes, bytes, NDArray[Any]]] = {}  # by size: what stands around the bytes; an array
    for text in texts:
        try:
            data = decompress(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError, TypeError):
            unpack(text)  # tells what is wrong
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
    """The bytes at ``at`` are those of a BYTEARRAY8 of this size: nothing else in the pickle depends on them."""
    return at >= 9 and data[at - 9 : at] == b"\x96" + size.to_bytes(8, "little")
