# SPDX-License-Identifier: Apache-2.0
"""Frames to a file, one by one: mp4 and webm through ffmpeg, gif without it."""

import contextlib
import math
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from etude.envs.clip_frames import Frame
from etude.envs.clip_gif import GIFEncoder
from etude.errors import DataError, SettingsError
from etude.files import publish

_CODECS = {
    ".mp4": ["-c:v", "libx264", "-crf", "20", "-movflags", "+faststart", "-f", "mp4"],
    ".webm": ["-c:v", "libvpx-vp9", "-crf", "30", "-b:v", "0", "-row-mt", "1", "-cpu-used", "4", "-f", "webm"],
}
# Both want even sides and, to be shown in true colours everywhere, to be told how colours are written.
_PICTURE = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2,scale=out_color_matrix=bt709:out_range=tv,format=yuv420p"]
_COLOURS = ["-color_range", "tv", "-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709"]


class ClipFile:
    """A video that frames are written to while a ``with`` block lasts. It appears whole, or not at all.

    What is at ``path`` is replaced when all is written, and left alone where the block ends by an error or without a
    frame. Frames of one file have one shape. Sides that are odd gain a black row or column in mp4 and webm.

    Args:
        path: Ends in .mp4 (H.264), .webm (VP9) or .gif; its folder is made.
        fps: Frames a second; a gif shows at most 50.

    Raises:
        SettingsError: the ending is another, or the encoder is not installed.
        DataError: the file can't be written.
    """

    def __init__(self, path: str | os.PathLike[str], fps: float) -> None:
        self.path = Path(path)
        self.fps = fps
        self.num_frames = 0
        check_fps(fps)
        check_path(self.path)
        self._aside = self.path.with_name(f".{self.path.name}.tmp")
        self._encoder: _Encoder | None = None

    def __enter__(self) -> "ClipFile":
        return self

    def write(self, frame: Frame) -> None:
        """Append a frame."""
        try:
            if self._encoder is None:
                self._encoder = self._opened(frame)
            self._encoder.write(frame)
        except OSError as error:
            raise self._failed(error) from error
        self.num_frames += 1

    def _opened(self, frame: Frame) -> "_Encoder":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        height, width = frame.shape[:2]
        if self.path.suffix.lower() == ".gif":
            return _GIFFile(self._aside, self.fps, width, height)
        return _FFmpeg(self._aside, _CODECS[self.path.suffix.lower()], self.fps, width, height)

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        encoder, self._encoder = self._encoder, None
        if encoder is None:
            return
        try:
            if kind is None:
                encoder.finish()
                publish(self._aside, self.path)
        except OSError as fault:
            raise self._failed(fault) from fault
        finally:
            encoder.close()
            with contextlib.suppress(OSError):
                self._aside.unlink()  # gone already where it was published

    def _failed(self, error: OSError) -> DataError:
        return DataError(f"can't write the clip {self.path}: {error.strerror or error}.")


class _Encoder(Protocol):
    """What writes one kind of file."""

    def write(self, frame: Frame) -> None:
        """Append a frame."""

    def finish(self) -> None:
        """Complete the file."""

    def close(self) -> None:
        """Let go of everything, finished or not; never raises."""


class _GIFFile:
    def __init__(self, path: Path, fps: float, width: int, height: int) -> None:
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115 - closed by close()
        self._gif = GIFEncoder(self._file, fps, width, height)

    def write(self, frame: Frame) -> None:
        self._gif.write(frame)

    def finish(self) -> None:
        self._gif.finish()
        self._file.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class _FFmpeg:
    """Raw frames through a pipe to an ffmpeg, which ends with the pipe: also where this process is killed."""

    def __init__(self, path: Path, codec: list[str], fps: float, width: int, height: int) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close(); a pipe that nobody reads could fill up
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{fps:.6f}", "-i", "pipe:0"]
        command = [ffmpeg(), "-loglevel", "error", "-nostdin", "-y", *source, *_PICTURE, *_COLOURS, *codec]
        try:
            self._process = subprocess.Popen(
                [*command, f"file:{path}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C is for this process, which then decides about the file
            )
        except OSError as error:
            self._log.close()
            raise SettingsError(f"ffmpeg can't be started: {command[0]}: {error.strerror or error}.") from error

    def write(self, frame: Frame) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(frame.data)
        except BrokenPipeError:
            self._process.wait()
            raise self._error() from None

    def finish(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if self._process.wait() != 0:
            raise self._error()

    def _error(self) -> OSError:
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip() or f"exit code {self._process.returncode}"
        return OSError(f"ffmpeg failed: {said[-500:]}")

    def close(self) -> None:
        self._process.kill()  # does nothing to one that has ended
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._log.close()


def check_path(path: Path) -> None:
    """Raise a SettingsError where no clip can be written to a file of that name."""
    kind = path.suffix.lower()
    if kind != ".gif" and kind not in _CODECS:
        raise SettingsError(f"a clip can't be written to {path}: its name must end in .mp4, .webm or .gif.")
    if path.is_dir():
        raise SettingsError(f"a clip can't be written to {path}, which is a folder: give a file in it.")
    if kind != ".gif":
        ffmpeg()


def check_fps(fps: float) -> None:
    """Raise a SettingsError where ``fps`` is no rate."""
    if not (math.isfinite(fps) and 0.01 <= fps <= 1000):
        raise SettingsError(f"`fps` is {fps}, but must be between 0.01 and 1000 frames a second.")


def ffmpeg() -> str:
    """The ffmpeg that comes with imageio-ffmpeg, or that its variable IMAGEIO_FFMPEG_EXE names.

    Raises:
        SettingsError: there is none.
    """
    try:
        import imageio_ffmpeg

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError) as error:
        raise SettingsError(
            f"mp4 and webm need ffmpeg ({error}): pip install 'etude[video]'. A .gif can be written without it."
        ) from error
