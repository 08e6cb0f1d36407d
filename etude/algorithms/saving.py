# SPDX-License-Identifier: Apache-2.0
"""Settings in checkpoints: plain data, with functions and classes by name.

A checkpoint may come from a stranger, so loading does not import or call what it names. It may only name classes that
exist already: connectors, callbacks and prelearners of Etude or of the running program, where one of them is expected,
and Etude's networks. Everything else must be given when loading, or the file must be trusted.
"""

import collections.abc
import copy
import dataclasses
import functools
import importlib
import inspect
import os
import reprlib
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard, TypeVar
from weakref import WeakKeyDictionary

import gymnasium as gym
from torch import nn

from etude.algorithms import run
from etude.algorithms.config import AgentsConfig
from etude.connectors import Connector, FunctionConnector, PreLearner
from etude.connectors.pipeline import BY_NAME
from etude.envs import names_module
from etude.errors import CheckpointError, SettingsError, SpaceError
from etude.runners import Callback
from etude.settings import from_dict, merged, nested_by_name, settings_inside, typed
from etude.spaces import space_from_json, space_to_json
from etude.urls import can_be_kept, redacted, without_credentials

C = TypeVar("C")

REF = "$ref"
MADE = "$made"
UNSAVED = "$unsaved"
SPACE = "$space"

_MADE_BY_ARGUMENTS = (Connector, Callback, PreLearner)
"""Classes whose objects are rebuilt from the class and its constructor's arguments, which they keep as attributes."""

_SOURCES = ("etude.recordings.formats.source:Source", "etude.recordings.formats.custom:CustomSource")
"""Classes that say where recorded data is; by name, since their modules need pyarrow."""

_CONTAINERS = (tuple, type, collections.abc.Mapping, typing.Union, types.UnionType)


def name_of(thing: Any) -> str:
    """``module:qualname`` of a class or function. Other processes have the script as ``__mp_main__``."""
    module = "__main__" if thing.__module__ == "__mp_main__" else thing.__module__
    return f"{module}:{thing.__qualname__}"


# -- finding things by name ---------------------------------------------------------------------------------------


def imported(name: str, what: str) -> Any:
    """Import the class or function ``module:qualname``, which a user wrote or a trusted file names.

    Raises:
        CheckpointError: there is none; ``what`` says what it was needed for.
    """
    module, _, path = name.partition(":")
    try:
        return functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except Exception as error:  # the module's own code may raise anything
        raise CheckpointError(f"{what} is `{name}`, which can't be imported here ({error}).") from error


def known_class(name: str, base: type) -> type | None:
    """The class ``module:qualname`` that is ``base`` or inherits from it, if this program has it. Imports nothing.

    If there are several of that name, as in a notebook whose cell was run again, the newest is returned. A class that
    has the name only because its script is ``__main__`` in one of the two places is returned if it is the only one.
    """
    found, waiting, seen = None, [base], {base}
    of_scripts: list[type] = []
    for cls in waiting:
        if run.is_same_class(name, name_of(cls)):
            is_of_script = "__main__" in (name.partition(":")[0], cls.__module__) and name != name_of(cls)
            of_scripts += [cls] if is_of_script else []
            found = found if is_of_script else cls
        below: list[type] = cls.__subclasses__()
        waiting += [inner for inner in below if inner not in seen]
        seen |= set(below)
    return found if found is not None or len(of_scripts) != 1 else of_scripts[0]


