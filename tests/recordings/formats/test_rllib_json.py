# SPDX-License-Identifier: Apache-2.0
"""RLlib's JSON lines, written in the test: lists or packed, whole episodes or fragments, one policy or many."""

import json
import pickle

import gymnasium as gym
import numpy as np
import pytest
from some_rllib import mutated, packed

from etude.errors import DataError
from etude.experience import Experience
from etude.recordings import Recording, cache, validate
from etude.recordings.formats import sorting
from etude.recordings.formats.rllib_json import RLlibJson


@pytest.fixture(autouse=True, params=["in memory", "in the cache"])
def kept(request, tmp_path_factory, monkeypatch):
    """Small recordings are sorted in memory; large ones into the cache, here a few rows at a time."""
    if request.param == "in the cache":
        monkeypatch.setenv("ETUDE_CACHE", str(tmp_path_factory.mktemp("cache")))
        monkeypatch.setattr(cache, "LEAST_BYTES", 0)
        monkeypatch.setattr(sorting, "BUCKET_BYTES", 500)
        monkeypatch.setattr(sorting, "_PENDING_BYTES", 2000)


def rows_of(length, eps_id=2**59 + 1, agent=0, t=0, seed=0):
    """The columns of one episode's rows, as plain lists; it terminates at its end."""
    obs = np.random.default_rng(seed + agent).standard_normal((length + 1, 3)).astype(np.float32)
    return {
        "obs": obs[:-1].tolist(),
        "new_obs": obs[1:].tolist(),
        "actions": [i % 3 for i in range(length)],
        "rewards": [i / 7 for i in range(length)],
        "terminateds": [i == length - 1 for i in range(length)],
        "truncateds": [False] * length,
        "eps_id": [eps_id] * length,
        "agent_index": [agent] * length,
        "t": list(range(t, t + length)),
        "vf_preds": [i / 2 for i in range(length)],
        "infos": [{}] * length,
    }


def cut(rows, *parts):
    return [{name: values[a:b] for name, values in rows.items()} for a, b in parts]


def joined(*rows):
    return {name: [value for part in rows for value in part[name]] for name in rows[0]}


def sample_batch(rows, pack=()):
    packs = {name: packed(pickle.dumps(np.asarray(rows[name], np.float32), 5)) for name in pack}
    return {"type": "SampleBatch", **rows, **packs}


def multi(**policies):
    return {"type": "MultiAgentBatch", "count": 7, "policy_batches": policies}


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path, columns=None):
    recording = Recording.open(path, on_bad=None)
    exp = Experience.concat([recording.part(k, columns) for k in range(recording.num_parts)])
    exp.validate()
    assert recording.num_steps == exp.num_steps
    return recording, exp


def assert_is(exp, rows):
    np.testing.assert_array_equal(exp.steps["obs"], np.array(rows["obs"], np.float32))
    np.testing.assert_array_equal(exp.next_obs()["obs"], np.array(rows["new_obs"], np.float32))
    assert exp.steps["action"].tolist() == rows["actions"]
    assert exp.steps["reward"].tolist() == rows["rewards"]
    assert exp.steps["value"].tolist() == rows["vf_preds"]


@pytest.mark.parametrize("pack", [(), ("obs", "new_obs")], ids=["plain", "packed"])
@pytest.mark.parametrize("many", [False, True], ids=["SampleBatch", "MultiAgentBatch"])
def test_fragments_become_episodes(tmp_path, pack, many):
    first, second = rows_of(5), rows_of(4, eps_id=7, seed=1)
    lines = [*cut(first, (0, 2)), joined(*cut(first, (2, 5)), *cut(second, (0, 3))), *cut(second, (3, 4))]
    batches = [sample_batch(line, pack) for line in lines]
    path = write(tmp_path / "a.json", *([multi(default_policy=b) for b in batches] if many else batches))
    recording, exp = read(path)
    assert_is(exp, joined(first, second))
    assert exp.segments.episode_id.tolist() == [str(2**59 + 1), "7"]
    assert exp.segments.agent_id.tolist() == exp.segments.module_id.tolist() == [None, None]
    assert exp.segments.terminated.tolist() == [True, True]
    assert exp.steps["obs"].dtype == np.float32
    assert recording.header.action_space == gym.spaces.Discrete(3)
    assert recording.meta["dropped"] == ["infos"]
    assert not recording.validate().problems


