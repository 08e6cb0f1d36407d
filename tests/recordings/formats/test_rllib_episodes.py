# SPDX-License-Identifier: Apache-2.0
"""RLlib's episode recordings, written naively in the test, against the values that were written."""

import gymnasium as gym
import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from some_rllib import BOX, NESTED, PAIR, buffer, coded, episode, mutated, space_map, write_items

from etude.errors import DataError
from etude.experience import Experience
from etude.recordings import Recording, validate
from etude.recordings.formats import rllib_episodes
from etude.recordings.formats.rllib_episodes import RLlibEpisodes
from etude.spaces import Nester


def read(path, columns=None):
    recording = Recording.open(path, on_bad=None)
    exp = Experience.concat([recording.part(k, columns) for k in range(recording.num_parts)])
    exp.validate()
    assert recording.num_steps == exp.num_steps
    return recording, exp


def assert_holds(exp, want, obs=BOX, action=PAIR):
    """The first segment holds the lists ``want``."""
    one = exp[0]
    nests = {"obs": Nester(obs, "obs"), "action": Nester(action, "action")}
    for t in range(one.num_steps):
        for root, nest in nests.items():
            value = nest({name: column[t] for name, column in one.steps.items()})
            assert_same(value, want[root][t])
    assert_same(nests["obs"]({name: column[0] for name, column in one.final_obs.items()}), want["obs"][-1])
    np.testing.assert_array_equal(one.steps["reward"], want["reward"])
    np.testing.assert_array_equal(one.steps["logp"], want["logp"])


def assert_same(a, b):
    if isinstance(b, dict | tuple):
        for key in b if isinstance(b, dict) else range(len(b)):
            assert_same(a[key], b[key])
    else:
        np.testing.assert_array_equal(a, b)


SPACES = [BOX, NESTED, PAIR, gym.spaces.Discrete(5), gym.spaces.MultiDiscrete([3, 2]), gym.spaces.MultiBinary(3)]


