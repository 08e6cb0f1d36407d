# SPDX-License-Identifier: Apache-2.0
"""Which envs of a pool act together, and how long they wait for each other."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from pool_envs import Telling, fitting
from some_envs import Numbered

from etude.envs import pool
from etude.envs.arena import Turn
from etude.envs.buffers import ASLEEP
from etude.envs.pool import PoolArena
from etude.envs.workers import Workers


class Gates:
    """Makes envs without end, each step of which passes a gate of its env's. For threads."""

    def __init__(self, count: int) -> None:
        self.gates = [threading.Semaphore(0) for _ in range(count)]
        self.next = iter(range(count))
        self.lock = threading.Lock()
        self.steps = [0] * count

    def __call__(self) -> Any:
        gates = self

        class Gated(Numbered):
            def __init__(self) -> None:
                super().__init__()
                with gates.lock:
                    self.number = next(gates.next)

            def obs(self) -> Any:
                return np.array([self.number, 0, self.t], np.float32)

            def step(self, action: Any) -> Any:
                assert gates.gates[self.number].acquire(timeout=300)
                self.t += 1
                gates.steps[self.number] += 1
                gates.passed(self.number)
                return self.obs(), 0.0, False, False, {}

        return Gated()

    def passed(self, number: int) -> None:
        """An env has passed its gate, and is about to show it."""

    def open(self, *numbers: int, times: int = 1) -> None:
        for number in numbers:
            self.gates[number].release(times)


def gated(count: int, **settings: Any) -> tuple[PoolArena, Gates, dict[int, int]]:
    """A reset arena, whose first turns are answered; and the slot of each gate."""
    gates = Gates(count)
    arena = PoolArena(gates, Workers(num_workers=count, mode="thread", **settings))
    arena.reset(seed=1)
    until(lambda: len(arena._done()) == count)
    numbers: dict[int, int] = {}
    while len(numbers) < count:
        (turn,) = arena.recv()
        numbers |= dict(zip(turn.obs["obs"][:, 0].astype(int).tolist(), turn.slots.tolist(), strict=True))
        answer(arena, turn)
    return arena, gates, numbers


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < deadline
        os.sched_yield()


def answer(arena: PoolArena, turn: Turn) -> None:
    arena.send(turn, {"action": np.zeros(len(turn.slots), np.int64)})


def shown(turn: Turn) -> list[int]:
    return sorted(turn.obs["obs"][:, 0].astype(int).tolist())


def test_min_batch_waits_for_so_many() -> None:
    arena, gates, _ = gated(5, min_batch=3)
    passed: list[int] = []

    def one_after_the_other(number: int) -> None:
        passed.append(number)
        if len(passed) < 3:
            gates.open(passed[-1] + 1)

    gates.passed = one_after_the_other  # type: ignore[method-assign]
    gates.open(0)
    (turn,) = arena.recv()
    assert shown(turn) == [0, 1, 2]
    gates.open(*range(5), times=9)
    arena.close()


def test_half_of_the_envs_by_default() -> None:
    arena, gates, _ = gated(5)
    passed: list[int] = []

    def one_after_the_other(number: int) -> None:
        passed.append(number)
        if len(passed) < 3:
            gates.open(passed[-1] + 1)

    gates.passed = one_after_the_other  # type: ignore[method-assign]
    gates.open(0)
    (turn,) = arena.recv()
    assert shown(turn) == [0, 1, 2]
    gates.open(*range(5), times=9)
    arena.close()


def test_max_wait_ends_the_waiting_for_min_batch() -> None:
    arena, gates, _ = gated(3, min_batch=3, max_wait=0.05)
    begin = time.monotonic()
    gates.open(1)
    (turn,) = arena.recv()
    assert shown(turn) == [1]
    assert time.monotonic() - begin >= 0.05
    gates.open(0, 1, 2, times=9)
    arena.close()


def test_max_wait_is_kept_though_the_arena_looks_after_its_workers_meanwhile() -> None:
    arena, gates, _ = gated(3, min_batch=3, max_wait=0.8, step_timeout=3.0)  # looks every 0.75 seconds
    gates.open(1)
    (turn,) = arena.recv()
    assert shown(turn) == [1]
    gates.open(0, 1, 2, times=9)
    arena.close()


