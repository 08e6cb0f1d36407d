# SPDX-License-Identifier: Apache-2.0
"""Plots of learning curves."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude.errors import DataError
from etude.metrics.writers import read_jsonl
from etude.urls import is_url, redacted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METRICS_FILE = "metrics.jsonl"
# Okabe & Ito's colours (2008) for colour-blind readers, without those that are hard to see on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555")
_INK = "#333333"


class Curve(NamedTuple):
    """The data of one run to plot. Arrays are float64 ``[num_rows]``, NaN if a row has no such number."""

    label: str
    clock: str
    """The unit of x: ``env_steps`` or ``updates``."""
    quantity: str
    """The meaning of y: ``return`` or ``loss``."""
    x: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    evaluated: NDArray[np.float64]
    """The mean return of evaluations, in the rows that have one."""


def plot_runs(paths: Sequence[str | os.PathLike[str]], to: str | os.PathLike[str]) -> Path:
    """Plot the learning curves of one or more runs into an image file.

    Episode returns (mean, and the band from minimum to maximum) and evaluations are plotted over env steps. Runs
    without env steps are plotted over updates, in a separate panel. Runs without returns have a panel for losses.

    Args:
        paths: Run folders with a ``metrics.jsonl`` (keys ``env_steps``, ``updates``, ``return_mean``, ``return_min``,
            ``return_max``, ``eval_return_mean``, ``losses``), or such files.
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
    curves = [_curve(Path(path), label) for path, label in zip(paths, _labels(paths), strict=True)]
    panels: dict[tuple[str, str], list[tuple[Curve, str]]] = {}
    for i, curve in enumerate(curves):
        panels.setdefault((curve.quantity, curve.clock), []).append((curve, _COLOURS[i % len(_COLOURS)]))
    return _draw(panels, Path(to))


