# SPDX-License-Identifier: Apache-2.0
"""Rows of a table put in order and cut into segments, from their key columns alone."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.recordings.format import cut_long, grouped
from etude.recordings.formats.arrow import Place, is_text, numbers, one_array, strings
from etude.recordings.formats.source import DONE, FLAGS, KEYS

Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class TableIndex:
    """Where segments stand. A position is a place in the order of time; ``order`` gives the row that stands there."""

    order: Ints | None
    """None where rows stand in order."""
    offsets: Ints
    """Of segments, over positions; long ones are cut."""
    goes_on: NDArray[np.bool_]
    """The next segment follows this one: what was observed after its end is the next row's observation."""
    t_start: Ints
    ids: Mapping[str, NDArray[np.object_]]
    """``episode_id``, ``agent_id`` and ``module_id`` of each segment."""
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    parts: Ints
    """Bounds of parts, over segments."""
    stride: int
    """By how much ``t`` counts on from step to step in the table."""
    is_clock: bool
    """``t`` holds points in time in the table."""

    def row_at(self, position: int) -> int:
        """The row at a position."""
        return position if self.order is None else int(self.order[position])


def index_of(
    keys: Mapping[str, pa.ChunkedArray], num_rows: int, has_next: bool, place: Place, *, by_one: bool = False
) -> TableIndex:
    """Put ``num_rows`` rows in order, from those of ``episode_id agent_id module_id t terminated truncated done``
    that are there.

    With ``t``, rows are sorted by it within each agent of each episode; without an episode's id, an episode ends where
    a flag is set or ``t`` does not rise. If ``t`` holds points in time, they only sort: steps are then numbered from 0,
    and rows of the same time have the same number. Without ``t``, rows stand in order of time. Without both, each row
    is a segment of its own where the next observation is known, else rows stand in order and flags end episodes. With
    ``by_one``, ``t`` counts each step: where it rises by more, steps are missing.

    Raises:
        DataError: a key is empty or ill-typed, or nothing says where episodes end; ``place`` names the row.
    """
    terminated, truncated = _ends(keys, num_rows, place)
    done = terminated | truncated
    t = _time(keys[col.T_INDEX], place) if col.T_INDEX in keys else None
    is_clock = t is not None and is_time(keys[col.T_INDEX].type)
    if col.EPISODE_ID not in keys:
        for name in (col.AGENT_ID, col.MODULE_ID):
            if name in keys:
                raise DataError(f"`{name}` is mapped, but `{col.EPISODE_ID}` is not: map it, to tell episodes apart.")
        codes, names = [_episodes_by(t, done, has_next, num_rows, keys)], {}
    else:
        coded = {name: _codes(keys[name], name, place) for name in KEYS if name in keys}
        codes, names = [c for c, _ in coded.values()], {name: strings for name, (_, strings) in coded.items()}
    groups = [c for c, name in zip(codes, names or [col.EPISODE_ID], strict=True) if name != col.MODULE_ID]
    order = _order(groups, t)
    if order is not None:
        codes, groups = [c[order] for c in codes], [c[order] for c in groups]
        terminated, truncated, done = terminated[order], truncated[order], done[order]
        t = None if t is None else t[order]
    return _cut(codes, groups, names, t, is_clock, terminated, truncated, order, by_one=by_one)


def _cut(
    codes: list[Ints],
    groups: list[Ints],
    names: Mapping[str, NDArray[np.object_]],
    t: Ints | None,
    is_clock: bool,
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
    order: Ints | None,
    *,
    by_one: bool,
) -> TableIndex:
    num = len(terminated)
    done = (terminated | truncated)[:-1]
    same = np.ones(max(0, num - 1), bool)
    for c in groups:
        same &= c[1:] == c[:-1]
    heads = np.flatnonzero(np.append(True, ~same)) if num else np.zeros(0, np.int64)
    stride = 1
    if t is None or is_clock:
        counted = np.arange(num) if t is None else np.cumsum(np.append(0, np.diff(t) != 0))[:num]
        t = counted - np.repeat(counted[heads], np.diff(np.append(heads, num)))
    elif not by_one:
        rises = np.diff(t)[same]
        stride = max(1, int(np.gcd.reduce(rises)) if len(rises) else 1)
        if stride > 1:
            first = np.repeat(t[heads], np.diff(np.append(heads, num)))
            t = (t - first) // stride + first // stride
    breaks = ~same | (np.diff(t) != 1) | done
    for c in codes:
        breaks |= c[1:] != c[:-1]
    offsets = np.flatnonzero(np.concatenate([[True], breaks, [True]])) if num else np.zeros(1, np.int64)
    parent, start, stop = cut_long(offsets)
    if names:
        ids = {name: strings[c[start]] for (name, strings), c in zip(names.items(), codes, strict=True)}
    else:
        ids = {col.EPISODE_ID: codes[0][start].astype(str).astype(object)}
    return TableIndex(
        order=order,
        offsets=np.append(start, num).astype(np.int64),
        goes_on=stop != offsets[1:][parent],
        t_start=t[start],
        ids=ids,
        terminated=terminated[stop - 1],
        truncated=truncated[stop - 1],
        parts=grouped(stop - start),
        stride=stride,
        is_clock=is_clock,
    )


