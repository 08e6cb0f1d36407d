# SPDX-License-Identifier: Apache-2.0
"""The protocol of `etude serve` and `ExternalEnv`: JSON or msgpack bodies, values of spaces, steps of episodes.

``docs/serve.md`` documents it, for clients in any language.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any, Final, NamedTuple, NoReturn

import msgpack
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import SEPARATOR, Columns
from etude.errors import EtudeError, SpaceError
from etude.spaces import NamedDiscrete, Space, are_choices, in_words, leaf_dtype, leaf_shape, leaves

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
CONTENT_TYPE: Final = "Content-Type"
SESSION: Final = "session"
POLICY: Final = "policy"

STEP_FIELDS: Final = (SESSION, col.OBS, col.REWARD, col.TERMINATED, col.TRUNCATED)
"""The fields of a request that reports a step of an episode."""


class RequestError(EtudeError):
    """A refused request.

    Args:
        field: The wrong field: a path such as ``obs/camera``.
        message: What is wrong, as words that follow the field's name.
        status: HTTP status of the answer, 400 to 499.
    """

    def __init__(self, field: str, message: str, status: int = 400) -> None:
        super().__init__(f"`{field}` {message}")
        self.field, self.status = field, status


# -- bodies -----------------------------------------------------------------------------------------------------------


def decode(body: bytes, content_type: str) -> dict[str, Any]:
    """Parse the fields of a request's body; an empty body has none.

    Raises:
        RequestError: the content type is not supported, or the body is broken or not an object.
    """
    if not body:
        return {}
    try:
        if content_type == JSON:
            fields = _from_json(body.decode())
        elif content_type == MSGPACK:
            fields = msgpack.unpackb(body, raw=False, strict_map_key=True)
        else:
            raise RequestError(CONTENT_TYPE, f"is {content_type!r}, but must be {JSON} or {MSGPACK}.", 415)
    except (ValueError, TypeError, RecursionError, MemoryError, msgpack.UnpackException) as error:
        what = content_type.partition("/")[2]
        raise RequestError("body", f"can't be read as {what}: {str(error) or type(error).__name__}.") from None
    if not isinstance(fields, dict):
        raise RequestError("body", f"is {_kind(fields)}, but must be an object with fields.")
    return fields


def encode(answer: Any, content_type: str) -> bytes:
    """Encode an answer as msgpack if ``content_type`` says so, otherwise as JSON."""
    if content_type == MSGPACK:
        packed: bytes = msgpack.packb(answer)
        return packed
    return _to_json(answer).encode()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON; numbers must be finite")


_from_json = json.JSONDecoder(parse_constant=_refuse_constant).decode
_to_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def check_fields(fields: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise a RequestError for the first field that is not one of ``known``."""
    for name in fields:
        if name not in known:
            takes = ", ".join(known) or "none"
            raise RequestError(str(name)[:100], f"is not a field of this request: it takes {takes}.")


def _kind(value: Any) -> str:
    """Name a value's type in the words of JSON."""
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "an array", dict: "an object"}
    return kinds.get(type(value), f"of the type {type(value).__name__}")


# -- values of spaces -------------------------------------------------------------------------------------------------


