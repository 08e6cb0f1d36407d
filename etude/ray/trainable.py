# SPDX-License-Identifier: Apache-2.0
"""Trainable: an algorithm as a Ray Tune trial, which Tune runs, pauses, copies and ends."""

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from ray import tune

from etude.algorithms import Algorithm, AlgorithmConfig, Result, Stop
from etude.algorithms.parallel import algorithm_of
from etude.algorithms.search import applied
from etude.errors import SettingsError
from etude.metrics.writers import flat_items
from etude.ray.cluster import actors_of, driver_of
from etude.ray.policies import Sent
from etude.settings import settings

SHARED: Final = "shared"
"""The key under which a trial finds the `Shared` settings."""


@settings
class Shared:
    """The settings that all trials share."""

    config: AlgorithmConfig
    """The algorithm's settings, except those that are tried."""
    stop: Stop = Stop()
    """When each trial ends; if nothing is set, never."""
    algorithm: type[Algorithm[Any]] | None = None
    """The algorithm's class. None: the one that belongs to ``config``."""
    resources: Mapping[str, float] | None = None
    """The resources of each trial itself, by name. None: a CPU for each thread and each worker, and a GPU if it learns
    on one."""
    save_interval: float = 60.0
    """Seconds between checkpoints of a trial, at least 0."""
    metric: str = "return_mean"
    """The entry of results by which trials are compared."""
    mode: Literal["max", "min"] = "max"
    """Whether the best trial has the largest or the smallest ``metric``."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "config": Sent(self.config)}

    def __repr__(self) -> str:
        """A short text, because Tune shows it in tables."""
        return type(self.config).__name__


class Trainable(tune.Trainable):
    """An algorithm as a Ray Tune trial: a step is one iteration, and checkpoints are Etude's own.

    Use it as ``ray.tune.Tuner(etude.ray.Trainable, param_space=...)``, or let `etude.ray.tune` do that. The param space
    must contain ``shared``, a `Shared`, and may contain settings by name (``lr``, ``network.hidden``). A step returns
    `Result` as a flat dict with keys such as ``losses/policy``.

    A trial that continues from another trial's checkpoint, as in population based training, keeps its own settings.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """The resources of the trial, and of its runners and learners if it has any."""
        shared, wanted = shared_in(config), settings_of(config)
        return tune.PlacementGroupFactory([dict(shared.resources or driver_of(wanted)), *actors_of(wanted)])

    def setup(self, config: dict[str, Any]) -> None:
        """Store the settings. The algorithm is made on first use, which may be after loading a checkpoint."""
        shared, self.wanted = shared_in(config), settings_of(config)
        self.goal, self.interval, self.metric = shared.stop, shared.save_interval, shared.metric
        self.worst = -math.inf if shared.mode == "max" else math.inf
        self.saved = -math.inf  # the first step saves, so that a trial interrupted early can be resumed
        self.kind = shared.algorithm or algorithm_of(type(self.wanted))
        self.trained: Algorithm[Any] | None = None
        self.results: Iterator[Result] = iter(())
        self.newest: Result | None = None

    def _algorithm(self) -> Algorithm[Any]:
        if self.trained is None:
            self.trained = self.kind(self.wanted)
            self.results = self.trained.iterate(self.goal)
        return self.trained

    def step(self) -> dict[str, Any]:
        """Run one iteration; it is the last one if the goal is reached or a budget is used up."""
        algorithm = self._algorithm()
        result = next(self.results)
        self.newest = result = [result, *algorithm.last_evaluations(result, self.goal)][-1]
        is_due = time.monotonic() - self.saved >= self.interval
        if result.evaluation:  # Tune keeps checkpoints by figures that must be of their own weights
            is_due &= result.updates in (result.evaluation["updates"], result.evaluating)
        row = {self.metric: math.nan} if self.metric.startswith("evaluation/") else {}  # there is none at first
        return row | flat(result.to_dict()) | {"done": self.goal.now(result), "should_checkpoint": is_due}

    def save(self, checkpoint_dir: str | None = None) -> Any:
        """Write a checkpoint, and return it with the newest metrics; one without a score counts as the worst.

        Ray's `get_best_checkpoint` leaves out metrics that are missing, but takes the first checkpoint for the best if
        its metric is NaN. The metric that Tune sorts checkpoints by must be there.
        """
        saved = super().save(checkpoint_dir)
        known = {name: value for name, value in saved.metrics.items() if value == value}  # NaN is not
        saved.metrics = {self.metric: self.worst} | known
        return saved

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write a checkpoint that `etude.load` can load."""
        self._algorithm().save(checkpoint_dir, result=self.newest)
        self.saved = time.monotonic()

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Load a checkpoint, possibly another trial's, with the settings of this trial."""
        algorithm = self._algorithm()
        algorithm.load(checkpoint)
        self.saved = time.monotonic()
        self.results = algorithm.iterate(self.goal)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Change to another trial's settings."""
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Close the envs, and end the runners and learners."""
        if self.trained is not None:
            self.trained.close()
        self.trained = None


def settings_of(given: Mapping[str, Any]) -> AlgorithmConfig:
    """The settings of a trial with the param space values ``given``."""
    tried = {name: value for name, value in given.items() if name != SHARED}
    config = shared_in(given).config
    return applied(config, tried, type(config).__name__)


def shared_in(given: Mapping[str, Any]) -> Shared:
    """The `Shared` settings in a trial's param space values."""
    shared = given.get(SHARED)
    if not isinstance(shared, Shared):
        raise SettingsError(f"`{SHARED}` is {shared!r}, but must be an etude.ray.Shared(config=...).")
    return shared


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """A flat dict with nested names joined by ``/``; None values are left out."""
    return {name: value for name, value in flat_items(values) if value is not None}
