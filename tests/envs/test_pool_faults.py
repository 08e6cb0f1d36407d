# SPDX-License-Identifier: Apache-2.0
"""Envs that fail, workers that die and hang: what it costs, and what is said of it."""

import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces
from pool_envs import DIE, END, EXIT, GO, HANG, KEYS, RAISE, RAISE_IN_RESET, Told, dies, seed_of

from etude.envs.arena import Turn
from etude.envs.pool import PoolArena
from etude.envs.workers import Workers
from etude.errors import EnvError, EtudeError, SpaceError

EACH_KIND = pytest.mark.parametrize("mode", ["sync", "thread", "process"])


class Driver:
    """Plays an arena of `Told`: tells each slot what to do next, and notes what it then shows."""

    def __init__(self, mode: str, workers: int = 2, per: int = 2, **settings: Any) -> None:
        if mode == "sync":
            self.arena = PoolArena(Told, Workers(**settings), workers * per)
        else:
            self.arena = PoolArena(
                Told, Workers(num_workers=workers, envs_per_worker=per, mode=mode, min_batch=1, **settings)
            )
        self.arena.reset(seed=5)
        count = workers * per
        self.rows: list[list[tuple[Any, ...]]] = [[] for _ in range(count)]
        """By slot: what it showed, each as (what, resets, t, reward, process), and "lost" where it was lost."""
        self.keys: list[list[int]] = [[] for _ in range(count)]
        self.todo: list[Iterator[int]] = [iter(()) for _ in range(count)]

    def tell(self, slot: int, *actions: int) -> None:
        self.todo[slot] = iter(actions)

    def play(self, rows: int) -> None:
        """Until each slot has shown so many more."""
        aim = [len(shown) + rows for shown in self.rows]
        while any(len(shown) < wanted for shown, wanted in zip(self.rows, aim, strict=True)):
            for turn in self.arena.recv():
                self.read(turn)
                if turn.waits:
                    actions = np.array([next(self.todo[slot], GO) for slot in turn.slots.tolist()])
                    self.arena.send(turn, {"action": actions})

    def read(self, turn: Turn) -> None:
        for slot in [] if turn.lost is None else turn.lost.tolist():
            self.rows[slot].append(("lost",))
        for i, slot in enumerate(turn.slots.tolist()):
            process, key, resets, t = turn.obs["obs"][i].astype(int).tolist()
            first = turn.first is not None and turn.first[i]
            what = "first" if first else "on" if turn.waits else "end"
            self.rows[slot].append((what, resets, t, None if first else turn.reward[i], process))
            if not self.keys[slot] or self.keys[slot][-1] != key:
                self.keys[slot].append(key)

    def told(self, slot: int) -> list[Any]:
        return [row[:3] if len(row) > 1 else "lost" for row in self.rows[slot]]

    def check(self, *slots: int) -> None:
        """These slots noticed nothing."""
        made = [sum(row[0] in ("on", "end") for row in shown) for shown in self.rows]
        assert self.arena._orders.steps().tolist() == made
        for slot in slots:
            assert self.told(slot) == [("first" if t == 0 else "on", 1, t) for t in range(len(self.rows[slot]))]
            assert self.keys[slot] == [seed_of(5, slot) % KEYS]
            assert len({row[4] for row in self.rows[slot]}) == 1


@EACH_KIND
@pytest.mark.parametrize("action", [RAISE, EXIT])
def test_an_env_that_fails_in_a_step_is_made_again(mode: str, action: int) -> None:
    driver = Driver(mode)
    driver.tell(1, GO, GO, action)
    driver.play(12)
    assert driver.told(1)[:7] == [("first", 1, 0), ("on", 1, 1), ("on", 1, 2), "lost", ("first", 1, 0), *_on(1, 2)]
    assert driver.keys[1] == [seed_of(5, 1) % KEYS, seed_of(5, 1, 1) % KEYS]
    driver.check(0, 2, 3)
    stats = driver.arena.stats()
    assert (stats["faulty_episodes"], stats["restarts"]) == (1, 1)
    stats = driver.arena.stats()
    assert (stats["faulty_episodes"], stats["restarts"]) == (0, 0)
    driver.arena.close()


