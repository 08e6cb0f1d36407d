# SPDX-License-Identifier: Apache-2.0
"""Settings: frozen, keyword-only dataclasses with a docstring for every field, checked against outside mappings."""

import ast
import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

from etude.errors import SettingsError

C = TypeVar("C")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def settings(cls: type[C]) -> type[C]:
    """Make ``cls`` a settings class: a frozen dataclass whose fields are given by keyword and checked for their types.

    Making one raises a SettingsError for an unknown name (the nearest right one is given), a missing value or one of
    another type. A list is taken for a tuple, and an int for a float.
    """
    made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    plain_init = made.__init__

    @functools.wraps(plain_init)
    def checked_init(self: Any, *unnamed: Any, **given: Any) -> None:
        name = type(self).__name__
        if unnamed:
            raise SettingsError(f"{name} takes its settings by name, as in {name}({next(iter(_hints(made)), '')}=...).")
        plain_init(self, **_checked(made, given, name))

    made.__init__ = checked_init
    return made  # type: ignore[no-any-return]


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _checked(cls: type, given: Mapping[str, Any], owner: str) -> dict[str, Any]:
    hints = _hints(cls)
    for name in given:
        if name not in hints:
            raise unknown_setting(owner, name, cls)
    missing = hints.keys() - given.keys() - defaults(cls).keys()
    if missing:
        raise SettingsError(f"{owner} needs a value for {', '.join(f'`{name}`' for name in sorted(missing))}.")
    return {name: fitting(hints[name], value, f"{owner}.{name}") for name, value in given.items()}


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field of a settings class, inherited ones included, on one line each."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError, SyntaxError):  # no source to read: defined in a REPL or made at run time
            continue
        assert isinstance(body, ast.ClassDef)
        for node, after in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                docs[node.target.id] = " ".join(after.value.value.split())
    return docs


def defaults(cls: type) -> dict[str, Any]:
    """The default of each field that has one."""
    result = {}
    for f in dataclasses.fields(cls):
        if f.default is not dataclasses.MISSING:
            result[f.name] = f.default
        elif f.default_factory is not dataclasses.MISSING:
            result[f.name] = f.default_factory()
    return result


def unknown_setting(owner: str, name: str, cls: type) -> SettingsError:
    """The error for a setting that ``cls`` does not have: names it and the nearest right name."""
    names = [f.name for f in dataclasses.fields(cls)]
    near = nearest(name.replace("-", "_"), names)
    message = f"{owner} has no setting `{name}`."
    if near:
        message += f" Nearest: `{near}` ({summary(cls, near)})."
    return SettingsError(message)


def summary(cls: type, name: str) -> str:
    """A setting in a few words: what it is, and its default where it has one."""
    about = re.split(r"[.;:] ", field_docs(cls).get(name, ""))[0].rstrip(".")
    default = f"default {shown(defaults(cls)[name])}" if name in defaults(cls) else ""
    return ", ".join(filter(None, [about[:1].lower() + about[1:], default]))


def shown(value: Any) -> str:
    """A value as people write it: ``3e-4`` for 0.0003."""
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        return f"{Decimal(repr(value)):e}"
    return repr(value)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` most like ``name``, or None where none is alike."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return found[0] if found else None


def from_dict(cls: type[C], values: Mapping[str, Any], *, owner: str) -> C:
    """Build settings from a mapping (YAML, JSON), checking names and types.

    Raises:
        SettingsError: a key is unknown (the nearest right name is given), a value has the wrong type or is missing.
    """
    checked = typed(cls, values, owner=owner)
    return cls(**_checked(cls, checked, owner))


def typed(cls: type, values: Mapping[str, Any], *, owner: str) -> dict[str, Any]:
    """Some settings of ``cls`` with their names and types checked; numbers in text become numbers.

    Raises:
        SettingsError: as `from_dict`, but nothing is ever missing.
    """
    import pydantic

    names = {f.name for f in dataclasses.fields(cls)}
    for key in values:
        if key not in names:
            raise unknown_setting(owner, key, cls)
    hints = get_type_hints(cls)
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if dataclasses.is_dataclass(hints[key]):
            checked[key] = _nested(hints[key], value, owner=f"{owner}.{key}")
            continue
        config = pydantic.ConfigDict(arbitrary_types_allowed=True)
        try:
            checked[key] = pydantic.TypeAdapter(hints[key], config=config).validate_python(value)
        except pydantic.ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise SettingsError(
                f"{owner}.{key} is {value!r}, expected {_hint_in_words(hints[key])}: "
                f"{problem[:1].lower() + problem[1:]}."
            ) from None
    return checked


def _nested(cls: Any, value: Any, *, owner: str) -> Any:
    if isinstance(value, Mapping):
        return from_dict(cls, value, owner=owner)
    if not isinstance(value, cls):
        raise SettingsError(f"{owner} is {value!r}, expected settings of {cls.__name__}: give its fields by name.")
    return value


def fitting(hint: Any, value: Any, name: str) -> Any:
    """``value`` as the annotation ``hint`` wants it: the same, but tuples for lists and floats for ints.

    Raises:
        SettingsError: it does not fit; ``name`` says what it is.
    """
    fits, result = _fit(hint, value)
    if not fits:
        finite = " that is finite" if isinstance(value, float) and not math.isfinite(value) else ""
        raise SettingsError(f"{name} is {value!r}, expected {_hint_in_words(hint)}{finite}.")
    return result


def _fit(hint: Any, value: Any) -> tuple[bool, Any]:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return next((found for found in (_fit(option, value) for option in args) if found[0]), (False, value))
    if origin is Literal:
        return value in args, value
    if origin is tuple:
        return _fit_items(args, value)
    if hint in _NUMBERS:
        kind, convert = _NUMBERS[hint]
        fits = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
        return fits, convert(value) if fits else value
    if origin is Callable or hint is Callable:
        return callable(value), value
    kind = origin or hint
    return (isinstance(value, kind) if isinstance(kind, type) and kind is not object else True), value


def _fit_items(args: tuple[Any, ...], value: Any) -> tuple[bool, Any]:
    if not isinstance(value, list | tuple):
        return False, value
    wanted = (args[0],) * len(value) if args[-1:] == (Ellipsis,) else args
    found = [_fit(hint, item) for hint, item in zip(wanted, value, strict=False)]
    return len(wanted) == len(value) and all(fits for fits, _ in found), tuple(item for _, item in found)


_NUMBERS: dict[Any, tuple[Any, Callable[[Any], Any]]] = {int: (numbers.Integral, int), float: (numbers.Real, float)}


def _hint_in_words(hint: Any) -> str:
    return re.sub(r"<class '([^']*)'>|\b(?:\w+\.)+(?=\w)", r"\1", str(hint)).replace("NoneType", "None")


def check_range(owner: str, **checks: tuple[bool, str]) -> None:
    """Raise a SettingsError for the first of ``checks`` (``name=(is_fine, what_it_must_be)``) that is not fine."""
    for name, (fine, rule) in checks.items():
        if not fine:
            raise SettingsError(f"{owner}.{name} must be {rule}.")
