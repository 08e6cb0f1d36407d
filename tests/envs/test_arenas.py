# SPDX-License-Identifier: Apache-2.0
"""Which arena an env gets."""

from typing import Any

import gymnasium as gym
import pytest
from gymnasium.vector import AutoresetMode
from many_agent_envs import TwoJobs
from some_envs import LendingVectorEnv, Numbered

from etude.envs import PoolArena, VectorArena, Workers, make_arena
from etude.errors import EnvError


def make_vector() -> Any:
    return gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point")


@pytest.mark.parametrize(
    ("env", "num_envs", "kind"),
    [
        ("CartPole-v1", 3, VectorArena),
        ("CartPole-v1", 1, PoolArena),
        ("Pendulum-v1", 3, PoolArena),
        (Numbered, 3, PoolArena),
        (Numbered(), 1, PoolArena),
        ("some_envs:make_numbered", 3, PoolArena),
        (TwoJobs, 3, PoolArena),
        ("many_agent_envs:TwoJobs", 3, PoolArena),
        (make_vector, 3, VectorArena),
        ("test_arenas:make_vector", 3, VectorArena),
        (LendingVectorEnv(3, AutoresetMode.DISABLED), 3, VectorArena),
    ],
)
def test_an_env_of_each_form(env: Any, num_envs: int, kind: type) -> None:
    arena = make_arena(env, num_envs)
    assert type(arena) is kind
    assert arena.num_envs == num_envs
    arena.reset(seed=1)
    assert sum(len(turn.slots) for turn in arena.recv()) >= num_envs
    arena.close()


def test_settings_of_workers_count_without_workers_too() -> None:
    arena = make_arena("CartPole-v1", 3, Workers(max_steps=7))
    assert type(arena) is PoolArena
    arena.close()


def test_with_workers_their_number_counts() -> None:
    arena = make_arena("CartPole-v1", 3, Workers(num_workers=2, envs_per_worker=2, mode="thread"))
    assert arena.num_envs == 4
    arena.close()


def test_the_factory_is_called_once_for_each_copy() -> None:
    made = []

    def make() -> Any:
        made.append(Numbered())
        return made[-1]

    make_arena(make, 3).close()
    assert len(made) == 3


def test_what_is_no_env() -> None:
    with pytest.raises(EnvError, match="is no env"):
        make_arena(lambda: 3, 1)
    with pytest.raises(EnvError, match="the vector env has 3 envs, but num_envs is 2"):
        make_arena(make_vector, 2)
