# SPDX-License-Identifier: Apache-2.0
"""RLlib's tabular recordings: Parquet files with a row per step (``output_write_episodes=False``).

Rows with the same ``eps_id`` form an episode, in order of ``t`` if that column exists, else by chaining observations:
the next observation of a row is the observation of the one after it. Files are sorted by their full paths, which is
RLlib's order of time. Without ``eps_id``, every row is a segment of its own.

Columns are tensors of Ray Data, structs, lists, numbers, packed and pickled values. Ray's extension types are read from
their storage and the field's metadata, so that Ray is not needed. The metadata is JSON or, from some versions of Ray, a
pickle, which is not read: the shape is then derived from the lengths.
"""

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.arrays import hashes_of, ranges
from etude.experience.experience import offsets_of
from etude.files import AnyPath
from etude.recordings import footers
from etude.recordings.format import Contents, FileFormat, Place, Problem, Unit, grouped, most_rows, not_chained
from etude.recordings.formats import rllib_columns as words
from etude.recordings.formats.arrow import Place as RowPlace
from etude.recordings.formats.arrow import check_nulls, is_bytes, is_text, numbers, one_array
from etude.recordings.formats.inferring import Range, needs_range, widen
from etude.recordings.formats.packed import unpack, unpack_rows, unpickle
from etude.recordings.formats.parquet_files import ParquetFiles
from etude.recordings.formats.rllib_columns import Schema, flat_columns
from etude.recordings.formats.rllib_rows import (
    Run,
    SegmentedRows,
    in_time,
    rounds_of,
    runs_of,
    segments_of,
    without_copies,
)
from etude.recordings.formats.table_index import key_codes
from etude.recordings.layout import Header

# -- the encodings of a column ---------------------------------------------------------------------------------------


_TENSORS: Final = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2", "arrow.fixed_shape_tensor")
_VARIABLE: Final = "ray.data.arrow_variable_shaped_tensor"
_PICKLED: Final = "ray.data.arrow_pickled_object"


def columns_of(array: pa.Array, field: pa.Field, root: str, place: RowPlace) -> Columns:
    """Convert a column to flat NumPy columns ``[N, ...]`` under ``root``.

    Raises:
        DataError: it does not hold numbers, or has rows of different shapes; the message names the row.
    """
    name, shape = _extension(field)
    array = array.storage if isinstance(array, pa.ExtensionArray) else array
    check_nulls(array, root, place)
    is_struct = pa.types.is_struct(array.type)
    if name == _VARIABLE and is_struct and {"data", "shape"} <= {own.name for own in array.type} and len(array):
        shapes = numbers(array.field("shape"), root, place)
        if (shapes != shapes[0]).any():
            row = int((shapes != shapes[0]).any(axis=1).argmax())
            raise DataError(f"{place(row)}: `{root}` has the shape {shapes[row]}, but {shapes[0]} before. {REMEDY}.")
        array, shape = array.field("data"), shapes[0].tolist()
    elif is_struct:
        parts = [columns_of(array.field(i), own, f"{root}/{own.name}", place) for i, own in enumerate(array.type)]
        return {path: values for part in parts for path, values in part.items()}
    if is_text(array.type) or is_bytes(array.type):
        values = _unpacked(array, unpickle if name == _PICKLED else unpack, root, place)
        try:
            return flat_columns(values, None, root)
        except DataError as error:
            raise DataError(f"{place(0)}: {error}. {REMEDY}.") from error
    flat = numbers(array, root, place)
    if shape is None or not len(flat):
        return {root: flat}
    if math.prod(shape) != flat[0].size:
        raise DataError(f"{place(0)}: `{root}` has {flat[0].size} numbers a row, but its shape is {shape}. {REMEDY}.")
    return {root: flat.reshape(len(flat), *shape)}


def _extension(field: pa.Field) -> tuple[str, list[int] | None]:
    """The name of a field's extension type, and the shape of one row; None if the metadata is not JSON."""
    if isinstance(field.type, pa.FixedShapeTensorType):
        return field.type.extension_name, field.type.shape
    if isinstance(field.type, pa.ExtensionType):
        name, about = field.type.extension_name, field.type.__arrow_ext_serialize__()
    else:
        metadata = field.metadata or {}
        name = metadata.get(b"ARROW:extension:name", b"").decode("utf-8", "replace")
        about = metadata.get(b"ARROW:extension:metadata", b"")
    try:
        data = json.loads(about)
    except (ValueError, UnicodeDecodeError, RecursionError):
        return name, None
    shape = data.get("shape") if isinstance(data, dict) else data
    is_shape = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    return name, shape if is_shape and name in _TENSORS else None


