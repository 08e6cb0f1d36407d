# SPDX-License-Identifier: Apache-2.0
"""LeRobot datasets: those that its own writer has made, others, what is broken, and what Etude writes."""

import io
import itertools
import json
import pickle
import shutil
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import gymnasium as gym
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from some_written import assert_equal, converted, episodes, recorded, spaces_of

from etude.cli.main import main
from etude.errors import DataError, SettingsError
from etude.experience import Experience, Segments
from etude.recordings import Recording, RecordingWriter, convert, footers, merge_recordings, validate
from etude.recordings.formats import lerobot
from etude.spaces import NamedDiscrete

MADE = Path(__file__).parent / "lerobot_v3"
BOX = gym.spaces.Box(-1, 1, (2,), np.float32)
MOVE = gym.spaces.Discrete(3)
IMAGE = gym.spaces.Box(0, 255, (12, 16, 3), np.uint8)
COLUMNS = {
    "obs/state": "observation.state",
    "obs/environment_state": "observation.environment_state",
    "obs/images/top": "observation.images.top",
    "obs/images/wrist": "observation.images.wrist",
    "obs/mode": "observation.mode",
    "obs/grid": "observation.grid",
    "reward": "next.reward",
    "next/success": "next.success",
}


def read_by_lerobot(name: str) -> dict[str, np.ndarray]:
    """What LeRobot's own reader gave; see ``lerobot_v3/make.py``."""
    with np.load(MADE / "wanted.npz") as found:
        return {key.removeprefix(f"{name}/"): found[key] for key in found.files if key.startswith(f"{name}/")}


# -- made by LeRobot ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["arms", "cameras"])
def test_every_value_is_that_of_lerobots_own_reader(name: str) -> None:
    recording, wanted = Recording.open(MADE / name), read_by_lerobot(name)
    assert recording.format == "lerobot"
    exp = recording.read()
    for column, values in exp.steps.items():
        if column == "reward" and name == "cameras":
            assert not values.any()  # it has none
            continue
        given = wanted[COLUMNS.get(column, column)]
        assert values.dtype == given.dtype or given.dtype == np.float32 or values.dtype in (object, np.int16), column
        np.testing.assert_array_equal(values.astype(given.dtype).reshape(given.shape), given, err_msg=column)
    tasks = np.array(recording.meta["lerobot"]["tasks"])
    assert tasks[exp.steps["task_index"]].tolist() == wanted["task"].tolist()
    ids = np.repeat(exp.segments.episode_id, exp.lengths)
    assert ids.tolist() == wanted["episode_index"].astype(str).tolist()
    assert exp.t().tolist() == wanted["frame_index"].tolist()


def test_what_a_dataset_says_of_itself() -> None:
    recording = Recording.open(MADE / "arms")
    assert (recording.num_episodes, recording.num_steps, recording.env) == (5, 49, "so100")
    assert len(recording.files) == 5
    assert recording.obs_space["state"] == gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    assert recording.obs_space["environment_state"].dtype == np.float64
    said = recording.meta["lerobot"]
    assert (said["fps"], said["robot_type"], said["codebase_version"]) == (10, "so100", "v3.0")
    assert said["names"]["observation.state"] == ["shoulder", "elbow", "wrist"]
    assert sorted(said["tasks"]) == ["open the drawer", "stack the cups"]


def test_spaces_are_inferred_by_the_one_rule() -> None:
    recording = Recording.open(MADE / "cameras")
    assert recording.action_space == gym.spaces.Discrete(4)
    assert recording.obs_space["mode"] == gym.spaces.Discrete(3)
    assert recording.obs_space["images"]["wrist"] == gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
    assert recording.obs_space["grid"].shape == (2, 3)
    assert recording.obs_space["state"].shape == (1,)
    assert set(recording.columns) >= {"is_pressed", "said", "timestamp", "task_index"}


def test_success_tells_ends_apart() -> None:
    ends = Recording.open(MADE / "arms").read().segments
    assert ends.terminated.tolist() == [True, False, True, False, True]
    assert ends.truncated.tolist() == [False, True, False, True, False]
    assert not ends.has_final_obs.any()


def test_without_flags_episodes_are_truncated() -> None:
    ends = Recording.open(MADE / "cameras").read().segments
    assert ends.truncated.all()
    assert not ends.terminated.any()


