# SPDX-License-Identifier: Apache-2.0
"""Rendering: envs with a render mode, frames as uint8 ``[H, W, 3]``, and clips as gif, mp4 and webm files."""

import contextlib
import functools
import inspect
import io
import os
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, TypeAlias

import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from etude.envs.registry import EnvLike, env_name, make_one, make_spec, named
from etude.errors import DataError, EnvError, EtudeError, SettingsError, described, how_to_install
from etude.files import publish

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

RenderMode = Literal["rgb_array", "human"]

DEFAULT_FPS = 30.0

Frame: TypeAlias = NDArray[np.uint8]
"""uint8 ``[H, W, 3]``, red, green and blue."""

Size: TypeAlias = str | tuple[int, int]
"""Width and height in pixels: ``"480x320"`` or ``(480, 320)``."""

MediaLike: TypeAlias = "NDArray[Any] | Sequence[NDArray[Any]] | Figure"
"""A frame ``[H, W]``, ``[H, W, C]`` or ``[C, H, W]``; a list of frames or ``[T, H, W, C]``; or a matplotlib figure."""

_MOST_PIXELS = 8192  # width or height
_CHANNELS = (1, 3, 4)


# -- envs that draw themselves -----------------------------------------------------------------------------------------


def rendering_env(env: EnvLike, mode: RenderMode) -> Any:
    """Make one env object that renders in ``mode``, or check ``env`` if it is an object.

    Args:
        env: As for training. Functions that make envs are called with ``render_mode=mode`` if they accept it.
        mode: ``rgb_array``: render() returns frames. ``human``: the env shows its own window.

    Raises:
        EnvError: the env can't be made, or does not render in this mode; the message says what to do.
    """
    name = env_name(env)
    made = env if not callable(env) and not isinstance(env, str) else _made(env, name, mode)
    if isinstance(made, VectorEnv) or not all(callable(getattr(made, m, None)) for m in ("reset", "step", "render")):
        raise EnvError(
            f"{name} is a {type(made).__name__}, which can't be shown: give one env with reset, step and render, or a "
            "function that makes one, as env=."
        )
    has = getattr(made, "render_mode", None)
    if has != mode:
        if made is not env:
            close_env(made)
        modes = (getattr(made, "metadata", None) or {}).get("render_modes") or []
        raise EnvError(
            f"{name} has render_mode {has!r}, but {mode!r} is needed here (it knows {', '.join(modes) or 'none'}): "
            f"make it with render_mode={mode!r}, or let the function that makes it accept `render_mode`."
        )
    return made


def close_env(env: Any) -> None:
    """Close an env, if it can be closed."""
    if callable(close := getattr(env, "close", None)):
        close()


def _made(env: str | Callable[..., Any], name: str, mode: RenderMode) -> Any:
    make: Any = named(env) if isinstance(env, str) else env
    if isinstance(make, EnvSpec):
        make = functools.partial(make_spec, make)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="gymnasium")  # its warnings about render modes; ours say more
        return make_one(functools.partial(make, render_mode=mode) if _takes_mode(make) else make, name)


