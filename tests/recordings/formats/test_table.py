# SPDX-License-Identifier: Apache-2.0
"""Any table, against a naive regrouping of its rows."""

import datetime
import io
import json
import uuid
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from etude.cli.main import main
from etude.errors import DataError, SettingsError
from etude.experience import Experience, Segments
from etude.recordings import Recording, RecordingWriter, cache, guess_columns, validate
from etude.recordings.formats import table_index, table_inputs
from etude.recordings.formats.source import Source

COLUMNS = {
    "obs": ["speed", "angle"],
    "action": "command",
    "reward": "score",
    "terminated": "end",
    "episode_id": "trip",
    "t": "tick",
}
NEXTS = {"next_obs": ["speed2", "angle2"]}
Row = dict[str, Any]


def rows_of(lengths: list[int], agents: int = 1, first: int = 0) -> list[Row]:
    """Rows whose observations tell their episode, agent and time, in order."""
    out = []
    for e, length in enumerate(lengths):
        for agent in range(agents):
            for t in range(first, first + length):
                own = {"speed": e + agent / 10, "angle": float(t), "speed2": e + agent / 10, "angle2": t + 1.0}
                last = t == first + length - 1
                own |= {"command": (e + t) % 3, "score": e * 100.0 + t, "end": last and e % 2 == 0, "trip": f"trip-{e}"}
                out.append(own | {"tick": t, "who": f"car-{agent}", "note": f"at {e}.{t}"})
    return out


def table_of(rows: list[Row]) -> pa.Table:
    return pa.Table.from_pylist(rows)


def everything(recording: Recording) -> Experience:
    exps = [recording.part(k) for k in range(recording.num_parts)]
    exp = Experience.concat(exps)
    exp.validate()
    assert recording.num_steps == exp.num_steps
    return exp


def read(data: Any, columns: Any = COLUMNS, **more: Any) -> Experience:
    return everything(Recording.open(Source(data, columns=columns, **more), on_bad=None))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 3), st.randoms(), st.integers(0, 4))
def test_rows_in_any_order_become_the_same_segments(lengths: list[int], agents: int, random: Any, first: int) -> None:
    rows = rows_of(lengths, agents, first)
    random.shuffle(rows)
    exp = read(table_of(rows), {**COLUMNS, **NEXTS, "agent_id": "who"})
    wanted: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        wanted.setdefault((row["trip"], row["who"]), []).append(row)
    assert exp.num_segments == len(wanted)
    for i in range(exp.num_segments):
        own = sorted(wanted[exp.segments.episode_id[i], exp.segments.agent_id[i]], key=lambda row: row["tick"])
        assert exp[i].steps["obs"].tolist() == [[row["speed"], row["angle"]] for row in own]
        assert exp[i].steps["action"].tolist() == [row["command"] for row in own]
        assert exp[i].steps["reward"].tolist() == [row["score"] for row in own]
        assert exp[i].steps["note"].tolist() == [row["note"] for row in own]
        assert exp.final_obs["obs"][i].tolist() == [own[-1]["speed2"], own[-1]["angle2"]]
        assert exp.segments.t_start[i] == (0 if first == 1 else first)  # counted from 1
        assert exp.segments.terminated[i] == own[-1]["end"]


FORMATS = {
    "a.parquet": lambda table, path: pq.write_table(table, path, row_group_size=7),
    "b.csv": lambda table, path: pa.csv.write_csv(table, path),
    "c.feather": lambda table, path: pa.feather.write_feather(table, path),
    "d.jsonl": lambda table, path: path.write_text("\n".join(map(json.dumps, table.to_pylist()))),
    "e.json": lambda table, path: path.write_text(json.dumps(table.to_pylist())),
    "no_suffix": lambda table, path: pq.write_table(table, path),
}


@pytest.mark.parametrize("name", list(FORMATS))
def test_kinds_of_files(tmp_path: Path, name: str) -> None:
    table = table_of(rows_of([4, 2, 5, 3, 6]))
    FORMATS[name](table, tmp_path / name)
    exp, wanted = read(tmp_path / name), read(table)
    for column, values in wanted.steps.items():
        np.testing.assert_array_equal(exp.steps[column], values)
    assert exp.lengths.tolist() == wanted.lengths.tolist() == [4, 2, 5, 3, 6]


def test_folders_globs_and_lists(tmp_path: Path) -> None:
    rows = rows_of([3, 4, 5])
    (tmp_path / "sub").mkdir()
    paths = [tmp_path / "a.parquet", tmp_path / "sub" / "b.csv"]
    pq.write_table(table_of(rows[:5]), paths[0])  # the second trip is in both
    pa.csv.write_csv(table_of(rows[5:]), paths[1])
    for data in (tmp_path, str(tmp_path / "**" / "*.*"), paths, [str(path) for path in paths]):
        recording = Recording.open(Source(data, columns=COLUMNS), on_bad=None)
        assert recording.files == paths
        assert everything(recording).lengths.tolist() == [3, 4, 5]
    with pytest.raises(DataError, match=r"\*\.orc: no file or folder matches this glob"):
        Recording.open(Source(str(tmp_path / "*.orc"), columns=COLUMNS), on_bad=None)
    (tmp_path / "c.orc").write_bytes(b"ORC")
    with pytest.raises(DataError, match="is a table of an unknown kind"):
        Recording.open(Source(tmp_path / "c.orc", columns=COLUMNS), on_bad=None)


def test_files_in_hidden_folders_are_left_out(tmp_path: Path) -> None:
    pq.write_table(table_of(rows_of([3])), tmp_path / "a.parquet")
    for name in (".ipynb_checkpoints", "_temporary"):
        (tmp_path / name).mkdir()
        pq.write_table(table_of(rows_of([4])), tmp_path / name / "a.parquet")
    assert Recording.open(Source(tmp_path, columns=COLUMNS)).files == [tmp_path / "a.parquet"]


def test_a_file_that_is_given_twice_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name in ("a.parquet", "more/b.parquet"):
        pq.write_table(table_of(rows_of([3])), tmp_path / name)
    (link := tmp_path.parent / "link.parquet").symlink_to(tmp_path / "more/b.parquet")
    columns = {"obs": "speed", "action": "command", "terminated": "every-row"}
    assert read(tmp_path, columns).num_steps == read(str(tmp_path / "**/*.parquet"), columns).num_steps == 6
    for data in (
        f"{tmp_path}/**",
        [tmp_path, f"{tmp_path}/more/*"],
        [tmp_path / "more/b.parquet"] * 2,
        [tmp_path / "more/b.parquet", link],
    ):
        with pytest.raises(DataError, match=r"[ab]\.parquet was given twice, so its steps would count twice"):
            read(data, columns)


def test_tables_of_other_libraries() -> None:
    table = table_of(rows_of([3, 4]))

    class Stream:  # as pandas and polars hand themselves over
        def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
            return table.__arrow_c_stream__(requested_schema)

    class Batches:  # as a Ray dataset does
        def iter_batches(self, *, batch_size: int | None, batch_format: str) -> Any:
            assert (batch_size, batch_format) == (None, "pyarrow")
            return iter([table.slice(0, 5), table.slice(5)])

    class Arrow:
        def to_arrow(self) -> pa.Table:
            return table

    for data in (Stream(), Batches(), Arrow(), table.to_batches()[0]):
        assert read(data).lengths.tolist() == [3, 4]
    with pytest.raises(DataError, match="a set is neither a path nor a table .* Give a table of pandas"):
        Recording.open(Source({1}, columns=COLUMNS), on_bad=None)


def test_steps_that_are_counted_from_one() -> None:
    rows = rows_of([3, 2], first=1)
    recording = Recording.open(Source(table_of(rows), columns=COLUMNS), on_bad=None)
    assert recording.read().segments.t_start.tolist() == [0, 0]
    assert recording.meta["inferred"]["t"] == "counts from 1 in the table"
    without_first = [row for row in rows if row["trip"] == "trip-0" or row["tick"] > 1]
    assert read(table_of(without_first)).segments.t_start.tolist() == [0, 1]
    fives = [row | {"tick": row["tick"] * 5} for row in rows]
    recording = Recording.open(Source(table_of(fives), columns=COLUMNS), on_bad=None)
    assert recording.read().segments.t_start.tolist() == [0, 0]
    assert recording.meta["inferred"]["t"] == "counts from 5 and by 5 in the table"


def test_views_of_text_out_of_order(tmp_path: Path) -> None:  # as polars hands its columns over
    view = pa.string_view()
    names = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1, 0]), pa.array(["stay", "go"], view))
    table = pa.table(
        {
            "trip": pa.array(["b", "a", "b", "a"], view),
            "time": [1, 1, 0, 0],
            "place": pa.array([{"name": text, "x": [x]} for text, x in zip("xyzy", (4.0, 2, 3, 1), strict=True)]).cast(
                pa.struct([("name", view), ("x", pa.list_(pa.float64(), 1))])
            ),
            "command": names,
            "notes": pa.array([["n"]] * 4, pa.list_(view)),
            "image": pa.array([b"4", b"2", b"3", b"1"], pa.binary_view()),
        }
    )
    texts = pa.array(["go", "stay", "go", "stay"], view)
    pq.write_table(table.set_column(3, "command", texts), tmp_path / "plain.parquet")  # it can't write names of views
    for new, name in ((pa.ipc.new_file, "file.arrow"), (pa.ipc.new_stream, "stream.arrow")):
        with new(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    columns = {"obs": "place", "action": "command", "episode_id": "trip", "t": "time", "terminated": "last-row"}
    for data in (table, *sorted(tmp_path.iterdir())):
        recording = Recording.open(Source(data, columns=columns))
        exp = recording.read()
        assert exp.steps["obs/x"].ravel().tolist() == [3, 4, 1, 2]
        assert [recording.obs_space["name"].names[i] for i in exp.steps["obs/name"]] == ["z", "x", "y", "y"]
        assert [recording.action_space.names[i] for i in exp.steps["action"]] == ["go", "go", "stay", "stay"]
        assert exp.steps["image"].ravel().tolist() == [*b"3412"]
        assert list(recording.meta["dropped"]) == ["notes"]
        assert guess_columns(data).columns["episode_id"] == "trip"


def test_spaces_and_columns() -> None:
    recording = Recording.open(Source(table_of(rows_of([3, 4])), columns=COLUMNS, env="Cars-v0"), on_bad=None)
    assert recording.header.obs_space == gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    assert recording.header.action_space == gym.spaces.Discrete(3)
    assert recording.header.env == "Cars-v0"
    assert recording.columns == ["obs", "action", "reward", "speed2", "angle2", "who", "note"]
    space = gym.spaces.Box(0, 100, (2,), np.float32)
    recording = Recording.open(Source(table_of(rows_of([3])), columns=COLUMNS, obs_space=space), on_bad=None)
    assert recording.header.obs_space == space  # though the table has doubles: spaces must be equal to be merged
    assert recording.read().steps["obs"].dtype == np.float32
    with pytest.raises(DataError, match=r"the table: `obs` has rows of shape \[2\], but its space is Discrete\(4\)"):
        Recording.open(Source(table_of(rows_of([3])), columns=COLUMNS, obs_space=gym.spaces.Discrete(4)), on_bad=None)
    exp = Recording.open(Source(table_of(rows_of([3])), columns={**COLUMNS, **NEXTS}), on_bad=None).part(0, ["reward"])
    assert (list(exp.steps), exp.final_obs) == (["reward"], {})


def test_a_space_that_does_not_fit_is_told_with_the_file(tmp_path: Path) -> None:
    for name in ("a.parquet", "b.parquet"):
        pq.write_table(table_of(rows_of([3, 4])), tmp_path / name)
    for space in (gym.spaces.Discrete(4), gym.spaces.MultiDiscrete([4, 4]), gym.spaces.MultiBinary(2)):
        source = Source(str(tmp_path), columns=COLUMNS, obs_space=space)
        with pytest.raises(DataError, match=r"^\S*a\.parquet: .*`obs` .*, but its space is "):
            Recording.open(source)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"command": [None, 1, 2]}, "row 0: column `command` is empty"),
        ({"trip": ["a", None, "a"]}, "row 1: column `episode_id` is empty"),
        ({"tick": ["x", "y", "z"]}, "row 0: the column `tick` of `t` is text such as 'x'"),
        ({"speed": None}, "there is no column `speed`"),
        (None, "has no rows, only the names"),
    ],
)
def test_a_table_that_can_not_be_used_has_a_report(changed: Any, message: str, tmp_path: Path) -> None:
    table = table_of(rows_of([3]))
    table = table.slice(0, 0) if changed is None else table
    for name, values in (changed or {}).items():
        table = table.drop_columns(name)
        table = table if values is None else table.append_column(name, pa.array(values))
    pq.write_table(table, path := tmp_path / "cars.parquet")
    for data in (table, path):
        report = validate(Source(data, columns=COLUMNS))
        (problem,) = report.problems
        assert (problem.kind, report.ok, report.rows) == ("unreadable", False, 0)
        assert message in problem.message
    with pytest.raises(DataError, match="cars"):
        Recording.open(Source(path, columns=COLUMNS))


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.csv: there is no such file or folder\."):
        Recording.open(Source(tmp_path / "none.csv", columns=COLUMNS))
    with pytest.raises(DataError, match=r"there is no table file here\. Known are \.parquet"):
        Recording.open(Source(tmp_path, columns=COLUMNS))


