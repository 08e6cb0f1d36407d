# SPDX-License-Identifier: Apache-2.0
"""Sort the rows of a table and cut them into segments, from their key columns alone."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.recordings.format import MAX_ROWS, cut_long, grouped
from etude.recordings.formats.arrow import Place
from etude.recordings.formats.source import FLAGS, KEYS
from etude.recordings.formats.table_keys import WITHOUT_T, Ints, ends_of, is_time, key_codes, steps_or_times

Groups: TypeAlias = Callable[[], Iterable[tuple[int, Mapping[str, pa.ChunkedArray]]]]
"""Yields the number of rows and the key columns of one group after another. It may be called many times."""


@dataclasses.dataclass(frozen=True)
class TableIndex:
    """The segments of a table whose rows are in order of time."""

    offsets: Ints
    """Offsets of segments, as indices of rows; long segments are cut."""
    goes_on: NDArray[np.bool_]
    """Whether the next segment continues this one, so that its first observation is this one's final observation."""
    t_start: Ints
    ids: Mapping[str, NDArray[np.object_]]
    """The ``episode_id``, ``agent_id`` and ``module_id`` of each segment."""
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    parts: Ints
    """Bounds of parts, as indices of segments."""
    stride: int
    """By how much the table's ``t`` increases per step."""
    first: int
    """The table's ``t`` of steps that are numbered 0: the smallest one from 1 to the stride, or 0."""
    is_clock: bool
    """Whether the table's ``t`` holds points in time."""

    @property
    def has_next(self) -> NDArray[np.bool_]:
        """Whether the next segment is of the same agent in the same episode; for all segments but the last."""
        return _are_alike([names for name, names in self.ids.items() if name != col.MODULE_ID])

    def is_mostly_gaps(self) -> bool:
        """Whether most rows have a larger ``t`` than the step after the row before, of the same agent in an episode."""
        is_next = self.has_next
        is_gap = is_next & (self.t_start[1:] > self.t_start[:-1] + np.diff(self.offsets)[:-1])
        return 2 * int(is_gap.sum()) > int(self.offsets[-1] - len(self.t_start) + is_next.sum())

    def is_mostly_late(self) -> bool:
        """Whether most agents, and more than one, lack the first steps of their episode."""
        late = self.t_start[np.append(True, ~self.has_next)] > 0
        return 1 < int(late.sum()) > len(late) / 2


def index_of(
    groups: Groups,
    chained: NDArray[np.bool_] | None,
    place: Place,
    *,
    by_one: bool = False,
    is_sorted: bool = False,
    most: int = MAX_ROWS,
) -> TableIndex | None:
    """Cut rows into segments, according to those of ``episode_id agent_id module_id t terminated truncated done`` that
    exist; None if the rows are not in order.

    With ``t``, rows are sorted by it within each agent of each episode; without an episode id, an episode ends where a
    flag is set or ``t`` does not increase. If its smallest number is 1, it counts from 1. If ``t`` holds points in
    time, they are only used for sorting: steps are numbered from 0, and rows of the same time get the same number.
    Without ``t``, rows are in order of time. Without both, rows are in order and flags end episodes; if next
    observations are known, an episode also ends before a row that is not ``chained`` to it. With ``by_one``, ``t``
    counts every step from 0: where it increases by more, steps are missing.

    At most the keys of one group are in memory at a time.

    Args:
        groups: See `Groups`.
        chained: ``[rows]``: whether each row's observation is the next one of the row before it; None: unknown.
        place: Describes the location of a row, for errors.
        by_one: See above.
        is_sorted: Whether the rows are known to be in order.
        most: The most rows in a part.

    Raises:
        DataError: a key is empty or of a wrong type, or nothing says where episodes end; the message names the row.
    """
    stride = 0
    while True:
        reader = _KeyReader(chained, place)
        cut = _Cut(reader, 1 if by_one else stride, by_one=by_one)
        for rows, columns in groups():
            keys = reader.read(rows, columns)
            if not is_sorted and not cut.is_followed_by(keys):
                return None
            cut.add(keys)
            if cut.is_of_other_stride:
                break
        else:
            return cut.index(most)
        stride = cut.found  # earlier rows showed a larger step of ``t``: start again from the first row


