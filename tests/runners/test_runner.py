# SPDX-License-Identifier: Apache-2.0
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numbered_experience import check_segments, life, lived, module_for, numbers
from some_envs import LendingVectorEnv, Numbered, length_of, numbered, numbered_in_turn, reward_of

from etude.connectors import Pipeline
from etude.envs import Arena, Columns, InlineArena, PoolArena, Turn, VectorArena, Workers
from etude.errors import EtudeError
from etude.experience import Experience
from etude.modules import make_module
from etude.policies import Policy
from etude.runners import Runner

VECTOR_ENVS: dict[str, Callable[[int, AutoresetMode], Any]] = {
    "sync": numbered,
    "dict": lambda n, mode: numbered(n, mode, "dict"),
    "tuple": lambda n, mode: numbered(n, mode, "tuple"),
    "lending": LendingVectorEnv,
}
VECTORS = [f"{kind} {mode.name}" for kind in VECTOR_ENVS for mode in AutoresetMode]
LENDING = [name for name in VECTORS if name.startswith("lending")]
POOLS: dict[str, dict[str, Any]] = {
    "here": {},
    "threads": {"mode": "thread", "num_workers": 1},
    "processes": {"num_workers": 1},
    "processes in lock-step": {"num_workers": 1, "min_batch": "all"},
}
ARENAS = [*VECTORS, *POOLS, *(f"agents {pool}" for pool in POOLS)]
"""All ways in which copies of `Numbered` can be stepped."""


def arena_of(name: str, num_envs: int, folder: Path) -> Arena:
    """An arena by its name in `ARENAS`."""
    if name in VECTORS:
        kind, mode = name.split()
        return VectorArena(VECTOR_ENVS[kind](num_envs, AutoresetMode[mode]), num_envs)
    settings = dict(POOLS[name.removeprefix("agents ")])
    if settings:
        settings["envs_per_worker"] = num_envs
    if settings.get("min_batch"):
        settings["min_batch"] = num_envs
    folder.mkdir()
    make = functools.partial(numbered_in_turn, str(folder), is_agent=name.startswith("agents"))
    return PoolArena(make, Workers(**settings)) if settings else InlineArena(make, num_envs)


@pytest.fixture
def runner_on(tmp_path: Path) -> Iterator[Callable[[str, int], Runner]]:
    """Makes a runner on an arena by its name, with so many envs, and closes it at the end."""
    made: list[Runner] = []

    def make(name: str, num_envs: int) -> Runner:
        arena = arena_of(name, num_envs, tmp_path / str(len(made)))
        made.append(Runner(arena, module_for(arena.kinds[0]), seed=3))
        return made[-1]

    yield make
    for runner in made:
        runner.arena.close()


Make: TypeAlias = Callable[[str, int], Runner]


@pytest.mark.parametrize("name", ARENAS)
@pytest.mark.parametrize("num_envs", [1, 4])
def test_no_step_is_invented_lost_or_credited_to_the_wrong_episode(runner_on: Make, name: str, num_envs: int) -> None:
    runner = runner_on(name, num_envs)
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


@pytest.mark.parametrize("name", [*LENDING, "here"])
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 4))
def test_many_collections_joined_are_one(runner_on: Make, name: str, pieces: list[int], num_envs: int) -> None:
    runner = runner_on(name, num_envs)
    parts = [runner.collect(num_steps=n) for n in pieces]
    long = runner_on(name, num_envs).collect(num_steps=sum(pieces) + 3 * num_envs)
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


@pytest.mark.parametrize("name", ARENAS)
def test_whole_episodes_dealt_out_beforehand(runner_on: Make, name: str) -> None:
    runner = runner_on(name, 3)
    exp = runner.collect(num_episodes=8)
    check_segments(exp)
    assert exp.num_segments == 8
    assert exp.segments.done.all()
    assert (exp.segments.t_start == 0).all()
    assert len(set(exp.segments.episode_id)) == 8
    first = sorted(numbers(exp)[exp.offsets[:-1], :2].tolist())
    assert first == [[c, e] for c, share in enumerate((3, 3, 2)) for e in range(share)]  # whatever their lengths
    finished = runner.take_finished()
    told = sorted(zip(finished.lengths.tolist(), finished.returns, strict=True))
    np.testing.assert_allclose(told, sorted(zip(exp.lengths.tolist(), exp.returns(), strict=True)))


def test_short_episodes_are_not_favoured() -> None:
    class Mixed(Numbered):
        """Every second copy has episodes ten times as long."""

        def step(self, action: Any) -> Any:
            self.t += 1
            return self.obs(), 1.0, self.t >= (20 if self.copy % 2 else 2), False, {}

    made = iter(range(100))
    arena = InlineArena(lambda: Mixed(next(made)), 4)
    exp = Runner(arena, module_for(arena.kinds[0]), seed=0).collect(num_episodes=12)
    assert sorted(exp.lengths.tolist()) == [2] * 6 + [20] * 6


@pytest.mark.parametrize("name", [*LENDING, *POOLS])
def test_fewer_episodes_than_slots(runner_on: Make, name: str) -> None:
    exp = runner_on(name, 4).collect(num_episodes=2)
    check_segments(exp)
    assert numbers(exp)[exp.offsets[:-1], 0].tolist() == [0, 1]


@pytest.mark.parametrize("name", [*LENDING, *POOLS])
def test_episodes_between_steps_abandon_what_ran(runner_on: Make, name: str) -> None:
    runner = runner_on(name, 3)
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


@pytest.mark.parametrize("name", ["lending NEXT_STEP", *POOLS])
def test_a_collection_that_is_broken_off_does_not_leave_a_gap(runner_on: Make, name: str) -> None:
    runner = runner_on(name, 2)
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
        for p in runner.policies[None].module.parameters():
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
    assert set(exp.steps) == {"obs", "action", "dist_inputs", "reward", "logp"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "either num_steps or num_episodes"),
        ({"num_steps": 1, "num_episodes": 1}, "either num_steps or num_episodes"),
        ({"num_steps": 0}, "at least one step or episode, not 0"),
        ({"num_episodes": -1}, "at least one step or episode, not -1"),
    ],
)
def test_messages(runner_on: Make, asked: dict[str, int], message: str) -> None:
    with pytest.raises(EtudeError, match=message):
        runner_on("lending NEXT_STEP", 1).collect(**asked)


def test_given_connectors_may_be_none() -> None:
    arena = VectorArena("CartPole-v1", 2)
    runner = Runner(arena, Policy(module_for(arena), Pipeline([])), seed=1)
    assert runner.collect(num_steps=3).num_steps == 3
