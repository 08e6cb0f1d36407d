# SPDX-License-Identifier: Apache-2.0
"""Command-line flags of settings classes: their names, their parsing, and the help, which tyro writes.

Flags mean what lines of a settings file mean: `etude.cli.values` interprets their words and `etude.settings` checks
them, so that a wrong value gets the same message in both.
"""

import contextlib
import dataclasses
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeVar

from etude.cli import values
from etude.errors import SettingsError
from etude.settings import (
    Leaf,
    field_docs,
    from_dict,
    leaves_of,
    main_setting,
    nearest,
    other_names,
    pointer,
    settings,
    shown,
)

HELP, HELP_ALL = ("-h", "--help"), "--help-all"


class Command(Protocol):
    """A settings class that is a command; its fields are the flags."""

    def execute(self) -> int:
        """Run the command, and return the exit code."""


C = TypeVar("C", bound=Command)


def run(cls: type[C], args: Sequence[str], *, prog: str, positional: str | None = None) -> int:
    """Run the command ``cls`` with ``args``.

    Raises:
        SettingsError: as in `parse`; or a value is missing or wrong.
    """
    owner, about = prog.split()[-1], " ".join((cls.__doc__ or "").split())
    given = parse({owner: cls}, args, prog=prog, about=about, positional=positional)
    try:
        command = from_dict(cls, given[owner], owner=owner)
    except SettingsError as error:
        raise SettingsError(f"{error} All options: {prog} --help") from error
    return command.execute()


def parse(
    kinds: Mapping[str, type],
    args: Sequence[str],
    *,
    prog: str,
    about: str,
    positional: str | None = None,
    converters: values.Converters | None = None,
) -> dict[str, dict[str, Any]]:
    """Parse a command line into the values of several settings classes, each as a nested mapping; types are not
    checked.

    Args:
        kinds: Settings classes by their titles in help. A short name that several have belongs to the first.
        args: The arguments.
        prog: The command, such as ``etude train ppo``. Messages use its last word as the owner of the settings.
        about: What the command does, for its help.
        positional: A field that is given without a flag.
        converters: Converters for types that only Python can write.

    Raises:
        SettingsError: a flag is unknown (the nearest is named), is given twice, or has too few or too many values.
        SystemExit: help was asked for, and is written.
    """
    groups = [[leaf for leaf in leaves_of(kind) if leaf.path != (positional,)] for kind in kinds.values()]
    names, owner = FlagNames(*groups), prog.split()[-1]
    for kind in kinds.values():
        names.unused |= getattr(kind, "all_unused", dict)()
    if {*HELP, HELP_ALL} & {*args}:
        _write_help(kinds, names, prog, about, positional, everything=HELP_ALL in args)
    given, rest = names.split(args, owner)
    wrong = [word for word in rest if positional is None or re.match(r"-[^\d.]", word)]
    if wrong:
        raise names.unknown(wrong[0], owner, prog)
    given |= {(positional,): rest} if positional is not None and rest else {}
    found: dict[str, dict[str, Any]] = {}
    for title, kind in kinds.items():
        found[title] = {}
        for leaf in leaves_of(kind):
            if leaf.path in given:
                inner = found[title]
                for name in leaf.path[:-1]:
                    inner = inner.setdefault(name, {})
                where = ".".join([owner, *leaf.path])
                inner[leaf.path[-1]] = values.of_words(leaf.hint, given.pop(leaf.path), where, converters or {})
    return found


@settings
class TableOptions:
    """Options of commands that read data."""

    columns: Mapping[str, Any] | None = None
    """For a table (CSV, Parquet, JSON, Arrow): which of its columns are what, as in obs=speed,load action=command
    reward=score episode_id=trip t=tick propensity=p. `etude data info TABLE` suggests it."""

    def __post_init__(self) -> None:
        wrong = [name for name, own in (self.columns or {}).items() if not own]
        if wrong:
            raise SettingsError(f"`columns` has {wrong[0]} without a column: write {wrong[0]}=NAME.")

    def described(self, data: Any) -> Any:
        """``data`` as a `Source` with these columns, or unchanged if none are given."""
        if not self.columns:
            return data
        from etude.recordings import Source

        return Source(data, {name: _column_names(own) for name, own in self.columns.items()})


