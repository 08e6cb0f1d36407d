# SPDX-License-Identifier: Apache-2.0
"""Port: where one agent's observations and actions lie in the memory of a pool."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.spaces import Flattener, Nester, Space, check_form, check_value, leaf_shape


class Port:
    """Where one agent's observations and actions lie: row ``env * stride + offset`` of its kind's columns.

    ``show``, ``end`` and ``keep`` take the env and a value; they raise a SpaceError where its shape or dtype does not
    fit the space.
    """

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
        flatten_action = Flattener(action_space, col.ACTION)
        self.show = _writer(obs_space, col.OBS, {name: column[own] for name, column in obs.items()})
        self.end = _writer(obs_space, col.OBS, {name: column[own] for name, column in end_obs.items()})
        actions = {name: column[own] for name, column in action.items()}
        self.keep = _writer(action_space, col.ACTION, actions)
        self.read = _reader(flatten_action, Nester(action_space, col.ACTION), actions)


def _writer(space: Space, root: str, columns: Columns) -> Callable[[int, Any], None]:
    flatten = Flattener(space, root)
    writers = [(name, _leaf_writer(name, leaf, columns[name])) for name, leaf in flatten.leaves.items()]
    if root in columns:  # not nested
        return writers[0][1]

    def write(row: int, value: Any) -> None:
        try:
            parts = flatten(value)
        except (KeyError, IndexError, TypeError):
            check_value(space, value, root)
            raise
        for name, write_leaf in writers:
            write_leaf(row, parts[name])

    return write


def _leaf_writer(name: str, leaf: Space, column: NDArray[Any]) -> Callable[[int, Any], None]:
    shape, dtype, array = leaf_shape(leaf), column.dtype, np.ndarray
    dtypes, scalars = {dtype}, set[type]()  # that were found to fit

    def write(row: int, value: Any) -> None:
        cls = value.__class__
        if cls is array:
            if value.shape != shape or (value.dtype is not dtype and value.dtype not in dtypes):
                check_form(name, leaf, value)
                dtypes.add(value.dtype)
        elif cls not in scalars:
            is_scalar = isinstance(value, int | float | np.generic)
            value = np.asarray(value)
            check_form(name, leaf, value)
            if is_scalar:
                scalars.add(cls)
        column[row] = value

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
