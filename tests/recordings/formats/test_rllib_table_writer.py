# SPDX-License-Identifier: Apache-2.0
"""What is written for RLlib as a table, read back, and looked into with pyarrow alone."""

import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from some_rllib import PAIR, tensor
from some_written import assert_equal, converted, episodes, spaces_of

from etude.errors import DataError
from etude.experience import Experience, Segments
from etude.recordings import RecordingWriter, convert, validate

BOX = gym.spaces.Box(-1, 1, (2,), np.float32)
GRID = gym.spaces.Box(-1, 1, (2, 3), np.float32)
MOVE = gym.spaces.Discrete(3)
NESTED = gym.spaces.Dict({"mode": gym.spaces.Discrete(4), "pos": BOX})


def shapes(space: gym.Space) -> list[int]:
    """How many axes the parts of a Dict have."""
    if isinstance(space, gym.spaces.Dict):
        return [n for part in space.spaces.values() for n in (shapes(part) or [len(part.shape or ())])]
    return []


@settings(deadline=None, max_examples=25)
@given(
    spaces_of(tuples=False).filter(lambda space: max(shapes(space), default=0) < 2),
    spaces_of(tuples=False).filter(lambda space: max(shapes(space), default=0) < 2),
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
)
def test_steps_come_back_as_they_were(obs: gym.Space, action: gym.Space, lengths: list[int]) -> None:
    exp = episodes(obs, action, lengths)
    exp = type(exp)(
        {name: column for name, column in exp.steps.items() if name != "state_out/h"},
        exp.offsets,
        exp.segments,
        exp.final_obs,
    )
    with tempfile.TemporaryDirectory() as folder:
        written = converted(Path(folder), "rllib-table", obs, action, exp)
        assert written.format == "rllib-table"
        assert not written.notes
        assert_equal(written.read(), exp, dtypes=False)  # spaces, and what follows from them, are inferred


def test_columns_are_those_of_rllib(tmp_path: Path) -> None:
    exp = episodes(NESTED, MOVE, [3, 2], terminated=[True, False], truncated=[False, True], module_id="m")
    exp.steps["obs_image"] = np.zeros((5, 4, 4), np.uint8)
    converted(tmp_path, "rllib-table", NESTED, MOVE, exp)
    (file,) = (tmp_path / "out-v0").glob("*.parquet")
    table = pq.read_table(file)
    assert table.column_names == [
        *("eps_id", "agent_id", "module_id", "t", "obs", "actions", "rewards", "new_obs", "terminateds", "truncateds"),
        *("infos", "action_logp", "action_dist_inputs", "my_score", "obs_image"),
    ]
    assert table["eps_id"].to_pylist() == ["e000"] * 3 + ["e001"] * 2
    assert table["module_id"].to_pylist() == ["m"] * 5
    assert table["agent_id"].to_pylist() == [None] * 5
    assert table["t"].to_pylist() == [0, 1, 2, 0, 1]
    assert table["terminateds"].to_pylist() == [False, False, True, False, False]
    assert table["truncateds"].to_pylist() == [False, False, False, False, True]
    for name, following in (("mode", exp.next_obs()["obs/mode"]), ("pos", exp.next_obs()["obs/pos"])):
        assert [row[name] for row in table["new_obs"].to_pylist()] == following.tolist()
    field, array = tensor(exp.steps["obs_image"])
    assert table["obs_image"].combine_chunks().equals(array)
    assert {**table.schema.field("obs_image").metadata} == {**field.metadata}
    assert table["infos"][1].as_py()["fuel"] == exp.steps["info/fuel"][1]


def test_pieces_of_episodes_are_written_as_they_come(tmp_path: Path) -> None:
    whole = episodes(BOX, MOVE, [12, 7], terminated=[True, False], truncated=False)
    whole.steps.pop("state_out/h")
    cut = whole.cut(5, lookback=2)
    order = np.lexsort((cut.segments.episode_id.astype(str), cut.segments.t_start))
    written = converted(tmp_path, "rllib-table", BOX, MOVE, *(cut.select(np.array([i])) for i in order))
    assert written.notes == ()
    assert_equal(written.read(), whole, dtypes=False)


