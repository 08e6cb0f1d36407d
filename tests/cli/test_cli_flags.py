# SPDX-License-Identifier: Apache-2.0
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pytest

from etude.cli import options as options_file
from etude.cli.flags import FlagNames, parse
from etude.errors import SettingsError
from etude.settings import _other_libraries, from_dict, leaves_of, merged, settings


@settings
class Inner:
    """Inside."""

    everyday: ClassVar = ("wide",)

    wide: bool = True
    """Width or not."""

    sizes: tuple[int, ...] = (3, 4)
    """Sizes. Of it."""


@settings
class Some:
    """For these tests."""

    path: str
    """Where."""

    rate: float | tuple[tuple[int, float] | Literal["cosine"], ...] = 3e-4
    """How fast. Or how slow."""

    lambda_: float = 0.5
    """Decay."""

    cap: float | None = 1.0
    """Limit; none is none."""

    kind: Literal["a", "b"] = "a"
    """Which."""

    conv: tuple[tuple[int, int, int], ...] | None = None
    """Layers."""

    loud: bool = False
    """Be loud."""

    table: Mapping[str, Any] | None = None
    """By name."""

    inner: Inner = dataclasses.field(default_factory=Inner)
    """More."""


def parsed(*args, cls=Some, positional="path", **more):
    return parse({"some": cls}, args, prog="etude some", about="Tests.", positional=positional, **more)["some"]


def refused(*args, **more):
    with pytest.raises(SettingsError) as error:
        parsed(*args, **more)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], {}),
        (["x"], {"path": "x"}),
        (["--rate", "1e-3"], {"rate": 1e-3}),
        (["--rate=2"], {"rate": 2.0}),
        (["--lambda", "-0.25", "x"], {"lambda_": -0.25, "path": "x"}),
        (["--lambda_", "1"], {"lambda_": 1.0}),
        (["--cap", "none"], {"cap": None}),
        (["--loud", "x"], {"loud": True, "path": "x"}),
        (["--no-loud", "--inner.no-wide"], {"loud": False, "inner": {"wide": False}}),
        (["--inner.sizes", "1", "2", "--loud"], {"inner": {"sizes": (1, 2)}, "loud": True}),
        (["--inner.sizes", "1,2"], {"inner": {"sizes": (1, 2)}}),
        (["--inner.sizes"], {"inner": {"sizes": ()}}),
        (["--conv", "1,2,3", "4,5,6"], {"conv": ((1, 2, 3), (4, 5, 6))}),
        (["--conv", "none"], {"conv": None}),
        (["--cap", "1", "--loud=yes", "--cap", "2"], {"cap": 2.0, "loud": True}),
        (["--table", "a=1", 'b=["c"]'], {"table": {"a": "1", "b": ["c"]}}),
    ],
)
def test_what_is_given_and_nothing_else(args, expected):
    given = parsed(*args)
    full = from_dict(Some, {"path": "there", **given}, owner="some")
    assert given.keys() == expected.keys()
    assert full == from_dict(Some, {"path": "there", **expected}, owner="some")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--rat", "1"], ["`rat`", "`rate`", "how fast", "3e-4", "etude some --help-all"]),
        (["--inner.size=1"], ["`inner.size`", "`inner.sizes`", "(3, 4)"]),
        (["--zzzz"], ["`zzzz`"]),
        (["--no-rate"], ["`no-rate`", "`rate`"]),
        (["--rate"], ["some.rate", "NUMBER"]),
        (["--rate", "fast"], ["some.rate", "'fast'", "NUMBER", "3e-4"]),
        (["--kind", "c"], ["some.kind", "'c'", "{a,b}"]),
        (["--inner.sizes", "8", "x"], ["some.inner.sizes", "'8 x'", "INT ...", "64 64"]),
        (["--table", "a=1", "a=2"], ["some.table", "one name twice", "a=1 a=2"]),
        (["--table", "a=[1"], ["[1", "JSON"]),
        (["x", "y"], ["some.path", "x y"]),
    ],
)
def test_what_is_wrong_is_named_with_the_nearest_right_name(args, named):
    said = refused(*args)
    assert all(words in said for words in named), said


def test_a_word_too_many():
    assert "'x'" in refused("--path", "here", "x", positional=None)
    assert "--env CartPole-v1" in refused("CartPole-v1", cls=options_file.ALGORITHMS["ppo"].Config, positional=None)


def test_words_become_what_converters_make():
    given = parsed("--cap", "7", converters={float | None: lambda word: int(word) * 2})
    assert given == {"cap": 14}


