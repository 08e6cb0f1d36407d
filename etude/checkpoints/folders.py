# SPDX-License-Identifier: Apache-2.0
"""Folders that checkpoints lie in: on this machine, or behind a URL."""

import contextlib
import errno
import os
import reprlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from etude import urls
from etude.errors import CheckpointError
from etude.files import as_os_error, is_object_store, move, remove, sync, write_atomically

MANIFEST = "checkpoint.json"
"""The file of a checkpoint that says what else belongs to it."""


def spare_of(name: str) -> str:
    """Where a small file is whole while it is replaced in a `RemoteFolder`."""
    return f".{name}.tmp"


Where: TypeAlias = str | os.PathLike[str]
"""A path, or a URL such as ``s3://bucket/run``."""


class LocalFolder:
    """A folder of this machine. What is written survives a power cut."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def kind(self) -> str | None:
        """``folder``, ``file``, or None where there is nothing."""
        return "folder" if self.path.is_dir() else "file" if self.path.exists() else None

    def make(self) -> None:
        """Make the folder, if it is not there."""
        self.path.mkdir(parents=True, exist_ok=True)

    def open(self, name: str) -> BinaryIO:
        """A file of it, to be read; FileNotFoundError where it is not there."""
        path = self.path / name
        if path.exists() and not path.is_file():  # a pipe or a device would give bytes for ever, or none
            raise OSError(errno.EINVAL, "it is no regular file")
        return open(path, "rb")

    def write(self, name: str, parts: Iterable[Any]) -> None:
        """Write a new file of these buffers, through to the disk; nothing is left of it where that fails."""
        path = self.path / name
        try:
            with open(path, "xb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            sync(self.path)  # the file's name must be on the disk before anything points to it
        except BaseException:
            path.unlink(missing_ok=True)  # on a full disk, half a file would make matters worse
            raise

    def take(self, name: str, source: "LocalFolder") -> None:
        """Have a file of another folder here too: one file on the disk under two names, or else a copy."""
        path = self.path / name
        if path.exists() and path.samefile(source.path / name):
            return
        try:
            os.link(source.path / name, path)
        except OSError:  # on another disk, or one without such links
            try:
                shutil.copyfile(source.path / name, path)
                sync(path)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        sync(self.path)

    def replace(self, name: str, data: bytes) -> None:
        """Put a small file in place of the one that is there, at one stroke."""
        write_atomically(self.path / name, data)

    def names(self) -> list[str]:
        """Of what is in it; none where it is not there."""
        return sorted(os.listdir(self.path)) if self.path.is_dir() else []

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def remove_itself(self) -> None:
        """Remove the folder where nothing is left in it; else, it stays."""
        with contextlib.suppress(OSError):
            self.path.rmdir()


class RemoteFolder:
    """A folder of a file system of pyarrow's. What its driver raises is an OSError here."""

    def __init__(self, system: Any, path: str, url: str) -> None:
        self.system, self.path, self.url = system, path.rstrip("/"), url

    def __str__(self) -> str:
        return self.url

    def kind(self) -> str | None:
        """``folder``, ``file``, or None where there is nothing."""
        from pyarrow.fs import FileType

        kinds = {FileType.Directory: "folder", FileType.File: "file"}
        with as_os_error():
            return kinds.get(self.system.get_file_info(self.path).type)

    def make(self) -> None:
        """Make the folder, if it is not there."""
        with as_os_error():
            self.system.create_dir(self.path, recursive=True)

    def open(self, name: str) -> BinaryIO:
        """A file of it, to be read; FileNotFoundError where it is not there."""
        with as_os_error():
            return cast(BinaryIO, self.system.open_input_file(f"{self.path}/{name}"))

    def write(self, name: str, parts: Iterable[Any]) -> None:
        """Write a file of these buffers; nothing is left of it where that fails."""
        try:
            self._put(name, parts)
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove(name)
            raise

    def write_over(self, name: str, data: bytes) -> None:
        """Write a file where it is, which is not whole meanwhile."""
        self._put(name, [data])

    def _put(self, name: str, parts: Iterable[Any]) -> None:
        with as_os_error(), self.system.open_output_stream(f"{self.path}/{name}") as file:
            for part in parts:
                file.write(part)

    def replace(self, name: str, data: bytes) -> None:
        """Put a small file in place of the one that is there.

        At every instant, the old file or the new one is whole: under ``name``, or the new one as `spare_of` it.
        """
        spare = spare_of(name)
        self._put(spare, [data])
        if not is_object_store(self.system):
            try:
                move(self.system, f"{self.path}/{spare}", f"{self.path}/{name}")
                return
            except OSError:  # it can't replace files by renaming, and may have begun to
                self._put(spare, [data])
        self.write_over(name, data)
        self.remove(spare)

    def names(self) -> list[str]:
        """Of what is in it; none where it is not there."""
        from pyarrow.fs import FileSelector

        with as_os_error():
            found = self.system.get_file_info(FileSelector(self.path, allow_not_found=True))
        return sorted(info.base_name for info in found)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            remove(self.system, f"{self.path}/{name}")

    def remove_itself(self) -> None:
        """Remove the folder where nothing is left in it; else, it stays."""
        if not self.names():
            with contextlib.suppress(OSError):
                remove(self.system, self.path, is_folder=True)


Folder: TypeAlias = LocalFolder | RemoteFolder


def folder_at(where: Where) -> Folder:
    """The folder at a path or a URL; it need not be there.

    URLs are those that pyarrow knows (``file``, ``s3``, ``gs``, ``abfs``, ``hdfs``), and those that fsspec does where
    that is installed (``memory``, ``sftp``, ...).

    Raises:
        CheckpointError: it is no path, or nothing here knows such URLs.
    """
    if not isinstance(where, str | os.PathLike):
        raise CheckpointError(
            f"a checkpoint is named by the path of its folder, or its URL, not by {reprlib.repr(where)}."
        )
    url = os.fspath(where)
    if not url:
        raise CheckpointError("an empty path was given for a checkpoint; `.` is the current folder.")
    if not urls.is_url(url):
        return LocalFolder(Path(url))
    from pyarrow.fs import LocalFileSystem

    system, path = urls.system_of(url, CheckpointError)
    if isinstance(system, LocalFileSystem):
        return LocalFolder(Path(path))
    return RemoteFolder(system, path, urls.redacted(url))


def inside(where: Where, name: str) -> str:
    """The path or URL of ``name`` in the folder ``where``."""
    text = os.fspath(where)
    return urls.inside(text, name) if urls.is_url(text) else str(Path(text) / name)
