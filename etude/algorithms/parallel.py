# SPDX-License-Identifier: Apache-2.0
"""Runs side by side, each in a process and a folder of its own."""

import contextlib
import os
import pickle
import shlex
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

from etude import spawning
from etude.algorithms.algorithm import Algorithm
from etude.algorithms.config import ActingConfig, AlgorithmConfig, OfflineConfig
from etude.algorithms.kept import Checkpoints
from etude.algorithms.loading import load
from etude.algorithms.progress import Board, say
from etude.algorithms.results import Result, Stop
from etude.algorithms.run import Log, check_free, check_logs, check_run_of, claimed, clear, holds_run
from etude.algorithms.saving import name_of
from etude.checkpoints import MANIFEST, load_meta
from etude.envs import kill_workers
from etude.errors import EtudeError, SettingsError
from etude.interruption import INTERRUPTED, Signals
from etude.threads import for_acting, usable_cores

OUTPUT: Final = "log.txt"
"""The file in the folder of a run with what its process wrote to standard output and error."""
_POLL: Final = 0.25
"""Seconds between two checks of the processes."""
_EXIT_TIME: Final = 10.0
"""Seconds for a process to end once it has said all; then it is killed."""
_COMMAND: Final = spawning.command("etude.algorithms.parallel", "run_job")


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A run that is to be trained in a process of its own."""

    name: str
    """What it is called in what is shown."""
    algorithm: type[Algorithm[Any]]
    config: AlgorithmConfig
    """Its settings, if it begins."""
    changes: Mapping[str, Any]
    """Settings that count more than those of its checkpoint, if it goes on."""
    out: Path
    stop: Stop
    resume: bool = False
    """Go on from the checkpoint in ``out``, if there is one."""
    overwrite: bool = False
    trust: bool = False
    log: Sequence[Log] = ("jsonl", "tensorboard")
    save_interval: float = 60.0
    kept_in: Callable[[Path], Checkpoints | None] | None = None
    """What keeps other checkpoints of a run in a folder."""

    @property
    def goes_on(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return self.resume and (self.out / MANIFEST).exists()

    def check(self) -> None:
        """Raise a SettingsError where it can't begin: its folder has another run, or its settings do not fit."""
        config = self.config
        if config.engine != "local":
            raise SettingsError(
                "`engine` is a Ray cluster, but these runs are processes of this machine: leave it out, or see "
                "`etude tune`, which spreads runs over a cluster."
            )
        if config.record.path is not None:
            raise SettingsError(
                "`record.path`: several runs can't write one recording. Leave it out, and record trained runs "
                "afterwards (etude record)."
            )
        if self.overwrite and self.resume:
            raise SettingsError("runs can't be both resumed and overwritten: leave one of these out.")
        if not (self.overwrite or self.resume) and holds_run(self.out):
            raise SettingsError(
                f"{self.out} holds a run already. Go on with all that are in {self.out.parent} (--resume "
                f"{shlex.quote(str(self.out.parent))}; in Python resume=True), replace them (--overwrite, "
                "overwrite=True), or give another folder (--out)."
            )
        if self.goes_on:
            check_run_of(self.out, name_of(self.algorithm), self.algorithm.name)

    def finished(self) -> Result | None:
        """The last result of the run that is there, if it has met its goal or used its budget up."""
        if not self.goes_on:
            return None
        saved = load_meta(self.out).get("result") or {}
        try:
            result = Result(**saved)
        except TypeError:  # of another version
            return None
        return result if self.stop.now(result) else None


class Outcome(NamedTuple):
    """How a run ended."""

    result: Result | None = None
    """The last one; None where it failed, or was interrupted before it began."""
    error: str | None = None
    is_interrupted: bool = False


def cores_of(config: AlgorithmConfig) -> int:
    """The cores that a run with these settings keeps busy on this machine: its threads and its worker processes."""
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
    """Train all of these, several at a time, and give how they ended, in their order.

    A run that fails ends no other. SIGINT, SIGTERM and SIGHUP let all runs save and end; a second one ends them at
    once. If this process is killed, the runs save and end by themselves.

    Args:
        jobs: The runs, at least one. Those that have ended already are not trained again.
        out: The folder that theirs are in; it is claimed.
        title: What is trained, for what is shown.
        max_concurrent: How many are trained at a time, at least 1; None: as many as the cores allow.
        quiet: Show nothing.
        say: Takes lines, where nothing can be shown live.
        ended: Called with the number of each run that has ended.

    Raises:
        SettingsError: a run can't begin or be sent to a process; none has begun then.
        KeyboardInterrupt: a second signal came, or the first before the runs began.
    """
    if spawning.is_importing_main():
        raise SettingsError(
            "a process imports your script to find what it defines, and the script trains runs itself. Put what it "
            'does, other than imports and definitions, under `if __name__ == "__main__":`.'
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
        check_free(out, False, overwrite=False)
        for job in jobs:
            job.check()
            check_logs(job.log)
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
                    except OSError as error:  # such as for want of memory; the others go on
                        note(number, Outcome(error=f"its process can't be started: {error}."))
                    else:
                        board.begin(jobs[number].name)
                if signals.is_set():
                    for child in running.values():
                        child.interrupt()
                connection.wait([child.hears for child in running.values() if not child.hears.closed], _POLL)
                for number, child in list(running.items()):
                    for result in child.results():
                        board.show(jobs[number].name, result)
                    if child.has_ended():
                        del running[number]
                        note(number, child.ending())
        finally:
            kill()
    return [outcomes.get(number, Outcome(is_interrupted=True)) for number in range(len(jobs))]


def _state(outcome: Outcome) -> str:
    return "failed" if outcome.error is not None else "interrupted" if outcome.is_interrupted else "done"


def _sendable(job: TrainingJob) -> tuple[Mapping[str, Any], bytes]:
    """What a process gets of a run: how to import what it is made of, and the run itself."""
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
            "the settings name what is defined in this interactive session, where another process can't find it: put "
            "it into a module (a .py file) and import it."
        )
    return spawning.preparation(needs_main=needs_main), pickled


