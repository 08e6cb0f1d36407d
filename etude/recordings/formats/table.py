# SPDX-License-Identifier: Apache-2.0
"""Any table, a row a step: Parquet, JSON, CSV, Arrow, or a table in memory, with a map from our columns to its own."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.experience import Experience, Segments
from etude.recordings.format import Contents, Format, Place, Problem, Unit
from etude.recordings.formats.source import DONE, ETUDE, FLAGS, KEYS, Source, described
from etude.recordings.formats.table_columns import Plan, TableColumns
from etude.recordings.formats.table_index import Index, Ints, index_of
from etude.recordings.formats.table_inputs import BROKEN, Group, groups_of
from etude.recordings.layout import Header


class _Common(NamedTuple):
    """What holds for all units."""

    where: str
    groups: Sequence[Group]
    first: Ints
    """The number of the first row of each group, and of all rows."""
    columns: TableColumns
    has_next: bool
    has_finals: bool

    def place(self, row: int) -> Place:
        """A row of the table."""
        g = int(np.searchsorted(self.first, row, side="right")) - 1
        group, inside = self.groups[g], row - int(self.first[g])
        return Place(group.place(inside), str(group.file or self.where), group.first + inside)


class _Unit(NamedTuple):
    start: int
    """The place of its first row in the order of time."""
    rows: Ints | None
    """Its rows, and the one behind them where that goes on; None where they stand in order."""
    follows: bool
    """The row behind its last one is the next of the same episode."""
    offsets: Ints
    """Of segments, from 0."""
    goes_on: NDArray[np.bool_]
    segments: Mapping[str, NDArray[Any]]
    common: _Common


class Table(Format):
    """A table that a `Source` describes. Rows come in order of time, whatever the files'."""

    name: Final = "table"

    def __init__(self, source: Source) -> None:
        self._source = source

    def describe(self) -> Contents:
        """What is there: its key columns are read.

        Raises:
            DataError: a file can't be read, a column is missing, or nothing says where episodes end.
        """
        source = self._source
        groups = groups_of(source.data, source.filesystem)
        files = list(dict.fromkeys(group.file for group in groups if group.file))
        where = str(files[0]) if len(files) == 1 else described(source.data)
        groups = [group for group in groups if group.num_rows]
        if not groups:
            raise DataError(f"{where}: there are no rows.")
        first = np.append(0, np.cumsum([group.num_rows for group in groups]))
        try:
            schema = pa.unify_schemas([group.schema for group in groups], promote_options="permissive")
            plan = Plan.of(schema, source.mapped(schema.names))
        except (DataError, *BROKEN) as error:
            raise DataError(f"{where}: {error}") from error
        columns = TableColumns(groups, schema, plan, source)
        keys = (*KEYS, col.T_INDEX, *FLAGS)
        found = {name: columns.key(plan.mapped[name][0]) for name in keys if name in plan.mapped}
        has_next = bool(col.under(plan.mapped, col.NEXT_OBS))
        has_finals = bool(col.under(plan.mapped, col.FINAL_OBS)) and not has_next
        common = _Common(where, groups, first, columns, has_next, has_finals)
        by_one = source.preset == ETUDE
        index = index_of(found, int(first[-1]), has_next, lambda row: common.place(row).words, by_one=by_one)
        header = Header(columns.obs_space, columns.action_space, source.env, _meta(plan, columns, index))
        units = [_unit(k, index, common) for k in range(len(index.parts) - 1)]
        return Contents(header, columns.steps, units, files)

    # -- reading ----------------------------------------------------------------------------------------------

    def read(self, unit: Unit, columns: Sequence[str], problems: list[Problem] | None = None) -> Experience:
        """Whole segments, or pieces of those that are longer than a unit. All or nothing can be read."""
        own: _Unit = unit.data
        common, offsets, stop = own.common, own.offsets, int(own.offsets[-1])
        nexts = [_next_of(name) for name in columns if col.is_under(name, col.OBS)] if common.has_next else []
        found = _rows(own, stop + own.follows, [*columns, *nexts])
        known = np.ones(len(offsets) - 1, bool) if common.has_next else own.goes_on.copy()
        final_obs = {name: _final(own, name, found) for name in col.under(columns, col.OBS)}
        if common.has_finals:
            known |= _add_finals(own, final_obs)
        segments = Segments.of(len(offsets) - 1, **own.segments, has_final_obs=known)
        if problems is not None:
            problems += (self._not_chained(unit, name, found) for name in nexts if _unlike(name, found, offsets).any())
        return Experience({name: found[name][:stop] for name in columns}, offsets, segments, final_obs)

    def place(self, unit: Unit, row: int, exp: Experience) -> Place:
        """Where a row is, as its file counts."""
        own: _Unit = unit.data
        return own.common.place(own.start + row if own.rows is None else int(own.rows[row]))

    def _not_chained(self, unit: Unit, name: str, found: Columns) -> Problem:
        other = _unlike(name, found, unit.data.offsets)
        place, count = self.place(unit, int(other.argmax()), _NOTHING), int(other.sum())
        text = (
            f"{place.words}: `{name}` is not the `{_obs_of(name)}` of the step that follows ({count:,} such places). "
            "Are the rows in order of time? Map `t`; or leave out `next_obs`, if it is another."
        )
        return Problem("not_chained", text, place.file, place.row, name, count, True, harmless=True)


