# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_experience import check_segments, life, lived, module_for, numbers
from some_envs import LendingVectorEnv, Numbered, length_of, numbered, reward_of

from etude.connectors import Pipeline
from etude.envs import Columns, Turn, VectorArena
from etude.errors import EtudeError
from etude.experience import Experience
from etude.modules import make_module
from etude.runners import Runner

MODES = tuple(AutoresetMode)
KINDS: dict[str, Callable[[int, AutoresetMode], Any]] = {
    "sync": numbered,
    "dict": lambda n, mode: numbered(n, mode, "dict"),
    "tuple": lambda n, mode: numbered(n, mode, "tuple"),
    "lending": LendingVectorEnv,
}


def runner_on(kind: str, num_envs: int, mode: AutoresetMode, seed: int = 3) -> Runner:
    arena = VectorArena(KINDS[kind](num_envs, mode), num_envs)
    return Runner(arena, module_for(arena), seed=seed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_envs", [1, 4])
def test_no_step_is_invented_lost_or_credited_to_the_wrong_episode(
    kind: str, mode: AutoresetMode, num_envs: int
) -> None:
    runner = runner_on(kind, num_envs, mode)
    parts = []
    for num_steps in (1, 3, 7, 100, 1, 1, 2, 5, 64, 3):
        exp = runner.collect(num_steps=num_steps)
        assert exp.num_steps == num_steps
        check_segments(exp)
        parts.append(exp)
    whole = Experience.concat(parts)
    for copy in range(num_envs):
        steps = lived(whole, copy)
        assert steps == life(copy, len(steps))
    rows = numbers(whole)
    ids = dict(zip(whole.segments.episode_id, map(tuple, rows[whole.offsets[:-1]][:, :2].tolist()), strict=True))
    assert len(set(ids.values())) == len(ids)
    finished = runner.take_finished()
    ended = sorted((length, round(total)) for total, length in zip(finished.returns, finished.lengths, strict=True))
    expected = []
    for copy, episode in ids.values():
        length = length_of(copy, episode)
        if (episode, length - 1) in lived(whole, copy):
            expected.append((length, round(sum(reward_of(copy, episode, t) for t in range(length)))))
    assert ended == sorted(expected)
    assert len(runner.take_finished().returns) == 0


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=15)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 4))
def test_many_collections_joined_are_one(mode: AutoresetMode, pieces: list[int], num_envs: int) -> None:
    runner = runner_on("lending", num_envs, mode)
    parts = [runner.collect(num_steps=n) for n in pieces]
    long = runner_on("lending", num_envs, mode).collect(num_steps=sum(pieces) + 3 * num_envs)
    whole = Experience.concat(parts)
    for copy in range(num_envs):
        mine = whole.select(numbers(whole)[whole.offsets[:-1], 0] == copy).join()
        if not mine.num_steps:
            continue
        mine.validate()
        theirs = long.select(numbers(long)[long.offsets[:-1], 0] == copy).split(mine.num_steps)[0]
        assert mine.num_steps == theirs.num_steps
        np.testing.assert_array_equal(mine.offsets, theirs.offsets)
        for name in ("t_start", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(mine.segments, name), getattr(theirs.segments, name))
        for name in ("obs", "reward"):
            np.testing.assert_array_equal(mine.steps[name], theirs.steps[name])
        np.testing.assert_array_equal(mine.final_obs["obs"], theirs.final_obs["obs"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_whole_episodes_dealt_out_beforehand(kind: str, mode: AutoresetMode) -> None:
    runner = runner_on(kind, 3, mode)
    exp = runner.collect(num_episodes=8)
    check_segments(exp)
    assert exp.num_segments == 8
    assert exp.segments.done.all()
    assert (exp.segments.t_start == 0).all()
    assert len(set(exp.segments.episode_id)) == 8
    first = numbers(exp)[exp.offsets[:-1], :2].tolist()
    assert first == [[c, e] for c, share in enumerate((3, 3, 2)) for e in range(share)]  # whatever their lengths
    finished = runner.take_finished()
    np.testing.assert_array_equal(finished.lengths, exp.lengths)
    np.testing.assert_allclose(finished.returns, exp.returns())


def test_short_episodes_are_not_favoured() -> None:
    class Mixed(Numbered):
        """Every second copy has episodes ten times as long."""

        def step(self, action: Any) -> Any:
            self.t += 1
            return self.obs(), 1.0, self.t >= (20 if self.copy % 2 else 2), False, {}

    made = iter(range(100))
    arena = VectorArena(lambda: Mixed(next(made)), 4)
    exp = Runner(arena, module_for(arena), seed=0).collect(num_episodes=12)
    assert sorted(exp.lengths.tolist()) == [2] * 6 + [20] * 6


@pytest.mark.parametrize("mode", MODES)
def test_fewer_episodes_than_slots(mode: AutoresetMode) -> None:
    exp = runner_on("lending", 4, mode).collect(num_episodes=2)
    check_segments(exp)
    assert numbers(exp)[exp.offsets[:-1], 0].tolist() == [0, 1]


@pytest.mark.parametrize("mode", MODES)
def test_episodes_between_steps_abandon_what_ran(mode: AutoresetMode) -> None:
    runner = runner_on("lending", 3, mode)
    before = runner.collect(num_steps=7)
    whole = runner.collect(num_episodes=4)
    after = runner.collect(num_steps=11)
    again = runner.collect(num_steps=11)
    for exp in (before, whole, after, again):
        check_segments(exp)
    assert whole.segments.done.all()
    assert (after.segments.t_start == 0).all()
    ids = [set(exp.segments.episode_id) for exp in (before, whole, after)]
    assert not ids[0] & ids[1]
    assert not ids[1] & ids[2]
    joined = Experience.concat([after, again])
    for copy in range(3):
        steps = lived(joined, copy)
        assert steps == life(copy, len(steps), first=steps[0][0])


def test_a_collection_that_is_broken_off_does_not_leave_a_gap() -> None:
    runner = runner_on("lending", 2, AutoresetMode.NEXT_STEP)
    runner.collect(num_steps=5)
    send, sent = runner.arena.send, []

    def breaks(turn: Turn, action: Columns) -> None:
        sent.append(action)
        if len(sent) == 3:
            raise KeyboardInterrupt
        send(turn, action)

    runner.arena.send = breaks  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        runner.collect(num_steps=20)
    runner.arena.send = send  # type: ignore[method-assign]
    exp = runner.collect(num_steps=20)
    check_segments(exp)
    assert (exp.segments.t_start == 0).all()


def test_equal_seeds_give_equal_experience_bit_for_bit() -> None:
    def collected(seed: int) -> list[Experience]:
        arena = VectorArena("CartPole-v1", 5)
        runner = Runner(arena, make_module(None, arena.obs_space, arena.action_space), seed=seed)
        for p in runner.module.parameters():
            p.data.fill_(0.1)
        return [runner.collect(num_steps=99), runner.collect(num_episodes=7), runner.collect(num_steps=31)]

    def equal(a: Experience, b: Experience) -> bool:
        return (
            all(np.array_equal(a.steps[name], b.steps[name]) for name in a.steps)
            and a.steps.keys() == b.steps.keys()
            and np.array_equal(a.offsets, b.offsets)
            and np.array_equal(a.segments.episode_id, b.segments.episode_id)
            and np.array_equal(a.final_obs["obs"], b.final_obs["obs"])
        )

    pairs = list(zip(collected(4), collected(4), strict=True))
    assert all(equal(a, b) for a, b in pairs)
    assert not equal(collected(5)[0], pairs[0][0])


def test_greedy_takes_the_mode_and_says_so() -> None:
    arena = VectorArena("CartPole-v1", 2)
    runner = Runner(arena, make_module(None, arena.obs_space, arena.action_space), seed=1)
    exp = runner.collect(num_steps=40, explore=False)
    np.testing.assert_array_equal(exp.steps["action"], exp.steps["dist_inputs"].argmax(1))
    assert not exp.steps["logp"].any()
    assert set(exp.steps) == {"obs", "action", "dist_inputs", "reward", "logp", "value"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "num_steps or num_episodes: one of them"),
        ({"num_steps": 1, "num_episodes": 1}, "num_steps or num_episodes: one of them"),
        ({"num_steps": 0}, "at least one step or episode, not 0"),
        ({"num_episodes": -1}, "at least one step or episode, not -1"),
    ],
)
def test_messages(asked: dict[str, int], message: str) -> None:
    with pytest.raises(EtudeError, match=message):
        runner_on("lending", 1, AutoresetMode.NEXT_STEP).collect(**asked)


def test_given_connectors_may_be_none() -> None:
    arena = VectorArena("CartPole-v1", 2)
    runner = Runner(arena, module_for(arena), Pipeline([]), seed=1)
    assert runner.collect(num_steps=3).num_steps == 3