def test_frames_of_videos(tmp_path: Path) -> None:
    recording, wanted = Recording.open(MADE / "films"), read_by_lerobot("films")
    front = recording.read().steps["obs/images/front"]
    bars = (front[:, 4, :, :].min(axis=-1) > 128).sum(axis=1)
    assert np.abs(bars - 4 * (wanted["frame_index"] + 1)).max() <= 1  # drawn on each frame: as many fours of pixels
    assert np.abs(front[[0, 8, 9, 22]].astype(int) - wanted["observation.images.front"]).max() <= 2
    shutil.copytree(MADE / "films", tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "videos")
    without = Recording.open(tmp_path / "a")
    assert next(without.batches(4, columns=["obs/state", "action"]))["obs/state"].shape == (4, 2)
    with pytest.raises(
        DataError, match=r"row group 0, row 0: column `observation.images.front`: the video .* not ther"
    ):
        without.read()


def test_videos_without_ffmpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    recording = Recording.open(MADE / "films")
    assert recording.read(columns=["obs/state"]).num_steps == 23
    with pytest.raises(DataError, match=r"is a video, which needs ffmpeg: pip install '\.\[video\]' in the clone"):
        recording.read()


def test_videos_of_another_size_or_time(tmp_path: Path) -> None:
    shutil.copytree(MADE / "films", tmp_path / "a")
    change_info(tmp_path / "a", lambda info: info["features"]["observation.images.front"].update(shape=[24, 64, 3]))
    with pytest.raises(DataError, match="has frames of other sizes than 24x64"):
        Recording.open(tmp_path / "a").read()
    change_info(tmp_path / "a", lambda info: info["features"]["observation.images.front"].update(shape=[48, 64, 3]))
    path = tmp_path / "a" / "meta/episodes/chunk-000/file-000.parquet"
    change(path, "videos/observation.images.front/from_timestamp", [0.0, 3.5])
    with pytest.raises(DataError, match=r"file-000.mp4 has no frame at 3.5"):
        Recording.open(tmp_path / "a").read()


def test_no_path_in_the_metadata_is_followed(tmp_path: Path) -> None:
    shutil.copytree(MADE / "films", tmp_path / "a")
    outside = {"video_path": "../{video_key}.mp4", "data_path": "../{chunk_index}.parquet"}
    change_info(tmp_path / "a", lambda info: info.update(outside))
    exp, own = Recording.open(tmp_path / "a").read(), Recording.open(MADE / "films").read()
    for name, values in own.steps.items():  # files are found by LeRobot's layout of a folder
        np.testing.assert_array_equal(exp.steps[name], values)


@pytest.mark.parametrize("key", ["observation.images/../../front", "observation...front"])
def test_no_path_in_the_name_of_a_camera_is_followed(tmp_path: Path, key: str) -> None:
    shutil.copytree(MADE / "films", tmp_path / "a")
    front = "observation.images.front"
    change_info(tmp_path / "a", lambda info: info["features"].update({key: info["features"].pop(front)}))
    recording = Recording.open(tmp_path / "a")
    assert key in recording.meta["dropped"]
    assert recording.read().num_steps == 23


# -- others -------------------------------------------------------------------------------------------------------


