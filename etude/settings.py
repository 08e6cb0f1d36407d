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
from typing import Any, NamedTuple, TypeGuard, TypeVar, dataclass_transform, get_args, get_type_hints

from etude.errors import SettingsError
from etude.fitting import fits, fitting

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
    _refuse_unknown(cls, given, owner)
    _refuse_missing(cls, given, owner)
    return {name: fitting(_hints(cls)[name], value, f"{owner}.{name}") for name, value in given.items()}


def _refuse_unknown(cls: type, given: Iterable[str], owner: str) -> None:
    for name in given:
        if name not in _hints(cls):
            raise unknown_setting(owner, name, cls)


def _refuse_missing(cls: type, given: Mapping[str, Any], owner: str) -> None:
    missing = _hints(cls).keys() - given.keys() - defaults(cls).keys()
    if missing:
        raise SettingsError(f"{owner} needs a value for {', '.join(f'`{name}`' for name in sorted(missing))}.")


class Leaf(NamedTuple):
    """One setting, which may be inside others."""

    path: tuple[str, ...]
    """The names of the fields that lead to it."""
    owner: type
    """The settings class that has it."""
    hint: Any
    """The annotation of the field."""

    @property
    def about(self) -> str:
        """What it is, in a few words."""
        return summary(self.owner, self.path[-1])


def leaves_of(cls: type, path: tuple[str, ...] = ()) -> list[Leaf]:
    """The settings of ``cls``, those of settings inside it in their place."""
    found = []
    for name, hint in _hints(cls).items():
        here = (*path, name)
        found += leaves_of(hint, here) if _is_settings(hint) else [Leaf(here, cls, hint)]
    return found


def _is_settings(hint: Any) -> TypeGuard[type]:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def main_setting(cls: type) -> str | None:
    """What a plain value means where the settings ``cls`` are expected: the field that ``cls.main_setting`` names."""
    return getattr(cls, "main_setting", None)


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
    known = {leaf.path[-1]: (".".join(leaf.path), leaf.about) for leaf in leaves_of(cls)}
    known |= {field: (field, summary(cls, field)) for field in _hints(cls)}
    near = nearest(name.replace("-", "_"), known)
    hint = " Nearest: `{}` ({}).".format(*known[near]) if near else ""
    return SettingsError(f"{owner} has no setting `{name}`.{hint}")


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
    """Build settings from a mapping (YAML, JSON, flags), checking names and types.

    Of settings inside others, those that are not given are as in the default of the field that holds them.

    Raises:
        SettingsError: a key is unknown (the nearest right name is given), a value has the wrong type or is missing.
    """
    found = typed(cls, values, owner=owner)
    _refuse_missing(cls, found, owner)
    for name, inner in settings_inside(cls).items():
        if isinstance(found.get(name), Mapping):
            default = defaults(cls).get(name)
            begin = isinstance(default, inner)
            others = {f.name: getattr(default, f.name) for f in dataclasses.fields(inner)} if begin else {}
            found[name] = from_dict(inner, others | dict(found[name]), owner=f"{owner}.{name}")
    return cls(**found)


def typed(cls: type, values: Mapping[str, Any], *, owner: str) -> dict[str, Any]:
    """Some settings of ``cls`` with their names and types checked; numbers and truth in text become what they mean.

    Settings inside others may be mappings, and stay so. A plain value for them becomes that of their main setting
    (``main_setting`` of the class): ``workers: 2`` is ``workers: {num_workers: 2}``.

    Raises:
        SettingsError: as `from_dict`, but nothing is ever missing.
    """
    _refuse_unknown(cls, values, owner)
    hints, inside = _hints(cls), settings_inside(cls)
    found: dict[str, Any] = {}
    for name, value in values.items():
        where, inner = f"{owner}.{name}", inside.get(name)
        if inner is None or fits(hints[name], value):
            found[name] = fitting(hints[name], value, where, text=True)
            continue
        if not isinstance(value, Mapping):
            if hints[name] is not inner and isinstance(value, str):  # one of several words, and none of them
                fitting(hints[name], value, where)
            main = main_setting(inner)
            if main is None:
                raise SettingsError(
                    f"{where} is {value!r}, expected settings of {inner.__name__}: give its fields by name."
                )
            value = {main: value}
        found[name] = typed(inner, value, owner=where)
    return found


def settings_inside(cls: type) -> dict[str, type]:
    """The fields that hold settings, or none, with the class of these."""
    options = {name: get_args(hint) or (hint,) for name, hint in _hints(cls).items()}
    found = {name: [o for o in kinds if _is_settings(o)] for name, kinds in options.items()}
    return {name: kinds[0] for name, kinds in found.items() if kinds}


def merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings made one; where both have a value, that of ``high`` counts."""
    result = dict(low)
    for key, value in high.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def check_range(owner: str, **checks: tuple[bool, str]) -> None:
    """Raise a SettingsError for the first of ``checks`` (``name=(is_fine, what_it_must_be)``) that is not fine."""
    for name, (fine, rule) in checks.items():
        if not fine:
            raise SettingsError(f"{owner}.{name} must be {rule}.")
