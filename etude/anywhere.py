# SPDX-License-Identifier: Apache-2.0
"""Files that are read and written in one way, wherever they lie."""

import os
import secrets
import tempfile
from pathlib import Path, PurePath
from typing import Any, cast

from etude.atomic import publish_new, write_atomically
from etude.filesystems import AnyPath, RemotePath


def relative(path: AnyPath, folder: AnyPath) -> PurePath:
    """The path from ``folder`` on; ValueError where it is not under it."""
    return cast(PurePath, cast(Any, path).relative_to(folder))


def in_arrow(path: AnyPath) -> tuple[Any, Any]:
    """A path and its file system, as pyarrow's functions take them; None is this machine's."""
    return (path.inner, path.system) if isinstance(path, RemotePath) else (path, None)


def input_stream(path: AnyPath) -> Any:
    """A pyarrow stream of a file's bytes, decompressed where its name says that it is compressed."""
    import pyarrow as pa

    return path.system.open_input_stream(path.inner) if isinstance(path, RemotePath) else pa.input_stream(str(path))


def input_file(path: AnyPath, *, mapped: bool = False) -> Any:
    """A pyarrow file, to be read from anywhere in it; ``mapped`` into memory where it lies on this machine."""
    import pyarrow as pa

    if isinstance(path, RemotePath):
        return path.system.open_input_file(path.inner)
    return (pa.memory_map if mapped else pa.OSFile)(os.fspath(path))


def replace(path: AnyPath, data: bytes) -> None:
    """Put a small file in place of the one that is there, at one stroke; OSError where that fails."""
    if isinstance(path, RemotePath):
        path.write_bytes(data)
    else:
        write_atomically(path, data)


def aside_of(path: AnyPath) -> Path:
    """Where a large file is written that is to appear at ``path`` whole: beside it, or on this machine's disk.

    No two writers get the same.
    """
    if isinstance(path, Path):
        return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    handle, name = tempfile.mkstemp(prefix="etude-", suffix=f"-{path.name}")
    os.close(handle)
    return Path(name)


def publish_at(aside: Path, path: AnyPath) -> None:
    """Put the finished file ``aside``, of `aside_of`, in its place at one stroke.

    Raises:
        FileExistsError: there is a file already, on this machine; ``aside`` is still there.
        OSError: that fails.
    """
    if isinstance(path, Path):
        publish_new(aside, path)
        return
    import pyarrow as pa

    try:
        with pa.memory_map(str(aside)) as file:
            path.write_bytes(file.read_buffer())
    finally:
        aside.unlink()
