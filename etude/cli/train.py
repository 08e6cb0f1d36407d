# SPDX-License-Identifier: Apache-2.0
"""``etude train``: an algorithm from flags and files, trained until it is to stop, with all that it leaves behind."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from etude.algorithms import Algorithm, Result, Stop
from etude.cli import files, flags, folders, live, logs, watch
from etude.cli.arguments import ALGORITHMS, TrainOptions, algorithm_class, ask, make
from etude.cli.streams import say
from etude.envs import env_name
from etude.errors import SettingsError

GOAL_MISSED = 3
INTERRUPTED = 130


def main(args: list[str]) -> int:
    """Run ``etude train ALGORITHM ...``."""
    names = ", ".join(ALGORITHMS)
    if not args or args[0].startswith("-"):
        text = (
            "usage: etude train ALGORITHM [OPTIONS]\n\n"
            f"ALGORITHM is one of {names}, or `module:Class` of your own.\n"
            "All its settings: etude train ALGORITHM --help\n"
        )
        if not {"-h", "--help"} & set(args):
            raise SettingsError(f"etude train needs an algorithm: {names}, or `module:Class`. Put it first.")
        sys.stdout.write(text)
        return 0
    asked = ask(algorithm_class(args[0]), args[0], args[1:])
    options, out = asked.options, asked.out
    logs.check(options.log)
    # Claimed before a checkpoint is read: who has the folder may save a newer one meanwhile.
    with folders.claimed(out), flags.said_as("--record.append"):
        folders.check_free(out, options.resume, overwrite=options.overwrite)
        with closing(make(asked)) as algorithm:
            algorithm.check_stop(options.stop)  # before anything is replaced
            algorithm.prepare()
            watch.TrainingClips(options.clip_interval, out).check(algorithm)
            if options.overwrite:
                folders.clear(out)
            return run(algorithm, out, options)


def run(algorithm: Algorithm[Any], out: Path, options: TrainOptions) -> int:
    """Train until ``options.stop`` says so or a signal comes, leaving metrics and checkpoints in ``out``.

    Returns:
        0 where the goal was met or none was set, 3 where a budget ran out before, 130 where it was interrupted.
    """
    stop, start, saved = options.stop, algorithm.iteration, time.monotonic()
    clips = watch.TrainingClips(options.clip_interval, out)
    kept = options.checkpoints.kept_in(out)

    def save(result: Result) -> None:
        algorithm.save(out, result=result)
        if kept is not None:
            kept.save(algorithm, result)

    view = live.view(_title(algorithm), stop, quiet=options.quiet)
    if stop == Stop() and not options.quiet:
        say("nothing says when to stop (--stop....): Ctrl-C saves and ends it")
    with (
        logs.opened(options.log, out, start) as log,
        _signals(quiet=options.quiet) as interrupted,
        view,
    ):
        for result in algorithm.iterate(stop):
            if result.iteration > start:  # else there was nothing left to do
                log.write(result, algorithm)
                clips.after(result, algorithm, log.board)
            view.show(result)
            if interrupted.is_set():
                break
            if time.monotonic() - saved >= options.save_interval:
                save(result)
                saved = time.monotonic()
        save(result)
    met = stop.goals_met(result)
    cut = interrupted.is_set() and not stop.now(result)
    if not options.quiet:
        say(_ending(algorithm, out, result, stop, cut=cut))
    if options.json:
        about = {"algorithm": algorithm.name, "out": str(out), "goal_met": met, "interrupted": cut}
        files.print_json(result.to_dict() | about)
    return INTERRUPTED if cut else 0 if met else GOAL_MISSED


@contextmanager
def _signals(*, quiet: bool) -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second one acts as ever."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in old.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: FrameType | None) -> None:
        event.set()
        restore()
        if not quiet:
            os.write(2, b"\ninterrupted: ends after this iteration; once more, and it ends now.\n")

    for number in old:
        signal.signal(number, on_signal)
    try:
        yield event
    finally:
        restore()


def _title(algorithm: Algorithm[Any]) -> str:
    env = algorithm.config.env
    return f"{algorithm.name} on {env_name(env)}" if env is not None else algorithm.name


def _ending(algorithm: Algorithm[Any], out: Path, result: Result, stop: Stop, *, cut: bool) -> str:
    name = algorithm.name or f"{type(algorithm).__module__}:{type(algorithm).__qualname__}"
    if cut:
        return f"interrupted: the checkpoint is in {out}. Go on with: etude train {name} --resume {out}"
    if not stop.goals_met(result):
        return (
            f"a budget ran out with a mean return of {result.return_mean:,.1f}, short of {stop.return_mean:,.6g}. "
            f"The checkpoint is in {out}; go on with: etude train {name} --resume {out} and a larger budget."
        )
    reached = "goal met" if stop.return_mean is not None else "done"
    return f"{reached} after {result.seconds:.1f} s of training. The run is in {out}"