def change_info(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "meta/info.json"
    info = json.loads(path.read_text())
    edit(info)
    path.write_text(json.dumps(info))


def change(path: Path, column: str, values: Any, **options: Any) -> None:
    table = pq.read_table(path)
    table = table.set_column(
        table.column_names.index(column), column, values if isinstance(values, pa.Array) else [values]
    )
    pq.write_table(table, path, **options)


def write(folder: Path, lengths: list[int], features: dict[str, Any], columns: dict[str, Any], **options: Any) -> Path:
    """A dataset by LeRobot's documented layout, written with bare pyarrow."""
    rows = sum(lengths)
    number = {"dtype": "int64", "shape": [1], "names": None}
    features = {**features, "timestamp": number | {"dtype": "float32"}, "frame_index": number, "episode_index": number}
    features |= {"index": number, "task_index": number}
    frame = np.concatenate([np.arange(n) for n in lengths])
    keys = {"timestamp": (frame / 10).astype(np.float32), "frame_index": frame, "index": np.arange(rows)}
    keys |= {"episode_index": np.repeat(np.arange(len(lengths)), lengths), "task_index": np.zeros(rows, np.int64)}
    info = {"codebase_version": "v3.0", "fps": 10, "features": features, "total_frames": rows, "robot_type": None}
    info |= {"total_episodes": len(lengths), "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"}
    for name in ("data/chunk-000", "meta/episodes/chunk-000"):
        (folder / name).mkdir(parents=True)
    pq.write_table(pa.table({**columns, **keys}), folder / "data/chunk-000/file-000.parquet", **options)
    about = {"episode_index": np.arange(len(lengths)), "length": lengths}
    pq.write_table(pa.table(about), folder / "meta/episodes/chunk-000/file-000.parquet")
    (folder / "meta/info.json").write_text(json.dumps(info))
    return folder


def plain(folder: Path, lengths: list[int], more: dict[str, Any] | None = None, **options: Any) -> Path:
    rows = sum(lengths)
    features = {"observation.state": {"dtype": "float32", "shape": [2], "names": None}}
    features["action"] = {"dtype": "float32", "shape": [1], "names": ["x"]}
    state = [[float(i), float(-i)] for i in range(rows)]
    columns = {
        "observation.state": pa.array(state, pa.list_(pa.float32())),
        "action": np.arange(rows, dtype=np.float32),
    }
    for name, values in (more or {}).items():
        columns[name] = values
        kind = "string" if isinstance(values[0], str) else str(np.asarray(values).dtype)
        features[name] = {"dtype": kind, "shape": [1], "names": None}
    return write(folder, lengths, features, columns, **options)


def test_one_observation_is_no_dict(tmp_path: Path) -> None:
    recording = Recording.open(plain(tmp_path / "a", [3, 2]))
    assert recording.obs_space == gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    assert recording.action_space == gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    assert recording.read().steps["obs"][:, 0].tolist() == [0, 1, 2, 3, 4]
    assert validate(tmp_path / "a").ok


def test_episodes_span_row_groups_and_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Recording.open(plain(tmp_path / "a", [7, 30, 1, 12], row_group_size=4)).read()
    monkeypatch.setattr("etude.recordings.format.MAX_ROWS", 8)
    monkeypatch.setattr(lerobot, "_LEAST_ROWS", 1)
    recording = Recording.open(tmp_path / "a")
    assert recording.num_parts > 5
    assert max(recording.part(k).num_steps for k in range(recording.num_parts)) <= 8
    assert_equal(recording.read(), whole)
    cut = recording.part(1)  # of the second episode, which goes on
    assert cut.segments.has_final_obs.tolist() == [True]
    np.testing.assert_array_equal(cut.final_obs["obs"][0], recording.part(2).steps["obs"][0])


def test_an_episode_that_spans_files(tmp_path: Path) -> None:
    whole = Recording.open(plain(tmp_path / "a", [5, 9])).read()
    path = tmp_path / "a/data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(0, 8), path)
    (tmp_path / "a/data/chunk-001").mkdir()
    pq.write_table(table.slice(8), tmp_path / "a/data/chunk-001/file-000.parquet")
    recording = Recording.open(tmp_path / "a")
    assert_equal(recording.read(), whole)
    assert recording.num_parts == 2


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_one_file_that_cant_be_read_does_not_cost_the_others(tmp_path: Path, broken: int) -> None:
    """Whole episodes are found in the files after it as well; one that it cuts is told of."""
    lengths = [5, 9, 4, 6]
    ends = (np.arange(24) + 1 == np.repeat(np.cumsum(lengths), lengths)).astype(np.int64)
    whole = Recording.open(plain(tmp_path / "a", lengths, {"next.terminated": ends})).read()
    folder = tmp_path / "a/data/chunk-000"
    table = pq.read_table(folder / "file-000.parquet")
    bounds = [0, 5, 16, 24]
    for k, (start, stop) in enumerate(itertools.pairwise(bounds)):
        pq.write_table(table.slice(start, stop - start), folder / f"file-{k:03d}.parquet")
    path = folder / f"file-{broken:03d}.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=path.name):
        Recording.open(tmp_path / "a").read()
    recording = Recording.open(tmp_path / "a", on_bad="skip")
    read = recording.read()
    lost = {0: [0], 1: [1, 2], 2: [2, 3]}[broken]  # the last two rows of episode 2 are in the last file
    assert recording.met["unreadable"] == 1
    assert recording.unread_parts == 1
    for number in {0, 1, 2, 3} - {*lost}:
        at = np.flatnonzero(read.segments.episode_id == str(number))
        assert_equal(read.select(at), whole.select(np.array([number])))
    report = validate(tmp_path / "a")
    assert [problem.file for problem in report.errors if problem.kind == "unreadable"] == [str(path)]
    assert report.rows == 24 - (bounds[broken + 1] - bounds[broken])


@pytest.mark.parametrize(
    ("flags", "terminated", "truncated"),
    [
        ({}, [0, 0], [1, 1]),
        ({"next.done": [0, 0, 1, 0, 1]}, [1, 1], [0, 0]),
        ({"next.done": [0, 0, 1, 0, 0]}, [1, 0], [0, 1]),
        ({"next.done": [0, 0, 1, 0, 1], "next.success": [1, 1, 0, 0, 1]}, [0, 1], [1, 0]),
        ({"next.done": [0, 0, 1, 0, 1], "next.truncated": [0, 0, 0, 0, 1]}, [1, 0], [0, 1]),
        ({"next.terminated": [0, 0, 1, 0, 0]}, [1, 0], [0, 1]),
        ({"terminated": [0, 0, 1, 0, 1], "truncated": [0, 0, 1, 0, 0]}, [1, 1], [1, 0]),
        ({"next.success": [0, 1, 1, 1, 0]}, [1, 0], [0, 1]),
        ({"next.truncated": [0, 0, 0, 0, 1]}, [0, 0], [1, 1]),
    ],
)
def test_where_episodes_end(
    tmp_path: Path, flags: dict[str, list[int]], terminated: list[int], truncated: list[int]
) -> None:
    found = Recording.open(plain(tmp_path / "a", [3, 2], {n: np.array(v, bool) for n, v in flags.items()}))
    ends = found.read().segments
    assert (ends.terminated.tolist(), ends.truncated.tolist()) == (terminated, truncated)


def test_steps_after_the_end_are_named(tmp_path: Path) -> None:
    path = plain(tmp_path / "a", [4, 2], {"next.done": np.array([0, 1, 0, 1, 0, 1], bool)})
    with pytest.raises(DataError, match=r"row group 0, row 2"):
        Recording.open(path).read()
    assert "after_end" in validate(path).summary()
    assert Recording.open(path, on_bad="repair").read().num_steps == 4


def test_names_of_features(tmp_path: Path) -> None:
    rows = {name: np.arange(4.0) for name in ("action.more", "observation.images", "t", "complementary_info.gain")}
    path = plain(tmp_path / "a", [4], {**rows, "observation.images.top": np.arange(4.0), "note": ["a", "b", "c", "d"]})
    recording = Recording.open(path)
    assert set(recording.columns) == {
        *("action", "obs/state", "obs/images", "obs/images_top", "reward", "timestamp", "task_index"),
        *("complementary_info/gain", "note"),
    }
    assert set(recording.meta["dropped"]) == {"action.more", "t"}
    assert recording.read().steps["note"].tolist() == ["a", "b", "c", "d"]


def test_parts_of_an_action(tmp_path: Path) -> None:
    path = plain(tmp_path / "a", [3], {"action.arm": np.arange(3.0), "action.grip": np.array([0, 2, 1])})
    change_info(path, lambda info: info["features"].pop("action"))
    space = Recording.open(path).action_space
    assert space["grip"] == gym.spaces.Discrete(3)
    assert space["arm"].dtype == np.float64


@pytest.mark.parametrize("axes", [["height", "width", "channels"], ["channels", "height", "width"], None])
def test_images_are_height_width_channels(tmp_path: Path, axes: list[str] | None) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (2, 5, 6, 3), np.uint8)
    packed = []
    for picture in pictures:
        out = io.BytesIO()
        Image.fromarray(picture).save(out, "png")
        packed.append({"bytes": out.getvalue(), "path": None})
    path = plain(tmp_path / "a", [2], {"observation.image": [1.0, 2.0]})
    change(path / "data/chunk-000/file-000.parquet", "observation.image", pa.array(packed))
    shape = [3, 5, 6] if axes and axes[0] == "channels" else [5, 6, 3]
    image = {"dtype": "image", "shape": shape, "names": axes}
    change_info(path, lambda info: info["features"].update({"observation.image": image}))
    np.testing.assert_array_equal(Recording.open(path).read().steps["obs/image"], pictures)
    change_info(path, lambda info: info["features"]["observation.image"].update(shape=[3, 3, 3], names=None))
    with pytest.raises(DataError, match=r"row group 0, row 0: the image in column `observation.image` .*it is 5x6"):
        Recording.open(path).read()