def from_own_first_steps(index: TableIndex) -> TableIndex:
    """Number the steps of agents from 0 where they join an episode whose beginning is stored for another agent.

    In such a table, ``t`` counts the steps of the episode.
    """
    if index.is_clock or not {col.EPISODE_ID, col.AGENT_ID} <= index.ids.keys():
        return index
    begins = np.append(True, ~index.has_next)
    first, names = index.t_start[begins], index.ids[col.EPISODE_ID][begins]
    episode = np.cumsum(np.append(False, names[1:] != names[:-1]))  # the agents of an episode follow each other
    is_whole = np.minimum.reduceat(first, np.flatnonzero(np.diff(episode, prepend=-1))) == 0
    late = np.where(is_whole[episode], first, 0)
    return dataclasses.replace(index, t_start=index.t_start - late[np.cumsum(begins) - 1])


def ended_at_last_rows(index: TableIndex, flag: str) -> TableIndex:
    """Set ``flag`` at the last row of each agent in each episode, and at copies of it, and end the episode there."""
    last = index.t_start + np.diff(index.offsets) - 1
    begins = np.append(True, ~index.has_next)
    is_last = last == np.maximum.reduceat(last, np.flatnonzero(begins))[np.cumsum(begins) - 1]
    terminated, truncated = index.terminated, index.truncated
    if flag == col.TRUNCATED:
        truncated = truncated | (is_last & ~terminated)
    else:
        terminated = terminated | (is_last & ~truncated)
    return dataclasses.replace(index, terminated=terminated, truncated=truncated)


def tracks_of(groups: Groups, chained: NDArray[np.bool_] | None, place: Place) -> Iterator[tuple[Ints, Ints]]:
    """Yield the sort keys of rows in any order, group by group: the track number of each row, and its time.

    Raises:
        DataError: the times have no date. Past midnight, their order would not be that of the steps.
    """
    reader, first = _KeyReader(chained, place), 0
    for rows, columns in groups():
        keys = reader.read(rows, columns)
        if reader.is_time_of_day:
            raise DataError(
                f"{place(first)}: `{col.T_INDEX}` is a time of day, and rows are not in order of episode and time, so "
                f"that times past midnight could not be told apart. Map a column of date and time; or {WITHOUT_T}."
            )
        episode, *agent = _tracks(keys)
        yield episode << 32 | agent[0] if agent else episode, keys.get(col.T_INDEX, np.arange(first, first + rows))
        first += rows


Keys: TypeAlias = Mapping[str, NDArray[Any]]
"""The keys of some rows: codes of the names of episodes, agents and modules, ``t`` as integers, and both flags. What
the table does not have is missing, except flags."""


def _taken(keys: Keys, rows: Any) -> dict[str, NDArray[Any]]:
    return {name: values[rows] for name, values in keys.items()}


def _tracks(keys: Keys) -> list[Ints]:
    """What identifies a track, whose steps follow each other: the episode and the agent."""
    return [keys[name] for name in (col.EPISODE_ID, col.AGENT_ID) if name in keys]


def _are_alike(arrays: Sequence[NDArray[Any]]) -> NDArray[np.bool_]:
    """Whether each row is followed by one with the same values."""
    return np.asarray(np.all([values[1:] == values[:-1] for values in arrays], axis=0))


