# SPDX-License-Identifier: Apache-2.0
"""CPU threads: what a process was set to comes back, and how many a gradient step gets.

Nothing here depends on how fast a CPU is, or on how many there are: times come from a clock that the tests turn.
"""

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import threadpoolctl
import torch
from gymnasium import spaces
from preloaded import Preloaded
from torch import nn

import etude
from etude import threads
from etude.errors import SettingsError
from etude.learners import Batch, ComputeConfig, Loss, ModuleLearner
from etude.modules import NetworkConfig, make_module
from etude.threads import SMALL, Load, StepThreads, held

ACTING: dict[str, Any] = {"env": "CartPole-v1", "seed": 0, "num_envs": 2, "num_steps": 64}


def blas() -> list[int]:
    return [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]


@pytest.fixture(autouse=True)
def own_setting() -> Iterator[tuple[int, list[int]]]:
    """A process that is set to 3 threads of torch and 2 of BLAS."""
    before = torch.get_num_threads()
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        torch.set_num_threads(3)
        yield 3, blas()
        torch.set_num_threads(before)


# -- the process's own setting ----------------------------------------------------------------------------------------


class Looks(etude.PPO):
    """Notes the threads while it learns and while it evaluates."""

    def loss(self, module: Any, batch: Batch) -> Loss:
        self.seen = {*getattr(self, "seen", ()), (torch.get_num_threads(), max(blas()))}
        return super().loss(module, batch)


@pytest.mark.parametrize("given", ["auto", 1, 2])
def test_the_process_has_its_own_setting_back(given: Any, own_setting: Any, tmp_path: Any) -> None:
    config = etude.PPOConfig(**ACTING, threads=given, evaluation_interval=1, evaluation_episodes=1)
    algorithm = Looks(config)
    assert (torch.get_num_threads(), blas()) == own_setting
    for _ in algorithm.iterate(etude.Stop(env_steps=128)):
        assert (torch.get_num_threads(), blas()) == own_setting  # the user's code runs between two iterations
    assert algorithm.seen == {(1 if given == "auto" else given, 1)}
    algorithm.evaluate(1, seed=0)
    algorithm.record(tmp_path / "data", 2, seed=0)
    algorithm.save(tmp_path / "run")
    algorithm.close()
    etude.load(tmp_path / "run").close()
    assert (torch.get_num_threads(), blas()) == own_setting
    clone = etude.BC(etude.BCConfig(data=str(tmp_path / "data"), threads=given, updates_per_iteration=3, seed=0))
    clone.train()
    clone.close()
    assert (torch.get_num_threads(), blas()) == own_setting


class Fails(etude.PPO):
    """Can't learn."""

    def loss(self, module: Any, batch: Batch) -> Loss:
        raise KeyboardInterrupt


def test_the_setting_is_back_whatever_fails(own_setting: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        Fails(etude.PPOConfig(**ACTING, threads=1)).train()
    assert (torch.get_num_threads(), blas()) == own_setting
    with pytest.raises(etude.EtudeError):
        etude.PPO(etude.PPOConfig(**{**ACTING, "env": "NoSuchEnv-v0"}))
    assert (torch.get_num_threads(), blas()) == own_setting


def test_the_setting_is_back_where_several_python_threads_train(own_setting: Any) -> None:
    """The first one that began ends last, and the other way round."""
    both, first_is_done = threading.Barrier(2, timeout=60), threading.Event()
    found: list[int] = []

    def train(ends_last: bool) -> None:
        with threads.held(1):
            both.wait()
            if ends_last:
                first_is_done.wait(60)
        found.append(torch.get_num_threads())
        if not ends_last:
            first_is_done.set()

    other = threading.Thread(target=train, args=(False,))
    other.start()
    train(True)
    other.join(60)
    assert found == [3, 3]
    assert (torch.get_num_threads(), blas()) == own_setting


def test_making_an_algorithm_in_a_fresh_process_changes_nothing(preloaded: Preloaded) -> None:
    code = (
        "import torch, etude\n"
        "torch.set_num_threads(2)\n"
        "algorithm = etude.PPO(etude.PPOConfig(env='CartPole-v1', seed=0, num_steps=64, num_envs=2))\n"
        "print(torch.get_num_threads())\n"
        "algorithm.train()\n"
        "print(torch.get_num_threads())\n"
    )
    assert preloaded.run(code).stdout.split() == ["2", "2"]


# -- how many there may be --------------------------------------------------------------------------------------------


def test_usable_cores_are_those_of_the_affinity() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no affinity here")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert threads.usable_cores() == Load().free_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("files", "groups", "expected"),
    [
        ({"a/b/cpu.max": "150000 100000", "a/cpu.max": "max 100000"}, "0::/a/b", 1.5),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000"}, "0::/a/b", 4.0),
        ({"cpu.max": "50000 100000"}, "0::/not/shown/here", 0.5),
        ({"a/cpu.max": "max 100000"}, "0::/a", float("inf")),
        ({}, "0::/", float("inf")),
        ({"cpu,x/a/cpu.cfs_quota_us": "200000", "cpu,x/a/cpu.cfs_period_us": "100000"}, "4:cpu,x:/a", 2),
        ({"cpu,x/a/cpu.cfs_quota_us": "-1", "cpu,x/a/cpu.cfs_period_us": "100000"}, "4:cpu,x:/a", float("inf")),
        ({"memory/a/cpu.max": "1 100000"}, "3:memory:/a", float("inf")),
    ],
)
def test_the_quota_of_the_control_group_is_respected(
    files: dict[str, str], groups: str, expected: float, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text + "\n")
    (tmp_path / "groups").write_text(groups + "\n")
    found = threads._quota(tmp_path / "fs", tmp_path / "groups")
    assert found == expected
    monkeypatch.setattr(threads, "_quota", lambda: found)
    assert threads.usable_cores() == max(1, min(len(threads._affinity()), int(min(found, 1e6))))


