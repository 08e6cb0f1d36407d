# SPDX-License-Identifier: Apache-2.0
"""``etude sweep``: train with many settings in processes of this machine, and see which are best."""

import csv
import dataclasses
import io
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from etude.algorithms import Algorithm, Stop
from etude.algorithms.checkpoint import score_of
from etude.algorithms.comparison import interval_of
from etude.algorithms.parallel import Outcome, TrainingJob, train_all
from etude.algorithms.saving import to_plain
from etude.algorithms.search import applied, trials
from etude.algorithms.seeds import failures, seeds_of, title_of
from etude.checkpoints import load_meta
from etude.cli import streams
from etude.cli.asked import FolderOptions, algorithm_class, config_of
from etude.cli.searching import FAILED, USAGE, SearchOptions, ask_space, rank
from etude.errors import SettingsError
from etude.files import write_atomically
from etude.interruption import INTERRUPTED
from etude.settings import IntFrom1, settings

TABLE = "sweep.csv"
ABOUT = "Train with many settings on this machine, and see which are best. What --space.NAME takes: etude sweep --help"


@settings
class SweepOptions(SearchOptions, FolderOptions):
    """What `etude sweep` takes besides the settings of the algorithm."""

    out: str | None = None
    """The folder of all trials; that of the first one's first seed is OUT/trial-0/seed-0. None:
    runs/sweep-ALGORITHM-ENV-TIME, or the resumed sweep."""

    seeds: IntFrom1 = 1
    """How many seeds each trial is trained with, counted from `seed` (from 0 without one), at least 1."""

    resume: str | None = None
    """Continue the sweep in this folder, with the same command otherwise: finished trials are not trained again, the
    others continue from their checkpoints."""


class Trial(NamedTuple):
    """What is known of a trial."""

    number: int
    tried: Mapping[str, Any]
    jobs: Sequence[TrainingJob]
    """One for each seed."""

    def row(self, outcomes: Sequence[Outcome], metric: str) -> dict[str, Any]:
        """What is written of it when these of its runs have ended."""
        results = [outcome.result for outcome in outcomes if outcome.result is not None]
        scores = np.array([score_of(result.to_dict(), metric) for result in results])
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
            "env_steps": sum(result.env_steps for result in results),
            "updates": sum(result.updates for result in results),
            "state": "failed" if errors else "done" if len(done) == len(self.jobs) else "interrupted",
            "error": " ".join(sorted(errors)) or None,
            "path": str(self.jobs[0].out.parent),
        }


def main(command: str, args: list[str]) -> int:
    """Run ``etude sweep ALGORITHM ...``."""
    _check_whole(args)
    cls = algorithm_class(args, "sweep", USAGE)
    if cls is None:
        return 0
    owner, given, space, options = ask_space(cls, SweepOptions, args, "sweep", ABOUT)
    if options.stop == Stop():
        raise SettingsError("`stop` is not set, but trials need to know when to end: give it a budget, as `env_steps`.")
    out = options.folder(f"sweep-{owner}", given.get("env"), in_place="a sweep")
    found = _trials(cls, owner, given, space, options, out)
    jobs = [job for trial in found for job in trial.jobs]
    done: list[Outcome | None] = [None] * len(jobs)

    def table() -> list[dict[str, Any]]:
        """The trials with what is known of their runs now, the best first."""
        rows = []
        for i, trial in enumerate(found):
            ends = done[i * options.seeds : (i + 1) * options.seeds]
            rows.append(trial.row([end for end in ends if end is not None], options.metric))
        return sorted(rows, key=lambda row: rank(row[options.metric], is_max=options.best_is == "max"))

    def note(number: int, outcome: Outcome) -> None:
        done[number] = outcome
        write_atomically(out / TABLE, _as_csv(table()))  # so that a killed sweep has one, too

    title = title_of(cls, jobs[0].config, len(found), "trial")
    title += f", {options.seeds} seeds each" if options.seeds > 1 else ""
    how: dict[str, Any] = {"max_concurrent": options.max_concurrent, "quiet": options.quiet, "say": streams.say}
    outcomes = train_all(jobs, out, title, ended=note, **how)
    return _report(table(), out, options, jobs, outcomes, _to_go_on(args, out))


def _check_whole(args: Sequence[str]) -> None:
    """Refuse `--resume` without the search space: a folder does not say what a command may import and call."""
    resumes = any(word.partition("=")[0] == "--resume" for word in args)
    if resumes and not any(word.startswith("--space") for word in args):
        raise SettingsError(
            "a sweep continues with the command that started it, plus --resume FOLDER, as in etude sweep ppo --env "
            "CartPole-v1 --space.lr 1e-3,1e-4 --stop.env-steps 50000 --resume runs/sweep."
        )


def _to_go_on(args: Sequence[str], out: Path) -> str:
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
    """All trials, none of which has begun; those of a sweep that goes on are as they were."""
    base, found = config_of(cls, given, owner), []
    for number, values in enumerate(trials(space, options.samples, base.seed or 0)):
        config = applied(base, values, owner)
        changes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        name, seeds = f"trial-{number}", seeds_of(config.seed, options.seeds)
        jobs = options.jobs(cls, seeds, out / name, config, changes, prefix=f"{name}/")
        for job in jobs:
            if job.goes_on:
                _check_same(job, values)
        found.append(Trial(number, values, jobs))
    return found


def _check_same(job: TrainingJob, values: Mapping[str, Any]) -> None:
    """Refuse to go on with a trial of other settings, which another command has drawn."""
    plain = {field.name: to_plain(getattr(job.config, field.name)) for field in dataclasses.fields(job.config)}
    meta = load_meta(job.out)
    saved = meta.get("config") if isinstance(meta, Mapping) else None
    for name in values:
        was, now = (_at(place, name) for place in (saved, plain))
        if was != now:
            raise SettingsError(
                f"{job.out} was trained with `{name}` {was}, but is now to have {now}: a sweep goes on with the "
                "--space, --seed and --samples that it began with (more samples are fine). Or give another --out."
            )


def _at(place: Any, name: str) -> Any:
    for part in name.split("."):
        place = place.get(part) if isinstance(place, Mapping) else None
    return place


def _as_csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _report(
    rows: list[dict[str, Any]],
    out: Path,
    options: SweepOptions,
    jobs: Sequence[TrainingJob],
    outcomes: Sequence[Outcome],
    to_go_on: str,
) -> int:
    """Write what was found to standard output, the best first; gives the exit code."""
    cut, failed, metric = any(end.is_interrupted for end in outcomes), failures(jobs, outcomes), options.metric
    best = rows[0] if rows[0][metric] is not None else None
    if options.json:
        about = {"metric": metric, "out": str(out), "interrupted": cut, "best": best and best["trial"]}
        streams.print_json({**about, "trials": sorted(rows, key=lambda row: int(row["trial"]))})
    else:
        names = [name for name in rows[0] if name not in ("error", "path", "updates" if best else "")]
        cells = [["" if row[n] is None else _shown(row[n]) for n in names] for row in rows]
        streams.show(streams.table([names, *cells]))
        if best is not None:
            streams.show(f"\nbest: {metric} {best[metric]:,.5g}, in {best['path']}; all trials: {out / TABLE}")
    for line in failed:
        streams.say(f"error: {line}")
    if (cut or failed) and not options.quiet:
        streams.say(f"go on: {to_go_on}")
    return INTERRUPTED if cut else FAILED if failed else 0


def _shown(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
