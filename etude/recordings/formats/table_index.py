# SPDX-License-Identifier: Apache-2.0
"""Find the order of a table's rows and cut them into segments, from their key columns alone.

The key columns are ids, flags and times, as numbers or as text.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.recordings.format import MAX_ROWS, cut_long, grouped
from etude.recordings.formats.arrow import RowPlace, check_nulls, is_text, numbers, one_array, shown, strings
from etude.recordings.formats.source import DATE_ORDERS, DAY_FIRST, FLAGS, KEYS, MONTH_FIRST

Ints = NDArray[np.int64]

Groups: TypeAlias = Callable[[], Iterable[tuple[int, Mapping[str, pa.ChunkedArray]]]]
"""Yields the number of rows and the key columns of each group. It may be called several times."""


@dataclasses.dataclass(frozen=True)
class TableIndex:
    """The segments of a table whose rows are in order of time."""

    offsets: Ints
    """``[segments + 1]``: the bounds of the segments, as indices of rows; long segments are cut."""
    goes_on: NDArray[np.bool_]
    """Whether the next segment continues this one, so that its first observation is this one's final observation."""
    t_start: Ints
    """The step of each segment's first row in its episode, from 0."""
    ids: Mapping[str, NDArray[np.object_]]
    """The ``episode_id``, ``agent_id`` and ``module_id`` of each segment."""
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    parts: Ints
    """``[parts + 1]``: the bounds of the parts, as indices of segments."""
    stride: int
    """By how much the table's ``t`` increases per step; 1 if it does not count steps."""
    first: int
    """The value of the table's ``t`` that becomes step 0: the smallest one if it is from 1 to the stride, else 0."""
    is_clock: bool
    """Whether the table's ``t`` holds points in time."""

    @property
    def has_next(self) -> NDArray[np.bool_]:
        """Whether the next segment is of the same agent in the same episode, bool ``[segments - 1]``."""
        return _are_alike([ids for name, ids in self.ids.items() if name != col.MODULE_ID])

    def is_mostly_gaps(self) -> bool:
        """Whether steps are missing between most rows and the row before them, of the same agent and episode."""
        is_next = self.has_next
        is_gap = is_next & (self.t_start[1:] > self.t_start[:-1] + np.diff(self.offsets)[:-1])
        return 2 * int(is_gap.sum()) > int(self.offsets[-1] - len(self.t_start) + is_next.sum())

    def is_mostly_late(self) -> bool:
        """Whether most agents, and more than one, lack the first steps of their episode."""
        late = self.t_start[np.append(True, ~self.has_next)] > 0
        num = int(late.sum())
        return num > 1 and 2 * num > len(late)


def index_of(
    groups: Groups,
    chained: NDArray[np.bool_] | None,
    place: RowPlace,
    *,
    unit_stride: bool = False,
    is_sorted: bool = False,
    most: int = MAX_ROWS,
) -> TableIndex | None:
    """Cut rows into segments by their key columns; returns None if the rows are not in order.

    The keys are those of ``episode_id``, ``agent_id``, ``module_id``, ``t``, ``terminated``, ``truncated`` and ``done``
    that exist:

    - With ``t``, rows must be in its order for each agent of an episode. Its stride, the increase per step, is found
      from all rows. If its smallest value is from 1 to the stride, that value becomes step 0.
    - If ``t`` holds points in time, it only determines the order: steps are numbered from 0, and rows with the same
      time get the same number.
    - Without ``t``, rows are taken to be in order of time.
    - Without an episode id, an episode ends where a flag is set, or where ``t`` does not increase. Without both, and if
      next observations are known, it also ends before a row that is not ``chained`` to the row before.

    Only the keys of one group are in memory at a time.

    Args:
        groups: See `Groups`.
        chained: bool ``[rows]``: whether each row's observation is the next observation of the row before it; None if
            unknown.
        place: Describes the location of a row, for errors.
        unit_stride: Whether ``t`` counts every step from 0, so that steps are missing where it increases by
            more than 1.
        is_sorted: Whether the rows are known to be in order.
        most: The most rows in a part.

    Raises:
        DataError: a key is empty or of a wrong type, or nothing says where episodes end; the message names the row.
    """
    stride = 0
    while True:
        reader = _KeyReader(chained, place)
        cut = _Cut(reader, 1 if unit_stride else stride, unit_stride=unit_stride)
        for rows, columns in groups():
            keys = reader.read(rows, columns)
            if not is_sorted and not cut.is_followed_by(keys):
                return None
            cut.add(keys)
            if cut.is_of_other_stride:
                break
        else:
            return cut.index(most)
        stride = cut.stride_shown  # the first rows did not show the stride of ``t``: start again


