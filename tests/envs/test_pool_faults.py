# SPDX-License-Identifier: Apache-2.0
"""Envs that fail, workers that die and hang: what it costs, and what is said of it."""

import asyncio
import ctypes
import functools
import importlib
import itertools
import math
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from many_agent_envs import TwoJobs
from pool_envs import DIE, END, EXIT, GO, HANG, KEYS, RAISE, RAISE_IN_RESET, Told, copies_of, dies, seed_of, tried
from test_pool_processes import assert_ends

from etude.envs import make_arena
from etude.envs.arena import Turn
from etude.envs.workers import Workers
from etude.errors import EnvError, EtudeError, SpaceError

EACH_KIND = pytest.mark.parametrize("mode", ["sync", "thread", "process"])


class Driver:
    """Plays an arena of `Told`: tells each slot what to do next, and notes what it then shows."""

    def __init__(
        self, mode: str, workers: int = 2, per: int = 2, *, env: Any = Told, min_batch_is: int = 1, **settings: Any
    ) -> None:
        if mode == "sync":
            self.arena = copies_of(env, Workers(**settings), workers * per)
        else:
            own: Any = {"num_workers": workers, "envs_per_worker": per, "mode": mode, "min_batch": min_batch_is}
            self.arena = copies_of(env, Workers(**own, **settings))
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
        assert self.arena._steps.tolist() == made
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
    driver = Driver("process", step_timeout=1.5 if action == HANG else None)
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
    driver.arena._min_batch = 2
    driver.tell(0, END)
    driver.tell(1, DIE)
    driver.play(3)
    assert driver.told(0)[:3] == [("first", 1, 0), ("end", 1, 1), ("first", 1, 0)]
    assert driver.told(1)[:3] == [("first", 1, 0), "lost", ("first", 1, 0)]
    stats = driver.arena.stats()
    assert (stats["faulty_episodes"], stats["restarts"]) == (1, 1)
    driver.arena.close()


def test_a_thread_that_hangs_ends_the_run() -> None:
    driver = Driver("thread", step_timeout=0.5, cleanup_time=0.0)
    driver.tell(0, HANG)
    with pytest.raises(
        EnvError, match=r"worker 0 hung: .* 0.5 seconds \(see Workers.step_timeout\)\. It is a thread, which can't"
    ):
        driver.play(10**6)
    driver.arena.close()


def test_a_slow_step_within_the_timeout_is_waited_for() -> None:
    driver = Driver("process", step_timeout=30.0)
    driver.play(20)
    driver.check(0, 1, 2, 3)
    driver.arena.close()


def test_only_the_time_that_steps_take_counts() -> None:
    driver = Driver("process", step_timeout=1.5)
    driver.play(3)
    turns = driver.arena.recv()
    threading.Event().wait(1.6)  # a learner's update
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
def test_a_step_ends_the_row_of_failures(mode: str) -> None:
    driver = Driver(mode, max_restarts=2)
    driver.tell(0, *[RAISE, RAISE, GO] * 3, RAISE, RAISE)
    driver.play(20)
    assert driver.told(0).count("lost") == 8
    assert "end" not in [row[0] for row in driver.rows[0]]
    driver.check(1, 2, 3)
    stats = driver.arena.stats()
    assert (stats["faulty_episodes"], stats["restarts"], stats["lost_steps"]) == (8, 8, 8)
    driver.arena.close()


@EACH_KIND
def test_more_failures_than_the_rate_allows_end_the_run(mode: str) -> None:
    driver = Driver(mode, workers=1, per=2, max_failure_rate=0.02)
    driver.tell(0, *[RAISE, *[GO] * 39] * 30)  # of both envs' steps, 1 in 80
    driver.play(1300)
    assert driver.told(0).count("lost") > 20
    driver.tell(0, *[RAISE, *[GO] * 9] * 30)  # 1 in 20
    match = r"(?s)21 of the last [\d,]+ steps failed \(see Workers.max_failure_rate\).*env 0 .*out of order$"
    with pytest.raises(EnvError, match=match):
        driver.play(400)
    driver.arena.reset(seed=5)  # begins anew
    driver.play(5)
    driver.arena.close()


def test_a_rate_of_0_bears_no_failure_and_1_any() -> None:
    driver = Driver("sync", max_failure_rate=0.0)
    driver.tell(0, GO, RAISE)
    with pytest.raises(EnvError, match="1 of the last"):
        driver.play(5)
    driver = Driver("sync", max_failure_rate=1.0)
    driver.tell(0, *[GO, RAISE] * 1500)
    driver.play(1400)
    assert driver.told(0).count("lost") > 600


