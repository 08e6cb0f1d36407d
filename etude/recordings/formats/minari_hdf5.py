# SPDX-License-Identifier: Apache-2.0
"""Minari's HDF5 layout: ``main_data.hdf5`` with a group an episode."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.errors import DataError
from etude.files import AnyPath
from etude.recordings.formats.hdf5_files import MOST_PACKED, Opener, h5py_module, names_of, opened
from etude.recordings.formats.minari_episodes import Column, Episodes, decoded_images

FILE = "main_data.hdf5"


class _Reading:
    """One column of some episodes, as far as it is read."""

    def __init__(self, out: NDArray[Any], rows: Sequence[int], path: tuple[str, ...], column: Column) -> None:
        self.out, self.rows, self.path, self.column = out, rows, path, column
        self.parent, self.member = path[:-1], path[-1].encode()
        self.at = self.like = 0


class Hdf5Episodes:
    """Reads episodes by number; see `etude.recordings.formats.minari_episodes.Reader`."""

    def __init__(self, folder: AnyPath) -> None:
        self.path = folder / FILE
        self._opener = Opener(self.path)

    def files(self) -> list[AnyPath]:
        """The one file."""
        return [self.path]

    def tuple_member(self, index: int) -> str:
        """The name of a Tuple's part in this layout."""
        return f"_index_{index}"

    def where(self, name: str) -> str:
        """An episode in words, for errors."""
        return f"{self.path}: {name}"

    def index(self) -> Episodes:
        """The episodes that are there, in order of their numbers."""
        with opened(self.path) as root:
            numbers = [int(m[1]) for name in names_of(root) if (m := re.fullmatch(r"episode_(\d{1,18})", name))]
            names, lengths, seeds = [f"episode_{number}" for number in sorted(numbers)], [], []
            for name in names:
                group = self._opener.group(root, name, name)
                length = self._whole_number(group, b"total_steps")
                lengths.append(self._num_rewards(group, name) if length is None else length)
                seeds.append(self._whole_number(group, b"seed"))
        for name, length in zip(names, lengths, strict=True):
            if not 0 < length <= self.path.stat().st_size * MOST_PACKED:
                raise DataError(f"{self.path}: `{name}` has {length:,} steps. Restore the file from a copy.")
        return Episodes(names, np.array(lengths, np.int64), seeds)

    def _num_rewards(self, group: Any, name: str) -> int:
        _, shape, _ = self._opener.dataset(group, "rewards", f"{name}/rewards")
        return shape[0] if shape else 0

    def _whole_number(self, group: Any, name: bytes) -> int | None:
        """A number that an episode carries."""
        h5py = h5py_module()
        if not h5py.h5a.exists(group, name):  # asking takes half as long as failing to open it
            return None
        attribute = h5py.h5a.open(group, name)
        if attribute.shape != () or self._opener.dtype_of(attribute).kind not in "iu":
            return None
        value = np.zeros((), np.int64)
        attribute.read(value, h5py.h5t.NATIVE_INT64)
        return int(value)

    def infos(self, name: str) -> dict[str, Column | None]:
        """The infos of one episode by path; None where one is not made of plain numbers."""
        out: dict[str, Column | None] = {}
        with opened(self.path) as root:
            group = self._opener.group(root, name, name)
            if b"infos" in group:
                self._add_infos(group, "infos", f"{name}/infos", "", out)
        return out

    def _add_infos(self, parent: Any, name: str, where: str, path: str, out: dict[str, Column | None]) -> None:
        if self._opener.is_group(parent, name, where):
            group = self._opener.group(parent, name, where)
            for member in names_of(group):
                self._add_infos(group, member, f"{where}/{member}", f"{path}/{member}".strip("/"), out)
            return
        try:
            _, shape, dtype = self._opener.dataset(parent, name, where)
        except DataError:
            out[path] = None
        else:
            out[path] = Column(tuple(shape[1:]), dtype, shape[0]) if shape else None

    def column(self, name: str, path: Sequence[str], *, image: bool) -> Column:
        """The shape and dtype of one column's rows in one episode."""
        with opened(self.path) as root:
            group, member, where = self._at(root, name, path)
            if image:
                return Column((), np.dtype(np.uint8), len(self._packed(group, member, where)), image=True)
            _, shape, dtype = self._opener.dataset(group, member, where)
            if not shape:
                raise DataError(f"{self.path}: `{where}` is a single number, not one for each step.")
            return Column(tuple(shape[1:]), dtype, shape[0])

    def read(
        self,
        names: Sequence[str],
        wanted: Mapping[str, tuple[Sequence[str], Column]],
        rows: Mapping[str, Sequence[int]],
    ) -> dict[str, NDArray[Any]]:
        """Columns of some episodes, one after the other; ``rows`` are the rows of each episode in each column."""
        with opened(self.path) as root:
            out = {key: np.empty((sum(rows[key]), *column.shape), column.dtype) for key, (_, column) in wanted.items()}
            plan = [_Reading(out[key], rows[key], tuple(path), column) for key, (path, column) in wanted.items()]
            for i, name in enumerate(names):
                groups: dict[tuple[str, ...], Any] = {(): self._opener.group(root, name, name)}
                for one in plan:
                    group = groups.get(one.parent)
                    if group is None:
                        group = groups[one.parent] = self._down(groups[()], name, one.parent)
                    self._read_next(group, one, name, i)
        return out

    def _read_next(self, group: Any, one: "_Reading", name: str, i: int) -> None:
        """Read what episode ``name``, the one of index ``i``, has of a column."""
        target = one.out[one.at : one.at + one.rows[i]]
        one.at += one.rows[i]
        found = None
        if target.size and not one.column.image:
            found = self._opener.filled(group, one.member, target, one.like)
        if found is None:
            self._read_one(group, one.path[-1], f"{name}/{'/'.join(one.path)}", one.column, target)
        else:
            one.like = found

    def _read_one(self, group: Any, member: str, where: str, column: Column, target: NDArray[Any]) -> None:
        if column.image:
            target[:] = decoded_images(self._packed(group, member, where), target.shape, f"{self.path}: `{where}`")
            return
        dataset, shape, dtype = self._opener.dataset(group, member, where)
        if shape != target.shape or not np.can_cast(dtype, target.dtype, "safe"):
            raise DataError(
                f"{self.path}: `{where}` is {list(shape)} of {dtype}, but should be {list(target.shape)} of "
                f"{target.dtype} to go with the other columns. Restore the file from a copy."
            )
        self._opener.read(dataset, target)

    def _packed(self, group: Any, member: str, where: str) -> list[bytes]:
        """The packed images of an episode: rows of bytes, or byte strings of any length."""
        h5py = h5py_module()
        dataset = h5py.Dataset(h5py.h5d.open(group, member.encode()))
        base = h5py.check_vlen_dtype(dataset.dtype)
        if base is None:
            dataset_id, shape, dtype = self._opener.dataset(group, member, where)
            if dtype != np.uint8 or len(shape) != 2:
                raise DataError(f"{self.path}: `{where}` should hold JPEG images, a row of bytes each.")
            values = np.empty(shape, np.uint8)
            self._opener.read(dataset_id, values)
            return [row.tobytes() for row in values]
        if base != np.uint8 or dataset.ndim != 1 or dataset.shape[0] > self.path.stat().st_size:
            raise DataError(f"{self.path}: `{where}` should hold JPEG images, a row of bytes each.")
        return [bytes(memoryview(row)) for row in dataset[()]]

    def _at(self, root: Any, name: str, path: Sequence[str]) -> tuple[Any, str, str]:
        group = self._down(self._opener.group(root, name, name), name, path[:-1])
        return group, path[-1], f"{name}/{'/'.join(path)}"

    def _down(self, group: Any, name: str, path: Sequence[str]) -> Any:
        where = name
        for member in path:
            where = f"{where}/{member}"
            group = self._opener.group(group, member, where)
        return group
