# SPDX-License-Identifier: Apache-2.0
"""Experience to a recording: Parquet files that appear whole or not at all, written in the background."""

import contextlib
import dataclasses
import os
import queue
import re
import reprlib
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etude import columns as col
from etude.display import short
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.arrays import describe
from etude.experience.experience import without_lookback
from etude.experience.table import KEYS, to_table
from etude.files import AnyPath, InUseError, Lock, RemotePath, aside_of, located, publish_at
from etude.recordings.files import DataFile, data_files, open_file, recordings_in
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


ROW_GROUP_ROWS: Final = 65_536
"""The most rows of a row group; 16k cost 10-15 % of the reading speed."""
ROW_GROUP_BYTES: Final = 64 * 2**20
"""About the most bytes of a row group in memory: what readers must hold at once."""
MAX_ROWS_PER_FILE: Final = 16 * ROW_GROUP_ROWS
MAX_FILE_SIZE: Final = 256 * 2**20
MAX_SECONDS: Final = 300.0
"""Rows that have waited this long are put on the disk at the next write, however few they are."""


class RecordingWriter:
    """Writes Experience into a folder of Parquet files, in a thread of its own and with bounded memory.

    Use it as a context manager, or call `close`: what was written last is on the disk only then, or after `flush`.
    At any moment, even after SIGKILL or a power cut, every file with a visible name is whole and can be read.
    Segments are kept whole, but for those that are longer than a row group, which are cut as `Experience.split` cuts.
    Rows of context (``lookback``) are left out: they are steps of other segments.

    Args:
        path: The folder, or its URL, such as ``s3://bucket/run``; made where it does not exist.
        obs_space: The space of the observations as recorded.
        action_space: The space of the actions as recorded.
        env: The id of the env, for readers.
        meta: More to keep beside the data, as JSON data: connectors, the module's identity, the seed.
        columns: The step columns to keep, by name or root; None keeps all.
        max_rows_per_file: A file holds at most this many rows.
        max_file_size: A file is closed once it has this many bytes.
        compression: A codec for all columns, or codecs by column or root of columns, of which the longest counts:
            ``{"obs/camera": "zstd:3", "obs": "lz4"}``. What holds for ``obs`` holds for ``final_obs``. None: LZ4 for
            numbers, Zstandard for images and strings. Known are none, snappy, lz4, gzip, brotli and zstd, with a level
            behind a colon.
        prefix: What the names of the files begin with. Writers at work in one folder at one time need different ones.
        append: Add files to the recording that is there, if any: the columns must be the same; else a recording there
            is an error.
        encoding: How numbers are kept. ``plain`` is for tools that do not know Parquet's newer encodings, such as older
            Spark: files are larger, and read more slowly. Without ``compression``, all its columns take Snappy.
        filesystem: The pyarrow or fsspec file system that ``path`` is in; None is what its URL names, or this machine.
            Behind a URL, a file is made on this machine first, and is sent when it is whole.

    Raises:
        DataError: the folder holds a recording and ``append`` is False, or one with other spaces.
        SettingsError: a codec or the encoding is not known.
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
        self._files = FileRoller(self.path, self.header, *limits, append, prefix, self._codecs, encoding)
        self._columns = None if columns is None else tuple(columns)
        self._limits = limits
        self._group_rows = 0
        self._described: dict[str, str] = {}
        self._pending: list[Experience] = []
        self._pending_rows = 0
        self._pending_since = 0.0
        self._queue: queue.Queue[_Handover] = queue.Queue(maxsize=1)
        thread = threading.Thread(target=_work, args=(self._queue, self._files), name="etude-writer", daemon=True)
        thread.start()
        # Also on garbage collection and at the interpreter's exit: the thread must not outlive its writer.
        self._finish = weakref.finalize(self, _finish, self._pending, self._queue, thread, self._files, os.getpid())

    def __repr__(self) -> str:
        return short(self, reprlib.repr(str(self.path)), env=self.header.env)

    def __enter__(self) -> "RecordingWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def num_steps(self) -> int:
        """Rows that are on the disk for good, in this writer's files."""
        return self._files.published_rows

    @property
    def next_file(self) -> int:
        """The number of the file that is begun next. After `flush`, all that was written is in files before it."""
        return self._files.next_number

    def set_meta(self, meta: Mapping[str, Any]) -> None:
        """Keep ``meta`` in place of what was given before, in files that are finished from now on.

        Raises:
            DataError: it holds something that JSON can't.
        """
        header = dataclasses.replace(self.header, meta=dict(meta))
        header.dumps()
        self.header = self._files.header = header

    def write(self, exp: Experience) -> None:
        """Take ``exp`` to be written; its arrays may be used again as soon as this returns.

        Waits where the disk is slower than the data.

        Raises:
            DataError: the columns do not fit the spaces or what was written before, also by whom this writer appends
                to; or an earlier write failed.
        """
        self._check_alive()
        exp = self._chosen(without_lookback(exp.numpy()))
        if not exp.num_segments:
            return
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
        """Put everything written so far on the disk, as a file of its own, and wait for it.

        Raises:
            DataError: a write failed.
        """
        self._check_alive()
        done = threading.Event()
        self._hand_over(publish=True, done=done)
        done.wait()
        self._check_alive()

    def close(self) -> None:
        """Put everything on the disk and end the thread. Does nothing the second time.

        Raises:
            DataError: a write failed.
        """
        if self._finish.alive:
            self._finish()
            self._raise_failure()

    def _hand_over(self, *, publish: bool = False, done: threading.Event | None = None) -> None:
        self._queue.put(_Handover(tuple(self._pending), publish, done))
        self._pending.clear()
        self._pending_rows = 0

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

    def _chosen(self, exp: Experience) -> Experience:
        if self._columns is None:
            return exp
        for root in self._columns:
            if not col.under(exp.steps, root):
                raise DataError(f"there is no column `{root}` to record; there are {', '.join(exp.steps)}.")
        steps = {name: c for name, c in exp.steps.items() if any(col.is_under(name, root) for root in self._columns)}
        final_obs = {name: c for name, c in exp.final_obs.items() if name in steps}
        return Experience(steps, exp.offsets, exp.segments, final_obs)

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
        for name, leaf in {**self.header.obs_leaves(), **self.header.action_leaves()}.items():
            wanted = describe(np.empty((0, *leaf_shape(leaf)), leaf_dtype(leaf)))
            if name not in described and self._columns is None:
                raise DataError(f"there is no column `{name}`, but the space has one: {leaf}.")
            if described.get(name, wanted) != wanted:
                raise DataError(
                    f"column `{name}` is {described[name]}, but its space {leaf} is {wanted}. Convert the column, or "
                    "give the writer the space that fits."
                )
        finals = [col.FINAL_OBS + name[len(col.OBS) :] for name in exp.final_obs]
        check_roots(self._codecs, [*described, *finals, *KEYS])
        self._files.check(exp)
        self._described = described
        rows, size = self._limits[0], row_bytes(exp)
        self._group_rows = max(1, min(ROW_GROUP_ROWS, rows, ROW_GROUP_BYTES // size, self._limits[1] // size))


@dataclasses.dataclass(frozen=True)
class _Handover:
    """What the thread is asked to do: write a row group, and then perhaps close the file, or end."""

    parts: tuple[Experience, ...]
    publish: bool = False
    done: threading.Event | None = None
    last: bool = False


_Queue: TypeAlias = "queue.Queue[_Handover]"


def _finish(pending: list[Experience], jobs: _Queue, thread: threading.Thread, files: FileRoller, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked process has no such thread; its parent goes on writing
    jobs.put(_Handover(tuple(pending), publish=True, last=True))
    pending.clear()
    thread.join()
    files.release()


def _work(jobs: _Queue, files: FileRoller) -> None:
    last = False
    while not last:
        job = jobs.get()
        last = job.last
        try:
            if files.failure is None:
                if job.parts:
                    files.add(Experience.concat(job.parts))
                if job.publish:
                    files.publish()
        except BaseException as error:  # noqa: BLE001 - kept, and raised by the next call on the writer
            files.failure = error
            files.abandon()
        finally:
            if job.done is not None:
                job.done.set()
