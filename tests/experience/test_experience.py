# SPDX-License-Identifier: Apache-2.0
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from some_experience import TORCH_NUMBERS, assert_same, bits, experiences, numbered

from etude.errors import DataError
from etude.experience import Experience, Segments


def _either(draw, exp):
    return exp.to("cpu") if draw(st.booleans()) else exp


@st.composite
def either(draw, **kwargs):
    """NumPy or torch columns."""
    return _either(draw, draw(experiences(dtypes=TORCH_NUMBERS, **kwargs)))


@given(st.data(), either())
def test_concat_then_select_gives_back_the_parts(data, exp):
    cuts = sorted(data.draw(st.lists(st.integers(0, exp.num_segments), max_size=3)))
    bounds = [0, *cuts, exp.num_segments]
    parts = [exp[a:b] for a, b in itertools.pairwise(bounds)]
    whole = Experience.concat(parts)
    assert_same(whole, exp)
    for part, a, b in zip(parts, bounds[:-1], bounds[1:], strict=True):
        assert_same(whole.select(slice(a, b)), part)
        assert_same(whole.select(np.arange(a, b)), part)
        mask = np.zeros(exp.num_segments, bool)
        mask[a:b] = True
        assert_same(whole.select(mask), part)


@given(st.data(), either())
def test_select_takes_segments_in_any_order(data, exp):
    order = data.draw(st.lists(st.integers(0, exp.num_segments - 1), max_size=8)) if len(exp) else []
    chosen = exp.select(order)
    assert chosen.num_segments == len(order)
    for i, j in enumerate(order):
        assert_same(chosen[i], exp[j])


def test_select_takes_the_segments_of_some_ids():
    exp = numbered([2, 1, 3, 2]).with_segments(
        agent_id=np.array(["red", "blue", "green", "red"], object), module_id=np.array(["a", "a", None, "b"], object)
    )
    for ids, found in (
        ("red", [0, 3]),
        (["red", "blue"], [0, 1, 3]),
        ({"blue", "green"}, [1, 2]),
        (("red", "blue", "green"), [0, 1, 2, 3]),
        (["red", "blue", "green", "none"], [0, 1, 2, 3]),
        ([], []),
        ((name for name in ("blue",)), [1]),
        (exp.segments[1:3].agent_id, [1, 2]),
    ):
        assert_same(exp.select(agent_id=ids), exp.select(found))
    assert_same(exp.select(agent_id=["red", "blue"], module_id=["a", "b"], where=[3, 2, 1]), exp.select([3, 1]))
    for wrong in (0, [0], ["red", 1]):
        with pytest.raises(DataError, match=r"`agent_id` is [01], but ids are strings"):
            exp.select(agent_id=wrong)


