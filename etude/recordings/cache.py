# SPDX-License-Identifier: Apache-2.0
"""A folder on this machine for what was made of other tools' files, so that it is made once.

It is ``$ETUDE_CACHE``, or ``etude`` in the user's cache folder (``$XDG_CACHE_HOME``, ``~/.cache``). All of it can be
removed at any time: what is asked for again is made again. Entries that were not used for longest go first where it
would hold more than ``$ETUDE_CACHE_BYTES`` (20 GB).
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
from etude.files import AnyPath, RemotePath, absolute, as_os_error, input_file
from etude.urls import first_line

MAX_BYTES: Final = 20 * 10**9
"""The most that it holds, where ``$ETUDE_CACHE_BYTES`` does not say."""
LEAST_BYTES: Final = 64 * 2**20
"""Files of fewer bytes together are not kept here but held in memory, where they can't be read from the middle."""
_ABANDONED: Final = 24 * 3600
"""Seconds after which what is still being made was left by a process that was killed."""


def folder() -> Path:
    """Where the cache is; it need not exist."""
    given = os.environ.get("ETUDE_CACHE")
    root = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "etude"
    return root.absolute() / "recordings"


def max_bytes() -> int:
    """How many bytes it may hold.

    Raises:
        SettingsError: ``$ETUDE_CACHE_BYTES`` is no whole number.
    """
    given = os.environ.get("ETUDE_CACHE_BYTES", "").replace("_", "")
    if given and not given.isdecimal():
        raise SettingsError(f"ETUDE_CACHE_BYTES is {given!r}: give a number of bytes, such as 20000000000.")
    return int(given) if given else MAX_BYTES


class Origin:
    """Files as they are when this is made, and the place in the cache of what is made of them. Can be pickled.

    Args:
        files: The files.
        made_by: What else it depends on: the name and the version of what makes it, and its options.

    Raises:
        DataError: a file can't be looked at.
    """

    def __init__(self, files: Sequence[AnyPath], *made_by: object) -> None:
        self.files = list(files)
        self._state = [_state(file) for file in files]
        times = [time or uuid4() for _, time in self._state]  # where none is told, nothing is found again
        places = [str(absolute(str(file))) for file in files]
        words = [repr(made_by), *map(repr, zip(places, [size for size, _ in self._state], times, strict=True))]
        self.key = hashlib.sha256("\n".join(words).encode()).hexdigest()[:32]

    def entry(self, make: Callable[[Path], None]) -> Path:
        """The folder of what is made of the files; see `entry`.

        Raises:
            DataError: it is not there, and a file has changed since this was made.
        """

        def made(folder: Path) -> None:
            self.check()
            make(folder)
            self.check()

        return entry(self.key, made)

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(size for size, _ in self._state)

    def check(self) -> None:
        """Raise a DataError where a file has changed since this was made."""
        for file, state in zip(self.files, self._state, strict=True):
            if _state(file) != state:
                raise changed(file)


class Made:
    """Files that are made of others: in the cache, where they are made anew once they are gone, or in memory.

    It can be pickled.

    Args:
        origin: What they are made of.
        make: Fills the new folder that it gets.
        in_memory: Keep them in memory.
    """

    def __init__(self, origin: Origin, make: Callable[[Path], None], *, in_memory: bool) -> None:
        self._origin, self._make = origin, make
        self._held: dict[str, bytes] | None = None
        if in_memory:
            with tempfile.TemporaryDirectory(prefix="etude-") as folder:
                make(Path(folder))
                self._held = {file.name: file.read_bytes() for file in Path(folder).iterdir()}

    def opened(self, name: str) -> pa.NativeFile:
        """One of the files, to be closed by who asks; nothing of it is copied."""
        if self._held is not None:
            return pa.BufferReader(self._held[name])
        return input_file(self._origin.entry(self._make) / name, mapped=True)


def changed(file: AnyPath, what: str = "") -> DataError:
    """What to say of a file that is not as it was when it was opened; ``what`` of it, where that is known."""
    return DataError(f"{file}: {what}has changed since it was opened. Open it again.")


def _state(file: AnyPath) -> tuple[int, int]:
    """The size and the time of change; 0 where nothing tells."""
    try:
        if not isinstance(file, RemotePath):
            found = file.stat()
            return found.st_size, found.st_mtime_ns
        with as_os_error():
            return file.stat().st_size, file.system.get_file_info(file.inner).mtime_ns or 0
    except OSError as error:
        raise DataError(f"{file}: can't be read ({error.strerror or error}).") from error


def entry(key: str, make: Callable[[Path], None]) -> Path:
    """The folder of the entry ``key``, which is there, and counts as used now.

    Processes that make one at the same time both end well: one of the two is kept.

    Args:
        key: Its name, such as `Origin.key`.
        make: Fills the new folder that it gets; called only where the entry is not there.

    Raises:
        DataError: there is no room for it, or no right to write.
    """
    path = folder() / key
    aside = path.with_name(f".{key}.{os.getpid()}-{uuid4().hex[:8]}")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
            return path
        aside.mkdir(parents=True)
        make(aside)
        try:
            aside.rename(path)
        except OSError:
            if not path.is_dir():  # else another process was faster: its entry is the same
                raise
        _make_room(path)
    except OSError as error:
        raise DataError(
            f"{aside.parent}: can't be written ({first_line(error)}). Etude keeps there what it has converted of other "
            "tools' files: make room, or name another folder in ETUDE_CACHE."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return path


def entries() -> list[tuple[Path, int, float]]:
    """The path of each entry, its bytes, and when it was used last, the one that was not used for longest first."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in folder().iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has just been removed
                found.append((path, sum(file.stat().st_size for file in path.iterdir()), path.stat().st_mtime))
    return sorted(found, key=lambda one: one[2])


def clear() -> int:
    """Remove all entries; gives their bytes. Recordings that are being read make what they need again."""
    found = [one for one in entries() if not one[0].name.startswith(".")]  # else it is being made
    for path, _, _ in found:
        shutil.rmtree(path, ignore_errors=True)
    return sum(size for _, size, _ in found)


def _make_room(new: Path) -> None:
    """Remove what was not used for longest, but not ``new``, until no more is there than may be."""
    found = entries()
    size, most, now = sum(size for _, size, _ in found), max_bytes(), time.time()
    for path, own, used in found:
        is_being_made = path.name.startswith(".")
        if path != new and (now - used > _ABANDONED if is_being_made else size > most):
            shutil.rmtree(path, ignore_errors=True)
            size -= own
