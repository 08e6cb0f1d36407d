# SPDX-License-Identifier: Apache-2.0
"""One algorithm with several seeds, each a run in a process and a folder of its own."""

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from etude.algorithms.algorithm import Algorithm
from etude.algorithms.config import AlgorithmConfig
from etude.algorithms.parallel import OUTPUT, Outcome, TrainingJob, train_all
from etude.algorithms.results import Result, Stop
from etude.algorithms.run import Log, folder_of
from etude.envs import env_name
from etude.errors import SettingsError

_LOG: Final = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedRun:
    """How the run of one seed ended."""

    seed: int
    path: str
    """Its folder, which `etude.load` takes."""
    result: Result | None
    """The last one; None where the run failed."""
    error: str | None = None
    """What it failed with."""


def fit_seeds(
    config: AlgorithmConfig,
    seeds: int | Sequence[int] = 5,
    *,
    stop: Stop,
    out: str | os.PathLike[str],
    algorithm: type[Algorithm[Any]] | None = None,
    max_concurrent: int | None = None,
    progress: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    log: Sequence[Log] = ("jsonl", "tensorboard"),
    save_interval: float = 60.0,
) -> list[SeedRun]:
    """Train with several seeds, each in a process of its own, and give how each ended.

    The folder ``seed-3`` in ``out`` is the run of seed 3, as `Algorithm.fit` leaves it, and ``log.txt`` there is what
    its process wrote. Ctrl-C lets all runs save and end, and raises KeyboardInterrupt. A run that fails ends no other;
    a warning says why it did.

    Args:
        config: The settings. They are sent to other processes, as an env's are to its workers.
        seeds: How many, counted from the config's seed (from 0 if it has none); or which.
        stop: When each ends; something must be set.
        out: The folder of the runs, on this machine.
        algorithm: None: the one that ``config`` is of.
        max_concurrent: How many are trained at a time, at least 1; None: as many as the cores allow, see `cores_of`.
        progress: Show all runs: live in a terminal or a notebook, else as lines on standard error.
        resume: Go on with the runs in ``out`` that have not ended; those that have are not trained again.
        overwrite: Replace the runs that are in ``out``.
        log: Where metrics go, see `Algorithm.fit`.
        save_interval: Seconds between checkpoints, at least 0; one is always saved at the end.

    Raises:
        SettingsError: there is no seed, ``stop`` sets nothing, the settings can't be sent to a process, or ``out``
            can't be written, is in use, or has other runs.
        KeyboardInterrupt: it was interrupted; the runs are saved, and ``resume=True`` goes on.
    """
    if not isinstance(stop, Stop) or stop == Stop():
        raise SettingsError("fit_seeds needs to know when to stop: set something in stop=etude.Stop(...).")
    folder, kind = folder_of(out), algorithm or algorithm_of(type(config))
    numbers = seeds_of(config.seed, seeds) if isinstance(seeds, int) else list(seeds)
    if not numbers or len({*numbers}) < len(numbers) or not all(isinstance(seed, int) for seed in numbers):
        raise SettingsError(f"`seeds` is {seeds!r}, but must be how many (at least 1), or different whole numbers.")
    changes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    shared: dict[str, Any] = {"algorithm": kind, "stop": stop, "log": log, "save_interval": save_interval}
    shared |= {"resume": resume, "overwrite": overwrite}
    jobs = seed_jobs(numbers, folder, config, changes, **shared)
    title = title_of(kind, config, len(jobs))
    outcomes = train_all(jobs, folder, title, max_concurrent=max_concurrent, quiet=not progress)
    for line in failures(jobs, outcomes):
        _LOG.warning(line)
    if any(outcome.is_interrupted for outcome in outcomes):
        raise KeyboardInterrupt(f"the runs are saved in {folder}; fit_seeds(..., resume=True) goes on")
    return [
        SeedRun(seed=seed, path=str(job.out), result=outcome.result, error=outcome.error)
        for seed, job, outcome in zip(numbers, jobs, outcomes, strict=True)
    ]


def seeds_of(first: int | None, count: int) -> list[int]:
    """So many seeds, counted from the first one; from 0 if there is none."""
    return list(range(first or 0, (first or 0) + count))


def seed_jobs(
    seeds: Sequence[int],
    out: Path,
    config: AlgorithmConfig,
    changes: Mapping[str, Any],
    *,
    prefix: str = "",
    **shared: Any,
) -> list[TrainingJob]:
    """The runs of these seeds in the folder ``out``.

    Args:
        seeds: The seeds.
        out: Each has a folder in it.
        config: The settings of those that begin.
        changes: Settings that count more than those of a checkpoint, for those that go on.
        prefix: What their names begin with.
        shared: The other fields of `TrainingJob`.
    """
    return [
        TrainingJob(
            name=f"{prefix}seed-{seed}",
            config=dataclasses.replace(config, seed=seed),
            changes={**changes, "seed": seed},
            out=out / f"seed-{seed}",
            **shared,
        )
        for seed in seeds
    ]


def title_of(kind: type[Algorithm[Any]], config: AlgorithmConfig, num: int, noun: str = "seed") -> str:
    """What is trained, in words."""
    where = f" on {env_name(config.env)}" if config.env is not None else ""
    return f"{kind.name}{where}, {num} {noun}{'s' if num != 1 else ''}"


def failures(jobs: Sequence[TrainingJob], outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each error, with the runs that failed with it."""
    found: dict[str, list[TrainingJob]] = {}
    for job, outcome in zip(jobs, outcomes, strict=True):
        if outcome.error is not None:
            found.setdefault(outcome.error, []).append(job)
    return [
        f"{', '.join(job.name for job in failed)} failed: {error} (see {failed[0].out / OUTPUT})"
        for error, failed in found.items()
    ]


def algorithm_of(config: type[AlgorithmConfig]) -> type[Algorithm[Any]]:
    """The algorithm whose settings are of the class ``config``.

    Raises:
        SettingsError: there is none, or more than one.
    """
    known = list[type[Algorithm[Any]]](Algorithm.__subclasses__())
    for cls in known:
        known += [inner for inner in cls.__subclasses__() if inner not in known]
    # One's own algorithm may inherit from PPO, and take PPO's settings: they are PPO's all the same.
    own = [cls for cls in known if cls.__dict__.get("Config") is config and cls.loss is not Algorithm.loss]
    if len(own) != 1:
        there = ", ".join(cls.__name__ for cls in own) or "no algorithm"
        raise SettingsError(f"{config.__name__} are the settings of {there}: say which is meant, as algorithm=....")
    return own[0]
