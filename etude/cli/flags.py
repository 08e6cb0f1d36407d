# SPDX-License-Identifier: Apache-2.0
"""From settings classes to flags, and from flags and files to values.

tyro splits the command line and writes the help. What the words mean is decided by `etude.settings`, so that a flag
and a line of a file are checked by one rule and refused in the same words.
"""

import contextlib
import dataclasses
import io
import re
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from etude.cli.words import Converters, is_one_or_many, metavar, takes_many, value_of
from etude.errors import DataError, SettingsError
from etude.settings import (
    Leaf,
    defaults,
    field_docs,
    fits,
    from_dict,
    leaves_of,
    main_setting,
    nearest,
    other_names,
    shown,
)

C = TypeVar("C")


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
        classes: Settings classes; no two have a field of the same name. Where one has a class attribute ``short``, only
            settings that it names are also called by their own name.
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

    leaves = [(cls, leaf) for cls in classes for leaf in leaves_of(cls) if leaf.path != (positional,)]
    names = Names(
        [leaf for _, leaf in leaves], short_of={leaf.path: getattr(cls, "short", None) for cls, leaf in leaves}
    )
    owner = prog.split()[-1]
    known, given = names.settled(args, owner)
    view = _view("Settings", classes, names, positional, ())
    written = io.StringIO()
    try:
        with contextlib.redirect_stderr(written):
            found, unknown = tyro.cli(view, args=known, prog=prog, description=about, return_unknown_args=True)
    except SystemExit as stop:
        if stop.code == 0:
            raise
        raise SettingsError(f"{owner}: {_unboxed(written.getvalue())} All settings: {prog} --help") from None
    if unknown:
        raise names.unknown(unknown[0], owner, prog)
    results = []
    for cls in classes:
        values: dict[str, Any] = {}
        for leaf in leaves_of(cls):
            words = _at(found, leaf.path)
            if leaf.path in given or (leaf.path == (positional,) and words):
                inner = values
                for name in leaf.path[:-1]:
                    inner = inner.setdefault(name, {})
                one = (words,) if isinstance(words, str) else words
                where = f"{owner}.{'.'.join(leaf.path)}"
                is_truth = isinstance(words, bool)
                value = words if is_truth else value_of(leaf.hint, one, converters or {}, where)
                if not is_truth and leaf.path != (positional,):
                    _check(leaf, value, one, f"--{min(names.of[leaf.path], key=len)}", where)
                inner[leaf.path[-1]] = value
        results.append(values)
    return results


def _check(leaf: Leaf, value: Any, written: Sequence[str], flag: str, where: str) -> None:
    """Raise a SettingsError in the words of the command line where several numbers can't be read, or a schedule."""
    takes = metavar(leaf.hint)
    if not re.search(r"STEP|(INT|NUMBER) \.\.\.", takes) or fits(leaf.hint, value, text=True):
        return
    such = f"{flag} 3e-4 or {flag} 0:3e-4,100000:0" if "STEP" in takes else f"{flag} 64 64"
    raise SettingsError(f"{where} is {' '.join(written)!r}, expected {takes}, such as {such}.")


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
        flags = ["" if leaf.path[0] == positional else f"--{_flag(leaf.path)} " for leaf in needed]
        words = [flag + _metavar(leaf.path[0], leaf.hint, positional) for flag, leaf in zip(flags, needed, strict=True)]
        raise SettingsError(
            f"{owner} needs a value for {', '.join(f'`{name}`' for name in missing)}.\n"
            f"usage: {' '.join([prog, *words])} [OPTIONS]; all options: {prog} --help"
        )
    return from_dict(cls, given, owner=owner)