def renumber_late_agents(index: TableIndex) -> TableIndex:
    """Number an agent's steps from 0 if it joins an episode late, and another agent has the episode's first step.

    In such a table, ``t`` counts the steps of the episode rather than the agent's.
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
    """End each agent's episode at its last row, and at copies of it, by ``flag``, unless the other flag is set."""
    last = index.t_start + np.diff(index.offsets) - 1
    begins = np.append(True, ~index.has_next)
    is_last = last == np.maximum.reduceat(last, np.flatnonzero(begins))[np.cumsum(begins) - 1]
    terminated, truncated = index.terminated, index.truncated
    if flag == col.TRUNCATED:
        truncated = truncated | (is_last & ~terminated)
    else:
        terminated = terminated | (is_last & ~truncated)
    return dataclasses.replace(index, terminated=terminated, truncated=truncated)


def tracks_of(
    groups: Groups, chained: NDArray[np.bool_] | None, place: RowPlace, warn: Callable[[str], None]
) -> Iterator[tuple[Ints, Ints]]:
    """Yield the sort keys of rows that are in any order, int64 ``[rows]`` each, group by group.

    They are the track of each row (an agent in an episode, as a number), and its time. ``warn`` is called with warnings
    about times that go back.
    """
    reader, first, midnight = _KeyReader(chained, place), 0, None
    for rows, columns in groups():
        keys = reader.read(rows, columns)
        episode, *agent = _tracks(keys)
        track = episode << 32 | agent[0] if agent else episode
        back = _goes_back(track, keys[col.T_INDEX]) if reader.is_clock else np.zeros(0, np.int64)
        num = rows - len(np.unique(track))  # if it is rare, the other rows are in order
        is_rare = _RARE * len(back) <= num or (len(back) == 1 and num >= _FEW)
        if len(back) and midnight is None and (reader.is_time_of_day or is_rare):
            midnight = int(back[0])
            warn(f"{place(first + midnight)}: {_PAST_MIDNIGHT if reader.is_time_of_day else _SET_BACK}")
        yield track, keys.get(col.T_INDEX, np.arange(first, first + rows))
        first += rows


_PAST_MIDNIGHT: Final = (
    "`t` is a time of day, which goes back there within an episode. Rows are sorted by it, so that those after "
    "midnight come first: if episodes run past midnight, map a column of date and time."
)
_SET_BACK: Final = (
    "the time in `t` goes back there, in an episode that is in order otherwise. Rows are put in order of time. If "
    "the clock was set back, as in autumn, map times in UTC, or leave `t` out."
)
_RARE: Final = 20
"""If times go back at most once in this many rows, the other rows are taken to be in order."""
_FEW: Final = 3
"""So many times after others may also go back once."""


def _goes_back(track: Ints, t: Ints) -> Ints:
    """The rows whose time is before that of the row before them in their track."""
    order = np.argsort(track, kind="stable")
    return order[np.flatnonzero((np.diff(track[order]) == 0) & (np.diff(t[order]) < 0)) + 1]