def _takes_mode(make: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # built-in classes
        return False
    return any(p.name == "render_mode" or p.kind is p.VAR_KEYWORD for p in parameters)


def open_window(env: Any) -> None:
    """Reset an env made with ``render_mode='human'``, so that it opens its window.

    Raises:
        EnvError: the window can't be opened.
    """
    try:
        env.reset()
    except Exception as error:
        raise EnvError(f"the env's window can't be opened: {described(error)}") from error


def fps_of(env: Any) -> float:
    """The frames per second at which an env moves at natural speed; 30 if it does not say."""
    fps = (getattr(env, "metadata", None) or {}).get("render_fps")
    return float(fps) if fps else DEFAULT_FPS


# -- frames ------------------------------------------------------------------------------------------------------------


def standard_frame(frame: Any) -> Frame:
    """A frame in any form that envs use, as new contiguous uint8 ``[H, W, 3]``.

    Args:
        frame: ``[H, W]``; or channel-last or channel-first with 1 (grey), 3 or 4 (transparency is ignored) channels.
            Integers are 0..255, booleans black and white; floats are 0..1 if none is above 1, otherwise 0..255.

    Raises:
        EnvError: it is not a frame; the message says what it is.
    """
    if frame is None:
        raise EnvError("render() gave None instead of a frame: make the env with render_mode='rgb_array'.")
    try:
        array = np.asarray(frame)
    except ValueError:  # lists of different lengths
        array = np.empty(0, object)
    shape = array.shape
    if array.ndim == 2:
        array = array[..., None]
    elif array.ndim == 3 and shape[2] not in _CHANNELS:
        array = array.transpose(1, 2, 0)
    if array.dtype.kind not in "biuf" or array.size == 0 or array.ndim != 3 or array.shape[2] not in _CHANNELS:
        raise EnvError(
            f"render() gave {type(frame).__name__} of shape {shape}, not a frame of numbers: [H, W], [H, W, C] or "
            "[C, H, W] with C = 1, 3 or 4."
        )
    return _bytes(np.broadcast_to(array, (*array.shape[:2], 3)) if array.shape[2] == 1 else array[..., :3])


def _bytes(array: NDArray[Any]) -> Frame:
    """A frame as new contiguous uint8."""
    if array.dtype == np.uint8:
        return np.array(array, order="C")
    if array.dtype == np.bool_:
        return array.astype(np.uint8, order="C") * np.uint8(255)
    low, high = array.min(), array.max()  # NaN if there is any
    if not (low >= 0 and high <= 255):
        raise EnvError(f"render() gave a frame of {array.dtype} from {low} to {high}: give 0..255, or 0..1 for floats.")
    if array.dtype.kind == "f":
        array = np.rint(array * 255 if high <= 1 else array)
    return array.astype(np.uint8, order="C")


def parse_size(size: Size | None) -> tuple[int, int] | None:
    """Width and height in pixels.

    Raises:
        SettingsError: it is not two whole numbers from 1 to 8192.
    """
    if size is None:
        return None
    with contextlib.suppress(TypeError, ValueError):
        width, height = map(int, size.lower().split("x")) if isinstance(size, str) else size
        if all(isinstance(side, int) and 1 <= side <= _MOST_PIXELS for side in (width, height)):
            return width, height
    raise SettingsError(
        f"`size` is {size!r}, but must be width and height in pixels, each 1 to {_MOST_PIXELS}, such as 480x320."
    )


def resized(frame: Frame, size: tuple[int, int]) -> Frame:
    """The whole frame, scaled to fit into ``size`` (width, height) without distortion, on black."""
    from PIL import Image, ImageOps

    picture = Image.fromarray(frame)
    # BOX averages when it shrinks and keeps pixels sharp when it enlarges: frames are often pixel art.
    return frame if picture.size == size else np.asarray(ImageOps.pad(picture, size, Image.Resampling.BOX))


@contextlib.contextmanager
def filmed(env: Any, take: Callable[[Frame, bool], None], size: tuple[int, int] | None = None) -> Iterator[None]:
    """A context that passes on a frame after every reset and step of ``env``.

    An episode has one frame more than steps. An episode that ends before its first step has none.

    Args:
        env: Any object with ``reset``, ``step`` and ``render``, such as a Gymnasium, PettingZoo or multi-agent env.
            These methods are replaced on the object, so that its class stays the same.
        take: Called with each frame, and whether it begins an episode.
        size: Width and height of the frames in pixels; None: as rendered.
    """
    reset, step, render = env.reset, env.step, env.render
    before = {name: vars(env)[name] for name in ("reset", "step") if name in vars(env)}
    first: list[Frame] = []  # that of the last reset, until a step follows
    failures: list[EtudeError] = []
    shape: tuple[int, ...] | None = None

    def drawn() -> Frame:
        nonlocal shape
        try:
            frame = standard_frame(render())
        except EtudeError:
            raise
        except Exception as error:
            raise EnvError(f"the env can't be drawn: render() fails with {described(error)}") from error
        if size is not None:
            return resized(frame, size)
        if shape not in (None, frame.shape):
            was, now = (f"{each[1]}x{each[0]}" for each in (shape or (0, 0), frame.shape))
            raise EnvError(f"render() gave a frame of {now} pixels after one of {was}: give one `size` for all frames.")
        shape = frame.shape
        return frame

    def film(*, begins: bool) -> None:
        try:
            frame = drawn()
            if begins:
                first[:] = [frame]
                return
            while first:
                take(first.pop(), True)
            take(frame, False)
        except EtudeError as error:
            failures.append(error)
            raise

    def reset_and_film(*args: Any, **kwargs: Any) -> Any:
        shown = reset(*args, **kwargs)
        film(begins=True)
        return shown

    def step_and_film(action: Any) -> Any:
        brought = step(action)
        if action is not None:  # None is how PettingZoo removes an agent that has ended: nothing moves
            film(begins=False)
        return brought

    env.reset, env.step = reset_and_film, step_and_film
    try:
        yield
    except EtudeError as error:
        if not failures or failures[0] is error:
            raise
        raise failures[0] from None  # the arena has reported it as the env's failure
    finally:
        del env.reset, env.step
        vars(env).update(before)


# -- files -------------------------------------------------------------------------------------------------------------

_LEAST_DELAY: Final = 2  # hundredths of a second; browsers play GIFs with less ten times slower
_CODECS = {
    ".mp4": ["-c:v", "libx264", "-crf", "20", "-movflags", "+faststart", "-f", "mp4"],
    ".webm": ["-c:v", "libvpx-vp9", "-crf", "30", "-b:v", "0", "-row-mt", "1", "-cpu-used", "4", "-f", "webm"],
}
# Both need even sides, and the colour encoding in the file so that all players show true colours.
_PICTURE = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2,scale=out_color_matrix=bt709:out_range=tv,format=yuv420p"]
_COLOURS = ["-color_range", "tv", "-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709"]


class ClipFile:
    """A video file, written in a ``with`` block. It appears complete or not at all.

    The file at ``path`` is replaced once everything is written; it stays as it is if the block ends by an error or
    without a frame. All frames must have one shape. Odd sides gain a black row or column in mp4 and webm.

    Args:
        path: Ends in .mp4 (H.264), .webm (VP9) or .gif. Its folder is created.
        fps: Frames per second; a gif shows at most 50.

    Attributes:
        fps: The frames per second of the file.

    Raises:
        SettingsError: ``path`` has another suffix, or the encoder is not installed.
        DataError: the file can't be written.
    """

    def __init__(self, path: str | os.PathLike[str], fps: float) -> None:
        self.path = Path(path)
        self.num_frames = 0
        check_fps(fps)
        check_path(self.path)
        self.fps = min(fps, 100 / _LEAST_DELAY) if self.path.suffix.lower() == ".gif" else fps
        self._aside = self.path.with_name(f".{self.path.name}.tmp")
        self._stack = contextlib.ExitStack()
        self._append: Callable[[Frame], None] | None = None  # the encoder's, from the first frame on

    def __enter__(self) -> "ClipFile":
        return self

    def write(self, frame: Frame) -> None:
        """Append a frame, uint8 ``[H, W, 3]``."""
        try:
            if self._append is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                is_gif = self.path.suffix.lower() == ".gif"
                encoder = _gif(self._aside, self.fps) if is_gif else self._video(frame)
                self._append = self._stack.enter_context(encoder)
            self._append(frame)
        except OSError as error:
            raise self._failed(error) from error
        self.num_frames += 1

    def _video(self, frame: Frame) -> contextlib.AbstractContextManager[Callable[[Frame], None]]:
        height, width = frame.shape[:2]
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{self.fps:.6f}"]
        codec = _CODECS[self.path.suffix.lower()]
        return _ffmpeg([*source, "-i", "pipe:0", *_PICTURE, *_COLOURS, *codec, f"file:{self._aside}"])

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if self._append is None:
            return
        try:
            self._stack.__exit__(kind, *error)
            if kind is None:
                publish(self._aside, self.path)
        except OSError as fault:
            raise self._failed(fault) from fault
        finally:
            with contextlib.suppress(OSError):
                self._aside.unlink()  # gone already if it was published

    def _failed(self, error: OSError) -> DataError:
        return DataError(f"can't write the clip {self.path}: {error.strerror or error}.")


@contextlib.contextmanager
def _gif(path: Path, fps: float) -> Iterator[Callable[[Frame], None]]:
    """An encoder: a context that gives a function for appending frames, and completes the file if no error ends it.

    It keeps the frames, one byte per pixel, until the clip is complete, because Pillow writes a GIF in one call.
    """
    path.touch()  # fails early if the path can't be written
    frames: list[Image] = []
    yield lambda frame: frames.append(_with_palette(frame))
    with open(path, "wb") as file:
        _save_gif(file, frames, fps)


@contextlib.contextmanager
def _ffmpeg(arguments: list[str]) -> Iterator[Callable[[Frame], None]]:
    """An encoder that pipes raw frames to an ffmpeg process, which ends with the pipe, even if this one is killed."""
    command = [ffmpeg(), "-loglevel", "error", "-nostdin", "-y", *arguments]
    with tempfile.TemporaryFile() as log:  # not a pipe, which could fill up
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # Ctrl-C goes only to this process, which then decides about the file
            )
        except OSError as error:
            raise SettingsError(f"ffmpeg can't be started: {command[0]}: {error.strerror or error}.") from error
        pipe = process.stdin
        assert pipe is not None

        def check() -> None:
            if process.wait() != 0:
                log.seek(0)
                said = log.read().decode(errors="replace").strip() or f"exit code {process.returncode}"
                raise OSError(f"ffmpeg failed: {said[-500:]}")

        def append(frame: Frame) -> None:
            try:
                pipe.write(frame.data)
            except BrokenPipeError:
                check()
                raise

        try:
            yield append
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
            check()
        finally:
            process.kill()  # does nothing to one that has ended
            process.wait()
            with contextlib.suppress(OSError):
                pipe.close()


