# SPDX-License-Identifier: Apache-2.0
"""Helpers for printing objects: one-line reprs, JSON, and small HTML tables for notebooks."""

import html
import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from etude.errors import printable

MAX_LENGTH: Final = 180
"""The largest number of characters in a repr."""

_values = reprlib.Repr()
_values.maxstring = _values.maxother = 60
_values.maxdict = _values.maxlist = _values.maxtuple = 6


def short(thing: Any, *words: str, **shown: Any) -> str:
    """Return a one-line repr such as ``PPO(seed=1)``. Parts that would exceed `MAX_LENGTH` are only counted.

    Args:
        thing: The object; the repr begins with the name of its class.
        words: Texts that are shown unchanged, before the values.
        shown: Values that are shown as ``name=value``.
    """
    parts = [*words, *(f"{name}={_value(value)}" for name, value in shown.items())]
    text = f"{type(thing).__name__}("
    for number, part in enumerate(parts):
        if len(text) + len(part) > MAX_LENGTH - 20:
            return printable(f"{text}{', ' if number else ''}and {len(parts) - number} more)")
        text += f"{', ' if number else ''}{part}"
    return printable(f"{text})")


def counted(count: int, what: str) -> str:
    """Format a count with its noun, such as ``3 episodes``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def rounded(value: float) -> str:
    """Format a number with about three digits, and at least one after the point: ``0.955``, ``3.0``, ``1,234.5``."""
    is_small = math.isfinite(value) and 0 < abs(value) < 10
    places = min(6, 2 - math.floor(math.log10(abs(value)))) if is_small else 1
    whole, point, part = f"{value:,.{places}f}".partition(".")
    return f"{whole}{point}{part.rstrip('0') or '0'}" if point else whole


def json_line(value: Any) -> str:
    """Return plain data as JSON on one line; NaN and infinities become null."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _value(value: Any) -> str:
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    if isinstance(value, float):
        return f"{value:.5g}"
    return " ".join(_values.repr(value).split())


def table(title: str, rows: Mapping[str, str] | Sequence[Sequence[str]]) -> str:
    """Return a small HTML table. All texts are escaped.

    Args:
        title: The caption.
        rows: The rows of cells, or a mapping from heading to text. The first cell of each row is its heading.
    """
    lines = ""
    for heading, *cells in rows.items() if isinstance(rows, Mapping) else rows:
        lines += f"<tr><th>{_escaped(heading)}</th>{''.join(f'<td>{_escaped(cell)}</td>' for cell in cells)}</tr>"
    return f"<table><caption>{_escaped(title)}</caption>{lines}</table>"


def _escaped(text: str) -> str:
    return html.escape(printable(text))
