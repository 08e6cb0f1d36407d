# SPDX-License-Identifier: Apache-2.0
"""Sort rows on disk, in bounded memory, for recordings whose rows are not in order."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etude.recordings import cache
from etude.recordings.format import grouped
from etude.recordings.formats.arrow import plain, write_batches
from etude.recordings.formats.table_inputs import Group, is_in_memory

Ints = NDArray[np.int64]

VERSION: Final = 2
"""Version of the sorted files; changing it invalidates cache entries."""
BUCKET_BYTES: Final = 32 * 2**20
"""The approximate size of the rows that are sorted at a time."""
_PENDING_BYTES: Final = 64 * 2**20
"""Size of the rows that wait to be written to their buckets."""
_MOST_BUCKETS: Final = 1024
_KEY_BYTES: Final = 64
"""Memory to sort a row, in bytes."""
ROW: Final = "row in etude"
"""The column with the original index of each row."""
TABLE: Final = "sorted.arrow"
_TRACK, _WHEN = "track in etude", "time in etude"
_TRACK_COLUMNS: Final = ["track", "rows", "first", "last"]


class TrackTable:
    """The tracks (an agent in an episode, as a number) with their numbers of rows and their first and last times."""

    def __init__(self) -> None:
        self._found: list[pa.Table] = []

    def add(self, track: Ints, when: Ints) -> None:
        """Add rows, given the track and the time of each."""
        self._found.append(_tracks(pa.table([track, np.ones(len(track), np.int64), when, when], _TRACK_COLUMNS)))
        if sum(table.num_rows for table in self._found[1:]) > max(2**18, self._found[0].num_rows):
            self._found = [_tracks(pa.concat_tables(self._found))]

    @property
    def columns(self) -> list[Ints]:
        """Track number, number of rows, first time, last time; sorted by track number."""
        return [np.asarray(column) for column in _tracks(pa.concat_tables(self._found)).sort_by(_TRACK_COLUMNS[0])]


def _tracks(found: pa.Table) -> pa.Table:
    merged = found.group_by("track").aggregate([("rows", "sum"), ("first", "min"), ("last", "max")])
    return merged.select(["track", "rows_sum", "first_min", "last_max"]).rename_columns(_TRACK_COLUMNS)


class KeyedRows(NamedTuple):
    """Some rows of a table, with their track and time."""

    track: Ints
    when: Ints
    table: pa.Table

    def filtered(self, keep: NDArray[np.bool_]) -> "KeyedRows":
        """Return the rows for which ``keep`` is True."""
        return KeyedRows(self.track[keep], self.when[keep], self.table.filter(pa.array(keep)))


class _Buckets:
    """Ranges of tracks, and of times within a long track, with about ``limit`` rows each, in order."""

    def __init__(self, tracks: TrackTable, limit: int) -> None:
        self._track, size, self._low, high = tracks.columns
        bounds = grouped(size, limit)
        self._range = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))  # of each track
        total = np.add.reduceat(size, bounds[:-1])
        parts = -(-total // limit)  # a range with more rows than the limit is a single track
        self._parts = parts[self._range]
        self._first = (np.cumsum(parts) - parts)[self._range]
        self._width = (high - self._low) // self._parts + 1
        self.num = int(parts.sum())

    def of(self, track: Ints, when: Ints) -> Ints:
        """Return the bucket of each row."""
        i = np.searchsorted(self._track, track)
        inside = np.where(self._parts[i] > 1, (when - self._low[i]) // self._width[i], 0)
        return np.asarray(self._first[i] + inside)


def write_sorted(
    tracks: TrackTable,
    rows: Iterable[KeyedRows],
    target: Path,
    kept: Callable[[KeyedRows], KeyedRows] = lambda rows: rows,
) -> None:
    """Write ``rows`` to an Arrow file, sorted by track and time; equal rows keep their order.

    Holds some buckets of rows and the tracks in memory. During the sort, the disk holds the rows twice.

    Args:
        tracks: The tracks of all rows.
        rows: All rows, at least one, with one schema.
        target: The file to create.
        kept: Selects rows and columns of some sorted rows, which contain all rows of their tracks and times.
    """
    rest = iter(rows)
    head = next(rest)
    a_row = max(1, head.table.nbytes // max(1, len(head.track)))
    num_rows = int(tracks.columns[1].sum())
    buckets = _Buckets(tracks, max(BUCKET_BYTES // a_row, num_rows // _MOST_BUCKETS, 1))
    aside = target.with_suffix(".unsorted")
    spill_schema = head.table.schema.append(pa.field(_TRACK, pa.int64())).append(pa.field(_WHEN, pa.int64()))
    batches: list[list[int]] = [[] for _ in range(buckets.num)]  # the batches of each bucket in the temporary file
    with pa.OSFile(str(aside), "wb") as file, pa.ipc.new_file(file, spill_schema) as writer:
        written = 0
        pending: dict[int, list[pa.Table]] = {}
        size = 0

        def flush() -> None:
            nonlocal written
            for bucket, tables in sorted(pending.items()):
                (batch,) = pa.concat_tables(tables).combine_chunks().to_batches()
                writer.write_batch(batch)
                batches[bucket].append(written)
                written += 1
            pending.clear()

        for some in itertools.chain([head], rest):
            for bucket, table in _split(some, buckets, spill_schema):
                pending.setdefault(bucket, []).append(table)
            size += some.table.nbytes
            if size > _PENDING_BYTES:
                flush()
                size = 0
        flush()
    with pa.OSFile(str(aside)) as file:
        reader = pa.ipc.open_file(file)
        tables = (kept(_in_order(reader, own, spill_schema)).table for own in batches if own)
        begun = next(tables)
        write_batches(target, begun.schema, itertools.chain([begun], tables))
    aside.unlink()


def _split(rows: KeyedRows, buckets: _Buckets, schema: pa.Schema) -> Iterator[tuple[int, pa.Table]]:
    """Yield a copy of the rows of each bucket, in the order given."""
    bucket = buckets.of(rows.track, rows.when)
    order = np.argsort(bucket, kind="stable")
    bucket = bucket[order]
    columns = [*rows.table.columns, pa.chunked_array([pa.array(rows.track)]), pa.chunked_array([pa.array(rows.when)])]
    table = pa.table(columns, schema=schema)
    heads = np.flatnonzero(np.append(True, bucket[1:] != bucket[:-1])) if len(bucket) else np.zeros(0, np.int64)
    for start, stop in zip(heads.tolist(), [*heads[1:].tolist(), len(bucket)], strict=True):
        yield int(bucket[start]), table.take(pa.array(order[start:stop]))


def _in_order(reader: pa.ipc.RecordBatchFileReader, batches: list[int], schema: pa.Schema) -> KeyedRows:
    table = pa.Table.from_batches([reader.get_batch(i) for i in batches], schema).combine_chunks()
    track, when = (np.asarray(table[name]) for name in (_TRACK, _WHEN))
    order = np.lexsort((when, track))
    return KeyedRows(track[order], when[order], table.drop_columns([_TRACK, _WHEN]).take(pa.array(order)))


# -- tables ----------------------------------------------------------------------------------------------------------


def is_large(groups: Sequence[Group]) -> bool:
    """Whether a table is sorted on disk rather than in memory."""
    files = dict.fromkeys(group.file for group in groups if group.file)
    held = sum(group.num_rows for group in groups) * _KEY_BYTES
    size = max(held, sum(file.stat().st_size for file in files))
    return size >= cache.LEAST_BYTES and not any(is_in_memory(group) for group in groups)


class SortedTable:
    """A table with its rows in order. Can be pickled.

    Args:
        groups: The unsorted rows.
        made: Contains the file `TABLE`, which gives the original index of each row; see `write_sorted`.
    """

    def __init__(self, groups: Sequence[Group], made: cache.Made) -> None:
        self._unsorted, self._first, self.made = groups, bounds_of(groups), made

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        tables: Callable[[], Iterator[pa.Table]],
        tracks: Callable[[], Iterator[tuple[Ints, Ints]]],
        *made_by: object,
    ) -> "SortedTable":
        """Sort the rows of a table.

        Args:
            groups: The unsorted rows.
            tables: Yields the columns of each group.
            tracks: Yields the track and the time of each row, group by group.
            made_by: What the sorted table depends on other than the files.
        """
        files = list(dict.fromkeys(group.file for group in groups if group.file))
        origin = cache.Origin(files, "sorted table", VERSION, pa.__version__, *made_by)
        return cls(groups, cache.Made(origin, partial(_sort, tables, tracks), in_memory=False))

    def groups(self) -> list[Group]:
        """Return the sorted rows."""
        with self.made.opened(TABLE) as source:
            reader = pa.ipc.open_file(source)
            sizes = [reader.get_batch(k).num_rows for k in range(reader.num_record_batches)]
            schema = reader.schema.remove(reader.schema.get_field_index(ROW))
        first = np.append(0, np.cumsum(sizes)).tolist()
        return [_SortedGroup(schema, rows, None, first[k], self, k) for k, rows in enumerate(sizes)]

    def origin(self, row: int) -> tuple[Group, int]:
        """Locate an unsorted row: its group, and its index there."""
        g = int(np.searchsorted(self._first, row, side="right")) - 1
        return self._unsorted[g].origin(row - int(self._first[g]))


def _sort(
    tables: Callable[[], Iterator[pa.Table]], tracks: Callable[[], Iterator[tuple[Ints, Ints]]], folder: Path
) -> None:
    found = TrackTable()
    for track, when in tracks():
        found.add(track, when)

    def rows() -> Iterator[KeyedRows]:
        first = 0
        for (track, when), table in zip(tracks(), tables(), strict=True):
            row = pa.array(np.arange(first, first + table.num_rows))
            yield KeyedRows(track, when, plain(table).append_column(ROW, row))
            first += table.num_rows

    write_sorted(found, rows(), folder / TABLE)


@dataclasses.dataclass(frozen=True)
class _SortedGroup(Group):
    """Rows of a `SortedTable`."""

    table: SortedTable
    index: int

    def read(self, names: Sequence[str]) -> pa.Table:
        with self.table.made.opened(TABLE) as source:
            batch = pa.ipc.open_file(source).get_batch(self.index).select(list(names))
            batch.validate(full=True)
            return pa.Table.from_batches([batch])

    def origin(self, row: int) -> tuple[Group, int]:
        return self.table.origin(self.read([ROW])[ROW][row].as_py())

    def place(self, row: int) -> str:
        group, inside = self.origin(row)
        return group.place(inside)


def bounds_of(groups: Sequence[Group]) -> Ints:
    """The index of the first row of each group, and the number of all rows."""
    return np.append(0, np.cumsum([group.num_rows for group in groups])).astype(np.int64)
