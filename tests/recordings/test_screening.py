# SPDX-License-Identifier: Apache-2.0
"""Bad data: refused, mended or left out, and always counted."""

import gc
import shlex
import threading
import tracemalloc
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from some_recording import assert_same, numbered, record

from etude.errors import DataError, SettingsError
from etude.experience import Experience, Segments
from etude.recordings import Recording, RecordingWriter, validate
from etude.recordings.formats.source import Source
from etude.recordings.pieces import in_order


def steps_of(exp: Experience) -> set[tuple[Any, ...]]:
    """Every step as numbers: episode, t, obs, action, reward, next_obs where known, and how the episode ended."""
    out = set()
    following = exp.next_obs()["obs"]
    t, segment = exp.t(), exp.segment_of_step()
    for row in range(exp.num_steps):
        s = int(segment[row])
        last = row + 1 == exp.offsets[s + 1]
        known = not last or exp.segments.has_final_obs[s]
        ends = bool(last and exp.segments.terminated[s])
        values = (exp.steps["action"][row], exp.steps["reward"][row], *exp.steps["obs"][row])
        after = tuple(following[row].tolist()) if known else None
        out.add((exp.segments.episode_id[s], int(t[row]), *map(float, values), after, ends))
    return out


def rows_of(path: Path) -> Any:
    return pq.read_table(sorted(path.glob("*.parquet"))[0])


def opened(path: Path, mode: Any) -> tuple[Recording, Experience]:
    recording = Recording.open(path, on_bad=mode)
    return recording, recording.read()


def test_clean_data_is_the_same_in_every_mode(tmp_path: Path) -> None:
    record(tmp_path, numbered([30, 50, 40]).cut(20), numbered([5], first=3), max_rows_per_file=45)
    whole = Recording.open(tmp_path).read()
    for mode in ("strict", "repair", "skip"):
        recording, exp = opened(tmp_path, mode)
        assert_same(exp, whole)
        assert (recording.left_out, recording.met, recording.left_out_report()) == ({}, {}, "")
        assert recording.num_steps == 125


def test_an_unknown_mode(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="on_bad is 'mend', but must be one of strict, repair, skip"):
        Recording.open(tmp_path, on_bad="mend")  # type: ignore[arg-type]


def test_strict_names_file_row_column_how_many_and_what_to_do(tmp_path: Path) -> None:
    exp = numbered([30, 30])
    exp.steps["obs"][[44, 47, 50], 1] = np.nan
    record(tmp_path, exp)
    table = rows_of(tmp_path)
    pq.write_table(table, tmp_path / "part-00000.parquet", row_group_size=20)
    with pytest.raises(DataError) as caught:
        opened(tmp_path, "strict")
    assert str(caught.value) == (
        f"{tmp_path}/part-00000.parquet, row group 2, row 44: column `obs` holds NaN in component 1 (3 rows like it). "
        "Correct it where it comes from, or leave it out: on_bad='repair' (--on-bad repair). "
        f"`etude data validate {shlex.quote(str(tmp_path))}` lists all problems. Repair with --on-bad=repair, leave it "
        "out with --on-bad=skip, or fix the file."
    )
    next(Recording.open(tmp_path, on_bad="strict").batches(4, columns=["reward"]))  # not what is asked for


def test_what_has_no_path_is_listed_from_python() -> None:
    table = {"o": [1.0, float("nan")], "a": [0.5, 0.5], "e": [1, 1], "end": [False, True]}
    source = Source(pa.table(table), columns={"obs": "o", "action": "a", "episode_id": "e", "terminated": "end"})
    with pytest.raises(DataError, match=r"holds NaN\. .* `Recording.validate\(\)` lists all problems"):
        Recording.open(source).read()


