# SPDX-License-Identifier: Apache-2.0
import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import pytest

from etude.cli.flags import Names, parse
from etude.errors import SettingsError
from etude.settings import from_dict, leaves_of, merged, settings


@settings
class Inner:
    """Inside."""

    wide: bool = True
    """Width or not."""

    sizes: tuple[int, ...] = (3, 4)
    """Sizes. Of it."""


@settings
class Some:
    """For these tests."""

    path: str
    """Where."""

    rate: float | tuple[tuple[int, float], ...] = 3e-4
    """How fast."""

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

    inner: Inner = dataclasses.field(default_factory=Inner)
    """More."""


def parsed(*args, positional="path"):
    (given,) = parse([Some], args, prog="etude some", about="Tests.", positional=positional)
    return given


def test_a_flag_for_every_field_nested_ones_with_a_dot():
    assert [names[0] for names in Names(leaves_of(Some)).of.values()] == [
        "path", "rate", "lambda", "cap", "kind", "conv", "loud", "inner.wide", "inner.sizes",
    ]  # fmt: skip


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
        (["--inner.sizes"], {"inner": {"sizes": ()}}),
        (["--conv", "1,2,3", "4,5,6"], {"conv": ((1, 2, 3), (4, 5, 6))}),
        (["--conv", "none"], {"conv": None}),
    ],
)
def test_what_is_given_and_nothing_else(args, expected):
    given = parsed(*args)
    full = from_dict(Some, {"path": "there", **given}, owner="some")
    assert given.keys() == expected.keys()
    assert full == from_dict(Some, {"path": "there", **expected}, owner="some")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--rat", "1"],
            r"some has no setting `rat`\. Nearest: `rate` \(how fast, default 3e-4\)\. All settings: etude ",
        ),
        (
            ["--inner.size=1"],
            r"some has no setting `inner\.size`\. Nearest: `inner\.sizes` \(sizes, default \(3, 4\)\)",
        ),
        (["--zzzz"], r"some has no setting `zzzz`\. All settings: etude some --help"),
        (["--rate"], r"some: Missing value for argument '--rate'.*All settings: etude some --help"),
        (["x", "y"], r"some\.path takes one value, not 2: x y"),
    ],
)
def test_what_is_wrong_is_named_with_the_nearest_right_name(args, message):
    with pytest.raises(SettingsError, match=message):
        parsed(*args)


def test_a_word_too_many():
    with pytest.raises(SettingsError, match=r"some can't take 'x': flags begin with `--`"):
        parsed("--path", "here", "x", positional=None)


def test_words_become_what_converters_make():
    (given,) = parse(
        [Some], ["--cap", "7"], prog="etude some", about="", converters={float | None: lambda word: int(word) * 2}
    )
    assert given == {"cap": 14}


def test_help_has_docs_and_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        parsed("--help")
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for words in (
        "Tests.",
        "PATH",
        "(required)",
        "How fast. (default: 3e-4)",
        "{a,b}",
        "--sizes INT ...",
        "--inner.wide",
        "3 4",
    ):
        assert words in text


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


NETS = {tuple[str, ...] | Mapping[str, type | None] | None: {"int": int, "str": str}.__getitem__}


def nets(*args):
    (given,) = parse([Nets], args, prog="etude nets", about="Tests.", converters=NETS)
    return given


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--crew", "2"], {"crew": {"size": "2"}}),
        (["--size=2"], {"crew": {"size": "2"}}),
        (["--crew.size", "2"], {"crew": {"size": "2"}}),
        (["--crew.min-batch", "4", "--crew.size", "2"], {"crew": {"min_batch": "4", "size": "2"}}),
        (["--other.min_batch", "4"], {"other": {"min_batch": "4"}}),
        (["--restart"], {"crew": {"restart": True}}),
        (["--no-restart"], {"crew": {"restart": False}}),
        (["--crew.no-restart"], {"crew": {"restart": False}}),
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
    assert nets(*args) == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--crew", "2", "--crew.size", "2"], r"^nets: --crew and --crew\.size are one setting: leave out one of them"),
        (["--size", "2", "--crew", "3"], r"^nets: --size and --crew are one setting"),
        (["--restart", "--crew.no-restart"], r"^nets: --restart and --crew\.restart are one setting"),
        (
            ["--min-batch", "2"],
            r"^nets has more than one setting `min-batch`: write `crew\.min-batch` or `other\.min-batch`\.$",
        ),
        (["--siez", "2"], r"^nets has no setting `siez`\. Nearest: `size` \(how many, default 0\)\. All settings: "),
        (["--crew.rstart"], r"Nearest: `crew\.restart` \(or not, default True\)"),
        (["--no-width"], r"^nets has no setting `no-width`"),
        (["--nets", "a=int", "a"], r"^nets\.nets has one name twice: a=int a\.$"),
        (["--crew.size", "2", "3"], r"^nets can't take '3'"),
    ],
)
def test_names_that_are_wrong_twice_or_shared(args, message):
    with pytest.raises(SettingsError, match=message):
        nets(*args)


def test_help_shows_all_names(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        nets("--help")
    text = capsys.readouterr().out
    for words in (
        "--crew INT", "--crew.size INT", "--crew.min-batch INT|none", "--other.min-batch", "--restart, --no-restart",
        "--crew.restart", "--nets TEXT[=NAME] ...", "Settings with a main one.",
    ):  # fmt: skip
        assert words in text


def test_nested_mappings_are_merged():
    low, high = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 4}, "e": 5}
    assert merged(low, high) == {"a": 1, "b": {"c": 4, "d": 3}, "e": 5}