def test_a_dataset_can_be_pickled() -> None:
    dataset = lerobot.LeRobot(MADE / "cameras")
    contents = dataset.describe()
    again, (unit,) = pickle.loads(pickle.dumps((dataset, contents.units)))  # noqa: S301 - made above
    assert_equal(again.read(unit, contents.columns), dataset.read(contents.units[0], contents.columns))


def test_videos_behind_a_url() -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(MADE / "films"), "/films", recursive=True)
    films = Recording.open("memory://films")
    assert films.read(columns=["obs/state", "action"]).num_steps == 23
    with pytest.raises(DataError, match="is not on this machine: copy the dataset, or leave the camera out"):
        films.read()
    memory.rm("/films", recursive=True)


# -- what is broken -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["v2.0", "v2.1", "v1.6"])
def test_older_versions_are_refused_with_the_converter(tmp_path: Path, version: str) -> None:
    path = plain(tmp_path / "a", [2])
    change_info(path, lambda info: info.update(codebase_version=version))
    with pytest.raises(
        DataError, match=rf"`codebase_version` is {version}, but version 3 is read.*convert_dataset_v21_to_v30"
    ):
        Recording.open(path)


def test_broken_values_are_named(tmp_path: Path) -> None:
    path = plain(tmp_path / "a", [6, 4], row_group_size=3)
    data = path / "data/chunk-000/file-000.parquet"
    state = pq.read_table(data)["observation.state"].to_pylist()
    bad = pa.array([None if i == 7 else row for i, row in enumerate(state)], pa.list_(pa.float32()))
    change(data, "observation.state", bad, row_group_size=3)
    with pytest.raises(DataError, match=r"file-000.parquet: row group 2, row 7: column `observation.state` is empty"):
        Recording.open(path).read()
    bad = pa.array([[*row, 1.0] if i == 4 else row for i, row in enumerate(state)], pa.list_(pa.float32()))
    change(data, "observation.state", bad, row_group_size=3)
    with pytest.raises(DataError, match=r"row group 1, row 4: column `observation.state` has 3 numbers, but 2"):
        Recording.open(path).read()
    bad = pa.array([[np.nan, 1.0] if i == 5 else row for i, row in enumerate(state)], pa.list_(pa.float32()))
    change(data, "observation.state", bad, row_group_size=3)
    with pytest.raises(DataError, match=r"row group 1, row 5: column `obs` holds NaN"):
        Recording.open(path).read()
    (problem,) = [problem for problem in validate(path).problems if not problem.harmless]
    assert (problem.kind, problem.file, problem.row_group, problem.row, problem.column) == (
        "nan",
        str(data),
        1,
        5,
        "obs",
    )


