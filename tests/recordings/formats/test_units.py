# SPDX-License-Identifier: Apache-2.0
"""What all formats have in common: units are read by anyone, in any order, and nothing is read twice for it."""

import os
import threading
from collections import Counter
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import some_rllib
import some_rllib_table
from some_recording import assert_same, numbered, record
from test_one_rule import lines, rows

from etude.errors import DataError
from etude.experience import Experience, Segments
from etude.recordings import Contents, Format, Header, Problem, Recording, Source, Unit, convert, read_text, validate
from etude.recordings import opening as opening_module

SPACES: Any = {"obs_space": gym.spaces.Box(-9, 9, (1,), np.float32), "action_space": gym.spaces.Discrete(3)}
TABLE = {"obs": "x", "action": "a", "episode_id": "trip", "t": "i", "terminated": "end"}


def own(path: Path) -> Any:
    record(path, numbered([20, 9, 30]), max_rows_per_file=20)
    return path


def rllib_episodes(path: Path) -> Any:
    some_rllib.write_items(path / "a.parquet", [some_rllib.episode(n, name=f"e{n}")[0] for n in (3, 9, 4)])
    return path


def rllib_table(path: Path) -> Any:
    return some_rllib_table.write(path / "a.parquet", some_rllib_table.rows_of([9, 12])).parent


def rllib_json(path: Path) -> Any:
    return lines(path / "json", rows(9))


def minari(path: Path) -> Any:
    record(path / "own", numbered([20, 9]))
    convert(path / "own", path / "some-v0", "minari")
    return path / "some-v0"


def npz(path: Path) -> Any:
    numbers = np.arange(45, dtype=np.float32)
    np.savez(path / "a.npz", observations=numbers[:, None], actions=numbers, terminals=numbers % 9 == 8)
    return path / "a.npz"


def table(path: Path) -> Any:
    made = pa.table({"x": np.arange(40.0), "a": np.arange(40) % 3, "trip": np.repeat(["b", "a"], 20),
                     "i": np.tile(np.arange(20)[::-1], 2), "end": np.arange(40) % 20 == 0})  # fmt: skip
    pq.write_table(made, path / "a.parquet", row_group_size=7)
    pa.csv.write_csv(made, path / "b.csv")
    return Source(str(path / "a.parquet"), TABLE)


def csv(path: Path) -> Any:
    table(path)
    return Source(path / "b.csv", TABLE)


def parsed(row: Any) -> Any:
    return {"obs": [[float(word)] for word in row.data.split()], "action": [0, 1, 2], "truncated": True}


def text(path: Path) -> Any:
    (path / "a.txt").write_text("0 1 2 3\n4 5 6 7\n")
    return read_text(path / "a.txt", parsed, **SPACES)


def several(path: Path) -> Any:
    record(path / "one", numbered([20, 9]))
    record(path / "two", numbered([5]))
    return [path / "one", path / "two"]


KINDS = [own, rllib_episodes, rllib_table, rllib_json, minari, npz, table, csv, text, several]


@pytest.mark.parametrize("mode", ["strict", "skip"])
@pytest.mark.parametrize("make", KINDS)
def test_other_processes_read_units_without_opening_anything_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, mode: Any
) -> None:
    given = make(tmp_path)
    here = Recording.open(given, on_bad=mode)
    sent = ForkingPickler.dumps(here)

    def opened_again(*args: Any) -> Any:
        raise AssertionError("it was opened again")

    for name in ("opened", "foreign", "of_files", "joined"):
        monkeypatch.setattr(opening_module, name, opened_again)
    there = ForkingPickler.loads(sent)
    assert (there.format, there.columns, there.num_parts) == (here.format, here.columns, here.num_parts)
    assert there.obs_space == here.obs_space
    for k in reversed(range(here.num_parts)):
        assert_same(there.part(k), here.part(k))
        assert_same(there.part(k, ["action"]), here.part(k, ["action"]))


@pytest.mark.parametrize("make", [own, rllib_episodes, text])
def test_a_process_in_another_folder_finds_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    here = Recording.open(make(Path("below")))
    sent, wanted = ForkingPickler.dumps(here), [here.part(k) for k in range(here.num_parts)]
    os.chdir("/")
    there = ForkingPickler.loads(sent)
    for k, exp in enumerate(wanted):
        assert_same(there.part(k), exp)


