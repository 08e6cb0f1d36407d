# SPDX-License-Identifier: Apache-2.0
"""RLlib's tables, written naively in the test: rows of episodes, in any encoding and order."""

import base64
import pickle

import gymnasium as gym
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from some_rllib import mutated, packed, tensor, write_table

from etude.errors import DataError
from etude.experience import Experience
from etude.recordings.formats import parts as parts_module
from etude.recordings.formats import rllib_table


def rows_of(lengths, seed=0):
    """Rows of whole episodes: obs and new_obs ``[N, 3]``, the rest ``[N]``; every second one is truncated."""
    rng = np.random.default_rng(seed)
    rows = {name: [] for name in ("eps_id", "obs", "new_obs", "actions", "rewards", "terminateds", "truncateds", "t")}
    for i, n in enumerate(lengths):
        obs = rng.standard_normal((n + 1, 3)).astype(np.float32)
        last = np.arange(n) == n - 1
        rows["eps_id"] += [f"e{seed}-{i}"] * n
        for name, value in {
            "obs": obs[:-1],
            "new_obs": obs[1:],
            "actions": rng.integers(0, 4, n).astype(np.int32),
            "rewards": rng.standard_normal(n),
            "terminateds": last & (i % 2 == 0),
            "truncateds": last & (i % 2 == 1),
            "t": np.arange(n),
        }.items():
            rows[name] += list(value)
    return {name: np.array(values, object if name == "eps_id" else None) for name, values in rows.items()}


def at(rows, index):
    return {name: values[index] for name, values in rows.items()}


def write(path, rows, without=(), **columns):
    given = {
        "eps_id": pa.array(rows["eps_id"].tolist(), pa.string()),
        "agent_id": pa.nulls(len(rows["t"])),
        "obs": tensor(rows["obs"]),
        "new_obs": tensor(rows["new_obs"]),
        **{name: pa.array(rows[name]) for name in ("actions", "rewards", "terminateds", "truncateds")},
        "action_logp": pa.array(np.full(len(rows["t"]), -1.0, np.float32)),
    }
    return write_table(path, {k: v for k, v in (given | columns).items() if k not in without})


def read(path, columns=None):
    parts = rllib_table.open_parts(path)
    exp = Experience.concat([parts.load(k, columns) for k in range(parts.num_parts)])
    exp.validate()
    assert sum(parts.rows(k) for k in range(parts.num_parts)) == exp.num_steps
    return parts, exp


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
    parts, exp = read(tmp_path)
    assert_is(exp, rows)
    assert parts.header.action_space == gym.spaces.Discrete(int(rows["actions"].max()) + 1)
    assert parts.header.obs_space == gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    assert parts.header.meta["inferred"] == ["obs", "action"]
    assert set(exp.steps) == {"obs", "action", "reward", "logp"}
    assert exp.steps["action"].dtype == np.int64
    assert list(parts.problems()) == []


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
    parts, exp = read(tmp_path)
    assert parts.header.obs_space["mode"] == gym.spaces.Discrete(4)
    assert parts.header.action_space[0] == gym.spaces.Discrete(3)
    assert exp.steps["obs/mode"].tolist() == mode.tolist()
    np.testing.assert_array_equal(exp.steps["action/1"][:, 0], np.arange(7))
    images = np.arange(7 * 12, dtype=np.uint8).reshape(7, 2, 2, 3)
    write(tmp_path / "b" / "b.parquet", rows, obs=tensor(images), new_obs=tensor(images))
    parts = rllib_table.open_parts(tmp_path / "b")
    assert parts.header.obs_space == gym.spaces.Box(0, 255, (2, 2, 3), np.uint8)


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
    parts, exp = read(tmp_path)
    assert exp.lengths.tolist() == [3, 2]
    assert exp.segments.t_start.tolist() == ([2, 6] if has_t else [0, 4])
    np.testing.assert_array_equal(exp.next_obs()["obs"], kept["new_obs"])
    assert exp.join().num_segments == 2
    (problem,) = parts.problems()
    assert (problem.kind, problem.row) == ("not_done", 2)
    assert "a.parquet: row 2: episode 'e0-0' is cut after this row" in problem.message


@pytest.mark.parametrize("has_t", [True, False])
def test_episodes_written_again_are_read_once(tmp_path, has_t):
    rows = rows_of([4, 3])
    for i, index in enumerate([np.arange(4), np.arange(7), np.arange(4, 7)]):
        some = at(rows, index)
        write(tmp_path / f"{i}.parquet", some, **({"t": pa.array(some["t"])} if has_t else {}))
    parts, exp = read(tmp_path)
    assert_is(exp, rows)
    assert parts.header.meta["duplicates"] == 2
    assert {problem.kind for problem in parts.problems()} == {"duplicate"}


