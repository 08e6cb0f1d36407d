# SPDX-License-Identifier: Apache-2.0
"""Read the episodes of a Minari dataset by name, and their columns by path, in its HDF5, Arrow and Parquet layouts.

In Arrow and Parquet files, the last row of an episode holds the final observation; its action, reward and flags are
padding.
"""

import dataclasses
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from etude.errors import DataError
from etude.files import AnyPath, input_file
from etude.recordings import footers
from etude.recordings.format import Problem
from etude.recordings.formats.arrow import check_names, numbers, one_array
from etude.recordings.formats.hdf5_files import MOST_PACKED, Opener, decoding, descriptor, h5py_module, names_of, opened
from etude.recordings.layout import read_json
from etude.urls import first_line


@dataclasses.dataclass(frozen=True)
class MinariColumn:
    """A column of an episode."""

    shape: tuple[int, ...]
    """The shape of a row."""
    dtype: np.dtype[Any]
    rows: int
    """The number of rows that the episode has of it."""
    image: bool = False
    """Whether the rows are JPEG images."""


Wanted: TypeAlias = Mapping[str, tuple[Sequence[str], MinariColumn]]
"""Columns to read: by their names here, each one's path and its form."""
NumRows: TypeAlias = Mapping[str, Sequence[int]]
"""Each episode's number of rows, by column."""


@dataclasses.dataclass(frozen=True)
class Episodes:
    """The episodes of a dataset."""

    names: list[str]
    lengths: NDArray[np.int64]
    """The number of steps of each; there is one more observation."""
    seeds: list[int | None]
    """The seeds with which the env was reset."""
    problems: list[Problem] = dataclasses.field(default_factory=list)
    """Problems of the episodes that can't be read, which are not among these."""


class EpisodeReader(Protocol):
    """Reads one layout. The path of a column consists of Minari's names: ``("observations", "pos")``."""

    def files(self) -> list[AnyPath]:
        """Return the data files."""

    def where(self, name: str) -> str:
        """Describe an episode, for errors."""

    def held(self) -> AbstractContextManager[None]:
        """Open what the calls inside a ``with`` block have in common only once."""

    def tuple_member(self, index: int) -> str:
        """Return the name of a Tuple's part in this layout."""

    def index(self) -> Episodes:
        """Return the existing episodes, sorted by number."""

    def infos(self, names: Sequence[str]) -> Iterator[dict[str, MinariColumn | None]]:
        """Yield the infos of each episode by path; None for those that are not plain numbers."""

    def column(self, name: str, path: Sequence[str], *, image: bool) -> MinariColumn:
        """Return the shape and dtype of one column's rows in one episode."""

    def read(self, names: Sequence[str], wanted: Wanted, rows: NumRows) -> dict[str, NDArray[Any]]:
        """Read columns of some episodes, concatenated."""


def decoded_images(packed: Sequence[bytes], shape: tuple[int, ...], where: str) -> NDArray[np.uint8]:
    """Decode JPEG images to uint8 ``shape``, the first axis of which is the number of images.

    Raises:
        DataError: the number of images differs, or one can't be decoded or has another size.
    """
    if len(packed) != shape[0]:
        raise DataError(f"{where} holds {len(packed)} images, but {shape[0]} go with the other columns.")
    out = np.empty(shape, np.uint8)
    for i, data in enumerate(packed):
        try:
            image = Image.open(io.BytesIO(data), formats=["JPEG"])
            if (image.height, image.width) != shape[1:3]:  # before decoding its pixels
                raise ValueError(f"it is {image.height}x{image.width}, not {'x'.join(map(str, shape[1:3]))}")
            out[i] = np.asarray(image)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{where}: image {i} can't be decoded as JPEG ({error}).") from error
    return out


# -- Arrow and Parquet: a folder per episode, each with one file of T + 1 rows ---------------------------------------


