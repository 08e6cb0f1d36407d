# SPDX-License-Identifier: Apache-2.0
"""Search spaces for tuning: which settings are tried, checked before anything starts."""

import itertools
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
from ray import tune
from ray.tune.search.variant_generator import generate_variants

from etude.algorithms import Algorithm, AlgorithmConfig, Stop
from etude.algorithms.search import Choice, Grid, Range, applied, flat
from etude.errors import SettingsError
from etude.settings import settings

DRAWS: Final = 200
"""The number of trials drawn from a search space to check it before any starts."""

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

    def __repr__(self) -> str:
        """A short text, because Tune shows it in tables."""
        return type(self.config).__name__


def checked(config: AlgorithmConfig, space: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """A search space in Tune's form: dotted names, and lists as grid searches.

    Args:
        config: The settings that are not tried.
        space: By setting (``lr``, ``network.hidden``): one of Tune's search spaces, a list of values to try, or a
            single value.
        owner: The name of the settings in messages.

    Raises:
        SettingsError: a name is unknown (the message names the nearest), or a value is invalid. Random search spaces
            are checked by drawing from them.
    """
    found = {name: _as_tunes(value, name) for name, value in flat(type(config), space).items()}
    draws = np.random.RandomState(0)
    trials = (drawn["config"] for _ in range(10) for _, drawn in generate_variants({"config": found}, False, draws))
    for trial in itertools.islice(trials, DRAWS):
        applied(config, trial, owner)
    return found


def _as_tunes(value: Any, name: str) -> Any:
    """A setting's search space in Tune's form."""
    if isinstance(value, list | Grid):
        values = value.values if isinstance(value, Grid) else value
        if not values:
            raise SettingsError(f"the search space of `{name}` is an empty list: give the values to try.")
        return tune.grid_search(values)
    if isinstance(value, Choice):
        return tune.choice(value.values)
    if isinstance(value, Range):
        if value.is_whole:
            return (tune.lograndint if value.is_log else tune.randint)(int(value.low), int(value.high))
        return (tune.loguniform if value.is_log else tune.uniform)(value.low, value.high)
    return value