class SettingPlace(NamedTuple):
    """The place of a value in a checkpoint's settings, and what is allowed there."""

    path: str
    setting: str
    """The setting that the value belongs to."""
    kinds: frozenset[type]
    """The classes in its annotation; ``object`` for Any."""
    trust: bool

    def inside(self, key: object) -> "SettingPlace":
        """The place of an item inside the value."""
        return self._replace(path=f"{self.path}/{key}")

    def error(self, name: object) -> CheckpointError:
        """The error for a name that is not allowed here."""
        shown = name[:200] if isinstance(name, str) else reprlib.repr(name)
        flag = " (--env on the command line)" if self.setting == "env" else ""
        return CheckpointError(
            f"its `{self.path}` names {shown}. Loading imports and calls nothing that a checkpoint names, except "
            "what is Etude's, and classes of this program that inherit from Etude's. Give it "
            f"when loading, as etude.load(path, {self.setting}=...){flag}; or load with trust=True (--trust), which "
            "runs code from the file."
        )

    def class_of(self, name: str) -> type | None:
        """The class of that name, if this program has it and it is allowed here."""
        for base in (*_MADE_BY_ARGUMENTS, nn.Module):
            is_any = object in self.kinds and base is not nn.Module
            if not is_any and not any(issubclass(kind, base) for kind in self.kinds):
                continue
            cls = known_class(name, base)
            if cls is None or issubclass(cls, FunctionConnector):  # it would call a function
                continue
            if base is not nn.Module or cls.__module__.partition(".")[0] == "etude":
                return cls
        return None


def _classes_in(hint: Any) -> Iterator[type]:
    """The classes that an annotation allows, as objects or as the class itself; ``object`` for Any."""
    if hint is Any:
        yield object
    elif typing.get_origin(hint) in _CONTAINERS:
        for part in typing.get_args(hint):
            yield from _classes_in(part)
    elif isinstance(kind := typing.get_origin(hint) or hint, type):
        yield kind


# -- to plain data ------------------------------------------------------------------------------------------------


def to_plain(value: Any) -> Any:
    """A setting as plain data. What can't be found by a name is marked, so that loading can ask for it."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):  # a URL of data may hold credentials
        return without_credentials(value) if can_be_kept(value) else {UNSAVED: redacted(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and name_of(type(value)) not in _SOURCES:
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, FunctionConnector):
        return to_plain(value.fn)
    if isinstance(value, gym.Space):
        try:
            return {SPACE: space_to_json(value)}
        except SpaceError:  # a user's own kind of space
            return _unsaved(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, _MADE_BY_ARGUMENTS) or name_of(type(value)) in _SOURCES:
        return _made_again(value)
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    return {REF: name_of(value)} if _is_found_by_name(value) else _unsaved(value)


def _is_found_by_name(value: Any) -> bool:
    if not getattr(value, "__qualname__", None) or not getattr(value, "__module__", None):
        return False
    try:
        return bool(functools.reduce(getattr, value.__qualname__.split("."), sys.modules[value.__module__]) == value)
    except (KeyError, AttributeError):
        return False


def _unsaved(value: Any) -> dict[str, str]:
    """A description of a value, without the arguments that it was made with, which may be secret."""
    plain = isinstance(value, types.FunctionType | types.MethodType | type)
    return {UNSAVED: repr(value)[:200] if plain else f"an object of {name_of(type(value))}"}


def _made_again(thing: Any) -> Any:
    """An object as its class and its constructor's arguments, which it keeps as attributes of the same names."""
    names = inspect.signature(type(thing)).parameters
    arguments = {name: to_plain(getattr(thing, name)) for name in names if hasattr(thing, name)}
    if len(arguments) < len(names) or not _is_found_by_name(type(thing)):
        return _unsaved(thing)
    # Not callbacks, since making one may open a file; sources are Etude's own.
    if isinstance(thing, Connector | PreLearner):
        if thing not in _KEEPING:
            _KEEPING[thing] = _keeps(thing, arguments)
        if not _KEEPING[thing]:
            return _unsaved(thing)
    return {MADE: name_of(type(thing)), "with": arguments}


_KEEPING: WeakKeyDictionary[Connector | PreLearner, bool] = WeakKeyDictionary()
"""Whether objects keep their arguments. It is tested only once for each object, as constructors may take long."""


