# SPDX-License-Identifier: Apache-2.0
"""What a command line asks ``etude train`` for: the algorithm with its settings, the options, the folder of the run."""

import dataclasses
import json
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from etude.algorithms import ALGORITHMS, Algorithm, AlgorithmConfig, Checkpoints, OfflineConfig, Stop, load
from etude.algorithms.config import DataLike, ModuleLike, ModulesLike, TrainedLike
from etude.algorithms.loading import check_metric
from etude.algorithms.saving import imported, name_of
from etude.checkpoints import load_meta
from etude.cli import files, flags, folders, words
from etude.cli.engine import EngineFlags, with_engine
from etude.cli.logs import Log
from etude.connectors import PreLearnerLike
from etude.connectors.pipeline import BY_NAME, ConnectorLike
from etude.envs import EnvLike
from etude.errors import SettingsError
from etude.learners import Schedule
from etude.runners import CallbackLike, ModuleOf
from etude.settings import choice, from_dict, merged, settings, settings_inside, typed
from etude.urls import redacted


@settings
class KeepOptions:
    """Which checkpoints are kept in OUT/checkpoints, besides the newest one in OUT itself."""

    keep_last: int = 0
    """How many of the newest, at least 0."""

    keep_best: int = 0
    """How many of those with the best `metric`, at least 0."""

    metric: str = "return_mean"
    """The field of results that says which is the best; `losses/policy` is an entry of a field."""

    best_is: Literal["max", "min"] = "max"
    """Whether a large one is good, or a small one."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_best"):
            if getattr(self, name) < 0:
                raise SettingsError(f"`checkpoints.{name}` is {getattr(self, name)}, but must be at least 0.")
        check_metric(self.metric)

    def kept_in(self, out: Path) -> Checkpoints | None:
        """What keeps them; None where none are to be kept."""
        if not self.keep_last and not self.keep_best:
            return None
        last = max(1, self.keep_last)
        where = out / folders.CHECKPOINTS
        return Checkpoints(where, keep_last=last, keep_best=self.keep_best, metric=self.metric, best_is=self.best_is)


@settings
class TrainOptions:
    """What `etude train` takes besides the settings of the algorithm."""

    stop: Stop = Stop()
    """When to stop."""

    config: str | None = None
    """A YAML or JSON file with settings by name, and `stop`; flags count more."""

    out: str | None = None
    """The folder of the run: checkpoint, metrics and TensorBoard events. None: runs/ALGORITHM-ENV-TIME, or the resumed
    run."""

    resume: str | None = None
    """Go on from the checkpoint in this folder, with its settings; those given here count more. The engine, and code of
    your own that it names, such as an env `module:factory`, are to be given again."""

    trust: bool = False
    """Import and call whatever the checkpoint to go on from names: this runs code from the file."""

    overwrite: bool = False
    """Replace the run that is in the folder."""

    save_interval: float = 60.0
    """Seconds between checkpoints, at least 0; one is always saved at the end."""

    log: tuple[Log, ...] = ("jsonl", "tensorboard")
    """Where metrics go: jsonl (metrics.jsonl), csv (metrics.csv, at the end), tensorboard, wandb, mlflow."""

    checkpoints: KeepOptions = KeepOptions()
    """Which other checkpoints are kept."""

    clip_interval: int = 0
    """Iterations between clips of an episode, in OUT/clips and in TensorBoard; 0 makes none. The env must be able to
    draw itself (render_mode)."""

    quiet: bool = False
    """Print nothing but errors."""

    json: bool = False
    """Print the last result as one JSON object on standard output."""

    def __post_init__(self) -> None:
        if self.save_interval < 0:
            raise SettingsError(f"`save_interval` is {self.save_interval}, but must be at least 0.")
        if self.clip_interval < 0:
            raise SettingsError(f"`clip_interval` is {self.clip_interval}, but must be at least 0.")


def algorithm_class(name: str) -> type[Algorithm[Any]]:
    """The algorithm called ``name``: one of `ALGORITHMS` (``PPO`` and ``td3bc`` too), or ``module:Class``."""
    for known, cls in ALGORITHMS.items():
        if re.sub(r"\W|_", "", name.lower()) == known.replace("_", ""):
            return cls
    if ":" not in name:
        hint = choice(name, ALGORITHMS)
        raise SettingsError(f"there is no algorithm `{name}`. {hint} Or give your own, as `module:Class`.")
    cls = _own(name, "the algorithm")
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
    config = cls.Config
    name = next((known for known, found in ALGORITHMS.items() if found is cls), name)
    owner = name.rpartition(":")[2]
    given, engine, asked = flags.parse(
        [config, EngineFlags, TrainOptions],
        args,
        prog=f"etude train {name}",
        about=(cls.__doc__ or "").partition("\n")[0],
        converters=CONVERTERS,
    )
    options = from_dict(TrainOptions, asked, owner=owner)
    if options.resume is not None:
        _check_run(cls, options.resume, owner)
    written, stop = ({}, {}) if options.config is None else written_in(config, options.config, owner)
    both = from_dict(Stop, merged(stop, asked.get("stop", {})), owner=f"{owner}.stop")
    options = dataclasses.replace(options, stop=both)
    given = with_engine(given, engine.get("ray", {}), written.get("engine"), owner)
    given = merged(written, given)
    out = folders.chosen(options.out, options.resume, given.get("env"), owner)
    return Asked(cls, owner, given, options, out)


def make(asked: Asked) -> Algorithm[Any]:
    """The algorithm that is asked for."""
    if asked.options.resume is not None:
        if asked.options.trust:
            words.import_from_here()
        given = {"engine": "local"} | typed(asked.cls.Config, asked.given, owner=asked.owner)
        return load(asked.options.resume, trust=asked.options.trust, **given)
    config = from_dict(asked.cls.Config, asked.given, owner=asked.owner)
    if isinstance(config, OfflineConfig) and config.data is None:
        raise SettingsError(f"{asked.owner} needs a value for `data`, such as --data data/expert.")
    return asked.cls(config)


def written_in(config: type[AlgorithmConfig], path: str, owner: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings in a file and its `stop`. Of settings that hold others, empty ones set nothing."""
    values = files.read_settings(path)
    for name in ("stop", *settings_inside(config)):
        if name in values and values[name] is None:
            del values[name]
    try:
        stop = values.pop("stop", {})
        if not isinstance(stop, Mapping):
            raise SettingsError(
                f"{owner}.stop is {stop!r}, but must say what to stop at, as in `stop: {{updates: 1000}}`."
            )
        values, stop = _converted(config, values), _converted(Stop, stop)
        return typed(config, values, owner=owner), typed(Stop, stop, owner=f"{owner}.stop")
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from error


