# SPDX-License-Identifier: Apache-2.0
"""Recordings out of recordings, against what is worked out in memory from all that was written."""

import gymnasium as gym
import numpy as np
import pyarrow.parquet as pq
import pytest
from some_recording import OBS, numbered, record, record_format_1

from etude.errors import DataError, SettingsError
from etude.experience import Experience
from etude.files import located
from etude.recordings import (
    Recording,
    RecordingWriter,
    Source,
    convert,
    filter_recording,
    merge_recordings,
    sample_recording,
    split_recording,
    validate,
)
from etude.recordings.editing import _places
from etude.recordings.files import data_files

LENGTHS = [5, 12, 3, 8, 20, 1, 7, 9]


def by_episode(*experiences):
    """All steps of each episode and agent, by their ids."""
    found = {}
    for exp in experiences:
        for one in exp:
            key = (one.segments.episode_id[0], one.segments.agent_id[0])
            assert key not in found
            found[key] = np.column_stack([one.steps["obs"], one.steps["action"], one.steps["reward"]])
    return found


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        np.testing.assert_array_equal(found[key], values)


def scattered(path):
    """Two agents in each episode, in pieces that stand in different files in no order."""
    a = numbered(LENGTHS, agent_id=["a"] * 8)
    b = numbered([n + 2 for n in LENGTHS], agent_id=["b"] * 8)
    rng = np.random.default_rng(0)
    pieces = [piece for one in (*a, *b) for piece in one.cut(4)]
    record(path, *(pieces[i] for i in rng.permutation(len(pieces))), max_rows_per_file=25)
    assert len(Recording.open(path).files) > 4
    return Experience.concat([a, b])


def test_split_keeps_all_that_is_of_an_episode_together(tmp_path):
    exp = scattered(tmp_path / "r")
    done = split_recording(
        Recording.open(tmp_path / "r", on_bad=None), tmp_path / "t", tmp_path / "v", fraction=0.7, seed=3
    )
    train, valid = (Recording.open(tmp_path / name, on_bad=None).read() for name in "tv")
    assert_equal(by_episode(train, valid), by_episode(exp))
    ids = [set(part.segments.episode_id) for part in (train, valid)]
    assert not ids[0] & ids[1]
    assert [len(part) for part in ids] == [6, 2] == [part.episodes for part in done.written]
    assert [part.steps for part in done.written] == [train.num_steps, valid.num_steps]
    assert done.left_out_steps == 0
    assert Recording.open(tmp_path / "t", on_bad=None).meta["edited_from"]["how"] == "split"


def test_split_hangs_on_the_seed_alone(tmp_path):
    record(tmp_path / "r", numbered(LENGTHS))
    ids = []
    for i, seed in enumerate((0, 0, 1)):
        split_recording(
            Recording.open(tmp_path / "r", on_bad=None), tmp_path / f"t{i}", tmp_path / f"v{i}", fraction=0.5, seed=seed
        )
        ids.append(set(Recording.open(tmp_path / f"t{i}", on_bad=None).read().segments.episode_id))
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_each_part_of_a_split_gets_an_episode(tmp_path, fraction):
    record(tmp_path / "r", numbered([4, 5, 6]))
    done = split_recording(
        Recording.open(tmp_path / "r", on_bad=None), tmp_path / "t", tmp_path / "v", fraction=fraction
    )
    assert sorted(part.episodes for part in done.written) == [1, 2]


FILTERS = [
    ({"min_length": 8}, lambda ret, n, who: n >= 8),
    ({"max_length": 7, "min_return": 10.0}, lambda ret, n, who: n <= 7 and ret >= 10),
    ({"max_return": 20.0}, lambda ret, n, who: ret <= 20),
    ({"where": "terminated and length > 3"}, lambda ret, n, who: who % 2 == 0 and n > 3),
    ({"where": "max(obs[1]) >= 8 and min(reward) > 1"}, lambda ret, n, who: n - 1 >= 8 and who > 1),
    ({"where": "mean(action) > 2.5"}, lambda ret, n, who: np.mean(np.arange(n) % 7) > 2.5),
    ({"where": "all(action < 6) or episode_id == 'e4'"}, lambda ret, n, who: n <= 6 or who == 4),
    ({"where": "sum(reward) > return - 0.001 and steps == length"}, lambda ret, n, who: True),
]


