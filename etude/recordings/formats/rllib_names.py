# SPDX-License-Identifier: Apache-2.0
"""Etude's columns in RLlib's words, for what is written for RLlib."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.recordings.formats.rllib_columns import NAMES
from etude.spaces import Space, leaves

_EXTRA: Final = "extra"
_OWN: Final = {own: name for name, own in NAMES.items()}


def rllib_name(root: str) -> str:
    """RLlib's name for one of our columns; the inverse of `etude.recordings.formats.rllib_columns.own_name`."""
    return _OWN.get(root, root)


def extras(names: Iterable[str], spaces: Mapping[str, Space]) -> list[str]:
    """The columns that are neither observation, action, reward nor info: what a module put out, in the main."""
    own = {name for root, space in spaces.items() for name in leaves(space, root)}
    return [n for n in names if n not in own and n != col.REWARD and not col.is_under(n, col.INFO)]


def split_texts(columns: Columns) -> tuple[Columns, list[str]]:
    """The columns of numbers, and the names of those that hold text."""
    numbers = {name: column for name, column in columns.items() if column.dtype != object}
    return numbers, [name for name in columns if name not in numbers]


def nested(columns: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Columns by path as maps in maps: ``{"state_out/h": h}`` becomes ``{"state_out": {"h": h}}``."""
    out: dict[str, Any] = {}
    for name, column in columns.items():
        *path, last = name.split(col.SEPARATOR)
        inner = out
        for key in path:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise DataError(f"column `{name}` is a part of a column that has numbers itself. Rename one of them.")
        inner[last] = column
    return out


def infos_of(columns: Columns) -> dict[str, Any]:
    """The infos as maps in maps of arrays, without the ``info`` before their names; empty where there are none."""
    found = nested(col.subtree(columns, col.INFO)).get(col.INFO, {})
    return found if isinstance(found, dict) else {col.INFO: found}


def outputs(columns: Columns) -> dict[str, Any]:
    """Columns that are RLlib's extra model outputs, by its names: arrays, or maps of them."""
    found = nested(columns)
    others = found.pop(_EXTRA, {})  # names that would be words of ours, see `own_name`
    out = {rllib_name(root): value for root, value in found.items()}
    return out | (others if isinstance(others, dict) else {_EXTRA: others})