@EACH_KIND
def test_warnings_are_few_and_say_how_much_was_lost(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(mode, max_failure_rate=1.0)
    driver.tell(0, *[RAISE, GO] * 150)
    driver.play(160)
    driver.arena.close()
    told = [record.getMessage() for record in caplog.records if record.name == "etude.envs"]
    assert "RuntimeError: out of order" in told[0]
    assert 3 <= len(told) <= 5
    lost = driver.told(0).count("lost")
    assert f"failed {lost} times in" in told[-1]
    assert f"{lost} steps were lost" in told[-1]


# -- what envs should never raise -----------------------------------------------------------------------------------


class Cancelled(Told):
    """As any client of asyncio may, where its connection ends."""

    error: type[BaseException] = asyncio.CancelledError

    def step(self, action: Any) -> Any:
        if action == RAISE:
            raise self.error("no more")
        return super().step(action)


class Generated(Cancelled):
    error = GeneratorExit


class Interrupting(Cancelled):
    error = KeyboardInterrupt


class Unspeakable(Cancelled):
    class Error(BaseException):
        def __str__(self) -> str:
            raise LookupError("no words")

    error = Error


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What ``work`` gives, which must not hang."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((work(), None))
        except BaseException as error:  # noqa: BLE001
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it hangs"
    given, error = found[0]
    if error is not None:
        raise error
    return given


BASE = [
    ("sync", Cancelled), ("sync", Generated), ("sync", Unspeakable),
    *((mode, env) for mode in ("thread", "process") for env in (Cancelled, Generated, Interrupting, Unspeakable)),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "env"), BASE)
def test_no_error_of_an_env_ends_a_worker_or_hangs_the_arena(mode: str, env: Any) -> None:
    driver = Driver(mode, env=env)
    driver.tell(1, GO, RAISE)
    within(60, lambda: driver.play(12))
    assert driver.told(1)[:4] == [("first", 1, 0), ("on", 1, 1), "lost", ("first", 1, 0)]
    driver.check(0, 2, 3)
    assert driver.arena.stats()["restarts"] == 1
    driver.arena.close()


class CancelledWhenMade(Told):
    def __init__(self) -> None:
        raise asyncio.CancelledError("no more")


@EACH_KIND
def test_an_env_that_can_not_be_made_for_such_an_error_is_named(mode: Any) -> None:
    workers = Workers() if mode == "sync" else Workers(num_workers=2, mode=mode)
    with pytest.raises(EnvError, match=r"CancelledWhenMade fails to make an env: CancelledError: no more"):
        within(60, lambda: copies_of(CancelledWhenMade, workers))
    with pytest.raises(EnvError, match=r"CancelledWhenMade fails to make an env: CancelledError: no more"):
        within(60, lambda: make_arena(CancelledWhenMade, 2, workers))


def test_a_thread_that_is_ended_from_outside_is_started_again() -> None:
    others = threading.enumerate()
    driver = Driver("thread", workers=1, per=2, min_batch_is=2)
    driver.play(3)
    (turn,) = driver.arena.recv()
    (thread,) = [thread for thread in threading.enumerate() if thread not in others]
    # raised as soon as the thread runs Python: it sleeps until it is woken by an order
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    driver.arena.send(turn, {"action": np.full(2, GO)})
    within(60, lambda: driver.play(5))
    for slot in (0, 1):
        assert driver.told(slot).count("lost") == 1
    assert driver.arena.stats()["restarts"] == 1
    driver.arena.close()


def test_what_an_env_has_started_ends_with_its_killed_worker(tmp_path: Path) -> None:
    arena = copies_of(functools.partial(WithSimulator, str(tmp_path)), Workers(num_workers=1, step_timeout=0.3))
    arena.reset(seed=1)
    (turn,) = arena.recv()
    arena.send(turn, {"action": np.array([HANG])})
    (turn,) = arena.recv()
    first, second = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert_ends([int(first.name)])
    arena.close()
    assert int(second.name)


