# SPDX-License-Identifier: Apache-2.0
import contextlib
import json
import os
import shutil

import gymnasium as gym
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from some_recording import ACTION, OBS, numbered, record, record_format_1

from etude.errors import DataError
from etude.experience import Experience
from etude.recordings import Recording, RecordingWriter, Source, validate
from etude.recordings.converting import convert


def only(report, kind):
    """The one problem of a report, which is of this kind."""
    assert [p.kind for p in report.problems] == [kind], str(report)
    assert not report.ok
    assert "1 problem" in str(report)
    assert report.problems[0].message in str(report)
    return report.problems[0]


def change(path, name, rows, values):
    """Put values at some rows of a column of a Parquet file."""
    table = pq.read_table(path)
    column = table[name].to_pylist()
    for row, value in zip(rows, values, strict=True):
        column[row] = value
    index, field = table.column_names.index(name), table.schema.field(name)
    changed = pa.chunked_array([pa.array(column, field.type)])
    pq.write_table(table.set_column(index, field.with_nullable(None in column), changed), path, row_group_size=10)


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a/../../b", "", "x\0y", "..\\x", "x" * 300])
def test_a_manifest_names_no_file_outside_of_its_folder(tmp_path, name):
    record_format_1(tmp_path / "r", numbered([4]))
    manifest = tmp_path / "r" / "recording.json"
    listed = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**listed, "files": {**listed["files"], name: {"rows": 1, "bytes": 2}}}))
    with pytest.raises(DataError, match=r"recording\.json: `files` lists .*no file below this folder"):
        Recording.open(tmp_path / "r")
    assert "below this folder" in only(validate(tmp_path / "r"), "manifest").message


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no such device here")
def test_a_device_or_a_pipe_is_no_manifest(tmp_path):
    record_format_1(tmp_path / "r", numbered([4]))
    manifest = tmp_path / "r" / "recording.json"
    manifest.unlink()
    manifest.symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"recording\.json"):
        Recording.open(tmp_path / "r")
    manifest.unlink()
    os.mkfifo(manifest)
    with pytest.raises(DataError, match=r"recording\.json"):
        Recording.open(tmp_path / "r")


@pytest.mark.parametrize("depth", [70, 400, 100_000])
@pytest.mark.parametrize("where", ["recording.json", "footer"])
def test_what_is_nested_too_deep_is_an_error(tmp_path, depth, where):
    folder = tmp_path / "r"
    if where == "recording.json":
        record_format_1(folder, numbered([4]))
    else:
        record(folder, numbered([4]))
    path = folder / "part-00000.parquet"
    table = pq.read_table(path)
    header = table.schema.metadata[b"etude:recording"].decode()
    space = json.dumps(json.loads(header)["spaces"]["obs"])
    deep = '{"type": "Tuple", "spaces": [' * depth + space + "]}" * depth
    if where == "recording.json":
        manifest = folder / "recording.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text())).replace(space, deep))
    else:
        metadata = {b"etude:recording": header.replace(space, deep).encode()}
        pq.write_table(table.replace_schema_metadata(metadata), path)
    with pytest.raises(DataError):
        Recording.open(folder).read()
    with contextlib.suppress(DataError):
        assert not validate(folder).ok


@pytest.mark.parametrize("depth", [70, 400, 100_000])
def test_a_shape_that_is_none_does_not_matter_where_the_space_says_it(tmp_path, depth):
    record(tmp_path, numbered([4]))
    path = tmp_path / "part-00000.parquet"
    table = pq.read_table(path)
    field = table.schema.field("obs").with_metadata({b"etude:shape": (b"[" * depth + b"]" * depth)})
    schema = table.schema.set(table.schema.get_field_index("obs"), field)
    pq.write_table(pa.Table.from_arrays(table.columns, schema=schema), path)
    assert validate(tmp_path).ok
    np.testing.assert_array_equal(Recording.open(tmp_path).read().steps["obs"], numbered([4]).steps["obs"])


