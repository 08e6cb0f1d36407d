# SPDX-License-Identifier: Apache-2.0
"""Where metrics go: JSON lines and TensorBoard; and the way back from JSON lines.

All sinks take one (nested) mapping of numbers at a time. Neither TensorFlow nor torch is imported.
"""

import json
import math
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from etude.atomic import write_atomically
from etude.errors import DataError
from etude.metrics.events import histogram_of, image_of, write_record


class JSONLines:
    """A file with one JSON object a line, readable at any time; an existing one is continued.

    Standard JSON has no NaN: it is written as null. Infinities are written as ``1e999`` and ``-1e999``, which read back
    as infinities.

    Raises:
        DataError: the file can't be made, or not be written to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with named_errors(f"metrics to {self.path}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _mend_tail(self.path)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append one line and hand it to the system at once: if the process dies, the line is there."""
        line = _to_json(metrics).encode() + b"\n"
        with named_errors(f"metrics to {self.path}"):
            self._file.write(line)

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._file.close()


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a file that `JSONLines` wrote, oldest first. A torn last line (a killed writer) is left out.

    Raises:
        DataError: there is no such file, or a line before the last is not a JSON object.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"can't read the metrics {path}: {error.strerror or error}.") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = _parse(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            shown = line[:60].decode(errors="replace")
            raise DataError(f"{path}, line {number} is not a JSON object: {shown!r}. Remove the line and try again.")
    return rows


def cut_jsonl(path: str | os.PathLike[str], iteration: int) -> None:
    """Remove the lines whose ``iteration`` is after ``iteration``, at one stroke, before a run goes on from there.

    What a run did after its last checkpoint, and before it was killed, will be done and written again.

    Raises:
        DataError: the file can't be read or replaced.
    """
    path = Path(path)
    with named_errors(f"metrics to {path}"):
        if not path.exists():
            return
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if not _is_after(line, iteration)]
        if len(kept) < len(lines):
            write_atomically(path, b"".join(kept))


def _is_after(line: bytes, iteration: int) -> bool:
    at = (_parse(line) or {}).get("iteration")
    return isinstance(at, int | float) and at > iteration


@contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Let a `DataError` say what couldn't be written where the system refuses."""
    try:
        yield
    except OSError as error:
        raise DataError(f"can't write {what}: {error.strerror or error}.") from error


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _mend_tail(path: Path) -> None:
    """Make a file end with a whole line: what a killed writer left torn is taken off."""
    if not path.exists():
        return
    data = path.read_bytes()
    torn = data[data.rfind(b"\n") + 1 :]
    if torn:
        with open(path, "r+b") as file:
            if _parse(torn) is None:
                file.truncate(len(data) - len(torn))
            else:
                file.seek(0, os.SEEK_END)
                file.write(b"\n")


def _to_json(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(k))}: {_to_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_to_json, value)) + "]"
    if not isinstance(value, str | int | float | bool | None) and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "null" if math.isnan(value) else f"{math.copysign(1, value):.0f}e999"
    return json.dumps(value)


class TensorBoard:
    """An event file for TensorBoard in ``folder``: a scalar for each number, nested ones as ``losses/policy``.

    A thread of its own encodes and writes, and each event is in the file soon after `write`. What is not a number is
    left out; `video`, `image` and `histogram` record other things. A failed write is raised by the next one, or by
    `close`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        folder = Path(folder)
        with named_errors(f"TensorBoard events to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        stamp = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self.path = folder / f"events.out.tfevents.{stamp}"
        self._queue: queue.Queue[_Event | None] = queue.Queue(maxsize=1024)
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(
            target=_write_events, args=(self.path, self._queue, self._errors), name="etude-tensorboard", daemon=True
        )
        self._thread.start()
        self._finish = weakref.finalize(self, _finish, self._queue, self._thread)

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record the numbers of ``metrics`` at ``step`` (env steps, or updates offline).

        Raises:
            DataError: an earlier write failed, on a full disk for instance.
        """
        self._put(step, dict(scalars(metrics)))

    def video(self, tag: str, gif: str | os.PathLike[str], step: int) -> None:
        """Record a clip at ``step`` (as for `write`), which TensorBoard shows among the images.

        Args:
            tag: What it is called there.
            gif: The file, as `etude.clip` writes it; it may go once this returns.

        Raises:
            DataError: it can't be read or is no GIF, or an earlier write failed.
        """
        try:
            data = Path(gif).read_bytes()
        except OSError as error:
            raise DataError(f"can't read the clip {gif}: {error.strerror or error}.") from error
        if data[:4] != b"GIF8" or len(data) < 10:
            raise DataError(f"{gif} is no GIF, and TensorBoard shows no other clips: write it with the ending .gif.")
        self._put(step, {tag: data})

    def image(self, tag: str, data: bytes, step: int) -> None:
        """Record a picture or clip, the bytes of a PNG or GIF, at ``step``.

        Raises:
            DataError: it is neither, or an earlier write failed.
        """
        if data[:4] not in (b"GIF8", b"\x89PNG") or len(data) < 24:
            raise DataError(f"the image {tag!r} is neither PNG nor GIF.")
        self._put(step, {tag: data})

    def histogram(self, tag: str, values: ArrayLike, step: int) -> None:
        """Record how numbers, none of them NaN or infinite, are spread, at ``step``; nothing where there are none."""
        numbers = np.asarray(values, np.float64).reshape(-1)
        if len(numbers):
            self._put(step, {tag: histogram_of(numbers)})

    def _put(self, step: int, values: Mapping[str, "_Value"]) -> None:
        self._check()
        if not self._finish.alive:
            raise ValueError(f"{self.path} is closed.")
        self._queue.put((time.time(), int(step), values))

    def close(self) -> None:
        """Write what is still waiting and close the file; a second time does nothing."""
        self._finish()
        self._check()

    def _check(self) -> None:
        if self._errors:
            error = self._errors.pop()
            raise DataError(f"can't write TensorBoard events to {self.path}: {error}.") from error


_Value: TypeAlias = float | bytes | dict[str, Any]
"""A number, an image, or the fields of a histogram."""

_Event: TypeAlias = tuple[float, int, Mapping[str, _Value]]
"""Wall time in seconds, step, values by tag."""


def scalars(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a nested mapping, with names such as ``losses/policy``; all else is left out."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif not isinstance(value, str | bytes) and hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0:
            yield f"{prefix}{name}", float(value)


def _finish(events: "queue.Queue[_Event | None]", thread: threading.Thread) -> None:
    events.put(None)
    thread.join()


def _write_events(path: Path, events: "queue.Queue[_Event | None]", errors: list[BaseException]) -> None:
    try:
        from tensorboard.compat.proto.event_pb2 import Event

        with open(path, "wb") as file:
            write_record(file, Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
            while (item := events.get()) is not None:
                wall_time, step, values = item
                event = Event(wall_time=wall_time, step=step)
                for tag, value in values.items():
                    if isinstance(value, bytes):
                        event.summary.value.add(tag=tag, image=image_of(value))
                    elif isinstance(value, dict):
                        event.summary.value.add(tag=tag, histo=value)
                    else:
                        event.summary.value.add(tag=tag, simple_value=value)
                write_record(file, event.SerializeToString())
    except Exception as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
        errors.append(error)
        while events.get() is not None:  # so that no writer ever waits for a place in the queue
            pass
