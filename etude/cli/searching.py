# SPDX-License-Identifier: Apache-2.0
"""What `etude tune` and `etude sweep` have in common: which settings are tried."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

from etude.algorithms import Algorithm, AlgorithmConfig
from etude.algorithms.checkpoint import check_metric
from etude.algorithms.search import flat, written
from etude.cli import flags, values
from etude.cli.asked import CONVERTERS, RunOptions, ask
from etude.errors import SettingsError
from etude.settings import IntFrom1, Leaf, leaves_of, settings, settings_inside, typed

SPACE = "--space."
FAILED = 1
USAGE = """usage: etude {command} ALGORITHM [SETTINGS] --space.NAME VALUES ... --stop.env-steps N [OPTIONS]

ALGORITHM is one of {names}, or `module:Class` of your own.
Its settings, and the options: etude {command} ALGORITHM --help, all of them: --help-all

VALUES of a setting that is tried, for each of --samples:
  0.1,0.2,0.3           each of these, with each value of the other lists (also grid:0.1,0.2,0.3)
  choice:0.1,0.2,0.3    one of these, drawn
  uniform:0.1,0.3       a number between these
  loguniform:1e-4,1e-2  a number between these, whose logarithm is even
  randint:1,10          a whole number from the first up to, but not including, the second
  lograndint:8,1024     the same, whose logarithm is even
  64+64,256+256         + between the parts of settings that have several
"""


@settings
class SearchOptions(RunOptions):
    """What both take besides the settings of the algorithm."""

    everyday: ClassVar[tuple[str, ...]] = ("space", "samples", "seeds", "metric", "best_is", "out", "resume")

    space: str | None = None
    """A YAML or JSON file with what is tried, by setting: the words of --space.NAME, or a list, each of whose values is
    tried; --space.NAME counts more."""

    samples: IntFrom1 = 1
    """How often the search space is drawn from, at least 1; each time, all combinations of its lists are tried."""

    metric: str = "return_mean"
    """The field of results that says which trial is best; `losses/policy` is an entry of a field."""

    best_is: Literal["max", "min"] = "max"
    """Whether a large one is good, or a small one."""

    max_concurrent: int | None = None
    """How many trials go on at the same time at most; none: as many as there is room for."""


S = TypeVar("S", bound=SearchOptions)


def ask_space(
    cls: type[Algorithm[Any]], kind: type[S], args: list[str], command: str, about: str
) -> tuple[str, dict[str, Any], dict[str, Any], S]:
    """What a command line asks for; see `ask`.

    Args:
        cls: The algorithm.
        kind: The command's own options.
        args: The arguments.
        command: The command.
        about: What it does.

    Returns:
        What the algorithm is called in messages; its settings; the search space by dotted names; the options.
    """
    tried, rest = split(args)
    owner, given, options = ask(cls, kind, rest, command, about)
    check_metric(options.metric)
    space = _spaces(cls.Config, options.space, tried, owner, command)
    if not space and options.samples == 1:
        raise SettingsError(f"{owner} has nothing to try: give --space.lr loguniform:1e-4,1e-2, or --space FILE.")
    return owner, given, space, options


def split(args: list[str]) -> tuple[dict[str, str], list[str]]:
    """The search space in the arguments, by the names that are given; and the other arguments."""
    tried, rest, left = dict[str, str](), list[str](), iter(args)
    for word in left:
        flag, equals, value = word.partition("=")
        if not flag.startswith(SPACE):
            rest.append(word)
            continue
        value = value if equals else next(left, "")
        if not value or value.startswith("--"):
            raise SettingsError(f"{flag} needs what to try, such as 1e-4,1e-3 or uniform:1e-4,1e-3.")
        if tried.setdefault(flag.removeprefix(SPACE), value) != value:
            raise SettingsError(f"{flag} is there twice: put all its values behind one.")
    return tried, rest


def _spaces(
    kind: type[AlgorithmConfig], file: str | None, tried: Mapping[str, str], owner: str, command: str
) -> dict[str, Any]:
    """The search space of a file and of flags, by the settings' dotted names.

    Raises:
        SettingsError: a name is unknown, or what is written is no search space.
    """
    leaves = leaves_of(kind)
    whole = {leaf.path[0] for leaf in leaves if len(leaf.path) == 1}  # such as the engine, which may also be a word
    inner = [leaf for name, cls in settings_inside(kind).items() if name in whole for leaf in leaves_of(cls, (name,))]
    names, found = flags.FlagNames([*leaves, *inner]), dict[str, Any]()
    for name, value in {**flat(kind, values.read(file) if file else {}), **tried}.items():
        leaf = names.find(name)
        if leaf is None:
            raise names.unknown(f"--{name}", f"the search space of {owner}", f"etude {command} {owner}")
        found[".".join(leaf.path)] = _space(value, leaf, owner)
    return found


def _space(value: Any, leaf: Leaf, owner: str) -> Any:
    name = ".".join(leaf.path)

    def one(word: str) -> Any:
        parts = word.split("+") if values.takes_many(leaf.hint) else [word]
        value = values.of_words(leaf.hint, parts, f"{owner}.{name}", CONVERTERS)
        return typed(leaf.owner, {leaf.path[-1]: value}, owner=f"{owner}.{name}".rpartition(".")[0])[leaf.path[-1]]

    if isinstance(value, list):
        return [values.made(leaf.hint, item, CONVERTERS) for item in value]
    return written(value, name, one) if isinstance(value, str) else value


def rank(score: float | None, *, is_max: bool) -> float:
    """What sorts trials by their scores, the best first and those without one last."""
    return math.inf if score is None else -score if is_max else score
