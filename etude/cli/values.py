# SPDX-License-Identifier: Apache-2.0
"""How words of a command line and lines of a settings file become values, before `etude.settings` checks them."""

import dataclasses
import functools
import json
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.errors import SettingsError
from etude.settings import fits, settings_inside
from etude.urls import is_url, redacted

Converters = Mapping[Any, Callable[[str], Any]]
"""Functions that turn a word into a value, for types (keys, as annotated) that only Python can write."""


def takes_many(hint: Any) -> bool:
    """Whether a flag takes any number of words: its type is a tuple or a mapping, or None."""
    kinds = [typing.get_origin(kind) for kind in _kinds(hint) if kind is not type(None)]
    return {*kinds} in ({tuple}, {Mapping}, {tuple, Mapping}) or is_one_or_many(hint)


def metavar(hint: Any) -> str:
    """The placeholder of a flag's value in help: ``INT``, ``{a,b}|none``, ``TEXT ...``."""
    if is_one_or_many(hint):
        return "NAME ..."
    kinds, many = [kind for kind in _kinds(hint) if not dataclasses.is_dataclass(kind)], takes_many(hint)
    items = [typing.get_args(kind)[0] if many and typing.get_origin(kind) is tuple else kind for kind in kinds]
    found = list(dict.fromkeys(map(_named, items)))
    return ("NAME" if "NAME" in found else "|".join(found)) + (" ..." if many else "")  # NAME: only Python can write it


def of_words(hint: Any, words: Sequence[str], where: str, converters: Converters) -> Any:
    """The value that the words after a flag stand for, as `made` returns for a settings file.

    Raises:
        SettingsError: there is no word, there are too many, they have the wrong type, or a name has two values.
    """
    if not words and (is_one_or_many(hint) or not takes_many(hint)):
        raise SettingsError(f"{where} needs a value, {metavar(hint)}.")
    if not takes_many(hint) and len(words) > 1:
        raise SettingsError(f"{where} takes one value, not {len(words)}: {' '.join(words)}.")
    kinds = {typing.get_origin(kind) for kind in _kinds(hint) if kind is not type(None)}
    if kinds == {Mapping} and [word.lower() for word in words] != ["none"] and not any("=" in word for word in words):
        example = ", such as obs=speed,load action=command" if where.endswith(".columns") else ""
        raise SettingsError(f"{where} is {' '.join(words)!r}, but takes NAME=VALUE ...{example}.")
    value = _of_words(hint, words, where, converters)
    if "NAME" not in metavar(hint) and not fits(hint, value, text=True):
        such = {"NUMBER|STEP": ", such as 3e-4 or 0:3e-4,100000:0", "INT ...": ", such as 64 64"}
        example = next((text for kind, text in such.items() if metavar(hint).startswith(kind)), "")
        raise SettingsError(f"{where} is {' '.join(words)!r}, expected {metavar(hint)}{example}.")
    return value


def _of_words(hint: Any, words: Sequence[str], where: str, converters: Converters) -> Any:
    many = takes_many(hint)
    if not many or (is_one_or_many(hint) and len(words) == 1):
        return made(hint, words[0], converters)
    if [word.lower() for word in words] == ["none"]:
        return None if type(None) in _kinds(hint) else ()
    if not is_by_name(hint) or not any("=" in word for word in words):
        return made(hint, tuple(words), converters)
    pairs = [word.partition("=") for word in words]
    if max(Counter(key for key, _, _ in pairs).values()) > 1:
        raise SettingsError(f"{where} has one name twice: {' '.join(words)}.")
    return made(hint, {key: _json(value) if equals else None for key, equals, value in pairs}, converters)


def made(hint: Any, value: Any, converters: Converters) -> Any:
    """A value from a settings file, with `none` and the names of Python objects replaced by what they stand for."""
    by_name = is_by_name(hint)
    if isinstance(value, str) and value.lower() == "none" and type(None) in _kinds(hint):
        return None
    if isinstance(value, Mapping) and by_name:
        find = converters.get(hint, str)
        return {
            key: (None if item == "none" else find(item)) if isinstance(item, str) else item
            for key, item in value.items()
        }
    if isinstance(value, list | tuple) and hint in converters and not by_name:
        items = (made(hint, item, converters) if isinstance(item, str) else (item,) for item in value)
        return tuple(part for item in items for part in (item if isinstance(item, tuple) else (item,)))
    return converters[hint](value) if isinstance(value, str) and hint in converters and not by_name else value


