# SPDX-License-Identifier: Apache-2.0
"""Search spaces: parsing them from text, drawing trials from them, and applying a trial to a config.

A search space maps the dotted name of a setting to a `Grid`, a `Choice`, a `Range`, a list (which is a grid) or a fixed
value. A trial maps dotted names to values.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from etude.algorithms.config import AlgorithmConfig
from etude.errors import SettingsError
from etude.settings import nearest, replaced, settings_inside, typed

C = TypeVar("C", bound=AlgorithmConfig)


class Grid(NamedTuple):
    """Every value is tried, in combination with every value of the other grids."""

    values: list[Any]


class Choice(NamedTuple):
    """One of the values is drawn, each with the same probability."""

    values: list[Any]


class Range(NamedTuple):
    """A number is drawn with ``low <= number < high``."""

    low: float
    high: float
    is_log: bool
    """Whether the logarithm of the number is uniformly distributed, rather than the number itself."""
    is_whole: bool
    """Whether only whole numbers are drawn."""

    def draw(self, rng: np.random.Generator) -> float:
        """Draw a number."""
        if self.is_whole and not self.is_log:
            return int(rng.integers(int(self.low), int(self.high)))
        bounds = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        value = float(rng.uniform(*bounds))
        value = min(max(math.exp(value) if self.is_log else value, self.low), self.high)
        return min(int(value), int(self.high) - 1) if self.is_whole else value


_RANGES: Final = {
    "uniform": (False, False),
    "loguniform": (True, False),
    "randint": (False, True),
    "lograndint": (True, True),
}
"""By keyword: `Range.is_log` and `Range.is_whole`."""
_LISTS: Final = {"choice": Choice, "grid": Grid}


_POINT: Final = re.compile(r"[\d.eE+-]+:[\d.eE+-]+")
"""A point of a schedule."""


def written(text: str, name: str, value_of: Callable[[str], Any]) -> Any:
    """Parse the search space of one setting from a text.

    Args:
        text: ``0.1,0.2,0.3`` or ``grid:0.1,0.2,0.3``, ``choice:relu,tanh``, or a range such as ``loguniform:1e-4,1e-2``
            (the keywords are ``uniform``, ``loguniform``, ``randint`` and ``lograndint``); or a single fixed value,
            such as a schedule (``0:1e-3,100000:0``).
        name: The name of the setting, for messages.
        value_of: Parses one value of a list.

    Raises:
        SettingsError: the text is not a valid search space.
    """
    head, colon, tail = text.partition(":")
    if colon and head in _RANGES:
        is_log, is_whole = _RANGES[head]
        try:
            low, high = map(float, tail.split(","))
            if not low < high:
                raise ValueError(f"{low:g} is not less than {high:g}")
            if is_log and low <= 0:
                raise ValueError(f"{low:g} has no logarithm")
            if is_whole and not (low.is_integer() and high.is_integer()):
                raise ValueError("both must be whole numbers")
        except ValueError as error:
            raise SettingsError(
                f"the search space of `{name}` is {text!r}, but must be {head}:LOW,HIGH, as in "
                f"{head}:{'1,100' if is_whole else '1e-4,1e-2'} ({error})."
            ) from error
        return Range(low, high, is_log, is_whole)
    if colon and head in _LISTS:
        return _LISTS[head]([value_of(word) for word in tail.split(",")])
    if head == "cosine" or ("," in text and all(_POINT.fullmatch(word) for word in text.split(","))):
        return value_of(text)  # a schedule
    near = nearest(head, (*_RANGES, *_LISTS)) if colon else None
    if near:
        raise SettingsError(f"the search space of `{name}` is {text!r}: unknown keyword `{head}`. Nearest: `{near}`.")
    values = [value_of(word) for word in text.split(",")]
    return Grid(values) if len(values) > 1 else values[0]


def trials(space: Mapping[str, Any], samples: int, seed: int) -> list[dict[str, Any]]:
    """Make the trials of a search space: ``samples`` trials for each combination of the values of its grids.

    Ranges and choices are sampled separately for each trial. With more samples and the same seed, the first trials stay
    the same.

    Args:
        space: The search space, by dotted name.
        samples: The number of trials for each combination, at least 1.
        seed: The seed of the draws.
    """
    rng, found = np.random.default_rng(seed), list[dict[str, Any]]()
    grids = {name: value for name, value in space.items() if isinstance(value, Grid | list)}
    for values in itertools.islice(itertools.cycle(_combinations(grids)), samples * len(_combinations(grids))):
        tried = dict[str, Any]()
        for name, value in space.items():
            if isinstance(value, Choice):
                value = value.values[int(rng.integers(len(value.values)))]
            tried[name] = values[name] if name in values else value.draw(rng) if isinstance(value, Range) else value
        found.append(tried)
    return found


def _combinations(grids: Mapping[str, Any]) -> list[dict[str, Any]]:
    lists = [value.values if isinstance(value, Grid) else value for value in grids.values()]
    return [dict(zip(grids, values, strict=True)) for values in itertools.product(*lists)]


def flat(cls: type, space: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a search space whose values may be nested: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``.

    Args:
        cls: The settings class, which says which settings contain others.
        space: The search space.
    """
    inside, found = settings_inside(cls), dict[str, Any]()
    for name, value in space.items():
        if name in inside and isinstance(value, Mapping) and "grid_search" not in value:
            found |= {f"{name}.{inner}": item for inner, item in flat(inside[name], value).items()}
        else:
            found[name] = value
    return found


def applied(config: C, trial: Mapping[str, Any], owner: str) -> C:
    """Return ``config`` with the values of a trial.

    Args:
        config: The settings to change.
        trial: New values by dotted name.
        owner: The name of the settings in messages.

    Raises:
        SettingsError: a name is not a setting, or a value does not fit it; the message lists all values.
    """
    nested: dict[str, Any] = {}
    for name, value in trial.items():
        *outer, last = name.split(".")
        here = nested
        for part in outer:
            here = here.setdefault(part, {})
        here[last] = value
    try:
        return replaced(config, typed(type(config), nested, owner=owner), owner)
    except SettingsError as error:
        values = ", ".join(f"{name}={value!r}" for name, value in trial.items())
        raise SettingsError(f"{error} The search space gave {values}.") from error