class WithSimulator(Told):
    """Talks to a process of its own."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.simulator = subprocess.Popen(["sleep", "1000"])
        Path(folder, str(self.simulator.pid)).touch()

    def close(self) -> None:
        self.simulator.kill()
        self.simulator.wait()


# -- what hangs -----------------------------------------------------------------------------------------------------


class HangsWhenMade(Told):
    """But for the first one."""

    def __init__(self, path: str, *, always: bool = False) -> None:
        super().__init__()
        if always or os.path.exists(path):
            threading.Event().wait()
        Path(path).touch()


def test_making_an_env_may_hang_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(num_workers=1, step_timeout=0.05, max_restarts=1, cleanup_time=0.1)
    monkeypatch.setattr("etude.envs.workers.LEAST_TO_MAKE", 0.5)
    with pytest.raises(EnvError, match=r"worker 0 hung: .* not made its envs.* 0.5 seconds \(see Workers.step_timeout"):
        within(60, lambda: copies_of(functools.partial(HangsWhenMade, str(tmp_path / "a"), always=True), workers))
    monkeypatch.undo()
    arena = copies_of(functools.partial(HangsWhenMade, str(tmp_path / "b")), workers)
    monkeypatch.setattr("etude.envs.workers.LEAST_TO_MAKE", 0.5)

    def fail() -> None:  # in the step, or before it on a machine that is very busy
        arena.reset(seed=1)
        (turn,) = arena.recv()
        arena.send(turn, {"action": np.array([RAISE])})
        arena.recv()

    match = r"2 failures .*max_restarts.* worker 0 hung: it took more than 0.5 seconds .* in the making of env 0"
    with pytest.raises(EnvError, match=match):
        within(60, fail)
    arena.close()


def test_a_module_that_hangs_when_workers_import_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = "if os.environ['ARENA'] != str(os.getpid()):\n    threading.Event().wait()\n"
    (tmp_path / "hangs_in_workers.py").write_text(
        f"import os, threading\nfrom pool_envs import Told\n{waits}def make():\n    return Told()\n"
    )
    monkeypatch.setenv("ARENA", str(os.getpid()))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("etude.envs.workers.LEAST_TO_MAKE", 0.5)
    monkeypatch.setattr("etude.envs.backends._ENDING", 0.1)
    workers = Workers(num_workers=1, step_timeout=0.05, cleanup_time=0.1)
    with pytest.raises(EnvError, match="worker 0 hung: it has not made its envs"):
        within(60, lambda: copies_of(importlib.import_module("hangs_in_workers").make, workers))


class HangsInReset(Told):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        threading.Event().wait()


def test_an_env_that_always_hangs_is_tried_twice() -> None:
    arena = copies_of(HangsInReset, Workers(num_workers=1, step_timeout=0.05, cleanup_time=0.1))
    arena.reset(seed=1)
    with pytest.raises(
        EnvError, match=r"2 failures .* worker 0 hung: it took more than 0.5 seconds .* in a reset of env 0"
    ):
        within(60, arena.recv)
    arena.close()


def test_a_reset_has_ten_times_as_long_as_a_step() -> None:
    arena = copies_of(SlowReset, Workers(num_workers=1, step_timeout=1.0))
    arena.reset(seed=1)
    for _ in range(3):
        for turn in arena.recv():
            if turn.waits:
                arena.send(turn, {"action": np.array([END])})  # a reset follows
    assert arena.stats()["restarts"] == 0
    arena.close()


class SlowReset(Told):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        threading.Event().wait(1.2)
        return super().reset(seed=seed)


def test_processes_have_a_time_limit_by_default_and_threads_have_none() -> None:
    assert Workers(num_workers=1).seconds_a_step == 60.0
    assert Workers(num_workers=1, mode="thread").seconds_a_step is None
    assert Workers().seconds_a_step is None
    assert Workers(num_workers=1, step_timeout=None).seconds_a_step is None
    assert Workers(num_workers=1, mode="thread", step_timeout=3).seconds_a_step == 3.0


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
    arena = copies_of(Once, Workers(**(vars(workers) | {"max_restarts": 3})), 1)
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


class NoSuchNumber(Lying):
    observation_space = spaces.Discrete(3)  # type: ignore[assignment]
    lie: ClassVar[dict[str, Any]] = {"obs": 3}

    def obs(self) -> int:
        return 1


class WrongType(Lying):
    observation_space = spaces.Box(0, 10**9, (4,), np.int64)
    lie: ClassVar[dict[str, Any]] = {"obs": np.full(4, 0.5)}

    def obs(self) -> Any:
        return super().obs().astype(np.int64)


class NoReward(Lying):
    lie: ClassVar[dict[str, Any]] = {"reward": float("nan")}


class RewardArray(Lying):
    lie: ClassVar[dict[str, Any]] = {"reward": np.zeros(2)}


class ListOfInfo(Lying):
    lie: ClassVar[dict[str, Any]] = {"info": ["x"]}


class FlagNumber(Lying):
    lie: ClassVar[dict[str, Any]] = {"truncated": 0}


LIARS: list[Any] = [
    (WrongShape, SpaceError, r"env \d: `obs` has shape \(5,\), but its space Box.* has shape \(4,\)"),
    (NotANumber, SpaceError, r"env \d: `obs` .*(?i:nan)"),
    (NoSuchNumber, SpaceError, r"env \d: `obs` is 3, outside its space Discrete\(3\)"),
    (WrongType, SpaceError, r"env \d: `obs` .*float64.*int64"),
    (NoReward, EnvError, r"env \d: `reward` is nan, not a finite number"),
    (RewardArray, EnvError, r"env \d: `reward` is array\(\[0., 0.\]\), not a finite number"),
    (ListOfInfo, EnvError, r"env \d: `info` is of type list, but must be a dict"),
    (FlagNumber, EnvError, r"env \d: `truncated` is 0, not True or False"),
]


@pytest.mark.parametrize(("env", "error", "match"), LIARS)
def test_what_does_not_fit_its_space_is_shown_against_it(env: Any, error: type[EtudeError], match: str) -> None:
    with pytest.raises(error, match=match):
        tried(env, Workers())


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_what_does_not_fit_is_shown_by_workers_too(mode: Any) -> None:
    with pytest.raises(SpaceError, match=LIARS[0][2]):
        tried(WrongShape, Workers(num_workers=2, mode=mode), 40)


class EndsWrong(Told):
    """One in three of its episodes, which all have the same length, ends in a wrong value, or a reset shows one."""

    lie: ClassVar[Any] = None
    in_reset = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, info = super().reset(seed=seed)
        return (self.lie if self.in_reset and self.np_random.random() < 0.3 else obs), info

    def step(self, action: Any) -> Any:
        obs, reward, _, truncated, info = super().step(action)
        is_wrong = self.t == 20 and not self.in_reset and self.np_random.random() < 0.3
        return (self.lie if is_wrong else obs), reward, self.t == 20, truncated, info


@pytest.mark.parametrize("in_reset", [False, True])
@pytest.mark.parametrize("lie", [np.full(4, np.nan), np.zeros(5), None], ids=["NaN", "shape", "None"])
@pytest.mark.parametrize("count", [1, 2])
def test_episodes_of_one_length_that_now_and_then_end_wrong_go_on(lie: Any, in_reset: bool, count: int) -> None:
    arena = copies_of(type("Own", (EndsWrong,), {"lie": lie, "in_reset": in_reset}), Workers(), count)
    for seed in range(5):
        arena.reset(seed=seed)
        for _ in range(500):
            for turn in arena.recv():
                if turn.waits:
                    arena.send(turn, {"action": np.zeros(len(turn.slots), np.int64)})
    assert arena.stats()["restarts"] > 20 * count
    arena.close()


class AlwaysLate(Told):
    """The 30th step of each of its lives gives no reward."""

    def step(self, action: Any) -> Any:
        obs, reward, _, truncated, info = super().step(action)
        return obs, math.nan if self.t == 30 else reward, False, truncated, info


def test_a_value_that_is_wrong_at_the_same_step_each_time_is_told_with_the_rule() -> None:
    with pytest.raises(
        EnvError, match=r"6 times in a row, each time \d+ steps .*Workers.max_restarts\).*`reward` is nan"
    ):
        tried(AlwaysLate, Workers(), 400)


class SometimesWrong(gym.Env[Any, Any]):
    """In three of a hundred steps, a value is not what it should be."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)
    made: ClassVar[Iterator[int]] = itertools.count(1)

    def __init__(self, **lie: Any) -> None:
        self._lie, self._draw = lie, np.random.default_rng(next(self.made)).random

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        answer = {"obs": np.zeros(3, np.float32), "reward": 1.0, "terminated": False, "truncated": False, "info": {}}
        return tuple((answer | self._lie if self._draw() < 0.03 else answer).values())