_NOTHING: Final = Experience({}, np.zeros(1, np.int64), Segments.of(0, episode_id=[]), {})


def _meta(plan: Plan, columns: TableColumns, index: Index) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    inferred = dict(columns.inferred)
    if DONE in plan.mapped and col.TERMINATED not in plan.mapped:
        inferred[DONE] = "read as terminated, but where truncated: time limits can't be told apart"
    if index.stride > 1:
        inferred[col.T_INDEX] = f"counts by {index.stride} in the table"
    if index.is_clock:
        inferred[col.T_INDEX] = "times in the table: steps are numbered from 0"
    if col.EPISODE_ID not in plan.mapped:
        inferred[col.EPISODE_ID] = "the table has none: numbered"
    for name, found in (("inferred", inferred), ("dropped", columns.dropped)):
        if found:
            meta[name] = found
    return meta


def _unit(k: int, index: Index, common: _Common) -> Unit:
    which = slice(int(index.parts[k]), int(index.parts[k + 1]))
    start, stop = int(index.offsets[which.start]), int(index.offsets[which.stop])
    follows = bool(index.goes_on[which.stop - 1]) and not common.has_next
    rows = None if index.order is None else index.order[start : stop + follows]
    names = ("t_start", "terminated", "truncated")
    segments = {name: ids[which] for name, ids in index.ids.items()} | {n: getattr(index, n)[which] for n in names}
    offsets = index.offsets[which.start : which.stop + 1] - start
    place = common.place(start if rows is None else int(rows[0]))
    file = next((group.file for group in common.groups if str(group.file) == place.file), None)
    data = _Unit(start, rows, follows, offsets, index.goes_on[which], segments, common)
    return Unit(k, stop - start, file, place.row, data)


def _final(unit: _Unit, name: str, found: Columns) -> NDArray[Any]:
    offsets = unit.offsets
    if unit.common.has_next:
        return found[_next_of(name)][offsets[1:] - 1]
    final = np.zeros((len(offsets) - 1, *found[name].shape[1:]), found[name].dtype)
    inside = np.flatnonzero(unit.goes_on)
    final[inside] = found[name][offsets[1:][inside]]
    return final


def _add_finals(unit: _Unit, final_obs: Columns) -> NDArray[np.bool_]:
    """Put in what ``final_obs`` holds at the last row of each segment; tells where there is any."""
    common, last = unit.common, unit.offsets[1:] - 1
    rows = unit.start + last if unit.rows is None else unit.rows[last]
    known = np.zeros(len(rows), bool)
    group = np.searchsorted(common.first, rows, side="right") - 1
    for g in np.unique(group).tolist():
        here = np.flatnonzero(group == g)
        for name, values in final_obs.items():
            is_there, found = common.columns.finals(g, name, rows[here] - common.first[g])
            values[here[is_there]] = found
            known[here] = is_there
    return known


def _rows(unit: _Unit, num: int, names: Sequence[str]) -> Columns:
    """Columns of the first ``num`` rows, from whatever groups hold them."""
    common = unit.common
    if unit.rows is None:
        stop = unit.start + num
        first, last = np.searchsorted(common.first, (unit.start, stop - 1), side="right") - 1
        pieces = []
        for g in range(first, last + 1):
            inside = slice(max(0, unit.start - int(common.first[g])), stop - int(common.first[g]))
            pieces.append({name: v[inside] for name, v in common.columns.load(g, names).items()})
        return {n: pieces[0][n] if first == last else np.concatenate([p[n] for p in pieces]) for n in names}
    rows = unit.rows[:num]
    group = np.searchsorted(common.first, rows, side="right") - 1
    out: Columns = {}
    for g in np.unique(group).tolist():
        here = np.flatnonzero(group == g)
        for name, values in common.columns.load(g, names).items():
            if name not in out:
                out[name] = np.empty((len(rows), *values.shape[1:]), values.dtype)
            out[name][here] = values[rows[here] - common.first[g]]
    return out


def _next_of(obs: str) -> str:
    return col.NEXT_OBS + obs[len(col.OBS) :]


def _obs_of(next_obs: str) -> str:
    return col.OBS + next_obs[len(col.NEXT_OBS) :]


def _unlike(name: str, found: Columns, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool ``[rows - 1]``: where the next observation of a step is not the observation of the step after it."""
    after, obs = found[name][:-1], found[_obs_of(name)][1:]
    a, b = (values.reshape(len(values), math.prod(values.shape[1:])) for values in (after, obs))
    other = ((a != b) & ((a == a) | (b == b))).any(axis=1)
    other[offsets[1:-1] - 1] = False
    return np.asarray(other)
