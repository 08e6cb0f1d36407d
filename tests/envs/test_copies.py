# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import pytest
from some_envs import Numbered, is_terminated, length_of, reward_of

from etude.envs import InlineArena, Workers
from etude.envs.adapters import GymAdapter
from etude.envs.multi_agent import adapt_env
from etude.errors import EnvError


def test_rows_of_a_gymnasium_env() -> None:
    adapter = adapt_env(Numbered(copy=2))
    assert isinstance(adapter, GymAdapter)
    assert adapter.agents == (None,)
    assert adapter.obs_spaces == (adapter.env.observation_space,)
    assert adapter.action_spaces == (adapter.env.action_space,)
    arena = InlineArena(adapter.env)
    arena.reset()
    (turn,) = arena.recv()
    for episode in range(4):
        assert turn.obs["obs"].tolist() == [[2, episode, 0]]
        assert turn.first is not None
        assert turn.first.tolist() == [True]
        length = length_of(2, episode)
        for t in range(length):
            arena.send(turn, {"action": np.array([1])})
            *ends, turn = arena.recv()
            assert len(ends) == (t + 1 == length)
            for told in ends or [turn]:
                assert told.obs["obs"].tolist() == [[2, episode, t + 1]]
                assert told.reward.tolist() == [reward_of(2, episode, t)]
                assert arena.info_of(told, 0) == {"t": t + 1}
            for end in ends:
                assert end.terminated is not None
                assert end.truncated is not None
                assert (end.terminated[0], end.truncated[0]) == (
                    is_terminated(2, episode),
                    not is_terminated(2, episode),
                )


def test_the_seed_goes_to_the_env() -> None:
    class Seeded(Numbered):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            seeds.append(seed)
            return super().reset(seed=seed, options=options)

    seeds: list[Any] = []
    arena = InlineArena(Seeded)
    arena.reset(seed=7)
    arena.recv()
    assert seeds == [np.random.SeedSequence(7, spawn_key=(0,)).generate_state(1)[0] >> 1]


def test_truncated_from_outside() -> None:
    arena = InlineArena(Numbered, limits=Workers(max_steps=1))
    arena.reset()
    (turn,) = arena.recv()
    arena.send(turn, {"action": np.array([1])})
    end, _ = arena.recv()
    assert end.terminated is not None
    assert end.truncated is not None
    assert (end.obs["obs"][0, 2], end.reward[0], end.terminated[0], end.truncated[0]) == (1, 0.5, False, True)


def test_an_action_that_the_env_took_itself() -> None:
    class Stubborn(Numbered):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], {"off_policy_action": 2}

    arena = InlineArena(Stubborn)
    arena.reset()
    (turn,) = arena.recv()
    arena.send(turn, {"action": np.array([1])})
    taken = arena.recv()[0].taken
    assert taken is not None
    assert (taken[0].tolist(), taken[1]["action"].tolist()) == ([0], [2])


def test_close() -> None:
    closed = []

    class Closing(Numbered):
        def close(self) -> None:
            closed.append(self)

    copy = adapt_env(Closing())
    copy.close()
    assert closed == [copy.env]


def test_what_is_no_env() -> None:
    with pytest.raises(EnvError, match=r"builtins.str is not an env"):
        adapt_env("CartPole-v1")
