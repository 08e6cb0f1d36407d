# SPDX-License-Identifier: Apache-2.0
"""Defaults beside defaults: each library in a process of its own, with the CPU threads that it chooses itself.

All other rows hold every library to one thread.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.harness import ENV, ETUDE, Figure, Options, Reach, Row, Work, process, rate

Threads = Callable[[], int]

PEER = "SB3"
SAC_SMALL, SAC_LARGE, PPO = "SAC 2x64", "SAC 2x256", "PPO"
TITLES = {
    SAC_LARGE: "SAC on Pendulum-v1: env step and update, 2x256, batch 256, threads left to each library",
    SAC_SMALL: "SAC on Pendulum-v1: env step and update, 2x64, batch 128, threads left to each library",
    PPO: f"PPO on {ENV}: a step with its share of updates, 2x64, minibatch 64, threads left to each library",
}
WARM = 10.0
"""Seconds before anything is timed, in which Etude finds out how many threads pay."""


def rows(options: Options) -> Iterator[Row]:
    """Milliseconds of a step with its updates; the libraries take turns, process by process."""
    for work, title in TITLES.items():
        found: dict[str, list[tuple[float, int]]] = {ETUDE: [], PEER: []}
        for _ in range(options.processes):
            for who, values in found.items():
                argv = [sys.executable, "-m", "benchmarks.default_threads", who, work, str(options.seconds)]
                milliseconds, threads = json.loads(process(argv, threads=None).out.splitlines()[-1])
                values.append((milliseconds, threads))
        figures = [
            Figure(who, [ms for ms, _ in values], "etude" if who == ETUDE else "peer") for who, values in found.items()
        ]
        chosen = "; ".join(f"{who} {', '.join(str(num) for _, num in values)}" for who, values in found.items())
        note = f"threads: {chosen}; of {len(os.sched_getaffinity(0))} cores" if hasattr(os, "sched_getaffinity") else ""
        yield Row(title, "ms", figures, Reach(1.0, PEER), note)


def main(who: str, work: str, seconds: float) -> None:
    """Print as JSON the milliseconds of a step, and the threads that updates were made by."""
    run, threads = (_etude if who == ETUDE else _sb3)(work)
    end = time.perf_counter() + (WARM if seconds > 0.1 else 0.0)
    run()
    while time.perf_counter() < end:
        run()
    print(json.dumps([1e3 / rate(run, 5 * seconds), threads()]))


def _etude(work: str) -> tuple[Work, Threads]:
    import etude
    from benchmarks.off_policy import STEPS, etude_sac

    algorithm: etude.PPO | etude.SAC
    if work == PPO:
        algorithm = etude.PPO(
            etude.PPOConfig(env=ENV, seed=0, num_envs=8, num_steps=2048, minibatch_size=64, epochs=10, lr=3e-4)
        )
    else:
        algorithm = etude_sac(0, (64, 64), 128) if work == SAC_SMALL else etude_sac(0, (256, 256), 256)
    latest: dict[str, float] = {}

    def run() -> int:
        latest.update(algorithm.train().metrics)
        return 2048 if work == PPO else STEPS

    return run, lambda: int(latest["threads"])


def _sb3(work: str) -> tuple[Work, Threads]:
    import torch
    from stable_baselines3.common.env_util import make_vec_env

    if work == PPO:
        from stable_baselines3 import PPO as PeerPPO

        model: Any = PeerPPO(
            "MlpPolicy", make_vec_env(ENV, 8), n_steps=256, batch_size=64, n_epochs=10, device="cpu", seed=0
        )
        steps = 2048
    else:
        from benchmarks.off_policy import STEPS, peer_sac

        model = peer_sac(0, (64, 64), 128) if work == SAC_SMALL else peer_sac(0, (256, 256), 256)
        steps = STEPS

    def run() -> int:
        model.learn(steps, reset_num_timesteps=False)
        return steps

    return run, torch.get_num_threads


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