def test_one_image_that_cant_be_read_costs_its_episode(tmp_path: Path) -> None:
    shutil.copytree(MADE / "cameras", tmp_path / "a")
    data = tmp_path / "a/data/chunk-000/file-000.parquet"
    images = pq.read_table(data)["observation.images.top"].to_pylist()
    images[2]["bytes"] = images[2]["bytes"][:60]
    change(data, "observation.images.top", pa.array(images))
    with pytest.raises(DataError, match=r"row group 0, row 2: the image in column `observation.images.top` can't be"):
        Recording.open(tmp_path / "a").read()
    mended = Recording.open(tmp_path / "a", on_bad="repair")
    exp = mended.read()
    assert (exp.segments.episode_id.tolist(), exp.num_steps) == (["1"], 6)
    assert mended.left_out == {"unreadable": 4}
    exp = mended.read(next_obs=True)
    assert exp.num_steps == 5
    assert mended.left_out == {"no_final_obs": 1, "unreadable": 4}
    assert exp.segments.has_final_obs.all()  # what was observed at the step that is left out
    assert Recording.open(tmp_path / "a").read(columns=["obs/images/wrist"]).num_steps == 10
    (problem,) = validate(tmp_path / "a").errors
    assert (problem.kind, problem.row, problem.count) == ("unreadable", 0, 4)


def test_a_row_group_that_cant_be_decoded_is_named(tmp_path: Path) -> None:
    path = plain(tmp_path / "a", [6, 6, 6], row_group_size=6, write_page_checksum=True, use_dictionary=False)
    data = path / "data/chunk-000/file-000.parquet"
    chunk = pq.read_metadata(data).row_group(1).column(0)
    whole = bytearray(data.read_bytes())
    whole[chunk.data_page_offset + chunk.total_compressed_size - 4] ^= 0xFF
    data.write_bytes(whole)
    with pytest.raises(DataError, match="file-000.parquet: row group 1 can't be decoded"):
        Recording.open(path).read()
    assert Recording.open(path).read(columns=["action"]).num_steps == 18