def test_nan_is_cut_around(tmp_path: Path) -> None:
    exp = numbered([10, 6])
    exp.steps["obs"][4, 1] = np.nan
    exp.steps["reward"][12] = np.inf
    record(tmp_path, exp)
    recording, mended = opened(tmp_path, "repair")
    assert mended.lengths.tolist() == [3, 5, 2, 3]
    assert mended.segments.t_start.tolist() == [0, 5, 0, 3]
    assert mended.segments.episode_id.tolist() == ["e0", "e0", "e1", "e1"]
    assert mended.final_obs["obs"][:, 1].tolist() == [3, 10, 2, 6]  # component 1 is t
    assert mended.segments.terminated.tolist() == [False, True, False, False]
    assert (recording.left_out, recording.met) == ({"nan": 3}, {"nan": 2})
    assert "nan 2 times (3 rows left out). `etude data validate" in recording.left_out_report()
    recording, rest = opened(tmp_path, "skip")
    assert (rest.num_segments, recording.left_out) == (0, {"nan": 16})
    assert rest.steps["obs"].shape == (0, 3)


def test_final_observations_that_are_bad(tmp_path: Path) -> None:
    exp = numbered([4, 5])  # e0 terminated, e1 truncated
    exp.final_obs["obs"][:, 0] = np.nan
    record(tmp_path, exp)
    with pytest.raises(DataError, match=r"row 3: column `final_obs` holds NaN in component 0 \(2 rows like it\)"):
        opened(tmp_path, "strict")
    recording, mended = opened(tmp_path, "repair")
    assert mended.lengths.tolist() == [4, 5]
    assert mended.segments.has_final_obs.tolist() == [False, False]
    assert (mended.final_obs["obs"] == 0).all()
    assert recording.left_out == {}
    recording = Recording.open(tmp_path, on_bad="repair")
    mended = recording.read(next_obs=True)
    assert mended.lengths.tolist() == [4, 4]
    assert mended.segments.has_final_obs.tolist() == [False, True]
    assert mended.segments.truncated.tolist() == [False, True]
    np.testing.assert_array_equal(mended.final_obs["obs"], [[0, 0, 0], [1, 4, 1004]])
    assert recording.left_out == {"nan": 1}


@pytest.mark.parametrize("which", [0, 1])  # e0 terminated, e1 truncated
def test_an_episode_whose_last_step_is_bad_is_cut_before_it(tmp_path: Path, which: int) -> None:
    exp = numbered([4, 5])
    exp.steps["reward"][exp.offsets[which + 1] - 1] = np.nan
    record(tmp_path, exp)
    cut = opened(tmp_path, "repair")[1][which]
    assert (cut.num_steps, cut.segments.done[0]) == (exp.lengths[which] - 1, False)
    assert cut.final_obs["obs"][0].tolist() == exp.steps["obs"][exp.offsets[which + 1] - 1].tolist()


def test_values_outside_a_discrete_space(tmp_path: Path) -> None:
    exp = numbered([10, 6])
    exp.steps["action"][3] = 1000
    record(tmp_path, exp)
    with pytest.raises(
        DataError, match=r"row 3: column `action` is 1000, outside its space Discrete\(1000\)\. Was it recorded"
    ):
        opened(tmp_path, "strict")
    recording, mended = opened(tmp_path, "repair")
    assert mended.lengths.tolist() == [3, 6, 6]
    assert recording.left_out == {"out_of_space": 1}


