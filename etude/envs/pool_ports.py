# SPDX-License-Identifier: Apache-2.0
"""Port: where one agent's observations and actions lie in the memory of a pool."""

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.spaces import Flattener, Nester, Space, leaf_shape


class Port:
    """Where one agent's observations and actions lie: row ``env * stride + offset`` of its kind's columns."""

    def __init__(
        self,
        obs_space: Space,
        action_space: Space,
        obs: Columns,
        end_obs: Columns,
        action: Columns,
        stride: int,
        offset: int,
    ) -> None:
        self.obs_space, self.action_space = obs_space, action_space
        own = slice(offset, None, stride)
        flatten, flatten_action = Flattener(obs_space, col.OBS), Flattener(action_space, col.ACTION)
        self.show = _writer(flatten, {name: column[own] for name, column in obs.items()})
        self.end = _writer(flatten, {name: column[own] for name, column in end_obs.items()})
        actions = {name: column[own] for name, column in action.items()}
        self.keep = _writer(flatten_action, actions)
        self.read = _reader(flatten_action, Nester(action_space, col.ACTION), actions)


def _writer(flatten: Flattener, columns: Columns) -> Callable[[int, Any], None]:
    for root in (col.OBS, col.ACTION):
        if root in columns:  # not nested
            return columns[root].__setitem__

    def write(row: int, value: Any) -> None:
        for name, part in flatten(value).items():
            columns[name][row] = part

    return write


def _reader(flatten: Flattener, nest: Nester, columns: Columns) -> Callable[[int], Any]:
    """Actions are copied: an env may keep them, and the columns are written over."""
    if col.ACTION in columns:
        column = columns[col.ACTION]
        if not leaf_shape(flatten.leaves[col.ACTION]):
            return column.__getitem__  # a NumPy number, which nobody can write over
        return lambda row: column[row].copy()
    return lambda row: nest({name: _own(column[row]) for name, column in columns.items()})


def _own(value: NDArray[Any]) -> Any:
    return value.copy() if value.ndim else value
