# SPDX-License-Identifier: Apache-2.0
"""Events as TensorBoard reads them: images, histograms, and records of a TFRecord file."""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray


def image_of(data: bytes) -> dict[str, Any]:
    """The fields of an image in an event."""
    width, height = struct.unpack("<HH", data[6:10]) if data[:4] == b"GIF8" else struct.unpack(">II", data[16:24])
    return {"width": width, "height": height, "colorspace": 3, "encoded_image_string": data}


def histogram_of(numbers: NDArray[np.float64]) -> dict[str, Any]:
    """The fields of a histogram in an event: 30 equal bins, as many as TensorBoard shows."""
    counts, edges = np.histogram(numbers, bins=30)
    return {
        "min": float(numbers.min()),
        "max": float(numbers.max()),
        "num": float(len(numbers)),
        "sum": float(numbers.sum()),
        "sum_squares": float(np.square(numbers).sum()),
        "bucket_limit": edges[1:].tolist(),
        "bucket": counts.astype(float).tolist(),
    }


def record_of(data: bytes) -> bytes:
    """A record of a TFRecord file: length, its checksum, data, its checksum."""
    length = struct.pack("<Q", len(data))
    return length + masked_crc(length) + data + masked_crc(data)


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC_TABLE = _crc_table()


def masked_crc(data: bytes) -> bytes:
    """CRC-32C (Castagnoli), rotated and shifted as TFRecord asks."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
