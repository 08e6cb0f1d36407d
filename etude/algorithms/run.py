# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: claiming it, checking and clearing it; and the metrics and checkpoints written to it."""

import contextlib
import logging
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

from etude.algorithms.results import Result
from etude.checkpoints import MANIFEST, load_meta, remove_tree
from etude.errors import EtudeError, SettingsError
from etude.files import InUseError, Lock
from etude.metrics import JSONLines, MLflow, TensorBoard, WandB, cut_jsonl, write_csv
from etude.metrics.plot import METRICS_FILE
from etude.metrics.trackers import tracker
from etude.settings import choice
from etude.urls import redacted

TENSORBOARD = "tensorboard"
TABLE = "metrics.csv"
LOCK = ".lock"
_LOG: Final = logging.getLogger(__name__)
CLIPS = "clips"
CHECKPOINTS = "checkpoints"


def new_folder(owner: str, env: Any) -> Path:
    """A folder for a run of the algorithm ``owner`` that was given none."""
    where = str(env).replace(":", "-").replace("/", "-") if env is not None else "offline"
    return Path("runs") / f"{owner}-{where}-{time.strftime('%Y%m%d-%H%M%S')}"


def folder_of(out: str | os.PathLike[str]) -> Path:
    """The folder that ``out`` names.

    Raises:
        SettingsError: it is a URL.
    """
    if "://" in os.fspath(out):
        raise SettingsError(
            f"`out` is {redacted(os.fspath(out))!r}, but a run is written to a folder on this machine: give one. "
            "To store it elsewhere, copy it afterwards, or use Algorithm.save, which takes URLs."
        )
    return Path(out)


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Lock ``out`` for this process during a ``with`` block. The folder is made, and removed again if an error left it
    empty.

    The lock ends with the process, however that ends.

    Raises:
        SettingsError: the folder can't be made or written to, or another run has locked it.
    """
    with _writing(out):
        if out.is_file():
            raise SettingsError(f"`out` is {out}, which is a file: give a folder.")
        made = [path for path in (out, *out.parents) if not path.exists()]
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass  # a folder may refuse new files though its lock file can be opened
        try:
            lock = Lock(out / LOCK)
        except InUseError as owner:
            raise SettingsError(
                f"{out} is in use: another process is training in it. Wait until it has ended ({owner}), or give "
                "another folder as `out` (--out)."
            ) from None
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            if made and [path.name for path in out.iterdir()] == [LOCK]:
                (out / LOCK).unlink()
                for path in made:
                    path.rmdir()
        raise
    finally:
        lock.release(keep_file=True)


def check_same(out: Path, begun: os.stat_result) -> None:
    """Raise a SettingsError if ``out`` is no longer the folder that it was when the run began."""
    try:
        if os.path.samestat(begun, os.stat(out)):
            return
    except FileNotFoundError:
        pass
    raise SettingsError(
        f"{out} was removed or moved while the run was writing to it, so the rest can't be saved there. Start the run "
        "again, in another folder if something else removes this one."
    )


def check_free(out: Path, goes_on: bool, *, overwrite: bool) -> None:
    """Raise a SettingsError if two runs would mix in one folder; ``goes_on`` says whether this run resumes the one
    there."""
    if goes_on and overwrite:
        raise SettingsError(
            f"{out} can't be both resumed and overwritten: leave out `overwrite`, or give another folder as `out`."
        )
    if not (goes_on or overwrite) and holds_run(out):
        raise SettingsError(
            f"{out} holds a run already. Go on with it (--resume {shlex.quote(str(out))}; in Python, call fit on what "
            "etude.load returns), replace it (--overwrite, overwrite=True), or give another folder (--out)."
        )


def holds_run(out: Path) -> bool:
    """Whether a folder holds the files of a run."""
    return (out / MANIFEST).exists() or any(_holds_something(out / name) for name in (METRICS_FILE, TABLE))


def _holds_something(path: Path) -> bool:
    """Whether a file exists and is not empty: a run that failed at once leaves empty ones."""
    return path.exists() and path.stat().st_size > 0


def clear(out: Path) -> None:
    """Remove a run from its folder, and nothing else."""
    with _writing(out):
        for path in (out / METRICS_FILE, out / TABLE, out / MANIFEST, *out.glob("state-*.safetensors")):
            path.unlink(missing_ok=True)
        for checkpoint in (out / CHECKPOINTS).glob("checkpoint-*"):
            remove_tree(checkpoint)
        with contextlib.suppress(OSError):
            (out / CHECKPOINTS).rmdir()
        shutil.rmtree(out / TENSORBOARD, ignore_errors=True)
        for clip in (out / CLIPS).glob("iteration_*.gif"):
            clip.unlink(missing_ok=True)


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SettingsError(
            f"can't write a run to {out}: {error.strerror or error}. Give a folder that can be written to, as `out`."
        ) from error


def check_run_of(path: str | os.PathLike[str], algorithm: str, owner: str) -> None:
    """Raise a SettingsError if the checkpoint at ``path`` is not of ``algorithm``, which messages call ``owner``."""
    meta = load_meta(path)
    was = meta.get("algorithm") if isinstance(meta, dict) else None
    if was != algorithm:
        raise SettingsError(f"{redacted(os.fspath(path))} is a run of {was}, not of {owner} ({algorithm}).")


def numbered(out: Path, prefix: str) -> dict[int, Path]:
    """The folders in ``out`` whose names are ``prefix`` and a number, by that number."""
    found = {path.name.removeprefix(prefix): path for path in out.glob(f"{prefix}*") if path.is_dir()}
    return {int(number): path for number, path in found.items() if number.isdecimal()}


def is_run_of(out: Path, algorithm: str, iteration: int) -> bool:
    """Whether the checkpoint in ``out`` is of ``algorithm`` after exactly this iteration, which is at least 1."""
    if not iteration or not (out / MANIFEST).exists():
        return False
    meta = load_meta(out)
    return isinstance(meta, dict) and (meta.get("algorithm"), meta.get("iteration")) == (algorithm, iteration)


# -- metrics ----------------------------------------------------------------------------------------------------------

Log: TypeAlias = Literal["jsonl", "csv", "tensorboard", "wandb", "mlflow"]
"""A sink of metrics: ``metrics.jsonl``, ``metrics.csv`` (written at the end), TensorBoard, or a tracking server."""

_SINKS: Mapping[Log, Callable[[Path], TensorBoard | WandB | MLflow]] = {
    "tensorboard": lambda out: TensorBoard(out / TENSORBOARD),
    "wandb": lambda out: WandB(out.resolve().name, out),
    "mlflow": lambda out: MLflow(out.resolve().name),
}


def check_logs(names: Sequence[Log]) -> None:
    """Raise a SettingsError if a name is not that of a sink, or a package that a sink needs is missing."""
    known = get_args(Log)
    wrong = [names] if isinstance(names, str) else [name for name in names if name not in known]
    if wrong:
        raise SettingsError(f"`log` is {names!r}, but must be a tuple of names. {choice(str(wrong[0]), known)}")
    for name in {"wandb", "mlflow"}.intersection(names):
        tracker(name)


class Logs:
    """The open sinks of metrics. A sink that can't write logs a warning, and the run goes on."""

    def __init__(self) -> None:
        self.lines: JSONLines | None = None
        self.sinks: list[TensorBoard | WandB | MLflow] = []

    @property
    def boards(self) -> list[TensorBoard]:
        """The sinks that take images and histograms, too."""
        return [sink for sink in self.sinks if isinstance(sink, TensorBoard)]

    def write(self, result: Result, histograms: Mapping[str, Any], media: Mapping[str, Any]) -> None:
        """Write a result and, to TensorBoard, what callbacks logged with it."""
        row, step = result.to_dict(), result.env_steps or result.updates
        if self.lines is not None:
            _tried(self.lines.write, row)
        for sink in self.sinks:
            _tried(sink.write, row, step)
        for board in self.boards:
            for name, values in histograms.items():
                _tried(board.histogram, f"custom/{name}", values, step)
            for name, image in media.items():
                _tried(board.image, f"custom/{name}", image, step)

    def video(self, path: Path, result: Result) -> None:
        """Write a clip of the run to TensorBoard."""
        for board in self.boards:
            _tried(board.video, "clip", path, result.env_steps or result.updates)


def _tried(write: Callable[..., Any], *given: Any) -> None:
    try:
        write(*given)
    except EtudeError as error:
        _LOG.warning("%s", error)


@contextmanager
def opened_logs(names: Sequence[Log], out: Path, start: int) -> Iterator[Logs]:
    """Open sinks for a run in ``out`` that continues after iteration ``start``, and close them at the end."""
    cut_jsonl(out / METRICS_FILE, start)  # a killed run may have logged beyond its last checkpoint
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
        if "csv" in names:  # its columns are known only at the end
            _tried(write_csv, out / METRICS_FILE, out / TABLE)
