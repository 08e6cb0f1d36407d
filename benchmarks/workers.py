# SPDX-License-Identifier: Apache-2.0
"""Worker pools: the same envs stepped here, in workers, and by peers that wait for the slowest."""

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from benchmarks.harness import ETUDE, STEPS_A_SECOND, Figure, Options, Reach, Row, Work, race
from benchmarks.sampling import numpy_policy
from benchmarks.slow_envs import Costly, Costly100, Uneven
from etude import Runner
from etude.envs import Workers, make_arena
from etude.modules import make_module

NUM_ENVS = 16
HERE, LOCK_STEP, ASYNC, SUBPROC = (
    "Etude, in process",
    "Etude, lock-step",
    "Gymnasium AsyncVectorEnv",
    "SB3 SubprocVecEnv",
)


def rows(options: Options) -> Iterator[Row]:
    """Steps a second of 16 envs: of no cost, of 100 us, and of uneven cost."""
    for env, turns, reach, cost in ((Costly, 128, 120_000, "no cost"), (Costly100, 32, 16_000, "100 us of CPU")):
        with Closing() as closing:
            works = {
                ETUDE: closing.collecting(env, Workers(num_workers=2, envs_per_worker=8, min_batch=12), turns),
                HERE: closing.collecting(env, Workers(), turns),
                ASYNC: closing.asynchronous(env, turns),
                SUBPROC: closing.subprocesses(env, turns),
            }
            rates = race(works, options)
        yield Row(
            f"{NUM_ENVS} envs, a step of {cost}, 2 workers",
            STEPS_A_SECOND,
            [
                Figure(ETUDE, rates[ETUDE], "etude"),
                Figure(HERE, rates[HERE]),
                Figure(ASYNC, rates[ASYNC], "peer"),
                Figure(SUBPROC, rates[SUBPROC], "peer"),
            ],
            Reach(reach),
            "min_batch=12, as the envs are equally fast",
        )
    with Closing() as closing:
        works = {
            ETUDE: closing.collecting(Uneven, Workers(num_workers=NUM_ENVS, min_batch=1), 12),
            LOCK_STEP: closing.collecting(Uneven, Workers(num_workers=NUM_ENVS, min_batch=NUM_ENVS), 12),
        }
        rates = race(works, options)
    yield Row(
        f"{NUM_ENVS} workers, a step of 0.2 ms that sleeps 20 ms one time in twenty",
        STEPS_A_SECOND,
        [Figure(ETUDE, rates[ETUDE], "etude"), Figure(LOCK_STEP, rates[LOCK_STEP])],
        Reach(3.0, LOCK_STEP),
        "acting on the envs that are ready, against waiting for all",
    )


class Closing:
    """Makes contenders, and closes their envs and workers at the end."""

    def __init__(self) -> None:
        self._close: list[Callable[[], Any]] = []

    def __enter__(self) -> "Closing":
        return self

    def __exit__(self, *error: object) -> None:
        for close in self._close:
            close()

    def collecting(self, env: Callable[[], Any], workers: Workers, turns: int) -> Work:
        """Etude's runner with the built-in network: 2x64, stochastic, with log-probabilities and values."""
        arena = make_arena(env, NUM_ENVS, workers)
        torch.manual_seed(0)
        kind = arena.kinds[0]
        runner = Runner(arena, make_module(None, kind.obs_space, kind.action_space), seed=0)
        self._close.append(runner.close)
        return lambda: runner.collect(num_steps=NUM_ENVS * turns).num_steps

    def asynchronous(self, env: Callable[[], Any], turns: int) -> Work:
        """Gymnasium's, a process an env, with the policy's forward in NumPy and nothing else."""
        envs = gym.vector.AsyncVectorEnv([env] * NUM_ENVS)
        return self._looping(envs, envs.reset(seed=0)[0], turns)

    def subprocesses(self, env: Callable[[], Any], turns: int) -> Work:
        """SB3's, a process an env, likewise."""
        from stable_baselines3.common.vec_env import SubprocVecEnv

        envs = SubprocVecEnv([env] * NUM_ENVS)
        return self._looping(envs, np.asarray(envs.reset()), turns)

    def _looping(self, envs: Any, obs: Any, turns: int) -> Work:
        self._close.append(envs.close)
        policy = numpy_policy(NUM_ENVS)

        def work() -> int:
            nonlocal obs
            for _ in range(turns):
                obs, *_ = envs.step(policy(obs))
            return turns * NUM_ENVS

        return work