@pytest.mark.parametrize(("others", "free"), [(0.0, 4), (0.2, 4), (0.9, 3), (2.5, 1), (4.0, 1), (9.0, 1)])
def test_busy_cores_are_not_free(others: float, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0, 100.0, 5.0]
    monkeypatch.setattr(threads, "_affinity", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(threads, "_quota", lambda: float("inf"))
    monkeypatch.setattr(threads, "_busy", lambda: tuple(now))
    monkeypatch.setattr(threads.time, "perf_counter", lambda: now[0])
    load = Load()
    now[:] = [11.0, 100.0 + 0.8 + others, 5.0 + 0.8]  # in a second this process used 0.8 of a core
    assert load.is_known
    assert load.free_cores() == free


# -- how many a step gets ---------------------------------------------------------------------------------------------


class Machine:
    """Cores of which some are free, and a clock that a step turns by as much as its threads take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, seconds: dict[int, float]) -> None:
        self.now, self.free, self.seconds = 0.0, free, seconds
        self.made: list[int] = []
        monkeypatch.setattr(threads.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(threads, "Load", lambda: self)
        torch.set_num_threads(16)

    is_known = True

    def free_cores(self) -> int:
        return self.free

    def make(self, batch: Any) -> str:
        self.made.append(torch.get_num_threads())
        self.now += self.seconds[self.made[-1]]
        return "made"

    def steps(self, count: int, of: StepThreads, work: int = SMALL) -> list[int]:
        """The threads of each of so many steps."""
        self.made = []
        with held(of.num):
            for _ in range(count):
                assert of.step(self.make, Batch({}, None, size=100), work) == "made"  # type: ignore[arg-type]
        return self.made


FAST = {1: 1.0, 2: 0.6, 3: 0.5, 4: 0.4, 8: 0.38, 16: 0.5}


@pytest.mark.parametrize(
    ("free", "seconds", "chosen", "tried"),
    [
        (1, FAST, 1, {1}),
        (2, FAST, 2, {1, 2}),
        (3, FAST, 3, {1, 2, 3}),
        (4, FAST, 4, {1, 2, 4}),
        (16, FAST, 4, {1, 2, 4, 8, 16}),  # 8 are not worth it
        (99, FAST, 4, {1, 2, 4, 8, 16}),  # never more than the process was set to
        (4, {1: 1.0, 2: 0.95, 4: 3.0}, 1, {1, 2, 4}),
        (4, {1: 1.0, 2: 50.0, 4: 100.0}, 1, {1, 2, 4}),
    ],
)
def test_large_steps_get_as_many_threads_as_pay(
    free: int, seconds: dict[int, float], chosen: int, tried: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, free, seconds)
    steps = StepThreads("auto")
    made = machine.steps(100, steps)
    assert set(made) == tried
    assert set(made[60:]) == {chosen}
    assert steps.num == chosen
    assert steps.is_settled
    assert torch.get_num_threads() == 16


def test_small_steps_get_one_thread_and_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 8, FAST)
    steps = StepThreads("auto")
    assert set(machine.steps(50, steps, SMALL - 1)) == {1}
    assert set(machine.steps(50, steps)) == {1}  # it is known by then


def test_a_number_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(Machine(monkeypatch, 1, FAST).steps(50, StepThreads(3))) == {3}


def test_nothing_is_tried_before_it_is_known_what_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 4, FAST)
    machine.is_known = False
    steps = StepThreads("auto")
    assert set(machine.steps(20, steps)) == {1}
    machine.is_known = True
    assert machine.steps(100, steps)[-1] == 4


def test_threads_are_given_up_where_others_need_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 4, dict(FAST))
    steps = StepThreads("auto")
    machine.steps(100, steps)
    machine.seconds[4] = 0.9  # slower, but not slower than one thread
    assert set(machine.steps(300, steps)) == {4}
    machine.seconds |= {2: 20.0, 4: 40.0}
    machine.free = 1
    assert machine.steps(300, steps)[-1] == 1
    assert steps.num == 1


def test_what_was_found_goes_on_where_so_many_cores_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 4, FAST)
    first, resumed, elsewhere, fixed = (StepThreads(how) for how in ("auto", "auto", "auto", 2))
    assert first.state_dict() == {}
    machine.steps(100, first)
    for other in (resumed, fixed):
        other.load_state_dict(first.state_dict())
    machine.free = 2
    elsewhere.load_state_dict(first.state_dict())
    machine.free = 4
    assert set(machine.steps(10, resumed)) == {4}
    assert set(machine.steps(10, fixed)) == {2}
    assert not elsewhere.is_settled
    resumed.load_state_dict({})  # of a run whose trial was not over
    assert resumed.num == 4


# -- learners and results ---------------------------------------------------------------------------------------------


class Convolution(nn.Module):
    """Few parameters, and many multiplications."""

    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(24, 3))

    def forward(self, obs: torch.Tensor) -> etude.Output:
        return etude.Output(self.net(obs.unsqueeze(1)))


@pytest.mark.parametrize(
    ("net", "rows", "is_tried"),
    [
        (None, 64, False),
        (NetworkConfig(hidden=(256, 256)), 256, True),
        (NetworkConfig(hidden=(256, 256)), 8, False),
        (Convolution, 64, True),
    ],
)
def test_learners_know_what_is_small(net: Any, rows: int, is_tried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    free = Machine(monkeypatch, 4, FAST)
    box = spaces.Box(-1, 1, (8,), np.float32)
    given, shape = (None, net) if isinstance(net, NetworkConfig) else (net, NetworkConfig())
    module = make_module(given, box, spaces.Discrete(3), shape, value=False)
    found = set()

    def loss(module: Any, batch: Batch) -> Loss:
        found.add(torch.get_num_threads())
        free.now += FAST[torch.get_num_threads()]
        return Loss(policy=-module(batch.obs).logp(batch.action).mean())

    learner = ModuleLearner(module, loss, seed=0, compute=ComputeConfig(threads="auto"))
    batch = {"obs": np.zeros((rows, 8), np.float32), "action": np.zeros(rows, np.int64)}
    update = learner.update_from([batch] * 60)
    assert found == ({1, 2, 4} if is_tried else {1})
    assert update.metrics["threads"] == (4 if is_tried else 1)
    assert torch.get_num_threads() == 16


@pytest.mark.parametrize("given", ["auto", 1, 2])
def test_results_say_how_many(given: Any) -> None:
    config = etude.DQNConfig(env="CartPole-v1", seed=0, threads=given, iteration_steps=64, learning_starts=32)
    algorithm = etude.DQN(config)
    assert [algorithm.train().metrics["threads"] for _ in range(2)] == [1 if given == "auto" else given] * 2
    algorithm.close()


def test_each_module_says_its_own(tmp_path: Any) -> None:
    played = etude.PPO(etude.PPOConfig(**ACTING))
    played.record(tmp_path / "data", 3, seed=0)
    given = {"modules": ("a", "b"), "module_of": module_of, "updates_per_iteration": 2, "seed": 0}
    result = etude.BC(etude.BCConfig(data=str(tmp_path / "data"), **given)).train()
    assert result.metrics["a/threads"] == result.metrics["b/threads"] == 1


def module_of(agent: Any, episode: Any) -> str:
    return "ab"[int(episode.id.split("-")[1]) % 2] if "-" in episode.id else "a"


@pytest.mark.parametrize("bad", [0, -1, "many", 1.5])
def test_numbers_of_threads_that_are_refused(bad: Any) -> None:
    with pytest.raises(SettingsError, match=r"\bthreads\b"):
        etude.PPOConfig(env="CartPole-v1", threads=bad)