def read_value(space: Space, value: Any, root: str, max_rows: int) -> tuple[Columns, bool]:
    """Read a value of a space, or a batch of values, as flat columns ``[B, ...]``; also return whether it is a batch.

    A Dict is an object, a Tuple an array, and anything else a number or nested arrays of numbers. A `NamedDiscrete`
    also takes its names, as strings. In a batch, each part has one additional axis in front. In msgpack, an array may
    also be ``{"shape": [...], "data": bytes}``: little-endian numbers of the space's dtype, in C order.

    Raises:
        RequestError: the value does not fit the space, or a batch does not have 1 to ``max_rows`` rows; the error names
            the part.
    """
    columns: Columns = {}
    batches: dict[str, tuple[bool, int]] = {}
    for name, leaf, part in _parts(space, value, root):
        array, shape = _numbers(name, leaf, part), leaf_shape(leaf)
        is_batch = array.ndim == len(shape) + 1
        if array.shape[is_batch:] != shape:
            found = f"has shape {list(array.shape)}, but in its space {list(shape)}"
            raise RequestError(name, f"{found}; a batch has one more axis in front.")
        columns[name] = column = array if is_batch else array[None]
        batches[name] = is_batch, len(column)
        if len(set(batches.values())) > 1:
            other, (of_batch, rows) = next(iter(batches.items()))
            there = f"{rows} rows" if of_batch else "no axis of a batch"
            own = f"{len(column)} rows" if is_batch else "no axis of a batch"
            raise RequestError(name, f"has {own}, but `{other}` has {there}.")
        if not 1 <= len(column) <= max_rows:
            raise RequestError(name, f"is a batch of {len(column)}, but must have 1 to {max_rows} rows.")
        inside = are_choices(leaf, column)
        if inside is not None and not inside.all():
            raise RequestError(name, f"is outside its space {leaf}.")
    return columns, is_batch


def _parts(space: Space, value: Any, name: str) -> Iterator[tuple[str, Space, Any]]:
    """Yield the name, the space and the value of each leaf of a space."""
    if isinstance(space, spaces.Dict):
        keys = [str(key) for key in space.spaces]
        if not isinstance(value, Mapping):
            raise RequestError(name, f"is {_kind(value)}, but must be an object with {', '.join(keys)}.")
        for key in value:
            if key not in keys:
                raise RequestError(f"{name}{SEPARATOR}{key}"[:200], f"is not in the space: it has {', '.join(keys)}.")
        for key, sub in zip(keys, space.spaces.values(), strict=True):
            if key not in value:
                raise RequestError(f"{name}{SEPARATOR}{key}", "is missing.")
            yield from _parts(sub, value[key], f"{name}{SEPARATOR}{key}")
    elif isinstance(space, spaces.Tuple):
        if not isinstance(value, list) or len(value) != len(space.spaces):
            found = f"an array of {len(value)}" if isinstance(value, list) else _kind(value)
            raise RequestError(name, f"is {found}, but must be an array of {len(space.spaces)} parts.")
        for i, (sub, part) in enumerate(zip(space.spaces, value, strict=True)):
            yield from _parts(sub, part, f"{name}{SEPARATOR}{i}")
    else:
        yield name, space, value


def _numbers(name: str, leaf: Space, value: Any) -> NDArray[Any]:
    """Convert a leaf's value to an array of the leaf's dtype, of any shape; refuse numbers that are not finite."""
    dtype, texts = leaf_dtype(leaf), value if isinstance(value, list) else [value]
    if isinstance(value, Mapping):
        array = _unpacked(name, value, dtype)
    elif isinstance(leaf, NamedDiscrete) and {*map(type, texts)} == {str}:
        try:
            array = leaf.numbers(value)
        except SpaceError as error:
            raise RequestError(name, f"has a name that is not known: {error}") from None
    else:
        is_numbers = _types_in(value) <= {bool, int, float}  # NumPy would pad every string to the longest one
        try:
            array = np.asarray(value if is_numbers else None)
        except (ValueError, OverflowError):
            raise RequestError(name, "is not an array of numbers: its rows differ in length or depth.") from None
    if array.dtype.kind not in "biuf":
        what = _kind(value) if not isinstance(value, list) else "an array with values that are not numbers"
        raise RequestError(name, f"is {what}, but must be numbers.")
    if array.dtype.kind == "f" and dtype.kind != "f" and array.size:
        raise RequestError(name, f"has numbers with a fraction, but its space {in_words(leaf)} has whole numbers.")
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            array = array.astype(dtype, copy=False)
        if not np.isfinite(array).all():
            raise RequestError(name, f"has a number that is not finite, or too large for {dtype}.")
    elif (array.astype(dtype) != array).any():
        raise RequestError(name, f"has a number outside the range of {dtype}.")
    return array.astype(dtype, copy=False)


