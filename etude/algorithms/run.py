# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: naming, locking, checking and clearing it; and the sinks of metrics in it."""

import contextlib
import logging
import os
import shlex
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
from etude.metrics.writers import tracker
from etude.settings import choice
from etude.urls import redacted

TENSORBOARD = "tensorboard"
TABLE = "metrics.csv"
LOCK = ".lock"
_LOG: Final = logging.getLogger(__name__)
CLIPS = "clips"
CHECKPOINTS = "checkpoints"


def new_folder(owner: str, env: Any) -> Path:
    """The default folder for a run of the algorithm ``owner``: ``runs/<owner>-<env>-<time>``."""
    where = str(env).replace(":", "-").replace("/", "-") if env is not None else "offline"
    return Path("runs") / f"{owner}-{where}-{time.strftime('%Y%m%d-%H%M%S')}"


def folder_of(out: str | os.PathLike[str]) -> Path:
    """Return ``out`` as a path.

    Raises:
        SettingsError: ``out`` is a URL, or no path.
    """
    if not isinstance(out, str | os.PathLike):
        raise SettingsError(f"`out` is {out!r}, but must be the path of a folder on this machine.")
    if not os.fspath(out) or "\0" in os.fspath(out):
        raise SettingsError(f"`out` is {out!r}, which no folder is called: `.` is the current one.")
    if "://" in os.fspath(out):
        raise SettingsError(
            f"`out` is {redacted(os.fspath(out))!r}, but must be a folder on this machine. To store a run elsewhere, "
            "copy it afterwards, or use Algorithm.save, which accepts URLs."
        )
    return Path(out)


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Lock ``out`` for this process during a ``with`` block. If it doesn't exist, it is created.

    If the block raises an error and has left a new folder empty, the folder is removed again. The lock is released when
    the process ends, even if it is killed.

    Raises:
        SettingsError: the folder can't be made or written to, or another run has locked it.
    """
    with _writing(out):
        if out.is_file():
            raise SettingsError(f"`out` is {out}, which is a file: give a folder.")
        made = [path for path in (out, *out.parents) if not path.exists()]
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass  # a folder may refuse new files although its lock file can be opened
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
    """Raise a SettingsError if ``out`` is no longer the same folder as when the run began.

    Args:
        out: The folder.
        begun: The result of `os.stat` for it when the run began.
    """
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
    """Raise a SettingsError if a single run would be mixed with others in one folder.

    Args:
        out: The folder.
        goes_on: Whether this run resumes the run in ``out``.
        overwrite: Whether to replace the run in ``out``.
    """
    if goes_on and overwrite:
        raise SettingsError(
            f"{out} can't be both resumed and overwritten: leave out `overwrite`, or choose another folder as `out`."
        )
    if goes_on and out.resolve().parent.name == CHECKPOINTS:
        raise SettingsError(
            f"{out} is a checkpoint that a run keeps, which training there would overwrite: give another folder as "
            f"`out` (--out), or continue the run itself, {out.resolve().parent.parent}."
        )
    if not goes_on and (numbered(out, "seed-") or numbered(out, "trial-")):
        raise SettingsError(
            f"{out} contains the runs of several seeds or of a sweep, with which this run would be mixed. Choose "
            "another folder (--out), or continue those."
        )
    if not (goes_on or overwrite):
        check_no_run(out)


def check_no_run(out: Path, runs: Path | None = None) -> None:
    """Raise a SettingsError if a folder contains a run; ``runs`` contains the folders of several runs, if it is one of
    them."""
    if holds_run(out):
        go_on, what = "It has saved nothing yet: ", "it"
        if runs is not None:
            go_on = f"Continue all runs in {runs} (--resume {shlex.quote(str(runs))}; in Python resume=True), "
            what = "them"
        elif (out / MANIFEST).exists():
            here = shlex.quote(str(out))
            go_on = f"Continue it (--resume {here}; in Python, call fit on what etude.load returned, before train), "
        raise SettingsError(
            f"{out} already contains a run. {go_on}replace {what} (--overwrite, overwrite=True), or choose another "
            "folder (--out)."
        )


def holds_run(out: Path) -> bool:
    """Whether a folder contains the files of a run. A run that fails at once leaves empty files, which don't count."""
    logs = [path for name in (METRICS_FILE, TABLE) if (path := out / name).exists()]
    return (out / MANIFEST).exists() or any(path.stat().st_size for path in logs)


def clear(out: Path) -> None:
    """Remove the files of a run from its folder, and nothing else."""
    with _writing(out):
        for path in (out / METRICS_FILE, out / TABLE, out / MANIFEST, *out.glob("state-*.safetensors")):
            path.unlink(missing_ok=True)
        for checkpoint in (out / CHECKPOINTS).glob("checkpoint-*"):
            remove_tree(checkpoint)
        with contextlib.suppress(OSError):
            (out / CHECKPOINTS).rmdir()
        own = [*(out / TENSORBOARD).glob("events.out.tfevents.*"), *(out / CLIPS).glob("iteration_*.gif")]
        for path in own:
            path.unlink(missing_ok=True)


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SettingsError(
            f"can't write a run to {out}: {error.strerror or error}. Choose a writable folder as `out`."
        ) from error