@pytest.mark.parametrize(
    ("space", "actions", "masks"),  # that of row 1 forbids what was taken, that of row 2 what was not
    [
        (spaces.Discrete(3, start=1), [1, 2, 3, 1], ["111", "101", "101", "111"]),
        (spaces.MultiDiscrete([2, 3]), [[0, 2], [1, 0], [1, 1], [0, 0]], ["11111", "11011", "01010", "11111"]),
        (spaces.MultiBinary(2), [[0, 1], [1, 1], [0, 0], [1, 0]], ["11", "01", "00", "10"]),
    ],
)
def test_actions_that_their_mask_forbids(space: Any, actions: Any, masks: list[str], tmp_path: Path) -> None:
    columns = {"obs/x": np.zeros((4, 1)), "action": np.array(actions), "terminated": [False, False, False, True]}
    mask = np.array([[int(entry) for entry in row] for row in masks], np.int8)
    bad = Source(columns | {"obs/action_mask": mask}, action_space=space)
    with pytest.raises(DataError, match=r"row 1: column `action` is .*, which `obs/action_mask` forbids there"):
        Recording.open(bad).read()
    (problem,) = Recording.open(bad).validate().errors
    assert (problem.kind, problem.row, problem.count) == ("forbidden_action", 1, 1)
    repaired = Recording.open(bad, on_bad="repair")
    assert repaired.read().lengths.tolist() == [1, 2]
    assert repaired.left_out == {"forbidden_action": 1}
    mask[1] = 1
    assert Recording.open(Source(columns | {"obs/action_mask": mask}, action_space=space)).validate().ok


def test_masks_that_allow_nothing_and_recordings_of_actions_that_connectors_change(tmp_path: Path) -> None:
    exp = numbered([3]).with_steps(**{"obs/action_mask": np.array([[1, 1], [0, 0], [1, 1]], np.int8)})
    steps = {"obs/x": exp.steps["obs"], "obs/action_mask": exp.steps["obs/action_mask"], "action": np.array([0, 1, 1])}
    source = Source(steps | {"terminated": [False, False, True]})
    with pytest.raises(DataError, match="row 1: column `action` is 1, which `obs/action_mask` forbids there"):
        Recording.open(source).read()
    obs = spaces.Dict(
        {"x": spaces.Box(-1, 400, exp.steps["obs"].shape[1:], np.float32), "action_mask": spaces.MultiBinary(2)}
    )
    final_obs = {name: column[-1:] for name, column in steps.items() if name != "action"}
    with RecordingWriter(tmp_path, obs_space=obs, action_space=spaces.Discrete(2)) as writer:
        writer.write(Experience(steps | {"reward": np.ones(3)}, exp.offsets, exp.segments, final_obs))
    assert Recording.open(tmp_path).read().steps["action"].tolist() == [0, 1, 1]  # as a module chose them


def test_a_part_called_action_mask_of_another_size_is_no_mask() -> None:
    columns = {"obs/action_mask": np.zeros((2, 5), np.int8), "obs/x": np.zeros((2, 1)), "action": [0, 1]}
    assert Recording.open(Source(columns | {"terminated": [False, True]})).validate().ok


def unfinished(lengths: list[int], which: list[int], **segments: Any) -> Experience:
    exp = numbered(lengths, **segments)
    exp.segments.terminated[which] = exp.segments.truncated[which] = exp.segments.has_final_obs[which] = False
    return exp


def test_an_episode_whose_end_is_not_known_gives_up_its_last_step(tmp_path: Path) -> None:
    record(tmp_path, unfinished([5, 1, 4], [0, 1]))
    with pytest.raises(DataError, match=r"row 4: column `final_obs` is unknown after the last step of episode 'e0'"):
        opened(tmp_path, "strict")
    recording, mended = opened(tmp_path, "repair")
    assert mended.segments.episode_id.tolist() == ["e0", "e2"]
    assert mended.final_obs["obs"][0].tolist() == [0, 4, 4]
    assert recording.left_out == {"no_final_obs": 2}
    assert opened(tmp_path, "skip")[1].segments.episode_id.tolist() == ["e2"]
    assert Recording.open(tmp_path, on_bad="strict").read(columns=["reward"]).num_steps == 10  # it needs no more


