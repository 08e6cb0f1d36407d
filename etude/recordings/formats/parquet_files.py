# SPDX-License-Identifier: Apache-2.0
"""Parquet files of other tools: read row group by row group, and written in folders of files that roll by size."""

import threading
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from etude.errors import DataError
from etude.files import AnyPath
from etude.recordings import footers
from etude.urls import first_line

T = TypeVar("T")


class DecodedCache(Generic[T]):
    """Values that are dear to make, by key; those used last are kept, of so many bytes together, one at least.

    Threads that ask for the same key at one time get one value, which one of them makes. A copy in another process
    begins empty.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._values: dict[Hashable, tuple[T, int]] = {}
        self._making: dict[Hashable, threading.Lock] = {}

    def __reduce__(self) -> tuple[type["DecodedCache[T]"], tuple[int]]:
        return type(self), (self._max_bytes,)

    def get(self, key: Hashable, make: Callable[[], tuple[T, int]]) -> T:
        """The value of ``key``; ``make`` gives it and its bytes, where it is not kept."""
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
                size = sum(size for _, size in self._values.values())
                while size > self._max_bytes and len(self._values) > 1:
                    size -= self._values.pop(next(iter(self._values)))[1]
            return made[0]


# -- reading ---------------------------------------------------------------------------------------------------------


KEPT_BYTES: Final = 64 * 2**20
"""Decoded row groups that are kept, so that units of one row group do not decode it each time."""


class ParquetFiles:
    """The Parquet files of one recording, in order; footers are read when it is made.

    Raises:
        DataError: a file is not whole.
    """

    def __init__(self, paths: Sequence[AnyPath]) -> None:
        self.paths = list(paths)
        self.metadata = [footers.whole(found) for found in footers.footers(self.paths)]
        self.groups = [(f, g) for f, m in enumerate(self.metadata) for g in range(m.num_row_groups)]
        """Every row group: the index of its file, and its own in it."""
        self.group_rows = [self.metadata[f].row_group(g).num_rows for f, g in self.groups]
        self._kept: DecodedCache[pa.Table] = DecodedCache(KEPT_BYTES)

    def schema(self, file: int) -> pa.Schema:
        """The Arrow schema of a file, without looking at what extension types say of themselves."""
        return self.metadata[file].schema.to_arrow_schema()

    def read(self, group: int, columns: Sequence[str], *, text_codes: Sequence[str] = ()) -> pa.Table:
        """Columns of one row group (an index into `groups`); those read last stay in memory.

        Args:
            group: Which one.
            columns: Their names.
            text_codes: The columns of text that come dictionary-encoded.

        Raises:
            DataError: the bytes can't be decoded.
        """

        def read() -> tuple[pa.Table, int]:
            table = self._read(group, columns, text_codes)
            return table, table.nbytes

        return self._kept.get((group, *columns), read)

    def _read(self, group: int, columns: Sequence[str], text_codes: Sequence[str]) -> pa.Table:
        file, own = self.groups[group]
        try:
            with footers.opened(self.paths[file], self.metadata[file], text_codes) as parquet:
                table = parquet.read_row_group(own, columns=list(columns))
                table.validate()
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            raise DataError(
                f"{self.paths[file]}: row group {own} can't be decoded ({first_line(error)}). Restore the file from a "
                "copy, or move it away to read the rest."
            ) from error
        return table

    def place(self, group: int, row: int) -> str:
        """Where a row of a row group is, in words; rows are counted from 0 in their file."""
        return f"{self.paths[self.groups[group][0]]}: row {self.file_row(group, row)}"

    def file_of(self, group: int) -> AnyPath:
        """The file that a row group is in."""
        return self.paths[self.groups[group][0]]

    def file_row(self, group: int, row: int) -> int:
        """The index, in its file, of a row of a row group."""
        file, own = self.groups[group]
        return row + sum(int(self.metadata[file].row_group(g).num_rows) for g in range(own))


# -- writing ---------------------------------------------------------------------------------------------------------


MAX_BYTES: Final = 64 << 20
"""A file is closed once it has this many bytes before compression: Ray Data reads files in parallel."""


class ParquetFolder:
    """Writes tables with one schema to ``part-00000.parquet`` and so on, a row group each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: pq.ParquetWriter | None = None
        self._next = 0
        self._size = 0

    def add(self, table: pa.Table) -> None:
        """Write a row group."""
        if self._writer is None:
            path = self._folder / f"part-{self._next:05d}.parquet"
            self._writer = pq.ParquetWriter(
                path, table.schema, compression="zstd", compression_level=1, use_dictionary=["eps_id"],
                write_page_checksum=True,
            )  # fmt: skip
            self._next += 1
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._size += table.nbytes
        if self._size >= MAX_BYTES:
            self.close()

    def close(self) -> None:
        """Finish the file that is open."""
        if self._writer is not None:
            self._writer.close()
        self._writer, self._size = None, 0