def test_a_good_recording_is_good(tmp_path):
    record(tmp_path, numbered([30, 50, 40]), max_rows_per_file=25)
    report = Recording.open(tmp_path).validate()
    assert report.ok, str(report)
    assert (report.files, report.rows, report.episodes) == (6, 120, 3)
    assert "120 rows, 3 episodes: no problems" in str(report)
    assert validate(tmp_path / "part-00000.parquet").ok
    json.dumps(report.to_json())


def test_row_groups_that_cut_segments_are_no_problem(tmp_path):
    record(tmp_path, numbered([30, 50, 40]))
    table = pq.read_table(tmp_path / "part-00000.parquet")
    pq.write_table(table.slice(0, 71), tmp_path / "part-00000.parquet", row_group_size=7)
    pq.write_table(table.slice(71), tmp_path / "part-00001.parquet", row_group_size=7)
    assert validate(tmp_path).ok, str(validate(tmp_path))


def test_nothing_there_is_an_error(tmp_path):
    with pytest.raises(DataError, match="nowhere: there is no such file"):
        validate(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no Parquet file"):
        validate(tmp_path)


@pytest.mark.parametrize("whole", [True, False])
def test_a_truncated_file(tmp_path, whole):
    record(tmp_path, numbered([3, 4]), max_rows_per_file=4)
    path = tmp_path / "part-00001.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    problem = only(validate(tmp_path if whole else path), "truncated_file")
    assert problem.file == str(path)
    assert "part-00001.parquet: is not a whole Parquet file" in problem.message
    assert problem.repairable is whole


def test_nan_observations(tmp_path):
    exp = numbered([30, 30])
    exp.steps["obs"][[14, 17, 40], 1] = np.nan
    record(tmp_path, exp, max_rows_per_file=30)
    problems = validate(tmp_path).problems
    assert [(p.kind, p.row_group, p.row, p.column, p.count) for p in problems] == [
        ("nan", 0, 14, "obs", 2),
        ("nan", 0, 10, "obs", 1),
    ]
    assert "part-00000.parquet, row group 0, row 14: column `obs` holds NaN in component 1 (2 rows like it)." in (
        problems[0].message
    )


def test_infinite_rewards_and_final_observations(tmp_path):
    exp = numbered([30, 30])
    exp.steps["reward"][7] = np.inf
    exp.final_obs["obs"][1, 2] = -np.inf
    record(tmp_path, exp)
    found = [(p.row, p.column) for p in validate(tmp_path).problems]
    assert found == [(7, "reward"), (59, "final_obs")]


@pytest.mark.parametrize(
    ("value", "discrete", "warns"), [(np.nan, False, True), (0.5, True, True), (0.5, False, False)]
)
def test_impossible_log_probabilities_are_a_warning(value, discrete, warns, tmp_path, caplog):
    exp = numbered([5])
    logp = np.full(5, -0.5)
    logp[2:4] = value
    space = ACTION if discrete else gym.spaces.Box(-1, 1, (), np.float32)
    exp = exp.with_steps(logp=logp, action=exp.steps["action"].astype(space.dtype))
    with RecordingWriter(tmp_path, obs_space=OBS, action_space=space) as writer:
        writer.write(exp)
    problems = validate(tmp_path).problems
    found = [(p.kind, p.row, p.column, p.count, p.harmless) for p in problems]
    assert found == [("impossible_logp", 2, "logp", 2, True)] * warns
    Recording.open(tmp_path).read()
    assert ("not the logarithm of a probability" in caplog.text) is warns
    assert Recording.open(tmp_path, on_bad="skip").read().num_steps == 5


def test_an_episode_twice(tmp_path):
    record(tmp_path, numbered([3, 4]), numbered([4], first=1), max_rows_per_file=4)
    problem = only(validate(tmp_path), "duplicate")
    assert "part-00002.parquet, row group 0, row 0: episode 'e1' has step t 0 a second time" in problem.message
    assert "part-00001.parquet, row group 0, row 0. Was a file copied" in problem.message
    assert problem.count == 4


def test_an_episode_that_goes_on_after_its_end(tmp_path):
    record(tmp_path, numbered([3]), numbered([4], t_start=[3]))
    problem = only(validate(tmp_path), "after_end")
    assert "row 3: episode 'e0' continues at t 3, after its end in" in problem.message


def test_agents_of_one_episode_are_not_the_same_steps(tmp_path):
    record(tmp_path, numbered([3], agent_id="a"), numbered([4], agent_id="b"))
    assert validate(tmp_path).ok


def test_overlapping_lookback_is_no_problem(tmp_path):
    record(tmp_path, numbered([30]).cut(10, lookback=4))
    assert validate(tmp_path).ok, str(validate(tmp_path))


def test_segments_that_are_lookback_alone_are_no_problem(tmp_path):
    record(tmp_path, numbered([10]), numbered([4], t_start=[3], lookback=4, terminated=False, truncated=False))
    assert validate(tmp_path).ok, str(validate(tmp_path))


def test_row_groups_that_cut_lookback_are_no_problem(tmp_path):
    record(tmp_path, numbered([30]).cut(10, lookback=4))
    path = tmp_path / "part-00000.parquet"
    pq.write_table(pq.read_table(path), path, row_group_size=3)
    assert validate(tmp_path).ok, str(validate(tmp_path))


def test_a_file_with_other_rows_than_were_there(tmp_path):
    record(tmp_path / "a", numbered([5, 6]), max_rows_per_file=6)
    record(tmp_path / "b", numbered([3]))
    path = tmp_path / "a" / "part-00000.parquet"
    path.write_bytes((tmp_path / "b" / "part-00000.parquet").read_bytes())
    problem = only(validate(tmp_path / "a"), "other_rows")
    assert problem.file == str(path)
    assert "5 rows were in the files before it, 2 more than now" in problem.message
    record_format_1(tmp_path / "c", numbered([5]))
    record_format_1(tmp_path / "d", numbered([3]))
    path = tmp_path / "c" / "part-00000.parquet"
    path.write_bytes((tmp_path / "d" / "part-00000.parquet").read_bytes())
    assert "lists this file with 5 rows, but it holds 3" in only(validate(tmp_path / "c"), "other_rows").message


def test_missing_files(tmp_path):
    record(tmp_path, numbered([3, 4, 5, 6]), max_rows_per_file=6)
    (tmp_path / "part-00001.parquet").unlink()
    (tmp_path / "part-00002.parquet").unlink()
    problems = validate(tmp_path).problems
    assert [(p.kind, p.file, p.count) for p in problems] == [
        ("missing_file", str(tmp_path / "part-00001.parquet"), 9),
        ("missing_file", str(tmp_path / "part-00002.parquet"), 0),
    ]


def test_a_column_that_only_later_files_have(tmp_path):
    record(tmp_path / "a", numbered([3]))
    record(tmp_path / "b", numbered([4], first=1).with_steps(logp=np.zeros(4)))
    with pytest.raises(DataError, match=r"can't be read as one recording: only .* has `logp`.*, or merge them"):
        validate(tmp_path)
    for name, parts in (("c", ["arm"]), ("d", ["arm", "leg"])):
        columns = {f"obs/{part}": np.zeros((3, 1), np.float32) for part in parts}
        source = Source({**columns, "action": np.zeros(3, np.int64), "terminated": [False, False, True]})
        convert(Recording.open(source), tmp_path / name)
    with pytest.raises(DataError, match="only .* has `obs/leg`. Open them one by one: they have different spaces"):
        Recording.open([tmp_path / "c", tmp_path / "d"])
    shutil.move(tmp_path / "b" / "part-00000.parquet", tmp_path / "a" / "part-00001.parquet")
    assert "has a column `logp` (double)" in only(validate(tmp_path / "a"), "extra_column").message


def test_ids_that_are_no_text(tmp_path):
    record(tmp_path, numbered([3, 4]))
    path = tmp_path / "part-00000.parquet"
    table = pq.read_table(path)
    ids = table["episode_id"].cast(pa.string()).cast(pa.binary())
    pq.write_table(table.set_column(0, "episode_id", ids), path)
    problem = only(validate(path), "wrong_type")
    assert "column `episode_id` is of type binary, which is not possible" in problem.message
    with pytest.raises(DataError, match="column `episode_id` is of type binary"):
        Recording.open(path)


def test_a_foreign_file_that_comes_first_is_the_only_problem(tmp_path):
    record(tmp_path, numbered([3]))
    pq.write_table(pa.table({"item": [b"x"]}), tmp_path / "a.parquet")
    only(validate(tmp_path), "foreign_file")


def test_an_end_without_a_final_observation(tmp_path):
    exp = numbered([3, 4, 5])
    exp = Experience(
        exp.steps, exp.offsets, exp.segments.replace(has_final_obs=np.array([True, False, True])), exp.final_obs
    )
    record(tmp_path, exp)
    report = validate(tmp_path)
    (problem,) = report.problems
    assert (problem.kind, problem.row, problem.column) == ("no_final_obs", 6, "final_obs")
    assert (report.ok, report.errors, report.warnings) == (True, (), (problem,))  # it was truncated
    assert str(report).startswith(f"{tmp_path}: 1 file, 12 rows, 3 episodes: no problems, 1 warning.")
    assert (
        "is unknown after the last step of episode 'e1', which was truncated. Value functions can't" in problem.message
    )
    exp.segments.truncated[:] = False
    record(tmp_path / "b", exp)
    assert only(validate(tmp_path / "b"), "no_final_obs").row == 6


def test_values_outside_a_discrete_space(tmp_path):
    exp = numbered([30, 30])
    exp.steps["action"][[44, 45]] = [1000, -1]
    record(tmp_path, exp)
    problem = only(validate(tmp_path), "out_of_space")
    assert (problem.row, problem.column, problem.count) == (44, "action", 2)
    assert "is 1000, outside its space Discrete(1000)" in problem.message


def test_empty_rows_are_named_and_the_rest_is_looked_at(tmp_path):
    record(tmp_path, numbered([30, 30]))
    change(tmp_path / "part-00000.parquet", "reward", [33, 34, 55], [None, None, float("nan")])
    empty, nan = validate(tmp_path).problems
    assert (empty.kind, empty.row_group, empty.row, empty.column, empty.count) == ("empty", 3, 33, "reward", 2)
    assert (nan.kind, nan.row_group, nan.row) == ("nan", 5, 55)


def test_bytes_that_changed(tmp_path):
    record(tmp_path, numbered([300]))
    path = tmp_path / "part-00000.parquet"
    data = bytearray(path.read_bytes())
    data[4:2000] = bytes(1996)
    path.write_bytes(data)
    problem = only(validate(tmp_path), "undecodable")
    assert (problem.file, problem.row_group) == (str(path), 0)


def test_missing_columns_and_foreign_files(tmp_path):
    record(tmp_path, numbered([3, 4, 5, 6]), max_rows_per_file=6)
    pq.write_table(
        pq.read_table(tmp_path / "part-00001.parquet").drop_columns(["action"]), tmp_path / "part-00001.parquet"
    )
    pq.write_table(pa.table({"item": [b"x"]}), tmp_path / "x.parquet")
    problems = validate(tmp_path).problems
    assert [p.kind for p in problems] == ["missing_column", "foreign_file"]
    assert "has no column `action`" in problems[0].message
    assert "x.parquet: is not part of a recording: it carries no Etude header; its columns" in problems[1].message


def test_mismatched_spaces_and_a_broken_json(tmp_path):
    record(tmp_path / "a", numbered([3]))
    with RecordingWriter(tmp_path / "b", obs_space=OBS, action_space=gym.spaces.Discrete(7)) as writer:
        writer.write(numbered([4], first=1))
    with pytest.raises(DataError, match="the `action` space is"):
        validate(tmp_path)
    shutil.copy(tmp_path / "b" / "part-00000.parquet", tmp_path / "a" / "x.parquet")
    assert "a/x.parquet: its `action` space" in only(validate(tmp_path / "a"), "mismatched_spaces").message
    (tmp_path / "a" / "x.parquet").unlink()
    record_format_1(tmp_path / "c", numbered([3]))
    (tmp_path / "c" / "recording.json").write_text("{")
    assert "recording.json" in only(validate(tmp_path / "c"), "manifest").message
