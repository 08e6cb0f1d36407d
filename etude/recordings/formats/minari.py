# SPDX-License-Identifier: Apache-2.0
"""Minari datasets (https://minari.farama.org), in its HDF5, Arrow and Parquet layouts.

A dataset is a folder ``<namespace>/<name>-v<k>`` with ``data/metadata.json``. Actions are those that the env received.
The infos of a reset belong to no step and are left out: ``info/<name>`` holds those that came with the rewards.
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from gymnasium import spaces

from etude import columns as col
from etude.errors import DataError, SpaceError
from etude.experience import Experience, Segments
from etude.experience.experience import offsets_of
from etude.files import AnyPath, relative
from etude.recordings.format import Contents, Format, Place, Problem, Unit, grouped, lost_rows, most_rows
from etude.recordings.formats.inferring import fitting, widened
from etude.recordings.formats.minari_episodes import (
    FILE,
    ArrowEpisodes,
    EpisodeReader,
    Episodes,
    Hdf5Episodes,
    MinariColumn,
)
from etude.recordings.layout import Header, loads, read_json
from etude.settings import choice
from etude.spaces import Space, leaf_shape, leaves, space_from_json, space_to_json, walk

# -- metadata.json: spaces (JSON inside of JSON), the env's id -------------------------------------------------------


METADATA: Final = "metadata.json"


def read_metadata(path: AnyPath) -> dict[str, Any]:
    """Read the object in ``metadata.json``; a DataError if the file can't be read or holds something else."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise DataError(f"{path}: this is a {type(data).__name__}, not the object that Minari writes. Restore it.")
    return data


def env_id(metadata: Mapping[str, Any]) -> str | None:
    """Return the id of the env, if the metadata contains one."""
    try:
        spec = loads(metadata.get("env_spec") or "{}")
    except (ValueError, TypeError, RecursionError):
        return None
    env = spec.get("id") if isinstance(spec, dict) else None
    return env if isinstance(env, str) else None


def is_image(leaf: Space) -> bool:
    """Return whether Minari stores values of this space as JPEG if ``jpeg_encoding`` is on."""
    if not isinstance(leaf, spaces.Box) or leaf.dtype != np.uint8 or len(leaf.shape) not in (2, 3):
        return False
    return bool(min(leaf.shape[:2]) >= 32 and (leaf.low == 0).all() and (leaf.high == 255).all())


def space_of(text: Any, where: str) -> Space:
    """Parse a space from Minari's JSON.

    Raises:
        DataError: it does not describe a space, or describes one that Etude does not support.
    """
    try:
        space = space_from_json(_as_own(loads(text, parse_constant=float) if isinstance(text, str) else text))
        leaves(space, "space")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{where} does not describe a space: {str(text)[:200]} ({error!r}).") from error
    except SpaceError as error:
        raise DataError(f"{where}: {error}") from error
    return space


def _as_own(data: Any) -> dict[str, Any]:
    """Convert Minari's description of a space to Etude's."""
    out = {"start": 0, "dtype": "int64", **data}
    if data["type"] == "Box":
        out |= {side: np.asarray(data[side]).reshape(-1).tolist() for side in ("low", "high")}
    elif data["type"] == "MultiBinary":
        out["n"] = np.atleast_1d(data["n"]).tolist()
    elif data["type"] == "MultiDiscrete":
        out["start"] = data.get("start", [0] * len(data["nvec"]))
    elif data["type"] == "Dict":
        out["spaces"] = [[key, _as_own(sub)] for key, sub in data["subspaces"].items()]
    elif data["type"] == "Tuple":
        out["spaces"] = [_as_own(sub) for sub in data["subspaces"]]
    return out


