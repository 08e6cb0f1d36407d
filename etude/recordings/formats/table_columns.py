# SPDX-License-Identifier: Apache-2.0
"""The columns of a table by our names: which there are, what their spaces are, and their numbers group by group."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.recordings.formats.inferring import Range, fitting, inferred_space, needs_range, reserved, widen, widened
from etude.recordings.formats.kept import Kept
from etude.recordings.formats.source import FLAGS, KEYS, Source
from etude.recordings.formats.table_inputs import BROKEN, Group, unreadable
from etude.recordings.formats.table_values import flat, is_text, one_array, strings
from etude.spaces import Space, leaf_shape, leaves

CACHE_BYTES: Final = 256 * 2**20
"""Decoded groups that are kept, so that parts of one group, or rows that are scattered, are not decoded each time."""
NUMBERS: Final = (col.OBS, col.ACTION, col.REWARD, col.ENV_T, col.WEIGHT)
OWN: Final = (*NUMBERS, col.INFO)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which columns of a table are what."""

    mapped: Mapping[str, tuple[str, ...]]
    """For each of our columns, the table's."""
    extras: Mapping[str, str]
    """The table's other columns, by the names they get."""

    @staticmethod
    def of(schema: pa.Schema, mapped: Mapping[str, tuple[str, ...]]) -> "Plan":
        """The plan for a table; its columns that are not ``mapped`` are extras."""
        used = {name for own in mapped.values() for name in own}
        extras = {}
        for name in schema.names:
            if name not in used and not name.startswith("__index_level_"):  # pandas' index without a name
                taken = reserved(name) or any(col.is_under(name, own) for own in (*OWN, *mapped))
                extras[f"extra/{name}" if taken else name] = name
        return Plan(mapped, extras)