def _column_names(own: Any) -> Any:
    names = tuple(own.split(",")) if isinstance(own, str) else tuple(own) if isinstance(own, list) else own
    return names[0] if isinstance(names, tuple) and len(names) == 1 else names


class FlagNames:
    """The names of settings on the command line.

    Nested settings are named by their path (``workers.min-batch``), and also by their own name if it is unique in their
    group (``min-batch``; see `own_paths` in `etude.settings`). A main setting can also be given by the name of its
    group (``workers``).

    Args:
        groups: The settings. A short name that several groups have belongs to the first.
    """

    def __init__(self, *groups: Sequence[Leaf]) -> None:
        self.full = {_flag(leaf.path): leaf for leaves in reversed(groups) for leaf in leaves}
        self.named: dict[str, list[Leaf]] = {name: [leaf] for name, leaf in self.full.items()}
        """Settings by full and short names; several for an ambiguous short name."""
        self.unused: dict[str, str] = {}
        """By dotted path: why a setting has no effect in this command."""
        for leaves in groups:
            short: dict[str, list[Leaf]] = {}
            for leaf in leaves:
                is_main = len(leaf.path) > 1 and main_setting(leaf.owner) == leaf.path[-1]
                for name in {_canonical(leaf.own_name), _flag(leaf.path[:-1]) if is_main else _flag(leaf.path)}:
                    short.setdefault(name, []).append(leaf)
            self.named = short | self.named

    def find(self, name: str) -> Leaf | None:
        """The setting with this name; None if there is none, or several."""
        found = self.named.get(_canonical(name), [])
        return found[0] if len(found) == 1 else None

    def split(self, args: Sequence[str], owner: str) -> tuple[dict[tuple[str, ...], list[str]], list[str]]:
        """The words of each setting that is given, by path, and the words that belong to none."""
        given, flags = dict[tuple[str, ...], list[str]](), dict[tuple[str, ...], str]()
        rest, words, room = list[str](), list[str](), 0.0
        for word in args:
            name, equals, value = word.removeprefix("--").partition("=")
            leaf = self.find(name) if word.startswith("--") else None
            truth = "yes" if leaf is not None else "no"
            if word.startswith("--") and leaf is None:
                name = re.sub(r"(^|\.)no-", r"\1", name)
                leaf = found if (found := self.find(name)) is not None and found.hint is bool else None
                if leaf is not None and equals:
                    raise SettingsError(f"{owner}: {word.partition('=')[0]} takes no value: write --{name}={value}.")
            if leaf is None:
                fits = room >= 1 and not word.startswith("--")
                (words if fits else rest).append(word)
                room -= fits
                continue
            if (before := flags.setdefault(leaf.path, _canonical(name))) != _canonical(name):
                raise SettingsError(f"{owner}: --{before} and --{name} are one setting: leave out one of them.")
            is_one = values.is_one_or_many(leaf.hint) or values.is_by_name(leaf.hint)
            if leaf.path in given and is_one:  # else the last one counts
                raise SettingsError(f"{owner} has --{name} twice: put all its values behind one, as A B.")
            words = given[leaf.path] = [value] if equals else [truth] if leaf.hint is bool else []
            room = 0 if words else float("inf") if values.takes_many(leaf.hint) else 1
        return given, rest

    def unknown(self, word: str, owner: str, prog: str) -> SettingsError:
        """The error for a word that is not a setting: names the nearest, or Etude's name for another library's
        setting."""
        more = f"All settings: {prog} {HELP_ALL}"
        if not word.startswith("-"):
            is_env = "env" in self.full and re.search(r"-v\d+$", word)
            hint = f"give the env as --env {word}" if is_env else "flags begin with `--`"
            if word.lower() in ("true", "false", "yes", "no", "on", "off"):
                hint = "a flag that is yes or no takes no value, as in --quiet or --no-quiet"
            return SettingsError(f"{owner} can't take {word!r}: {hint}. {more}")
        name = word.lstrip("-").partition("=")[0]
        if several := self.named.get(_canonical(name)):
            which = " or ".join(f"`{_flag(leaf.path)}`" for leaf in several)
            if not word.startswith("--"):
                return SettingsError(f"{owner} can't take {word!r}: write -{word}. {more}")
            return SettingsError(f"{owner} has more than one setting `{name}`: write {which}.")
        ours = {leaf.own_name: flag for flag, leaf in reversed(self.full.items())}
        inside = {path[0]: flag for flag, leaf in reversed(self.full.items()) if len(path := leaf.path) > 1}
        same = next((found[other] for other in other_names(name) for found in (ours, inside) if other in found), None)
        near = same or nearest(_canonical(name), self.named)
        hint = ""
        if near:
            why = self.unused.get(".".join(self.named[near][0].path))
            about = self.named[near][0].about if why is None else f"which has no effect in {owner}: {why}"
            hint = pointer(name, near, about, is_same=same is not None)
        return SettingsError(f"{owner} has no setting `{name}`.{hint} {more}")


