# SPDX-License-Identifier: Apache-2.0
"""What an env says beside, and its object, as callbacks get at them."""

from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from many_agent_envs import CartPoles
from pool_envs import copies_of
from some_envs import LendingVectorEnv, Numbered, length_of

from etude.envs import VectorArena, Workers


class Talks(Numbered):
    """Says how it is and how it began, each copy something of its own, and the second one more than others."""

    def say(self) -> dict[str, Any]:
        said: dict[str, Any] = {"where": {"episode": self.episode, "t": self.t}, "name": f"{self.copy}.{self.t}"}
        if self.copy == 1:
            said["more"] = np.array([self.t, self.copy])
        return said

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, _ = super().reset(seed=seed)
        return obs, self.say() | {"new": True}

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], self.say()


def expected(env: int, episode: int, t: int) -> dict[str, Any]:
    said: dict[str, Any] = {"where": {"episode": episode, "t": t}, "name": f"{env}.{t}"}
    if env == 1:
        said["more"] = [t, 1]
    return said | ({"new": True} if t == 0 else {})


def plain(info: Any) -> Any:
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in info.items()}


def arenas() -> dict[str, Any]:
    vector = {
        mode.name: lambda mode=mode: VectorArena(
            SyncVectorEnv([lambda i=i: Talks(i) for i in range(3)], autoreset_mode=mode), 3
        )
        for mode in AutoresetMode
    }
    copies = iter(range(100))
    return {**vector, "pool": lambda: copies_of(lambda: Talks(next(copies) % 3), num_envs=3)}


@pytest.mark.parametrize("name", arenas())
def test_each_env_says_its_own(name: str) -> None:
    arena = arenas()[name]()
    arena.reset(0)
    ends = 0
    for _ in range(20):
        for turn in arena.recv():
            for row, slot in enumerate(turn.slots.tolist()):
                copy, episode, t = turn.obs["obs"][row].astype(int).tolist()
                assert copy == slot
                assert plain(arena.info_of(turn, slot)) == expected(copy, episode, t)
                ends += t == length_of(copy, episode)
            if turn.waits:
                arena.send(turn, {"action": np.zeros(len(turn.slots), np.int64)})
    assert ends > 10


def test_values_that_are_not_by_env_are_for_all() -> None:
    class Says(LendingVectorEnv):
        def step(self, actions: Any) -> Any:
            return *super().step(actions)[:4], {"level": 3, "x": np.arange(2) * 10, "who": ["a", "b"], "_y": 1}

    arena = VectorArena(Says(2, AutoresetMode.NEXT_STEP), 2)
    arena.reset(0)
    (turn,) = arena.recv()
    assert arena.info_of(turn, 0) == {}
    arena.send(turn, {"action": np.zeros(2, np.int64)})
    (turn,) = arena.recv()
    assert arena.info_of(turn, 1) == {"level": 3, "x": 10, "who": "b", "_y": 1}


def test_agents_are_told_their_own() -> None:
    class Says(CartPoles):
        def step(self, actions: Any) -> Any:
            *others, infos = super().step(actions)
            return *others, {agent: {"me": agent} for agent in infos if agent != "cart_1"}

    arena = copies_of(Says, num_envs=2)
    arena.reset(0)
    (turn,) = arena.recv()
    arena.send(turn, {"action": np.zeros(len(turn.slots), np.int64)})
    (turn,) = arena.recv()
    for slot in turn.slots.tolist():
        agent = arena.agents[slot]
        assert arena.info_of(turn, slot) == ({} if agent == "cart_1" else {"me": agent})


def test_envs_of_this_process_are_at_hand() -> None:
    sync = SyncVectorEnv([Numbered, Numbered])
    assert [VectorArena(sync, 2).env_at(i) for i in range(2)] == list(sync.envs)
    lending = LendingVectorEnv(2, AutoresetMode.NEXT_STEP)
    assert VectorArena(lending, 2).env_at(1) is lending
    for workers in (Workers(), Workers(num_workers=2, mode="thread")):
        arena = copies_of(Numbered, workers, None if workers.num_workers else 2)
        try:
            one, two = arena.env_at(0), arena.env_at(1)
        finally:
            arena.close()
        assert isinstance(one, Numbered)
        assert one is not two


def test_what_workers_have_is_out_of_reach() -> None:
    arena = copies_of(Numbered, Workers(num_workers=1))
    try:
        arena.reset(0)
        (turn,) = arena.recv()
        assert arena.env_at(0) is None
        assert arena.info_of(turn, 0) is None
    finally:
        arena.close()