@pytest.mark.parametrize("obs", SPACES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("action", SPACES, ids=lambda s: type(s).__name__)
def test_every_space_comes_back(tmp_path, obs, action):
    state, want = episode(5, obs, action)
    recording, exp = read(write_items(tmp_path / "a.parquet", [state]))
    assert recording.header.obs_space == obs
    assert recording.header.action_space == action
    assert_holds(exp, want, obs, action)
    assert exp.steps["weights_seq_no"].tolist() == [7] * 5
    np.testing.assert_array_equal(exp.steps["state_out/h"][:, 0, 1], np.arange(5, dtype=np.float32))
    np.testing.assert_array_equal(exp.steps["info/fuel"], np.arange(1, 6) / 2)
    assert recording.header.meta["dropped"] == ["info/note"]
    assert "before" in recording.header.meta["actions"] or "policy" in recording.header.meta["actions"]
    assert not recording.validate().problems


def whole(values):
    """The form of a buffer that was made NumPy: time is the first axis."""
    if isinstance(values[0], dict):
        return {key: whole([v[key] for v in values]) for key in values[0]}
    if isinstance(values[0], tuple):
        return [whole([v[i] for v in values]) for i in range(len(values[0]))]
    return np.stack(values)


@pytest.mark.parametrize("obs", SPACES, ids=lambda s: type(s).__name__)
def test_whole_arrays_are_the_same_as_lists(tmp_path, obs):
    state, want = episode(4, obs)
    observations, actions = (whole(want[name]) for name in ("obs", "action"))
    state["observations"] = buffer(observations, obs, finalized=True)
    state["actions"] = buffer(actions, PAIR, finalized=True)
    state["rewards"] = buffer(np.array(want["reward"]), finalized=True)
    _, exp = read(write_items(tmp_path / "a.parquet", [state]))
    assert_holds(exp, want, obs)


def test_lookback_chunks_and_flags(tmp_path):
    first, want = episode(3, name="e")
    first |= {"is_terminated": False, "is_truncated": coded(np.bool_(False)), "t": 3}
    second, later = episode(4, name="e")
    second |= {
        "t_started": 3,
        "t": 7,
        "observations": buffer([want["obs"][1], *later["obs"]], BOX, lookback=1),
        "actions": buffer([want["action"][1], *later["action"]], PAIR, lookback=1),
        "is_terminated": False,
        "is_truncated": True,
    }
    recording, exp = read(write_items(tmp_path / "a.parquet", [first, second]))
    assert exp.segments.t_start.tolist() == [0, 3]
    assert exp.segments.truncated.tolist() == [False, True]
    assert_holds(exp[1:], later)
    assert exp.join().num_segments == 1
    assert not recording.validate().problems
    recording, _ = read(write_items(tmp_path / "b.parquet", [first, episode(2, name="whole")[0]]))
    (problem,) = recording.validate().problems
    assert problem.kind == "not_done"
    assert "b.parquet: row 0, episode 'e', step 2: episode 'e' is neither terminated nor truncated" in problem.message


def test_columns_are_chosen_and_wrong_names_are_answered(tmp_path):
    path = write_items(tmp_path / "a.parquet", [episode(3)[0]])
    _, exp = read(path, ["reward", "action"])
    assert set(exp.steps) == {"reward", "action/0", "action/1"}
    assert exp.final_obs == {}
    with pytest.raises(DataError, match=r"no column `rewards`; there are obs, .* Nearest: `reward`"):
        Recording.open(path).read(columns=["rewards"])


def test_repeats_are_read_once_and_told(tmp_path):
    states = [episode(n, name=f"e{n}")[0] for n in (3, 4)]
    write_items(tmp_path / "a.parquet", states)
    write_items(tmp_path / "b.parquet", [*states, episode(5, name="e5")[0]])
    recording, exp = read(tmp_path)
    assert recording.meta["duplicates"] == 2
    assert exp.lengths.tolist() == [3, 4, 5]
    write_items(tmp_path / "b.parquet", [*states, episode(5, name="e5")[0], episode(6, name="e3")[0]])
    problems = validate(tmp_path).problems
    assert [problem.kind for problem in problems] == ["duplicate", "duplicate", "duplicate"]
    assert [problem.harmless for problem in problems] == [True, True, False]  # the last is another episode of one id
    assert problems[0].message.startswith(f"{tmp_path / 'b.parquet'}: row 0: repeats the episode in")
    assert (problems[1].row, problems[2].row) == (1, 3)


def test_columns_have_one_dtype_in_all_episodes(tmp_path):
    quiet, _ = episode(3, name="a")
    quiet["extra_model_outputs"]["action_logp"] = buffer([np.int32(0)] * 3)
    loud, want = episode(2, name="b")
    loud["infos"] = buffer([{}] * 3)
    _, exp = read(write_items(tmp_path / "a.parquet", [quiet, loud]))
    assert exp.steps["logp"].dtype == np.float32
    assert exp[1].steps["logp"].tolist() == want["logp"]
    assert np.isnan(exp[1].steps["info/fuel"]).all()


def test_episodes_without_spaces_and_without_steps(tmp_path):
    nothing, _ = episode(0, name="none")
    first, _ = episode(3, BOX, gym.spaces.Discrete(9), name="a")
    second, _ = episode(40, BOX, gym.spaces.Discrete(9), name="b")
    for state in (nothing, first, second):
        state["_observation_space"] = state["_action_space"] = None
    recording, exp = read(write_items(tmp_path / "a.parquet", [nothing, first, second]))
    assert recording.header.meta["inferred"] == ["obs", "action"]
    assert recording.header.action_space == gym.spaces.Discrete(int(exp.steps["action"].max()) + 1)
    assert recording.header.obs_space.shape == (3,)
    assert [problem.kind for problem in recording.validate().problems] == ["no_steps"]
    empty = episode(0, name="lost")[0]  # a chunk whose steps are gone, but not that it looks back at one
    empty |= {"actions": buffer([], PAIR, lookback=1)}
    recording, exp = read(write_items(tmp_path / "b.parquet", [empty, episode(3, name="a")[0]]))
    assert exp.lengths.tolist() == [3]
    assert [problem.kind for problem in recording.validate().problems] == ["no_steps"]


def many_agents(**changes):
    cart, one = episode(3, BOX, gym.spaces.Discrete(4), name="own", agent_id=0, module_id="p0")
    other, two = episode(2, BOX, gym.spaces.Discrete(4), name="own2")
    document = {
        "id_": "shared",
        "agent_to_module_mapping_fn": None,
        "_agent_to_module_mapping": {0: "p0", "two": "p1"},
        "env_t_started": 0,
        "env_t": 6,
        "env_t_to_agent_t": {
            0: buffer([0, "S", 1, "S", 2, "S", 3]),
            "two": buffer(["S", 0, "S", 1, "S", 2, "S"]),
        },
        "_hanging_actions_end": {},
        "is_terminated": True,
        "is_truncated": False,
        "agent_episodes": [[0, cart], ["two", other]],
    }
    return document | changes, one, two


def test_many_agents_are_segments_of_one_episode(tmp_path):
    document, one, two = many_agents()
    recording, exp = read(write_items(tmp_path / "a.parquet", [document]))
    assert exp.segments.episode_id.tolist() == ["shared", "shared"]
    assert exp.segments.agent_id.tolist() == ["0", "two"]
    assert exp.segments.module_id.tolist() == ["p0", "p1"]
    assert exp.steps["env_t"].tolist() == [0, 2, 4, 1, 3]
    np.testing.assert_array_equal(exp[0].steps["obs"], np.stack(one["obs"][:-1]))
    np.testing.assert_array_equal(exp[1].final_obs["obs"][0], two["obs"][-1])
    assert not recording.validate().problems


def test_what_hangs_at_the_end_of_a_chunk_is_told(tmp_path):
    document, _, _ = many_agents(_hanging_actions_end={"two": coded(np.int32(1))})
    recording, _ = read(write_items(tmp_path / "a.parquet", [document]))
    (problem,) = recording.validate().problems
    assert "agent 'two' has a last action without a next observation" in problem.message


def test_agents_with_other_spaces_are_refused(tmp_path):
    document, _, _ = many_agents()
    document["agent_episodes"][1][1]["_action_space"] = space_map(gym.spaces.Discrete(9))
    with pytest.raises(DataError, match=r"a.parquet: row 0: its agents have different `action` spaces"):
        read(write_items(tmp_path / "a.parquet", [document]))


def changed(**changes):
    return episode(4)[0] | changes


BROKEN = [
    (b"\xc1", "column `item`: the document is not a map"),
    (changed(rewards=buffer([1.0] * 3)), "`reward` has 3 entries, but with 4 actions it needs 4"),
    (changed(observations=buffer([np.zeros(3, np.float32)] * 4)), "`obs` has 4 entries, but with 4 actions it needs 5"),
    (changed(observations=buffer([np.zeros(2, np.float32)] * 5)), r"`obs` has the shape \[2\] at each step"),
    (changed(actions=buffer([[np.int32(1), "x"]] * 4)), "`action/1` at step 0 holds text, not numbers"),
    (changed(is_terminated="yes"), "`is_terminated` is 'yes', not true or false"),
    (changed(t_started=-1), "`t_started` is '-1', not a step"),
    (changed(extra_model_outputs=None), "it has no `logp`, which other episodes have"),
    (changed(observations=None), "`obs` is not a buffer"),
    ({"id_": "x"}, "it has no `actions`"),
]


@pytest.mark.parametrize(("broken", "message"), BROKEN, ids=[m[:30] for _, m in BROKEN])
def test_broken_rows_are_named_and_the_others_can_be_read(tmp_path, broken, message):
    path = write_items(tmp_path / "some.parquet", [episode(4, name="good")[0], broken, episode(2, name="g2")[0]])
    with pytest.raises(DataError, match=f"some.parquet: row 1.*{message}"):
        Recording.open(path).read()
    (problem,) = validate(path).problems
    assert (problem.kind, problem.row, problem.repairable) == ("unreadable", 1, True)


def test_numbers_that_are_not_finite_are_told(tmp_path):
    state, want = episode(4)
    want["obs"][3][1] = np.nan
    path = write_items(tmp_path / "a.parquet", [state | {"observations": buffer(want["obs"], BOX)}])
    (problem,) = validate(path).problems
    assert "row 0, episode 'e0', step 3: column `obs` holds NaN in component 1" in problem.message


def test_files_that_are_not_such_recordings(tmp_path):
    with pytest.raises(DataError, match="nowhere: there is no such file or folder"):
        Recording.open(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no Parquet file"):
        Recording.open(tmp_path)
    with pytest.raises(DataError, match=r"zero.parquet: holds no episodes: it has 0 rows"):
        Recording.open(write_items(tmp_path / "zero.parquet", []))
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other.parquet")
    with pytest.raises(DataError, match=r"other.parquet: is not an RLlib episode recording: its columns are x"):
        RLlibEpisodes([tmp_path / "other.parquet"]).describe()
    assert not RLlibEpisodes.detect(tmp_path / "other.parquet")
    good = write_items(tmp_path / "good.parquet", [episode(3)[0]])
    assert RLlibEpisodes.detect(good)
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(good.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"cut.parquet: is not a whole Parquet file"):
        Recording.open(cut)
    assert not RLlibEpisodes.detect(cut)


def test_large_recordings_come_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(rllib_episodes, "UNIT_BYTES", 4000)
    monkeypatch.setattr(rllib_episodes, "_MOST_BYTES", 4000)
    states = [episode(10, name=f"e{i}")[0] for i in range(12)]
    recording, exp = read(write_items(tmp_path / "a.parquet", states))
    assert recording.num_parts > 3
    assert exp.segments.episode_id.tolist() == [f"e{i}" for i in range(12)]


def test_mutated_documents_end_only_in_data_errors(tmp_path):
    rng = np.random.default_rng(1)
    good = [msgpack.packb(episode(2, NESTED)[0]), msgpack.packb(many_agents()[0])]
    refused = 0
    for i in range(300):
        path = write_items(tmp_path / "a.parquet", [mutated(good[i % 2], rng)])
        try:
            validate(path)
            Recording.open(path, on_bad=None).read()
        except DataError:
            refused += 1
    assert 30 < refused < 300


@pytest.mark.parametrize("depth", [70, 400])
def test_spaces_that_are_nested_too_deep_are_an_error(tmp_path, depth):
    state, _ = episode(3)
    for _ in range(depth):
        state["_observation_space"] = {"space": "tuple", "spaces": [state["_observation_space"]]}
    write_items(tmp_path / "a.parquet", [state])
    with pytest.raises(DataError, match=r"a\.parquet: row 0: .*64 levels"):
        Recording.open(tmp_path)