def test_columns_that_are_called_as_etude_calls_others_are_kept_apart(tmp_path):
    words = {
        name: [0.5 * i for i in range(4)] for name in ("episode_id", "agent_id", "segment", "terminated", "reward")
    }
    _, exp = read(write(tmp_path / "a.json", sample_batch(rows_of(4) | words)))
    assert_is(exp, rows_of(4))
    for name, values in words.items():
        assert exp.steps[f"extra/{name}"].tolist() == values
    assert exp.segments.episode_id.tolist() == [str(2**59 + 1)]


def test_fragments_in_any_order_are_sorted_by_t(tmp_path):
    rows = rows_of(6)
    a, b, c = cut(rows, (0, 2), (2, 4), (4, 6))
    _, exp = read(write(tmp_path / "a.json", *map(sample_batch, (c, a, b))))
    assert_is(exp, rows)
    assert exp.num_segments == 1


def test_a_fragment_that_is_lost_cuts_the_episode(tmp_path):
    a, _, c = cut(rows_of(6), (0, 2), (2, 4), (4, 6))
    _, exp = read(write(tmp_path / "a.json", sample_batch(a), sample_batch(c)))
    assert exp.segments.t_start.tolist() == [0, 4]
    np.testing.assert_array_equal(exp.next_obs()["obs"], np.array(a["new_obs"] + c["new_obs"], np.float32))


def test_many_agents_and_rows_written_again(tmp_path):
    zero, one = rows_of(3), rows_of(4, agent=1)
    first = multi(p0=zero, p1=cut(one, (0, 3))[0])
    second = multi(p0=zero, p1=cut(one, (3, 4))[0])
    recording, exp = read(write(tmp_path / "a.json", first, second))
    assert exp.segments.agent_id.tolist() == ["0", "1"]
    assert exp.segments.module_id.tolist() == ["p0", "p1"]
    assert len(set(exp.segments.episode_id)) == 1
    assert_is(exp, joined(zero, one))
    assert recording.meta["duplicates"] == 3
    (problem,) = recording.validate().problems
    assert (problem.kind, problem.count) == ("duplicate", 3)
    assert "a.json: line 2: 3 rows are copies of rows on an earlier line" in problem.message


def test_steps_that_contradict_each_other_are_refused(tmp_path):
    lines = [sample_batch(rows_of(3) | {"rewards": rewards}) for rewards in ([0.0, 1.0, 2.0], [0.0, 1.0, 3.0])]
    recording = Recording.open(write(tmp_path / "a.json", *lines))
    assert recording.meta["duplicates"] == 2
    with pytest.raises(
        DataError, match=r"a.json: line 2: episode .* has step t 2 a second time; the first one is in .*line 1"
    ):
        recording.read()


def test_old_files_with_dones_and_without_t(tmp_path):
    rows = joined(rows_of(3), rows_of(2, seed=5))  # one id for two episodes
    for name in ("t", "truncateds"):
        rows.pop(name)
    rows["dones"] = rows.pop("terminateds")
    _, exp = read(write(tmp_path / "a.json", *map(sample_batch, cut(rows, (0, 2), (2, 5)))))
    assert exp.lengths.tolist() == [3, 2]
    assert exp.segments.terminated.tolist() == [True, True]
    assert len(set(exp.segments.episode_id)) == 2
    assert_is(exp, rows)


def test_episodes_that_do_not_end_are_told_once(tmp_path):
    endless = [rows_of(4, eps_id=i) | {"terminateds": [False] * 4} for i in range(3)]
    parts = [sample_batch(part) for part in [*cut(endless[0], (0, 2), (2, 4)), *endless[1:], rows_of(3, eps_id=9)]]
    write(tmp_path / "a.json", *parts)
    told = (
        f"{tmp_path / 'a.json'}: line 2: episode '0' is neither terminated nor truncated after its last step "
        "(3 episodes like it): it was cut off, and the value of what follows must be estimated. If it ended there, its "
        "data should say how."
    )
    for on_bad in ("strict", "repair", "skip"):
        recording = Recording.open(tmp_path, on_bad=on_bad)
        recording.read()
        assert recording.warnings == [told]
    (problem,) = validate(tmp_path).problems
    assert (problem.kind, problem.message, problem.row, problem.count) == ("not_done", told, 1, 3)


def test_rows_without_episodes_are_cut_at_ends(tmp_path):
    rows = joined(rows_of(3), rows_of(2, seed=5))
    for name in ("t", "eps_id", "agent_index"):
        rows.pop(name)
    _, exp = read(write(tmp_path / "a.json", sample_batch(rows)))
    assert exp.lengths.tolist() == [3, 2]
    assert_is(exp, rows)


