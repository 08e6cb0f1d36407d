# SPDX-License-Identifier: Apache-2.0
"""Compare groups of runs, such as the seeds of one algorithm, by interquartile means and confidence intervals."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from etude.algorithms.saving import saved_env_name
from etude.checkpoints import MANIFEST, load_meta
from etude.errors import DataError, SettingsError
from etude.metrics import read_jsonl
from etude.metrics.plot import METRICS_FILE, Band, Panel, plot_panels
from etude.settings import choice

_log = logging.getLogger("etude.algorithms")

Floats = NDArray[np.float64]

CLOCKS: Final = ("env_steps", "updates", "seconds", "iteration")
"""The x-axes over which a figure can be plotted."""
NUM_POINTS: Final = 200
NUM_RESAMPLES: Final = 2_000
LEVEL: Final = 0.95


class RunCurve(NamedTuple):
    """A figure of one run over time."""

    path: str
    group: str
    env: str
    x: Floats
    """``[rows]``, ascending."""
    y: Floats
    """``[rows]``, finite."""


class GroupEnd(NamedTuple):
    """How several runs of one env ended."""

    name: str
    env: str
    num_runs: int
    value: float
    """The interquartile mean of the last values of the runs."""
    low: float
    """Lower bound of the 95 % confidence interval of `value`; equal to it if there is only one run."""
    high: float
    """Upper bound of this interval."""
    first: float
    """Last value of the x-axis, such as env steps, in the shortest run."""
    last: float
    """The same in the longest run."""

    @property
    def is_uneven(self) -> bool:
        """Whether the shortest run is more than 5 % shorter than the longest."""
        return self.last > self.first + 0.05 * abs(self.last)


def interquartile_mean(values: Floats) -> Floats:
    """``[..., n]`` to ``[...]``: the mean without a quarter of the values at either end, rounded down.

    Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice", section 4.3.
    """
    num = values.shape[-1]
    cut = num // 4
    found: Floats = np.sort(values, axis=-1)[..., cut : num - cut].mean(axis=-1)
    return found


def bootstrap_interval(values: Floats, seed: int = 0) -> tuple[Floats, Floats]:
    """The 95 % interval of the interquartile mean, by the percentile bootstrap over runs (ibid., section 4.1).

    Args:
        values: ``[..., runs]``; the same resampled runs are used for every row.
        seed: Seed of the resampling.

    Returns:
        Its lower and its upper bound, ``[...]`` each.
    """
    num = values.shape[-1]
    drawn = np.random.default_rng(seed).integers(num, size=(NUM_RESAMPLES, num))
    means = np.stack([interquartile_mean(values[..., rows]) for rows in drawn])
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return low, high


def interval_of(values: Floats) -> tuple[float, float, float]:
    """The interquartile mean of ``[n]`` values, and the lower and the upper bound of its 95 % interval."""
    low, high = bootstrap_interval(values)
    return float(interquartile_mean(values)), float(low), float(high)


def read_runs(
    paths: Sequence[str | os.PathLike[str]], *, by: str, y: str = "return_mean", x: str = "env_steps"
) -> list[RunCurve]:
    """Read the curve of a figure from runs, and find the group of each.

    Args:
        paths: Folders of runs, or folders of such folders.
        by: What runs of one group have in common: ``algorithm`` (or ``algo``), ``folder`` (of ``paths``), or a setting,
            such as ``lr`` or ``optimizer.grad_clip``.
        y: A figure of `Result`; ``losses/policy`` is an entry of one.
        x: One of `CLOCKS`.

    Raises:
        DataError: there is no run, or one has no such figure.
        SettingsError: ``x`` is not one of `CLOCKS`, or a run has no setting ``by``.
    """
    if x not in CLOCKS:
        raise SettingsError(f"`x` is {x!r}. {choice(x, CLOCKS)}")
    return [_run(path, given, by, y, x) for path, given in _folders(paths)]


def _folders(paths: Sequence[str | os.PathLike[str]]) -> list[tuple[Path, Path]]:
    """The folder of each run, and the given path in which it was first found."""
    if not paths:
        raise DataError("no run to compare: give one run folder or more.")
    found: dict[Path, tuple[Path, Path]] = {}
    for path in map(Path, paths):
        inner = [path] if (path / METRICS_FILE).exists() else sorted(p.parent for p in path.glob(f"*/{METRICS_FILE}"))
        if not inner:
            raise DataError(f"{path} holds no run: there is no {METRICS_FILE} in it, nor in a folder in it.")
        for run in inner:
            found.setdefault(run.resolve(), (run, path))
    return [*found.values()]


def _run(path: Path, given: Path, by: str, y: str, x: str) -> RunCurve:
    rows = read_jsonl(path / METRICS_FILE)
    pairs = [(row.get(x), _figure(row, y)) for row in rows]
    known: dict[float, float] = {at: value for at, value in pairs if _is_number(at) and _is_number(value)}
    if not known:
        fields = [*rows[0]] if rows else []
        there = choice(y.partition("/")[0], fields) if y.partition("/")[0] not in fields else "It has no number there."
        raise DataError(f"{path}: no line has `{x}` with `{y}`. {there}")
    at = np.array(sorted(known), np.float64)
    lost = [row[x] for row in rows if _is_number(row.get(x)) and row[x] > at[-1] and _is_lost(row, y)]
    if lost:
        _log.warning(
            f"{path}: `{y}` is not a finite number from {x} {lost[0]:,} on: the run has diverged. What it has before, "
            f"at {at[-1]:,.0f}, counts as its last value."
        )
    meta = load_meta(path) if (path / MANIFEST).exists() else {}
    settings = _settings(meta)
    return RunCurve(
        str(path),
        str(given) if by == "folder" else _group(path, settings, by),
        _env_of(path, meta),
        at,
        np.array([known[t] for t in at.tolist()], np.float64),
    )


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and bool(np.isfinite(value))


def _figure(row: Mapping[str, Any], name: str) -> Any:
    root, _, part = name.partition("/")
    value = row.get(root)
    return value.get(part) if part and isinstance(value, Mapping) else value


def _is_lost(row: Mapping[str, Any], name: str) -> bool:
    """Whether a figure is NaN or infinite.

    NaN is written as null. A null in a field itself, such as ``return_mean``, does not count, as it may only be unknown
    yet.
    """
    root, _, part = name.partition("/")
    value = _figure(row, name)
    is_null = value is None and isinstance(row.get(root), Mapping) and part in row[root]
    return is_null or (isinstance(value, float) and not _is_number(value))


def _env_of(path: Path, meta: Any) -> str:
    """A name that runs in the same env share. An env without a name in the checkpoint counts as that run's own."""
    config = meta.get("config") if isinstance(meta, Mapping) else None
    env = config.get("env") if isinstance(config, Mapping) else None
    name = saved_env_name({"env": env})
    if env is None or env == name:
        return str(name)
    return f"{name} {json.dumps(env)}" if name and len(env) > 1 else name or f"the env of {path}"


