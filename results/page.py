# SPDX-License-Identifier: Apache-2.0
"""Writes ``docs/results.md``, its pictures, and the figures that ``etude presets`` shows."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

import etude
from etude.algorithms.comparison import RunCurve, band_of, bootstrap_interval
from etude.metrics.plot import Panel, plot_panels
from etude.presets import RESULTS, Preset

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs" / "results.md"
PICTURES: Final = ROOT / "docs" / "assets" / "results"
REACHED: Final = ROOT / "etude" / "presets" / RESULTS
INTRO: Final = """# Results

The returns that the [presets](presets.md) reach, next to the returns that their sources report. Where another library
is named, it was run with the same settings on the same machine.

- *Trained for*: the env steps or gradient steps of each run. *200k of 1M steps* is a run shorter than the preset says.
- *Return*: the mean over seeds. Each seed's return is the mean of 20 evaluation episodes after training.
- *Interval*: the 95 % interval of the interquartile mean over seeds, by the bootstrap
  ([Agarwal et al. 2021](https://arxiv.org/abs/2108.13264)). With two or three seeds, it is only a rough guide.
- *CPU minutes*: the time of one run with one thread, including evaluation; without runs that were interrupted. The
  speed of the machine changed by up to a factor of two between runs, so small differences mean nothing; the
  [benchmarks](benchmarks.md) compare speed in one run. Etude's runs of SAC, TD3, IQL, TD3+BC and CQL
  compile the gradient step (`compute.compile`).
- *sb3-contrib*: its recurrent networks have its default width of 256, those of the preset 64.
- *Published*: the return that the source of the settings reports. Most sources used older versions of the envs (`-v1`
  to `-v3`); versions 4 and 5 of the MuJoCo envs differ in details of rewards and physics. `etude presets --json` shows
  the sources.
- *medium*, *medium-replay*, *expert*: the recording that an offline preset learned from, made by the preset of SAC as
  D4RL's are. *expert* holds episodes of its best agent, *medium* those of an agent with a third of that return, and
  *medium-replay* all steps until then. *Return in the data* is the mean return of its episodes.
- Learning curves show the mean return of training episodes over seeds, with the same interval.
  Stable-Baselines3 averages the last 100 episodes, Etude's algorithms with a replay buffer the last 20: while returns
  rise, the curves of the former lag behind.
- *TD3 on Hopper-v5*: runs differ a lot here, with either library, as many stay in a local optimum of a few hundred
  for most of the 200,000 steps. The intervals overlap. Etude's seed 4 reached 589 compiled, and 2,932 without
  `compile`, which draws other random numbers.

`make results` runs what is missing, which takes hours, and writes this page.
"""
FAMILIES: Final = {
    "MuJoCo": ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5"),
    "Classic control and Box2D": (
        *("CartPole-v1", "no_velocity:CartPole-v1", "Acrobot-v1", "MountainCar-v0", "LunarLander-v3"),
    ),
    "Atari": ("atari:Pong", "atari:Breakout"),
    "Many agents": ("pettingzoo.sisl.pursuit_v5:parallel_env", "pettingzoo.sisl.multiwalker_v9:parallel_env"),
}
NAMES: Final = {
    "etude": "",
    "sb3": "Stable-Baselines3",
    "sb3-contrib": "sb3-contrib",
    "d3rlpy": "d3rlpy",
}
PANELS: Final = 3
"""In a picture."""


def write(runs: Sequence[Mapping[str, Any]]) -> None:
    """Write everything anew from the runs that were made."""
    presets = {preset.name: preset for preset in etude.find_presets()}
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["preset"], run["by"], json.dumps([run["stop"], run.get("data")])), []).append(run)
    _write_reached(groups)
    lines = []
    for family, envs in FAMILIES.items():
        own = [
            (presets[name], by, made)
            for (name, by, _), made in groups.items()
            if presets[name].env in envs and by != "defaults"
        ]
        online, offline = ([one for one in own if ("updates" in one[0].stop) is kind] for kind in (False, True))
        if online:
            lines += [f"## {family}", "", *_table(online), "", *_pictures(family, "env_steps", online)]
        if offline:
            lines += [f"## {family}, from recordings", "", *_table(offline), ""]
            lines += _pictures(f"{family}-offline", "updates", offline)
    lines += _defaults(presets, groups)
    made = {name for name, by, _ in groups if by == "etude"}
    not_run: dict[str, list[str]] = {}
    for preset in presets.values():
        if preset.name not in made:
            not_run.setdefault(f"`{preset.algorithm}`", []).append(f"`{preset.env}`")
    if not_run:
        lines += ["## Presets without results", "", "These presets have not been run yet:", ""]
        lines += [f"- {algorithm}: {', '.join(envs)}" for algorithm, envs in not_run.items()]
    PAGE.write_text("\n".join([INTRO, *lines]) + "\n", encoding="utf-8")


def _defaults(
    presets: Mapping[str, Preset], groups: Mapping[tuple[str, str, str], Sequence[Mapping[str, Any]]]
) -> list[str]:
    """The section that compares default settings with presets."""
    rows = [
        f"| {_task(presets[name])} | `{presets[name].algorithm}` | {_trained_for(presets[name], own)} "
        f"| {_reached(own)} | {_reached(groups[name, 'etude', how])} |"
        for (name, by, how), own in groups.items()
        if by == "defaults" and (name, "etude", how) in groups
    ]
    if not rows:
        return []
    head = [
        "## Defaults and presets",
        "",
        "The default settings of each algorithm were not tuned on these tasks; a preset is made for its task.",
        "",
        "| task | algorithm | trained for | defaults (95 % interval), seeds | preset |",
        "| --- | --- | --- | --- | --- |",
    ]
    return [*head, *sorted(rows), ""]


def _write_reached(groups: Mapping[tuple[str, str, str], Sequence[Mapping[str, Any]]]) -> None:
    reached = {}
    for (name, by, _), runs in groups.items():
        if by == "etude" and runs[0].get("data") in (None, "medium"):  # sources report what they reached from `medium`
            returns, seconds = [run["return"] for run in runs], _seconds(runs)
            seconds = None if seconds is None else round(seconds)
            reached[name] = {"returns": returns, **runs[0]["stop"], "seconds": seconds}
    REACHED.write_text(json.dumps(reached, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _seconds(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean CPU time of those runs that were not interrupted; None if all were."""
    known = [run["cpu_seconds"] for run in runs if run["cpu_seconds"] is not None]
    return statistics.fmean(known) if known else None


def _table(own: Sequence[tuple[Preset, str, Sequence[Mapping[str, Any]]]]) -> list[str]:
    is_offline = "data_return" in own[0][2][0]
    head = ["task", "algorithm", "trained for", "return (95 % interval), seeds", "CPU minutes", "published"]
    head[3:3] = ["return in the data"] * is_offline
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for preset, by, runs in sorted(own, key=lambda one: _place(*one)):
        seconds = _seconds(runs)
        cells = (
            _task(preset),
            _label(f"`{preset.algorithm}`", by, runs),
            _trained_for(preset, runs),
            *[f"{run['data_return']:,.1f}" for run in runs[:1] if is_offline],
            _reached(runs),
            "unknown" if seconds is None else f"{seconds / 60:,.1f}",
            preset.published.partition(" after")[0] if by == "etude" else "",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _place(preset: Preset, by: str, runs: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Of a row in a table: another library's follows Etude's."""
    return preset.env, preset.algorithm, runs[0].get("data") or "", by != "etude"


def _task(preset: Preset) -> str:
    return preset.env.partition(":")[0].removeprefix("pettingzoo.") if len(preset.env) > 30 else preset.env


def _trained_for(preset: Preset, runs: Sequence[Mapping[str, Any]]) -> str:
    unit, size = next(iter(runs[0]["stop"].items()))
    short = "" if size >= preset.stop[unit] else f" of {_short(preset.stop[unit])}"
    return f"{_short(size)}{short} {unit.removeprefix('env_')}"


def _reached(runs: Sequence[Mapping[str, Any]]) -> str:
    """The mean return over seeds, its interval if there are several, and the number of seeds."""
    returns = np.array([run["return"] for run in runs])
    if len(returns) == 1:
        return f"**{returns[0]:,.1f}**, 1"
    low, high = bootstrap_interval(returns)
    return f"**{returns.mean():,.1f}** ({low:,.1f} … {high:,.1f}), {len(runs)}"


def _label(algorithm: str, by: str, runs: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(part for part in (algorithm, runs[0].get("data"), NAMES[by]) if part)


def _short(count: int) -> str:
    return f"{count / 1e6:g}M" if count >= 1_000_000 else f"{count / 1e3:g}k"


def _pictures(family: str, x: str, own: Sequence[tuple[Preset, str, Sequence[Mapping[str, Any]]]]) -> list[str]:
    panels: dict[str, list[Any]] = {}
    for preset, by, runs in own:
        curves = [np.array(run["curve"], np.float64) for run in runs if len(run["curve"]) > 1]
        if curves:
            label = _label(preset.algorithm, by, runs)
            found = [RunCurve("", label, preset.env, curve[:, 0], curve[:, 1]) for curve in curves]
            panels.setdefault(preset.env, []).append(band_of(found))
    names, lines = list(panels), []
    for k in range(0, len(names), PANELS):
        shown = {name: panels[name] for name in names[k : k + PANELS]}
        file = PICTURES / f"{family.split()[0].lower()}-{k // PANELS + 1}.png"
        plot_panels([Panel(env, x, "return_mean", bands) for env, bands in shown.items()], file)
        lines += [f"![Learning curves: {', '.join(shown)}](assets/results/{file.name})", ""]
    return lines
