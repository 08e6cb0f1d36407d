# SPDX-License-Identifier: Apache-2.0
"""Locks on folders: who writes there has it for itself, until it lets go or its process ends, however it ends."""

import contextlib
import os
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import IO

if sys.platform != "win32":
    import fcntl


class InUseError(Exception):
    """Somebody else has the lock; the text says who, as far as that is known."""


class Lock:
    """A file that is locked as long as this object is not released. The system lets go of it when the process ends.

    On Windows, and on file systems without locks, several can have it, and `is_sure` is False.

    Args:
        path: The file. It is made where it does not exist, and holds the process id and the host of its owner.
        wait: Wait until it is free.

    Raises:
        InUseError: somebody else has it.
        OSError: the file can't be made.
    """

    def __init__(self, path: Path, *, wait: bool = False) -> None:
        self.path = path
        while True:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by release
            try:
                self.is_sure = _locked(self._file, wait=wait)
            except BlockingIOError:
                self._file.seek(0)
                owner = self._file.read(200).decode(errors="replace").strip()
                self._file.close()
                raise InUseError(f"process {owner}" if owner else "its lock does not tell which") from None
            if self.is_there():
                break
            self._file.close()  # its owner has just removed it
        self._owner = os.getpid()
        self._file.truncate(0)
        self._file.write(f"{self._owner} on {socket.gethostname()}".encode())

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.release()

    def is_there(self) -> bool:
        """Whether the file is where it was: not if it was removed, or its folder was removed or moved."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def release(self, *, keep_file: bool = False) -> None:
        """Let go of it, and remove the file. Does nothing the second time, nor in a forked process."""
        if self._file.closed:
            return
        with contextlib.suppress(OSError):
            if not keep_file and self.is_sure and self._owner == os.getpid() and self.is_there():
                self.path.unlink()
        self._file.close()


def _locked(file: IO[bytes], *, wait: bool) -> bool:
    """Lock an open file; False where that is not possible here. Raises BlockingIOError where somebody else has it."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True