@pytest.mark.parametrize(("how", "holds"), FILTERS)
def test_filter(tmp_path, how, holds):
    exp = numbered(LENGTHS)
    pieces = [piece for one in exp for piece in one.cut(4)]
    record(tmp_path / "r", *pieces[::-1], max_rows_per_file=10)
    wanted = [one for i, one in enumerate(exp) if holds(one.returns()[0], one.num_steps, i)]
    done = filter_recording(Recording.open(tmp_path / "r", on_bad=None), tmp_path / "f", **how)
    assert_equal(by_episode(Recording.open(tmp_path / "f", on_bad=None).read()), by_episode(*wanted))
    steps = sum(one.num_steps for one in wanted)
    assert (done.written[0].episodes, done.written[0].steps) == (len(wanted), steps)
    assert (done.left_out_episodes, done.left_out_steps) == (8 - len(wanted), sum(LENGTHS) - steps)


def test_figures_of_several_agents(tmp_path):
    scattered(tmp_path / "r")
    filter_recording(
        Recording.open(tmp_path / "r", on_bad=None), tmp_path / "f", where="agents == 2 and steps == 2 * length - 2"
    )
    assert Recording.open(tmp_path / "f", on_bad=None).num_episodes == 8
    filter_recording(Recording.open(tmp_path / "r", on_bad=None), tmp_path / "g", max_length=5)
    assert set(Recording.open(tmp_path / "g", on_bad=None).read().segments.episode_id) == {
        "e2",
        "e5",
    }  # 3 + 2 and 1 + 2 steps


def test_lookback_counts_for_nothing(tmp_path):
    exp = numbered([6, 6], lookback=np.array([0, 4]))
    record_format_1(tmp_path / "r", exp)
    done = filter_recording(Recording.open(tmp_path / "r", on_bad=None), tmp_path / "f", max_length=2)
    assert (done.written[0].episodes, done.written[0].steps) == (1, 2)
    kept = Recording.open(tmp_path / "f", on_bad=None).read()
    assert (kept.num_steps, kept.segments.lookback.tolist()) == (2, [0])
    done = filter_recording(Recording.open(tmp_path / "r", on_bad=None), tmp_path / "g", where="min(obs[1]) >= 4")
    assert done.written[0].episodes == 1


def test_sample_of_episodes_and_of_steps(tmp_path):
    exp = numbered(LENGTHS)
    record(tmp_path / "r", exp, max_rows_per_file=20)
    recording = Recording.open(tmp_path / "r")
    done = sample_recording(recording, tmp_path / "a", episodes=3, seed=1)
    kept = Recording.open(tmp_path / "a").read()
    assert kept.num_segments == done.written[0].episodes == 3
    whole = by_episode(exp)
    assert_equal(by_episode(kept), {key: whole[key] for key in by_episode(kept)})
    done = sample_recording(recording, tmp_path / "b", steps=30, seed=1)
    assert 30 <= done.written[0].steps < 30 + max(LENGTHS)
    done = sample_recording(recording, tmp_path / "c", steps=sum(LENGTHS))
    assert done.written[0].steps == sum(LENGTHS)
    for how in ({"episodes": 9}, {"steps": sum(LENGTHS) + 1}):
        with pytest.raises(DataError, match="holds 8 episodes with 65 steps, fewer than"):
            sample_recording(recording, tmp_path / "d", **how)