def test_parts_of_episodes_are_read_once_where_they_stand_twice(tmp_path):
    rows = rows_of([5])
    write(tmp_path / "a.parquet", at(rows, np.arange(5)))
    write(tmp_path / "b.parquet", at(rows, np.arange(2, 5)))
    parts, exp = read(tmp_path)
    assert_is(exp, rows)
    assert [problem.kind for problem in parts.problems()] == ["duplicate"]


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
    parts, exp = read(tmp_path)
    assert exp.lengths.tolist() == [1] * 5
    assert exp.segments.episode_id.tolist() == [f"a-{i}" for i in range(5)]
    np.testing.assert_array_equal(exp.final_obs["obs"], rows["new_obs"])
    assert list(parts.problems()) == []


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
    monkeypatch.setattr(rllib_table, "MAX_ROWS", 10)
    rows = rows_of([4] * 9 + [25])
    for i, a in enumerate(range(0, 61, 7)):
        write(tmp_path / f"{i:02d}.parquet", at(rows, np.arange(a, min(a + 7, 61))))
    parts, exp = read(tmp_path)
    assert_is(exp, rows)
    assert [parts.rows(k) for k in range(parts.num_parts)] == [8, 8, 8, 8, 4, 25]
    assert parts_module.MAX_ROWS == 65_536


def text_obs(rows):
    return pa.array(["not packed at all"] * len(rows["t"]))


def evil(rows):
    class Evil:
        def __reduce__(self):
            return eval, ("1/0",)

    return pa.array([packed(pickle.dumps(Evil()))] * len(rows["t"]))


BROKEN = [
    ({"without": ("actions",)}, "has no column `actions`, which a table of steps needs"),
    ({"obs": text_obs}, "row 0, column `obs`: `obs`: 'not packed at all' is not a packed array"),
    ({"obs": evil}, "a pickle holds the name `builtins.eval`"),
    ({"obs": lambda r: pa.array([[1.0, 2.0]] * 3 + [[1.0]] * 4)}, "row 3, column `obs`: `obs` has 1 entries in this"),
    ({"obs": lambda r: pa.array([None] + [[1.0, 2.0]] * 6)}, "row 0, column `obs`: `obs` is empty in this row"),
    ({"obs": lambda r: pa.array([[1.0, None]] * 7)}, "row 0, column `obs`: `obs` has an empty entry"),
    ({"rewards": lambda r: pa.array(["x"] * 7)}, "row 0, column `rewards`: `reward`: 'x' is not a packed array"),
    ({"eps_id": lambda r: pa.array(["a"] * 5 + [None] * 2)}, "row 5: column `eps_id` is empty"),
    ({"obs": lambda r: pa.array([packed(pickle.dumps({"a": i})) for i in range(7)])}, "has another structure"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BROKEN, ids=[m[-30:] for _, m in BROKEN])
def test_broken_columns_are_named(tmp_path, changes, message):
    rows = rows_of([4, 3])
    given = {name: make(rows) if callable(make) else make for name, make in changes.items()}
    path = write(tmp_path / "some.parquet", rows, **given)
    with pytest.raises(DataError, match=f"some.parquet: .*{message}|some.parquet: {message}"):
        read(path)


def test_files_that_do_not_belong_together(tmp_path):
    rows = rows_of([3])
    write(tmp_path / "a.parquet", rows)
    write(tmp_path / "b.parquet", rows, without=("action_logp",))
    with pytest.raises(DataError, match=r"b.parquet: has no column `action_logp`, but .*a.parquet has"):
        rllib_table.open_parts(tmp_path)


def test_problems_name_what_is_not_finite(tmp_path):
    rows = rows_of([4])
    rows["rewards"][2] = np.inf
    path = write(tmp_path / "a.parquet", rows)
    (problem,) = rllib_table.open_parts(path).problems()
    assert (problem.kind, problem.row, problem.column) == ("nan", 2, "rewards")
    assert f"{path}: row 2: `reward` holds inf" in problem.message


def test_detect(tmp_path):
    assert rllib_table.detect(write(tmp_path / "a.parquet", rows_of([2])))
    pq.write_table(pa.table({"x": [1]}), tmp_path / "b.parquet")
    assert not rllib_table.detect(tmp_path / "b.parquet")


def test_mutated_rows_end_only_in_data_errors(tmp_path):
    rng = np.random.default_rng(2)
    rows = rows_of([3, 2])
    texts = [packed(pickle.dumps(row, 5)) for row in rows["obs"]]
    good = write(tmp_path / "good.parquet", rows).read_bytes()
    refused = 0
    for i in range(300):
        path = tmp_path / "bad.parquet"
        if i % 2:
            path.write_bytes(mutated(good, rng))
        else:
            raw = mutated(base64.b64decode(texts[2]), rng)
            write(path, rows, obs=pa.array([*texts[:2], base64.b64encode(raw).decode(), *texts[3:]]))
        try:
            parts = rllib_table.open_parts(path)
            list(parts.problems())
            for k in range(parts.num_parts):
                parts.load(k)
        except DataError:
            refused += 1
    assert 100 < refused < 300


def test_repeats_in_any_order_lose_no_row(tmp_path):
    rows = rows_of([6, 6])
    order = np.random.default_rng(3).permutation(24) % 12
    write(tmp_path / "a.parquet", at(rows, order))
    parts, exp = read(tmp_path)
    firsts = list(dict.fromkeys(rows["eps_id"][order]))
    assert_is(exp, at(rows, np.concatenate([np.flatnonzero(rows["eps_id"] == name) for name in firsts])))
    (problem,) = parts.problems()
    assert "12 rows are there twice; they are read once" in problem.message
