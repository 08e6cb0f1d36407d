# SPDX-License-Identifier: Apache-2.0
"""Tuning: trains with many settings at once, through Ray Tune."""

import copy
import dataclasses
import itertools
import os
import signal
import threading
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
from ray import tune as ray_tune
from ray.tune.impl.placeholder import create_resolvers_map, inject_placeholders
from ray.tune.schedulers import PopulationBasedTraining
from ray.tune.search import ConcurrencyLimiter, SearchAlgorithm, Searcher, SearchGenerator, create_searcher
from ray.tune.search.basic_variant import BasicVariantGenerator
from ray.tune.search.variant_generator import generate_variants

from etude.algorithms import Algorithm, AlgorithmConfig, OfflineConfig, Stop
from etude.algorithms.checkpoint import check_metric
from etude.algorithms.parallel import algorithm_of, check_records_nothing
from etude.algorithms.run import new_folder
from etude.algorithms.search import Choice, Grid, Range, applied, flat
from etude.envs import env_name
from etude.errors import EngineError, SettingsError
from etude.files import absolute
from etude.ray.cluster import actors_of, check_room, driver_of, ensure_started, release_cluster
from etude.ray.trainable import SHARED, Shared, Trainable
from etude.settings import FloatFrom0, IntFrom1, check_arguments

DRAWS: Final = 200
"""The number of trials drawn from a search space to check it before any starts."""


def tune(
    config: AlgorithmConfig,
    search_space: Mapping[str, Any],
    *,
    stop: Stop | None = None,
    num_samples: int = 1,
    metric: str = "return_mean",
    mode: Literal["max", "min"] = "max",
    algorithm: type[Algorithm[Any]] | None = None,
    search: Any = None,
    scheduler: Any = None,
    resources: Mapping[str, float] | None = None,
    max_concurrent: int | None = None,
    out: str | os.PathLike[str] | None = None,
    save_interval: float = 60.0,
    keep: int = 3,
    max_failures: int = 0,
    address: str | None = None,
    verbose: int = 1,
) -> ray_tune.ResultGrid:
    """Train with many settings, and find out which are best.

    Each trial is an algorithm in its own process, on the cluster that this process is connected to; otherwise on the
    one at ``address`` or ``RAY_ADDRESS``; otherwise on a new one on this machine, which ends with the tuning.

    Args:
        config: The settings that all trials share. Relative paths of data are resolved here.
        search_space: What to try, by setting (``lr``, ``network.hidden``): one of Tune's search spaces
            (``ray.tune.loguniform(1e-4, 1e-2)``), a list of values, or a single value. Several lists are tried in all
            combinations.
        stop: When each trial ends. None: never, unless ``scheduler`` ends it.
        num_samples: Number of samples of the search space, at least 1; each is tried with all combinations of lists.
        metric: The field of `Result` by which trials are compared; ``losses/policy`` is an entry of a field.
        mode: Whether the best trial has the largest or the smallest ``metric``.
        algorithm: The algorithm's class. None: the one that belongs to ``config``.
        search: One of Tune's search algorithms. None: random search, with the config's seed.
        scheduler: One of Tune's schedulers, such as ASHA or population based training. It gets ``metric`` and
            ``mode`` from here. None: all trials run to their end.
        resources: The resources of each trial itself, by name, such as ``{"CPU": 2, "GPU": 0.5}``. None: a CPU for each
            thread and each worker, and a GPU if it learns on one. Its runners and learners have resources of their own.
        max_concurrent: Maximum number of trials at a time; None: as many as there is room for. The limit of a
            ``search`` that has one itself, such as a ``ConcurrencyLimiter``, takes precedence.
        out: The folder for all trials, or its URL. None: a new one in ``runs``.
        save_interval: Seconds between checkpoints of a trial, at least 0; one is always saved at its end.
        keep: The number of checkpoints to keep for each trial, at least 1: those with the best metric. The newest one
            is kept too. In population based training, all are kept: any of them may be copied, and much later.
        max_failures: Number of times that a failed trial is resumed from its newest checkpoint; -1: without limit.
        address: The address of the cluster, if this process is not connected to one.
        verbose: How much Tune writes to standard output: 0 nothing, 1 a table from time to time, 2 also each result.

    Returns:
        Tune's own results: `get_best_result()` is the trial whose newest result has the best ``metric``. Its `metrics`
        are a flat `Result` (``losses/policy``), and `etude.load` loads its checkpoints by their paths.

    Raises:
        SettingsError: a name or value in the search space, or another argument, is invalid; raised before anything
            starts.
        EngineError: there is no cluster, or it has too few resources for one trial.
    """
    kind = algorithm or algorithm_of(type(config))
    check_metric(metric)
    check_arguments(
        "tune",
        save_interval=(FloatFrom0, save_interval),
        keep=(IntFrom1, keep),
        num_samples=(IntFrom1, num_samples),
        mode=(Literal["max", "min"], mode),
    )
    if stop in (None, Stop()) and scheduler is None:
        raise SettingsError(
            "`stop` is not set, but trials need to know when to end: give it a budget, such as `env_steps`."
        )
    if isinstance(config, OfflineConfig) and config.data is not None:
        config = dataclasses.replace(config, data=_anywhere(config.data))
    space = {name: _anywhere(value) if name == "data" else value for name, value in search_space.items()}
    space = checked(config, space, kind.name)
    ends: dict[str, Any] = {"stop": stop or Stop(), "save_interval": save_interval, "metric": metric, "mode": mode}
    space[SHARED] = Shared(config=config, algorithm=kind, resources=resources, **ends)
    folder, name = _folder(out, config, kind.name)
    run_config = ray_tune.RunConfig(
        name=name,
        storage_path=folder,
        failure_config=ray_tune.FailureConfig(max_failures=max_failures),
        # Trials decide when to save; Tune also saves at their end.
        checkpoint_config=ray_tune.CheckpointConfig(
            # A trial that waits for room is given a checkpoint to copy, which must still be there when it begins.
            num_to_keep=None if isinstance(scheduler, PopulationBasedTraining) else keep,
            checkpoint_score_attribute=metric,
            checkpoint_score_order=mode,
            checkpoint_at_end=True,
        ),
        verbose=verbose,
    )
    tune_config = ray_tune.TuneConfig(
        metric=metric,
        mode=mode,
        num_samples=num_samples,
        search_alg=_generator(search, space, max_concurrent, config.seed),
        scheduler=scheduler,
        reuse_actors=True,  # a process takes seconds to start
    )
    is_ours = ensure_started(address)
    try:
        check_room([resources or driver_of(config), *actors_of(config)], can_grow=not is_ours)
        tuner = ray_tune.Tuner(Trainable, param_space=space, tune_config=tune_config, run_config=run_config)
        return _fitted(tuner)
    finally:
        release_cluster()


