# SPDX-License-Identifier: Apache-2.0
"""Other tools open a recording by its folder's path, and what they write anew reads back as the same experience."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from some_recording import ACTION, OBS, assert_same, numbered, record

from etude.errors import DataError
from etude.experience import Experience
from etude.recordings import Recording, RecordingWriter, Source, convert, opening, validate

LENGTHS = [30, 7, 12, 40]
ROWS = sum(LENGTHS)


def whole() -> Experience:
    return numbered(LENGTHS, agent_id=["a", None, "b", "a"], module_id=["m", "n", "m", "m"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    record(tmp_path / "r", whole(), max_rows_per_file=40, meta={"seed": 1})
    assert len(list((tmp_path / "r").iterdir())) == 3
    return tmp_path / "r"


def tool(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed")


def by_pandas(path: Path) -> pa.Table:
    return pa.Table.from_pandas(tool("pandas").read_parquet(path), preserve_index=False)


def by_polars(path: Path) -> pa.Table:
    return tool("polars").read_parquet(path).to_arrow()


def by_polars_scan(path: Path) -> pa.Table:
    return tool("polars").scan_parquet(path).collect().to_arrow()


def by_pyarrow(path: Path) -> pa.Table:
    return ds.dataset(path).to_table()


def by_duckdb(path: Path) -> pa.Table:
    return tool("duckdb").connect().sql(f"SELECT * FROM read_parquet('{path}')").to_arrow_table()


def by_datasets(path: Path) -> pa.Table:
    found = tool("datasets").load_dataset(str(path), cache_dir=str(path.parent / "cache"))["train"]
    return found.with_format("arrow")[:]


TOOLS = (by_pandas, by_polars, by_polars_scan, by_pyarrow, by_duckdb, by_datasets)


@pytest.mark.parametrize("read", TOOLS)
def test_a_folder_is_opened_by_its_path_alone(folder: Path, read: Callable[[Path], pa.Table]) -> None:
    table, exp = read(folder), whole()
    order = np.lexsort([np.asarray(table["t"]), np.asarray(table["segment"])])
    table = table.take(order)
    assert table["episode_id"].to_pylist() == np.repeat(np.asarray(exp.segments.episode_id), exp.lengths).tolist()
    assert np.array_equal(np.array(table["obs"].to_pylist(), np.float32), exp.steps["obs"])
    assert table["action"].to_pylist() == exp.steps["action"].tolist()
    assert table["reward"].to_pylist() == exp.steps["reward"].tolist()
    assert table["terminated"].to_pylist() == exp.at_ends(exp.segments.terminated).tolist()
    assert [value for value in table["final_obs"].to_pylist() if value is not None] == exp.final_obs["obs"].tolist()
    assert len(set(table["segment"].to_pylist())) == len(LENGTHS)


def same(recording: Recording, exp: Experience) -> None:
    """The same experience, whatever the order of episodes."""
    found = recording.read()
    order = np.argsort(found.segments.episode_id.astype(str), kind="stable")
    assert_same(found.select(order), exp)


def shuffled(table: pa.Table, seed: int = 0) -> pa.Table:
    return table.take(np.random.default_rng(seed).permutation(len(table)))


@pytest.mark.parametrize("read", TOOLS)
@pytest.mark.parametrize("how", ["as it is", "shuffled", "sorted"])
def test_what_is_read_and_written_anew_is_the_same(
    tmp_path: Path, folder: Path, read: Callable[[Path], pa.Table], how: str
) -> None:
    table = read(folder)
    if how == "shuffled":
        table = shuffled(table)
    if how == "sorted":
        table = table.sort_by([("reward", "descending")])
    (tmp_path / "anew").mkdir()
    pq.write_table(table.replace_schema_metadata(None), tmp_path / "anew" / "x.parquet", row_group_size=9)
    given = Recording.open(Source(tmp_path / "anew", preset="etude", obs_space=OBS, action_space=ACTION))
    assert (given.obs_space, given.action_space) == (OBS, ACTION)
    same(given, whole())
    inferred = Recording.open(tmp_path / "anew")
    assert inferred.obs_space == OBS
    assert inferred.action_space == gym.spaces.Discrete(7)
    same(inferred, whole())
    assert validate(tmp_path / "anew").ok
    same(convert(given, tmp_path / "own"), whole())
    for batch in given.batches(8, columns=["obs", "next_obs"], epochs=1):
        np.testing.assert_array_equal(batch["next_obs"][:, 1], batch["obs"][:, 1] + 1)


def test_what_each_tool_itself_writes(tmp_path: Path, folder: Path) -> None:
    pandas, polars, duckdb = tool("pandas"), tool("polars"), tool("duckdb")
    outs = [tmp_path / name for name in ("pandas", "polars", "duckdb")]
    for out in outs:
        out.mkdir()
    pandas.read_parquet(folder).sample(frac=1.0, random_state=1).to_parquet(outs[0] / "x.parquet")
    polars.scan_parquet(folder).sort("action", "obs").collect().write_parquet(outs[1] / "x.parquet")
    copied = f"COPY (FROM read_parquet('{folder}/*.parquet') ORDER BY t) TO '{outs[2]}/x.parquet' (FORMAT parquet)"
    duckdb.connect().execute(copied)
    for out in outs:
        same(Recording.open(out), whole())


def test_folders_named_by_the_values_of_a_column_are_parts_of_one_recording(tmp_path: Path, folder: Path) -> None:
    """As Spark, DuckDB, polars and Arrow write them."""
    table = ds.dataset(folder).to_table()
    table = table.append_column("half", pa.array(np.arange(len(table)) % 2))
    for name in ("agent_id", "half", "terminated", "episode_id"):
        out = tmp_path / name
        given = table if name == "half" else table.drop_columns(["half"])
        ds.write_dataset(given, out, format="parquet", partitioning=[name], partitioning_flavor="hive")
        found = Recording.open(out)
        steps = found.read()
        assert found.num_episodes == len(LENGTHS)
        assert steps.num_steps == ROWS
        assert validate(out).ok
        if name != "half":
            same(Recording.open(out), whole())
    bare = table.drop_columns(["half"]).replace_schema_metadata(None)  # as pandas does
    ds.write_dataset(bare, tmp_path / "bare", format="parquet", partitioning=["episode_id"], partitioning_flavor="hive")
    assert Recording.open(tmp_path / "bare").num_episodes == len(LENGTHS)
    wide = table.append_column("level", pa.array(["low"] * len(table)))
    names = ["level", "half"]
    ds.write_dataset(wide, tmp_path / "two", format="parquet", partitioning=names, partitioning_flavor="hive")
    assert {"level", "half"} <= Recording.open(tmp_path / "two").read().steps.keys()
    ds.write_dataset(wide, tmp_path / "only", format="parquet", partitioning=["level"], partitioning_flavor="hive")
    assert set(Recording.open(tmp_path / "only").read().steps["level"]) == {"low"}
    for k, part in enumerate(("m", "n")):  # as polars does: with the column in the files as well
        (tmp_path / "both" / f"module_id={part}").mkdir(parents=True)
        rows = table.filter(pc.equal(table["module_id"], part)).replace_schema_metadata(None)
        pq.write_table(rows.drop_columns(["half"]), tmp_path / "both" / f"module_id={part}" / f"{k}.parquet")
    same(Recording.open(tmp_path / "both"), whole())


def test_a_folder_of_a_module_is_no_part_whatever_its_name(tmp_path: Path) -> None:
    """Etude gives modules of other spaces folders of their own."""
    for name in ("lr=0.1", "lr=0.2"):
        record(tmp_path / "r" / name, whole())
    assert Recording.open(tmp_path / "r").num_episodes == 2 * len(LENGTHS)


@pytest.mark.parametrize("order", ["as it is", "shuffled"])
def test_a_tool_that_keeps_the_header_may_change_types(tmp_path: Path, folder: Path, order: str) -> None:
    table = ds.dataset(folder).to_table()
    for name, kind in (("obs", pa.list_(pa.float32())), ("action", pa.int32()), ("t", pa.int32())):
        table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(kind))
    (tmp_path / "out").mkdir()
    pq.write_table(table if order == "as it is" else shuffled(table), tmp_path / "out" / "x.parquet")
    found = Recording.open(tmp_path / "out")
    assert (found.obs_space, found.action_space, found.meta["seed"]) == (OBS, ACTION, 1)
    same(found, whole())


def test_one_file_may_lack_the_segments_that_others_have(folder: Path) -> None:
    file = sorted(folder.iterdir())[1]
    pq.write_table(pq.read_table(file).drop_columns(["segment"]).replace_schema_metadata(None), file)
    same(Recording.open(folder), whole())


def test_what_datasets_itself_writes(tmp_path: Path, folder: Path) -> None:
    found = tool("datasets").load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))["train"]
    (tmp_path / "out").mkdir()
    found.shuffle(seed=3).to_parquet(str(tmp_path / "out" / "x.parquet"))
    same(Recording.open(tmp_path / "out"), whole())


@pytest.mark.parametrize("rows", [9, 10**6])
def test_with_the_header_kept_spaces_and_meta_are(tmp_path: Path, folder: Path, rows: int) -> None:
    (tmp_path / "out").mkdir()
    pq.write_table(shuffled(pq.read_table(folder)), tmp_path / "out" / "x.parquet", row_group_size=rows)
    recording = Recording.open(tmp_path / "out")
    assert (recording.obs_space, recording.action_space, recording.env) == (OBS, ACTION, "Numbered-v0")
    assert recording.meta == {"seed": 1}
    same(recording, whole())


def test_one_file_among_others_is_written_anew(folder: Path) -> None:
    file = folder / "part-00001.parquet"
    pq.write_table(shuffled(pq.read_table(file)), file)
    same(Recording.open(folder), whole())
    pq.write_table(pq.read_table(file).replace_schema_metadata(None), file)
    same(Recording.open(folder), whole())


def test_whole_episodes_that_are_left_out_are_missed_by_nobody(tmp_path: Path, folder: Path) -> None:
    table = by_pyarrow(folder)
    (tmp_path / "out").mkdir()
    kept = [name != "e1" for name in table["episode_id"].to_pylist()]
    pq.write_table(shuffled(table.filter(pa.array(kept))), tmp_path / "out" / "x.parquet")
    same(Recording.open(tmp_path / "out"), whole().select([0, 2, 3]))


def test_steps_that_are_left_out_are_never_skipped_over(tmp_path: Path) -> None:
    """Every second step is gone: nothing that is left follows another."""
    record(tmp_path / "r", numbered([8, 6]))
    table = by_pyarrow(tmp_path / "r")
    (tmp_path / "out").mkdir()
    odd = [t % 2 == 1 for t in table["t"].to_pylist()]
    for metadata in (table.schema.metadata, None):
        kept = shuffled(table.filter(pa.array(odd))).replace_schema_metadata(metadata)
        pq.write_table(kept, tmp_path / "out" / "x.parquet")
        with pytest.raises(DataError, match="unknown after the last step"):
            Recording.open(tmp_path / "out").read()
        exp = Recording.open(tmp_path / "out", on_bad=None).read()
        assert sorted(exp.segments.t_start.tolist()) == [1, 1, 3, 3, 5, 5, 7]
        assert exp.lengths.tolist() == [1] * 7
        assert exp.segments.has_final_obs.sum() == 2


def test_what_follows_may_be_known_nowhere(tmp_path: Path) -> None:
    exp = numbered([8, 6], has_final_obs=False, terminated=True, truncated=False)
    record(tmp_path / "r", exp)
    (tmp_path / "out").mkdir()
    pq.write_table(shuffled(by_pyarrow(tmp_path / "r")), tmp_path / "out" / "x.parquet", row_group_size=3)
    same(Recording.open(tmp_path / "out"), exp)


def test_images_and_nested_columns_come_back(tmp_path: Path) -> None:
    space = gym.spaces.Dict({"camera": gym.spaces.Box(0, 255, (4, 3), np.uint8), "arm": gym.spaces.Box(-1, 1, (2, 3))})
    act = gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,))])
    rng = np.random.default_rng(0)
    exp = numbered([9, 6])
    camera = rng.integers(0, 255, (15, 4, 3), dtype=np.uint8)
    arm, push = rng.uniform(-1, 1, (15, 2, 3)).astype(np.float32), rng.uniform(-1, 1, (15, 2)).astype(np.float32)
    steps = {"obs/camera": camera, "obs/arm": arm, "action/0": rng.integers(0, 3, 15), "action/1": push}
    steps |= {"reward": exp.steps["reward"], "info/who": np.array(list("abcde") * 3, object), "info/k": np.arange(15)}
    finals = {"obs/camera": camera[:2], "obs/arm": arm[:2]}
    exp = Experience(steps, exp.offsets, exp.segments, finals)
    with RecordingWriter(tmp_path / "r", obs_space=space, action_space=act) as writer:
        writer.write(exp)
    for i, read in enumerate((by_pyarrow, by_pandas, by_polars)):
        out = tmp_path / str(i)
        out.mkdir()
        pq.write_table(shuffled(read(tmp_path / "r")).replace_schema_metadata(None), out / "x.parquet")
        found = Recording.open(Source(out, preset="etude", obs_space=space, action_space=act)).read()
        order = np.argsort(found.segments.episode_id.astype(str))
        found = found.select(order)
        assert_same(Experience({name: found.steps[name] for name in steps}, found.offsets, found.segments, {
            name: found.final_obs[name] for name in finals
        }), exp)  # fmt: skip


def test_a_column_that_pyarrow_rewrites_keeps_the_axes_of_its_rows(tmp_path: Path) -> None:
    grid = np.arange(15 * 4.0).reshape(15, 2, 2)
    record(tmp_path / "r", numbered([9, 6]).with_steps(grid=grid))
    (tmp_path / "out").mkdir()
    pq.write_table(shuffled(pq.read_table(tmp_path / "r")), tmp_path / "out" / "x.parquet")
    same(Recording.open(tmp_path / "out"), numbered([9, 6]).with_steps(grid=grid))


def test_a_file_that_only_looks_like_one_of_etude_is_named(tmp_path: Path, folder: Path) -> None:
    table = by_pyarrow(folder)
    pq.write_table(table.drop_columns(["t"]).replace_schema_metadata(None), folder / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet: is not part of a recording: it carries no Etude header"):
        Recording.open(folder)


# -- null lists ------------------------------------------------------------------------------------------------------


def test_no_column_of_fixed_size_may_be_null(folder: Path) -> None:
    # PyArrow before 26 can't write or read such a column: https://github.com/apache/arrow/issues/35692
    schema = pq.read_schema(next(folder.iterdir()))
    assert pa.types.is_fixed_size_list(schema.field("obs").type)
    assert pa.types.is_list(schema.field("final_obs").type)
    assert [field.name for field in schema if field.nullable and pa.types.is_fixed_size_list(field.type)] == []


@pytest.mark.parametrize("value", [[1.0], [1.0, 2.0, 3.0, 4.0, 5.0], []])
def test_a_final_observation_of_another_length_is_named(folder: Path, value: list[float]) -> None:
    path = min(folder.iterdir())
    table = pq.read_table(path)
    i, field = table.column_names.index("final_obs"), table.schema.field("final_obs")
    finals = table["final_obs"].to_pylist()
    finals[next(row for row, own in enumerate(finals) if own is not None)] = value
    order = pq.SortingColumn.from_ordering(table.schema, [("segment", "ascending"), ("t", "ascending")])
    pq.write_table(table.set_column(i, field, pa.array(finals, field.type)), path, sorting_columns=order)
    with pytest.raises(DataError, match=rf"{path}: row group 0: column `final_obs` has lists of \d"):
        Recording.open(folder).read()


def with_finals_of_fixed_size(path: Path) -> None:
    """Write a file anew as Etude did at first."""
    table = pq.read_table(path)
    i, field = table.column_names.index("final_obs"), table.schema.field("final_obs")
    kind = pa.list_(field.type.value_field, table.schema.field("obs").type.list_size)
    table = table.set_column(i, field.with_type(kind), pa.array(table["final_obs"].to_pylist(), kind))
    order = pq.SortingColumn.from_ordering(table.schema, [("segment", "ascending"), ("t", "ascending")])
    pq.write_table(table, path, sorting_columns=order)


@pytest.mark.parametrize(
    ("version", "remedy"), [("25.0.0", "PyArrow 26 can read it; this is 25"), ("26.1.0", "Restore the file")]
)
def test_an_older_pyarrow_is_told_to_be_updated(
    folder: Path, version: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:  # as PyArrow 25 does, which is not installed here
        raise pa.ArrowInvalid("Expected all lists to be of size=3 but index 1 had size=0")

    recording = Recording.open(folder)
    monkeypatch.setattr(pa, "__version__", version)
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", fails)
    with pytest.raises(DataError, match=f"Expected all lists to be of size=3.*{remedy}"):
        recording.read()


@pytest.mark.skipif(
    int(pa.__version__.split(".")[0]) < 26, reason="PyArrow before 26 can't write null fixed-size lists"
)
def test_finals_of_fixed_size_are_still_read_and_appended_to(folder: Path) -> None:
    before = Recording.open(folder).read()
    first = min(folder.iterdir())
    with_finals_of_fixed_size(first)
    assert pa.types.is_fixed_size_list(pq.read_schema(first).field("final_obs").type)
    assert validate(folder).ok
    assert_same(Recording.open(folder).read(), before)
    for path in folder.iterdir():
        with_finals_of_fixed_size(path)
    record(folder, numbered([5], first=ROWS), append=True)
    assert validate(folder).ok
    assert Recording.open(folder).read().num_steps == ROWS + 5


@pytest.mark.parametrize("rewritten", ["both", "one"])
def test_recordings_in_folders_of_like_names_stay_several(tmp_path: Path, rewritten: str) -> None:
    """As a user names them, of runs with other seeds, whose episodes have the same ids."""
    for seed in (1, 2):
        folder = tmp_path / "runs" / f"seed={seed}"
        record(folder, whole())
        for file in folder.iterdir() if rewritten == "both" or seed == 2 else ():
            pq.write_table(pq.read_table(file).replace_schema_metadata(None), file)
    found = Recording.open(tmp_path / "runs")
    assert found.num_episodes == 2 * len(LENGTHS)
    assert {episode[:2] for episode in found.read().segments.episode_id} == {"0-", "1-"}


@pytest.mark.parametrize(
    "folders",
    [
        ("seed=1", "seed=2"),
        ("reward=dense", "reward=sparse"),
        ("agent_id=x", "agent_id=y"),
        ("lr=1/seed=1", "lr=1/seed=2"),
        ("seed=1/agent_id=", "seed=2"),
    ],
)
@pytest.mark.parametrize("first", [0, 2])
def test_the_same_steps_in_two_folders_are_of_two_recordings(
    tmp_path: Path, folder: Path, folders: tuple[str, str], first: int
) -> None:
    """Whatever the folders are called, also if the first steps were filtered out."""
    table = ds.dataset(folder).to_table()
    table = table.filter(pc.greater_equal(table["t"], first))
    for name in folders:
        out = tmp_path / "runs" / name.removesuffix("/agent_id=")
        if name.endswith("="):
            ds.write_dataset(table, out, format="parquet", partitioning=["agent_id"], partitioning_flavor="hive")
        else:
            out.mkdir(parents=True)
            pq.write_table(table, out / "x.parquet")
    found = Recording.open(tmp_path / "runs")
    assert found.read().num_steps == 2 * len(table)
    assert found.num_episodes == 2 * len(pc.unique(table["episode_id"]))


def test_files_may_be_beside_folders_named_by_values(tmp_path: Path, folder: Path) -> None:
    table = ds.dataset(folder).to_table().replace_schema_metadata(None)
    for part in ("", "seed=1", "seed=2"):
        (tmp_path / "runs" / part).mkdir(parents=True, exist_ok=True)
        pq.write_table(table, tmp_path / "runs" / part / "x.parquet")
    found = Recording.open(tmp_path / "runs")
    assert (found.num_episodes, found.read().num_steps) == (3 * len(LENGTHS), 3 * ROWS)


def test_the_work_to_tell_parts_from_recordings_grows_with_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not with the folders over which each episode is spread."""
    record(tmp_path / "r", numbered([40, 40]))
    table = ds.dataset(tmp_path / "r").to_table().replace_schema_metadata(None)
    for k in range(40):
        (tmp_path / "out" / f"part={k}").mkdir(parents=True)
        pq.write_table(table.take([k, 40 + k]), tmp_path / "out" / f"part={k}" / "x.parquet")
    compared: list[int] = []
    different = opening._different
    monkeypatch.setattr(opening, "_different", lambda rows: (compared.extend(map(len, rows)), different(rows))[1])
    assert Recording.open(tmp_path / "out").num_episodes == 2
    assert sum(compared) < 8 * len(table)