@given(either(), st.integers(1, 7))
def test_cut_then_join_gives_back_the_whole(exp, max_len):
    cut = exp.cut(max_len)
    assert cut.num_steps == exp.num_steps
    assert len(cut) == sum(-(-n // max_len) for n in exp.lengths)
    assert (cut.lengths <= max_len).all()
    assert np.array_equal(cut.trained(), exp.trained())
    assert np.array_equal(cut.t(), exp.t())
    assert {n: bits(c) for n, c in cut.next_obs().items()} == {n: bits(c) for n, c in exp.next_obs().items()}
    # segments that continued each other before are joined as well: compare with what the parts make alone
    for i in range(len(exp)):
        assert_same(exp[i].cut(max_len).join(), exp[i])
    assert_same(Experience.concat([cut[:1], cut[1:]]).join(), exp.join())


@given(either(), st.integers(1, 5), st.integers(1, 7))
def test_pieces_with_lookback_hold_the_whole_once_and_its_context(exp, max_len, lookback):
    cut, plain = exp.cut(max_len, lookback=lookback), exp.cut(max_len)
    assert len(cut) == len(plain)
    for got, piece in zip(cut, plain, strict=True):
        more = got.num_steps - piece.num_steps
        parent = next(p for p in exp if _holds(p, piece))
        before = int(piece.segments.t_start[0] - parent.segments.t_start[0])
        assert more == min(before, lookback)
        assert int(got.segments.lookback[0]) == more + int(piece.segments.lookback[0])
        assert int(got.segments.t_start[0]) == int(piece.segments.t_start[0]) - more
        rows = slice(before - more, before + piece.num_steps)
        assert {n: bits(c) for n, c in got.steps.items()} == {n: bits(c[rows]) for n, c in parent.steps.items()}
        assert {n: bits(c) for n, c in got.final_obs.items()} == {n: bits(c) for n, c in piece.final_obs.items()}


def _holds(parent, piece):
    """Whether ``piece``'s memory lies in ``parent``'s."""
    a, b = (x.numpy().steps["reward"] for x in (parent, piece))
    return np.shares_memory(a, b)


@given(st.data(), either())
def test_split_gives_both_sides_of_a_border(data, exp):
    at = data.draw(st.integers(0, exp.num_steps))
    first, rest = exp.split(at)
    assert (first.num_steps, rest.num_steps) == (at, exp.num_steps - at)
    assert_same(Experience.concat([first, rest]).join(), exp.join())
    first.validate(finite=())
    rest.validate(finite=())


def test_split_refuses_a_border_outside():
    with pytest.raises(ValueError, match="can't split 3 steps at 4"):
        numbered([3]).split(4)


@given(either())
def test_next_obs_equals_a_naive_loop(exp):
    found = exp.next_obs()
    for name in exp.final_obs:
        rows = []
        for i in range(len(exp)):
            a, b = exp.offsets[i], exp.offsets[i + 1]
            rows += [exp.steps[name][t + 1] if t + 1 < b else exp.final_obs[name][i] for t in range(a, b)]
        if rows:
            naive = torch.stack(rows) if isinstance(rows[0], torch.Tensor) else np.array(rows, exp.steps[name].dtype)
            assert bits(found[name]) == bits(naive)
        else:
            assert len(found[name]) == 0


@given(either())
def test_what_follows_from_segments_equals_naive_loops(exp):
    segment, t, trained, ends, returns = [], [], [], [], []
    reward = exp.numpy().steps["reward"]
    for i in range(len(exp)):
        n, s = int(exp.lengths[i]), exp.segments
        segment += [i] * n
        t += [int(s.t_start[i]) + k for k in range(n)]
        trained += [k >= s.lookback[i] for k in range(n)]
        ends += [bool(s.terminated[i]) and k == n - 1 for k in range(n)]
        returns.append(sum(reward[exp.offsets[i] + k] for k in range(int(s.lookback[i]), n)))
    assert exp.segment_of_step().tolist() == segment
    assert exp.t().tolist() == t
    assert exp.trained().tolist() == trained
    assert exp.at_ends(exp.segments.terminated).tolist() == ends
    assert exp.returns().tolist() == returns


def test_without_rewards_there_are_no_returns():
    exp = Experience({"obs": np.zeros(2)}, np.array([0, 2]), Segments.of(1, episode_id=["a"]), {})
    with pytest.raises(DataError, match="there is no column `reward`, so there are no returns"):
        exp.returns()


@given(either())
def test_episodes_come_in_order_with_all_their_agents(exp):
    order = list(dict.fromkeys(exp.segments.episode_id))
    episodes = list(exp.episodes())
    assert len(episodes) == len(order)
    for name, episode in zip(order, episodes, strict=True):
        assert_same(episode, exp.select([i for i in range(len(exp)) if exp.segments.episode_id[i] == name]))


def test_interleaved_episodes_are_gathered():
    exp = numbered([2, 1, 3, 2], episode_id=["b", "a", "b", "a"], agent_id=["x", "x", "y", "y"])
    first, second = exp.episodes()
    assert first.steps["obs"].tolist() == [0, 1, 200, 201, 202]
    assert second.steps["obs"].tolist() == [100, 300, 301]
    assert exp.select(episode_id="a", agent_id="y").steps["obs"].tolist() == [300, 301]
    assert exp.select(agent_id="nobody").num_steps == 0
    assert exp.select(module_id="net").num_segments == 0


@given(either(min_steps=1))
def test_views_share_memory_and_copies_do_not(exp):
    def shares(a, b):
        a, b = a.numpy(), b.numpy()
        return all(np.shares_memory(a.steps[n], b.steps[n]) for n in a.steps)

    assert shares(exp[0], exp)
    assert shares(exp[0:], exp)
    assert shares(exp.select(slice(0, 1)), exp)
    assert shares(exp.select(np.array([len(exp) - 1])), exp)
    assert shares(exp.cut(2), exp)
    assert shares(exp.join(), exp)
    assert all(shares(part, exp) for part in exp.split(exp.num_steps // 2) if part.num_steps)
    assert shares(exp.to("cpu"), exp)
    assert shares(exp, exp.with_steps(more=exp.steps["reward"]))
    assert all(shares(one, exp) for one in exp)
    assert not shares(exp.select([0, 0]), exp)
    assert not np.shares_memory(exp.numpy().steps["obs/a"], np.asarray(exp.next_obs()["obs/a"]))


def test_episodes_of_one_agent_are_views():
    exp = numbered([2, 3, 1], episode_id=["a", "a", "b"])
    for episode in exp.episodes():
        assert np.shares_memory(episode.steps["obs"], exp.steps["obs"])


@given(experiences(dtypes=TORCH_NUMBERS))
def test_to_torch_and_back_is_the_identity(exp):
    tensors = exp.to("cpu")
    assert all(isinstance(column, torch.Tensor) for column in [*tensors.steps.values(), *tensors.final_obs.values()])
    assert_same(tensors.numpy(), exp)


def test_strings_stay_behind_on_the_way_to_torch():
    exp = numbered([2]).with_steps(name=np.array(["a", "b"], object))
    assert set(exp.to("cpu").steps) == {"obs", "action", "reward"}
    named = Experience({"obs": exp.steps["name"]}, exp.offsets, exp.segments, {"obs": np.array(["c"], object)})
    assert named.to("cpu").final_obs == {}


def test_indexing_outside_and_backwards_is_refused():
    exp = numbered([2, 1])
    assert exp[-1].steps["obs"].tolist() == [100]
    with pytest.raises(IndexError, match="segment 2 of 2"):
        exp[2]
    with pytest.raises(TypeError, match=r"not 'reward': a column is experience\.steps\['obs'\]"):
        exp["reward"]  # type: ignore[index]
    with pytest.raises(IndexError, match="must have step 1, not -1; use select"):
        exp[::-1]
    assert exp[2:1].num_segments == 0


def test_concat_refuses_nothing_and_parts_that_do_not_fit():
    a = numbered([2])
    with pytest.raises(DataError, match="can't concatenate an empty list"):
        Experience.concat([])
    with pytest.raises(DataError, match="part 1 with part 0: only one of them has column `value`"):
        Experience.concat([a, a.with_steps(value=a.steps["obs"])])
    with pytest.raises(DataError, match="only one of them has final_obs `obs`"):
        Experience.concat([a, Experience(a.steps, a.offsets, a.segments, {})])
    wide = a.with_steps(reward=np.zeros((2, 3)))
    with pytest.raises(DataError, match=r"part 1 .*: column `reward` is float64\[3\], not float64"):
        Experience.concat([a, wide])
    finer = Experience(a.steps, a.offsets, a.segments, {"obs": a.final_obs["obs"].astype(np.float64)})
    with pytest.raises(DataError, match="final_obs `obs` is float64, not float32. Convert it"):
        Experience.concat([a, finer])


def test_cut_refuses_empty_pieces():
    with pytest.raises(ValueError, match="max_len must be at least 1, not 0"):
        numbered([2]).cut(0)


def test_join_leaves_apart_what_does_not_continue():
    def joined(**second):
        exp = numbered([2, 3], episode_id=["a", second.pop("episode_id", "a")], t_start=[4, second.pop("t_start", 6)])
        return len(Experience(exp.steps, exp.offsets, exp.segments.replace(**second), exp.final_obs).join())

    assert joined() == 1
    assert joined(episode_id="b") == 2
    assert joined(t_start=7) == 2
    assert joined(lookback=np.array([0, 1])) == 2
    assert joined(lookback=np.array([1, 0])) == 1
    assert joined(terminated=np.array([True, False])) == 2
    assert joined(truncated=np.array([False, True])) == 1
    assert joined(agent_id=np.array([None, "red"], object)) == 2


def test_it_shows_what_it_holds():
    exp = numbered([2, 1], terminated=[True, False], truncated=[False, True])
    assert repr(exp) == (
        "Experience(2 segments, 3 steps: obs float32, action int64, reward float64; terminated 1, truncated 1)"
    )


@given(either(whole=True, min_steps=1))
def test_drawn_experiences_are_valid(exp):
    exp.validate(finite=())


def test_nothing_at_all_goes_through_everything():
    empty = numbered([2])[0:0]
    empty.validate()
    assert empty.num_steps == len(empty) == len(empty.returns()) == 0
    assert [len(x) for x in (empty.t(), empty.trained(), empty.next_obs()["obs"])] == [0, 0, 0]
    assert list(empty.episodes()) == list(empty) == list(empty.minibatches(3)) == []
    assert_same(Experience.from_table(empty.to_table()), empty)
    for other in (empty.cut(3), empty.join(), empty.split(0)[1], empty.select([]), empty.cut(3, lookback=2)):
        assert_same(other, empty)
    assert_same(Experience.concat([empty, numbered([2])]), numbered([2]))


def test_numbers_of_parts_that_can_not_be_are_refused():
    exp = numbered([3, 2, 4])
    with pytest.raises(ValueError, match="lookback at least 0, not -1"):
        exp.cut(3, lookback=-1)
    with pytest.raises(ValueError, match="epochs at least 0, not -1"):
        next(exp.minibatches(2, epochs=-1))
    with pytest.raises(TypeError, match="several segments are experience.select"):
        exp[np.array([True, False, True])]
    assert_same(exp.select(1), exp[1])
    with pytest.raises(ValueError, match="1 ids for 3 segments: give one for each"):
        Segments.of(3, episode_id=["x"])
