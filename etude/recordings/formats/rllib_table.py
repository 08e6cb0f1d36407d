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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.experience import Experience, Segments
from etude.experience.arrays import hashes_of, ranges
from etude.files import AnyPath
from etude.recordings import footers
from etude.recordings.format import Contents, FileFormat, Place, Problem, Unit, follow, grouped, most_rows, not_chained
from etude.recordings.formats import rllib_columns as words
from etude.recordings.formats.arrow import RowPlace, check_nulls, is_bytes, is_text, numbers, one_array
from etude.recordings.formats.inferring import Range, needs_range, widen
from etude.recordings.formats.packed import unpack, unpack_rows, unpickle
from etude.recordings.formats.parquet_files import ParquetFiles
from etude.recordings.formats.rllib_columns import ENDS, Ints, Schema, flat_columns, without_copies
from etude.recordings.formats.source import FLAGS
from etude.recordings.formats.table_index import ends_by, key_codes
from etude.recordings.layout import Header

# -- the encodings of a column ---------------------------------------------------------------------------------------


_TENSORS: Final = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2")
_VARIABLE: Final = "ray.data.arrow_variable_shaped_tensor"
_PICKLED: Final = "ray.data.arrow_pickled_object"
_OF_RAY: Final = (*_TENSORS, _VARIABLE, _PICKLED)


def columns_of(array: pa.Array, field: pa.Field, root: str, place: RowPlace) -> Columns:
    """Convert a column to flat NumPy columns ``[N, ...]`` under ``root``.

    Raises:
        DataError: it does not hold numbers, or has rows of different shapes; the message names the row.
    """
    name, shape = _extension(field)
    array = array.storage if isinstance(array, pa.ExtensionArray) and name in _OF_RAY else array
    check_nulls(array, root, place)
    is_struct = pa.types.is_struct(array.type)
    if name == _VARIABLE and is_struct and {"data", "shape"} <= {own.name for own in array.type} and len(array):
        shapes = numbers(array.field("shape"), root, place)
        if (other := (shapes != shapes[0]).any(axis=1)).any():
            row = int(other.argmax())
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
    metadata = field.metadata or {}
    name = metadata.get(b"ARROW:extension:name", b"").decode("utf-8", "replace")
    about = metadata.get(b"ARROW:extension:metadata", b"")
    if isinstance(field.type, pa.ExtensionType):  # where Ray was imported
        name, about = field.type.extension_name, field.type.__arrow_ext_serialize__()
    try:
        shape = json.loads(about)
    except (ValueError, RecursionError):
        return name, None
    is_shape = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    return name, shape if is_shape and name in _TENSORS else None


def _unpacked(array: pa.Array, decode: Callable[[Any], Any], root: str, place: RowPlace) -> list[Any]:
    texts, values = array.to_pylist(), []
    if decode is unpack:
        with contextlib.suppress(DataError):
            return unpack_rows(texts)
    for row, value in enumerate(texts):
        try:
            values.append(decode(value))
        except DataError as error:
            raise DataError(f"{place(row)}: `{root}`: {error}. {REMEDY}.") from error
    return values


# -- the files: their columns, and the episode of each row -----------------------------------------------------------


KEYS: Final = ("eps_id", "agent_id", "module_id", "t")
REQUIRED: Final = ("obs", "actions", "rewards")
CONTENT: Final = (*REQUIRED, "new_obs")
"""The columns that distinguish steps."""
_OWN: Final = {"obs": col.OBS, "new_obs": col.NEXT_OBS, "actions": col.ACTION, "rewards": col.REWARD, "infos": col.INFO}
REMEDY: Final = "Leave this row out, or write the recording again"
_SAMPLE_ROWS: Final = 1000
"""Rows from which the columns are found."""


class Run(NamedTuple):
    """Adjacent rows ``start:stop`` of a row group, of one agent in an episode."""

    group: int
    start: int
    stop: int
    done: bool = False
    """Whether the episode ends with the last row."""
    t: int = 0
    """The step of the first row; 0 if the table has no ``t``."""

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.stop - self.start


