# SPDX-License-Identifier: Apache-2.0
"""Spaces: flat columns for nested values, JSON for recordings and checkpoints, and checks of values.

Nested observations and actions are flattened (``Flattener``) and nested again (``Nester``) only here.
"""

import functools
import itertools
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from etude.columns import OBS, SEPARATOR, is_under
from etude.errors import SpaceError

Space: TypeAlias = gym.Space[Any]
Spaces: TypeAlias = tuple[Space, Space]
"""The observation space and the action space."""

Keys: TypeAlias = tuple[str | int, ...]

MOST_NUMBERS: Final = 2**27
"""The most numbers in one value of a space read from a file, so that a broken file can't exhaust the memory."""

MOST_LEVELS: Final = 64
"""The maximum nesting depth of Dicts and Tuples."""

_ROUNDING: Final = 1e-5
"""How far a float may be outside a bound of its Box, relative to it: envs make rounding errors."""

_LEAVES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class NamedDiscrete(spaces.Discrete):
    """A Discrete space whose numbers stand for names: ``i`` stands for ``names[i]``.

    It equals another NamedDiscrete with the same names in the same order, and never a Discrete without names.

    Args:
        names: The names: at least one, all different.
        dtype: The integer dtype of the numbers.

    Raises:
        SpaceError: there are no names, a name occurs twice, or a name is not a text.
    """

    def __init__(self, names: Sequence[str], dtype: Any = np.int64) -> None:
        self.names = tuple(names)
        if not self.names or isinstance(names, str) or not all(isinstance(name, str) for name in self.names):
            raise SpaceError(f"the names of a NamedDiscrete are {reprlib.repr(names)}: give a list of texts.")
        if len(set(self.names)) < len(self.names):
            twice = next(name for i, name in enumerate(self.names) if name in self.names[:i])
            raise SpaceError(f"a NamedDiscrete has the name {twice!r} twice: leave one of them out.")
        super().__init__(len(self.names), dtype=dtype)

    def numbers(self, names: Any) -> np.ndarray:
        """The numbers of names: an array of `dtype`, of the shape of ``names`` (a text, or an array of texts).

        Raises:
            SpaceError: a name is unknown.
        """
        known = {name: i for i, name in enumerate(self.names)}
        given = np.asarray(names, object)
        unknown = next((name for name in given.flat if name not in known), None)
        if unknown is not None:
            raise SpaceError(f"{unknown!r} is none of the {self.n} known names: {self.listed()}.")
        return np.array([known[name] for name in given.flat], self.dtype).reshape(given.shape)

    def named(self, numbers: Any) -> Any:
        """The names of numbers: an array of texts of the same shape, or one text for one number."""
        found = np.array(self.names, object)[np.asarray(numbers)]
        return found if isinstance(found, str) else found.astype(str)

    @property
    def has_numbers(self) -> bool:
        """Whether some names are whole numbers, so that a number in a table may be a name."""
        return any(name.removeprefix("-").isdecimal() for name in self.names)

    def listed(self) -> str:
        """The names for a message; if there are many, the first few."""
        return ", ".join(self.names[:12]) + (", ..." if self.n > 12 else "")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedDiscrete) and super().__eq__(other) and self.names == other.names

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"NamedDiscrete({self.n}: {self.listed()})"


class NamedVector:
    """Base class of spaces of vectors whose numbers have names, such as those of the columns of a table.

    Such a space equals the same space without names, but not one with the same names in another order.
    """

    names: tuple[str, ...]
    """The names of the numbers."""

    def _set_names(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        if isinstance(names, str) or not all(isinstance(name, str) for name in self.names):
            raise SpaceError(f"the names of a {type(self).__name__} are {reprlib.repr(names)}: give a list of texts.")

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and not (isinstance(other, NamedVector) and _are_reordered(self, other))

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}: {', '.join(self.names[:12])}{', ...' * (len(self.names) > 12)})"


