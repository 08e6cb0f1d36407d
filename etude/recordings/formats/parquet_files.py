# SPDX-License-Identifier: Apache-2.0
"""Read other tools' Parquet files by row group, and write folders of Parquet files of limited size."""

import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etude.errors import DataError
from etude.files import AnyPath
from etude.recordings import footers
from etude.recordings.format import Place, Problem
from etude.urls import first_line

T = TypeVar("T")


class DecodedCache(Generic[T]):
    """A cache of expensive values, by key, that keeps the most recently used ones up to a size limit, but at least one.

    If several threads ask for the same key at the same time, one of them makes the value for all. A pickled copy starts
    empty.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._values: dict[Hashable, tuple[T, int]] = {}
        self._making: dict[Hashable, threading.Lock] = {}
        self._size = 0

    def __reduce__(self) -> tuple[type["DecodedCache[T]"], tuple[int]]:
        return type(self), (self._max_bytes,)

    def get(self, key: Hashable, make: Callable[[], tuple[T, int]]) -> T:
        """Return the value of ``key``; if it is not cached, ``make`` returns it and its size in bytes."""
        with self._lock:
            if key in self._values:
                self._values[key] = self._values.pop(key)
                return self._values[key][0]
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                if key in self._values:
                    return self._values[key][0]
            made = make()
            with self._lock:
                self._values[key] = made
                self._making.pop(key, None)
                self._size += made[1]
                while self._size > self._max_bytes and len(self._values) > 1:
                    self._size -= self._values.pop(next(iter(self._values)))[1]
            return made[0]


# -- reading ---------------------------------------------------------------------------------------------------------


KEPT_BYTES: Final = 32 * 2**20
"""Size of the cache in bytes. It keeps decoded row groups, so that reading one in several units decodes it once."""


class ParquetFiles:
    """The Parquet files of one recording, in order. Creating it reads their footers.

    Raises:
        DataError: a file is not complete.
    """

    def __init__(self, paths: Sequence[AnyPath]) -> None:
        self.paths = list(paths)
        self.metadata = [footers.whole(found) for found in footers.footers(self.paths)]
        self.groups = [(f, g) for f, m in enumerate(self.metadata) for g in range(m.num_row_groups)]
        """Every row group: the index of its file, and its index in that file."""
        self.group_rows = [self.metadata[f].row_group(g).num_rows for f, g in self.groups]
        self.file_rows = [sum(m.row_group(g).num_rows for g in range(m.num_row_groups)) for m in self.metadata]
        self._first = np.cumsum([0, *self.file_rows])  # the row in the recording at which each file begins
        self._bounds = np.cumsum([0, *self.group_rows])  # and each row group
        self._kept: DecodedCache[pa.Table] = DecodedCache(KEPT_BYTES)

    def schema(self, file: int) -> pa.Schema:
        """Return the Arrow schema of a file, without interpreting extension types."""
        return self.metadata[file].schema.to_arrow_schema()

    def read(self, group: int, columns: Sequence[str], *, text_codes: Sequence[str] = ()) -> pa.Table:
        """Read columns of one row group; recently read ones stay in memory.

        Args:
            group: An index into `groups`.
            columns: Names of columns.
            text_codes: Text columns that are returned dictionary-encoded.

        Raises:
            DataError: the bytes can't be decoded.
        """
        return self._kept.get((group, *columns), partial(self._read, group, columns, text_codes))

    def read_rows(self, file: int, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
        """Read columns of the rows ``start:stop`` of a file; see `read`."""
        first, last = self.group_at(file, start), self.group_at(file, stop - 1)
        table = pa.concat_tables([self.read(group, columns) for group in range(first, last + 1)])
        return table.slice(start - self.file_row(first, 0), stop - start)

    def _read(self, group: int, columns: Sequence[str], text_codes: Sequence[str]) -> tuple[pa.Table, int]:
        file, own = self.groups[group]
        try:
            with footers.opened(self.paths[file], self.metadata[file], text_codes) as parquet:
                table = parquet.read_row_group(own, columns=list(columns))
                table.validate(full=bool(text_codes))  # codes of a broken file may be outside of its dictionary
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            raise DataError(
                f"{self.paths[file]}: row group {own} can't be decoded ({first_line(error)}). Restore the file from a "
                "copy, or move it away to read the rest."
            ) from error
        return table, table.nbytes

    def place(self, group: int, row: int) -> Place:
        """Locate a row of a row group; rows are counted from 0 in their file."""
        file, at = str(self.file_of(group)), self.file_row(group, row)
        return Place(f"{file}: row {at}", file, at)

    def note(self, kind: str, what: str, group: int, row: int, column: str, count: int = 1) -> Problem:
        """Return a warning about a row of a row group, as a harmless `Problem`."""
        words, file, at, _ = self.place(group, row)
        return Problem(kind, f"{words}: {what}.", file, at, column, count, True, harmless=True)

    def group_at(self, file: int, row: int) -> int:
        """Return the row group that holds a row of a file: its index in `groups`."""
        return int(np.searchsorted(self._bounds, self._first[file] + row, side="right")) - 1

    def file_of(self, group: int) -> AnyPath:
        """Return the file that contains a row group."""
        return self.paths[self.groups[group][0]]

    def file_row(self, group: int, row: int) -> int:
        """Return the index in its file of a row of a row group."""
        return row + int(self._bounds[group] - self._first[self.groups[group][0]])


# -- writing ---------------------------------------------------------------------------------------------------------


class ParquetFolder:
    """Writes tables with one schema to numbered Parquet files of limited size, each table as one row group.

    Args:
        path: Returns the path of a file, given its number, from 0.
        max_bytes: A file is closed once its tables have this many bytes before compression.
        options: Options of `pyarrow.parquet.ParquetWriter`.
    """

    def __init__(self, path: Callable[[int], Path], max_bytes: int, **options: Any) -> None:
        self._path, self._max_bytes, self._options = path, max_bytes, options
        self._writer: pq.ParquetWriter | None = None
        self._size = 0
        self.number = 0
        """The number of the file that the next table goes to."""

    def add(self, table: pa.Table) -> None:
        """Write a table as a row group."""
        if self._writer is None:
            path = self._path(self.number)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(path, table.schema, **self._options)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._size += table.nbytes
        if self._size >= self._max_bytes:
            self.close()

    def close(self) -> None:
        """Finish the open file."""
        if self._writer is not None:
            self._writer.close()
            self.number += 1
        self._writer, self._size = None, 0
