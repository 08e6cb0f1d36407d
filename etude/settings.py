# SPDX-License-Identifier: Apache-2.0
"""Settings: frozen, keyword-only dataclasses with a docstring for every field, checked against outside mappings."""

import ast
import dataclasses
import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, TypeVar, dataclass_transform, get_type_hints

from etude.errors import SettingsError

C = TypeVar("C")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def settings(cls: type[C]) -> type[C]:
    """Make ``cls`` a settings class: a frozen dataclass whose fields are given by keyword."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


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
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return found[0] if found else None


def from_dict(cls: type[C], values: Mapping[str, Any], *, owner: str) -> C:
    """Build settings from a mapping (YAML, JSON), checking names and types.

    Raises:
        SettingsError: a key is unknown (the nearest right name is given), a value has the wrong type or is missing.
    """
    checked = typed(cls, values, owner=owner)
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    missing = names - checked.keys() - defaults(cls).keys()
    if missing:
        raise SettingsError(f"{owner} needs a value for {', '.join(f'`{name}`' for name in sorted(missing))}.")
    return cls(**checked)


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
            expected = str(hints[key]).removeprefix("<class '").removesuffix("'>")
            raise SettingsError(
                f"{owner}.{key} is {value!r}, expected {expected}: {problem[:1].lower() + problem[1:]}."
            ) from None
    return checked


def _nested(cls: Any, value: Any, *, owner: str) -> Any:
    if isinstance(value, Mapping):
        return from_dict(cls, value, owner=owner)
    if not isinstance(value, cls):
        raise SettingsError(f"{owner} is {value!r}, expected settings of {cls.__name__}: give its fields by name.")
    return value


def check_range(owner: str, **checks: tuple[bool, str]) -> None:
    """Raise a SettingsError for the first of ``checks`` (``name=(is_fine, what_it_must_be)``) that is not fine."""
    for name, (fine, rule) in checks.items():
        if not fine:
            raise SettingsError(f"{owner}.{name} must be {rule}.")