class TableColumns:
    """Columns of groups of rows, decoded when they are asked for."""

    def __init__(self, groups: Sequence[Group], schema: pa.Schema, plan: Plan, source: Source) -> None:
        self._groups, self._schema, self._plan = groups, schema, plan
        self._kept: Kept[Columns] = Kept(CACHE_BYTES)
        self._found: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        self.inferred: dict[str, str] = {}
        """What was made out from the numbers alone, by column."""
        self.dropped: dict[str, str] = {}
        """Columns of the table that can't be kept, and why."""
        for group in groups:
            missing = [n for own in plan.mapped.values() for n in own if n not in group.schema.names]
            if missing:
                raise DataError(f"{group.place(0)}: there is no column `{missing[0]}`, which other files have.")
        self._look()
        self.obs_space = self._space(col.OBS, source.obs_space)
        self.action_space = self._space(col.ACTION, source.action_space)
        self._fit()
        self.steps = [n for n in self._found if not col.is_under(n, col.NEXT_OBS)]

    def key(self, name: str) -> pa.ChunkedArray:
        """One column of the table, of all groups."""
        return pa.chunked_array([self._read(group, [name])[name].combine_chunks() for group in self._groups])

    def load(self, g: int, names: Sequence[str]) -> Columns:
        """Columns of one group, by our names."""
        plan = {**self._values(), **{name: (own,) for name, own in self._plan.extras.items()}}
        out: Columns = {}
        for name, own in plan.items():
            if any(col.is_under(wanted, name) for wanted in names):
                out |= self._kept.get((g, name), partial(self._decode, g, name, own))
        missing = [name for name in names if name not in out]
        if missing:
            raise DataError(f"{self._groups[g].place(0)}: `{missing[0]}` is missing here, but not in the first rows.")
        return {name: out[name] for name in names}

    def _decode(self, g: int, name: str, own: Sequence[str]) -> tuple[Columns, int]:
        found = {path: self._as_planned(g, path, values) for path, values in self._raw(g, name, own).items()}
        return found, sum(values.nbytes for values in found.values())

    def finals(self, g: int, name: str, rows: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[Any]]:
        """Whether ``final_obs`` is there in some rows of one group, and where it is, the numbers.

        Args:
            g: The group.
            name: The column of observations.
            rows: The rows of the group.
        """
        (own,) = self._plan.mapped[col.FINAL_OBS + name[len(col.OBS) :]]
        array = one_array(self._read(self._groups[g], [own]), own).take(pa.array(rows))
        known = np.asarray(array.is_valid())
        if not known.any():
            shape, dtype = self._found[name]
            return known, np.zeros((0, *shape), dtype)
        values = flat(array.drop_null(), own, lambda row: self._groups[g].place(int(rows[known][row])))
        return known, self._as_planned(g, name, values[own])

    # -- what there is ----------------------------------------------------------------------------------------

    def _values(self) -> dict[str, tuple[str, ...]]:
        """The columns that are decoded to arrays, of the plan."""
        others = (*KEYS, col.SEGMENT, col.T_INDEX, *FLAGS)
        return {
            name: own
            for name, own in self._plan.mapped.items()
            if name not in others and not col.is_under(name, col.FINAL_OBS)
        }

    def _look(self) -> None:
        """Shapes and dtypes, from the first group."""
        for name, own in self._values().items():
            for path, values in self._raw(0, name, own).items():
                self._found[path] = values.shape[1:], values.dtype
        for name, own_name in self._plan.extras.items():
            if not all(own_name in group.schema.names for group in self._groups):
                self.dropped[name] = "not in every file"
                continue
            try:
                found = self._raw(0, name, (own_name,))
            except DataError as error:
                self.dropped[name] = str(error)
            else:
                self._found |= {path: (values.shape[1:], values.dtype) for path, values in found.items()}

    def _space(self, root: str, given: Space | None) -> Space:
        names = col.under(self._found, root)
        if given is None:
            self.inferred[root] = "the space, from the numbers"
            found = {name: self._found[name][::-1] for name in names}
            ranges = self._ranges(root) if any(needs_range(name, *own) for name, own in found.items()) else {}
            space = inferred_space(found, root, ranges)
        else:
            wanted = leaves(given, root)
            if set(wanted) != set(names):
                raise DataError(f"`{root}` has the columns {names}, but its space has {list(wanted)}: {given}.")
            for name, leaf in wanted.items():
                if np.prod(leaf_shape(leaf)) != np.prod(self._found[name][0]):
                    raise DataError(
                        f"`{name}` has rows of shape {list(self._found[name][0])}, but its space is {leaf}."
                    )
            space = widened(given, root, {n: fitting(leaf, self._found[n][1]) for n, leaf in wanted.items()})
        for name, leaf in leaves(space, root).items():
            self._found[name] = leaf_shape(leaf), np.dtype(leaf.dtype)
        return space

    def _ranges(self, root: str) -> dict[str, Range]:
        """The smallest and largest whole numbers under ``root`` in all groups."""
        ranges: dict[str, Range] = {}
        for name, own in self._plan.mapped.items():
            if col.is_under(name, root) or (root == col.OBS and col.is_under(name, col.NEXT_OBS)):
                for g in range(len(self._groups)):
                    widen(ranges, self._raw(g, name, own))
        return ranges

    def _fit(self) -> None:
        """Rewards are single floats, next observations are as observations."""
        if col.REWARD in self._found:
            shape, dtype = self._found[col.REWARD]
            if shape not in ((), (1,)) or dtype.kind == "O":
                raise DataError(f"`{col.REWARD}` has rows of shape {list(shape)}, not one number each.")
            self._found[col.REWARD] = (), dtype if dtype.kind == "f" else np.dtype(np.float64)
        finals, like = col.under(self._plan.mapped, col.FINAL_OBS), [*col.renamed(self._found, col.OBS, col.FINAL_OBS)]
        if finals and set(finals) != set(like):
            raise DataError(f"`{col.FINAL_OBS}` has the columns {finals}, but those of `{col.OBS}` ask for {like}.")
        nexts = col.under(self._found, col.NEXT_OBS)
        wanted = {col.NEXT_OBS + n[len(col.OBS) :]: n for n in col.under(self._found, col.OBS)}
        if nexts and set(nexts) != set(wanted):
            raise DataError(f"`{col.NEXT_OBS}` has the columns {nexts}, but those of `{col.OBS}` are {[*wanted]}.")
        for name in nexts:
            self._found[name] = self._found[wanted[name]]

    # -- reading ----------------------------------------------------------------------------------------------

    def _read(self, group: Group, names: Sequence[str]) -> pa.Table:
        """Columns of the table as they are, of the types that all groups have together."""
        fields = pa.schema([self._schema.field(name) for name in names])
        try:
            table = group.read(names)
            return table if table.schema.equals(fields) else table.cast(fields)
        except BROKEN as error:
            raise unreadable(group.file, error) from error

    def _raw(self, g: int, name: str, own: Sequence[str]) -> Columns:
        """One of our columns in a group: the numbers as they are in the table."""
        group = self._groups[g]
        table = self._read(group, own)
        if len(own) == 1:
            array = one_array(table, own[0])
            if is_text(array.type) and not any(col.is_under(name, root) for root in (*NUMBERS, col.NEXT_OBS)):
                return {name: strings(array, own[0], group.place)}
            found = flat(array, own[0], group.place)
            return {name + path[len(own[0]) :]: values for path, values in found.items()}
        parts = [flat(one_array(table, part), part, group.place) for part in own]
        for part, found in zip(own, parts, strict=True):
            if list(found) != [part] or found[part].ndim != 1:
                raise DataError(f"{group.place(0)}: column `{part}` holds more than one number a row: map it alone.")
        return {name: np.stack([found[part] for part, found in zip(own, parts, strict=True)], axis=1)}

    def _as_planned(self, g: int, name: str, values: NDArray[Any]) -> NDArray[Any]:
        if name not in self._found:
            return values  # a member that the first rows have not; nobody can ask for it
        shape, dtype = self._found[name]
        if int(np.prod(shape)) * len(values) != values.size:
            raise DataError(
                f"{self._groups[g].place(0)}: `{name}` has rows of shape {list(values.shape[1:])} from here on, but "
                f"{list(shape)} before. All rows must have one shape."
            )
        if dtype.kind == "O" or values.dtype == dtype:
            return values.reshape(len(values), *shape)
        return values.reshape(len(values), *shape).astype(dtype)