def _on(*times: int) -> list[Any]:
    return [("on", 1, t) for t in times]


@EACH_KIND
def test_an_env_that_fails_in_a_reset_keeps_the_episode_before(mode: str) -> None:
    driver = Driver(mode)
    driver.tell(2, GO, RAISE_IN_RESET)
    driver.play(8)
    assert driver.told(2)[:5] == [("first", 1, 0), ("on", 1, 1), ("end", 1, 2), ("first", 1, 0), ("on", 1, 1)]
    driver.check(0, 1, 3)
    stats = driver.arena.stats()
    assert (stats["faulty_episodes"], stats["restarts"]) == (0, 1)
    driver.arena.close()


@pytest.mark.parametrize("action", [DIE, HANG])
def test_a_worker_that_dies_or_hangs_is_started_again(action: int) -> None:
    driver = Driver("process", step_timeout=0.3 if action == HANG else None)
    driver.tell(3, GO, action)
    driver.play(30)
    rows = driver.told(3)
    assert rows[:5] == [("first", 1, 0), ("on", 1, 1), "lost", ("first", 1, 0), ("on", 1, 1)]
    at = driver.told(2).index("lost")
    assert driver.told(2)[:at] == [("first", 1, 0), *_on(*range(1, at))]
    assert driver.told(2)[at + 1] == ("first", 1, 0)
    for slot in (2, 3):
        assert driver.keys[slot] == [seed_of(5, slot) % KEYS, seed_of(5, slot, 1) % KEYS]
        assert len({row[4] for row in driver.rows[slot] if len(row) > 1}) == 2
    driver.check(0, 1)
    stats = driver.arena.stats()
    assert (stats["faulty_episodes"], stats["restarts"]) == (2, 1)
    driver.arena.close()


def test_a_worker_that_dies_again_and_again_while_others_go_on() -> None:
    driver = Driver("process", max_restarts=1)
    for _ in range(4):  # only env 0 is to blame, and it finishes an episode each time
        driver.tell(0, GO, DIE, END)
        driver.play(6)
    assert driver.told(0).count("lost") == 4
    assert "end" not in [row[0] for row in driver.rows[1]]
    driver.check(2, 3)
    driver.arena.close()


def test_an_episode_that_was_finished_before_the_worker_died_is_kept() -> None:
    driver = Driver("process", workers=1, per=2, max_wait=None)
    driver.arena._orders.min_batch = 2
    driver.tell(0, END)
    driver.tell(1, DIE)
    driver.play(3)
    assert driver.told(0)[:3] == [("first", 1, 0), ("end", 1, 1), ("first", 1, 0)]
    assert driver.told(1)[:3] == [("first", 1, 0), "lost", ("first", 1, 0)]
    stats = driver.arena.stats()
    assert (stats["faulty_episodes"], stats["restarts"]) == (1, 1)
    driver.arena.close()


def test_a_thread_that_hangs_ends_the_run() -> None:
    driver = Driver("thread", step_timeout=0.2, cleanup_time=0.0)
    driver.tell(0, HANG)
    with pytest.raises(EnvError, match=r"worker 0 hung: .* 0.2 seconds \(step_timeout\)\. It is a thread, which can't"):
        driver.play(10**6)
    driver.arena.close()


def test_a_slow_step_within_the_timeout_is_waited_for() -> None:
    driver = Driver("process", step_timeout=30.0)
    driver.play(20)
    driver.check(0, 1, 2, 3)
    driver.arena.close()


