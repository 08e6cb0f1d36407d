# SPDX-License-Identifier: Apache-2.0
"""Read the footers of Parquet files, which describe a recording without its data."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from etude.errors import DataError, described
from etude.files import AnyPath, RemotePath, arrow_path
from etude.urls import first_line

_AT_ONCE: Final = 24
"""The most footers to request at once if each is a round trip to a server."""

BROKEN: Final = (pa.ArrowException, OSError, UnicodeDecodeError)


def footer(path: AnyPath) -> pq.FileMetaData:
    """Return the footer of a file; those of files in a listed remote folder are read only once.

    Raises:
        DataError: it is not a complete Parquet file, or can't be read.
    """
    kept = path.listing.kept if isinstance(path, RemotePath) and path.listing else {}
    found = kept.get(str(path))
    if found is None:
        found = kept[str(path)] = _read(path)
    return found


def footers(paths: Sequence[AnyPath]) -> Iterator[pq.FileMetaData | DataError]:
    """Yield the footers of files in order, or the error; remote ones are read several at a time."""
    if len(paths) < 2 or not isinstance(paths[0], RemotePath):
        yield from map(_tried, paths)
        return
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="etude-footers") as pool:
        yield from pool.map(_tried, paths)


def whole(found: pq.FileMetaData | DataError) -> pq.FileMetaData:
    """Return a result of `footers` if it is a footer, else raise it."""
    if isinstance(found, DataError):
        raise found
    return found


def opened(
    path: AnyPath, metadata: pq.FileMetaData | None = None, keys: Sequence[str] = (), *, checked: bool = False
) -> pq.ParquetFile:
    """Open a file. Checksums of pages are verified on reading, unless they were ``checked`` before. Columns among
    ``keys`` are read dictionary-encoded."""
    source, system = arrow_path(path)
    how = {"metadata": metadata, "read_dictionary": list(keys), "page_checksum_verification": not checked}
    return pq.ParquetFile(source, filesystem=system, **how)


def schema_of(path: AnyPath) -> pa.Schema:
    """Return the Arrow schema of a file; raises like `footer`."""
    return footer(path).schema.to_arrow_schema()


def _tried(path: AnyPath) -> pq.FileMetaData | DataError:
    try:
        return footer(path)
    except DataError as error:
        return error


def _read(path: AnyPath) -> pq.FileMetaData:
    source, system = arrow_path(path)
    metadata = None
    try:
        metadata = pq.read_metadata(source, filesystem=system)
        _ = metadata.schema.to_arrow_schema().names  # decodes them
    except BROKEN as error:
        if isinstance(error, OSError) and isinstance(path, RemotePath):
            raise DataError(
                f"{path}: can't be read ({first_line(error)}). Try again if the connection broke; otherwise check that "
                "the credentials found here may read it."
            ) from error
        raise DataError(
            f"{path}: is not a whole Parquet file: it was cut off or overwritten ({first_line(error)}). "
            "Restore it from a copy, or move it away to read the rest."
        ) from error
    except Exception as error:
        if metadata is None and isinstance(path, RemotePath):
            what = f"{path}: its file system's driver fails ({described(error)})"
            raise DataError(f"{what}. Copy the file to this machine, or give another URL.") from error
        raise DataError(
            f"{path}: a library that this process has imported, such as Ray Data, rejects the file's Arrow "
            f"types ({first_line(error)}). Convert the recording in a process without it, by `etude data convert`."
        ) from error
    return metadata
