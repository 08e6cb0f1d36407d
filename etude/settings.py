# SPDX-License-Identifier: Apache-2.0
"""Settings: frozen, keyword-only dataclasses that check names and types and have a docstring for every field.

Settings may be nested. A nested setting can be given by its path, such as ``optimizer.grad_clip``, or by its own name
if no other setting in the whole tree has that name: ``PPOConfig(grad_clip=1.0)`` changes this one setting and keeps the
others of ``optimizer``. Files and flags follow the same rule. If a field's name alone would be unclear, its class gives
it a longer own name in ``own_names``: that of ``evaluation.interval`` is ``evaluation_interval``.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import math
import numbers
import re
import sys
import textwrap
import types
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeGuard,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from etude.display import short
from etude.errors import SettingsError, UnknownNameError

C = TypeVar("C")


class Rule(NamedTuple):
    """A condition on a setting besides its type, given in its annotation: ``Annotated[int, Rule(is_even, "even")]``.

    In a union, the rule applies only to values of its own type: ``IntFrom1 | None`` may be None. A subclass that
    annotates the setting again, for another default, keeps the rule.
    """

    holds: Callable[[Any], bool]
    """Whether a value of the annotated type is allowed."""
    words: str
    """The condition in words, such as "at least 1"."""


IntFrom0 = Annotated[int, Rule(lambda value: value >= 0, "at least 0")]
"""An int that is at least 0."""
IntFrom1 = Annotated[int, Rule(lambda value: value >= 1, "at least 1")]
"""An int that is at least 1."""
FloatFrom0 = Annotated[float, Rule(lambda value: value >= 0, "at least 0")]
"""A float that is at least 0."""
FloatFrom1 = Annotated[float, Rule(lambda value: value >= 1, "at least 1")]
"""A float that is at least 1."""
FloatAbove0 = Annotated[float, Rule(lambda value: value > 0, "above 0")]
"""A float that is above 0."""
UnitInterval = Annotated[float, Rule(lambda value: 0 <= value <= 1, "between 0 and 1")]
"""A float from 0 to 1, both included."""
Rate = Annotated[float, Rule(lambda value: 0 < value <= 1, "above 0 and at most 1")]
"""A float above 0 and at most 1."""
Port = Annotated[int, Rule(lambda value: 0 <= value < 1 << 16, "from 0 to 65535")]
"""A port to listen on; 0 is any free one."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def settings(cls: type[C]) -> type[C]:
    """Make ``cls`` a settings class: a frozen dataclass with keyword-only fields whose types are checked.

    Its constructor raises a SettingsError for an unknown name (the message has the nearest valid one), a missing value,
    a value or default of the wrong type, or one that breaks the `Rule` of its annotation, such as `IntFrom1`. Lists are
    accepted for tuples, and ints for floats. Nested settings may be given by their own names (see `own_paths`), also to
    `dataclasses.replace`.

    Raises:
        SettingsError: ``cls`` changes the default of an inherited field without an annotation, which would have no
            effect; or one of its fields has the name of a nested setting of its base class, which it would hide.
    """
    made: Any = dataclasses.dataclass(frozen=True, kw_only=True, repr=False)(cls)
    if made.__repr__ is object.__repr__:
        made.__repr__ = _what_differs
    own = inspect.get_annotations(cls).keys()
    fields = {field.name for field in dataclasses.fields(made)}  # without those of the class
    for name, default in cls.__dict__.items():
        if name in fields and name not in own:
            kind = made.__dataclass_fields__[name].type
            kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
            kind = kind if isinstance(kind, str) else _in_words(kind)
            raise SettingsError(
                f"{cls.__name__} sets `{name}` without an annotation, which has no effect: write "
                f"`{name}: {kind} = {shown(default)}`."
            )
    for base in cls.__mro__[1:]:
        hidden = own_paths(base) if dataclasses.is_dataclass(base) else {}
        plain = {name for name, value in cls.__dict__.items() if not hasattr(value, "__get__")}
        for name in (own | plain) & hidden.keys():
            outer, inner = hidden[name][0], ".".join(hidden[name])
            raise SettingsError(
                f"{cls.__name__} has a field `{name}`, which is the name of {base.__name__}'s `{inner}`: give the "
                f"field another name, or, for another default, write `{outer}: {_hints(base)[outer].__name__} = ...`."
            )
    plain_init = made.__init__

    @functools.wraps(plain_init)
    def checked_init(self: Any, *unnamed: Any, **given: Any) -> None:
        name = type(self).__name__
        for base in type(self).__mro__[: type(self).__mro__.index(made)]:
            if inspect.get_annotations(base) or _hints(made).keys() & base.__dict__.keys():
                raise SettingsError(f"{base.__name__} needs @etude.settings above `class {base.__name__}`.")
        if unnamed:
            raise SettingsError(
                f"{name} takes keyword arguments only, as in {name}({next(iter(_hints(made)), '')}=...)."
            )
        plain_init(self, **_checked(made, given, name))

    made.__init__ = checked_init
    made.__getattr__, made.__setattr__, made.__getitem__ = _no_such_setting, _refuse_change, _refuse_item
    return made  # type: ignore[no-any-return]