class _Child:
    """The process of a run, as the process that started it knows it."""

    def __init__(self, job: TrainingJob, sent: tuple[Mapping[str, Any], bytes]) -> None:
        self._outcome: Outcome | None = None
        self._is_interrupted = False
        self._silent_since = 0.0
        mode = "ab" if job.goes_on else "wb"
        job.out.mkdir(parents=True, exist_ok=True)
        self.hears, tells = Pipe(duplex=False)
        with tells, (job.out / OUTPUT).open(mode) as log:
            given = (os.getpid(), tells.fileno(), *sent)
            self._process = spawning.start(_COMMAND, given, fds=[tells.fileno()], stdout=log, stderr=log)

    def results(self) -> Iterator[Result]:
        """What it has reported since this was last asked."""
        try:
            while not self.hears.closed and self.hears.poll():
                said = self.hears.recv()
                if isinstance(said, Result):
                    yield said
                else:
                    self._outcome = said
        except (EOFError, OSError):
            self.hears.close()
            self._silent_since = time.monotonic()

    def interrupt(self) -> None:
        """Let it save and end."""
        if not self._is_interrupted:
            self._is_interrupted = True
            self._process.terminate()

    def has_ended(self) -> bool:
        """Whether it has; it is killed where it does not end though it has said all."""
        if self.hears.closed and time.monotonic() - self._silent_since > _EXIT_TIME:
            self.kill()
        return self._process.poll() is not None and self.hears.closed

    def ending(self) -> Outcome:
        """How it ended."""
        if self._outcome is not None:
            return self._outcome
        code = self._process.returncode
        if self._is_interrupted:  # it ended before it could train, or was killed by its guard
            return Outcome(is_interrupted=True)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        hint = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
        return Outcome(error=f"its process {how}{hint}.")

    def kill(self) -> None:
        """End it at once, with what its envs have started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.hears.close()


# -- in the process of a run ------------------------------------------------------------------------------------------


def run_job() -> None:
    """Be the process of a run: train it, report, and end; also when the process that started it has ended."""
    number, (parent, fd, preparation, pickled) = spawning.received()
    os.close(number)
    os.set_inheritable(fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it comes to the other process, which passes on a SIGTERM
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    tells: Connection[Any, Any] = Connection(fd, readable=False)
    with tells:
        try:
            outcome = _train(spawning.unpickled(preparation, pickled), tells)
        except KeyboardInterrupt:
            outcome = Outcome(is_interrupted=True)
        except EtudeError as error:
            outcome = Outcome(error=str(error))
            sys.stderr.write(f"error: {error}\n")
        except Exception as error:  # noqa: BLE001  told to the other process
            outcome = Outcome(error=f"{type(error).__name__}: {error}")
            traceback.print_exc()
        with contextlib.suppress(OSError):  # there is nobody to tell
            tells.send(outcome)


def _end_with(parent: int) -> None:
    """Once the process that started this one is gone, end as by a signal: save first."""
    while os.getppid() == parent:
        time.sleep(_POLL)
    os.kill(os.getpid(), signal.SIGTERM)


class _Reports:
    """Sends results to the process that shows them, a few a second."""

    def __init__(self, tells: "Connection[Any, Any]") -> None:
        self._tells, self._sent_at = tells, 0.0

    def show(self, result: Result) -> None:
        if time.monotonic() - self._sent_at >= 2 * _POLL:
            self._sent_at = time.monotonic()
            with contextlib.suppress(OSError):
                self._tells.send(result)

    def close(self) -> None:
        """The last result goes with the outcome."""


def _train(job: TrainingJob, tells: "Connection[Any, Any]") -> Outcome:
    def outcome(result: Result) -> Outcome:
        return Outcome(result, is_interrupted=signals.is_set() and not job.stop.now(result))

    def concluded(result: Result) -> int:
        tells.send(outcome(result))
        return INTERRUPTED

    with Signals(quiet=True, kill=kill_workers) as signals, claimed(job.out), closing(_made(job)) as algorithm:
        algorithm.check_stop(job.stop)
        algorithm.prepare()
        if job.overwrite or (job.resume and not job.goes_on):  # it was killed before its first checkpoint
            clear(job.out)
        kept = None if job.kept_in is None else job.kept_in(job.out)
        how = (_Reports(tells), job.log, kept, job.save_interval)
        return outcome(algorithm.fit_in(job.out, job.stop, signals, *how, concluded=concluded))


def _made(job: TrainingJob) -> Algorithm[Any]:
    if job.goes_on:
        return load(job.out, trust=job.trust, **{"engine": "local"} | dict(job.changes))
    return job.algorithm(job.config)
