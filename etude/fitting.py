# SPDX-License-Identifier: Apache-2.0
"""Whether a value is what an annotation says, and what is made of one that only is written in another way."""

import dataclasses
import math
import numbers
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from etude.errors import SettingsError


def fitting(hint: Any, value: Any, name: str, *, text: bool = False) -> Any:
    """``value`` as the annotation ``hint`` wants it: the same, but tuples for lists and floats for ints.

    Args:
        hint: The annotation.
        value: What is to fit.
        name: What it is called in messages.
        text: Numbers and truth may be written as text.

    Raises:
        SettingsError: it does not fit.
    """
    fine, result = _fit(hint, value, text)
    if not fine:
        finite = " that is finite" if str(value).lstrip("-") in ("inf", "nan") else ""
        truth = ": not yes or no" if _holds_truth(value) else ""
        raise SettingsError(f"{name} is {value!r}, expected {_in_words(hint)}{finite}{truth}.{_advice(hint, value)}")
    return result


def _advice(hint: Any, value: Any) -> str:
    """What to write in place of a value that does not fit, where it is clear what is meant."""
    if foreign := foreign_env(value):
        return f" {foreign}"
    fine, meant = _fit(hint, value, True)
    if fine:
        return f" Write {meant!r}."
    for option in get_args(hint) if get_origin(hint) in _UNIONS else (hint,):
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            main = getattr(option, "main_setting", None)
            given = value if isinstance(value, Mapping) else {main: value} if main else {}
            return f" Write {option.__name__}({', '.join(f'{key}={v!r}' for key, v in given.items()) or '...'})."
        if get_origin(option) is tuple and get_args(option)[-1:] == (...,) and fits(get_args(option)[0], value):
            return f" Write ({'...' if repr(value).startswith('<') else repr(value)},)."
    return ""


def foreign_env(value: Any) -> str:
    """What to give in place of an env of another library that Etude can't step; nothing where it is none."""
    names = {cls.__name__ for cls in type(value).__mro__}
    if "VecEnv" in names:
        return (
            f"A {type(value).__name__} is a vector env of Stable-Baselines3: give the env itself, as its id or a "
            "function that makes one, and `num_envs`. In place of VecNormalize, connectors=('normalize_obs',) scales "
            "observations; in place of VecFrameStack, 'frame_stack:4' stacks them."
        )
    return ""


def fits(hint: Any, value: Any, *, text: bool = False) -> bool:
    """Whether ``value`` is what the annotation ``hint`` says, as it is; with ``text``, numbers may be text."""
    return _fit(hint, value, text)[0]


def _holds_truth(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, list | tuple) and any(map(_holds_truth, value)))


def _fit(hint: Any, value: Any, text: bool = False) -> tuple[bool, Any]:
    origin, args = get_origin(hint), get_args(hint)
    if origin in _UNIONS:
        return next((found for found in (_fit(option, value, text) for option in args) if found[0]), (False, value))
    if hint is Any:
        return True, value
    if origin is Literal:
        return value in args, value
    if origin is tuple:
        return _fit_items(args, value, text)
    if origin is Mapping and isinstance(value, Mapping):
        keys, items = _fit_items((args[0], ...), list(value), text), _fit_items((args[1], ...), [*value.values()], text)
        return keys[0] and items[0], dict(zip(keys[1], items[1], strict=True))
    if hint in _NUMBERS:
        return _fit_number(hint, value, text)
    if hint is bool and text and isinstance(value, str):
        value = _TRUTH.get(value.lower(), value)
    if origin is Callable or hint is Callable:
        return callable(value), value
    kind = origin or hint
    return (isinstance(value, kind) if isinstance(kind, type) and kind is not object else True), value


def _fit_items(args: tuple[Any, ...], value: Any, text: bool) -> tuple[bool, Any]:
    if text and args[0] in _NUMBERS:
        value = _numbers(value)
    if not isinstance(value, list | tuple):
        return False, value
    wanted = (args[0],) * len(value) if args[-1:] == (Ellipsis,) else args
    found = [_fit(hint, item, text) for hint, item in zip(wanted, value, strict=False)]
    return len(wanted) == len(value) and all(fine for fine, _ in found), tuple(item for _, item in found)


def _fit_number(hint: Any, value: Any, text: bool) -> tuple[bool, Any]:
    if text:
        value = _number(value) if isinstance(value, str) else value
        value = int(value) if hint is int and isinstance(value, float) and value.is_integer() else value
    fine = isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool) and math.isfinite(value)
    return fine, hint(value) if fine else value


def _numbers(value: Any) -> Any:
    """What is meant by ``64,64``, ``[64, 64]`` or several such words, where numbers are wanted; else ``value``."""
    words = [value] if isinstance(value, str) and re.search(r"[\s,\[(]", value) else value
    if isinstance(words, list | tuple) and words and all(isinstance(word, str) for word in words):
        return re.findall(r"[^\s,\[\]()]+", " ".join(words))
    return value


def _number(text: str) -> Any:
    """The number that is written, or the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


_UNIONS = (Union, types.UnionType)
_NUMBERS: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real}
_TRUTH = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}


def _in_words(hint: Any) -> str:
    """An annotation as one would write it, without the modules that its names are from."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in _UNIONS:
        return " | ".join(map(_in_words, args))
    if origin is Literal:
        return " | ".join(map(repr, args))
    if isinstance(hint, list):  # what a Callable takes
        return f"[{', '.join(map(_in_words, hint))}]"
    if hint in (type(None), ...):
        return "None" if hint is type(None) else "..."
    name = getattr(origin or hint, "__name__", str(hint))
    return f"{name}[{', '.join(map(_in_words, args))}]" if args else name
