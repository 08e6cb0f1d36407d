# SPDX-License-Identifier: Apache-2.0
"""Read HDF5 files safely: only plain numbers stored in the file itself, with sizes checked before allocating memory.

An HDF5 file may point to other files (external links, external and virtual storage), and may claim datasets far larger
than itself; both are refused. Reading numbers with h5py runs no code from the file.
"""

import contextlib
import functools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from etude.errors import DataError
from etude.files import AnyPath, RemotePath
from etude.urls import first_line

BROKEN: Final = (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError, MemoryError, OverflowError)
"""What h5py raises for invalid bytes."""
MOST_PACKED: Final = 1100
"""The largest ratio of an array's size to its bytes in the file; deflate, the usual filter, reaches 1,032."""
_METADATA_CACHE: Final = 2**16
"""Initial size in bytes of HDF5's cache of metadata. Each dataset is opened only once, so HDF5's default of 2 MB makes
opening a third slower. The cache grows where that helps."""


def h5py_module() -> Any:
    """Import and return h5py.

    Raises:
        DataError: it is not installed.
    """
    try:
        import h5py
    except ImportError as error:
        raise DataError("HDF5 files are read with h5py, which is not installed: pip install h5py.") from error
    return h5py


@contextmanager
def opened(path: AnyPath) -> Iterator[Any]:
    """Open an HDF5 file and yield its root group (low level); the file is closed at the end.

    Raises:
        DataError: the file can't be opened, or something read from it inside the block can't be decoded.
    """
    h5py = h5py_module()
    with decoding(path), contextlib.ExitStack() as stack:
        source = stack.enter_context(path.open("rb")) if isinstance(path, RemotePath) else path
        file = stack.enter_context(h5py.File(source, "r"))
        cache = file.id.get_mdc_config()
        cache.set_initial_size, cache.initial_size, cache.min_size = True, _METADATA_CACHE, _METADATA_CACHE
        file.id.set_mdc_config(cache)
        yield file["/"].id


@contextmanager
def decoding(path: AnyPath) -> Iterator[None]:
    """Raise a DataError if something inside the block, which reads from an HDF5 file, can't be decoded."""
    try:
        yield
    except BROKEN as error:
        raise DataError(f"{path}: can't be read as HDF5 ({first_line(error)}). Restore it from a copy.") from error


def descriptor(root: Any) -> int | None:
    """Return the file descriptor of an open file, given its root group; None where bytes can't be read by it."""
    h5py = h5py_module()
    file = h5py.h5i.get_file_id(root)
    is_plain = file.get_access_plist().get_driver() == h5py.h5fd.SEC2 and hasattr(os, "preadv")
    return int(file.get_vfd_handle()) if is_plain else None


def names_of(group: Any) -> list[str]:
    """Return the members of a group, sorted as text."""
    return sorted(name.decode("utf-8", "replace") for name in group)


@functools.lru_cache(10_000)  # one for each length of episodes
def _space_of(shape: tuple[int, ...]) -> Any:
    return h5py_module().h5s.create_simple(shape)


@functools.cache
def _type_of(dtype: np.dtype[Any]) -> Any:
    return h5py_module().h5t.py_create(dtype)


