# SPDX-License-Identifier: Apache-2.0
"""Settings in checkpoints: as plain data, with functions and classes by name."""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from etude.connectors import Connector, FunctionConnector
from etude.errors import CheckpointError
from etude.settings import unknown_setting

C = TypeVar("C")

REF = "$ref"
UNSAVED = "$unsaved"


def name_of(thing: Any) -> str:
    """``module:qualname`` of a class or function."""
    return f"{thing.__module__}:{thing.__qualname__}"


def find(name: str, what: str) -> Any:
    """The class or function called ``module:qualname``.

    Raises:
        CheckpointError: there is none; ``what`` says what it was wanted for.
    """
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(f"{what} is `{name}`, which can't be imported here: {error}.") from error
    return found


def to_plain(value: Any) -> Any:
    """A setting as plain data. What has no name to be found by is marked, so that loading can ask for it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, FunctionConnector):
        return to_plain(value.fn)
    if isinstance(value, Connector):
        return repr(value)
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    name = getattr(value, "__qualname__", None)
    if name and value.__module__ and "<" not in name:
        return {REF: name_of(value)}
    return {UNSAVED: repr(value)[:200]}


def from_plain(value: Any, what: str) -> Any:
    """The inverse of `to_plain` for one setting, called ``what``.

    Raises:
        CheckpointError: it could not be saved, or what it names can't be imported; it must then be given anew.
    """
    if isinstance(value, dict):
        if REF in value:
            return find(value[REF], what)
        if UNSAVED in value:
            raise CheckpointError(
                f"{what} was {value[UNSAVED]}, which can't be kept in a checkpoint: give it when loading, as "
                f"etude.load(path, {what.strip('`')}=...). Functions and classes at the top of a module are kept."
            )
        return {key: from_plain(item, what) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(from_plain(item, what) for item in value)
    return value


def load_config(cls: type[C], saved: Mapping[str, Any], overrides: Mapping[str, Any]) -> C:
    """Settings from `to_plain` data, some of them overridden.

    Raises:
        CheckpointError: a setting can't be had back, and is not overridden.
        SettingsError: an override or a saved setting is not one of ``cls``, or is out of range.
    """
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = get_type_hints(cls)
    values: dict[str, Any] = dict(overrides)
    for name in (*saved, *overrides):
        if name not in names:
            raise unknown_setting(cls.__name__, name, cls)
    for name, value in saved.items():
        if name in overrides:
            continue
        restored = from_plain(value, f"`{name}`")
        if dataclasses.is_dataclass(hints[name]) and isinstance(restored, dict):
            restored = hints[name](**restored)
        values[name] = restored
    return cls(**values)
