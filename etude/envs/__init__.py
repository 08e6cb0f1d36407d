# SPDX-License-Identifier: Apache-2.0
"""Environments: what users bring, as arenas of slots."""

from etude.columns import Columns
from etude.envs.arena import Arena, Turn
from etude.envs.make import EnvLike, env_name, make_vector_env
from etude.envs.vector import VectorArena

__all__ = ["Arena", "Columns", "EnvLike", "Turn", "VectorArena", "env_name", "make_vector_env"]
