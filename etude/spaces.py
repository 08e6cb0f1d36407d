# SPDX-License-Identifier: Apache-2.0
"""Spaces: flat columns for nested values, JSON for recordings and checkpoints, and checks of values.

Only here is a nested observation or action taken apart (``Flattener``) and put together again (``Nester``).
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from etude.columns import SEPARATOR
from etude.errors import SpaceError

Space: TypeAlias = gym.Space[Any]
Path: TypeAlias = tuple[str | int, ...]

MOST_NUMBERS: Final = 2**24
"""The numbers in one value of a space that is read from a file: a broken file must not take all memory."""

_LEAVES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def leaves(space: Space, root: str) -> dict[str, Space]:
    """The simple spaces inside ``space`` by column name, in the space's own order.

    Raises:
        SpaceError: a part is not Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple; the part is named.
    """
    return {name: leaf for name, _, leaf in _walk(space, root, ())}


def _walk(space: Space, name: str, path: Path) -> list[tuple[str, Path, Space]]:
    if isinstance(space, spaces.Dict | spaces.Tuple) and not len(space.spaces):
        raise SpaceError(f"`{name}` is a {type(space).__name__} space without parts: there is nothing in it.")
    if isinstance(space, spaces.Dict):
        for key in space.spaces:
            if SEPARATOR in str(key):
                raise SpaceError(f"`{name}`: the key {key!r} holds a {SEPARATOR!r}, which separates parts of a path.")
        parts = [_walk(sub, f"{name}{SEPARATOR}{key}", (*path, key)) for key, sub in space.spaces.items()]
        return [leaf for part in parts for leaf in part]
    if isinstance(space, spaces.Tuple):
        parts = [_walk(sub, f"{name}{SEPARATOR}{i}", (*path, i)) for i, sub in enumerate(space.spaces)]
        return [leaf for part in parts for leaf in part]
    if isinstance(space, _LEAVES):
        return [(name, path, space)]
    raise SpaceError(
        f"`{name}` is a {type(space).__name__} space. Etude handles Box, Discrete, MultiDiscrete, MultiBinary, Dict "
        "and Tuple: turn this part into one of them with a Gymnasium wrapper."
    )


def leaf_shape(space: Space) -> tuple[int, ...]:
    """The shape of one value of a simple space; ``()`` for Discrete."""
    return tuple(space.shape or ())


def leaf_dtype(space: Space) -> np.dtype[Any]:
    """The dtype of one value of a simple space."""
    return np.dtype(space.dtype)


class Flattener:
    """Takes values of one space apart into flat columns. Built once, then fast: one look-up for each leaf."""

    def __init__(self, space: Space, root: str) -> None:
        self.leaves: dict[str, Space] = {}
        self._getters: list[tuple[str, Callable[[Any], Any]]] = []
        for name, path, leaf in _walk(space, root, ()):
            self.leaves[name] = leaf
            self._getters.append((name, _getter(path)))
        self._single = root if list(self.leaves) == [root] else None

    def __call__(self, value: Any) -> dict[str, Any]:
        """The leaves of ``value`` (one value or a batched one) by column name, as they are."""
        if self._single is not None:
            return {self._single: value}
        return {name: get(value) for name, get in self._getters}


def _getter(path: Path) -> Callable[[Any], Any]:
    return functools.partial(_inside, path)  # not a closure: connectors are sent to processes


def _inside(path: Path, value: Any) -> Any:
    for key in path:
        value = value[key]
    return value


class Nester:
    """Puts flat columns of one space together again: the inverse of ``Flattener``."""

    def __init__(self, space: Space, root: str) -> None:
        self._space = space
        self._root = root

    def __call__(self, columns: Mapping[str, Any]) -> Any:
        """The nested value (dict, tuple or the bare array) that ``columns`` hold."""
        return _nest(self._space, self._root, columns)


def _nest(space: Space, name: str, columns: Mapping[str, Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _nest(sub, f"{name}{SEPARATOR}{key}", columns) for key, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_nest(sub, f"{name}{SEPARATOR}{i}", columns) for i, sub in enumerate(space.spaces))
    return columns[name]


def space_to_json(space: Space) -> dict[str, Any]:
    """A space as plain JSON data; bounds are one number where all are equal, infinities are the text ``"inf"``."""
    if isinstance(space, spaces.Box):
        return {
            "type": "Box",
            "dtype": np.dtype(space.dtype).name,
            "shape": list(space.shape),
            "low": _bounds_to_json(space.low),
            "high": _bounds_to_json(space.high),
        }
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": np.dtype(space.dtype).name}
    if isinstance(space, spaces.MultiDiscrete):
        return {
            "type": "MultiDiscrete",
            "nvec": space.nvec.tolist(),
            "start": space.start.tolist(),
            "dtype": np.dtype(space.dtype).name,
        }
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": list(space.shape)}
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "spaces": [[key, space_to_json(sub)] for key, sub in space.spaces.items()]}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "spaces": [space_to_json(sub) for sub in space.spaces]}
    raise SpaceError(f"a {type(space).__name__} space can't be written down.")


def space_from_json(data: Mapping[str, Any]) -> Space:
    """The inverse of `space_to_json`.

    Raises:
        SpaceError: the data does not describe a space.
    """
    try:
        kind = data["type"]
        if kind == "Box":
            dtype, shape = np.dtype(data["dtype"]), tuple(data["shape"])
            if math.prod(shape) > MOST_NUMBERS:
                raise ValueError(f"a Box of shape {list(shape)} is larger than any value can be")
            low, high = (_bounds_from_json(data[side], shape, dtype) for side in ("low", "high"))
            return spaces.Box(low, high, shape, dtype.type)
        if kind == "Discrete":
            return spaces.Discrete(data["n"], start=data["start"], dtype=np.dtype(data.get("dtype", "int64")).type)
        if kind == "MultiDiscrete":
            dtype = np.dtype(data["dtype"])
            start = np.asarray(data["start"], dtype) if "start" in data else None
            return spaces.MultiDiscrete(np.asarray(data["nvec"], dtype), dtype.type, start=start)
        if kind == "MultiBinary":
            n = data["n"]
            return spaces.MultiBinary(n[0] if len(n) == 1 else n)
        if kind == "Dict":
            return spaces.Dict([(key, space_from_json(sub)) for key, sub in data["spaces"]])
        if kind == "Tuple":
            return spaces.Tuple([space_from_json(sub) for sub in data["spaces"]])
    except (KeyError, TypeError, ValueError, AssertionError, IndexError, OverflowError) as error:
        raise SpaceError(f"this does not describe a space: {str(data)[:200]} ({error}).") from error
    raise SpaceError(f"unknown kind of space: {kind!r}.")


def _bounds_to_json(bounds: np.ndarray) -> Any:
    flat = bounds.reshape(-1)
    if flat.size and (flat == flat[0]).all():
        return _number_to_json(flat[0].item())
    return [_number_to_json(x) for x in flat.tolist()]


def _number_to_json(x: float) -> float | str:
    return str(x) if x in (float("inf"), float("-inf")) else x


def _bounds_from_json(data: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    if isinstance(data, list):
        return np.array([float(x) if isinstance(x, str) else x for x in data], dtype).reshape(shape)
    return np.full(shape, float(data) if isinstance(data, str) else data, dtype)


def check_value(space: Space, value: Any, root: str) -> None:
    """Raise a SpaceError that shows space against value where ``value`` (a single one) is not in ``space``."""
    try:
        values = Flattener(space, root)(value)
    except (KeyError, IndexError, TypeError) as error:
        raise SpaceError(f"`{root}` is {_describe(value)}, but its space is {space}: {error!r}.") from error
    for name, leaf in leaves(space, root).items():
        array = np.asarray(values[name])
        shape = leaf_shape(leaf)
        if array.shape != shape:
            raise SpaceError(f"`{name}` has shape {array.shape}, but its space {leaf} has shape {shape}.")
        if array.dtype.kind == "f" and np.isnan(array).any():
            where = np.argwhere(np.isnan(array))[0].tolist()
            raise SpaceError(f"`{name}` holds NaN at {where}: {array}.")
        if not np.can_cast(array.dtype, leaf_dtype(leaf), "same_kind"):
            raise SpaceError(f"`{name}` has dtype {array.dtype}, but its space {leaf} has dtype {leaf_dtype(leaf)}.")
        if isinstance(leaf, spaces.Box):
            outside = (array < leaf.low) | (array > leaf.high)
            if outside.any():
                at = tuple(np.argwhere(outside)[0].tolist())
                raise SpaceError(
                    f"`{name}` is {array[at]} at {list(at)}, outside its space's [{leaf.low[at]}, {leaf.high[at]}]. "
                    "Mend the env's step or reset, or widen its space."
                )
        elif not leaf.contains(array.astype(leaf_dtype(leaf))[()]):
            raise SpaceError(f"`{name}` is {array}, outside its space {leaf}.")


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict with the keys {sorted(map(str, value))}"
    return f"a {type(value).__name__}"
