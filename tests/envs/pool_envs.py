# SPDX-License-Identifier: Apache-2.0
"""Envs that tell who they are and do what they are told, in whatever process they are; and a book of their steps."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from some_envs import length_of, reward_of

from etude.columns import Columns
from etude.envs.arena import Turn
from etude.envs.copies import CopiesArena
from etude.envs.inline import InlineArena
from etude.envs.pool import PoolArena
from etude.envs.workers import Workers

KEYS = 10_007

MODES = {
    "sync": Workers(),
    "threads": Workers(num_workers=2, envs_per_worker=3, mode="thread"),
    "threads one by one": Workers(num_workers=6, mode="thread", min_batch=1, max_batch=1),
    "processes": Workers(num_workers=2, envs_per_worker=3),
    "processes in lock-step": Workers(num_workers=3, envs_per_worker=2, min_batch=6),
    "processes one by one": Workers(num_workers=2, envs_per_worker=3, min_batch=1, max_batch=2),
}
"""Ways to run six envs."""


def copies_of(
    env: Any, workers: Workers | None = None, num_envs: int = 1, *, drop: tuple[str, ...] = ()
) -> CopiesArena:
    """Copies of an env, here or in workers: never a vectorised version."""
    if workers is not None and workers.num_workers:
        return PoolArena(env, workers, drop=drop)
    return InlineArena(env, num_envs, workers, drop=drop)


def tried(env: Any, workers: Workers, rounds: int = 20) -> None:
    """Step two copies with the action 0."""
    arena = copies_of(env, workers, 2)
    arena.reset(seed=1)
    try:
        for _ in range(rounds):
            for turn in arena.recv():
                if turn.waits:
                    arena.send(turn, {"action": np.zeros(len(turn.slots), np.int64)})
    finally:
        arena.close()


def seed_of(seed: int, *key: int) -> int:
    """What the documentation says that env ``key[0]`` is seeded with, made again for the ``key[1]``-th time."""
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1)[0] >> 1)


class Telling(gym.Env[Any, Any]):
    """Shows (key, episode, t), the key being of its seed; wants an action that fits what it shows."""

    observation_space: Any = spaces.Box(-1, 1e9, (3,), np.float64)
    action_space: Any = spaces.Discrete(11)

    def __init__(self) -> None:
        self.key, self.episode, self.t = -1, -1, 0
        self.shown = np.zeros(3)  # written over at each step, as some envs do

    def obs(self) -> Any:
        self.shown[:] = self.key, self.episode, self.t
        return self.shown

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.key = seed % KEYS
        self.episode += 1
        self.t = 0
        return self.obs(), {"episode": self.episode}

    def step(self, action: Any) -> Any:
        assert action == fitting(self.obs()[None])[0], (action, self.obs())
        self.t += 1
        is_over = self.t == length_of(self.key, self.episode)
        ends = is_over and self.episode % 2 == 0
        return self.obs(), reward_of(0, self.episode, self.t - 1), ends, is_over and not ends, {"t": self.t}


class TellingNested(Telling):
    """The same with nested observations and actions."""

    observation_space = spaces.Dict(
        {"who": spaces.Dict({"key": spaces.Box(-1, 1e9, (), np.float64)}), "when": spaces.MultiDiscrete([1000, 1000])}
    )
    action_space = spaces.Tuple([spaces.Discrete(11), spaces.Box(-1, 1e9, (2,), np.float64)])

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        move, numbers = action
        assert numbers.tolist() == [self.key, self.t]
        _, *rest = super().step(move)
        return self.nested(), *rest

    def nested(self) -> Any:
        return {"when": np.array([self.episode, self.t]), "who": {"key": np.float64(self.key)}}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        _, info = super().reset(seed=seed)
        return self.nested(), info


def fitting(obs: Any) -> Any:
    """``[n]``: the actions that `Telling` wants for what it shows, ``[n, 3]``."""
    return ((obs @ [1, 3, 5]) % 11).astype(np.int64)


class Book:
    """Follows each slot of an arena of `Telling`, and complains of rows that are not the next of their episodes."""

    def __init__(self, arena: CopiesArena, seed: int, obs_of: Callable[[Columns], Any] = lambda c: c["obs"]) -> None:
        self.arena, self.obs_of = arena, obs_of
        self.expected = {slot: (seed_of(seed, slot) % KEYS, 0, 0) for slot in range(arena.num_slots)}
        self.steps = np.zeros(arena.num_slots, int)
        self.episodes = np.zeros(arena.num_slots, int)

    def read(self, turn: Turn) -> None:
        assert turn.lost is None
        first = np.zeros(len(turn.slots), bool) if turn.first is None else turn.first
        none = np.zeros(len(turn.slots), bool)
        ends = [none if flags is None else flags for flags in (turn.terminated, turn.truncated)]
        for i, slot in enumerate(turn.slots.tolist()):
            key, episode, t = self.expected[slot]
            assert self.obs_of(turn.obs)[i].tolist() == [key, episode, t]
            assert first[i] == (t == 0)
            if t:
                assert turn.reward[i] == reward_of(0, episode, t - 1)
                self.steps[slot] += 1
            is_over = t == length_of(key, episode)
            assert turn.waits != is_over
            assert [flags[i] for flags in ends] == [is_over and episode % 2 == 0, is_over and episode % 2 == 1]
            self.episodes[slot] += is_over
            self.expected[slot] = (key, episode + 1, 0) if is_over else (key, episode, t + 1)

    def play(self, min_steps: int, action_of: Callable[[Any], Columns] = lambda obs: {"action": fitting(obs)}) -> None:
        """Until each slot has made so many steps."""
        while self.steps.min() < min_steps:
            turns = self.arena.recv()
            for turn in turns:
                self.read(turn)
            for turn in turns:
                if turn.waits:
                    self.arena.send(turn, action_of(self.obs_of(turn.obs)))


GO, END, RAISE, RAISE_IN_RESET, DIE, HANG, EXIT = range(7)


class Told(gym.Env[Any, Any]):
    """Does what the action says; shows (process, key, resets, t)."""

    observation_space = spaces.Box(-1, 1e9, (4,), np.float64)
    action_space = spaces.Discrete(7)

    def __init__(self) -> None:
        self.resets, self.t, self.key, self.is_bad = 0, 0, -1, False

    def obs(self) -> Any:
        return np.array([os.getpid(), self.key, self.resets, self.t], np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if self.is_bad:
            raise RuntimeError("no way back")
        if seed is not None:
            self.key = seed % KEYS
        self.resets += 1
        self.t = 0
        return self.obs(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if action == RAISE:
            raise RuntimeError("out of order")
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == HANG:
            threading.Event().wait()
        if action == EXIT:
            sys.exit("done with it")
        self.is_bad = bool(action == RAISE_IN_RESET)
        return self.obs(), 1.0, bool(action in (END, RAISE_IN_RESET)), False, {}


class Knowing(gym.Env[Any, Any]):
    """Shows whether torch is imported where it is, how many threads there are, and a number that NumPy draws."""

    observation_space = spaces.Box(0, 2**30, (3,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.array(["torch" in sys.modules, threading.active_count(), np.random.randint(2**30)], np.float64), {}


def broken() -> Any:
    """Makes nothing."""
    raise LookupError("no such simulator")


def dies() -> Any:
    """Ends its process."""
    os.kill(os.getpid(), signal.SIGKILL)
