# SPDX-License-Identifier: Apache-2.0
"""Sort rows on disk, in bounded memory, for recordings whose rows are not in order."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple
from uuid import uuid4

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etude.recordings import cache
from etude.recordings.format import grouped
from etude.recordings.formats.arrow import plain, write_batches
from etude.recordings.formats.table_inputs import Group, read_batch

Ints = NDArray[np.int64]

VERSION: Final = 5
"""Version of the sorted files. Changing it invalidates cache entries: it must rise if the order of rows changes."""
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
_NOTES: Final = "notes.json"
_TRACK, _WHEN = "track in etude", "time in etude"
_TRACK_COLUMNS: Final = ["track", "rows", "first", "last"]
_NO_TRACKS: Final = pa.schema([(name, pa.int64()) for name in _TRACK_COLUMNS]).empty_table()


class TrackTable:
    """The number of rows, first time and last time of each track (an agent in an episode, as a number)."""

    def __init__(self) -> None:
        self._merged = _NO_TRACKS
        self._added: list[tuple[Ints, Ints]] = []
        self._num_added = 0

    def add(self, track: Ints, when: Ints) -> None:
        """Add rows, given the track and the time of each: int64 ``[rows]``."""
        self._added.append((track, when))
        self._num_added += len(track)
        if self._num_added > max(2**18, self._merged.num_rows):
            self._merge()

    def _merge(self) -> None:
        if self._added:
            track, when = map(np.concatenate, zip(*self._added, strict=True))
            rows = pa.table([track, np.ones(len(track), np.int64), when, when], _TRACK_COLUMNS)
            found = pa.concat_tables([self._merged, rows])
            merged = found.group_by("track").aggregate([("rows", "sum"), ("first", "min"), ("last", "max")])
            self._merged = merged.select(["track", "rows_sum", "first_min", "last_max"]).rename_columns(_TRACK_COLUMNS)
            self._added, self._num_added = [], 0

    @property
    def columns(self) -> list[Ints]:
        """Track number, number of rows, first time, last time; sorted by track number."""
        self._merge()
        return [np.asarray(column) for column in self._merged.sort_by(_TRACK_COLUMNS[0])]


class KeyedRows(NamedTuple):
    """Some rows of a table, with their track and time."""

    track: Ints
    when: Ints
    table: pa.Table

    def filtered(self, keep: NDArray[np.bool_]) -> "KeyedRows":
        """Return the rows for which ``keep`` is True."""
        return KeyedRows(self.track[keep], self.when[keep], self.table.filter(pa.array(keep)))

    def in_order(self) -> "KeyedRows":
        """Return the rows sorted by track and time; equal rows keep their order.

        Steps that are there twice are found later, by `etude.recordings.faults.clashes`.
        """
        order = np.lexsort((self.when, self.track))
        return KeyedRows(self.track[order], self.when[order], self.table.combine_chunks().take(pa.array(order)))


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
        kept: Filters each part of the sorted rows; rows of one track and time are always in the same part.
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
        numbers = itertools.count()
        pending: dict[int, list[pa.Table]] = {}
        size = 0

        def flush() -> None:
            for bucket, tables in sorted(pending.items()):
                (batch,) = pa.concat_tables(tables).combine_chunks().to_batches()
                writer.write_batch(batch)
                batches[bucket].append(next(numbers))
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
    columns = [*rows.table.columns, pa.chunked_array([pa.array(rows.track)]), pa.chunked_array([pa.array(rows.when)])]
    table = pa.table(columns, schema=schema)
    found, heads = np.unique(bucket[order], return_index=True)
    bounds = itertools.pairwise([*heads.tolist(), len(order)])
    for which, (start, stop) in zip(found.tolist(), bounds, strict=True):
        yield which, table.take(pa.array(order[start:stop]))


def _in_order(reader: pa.ipc.RecordBatchFileReader, batches: list[int], schema: pa.Schema) -> KeyedRows:
    table = pa.Table.from_batches([reader.get_batch(i) for i in batches], schema)
    track, when = (np.asarray(table[name]) for name in (_TRACK, _WHEN))
    return KeyedRows(track, when, table.drop_columns([_TRACK, _WHEN])).in_order()


# -- tables ----------------------------------------------------------------------------------------------------------


def sorted_groups(
    groups: Sequence[Group],
    tables: Callable[[], Iterator[pa.Table]],
    tracks: Callable[[Callable[[str], None]], Iterator[tuple[Ints, Ints]]],
    *made_by: object,
) -> tuple[list[Group], list[str]]:
    """Sort the rows of a table: a small one in memory, a larger one in the cache.

    Returns the sorted rows, and the notes of ``tracks``.

    Args:
        groups: The unsorted rows.
        tables: Yields the columns of each group.
        tracks: Yields the track and the time of each row, group by group. Its argument is called with each note.
        made_by: Everything but the files that the sorted table depends on.
    """
    files = list(dict.fromkeys(group.file for group in groups if group.file))
    which = made_by if files else uuid4()  # a table in memory is not found again
    origin = cache.SourceFiles(files, "sorted table", VERSION, pa.__version__, which)
    size = max(origin.size, _KEY_BYTES * sum(group.num_rows for group in groups))
    is_small = size < cache.LEAST_BYTES
    made = cache.CachedFiles(origin, partial(_sort, tables, tracks, is_small), in_memory=is_small)
    with made.opened(_NOTES) as file:
        notes: list[str] = json.loads(file.read())
    return groups_in(made, groups), notes


def _sort(
    tables: Callable[[], Iterator[pa.Table]],
    tracks: Callable[[Callable[[str], None]], Iterator[tuple[Ints, Ints]]],
    is_small: bool,
    folder: Path,
) -> None:
    notes: dict[str, None] = {}

    def rows() -> Iterator[KeyedRows]:
        first = 0
        for (track, when), table in zip(tracks(notes.setdefault), tables(), strict=True):
            row = pa.array(np.arange(first, first + table.num_rows))
            yield KeyedRows(track, when, plain(table).append_column(ROW, row))
            first += table.num_rows

    if is_small:
        parts = list(rows())
        keys = (np.concatenate([part.track for part in parts]), np.concatenate([part.when for part in parts]))
        table = KeyedRows(*keys, pa.concat_tables([part.table for part in parts])).in_order().table
        write_batches(folder / TABLE, table.schema, [table])
    else:
        found = TrackTable()
        for track, when in tracks(notes.setdefault):
            found.add(track, when)
        write_sorted(found, rows(), folder / TABLE)
    (folder / _NOTES).write_text(json.dumps(list(notes)))


def groups_in(made: cache.CachedFiles, unsorted: Sequence[Group]) -> list[Group]:
    """Return the sorted rows in the file `TABLE`, whose column `ROW` is the index of each row in ``unsorted``."""
    with made.opened(TABLE) as source:
        reader = pa.ipc.open_file(source)
        sizes = [reader.get_batch(k).num_rows for k in range(reader.num_record_batches)]
        schema = reader.schema.remove(reader.schema.get_field_index(ROW))
    origin = partial(_origin, unsorted, bounds_of(unsorted))
    groups: list[Group] = []
    first = 0
    for k, rows in enumerate(sizes):
        load = partial(read_batch, partial(made.opened, TABLE), (), k, slice(None))
        groups.append(Group(schema, rows, None, first, load, partial(origin, load)))
        first += rows
    return groups


def _origin(
    unsorted: Sequence[Group], first: Ints, load: Callable[[list[str]], pa.Table], row: int
) -> tuple[Group, int]:
    before = load([ROW])[ROW][row].as_py()
    g = int(np.searchsorted(first, before, side="right")) - 1
    return unsorted[g].origin(before - int(first[g]))


def bounds_of(groups: Sequence[Group]) -> Ints:
    """``[groups + 1]``: the index of the first row of each group, and the number of all rows."""
    return np.append(0, np.cumsum([group.num_rows for group in groups])).astype(np.int64)
