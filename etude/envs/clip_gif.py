# SPDX-License-Identifier: Apache-2.0
"""Frames to GIF, one by one: nothing is held but the frame before."""

import struct
from typing import BinaryIO

import numpy as np

from etude.envs.clip_frames import Frame

_LEAST_DELAY = 2  # hundredths of a second; browsers show what asks for less ten times slower
_LEAVE = 1  # the next frame is drawn over this one


class GIFEncoder:
    """Writes an endlessly repeated GIF to ``file``. Of each frame, only the rectangle that changed is kept.

    Every rectangle has up to 256 colours of its own: all of them where there are no more, else the best ones.

    Args:
        file: Where to write.
        fps: Frames a second; a GIF counts in hundredths of a second, and shows at most 50 frames in one.
        width: Of the frames, in pixels.
        height: Likewise.
    """

    def __init__(self, file: BinaryIO, fps: float, width: int, height: int) -> None:
        self._file = file
        self._fps = fps
        self._before: Frame | None = None
        self._count = 0
        self._shown = 0  # hundredths of a second until now
        screen = struct.pack("<HHBBB", width, height, 0, 0, 0)
        file.write(b"GIF89a" + screen + b"\x21\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00")

    def write(self, frame: Frame) -> None:
        """Append a frame."""
        from PIL import Image
        from PIL.GifImagePlugin import getdata

        left, top, right, bottom = _changed(self._before, frame)
        part = Image.fromarray(frame[top:bottom, left:right]).quantize(256, dither=Image.Dither.NONE)
        self._count += 1
        delay = max(_LEAST_DELAY, round(100 * self._count / self._fps) - self._shown)
        self._shown += delay
        chunks = getdata(part, (left, top), duration=10 * delay, disposal=_LEAVE, include_color_table=True)
        self._file.write(b"".join(chunks))
        self._before = frame

    def finish(self) -> None:
        """Write the end; the file stays open."""
        self._file.write(b";")


def _changed(before: Frame | None, frame: Frame) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of what is new; one pixel where nothing is."""
    height, width = frame.shape[:2]
    if before is None:
        return 0, 0, width, height
    differs = (before != frame).any(axis=2)
    rows, columns = np.flatnonzero(differs.any(axis=1)), np.flatnonzero(differs.any(axis=0))
    if not len(rows):
        return 0, 0, 1, 1
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
