# SPDX-License-Identifier: Apache-2.0
"""Read the command line and settings file of commands that train: an algorithm, its settings, and how to run it."""

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from etude.algorithms import ALGORITHMS, Algorithm, AlgorithmConfig, OfflineConfig, Ray, Stop, run
from etude.algorithms.config import ModuleLike, ModulesLike, TrainedLike
from etude.algorithms.saving import imported
from etude.checkpoints import MANIFEST, load_meta
from etude.cli import flags
from etude.connectors import PreLearnerLike
from etude.connectors.pipeline import BY_NAME, ConnectorLike
from etude.envs import EnvLike
from etude.errors import SettingsError
from etude.learners import Schedule
from etude.presets import find_preset
from etude.runners import CallbackLike, ModuleOf
from etude.settings import FloatFrom0, choice, from_dict, merged, nested_by_name, settings, typed


@settings
class RunOptions:
    """Options of all commands that train, besides the settings of the algorithm."""

    everyday: ClassVar[tuple[str, ...]] = ("preset", "config")

    stop: Stop = Stop()
    """When to stop."""

    preset: bool = False
    """Start from the preset for this algorithm and env, including its `stop`; see `etude presets`. A settings file and
    flags take precedence."""

    config: str | None = None
    """A YAML or JSON file with settings by name, which may include `stop`; flags take precedence."""

    ray: Ray = Ray()
    """Settings of the ray engine, for `--engine ray`."""

    save_interval: FloatFrom0 = 60.0
    """Seconds between checkpoints, at least 0; one is always saved at the end."""

    quiet: bool = False
    """Print only errors and the results."""

    json: bool = False
    """Print the results as one JSON object on standard output."""


@settings
class FolderOptions(RunOptions):
    """Options of commands that write runs to folders on this machine."""

    everyday: ClassVar[tuple[str, ...]] = ()

    out: str | None = None
    """Folder to write to."""

    resume: str | None = None
    """Folder of an interrupted run to continue."""

    overwrite: bool = False
    """Replace the runs in the folder."""

    log: tuple[run.Log, ...] = ("jsonl", "tensorboard")
    """Where to write metrics: jsonl (metrics.jsonl), csv (metrics.csv, at the end), tensorboard, wandb, mlflow."""

    def folder(self, name: str, env: Any, *, in_place: str | None = None) -> Path:
        """Return the folder to write to: ``out``, else ``resume``, else a new one.

        Args:
            name: What is trained, for the name of a new folder.
            env: The env, for the name of a new folder.
            in_place: What can only be resumed in its own folder, such as ``a sweep``; None: any folder will do.

        Raises:
            SettingsError: ``in_place`` is given, and ``out`` is another folder than ``resume``.
        """
        out = self.out if self.out is not None else self.resume
        found = run.new_folder(name, env) if out is None else run.folder_of(out)
        if in_place is not None and self.resume is not None and found.resolve() != Path(self.resume).resolve():
            raise SettingsError(f"{in_place} can only be resumed in its own folder: give --resume without --out.")
        return found

    def of_jobs(self) -> dict[str, Any]:
        """These options as arguments of `seed_jobs`."""
        names = ("stop", "overwrite", "log", "save_interval")
        return {"resume": self.resume is not None} | {name: getattr(self, name) for name in names}


O = TypeVar("O", bound=RunOptions)  # noqa: E741