Keys: TypeAlias = Mapping[str, NDArray[Any]]
"""The keys of some rows: codes of the names of episodes, agents and modules, ``t`` as integers, and both flags. Keys
that the table does not have are missing, except flags, which are False."""


def _taken(keys: Keys, rows: Any) -> dict[str, NDArray[Any]]:
    return {name: values[rows] for name, values in keys.items()}


def _tracks(keys: Keys) -> list[Ints]:
    """The keys that identify a track, which is one agent in one episode."""
    return [keys[name] for name in (col.EPISODE_ID, col.AGENT_ID) if name in keys]


def _are_alike(arrays: Sequence[NDArray[Any]]) -> NDArray[np.bool_]:
    """Whether each row is followed by one with the same values."""
    return np.asarray(np.all([values[1:] == values[:-1] for values in arrays], axis=0))


class _Cut:
    """Cuts rows that are in order into segments.

    Args:
        reader: Reads the keys.
        stride: By how much ``t`` increases per step; 0 finds it from the first rows.
        unit_stride: Whether ``t`` increases by one, and larger increases mean missing steps.
    """

    def __init__(self, reader: "_KeyReader", stride: int, *, unit_stride: bool) -> None:
        self.stride, self.stride_shown = max(1, stride), stride
        """`stride_shown` is the stride of ``t`` in the rows added so far; 0 if they show none."""
        self._reader, self._unit_stride = reader, unit_stride
        self._last: Keys | None = None  # the previous row
        self._t = self._first = self._num = 0  # its step, the first ``t`` of its track, and the number of rows so far
        self._heads: list[Keys] = []  # of the first row of each segment; the flags are of the row before it

    @property
    def is_of_other_stride(self) -> bool:
        """Whether earlier rows were cut wrongly, because the first ones did not show the stride of ``t``."""
        return self.stride != max(1, self.stride_shown)

    def is_followed_by(self, keys: Keys) -> bool:
        """Whether these rows are in order, and come after those added so far.

        Rows with equal keys are in order; `etude.recordings.formats.sorting` keeps their order, too. If one changes,
        the other must, and `etude.recordings.formats.sorting.VERSION` must rise.
        """
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
        """Cut more rows, at least one, which come after those added so far."""
        num, is_first = len(keys[col.TERMINATED]), self._last is None
        if is_first:
            self._last = _taken(keys, slice(0, 1))
        with_last = self._with_last(keys)  # its row i comes before row i of `keys`
        is_same_track = _are_alike(_tracks(with_last))
        is_same_track[0] &= not is_first
        t, bases = self._steps(keys, with_last, is_same_track)
        flags_before = {name: with_last[name][:-1] for name in (col.TERMINATED, col.TRUNCATED)}
        breaks = ~is_same_track | (np.diff(t, prepend=self._t) != 1) | np.logical_or(*flags_before.values())
        if col.MODULE_ID in keys:
            breaks |= ~_are_alike([with_last[col.MODULE_ID]])
        breaks[0] |= is_first
        starts = np.flatnonzero(breaks)
        of_starts = {"t": t, "base": bases, **flags_before, **{name: keys[name] for name in KEYS if name in keys}}
        self._heads.append({"start": starts + self._num, **_taken(of_starts, starts)})
        self._last, self._t, self._num = _taken(keys, slice(num - 1, num)), int(t[-1]), self._num + num

    def _steps(self, keys: Keys, with_last: Keys, is_same_track: NDArray[np.bool_]) -> tuple[Ints, Ints]:
        """The step of each row, and its base.

        If ``t`` counts steps by a stride, the base is the first ``t`` of the track. Otherwise, the steps are ``t``
        itself (``unit_stride``) or are counted from the first row of the track, and the base equals the step.
        """
        t, num = keys.get(col.T_INDEX), len(is_same_track)
        track_start = np.maximum.accumulate(np.where(is_same_track, -1, np.arange(num)))  # -1 if before these rows
        began_before = track_start < 0
        if t is None or self._reader.is_clock:
            counted = np.cumsum(np.ones(num, bool) if t is None else np.diff(with_last[col.T_INDEX]) != 0)
            steps = np.where(began_before, self._t + counted, counted - counted[track_start])
            return steps, steps
        if self._unit_stride:
            return t, t
        rises = np.diff(with_last[col.T_INDEX])[is_same_track]
        self.stride_shown = int(np.gcd.reduce(rises, initial=self.stride_shown))
        if not self._num:
            self.stride = max(1, self.stride_shown)
        first = np.where(began_before, self._first, t[track_start])
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
        first = least if 1 <= least <= self.stride and not self._unit_stride else 0
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

    def __init__(self, chained: NDArray[np.bool_] | None, place: RowPlace) -> None:
        self._chained, self._place = chained, place
        self._known: dict[str, dict[str | None, int]] = {}
        self._rows = 0
        self.is_clock = False
        """Whether ``t`` holds points in time."""
        self.is_time_of_day = False
        """Whether ``t`` holds times of day, without a date."""
        self._episode, self._t, self._done = 0, 0, False  # of the previous row, if there are no episode ids

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
        """The names of the codes of a key; the codes as text if it has no names."""
        if name not in self._known:
            return codes.astype(str).astype(object)
        return np.array([*self._known[name], None], object)[codes]

    def _coded(self, column: pa.ChunkedArray, name: str, place: RowPlace) -> Ints:
        codes, words = key_codes(column, name, place)
        known = self._known.setdefault(name, {})
        return np.array([known.setdefault(word, len(known)) for word in words], np.int64)[codes]

    def _numbered(self, t: Ints | None, done: NDArray[np.bool_], columns: Mapping[str, Any], place: RowPlace) -> Ints:
        """The number of each row's episode, if the table has no episode ids.

        A new episode begins after a flag, and where a counting ``t`` or a time of day does not increase. Without ``t``,
        it also begins at a row that is not chained to the row before it.

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


# -- decoding keys: flags and times ------------------------------------------------------------------------------------


NO: Final = ("no", "false", "n", "f", "0")
YES: Final = ("yes", "true", "y", "t", "1")

_DATE: Final = (
    r"^(?P<one>\d{1,2})(?P<mark>[/.-])(?P<two>\d{1,2})[/.-](?P<year>\d{4})"
    r"(?:,?[ T]+(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2})(?:\.(?P<fraction>\d+))?)?"
    r" ?(?P<half>[AaPp]?)(?:\.?[Mm]\.?)?)?$"
)
_ISO: Final = (pa.timestamp("us"), pa.timestamp("us", "UTC"))


WITHOUT_T: Final = f"leave `{col.T_INDEX}` out, if the rows of each episode are in order"
"""Advice where ``t`` does not say the order of steps."""
UNIX_FROM: Final = 10**8
"""Whole numbers from this one on are Unix times in some unit (in seconds, this is 1973), and not indices of steps."""


def truths(array: pa.Array) -> pa.Array:
    """Convert texts to booleans: `YES` and `NO`, in upper or lower case; null for any other text."""
    found = pc.index_in(pc.utf8_lower(_trimmed(array)), value_set=pa.array([*NO, *YES]))
    return pc.greater_equal(found, len(NO))


def date_orders(array: pa.Array) -> tuple[str, ...]:
    """Return those of `DATE_ORDERS` that fit the dates of a column, such as 1/2/2026.

    Only one fits if a date has a number above 12, or points (24.11.2026), which put the day first. There is none if the
    column has no such dates.
    """
    parts = pc.extract_regex(_trimmed(array), _DATE)
    one, two = (pc.max(pc.cast(pc.struct_field(parts, name), pa.int64())).as_py() for name in ("one", "two"))
    if one is None:
        return ()
    if one > 12 or pc.any(pc.equal(pc.struct_field(parts, "mark"), ".")).as_py():
        return (DAY_FIRST,)
    return (MONTH_FIRST,) if two > 12 else DATE_ORDERS


def date_order(arrays: Iterable[pa.Array]) -> str | None:
    """Return the one of `DATE_ORDERS` that fits a column, given in parts; None if both fit or there are no dates."""
    for array in arrays:
        orders = date_orders(array)
        if orders != DATE_ORDERS and array.null_count < len(array):
            return orders[0] if orders else None
    return None


def times(array: pa.Array, place: RowPlace, name: str, order: str | None) -> pa.Array:
    """Convert texts to timestamps in microseconds; finer fractions are cut off.

    The texts are in ISO 8601, also with slashes in the date, with a time zone in all rows or in none; or they are dates
    such as 11/24/2026 and 24.11.2026, alone or with a time such as 15:15 or 3:15 PM.

    Args:
        array: The texts; nulls stay nulls.
        place: Describes the location of a row, for errors.
        name: The column's name.
        order: One of `DATE_ORDERS`; None if no date shows it.

    Raises:
        DataError: a text is not a time, or ``order`` is needed but None; the message names the row.
    """
    texts = pc.replace_substring_regex(_trimmed(array), r" ?(UTC|GMT)$", "Z")
    texts = pc.replace_substring_regex(texts, r"(\.\d{6})\d+", r"\1")
    texts = pc.replace_substring_regex(texts, r"^(\d{4})/(\d\d)/(\d\d)", r"\1-\2-\3")
    for kind in _ISO:
        try:
            return texts.cast(kind)
        except pa.ArrowException:
            continue
    parts = pc.extract_regex(texts, _DATE)
    is_there, is_date = np.asarray(texts.is_valid()), np.asarray(parts.is_valid())
    row, first = int(is_there.argmax()), ""
    if not is_date[row]:
        row = _not_like_others(texts)
    elif order is None:
        given = " or ".join(f"{col.T_INDEX}={name}:{one}" for one in DATE_ORDERS)
        raise DataError(
            f"{place(row)}: no row of the column `{name}` tells whether the month or the day is first in "
            f"{texts[row].as_py()!r}. Write {given}; or {WITHOUT_T}."
        )
    else:
        values, is_right = _dates(parts, order)
        wrong = is_there & ~(is_date & is_right)
        if not wrong.any():
            return pa.array(values, pa.timestamp("us"), mask=~is_there)
        row, first = int(wrong.argmax()), f" with the {order.partition('-')[0]} first"
    example = "24/3/2026" if order == DAY_FIRST else "3/24/2026"
    raise DataError(
        f"{place(row)}: the column `{name}` of `{col.T_INDEX}` is text such as {texts[row].as_py()[:40]!r}, neither "
        f"the number of a step nor a time{first} such as 2026-03-01 08:30:00 or {example} 3:15 PM, written alike in "
        f"all rows. Convert it; or {WITHOUT_T}."
    )


def can_be_times(kind: pa.DataType) -> bool:
    """Whether numbers of this type can be times: integers, floats and decimals."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def are_times(arrays: Iterable[pa.Array]) -> bool:
    """Whether the numbers of a column are times rather than step indices.

    They are times if some have a fraction, or all are at least `UNIX_FROM`. The column is given in parts of one type.
    """
    least = math.inf
    for array in arrays:
        values = np.asarray(array.drop_null().cast(pa.float64(), safe=False))
        values = values[np.isfinite(values)]
        if (values != np.floor(values)).any():
            return True
        least = min(least, values.min(initial=math.inf))
        if least < UNIX_FROM and pa.types.is_integer(array.type):
            return False  # without reading the others
    return bool(UNIX_FROM <= least < math.inf)