class ArrowEpisodes:
    """Reads episodes in Arrow or Parquet files; see `EpisodeReader`."""

    def __init__(self, folder: AnyPath, suffix: str) -> None:
        self._folder = folder
        self._suffix = suffix
        self._held: dict[str, pa.Table] | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Read the episode that the calls inside a ``with`` block have in common only once."""
        self._held = {}
        try:
            yield
        finally:
            self._held = None

    def files(self) -> list[AnyPath]:
        """Return all files of all episodes."""
        return [path for name in self._names() for path in self._found(name)]

    def where(self, name: str) -> str:
        """Describe an episode, for errors."""
        return str(self._folder / name)

    def tuple_member(self, index: int) -> str:
        """Return the name of a Tuple's part in this layout."""
        return str(index)

    def _names(self) -> list[str]:
        inside = [path for path in self._folder.iterdir() if path.is_dir() and path.name.isdecimal()]
        return [path.name for path in sorted(inside, key=lambda path: int(path.name))]

    def _found(self, name: str) -> list[AnyPath]:
        found: list[Any] = list((self._folder / name).glob(f"*{self._suffix}"))
        return sorted(found)

    def _files_of(self, name: str) -> list[AnyPath]:
        files = self._found(name)
        if not files:
            raise DataError(f"{self._folder / name}: there is no {self._suffix} file of this episode. Restore it.")
        return files

    def index(self) -> Episodes:
        """Return the existing episodes, sorted by number, and problems of those that can't be read."""
        lengths: dict[str, int] = {}
        problems: list[Problem] = []
        for name in self._names():
            try:
                lengths[name] = self._num_rows(name) - 1
                if lengths[name] < 1:
                    raise DataError(f"{self.where(name)}: the episode has no steps. Move its folder away.")
            except DataError as error:
                lengths.pop(name, None)
                problems.append(Problem("unreadable", str(error), self.where(name), count=0, repairable=True))
        if problems and not lengths:
            raise DataError(problems[0].message)
        seeds = [_seed(self._folder / name / "metadata.json") for name in lengths]
        return Episodes(list(lengths), np.array([*lengths.values()], np.int64), seeds, problems)

    def _num_rows(self, name: str) -> int:
        if self._suffix == ".parquet":
            return sum(self._parquet(path).metadata.num_rows for path in self._files_of(name))
        return sum(self._table(path).num_rows for path in self._files_of(name))

    def _parquet(self, path: AnyPath) -> pq.ParquetFile:
        try:
            return footers.opened(path)
        except footers.BROKEN as error:
            raise _unreadable_arrow(path, error) from error

    def _table(self, path: AnyPath) -> pa.Table:
        """Read one file; Arrow files are memory-mapped, so that only the columns in use are read."""
        try:
            if self._suffix == ".parquet":
                return self._parquet(path).read()
            table = pa.ipc.open_file(input_file(path, mapped=True)).read_all()
            table.validate(full=True)  # a broken file may contain any buffers and offsets
            check_names(table.schema)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _unreadable_arrow(path, error) from error
        return table

    def _episode(self, name: str) -> pa.Table:
        if self._held and name in self._held:
            return self._held[name]
        tables = [self._table(path) for path in self._files_of(name)]
        try:
            table = pa.concat_tables(tables).combine_chunks()
        except pa.ArrowException as error:
            raise _unreadable_arrow(self._folder / name, error) from error
        if self._held is not None:
            self._held = {name: table}
        return table

    def infos(self, names: Sequence[str]) -> Iterator[dict[str, MinariColumn | None]]:
        """Yield the infos of each episode by path; None for those that are not plain numbers."""
        for name in names:
            with self.held():
                schema = self._episode(name).schema
                kind = schema.field(schema.names.index("infos")).type if "infos" in schema.names else pa.struct([])
                yield {"/".join(path): self._info(name, path) for path in _paths_in(kind, ())}

    def _info(self, name: str, path: Sequence[str]) -> MinariColumn | None:
        try:
            return self.column(name, ("infos", *path), image=False)
        except DataError:
            return None

    def column(self, name: str, path: Sequence[str], *, image: bool) -> MinariColumn:
        """Return the shape and dtype of one column's rows in one episode."""
        table = self._episode(name)
        if image:
            return MinariColumn((), np.dtype(np.uint8), table.num_rows, image=True)
        values = self._values(table, path, name)
        return MinariColumn(values.shape[1:], values.dtype, table.num_rows)

    def read(self, names: Sequence[str], wanted: Wanted, rows: NumRows) -> dict[str, NDArray[Any]]:
        """Read columns of some episodes, concatenated."""
        out = {key: np.empty((sum(rows[key]), *column.shape), column.dtype) for key, (_, column) in wanted.items()}
        at = dict.fromkeys(wanted, 0)
        for i, name in enumerate(names):
            table = self._episode(name)
            for key, (path, column) in wanted.items():
                target = out[key][at[key] : at[key] + rows[key][i]]
                self._read_one(table, path, name, column, target)
                at[key] += rows[key][i]
        return out

    def _read_one(
        self, table: pa.Table, path: Sequence[str], name: str, column: MinariColumn, target: NDArray[Any]
    ) -> None:
        where = f"{self.where(name)}: column `{'/'.join(path)}`"
        if column.image:
            packed = _member(table, path, where).to_pylist()
            if any(not isinstance(image, bytes) for image in packed):
                raise DataError(f"{where} should hold JPEG images, bytes in each row.")
            target[:] = decoded_images(packed[: len(target)], target.shape, where)
            return
        values = self._values(table, path, name)[: len(target)]
        if not np.can_cast(values.dtype, target.dtype, "safe") or len(values) != len(target):
            raise DataError(f"{where} is {values.dtype} {list(values.shape)}, not {target.dtype} {list(target.shape)}.")
        if values[0].size != target[0].size:
            raise DataError(f"{where} has rows of {values[0].size} numbers, not of {target[0].size}.")
        target[:] = values.reshape(target.shape)

    def _values(self, table: pa.Table, path: Sequence[str], name: str) -> NDArray[Any]:
        """A column as ``[rows]`` or ``[rows, n]``; arrays of several axes are stored flat in Arrow."""
        where = f"{self.where(name)}: column `{'/'.join(path)}`"
        return numbers(_member(table, path, where), "/".join(path), lambda row: f"{self.where(name)}, row {row}")


