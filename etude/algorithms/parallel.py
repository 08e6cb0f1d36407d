# SPDX-License-Identifier: Apache-2.0
"""Train several runs at the same time, such as those of several seeds, each in its own process and folder."""

import contextlib
import logging
import os
import pickle
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

from etude import spawning
from etude.algorithms.algorithm import Algorithm, needs_evaluation
from etude.algorithms.checkpoint import Checkpoints
from etude.algorithms.config import ActingConfig, AlgorithmConfig, OfflineConfig
from etude.algorithms.loading import load
from etude.algorithms.progress import Board, say
from etude.algorithms.results import Result, Stop, result_from
from etude.algorithms.run import (
    Log,
    check_logs,
    check_no_run,
    check_run_of,
    claimed,
    clear,
    folder_of,
    holds_run,
    is_same_class,
)
from etude.algorithms.saving import MADE, REF, UNSAVED, name_of, to_plain
from etude.checkpoints import MANIFEST, load_meta
from etude.envs import env_name, kill_workers
from etude.errors import EtudeError, SettingsError, described
from etude.interruption import INTERRUPTED, Signals, when_parent_ends
from etude.threads import for_acting, usable_cores

_log = logging.getLogger("etude.algorithms")

OUTPUT: Final = "log.txt"
"""The file in the folder of a run with the standard output and standard error of its process."""
_POLL: Final = 0.25
"""Seconds between two checks of the processes."""
_EXIT_TIME: Final = 10.0
"""Seconds for a process to end after it has closed its connection; then it is killed."""
_MAY_DIFFER: Final = ("engine", "record", "callbacks", "compute", "workers")
"""Settings that a run may be resumed with in another form, as they do not change what it learns."""
_COMMAND: Final = spawning.command("etude.algorithms.parallel", "run_job")


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A run to be trained in its own process."""

    name: str
    """The name of the run in progress displays and messages."""
    algorithm: type[Algorithm[Any]]
    config: AlgorithmConfig
    """The settings of a new run."""
    changes: Mapping[str, Any]
    """Settings that override those of the checkpoint of a resumed run."""
    out: Path
    stop: Stop
    resume: bool = False
    """Whether to continue from the checkpoint in ``out``, if there is one."""
    overwrite: bool = False
    trust: bool = False
    log: Sequence[Log] = ("jsonl", "tensorboard")
    save_interval: float = 60.0
    kept_in: Callable[[Path], Checkpoints | None] | None = None
    """Makes the `Checkpoints` of a run, given its folder; None: only the last checkpoint is kept."""

    @property
    def goes_on(self) -> bool:
        """Whether the run continues from a checkpoint."""
        return self.resume and (self.out / MANIFEST).exists()

    def check(self) -> None:
        """Raise a SettingsError if the run can't begin: its folder has another run, or its settings do not fit."""
        config = self.config
        if config.engine != "local":
            raise SettingsError(
                "`engine` is a Ray cluster, but these runs are processes on this machine. Leave it out, or use "
                "`etude tune`, which spreads runs over a cluster."
            )
        check_records_nothing(config)
        if self.overwrite and self.resume:
            raise SettingsError("runs can't be both resumed and overwritten: leave one of these out.")
        if not (self.overwrite or self.resume):
            check_no_run(self.out, self.out.parent)
        if self.goes_on:
            check_run_of(self.out, name_of(self.algorithm), self.algorithm.name)
        if self.finished() is not None and (difference := self.difference()):
            raise SettingsError(
                f"{self.out} is finished. It was trained {difference}, with which the other runs would be trained: "
                "leave the setting as it was, or give another folder (--out)."
            )

    def difference(self) -> str | None:
        """The first setting that differs from those of the run in ``out``, in words; None: they are the same."""
        meta = load_meta(self.out)
        were = meta.get("config") if isinstance(meta, Mapping) else None
        for field in fields(self.config):
            if field.name not in _MAY_DIFFER:
                was, now = (were or {}).get(field.name), to_plain(getattr(self.config, field.name))
                if difference := _difference(field.name, was, now):
                    return difference
        return None

    def finished(self) -> Result | None:
        """The last result of the run in ``out``, if it has reached its goal or used up its budget, and was not
        interrupted in its last evaluation; otherwise None."""
        if not self.goes_on:
            return None
        meta = load_meta(self.out)
        result = result_from(meta.get("result")) if isinstance(meta, Mapping) else None
        is_whole = result and self.stop.now(result) and not needs_evaluation(self.config, result, self.stop)
        return result if is_whole else None


