# SPDX-License-Identifier: Apache-2.0
"""Whole runs of the command line on a Ray cluster that is started for them, to a mean return of 450."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import ray_rllib
from benchmarks.harness import ENV, ETUDE, Figure, Finished, Options, Reach, Row, etude, process

RLLIB, LOCAL = "RLlib, settings of its tuned example", "Etude, local engine"
SEEDS = 3


def rows(options: Options) -> Iterator[Row]:
    """From the start of the process to its end: the start of Ray is in it."""
    runs: dict[str, Callable[[int], Finished]] = {
        ETUDE: lambda seed: _train(options.folder, seed, "--engine", "ray", "--num-runners", "2"),
        LOCAL: lambda seed: _train(options.folder, seed),
    }
    if ray_rllib.is_there():
        runs[RLLIB] = lambda seed: process([sys.executable, "-m", "benchmarks.ray_rllib", str(seed)])
    done: dict[str, list[Finished]] = {name: [] for name in runs}
    for seed in range(1 if options.quick else SEEDS):
        for name, run in runs.items():
            done[name].append(run(seed))
    figures = [
        Figure(name, [finished.seconds for finished in of], {ETUDE: "etude", RLLIB: "peer"}.get(name, "limit"))  # type: ignore[arg-type]
        for name, of in done.items()
    ]
    yield Row(
        f"PPO on {ENV} with 2 runners on a Ray cluster, process start to a mean return of 450",
        "s",
        figures,
        Reach(1 / 3, RLLIB) if RLLIB in done else None,
        "; ".join(_note(name, [_result(finished) for finished in of]) for name, of in done.items()),
    )


def _train(folder: Path, seed: int, *more: str) -> Finished:
    out = folder / f"ray-ppo-{seed}"
    shutil.rmtree(out, ignore_errors=True)
    settings = ("--env", ENV, "--seed", str(seed), "--stop.return-mean", "450", "--out", str(out))
    return etude("train", "ppo", "--preset", *settings, *more, "--quiet", "--json")


def _result(finished: Finished) -> dict[str, Any]:
    """What is printed last, behind what a library may have said."""
    result: dict[str, Any] = json.loads(finished.out.strip().splitlines()[-1])
    return result


def _note(name: str, results: list[dict[str, Any]]) -> str:
    steps = ", ".join(f"{result['env_steps']:,}" for result in results)
    return f"{name}: {min(result['return_mean'] for result in results):.0f} or more after {steps} steps"
