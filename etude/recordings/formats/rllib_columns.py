# SPDX-License-Identifier: Apache-2.0
"""RLlib's words in ours: names of columns, nested values as flat columns, and one dtype for a column everywhere."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.recordings.formats.inferring import fitting
from etude.spaces import Space, leaf_dtype, leaf_shape

NAMES: Final = {
    "action_logp": col.LOGP,
    "action_dist_inputs": col.DIST_INPUTS,
    "vf_preds": col.VALUE,
    "advantages": col.ADVANTAGE,
    "value_targets": col.VALUE_TARGET,
    "weights": col.WEIGHT,
    "state_in": col.STATE_IN,
    "state_out": col.STATE_OUT,
}
"""RLlib's names of what a module put out beside the action, and ours."""

ACTIONS_NOTE: Final = "as the policy gave them: RLlib may have mapped them to the env's bounds after recording"
"""What a reader of RLlib's recordings says about actions in ``header.meta["actions"]``."""

_FLOATS = (col.LOGP, col.DIST_INPUTS, col.VALUE, col.ADVANTAGE, col.VALUE_TARGET, col.STATE_IN, col.STATE_OUT)


def own_name(name: str) -> str:
    """Our name for one of RLlib's columns; names that we have no word for stay, unless they are words of ours."""
    if name in NAMES:
        return NAMES[name]
    reserved = (col.OBS, col.ACTION, col.REWARD, col.INFO, col.NEXT_OBS, col.FINAL_OBS, *NAMES.values())
    return f"extra/{name}" if name.split(col.SEPARATOR)[0] in reserved else name


def flat_entries(values: Sequence[Any], space: Space | None, root: str) -> Columns:
    """A list of one value a step, as flat columns ``[N, ...]`` under ``root``.

    Raises:
        DataError: the values are not alike, or not numbers.
    """
    if isinstance(space, spaces.Dict) or (space is None and values and isinstance(values[0], dict)):
        keys = list(space.spaces) if isinstance(space, spaces.Dict) else list(values[0])
        for i, value in enumerate(values):
            if not isinstance(value, dict) or set(value) != set(keys):
                raise DataError(f"`{root}` at step {i} is not a map with the keys {keys}")
        parts = [(key, space.spaces[key] if isinstance(space, spaces.Dict) else None) for key in keys]
        return _merged(flat_entries([v[key] for v in values], part, f"{root}/{key}") for key, part in parts)
    if isinstance(space, spaces.Tuple) or (space is None and values and _is_tuple(values[0])):
        num = len(space.spaces) if isinstance(space, spaces.Tuple) else len(values[0])
        for i, value in enumerate(values):
            if not isinstance(value, list | tuple) or len(value) != num:
                raise DataError(f"`{root}` at step {i} is not a list of {num} parts")
        subs = space.spaces if isinstance(space, spaces.Tuple) else [None] * num
        return _merged(flat_entries([v[i] for v in values], sub, f"{root}/{i}") for i, sub in enumerate(subs))
    return {root: stacked(values, root)}


def flat_whole(value: Any, space: Space | None, root: str) -> Columns:
    """A value whose arrays have time as their first axis, as flat columns under ``root``.

    Raises:
        DataError: its structure is not the space's, or it holds no numbers.
    """
    if isinstance(space, spaces.Dict) or (space is None and isinstance(value, dict)):
        keys = list(space.spaces) if isinstance(space, spaces.Dict) else list(value)
        if not isinstance(value, dict) or set(value) != set(keys):
            raise DataError(f"`{root}` is not a map with the keys {keys}")
        parts = [(key, space.spaces[key] if isinstance(space, spaces.Dict) else None) for key in keys]
        return _merged(flat_whole(value[key], part, f"{root}/{key}") for key, part in parts)
    if isinstance(space, spaces.Tuple) or (space is None and _is_tuple(value)):
        num = len(space.spaces) if isinstance(space, spaces.Tuple) else len(value)
        if not isinstance(value, list | tuple) or len(value) != num:
            raise DataError(f"`{root}` is not a list of {num} parts")
        subs = space.spaces if isinstance(space, spaces.Tuple) else [None] * num
        return _merged(flat_whole(v, sub, f"{root}/{i}") for i, (v, sub) in enumerate(zip(value, subs, strict=True)))
    return {root: numbers(value, root)}


def _is_tuple(value: Any) -> bool:
    """A list that is no array: one with arrays, scalar arrays or maps in it."""
    return isinstance(value, list | tuple) and any(isinstance(v, np.ndarray | np.generic | dict) for v in value)


def _merged(parts: Any) -> Columns:
    return {name: column for part in parts for name, column in part.items()}


def stacked(values: Sequence[Any], name: str) -> NDArray[Any]:
    """Values of one shape as an array, the first axis of which is theirs."""
    try:
        return numbers(list(values), name)
    except DataError:
        for i, value in enumerate(values):
            own = numbers(value, name, f" at step {i}")
            if own.shape != np.shape(values[0]):
                first = np.shape(values[0])
                raise DataError(f"`{name}` has the shape {own.shape} at step {i}, but {first} at step 0") from None
        raise


def numbers(value: Any, name: str, at: str = "") -> NDArray[Any]:
    """An array of booleans, integers or floats."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"`{name}`{at} holds no array of numbers ({error})") from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"`{name}`{at} holds {_word(array)}, not numbers")
    return array


def _word(array: NDArray[Any]) -> str:
    return "text" if array.dtype.kind in "SU" else f"values of type {array.dtype}"


def schema_dtype(name: str, found: np.dtype[Any], leaf: Space | None) -> np.dtype[Any]:
    """The dtype of a column in all of a recording, from what its first episode holds and its space says."""
    if leaf is not None:
        is_choice = found.kind in "biu" and not isinstance(leaf, spaces.Box)  # `cast` sees to it that it fits
        return leaf_dtype(leaf) if is_choice else fitting(leaf, found)
    if name == col.REWARD:
        return np.dtype(np.float32 if found == np.float32 else np.float64)
    if col.is_under(name, col.INFO):
        return np.dtype(np.float32 if found == np.float32 else np.float64)
    if any(col.is_under(name, root) for root in _FLOATS) and found.kind in "biu":
        return np.dtype(np.float32)
    return found


def cast(column: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> NDArray[Any]:
    """A column in the dtype and shape of a row that it has elsewhere.

    Raises:
        DataError: it has another shape, or numbers that the dtype can't hold.
    """
    if column.shape[1:] != shape:
        raise DataError(f"`{name}` has the shape {list(column.shape[1:])} at each step, not {list(shape)}")
    if column.dtype == dtype:
        return column
    if not np.can_cast(column.dtype, dtype, "same_kind") and not (column.dtype.kind in "biu" and dtype.kind in "iuf"):
        raise DataError(f"`{name}` is {column.dtype}, which can't become {dtype}, as it is in the first episode")
    out = column.astype(dtype)
    if dtype.kind in "iu" and not np.can_cast(column.dtype, dtype) and (out != column).any():
        raise DataError(f"`{name}` holds a number outside {dtype}")
    return out


def check_leaf(column: NDArray[Any], leaf: Space, name: str) -> None:
    """Raise a DataError where a column has not the shape of its space."""
    if column.shape[1:] != leaf_shape(leaf):
        raise DataError(f"`{name}` has the shape {list(column.shape[1:])} at each step, but its space is {leaf}")