def made_of_file(cls: type, written: Mapping[str, Any], converters: Converters) -> dict[str, Any]:
    """`made` for all settings in a file, nested ones included; an empty group of settings sets nothing."""
    hints, inside = typing.get_type_hints(cls), settings_inside(cls)
    found = {name: value for name, value in written.items() if value is not None or name not in inside}
    for name, value in found.items():
        if name in inside and isinstance(value, Mapping):
            found[name] = made_of_file(inside[name], value, converters)
        elif name in hints:
            found[name] = made(hints[name], value, converters)
    return found


def _json(word: str) -> Any:
    """Parse a word as JSON if it begins like a list or an object; otherwise return it."""
    try:
        return json.loads(word) if word[:1] in ("[", "{") else word
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{word[:200]} can't be read as JSON: {error}") from None


def is_one_or_many(hint: Any) -> bool:
    """Whether the type allows one string, or a function, or several values."""
    kinds = {*_kinds(hint)}
    return {str, tuple[Any, ...]} <= kinds or {tuple, Callable} <= {*map(typing.get_origin, kinds)}


def is_by_name(hint: Any) -> bool:
    """Whether a flag takes NAME=VALUE: its type is a mapping, or also one."""
    return any(typing.get_origin(kind) is Mapping for kind in _kinds(hint))


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a type."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _named(kind: Any) -> str:
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return "{" + ",".join(map(str, inner)) + "}"
    if typing.get_origin(kind) is tuple:
        return ",".join(
            "STEP:NUMBER" if len(_kinds(one)) > 1 else "..." if one is ... else _named(one) for one in inner
        )
    return _NAMES.get(typing.get_origin(kind) or kind, "NAME")


_NAMES = {int: "INT", float: "NUMBER", str: "TEXT", bool: "YES|NO", type(None): "none", Mapping: "NAME=VALUE"}


# -- files ------------------------------------------------------------------------------------------------------------


def read(path: str) -> dict[str, Any]:
    """The mapping in a YAML or JSON file.

    Raises:
        SettingsError: the file does not exist, is of another kind, can't be parsed, is not a mapping, is nested too
            deeply, or has a name twice.
    """
    if is_url(path):
        raise SettingsError(
            f"can't read the settings {redacted(path)}: copy the file to this machine, and give its path."
        )
    if Path(path).suffix not in (".yaml", ".yml", ".json"):
        raise SettingsError(f"can't read the settings {path}: its name must end in .yaml, .yml or .json.")
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        found = json.loads(text, object_pairs_hook=_once) if path.endswith(".json") else yaml.load(text, _loader())
        _check_nesting(found)
    except RecursionError:
        raise SettingsError(f"{path} can't be parsed: it is nested too deeply.") from None
    except OSError as error:
        raise SettingsError(f"can't read the settings {path}: {error.strerror}.") from error
    except (ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"{path} can't be parsed: {error}") from error
    if found is not None and not (isinstance(found, dict) and all(isinstance(key, str) for key in found)):
        raise SettingsError(f"{path} must hold settings by name, such as `num_envs: 8`, each on a line.")
    return found or {}


_DEEPEST = 64


def _check_nesting(value: Any, inside: tuple[int, ...] = (), known: set[int] | None = None) -> None:
    """Raise a ValueError if a value contains itself, as YAML's anchors allow, or is nested too deeply."""
    known = set() if known is None else known
    if not isinstance(value, dict | list) or (id(value) in known and id(value) not in inside):
        return
    if id(value) in inside or len(inside) == _DEEPEST:
        raise ValueError(f"it is nested more than {_DEEPEST} levels deep, or contains itself.")
    known.add(id(value))
    for item in value.values() if isinstance(value, dict) else value:
        _check_nesting(item, (*inside, id(value)), known)


def _once(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """A mapping of pairs, whose names must be distinct."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ValueError(f"it has `{name}` twice: leave one of them out.")
    return dict(pairs)


@functools.cache
def _loader() -> Any:
    """YAML's safe loader, changed to refuse equal keys rather than take the last."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            _once([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            return node

    return Loader