def _labels(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """For each path, as many of its last parts as are needed to distinguish all paths."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    parts = [p[:-1] if p[-1] == METRICS_FILE else p for p in parts]
    for depth in range(1, max(map(len, parts))):
        labels = ["/".join(p[-depth:]) for p in parts]
        if len(set(labels)) == len(set(parts)):
            return labels
    return ["/".join(p) for p in parts]


def _curve(run: Path, label: str) -> Curve:
    if not run.exists():
        raise DataError(f"{run}: there is no such run.")
    path = run / METRICS_FILE if run.is_dir() else run
    if not path.exists():
        raise DataError(f"{run} has no metrics: there is no {METRICS_FILE} in it. Give the folder of a training run.")
    rows = read_jsonl(path)
    if not rows:
        raise DataError(f"{path} is empty: the run has not finished its first iteration.")
    clock = "env_steps" if any(row.get("env_steps") for row in rows) else "updates"
    x = _numbers(rows, clock)
    later = np.minimum.accumulate(np.where(np.isnan(x), np.inf, x)[::-1])[::-1]
    kept = x <= np.append(later[1:], np.inf)  # a resumed run writes some steps again: the newer rows count
    mean, evaluated = _numbers(rows, "return_mean"), _numbers(rows, "eval_return_mean")
    low, high = _numbers(rows, "return_min"), _numbers(rows, "return_max")
    quantity = "return"
    if np.isnan(mean[kept]).all() and np.isnan(evaluated[kept]).all():
        quantity = "loss"
        mean = np.array([_total_loss(row) for row in rows])
    curve = Curve(label, clock, quantity, *(values[kept] for values in (x, mean, low, high, evaluated)))
    if np.isnan(curve.mean).all() and np.isnan(curve.evaluated).all():
        raise DataError(
            f"{path} holds nothing to draw: no line has {clock} with return_mean, eval_return_mean or losses. "
            "Let the run finish an episode or an update first."
        )
    return curve


def _numbers(rows: Sequence[Mapping[str, Any]], key: str) -> NDArray[np.float64]:
    values = (row.get(key) for row in rows)
    return np.array([v if isinstance(v, int | float) else np.nan for v in values], np.float64)


def _total_loss(row: Mapping[str, Any]) -> float:
    losses = row.get("losses")
    if not isinstance(losses, Mapping) or not losses:
        return float("nan")
    numbers = [v for v in losses.values() if isinstance(v, int | float)]
    return float(losses["total"]) if isinstance(losses.get("total"), int | float) else float(sum(numbers))


class Band(NamedTuple):
    """A curve with an interval around it; float64 ``[num_points]`` each."""

    label: str
    x: NDArray[np.float64]
    value: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def plot_bands(panels: Mapping[str, Sequence[Band]], to: Path, *, x: str, y: str) -> Path:
    """Plot curves with intervals into an image file, a panel for each title, with one scale over ``x``.

    Raises:
        DataError: the image can't be written.
    """

    def draw(axes: "Sequence[Axes]") -> None:
        from matplotlib.ticker import EngFormatter

        for ax, (title, bands) in zip(axes, panels.items(), strict=True):
            for i, band in enumerate(bands):
                colour = _COLOURS[i % len(_COLOURS)]
                ax.fill_between(band.x, band.low, band.high, color=colour, alpha=0.18, linewidth=0)
                marker = "o" if len(band.x) == 1 else None
                ax.plot(band.x, band.value, color=colour, linewidth=1.8, marker=marker, label=band.label)
            ax.set_title(title, loc="left", fontsize=10)
            ax.set_xlabel(x.replace("_", " "))
            ax.set_ylabel(y.replace("_", " "))
            ax.xaxis.set_major_formatter(EngFormatter(sep=""))
            ax.legend(frameon=False, loc="best")

    return _pictured(len(panels), draw, to)


def _draw(panels: Mapping[tuple[str, str], Sequence[tuple[Curve, str]]], to: Path) -> Path:
    def draw(axes: "Sequence[Axes]") -> None:
        for ax, ((quantity, clock), curves) in zip(axes, panels.items(), strict=True):
            _draw_panel(ax, quantity, clock, curves)
        returns = [ax for ax, (quantity, _) in zip(axes, panels, strict=True) if quantity == "return"]
        for ax in returns[1:]:
            ax.sharey(returns[0])
        for ax in returns[:1]:
            ax.autoscale_view()

    return _pictured(len(panels), draw, to)


def _pictured(num_panels: int, draw: "Callable[[Sequence[Axes]], None]", to: Path) -> Path:
    """An image file of panels side by side, which ``draw`` fills."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "xtick.labelcolor": _INK,
        "ytick.labelcolor": _INK,
    }
    style |= {"axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#999999"}
    style |= {"text.parse_math": False}  # names of runs and envs may contain `$`
    style |= {"axes.grid": True, "grid.color": "#DDDDDD", "axes.axisbelow": True, "svg.hashsalt": "etude"}
    with rc_context(style):
        figure = Figure(figsize=(2.2 + 5.4 * num_panels, 4.4), dpi=160, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        draw(figure.subplots(1, num_panels, squeeze=False)[0])
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(to)
        except (ValueError, OSError) as error:
            raise DataError(f"can't write the picture {to}: {error}. Give a path that ends in .png.") from error
    return to


def _draw_panel(ax: "Axes", quantity: str, clock: str, curves: Sequence[tuple[Curve, str]]) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    for curve, colour in curves:
        _draw_curve(ax, curve, colour)
    ax.set_xlabel(clock.replace("_", " "))
    ax.set_ylabel("episode return" if quantity == "return" else "loss")
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    ax.set_xlim(left=0)
    if any(not np.isnan(curve.low + curve.high).all() for curve, _ in curves):
        ax.set_title("mean of the latest episodes; band: least to greatest", loc="left", fontsize=8.5, color="#777777")
    ax.margins(x=0.02, y=0.06)
    ax.legend(frameon=False, loc="best")


def _draw_curve(ax: "Axes", curve: Curve, colour: str) -> None:
    known = ~np.isnan(curve.mean)
    span = known & ~np.isnan(curve.low) & ~np.isnan(curve.high)
    label = curve.label
    if span.any():
        ax.fill_between(curve.x[span], curve.low[span], curve.high[span], color=colour, alpha=0.13, linewidth=0)
    if known.any():
        marker = "o" if known.sum() == 1 else None
        ax.plot(curve.x[known], curve.mean[known], color=colour, linewidth=1.8, marker=marker, label=label)
    tested = ~np.isnan(curve.evaluated)
    if tested.any():
        name, line = (f"{label}, evaluation", ":o") if known.any() else (label, "-o")
        x, y = curve.x[tested], curve.evaluated[tested]
        ax.plot(x, y, line, color=colour, linewidth=1.2, markersize=4.5, markerfacecolor="white", label=name)