class _Cut:
    """Cuts rows that are in order into segments.

    Args:
        reader: Reads the keys.
        stride: By how much ``t`` increases per step; 0 finds it from the first rows.
        by_one: Whether ``t`` increases by one, and larger increases mean missing steps.
    """

    def __init__(self, reader: "_KeyReader", stride: int, *, by_one: bool) -> None:
        self.stride, self.found = max(1, stride), stride
        """`found` is the stride of ``t`` in the rows that were added; 0 if there is none."""
        self._reader, self._by_one = reader, by_one
        self._last: Keys | None = None  # the previous row
        self._t = self._first = self._num = 0  # its step, the first ``t`` of its track, and the number of rows so far
        self._heads: list[Keys] = []  # of the first row of each segment; see `add`

    @property
    def is_of_other_stride(self) -> bool:
        """Whether earlier rows were cut wrongly, because the first ones did not show the stride of ``t``."""
        return self.stride != max(1, self.found)

    def is_followed_by(self, keys: Keys) -> bool:
        """Whether these rows are in order, and come after those before."""
        after = self._with_last(keys)
        risen = np.zeros(max(0, len(after[col.TERMINATED]) - 1), bool)  # is a row after the previous one, so far?
        equal = ~risen
        for key in (*_tracks(after), *([after[col.T_INDEX]] if col.T_INDEX in after else [])):
            risen |= equal & (key[1:] > key[:-1])
            equal &= key[1:] == key[:-1]
        return bool((risen | equal).all())

    def _with_last(self, keys: Keys) -> Keys:
        """The keys with those of the previous row in front, if there is one."""
        last = self._last
        return keys if last is None else {n: np.concatenate([last[n], values]) for n, values in keys.items()}

    def add(self, keys: Keys) -> None:
        """Cut some more rows, at least one, which come after those before."""
        num, is_first = len(keys[col.TERMINATED]), self._last is None
        if is_first:
            self._last = _taken(keys, slice(0, 1))
        both = self._with_last(keys)
        same = _are_alike(_tracks(both))
        same[0] &= not is_first
        head = np.maximum.accumulate(np.where(same, -1, np.arange(num)))  # -1 if it is in earlier rows
        t, bases = self._steps(keys, both, same, head)
        breaks = ~same | (np.diff(t, prepend=self._t) != 1) | (both[col.TERMINATED] | both[col.TRUNCATED])[:-1]
        if col.MODULE_ID in both:
            breaks |= ~_are_alike([both[col.MODULE_ID]])
        breaks[0] |= is_first
        starts = np.flatnonzero(breaks)
        before = _taken({name: both[name] for name in (col.TERMINATED, col.TRUNCATED)}, starts)
        ids = _taken({name: keys[name] for name in KEYS if name in keys}, starts)
        # The first ``t`` of each segment's track is its base, if ``t`` counts steps; the flags are of the row before.
        self._heads.append({"start": starts + self._num, "t": t[starts], "base": bases[starts], **before, **ids})
        self._last, self._t, self._num = _taken(keys, slice(num - 1, num)), int(t[-1]), self._num + num

    def _steps(self, keys: Keys, both: Keys, same: NDArray[np.bool_], head: Ints) -> tuple[Ints, Ints]:
        """The step of each row: ``t`` if it counts steps, else counted from the first row of its track; and the first
        ``t`` of its track, or the same again if steps are counted."""
        before, t = head < 0, keys.get(col.T_INDEX)
        if t is None or self._reader.is_clock:
            counted = np.cumsum(np.ones(len(same), bool) if t is None else np.diff(both[col.T_INDEX]) != 0)
            steps = np.where(before, self._t + counted, counted - counted[head])
            return steps, steps
        if self._by_one:
            return t, t
        rises = np.diff(both[col.T_INDEX])[same]
        self.found = int(np.gcd.reduce(rises, initial=self.found))
        if not self._num:
            self.stride = max(1, self.found)
        first = np.where(before, self._first, t[head])
        self._first = int(first[-1])
        return t if self.stride == 1 else (t - first) // self.stride + first // self.stride, first

    def index(self, most: int) -> TableIndex:
        """Return the segments of all rows, in parts of at most ``most`` rows."""
        assert self._last is not None  # there are rows
        heads = {name: np.concatenate([each[name] for each in self._heads]) for name in self._heads[0]}
        offsets = np.append(heads["start"], self._num).astype(np.int64)
        parent, start, stop = cut_long(offsets, most)
        goes_on = stop != offsets[1:][parent]
        ends = {
            name: np.append(heads[name][1:], self._last[name])[parent] & ~goes_on
            for name in (col.TERMINATED, col.TRUNCATED)
        }
        t, bases = heads["t"], heads["base"]
        least = int(bases.min())
        first = least if 1 <= least <= self.stride and not self._by_one else 0
        # Agents that act in turns begin at ``first``, the number after it and so on.
        t += (bases - first) // self.stride - bases // self.stride
        return TableIndex(
            offsets=np.append(start, self._num).astype(np.int64),
            goes_on=goes_on,
            t_start=t[parent] + start - offsets[:-1][parent],
            ids={name: self._reader.names_of(name, heads[name][parent]) for name in KEYS if name in heads},
            parts=grouped(stop - start, most),
            stride=self.stride,
            first=first,
            is_clock=self._reader.is_clock,
            **ends,
        )


