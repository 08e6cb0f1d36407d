# SPDX-License-Identifier: Apache-2.0
"""A trial: what Tune runs, pauses, copies and ends."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from ray import tune

from etude.algorithms import Algorithm, AlgorithmConfig, Result
from etude.algorithms.search import applied
from etude.algorithms.seeds import algorithm_of
from etude.errors import SettingsError
from etude.ray.space import SHARED, Shared
from etude.ray.start import actors_of, driver_of


class Trainable(tune.Trainable):
    """An algorithm as a trial of Tune's: an iteration is a step, and checkpoints are Etude's own.

    For ``ray.tune.Tuner(etude.ray.Trainable, param_space=...)``; `etude.ray.tune` does the rest. What Tune hands over
    holds ``shared``, a `Shared`, and settings to be tried by their names (``lr``, ``network.hidden``). A step gives
    `Result` as a flat dict: ``losses/policy``.

    A trial that goes on from another's checkpoint, as in population based training, keeps the settings that it is
    given.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """The resources of the trial, and of its runners and learners, where it has some."""
        shared, wanted = shared_in(config), settings_of(config)
        return tune.PlacementGroupFactory([dict(shared.resources or driver_of(wanted)), *actors_of(wanted)])

    def setup(self, config: dict[str, Any]) -> None:
        """Take the settings; the algorithm is made when it is first needed, by then perhaps of a checkpoint."""
        shared, self.wanted = shared_in(config), settings_of(config)
        self.goal, self.interval, self.saved = shared.stop, shared.save_interval, time.monotonic()
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
        """One iteration; the last one, where it meets the goal or uses a budget up."""
        self._algorithm()
        self.newest = next(self.results)
        is_due = time.monotonic() - self.saved >= self.interval
        return flat(self.newest.to_dict()) | {"done": self.goal.now(self.newest), "should_checkpoint": is_due}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write a checkpoint that `etude.load` takes."""
        self._algorithm().save(checkpoint_dir, result=self.newest)
        self.saved = time.monotonic()

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Go on from a checkpoint, which may be another trial's, with the settings of this one."""
        algorithm = self._algorithm()
        algorithm.load(checkpoint)
        self.results = algorithm.iterate(self.goal)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Become another trial."""
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Close the envs, and end runners and learners."""
        if self.trained is not None:
            self.trained.close()
        self.trained = None


def settings_of(given: Mapping[str, Any]) -> AlgorithmConfig:
    """The settings of the trial that Tune hands ``given`` to."""
    tried = {name: value for name, value in given.items() if name != SHARED}
    config = shared_in(given).config
    return applied(config, tried, type(config).__name__)


def shared_in(given: Mapping[str, Any]) -> Shared:
    """What all trials share, of what Tune hands over."""
    shared = given.get(SHARED)
    if not isinstance(shared, Shared):
        raise SettingsError(f"`{SHARED}` is {shared!r}, but must be an etude.ray.Shared(config=...).")
    return shared


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested names joined by ``/``; what is None is left out."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": item for inner, item in flat(value).items()}
        elif value is not None:
            found[name] = value
    return found