def algorithm_class(args: list[str], command: str, usage: str) -> type[Algorithm[Any]] | None:
    """The algorithm named first in ``args``: one of `ALGORITHMS` (``PPO`` and ``td3bc`` match, too), or
    ``module:Class``.

    Returns:
        The class; None if help is asked for, after ``usage`` was written.
    """
    names = ", ".join(ALGORITHMS)
    if not args or args[0].startswith("-"):
        if not {*flags.HELP, flags.HELP_ALL} & {*args}:
            raise SettingsError(
                f"etude {command} needs an algorithm: {names}, or `module:Class`. Put it first: etude {command} ppo."
            )
        sys.stdout.write(usage.format(names=names, command=command))
        return None
    name = args[0]
    for known, cls in ALGORITHMS.items():
        if re.sub(r"\W|_", "", name.lower()) == known.replace("_", ""):
            return cls
    if ":" not in name:
        hint = choice(name, ALGORITHMS)
        raise SettingsError(f"there is no algorithm `{name}`. {hint} Or give your own, as `module:Class`.")
    own = _own(name, "the algorithm")
    if not (isinstance(own, type) and issubclass(own, Algorithm)):
        raise SettingsError(f"{name} is not an algorithm: it must be a class that inherits from etude.Algorithm.")
    return own


def ask(
    cls: type[Algorithm[Any]], kind: type[O], args: list[str], command: str, about: str
) -> tuple[str, dict[str, Any], O]:
    """Parse ``etude COMMAND ALGORITHM ...`` for the algorithm ``cls``; flags take precedence over a settings file.

    Returns:
        The algorithm's name in messages; its settings; the command's own options.
    """
    name = next((known for known, found in ALGORITHMS.items() if found is cls), args[0])
    owner = name.rpartition(":")[2]
    kinds: dict[str, type] = {owner: cls.Config, command: kind}
    if issubclass(cls.Config, OfflineConfig):
        kinds["table"] = flags.TableOptions
    found = flags.parse(kinds, args[1:], prog=f"etude {command} {name}", about=about, converters=CONVERTERS)
    given, asked, table = found[owner], found[command], found.get("table", {})
    written, stop = read_settings_file(cls.Config, asked["config"], owner, kind) if asked.get("config") else ({}, {})
    if typed(kind, {"preset": asked.get("preset", False)}, owner=owner)["preset"]:
        env = given.get("env", written.get("env"))
        if env is None:
            raise SettingsError("--preset is for an algorithm and an env: give --env. See `etude presets`.")
        tuned = find_preset(name, str(env))
        written, stop = merged(typed(cls.Config, tuned.settings, owner=owner), written), merged(tuned.stop, stop)
    table = {"columns": written.pop("columns")} | table if "columns" in written else table
    if table:
        data = given.get("data", written.get("data"))
        if data is None:
            raise SettingsError("`columns` describes the columns of a table: give the table, too, as --data log.csv.")
        given["data"] = from_dict(flags.TableOptions, table, owner=owner).described(data)
    ray, engine = asked.pop("ray", {}), given.get("engine", written.get("engine", "local"))
    if ray and engine == "local":
        raise SettingsError(f"{owner} has `ray.{next(iter(ray))}`, but uses the local engine: add --engine ray.")
    if ray or engine == "ray":
        before = written.get("engine")
        given["engine"] = merged(before if isinstance(before, Mapping) else {}, ray) or "ray"
    if asked.get("resume") and issubclass(kind, FolderOptions):
        asked = merged(_written_as(Path(asked["resume"]), kind), asked)
    asked["stop"] = from_dict(Stop, merged(stop, asked.get("stop", {})), owner=f"{owner}.stop")
    return owner, merged(written, given), from_dict(kind, asked, owner=owner)


def saved_in(folder: str | Path, what: str) -> dict[str, Any]:
    """The ``config`` or the ``run`` options that a checkpoint stores; {} if it does not."""
    meta = load_meta(folder)
    saved = meta.get(what) if isinstance(meta, dict) else None
    return saved if isinstance(saved, dict) else {}


def _written_as(out: Path, kind: type[FolderOptions]) -> dict[str, Any]:
    """The stored options of the run in a folder, or of the first of several seeds; resuming keeps them."""
    first = next((path for path in (out, *sorted(out.glob("*-*"))) if (path / MANIFEST).exists()), None)
    known = {field.name for field in dataclasses.fields(kind)}
    saved = saved_in(first, "run") if first is not None else {}
    return {name: value for name, value in saved.items() if name in known}