def check_records_nothing(config: AlgorithmConfig) -> None:
    """Raise a SettingsError if a run that is one of several would record what it plays."""
    if config.record.path is not None:
        raise SettingsError(
            "`record.path`: several runs can't write one recording. Leave it out, and record trained runs afterwards "
            "(etude record)."
        )


def _difference(path: str, was: Any, now: Any) -> str | None:
    """How plain settings differ, in words; None: they do not, or hold code that can't be compared."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        keys = {**was, **now}
        pairs = [] if UNSAVED in keys else [(str(key), was.get(key), now.get(key)) for key in keys]
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        pairs = [(str(i), *pair) for i, pair in enumerate(zip(was, now, strict=True))]
    elif was == now or (path.endswith((REF, MADE)) and is_same_class(str(was), str(now))):
        return None
    else:
        before, after = (value.get(REF, value) if isinstance(value, Mapping) else value for value in (was, now))
        return f"with `{path.partition('.$')[0]}` {before}, but it is {after} now"
    return next(filter(None, (_difference(f"{path}.{key}", *pair) for key, *pair in pairs)), None)


class Outcome(NamedTuple):
    """How a run ended."""

    result: Result | None = None
    """The last result; None if the run failed, or was interrupted before it began."""
    error: str | None = None
    """The error with which it failed."""
    is_interrupted: bool = False


def _others(out: Path, folders: Sequence[Path]) -> list[Path]:
    """The runs in ``out`` with names such as ``seed-2`` or ``trial-2/seed-0`` that are in none of these folders."""
    kinds = {folder.relative_to(out).parts for folder in folders}
    patterns = {"/".join(f"{part.rpartition('-')[0]}-*" for part in parts) for parts in kinds}
    found = sorted(path for pattern in patterns for path in out.glob(pattern))
    return [path for path in found if path not in folders and holds_run(path)]


def cores_of(config: AlgorithmConfig) -> int:
    """The number of cores that a run keeps busy on this machine: its threads plus its worker processes."""
    workers = 0
    if isinstance(config, OfflineConfig):
        workers = config.reading.num_workers
    elif isinstance(config, ActingConfig) and config.engine == "local":
        workers = config.workers.num_workers
    return for_acting(config.compute.threads) + workers


def train_all(
    jobs: Sequence[TrainingJob],
    out: Path,
    title: str,
    *,
    max_concurrent: int | None = None,
    quiet: bool = False,
    say: Callable[[str], None] = say,
    ended: Callable[[int, Outcome], None] = lambda number, outcome: None,
) -> list[Outcome]:
    """Train several runs in parallel.

    A run that fails does not affect the others. On SIGINT, SIGTERM or SIGHUP all runs save and end; a second signal
    kills them. If this process is killed, the runs save and end by themselves.

    Args:
        jobs: The runs, at least one. Runs that have already finished are not trained again.
        out: The folder that contains their folders; it is locked meanwhile.
        title: The title of the progress display.
        max_concurrent: The number of runs trained at the same time, at least 1; None: as many as the cores allow.
        quiet: Whether to show no progress.
        say: Called with each line of progress, if it can't be shown live.
        ended: Called with the index and the outcome of each run that has ended.

    Returns:
        How each run ended, in the order of ``jobs``.

    Raises:
        SettingsError: a run can't begin, or can't be sent to a process. No run has begun then.
        KeyboardInterrupt: a second signal came, or a signal came before the runs began.
    """
    if spawning.is_importing_main():
        raise SettingsError(
            "each run imports your script to find what it defines, and the script starts runs itself. Put everything "
            'except imports and definitions under `if __name__ == "__main__":`.'
        )
    if max_concurrent is not None and max_concurrent < 1:
        raise SettingsError(f"`max_concurrent` is {max_concurrent}, but must be at least 1.")
    at_once = max_concurrent or max(1, usable_cores() // max(cores_of(job.config) for job in jobs))
    running: dict[int, _Child] = {}
    board = Board(title, [job.name for job in jobs], jobs[0].stop, quiet=quiet, say=say)

    def kill() -> None:
        for child in running.values():
            child.kill()

    with closing(board), Signals(quiet=quiet, kill=kill) as signals, claimed(out):
        check_no_run(out)
        for job in jobs:
            job.check()
            check_logs(job.log)
        if jobs[0].overwrite:
            for left in _others(out, [job.out for job in jobs]):
                clear(left)
        sent = [_sendable(job) for job in jobs]
        signals.conclude = lambda: INTERRUPTED
        board.open()
        outcomes: dict[int, Outcome] = {}
        waiting = deque(range(len(jobs)))

        def note(number: int, outcome: Outcome) -> None:
            outcomes[number] = outcome
            board.end(jobs[number].name, outcome.result, _state(outcome))
            ended(number, outcome)

        try:
            while running or (waiting and not signals.is_set()):
                while waiting and len(running) < at_once and not signals.is_set():
                    number = waiting.popleft()
                    if result := jobs[number].finished():
                        note(number, Outcome(result))
                        continue
                    try:
                        running[number] = _Child(jobs[number], sent[number])
                    except OSError as error:  # out of memory, for example; the others continue
                        note(number, Outcome(error=f"its process can't be started: {error}."))
                    else:
                        board.begin(jobs[number].name)
                if signals.is_set():
                    for child in running.values():
                        child.interrupt()
                connection.wait([child.receiver for child in running.values() if not child.receiver.closed], _POLL)
                for number, child in list(running.items()):
                    for result in child.results():
                        board.show(jobs[number].name, result)
                    if child.has_ended():
                        del running[number]
                        note(number, child.outcome())
        finally:
            kill()
    return [outcomes.get(number, Outcome(is_interrupted=True)) for number in range(len(jobs))]


def _state(outcome: Outcome) -> str:
    return "failed" if outcome.error is not None else "interrupted" if outcome.is_interrupted else "done"


def _sendable(job: TrainingJob) -> tuple[Mapping[str, Any], bytes]:
    """Return what the process of a run is sent: how to import the script (see `spawning`), and the pickled run."""
    try:
        pickled = pickle.dumps(job)
    except Exception as error:
        raise SettingsError(
            f"the settings can't be sent to another process ({type(error).__name__}: {error}). Give env, module, "
            "connectors and callbacks as classes or functions that are defined at the top of a module, as "
            "'module:name', or by a registered name; lambdas and functions in functions can't be sent."
        ) from error
    needs_main = b"__main__" in pickled
    if needs_main and spawning.is_interactive():
        raise SettingsError(
            "the settings refer to something defined in this interactive session, where another process can't find it. "
            "Put it into a module (a .py file) and import it."
        )
    return spawning.preparation(needs_main=needs_main), pickled


class _Child:
    """The process of a run, seen from the process that started it."""

    def __init__(self, job: TrainingJob, sent: tuple[Mapping[str, Any], bytes]) -> None:
        self._outcome: Outcome | None = None
        self._is_interrupted = False
        self._closed_since = 0.0
        mode = "ab" if job.goes_on else "wb"
        job.out.mkdir(parents=True, exist_ok=True)
        self.receiver, sender = Pipe(duplex=False)
        with sender, (job.out / OUTPUT).open(mode) as log:
            message = (os.getpid(), sender.fileno(), *sent)
            self._process = spawning.start(_COMMAND, message, fds=[sender.fileno()], stdout=log, stderr=log)

    def results(self) -> Iterator[Result]:
        """The results that the process has reported since the last call."""
        try:
            while not self.receiver.closed and self.receiver.poll():
                message = self.receiver.recv()
                if isinstance(message, Result):
                    yield message
                else:
                    self._outcome = message
        except (EOFError, OSError):
            self.receiver.close()
            self._closed_since = time.monotonic()

    def interrupt(self) -> None:
        """Ask the process to save and end."""
        if not self._is_interrupted:
            self._is_interrupted = True
            self._process.terminate()

    def has_ended(self) -> bool:
        """Whether the process has ended. It is killed if it still runs long after it has closed its connection."""
        if self.receiver.closed and time.monotonic() - self._closed_since > _EXIT_TIME:
            self.kill()
        return self._process.poll() is not None and self.receiver.closed

    def outcome(self) -> Outcome:
        """How the run ended; call it once `has_ended` is True."""
        if self._outcome is not None:
            return self._outcome
        code = self._process.returncode
        if self._is_interrupted:  # it ended before it could train, or was killed because it did not end
            return Outcome(is_interrupted=True)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        hint = ", perhaps because memory ran out" if code == -signal.SIGKILL else ""
        return Outcome(error=f"its process {how}{hint}.")

    def kill(self) -> None:
        """Kill the process and everything that its envs have started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.receiver.close()


