# SPDX-License-Identifier: Apache-2.0
"""Row groups into Parquet files that roll, and that appear whole or not at all."""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.files import AnyPath, InUseError, Lock, aside_of, publish_at, relative
from etude.recordings.compression import Codec, codec_of
from etude.recordings.faults import first_difference
from etude.recordings.files import DataFile, data_files, open_file, recordings_in
from etude.recordings.manifest import HEADER_KEY, MANIFEST, Header, Manifest

PREFIX: Final = "part"
"""What the names of data files begin with."""
Files: TypeAlias = dict[str, dict[str, int]]
"""As in `Manifest.files`."""
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
        prefix: str = PREFIX,
        codecs: Mapping[str, Codec] | None = None,
        *,
        manifest: bool = True,
    ) -> None:
        self.failure: BaseException | None = None
        self.published_rows = 0
        self._folder, self._max_rows, self._max_bytes = folder, max_rows, max_bytes
        self._prefix, self._codecs = prefix, dict(codecs or {})
        self.header = header
        """Goes into files that are begun from now on, and into ``recording.json`` when the next one appears."""
        header.dumps()  # at once, if it can't be kept
        self._writer: pq.ParquetWriter | None = None
        self._schema: pa.Schema | None = None
        self._keeps_manifest = manifest
        self._files: Files = {}
        self._newest: AnyPath | None = None
        """The file that this writer has put in its place last."""
        self._lock: Lock | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = claimed(folder, prefix) if isinstance(folder, Path) else None
            self._there = _files_there(folder, header, append)
            for file in self._there:
                size = file.path.stat().st_size
                self._files[relative(file.path, folder).as_posix()] = {"rows": file.num_rows, "bytes": size}
            if self._lock is not None:
                _clean(self._lock, prefix)
            if manifest:  # until something is appended, the header stays what it was
                self._list((self._there[-1].header if self._there else None) or header)
        except OSError as error:
            self.release()
            raise DataError(f"{folder}: can't write a recording here: {error}.") from error
        except BaseException:
            self.release()
            raise
        numbers = [number_of(file.path.name, prefix) for file in self._there if file.path.parent == folder]
        self.next_number = max((number for number in numbers if number is not None), default=-1) + 1
        """That of the file which is begun next."""

    def check(self, exp: Experience) -> None:
        """Compare the columns with those of the files that were there before.

        Raises:
            DataError: they are not the same.
        """
        schema = _on_disk(exp[:0].to_table().schema) if self._there else None
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
        table = exp.to_table()
        if self._writer is not None and self._rows + table.num_rows > self._max_rows:
            self.publish()
        if self._writer is None:
            self._open(table.schema)
        if table.schema != self._schema:
            table = table.cast(self._schema)
        assert self._writer is not None
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._rows += table.num_rows
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
        self._schema = _on_disk(schema).with_metadata({HEADER_KEY: self.header.dumps()})
        self._path = self._next_path()
        self._aside = aside_of(self._path)
        self._rows = 0
        self._sink = pa.OSFile(str(self._aside), "wb")
        self._writer = pq.ParquetWriter(self._sink, self._schema, **_parquet_options(schema, self._codecs))

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
        self._writer.close()
        self._writer = None
        self._sink.close()
        size = self._aside.stat().st_size
        while True:  # another writer may have been here first, where there are no locks
            try:
                if not self._path.exists():
                    publish_at(self._aside, self._path)
                    break
            except FileExistsError:
                pass
            self._path = self._next_path()
        self.published_rows += self._rows
        self._newest = self._path
        self._files[self._path.name] = {"rows": self._rows, "bytes": size}
        if self._keeps_manifest:
            self._list(self.header)

    def _list(self, header: Header) -> None:
        """Write ``recording.json`` anew: with the files that are there, and those that others have listed since."""
        with _alone(self._folder):
            listed = Manifest.read(self._folder)
            for name, facts in listed.files.items() if listed else ():
                if name not in self._files and (self._folder / name).is_file():
                    self._files[name] = facts
            Manifest(header, dict(sorted(self._files.items()))).write(self._folder)

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


def _alone(folder: AnyPath) -> contextlib.AbstractContextManager[Any]:
    """Nobody else writes ``recording.json`` meanwhile, where the folder is on this machine."""
    # No writer's own lock has this name: prefixes don't begin with `_`.
    return Lock(folder / f"._{MANIFEST}.lock", wait=True) if isinstance(folder, Path) else contextlib.nullcontext()


def number_of(name: str, prefix: str = PREFIX) -> int | None:
    """The number of a data file by its name; None where it is not of this series."""
    digits = name.removeprefix(f"{prefix}-").removesuffix(".parquet")
    return int(digits) if name == f"{prefix}-{digits}.parquet" and digits.isdecimal() else None


def _on_disk(schema: pa.Schema) -> pa.Schema:
    """Keys as plain strings: Parquet has its own dictionaries, and other readers can do more with strings."""
    fields = [field.with_type(pa.string()) if pa.types.is_dictionary(field.type) else field for field in schema]
    return pa.schema(fields)


def _parquet_options(schema: pa.Schema, codecs: Mapping[str, Codec]) -> dict[str, Any]:
    """How each column is kept: measured on CartPole, this reads half as fast again as Zstandard alone, and is smaller.

    Numbers are split by bytes or differences, and then LZ4 does; images and strings take Zstandard; columns that
    ``codecs`` names take those. Dictionaries and statistics on numbers would cost more than half of the speed, so only
    keys have them.
    """
    keys = [name for name in (col.EPISODE_ID, col.AGENT_ID, col.MODULE_ID) if name in schema.names]
    encodings, compression, levels = {}, {}, {}
    for field in schema:
        is_list = pa.types.is_fixed_size_list(field.type)
        path = f"{field.name}.list.element" if is_list else field.name
        kind = field.type.value_type if is_list else field.type
        if pa.types.is_floating(kind) and kind != pa.float16():
            encodings[path] = "BYTE_STREAM_SPLIT"
        elif kind in (pa.int32(), pa.int64()) and not is_list:
            encodings[path] = "DELTA_BINARY_PACKED"
        codec = codec_of(field.name, codecs) or (Codec("lz4") if path in encodings else Codec("zstd", 1))
        compression[path] = codec.name
        if codec.level is not None:
            levels[path] = codec.level
    return {
        "compression": compression,
        "compression_level": levels,
        "use_dictionary": keys,
        "column_encoding": encodings,
        "write_statistics": [col.EPISODE_ID],  # lets a filter on episodes skip row groups
        "write_page_checksum": True,  # a flipped bit is an error when it is read, not other data
    }


def _files_there(folder: AnyPath, header: Header, append: bool) -> list[DataFile]:
    """The data files that ``folder`` holds already; none, unless ``append``."""
    paths = data_files(folder)
    if paths and not append:
        raise DataError(
            f"{folder}: holds a recording of {len(paths)} files already. Choose another folder, remove it, or give "
            "append=True to add to it."
        )
    files = [open_file(path) for path in recordings_in(folder).get(folder, [])]
    for there in files:
        if there.header is None or there.header.to_json()["spaces"] != header.to_json()["spaces"]:
            raise DataError(f"{there.path}: has other spaces than what is to be appended. Choose another folder.")
    if not paths and (folder / MANIFEST).exists():
        Manifest.read(folder)  # refuses to replace a recording.json that is not ours
    return files
