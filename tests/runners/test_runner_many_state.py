# SPDX-License-Identifier: Apache-2.0
"""The runner's state where slots come at different times: held turns, kept steps, several modules."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_runs import SCENES, Ledger, Marked, play

from etude.checkpoints import load_tree, save_tree
from etude.connectors import FrameStack, Pipeline, PrevActionReward
from etude.experience import Experience

PIECES = (17, 1, 8, 30, 1, 3, 22, -4)
"""Steps to collect; a negative number of episodes."""


def stacked(scene: str, seed: int) -> Ledger:
    """With connectors that remember, each module its own."""
    pipelines = {name: Pipeline([FrameStack(2), PrevActionReward()]) for name in SCENES[scene][1][1]}
    unused = list(pipelines.values())

    def make(arena: Any, kind: int) -> Any:
        return Marked(arena, kind, unused.pop(0).spaces(*arena.kinds[kind][:2]))

    return play(scene, seed, make, connectors=pipelines, count_steps_by="agent_steps")


def bare(scene: str, seed: int) -> Ledger:
    return play(scene, seed)


def collected(run: Ledger, number: int) -> Any:
    """What a collection gives; of each second one, also what ended."""
    run.learn()
    what = {"num_steps": number} if number > 0 else {"num_episodes": -number}
    return run.runner.collect_each(**what), run.runner.take_finished() if number % 2 else None


def assert_same(one: Any, two: Any) -> None:
    assert one[0].keys() == two[0].keys()
    for name in one[0]:
        assert_equal(one[0][name], two[0][name])
    if one[1] is not None:
        np.testing.assert_array_equal(one[1].returns, two[1].returns)
        np.testing.assert_array_equal(one[1].lengths, two[1].lengths)
        for name in ("agent_returns", "module_returns"):
            mine, theirs = getattr(one[1], name), getattr(two[1], name)
            assert {n: v.tolist() for n, v in mine.items()} == {n: v.tolist() for n, v in theirs.items()}


def assert_equal(a: Experience, b: Experience) -> None:
    assert a.steps.keys() == b.steps.keys()
    for name in a.steps:
        np.testing.assert_array_equal(a.steps[name], b.steps[name])
    for name in a.final_obs:
        np.testing.assert_array_equal(a.final_obs[name], b.final_obs[name])
    np.testing.assert_array_equal(a.offsets, b.offsets)
    for name in ("episode_id", "agent_id", "module_id", "t_start", "lookback", "terminated", "truncated"):
        np.testing.assert_array_equal(getattr(a.segments, name), getattr(b.segments, name))


@pytest.mark.parametrize("make", [bare, stacked])
@pytest.mark.parametrize("scene", SCENES)
def test_a_fresh_runner_goes_on_bit_for_bit(scene: str, make: Any, tmp_path: Path) -> None:
    run = make(scene, 1)
    given: list[Any] = []
    for i, number in enumerate(PIECES):
        save_tree(tmp_path / str(i), run.runner.state_dict())
        given.append(collected(run, number))
    assert run.runner.agent_steps > 80
    for i in range(1, len(PIECES)):
        other = make(scene, 2)
        for rollout in other.runner.rollouts.values():
            rollout.module.version = i
        assert other.runner.load_state_dict(load_tree(tmp_path / str(i))[0]) == "get_state"
        for number, expected in zip(PIECES[i : i + 3], given[i : i + 3], strict=False):
            assert_same(expected, collected(other, number))


def test_what_is_kept_is_loaded_too() -> None:
    """Else the test above would hold for want of trying."""
    late = again = 0
    for seed in range(10):
        runner = play("self-play", seed, count_steps_by="agent_steps").runner
        for num_steps in (5, 9, 1):
            runner.collect_each(num_steps=num_steps)
        state = runner.state_dict()
        late += sum(len(share["results"]) for share in state["mapping"]["shares"])
        again += sum(rollout["pending"] for rollout in state["rollouts"])
    assert late > 10
    assert again > 50


@pytest.mark.parametrize("scene", ["pool", "coming and going", "self-play"])
def test_a_runner_that_loads_no_running_episode_gives_other_ids(scene: str, tmp_path: Path) -> None:
    def ids(*parts: Any) -> set[str]:
        return {i for part in parts for exp in part.values() for i in exp.segments.episode_id}

    run = play(scene, 1)
    before = ids(run.runner.collect_each(num_steps=30), run.runner.collect_each(num_episodes=4))
    run.runner.take_finished()
    save_tree(tmp_path, run.runner.state_dict())
    seen = []
    for seed in (1, 2):
        other = play(scene, seed)
        assert other.runner.load_state_dict(load_tree(tmp_path)[0]) == "no episode was running"
        for num_steps in (9, 30, 1):  # checked from scratch
            other.learn()
            other.steps(num_steps)
            other.check_finished()
        assert not before & set(other.ids)
        seen.append(set(other.ids))
    assert seen[0] == seen[1]


def test_a_state_from_before_the_first_collection() -> None:
    run, other = play("self-play", 1), play("self-play", 2)
    assert other.runner.load_state_dict(run.runner.state_dict()) == "no episode was running"
    assert_same(collected(run, 31), collected(other, 31))


def test_an_arena_that_begins_anew() -> None:
    run, other = play("coming and going", 1), play("coming and going", 1)
    for num_steps in (9, 30):
        run.steps(num_steps)
    other.arena.load_state_dict = lambda state: "new episodes: for a test"  # type: ignore[method-assign]
    assert other.runner.load_state_dict(run.runner.state_dict()) == "new episodes: for a test"
    for num_steps in (9, 30):
        other.steps(num_steps)
    assert not set(run.ids) & set(other.ids)


def test_other_numbers_of_slots_begin_anew() -> None:
    run = play("self-play", 1)
    run.steps(50)
    chances, players = SCENES["self-play"]
    other = play(({**chances, "num_envs": 2}, players), 1)
    how = other.runner.load_state_dict(run.runner.state_dict())
    assert how == "new episodes: there were 12 slots, and now there are 8"
    other.steps(50)
    other.check_finished()
    assert not set(run.ids) & set(other.ids)
