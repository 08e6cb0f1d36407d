# SPDX-License-Identifier: Apache-2.0
"""NumPy ``.npz`` files with D4RL's names; see `etude.recordings.formats.flat_arrays`. Pickled objects are refused."""

import math
import struct
import tokenize
import zipfile
import zlib
from typing import IO, Any, Final

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from etude.errors import DataError
from etude.files import AnyPath
from etude.recordings.formats.flat_arrays import ArrayFile, FlatArrays

MOST_PACKED: Final = 1100
"""How many times larger than its bytes in the file an array can be; deflate reaches 1,032."""

_BROKEN = (
    *(OSError, EOFError, ValueError, KeyError, NotImplementedError, RuntimeError, SyntaxError, TypeError, MemoryError),
    *(zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError, OverflowError, IndexError, RecursionError),
)


class D4RLNpz(FlatArrays):
    """NumPy ``.npz`` files in the manner of D4RL. An array is held whole: compressed files have no rows."""

    name = "npz"

    @staticmethod
    def detect(path: AnyPath) -> bool:
        """Whether ``path`` is an ``.npz`` file that holds ``observations`` and ``actions``."""
        if not path.is_file() or path.suffix != ".npz":
            return False
        try:
            with path.open("rb") as file, zipfile.ZipFile(file) as archive:
                roots = {name.removesuffix(".npy").split("/")[0] for name in archive.namelist()}
        except _BROKEN:
            return False
        return {"observations", "actions"} <= roots

    @staticmethod
    def opened(path: AnyPath) -> ArrayFile:
        """See `FlatArrays.opened`."""
        return _File(path)


class _File:
    def __init__(self, path: AnyPath) -> None:
        self.path = path
        self._members: dict[str, tuple[tuple[int, ...], np.dtype[Any]] | None] = {}
        self._loaded: dict[str, NDArray[Any]] = {}
        size = path.stat().st_size
        try:
            with path.open("rb") as file, zipfile.ZipFile(file) as archive:
                for info in archive.infolist():
                    if info.filename.endswith(".npy"):
                        name = info.filename.removesuffix(".npy")
                        if info.file_size > size * MOST_PACKED:
                            raise ValueError(f"`{name}` claims {info.file_size:,} bytes; the file has {size:,}")
                        with archive.open(info) as stream:
                            self._members[name] = _header(stream, info.file_size)
        except _BROKEN as error:
            raise self._unreadable(error) from error

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_loaded": {}}

    def _unreadable(self, error: BaseException) -> DataError:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return DataError(f"{self.path}: can't be read as .npz ({first}). Restore it from a copy.")

    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]] | None]:
        """Shape and dtype by name."""
        return self._members

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Some rows of an array."""
        if name not in self._loaded:
            try:
                with (
                    self.path.open("rb") as file,
                    zipfile.ZipFile(file) as archive,
                    archive.open(f"{name}.npy") as stream,
                ):
                    self._loaded[name] = npy.read_array(stream, allow_pickle=False)
            except _BROKEN as error:
                raise self._unreadable(error) from error
            found = self._loaded[name]
            if self._members[name] != (found.shape, found.dtype):
                raise DataError(f"{self.path}: `{name}` has changed while it was read. Open it again.")
        return self._loaded[name][start:stop]


def _header(stream: IO[bytes], size: int) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
    """Shape and dtype from the head of an ``.npy`` file of ``size`` bytes; None for other than plain numbers."""
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        return None  # 3.0 is for names of fields
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        return None
    if math.prod(shape) * dtype.itemsize > size:
        raise ValueError(f"an array claims {list(shape)} of {dtype}, but has only {size:,} bytes")
    return shape, dtype
