# SPDX-License-Identifier: Apache-2.0
"""Where metrics go: JSON lines and TensorBoard; and the way back from JSON lines.

All sinks take one (nested) mapping of numbers at a time. Neither TensorFlow nor torch is imported.

Where a sink can't write, the first call that notices raises a `DataError`. Later writes are tried again, and those that
fail are counted; `close` raises again and says how many. A full disk thus loses what did not fit, and nothing else.
"""

import errno
import json
import math
import os
import queue
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from etude.errors import DataError
from etude.files import write_atomically
from etude.metrics.events import histogram_of, image_of, record_of

_PATIENCE = 10.0  # seconds to wait for a disk that takes nothing


class Failures:
    """The failed writes of a sink: the first one is raised once, and all are counted for `raise_at_close`.

    Args:
        what: What could not be written, and where to, such as ``metrics to run/metrics.jsonl``.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.count = 0
        self._first: BaseException | None = None
        self._is_raised = False

    def add(self, error: BaseException, count: int = 1) -> None:
        """Count ``count`` failed writes."""
        self._first = self._first or error
        self.count += count

    def close(self, file: "AppendFile") -> None:
        """Close a file; where the system refuses, as over a network, what it took before may be lost."""
        try:
            file.close()
        except OSError as error:
            self.add(error)

    def raise_once(self) -> None:
        """Raise a `DataError` for the first failed write, where that was not done yet."""
        if self._first is not None and not self._is_raised:
            self._is_raised = True
            raise DataError(
                f"can't write {self.what}: {_reason(self._first)}. Later writes are tried all the same, and those "
                "that fail are counted."
            ) from self._first

    def raise_at_close(self) -> None:
        """Raise a `DataError` that says how many writes failed, where any did."""
        if self._first is not None:
            writes = "a write is" if self.count == 1 else f"{self.count:,} writes are"
            raise DataError(f"{writes} missing of {self.what}: {_reason(self._first)}.") from self._first

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Count what fails within it, and raise it if it is the first."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised, unless it is the same trouble again
            self.add(error)
            self.raise_once()


def _reason(error: BaseException) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return text.rstrip(".")


class AppendFile:
    """A file that whole records are appended to, each handed to the system at once.

    A record that can't be written in full is removed again, so that the records before and after it can be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def append(self, data: bytes) -> None:
        """Write ``data`` at the end, whole or not at all.

        Raises:
            OSError: it can't be written, or the file was deleted or replaced since it was opened.
        """
        now = os.fstat(self._fd)
        with suppress(FileNotFoundError, NotADirectoryError):
            there = os.stat(self.path)
            if (there.st_dev, there.st_ino) == (now.st_dev, now.st_ino):
                self._append(data, now.st_size)
                return
        raise FileNotFoundError(errno.ENOENT, "the file was deleted or replaced while it was written")

    def _append(self, data: bytes, end: int) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except BaseException:
            with suppress(OSError):
                os.ftruncate(self._fd, end)
            raise

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class JSONLines:
    """A file with one JSON object a line, readable at any time; an existing one is continued.

    Standard JSON has no NaN: it is written as null. Infinities are written as ``1e999`` and ``-1e999``, which read back
    as infinities.

    Raises:
        DataError: the file can't be made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._failures = Failures(f"metrics to {self.path}")
        with named_errors(self._failures.what):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _mend_tail(self.path)
            self._file: AppendFile | None = AppendFile(self.path)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append one line and hand it to the system at once: if the process dies, the line is there.

        Raises:
            DataError: this is the first line that can't be written.
        """
        if self._file is None:
            raise ValueError(f"{self.path} is closed.")
        with self._failures.noted():
            self._file.append(_to_json(metrics).encode() + b"\n")

    def close(self) -> None:
        """Close the file; a second time does nothing.

        Raises:
            DataError: some lines could not be written.
        """
        if self._file is not None:
            file, self._file = self._file, None
            self._failures.close(file)
            self._failures.raise_at_close()


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
    if not path.is_file():  # such as /dev/stdout
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
    left out; `video`, `image` and `histogram` record other things. The first write that fails is raised by the next
    call, and all by `close`. Calls never wait longer than 10 seconds for a disk that hangs, and then leave events out.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        folder = Path(folder)
        self._failures = Failures(f"TensorBoard events to {folder}")
        with named_errors(self._failures.what):
            folder.mkdir(parents=True, exist_ok=True)
        stamp = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self.path = folder / f"events.out.tfevents.{stamp}"
        self._queue: queue.Queue[_Event | None] = queue.Queue(maxsize=1024)
        self._patience = _PATIENCE
        work = (self.path, self._queue, self._failures)
        self._thread = threading.Thread(target=_write_events, args=work, name="etude-tensorboard", daemon=True)
        self._thread.start()
        self._forgotten = weakref.finalize(self, _finish_forgotten, self._queue, self._thread, self._failures)

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record the numbers of ``metrics`` at ``step`` (env steps, or updates offline).

        Raises:
            DataError: an earlier write failed, on a full disk for instance, and this was not raised yet; or a value
                can't be made a number.
        """
        values: dict[str, float] = {}
        with self._failures.noted():
            values = dict(scalars(metrics))
        self._put(step, values)

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
        if not self._forgotten.alive:
            raise ValueError(f"{self.path} is closed.")
        try:
            if not self._thread.is_alive():
                raise queue.Full
            self._queue.put((time.time(), int(step), values), timeout=self._patience)
            self._patience = _PATIENCE
        except queue.Full:
            self._patience = 0.0  # until there is room again, nobody waits a second time
            self._failures.add(TimeoutError(errno.ETIMEDOUT, "earlier events were still waiting to be written"))
        self._failures.raise_once()

    def close(self) -> None:
        """Write what is still waiting and close the file; a second time does nothing.

        Raises:
            DataError: some events could not be written.
        """
        if self._forgotten.detach() is not None:
            _finish(self._queue, self._thread, self._failures)
            self._failures.raise_at_close()


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


def _finish(events: "queue.Queue[_Event | None]", thread: threading.Thread, failures: Failures) -> None:
    """Wait until all events are written, for as long as this gets on."""
    is_told, before = False, -1
    while thread.is_alive() and events.qsize() != before:
        before = events.qsize()
        with suppress(queue.Full):
            if not is_told:
                events.put(None, timeout=_PATIENCE)
                is_told = True
        thread.join(_PATIENCE)
    left = events.qsize() - is_told + thread.is_alive()  # the mark of the end is in the queue, one event is not
    if thread.is_alive() or events.qsize():
        failures.add(TimeoutError(errno.ETIMEDOUT, "the events were still waiting to be written"), max(left, 1))


def _finish_forgotten(events: "queue.Queue[_Event | None]", thread: threading.Thread, failures: Failures) -> None:
    """Do what `TensorBoard.close` does where nobody called it."""
    _finish(events, thread, failures)
    try:
        failures.raise_at_close()
    except DataError as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=1)


def _write_events(path: Path, events: "queue.Queue[_Event | None]", failures: Failures) -> None:
    file: AppendFile | None = None
    head = b""
    while (item := events.get()) is not None:
        try:
            if file is None:
                file, head = AppendFile(path), _record(time.time(), file_version="brain.Event:2")
            file.append(head + _record(*item))
            head = b""
        except BaseException as error:  # noqa: BLE001 - raised by the caller; this thread must go on to empty the queue
            failures.add(error)
    if file is not None:
        failures.close(file)


def _record(wall_time: float, step: int = 0, values: "Mapping[str, _Value] | None" = None, **fields: Any) -> bytes:
    """An event as the record of an event file."""
    from tensorboard.compat.proto.event_pb2 import Event

    event = Event(wall_time=wall_time, step=step, **fields)
    for tag, value in (values or {}).items():
        if isinstance(value, bytes):
            event.summary.value.add(tag=tag, image=image_of(value))
        elif isinstance(value, dict):
            event.summary.value.add(tag=tag, histo=value)
        else:
            event.summary.value.add(tag=tag, simple_value=value)
    return record_of(event.SerializeToString())
