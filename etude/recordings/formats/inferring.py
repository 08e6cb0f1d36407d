# SPDX-License-Identifier: Apache-2.0
"""Spaces and dtypes of columns: as a space says where no number is lost, else as the numbers are."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from gymnasium import spaces

from etude import columns as col
from etude.columns import SEPARATOR
from etude.errors import DataError
from etude.spaces import Space

MOST_CHOICES: Final = 65_536
"""Single integers from 0 up to this many are taken for choices; larger ones are numbers."""


def fitting(leaf: Space, found: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of a column whose space is ``leaf`` and whose numbers are ``found``: the wider, where they differ."""
    wanted = np.dtype(leaf.dtype)
    if np.can_cast(found, wanted, "safe"):
        return wanted
    return found if np.can_cast(wanted, found, "safe") else np.result_type(wanted, found)


def widened(space: Space, root: str, dtypes: Mapping[str, np.dtype[Any]]) -> Space:
    """``space`` with the dtypes of its columns; where one is wider than in the space, a space of that dtype."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict([(k, widened(sub, f"{root}{SEPARATOR}{k}", dtypes)) for k, sub in space.spaces.items()])
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([widened(sub, f"{root}{SEPARATOR}{i}", dtypes) for i, sub in enumerate(space.spaces)])
    dtype = dtypes[root]
    if dtype == space.dtype:
        return space
    if isinstance(space, spaces.Box):
        return spaces.Box(space.low.astype(dtype), space.high.astype(dtype), space.shape, dtype.type)
    if isinstance(space, spaces.MultiDiscrete) and dtype.kind in "iu":
        return spaces.MultiDiscrete(space.nvec.astype(dtype), dtype.type, start=space.start.astype(dtype))
    if isinstance(space, spaces.Discrete) and dtype.kind in "iu":
        return spaces.Discrete(int(space.n), start=int(space.start), dtype=dtype.type)
    raise DataError(f"column `{root}` holds {dtype}, but its space is {space}. Correct one of them.")


def inferred(dtype: np.dtype[Any], shape: tuple[int, ...], least: int = 0, most: int | None = None) -> Space:
    """The space of a column of which only its numbers are known.

    Args:
        dtype: Of the column.
        shape: Of a row.
        least: The smallest number in the column; needed for single integers alone.
        most: The largest number; None where it is not known.

    Returns:
        Single integers from 0 to at most 65,535 are Discrete; bools are Discrete(2) or MultiBinary; all others are an
        unbounded Box.
    """
    if dtype.kind == "b":
        return spaces.MultiBinary(list(shape) if len(shape) > 1 else shape[0]) if shape else spaces.Discrete(2)
    if dtype.kind in "iu" and not shape and most is not None and least >= 0 and most < MOST_CHOICES:
        return spaces.Discrete(int(most) + 1)
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, dtype.type)
    bounds = np.iinfo(dtype)
    return spaces.Box(bounds.min, bounds.max, shape, dtype.type)


def nested(parts: Mapping[str, Space], root: str) -> Space:
    """The space whose columns have the spaces ``parts``: the one itself, or a Dict by the rest of their paths."""
    if list(parts) == [root]:
        return parts[root]
    inside: dict[str, dict[str, Space]] = {}
    for name, space in parts.items():
        key = name[len(root) + 1 :].split(SEPARATOR)[0]
        inside.setdefault(key, {})[name] = space
    return spaces.Dict([(key, nested(sub, f"{root}{SEPARATOR}{key}")) for key, sub in inside.items()])


def reserved(name: str) -> bool:
    """Whether a recording keeps something of its own under ``name``, so that no column of steps may have it."""
    own = (col.EPISODE_ID, col.AGENT_ID, col.MODULE_ID, col.T_INDEX, col.LOOKBACK, col.TERMINATED, col.TRUNCATED)
    return name in own or any(col.is_under(name, root) for root in (col.FINAL_OBS, col.NEXT_OBS))