def test_one_object_a_step(tmp_path):
    rows = rows_of(4)
    lines = [{name: values[i] for name, values in rows.items()} for i in range(4)]
    _, exp = read(write(tmp_path / "a.jsonl", *lines))
    assert exp.num_segments == 1
    assert_is(exp, rows)


def test_numbers_that_are_not_of_float32_stay_float64(tmp_path):
    rows = rows_of(2)
    rows["obs"], rows["new_obs"] = [[0.1, 0.2]] * 2, [[0.3, 0.4]] * 2
    _, exp = read(write(tmp_path / "a.json", sample_batch(rows)))
    assert exp.steps["obs"].tolist() == rows["obs"]


def test_tuple_actions(tmp_path):
    rows = rows_of(2) | {"actions": [[1, [0.5]], [0, [0.25]]]}
    recording, exp = read(write(tmp_path / "a.json", sample_batch(rows)))
    assert isinstance(recording.header.action_space, gym.spaces.Tuple)
    assert exp.steps["action/0"].tolist() == [1, 0]
    assert exp.steps["action/1"].tolist() == [[0.5], [0.25]]


def without(name):
    return {key: value for key, value in sample_batch(rows_of(3, eps_id=3)).items() if key != name}


BROKEN = [
    (json.dumps(sample_batch(rows_of(3)))[:-20], "is not whole JSON"),
    ("[1, 2]", "is not a JSON object"),
    ("[" * 100_000, "is not whole JSON"),
    (sample_batch(rows_of(3) | {"eps_id": ["\ud800"] * 3}), "is not whole JSON .*surrogates not allowed"),
    (sample_batch(rows_of(3) | {"x\udfffy": [1, 2, 3]}), "is not whole JSON .*surrogates not allowed"),
    (without("actions"), "has no column `actions`"),
    (without("terminateds") | {"truncateds": "x"}, "`truncateds` is the text 'x'"),
    (sample_batch(rows_of(3) | {"rewards": [1.0, 2.0]}), "for 2 rewards"),
    (sample_batch(rows_of(3) | {"obs": [[1.0], [1.0, 2.0], [1.0]]}), r"`obs` .*at step 1"),
    (sample_batch(rows_of(3) | {"obs": ["a", "b", "c"]}), "`obs` at step 0 holds text|`obs` holds text"),
    (sample_batch(rows_of(3) | {"obs": "BCJNG???"}), "not base64 text"),
    (sample_batch(rows_of(3) | {"obs": packed(pickle.dumps(print))}), "the name `builtins.print`"),
    (sample_batch(rows_of(3) | {"t": [0, 1, -2]}), "`t` is -2"),
    (sample_batch(rows_of(3) | {"t": [0, 1.5, 2]}), "`t` holds float64, not integers"),
    ({"type": "Other"}, "is of the type 'Other'"),
    ({"type": "MultiAgentBatch"}, "without `policy_batches`"),
]


@pytest.mark.parametrize(("line", "message"), BROKEN, ids=[m[:25] for _, m in BROKEN])
def test_broken_lines_are_named(tmp_path, line, message):
    path = write(tmp_path / "some.json", sample_batch(rows_of(3, eps_id=1)), line)
    with pytest.raises(DataError, match=f"some.json: line 2: .*(?:{message})"):
        read(path)


@pytest.mark.parametrize("lacking", [0, 1])
@pytest.mark.parametrize("name", ["vf_preds", "new_obs"])
def test_columns_that_some_lines_lack_are_left_out(tmp_path, name, lacking):
    first, second = rows_of(3), rows_of(2, eps_id=7, seed=1)
    lines = [sample_batch(first), sample_batch(second)]
    del lines[lacking][name]
    recording, exp = read(write(tmp_path / "a.json", *lines))
    assert recording.meta["dropped"] == ["infos", {"vf_preds": "value", "new_obs": "next_obs"}[name]]
    assert set(exp.steps) == {"obs", "action", "reward", "value"} - {"value" if name == "vf_preds" else ""}
    np.testing.assert_array_equal(exp.steps["obs"], np.array(first["obs"] + second["obs"], np.float32))
    assert exp.next_obs()["obs"][:2].tolist() == np.array(first["new_obs"][:2], np.float32).tolist()