def config_of(cls: type[Algorithm[Any]], given: Mapping[str, Any], owner: str) -> AlgorithmConfig:
    """The algorithm's settings object; offline algorithms need data."""
    config: AlgorithmConfig = from_dict(cls.Config, given, owner=owner)
    if isinstance(config, OfflineConfig) and config.data is None:
        raise SettingsError(f"{owner} needs a value for `data`, such as --data data/expert.")
    return config


def read_settings_file(
    config: type[AlgorithmConfig], path: str, owner: str, options: type
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings in a file, including the `columns` of a table if given, and its `stop`.

    Raises:
        SettingsError: the file holds none, or one of the command's ``options``, which are given as flags alone.
    """
    found = flags.read(path)
    table = {"columns": found.pop("columns")} if "columns" in found and issubclass(config, OfflineConfig) else {}
    try:
        stop = found.pop("stop", None) or {}
        if not isinstance(stop, Mapping):
            raise SettingsError(f"{owner}.stop is {stop!r}, but must be as in `stop: {{updates: 1000}}`.")
        theirs, ours = ({field.name for field in dataclasses.fields(kind)} for kind in (options, config))
        if flag := next((name for name in found if name in theirs - ours), None):
            raise SettingsError(f"`{flag}` is no setting of {owner}, but given by flags alone: see --help-all.")
        found = nested_by_name(config, found, owner)
        written = [flags.convert_file(cls, of, CONVERTERS) for cls, of in ((config, found), (Stop, stop))]
        return typed(config, written[0], owner=owner) | table, typed(Stop, written[1], owner=f"{owner}.stop")
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from error


# -- what only Python can write ---------------------------------------------------------------------------------------


def import_from_here() -> None:
    """Add the current folder to the import path, for names that the user wrote and for files that are trusted.

    Not done otherwise: a downloaded folder may hold a file named like a library.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _own(name: str, what: str) -> Any:
    """Import the class or function that a user names."""
    import_from_here()
    return imported(name, what)


def _imported(setting: str, kind: str) -> Callable[[str], Any]:
    """A function that imports the class or function that ``setting`` names."""

    def found(word: str) -> Any:
        if ":" not in word:
            raise SettingsError(f"`{setting}` is {word!r}, but must be written as `module:{kind}`, to be imported.")
        return _own(word, f"`{setting}`")

    return found


def _passed_on(word: str) -> str:
    """Return the word; if it names code that is imported later, make that possible."""
    if ":" in word:
        import_from_here()
    return word


def _connector(word: str) -> Any:
    """A connector's name that the pipeline knows, or the class or function ``module:name``."""
    head, colon, tail = word.partition(":")
    is_own = colon and head not in BY_NAME and tail.replace(".", "").isidentifier()
    return _own(word, "a connector") if is_own else word


def _trained(word: str) -> Any:
    """Ids separated by commas, or ``module:function``."""
    return _imported("modules_to_train", "function")(word) if ":" in word else tuple(word.split(","))


def _schedule(word: str) -> Any:
    """A schedule: ``3e-4``; or points such as ``0:1e-3,100000:0``, optionally after ``cosine:``."""
    if ":" not in word:
        return word
    cosine, points = word.startswith("cosine:"), word.removeprefix("cosine:").split(",")
    return (*(["cosine"] if cosine else []), *(tuple(point.split(":")) for point in points))


CONVERTERS: flags.Converters = {
    Schedule: _schedule,
    Schedule | None: _schedule,
    ModuleLike | None: _imported("module", "Class"),
    ModulesLike | None: _imported("modules", "Class"),
    ModuleOf | None: _imported("module_of", "function"),
    TrainedLike | None: _trained,
    PreLearnerLike | None: _imported("prelearner", "function"),
    EnvLike | None: _passed_on,
    tuple[CallbackLike, ...]: _passed_on,
    tuple[ConnectorLike, ...]: _connector,
}