def test_merge_never_mixes_episodes_of_equal_ids(tmp_path):
    first, second = numbered([4, 6, 5]), numbered([9, 2], first=1)
    record(tmp_path / "a", *(piece for one in first for piece in one.cut(2)))
    record(tmp_path / "b", second, meta={"seed": 3})
    done = merge_recordings([Recording.open(tmp_path / name) for name in "ab"], tmp_path / "m")
    merged = Recording.open(tmp_path / "m")
    whole = by_episode(first) | {(f"{e}~2", agent): v for (e, agent), v in by_episode(second).items()}
    assert_equal(by_episode(merged.read()), whole)
    assert (done.written[0].episodes, done.written[0].steps) == (5, 26)
    (note,) = done.notes
    assert note.startswith(f"2 episodes of {tmp_path / 'b'} got new ids, because theirs were taken: 'e1' is now 'e")
    assert merged.env == "Numbered-v0"
    assert [part["meta"] for part in merged.meta["merged_from"]] == [{}, {"seed": 3}]
    assert validate(tmp_path / "m").ok


def test_new_ids_are_new(tmp_path):
    record(tmp_path / "a", numbered([4, 5], episode_id=["e1", "e1~2"]))
    record(tmp_path / "b", numbered([6, 7], episode_id=["e1", "e1~2~"]))
    merge_recordings([Recording.open(tmp_path / name) for name in "ab"], tmp_path / "m")
    assert Recording.open(tmp_path / "m").num_episodes == 4


def test_columns_that_differ(tmp_path):
    a, b = numbered([4]), numbered([5], first=1)
    record(tmp_path / "a", a.with_steps(logp=np.zeros(4, np.float32), reward=a.steps["reward"].astype(np.float32)))
    record(tmp_path / "b", b.with_steps(value=np.zeros(5, np.float32)))
    done = merge_recordings([Recording.open(tmp_path / name) for name in "ab"], tmp_path / "m")
    exp = Recording.open(tmp_path / "m").read()
    assert list(exp.steps) == ["obs", "action", "reward"]
    assert exp.steps["reward"].dtype == np.float64
    assert done.notes == (
        f"left out the column `logp`, which {tmp_path / 'b'} does not have",
        f"left out the column `value`, which {tmp_path / 'a'} does not have",
    )
    record(tmp_path / "c", a.with_steps(value=np.zeros((4, 2))))
    with pytest.raises(DataError, match=r"c: column `value` is float64\[2\], but float32 in .*b. Convert one"):
        merge_recordings([Recording.open(tmp_path / name) for name in "bc"], tmp_path / "n")
    with pytest.raises(DataError, match=r"`reward` has rows of shape \[2\], not one number each: flatten it"):
        record(tmp_path / "d", b.with_steps(reward=np.zeros((5, 2))))