def _with_palette(frame: Frame) -> "Image":
    """The frame with a palette of its own of up to 256 colours: exact if it has no more, otherwise the best ones."""
    from PIL import Image

    return Image.fromarray(frame).quantize(256, dither=Image.Dither.NONE)


def _save_gif(file: BinaryIO, frames: "list[Image]", fps: float) -> None:
    """Write an endlessly repeating GIF. Consecutive equal frames become one with their total duration.

    A GIF's times are in hundredths of a second, and it shows at most 50 frames per second.
    """
    milliseconds, shown = [], 0
    for count in range(1, len(frames) + 1):
        delay = max(_LEAST_DELAY, round(100 * count / fps) - shown)
        shown += delay
        milliseconds.append(10 * delay)
    first, *rest = frames
    first.save(file, "gif", save_all=True, append_images=rest, duration=milliseconds, loop=0, optimize=False)


def encoded(media: MediaLike, fps: float) -> bytes:
    """Encode a frame or figure as PNG, or several frames as GIF.

    Raises:
        DataError: ``media`` is none of these.
    """
    from PIL import Image

    file = io.BytesIO()
    if hasattr(media, "savefig"):
        media.savefig(file, format="png")
        return file.getvalue()
    try:
        if not isinstance(media, list | tuple) and np.ndim(media) != 4:
            Image.fromarray(standard_frame(media)).save(file, "png")
            return file.getvalue()
        frames = [standard_frame(frame) for frame in media]
    except EnvError as error:
        raise DataError(str(error).replace("render() gave", "it is", 1)) from error
    shapes = sorted({frame.shape for frame in frames})
    if len(shapes) != 1:
        raise DataError(f"its frames have the shapes {shapes}: give one or more of the same shape.")
    _save_gif(file, [_with_palette(frame) for frame in frames], fps)
    return file.getvalue()


def check_path(path: Path) -> None:
    """Raise a SettingsError if no clip can be written to ``path``."""
    kind = path.suffix.lower()
    if kind != ".gif" and kind not in _CODECS:
        raise SettingsError(f"a clip can't be written to {path}: its name must end in .mp4, .webm or .gif.")
    if path.is_dir():
        raise SettingsError(f"a clip can't be written to {path}, which is a folder: give a file in it.")
    if kind != ".gif":
        ffmpeg()


def check_fps(fps: float) -> None:
    """Raise a SettingsError if ``fps`` is not between 0.01 and 1000."""
    if not (isinstance(fps, int | float | np.number) and 0.01 <= fps <= 1000):
        raise SettingsError(f"`fps` is {fps!r}, but must be between 0.01 and 1000 frames a second.")


def ffmpeg() -> str:
    """The path of the ffmpeg that comes with imageio-ffmpeg, or that the variable IMAGEIO_FFMPEG_EXE names.

    Raises:
        SettingsError: there is none.
    """
    try:
        import imageio_ffmpeg

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError) as error:
        raise SettingsError(
            f"mp4 and webm need ffmpeg ({error}): {how_to_install('video')}. A .gif can be written without it."
        ) from error
