# SPDX-License-Identifier: Apache-2.0
"""Any table, a row a step: Parquet, JSON, CSV, Arrow, or a table in memory, with a map from our columns to its own."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.experience import Experience, Segments
from etude.recordings.formats.parts import Place, Problem, UnreadableError, chosen
from etude.recordings.formats.source import DONE, ETUDE, FLAGS, KEYS, Source, described
from etude.recordings.formats.table_columns import Plan, TableColumns
from etude.recordings.formats.table_index import Index, index_of
from etude.recordings.formats.table_inputs import BROKEN, Group, groups_of
from etude.recordings.layout import Header


def open_parts(source: Source) -> "TableParts":
    """Open the table of ``source``: its key columns are read.

    Raises:
        DataError: a file can't be read, a column is missing, or nothing says where episodes end.
    """
    return TableParts(source)


class TableParts:
    """A table, opened; see `etude.recordings.formats.parts.Parts`. Rows come in order of time, whatever the files'."""

    format: Final = "table"

    def __init__(self, source: Source) -> None:
        groups = groups_of(source.data, source.filesystem)
        self.files = list(dict.fromkeys(group.file for group in groups if group.file))
        self._where = str(self.files[0]) if len(self.files) == 1 else described(source.data)
        groups = [group for group in groups if group.num_rows]
        if not groups:
            raise DataError(f"{self._where}: there are no rows.")
        self._first = np.append(0, np.cumsum([group.num_rows for group in groups]))
        self._groups = groups
        try:
            schema = pa.unify_schemas([group.schema for group in groups], promote_options="permissive")
            plan = Plan.of(schema, source.mapped(schema.names))
        except (DataError, *BROKEN) as error:
            raise DataError(f"{self._where}: {error}") from error
        self._columns = TableColumns(groups, schema, plan, source)
        keys = (*KEYS, col.T_INDEX, *FLAGS)
        found = {name: self._columns.key(plan.mapped[name][0]) for name in keys if name in plan.mapped}
        self._has_next = bool(col.under(plan.mapped, col.NEXT_OBS))
        self._has_finals = bool(col.under(plan.mapped, col.FINAL_OBS)) and not self._has_next
        by_one = source.preset == ETUDE
        self._index: Index = index_of(found, int(self._first[-1]), self._has_next, self._place, by_one=by_one)
        self.columns = self._columns.steps
        self.header = Header(self._columns.obs_space, self._columns.action_space, source.env, self._meta(plan))

    def _meta(self, plan: Plan) -> dict[str, Any]:
        meta: dict[str, Any] = {}
        inferred = dict(self._columns.inferred)
        if DONE in plan.mapped and col.TERMINATED not in plan.mapped:
            inferred[DONE] = "read as terminated, but where truncated: time limits can't be told apart"
        if self._index.stride > 1:
            inferred[col.T_INDEX] = f"counts by {self._index.stride} in the table"
        if self._index.is_clock:
            inferred[col.T_INDEX] = "times in the table: steps are numbered from 0"
        if col.EPISODE_ID not in plan.mapped:
            inferred[col.EPISODE_ID] = "the table has none: numbered"
        for name, found in (("inferred", inferred), ("dropped", self._columns.dropped)):
            if found:
                meta[name] = found
        return meta

    def _group_of(self, row: int) -> tuple[Group, int]:
        g = int(np.searchsorted(self._first, row, side="right")) - 1
        return self._groups[g], row - int(self._first[g])

    def _place(self, row: int) -> str:
        group, inside = self._group_of(row)
        return group.place(inside)

    # -- reading ----------------------------------------------------------------------------------------------

    @property
    def num_parts(self) -> int:
        """How many pieces are loaded one at a time."""
        return len(self._index.parts) - 1

    def rows(self, k: int) -> int:
        """The steps of part k."""
        return int(np.diff(self._index.offsets[self._index.parts[k : k + 2]])[0])

    def load_rest(self, k: int, columns: Sequence[str] | None = None) -> tuple[Experience, list[Problem]]:
        """Part ``k``, of which all or nothing can be read; and where its next observations do not fit.

        Raises:
            UnreadableError: nothing.
        """
        try:
            return self._loaded(k, columns)
        except DataError as error:
            place = self.place(k, 0)
            problem = Problem("unreadable", str(error), place.file, place.row, count=self.rows(k), repairable=True)
            raise UnreadableError(problem) from error

    def place(self, k: int, row: int) -> Place:
        """Where a row of part ``k`` is."""
        group, inside = self._group_of(self._index.row_at(int(self._index.offsets[self._index.parts[k]]) + row))
        return Place(group.place(inside), str(group.file or self._where), group.first + inside)

    def load(self, k: int, columns: Sequence[str] | None = None) -> Experience:
        """Whole segments, or pieces of those that are longer than a part.

        Raises:
            DataError: a column can't be read.
        """
        return self._loaded(k, columns)[0]

    def _loaded(self, k: int, columns: Sequence[str] | None) -> tuple[Experience, list[Problem]]:
        index, names = self._index, chosen(self.columns, columns, self._where)
        which = slice(int(index.parts[k]), int(index.parts[k + 1]))
        start, stop = int(index.offsets[which.start]), int(index.offsets[which.stop])
        follows = bool(index.goes_on[which.stop - 1]) and not self._has_next
        nexts = [col.NEXT_OBS + n[len(col.OBS) :] for n in names if col.is_under(n, col.OBS)] if self._has_next else []
        found = self._rows(start, stop + follows, [*names, *nexts])
        offsets = index.offsets[which.start : which.stop + 1] - start
        known = np.ones(len(offsets) - 1, bool) if self._has_next else index.goes_on[which].copy()
        final_obs = {name: self._final(name, found, offsets, which) for name in col.under(names, col.OBS)}
        if self._has_finals:
            known |= self._add_finals(final_obs, start + offsets[1:] - 1)
        segments = Segments.of(
            which.stop - which.start,
            **{name: ids[which] for name, ids in index.ids.items()},
            t_start=index.t_start[which],
            terminated=index.terminated[which],
            truncated=index.truncated[which],
            has_final_obs=known,
        )
        exp = Experience({name: found[name][: stop - start] for name in names}, offsets, segments, final_obs)
        return exp, [
            self._not_chained(k, name, found, offsets) for name in nexts if _unlike(name, found, offsets).any()
        ]

    def _not_chained(self, k: int, name: str, found: Columns, offsets: NDArray[np.int64]) -> Problem:
        other = _unlike(name, found, offsets)
        place, count = self.place(k, int(other.argmax())), int(other.sum())
        text = (
            f"{place.words}: `{name}` is not the `{_obs_of(name)}` of the step that follows ({count:,} such places). "
            "Are the rows in order of time? Map `t`; or leave out `next_obs`, if it is another."
        )
        return Problem("not_chained", text, place.file, place.row, name, count, True, harmless=True)

    def _final(self, name: str, found: Columns, offsets: NDArray[np.int64], which: slice) -> NDArray[Any]:
        if self._has_next:
            return found[col.NEXT_OBS + name[len(col.OBS) :]][offsets[1:] - 1]
        final = np.zeros((len(offsets) - 1, *found[name].shape[1:]), found[name].dtype)
        inside = np.flatnonzero(self._index.goes_on[which])
        final[inside] = found[name][offsets[1:][inside]]
        return final

    def _add_finals(self, final_obs: Columns, last: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Put in what ``final_obs`` holds at the positions ``last``, one for each segment; tells where there is any."""
        order = self._index.order
        rows = last if order is None else order[last]
        known = np.zeros(len(rows), bool)
        group = np.searchsorted(self._first, rows, side="right") - 1
        for g in np.unique(group).tolist():
            here = np.flatnonzero(group == g)
            for name, values in final_obs.items():
                is_there, found = self._columns.finals(g, name, rows[here] - self._first[g])
                values[here[is_there]] = found
                known[here] = is_there
        return known

    def _rows(self, start: int, stop: int, names: Sequence[str]) -> Columns:
        """Columns at the positions from ``start``, from whatever groups hold them."""
        order = self._index.order
        if order is None:
            first, last = np.searchsorted(self._first, (start, stop - 1), side="right") - 1
            pieces = []
            for g in range(first, last + 1):
                inside = slice(max(0, start - int(self._first[g])), stop - int(self._first[g]))
                pieces.append({name: v[inside] for name, v in self._columns.load(g, names).items()})
            return {n: pieces[0][n] if first == last else np.concatenate([p[n] for p in pieces]) for n in names}
        rows = order[start:stop]
        group = np.searchsorted(self._first, rows, side="right") - 1
        out: Columns = {}
        for g in np.unique(group).tolist():
            here = np.flatnonzero(group == g)
            for name, values in self._columns.load(g, names).items():
                if name not in out:
                    out[name] = np.empty((len(rows), *values.shape[1:]), values.dtype)
                out[name][here] = values[rows[here] - self._first[g]]
        return out

    # -- looking ----------------------------------------------------------------------------------------------

    def problems(self) -> Iterator[Problem]:
        """None: all that is wrong is seen in the steps."""
        return iter(())


def _obs_of(next_obs: str) -> str:
    return col.OBS + next_obs[len(col.NEXT_OBS) :]


def _unlike(name: str, found: Columns, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool ``[rows - 1]``: where the next observation of a step is not the observation of the step after it."""
    after, obs = found[name][:-1], found[_obs_of(name)][1:]
    a, b = (values.reshape(len(values), math.prod(values.shape[1:])) for values in (after, obs))
    other = ((a != b) & ((a == a) | (b == b))).any(axis=1)
    other[offsets[1:-1] - 1] = False
    return np.asarray(other)