class FrozenSettingsError(SettingsError, dataclasses.FrozenInstanceError):
    """Settings can't be changed in place."""


def _no_such_setting(self: Any, name: str) -> Any:
    """Raise an AttributeError that names the nearest setting."""
    if name.startswith("_"):
        return object.__getattribute__(self, name)  # raises the original error
    cls: Any = type(self)
    raise UnknownNameError(
        f"{unknown_setting(cls.__name__, name, cls)} Settings are given when it is made, as in {cls.__name__}"
        f"({next(iter(_hints(cls)), '')}=...); dataclasses.replace(config, ...) makes a copy with other ones."
    )


def _refuse_change(self: Any, name: str, value: Any) -> None:
    cls: Any = type(self)
    if name not in own_paths(cls) and name not in _hints(cls):
        raise unknown_setting(cls.__name__, name, cls)
    raise FrozenSettingsError(f"{cls.__name__} can't change: use dataclasses.replace(config, {name}={shown(value)}).")


def _refuse_item(self: Any, name: object) -> Any:
    cls: Any = type(self)
    path = own_paths(cls).get(str(name), (str(name),))
    if path[0] not in _hints(cls):
        raise unknown_setting(cls.__name__, str(name), cls)
    raise SettingsError(f"{cls.__name__} has attributes, not items: write config.{'.'.join(path)}.")


def _what_differs(self: Any) -> str:
    """The repr of settings: those that differ from their defaults, by their own names."""
    cls: type = type(self)
    own = {path: name for name, path in own_paths(cls).items()}
    changed = dict[str, Any]()
    for leaf in leaves_of(cls):
        value = functools.reduce(getattr, leaf.path, self)
        try:
            is_same = value is leaf.default or bool(value == leaf.default)
        except Exception:  # noqa: BLE001  values that can't be compared, such as arrays, are shown
            is_same = False
        if not is_same:
            changed[own.get(leaf.path, ".".join(leaf.path))] = value
    return short(self, **changed)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


@functools.cache
def _rules(cls: type) -> dict[str, tuple[Any, Rule, str]]:
    """The rules of ``cls`` by setting: the type to which the rule applies, the rule, and the other types allowed."""
    found = {}
    for base in reversed(cls.__mro__):
        for name, hint in get_type_hints(base, include_extras=True).items():
            options = options_of(hint)
            for option in options:
                kind, *extras = get_args(option) if get_origin(option) is Annotated else (option,)
                others = [_in_words(other) for other in options if other is not option]
                for rule in extras:
                    if isinstance(rule, Rule):
                        found[name] = kind, rule, "".join(f", or {other}" for other in others).replace("None", "none")
    return found


def _check_rules(cls: type, values: Mapping[str, Any], owner: str) -> None:
    for name, (kind, rule, others) in _rules(cls).items():
        if name in values and fits(kind, values[name]) and not rule.holds(values[name]):
            path = f"{owner}.{name}".partition(".")[2]
            raise SettingsError(f"`{path}` is {values[name]!r}, but must be {rule.words}{others}.")