def json_of(space: Space) -> dict[str, Any]:
    """Return Minari's description of a space, to be written as JSON; the inverse of `space_of`."""
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "subspaces": {str(key): json_of(sub) for key, sub in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "subspaces": [json_of(sub) for sub in space.spaces]}
    out = {key: value for key, value in space_to_json(space).items() if key != "names"}
    if isinstance(space, spaces.Box):
        out |= {"low": space.low.tolist(), "high": space.high.tolist()}
    elif isinstance(space, spaces.Discrete):
        out["dtype"] = "int64"
    elif isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:
        (out["n"],) = out["n"]
    return out


# -- reading ---------------------------------------------------------------------------------------------------------


NAMES: Final = {col.REWARD: "rewards", col.TERMINATED: "terminations", col.TRUNCATED: "truncations"}
ROOTS: Final = {col.OBS: "observations", col.ACTION: "actions"}


URL: Final = "minari://"
"""The prefix of dataset ids."""


def local_dataset(name: str) -> str:
    """Return the folder of the dataset ``minari://ID``, where Minari stores datasets.

    Raises:
        DataError: it does not exist.
    """
    home = Path(os.environ.get("MINARI_DATASETS_PATH") or Path("~", ".minari", "datasets").expanduser())
    wanted = name.removeprefix(URL)
    if (home / wanted).is_dir() and wanted:
        return str(home / wanted)
    there = sorted(relative(folder, home).parent.as_posix() for folder in _datasets(home)) if home.is_dir() else []
    where, how = f"on this machine (in {home})", f"Minari itself downloads: minari download {wanted or 'ID'}"
    raise DataError(f"{name}: Minari has no such dataset {where}. {choice(wanted, there)} {how}")


def detect(path: AnyPath) -> bool:
    """Return whether ``path`` is a Minari dataset, its ``data`` folder, its HDF5 file, or a folder of datasets."""
    if path.is_file():
        return path.name == FILE and (path.parent / METADATA).is_file()
    return path.is_dir() and bool(_datasets(path))


def _datasets(path: AnyPath) -> list[AnyPath]:
    """The ``data`` folders at or under ``path``, at most three levels down (namespaces may be nested)."""
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