class Opener:
    """Opens and checks datasets of one file; remembers the types seen, because looking them up is slow."""

    def __init__(self, path: AnyPath) -> None:
        self._path = path
        self._h5py = h5py_module()
        self._known: list[tuple[Any, np.dtype[Any], bool]] = []  # HDF5 type, dtype, and whether its bytes are NumPy's
        self._size = path.stat().st_size

    def __reduce__(self) -> tuple[type["Opener"], tuple[AnyPath]]:
        return type(self), (self._path,)

    def group(self, parent: Any, name: str, where: str) -> Any:
        """Return the group ``name`` in ``parent``; ``where`` names it in errors."""
        self._check_link(parent, name.encode(), where)
        return self._h5py.h5g.open(parent, name.encode())

    def is_group(self, parent: Any, name: str, where: str) -> bool:
        """Return whether the member ``name`` is a group rather than a dataset."""
        self._check_link(parent, name.encode(), where)
        kind = self._h5py.h5o.get_info(parent, name.encode()).type
        return bool(kind == self._h5py.h5o.TYPE_GROUP)

    def _check_link(self, parent: Any, name: bytes, where: str) -> None:
        try:
            kind = parent.links.get_info(name).type
        except (KeyError, RuntimeError):  # depends on the version of h5py
            have = ", ".join(names_of(parent)[:12]) or "nothing"
            raise DataError(f"{self._path}: there is no `{where}`; beside it there are: {have}.") from None
        if kind != self._h5py.h5l.TYPE_HARD:
            what = "is a link to another place, which is not followed"
            raise DataError(f"{self._path}: `{where}` {what}. Copy the data into the file, by h5py's expand_external.")

    def dataset(self, parent: Any, name: str, where: str) -> tuple[Any, tuple[int, ...], np.dtype[Any]]:
        """Return the dataset ``name`` in ``parent``, its shape and its dtype.

        Raises:
            DataError: it is missing, stored elsewhere, larger than the file can hold, or not plain numbers.
        """
        self._check_link(parent, name.encode(), where)
        dataset = self._h5py.h5d.open(parent, name.encode())
        shape, dtype = dataset.shape, self.dtype_of(dataset)
        if dtype.kind not in "biuf" or dtype.itemsize > 8 or shape is None:
            raise DataError(f"{self._path}: `{where}` holds {dtype}, not plain numbers. Convert it, or leave it out.")
        self._check_size(dataset, shape, dtype, where)
        return dataset, shape, dtype

    def filled(self, parent: Any, name: bytes, out: NDArray[Any], like: int = 0, file: int | None = None) -> int | None:
        """Read a simple dataset into ``out`` with as few calls as possible.

        A dataset is simple if it is one run of bytes in this file, with as many plain numbers as ``out`` and of a type
        that fits its dtype. For other datasets, use `dataset` and `read`, which say what is wrong.

        Args:
            parent: The group that contains it.
            name: Its name there.
            out: Not empty, C-contiguous.
            like: The result for the dataset of that name in another group, whose type is compared first.
            file: The result of `descriptor` for the file. Bytes that need no conversion are read through it, in a third
                of the time.

        Returns:
            The number of its type, for ``like``; None if the dataset was not read.
        """
        h5py = self._h5py
        try:
            if parent.links.get_info(name).type != h5py.h5l.TYPE_HARD:
                return None
            dataset = h5py.h5d.open(parent, name)
            offset = dataset.get_offset()
            if offset is None or (out.ndim > 1 and dataset.shape != out.shape):
                return None
            kind = dataset.get_type()
            if like >= len(self._known) or not kind.equal(self._known[like][0]):
                like = self._index_of(kind, dataset)
            _, dtype, are_numpys = self._known[like]
            if dtype != out.dtype and (dtype.kind not in "biuf" or not np.can_cast(dtype, out.dtype, "safe")):
                return None
            if file is not None and are_numpys and dtype == out.dtype and dataset.get_storage_size() == out.nbytes:
                return like if os.preadv(file, [out.data.cast("B")], offset) == out.nbytes else None
            # Given the space of ``out``, HDF5 itself checks that there are as many numbers.
            dataset.read(_space_of(out.shape), h5py.h5s.ALL, out, _type_of(out.dtype))
        except BROKEN:
            return None
        return like

    def dtype_of(self, item: Any) -> np.dtype[Any]:
        """Return the dtype of a dataset or an attribute."""
        return self._known[self._index_of(item.get_type(), item)][1]

    def _index_of(self, kind: Any, item: Any) -> int:
        for i, (known, *_) in enumerate(self._known):
            if kind.equal(known):
                return i
        dtype: np.dtype[Any] = np.dtype(item.dtype)
        is_plain = dtype.kind in "biuf"
        self._known.append((kind, dtype, is_plain and bool(kind.equal(self._h5py.h5t.py_create(dtype)))))
        return len(self._known) - 1

    def _check_size(self, dataset: Any, shape: tuple[int, ...], dtype: np.dtype[Any], where: str) -> None:
        claimed, room = math.prod(shape) * dtype.itemsize, self._size
        if claimed and dataset.get_offset() is None:  # not one run of bytes in this file
            layout = dataset.get_create_plist()
            if layout.get_layout() not in (self._h5py.h5d.COMPACT, self._h5py.h5d.CHUNKED):
                what = f"the numbers of `{where}` are not stored in this file, but elsewhere or nowhere"
                raise DataError(f"{self._path}: {what}. Copy them into it with h5repack.")
            if claimed > room and layout.get_nfilters():
                room = int(dataset.get_storage_size()) * MOST_PACKED
        if claimed > room:
            what = f"`{where}` claims {claimed:,} bytes ({list(shape)} of {dtype})"
            raise DataError(f"{self._path}: {what}, but the file holds only {self._size:,}. Restore it from a copy.")

    def read(self, dataset: Any, out: NDArray[Any], start: int | None = None) -> None:
        """Read a dataset, or its rows from ``start`` on, into ``out`` (C-contiguous), converted to its dtype."""
        space = memory = self._h5py.h5s.ALL
        if start is not None:
            space, memory = dataset.get_space(), _space_of(out.shape)
            space.select_hyperslab((start, *(0,) * (out.ndim - 1)), out.shape)
        if out.size:
            dataset.read(memory, space, out, _type_of(out.dtype))
