# SPDX-License-Identifier: Apache-2.0
"""``etude tune``: train with many settings, and see which are best."""

import contextlib
import importlib.util
import math
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal

from etude.algorithms import Algorithm, AlgorithmConfig
from etude.algorithms.kept import check_metric
from etude.algorithms.saving import to_plain
from etude.cli import flags, values
from etude.cli.asked import CONVERTERS, RunOptions, algorithm_class, ask, config_of, import_from_here
from etude.cli.streams import print_json, say, show
from etude.errors import EngineError, SettingsError, how_to_install
from etude.settings import Leaf, leaves_of, settings, settings_inside, typed
from etude.urls import inside, is_url

FAILED, INTERRUPTED, SPACE = 1, 130, "--space."
USAGE = """usage: etude tune ALGORITHM [SETTINGS] --space.NAME VALUES ... --stop.env-steps N [OPTIONS]
       etude tune --resume OUT --trust

ALGORITHM is one of {names}, or `module:Class` of your own.
Its settings, and the options: etude tune ALGORITHM --help, all of them: --help-all

VALUES of a setting that is tried, for each of --samples:
  0.1,0.2,0.3           one of these, drawn (also choice:0.1,0.2,0.3)
  grid:0.1,0.2,0.3      each of these, with each of the other grids' values
  uniform:0.1,0.3       a number between these
  loguniform:1e-4,1e-2  a number between these, whose logarithm is even
  randint:1,10          a whole number from the first up to, but not including, the second
  lograndint:8,1024     the same, whose logarithm is even
  64+64,256+256         + between the parts of settings that have several
"""
ABOUT = "Train with many settings, and see which are best. What --space.NAME takes: etude tune --help"


@settings
class TuneOptions(RunOptions):
    """What `etude tune` takes besides the settings of the algorithm."""

    everyday: ClassVar[tuple[str, ...]] = ("space", "samples", "metric", "best_is", "out")

    space: str | None = None
    """A YAML or JSON file with what is tried, by setting: the words of --space.NAME, or a list, each of whose values is
    tried; --space.NAME counts more."""

    samples: int = 1
    """How often the search space is drawn from, at least 1; each time, all of its grids are gone through."""

    metric: str = "return_mean"
    """The field of results that says which trial is best; `losses/policy` is an entry of a field."""

    best_is: Literal["max", "min"] = "max"
    """Whether a large one is good, or a small one."""

    out: str | None = None
    """The folder of all trials, or its URL. None: runs/tune-ALGORITHM-ENV-TIME."""

    max_concurrent: int | None = None
    """How many trials go on at the same time at most; none: as many as there is room for."""

    resources: Mapping[str, float] | None = None
    """Of each trial itself, such as CPU=2 GPU=0.5. None: a CPU for each thread and each worker, and a GPU where it
    learns on one."""

    keep: int = 3
    """How many checkpoints of each trial are kept, those with the best metric; besides, the newest. At least 1."""

    max_failures: int = 0
    """How often a trial that failed goes on again from its newest checkpoint."""

    cluster: str | None = None
    """The Ray cluster: `auto`, `host:port`. None: the one that RAY_ADDRESS names, else one of this machine alone."""


@settings
class Resume:
    """Go on with a tuning that was interrupted; all else is as it was."""

    resume: str
    """Go on with the trials in this folder that have not ended, from their newest checkpoints. Tune keeps there, as
    pickles, what was asked for, so that this runs code from the folder: it takes `trust`."""

    trust: bool = False
    """The folder is your own: load its pickles, and import whatever they name."""

    cluster: str | None = None
    """The Ray cluster, as for a new tuning."""

    quiet: bool = False
    """Print nothing but the trials and errors."""

    json: bool = False
    """Print the trials as one JSON object on standard output."""

    def execute(self) -> int:
        """Go on, and print the trials."""
        _check_ray()
        from etude.ray.tuning import check_tuning, resume_tuning

        check_tuning(self.resume)
        if not self.trust:
            raise SettingsError(
                f"Tune keeps pickles in {self.resume}, and to load them runs code from these files: add --trust if "
                "nobody else could write there."
            )
        import_from_here()
        with _told(quiet=self.quiet):
            found = resume_tuning(self.resume, address=self.cluster)
        return report(found, self.resume if is_url(self.resume) else None, as_json=self.json)