def check_tuning(path: str | os.PathLike[str]) -> None:
    """Raise an EngineError if there is no tuning to resume; nothing is loaded for that."""
    if not ray_tune.Tuner.can_restore(absolute(os.fspath(path))):
        raise EngineError(f"{path} holds no tuning to resume: give the folder that was `out` of that tuning.")


def resume_tuning(path: str | os.PathLike[str], *, address: str | None = None) -> ray_tune.ResultGrid:
    """Resume an interrupted tuning: trials that have not ended continue from their newest checkpoints, trials that had
    not begun begin, and failed trials are tried again. All arguments are as they were.

    Tune stores the arguments as pickles, which can run code: only use folders that nobody else can write to.

    Args:
        path: The folder of the trials, or its URL: ``out`` of `tune`.
        address: As in `tune`.

    Raises:
        EngineError: there is no tuning, or no cluster.
    """
    check_tuning(path)
    ensure_started(address)
    try:
        restored = ray_tune.Tuner.restore(absolute(os.fspath(path)), trainable=Trainable, resume_errored=True)
        return _fitted(restored)
    finally:
        release_cluster()


def _fitted(tuner: ray_tune.Tuner) -> ray_tune.ResultGrid:
    """Run the trials to their ends, or until Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)
    try:
        return tuner.fit()
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)  # Tune replaces the handler, and does not always restore it


class _Remembers(SearchAlgorithm):
    """Makes the trials, also those that had not begun when a tuning was interrupted.

    Tune replaces objects in the search space, such as `Shared`, by placeholders. It puts them back only if a resumed
    tuning is given the search space again, and then also resets what population based training changed in trials that
    had begun. This is stored with the tuning, and puts them back in new trials only.
    """

    def __init__(self, space: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.space, self.is_resumed = space, False

    def restore_from_dir(self, dirpath: str) -> None:
        super().restore_from_dir(dirpath)
        self.is_resumed = True

    def next_trial(self) -> Any:
        trial = super().next_trial()
        if trial is not None and self.is_resumed:
            objects = create_resolvers_map()  # type: ignore[no-untyped-call]
            inject_placeholders(copy.deepcopy(self.space), objects)
            trial.resolve_config_placeholders(objects)
        return trial


class _Variants(_Remembers, BasicVariantGenerator):
    """Random search, and grids."""


class _Searched(_Remembers, SearchGenerator):
    """One of Tune's search algorithms."""


