# SPDX-License-Identifier: Apache-2.0
"""``etude tune``: train with many settings, and see which are best."""

import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from etude.algorithms import ALGORITHMS
from etude.algorithms.saving import to_plain
from etude.cli import files, flags, words
from etude.cli.arguments import algorithm_class
from etude.cli.streams import say, show
from etude.cli.tune_arguments import ResumeOptions, ask, check_ray
from etude.errors import SettingsError

if TYPE_CHECKING:
    from etude.ray import Tuned

FAILED, INTERRUPTED = 1, 130
HELP = f"""usage: etude tune ALGORITHM [SETTINGS] --space.NAME VALUES ... --stop.env-steps N [OPTIONS]
       etude tune --resume OUT --trust

ALGORITHM is one of {", ".join(ALGORITHMS)}, or `module:Class` of your own.
All its settings, and the options: etude tune ALGORITHM --help

VALUES of a setting that is tried, for each of --samples:
  0.1,0.2,0.3           one of these, drawn (also choice:0.1,0.2,0.3)
  grid:0.1,0.2,0.3      each of these, with each of the other grids' values
  uniform:0.1,0.3       a number between these
  loguniform:1e-4,1e-2  a number between these, whose logarithm is even
  randint:1,10          a whole number from the first up to, but not including, the second
  lograndint:8,1024     the same, whose logarithm is even
  64+64,256+256         + between the parts of settings that have several
"""


def main(args: list[str]) -> int:
    """Run ``etude tune ALGORITHM ...``."""
    if args and args[0].partition("=")[0] == "--resume":
        return resume(args)
    if not args or args[0].startswith("-"):
        if not {"-h", "--help"} & set(args):
            names = ", ".join(ALGORITHMS)
            raise SettingsError(f"etude tune needs an algorithm: {names}, or `module:Class`. Put it first.")
        sys.stdout.write(HELP)
        return 0
    asked = ask(algorithm_class(args[0]), args[0], args[1:])
    options = asked.options
    from etude.ray import tune

    with _told(quiet=options.quiet):
        found = tune(
            asked.config,
            asked.space,
            stop=options.stop,
            num_samples=options.samples,
            metric=options.metric,
            mode=options.best_is,
            algorithm=asked.cls,
            resources=options.resources,
            max_concurrent=options.max_concurrent,
            out=options.out,
            save_interval=options.save_interval,
            keep=options.keep,
            max_failures=options.max_failures,
            address=options.address,
            verbose=0 if options.quiet else 1,
        )
    return report(found, as_json=options.json)


def resume(args: list[str]) -> int:
    """Run ``etude tune --resume OUT``."""
    about = "Go on with a tuning that was interrupted."
    options = flags.options(ResumeOptions, args, prog="etude tune", about=about)
    check_ray()
    from etude.ray.tuning import check_tuning, resume_tuning

    check_tuning(options.resume)
    if not options.trust:
        raise SettingsError(
            f"Tune keeps pickles in {options.resume}, and to load them runs code from these files: add --trust if "
            "nobody else could write there."
        )
    words.import_from_here()
    with _told(quiet=options.quiet):
        found = resume_tuning(options.resume, address=options.address)
    return report(found, as_json=options.json)


def report(found: "Tuned", *, as_json: bool) -> int:
    """Write what a tuning found to standard output; gives the exit code."""
    ranked = found.ranked()
    best = ranked[0] if ranked else None
    if as_json:
        trials = [
            {
                "settings": {name: to_plain(value) for name, value in trial.settings.items()},
                "score": trial.score,
                "result": trial.result,
                "checkpoint": trial.checkpoint,
                "path": trial.path,
                "error": trial.error,
            }
            for trial in found.trials
        ]
        about = {"metric": found.metric, "out": found.path, "interrupted": found.is_interrupted}
        files.print_json({**about, "best": best and found.trials.index(best), "trials": trials})
    else:
        show(found.table())
        if best is not None:
            show(f"\nbest: {found.metric} {best.score:,.5g}, checkpoint {best.checkpoint}")
    if found.is_interrupted:
        say(f"interrupted: go on with: etude tune --resume {shlex.quote(str(found.path))} --trust")
        return INTERRUPTED
    return FAILED if found.errors else 0


@contextlib.contextmanager
def _told(*, quiet: bool) -> Iterator[None]:
    """Let what Tune writes go to standard error, or nowhere; and SIGTERM and SIGHUP end the trials as Ctrl-C does."""
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    is_main = threading.current_thread() is threading.main_thread()
    for number in before if is_main else ():
        signal.signal(number, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if quiet else sys.stderr):
            yield
    finally:
        for number, handler in before.items() if is_main else ():
            signal.signal(number, handler)
