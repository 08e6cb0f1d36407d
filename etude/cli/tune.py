# SPDX-License-Identifier: Apache-2.0
"""``etude tune``: train with many settings through Ray Tune, and rank them."""

import contextlib
import importlib.util
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from etude.algorithms import Algorithm, AlgorithmConfig
from etude.algorithms.saving import to_plain
from etude.cli import flags
from etude.cli.asked import algorithm_class, config_of, import_from_here
from etude.cli.searching import FAILED, USAGE, SearchOptions, ask_space, rank
from etude.cli.streams import say, table, tell
from etude.errors import EngineError, SettingsError, how_to_install
from etude.interruption import INTERRUPTED
from etude.settings import settings
from etude.urls import inside, is_url

AGAIN = "       etude tune --resume OUT --trust\n"
ABOUT = "Train with many settings, and see which are best. What --space.NAME takes: etude tune --help"


@settings
class TuneOptions(SearchOptions):
    """Options of `etude tune`, besides the settings of the algorithm."""

    out: str | None = None
    """Folder of all trials, or its URL. None: runs/tune-ALGORITHM-ENV-TIME."""

    resources: Mapping[str, float] | None = None
    """Resources of each trial, such as CPU=2 GPU=0.5. None: a CPU for each thread and each worker, and a GPU if it
    learns on one."""

    keep: int = 3
    """Number of checkpoints to keep of each trial, those with the best metric, besides the newest; at least 1."""

    max_failures: int = 0
    """How often a trial that failed is resumed from its newest checkpoint."""

    cluster: str | None = None
    """Address of the Ray cluster: `auto`, `host:port`. None: the one that RAY_ADDRESS names, else one on this
    machine."""


@settings
class Resume:
    """Resume an interrupted tuning with its own settings."""

    resume: str
    """Resume the unfinished trials in this folder from their newest checkpoints. Tune stores the request there as
    pickles, so this runs code from the folder: it needs `trust`."""

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
                f"Tune keeps pickles in {self.resume}, and to load them runs code from these files: add --trust if "
                "nobody else could write there."
            )
        import_from_here()
        with _redirected(quiet=self.quiet):
            found = resume_tuning(self.resume, address=self.cluster)
        return report(found, self.resume if is_url(self.resume) else None, as_json=self.json)


def main(command: str, args: list[str]) -> int:
    """Run ``etude tune ALGORITHM ...``, or ``etude tune --resume OUT``."""
    if args and args[0].partition("=")[0] == "--resume":
        return flags.run(Resume, args, prog="etude tune")
    cls = algorithm_class(args, "tune", USAGE.replace("\n", f"\n{AGAIN}", 1))
    if cls is None:
        return 0
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
    owner, given, space, options = ask_space(cls, TuneOptions, args, "tune", ABOUT)
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
        words += f"\n\nbest: {metric} {best['score']:,.5g}, checkpoint {best['checkpoint']}"
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
    """What is reported about a trial."""
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


def _rows(trials: list[dict[str, Any]], metric: str) -> list[list[str]]:
    """The cells of a table of trials, and its head."""
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