def main(command: str, args: list[str]) -> int:
    """Run ``etude tune ALGORITHM ...``, or ``etude tune --resume OUT``."""
    if args and args[0].partition("=")[0] == "--resume":
        return flags.run(Resume, args, prog="etude tune")
    cls = algorithm_class(args, "tune", USAGE)
    if cls is None:
        return 0
    config, space, options = asked(cls, args)
    from etude.ray import tune

    same = ("stop", "metric", "resources", "max_concurrent", "out", "save_interval", "keep", "max_failures")
    how: dict[str, Any] = {name: getattr(options, name) for name in same}
    how |= {"num_samples": options.samples, "mode": options.best_is, "address": options.cluster}
    how["verbose"] = 0 if options.quiet else 1
    with _told(quiet=options.quiet):
        found = tune(config, space, algorithm=cls, **how)
    return report(found, options.out if options.out and is_url(options.out) else None, as_json=options.json)


def asked(cls: type[Algorithm[Any]], args: list[str]) -> tuple[AlgorithmConfig, dict[str, Any], TuneOptions]:
    """The settings that all trials share, the search space and the options that a command line asks for."""
    tried, rest = split(args)
    owner, given, options = ask(cls, TuneOptions, rest, "tune", ABOUT)
    check_metric(options.metric)
    _check_ray()
    config = config_of(cls, given, owner)
    space = _spaces(cls.Config, options.space, tried, owner)
    if not space and options.samples == 1:
        raise SettingsError(f"{owner} has nothing to try: give --space.lr loguniform:1e-4,1e-2, or --space FILE.")
    return config, space, options


def _check_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise EngineError(f"etude tune needs Ray: {how_to_install('ray')}.")


def split(args: list[str]) -> tuple[dict[str, str], list[str]]:
    """The search space in the arguments, by the names that are given; and the other arguments."""
    tried, rest, left = dict[str, str](), list[str](), iter(args)
    for word in left:
        flag, equals, value = word.partition("=")
        if not flag.startswith(SPACE):
            rest.append(word)
            continue
        value = value if equals else next(left, "")
        if not value or value.startswith("--"):
            raise SettingsError(f"{flag} needs what to try, such as 1e-4,1e-3 or uniform:1e-4,1e-3.")
        if tried.setdefault(flag.removeprefix(SPACE), value) != value:
            raise SettingsError(f"{flag} is there twice: put all its values behind one.")
    return tried, rest


def _spaces(kind: type[AlgorithmConfig], file: str | None, tried: Mapping[str, str], owner: str) -> dict[str, Any]:
    """The search space of a file and of flags, by the settings' dotted names.

    Raises:
        SettingsError: a name is unknown, or what is written is no search space.
    """
    from etude.ray.space import flat

    leaves = leaves_of(kind)
    whole = {leaf.path[0] for leaf in leaves if len(leaf.path) == 1}  # such as the engine, which may also be a word
    inner = [leaf for name, cls in settings_inside(kind).items() if name in whole for leaf in leaves_of(cls, (name,))]
    names, found = flags.FlagNames([*leaves, *inner]), dict[str, Any]()
    for name, value in {**flat(kind, values.read(file) if file else {}), **tried}.items():
        leaf = names.find(name)
        if leaf is None:
            raise names.unknown(f"--{name}", f"the search space of {owner}", f"etude tune {owner}")
        found[".".join(leaf.path)] = _space(value, leaf, owner)
    return found


def _space(value: Any, leaf: Leaf, owner: str) -> Any:
    from etude.ray.space import written

    name = ".".join(leaf.path)

    def one(word: str) -> Any:
        parts = word.split("+") if values.takes_many(leaf.hint) else [word]
        value = values.of_words(leaf.hint, parts, f"{owner}.{name}", CONVERTERS)
        return typed(leaf.owner, {leaf.path[-1]: value}, owner=f"{owner}.{name}".rpartition(".")[0])[leaf.path[-1]]

    if isinstance(value, list):
        return [values.made(leaf.hint, item, CONVERTERS) for item in value]
    return written(value, name, one) if isinstance(value, str) else value


