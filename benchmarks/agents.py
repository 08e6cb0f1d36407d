# SPDX-License-Identifier: Apache-2.0
"""Many agents: four CartPoles in one env, two modules."""

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.harness import ETUDE, STEPS_A_SECOND, Figure, Options, Reach, Row, Work, race
from benchmarks.slow_envs import FourCartPoles
from etude import Runner
from etude.envs import make_arena
from etude.modules import make_module

TURNS = 64
REACH = {1: 12_000, 8: 60_000}
ALONE = "env alone"


def rows(options: Options) -> Iterator[Row]:
    """Agent steps a second in 1 and 8 envs."""
    for num_envs, reach in REACH.items():
        rates = race({ETUDE: collecting(num_envs), ALONE: alone(num_envs)}, options)
        yield Row(
            f"4-agent CartPole, 2 modules, {num_envs} env{'s' if num_envs > 1 else ''}, steps of agents",
            STEPS_A_SECOND,
            [Figure(ETUDE, rates[ETUDE], "etude"), Figure(ALONE, rates[ALONE])],
            Reach(reach),
        )


def collecting(num_envs: int) -> Work:
    """Etude's runner: two built-in networks of 2x64, each for two of the agents."""
    arena = make_arena(FourCartPoles, num_envs)
    torch.manual_seed(0)
    kind = arena.kinds[0]
    modules = {name: make_module(None, kind.obs_space, kind.action_space) for name in ("even", "odd")}
    runner = Runner(
        arena,
        modules,
        module_of=lambda agent, episode: "odd" if agent in ("cart_1", "cart_3") else "even",
        count_steps_by="agent_steps",
        seed=0,
    )
    num_steps = 4 * num_envs * TURNS
    return lambda: sum(exp.num_steps for exp in runner.collect_each(num_steps=num_steps).values())


def alone(num_envs: int) -> Work:
    """The envs with random actions."""
    envs = [FourCartPoles() for _ in range(num_envs)]
    draws = np.random.default_rng(0)
    for env in envs:
        env.reset(seed=0)

    def work() -> int:
        steps = 0
        for _ in range(TURNS):
            for env in envs:
                if not env.agents:
                    env.reset()
                actions = draws.integers(0, 2, len(env.agents)).tolist()
                steps += len(env.agents)
                env.step(dict(zip(env.agents, actions, strict=True)))
        return steps

    return work
