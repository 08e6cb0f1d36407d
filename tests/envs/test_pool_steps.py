# SPDX-License-Identifier: Apache-2.0
"""What a pool shows is what its envs did, however they are run."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from pool_envs import KEYS, MODES, Book, Telling, TellingNested, copies_of, fitting, seed_of
from some_envs import Numbered

from etude.envs.copies import CopiesArena
from etude.envs.workers import Workers

ALL = pytest.mark.parametrize("mode", MODES)
EACH_KIND = pytest.mark.parametrize("mode", ["sync", "threads", "processes"])


def arena_of(env: Any, mode: str, num_envs: int = 6) -> CopiesArena:
    return copies_of(env, MODES[mode], num_envs)


@ALL
def test_no_step_is_lost_or_invented_or_another_episodes(mode: str) -> None:
    arena = arena_of(Telling, mode)
    arena.reset(seed=3)
    book = Book(arena, seed=3)
    book.play(40)
    assert book.episodes.min() >= 5
    assert arena.stats()["faulty_episodes"] == 0
    arena.close()


def test_ctrl_c_in_the_middle_of_the_envs_loses_nothing() -> None:
    interrupts = iter([False] * 50 + [True] + [False] * 50 + [True])

    class Interrupted(Telling):
        def step(self, action: Any) -> Any:
            if next(interrupts, False):
                raise KeyboardInterrupt
            return super().step(action)

    arena = copies_of(Interrupted, num_envs=6)
    arena.reset(seed=3)
    book = Book(arena, seed=3)
    with pytest.raises(KeyboardInterrupt):
        book.play(40)
    with pytest.raises(KeyboardInterrupt):
        book.play(40)
    book.play(40)


@EACH_KIND
def test_nested_observations_and_actions(mode: str) -> None:
    arena = arena_of(TellingNested, mode)
    arena.reset(seed=3)

    def flat(columns: Any) -> Any:
        assert columns.keys() == {"obs/when", "obs/who/key"}
        return np.column_stack([columns["obs/who/key"], columns["obs/when"]])

    def action(obs: Any) -> Any:
        return {"action/0": fitting(obs), "action/1": obs[:, [0, 2]]}

    book = Book(arena, 3, flat)
    book.play(15, action)
    assert arena.kinds[0].obs_space == TellingNested.observation_space
    assert arena.kinds[0].action_space == TellingNested.action_space
    arena.close()


@EACH_KIND
def test_what_an_arena_says_of_itself(mode: str) -> None:
    arena = arena_of(Telling, mode)
    assert (arena.num_slots, arena.num_envs, len(arena.kinds)) == (6, 6, 1)
    assert arena.env_of.tolist() == [0, 1, 2, 3, 4, 5]
    assert arena.agents == [None] * 6
    assert arena.kinds[0].slots == range(6)
    arena.close()


@ALL
def test_seeds_do_not_depend_on_workers(mode: str) -> None:
    arena = arena_of(Telling, mode)
    for seed in (3, 4, 3):
        arena.reset(seed)
        keys = {}
        while len(keys) < 6:
            for turn in arena.recv():
                keys |= {slot: obs[0] for slot, obs in zip(turn.slots.tolist(), turn.obs["obs"], strict=True)}
                if turn.waits:
                    arena.send(turn, {"action": fitting(turn.obs["obs"])})
        assert keys == {env: seed_of(seed, env) % KEYS for env in range(6)}
    spawned = np.random.SeedSequence(3).spawn(6)
    assert [keys[env] for env in range(6)] == [(int(s.generate_state(1)[0]) >> 1) % KEYS for s in spawned]
    arena.close()


@EACH_KIND
def test_a_reset_in_the_middle_begins_new_episodes_in_the_same_streams(mode: str) -> None:
    arena = arena_of(Telling, mode)
    arena.reset(seed=3)
    book = Book(arena, seed=3)
    book.play(7)
    arena.reset()
    episodes = {}
    while len(episodes) < 6:
        for turn in arena.recv():
            for slot, (key, episode, t) in zip(turn.slots.tolist(), turn.obs["obs"].tolist(), strict=True):
                if slot not in episodes:
                    assert turn.first is not None
                    assert turn.first[turn.slots.tolist().index(slot)]
                    assert (key, t) == (book.expected[slot][0], 0)
                    episodes[slot] = episode
            if turn.waits:
                arena.send(turn, {"action": fitting(turn.obs["obs"])})
    assert all(episode >= book.expected[slot][1] for slot, episode in episodes.items())
    arena.close()


@EACH_KIND
def test_episodes_are_truncated_after_max_steps(mode: str) -> None:
    workers = Workers(**(vars(MODES[mode]) | {"max_steps": 3}))
    arena = copies_of(Telling, workers, 6)
    arena.reset(seed=3)
    ends: list[tuple[int, bool, bool]] = []
    while len(ends) < 100:
        for turn in arena.recv():
            if turn.waits:
                assert turn.obs["obs"][:, 2].max() < 3
                arena.send(turn, {"action": fitting(turn.obs["obs"])})
            else:
                assert turn.terminated is not None
                assert turn.truncated is not None
                ends += zip(turn.obs["obs"][:, 2], turn.terminated, turn.truncated, strict=True)
    lengths = {int(t) for t, *_ in ends}
    assert lengths == {1, 2, 3}
    assert all(terminated != truncated for _, terminated, truncated in ends)
    assert (3, True, False) in ends, "an episode that ends by itself at that step is not truncated"
    assert (3, False, True) in ends
    arena.close()


@pytest.mark.parametrize("mode", ["sync", "threads"])
def test_infos_are_by_env(mode: str) -> None:
    arena = arena_of(Telling, mode)
    arena.reset(seed=3)
    for _ in range(20):
        for turn in arena.recv():
            for slot, (_, episode, t) in zip(turn.slots.tolist(), turn.obs["obs"].tolist(), strict=True):
                assert turn.infos[slot] == ({"t": t} if t else {"episode": episode})
            if turn.waits:
                arena.send(turn, {"action": fitting(turn.obs["obs"])})
    arena.close()


class Stubborn(Numbered):
    """Takes action 2 at every second step."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated, info | ({"off_policy_action": 2} if self.t % 2 else {})