def number_times(array: pa.Array, place: RowPlace) -> pa.Array:
    """Convert times that are numbers to timestamps with the same order. Their unit is unknown, so these are no dates.

    Raises:
        DataError: one is missing, or not finite; the message names the row.
    """
    values = numbers(array, col.T_INDEX, place)
    if values.dtype.kind == "f":
        if not (is_there := np.isfinite(values)).all():
            row = int(is_there.argmin())
            raise DataError(f"{place(row)}: the column of `{col.T_INDEX}` is {values[row]}, which is no time.")
        bits = (values.astype(np.float64) + 0.0).view(np.int64)  # bits of positive floats sort alike; -0 becomes 0
        values = np.where(bits < 0, np.iinfo(np.int64).min - bits, bits)
    return pa.array(values.astype(np.int64), pa.timestamp("us"))


def _trimmed(array: pa.Array) -> pa.Array:
    return pc.utf8_trim_whitespace(array.cast(pa.string()))


def _not_like_others(texts: pa.Array) -> int:
    """The index of the first text that is not a number or an ISO time, if those before it are; else 0."""
    for kind in (pa.float64(), *_ISO):
        for row, text in enumerate(texts):
            try:
                text.cast(kind)
            except pa.ArrowException:
                if row:
                    return row
                break
    return 0


