# SPDX-License-Identifier: Apache-2.0
"""What all rows share: work that races in turns, processes that are timed, figures with what they are held against."""

import dataclasses
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

ENV = "CartPole-v1"
ETUDE = "Etude"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Environment variables that hold thread pools to a size."""

STEPS_A_SECOND, REQUESTS_A_SECOND, SHARE = "steps/s", "requests/s", "of its speed alone"
"""Units of which more is better."""

Work = Callable[[], int]
"""Does a piece of work and says how many units (steps, updates, rows) it was."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How much is measured, and where files may be put."""

    quick: bool
    folder: Path

    @property
    def rounds(self) -> int:
        """How often each contender of a race is measured."""
        return 3 if self.quick else 7

    @property
    def seconds(self) -> float:
        """How long each of these is, at least."""
        return 0.05 if self.quick else 0.4

    @property
    def processes(self) -> int:
        """How often a whole process is timed: once for each seed."""
        return 1 if self.quick else 5


@dataclasses.dataclass(frozen=True)
class Figure:
    """What one contender reached."""

    name: str
    values: list[float]
    kind: Literal["etude", "limit", "peer"] = "limit"

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.values)


@dataclasses.dataclass(frozen=True)
class Reach:
    """What Etude is to reach: a multiple of another figure of the same run."""

    ratio: float
    to: str | None = None
    """The other figure's name; None: `ratio` is in the row's own unit."""
    every: bool = False
    """Every one of the rounds is to reach it, not only the median."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    work: str
    unit: str
    figures: list[Figure]
    """Etude's is the first."""
    reach: Reach | None = None
    note: str = ""

    @property
    def more_is_better(self) -> bool:
        """Whether a larger figure is the better one; not so for times and memory."""
        return self.unit in (STEPS_A_SECOND, REQUESTS_A_SECOND, SHARE)

    def ratio_to(self, other: Figure) -> float:
        """Etude's figure over another's: the median over the rounds, in which drift of the machine cancels."""
        own = self.figures[0]
        if len(own.values) != len(other.values):
            return own.median / other.median
        return statistics.median(a / b for a, b in zip(own.values, other.values, strict=True))

    def got(self) -> float | None:
        """What is to be compared with ``reach.ratio``."""
        if self.reach is None:
            return None
        own = self.figures[0]
        worst = min(own.values) if self.more_is_better else max(own.values)
        if self.reach.to is None:
            return worst if self.reach.every else own.median
        other = next(figure for figure in self.figures if figure.name == self.reach.to)
        return worst / other.median if self.reach.every else self.ratio_to(other)

    def is_met(self) -> bool | None:
        """Whether the reach is met; None where there is none."""
        got = self.got()
        if got is None or self.reach is None:
            return None
        return got >= self.reach.ratio if self.more_is_better else got <= self.reach.ratio


def race(works: Mapping[str, Work], options: Options) -> dict[str, list[float]]:
    """Units a second of each: one after the other, round after round, after a warm-up."""
    rates: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        rate(work, options.seconds / 4)
    for _ in range(options.rounds):
        for name, work in works.items():
            rates[name].append(rate(work, options.seconds))
    return rates


def rate(work: Work, seconds: float) -> float:
    """Units a second, over at least ``seconds``."""
    units, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds:
        units += work()
    return units / spent


def milliseconds(rates: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Units a second as milliseconds a unit."""
    return {name: [1e3 / value for value in values] for name, values in rates.items()}


class Finished(NamedTuple):
    """A process that has ended."""

    seconds: float
    megabytes: float
    """The most memory that it held."""
    out: str


def process(argv: Sequence[str], *, threads: int | None = 1) -> Finished:
    """Run a process to its end.

    Args:
        argv: The command.
        threads: The size of its thread pools; None leaves them to it.

    Raises:
        RuntimeError: it failed; with what it wrote.
    """
    env = {name: value for name, value in os.environ.items() if name not in THREADS}
    if threads is not None:
        env |= dict.fromkeys(THREADS, str(threads))
    launch = [sys.executable, "-I", "-S", str(Path(__file__).with_name("launch.py"))]
    done = subprocess.run([*launch, *argv], capture_output=True, text=True, env=env, check=False)
    complaint, _, figures = done.stderr.rpartition("\n")
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}:\n{complaint[-2000:]}")
    seconds, peak = map(float, figures.split())
    return Finished(seconds, peak / (2**20 if sys.platform == "darwin" else 2**10), done.stdout)


def python(code: str, *, threads: int | None = 1) -> Finished:
    """Run Python code in a process of its own."""
    return process([sys.executable, "-c", code], threads=threads)


def etude(*args: str) -> Finished:
    """Run the command line."""
    return process([str(Path(sys.executable).parent / "etude"), *args])


def race_processes(runs: Mapping[str, Callable[[int], Finished]], options: Options) -> dict[str, list[Finished]]:
    """Processes in turns: ``run(seed)`` for seeds 0, 1, ..."""
    done: dict[str, list[Finished]] = {name: [] for name in runs}
    for seed in range(options.processes):
        for name, run in runs.items():
            done[name].append(run(seed))
    return done


def expert(options: Options) -> Path:
    """A recording of 500 episodes of a CartPole expert, about 250,000 steps; made when it is first asked for.

    The expert itself is saved as ``run`` beside it.
    """
    path = options.folder / "expert"
    if not path.exists():
        from etude import PPO, Stop, preset

        algorithm = PPO(preset("ppo", ENV, seed=0))
        algorithm.fit(Stop(return_mean=450, env_steps=400_000))
        algorithm.save(options.folder / "run")
        algorithm.record(path, 500, seed=1)
        algorithm.close()
    return path
