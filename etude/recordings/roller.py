# SPDX-License-Identifier: Apache-2.0
"""Row groups into Parquet files that roll, and that appear whole or not at all."""

import contextlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from etude.errors import DataError
from etude.experience import Experience
from etude.experience.table import to_table
from etude.files import AnyPath, InUseError, Lock, aside_of, publish_at
from etude.recordings.compression import Codec
from etude.recordings.faults import first_difference
from etude.recordings.files import DataFile, data_files, open_file, recordings_in
from etude.recordings.layout import (
    FACTS_KEY,
    HEADER_KEY,
    Encoding,
    FileFacts,
    Header,
    disk_schema,
    first_segment,
    number_of,
    parquet_options,
)

_UNFINISHED: Final = re.compile(r"\.(.+)-\d{5,}\.parquet(?:\.[0-9a-f]+)?\.tmp")


class FileRoller:
    """The files of one writer; used by its thread alone, but for `check` and ``header``."""

    def __init__(
        self,
        folder: AnyPath,
        header: Header,
        max_rows: int,
        max_bytes: int,
        append: bool,
        prefix: str,
        codecs: Mapping[str, Codec],
        encoding: Encoding,
    ) -> None:
        self.failure: BaseException | None = None
        self.published_rows = 0
        self._folder, self._max_rows, self._max_bytes = folder, max_rows, max_bytes
        self._prefix, self._codecs, self._encoding = prefix, dict(codecs), encoding
        self.header = header
        """Goes into files that are finished from now on."""
        header.dumps()  # at once, if it can't be kept
        self._writer: pq.ParquetWriter | None = None
        self._schema: pa.Schema | None = None
        self._newest: AnyPath | None = None
        """The file that this writer has put in its place last."""
        self._lock: Lock | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = claimed(folder, prefix) if isinstance(folder, Path) else None
            self._there = _files_there(folder, header, append)
            if self._lock is not None:
                _clean(self._lock, prefix)
        except OSError as error:
            self.release()
            raise DataError(f"{folder}: can't write a recording here: {error}.") from error
        except BaseException:
            self.release()
            raise
        own = {number: file for file in self._there if (number := number_of(file.path.name, prefix)) is not None}
        self.next_number = max(own, default=-1) + 1
        """That of the file which is begun next."""
        facts = own[self.next_number - 1].facts if own else None
        self._rows_before = facts.rows_before + facts.rows if facts else sum(file.num_rows for file in own.values())
        """Of the series, in files that are finished."""

    def check(self, exp: Experience) -> None:
        """Compare the columns with those of the files that were there before.

        Raises:
            DataError: they are not the same.
        """
        schema = disk_schema(exp[:0].to_table().schema) if self._there else None
        for file in self._there:
            difference = first_difference(schema, file.schema)
            if difference:
                name, own, there = difference
                remedy = "Leave it out with `columns=`" if there is None else "Append the column as it is there"
                raise DataError(
                    f"{file.path}: column `{name}` is {there or 'absent'} in this file, but {own or 'absent'} in what "
                    f"is to be appended. {remedy}, or record to a folder of its own."
                )

    def add(self, exp: Experience) -> None:
        """Write ``exp`` as one row group."""
        if self._writer is not None and self._rows + exp.num_steps > self._max_rows:
            self.publish()
        rows_before = self._rows_before + (0 if self._writer is None else self._rows)
        first = first_segment(self._prefix) + rows_before
        table = to_table(exp.steps, exp.offsets, exp.segments.columns(), exp.final_obs, first)
        if self._writer is None:
            self._open(table.schema)
        if table.schema != self._schema:
            table = table.cast(self._schema)
        assert self._writer is not None
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._rows += exp.num_steps
        self._segments += exp.num_segments
        if self._rows >= self._max_rows or self._sink.tell() >= self._max_bytes:
            self.publish()

    def check_folder(self) -> None:
        """Raise a DataError where the folder is not there any more; behind a URL, `publish` looks at that."""
        if self._lock is not None and not self._lock.is_there():
            raise self._went_away(self._lock.path.name)

    def _went_away(self, name: str) -> DataError:
        return DataError(
            f"{self._folder}: the folder, or {name} in it, was removed or moved while a recording was written there. "
            "What was written before may be lost: record again, to a folder that stays."
        )

    def _open(self, schema: pa.Schema) -> None:
        self.check_folder()
        self._schema = disk_schema(schema).with_metadata({HEADER_KEY: self.header.dumps()})
        self._path = self._next_path()
        self._aside = aside_of(self._path)
        self._rows = self._segments = 0
        self._sink = pa.OSFile(str(self._aside), "wb")
        self._writer = pq.ParquetWriter(
            self._sink, self._schema, **parquet_options(schema, self._codecs, self._encoding)
        )

    def _next_path(self) -> AnyPath:
        path = self._folder / f"{self._prefix}-{self.next_number:05d}.parquet"
        self.next_number += 1
        return path

    def publish(self) -> None:
        """Close the file and give it its real name."""
        self.check_folder()
        if self._lock is None and self._newest is not None and not self._newest.exists():
            raise self._went_away(self._newest.name)
        if self._writer is None:
            return
        number = number_of(self._path.name, self._prefix) or 0
        closed = datetime.now(UTC).isoformat()
        facts = FileFacts(self._prefix, number, self._rows, self._rows_before, self._segments, closed)
        self._writer.add_key_value_metadata({HEADER_KEY: self.header.dumps(), FACTS_KEY: facts.dumps()})
        self._writer.close()
        self._writer = None
        self._sink.close()
        while True:  # another writer may have been here first, where there are no locks
            try:
                if not self._path.exists():
                    publish_at(self._aside, self._path)
                    break
            except FileExistsError:
                pass
            self._path = self._next_path()
        self.published_rows += self._rows
        self._rows_before += self._rows
        self._newest = self._path

    def release(self) -> None:
        """Let others write files of this prefix here; afterwards, nothing can be written."""
        if self._lock is not None:
            self._lock.release()

    def abandon(self) -> None:
        """After a failure: let go of the unfinished file."""
        try:
            if self._writer is not None:
                writer, self._writer = self._writer, None
                writer.close()
                self._sink.close()
                self._aside.unlink(missing_ok=True)
        except (OSError, pa.ArrowException):
            pass  # the first failure is the one that is told


