# SPDX-License-Identifier: Apache-2.0
"""Search spaces: which settings a tuning tries, by name, checked before anything starts."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeVar

import numpy as np
from ray import tune
from ray.tune.search.variant_generator import generate_variants

from etude.algorithms import Algorithm, AlgorithmConfig, Stop
from etude.errors import SettingsError
from etude.settings import from_dict, nearest, settings, settings_inside, typed

C = TypeVar("C", bound=AlgorithmConfig)

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
    found: dict[str, Any] = {}
    for name, value in flat(type(config), space).items():
        if isinstance(value, list):
            if not value:
                raise SettingsError(f"the search space of `{name}` is an empty list: give the values to try.")
            value = tune.grid_search(value)
        found[name] = value
    draws = np.random.RandomState(0)
    trials = (drawn["config"] for _ in range(10) for _, drawn in generate_variants({"config": found}, False, draws))
    for trial in itertools.islice(trials, DRAWS):
        try:
            applied(config, trial, owner)
        except SettingsError as error:
            tried = ", ".join(f"{name}={value!r}" for name, value in trial.items())
            raise SettingsError(f"{error} The search space gave {tried}.") from error
    return found


def flat(cls: type, space: Mapping[str, Any]) -> dict[str, Any]:
    """Names of settings inside others, dotted."""
    inside, found = settings_inside(cls), dict[str, Any]()
    for name, value in space.items():
        if name in inside and isinstance(value, Mapping) and "grid_search" not in value:
            found |= {f"{name}.{inner}": item for inner, item in flat(inside[name], value).items()}
        else:
            found[name] = value
    return found


def applied(config: C, tried: Mapping[str, Any], owner: str) -> C:
    """``config`` with some settings, by their dotted names, as a trial has them.

    Raises:
        SettingsError: they are not settings, or do not fit.
    """
    nested: dict[str, Any] = {}
    for name, value in tried.items():
        *outer, last = name.split(".")
        here = nested
        for part in outer:
            here = here.setdefault(part, {})
        here[last] = value
    found: C = _replaced(config, nested, owner)
    return found


def _replaced(whole: Any, given: Mapping[str, Any], owner: str) -> Any:
    inside, own = settings_inside(type(whole)), typed(type(whole), given, owner=owner)
    for name, value in own.items():
        if name in inside and isinstance(value, Mapping):
            before, where = getattr(whole, name), f"{owner}.{name}"
            is_there = isinstance(before, inside[name])
            own[name] = _replaced(before, value, where) if is_there else from_dict(inside[name], value, owner=where)
    return dataclasses.replace(whole, **own)


def _whole(word: str) -> int:
    number = float(word)
    if not number.is_integer():
        raise ValueError(f"{word} is not a whole number")
    return int(number)


_RANGES: Final[Mapping[str, tuple[Callable[[Any, Any], Any], Callable[[str], Any]]]] = {
    "uniform": (tune.uniform, float),
    "loguniform": (tune.loguniform, float),
    "randint": (tune.randint, _whole),
    "lograndint": (tune.lograndint, _whole),
}
_LISTS: Final = ("choice", "grid")


def written(text: str, name: str, value_of: Callable[[str], Any]) -> Any:
    """A search space in words: ``0.1,0.2,0.3`` or ``choice:...``, ``grid:...``, ``loguniform:1e-4,1e-2``.

    Args:
        text: These words. A single value stands for itself.
        name: What is searched, for messages.
        value_of: What a word of a list means.

    Raises:
        SettingsError: the words are no search space.
    """
    head, colon, tail = text.partition(":")
    if colon and head in _RANGES:
        make, number = _RANGES[head]
        try:
            low, high = map(number, tail.split(","))
            if not low < high:
                raise ValueError(f"{low:g} is not less than {high:g}")
            return make(low, high)
        except ValueError as error:
            raise SettingsError(
                f"the search space of `{name}` is {text!r}, but must be {head}:LOW,HIGH, as in "
                f"{head}:{'1,100' if number is _whole else '1e-4,1e-2'} ({error})."
            ) from error
    if colon and head in _LISTS:
        values = [value_of(word) for word in tail.split(",")]
        return tune.grid_search(values) if head == "grid" else tune.choice(values)
    near = nearest(head, (*_RANGES, *_LISTS)) if colon else None
    if near:
        raise SettingsError(f"the search space of `{name}` is {text!r}: there is no `{head}`. Nearest: `{near}`.")
    values = [value_of(word) for word in text.split(",")]
    return tune.choice(values) if len(values) > 1 else values[0]
