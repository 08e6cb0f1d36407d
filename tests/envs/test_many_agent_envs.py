# SPDX-License-Identifier: Apache-2.0
"""Which env is run by which copy, and how; PettingZoo's own games and checks; the toy envs are what they say."""

import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from many_agent_envs import CartPoles, Nim, TwoJobs
from many_agent_scripts import Rounds, Scene, ScriptedDicts
from pettingzoo.utils import conversions, wrappers

from etude.envs.adapters import AgentStep, GymAdapter
from etude.envs.env_state import capture_env, restore_env
from etude.envs.multi_agent import AECAdapter, DictAdapter, ManyAgentsAdapter, ParallelAdapter, adapt_env
from etude.errors import EnvError


def test_copy_of_tells_apis_apart() -> None:
    assert isinstance(adapt_env(CartPoles()), ParallelAdapter)
    assert isinstance(adapt_env(Nim()), AECAdapter)
    assert isinstance(adapt_env(wrappers.OrderEnforcingWrapper(Nim())), AECAdapter)
    assert isinstance(adapt_env(conversions.parallel_to_aec(CartPoles())), AECAdapter)
    assert isinstance(adapt_env(TwoJobs()), DictAdapter)
    assert isinstance(adapt_env(gym.make("CartPole-v1")), GymAdapter)

    class AsOtherFrameworksHaveIt(TwoJobs, gym.Env[Any, Any]):
        pass

    assert isinstance(adapt_env(AsOtherFrameworksHaveIt()), DictAdapter)
    with pytest.raises(
        EnvError, match=r"builtins\.dict is not an env: neither .* `possible_agents`, `reset` and `step`"
    ):
        adapt_env({})


