# SPDX-License-Identifier: Apache-2.0
"""Recordings as long arrays with a row per step, named as in D4RL (Fu et al. 2020, https://arxiv.org/abs/2004.07219).

An HDF5 or NumPy ``.npz`` file contains ``observations``, ``actions``, ``rewards``, ``terminals``, ``timeouts``, and
optionally ``next_observations`` and ``infos/...``. Episodes follow each other and end where a flag is set. Without
``next_observations``, the final observation of an episode is unknown. Rewards, flags and integer actions may have shape
``[N, 1]``.
"""

import contextlib
import dataclasses
import itertools
import math
import shutil
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import SEPARATOR
from etude.errors import DataError
from etude.experience import Experience, Segments
from etude.experience.experience import offsets_of
from etude.files import AnyPath
from etude.recordings import cache
from etude.recordings.format import (
    Contents,
    FileFormat,
    Place,
    Problem,
    Unit,
    cut_long,
    grouped,
    most_rows,
    not_chained,
)
from etude.recordings.formats.hdf5_files import MOST_PACKED, Opener, names_of, opened
from etude.recordings.formats.inferring import Range, inferred_space, needs_range, reserved, widen
from etude.recordings.layout import Header
from etude.spaces import Space, leaf_dtype
from etude.urls import first_line

ROOTS: Final = {
    "observations": col.OBS,
    "actions": col.ACTION,
    "rewards": col.REWARD,
    "next_observations": col.NEXT_OBS,
    "infos": col.INFO,
}
TERMINATED: Final = ("terminals", "terminations", "terminated")
TRUNCATED: Final = ("timeouts", "truncations", "truncated")
DONE: Final = ("dones", "done")


_RANGE_ROWS: Final = 2**20
"""Rows that are read at a time to find the smallest and the largest number."""
_NPZ_VERSION: Final = 1
"""Version of the unpacked NPZ files; changing it invalidates cache entries."""


