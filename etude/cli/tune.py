# SPDX-License-Identifier: Apache-2.0
"""``etude tune`` and ``etude sweep``: train with many settings, through Ray Tune or in processes on this machine."""

import contextlib
import csv
import dataclasses
import importlib.util
import io
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np

from etude.algorithms import Algorithm, AlgorithmConfig, Stop
from etude.algorithms.checkpoint import check_metric, score_of
from etude.algorithms.comparison import interval_of
from etude.algorithms.parallel import Outcome, TrainingJob, failures, seed_jobs, seeds_of, title_of, train_all
from etude.algorithms.run import numbered
from etude.algorithms.saving import to_plain
from etude.algorithms.search import applied, flat, trials, written
from etude.cli import flags
from etude.cli.options import (
    CONVERTERS,
    FolderOptions,
    RunOptions,
    algorithm_class,
    ask,
    config_of,
    import_from_here,
)
from etude.cli.streams import say, table, tell
from etude.errors import EngineError, SettingsError, how_to_install
from etude.files import write_atomically
from etude.interruption import INTERRUPTED
from etude.settings import IntFrom1, Leaf, leaves_of, settings, settings_inside, typed
from etude.urls import inside, is_url

SPACE = "--space."
FAILED = 1
TABLE = "sweep.csv"
USAGE = """usage: etude {command} ALGORITHM [SETTINGS] --space.NAME VALUES ... --stop.env-steps N [OPTIONS]

ALGORITHM is one of {names}, or `module:Class` of your own.
Its settings, and the options: etude {command} ALGORITHM --help, all of them: --help-all

VALUES of a setting that is tried, for each of --samples:
  0.1,0.2,0.3           each of these, with each value of the other lists (also grid:0.1,0.2,0.3)
  choice:0.1,0.2,0.3    one of these, drawn
  uniform:0.1,0.3       a number between these
  loguniform:1e-4,1e-2  a number between these, uniform on a log scale
  randint:1,10          a whole number from the first up to, but not including, the second
  lograndint:8,1024     the same, uniform on a log scale
  64+64,256+256         + between the parts of settings that have several
"""
AGAIN = "       etude tune --resume OUT --trust\n"
ABOUT = "Train with many settings{}, and see which are best. What --space.NAME takes: etude {} --help"


@settings
class SearchOptions(RunOptions):
    """Options of both commands, besides the settings of the algorithm."""

    everyday: ClassVar[tuple[str, ...]] = ("space", "samples", "seeds", "metric", "best_is", "out", "resume")

    space: str | None = None
    """YAML or JSON file with the search space: by setting, either the text that --space.NAME takes, or a list of values
    to try. Flags --space.NAME take precedence."""

    samples: IntFrom1 = 1
    """Number of samples of the search space, at least 1; each is tried with all combinations of values in lists."""

    metric: str = "return_mean"
    """Field of results that decides which trial is best; `losses/policy` is an entry of a field."""

    best_is: Literal["max", "min"] = "max"
    """Whether larger or smaller values of the metric are better."""

    max_concurrent: int | None = None
    """Maximum number of runs at a time. None: as many as there is room for."""


@settings
class TuneOptions(SearchOptions):
    """Options of `etude tune`, besides the settings of the algorithm."""

    out: str | None = None
    """Folder or URL of all trials. None: runs/tune-ALGORITHM-ENV-TIME."""

    resources: Mapping[str, float] | None = None
    """Resources of each trial, such as CPU=2 GPU=0.5. None: a CPU for each thread and each worker, and a GPU if it
    learns on one."""

    keep: int = 3
    """Number of checkpoints to keep of each trial, those with the best metric, besides the newest; at least 1."""

    max_failures: int = 0
    """Number of times that a failed trial is resumed from its newest checkpoint; -1: without limit."""

    cluster: str | None = None
    """Address of the Ray cluster: `auto` or `host:port`. None: the one that RAY_ADDRESS names, otherwise a new one on
    this machine."""