@pytest.mark.parametrize("on_bad", ["repair", "skip"])
def test_a_truncated_end_without_an_observation_is_left_out_only_if_one_is_needed(on_bad: Any, tmp_path: Path) -> None:
    exp = numbered([5, 1, 4])
    exp.segments.terminated[:] = [True, False, False]
    exp.segments.truncated[:] = [False, True, True]
    exp.segments.has_final_obs[:] = [True, False, True]
    exp.final_obs["obs"][2] = np.nan if on_bad == "repair" else exp.final_obs["obs"][2]
    record(tmp_path, exp)
    with pytest.raises(DataError, match="is unknown after the last step of episode 'e1', which was truncated|NaN"):
        Recording.open(tmp_path).read(next_obs=True)
    with pytest.raises(DataError, match="is unknown after the last step of episode 'e1', which was truncated|NaN"):
        Recording.open(tmp_path).read(next_obs=True, filter="t >= 0")
    recording, whole = opened(tmp_path, on_bad)
    assert whole.lengths.tolist() == [5, 1, 4]
    assert whole.segments.has_final_obs.tolist() == [True, False, on_bad == "skip"]
    assert "no_final_obs" not in recording.left_out
    lost = {"no_final_obs": 1} | ({"nan": 1} if on_bad == "repair" else {})
    for read in (
        lambda found: found.read(next_obs=True).num_steps,
        lambda found: found.part(0, next_obs=True).num_steps,
        lambda found: sum(len(batch["reward"]) for batch in found.batches(3, columns=["reward", "next_obs"], epochs=1)),
    ):
        found = Recording.open(tmp_path, on_bad=on_bad)
        assert (read(found), found.left_out) == (10 - sum(lost.values()), lost)
    steps = sum(len(batch["reward"]) for batch in recording.batches(3, columns=["reward"], epochs=1))
    assert steps == sum(part.num_steps for part in recording.segment_batches(3, 2, epochs=1)) == 10


@pytest.mark.parametrize(
    ("on_bad", "read", "left_out"),
    [
        ("skip", [], {"contradiction": 2, "duplicate": 1, "no_final_obs": 3}),
        ("repair", [0, 1], {"contradiction": 2, "duplicate": 1, "no_final_obs": 1}),
    ],
)
def test_of_two_versions_of_a_step_none_is_kept_where_another_step_is_there_twice(
    on_bad: Any, read: list[int], left_out: dict[str, int], tmp_path: Path
) -> None:
    """The copy of step 2 is one segment with the first version of step 3, which would go with it."""
    exp, other = numbered([4]), numbered([4])
    other.steps["reward"][3] += 1
    table = pa.concat_tables([exp.to_table().take([2, 0, 1, 2, 3]), other.to_table().take([3])])
    pq.write_table(table.replace_schema_metadata(None).drop_columns(["segment"]), tmp_path / "x.parquet")
    recording, mended = opened(tmp_path, on_bad)
    assert mended.t().tolist() == read
    assert recording.left_out == left_out
    assert sum(left_out.values()) + len(read) == 6


def test_copies_contradictions_and_overlaps(tmp_path: Path) -> None:
    other = numbered([6], first=1)
    other.steps["reward"][3] += 1
    part = unfinished([4], [0], first=2)
    part.segments.has_final_obs[:] = True
    part.final_obs["obs"][:] = [2, 4, 2004]
    record(tmp_path, numbered([5, 6]), numbered([5]), other, part, numbered([9], first=2))
    with pytest.raises(DataError, match=r"'e0' has step t 0 a second time; the first one is in .*\. Repair with"):
        opened(tmp_path, "strict")
    recording, mended = opened(tmp_path, "repair")
    assert mended.segments.episode_id.tolist() == ["e0", "e2"]
    assert mended.lengths.tolist() == [5, 9]
    assert recording.left_out == {"contradiction": 12, "duplicate": 9}
    assert steps_of(mended) == steps_of(numbered([5])) | steps_of(numbered([9], first=2))
    assert recording.num_steps == 14


def test_an_episode_that_goes_on_after_its_end(tmp_path: Path) -> None:
    record(tmp_path, numbered([3]), numbered([4], t_start=[3]))
    with pytest.raises(DataError, match="row 3: episode 'e0' continues at t 3, after its end in .*row 2"):
        opened(tmp_path, "strict")
    for mode in ("repair", "skip"):
        recording, exp = opened(tmp_path, mode)
        assert exp.lengths.tolist() == [3]
        assert (recording.left_out, recording.met) == ({"after_end": 4}, {"after_end": 1})