class Trajectory(NamedTuple):
    """The rows of one agent in an episode; without episodes, some adjacent rows."""

    episode: str
    agent: str | None
    module: str | None
    runs: list[Run]

    @property
    def num_rows(self) -> int:
        """The number of rows, including copies."""
        return sum(run.num_rows for run in self.runs)

    def may_have_copies(self, has_t: bool) -> bool:
        """Whether steps may be stored several times: runs overlap; or, without ``t``, rows follow the end."""
        if not has_t:
            return any(run.done for run in self.runs[:-1])
        spans = sorted((run.t, run.t + run.num_rows) for run in self.runs)
        return any(later < stop for (_, stop), (later, _) in itertools.pairwise(spans))


class TableUnit(NamedTuple):
    """Some trajectories, which are read together."""

    trajectories: Sequence[Trajectory]
    may_have_copies: bool

    def runs(self) -> list[tuple[int, Run]]:
        """The runs in the order of the files, each after the index of its trajectory."""
        runs = [(i, run) for i, own in enumerate(self.trajectories) for run in own.runs]
        return sorted(runs, key=lambda pair: pair[1])

    def at(self, row: int) -> tuple[int, int]:
        """Locate a row, counted in the order of the files: its row group, and its index in it."""
        for _, run in self.runs():
            if row < run.num_rows:
                break
            row -= run.num_rows
        return run.group, run.start + row


def is_table(schema: pa.Schema) -> bool:
    """Return whether a Parquet file with this schema is of this format."""
    names = set(schema.names)
    return {"eps_id", "obs"} <= names or ({"obs", "actions", "rewards"} <= names and bool(names & {*ENDS, "new_obs"}))