def report(found: Any, out: str | None, *, as_json: bool) -> int:
    """Write what a tuning found to standard output, the best trial first; gives the exit code.

    Args:
        found: Tune's results, a `ray.tune.ResultGrid`.
        out: Their folder, or its URL. None: as ``found`` says.
        as_json: As one JSON object rather than a table.
    """
    results = sorted((found[i] for i in range(len(found))), key=lambda result: _number(result.path))
    shared = next((result.config["shared"] for result in results if result.config), None)
    metric, is_max = ("return_mean", True) if shared is None else (shared.metric, shared.mode == "max")
    out = (out or found.experiment_path).rstrip("/")
    trials = [
        _trial(result, metric, is_max, lambda path: inside(out, path.removeprefix(found.experiment_path).lstrip("/")))
        for result in results
    ]
    ranked = sorted(
        trials, key=lambda trial: math.inf if trial["score"] is None else -trial["score"] if is_max else trial["score"]
    )
    best = ranked[0] if ranked and ranked[0]["score"] is not None else None
    is_interrupted = any(trial["error"] is None and not trial["result"].get("done") for trial in trials)
    if as_json:
        about = {"metric": metric, "out": out, "interrupted": is_interrupted}
        print_json({**about, "best": best and trials.index(best), "trials": trials})
    else:
        show(_table(ranked, metric))
        if best is not None:
            show(f"\nbest: {metric} {best['score']:,.5g}, checkpoint {best['checkpoint']}")
    if is_interrupted:
        say(f"interrupted: go on with: etude tune --resume {shlex.quote(out)} --trust")
        return INTERRUPTED
    return FAILED if found.num_errors else 0


def _number(path: str) -> int:
    """Of a trial, by its folder, such as Trainable_03ef8_00001_1_lr=0.1: a resumed tuning has another order."""
    found = re.search(r"_[0-9a-f]{5}_(\d+)_", path.rpartition("/")[2])
    return int(found[1]) if found else 0


def _trial(result: Any, metric: str, is_max: bool, address: Callable[[str], str]) -> dict[str, Any]:
    """What is written about a trial."""
    metrics = result.metrics or {}
    newest = {name: value for name, value in metrics.items() if name != "config"}
    score = newest.get(metric)
    try:
        checkpoint = result.get_best_checkpoint(metric, "max" if is_max else "min")
    except RuntimeError:  # none has the metric
        checkpoint = result.checkpoint
    return {
        "settings": {name: to_plain(value) for name, value in (result.config or {}).items() if name != "shared"},
        "score": score if score is not None and math.isfinite(score) else None,
        "result": newest if "training_iteration" in newest else {},
        "checkpoint": None if checkpoint is None else address(checkpoint.path),
        "path": address(result.path),
        "error": None if result.error is None else str(result.error).strip().splitlines()[-1],
    }


def _table(trials: list[dict[str, Any]], metric: str) -> str:
    names = list(dict.fromkeys(name for trial in trials for name in trial["settings"]))
    rows = [[*names, metric, "iterations", "env_steps", "updates", ""]]
    for trial in trials:
        counts = [f"{trial['result'].get(name, 0):,}" for name in ("training_iteration", "env_steps", "updates")]
        end = trial["error"] or ("" if trial["result"].get("done") else "interrupted")
        tried = [trial["settings"].get(name, "") for name in names]
        shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in tried]
        rows.append([*shown, "" if trial["score"] is None else f"{trial['score']:,.5g}", *counts, end])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = ["  ".join([*(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


@contextlib.contextmanager
def _told(*, quiet: bool) -> Iterator[None]:
    """Let what Tune writes go to standard error, or nowhere; and SIGTERM and SIGHUP end the trials as Ctrl-C does."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name) and is_main]
    before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if quiet else sys.stderr):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
