# SPDX-License-Identifier: Apache-2.0
"""HalfCheetah-v5, an env whose step costs something: sampling, and whole iterations of PPO."""

from collections.abc import Iterator

from benchmarks import sb3
from benchmarks.harness import ETUDE, STEPS_A_SECOND, Figure, Options, Reach, Row, Work, race
from etude import PPO, PPOConfig, Runner, make_arena
from etude.envs import Workers
from etude.modules import make_module

CHEETAH = "HalfCheetah-v5"
NUM_ENVS, NUM_STEPS = 64, 64
UPDATES = {"minibatch_size": 1024, "epochs": 4}
"""16 gradient steps after 4,096 steps."""
HERE, DUMMY = "Etude, in process", "SB3 DummyVecEnv"


def rows(options: Options) -> Iterator[Row]:
    """Steps a second of 64 envs: of collecting, and of iterations, in 2 workers and in this process."""
    workers = Workers(num_workers=2, envs_per_worker=NUM_ENVS // 2)
    iterating = sb3.iterating(NUM_ENVS, NUM_STEPS, CHEETAH, **UPDATES)
    for work, etude, peer, reach in (
        ("sampling", _collecting, sb3.collecting(NUM_ENVS, NUM_STEPS, CHEETAH), 46 / 20.4),
        ("PPO iteration, 4,096 steps, 4 epochs of 1,024,", _training, iterating, 26 / 18.0),
    ):
        rates = race({ETUDE: etude(workers), HERE: etude(Workers()), DUMMY: peer}, options)
        yield Row(
            f"{work} {CHEETAH}, {NUM_ENVS} envs, 2 workers",
            STEPS_A_SECOND,
            [Figure(ETUDE, rates[ETUDE], "etude"), Figure(HERE, rates[HERE]), Figure(DUMMY, rates[DUMMY], "peer")],
            Reach(reach, DUMMY),
        )


def _collecting(workers: Workers) -> Work:
    arena = make_arena(CHEETAH, NUM_ENVS, workers)
    kind = arena.kinds[0]
    runner = Runner(arena, make_module(None, kind.obs_space, kind.action_space), seed=0)
    return lambda: runner.collect(num_steps=NUM_ENVS * NUM_STEPS).num_steps


def _training(workers: Workers) -> Work:
    num_steps = NUM_ENVS * NUM_STEPS
    ppo = PPO(PPOConfig(env=CHEETAH, seed=0, num_envs=NUM_ENVS, num_steps=num_steps, workers=workers, **UPDATES))

    def work() -> int:
        ppo.train()
        return num_steps

    return work