class RLlibTable(FileFormat):
    """A recording in RLlib's tables.

    Raises:
        DataError: a file is incomplete, or lacks a required column or one that the first file has.
    """

    name = "rllib-table"
    suffixes = (".parquet",)

    @staticmethod
    def detect(path: AnyPath) -> bool:
        """Return whether a Parquet file is of this format, by its schema."""
        try:
            return is_table(footers.schema_of(path))
        except DataError:
            return False

    def __init__(self, files: Sequence[AnyPath]) -> None:
        super().__init__(files)
        self.parquet = ParquetFiles(files)
        self.fields = self._checked_fields()
        """The columns of the first file, by their names in it."""
        self.has_t = "t" in self.fields and pa.types.is_integer(self.fields["t"].type)
        """Whether rows have the index of their step in the episode."""
        self.sources: dict[str, str] = {}
        """The file's columns by Etude's names."""
        self.header, self.schema = self._described()

    def _checked_fields(self) -> dict[str, pa.Field]:
        first = self.parquet.schema(0)
        for i, path in enumerate(self.files):
            names = self.parquet.schema(i).names
            for name in (*REQUIRED, *first.names):
                if name not in names:
                    why = "which a table of steps needs" if name in REQUIRED else f"but {self.files[0]} has"
                    remedy = "Read the file as a table with a schema of your own, or move it away"
                    raise DataError(f"{path}: has no column `{name}`, {why}; it has {', '.join(names[:20])}. {remedy}.")
        twice = [name for name in first.names if first.names.count(name) > 1]
        if twice:
            raise DataError(f"{self.files[0]}: has the column `{twice[0]}` more than once. Leave one of them out.")
        return {name: first.field(name) for name in first.names}

    def _described(self) -> tuple[Header, Schema]:
        """Return the header and schema, from the first rows, and from all rows where spaces depend on them."""
        group = next((group for group, rows in enumerate(self.parquet.group_rows) if rows), None)
        if group is None:
            raise DataError(f"{self.files[0]}: holds no rows. Record some, or give another folder.")
        names = sorted(name for name in self.fields if name not in KEYS)  # the same as for `rows`, because it is cached
        sample = self.parquet.read(group, names).slice(0, _SAMPLE_ROWS)
        found: Columns = {}
        dropped = []
        for name in self.fields:
            if name in (*KEYS, *ENDS, "new_obs"):
                continue
            try:
                columns = self.column(sample, name, group)
            except DataError:
                if name in REQUIRED:
                    raise
                dropped.append(name)
            else:
                found |= columns
                self.sources |= dict.fromkeys(columns, name)
        limits: dict[str, Range] = {}
        for name, root in (("obs", col.OBS), ("new_obs", col.OBS), ("actions", col.ACTION)):
            needed = any(needs_range(n, c.dtype, c.shape[1:]) for n, c in col.subtree(found, root).items())
            for group in range(len(self.parquet.groups)) if needed and name in self.fields else ():
                widen(limits, self.column(self.parquet.read(group, [name]), name, group))
        return words.described(RLlibTable.name, found, limits, dropped)

    def trajectories(self, most: int) -> list[Trajectory]:
        """Return the trajectories, in order of first appearance; without episodes, pieces of at most ``most`` rows."""
        if "eps_id" not in self.fields:
            return [
                Trajectory(self.parquet.file_of(group).stem, None, None, [Run(group, start, min(start + most, rows))])
                for group, rows in enumerate(self.parquet.group_rows)
                for start in range(0, rows, most)
            ]
        found: dict[tuple[str, str | None], Trajectory] = {}
        wanted = [n for n in (*KEYS, *ENDS) if n in self.fields and not pa.types.is_null(self.fields[n].type)]
        for group, rows in enumerate(self.parquet.group_rows):
            table = self.parquet.read(group, wanted, text_codes=[n for n in KEYS[:3] if n in wanted])
            ids = [self._ids(table, name, group) for name in KEYS[:3]]
            flags = [self.column(table, name, group)[name].astype(bool) for name in ENDS if name in wanted]
            done, t = np.any([np.zeros(rows, bool), *flags], axis=0), np.zeros(rows, np.int64)
            is_new = done[:-1] | np.any([codes[1:] != codes[:-1] for codes, _ in ids], axis=0)
            if self.has_t:
                t = self.column(table, "t", group)["t"].astype(np.int64)
                is_new |= np.diff(t) != 1
            bounds = [0, *(np.flatnonzero(is_new) + 1).tolist(), rows] if rows else []
            for start, stop in itertools.pairwise(bounds):
                episode, agent, module = (names[codes[start]] for codes, names in ids)
                own = found.setdefault((str(episode), agent), Trajectory(str(episode), agent, module, []))
                own.runs.append(Run(group, start, stop, bool(done[stop - 1]), int(t[start])))
        return list(found.values())

    def _ids(self, table: pa.Table, name: str, group: int) -> tuple[Ints, NDArray[np.object_]]:
        """The codes of the rows in a column of ids, and the text of each code."""
        if name not in table.schema.names:
            return np.zeros(table.num_rows, np.int64), np.array([None], object)
        own = col.EPISODE_ID if name == "eps_id" else name
        return key_codes(table[name], own, partial(self._row_place, name, group))

    def rows(self, runs: Sequence[Run], names: Sequence[str]) -> Columns:
        """Return columns of the rows of some runs, which must be in the order of the files."""
        pieces: list[Columns] = []
        for group, some in itertools.groupby(runs, key=lambda run: run.group):
            table, own = self.parquet.read(group, sorted(names)), list(some)
            index = ranges(np.array([run.start for run in own]), np.array([run.num_rows for run in own]))
            is_one = own[-1].stop - own[0].start == len(index)
            table = table.slice(own[0].start, len(index)) if is_one else table.take(pa.array(index))
            found = {key: c for name in names for key, c in self.column(table, name, group, index).items()}
            pieces.append({key: c if key in ENDS else self._as_elsewhere(key, c, group) for key, c in found.items()})
        return pieces[0] if len(pieces) == 1 else {n: np.concatenate([piece[n] for piece in pieces]) for n in pieces[0]}

    def _as_elsewhere(self, name: str, column: NDArray[Any], group: int) -> NDArray[Any]:
        like = col.as_obs(name)
        try:
            if like not in self.schema:
                raise DataError(f"`{name}` has another structure than in the first rows")
            return words.cast(column, *self.schema[like], name)
        except DataError as error:
            where = self.parquet.file_of(group)
            raise DataError(f"{where}: {error}. Write the recording again, or move this file away.") from error

    def column(self, table: pa.Table, name: str, group: int, index: Ints | None = None) -> Columns:
        """Decode a column of some rows of a row group, flat and with Etude's name.

        Args:
            table: The rows.
            name: The column's name in the file.
            group: Index of the row group, for errors.
            index: Indices of the rows of ``table`` in the row group, for errors, if they are not its first.

        Raises:
            DataError: it can't be read as numbers; the message names the file and row.
        """
        root = name if name in (*KEYS, *ENDS) else _OWN.get(name) or words.own_name(name)

        def place(row: int) -> str:
            return self._row_place(name, group, row if index is None else int(index[row]))

        try:
            return columns_of(one_array(table[name]), table.schema.field(name), root, place)
        except (pa.ArrowException, ValueError, TypeError, OverflowError, MemoryError) as error:
            file = self.parquet.file_of(group)
            raise DataError(f"{file}: column `{name}` can't be decoded ({str(error)[:200]}).") from error

    def _row_place(self, name: str, group: int, row: int) -> str:
        return f"{self.parquet.place(group, row).words}, column `{name}`"

    # -- reading ----------------------------------------------------------------------------------------------

    def describe(self) -> Contents:
        """Return the contents, reading the columns that identify episodes."""
        most = most_rows(sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.schema.values()))
        found = self.trajectories(most)
        bounds = np.arange(len(found) + 1)
        if "eps_id" in self.fields:
            bounds = grouped(np.array([own.num_rows for own in found]), most)
        units, duplicates = list[Unit](), 0
        for k, (start, stop) in enumerate(itertools.pairwise(bounds.tolist())):
            copied = [own for own in found[start:stop] if own.may_have_copies(self.has_t)]
            for own in copied:
                duplicates += max(sum(run.done for run in own.runs) - 1, int(self.has_t))
            rows = None if copied else sum(own.num_rows for own in found[start:stop])
            group, row = found[start].runs[0][:2]
            data = TableUnit(found[start:stop], bool(copied))
            units.append(Unit(k, rows, self.parquet.file_of(group), self.parquet.file_row(group, row), data))
        header = dataclasses.replace(self.header, meta={**self.header.meta, "duplicates": duplicates})
        return Contents(header, list(self.schema), units, self.files)

    def read(self, unit: Unit, columns: Sequence[str], problems: list[Problem] | None = None) -> Experience:
        """Read a segment for each episode, or for each piece of it if rows are missing."""
        return self._loaded(unit.data, columns, problems)[0]

    def place(self, unit: Unit, row: int, exp: Experience) -> Place:
        """Locate a row by its index in its file."""
        _, kept = self._loaded(unit.data, ())
        return self.parquet.place(*unit.data.at(int(kept[row])))

    def _loaded(
        self, unit: TableUnit, names: Sequence[str], problems: list[Problem] | None = None
    ) -> tuple[Experience, Ints]:
        """Return the segments of a unit, and where each of their rows is among its rows in the order of the files."""
        runs = unit.runs()
        has_episodes, has_next = "eps_id" in self.fields, "new_obs" in self.fields
        is_chained = has_episodes and has_next and not self.has_t
        wanted = {*ENDS, *(self.sources[name] for name in names), *(CONTENT if unit.may_have_copies else ())}
        if is_chained or col.under(names, col.OBS):
            wanted |= {"obs", "new_obs"}
        found = self.rows([run for _, run in runs], [name for name in self.fields if name in wanted])
        next_obs = col.renamed(found, col.NEXT_OBS, col.OBS)

        lengths = np.array([run.num_rows for _, run in runs])  # the rows in the order of the files
        track = np.repeat([i for i, _ in runs], lengths)
        t = ranges(np.array([run.t for _, run in runs]), lengths)
        flags = {flag: found.pop(name).astype(bool) for flag, name in zip(FLAGS, ENDS, strict=True) if name in found}
        terminated, truncated = ends_by(flags, len(t))
        done = terminated | truncated

        kept = np.arange(len(t))
        if unit.may_have_copies:
            kept = _without_copies(found, track, done, t if self.has_t else None)
        if not has_episodes:  # their order in time, and the step of each
            t = np.zeros(len(t), np.int64)  # each row is a segment
        elif self.has_t:
            kept = kept[np.lexsort((t[kept], track[kept]))]
            t = t[kept]
        else:
            kept = kept[np.argsort(track[kept], kind="stable")]
            seen, after = (_at(col.subtree(c, col.OBS) if is_chained else {}, kept) for c in (found, next_obs))
            order, t = in_time(track[kept], done[kept], seen, after)
            kept = kept[order]

        track = track[kept]  # the segments
        is_new = (track[1:] != track[:-1]) | (np.diff(t) != 1) | done[kept][:-1]
        offsets = np.concatenate([[0], np.flatnonzero(is_new) + 1, [len(kept)]])
        steps, last = _at({name: found[name] for name in names}, kept), kept[offsets[1:] - 1]
        owners, obs = [unit.trajectories[i] for i in track[offsets[:-1]].tolist()], col.under(names, col.OBS)
        ids = [own.episode for own in owners]
        if not has_episodes:
            first = self.parquet.file_row(*owners[0].runs[0][:2])
            ids = [f"{name}-{first + i}" for i, name in enumerate(ids)]
        segments = Segments.of(
            len(owners),
            episode_id=ids,
            agent_id=[own.agent for own in owners],
            module_id=[own.module for own in owners],
            t_start=t[offsets[:-1]],
            terminated=terminated[last],
            truncated=truncated[last],
            has_final_obs=has_next,
        )
        finals = {name: next_obs[name][last] if has_next else np.zeros_like(steps[name][offsets[:-1]]) for name in obs}
        exp = Experience(steps, offsets, segments, finals)
        if problems is not None:
            nexts = _at({name: next_obs[name] for name in obs if has_next}, kept)
            problems += self._notes(unit, exp, kept, len(done), nexts)
        return exp, kept

    def _notes(
        self, unit: TableUnit, exp: Experience, kept: Ints, num_rows: int, next_obs: Columns
    ) -> Iterator[Problem]:
        """Yield the harmless oddities of a unit."""

        def place(row: int) -> Place:
            return self.parquet.place(*unit.at(int(kept[row])))

        for name, after in next_obs.items():
            yield from not_chained(place, name, exp.steps[name], after, exp.offsets)
        copies = np.delete(np.arange(num_rows), kept)
        if len(copies):
            what = f"{len(copies)} rows are copies of others; they are read once"
            yield self.parquet.note("duplicate", what, *unit.at(int(copies[0])), "eps_id", len(copies))