class Minari(Format):
    """A Minari dataset, described by its metadata and its first episode.

    Args:
        path: Its folder, the ``data`` folder in it, its HDF5 file, or a folder that contains only this dataset.

    Raises:
        DataError: it is broken, or there are several.
    """

    def __init__(self, path: AnyPath) -> None:
        path = path.parent if path.is_file() else path
        inside = _datasets(path) if path.is_dir() else []
        if not inside:
            raise DataError(f"{path}: there is no Minari dataset here (a folder `data` with {METADATA}).")
        if len(inside) > 1:
            listed = "\n".join(f"  {folder.parent if folder.name == 'data' else folder}" for folder in inside[:20])
            more = f"\n  and {len(inside) - 20} more" if len(inside) > 20 else ""
            raise DataError(f"{path}: {len(inside)} Minari datasets are here; name one of them:\n{listed}{more}")
        (self.folder,) = inside
        self._where = self.folder / METADATA
        self._metadata = read_metadata(self._where)
        kind = str(self._metadata.get("data_format", "hdf5"))
        self.name = f"minari-{kind}"
        self.reader = _reader(self.folder, kind)
        self.episodes: Episodes = self.reader.index()
        if not self.episodes.names:
            raise DataError(f"{self.folder}: the Minari dataset has no episodes.")
        self._dropped: dict[str, str] = {}
        self._adapted: list[str] = []
        given = {root: self._given(root) for root in ROOTS}
        found = self._found_in_first(given)
        self.columns = {name: self._as_given(name, found[name], leaf) for name, leaf in _leaves(given).items()}
        for name in NAMES:
            dtype = np.result_type(found[name].dtype, np.float32) if name == col.REWARD else np.dtype(bool)
            self.columns[name] = dataclasses.replace(found[name], shape=(), dtype=dtype)
        self._add_infos()
        dtypes = {name: column.dtype for name, column in self.columns.items()}
        try:
            obs_space, action_space = (widened(space, root, dtypes) for root, space in given.items())
        except DataError as error:
            raise DataError(f"{self._where}: {error}") from error
        self.header = Header(obs_space, action_space, env_id(self._metadata), self._meta())

    def describe(self) -> Contents:
        """Return the contents: the episodes, sorted by number."""
        lengths = self.episodes.lengths
        row_bytes = sum(math.prod(column.shape) * column.dtype.itemsize for column in self.columns.values())
        bounds = itertools.pairwise(grouped(lengths, most_rows(row_bytes)).tolist())
        units = [Unit(k, int(lengths[a:b].sum()), data=(a, b)) for k, (a, b) in enumerate(bounds)]
        found = {"total_episodes": len(lengths), "total_steps": int(lengths.sum())}
        lost = [*self.episodes.problems, *lost_rows(self._where, self._metadata, found)]
        names = [name for name in self.columns if name not in (col.TERMINATED, col.TRUNCATED)]
        return Contents(self.header, names, units, self.reader.files(), lost)

    def read(self, unit: Unit, columns: Sequence[str], problems: list[Problem] | None = None) -> Experience:
        """Read whole episodes. With ``problems``, those that can't be read are left out."""
        first, stop = unit.data
        try:
            return self._read(first, stop, columns)
        except DataError:
            if problems is None:
                raise
        good = [self._read(first, first, columns)]
        for i in range(first, stop):
            try:
                good.append(self._read(i, i + 1, columns))
            except DataError as error:
                rows = int(self.episodes.lengths[i])
                problems.append(Problem("unreadable", str(error), str(self.folder), count=rows, repairable=True))
        return Experience.concat(good)

    def place(self, unit: Unit, row: int, exp: Experience) -> Place:
        """Locate a row: its episode, and its step in it."""
        i = int(np.searchsorted(exp.offsets, row, side="right")) - 1
        own = next(n for n in self.episodes.names[slice(*unit.data)] if _id(n) == exp.segments.episode_id[i])
        where, step = self.reader.where(own), row - int(exp.offsets[i])
        return Place(f"{where}, step {step}", where.split(": ")[0], step)

    def _read(self, first: int, stop: int, columns: Sequence[str]) -> Experience:
        """Read columns of the episodes with these indices.

        Raises:
            DataError: one of them can't be read, or goes on after its end.
        """
        names, lengths = self.episodes.names[first:stop], self.episodes.lengths[first:stop]
        wanted = {name: self.columns[name] for name in [*columns, col.TERMINATED, col.TRUNCATED]}
        found, final_obs = self.reader.read(names, lengths, wanted)
        offsets = offsets_of(lengths)
        terminated, truncated = found.pop(col.TERMINATED), found.pop(col.TRUNCATED)
        last = offsets[1:] - 1
        inside = terminated | truncated
        inside[last] = False
        if inside.any():
            row = int(inside.argmax())
            i = int(np.searchsorted(offsets, row, side="right")) - 1
            where, step = self.reader.where(names[i]), f"{row - int(offsets[i])} of {int(lengths[i])}"
            raise DataError(f"{where}: the episode continues after its end: a flag is set at step {step}.")
        segments = Segments.of(
            len(lengths),
            episode_id=[_id(name) for name in names],
            terminated=terminated[last],
            truncated=truncated[last],
            has_final_obs=True,
        )
        return Experience(found, offsets, segments, final_obs)

    def _given(self, root: str) -> Space:
        """The space of observations or actions in the metadata."""
        name = "observation_space" if root == col.OBS else "action_space"
        where = f"{self._where}: `{name}`"
        if (text := self._metadata.get(name)) is None:
            raise DataError(f"{where} is missing. Minari omits it if only the env was given: add it.")
        return space_of(text, where)

    def _found_in_first(self, given: Mapping[str, Space]) -> dict[str, MinariColumn]:
        """The columns of the first episode, by Etude's names."""
        paths: dict[str, tuple[str, ...]] = {name: (member,) for name, member in NAMES.items()}
        for root, space in given.items():
            for name, keys, _ in walk(space, root):
                own = (self.reader.tuple_member(key) if isinstance(key, int) else key for key in keys)
                paths[name] = (ROOTS[root], *own)
        has_images = bool(self._metadata.get("jpeg_encoding", True))
        images = [name for name, leaf in _leaves(given).items() if has_images and is_image(leaf)]
        return self.reader.columns(self.episodes.names[0], paths, images)

    def _as_given(self, name: str, found: MinariColumn, leaf: Space) -> MinariColumn:
        """A column in the shape of its space, and with its dtype if that is wide enough."""
        if not found.is_image and math.prod(found.shape) != math.prod(leaf_shape(leaf)):
            what = f"`{'/'.join(found.path)}` has rows of shape {list(found.shape)}, but its space is {leaf}"
            raise DataError(f"{self.reader.where(self.episodes.names[0])}: {what}. Correct {self._where}.")
        dtype = fitting(leaf, found.dtype)
        self._adapted += [name] if dtype != leaf.dtype else []
        column = dataclasses.replace(found, shape=leaf_shape(leaf), dtype=dtype)
        return dataclasses.replace(column, extra="last") if col.is_under(name, col.OBS) else column

    def _add_infos(self) -> None:
        """Add the infos that are numbers of one shape and dtype in every episode; list the others as dropped."""
        (first,) = self.reader.infos(self.episodes.names[:1])
        length, alike, more = int(self.episodes.lengths[0]), dict.fromkeys(first, True), set[tuple[str, ...]]()
        for other in self.reader.infos(self.episodes.names[1:] if first else ()):
            more |= other.keys() - first.keys()
            for path, column in first.items():
                alike[path] &= _form(column) == _form(other.get(path))
        for path, column in first.items():
            name = "/".join((col.INFO, *path))
            if column is None or column.rows not in (length, length + 1):
                self._dropped[name] = "not plain numbers, one row a step"
            elif not alike[path]:
                self._dropped[name] = "not the same in every episode"
            else:
                self.columns[name] = dataclasses.replace(column, extra=None if column.rows == length else "first")
        for path in sorted(more):
            self._dropped["/".join((col.INFO, *path))] = "not in every episode"

    def _meta(self) -> dict[str, Any]:
        taken = ("observation_space", "action_space", "data_format", "jpeg_encoding", "dataset_size")
        meta: dict[str, Any] = {"minari": {k: v for k, v in self._metadata.items() if k not in taken}}
        if any(seed is not None for seed in self.episodes.seeds):
            meta["seeds"] = dict(zip(map(_id, self.episodes.names), self.episodes.seeds, strict=True))
        inferred = dict.fromkeys(self._adapted, "the file's dtype is wider than the space's")
        return meta | {k: v for k, v in (("dropped", self._dropped), ("inferred", inferred)) if v}


def _id(name: str) -> str:
    return name.removeprefix("episode_")


def _reader(folder: AnyPath, kind: str) -> EpisodeReader:
    if kind == "hdf5":
        if not (folder / FILE).is_file():
            raise DataError(f"{folder}: there is no {FILE}, though {METADATA} says `data_format` hdf5. Restore it.")
        return Hdf5Episodes(folder)
    if kind in ("arrow", "parquet"):
        return ArrowEpisodes(folder, f".{kind}")
    raise DataError(f"{folder / METADATA}: `data_format` is {kind!r}; known are hdf5, arrow and parquet.")


def _leaves(given: Mapping[str, Space]) -> dict[str, Space]:
    return {name: leaf for root, space in given.items() for name, leaf in leaves(space, root).items()}


def _form(column: MinariColumn | None) -> Any:
    """What an info must have in common in all episodes: its row shape and dtype."""
    return None if column is None else (column.shape, column.dtype)
