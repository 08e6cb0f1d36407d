# SPDX-License-Identifier: Apache-2.0
"""Train one algorithm with several seeds, each in its own process and folder."""

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
    """The outcome of the run of one seed."""

    seed: int
    path: str
    """The folder of the run; `etude.load` accepts it."""
    result: Result | None
    """The last result; None if the run failed."""
    error: str | None = None
    """The error with which the run failed; None if it succeeded."""


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
    """Train with several seeds, each in its own process.

    The run of seed 3 is in the folder ``seed-3`` in ``out``, with the same files that `Algorithm.fit` writes, and
    ``log.txt`` with the output of its process. On Ctrl-C, all runs save and end, and KeyboardInterrupt is raised. A run
    that fails does not affect the others; its error is logged as a warning.

    Args:
        config: The settings. They must be picklable, because they are sent to other processes.
        seeds: The number of seeds, counted from the config's seed (from 0 if it is None); or a sequence of seeds.
        stop: When each run ends; at least one condition must be set.
        out: The folder of the runs, on this machine.
        algorithm: The class of the algorithm; None: the one that ``config`` belongs to.
        max_concurrent: The number of runs trained at the same time, at least 1; None: as many as the cores allow.
        progress: Whether to show progress: live in a terminal or notebook, otherwise as lines on standard error.
        resume: Continue the unfinished runs in ``out``; finished ones are not trained again.
        overwrite: Replace the runs in ``out``.
        log: The sinks of metrics; see `Algorithm.fit`.
        save_interval: Seconds between checkpoints, at least 0. A checkpoint is always saved at the end.

    Returns:
        The outcome of each run, in the order of the seeds.

    Raises:
        SettingsError: there is no seed, ``stop`` has no condition, the settings can't be sent to a process, or ``out``
            can't be written to, is in use, or contains other runs.
        KeyboardInterrupt: training was interrupted. The runs are saved; call it with ``resume=True`` to continue.
    """
    if not isinstance(stop, Stop) or stop == Stop():
        raise SettingsError("fit_seeds needs to know when to stop: set a condition in stop=etude.Stop(...).")
    folder, kind = folder_of(out), algorithm or algorithm_of(type(config))
    numbers = seeds_of(config.seed, seeds) if isinstance(seeds, int) else list(seeds)
    if not numbers or len({*numbers}) < len(numbers) or not all(isinstance(seed, int) for seed in numbers):
        raise SettingsError(f"`seeds` is {seeds!r}, but must be a number (at least 1) or a list of distinct integers.")
    changes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    shared: dict[str, Any] = {"algorithm": kind, "stop": stop, "log": log, "save_interval": save_interval}
    shared |= {"resume": resume, "overwrite": overwrite}
    jobs = seed_jobs(numbers, folder, config, changes, **shared)
    title = title_of(kind, config, len(jobs))
    outcomes = train_all(jobs, folder, title, max_concurrent=max_concurrent, quiet=not progress)
    for line in failures(jobs, outcomes):
        _LOG.warning(line)
    if any(outcome.is_interrupted for outcome in outcomes):
        raise KeyboardInterrupt(f"the runs are saved in {folder}; fit_seeds(..., resume=True) continues them")
    return [
        SeedRun(seed=seed, path=str(job.out), result=outcome.result, error=outcome.error)
        for seed, job, outcome in zip(numbers, jobs, outcomes, strict=True)
    ]


def seeds_of(first: int | None, count: int) -> list[int]:
    """The ``count`` consecutive seeds that begin at ``first``, or at 0 if it is None."""
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
    """Return a job for each seed, with the folder ``seed-<seed>`` in ``out``.

    Args:
        seeds: The seeds.
        out: The folder that contains the folders of the runs.
        config: The settings of new runs.
        changes: Settings that override those of the checkpoint of a resumed run.
        prefix: A prefix of the names of the runs.
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
    """A title for the progress of ``num`` runs, such as ``PPO on CartPole-v1, 5 seeds``."""
    where = f" on {env_name(config.env)}" if config.env is not None else ""
    return f"{kind.name}{where}, {num} {noun}{'s' if num != 1 else ''}"


def failures(jobs: Sequence[TrainingJob], outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each distinct error, with the names of the runs that failed with it."""
    found: dict[str, list[TrainingJob]] = {}
    for job, outcome in zip(jobs, outcomes, strict=True):
        if outcome.error is not None:
            found.setdefault(outcome.error, []).append(job)
    return [
        f"{', '.join(job.name for job in failed)} failed: {error} (see {failed[0].out / OUTPUT})"
        for error, failed in found.items()
    ]


def algorithm_of(config: type[AlgorithmConfig]) -> type[Algorithm[Any]]:
    """The algorithm whose settings class is ``config``.

    Raises:
        SettingsError: there is no such algorithm, or more than one.
    """
    known = list[type[Algorithm[Any]]](Algorithm.__subclasses__())
    for cls in known:
        known += [inner for inner in cls.__subclasses__() if inner not in known]
    # A user's algorithm may inherit from PPO and share PPO's settings; the settings still belong to PPO.
    own = [cls for cls in known if cls.__dict__.get("Config") is config and cls.loss is not Algorithm.loss]
    if len(own) != 1:
        names = ", ".join(cls.__name__ for cls in own) or "no algorithm"
        raise SettingsError(f"{config.__name__} are the settings of {names}. Pass the right one as `algorithm`.")
    return own[0]