def test_pettingzoo_is_not_imported_for_other_envs() -> None:
    code = (
        "import sys\nsys.modules['pettingzoo'] = None  # as if it were not installed\n"
        "import gymnasium as gym\nfrom etude.envs.multi_agent import adapt_env\n"
        "print(type(adapt_env(gym.make('CartPole-v1'))).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "GymAdapter", done.stderr


def test_spaces_of_each_agent() -> None:
    copy = adapt_env(TwoJobs())
    assert copy.agents == ("echo", "aim")
    assert [space.shape for space in copy.obs_spaces] == [(2,), (1,)]
    assert copy.action_spaces == (spaces.Discrete(2), spaces.Box(-1, 1, (1,), np.float32))


def test_ids_need_not_be_strings() -> None:
    class Numbers(ScriptedDicts):
        def obs(self) -> dict[Any, Any]:
            return {7: np.array([0, self.t])}

    env = Numbers((7,), [Scene(()), Scene((), {7: 1.5}, {7: (True, False)})])  # type: ignore[arg-type, dict-item]
    env.step = lambda action: ({7: [0, 1]}, {7: action[7] + 0.5}, {7: True}, {}, {})  # type: ignore[method-assign]
    copy = DictAdapter(env)
    assert copy.agents == ("7",)
    copy.reset(None)
    assert copy.step({0: 1}) == [AgentStep(0, [0, 1], 1.5, True, False, False)]


@pytest.mark.parametrize("make", [CartPoles, Nim, lambda: conversions.parallel_to_aec(CartPoles(2)), TwoJobs])
def test_seed_fixes_the_episode(make: Any) -> None:
    def observed() -> list[list[float]]:
        copy = adapt_env(make())
        rows, found = copy.reset(5), []
        while not copy.over:
            found += [np.ravel(row.obs).tolist() for row in rows]
            rows = copy.step({r.agent: action_for(copy, r.agent) for r in rows if not (r.terminated or r.truncated)})
        return found

    assert observed() == observed()


def action_for(copy: ManyAgentsAdapter, agent: int) -> Any:
    return 0 if isinstance(copy.action_spaces[agent], spaces.Discrete) else np.zeros(1, np.float32)


def test_state_of_a_copy_is_plain() -> None:
    """A snapshot in the middle of an episode: what agents are owed, and who waits, goes on as if nothing were."""

    def run(copy: Any, rows: list[AgentStep]) -> list[Any]:
        seen = []
        while not copy.over:
            seen += [(row.agent, row.reward, row.terminated, row.truncated) for row in rows]
            rows = copy.step({r.agent: 0 for r in rows if not (r.terminated or r.truncated)})
        return seen + [(row.agent, row.reward, row.terminated, row.truncated) for row in rows]

    for make in (lambda: ParallelAdapter(CartPoles(2)), lambda: AECAdapter(Nim(12)), lambda: DictAdapter(Late())):
        copy = make()
        copy.reset(3)
        rows = copy.step(dict.fromkeys(copy.waiting, 0))
        state = capture_env(copy)
        assert state["how"] == "snapshot", state
        other = make()
        other.reset(4)
        restore_env(other, state)
        assert run(other, rows) == run(copy, rows)


class Late:
    """b is paid all along, but acts at the end only."""

    possible_agents = ("a", "b")
    observation_spaces = action_spaces = dict.fromkeys(possible_agents, spaces.Discrete(9))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return {"a": 0, "b": 0}, {}

    def step(self, action: dict[str, Any]) -> Any:
        self.t += 1
        shown = {"a": self.t} if self.t < 4 else {"a": self.t, "b": self.t}
        return shown, {"b": 1.0 + self.t}, {}, {"__all__": self.t == 6}, {}


def test_close_is_passed_on_where_there_is_one() -> None:
    env = Rounds(0)
    AECAdapter(env).close()
    assert env.is_closed
    DictAdapter(TwoJobs()).close()


@pytest.fixture
def quiet() -> Iterator[None]:
    """PettingZoo's tests warn of what a toy need not have, such as render(), and of modules of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("quiet")
def test_toys_keep_to_pettingzoos_rules() -> None:
    from pettingzoo.test import api_test, parallel_api_test

    api_test(Nim(), num_cycles=100)
    api_test(Rounds(5), num_cycles=100)
    api_test(conversions.parallel_to_aec(CartPoles(3)), num_cycles=100)
    parallel_api_test(CartPoles(3), num_cycles=100)


def test_cart_poles_are_gymnasiums() -> None:
    env, theirs = CartPoles(2), gym.make("CartPole-v1").unwrapped
    env.reset(seed=1)
    for agent in env.possible_agents:
        obs, _ = env.reset(seed=2)
        theirs.reset()
        theirs.state = tuple(env.state[agent])  # type: ignore[attr-defined]
        done = False
        while not done:
            action = int(obs[agent][2] + obs[agent][3] < 0.01)
            obs, reward, done_of, _, _ = env.step(dict.fromkeys(env.agents, action))
            want, _, done, _, _ = theirs.step(action)
            np.testing.assert_allclose(obs[agent], want, rtol=1e-5)
            assert (reward[agent], done_of[agent]) == (1.0, done)


def test_nim_pays_winner_and_loser() -> None:
    env = Nim()
    copy = AECAdapter(env)
    for seed in range(20):
        (row,) = copy.reset(seed)
        assert row.obs[env.heap] == 1
        can_win = env.heap % 4 != 0
        total = [0.0, 0.0]
        while not copy.over:  # the first player plays right, the other takes one
            rows = copy.step({row.agent: (env.heap - 1) % 4 % 3 if row.agent == 0 else 0})
            row = rows[-1]
            for last in rows:
                total[last.agent] += last.reward
        assert total[0] == 1.0 or not can_win
        assert total[1] == (-total[0] if copy.env_t > 1 else 0.0)  # who never acts has no step to be paid for


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", ["tictactoe_v3", "rps_v2", "connect_four_v3"])
def test_classics_of_pettingzoo(name: str) -> None:
    pytest.importorskip("pygame", reason="PettingZoo's classic games draw with pygame")
    env = importlib.import_module(f"pettingzoo.classic.{name}").env()
    copy = adapt_env(env)
    rng = np.random.default_rng(0)
    for _ in range(5):
        rows, total = copy.reset(0), np.zeros(2)
        while not copy.over:
            obs = rows[-1].obs
            mask = obs["action_mask"] if isinstance(obs, dict) else np.ones(copy.action_spaces[0].n)
            rows = copy.step({rows[-1].agent: int(rng.choice(np.flatnonzero(mask)))})
            for row in rows:
                total[row.agent] += row.reward
        assert total.sum() == 0
        assert {row.agent for row in rows} == {0, 1}
        assert all(row.terminated or row.truncated for row in rows)


@pytest.mark.usefixtures("quiet")
def test_illegal_move_ends_the_game_for_both() -> None:
    pytest.importorskip("pygame", reason="PettingZoo's classic games draw with pygame")
    copy = adapt_env(importlib.import_module("pettingzoo.classic.tictactoe_v3").env())
    copy.reset(0)
    copy.step({0: 4})
    rows = copy.step({1: 4})
    assert {row.agent: row.reward for row in rows} == {0: 0.0, 1: -1.0}
    assert all(row.terminated and row.truncated for row in rows)
    assert copy.over


def test_rewards_while_others_leave_are_kept() -> None:
    class Inheritance(Nim):
        def _was_dead_step(self, action: Any) -> None:
            super()._was_dead_step(action)
            self.rewards = dict.fromkeys(self.agents, 5.0)

    copy = AECAdapter(Inheritance(5))
    for seed in range(5):
        (row,) = copy.reset(seed)
        total = [0.0, 0.0]
        while not copy.over:
            rows = copy.step({row.agent: 0})
            row = rows[-1]
            for row in rows:
                total[row.agent] += row.reward
        assert copy.env_t == 1 or sum(total) == 5.0


def test_episodes_in_which_nobody_acts_are_passed_over() -> None:
    class Rare(ScriptedDicts):
        seeds: list[int | None] = []  # noqa: RUF012

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.seeds.append(seed)
            super().reset()
            return ({} if seed is not None else self.obs()), {}

        def step(self, action: Any) -> Any:
            self.t += 1
            return {}, {}, {"__all__": True}, {}, {}

    env = Rare(("a",), [Scene(("a",)), Scene(())])
    copy = DictAdapter(env)
    assert [(row.first, copy.env_t) for row in copy.reset(7)] == [(True, 0)]
    assert env.seeds == [7, None]
