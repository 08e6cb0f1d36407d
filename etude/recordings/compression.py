# SPDX-License-Identifier: Apache-2.0
"""How the columns of a recording are compressed, as their user names it."""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias

from etude import columns as col
from etude.errors import DataError, SettingsError
from etude.settings import nearest

CompressionLike: TypeAlias = str | Mapping[str, str]
"""One codec for all columns, or codecs by column (``{"obs/camera": "zstd:3", "obs": "lz4"}``), which may be written as
text (``"obs/camera=zstd:3,obs=lz4"``)."""

LEVELS: Final[Mapping[str, tuple[int, int] | None]] = {
    "none": None,
    "snappy": None,
    "lz4": (1, 12),
    "gzip": (1, 9),
    "brotli": (0, 11),
    "zstd": (1, 22),
}
"""The codecs that Parquet knows, with the levels that each takes, if any."""


class Codec(NamedTuple):
    """How a column is compressed."""

    name: str
    """A key of `LEVELS`."""
    level: int | None = None
    """None is the codec's own default."""


ALL: Final = ""
"""Stands for all columns."""


def codecs(given: CompressionLike | None) -> dict[str, Codec]:
    """The codecs by column or root of columns; `ALL` stands for all.

    Raises:
        SettingsError: a codec is unknown, or takes no such level.
    """
    if isinstance(given, str):
        parts = [part.rpartition("=") for part in given.split(",")]
        given = {root.strip(): words.strip() for root, _, words in parts}
    by_root = dict(given or {})
    return {root: _codec(root, words) for root, words in by_root.items()}


def _codec(root: str, words: str) -> Codec:
    where = f"`compression` of `{root}`" if root else "`compression`"
    name, colon, text = words.partition(":")
    if name not in LEVELS:
        near = nearest(name, LEVELS)
        hint = f" Nearest: `{near}`." if near else ""
        raise SettingsError(f"{where} is {words!r}; known are {', '.join(LEVELS)}, such as `zstd:3`.{hint}")
    if not colon:
        return Codec(name)
    levels = LEVELS[name]
    if levels is None:
        raise SettingsError(f"{where} is {words!r}, but {name} has no levels: leave {':' + text!r} out.")
    low, high = levels
    if not text.isdecimal() or not low <= int(text) <= high:
        raise SettingsError(f"{where} is {words!r}, but a level of {name} is a number from {low} to {high}.")
    return Codec(name, int(text))


def codec_of(column: str, by_root: Mapping[str, Codec]) -> Codec | None:
    """The codec of a column: that of the longest root that it is under; None if there is none.

    What is said of observations holds for ``final_obs`` too.
    """
    name = column
    if col.is_under(column, col.FINAL_OBS) and not any(col.is_under(column, root) for root in by_root):
        name = col.OBS + column[len(col.FINAL_OBS) :]
    roots = [root for root in by_root if root == ALL or col.is_under(name, root)]
    return by_root[max(roots, key=len)] if roots else None


def check_roots(by_root: Mapping[str, Codec], columns: Iterable[str]) -> None:
    """Raise a DataError where a codec is for a column that is not among ``columns``."""
    there = list(columns)
    for root in by_root:
        if root != ALL and not col.under(there, root):
            near = nearest(root, there)
            hint = f" Nearest: `{near}`." if near else ""
            raise DataError(f"`compression` names `{root}`, but there is no such column: {', '.join(there)}.{hint}")