def test_fragments_out_of_order_are_put_in_order_and_joined(tmp_path: Path) -> None:
    record(tmp_path, numbered([12]).cut(4).select([1, 2, 0]), max_rows_per_file=4)
    with pytest.raises(DataError, match="before its earlier steps|stands behind|after later"):
        opened(tmp_path, "strict")
    recording, mended = opened(tmp_path, "repair")
    assert_same(mended, numbered([12]))
    assert recording.left_out == {}
    assert recording.met == {"out_of_order": 1}
    recording, rest = opened(tmp_path, "skip")
    assert rest.num_steps + sum(recording.left_out.values()) == 12
    assert set(recording.left_out) == {"out_of_order"}


def test_a_segment_that_another_tool_has_scattered_over_files_is_whole(tmp_path: Path) -> None:
    record(tmp_path, numbered([12]))
    table = rows_of(tmp_path)
    (tmp_path / "part-00000.parquet").unlink()
    for i, name in enumerate("cab"):  # row groups do not know what follows them
        pq.write_table(table.slice(i * 4, 4), tmp_path / f"{name}.parquet")
    for mode in ("strict", "repair", "skip"):
        recording, exp = opened(tmp_path, mode)
        assert_same(exp, numbered([12]))
        assert (recording.left_out, recording.met) == ({}, {})


def test_fragments_out_of_order_in_one_part(tmp_path: Path) -> None:
    exp = numbered([12]).cut(4).select([2, 0, 1])
    record(tmp_path, exp)
    assert [p.kind for p in validate(tmp_path).problems] == ["out_of_order"]
    mended = next(iter(Recording.open(tmp_path, on_bad="repair").stream()))
    assert_same(mended, numbered([12]))


def test_files_and_row_groups_that_cant_be_read(tmp_path: Path) -> None:
    record(tmp_path, numbered([20, 20, 20]), max_rows_per_file=20)
    cut, spoilt = tmp_path / "part-00000.parquet", tmp_path / "part-00001.parquet"
    cut.write_bytes(cut.read_bytes()[:-100])
    spoilt.write_bytes(spoilt.read_bytes()[:4] + bytes(400) + spoilt.read_bytes()[404:])
    with pytest.raises(DataError, match="part-00000.parquet: is not a whole"):
        Recording.open(tmp_path, on_bad="strict")
    for mode in ("repair", "skip"):
        recording, exp = opened(tmp_path, mode)
        assert exp.segments.episode_id.tolist() == ["e2"]
        assert recording.left_out == {"truncated_file": 20, "unreadable": 20}
        assert list(exp.steps) == ["obs", "action", "reward"]
    for file in tmp_path.glob("*.parquet"):
        file.write_bytes(b"PAR1")
    with pytest.raises(DataError, match="part-00000.parquet: is not a whole"):
        Recording.open(tmp_path, on_bad="skip")