def helped(capsys, *args, **more):
    with pytest.raises(SystemExit) as stop:
        parsed(*args, **more)
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_has_docs_and_defaults_and_all_of_them_where_asked(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    short, whole = helped(capsys, "--help"), helped(capsys, "--help-all")
    for words in ("Tests.", "PATH", "(required)", "How fast. (default: 3e-4)", "{a,b}", "--loud, --no-loud", "--wide"):
        assert words in short
    for words in ("How fast. Or how slow. (default: 3e-4)", "--sizes INT ...", "--inner.wide", "3 4"):
        assert words in whole
    assert "--sizes" not in short
    assert "etude some --help-all" in short


@settings
class Crew:
    """Settings with a main one."""

    main_setting: ClassVar[str] = "size"

    size: int = 0
    """How many."""

    min_batch: int | None = None
    """At least."""

    kind: Literal["x", "y"] = "x"
    """Which."""

    restart: bool = True
    """Or not."""


@settings
class Other:
    """Settings with a name that others have, too."""

    width: int = 1
    """Of one."""

    min_batch: int = 2
    """Another."""


@settings
class Nets:
    """For these tests, too."""

    kind: str = "b"
    """A name that is also inside."""

    width: int = 3
    """Likewise."""

    crew: Crew = Crew()
    """Inside."""

    other: Other = Other()
    """Inside."""

    nets: tuple[str, ...] | Mapping[str, type | None] | None = None
    """By name."""


NETS = {"cls": Nets, "positional": None, "converters": {
    tuple[str, ...] | Mapping[str, type | None] | None: {"int": int, "str": str}.__getitem__
}}  # fmt: skip


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--crew", "2"], {"crew": {"size": "2"}}),
        (["--size=2"], {"crew": {"size": "2"}}),
        (["--crew.size", "2"], {"crew": {"size": "2"}}),
        (["--crew.min-batch", "4", "--crew.size", "2"], {"crew": {"min_batch": "4", "size": "2"}}),
        (["--other.min_batch", "4"], {"other": {"min_batch": "4"}}),
        (["--restart"], {"crew": {"restart": "yes"}}),
        (["--no-restart"], {"crew": {"restart": "no"}}),
        (["--crew.no-restart"], {"crew": {"restart": "no"}}),
        (["--kind", "b", "--crew.kind", "y"], {"kind": "b", "crew": {"kind": "y"}}),
        (["--width", "1", "--other.width", "2"], {"width": "1", "other": {"width": "2"}}),
        (["--nets", "red", "blue"], {"nets": ("red", "blue")}),
        (["--nets", "red=int", "blue"], {"nets": {"red": int, "blue": None}}),
        (["--nets", "red=int", "blue=none"], {"nets": {"red": int, "blue": None}}),
        (["--nets", "none"], {"nets": None}),
        (["--nets"], {"nets": ()}),
    ],
)
def test_settings_inside_others_have_short_names_where_these_are_their_own(args, expected):
    assert parsed(*args, **NETS) == expected


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--crew", "2", "--crew.size", "2"], ["--crew and --crew.size"]),
        (["--size", "2", "--crew", "3"], ["--size and --crew"]),
        (["--min-batch", "2"], ["`min-batch`", "`crew.min-batch` or `other.min-batch`"]),
        (["--siez", "2"], ["`siez`", "`size`", "how many"]),
        (["--crew.rstart"], ["`crew.restart`"]),
        (["--nets", "a=int", "a"], ["nets", "one name twice", "a=int a"]),
        (["--crew.size", "2", "3"], ["'3'"]),
    ],
)
def test_names_that_are_wrong_twice_or_shared(args, named):
    said = refused(*args, **NETS)
    assert all(words in said for words in named), said


def test_the_first_class_has_a_short_name_that_others_have_too():
    kinds = {"one": Crew, "two": Other}
    found = parse(kinds, ["--min-batch", "3", "--width", "4"], prog="etude some", about="")
    assert found == {"one": {"min_batch": "3"}, "two": {"width": "4"}}


def test_help_shows_all_names(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = helped(capsys, "--help", **NETS)
    for words in (
        "--crew INT", "--crew.size INT", "--crew.min-batch INT|none", "--other.min-batch", "--restart, --no-restart",
        "--crew.restart", "--nets TEXT|NAME=VALUE|none ...", "Settings with a main one.",
    ):  # fmt: skip
        assert words in text


@pytest.mark.parametrize("cls", options_file.ALGORITHMS.values(), ids=options_file.ALGORITHMS)
def test_every_setting_of_every_algorithm_has_a_flag_and_other_libraries_words_are_known(cls):
    leaves = leaves_of(cls.Config)
    names = FlagNames(leaves)
    assert len(names.full) == len(leaves)
    assert all(names.find(name) is leaf for name, leaf in names.full.items())
    own = {leaf.path[-1] for leaf in leaves}
    for ours, others in _other_libraries()["names"].items():
        for other in others.split() if ours in own else ():
            if other not in own:
                said = str(names.unknown(f"--{other.replace('_', '-')}", cls.name, "etude train"))
                assert "Here it is" in said, said


def test_nested_mappings_are_merged():
    low, high = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 4}, "e": 5}
    assert merged(low, high) == {"a": 1, "b": {"c": 4, "d": 3}, "e": 5}