class NamedBox(NamedVector, spaces.Box):
    """A Box of vectors whose numbers have names; see `NamedVector`.

    Args:
        low: The lower bounds, as those of a Box.
        high: The upper bounds.
        names: The names of the numbers.
        dtype: The dtype of the numbers.

    Raises:
        SpaceError: a name is not a text.
    """

    def __init__(self, low: Any, high: Any, names: Sequence[str], dtype: Any = np.float32) -> None:
        self._set_names(names)
        super().__init__(low, high, (len(self.names),), dtype)


class NamedMultiDiscrete(NamedVector, spaces.MultiDiscrete):
    """A MultiDiscrete of vectors whose choices have names; see `NamedVector`, and `NamedBox` for the arguments."""

    def __init__(self, nvec: Any, names: Sequence[str], dtype: Any = np.int64, start: Any = None) -> None:
        self._set_names(names)
        super().__init__(nvec, dtype, start=start)


class NamedMultiBinary(NamedVector, spaces.MultiBinary):
    """A MultiBinary of vectors whose numbers have names; see `NamedVector`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._set_names(names)
        super().__init__(len(self.names))


def with_names(space: Space, names: Sequence[str]) -> Space:
    """``space`` with ``names`` for its numbers, if it is a space of vectors of that length; else ``space`` itself."""
    if not names or space.shape != (len(names),):
        return space
    if isinstance(space, spaces.Box):
        return NamedBox(space.low, space.high, names, space.dtype.type)
    if isinstance(space, spaces.MultiDiscrete):
        return NamedMultiDiscrete(space.nvec, names, space.dtype.type, space.start)
    return NamedMultiBinary(names) if isinstance(space, spaces.MultiBinary) else space


def are_permuted(one: Space, other: Space) -> bool:
    """Whether two spaces, or two of their parts, have numbers with the same names in another order."""
    both = [pair for pair in _pairs(one, other) if all(isinstance(part, NamedVector) for part in pair)]
    return any(_are_reordered(a, b) for a, b in both)


def _are_reordered(one: Any, other: Any) -> bool:
    return bool(one.names != other.names and sorted(one.names) == sorted(other.names))


def _pairs(one: Space, other: Space) -> list[tuple[Space, Space]]:
    """The simple spaces inside two spaces that have the same column name."""
    others = leaves(other, "")
    return [(part, others[name]) for name, part in leaves(one, "").items() if name in others]


def leaves(space: Space, root: str) -> dict[str, Space]:
    """The simple spaces inside ``space`` by column name, in the space's own order.

    Raises:
        SpaceError: a part is not Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple, or its dtype has another
            byte order than this machine; the part is named.
    """
    return {name: leaf for name, _, leaf in walk(space, root)}


def walk(space: Space, name: str, path: Keys = ()) -> list[tuple[str, Keys, Space]]:
    """The simple spaces inside ``space``: each one's column name, its keys, and itself; raises like `leaves`."""
    _check_level(len(path))
    if isinstance(space, spaces.Dict | spaces.Tuple):
        if not len(space.spaces):
            raise SpaceError(f"`{name}` is a {type(space).__name__} space without parts.")
        found: list[tuple[str, Keys, Space]] = []
        for key, part in _parts(space):
            if SEPARATOR in str(key):
                raise SpaceError(f"`{name}`: the key {key!r} holds a {SEPARATOR!r}, which separates parts of a path.")
            found += walk(part, f"{name}{SEPARATOR}{key}", (*path, key))
        return found
    if isinstance(space, _LEAVES):
        if not leaf_dtype(space).isnative:
            raise SpaceError(
                f"the space of `{name}` has dtype {leaf_dtype(space)}, whose byte order is not this machine's: give "
                f"the space the dtype {leaf_dtype(space).name}. Observations may keep theirs."
            )
        return [(name, path, space)]
    if not isinstance(space, spaces.Space):
        raise SpaceError(f"the space of `{name}` is {space!r}: it must be an object of a class in gymnasium.spaces.")
    raise SpaceError(
        f"`{name}` is a {type(space).__name__} space. Etude handles Box, Discrete, MultiDiscrete, MultiBinary, Dict "
        f"and Tuple: {_remedy(name, path)}"
    )


