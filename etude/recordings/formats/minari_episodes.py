# SPDX-License-Identifier: Apache-2.0
"""Read the episodes of a Minari dataset by name, and their columns by path, in its HDF5, Arrow and Parquet layouts.

In Arrow and Parquet files, the last row of an episode holds the final observation; its action, reward and flags are
padding.
"""

import dataclasses
import io
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
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

Path: TypeAlias = tuple[str, ...]
"""The path of a column in an episode, by Minari's names: ``("observations", "pos")``."""


@dataclasses.dataclass(frozen=True)
class MinariColumn:
    """A column of an episode."""

    path: Path
    shape: tuple[int, ...]
    """The shape of a row."""
    dtype: np.dtype[Any]
    rows: int
    """The number of rows in the episode."""
    extra: Literal["first", "last"] | None = None
    """Which of the rows belongs to no step, if there is one more row than steps."""
    is_image: bool = False
    """Whether the rows are JPEG images."""


Infos: TypeAlias = dict[Path, MinariColumn | None]
"""The infos of an episode, by their paths below ``infos``; None for those that are not plain numbers."""


@dataclasses.dataclass(frozen=True)
class Episodes:
    """The episodes of a dataset."""

    names: list[str]
    lengths: NDArray[np.int64]
    """The number of steps of each; there is one more observation."""
    seeds: list[int | None]
    """The seeds with which the env was reset."""
    problems: list[Problem] = dataclasses.field(default_factory=list)
    """Problems of the episodes that can't be read, which are not in ``names``."""


E = TypeVar("E")