@pytest.mark.parametrize("workers", [1, 3])
def test_no_row_group_is_decoded_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr("etude.recordings.formats.rllib_episodes.UNIT_BYTES", 2000)
    monkeypatch.setattr("etude.recordings.formats.rllib_episodes._MOST_BYTES", 2000)
    states = [some_rllib.episode(10, name=f"e{i}")[0] for i in range(24)]
    for i in range(3):
        some_rllib.write_items(tmp_path / f"{i}.parquet", states[i * 8 : i * 8 + 8])
    decoded: Counter[tuple[str, int]] = Counter()
    plain = pq.ParquetFile.read_row_group

    def counted(self: Any, group: int, **options: Any) -> Any:
        decoded[str(self.metadata.num_rows), group] += 1
        return plain(self, group, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    recording = Recording.open(tmp_path)
    assert recording.num_parts >= 9
    assert sum(decoded.values()) == 3
    found: list[Experience] = []

    def load(first: int) -> None:
        found.extend(recording.part(k) for k in range(first, recording.num_parts, workers))

    threads = [threading.Thread(target=load, args=(i,)) for i in range(workers)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sum(exp.num_steps for exp in found) == 240
    assert sum(decoded.values()) == 3


class Counts(Format):
    """Two units of a user's own, the second of which can't be read."""

    name = "counts"

    def describe(self) -> Contents:
        header = Header(SPACES["obs_space"], SPACES["action_space"])
        return Contents(header, ["obs", "action"], [Unit(0, 4), Unit(1, 4), Unit(2)])

    def read(self, unit: Unit, columns: Any, problems: list[Problem] | None = None) -> Experience:
        if unit.index == 1:
            raise DataError("the plant was switched off")
        obs = np.arange(5, dtype=np.float32)[:, None]
        steps = {"obs": obs[:-1], "action": np.array([0, 1, 2, 3])}
        segments = Segments.of(1, episode_id=[f"day-{unit.index}"], truncated=True)
        kept = {name: steps[name] for name in columns}
        return Experience(kept, np.array([0, 4]), segments, {"obs": obs[-1:]} if "obs" in kept else {})


def test_a_format_of_a_users_own() -> None:
    loose = Recording.open(Counts(), on_bad=None)
    assert (loose.format, loose.columns, loose.num_parts) == ("counts", ["obs", "action"], 3)
    assert loose.part(0, ["action"]).steps["action"].tolist() == [0, 1, 2, 3]
    assert loose.num_steps == 12
    outside, unreadable, again = validate(Counts()).errors
    assert (unreadable.kind, unreadable.count, unreadable.file) == ("unreadable", 4, "counts")
    assert outside.message.startswith("counts, episode 'day-0', step 3: column `action` is 3, outside its space")
    assert again.message.startswith("counts, episode 'day-2', step 3: column `action` is 3")
    skipping = Recording.open([Counts(), Counts()], on_bad="repair")
    assert skipping.read().lengths.tolist() == [3] * 4
    assert skipping.read().segments.episode_id.tolist() == ["0-day-0", "0-day-2", "1-day-0", "1-day-2"]
    assert skipping.left_out == {"out_of_space": 4, "unreadable": 8}


class Again(Format):
    """Episode ``day`` in two units, the second of which says something else of its first step."""

    name = "again"

    def describe(self) -> Contents:
        header = Header(gym.spaces.Dict({"a": SPACES["obs_space"], "b": SPACES["obs_space"]}), SPACES["action_space"])
        return Contents(header, ["obs/a", "obs/b", "action"], [Unit(0, 3), Unit(1, 3)])

    def read(self, unit: Unit, columns: Any, problems: list[Problem] | None = None) -> Experience:
        obs = np.arange(4, dtype=np.float32)[:, None] + np.float32([unit.index, 0, 0, 0])[:, None]
        steps = {"obs/a": obs[:-1], "obs/b": obs[:-1], "action": np.zeros(3, np.int64)}
        kept = {name: steps[name] for name in columns}
        finals = {name: obs[-1:] for name in kept if name.startswith("obs")}
        segments = Segments.of(1, episode_id=["day"], truncated=True)
        return Experience(kept, np.array([0, 3]), segments, finals)


def test_a_format_is_asked_for_columns_by_their_names_alone() -> None:
    mended = Recording.open(Again(), on_bad="repair")
    assert mended.read().num_steps == 0
    assert mended.left_out == {"contradiction": 6}
    assert validate(Again()).errors[0].kind == "duplicate"
    with pytest.raises(DataError, match="episode 'day' has step t 0 a second time"):
        Recording.open(Again(), on_bad=None).read(columns=["obs"])