def test_lost_rows_are_noticed(tmp_path: Path) -> None:
    shutil.copytree(MADE / "arms", tmp_path / "a")
    (tmp_path / "a/data/chunk-001/file-001.parquet").unlink()
    with pytest.raises(DataError, match="total_frames is 49, but 40 are there"):
        Recording.open(tmp_path / "a").read()
    assert "lost_rows" in validate(tmp_path / "a").summary()


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda info: info.update(codebase_version=None), "`codebase_version` is None"),
        (lambda info: info.update(codebase_version="v4.0"), "`codebase_version` is v4.0"),
        (lambda info: info.update(fps=0), "`fps` is '0'"),
        (lambda info: info.update(features=[]), "`features` is not an object"),
        (lambda info: info["features"].pop("action"), "no feature such as `action`"),
        (lambda info: info["features"]["action"].update(shape=[7]), "column `action` has rows of"),
        (lambda info: info["features"]["action"].update(shape=[2**40]), "no feature such as `action`"),
        (lambda info: info["features"].update(other=info["features"]["action"]), "column `other` is missing"),
    ],
)
def test_broken_descriptions(tmp_path: Path, edit: Callable[[dict[str, Any]], Any], said: str) -> None:
    path = plain(tmp_path / "a", [2])
    change_info(path, edit)
    with pytest.raises(DataError, match=said):
        Recording.open(path).read()


def test_json_that_is_too_deep(tmp_path: Path) -> None:
    path = plain(tmp_path / "a", [2])
    (path / "meta/info.json").write_text('{"a":' + "[" * 100_000)
    with pytest.raises(DataError, match=r"info.json: can't be read as JSON"):
        Recording.open(path)


# -- written by Etude ---------------------------------------------------------------------------------------------


def held(exp: Experience) -> Experience:
    """What LeRobot has a place for."""
    ids = np.array([str(i) for i in range(exp.num_segments)], object)
    segments = exp.segments.replace(episode_id=ids, has_final_obs=False)
    finals = {name: np.zeros_like(values) for name, values in exp.final_obs.items()}
    return Experience(exp.steps, exp.offsets, segments, finals)


def without(exp: Experience, *names: str) -> Experience:
    steps = {name: values for name, values in exp.steps.items() if name not in names}
    return Experience(steps, exp.offsets, exp.segments, exp.final_obs)


