# SPDX-License-Identifier: Apache-2.0
"""LeRobot datasets of version 3 (https://huggingface.co/docs/lerobot/lerobot-dataset-v3).

A dataset is a folder: ``meta/info.json`` describes the features, ``meta/episodes`` the episodes, and each row of
``data/*/*.parquet`` is a step. Images are stored as PNG or JPEG in Parquet, or as frames of a camera's videos.

`LeRobot` defines how features map to columns, and `LeRobot._ends` where episodes end, because the format leaves both
open. A dataset does not contain the observation after the last step of an episode.
"""

import contextlib
import io
import itertools
import math
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from gymnasium import spaces
from numpy.typing import NDArray
from PIL import Image

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError, SettingsError, SpaceError, how_to_install
from etude.experience import Experience, Segments
from etude.experience.experience import offsets_of
from etude.files import AnyPath
from etude.recordings import footers
from etude.recordings.format import Contents, Format, Place, Problem, Unit, grouped, lost_rows, most_rows
from etude.recordings.formats.arrow import RowPlace, is_bytes, numbers, one_array, strings
from etude.recordings.formats.inferring import Range, inferred_space, needs_range, reserved, widen
from etude.recordings.formats.parquet_files import ParquetFiles
from etude.recordings.layout import Header, read_json
from etude.spaces import Space, leaf_dtype, leaf_shape, leaves, space_from_json
from etude.urls import first_line

INFO: Final = "meta/info.json"
OBSERVATION: Final = "observation"
EPISODE, FRAME, TIME, TASK, INDEX = "episode_index", "frame_index", "timestamp", "task_index", "index"
_FLAGS: Final = (col.TERMINATED, col.TRUNCATED, "done", "success")
_MODES: Final = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's names for images with this number of channels."""
_PIXELS: Final = {1: "gray", 3: "rgb24"}
"""ffmpeg's names for them."""
_LEAST_ROWS: Final = 128
"""The least number of steps in a unit, however large their images are."""
_MOST_BYTES: Final = 32 << 20
"""The most bytes of one step of a feature; larger features are taken for mistakes and not read."""
_MOST_FRAMES: Final = 1 << 40
_SECONDS: Final = 300
"""Time limit in seconds for decoding one video for one unit."""


class Feature(NamedTuple):
    """A LeRobot feature, which becomes a column."""

    key: str
    kind: str
    """``number``, ``image``, ``video`` or ``text``."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """The shape of a row; for an image: height, width, channels."""


class FrameSpan(NamedTuple):
    """Rows that are read together: ``first`` to ``stop - 1`` of the file with index ``file``."""

    file: int
    first: int
    stop: int


class FrameRows(NamedTuple):
    """Some rows of a file."""

    span: FrameSpan
    table: pa.Table
    episode: NDArray[np.int64]
    frame: NDArray[np.int64]
    """The number of each row's step in its episode."""


def detect(path: AnyPath) -> bool:
    """Return whether ``path`` is the folder of a LeRobot dataset, of any version."""
    return path.is_dir() and (path / INFO).is_file()