def _without_copies(found: Columns, track: Ints, done: NDArray[np.bool_], t: Ints | None) -> Ints:
    """The rows of a unit that are not copies of earlier ones; ``t`` are their steps, if they have them."""
    roots = (col.OBS, col.NEXT_OBS, col.ACTION, col.REWARD)
    content: Columns = {name: c for name, c in found.items() if any(col.is_under(name, root) for root in roots)}
    content |= {"done": done} | ({} if t is None else {"t": t})
    times = None
    if t is None:  # an episode is stored as often as it ends, or has rows after its end
        last = np.zeros(track.max() + 1, np.int64)
        last[track] = np.arange(len(track))
        times = (np.bincount(track, done).astype(np.int64) + ~done[last])[track]
    return np.flatnonzero(without_copies(track, hashes_of(content), times))


def _at(columns: Columns, rows: Ints) -> Columns:
    """Some rows of columns, which are not copied if they are all rows in order."""
    is_all = bool((np.diff(rows) == 1).all())
    return {name: c if is_all and len(c) == len(rows) else c[rows] for name, c in columns.items()}


# -- order -----------------------------------------------------------------------------------------------------------


def in_time(track: Ints, done: NDArray[np.bool_], obs: Columns, next_obs: Columns) -> tuple[Ints, Ints]:
    """Return the rows in order of time, by chaining observations, and the step of each row in this order.

    Args:
        track: The agent and episode of each row; equal ones are adjacent.
        done: Whether the episode ends with each row.
        obs: The observation of each row.
        next_obs: The next observation of each row; if both are empty, the rows of an episode are in order.
    """
    other = track[1:] != track[:-1]
    bounds = np.concatenate([[0], np.flatnonzero(other) + 1, [len(track)]])
    order, t = np.arange(len(track)), np.arange(len(track)) - np.repeat(bounds[:-1], np.diff(bounds))
    linked = np.all([follow(values, next_obs[name]) for name, values in obs.items()], axis=0)
    broken = np.flatnonzero(~other & (~linked | done[:-1])) if obs else ()
    for i in np.unique(np.searchsorted(bounds, broken, side="right") - 1).tolist():
        own = slice(int(bounds[i]), int(bounds[i + 1]))
        keys, following = (_keys_of({name: values[own] for name, values in c.items()}) for c in (obs, next_obs))
        chains = _chained(keys, following, done[own])
        order[own] = own.start + np.concatenate(chains)
        t[own] += np.repeat(np.arange(len(chains)), [len(chain) for chain in chains])  # a row is missing between chains
    return order, t


