# SPDX-License-Identifier: Apache-2.0
"""Writers of metrics: JSON lines, CSV, TensorBoard, Weights & Biases and MLflow; and a reader of JSON lines.

A sink takes one mapping of numbers at a time, which may be nested. Neither TensorFlow nor torch is imported; the
packages of trackers are imported when they are first used.

If a sink can't write, the first failed write raises a `DataError`. Later writes are still tried, and failures are
counted; `close` raises again with their number. So a full disk loses only the writes that did not fit.
"""

import csv
import errno
import importlib
import io
import json
import math
import os
import re
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from etude.errors import DataError, SettingsError, how_to_install
from etude.files import write_atomically

_BATCH = 1000  # metrics per request, the maximum of MLflow's REST API


class Sink:
    """Base class of writers: raises an error at the first failed write, counts all failures, and reports them on close.

    Args:
        what: What is written where, such as ``metrics to run/metrics.jsonl``; for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_open = True
        self._error: Exception | None = None
        self._num_failed = 0

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Count errors in a ``with`` block, and raise a `DataError` for the first."""
        if not self._is_open:
            raise ValueError(f"the sink of {self._what} is closed.")
        try:
            yield
        except Exception as error:
            self._note(error)
            if self._num_failed == 1:
                raise DataError(
                    f"can't write {self._what}: {_reason(error)}. Later writes are still tried, and failures are "
                    "counted."
                ) from error

    def _note(self, error: Exception) -> None:
        self._error = self._error or error
        self._num_failed += 1

    def _finish(self) -> None:
        """Close the file or run."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the sink; further calls do nothing.

        Raises:
            DataError: some writes failed, or it could not be closed.
        """
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._finish()
        except Exception as error:  # noqa: BLE001 - raised below
            self._note(error)
        if self._error is not None:
            writes = "1 write" if self._num_failed == 1 else f"{self._num_failed:,} writes"
            raise DataError(f"{writes} of {self._what} failed: {_reason(self._error)}.") from self._error


def _reason(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return text.rstrip(".")


@contextmanager
def _named_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"can't write {what}: {_reason(error)}.") from error


class AppendFile:
    """A file to which whole records are appended, without buffering.

    A record that can't be written completely is removed again, so that the records before and after it are readable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def write(self, data: bytes) -> None:
        """Append ``data``, completely or not at all.

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
        """Close the file."""
        os.close(self._fd)


class JSONLines(Sink):
    """A file with one JSON object per line, readable at any time. An existing file is continued.

    Standard JSON has no NaN: it is written as null. Infinities are written as ``1e999`` and ``-1e999``, which are read
    as infinities.

    Raises:
        DataError: the file can't be made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        super().__init__(f"metrics to {self.path}")
        with _named_errors(self._what):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _mend_tail(self.path)
            self._file = AppendFile(self.path)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append one line without buffering, so that it is in the file even if the process dies.

        Raises:
            DataError: this is the first line that can't be written.
        """
        with self._writing():
            self._file.write(_to_json(metrics).encode() + b"\n")

    def _finish(self) -> None:
        self._file.close()


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the lines of a file that `JSONLines` wrote, oldest first. An incomplete last line is left out.

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
    """Remove the lines after ``iteration``, atomically, before a run is resumed from there.

    A resumed run repeats the iterations after its last checkpoint, and writes their lines again.

    Raises:
        DataError: the file can't be read or replaced.
    """
    path = Path(path)
    with _named_errors(f"metrics to {path}"):
        if not path.exists():
            return
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if not _is_after(line, iteration)]
        if len(kept) < len(lines):
            write_atomically(path, b"".join(kept))


def _is_after(line: bytes, iteration: int) -> bool:
    at = (_parse(line) or {}).get("iteration")
    return isinstance(at, int | float) and at > iteration


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line, parse_int=_whole_number)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _whole_number(text: str) -> float:
    """An int; infinity if it is too large for a float, as a number with a fraction would be."""
    return int(text) if math.isfinite(value := float(text)) else value


def _mend_tail(path: Path) -> None:
    """Remove an incomplete last line, which a killed writer left."""
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


