# SPDX-License-Identifier: Apache-2.0
"""What a command line asks ``etude train`` for: the algorithm with its settings, the options, the folder of the run."""

import dataclasses
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.algorithms import BC, PPO, Algorithm, AlgorithmConfig, Stop, config_class, load
from etude.algorithms.config import ModuleLike
from etude.algorithms.saving import find, name_of
from etude.checkpoints import load_meta
from etude.checkpoints.tree import MANIFEST
from etude.cli import files, flags
from etude.connectors.pipeline import BY_NAME, ConnectorLike
from etude.errors import SettingsError
from etude.learners import Schedule
from etude.metrics.plot import METRICS_FILE
from etude.settings import from_dict, nearest, settings, typed

ALGORITHMS: dict[str, type[Algorithm[Any]]] = {"ppo": PPO, "bc": BC}
"""The algorithms that come with Etude, by their names."""

TENSORBOARD = "tensorboard"


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


def make(cls: type[Algorithm[Any]], name: str, args: list[str]) -> tuple[Algorithm[Any], TrainOptions, Path]:
    """The algorithm, the options and the folder of the run that a command line asks for."""
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
    path = options.config
    if path is not None:
        written = files.read_settings(path)
        stop = written.pop("stop", {})
        options = dataclasses.replace(
            options, stop=from_dict(Stop, flags.merged(stop, asked.get("stop", {})), owner=f"{owner}.stop")
        )
        given = flags.merged(_converted(config, written, path, owner), given)
    out = _folder(options, given.get("env"), owner)
    _check_free(out, options)
    if options.resume is not None:
        return _resumed(cls, options.resume, typed(config, given, owner=owner), owner), options, out
    return cls(from_dict(config, given, owner=owner)), options, out


def _converted(config: type[AlgorithmConfig], written: Mapping[str, Any], path: str, owner: str) -> dict[str, Any]:
    """Settings from a file; what only Python can write is made of its name, as it is for flags."""
    values = dict(written)
    for leaf in flags.leaves_of(config):
        name, value = leaf.path[-1], values.get(leaf.path[0])
        if len(leaf.path) == 1 and isinstance(value, list | tuple) and leaf.hint in _CONVERTERS:
            values[name] = tuple(flags.one_value(leaf.hint, item, _CONVERTERS) for item in value)
        elif len(leaf.path) == 1 and isinstance(value, str):
            values[name] = flags.one_value(leaf.hint, value, _CONVERTERS)
    try:
        typed(config, values, owner=owner)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from error
    return values


def _resumed(cls: type[Algorithm[Any]], path: str, given: dict[str, Any], owner: str) -> Algorithm[Any]:
    meta = load_meta(path)
    was = meta.get("algorithm") if isinstance(meta, dict) else None
    if was != name_of(cls):
        raise SettingsError(f"{path} is a run of {was}, not of {owner} ({name_of(cls)}).")
    network = given.pop("network", None)
    algorithm = load(path, **given)
    if network is not None and network != algorithm.config.network:
        algorithm.close()
        raise SettingsError("`network` can't be other than it was in a resumed run: the weights would not fit.")
    return algorithm


def _folder(options: TrainOptions, env: Any, owner: str) -> Path:
    if options.out is not None:
        return Path(options.out)
    if options.resume is not None:
        return Path(options.resume)
    where = str(env).replace(":", "-").replace("/", "-") if env is not None else "offline"
    return Path("runs") / f"{owner}-{where}-{time.strftime('%Y%m%d-%H%M%S')}"


def _check_free(out: Path, options: TrainOptions) -> None:
    """Refuse to mix two runs in one folder."""
    if out.exists() and not out.is_dir():
        raise SettingsError(f"`out` is {out}, which is a file: give a folder.")
    goes_on = options.resume is not None and out.resolve() == Path(options.resume).resolve()
    if goes_on and options.overwrite:
        raise SettingsError(
            f"{out} can't be both resumed and overwritten: leave out --overwrite, or give another --out."
        )
    if goes_on or options.overwrite:
        return
    if (out / METRICS_FILE).exists() or (out / MANIFEST).exists():
        raise SettingsError(
            f"{out} holds a run already. Go on with it (--resume {out}), replace it (--overwrite), or give another "
            "--out."
        )


def clear(out: Path) -> None:
    """Remove a run, and nothing else that is in its folder."""
    for path in (out / METRICS_FILE, out / MANIFEST, *out.glob("state-*.safetensors")):
        path.unlink(missing_ok=True)
    shutil.rmtree(out / TENSORBOARD, ignore_errors=True)


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
