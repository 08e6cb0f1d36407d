# SPDX-License-Identifier: Apache-2.0
"""A folder of Parquet files that roll by size, for other tools to read."""

from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

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
