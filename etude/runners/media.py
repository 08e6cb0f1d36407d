# SPDX-License-Identifier: Apache-2.0
"""Media: frames and figures that callbacks log, as the bytes of a PNG or a GIF."""

import io
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.envs.render import standard_frame, write_gif
from etude.errors import DataError, EnvError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

MediaLike: TypeAlias = "NDArray[Any] | Sequence[NDArray[Any]] | Figure"
"""A frame, ``[H, W]``, ``[H, W, C]`` or ``[C, H, W]``; frames, a list of them or ``[T, H, W, C]``; or a figure of
matplotlib's."""


def encoded(media: MediaLike, fps: float) -> bytes:
    """A PNG of a frame or a figure, a GIF of frames.

    Raises:
        DataError: it is none of these.
    """
    if hasattr(media, "savefig"):
        return _png_of_figure(media)
    try:
        if isinstance(media, list | tuple) or np.ndim(media) == 4:
            return _gif([standard_frame(frame) for frame in media], fps)
        return _png(standard_frame(media))
    except EnvError as error:
        raise DataError(str(error).replace("render() gave", "it is", 1)) from error


def _png_of_figure(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _png(frame: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(frame).save(file, "png")
    return file.getvalue()


def _gif(frames: list[NDArray[np.uint8]], fps: float) -> bytes:
    shapes = sorted({frame.shape for frame in frames})
    if len(shapes) != 1:
        raise DataError(f"its frames have the shapes {shapes}: give one or more of the same shape.")
    file = io.BytesIO()
    write_gif(file, frames, fps)
    return file.getvalue()
