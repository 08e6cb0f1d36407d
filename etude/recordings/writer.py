# SPDX-License-Identifier: Apache-2.0
"""Write experience to a recording in the background, as Parquet files that appear whole or not at all."""

import contextlib
import dataclasses
import os
import re
import reprlib
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etude import columns as col
from etude.display import counted, short
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.arrays import describe
from etude.experience.experience import without_lookback
from etude.experience.table import KEYS, to_table
from etude.files import AnyPath, InUseError, Lock, RemotePath, absolute_path, located, publish_at, temporary_path
from etude.recordings.background import BackgroundThread
from etude.recordings.files import DataFile, data_files, open_file, recordings_in
from etude.recordings.format import choose_columns
from etude.recordings.formats.inferring import reserved
from etude.recordings.layout import (
    FACTS_KEY,
    HEADER_KEY,
    PREFIX,
    Codec,
    CompressionLike,
    Encoding,
    FileFacts,
    Header,
    check_encoding,
    check_roots,
    codecs,
    disk_schema,
    first_segment,
    number_of,
    parquet_options,
)
from etude.recordings.own import first_difference
from etude.recordings.pieces import copied, first_piece, row_bytes
from etude.spaces import Space, leaf_dtype, leaf_shape

_UNFINISHED: Final = re.compile(r"\.(.+)-\d{5,}\.parquet(?:\.[0-9a-f]+)?\.tmp")


class FileRoller:
    """The files of one writer; used only by its thread, except for `check` and ``header``."""

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
        """Written into files that are finished from now on."""
        header.dumps()  # raises at once if it can't be stored
        self._writer: pq.ParquetWriter | None = None
        self._schema: pa.Schema | None = None
        self._newest: AnyPath | None = None
        """The file that this writer published last."""
        self._lock: Lock | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(folder / f".{prefix}.lock") if isinstance(folder, Path) else None
            self._there = _files_there(folder, header, append)
            if self._lock is not None:
                _clean(self._lock, prefix)
        except InUseError as owner:
            raise DataError(
                f"{folder}: another writer is using this folder ({owner}). Wait until it has ended, or close it if it "
                f"is in this process ({os.getpid()}), with `close()` of the algorithm or writer; else choose another "
                f"folder, or give one of them a `prefix` other than {prefix!r}."
            ) from None
        except OSError as error:
            self.release()
            raise DataError(f"{folder}: can't write a recording here: {error}.") from error
        except BaseException:
            self.release()
            raise
        own = {number: file for file in self._there if (number := number_of(file.path.name, prefix)) is not None}
        self.next_number = max(own, default=-1) + 1
        """The number of the next file."""
        facts = own[self.next_number - 1].facts if own else None
        self._rows_before = facts.rows_before + facts.rows if facts else sum(f.metadata.num_rows for f in own.values())
        """Rows in finished files with this prefix."""

    def check(self, exp: Experience) -> None:
        """Compare the columns with those of the files that existed before.

        Raises:
            DataError: they differ.
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

    def write(self, parts: Sequence[Experience], *, publish: bool) -> None:
        """Write ``parts`` as one row group, and with ``publish`` close the file.

        An error is kept in ``failure``, which the next call on the writer raises.
        """
        try:
            if self.failure is None and parts:
                self._add(Experience.concat(parts))
            if self.failure is None and publish:
                self.publish()
        except BaseException as error:  # noqa: BLE001
            self.failure = error
            self.abandon()

    def finish(self, parts: Sequence[Experience]) -> None:
        """Write ``parts``, close the file, and let others write to the folder."""
        self.write(parts, publish=True)
        self.release()

    def _add(self, exp: Experience) -> None:
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
        """Raise a DataError if the folder no longer exists; behind a URL, `publish` checks that."""
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
        self._aside = temporary_path(self._path)
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
        while True:  # without locks, another writer may have taken this name
            with contextlib.suppress(FileExistsError):
                if not self._path.exists():
                    publish_at(self._aside, self._path)
                    break
            self._path = self._next_path()
        self.published_rows += self._rows
        self._rows_before += self._rows
        self._newest = self._path

    def release(self) -> None:
        """Let other writers use this prefix here; afterwards, nothing can be written."""
        if self._lock is not None:
            self._lock.release()

    def abandon(self) -> None:
        """Discard the unfinished file after a failure."""
        with contextlib.suppress(OSError, pa.ArrowException):  # the first failure is the one to report
            if self._writer is not None:
                writer, self._writer = self._writer, None
                writer.close()
                self._sink.close()
                self._aside.unlink(missing_ok=True)


def _clean(lock: Lock, prefix: str) -> None:
    """Remove unfinished files that killed writers left in the folder of ``lock``, whatever their prefix.

    Files of writers that are still running stay. ``lock`` is this writer's own, for ``prefix``.
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
    """The data files already in ``folder``; none, unless ``append``."""
    paths = data_files(folder)
    if paths and not append:
        raise DataError(
            f"{folder}: holds a recording of {counted(len(paths), 'file')} already. Choose another folder, remove "
            "it, or add to it: append=True, on the command line --append or --record.append."
        )
    files = [open_file(path) for path in recordings_in(folder).get(folder, [])]
    for there in files:
        if there.version == 1:
            raise DataError(
                f"{folder}: holds a recording of format 1, which can't be appended to. Convert it with "
                "`etude data convert`, and append to that; or choose another folder."
            )
        if there.header is None:
            raise DataError(
                f"{there.path}: does not state its spaces: another tool has rewritten it. Convert the folder with "
                "`etude data convert A B --env ENV`, and append to the new one; or choose another folder."
            )
        header.check_alike(
            there.header,
            str(there.path),
            "Only steps of equal spaces and units can be appended: choose another folder.",
        )
    return files