def _parts(space: "spaces.Dict | spaces.Tuple[Any]") -> Iterable[tuple[str | int, Space]]:
    """The keys of a Dict or the numbers of a Tuple, each with its part."""
    return space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)


def _remedy(name: str, path: Keys) -> str:
    """What to do about an unsupported part, given its name and its keys."""
    wrapper = "TransformObservation" if is_under(name, OBS) else "TransformAction"
    turn = f"turn this part into one of them with a wrapper, such as gymnasium.wrappers.{wrapper}"
    keys = list(itertools.takewhile(lambda key: isinstance(key, str), path))
    if not keys or wrapper == "TransformAction":
        return f"{turn}."
    drop = f"drop:{SEPARATOR.join(map(str, keys))}"
    return f'{turn}, or leave it out with a connector: connectors=("{drop}",), or --connectors {drop}.'


def map_leaves(space: Space, change: Callable[[str, Space], Space], root: str) -> Space:
    """``space`` with each simple space in it replaced by ``change(column name, simple space)``."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict(
            [(key, map_leaves(sub, change, f"{root}{SEPARATOR}{key}")) for key, sub in space.spaces.items()]
        )
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([map_leaves(sub, change, f"{root}{SEPARATOR}{i}") for i, sub in enumerate(space.spaces)])
    return change(root, space)


def is_handled(space: Space) -> bool:
    """Whether Etude supports all parts of a space."""
    try:
        return bool(walk(space, ""))
    except SpaceError:
        return False


def find_part(space: Space, path: str) -> Space | None:
    """The part of nested Dict spaces at ``path`` (keys separated by ``/``); None if there is none."""
    found: Any = space
    for key in path.split(SEPARATOR):
        if not isinstance(found, spaces.Dict) or key not in found.spaces:
            return None
        found = found.spaces[key]
    return found  # type: ignore[no-any-return]


def without(space: Space, paths: Iterable[str]) -> Space:
    """``space`` without the parts at ``paths`` (see `find_part`); paths that it does not have are ignored.

    Raises:
        SpaceError: nothing would be left.
    """
    for path in paths:
        if find_part(space, path) is not None:
            space = _without(space, path.split(SEPARATOR))
            if not space.spaces:
                raise SpaceError(f"without `{path}`, nothing of the observation is left: keep a part of it.")
    return space


def _without(space: Any, keys: Sequence[str]) -> spaces.Dict:
    parts: list[tuple[str, Space]] = []
    for key, part in space.spaces.items():
        if key != keys[0]:
            parts.append((key, part))
        elif len(keys) > 1 and (rest := _without(part, keys[1:])).spaces:
            parts.append((key, rest))
    return spaces.Dict(parts)


def leaf_shape(space: Space) -> tuple[int, ...]:
    """The shape of one value of a simple space; ``()`` for Discrete."""
    return tuple(space.shape or ())


def channels_come_first(leaf: Space) -> bool:
    """Whether the first axis of a Box with three axes holds the channels of an image; otherwise the last one does.

    If `with_channels` did not set it, two equal neighbouring axes are taken as height and width. If there are none, or
    all three are equal, channels are the first axis if it is shorter than the last, else the last.
    """
    known: bool | None = getattr(leaf, _CHANNELS_FIRST, None)
    if known is not None:
        return known
    first, middle, last = leaf_shape(leaf)
    return middle == last if (first == middle) != (middle == last) else first < last


SMALLEST_IMAGE: Final = 5
"""Pixels per side from which a Box with three axes is an image. Smaller ones are encoded as plain numbers."""
_MANY_PIXELS: Final = 24  # pixels per side, from which on fully connected layers are much larger than convolutions


def is_image(leaf: Space) -> bool:
    """Whether a simple space is encoded by convolutions: a Box with three axes and at least 5 pixels per side."""
    if not isinstance(leaf, spaces.Box) or len(leaf.shape) != 3:
        return False
    height, width = leaf.shape[1:] if channels_come_first(leaf) else leaf.shape[:2]
    return min(height, width) >= SMALLEST_IMAGE


def has_pixels(leaf: Space) -> bool:
    """Whether a simple space holds images, also of two or four axes, which convolutions don't encode."""
    shape = leaf_shape(leaf)
    is_large = len(shape) in (2, 4) and sorted(shape)[-2] >= _MANY_PIXELS
    return is_image(leaf) or (is_large and leaf_dtype(leaf) == np.uint8)