# -- several seeds ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SeedRun:
    """The outcome of the run of one seed."""

    seed: int
    path: str
    """The folder of the run; `etude.load` accepts it."""
    result: Result | None
    """The last result; None if the run failed."""
    error: str | None = None
    """The error with which the run failed; None if it succeeded."""


def fit_seeds(
    config: AlgorithmConfig,
    seeds: int | Sequence[int] = 5,
    *,
    stop: Stop,
    out: str | os.PathLike[str],
    algorithm: type[Algorithm[Any]] | None = None,
    max_concurrent: int | None = None,
    progress: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    log: Sequence[Log] = ("jsonl", "tensorboard"),
    save_interval: float = 60.0,
) -> list[SeedRun]:
    """Train with several seeds, each in its own process.

    The run of seed 3 is in the folder ``seed-3`` in ``out``, with the same files that `Algorithm.fit` writes, and
    ``log.txt`` with the output of its process. On Ctrl-C, all runs save and end, and KeyboardInterrupt is raised. A run
    that fails does not affect the others; its error is logged as a warning.

    Args:
        config: The settings. They must be picklable, because they are sent to other processes.
        seeds: The number of seeds, counted from the config's seed (from 0 if it is None); or a sequence of seeds.
        stop: When each run ends; at least one condition must be set.
        out: The folder of the runs, on this machine.
        algorithm: The class of the algorithm; None: the one that ``config`` belongs to.
        max_concurrent: The number of runs trained at the same time, at least 1; None: as many as the cores allow.
        progress: Whether to show progress: live in a terminal or notebook, otherwise as lines on standard error.
        resume: Continue the unfinished runs in ``out``; finished ones are not trained again.
        overwrite: Replace the runs in ``out``.
        log: The sinks of metrics; see `Algorithm.fit`.
        save_interval: Seconds between checkpoints, at least 0. A checkpoint is always saved at the end.

    Returns:
        The outcome of each run, in the order of the seeds.

    Raises:
        SettingsError: there is no seed, ``stop`` has no condition, the settings can't be sent to a process, or ``out``
            can't be written to, is in use, or contains other runs.
        KeyboardInterrupt: training was interrupted. The runs are saved; call it with ``resume=True`` to continue.
    """
    if not isinstance(stop, Stop) or stop == Stop():
        raise SettingsError("fit_seeds needs to know when to stop: set a condition in stop=etude.Stop(...).")
    folder, kind = folder_of(out), algorithm or algorithm_of(type(config))
    numbers = seeds_of(config.seed, seeds) if isinstance(seeds, int) else list(seeds)
    if not numbers or len({*numbers}) < len(numbers) or not all(isinstance(seed, int) for seed in numbers):
        raise SettingsError(f"`seeds` is {seeds!r}, but must be a number (at least 1) or a list of distinct integers.")
    changes = {field.name: getattr(config, field.name) for field in fields(config)}
    shared: dict[str, Any] = {"algorithm": kind, "stop": stop, "log": log, "save_interval": save_interval}
    shared |= {"resume": resume, "overwrite": overwrite}
    jobs = seed_jobs(numbers, folder, config, changes, **shared)
    title = title_of(kind, config, len(jobs))
    outcomes = train_all(jobs, folder, title, max_concurrent=max_concurrent, quiet=not progress)
    for line in failures(jobs, outcomes):
        _log.warning(line)
    if any(outcome.is_interrupted for outcome in outcomes):
        raise KeyboardInterrupt(f"the runs are saved in {folder}; fit_seeds(..., resume=True) continues them")
    return [
        SeedRun(seed=seed, path=str(job.out), result=outcome.result, error=outcome.error)
        for seed, job, outcome in zip(numbers, jobs, outcomes, strict=True)
    ]