def _unpacked(array: pa.Array, decode: Callable[[Any], Any], root: str, place: RowPlace) -> list[Any]:
    if decode is unpack:
        with contextlib.suppress(DataError):
            return unpack_rows(array.to_pylist())
    values = []
    for row, value in enumerate(array.to_pylist()):
        try:
            values.append(decode(value))
        except DataError as error:
            raise DataError(f"{place(row)}: `{root}`: {error}. {REMEDY}.") from error
    return values


# -- the files: their columns, and the episode of each row -----------------------------------------------------------


ENDS: Final = ("terminateds", "truncateds", "dones")
KEYS: Final = ("eps_id", "agent_id", "module_id", "t")
REQUIRED: Final = ("obs", "actions", "rewards")
OWN: Final = {"obs": col.OBS, "actions": col.ACTION, "rewards": col.REWARD}
_OTHERS: Final = {"new_obs": col.NEXT_OBS, "infos": col.INFO}
Naming: TypeAlias = tuple[str, str | None, str | None]
"""Episode, agent and module."""
REMEDY: Final = "Leave this row out, or write the recording again"


class TableFiles:
    """The files of one recording.

    Raises:
        DataError: a file is not complete, or lacks a required column, or one that the first file has.
    """

    def __init__(self, paths: Sequence[AnyPath]) -> None:
        self.paths = list(paths)
        self.parquet = ParquetFiles(paths)
        self.fields = self._checked_fields()
        """The columns of the first file, by their names in it."""

    def _checked_fields(self) -> dict[str, pa.Field]:
        first = self.parquet.schema(0)
        for i, path in enumerate(self.paths):
            names = self.parquet.schema(i).names
            missing = [name for name in REQUIRED if name not in names]
            if missing:
                listed = ", ".join(names[:20])
                raise DataError(
                    f"{path}: has no column `{missing[0]}`, which a table of steps needs; it has {listed}. If another "
                    "column holds it, read the file as a table with a schema of your own."
                )
            lost = [name for name in first.names if name not in names]
            if lost:
                raise DataError(
                    f"{path}: has no column `{lost[0]}`, but {self.paths[0]} has. A recording has the same columns "
                    "everywhere: move one of them to a folder of its own."
                )
        twice = [name for name in first.names if first.names.count(name) > 1]
        if twice:
            raise DataError(f"{self.paths[0]}: has the column `{twice[0]}` more than once. Leave one of them out.")
        return {name: first.field(name) for name in first.names}

    @property
    def has_t(self) -> bool:
        """Whether rows have the index of their step in the episode."""
        return "t" in self.fields and pa.types.is_integer(self.fields["t"].type)

    def scan(self) -> tuple[dict[int, list[Run]], list[Naming]]:
        """Return the runs of every episode, in order of first appearance, and the episodes' names."""
        episodes: dict[int, list[Run]] = {}
        if "eps_id" not in self.fields:
            return episodes, []
        codes: dict[tuple[str, str | None], int] = {}
        modules: dict[int, str | None] = {}
        wanted = [n for n in (*KEYS, *ENDS) if n in self.fields and not pa.types.is_null(self.fields[n].type)]
        for group in range(len(self.parquet.groups)):
            table = self.parquet.read(group, wanted, text_codes=[n for n in KEYS[:3] if n in wanted])
            own = self._codes(table, codes, modules, group)
            done = np.zeros(table.num_rows, bool)
            for name in ENDS:
                if name in wanted:
                    done |= self.column(table, name, group, 0)[name].astype(bool)
            t = self.column(table, "t", group, 0)["t"].astype(np.int64) if self.has_t else None
            for code, run in runs_of(group, own, done, t):
                episodes.setdefault(code, []).append(run)
        return episodes, [(*name, modules[code]) for name, code in codes.items()]

    def _codes(
        self, table: pa.Table, codes: dict[tuple[str, str | None], int], modules: dict[int, str | None], group: int
    ) -> NDArray[np.int64]:
        """int64 ``[rows]``: the code of the episode and agent of each row."""
        texts = [
            key_codes(table[name], own, partial(self._row_place, name, group))
            if name in table.schema.names
            else (np.zeros(table.num_rows, np.int64), np.array([None], object))
            for name, own in zip(KEYS[:3], (col.EPISODE_ID, col.AGENT_ID, col.MODULE_ID), strict=True)
        ]
        (eps, eps_names), (agent, agent_names), (module, module_names) = texts
        if not len(eps):
            return np.zeros(0, np.int64)
        new = eps[1:] != eps[:-1]
        if len(agent_names) > 1:
            new |= agent[1:] != agent[:-1]
        heads = np.append(0, np.flatnonzero(new) + 1)
        both = eps[heads] * len(agent_names) + agent[heads]
        distinct, first, inverse = np.unique(both, return_index=True, return_inverse=True)
        own = np.empty(len(distinct), np.int64)
        for i in np.argsort(first):
            row = heads[first[i]]
            own[i] = codes.setdefault((str(eps_names[eps[row]]), agent_names[agent[row]]), len(codes))
            modules.setdefault(int(own[i]), module_names[module[row]])
        return np.repeat(own[inverse.reshape(-1)], np.diff(heads, append=len(eps)))

    def not_the_same(self, episodes: dict[int, list[Run]]) -> list[int]:
        """Return the codes of those episodes whose repeated rows differ.

        Compares rows of the same step, if rows have steps; otherwise, the rows up to each end.
        """
        rows = self._hashes([run for runs in episodes.values() for run in runs])
        is_alike = _alike_by_t if self.has_t else _alike_by_end
        return [code for code, runs in episodes.items() if not is_alike(runs, rows)]

    def _hashes(self, runs: Iterable[Run]) -> dict[Run, NDArray[np.uint64]]:
        """A hash of the content of each row of some runs."""
        rows: dict[Run, NDArray[np.uint64]] = {}
        by_group: dict[int, list[Run]] = {}
        for run in runs:
            by_group.setdefault(run.group, []).append(run)
        names = [name for name in ("obs", "new_obs", "actions", "rewards") if name in self.fields]
        for group, own in sorted(by_group.items()):
            table = self.parquet.read(group, names)
            hashes = hashes_of({k: c for name in names for k, c in self.column(table, name, group, 0).items()})
            rows |= {run: hashes[run.start : run.stop] for run in own}
        return rows

    def column(
        self, table: pa.Table, name: str, group: int, first: int, index: NDArray[np.int64] | None = None
    ) -> Columns:
        """Decode a column of some rows of a row group, flat and with Etude's name.

        Args:
            table: The rows.
            name: The column's name in the file.
            group: Index of the row group, for errors.
            first: Index of the first row of ``table`` in the row group, for errors.
            index: Indices of the rows of ``table`` in the row group, if they are not adjacent.

        Raises:
            DataError: it can't be read as numbers; the message names the file and row.
        """
        root = OWN.get(name) or _OTHERS.get(name) or (name if name in (*KEYS, *ENDS) else None)

        def place(row: int) -> str:
            return self._row_place(name, group, int(index[row]) if index is not None else first + row)

        try:
            return columns_of(one_array(table[name]), table.schema.field(name), root or words.own_name(name), place)
        except (pa.ArrowException, ValueError, TypeError, OverflowError, MemoryError) as error:
            file = self.paths[self.parquet.groups[group][0]]
            raise DataError(f"{file}: column `{name}` can't be decoded ({str(error)[:200]}).") from error

    def _row_place(self, name: str, group: int, row: int) -> str:
        return f"{self.parquet.place(group, row).words}, column `{name}`"

    def ranges(self, name: str) -> dict[str, Range]:
        """The ranges of integers in a column, over all rows, by Etude's names."""
        found: dict[str, Range] = {}
        for own in (name, "new_obs") if name == "obs" and "new_obs" in self.fields else (name,):
            for group in range(len(self.parquet.groups)):
                widen(found, self.column(self.parquet.read(group, [own]), own, group, 0))
        return found