def _flag(path: Sequence[str]) -> str:
    """The flag's name without leading dashes: ``network.log-std-init``."""
    return ".".join(map(_canonical, path))


def _canonical(word: str) -> str:
    return word.replace("_", "-").rstrip("-")


# -- help -------------------------------------------------------------------------------------------------------------


def _write_help(
    kinds: Mapping[str, type], names: FlagNames, prog: str, about: str, positional: str | None, *, everything: bool
) -> None:
    """Write the help of a command, with all settings or only the everyday ones, and exit."""
    import tyro

    groups: dict[tuple[str, ...], tuple[type, list[Any]]] = {}
    is_whole = True
    for title, kind in kinds.items():
        groups[title,] = kind, []  # before those inside
        for leaf in leaves_of(kind):
            name, flag, is_truth = leaf.path[-1], _flag(leaf.path), leaf.hint is bool
            is_required = leaf.default is dataclasses.MISSING
            if not (everything or is_required or _is_everyday(leaf.owner, name)):
                is_whole = False
                continue
            marks: list[Any] = [tyro.conf.Positional] if leaf.path == (positional,) else []
            others = [] if marks else [n for n, of in names.named.items() if n != flag and of[0].path == leaf.path]
            about_it = field_docs(leaf.owner).get(name, "")
            arg = tyro.conf.arg(
                name=None if marks else flag,
                aliases=[f"--{other}" for other in others],
                prefix_name=False,
                help=about_it if everything else re.split(r"(?<=\.)(?<!et al\.) ", about_it)[0],
                metavar=None if is_truth else name.upper() if marks else values.metavar(leaf.hint),
                help_behavior_hint="(required)" if is_required else _default(leaf.default),
            )
            as_text: Any = Annotated[(bool if is_truth else str, arg, *marks)]
            _, found = groups.setdefault((title, *leaf.path[:-1]), (leaf.owner, []))
            found.append((name, as_text, dataclasses.field(default=False if is_truth else "")))
    fields = []
    for path, (owner, found) in [(path, group) for path, group in groups.items() if group[1]]:
        made = dataclasses.make_dataclass("_".join(path), found)
        made.__doc__ = (owner.__doc__ or "").partition("\n")[0] if path[1:] else ""
        shown_as = tyro.conf.arg(name=".".join(path))
        fields.append(("_".join(path), Annotated[(made, shown_as)], dataclasses.field(default_factory=made)))
    more = "" if is_whole else f"\n\nAll settings: {prog} {HELP_ALL}"
    with contextlib.ExitStack() as plain:
        if os.environ.get("NO_COLOR"):  # https://no-color.org; tyro knows only terminals that are dumb
            plain.callback(os.environ.__setitem__, "TERM", os.environ.get("TERM", ""))
            os.environ["TERM"] = "dumb"
        tyro.cli(dataclasses.make_dataclass("Help", fields), args=["--help"], prog=prog, description=about + more)


def _is_everyday(cls: type, name: str) -> bool:
    """Whether the short help shows a setting: its class lists it in ``everyday``, or has no ``everyday``."""
    owner = next((base for base in cls.__mro__ if name in inspect.get_annotations(base)), cls)
    chosen = [one for base in cls.__mro__ for one in base.__dict__.get("everyday", ())]
    return name in chosen or "everyday" not in owner.__dict__


def _default(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "" if value is None else f"(default: {'yes' if value else 'no'})"
    text = " ".join(map(str, value)) or "none" if isinstance(value, tuple) else value
    return f"(default: {text if isinstance(text, str) else shown(value)})"
