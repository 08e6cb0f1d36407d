# SPDX-License-Identifier: Apache-2.0
"""Settings in checkpoints: as plain data, with functions and classes by name."""

import dataclasses
import importlib
import inspect
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from etude.connectors import Connector, FunctionConnector, PreLearner
from etude.errors import CheckpointError
from etude.runners import Callback
from etude.settings import from_dict, merged, settings_inside, typed
from etude.urls import without_credentials

C = TypeVar("C")

REF = "$ref"
MADE = "$made"
UNSAVED = "$unsaved"


_MADE_BY_ARGUMENTS = (Connector, Callback, PreLearner)
"""What is made again of its class and the arguments that it keeps."""


def _is_source(cls: type) -> bool:
    """Whether it says where recorded data is; asked by name, since its module needs pyarrow."""
    return cls.__module__.startswith("etude.recordings.formats.") and dataclasses.is_dataclass(cls)


def name_of(thing: Any) -> str:
    """``module:qualname`` of a class or function."""
    return f"{thing.__module__}:{thing.__qualname__}"


def find(name: str, what: str, remedy: str = "") -> Any:
    """The class or function called ``module:qualname``.

    Raises:
        CheckpointError: there is none; ``what`` says what it was wanted for, and ``remedy`` what to do.
    """
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(f"{what} is `{name}`, which can't be imported here ({error}){remedy}.") from error
    return found


def to_plain(value: Any) -> Any:
    """A setting as plain data. What has no name to be found by is marked, so that loading can ask for it."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return without_credentials(value)  # a URL of data may hold some
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not _is_source(type(value)):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, FunctionConnector):
        return to_plain(value.fn)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, _MADE_BY_ARGUMENTS) or _is_source(type(value)):
        return _made_again(value)
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    return {REF: name_of(value)} if _is_found_by_name(value) else {UNSAVED: repr(value)[:200]}


def _is_found_by_name(value: Any) -> bool:
    if not getattr(value, "__qualname__", None) or not getattr(value, "__module__", None):
        return False
    try:
        return bool(find(name_of(value), "") == value)
    except CheckpointError:
        return False


def _made_again(thing: Any) -> Any:
    """A thing by its class and the arguments it was made with, which it keeps as attributes of the same names."""
    names = inspect.signature(type(thing)).parameters
    arguments = {name: to_plain(getattr(thing, name)) for name in names if hasattr(thing, name)}
    if len(arguments) < len(names) or not _is_found_by_name(type(thing)):
        return {UNSAVED: repr(thing)[:200]}
    return {MADE: name_of(type(thing)), "with": arguments}


def from_plain(value: Any, what: str) -> Any:
    """The inverse of `to_plain` for one setting, called ``what``.

    Raises:
        CheckpointError: it could not be saved, or what it names can't be imported; it must then be given anew.
    """
    if isinstance(value, dict):
        remedy = f"give it when loading, as etude.load(path, {what.strip('`')}=...)"
        if REF in value:
            return find(value[REF], what, f": {remedy}")
        if MADE in value:
            made = find(value[MADE], what, f": {remedy}")
            if not (isinstance(made, type) and (issubclass(made, _MADE_BY_ARGUMENTS) or _is_source(made))):
                raise CheckpointError(
                    f"{what} names {value[MADE]}, which is nothing that settings hold: the checkpoint is not sound."
                )
            return made(**{name: from_plain(item, what) for name, item in value["with"].items()})
        if UNSAVED in value:
            raise CheckpointError(
                f"{what} was {value[UNSAVED]}, which can't be kept in a checkpoint: {remedy}. "
                "Functions and classes at the top of a module are kept."
            )
        return {key: from_plain(item, what) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(from_plain(item, what) for item in value)
    return value


def drop_other_episodes(state: Mapping[str, Any], saved: Mapping[str, Any], env: Any) -> None:
    """Let new episodes begin where a state has running ones, but not of ``env``: by ``saved``, the settings then."""
    was = saved.get("env")
    if "runner" in state and UNSAVED not in (was or ()) and to_plain(env) != was:
        state["runner"]["arena"] = {"how": "new episodes", "why": "another env was given"}


def load_config(cls: type[C], saved: Mapping[str, Any], overrides: Mapping[str, Any]) -> C:
    """Settings from `to_plain` data, some of them overridden; of settings inside others, those that are given.

    Raises:
        CheckpointError: a setting can't be had back, and is not overridden.
        SettingsError: an override or a saved setting is not one of ``cls``, or is out of range.
    """
    owner, inside = cls.__name__, settings_inside(cls)
    given = typed(cls, overrides, owner=owner)
    kept = {name: value for name, value in saved.items() if name not in given or name in inside}
    values = {name: from_plain(value, f"`{name}`") for name, value in kept.items()}
    return from_dict(cls, merged(values, given), owner=owner)