@pytest.mark.parametrize(
    "lie",
    [{"reward": None}, {"reward": 1 + 2j}, {"reward": np.zeros(2)}, {"terminated": None}, {"obs": np.zeros(4)}],
    ids=str,
)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_env_that_returns_a_wrong_value_now_and_then_goes_on(lie: dict[str, Any], workers: int) -> None:
    SometimesWrong.made = itertools.count(1)
    tried(lambda: SometimesWrong(**lie), Workers(num_workers=workers, mode="thread"), 400)


class Choosing(Told):
    """Each part of its observation is one of a few numbers, but for one step in thirty."""

    parts: ClassVar[dict[str, Any]] = {
        "from_one": (spaces.Discrete(3, start=1), 1, 0),
        "below_none": (spaces.Discrete(3, start=-1), 1, 2),
        "many": (spaces.MultiDiscrete([2, 3]), np.array([1, 2]), np.array([1, 3])),
        "small": (spaces.MultiDiscrete(np.array([255, 2], np.uint8), np.uint8), np.array([254, 1], np.uint8), [255, 0]),
        "bits": (spaces.MultiBinary(2), np.array([0, 1], np.int8), np.array([0, 2], np.int8)),
    }
    observation_space = spaces.Dict({name: space for name, (space, _, _) in parts.items()})  # type: ignore[assignment]
    wrong = ""
    reset_too = False

    def obs(self) -> Any:
        shown = {name: right for name, (_, right, _) in self.parts.items()}
        if self.np_random.random() < 1 / 30 and (self.t or self.reset_too):
            dtype = self.observation_space[self.wrong].dtype
            shown[self.wrong] = np.asarray(self.parts[self.wrong][2], dtype)
        return shown