def seeds_of(first: int | None, count: int) -> list[int]:
    """The ``count`` consecutive seeds that begin at ``first``, or at 0 if it is None."""
    return list(range(first or 0, (first or 0) + count))


def seed_jobs(
    seeds: Sequence[int],
    out: Path,
    config: AlgorithmConfig,
    changes: Mapping[str, Any],
    *,
    prefix: str = "",
    **shared: Any,
) -> list[TrainingJob]:
    """Return a job for each seed, with the folder ``seed-<seed>`` in ``out``.

    Args:
        seeds: The seeds.
        out: The folder that contains the folders of the runs.
        config: The settings of new runs.
        changes: Settings that override those of the checkpoint of a resumed run.
        prefix: A prefix of the names of the runs.
        shared: The other fields of `TrainingJob`.
    """
    return [
        TrainingJob(
            name=f"{prefix}seed-{seed}",
            config=replace(config, seed=seed),
            changes={**changes, "seed": seed},
            out=out / f"seed-{seed}",
            **shared,
        )
        for seed in seeds
    ]


def title_of(kind: type[Algorithm[Any]], config: AlgorithmConfig, num: int, noun: str = "seed") -> str:
    """A title for the progress of ``num`` runs, such as ``PPO on CartPole-v1, 5 seeds``."""
    where = f" on {env_name(config.env)}" if config.env is not None else ""
    return f"{kind.name}{where}, {num} {noun}{'s' if num != 1 else ''}"


