# SPDX-License-Identifier: Apache-2.0
"""Recordings as long arrays with a row per step, named as in D4RL (Fu et al. 2020, https://arxiv.org/abs/2004.07219).

An HDF5 or NumPy ``.npz`` file contains ``observations``, ``actions``, ``rewards``, ``terminals``, ``timeouts`` (or
``dones`` in place of one of them), and optionally ``next_observations`` and ``infos/...``. Episodes follow each other
and end where a flag is set. Without ``next_observations``, the final observation of an episode is unknown. Rewards,
flags and integer actions may have shape ``[N, 1]``.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.lib import format as npy
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import SEPARATOR
from etude.errors import DataError
from etude.files import AnyPath
from etude.recordings import cache
from etude.recordings.format import Contents, FileFormat, cut_long, grouped, most_rows
from etude.recordings.formats.arrow import list_array
from etude.recordings.formats.hdf5_files import MOST_PACKED, Opener, names_of, opened
from etude.recordings.formats.inferring import reserved
from etude.recordings.formats.source import DONE, ETUDE, FLAGS, Source
from etude.recordings.formats.table import TableRows, contents_of
from etude.recordings.formats.table_inputs import Group
from etude.urls import first_line

REQUIRED: Final = ("observations", "actions")
NUMERIC: Final = {
    "observations": col.OBS,
    "actions": col.ACTION,
    "rewards": col.REWARD,
    "next_observations": col.NEXT_OBS,
}
"""The arrays that must hold numbers if they exist, with Etude's names."""
ROOTS: Final = {**NUMERIC, "infos": col.INFO}
TERMINATED: Final = ("terminals", "terminations", "terminated")
TRUNCATED: Final = ("timeouts", "truncations", "truncated")
DONES: Final = ("dones", "done")


_NPZ_VERSION: Final = 1
"""Version of the unpacked NPZ files; changing it invalidates cache entries."""


Found: TypeAlias = tuple[tuple[int, ...], np.dtype[Any]] | None
"""The shape and dtype of an array; None if it is not plain numbers."""


class ArrayFile(Protocol):
    """A file of named arrays."""

    path: AnyPath
    arrays: dict[str, Found]
    """The arrays by name (groups with a slash)."""

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Read some rows of an array."""


class _ArrayColumn(NamedTuple):
    stored: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def _loaded(
    file: ArrayFile,
    layout: Mapping[str, _ArrayColumn],
    first: int,
    episodes: pa.Array,
    lengths: NDArray[np.int64],
    names: Sequence[str],
) -> pa.Table:
    """Read columns, by Etude's names, of consecutive episodes from row ``first`` on, with these ids and lengths."""
    out: dict[str, pa.Array] = {}
    for name in names:
        if name == col.EPISODE_ID:
            out[name] = pa.DictionaryArray.from_arrays(np.repeat(np.arange(len(lengths)), lengths), episodes)
        else:
            stored, shape, dtype = layout[name]
            values = file.read(stored, first, first + int(lengths.sum()))
            out[name] = list_array(values.astype(dtype, copy=False).reshape(len(values), *shape))
    return pa.table(out)


class FlatArrays(TableRows, FileFormat):
    """Files of long arrays, read as a table. Each file begins a new episode."""

    opener: Callable[[AnyPath], ArrayFile]
    """Opens a file and reads its names, shapes and dtypes."""

    def describe(self) -> Contents:
        """Return the contents, reading the flags, and integers whose range the space depends on.

        Raises:
            DataError: a file can't be read; or its arrays do not match each other, or those of the first file.
        """
        dropped: dict[str, str] = {}
        groups: list[Group] = []
        layout: dict[str, _ArrayColumn] = {}
        for f, path in enumerate(self.files):
            file = self.opener(path)
            own = _layout(file, {} if f else dropped)
            layout = layout or own
            if own != layout:
                names = sorted(n for n in {*own, *layout} if own.get(n) != layout.get(n))
                what = f"the arrays are not those of {self.files[0].name}: {', '.join(names)} differ"
                raise DataError(f"{path}: {what}. Read them as two recordings.")
            groups += _groups(file, layout, f"{f}-" if len(self.files) > 1 else "")
        contents = contents_of(Source(self.files, preset=ETUDE), groups, is_sorted=True)
        meta = {**contents.header.meta, **({"dropped": dropped} if dropped else {})}
        if not layout.keys() & {*FLAGS}:
            ends = "no flag says where episodes end: each file is one piece of an episode"
            meta["inferred"] = {**meta["inferred"], "ends": ends}
        return dataclasses.replace(contents, header=dataclasses.replace(contents.header, meta=meta))


