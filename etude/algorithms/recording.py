# SPDX-License-Identifier: Apache-2.0
"""Episodes that an algorithm plays, written to a recording."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from etude.algorithms import saving
from etude.algorithms.base import Algorithm
from etude.algorithms.playing import play
from etude.algorithms.policies import MAIN, Spaces, spaces_in
from etude.algorithms.result import Evaluation
from etude.connectors.pipeline import learns, state_to_json
from etude.envs import EnvLike, env_name
from etude.errors import DataError
from etude.files import located
from etude.recordings import Recording
from etude.recordings.compression import CompressionLike
from etude.recordings.module_writers import Kind, ModuleWriters, folders_of


def record(
    algorithm: Algorithm[Any],
    path: str | os.PathLike[str],
    num_episodes: int,
    *,
    env: EnvLike | None,
    seed: int | None,
    explore: bool,
    max_steps: int | None,
    append: bool,
    compression: CompressionLike | None,
    max_rows_per_file: int,
    max_file_size: int,
) -> Evaluation:
    """See `Algorithm.record`."""
    folder = os.fspath(path)
    if append and seed is not None:
        there = _num_episodes(folder, kinds_of(algorithm))
        if there:  # else these episodes might be there already
            seed = int(np.random.SeedSequence([seed, there]).generate_state(1)[0])
    runner = algorithm.new_runner(env, num_episodes, seed, max_steps=max_steps)
    where = env if env is not None else algorithm.config.env
    assert where is not None  # new_runner has seen to that
    try:
        kinds = kinds_of(algorithm, spaces_in(runner.arena, list(algorithm.policies), algorithm.config.module_of))
        writers = ModuleWriters(
            folder,
            kinds,
            columns=algorithm.recorded,
            layout="table",  # whole episodes come anyway
            append=append,
            is_run=False,  # equal seeds give equal ids
            env=env_name(where),
            meta=meta_of(algorithm, explore=explore, seed=seed),
            compression=compression,
            max_rows_per_file=max_rows_per_file,
            max_file_size=max_file_size,
        )
    except BaseException:
        runner.close()
        raise
    try:
        return play(
            runner,
            num_episodes,
            explore=explore,
            updates=algorithm.updates,
            to=lambda parts: writers.take(parts, kinds),
        )
    finally:
        writers.close()


def kinds_of(algorithm: Algorithm[Any], spaces: Mapping[str, Spaces] | None = None) -> dict[str, Kind]:
    """For each module the spaces of what is recorded of it: observations as the env gives them, actions as it chooses.

    Args:
        algorithm: Whose modules.
        spaces: Those on the env's side, where it is not the env of training.
    """
    given = algorithm.spaces if spaces is None else spaces
    return {name: (given[name][0], policy.module.action_space) for name, policy in algorithm.policies.items()}


def meta_of(algorithm: Algorithm[Any], *, explore: bool, seed: int | None) -> dict[str, Any]:
    """What is kept beside the data: who acted, and under ``filter`` what its connectors have learned.

    ``filter`` is what `etude.connectors.pipeline.state_to_json` gives, by module id where there are ``modules``; it is
    there where a connector learns.
    """
    policies = algorithm.policies
    several = algorithm.config.modules is not None
    nets = {name: saving.name_of(type(policy.module.net)) for name, policy in policies.items()}
    learned = {name: state_to_json(p.connectors) for name, p in policies.items() if learns(p.connectors)}
    meta: dict[str, Any] = {
        "algorithm": saving.name_of(type(algorithm)),
        "module": nets if several else nets[MAIN],
        "connectors": [repr(connector) for connector in next(iter(policies.values())).connectors.connectors],
        "explore": explore,
        "seed": seed,
        "updates": algorithm.updates,
    }
    if learned:
        meta["filter"] = learned if several else learned[MAIN]
    return meta


def _num_episodes(path: str, kinds: Mapping[str, Kind]) -> int:
    """The episodes that are there already; 0 where nothing can be read."""
    folder = next(iter(folders_of(kinds).values()))
    try:
        return Recording.open(located(path) / folder if folder else located(path)).num_episodes
    except DataError:
        return 0  # if something is there that can't be read, the writer says so