@contextlib.contextmanager
def said_as(flag: str) -> Iterator[None]:
    """Let errors within it name ``flag`` where they say ``append=True``."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace("append=True", flag)) from error


class Names:
    """What each setting is called on the command line.

    Settings inside others have their path for a name (``workers.min-batch``), and also their own name where no other
    setting has it (``min-batch``; see `own_paths` in `etude.settings`). A main setting also has the name of those that
    it is in (``workers``).

    Args:
        leaves: The settings.
        short_of: By path, the own names that may be used; None is all.
    """

    def __init__(
        self, leaves: Sequence[Leaf], short_of: Mapping[tuple[str, ...], Sequence[str] | None] | None = None
    ) -> None:
        self.of: dict[tuple[str, ...], list[str]] = {}
        """By path; the first name is the one in full."""
        in_full = {path for path, short in (short_of or {}).items() if short is not None and path[-1] not in short}
        own_names = {leaf.path: _flag([leaf.own_name]) for leaf in leaves}
        mains = [_flag(leaf.path[:-1]) for leaf in leaves if _is_main(leaf)]
        owns = Counter([*mains, *(name for path, name in own_names.items() if path not in in_full)])
        for leaf in leaves:
            main = [_flag(leaf.path[:-1])] if _is_main(leaf) else []
            own = [own_names[leaf.path]] if owns[own_names[leaf.path]] == 1 and leaf.path not in in_full else []
            self.of[leaf.path] = list(dict.fromkeys([_flag(leaf.path), *main, *own]))
        self.leaves = {name: leaf for leaf in leaves for name in self.of[leaf.path]}
        """By name."""
        self._shared = {
            name: [flag for flag in self.leaves if flag.endswith(f".{name}")]
            for name, count in owns.items()
            if count > 1 and name not in self.leaves
        }

    def settled(self, args: Sequence[str], owner: str) -> tuple[list[str], set[tuple[str, ...]]]:
        """The arguments with names in full for all others, and which settings they give.

        Raises:
            SettingsError: a setting is given by two of its names, or one that takes one value or many is given twice.
        """
        words, given, seen = [], dict[tuple[str, ...], str](), set[tuple[str, ...]]()
        for word in args:
            flag, equals, value = word.removeprefix("--").partition("=")
            name = _canonical(flag)
            positive = name if name in self.leaves else re.sub(r"(^|\.)no-", r"\1", name)
            if not word.startswith("--") or positive not in self.leaves:
                words.append(word)
                continue
            path = self.leaves[positive].path
            if given.setdefault(path, positive) != positive:
                raise SettingsError(
                    f"{owner}: --{given[path]} and --{positive} are one setting: leave out one of them."
                )
            if path in seen and is_one_or_many(self.leaves[positive].hint):
                raise SettingsError(f"{owner} has --{positive} twice: put all its values behind one, as A B.")
            seen.add(path)
            shown = self.of[path][0]
            words.append("--" + (shown if name == positive else _negative(shown)) + equals + value)
        return words, set(given)

    def unknown(self, word: str, owner: str, prog: str) -> SettingsError:
        """The error for a word that is no setting: names the nearest."""
        if not word.startswith("-"):
            is_env = "env" in self.leaves and re.search(r"-v\d+$", word)
            hint = f"give the env as --env {word}" if is_env else "flags begin with `--`"
            return SettingsError(f"{owner} can't take {word!r}: {hint}. All settings: {prog} --help")
        name = word.lstrip("-").partition("=")[0]
        if _canonical(name) in self._shared:
            several = " or ".join(f"`{flag}`" for flag in self._shared[_canonical(name)])
            return SettingsError(f"{owner} has more than one setting `{name}`: write {several}.")
        by_path = {leaf.own_name: self.of[leaf.path][0] for leaf in reversed(self.leaves.values())}
        same = next((by_path[ours] for ours in other_names(name) if ours in by_path), None)
        near = same or nearest(_canonical(name), self.leaves)
        hint = f" {'Here it is' if same else 'Nearest'}: `{near}` ({self.leaves[near].about})." if near else ""
        return SettingsError(f"{owner} has no setting `{name}`.{hint} All settings: {prog} --help")


def _flag(path: Iterable[str]) -> str:
    """Without the leading dashes: ``network.log-std-init``."""
    return ".".join(name.rstrip("_").replace("_", "-") for name in path)


def _is_main(leaf: Leaf) -> bool:
    return len(leaf.path) > 1 and main_setting(leaf.owner) == leaf.path[-1]


def _canonical(word: str) -> str:
    return word.replace("_", "-").rstrip("-")


def _negative(flag: str) -> str:
    head, dot, last = flag.rpartition(".")
    return f"{head}{dot}no-{last}"


# -- what tyro sees -------------------------------------------------------------------------------------------------


def _view(
    name: str,
    classes: Iterable[type],
    names: Names,
    positional: str | None,
    path: tuple[str, ...],
    start_with: Any = None,
) -> Any:
    """A dataclass of plain words with a flag for every field of ``classes``; ``start_with`` has the defaults of one."""
    import tyro

    fields: list[Any] = []
    for cls in classes:
        hints, docs, known = typing.get_type_hints(cls), field_docs(cls), defaults(cls)
        if isinstance(start_with, cls):
            known = {field.name: getattr(start_with, field.name) for field in dataclasses.fields(cls)}
        for field in dataclasses.fields(cls):
            hint, here = hints[field.name], (*path, field.name)
            if dataclasses.is_dataclass(hint):
                inner = _view(field.name, [typing.cast(type, hint)], names, None, here, known.get(field.name))
                inner.__doc__ = (hint.__doc__ or "").split("\n")[0]
                fields.append((field.name, inner, dataclasses.field(default_factory=inner)))
                continue
            shape: Any = (
                bool if hint is bool else tuple[str, ...] if takes_many(hint) or field.name == positional else str
            )
            start = known[field.name] if hint is bool else () if shape is not str else ""
            arg = tyro.conf.arg(
                name=None if field.name == positional else names.of[here][0],
                aliases=None if field.name == positional else [f"--{other}" for other in names.of[here][1:]],
                prefix_name=False,
                help=docs.get(field.name, ""),
                metavar=None if hint is bool else _metavar(field.name, hint, positional),
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


def _metavar(name: str, hint: Any, positional: str | None) -> str:
    return name.upper() + (" ..." if takes_many(hint) else "") if name == positional else metavar(hint)


# -- finding ----------------------------------------------------------------------------------------------------------


def _at(found: Any, path: Sequence[str]) -> Any:
    for name in path:
        found = getattr(found, name)
    return found


def _unboxed(text: str) -> str:
    """The message inside the box that tyro draws around it."""
    words = " ".join(re.sub(r"[│╭╮╰╯─]+|\x1b\[[0-9;]*m", " ", text.partition("For full helptext")[0]).split())
    return re.sub(r"^(Missing argument|Value error|Parsing error) ", "", words)