def _dates(parts: pa.Array, order: str) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """The times in the parts of `_DATE`, datetime64[us] ``[n]``; and whether each exists, bool ``[n]``."""

    def numbers(name: str) -> NDArray[np.int64]:
        digits = pc.fill_null(pc.struct_field(parts, name), "0")
        digits = pc.utf8_slice_codeunits(pc.utf8_rpad(digits, 6, "0"), 0, 6) if name == "fraction" else digits
        return np.asarray(pc.cast(pc.if_else(pc.equal(digits, ""), "0", digits), pa.int64()))

    year, hour, minute, second, fraction = map(numbers, ("year", "hour", "minute", "second", "fraction"))
    month, day = (numbers(name) for name in (("one", "two") if order == MONTH_FIRST else ("two", "one")))
    half = np.asarray(pc.fill_null(pc.utf8_lower(pc.struct_field(parts, "half")), "").to_numpy(zero_copy_only=False))
    has_half = half != ""
    is_right = (month >= 1) & (month <= 12) & (day >= 1) & (minute < 60) & (second < 60)
    is_right &= np.where(has_half, (hour >= 1) & (hour <= 12), hour < 24)
    hour = np.where(has_half, hour % 12 + 12 * (half == "p"), hour)
    months = ((year - 1970) * 12 + month - 1).astype("datetime64[M]")
    days = months.astype("datetime64[D]") + (day - 1)
    is_right &= days.astype("datetime64[M]") == months
    seconds = (hour * 60 + minute) * 60 + second
    return days.astype("datetime64[us]") + (seconds * 1_000_000 + fraction), is_right


