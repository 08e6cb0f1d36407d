# SPDX-License-Identifier: Apache-2.0
"""Command-line flags for settings classes: their names, values and help, which tyro writes; and settings files.

A flag and a line of a settings file with the same words give the same value. `etude.settings` checks it, so that a
wrong value gets the same message in both.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import os
import re
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

from etude.errors import SettingsError
from etude.settings import (
    Leaf,
    field_docs,
    fits,
    from_dict,
    leaves_of,
    main_setting,
    nearest,
    options_of,
    other_names,
    pointer,
    settings,
    settings_inside,
    shown,
)
from etude.urls import redacted

HELP, HELP_ALL = ("-h", "--help"), "--help-all"

Converters = Mapping[Any, Callable[[str], Any]]
"""By annotated type: functions that turn a word into a value, for types that only Python can write."""


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
    converters: Converters | None = None,
) -> dict[str, dict[str, Any]]:
    """Parse a command line into the values of several settings classes, each as a nested mapping; their types are not
    checked.

    Args:
        kinds: Settings classes by their titles in help. A short name that several share belongs to the first.
        args: The arguments.
        prog: The command, such as ``etude train ppo``. Messages use its last word as the owner of the settings.
        about: What the command does, for its help.
        positional: A field that is given without a flag.
        converters: Converters for types that only Python can write.

    Raises:
        SettingsError: a flag is unknown (the nearest is named), is given twice, or has too few or too many values.
        SystemExit: the arguments ask for help, which is written.
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
                inner[leaf.path[-1]] = parse_words(leaf.hint, given.pop(leaf.path), where, converters or {})
    return found


@settings
class TableOptions:
    """Options of commands that read data."""

    columns: Mapping[str, Any] | None = None
    """For a table (CSV, Parquet, JSON, Arrow): what its columns are, as in obs=speed,load action=command reward=score
    episode_id=trip t=tick propensity=p. `etude data info TABLE` suggests it."""

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
        groups: The settings. A short name that several groups share belongs to the first.
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
        """Return the words of each setting that is given, by its path, and the words that belong to no setting."""
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
            is_one = is_one_or_many(leaf.hint) or is_by_name(leaf.hint)
            if leaf.path in given and is_one:  # else the last one counts
                raise SettingsError(f"{owner} has --{name} twice: put all its values behind one, as A B.")
            words = given[leaf.path] = [value] if equals else [truth] if leaf.hint is bool else []
            room = 0 if words else float("inf") if takes_many(leaf.hint) else 1
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
            if not word.startswith("--"):
                return SettingsError(f"{owner} can't take {word!r}: write -{word}. {more}")
            which = " or ".join(f"`{_flag(leaf.path)}`" for leaf in several)
            return SettingsError(f"{owner} has more than one setting `{name}`: write {which}.")
        ours = {leaf.path[0]: flag for flag, leaf in reversed(self.full.items()) if len(leaf.path) > 1}
        ours |= {leaf.own_name: flag for flag, leaf in reversed(self.full.items())}
        same = next((ours[other] for other in other_names(name) if other in ours), None)
        near = same or nearest(_canonical(name), self.named)
        if near is None:
            return SettingsError(f"{owner} has no setting `{name}`. {more}")
        why = self.unused.get(".".join(self.named[near][0].path))
        about = self.named[near][0].about if why is None else f"which has no effect in {owner}: {why}"
        hint = pointer(name, near, about, is_same=same is not None)
        return SettingsError(f"{owner} has no setting `{name}`.{hint} {more}")


def _flag(path: Sequence[str]) -> str:
    """The flag's name without leading dashes: ``network.log-std-init``."""
    return ".".join(map(_canonical, path))


def _canonical(word: str) -> str:
    return word.replace("_", "-").rstrip("-")


# -- values -----------------------------------------------------------------------------------------------------------


def takes_many(hint: Any) -> bool:
    """Whether a flag takes any number of words: its type is a tuple or a mapping, or None."""
    kinds = {typing.get_origin(kind) for kind in options_of(hint) if kind is not type(None)}
    return kinds <= {tuple, Mapping} or is_one_or_many(hint)


def metavar(hint: Any) -> str:
    """The placeholder of a flag's value in help: ``INT``, ``{a,b}|none``, ``TEXT ...``."""
    if is_one_or_many(hint):
        return "NAME ..."
    kinds, many = [kind for kind in options_of(hint) if not dataclasses.is_dataclass(kind)], takes_many(hint)
    items = [typing.get_args(kind)[0] if many and typing.get_origin(kind) is tuple else kind for kind in kinds]
    found = list(dict.fromkeys(map(_named, items)))
    return ("NAME" if "NAME" in found else "|".join(found)) + (" ..." if many else "")  # NAME: only Python can write it


def parse_words(hint: Any, words: Sequence[str], where: str, converters: Converters) -> Any:
    """Convert the words after a flag to its value, like `made` for a value in a settings file.

    Raises:
        SettingsError: there is no word, there are too many, they have the wrong type, or a name has two values.
    """
    if not words and (is_one_or_many(hint) or not takes_many(hint)):
        raise SettingsError(f"{where} needs a value, {metavar(hint)}.")
    if not takes_many(hint) and len(words) > 1:
        raise SettingsError(f"{where} takes one value, not {len(words)}: {' '.join(words)}.")
    value, usage = _parse_words(hint, words, where, converters), metavar(hint)
    pairs = is_by_name(hint) and any("=" in word for word in words)
    if not pairs and "NAME" not in usage.replace("NAME=VALUE", "") and not fits(hint, value, text=True):
        such = {"NUMBER|STEP": ", such as 3e-4 or 0:3e-4,100000:0", "INT ...": ", such as 64 64"}
        such["NAME=VALUE"] = ", such as obs=speed,load action=command" if where.endswith(".columns") else ""
        example = next((text for kind, text in such.items() if usage.startswith(kind)), "")
        raise SettingsError(f"{where} is {' '.join(words)!r}, expected {usage}{example}.")
    return value


