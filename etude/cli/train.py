# SPDX-License-Identifier: Apache-2.0
"""``etude train``: an algorithm from flags and files, trained until it is to stop, with all that it leaves behind."""

import contextlib
import os
import shlex
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from etude.algorithms import ALGORITHMS, Algorithm, Result, Stop
from etude.algorithms.saving import name_of, names_code
from etude.cli import files, flags, folders, live, logs, watch
from etude.cli.arguments import TrainOptions, algorithm_class, ask, make
from etude.cli.streams import say
from etude.envs import env_name, kill_workers
from etude.errors import SettingsError
from etude.interruption import INTERRUPTED, Interrupted, Signals

GOAL_MISSED = 3


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
            raise SettingsError(
                f"etude train needs an algorithm: {names}, or `module:Class`. Put it first, as in etude train ppo "
                "--env CartPole-v1, or etude train ppo --resume runs/ppo."
            )
        sys.stdout.write(text)
        return 0
    asked = ask(algorithm_class(args[0]), args[0], args[1:])
    options, out = asked.options, asked.out
    logs.check(options.log)
    # Claimed before a checkpoint is read: who has the folder may save a newer one meanwhile.
    with (
        Signals(quiet=options.quiet, kill=kill_workers) as signals,
        folders.claimed(out),
        flags.said_as("--record.append"),
    ):
        folders.check_free(out, options.resume, overwrite=options.overwrite)
        with closing(make(asked)) as algorithm:
            algorithm.check_stop(options.stop)  # before anything is replaced
            algorithm.prepare()
            watch.TrainingClips(options.clip_interval, out).check(algorithm)
            if options.overwrite:
                folders.clear(out)
            return train(algorithm, out, options, signals)


def run(algorithm: Algorithm[Any], out: Path, options: TrainOptions) -> int:
    """Train as `train` does, with signals handled meanwhile."""
    with Signals(quiet=options.quiet, kill=kill_workers) as signals:
        return train(algorithm, out, options, signals)


def train(algorithm: Algorithm[Any], out: Path, options: TrainOptions, signals: Signals) -> int:
    """Train until ``options.stop`` says so or a signal comes, leaving metrics and checkpoints in ``out``.

    Returns:
        0 where the goal was met or none was set, 3 where a budget ran out before, 130 where it was interrupted.
    """
    stop, start, saved = options.stop, algorithm.iteration, time.monotonic()
    clips = watch.TrainingClips(options.clip_interval, out)
    kept = options.checkpoints.kept_in(out)
    result = algorithm.standing()

    def save() -> None:
        folders.check_same(out, begun)
        algorithm.save(out, result=result)
        if kept is not None:
            kept.add(out, result)

    def report() -> int:
        met = stop.goals_met(result)
        cut = signals.is_set() and not stop.now(result)
        if not options.quiet:
            say(_ending(algorithm, out, result, stop, cut=cut))
        if options.json:
            about = {"algorithm": algorithm.name, "out": str(out), "goal_met": met, "interrupted": cut}
            files.print_json(result.to_dict() | about)
        return INTERRUPTED if cut else 0 if met else GOAL_MISSED

    def conclude() -> int:
        save()
        view.__exit__(None, None, None)
        return report()

    if algorithm.config.engine != "local":
        signals.wait()
    view = live.view(_title(algorithm), stop, quiet=options.quiet)
    if stop == Stop() and not options.quiet:
        say("nothing says when to stop (--stop....): Ctrl-C saves and ends it")
    with logs.opened(options.log, out, start) as log, view:
        begun = os.stat(out)
        signals.conclude = conclude
        with contextlib.suppress(Interrupted):  # then the running iteration is lost
            for result in algorithm.iterate(stop):
                if result.iteration > start:  # else there was nothing left to do
                    log.write(result, algorithm)
                    clips.after(result, algorithm, log)
                view.show(result)
                if signals.is_set():
                    break
                if time.monotonic() - saved >= options.save_interval:
                    save()
                    saved = time.monotonic()
        with signals.concluding():
            save()
    return report()


def _title(algorithm: Algorithm[Any]) -> str:
    env = algorithm.config.env
    return f"{algorithm.name} on {env_name(env)}" if env is not None else algorithm.name


def _ending(algorithm: Algorithm[Any], out: Path, result: Result, stop: Stop, *, cut: bool) -> str:
    if cut:
        return f"interrupted: the checkpoint is in {out}. Go on with: {_to_go_on(algorithm, out)}"
    if not stop.goals_met(result):
        return (
            f"a budget ran out with a mean return of {result.return_mean:,.1f}, short of {stop.return_mean:,.6g}. "
            f"The checkpoint is in {out}; go on with: {_to_go_on(algorithm, out)} and a larger budget."
        )
    reached = "goal met" if stop.return_mean is not None else "done"
    return f"{reached} after {result.seconds:.1f} s of training. The run is in {out}"


def _to_go_on(algorithm: Algorithm[Any], out: Path) -> str:
    """The command; with the engine, and with trust in the user's own code, which checkpoints do not bring along."""
    kind = type(algorithm)
    name = next((name for name, cls in ALGORITHMS.items() if cls is kind), name_of(kind))
    engine = "" if algorithm.config.engine == "local" else " --engine ray"
    trust = " --trust" if names_code(algorithm.config) else ""
    return f"etude train {name} --resume {shlex.quote(str(out))}{engine}{trust}"