def _alike_by_t(runs: Sequence[Run], rows: Mapping[Run, NDArray[np.uint64]]) -> bool:
    t = np.concatenate([np.arange(run.t, run.t + run.stop - run.start) for run in runs])
    content = np.stack([np.concatenate([rows[run] for run in runs]), np.zeros(len(t), np.uint64)], axis=1)
    content[np.cumsum([run.stop - run.start for run in runs]) - 1, 1] = [run.done for run in runs]
    order = np.argsort(t, kind="stable")
    twice = t[order][1:] == t[order][:-1]
    return bool((content[order][1:] == content[order][:-1])[twice].all())


def _alike_by_end(runs: Sequence[Run], rows: Mapping[Run, NDArray[np.uint64]]) -> bool:
    first, *others = [np.concatenate([rows[run] for run in part]) for part in rounds_of(list(runs))]
    return all(np.array_equal(first, other) for other in others)


# -- reading ---------------------------------------------------------------------------------------------------------


def is_table(schema: pa.Schema) -> bool:
    """Return whether a Parquet file with this schema is of this format."""
    names = set(schema.names)
    return {"eps_id", "obs"} <= names or ({"obs", "actions", "rewards"} <= names and bool(names & {*ENDS, "new_obs"}))


class _TablePlan(NamedTuple):
    """Data that all units share."""

    table: TableFiles
    sources: Mapping[str, str]
    """The file's columns by Etude's names."""
    schema: Schema