def _parse_words(hint: Any, words: Sequence[str], where: str, converters: Converters) -> Any:
    many = takes_many(hint)
    if not many or (is_one_or_many(hint) and len(words) == 1):
        return made(hint, words[0], converters)
    if [word.lower() for word in words] == ["none"]:
        return None if type(None) in options_of(hint) else ()
    if not is_by_name(hint) or not any("=" in word for word in words):
        return made(hint, tuple(words), converters)
    pairs = [word.partition("=") for word in words]
    if max(Counter(key for key, _, _ in pairs).values()) > 1:
        raise SettingsError(f"{where} has one name twice: {' '.join(words)}.")
    return made(hint, {key: _json(value) if equals else None for key, equals, value in pairs}, converters)


def made(hint: Any, value: Any, converters: Converters) -> Any:
    """Convert a value from a settings file: replace `none`, and names of Python objects, by what they stand for."""
    by_name = is_by_name(hint)
    if isinstance(value, str) and value.lower() == "none" and type(None) in options_of(hint):
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


def convert_file(cls: type, written: Mapping[str, Any], converters: Converters) -> dict[str, Any]:
    """Apply `made` to all settings in a file, including nested ones; an empty group of settings is left out."""
    hints, inside = typing.get_type_hints(cls), settings_inside(cls)
    found = {name: value for name, value in written.items() if value is not None or name not in inside}
    for name, value in found.items():
        if name in inside and isinstance(value, Mapping):
            found[name] = convert_file(inside[name], value, converters)
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
    """Whether the type allows either one string or function, or several values."""
    kinds = {*options_of(hint)}
    return {str, tuple[Any, ...]} <= kinds or {tuple, Callable} <= {*map(typing.get_origin, kinds)}


def is_by_name(hint: Any) -> bool:
    """Whether a flag takes NAME=VALUE: its type is a mapping, or may be one."""
    return any(typing.get_origin(kind) is Mapping for kind in options_of(hint))


def _named(kind: Any) -> str:
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return "{" + ",".join(map(str, inner)) + "}"
    if typing.get_origin(kind) is tuple:
        return ",".join(
            "STEP:NUMBER" if len(options_of(one)) > 1 else "..." if one is ... else _named(one) for one in inner
        )
    return _NAMES.get(typing.get_origin(kind) or kind, "NAME")


_NAMES = {int: "INT", float: "NUMBER", str: "TEXT", bool: "YES|NO", type(None): "none", Mapping: "NAME=VALUE"}


# -- files ------------------------------------------------------------------------------------------------------------


def read(path: str) -> dict[str, Any]:
    """Read a YAML or JSON file that contains a mapping; an empty file gives {}.

    Raises:
        SettingsError: the file does not exist, is of another kind, can't be parsed, is not a mapping, is nested too
            deeply, or has a name twice.
    """
    if Path(path).suffix not in (".yaml", ".yml", ".json"):
        raise SettingsError(f"can't read the settings {redacted(path)}: its name must end in .yaml, .yml or .json.")
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        found = json.loads(text, object_pairs_hook=_once) if path.endswith(".json") else yaml.load(text, _loader())
        _check_nesting(found)
    except RecursionError:
        raise SettingsError(f"{path} can't be parsed: it is nested too deeply.") from None
    except OSError as error:
        raise SettingsError(f"can't read the settings {redacted(path)}: {error.strerror}.") from error
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
    """Make a mapping of pairs; raise a ValueError if a name occurs twice."""
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


# -- help -------------------------------------------------------------------------------------------------------------


def summary(cls: type) -> str:
    """The first paragraph of a class's docstring, as one line; empty without a docstring."""
    return " ".join((cls.__doc__ or "").partition("\n\n")[0].split())


def _write_help(
    kinds: Mapping[str, type], names: FlagNames, prog: str, about: str, positional: str | None, *, everything: bool
) -> None:
    """Write the help of a command, with all settings or only the everyday ones, and exit."""
    import tyro

    from etude.spawning import variable_set

    groups: dict[tuple[str, ...], tuple[type, list[Any]]] = {}
    is_whole = True
    for title, kind in kinds.items():
        groups[title,] = kind, []  # so that it comes before the groups inside it
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
                metavar=None if is_truth else name.upper() if marks else metavar(leaf.hint),
                help_behavior_hint="(required)" if is_required else _default(leaf.default),
            )
            as_text: Any = Annotated[(bool if is_truth else str, arg, *marks)]
            _, found = groups.setdefault((title, *leaf.path[:-1]), (leaf.owner, []))
            found.append((name, as_text, dataclasses.field(default=False if is_truth else "")))
    fields = []
    for path, (owner, found) in [(path, group) for path, group in groups.items() if group[1]]:
        made = dataclasses.make_dataclass("_".join(path), found)
        made.__doc__ = summary(owner) if path[1:] else ""
        shown_as = tyro.conf.arg(name=".".join(path))
        fields.append(("_".join(path), Annotated[(made, shown_as)], dataclasses.field(default_factory=made)))
    more = "" if is_whole else f"\n\nAll settings: {prog} {HELP_ALL}"
    # https://no-color.org; tyro omits colors only if the terminal is dumb
    with variable_set("TERM", "dumb") if os.environ.get("NO_COLOR") else contextlib.nullcontext():
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