def _groups(file: ArrayFile, layout: Mapping[str, _ArrayColumn], prefix: str) -> Iterator[Group]:
    """The rows of a file, in pieces of the size of units."""
    found = file.arrays[layout[col.under(layout, col.ACTION)[0]].stored]
    assert found is not None  # a column
    rows = found[0][0]
    done = np.zeros(rows, bool)
    for stored in (layout[name].stored for name in FLAGS if name in layout):
        done |= file.read(stored, 0, rows).reshape(rows) != 0
    offsets = np.unique(np.concatenate([[0], np.flatnonzero(done) + 1, [rows]])).astype(np.int64)
    most = most_rows(sum(math.prod(c.shape) * c.dtype.itemsize for c in layout.values()))
    episode, start, stop = cut_long(offsets, most)
    fields = [(name, list_array(np.empty((0, *own.shape), own.dtype)).type) for name, own in layout.items()]
    schema = pa.schema([*fields, (col.EPISODE_ID, pa.dictionary(pa.int64(), pa.string()))])
    for a, b in itertools.pairwise(grouped(stop - start, most).tolist()):
        ids = pa.array([f"{prefix}{i}" for i in episode[a:b].tolist()])
        first, last = int(start[a]), int(stop[b - 1])
        load = partial(_loaded, file, layout, first, ids, (stop - start)[a:b])
        yield Group(schema, last - first, file.path, first, load)


# -- which arrays become which columns -------------------------------------------------------------------------------


def _layout(file: ArrayFile, dropped: dict[str, str]) -> dict[str, _ArrayColumn]:
    """The columns and flags of a file, by Etude's names; others are added to ``dropped``, with the reason."""
    arrays = file.arrays
    for name in REQUIRED:
        if not any(col.is_under(stored, name) for stored in arrays):
            raise DataError(f"{file.path}: there is no array `{name}`; there are {', '.join(arrays) or 'none'}.")
    actions = [found for stored, found in arrays.items() if col.is_under(stored, "actions")]
    length = next((found[0][0] for found in actions if found and found[0]), 0)
    if not length:
        raise _refusal(file, next(stored for stored in arrays if col.is_under(stored, "actions")), length)
    num_envs, flags = _num_envs(file), _flags(arrays)
    if num_envs > 1:
        remedy = "save a file for each, such as `observations[:, 0]`"
        raise DataError(
            f"{file.path}: `rewards` has rows of shape [{num_envs}], one column for each parallel env: {remedy}."
        )
    by_stored = {stored: flag for flag, stored in flags.items()}
    out: dict[str, _ArrayColumn] = {}
    for stored, found in arrays.items():
        root, _, rest = stored.partition(SEPARATOR)
        name = by_stored.get(stored) or SEPARATOR.join(filter(None, (ROOTS.get(root, root), rest)))
        is_flag, all_flags = stored in by_stored, (*TERMINATED, *TRUNCATED, *DONES)
        needed = is_flag or root in NUMERIC
        shape = () if found is None else found[0]
        if stored in all_flags and not is_flag:
            dropped[stored] = f"episodes end where {' or '.join(flags.values())} says so"
        elif found is None or shape[:1] != (length,) or 0 in shape or (is_flag and math.prod(shape) != length):
            if needed:
                raise _refusal(file, stored, length)
            dropped[name] = "not plain numbers, one row a step"
        elif not needed and (reserved(name) or root in (col.OBS, col.ACTION, col.REWARD)):
            dropped[name] = "the name is reserved for recordings"
        else:
            # d3rlpy and Stable-Baselines3 store one choice a step as [N, 1].
            shape = shape[2:] if num_envs == 1 and shape[1:2] == (1,) else shape[1:]
            is_choice = name == col.ACTION and shape == (1,) and found[1].kind in "iub"
            out[name] = _ArrayColumn(stored, () if is_choice or is_flag else shape, found[1].newbyteorder("="))
    if col.REWARD in out and out[col.REWARD].shape not in ((), (1,)):
        found_shape = list(out[col.REWARD].shape)
        raise DataError(f"{file.path}: `rewards` has rows of shape {found_shape}, not one number each.")
    own, after = col.subtree(out, col.OBS), col.renamed(out, col.NEXT_OBS, col.OBS)
    if after and {k: c[1:] for k, c in own.items()} != {k: c[1:] for k, c in after.items()}:
        what = f"{_listed(after)}; {_listed(own)}"
        raise DataError(f"{file.path}: `next_observations` has other shapes or dtypes than `observations`: {what}.")
    return out