class ArrayFile(Protocol):
    """A file of named arrays."""

    path: AnyPath

    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]] | None]:
        """Return shape and dtype by name (groups with a slash); None for what is not plain numbers."""

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Read some rows of an array."""


class _ArrayColumn(NamedTuple):
    stored: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclasses.dataclass(frozen=True)
class _SegmentTable:
    """Consecutive segments of one file, cut where they are too long for a unit, as arrays with an item per segment."""

    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    t_start: NDArray[np.int64]
    episode: NDArray[np.int64]
    """The index of the episode in the file."""
    is_last: NDArray[np.bool_]
    """Whether the episode does not continue in the next segment."""
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]

    def __getitem__(self, which: slice) -> "_SegmentTable":
        return _SegmentTable(**{name: array[which] for name, array in vars(self).items()})


class _ArrayUnit(NamedTuple):
    file: ArrayFile
    prefix: str
    """Prefix of episode ids, if there are several files."""
    pieces: _SegmentTable
    columns: Mapping[str, _ArrayColumn]


class FlatArrays(FileFormat):
    """Files of long arrays."""

    opener: Callable[[AnyPath], ArrayFile]
    """Opens a file and reads its names, shapes and dtypes."""

    def describe(self) -> Contents:
        """Return the contents, reading the flags, and integers whose range the space depends on.

        Raises:
            DataError: a file can't be read, its arrays do not match, or differ from those of the first file.
        """
        found = _ArrayDescription([self.opener(path) for path in self.files])
        columns = [name for name in found.columns if not col.is_under(name, col.NEXT_OBS)]
        units: list[Unit] = []
        for f, (file, pieces) in enumerate(zip(found.files, found.pieces, strict=True)):
            prefix = f"{f}-" if len(found.files) > 1 else ""
            bounds = grouped(pieces.stop - pieces.start, found.most).tolist()  # a unit is in a single file
            for first, stop in itertools.pairwise(bounds):
                own = pieces[first:stop]
                row = int(own.start[0])
                data = _ArrayUnit(file, prefix, own, found.columns)
                units.append(Unit(len(units), int(own.stop[-1]) - row, file.path, row, data))
        return Contents(found.header(), columns, units, self.files)

    def read(self, unit: Unit, columns: Sequence[str], problems: list[Problem] | None = None) -> Experience:
        """Read whole episodes, or pieces of those longer than a unit."""
        own: _ArrayUnit = unit.data
        pieces = own.pieces
        start, stop = int(pieces.start[0]), int(pieces.stop[-1])
        steps = {name: _rows(own, name, start, stop) for name in columns}
        offsets = offsets_of(pieces.stop - pieces.start)
        obs = col.under(columns, col.OBS)
        nexts = {
            name: _rows(own, col.NEXT_OBS + name[len(col.OBS) :], start, stop)
            for name in (obs if col.under(own.columns, col.NEXT_OBS) else ())
        }
        final_obs, known = _final_obs(own, obs, steps, nexts, offsets)
        segments = Segments.of(
            len(known),
            episode_id=[f"{own.prefix}{i}" for i in pieces.episode.tolist()],
            t_start=pieces.t_start,
            terminated=pieces.terminated,
            truncated=pieces.truncated,
            has_final_obs=known,
        )
        exp = Experience(steps, offsets, segments, final_obs)
        if problems is not None:
            for name, after in nexts.items():
                problems += not_chained(lambda row: self.place(unit, row, exp), name, steps[name], after, offsets)
        return exp

    def place(self, unit: Unit, row: int, exp: Experience) -> Place:
        """Locate a row, by the row count of its file."""
        row += unit.row or 0
        return Place(f"{unit.file}, row {row}", str(unit.file), row)


def _is_of_envs(file: ArrayFile) -> bool:
    """Whether rows are those of envs side by side, as in a replay buffer of Stable-Baselines3: rewards ``[N, envs]``,
    observations and actions ``[N, envs, ...]``."""
    arrays = {name: found for name, found in file.arrays().items() if found is not None}
    rewards = arrays["rewards"][0] if "rewards" in arrays else ()
    shapes = [found[0] for name, found in arrays.items() if name.split(SEPARATOR)[0] in ("observations", "actions")]
    return len(rewards) == 2 and all(len(shape) > 2 and shape[1] == rewards[1] for shape in shapes)


class _ArrayDescription:
    """The common description of several files."""

    def __init__(self, files: Sequence[ArrayFile]) -> None:
        self.files = files
        self._dropped: dict[str, str] = {}
        self.columns = self._found(files[0], self._dropped)
        self.most = most_rows(sum(math.prod(c.shape) * c.dtype.itemsize for c in self.columns.values()))
        """The most rows in a unit."""
        self._num_rows = [self._check(file) for file in files]
        self.pieces = [self._pieces(file, rows) for file, rows in zip(files, self._num_rows, strict=True)]

    def _found(self, file: ArrayFile, dropped: dict[str, str]) -> dict[str, _ArrayColumn]:
        arrays = file.arrays()
        for name in ("observations", "actions"):
            if not any(col.is_under(stored, name) for stored in arrays):
                raise DataError(f"{file.path}: there is no array `{name}`; there are {', '.join(arrays) or 'none'}.")
        lengths = [f[0][0] for stored, f in arrays.items() if col.is_under(stored, "actions") and f and f[0]]
        is_of_envs = _is_of_envs(file)
        out: dict[str, _ArrayColumn] = {}
        for stored, found in arrays.items():
            root, _, rest = stored.partition(SEPARATOR)
            name = SEPARATOR.join(filter(None, (ROOTS.get(root, root), rest)))
            if stored in (*TERMINATED, *TRUNCATED, *DONE):
                continue
            needed = root in ROOTS and root != "infos"
            if found is None or not found[0] or not lengths or found[0][0] != lengths[0] or 0 in found[0][1:]:
                if needed:
                    self._refuse(file, stored, found, lengths)
                dropped[name] = "not plain numbers, one row a step"
            elif not needed and reserved(name):
                dropped[name] = "the name is reserved for recordings"
            else:
                # d3rlpy and Stable-Baselines3 store one choice a step as [N, 1].
                shape = found[0][2:] if is_of_envs and found[0][1:2] == (1,) else found[0][1:]
                is_choice = name == col.ACTION and shape == (1,) and found[1].kind in "iub"
                out[name] = _ArrayColumn(stored, () if is_choice else shape, found[1].newbyteorder("="))
        if col.REWARD in out:
            reward = out[col.REWARD]
            if reward.shape not in ((), (1,)):
                advice = ""
                if is_of_envs:
                    advice = " They are of envs side by side: save a file for each, such as `observations[:, 0]`."
                raise DataError(
                    f"{file.path}: `rewards` has rows of shape {list(reward.shape)}, not one number each.{advice}"
                )
            dtype = reward.dtype if reward.dtype.kind == "f" else np.dtype(np.float64)
            out[col.REWARD] = _ArrayColumn(reward.stored, (), dtype)
        self._check_next(file, out)
        return out

    def _refuse(self, file: ArrayFile, stored: str, found: Any, lengths: Sequence[int]) -> None:
        if found is None:
            raise DataError(f"{file.path}: `{stored}` does not hold plain numbers. Convert it.")
        if not found[0] or not lengths or 0 in found[0]:
            raise DataError(f"{file.path}: `{stored}` is of shape {list(found[0])}: there are no rows of numbers.")
        raise DataError(
            f"{file.path}: `{stored}` has {found[0][0]:,} rows, but `actions` has {lengths[0]:,}. All arrays have one "
            "row a step: cut the longer."
        )

    def _check_next(self, file: ArrayFile, found: Mapping[str, _ArrayColumn]) -> None:
        own, after = col.subtree(found, col.OBS), col.renamed(found, col.NEXT_OBS, col.OBS)
        same = {k: c[1:] for k, c in own.items()} == {k: c[1:] for k, c in after.items()}
        if after and not same:
            raise DataError(
                f"{file.path}: `next_observations` has other shapes or dtypes than `observations`: "
                f"{_listed(after)}; {_listed(own)}. Convert one of them."
            )

    def _check(self, file: ArrayFile) -> int:
        """Return the number of rows of a file, which must have the columns of the first file."""
        columns = self._found(file, {})
        if columns != self.columns:
            names = sorted(n for n in {*columns, *self.columns} if columns.get(n) != self.columns.get(n))
            raise DataError(
                f"{file.path}: the arrays are not those of {self.files[0].path.name}: {', '.join(names)} differ. Read "
                "them as two recordings."
            )
        found = file.arrays()[self.columns[next(n for n in columns if col.is_under(n, col.ACTION))].stored]
        assert found is not None  # a column
        return found[0][0]

    def _flags_of(self, file: ArrayFile, rows: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        arrays = file.arrays()
        flags: dict[tuple[str, ...], NDArray[np.bool_] | None] = {}
        for names in (TERMINATED, TRUNCATED, DONE):
            stored = next((name for name in names if name in arrays), None)
            flags[names] = None if stored is None else self._flag(file, stored, arrays[stored], rows)
        terminated, truncated, done = flags[TERMINATED], flags[TRUNCATED], flags[DONE]
        none = np.zeros(rows, bool)
        truncated = none if truncated is None else truncated
        if terminated is None:
            terminated = none if done is None else done & ~truncated
        return terminated, truncated

    def _flag(self, file: ArrayFile, stored: str, found: Any, rows: int) -> NDArray[np.bool_]:
        if found is None or found[0] not in ((rows,), (rows, 1)):
            shape = "no numbers" if found is None else f"of shape {list(found[0])}"
            raise DataError(f"{file.path}: `{stored}` is {shape}, not one flag for each of {rows:,} rows.")
        values = file.read(stored, 0, rows).reshape(rows)
        bad = (values != 0) & (values != 1)
        if bad.any():
            row = int(bad.argmax())
            raise DataError(f"{file.path}, row {row}: `{stored}` is {values[row]}, not 0 or 1.")
        return values.astype(bool)

    def _pieces(self, file: ArrayFile, rows: int) -> _SegmentTable:
        """Find the segments of a file."""
        terminated, truncated = self._flags_of(file, rows)
        ends = np.flatnonzero(terminated | truncated) + 1
        offsets = np.unique(np.concatenate([[0], ends, [rows]])).astype(np.int64)
        parent, start, stop = cut_long(offsets, self.most)
        is_last = stop == offsets[1:][parent]
        flags = terminated[stop - 1], truncated[stop - 1]
        return _SegmentTable(start, stop, start - offsets[:-1][parent], parent, is_last, *flags)

    def header(self) -> Header:
        """Return the header; afterwards, the dtypes of columns are those of the spaces."""
        obs_space, action_space = (self._inferred(root) for root in (col.OBS, col.ACTION))
        meta: dict[str, Any] = {"inferred": {"spaces": "from the numbers: bounds are not known"}}
        header = Header(obs_space, action_space, None, meta)
        dtypes = {name: leaf_dtype(leaf) for name, leaf in header.leaves().items()}
        for name, dtype in {**dtypes, **col.renamed(dtypes, col.OBS, col.NEXT_OBS)}.items():
            if name in self.columns:
                self.columns[name] = self.columns[name]._replace(dtype=dtype)
        names = {name for file in self.files for name in file.arrays()}
        if names & set(DONE) and not names & set(TERMINATED):
            meta["inferred"]["done"] = "read as terminated unless truncated: time limits can't be told apart"
        if not names & {*TERMINATED, *TRUNCATED, *DONE}:
            meta["inferred"]["ends"] = "no flag says where episodes end: each file is one piece of an episode"
        if self._dropped:
            meta["dropped"] = self._dropped
        return header

    def _inferred(self, root: str) -> Space:
        found = {name: self.columns[name] for name in col.under(self.columns, root)}
        ranges: dict[str, Range] = {}
        nexts = col.under(self.columns, col.NEXT_OBS) if root == col.OBS else []
        for name, column in {**found, **{name: self.columns[name] for name in nexts}}.items():
            if needs_range(name, column.dtype, column.shape):
                for file, rows in zip(self.files, self._num_rows, strict=True):
                    for start in range(0, rows, _RANGE_ROWS):
                        values = file.read(column.stored, start, min(rows, start + _RANGE_ROWS))
                        widen(ranges, {name: values.reshape(len(values), *column.shape)})
        return inferred_space({name: (c.dtype, c.shape) for name, c in found.items()}, root, ranges)


def _rows(unit: _ArrayUnit, name: str, start: int, stop: int) -> NDArray[Any]:
    column = unit.columns[name]
    values = unit.file.read(column.stored, start, stop)
    return values.astype(column.dtype, copy=False).reshape(stop - start, *column.shape)


def _final_obs(
    unit: _ArrayUnit,
    names: Sequence[str],
    steps: Mapping[str, Any],
    nexts: Mapping[str, NDArray[Any]],
    offsets: NDArray[np.int64],
) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]:
    """The final observation of each segment: from the next observations, or the next row of the same episode."""
    pieces = unit.pieces
    given = bool(col.under(unit.columns, col.NEXT_OBS))
    known = np.full(len(pieces.start), True) if given else ~pieces.is_last
    out = {}
    for name in names:
        if given:
            out[name] = nexts[name][offsets[1:] - 1]
        else:
            out[name] = np.zeros((len(known), *steps[name].shape[1:]), steps[name].dtype)
            inside = np.flatnonzero(known[:-1])
            out[name][inside] = steps[name][offsets[inside + 1]]
            if known[-1]:
                stop = int(pieces.stop[-1])
                out[name][-1] = _rows(unit, name, stop, stop + 1)[0]
    return out, known


def _listed(columns: Mapping[str, _ArrayColumn]) -> str:
    return ", ".join(f"{c.stored} {c.dtype}{list(c.shape)}" for c in columns.values())


# -- HDF5 ------------------------------------------------------------------------------------------------------------


SUFFIXES: Final = (".hdf5", ".h5")
DEEPEST: Final = 8
"""The deepest nesting of groups that is searched, because links may form circles."""


class _Hdf5File:
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
        """Return shape and dtype by name."""
        return self._arrays

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Read some rows of an array."""
        with opened(self.path) as root:
            group, *_ = root, None
            *parents, member = name.split("/")
            for parent in parents:
                group = self._opener.group(group, parent, name)
            dataset, shape, dtype = self._opener.dataset(group, member, name)
            if self._arrays[name] != (shape, dtype):
                raise cache.changed(self.path, f"`{name}` ")
            out = np.empty((stop - start, *shape[1:]), dtype)
            self._opener.read(dataset, out, None if (start, stop) == (0, shape[0]) else start)
        return out


