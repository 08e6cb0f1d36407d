# SPDX-License-Identifier: Apache-2.0
"""Recordings in other tools' formats: what is refused, what is noted, and that files appear whole or not at all.

What each format holds is tested in formats/test_*_writer.py.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from some_recording import assert_same, numbered, record, record_format_1

from etude.errors import DataError, SettingsError
from etude.experience import Experience
from etude.recordings import Recording, Source, convert
from etude.recordings.converting import episodes_of_one_agent, whole_episodes

OTHERS = ("rllib-episodes", "rllib-table", "minari")


def converted(folder: Path, format: str, *parts: Experience) -> Recording:
    record(folder / "own", *parts)
    return convert(Recording.open(folder / "own", on_bad=None), folder / "out-v0", format)


@pytest.mark.parametrize("format", OTHERS)
def test_there_and_back(tmp_path: Path, format: str) -> None:
    exp = numbered([5, 1, 30])
    written = converted(tmp_path, format, exp)
    assert (written.num_steps, written.num_episodes, written.notes) == (36, 3, ())
    back = convert(written, tmp_path / "back").read()
    np.testing.assert_array_equal(back.steps["obs"], exp.steps["obs"])
    np.testing.assert_array_equal(back.final_obs["obs"], exp.final_obs["obs"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "out-v0", "own"]


@pytest.mark.parametrize("format", OTHERS)
def test_more_rows_than_are_in_memory_at_a_time(tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.recordings.converting.MAX_ROWS", 16)
    exp = numbered([9, 40, 3, 7, 8], terminated=True, truncated=False)
    found = converted(tmp_path, format, exp).read()
    found = found.select(np.argsort(found.steps["obs"][found.offsets[:-1], 0]))  # the long one is complete last
    np.testing.assert_array_equal(found.steps["obs"], exp.steps["obs"])
    np.testing.assert_array_equal(found.offsets, exp.offsets)


def test_an_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"format is 'rllib-episode'; known are etude, .* Nearest: `rllib-ep"):
        converted(tmp_path, "rllib-episode", numbered([3]))


@pytest.mark.parametrize("format", ["etude", "minari"])
def test_what_is_named_like_a_file_is_no_folder(format: str, tmp_path: Path) -> None:
    record(tmp_path / "own", numbered([3]))
    with pytest.raises(SettingsError, match=r"x.csv: is named like a .csv file, but a folder is written"):
        convert(tmp_path / "own", tmp_path / "x.csv", format=format)
    assert not (tmp_path / "x.csv").exists()


@pytest.mark.parametrize("format", OTHERS)
def test_where_it_can_not_be_written(tmp_path: Path, format: str) -> None:
    record(tmp_path / "own", numbered([3]))
    own = Recording.open(tmp_path / "own")
    (tmp_path / "full-v0").mkdir()
    (tmp_path / "full-v0" / "x").touch()
    with pytest.raises(DataError, match=r"full-v0: already exists and is not empty"):
        convert(own, tmp_path / "full-v0", format)
    with pytest.raises(DataError, match=r"x: already exists"):
        convert(own, tmp_path / "full-v0" / "x", format)
    with pytest.raises(DataError, match=r"a-v0: .*can only be written to a local folder"):
        convert(own, "s3://bucket/a-v0", format)
    with pytest.raises(DataError, match=r"a-v0: can't be written"):
        convert(own, tmp_path / "full-v0" / "x" / "a-v0", format)
    (tmp_path / "empty-v0").mkdir()
    assert convert(own, tmp_path / "empty-v0", format).num_steps == 3


AGENTS = numbered([3, 3], episode_id=["e", "e"], agent_id=["a", "b"])
TWICE = numbered([3, 3], episode_id=["e", "e"])
OVERLAP = numbered([3, 3], episode_id=["e", "e"], t_start=[0, 2], terminated=[False, True], truncated=False)


@pytest.mark.parametrize(
    ("exp", "formats", "message"),
    [
        (AGENTS, OTHERS, r"episode 'e' has several agents \('a', 'b'\), which this format can't hold"),
        (TWICE, OTHERS, r"episode 'e' has step t 0 a second time"),
        (OVERLAP, OTHERS, r"episode 'e' has step t 2 a second time"),
    ],
)
def test_what_can_not_be_held(tmp_path: Path, exp: Experience, formats: tuple[str, ...], message: str) -> None:
    for format in formats:
        with pytest.raises(DataError, match=r"own\b.*" + message):
            converted(tmp_path / format, format, exp)
        assert [path.name for path in (tmp_path / format).iterdir()] == ["own"]


def test_an_episode_with_a_hole(tmp_path: Path) -> None:
    exp = numbered([3, 3], episode_id=["e", "e"], t_start=[0, 5], terminated=[False, True], truncated=False)
    for format in ("rllib-episodes", "minari"):
        with pytest.raises(DataError, match=r"episode 'e' lacks the steps 3 to 4, but .* can only hold whole episodes"):
            converted(tmp_path / format, format, exp)
    found = converted(tmp_path, "rllib-table", exp).read()
    assert found.segments.t_start.tolist() == [0, 5]


def test_without_steps_or_rewards(tmp_path: Path) -> None:
    exp = numbered([3])
    record(tmp_path / "none", exp[:0], exp)
    bare = Experience({n: exp.steps[n] for n in ("obs", "action")}, exp.offsets, exp.segments, exp.final_obs)
    with pytest.raises(DataError, match=r"own: has no column `reward`, which minari requires"):
        converted(tmp_path, "minari", bare)
    context = Experience(exp.steps, exp.offsets, exp.segments.replace(lookback=np.array([3])), exp.final_obs)
    record_format_1(tmp_path / "a" / "own", context)
    with pytest.raises(DataError, match=r"own: holds no steps"):
        convert(Recording.open(tmp_path / "a" / "own"), tmp_path / "a" / "out", "rllib-episodes")


@pytest.mark.parametrize("format", OTHERS)
def test_what_is_changed_is_noted(tmp_path: Path, format: str) -> None:
    exp = numbered([3, 4], terminated=[True, False], truncated=[False, True], has_final_obs=[False, True])
    exp.steps["note"] = np.array(list("abcdefg"), object)
    written = converted(tmp_path, format, exp)
    assert written.notes == (
        f"column `note` holds text, which {format} has no place for: left out",
        "the final observation of 1 terminated segment(s) is unknown: the observation before is repeated, from "
        "which nothing is learned",
    )
    np.testing.assert_array_equal(written.read().final_obs["obs"], [exp.steps["obs"][2], exp.final_obs["obs"][1]])


@pytest.mark.parametrize("format", OTHERS)
def test_steps_after_which_nobody_knows_what_was_observed(tmp_path: Path, format: str) -> None:
    exp = numbered([3, 1, 4, 2], terminated=[False, False, True, False], truncated=[True, True, False, False],
                   has_final_obs=[False, False, True, False])  # fmt: skip
    written = converted(tmp_path, format, exp)
    assert written.notes[-1] == (
        "the final observation of 3 segment(s) that did not terminate is unknown: their last steps are left out"
    )
    found = written.read()
    assert found.steps["obs"][:, :2].tolist() == [[0, 0], [0, 1], [2, 0], [2, 1], [2, 2], [2, 3], [3, 0]]
    assert found.final_obs["obs"][:, :2].tolist() == [[0, 2], [2, 4], [3, 1]]
    assert found.segments.terminated.tolist() == [False, True, False]
    assert found.segments.truncated.tolist() == [True, False, format != "rllib-table"]


def test_steps_of_context_that_stand_nowhere_else(tmp_path: Path) -> None:
    whole = numbered([6])
    rest = whole.cut(3, lookback=2)[1:]
    record_format_1(tmp_path / "own", rest)
    written = convert(Recording.open(tmp_path / "own"), tmp_path / "out", "rllib-episodes")
    assert written.notes == ("2 rows are context only (lookback), mostly copies of other steps: left out",)
    assert written.read().steps["obs"][:, 1].tolist() == [3, 4, 5]


def test_what_a_killed_one_left_is_removed(tmp_path: Path) -> None:
    record(tmp_path / "own", numbered([3]))
    (tmp_path / ".out-v0.tmp").mkdir()
    (tmp_path / ".out-v0.tmp" / "part-00009.parquet").write_bytes(b"half")
    convert(Recording.open(tmp_path / "own"), tmp_path / "out-v0", "rllib-table")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-v0", "own"]
    assert [path.name for path in (tmp_path / "out-v0").iterdir()] == ["part-00000.parquet"]


def test_whole_episodes_hold_no_more_than_has_begun(tmp_path: Path) -> None:
    whole = numbered([6, 6, 6, 2], terminated=True, truncated=False)
    cut = whole.cut(3, lookback=1)
    record(tmp_path / "own", *(cut.select(np.array([i])) for i in (0, 2, 3, 6, 1, 5, 4)))
    recording = Recording.open(tmp_path / "own", on_bad=None)
    pieces = list(whole_episodes(recording, episodes_of_one_agent(recording), "minari", []))
    got = Experience.concat(pieces)
    assert sorted(got.segments.episode_id.tolist()) == ["e0", "e1", "e2", "e3"]
    assert_same(got.select(np.argsort(got.segments.episode_id.astype(str))), whole)


def test_a_recording_of_which_all_is_left_out_says_why(tmp_path: Path) -> None:
    table = pa.table({"x": [0.0, np.nan], "a": [0, 1], "trip": ["i", "i"], "end": [False, True]})
    source = Source(table, columns={"obs": "x", "action": "a", "episode_id": "trip", "terminated": "end"})
    with pytest.raises(DataError, match=r"nothing to convert\. All were left out: .*nan 1 times \(2 rows left out\)"):
        convert(Recording.open(source, on_bad="skip"), tmp_path / "new")
