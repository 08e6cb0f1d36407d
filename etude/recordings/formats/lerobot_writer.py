# SPDX-License-Identifier: Apache-2.0
"""Write LeRobot datasets of version 3 in the layout of LeRobot 0.4; images are stored as PNG in Parquet."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.recordings.format import grouped
from etude.recordings.formats.lerobot import EPISODE, FRAME, INDEX, INFO, TASK, TIME, is_image, key_of
from etude.recordings.formats.parquet_files import ParquetFolder
from etude.recordings.layout import Header

FPS: Final = 30
CHUNK_FILES, FILE_MEGABYTES, VIDEO_MEGABYTES = 1000, 100, 200
"""LeRobot's own limits: the number of files in a chunk, and the approximate sizes of files."""
_GROUP_BYTES: Final = 16 << 20
_PATH: Final = "chunk-{chunk_index:03d}/file-{file_index:03d}"
_QUANTILES: Final = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_INDEX: Final = "__index_level_0__"
_PANDAS: Final = {
    "index_columns": [_INDEX],
    "column_indexes": [],
    "columns": [
        {"name": TASK, "field_name": TASK, "pandas_type": "int64", "numpy_type": "int64", "metadata": None},
        {"name": None, "field_name": _INDEX, "pandas_type": "unicode", "numpy_type": "object", "metadata": None},
    ],
    "pandas_version": "2.0.0",
}
"""Metadata that makes pandas, with which LeRobot reads the tasks, use their descriptions as the index."""
_Stats: TypeAlias = dict[str, NDArray[Any]]


