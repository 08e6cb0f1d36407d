# SPDX-License-Identifier: Apache-2.0
"""A replay that goes on from another's state goes on exactly as that one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_replay import lives
from some_experience import assert_same, bits, numbered

from etude.checkpoints.codec import Encoder, decode
from etude.errors import CheckpointError
from etude.experience import Experience, Priorities, Replay, Segments


def through_a_checkpoint(state):
    encoder = Encoder()
    data = encoder.encode(state)
    return decode(data, {name: array.copy() for name, array in encoder.arrays.items()})


def assert_draw_the_same(a: Replay, b: Replay) -> None:
    assert (a.num_steps, a.num_added) == (b.num_steps, b.num_added)
    if a.num_steps:
        assert_same(a.sample_sequences(9, 4, 2), b.sample_sequences(9, 4, 2))
    if a.can_sample(1):
        x, y = a.sample(30), b.sample(30)
        assert {name: bits(column) for name, column in x.items()} == {name: bits(column) for name, column in y.items()}
        if a.priorities is not None:
            for replay in (a, b):
                replay.update_priorities(x["index"], np.abs(x["reward"]))


@given(
    lives(),
    lives(),
    st.integers(1, 30),
    st.integers(1, 3),
    st.sampled_from([None, Priorities()]),
    st.booleans(),
)
def test_the_next_draws_are_the_same(tmp_path_factory, before, after, capacity, n_step, priorities, is_mapped):
    settings = {"n_step": n_step, "priorities": priorities}
    replay = Replay(capacity, seed=0, path=tmp_path_factory.mktemp("a") if is_mapped else None, **settings)
    other = Replay(capacity, seed=1, path=tmp_path_factory.mktemp("b") if is_mapped else None, **settings)
    other.add(after[0])  # to be forgotten
    for exp in before:
        replay.add(exp)
        if replay.can_sample(1):
            batch = replay.sample(5)
            if priorities is not None:
                replay.update_priorities(batch["index"], np.abs(batch["reward"]))
    state = replay.state_dict()
    kept = through_a_checkpoint(state)
    for exp in after[:2]:  # the state is a copy: it does not change with the replay
        replay.add(exp)
    replay.load_state_dict(state)
    other.load_state_dict(kept)
    assert_draw_the_same(replay, other)
    for exp in [*before[-2:], *after]:
        for each in (replay, other):
            each.add(exp)
        assert_draw_the_same(replay, other)


def test_which_step_follows_which_is_found_again_when_rows_of_the_table_were_used_again() -> None:
    rng = np.random.default_rng(0)
    replay = Replay(17, n_step=2, seed=0)
    for i in range(60):
        replay.add(numbered(rng.integers(1, 6, 2), episode_id=[f"e{i}-0", f"e{i}-1"], terminated=rng.random(2) < 0.8))
        other = Replay(17, n_step=2, seed=1)
        other.load_state_dict(through_a_checkpoint(replay.state_dict()))
        assert_draw_the_same(replay, other)


def test_an_empty_one_has_a_state_too() -> None:
    replay, other = Replay(10, seed=0), Replay(10, seed=1)
    other.load_state_dict(through_a_checkpoint(replay.state_dict()))
    for each in (replay, other):
        each.add(numbered([4]))
    assert_draw_the_same(replay, other)


@pytest.mark.parametrize("num_added", [30_000, 100_000])
def test_it_is_within_ten_percent_of_the_raw_arrays(num_added: int) -> None:
    """The rows of Pendulum, 8 envs in turns, episodes of 200 steps."""
    replay, turns = Replay(50_000, seed=0), num_added // 8
    slots = np.tile(np.arange(8), turns)
    t = np.repeat(np.arange(turns), 8)
    rng = np.random.default_rng(0)
    obs = rng.random((8 * turns, 3)).astype(np.float32)
    steps = {"obs": obs, "action": obs[:, :1], "reward": obs[:, 0].astype(np.float64)}
    segments = Segments.of(
        8 * turns,
        episode_id=[f"0123456789abcdef-{slot + t // 200 * 8}" for slot, t in zip(slots, t, strict=True)],
        t_start=t % 200,
        truncated=t % 200 == 199,
    )
    replay.add(Experience(steps, np.arange(8 * turns + 1), segments, {"obs": obs}))
    state = replay.state_dict()
    raw = sum(column[: replay.num_steps].nbytes for column in steps.values())
    assert raw < size(state) < 1.1 * raw
    other = Replay(50_000, seed=1)
    other.load_state_dict(state)
    assert_draw_the_same(replay, other)


def size(state) -> int:
    if isinstance(state, dict):
        return sum(map(size, state.values()))
    return state.nbytes if isinstance(state, np.ndarray) else len(str(state))


def test_a_state_of_another_alpha_has_the_weights_that_its_priorities_have_with_this_one() -> None:
    def filled(alpha: float) -> Replay:
        replay = Replay(10, priorities=Priorities(alpha=alpha), seed=0)
        replay.add(numbered([8]))
        replay.update_priorities(np.arange(4), np.array([1e-9, 0.1, 3.0, 40.0]))
        return replay

    def weights(replay: Replay) -> list[float]:
        replay.add(numbered([2], episode_id=["new"]))  # with the greatest priority so far
        return replay.state_dict()["priorities"]["weights"].tolist()

    state = through_a_checkpoint(filled(1.0).state_dict())
    for alpha in (0.0, 0.3, 1.0, 2.0, 900.0):
        replay = Replay(10, priorities=Priorities(alpha=alpha))
        replay.load_state_dict(state)
        assert weights(replay) == pytest.approx(weights(filled(alpha)), rel=1e-5)
    older = through_a_checkpoint(filled(0.3).state_dict())
    del older["priorities"]["alpha"]  # as before it was saved
    replay = Replay(10, priorities=Priorities(alpha=0.3))
    replay.load_state_dict(older)
    assert weights(replay) == weights(filled(0.3))
    uniform = filled(0.0).state_dict()
    Replay(10, priorities=Priorities(alpha=0.0)).load_state_dict(uniform)
    with pytest.raises(CheckpointError, match=r"saved with a priority alpha of 0, .* but this one has 0\.3"):
        replay.load_state_dict(uniform)


def test_a_state_of_another_kind_of_replay_is_refused() -> None:
    replay = Replay(10, seed=0)
    replay.add(numbered([4]))
    state = replay.state_dict()
    with pytest.raises(CheckpointError, match="saved with a capacity of 10 steps, but this one has 11"):
        Replay(11).load_state_dict(state)
    with pytest.raises(CheckpointError, match="saved without priorities, but this one is with priorities"):
        Replay(10, priorities=Priorities()).load_state_dict(state)
    with pytest.raises(CheckpointError, match="saved with priorities, but this one is without priorities"):
        replay.load_state_dict(Replay(10, priorities=Priorities()).state_dict())
    broken = {**state, "storage": {**state["storage"], "trajectory": state["storage"]["trajectory"][:-1]}}
    with pytest.raises(CheckpointError, match=r"is broken: it has 4 steps, .* columns \{'trajectory': 3\}"):
        Replay(10).load_state_dict(broken)
    broken = {**state, "storage": {**state["storage"], "trajectory": np.array([0, 0, 1, 0], np.uint8)}}
    with pytest.raises(CheckpointError, match="is broken: it has 4 steps"):
        Replay(10).load_state_dict(broken)