def test_columns_of_other_shapes_or_of_no_numbers_are_left_out(tmp_path):
    first, second = rows_of(3), rows_of(2, eps_id=7)
    first |= {"state_in_0": [[]] * 3}
    second |= {"state_in_0": [[]] * 2, "vf_preds": [[1.0, 2.0]] * 2}
    recording, exp = read(write(tmp_path / "a.json", *map(sample_batch, (first, second))))
    assert recording.meta["dropped"] == ["infos", "state_in_0", "value"]
    assert exp.steps["reward"].tolist() == first["rewards"] + second["rewards"]


def test_lines_whose_observations_have_other_parts_are_problems(tmp_path):
    first, second = rows_of(3), rows_of(2, eps_id=7)
    for rows, parts in ((first, ("x", "y")), (second, ("x",))):
        for name in ("obs", "new_obs"):
            rows[name] = [dict.fromkeys(parts, 0.5)] * len(rows["t"])
    recording = Recording.open(write(tmp_path / "a.json", *map(sample_batch, (first, second))), on_bad="skip")
    (problem,) = recording.validate().problems
    assert "line 2: `obs/y` has no shape at each step, but [] on lines before: spaces differ" in problem.message
    assert recording.num_steps == 3


def test_numbers_that_are_not_finite_are_told(tmp_path):
    rows = rows_of(3)
    rows["rewards"][1] = float("nan")
    (problem,) = Recording.open(write(tmp_path / "a.json", sample_batch(rows))).validate().problems
    assert "a.json: line 1: column `reward` holds NaN" in problem.message


def test_detect(tmp_path):
    assert RLlibJson.detect(write(tmp_path / "a.json", sample_batch(rows_of(2))))
    assert not RLlibJson.detect(write(tmp_path / "b.json", {"x": 1}))
    with pytest.raises(DataError, match=r"c.json: holds no batches: it is empty"):
        RLlibJson([write(tmp_path / "c.json")]).describe()


def test_mutated_lines_end_only_in_data_errors(tmp_path):
    rng = np.random.default_rng(3)
    good = [json.dumps(sample_batch(rows_of(2), pack)).encode() for pack in ((), ("obs", "new_obs"))]
    refused = 0
    for i in range(400):
        path = tmp_path / "a.json"
        path.write_bytes(mutated(good[i % 2], rng))
        try:
            recording = Recording.open(path, on_bad=None)
            validate(path)
            for k in range(recording.num_parts):
                recording.part(k)
        except DataError:
            refused += 1
    assert 100 < refused < 400


def test_a_folder_of_json_and_jsonl_is_read_whole(tmp_path):
    one, two = rows_of(3), rows_of(4, eps_id=5, seed=1)
    write(tmp_path / "a.json", sample_batch(one))
    write(tmp_path / "b.jsonl", sample_batch(two))
    write(tmp_path / "params.jsonl", {"lr": 1})
    assert Recording.open(tmp_path).read().num_steps == 7
    assert validate(tmp_path).ok
    np.savez(tmp_path / "c.npz", observations=np.zeros((2, 3)), actions=np.zeros(2), rewards=np.zeros(2))
    with pytest.raises(DataError, match=r"c.npz: is of another format than .*a.json in the same folder"):
        Recording.open(tmp_path)
    assert [problem.file for problem in validate(tmp_path).problems] == [str(tmp_path / "c.npz")]
    assert Recording.open(tmp_path, on_bad="skip").read().num_steps == 7


def test_files_of_other_spaces_are_named(tmp_path):
    write(tmp_path / "a.json", sample_batch(rows_of(3)))
    other = {**rows_of(2, eps_id=5), "obs": [[1.0], [2.0]], "new_obs": [[2.0], [3.0]]}
    write(tmp_path / "b.jsonl", sample_batch(other))
    with pytest.raises(DataError, match=r"b.jsonl: line 1: `obs` has the shape \[1\] at each step, but \[3\] on lines"):
        Recording.open(tmp_path)
    assert Recording.open(tmp_path, on_bad="skip").read().num_steps == 3


def test_columns_with_a_row_for_each_sequence_are_left_out(tmp_path):
    rows = {**rows_of(6), "state_in_0": [[0.0] * 4] * 2, "seq_lens": [4, 2], "state_out_0": [[0.5] * 4] * 6}
    recording = Recording.open(write(tmp_path / "a.json", sample_batch(rows), sample_batch(rows_of(3, eps_id=5))))
    exp = recording.read()
    assert exp.num_steps == 9
    assert not {"state_in_0", "seq_lens"} & set(exp.steps)
    assert {"state_in_0", "seq_lens"} <= set(recording.meta["dropped"])