class _TableUnit(NamedTuple):
    runs: Sequence[tuple[int, Run]]
    """Runs, each with the code of its episode."""
    names: Mapping[int, Naming]
    """Names by code."""
    suspect: set[int]
    """The codes of episodes that may still contain copies of rows."""
    plan: _TablePlan


class RLlibTable(FileFormat):
    """A recording in RLlib's tables."""

    name = "rllib-table"

    @staticmethod
    def detect(path: AnyPath) -> bool:
        """Return whether a Parquet file is of this format, by its schema."""
        try:
            return path.suffix == ".parquet" and is_table(footers.schema_of(path))
        except DataError:
            return False

    def describe(self) -> Contents:
        """Return the contents, reading the columns that identify episodes.

        Raises:
            DataError: a file is broken, has other columns than the rest, or lacks a required one.
        """
        table = TableFiles(self.files)
        scanned, names = table.scan()
        copies: list[tuple[int, Run]] = []
        suspect: set[int] = set()
        plan, header = _described(table, self._first_run(table, scanned))
        row_bytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in plan.schema.values())
        parts = _parts_of(table, scanned, copies, suspect, most_rows(row_bytes))
        header = dataclasses.replace(header, meta={**header.meta, "duplicates": _num_copies(copies)})
        units = []
        for k, runs in enumerate(parts):
            named = {code: names[code] for code, _ in runs if code >= 0}
            own = suspect & set(named)
            rows = None if own else sum(run.stop - run.start for _, run in runs)
            first = runs[0][1]
            file, row = table.parquet.file_of(first.group), table.parquet.file_row(first.group, first.start)
            units.append(Unit(k, rows, file, row, _TableUnit(runs, named, own, plan)))
        problems = []
        for code, run in copies:
            count = run.stop - run.start
            what = f"{count} rows of episode {names[code][0]!r} are copies of earlier ones; they are read once"
            problems.append(table.parquet.note("duplicate", what, run.group, run.start, "eps_id", count))
        return Contents(header, list(plan.schema), units, self.files, problems)

    def _first_run(self, table: TableFiles, episodes: Mapping[int, list[Run]]) -> Run:
        """The first rows of the recording."""
        if episodes:
            return episodes[0][0]
        for group, rows in enumerate(table.parquet.group_rows):
            if rows:
                return Run(group, 0, rows, False, 0)
        raise DataError(f"{self.files[0]}: holds no rows. Record some, or give another folder.")

    # -- reading -----------------------------------------------------------------------------------------------

    def read(self, unit: Unit, columns: Sequence[str], problems: list[Problem] | None = None) -> Experience:
        """Read a segment for each episode, or for each piece of it if rows are missing."""
        exp, rows = _loaded(unit.data, columns, problems)
        if problems is not None:
            problems += _notes(unit.data, exp, rows)
        return exp

    def place(self, unit: Unit, row: int, exp: Experience) -> Place:
        """Locate a row, by the row count of its file."""
        return _row_place(unit.data, _loaded(unit.data, ())[1], row)


# -- describing ------------------------------------------------------------------------------------------------


