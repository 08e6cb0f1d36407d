# SPDX-License-Identifier: Apache-2.0
"""Whole episodes, played apart from training."""

import time

import numpy as np
from gymnasium import Env
from gymnasium.spaces import Box

from etude.algorithms.result import Evaluation
from etude.connectors import Pipeline
from etude.envs import EnvLike, VectorArena, env_name
from etude.errors import SettingsError
from etude.modules import Module
from etude.recordings import RecordingWriter
from etude.runners import Finished, Runner
from etude.spaces import Space, leaf_shape, leaves

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


def runner_for(env: EnvLike, num_episodes: int, module: Module, connectors: Pipeline, seed: int | None) -> Runner:
    """A runner in ``env``, with as many copies as pay for ``num_episodes``.

    Raises:
        SettingsError: behind ``connectors``, the env's spaces are not those that ``module`` was made for.
    """
    arena = VectorArena(env, 1 if isinstance(env, Env) else min(num_episodes, 16), exact=False)
    learned = connectors.state_dict()
    seen, acted = connectors.spaces(arena.obs_space, arena.action_space)
    if not (_alike(seen, module.obs_space) and acted == module.action_space):
        arena.close()
        raise SettingsError(
            f"the env {env_name(env)} does not fit the module: behind the connectors it has the spaces {seen} "
            f"and {acted}, but the module was made for {module.obs_space} and {module.action_space}. "
            "Where the actions of a recording are in other units than the env's, a connector such as "
            "rescale_action goes between."
        )
    connectors.load_state_dict(learned)
    return Runner(arena, module, connectors, seed=seed)


def _alike(space: Space, other: Space) -> bool:
    """Whether values of one space have the form of the other's; bounds may differ."""
    parts, others = leaves(space, ""), leaves(other, "")
    return parts.keys() == others.keys() and all(
        type(part) is type(others[name])
        and leaf_shape(part) == leaf_shape(others[name])
        and (isinstance(part, Box) or part == others[name])
        for name, part in parts.items()
    )