def _keeps(thing: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether an object that is rebuilt from its attributes has the same ones, as plain data. If not, its constructor
    changes its arguments."""
    try:
        made = type(thing)(**copy.deepcopy({name: getattr(thing, name) for name in arguments}))
    except Exception:  # noqa: BLE001  of the user's code
        return False
    return {name: to_plain(getattr(made, name, None)) for name in arguments} == arguments


# -- from plain data ------------------------------------------------------------------------------------------------


def from_plain(value: Any, place: SettingPlace) -> Any:
    """The inverse of `to_plain`, for a value in its place.

    Raises:
        CheckpointError: it could not be saved, names what is not allowed there, or was not written by `to_plain`.
    """
    if isinstance(value, list):
        return tuple(from_plain(item, place.inside(i)) for i, item in enumerate(value))
    if isinstance(value, str):
        return _from_text(value, place)
    if not isinstance(value, dict):
        return value
    if REF in value:
        return _named(value[REF], place)
    if MADE in value:
        return _remade(value, place)
    if SPACE in value:
        try:
            return space_from_json(value[SPACE])
        except SpaceError as error:
            raise CheckpointError(f"`{place.path}` holds a space that can't be read ({error}).") from error
    if UNSAVED in value:
        raise CheckpointError(
            f"`{place.setting}` was {str(value[UNSAVED])[:200]}, which can't be kept in a checkpoint: give it when "
            f"loading, as etude.load(path, {place.setting}=...). Functions and classes at the top of a module are kept "
            "by name, and connectors by class and arguments, if they keep these as attributes of the same names, "
            "unchanged."
        )
    return {key: from_plain(item, place.inside(key)) for key, item in value.items()}


def _from_text(text: str, place: SettingPlace) -> Any:
    """A text as a setting, if it names no code that is not allowed in this place."""
    if place.trust:
        return text
    if gym.Env in place.kinds and names_module(text):  # a factory, or one that Gymnasium would import before its id
        raise place.error(text)
    if Connector in place.kinds and text.partition(":")[0] not in BY_NAME:
        raise place.error(text)
    if Callback in place.kinds and not _is_found_by_name(found := _named(text, place)):
        return found
    return text


def _named(name: Any, place: SettingPlace) -> Any:
    found = place.class_of(name) if isinstance(name, str) else None
    if found is None and place.trust and isinstance(name, str):
        return imported(name, f"`{place.setting}`")
    if found is None:
        raise place.error(name)
    return found


def _remade(value: Mapping[str, Any], place: SettingPlace) -> Any:
    name = value[MADE]
    is_source = name in _SOURCES and object in place.kinds
    made = imported(name, place.path) if is_source else _named(name, place)
    if not is_source and not (isinstance(made, type) and issubclass(made, _MADE_BY_ARGUMENTS)):
        raise CheckpointError(f"`{place.path}` names {name}, which is not a class that settings can hold.")
    arguments = value.get("with")
    inner = place._replace(kinds=frozenset() if is_source else frozenset((object,)))
    try:
        return made(**{key: from_plain(item, inner.inside(key)) for key, item in dict(arguments or {}).items()})
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"`{place.path}` can't be made again as a {name} ({type(error).__name__}: {error})."
        ) from error


def is_plain(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a value in saved settings is a mapping, such as nested settings."""
    return isinstance(value, dict) and not {REF, MADE, UNSAVED, SPACE} & value.keys()


def _settings_from(
    cls: type, saved: Mapping[str, Any], place: SettingPlace, whole: type | None = None
) -> dict[str, Any]:
    """The values of saved settings of ``cls``, by name; nested settings as mappings.

    Old names are replaced first, so that each value is checked by what is allowed in its current place. ``whole`` is
    the class of the settings that contain these; None: they are not nested.
    """
    saved = nested_by_name(cls, saved, cls.__name__)
    hints, inside = typing.get_type_hints(cls), settings_inside(cls)
    found: dict[str, Any] = {}
    for name, value in saved.items():
        here = place.inside(name)._replace(setting=place.setting or name, kinds=frozenset(_classes_in(hints.get(name))))
        if is_plain(value) and name in inside:
            within = here._replace(setting="") if inside[name] is AgentsConfig else here
            found[name] = _settings_from(inside[name], value, within, whole or cls)
        elif is_plain(value) and cls is AgentsConfig and name == "overrides":  # settings of class `whole`, by module
            assert whole is not None
            found[name] = {}
            for key, own in value.items():
                there = here.inside(key)
                found[name][key] = _settings_from(whole, own, there) if is_plain(own) else from_plain(own, there)
        else:
            found[name] = from_plain(value, here)
    return found


def load_config(cls: type[C], saved: Mapping[str, Any], overrides: Mapping[str, Any], *, trust: bool = False) -> C:
    """Settings from `to_plain` data, with overrides. For nested settings, a mapping overrides only some of them.

    Args:
        cls: The class of the settings.
        saved: The settings in a checkpoint; the engine's are ignored.
        overrides: Settings that take precedence.
        trust: Import what ``saved`` names.

    Raises:
        CheckpointError: a setting can't be restored and is not overridden, or ``cls`` has no such setting.
        SettingsError: an override is not a setting of ``cls``, or is out of range.
    """
    owner, inside = cls.__name__, settings_inside(cls)
    given = typed(cls, overrides, owner=owner)
    whole = {name for name, value in given.items() if not (name in inside and isinstance(value, Mapping))}
    try:
        saved = nested_by_name(cls, saved, owner)
        kept = {name: value for name, value in saved.items() if name not in whole and name != "engine"}
        for name in given.keys() & kept.keys() - whole:
            if isinstance(kept[name], dict):
                kept[name] = {inner: value for inner, value in kept[name].items() if inner not in given[name]}
        values = _settings_from(cls, kept, SettingPlace("config", "", frozenset(), trust))
        values = typed(cls, values, owner=owner)
        if not overrides:
            return from_dict(cls, values, owner=owner)
    except SettingsError as error:
        raise CheckpointError(f"the settings do not fit: {error}") from error
    return from_dict(cls, merged(values, given), owner=owner)


def names_code(config: Any) -> bool:
    """Whether settings name a user's code or hold a value without a name, so that loading them takes more than a
    path."""
    plain = to_plain(config)
    texts = [plain["env"], *plain["callbacks"]]
    return any(isinstance(text, str) and names_module(text) for text in texts) or _names_code(plain)


def _names_code(plain: Any) -> bool:
    if isinstance(plain, list):
        return any(map(_names_code, plain))
    if not isinstance(plain, dict):
        return False
    name = plain.get(REF) or plain.get(MADE) or "etude."
    return UNSAVED in plain or not str(name).startswith("etude.") or any(map(_names_code, plain.values()))


def saved_env_name(saved: Mapping[str, Any]) -> str | None:
    """The name of the env in saved settings, as in recordings; None if there was no env, or one without a name."""
    env = saved.get("env")
    name = env.get(REF) or env.get(MADE) if isinstance(env, Mapping) else env
    return name if isinstance(name, str) else None


def drop_other_episodes(state: Any, saved: Mapping[str, Any], env: Any) -> None:
    """Drop what a state has of episodes of another env than ``env``: those that run, the figures of those that ended,
    and the last evaluation. ``saved`` are the state's settings."""
    was = saved.get("env")
    if (isinstance(was, dict) and UNSAVED in was) or to_plain(env) == was:
        return
    if isinstance(state.get("runner"), dict):
        state["runner"]["arena"] = {"how": "new episodes", "why": "another env was given"}
    if isinstance(figures := state.get("figures"), dict):
        state["figures"] = {kind: kept if kind == "metrics" else {} for kind, kept in figures.items()}
    if isinstance(counters := state.get("counters"), dict):
        counters["evaluation"] = {}