def _parts_of(
    table: TableFiles, episodes: Mapping[int, list[Run]], copies: list[tuple[int, Run]], suspect: set[int], most: int
) -> list[list[tuple[int, Run]]]:
    """Divide the rows into parts of whole episodes with at most ``most`` rows; rows without episodes into ranges."""
    if "eps_id" not in table.fields:
        starts = [(g, a, n) for g, n in enumerate(table.parquet.group_rows) for a in range(0, n, most)]
        return [[(-1, Run(g, a, min(a + most, n), False, 0))] for g, a, n in starts]
    has_t = table.has_t
    found = {code: without_copies(runs, has_t) for code, runs in episodes.items()}
    mixed = table.not_the_same({code: episodes[code] for code, (_, again, _) in found.items() if again})
    in_order = {code: sorted(episodes[code], key=lambda run: run.t) if has_t else episodes[code] for code in mixed}
    found |= {code: (runs, [], not has_t) for code, runs in in_order.items()}
    copies += [(code, copy) for code, (_, again, _) in found.items() for copy in again]
    suspect |= {code for code, (_, _, is_suspect) in found.items() if is_suspect}
    whole = [[(code, run) for run in kept] for code, (kept, _, _) in found.items()]
    rows = np.array([sum(run.stop - run.start for _, run in kept) for kept in whole], np.int64)
    bounds = itertools.pairwise(grouped(rows, most).tolist())
    return [list(itertools.chain(*whole[first:stop])) for first, stop in bounds]


def _described(table: TableFiles, first: Run) -> tuple[_TablePlan, Header]:
    names = sorted(name for name in table.fields if name not in KEYS)  # the same as for `read`, because they are cached
    sample = table.parquet.read(first.group, names).slice(first.start, min(1000, first.stop - first.start))
    flat: Columns = {}
    sources: dict[str, str] = {}
    dropped = []
    for name in table.fields:
        if name in (*KEYS, *ENDS, "new_obs"):
            continue
        try:
            columns = table.column(sample, name, 0, first.start)
        except DataError:
            if name in OWN:
                raise
            dropped.append(name)
            continue
        flat |= columns
        sources |= dict.fromkeys(columns, name)
    header, schema = words.described(RLlibTable.name, flat, _ranges(table, flat), dropped)
    return _TablePlan(table, sources, schema), header


def _num_copies(copies: Sequence[tuple[int, Run]]) -> int:
    """The number of repeated episodes: copies that end, or one for each episode with copies of rows but no end."""
    ended = [code for code, run in copies if run.done]
    return len(ended) + len({code for code, _ in copies} - set(ended))


def _ranges(table: TableFiles, flat: Columns) -> dict[str, Range]:
    """The ranges of observations and actions, by Etude's names, from all rows where spaces depend on them."""
    ranges: dict[str, Range] = {}
    for name, root in (("obs", col.OBS), ("actions", col.ACTION)):
        if any(needs_range(n, own.dtype, own.shape[1:]) for n, own in col.subtree(flat, root).items()):
            ranges |= table.ranges(name)
    return ranges


# -- reading ---------------------------------------------------------------------------------------------------


def _loaded(
    unit: _TableUnit, names: Sequence[str], problems: list[Problem] | None = None
) -> tuple[Experience, SegmentedRows]:
    runs, plan, fields = unit.runs, unit.plan, unit.plan.table.fields
    order_needs_obs = not plan.table.has_t and "eps_id" in fields and "new_obs" in fields
    obs = [name for name in plan.schema if col.is_under(name, col.OBS)]
    wants_obs = any(name in obs for name in names)
    sources = {plan.sources[name] for name in names}
    if order_needs_obs or wants_obs:
        sources |= {"obs", "new_obs"} & set(fields)
    steps, ends = _gathered(plan, runs, [*sources, *(n for n in ENDS if n in fields)])
    next_obs = col.renamed(steps, col.NEXT_OBS, col.OBS)
    lengths = np.array([run.stop - run.start for _, run in runs])
    rows = SegmentedRows(
        code=np.repeat([code for code, _ in runs], lengths),
        t=ranges(np.array([run.t for _, run in runs], np.int64), lengths),
        **ends,
    )
    if "eps_id" not in fields:
        rows.one_step_each(int(runs[0][1].start), plan.table.parquet.file_row(runs[0][1].group, 0))
    elif plan.table.has_t:
        rows.cut_where_time_jumps()
    elif order_needs_obs:
        in_time(rows, col.subtree(steps, col.OBS), next_obs, unit.suspect)
    segments = segments_of(rows, _naming(unit), "new_obs" in fields)
    last = rows.order[rows.offsets[1:] - 1]
    finals = {n: next_obs[n][last] if next_obs else np.zeros_like(steps[n][last]) for n in obs if n in names}
    in_order = rows.in_order
    kept = {name: steps[name] if in_order else steps[name][rows.order] for name in names}
    if problems is not None and next_obs:
        for name in finals:
            after = next_obs[name] if in_order else next_obs[name][rows.order]
            problems += not_chained(partial(_row_place, unit, rows), name, kept[name], after, rows.offsets)
    return Experience(kept, rows.offsets, segments, finals), rows