def failures(jobs: Sequence[TrainingJob], outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each distinct error, with the names of the runs that failed with it."""
    found: dict[str, list[TrainingJob]] = {}
    for job, outcome in zip(jobs, outcomes, strict=True):
        if outcome.error is not None:
            found.setdefault(outcome.error, []).append(job)
    return [
        f"{', '.join(job.name for job in failed)} failed: {error} (see {failed[0].out / OUTPUT})"
        for error, failed in found.items()
    ]


def algorithm_of(config: type[AlgorithmConfig]) -> type[Algorithm[Any]]:
    """The algorithm whose settings class is ``config``.

    Raises:
        SettingsError: there is no such algorithm, or more than one.
    """
    known = list[type[Algorithm[Any]]](Algorithm.__subclasses__())
    for cls in known:
        known += [inner for inner in cls.__subclasses__() if inner not in known]
    # A user's algorithm may inherit from PPO and share PPO's settings; the settings still belong to PPO.
    own = [cls for cls in known if cls.__dict__.get("Config") is config and cls.loss is not Algorithm.loss]
    if len(own) != 1:
        names = ", ".join(cls.__name__ for cls in own) or "no algorithm"
        raise SettingsError(f"{config.__name__} are the settings of {names}. Pass the right one as `algorithm`.")
    return own[0]


# -- in the process of a run ------------------------------------------------------------------------------------------


def run_job() -> None:
    """The main function of the process of a run: train it, report results, and end.

    If the process that started it has ended, it saves and ends, too.
    """
    number, (parent, fd, preparation, pickled) = spawning.receive_job()
    os.close(number)
    os.set_inheritable(fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process handles it, and sends a SIGTERM
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGTERM), parent)  # to save and end
    sender: Connection[Any, Any] = Connection(fd, readable=False)
    with sender:
        try:
            outcome = _train(spawning.unpickle(preparation, pickled), sender)
        except KeyboardInterrupt:
            outcome = Outcome(is_interrupted=True)
        except EtudeError as error:
            outcome = Outcome(error=str(error))
            sys.stderr.write(f"error: {error}\n")
        except BaseException as error:  # noqa: BLE001  sent to the other process
            outcome = Outcome(error=described(error))
            traceback.print_exc()
        with contextlib.suppress(OSError):  # the other process is gone
            sender.send(outcome)


class _Reports:
    """Sends results to the process that shows progress, at most a few per second."""

    def __init__(self, sender: "Connection[Any, Any]") -> None:
        self._sender, self._sent_at = sender, 0.0

    def show(self, result: Result) -> None:
        if time.monotonic() - self._sent_at >= 2 * _POLL:
            self._sent_at = time.monotonic()
            with contextlib.suppress(OSError):
                self._sender.send(result)

    def close(self) -> None:
        """Do nothing: the last result is sent with the outcome."""


def _train(job: TrainingJob, sender: "Connection[Any, Any]") -> Outcome:
    job = replace(job, out=job.out.absolute())  # an env may change the current folder

    def outcome(result: Result) -> Outcome:
        is_whole = job.stop.now(result) and not needs_evaluation(algorithm.config, result, job.stop)
        return Outcome(result, is_interrupted=signals.is_set() and not is_whole)

    def concluded(result: Result) -> int:
        sender.send(outcome(result))
        return INTERRUPTED

    changes = {"engine": "local"} | dict(job.changes)
    with (
        Signals(quiet=True, kill=kill_workers) as signals,
        claimed(job.out),
        closing(load(job.out, trust=job.trust, **changes) if job.goes_on else job.algorithm(job.config)) as algorithm,
    ):
        algorithm.check_stop(job.stop)
        algorithm.prepare()
        if job.overwrite or (job.resume and not job.goes_on):  # it was killed before its first checkpoint
            clear(job.out)
        kept = None if job.kept_in is None else job.kept_in(job.out)
        how = (_Reports(sender), job.log, kept, job.save_interval)
        return outcome(algorithm.fit_in(job.out, job.stop, signals, *how, concluded=concluded))
