# SPDX-License-Identifier: Apache-2.0
"""One run of a preset: trained, evaluated, and told as a line of ``runs.jsonl``."""

import dataclasses
import json
import os
import platform
import resource
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np

import etude
from etude.presets import Preset
from results.data import recording
from results.plan import Planned

HERE: Final = Path(__file__).parent
RUNS: Final = HERE / "runs.jsonl"
FOLDER: Final = Path("runs/results")
EPISODES: Final = 20
"""Of the evaluation at the end, without exploration."""
COMPILED: Final = frozenset({"sac", "td3", "iql", "td3_bc", "cql"})
"""Algorithms of two and more networks, whose step is compiled: the runs of Etude take about half the time."""
DATA_STEPS: Final = 100_000
"""That SAC trains for to make recordings."""
POINTS: Final = 50
"""That are kept of a learning curve."""


def told() -> list[dict[str, Any]]:
    """The runs that were made, in order."""
    return [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()]


def preset_of(planned: Planned) -> tuple[Preset, dict[str, int]]:
    """The preset, and the `etude.Stop` of its run."""
    preset = next(preset for preset in etude.find_presets() if preset.name == planned.preset)
    (unit, size), budget = next(iter(preset.stop.items())), planned.budget
    return preset, {unit: size if budget is None else budget}


def is_made(planned: Planned, seed: int, made: list[dict[str, Any]]) -> bool:
    """Whether this run is among those that were made."""
    _, stop = preset_of(planned)
    wanted = {"preset": planned.preset, "seed": seed, "by": planned.by, "stop": stop, "data": planned.data}
    return any(all(run.get(name) == value for name, value in wanted.items()) for run in made)


def make(planned: Planned, seed: int, minutes: float) -> None:
    """Make a run in a process of its own, and keep its line.

    A run of Etude goes on from its last checkpoint where it was interrupted.

    Raises:
        TimeoutExpired: it took longer than ``minutes``.
        CalledProcessError: it failed.
    """
    words = [sys.executable, "-m", "results.runs", json.dumps(planned), str(seed)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(words, env=os.environ | threads, stdout=subprocess.PIPE, text=True, timeout=60 * minutes)
    done.check_returncode()
    with RUNS.open("a", encoding="utf-8") as file:
        file.write(done.stdout.splitlines()[-1] + "\n")


def run(planned: Planned, seed: int) -> dict[str, Any]:
    """Make a run in this process.

    Returns:
        What it reached: ``return``, the mean of `EPISODES` episodes without exploration; ``curve``, pairs of a clock
        and the mean return of training; ``cpu_seconds`` of training and evaluating; offline, ``data_return``, the mean
        return of the episodes in the recording. Where the run went on from a checkpoint, ``cpu_seconds`` is None.
    """
    preset, stop = preset_of(planned)
    data, of_data = None, {}
    if planned.data is not None:
        data = recording(FOLDER / "data" / preset.env, preset.env, planned.data, DATA_STEPS)
        of_data["data_return"] = round(etude.Recording.open(data).info()["return_mean"], 1)
    made_data, goes_on = _cpu_seconds(), False
    if planned.by in ("etude", "defaults"):
        kind = etude.ALGORITHMS[preset.algorithm]
        config = preset.config() if planned.by == "etude" else kind.Config(env=preset.env)
        if data is not None:
            every = max(1, stop["updates"] // (10 * config.updates_per_iteration))
            evaluation = dataclasses.replace(config.evaluation, interval=every, episodes=10)
            config = dataclasses.replace(config, data=data, evaluation=evaluation)
        name = preset.name if planned.data is None else f"{preset.name}-{planned.data}"
        folder = FOLDER / planned.by / name / f"seed-{seed}"
        goes_on = (folder / "checkpoint.json").exists()
        reached, curve = _with_etude(kind, config, stop, seed, folder)
    else:
        from results import peers  # their packages are there for results only

        reached, curve = peers.RUN[planned.by](preset, stop, seed, data)
    return {
        "preset": planned.preset,
        "by": planned.by,
        "seed": seed,
        "stop": stop,
        "data": planned.data,
        "return": round(reached, 3),
        "cpu_seconds": None if goes_on else round(_cpu_seconds() - made_data),
        "machine": platform.machine(),
        "curve": thinned(curve),
        **of_data,
    }


def _cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in usage)


def _with_etude(
    kind: Any, config: Any, stop: dict[str, int], seed: int, folder: Path
) -> tuple[float, list[tuple[float, float]]]:
    compute = dataclasses.replace(config.compute, threads=1, compile=kind.name in COMPILED)
    config = dataclasses.replace(config, seed=seed, compute=compute)
    goes_on = (folder / "checkpoint.json").exists()
    algorithm = etude.load(folder, env=config.env) if goes_on else kind(config)
    with closing(algorithm):
        algorithm.fit(etude.Stop(**stop), out=folder, log=("jsonl",), save_interval=120)
        reached = algorithm.evaluate(EPISODES, seed=1000 + seed).return_mean
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clock = next(iter(stop))
    return reached, [(line[clock], line["return_mean"]) for line in lines if line["return_mean"] is not None]


def thinned(curve: list[tuple[float, float]]) -> list[list[float]]:
    """At most `POINTS` points of a curve, from the first to the last."""
    if not curve:
        return []
    kept = np.unique(np.linspace(0, len(curve) - 1, POINTS).round().astype(int))
    return [[curve[k][0], round(curve[k][1], 2)] for k in kept]


if __name__ == "__main__":
    print(json.dumps(run(Planned(*json.loads(sys.argv[1])), int(sys.argv[2]))))
