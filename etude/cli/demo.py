# SPDX-License-Identifier: Apache-2.0
"""``etude demo``: the whole way in about a minute: train, record, clone from the recording alone, draw."""

import shutil
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from etude.cli import flags
from etude.cli.streams import say
from etude.settings import settings

T = TypeVar("T")

ENV, GOAL, EPISODES = "CartPole-v1", 450.0, 60


@settings
class DemoOptions:
    """What the command takes."""

    out: str = "runs/demo"
    """The folder for everything; an earlier demo in it is replaced."""


def main(args: list[str]) -> int:
    """Run ``etude demo``."""
    about = f"Train PPO on {ENV}, record it, clone it from the recording, and draw how both learned."
    options = flags.options(DemoOptions, args, prog="etude demo", about=about)
    from etude.cli.folders import claimed

    out = Path(options.out)
    with claimed(out):
        return _demo(out)


def _demo(out: Path) -> int:
    begin = time.monotonic()
    from etude.algorithms import BC, PPO, BCConfig, PPOConfig, Stop
    from etude.cli.arguments import TrainOptions
    from etude.cli.train import GOAL_MISSED, run
    from etude.metrics.plot import plot_runs

    ppo, recording, bc, curves = (out / name for name in ("ppo", "recording", "bc", "curves.png"))
    for folder in (ppo, recording, bc):
        shutil.rmtree(folder, ignore_errors=True)
    options = TrainOptions(stop=Stop(return_mean=GOAL, env_steps=400_000))
    with closing(PPO(PPOConfig(env=ENV, seed=1))) as expert:
        code, ppo_seconds = _timed(lambda: run(expert, ppo, options))
    if code:
        return code
    played, record_seconds = _timed(lambda: expert.record(recording, EPISODES, seed=5))
    say(f"recorded {played.episodes} episodes to {recording}")
    clone = BC(BCConfig(env=ENV, data=str(recording), seed=1))
    options = TrainOptions(stop=Stop(return_mean=GOAL, updates=5_000))
    code, bc_seconds = _timed(lambda: run(clone, bc, options))
    if code not in (0, GOAL_MISSED):
        return code
    _, plot_seconds = _timed(lambda: plot_runs([ppo, bc], curves))
    rows = [
        ("train PPO", ppo_seconds, f"return {expert.figures.returns.mean:.1f} after {expert.env_steps:,} steps", ppo),
        ("record", record_seconds, f"{played.episodes} episodes, return {played.return_mean:.1f}", recording),
        (
            "clone by BC",
            bc_seconds,
            f"mean return {clone.figures.returns.mean:.1f} after {clone.learner.updates:,} updates",
            bc,
        ),
        ("plot", plot_seconds, "learning curves of both", curves),
    ]
    lines = [f"{what:<13}{seconds:5.1f} s  {brought:<38}{where}" for what, seconds, brought, where in rows]
    lines.append(f"{'in all':<13}{time.monotonic() - begin:5.1f} s")
    sys.stdout.write("\n" + "\n".join(lines) + "\n")
    return code


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """What ``work`` gives, and the seconds it took."""
    begin = time.monotonic()
    return work(), time.monotonic() - begin