def test_only_the_time_that_steps_take_counts() -> None:
    driver = Driver("process", step_timeout=0.3)
    driver.play(3)
    turns = driver.arena.recv()
    later = time.monotonic() + 0.4
    while time.monotonic() < later:  # a learner's update
        pass
    for turn in turns:
        driver.arena.send(turn, {"action": np.zeros(len(turn.slots), np.int64)})
    driver.arena._looked = 0.0
    driver.arena.recv()
    assert driver.arena.stats()["restarts"] == 0
    driver.arena.close()


@EACH_KIND
def test_too_many_failures_in_a_row_end_the_run_with_the_envs_own_traceback(mode: str) -> None:
    driver = Driver(mode, max_restarts=2)
    driver.tell(0, *[RAISE] * 3)
    match = r"(?s)3 failures without .*max_restarts.* env 0 failed in a step.*in step\n.*RuntimeError: out of order$"
    with pytest.raises(EnvError, match=match):
        driver.play(10**6)
    with pytest.raises(EnvError, match=match):
        driver.arena.recv()
    driver.arena.reset(seed=5)  # begins anew
    driver.play(5)
    driver.arena.close()


@EACH_KIND
def test_a_finished_episode_ends_the_row_of_failures(mode: str) -> None:
    driver = Driver(mode, max_restarts=2)
    driver.tell(0, RAISE, RAISE, END, RAISE, RAISE, END, RAISE, RAISE)
    driver.play(20)
    assert driver.told(0).count("lost") == 6
    driver.check(1, 2, 3)
    driver.arena.close()


def test_too_many_deaths_in_a_row_end_the_run() -> None:
    driver = Driver("process", max_restarts=1)
    driver.tell(2, GO, DIE, DIE)
    with pytest.raises(EnvError, match=r"2 failures .*: worker 1 was killed by SIGKILL, in a step of env 2\."):
        driver.play(10**6)
    driver.arena.reset(seed=5)
    driver.play(5)
    driver.arena.close()


@EACH_KIND
def test_the_first_failure_ends_the_run_where_nothing_is_restarted(mode: str) -> None:
    driver = Driver(mode, restart_failed=False)
    driver.tell(3, GO, RAISE)
    with pytest.raises(EnvError, match=r"(?s)^env 3 failed in a step.*RuntimeError: out of order$"):
        driver.play(10**6)
    driver.arena.close()


def test_the_first_death_ends_the_run_where_nothing_is_restarted() -> None:
    driver = Driver("process", restart_failed=False)
    driver.tell(0, DIE)
    with pytest.raises(EnvError, match=r"^worker 0 was killed by SIGKILL, in a step of env 0\."):
        driver.play(10**6)
    driver.arena.close()


@EACH_KIND
def test_failures_that_a_reset_finds_are_mended_by_it(mode: str) -> None:
    driver = Driver(mode)
    driver.play(3)
    for turn in driver.arena.recv():
        driver.arena.send(turn, {"action": np.full(len(turn.slots), RAISE)})
    driver.arena.reset(seed=5)
    driver.rows = [[] for _ in range(4)]
    driver.keys = [[] for _ in range(4)]
    driver.play(5)
    for slot in range(4):
        assert driver.told(slot)[0][0] == "first"
        assert "lost" not in driver.told(slot)
        assert driver.keys[slot] == [seed_of(5, slot) % KEYS]
    driver.arena.close()