@settings
class Resume:
    """Resume an interrupted tuning with its own settings."""

    resume: str
    """Resume the unfinished trials in this folder from their newest checkpoints. Tune stores its arguments there as
    pickles, which can run code when they are loaded: this needs `trust`."""

    trust: bool = False
    """Trust the folder, which must be your own: load its pickles, and import whatever they name."""

    cluster: str | None = None
    """Address of the Ray cluster, as for a new tuning."""

    quiet: bool = False
    """Print only the trials and errors."""

    json: bool = False
    """Print the trials as one JSON object on standard output."""

    def execute(self) -> int:
        """Resume, and print the trials."""
        _check_ray()
        from etude.ray.tuning import check_tuning, resume_tuning

        check_tuning(self.resume)
        if not self.trust:
            raise SettingsError(
                f"Tune keeps pickles in {self.resume}, and to load them runs code: add --trust if the folder is yours."
            )
        import_from_here()
        with _redirected(quiet=self.quiet):
            found = resume_tuning(self.resume, address=self.cluster)
        return report(found, self.resume if is_url(self.resume) else None, as_json=self.json)


@settings
class SweepOptions(SearchOptions, FolderOptions):
    """Options of `etude sweep`, besides the settings of the algorithm."""

    out: str | None = None
    """Folder of all trials, such as OUT/trial-0/seed-0 for the first seed of the first one. None:
    runs/sweep-ALGORITHM-ENV-TIME, or the resumed sweep."""

    seeds: IntFrom1 = 1
    """Number of seeds to train each trial with, at least 1, counted from `seed` (or 0)."""

    resume: str | None = None
    """Continue the sweep in this folder, with the same command otherwise: finished trials are not trained again, the
    others continue from their checkpoints."""


def main(command: str, args: list[str]) -> int:
    """Run ``etude tune ALGORITHM ...``, ``etude sweep ALGORITHM ...``, or ``etude tune --resume OUT``."""
    if command == "sweep":
        _check_whole(args)
    elif args and args[0].partition("=")[0] == "--resume":
        return flags.run(Resume, args, prog="etude tune")
    cls = algorithm_class(args, command, USAGE if command == "sweep" else USAGE.replace("\n", f"\n{AGAIN}", 1))
    if cls is None:
        return 0
    return _sweep(cls, args) if command == "sweep" else _tune(cls, args)


# -- what is tried ----------------------------------------------------------------------------------------------------

S = TypeVar("S", bound=SearchOptions)


def ask_space(
    cls: type[Algorithm[Any]], kind: type[S], args: list[str], command: str
) -> tuple[str, dict[str, Any], dict[str, Any], S]:
    """Parse the command line of `etude tune` or `etude sweep`; see `ask`.

    Args:
        cls: The algorithm's class.
        kind: The class of the command's own options.
        args: The arguments.
        command: ``tune`` or ``sweep``.

    Returns:
        The algorithm's name in messages; its settings; the search space by dotted names; the command's own options.

    Raises:
        SettingsError: there is no search space, or an argument is wrong.
    """
    tried, rest = split(args)
    about = ABOUT.format(" on this machine" if command == "sweep" else "", command)
    owner, given, options = ask(cls, kind, rest, command, about)
    check_metric(options.metric)
    space = _spaces(cls.Config, options.space, tried, owner, command)
    if not space and options.samples == 1:
        raise SettingsError(
            f"the search space of {owner} is empty: give --space.lr loguniform:1e-4,1e-2, or --space FILE."
        )
    return owner, given, space, options