class _KeyReader:
    """Reads the keys of groups of rows, one after another; equal names have equal codes in all groups."""

    def __init__(self, chained: NDArray[np.bool_] | None, place: Place) -> None:
        self._chained, self._place = chained, place
        self._known: dict[str, dict[str | None, int]] = {}
        self._rows = 0
        self.is_clock = False
        """Whether ``t`` holds points in time."""
        self.is_time_of_day = False
        """Whether these have no date."""
        self._episode, self._t, self._done = 0, 0, False  # of the previous row, if episodes have no names

    def read(self, num: int, columns: Mapping[str, pa.ChunkedArray]) -> Keys:
        """Return the keys of the next ``num`` rows; see `index_of`."""
        first = self._rows

        def place(row: int) -> str:
            return self._place(first + row)

        terminated, truncated = ends_of(columns, num, place)
        keys: dict[str, NDArray[Any]] = {col.TERMINATED: terminated, col.TRUNCATED: truncated}
        if col.T_INDEX in columns:
            keys[col.T_INDEX] = steps_or_times(columns[col.T_INDEX], place)
            self.is_clock = is_time(columns[col.T_INDEX].type)
            self.is_time_of_day = bool(pa.types.is_time(columns[col.T_INDEX].type))
        if col.EPISODE_ID in columns:
            keys |= {name: self._coded(columns[name], name, place) for name in KEYS if name in columns}
        else:
            keys[col.EPISODE_ID] = self._numbered(keys.get(col.T_INDEX), terminated | truncated, columns, place)
        self._rows += num
        return keys

    def names_of(self, name: str, codes: Ints) -> NDArray[np.object_]:
        """The names that the codes of a key stand for."""
        if name not in self._known:
            return codes.astype(str).astype(object)
        return np.array([*self._known[name], None], object)[codes]

    def _coded(self, column: pa.ChunkedArray, name: str, place: Place) -> Ints:
        codes, words = key_codes(column, name, place)
        known = self._known.setdefault(name, {})
        return np.array([known.setdefault(word, len(known)) for word in words], np.int64)[codes]

    def _numbered(self, t: Ints | None, done: NDArray[np.bool_], columns: Mapping[str, Any], place: Place) -> Ints:
        """The number of each row's episode, if the table has no episode ids: a new one begins after a flag, where a
        counting ``t`` or a time of day starts again, and without ``t`` where a row is not chained to that before it.

        Raises:
            DataError: nothing tells episodes apart, or times with a date don't rise within one.
        """
        for name in (col.AGENT_ID, col.MODULE_ID):
            if name in columns:
                raise DataError(f"`{name}` is mapped, but `{col.EPISODE_ID}` is not: map it, to tell episodes apart.")
        if t is None and self._chained is None and not any(name in columns for name in FLAGS):
            raise DataError(
                f"nothing says where episodes begin and end: map `{col.EPISODE_ID}` (and `{col.T_INDEX}`), or "
                f"`{col.NEXT_OBS}` for steps that stand alone, or `{col.TERMINATED}` and `{col.TRUNCATED}`."
            )
        begins = np.append(self._done, done[:-1])
        if t is None and self._chained is not None:
            begins |= ~self._chained[self._rows : self._rows + len(done)]
        elif t is not None:
            falls = np.diff(t, prepend=self._t if self._rows else t[:1] - 1) <= 0
            wrong = np.flatnonzero(falls & ~begins)
            if len(wrong) and self.is_clock and not self.is_time_of_day and self._chained is None:
                raise DataError(
                    f"{place(int(wrong[0]))}: the time in `{col.T_INDEX}` does not rise there, and no "
                    f"`{col.EPISODE_ID}` is mapped. Are the rows of several episodes or machines? Then map an id. Are "
                    f"they out of order? Then sort them by time. If they are in order, leave `{col.T_INDEX}` out."
                )
            begins |= falls
        episode = self._episode + np.cumsum(begins)
        self._episode, self._t, self._done = int(episode[-1]), 0 if t is None else int(t[-1]), bool(done[-1])
        return episode
