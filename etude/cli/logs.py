# SPDX-License-Identifier: Apache-2.0
"""Where the metrics of a run go."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from etude.algorithms import Algorithm, Result
from etude.cli import folders
from etude.cli.streams import say
from etude.errors import EtudeError
from etude.metrics import JSONLines, MLflow, TensorBoard, WandB, cut_jsonl, write_csv
from etude.metrics.plot import METRICS_FILE
from etude.metrics.trackers import tracker

Log: TypeAlias = Literal["jsonl", "csv", "tensorboard", "wandb", "mlflow"]
"""A place that metrics can go to."""


def check(names: Sequence[Log]) -> None:
    """Raise a SettingsError now where a package is missing that one of these needs."""
    for name in names:
        if name in ("wandb", "mlflow"):
            tracker(name)


class Logs(NamedTuple):
    """What is open. A sink that can't write says so, and the run goes on."""

    lines: JSONLines | None
    trackers: list[TensorBoard | WandB | MLflow]
    board: TensorBoard | None
    """That of these which takes pictures and histograms, too."""

    def write(self, result: Result, algorithm: Algorithm[Any]) -> None:
        """Record a result and, in TensorBoard, what callbacks logged with it."""
        row = result.to_dict()
        step = result.env_steps or result.updates
        if self.lines is not None:
            with _errors_said():
                self.lines.write(row)
        for sink in self.trackers:
            with _errors_said():
                sink.write(row, step)
        if self.board is not None:
            for name, values in algorithm.histograms.items():
                with _errors_said():
                    self.board.histogram(f"custom/{name}", values, step)
            for name, image in algorithm.media.items():
                with _errors_said():
                    self.board.image(f"custom/{name}", image, step)

    def video(self, path: Path, result: Result) -> None:
        """Show a clip of the run in TensorBoard."""
        if self.board is not None:
            with _errors_said():
                self.board.video("clip", path, result.env_steps or result.updates)


@contextmanager
def _errors_said() -> Iterator[None]:
    try:
        yield
    except EtudeError as error:
        say(f"warning: {error}")


@contextmanager
def opened(names: Sequence[Log], out: Path, start: int) -> Iterator[Logs]:
    """Open these for a run in ``out`` that goes on after iteration ``start``, and close them in the end."""
    cut_jsonl(out / METRICS_FILE, start)  # a killed run may have come further than its last checkpoint
    lines = None
    trackers: list[TensorBoard | WandB | MLflow] = []
    board = None
    try:
        if "jsonl" in names or "csv" in names:
            lines = JSONLines(out / METRICS_FILE)
        if "tensorboard" in names:
            board = TensorBoard(out / folders.TENSORBOARD)
            trackers.append(board)
        if "wandb" in names:
            trackers.append(WandB(out.resolve().name, out))
        if "mlflow" in names:
            trackers.append(MLflow(out.resolve().name))
        yield Logs(lines, trackers, board)
    finally:
        for sink in [lines, *trackers]:
            if sink is not None:
                with _errors_said():
                    sink.close()
        if "csv" in names:  # its columns are known when the last line is
            with _errors_said():
                write_csv(out / METRICS_FILE, out / folders.TABLE)
