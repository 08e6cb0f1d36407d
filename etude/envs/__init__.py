# SPDX-License-Identifier: Apache-2.0
"""Environments: envs of any kind, in copies that are stepped as the slots of an arena."""

from etude.columns import Columns
from etude.envs.arena import Arena, Kind, Turn
from etude.envs.backends import kill_workers
from etude.envs.inline import InlineArena
from etude.envs.make import make_arena
from etude.envs.multi_agent import MultiAgentEnv
from etude.envs.pool import PoolArena
from etude.envs.registry import EnvLike, env_name, names_module
from etude.envs.tasks import InfoActionMask
from etude.envs.vector import VectorArena, make_vector_env
from etude.envs.workers import Workers

__all__ = [
    "Arena",
    "Columns",
    "EnvLike",
    "InfoActionMask",
    "InlineArena",
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
    "names_module",
]
