# SPDX-License-Identifier: Apache-2.0
"""Search spaces: which settings a tuning tries, by name, checked before anything starts."""

import itertools
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
from ray import tune
from ray.tune.search.variant_generator import generate_variants

from etude.algorithms import Algorithm, AlgorithmConfig, Stop
from etude.algorithms.search import Choice, Grid, Range, flat, tried
from etude.errors import SettingsError
from etude.settings import settings

DRAWS: Final = 200
"""How many of the trials that a search space may give are checked before any starts."""

SHARED: Final = "shared"
"""The name under which a trial finds what all trials share."""


@settings
class Shared:
    """What all trials share."""

    config: AlgorithmConfig
    """Their settings, but those that are tried."""
    stop: Stop = Stop()
    """When each ends; nothing set: never."""
    algorithm: type[Algorithm[Any]] | None = None
    """None: the one whose settings these are."""
    resources: Mapping[str, float] | None = None
    """Of each trial itself, by name. None: a CPU for each thread and each worker, and a GPU where it learns on one."""
    save_interval: float = 60.0
    """Seconds between checkpoints of a trial, at least 0."""
    metric: str = "return_mean"
    """The entry of results that says which trial is best."""
    mode: Literal["max", "min"] = "max"
    """Whether a large one is good, or a small one."""

    def __repr__(self) -> str:
        """Short: Tune shows it in tables."""
        return type(self.config).__name__


def checked(config: AlgorithmConfig, space: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """A search space as Tune takes it: dotted names, lists as grids.

    Args:
        config: The settings that are not tried.
        space: By name (``lr``, ``network.hidden``): one of Tune's search spaces, a list, all of which is tried, or a
            value.
        owner: What the settings are called in messages.

    Raises:
        SettingsError: a name is unknown (the nearest is named), or what the space gives is no such setting. Of what is
            drawn at random, some is tried.
    """
    found = {name: _as_tunes(value, name) for name, value in flat(type(config), space).items()}
    draws = np.random.RandomState(0)
    trials = (drawn["config"] for _ in range(10) for _, drawn in generate_variants({"config": found}, False, draws))
    for trial in itertools.islice(trials, DRAWS):
        tried(config, trial, owner)
    return found


def _as_tunes(value: Any, name: str) -> Any:
    """What is tried of a setting, as Tune says it."""
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
