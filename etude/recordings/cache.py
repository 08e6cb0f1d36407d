# SPDX-License-Identifier: Apache-2.0
"""A local cache of other tools' files in converted form, so that each file is converted only once.

It is in ``$ETUDE_CACHE``, or in ``etude`` in the user's cache folder (``$XDG_CACHE_HOME``, ``~/.cache``). It can be
removed at any time: missing entries are made again. If it would exceed ``$ETUDE_CACHE_BYTES`` (by default 20 GB), the
least recently used entries are removed.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final
from uuid import uuid4

import pyarrow as pa

from etude.errors import DataError, SettingsError
from etude.files import AnyPath, InUseError, Lock, RemotePath, absolute, as_os_error, input_file
from etude.urls import first_line

MAX_BYTES: Final = 20 * 10**9
"""Size limit in bytes if ``$ETUDE_CACHE_BYTES`` is not set."""
LEAST_BYTES: Final = 64 * 2**20
"""Files with fewer bytes in total may be kept in memory instead of in the cache; see `CachedFiles`."""
_ABANDONED: Final = 24 * 3600
"""Seconds after which an unfinished entry is taken to be left by a killed process."""
_LOCK: Final = ".lock"
"""The file in an unfinished entry that is locked by the process that makes it."""


def folder() -> Path:
    """Return the cache folder; it need not exist."""
    given = os.environ.get("ETUDE_CACHE")
    root = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "etude"
    return root.absolute() / "recordings"


def max_bytes() -> int:
    """Return the size limit in bytes.

    Raises:
        SettingsError: ``$ETUDE_CACHE_BYTES`` is not a whole number.
    """
    given = os.environ.get("ETUDE_CACHE_BYTES", "").replace("_", "")
    if given and not given.isdecimal():
        raise SettingsError(f"ETUDE_CACHE_BYTES is {given!r}: give a number of bytes, such as 20000000000.")
    return int(given) if given else MAX_BYTES


class SourceFiles:
    """Some files and their current state, which determine the cache entry for what is made from them. Can be pickled.

    Args:
        files: The files.
        made_by: What else the entry depends on: the name, version and options of the converter.

    Raises:
        DataError: a file can't be accessed.
    """

    def __init__(self, files: Sequence[AnyPath], *made_by: object) -> None:
        self.files = list(files)
        self._state = [_state(file) for file in files]
        times = [time or uuid4() for _, time in self._state]  # if unknown, no entry is found again
        places = [str(absolute(str(file))) for file in files]
        words = [repr(made_by), *map(repr, zip(places, [size for size, _ in self._state], times, strict=True))]
        self.key = hashlib.sha256("\n".join(words).encode()).hexdigest()[:32]

    def entry(self, make: Callable[[Path], None]) -> Path:
        """Return the folder of what is made from the files; see the function `entry`.

        Raises:
            DataError: it does not exist, and a file has changed since this object was created.
        """

        def made(folder: Path) -> None:
            self.check()
            make(folder)
            self.check()

        return entry(self.key, made)

    @property
    def size(self) -> int:
        """The size of all files in bytes."""
        return sum(size for size, _ in self._state)

    def check(self) -> None:
        """Raise a DataError if a file has changed since this object was created."""
        for file, state in zip(self.files, self._state, strict=True):
            if _state(file) != state:
                raise changed(file)


class CachedFiles:
    """Files that are made from others, and kept in the cache or in memory. Can be pickled.

    Files that are removed from the cache are made again.

    Args:
        origin: The files that they are made from.
        make: Fills a new folder, which it gets as its argument.
        in_memory: Whether to keep them in memory if they have fewer bytes than `LEAST_BYTES`. This is known only once
            they are made, because images may be compressed a hundredfold.
    """

    def __init__(self, origin: SourceFiles, make: Callable[[Path], None], *, in_memory: bool) -> None:
        self._origin, self._make = origin, make
        self._held: dict[str, bytes] | None = None
        if not in_memory or (folder() / origin.key).is_dir():
            return
        with tempfile.TemporaryDirectory(prefix="etude-") as made:
            make(Path(made))
            files = list(Path(made).iterdir())
            if sum(file.stat().st_size for file in files) < LEAST_BYTES:
                self._held = {file.name: file.read_bytes() for file in files}
            else:
                origin.entry(lambda folder: _move(files, folder))

    def opened(self, name: str) -> pa.NativeFile:
        """Open one of the files without copying it; the caller must close it."""
        if self._held is not None:
            return pa.BufferReader(self._held[name])
        return input_file(self._origin.entry(self._make) / name, mapped=True)


def _move(files: Sequence[Path], folder: Path) -> None:
    for file in files:
        shutil.move(file, folder / file.name)


def changed(file: AnyPath, what: str = "") -> DataError:
    """Return the error for a file that has changed since it was opened; ``what`` names the changed part, if known."""
    return DataError(f"{file}: {what}has changed since it was opened. Open it again.")


def _state(file: AnyPath) -> tuple[int, int]:
    """The size and the modification time; 0 if unknown."""
    try:
        if not isinstance(file, RemotePath):
            found = file.stat()
            return found.st_size, found.st_mtime_ns
        with as_os_error():
            return file.stat().st_size, file.system.get_file_info(file.inner).mtime_ns or 0
    except OSError as error:
        raise DataError(f"{file}: can't be read ({error.strerror or error}).") from error


def entry(key: str, make: Callable[[Path], None]) -> Path:
    """Return the folder of the entry ``key``, making it if necessary, and mark it as used now.

    If two processes make it at the same time, both succeed, and one result is kept.

    Args:
        key: Its name, such as `SourceFiles.key`.
        make: Fills a new folder, which it gets as its argument; only called if the entry does not exist.

    Raises:
        DataError: there is no space or no permission to write it.
    """
    path = folder() / key
    aside = path.with_name(f".{key}.{os.getpid()}-{uuid4().hex[:8]}")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
            return path
        aside.mkdir(parents=True)
        with Lock(aside / _LOCK):
            make(aside)
        try:
            aside.rename(path)
        except OSError:
            if not path.is_dir():  # if it exists, another process has made the same entry
                raise
        _make_room(path)
    except OSError as error:
        raise DataError(
            f"{aside.parent}: can't be written ({first_line(error)}). Etude keeps there what it has converted of other "
            "tools' files: free some space, or set ETUDE_CACHE to another folder."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return path


def entries() -> list[tuple[Path, int, float]]:
    """Return each entry's path, size in bytes, and time of last use; the least recently used first."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in folder().iterdir():
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                found.append((path, sum(file.stat().st_size for file in path.iterdir()), path.stat().st_mtime))
    return sorted(found, key=lambda one: one[2])


def clear() -> int:
    """Remove all entries, and unfinished ones of killed processes. Returns their size in bytes.

    Recordings that are in use make the entries that they need again.
    """
    found = [one for one in entries() if not one[0].name.startswith(".") or _is_left_over(one[0])]
    for path, _, _ in found:
        shutil.rmtree(path, ignore_errors=True)
    return sum(size for _, size, _ in found)


def _is_left_over(unfinished: Path) -> bool:
    with contextlib.suppress(InUseError, OSError), Lock(unfinished / _LOCK) as lock:
        return lock.is_sure
    return False


def _make_room(new: Path) -> None:
    """Remove the least recently used entries, except ``new``, until the size limit is met."""
    found = entries()
    size, most, now = sum(size for _, size, _ in found), max_bytes(), time.time()
    for path, own, used in found:
        is_being_made = path.name.startswith(".")
        if path != new and (now - used > _ABANDONED if is_being_made else size > most):
            shutil.rmtree(path, ignore_errors=True)
            size -= own
