# SPDX-License-Identifier: Apache-2.0
"""Whole episodes, played apart from training."""

import time

import numpy as np

from etude.algorithms.result import Evaluation
from etude.recordings import RecordingWriter
from etude.runners import Finished, Runner

_AT_A_TIME = 4  # episodes of each slot that are held in memory together


def play(
    runner: Runner, num_episodes: int, *, explore: bool, updates: int, to: RecordingWriter | None = None
) -> Evaluation:
    """Play whole episodes, write them down where ``to`` says so, and close the runner."""
    begin = time.perf_counter()
    at_a_time = _AT_A_TIME * runner.arena.num_slots
    parts: list[Finished] = []
    try:
        for done in range(0, num_episodes, at_a_time):
            exp = runner.collect(num_episodes=min(at_a_time, num_episodes - done), explore=explore)
            parts.append(runner.take_finished())
            if to is not None:
                to.write(exp)
    finally:
        runner.close()
    seconds = time.perf_counter() - begin
    returns = np.concatenate([part.returns for part in parts])
    lengths = np.concatenate([part.lengths for part in parts])
    return Evaluation(
        episodes=len(returns),
        return_mean=float(returns.mean()),
        return_min=float(returns.min()),
        return_max=float(returns.max()),
        return_std=float(returns.std()),
        length_mean=float(lengths.mean()),
        env_steps=int(lengths.sum()),
        updates=updates,
        seconds=seconds,
        sample_steps_per_s=int(lengths.sum()) / seconds,
    )