@settings(deadline=None, max_examples=25)
@given(spaces_of(), spaces_of(), st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_episodes_come_back_as_they_were(obs: gym.Space, action: gym.Space, lengths: list[int]) -> None:
    exp = episodes(obs, action, lengths)
    with tempfile.TemporaryDirectory() as folder:
        written = converted(Path(folder), "lerobot", obs, action, exp)
        assert written.format == "lerobot"
        assert (written.obs_space, written.action_space) == (obs, action)
        assert_equal(without(written.read(), "timestamp", "task_index"), held(exp))


def test_columns_that_are_not_read_again_are_noted(tmp_path: Path) -> None:
    box = gym.spaces.Box(-1, 1, (2,))
    exp = held(episodes(box, box, [4])).with_steps(**{name: np.arange(4.0) for name in ("a", "b", "a/b", "b.c", "")})
    written = converted(tmp_path, "lerobot", box, box, exp)
    assert {"a", "b"} <= {*written.columns}
    assert {*written.notes[-3:]} == {
        "column `a.b` is written, but Etude does not read it: its name is that of another column",
        "column `b.c` is written, but Etude does not read it: its name is that of another column",
        "column `` is written, but Etude does not read it: its name can't be a column's name",
    }


def test_images_tasks_and_names_are_kept(tmp_path: Path) -> None:
    first = Recording.open(MADE / "cameras")
    again = convert(first, tmp_path / "a", "lerobot")
    assert again.notes == ("column `said` holds text, which lerobot has no place for: left out",)
    assert_equal(again.read(), without(first.read(), "said"))
    arms = convert(MADE / "arms", tmp_path / "b", "lerobot")
    assert_equal(arms.read(), Recording.open(MADE / "arms").read())
    said, was = arms.meta["lerobot"], Recording.open(MADE / "arms").meta["lerobot"]
    assert {key: said[key] for key in ("fps", "robot_type", "tasks")} == {
        k: was[k] for k in ("fps", "robot_type", "tasks")
    }
    assert said["names"]["observation.state"] == ["shoulder", "elbow", "wrist"]


def test_statistics_are_those_of_lerobot(tmp_path: Path) -> None:
    for name in ("arms", "cameras"):
        convert(MADE / name, tmp_path / name, "lerobot")
        wanted = json.loads((MADE / name / "meta/stats.json").read_text())
        found = json.loads((tmp_path / name / "meta/stats.json").read_text())
        for key, stats in wanted.items():
            for stat, value in stats.items():
                if "images" in key and stat == "std":
                    continue  # LeRobot 0.4.4 squares bytes as bytes there
                given, right = np.array(found[key][stat], float), np.array(value, float)
                np.testing.assert_allclose(given, right, rtol=1e-3, atol=5e-3, err_msg=f"{key} {stat}")


def test_files_roll_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from etude.recordings.formats import lerobot_writer

    monkeypatch.setattr(lerobot_writer, "FILE_MEGABYTES", 0.002)
    monkeypatch.setattr(lerobot_writer, "CHUNK_FILES", 2)
    monkeypatch.setattr(lerobot_writer, "_GROUP_BYTES", 2000)
    exp = episodes(BOX, MOVE, [30, 40, 20, 50])
    written = converted(tmp_path, "lerobot", BOX, MOVE, exp)
    assert_equal(without(written.read(), "timestamp", "task_index"), held(exp))
    assert [str(file.relative_to(written.path)) for file in written.files][:3] == [
        *("data/chunk-000/file-000.parquet", "data/chunk-000/file-001.parquet", "data/chunk-001/file-000.parquet"),
    ]


def test_times_by_frames_a_second(tmp_path: Path) -> None:
    own = recorded(tmp_path / "own", BOX, MOVE, episodes(BOX, MOVE, [4]), env="CartPole-v1")
    found = convert(own, tmp_path / "a", "lerobot", fps=5)
    np.testing.assert_allclose(found.read().steps["timestamp"], [0, 0.2, 0.4, 0.6], rtol=1e-6)
    assert found.meta["lerobot"]["tasks"] == ["CartPole-v1"]
    assert found.env == "CartPole-v1"
    assert convert(own, tmp_path / "b", "lerobot").meta["lerobot"]["fps"] == 30
    assert main(["data", "convert", str(own.path), str(tmp_path / "c"), "--format", "lerobot", "--fps", "7"]) == 0
    assert Recording.open(tmp_path / "c").meta["lerobot"]["fps"] == 7
    for options in ({"format": "lerobot", "fps": 0}, {"format": "minari", "fps": 5}):
        with pytest.raises(SettingsError, match="fps is"):
            convert(own, tmp_path / "d-v0", **options)


def test_whole_numbers_beyond_those_of_int64_are_written(tmp_path: Path) -> None:
    exp = episodes(BOX, MOVE, [2, 1])
    hashes = np.array([2**64 - 1, 5, 2**63], np.uint64)
    written = converted(tmp_path, "lerobot", BOX, MOVE, exp.with_steps(hash=hashes))
    assert written.read().steps["hash"].tolist() == hashes.tolist()
    assert json.loads((written.path / "meta/stats.json").read_text())["hash"]["max"] == [2.0**64]


def test_several_agents_are_refused(tmp_path: Path) -> None:
    exp = episodes(BOX, MOVE, [4, 4], episode_id=["e", "e"], agent_id=["a", "b"], terminated=True, truncated=False)
    own = recorded(tmp_path / "own", BOX, MOVE, exp)
    with pytest.raises(DataError, match="several agents .*Keep Etude's format, or first write the steps of one agent"):
        convert(own, tmp_path / "a", "lerobot")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own"]


def test_columns_that_would_share_a_name(tmp_path: Path) -> None:
    obs = gym.spaces.Dict({"a": gym.spaces.Dict({"b": BOX}), "a.b": BOX})
    own = recorded(tmp_path / "own", obs, MOVE, episodes(obs, MOVE, [4]))
    with pytest.raises(DataError, match=r"several columns would be called observation.a.b"):
        convert(own, tmp_path / "a", "lerobot")


def test_datasets_are_merged(tmp_path: Path) -> None:
    path = plain(tmp_path / "a", [3, 2])
    merge_recordings([path, path], tmp_path / "both")
    assert Recording.open(tmp_path / "both").num_episodes == 4


def test_lerobot_itself_reads_what_is_written(tmp_path: Path) -> None:
    """Needs `pip install lerobot`, which wants other versions of what Etude uses: an environment of its own."""
    datasets = pytest.importorskip("lerobot.datasets.lerobot_dataset", reason="lerobot is not installed")
    space = gym.spaces.Dict(
        {"images": gym.spaces.Dict({"top": IMAGE}), "state": BOX, "grid": gym.spaces.Box(0, 9, (2, 3))}
    )
    exp = episodes(space, BOX, [3, 12, 1])
    convert(recorded(tmp_path / "own", space, BOX, exp, env="Arm-v0"), tmp_path / "a", "lerobot", fps=10)
    found = datasets.LeRobotDataset("me/a", root=tmp_path / "a")
    assert (found.num_episodes, len(found), found.fps) == (3, 16, 10)
    for i in range(16):
        row = {name: value.numpy() for name, value in found[i].items() if not isinstance(value, str)}
        assert found[i]["task"] == "Arm-v0"
        image = np.round(row["observation.images.top"] * 255).astype(np.uint8).transpose(1, 2, 0)
        np.testing.assert_array_equal(image, exp.steps["obs/images/top"][i])
        names = {"observation.state": "obs/state", "observation.grid": "obs/grid", "action": "action", "logp": "logp"}
        for key, column in names.items():
            np.testing.assert_array_equal(row[key], exp.steps[column][i], err_msg=key)
        assert row["next.reward"] == np.float32(exp.steps["reward"][i])
        assert (row["frame_index"], row["index"]) == (exp.t()[i], i)
    pair = datasets.LeRobotDataset("me/a", root=tmp_path / "a", episodes=[1], delta_timestamps={"action": [0, 0.1]})
    np.testing.assert_array_equal(pair[0]["action"].numpy(), exp.steps["action"][3:5])
    copy = datasets.LeRobotDataset.create("me/b", 10, _features(found.features), root=tmp_path / "b", use_videos=False)
    assert copy.meta.info["features"]["action"]["shape"] == (2,)


def _features(features: dict[str, Any]) -> dict[str, Any]:
    """Those that a user gives."""
    own = ("timestamp", "frame_index", "episode_index", "index", "task_index")
    return {key: feature for key, feature in features.items() if key not in own}


def test_a_huge_shape_takes_no_memory(tmp_path: Path) -> None:
    shutil.copytree(MADE / "cameras", tmp_path / "a")
    key = "observation.images.top"
    change_info(tmp_path / "a", lambda info: info["features"][key].update(shape=[3000, 3000, 3]))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=f"`{key}` can't be decoded .it is 12x16 RGB, not 3000x3000 RGB"):
            Recording.open(tmp_path / "a").read()
        assert tracemalloc.get_traced_memory()[1] < 250e6  # the bounds of the space take some
    finally:
        tracemalloc.stop()