def _settings(meta: Any) -> dict[str, Any]:
    """The settings of a run by dotted path, and ``algorithm``."""
    if not isinstance(meta, Mapping):
        return {}
    config, out = meta.get("config"), dict[str, Any]()
    waiting: list[tuple[str, Any]] = [("", config if isinstance(config, Mapping) else {})]
    for path, value in waiting:
        if isinstance(value, Mapping):
            waiting += [(f"{path}.{key}" if path else str(key), inner) for key, inner in value.items()]
        else:
            out[path] = value
    return {**out, "algorithm": str(meta.get("algorithm")).rpartition(":")[2].lower()}


def _group(path: Path, settings: Mapping[str, Any], by: str) -> str:
    by = "algorithm" if by == "algo" else by
    exact = [name for name in settings if by in (name, name.replace(".", "_"))]
    found = exact or [name for name in settings if name.endswith(f".{by}")]
    if len(found) > 1:
        raise SettingsError(f"`{by}` to group runs by may be {' or '.join(found)}: give the whole name.")
    if not found:
        names = ["algorithm", "folder", *settings]
        raise SettingsError(f"{path} has no setting `{by}` to group runs by. {choice(by, names)}")
    value = settings[found[0]]
    return str(value) if by == "algorithm" else f"{by} {value}"


def _grouped(runs: Sequence[RunCurve]) -> dict[tuple[str, str], list[RunCurve]]:
    """The runs by env and group, in their order."""
    out: dict[tuple[str, str], list[RunCurve]] = {}
    for run in runs:
        out.setdefault((run.env, run.group), []).append(run)
    return out


def band_of(runs: Sequence[RunCurve]) -> Band:
    """The interquartile mean of runs over time, in the range that all of them cover, with its 95 % interval.

    Raises:
        DataError: the runs have no range in common, or their x-axis stays at 0.
    """
    first, last = max(run.x[0] for run in runs), min(run.x[-1] for run in runs)
    if not last:
        raise DataError(
            f"{runs[0].group}: `x` is 0 in all rows, as env steps are in offline training: use another, such as "
            "updates (--x updates)."
        )
    if last < first:
        raise DataError(f"{runs[0].group}: its runs have no time in common: {', '.join(run.path for run in runs)}.")
    x = np.linspace(first, last, NUM_POINTS if last > first else 1)
    y = np.stack([np.interp(x, run.x, run.y) for run in runs], axis=-1)
    low, high = bootstrap_interval(y)
    label = f"{runs[0].group} ({len(runs)} run{'s' if len(runs) > 1 else ''})"
    return Band(label, x, interquartile_mean(y), low, high)


def plot_groups(
    paths: Sequence[str | os.PathLike[str]],
    to: str | os.PathLike[str],
    *,
    by: str = "algorithm",
    y: str = "return_mean",
    x: str = "env_steps",
) -> Path:
    """Plot a figure of groups of runs: the interquartile mean and its 95 % interval, a panel for each env.

    Args:
        paths: As for `read_runs`; so are ``by``, ``y`` and ``x``.
        to: The image file; its suffix selects the format (``.png``, ``.svg``, ``.pdf``).

    Raises:
        DataError: as `read_runs`; or the image can't be written.
        SettingsError: as `read_runs`.
    """
    panels: dict[str, list[Band]] = {}
    for (env, _), runs in _grouped(read_runs(paths, by=by, y=y, x=x)).items():
        panels.setdefault(env, []).append(band_of(runs))
    return plot_panels([Panel(env, x, y, bands) for env, bands in panels.items()], Path(to))


def compare(
    paths: Sequence[str | os.PathLike[str]], *, by: str = "algorithm", y: str = "return_mean", x: str = "env_steps"
) -> list[GroupEnd]:
    """How groups of runs ended: the interquartile mean of their last values, with its 95 % interval; the best first.

    Args and errors are those of `read_runs`. Envs are not mixed: returns of different ones have different scales.
    """
    out = []
    for (env, name), runs in _grouped(read_runs(paths, by=by, y=y, x=x)).items():
        ends = [float(run.x[-1]) for run in runs]
        value = interval_of(np.array([run.y[-1] for run in runs]))
        out.append(GroupEnd(name, env, len(runs), *value, min(ends), max(ends)))
    return sorted(out, key=lambda group: (group.env, -group.value))
