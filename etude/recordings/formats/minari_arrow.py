# SPDX-License-Identifier: Apache-2.0
"""Minari's Arrow and Parquet layouts: a folder an episode, each with one file of T + 1 rows.

The last row holds the final observation; its action, reward and flags are padding.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from etude.errors import DataError
from etude.files import AnyPath, input_file
from etude.recordings import footers
from etude.recordings.formats.minari_episodes import Column, Episodes, decoded_images
from etude.recordings.formats.table_inputs import check_names


class ArrowEpisodes:
    """Reads episodes by number; see `etude.recordings.formats.minari_episodes.Reader`."""

    def __init__(self, folder: AnyPath, suffix: str) -> None:
        self._folder = folder
        self._suffix = suffix

    def files(self) -> list[AnyPath]:
        """All files of all episodes."""
        return [path for name in self._names() for path in self._files_of(name)]

    def where(self, name: str) -> str:
        """An episode in words, for errors."""
        return str(self._folder / name)

    def tuple_member(self, index: int) -> str:
        """The name of a Tuple's part in this layout."""
        return str(index)

    def _names(self) -> list[str]:
        inside = [path for path in self._folder.iterdir() if path.is_dir() and path.name.isdecimal()]
        return [path.name for path in sorted(inside, key=lambda path: int(path.name))]

    def _files_of(self, name: str) -> list[AnyPath]:
        found: list[Any] = list((self._folder / name).glob(f"*{self._suffix}"))
        files = sorted(found)
        if not files:
            raise DataError(f"{self._folder / name}: there is no {self._suffix} file of this episode. Restore it.")
        return files

    def index(self) -> Episodes:
        """The episodes that are there, in order of their numbers."""
        names = self._names()
        lengths = np.array([self._num_rows(name) - 1 for name in names], np.int64)
        for name, length in zip(names, lengths, strict=True):
            if length < 1:
                raise DataError(f"{self.where(name)}: the episode has no steps. Move its folder away.")
        return Episodes(names, lengths, [_seed(self._folder / name / "metadata.json") for name in names])

    def _num_rows(self, name: str) -> int:
        if self._suffix == ".parquet":
            return sum(self._parquet(path).metadata.num_rows for path in self._files_of(name))
        return sum(self._table(path).num_rows for path in self._files_of(name))

    def _parquet(self, path: AnyPath) -> pq.ParquetFile:
        try:
            return footers.opened(path)
        except footers.BROKEN as error:
            raise _unreadable(path, error) from error

    def _table(self, path: AnyPath) -> pa.Table:
        """One file; Arrow's is mapped, so that only the columns in use are read."""
        try:
            if self._suffix == ".parquet":
                return self._parquet(path).read()
            table = pa.ipc.open_file(input_file(path, mapped=True)).read_all()
            table.validate(full=True)  # buffers and offsets may be anything in a broken file
            check_names(table.schema)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _unreadable(path, error) from error
        return table

    def _episode(self, name: str) -> pa.Table:
        tables = [self._table(path) for path in self._files_of(name)]
        try:
            return pa.concat_tables(tables).combine_chunks()
        except pa.ArrowException as error:
            raise _unreadable(self._folder / name, error) from error

    def infos(self, name: str) -> dict[str, Column | None]:
        """The infos of one episode by path; None where one is not made of plain numbers."""
        out: dict[str, Column | None] = {}
        table = self._episode(name)
        if "infos" in table.column_names:
            for path in _paths(table.schema.field(table.column_names.index("infos")).type, ()):
                try:
                    out["/".join(path)] = self.column(name, ("infos", *path), image=False)
                except DataError:
                    out["/".join(path)] = None
        return out

    def column(self, name: str, path: Sequence[str], *, image: bool) -> Column:
        """The shape and dtype of one column's rows in one episode."""
        table = self._episode(name)
        if image:
            return Column((), np.dtype(np.uint8), table.num_rows, image=True)
        values = self._values(table, path, name)
        return Column(values.shape[1:], values.dtype, table.num_rows)

    def read(
        self,
        names: Sequence[str],
        wanted: Mapping[str, tuple[Sequence[str], Column]],
        rows: Mapping[str, Sequence[int]],
    ) -> dict[str, NDArray[Any]]:
        """Columns of some episodes, one after the other; ``rows`` are the rows of each episode in each column."""
        out = {key: np.empty((sum(rows[key]), *column.shape), column.dtype) for key, (_, column) in wanted.items()}
        at = dict.fromkeys(wanted, 0)
        for i, name in enumerate(names):
            table = self._episode(name)
            for key, (path, column) in wanted.items():
                target = out[key][at[key] : at[key] + rows[key][i]]
                self._read_one(table, path, name, column, target)
                at[key] += rows[key][i]
        return out

    def _read_one(self, table: pa.Table, path: Sequence[str], name: str, column: Column, target: NDArray[Any]) -> None:
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
        """A column as ``[rows]`` or ``[rows, n]``: Arrow keeps arrays of several axes flat."""
        where = f"{self.where(name)}: column `{'/'.join(path)}`"
        array = _member(table, path, where)
        if array.null_count:
            row = int(np.argmax(np.asarray(array.is_null())))
            raise DataError(f"{where} has {array.null_count} empty rows, the first of them row {row}.")
        width = None
        if pa.types.is_fixed_size_list(array.type):
            width, array = array.type.list_size, array.flatten()
            if not width:
                raise DataError(f"{where} has rows of no numbers.")
        kind = array.type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
            raise DataError(f"{where} is of Arrow type {kind}, not plain numbers.")
        if array.null_count:
            raise DataError(f"{where} has {array.null_count} empty numbers inside of its rows.")
        values = array.to_numpy(zero_copy_only=False)
        return np.asarray(values if width is None else values.reshape(-1, width))


def _member(table: pa.Table, path: Sequence[str], where: str) -> pa.Array:
    if path[0] not in table.column_names:
        raise DataError(f"{where} is missing; there are {', '.join(table.column_names)}.")
    if table.column_names.count(path[0]) > 1:
        raise DataError(f"{where} is there more than once.")
    column = table[path[0]]
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    for member in path[1:]:
        if not pa.types.is_struct(array.type) or array.type.get_field_index(member) < 0:
            raise DataError(f"{where} is missing; `{path[0]}` is {array.type}.")
        array = pa.compute.struct_field(array, member)
    return array


def _paths(kind: pa.DataType, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    if not pa.types.is_struct(kind):
        return [path]
    return [p for field in kind for p in _paths(field.type, (*path, field.name))]


def _seed(path: AnyPath) -> int | None:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(f"{path}: can't be read as JSON ({error}). Restore it from a copy.") from error
    seed = data.get("seed") if isinstance(data, dict) else None
    return seed if isinstance(seed, int) else None


def _unreadable(path: AnyPath, error: Exception) -> DataError:
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return DataError(f"{path}: can't be read ({first}). Restore it from a copy, or move the episode's folder away.")