def test_counts_do_not_double_and_hang_on_no_order(tmp_path: Path) -> None:
    exp = numbered([10] * 12)
    exp.steps["obs"][[5, 37, 38, 90], 0] = np.nan
    exp.steps["reward"][[5, 66]] = np.nan
    record(tmp_path, exp, max_rows_per_file=10)
    counts = []
    for seed in range(3):
        recording = Recording.open(tmp_path, on_bad="repair")
        order = np.random.default_rng(seed).permutation(np.repeat(np.arange(recording.num_parts), 3)).tolist()

        def load(which: list[int], recording: Recording = recording) -> None:
            for k in which:
                recording.part(k, ["obs"])
                recording.part(k)

        threads = [threading.Thread(target=load, args=(order[i::4],)) for i in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        counts.append((recording.left_out, recording.met))
    assert counts[0] == counts[1] == counts[2] == ({"nan": 7}, {"nan": 6})


def test_in_other_processes(tmp_path: Path) -> None:
    exp = numbered([10] * 3)
    exp.steps["obs"][[5, 17], 0] = np.nan
    record(tmp_path, exp, numbered([10], first=1), max_rows_per_file=10)
    here = Recording.open(tmp_path, on_bad="repair")
    there = ForkingPickler.loads(ForkingPickler.dumps(here))  # as it is sent to one
    for _ in range(2):
        for k in range(there.num_parts):
            there.part(k)
            here.count(k, there.counts(k))
    here.part(1)
    # The copies of e1 contradict each other: one of them holds NaN.
    assert here.left_out == there.left_out == {"contradiction": 20, "nan": 2}
    exp.steps["obs"][[5, 17], 0] = 0
    record(tmp_path / "twice", exp, numbered([10], first=1), max_rows_per_file=10)
    for mode in ("strict", None):  # parts are read in two processes, neither of which sees both copies of e1
        here = Recording.open(tmp_path / "twice", on_bad=mode)  # type: ignore[arg-type]
        first, second = (ForkingPickler.loads(ForkingPickler.dumps(here)) for _ in range(2))
        for there, k in ((first, 1), (second, 0), (second, 3)):
            there.part(k)
            if k < 3:
                here.count(k, there.counts(k))
        with pytest.raises(DataError, match="episode 'e1' has step t 0 a second time"):
            here.count(3, second.counts(3))


def test_batches_give_every_step_that_is_left_once(tmp_path: Path) -> None:
    exp = numbered([10] * 5)
    exp.steps["reward"][[7, 23]] = np.nan
    record(tmp_path, exp, max_rows_per_file=20)
    for mode, left in (("repair", 48), ("skip", 30)):
        recording = Recording.open(tmp_path, on_bad=mode)  # type: ignore[arg-type]
        batches = recording.batches(7, columns=["obs", "reward", "next_obs"], epochs=1)
        found = np.concatenate([batch["obs"] for batch in batches])
        assert len({tuple(row) for row in found.tolist()}) == len(found) == left
        again = recording.batches(7, columns=["obs", "reward"], epochs=2, start=left // 7 + 1)
        assert sum(len(batch["obs"]) for batch in again) == 2 * left - 7 * (left // 7 + 1)


# -- properties -----------------------------------------------------------------------------------------------------


@st.composite
def spoilt(draw: Any) -> tuple[Experience, list[Experience]]:
    """Whole episodes, and the fragments that were recorded of them: spoilt, there twice, cut off, in any order."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    whole = numbered(lengths)
    cut = whole.cut(draw(st.integers(2, 6)))
    pieces = [cut[i] for i in range(cut.num_segments)]
    pieces = [Experience(*_copied(piece)) for piece in pieces]
    for _ in range(draw(st.integers(0, 4))):
        i = draw(st.integers(0, len(pieces) - 1))
        piece, kind = pieces[i], draw(st.sampled_from(["nan", "reward", "final", "unknown", "action", "twice", "swap"]))
        row = draw(st.integers(0, piece.num_steps - 1))
        if kind == "nan":
            piece.steps["obs"][row, 0] = np.nan
        elif kind == "reward":
            piece.steps["reward"][row] = -np.inf
        elif kind == "final":
            piece.final_obs["obs"][0, 0] = np.nan
        elif kind == "unknown":
            piece.segments.has_final_obs[:] = False
        elif kind == "action":
            piece.steps["action"][row] = -1
        elif kind == "twice":
            pieces.append(Experience(*_copied(piece)))
        else:
            j = draw(st.integers(0, len(pieces) - 1))
            pieces[i], pieces[j] = pieces[j], pieces[i]
    return whole, pieces


def _copied(exp: Experience) -> tuple[Any, ...]:
    segments = exp.segments[np.arange(exp.num_segments)]
    finals = {name: column.copy() for name, column in exp.final_obs.items()}
    return {name: column.copy() for name, column in exp.steps.items()}, exp.offsets.copy(), segments, finals


@given(data=spoilt(), rows=st.integers(3, 30))
@settings(max_examples=30)
def test_properties(tmp_path_factory: pytest.TempPathFactory, data: Any, rows: int) -> None:
    whole, pieces = data
    path = tmp_path_factory.mktemp("spoilt")
    record(path, *pieces, max_rows_per_file=rows)
    report = validate(path)
    repaired, mended = opened(path, "repair")
    known = {(*step[:-2], None, step[-1]) for step in steps_of(whole)}
    assert steps_of(mended) <= steps_of(whole) | known  # nothing is made up
    mended.validate()
    assert in_order(mended).join().num_segments == mended.num_segments
    # What is left is what was recorded without what is counted.
    assert mended.num_steps + sum(repaired.left_out.values()) == sum(piece.num_steps for piece in pieces)
    try:
        opened(path, "strict")
        refused = False
    except DataError:
        refused = True
    assert refused == (not report.ok)
    skipped, rest = opened(path, "skip")
    assert steps_of(rest) <= steps_of(whole) | known
    assert rest.num_steps + sum(skipped.left_out.values()) == sum(piece.num_steps for piece in pieces)
    if not report.problems:
        assert_same(mended, Recording.open(path).read())
        assert_same(rest, mended)
        assert repaired.left_out == skipped.left_out == {}
    if mended.num_steps:
        record(path / "mended", mended)
        assert validate(path / "mended").ok
        opened(path / "mended", "strict")


def test_strict_keeps_little_of_each_segment(tmp_path: Path) -> None:
    count = 40_000
    steps = {"obs": np.zeros((count, 3), np.float32), "action": np.zeros(count, np.int64)}
    steps["reward"] = np.zeros(count, np.float32)
    segments = Segments.of(count, episode_id=[f"e{i}" for i in range(count)], terminated=True)
    final_obs = {"obs": np.zeros((count, 3), np.float32)}
    record(tmp_path, Experience(steps, np.arange(count + 1), segments, final_obs), max_rows_per_file=10_000)
    recording = Recording.open(tmp_path)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for k in range(recording.num_parts):
            recording.part(k)
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert recording.num_parts > 3
    assert kept < 60 * count


def test_a_bad_final_observation_that_nobody_needs_costs_nothing(tmp_path: Path) -> None:
    """e0 was truncated, e1 goes on, and e2 terminated."""
    ends = {"terminated": [False, False, True], "truncated": [True, False, False]}
    exp = numbered([10, 10, 10], **ends)
    exp.final_obs["obs"][:] = np.nan
    record(tmp_path, exp)
    recording, rest = opened(tmp_path, "skip")
    assert rest.segments.episode_id.tolist() == ["e0", "e2"]
    assert not rest.segments.has_final_obs.any()
    assert recording.left_out == {"nan": 10}
    recording = Recording.open(tmp_path, on_bad="skip")
    assert recording.read(next_obs=True).segments.episode_id.tolist() == ["e2"]
    assert recording.left_out == {"nan": 20}


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 8)), min_size=1, max_size=6),
    st.sampled_from(["repair", "skip"]),
)
def test_of_overlapping_pieces_in_any_order_no_step_is_read_twice_and_all_are_counted(
    tmp_path_factory: Any, pieces: list[tuple[int, int]], mode: Any
) -> None:
    path = tmp_path_factory.mktemp("pieces")
    single = numbered([17]).cut(1)  # a segment for each step
    stored = [Experience.concat([single.select([i]) for i in range(t, t + n)]).join() for t, n in pieces]
    record(path, *stored)
    recording, exp = opened(path, mode)
    t = exp.t().tolist()
    assert len({*t}) == len(t) == recording.num_steps
    assert len(t) + sum(recording.left_out.values()) == sum(n for _, n in pieces)
    whole = steps_of(numbered([17]))
    assert {step[:5] for step in steps_of(exp)} <= {step[:5] for step in whole}
    if mode == "repair":
        assert {*t} >= {step for first, n in pieces for step in range(first, first + n - 1)}