def _generator(search: Any, space: Mapping[str, Any], max_concurrent: int | None, seed: int | None) -> Any:
    """Make Tune's search algorithm, which makes the trials."""
    if not search:
        return _Variants(space, max_concurrent=max_concurrent or 0, random_state=seed)
    search = create_searcher(search) if isinstance(search, str) else search
    if not isinstance(search, Searcher):
        if max_concurrent:
            raise SettingsError(
                f"a {type(search).__name__} limits trials itself: give it the limit, in place of `max_concurrent`."
            )
        return search
    if max_concurrent and not isinstance(search, ConcurrencyLimiter):
        search = ConcurrencyLimiter(search, max_concurrent)
    return _Searched(space, search)


def _folder(out: str | os.PathLike[str] | None, config: AlgorithmConfig, kind: str) -> tuple[str, str]:
    """The parent folder of the trials' folder, and its name."""
    if out is None:
        out = new_folder(f"tune-{kind}", None if config.env is None else env_name(config.env))
    path = absolute(os.fspath(out)).rstrip("/")
    if ray_tune.Tuner.can_restore(path):
        raise SettingsError(f"{out} already holds trials: resume them with resume_tuning, or give another `out`.")
    folder, _, name = path.rpartition("/")
    return folder or "/", name


def _anywhere(data: Any) -> Any:
    """Data with absolute paths, which trials can use from their own folders: a path, several paths, or a source with
    paths. Recordings always have them."""
    if isinstance(data, list | tuple):
        return type(data)(_anywhere(part) for part in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type) and getattr(data, "filesystem", None) is None:
        paths = {name: _anywhere(getattr(data, name)) for name in ("data", "paths") if hasattr(data, name)}
        return dataclasses.replace(data, **paths) if paths else data
    return absolute(os.fspath(data)) if isinstance(data, os.PathLike) else absolute(data)


# -- search spaces --------------------------------------------------------------------------------------------------


def checked(config: AlgorithmConfig, space: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """A search space in Tune's form: dotted names, and lists as grid searches.

    Args:
        config: The settings that are not tried.
        space: By setting (``lr``, ``network.hidden``): one of Tune's search spaces, a list of values to try, or a
            single value.
        owner: The name of the settings in messages.

    Raises:
        SettingsError: a name is unknown (the message names the nearest), a value is invalid, or trials would record.
            Random search spaces are checked by drawing from them.
    """
    found = {name: _as_tunes(value, name) for name, value in flat(type(config), space).items()}
    draws = np.random.RandomState(0)
    trials = (drawn["config"] for _ in range(10) for _, drawn in generate_variants({"config": found}, False, draws))
    for trial in itertools.islice(trials, DRAWS):
        check_records_nothing(applied(config, trial, owner))
    return found


def _as_tunes(value: Any, name: str) -> Any:
    """A setting's search space in Tune's form."""
    if isinstance(value, list | Grid):
        values = value.values if isinstance(value, Grid) else value
        if not values:
            raise SettingsError(f"the search space of `{name}` is an empty list: give the values to try.")
        return ray_tune.grid_search(values)
    if isinstance(value, Choice):
        return ray_tune.choice(value.values)
    if isinstance(value, Range):
        if value.is_whole:
            return (ray_tune.lograndint if value.is_log else ray_tune.randint)(int(value.low), int(value.high))
        return (ray_tune.loguniform if value.is_log else ray_tune.uniform)(value.low, value.high)
    return value
