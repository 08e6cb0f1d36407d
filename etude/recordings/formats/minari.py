# SPDX-License-Identifier: Apache-2.0
"""Minari datasets (https://minari.farama.org), in its HDF5, Arrow and Parquet layouts.

A dataset is a folder ``<namespace>/<name>-v<k>`` with ``data/metadata.json``. Actions are what the env received. What
an env said at its reset has no step to stand at and is left out: ``info/<name>`` holds what came with the rewards.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience, Segments
from etude.experience.experience import offsets_of
from etude.files import AnyPath
from etude.recordings.formats.grouping import grouped
from etude.recordings.formats.inferring import fitting, widened
from etude.recordings.formats.minari_arrow import ArrowEpisodes
from etude.recordings.formats.minari_episodes import Column, Episodes, Reader
from etude.recordings.formats.minari_hdf5 import FILE, Hdf5Episodes
from etude.recordings.formats.minari_metadata import METADATA, env_id, is_image, leaves_of, read_metadata, space_of
from etude.recordings.formats.parts import Place, Problem, chosen
from etude.recordings.layout import Header
from etude.spaces import Space, leaf_shape

NAMES: Final = {col.REWARD: "rewards", col.TERMINATED: "terminations", col.TRUNCATED: "truncations"}
ROOTS: Final = {col.OBS: "observations", col.ACTION: "actions"}


def detect(path: AnyPath) -> bool:
    """Whether ``path`` is a Minari dataset, its ``data`` folder, its HDF5 file, or a folder that holds datasets."""
    if path.is_file():
        return path.name == FILE and (path.parent / METADATA).is_file()
    return path.is_dir() and bool(_datasets(path))


def open_parts(path: AnyPath) -> "MinariParts":
    """Open the dataset at ``path``: its folder, the ``data`` folder in it, or a folder that holds only this dataset.

    Raises:
        DataError: there is none, or more than one (they are listed); or it is broken.
    """
    path = path.parent if path.is_file() else path
    found = _datasets(path) if path.is_dir() else []
    if not found:
        raise DataError(f"{path}: there is no Minari dataset here (a folder `data` with {METADATA}).")
    if len(found) > 1:
        listed = "\n".join(f"  {folder.parent if folder.name == 'data' else folder}" for folder in found[:20])
        more = f"\n  and {len(found) - 20} more" if len(found) > 20 else ""
        raise DataError(f"{path}: {len(found)} Minari datasets are here; name one of them:\n{listed}{more}")
    return MinariParts(found[0])


def _datasets(path: AnyPath) -> list[AnyPath]:
    """The ``data`` folders at or under ``path``, three levels down at most (namespaces may nest)."""
    for folder in (path, path / "data"):
        if _is_dataset(folder):
            return [folder]
    found: list[AnyPath] = []
    level = [path]
    for _ in range(3):
        level = sorted(sub for folder in level for sub in folder.iterdir() if sub.is_dir())
        found += [sub / "data" for sub in level if _is_dataset(sub / "data")]
        level = [sub for sub in level if not _is_dataset(sub / "data")][:1000]
    return found


def _is_dataset(folder: AnyPath) -> bool:
    metadata = folder / METADATA
    if not metadata.is_file():
        return False
    if (folder / FILE).is_file():
        return True
    try:
        return '"data_format"' in metadata.read_text()[:1_000_000]
    except (OSError, UnicodeDecodeError):
        return False


class MinariParts:
    """One dataset, its episodes in the order of their numbers; see `etude.recordings.formats.parts.Parts`."""

    def __init__(self, folder: AnyPath) -> None:
        self.folder = folder
        self._metadata = read_metadata(folder / METADATA)
        kind = str(self._metadata.get("data_format", "hdf5"))
        self._reader = _reader(folder, kind)
        self.format = f"minari-{kind}"
        self._episodes: Episodes = self._reader.index()
        if not self._episodes.names:
            raise DataError(f"{folder}: the Minari dataset has no episodes.")
        self._paths: dict[str, Sequence[str]] = {}
        self._columns: dict[str, Column] = {}
        self._info_shift: dict[str, int] = {}
        self._dropped: dict[str, str] = {}
        adapted: list[str] = []
        obs_space = self._add_space(col.OBS, adapted)
        action_space = self._add_space(col.ACTION, adapted)
        self._add_flat()
        self._add_infos()
        self.header = Header(obs_space, action_space, env_id(self._metadata), self._meta(adapted))
        self.files = self._reader.files()
        flags = (col.TERMINATED, col.TRUNCATED)
        self.columns = [name for name in self._columns if name not in flags]
        self._parts = grouped(self._episodes.lengths)
        self._unread: dict[int, list[int]] = {}  # by part: which of its episodes could not be read

    # -- what there is ----------------------------------------------------------------------------------------

    def _add_space(self, root: str, adapted: list[str]) -> Space:
        """The space of observations or actions, its columns found in the first episode."""
        text = self._metadata.get(f"{'observation' if root == col.OBS else 'action'}_space")
        where = f"{self.folder / METADATA}: `{'observation' if root == col.OBS else 'action'}_space`"
        if text is None:
            raise DataError(f"{where} is missing. Minari writes it unless the env was given alone: add it.")
        space = space_of(text, where)
        for name, path, leaf in leaves_of(space, root, (ROOTS[root],), self._reader.tuple_member):
            image = bool(self._metadata.get("jpeg_encoding", True)) and is_image(leaf)
            if image and self.format == "minari-hdf5" and not self._is_packed(path):
                image = False
            found = self._reader.column(self._episodes.names[0], path, image=image)
            if not image and math.prod(found.shape) != math.prod(leaf_shape(leaf)):
                raise DataError(
                    f"{self._reader.where(self._episodes.names[0])}: `{'/'.join(path)}` has rows of shape "
                    f"{list(found.shape)}, but its space is {leaf}. Correct {self.folder / METADATA}."
                )
            dtype = fitting(leaf, found.dtype)
            if dtype != np.dtype(leaf.dtype):
                adapted.append(name)
            self._paths[name] = path
            self._columns[name] = Column(leaf_shape(leaf), dtype, found.rows, image)
        return widened(space, root, {name: column.dtype for name, column in self._columns.items()})

    def _is_packed(self, path: Sequence[str]) -> bool:
        """Images of versions before 0.5.3, or of data written without JPEG, are plain arrays."""
        try:
            return len(self._reader.column(self._episodes.names[0], path, image=False).shape) == 1
        except DataError:
            return True  # byte strings of any length

    def _add_flat(self) -> None:
        for name, member in NAMES.items():
            found = self._reader.column(self._episodes.names[0], (member,), image=False)
            dtype = np.dtype(bool) if name != col.REWARD else np.result_type(found.dtype, np.float32)
            self._paths[name], self._columns[name] = (member,), Column((), dtype, found.rows)

    def _add_infos(self) -> None:
        """Those infos that every episode has alike, as numbers; the others are named."""
        first = self._reader.infos(self._episodes.names[0])
        others = [self._reader.infos(name) for name in self._episodes.names[1:]] if first else []
        length = int(self._episodes.lengths[0])
        for path, column in first.items():
            name = f"{col.INFO}/{path}"
            if column is None or column.rows not in (length, length + 1):
                self._dropped[name] = "not plain numbers, one row a step"
            elif not all(_alike(column, other.get(path)) for other in others):
                self._dropped[name] = "not the same in every episode"
            else:
                self._info_shift[name] = column.rows - length
                self._paths[name] = ("infos", *path.split("/"))
                self._columns[name] = column
        for path in {path for other in others for path in other} - set(first):
            self._dropped[f"{col.INFO}/{path}"] = "not in every episode"

    def _meta(self, adapted: list[str]) -> dict[str, Any]:
        taken = ("observation_space", "action_space", "data_format", "jpeg_encoding", "dataset_size")
        meta: dict[str, Any] = {"minari": {k: v for k, v in self._metadata.items() if k not in taken}}
        if any(seed is not None for seed in self._episodes.seeds):
            meta["seeds"] = dict(zip(self._episode_ids(), self._episodes.seeds, strict=True))
        if self._dropped:
            meta["dropped"] = self._dropped
        if adapted:
            meta["inferred"] = dict.fromkeys(adapted, "the file's dtype is wider than the space's")
        return meta

    def _episode_ids(self) -> list[str]:
        return [name.removeprefix("episode_") for name in self._episodes.names]

    # -- reading ----------------------------------------------------------------------------------------------

    @property
    def num_parts(self) -> int:
        """How many pieces are loaded one at a time."""
        return len(self._parts) - 1

    def rows(self, k: int) -> int:
        """The steps of part k."""
        return int(self._episodes.lengths[self._parts[k] : self._parts[k + 1]].sum())

    def load(self, k: int, columns: Sequence[str] | None = None) -> Experience:
        """Whole episodes; see `etude.recordings.formats.parts.Parts`.

        Raises:
            DataError: an episode can't be decoded, or its columns do not go together.
        """
        return self._load(int(self._parts[k]), int(self._parts[k + 1]), columns)

    def load_rest(self, k: int, columns: Sequence[str] | None = None) -> tuple[Experience, list[Problem]]:
        """Part ``k`` without the episodes that can't be read, and these; see `load`."""
        first, stop = int(self._parts[k]), int(self._parts[k + 1])
        try:
            return self._load(first, stop, columns), []
        except DataError:
            good, problems, unread = [self._load(first, first, columns)], [], []
            for i in range(first, stop):
                try:
                    good.append(self._load(i, i + 1, columns))
                except DataError as error:
                    problems.append(self._unreadable(error, i))
                    unread.append(i - first)
            self._unread[k] = unread
        return Experience.concat(good), problems

    def _unreadable(self, error: DataError, i: int) -> Problem:
        rows = int(self._episodes.lengths[i])
        return Problem("unreadable", str(error), str(self.folder), count=rows, repairable=True)

    def place(self, k: int, row: int) -> Place:
        """Where a row of part ``k`` is."""
        lengths = self._episodes.lengths[self._parts[k] : self._parts[k + 1]].copy()
        lengths[self._unread.get(k, [])] = 0
        i = int(np.searchsorted(np.cumsum(lengths), row, side="right"))
        where = self._reader.where(self._episodes.names[int(self._parts[k]) + i])
        step = row - int(lengths[:i].sum())
        return Place(f"{where}, step {step}", where.split(": ")[0], step)

    def _load(self, first: int, stop: int, columns: Sequence[str] | None) -> Experience:
        names = chosen(self.columns, columns, str(self.folder))
        lengths = self._episodes.lengths[first:stop]
        wanted = {name: (self._paths[name], self._columns[name]) for name in [*names, col.TERMINATED, col.TRUNCATED]}
        rows = {name: (lengths + self._rows_more(name)).tolist() for name in wanted}
        found = self._reader.read(self._episodes.names[first:stop], wanted, rows)
        offsets = offsets_of(lengths)
        final_obs = {}
        for name, values in found.items():
            if col.is_under(name, col.OBS):
                ends = offsets[1:] + np.arange(len(lengths))
                final_obs[name] = values[ends]
                found[name] = _without(values, ends)
            elif self._info_shift.get(name):
                found[name] = _without(values, offsets[:-1] + np.arange(len(lengths)))
        terminated, truncated = found.pop(col.TERMINATED), found.pop(col.TRUNCATED)
        self._check_ends(terminated | truncated, offsets, first)
        segments = Segments.of(
            len(lengths),
            episode_id=self._episode_ids()[first:stop],
            terminated=terminated[offsets[1:] - 1],
            truncated=truncated[offsets[1:] - 1],
            has_final_obs=True,
        )
        return Experience(found, offsets, segments, final_obs)

    def _rows_more(self, name: str) -> int:
        """How many rows more than steps an episode has of a column."""
        if col.is_under(name, col.OBS) or self.format != "minari-hdf5":
            return int(col.is_under(name, col.OBS)) or self._info_shift.get(name, 0)
        return self._info_shift.get(name, 0)

    def _check_ends(self, done: NDArray[np.bool_], offsets: NDArray[np.int64], first: int) -> None:
        inside = done.copy()
        inside[offsets[1:] - 1] = False
        if inside.any():
            row = int(inside.argmax())
            i = int(np.searchsorted(offsets, row, side="right")) - 1
            raise DataError(
                f"{self._reader.where(self._episodes.names[first + i])}: the episode goes on after its end: a flag is "
                f"set at step {row - int(offsets[i])} of {int(offsets[i + 1] - offsets[i])}."
            )

    # -- looking ----------------------------------------------------------------------------------------------

    def problems(self) -> Iterator[Problem]:
        """Episodes or steps that the metadata count, but that are not there."""
        return self._lost()

    def _lost(self) -> Iterator[Problem]:
        totals = (len(self._episodes.names), int(self._episodes.lengths.sum()))
        for what, found in zip(("total_episodes", "total_steps"), totals, strict=True):
            said = self._metadata.get(what)
            if isinstance(said, int) and said != found:
                text = (
                    f"{self.folder}: {METADATA} says {what} {said:,}, but {found:,} are there. Was the dataset copied "
                    "in part? Restore it, or correct the file."
                )
                yield Problem("lost_rows", text, str(self.folder / METADATA), repairable=True)


def _reader(folder: AnyPath, kind: str) -> Reader:
    if kind == "hdf5":
        if not (folder / FILE).is_file():
            raise DataError(f"{folder}: there is no {FILE}, though {METADATA} says `data_format` hdf5. Restore it.")
        return Hdf5Episodes(folder)
    if kind in ("arrow", "parquet"):
        return ArrowEpisodes(folder, f".{kind}")
    raise DataError(f"{folder / METADATA}: `data_format` is {kind!r}; known are hdf5, arrow and parquet.")


def _alike(column: Column, other: Column | None) -> bool:
    return other is not None and (other.shape, other.dtype) == (column.shape, column.dtype)


def _without(values: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[Any]:
    if len(values) > 50 * len(rows):  # a copy of each stretch between them is faster than looking at every row
        starts, stops = [0, *(rows + 1).tolist()], [*rows.tolist(), len(values)]
        return np.concatenate([values[a:b] for a, b in zip(starts, stops, strict=True)])
    keep = np.ones(len(values), bool)
    keep[rows] = False
    return values[keep]
