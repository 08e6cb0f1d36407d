# SPDX-License-Identifier: Apache-2.0
"""Names of the columns of Experience, and how columns of nested observations and actions are named.

A nested observation or action is stored as flat columns with path names: ``obs/camera``, ``action/0``. The part before
the first slash is the column's *root*.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias, TypeVar

from numpy.typing import NDArray

T = TypeVar("T")

Columns: TypeAlias = dict[str, NDArray[Any]]
"""Flat columns by path name, each ``[rows, ...]``."""

OBS: Final = "obs"
ACTION: Final = "action"
REWARD: Final = "reward"
TERMINATED: Final = "terminated"
TRUNCATED: Final = "truncated"
INFO: Final = "info"
NEXT_OBS: Final = "next_obs"
FINAL_OBS: Final = "final_obs"

ENV_ACTION_SPACE: Final = "env_action_space"
"""Not a column: the key of the env's action space in a recording's metadata, if connectors change its actions."""
LOGP: Final = "logp"
DIST_INPUTS: Final = "dist_inputs"
VALUE: Final = "value"
ADVANTAGE: Final = "advantage"
VALUE_TARGET: Final = "value_target"
TARGET_LOGP: Final = "target_logp"
STATE_IN: Final = "state_in"
STATE_OUT: Final = "state_out"
WEIGHT: Final = "weight"
STEPS_AHEAD: Final = "steps_ahead"
DISCOUNT: Final = "discount"

LEARNERS: Final = (VALUE, ADVANTAGE, VALUE_TARGET, DISCOUNT)
"""Columns that the learner's connectors compute. Recorded ones come from the module that acted, or another tool."""

SCALARS: Final = (REWARD, TERMINATED, TRUNCATED, DISCOUNT, LOGP, WEIGHT, VALUE, ADVANTAGE, VALUE_TARGET)
"""Columns that hold one number for each step, ``[rows]``."""

ACTION_MASK: Final = "action_mask"
"""The key of the action mask in a Dict observation: which choices are allowed."""

EPISODE_ID: Final = "episode_id"
AGENT_ID: Final = "agent_id"
MODULE_ID: Final = "module_id"
T_INDEX: Final = "t"
ENV_T: Final = "env_t"
LOOKBACK: Final = "lookback"
SEGMENT: Final = "segment"

SEPARATOR: Final = "/"

OBS_MASK: Final = OBS + SEPARATOR + ACTION_MASK
"""The column of the action mask."""


def is_under(name: str, root: str) -> bool:
    """Whether ``name`` is the column ``root`` or one of its parts (``root/...``)."""
    return name == root or name.startswith(root + SEPARATOR)


def under(names: Iterable[str], root: str) -> list[str]:
    """The names among ``names`` that are ``root`` or a part of it, in their order."""
    inner = root + SEPARATOR
    return [name for name in names if name == root or name.startswith(inner)]


def subtree(columns: Mapping[str, T], root: str) -> dict[str, T]:
    """The columns that are ``root`` or a part of it, under their own names."""
    inner = root + SEPARATOR
    return {name: value for name, value in columns.items() if name == root or name.startswith(inner)}


def renamed(columns: Mapping[str, T], root: str, new_root: str) -> dict[str, T]:
    """The columns under ``root``, renamed to ``new_root``: ``obs/x`` becomes ``next_obs/x``."""
    return {moved(name, root, new_root): value for name, value in subtree(columns, root).items()}


def moved(name: str, root: str, new_root: str) -> str:
    """The name of a column under ``root`` if it were under ``new_root``: ``obs/x`` becomes ``next_obs/x``."""
    return new_root + name[len(root) :]


def as_obs(name: str) -> str:
    """The name of a column under ``next_obs`` or ``final_obs``, moved to ``obs``; other names are unchanged."""
    root = next((root for root in (NEXT_OBS, FINAL_OBS) if is_under(name, root)), None)
    return name if root is None else moved(name, root, OBS)


def prefixed(columns: Mapping[str, T], root: str) -> dict[str, T]:
    """``columns`` with ``root`` in front of their names: ``h`` becomes ``state_in/h``."""
    return {f"{root}{SEPARATOR}{name}": column for name, column in columns.items()}
