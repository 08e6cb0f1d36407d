# SPDX-License-Identifier: Apache-2.0
"""Read tables with a row per step (Parquet, JSON, CSV, Arrow, or in memory) by a mapping of their columns."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.experience import Experience, Segments
from etude.experience.table import shape_of
from etude.recordings.format import MAPPING, Contents, Format, Place, Problem, Unit, follow, most_rows, not_chained
from etude.recordings.formats import inferring, table_index, table_inputs
from etude.recordings.formats.arrow import RowPlace, flat, innermost, is_list, is_text, numbers, one_array, strings
from etude.recordings.formats.parquet_files import DecodedCache
from etude.recordings.formats.sorting import bounds_of, sorted_groups
from etude.recordings.formats.source import (
    DONE,
    ETUDE,
    EVERY_ROW,
    FLAGS,
    KEYS,
    LAST_ROW,
    PROPENSITY,
    Source,
    described,
    without_order,
)
from etude.recordings.formats.table_index import Ints, TableIndex
from etude.recordings.formats.table_inputs import BROKEN, Group, unreadable
from etude.recordings.layout import HEADER_KEY, Header
from etude.spaces import NamedDiscrete, Space, leaf_dtype, leaf_shape, leaves

_log = logging.getLogger("etude.recordings")

# -- columns, decoded group by group ---------------------------------------------------------------------------------


CACHE_BYTES: Final = 32 * 2**20
"""Size of the cache in bytes. It keeps decoded groups, so that reading a group in parts decodes it only once."""
OWN: Final = (col.OBS, col.ACTION, col.REWARD, col.ENV_T, col.WEIGHT, col.INFO)
CODED: Final = (col.OBS, col.ACTION, col.NEXT_OBS, col.FINAL_OBS)
"""Columns in which text becomes numbers with names."""
_CHECKED: Final = (col.OBS, col.ACTION, col.REWARD, col.NEXT_OBS, col.LOGP)
"""Columns whose missing values are read as NaN, because NaN in them is reported later."""
HAS_FINAL: Final = "final_obs in etude"
"""The column that says which rows have a final observation, bool ``[rows]``."""
_FEW: Final = 100
"""The most different values that a column of choices is expected to have."""
_ROUNDING: Final = 1e-6
"""How far a float32 probability may exceed 1."""


@dataclasses.dataclass(frozen=True)
class ColumnMap:
    """The meaning of a table's columns."""

    mapped: Mapping[str, tuple[str, ...]]
    """The table's columns, by Etude's names."""
    extras: Mapping[str, str]
    """The table's other columns, by their names in the recording."""
    vectors: frozenset[str] = frozenset()
    """Etude's columns that are vectors, even if they have only one of the table's columns."""
    ends: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Flags that have no column, with their value: `EVERY_ROW` or `LAST_ROW`."""
    is_propensity: bool = False
    """Whether the column of ``logp`` holds probabilities."""

    @staticmethod
    def of(schema: pa.Schema, mapped: Mapping[str, tuple[str, ...]]) -> "ColumnMap":
        """Create the map of a table with the given ``schema``.

        Args:
            schema: The table's columns; those that are not in ``mapped`` are extras.
            mapped: The result of `Source.mapped`.

        Raises:
            DataError: more than one flag is `LAST_ROW`.
        """
        ends = {name: mapped[name][0] for name in FLAGS if name in mapped and mapped[name][0] not in schema.names}
        if len(both := [name for name, word in ends.items() if word == LAST_ROW]) > 1:
            raise DataError(f"{' and '.join(both)} are both {LAST_ROW}, but an episode ends in one way: leave one out.")
        is_propensity = PROPENSITY in mapped
        own_names = {name: col.LOGP if name == PROPENSITY else name for name in mapped if name not in ends}
        mapped, vectors = _parts_apart({own: mapped[name] for name, own in own_names.items()}, schema)
        used = {name for own in mapped.values() for name in own}
        extras = {}
        for name in schema.names:
            if name not in used and not name.startswith("__index_level_"):  # an unnamed pandas index
                taken = inferring.reserved(name) or any(col.is_under(name, own) for own in (*OWN, *mapped))
                extras[f"extra/{name}" if taken else name] = name
        return ColumnMap(mapped, extras, vectors, ends, is_propensity)


def _parts_apart(
    mapped: Mapping[str, tuple[str, ...]], schema: pa.Schema
) -> tuple[dict[str, tuple[str, ...]], frozenset[str]]:
    """Make each column of text or lists a part of its own if several columns are mapped to one name.

    The other columns stay one vector; the names of these vectors are returned, too. Parts of next observations are
    named like those of observations at the same positions.
    """
    out: dict[str, tuple[str, ...]] = {}
    vectors: list[str] = []
    for name, own in mapped.items():
        alike = mapped.get(col.as_obs(name), own)
        kinds = [schema.field(part).type for part in alike]
        apart = {
            part: one for part, one, kind in zip(alike, own, kinds, strict=False) if is_text(kind) or is_list(kind)
        }
        if not apart or len(own) == 1 or len(alike) != len(own) or not any(col.is_under(name, root) for root in CODED):
            out[name] = own
            continue
        if others := tuple(one for one in own if one not in apart.values()):
            vectors.append(f"{name}{col.SEPARATOR}{'all numbers' if 'numbers' in apart else 'numbers'}")
            out[vectors[-1]] = others
        out |= {f"{name}{col.SEPARATOR}{part}": (one,) for part, one in apart.items()}
    return out, frozenset(vectors)


class TableColumns:
    """The columns of a table, decoded group by group on demand."""

    def __init__(self, groups: Sequence[Group], schema: pa.Schema, plan: ColumnMap, source: Source) -> None:
        self._groups, self._schema, self._plan = groups, schema, plan
        self._where = str(groups[0].file or "the table")
        self._kept: DecodedCache[Columns] = DecodedCache(CACHE_BYTES)
        self._found: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        self._texts: dict[str, set[str]] = {}  # by column, all texts found
        self._named: dict[str, NamedDiscrete] = {}
        for group in groups:
            missing = [n for own in plan.mapped.values() for n in own if n not in group.schema.names]
            if missing:
                what = "which other files have."
                if HEADER_KEY in (group.schema.metadata or {}):
                    what = (
                        "as this is a recording of Etude's: `columns` are for tables. Convert the table, and give both."
                    )
                raise DataError(f"{group.place(0)}: there is no column `{missing[0]}`, {what}")
        self._as_time, self.date_order = self._times(source)
        self.inferred: dict[str, str] = {}
        """What was inferred from the numbers alone, by column."""
        self.dropped: dict[str, str] = {}
        """Columns of the table that can't be kept, and why."""
        self.warnings: list[Problem] = []
        """Warnings that columns may have another meaning than the one that they are read with."""
        for name, own in self._values().items():
            self._found |= self._shapes(name, own)

        @functools.cache
        def complete(g: int) -> Collection[str]:
            known = groups[g].complete
            return known() if known else ()

        for name, column in plan.extras.items():
            if reason := self._unusable(name, column, complete):
                self.dropped[name] = reason
        if source.obs_space is None:
            self._widen()
        self._warn_of_unknown()
        try:
            self.obs_space = self._space(col.OBS, source.obs_space)
            self.action_space = self._space(col.ACTION, source.action_space)
            self._fit()
        except DataError as error:
            is_said = any(str(group.file or self._where) in str(error) for group in groups)
            raise DataError(str(error) if is_said else f"{self._where}: {error}") from error
        self.steps = [n for n in self._found if not col.is_under(n, col.NEXT_OBS)]

    def warn(self, message: str) -> None:
        """Log a warning, and keep it for `validate`."""
        _log.warning("%s", message)
        self.warnings.append(Problem(MAPPING, message, self._where, count=0, harmless=True))

    @property
    def row_bytes(self) -> int:
        """The size of one row of all columns in memory, in bytes."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._found.values())

    def over(self, groups: Sequence[Group]) -> "TableColumns":
        """Return a copy for ``groups`` with the same rows in another order; what was inferred is not read again."""
        other = copy.copy(self)
        other._groups, other._schema, other._kept = groups, groups[0].schema, DecodedCache(CACHE_BYTES // 8)
        return other

    def of_table(self) -> list[str]:
        """The names of the table's columns that are needed."""
        own = [n for names in self._plan.mapped.values() for n in names]
        return list(dict.fromkeys([*own, *(n for name, n in self._plan.extras.items() if name not in self.dropped)]))

    def tables(self, names: Sequence[str]) -> Iterator[pa.Table]:
        """Yield columns of the table unchanged, group by group."""
        return (self._read(group, names) for group in self._groups)

    def keys(self, names: Sequence[str]) -> Iterator[tuple[int, dict[str, pa.ChunkedArray]]]:
        """Yield the number of rows of each group, and its columns by Etude's names.

        Columns are unchanged, except that a ``t`` of text, or of numbers that are times, becomes timestamps. A flag
        without a column is True in every row.
        """
        columns = {name: self._plan.mapped[name] for name in names if name in self._plan.mapped}
        for group in self._groups:
            table = self._read(group, list(dict.fromkeys(part for parts in columns.values() for part in parts)))
            found = {name: _joined(table, parts, group.place) for name, parts in columns.items()}
            if col.T_INDEX in found and self._as_time is not None:
                t = self._as_time(one_array(found[col.T_INDEX]), group.place)
                found[col.T_INDEX] = pa.chunked_array([t])
            always = pa.chunked_array([pa.array(np.ones(group.num_rows, bool))])
            yield group.num_rows, {name: found.get(name, always) for name in names}

    def load(self, g: int, names: Sequence[str]) -> Columns:
        """Load columns of group ``g`` by Etude's names, ``[rows, ...]`` each.

        Raises:
            DataError: a column is missing or can't be decoded.
        """
        finals = col.subtree(self._plan.mapped, col.FINAL_OBS)
        plan = {**self._values(), **finals, **{name: (own,) for name, own in self._plan.extras.items()}}
        out: Columns = {}
        for name, own in plan.items():
            if any(col.is_under(wanted, name) for wanted in names):
                out |= self._kept.get((g, name), partial(self._decode, g, name, own))
        missing = [name for name in names if name not in out]
        if missing:
            raise DataError(f"{self._groups[g].place(0)}: `{missing[0]}` is missing here, but not in the first rows.")
        return {name: out[name] for name in names}

    def _decode(self, g: int, name: str, own: Sequence[str]) -> tuple[Columns, int]:
        if col.is_under(name, col.FINAL_OBS):
            found = self._finals(g, name, own)
        else:
            place = self._groups[g].place
            found = {path: self._as_planned(path, values, place) for path, values in self._raw(g, name, own).items()}
        return found, sum(values.nbytes for values in found.values())

    def _finals(self, g: int, name: str, own: Sequence[str]) -> Columns:
        """The final observations, 0 where they are empty; and as `HAS_FINAL`, where they are not."""
        group = self._groups[g]
        table = self._read(group, own)
        known = np.all([np.asarray(one_array(table[part]).is_valid()) for part in own], axis=0)
        rows = np.flatnonzero(known)
        shape, dtype = self._found[col.as_obs(name)]
        out = np.zeros((len(known), *shape), dtype)
        if len(rows):

            def place(row: int) -> str:
                return group.place(int(rows[row]))

            found = self._numbers(table.filter(pa.array(known)), name, own, place)
            out[rows] = self._as_planned(col.as_obs(name), found[name], place, "`, `".join(own))
        return {name: out, HAS_FINAL: known}

    # -- shapes, dtypes and spaces ----------------------------------------------------------------------------

    def _times(self, source: Source) -> tuple[Callable[[pa.Array, RowPlace], pa.Array] | None, str | None]:
        """Decide from all rows of ``t`` whether it holds times as text or as numbers.

        Returns:
            The function that converts these to timestamps, None if there are none; and the order of day and month in
            dates, one of `DATE_ORDERS`, None if it is unknown.
        """
        (own,) = self._plan.mapped.get(col.T_INDEX, ("",))
        if not own or source.preset == ETUDE:
            return None, None
        _, order = without_order(str(source.columns.get(col.T_INDEX, own)), self._schema.names)
        kind, arrays = self._schema.field(own).type, (one_array(table[own]) for table in self.tables([own]))
        if is_text(kind):
            order = order or table_index.date_order(arrays)
            return partial(table_index.times, name=own, order=order), order
        is_time = table_index.can_be_times(kind) and table_index.are_times(arrays)
        return table_index.number_times if is_time else None, order

    def _values(self) -> dict[str, tuple[str, ...]]:
        """The mapped columns that are decoded to arrays."""
        others = (*KEYS, col.SEGMENT, col.T_INDEX, *FLAGS)
        return {
            name: own
            for name, own in self._plan.mapped.items()
            if name not in others and not col.is_under(name, col.FINAL_OBS)
        }

    def _shapes(self, name: str, own: Sequence[str]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """The row shape and dtype of each part of one of Etude's columns, from the first group."""
        return {path: (values.shape[1:], values.dtype) for path, values in self._raw(0, name, own).items()}

    def _unusable(self, name: str, own: str, complete: Callable[[int], Collection[str]]) -> str | None:
        """Find the row shape and dtype of an extra column; returns the reason if it can't be kept.

        Integers and booleans can't be kept if values are missing, because they can't be NaN; nor can lists of different
        lengths. ``complete`` returns the columns of a group that have no missing values.
        """
        kind = self._schema.field(own).type
        mapped = (part for parts in self._plan.mapped.values() for part in parts)
        if pa.types.is_struct(kind) and any(part.startswith((f"{own}.", f"{own}/")) for part in mapped):
            return "members of it are mapped"
        if not all(own in group.schema.names for group in self._groups):
            return "not in every file"
        is_whole = pa.types.is_integer(innermost(kind)) or pa.types.is_boolean(innermost(kind))
        is_ragged = is_list(kind) and not pa.types.is_fixed_size_list(kind)
        found: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        try:
            found = self._shapes(name, (own,))
            self._found |= found
            for g, group in enumerate(self._groups[1:] if is_whole or is_ragged else (), 1):
                if is_ragged or own not in complete(g):
                    array = one_array(self._read(group, [own])[own])
                    values = numbers(array, own, group.place, with_nan=not is_whole)
                    self._as_planned(name, values, group.place)
        except DataError as error:
            for path in found:
                del self._found[path]
            return str(error)
        return None

    def _widen(self) -> None:
        """Widen the dtype of integer observations if next observations are larger or have fractions."""
        for name in col.under(self._found, col.OBS):
            shape, dtype = self._found[name]
            if dtype.kind in "iu" and self._misfits(name, dtype):
                wide = np.dtype(np.float64 if self._misfits(name, np.dtype(np.int64)) else np.int64)
                self._found[name] = shape, wide

    def _misfits(self, name: str, dtype: np.dtype[Any]) -> bool:
        """Whether next or final observations have another type, and numbers that do not fit in ``dtype``."""
        mapped, later = self._plan.mapped, col.moved(name, col.OBS, col.NEXT_OBS)
        if name in mapped:
            after = [part for own in (later, col.moved(name, col.OBS, col.FINAL_OBS)) for part in mapped.get(own, ())]
            kinds = {str(self._schema.field(part).type) for part in (*mapped[name], *after)}
            return len(kinds) > 1 and self._lies_in(after, dtype) is not None
        if self._found.get(later, self._found[name])[1] == self._found[name][1]:
            return False
        whole = next(own for own in mapped if col.is_under(later, own))
        for g in range(len(self._groups)):  # a member of a struct
            values = self._raw(g, whole, mapped[whole]).get(later, np.zeros(0))
            values = values[~np.isnan(values)] if values.dtype.kind == "f" else values
            if not np.array_equal(values.astype(dtype), values):
                return True
        return False

    def _space(self, root: str, given: Space | None) -> Space:
        names = col.under(self._found, root)
        if given is None:
            self.inferred[root] = "the space, from the numbers"
            found = {name: self._found[name][::-1] for name in names}
            ranges = self._ranges(root) if any(inferring.needs_range(name, *own) for name, own in found.items()) else {}
            space = inferring.inferred_space(found, root, ranges, col.subtree(self._texts, root))
            self._warn_of_many_names(root)
            if root == col.ACTION and isinstance(space, spaces.Box) and not space.shape:
                self._warn_of_whole_actions(space)
        else:
            wanted = leaves(given, root)
            if set(wanted) != set(names):
                texts = [name for name in self._texts if name in names and name not in wanted]
                why = "".join(f" `{name}` is text, such as {min(self._texts[name])[:40]!r}." for name in texts)
                raise DataError(f"`{root}` has the columns {names}, but its space has {list(wanted)}: {given}.{why}")
            for name, leaf in wanted.items():
                shape = self._found[name][0]
                if not inferring.fits(shape, leaf_shape(leaf)):
                    raise DataError(f"`{name}` has rows of shape {list(shape)}, but its space is {leaf}.")
                if name in self._texts and not isinstance(leaf, NamedDiscrete):
                    raise DataError(f"`{name}` is text, but its space, {leaf}, has no names: give a NamedDiscrete.")
            # Numbers get the dtype of the given space: tables often hold them wider than the env gave them.
            dtypes = {}
            for name, leaf in wanted.items():
                keeps = leaf_dtype(leaf).kind == "f" or self._fit_in(name, leaf_dtype(leaf))
                dtypes[name] = leaf_dtype(leaf) if keeps else inferring.fitting(leaf, self._found[name][1])
            space = inferring.widened(given, root, dtypes)
        several = {n: own for n, own in self._plan.mapped.items() if len(own) > 1 or n in self._plan.vectors}
        space = inferring.named(space, root, several)
        for name, leaf in leaves(space, root).items():
            self._found[name] = leaf_shape(leaf), np.dtype(leaf.dtype)
            if name in self._texts and isinstance(leaf, NamedDiscrete):
                self._named[name] = leaf
        return space

    def _warn_of_unknown(self) -> None:
        """Warn if the action or the reward is also mapped as an observation."""
        mapped = {
            root: [part for own in col.subtree(self._plan.mapped, root).values() for part in own]
            for root in (col.OBS, col.ACTION, col.REWARD)
        }
        for root in (col.ACTION, col.REWARD):
            if both := [own for own in mapped[root] if own in mapped[col.OBS]]:
                what = f"`{both[0]}` is mapped as both `{col.OBS}` and `{root}`: a policy can't see it before it acts."
                self.warn(f"{self._where}: column {what}")

    def _warn_of_many_names(self, root: str) -> None:
        """Warn of text with a different value in many rows, or with many numbers: these are unlikely to be names."""
        rows = sum(group.num_rows for group in self._groups)
        for name, texts in col.subtree(self._texts, root).items():
            if len(texts) > _FEW and 4 * len(texts) > rows:
                self.warn(
                    f"{self._where}: `{name}` is text with {len(texts):,} different values in "
                    f"{rows:,} rows, such as {min(texts)[:40]!r}. They are read as names, which have no order, and a "
                    "policy refuses others. If they hold numbers, convert them."
                )
            elif other := inferring.no_number(sorted(texts)):
                self.warn(
                    f"{self._where}: `{name}` is text: most of its {len(texts):,} different values are numbers, but "
                    f"{other[:40]!r} is not. All are read as names, which have no order. If they should be numbers, "
                    "correct it, or leave its rows out."
                )

    def _warn_of_whole_actions(self, space: spaces.Box) -> None:
        """Warn of actions that are read as continuous, but are whole numbers and may be choices.

        They are below 0, large, or floats (pandas makes floats of integers if some are missing).
        """
        (own,) = self._plan.mapped.get(col.ACTION, ("",))
        values = np.unique(self._raw(0, col.ACTION, [own])[col.ACTION]) if own else np.zeros(0)
        values = values[np.isfinite(values)]
        is_few = 1 < len(values) <= _FEW and (values == np.round(values)).all()
        if is_few or (own and space.dtype.kind == "i"):
            few = ", ".join(f"{value:g}" for value in values[:5])
            self.warn(
                f"{self._where}: the actions in column `{own}` are whole numbers of type {space.dtype} ({few}), so "
                "they are read as continuous. If they are choices, convert them to integers from 0, or to words."
            )

    def _fit_in(self, name: str, dtype: np.dtype[Any]) -> bool:
        """Whether a column of integers, with its next and final observations, fits in the dtype of its given space.

        Raises:
            DataError: next or final observations fit neither in this dtype nor in that of the column.
        """
        found = self._found[name][1]
        if dtype.kind + found.kind not in ("ii", "iu", "ui", "uu") or name not in self._plan.mapped:
            return False
        roots = (col.NEXT_OBS, col.FINAL_OBS) if col.is_under(name, col.OBS) else ()
        later = [col.moved(name, col.OBS, root) for root in roots]
        fits = np.can_cast(found, dtype, "safe") or self._lies_in(self._plan.mapped[name], dtype) is None
        after = [part for one in later for part in self._plan.mapped.get(one, ())]
        wrong = self._lies_in(after, dtype if fits else found)
        if wrong and not np.can_cast(found, dtype, "safe"):
            fits, wrong = False, self._lies_in(after, found)
        if wrong:
            raise DataError(f"{wrong}, which do not fit in the {dtype if fits else found} of `{name}`. Correct them.")
        if not fits:
            self.warn(f"{self._where}: `{name}` has numbers that do not fit in the {dtype} of its space.")
        return fits

    def _lies_in(self, names: Sequence[str], dtype: np.dtype[Any]) -> str | None:
        """Describe a column with numbers that are not whole or not in the range of ``dtype``; None if there is none."""
        limits = np.iinfo(dtype)
        for group in self._groups if names else ():
            table = self._read(group, names)
            for part in names:
                array = _numbers_in(one_array(table[part]))
                is_whole = pa.types.is_integer(array.type)
                if pa.types.is_floating(array.type):
                    array = array.drop_null()
                    array = array.filter(pc.invert(pc.is_nan(array)))
                    is_whole = pc.all(pc.equal(array, pc.floor(array)), min_count=0).as_py()
                elif not is_whole:
                    continue
                low, high = pc.min_max(array).as_py().values()
                if low is not None and not (is_whole and limits.min <= low <= high <= limits.max):
                    what = "numbers" if is_whole else "fractions"
                    return f"{group.place(0)}: column `{part}` has {what} from {low} to {high}"
        return None

    def _ranges(self, root: str) -> dict[str, inferring.Range]:
        """The ranges of integers under ``root`` in all groups."""
        ranges: dict[str, inferring.Range] = {}
        for name, own in self._plan.mapped.items():
            if col.is_under(name, root) or (root == col.OBS and col.is_under(name, col.NEXT_OBS)):
                for g in range(len(self._groups)):
                    inferring.widen(
                        ranges, {path: self._whole(path, values) for path, values in self._raw(g, name, own).items()}
                    )
        return ranges

    def _whole(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        """The values without NaN, as integers, if only missing next observations made them floats; else unchanged."""
        _, dtype = self._found.get(col.as_obs(name), ((), values.dtype))
        is_whole = dtype.kind in "iu" and values.dtype.kind == "f" and values.ndim == 1
        return values[~np.isnan(values)].astype(dtype) if is_whole else values

    def _fit(self) -> None:
        """Give rewards a scalar float dtype, and next observations the shapes and dtypes of observations."""
        if col.REWARD in self._found:
            shape, dtype = self._found[col.REWARD]
            if shape not in ((), (1,)) or dtype.kind == "O":
                raise DataError(f"`{col.REWARD}` has rows of shape {list(shape)}, not one number each.")
            self._found[col.REWARD] = (), dtype if dtype.kind == "f" else np.dtype(np.float64)
        like = col.under(self._found, col.OBS)
        nexts, finals = col.under(self._found, col.NEXT_OBS), col.under(self._plan.mapped, col.FINAL_OBS)
        for root, names in ((col.NEXT_OBS, nexts), (col.FINAL_OBS, finals)):
            wanted = {col.moved(name, col.OBS, root): name for name in like}
            if names and set(names) != set(wanted):
                raise DataError(f"`{root}` has the columns {names}, but those of `{col.OBS}` are {like}.")
            self._found |= {name: self._found[wanted[name]] for name in names if name in self._found}

    # -- reading ----------------------------------------------------------------------------------------------

    def _read(self, group: Group, names: Sequence[str]) -> pa.Table:
        """Read columns of the table unchanged, in the types that all groups share."""
        fields = pa.schema([self._schema.field(name) for name in names])
        try:
            table = group.read(names)
            return table if table.schema.equals(fields) else table.cast(fields)
        except BROKEN as error:
            raise unreadable(group.file, error) from error

    def _raw(self, g: int, name: str, own: Sequence[str]) -> Columns:
        """Decode one of Etude's columns in a group, with the numbers unchanged."""
        group = self._groups[g]
        return self._numbers(self._read(group, own), name, own, group.place)

    def _numbers(self, table: pa.Table, name: str, own: Sequence[str], place: RowPlace) -> Columns:
        is_vector = len(own) > 1 or name in self._plan.vectors
        parts = [self._flat(table, part, name, place, is_coded=not is_vector) for part in own]
        if not is_vector:
            return parts[0]
        for part, found in zip(own, parts, strict=True):
            if list(found) != [name] or found[name].ndim != 1:
                raise DataError(f"{place(0)}: column `{part}` holds more than one number a row: map it on its own.")
        return {name: np.stack([found[name] for found in parts], axis=1)}

    def _flat(self, table: pa.Table, own: str, name: str, place: RowPlace, *, is_coded: bool) -> Columns:
        """Decode the table's column ``own`` by Etude's names, which start with ``name``.

        With ``is_coded``, text becomes the numbers of its names.
        """
        array = one_array(table[own])
        if is_coded and is_text(array.type) and (name not in self._plan.mapped or col.is_under(name, col.INFO)):
            return {name: strings(array, own, place)}  # in a vector, text is an error
        may_be_empty = name in (col.REWARD, col.LOGP) or col.is_under(name, col.NEXT_OBS)
        if may_be_empty and array.null_count and pa.types.is_integer(array.type):
            with contextlib.suppress(pa.ArrowInvalid):  # too large for float64: then a missing value is an error
                array = array.cast(pa.float64())

        def coded(texts: pa.Array, path: str) -> NDArray[Any]:
            return self._coded(texts, col.as_obs(name) + path[len(own) :], path, place)

        is_coded = is_coded and any(col.is_under(name, root) for root in CODED)
        takes_nan = name in self._plan.extras or any(col.is_under(name, root) for root in _CHECKED)
        flat_columns = flat(array, own, place, coded if is_coded else None, with_nan=takes_nan)
        found = {name + path[len(own) :]: values for path, values in flat_columns.items()}
        shape = shape_of(table.schema.field(own))
        if shape and name in found and math.prod(found[name].shape[1:]) == math.prod(shape):
            found[name] = found[name].reshape(-1, *shape)
        if name == col.LOGP and self._plan.is_propensity:
            return {name: _logarithm(values, own, place) for name, values in found.items()}
        return found

    def _coded(self, texts: pa.Array, name: str, own: str, place: RowPlace) -> NDArray[Any]:
        """Convert text to the numbers of its `NamedDiscrete`; zeros while the texts for it are still collected."""
        if name not in self._named:
            self._texts.setdefault(name, set()).update(strings(pc.unique(texts), own, place))
            return np.zeros(len(texts), np.int64)
        space = self._named[name]
        found = pc.index_in(texts.cast(pa.string()), value_set=pa.array(space.names, pa.string()))
        if found.null_count:
            row = int(np.argmax(np.asarray(found.is_null())))
            raise DataError(
                f"{place(row)}: column `{own}` holds {texts[row].as_py()!r}, which is none of the {space.n} names that "
                f"`{name}` has here: {space.listed()}. Correct the name, or leave the row out."
            )
        return np.asarray(found).astype(space.dtype)

    def _as_planned(self, name: str, values: NDArray[Any], place: RowPlace, called: str | None = None) -> NDArray[Any]:
        """Convert values to the shape and dtype of one of Etude's columns; ``called`` is its name in errors."""
        if name not in self._found:
            return values  # a member that the first rows lack; it can't be requested
        shape, dtype = self._found[name]
        if math.prod(shape) * len(values) != values.size:
            raise DataError(
                f"{place(0)}: `{called or name}` has rows of shape {list(values.shape[1:])}, but "
                f"`{col.as_obs(name)}` of {list(shape)}. All rows must have one shape."
            )
        values = values.reshape(len(values), *shape)
        is_whole = dtype.kind != "f" and values.dtype.kind == "f"
        if is_whole and col.is_under(name, col.NEXT_OBS) and np.isnan(values).any():
            return values  # empty where an episode ends; see `TableRows.read`
        return values if dtype.kind == "O" else _cast(values, dtype, called or name, place)


def _cast(values: NDArray[Any], dtype: np.dtype[Any], name: str, place: RowPlace) -> NDArray[Any]:
    """Cast numbers to ``dtype``; a DataError if an integer dtype would change a number."""
    with np.errstate(invalid="ignore"):
        out = values.astype(dtype, copy=False)
    if dtype.kind in "iu" and not np.can_cast(values.dtype, dtype, "safe") and (lost := out != values).any():
        row = int(lost.reshape(len(lost), -1).any(axis=1).argmax())
        raise DataError(f"{place(row)}: `{name}` is {values[row]}, which does not fit in {dtype}. Correct it.")
    return out


def _numbers_in(array: pa.Array) -> pa.Array:
    """The numbers in a column of numbers, or of lists of them."""
    array = array.storage if isinstance(array, pa.ExtensionArray) else array
    while is_list(array.type):
        array = array.flatten()
    return array


def _joined(table: pa.Table, names: Sequence[str], place: RowPlace) -> pa.ChunkedArray:
    """Return a column; several are joined to one of texts such as ``van-3/17``. In them, ``%`` and ``/`` are escaped as
    in URLs, so that different ids stay different."""
    if len(names) == 1:
        return table[names[0]]
    try:
        texts = [
            pc.replace_substring(pc.replace_substring(table[name].cast(pa.string()), "%", "%25"), "/", "%2F")
            for name in names
        ]
    except pa.ArrowException as error:
        what = f"the columns of `{col.EPISODE_ID}` are not all text or numbers: {error}"
        raise DataError(f"{place(0)}: {what}") from error
    return pc.binary_join_element_wise(*texts, "/")


def _logarithm(values: NDArray[Any], own: str, place: RowPlace) -> NDArray[np.float64]:
    """Convert probabilities to their logarithms."""
    if values.ndim != 1:
        raise DataError(f"{place(0)}: column `{own}` of `{PROPENSITY}` holds more than one number a row.")
    chance = values.astype(np.float64)
    wrong = ~((chance > 0) & (chance <= 1 + _ROUNDING))
    if wrong.any():
        row, more = int(wrong.argmax()), f" ({int(wrong.sum()):,} rows are like it)" if wrong.sum() > 1 else ""
        raise DataError(
            f"{place(row)}: column `{own}` of `{PROPENSITY}` is {values[row]}, but the probability of an action that "
            f"was taken is above 0 and at most 1{more}. If it was rounded, write more digits; else correct it or leave "
            f"the row out. Map the logarithm of a probability or a density as `{col.LOGP}`."
        )
    return np.log(np.minimum(chance, 1.0))


# -- reading ---------------------------------------------------------------------------------------------------------


class _Common(NamedTuple):
    """Data that all units share."""

    where: str
    groups: Sequence[Group]
    first: Ints
    """The index of the first row of each group, and the number of rows."""
    columns: TableColumns
    after: str | None
    """The column of the observation after a row, ``next_obs`` or ``final_obs``; None if the table has neither."""

    @property
    def has_next(self) -> bool:
        """Whether the next observation of each row is known."""
        return self.after == col.NEXT_OBS

    def chained(self, keys: Sequence[str]) -> NDArray[np.bool_] | None:
        """Whether each row's observation is the next observation of the row before it, bool ``[rows]``.

        None if next observations are unknown. This is only computed if the only keys are flags; else all are False. If
        fewer than three in four rows follow the row before, as in a shuffled table, a warning is logged and all are
        False.
        """
        if not self.has_next:
            return None
        goes_on, told, right = np.zeros(int(self.first[-1]), bool), 0, 0
        if {col.EPISODE_ID, col.T_INDEX} & {*keys} or not keys:
            return goes_on
        pairs = {name: col.moved(name, col.OBS, col.NEXT_OBS) for name in col.under(self.columns.steps, col.OBS)}
        last: Columns = {}
        for g, (num, flags) in enumerate(self.columns.keys(keys)):
            ends = np.logical_or(*table_index.ends_of(flags, num, self.groups[g].place))
            if ends.all() and not last:  # each row ends its episode
                continue
            found = self.columns.load(g, [*pairs, *pairs.values()])
            rows = {name: np.concatenate([last.get(name, values[:0]), values]) for name, values in found.items()}
            same = np.all([follow(rows[obs], rows[after]) for obs, after in pairs.items()], axis=0)
            goes_on[self.first[g + 1] - len(same) : self.first[g + 1]] = same
            # Equal observations follow each other in any order, so only changes show whether rows are in order.
            is_end = np.append(False, ends[:-1]) if last else ends[:-1]
            changes = ~np.all([follow(rows[obs], rows[obs]) for obs in pairs], axis=0) & ~is_end
            told, right = told + changes.sum(), right + (changes & same).sum()
            last = {} if ends[-1] else {name: values[-1:] for name, values in found.items()}
        if 4 * right >= 3 * told:
            return goes_on
        self.columns.warn(
            f"{self.where}: `{col.NEXT_OBS}` is the `{col.OBS}` of the next row in only {right:,} of {told:,} rows, so "
            f"each row stands alone. If the rows are of whole episodes, map `{col.EPISODE_ID}` or `{col.T_INDEX}`."
        )
        return np.zeros_like(goes_on)

    def origin(self, row: int) -> tuple[Group, int]:
        """The group that a row of the table originally came from, before sorting, and its index there."""
        g = int(np.searchsorted(self.first, row, side="right")) - 1
        return self.groups[g].origin(row - int(self.first[g]))

    def place(self, row: int) -> Place:
        """Locate a row of the table."""
        group, inside = self.origin(row)
        return Place(group.place(inside), str(group.file or self.where), group.first + inside)

    def words(self, row: int) -> str:
        """Describe the location of a row of the table."""
        return self.place(row).words


class RowsUnit(NamedTuple):
    """The data of a unit: some of the table's segments."""

    segments: slice
    """The segments of the unit, among those of ``cuts``."""
    cuts: TableIndex
    common: _Common


class TableRows(Format):
    """A format whose units are rows of a table, as `contents_of` describes them."""

    def read(self, unit: Unit, columns: Sequence[str], problems: list[Problem] | None = None) -> Experience:
        """Read whole segments, or pieces of segments longer than a unit; fails if any row can't be read."""
        own: RowsUnit = unit.data
        which, index, common = own
        start, stop = index.offsets[which.start], index.offsets[which.stop]
        offsets = index.offsets[which.start : which.stop + 1] - start
        last, goes_on = offsets[1:] - 1, index.goes_on[which]
        obs = col.under(columns, col.OBS)
        after = {name: col.moved(name, col.OBS, common.after) for name in obs} if common.after else {}
        needed = [*columns, *after.values(), *([HAS_FINAL] if after and not common.has_next else [])]
        found = _rows(common, start, stop + int(goes_on[-1] and not common.has_next), needed)
        final_obs: Columns = {}
        if common.has_next:
            rows, ends = start + last, {name: found[own][last] for name, own in after.items()}
            known = np.ones(len(last), bool)
            if numbers_after := [v for v in ends.values() if v.dtype.kind == "f"]:  # empty where an episode ended
                is_empty = np.all([np.isnan(v).reshape(len(v), -1).all(axis=1) for v in numbers_after], axis=0)
                known = goes_on | ~is_empty
            for name, final in ends.items():
                final[~known] = 0
                if final.dtype.kind == "f" != found[name].dtype.kind:  # integers that are floats because some are empty
                    gaps = np.isnan(final).reshape(len(last), -1).any(axis=1)
                    if gaps.any():
                        where = common.words(int(rows[gaps.argmax()]))
                        raise DataError(f"{where}: `{after[name]}` is empty in a part. Fill it, or empty all parts.")
                final_obs[name] = _cast(final, found[name].dtype, after[name], lambda i: common.words(int(rows[i])))
        else:  # the observation of the next row, or the final observation that the table has
            there = found[HAS_FINAL][last] if after else np.zeros(len(last), bool)
            known = goes_on | there
            for name in obs:
                final = final_obs[name] = np.zeros((len(last), *found[name].shape[1:]), found[name].dtype)
                final[goes_on] = found[name][last[goes_on] + 1]
                if after:
                    final[there] = found[after[name]][last[there]]
        keys = {name: getattr(index, name)[which] for name in ("t_start", "terminated", "truncated")}
        keys |= {name: ids[which] for name, ids in index.ids.items()}
        segments = Segments.of(len(last), **keys, has_final_obs=known)
        exp = Experience({name: found[name][: offsets[-1]] for name in columns}, offsets, segments, final_obs)
        if problems is not None and common.has_next:
            for name, other in after.items():
                problems += not_chained(partial(self.place, unit, exp=exp), name, found[name], found[other], offsets)
        return exp

    def place(self, unit: Unit, row: int, exp: Experience) -> Place:
        """Locate a row by its index in its file."""
        own: RowsUnit = unit.data
        return own.common.place(int(own.cuts.offsets[own.segments.start]) + row)


class Table(TableRows):
    """A table described by a `Source`. Rows are returned in order of time, whatever their order in the files."""

    name: Final = "table"

    def __init__(self, source: Source) -> None:
        self._source = source

    def describe(self) -> Contents:
        """Return the contents, reading the key columns.

        Raises:
            DataError: a file can't be read, a column is missing, or nothing says where episodes end.
        """
        source = self._source
        ids = _id_columns(source.columns)
        unread: list[Problem] = []
        contents = contents_of(
            source, table_inputs.groups_of(source.data, source.filesystem, ids, unread), unread=unread
        )
        return dataclasses.replace(contents, problems=[*contents.problems, *unread]) if unread else contents


def _id_columns(mapped: Mapping[str, str | Sequence[str]]) -> list[str]:
    keys = [own for name, own in mapped.items() if name in KEYS]
    return [part for own in keys for part in ([own] if isinstance(own, str) else own)]


def _warn_of_shared_ids(where: str, columns: TableColumns, groups: Sequence[Group], keys: Sequence[str]) -> None:
    """Warn if most episode ids of a file also occur in earlier files: each file may number its own episodes.

    If episodes overlap in time within a file, there is no warning, because they may continue in the next file. If ``t``
    counts steps, there is none either, because repeated steps are an error.
    """
    own: dict[Any, dict[Any, tuple[Any, Any]]] = {}
    for group, (num, found) in zip(groups, columns.keys(keys), strict=True):
        t = one_array(found.get(col.T_INDEX, pa.chunked_array([np.zeros(num, "datetime64[us]")])))
        if not table_index.is_time(t.type) or t.null_count:
            return
        t = t.cast(pa.int64() if t.type.bit_width == 64 else pa.int32())
        codes, ids = table_index.key_codes(found[col.EPISODE_ID], col.EPISODE_ID, group.place)
        spans = pa.table({"id": codes, "t": t}).group_by("id").aggregate([("t", "min"), ("t", "max")]).to_pylist()
        for row in spans:
            first, last = own.setdefault(group.file, {}).get(ids[row["id"]], (row["t_min"], row["t_max"]))
            own[group.file][ids[row["id"]]] = min(first, row["t_min"]), max(last, row["t_max"])
    seen: set[Any] = set()
    for file, episodes in own.items():
        spans = sorted(episodes.values())
        shared = len(seen & episodes.keys())
        if 2 * shared > len(episodes) and all(last <= first for (_, last), (first, _) in itertools.pairwise(spans)):
            columns.warn(
                f"{where}: {shared:,} of {len(episodes):,} episode ids in {file} are also in files before it, and the "
                "rows of each id are read as one episode. If each file has its own episodes, give a list of Sources, "
                f"or map a folder `run=1` as a part of the id: {col.EPISODE_ID}=run,episode."
            )
            return
        seen |= episodes.keys()


def _with_names_as_texts(schema: pa.Schema, source: Source, mapped: Mapping[str, Sequence[str]]) -> pa.Schema:
    """Make integer columns text in the schema if the given space has names that are whole numbers.

    For example, ``1`` may be a name beside ``none``.

    Raises:
        DataError: such a column holds floats or structs.
    """
    for root, space in ((col.OBS, source.obs_space), (col.ACTION, source.action_space)):
        found = {} if space is None or source.preset == ETUDE else leaves(space, root)
        for name in [name for name, leaf in found.items() if isinstance(leaf, NamedDiscrete) and leaf.has_numbers]:
            part, several = name.rpartition(col.SEPARATOR)[2], mapped.get(root, ())
            at = several.index(part) if part in several else 0
            for to in (root, col.NEXT_OBS, col.FINAL_OBS) if root == col.OBS else (root,):
                own = mapped.get(col.moved(name, root, to)) or mapped.get(to, ())
                if at >= len(own) or is_list((field := schema.field(own[at])).type):
                    continue
                kind = getattr(field.type, "value_type", field.type)
                if pa.types.is_floating(kind) or pa.types.is_struct(kind):
                    raise DataError(
                        f"column `{field.name}` is of type {kind}, but `{name}` has names that are whole numbers: "
                        "convert it to these, or to text."
                    )
                if pa.types.is_integer(kind):
                    schema = schema.set(schema.get_field_index(field.name), field.with_type(pa.string()))
    return schema


def contents_of(
    source: Source, groups: Sequence[Group], *, is_sorted: bool = False, unread: Sequence[Problem] = ()
) -> Contents:
    """Return the contents of a table; see `Table.describe`.

    Args:
        source: The table.
        groups: Its rows.
        is_sorted: Whether the rows are known to be in order.
        unread: Problems of its files that can't be read.
    """
    files = list(dict.fromkeys(group.file for group in groups if group.file))
    where = str(files[0]) if len(files) == 1 else described(source.data)
    if not any(group.num_rows for group in groups):
        raise table_inputs.no_rows(source.data, groups)
    members = [name for name in source.named if "." in name or "/" in name]
    groups = [table_inputs.with_members(group, members) if members else group for group in groups if group.num_rows]
    try:
        names = list(dict.fromkeys(name for group in groups for name in group.schema.names))
        if source.preset == ETUDE and any(col.SEGMENT not in group.schema.names for group in groups):
            names = [name for name in names if name != col.SEGMENT]  # segments are found again from the other keys
        mapped = source.mapped(names)
        used = {name for own in mapped.values() for name in own}
        schema, clashing = table_inputs.joint_schema(groups, _id_columns(mapped), used)
        schema = pa.schema([field for field in schema if field.name in names], schema.metadata)
        schema = _with_names_as_texts(schema, source, mapped)
        plan = ColumnMap.of(schema, mapped)
    except (DataError, *BROKEN) as error:
        raise DataError(f"{where}: {error}") from error
    columns = TableColumns(groups, schema, plan, source)
    columns.dropped |= dict.fromkeys(clashing, "of other types in other files")
    if LAST_ROW in plan.ends.values() and len(files) > 1 and col.EPISODE_ID in plan.mapped:
        ids = [name for name in (col.EPISODE_ID, col.T_INDEX) if name in plan.mapped]
        _warn_of_shared_ids(where, columns, groups, ids)
    keys = [n for n in (*KEYS, col.T_INDEX, *FLAGS) if n in plan.mapped or plan.ends.get(n) == EVERY_ROW]
    after = next((root for root in (col.NEXT_OBS, col.FINAL_OBS) if col.under(plan.mapped, root)), None)
    common = _Common(where, groups, bounds_of(groups), columns, after)
    common, index = _in_order(common, plan, keys, is_sorted=is_sorted, unit_stride=source.preset == ETUDE)
    for name in (col.AGENT_ID, col.MODULE_ID) if source.preset != ETUDE else ():
        is_unnamed = index.ids.get(name, np.zeros(0)) == None  # noqa: E711 - an array
        if is_unnamed.any() and not is_unnamed.all():
            row = common.words(int(index.offsets[is_unnamed.argmax()]))
            raise DataError(f"{row}: column `{name}` is empty or NaN. Fill it, or leave these rows out.")
    counts_steps = col.T_INDEX in plan.mapped and not index.is_clock
    if unread and not (counts_steps and LAST_ROW not in plan.ends.values()):
        columns.warn(
            f"{where}: {len(unread)} of the files can't be read, such as {unread[0].file}. Their episodes may be "
            f"joined over the missing steps, as no `{col.T_INDEX}` counts them, or seem to end before them. Restore "
            "the files, or leave their episodes out."
        )
    if source.preset != ETUDE and not unread:  # else the first steps may be in a file that can't be read
        index = table_index.renumber_late_agents(index)
    if source.preset != ETUDE and not index.is_clock and (index.is_mostly_gaps() or index.is_mostly_late()):
        columns.warn(
            f"{where}: `{plan.mapped[col.T_INDEX][0]}` as `{col.T_INDEX}` is the number of the step, and most steps or "
            "most beginnings of episodes are missing. If none are, as it is a time or counts the rows of the table, "
            f"{table_index.WITHOUT_T}."
        )
    for name, word in plan.ends.items():
        if word == LAST_ROW:
            index = table_index.ended_at_last_rows(index, col.TRUNCATED if name == col.TRUNCATED else col.TERMINATED)
    header = Header(columns.obs_space, columns.action_space, source.env, _meta(plan, columns, index))
    units = []
    for k, (first, last) in enumerate(itertools.pairwise(index.parts.tolist())):
        start, stop = index.offsets[[first, last]].tolist()
        group, inside = common.origin(start)
        data = RowsUnit(slice(first, last), index, common)
        units.append(Unit(k, stop - start, group.file, group.first + inside, data))
    return Contents(header, columns.steps, units, files, columns.warnings)


def _in_order(
    common: _Common, plan: ColumnMap, keys: Sequence[str], *, is_sorted: bool, unit_stride: bool
) -> tuple[_Common, TableIndex]:
    """Return the rows in order of time, sorted if necessary, and their segments."""
    columns, chained = common.columns, common.chained(keys)
    cut = partial(table_index.index_of, unit_stride=unit_stride, most=most_rows(columns.row_bytes))
    key_columns = partial(columns.keys, keys)
    index = cut(key_columns, chained, common.words, is_sorted=is_sorted)
    if index is None:
        needed, tracks = columns.of_table(), partial(table_index.tracks_of, key_columns, chained, common.words)
        made_by = (needed, [plan.mapped.get(name) for name in keys], columns.date_order)
        groups, notes = sorted_groups(common.groups, partial(columns.tables, needed), tracks, *made_by)
        for note in notes:
            columns.warn(note)
        common = common._replace(groups=groups, first=bounds_of(groups), columns=columns.over(groups))
        index = cut(partial(common.columns.keys, keys), chained, common.words, is_sorted=True)
        assert index is not None  # the rows are sorted
    return common, index


def _meta(plan: ColumnMap, columns: TableColumns, index: TableIndex) -> dict[str, Any]:
    inferred = dict(columns.inferred)
    if DONE in plan.mapped and col.TERMINATED not in plan.mapped:
        inferred[DONE] = "read as terminated unless truncated: time limits can't be told apart"
    if plan.is_propensity:
        inferred[col.LOGP] = f"the logarithm of `{plan.mapped[col.LOGP][0]}`"
    if counts := [f"from {index.first}"] * (index.first > 0) + [f"by {index.stride}"] * (index.stride > 1):
        inferred[col.T_INDEX] = f"counts {' and '.join(counts)} in the table"
    if index.is_clock:
        inferred[col.T_INDEX] = "times in the table: steps are numbered from 0"
    if col.EPISODE_ID not in plan.mapped:
        inferred[col.EPISODE_ID] = "none is mapped: numbered"
    found = {"inferred": inferred, "dropped": columns.dropped}
    return {name: notes for name, notes in found.items() if notes}


def _rows(common: _Common, start: int, stop: int, names: Sequence[str]) -> Columns:
    """Load columns of the rows ``start:stop``, which may be in several groups."""
    first, last = np.searchsorted(common.first, (start, stop - 1), side="right") - 1
    pieces = []
    for g in range(first, last + 1):
        inside = slice(max(0, start - int(common.first[g])), stop - int(common.first[g]))
        pieces.append({name: v[inside] for name, v in common.columns.load(g, names).items()})
    return {n: pieces[0][n] if first == last else np.concatenate([p[n] for p in pieces]) for n in names}
