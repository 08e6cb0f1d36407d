# SPDX-License-Identifier: Apache-2.0
"""What each way through a Ray cluster costs: starts, calls, fragments, updates. Weights are in ``ray_sampling``."""

import copy
import logging
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np
import ray

from benchmarks.harness import ENV, ETUDE, Figure, Options, Row, milliseconds, race
from benchmarks.ray_learners import EPOCHS, ROWS, SPACES, on_cluster, updates
from etude import PPO, Experience, PPOConfig
from etude.algorithms import Ray
from etude.ray.learners import LearnerGroup
from etude.ray.runner_actor import FragmentReport, RunnerActor
from etude.ray.runners import Fragment, put_together

BARE, HERE = "a method that does nothing", "Etude, one learner in this process"


def rows(options: Options) -> Iterator[Row]:
    """All of it. Starts are few: a process, and most of its time imports."""
    rounds = 1 if options.quick else 3
    yield _start_of_cluster(rounds)
    with on_cluster():
        yield _start_of_runner(rounds)
        for num in (1, 2):
            yield _start_of_learners(num, rounds)
        for exp, what in (
            (_made(1024), "1,024 steps of CartPole"),
            (_made(8192), "8,192 steps of CartPole"),
            (_with_frames(_made(1024)), "1,024 steps of 84x84x4 uint8"),
        ):
            yield _fragment(exp, what, options)
        yield _update(64, options)


# -- starts -------------------------------------------------------------------------------------------------------


def _start_of_cluster(rounds: int) -> Row:
    logging.getLogger("ray").setLevel(logging.ERROR)
    seconds, ends = [], []
    for _ in range(rounds):
        begin = perf_counter()
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=2**28)
        seconds.append(perf_counter() - begin)
        begin = perf_counter()
        ray.shutdown()
        ends.append(perf_counter() - begin)
    figures = [Figure(ETUDE, seconds, "etude"), Figure("its end", ends)]
    return Row("start of a cluster of this machine alone (ray.init)", "s", figures)


def _start_of_runner(rounds: int) -> Row:
    config = PPOConfig(env=ENV, num_envs=8)
    remote: Any = ray.remote
    kinds = {ETUDE: remote(RunnerActor), "an actor that imports nothing": _Empty}
    arguments: dict[str, tuple[Any, ...]] = {ETUDE: (config, "cpu", 300.0)}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, kind in kinds.items():
            begin = perf_counter()
            actor = kind.remote(*arguments.get(name, ()))
            ray.get(actor.open.remote())
            seconds[name].append(perf_counter() - begin)
            ray.kill(actor)
    (own, *others) = (Figure(name, values) for name, values in seconds.items())
    return Row("start of a runner with 8 CartPoles", "s", [Figure(ETUDE, own.values, "etude"), *others])


def _start_of_learners(num: int, rounds: int) -> Row:
    seconds = []
    config = PPOConfig(env=ENV)
    for _ in range(rounds):
        begin = perf_counter()
        group = LearnerGroup(Ray(num_learners=num), (PPO, config, {"main": SPACES}))
        seconds.append(perf_counter() - begin)
        group.end()
    work = "start of a learner" if num == 1 else f"start of {num} learners, until they are a process group (gloo)"
    return Row(work, "s", [Figure(ETUDE, seconds, "etude")])


class _Nothing:
    """An actor that is there."""

    def open(self) -> None:
        """Do nothing."""


_Empty: Any = ray.remote(_Nothing)


# -- fragments ----------------------------------------------------------------------------------------------------


class _Giving:
    """Answers an order with a fragment that it has made before."""

    def __init__(self, report: FragmentReport, exp: Experience) -> None:
        self._made = report, copy.deepcopy(exp)  # in memory of its own, as what was just made

    def open(self) -> None:
        """Do nothing."""

    @ray.method(num_returns=2)
    def collect(
        self, weights: None, num_steps: int, whole_episodes: bool, explore: bool
    ) -> tuple[FragmentReport, dict[str | None, Experience]]:
        """As a runner's, but for the steps."""
        report, exp = self._made
        return report, {None: exp}


def _made(steps: int) -> Experience:
    """What a runner with 8 envs makes."""
    algorithm = PPO(PPOConfig(env=ENV, num_envs=8, num_steps=steps, seed=0))
    exp = algorithm.runner.collect_each(num_steps=steps)[None]
    algorithm.close()
    return exp


def _with_frames(exp: Experience) -> Experience:
    rng = np.random.default_rng(0)
    frames = rng.integers(256, size=(exp.num_steps, 84, 84, 4), dtype=np.uint8)
    return Experience({**exp.steps, "obs": frames}, exp.offsets, exp.segments, {"obs": frames[: len(exp)]})


def _fragment(exp: Experience, what: str, options: Options) -> Row:
    """From the order to steps in the driver's own memory, without the time in which they are made."""
    algorithm = PPO(PPOConfig(env=ENV, num_envs=8, seed=0))
    finished = algorithm.runner.take_finished()
    algorithm.close()
    steps = exp.num_steps
    report = FragmentReport(steps, steps, {None: 1}, finished, {}, steps // 8, {}, 1.0)
    remote: Any = ray.remote
    actor = remote(_Giving).remote(report, exp)

    def fragment() -> int:
        told, parts = ray.get(list(actor.collect.remote(None, steps, False, True)))
        put_together([Fragment(0, 0, 0, told, parts)], joined=True)
        return 1

    def empty() -> int:
        ray.get(actor.open.remote())
        return 1

    times = milliseconds(race({ETUDE: fragment, BARE: empty}, options))
    ray.kill(actor)
    size = sum(np.asarray(column).nbytes for column in (*exp.steps.values(), *exp.final_obs.values())) / 1e6
    figures = [Figure(ETUDE, times[ETUDE], "etude"), Figure(BARE, times[BARE])]
    return Row(f"order and fragment, runner to driver: {what} ({size:.2g} MB)", "ms", figures)


# -- updates ------------------------------------------------------------------------------------------------------


def _update(width: int, options: Options) -> Row:
    """As the row of ``ray_learners``, with a small network."""
    with updates(width, (2, 1)) as works:
        names = {2: ETUDE, 1: "Etude, one learner of the cluster", 0: HERE}
        times = milliseconds(race({names[num]: works[num] for num in (2, 1, 0)}, options))
    figures = [
        Figure(name, [ms * ROWS * EPOCHS for ms in values], "etude" if name == ETUDE else "limit")
        for name, values in times.items()
    ]
    return Row(
        f"an update of PPO by two learners (gloo), 2x{width}, {EPOCHS} gradient steps of {ROWS:,}", "ms", figures
    )