class Once(Told):
    """Can't be made again."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        Once.made += 1
        if Once.made > 1:
            raise LookupError("sold out")


@pytest.mark.parametrize("mode", ["sync", "thread", "process"])
def test_an_env_that_cannot_be_made_again_ends_the_run(mode: str) -> None:
    Once.made = 0
    workers = Workers() if mode == "sync" else Workers(num_workers=1, mode=mode)
    arena = PoolArena(Once, Workers(**(vars(workers) | {"max_restarts": 3})), 1)
    arena.reset()
    (turn,) = arena.recv()
    arena.send(turn, {"action": np.array([RAISE])})
    with pytest.raises(EnvError, match=r"(?s)4 failures .*env 0 failed in being made:.*LookupError: sold out$"):
        arena.recv()
    arena.close()


# -- envs that break their contract ---------------------------------------------------------------------------------


class Lying(Told):
    """Shows something else than its space says, from its third step on."""

    since = 3
    lie: ClassVar[dict[str, Any]] = {}

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        answer = {"obs": obs, "reward": reward, "terminated": terminated, "truncated": truncated, "info": info}
        return tuple((answer | self.lie if self.t >= self.since else answer).values())


class WrongShape(Lying):
    lie: ClassVar[dict[str, Any]] = {"obs": np.zeros(5)}


class NotANumber(Lying):
    lie: ClassVar[dict[str, Any]] = {"obs": np.full(4, np.nan)}


class OutOfBounds(Lying):
    lie: ClassVar[dict[str, Any]] = {"obs": np.full(4, -3.0)}


class WrongType(Lying):
    observation_space = spaces.Box(0, 10**9, (4,), np.int64)
    lie: ClassVar[dict[str, Any]] = {"obs": np.full(4, 0.5)}

    def obs(self) -> Any:
        return super().obs().astype(np.int64)


class NoReward(Lying):
    lie: ClassVar[dict[str, Any]] = {"reward": float("nan")}


class RewardArray(Lying):
    lie: ClassVar[dict[str, Any]] = {"reward": np.zeros(2)}


class FlagNumber(Lying):
    lie: ClassVar[dict[str, Any]] = {"truncated": 0}


LIARS: list[Any] = [
    (WrongShape, SpaceError, r"env \d: `obs` has shape \(5,\), but its space Box.* has shape \(4,\)"),
    (NotANumber, SpaceError, r"env \d: `obs` .*(?i:nan)"),
    (OutOfBounds, SpaceError, r"env \d: `obs` is -3.0 at \[0\], outside its space's \[-1.0, 1000000000.0\]"),
    (WrongType, SpaceError, r"env \d: `obs` .*float64.*int64"),
    (NoReward, EnvError, r"env \d: `reward` is nan, not a finite number"),
    (RewardArray, EnvError, r"env \d: `reward` is array\(\[0., 0.\]\), not a finite number"),
    (FlagNumber, EnvError, r"env \d: `truncated` is 0, not True or False"),
]


def tried(env: Any, workers: Workers, rounds: int = 8) -> None:
    arena = PoolArena(env, workers, 2)
    arena.reset(seed=1)
    try:
        for _ in range(rounds):
            for turn in arena.recv():
                if turn.waits:
                    arena.send(turn, {"action": np.zeros(len(turn.slots), np.int64)})
    finally:
        arena.close()


@pytest.mark.parametrize(("env", "error", "match"), LIARS)
def test_what_does_not_fit_its_space_is_shown_against_it(env: Any, error: type[EtudeError], match: str) -> None:
    with pytest.raises(error, match=match):
        tried(env, Workers())


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_what_does_not_fit_is_shown_by_workers_too(mode: Any) -> None:
    with pytest.raises(SpaceError, match=LIARS[0][2]):
        tried(WrongShape, Workers(num_workers=2, mode=mode))


def test_only_the_first_steps_are_checked() -> None:
    tried(OutOfBounds, Workers(check=0))
    tried(OutOfBounds, Workers(check=3))  # a reset and two steps
    with pytest.raises(SpaceError):
        tried(OutOfBounds, Workers(check=4))


class OutOfBoundsLate(OutOfBounds):
    since = 50


def test_all_steps_are_checked_where_that_is_asked() -> None:
    tried(OutOfBoundsLate, Workers(), 60)
    with pytest.raises(SpaceError, match=r"`obs` is -3.0"):
        tried(OutOfBoundsLate, Workers(check="always"), 60)


def test_a_worker_that_dies_while_it_makes_its_envs() -> None:
    with pytest.raises(EnvError, match=r"worker \d was killed by SIGKILL while it made its envs"):
        PoolArena(dies, Workers(num_workers=2))