@functools.cache
def _wrong_defaults(cls: type) -> dict[str, str]:
    """What is wrong with the types of defaults, by name."""
    found, hints = {}, _hints(cls)
    for name, default in defaults(cls).items():
        try:
            fitting(hints[name], default, f"the default of {cls.__name__}.{name}")
        except SettingsError as error:
            found[name] = str(error)
    return found


def _checked(cls: type, given: Mapping[str, Any], owner: str) -> dict[str, Any]:
    own, hints = own_paths(cls), _hints(cls)
    whole = {name: value for name, value in given.items() if name not in own}
    _refuse_unknown(cls, whole, owner)
    found = {name: fitting(hints[name], value, f"{owner}.{name}") for name, value in whole.items()}
    inner = nested_by_name(cls, {name: value for name, value in given.items() if name in own}, owner)
    known = defaults(cls)
    for name, changes in inner.items():
        before = found.get(name, known.get(name))
        made = before is not None
        found[name] = replaced(before, changes, f"{owner}.{name}") if made else hints[name](**changes)
    _refuse_missing(cls, found, owner)
    for name, wrong in _wrong_defaults(cls).items():
        if name not in found:
            raise SettingsError(wrong)
    _check_rules(cls, known | found, owner)
    return found


def _refuse_unknown(cls: type, given: Iterable[str], owner: str) -> None:
    for name in given:
        if name not in _hints(cls):
            raise unknown_setting(owner, name, cls)


def _refuse_missing(cls: type, given: Mapping[str, Any], owner: str) -> None:
    missing = _hints(cls).keys() - given.keys() - defaults(cls).keys()
    if missing:
        raise SettingsError(f"{owner} needs a value for {', '.join(f'`{name}`' for name in sorted(missing))}.")


class Leaf(NamedTuple):
    """One setting, possibly nested in others."""

    path: tuple[str, ...]
    """The field names that lead to it, from the outermost settings."""
    owner: type
    """The settings class that has it as a field."""
    hint: Any
    """The annotation of the field."""
    default: Any
    """The default; `dataclasses.MISSING` if the setting is required."""

    @property
    def own_name(self) -> str:
        """Its name without its path."""
        names: Mapping[str, str] = getattr(self.owner, "own_names", {})
        return names.get(self.path[-1], self.path[-1])

    @property
    def about(self) -> str:
        """A short description."""
        return summary(self.owner, self.path[-1], self.default)


def leaves_of(cls: type, path: tuple[str, ...] = (), *, within: Any = None) -> list[Leaf]:
    """The settings of ``cls``, with nested settings classes replaced by their fields.

    Args:
        cls: The class.
        path: The names of the fields that lead to it.
        within: Settings of ``cls`` that replace the defaults; None: use the defaults of the class.
    """
    found = []
    known = defaults(cls) if within is None else {name: getattr(within, name) for name in _hints(cls)}
    for name, hint in _hints(cls).items():
        here, default = (*path, name), known.get(name, dataclasses.MISSING)
        if _is_settings(hint):
            found += leaves_of(hint, here, within=default if isinstance(default, hint) else None)
        else:
            found.append(Leaf(here, cls, hint, default))
    return found


@functools.cache
def own_paths(cls: type) -> dict[str, tuple[str, ...]]:
    """The paths of the nested settings of ``cls`` that may be given by their own names, by that name.

    These are the settings whose own names are unique in ``cls``.
    """
    leaves = leaves_of(cls)
    times = Counter([*(leaf.own_name for leaf in leaves), *settings_inside(cls)])
    return {leaf.own_name: leaf.path for leaf in leaves if len(leaf.path) > 1 and times[leaf.own_name] == 1}