def _converted(cls: type, written: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from a file; what only Python can write is made of its name, as it is for flags."""
    hints, inside, values = typing.get_type_hints(cls), settings_inside(cls), dict(written)
    for name, value in written.items():
        if name in inside and isinstance(value, Mapping):
            values[name] = _converted(inside[name], value)
        elif name in hints:
            values[name] = words.made(hints[name], value, CONVERTERS)
    return values


def _check_run(cls: type[Algorithm[Any]], path: str, owner: str) -> None:
    """Refuse to go on with a run of another algorithm, or with what is no run."""
    meta = load_meta(path)
    was = meta.get("algorithm") if isinstance(meta, dict) else None
    if was != name_of(cls):
        raise SettingsError(f"{redacted(path)} is a run of {was}, not of {owner} ({name_of(cls)}).")


def _schedule(word: str) -> Any:
    """``3e-4``, or points such as ``0:1e-3,100000:0``, or those behind ``cosine:``."""
    if ":" not in word:
        return word
    cosine, points = word.startswith("cosine:"), word.removeprefix("cosine:").split(",")
    return (*(["cosine"] if cosine else []), *(tuple(point.split(":")) for point in points))


def _own(name: str, what: str) -> Any:
    """The class or function that a user names."""
    words.import_from_here()
    return imported(name, what)


def _passed_on(word: str) -> str:
    """What is imported later, if it names code."""
    if ":" in word:
        words.import_from_here()
    return word


def _imported(setting: str, kind: str) -> Callable[[str], Any]:
    """What finds the class or function that ``setting`` names."""

    def found(word: str) -> Any:
        if ":" not in word:
            raise SettingsError(f"`{setting}` is {word!r}, but must be written as `module:{kind}`, to be imported.")
        return _own(word, f"`{setting}`")

    return found


def _trained(word: str) -> Any:
    """Ids with commas between, or ``module:function``."""
    return _imported("modules_to_train", "function")(word) if ":" in word else tuple(word.split(","))


def _range(word: str) -> Any:
    """``4``, or least and most, as ``2,8``."""
    return tuple(word.split(",")) if "," in word else word


def _json(word: str) -> Any:
    """JSON where it begins as a list or an object, else text."""
    try:
        return json.loads(word) if word[:1] in ("[", "{") else word
    except ValueError as error:
        raise SettingsError(f"{word} can't be read as JSON: {error}") from None


def _connector(word: str) -> Any:
    """A name that the pipeline knows, or ``module:name`` of a class or function."""
    head, colon, tail = word.partition(":")
    importable = colon and head not in BY_NAME and tail.replace(".", "").isidentifier()
    return _own(word, "a connector") if importable else word


CONVERTERS: dict[Any, Any] = {
    Schedule: _schedule,
    Schedule | None: _schedule,
    ModuleLike | None: _imported("module", "Class"),
    ModulesLike | None: _imported("modules", "Class"),
    ModuleOf | None: _imported("module_of", "function"),
    TrainedLike | None: _trained,
    DataLike | None: str,
    PreLearnerLike | None: _imported("prelearner", "function"),
    EnvLike | None: _passed_on,
    tuple[CallbackLike, ...]: _passed_on,
    tuple[ConnectorLike, ...]: _connector,
    int | tuple[int, int] | None: _range,
    Mapping[str, Any] | None: _json,
}
