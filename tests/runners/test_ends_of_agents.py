# SPDX-License-Identifier: Apache-2.0
"""Agents that end before their env does, and envs that fail in the middle of an episode."""

import dataclasses
import itertools
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from etude.connectors import Pipeline
from etude.envs import Workers, make_arena
from etude.errors import EnvError
from etude.modules import Output, make_module
from etude.policies import Policy
from etude.runners import Callback, Runner

BOX = spaces.Box(-1, 1, (2,), np.float32)


class Two:
    """Agents a and b: b ends at step 3, and the env at step 10. Every second episode fails at ``fails_at``."""

    possible_agents = ("a", "b")
    fails_at = 0
    num_resets = 0

    def observation_space(self, agent: str) -> Any:
        return BOX

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        type(self).num_resets += 1
        self.number = self.num_resets
        return {agent: np.zeros(2, np.float32) for agent in "ab"}, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.t == self.fails_at and self.number % 2 == 0:
            raise RuntimeError("it fails")
        live = "ab" if self.t <= 3 or self.fails_at else "a"
        obs = {agent: np.zeros(2, np.float32) for agent in live}
        ends = {"b": self.t == 3 and not self.fails_at, "__all__": self.t >= 10}
        return obs, dict.fromkeys(live, 1.0), ends, {"__all__": False}, {}


def test_an_agent_that_ends_early_leaves_nothing_for_its_connectors_to_look_back_at() -> None:
    arena = make_arena(Two, 1)
    kind = arena.kinds[0]
    connectors = {name: Pipeline(["frame_stack:2"]) for name in "ab"}
    modules = {name: make_module(None, *connectors[name].spaces(kind.obs_space, kind.action_space)) for name in "ab"}
    policies = {name: Policy(modules[name], connectors[name]) for name in "ab"}
    runner = Runner(arena, policies, seed=0)
    given: dict[Any, list[int]] = {"a": [], "b": []}
    for _ in range(6):
        for name, exp in runner.collect_each(num_steps=4).items():
            exp.validate()
            given[name].append(int(exp.trained().sum()))
    assert sum(given["a"]) == 24
    assert sum(given["b"]) == 9  # in episodes of 10, 10 and 4 steps


@pytest.mark.filterwarnings("ignore")
def test_the_steps_of_episodes_that_fail_are_counted_and_known_to_callbacks() -> None:
    seen = set()

    class Notes(Callback):
        def on_segment(self, segment: Any, episode: Any) -> None:
            seen.add(episode.t)

    failing = type("Failing", (Two,), {"fails_at": 8})
    arena = make_arena(failing, 1, Workers(max_failure_rate=1.0, max_restarts=100))
    kind = arena.kinds[0]
    runner = Runner(arena, make_module(None, kind.obs_space, kind.action_space), seed=0, callbacks=[Notes()])
    for i in range(3):
        runner.collect(num_steps=17, whole_episodes=True)
        assert runner.env_steps == 17 * (i + 1)
    assert seen == {7, 10}


class Counts(nn.Module):
    """A net whose memory has a name that others may have, too."""

    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def initial_state(self) -> Any:
        return {"t": torch.zeros(1), "number": torch.zeros(1), "action": torch.zeros(1)}

    def forward(self, obs: Any, state: Any) -> Output:
        return Output(self.layer(obs), None, {name: part + obs.shape[1] for name, part in state.items()})


def test_a_memory_may_have_any_names() -> None:
    def runner() -> Runner:
        arena = make_arena("CartPole-v1", 2)
        kind = arena.kinds[0]
        return Runner(arena, make_module(lambda *given: SeesFour(*given), kind.obs_space, kind.action_space), seed=0)

    class SeesFour(Counts):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.layer = nn.Linear(4, 2)

    one, other = runner(), runner()
    one.collect(num_steps=10)
    assert other.load_state_dict(one.state_dict()) == "snapshot"
    expected, found = one.collect(num_steps=8), other.collect(num_steps=8)
    np.testing.assert_array_equal(found.segments.t_start, expected.segments.t_start)
    np.testing.assert_array_equal(found.segments.episode_id, expected.segments.episode_id)
    np.testing.assert_array_equal(found.steps["state_in/t"], expected.steps["state_in/t"])
    assert (expected.segments.t_start == 5).all()


class Late:
    """Episodes of 10 and 3 env steps in turn, whose agent first sees something after one of them."""

    def __init__(self) -> None:
        self.possible_agents = ["a"]
        self.observation_spaces = {"a": spaces.Box(0, 99, (1,), np.float32)}
        self.action_spaces = {"a": spaces.Discrete(2)}
        self.episode = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode += 1
        self.t, self.length = 0, (10, 3)[self.episode % 2]
        return {}, {}

    def step(self, actions: Any) -> Any:
        self.t += 1
        return {"a": np.float32([self.t])}, {"a": 1.0}, {"__all__": self.t == self.length}, {}, {}