# -- flags, steps and ids ----------------------------------------------------------------------------------------------


_BITS: Final = {16: 11, 32: 24, 64: 53}
"""The bits of an integer that a float holds exactly, by the number of bits of the float."""


def ends_of(
    keys: Mapping[str, pa.ChunkedArray], num_rows: int, place: RowPlace
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return ``(terminated, truncated)`` from the columns of flags, bool ``[num_rows]`` each; see `ends_by`.

    Raises:
        DataError: a flag is neither true nor false; the message names the row.
    """
    return ends_by({n: flags_of(keys[n], n, place) for n in FLAGS if n in keys}, num_rows)


def ends_by(flags: Mapping[str, NDArray[np.bool_]], num_rows: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return ``(terminated, truncated)`` from those of ``terminated``, ``truncated`` and ``done`` that exist.

    A row with ``done`` alone is terminated; but it is truncated if there is a flag ``terminated`` and none
    ``truncated``.
    """
    none = np.zeros(num_rows, bool)
    terminated, truncated, done = (flags.get(name, none) for name in FLAGS)
    rest = done & ~terminated & ~truncated
    if col.TERMINATED in flags and col.TRUNCATED not in flags:
        return terminated, truncated | rest
    return terminated | rest, truncated


def flags_of(column: pa.ChunkedArray | pa.Array, name: str, place: RowPlace) -> NDArray[np.bool_]:
    """Convert a flag to bool ``[rows]``: from booleans, the numbers 0 and 1, or texts such as yes and no.

    Raises:
        DataError: a value is something else, or missing; the message names the row.
    """
    array = one_array(column)
    found = truths(array) if is_text(array.type) else array
    wrong = np.asarray(pc.and_(found.is_null(), array.is_valid()))  # texts that are neither
    if not wrong.any():
        values = numbers(found, name, place)
        wrong = (values != 0) & (values != 1) if values.ndim == 1 else np.ones(len(values), bool)
    if wrong.any():
        row = int(wrong.argmax())
        found_there = f"{place(row)}: the column of `{name}` is {shown(array[row])!r}"
        raise DataError(f"{found_there}, not true or false. Write yes and no, true and false, or 1 and 0.")
    return values.astype(bool)


def is_time(kind: pa.DataType) -> bool:
    """Whether a type is a timestamp, a date or a time of day."""
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_time(kind))


