# SPDX-License-Identifier: Apache-2.0
"""Parquet files of other tools, read row group by row group, with errors that name them."""

from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from etude.errors import DataError
from etude.files import AnyPath
from etude.recordings import footers
from etude.recordings.formats.kept import Kept

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
        self._kept: Kept[pa.Table] = Kept(KEPT_BYTES)

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
                f"{self.paths[file]}: row group {own} can't be decoded ({_first_line(error)}). Restore the file from a "
                "copy, or move it away to read the rest."
            ) from error
        return table

    def check(self, group: int, column: str) -> None:
        """Raise a DataError where what the footer says of a column makes no sense.

        Arrow ends the process where it is asked for that; opening the column finds it first.
        """
        file, own = self.groups[group]
        try:
            with footers.opened(self.paths[file], self.metadata[file]) as parquet:
                next(parquet.iter_batches(batch_size=1, row_groups=[own], columns=[column]), None)
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            raise DataError(f"{self.paths[file]}: row group {own} can't be decoded ({_first_line(error)}).") from error

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


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