def test_recordings_of_other_spaces_are_no_parts_of_one(tmp_path: Path) -> None:
    for task in (5, 7):
        folder = tmp_path / "tasks" / f"task={task}"
        with RecordingWriter(folder, obs_space=OBS, action_space=gym.spaces.Discrete(1000 + task)) as writer:
            writer.write(numbered([4], first=task))
        for file in folder.iterdir():
            pq.write_table(pq.read_table(file), file)
    with pytest.raises(DataError, match=r"the `action` space is Discrete\(1005\) in the first, and Discrete\(1007\)"):
        Recording.open(tmp_path / "tasks")


def test_what_else_is_beside_the_parts_is_not_read(tmp_path: Path, folder: Path) -> None:
    out = tmp_path / "out"
    ds.write_dataset(ds.dataset(folder), out, format="parquet", partitioning=["agent_id"], partitioning_flavor="hive")
    (out / "progress.csv").write_text("step,loss\n1,2\n")
    same(Recording.open(out), whole())
    record(out / "more", numbered([3], first=9, agent_id=["a"], module_id=["m"]))
    assert Recording.open(out).num_episodes == len(LENGTHS) + 1


@pytest.mark.parametrize("name", ["t", "segment"])
@pytest.mark.parametrize("on_bad", ["strict", "skip", None])
def test_rows_that_fall_are_out_of_order_whatever_their_type(tmp_path: Path, name: str, on_bad: Any) -> None:
    """Differences of numbers without a sign are never below 0."""
    record(tmp_path / "r", numbered([9, 6]).cut(4))
    table = pq.read_table(tmp_path / "r")
    falls = {"t": [("segment", "ascending"), ("t", "descending")], "segment": [("segment", "descending")]}
    table = table.sort_by(falls[name])
    table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(pa.uint32()))
    (tmp_path / "out").mkdir()
    pq.write_table(table, tmp_path / "out" / "x.parquet")
    found = Recording.open(tmp_path / "out", on_bad=on_bad)
    same(found, numbered([9, 6]))
    (batch,) = found.batches(15, columns=["reward"], shuffle=False, epochs=1)
    first = numbered([9, 6]).steps["reward"] < 1
    assert batch["reward"][batch["reward"] < 1].tolist() == numbered([9, 6]).steps["reward"][first].tolist()
    assert batch["reward"][batch["reward"] >= 1].tolist() == numbered([9, 6]).steps["reward"][~first].tolist()
    assert not found.left_out