class LeRobot(Format):
    """The LeRobot dataset in ``folder``. Caches only the most recently read row groups.

    Features become columns as follows:

    - ``action``; several features ``action.x`` become the parts ``action/x``.
    - A single feature ``observation.x`` becomes ``obs``; several become the parts ``obs/x``, with ``/`` for further
      dots.
    - ``next.reward`` or ``reward`` becomes ``reward``; 0 if there is neither.
    - Other features, including ``timestamp`` and ``task_index``, become columns of their own, with ``/`` for dots.
      ``header.meta["dropped"]`` lists what is not read.

    Spaces are unbounded, except images, which are between 0 and 255; integers and booleans follow the rules of
    `etude.recordings.formats.inferring`. If Etude wrote spaces into ``info.json``, those are used.

    Raises:
        DataError: it is broken, or of an unsupported version.
    """

    name = "lerobot"

    def __init__(self, folder: AnyPath) -> None:
        self.folder = folder
        self.info = _info_of(folder)
        self.fps = float(self.info["fps"])
        self._dropped: dict[str, str] = {}
        self._features = self._features_of()
        stored = _parquet(folder / "data")
        if not stored:
            raise DataError(f"{folder}: holds no data: there is no data/*/*.parquet. Restore it from a copy.")
        broken = {path: f for path, f in zip(stored, footers.footers(stored), strict=True) if isinstance(f, DataError)}
        self._unread = [Problem("unreadable", str(e), str(f), count=0, repairable=True) for f, e in broken.items()]
        self.files = [path for path in stored if path not in broken]
        if not self.files:
            raise DataError(self._unread[0].message)
        self._parquet = ParquetFiles(self.files)
        self.rows = np.array(self._parquet.file_rows, np.int64)
        self._first_rows = self._first_rows_of()
        self._flags = {flag: self._one_of(f"next.{flag}", flag) for flag in _FLAGS}
        self._columns, given = self._named()
        self.episodes = self._episodes_of()
        self.header = self._header(given)

    def describe(self) -> Contents:
        """Return the contents: the rows in the order of the files, cut between episodes where possible."""
        found = {"total_frames": int(self.rows.sum()), "total_episodes": len(self.episodes[EPISODE])}
        lost = [*self._unread, *lost_rows(self.folder / INFO, self.info, found)]
        units = [Unit(k, s.stop - s.first, self.files[s.file], s.first, s) for k, s in enumerate(self.spans())]
        return Contents(self.header, list(self._columns), units, self.files, lost)

    def read(self, unit: Unit, columns: Sequence[str], problems: list[Problem] | None = None) -> Experience:
        """Read the steps of a unit. With ``problems``, episodes that can't be read are left out as a whole."""
        whole: FrameSpan = unit.data
        try:
            return self._read(whole, columns)
        except DataError:
            if problems is None:
                raise
            good: list[Experience] = []
            for start, stop in itertools.pairwise(self._cuts(whole).tolist()):
                span = FrameSpan(whole.file, start, stop)
                try:
                    good.append(self._read(span, columns))
                except DataError as error:
                    _, file, row, _ = self._place(span, 0)
                    problems.append(Problem("unreadable", str(error), file, row, None, stop - start, repairable=True))
            if not good:
                raise
        return Experience.concat(good)

    def place(self, unit: Unit, row: int, exp: Experience) -> Place:
        """Locate a row; rows are counted from 0 in their file."""
        return self._place(unit.data, row) if exp.num_steps == unit.rows else super().place(unit, row, exp)

    # -- features, episodes and spaces ------------------------------------------------------------------------

    def _features_of(self) -> dict[str, Feature]:
        out = {}
        for key, said in self.info["features"].items():
            try:
                out[key] = _feature(key, said)
            except (TypeError, ValueError, AttributeError) as error:
                self._dropped[key] = str(error)
        return out

    def _one_of(self, *keys: str) -> Feature | None:
        """The first of these features that is one number per step."""
        found = (self._features.get(key) for key in keys)
        return next((f for f in found if f and f.kind == "number" and math.prod(f.shape) == 1), None)

    def _named(self) -> tuple[dict[str, Feature], dict[str, Space]]:
        """The features by column, and the spaces that Etude wrote, if they fit."""
        names, given = self._own_names()
        if not names:
            seen = [key for key, feature in self._features.items() if feature.kind != "text"]
            names = _roots([key for key in seen if self._features[key].kind == "number"], "action", col.ACTION)
            names |= _roots(seen, OBSERVATION, col.OBS)
        for root, wanted in ((col.OBS, "observation.state"), (col.ACTION, "action")):
            if not col.under(names.values(), root):
                raise DataError(f"{self.folder / INFO}: there is no feature such as `{wanted}` that can be read.")
        reward = self._one_of("next.reward", "reward")
        names |= {reward.key: col.REWARD} if reward else {}
        used = {EPISODE, FRAME, INDEX, *(f.key for flag, f in self._flags.items() if f and flag != "success")}
        for key in self._features:
            name = key.replace(".", col.SEPARATOR)
            if key in names or key in used:
                continue
            if reserved(name) or _clashes(name, [*names.values(), col.OBS, col.ACTION, col.REWARD]):
                self._dropped[key] = "its name is that of another column"
            else:
                names[key] = name
        return {name: self._features[key] for key, name in names.items()}, given

    def _own_names(self) -> tuple[dict[str, str], dict[str, Space]]:
        """The columns of observations and actions by feature, and their spaces, as Etude wrote them."""
        try:
            given = {root: space_from_json(self.info["etude"]["spaces"][root]) for root in (col.OBS, col.ACTION)}
        except (KeyError, TypeError, SpaceError):
            return {}, {}
        found = {name: leaf for root, space in given.items() for name, leaf in leaves(space, root).items()}
        names = {key_of(name, leaf): name for name, leaf in found.items()}
        fits = (key in self._features and _fits(self._features[key], found[name]) for key, name in names.items())
        return (names, given) if all(fits) and len(names) == len(found) else ({}, {})

    def _episodes_of(self) -> Columns:
        """The metadata of episodes, sorted by episode number: their lengths, and where their frames are."""
        names = [EPISODE, "length"]
        videos = [feature.key for feature in self._columns.values() if feature.kind == "video"]
        names += [f"videos/{key}/{part}" for key in videos for part in ("chunk_index", "file_index", "from_timestamp")]
        tables: list[Columns] = []
        for path in _parquet(self.folder / "meta/episodes"):
            try:
                with footers.opened(path) as parquet:
                    _check_there(parquet.schema_arrow, names, str(path))
                    row = 0
                    for group in range(parquet.num_row_groups):  # all at once would take far more memory
                        table = parquet.read_row_group(group, columns=names)
                        table.validate()
                        tables.append({name: _whole(table[name], name, str(path), row) for name in names})
                        row += len(table)
            except (*footers.BROKEN, ValueError, KeyError) as error:
                raise DataError(f"{path}: can't be read ({first_line(error)}). Restore it from a copy.") from error
        if not tables:
            raise DataError(f"{self.folder}: there is no meta/episodes/*/*.parquet. Restore it from a copy.")
        found = {name: np.concatenate([table[name] for table in tables]) for name in names}
        order = np.argsort(found[EPISODE], kind="stable")
        return {name: values[order] for name, values in found.items()}

    def _header(self, given: dict[str, Space]) -> Header:
        """Build the header, and give the columns the dtypes and shapes of their spaces."""
        inferred = {} if col.REWARD in self._columns else {col.REWARD: "no feature holds rewards: 0"}
        under = {root: list(col.subtree(self._columns, root)) for root in (col.OBS, col.ACTION)}
        both = [*under[col.OBS], *under[col.ACTION]]
        if not given:
            forms = {name: (feature.dtype, feature.shape) for name, feature in self._columns.items()}
            ranges = self._ranges([name for name in both if needs_range(name, *forms[name])])
            given = {root: inferred_space({n: forms[n] for n in names}, root, ranges) for root, names in under.items()}
            inferred |= dict.fromkeys(both, "the dataset has no spaces")
        self._columns = {name: f._replace(shape=_row_shape(f.shape)) for name, f in self._columns.items()}
        reward = self._columns.setdefault(col.REWARD, Feature("", "number", np.dtype(np.float32), ()))
        self._columns[col.REWARD] = reward._replace(dtype=np.result_type(reward.dtype, np.float32))
        for root, space in given.items():
            for name, leaf in leaves(space, root).items():
                self._columns[name] = self._columns[name]._replace(dtype=leaf_dtype(leaf), shape=leaf_shape(leaf))
        said = {key: self.info.get(key) for key in ("codebase_version", "robot_type", "fps", "splits")}
        said["names"] = {key: self.info["features"][key].get("names") for key in self._features}
        meta: dict[str, Any] = {"lerobot": said | {"tasks": self._tasks()}}
        meta |= {"inferred": inferred} if inferred else {}
        meta |= {"dropped": self._dropped} if self._dropped else {}
        robot = said["robot_type"]
        return Header(given[col.OBS], given[col.ACTION], robot if isinstance(robot, str) and robot else None, meta)

    def _ranges(self, names: Sequence[str]) -> dict[str, Range]:
        """The ranges of some integer columns."""
        ranges: dict[str, Range] = {}
        for span, name in itertools.product(self.spans() if names else (), names):
            feature = self._columns[name]
            try:
                widen(ranges, {name: self._values(self._table(span, [feature.key]), span, feature)})
            except DataError:  # raised again when it is read
                continue
        return ranges

    def _tasks(self) -> list[str]:
        """The descriptions of tasks, by task number."""
        path = self.folder / "meta/tasks.parquet"
        if not path.is_file():
            return []
        try:
            with footers.opened(path) as parquet:
                rows = parquet.read().to_pylist()
            tasks = {row.pop(TASK): next(word for word in row.values() if isinstance(word, str)) for row in rows}
            return [tasks[i] for i in range(len(tasks))]
        except (*footers.BROKEN, KeyError, StopIteration, TypeError, ValueError) as error:
            raise DataError(f"{path}: does not hold tasks by number ({error!r}). Restore it from a copy.") from error

    # -- reading ----------------------------------------------------------------------------------------------

    def spans(self) -> list[FrameSpan]:
        """Divide the rows into pieces of at most 65,536 rows or about 64 MiB, but at least 128 rows, between episodes.

        An episode is only cut if it is longer than that, or stored in two files.
        """
        row_bytes = sum(math.prod(f.shape) * f.dtype.itemsize for f in self._columns.values())
        limit = max(_LEAST_ROWS, most_rows(row_bytes))
        units: list[FrameSpan] = []
        for file, rows in enumerate(self.rows.tolist()):
            cuts = self._cuts(FrameSpan(file, 0, rows))
            bounds = itertools.pairwise(cuts[grouped(np.diff(cuts), limit)].tolist())
            units += [FrameSpan(file, at, min(at + limit, b)) for a, b in bounds for at in range(a, b, limit)]
        return units

    def _first_rows_of(self) -> NDArray[np.int64]:
        """The index in the dataset of the first row of each file."""
        known = offsets_of(self.rows)[:-1]
        for file in np.flatnonzero(self.rows).tolist() if self._unread else ():  # files before it may be unreadable
            span = FrameSpan(file, 0, 1)
            with contextlib.suppress(DataError):  # then units are only cut at other rows
                known[file] = self._values(self._table(span, [INDEX]), span, _whole_number(INDEX))[0]
        return known

    def _cuts(self, span: FrameSpan) -> NDArray[np.int64]:
        """The row indices at which a unit and the episodes inside it begin, and its end."""
        ends = np.cumsum(np.clip(self.episodes["length"], 0, _MOST_FRAMES)) - self._first_rows[span.file]
        inside = ends[(ends > span.first) & (ends < span.stop)]
        return np.unique(np.concatenate([[span.first], inside, [span.stop]])).astype(np.int64)

    def _read(self, span: FrameSpan, columns: Sequence[str]) -> Experience:
        """Read the steps of a unit; an episode that continues in the next one keeps its id, with increasing ``t``.

        Raises:
            DataError: a row can't be decoded; the message names the file, row group, row and column.
        """
        features = {name: self._columns[name] for name in columns}
        keys = self._keys([*features.values(), *(flag for flag in self._flags.values() if flag)])
        rows = self._rows(span, keys)
        episode, frame, at = rows.episode, rows.frame, self._at(rows)
        odd = (frame < 0) | (frame > _MOST_FRAMES)
        if odd.any():
            where, row = self._where(span, int(odd.argmax())), frame[odd][0]
            raise DataError(f"{where}: column `{FRAME}` is {row}; it counts from 0. Restore it.")
        terminated, truncated = self._ends(rows, frame == self.episodes["length"][at] - 1)
        starts = np.ones(len(frame), bool)
        starts[1:] = (np.diff(episode) != 0) | (np.diff(frame) != 1) | (terminated | truncated)[:-1]
        offsets = np.append(np.flatnonzero(starts), len(frame)).astype(np.int64)
        first, last = offsets[:-1], offsets[1:] - 1
        steps = {name: self._column(rows, feature) for name, feature in features.items()}
        finals = {n: np.zeros((len(first), *c.shape[1:]), c.dtype) for n, c in col.subtree(steps, col.OBS).items()}
        known = np.zeros(len(first), bool)
        if len(frame) and finals and not (terminated | truncated)[-1]:
            following = self._following(span, keys, int(episode[-1]), int(frame[-1]) + 1, list(finals))
            known[-1] = bool(following)
            for name, values in following.items():
                finals[name][-1] = values[0]
        segments = Segments.of(
            len(first),
            episode_id=episode[first].astype(str).astype(object),
            t_start=frame[first],
            terminated=terminated[last],
            truncated=truncated[last],
            has_final_obs=known,
        )
        return Experience(steps, offsets, segments, finals)

    def _following(self, span: FrameSpan, keys: list[str], episode: int, frame: int, names: Sequence[str]) -> Columns:
        """The observation after a unit, ``[1, ...]``; empty if the next row is not this frame of the episode.

        Reads the same features ``keys`` as for the unit, so that most of the time the rows are cached.
        """
        row = FrameSpan(span.file, span.stop, span.stop + 1)
        if span.stop >= self.rows[span.file]:
            later = np.flatnonzero(self.rows[span.file + 1 :])
            if not len(later):
                return {}
            row = FrameSpan(span.file + 1 + int(later[0]), 0, 1)
        rows = self._rows(row, keys)
        if [*rows.episode, *rows.frame] != [episode, frame]:
            return {}
        return {name: self._column(rows, self._columns[name]) for name in names}

    def _at(self, rows: FrameRows) -> NDArray[np.int64]:
        """The indices of the rows' episodes in `episodes`."""
        known = np.append(self.episodes[EPISODE], -1)
        at = np.searchsorted(known[:-1], rows.episode)
        if (unknown := known[at] != rows.episode).any():
            where, number = self._where(rows.span, int(unknown.argmax())), rows.episode[unknown][0]
            raise DataError(f"{where}: `{EPISODE}` is {number}, but meta/episodes has no such episode. Restore it.")
        return at

    def _ends(self, rows: FrameRows, last: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return where episodes terminate and where they are truncated, bool ``[rows]`` each.

        The flags are ``next.terminated`` and ``next.truncated``. Without them, ``next.done`` means terminated, or
        truncated if ``next.success`` exists and is False. ``next.success`` alone counts in an episode's last row. An
        episode whose last row has no flag was stopped by a time limit: it is truncated.

        Args:
            rows: The rows.
            last: Whether a row is the last of its episode, by its length; bool ``[rows]``.
        """
        flags = {
            flag: self._values(rows.table, rows.span, feature._replace(shape=(), dtype=np.dtype(np.float64))) != 0
            for flag, feature in self._flags.items()
            if feature
        }
        done, has_done = flags.get("done", last), "done" in flags
        terminated, truncated = flags.get(col.TERMINATED), flags.get(col.TRUNCATED)
        if terminated is None:
            by_flag = flags.get("success", has_done) if truncated is None else ~truncated & has_done
            terminated = done & by_flag
        truncated = done & ~terminated if truncated is None else truncated
        return terminated, truncated | (last & ~terminated)

    def _column(self, rows: FrameRows, feature: Feature) -> NDArray[Any]:
        if feature.kind == "video":
            return self._frames(rows, feature)
        if not feature.key:
            return np.zeros((rows.table.num_rows, *feature.shape), feature.dtype)
        if feature.kind == "number":
            return self._values(rows.table, rows.span, feature)
        array, place = one_array(rows.table[feature.key]), partial(self._where, rows.span)
        return _images(array, feature, place) if feature.kind == "image" else strings(array, feature.key, place)

    def _values(self, table: pa.Table, span: FrameSpan, feature: Feature) -> NDArray[Any]:
        """A column of numbers, in the shape and dtype of its feature."""
        found = numbers(one_array(table[feature.key]), feature.key, partial(self._where, span))
        if math.prod(found.shape[1:]) != math.prod(feature.shape):
            said = f"rows of {list(found.shape[1:])}, but its shape is {list(feature.shape)}"
            raise DataError(f"{self._where(span, 0)}: column `{feature.key}` has {said}. Correct {INFO}.")
        with np.errstate(over="ignore", invalid="ignore"):
            out = found.astype(feature.dtype, copy=False).reshape(len(found), *feature.shape)
        is_cast = feature.dtype.kind in "iu" and found.dtype != feature.dtype
        if is_cast and (other := out.ravel() != found.ravel()).any():
            row = int(other.argmax()) // max(1, math.prod(feature.shape))
            said = f"{found.ravel()[other][0]}, which is not a {feature.dtype}"
            raise DataError(f"{self._where(span, row)}: column `{feature.key}` holds {said}. Correct one of them.")
        return out

    def _keys(self, features: Iterable[Feature]) -> list[str]:
        """The columns that these features need from a file."""
        keys = [TIME if feature.kind == "video" else feature.key for feature in features if feature.key]
        return list(dict.fromkeys([EPISODE, FRAME, *keys]))

    def _table(self, span: FrameSpan, keys: list[str]) -> pa.Table:
        _check_there(self._parquet.schema(span.file), keys, str(self.files[span.file]))
        return self._parquet.read_rows(span.file, span.first, span.stop, keys)

    def _rows(self, span: FrameSpan, keys: list[str]) -> FrameRows:
        table = self._table(span, keys)
        return FrameRows(span, table, *(self._values(table, span, _whole_number(key)) for key in (EPISODE, FRAME)))

    def _place(self, span: FrameSpan, row: int) -> Place:
        """Locate a row of a unit."""
        at, file = span.first + row, str(self.files[span.file])
        _, group = self._parquet.groups[self._parquet.group_at(span.file, at)]
        return Place(f"{file}: row group {group}, row {at}", file, at, group)

    def _where(self, span: FrameSpan, row: int) -> str:
        return self._place(span, row).words

    # -- frames of videos -------------------------------------------------------------------------------------

    def _frames(self, rows: FrameRows, feature: Feature) -> NDArray[Any]:
        """The frames of a camera."""
        span, at = rows.span, self._at(rows)
        names = (f"videos/{feature.key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp"))
        *files, begins = (self.episodes[name][at] for name in names)
        stamps = begins + self._values(rows.table, span, Feature(TIME, "number", np.dtype(np.float64), ()))
        steady = (np.diff(stamps) > 0) & (np.diff(stamps) < 2.5 / self.fps) & ~np.diff(files).any(axis=0)
        out = np.empty((len(stamps), *feature.shape), np.uint8)
        for a, b in itertools.pairwise([0, *(np.flatnonzero(~steady) + 1).tolist(), len(stamps)]):
            if a == b:
                continue
            where = f"{self._where(span, a)}: column `{feature.key}`"
            path = self.folder / f"videos/{feature.key}/chunk-{files[0][a]:03d}/file-{files[1][a]:03d}.mp4"
            frames, times = _decoded(path, stamps[a], stamps[b - 1], self.fps, feature.shape, where)
            nearest = np.abs(times - stamps[a:b, None]).argmin(axis=1)
            far = ~(np.abs(times[nearest] - stamps[a:b]) < 0.25 / self.fps)
            if far.any():
                row = a + int(far.argmax())
                said = f"{path} has no frame at {stamps[row]:.4f} s"
                raise DataError(f"{self._where(span, row)}: column `{feature.key}`: {said}. Restore the video.")
            out[a:b] = frames[nearest]
        return out


# -- features -----------------------------------------------------------------------------------------------------


def key_of(name: str, leaf: Space | None = None) -> str:
    """Return LeRobot's name for a column, from which `LeRobot` restores it; ``leaf`` is an observation's leaf space."""
    if name == col.OBS:
        return f"{OBSERVATION}.{'image' if leaf is not None and is_image(leaf.dtype, leaf.shape) else 'state'}"
    return (OBSERVATION + name[len(col.OBS) :] if col.is_under(name, col.OBS) else name).replace(col.SEPARATOR, ".")


def is_image(dtype: Any, shape: Sequence[int] | None) -> bool:
    """Return whether such arrays are written as images: LeRobot's writer expects three channels in the last axis."""
    return dtype == np.uint8 and shape is not None and len(shape) == 3 and shape[2] == 3


def _parquet(folder: AnyPath) -> list[AnyPath]:
    found: list[Any] = list(folder.iterdir()) if folder.is_dir() else []
    return [file for inside in sorted(found) if inside.is_dir() for file in sorted(inside.glob("*.parquet"))]


def _info_of(folder: AnyPath) -> dict[str, Any]:
    path = folder / INFO
    data = read_json(path)
    info: dict[str, Any] = dict(data) if isinstance(data, dict) else {}
    version, fps = str(info.get("codebase_version")), info.get("fps")
    if not re.match(r"v?3(\.|$)", version):
        converter = "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id=NAME --root=FOLDER"
        raise DataError(
            f"{path}: `codebase_version` is {version[:40]}, but version 3 is read. LeRobot converts older datasets: "
            f"{converter} --push-to-hub=false (newer LeRobots have the script in lerobot.scripts)."
        )
    if not isinstance(fps, int | float) or not 0 < fps < 1e6:
        raise DataError(f"{path}: `fps` is {str(fps)[:80]!r}, not a number of frames a second.")
    if not isinstance(info.get("features"), dict):
        raise DataError(f"{path}: `features` is not an object. Restore it from a copy.")
    return info


def _feature(key: str, said: Mapping[str, Any]) -> Feature:
    """Parse a feature of ``info.json``; a ValueError or similar says why it is not read."""
    dtype, shape, about = said.get("dtype"), said.get("shape"), said.get("info")
    if not key.isprintable() or {"/", "\\"} & set(key) or "" in key.split(".") or len(key) > 200:
        raise ValueError("its name can't be a column's name")
    if dtype == "string":
        return Feature(key, "text", np.dtype(object), ())
    if not isinstance(shape, list) or len(shape) > 31 or not all(type(n) is int and n > 0 for n in shape):
        raise ValueError(f"its shape is {str(shape)[:80]}")
    has_pixels = dtype in ("image", "video")
    kind = np.dtype(np.uint8 if has_pixels else str(dtype))
    if has_pixels:
        names = said.get("names")
        axes = names if isinstance(names, list) else ["c"] if shape[0] in _MODES and shape[-1] not in _MODES else ["h"]
        shape = [*shape[1:], shape[0]] if str(axes[:1]).startswith("['c") else shape
        is_depth = isinstance(about, dict) and any(own.endswith("is_depth_map") and about[own] for own in about)
        if is_depth or len(shape) != 3 or shape[2] not in (_MODES if dtype == "image" else _PIXELS):
            raise ValueError(f"{'depth maps' if is_depth else f'{dtype}s of shape {shape}'} are not read")
    if kind.kind not in "biuf" or kind.itemsize > 8:
        raise ValueError(f"its dtype is {str(dtype)[:80]}")
    if math.prod(shape) * kind.itemsize > _MOST_BYTES:
        raise ValueError(f"a step of it has more than {_MOST_BYTES:,} bytes")
    row_shape = tuple(shape) if kind.kind == "f" else _row_shape(shape)
    return Feature(key, str(dtype) if has_pixels else "number", kind, row_shape)


def _roots(keys: Sequence[str], prefix: str, root: str) -> dict[str, str]:
    """The columns under ``root`` for the features ``prefix`` or ``prefix.x``, by feature."""
    parts = [prefix] if prefix in keys else [key for key in keys if key.startswith(f"{prefix}.")]
    if len(parts) == 1:
        return {parts[0]: root}
    names: dict[str, str] = {}
    for key in parts:
        is_below = any(key.startswith(f"{other}.") for other in parts)  # a column has no parts beside its numbers
        path = key[len(prefix) + 1 :].replace(".", "_" if is_below else col.SEPARATOR)
        name = f"{root}{col.SEPARATOR}{path}"
        names |= {} if _clashes(name, names.values()) else {key: name}
    return names


def _clashes(name: str, others: Iterable[str]) -> bool:
    return any(col.is_under(name, other) or col.is_under(other, name) for other in others)


def _row_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a row; LeRobot writes ``[1]`` for a single number."""
    return () if tuple(shape) == (1,) else tuple(shape)


def _fits(feature: Feature, leaf: Space) -> bool:
    is_choice = not isinstance(leaf, spaces.Box) and feature.dtype.kind in "biu"
    return math.prod(feature.shape) == math.prod(leaf_shape(leaf)) and (is_choice or feature.dtype == leaf_dtype(leaf))


def _whole_number(key: str) -> Feature:
    return Feature(key, "number", np.dtype(np.int64), ())


# -- values -------------------------------------------------------------------------------------------------------


def _check_there(schema: pa.Schema, keys: Iterable[str], where: str) -> None:
    for key in keys:
        if schema.names.count(key) != 1:
            how = "exists more than once" if key in schema.names else "is missing"
            raise DataError(f"{where}: column `{key}` {how}; there are {', '.join(schema.names)[:500]}.")


def _whole(column: pa.ChunkedArray, name: str, where: str, first: int) -> NDArray[Any]:
    """Convert a column in ``meta/episodes``, whose first row has index ``first``: to int64, but times to float64."""
    values = numbers(one_array(column), name, lambda row: f"{where}: row {first + row}")
    with np.errstate(invalid="ignore", over="ignore"):
        out = values.astype(np.float64 if name.endswith("from_timestamp") else np.int64)
    if values.ndim != 1 or (out != values).any():
        raise DataError(f"{where}: column `{name}` must hold one number in each row: a whole one, except for times.")
    return out


def _images(array: pa.Array, feature: Feature, place: RowPlace) -> NDArray[np.uint8]:
    """Decode images in Parquet: uint8 ``[rows, height, width, channels]``."""
    if pa.types.is_struct(array.type) and array.type.get_field_index("bytes") >= 0:
        array = pc.struct_field(array, "bytes")
    if not is_bytes(array.type):
        raise DataError(f"{place(0)}: column `{feature.key}` is {array.type}, not the bytes of images.")
    height, width, channels = feature.shape
    mode = _MODES[channels]
    out = np.empty((0, *feature.shape), np.uint8)
    for row, value in enumerate(array):
        try:
            if not value.is_valid:
                raise ValueError("its bytes are not in the row; files beside are not read")
            image = Image.open(io.BytesIO(value.as_py()), formats=["PNG", "JPEG"])
            if image.size != (width, height) or image.mode not in (mode, "P"):  # before decoding it
                raise ValueError(f"it is {image.height}x{image.width} {image.mode}, not {height}x{width} {mode}")
            if not row:  # the shape is right, and no larger than an image that is there
                out = np.empty((len(array), *feature.shape), np.uint8)
            out[row] = np.asarray(image if image.mode == mode else image.convert(mode)).reshape(feature.shape)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{place(row)}: the image in column `{feature.key}` can't be decoded ({error}).") from error
    return out


def _decoded(
    path: AnyPath, first: float, last: float, fps: float, shape: tuple[int, ...], where: str
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Decode the frames of a video from ``first`` to ``last`` seconds, at least one; also returns their times.

    ffmpeg may only open this file, as MP4, and returns no more frames than expected, and no larger ones.
    """
    from etude.envs.render import ffmpeg  # only needed for videos

    if not isinstance(path, Path) or not path.is_file():
        why = "is not on this machine: copy the dataset" if not isinstance(path, Path) else "is not there: restore it"
        raise DataError(f"{where}: the video {path} {why}, or leave the camera out.")
    height, width, channels = shape
    try:
        command = [ffmpeg(), "-hide_banner", "-nostats", "-nostdin", "-loglevel", "info", "-copyts", "-noautorotate"]
    except SettingsError as error:
        text = f"is a video, which needs ffmpeg: {how_to_install('video')}; or leave the camera out"
        raise DataError(f"{where} {text} ({error})") from error
    command += ["-max_pixels", str((height + 64) * (width + 64)), "-ss", f"{max(0.0, first - 0.5 / fps):.6f}"]
    command += ["-protocol_whitelist", "file", "-f", "mov", "-i", f"file:{path}", "-map", "0:v:0", "-vf", "showinfo"]
    command += ["-frames:v", str(round((last - first) * fps) + 2), "-fps_mode", "passthrough"]
    command += ["-pix_fmt", _PIXELS[channels], "-f", "rawvideo", "pipe:1"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"{where}: {path} can't be decoded ({error}).") from error
    log = done.stderr.decode(errors="replace")
    base = re.search(r"config in time_base: (\d+)/([1-9]\d*)", log)
    found = re.findall(r"\bn: *\d+ pts: *(-?\d+) .*? s:(\d+)x(\d+) ", log)
    if not base or not found:
        said = (log.strip().splitlines() or [f"exit code {done.returncode}"])[-1][-300:]
        raise DataError(f"{where}: {path} has no frame at {first:.4f} s that can be decoded ({said}).")
    if {(int(h), int(w)) for _, w, h in found} != {(height, width)}:
        raise DataError(f"{where}: {path} has frames of other sizes than {height}x{width}, as {INFO} says.")
    frames = np.frombuffer(done.stdout[: len(done.stdout) // math.prod(shape) * math.prod(shape)], np.uint8)
    times = np.array([int(pts) for pts, *_ in found]) * int(base[1]) / int(base[2])
    count = max(1, min(len(times), len(frames) // math.prod(shape)))
    return frames.reshape(-1, *shape)[:count], times[:count]