@pytest.mark.parametrize("workers", [Workers(), Workers(num_workers=1, mode="thread")])
@pytest.mark.parametrize("count_by", ["env_steps", "agent_steps"])
def test_steps_before_an_agent_is_shown_anything_count(workers: Workers, count_by: Any) -> None:
    env = Late()
    module = make_module(None, env.observation_spaces["a"], env.action_spaces["a"])
    runner = Runner(make_arena(Late, 1, workers), Policy(module), seed=1, count_steps_by=count_by)
    runner.collect(num_steps=100)
    assert runner.take_finished().lengths.tolist()[:6] == [10, 3, 10, 3, 10, 3]
    acted = 0.5 * (9 / 10 + 2 / 3)
    assert runner.env_steps == 100 if count_by == "env_steps" else runner.env_steps > 100 / acted * 0.85
    runner.close()


class Waits(Late):
    """Its agent first sees something after four steps of nine."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.length = 0, 9
        return {}, {}

    def step(self, actions: Any) -> Any:
        obs, *rest = super().step(actions)
        return (obs if self.t >= 4 else {}), *rest


@pytest.mark.parametrize(("max_steps", "length"), [(5, 5), (8, 8), (9, 9), (20, 9)])
def test_steps_before_an_agent_acts_count_for_max_steps(max_steps: int, length: int) -> None:
    env = Waits()
    module = make_module(None, env.observation_spaces["a"], env.action_spaces["a"])
    runner = Runner(make_arena(Waits, 1, Workers(max_steps=max_steps)), Policy(module), seed=1)
    runner.collect(num_episodes=3)
    assert runner.take_finished().lengths.tolist() == [length] * 3
    runner.close()


def test_a_limit_before_any_agent_acts_is_named() -> None:
    env = Waits()
    module = make_module(None, env.observation_spaces["a"], env.action_spaces["a"])
    with pytest.raises(EnvError, match=r"observation to act on\. They end after `max_steps` \(4\) at the latest"):
        Runner(make_arena(Waits, 1, Workers(max_steps=4)), Policy(module), seed=1).collect(num_steps=1)


class Fold:
    """A zero-sum game: ``a`` folds and pays 1, or nothing the first time, so that ``b`` never acts; or ``b`` calls and
    pays 3."""

    is_free = True

    possible_agents = ("a", "b")

    def observation_space(self, agent: str) -> Any:
        return BOX

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {"a": np.zeros(2, np.float32)}, {}

    def step(self, action: Any) -> Any:
        if action.get("a") == 1:
            return {"b": np.zeros(2, np.float32)}, {}, {}, {}, {}
        win = 3.0
        if "a" in action:
            win, self.is_free = 0.0 if self.is_free else -1.0, False
        return {}, {"a": win, "b": -win}, {"__all__": True}, {}, {}


@pytest.mark.parametrize("workers", [Workers(), Workers(num_workers=1, mode="thread")])
def test_returns_include_the_rewards_of_agents_that_never_acted(workers: Workers) -> None:
    def module_of(agent: str, episode: Any) -> str:
        return "xy"[(agent == "b") ^ (episode.number % 2)]

    modules = {name: make_module(None, BOX, spaces.Discrete(2)) for name in "xy"}

    def new_runner() -> Runner:
        return Runner(make_arena(Fold, 3, workers), modules, module_of=module_of, seed=0)

    def play(*, resumes: bool) -> Any:
        runner, played = new_runner(), []
        for _ in range(40):
            if resumes:
                other = new_runner()
                assert other.load_state_dict(runner.state_dict()) != "new episodes"
                runner.close()
                runner = other
            runner.collect(num_steps=3)
            played.append(runner.take_finished())
        runner.close()
        return played

    played = play(resumes=False)
    a, b, x, y = (
        np.concatenate([getattr(one, by)[name] for one in played if len(one.returns)])
        for by, name in [
            ("agent_returns", "a"),
            ("agent_returns", "b"),
            ("module_returns", "x"),
            ("module_returns", "y"),
        ]
    )
    assert {*a} == {-1.0, 0.0, 3.0}
    np.testing.assert_array_equal(b, -a)
    np.testing.assert_array_equal(y, -x)
    assert {*x} == {-1.0, 0.0, 1.0, -3.0, 3.0}
    lengths = np.concatenate([one.lengths for one in played])
    np.testing.assert_array_equal(lengths, np.where(a <= 0, 1, 2))
    assert all((one.returns == 0).all() for one in played)
    if workers.num_workers == 0:
        again = play(resumes=True)
        for one, same in zip(played, again, strict=True):
            np.testing.assert_equal(same.module_returns, one.module_returns)


class HandsOver:
    """Every second episode fails after its only agent has ended, as ``how`` says."""

    possible_agents = ("early", "late", "idle")
    observation_spaces = dict.fromkeys(possible_agents, BOX)
    action_spaces = dict.fromkeys(possible_agents, spaces.Discrete(2))
    num_resets = 0

    def __init__(self, how: str) -> None:
        self.how = how

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        type(self).num_resets += 1
        self.is_bad = self.num_resets % 2 == 0
        return {"early": np.zeros(2, np.float32)}, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if not self.is_bad:
            return {"early": np.full(2, 0.1, np.float32)}, {"early": 1.0}, {"__all__": self.t == 3}, {}, {}
        if self.how == "a bad first observation":
            return {"late": np.full(2, np.nan, np.float32)}, {"early": 100.0}, {"early": True}, {}, {}
        if self.how == "a bad reward of an agent that never acts":
            return {}, {"early": 100.0, "idle": np.nan}, {"__all__": True}, {}, {}
        if self.t == 2:
            raise RuntimeError("it fails")
        return {}, {"early": 100.0}, {"early": True}, {}, {}  # the next step is one without actions


HOW = ("a bad first observation", "a step without agents", "a bad reward of an agent that never acts")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("workers", [Workers(), Workers(num_workers=1), Workers(num_workers=1, mode="thread")])
def test_an_env_that_fails_after_its_agents_ended_cuts_the_episode(how: str, workers: Workers) -> None:
    HandsOver.num_resets = 0
    arena = make_arena(partial(HandsOver, how), 1, dataclasses.replace(workers, max_failure_rate=1.0, max_restarts=50))
    runner = Runner(arena, make_module(None, BOX, spaces.Discrete(2)), seed=0)
    exp = runner.collect(num_episodes=6)
    finished, stats = runner.take_finished(), runner.stats()
    runner.close()
    assert exp.lengths.tolist() == [3] * 6
    assert len({*exp.segments.episode_id}) == 6
    assert finished.returns.tolist() == [3.0] * 6
    assert finished.agent_returns["early"].tolist() == [3.0] * 6
    assert stats["faulty_episodes"] == 5


@pytest.mark.parametrize("how", HOW)
def test_episodes_that_were_cut_have_ids_of_their_own(how: str) -> None:
    HandsOver.num_resets = 0
    arena = make_arena(partial(HandsOver, how), 1, Workers(max_failure_rate=1.0, max_restarts=50))
    runner = Runner(arena, make_module(None, BOX, spaces.Discrete(2)), seed=0)
    exp = runner.collect(num_steps=40)
    runner.close()
    starts = [*zip(exp.segments.episode_id, exp.segments.agent_id, exp.segments.t_start, strict=True)]
    assert len({*starts}) == len(starts) > 10
    assert {exp.steps["reward"][a:b].sum() for a, b in itertools.pairwise(exp.offsets)} <= {1.0, 2.0, 3.0, 100.0}


class DiesAtTheEnd(gym.Env[Any, Any]):
    """Every third episode ends with an observation of NaN, after which the env can't be reset."""

    observation_space = BOX
    action_space = spaces.Discrete(2)
    num_resets = 0
    is_dead = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.is_dead:
            raise RuntimeError("it is dead")
        type(self).num_resets += 1
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.is_dead = self.t == 4 and self.num_resets % 3 == 0
        return np.full(2, np.nan if self.is_dead else 0, np.float32), 1.0, self.t == 4, False, {}


@pytest.mark.parametrize("workers", [Workers(), Workers(num_workers=1), Workers(num_workers=1, mode="thread")])
def test_a_bad_last_observation_before_a_reset_that_fails_cuts_the_episode(workers: Workers) -> None:
    DiesAtTheEnd.num_resets = 0
    arena = make_arena(DiesAtTheEnd, 1, dataclasses.replace(workers, max_failure_rate=1.0, max_restarts=50))
    runner = Runner(arena, make_module(None, BOX, spaces.Discrete(2)), seed=0)
    exp = runner.collect(num_episodes=6)
    finished, stats = runner.take_finished(), runner.stats()
    runner.close()
    assert exp.lengths.tolist() == [4] * 6
    assert finished.returns.tolist() == [4.0] * 6
    assert stats["faulty_episodes"] == 2
