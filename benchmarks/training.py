# SPDX-License-Identifier: Apache-2.0
"""Whole runs of the command line, from the start of the process to a mean return of 450."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import (
    ENV,
    ETUDE,
    Figure,
    Finished,
    Options,
    Reach,
    Row,
    etude,
    expert,
    process,
    python,
    race_processes,
)

SB3 = "SB3, zoo's settings"
TORCH = "import torch alone"
PPO_REACH = 6 / 12.7
BC_REACH, MEMORY_REACH = 6 / 0.87, 600


def ppo(options: Options) -> Iterator[Row]:
    """PPO with its preset until the mean of the last 100 returns is 450 or more."""

    def run(seed: int) -> Finished:
        return _train("ppo", seed, options.folder / f"ppo-{seed}", "--preset")

    def peer(seed: int) -> Finished:
        return process([sys.executable, "-m", "benchmarks.sb3", str(seed)])

    done = race_processes({ETUDE: run, SB3: peer}, options)
    results = [json.loads(finished.out) for finished in done[ETUDE]]
    ends = [float(finished.out) for finished in done[SB3]]
    missed = sum(end < 450 for end in ends)
    note = (
        f"Etude's mean return: {min(r['return_mean'] for r in results):.1f} or more, over "
        f"{min(r['returns_counted'] for r in results)} episodes, after "
        f"{', '.join(format(r['env_steps'], ',') for r in results)} steps"
    )
    if missed:
        note += f"; SB3 ended its 100,000 steps below 450 in {missed} of {len(ends)} runs ({min(ends):.0f})"
    yield Row(
        f"PPO on {ENV}, process start to a mean return of 450",
        "s",
        [Figure(ETUDE, _seconds(done[ETUDE]), "etude"), Figure(SB3, _seconds(done[SB3]), "peer")],
        Reach(PPO_REACH, SB3, every=True),
        note,
    )


def bc(options: Options) -> Iterator[Row]:
    """BC from a recording of 500 expert episodes until an evaluation's mean is 450 or more."""
    data = str(expert(options))

    def run(seed: int) -> Finished:
        return _train("bc", seed, options.folder / f"bc-{seed}", "--data", data, "--stop.updates", "20000")

    done = race_processes({ETUDE: run, TORCH: lambda _: python("import torch")}, options)
    results = [json.loads(finished.out) for finished in done[ETUDE]]
    work = f"BC on {ENV} from a recording, process start to a mean return of 450"
    yield Row(
        work,
        "s",
        [Figure(ETUDE, _seconds(done[ETUDE]), "etude"), Figure(TORCH, _seconds(done[TORCH]))],
        Reach(BC_REACH, TORCH),
        f"after {', '.join(format(r['updates'], ',') for r in results)} updates",
    )
    yield Row(
        f"{work}: most memory held",
        "MB",
        [Figure(ETUDE, _memory(done[ETUDE]), "etude"), Figure(TORCH, _memory(done[TORCH]))],
        Reach(MEMORY_REACH),
        "in one process",
    )


def _train(algorithm: str, seed: int, out: Path, *more: str) -> Finished:
    shutil.rmtree(out, ignore_errors=True)
    settings = ("--env", ENV, "--seed", str(seed), "--stop.return-mean", "450", "--out", str(out))
    return etude("train", algorithm, *settings, *more, "--quiet", "--json")


def _seconds(done: list[Finished]) -> list[float]:
    return [finished.seconds for finished in done]


def _memory(done: list[Finished]) -> list[float]:
    return [finished.megabytes for finished in done]