def _flags(stored: Iterable[str]) -> dict[str, str]:
    """The arrays that are flags, by Etude's names."""
    known = {col.TERMINATED: TERMINATED, col.TRUNCATED: TRUNCATED, DONE: DONES}
    flags = {flag: name for flag, names in known.items() for name in reversed(names) if name in stored}
    if {*FLAGS[:2]} <= flags.keys():
        flags.pop(DONE, None)
    return flags


def _num_envs(file: ArrayFile) -> int:
    """The number of envs whose rows are side by side, as in a replay buffer of Stable-Baselines3, or 0: rewards are
    ``[N, envs]``, observations and actions ``[N, envs, ...]``."""
    arrays = {name: found for name, found in file.arrays.items() if found is not None}
    rewards = arrays["rewards"][0] if "rewards" in arrays else ()
    shapes = [found[0] for name, found in arrays.items() if name.split(SEPARATOR)[0] in REQUIRED]
    is_of_envs = len(rewards) == 2 and all(len(shape) > 2 and shape[1] == rewards[1] for shape in shapes)
    return rewards[1] if is_of_envs else 0


def _refusal(file: ArrayFile, stored: str, length: int) -> DataError:
    found = file.arrays[stored]
    what = "does not hold plain numbers" if found is None else f"is of shape {list(found[0])}"
    rows = f"{length:,} rows of numbers, as `actions` has" if length else "a row of numbers for each step"
    remedy = "Convert it, or cut the longer array."
    return DataError(f"{file.path}: `{stored}` {what}, but must have {rows} (of a flag, one number each). {remedy}")


def _listed(columns: Mapping[str, _ArrayColumn]) -> str:
    return ", ".join(f"{c.stored} {c.dtype}{list(c.shape)}" for c in columns.values())


# -- HDF5 ------------------------------------------------------------------------------------------------------------


DEEPEST: Final = 8
"""The deepest nesting of groups that is searched, because links may form circles."""