def _keys_of(columns: Columns) -> list[bytes]:
    """Return the bytes of each row over all columns."""
    parts = [np.ascontiguousarray(c).reshape(len(c), -1).view(np.uint8) for _, c in sorted(columns.items())]
    joined = np.concatenate(parts, axis=1)
    return [row.tobytes() for row in joined]


def _chained(obs: list[bytes], next_obs: list[bytes], done: NDArray[np.bool_]) -> list[list[int]]:
    """Chain the rows of one episode, so that each row's observation is the next observation of the row before.

    Args:
        obs: The bytes of each row's observation.
        next_obs: The bytes of each row's next observation.
        done: Whether the episode ends with this row.

    Returns:
        Chains of row indices. Chains whose first row follows no other row come first, in the order of the rows.
    """
    waiting: dict[bytes, list[int]] = {}
    for row in range(len(obs) - 1, -1, -1):
        waiting.setdefault(obs[row], []).append(row)
    reached = {key for row, key in enumerate(next_obs) if not done[row]}
    used = np.zeros(len(obs), bool)
    chains: list[list[int]] = []
    for row in [*(r for r in range(len(obs)) if obs[r] not in reached), *range(len(obs))]:
        if used[row]:
            continue
        chain = [row]
        used[row] = True
        while not done[chain[-1]]:
            following = _next(chain[-1], waiting.get(next_obs[chain[-1]], []), used)
            if following is None:
                break
            chain.append(following)
            used[following] = True
        chains.append(chain)
    return chains


def _next(row: int, candidates: list[int], used: NDArray[np.bool_]) -> int | None:
    """The next row in the file if it is among ``candidates``, else the first unused candidate; None without one."""
    while candidates and used[candidates[-1]]:
        candidates.pop()
    if not candidates:
        return None
    return row + 1 if row + 1 in candidates[-8:] and not used[row + 1] else candidates[-1]
