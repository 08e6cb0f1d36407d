# SPDX-License-Identifier: Apache-2.0
"""What a command line asks ``etude tune`` for: the algorithm, what is tried, the options."""

import importlib.util
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from etude.algorithms import Algorithm, AlgorithmConfig, OfflineConfig, Stop
from etude.algorithms.loading import check_metric
from etude.cli import files, flags, words
from etude.cli.arguments import CONVERTERS, written_in
from etude.cli.engine import EngineFlags, with_engine
from etude.errors import EngineError, SettingsError
from etude.settings import Leaf, from_dict, leaves_of, merged, settings, settings_inside, typed

SPACE = "--space."


@settings
class TuneOptions:
    """What `etude tune` takes besides the settings of the algorithm."""

    space: str | None = None
    """A YAML or JSON file with what is tried, by setting: the words of --space.NAME, or a list, each of whose values is
    tried; --space.NAME counts more."""

    samples: int = 1
    """How often the search space is drawn from, at least 1; each time, all of its grids are gone through."""

    stop: Stop = Stop()
    """When each trial stops."""

    metric: str = "return_mean"
    """The field of results that says which trial is best; `losses/policy` is an entry of a field."""

    best_is: Literal["max", "min"] = "max"
    """Whether a large one is good, or a small one."""

    config: str | None = None
    """A YAML or JSON file with settings by name, and `stop`; flags count more."""

    out: str | None = None
    """The folder of all trials, or its URL. None: runs/tune-ALGORITHM-ENV-TIME."""

    max_concurrent: int | None = None
    """How many trials go on at the same time at most; none: as many as there is room for."""

    resources: Mapping[str, float] | None = None
    """Of each trial itself, such as CPU=2 GPU=0.5. None: a CPU for each thread and each worker, and a GPU where it
    learns on one."""

    save_interval: float = 60.0
    """Seconds between checkpoints of a trial, at least 0; one is always saved at its end."""

    keep: int = 3
    """How many checkpoints of each trial are kept, those with the best metric; besides, the newest. At least 1."""

    max_failures: int = 0
    """How often a trial that failed goes on again from its newest checkpoint."""

    address: str | None = None
    """The Ray cluster: `auto`, `host:port`. None: the one that RAY_ADDRESS names, else one of this machine alone."""

    quiet: bool = False
    """Print nothing but the trials and errors."""

    json: bool = False
    """Print the trials as one JSON object on standard output."""


@settings
class ResumeOptions:
    """What `etude tune --resume` takes: all else is as it was."""

    resume: str
    """Go on with the trials in this folder that have not ended, from their newest checkpoints. Tune keeps there, as
    pickles, what was asked for, so that this runs code from the folder: it takes `trust`."""

    trust: bool = False
    """The folder is your own: load its pickles, and import whatever they name."""

    address: str | None = None
    """The Ray cluster, as for a new tuning."""

    quiet: bool = False
    """Print nothing but the trials and errors."""

    json: bool = False
    """Print the trials as one JSON object on standard output."""


class Asked(NamedTuple):
    """What a command line asks for."""

    cls: type[Algorithm[Any]]
    config: AlgorithmConfig
    space: dict[str, Any]
    options: TuneOptions


def ask(cls: type[Algorithm[Any]], name: str, args: list[str]) -> Asked:
    """What the command line ``args`` asks of the algorithm ``cls``, called ``name``."""
    kind, owner = cls.Config, name.rpartition(":")[2]
    tried, rest = split(args, owner)
    given, engine, asked = flags.parse(
        [kind, EngineFlags, TuneOptions],
        rest,
        prog=f"etude tune {name}",
        about="Train with many settings, and see which are best. What --space.NAME takes: etude tune --help",
        converters=CONVERTERS,
    )
    options = from_dict(TuneOptions, asked, owner=owner)
    check_metric(options.metric)
    check_ray()
    written, stop = ({}, {}) if options.config is None else written_in(kind, options.config, owner)
    given = merged(written, with_engine(given, engine.get("ray", {}), written.get("engine"), owner))
    options = from_dict(TuneOptions, asked | {"stop": merged(stop, asked.get("stop", {}))}, owner=owner)
    config = from_dict(kind, given, owner=owner)
    if isinstance(config, OfflineConfig) and config.data is None:
        raise SettingsError(f"{owner} needs a value for `data`, such as --data data/expert.")
    space = spaces_of(kind, options.space, tried, owner)
    if not space and options.samples == 1:
        raise SettingsError(f"{owner} has nothing to try: give --space.lr loguniform:1e-4,1e-2, or --space FILE.")
    return Asked(cls, config, space, options)


def check_ray() -> None:
    """Raise an EngineError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise EngineError('etude tune needs Ray: pip install "etude[ray]".')


def split(args: list[str], owner: str) -> tuple[dict[str, str], list[str]]:
    """The search space in the arguments, by the names that are given; and the other arguments."""
    tried, rest, left = dict[str, str](), list[str](), iter(args)
    for word in left:
        if not word.startswith(SPACE):
            rest.append(word)
            continue
        name, equals, value = word.removeprefix(SPACE).partition("=")
        value = value if equals else next(left, "")
        if not value or value.startswith("--"):
            raise SettingsError(f"{owner}: --space.{name} needs what to try, such as 1e-4,1e-3 or uniform:1e-4,1e-3.")
        if name in tried:
            raise SettingsError(f"{owner} has --space.{name} twice: put all its values behind one.")
        tried[name] = value
    return tried, rest


def spaces_of(kind: type[AlgorithmConfig], file: str | None, tried: Mapping[str, str], owner: str) -> dict[str, Any]:
    """The search space of a file and of flags, by the settings' dotted names.

    Raises:
        SettingsError: a name is unknown, or what is written is no search space.
    """
    from etude.ray.space import flat

    known = flags.Names([*leaves_of(kind), *_engine_leaves(kind)])
    found: dict[str, Any] = {}
    for name, value in {**flat(kind, files.read_settings(file) if file else {}), **tried}.items():
        leaf = known.leaves.get(name.replace("_", "-").rstrip("-"))
        if leaf is None:
            raise known.unknown(f"--{name}", f"the search space of {owner}", f"etude tune {owner}")
        found[".".join(leaf.path)] = _space(value, leaf, owner)
    return found


def _engine_leaves(kind: type[AlgorithmConfig]) -> list[Leaf]:
    """The settings inside those that may also be a word."""
    there = {leaf.path[0] for leaf in leaves_of(kind) if len(leaf.path) == 1}
    inner = {name: cls for name, cls in settings_inside(kind).items() if name in there}
    return [leaf for name, cls in inner.items() for leaf in leaves_of(cls, (name,))]


def _space(value: Any, leaf: Leaf, owner: str) -> Any:
    from etude.ray.space import written

    name = ".".join(leaf.path)

    def one(word: str) -> Any:
        parts = word.split("+") if words.takes_many(leaf.hint) else [word]
        value = words.value_of(leaf.hint, parts, CONVERTERS, f"the search space of `{name}`")
        where = ".".join([owner, *leaf.path[:-1]])
        return typed(leaf.owner, {leaf.path[-1]: value}, owner=where)[leaf.path[-1]]

    if isinstance(value, str):
        return written(value, name, one)
    if isinstance(value, list):
        return [words.made(leaf.hint, item, CONVERTERS) for item in value]
    return value