class D4RLHdf5(FlatArrays):
    """HDF5 files as in D4RL."""

    name = "d4rl-hdf5"
    opener = _Hdf5File

    @staticmethod
    def detect(path: AnyPath) -> bool:
        """Return whether ``path`` is an HDF5 file with ``observations`` and ``actions`` at its top level."""
        if not path.is_file() or path.suffix not in SUFFIXES:
            return False
        try:
            with opened(path) as root:
                return b"observations" in root and b"actions" in root
        except DataError:
            return False


# -- NPZ -------------------------------------------------------------------------------------------------------------


_BROKEN = (
    *(OSError, EOFError, ValueError, KeyError, NotImplementedError, RuntimeError, SyntaxError, TypeError, MemoryError),
    *(zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError, OverflowError, IndexError, RecursionError),
)


class _NpzFile:
    def __init__(self, path: AnyPath) -> None:
        self.path = path
        self._members: dict[str, tuple[tuple[int, ...], np.dtype[Any]] | None] = {}
        self._loaded: dict[str, NDArray[Any]] = {}
        size, unpacked = path.stat().st_size, 0
        try:
            with path.open("rb") as file, zipfile.ZipFile(file) as archive:
                for info in archive.infolist():
                    if info.filename.endswith(".npy"):
                        name = info.filename.removesuffix(".npy")
                        if info.file_size > size * MOST_PACKED:
                            raise ValueError(f"`{name}` claims {info.file_size:,} bytes; the file has {size:,}")
                        with archive.open(info) as stream:
                            self._members[name] = _header(stream, info.file_size)
                        unpacked += info.file_size
        except _BROKEN as error:
            raise self._unreadable(error) from error
        large = unpacked >= cache.LEAST_BYTES
        self._origin = cache.Origin([path], "members of npz", _NPZ_VERSION) if large else None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_loaded": {}}

    def _unreadable(self, error: BaseException) -> DataError:
        return DataError(f"{self.path}: can't be read as .npz ({first_line(error)}). Restore it from a copy.")

    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]] | None]:
        """Return shape and dtype by name."""
        return self._members

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Read some rows of an array."""
        if name in self._loaded:
            return self._loaded[name][start:stop]
        try:
            if self._origin is None:
                with self._member(name) as stream:
                    found = self._loaded[name] = npy.read_array(stream, allow_pickle=False)
            else:
                place = self._origin.entry(self._unpack) / f"{list(self._members).index(name)}.npy"
                found = np.load(place, mmap_mode="r", allow_pickle=False)
        except _BROKEN as error:
            raise self._unreadable(error) from error
        if self._members[name] != (found.shape, found.dtype):
            raise cache.changed(self.path, f"`{name}` ")
        return found[start:stop] if self._origin is None else np.array(found[start:stop])

    @contextlib.contextmanager
    def _member(self, name: str) -> Iterator[IO[bytes]]:
        with self.path.open("rb") as file, zipfile.ZipFile(file) as archive, archive.open(f"{name}.npy") as stream:
            yield stream

    def _unpack(self, folder: Path) -> None:
        """Unpack all arrays of plain numbers into ``folder``, as files named by their index."""
        for i, (name, kind) in enumerate(self._members.items()):
            if kind is not None:
                with self._member(name) as stream, open(folder / f"{i}.npy", "wb") as out:
                    shutil.copyfileobj(stream, out, 2**20)


class D4RLNpz(FlatArrays):
    """NumPy ``.npz`` files as in D4RL.

    Rows of compressed arrays can't be read alone: small files are held in memory, large ones are unpacked into the
    cache.
    """

    name = "npz"
    opener = _NpzFile

    @staticmethod
    def detect(path: AnyPath) -> bool:
        """Return whether ``path`` is an ``.npz`` file with ``observations`` and ``actions``."""
        if not path.is_file() or path.suffix != ".npz":
            return False
        try:
            with path.open("rb") as file, zipfile.ZipFile(file) as archive:
                roots = {name.removesuffix(".npy").split("/")[0] for name in archive.namelist()}
        except _BROKEN:
            return False
        return {"observations", "actions"} <= roots


def _header(stream: IO[bytes], size: int) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
    """Shape and dtype from the header of an ``.npy`` file of ``size`` bytes; None if it is not plain numbers."""
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        return None  # 3.0 is only needed for field names
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        return None
    if math.prod(shape) * dtype.itemsize > size:
        raise ValueError(f"an array claims {list(shape)} of {dtype}, but has only {size:,} bytes")
    return shape, dtype