class _Hdf5File:
    """The arrays of an HDF5 file."""

    def __init__(self, path: AnyPath) -> None:
        self.path = path
        self._opener = Opener(path)
        self.arrays: dict[str, Found] = {}
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
                    self.arrays[where] = shape, dtype
            except DataError:
                if where.split("/")[0] in (*NUMERIC, TERMINATED[0], TRUNCATED[0]):
                    raise
                self.arrays[where] = None

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Read some rows of an array."""
        with opened(self.path) as root:
            group = root
            *parents, member = name.split("/")
            for parent in parents:
                group = self._opener.group(group, parent, name)
            dataset, shape, dtype = self._opener.dataset(group, member, name)
            if self.arrays[name] != (shape, dtype):
                raise cache.changed(self.path, f"`{name}` ")
            out = np.empty((stop - start, *shape[1:]), dtype)
            self._opener.read(dataset, out, None if (start, stop) == (0, shape[0]) else start)
        return out


class D4RLHdf5(FlatArrays):
    """HDF5 files with arrays named as in D4RL."""

    name = "d4rl-hdf5"
    suffixes = (".hdf5", ".h5")
    opener = _Hdf5File

    @staticmethod
    def detect(path: AnyPath) -> bool:
        """Return whether ``path`` is an HDF5 file with ``observations`` and ``actions`` at its top level."""
        if not path.is_file():
            return False
        try:
            with opened(path) as root:
                return all(name.encode() in root for name in REQUIRED)
        except DataError:
            return False


# -- NPZ -------------------------------------------------------------------------------------------------------------


_BROKEN = (
    *(OSError, EOFError, ValueError, KeyError, NotImplementedError, RuntimeError, SyntaxError, TypeError, MemoryError),
    *(zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError, OverflowError, IndexError, RecursionError),
)


class _NpzFile:
    """The arrays of an NPZ file."""

    def __init__(self, path: AnyPath) -> None:
        self.path = path
        self.arrays: dict[str, Found] = {}
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
                            self.arrays[name] = _header(stream, info.file_size)
                        unpacked += info.file_size
        except _BROKEN as error:
            raise self._unreadable(error) from error
        large = unpacked >= cache.LEAST_BYTES
        self._origin = cache.SourceFiles([path], "members of npz", _NPZ_VERSION) if large else None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_loaded": {}}

    def _unreadable(self, error: BaseException) -> DataError:
        return DataError(f"{self.path}: can't be read as .npz ({first_line(error)}). Restore it from a copy.")

    def read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Read some rows of an array."""
        if name in self._loaded:
            return self._loaded[name][start:stop]
        try:
            if self._origin is None:
                with self._member(name) as stream:
                    found = self._loaded[name] = npy.read_array(stream, allow_pickle=False)
            else:
                place = self._origin.entry(self._unpack) / f"{list(self.arrays).index(name)}.npy"
                found = np.load(place, mmap_mode="r", allow_pickle=False)
        except _BROKEN as error:
            raise self._unreadable(error) from error
        if self.arrays[name] != (found.shape, found.dtype):
            raise cache.changed(self.path, f"`{name}` ")
        return found[start:stop] if self._origin is None else np.array(found[start:stop])

    @contextlib.contextmanager
    def _member(self, name: str) -> Iterator[IO[bytes]]:
        with self.path.open("rb") as file, zipfile.ZipFile(file) as archive, archive.open(f"{name}.npy") as stream:
            yield stream

    def _unpack(self, folder: Path) -> None:
        """Unpack all arrays of plain numbers into ``folder``, as files named by their index."""
        for i, (name, kind) in enumerate(self.arrays.items()):
            if kind is not None:
                with self._member(name) as stream, open(folder / f"{i}.npy", "wb") as out:
                    shutil.copyfileobj(stream, out, 2**20)


class D4RLNpz(FlatArrays):
    """NumPy ``.npz`` files with arrays named as in D4RL.

    Single rows of a compressed array can't be read, so small files are held in memory, and large ones are unpacked into
    the cache.
    """

    name = "npz"
    suffixes = (".npz",)
    opener = _NpzFile

    @staticmethod
    def detect(path: AnyPath) -> bool:
        """Return whether ``path`` is an ``.npz`` file with ``observations`` and ``actions``."""
        if not path.is_file():
            return False
        try:
            with path.open("rb") as file, zipfile.ZipFile(file) as archive:
                roots = {name.removesuffix(".npy").split("/")[0] for name in archive.namelist()}
        except _BROKEN:
            return False
        return roots.issuperset(REQUIRED)


def _header(stream: IO[bytes], size: int) -> Found:
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