def read_all(
    episodes: Iterable[tuple[str, E]],
    lengths: NDArray[np.int64],
    wanted: Mapping[str, MinariColumn],
    read_one: Callable[[E, str, MinariColumn, NDArray[Any]], None],
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Read columns of some episodes, concatenated.

    Args:
        episodes: Each episode, after its name.
        lengths: The number of steps of each.
        wanted: The columns.
        read_one: Fills an array with a column of an episode; gets the episode, its name, the column and the array.

    Returns:
        Each column, ``[steps of all episodes, ...]``, and the last rows that belong to no step, ``[episodes, ...]``.
    """
    num_steps = int(lengths.sum())
    out = {key: np.empty((num_steps + (c.extra is not None), *c.shape), c.dtype) for key, c in wanted.items()}
    final = {key: np.empty((len(lengths), *c.shape), c.dtype) for key, c in wanted.items() if c.extra == "last"}
    start = 0
    for i, ((name, episode), length) in enumerate(zip(episodes, lengths.tolist(), strict=True)):
        stop = start + length
        for key, column in wanted.items():
            rows = out[key]
            if column.extra is None:
                read_one(episode, name, column, rows[start:stop])
            elif column.extra == "last":
                read_one(episode, name, column, rows[start : stop + 1])
                final[key][i] = rows[stop]  # overwritten by the next episode
            else:
                last_step = rows[start].copy()  # of the episode before, in the place of the extra row
                read_one(episode, name, column, rows[start : stop + 1])
                rows[start] = last_step
        start = stop
    return {key: rows[1:] if wanted[key].extra == "first" else rows[:num_steps] for key, rows in out.items()}, final


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
    """Reads episodes in Arrow or Parquet files."""

    def __init__(self, folder: AnyPath, suffix: str) -> None:
        self._folder = folder
        self._suffix = suffix

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
                if (rows := self._num_rows(name)) < 2:
                    raise DataError(f"{self.where(name)}: the episode has no steps. Restore it, or move it away.")
                lengths[name] = rows - 1
            except DataError as error:
                problems.append(Problem("unreadable", str(error), self.where(name), count=0, repairable=True))
        if problems and not lengths:
            raise DataError(problems[0].message)
        seeds = [_seed(self._folder / name / "metadata.json") for name in lengths]
        return Episodes(list(lengths), np.array([*lengths.values()], np.int64), seeds, problems)

    def _num_rows(self, name: str) -> int:
        rows = 0
        for path in self._files_of(name):
            with _decoding(path):
                is_parquet = self._suffix == ".parquet"
                rows += footers.opened(path).metadata.num_rows if is_parquet else self._table(path).num_rows
        return rows

    def _table(self, path: AnyPath) -> pa.Table:
        """Read one file; Arrow files are memory-mapped, so that only the columns in use are read."""
        with _decoding(path):
            if self._suffix == ".parquet":
                return footers.opened(path).read()
            table = pa.ipc.open_file(input_file(path, mapped=True)).read_all()
            table.validate(full=True)  # a broken file may contain any buffers and offsets
            check_names(table.schema)
            return table

    def _episode(self, name: str) -> pa.Table:
        tables = [self._table(path) for path in self._files_of(name)]
        with _decoding(self._folder / name):
            return pa.concat_tables(tables).combine_chunks()

    def infos(self, names: Sequence[str]) -> Iterator[Infos]:
        """Yield the infos of each episode."""
        for name in names:
            table = self._episode(name)
            kind = table.schema.field(table.column_names.index("infos")).type if "infos" in table.column_names else None
            found: Infos = dict.fromkeys(_paths_in(kind, ()) if kind else ())
            for path in found:
                try:
                    found[path] = self._column(table, name, ("infos", *path))
                except DataError:
                    continue
            yield found

    def columns(self, name: str, paths: Mapping[str, Path], images: Collection[str]) -> dict[str, MinariColumn]:
        """Return the shapes and dtypes of columns in one episode; those of ``images`` are JPEG."""
        table = self._episode(name)
        return {
            key: MinariColumn(path, (), np.dtype(np.uint8), table.num_rows, is_image=True)
            if key in images
            else self._column(table, name, path)
            for key, path in paths.items()
        }

    def _column(self, table: pa.Table, name: str, path: Path) -> MinariColumn:
        values = self._values(table, path, name)
        return MinariColumn(path, values.shape[1:], values.dtype, table.num_rows)

    def read(
        self, names: Sequence[str], lengths: NDArray[np.int64], wanted: Mapping[str, MinariColumn]
    ) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        """Read columns of some episodes, see `read_all`."""
        return read_all(((name, self._episode(name)) for name in names), lengths, wanted, self._read_one)

    def _read_one(self, table: pa.Table, name: str, column: MinariColumn, target: NDArray[Any]) -> None:
        where = f"{self.where(name)}: column `{'/'.join(column.path)}`"
        if column.is_image:
            packed = _member(table, column.path, where).to_pylist()
            if any(not isinstance(image, bytes) for image in packed):
                raise DataError(f"{where} should hold JPEG images, bytes in each row.")
            target[:] = decoded_images(packed[: len(target)], target.shape, where)
            return
        values = self._values(table, column.path, name)[: len(target)]  # what has several axes is stored flat
        is_other = len(values) != len(target) or values.size != target.size
        if is_other or not np.can_cast(values.dtype, target.dtype, "safe"):
            raise DataError(f"{where} is {values.dtype} {list(values.shape)}, not {target.dtype} {list(target.shape)}.")
        target[:] = values.reshape(target.shape)

    def _values(self, table: pa.Table, path: Path, name: str) -> NDArray[Any]:
        """A column as ``[rows]`` or ``[rows, n]``."""
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


def _paths_in(kind: pa.DataType, path: Path) -> list[Path]:
    if not pa.types.is_struct(kind):
        return [path]
    return [p for field in kind for p in _paths_in(field.type, (*path, field.name))]


def _seed(path: AnyPath) -> int | None:
    data = read_json(path) if path.exists() else None
    seed = data.get("seed") if isinstance(data, dict) else None
    return seed if isinstance(seed, int) else None


@contextmanager
def _decoding(path: AnyPath) -> Iterator[None]:
    """Raise a DataError if something inside the block, which reads a file or an episode's folder, can't be decoded."""
    try:
        yield
    except footers.BROKEN as error:
        remedy = "Restore it from a copy, or move the episode's folder away."
        raise DataError(f"{path}: can't be read ({first_line(error)}). {remedy}") from error


# -- HDF5: a group per episode ---------------------------------------------------------------------------------------


FILE = "main_data.hdf5"
_AT_ONCE: Final = 1000
"""The most episodes that are read before the file is opened again."""


class _OpenEpisode(NamedTuple):
    """An episode in an open file."""

    groups: dict[Path, Any]
    """The groups that were opened so far, by path."""
    file: int | None
    """The file's descriptor."""


class Hdf5Episodes:
    """Reads episodes in an HDF5 file."""

    def __init__(self, folder: AnyPath) -> None:
        self.path = folder / FILE
        self._opener = Opener(self.path)
        self._kinds: dict[Path, int] = {}  # the result of `Opener.filled` for the last episode, by column

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
        if not h5py.h5a.exists(group, name):  # raises if it is damaged
            return None
        attribute = h5py.h5a.open(group, name)
        dtype = self._opener.dtype_of(attribute)
        try:
            is_one = dtype.kind in "iu" and attribute.get_storage_size() == dtype.itemsize  # faster than its shape
        except RuntimeError:  # it is empty
            is_one = False
        value = np.zeros((), np.int64)
        if is_one:
            attribute.read(value, h5py.h5t.NATIVE_INT64)
        return int(value) if is_one else None

    def infos(self, names: Sequence[str]) -> Iterator[Infos]:
        """Yield the infos of each episode."""
        for name, group in self._groups(names):
            out: Infos = {}
            with decoding(self.path):
                if b"infos" in group:
                    self._add_infos(group, name, ("infos",), out)
            yield out

    def _add_infos(self, parent: Any, name: str, path: Path, out: Infos) -> None:
        where = "/".join((name, *path))
        if self._opener.is_group(parent, path[-1], where):
            group = self._opener.group(parent, path[-1], where)
            for member in names_of(group):
                self._add_infos(group, name, (*path, member), out)
            return
        try:
            out[path[1:]] = self._column(parent, where, path)
        except DataError:
            out[path[1:]] = None

    def columns(self, name: str, paths: Mapping[str, Path], images: Collection[str]) -> dict[str, MinariColumn]:
        """Return the shapes and dtypes of columns in one episode; those of ``images`` may be JPEG."""
        found = {}
        with opened(self.path) as root:
            episode = _OpenEpisode({(): self._opener.group(root, name, name)}, None)
            for key, path in paths.items():
                group, where = self._parent(episode, name, path), "/".join((name, *path))
                packed = self._packed(group, path[-1], where) if key in images else None
                if packed is None:
                    found[key] = self._column(group, where, path)
                else:
                    found[key] = MinariColumn(path, (), np.dtype(np.uint8), len(packed), is_image=True)
        return found

    def _column(self, group: Any, where: str, path: Path) -> MinariColumn:
        _, shape, dtype = self._opener.dataset(group, path[-1], where)
        if not shape:
            raise DataError(f"{self.path}: `{where}` is a single number, not one for each step.")
        return MinariColumn(path, tuple(shape[1:]), dtype, shape[0])

    def read(
        self, names: Sequence[str], lengths: NDArray[np.int64], wanted: Mapping[str, MinariColumn]
    ) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        """Read columns of some episodes, see `read_all`."""
        with opened(self.path) as root:
            file = descriptor(root)
            episodes = ((name, _OpenEpisode({(): self._opener.group(root, name, name)}, file)) for name in names)
            return read_all(episodes, lengths, wanted, self._read_one)

    def _parent(self, episode: _OpenEpisode, name: str, path: Path) -> Any:
        """The group that contains a column."""
        group = episode.groups.get(path[:-1])
        if group is None:
            above = self._parent(episode, name, path[:-1])
            group = self._opener.group(above, path[-2], "/".join((name, *path[:-1])))
            episode.groups[path[:-1]] = group
        return group

    def _read_one(self, episode: _OpenEpisode, name: str, column: MinariColumn, target: NDArray[Any]) -> None:
        path, group = column.path, self._parent(episode, name, column.path)
        if target.size and not column.is_image:
            kind = self._opener.filled(group, path[-1].encode(), target, self._kinds.get(path, 0), episode.file)
            if kind is not None:
                self._kinds[path] = kind
                return
        where = "/".join((name, *path))
        if column.is_image:
            if (packed := self._packed(group, path[-1], where)) is None:
                raise DataError(f"{self.path}: `{where}` should hold JPEG images, a row of bytes each.")
            target[:] = decoded_images(packed, target.shape, f"{self.path}: `{where}`")
            return
        dataset, shape, dtype = self._opener.dataset(group, path[-1], where)
        if shape != target.shape or not np.can_cast(dtype, target.dtype, "safe"):
            wanted = f"should be {list(target.shape)} of {target.dtype} to go with the other columns"
            raise DataError(f"{self.path}: `{where}` is {list(shape)} of {dtype}, but {wanted}. Restore the file.")
        self._opener.read(dataset, target)

    def _packed(self, group: Any, member: str, where: str) -> list[bytes] | None:
        """The encoded images of an episode: rows of bytes, or byte strings of any length.

        None if they are plain arrays, as from versions before 0.5.3, or written without JPEG.
        """
        h5py = h5py_module()
        dataset = h5py.Dataset(h5py.h5d.open(group, member.encode()))
        if h5py.check_vlen_dtype(dataset.dtype) == np.uint8 and dataset.ndim == 1:
            if dataset.shape[0] > self.path.stat().st_size:
                raise DataError(f"{self.path}: `{where}` claims more images than the file can hold. Restore the file.")
            return [bytes(memoryview(row)) for row in dataset[()]]
        checked, shape, dtype = self._opener.dataset(group, member, where)
        if dtype != np.uint8 or len(shape) != 2:
            return None
        values = np.empty(shape, np.uint8)
        self._opener.read(checked, values)
        return [row.tobytes() for row in values]


EpisodeReader: TypeAlias = ArrowEpisodes | Hdf5Episodes
"""Reads one layout."""
