# SPDX-License-Identifier: Apache-2.0
"""Row groups into Parquet files that roll, and that appear whole or not at all."""

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from etude import columns as col
from etude.anywhere import aside_of, publish_at, relative
from etude.errors import DataError
from etude.experience import Experience
from etude.filesystems import AnyPath
from etude.recordings.compression import Codec, codec_of
from etude.recordings.faults import first_difference
from etude.recordings.files import DataFile, data_files, open_file
from etude.recordings.manifest import HEADER_KEY, MANIFEST, Header, Manifest

PREFIX: Final = "part"
"""What the names of data files begin with."""


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
        self.failure: Exception | None = None
        self.published_rows = 0
        self._folder, self._max_rows, self._max_bytes = folder, max_rows, max_bytes
        self._prefix, self._codecs = prefix, dict(codecs or {})
        self.header = header
        """Goes into files that are begun from now on, and into ``recording.json`` when the next one appears."""
        header.dumps()  # at once, if it can't be kept
        self._writer: pq.ParquetWriter | None = None
        self._schema: pa.Schema | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._there = _files_there(folder, header, append)
            listed = {
                relative(file.path, folder).as_posix(): {"rows": file.num_rows, "bytes": file.path.stat().st_size}
                for file in self._there
            }
            self._manifest = Manifest(header, listed)
            self._keeps_manifest = manifest
            for left_over in folder.glob(f".{prefix}-*.tmp"):  # not those of others, who may be at work
                left_over.unlink()
            # Until something is appended, the header stays what it was.
            if manifest:
                Manifest((self._there[-1].header if self._there else None) or header, listed).write(folder)
        except OSError as error:
            raise DataError(f"{folder}: can't write a recording here: {error}.") from error
        numbers = [number_of(name, prefix) for name in self._manifest.files]
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

    def _open(self, schema: pa.Schema) -> None:
        self._schema = _on_disk(schema).with_metadata({HEADER_KEY: self.header.dumps()})
        self._path = self._folder / f"{self._prefix}-{self.next_number:05d}.parquet"
        self._aside = aside_of(self._path)
        self.next_number += 1
        self._rows = 0
        self._sink = pa.OSFile(str(self._aside), "wb")
        self._writer = pq.ParquetWriter(self._sink, self._schema, **_parquet_options(schema, self._codecs))

    def publish(self) -> None:
        """Close the file and give it its real name."""
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        self._sink.close()
        size = self._aside.stat().st_size
        publish_at(self._aside, self._path)
        self.published_rows += self._rows
        self._manifest.files[self._path.name] = {"rows": self._rows, "bytes": size}
        if self._keeps_manifest:
            Manifest(self.header, self._manifest.files).write(self._folder)

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
    files = [open_file(path) for path in paths]
    for there in files:
        if there.header is None or there.header.to_json()["spaces"] != header.to_json()["spaces"]:
            raise DataError(f"{there.path}: has other spaces than what is to be appended. Choose another folder.")
    if not paths and (folder / MANIFEST).exists():
        Manifest.read(folder)  # refuses to replace a recording.json that is not ours
    return files
