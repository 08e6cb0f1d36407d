# SPDX-License-Identifier: Apache-2.0
"""Frames of clips: whatever an env draws, as uint8 ``[H, W, 3]``; and a camera that takes one after every step."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.errors import EnvError, EtudeError, SettingsError, described

Frame: TypeAlias = NDArray[np.uint8]
"""uint8 ``[H, W, 3]``, red, green and blue."""

Size: TypeAlias = str | tuple[int, int]
"""Width and height in pixels: ``"480x320"`` or ``(480, 320)``."""

_MOST_PIXELS = 8192  # to a side


def standard_frame(frame: Any) -> Frame:
    """A frame of its own, whatever form an env gave it in.

    Args:
        frame: ``[H, W]``; or channel-last or channel-first with 1 (grey), 3 or 4 (transparency is ignored) channels.
            Integers and booleans stand for 0..255 and black and white; floats for 0..1 where none is above 1, else for
            0..255.

    Raises:
        EnvError: it is no such thing; the message says what it is.
    """
    if frame is None:
        raise EnvError("render() gave None, where a frame was expected: make the env with render_mode='rgb_array'.")
    if isinstance(frame, list | tuple) and any(isinstance(part, np.ndarray) and part.ndim > 1 for part in frame):
        raise EnvError(f"render() gave {len(frame)} frames, not one: make the env with render_mode='rgb_array'.")
    try:
        array = np.asarray(frame)
    except ValueError as error:
        raise EnvError(f"render() gave what is no array of pixels: {error}") from error
    if array.dtype.kind not in "biuf":
        raise EnvError(
            f"render() gave a {type(frame).__name__}, not an array of pixels: it must be numbers, [H, W, 3]."
        )
    return _bytes(_channel_last(array))


def _channel_last(array: NDArray[Any]) -> NDArray[Any]:
    """``[H, W, 3]``, by views."""
    shape = array.shape
    if array.size == 0:
        raise EnvError(f"render() gave an empty frame, of shape {shape}.")
    if array.ndim == 2:
        array = array[..., None]
    elif array.ndim == 3 and shape[2] not in (1, 3, 4) and shape[0] in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4):
        raise EnvError(
            f"render() gave a frame of shape {shape}: it must be [H, W], [H, W, C] or [C, H, W], C = 1, 3, 4."
        )
    return np.broadcast_to(array, (*array.shape[:2], 3)) if array.shape[2] == 1 else array[..., :3]


def _bytes(array: NDArray[Any]) -> Frame:
    """As new contiguous uint8."""
    if array.dtype == np.uint8:
        return np.array(array, order="C")
    if array.dtype == np.bool_:
        return array.astype(np.uint8, order="C") * np.uint8(255)
    low, high = array.min(), array.max()  # NaN where there is any
    if not (low >= 0 and high <= 255):
        raise EnvError(f"render() gave a frame of {array.dtype} from {low} to {high}: give 0..255, or 0..1 for floats.")
    if array.dtype.kind == "f":
        array = np.rint(array * 255 if high <= 1 else array)
    return array.astype(np.uint8, order="C")


def parse_size(size: Size | None) -> tuple[int, int] | None:
    """Width and height.

    Raises:
        SettingsError: it is not two whole numbers from 1 to 8192.
    """
    if size is None:
        return None
    sides = re.fullmatch(r"(\d{1,9})x(\d{1,9})", size.strip().lower()) if isinstance(size, str) else None
    found = tuple(map(int, sides.groups())) if sides else size
    if (
        isinstance(found, tuple | list)
        and len(found) == 2
        and all(isinstance(side, int) and 1 <= side <= _MOST_PIXELS for side in found)
    ):
        return found[0], found[1]
    raise SettingsError(
        f"`size` is {size!r}, but must be width and height in pixels, each 1 to {_MOST_PIXELS}, such as 480x320."
    )


def resized(frame: Frame, size: tuple[int, int]) -> Frame:
    """The whole frame, as large as it can be in ``size`` (width, height) without being distorted; the rest is black."""
    from PIL import Image

    height, width = frame.shape[:2]
    if (width, height) == size:
        return frame
    scale = min(size[0] / width, size[1] / height)
    inner = (max(1, min(size[0], round(width * scale))), max(1, min(size[1], round(height * scale))))
    # BOX averages where it shrinks, and keeps pixels sharp where it enlarges: frames are often pixel art.
    picture = np.asarray(Image.fromarray(frame).resize(inner, Image.Resampling.BOX))
    left, top = (size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2
    out = np.zeros((size[1], size[0], 3), np.uint8)
    out[top : top + inner[1], left : left + inner[0]] = picture
    return out


@contextmanager
def filmed(env: Any, take: Callable[[Frame, bool], None], size: tuple[int, int] | None = None) -> Iterator[None]:
    """Hand out a frame after every reset and step of ``env`` while a ``with`` block lasts.

    An episode has one frame more than steps. One that is begun but makes no step has none.

    Args:
        env: Whatever has ``reset``, ``step`` and ``render``: a Gymnasium or PettingZoo env, or one for many agents.
            These methods are replaced on the object, so that its class, by which others know it, stays.
        take: Gets each frame, and whether it begins an episode.
        size: Width and height of the frames; as drawn where None.
    """
    camera = _Camera(env, take, size)
    before = {name: vars(env)[name] for name in ("reset", "step") if name in vars(env)}
    env.reset, env.step = camera.reset, camera.step
    try:
        yield
    except EtudeError as error:
        if camera.failure is None or camera.failure is error:
            raise
        raise camera.failure from None  # whoever stepped the env took it for the env's
    finally:
        del env.reset, env.step
        vars(env).update(before)


class _Camera:
    """Stands in for an env's ``reset`` and ``step``."""

    def __init__(self, env: Any, take: Callable[[Frame, bool], None], size: tuple[int, int] | None) -> None:
        self._reset, self._step, self._render = env.reset, env.step, env.render
        self._take = take
        self._size = size
        self._shape: tuple[int, ...] | None = None
        self._first: Frame | None = None
        self.failure: EtudeError | None = None

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        shown = self._reset(*args, **kwargs)
        with self._noted():
            self._first = self._frame()
        return shown

    def step(self, action: Any) -> Any:
        brought = self._step(action)
        if action is None:  # PettingZoo's way to take an agent out that has ended: nothing moves
            return brought
        with self._noted():
            frame = self._frame()
            if self._first is not None:
                self._take(self._first, True)
                self._first = None
            self._take(frame, False)
        return brought

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except EtudeError as error:
            self.failure = error
            raise

    def _frame(self) -> Frame:
        try:
            drawn = self._render()
        except EtudeError:
            raise
        except Exception as error:
            raise EnvError(f"the env can't be drawn: render() fails with {described(error)}") from error
        frame = standard_frame(drawn)
        if self._size is not None:
            return resized(frame, self._size)
        if self._shape not in (None, frame.shape):
            was, now = (f"{shape[1]}x{shape[0]}" for shape in (self._shape or (0, 0), frame.shape))
            raise EnvError(
                f"render() gave a frame of {now} pixels after one of {was}: say with `size` which all should have."
            )
        self._shape = frame.shape
        return frame