def test_other_spaces_are_refused_by_name(tmp_path):
    record(tmp_path / "a", numbered([4]))
    with RecordingWriter(tmp_path / "b", obs_space=OBS, action_space=gym.spaces.Discrete(7)) as writer:
        writer.write(numbered([4]))
    with pytest.raises(DataError, match=r"b: its `action` space is Discrete\(7\), rather than .*1000.* with .*a\."):
        merge_recordings([Recording.open(tmp_path / name) for name in "ab"], tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_recordings_may_be_given_by_their_paths(tmp_path):
    record(tmp_path / "r", numbered([4, 5, 6]))
    path = str(tmp_path / "r")
    assert convert(path, tmp_path / "converted").num_steps == 15
    assert sum(p.episodes for p in split_recording(path, tmp_path / "t", tmp_path / "v", fraction=0.5).written) == 3
    assert filter_recording(tmp_path / "r", tmp_path / "f", min_length=5).written[0].episodes == 2
    assert sample_recording(path, tmp_path / "s", episodes=1).written[0].episodes == 1
    assert merge_recordings([path, Recording.open(path)], tmp_path / "m").written[0].episodes == 6
    with pytest.raises(SettingsError, match=r"`recordings` is .*r, but must be a list"):
        merge_recordings(path, tmp_path / "n")
    with pytest.raises(DataError, match="there is no such file or folder"):
        convert(tmp_path / "nothing", tmp_path / "o")


def test_what_cannot_be_done(tmp_path):
    record(tmp_path / "r", numbered([4, 5]))
    recording = Recording.open(tmp_path / "r")
    with pytest.raises(SettingsError, match="nothing to merge"):
        merge_recordings([], tmp_path / "m")
    with pytest.raises(SettingsError, match="`fraction` is 1, but must be between 0 and 1"):
        split_recording(recording, tmp_path / "t", tmp_path / "v", fraction=1)
    with pytest.raises(SettingsError, match="to the same folder: give two"):
        split_recording(recording, tmp_path / "t", tmp_path / "t")
    with pytest.raises(DataError, match="is inside"):
        split_recording(recording, tmp_path / "t", tmp_path / "t" / "v")
    with pytest.raises(DataError, match="is inside"):
        filter_recording(recording, tmp_path / "r" / "f", min_length=1)
    wrong = [
        (split_recording, {"to_validation": tmp_path / "y", "fraction": "0.5"}, "split_recording.fraction is '0.5'"),
        (filter_recording, {"min_return": "3"}, "filter_recording.min_return is '3', expected float"),
        (filter_recording, {"where": 3}, "filter_recording.where is 3, expected str"),
        (sample_recording, {"episodes": 2.0}, "sample_recording.episodes is 2.0, expected int"),
        (sample_recording, {"steps": "3"}, "sample_recording.steps is '3', expected int"),
        (convert, {"format": 3}, "convert.format is 3, expected str"),
    ]
    for function, given, said in wrong:
        with pytest.raises(SettingsError, match=said):
            function(recording, tmp_path / "x", **given)
    with pytest.raises(SettingsError, match="seed must be at least 0, not -1"):
        sample_recording(recording, tmp_path / "s", steps=3, seed=-1)
    with pytest.raises(SettingsError, match="one of them"):
        sample_recording(recording, tmp_path / "s", steps=3, episodes=1)
    with pytest.raises(SettingsError, match="must be at least 1"):
        sample_recording(recording, tmp_path / "s", episodes=0)
    with pytest.raises(DataError, match=r"no episode is left of 2. Their returns go from 0.006 to 5.01, and their le"):
        filter_recording(recording, tmp_path / "f", min_length=6)
    record(tmp_path / "one", numbered([4]))
    with pytest.raises(DataError, match="holds 1 episode, which can't be split"):
        split_recording(Recording.open(tmp_path / "one"), tmp_path / "t", tmp_path / "v")
    with pytest.raises(DataError, match="holds a recording of 1 file already"):
        sample_recording(recording, tmp_path / "one", episodes=1)


def test_without_rewards_there_is_no_return(tmp_path):
    record(tmp_path / "r", numbered([4, 5]), columns=["obs", "action"])
    recording = Recording.open(tmp_path / "r")
    assert filter_recording(recording, tmp_path / "f", min_length=5).written[0].episodes == 1
    with pytest.raises(DataError, match="has no rewards"):
        filter_recording(recording, tmp_path / "g", min_return=0)
    with pytest.raises(SettingsError, match="names `return`. Figures are length"):
        filter_recording(recording, tmp_path / "g", where="return > 0")


@pytest.mark.parametrize(
    "write",
    [
        convert,
        lambda given, to: filter_recording(given, to, min_length=1),
        lambda given, to: split_recording(given, f"{to}-train", to),
        lambda given, to: merge_recordings([given], to),
        lambda given, to: convert(given, f"{to}-v0", "minari"),
    ],
    ids=["convert", "filter", "split", "merge", "export"],
)
def test_all_is_written_or_nothing(tmp_path, write):
    record(tmp_path / "r", numbered([30, 30]), max_rows_per_file=30)
    recording = Recording.open(tmp_path / "r")
    file = tmp_path / "r" / "part-00001.parquet"
    whole = file.read_bytes()
    data = bytearray(whole)
    group = pq.read_metadata(file).row_group(0)
    (obs,) = (group.column(i) for i in range(group.num_columns) if group.column(i).path_in_schema.startswith("obs"))
    data[obs.data_page_offset + 60] ^= 255
    file.write_bytes(data)
    to = tmp_path / "made" / "here"
    for _ in range(2):
        with pytest.raises(DataError, match="row group 0 can't be read"):
            write(recording, to)
        assert list((tmp_path / "made").iterdir()) == []
    file.write_bytes(whole)
    write(Recording.open(tmp_path / "r"), to)
    there = [path for path in (tmp_path / "made").iterdir() if path.name.startswith("here")]
    assert sum(Recording.open(path).num_steps for path in there) == 60
    assert all(not path.name.startswith(".") for path in (tmp_path / "made").rglob("*"))


def test_a_folder_that_exists_keeps_its_other_files_and_a_url_is_emptied(tmp_path):
    record(tmp_path / "r", numbered([30, 30]), max_rows_per_file=30)
    recording = Recording.open(tmp_path / "r")
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "README").write_text("mine")
    file = tmp_path / "r" / "part-00001.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[:100] + bytes(200) + whole[300:])
    for to in (tmp_path / "to", "memory://emptied/to"):
        with pytest.raises(DataError, match="part-00001"):
            convert(recording, to)
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["README"]
    assert data_files(located("memory://emptied/to")) == []
    file.write_bytes(whole)
    for to in (tmp_path / "to", "memory://emptied/to"):
        assert convert(Recording.open(tmp_path / "r"), to).num_steps == 60
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == ["README", "part-00000.parquet"]


