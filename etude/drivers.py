# SPDX-License-Identifier: Apache-2.0
"""What the drivers of file systems open and raise, as the rest of Python knows it."""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

from etude.errors import DataError
from etude.urls import first_line


@contextlib.contextmanager
def as_os_error() -> Iterator[None]:
    """Whatever a driver of fsspec's raises."""
    try:
        yield
    except (OSError, DataError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {first_line(error)}") from error


class Bytes(io.RawIOBase):
    """A file of pyarrow's as Python's: it may be asked for what is behind its end, as readers of broken files do."""

    def __init__(self, file: Any) -> None:
        self._file, self._size, self._at = file, int(file.size()), 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go somewhere; behind the end, there is nothing to read."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read what is there."""
        wanted = min(len(buffer), self._size - self._at)
        if wanted <= 0:
            return 0
        with as_os_error():
            data = self._file.read_at(wanted, self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        """Close it."""
        self._file.close()
        super().close()