_CHANNELS_FIRST: Final = "_etude_channels_first"


def with_channels(made: Space, *, first: bool) -> Space:
    """Set which axis of ``made``, a space of images, holds the channels, and return it; see `channels_come_first`."""
    setattr(made, _CHANNELS_FIRST, first)
    return made


def leaf_dtype(space: Space) -> np.dtype[Any]:
    """The dtype of one value of a simple space."""
    return np.dtype(space.dtype)


def alike(space: Space, other: Space) -> bool:
    """Whether two spaces have the same structure, kinds and shapes; bounds of Boxes may differ."""
    if leaves(space, "").keys() != leaves(other, "").keys() or are_permuted(space, other):
        return False
    return all(
        leaf_shape(a) == leaf_shape(b) and (isinstance(b, spaces.Box) if isinstance(a, spaces.Box) else a == b)
        for a, b in _pairs(space, other)
    )


class Flattener:
    """Splits values of a space into flat columns. Create it once; each call then costs one look-up per leaf."""

    def __init__(self, space: Space, root: str) -> None:
        self.leaves: dict[str, Space] = {}
        self._getters: list[tuple[str, Callable[[Any], Any]]] = []
        for name, path, leaf in walk(space, root):
            self.leaves[name] = leaf
            self._getters.append((name, functools.partial(part_at, path)))  # not a closure: connectors are pickled
        self._single = root if list(self.leaves) == [root] else None

    def __call__(self, value: Any) -> dict[str, Any]:
        """The leaves of ``value`` (a single value or a batch) by column name, unchanged."""
        if self._single is not None:
            return {self._single: value}
        return {name: get(value) for name, get in self._getters}


def part_at(path: Iterable[str | int], value: Any) -> Any:
    """The part of a nested value under the keys ``path``."""
    for key in path:
        value = value[key]
    return value


class Nester:
    """Builds nested values of one space from flat columns: the inverse of ``Flattener``."""

    def __init__(self, space: Space, root: str) -> None:
        self._root = root
        self._is_tuple = isinstance(space, spaces.Tuple)
        self._parts: dict[str | int, Nester] | None = None
        if isinstance(space, spaces.Dict | spaces.Tuple):
            self._parts = {key: Nester(part, f"{root}{SEPARATOR}{key}") for key, part in _parts(space)}

    def __call__(self, columns: Mapping[str, Any]) -> Any:
        """The nested value (dict, tuple, or a single array) of ``columns``."""
        if self._parts is None:
            return columns[self._root]
        nested = {key: part(columns) for key, part in self._parts.items()}
        return tuple(nested.values()) if self._is_tuple else nested


def space_to_json(space: Space) -> dict[str, Any]:
    """A space as plain JSON data. Bounds are one number if all are equal; infinities are the text ``"inf"``.

    Raises:
        SpaceError: Etude does not support the space, or it is larger than `space_from_json` accepts.
    """
    return _to_json(space, _Room(), 0)


def _to_json(space: Space, room: "_Room", level: int) -> dict[str, Any]:
    _check_level(level)
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "spaces": [[key, _to_json(sub, room, level + 1)] for key, sub in space.spaces.items()]}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "spaces": [_to_json(sub, room, level + 1) for sub in space.spaces]}
    room.take(space.shape or (), type(space).__name__)
    own: dict[str, Any] = {"dtype": np.dtype(space.dtype).name}
    if isinstance(space, spaces.Box):
        bounds = {"low": _bounds_to_json(space.low), "high": _bounds_to_json(space.high)}
        own = {"type": "Box", **own, "shape": list(space.shape), **bounds}
    elif isinstance(space, spaces.Discrete):
        own = {"type": "Discrete", "n": int(space.n), "start": int(space.start), **own}
    elif isinstance(space, spaces.MultiDiscrete):
        own = {"type": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist(), **own}
    elif isinstance(space, spaces.MultiBinary):
        own = {"type": "MultiBinary", "n": list(space.shape)}
    else:
        raise SpaceError(f"a {type(space).__name__} space can't be saved.")
    return own | ({"names": list(space.names)} if isinstance(space, NamedVector | NamedDiscrete) else {})


