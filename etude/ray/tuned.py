# SPDX-License-Identifier: Apache-2.0
"""What a tuning found."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ray.tune import Checkpoint, ResultGrid

from etude.algorithms import AlgorithmConfig
from etude.errors import EngineError, SettingsError
from etude.ray.space import SHARED
from etude.ray.trainable import settings_of


@dataclasses.dataclass(frozen=True)
class Trial:
    """One trial of a tuning."""

    settings: dict[str, Any]
    """Those that were tried, by their names."""
    score: float
    """The metric in its newest result; NaN if there is none."""
    result: dict[str, Any]
    """Its newest result, flat (``losses/policy``), with ``training_iteration`` and what else Tune counts; {} where it
    failed before there was one."""
    checkpoint: str | None
    """For `etude.load`: of its checkpoints that are kept, the one with the best metric. None where it has none."""
    path: str
    """Its folder, or its URL: results as JSON lines and CSV, TensorBoard events, checkpoints."""
    error: str | None
    """How it failed, in a line; None where it did not."""
    has_ended: bool
    """Whether it came to its end, by its goal, a budget, a scheduler or an error; else the tuning was interrupted."""
    config: AlgorithmConfig | None = dataclasses.field(repr=False)
    """All its settings, as the algorithm takes them; None where it failed because they do not fit."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What a tuning found."""

    trials: tuple[Trial, ...]
    """As they were begun."""
    metric: str
    """What `Trial.score` is."""
    mode: str
    """``max`` or ``min``: whether a large score is good, or a small one."""
    path: str
    """The folder of all trials, or its URL."""
    grid: ResultGrid = dataclasses.field(repr=False)
    """Tune's own results, with data frames."""

    @property
    def best(self) -> Trial:
        """The trial with the best score.

        Raises:
            EngineError: no trial has one; the first error of a trial is told.
        """
        scored = self.ranked()
        if not scored:
            why = next((f" The first error: {trial.error}" for trial in self.trials if trial.error), "")
            raise EngineError(f"no trial has a result whose `{self.metric}` is a number.{why}")
        return scored[0]

    def ranked(self) -> list[Trial]:
        """The trials that have a score, the best first."""
        sign = -1 if self.mode == "max" else 1
        return sorted((t for t in self.trials if math.isfinite(t.score)), key=lambda trial: sign * trial.score)

    @property
    def errors(self) -> list[str]:
        """How trials failed."""
        return [trial.error for trial in self.trials if trial.error]

    @property
    def is_interrupted(self) -> bool:
        """Whether there are trials that have not ended; `resume_tuning` goes on with them."""
        return not all(trial.has_ended for trial in self.trials)

    def table(self) -> str:
        """The trials as text, the best first."""
        ranked = self.ranked()
        trials = [*ranked, *(trial for trial in self.trials if trial not in ranked)]
        names = list(dict.fromkeys(name for trial in trials for name in trial.settings))
        rows = [[*names, self.metric, "iterations", "env_steps", "updates", ""]]
        for trial in trials:
            counts = [f"{trial.result.get(name, 0):,}" for name in ("training_iteration", "env_steps", "updates")]
            end = trial.error or ("" if trial.has_ended else "interrupted")
            tried = [_shown(trial.settings[name]) if name in trial.settings else "" for name in names]
            rows.append([*tried, f"{trial.score:,.5g}", *counts, end])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
        lines = ["  ".join([*(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def tuned(grid: ResultGrid, path: str, *, was_interrupted: bool) -> Tuned:
    """What is in Tune's results, which are at ``path``."""
    analysis = grid._experiment_analysis  # alone knows what trials were given, and how far they came
    metric, mode = str(analysis.default_metric), str(analysis.default_mode)
    trials = []
    for result, trial in zip((grid[i] for i in range(len(grid))), analysis.trials, strict=True):
        found = {name: value for name, value in (result.metrics or {}).items() if name != "config"}
        found = found if "training_iteration" in found else {}
        trials.append(
            Trial(
                settings={name: value for name, value in trial.config.items() if name != SHARED},
                score=float(found.get(metric, math.nan)),
                result=found,
                checkpoint=_best(grid, result, path, metric, mode),
                path=_address(grid, result.path, path),
                error=None if result.error is None else str(result.error).strip().splitlines()[-1],
                has_ended=not was_interrupted or result.error is not None or bool(found.get("done")),
                config=_config(trial.config),
            )
        )
    begun = sorted(range(len(trials)), key=lambda i: _number(analysis.trials[i].experiment_tag))
    return Tuned(tuple(trials[i] for i in begun), metric, mode, path, grid)


def _number(tag: str) -> int:
    """Of a trial, by its tag, such as ``3_lr=0.1``: a tuning that was resumed has its trials in another order."""
    return int(tag.partition("_")[0])


def _config(given: Mapping[str, Any]) -> AlgorithmConfig | None:
    try:
        return settings_of(given)
    except SettingsError:  # told by the trial's error
        return None


def _best(grid: ResultGrid, result: Any, path: str, metric: str, mode: str) -> str | None:
    """The path of the checkpoint with the best metric; of the newest where none has one."""
    sign = 1 if mode == "max" else -1
    scored: list[tuple[float, Checkpoint]] = [
        (sign * float(metrics[metric]), checkpoint)
        for checkpoint, metrics in result.best_checkpoints or ()
        if math.isfinite(float(metrics.get(metric, math.nan)))
    ]
    best = max(scored, key=lambda pair: pair[0])[1] if scored else result.checkpoint
    return None if best is None else _address(grid, best.path, path)


def _address(grid: ResultGrid, inner: str, path: str) -> str:
    """The path of a folder of the tuning, or its URL where ``path`` is one: Tune leaves out what is before the host."""
    return path + inner.removeprefix(grid.experiment_path)