def test_what_ray_would_read_otherwise(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"own: `action` has a Tuple space, .* Write `rllib-episodes` instead"):
        converted(tmp_path / "a", "rllib-table", BOX, PAIR, episodes(BOX, PAIR, [2]))
    deep = gym.spaces.Dict({"a": gym.spaces.Dict({"grid": GRID})})
    with pytest.raises(DataError, match=r"`obs/a/grid` has the shape \[2, 3\] inside of a Dict"):
        converted(tmp_path / "b", "rllib-table", deep, MOVE, episodes(deep, MOVE, [2]))
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["own"]
    written = converted(tmp_path / "c", "rllib-table", GRID, MOVE, episodes(GRID, MOVE, [2, 3]))
    assert written.notes == (
        "`state_out/h` has several axes and is a part of another column, where Ray loses its shape: left out",
    )
    assert "state_out/h" not in written.columns


def test_many_files_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.recordings.formats.rllib_writers.MAX_BYTES", 3_000)
    monkeypatch.setattr("etude.recordings.converting.MAX_ROWS", 30)
    exp = episodes(BOX, MOVE, [20] * 6)
    exp.steps.pop("state_out/h")
    written = converted(tmp_path, "rllib-table", BOX, MOVE, exp)
    assert len(written.files) > 2
    assert_equal(written.read(), exp, dtypes=False)


@pytest.mark.parametrize("form", ["rllib-table", "rllib-episodes"])
def test_columns_of_names_that_rllib_gives_others_replace_nothing(tmp_path: Path, form: str) -> None:
    steps = {
        "obs": np.zeros((6, 2), np.float32),
        "action": np.arange(6) % 3,
        "reward": np.arange(6.0),
        "logp": np.full(6, -0.5, np.float32),
    }
    others = ("action_logp", "rewards", "actions", "new_obs", "terminateds", "dones", "eps_id", "infos/x", "vf_preds")
    more = {name: np.arange(6) - 10.0 * k for k, name in enumerate(others, 1)}
    segments = Segments.of(2, episode_id=["a", "b"], terminated=[True, False], truncated=[False, True])
    exp = Experience({**steps, **more}, np.array([0, 3, 6]), segments, {"obs": np.ones((2, 2), np.float32)})
    with RecordingWriter(tmp_path / "own", obs_space=BOX, action_space=MOVE) as writer:
        writer.write(exp)
    written = convert(tmp_path / "own", tmp_path / "to", form)
    back = written.read()
    assert validate(tmp_path / "to").ok
    assert back.segments.episode_id.tolist() == ["a", "b"]
    assert back.segments.terminated.tolist() == [True, False]
    for name in ("action", "reward", "logp"):
        np.testing.assert_array_equal(back.steps[name], steps[name])
    np.testing.assert_array_equal(back.steps["extra_action_logp"], more["action_logp"])
    np.testing.assert_array_equal(back.steps["value"], more["vf_preds"])
    assert "column `action_logp` is called `extra_action_logp`" in " ".join(written.notes)
    if form == "rllib-table":
        np.testing.assert_array_equal(back.steps["extra_rewards"], more["rewards"])


@pytest.mark.parametrize("form", ["rllib-table", "rllib-episodes"])
@pytest.mark.parametrize("names", [("speed", "speed/x"), ("speed/x", "speed"), ("info/speed/x", "info/speed")])
def test_a_column_and_a_part_of_it_are_refused_in_any_order(tmp_path: Path, form: str, names: list[str]) -> None:
    exp = episodes(BOX, MOVE, [4]).with_steps(**{name: np.arange(4.0) for name in names})
    with pytest.raises(DataError, match=f"column `{names[1]}` .* that has numbers|column `{names[1]}` has numbers"):
        converted(tmp_path, form, BOX, MOVE, exp)