def _check_level(level: int) -> None:
    if level > MOST_LEVELS:
        raise SpaceError(f"the space has Dicts or Tuples inside each other on more than {MOST_LEVELS} levels.")


class _Room:
    """Counts the numbers in the parts of a space, up to a limit."""

    def __init__(self) -> None:
        self.numbers = MOST_NUMBERS

    def take(self, shape: Iterable[int], kind: str) -> None:
        """Count a simple space; SpaceError if the parts now have too many numbers."""
        shape = list(shape)
        self.numbers -= math.prod(shape)
        if self.numbers < 0:
            raise SpaceError(
                f"with a {kind} of shape {reprlib.repr(shape)}, the space has more than {MOST_NUMBERS:,} numbers in "
                "all, which could fill the memory: let the env show less at once."
            )


def space_from_json(data: Any) -> Space:
    """The inverse of `space_to_json`.

    Raises:
        SpaceError: the data does not describe a space, its values have more than `MOST_NUMBERS` numbers, or it has
            more than `MOST_LEVELS` levels.
    """
    return _from_json(data, _Room(), 0)


def _named(space: Space, data: Mapping[str, Any]) -> Space:
    found = with_names(space, data["names"]) if "names" in data else space
    if isinstance(found, NamedVector) != ("names" in data):
        raise ValueError(f"there are {len(data['names'])} names for the shape {space.shape}")
    return found


def _from_json(data: Any, room: _Room, level: int) -> Space:
    _check_level(level)
    try:
        kind = data["type"]
        if kind == "Box":
            dtype, shape = _dtype(data["dtype"], "biuf"), tuple(data["shape"])
            room.take(shape, kind)
            low, high = (_bounds_from_json(data[side], shape, dtype) for side in ("low", "high"))
            return _named(spaces.Box(low, high, shape, dtype.type), data)
        if kind == "Discrete":
            dtype = _dtype(data.get("dtype", "int64"), "iu")
            if "names" not in data:
                return spaces.Discrete(data["n"], start=data["start"], dtype=dtype.type)
            if (data["n"], data["start"]) != (len(data["names"]), 0):
                raise ValueError(f"there are {len(data['names'])} names, not {data['n']} from 0")
            return NamedDiscrete(data["names"], dtype.type)
        if kind == "MultiDiscrete":
            dtype = _dtype(data["dtype"], "iu")
            start = np.asarray(data["start"], dtype) if "start" in data else None
            return _named(spaces.MultiDiscrete(np.asarray(data["nvec"], dtype), dtype.type, start=start), data)
        if kind == "MultiBinary":
            n = data["n"]
            room.take(n, kind)
            return _named(spaces.MultiBinary(n[0] if len(n) == 1 else n), data)
        if kind == "Dict":
            return spaces.Dict([(key, _from_json(sub, room, level + 1)) for key, sub in data["spaces"]])
        if kind == "Tuple":
            return spaces.Tuple([_from_json(sub, room, level + 1) for sub in data["spaces"]])
    except SpaceError:
        raise
    except Exception as error:
        raise SpaceError(f"this does not describe a space: {reprlib.repr(data)} ({error}).") from error
    known = "Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple"
    raise SpaceError(f"unknown kind of space: {reprlib.repr(kind)}. Etude handles {known}.")


def _dtype(name: Any, kinds: str) -> np.dtype[Any]:
    dtype = np.dtype(name if isinstance(name, str) else "")
    if dtype.kind not in kinds:
        raise ValueError(f"the dtype {name!r} is not possible for such a space")
    return dtype


