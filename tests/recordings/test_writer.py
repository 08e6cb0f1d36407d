# SPDX-License-Identifier: Apache-2.0
import asyncio
import functools
import json
import threading
from datetime import UTC, datetime

import gymnasium as gym
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from some_recording import ACTION, OBS, assert_same, numbered, record, record_format_1

import etude.recordings.writer as roller_module
import etude.recordings.writer as writer_module
from etude.errors import DataError
from etude.experience import Experience, Segments
from etude.recordings import Recording, RecordingWriter, convert, validate


def test_what_is_written_is_read_bit_for_bit(tmp_path):
    exp = numbered([5, 1, 9, 3], agent_id=["a", "b", None, "a"], module_id="m")
    record(tmp_path / "r", exp)
    assert_same(Recording.open(tmp_path / "r").read(), exp)


def test_many_small_writes_are_one_row_group_and_arrays_may_be_used_again(tmp_path):
    exp = numbered([4] * 50)
    buffer = numbered([4])
    with RecordingWriter(tmp_path, obs_space=OBS, action_space=ACTION) as writer:
        for one in exp:
            for name, column in one.steps.items():
                buffer.steps[name][:] = column
            buffer.final_obs["obs"][:] = one.final_obs["obs"]
            buffer.segments = buffer.segments.replace(episode_id=one.segments.episode_id)
            buffer.segments.t_start[:] = one.segments.t_start
            buffer.segments.terminated[:] = one.segments.terminated
            buffer.segments.truncated[:] = one.segments.truncated
            writer.write(buffer)
            for column in (*buffer.steps.values(), *buffer.final_obs.values()):
                column[:] = 77
            buffer.segments.t_start[:] = 77
    assert_same(Recording.open(tmp_path).read(), exp)
    assert pq.ParquetFile(tmp_path / "part-00000.parquet").num_row_groups == 1


def test_the_layout_other_tools_see(tmp_path):
    record(tmp_path, numbered([3, 4]), numbered([5], first=2), meta={"seed": 3, "connectors": ["frame_stack:4"]})
    table = ds.dataset(tmp_path, format="parquet", exclude_invalid_files=False).to_table()
    assert table["t"].to_pylist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert [v for v in table["final_obs"].to_pylist() if v is not None] == [[0, 3, 3], [1, 4, 1004], [2, 5, 2005]]
    assert table["terminated"].to_pylist().count(True) == 2
    assert "next_obs" not in table.column_names
    assert table.schema.field("episode_id").type == pa.string()  # as a dictionary, pyarrow can't even count them
    assert table["segment"].to_pylist() == [0, 0, 0, 3, 3, 3, 3, 7, 7, 7, 7, 7]
    assert not table["terminated"].null_count + table["truncated"].null_count + table["segment"].null_count
    assert [path.name for path in tmp_path.iterdir()] == ["part-00000.parquet"]
    footer = pq.read_metadata(tmp_path / "part-00000.parquet").metadata
    data, facts = (json.loads(footer[key]) for key in (b"etude:recording", b"etude:file"))
    assert data["format"] == "etude-recording"
    assert data["version"] == 2
    assert data["env"] == "Numbered-v0"
    assert data["spaces"]["action"] == {"type": "Discrete", "n": 1000, "start": 0, "dtype": "int64"}
    assert data["meta"] == {"seed": 3, "connectors": ["frame_stack:4"]}
    assert datetime.fromisoformat(facts.pop("closed")) <= datetime.now(UTC)
    assert facts == {"series": "part", "number": 0, "rows": 12, "rows_before": 0, "segments": 3}


def test_segments_have_numbers_that_are_unique_in_the_folder(tmp_path):
    record(tmp_path, numbered([3, 4, 25]), max_rows_per_file=10)
    record(tmp_path, numbered([5, 6], first=3), append=True)
    record(tmp_path, numbered([7, 8], first=5), append=True, prefix="other")
    table = ds.dataset(tmp_path, format="parquet").to_table()
    numbers = dict(zip(table["segment"].to_pylist(), table["episode_id"].to_pylist(), strict=True))
    assert sorted(numbers.values()) == ["e0", "e1", *["e2"] * 3, "e3", "e4", "e5", "e6"]
    assert [number for number, name in numbers.items() if name < "e5"] == [0, 3, 7, 17, 27, 32, 37]


def test_a_file_costs_the_same_however_many_there_are(tmp_path):
    sizes = {}
    with RecordingWriter(tmp_path, obs_space=OBS, action_space=ACTION) as writer:
        for i in range(60):
            before = {path.name for path in tmp_path.iterdir()}
            writer.write(numbered([4], first=10 + i))
            writer.flush()
            (new,) = {path.name for path in tmp_path.iterdir()} - before
            sizes[i] = (tmp_path / new).stat().st_size
    assert max(sizes.values()) - min(sizes.values()) < 20


def test_files_roll_by_rows_and_keep_segments_whole(tmp_path):
    exp = numbered([30, 50, 40, 90, 20, 10])
    record(tmp_path, exp, max_rows_per_file=100)
    rows = [pq.read_metadata(f).num_rows for f in Recording.open(tmp_path).files]
    assert rows == [80, 40, 90, 30]
    assert_same(Recording.open(tmp_path).read(), exp)


def test_a_segment_longer_than_a_file_is_cut_with_its_own_final_obs_and_joined_again(tmp_path):
    exp = numbered([25, 3])
    record(tmp_path, exp, max_rows_per_file=10)
    pieces = list(Recording.open(tmp_path).stream())
    assert [p.num_steps for p in pieces] == [10, 10, 8]
    assert pieces[0].final_obs["obs"].tolist() == [[0, 10, 10]]
    assert not pieces[0].segments.done.any()
    assert_same(Recording.open(tmp_path).read(), exp)


def test_files_roll_by_bytes(tmp_path):
    rng = np.random.default_rng(0)
    exp = numbered([100] * 40)
    exp = exp.with_steps(obs=rng.normal(size=exp.steps["obs"].shape).astype(np.float32))
    record(tmp_path, exp, max_file_size=20_000)
    sizes = [f.stat().st_size for f in Recording.open(tmp_path).files]
    assert len(sizes) > 2
    assert max(sizes) < 2 * 20_000
    assert_same(Recording.open(tmp_path).read(), exp)


def test_row_groups_are_small_where_rows_are_large(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "ROW_GROUP_BYTES", 100_000)
    images = np.random.default_rng(0).integers(0, 255, (60, 32, 32, 3), dtype=np.uint8)
    exp = Experience(
        {"obs": images, "action": np.zeros(60, np.int64)},
        np.arange(0, 61, 5),
        Segments.of(12, episode_id=[str(i) for i in range(12)], terminated=True),
        {"obs": images[:12]},
    )
    space = gym.spaces.Box(0, 255, (32, 32, 3), np.uint8)
    with RecordingWriter(tmp_path, obs_space=space, action_space=ACTION) as writer:
        writer.write(exp)
    metadata = pq.read_metadata(tmp_path / "part-00000.parquet")
    assert max(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)) <= 16
    assert_same(Recording.open(tmp_path).read(), exp)


def test_flush_puts_all_on_the_disk_and_num_steps_tells(tmp_path):
    with RecordingWriter(tmp_path, obs_space=OBS, action_space=ACTION) as writer:
        writer.write(numbered([4, 4]))
        assert writer.num_steps == 0
        writer.flush()
        assert writer.num_steps == 8
        assert Recording.open(tmp_path).num_steps == 8
        writer.flush()  # nothing new: no empty file
        writer.write(numbered([5], first=2))
    assert writer.num_steps == 13
    assert len(Recording.open(tmp_path).files) == 2


def test_rows_that_waited_long_are_put_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "MAX_SECONDS", -1.0)
    record(tmp_path, numbered([4]), numbered([5], first=1))
    assert [pq.read_metadata(f).num_rows for f in Recording.open(tmp_path).files] == [4, 5]


def test_append_adds_files_and_clears_what_a_killed_writer_left(tmp_path):
    record(tmp_path, numbered([4]))
    (tmp_path / ".part-00001.parquet.tmp").write_bytes(b"half a file")
    record(tmp_path, numbered([5], first=1), append=True)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["part-00000.parquet", "part-00001.parquet"]
    assert_same(Recording.open(tmp_path).read(), numbered([4, 5]))


def test_a_recording_is_not_overwritten(tmp_path):
    record(tmp_path, numbered([4]))
    with pytest.raises(DataError, match=r"holds a recording of 1 file already\. Choose another folder.*append=True"):
        record(tmp_path, numbered([4]))


def test_append_with_other_spaces_is_refused(tmp_path):
    record(tmp_path, numbered([4]))
    with pytest.raises(DataError, match=r"part-00000\.parquet: its `action` space is Discrete\(1000\), rather"):
        RecordingWriter(tmp_path, obs_space=OBS, action_space=gym.spaces.Discrete(3), append=True)


def test_append_to_what_another_tool_has_rewritten_is_refused(tmp_path):
    record(tmp_path, numbered([4]))
    path = tmp_path / "part-00000.parquet"
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    with pytest.raises(
        DataError, match=r"does not state its spaces: another tool has rewritten it\. Convert the folder"
    ):
        record(tmp_path, numbered([5], first=1), append=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"reward": np.zeros(5, np.float32)},
            r"column `reward` is double in this file, but float in .* Append the col",
        ),
        ({"logp": np.zeros(5)}, r"column `logp` is absent in this file, but double in what .* Leave it out with `col"),
        ({"reward": None}, r"column `reward` is double in this file, but absent in what is to be appended\. Append"),
        (
            {"info/x": np.zeros((5, 3, 2))},
            r"column `info/x` is fixed_size_list<.*>\[6\] of shape \[2, 3\] in this .*shape \[3, 2\] in what",
        ),
    ],
)
def test_append_with_other_columns_is_refused_before_anything_is_written(tmp_path, changes, message):
    shaped = {"info/x": np.zeros((4, 2, 3))} if "info/x" in changes else {}
    record(tmp_path, numbered([3]).with_steps(**{n: c[:3] for n, c in shaped.items()}), meta={"seed": 1})
    record(tmp_path, numbered([4], first=1).with_steps(**shaped), append=True, meta={"seed": 2})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    more = numbered([5], first=2).with_steps(**changes)
    more.steps = {name: column for name, column in more.steps.items() if column is not None}
    with pytest.raises(DataError, match=r"part-00000\.parquet: " + message):
        record(tmp_path, more, append=True, meta={"seed": 3})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert Recording.open(tmp_path).num_steps == 7
    assert Recording.open(tmp_path).meta == {"seed": 2}


def test_append_keeps_to_the_columns_that_are_there(tmp_path):
    record(tmp_path, numbered([4]), columns=["obs", "action"])
    record(tmp_path, numbered([5], first=1).with_steps(x=np.zeros(5)), columns=["action", "obs"], append=True)
    assert validate(tmp_path).ok
    assert Recording.open(tmp_path).read().num_steps == 9


def test_a_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(DataError, match="x: can't write a recording here"):
        RecordingWriter(tmp_path / "x", obs_space=OBS, action_space=ACTION)


def test_only_some_columns(tmp_path):
    record(tmp_path, numbered([4]), columns=["obs", "action"])
    assert Recording.open(tmp_path).columns == ["obs", "action"]
    with pytest.raises(DataError, match="no column `logp`; there are obs, action, reward"):
        record(tmp_path / "b", numbered([4]), columns=["logp"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"obs": np.zeros((4, 2), np.float32)}, r"column `obs` is float32\[2\], but its space .* is float32\[3\]"),
        ({"obs": np.zeros((4, 3))}, r"column `obs` is float64\[3\], but its space"),
        ({"action": np.zeros((4, 1), np.int64)}, r"column `action` is int64\[1\], but its space Discrete\(1000\)"),
        ({"next_obs": np.zeros((4, 3))}, "can't be called `next_obs`: recordings use this name themselves. Rename it"),
        ({"obs/x": np.zeros(4)}, "a column `obs/x`, but the spaces have only obs, action. Rename one of them"),
    ],
)
def test_columns_that_do_not_fit_the_spaces_are_refused(tmp_path, change, message):
    with (
        pytest.raises(DataError, match=message),
        RecordingWriter(tmp_path, obs_space=OBS, action_space=ACTION) as writer,
    ):
        writer.write(numbered([4]).with_steps(**change))


def test_columns_that_change_are_refused(tmp_path):
    with RecordingWriter(tmp_path, obs_space=OBS, action_space=ACTION) as writer:
        writer.write(numbered([4]))
        with pytest.raises(DataError, match="column `logp` is float64 in this write, but absent in the first"):
            writer.write(numbered([4], first=1).with_steps(logp=np.zeros(4)))
    assert Recording.open(tmp_path).num_steps == 4


def test_a_missing_column_and_meta_that_is_not_json_are_refused(tmp_path):
    exp = numbered([4])
    del exp.steps["action"]
    with pytest.raises(DataError, match="column `action` is absent, but its space"):
        record(tmp_path / "a", exp)
    exp = numbered([4])
    exp.final_obs.clear()
    with pytest.raises(DataError, match=r"`final_obs` has no column `obs.*has_final_obs=False where it is unknown"):
        record(tmp_path / "c", exp)
    with pytest.raises(DataError, match="`meta` must be plain JSON data"):
        record(tmp_path / "b", meta={"x": object()})


@pytest.mark.parametrize(
    "value", [float("nan"), {"a": [1, float("-inf")]}, functools.reduce(lambda x, _: [x], range(5000), 0)]
)
def test_what_json_has_no_place_for_is_refused_before_anything_is_written(tmp_path, value):
    with pytest.raises(DataError, match="`meta` must be plain JSON data"):
        RecordingWriter(tmp_path / "r", obs_space=OBS, action_space=ACTION, meta={"x": value})
    assert not (tmp_path / "r").exists()
    with RecordingWriter(tmp_path / "r", obs_space=OBS, action_space=ACTION) as writer:
        with pytest.raises(DataError, match="`meta` must be plain JSON data"):
            writer.set_meta({"x": value})
        writer.write(numbered([4]))
    assert dict(Recording.open(tmp_path / "r").meta) == {}


def test_meta_of_other_writers_that_is_no_json_is_read_and_can_be_converted(tmp_path):
    record_format_1(tmp_path / "r", numbered([4]), meta={"x": "HERE"})
    manifest = tmp_path / "r" / "recording.json"
    manifest.write_text(manifest.read_text().replace('"HERE"', "NaN"))
    recording = Recording.open(tmp_path / "r")
    assert recording.meta == {"x": "NaN"}
    assert convert(recording, tmp_path / "s").meta["x"] == "NaN"


@pytest.mark.slow
def test_large_images_are_kept(tmp_path):
    shape = (4000, 4000, 3)
    space = gym.spaces.Box(0, 255, shape, np.uint8)
    exp = numbered([1]).with_steps(obs=np.full((1, *shape), 7, np.uint8))
    exp.final_obs = {"obs": np.zeros((1, *shape), np.uint8)}
    with RecordingWriter(tmp_path / "a", obs_space=space, action_space=ACTION) as writer:
        writer.write(exp)
    assert (Recording.open(tmp_path / "a").read().steps["obs"] == 7).all()


def test_text_of_numpy_is_stored_like_other_text(tmp_path):
    with RecordingWriter(tmp_path, obs_space=OBS, action_space=ACTION) as writer:
        for k, texts in enumerate((["a", "bb", "c"], ["long", "longer", ""])):
            writer.write(numbered([3], first=k).with_steps(note=np.array(texts)))
    assert Recording.open(tmp_path).read().steps["note"].tolist() == ["a", "bb", "c", "long", "longer", ""]


def test_a_failed_write_is_raised_by_the_next_call(tmp_path):
    exp = numbered([4]).with_steps(x=np.array(["a", "b", "c", 4], object))
    writer = RecordingWriter(tmp_path, obs_space=OBS, action_space=ACTION)
    writer.write(exp)
    with pytest.raises(DataError, match=r"writing failed after 0 rows were on the disk: column `x`"):
        writer.flush()
    with pytest.raises(DataError, match="writing failed"):
        writer.write(exp)
    with pytest.raises(DataError, match="writing failed"):
        writer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_and_what_was_published_stays(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    writer = RecordingWriter(tmp_path, obs_space=OBS, action_space=ACTION)
    writer.write(numbered([4]))
    writer.flush()
    monkeypatch.setattr(roller_module, "publish_at", full)
    writer.write(numbered([5], first=1))
    with pytest.raises(DataError, match=r"writing failed after 4 rows were on the disk: .*No space left"):
        writer.close()
    monkeypatch.undo()
    assert_same(Recording.open(tmp_path).read(), numbered([4]))


def test_whatever_ends_the_writing_thread_is_told_and_hangs_nobody(tmp_path, monkeypatch):
    def cancelled(*_):
        raise asyncio.CancelledError

    writer = RecordingWriter(tmp_path, obs_space=OBS, action_space=ACTION)
    monkeypatch.setattr(roller_module, "publish_at", cancelled)
    writer.write(numbered([4]))
    for _ in range(3):
        with pytest.raises(DataError, match="writing failed after 0 rows"):
            writer.flush()
    with pytest.raises(DataError, match="writing failed after 0 rows"):
        writer.close()


def test_a_closed_writer_says_so(tmp_path):
    writer = RecordingWriter(tmp_path, obs_space=OBS, action_space=ACTION)
    writer.close()
    writer.close()
    with pytest.raises(DataError, match="this writer is closed"):
        writer.write(numbered([4]))


def test_a_forgotten_writer_still_writes_and_leaves_no_thread(tmp_path):
    writer = RecordingWriter(tmp_path, obs_space=OBS, action_space=ACTION)
    writer.write(numbered([4]))
    del writer
    assert Recording.open(tmp_path).num_steps == 4
    assert not [t for t in threading.enumerate() if t.name.startswith("etude-writer")]


def test_segments_that_were_cut_while_acting_are_joined_when_read(tmp_path):
    whole = numbered([30, 20, 25])
    rounds: list[list[Experience]] = [[], [], []]
    for one in whole:  # three slots, collected in rounds of ten steps: pieces of an episode do not stand together
        for i, piece in enumerate(one.cut(10)):
            rounds[i].append(piece)
    record(tmp_path, *(Experience.concat(parts) for parts in rounds))
    assert_same(Recording.open(tmp_path).read(), whole)


def test_nested_spaces_come_back(tmp_path):
    obs = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2, 3), np.float64), "b": gym.spaces.Discrete(4)})
    action = gym.spaces.Tuple([gym.spaces.MultiDiscrete([3, 2]), gym.spaces.MultiBinary(4)])
    rng = np.random.default_rng(1)
    steps = {
        "obs/a": rng.normal(size=(7, 2, 3)),
        "obs/b": rng.integers(0, 4, 7),
        "action/0": rng.integers(0, 2, (7, 2)),
        "action/1": rng.integers(0, 2, (7, 4)).astype(np.int8),
        "reward": rng.normal(size=7),
        "info/name": np.array(["x", None, "y"] * 2 + ["z"], object),
    }
    segments = Segments.of(2, episode_id=["p", "q"], t_start=[5, 0], has_final_obs=[True, False])
    exp = Experience(steps, np.array([0, 4, 7]), segments, {"obs/a": steps["obs/a"][:2], "obs/b": steps["obs/b"][:2]})
    with RecordingWriter(tmp_path, obs_space=obs, action_space=action) as writer:
        writer.write(exp)
    recording = Recording.open(tmp_path, on_bad=None)
    assert (recording.obs_space, recording.action_space) == (obs, action)
    assert_same(recording.read(), exp)


@pytest.mark.parametrize("name", ["memory:", "s3:x", "a:b"])
def test_folders_may_be_called_like_the_beginning_of_a_url(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    exp = Experience(
        {"obs": np.zeros((2, 1), np.float32), "action": np.zeros(2, np.int64)},
        np.array([0, 2]),
        Segments.of(1, episode_id=["e"], terminated=[True]),
        {"obs": np.zeros((1, 1), np.float32)},
    )
    with RecordingWriter(name, obs_space=gym.spaces.Box(-1, 1, (1,)), action_space=gym.spaces.Discrete(2)) as writer:
        writer.write(exp)
    assert Recording.open(name).read().num_steps == 2
