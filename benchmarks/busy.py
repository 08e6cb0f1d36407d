# SPDX-License-Identifier: Apache-2.0
"""Sampling beside a busy process. Each library runs in a process of its own, with the threads it chooses itself."""

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.harness import ENV, ETUDE, SHARE, THREADS, Figure, Options, Reach, Row, Work, process, rate

REACH = 1 / 2.5


def rows(options: Options) -> Iterator[Row]:
    """Steps a second of both kinds of module, at 8 and 64 envs."""
    for num_envs in (8, 64):
        figures = {name: _measured(name, num_envs, options) for name in ("built-in", "users", "sb3")}
        peer = Figure("SB3 collect_rollouts", [b / a for a, b in figures["sb3"]], "peer")
        for name, about in (("built-in", "built-in 2x64"), ("users", "a user's torch module")):
            share = [beside / alone for alone, beside in figures[name]]
            alone = statistics.median(alone for alone, _ in figures[name])
            yield Row(
                f"sampling {ENV} beside a busy process, {about}, {num_envs} envs",
                SHARE,
                [Figure(ETUDE, share, "etude"), peer],
                Reach(REACH),
                f"alone: {alone:,.0f} steps/s; threads are left to each library",
            )


def _measured(name: str, num_envs: int, options: Options) -> list[tuple[float, float]]:
    argv = [sys.executable, "-m", "benchmarks.busy", name, str(num_envs), str(options.rounds), str(options.seconds)]
    out = process(argv, threads=None).out
    return [(alone, beside) for alone, beside in json.loads(out)]


def main(name: str, num_envs: int, rounds: int, seconds: float) -> None:
    """Measure alone and beside a process that is stopped and continued in turns; print the pairs as JSON."""
    work = _work(name, num_envs)
    rate(work, seconds)
    env = {key: value for key, value in os.environ.items() if key not in THREADS}
    other = subprocess.Popen([sys.executable, "-c", "while True: sum(range(10_000))"], env=env)
    pairs = []
    try:
        for _ in range(rounds):
            other.send_signal(signal.SIGSTOP)
            alone = rate(work, seconds)
            other.send_signal(signal.SIGCONT)
            pairs.append((alone, rate(work, seconds)))
    finally:
        other.kill()
        other.wait()
    print(json.dumps(pairs))


def _work(name: str, num_envs: int) -> Work:
    if name == "sb3":
        from benchmarks import sb3

        return sb3.collecting(num_envs, 64)
    from benchmarks.nets import UsersNet
    from etude import PPO, PPOConfig
    from etude.threads import held

    # The algorithm chooses the threads.
    config = PPOConfig(env=ENV, num_envs=num_envs, seed=0, module=None if name == "built-in" else UsersNet())
    algorithm = PPO(config)

    def work() -> int:
        with held(algorithm.num_threads):
            return algorithm.runner.collect(num_steps=64 * num_envs).num_steps

    return work


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