def test_nothing_is_written_into_what_is_read(tmp_path):
    record(tmp_path / "r", numbered([4, 5]))
    files = {file: file.read_bytes() for file in (tmp_path / "r").iterdir()}
    one = Recording.open(tmp_path / "r")
    for recording in (one, Recording.open([tmp_path / "r"]), Recording.open(str(tmp_path / "?"))):
        for write in (convert, lambda r, to: merge_recordings([r], to), lambda r, to: sample_recording(r, to, steps=1)):
            with pytest.raises(DataError, match=r"sub: is inside .*r, so its files would become part"):
                write(recording, tmp_path / "r" / "sub")
            with pytest.raises(DataError, match="r: is also an input"):
                write(recording, tmp_path / "r")
    with pytest.raises(DataError, match="x-v0: is inside"):
        convert(one, tmp_path / "r" / "x-v0", "minari")
    table = Source(str(tmp_path / "r"), columns={"obs": "obs", "action": "action"})
    assert _places(table) == [tmp_path / "r"]
    assert {file: file.read_bytes() for file in (tmp_path / "r").iterdir()} == files
    record("memory://apart/r", numbered([4]))
    with pytest.raises(DataError, match="memory://apart/r/sub: is inside memory://apart/r,"):
        convert(Recording.open("memory://apart/r"), "memory://apart/r/sub")


def test_what_is_written_and_told_is_what_on_bad_leaves(tmp_path):
    exp = numbered([4, 5, 6])
    obs = exp.steps["obs"].copy()
    obs[5] = np.nan
    record(tmp_path / "r", exp.with_steps(obs=obs))
    skipped = Recording.open(tmp_path / "r", on_bad="skip")
    for write in (
        lambda: merge_recordings([skipped, skipped], tmp_path / "m"),
        lambda: sample_recording(skipped, tmp_path / "s", episodes=2),
        lambda: filter_recording(skipped, tmp_path / "f", min_length=1),
    ):
        (part,) = write().written
        found = Recording.open(part.path)
        assert (part.episodes, part.steps) == (found.num_episodes, found.num_steps)
        assert found.num_episodes == (4 if part.path.endswith("m") else 2)
    with pytest.raises(DataError, match="holds 2 episodes with 10 steps, fewer"):
        sample_recording(skipped, tmp_path / "t", episodes=3)