ROW_GROUP_ROWS: Final = 65_536
"""The maximum number of rows in a row group; 16k rows made reading 10-15 % slower."""
ROW_GROUP_BYTES: Final = 64 * 2**20
"""The approximate size limit of a row group in memory, in bytes: readers must hold one at once."""
MAX_ROWS_PER_FILE: Final = 16 * ROW_GROUP_ROWS
MAX_FILE_SIZE: Final = 256 * 2**20
MAX_SECONDS: Final = 300.0
"""Seconds after which queued rows are written to disk by the next `RecordingWriter.write`, however few they are."""


class RecordingWriter:
    """Writes experience into a folder of Parquet files, in a background thread and in bounded memory.

    Use it as a context manager, or call `close`: the last data is on disk only after that, or after `flush`. At any
    moment, even after SIGKILL or a power cut, every file with a visible name is complete and readable. Segments are
    kept whole, except those longer than a row group, which are cut as by `Experience.split`. Lookback rows are left
    out, because they are steps of other segments.

    Args:
        path: The folder, or its URL, such as ``s3://bucket/run``; created if it does not exist.
        obs_space: The space of the observations as recorded.
        action_space: The space of the actions as recorded.
        env: The id of the env, for readers.
        meta: Other metadata, as JSON data: connectors, the module's identity, the seed.
        columns: The step columns to keep, by name or root; None keeps all.
        max_rows_per_file: The maximum number of rows in a file, at least 1.
        max_file_size: The size in bytes, at least 1, at which a file is closed.
        compression: A codec for all columns, or codecs by column or root, of which the longest match applies:
            ``{"obs/camera": "zstd:3", "obs": "lz4"}``. A codec for ``obs`` also applies to ``final_obs``. None uses LZ4
            for numbers, Zstandard for images and strings. Codecs are none, snappy, lz4, gzip, brotli and zstd,
            optionally with a level after a colon.
        prefix: What the file names start with. Writers that use one folder at the same time need different prefixes.
        append: Add files to an existing recording, which must have the same columns. If False, an existing recording
            is an error.
        encoding: How numbers are encoded. ``plain`` is for tools that do not know Parquet's newer encodings, such as
            older versions of Spark: files are larger and slower to read. Its default ``compression`` is Snappy.
        filesystem: The pyarrow or fsspec file system of ``path``; by default, its URL's, or the local one. For a URL,
            each file is written locally first, and uploaded when it is complete.

    Raises:
        DataError: the folder holds a recording and ``append`` is False, or the recording has other spaces; or another
            writer uses the folder with the same prefix.
        SettingsError: a codec or the encoding is unknown.
        ValueError: a limit is less than 1, or the prefix can't be used.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | RemotePath,
        *,
        obs_space: Space,
        action_space: Space,
        env: str | None = None,
        meta: Mapping[str, Any] | None = None,
        columns: Sequence[str] | None = None,
        max_rows_per_file: int = MAX_ROWS_PER_FILE,
        max_file_size: int = MAX_FILE_SIZE,
        compression: CompressionLike | None = None,
        prefix: str = PREFIX,
        append: bool = False,
        encoding: Encoding = "compact",
        filesystem: Any = None,
    ) -> None:
        if max_rows_per_file < 1 or max_file_size < 1:
            raise ValueError("max_rows_per_file and max_file_size must be at least 1.")
        if prefix[:1] in ("", ".", "_") or not prefix.isprintable() or {"/", "\\"} & set(prefix) or len(prefix) > 100:
            raise ValueError(
                f"prefix is {prefix[:120]!r}, but must begin with another character than `.` and `_`, have at most 100 "
                "characters, all of them printable, and no slash."
            )
        self.path = located(path, filesystem)
        check_encoding(encoding)
        self.header = Header(obs_space, action_space, env, dict(meta or {}))
        self._codecs = codecs(compression)
        limits = (max_rows_per_file, max_file_size)
        self._files = FileRoller(absolute_path(self.path), self.header, *limits, append, prefix, self._codecs, encoding)
        self._columns = None if columns is None else tuple(columns)
        self._limits = limits
        self._group_rows = 0
        self._described: dict[str, str] = {}
        self._pending: list[Experience] = []
        self._pending_rows = 0
        self._pending_since = 0.0
        self._thread = BackgroundThread("etude-writer")
        self._newest: Future[None] | None = None
        """The last row group that was given to the thread."""
        # Also called on garbage collection and interpreter exit: the thread must not outlive its writer.
        self._finish = weakref.finalize(self, _finish, self._pending, self._thread, self._files, os.getpid())

    def __repr__(self) -> str:
        return short(self, reprlib.repr(str(self.path)), env=self.header.env)

    def __enter__(self) -> "RecordingWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def num_steps(self) -> int:
        """The number of rows in this writer's finished files."""
        return self._files.published_rows

    @property
    def next_file(self) -> int:
        """The number of the next file. After `flush`, everything written is in files before it."""
        return self._files.next_number

    def set_meta(self, meta: Mapping[str, Any]) -> None:
        """Store ``meta`` in place of the earlier metadata in all files that are finished from now on.

        Raises:
            DataError: it contains something that JSON can't store.
        """
        header = dataclasses.replace(self.header, meta=dict(meta))
        header.dumps()
        self.header = self._files.header = header

    def write(self, exp: Experience) -> None:
        """Queue ``exp`` to be written; its arrays may be reused as soon as this returns.

        Blocks if the disk is slower than the data.

        Raises:
            DataError: the columns do not match the spaces, an earlier write, or the recording that is appended to; or
                an earlier write failed.
        """
        self._check_alive()
        if not isinstance(exp, Experience):
            raise DataError(
                f"write() takes an Experience, not a {type(exp).__name__}. To read arrays or a table, use a Source."
            )
        exp = without_lookback(exp.numpy())
        exp = exp if self._columns is None else recorded(exp, self._columns)
        if not exp.num_segments:
            return
        exp = exp.with_steps(**{name: c.astype(object) for name, c in exp.steps.items() if c.dtype.kind == "U"})
        self._check_columns(exp)
        while exp.num_segments:
            head, rest = first_piece(exp, self._group_rows - self._pending_rows)
            if head.num_segments:
                self._pending_since = self._pending_since if self._pending else time.monotonic()
                self._pending.append(copied(head))
                self._pending_rows += head.num_steps
            elif self._pending:
                self._hand_over()
            else:
                head, rest = exp.split(self._group_rows)
                self._pending.append(copied(head))
                self._hand_over()
            exp = rest
        if self._pending and time.monotonic() - self._pending_since > MAX_SECONDS:
            self._hand_over(publish=True)

    def flush(self) -> None:
        """Write everything queued so far to disk, as a file of its own, and wait until it is there.

        Raises:
            DataError: a write failed.
        """
        self._check_alive()
        self._hand_over(publish=True).result()
        self._check_alive()

    def close(self) -> None:
        """Write everything to disk and end the thread. Further calls do nothing.

        Raises:
            DataError: a write failed.
        """
        if self._finish.alive:
            self._finish()
            if not self._thread.is_current:
                self._thread.join()
            self._raise_failure()

    def _hand_over(self, *, publish: bool = False) -> Future[None]:
        """Let the thread write what is pending; first waits until it has written the previous row group."""
        if self._newest is not None:
            self._newest.result()
        self._newest = self._thread.submit(partial(self._files.write, tuple(self._pending), publish=publish))
        self._pending.clear()
        self._pending_rows = 0
        return self._newest

    def _check_alive(self) -> None:
        self._raise_failure()
        if not self._finish.alive:
            raise DataError(f"{self.path}: this writer is closed. Make a new one with append=True to write more.")
        self._files.check_folder()

    def _raise_failure(self) -> None:
        if self._files.failure is not None:
            raise DataError(
                f"{self.path}: writing failed after {self.num_steps:,} rows were on the disk: {self._files.failure}"
            ) from self._files.failure

    def _check_columns(self, exp: Experience) -> None:
        described = {name: describe(column) for name, column in exp.steps.items()}
        if described == self._described:
            return
        if self._described:
            a, b = self._described, described
            name = next(name for name in [*a, *b] if a.get(name) != b.get(name))
            raise DataError(
                f"column `{name}` is {b.get(name, 'absent')} in this write, but {a.get(name, 'absent')} in the first "
                "one. A recording has the same columns everywhere: record other data in a folder of its own."
            )
        leaves = self.header.leaves()
        if np.ndim(exp.steps.get(col.REWARD, np.zeros(1))) != 1:
            shape = list(exp.steps[col.REWARD].shape[1:])
            raise DataError(f"`{col.REWARD}` has rows of shape {shape}, not one number each: flatten it.")
        for name in described:
            if reserved(name):
                raise DataError(
                    f"a step column can't be called `{name}`: recordings use this name themselves. Rename it."
                )
            if name not in leaves and any(col.is_under(name, root) for root in self.header.spaces):
                listed = ", ".join(leaves)
                raise DataError(f"there is a column `{name}`, but the spaces have only {listed}. Rename one of them.")
        for name, leaf in leaves.items():
            wanted = describe(np.empty((0, *leaf_shape(leaf)), leaf_dtype(leaf)))
            found = described.get(name)
            if found != wanted and (found is not None or self._columns is None):
                raise DataError(
                    f"column `{name}` is {found or 'absent'}, but its space {leaf} is {wanted}. Convert the column, or "
                    "give the writer the space that fits."
                )
        for name in col.under(described, col.OBS):
            if name not in exp.final_obs:
                raise DataError(
                    f"`final_obs` has no column `{name}`: give the observation after each segment's last step, or "
                    "zeros and has_final_obs=False where it is unknown."
                )
        finals = col.renamed(exp.final_obs, col.OBS, col.FINAL_OBS)
        check_roots(self._codecs, [*described, *finals, *KEYS])
        self._files.check(exp)
        self._described = described
        rows, size = self._limits[0], row_bytes(exp)
        self._group_rows = max(1, min(ROW_GROUP_ROWS, rows, ROW_GROUP_BYTES // size, self._limits[1] // size))


def recorded(exp: Experience, roots: Sequence[str]) -> Experience:
    """Return ``exp`` with only the columns under ``roots``.

    Raises:
        DataError: there is no column under one of them.
    """
    return exp.only(choose_columns(list(exp.steps), roots, "what is to be recorded"))


def _finish(pending: list[Experience], thread: BackgroundThread, files: FileRoller, owner: int) -> None:
    """Write what is pending, and end the thread."""
    if os.getpid() != owner:
        return  # a forked process has no such thread; the parent process continues to write
    last = thread.submit(partial(files.finish, tuple(pending)))
    pending.clear()
    thread.end()
    if not thread.is_current:  # garbage collection may run in it
        wait([last])