def split(args: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split the arguments into the search space, by the names as they are given, and the other arguments."""
    tried, rest, left = dict[str, str](), list[str](), iter(args)
    for word in left:
        flag, equals, value = word.partition("=")
        if not flag.startswith(SPACE):
            rest.append(word)
            continue
        value = value if equals else next(left, "")
        if not value or value.startswith("--"):
            raise SettingsError(f"{flag} needs values to try, such as 1e-4,1e-3 or uniform:1e-4,1e-3.")
        if tried.setdefault(flag.removeprefix(SPACE), value) != value:
            raise SettingsError(f"{flag} is given twice: give all its values at once.")
    return tried, rest


def _spaces(
    kind: type[AlgorithmConfig], file: str | None, tried: Mapping[str, str], owner: str, command: str
) -> dict[str, Any]:
    """The search space of a file and of flags, which take precedence, by the settings' dotted names.

    Raises:
        SettingsError: a name is unknown, or a value is not a search space.
    """
    leaves = leaves_of(kind)
    whole = {leaf.path[0] for leaf in leaves if len(leaf.path) == 1}  # such as the engine, which may also be a word
    inner = [leaf for name, cls in settings_inside(kind).items() if name in whole for leaf in leaves_of(cls, (name,))]
    names, found = flags.FlagNames([*leaves, *inner]), dict[str, Any]()
    for name, value in {**flat(kind, flags.read(file) if file else {}), **tried}.items():
        leaf = names.find(name)
        if leaf is None:
            raise names.unknown(f"--{name}", f"the search space of {owner}", f"etude {command} {owner}")
        found[".".join(leaf.path)] = _space(value, leaf, owner)
    return found


def _space(value: Any, leaf: Leaf, owner: str) -> Any:
    name = ".".join(leaf.path)

    def one(word: str) -> Any:
        parts = word.split("+") if flags.takes_many(leaf.hint) else [word]
        value = flags.parse_words(leaf.hint, parts, f"{owner}.{name}", CONVERTERS)
        return typed(leaf.owner, {leaf.path[-1]: value}, owner=f"{owner}.{name}".rpartition(".")[0])[leaf.path[-1]]

    if isinstance(value, list):
        return [flags.made(leaf.hint, item, CONVERTERS) for item in value]
    return written(value, name, one) if isinstance(value, str) else value


def rank(score: float | None, *, is_max: bool) -> float:
    """The key that sorts trials by score: the best first, those without a score last."""
    return math.inf if score is None else -score if is_max else score


# -- etude tune -------------------------------------------------------------------------------------------------------


def _tune(cls: type[Algorithm[Any]], args: list[str]) -> int:
    """Run ``etude tune ALGORITHM ...``."""
    config, space, options = asked(cls, args)
    from etude.ray import tune

    same = ("stop", "metric", "resources", "max_concurrent", "out", "save_interval", "keep", "max_failures")
    how: dict[str, Any] = {name: getattr(options, name) for name in same}
    how |= {"num_samples": options.samples, "mode": options.best_is, "address": options.cluster}
    how["verbose"] = 0 if options.quiet else 1
    with _redirected(quiet=options.quiet):
        found = tune(config, space, algorithm=cls, **how)
    return report(found, options.out if options.out and is_url(options.out) else None, as_json=options.json)


def asked(cls: type[Algorithm[Any]], args: list[str]) -> tuple[AlgorithmConfig, dict[str, Any], TuneOptions]:
    """Parse the settings that all trials share, the search space and the options from a command line."""
    owner, given, space, options = ask_space(cls, TuneOptions, args, "tune")
    _check_ray()
    return config_of(cls, given, owner), space, options


def _check_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise EngineError(f"etude tune needs Ray: {how_to_install('ray')}.")


def report(found: Any, out: str | None, *, as_json: bool) -> int:
    """Write the results of a tuning to standard output, the best trial first; return the exit code.

    Args:
        found: Tune's results, a `ray.tune.ResultGrid`.
        out: Their folder, or its URL. None: the path in ``found``.
        as_json: Write one JSON object instead of a table.
    """
    results = sorted((found[i] for i in range(len(found))), key=lambda result: _number(result.path))
    shared = next((result.config["shared"] for result in results if result.config), None)
    metric, is_max = ("return_mean", True) if shared is None else (shared.metric, shared.mode == "max")
    out = (out or found.experiment_path).rstrip("/")
    trials = [
        _trial(result, metric, is_max, lambda path: inside(out, path.removeprefix(found.experiment_path).lstrip("/")))
        for result in results
    ]
    ranked = sorted(trials, key=lambda trial: rank(trial["score"], is_max=is_max))
    best = ranked[0] if ranked and ranked[0]["score"] is not None else None
    is_interrupted = any(trial["error"] is None and not trial["result"].get("done") for trial in trials)
    words = table(_rows(ranked, metric))
    if best is not None:
        words += f"\n\nbest: {metric} {best['score']:,.5g} at the end"
        if best["checkpoint_score"] is not None:
            words += f", {best['checkpoint_score']:,.5g} in its best checkpoint"
        words += f": {best['checkpoint']}"
    about = {"metric": metric, "out": out, "interrupted": is_interrupted}
    tell({**about, "best": best and trials.index(best), "trials": trials}, words, as_json=as_json)
    if is_interrupted:
        say(f"interrupted: go on with: etude tune --resume {shlex.quote(out)} --trust")
        return INTERRUPTED
    return FAILED if found.num_errors else 0


def _number(path: str) -> int:
    """The number of a trial in its folder's name, such as Trainable_03ef8_00001_1_lr=0.1: a resumed tuning reorders
    them."""
    found = re.search(r"_[0-9a-f]{5}_(\d+)_", path.rpartition("/")[2])
    return int(found[1]) if found else 0


def _trial(result: Any, metric: str, is_max: bool, address: Callable[[str], str]) -> dict[str, Any]:
    """The plain data that is reported about a trial; ``address`` converts its paths."""
    metrics = result.metrics or {}
    newest = {name: value for name, value in metrics.items() if name != "config"}
    score = newest.get(metric)
    scored = [
        (kept, of[metric]) for kept, of in result.best_checkpoints or () if math.isfinite(of.get(metric, math.nan))
    ]
    checkpoint, its_score = min(
        scored, key=lambda pair: rank(pair[1], is_max=is_max), default=(result.checkpoint, None)
    )
    return {
        "settings": {name: to_plain(value) for name, value in (result.config or {}).items() if name != "shared"},
        "score": score if score is not None and math.isfinite(score) else None,
        "result": newest if "training_iteration" in newest else {},
        "checkpoint": None if checkpoint is None else address(checkpoint.path),
        "checkpoint_score": its_score,
        "path": address(result.path),
        "error": None if result.error is None else str(result.error).strip().splitlines()[-1],
    }


def _rows(trials: list[dict[str, Any]], metric: str) -> list[list[str]]:
    """The rows of a table of trials; the first has the names of its columns."""
    names = list(dict.fromkeys(name for trial in trials for name in trial["settings"]))
    rows = [[*names, metric, "iterations", "env_steps", "updates", ""]]
    for trial in trials:
        counts = [f"{trial['result'].get(name, 0):,}" for name in ("training_iteration", "env_steps", "updates")]
        end = trial["error"] or ("" if trial["result"].get("done") else "interrupted")
        tried = [trial["settings"].get(name, "") for name in names]
        shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in tried]
        rows.append([*shown, "" if trial["score"] is None else f"{trial['score']:,.5g}", *counts, end])
    return rows


@contextlib.contextmanager
def _redirected(*, quiet: bool) -> Iterator[None]:
    """Send what Tune writes to standard error, or nowhere."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if quiet else sys.stderr):
        yield


# -- etude sweep ------------------------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """A trial of a sweep: a sample of the search space, trained with each seed."""

    number: int
    tried: Mapping[str, Any]
    jobs: Sequence[TrainingJob]
    """One for each seed."""

    def row(self, outcomes: Sequence[Outcome], metric: str) -> dict[str, Any]:
        """The trial's row in the table, from the outcomes of those of its runs that have ended."""
        results = [outcome.result for outcome in outcomes if outcome.result is not None]
        scores = np.array([score_of(result.to_dict(), metric) for result in results])
        lost = int((~np.isfinite(scores)).sum())
        scores = scores[np.isfinite(scores)]
        middle, low, high = interval_of(scores) if scores.size else (None, None, None)
        errors = {outcome.error for outcome in outcomes if outcome.error is not None}
        done = [outcome for outcome in outcomes if outcome.error is None and not outcome.is_interrupted]
        return {
            "trial": self.number,
            **{name: to_plain(value) for name, value in self.tried.items()},
            metric: middle,
            "low": low,
            "high": high,
            "without": lost + sum(outcome.error is not None for outcome in outcomes if outcome.result is None),
            "env_steps": sum(result.env_steps for result in results),
            "updates": sum(result.updates for result in results),
            "state": "failed" if errors else "done" if len(done) == len(self.jobs) else "interrupted",
            "error": " ".join(sorted(errors)) or None,
            "path": str(self.jobs[0].out.parent),
        }


def _sweep(cls: type[Algorithm[Any]], args: list[str]) -> int:
    """Run ``etude sweep ALGORITHM ...``."""
    owner, given, space, options = ask_space(cls, SweepOptions, args, "sweep")
    if options.stop == Stop():
        raise SettingsError(
            "`stop` is not set, but trials need to know when to end: give it a budget, such as `env_steps`."
        )
    out = options.folder(f"sweep-{owner}", given.get("env"), in_place="a sweep")
    found = _trials(cls, owner, given, space, options, out)
    jobs = [job for trial in found for job in trial.jobs]
    done: list[Outcome | None] = [None] * len(jobs)

    def ranked() -> list[dict[str, Any]]:
        """The rows of all trials so far, the best first."""
        rows = []
        for i, trial in enumerate(found):
            ends = done[i * options.seeds : (i + 1) * options.seeds]
            rows.append(trial.row([end for end in ends if end is not None], options.metric))
        # If some seeds of a trial have no score, it is scored by the others only: too good to be compared.
        best_is_max = options.best_is == "max"
        return sorted(rows, key=lambda row: (row["without"] > 0, rank(row[options.metric], is_max=best_is_max)))

    def note(number: int, outcome: Outcome) -> None:
        done[number] = outcome
        write_atomically(out / TABLE, _as_csv(ranked()))  # each time, in case the sweep is killed

    title = title_of(cls, jobs[0].config, len(found), "trial")
    title += f", {options.seeds} seeds each" if options.seeds > 1 else ""
    how: dict[str, Any] = {"max_concurrent": options.max_concurrent, "quiet": options.quiet, "say": say}
    outcomes = train_all(jobs, out, title, ended=note, **how)
    rows, metric = ranked(), options.metric
    cut, failed = any(end.is_interrupted for end in outcomes), failures(jobs, outcomes)
    best = rows[0] if rows[0][metric] is not None else None
    left_out = {"error", "path"} | ({"updates"} if best else set())
    if not any(row["without"] for row in rows):
        left_out.add("without")
    names = [name for name in rows[0] if name not in left_out]
    words = table([names, *(["" if row[n] is None else _shown(row[n]) for n in names] for row in rows)])
    if best is not None:
        words += f"\n\nbest: {metric} {best[metric]:,.5g}, in {best['path']}; all trials: {out / TABLE}"
    about = {"metric": metric, "out": str(out), "interrupted": cut, "best": best and best["trial"]}
    tell({**about, "trials": sorted(rows, key=lambda row: int(row["trial"]))}, words, as_json=options.json)
    for line in failed:
        say(f"error: {line}")
    if (cut or failed) and not options.quiet:
        say(f"go on: {_resume_command(args, out)}")
    return INTERRUPTED if cut else FAILED if failed else 0


def _check_whole(args: Sequence[str]) -> None:
    """Refuse `--resume` without the search space: a folder does not say what a command may import and call."""
    resumes = any(word.partition("=")[0] == "--resume" for word in args)
    if resumes and not any(word.startswith("--space") for word in args):
        raise SettingsError(
            "a sweep continues with the command that started it, plus --resume FOLDER, as in etude sweep ppo --env "
            "CartPole-v1 --space.lr 1e-3,1e-4 --stop.env-steps 50000 --resume runs/sweep."
        )


def _resume_command(args: Sequence[str], out: Path) -> str:
    """The command that continues this sweep."""
    words, is_kept = ["etude", "sweep"], True
    for word in args:
        if word.startswith("--"):
            is_kept = word.partition("=")[0] not in ("--out", "--resume", "--overwrite")
        if is_kept:
            words.append(word)
    return shlex.join([*words, "--resume", str(out)])


def _trials(
    cls: type[Algorithm[Any]],
    owner: str,
    given: Mapping[str, Any],
    space: Mapping[str, Any],
    options: SweepOptions,
    out: Path,
) -> list[Trial]:
    """Make all trials of a sweep. If it is resumed, check that those already begun have the same settings."""
    if options.seeds > 1 and "seed" in space:
        raise SettingsError("--space.seed and --seeds both say which seeds trials are trained with: leave out one.")
    base, found = config_of(cls, given, owner), []
    for number, drawn in enumerate(trials(space, options.samples, base.seed or 0)):
        config = applied(base, drawn, owner)
        changes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        name, seeds = f"trial-{number}", seeds_of(config.seed, options.seeds)
        more = options.of_jobs() | {"prefix": f"{name}/"}
        jobs = seed_jobs(seeds, out / name, config, changes, algorithm=cls, **more)
        for job in jobs:
            if job.goes_on and (difference := job.difference()):
                raise SettingsError(
                    f"{job.out} was trained {difference}: resume a sweep with the settings, --space, --seed and "
                    "--samples that it began with (more samples are fine), or give another --out."
                )
        others = numbered(out / name, "seed-").keys() - {int(seed) for seed in seeds}
        if options.resume and others:
            raise SettingsError(
                f"{out / name} has the seeds {sorted(others)}, too: a sweep goes on with the --seed, and at least the "
                "--seeds, that it began with. Or give another --out."
            )
        found.append(Trial(number, drawn, jobs))
    return found


def _as_csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _shown(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
