# SPDX-License-Identifier: Apache-2.0
import dataclasses
from typing import Literal

import pytest

from etude.cli.flags import leaves_of, merged, parse
from etude.errors import SettingsError
from etude.settings import from_dict, settings


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
    assert [leaf.flag for leaf in leaves_of(Some)] == [
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
    for words in ("Tests.", "PATH", "(required)", "How fast. (default: 3e-4)", "{a,b}", "--inner.sizes INT ...", "3 4"):
        assert words in text


def test_nested_mappings_are_merged():
    low, high = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 4}, "e": 5}
    assert merged(low, high) == {"a": 1, "b": {"c": 4, "d": 3}, "e": 5}
