# SPDX-License-Identifier: Apache-2.0
"""Environments: what users bring, as arenas of slots."""

from etude.columns import Columns
from etude.envs.agent_dicts import MultiAgentEnv
from etude.envs.arena import Arena, Kind, Turn
from etude.envs.arenas import make_arena
from etude.envs.make import EnvLike, env_name, make_vector_env
from etude.envs.masks import InfoActionMask
from etude.envs.pool import PoolArena
from etude.envs.pool_processes import kill_workers
from etude.envs.vector import VectorArena
from etude.envs.workers import Workers

__all__ = [
    "Arena",
    "Columns",
    "EnvLike",
    "InfoActionMask",
    "Kind",
    "MultiAgentEnv",
    "PoolArena",
    "Turn",
    "VectorArena",
    "Workers",
    "env_name",
    "kill_workers",
    "make_arena",
    "make_vector_env",
]
