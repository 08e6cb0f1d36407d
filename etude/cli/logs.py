# SPDX-License-Identifier: Apache-2.0
"""Where the metrics of a run go."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

from etude.algorithms import Algorithm, Result
from etude.cli import folders, streams
from etude.errors import EtudeError
from etude.metrics import JSONLines, MLflow, TensorBoard, WandB, cut_jsonl, write_csv
from etude.metrics.plot import METRICS_FILE
from etude.metrics.trackers import tracker

Log: TypeAlias = Literal["jsonl", "csv", "tensorboard", "wandb", "mlflow"]
"""A place that metrics can go to."""

_SINKS: Mapping[Log, Callable[[Path], TensorBoard | WandB | MLflow]] = {
    "tensorboard": lambda out: TensorBoard(out / folders.TENSORBOARD),
    "wandb": lambda out: WandB(out.resolve().name, out),
    "mlflow": lambda out: MLflow(out.resolve().name),
}


def check(names: Sequence[Log]) -> None:
    """Raise a SettingsError now where a package is missing that one of these needs."""
    for name in {"wandb", "mlflow"}.intersection(names):
        tracker(name)


class Logs:
    """What is open. A sink that can't write says so, and the run goes on."""

    def __init__(self) -> None:
        self.lines: JSONLines | None = None
        self.sinks: list[TensorBoard | WandB | MLflow] = []

    @property
    def boards(self) -> list[TensorBoard]:
        """Those that take pictures and histograms, too."""
        return [sink for sink in self.sinks if isinstance(sink, TensorBoard)]

    def write(self, result: Result, algorithm: Algorithm[Any]) -> None:
        """Record a result and, in TensorBoard, what callbacks logged with it."""
        row, step = result.to_dict(), result.env_steps or result.updates
        if self.lines is not None:
            _tried(self.lines.write, row)
        for sink in self.sinks:
            _tried(sink.write, row, step)
        for board in self.boards:
            for name, values in algorithm.histograms.items():
                _tried(board.histogram, f"custom/{name}", values, step)
            for name, image in algorithm.media.items():
                _tried(board.image, f"custom/{name}", image, step)

    def video(self, path: Path, result: Result) -> None:
        """Show a clip of the run in TensorBoard."""
        for board in self.boards:
            _tried(board.video, "clip", path, result.env_steps or result.updates)


def _tried(write: Callable[..., Any], *given: Any) -> None:
    try:
        write(*given)
    except EtudeError as error:
        streams.say(f"warning: {error}")


@contextmanager
def opened(names: Sequence[Log], out: Path, start: int) -> Iterator[Logs]:
    """Open these for a run in ``out`` that goes on after iteration ``start``, and close them in the end."""
    cut_jsonl(out / METRICS_FILE, start)  # a killed run may have come further than its last checkpoint
    log = Logs()
    try:
        if {"jsonl", "csv"}.intersection(names):
            log.lines = JSONLines(out / METRICS_FILE)
        for name, make in _SINKS.items():
            if name in names:
                log.sinks.append(make(out))
        yield log
    finally:
        for sink in (log.lines, *log.sinks):
            if sink is not None:
                _tried(sink.close)
        if "csv" in names:  # its columns are known when the last line is
            _tried(write_csv, out / METRICS_FILE, out / folders.TABLE)
