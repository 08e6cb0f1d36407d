# SPDX-License-Identifier: Apache-2.0
"""D4RL-style HDF5 files: long arrays, a row a step; see `etude.recordings.formats.flat_arrays`."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from etude.errors import DataError
from etude.files import AnyPath
from etude.recordings.formats.flat_arrays import ArrayFile, FlatArrays
from etude.recordings.formats.hdf5_files import Opener, names_of, opened

SUFFIXES: Final = (".hdf5", ".h5")
DEEPEST: Final = 8
"""Groups in groups that are looked into; links may make circles."""


class D4RLHdf5(FlatArrays):
    """HDF5 files in the manner of D4RL."""

    name = "d4rl-hdf5"

    @staticmethod
    def detect(path: AnyPath) -> bool:
        """Whether ``path`` is an HDF5 file that holds ``observations`` and ``actions`` at its top."""
        if not path.is_file() or path.suffix not in SUFFIXES:
            return False
        try:
            with opened(path) as root:
                return b"observations" in root and b"actions" in root
        except DataError:
            return False

    @staticmethod
    def opened(path: AnyPath) -> ArrayFile:
        """See `FlatArrays.opened`."""
        return _File(path)


class _File:
    def __init__(self, path: AnyPath) -> None:
        self.path = path
        self._opener = Opener(path)
        self._arrays: dict[str, tuple[tuple[int, ...], np.dtype[Any]] | None] = {}
        with opened(path) as root:
            self._look(root, "", 0)

    def _look(self, group: Any, prefix: str, depth: int) -> None:
        for name in names_of(group):
            where = f"{prefix}{name}"
            try:
                if self._opener.is_group(group, name, where):
                    if depth < DEEPEST:
                        self._look(self._opener.group(group, name, where), f"{where}/", depth + 1)
                else:
                    _, shape, dtype = self._opener.dataset(group, name, where)
                    self._arrays[where] = shape, dtype
            except DataError:
                if where.split("/")[0] in ("observations", "actions", "rewards", "terminals", "timeouts"):
                    raise
                self._arrays[where] = None

    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]] | None]:
        """Shape and dtype by name."""
        return self._arrays

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Some rows of an array."""
        with opened(self.path) as root:
            group, *_ = root, None
            *parents, member = name.split("/")
            for parent in parents:
                group = self._opener.group(group, parent, name)
            dataset, shape, dtype = self._opener.dataset(group, member, name)
            if self._arrays[name] != (shape, dtype):
                raise DataError(f"{self.path}: `{name}` has changed while it was read. Open it again.")
            out = np.empty((stop - start, *shape[1:]), dtype)
            self._opener.read(dataset, out, None if (start, stop) == (0, shape[0]) else start)
        return out
