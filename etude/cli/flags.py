# SPDX-License-Identifier: Apache-2.0
"""From settings classes to flags, and from flags and files to values.

tyro splits the command line and writes the help. What the words mean is decided by `etude.settings`, so that a flag
and a line of a file are checked by one rule and refused in the same words.
"""

import contextlib
import dataclasses
import io
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

from etude.errors import SettingsError
from etude.settings import defaults, field_docs, from_dict, nearest, shown, summary

C = TypeVar("C")

Converters = Mapping[Any, Callable[[str], Any]]
"""How one word becomes a value of a type (the key, as in the annotation of a field) that only Python can write."""


class Leaf(NamedTuple):
    """One flag."""

    path: tuple[str, ...]
    """The names of the fields that lead to it."""
    owner: type
    """The settings class that has it."""
    hint: Any
    """The annotation of the field."""

    @property
    def flag(self) -> str:
        """What to type, without the leading dashes: ``network.log-std-init``."""
        return ".".join(name.rstrip("_").replace("_", "-") for name in self.path)

    @property
    def about(self) -> str:
        """What it is, in a few words."""
        return summary(self.owner, self.path[-1])


def leaves_of(cls: type, path: tuple[str, ...] = ()) -> list[Leaf]:
    """The flags that the settings class ``cls`` makes, those of settings inside it included."""
    found = []
    hints: dict[str, Any] = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        here, hint = (*path, field.name), hints[field.name]
        found += leaves_of(typing.cast(type, hint), here) if dataclasses.is_dataclass(hint) else [Leaf(here, cls, hint)]
    return found


def parse(
    classes: Sequence[type],
    args: Sequence[str],
    *,
    prog: str,
    about: str,
    positional: str | None = None,
    converters: Converters | None = None,
) -> list[dict[str, Any]]:
    """What a command line says, for each of ``classes`` as a nested mapping of the fields that are given.

    Words stay words, but for ``none``, lists, booleans and what ``converters`` make: types are checked by
    `etude.settings.typed` and `from_dict`.

    Args:
        classes: Settings classes; no two have a field of the same name.
        args: The arguments.
        prog: The command, such as ``etude train ppo``. The last word of it is whose settings they are in messages.
        about: What the command does, for its help.
        positional: A field that is given without a flag.
        converters: For types that only Python can write.

    Raises:
        SettingsError: a flag is unknown (the nearest is named), or has too few or too many values.
        SystemExit: help was asked for, and is written.
    """
    import tyro

    leaves = [leaf for cls in classes for leaf in leaves_of(cls)]
    view = _view("Settings", classes, positional, ())
    owner = prog.split()[-1]
    written = io.StringIO()
    try:
        with contextlib.redirect_stderr(written):
            found, unknown = tyro.cli(view, args=list(args), prog=prog, description=about, return_unknown_args=True)
    except SystemExit as stop:
        if stop.code == 0:
            raise
        raise SettingsError(f"{owner}: {_unboxed(written.getvalue())} All settings: {prog} --help") from None
    if unknown:
        raise _unknown(unknown[0], leaves, owner, prog)
    given = {_canonical(word) for word in args if word.startswith("--")}
    results = []
    for cls in classes:
        values: dict[str, Any] = {}
        for leaf in leaves_of(cls):
            words = _at(found, leaf.path)
            if leaf.flag in given or _negative(leaf) in given or (leaf.path == (positional,) and words):
                inner = values
                for name in leaf.path[:-1]:
                    inner = inner.setdefault(name, {})
                inner[leaf.path[-1]] = _value(leaf, words, converters or {}, owner)
        results.append(values)
    return results


def options(cls: type[C], args: Sequence[str], *, prog: str, about: str, positional: str | None = None) -> C:
    """The settings ``cls`` of a command that takes nothing else; arguments as for `parse`.

    Raises:
        SettingsError: as `parse`, and where a value is wrong or missing; the usage is then shown.
    """
    (given,) = parse([cls], args, prog=prog, about=about, positional=positional)
    owner = prog.split()[-1]
    needed = [leaf for leaf in leaves_of(cls) if len(leaf.path) == 1 and leaf.path[0] not in defaults(cls)]
    missing = [leaf.path[0] for leaf in needed if leaf.path[0] not in given]
    if missing:
        words = [
            _metavar(leaf, positional) if leaf.path[0] == positional else f"--{leaf.flag} {_metavar(leaf, positional)}"
            for leaf in needed
        ]
        raise SettingsError(
            f"{owner} needs a value for {', '.join(f'`{name}`' for name in missing)}.\n"
            f"usage: {' '.join([prog, *words])} [OPTIONS]; all options: {prog} --help"
        )
    return from_dict(cls, given, owner=owner)


def merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings made one; where both have a value, that of ``high`` counts."""
    result = dict(low)
    for key, value in high.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def refuse_booleans(cls: type, values: Mapping[str, Any], *, owner: str) -> None:
    """Raise a SettingsError where a file says yes or no, and ``cls`` wants something else: True is not the number 1."""
    for leaf in leaves_of(cls):
        value: Any = values
        for name in leaf.path:
            value = value.get(name) if isinstance(value, Mapping) else None
        if _holds_boolean(value) and bool not in _options(leaf.hint):
            name = ".".join(leaf.path)
            raise SettingsError(f"{owner}.{name} is {value!r}, expected {_metavar(leaf, None)}: not yes or no.")


def _holds_boolean(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, list | tuple) and any(map(_holds_boolean, value)))


# -- what tyro sees -------------------------------------------------------------------------------------------------


def _view(name: str, classes: Iterable[type], positional: str | None, path: tuple[str, ...]) -> Any:
    """A dataclass of plain words with a flag for every field of ``classes``."""
    import tyro

    fields: list[Any] = []
    for cls in classes:
        hints, docs, known = typing.get_type_hints(cls), field_docs(cls), defaults(cls)
        for field in dataclasses.fields(cls):
            hint = hints[field.name]
            if dataclasses.is_dataclass(hint):
                inner = _view(field.name, [typing.cast(type, hint)], None, (*path, field.name))
                fields.append((field.name, inner, dataclasses.field(default_factory=inner)))
                continue
            leaf = Leaf((field.name,), cls, hint)
            shape: Any = bool if hint is bool else tuple[str, ...] if _many(hint) or field.name == positional else str
            start = known[field.name] if hint is bool else () if shape is not str else ""
            arg = tyro.conf.arg(
                name=None if field.name == positional else leaf.flag,
                help=docs.get(field.name, ""),
                aliases=[f"--{field.name}"] if field.name.endswith("_") else [],
                metavar=None if hint is bool else _metavar(leaf, positional),
                help_behavior_hint=_behaviour(known, field.name, hint),
            )
            marks = (arg, tyro.conf.Positional) if field.name == positional else (arg,)
            annotated: Any = Annotated[(shape, *marks)]
            fields.append((field.name, annotated, dataclasses.field(default=start)))
    return dataclasses.make_dataclass(name, fields)


def _behaviour(known: Mapping[str, Any], name: str, hint: Any) -> str:
    if name not in known:
        return "(required)"
    value = known[name]
    if isinstance(value, tuple):
        return f"(default: {' '.join(map(str, value)) or 'none'})"
    if hint is bool:
        return f"(default: {'yes' if value else 'no'})"
    return "" if value is None else f"(default: {value if isinstance(value, str) else shown(value)})"


def _metavar(leaf: Leaf, positional: str | None) -> str:
    if leaf.path[-1] == positional:
        return leaf.path[-1].upper() + (" ..." if _many(leaf.hint) else "")
    options = [o for o in _options(leaf.hint) if _is_tuple(o)] if _many(leaf.hint) else _options(leaf.hint)
    words = []
    for option in options:
        if option is type(None):
            words.append("none")
        elif typing.get_origin(option) is typing.Literal:
            words.append("{" + ",".join(map(str, typing.get_args(option))) + "}")
        elif option in (int, float, str, bool):
            words.append({int: "INT", float: "NUMBER", str: "TEXT", bool: "YES|NO"}[option])
        elif _is_tuple(option):
            inner = {int: "INT", float: "NUMBER", str: "TEXT"}.get(typing.get_args(option)[0], "ITEM")
            words.append(f"{inner} ..." if _many(leaf.hint) else "STEP:NUMBER,...")
    if len(words) != len(options):  # also what only Python can write
        words = ["NAME"]
    return "|".join(words)


# -- from words to values -------------------------------------------------------------------------------------------


def _value(leaf: Leaf, words: Any, converters: Converters, owner: str) -> Any:
    if isinstance(words, bool):
        return words
    if isinstance(words, str) or not _many(leaf.hint):
        one = (words,) if isinstance(words, str) else words
        if len(one) != 1:
            raise SettingsError(f"{owner}.{leaf.flag} takes one value, not {len(one)}: {' '.join(one)}.")
        return one_value(leaf.hint, one[0], converters)
    if len(words) == 1 and words[0].lower() == "none":
        return None if type(None) in _options(leaf.hint) else ()
    nested = next(iter(typing.get_args(next(filter(_is_tuple, _options(leaf.hint))))), str)
    if _is_tuple(nested):
        return tuple(tuple(word.split(",")) for word in words)
    return tuple(one_value(leaf.hint, word, converters) for word in words)


def one_value(hint: Any, word: Any, converters: Converters) -> Any:
    """One word, from the command line or a file, as what ``hint`` wants where it is not just that word."""
    if not isinstance(word, str):
        return word
    if word.lower() == "none" and type(None) in _options(hint):
        return None
    return converters[hint](word) if hint in converters else word


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) or _is_union(hint) else (hint,)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Union


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _many(hint: Any) -> bool:
    """Whether a flag takes any number of values: a tuple, alone or with None."""
    return all(_is_tuple(option) or option is type(None) for option in _options(hint)) and hint is not type(None)


# -- finding and refusing -------------------------------------------------------------------------------------------


def _at(found: Any, path: Sequence[str]) -> Any:
    for name in path:
        found = getattr(found, name)
    return found


def _canonical(word: str) -> str:
    return word.removeprefix("--").partition("=")[0].replace("_", "-").rstrip("-")


def _negative(leaf: Leaf) -> str:
    head, dot, last = leaf.flag.rpartition(".")
    return f"{head}{dot}no-{last}"


def _unknown(word: str, leaves: Sequence[Leaf], owner: str, prog: str) -> SettingsError:
    if not word.startswith("-"):
        return SettingsError(f"{owner} can't take {word!r}: flags begin with `--`. All settings: {prog} --help")
    name = word.lstrip("-").partition("=")[0]
    by_flag = {leaf.flag: leaf for leaf in leaves}
    near = nearest(_canonical(word), by_flag) or nearest(name, [leaf.path[-1] for leaf in leaves])
    hint = f" Nearest: `{near}` ({by_flag[near].about})." if near in by_flag else ""
    return SettingsError(f"{owner} has no setting `{name}`.{hint} All settings: {prog} --help")


def _unboxed(text: str) -> str:
    """The message inside the box that tyro draws around it."""
    words = " ".join(re.sub(r"[│╭╮╰╯─]+|\x1b\[[0-9;]*m", " ", text.partition("For full helptext")[0]).split())
    return re.sub(r"^(Missing argument|Value error|Parsing error) ", "", words)