def test_lists_structs_and_nested_columns() -> None:
    image = np.arange(4 * 2 * 3, dtype=np.uint8).reshape(4, 2, 3)
    table = pa.table(
        {
            "vec": pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]),
            "fixed": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(8)), 2),
            "image": pa.array(image.tolist(), pa.list_(pa.list_(pa.uint8()))),
            "both": pa.array([{"a": i, "b": [i, i]} for i in range(4)]),
            "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(image)),
            "ragged": pa.array([[1], [1, 2], [], [3]]),
            "when": pa.array([0, 1, 2, 3], pa.timestamp("s")),
            "action": [True, False, True, True],
            "id": [7, 7, 9, 9],
        }
    )
    columns = {"obs/image": "image", "obs/both": "both", "action": "action", "episode_id": "id"}
    recording = Recording.open(Source(table, columns=columns), on_bad=None)
    exp = everything(recording)
    np.testing.assert_array_equal(exp.steps["obs/image"], image)
    np.testing.assert_array_equal(exp.steps["tensor"], image)
    np.testing.assert_array_equal(exp.steps["obs/both/b"], np.repeat(np.arange(4), 2).reshape(4, 2))
    np.testing.assert_array_equal(exp.steps["fixed"], np.arange(8).reshape(4, 2))
    assert set(recording.meta["dropped"]) == {"ragged", "when"}
    assert recording.header.obs_space["both"]["a"] == gym.spaces.Discrete(4)
    assert recording.header.action_space == gym.spaces.Discrete(2)
    assert exp.steps["action"].tolist() == [1, 0, 1, 1]
    assert exp.segments.episode_id.tolist() == ["7", "9"]
    for name, message in (
        ("ragged", "the table, row 1: column `ragged` has 2 numbers, but 1 in the rows before it"),
        ("when", r"column `when` is of type timestamp\[s\], for instance '1970-01-01"),
    ):
        with pytest.raises(DataError, match=message):
            Recording.open(Source(table, columns={"obs": name, "action": "action", "episode_id": "id"}), on_bad=None)


def test_without_t_rows_stand_in_order_of_time() -> None:
    rows = rows_of([3, 2])
    mixed = [rows[i] for i in (0, 3, 1, 4, 2)]
    columns = {key: own for key, own in COLUMNS.items() if key != "t"}
    exp = read(table_of(mixed), columns)
    assert exp.steps["angle2"].tolist() == [1, 2, 3, 1, 2]
    assert exp.lengths.tolist() == [3, 2]
    assert exp.segments.t_start.tolist() == [0, 0]


def test_without_an_id_episodes_end_at_flags_or_where_t_falls() -> None:
    columns = {key: own for key, own in COLUMNS.items() if key != "episode_id"}
    exp = read(table_of(rows_of([3, 1, 2, 2])), columns)
    assert exp.lengths.tolist() == [3, 1, 2, 2]
    assert exp.segments.episode_id.tolist() == ["0", "1", "2", "3"]
    del columns["t"]
    exp = read(table_of(rows_of([3, 1, 2, 2])), columns)  # only the first and the third have a flag
    assert exp.lengths.tolist() == [3, 3, 2]
    assert exp.segments.terminated.tolist() == [True, True, False]
    assert not exp.segments.has_final_obs.any()


@pytest.mark.parametrize("kind", ["one table", "files", "arrays"])
def test_without_id_and_t_rows_go_on_where_their_next_observations_are(kind: str, tmp_path: Path) -> None:
    columns = {"obs": ["speed", "angle"], "action": "command", "terminated": "end"}
    rows = rows_of([6, 5, 4])
    table: Any = table_of(rows)
    if kind == "files":
        for i, part in enumerate((table[:4], table[4:13], table[13:])):
            pq.write_table(part, tmp_path / f"log-{i}.parquet")
        table = tmp_path
    elif kind == "arrays":
        table = {name: np.asarray(table[name]) for name in table.column_names}
    exp = read(table, columns | NEXTS)
    assert exp.lengths.tolist() == [6, 5, 4]
    assert exp.segments.terminated.tolist() == [bool(rows[last]["end"]) for last in (5, 10, 14)]
    assert exp.final_obs["obs"][:, 1].tolist() == [6, 5, 4]


def test_without_id_and_t_rows_out_of_order_stand_alone() -> None:
    columns = {"obs": ["speed", "angle"], "action": "command", "terminated": "end"}
    rows = rows_of([3, 2])[::-1]
    exp = read(table_of(rows), columns | NEXTS)
    assert exp.lengths.tolist() == [1] * 5
    assert exp.final_obs["obs"][:, 1].tolist() == [2, 1, 3, 2, 1]
    assert exp.segments.terminated.tolist() == [False, False, True, False, False]
    del columns["terminated"]
    assert read(table_of(rows_of([3, 2])), columns | NEXTS).lengths.tolist() == [1] * 5
    with pytest.raises(DataError, match="nothing says where episodes begin and end: map `episode_id`"):
        read(table_of(rows_of([3, 2])), columns)


def test_what_follows_the_last_step_may_be_empty() -> None:
    frame = table_of(rows_of([3, 2])).to_pandas().drop(columns=["speed2", "angle2"], errors="ignore")
    nexts = {"obs": "speed", "action": "command", "episode_id": "trip", "next_obs": "after"}
    frame["after"] = frame.groupby("trip")["speed"].shift(-1)
    exp = read(frame, nexts | {"terminated": "last-row"})
    assert exp.segments.has_final_obs.tolist() == [False, False]
    assert exp.final_obs["obs"].tolist() == [0, 0]
    found = Recording.open(Source(frame, nexts | {"truncated": "last-row"}), on_bad=None).validate().problems
    assert [problem.kind for problem in found] == ["no_final_obs"]


@pytest.mark.parametrize("last", [7, 300, 70.5, 2.0**40])
@pytest.mark.parametrize("kind", ["next_obs", "final_obs"])
def test_observations_are_as_wide_as_those_that_follow(kind: str, last: float, tmp_path: Path) -> None:
    follows: list[Any] = [2, 3, last] if kind == "next_obs" else [None, None, last]
    frame = pd.DataFrame({"x": np.array([1, 2, 3], np.int8), "y": np.int8(0), "after": follows, "same": [0, 0, 0]})
    frame = frame.assign(a=0, trip=0)
    frame.to_parquet(tmp_path / "log.parquet")
    columns = {"obs": ["x", "y"], "action": "a", "episode_id": "trip", "truncated": "last-row"}
    exp = read(tmp_path, columns | {kind: ["after", "same"]})
    assert exp.final_obs["obs"].tolist() == [[last, 0]]
    assert exp.steps["obs"].tolist() == [[1, 0], [2, 0], [3, 0]]
    exp = read(tmp_path, columns | {"obs": "x", kind: "after"})
    assert exp.final_obs["obs"].tolist() == [last]
    if kind == "next_obs":
        nested = pa.table({"o": [{"p": k} for k in (1, 2, 3)], "n": [{"p": value} for value in follows]})
        nested = nested.append_column("a", pa.array([0, 1, 0])).append_column("trip", pa.array([0, 0, 0]))
        exp = read(nested, columns | {"obs": "o", "next_obs": "n"})
        assert exp.final_obs["obs/p"].tolist() == [last]


@pytest.mark.parametrize("kind", ["float64", "Int64"])
def test_whole_numbers_that_follow_may_be_empty_at_the_end(kind: str) -> None:
    frame = pd.DataFrame({"x": [0, 1, 2, 0, 1], "y": [-1, 0, 1, 0, 1], "a": 0, "trip": [0, 0, 0, 1, 1]})
    for name in "xy":
        frame[f"{name}2"] = frame.groupby("trip")[name].shift(-1).astype(kind)
    columns = {"action": "a", "episode_id": "trip", "terminated": "last-row"}
    for obs in ("x", ["x", "y"]):
        exp = read(frame, columns | {"obs": obs, "next_obs": "x2" if obs == "x" else ["x2", "y2"]})
        assert exp.segments.has_final_obs.tolist() == [False, False]
        assert not exp.final_obs["obs"].any()
    frame["y2"] = frame["y2"].fillna(5)
    with pytest.raises(DataError, match="row 2: `next_obs` is empty in a part"):
        read(frame, columns | {"obs": ["x", "y"], "next_obs": ["x2", "y2"]})