def _bounds_to_json(bounds: np.ndarray) -> Any:
    flat = bounds.reshape(-1)
    if flat.size and (flat == flat[0]).all():
        return _number_to_json(flat[0].item())
    return [_number_to_json(x) for x in flat.tolist()]


def _number_to_json(x: float) -> float | str:
    return str(x) if x in (float("inf"), float("-inf")) else x


def _bounds_from_json(data: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    if isinstance(data, list):
        bounds = np.array([float(x) if isinstance(x, str) else x for x in data], dtype).reshape(shape)
    else:
        bounds = np.full(shape, float(data) if isinstance(data, str) else data, dtype)
    if np.isnan(bounds).any():
        raise ValueError("NaN is no bound")
    return bounds


def check_form(name: str, leaf: Space, array: np.ndarray) -> None:
    """Raise a SpaceError if the value ``name`` does not have the shape of its simple space, or fit its dtype."""
    shape, dtype = leaf_shape(leaf), leaf_dtype(leaf)
    if array.shape != shape:
        raise SpaceError(f"`{name}` has shape {array.shape}, but its space {in_words(leaf)} has shape {shape}.")
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise SpaceError(f"`{name}` has dtype {array.dtype}, but its space {in_words(leaf)} has dtype {dtype}.")
    if dtype.kind in "iu" and not np.can_cast(array.dtype, dtype) and array.size:
        low, high, limits = int(array.min()), int(array.max()), np.iinfo(dtype)
        if low < limits.min or high > limits.max:
            raise SpaceError(f"`{name}` holds {low if low < limits.min else high}, outside the range of {dtype}.")


def check_finite_value(name: str, array: np.ndarray) -> None:
    """Raise a SpaceError if the value ``name`` holds NaN or infinity."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        where = tuple(np.argwhere(~np.isfinite(array))[0].tolist())
        held = "NaN" if np.isnan(array[where]) else str(array[where])
        raise SpaceError(f"`{name}` holds {held} at {list(where)}: {array}.")


def outside_bounds(box: spaces.Box, array: np.ndarray) -> np.ndarray:
    """Mark the numbers of an array ``[..., *box.shape]`` outside the bounds of a Box: booleans of the same shape.

    Floats may exceed a bound by a rounding error: `_ROUNDING` times its size. For a bound of 0, the size is that of the
    other bound, but at most 1.
    """
    low, high = box.low, box.high
    if leaf_dtype(box).kind == "f":
        low, high = low.astype(np.float64), high.astype(np.float64)
        of_zero = np.maximum(np.abs(low), np.abs(high)).clip(0.0, 1.0)
        slack = [_ROUNDING * np.where(bound == 0, of_zero, np.abs(bound)) for bound in (low, high)]
        low, high = low - slack[0], high + slack[1]
    return (array < low) | (array > high)


def check_value(space: Space, value: Any, root: str) -> None:
    """Raise a SpaceError that shows space and value if a single ``value`` does not fit ``space``.

    Numbers outside the bounds of a Box are accepted: see `outside_bounds`.
    """
    try:
        values = Flattener(space, root)(value)
    except (KeyError, IndexError, TypeError) as error:
        raise mismatch(space, value, root) from error
    for name, leaf in leaves(space, root).items():
        array = np.asarray(values[name])
        check_form(name, leaf, array)
        check_finite_value(name, array)
        check_choice(name, leaf, array)


def check_choice(name: str, leaf: Space, array: np.ndarray) -> None:
    """Raise a SpaceError if the value ``name`` is not in its simple space of choices. A Box is not checked."""
    inside = are_choices(leaf, array[None])
    if inside is not None and not inside[0]:
        raise SpaceError(f"`{name}` is {array}, outside its space {leaf}.")


def choices_of(leaf: Space) -> tuple[np.ndarray, np.ndarray] | None:
    """The first choice and the number of choices of a simple space, int64 scalars or arrays of its shape.

    None for a Box, whose bounds are not checked: see `outside_bounds`.
    """
    choices: tuple[Any, Any]
    if isinstance(leaf, spaces.Discrete):
        choices = leaf.start, leaf.n
    elif isinstance(leaf, spaces.MultiDiscrete):
        choices = leaf.start, leaf.nvec
    elif isinstance(leaf, spaces.MultiBinary):
        choices = 0, 2
    else:
        return None
    return np.asarray(choices[0], np.int64), np.asarray(choices[1], np.int64)


def are_choices(leaf: Space, array: np.ndarray) -> np.ndarray | None:
    """Mark the rows of a batch ``[B, *shape]`` that are in a simple space of choices: booleans ``[B]``. None for a
    Box."""
    choices = choices_of(leaf)
    if choices is None:
        return None
    first, count = choices
    inside = (array >= first) & (array < first + count)
    marked: np.ndarray = inside.all(axis=tuple(range(1, inside.ndim)))
    return marked


def mismatch(space: Space, value: Any, name: str) -> SpaceError:
    """The error for a value that lacks a part of its space, or has another structure; the part is named."""
    return _misfit(space, value, name) or SpaceError(
        f"`{name}` is {described_value(value)}, but its space is {in_words(space)}."
    )


def _misfit(space: Space, value: Any, name: str) -> SpaceError | None:
    if isinstance(space, spaces.Dict):
        keys = ", ".join(map(str, space.spaces))
        if not isinstance(value, Mapping):
            return SpaceError(f"`{name}` is {described_value(value)}, but must be a dict with {keys}.")
        for key in space.spaces:
            if key not in value:
                return SpaceError(f"`{name}{SEPARATOR}{key}` is missing: `{name}` is {described_value(value)}.")
    elif isinstance(space, spaces.Tuple):
        count = len(space.spaces)
        if not isinstance(value, tuple | list):
            return SpaceError(f"`{name}` is {described_value(value)}, but must be a tuple of {count} parts.")
        if len(value) < count:
            return SpaceError(f"`{name}` has {len(value)} of the {count} parts of its space.")
    else:
        return None
    found = (_misfit(part, value[key], f"{name}{SEPARATOR}{key}") for key, part in _parts(space))
    return next((error for error in found if error is not None), None)


def described_value(value: Any) -> str:
    """A description of the kind of a value, for a message."""
    if value is None:
        return "None"
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(sorted(map(str, value))) or 'nothing in it'}"
    return f"of type {type(value).__name__}"


_ENDS_OF_INT64 = re.compile(r"-9223372036854775808\b|\b9223372036854775807\b")


def is_bounded(space: Space) -> bool:
    """Whether all Boxes in a space have bounds."""
    return all(leaf.is_bounded() for leaf in leaves(space, "").values() if isinstance(leaf, spaces.Box))


def same_bounds(space: Space, other: Space) -> bool:
    """Whether corresponding Boxes of two spaces have the same bounds, as far as both are bounded."""
    return all(
        np.allclose(a.low, b.low) and np.allclose(a.high, b.high)
        for a, b in _pairs(space, other)
        if isinstance(a, spaces.Box) and isinstance(b, spaces.Box) and a.shape == b.shape
        if a.is_bounded() and b.is_bounded()
    )


def in_words(shown: object) -> str:
    """The text of a space or of its bounds, for a message. The ends of int64, which are the bounds of a Box of any
    whole numbers, become ``no bound``."""
    return _ENDS_OF_INT64.sub("no bound", str(shown))


def in_short(space: Space) -> str:
    """A short description of a space: ``Box[4]``, ``Discrete(2)``, ``Dict(camera, state)``."""
    if isinstance(space, spaces.Dict):
        return f"Dict({', '.join(space)})"
    if isinstance(space, spaces.Tuple):
        return f"Tuple({', '.join(map(in_short, space))})"
    if isinstance(space, spaces.Discrete):
        return f"Discrete({int(space.n)})"
    return f"{type(space).__name__}{list(space.shape or ())}"