def test_what_an_export_can_not_keep_is_refused_or_noted(tmp_path: Path) -> None:
    rows = {"obs": np.zeros((3, 1), np.float32), "action": np.arange(3), "reward": np.ones(3)}
    segments = Segments.of(1, episode_id=["a"], terminated=[True])
    spaces = {"obs_space": gym.spaces.Box(-1, 1, (1,), np.float32), "action_space": NamedDiscrete(["a", "b", "c"])}
    for name, more in (("named", {}), ("tasks", {"task_index": np.array([3, 3, 7])})):
        with RecordingWriter(tmp_path / name, **spaces) as writer:
            writer.write(
                Experience({**rows, **more}, np.array([0, 3]), segments, {"obs": np.zeros((1, 1), np.float32)})
            )
    with pytest.raises(DataError, match="several columns would be called task_index"):
        convert(tmp_path / "tasks", tmp_path / "lerobot", "lerobot")
    for form, is_noted in (("rllib-table", True), ("rllib-episodes", True), ("minari", True), ("lerobot", False)):
        notes = " ".join(convert(tmp_path / "named", tmp_path / f"{form}-v0", form).notes)
        assert ("the names of `action`'s choices have no place in " in notes) == is_noted


def test_episodes_may_be_described_in_several_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = plain(tmp_path / "a", [6, 4, 5])
    path = folder / "meta/episodes/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path), path, row_group_size=1)
    opened: list[str] = []
    found = footers.opened
    monkeypatch.setattr(footers, "opened", lambda path, *more: opened.append(str(path)) or found(path, *more))
    assert Recording.open(folder).read().lengths.tolist() == [6, 4, 5]
    assert opened.count(str(path)) == 1
    about = pa.table({"episode_index": [0, 1, 2], "length": pa.array([6, 4, None])})
    pq.write_table(about, path, row_group_size=1)
    with pytest.raises(DataError, match=r"file-000\.parquet: row 2"):
        Recording.open(folder)
