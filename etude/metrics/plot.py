# SPDX-License-Identifier: Apache-2.0
"""Plots of learning curves."""

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude.errors import DataError
from etude.metrics.writers import read_jsonl
from etude.urls import is_url, redacted

METRICS_FILE = "metrics.jsonl"
# Okabe & Ito's colours (2008) for colour-blind readers, without those that are hard to see on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555")
_INK = "#333333"


class Band(NamedTuple):
    """A curve with an interval around it; float64 ``[num_points]`` each. There is no interval where a bound is NaN."""

    label: str
    x: NDArray[np.float64]
    value: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    line: str = "-"
    """Line and marker in matplotlib's notation; a dotted line has the colour of the curve before it."""


class Panel(NamedTuple):
    """Curves over the same axes."""

    title: str
    x: str
    y: str
    bands: list[Band]


def plot_runs(paths: Sequence[str | os.PathLike[str]], to: str | os.PathLike[str]) -> Path:
    """Plot the learning curves of one or more runs into an image file.

    Episode returns (mean, and the band from minimum to maximum) and evaluations are plotted over env steps. Runs
    without env steps are plotted over updates, in a separate panel. Runs without returns have a panel for losses.

    Args:
        paths: Run folders with a ``metrics.jsonl`` (keys ``env_steps``, ``updates``, ``return_mean``, ``return_min``,
            ``return_max``, ``evaluation``, ``losses``), or such files.
        to: The image file; its suffix selects the format (``.png``, ``.svg``, ``.pdf``).

    Returns:
        The path of the image file.

    Raises:
        DataError: a run does not exist, has no metrics or nothing to plot; or the image format is unknown.
    """
    if not paths:
        raise DataError("no run to plot: give one run folder or more.")
    for path in [os.fspath(path) for path in paths]:
        if is_url(path):
            raise DataError(
                f"{redacted(path)}: runs behind URLs can't be plotted. Copy its {METRICS_FILE} to this machine."
            )
    panels: dict[tuple[str, str], list[Band]] = {}
    for run, label in zip(paths, _labels(paths), strict=True):
        clock, quantity, bands = _curves(Path(run), label)
        panels.setdefault((clock, quantity), []).extend(bands)
    shown = []
    for (clock, quantity), bands in panels.items():
        has_band = any(not np.isnan(band.low).all() for band in bands)
        title = "mean of the latest episodes; band: least to greatest" if has_band else ""
        shown.append(Panel(title, clock, quantity, bands))
    return plot_panels(shown, Path(to))


def _labels(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """For each path, as many of its last parts as are needed to distinguish all paths."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    parts = [p[:-1] if p[-1] == METRICS_FILE else p for p in parts]
    for depth in range(1, max(map(len, parts))):
        labels = ["/".join(p[-depth:]) for p in parts]
        if len(set(labels)) == len(set(parts)):
            return labels
    return ["/".join(p) for p in parts]


def _curves(run: Path, label: str) -> tuple[str, str, list[Band]]:
    """The clock of a run, ``env_steps`` or ``updates``; what is drawn over it, ``episode return`` or ``loss``; and one
    or two curves."""
    path = run / METRICS_FILE if run.is_dir() else run
    if not path.exists():
        several = sorted(path.parent.name for path in run.glob(f"*/{METRICS_FILE}")) if run.is_dir() else []
        hint = f" or several, such as {run}/*: it has {several[0]}" if several else ""
        raise DataError(
            f"{run} is not a training run: it has no {METRICS_FILE}. Give the folder of a training run{hint}."
        )
    rows = read_jsonl(path)
    if not rows:
        raise DataError(f"{path} is empty: the run has not finished its first iteration.")
    clock = "env_steps" if any(row.get("env_steps") for row in rows) else "updates"
    x = _numbers(rows, clock)
    later = np.minimum.accumulate(np.where(np.isnan(x), np.inf, x)[::-1])[::-1]
    kept = x <= np.append(later[1:], np.inf)  # a resumed run writes some steps again: the newer rows count
    quantity, evaluated = "episode return", _evaluations(rows)
    mean, low, high = (_numbers(rows, name) for name in ("return_mean", "return_min", "return_max"))
    if np.isnan(mean[kept]).all() and np.isnan(evaluated[kept]).all():
        quantity, mean = "loss", np.array([_total_loss(row) for row in rows])
    bands = []
    if (known := kept & ~np.isnan(mean)).any():
        bands.append(Band(label, x[known], mean[known], low[known], high[known]))
    if (known := kept & ~np.isnan(evaluated)).any():
        name, line = (f"{label}, evaluation", ":o") if bands else (label, "-o")
        none = np.full(int(known.sum()), np.nan)
        bands.append(Band(name, x[known], evaluated[known], none, none, line))
    if not bands:
        raise DataError(
            f"{path} has nothing to plot: no line has {clock} with return_mean, evaluation or losses. "
            "Let the run finish an episode or an update first."
        )
    return clock, quantity, bands


def _numbers(rows: Sequence[Mapping[str, Any]], key: str) -> NDArray[np.float64]:
    values = (row.get(key) for row in rows)
    return np.array([v if isinstance(v, int | float) else np.nan for v in values], np.float64)


def _evaluations(rows: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
    """The mean return of each evaluation in the first row that has it; later rows repeat it until the next."""
    each = [row.get("evaluation") or {} for row in rows]
    is_new = [own != before for own, before in zip(each, [{}, *each], strict=False)]
    return np.where(is_new, _numbers(each, "return_mean"), np.nan)


def _total_loss(row: Mapping[str, Any]) -> float:
    losses = row.get("losses")
    if not isinstance(losses, Mapping) or not losses:
        return float("nan")
    numbers = [v for v in losses.values() if isinstance(v, int | float)]
    return float(losses["total"]) if isinstance(losses.get("total"), int | float) else float(sum(numbers))


def plot_panels(panels: Sequence[Panel], to: Path) -> Path:
    """Plot curves with intervals into an image file, panels side by side.

    Raises:
        DataError: the image can't be written.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    style: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), _INK
    )
    style |= {"axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#999999"}
    style |= {"text.parse_math": False}  # names of runs and envs may contain `$`
    style |= {"axes.grid": True, "grid.color": "#DDDDDD", "axes.axisbelow": True, "svg.hashsalt": "etude"}
    with rc_context(style):
        figure = Figure(figsize=(2.2 + 5.4 * len(panels), 4.4), dpi=160, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        for ax, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            colours, colour = itertools.cycle(_COLOURS), _INK
            for band in panel.bands:
                colour = colour if band.line.startswith(":") else next(colours)
                ax.fill_between(band.x, band.low, band.high, color=colour, alpha=0.18, linewidth=0)
                line = band.line if len(band.x) > 1 else "o"
                ax.plot(band.x, band.value, line, color=colour, linewidth=1.8, markersize=4.5, label=band.label)
            ax.set_title(panel.title, loc="left", fontsize=10)
            ax.set_xlabel(panel.x.replace("_", " "))
            ax.set_ylabel(panel.y.replace("_", " "))
            ax.xaxis.set_major_formatter(EngFormatter(sep=""))
            ax.legend(frameon=False, loc="best")
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(to)
        except (ValueError, OSError) as error:
            raise DataError(f"can't write the picture {to}: {error}. Give a path that ends in .png.") from error
    return to
