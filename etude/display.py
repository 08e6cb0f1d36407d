# SPDX-License-Identifier: Apache-2.0
"""How things look when they are printed: one short line each, and a small table in a notebook."""

import html
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from etude.errors import printable

LONGEST: Final = 180
"""Characters of a line that says what a thing is."""

_values = reprlib.Repr()
_values.maxstring = _values.maxother = 60
_values.maxdict = _values.maxlist = _values.maxtuple = 6


def short(thing: Any, *words: str, **shown: Any) -> str:
    """What a thing is, in one line: ``PPO(seed=1)``. What makes it longer than `LONGEST` is counted only.

    Args:
        thing: Whose class it begins with.
        words: Are shown as they are.
        shown: Values by name.
    """
    parts = [*words, *(f"{name}={_value(value)}" for name, value in shown.items())]
    text = f"{type(thing).__name__}("
    for number, part in enumerate(parts):
        if len(text) + len(part) > LONGEST - 20:
            return printable(f"{text}{', ' if number else ''}and {len(parts) - number} more)")
        text += f"{', ' if number else ''}{part}"
    return printable(f"{text})")


def _value(value: Any) -> str:
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    if isinstance(value, float):
        return f"{value:.5g}"
    return " ".join(_values.repr(value).split())


def table(title: str, rows: Mapping[str, str] | Sequence[Sequence[str]]) -> str:
    """A small table as HTML, with its texts escaped.

    Args:
        title: What stands above it.
        rows: The cells; the first of each row says what the others are.
    """
    cells = [[name, text] for name, text in rows.items()] if isinstance(rows, Mapping) else rows
    lines = [
        "<tr>"
        + "".join(f"<{tag}>{_escaped(cell)}</{tag}>" for cell, tag in zip(row, _tags(row), strict=True))
        + "</tr>"
        for row in cells
    ]
    return f"<table><caption>{_escaped(title)}</caption>{''.join(lines)}</table>"


def _tags(row: Sequence[str]) -> list[str]:
    return ["th", *["td"] * (len(row) - 1)]


def _escaped(text: str) -> str:
    return html.escape(printable(text))