def write_csv(metrics: str | os.PathLike[str], to: str | os.PathLike[str]) -> None:
    """Write the lines of a file that `JSONLines` wrote as a CSV table, replacing the file at ``to`` atomically.

    Each line is a row. Nested names become columns such as ``losses/policy``. Missing values and null are empty cells;
    lists are JSON.

    Raises:
        DataError: the lines can't be read, or the table can't be written.
    """
    rows = [
        {name: json.dumps(value) if isinstance(value, list) else value for name, value in flat_items(row)}
        for row in read_jsonl(metrics)
    ]
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, dict.fromkeys(name for row in rows for name in row), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with _named_errors(f"metrics to {to}"):
        write_atomically(Path(to), table.getvalue().encode())


def flat_items(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a nested mapping, with names such as ``losses/policy``."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from flat_items(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a nested mapping, with names such as ``losses/policy``; other values are left out."""
    return {
        name: float(value)
        for name, value in flat_items(metrics)
        if not isinstance(value, str | bytes) and hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0
    }


class TensorBoard(Sink):
    """Writes a TensorBoard event file in ``folder``: a scalar for each number, with names such as ``losses/policy``.

    Each event is in the file when `write` returns. Values that are not numbers are left out. So is an ``evaluation``
    that was written before, because results repeat it until the next one. `video`, `image` and `histogram` write other
    data.

    Args:
        folder: The folder; it may have files of the same run from before.
        resumed_at: The step at which the run was resumed. TensorBoard then leaves out later steps of earlier files,
            which are of iterations that were lost and made again. None: the run is new.
        evaluation: The ``evaluation`` that was written last before that.

    Raises:
        DataError: the file can't be made.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        resumed_at: int | None = None,
        evaluation: Mapping[str, float] | None = None,
    ) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        super().__init__(f"TensorBoard events to {folder}")
        stamp = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self.path = Path(folder) / f"events.out.tfevents.{stamp}"
        with _named_errors(self._what):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._records = RecordWriter(AppendFile(self.path))
        self._is_new, self._resumed_at = True, resumed_at
        self._evaluation: Any = evaluation

    def _event(self, values: Sequence[Mapping[str, Any]] = (), step: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        if self._is_new:
            self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
            if self._resumed_at is not None:
                start = SessionLog(status=SessionLog.START)  # ends what has this step or a later one
                event = Event(wall_time=time.time(), step=self._resumed_at + 1, session_log=start)
                self._records.write(event.SerializeToString())
            self._is_new = False
        event = Event(wall_time=time.time(), step=int(step))
        for value in values:
            event.summary.value.add(**value)
        self._records.write(event.SerializeToString())

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write the numbers in ``metrics`` at ``step`` (env steps, or updates offline).

        Raises:
            DataError: this is the first write that fails; or a value can't be made a number.
        """
        with self._writing():
            before, self._evaluation = self._evaluation, metrics.get("evaluation")
            if before is not None and before == self._evaluation:
                metrics = {name: value for name, value in metrics.items() if name != "evaluation"}
            self._event([{"tag": tag, "simple_value": value} for tag, value in scalars(metrics).items()], step)

    def video(self, tag: str, gif: str | os.PathLike[str], step: int) -> None:
        """Write a clip at ``step`` (as for `write`), which TensorBoard shows with the images.

        Args:
            tag: Its name in TensorBoard.
            gif: The file, as `etude.clip` writes it; it may be deleted afterwards.

        Raises:
            DataError: it can't be read or is not a GIF, or this is the first write that fails.
        """
        try:
            data = Path(gif).read_bytes()
        except OSError as error:
            raise DataError(f"can't read the clip {gif}: {error.strerror or error}.") from error
        if not data.startswith(b"GIF8"):
            raise DataError(f"{gif} is not a GIF, and TensorBoard shows no other clips: give it the suffix .gif.")
        self.image(tag, data, step)

    def image(self, tag: str, data: bytes, step: int) -> None:
        """Write an image or clip, the bytes of a PNG or GIF, at ``step``.

        Raises:
            DataError: it is neither, or this is the first write that fails.
        """
        if data[:4] not in (b"GIF8", b"\x89PNG") or len(data) < 24:
            raise DataError(f"the image {tag!r} is neither PNG nor GIF.")
        size = struct.unpack("<HH", data[6:10]) if data[:4] == b"GIF8" else struct.unpack(">II", data[16:24])
        image = {"width": size[0], "height": size[1], "colorspace": 3, "encoded_image_string": data}
        with self._writing():
            self._event([{"tag": tag, "image": image}], step)

    def histogram(self, tag: str, values: ArrayLike, step: int) -> None:
        """Write a histogram of finite numbers at ``step``; nothing if there are none."""
        numbers = np.asarray(values, np.float64).reshape(-1)
        if not len(numbers):
            return
        counts, edges = np.histogram(numbers, bins=30)  # the number of bins that TensorBoard shows
        histogram = {
            "min": float(numbers.min()),
            "max": float(numbers.max()),
            "num": float(len(numbers)),
            "sum": float(numbers.sum()),
            "sum_squares": float(np.square(numbers).sum()),
            "bucket_limit": edges[1:].tolist(),
            "bucket": counts.astype(float).tolist(),
        }
        with self._writing():
            self._event([{"tag": tag, "histo": histogram}], step)

    def _finish(self) -> None:
        self._records.close()


class WandB(Sink):
    """Writes metrics to a run of Weights & Biases, configured by W&B's variables: WANDB_PROJECT, WANDB_MODE, ...

    Metrics are plotted over the ``step`` passed to `write`, which may decrease, for example after a killed run is
    resumed.

    Args:
        name: The name of the run; if None, W&B generates one.
        folder: The folder of W&B's files, in which a folder ``wandb`` is made.
        settings: Arguments of ``wandb.init``, such as ``project`` or ``mode``.

    Raises:
        SettingsError: wandb is not installed.
        DataError: the run can't be started.
    """

    def __init__(self, name: str | None = None, folder: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        super().__init__("metrics to wandb")
        wandb = tracker("wandb")
        with _started("wandb"):
            self.run = wandb.init(
                name=name, dir=None if folder is None else os.fspath(folder), reinit="create_new", **settings
            )
            self.run.define_metric("step", hidden=True)
            self.run.define_metric("*", step_metric="step")

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write the numbers in ``metrics`` at ``step`` (env steps, or updates offline).

        Raises:
            DataError: this is the first write that fails.
        """
        with self._writing():
            self.run.log({**scalars(metrics), "step": int(step)})

    def _finish(self) -> None:
        self.run.finish()


class MLflow(Sink):
    """Writes metrics to a run of MLflow, configured by MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME.

    Args:
        name: The name of the run; if None, MLflow generates one.

    Raises:
        SettingsError: mlflow is not installed.
        DataError: the run can't be started.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__("metrics to mlflow")
        self._mlflow = tracker("mlflow")
        with _started("mlflow"):
            self._client = self._mlflow.MlflowClient()
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
            found = self._client.get_experiment_by_name(experiment)
            experiment_id = found.experiment_id if found is not None else self._client.create_experiment(experiment)
            self.run_id: str = self._client.create_run(str(experiment_id), run_name=name).info.run_id

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write the numbers in ``metrics`` at ``step`` (env steps, or updates offline).

        Characters in names that MLflow does not accept are replaced by ``_``.

        Raises:
            DataError: this is the first write that fails.
        """
        now, metric = int(1000 * time.time()), self._mlflow.entities.Metric
        with self._writing():
            found = [
                metric(re.sub(r"[^\w\-./ :]", "_", name), value, now, int(step))
                for name, value in scalars(metrics).items()
            ]
            for i in range(0, len(found), _BATCH):
                self._client.log_batch(self.run_id, metrics=found[i : i + _BATCH])

    def _finish(self) -> None:
        self._client.set_terminated(self.run_id)


@contextmanager
def _started(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise DataError(
            f"metrics can't go to {name} ({type(error).__name__}: {error}): check its settings and the network, or "
            "don't use it."
        ) from error


def tracker(name: str) -> ModuleType:
    """Import the package ``wandb`` or ``mlflow``.

    Raises:
        SettingsError: it is not installed, or can't be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SettingsError(f"metrics can't go to {name} ({error}): {how_to_install(name)}.") from error