def steps_or_times(column: pa.ChunkedArray, place: RowPlace) -> Ints:
    """Convert ``t`` to int64 ``[rows]``: indices of steps from 0, or times as numbers.

    Raises:
        DataError: a number is negative, has a fraction or is too large; the message names the row.
    """
    array = one_array(column)
    if is_time(array.type):
        array = array.cast({32: pa.int32(), 64: pa.int64()}[array.type.bit_width])
        return numbers(array, col.T_INDEX, place).astype(np.int64)
    values = numbers(array, col.T_INDEX, place)
    is_right = np.zeros(len(values), bool)
    if values.ndim == 1 and values.dtype.kind in "iuf":
        limit = 2**53 if values.dtype.kind == "f" else 2**62
        is_right = (values >= 0) & (values < limit) & (values == np.round(values))
    if not is_right.all():
        row = int(is_right.argmin())
        what = f"the column of `{col.T_INDEX}` is {values[row]}, but counts steps from 0"
        raise DataError(f"{place(row)}: {what}. Correct it; or {WITHOUT_T}.")
    return values.astype(np.int64)


def key_codes(column: pa.ChunkedArray, name: str, place: RowPlace) -> tuple[Ints, NDArray[np.object_]]:
    """Convert a key to codes ``[rows]``, in order of first appearance, and the text of each code.

    Raises:
        DataError: an episode id is missing; or the values are not text or numbers, or floats that are not exact.
    """
    array = one_array(column)
    if array.null_count == len(array) and name != col.EPISODE_ID:
        return np.zeros(len(array), np.int64), np.array([None], object)
    array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
    if name == col.EPISODE_ID:
        check_nulls(array, name, place)
    array = array.storage if isinstance(array.type, pa.BaseExtensionType) else array
    if pa.types.is_floating(array.type):
        most, bits = pc.max(pc.abs(array.cast(pa.float64()))).as_py(), _BITS[array.type.bit_width]
        if most is not None and most >= 1 << bits:
            raise DataError(
                f"{place(0)}: the column of `{name}` holds numbers up to {most:.17g} as floats of {bits} bits: "
                "different ids may be equal. Write them as text (in a CSV file with a letter in front)."
            )
        array = pc.add(array, pa.scalar(0.0, array.type))  # 0.0 and -0.0 are one id
    try:
        encoded = array.dictionary_encode(null_encoding="encode")
    except pa.ArrowException as error:
        raise DataError(f"{place(0)}: the column of `{name}` is of type {array.type}, not text or numbers.") from error
    return np.asarray(encoded.indices).astype(np.int64), strings(encoded.dictionary, name, place)
