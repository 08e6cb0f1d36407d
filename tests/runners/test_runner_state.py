# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from some_envs import LendingVectorEnv, Simulated, Stateful

from etude.checkpoints import load_tree, save_tree
from etude.connectors import Pipeline
from etude.envs import make_arena
from etude.errors import CheckpointError
from etude.experience import Experience
from etude.modules import make_module
from etude.policies import Policy
from etude.runners import Runner

CONNECTORS = ("frame_stack:2", "normalize_obs", "prev_action_reward")


def make_runner(env: Any, num_envs: int, connectors: Any = (), seed: int = 1) -> Runner:
    arena = make_arena(env, num_envs)
    pipeline = Pipeline(connectors)
    spaces = pipeline.spaces(*arena.kinds[0][:2])
    torch.manual_seed(0)
    return Runner(arena, Policy(make_module(None, *spaces), pipeline), seed=seed)


def assert_equal(a: Experience, b: Experience) -> None:
    assert a.steps.keys() == b.steps.keys()
    for name in a.steps:
        np.testing.assert_array_equal(a.steps[name], b.steps[name])
    for name in a.final_obs:
        np.testing.assert_array_equal(a.final_obs[name], b.final_obs[name])
    np.testing.assert_array_equal(a.offsets, b.offsets)
    for name in ("episode_id", "t_start", "lookback", "terminated", "truncated"):
        np.testing.assert_array_equal(getattr(a.segments, name), getattr(b.segments, name))


def go_on(runner: Runner) -> list[Experience]:
    parts = []
    for num_steps in (5, 40, 1, 33):
        parts.append(runner.collect(num_steps=num_steps))
        runner.policies[None].connectors.update(parts[-1])
    return [*parts, runner.collect(num_episodes=3), runner.collect(num_steps=4)]


ENVS: dict[str, Any] = {
    "CartPole": lambda: "CartPole-v1",
    "Acrobot": lambda: "Acrobot-v1",
    "same step": lambda: LendingVectorEnv(3, AutoresetMode.SAME_STEP),
    "next step": lambda: LendingVectorEnv(3, AutoresetMode.NEXT_STEP),
    "get_state": lambda: Stateful,
}


@pytest.mark.parametrize("connectors", [(), CONNECTORS], ids=["bare", "connectors"])
@pytest.mark.parametrize("name", ENVS)
def test_a_fresh_runner_goes_on_bit_for_bit(name: str, connectors: Any, tmp_path: Path) -> None:
    runner = make_runner(ENVS[name](), 3, connectors)
    for num_steps in (17, 22):
        runner.policies[None].connectors.update(runner.collect(num_steps=num_steps))
    save_tree(tmp_path, runner.state_dict())
    expected = [*go_on(runner), runner.take_finished()]
    other = make_runner(ENVS[name](), 3, connectors, seed=2)
    how = other.load_state_dict(load_tree(tmp_path)[0])
    assert how == ("get_state" if name == "get_state" else "snapshot")
    found = [*go_on(other), other.take_finished()]
    for a, b in zip(expected[:-1], found[:-1], strict=True):
        assert_equal(a, b)
    np.testing.assert_array_equal(expected[-1].returns, found[-1].returns)
    np.testing.assert_array_equal(expected[-1].lengths, found[-1].lengths)


def test_before_the_first_collection(tmp_path: Path) -> None:
    runner = make_runner("CartPole-v1", 2)
    save_tree(tmp_path, runner.state_dict())
    other = make_runner("CartPole-v1", 2, seed=9)
    assert other.load_state_dict(load_tree(tmp_path)[0]) == "no episode was running"
    for a, b in zip(go_on(runner), go_on(other), strict=True):
        assert_equal(a, b)


def test_what_cannot_be_captured_begins_anew_with_ids_of_its_own() -> None:
    runner = make_runner(Simulated, 2)
    before = runner.collect(num_steps=9)
    other = make_runner(Simulated, 2)
    how = other.load_state_dict(runner.state_dict())
    assert how.startswith("new episodes: list[0].env.simulator is a builtins:range_iterator")
    after = other.collect(num_steps=9)
    assert (after.segments.t_start == 0).all()
    assert not set(before.segments.episode_id) & set(after.segments.episode_id)


def test_other_numbers_of_slots_begin_anew_and_keep_what_connectors_learned() -> None:
    runner = make_runner("CartPole-v1", 4, CONNECTORS)
    runner.policies[None].connectors.update(runner.collect(num_steps=50))
    other = make_runner("CartPole-v1", 3, CONNECTORS)
    assert other.load_state_dict(runner.state_dict()) == "new episodes: there were 4 slots, and now there are 3"
    exp = other.collect(num_steps=20)
    assert (exp.segments.t_start == 0).all()
    learned = [
        r.policies[None].connectors.state_dict()["connectors"][1]["state"]["obs"]["mean"] for r in (runner, other)
    ]
    np.testing.assert_array_equal(*learned)


def test_other_connectors_are_refused() -> None:
    with pytest.raises(CheckpointError, match="the state is of the connectors"):
        make_runner("CartPole-v1", 2).load_state_dict(make_runner("CartPole-v1", 2, CONNECTORS).state_dict())
