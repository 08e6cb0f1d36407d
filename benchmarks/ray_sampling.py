# SPDX-License-Identifier: Apache-2.0
"""Runners on a cluster of this machine: sampling, weights, and one that is slower than the others."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks import ray_rllib
from benchmarks.harness import ENV, ETUDE, SHARE, STEPS_A_SECOND, Figure, Options, Reach, Row, Work, race, rate
from benchmarks.ray_learners import on_cluster
from benchmarks.slow_envs import Costly, Costly100

STEPS = 4096
LOCAL, RLLIB, BARE = "Etude, local engine, 16 envs", "RLlib, 2 env runners", "bare ray.put and ray.get"


class Costly1000(Costly):
    """A millisecond longer."""

    cost = 1e-3


class Short(Costly100):
    """Episodes of 20 steps, whatever happens in them."""

    length = 20

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.t = 0

    def reset(self, **given: Any) -> Any:
        """As CartPole's."""
        self.t = 0
        return super().reset(**given)

    def step(self, action: Any) -> Any:
        """The cart stays where it is."""
        self.t += 1
        state = self.state
        _, reward, *_ = super().step(action)
        self.state = state
        return np.array(state, np.float32), reward, False, self.t >= self.length, {}


class Unequal:
    """Makes envs with episodes 20 times longer in the first process that asks for one."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / f"long-{os.urandom(4).hex()}"

    def __call__(self) -> gym.Env[Any, Any]:
        """Make one."""
        try:
            with self.mark.open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            pass
        env = Short()
        if self.mark.read_text() == str(os.getpid()):
            env.length *= 20
        return env


def rows(options: Options) -> Iterator[Row]:
    """All of it, on one cluster."""
    with on_cluster():
        yield _cartpole(options)
        yield _scaling(options)
        for megabytes, width in ((1, 350), (100, 3536)):
            yield _weights(options, megabytes, width)
        yield _unequal(options)


def _cartpole(options: Options) -> Row:
    with ExitStack() as stack:
        works = {
            ETUDE: stack.enter_context(_collecting(ENV, 2)),
            LOCAL: stack.enter_context(_collecting(ENV, 0, num_envs=16)),
        }
        if ray_rllib.is_there():
            works[RLLIB] = stack.enter_context(ray_rllib.sampling(ENV, STEPS))
        rates = race(works, options)
    figures = [Figure(ETUDE, rates[ETUDE], "etude"), Figure(LOCAL, rates[LOCAL])]
    figures += [Figure(RLLIB, rates[RLLIB], "peer")] if RLLIB in rates else []
    reach = Reach(10.0, RLLIB) if RLLIB in rates else None
    return Row(f"sampling {ENV}, 2 runners on a Ray cluster, 8 envs each", STEPS_A_SECOND, figures, reach)


def _scaling(options: Options) -> Row:
    one, two = "Etude, 1 runner", "Etude, 2 runners"
    with _collecting(Costly1000, 1, steps=256) as single, _collecting(Costly1000, 2, steps=512) as double:
        rates = race({one: single, two: double}, options)
    shares = [b / (2 * a) for a, b in zip(rates[one], rates[two], strict=True)]
    return Row(
        "a step of 1 ms of CPU: 2 runners against twice as much as 1",
        SHARE,
        [Figure(ETUDE, shares, "etude")],
        Reach(0.9),
    )


def _weights(options: Options, megabytes: int, width: int) -> Row:
    import ray

    from etude.ray.policies import Broadcast, acting_of, as_arrays
    from etude.ray.runner_actor import RunnerActor, seed_of

    class Taking(RunnerActor):
        """Takes weights, and does nothing else."""

        def take(self, weights: Any) -> None:
            """As before a fragment."""
            assert self._runner is not None
            self._take(weights, self._runner)

    class Bare:
        """Takes anything, and does nothing at all."""

        def take(self, weights: Any) -> None:
            """It has been fetched by now."""

    algorithm = _ppo(ENV, 1, 8, STEPS, network={"hidden": (width, width), "separate": True})
    algorithm.engine.close()
    remote: Any = ray.remote
    actors = [remote(Taking).remote(_plain(algorithm.config), "cpu", None) for _ in range(2)]
    ray.get([actor.open.remote() for actor in actors])
    acting = ray.put(acting_of(algorithm))
    ray.get([actor.begin.remote(acting, seed_of(1, 0, 0)) for actor in actors])
    bare = [remote(Bare).remote() for _ in actors]
    broadcast, given = Broadcast(), as_arrays(algorithm.module.state_dict())

    def ours() -> int:
        broadcast.refresh(algorithm, again=True)
        ray.get([actor.take.remote(broadcast.ref) for actor in actors])
        return 1

    def barely() -> int:
        ref = ray.put(given)
        ray.get([actor.take.remote(ref) for actor in bare])
        return 1

    rates = race({ETUDE: ours, BARE: barely}, options)
    for actor in (*actors, *bare):
        ray.kill(actor)
    return Row(
        f"weights of {megabytes} MB to 2 runners, until both act by them",
        "ms",
        [Figure(ETUDE, [1e3 / r for r in rates[ETUDE]], "etude"), Figure(BARE, [1e3 / r for r in rates[BARE]])],
        Reach(1.3, BARE),
    )


def _unequal(options: Options) -> Row:
    """Whole episodes: the rate of the runner whose episodes are short, beside one with long ones, and without."""
    shares = []
    with _sampled(Short, 0) as without, _sampled(Unequal(options.folder), 1) as beside:
        for _ in range(options.rounds):
            alone = rate(without, 2 * options.seconds)
            shares.append(rate(beside, 2 * options.seconds) / alone)
    return Row(
        "whole episodes, those of one of 2 runners 20 times longer: how the other samples",
        SHARE,
        [Figure(ETUDE, shares, "etude")],
        Reach(0.95),
    )


# -- contenders ---------------------------------------------------------------------------------------------------


def _ppo(env: Any, num_runners: int, num_envs: int, steps: int, **more: Any) -> Any:
    from etude import PPO, PPOConfig
    from etude.algorithms import Ray
    from etude.modules import NetworkConfig

    network = NetworkConfig(**more.pop("network", {}))
    engine: Any = Ray(num_runners=num_runners) if num_runners else "local"
    config = PPOConfig(env=env, num_envs=num_envs, num_steps=steps, seed=1, engine=engine, network=network, **more)
    return PPO(config)


def _plain(config: Any) -> Any:
    import dataclasses

    return dataclasses.replace(config, engine="local")


@contextmanager
def _collecting(env: Any, num_runners: int, *, num_envs: int = 8, steps: int = STEPS) -> Iterator[Work]:
    """Etude's runners, waited for as PPO does."""
    algorithm = _ppo(env, num_runners, num_envs, steps)
    try:
        yield lambda: sum(exp.num_steps for exp in algorithm.runner.collect_each(num_steps=steps).values())
    finally:
        algorithm.close()


@contextmanager
def _sampled(env: Any, long: int) -> Iterator[Work]:
    """Counts the steps of one runner that has short episodes."""
    algorithm = _ppo(env, 2, 8, 640)
    shorts: set[str] = set()

    def work() -> int:
        exp = algorithm.runner.collect_each(num_steps=640, whole_episodes=True)[None]
        who = np.array([name.partition("-")[0] for name in exp.segments.episode_id])
        shorts.update(who[exp.lengths <= Short.length].tolist())
        (first, *_) = sorted(shorts)
        return int(exp.lengths[who == first].sum())

    try:
        rate(work, 1.0)
        yield work
    finally:
        algorithm.close()