def test_max_wait_begins_when_one_is_ready(monkeypatch: Any) -> None:
    monkeypatch.setattr(pool, "MAX_SLEEP", 20.0)  # who is not woken sleeps for long
    begin = time.monotonic()
    arena, gates, _ = gated(2, min_batch=2, max_wait=0.0)

    def open_when_it_waits() -> None:
        until(lambda: bool(arena._shared.words[ASLEEP]))
        gates.open(1)

    opener = threading.Thread(target=open_when_it_waits)
    opener.start()
    (turn,) = arena.recv()
    assert shown(turn) == [1]
    assert time.monotonic() - begin < 15
    opener.join()
    gates.open(0, 1, times=9)
    arena.close()


def test_never_more_than_max_batch_and_none_is_left_behind() -> None:
    arena = PoolArena(Telling, Workers(num_workers=2, envs_per_worker=4, mode="thread", min_batch=1, max_batch=3))
    arena.reset(seed=1)
    shown = np.zeros(8, int)
    for _ in range(80):
        until(lambda: len(arena._done()) == 8)
        for turn in arena.recv():
            if turn.waits:
                assert len(turn.slots) == 3
                shown[turn.slots] += 1
                arena.send(turn, {"action": fitting(turn.obs["obs"])})
    assert shown.max() - shown.min() <= 1
    arena.close()


def test_who_made_the_fewest_steps_comes_first() -> None:
    arena, gates, _ = gated(3, min_batch=1, max_batch=1)
    gates.open(0, 0)
    for _ in range(2):  # env 0 is two steps ahead
        (turn,) = arena.recv()
        assert shown(turn) == [0]
        answer(arena, turn)
    gates.open(1)
    (turn,) = arena.recv()
    answer(arena, turn)  # and env 1 is one step ahead
    gates.open(0, 1, 2)
    until(lambda: gates.steps == [3, 2, 1] and len(arena._done()) == 3)
    assert [shown(turn) for turn in _three(arena)] == [[2], [1], [0]]
    gates.open(0, 1, 2, times=9)
    arena.close()


def _three(arena: PoolArena) -> list[Turn]:
    turns = []
    for _ in range(3):
        (turn,) = arena.recv()
        turns.append(turn)
        answer(arena, turn)
    return turns


def test_steps_of_each_env_are_told_where_they_differ() -> None:
    arena, gates, slots = gated(3, min_batch=1)
    gates.open(0, times=12)
    gates.open(1, times=2)
    count = 0
    while count < 14:
        for turn in arena.recv():
            count += len(turn.slots)
            answer(arena, turn)
    stats = arena.stats()
    assert stats == {
        "faulty_episodes": 0.0,
        "restarts": 0.0,
        "lost_steps": 0.0,
        f"steps/env_{slots[0]}": 12.0,
        f"steps/env_{slots[1]}": 2.0,
        f"steps/env_{slots[2]}": 0.0,
    }
    assert arena.stats() == {"faulty_episodes": 0.0, "restarts": 0.0, "lost_steps": 0.0}
    gates.open(0, times=5)
    for _ in range(5):
        (turn,) = arena.recv()
        answer(arena, turn)
    gates.open(0, 1, 2)  # so that all can be reset
    arena.reset()
    stats = arena.stats()
    assert [stats[f"steps/env_{slots[i]}"] for i in range(3)] == [6, 1, 1], "and those before a reset"
    gates.open(0, 1, 2, times=99)
    arena.close()


def test_one_slow_env_does_not_hold_up_the_other_worker() -> None:
    gates = Gates(4)
    arena = PoolArena(gates, Workers(num_workers=2, envs_per_worker=2, mode="thread", min_batch=1))
    arena.reset(seed=1)
    seen: set[int] = set()
    while len(seen) < 4:
        for turn in arena.recv():
            seen |= set(shown(turn))
            answer(arena, turn)
    of_worker = [adapter.env.number for adapter in arena._backend._workers[0].adapters()]  # type: ignore[attr-defined]
    others = [number for number in range(4) if number not in of_worker]
    gates.open(*others, times=20)  # and the first worker's stay shut
    count = 0
    while count < 30:
        for turn in arena.recv():
            assert set(shown(turn)) <= set(others)
            count += len(turn.slots)
            answer(arena, turn)
    gates.open(*range(4), times=99)
    arena.close()
