# SPDX-License-Identifier: Apache-2.0
"""Small recordings whose rows can be checked by hand: filters, repairs and merging."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc
import pytest
from gymnasium.spaces import Box, Discrete

from etude.errors import DataError
from etude.experience import Experience, Segments
from etude.recordings import Recording, RecordingWriter, Source, filter_recording, merge_recordings

SPACES: Any = {"obs_space": Box(-9, 9, (1,), np.float64), "action_space": Discrete(9)}


def pairs(path: Path, ids: list[str], **columns: Any) -> str:
    """A recording of episodes of two steps that terminate."""
    rows = 2 * len(ids)
    steps = {"obs": np.zeros((rows, 1)), "action": np.zeros(rows, np.int64)}
    steps |= {name: np.asarray(values) for name, values in columns.items()}
    own = Segments.of(len(ids), episode_id=ids, terminated=True)
    with RecordingWriter(path, **SPACES) as writer:
        writer.write(Experience(steps, np.arange(len(ids) + 1) * 2, own, {"obs": np.zeros((len(ids), 1))}))
    return str(path)


def truncated(path: Path, final: float, reward: float = 1.0) -> str:
    """A recording of an episode of three steps that is truncated."""
    steps = {"obs": np.arange(3.0)[:, None], "action": np.zeros(3, np.int64), "reward": np.array([1.0, 1.0, reward])}
    own = Segments.of(1, episode_id=["e"], truncated=True)
    with RecordingWriter(path, **SPACES) as writer:
        writer.write(Experience(steps, np.array([0, 3]), own, {"obs": np.array([[final]])}))
    return str(path)


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("agents", [2, 3])
def test_agents_that_act_in_turns_begin_at_step_0_whatever_the_table_counts_from(first: int, agents: int) -> None:
    rows = [("g", "ABC"[i % agents], first + i, float(i), 0) for i in range(4 * agents)]
    columns = {"obs": "o", "action": "a", "episode_id": "ep", "agent_id": "ag", "t": "t", "terminated": "last-row"}
    exp = Recording.open(Source(pd.DataFrame(rows, columns=["ep", "ag", "t", "o", "a"]), columns)).read()
    assert exp.segments.t_start.tolist() == [0] * agents
    assert exp.lengths.tolist() == [4] * agents


def test_ids_of_floats_may_be_negative_zeros() -> None:
    table = pd.DataFrame({"ep": [0.0, -0.0, 1.0], "o": [1.0, 2.0, 3.0], "a": [0, 1, 0]})
    columns = {"obs": "o", "action": "a", "episode_id": "ep", "terminated": "last-row"}
    assert Recording.open(Source(table, columns)).read().segments.episode_id.tolist() == ["0", "1"]


def test_filters_of_several_recordings_mean_the_ids_that_these_have_together(tmp_path: Path) -> None:
    pairs(tmp_path / "a", ["x", "y"])
    pairs(tmp_path / "b", ["x", "0-x"])
    recording, field = Recording.open(tmp_path), pc.field("episode_id")
    assert recording.read().segments.episode_id.tolist() == ["0-x", "0-y", "1-x", "1-0-x"]
    for name, wanted in (("0-x", ["0-x"]), ("1-0-x", ["1-0-x"]), ("0-y", ["0-y"]), ("x", [])):
        for one in (f"episode_id == '{name}'", field == name):
            assert recording.read(filter=one).segments.episode_id.tolist() == wanted
            assert [e for exp in recording.stream(filter=one) for e in exp.segments.episode_id] == wanted


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ("any(v)", ["negative", "mixed", "missing"]),
        ("all(v)", ["negative", "missing"]),
        ("not all(v)", ["mixed", "zero"]),
        ("not any(v)", ["zero"]),
    ],
)
def test_any_and_all_of_numbers_are_those_of_python(where: str, kept: list[str], tmp_path: Path) -> None:
    values = {"negative": [-1.0, -2.0], "mixed": [-1.0, 0.0], "zero": [0.0, -0.0], "missing": [np.nan, 2.0]}
    python = {"any(v)": any, "all(v)": all, "not all(v)": lambda v: not all(v), "not any(v)": lambda v: not any(v)}
    assert [name for name, own in values.items() if python[where](own)] == kept
    data = pairs(tmp_path / "data", list(values), v=np.concatenate([*values.values()]))
    filter_recording(data, tmp_path / "kept", where=where)
    assert Recording.open(tmp_path / "kept").read().segments.episode_id.tolist() == kept


def test_a_column_may_have_any_name_beside_the_return(tmp_path: Path) -> None:
    data = pairs(tmp_path, ["a", "b"], **{"return": [7.0] * 4, "return_": [1.0, 1, 2, 2]})
    assert Recording.open(data).read(filter="return_ == 2 and return == 7").segments.episode_id.tolist() == ["b"]


@pytest.mark.parametrize("on_bad", ["strict", "repair", "skip"])
def test_nothing_is_left_out_for_final_observations_that_are_not_read(on_bad: Any, tmp_path: Path) -> None:
    recording = Recording.open(truncated(tmp_path, np.nan), on_bad=on_bad)
    (batch,) = recording.batches(9, columns=["obs", "action"], epochs=1, shuffle=False)
    assert batch["obs"].ravel().tolist() == [0.0, 1.0, 2.0]
    assert recording.left_out == {}


def test_an_episode_stays_truncated_only_if_nothing_but_its_final_observation_is_bad(tmp_path: Path) -> None:
    for name, reward, wanted in (("final", 1.0, True), ("both", np.nan, False)):
        exp = Recording.open(truncated(tmp_path / name, np.nan, reward), on_bad="repair").read(next_obs=True)
        assert exp.num_steps == 2
        assert exp.segments.truncated.tolist() == [wanted]


def test_merging_changes_no_whole_number(tmp_path: Path) -> None:
    first = pairs(tmp_path / "a", ["a"], uid=np.array([2**60 + 1, 5], np.int64))
    second = pairs(tmp_path / "b", ["b"], uid=np.array([7, 6], np.uint64))
    with pytest.raises(DataError, match="column `uid` holds the whole number 1152921504606846977, which float64 can't"):
        merge_recordings([first, second], tmp_path / "c")
    small = pairs(tmp_path / "d", ["d"], uid=np.array([1, 2], np.int64))
    merge_recordings([small, second], tmp_path / "e")
    assert Recording.open(tmp_path / "e").read().steps["uid"].tolist() == [1, 2, 7, 6]