def _member(table: pa.Table, path: Sequence[str], where: str) -> pa.Array:
    if path[0] not in table.column_names:
        raise DataError(f"{where} is missing; there are {', '.join(table.column_names)}.")
    if table.column_names.count(path[0]) > 1:
        raise DataError(f"{where} exists more than once.")
    array = one_array(table[path[0]])
    for member in path[1:]:
        if not pa.types.is_struct(array.type) or array.type.get_field_index(member) < 0:
            raise DataError(f"{where} is missing; `{path[0]}` is {array.type}.")
        array = pa.compute.struct_field(array, member)
    return array


def _paths_in(kind: pa.DataType, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    if not pa.types.is_struct(kind):
        return [path]
    return [p for field in kind for p in _paths_in(field.type, (*path, field.name))]


def _seed(path: AnyPath) -> int | None:
    data = read_json(path) if path.exists() else None
    seed = data.get("seed") if isinstance(data, dict) else None
    return seed if isinstance(seed, int) else None


def _unreadable_arrow(path: AnyPath, error: Exception) -> DataError:
    return DataError(
        f"{path}: can't be read ({first_line(error)}). Restore it from a copy, or move the episode's folder away."
    )


# -- HDF5: a group per episode ---------------------------------------------------------------------------------------


FILE = "main_data.hdf5"
_AT_ONCE: Final = 1000
"""The most episodes that are looked at before the file is opened anew."""


class _Reading:
    """The progress of reading one column of some episodes."""

    def __init__(self, out: NDArray[Any], rows: Sequence[int], path: tuple[str, ...], column: MinariColumn) -> None:
        self.out, self.rows, self.path, self.column = out, rows, path, column
        self.parent, self.member = path[:-1], path[-1].encode()
        self.at = self.like = 0


class Hdf5Episodes:
    """Reads episodes in an HDF5 file; see `EpisodeReader`."""

    def __init__(self, folder: AnyPath) -> None:
        self.path = folder / FILE
        self._opener = Opener(self.path)
        self._root: Any = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Open the file once for the calls inside a ``with`` block."""
        with opened(self.path) as self._root:
            try:
                yield
            finally:
                self._root = None

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        if self._root is None:
            with opened(self.path) as root:
                yield root
        else:
            with decoding(self.path):
                yield self._root

    def files(self) -> list[AnyPath]:
        """Return the file."""
        return [self.path]

    def tuple_member(self, index: int) -> str:
        """Return the name of a Tuple's part in this layout."""
        return f"_index_{index}"

    def where(self, name: str) -> str:
        """Describe an episode, for errors."""
        return f"{self.path}: {name}"

    def index(self) -> Episodes:
        """Return the existing episodes, sorted by number."""
        with opened(self.path) as root:
            numbers = [int(m[1]) for name in names_of(root) if (m := re.fullmatch(r"episode_(\d{1,18})", name))]
        names, lengths, seeds = [f"episode_{number}" for number in sorted(numbers)], [], []
        with decoding(self.path):
            for name, group in self._groups(names):
                length = self._whole_number(group, b"total_steps")
                lengths.append(self._num_rewards(group, name) if length is None else length)
                seeds.append(self._whole_number(group, b"seed"))
        most = self.path.stat().st_size * MOST_PACKED
        for name, length in zip(names, lengths, strict=True):
            if not 0 < length <= most:
                raise DataError(f"{self.path}: `{name}` has {length:,} steps. Restore the file from a copy.")
        return Episodes(names, np.array(lengths, np.int64), seeds)

    def _groups(self, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Yield episodes with their groups. HDF5 keeps some kilobytes of each until the file is closed."""
        for start in range(0, len(names), _AT_ONCE):
            with opened(self.path) as root:
                for name in names[start : start + _AT_ONCE]:
                    yield name, self._opener.group(root, name, name)

    def _num_rewards(self, group: Any, name: str) -> int:
        _, shape, _ = self._opener.dataset(group, "rewards", f"{name}/rewards")
        return shape[0] if shape else 0

    def _whole_number(self, group: Any, name: bytes) -> int | None:
        """An integer attribute of an episode; None if there is none, or if it is not one number."""
        h5py = h5py_module()
        try:
            attribute = h5py.h5a.open(group, name)
        except KeyError:
            if h5py.h5a.exists(group, name):  # raises if it is damaged
                raise
            return None
        dtype = self._opener.dtype_of(attribute)
        try:
            if (
                dtype.kind not in "iu" or attribute.get_storage_size() != dtype.itemsize
            ):  # finding its shape takes longer
                return None
        except RuntimeError:  # it is empty
            return None
        value = np.zeros((), np.int64)
        attribute.read(value, h5py.h5t.NATIVE_INT64)
        return int(value)

    def infos(self, names: Sequence[str]) -> Iterator[dict[str, MinariColumn | None]]:
        """Yield the infos of each episode by path; None for those that are not plain numbers."""
        for name, group in self._groups(names):
            out: dict[str, MinariColumn | None] = {}
            with decoding(self.path):
                if b"infos" in group:
                    self._add_infos(group, "infos", f"{name}/infos", "", out)
            yield out

    def _add_infos(self, parent: Any, name: str, where: str, path: str, out: dict[str, MinariColumn | None]) -> None:
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
            out[path] = MinariColumn(tuple(shape[1:]), dtype, shape[0]) if shape else None

    def column(self, name: str, path: Sequence[str], *, image: bool) -> MinariColumn:
        """Return the shape and dtype of one column's rows in one episode."""
        with self._opened() as root:
            group = self._down(self._opener.group(root, name, name), name, path[:-1])
            member, where = path[-1], f"{name}/{'/'.join(path)}"
            if image:
                return MinariColumn((), np.dtype(np.uint8), len(self._packed(group, member, where)), image=True)
            _, shape, dtype = self._opener.dataset(group, member, where)
            if not shape:
                raise DataError(f"{self.path}: `{where}` is a single number, not one for each step.")
            return MinariColumn(tuple(shape[1:]), dtype, shape[0])

    def read(self, names: Sequence[str], wanted: Wanted, rows: NumRows) -> dict[str, NDArray[Any]]:
        """Read columns of some episodes, concatenated."""
        with opened(self.path) as root:
            out = {key: np.empty((sum(rows[key]), *column.shape), column.dtype) for key, (_, column) in wanted.items()}
            plan = [_Reading(out[key], rows[key], tuple(path), column) for key, (path, column) in wanted.items()]
            file = descriptor(root)
            for i, name in enumerate(names):
                groups: dict[tuple[str, ...], Any] = {(): self._opener.group(root, name, name)}
                for one in plan:
                    group = groups.get(one.parent)
                    if group is None:
                        group = groups[one.parent] = self._down(groups[()], name, one.parent)
                    self._read_next(group, one, name, i, file)
        return out

    def _read_next(self, group: Any, one: "_Reading", name: str, i: int, file: int | None) -> None:
        """Read a column of episode ``name``, which has index ``i`` in the unit."""
        target = one.out[one.at : one.at + one.rows[i]]
        one.at += one.rows[i]
        found = None
        if target.size and not one.column.image:
            found = self._opener.filled(group, one.member, target, one.like, file)
        if found is None:
            self._read_one(group, one.path[-1], f"{name}/{'/'.join(one.path)}", one.column, target)
        else:
            one.like = found

    def _read_one(self, group: Any, member: str, where: str, column: MinariColumn, target: NDArray[Any]) -> None:
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
        """The encoded images of an episode: rows of bytes, or byte strings of any length."""
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

    def _down(self, group: Any, name: str, path: Sequence[str]) -> Any:
        where = name
        for member in path:
            where = f"{where}/{member}"
            group = self._opener.group(group, member, where)
        return group
