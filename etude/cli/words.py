# SPDX-License-Identifier: Apache-2.0
"""What the words of a command line, or of a file, mean to a setting."""

import dataclasses
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etude.errors import SettingsError

Converters = Mapping[Any, Callable[[str], Any]]
"""How one word becomes a value of a type (the key, as in the annotation of a field) that only Python can write."""


def import_from_here() -> None:
    """Let code be imported from the current folder: for names that the user wrote, and for files that are trusted.

    Nothing else is: a folder that was downloaded may hold a file named as a library is.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def takes_many(hint: Any) -> bool:
    """Whether a flag takes any number of words: a tuple or a mapping, or none."""
    only_many = all(_is_tuple(o) or _is_mapping(o) or o is type(None) for o in options(hint))
    return (only_many and hint is not type(None)) or is_one_or_many(hint)


def options(hint: Any) -> tuple[Any, ...]:
    """The types of which a value is one."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def metavar(hint: Any) -> str:
    """What stands for the value of a flag in help."""
    if is_one_or_many(hint):
        return "NAME ..."
    many = takes_many(hint)
    kinds = [o for o in options(hint) if (not many or _is_tuple(o)) and not dataclasses.is_dataclass(o)]
    if not kinds:
        return "NAME=VALUE ..."
    found = []
    for kind in kinds:
        if kind is type(None):
            found.append("none")
        elif typing.get_origin(kind) is typing.Literal:
            found.append("{" + ",".join(map(str, typing.get_args(kind))) + "}")
        elif kind in _NAMES:
            found.append(_NAMES[kind])
        elif _is_tuple(kind):
            inner = _NAMES.get(typing.get_args(kind)[0], "ITEM")
            named = "[=NAME]" if _takes_names(hint) else ""
            one = "STEP:NUMBER,..." if inner == "ITEM" else f"{inner},{inner}"
            found.append(f"{inner}{named} ..." if many else one)
    return "|".join(found) if len(found) == len(kinds) else "NAME"  # else also what only Python can write


def value_of(hint: Any, words: Sequence[str], converters: Converters, name: str) -> Any:
    """The words after a flag as what ``hint`` wants, types of words unchecked.

    Raises:
        SettingsError: there are too many words for one value, or none; or one name has two.
    """
    if is_one_or_many(hint) and not words:
        raise SettingsError(f"{name} needs a value, or several.")
    if not takes_many(hint):
        if len(words) != 1:
            raise SettingsError(f"{name} takes one value, not {len(words)}: {' '.join(words)}.")
        return _one(hint, words[0], converters)
    if len(words) == 1 and words[0].lower() == "none":
        return None if type(None) in options(hint) else ()
    if is_one_or_many(hint) and len(words) == 1:
        return _one(hint, words[0], converters)
    if _takes_names(hint):
        return _by_name(hint, words, converters, name)
    if _is_tuple(_item_of(hint)):
        return tuple(tuple(word.split(",")) for word in words)
    return tuple(_one(hint, word, converters) for word in words)


def made(hint: Any, value: Any, converters: Converters) -> Any:
    """A value from a file as what ``hint`` wants, where it holds words that stand for what only Python can write."""
    by_name = _takes_names(hint)
    if isinstance(value, str):
        return _one(hint, value, {} if by_name else converters)
    if isinstance(value, list | tuple) and hint in converters and not by_name:
        return tuple(made(hint, item, converters) for item in value)
    if isinstance(value, Mapping) and by_name:
        return {key: _one(hint, v, converters) if isinstance(v, str) else v for key, v in value.items()}
    return value


def _one(hint: Any, word: str, converters: Converters) -> Any:
    if word.lower() == "none" and type(None) in options(hint):
        return None
    return converters[hint](word) if hint in converters else word


def _by_name(hint: Any, words: Sequence[str], converters: Converters, name: str) -> Any:
    """``red blue`` is a tuple, ``red=module:Net blue`` a mapping, in which what has no value has None."""
    parts = [word.partition("=") for word in words]
    if not any(equals for _, equals, _ in parts):
        return tuple(words)
    found = {key: _one(hint, word, converters) if equals else None for key, equals, word in parts}
    if len(found) < len(parts):
        raise SettingsError(f"{name} has one name twice: {' '.join(words)}.")
    return found


def is_one_or_many(hint: Any) -> bool:
    """Whether one word stands for itself, and several for all of them."""
    return str in options(hint) and tuple[Any, ...] in options(hint)


def _item_of(hint: Any) -> Any:
    return typing.get_args(next(filter(_is_tuple, options(hint))))[0]


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _takes_names(hint: Any) -> bool:
    return any(map(_is_mapping, options(hint)))


def _is_mapping(hint: Any) -> bool:
    return typing.get_origin(hint) is Mapping


_NAMES = {int: "INT", float: "NUMBER", str: "TEXT", bool: "YES|NO"}
