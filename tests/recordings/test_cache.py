# SPDX-License-Identifier: Apache-2.0
"""What is converted of other tools' files: once, to the same numbers, and within the room that there is."""

import gzip
import json
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etude.errors import DataError, SettingsError
from etude.recordings import Recording, cache, validate
from etude.recordings.formats import sorting, text_tables
from etude.recordings.formats.source import Source

COLUMNS = {"obs": ["x", "y"], "action": "a", "reward": "r", "episode_id": "e", "t": "t", "terminated": "end"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that is empty, and that every text file is converted into, in blocks of a few lines."""
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "LEAST_BYTES", 0)
    monkeypatch.setattr(text_tables, "_BLOCK", 400)
    return tmp_path / "cache" / "recordings"


CONVERTED: list[Path] = []
CONVERT = text_tables._convert


def counted_convert(path: Path, *how: Any, **more: Any) -> None:  # by its name, it can be pickled
    CONVERTED.append(path)
    CONVERT(path, *how, **more)


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are converted."""
    CONVERTED.clear()
    monkeypatch.setattr(text_tables, "_convert", counted_convert)
    return CONVERTED


def rows_of(num: int = 60) -> list[dict[str, Any]]:
    """Rows whose types are only known once all are seen."""
    rows = []
    for i in range(num):
        row: dict[str, Any] = {"x": i if i < 50 else i + 0.5, "y": -1.5 * i, "a": i % 3, "r": float(i)}
        row |= {"e": f"{i // 7}" if i < 40 else f"late-{i // 7}", "t": i % 7, "end": i % 7 == 6}
        row |= {"note": "2026-01-01" if i < 45 else "no date", "seldom": None if i < 55 else i}
        rows.append(row)
    return rows


def csv(rows: list[dict[str, Any]], separator: str = ",") -> str:
    texts = [["" if v is None else str(v) for v in row.values()] for row in rows]
    return "\n".join(separator.join(row) for row in [list(rows[0]), *texts]) + "\n"


def lines(rows: list[dict[str, Any]]) -> str:
    whole = [{k: v for k, v in row.items() if v is not None} for row in rows]
    return "\n".join(map(json.dumps, whole)) + "\n"


def zipped(text: str) -> bytes:
    return gzip.compress(text.encode())


KINDS: dict[str, Callable[[Any], str | bytes]] = {
    "a.csv": csv,
    "a.tsv": lambda rows: csv(rows, "\t"),
    "a.csv.gz": lambda rows: zipped(csv(rows)),
    "a.jsonl": lines,
    "a.jsonl.gz": lambda rows: zipped(lines(rows)),
    "a.json": json.dumps,
}


def written(path: Path, made: str | bytes) -> Path:
    path.write_bytes(made if isinstance(made, bytes) else made.encode())
    return path


def opened(path: Path) -> Recording:
    return Recording.open(Source(path, columns=COLUMNS), on_bad=None)


def sent(recording: Recording) -> Recording:
    """As another process gets it."""
    copy: Recording = pickle.loads(pickle.dumps(recording))  # noqa: S301
    return copy


@pytest.mark.parametrize("name", KINDS)
def test_converted_text_is_what_it_is_when_read_whole(
    tmp_path: Path, monkeypatch: Any, conversions: Any, own_cache: Path, name: str
) -> None:
    path = written(tmp_path / name, KINDS[name](rows_of()))
    found = opened(path)
    assert conversions == [path]
    exp = found.read()
    monkeypatch.setattr(text_tables, "_BLOCK", 2**22)
    cache.clear()
    monkeypatch.setattr(cache, "LEAST_BYTES", 2**30)
    np.testing.assert_array_equal(sent(opened(path)).read().steps["obs"], exp.steps["obs"])
    assert list(own_cache.iterdir()) == []  # it is held in memory
    wanted = opened(path)
    assert found.columns == wanted.columns
    assert found.obs_space == wanted.obs_space
    assert exp.segments.episode_id.tolist() == wanted.read().segments.episode_id.tolist()
    for column, values in wanted.read().steps.items():
        assert exp.steps[column].dtype == values.dtype
        np.testing.assert_array_equal(exp.steps[column], values)
    np.testing.assert_array_equal(exp.steps["obs"][:, 0], [row["x"] for row in rows_of()])


def test_faults_are_named_where_the_text_has_them(tmp_path: Path) -> None:
    rows = rows_of()
    rows[17]["y"] = float("inf")
    path = written(tmp_path / "a.csv", csv(rows))
    problem = next(one for one in validate(Source(path, columns=COLUMNS)).problems if one.kind == "nan")
    assert (problem.kind, problem.file, problem.row, problem.column) == ("nan", str(path), 17, "obs")
    assert f"{path}, row 17: " in problem.message


def test_json_whose_lines_have_other_members(tmp_path: Path, monkeypatch: Any) -> None:
    rows = [{"o": {"p": i, **({"q": 0.5} if i else {"q": 0})}, "a": i % 2, "e": i // 30} for i in range(60)]
    path = written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    source = Source(path, columns={"obs": "o", "action": "a", "episode_id": "e"})
    exp = Recording.open(source, on_bad=None).read()
    np.testing.assert_array_equal(exp.steps["obs/p"], np.arange(60))
    np.testing.assert_array_equal(exp.steps["obs/q"], [0.0] + [0.5] * 59)


def test_a_file_is_converted_once(tmp_path: Path, conversions: list[Path], own_cache: Path) -> None:
    path = written(tmp_path / "a.csv", csv(rows_of()))
    first, second = opened(path), opened(path)
    copy, other = sent(second), sent(second)
    assert len(pickle.dumps(second)) < 20_000
    assert copy.read().steps["reward"].tolist() == first.read().steps["reward"].tolist()
    assert conversions == [path]
    assert len(list(own_cache.iterdir())) == 1

    cache.clear()  # what is being read is made again
    assert other.part(0).num_steps > 0
    assert conversions == [path, path]

    written(path, csv(rows_of(61)))
    assert opened(path).num_steps == 61
    assert conversions == [path, path, path]
    cache.clear()
    with pytest.raises(DataError, match=r"a\.csv: has changed since it was opened"):
        sent(first).part(0)


def test_broken_text_is_named_and_leaves_nothing(tmp_path: Path, own_cache: Path) -> None:
    text = csv(rows_of())
    path = written(tmp_path / "a.csv", text + "1,2\n")
    with pytest.raises(DataError, match=r"a\.csv: can't be read .*Expected 9 columns, got 2"):
        opened(path)
    path = written(tmp_path / "a.jsonl", lines(rows_of()) + "{\n")
    with pytest.raises(DataError, match=r"a\.jsonl: can't be read \(line 61 is not JSON"):
        opened(path)
    assert list(own_cache.iterdir()) == []


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_large_npz_files_are_unpacked(tmp_path: Path, monkeypatch: Any, own_cache: Path, save: Any) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "observations": np.asfortranarray(rng.normal(size=(300, 4))), "actions": rng.integers(0, 3, (300, 1)),
        "rewards": rng.normal(size=300).astype(">f4"), "terminals": np.arange(300) % 50 == 49,
    }  # fmt: skip
    save(tmp_path / "a.npz", **arrays)
    recording = Recording.open(tmp_path / "a.npz")
    found = sent(recording).read()
    assert len(list(own_cache.iterdir())) == 1
    monkeypatch.setattr(cache, "LEAST_BYTES", 2**30)
    wanted = Recording.open(tmp_path / "a.npz").read()
    for name, values in wanted.steps.items():
        np.testing.assert_array_equal(found.steps[name], values)
    np.testing.assert_array_equal(found.steps["obs"], arrays["observations"])
    assert found.lengths.tolist() == [50] * 6

    damaged = bytearray((tmp_path / "a.npz").read_bytes())
    damaged[1000] ^= 1
    (tmp_path / "a.npz").write_bytes(damaged)
    monkeypatch.setattr(cache, "LEAST_BYTES", 0)
    with pytest.raises(DataError, match=r"a\.npz: can't be read as \.npz"):
        Recording.open(tmp_path / "a.npz").read()
    assert len(list(own_cache.iterdir())) == 1


def test_who_makes_an_entry_at_the_same_time_ends_well(own_cache: Path) -> None:
    barrier, found = threading.Barrier(3), []

    def make(folder: Path) -> None:
        (folder / "a").write_text("made")
        barrier.wait(60)

    threads = [threading.Thread(target=lambda: found.append(cache.entry("key", make))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [own_cache / "key"] * 3
    assert [path.name for path in own_cache.iterdir()] == ["key"]
    assert (own_cache / "key" / "a").read_text() == "made"


def test_what_was_not_used_for_longest_goes_first(own_cache: Path, monkeypatch: Any) -> None:
    def make(folder: Path) -> None:
        (folder / "a").write_bytes(bytes(1000))

    monkeypatch.setenv("ETUDE_CACHE_BYTES", "3_500")
    for i, name in enumerate("abc"):
        os.utime(cache.entry(name, make), (i, i))
    left = own_cache / ".d.1-abc"  # by a process that was killed
    left.mkdir()
    os.utime(left, (0, 0))
    cache.entry("a", make)  # used now
    cache.entry("e", make)
    assert sorted(path.name for path in own_cache.iterdir()) == ["a", "c", "e"]
    monkeypatch.setenv("ETUDE_CACHE_BYTES", "1")
    cache.entry("f", make)
    assert [path.name for path, _, _ in cache.entries()] == ["f"]
    assert cache.clear() == 1000
    assert cache.entries() == []
    monkeypatch.setenv("ETUDE_CACHE_BYTES", "20 GB")
    with pytest.raises(SettingsError, match="ETUDE_CACHE_BYTES is '20 GB'"):
        cache.max_bytes()


def test_clearing_removes_what_killed_processes_left_but_nothing_unfinished(own_cache: Path) -> None:
    left = own_cache / ".d.1-abc"
    left.mkdir(parents=True)
    (left / "a").write_bytes(bytes(500))

    def make(folder: Path) -> None:
        (folder / "b").write_bytes(bytes(10))
        assert cache.clear() == 500

    made = cache.entry("e", make)
    assert [path.name for path in own_cache.iterdir()] == ["e"]
    assert [path.name for path in made.iterdir()] == ["b"]


def test_a_cache_that_can_not_be_written_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("ETUDE_CACHE", str(written(tmp_path / "file", "")))
    with pytest.raises(DataError, match=r"file/recordings: can't be written .* ETUDE_CACHE"):
        opened(written(tmp_path / "a.csv", csv(rows_of())))


def test_arrow_types_of_csv_are_those_that_arrow_finds(tmp_path: Path) -> None:
    texts = {
        "whole": ["1", "2", "3.5"], "truth": ["true", "false", "maybe"], "day": ["2026-01-01", "2026-01-02", "never"],
        "moment": ["2026-01-01 00:00:00", "2026-01-01 00:00:01", "2026-01-01 00:00:00.5"], "none": ["", "", "1"],
        "name": ["001", "002", "x3"], "flag": ["0", "1", "true"],
    }  # fmt: skip
    names = list(texts)
    path = tmp_path / "a.csv"
    rows = [[texts[name][0 if i < 60 else 1 if i < 90 else 2] for name in names] for i in range(100)]
    written(path, "\n".join(map(",".join, [names, *rows])) + "\n")
    target = tmp_path / text_tables._TABLE
    text_tables._convert(path, "csv", (), False, tmp_path)
    with pa.memory_map(str(target)) as file:
        found = pa.ipc.open_file(file).read_all()
    wanted = text_tables._blanks_as_nulls(pa.csv.read_csv(path))
    assert found.schema == wanted.schema
    assert found.equals(wanted)


@pytest.fixture
def sorts(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What is sorted on the disk, a few rows at a time."""
    found: list[Path] = []
    real = sorting.write_sorted

    def counted(tracks: Any, rows: Any, target: Path, *more: Any) -> None:
        found.append(target)
        real(tracks, rows, target, *more)

    monkeypatch.setattr(sorting, "write_sorted", counted)
    monkeypatch.setattr(sorting, "BUCKET_BYTES", 2000)
    monkeypatch.setattr(sorting, "_PENDING_BYTES", 5000)
    return found


def unordered(folder: Path, has_t: bool) -> pa.Table:
    """Rows of several episodes and agents in any order, in three files; one episode is long."""
    rng = np.random.default_rng(0)
    lengths = [300, *rng.integers(1, 30, 40).tolist()]
    rows = [(f"e{e}", f"a{a}", t) for e, length in enumerate(lengths) for a in range(1 + e % 3) for t in range(length)]
    order = rng.permutation(len(rows))
    steps = [rows[i][2] for i in order]
    columns = {
        "e": [rows[i][0] for i in order],
        "agent": pa.array([rows[i][1] for i in order]).dictionary_encode(),
        **({"t": steps} if has_t else {}),
        "o": [[float(step), float(i)] for i, step in enumerate(steps)],
        "a": rng.integers(0, 3, len(rows)),
        "note": [f"row {i}" for i in range(len(rows))],
    }
    table = pa.table(columns)
    third = len(rows) // 3
    for k, start in enumerate((0, third, 2 * third)):
        pq.write_table(table.slice(start, third if k < 2 else None), folder / f"{k}.parquet", row_group_size=97)
    return table


@pytest.mark.parametrize("has_t", [True, False])
def test_rows_in_any_order_are_sorted_once(
    tmp_path: Path, monkeypatch: Any, sorts: list[Path], own_cache: Path, has_t: bool
) -> None:
    table = unordered(tmp_path, has_t)
    columns = {"obs": "o", "action": "a", "episode_id": "e", "agent_id": "agent", **({"t": "t"} if has_t else {})}
    source = Source(str(tmp_path / "*.parquet"), columns=columns)
    found = Recording.open(source, on_bad=None)
    exp = sent(found).read()
    assert Recording.open(source, on_bad=None).num_steps == table.num_rows
    assert len(sorts) == 1
    assert "sorted.arrow" in [path.name for entry in own_cache.iterdir() for path in entry.iterdir()]
    cache.clear()
    monkeypatch.setattr(cache, "LEAST_BYTES", 2**30)
    wanted = Recording.open(source, on_bad=None)
    assert list(own_cache.iterdir()) == []  # it is held in memory
    assert found.header == wanted.header
    whole = wanted.read()
    for name, values in whole.steps.items():
        assert exp.steps[name].dtype == values.dtype
        np.testing.assert_array_equal(exp.steps[name], values)
    np.testing.assert_array_equal(exp.offsets, whole.offsets)
    np.testing.assert_array_equal(exp.final_obs["obs"], whole.final_obs["obs"])
    for name in ("episode_id", "agent_id", "t_start", "has_final_obs"):
        assert getattr(exp.segments, name).tolist() == getattr(whole.segments, name).tolist()
    if has_t:
        np.testing.assert_array_equal(exp.steps["obs"][:, 0], np.concatenate([np.arange(n) for n in exp.lengths]))
    assert exp.steps["note"].tolist() == [f"row {int(i)}" for i in exp.steps["obs"][:, 1]]
    names = [table[name].to_pylist() for name in ("e", "agent")]
    first = [list(dict.fromkeys(own)).index for own in names]
    when = table["t"].to_pylist() if has_t else range(table.num_rows)
    order = sorted(range(table.num_rows), key=lambda i: (first[0](names[0][i]), first[1](names[1][i]), when[i]))
    assert exp.steps["obs"][:, 1].tolist() == order


def test_rows_are_sorted_that_have_a_final_observation_in_few(tmp_path: Path, sorts: list[Path]) -> None:
    kind = pa.list_(pa.field("element", pa.float32(), nullable=False), 1)
    finals = pa.array([[9.0], None, None, None], kind)
    table = pa.table({"e": ["a"] * 4, "t": [3, 2, 1, 0], "o": [[3.0], [2.0], [1.0], [0.0]], "a": [0] * 4, "f": finals})
    pq.write_table(table, tmp_path / "a.parquet")
    columns = {"obs": "o", "action": "a", "episode_id": "e", "t": "t", "final_obs": "f"}
    exp = Recording.open(Source(tmp_path / "a.parquet", columns=columns), on_bad=None).read()
    assert len(sorts) == 1
    assert exp.steps["obs"].tolist() == [[0.0], [1.0], [2.0], [3.0]]
    assert exp.final_obs["obs"].tolist() == [[9.0]]


def test_faults_of_sorted_rows_are_named_where_the_files_have_them(tmp_path: Path, sorts: list[Path]) -> None:
    table = unordered(tmp_path, True)
    obs = table["o"].to_pylist()
    obs[5][1] = float("nan")
    third = table.num_rows // 3
    changed = table.set_column(table.schema.get_field_index("o"), "o", pa.array(obs)).slice(0, third)
    pq.write_table(changed, tmp_path / "0.parquet", row_group_size=97)
    columns = {"obs": "o", "action": "a", "episode_id": "e", "agent_id": "agent", "t": "t"}
    source = Source(str(tmp_path / "*.parquet"), columns=columns)
    problem = next(one for one in validate(source).problems if one.kind == "nan")
    assert (problem.file, problem.row, problem.column) == (str(tmp_path / "0.parquet"), 5, "obs")
    assert len(sorts) == 1

    recording = Recording.open(source, on_bad=None)
    cache.clear()
    unordered(tmp_path, True)
    with pytest.raises(DataError, match=r"0\.parquet: has changed since it was opened"):
        sent(recording).part(0)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('[{"x": 1}, {"x": 2', r"object 2 of the list is not JSON"),
        ('[{"x": 1} {"x": 2}]', r"object 2 of the list is not JSON: a comma is missing"),
        ('[{"x": 1}, 2]', r"element 2 of the list is not an object"),
        ('[{"x": 1}] {}', r"there is more after the list of 1 objects"),
        ("[]", r"(has no rows|there is no column `x`)"),
        ("[" * 5000, r"recursion"),
        ("null", r"a line is null, and not an object"),
        ("\n null\n" + '{"x": 1}\n' * 9, r"a line is null, and not an object"),
    ],
)
def test_lists_of_json_that_are_broken(tmp_path: Path, monkeypatch: Any, text: str, match: str) -> None:
    path = written(tmp_path / "a.json", text)
    for least in (0, 2**30):
        monkeypatch.setattr(cache, "LEAST_BYTES", least)
        with pytest.raises(DataError, match=match):
            opened(path)