def check_run_of(path: str | os.PathLike[str], algorithm: str, owner: str) -> None:
    """Raise a SettingsError if the checkpoint at ``path`` is of another algorithm.

    Args:
        path: The folder of the checkpoint.
        algorithm: The expected algorithm, as checkpoints name it.
        owner: Its name in messages.
    """
    meta = load_meta(path)
    was = meta.get("algorithm") if isinstance(meta, dict) else None
    if not is_same_class(str(was), algorithm):
        raise SettingsError(f"{redacted(os.fspath(path))} is a run of {was}, not of {owner} ({algorithm}).")


def numbered(out: Path, prefix: str) -> dict[int, Path]:
    """The folders in ``out`` whose names are ``prefix`` followed by a number, keyed by that number."""
    found = {path.name.removeprefix(prefix): path for path in out.glob(f"{prefix}*") if path.is_dir()}
    return {int(number): path for number, path in found.items() if number.isdecimal()}


def is_run_of(out: Path, algorithm: str, iteration: int) -> bool:
    """Whether ``out`` has a checkpoint of ``algorithm`` from exactly this iteration; False for iteration 0."""
    if not iteration or not (out / MANIFEST).exists():
        return False
    meta = load_meta(out)
    if not isinstance(meta, dict) or meta.get("iteration") != iteration:
        return False
    return is_same_class(str(meta.get("algorithm")), algorithm)


def is_same_class(name: str, other: str) -> bool:
    """Whether two names ``module:qualname`` are of one class.

    Etude's own classes, whose names are unique, may have moved to another file; and a script's module is ``__main__``
    where it is run, but has a name where it is imported.
    """
    (module, _, path), (other_module, _, other_path) = name.partition(":"), other.partition(":")
    are_etudes = [one.partition(".")[0] == "etude" for one in (module, other_module)]
    is_script = "__main__" in (module, other_module) and not any(are_etudes)
    return path == other_path and (module == other_module or all(are_etudes) or is_script)


# -- metrics ----------------------------------------------------------------------------------------------------------

Log: TypeAlias = Literal["jsonl", "csv", "tensorboard", "wandb", "mlflow"]
"""A sink of metrics: ``metrics.jsonl``, ``metrics.csv`` (written at the end), TensorBoard, or a tracking server."""

_SINKS: Mapping[Log, Callable[[Path, Result], TensorBoard | WandB | MLflow]] = {
    "tensorboard": lambda out, before: TensorBoard(
        out / TENSORBOARD, resumed_at=step_of(before) if before.iteration else None, evaluation=before.evaluation
    ),
    "wandb": lambda out, _: WandB(out.resolve().name, out),
    "mlflow": lambda out, _: MLflow(out.resolve().name),
}


def check_logs(names: Sequence[Log]) -> None:
    """Raise a SettingsError if a name is not the name of a sink, or if a package that a sink needs is missing."""
    known = get_args(Log)
    wrong = [names] if isinstance(names, str) else [name for name in names if name not in known]
    if wrong:
        raise SettingsError(f"`log` is {names!r}, but must be a tuple of names. {choice(str(wrong[0]), known)}")
    for name in {"wandb", "mlflow"}.intersection(names):
        tracker(name)


class Logs:
    """The open sinks of metrics. If a sink can't write, a warning is logged, and the run continues."""

    def __init__(self) -> None:
        self.lines: JSONLines | None = None
        self.sinks: list[TensorBoard | WandB | MLflow] = []

    @property
    def boards(self) -> list[TensorBoard]:
        """The sinks that also accept images, histograms and videos."""
        return [sink for sink in self.sinks if isinstance(sink, TensorBoard)]

    def write(self, result: Result, histograms: Mapping[str, Any], media: Mapping[str, Any]) -> None:
        """Write a result to all sinks, and what callbacks logged with it to TensorBoard."""
        row, step = result.to_dict(), step_of(result)
        if self.lines is not None:
            _try_write(self.lines.write, row)
        for sink in self.sinks:
            _try_write(sink.write, row, step)
        for board in self.boards:
            for name, values in histograms.items():
                _try_write(board.histogram, f"custom/{name}", values, step)
            for name, image in media.items():
                _try_write(board.image, f"custom/{name}", image, step)

    def video(self, path: Path, result: Result) -> None:
        """Write a clip of the run to TensorBoard."""
        for board in self.boards:
            _try_write(board.video, "clip", path, step_of(result))


def step_of(result: Result) -> int:
    """The step at which sinks show a result: env steps, or updates without an env."""
    return result.env_steps or result.updates


def _try_write(write: Callable[..., Any], *args: Any) -> None:
    try:
        write(*args)
    except EtudeError as error:
        _LOG.warning("%s", error)


@contextmanager
def opened_logs(names: Sequence[Log], out: Path, before: Result) -> Iterator[Logs]:
    """Open the sinks of a run in ``out`` during a ``with`` block.

    Args:
        names: The names of the sinks.
        out: The folder of the run.
        before: The last result before this training. A killed run may have logged beyond it: later lines in
            ``metrics.jsonl`` are removed, and TensorBoard leaves out later steps.
    """
    cut_jsonl(out / METRICS_FILE, before.iteration)
    log = Logs()
    try:
        if {"jsonl", "csv"}.intersection(names):
            log.lines = JSONLines(out / METRICS_FILE)
        for name, make in _SINKS.items():
            if name in names:
                log.sinks.append(make(out, before))
        yield log
    finally:
        for sink in (log.lines, *log.sinks):
            if sink is not None:
                _try_write(sink.close)
        if "csv" in names:  # its columns are known only at the end
            _try_write(write_csv, out / METRICS_FILE, out / TABLE)