def nested_by_name(cls: type, values: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """``values`` of ``cls``, with those given by their own names moved into the settings that contain them.

    If ``values`` has the containing settings as an object, it becomes a mapping; values given by own name override it.

    Raises:
        SettingsError: a setting is given both by its own name and by its path.
    """
    own = own_paths(cls)
    found = {name: value for name, value in values.items() if name not in own}
    for name in filter(own.__contains__, values):
        *outer, last = own[name]
        here, kind = found, cls
        for part in outer:
            kind = _hints(kind)[part]
            there = here.get(part, {})
            main = main_setting(kind)
            if isinstance(there, kind):
                there = {field: getattr(there, field) for field in _hints(kind) if field != last}
            elif not isinstance(there, Mapping) and main is not None:
                there = {main: there}
            elif not isinstance(there, Mapping):
                break  # refused later, when types are checked
            here[part] = dict(there)
            here = here[part]
        else:
            if last in here:
                raise SettingsError(f"{owner} has `{name}` and `{'.'.join(own[name])}`, which are the same setting.")
            here[last] = values[name]
    return found


def replaced(whole: C, given: Mapping[str, Any], owner: str) -> C:
    """A copy of ``whole`` with some settings changed; mappings change only the given nested settings.

    Raises:
        SettingsError: a name is unknown, or a value has the wrong type or breaks its rule. Messages about names and
            types begin with ``owner``.
    """
    cls: type = type(whole)
    _refuse_unknown(cls, given, owner)
    given = _with_nested(cls, given, vars(whole), owner)
    new = {name: fitting(_hints(cls)[name], value, f"{owner}.{name}") for name, value in given.items()}
    _check_rules(cls, new, owner)
    return dataclasses.replace(whole, **new)  # type: ignore[type-var]


def _with_nested(cls: type, given: Mapping[str, Any], before: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Turn mappings in ``given`` into settings, based on those in ``before`` if there are any, else on defaults."""
    found = dict(given)
    for name, inner in settings_inside(cls).items():
        if isinstance(changes := given.get(name), Mapping):
            old, where = before.get(name), f"{owner}.{name}"
            is_there = isinstance(old, inner)
            found[name] = replaced(old, changes, where) if is_there else from_dict(inner, changes, owner=where)
    return found


def _is_settings(hint: Any) -> TypeGuard[type]:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def main_setting(cls: type) -> str | None:
    """The field of ``cls`` that a plain value for these settings sets: ``cls.main_setting``."""
    return getattr(cls, "main_setting", None)


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field of a settings class, including inherited fields, each on one line."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError, SyntaxError):  # no source code: defined in a REPL or at run time
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


@functools.cache
def _other_libraries() -> dict[str, Any]:
    """The names of settings in Stable-Baselines3, RLlib, CleanRL, Tianshou, d3rlpy and Spinning Up, for messages.

    These are the contents of ``other_names.json``:

    - ``names``: for each of Etude's settings, its names in other libraries;
    - ``other_values``: names, here or elsewhere, of settings whose values mean something else there, so that they must
      not be copied;
    - ``elsewhere``: for other libraries' settings that do not exist here, what to use instead;
    - ``differences``: for each of Etude's settings, by other libraries' names, how those differ.
    """
    return dict(json.loads(Path(__file__).with_name("other_names.json").read_text(encoding="utf-8")))


def other_names(name: str) -> list[str]:
    """Etude's names for another library's setting ``name``, the likeliest first."""
    name, known = name.replace("-", "_").lower(), _other_libraries()
    return [name] * (name in known["elsewhere"]) + [o for o, names in known["names"].items() if name in names.split()]


def has_other_values(*names: str) -> bool:
    """Whether the values of one of these settings mean something else in another library."""
    return not {*_other_libraries()["other_values"].split()}.isdisjoint(names)


def pointer(name: str, ours: str, about: str, *, is_same: bool) -> str:
    """A sentence that names Etude's setting for an unknown ``name``. ``is_same``: ``name`` is another library's name of
    this setting, and not only similar."""
    how = difference(name, ours) if is_same else ""
    return f" {'Here it is' if is_same else 'Nearest'}: `{ours}` ({about}).{how}"


def difference(name: str, ours: str) -> str:
    """A sentence on how another library's setting ``name`` differs from Etude's ``ours``, after a space; empty if it
    does not."""
    name, known = name.replace("-", "_"), _other_libraries()["differences"]
    differs = known.get(ours.rpartition(".")[2].replace("-", "_"), {})
    return next((f" {text.format(name)}." for names, text in differs.items() if name in names.split()), "")


def unknown_setting(owner: str, name: str, cls: type) -> SettingsError:
    """The error for an unknown setting of ``cls``, with the right name or the nearest one."""
    leaves = leaves_of(cls)
    known = {name: (".".join(leaf.path), leaf.about) for leaf in leaves for name in (leaf.path[-1], leaf.own_name)}
    usual = defaults(cls)
    known |= {field: (field, summary(cls, field, usual.get(field, dataclasses.MISSING))) for field in _hints(cls)}
    meant = other_names(name)
    same = next((ours for ours in meant if ours in known), None)
    near = same or nearest(name.replace("-", "_"), known)
    hint = ""
    elsewhere = [text for own in meant if (text := _other_libraries()["elsewhere"].get(own))]
    if same is None and elsewhere:
        hint = f" {elsewhere[0]}."
    elif own := next((own for own, path in own_paths(cls).items() if ".".join(path) == name), None):
        hint = f" Write `{own}`, its own name."
    elif near:
        hint = pointer(name, *known[near], is_same=same is not None)
    return SettingsError(f"{owner} has no setting `{name}`.{hint}")


def summary(cls: type, name: str, default: Any) -> str:
    """A short description of a setting, with its default if it has one."""
    about = re.split(r"(?<!et al)[.;:] ", field_docs(cls).get(name, ""))[0].rstrip(".")
    is_short = default is not dataclasses.MISSING and not dataclasses.is_dataclass(default)
    about = about if about[1:2].isupper() else about[:1].lower() + about[1:]
    return ", ".join(filter(None, [about, f"default {shown(default)}" if is_short else ""]))


def shown(value: Any) -> str:
    """A value in its usual notation: ``3e-4`` for 0.0003."""
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        return f"{Decimal(repr(value)):e}"
    return repr(value)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The most similar of ``names``, in any case, or None if none is similar."""

    def likeness(own: str) -> tuple[float, bool, str]:  # the name itself is last: among equals, the latest version wins
        return difflib.SequenceMatcher(None, own.lower(), name.lower()).ratio(), own[:1] == name[:1], own

    best = max(names, key=likeness, default=None)
    return best if best is not None and likeness(best)[0] >= 0.6 else None


def suggestion(name: str, names: Iterable[str]) -> str:
    """The end of an error message that lists ``names``: the nearest of them to ``name``; empty if none is similar."""
    near = nearest(name, names)
    return f" Nearest: `{near}`." if near else ""


def choice(name: str, names: Iterable[str]) -> str:
    """The end of an error message about a wrong name: the nearest of ``names`` if it is very similar, else all."""
    names = list(names)
    near = nearest(name, names)
    if near is not None and near[0].lower() == name[:1].lower() and abs(len(near) - len(name)) <= 1:
        return f"Nearest: `{near}`."
    return f"There are {', '.join(names) or 'none'}."


def warn_of_misspelt(cls: type, hooks: Collection[str]) -> None:
    """Warn of methods of a user's class whose names are almost those of ``hooks``, because nothing would call them."""
    if cls.__module__.startswith("etude."):
        return
    own = {name for name, value in vars(cls).items() if inspect.isfunction(value)}
    inherited = {name for base in cls.__mro__[1:] for name in vars(base)}
    for name in sorted(own - inherited):
        for near in difflib.get_close_matches(name, set(hooks) - own, 1, cutoff=0.82):
            words = f"{cls.__name__}.{name} overrides nothing, so Etude does not call it. Did you mean `{near}`?"
            warnings.warn(f"{words} If not, begin its name with an underscore.", stacklevel=3)


def from_dict(cls: type[C], values: Mapping[str, Any], *, owner: str) -> C:
    """Make settings from a mapping (YAML, JSON, flags), checking names and types.

    Missing fields of nested settings are taken from the default of the field that contains them. Nested settings may
    also be given by their own names.

    Raises:
        SettingsError: a key is unknown (the message has the nearest name), or a value is missing, has the wrong type or
            breaks its rule.
    """
    found = typed(cls, values, owner=owner)
    _refuse_missing(cls, found, owner)
    return cls(**_with_nested(cls, found, defaults(cls), owner))


def typed(cls: type, values: Mapping[str, Any], *, owner: str) -> dict[str, Any]:
    """Check names and types of some settings of ``cls``; numbers and booleans given as text are converted.

    Nested settings may be mappings, and remain mappings; settings given by their own names are moved into them. A plain
    value for nested settings sets their ``main_setting``: ``workers: 2`` is ``workers: {num_workers: 2}``.

    Raises:
        SettingsError: as in `from_dict`, but values may be missing.
    """
    values = nested_by_name(cls, values, owner)
    _refuse_unknown(cls, values, owner)
    hints, inside = _hints(cls), settings_inside(cls)
    found: dict[str, Any] = {}
    for name, value in values.items():
        where, inner = f"{owner}.{name}", inside.get(name)
        if inner is None or fits(hints[name], value):
            found[name] = fitting(hints[name], value, where, text=True)
            continue
        if not isinstance(value, Mapping):
            if hints[name] is not inner and isinstance(value, str):  # a text that is none of the allowed ones
                fitting(hints[name], value, where)
            main = main_setting(inner)
            if main is None:
                raise SettingsError(f"{where} is {value!r}, expected {inner.__name__}: give its fields by name.")
            value = {main: value}
        found[name] = typed(inner, value, owner=where)
    _check_rules(cls, found, owner)
    return found


def settings_inside(cls: type) -> dict[str, type]:
    """The fields that hold nested settings (or None), with their class."""
    found = {name: next(filter(_is_settings, options_of(hint)), None) for name, hint in _hints(cls).items()}
    return {name: kind for name, kind in found.items() if kind is not None}


def merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings; values of ``high`` take precedence."""
    result = dict(low)
    for key, value in high.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def check_rules(settings: Any, path: str = "", /, **rules: tuple[bool, str]) -> None:
    """Raise a SettingsError for the first setting that breaks its rule.

    Args:
        settings: The settings.
        path: The path of ``settings`` in the outermost settings, such as ``optimizer``.
        rules: ``(is_fine, what_it_must_be)`` by field name.
    """
    for name, (fine, rule) in rules.items():
        if not fine:
            shown_name = f"{path}.{name}" if path else name
            raise SettingsError(f"`{shown_name}` is {getattr(settings, name)!r}, but must be {rule}.")


def check_arguments(owner: str, **arguments: tuple[Any, Any]) -> None:
    """Check the arguments ``name=(annotation, value)`` of a function, or of a class that is not a settings class.

    Unlike a setting, a float may be infinite if its rule allows it.

    Raises:
        SettingsError: an argument has another type, or breaks the rule of its annotation.
    """
    for name, (hint, value) in arguments.items():
        kind, *rules = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if kind is not float or value not in (math.inf, -math.inf):
            fitting(kind, value, f"{owner}.{name}")
        for rule in rules:
            check_range(owner, **{name: (rule.holds(value), f"{rule.words}, not {value!r}")})


def check_range(owner: str, **checks: tuple[bool, str]) -> None:
    """Raise a SettingsError for the first of ``checks`` (``name=(is_fine, what_it_must_be)``) that is not fine."""
    for name, (fine, rule) in checks.items():
        if not fine:
            raise SettingsError(f"{owner}.{name} must be {rule}.")


# -- values and annotations ------------------------------------------------------------------------------------------


def fitting(hint: Any, value: Any, name: str, *, text: bool = False) -> Any:
    """Check ``value`` against the annotation ``hint``; lists become tuples and ints floats if ``hint`` asks for them.

    Args:
        hint: The annotation.
        value: The value.
        name: The setting's name in messages.
        text: Whether numbers and booleans may be given as text.

    Raises:
        SettingsError: the value is of another type.
    """
    fine, result = _fit(hint, value, text)
    if not fine or foreign_env(value):
        finite = " that is finite" if str(value).lstrip("-") in ("inf", "nan") else ""
        truth = ", not true or false" if _holds_truth(value) else ""
        raise SettingsError(f"{name} is {value!r}, expected {_in_words(hint)}{finite}{truth}.{_advice(hint, value)}")
    return result


def _advice(hint: Any, value: Any) -> str:
    """What to write instead of a value of the wrong type, if the intention is clear."""
    if foreign := foreign_env(value):
        return f" {foreign}"
    fine, meant = _fit(hint, value, True)
    if fine:
        return f" Write {meant!r}."
    for option in options_of(hint):
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            main = None if value is None else getattr(option, "main_setting", None)
            words = {}
            for key, v in (value if isinstance(value, Mapping) else {main: value} if main else {}).items():
                own = next((own for own in (key, *other_names(str(key))) if own in _hints(option)), key)
                words[own] = repr(v) if own == key or fits(_hints(option).get(own, Any), v) else "..."
            return f" Write {option.__name__}({', '.join(f'{own}={v}' for own, v in words.items()) or '...'})."
        if get_origin(option) is tuple and get_args(option)[-1:] == (...,) and fits(get_args(option)[0], value):
            name = getattr(value, "__name__", "...") if repr(value).startswith("<") else repr(value)
            return f" Write [{'...' if name == '<lambda>' else name}]."  # also right in a settings file
        if get_origin(option) is tuple and any(
            tuple[int, float] in options_of(part) for part in get_args(option)[:1]
        ):  # a schedule
            return " Write a number, such as 3e-4, or points over steps, such as [[0, 3e-4], [100000, 0.0]]."
    return ""


def foreign_env(value: Any) -> str:
    """A hint on what to give instead of another library's vector env; empty for any other value."""
    names = {cls.__name__ for cls in type(value).__mro__}
    if "VecEnv" in names:
        return (
            f"A {type(value).__name__} is a vector env of Stable-Baselines3: give the env itself, as its id or a "
            "function that makes one, and `num_envs`. In place of VecNormalize, connectors=('normalize_obs',) scales "
            "observations; in place of VecFrameStack, 'frame_stack:4' stacks them."
        )
    return ""


def fits(hint: Any, value: Any, *, text: bool = False) -> bool:
    """Whether ``value`` is of the type ``hint``; with ``text``, numbers and booleans may be text."""
    return _fit(hint, value, text)[0]


def options_of(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a type: those of a union, or the type alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _holds_truth(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, list | tuple) and any(map(_holds_truth, value)))


def _fit(hint: Any, value: Any, text: bool = False) -> tuple[bool, Any]:
    origin, args, options = get_origin(hint), get_args(hint), options_of(hint)
    if len(options) > 1:
        return next((found for found in (_fit(option, value, text) for option in options) if found[0]), (False, value))
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
    fine = isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool)
    if fine:  # a large int can't be converted to a float, and the largest float not to a NumPy float32
        fine = abs(value) <= sys.float_info.max if isinstance(value, int) else math.isfinite(value)
    return fine, hint(value) if fine else value


def _numbers(value: Any) -> Any:
    """The numbers, as texts, in ``64,64``, ``[64, 64]`` or a list of such texts; any other ``value`` unchanged."""
    words = [value] if isinstance(value, str) and re.search(r"[\s,\[(]", value) else value
    if isinstance(words, list | tuple) and words and all(isinstance(word, str) for word in words):
        return re.findall(r"[^\s,\[\]()]+", " ".join(words))
    return value


def _number(text: str) -> Any:
    """Convert a text to a number; return the text itself if it is none."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


_NUMBERS: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real}
_TRUTH = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}


def _in_words(hint: Any) -> str:
    """An annotation as it is written in code, without module names."""
    origin, args, options = get_origin(hint), get_args(hint), options_of(hint)
    if len(options) > 1:
        return " | ".join(map(_in_words, options))
    if origin is Literal:
        return " | ".join(map(repr, args))
    if isinstance(hint, list):  # the parameters of a Callable
        return f"[{', '.join(map(_in_words, hint))}]"
    if hint in (type(None), ...):
        return "None" if hint is type(None) else "..."
    name = getattr(origin or hint, "__name__", str(hint))
    return f"{name}[{', '.join(map(_in_words, args))}]" if args else name