def _types_in(value: Any) -> set[type]:
    """The types of all values in nested lists."""
    found, level = set[type](), [value]
    while level:
        types = {*map(type, level)}
        found |= types - {list}
        level = [*chain.from_iterable(one for one in level if type(one) is list)] if list in types else []
    return found


def _unpacked(name: str, value: Mapping[str, Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    shape, data = value.get("shape"), value.get("data")
    is_shape = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape) and len(shape) < 33
    if value.keys() != {"shape", "data"} or not is_shape or not isinstance(data, bytes):
        raise RequestError(name, 'is an object, but must be numbers, or in msgpack {"shape": [...], "data": bytes}.')
    assert isinstance(shape, list)
    size = math.prod(shape) * dtype.itemsize
    if size != len(data):
        raise RequestError(name, f"has {len(data)} bytes, but {dtype} of shape {shape} has {size}.")
    try:
        return np.frombuffer(data, dtype.newbyteorder("<")).reshape(shape).astype(dtype)
    except ValueError:  # there is no data, as one axis is 0, but another is too large for NumPy
        raise RequestError(name, f"has the shape {shape}, which is too large.") from None


def as_lists(space: Space, columns: Columns, root: str) -> dict[str, list[Any]]:
    """Convert flat columns ``[B, ...]`` of a space to nested lists of numbers, or of strings where it has names."""
    parts = leaves(space, root).items()
    return {
        name: (leaf.named(columns[name]) if isinstance(leaf, NamedDiscrete) else columns[name]).tolist()
        for name, leaf in parts
    }


# -- steps ------------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A step that a client reports: the result of its last action, and the next observation."""

    obs: Columns | None
    """Flat columns ``[1, ...]``. None: the episode has terminated without a final observation."""
    reward: float | None
    """Reward of the last action. None: not reported, or the episode begins with this step."""
    terminated: bool
    truncated: bool

    @property
    def done(self) -> bool:
        """Whether the episode has ended, so that no action is expected."""
        return self.terminated or self.truncated


def read_step(fields: Mapping[str, Any], obs_space: Space, *, is_first: bool, needs_reward: bool) -> Step:
    """Read the step that a request reports.

    Args:
        fields: The fields of the request.
        obs_space: The space of one observation.
        is_first: Whether the step begins an episode.
        needs_reward: Whether all later steps must have a reward.

    Raises:
        RequestError: a field is missing, unknown or wrong.
    """
    check_fields(fields, STEP_FIELDS)
    flags = {}
    for name in (col.TERMINATED, col.TRUNCATED):
        given = fields.get(name)
        if given is not None and not isinstance(given, bool):
            raise RequestError(name, f"is {_kind(given)}, but must be true or false.")
        flags[name] = bool(given)
        if is_first and given:
            raise RequestError(name, "is true in the first step of an episode, before any action.")
    reward = fields.get(col.REWARD)
    if reward is not None:
        is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
        if not is_number or not math.isfinite(_as_float(reward)):
            raise RequestError(col.REWARD, f"is {_kind(reward)}, but must be one finite number.")
        if is_first:
            raise RequestError(col.REWARD, "is given, but this step begins an episode: nothing was earned yet.")
        reward = _as_float(reward)
    elif needs_reward and not is_first:
        raise RequestError(col.REWARD, "is missing: give the reward of the last action.")
    obs = fields.get(col.OBS)
    if obs is None:
        if not flags[col.TERMINATED]:
            raise RequestError(col.OBS, "is missing: the observation, which only a terminated episode may lack.")
        return Step(None, reward, **flags)
    columns, is_batch = read_value(obs_space, obs, col.OBS, 1)
    if is_batch:
        raise RequestError(col.OBS, f"is a batch, but a {SESSION} has one observation at a time.")
    return Step(columns, reward, **flags)


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf
