# SPDX-License-Identifier: Apache-2.0
import json
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from some_recording import ACTION, OBS, assert_same, numbered, record, record_format_1

from etude.errors import DataError, EtudeError
from etude.experience import Experience
from etude.recordings import Recording, RecordingWriter, convert, validate
from etude.recordings.files import DataFile


def rewritten(folder: Path, rows: int) -> None:
    """All files anew with row groups of ``rows``, which cut through segments: as other tools may leave them."""
    for path in folder.glob("*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table, path, row_group_size=rows)


def test_what_it_says_of_itself(tmp_path):
    record(tmp_path, numbered([3, 4, 5]), meta={"seed": 1}, max_rows_per_file=7)
    recording = Recording.open(str(tmp_path))
    assert (recording.num_steps, recording.num_episodes, recording.env) == (12, 3, "Numbered-v0")
    assert (recording.obs_space, recording.action_space, dict(recording.meta)) == (OBS, ACTION, {"seed": 1})
    assert [f.name for f in recording.files] == ["part-00000.parquet", "part-00001.parquet"]
    assert recording.columns == ["obs", "action", "reward"]
    assert "12 steps in 2 files" in repr(recording)


def test_one_file_alone_is_read(tmp_path):
    record(tmp_path, numbered([3, 4, 5]), max_rows_per_file=7)
    assert Recording.open(tmp_path / "part-00001.parquet").read().num_steps == 5


def test_files_in_sub_folders_are_found_and_hidden_ones_are_not(tmp_path):
    record(tmp_path / "a", numbered([3]))
    record(tmp_path / "b", numbered([4], first=1))
    (tmp_path / ".part-00000.parquet").write_bytes(b"unfinished")
    (tmp_path / "_old").mkdir()
    record(tmp_path / "_old" / "c", numbered([9]))
    assert_same(Recording.open(tmp_path).read(), numbered([3, 4], episode_id=["0-e0", "1-e1"]))


def test_a_file_that_is_given_twice_is_refused(tmp_path, monkeypatch):
    record(tmp_path / "a", numbered([3]))
    record(tmp_path / "b", numbered([4], first=1))
    (tmp_path / "link").symlink_to("a")
    monkeypatch.chdir(tmp_path)
    for places in (["a", "a/"], [tmp_path, "b"], ["a/part-00000.parquet", "a"], ["b", "link", "a"]):
        with pytest.raises(DataError, match=r"part-00000\.parquet was given twice"):
            Recording.open(places)
    assert Recording.open(["a", "b"]).num_steps == 7


def test_only_some_columns_and_roots(tmp_path):
    record(tmp_path, numbered([3, 4]))
    exp = Recording.open(tmp_path).read(columns=["action"])
    assert list(exp.steps) == ["action"]
    assert exp.final_obs == {}
    assert exp.segments.episode_id.tolist() == ["e0", "e1"]
    with pytest.raises(DataError, match=r"there is no column `actions`; there are obs, .* Nearest: `action`"):
        Recording.open(tmp_path).read(columns=["actions"])
    with pytest.raises(DataError, match=r"there is no column `next_obs`; .* `Recording.batches` gives `next_obs`"):
        Recording.open(tmp_path).read(columns=["next_obs"])
    with pytest.raises(DataError, match="there is no column `rewards`"):
        Recording.open(tmp_path).stream(columns=["rewards"])


@pytest.mark.parametrize("whole", [True, False])
def test_a_filter_on_rows(tmp_path, whole):
    record(tmp_path, numbered([6, 3, 6]), max_rows_per_file=9)
    recording, where = Recording.open(tmp_path), (pc.field("episode_id") != "e1") & (pc.field("t") < 4)
    parts = [recording.read(filter=where)] if whole else list(recording.stream(filter=where))
    exp = Experience.concat(parts)
    assert exp.segments.episode_id.tolist() == ["e0", "e2"]
    assert exp.lengths.tolist() == [4, 4]
    assert not exp.segments.has_final_obs.any()  # their ends were left out
    assert recording.read(filter=pc.field("t") > 99).num_steps == 0


@pytest.mark.parametrize("where", [(pc.field("t") != 2) & (pc.field("t") != 4), "t != 2 and t != 4"])
@pytest.mark.parametrize("on_bad", ["strict", "repair"])
def test_segments_that_a_filter_cut_have_the_next_observation_if_it_is_needed(tmp_path, where, on_bad):
    record(tmp_path, numbered([6, 3, 6]))
    rewritten(tmp_path, 4)  # a row that is left out begins a row group
    exp = Recording.open(tmp_path, on_bad=on_bad).read(columns=["obs", "action"], filter=where, next_obs=True)
    assert list(exp.steps) == ["obs", "action"]
    assert exp.lengths.tolist() == [2, 1, 1, 2, 2, 1, 1]
    assert exp.segments.has_final_obs.all()
    np.testing.assert_array_equal(exp.final_obs["obs"], exp.steps["obs"][exp.offsets[1:] - 1] + [0, 1, 1])
    if not isinstance(where, str):
        with pytest.raises(DataError, match="must evaluate to bool"):
            Recording.open(tmp_path, on_bad=on_bad).read(filter=pc.field("t"), next_obs=True)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 15), min_size=1, max_size=4),
    at_most=st.integers(1, 12),
    lookback=st.integers(0, 5),
    chance=st.sampled_from([0.1, 0.5, 0.9]),
    per_file=st.integers(5, 40),
    rows=st.integers(2, 25),
    seed=st.integers(0, 9),
)
def test_a_filter_never_makes_lookback_trained(
    tmp_path_factory, lengths, at_most, lookback, chance, per_file, rows, seed
):
    folder = tmp_path_factory.mktemp("r")
    exp = numbered(lengths).cut(at_most, lookback=lookback)
    ids, keep = np.arange(exp.num_steps), np.random.default_rng(seed).random(exp.num_steps) < chance
    record_format_1(folder / "r", exp.with_steps(**{"info/id": ids, "info/keep": keep}), rows_per_file=per_file)
    folder /= "r"
    rewritten(folder, rows)
    recording = Recording.open(folder)
    where = pc.field("info/keep")
    for parts in ([recording.read(filter=where)], list(recording.stream(filter=where))):
        for part in parts:
            part.validate()
        found = [(part.steps["info/id"], part.steps["info/id"][part.trained()]) for part in parts]
        assert sorted(i for part, _ in found for i in part) == ids[keep].tolist()
        assert sorted(i for _, part in found for i in part) == ids[keep & exp.trained()].tolist()


def test_a_filter_that_drops_the_first_rows_of_lookback_keeps_the_others_untrained(tmp_path):
    record_format_1(tmp_path / "r", numbered([10, 10], t_start=[6, 0], lookback=[4, 0]))
    exp = Recording.open(tmp_path / "r").read(filter=pc.field("t") >= 8)
    assert exp.segments.lookback.tolist() == [2, 0]
    assert exp.steps["obs"][exp.trained(), 1].tolist() == [10, 11, 12, 13, 14, 15, 8, 9]


def test_a_filter_decodes_only_the_rows_groups_and_columns_asked_for_where_there_is_no_lookback(tmp_path, monkeypatch):
    record(tmp_path, numbered([10, 10]))
    scans = []
    scan = DataFile.read_group
    monkeypatch.setattr(DataFile, "read_group", lambda *args: scans.append(args[2]) or scan(*args))
    exp = Recording.open(tmp_path).read(columns=["reward"], filter=pc.field("action") == 3)
    assert exp.num_steps == 2
    ((names),) = scans
    assert "reward" in names
    assert not {"obs", "action"} & set(names)


def test_arrays_may_be_written_to(tmp_path):
    record(tmp_path, numbered([6, 3]))
    recording = Recording.open(tmp_path)
    for exp in (recording.read(), next(recording.stream()), recording.read(filter=pc.field("t") < 2)):
        assert all(column.flags.writeable for column in exp.steps.values())


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    per_file=st.integers(1, 30),
    rows=st.integers(1, 25),
    max_rows=st.integers(1, 25),
    lookback=st.integers(0, 5),
    version=st.sampled_from([1, 2]),
)
def test_however_it_is_cut_up_the_same_comes_back(
    tmp_path_factory, lengths, per_file, rows, max_rows, lookback, version
):
    folder = tmp_path_factory.mktemp("r")
    exp = numbered(lengths, lookback=np.minimum(lookback, lengths) * (version == 1))
    if version == 1:
        folder /= "r"
        record_format_1(folder, exp, rows_per_file=per_file)
    else:
        record(folder, exp, max_rows_per_file=per_file)
    rewritten(folder, rows)
    recording = Recording.open(folder)
    assert_same(recording.read(), exp)
    parts = list(recording.stream(max_rows=max_rows))
    assert max(part.num_steps for part in parts) <= max_rows
    streamed = Experience.concat(parts)
    assert streamed.segments.has_final_obs.all()
    np.testing.assert_array_equal(streamed.next_obs()["obs"], exp.next_obs()["obs"])
    np.testing.assert_array_equal(streamed.trained(), exp.trained())
    for part in parts:
        part.validate()


def test_context_is_left_out_by_the_writer(tmp_path):
    exp = numbered([30, 5]).cut(7, lookback=3)
    record(tmp_path, exp, numbered([4], first=2, lookback=[4]))
    assert_same(Recording.open(tmp_path).read(), numbered([30, 5]))


FORMAT_1 = Path(__file__).parent / "format_1"
"""Written by Etude 0.1: three episodes of 30, 7 and 12 steps, and one of 40 in pieces of 15 with 4 steps of context."""


def test_a_recording_of_format_1_is_read_and_converted(tmp_path):
    recording = Recording.open(FORMAT_1)
    whole = Experience.concat([numbered([30, 7, 12], agent_id=["a", None, "b"]), numbered([40], first=3)])
    assert recording.meta == {"seed": 2}
    assert recording.num_steps == 97
    assert validate(FORMAT_1).ok
    exp = recording.read()
    assert exp.segments.lookback.tolist() == [0, 0, 0, 0, 4, 4]
    np.testing.assert_array_equal(exp.steps["obs"][exp.trained()], whole.steps["obs"])
    assert_same(convert(recording, tmp_path / "r").read(), whole)
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["part-00000.parquet"]


def test_nothing_is_added_to_format_1(tmp_path):
    record_format_1(tmp_path / "r", numbered([4]))
    with pytest.raises(DataError, match="holds a recording of format 1, .* Convert it with `etude data convert`"):
        record(tmp_path / "r", numbered([4], first=1), append=True)


def test_a_column_of_format_1_that_has_a_meaning_now_is_named(tmp_path):
    record_format_1(tmp_path / "r", numbered([4]))
    file = tmp_path / "r" / "part-00000.parquet"
    table = pq.read_table(file)
    pq.write_table(table.append_column("segment", pa.array([7] * 4)), file)
    with pytest.raises(DataError, match="column `segment` can't be told from the one of format 2"):
        Recording.open(tmp_path / "r")


def test_reading_imports_neither_torch_nor_an_env(tmp_path):
    record(tmp_path, numbered([6, 3]))
    code = (
        "import sys; from etude.recordings import Recording\n"
        f"r = Recording.open({str(tmp_path)!r}); r.read(); next(r.batches(4)); r.info(); r.validate()\n"
        "print([m for m in ('torch', 'gymnasium.envs.classic_control', 'matplotlib') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("name", ["etude.recordings.pipeline", "etude.ray.data_source"])
def test_processes_that_load_data_import_no_torch(name):
    if name.startswith("etude.ray"):
        pytest.importorskip("ray")
    code = f"import sys, {name}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# -- what can't be opened ------------------------------------------------------------------------------------------


def test_no_such_path(tmp_path):
    with pytest.raises(DataError, match=r"nowhere: there is no such file or folder\. Give the folder"):
        Recording.open(tmp_path / "nowhere")


def test_an_empty_folder(tmp_path):
    with pytest.raises(DataError, match="holds no Parquet file"):
        Recording.open(tmp_path)


def test_a_recording_without_data_yet(tmp_path):
    record(tmp_path / "a")
    assert list((tmp_path / "a").iterdir()) == []
    with pytest.raises(DataError, match="holds no Parquet file"):
        Recording.open(tmp_path / "a")
    record_format_1(tmp_path / "b", numbered([3]))
    (tmp_path / "b" / "part-00000.parquet").unlink()
    with pytest.raises(DataError, match=r"this recording has no data: recording\.json is there"):
        Recording.open(tmp_path / "b")


def test_a_file_that_is_not_parquet(tmp_path):
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(DataError, match=r"x\.txt: is not in a known recording format"):
        Recording.open(tmp_path / "x.txt")


def test_a_truncated_file_is_named(tmp_path):
    record(tmp_path, numbered([3, 4]), max_rows_per_file=4)
    path = tmp_path / "part-00001.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"part-00001\.parquet: is not a whole Parquet file: it was cut off .* Restore"):
        Recording.open(tmp_path)


def test_bytes_that_changed_are_named(tmp_path):
    record(tmp_path, numbered([300]))
    path = tmp_path / "part-00000.parquet"
    data = bytearray(path.read_bytes())
    data[4:2000] = bytes(1996)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"part-00000\.parquet: row group 0 can't be read .*Restore the file"):
        Recording.open(tmp_path).read()


def test_a_missing_file_is_named(tmp_path):
    record(tmp_path, numbered([3, 4, 5, 6]), max_rows_per_file=6)
    (tmp_path / "part-00000.parquet").unlink()
    message = (
        r"part-00000\.parquet: is not there, but when part-00001\.parquet was written, 3 rows were in the files before "
        r"it\. Put it back, or read the rest with on_bad='skip'"
    )
    with pytest.raises(DataError, match=message):
        Recording.open(tmp_path)
    rest = Recording.open(tmp_path, on_bad="skip")
    assert rest.read().segments.episode_id.tolist() == ["e1", "e2", "e3"]
    assert rest.left_out == {"missing_file": 3}
    assert Recording.open([tmp_path / "part-00001.parquet", tmp_path / "part-00002.parquet"]).num_steps == 9


def test_a_missing_file_of_format_1_is_named(tmp_path):
    record_format_1(tmp_path / "r", numbered([3, 4]), rows_per_file=4)
    (tmp_path / "r" / "part-00000.parquet").unlink()
    with pytest.raises(DataError, match=r"part-00000\.parquet: recording\.json lists this file with 4 rows, but"):
        Recording.open(tmp_path / "r")


def test_a_file_that_was_replaced_is_named(tmp_path):
    record(tmp_path / "a", numbered([5, 6]), max_rows_per_file=6)
    record(tmp_path / "b", numbered([3]))
    shutil.copy(tmp_path / "b" / "part-00000.parquet", tmp_path / "a" / "part-00000.parquet")
    message = (
        r"part-00000\.parquet: was replaced: when part-00001\.parquet was written, 5 rows were in the files before "
        r"it, 2 more than now\. Restore it from a copy, or read the rest"
    )
    with pytest.raises(DataError, match=message):
        Recording.open(tmp_path / "a")
    assert Recording.open(tmp_path / "a", on_bad="skip").num_steps == 9


def test_files_may_have_other_names_and_lie_beside_those_of_other_writers(tmp_path):
    record(tmp_path, numbered([3, 4, 5]), max_rows_per_file=5)
    record(tmp_path, numbered([6, 7], first=3), max_rows_per_file=7, prefix="other", append=True)
    for i, file in enumerate(sorted(tmp_path.iterdir())):
        file.rename(tmp_path / f"{9 - i}.parquet")
    assert sorted(Recording.open(tmp_path).read().lengths) == [3, 4, 5, 6, 7]
    (tmp_path / "8.parquet").unlink()  # the last of its series: nothing tells of it
    assert Recording.open(tmp_path).num_steps == 18


def test_a_column_that_only_later_files_have_is_named(tmp_path):
    record(tmp_path / "a", numbered([3]))
    record(tmp_path / "b", numbered([4], first=1).with_steps(logp=np.zeros(4)))
    with pytest.raises(DataError, match=r"a/part-00000\.parquet and .*b/part-00000.parquet .*only .*b/.* has `logp`"):
        Recording.open(tmp_path)
    shutil.move(tmp_path / "b" / "part-00000.parquet", tmp_path / "a" / "part-00001.parquet")
    message = r"part-00001\.parquet: has a column `logp` \(double\), which part-00000\.parquet lacks\. .* folder of its"
    with pytest.raises(DataError, match=message):
        Recording.open(tmp_path / "a")


def test_a_missing_column_is_named(tmp_path):
    record(tmp_path, numbered([3, 4]), max_rows_per_file=4)
    path = tmp_path / "part-00001.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["action"]), path)
    with pytest.raises(DataError, match=r"part-00001\.parquet: has no column `action`; it has episode_id, .*Restore"):
        Recording.open(tmp_path)
    shutil.copy(path, tmp_path / "part-00000.parquet")
    pq.write_table(pq.read_table(path).drop_columns(["t"]), path)
    with pytest.raises(DataError, match=r"part-00001\.parquet: has no column `t`"):
        Recording.open(path)


@pytest.mark.parametrize("t", [-1, 2**63 - 1])
def test_a_step_that_can_not_be_counted_is_named(tmp_path, t):
    record(tmp_path, numbered([3, 4]))
    path = tmp_path / "part-00000.parquet"
    table = pq.read_table(path)
    times = pa.array([0, 1, 2, 0, 1, 2, t])
    place = table.schema.get_field_index("t")
    pq.write_table(table.set_column(place, table.schema.field(place), times), path)
    for on_bad in ("strict", "repair"):
        with pytest.raises(DataError, match=rf"part-00000.parquet.* is {t}, but counts steps from 0"):
            Recording.open(tmp_path, on_bad=on_bad).read()


def test_final_observations_without_observations_are_named(tmp_path):
    record(tmp_path, numbered([3, 4]), max_rows_per_file=4)
    for path in tmp_path.glob("*.parquet"):
        pq.write_table(pq.read_table(path).drop_columns(["obs"]), path)
    with pytest.raises(DataError, match=r"part-00000\.parquet: has no column `obs`"):
        Recording.open(tmp_path)


def test_a_column_of_another_type_is_named(tmp_path):
    record(tmp_path, numbered([3, 4]), max_rows_per_file=4)
    path = tmp_path / "part-00001.parquet"
    table = pq.read_table(path)
    index = table.column_names.index("reward")
    pq.write_table(table.set_column(index, "reward", table["reward"].cast(pa.string())), path)
    with pytest.raises(
        DataError, match=r"part-00001\.parquet: column `reward` is of type string, but double in part-00"
    ):
        Recording.open(tmp_path)


def test_mismatched_spaces_between_files_and_with_the_json_are_named(tmp_path):
    record(tmp_path / "a", numbered([3]))
    with RecordingWriter(tmp_path / "b", obs_space=OBS, action_space=gym.spaces.Discrete(7)) as writer:
        writer.write(numbered([4], first=1))
    with pytest.raises(
        DataError, match=r"a/.* and .*b/.*the `action` space is Discrete\(1000\) in the first, and Disc"
    ):
        Recording.open(tmp_path)
    shutil.copy(tmp_path / "b" / "part-00000.parquet", tmp_path / "a" / "x.parquet")
    with pytest.raises(DataError, match=r"a/x\.parquet: its `action` space is Discrete\(7\), but the recording"):
        Recording.open(tmp_path / "a")
    record_format_1(tmp_path / "c", numbered([3]))
    file = tmp_path / "c" / "recording.json"
    file.write_text(file.read_text().replace('"n": 1000', '"n": 7'))
    with pytest.raises(DataError, match="its `action` space is Discrete"):
        Recording.open(tmp_path / "c")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"recording\.json: can't be read as JSON .*move recording\.json away"),
        ("[]", r"recording\.json: this does not describe an Etude recording"),
        (
            '{"format": "etude-recording", "version": 99}',
            "format version 99, but this Etude reads versions 1 and 2",
        ),
        ('{"format": "etude-recording", "version": 1}', "the recording's description can't be read"),
    ],
)
def test_a_broken_json_of_format_1_is_named(tmp_path, text, message):
    record_format_1(tmp_path / "r", numbered([3]))
    (tmp_path / "r" / "recording.json").write_text(text)
    with pytest.raises(DataError, match=message):
        Recording.open(tmp_path / "r")
    (tmp_path / "r" / "recording.json").unlink()
    assert Recording.open(tmp_path / "r").num_steps == 3


def test_parquet_files_of_others_are_told_apart_by_what_is_in_them(tmp_path):
    pq.write_table(pa.table({"item": pa.array([b"x"], pa.binary())}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"eps_id": ["x"], "obs": [1.0], "actions": [0]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: row 0, column `item`: the document is not a map"):
        Recording.open(tmp_path / "a.parquet").read()
    with pytest.raises(DataError, match=r"b\.parquet: has no column `rewards`"):
        Recording.open(tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"c\.parquet is a table with the columns x: say what they mean"):
        Recording.open(tmp_path / "c.parquet")


def test_folders_with_nothing_that_is_known(tmp_path):
    (tmp_path / "output.json").write_text("{}")
    with pytest.raises(DataError, match="holds no Parquet file, nor a recording of another tool in a known format"):
        Recording.open(tmp_path)
    with pytest.raises(
        DataError, match=r"output\.json: is not in a known recording format.* or one Parquet file; .* Source"
    ):
        Recording.open(tmp_path / "output.json")
    with pytest.raises(DataError, match="An Experience must be written first, with a RecordingWriter"):
        Recording.open(numbered([3]))


# -- info ----------------------------------------------------------------------------------------------------------


def test_info_counts_and_sums(tmp_path):
    exp = numbered([30, 3, 5], truncated=[False, True, False])
    record(tmp_path, exp, max_rows_per_file=8)
    info = Recording.open(tmp_path).info()
    assert info["env"] == "Numbered-v0"
    assert (info["episodes"], info["agents"], info["env_steps"], info["agent_steps"]) == (3, [], 38, 38)
    assert (info["terminated"], info["truncated"], info["unfinished"]) == (2, 1, 0)
    returns = [sum(e + t / 1000 for t in range(n)) for e, n in ((0, 30), (1, 3), (2, 5))]
    assert info["return_total"] == pytest.approx(sum(returns))
    assert info["return_mean"] == pytest.approx(np.mean(returns))
    assert (info["return_min"], info["return_max"]) == pytest.approx((min(returns), max(returns)))
    assert info["obs_sum"] == pytest.approx(sum(sum(row) for row in exp.steps["obs"].tolist()))
    assert info["final_obs_sum"] == pytest.approx(sum(sum(row) for row in exp.final_obs["obs"].tolist()))
    assert info["action_sum"] == sum(exp.steps["action"].tolist())
    assert info["files"] == len(list(tmp_path.glob("*.parquet"))) == 5
    assert info["bytes"] == sum(f.stat().st_size for f in tmp_path.glob("*.parquet"))
    json.dumps(info)


def test_info_of_several_agents_counts_env_steps_once(tmp_path):
    parts = [
        numbered([6], agent_id="a"),
        numbered([4], agent_id="b", t_start=[1]),
        numbered([5], agent_id="a", first=1),
    ]
    record(tmp_path, *parts)
    info = Recording.open(tmp_path).info()
    assert (info["episodes"], info["agents"]) == (2, ["a", "b"])
    assert (info["agent_steps"], info["env_steps"]) == (15, 11)


def test_info_counts_the_env_steps_of_an_agent_that_comes_after_another(tmp_path):
    record(tmp_path, numbered([6], agent_id="a"), numbered([4], agent_id="b", t_start=[7]))
    info = Recording.open(tmp_path).info()
    assert (info["agent_steps"], info["env_steps"]) == (10, 10)


def test_info_leaves_lookback_out(tmp_path):
    record_format_1(tmp_path / "r", numbered([6, 4], lookback=[2, 0], t_start=[3, 0]))
    info = Recording.open(tmp_path / "r").info()
    assert (info["agent_steps"], info["env_steps"]) == (8, 8)


def test_a_flipped_bit_is_an_error_and_not_other_data(tmp_path):
    path = tmp_path / "r"
    record(path, numbered([40, 30]))
    file = next(path.glob("*.parquet"))
    before = Recording.open(path).read()
    data = bytearray(file.read_bytes())
    found = 0
    group = pq.read_metadata(file).row_group(0)
    chunks = [group.column(i) for i in range(group.num_columns)]
    for at in range(4, max(c.data_page_offset + c.total_compressed_size for c in chunks), 37):  # before the footer
        damaged = bytearray(data)
        damaged[at] ^= 4
        file.write_bytes(damaged)
        try:
            after = Recording.open(path).read()
        except EtudeError:
            found += 1
            continue
        assert all(np.array_equal(before.steps[name], after.steps[name]) for name in before.steps)
    assert found > 0


def test_a_flipped_bit_is_found_in_a_column_that_is_read_later_than_others(tmp_path):
    path = tmp_path / "r"
    record(path, numbered([40, 30]), encoding="plain", compression="none")
    recording = Recording.open(path)
    before = list(recording.batches(70, columns=["action"], shuffle=False, epochs=2))
    assert len(before) == 2
    file = next(path.glob("*.parquet"))
    group = pq.read_metadata(file).row_group(0)
    chunk = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema.startswith("obs"))
    data = bytearray(file.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size - 2] ^= 4  # in a number, so that it can be decoded
    file.write_bytes(data)
    after = list(recording.batches(70, columns=["action"], shuffle=False, epochs=1))
    assert np.array_equal(after[0]["action"], before[0]["action"])
    with pytest.raises(DataError, match="can't be read"):
        list(recording.batches(70, columns=["obs", "action"], shuffle=False, epochs=1))


@pytest.mark.parametrize("where", [pc.field("nowhere") > 1, pc.field("t") > pc.scalar("x")])
def test_a_filter_that_can_not_be_applied_is_named_and_not_the_file(tmp_path, where):
    path = tmp_path / "r"
    record(path, numbered([4]))
    with pytest.raises(DataError, match=r"the filter .* can't be applied to .*such as pyarrow.compute.field"):
        Recording.open(path).read(filter=where)