@pytest.mark.parametrize("wrong", Choosing.parts)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_choice_that_is_none_is_the_failure_of_its_env_whenever_it_comes(wrong: str, num_workers: int) -> None:
    own = type("Own", (Choosing,), {"wrong": wrong, "reset_too": not num_workers})
    arena = copies_of(own, Workers(check=0, num_workers=num_workers, mode="thread"), 2)
    arena.reset(seed=2)
    shown, lost = 0, 0
    for _ in range(400):
        for turn in arena.recv():
            lost += 0 if turn.lost is None else len(turn.lost)
            right = np.asarray(Choosing.parts[wrong][1])
            assert (turn.obs[f"obs/{wrong}"] == right).all()
            shown += len(turn.slots)
            if turn.waits:
                arena.send(turn, {"action": np.where(np.arange(len(turn.slots)) % 9, GO, END)})
    stats = arena.stats()
    assert stats["restarts"] > 5
    assert 0 < lost <= stats["lost_steps"]
    assert shown > 350
    arena.close()


class FlagText(Lying):
    since = 50
    lie: ClassVar[dict[str, Any]] = {"terminated": "False"}


def test_flags_are_looked_at_in_every_step() -> None:
    with pytest.raises(EnvError, match="`terminated` is 'False', not True or False"):
        tried(FlagText, Workers(check=0), 200)


class NumberInStep10(Lying):
    since = 10
    lie: ClassVar[dict[str, Any]] = {"truncated": 0}


def test_numbers_as_flags_are_refused_in_the_first_steps() -> None:
    with pytest.raises(EnvError, match="`truncated` is 0, not True or False"):
        tried(NumberInStep10, Workers(check=10, restart_failed=False))
    tried(NumberInStep10, Workers(check=9, restart_failed=False))


class OutOfBoundsLate(OutOfBounds):
    since = 50


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "etude.envs"]


@EACH_KIND
def test_numbers_outside_the_bounds_of_their_box_are_warned_of_once(
    mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tried(OutOfBounds, Workers() if mode == "sync" else Workers(num_workers=2, mode=mode), 40)
    (told,) = warnings_of(caplog)
    assert "`obs` is -3.0 at [0], outside its space's bounds [-1.0, 1000000000.0]" in told
    assert told.startswith(("env 0: ", "env 1: "))
    assert "gymnasium.wrappers.TransformObservation" in told


@pytest.mark.parametrize(
    ("env", "check", "is_told"),
    [
        (OutOfBounds, 0, False),
        (OutOfBounds, 3, False),
        (OutOfBounds, 4, True),
        (OutOfBoundsLate, 10, False),
        (OutOfBoundsLate, "always", True),
    ],
)
def test_bounds_are_looked_at_as_long_as_the_rest(
    env: Any, check: Any, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tried(env, Workers(check=check), 60)
    assert len(warnings_of(caplog)) == is_told


class OneOutOfBounds(TwoJobs):
    """One of two agents is shown more than its space says."""

    def draw(self) -> dict[str, Any]:
        return super().draw() | {"aim": np.full(1, 2, np.float32)}


def test_bounds_of_agents_are_warned_of_with_their_names(caplog: pytest.LogCaptureFixture) -> None:
    arena = make_arena(OneOutOfBounds, 2)
    arena.reset(seed=1)
    for _ in range(12):
        for turn in arena.recv():
            if turn.waits:
                space = arena.kinds[turn.kind].action_space
                arena.send(turn, {"action": np.array([space.sample() for _ in turn.slots])})
    arena.close()
    (told,) = warnings_of(caplog)
    assert told.startswith("env 0, agent 'aim': `obs` is 2.0 at [0], outside its space's bounds [-1.0, 1.0]")


def test_a_worker_that_dies_while_it_makes_its_envs() -> None:
    with pytest.raises(EnvError, match=r"worker \d was killed by SIGKILL while it made its envs"):
        copies_of(dies, Workers(num_workers=2))