@pytest.mark.parametrize(
    ("kind", "is_told"),
    [("own", True), ("own, with times", True), ("one goes on", False), ("all go on", False), ("steps", False)],
)
def test_files_that_count_their_own_episodes_are_told_of(
    kind: str, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    columns = {"obs": "x", "action": "a", "episode_id": "trip", "terminated": "last-row"}
    columns |= {"t": "when"} if "times" in kind or kind in ("all go on", "steps") else {}
    for k in range(2):
        rows = np.arange(12)
        trips = rows % 4 if kind == "all go on" else rows // 3 + (3 * k if kind == "one goes on" else 0)
        frame = pd.DataFrame({"x": rows * 1.0, "a": 0, "trip": trips})
        times = pd.Timestamp("2026-03-01") + pd.to_timedelta(rows + 12 * k, unit="h")
        frame["when"] = rows % 3 + 3 * k if kind == "steps" else times
        frame.to_csv(tmp_path / f"log-{k}.csv", index=False)
    Recording.open(Source(tmp_path, columns))
    assert ("4 of 4 episode ids in" in caplog.text) is is_told
    caplog.clear()
    if is_told:
        each = [Source(path, columns) for path in sorted(tmp_path.iterdir())]
        assert Recording.open(each).num_episodes == 8
        assert not caplog.text


def test_a_clock_that_was_set_back_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    times = pd.Timestamp("2026-10-25 00:00:02") + pd.to_timedelta(np.arange(40) * 15, unit="min")
    back = times.where(np.arange(40) < 12, times - pd.Timedelta(minutes=60, seconds=1))
    columns = {"obs": "x", "action": "a", "episode_id": "day", "t": "time", "terminated": "last-row"}
    frame = pd.DataFrame({"x": np.arange(40.0), "a": 0, "day": 0, "time": back})
    read(frame, columns)
    assert "row 12: the time in `t` goes back there, in an episode that is in order otherwise" in caplog.text
    caplog.clear()
    read(frame[10:14], columns)  # a few rows, which go back once
    assert "row 2: the time in `t` goes back there" in caplog.text
    caplog.clear()
    assert read(frame.assign(time=times).sample(frac=1, random_state=0), columns).steps["obs"].tolist() == [*range(40)]
    assert not caplog.text


def test_rows_of_which_few_go_on_stand_alone_and_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Random transitions between states that hardly change follow each other by chance."""
    rng = np.random.default_rng(0)
    state, after = (rng.random((2, 400)) < 0.04).astype(int)
    rows = {"x": state, "after": after, "a": state, "end": rng.random(400) < 0.1}
    exp = read(pa.table(rows), {"obs": "x", "action": "a", "next_obs": "after", "terminated": "end"})
    assert exp.num_segments == 400
    assert "so each row stands alone. If the rows are of whole episodes, map `episode_id` or `t`" in caplog.text


def test_episodes_go_on_over_the_borders_of_groups(tmp_path: Path) -> None:
    rows = rows_of([10] * 6 + [1])
    pq.write_table(table_of(rows), tmp_path / "log.parquet", row_group_size=9)
    columns = {"obs": ["speed", "angle"], "action": "command", "terminated": "end"}
    assert read(tmp_path, columns | NEXTS).lengths.tolist() == [10] * 6 + [1]
    for i, row in enumerate(rows[:30]):
        pq.write_table(table_of([row]), tmp_path / f"row-{i}.parquet")
    (tmp_path / "log.parquet").unlink()
    assert read(tmp_path, columns | NEXTS).lengths.tolist() == [10] * 3


def test_next_observations_of_other_parts_are_named() -> None:
    table = pa.table({"x": [0, 1], "n": [{"a": 1, "b": 2}] * 2, "a": [0, 1], "end": [False, True]})
    with pytest.raises(DataError, match="`next_obs` has the columns"):
        read(table, {"obs": "x", "next_obs": "n", "action": "a", "terminated": "end"})


def test_text_that_is_different_in_many_rows_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    rows = {"o": [f"{k}.5;{k}" for k in range(200)], "a": [0, 1] * 100, "trip": np.arange(200) // 10}
    columns = {"obs": "o", "action": "a", "episode_id": "trip", "terminated": "last-row"}
    read(pa.table(rows), columns)
    assert "`obs` is text with 200 different values in 200 rows, such as '0.5;0'" in caplog.text
    caplog.clear()
    read(pa.table(rows | {"o": ["wet", "dry"] * 100}), columns)
    assert not caplog.text


@pytest.mark.parametrize(("values", "other"), [(["7", "12", "err", "9"], "err"), (["0.5", "1", "-"], "-")])
def test_text_among_numbers_is_told_of(values: list[str], other: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = {"o": values * 5, "a": [0] * 5 * len(values), "trip": np.arange(5).repeat(len(values))}
    columns = {"obs": "o", "action": "a", "episode_id": "trip", "terminated": "last-row"}
    report = validate(Source(pa.table(rows), columns=columns))
    assert f"most of its {len(values)} different values are numbers, but {other!r} is not" in caplog.text
    assert [problem.harmless for problem in report.problems] == [True]
    caplog.clear()
    read(pa.table(rows | {"o": ["a1", "b2", "3", "err"][: len(values)] * 5}), columns)
    assert not caplog.text


def test_lists_beside_numbers_are_parts_of_their_own() -> None:
    rows = {"speed": [0.1, 0.2], "lidar": [[1.0, 2.0], [3.0, 4.0]], "a": [0, 1], "trip": [0, 0]}
    columns = {"obs": ["speed", "lidar"], "action": "a", "episode_id": "trip", "terminated": "last-row"}
    exp = read(pa.table(rows), columns)
    assert exp.steps["obs/numbers"].tolist() == [[0.1], [0.2]]
    assert exp.steps["obs/lidar"].tolist() == [[1, 2], [3, 4]]


def test_legacy_done() -> None:
    table = pa.table({"o": [1.0, 2.0, 3.0, 4.0], "a": [0, 1, 0, 1], "done": [0, 1, 0, 1], "stop": [0, 1, 0, 0]})
    columns = {"obs": "o", "action": "a", "done": "done"}
    recording = Recording.open(Source(table, columns=columns), on_bad=None)
    assert recording.part(0).segments.terminated.tolist() == [True, True]
    assert "time limits can't be told apart" in recording.meta["inferred"]["done"]
    exp = read(table, {**columns, "truncated": "stop"})
    assert exp.segments.terminated.tolist() == [False, True]
    assert exp.segments.truncated.tolist() == [True, False]


def test_presets_take_what_is_there() -> None:
    table = pa.table(
        {
            "eps_id": ["a", "a"],
            "obs": [[1.0], [2.0]],
            "new_obs": [[2.0], [3.0]],
            "actions": [0, 1],
            "rewards": [1.0, 2.0],
        }
        | {
            "terminateds": [False, False],
            "truncateds": [False, True],
            "action_logp": [-0.5, -0.25],
            "module_id": ["m", "m"],
        }
    )
    exp = read(table, {}, preset="rllib")
    assert list(exp.steps) == ["obs", "action", "reward", "logp"]
    assert exp.segments.truncated.tolist() == [True]
    assert exp.segments.module_id.tolist() == ["m"]
    assert exp.final_obs["obs"].tolist() == [[3.0]]
    exp = read(table, {"obs": "new_obs", "next_obs": "new_obs"}, preset="rllib")
    assert exp.steps["obs"].tolist() == [[2.0], [3.0]]
    assert exp.steps["extra/obs"].tolist() == [[1.0], [2.0]]


def test_a_t_that_counts_by_more_than_one() -> None:
    rows = rows_of([3, 4])
    for row in rows:
        row["tick"] = 50 + row["tick"] * 10
    recording = Recording.open(Source(table_of(rows), columns=COLUMNS), on_bad=None)
    assert everything(recording).segments.t_start.tolist() == [5, 5]
    assert recording.meta["inferred"]["t"] == "counts by 10 in the table"


def test_an_uneven_time_is_told_from_gaps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    columns = {"obs": "obs", "action": "action", "episode_id": "trip", "t": "tick"}
    for at, is_uneven in (([3, 10, 90, 91, 120, 300], True), ([0, 5, 10, 15, 25, 30], False)):
        table = pa.table({"obs": [0.5] * 6, "action": [0, 1] * 3, "trip": ["a"] * 6, "tick": at})
        pq.write_table(table, tmp_path / "a.parquet")
        Recording.open(Source(tmp_path / "a.parquet", columns=columns), on_bad=None)
        assert ("most steps or most beginnings of episodes are missing" in caplog.text) == is_uneven
        caplog.clear()


def test_gaps_cut_and_are_told(tmp_path: Path) -> None:
    rows = rows_of([6])
    path = tmp_path / "a.parquet"
    pq.write_table(table_of(rows[:2] + rows[3:]), path)
    recording = Recording.open(Source(path, columns=COLUMNS), on_bad=None)
    exp = everything(recording)
    assert exp.segments.t_start.tolist() == [0, 3]
    assert exp.segments.has_final_obs.tolist() == [False, False]
    unknown, gap = recording.validate().problems
    assert (unknown.kind, unknown.row, unknown.harmless) == ("no_final_obs", 1, False)
    assert (gap.kind, gap.row, gap.file, gap.harmless) == ("gap", 2, str(path), True)
    assert gap.message.startswith(
        f"{path}, row 2: episode 'trip-0' continues at t 3, but its steps from t 2 on are miss"
    )


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            lambda rows: [*rows, rows[1]],
            "duplicate",
            "row 7: episode 'trip-0' has step t 1 a second time; the first one is in .*row 1",
        ),
        (
            lambda rows: [*rows, rows[6] | {"tick": 3, "trip": "trip-0"}],
            "after_end",
            r"continues at t 3, after its end in .*row 2.* combine it with the number of the episode .*Mixed rows",
        ),
    ],
)
def test_what_stands_twice_or_behind_an_end_is_refused(change: Any, kind: str, message: str) -> None:
    source = Source(table_of(change(rows_of([3, 4]))), columns=COLUMNS | NEXTS)
    with pytest.raises(DataError, match=message):
        Recording.open(source).read()
    (found,) = validate(source).errors
    assert found.kind == kind


@pytest.mark.parametrize("nexts", [True, False])
@pytest.mark.parametrize("shuffled", [True, False])
def test_long_segments_come_in_pieces(tmp_path: Path, nexts: bool, shuffled: bool) -> None:
    rows = 100_000
    t = np.random.default_rng(0).permutation(rows) if shuffled else np.arange(rows)
    table = pa.table({"o": t * 1.0, "o2": t + 1.0, "a": t * 1.0, "id": np.zeros(rows, int), "t": t})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=30_000)
    columns = {"obs": "o", "action": "a", "episode_id": "id", "t": "t"} | ({"next_obs": "o2"} if nexts else {})
    recording = Recording.open(Source(tmp_path / "a.parquet", columns=columns), on_bad=None)
    exp = everything(recording)
    assert exp.lengths.tolist() == [65_536, 34_464]
    assert exp.segments.has_final_obs.tolist() == [True, nexts]
    assert exp.final_obs["obs"][0] == 65_536
    np.testing.assert_array_equal(exp.steps["obs"], np.arange(rows))


def timed(rows: list[Row], kind: pa.DataType, step: int) -> pa.Table:
    """The rows with times in place of ticks, and gaps of different lengths between them."""
    table = table_of(rows)
    ticks = np.array([row["tick"] for row in rows])
    times = pa.array((ticks * step + ticks % 2).astype(f"i{kind.bit_width // 8}")).cast(kind)
    return table.set_column(table.column_names.index("tick"), "tick", times)


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (pa.timestamp("ns", tz="Europe/Berlin"), 10**9),
        (pa.timestamp("s"), 60),
        (pa.date32(), 7),
        (pa.time32("s"), 100),
        (pa.time64("us"), 100),
    ],
)
@pytest.mark.parametrize("has_ids", [True, False])
def test_times_put_steps_in_order_and_number_them(kind: pa.DataType, step: int, has_ids: bool) -> None:
    rows = rows_of([4, 3, 5], first=0)
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))] if has_ids else rows
    columns = {name: own for name, own in (COLUMNS | NEXTS).items() if has_ids or name != "episode_id"}
    recording = Recording.open(Source(timed(shuffled, kind, step), columns=columns))
    found = {exp.steps["obs"][0, 0]: exp for exp in recording.read()}
    for e, length in enumerate([4, 3, 5]):
        np.testing.assert_array_equal(found[e].steps["obs"][:, 1], np.arange(length))
        assert found[e].segments.t_start.tolist() == [0]
        assert found[e].segments.terminated.tolist() == [e % 2 == 0]
    assert "times" in recording.meta["inferred"]["t"]
    assert recording.validate().ok


def test_two_steps_at_one_time_are_a_step_twice() -> None:
    rows = rows_of([4])
    rows[2]["tick"] = 1
    source = Source(timed(rows, pa.timestamp("s"), 60), columns=COLUMNS)
    with pytest.raises(DataError, match="has step t 1 a second time"):
        Recording.open(source).read()


def test_a_time_that_is_missing_is_named() -> None:
    table = timed(rows_of([4]), pa.timestamp("s"), 60)
    times = [*table["tick"].to_pylist()[:2], None, table["tick"][3].as_py()]
    table = table.set_column(table.column_names.index("tick"), "tick", pa.array(times, pa.timestamp("s")))
    with pytest.raises(DataError, match="row 2: column `t` is empty"):
        Recording.open(Source(table, columns=COLUMNS))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"obs": "spede"}, "there is no column `spede` for `obs`; there are .* Nearest: `speed`"),
        ({"action": None}, "`action` is not mapped: name its column"),
        ({"reward": "note"}, "column `note` is of type string, for instance 'at 0.0', not of numbers"),
        ({"terminated": "note"}, "row 0: the column of `terminated` is 'at 0.0', not true or false"),
        ({"t": "note"}, "the column `note` of `t` is text such as 'at 0.0', neither the number of a step nor a time"),
        ({"t": "note"}, "leave `t` out"),
        ({"t": "speed2"}, "t` is 0.5, but counts steps from 0|has step t 0 a second time"),
        ({"terminated": "tick"}, "row 2: the column of `terminated` is '2', not true or false"),
        ({"episode_id": None, "agent_id": "who"}, "`agent_id` is mapped, but `episode_id` is not"),
        ({"reward": ["speed", "angle"]}, r"`reward` has rows of shape \[2\], not one number each"),
        ({"next_obs": "speed2"}, r"`next_obs` has rows of shape \[\], but `obs` of \[2\]"),
        ({"next_obs/x": "speed2"}, "`next_obs` has the columns"),
    ],
)
def test_what_is_wrong_is_named(columns: dict[str, Any], message: str) -> None:
    mapped = {key: own for key, own in (COLUMNS | columns).items() if own is not None}
    with pytest.raises(DataError, match=message):
        Recording.open(Source(table_of(rows_of([3, 4])), columns=mapped)).read()


def test_empty_rows_are_named(tmp_path: Path) -> None:
    rows = rows_of([3, 4])
    rows[5]["note"], rows[5]["command"] = "at 5", None
    pq.write_table(table_of(rows), tmp_path / "a.parquet", row_group_size=2)
    columns = COLUMNS | {"action": "speed", "weight": "command"}
    recording = Recording.open(Source(tmp_path / "a.parquet", columns=columns), on_bad=None)
    with pytest.raises(DataError, match=r"a\.parquet, row 5: column `command` is empty"):
        recording.part(0)
    assert recording.part(0, ["obs"]).num_steps == 7
    (found,) = recording.validate().errors
    assert found.kind == "unreadable"
    rows[5]["command"], rows[5]["trip"] = 1, None
    with pytest.raises(DataError, match="row 5: column `episode_id` is empty"):
        read(table_of(rows))


@pytest.mark.parametrize("name", ["agent_id", "module_id"])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_a_row_without_its_agent_or_module_is_named(is_sorted: bool, name: str, tmp_path: Path) -> None:
    names = ["a"] * 3 + ["b"] * 4
    rows = [{**row, "trip": "1", "who": name} for row, name in zip(rows_of([3, 4]), names, strict=True)]
    rows[5]["who"] = None
    if not is_sorted:
        rows.reverse()
    pq.write_table(table_of(rows), tmp_path / "a.parquet", row_group_size=1)
    columns = COLUMNS | {name: "who"}
    with pytest.raises(DataError, match=rf"a\.parquet, row {5 if is_sorted else 1}: column `{name}` is empty"):
        Recording.open(Source(tmp_path / "a.parquet", columns=columns))
    rows = [{**row, "who": None} for row in rows_of([3])]
    assert getattr(read(table_of(rows), columns).segments, name).tolist() == [None]  # there is one, without a name


@pytest.mark.parametrize("gap", [float("nan"), None])  # pandas writes NaN as null
def test_nan_is_found_where_it_is(gap: float | None) -> None:
    rows = rows_of([3, 4])
    rows[4]["angle"] = gap
    source = Source(table_of(rows), columns=COLUMNS | NEXTS)
    (found,) = validate(source).errors
    assert "the table, row 4: column `obs` holds NaN in component 1" in found.message
    assert (found.row, found.column) == (4, "obs")
    assert Recording.open(source, on_bad="skip").read().segments.episode_id.tolist() == ["trip-0"]
    rows[4]["angle"], rows[2]["score"] = 0.0, gap
    found = validate(Source(table_of(rows), columns=COLUMNS)).errors[0]
    assert "the table, row 2: column `reward` holds NaN" in found.message


def test_files_are_read_in_the_order_of_the_numbers_in_their_names(tmp_path: Path) -> None:
    (tmp_path / "day=2").mkdir()
    (tmp_path / "day=10").mkdir()
    names = ["day=2/log-2.csv", "day=2/log-10.csv", "day=10/log-1.csv", "log-3.csv"]
    for k, name in enumerate(names):
        pyarrow.csv.write_csv(pa.table({"x": [float(k)], "a": [0]}), tmp_path / name)
    columns = {"obs": "x", "action": "a", "terminated": "every-row"}
    for data in (tmp_path, str(tmp_path / "**" / "*.csv")):
        assert Recording.open(Source(data, columns)).read().steps["obs"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_names_of_folders_are_columns(tmp_path: Path) -> None:
    rows = pa.table(
        {"ep": ["b%1", "b%1", "a", None], "day": [2, 2, 10, 2], "x": [0.1, 0.2, 0.3, 0.4], "a": [0, 1, 0, 1]}
    )
    pq.write_to_dataset(rows, tmp_path / "hive", partition_cols=["day", "ep"])
    columns = {"obs": "x", "action": "a", "episode_id": "ep", "terminated": "last-row"}
    with pytest.raises(DataError, match="column `episode_id` is empty"):
        Recording.open(Source(tmp_path / "hive", columns))
    pq.write_to_dataset(rows.slice(0, 3), tmp_path / "whole", partition_cols=["day", "ep"])
    exp = Recording.open(Source(tmp_path / "whole", columns)).read()
    assert exp.segments.episode_id.tolist() == ["b%1", "a"]
    assert exp.steps["obs"].tolist() == [0.1, 0.2, 0.3]
    assert exp.steps["day"].tolist() == [2, 2, 10]  # like all columns that are not mapped
    whole, part = tmp_path / "whole", tmp_path / "part.parquet"  # which is in no folder with a name
    part.write_bytes(next(whole.rglob("*.parquet")).read_bytes())
    assert Recording.open(Source([whole, part], {"obs": "x", "action": "a", "terminated": "every-row"})).num_steps > 3
    day = Recording.open(
        Source(tmp_path / "whole", columns | {"obs": "day"})
    )  # of files whose other columns are not read
    assert day.read().steps["obs"].tolist() == [2, 2, 10]


@pytest.mark.parametrize("pattern", ["day=*", "day=*/ep=*/*.parquet", "**/*.parquet", "day=[12]*/"])
@pytest.mark.parametrize("is_remote", [False, True])
def test_names_of_folders_in_a_glob_are_columns(
    tmp_path: Path, pattern: str, is_remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pa.table({"ep": ["b", "b", "a"], "day": [2, 2, 10], "x": [0.1, 0.2, 0.3], "a": [0, 1, 0]})
    pq.write_to_dataset(rows, tmp_path / "year=7" / "logs", partition_cols=["day", "ep"])
    monkeypatch.chdir(tmp_path / "year=7")
    columns = {"obs": "x", "action": "a", "episode_id": "ep", "terminated": "last-row"}
    where = f"file://{tmp_path}/year=7/logs/{pattern}" if is_remote else f"logs/{pattern}"
    exp = Recording.open(Source(where, columns)).read()
    assert exp.segments.episode_id.tolist() == ["b", "a"]
    assert exp.steps["day"].tolist() == [2, 2, 10]
    assert "year" not in exp.steps  # above the glob


@pytest.mark.parametrize("mark", [".", "/"])
def test_members_of_structs_are_columns(tmp_path: Path, mark: str) -> None:
    rows = [
        {
            "state": {"speed": k / 10, "at": {"x": [k, -k], "road": "ab"[k % 2]}},
            "meta": {"trip": f"trip-{k % 2}", "tick": k // 2},
            "did": {"action": k % 3, "logged": None if k == 3 else 0.5},
        }
        for k in (2, 3, 0, 5, 1, 4)
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet", row_group_size=2)
    columns = {"obs/x": "state.at.x", "obs/speed": "state.speed", "obs/road": "state.at.road", "action": "did.action"}
    columns |= {"episode_id": "meta.trip", "t": "meta.tick", "reward": "did.logged", "terminated": "last-row"}
    columns = {name: own.replace(".", mark) for name, own in columns.items()}
    for data in (pa.Table.from_pylist(rows), tmp_path / "log.jsonl", tmp_path / "log.parquet"):
        recording = Recording.open(Source(data, columns), on_bad=None)
        exp = recording.read()
        assert exp.segments.episode_id.tolist() == ["trip-0", "trip-1"]
        assert exp.steps["obs/x"].tolist() == [[k, -k] for k in (0, 2, 4, 1, 3, 5)]
        assert exp.steps["obs/road"].tolist() == [0, 0, 0, 1, 1, 1]
        assert exp.steps["action"].tolist() == [0, 2, 1, 1, 0, 2]
        assert np.isnan(exp.steps["reward"]).tolist() == [False, False, False, False, True, False]
        assert recording.meta["dropped"] == dict.fromkeys(("state", "meta", "did"), "members of it are mapped")
    with pytest.raises(DataError, match=r"there is no column `state\.mass` for `obs/speed`"):
        Recording.open(Source(data, columns | {"obs/speed": "state.mass"}))


def test_times_in_structs_have_an_order(tmp_path: Path) -> None:
    days = ["2/1/2026", "1/2/2026"]  # in February and January, or in January and February
    table = pa.table({"at": [{"day": day} for day in days], "x": [0.0, 1.0], "a": [0, 1], "trip": ["t", "t"]})
    columns = {"obs": "x", "action": "a", "episode_id": "trip", "terminated": "last-row"}
    for order, wanted in (("month-first", [1.0, 0.0]), ("day-first", [0.0, 1.0])):
        exp = Recording.open(Source(table, columns | {"t": f"at.day:{order}"})).read()
        assert exp.steps["obs"].tolist() == wanted


def test_ids_of_other_types_in_other_files_are_text(tmp_path: Path) -> None:
    for name, trip in (("a", [1, 1]), ("b", ["x", "x"])):
        pq.write_table(pa.table({"trip": trip, "x": [0.5, 1.5], "a": [0, 1]}), tmp_path / f"{name}.parquet")
    columns = {"obs": "x", "action": "a", "episode_id": "trip", "terminated": "last-row"}
    assert Recording.open(Source(tmp_path, columns)).read().segments.episode_id.tolist() == ["1", "x"]
    pq.write_table(pa.table({"trip": ["y"], "x": ["far"], "a": [0.5]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"c\.parquet has other types .*x has incompatible types: double vs string"):
        Recording.open(Source(tmp_path, columns))


def test_csv_files_of_other_types_are_named(tmp_path: Path) -> None:
    """Whether they are given as a folder, one by one, or with what their columns mean."""
    for name, t in (("a", ["0", "1"]), ("b", ["01.01.2026", "02.01.2026"])):
        rows = [f"{name},{when},{k}.5,{k},{k}" for k, when in enumerate(t)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["trip,t,x,action,done", *rows]))
    columns = {"obs": "x", "action": "action", "episode_id": "trip", "t": "t", "done": "done"}
    told = r"b\.csv has other types .*Field t has incompatible types: int64 vs string"
    for data in (tmp_path, [tmp_path / "a.csv", tmp_path / "b.csv"], Source(tmp_path, columns)):
        with pytest.raises(DataError, match=told):
            Recording.open(data)


def test_ids_of_other_types_in_other_files_can_be_guessed(tmp_path: Path) -> None:
    for name, trip in (("a", 1), ("b", "x")):
        (tmp_path / f"{name}.csv").write_text(f"trip,x,action\n{trip},0.5,0\n{trip},1.5,1\n")
    guess = guess_columns(tmp_path)
    assert guess.columns["episode_id"] == "trip"
    assert guess.found["trip"].examples == ("1", "1", "x")
    assert Recording.open(Source(tmp_path, guess.columns | {"obs": "x"})).num_episodes == 2


def test_a_csv_file_in_a_folder_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,action\n0.5,0\n")
    (tmp_path / "b.csv").write_bytes(b"x,action\n\xff,0\n")
    with pytest.raises(DataError, match=r"b\.csv: can't be read"):
        Recording.open(tmp_path)


def test_ids_that_floats_can_not_tell_apart_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "big.csv"
    path.write_text("ep,x,a\n12345678901234567890,1,0\n12345678901234567891,2,1\n")
    columns = {"obs": "x", "action": "a", "episode_id": "ep", "terminated": "last-row"}
    with pytest.raises(
        DataError, match=r"`episode_id` holds numbers up to 1\.2345678901234567e\+19 as floats of 53 bits"
    ):
        Recording.open(Source(path, columns))
    for kind, big in ((pa.float64(), 2**53), (pa.float32(), 2**24)):
        ids = pa.array([float(big - 1), float(big - 1), 2.0], kind)
        assert Recording.open(Source(pa.table({"ep": ids, "x": [1, 2, 3], "a": [0, 1, 0]}), columns)).num_episodes == 2
        ids = pa.array([float(big), float(big), 2.0], kind)
        with pytest.raises(DataError, match="different ids may be equal"):
            Recording.open(Source(pa.table({"ep": ids, "x": [1, 2, 3], "a": [0, 1, 0]}), columns))


def test_uuids_are_ids() -> None:
    ids = [uuid.UUID(int=k) for k in (2**127 + 7, 2**127 + 7, 2**127)]
    storage = pa.array([one.bytes for one in ids], pa.binary(16))
    columns = {"obs": "x", "action": "a", "episode_id": "ep", "terminated": "last-row"}
    for array in (storage, pa.ExtensionArray.from_storage(pa.uuid(), storage)):
        exp = Recording.open(Source(pa.table({"ep": array, "x": [1.0, 2.0, 3.0], "a": [0, 1, 0]}), columns)).read()
        assert exp.segments.episode_id.tolist() == [str(ids[0]), str(ids[2])]
    texts = pa.array([b"a1b2c3d4e5f60710"] * 3, pa.binary(16))
    exp = Recording.open(Source(pa.table({"ep": texts, "x": [1.0, 2.0, 3.0], "a": [0, 1, 0]}), columns)).read()
    assert exp.segments.episode_id.tolist() == ["a1b2c3d4e5f60710"]


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_images_that_are_compressed_are_not_numbers(kind: str) -> None:
    files = []
    for color in (7, 9):
        Image.new("L", (4, 4), color).save(file := io.BytesIO(), kind)
        files.append(file.getvalue())
    assert len(files[0]) == len(files[1])
    columns = {"obs": "x", "action": "a", "terminated": "every-row"}
    with pytest.raises(DataError, match="row 0: column `x` holds PNG or JPEG files.*: decode what is compressed"):
        Recording.open(Source(pa.table({"x": files, "a": [0, 1]}), columns)).read()
    raw = [files[0], bytes(len(files[0]))]
    assert Recording.open(Source(pa.table({"x": raw, "a": [0, 1]}), columns)).read().num_steps == 2


@pytest.mark.parametrize("name", ["state.at.typo", "state.typo.x", "state.speed.a.b", "typo.x.y.z"])
def test_members_that_are_not_there_are_named(name: str) -> None:
    table = pa.Table.from_pylist([{"state": {"speed": 0.1, "at": {"x": 1.0}}, "a": 0}])
    with pytest.raises(DataError, match=f"there is no column `{name}`"):
        read(table, {"obs": name, "action": "a", "terminated": "every-row"})


def test_ids_of_two_columns_stay_different() -> None:
    rows = {"line": ["a/b", "a/b", "a", "a", "a%2Fb"], "trip": ["c", "c", "b/c", "b/c", "c"], "o": np.arange(5.0)}
    columns = {"obs": "o", "action": "a", "episode_id": ["line", "trip"], "terminated": "last-row"}
    exp = read(pa.table(rows | {"a": [0, 1, 0, 1, 0]}), columns)
    assert sorted(exp.segments.episode_id) == ["a%252Fb/c", "a%2Fb/c", "a/b%2Fc"]
    assert sorted(exp.lengths.tolist()) == [1, 2, 2]


def test_a_recording_among_tables_is_named(tmp_path: Path) -> None:
    steps = {"obs": np.zeros((2, 1), np.float32), "action": np.zeros(2, np.int64), "reward": np.zeros(2, np.float32)}
    exp = Experience(
        steps, np.array([0, 2]), Segments.of(1, episode_id=["e"], terminated=[True]), {"obs": steps["obs"][:1]}
    )
    with RecordingWriter(tmp_path / "own", obs_space=Box(-1, 1, (1,)), action_space=Discrete(2)) as writer:
        writer.write(exp)
    pq.write_table(pa.table({"x": [1.0], "a": [0]}), tmp_path / "log.parquet")
    data = [*(tmp_path / "own").glob("*.parquet"), tmp_path / "log.parquet"]
    with pytest.raises(DataError, match="no column `x`, as this is a recording of Etude's: `columns` are for tables"):
        Recording.open(Source(data, {"obs": "x", "action": "a", "terminated": "every-row"}))


def test_an_id_of_two_columns_has_no_gaps() -> None:
    rows = {"van": ["a", "a", "b"], "trip": [1, None, 1], "o": [0.1, 0.2, 0.3], "a": [0, 1, 0]}
    columns = {"obs": "o", "action": "a", "episode_id": ["van", "trip"], "terminated": "last-row"}
    with pytest.raises(DataError, match=r"row 1: column `episode_id` is empty"):
        read(pa.table(rows), columns)
    with pytest.raises(DataError, match=r"row 0: the columns of `episode_id` are not all text or numbers"):
        read(pa.table(rows | {"trip": [[1], [1], [1]]}), columns)


def test_two_columns_of_a_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "twice.csv").write_text("x,a,x\n1,0,2\n")
    with pytest.raises(DataError, match="there are two columns `x`"):
        Recording.open(Source(tmp_path / "twice.csv", {"obs": "x", "action": "a", "terminated": "every-row"}))


def test_actions_that_are_fractions_by_type_only_are_told(caplog: pytest.LogCaptureFixture) -> None:
    columns = {"obs": "x", "action": "a", "terminated": "every-row"}
    for actions, is_told in (
        ([0.0, 1.0, 3.0], True),
        ([0.0, 1.0, 3.0, None], True),
        ([0.0, 1.5, 3.0], False),
        ([0, 1, 3], False),
        ([-1, 0, 1], True),
        ([1.0] * 3, False),
    ):
        caplog.clear()
        Recording.open(Source(pa.table({"x": [1.0] * len(actions), "a": actions}), columns))
        assert ("are whole numbers of type" in caplog.text) is is_told
        assert ("so they are read as continuous" in caplog.text) is is_told


def test_the_files_beside_those_of_a_hugging_face_dataset_are_no_rows(tmp_path: Path) -> None:
    rows = pa.table({"x": [1.0, 2.0], "a": [0, 1]})
    with pa.ipc.new_stream(tmp_path / "data-00000-of-00001.arrow", rows.schema) as stream:
        stream.write_table(rows)
    (tmp_path / "dataset_info.json").write_text('{"features": {}}')
    (tmp_path / "state.json").write_text('{"_format_type": null}')
    assert Recording.open(Source(tmp_path, {"obs": "x", "action": "a", "terminated": "every-row"})).num_steps == 2


def test_next_observations_that_do_not_follow_are_told() -> None:
    columns = {key: own for key, own in COLUMNS.items() if key != "t"} | NEXTS
    rows = rows_of([5, 4])
    rows[6], rows[7] = rows[7], rows[6]
    recording = Recording.open(Source(table_of(rows), columns=columns), on_bad=None)
    found, *_ = recording.validate().problems
    assert (found.kind, found.row, found.count) == ("not_chained", 5, 3)
    assert found.message.startswith(
        "the table, row 5: `next_obs` is not the `obs` of the step that follows (steps like it: 3)"
    )


def test_final_observations_of_several_columns_are_read_where_they_are() -> None:
    table = pa.table(
        {"x": [0.0, 1.0, 2.0], "y": [5.0, 6.0, 7.0], "a": [0, 1, 0], "e": ["p", "p", "q"]}
        | {"fx": [None, 9.0, None], "fy": [None, 8.0, None]}
    )
    columns = {"obs": ["x", "y"], "action": "a", "episode_id": "e", "final_obs": ["fx", "fy"]}
    exp = read(table, {**columns, "truncated": "last-row"})
    assert exp.final_obs["obs"].tolist() == [[9.0, 8.0], [0.0, 0.0]]
    assert exp.segments.has_final_obs.tolist() == [True, False]


def test_files_that_do_not_go_together(tmp_path: Path) -> None:
    rows = rows_of([3, 4])
    pq.write_table(table_of(rows[:3]), tmp_path / "a.parquet")
    pq.write_table(table_of(rows[3:]).drop_columns(["score"]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet, row 0: there is no column `score`, which other files have"):
        Recording.open(Source(tmp_path, columns=COLUMNS), on_bad=None)
    pq.write_table(table_of(rows[3:]).drop_columns(["note"]), tmp_path / "b.parquet")
    assert Recording.open(Source(tmp_path, columns=COLUMNS), on_bad=None).meta["dropped"] == {
        "note": "not in every file"
    }
    with pytest.raises(DataError, match="has no rows"):
        Recording.open(Source(table_of(rows).slice(0, 0), columns=COLUMNS), on_bad=None)


def test_whole_numbers_that_have_a_fraction_later(tmp_path: Path) -> None:
    rows = 200_000  # more than the first block, from which the types are taken
    lines = ["o,a,id,t", *(f"{i if i < rows - 1 else 0.5},0,1,{i}" for i in range(rows))]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    exp = read(tmp_path / "a.csv", {"obs": "o", "action": "a", "episode_id": "id", "t": "t"})
    assert exp.steps["obs"][-1] == 0.5


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"o": 1.0, "a": 0}\n{"o": 1.0, "a"', r"a\.jsonl: can't be read \(line 2 is not JSON: "),
        ("a.jsonl", '{"o": 1.0, "a": 0}\n\n{"o": 1.0, "a"', r"a\.jsonl: can't be read \(line 3 is not JSON: "),
        (
            "a.jsonl",
            '{"o": 1.0, "a": 0}\n{"o": 1.0, "a": "b"}\n',
            r"Column\(/a\) changed .* Repair it, restore",
        ),
        ("a.csv", "o,a\n1,2\n3,4\n5\n", r"a\.csv: can't be read \(.*Row #4: Expected 2 columns, got 1"),
        ("a.json", '[{"o": 1.0, "a"', r"a\.json: can't be read"),
        ("a.parquet", "PAR1", r"a\.parquet: is not a whole Parquet file: .*Restore it from a copy"),
    ],
)
def test_broken_text_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        Recording.open(Source(tmp_path / name, columns={"obs": "o", "action": "a"}), on_bad=None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": {"nxt_obs": "a"}}, r"Source\.columns has `nxt_obs`; known are .* Nearest: `next_obs`"),
        ({"columns": {"obs": 3}}, r"Source\.columns\['obs'\] is 3: give a column's name"),
        ({"columns": {"t": ["a", "b"]}}, r"Source\.columns\['t'\] is .* give the name of one column"),
        ({"columns": {"obs": ["a", "b", "a"]}}, r"Source\.columns\['obs'\] has `a` twice: name each column once"),
        ({"preset": "dopamine"}, r"Source\.preset is 'dopamine'; known are rllib, d4rl"),
        (
            {"episode_id": "trip", "obs": ["a", "b"]},
            r"Source has no argument `episode_id`: .* columns={'episode_id': 'trip', 'obs': \['a', 'b'\]}\)",
        ),
        ({"presets": "rllib"}, r"Source has no argument `presets`\. Nearest: `preset`"),
        ({"filesytem": 1}, r"Source has no argument `filesytem`\. Nearest: `filesystem`[^=]*$"),
        ({"sep": ";"}, r"Source has no argument `sep`\. There are data, columns, preset"),
    ],
)
def test_settings_that_are_wrong(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Source("x.parquet", **settings)


@pytest.mark.parametrize("name", ["a.parquet", "b.csv", "c.feather", "d.jsonl", "e.json"])
def test_mutated_bytes_end_in_data_errors(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    FORMATS[name](table_of(rows_of([4, 3])), path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(80):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), rng.integers(1, 5)):
            data[at] = rng.integers(256)
        path.write_bytes(data[: rng.integers(len(data))] if rng.random() < 0.2 else data)
        try:
            recording = Recording.open(Source(path, columns=COLUMNS), on_bad=None)
            for k in range(recording.num_parts):
                recording.part(k).validate(finite=())
        except DataError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("depth", [40, 2_000, 100_000])
@pytest.mark.parametrize("line", ['{"o": DEEP, "a": 1, "e": 1}', '[{"o": DEEP, "a": 1, "e": 1}]'])
def test_json_that_is_nested_too_deep_is_an_error_and_ends_no_process(tmp_path, depth, line):
    path = tmp_path / "a.jsonl"
    for deep in ("[" * depth + "1" + "]" * depth, '{"k":' * depth + "1" + "}" * depth):
        path.write_text(line.replace("DEEP", deep) + "\n")
        with pytest.raises(DataError, match=r"a\.jsonl"):
            Recording.open(Source(path, columns={"obs": "o", "action": "a", "episode_id": "e"}), on_bad=None)


_SMALL = {"obs": "x", "action": "a", "reward": "r", "episode_id": "e", "t": "t", "terminated": "last-row"}


def _long(num: int, **others: Any) -> pa.Table:
    at = np.arange(num)
    own = {"x": at / 8, "a": at % 2, "r": at * 1.0, "e": at // 100, "t": at % 100}
    return pa.table(own | others)


@pytest.mark.parametrize("form", ["parquet", "without statistics", "csv", "memory"])
def test_one_missing_value_late_in_an_extra_column_costs_no_step(tmp_path: Path, form: str) -> None:
    at = np.arange(300)
    missing = at == 290
    table = _long(
        300,
        whole=pa.array(at, mask=missing),
        flag=pa.array(at % 2 == 0, mask=missing),
        part=pa.array(at / 4, mask=missing),
        full=at,
    )
    if form != "csv":
        lists = [[k, None if lost else 1] for k, lost in zip(at.tolist(), missing.tolist(), strict=True)]
        table = table.append_column("lists", pa.array(lists)).append_column("pairs", pa.array([[1, 2]] * 300))
    data: Any = table
    if form == "csv":
        for k in range(3):
            pa.csv.write_csv(table.slice(100 * k, 100), tmp_path / f"{k}.csv")
        data = tmp_path
    elif form != "memory":
        data = tmp_path / "rows.parquet"
        pq.write_table(table, data, row_group_size=100, write_statistics=form == "parquet")
    recording = Recording.open(Source(data, _SMALL))
    exp = recording.read()
    assert exp.num_steps == 300
    assert exp.steps["full"].tolist() == at.tolist()
    np.testing.assert_array_equal(exp.steps["part"], np.where(missing, np.nan, at / 4))
    lost = set(recording.meta["dropped"])
    assert lost == {"whole", "flag", *(["lists"] if form != "csv" else [])}
    assert validate(Source(data, _SMALL)).ok


def test_missing_fractions_are_nan_also_in_lists() -> None:
    lists = [[1.0, 2.0], [3.0, None], None, [5.0, 6.0]]
    table = _long(4, x=pa.array(lists), r=pa.array([1, None, 3, 4]))
    wanted = [[1, 2], [3, np.nan], [np.nan, np.nan], [5, 6]]
    for kind in (pa.list_(pa.float64()), pa.list_(pa.float32(), 2), pa.large_list(pa.float64())):
        own = table.set_column(0, "x", pa.array(lists, kind))
        recording = Recording.open(Source(own, _SMALL), on_bad=None)
        np.testing.assert_array_equal(recording.read().steps["obs"], wanted)
        np.testing.assert_array_equal(recording.read().steps["reward"], [1, np.nan, 3, 4])
        assert Recording.open(Source(own, _SMALL), on_bad="repair").read().num_steps == 1


def test_decimals_are_what_their_text_is() -> None:
    texts = [f"{k // 100}.{k % 100:02}" for k in range(1000)]
    table = _long(1000, r=pa.array(texts).cast(pa.decimal128(10, 2)))
    assert Recording.open(Source(table, _SMALL)).read().steps["reward"].tolist() == list(map(float, texts))


def test_ids_of_csv_files_are_texts_in_all_of_them_or_in_none(tmp_path: Path) -> None:
    head = "e,t,x,a,r\n"
    (tmp_path / "log-1.csv").write_text(head + "".join(f"007,{k},.5,0,{k}\n" for k in range(3)))
    (tmp_path / "log-2.csv").write_text(head + "".join(f"007,{k},.5,0,{k}\n" for k in (3, 4)) + "x1,0,.5,0,1\n")
    exp = Recording.open(Source(tmp_path, _SMALL)).read()
    assert exp.segments.episode_id.tolist() == ["007", "x1"]
    assert exp.lengths.tolist() == [5, 1]


def test_a_count_of_rows_as_t_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    table = _long(300)
    Recording.open(Source(table, _SMALL))
    assert not caplog.records
    recording = Recording.open(Source(table.set_column(4, "t", pa.array(np.arange(300))), _SMALL))
    assert "most steps or most beginnings of episodes are missing" in caplog.text
    assert recording.read().segments.t_start.tolist() == [0, 100, 200]


def test_fractions_take_the_dtype_of_a_given_space(tmp_path: Path) -> None:
    space = gym.spaces.Box(-1, 1, (1,), np.float32)
    pa.csv.write_csv(_long(10), tmp_path / "rows.csv")
    recording = Recording.open(Source(tmp_path / "rows.csv", _SMALL | {"obs": ["x"]}, obs_space=space))
    assert recording.obs_space == space
    assert recording.read().steps["obs"].dtype == np.float32


def test_times_as_text_may_be_finer_than_microseconds(tmp_path: Path) -> None:
    texts = [f"2026-03-29T06:09:12.{k}05070814+02:00" for k in (3, 1, 2)]
    table = _long(3, t=pa.array(texts))
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, table.to_pylist())))
    for data in (table, lines):
        assert Recording.open(Source(data, _SMALL)).read().steps["reward"].tolist() == [1, 2, 0]


def test_suffixes_may_be_in_capitals(tmp_path: Path) -> None:
    pa.csv.write_csv(_long(3), tmp_path / "ROWS.CSV")
    assert Recording.open(Source(tmp_path / "ROWS.CSV", _SMALL)).num_steps == 3


def test_a_mapped_column_that_the_first_file_lacks_is_named(tmp_path: Path) -> None:
    pq.write_table(_long(3).drop_columns(["t"]), tmp_path / "a.parquet")
    pq.write_table(_long(3), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"a.parquet, row 0: there is no column `t`, which other files have"):
        Recording.open(Source(tmp_path, _SMALL))


def test_a_column_of_a_reserved_name_that_is_not_mapped_is_told_of() -> None:
    table = pa.table({"x": [0.0, 1.0], "a": [0, 1], "trip": ["i", "i"], "reward": [1.0, 2.0]})
    recording = Recording.open(Source(table, columns={"obs": "x", "action": "a", "episode_id": "trip"}))
    with pytest.raises(
        DataError, match=r'no column `reward`; .*The table has `reward`, .*columns=\{"reward": "reward"\}'
    ):
        recording.read(columns=["reward"])
    with pytest.raises(SettingsError, match="Source.columns is 'obs=x', but must map names of columns"):
        Source(table, columns="obs=x")  # type: ignore[arg-type]


def tensors(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[pa.Table, Any]:
    kind = pa.fixed_shape_tensor(pa.float32(), shape, permutation=order)
    numbers = np.arange(5 * np.prod(shape), dtype=np.float32)
    obs = pa.ExtensionArray.from_storage(kind, pa.FixedSizeListArray.from_arrays(pa.array(numbers), np.prod(shape)))
    return pa.table({"obs": obs, "action": [0, 1, 0, 1, 1], "over": [False, False, True, False, True]}), numbers


@pytest.mark.parametrize("order", [(1, 0), (0, 1), (2, 1, 0), (0, 2, 1)])
def test_a_tensor_is_read_in_the_order_of_its_axes(order: tuple[int, ...]) -> None:
    shape = (2, 3, 4)[: len(order)]
    table, numbers = tensors(shape, order)
    read = Recording.open(Source(table, columns={"obs": "obs", "action": "action", "terminated": "over"})).read()
    wanted = numbers.reshape(5, *shape).transpose(0, *(1 + axis for axis in order))
    np.testing.assert_array_equal(read.steps["obs"], wanted)
    np.testing.assert_array_equal(read.steps["obs"], table["obs"].combine_chunks().to_numpy_ndarray())


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0)])
def test_an_order_of_axes_that_arrow_itself_reads_and_writes_in_two_ways_is_refused(order: tuple[int, ...]) -> None:
    table, _ = tensors((2, 3, 4), order)
    with pytest.raises(DataError, match=r"column `obs` is a tensor whose axes are stored in the order \[\d, \d, \d\]"):
        Recording.open(Source(table, columns={"obs": "obs", "action": "action", "terminated": "over"}))


def test_text_in_a_vector_of_information_is_an_error() -> None:
    table = pa.table({"x": [0.5, 1.5], "a": [0, 1], "trip": [0, 0], "note": ["go", "stop"], "score": [1, 2]})
    columns = {"obs": "x", "action": "a", "episode_id": "trip", "terminated": "last-row"}
    with pytest.raises(DataError, match="row 0: column `note` is of type string, for instance 'go', not of numbers"):
        Recording.open(Source(table, columns | {"info": ["note", "score"]}))
    assert read(table, columns | {"info": "note"}).steps["info"].tolist() == ["go", "stop"]


def test_an_extension_type_may_not_be_hashable(tmp_path: Path) -> None:
    class Odd(pa.ExtensionType):  # type: ignore[misc]
        __hash__ = None

        def __init__(self) -> None:
            super().__init__(pa.float64(), "etude.tests.odd")

        def __arrow_ext_serialize__(self) -> bytes:
            return b""

        @classmethod
        def __arrow_ext_deserialize__(cls, storage: pa.DataType, data: bytes) -> "Odd":
            return cls()

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Odd)

    x = pa.ExtensionArray.from_storage(Odd(), pa.array([0.5, 1.5]))
    table = pa.table({"x": x, "a": [0, 1], "trip": [0, 0]})
    columns = {"obs": "x", "action": "a", "episode_id": "trip", "terminated": "last-row"}
    assert read(table, columns).steps["obs"].tolist() == [0.5, 1.5]


def test_an_error_in_a_final_observation_names_its_row_and_column() -> None:
    after = pa.array([None, None, None, 2**40], pa.int64())
    table = pa.table({"x": np.zeros(4, np.int8), "a": [0, 1, 0, 1], "trip": [0, 0, 1, 1], "after": after})
    columns = {"obs": "x", "action": "a", "episode_id": "trip", "terminated": "last-row", "final_obs": "after"}
    fractions = table.set_column(3, "after", pa.array([None, None, None, 0.5]))
    for wrong in (table, fractions):
        with pytest.raises(DataError, match="column `after` has|row 3: `after` is"):
            Recording.open(Source(wrong, columns, obs_space=gym.spaces.Box(0, 9, (), np.int8))).read()
    ragged = table.set_column(0, "x", pa.array([[1, 2]] * 4)).set_column(3, "after", pa.array([None] * 3 + [[1]]))
    with pytest.raises(DataError, match=r"row 3: `after` has rows of shape \[1\], but `obs` of \[2\]"):
        read(ragged, columns)


def test_which_columns_miss_no_value_is_found_once_for_each_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    found = table_inputs._complete
    monkeypatch.setattr(table_inputs, "_complete", lambda data, k: asked.append(k) or found(data, k))
    extras = {f"extra {k}": range(6) for k in range(5)}
    table = pa.table({"x": np.arange(6.0), "a": [0, 1] * 3, "trip": [0] * 6, **extras})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    Recording.open(
        Source(tmp_path, {"obs": "x", "action": "a", "episode_id": "trip", "terminated": "last-row"}), on_bad=None
    )
    assert sorted(asked) == [1, 2]


def test_a_given_space_reorders_no_axes() -> None:
    images = np.arange(4 * 48).reshape(4, 3, 4, 4).astype(np.uint8)
    shaped = pa.FixedShapeTensorArray.from_numpy_ndarray(images)
    flat = pa.FixedSizeListArray.from_arrays(pa.array(images.reshape(-1)), 48)

    def read(obs: pa.Array, shape: tuple[int, ...]) -> Any:
        table = pa.table({"obs": obs, "action": [0, 1, 0, 1], "over": [False, True] * 2})
        columns = {"obs": "obs", "action": "action", "terminated": "over"}
        space = gym.spaces.Box(0, 255, shape, np.uint8)
        return Recording.open(Source(table, columns=columns, obs_space=space)).read().steps["obs"]

    with pytest.raises(DataError, match=r"`obs` has rows of shape \[3, 4, 4\], but its space is Box"):
        read(shaped, (4, 4, 3))
    for obs, shape in ((shaped, (3, 4, 4)), (shaped, (48,)), (shaped, (1, 3, 4, 4)), (flat, (4, 4, 3))):
        np.testing.assert_array_equal(read(obs, shape), images.reshape(4, *shape))


@pytest.mark.parametrize("later", [[1.0], [1.0, 2.0, 3.0], None])
def test_a_list_that_later_rows_have_in_another_length_is_dropped(tmp_path: Path, later: Any) -> None:
    steps = {"x": range(6), "action": [0, 1] * 3, "id": [1, 1, 2, 2, 3, 3], "over": [False, True] * 3}
    table = pa.table({**steps, "tags": [[1.0, 2.0]] * 5 + [later]})
    pq.write_table(table, tmp_path / "table.parquet", row_group_size=2)
    columns = {"obs": "x", "action": "action", "episode_id": "id", "terminated": "over"}
    recording = Recording.open(Source(tmp_path, columns=columns))
    assert recording.read().num_steps == 6
    if later is None:
        assert np.isnan(recording.read().steps["tags"][5]).all()
    else:
        assert "column `tags` has" in recording.meta["dropped"]["tags"]
    assert recording.validate().ok


def test_a_dict_of_arrays_has_etudes_names() -> None:
    rng = np.random.default_rng(0)
    given: dict[str, Any] = {
        "obs": rng.normal(size=(6, 3)).astype(np.float32),
        "obs_of_what": rng.integers(0, 256, (6, 2, 2, 3)).astype(np.uint8),
        "action": rng.uniform(-1, 1, (6, 1)),
        "reward": list(range(6)),
        "terminated": [False, False, True] * 2,
    }
    exp = Recording.open(Source(given)).read()
    for name in ("obs", "obs_of_what", "action", "reward"):
        np.testing.assert_array_equal(exp.steps[name], given[name])
    assert exp.lengths.tolist() == [3, 3]
    other = {"state": given["obs"], "did": given["action"], "over": given["terminated"]}
    columns = {"obs": "state", "action": "did", "terminated": "over"}
    np.testing.assert_array_equal(Recording.open(Source(other, columns=columns)).read().steps["obs"], given["obs"])
    with pytest.raises(DataError, match="`obs` is not mapped: name its column; the table has state, did, over"):
        Recording.open(Source(other))
    with pytest.raises(DataError, match="expected length 6 but got length 5"):
        Recording.open(Source({**given, "reward": [0.0] * 5}))
    with pytest.raises(DataError, match="column `reward` can't be read as an array: some values are masked"):
        Recording.open(Source({**given, "reward": np.ma.array(range(6), mask=[False] * 5 + [True])}))
    with pytest.raises(DataError, match="column `obs` can't be read as an array"):
        Recording.open(Source({**given, "obs": np.ones((6, 1), complex)}))
    with pytest.raises(DataError, match=r"`obs` is a dict, but .* a column for each key, \['obs/eye', 'obs/arm'\]"):
        Recording.open(Source({**given, "obs": {"eye": np.ones((6, 2)), "arm": np.ones(6)}}))


def test_a_dict_of_arrays_with_next_observations_has_the_episodes_that_flags_end() -> None:
    obs = np.arange(6.0)[:, None].astype(np.float32)
    given = {"obs": obs, "action": [0, 1] * 3, "next_obs": obs + 1, "terminated": [False, False, True] * 2}
    assert Recording.open(Source(given)).read().lengths.tolist() == [3, 3]
    done = [False, True, True] * 2
    ended = Recording.open(Source({**given, "done": done})).read().segments
    assert (ended.terminated.tolist(), ended.truncated.tolist()) == ([False, True] * 2, [True, False] * 2)
    both = Recording.open(Source({**given, "truncated": [False] * 6, "done": done})).read()
    assert (both.lengths.tolist(), both.steps["done"].tolist()) == ([3, 3], done)
    del given["terminated"]
    assert Recording.open(Source(given)).read().lengths.tolist() == [1] * 6


def test_whole_numbers_take_the_dtype_of_the_given_space(caplog: pytest.LogCaptureFixture) -> None:
    table = pa.table({"x": [1, 2, 255], "y": [0, 7, 9], "a": [0, 1, 0], "end": [False, False, True]})
    table = table.append_column("nx", pa.array([2.0, 255.0, np.nan])).append_column("ny", pa.array([7.0, 9.0, np.nan]))
    names = {"obs": ["x", "y"], "next_obs": ["nx", "ny"], "action": "a", "terminated": "end"}
    pixels = gym.spaces.Box(0, 255, (2,), np.uint8)
    found = Recording.open(Source(table, names, obs_space=pixels))
    assert (found.obs_space, found.read().steps["obs"].dtype) == (pixels, np.uint8)
    np.testing.assert_array_equal(found.read().steps["obs"], [[1, 0], [2, 7], [255, 9]])
    assert not caplog.records
    for column, values in (("x", [1, -1, 3]), ("nx", [2.0, 256.0, np.nan])):
        large = table.set_column(table.schema.get_field_index(column), column, pa.array(values))
        wide = Recording.open(Source(large, names, obs_space=pixels))
        assert (wide.obs_space.dtype, wide.read().steps["obs"].dtype) == (np.int64, np.int64)
        assert "`obs` has numbers that do not fit in the uint8" in caplog.text
    fractions = table.set_column(table.schema.get_field_index("nx"), "nx", pa.array([2.0, 1.5, None]))
    with pytest.raises(DataError, match="column `nx` has fractions from 1.5 to 2.0, which do not fit in the int64"):
        Recording.open(Source(fractions, names, obs_space=pixels))
    for name in ("x", "y"):  # which are no wider than the space
        table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(pa.uint8()))
    large = table.set_column(table.schema.get_field_index("nx"), "nx", pa.array([2, 300, 3]))
    with pytest.raises(
        DataError, match="column `nx` has numbers from 2 to 300, which do not fit in the uint8 of `obs`"
    ):
        Recording.open(Source(large, names, obs_space=pixels))


CLOCK = {"obs": "x", "action": "did", "t": "time"}


def clocked(minutes: list[int], **more: Any) -> pa.Table:
    start = datetime.datetime(2026, 3, 1)
    times = [start + datetime.timedelta(minutes=minute) for minute in minutes]
    num = len(minutes)
    return pa.table({"time": times, "x": np.arange(num) * 0.5, "did": np.arange(num) % 2, **more})


@pytest.mark.parametrize(
    ("minutes", "wrong"), [([0, 1, 2, 3], None), ([3, 2, 1, 0], 1), ([0, 0, 1, 1], 1), ([0, 1, 3, 2], 3)]
)
def test_times_without_an_id_rise_within_an_episode(minutes: list[int], wrong: int | None) -> None:
    for columns, more in (
        ({"terminated": "last-row"}, {}),
        ({"terminated": "done"}, {"done": [False, False, False, True]}),
    ):
        source = Source(clocked(minutes, **more), CLOCK | columns)
        if wrong is None:
            assert Recording.open(source).read().lengths.tolist() == [4]
            continue
        with pytest.raises(DataError, match=f"row {wrong}: the time in `t` does not rise there, and no `episode_id`"):
            Recording.open(source)
    after_an_end = clocked([5, 6, 0, 1], done=[False, True, False, True])  # any time may follow
    assert Recording.open(Source(after_an_end, CLOCK | {"terminated": "done"})).read().lengths.tolist() == [2, 2]


def test_a_time_of_day_that_goes_back_is_told(caplog: pytest.LogCaptureFixture) -> None:
    for hours, told in (([9, 10, 11], False), ([22, 23, 1], True)):
        caplog.clear()
        table = clocked([0, 1, 2], shift=["a"] * 3, clock=[datetime.time(hour) for hour in hours])
        columns = CLOCK | {"t": "clock", "episode_id": "shift", "terminated": "last-row"}
        recording = Recording.open(Source(table, columns))
        recording.read()
        assert caplog.text.count("`t` is a time of day, which goes back there within an episode") == told


@pytest.mark.parametrize("written", ["{:,.2f}", "{:,.0f}"])
@pytest.mark.parametrize("swap", [False, True])
def test_numbers_with_separators_of_thousands_are_no_names(written: str, swap: bool) -> None:
    texts = [written.format(4000 + 7.25 * k + 1_000_000 * (k % 2)) for k in range(40)]
    if swap:
        texts = [text.replace(",", "'") for text in texts]
    source = Source({"obs": np.array(texts, object), "action": [0, 1] * 20, "terminated": [False] * 39 + [True]})
    with pytest.raises(DataError, match="`obs` is text that holds numbers"):
        Recording.open(source)


@pytest.mark.parametrize(
    ("rows", "columns", "warning"),
    [
        ({"x": [0.5, 1.0, 2.0], "a": [0, 1, 0], "clock": ["23:58", "23:59", "00:01"]}, {"t": "clock"}, "time of day"),
        ({"x": [0.5, 1.0, 2.0], "a": [-1, 0, 3]}, {}, "whole numbers of type"),
        ({"x": [0.5, 1.0, 2.0], "a": [0, 1, 0]}, {"obs": ["x", "a"]}, "mapped as both"),
    ],
)
@pytest.mark.parametrize("is_large", [False, True])
def test_warnings_about_what_columns_mean_are_in_reports(
    rows: dict[str, Any],
    columns: dict[str, Any],
    warning: str,
    is_large: bool,
    caplog: Any,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if is_large:
        monkeypatch.setattr(cache, "LEAST_BYTES", 0)
    pa.csv.write_csv(pa.table({"trip": ["a"] * 3, **rows}), tmp_path / "a.csv")
    mapped = {"obs": "x", "action": "a", "episode_id": "trip", "terminated": "last-row", **columns}
    recording = Recording.open(Source(tmp_path / "a.csv", mapped))
    assert warning in caplog.text
    caplog.clear()
    recording.read()
    assert not caplog.text
    for _ in range(2):  # rows out of order are sorted once
        report = Recording.open(Source(tmp_path / "a.csv", mapped)).validate()
        assert report.ok
        assert [(problem.kind, warning in problem.message) for problem in report.warnings] == [("mapping", True)]
    given = [f"{name}={','.join([own] if isinstance(own, str) else own)}" for name, own in mapped.items()]
    assert main(["data", "validate", str(tmp_path / "a.csv"), "--columns", *given]) == 1
    assert warning in capsys.readouterr().out


def trips(path: Path, name: str, rows: slice = slice(None), **columns: Any) -> None:
    """Two trips of 10 steps, each with a reward of 1 and an end, or some rows of them."""
    t = np.tile(np.arange(10), 2)
    table = pa.table(
        {
            "trip": ["a"] * 10 + ["b"] * 10,
            "tick": t,
            "x": np.arange(20) / 10,
            "act": t % 2,
            "r": np.ones(20),
            "done": t == 9,
            **columns,
        }
    )
    path.mkdir(exist_ok=True)
    pq.write_table(table.take(np.arange(20)[rows]), path / f"{name}.parquet")


TRIPS = {"obs": "x", "action": "act", "reward": "r", "episode_id": "trip", "t": "tick"}


@pytest.mark.parametrize("mode", ["repair", "skip"])
@pytest.mark.parametrize("flag", ["done", "last-row"])
@pytest.mark.parametrize("again", [slice(None), slice(7, 13), slice(10)])
def test_of_steps_that_are_stored_twice_the_first_ones_are_kept_whole(
    tmp_path: Path, mode: Any, flag: str, again: slice
) -> None:
    trips(tmp_path / "log", "a")
    trips(tmp_path / "log", "b", again)
    found = Recording.open(Source(tmp_path / "log", {**TRIPS, "terminated": flag}), on_bad=mode)
    exp = found.read()
    assert exp.lengths.tolist() == [10, 10]
    assert exp.segments.terminated.all()
    np.testing.assert_array_equal(exp.steps["obs"].ravel(), np.arange(20) / 10)
    assert found.left_out == {"duplicate": len(range(20)[again])}


def test_agents_that_join_late_begin_at_a_step_of_their_own() -> None:
    rows = [(m, agent, t) for m in ("m0", "m1") for agent, first in (("a", 0), ("b", 3)) for t in range(first, 6)]
    rows += [("cut", agent, t) for agent in "ab" for t in range(2, 6)]  # its first steps are lost
    match, agent, t = zip(*rows, strict=True)
    table = pa.table(
        {"match": match, "agent": agent, "tick": t, "x": np.arange(len(t)) / 10, "a": [0, 1] * (len(t) // 2)}
    )
    mapped = {
        "obs": "x",
        "action": "a",
        "episode_id": "match",
        "agent_id": "agent",
        "t": "tick",
        "terminated": "last-row",
    }
    segments = Recording.open(Source(table, {**mapped, "terminated": "last-row"})).read().segments
    names = zip(segments.episode_id, segments.agent_id, strict=True)
    starts = {f"{episode} {own}": start for (episode, own), start in zip(names, segments.t_start.tolist(), strict=True)}
    assert starts == {"m0 a": 0, "m0 b": 0, "m1 a": 0, "m1 b": 0, "cut a": 2, "cut b": 2}


@pytest.mark.parametrize("t", ["number", "time", "none"])
@pytest.mark.parametrize("flag", ["done", "last-row"])
def test_files_that_cannot_be_read_are_warned_of_where_the_gap_would_not_show(
    tmp_path: Path, t: str, flag: str, caplog: Any
) -> None:
    clock = pa.array(np.tile(np.arange(10), 2) * 60_000_000, pa.timestamp("us"))
    for name, rows in (("a", slice(0, 5)), ("b", slice(5, 12)), ("c", slice(12, 20))):
        trips(tmp_path / "log", name, rows, **({"tick": clock} if t == "time" else {}))
    broken = tmp_path / "log" / "b.parquet"
    broken.write_bytes(broken.read_bytes()[:-40])
    mapped = {name: own for name, own in TRIPS.items() if name != "t" or t != "none"}
    found = Recording.open(Source(tmp_path / "log", {**mapped, "terminated": flag}), on_bad="repair")
    found.read()
    shows = t == "number" and flag == "done"
    assert ("joined over the missing steps" in caplog.text) is not shows
    assert "unreadable 1 times (an unknown number of rows left out)" in found.left_out_report()


def test_columns_of_other_types_in_other_files_are_left_out_unless_they_are_mapped(tmp_path: Path) -> None:
    local = pa.array(np.tile(np.arange(10), 2) * 60_000_000, pa.timestamp("us", "Europe/Berlin"))
    trips(tmp_path / "log", "a", slice(0, 8), note=[3] * 20, tick=local)
    trips(tmp_path / "log", "b", slice(8, 20), note=["x"] * 20, tick=local.cast(pa.timestamp("us", "UTC")))
    columns = {**TRIPS, "terminated": "done"}
    found = Recording.open(Source(tmp_path / "log", columns))
    assert found.read().lengths.tolist() == [10, 10]
    assert found.meta["dropped"] == {"note": "of other types in other files"}
    with pytest.raises(DataError, match=r"b\.parquet has other types than files before it \(.*Field note"):
        Recording.open(Source(tmp_path / "log", {**columns, "weight": "note"}))


def test_each_warning_of_a_table_is_listed_and_a_rewritten_recording_keeps_its_gaps(tmp_path: Path) -> None:
    rows = pa.table({"trip": ["a"] * 3, "x": [0.5, 1.0, 2.0], "a": [-1, 0, 3]})
    found = Recording.open(Source(rows, {"obs": ["x", "a"], "action": "a", "episode_id": "trip", "done": "last-row"}))
    found.read()
    assert ["mapped as both" in text for text in found.warnings] == [True, False]
    assert ["whole numbers" in text for text in found.warnings] == [False, True]
    ids = {"episode_id": ["e", "e"], "agent_id": ["a", "b"], "t_start": [0, 2], "terminated": True}
    exp = Experience(
        {"obs": np.arange(6, dtype=np.float32)[:, None], "action": np.zeros(6, np.int64)},
        np.array([0, 4, 6]),
        Segments.of(2, **ids),
        {"obs": np.zeros((2, 1), np.float32)},
    )
    spaces_of = {"obs_space": Box(-9, 9, (1,), np.float32), "action_space": Discrete(2)}
    with RecordingWriter(tmp_path / "own", **spaces_of) as writer:
        writer.write(exp)
    pd.read_parquet(tmp_path / "own")[::-1].to_parquet(tmp_path / "own" / "part-00000.parquet")
    segments = Recording.open(tmp_path / "own").read().segments
    assert dict(zip(segments.agent_id, segments.t_start.tolist(), strict=True)) == {"a": 0, "b": 2}


def test_parts_without_rows_do_not_hide_the_order_of_dates() -> None:
    parts = [pa.array(texts, pa.string()) for texts in ([], [None], ["1/2/2026"], ["24/11/2026"])]
    assert table_index.date_order(parts) == table_index.DAY_FIRST
    assert table_index.date_order(parts[:3]) is None
    assert table_index.date_order([pa.array(["2026-11-24"]), *parts]) is None