def _row_place(unit: _TableUnit, rows: SegmentedRows, row: int) -> Place:
    run = _run_of(rows, unit.runs, row)
    parquet: ParquetFiles = unit.plan.table.parquet
    return parquet.place(run.group, run.start)


def _naming(unit: _TableUnit) -> Any:
    if unit.names:
        return unit.names.__getitem__
    path = unit.plan.table.parquet.file_of(unit.runs[0][1].group)
    return lambda row: (f"{path.stem}-{row}", None, None)


def _gathered(plan: _TablePlan, part: Sequence[tuple[int, Run]], sources: list[str]) -> tuple[Columns, dict[str, Any]]:
    """The columns of a unit's rows, in the order of its runs, and the flags."""
    order = sorted(range(len(part)), key=lambda i: part[i][1].group)
    pieces = [
        _rows_of(plan, group, [part[i][1] for i in which], sources)
        for group, which in itertools.groupby(order, key=lambda i: part[i][1].group)
    ]
    whole = pieces[0]
    if len(pieces) > 1:
        whole = {name: np.concatenate([piece[name] for piece in pieces]) for name in whole}
    if order != sorted(order):
        lengths = np.array([part[i][1].stop - part[i][1].start for i in order])
        starts = offsets_of(lengths)[:-1]
        back = np.argsort(order)
        whole = {name: column[ranges(starts[back], lengths[back])] for name, column in whole.items()}
    nothing = np.zeros(sum(run.stop - run.start for _, run in part), bool)
    flags = {name: whole.pop(name, nothing).astype(bool) for name in ENDS}
    return whole, {"terminated": flags["terminateds"] | flags["dones"], "truncated": flags["truncateds"]}


def _rows_of(plan: _TablePlan, group: int, runs: list[Run], sources: list[str]) -> Columns:
    table = plan.table.parquet.read(group, sorted(sources))
    starts, lengths = np.array([run.start for run in runs]), np.array([run.stop - run.start for run in runs])
    first = int(starts[0])
    if (starts[1:] == starts[:-1] + lengths[:-1]).all():
        table, index = table.slice(first, int(lengths.sum())), None
    else:
        index = ranges(starts, lengths)
        table = table.take(pa.array(index))
    out: Columns = {}
    for name in sources:
        columns = plan.table.column(table, name, group, first, index)
        out |= columns if name in ENDS else {n: _as_elsewhere(plan, n, c, group) for n, c in columns.items()}
    return out


def _as_elsewhere(plan: _TablePlan, name: str, column: NDArray[Any], group: int) -> NDArray[Any]:
    like = col.as_obs(name)
    try:
        if like not in plan.schema:
            raise DataError(f"`{name}` has another structure than in the first rows")
        return words.cast(column, *plan.schema[like], name)
    except DataError as error:
        where = plan.table.parquet.file_of(group)
        raise DataError(f"{where}: {error}. Write the recording again, or move this file away.") from error


# -- problems --------------------------------------------------------------------------------------------------


def _notes(unit: _TableUnit, exp: Experience, rows: SegmentedRows) -> Iterator[Problem]:
    table = unit.plan.table
    if rows.repeated:
        what = f"{rows.repeated} rows are copies of others; they are read once"
        first = unit.runs[0][1]
        yield table.parquet.note("duplicate", what, first.group, first.start, "eps_id")
    for i in np.flatnonzero(~exp.segments.done) if "eps_id" in table.fields else ():
        run = _run_of(rows, unit.runs, int(exp.offsets[i + 1]) - 1)
        what = (
            f"episode {exp.segments.episode_id[i]!r} is cut after this row: it is neither terminated nor truncated, "
            "and no row continues it"
        )
        yield table.parquet.note("not_done", what, run.group, run.start, "terminateds")


def _run_of(rows: SegmentedRows, runs: Sequence[tuple[int, Run]], row: int) -> Run:
    """The rows of a run from row ``row`` of a unit on, as indices in their row group."""
    starts = offsets_of(np.array([run.stop - run.start for _, run in runs]))
    at = int(rows.order[row])
    i = int(np.searchsorted(starts, at, side="right")) - 1
    run = runs[i][1]
    return run._replace(start=run.start + at - int(starts[i]))