def claimed(folder: Path, prefix: str) -> Lock:
    """The lock on files of a prefix in a folder.

    Raises:
        DataError: another writer has it.
    """
    try:
        return Lock(folder / f".{prefix}.lock")
    except InUseError as owner:
        raise DataError(
            f"{folder}: another writer is at work here ({owner}). Wait until it has ended, or close it where it is of "
            f"this process; choose another folder, or give one of them another `prefix` than {prefix!r}."
        ) from None


def _clean(lock: Lock, prefix: str) -> None:
    """Remove unfinished files that killed writers have left beside ``lock``, whatever their prefix is.

    Those of other writers at work stay. ``lock`` is the own one, on files of ``prefix``.
    """
    for path in list(lock.path.parent.glob(".*.tmp")):
        found = _UNFINISHED.fullmatch(path.name)
        if found is None:
            continue
        with contextlib.suppress(InUseError, FileNotFoundError):
            if found[1] == prefix:
                is_left_over = lock.is_sure
            else:
                with Lock(lock.path.with_name(f".{found[1]}.lock")) as other:
                    is_left_over = other.is_sure
            if is_left_over:
                path.unlink()


def _files_there(folder: AnyPath, header: Header, append: bool) -> list[DataFile]:
    """The data files that ``folder`` holds already; none, unless ``append``."""
    paths = data_files(folder)
    if paths and not append:
        raise DataError(
            f"{folder}: holds a recording of {len(paths)} files already. Choose another folder, remove it, or add to "
            "it: append=True, on the command line --append or --record.append."
        )
    files = [open_file(path) for path in recordings_in(folder).get(folder, [])]
    for there in files:
        if there.version == 1:
            raise DataError(
                f"{folder}: holds a recording of format 1, which nothing can be added to. Convert it with "
                "`etude data convert`, and append to that; or choose another folder."
            )
        if there.header is None or there.header.to_json()["spaces"] != header.to_json()["spaces"]:
            raise DataError(f"{there.path}: has other spaces than what is to be appended. Choose another folder.")
    return files