@EACH_KIND
def test_actions_that_envs_took_themselves(mode: str) -> None:
    arena = arena_of(Stubborn, mode)
    arena.reset(seed=3)
    count = 0
    while count < 60:
        for turn in arena.recv():
            is_first = np.zeros(len(turn.slots), bool) if turn.first is None else turn.first
            rows, action = (np.zeros(0, int), {}) if turn.taken is None else turn.taken
            assert rows.tolist() == np.flatnonzero((turn.obs["obs"][:, 2] % 2 == 1) & ~is_first).tolist()
            assert turn.taken is None or action["action"].tolist() == [2] * len(rows)
            count += len(rows)
            if turn.waits:
                arena.send(turn, {"action": np.zeros(len(turn.slots), np.int64)})
    arena.close()


@EACH_KIND
def test_images_and_other_dtypes(mode: str) -> None:
    arena = arena_of(Picture, mode)
    arena.reset(seed=3)
    for _ in range(5):
        (turn,) = arena.recv()
        assert turn.obs["obs"].dtype == np.uint8
        for slot, picture in zip(turn.slots.tolist(), turn.obs["obs"], strict=True):
            assert picture.shape == (5, 7, 3)
            assert (picture == seed_of(3, slot) % 251).all()
        arena.send(turn, {"action": np.zeros((len(turn.slots), 2), np.float32)})
    arena.close()


class Picture(gym.Env[Any, Any]):
    """Shows a picture of one colour."""

    observation_space = spaces.Box(0, 255, (5, 7, 3), np.uint8)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.picture = np.full((5, 7, 3), (seed or 0) % 251, np.uint8)
        self.actions: list[Any] = []
        return self.picture, {}

    def step(self, action: Any) -> Any:
        assert not any(np.shares_memory(action, old) for old in self.actions)
        self.actions.append(action)  # which must not be written over
        return self.picture, 0.0, False, False, {}