class LeRobotWriter:
    """Writes whole episodes, one per segment.

    Args:
        folder: An existing folder.
        header: The header of the recording; tasks, names and robot of an original LeRobot dataset are kept.
        columns: The step columns, all numeric.
        fps: Steps per second, from which times are computed; None takes that of the original dataset, or 30.
        name: The task's description if there is neither a task nor an env id.

    Raises:
        DataError: two columns would have the same name.
    """

    whole_episodes = True
    keeps_time = False
    needs_final_obs = False

    def __init__(self, folder: Path, header: Header, columns: list[str], fps: int | None, name: str) -> None:
        came_from = header.meta.get("lerobot")
        self._said: Mapping[str, Any] = came_from if isinstance(came_from, dict) else {}
        self._folder, self._header, self.notes = folder, header, list[str]()
        known = self._said.get("fps")
        self._fps = fps or (int(known) if isinstance(known, int | float) and known >= 1 else FPS)
        tasks = self._said.get("tasks")
        self._tasks = list(tasks) if tasks and TASK in columns else [header.env or name]
        found = header.leaves()
        own = (TIME, TASK) if tasks else (TIME,)
        self._keys = {name: key_of(name, found.get(name)) for name in columns if name not in own}
        self._keys[col.REWARD] = f"next.{col.REWARD}"
        taken = ["next.done", "next.terminated", "next.truncated", TIME, FRAME, EPISODE, INDEX, TASK]
        twice = {key for key in self._keys.values() if [*taken, *self._keys.values()].count(key) > 1}
        if twice:
            raise DataError(f"several columns would be called {', '.join(sorted(twice))} in LeRobot. Rename them.")
        self._features: dict[str, dict[str, Any]] = {}
        self._stats: dict[str, _Stats] = {}
        self._data, self._meta = _files(folder / "data"), _files(folder / "meta/episodes")
        self._episodes = self._steps = 0

    def write(self, exp: Experience) -> None:
        """Write these episodes."""
        if exp.segments.has_final_obs.any() and not self.notes:
            self.notes.append("what was observed after the last step of an episode has no place in LeRobot: left out")
        row_bytes = sum(column[:1].nbytes for column in exp.steps.values())
        bounds = grouped(exp.lengths, max(1, _GROUP_BYTES // max(1, row_bytes)))
        for first, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            self._write_group(exp[first:stop])

    def _write_group(self, exp: Experience) -> None:
        values = {key: np.asarray(exp.steps[name]) for name, key in self._keys.items()}
        values |= {"next.done": exp.at_ends(exp.segments.done)}
        values |= {f"next.{end}": exp.at_ends(getattr(exp.segments, end)) for end in (col.TERMINATED, col.TRUNCATED)}
        frame, count = exp.t() - np.repeat(exp.segments.t_start, exp.lengths), exp.num_segments
        stamps = exp.steps[TIME] if TIME in exp.steps else frame / self._fps
        task = exp.steps[TASK] if len(self._tasks) > 1 else np.zeros(len(frame), np.int64)
        if len(task) and not 0 <= int(task.min()) <= int(task.max()) < len(self._tasks):
            found = f"{task.min()} to {task.max()}"
            raise DataError(f"column `{TASK}` goes from {found}, but there are {len(self._tasks)} tasks.")
        values |= {TIME: np.asarray(stamps, np.float32), FRAME: frame}
        values |= {EPISODE: self._episodes + exp.segment_of_step(), INDEX: self._steps + np.arange(len(frame))}
        values[TASK] = np.asarray(task, np.int64)
        self._features = self._features or {key: self._feature(key, column) for key, column in values.items()}
        fields = [_field(key, column, self._features[key]["dtype"]) for key, column in values.items()]
        hub = {"info": {"features": {key: _hub(said) for key, said in self._features.items()}}}
        schema = pa.schema([field for field, _ in fields], {"huggingface": json.dumps(hub)})
        place = _place(self._data.number)
        self._data.add(pa.Table.from_arrays([array for _, array in fields], schema=schema))
        stats = {}
        for key, column in values.items():
            as_image = self._features[key]["dtype"] == "image"
            stats[key] = _image_stats(column, exp.offsets) if as_image else _stats_of(column, exp.offsets)
            before = self._stats.get(key)
            parts = stats[key] if before is None else {n: np.concatenate([before[n], v]) for n, v in stats[key].items()}
            self._stats[key] = _joined(parts)
        words = [sorted({self._tasks[i] for i in np.unique(part)}) for part in np.split(task, exp.offsets[1:-1])]
        about = {
            EPISODE: np.arange(count) + self._episodes,
            "tasks": words,
            "length": exp.lengths,
            **{f"data/{name}": np.full(count, at) for name, at in place.items()},
            "dataset_from_index": exp.offsets[:-1] + self._steps,
            "dataset_to_index": exp.offsets[1:] + self._steps,
            **{f"stats/{key}/{n}": v.tolist() for key, own in stats.items() for n, v in own.items()},
            **{f"meta/episodes/{name}": np.full(count, at) for name, at in _place(self._meta.number).items()},
        }
        self._meta.add(pa.table({key: pa.array(column) for key, column in about.items()}))
        self._episodes, self._steps = self._episodes + count, self._steps + len(frame)

    def close(self) -> None:
        """Finish all files, and write the dataset's metadata."""
        self._data.close()
        self._meta.close()
        if not self._steps:
            return
        info = {
            "codebase_version": "v3.0",
            "robot_type": self._said.get("robot_type") or self._header.env,
            "total_episodes": self._episodes,
            "total_frames": self._steps,
            "total_tasks": len(self._tasks),
            "chunks_size": CHUNK_FILES,
            "data_files_size_in_mb": FILE_MEGABYTES,
            "video_files_size_in_mb": VIDEO_MEGABYTES,
            "fps": self._fps,
            "splits": {"train": f"0:{self._episodes}"},
            "data_path": f"data/{_PATH}.parquet",
            "video_path": None,
            "features": self._features,
            "etude": {"spaces": self._header.to_json()["spaces"]},
        }
        (self._folder / INFO).write_text(json.dumps(info, indent=4))
        stats = {key: {n: v[0].tolist() for n, v in own.items()} for key, own in self._stats.items()}
        (self._folder / "meta/stats.json").write_text(json.dumps(stats, indent=4))
        tasks = pa.table({TASK: np.arange(len(self._tasks)), _INDEX: self._tasks})
        tasks = tasks.replace_schema_metadata({"pandas": json.dumps(_PANDAS)})
        pq.write_table(tasks, self._folder / "meta/tasks.parquet")

    def _feature(self, key: str, column: NDArray[Any]) -> dict[str, Any]:
        shape, names = list(column.shape[1:]) or [1], self._said.get("names")
        if is_image(column.dtype, shape):
            return {"dtype": "image", "shape": shape, "names": ["height", "width", "channels"]}
        named = names.get(key) if isinstance(names, dict) else None
        return {"dtype": str(column.dtype), "shape": shape, "names": named}


def _files(folder: Path) -> ParquetFolder:
    def path(number: int) -> Path:
        return folder / f"{_PATH.format(**_place(number))}.parquet"

    return ParquetFolder(path, FILE_MEGABYTES * 2**20, compression="snappy")


def _place(number: int) -> dict[str, int]:
    """The place of a file in LeRobot's numbered folders."""
    chunk, file = divmod(number, CHUNK_FILES)
    return {"chunk_index": chunk, "file_index": file}


# -- columns ------------------------------------------------------------------------------------------------------


def _field(key: str, column: NDArray[Any], dtype: str) -> tuple[pa.Field, pa.Array]:
    if dtype == "image":
        images = [{"bytes": _png(image), "path": f"frame-{row:06d}.png"} for row, image in enumerate(column)]
        array = pa.array(images, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    else:
        shape = [] if column.shape[1:] == (1,) else column.shape[1:]
        array = pa.array(np.ascontiguousarray(column).reshape(-1))
        for size in reversed(shape):
            if len(shape) == 1:
                array = pa.FixedSizeListArray.from_arrays(array, size)
            else:
                starts = np.arange(0, len(array) + 1, size, dtype=np.int32)
                array = pa.ListArray.from_arrays(starts, array)
    return pa.field(key, array.type), array


def _png(image: NDArray[np.uint8]) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image).save(out, "png", compress_level=1)
    return out.getvalue()


def _hub(said: Mapping[str, Any]) -> dict[str, Any]:
    """A feature as described by Hugging Face's ``datasets``."""
    shape, value = said["shape"], {"dtype": said["dtype"], "_type": "Value"}
    if said["dtype"] == "image":
        return {"_type": "Image"}
    if len(shape) > 1:
        return {"shape": shape, "dtype": said["dtype"], "_type": f"Array{len(shape)}D"}
    return value if shape == [1] else {"feature": value, "length": shape[0], "_type": "List"}


# -- statistics ---------------------------------------------------------------------------------------------------


def _stats_of(values: NDArray[Any], offsets: NDArray[np.int64]) -> _Stats:
    """LeRobot's statistics of a column, with a row per episode: for the last axis, over all others."""
    flat = values.reshape(-1, values.shape[-1] if values.ndim > 1 else 1)
    flat = flat.astype(np.float64) if flat.dtype == np.uint64 else flat  # Arrow makes int64 of Python's whole numbers
    bounds = offsets * (len(flat) // max(1, len(values)))
    number, first = np.diff(bounds)[:, None], bounds[:-1]
    exact = flat.astype(np.float64)
    mean = np.add.reduceat(exact, first) / number
    std = np.sqrt(np.add.reduceat((exact - np.repeat(mean, number[:, 0], axis=0)) ** 2, first) / number)
    of = np.repeat(np.arange(len(first)), number[:, 0])
    rising = np.stack([flat[np.lexsort((column, of)), j] for j, column in enumerate(flat.T)], axis=1)
    out = {"min": rising[first], "max": rising[bounds[1:] - 1], "mean": mean, "std": std}
    out["count"] = np.diff(offsets)[:, None]
    for name, share in _QUANTILES.items():
        at = first + np.maximum(np.ceil(share * number[:, 0]).astype(np.int64) - 1, 0)  # without interpolation
        out[name] = rising[at].astype(np.float64)
    return out


def _image_stats(images: NDArray[np.uint8], offsets: NDArray[np.int64]) -> _Stats:
    """The statistics of images by channel, scaled to 0 to 1, from as many pixels as LeRobot uses."""
    out = []
    for first, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        count = max(min(100, stop - first), min(int((stop - first) ** 0.75), 10_000))
        size = max(images.shape[1:3])
        step = 1 if size < 300 else size // 150
        some = images[np.round(np.linspace(first, stop - 1, count)).astype(int), ::step, ::step] / 255
        own = _stats_of(some.reshape(-1, 3), np.array([0, some[..., 0].size]))
        out.append({name: v[..., None, None] for name, v in own.items()} | {"count": np.array([[count]])})
    return {name: np.concatenate([own[name] for own in out]) for name in out[0]}


def _joined(stats: _Stats) -> _Stats:
    """Combine the statistics of all episodes as LeRobot does: quantiles are means, weighted by length."""
    weight = stats["count"].reshape(-1, *[1] * (stats["mean"].ndim - 1))
    total = weight.sum(axis=0)
    out = {name: (stats[name] * weight).sum(axis=0) / total for name in ("mean", *_QUANTILES)}
    out["std"] = np.sqrt(((stats["std"] ** 2 + (stats["mean"] - out["mean"]) ** 2) * weight).sum(axis=0) / total)
    out |= {"min": stats["min"].min(axis=0), "max": stats["max"].max(axis=0), "count": stats["count"].sum(axis=0)}
    return {name: value[None] for name, value in out.items()}