def test_images_as_lists_in_one_file_are_left_out_alone(tmp_path: Path) -> None:
    space = gym.spaces.Box(0, 255, (4, 3, 1), np.uint8)
    images = np.random.default_rng(0).integers(0, 255, (15, 4, 3, 1), dtype=np.uint8)
    exp = numbered([9, 6])
    exp = Experience({**exp.steps, "obs": images}, exp.offsets, exp.segments, {"obs": images[:2]})
    with RecordingWriter(tmp_path, obs_space=space, action_space=ACTION, max_rows_per_file=9) as writer:
        writer.write(exp)
    file = sorted(tmp_path.iterdir())[1]
    table = pq.read_table(file)
    lists = pa.array([list(image) for image in table["obs"].to_pylist()], pa.list_(pa.uint8()))
    pq.write_table(table.set_column(table.schema.get_field_index("obs"), "obs", lists), file)
    assert Recording.open(tmp_path, on_bad="skip").read().num_steps == 9
    assert [problem.kind for problem in validate(tmp_path).problems] == ["wrong_type"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("reward", "text"), ("reward", "gone"), ("action", "float"), ("terminated", "number"), ("obs", "longer")],
)
def test_one_rewritten_file_that_does_not_fit_is_left_out_alone(folder: Path, name: str, kind: str) -> None:
    """Whatever else has changed in it: its observations are wider, which is no fault."""
    file = sorted(folder.iterdir())[1]
    table = pq.read_table(file)
    table = table.set_column(table.schema.get_field_index("obs"), "obs", table["obs"].cast(pa.list_(pa.float64(), 3)))
    made = {
        "text": lambda: table[name].cast(pa.string()),
        "float": lambda: table[name].cast(pa.float64()),
        "number": lambda: table[name].cast(pa.int8()),
        "longer": lambda: pa.array([[0.0] * 4] * len(table), pa.list_(pa.float64(), 4)),
    }
    if kind == "gone":
        table = table.drop_columns([name])
    else:
        table = table.set_column(table.schema.get_field_index(name), name, made[kind]())
    pq.write_table(table, file)
    with pytest.raises(DataError, match=f"column `{name}`"):
        Recording.open(folder)
    left = Recording.open(folder, on_bad="skip")
    assert left.read().num_steps > 0
    assert len(table) in left.left_out.values()
