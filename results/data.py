# SPDX-License-Identifier: Apache-2.0
"""Recordings that offline presets learn from, made by the agents of SAC's presets.

They are made as D4RL's are (Fu et al. 2020, "D4RL: datasets for deep data-driven reinforcement learning", section 5,
Gym-MuJoCo), with a smaller budget: SAC trains in parts. ``expert`` are episodes of its best agent, ``medium`` those of
the first one with a third of that return, and ``medium-replay`` is everything that SAC did until then.
"""

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import etude

PARTS: Final = 10
STEPS: Final = 100_000
"""In ``medium`` and ``expert``, about."""
EPISODES: Final = 10
"""That each agent is evaluated by."""


def recording(folder: Path, env: str, level: str, env_steps: int) -> list[str]:
    """The folders of the recordings of a level, which are made if they are not there.

    Args:
        folder: Of all levels.
        env: The task.
        level: ``medium``, ``medium-replay`` or ``expert``.
        env_steps: That SAC trains for.
    """
    about = folder / "levels.json"
    if not about.exists():
        returns = [_part(folder, env, k, (k + 1) * env_steps // PARTS) for k in range(PARTS)]
        expert = max(range(PARTS), key=returns.__getitem__)
        medium = next(k for k in range(PARTS) if 3 * returns[k] >= returns[expert])
        for name, k in (("medium", medium), ("expert", expert)):
            _played(folder, env, k, name)
        about.write_text(json.dumps({"medium": medium, "expert": expert, "returns": returns}))
    if level == "medium-replay":
        return [str(folder / f"replay-{k}") for k in range(json.loads(about.read_text())["medium"] + 1)]
    return [str(folder / level)]


def _part(folder: Path, env: str, k: int, env_steps: int) -> float:
    """Train until ``env_steps``, keeping the agent and all that it did; its mean return."""
    path, replay = folder / f"agent-{k}", folder / f"replay-{k}"
    if (path / "return.json").exists():
        return float(json.loads((path / "return.json").read_text()))
    for begun in (path, replay):
        shutil.rmtree(begun, ignore_errors=True)
    record = etude.RecordConfig(path=str(replay))
    if k == 0:
        compute = etude.ComputeConfig(threads=1, compile=True)
        algorithm: Any = etude.SAC(etude.preset("sac", env, seed=0, record=record, compute=compute))
    else:
        algorithm = etude.load(folder / f"agent-{k - 1}", env=env, record=record)
    with closing(algorithm):
        algorithm.fit(etude.Stop(env_steps=env_steps))
        algorithm.save(path)
        reached = algorithm.evaluate(EPISODES, seed=k).return_mean
    (path / "return.json").write_text(json.dumps(reached))
    return float(reached)


def _played(folder: Path, env: str, k: int, name: str) -> None:
    """Record episodes of an agent, `STEPS` steps in all."""
    shutil.rmtree(folder / name, ignore_errors=True)
    with closing(etude.load(folder / f"agent-{k}", env=env)) as algorithm:
        played, part = 0, 0
        while played < STEPS:
            told = algorithm.record(folder / name, EPISODES, seed=1000 + part, explore=True, append=part > 0)
            played, part = played + round(told.length_mean * EPISODES), part + 1