def _order(groups: list[Ints], t: Ints | None) -> Ints | None:
    """The rows in order, those of an episode's agent next to each other; None where they are already."""
    keys = [*groups, *([] if t is None else [t])]
    risen = np.zeros(max(0, len(keys[0]) - 1), bool)  # is the row behind the one before it, by the keys so far?
    equal = ~risen
    for key in keys:
        risen |= equal & (key[1:] > key[:-1])
        equal &= key[1:] == key[:-1]
    if (risen | equal).all():
        return None
    return np.lexsort(keys[::-1]).astype(np.int64)


def _episodes_by(
    t: Ints | None, done: NDArray[np.bool_], has_next: bool, num_rows: int, keys: Mapping[str, Any]
) -> Ints:
    """The number of each row's episode, where the table has no id for it."""
    if t is not None:
        return np.append(0, np.cumsum((np.diff(t) <= 0) | done[:-1]))[:num_rows]
    if has_next:
        return np.arange(num_rows)
    if not any(name in keys for name in FLAGS):
        raise DataError(
            f"nothing says where episodes begin and end: map `{col.EPISODE_ID}` (and `{col.T_INDEX}`), or "
            f"`{col.NEXT_OBS}` for steps that stand alone, or `{col.TERMINATED}` and `{col.TRUNCATED}`."
        )
    return np.append(0, np.cumsum(done[:-1]))[:num_rows]


def _ends(
    keys: Mapping[str, pa.ChunkedArray], num_rows: int, place: Place
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    flags = {n: _flag(keys[n], n, place) for n in FLAGS if n in keys}
    none = np.zeros(num_rows, bool)
    truncated = flags.get(col.TRUNCATED, none)
    if DONE in flags and col.TERMINATED not in flags:
        return flags[DONE] & ~truncated, truncated
    terminated = flags.get(col.TERMINATED, none)
    if DONE in flags and col.TRUNCATED not in flags:
        truncated = flags[DONE] & ~terminated
    return terminated, truncated


def _flag(column: pa.ChunkedArray, name: str, place: Place) -> NDArray[np.bool_]:
    array = one_array(column)
    if is_text(array.type):
        raise DataError(f"{place(0)}: the column of `{name}` is of type {array.type}, not true or false. Convert it.")
    values = numbers(array, name, place)
    bad = (values != 0) & (values != 1)
    if values.ndim != 1 or bad.any():
        row = int(bad.reshape(len(bad), -1).any(axis=1).argmax())
        raise DataError(f"{place(row)}: the column of `{name}` is {values[row]}, not true or false.")
    return values.astype(bool)


def is_time(kind: pa.DataType) -> bool:
    """Whether a column holds points in time, of a clock or a calendar."""
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_time(kind))


def _time(column: pa.ChunkedArray, place: Place) -> Ints:
    array = one_array(column)
    if is_time(array.type):
        array = array.cast({32: pa.int32(), 64: pa.int64()}[array.type.bit_width])
    elif is_text(array.type):
        raise DataError(
            f"{place(0)}: the column of `{col.T_INDEX}` is of type {array.type}, neither the number of a step nor a "
            f"timestamp. Convert it; or leave `{col.T_INDEX}` out, if the rows of each episode are in order."
        )
    values = numbers(array, col.T_INDEX, place)
    if is_time(column.type):
        return values.astype(np.int64)
    if values.ndim == 1 and values.dtype.kind == "f":
        bad = ~(np.abs(values) < 2**53) | (values != np.round(values))
    else:
        bad = np.full(len(values), values.ndim != 1 or values.dtype.kind == "b")
    if values.dtype.kind in "iuf" and values.ndim == 1:
        bad |= (values < 0) | (values > 2**62)
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"{place(row)}: the column of `{col.T_INDEX}` is {values[row]}, but counts steps from 0. Leave "
            f"`{col.T_INDEX}` out, if the rows of each episode are in order."
        )
    return values.astype(np.int64)


def _codes(column: pa.ChunkedArray, name: str, place: Place) -> tuple[Ints, NDArray[np.object_]]:
    """A key as numbers, in the order in which its values come first, and what they stand for as text."""
    array = one_array(column)
    if array.null_count == len(array) and name != col.EPISODE_ID:
        return np.zeros(len(array), np.int64), np.array([None], object)
    if array.null_count and (name == col.EPISODE_ID or pa.types.is_dictionary(array.type)):
        row = int(np.argmax(np.asarray(array.is_null())))
        raise DataError(f"{place(row)}: the column of `{name}` is empty. Fill it, or leave these rows out.")
    try:
        encoded = array if pa.types.is_dictionary(array.type) else array.dictionary_encode(null_encoding="encode")
    except pa.ArrowException as error:
        raise DataError(f"{place(0)}: the column of `{name}` is of type {array.type}, not text or numbers.") from error
    words = strings(encoded.dictionary, name, place)
    codes = np.asarray(encoded.indices).astype(np.int64)
    if pa.types.is_dictionary(array.type):  # its words may stand in any order
        seen = np.asarray(pc.unique(encoded.indices)).astype(np.int64)
        rank = np.zeros(len(words), np.int64)
        rank[seen] = np.arange(len(seen))
        codes, words = rank[codes], words[seen]
    return codes, words
