# SPDX-License-Identifier: Apache-2.0
"""RLlib's tables, written naively in the test: rows of episodes, in any encoding and order."""

import pickle

import gymnasium as gym
import numpy as np
import pyarrow as pa
import pytest
from some_rllib import packed, tensor
from some_rllib_table import at, read, rows_of, write

from etude.recordings import Recording
from etude.recordings.formats.rllib_table import _chained


def assert_is(exp, rows):
    """The Experience holds these rows, whole episodes in this order."""
    np.testing.assert_array_equal(exp.steps["obs"], rows["obs"])
    np.testing.assert_array_equal(exp.next_obs()["obs"], rows["new_obs"])
    np.testing.assert_array_equal(exp.steps["action"], rows["actions"])
    np.testing.assert_array_equal(exp.steps["reward"], rows["rewards"])
    np.testing.assert_array_equal(exp.at_ends(exp.segments.terminated), rows["terminateds"])
    np.testing.assert_array_equal(exp.at_ends(exp.segments.truncated), rows["truncateds"])
    assert exp.segments.episode_id.tolist() == list(dict.fromkeys(rows["eps_id"]))
    assert exp.segments.t_start.tolist() == [0] * exp.num_segments


def test_rows_become_episodes_over_files(tmp_path):
    rows = rows_of([4, 1, 7, 3])
    for i, (a, b) in enumerate([(0, 2), (2, 9), (9, 15)]):
        write(tmp_path / "run" / f"{i}.parquet", at(rows, slice(a, b)))
    recording, exp = read(tmp_path)
    assert_is(exp, rows)
    assert recording.header.action_space == gym.spaces.Discrete(int(rows["actions"].max()) + 1)
    assert recording.header.obs_space == gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    assert recording.header.meta["inferred"] == ["obs", "action"]
    assert set(exp.steps) == {"obs", "action", "reward", "logp"}
    assert exp.steps["action"].dtype == np.int64
    assert not recording.validate().problems


def packed_rows(values):
    return pa.array([packed(pickle.dumps(np.asarray(v), 5)) for v in values])


