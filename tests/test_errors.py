# SPDX-License-Identifier: Apache-2.0
"""Text of strangers, as it is shown."""

import copy
import unicodedata

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from etude import errors
from etude.errors import CheckpointError, EtudeError, printable, printable_lines

HOSTILE = "\x1b]0;owned\x07\x1b[31mred\x9b2J\x7f\b\r\u202egnp.exe\u2028\u200b\x00"


@given(st.text())
def test_nothing_but_letters_reaches_a_terminal(text):
    shown = printable(text)
    assert not [c for c in shown if unicodedata.category(c).startswith("C") or c in "\n\r\u2028\u2029"]
    if text.isprintable():
        assert shown == text
    assert printable(shown) == shown
    assert printable_lines(f"{text}\n{text}").split("\n")[0] == printable(text.split("\n")[0])


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if isinstance(kind, type)])
def test_what_an_error_names_is_safe_to_print(kind):
    error = kind(f"there is no `{HOSTILE}`.\nGive another.")
    assert issubclass(kind, EtudeError)
    assert str(error).isascii()
    assert str(error).splitlines()[0].isprintable()
    assert str(error).splitlines()[1] == "Give another."
    assert str(copy.copy(error)) == str(error)
    assert repr(error).isprintable()


def test_letters_of_all_people_are_shown_as_they_are():
    assert printable("Größe, 観測 … é 🙂") == "Größe, 観測 … é 🙂"
    assert str(CheckpointError("no `观察`")) == "no `观察`"


def test_bounds_of_boxes_are_on_one_line_without_padding():
    space = spaces.Dict({"x": spaces.Box(np.arange(40, dtype=np.float32), np.full(40, np.inf, np.float32))})
    assert "\n" in str(space)
    assert str(EtudeError(f"found {space},  wanted\n  nothing")) == (
        f"found {' '.join(str(space).split())},  wanted\n  nothing"
    )
