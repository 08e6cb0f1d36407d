# SPDX-License-Identifier: Apache-2.0
"""Episodes that an algorithm plays, written to a recording."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from etude.algorithms import saving
from etude.algorithms.base import Algorithm
from etude.algorithms.playing import play
from etude.algorithms.result import Evaluation
from etude.algorithms.students import MAIN
from etude.envs import EnvLike, env_name
from etude.errors import SettingsError
from etude.recordings import Recording, RecordingWriter


def record(
    algorithm: Algorithm[Any],
    path: str | os.PathLike[str],
    num_episodes: int,
    *,
    env: EnvLike | None,
    seed: int | None,
    explore: bool,
    append: bool,
) -> Evaluation:
    """See `Algorithm.record`."""
    if append and seed is not None and any(Path(path).glob("*.parquet")):
        there = Recording.open(path).num_episodes
        seed = int(np.random.SeedSequence([seed, there]).generate_state(1)[0])  # else they might be there already
    runner = algorithm.new_runner(env, num_episodes, seed)
    several = algorithm.config.modules is not None
    nets = {name: saving.name_of(type(student.module.net)) for name, student in algorithm.students.items()}
    first = next(iter(algorithm.students.values()))
    meta = {
        "algorithm": saving.name_of(type(algorithm)),
        "module": nets if several else nets[MAIN],
        "connectors": [repr(connector) for connector in first.connectors.connectors],
        "explore": explore,
        "seed": seed,
        "updates": algorithm.updates,
    }
    where = env if env is not None else algorithm.config.env
    assert where is not None  # new_runner has seen to that
    if len(runner.arena.kinds) > 1:
        runner.close()
        raise SettingsError(
            f"the agents of {env_name(where)} have different spaces, which one recording can't hold yet: record "
            "envs whose agents have equal spaces."
        )
    with RecordingWriter(
        path,
        obs_space=runner.arena.kinds[0].obs_space,
        action_space=first.module.action_space,
        env=env_name(where),
        meta=meta,
        columns=algorithm.recorded,
        append=append,
    ) as writer:
        return play(runner, num_episodes, explore=explore, updates=algorithm.updates, to=writer)
