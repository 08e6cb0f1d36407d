# SPDX-License-Identifier: Apache-2.0
"""What a command line asks ``etude train`` for: the algorithm with its settings, the options, the folder of the run."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from etude.algorithms import BC, PPO, Algorithm, AlgorithmConfig, Stop, config_class, load
from etude.algorithms.config import ModuleLike
from etude.algorithms.saving import find, name_of
from etude.checkpoints import load_meta
from etude.cli import files, flags, folders
from etude.connectors.pipeline import BY_NAME, ConnectorLike
from etude.errors import SettingsError
from etude.learners import Schedule
from etude.settings import from_dict, nearest, settings, typed

ALGORITHMS: dict[str, type[Algorithm[Any]]] = {"ppo": PPO, "bc": BC}
"""The algorithms that come with Etude, by their names."""


@settings
class TrainOptions:
    """What `etude train` takes besides the settings of the algorithm."""

    stop: Stop = Stop()
    """When to stop."""

    config: str | None = None
    """A YAML or JSON file with settings by name, and `stop`; flags count more."""

    out: str | None = None
    """The folder of the run: checkpoint, metrics.jsonl and TensorBoard events. None: runs/ALGORITHM-ENV-TIME, or the
    resumed run."""

    resume: str | None = None
    """Go on from the checkpoint in this folder, with its settings; those given here count more."""

    overwrite: bool = False
    """Replace the run that is in the folder."""

    save_interval: float = 60.0
    """Seconds between checkpoints, at least 0; one is always saved at the end."""

    quiet: bool = False
    """Print nothing but errors."""

    json: bool = False
    """Print the last result as one JSON object on standard output."""

    def __post_init__(self) -> None:
        if self.save_interval < 0:
            raise SettingsError(f"`save_interval` is {self.save_interval}, but must be at least 0.")


def algorithm_class(name: str) -> type[Algorithm[Any]]:
    """The algorithm called ``name``: one of `ALGORITHMS`, or ``module:Class``."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if ":" not in name:
        near = nearest(name, ALGORITHMS)
        hint = f" Nearest: `{near}`." if near else f" There are {', '.join(ALGORITHMS)}; or give `module:Class`."
        raise SettingsError(f"there is no algorithm `{name}`.{hint}")
    cls = find(name, "the algorithm")
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise SettingsError(f"{name} is no algorithm: it must be a class that inherits from etude.Algorithm.")
    return cls


class Asked(NamedTuple):
    """What a command line asks for, before anything is made of it."""

    cls: type[Algorithm[Any]]
    owner: str
    """What the algorithm is called in messages."""
    given: dict[str, Any]
    """Its settings."""
    options: TrainOptions
    out: Path
    """The folder of the run."""


def ask(cls: type[Algorithm[Any]], name: str, args: list[str]) -> Asked:
    """What the command line ``args`` asks of the algorithm ``cls``, called ``name``."""
    config = config_class(cls)
    owner = name.rpartition(":")[2]
    given, asked = flags.parse(
        [config, TrainOptions],
        args,
        prog=f"etude train {name}",
        about=(cls.__doc__ or "").partition("\n")[0],
        converters=_CONVERTERS,
    )
    options = from_dict(TrainOptions, asked, owner=owner)
    if options.config is not None:
        written, stop = _written(config, options.config, owner)
        both = from_dict(Stop, flags.merged(stop, asked.get("stop", {})), owner=f"{owner}.stop")
        options = dataclasses.replace(options, stop=both)
        given = flags.merged(written, given)
    if options.resume is not None:
        _check_kind(cls, options.resume, owner)
    out = folders.chosen(options.out, options.resume, given.get("env"), owner)
    return Asked(cls, owner, given, options, out)


def make(asked: Asked) -> Algorithm[Any]:
    """The algorithm that is asked for."""
    resume = asked.options.resume
    if resume is not None:
        return _resumed(resume, typed(config_class(asked.cls), asked.given, owner=asked.owner))
    return asked.cls(from_dict(config_class(asked.cls), asked.given, owner=asked.owner))


def _written(config: type[AlgorithmConfig], path: str, owner: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings in a file and its `stop`. Of settings that hold others, empty ones set nothing."""
    values = files.read_settings(path)
    for name in ("stop", *{leaf.path[0] for leaf in flags.leaves_of(config) if len(leaf.path) > 1}):
        if name in values and values[name] is None:
            del values[name]
    try:
        if not isinstance(values.get("stop", {}), Mapping):
            raise SettingsError(
                f"{owner}.stop is {values['stop']!r}, but must say what to stop at, as in `stop: {{updates: 1000}}`."
            )
        stop = dict(values.pop("stop", {}))
        flags.refuse_booleans(Stop, stop, owner=f"{owner}.stop")
        flags.refuse_booleans(config, values, owner=owner)
        typed(Stop, stop, owner=f"{owner}.stop")
        return _converted(config, values, owner), stop
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from error


def _converted(config: type[AlgorithmConfig], written: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Settings from a file; what only Python can write is made of its name, as it is for flags."""
    values = dict(written)
    for leaf in flags.leaves_of(config):
        name, value = leaf.path[-1], values.get(leaf.path[0])
        if len(leaf.path) == 1 and isinstance(value, list | tuple) and leaf.hint in _CONVERTERS:
            values[name] = tuple(flags.one_value(leaf.hint, item, _CONVERTERS) for item in value)
        elif len(leaf.path) == 1 and isinstance(value, str):
            values[name] = flags.one_value(leaf.hint, value, _CONVERTERS)
    typed(config, values, owner=owner)
    return values


def _check_kind(cls: type[Algorithm[Any]], path: str, owner: str) -> None:
    """Refuse to go on from a run of another algorithm, or from what is no run."""
    meta = load_meta(path)
    was = meta.get("algorithm") if isinstance(meta, dict) else None
    if was != name_of(cls):
        raise SettingsError(f"{path} is a run of {was}, not of {owner} ({name_of(cls)}).")


def _resumed(path: str, given: dict[str, Any]) -> Algorithm[Any]:
    network = given.pop("network", None)
    algorithm = load(path, **given)
    if network is not None and network != algorithm.config.network:
        algorithm.close()
        raise SettingsError("`network` can't be other than it was in a resumed run: the weights would not fit.")
    return algorithm


def _schedule(word: str) -> Any:
    """``3e-4``, or points such as ``0:1e-3,100000:0``."""
    if ":" not in word:
        return word
    return tuple(tuple(point.split(":")) for point in word.split(","))


def _module(word: str) -> Any:
    if ":" not in word:
        raise SettingsError(f"`module` is {word!r}, but must be written as `module:Class`, to be imported.")
    return find(word, "`module`")


def _connector(word: str) -> Any:
    """A name that the pipeline knows, or ``module:name`` of a class or function."""
    head, colon, tail = word.partition(":")
    importable = colon and head not in BY_NAME and tail.replace(".", "").isidentifier()
    return find(word, "a connector") if importable else word


_CONVERTERS: dict[Any, Any] = {
    Schedule: _schedule,
    ModuleLike | None: _module,
    tuple[ConnectorLike, ...]: _connector,
}