ENCODINGS = {
    "tensor": lambda v: tensor(v),
    "tensor of old Ray": lambda v: tensor(v, "ray.data.arrow_tensor"),
    "lists": lambda v: pa.array(v.tolist(), pa.list_(pa.float32())),
    "fixed lists": lambda v: pa.array(v.tolist(), pa.list_(pa.float32(), 3)),
    "packed": packed_rows,
    "pickled": lambda v: (
        pa.field("", pa.large_binary(), metadata={b"ARROW:extension:name": b"ray.data.arrow_pickled_object"}),
        pa.array([pickle.dumps(row, 5) for row in v], pa.large_binary()),
    ),
    "variable": lambda v: (
        pa.field("", pa.struct({"data": pa.list_(pa.float32()), "shape": pa.list_(pa.int64())}),
                 metadata={b"ARROW:extension:name": b"ray.data.arrow_variable_shaped_tensor"}),
        pa.array([{"data": row.tolist(), "shape": [3]} for row in v],
                 pa.struct({"data": pa.list_(pa.float32()), "shape": pa.list_(pa.int64())})),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_encoding(tmp_path, name):
    rows = rows_of([4, 3])
    write(tmp_path / "a.parquet", rows, obs=ENCODINGS[name](rows["obs"]), new_obs=ENCODINGS[name](rows["new_obs"]))
    _, exp = read(tmp_path)
    assert_is(exp, rows)
    assert exp.steps["obs"].dtype == np.float32


def test_metadata_that_is_a_pickle_is_not_read(tmp_path):
    rows = rows_of([4])
    field, array = tensor(rows["obs"])
    metadata = {b"ARROW:extension:name": b"ray.data.arrow_tensor_v2", b"ARROW:extension:metadata": pickle.dumps((3,))}
    write(tmp_path / "a.parquet", rows, obs=(field.with_metadata(metadata), array))
    assert_is(read(tmp_path)[1], rows)


def test_structs_tuples_and_images(tmp_path):
    rows = rows_of([4, 3])
    mode = np.arange(7) % 4
    kind = pa.struct({"mode": pa.int64(), "pos": pa.list_(pa.float32())})
    both, after = (
        pa.array([{"mode": int(m), "pos": o.tolist()} for m, o in zip(modes, obs, strict=True)], kind)
        for modes, obs in ((mode, rows["obs"]), ((mode + 1) % 4, rows["new_obs"]))
    )
    pairs = [(np.int32(i % 3), np.full(1, i, np.float32)) for i in range(7)]
    actions = (
        pa.field("", pa.large_binary(), metadata={b"ARROW:extension:name": b"ray.data.arrow_pickled_object"}),
        pa.array([pickle.dumps(pair, 5) for pair in pairs], pa.large_binary()),
    )
    write(tmp_path / "a.parquet", rows, obs=both, new_obs=after, actions=actions)
    recording, exp = read(tmp_path)
    assert recording.header.obs_space["mode"] == gym.spaces.Discrete(4)
    assert recording.header.action_space[0] == gym.spaces.Discrete(3)
    assert exp.steps["obs/mode"].tolist() == mode.tolist()
    np.testing.assert_array_equal(exp.steps["action/1"][:, 0], np.arange(7))
    images = np.arange(7 * 12, dtype=np.uint8).reshape(7, 2, 2, 3)
    write(tmp_path / "b" / "b.parquet", rows, obs=tensor(images), new_obs=tensor(images))
    assert Recording.open(tmp_path / "b").obs_space == gym.spaces.Box(0, 255, (2, 2, 3), np.uint8)


def test_rows_in_any_order_chain_by_their_observations(tmp_path):
    rows = rows_of([6, 1, 5])
    shuffled = np.random.default_rng(0).permutation(12)
    write(tmp_path / "a.parquet", at(rows, shuffled))
    _, exp = read(tmp_path)
    firsts = list(dict.fromkeys(rows["eps_id"][shuffled]))
    order = np.concatenate([np.flatnonzero(rows["eps_id"] == name) for name in firsts])
    assert_is(exp, at(rows, order))


def test_rows_in_any_order_are_sorted_by_t(tmp_path):
    rows = rows_of([6, 5])
    shuffled = np.random.default_rng(0).permutation(11)
    mixed = at(rows, shuffled)
    write(tmp_path / "a.parquet", mixed, t=pa.array(mixed["t"]))
    _, exp = read(tmp_path, ["reward"])
    order = np.concatenate([np.flatnonzero(rows["eps_id"] == name) for name in dict.fromkeys(mixed["eps_id"])])
    np.testing.assert_array_equal(exp.steps["reward"], rows["rewards"][order])


@pytest.mark.parametrize("has_t", [True, False])
def test_lost_rows_cut_an_episode(tmp_path, has_t):
    rows = rows_of([8])
    kept = at(rows, [2, 3, 4, 6, 7])
    write(tmp_path / "a.parquet", kept, **({"t": pa.array(kept["t"])} if has_t else {}))
    recording, exp = read(tmp_path)
    assert exp.lengths.tolist() == [3, 2]
    assert exp.segments.t_start.tolist() == ([2, 6] if has_t else [0, 4])
    np.testing.assert_array_equal(exp.next_obs()["obs"], kept["new_obs"])
    assert exp.join().num_segments == 2
    (gap,) = recording.validate().warnings
    assert (gap.kind, gap.row) == ("gap", 3)


@pytest.mark.parametrize("has_t", [True, False])
def test_episodes_written_again_are_read_once(tmp_path, has_t):
    rows = rows_of([4, 3])
    for i, index in enumerate([np.arange(4), np.arange(7), np.arange(4, 7)]):
        some = at(rows, index)
        write(tmp_path / f"{i}.parquet", some, **({"t": pa.array(some["t"])} if has_t else {}))
    recording, exp = read(tmp_path)
    assert_is(exp, rows)
    assert recording.header.meta["duplicates"] == 2
    assert {problem.kind for problem in recording.validate().problems} == {"duplicate"}


def test_parts_of_episodes_are_read_once_where_they_stand_twice(tmp_path):
    rows = rows_of([5])
    write(tmp_path / "a.parquet", at(rows, np.arange(5)))
    write(tmp_path / "b.parquet", at(rows, np.arange(2, 5)))
    recording, exp = read(tmp_path)
    assert_is(exp, rows)
    assert [problem.kind for problem in recording.validate().problems] == ["duplicate"]


def test_several_agents_and_modules(tmp_path):
    rows = rows_of([3, 4])
    rows["eps_id"][:] = "shared"
    agents, modules = pa.array(["a"] * 3 + ["b"] * 4), pa.array(["p"] * 3 + ["q"] * 4)
    write(tmp_path / "a.parquet", rows, agent_id=agents, module_id=modules)
    _, exp = read(tmp_path)
    assert exp.segments.episode_id.tolist() == ["shared"] * 2
    assert exp.segments.agent_id.tolist() == ["a", "b"]
    assert exp.segments.module_id.tolist() == ["p", "q"]


def test_without_episodes_every_row_is_a_segment(tmp_path):
    rows = rows_of([3, 2])
    write(tmp_path / "a.parquet", rows, without=("eps_id", "truncateds"))
    recording, exp = read(tmp_path)
    assert exp.lengths.tolist() == [1] * 5
    assert exp.segments.episode_id.tolist() == [f"a-{i}" for i in range(5)]
    np.testing.assert_array_equal(exp.final_obs["obs"], rows["new_obs"])
    assert not recording.validate().problems


def test_without_new_obs_the_last_observation_is_unknown(tmp_path):
    rows = rows_of([3, 2])
    write(
        tmp_path / "a.parquet",
        rows,
        without=("new_obs", "terminateds", "truncateds"),
        dones=pa.array(rows["terminateds"]),
    )
    _, exp = read(tmp_path)
    assert exp.lengths.tolist() == [3, 2]
    assert not exp.segments.has_final_obs.any()
    assert exp.segments.terminated.tolist() == [True, False]


def test_parts_hold_whole_episodes(tmp_path, monkeypatch):
    monkeypatch.setattr("etude.recordings.format.MAX_ROWS", 10)
    rows = rows_of([4] * 9 + [25])
    for i, a in enumerate(range(0, 61, 7)):
        write(tmp_path / f"{i:02d}.parquet", at(rows, np.arange(a, min(a + 7, 61))))
    recording, exp = read(tmp_path)
    assert_is(exp, rows)
    assert [recording.part(k).num_steps for k in range(recording.num_parts)] == [8, 8, 8, 8, 4, 25]


def test_repeats_in_any_order_lose_no_row(tmp_path):
    rows = rows_of([6, 6])
    order = np.random.default_rng(3).permutation(24) % 12
    write(tmp_path / "a.parquet", at(rows, order))
    recording, exp = read(tmp_path)
    firsts = list(dict.fromkeys(rows["eps_id"][order]))
    assert_is(exp, at(rows, np.concatenate([np.flatnonzero(rows["eps_id"] == name) for name in firsts])))
    (problem,) = recording.validate().problems
    assert "12 rows are copies of others; they are read once" in problem.message


def test_of_many_rows_with_one_observation_the_first_follow_each_other():
    done = np.array([True] * 10 + [False, True])
    obs, after = [b"a"] * 10 + [b"b", b"a"], [b"x"] * 10 + [b"a", b"x"]
    assert _chained(obs, after, done) == [[10, 0], *([k] for k in range(1, 10)), [11]]
    obs, after, done = [b"b", b"a", b"a"], [b"a", b"a", b"x"], np.array([False, False, True])
    assert _chained(obs, after, done) == [[0, 1, 2]]
