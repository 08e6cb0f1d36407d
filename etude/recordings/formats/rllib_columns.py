# SPDX-License-Identifier: Apache-2.0
"""Shared code of RLlib's formats: names, nested values, copies of rows, and spaces.

Nested values become Etude's flat columns, with one dtype per column in a recording.
"""

import base64
import io
import reprlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.experience.arrays import hashes_of
from etude.recordings.action_units import ACTIONS, BY_RLLIB
from etude.recordings.formats.arrow import numbers as arrow_numbers
from etude.recordings.formats.arrow import one_array
from etude.recordings.formats.inferring import Range, fitting, inferred_space
from etude.recordings.formats.msgpack_numpy import DTYPE
from etude.recordings.formats.sorting import KeyedRows
from etude.recordings.layout import Header
from etude.spaces import Space, leaf_dtype

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
"""RLlib's names of module outputs other than the action, and Etude's."""
ENDS: Final = ("terminateds", "truncateds", "dones")
"""RLlib's flags, in the order of `etude.recordings.formats.source.FLAGS`."""
_RESERVED: Final = (
    *(col.OBS, col.ACTION, col.REWARD, col.INFO, col.NEXT_OBS, col.FINAL_OBS, *NAMES.values()),
    *(col.EPISODE_ID, col.AGENT_ID, col.MODULE_ID, col.SEGMENT, col.T_INDEX, col.TERMINATED, col.TRUNCATED),
)

_FLOATS = (col.LOGP, col.DIST_INPUTS, col.VALUE, col.ADVANTAGE, col.VALUE_TARGET, col.STATE_IN, col.STATE_OUT)


Ints = NDArray[np.int64]
Schema: TypeAlias = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""The dtype and row shape of each column."""


def own_name(name: str) -> str:
    """Return Etude's name for one of RLlib's columns; unknown names stay, unless they are reserved in Etude."""
    if name in NAMES:
        return NAMES[name]
    return f"extra/{name}" if name.split(col.SEPARATOR)[0] in _RESERVED else name


def flat_columns(values: Sequence[Any], space: Space | None, root: str, *, whole: bool = False) -> Columns:
    """Flatten values, one for each step, to columns ``[N, ...]`` under ``root``.

    With ``whole``, it is a single value whose arrays have time as their first axis.

    Raises:
        DataError: the values differ in structure from each other or from the space, or are not numbers.
    """
    first = values[0] if space is None and len(values) else None
    if isinstance(space, spaces.Dict) or isinstance(first, dict):
        keys: Sequence[Any] = list(space.spaces if isinstance(space, spaces.Dict) else values[0])
        kinds: type | tuple[type, ...] = dict
        wanted = f"a map with the keys {keys}"
    elif isinstance(space, spaces.Tuple) or _is_tuple(first):
        keys = range(len(space.spaces if isinstance(space, spaces.Tuple) else values[0]))
        kinds, wanted = (list, tuple), f"a list of {len(keys)} parts"
    else:
        return {root: numbers(values[0], root) if whole else stacked(values, root)}
    for i, value in enumerate(values):
        own = range(len(value)) if isinstance(value, list | tuple) else value
        if not isinstance(value, kinds) or set(own) != set(keys):
            raise DataError(f"`{root}`{'' if whole else f' at step {i}'} is not {wanted}")
    out: Columns = {}
    for key in keys:
        part = space.spaces[key] if isinstance(space, spaces.Dict | spaces.Tuple) else None
        out |= flat_columns([value[key] for value in values], part, f"{root}/{key}", whole=whole)
    return out


def _is_tuple(value: Any) -> bool:
    """Whether a value is a list of parts, not of numbers: it contains arrays, scalar arrays or maps."""
    return isinstance(value, list | tuple) and any(isinstance(v, np.ndarray | np.generic | dict) for v in value)


def stacked(values: Sequence[Any], name: str) -> NDArray[Any]:
    """Stack values of one shape along a new first axis."""
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
    """Convert a value to an array of booleans, integers or floats."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"`{name}`{at} is not an array of numbers ({error})") from error
    if array.dtype.kind not in "biuf":
        what = "text" if array.dtype.kind in "SU" else f"values of type {array.dtype}"
        raise DataError(f"`{name}`{at} holds {what}, not numbers")
    return array


def described(
    format: str, columns: Columns, ranges: Mapping[str, Range], dropped: Sequence[str], duplicates: int = 0
) -> tuple[Header, Schema]:
    """Return the header of a recording that stores no spaces, and the dtype and row shape of its columns.

    Args:
        format: The name of the format.
        columns: Some rows of each column.
        ranges: The ranges of integers, as for `inferred_space`.
        dropped: The columns that are left out.
        duplicates: The number of copies that are left out.
    """
    meta: dict[str, Any] = {"format": format, ACTIONS: BY_RLLIB, "duplicates": duplicates}
    meta |= {"inferred": [col.OBS, col.ACTION]} | ({"dropped": list(dropped)} if dropped else {})
    found = {name: (column.dtype, column.shape[1:]) for name, column in columns.items()}
    obs, action = (inferred_space(col.subtree(found, root), root, ranges) for root in (col.OBS, col.ACTION))
    header = Header(obs, action, None, meta)
    leaves = header.leaves()
    return header, {n: (schema_dtype(n, dtype, leaves.get(n)), shape) for n, (dtype, shape) in found.items()}


def schema_dtype(name: str, found: np.dtype[Any], leaf: Space | None) -> np.dtype[Any]:
    """Return the dtype of a column in the whole recording, from its first episode and its space."""
    if leaf is not None:
        is_choice = found.kind in "biu" and not isinstance(leaf, spaces.Box)  # `cast` checks that it fits
        return leaf_dtype(leaf) if is_choice else fitting(leaf, found)
    if name == col.REWARD or col.is_under(name, col.INFO):
        return np.dtype(np.float32 if found == np.float32 else np.float64)
    if any(col.is_under(name, root) for root in _FLOATS) and found.kind in "biu":
        return np.dtype(np.float32)
    return found


def cast(column: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> NDArray[Any]:
    """Convert a column to the dtype and row shape that it has elsewhere.

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


# -- copies ----------------------------------------------------------------------------------------------------------


def without_copies(track: Ints, content: NDArray[np.uint64], times: Ints | None = None) -> NDArray[np.bool_]:
    """Return which rows to keep, so that none is a copy of another one: bool ``[rows]``.

    Args:
        track: The agent and episode of each row, as a number.
        content: A hash of each row.
        times: How often each row's episode is stored, if equal rows may also be different steps. Of equal rows, as many
            are kept as one of the stored episodes has. By default, one is kept.
    """
    order = np.lexsort((content, track))
    is_new = np.append(True, (np.diff(track[order]) != 0) | (content[order][1:] != content[order][:-1]))
    starts = np.flatnonzero(is_new)
    count = np.diff(starts, append=len(order))
    most = np.ones(len(order), np.int64) if times is None else -(-np.repeat(count, count) // times[order])
    keep = np.empty(len(order), bool)
    keep[order] = np.arange(len(order)) - np.repeat(starts, count) < most
    return keep


def first_copies(rows: KeyedRows) -> NDArray[np.bool_]:
    """Return which rows are not copies of an earlier row of the same trajectory and step: bool ``[rows]``.

    Rows of the same step with different content are kept: they can't both be right, and the reader of the episodes
    checks for duplicate steps.

    Args:
        rows: Sorted rows, with Etude's column names.
    """
    same = (rows.track[1:] == rows.track[:-1]) & (rows.when[1:] == rows.when[:-1])
    twice = np.flatnonzero(np.append(same, False) | np.append(False, same))
    keep = np.ones(len(rows.track), bool)
    if len(twice):
        content = _contents(rows.table.take(pa.array(twice))) | {col.T_INDEX: rows.when[twice]}
        keep[twice] = without_copies(rows.track[twice], hashes_of(content))
    return keep


def _contents(table: pa.Table) -> Columns:
    """The columns that distinguish steps: observations, actions, rewards and flags."""
    roots = (col.OBS, col.ACTION, col.REWARD, col.TERMINATED, col.TRUNCATED)
    names = [name for name in table.schema.names if any(col.is_under(name, root) for root in roots)]
    return {name: arrow_numbers(one_array(table[name]), name, str) for name in names}


# -- spaces: their arrays are .npy files, compressed by zlib and encoded as base64 -----------------------------------


_BROKEN: Final = (
    *(LookupError, TypeError, ValueError, AttributeError, AssertionError, OverflowError, MemoryError, RecursionError),
    zlib.error,
)
_MAX_BYTES: Final = 1 << 28
"""The most memory in bytes for the bounds of one space."""


def space_of(data: Any) -> Space:
    """Return the space that an RLlib space map describes.

    Raises:
        DataError: its kind is unknown, or it is broken.
    """
    try:
        return _space_of(data)
    except _BROKEN as error:
        raise DataError(f"a space can't be read: {reprlib.repr(data)} ({type(error).__name__}: {error})") from error


def _space_of(data: Any) -> Space:
    kind = data["space"]
    if kind == "box":
        shape, dtype = tuple(data["shape"]), _dtype_of(data["dtype"])
        low, high = (np.broadcast_to(_array_of(data[side]), shape).astype(dtype) for side in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "discrete":
        return spaces.Discrete(int(data["n"]), start=int(data.get("start") or 0))
    if kind == "multi-discrete":
        dtype = _dtype_of(data.get("dtype", "<i8"))
        return spaces.MultiDiscrete(_array_of(data["nvec"]).astype(dtype), dtype.type)
    if kind == "multi-binary":
        n = data["n"]
        return spaces.MultiBinary(n if isinstance(n, int) else [int(i) for i in n])
    if kind == "tuple":
        return spaces.Tuple([_space_of(part) for part in data["spaces"]])
    if kind == "dict":
        return spaces.Dict([(key, _space_of(part)) for key, part in data["spaces"].items()])
    raise DataError(f"a space is of the kind {str(kind)[:40]!r}, which Etude does not read")


def _dtype_of(name: Any) -> np.dtype[Any]:
    if not isinstance(name, str) or not DTYPE.fullmatch(name):
        raise ValueError(f"its dtype is {str(name)[:40]!r}")
    return np.dtype(name).newbyteorder("=")


def _array_of(text: Any) -> NDArray[Any]:
    """The array in an encoded string; plain lists and numbers are converted directly."""
    array = np.asarray(text)
    if isinstance(text, str):
        unzip = zlib.decompressobj()
        raw = unzip.decompress(base64.b64decode(text, validate=True), _MAX_BYTES)
        if unzip.unconsumed_tail:
            raise ValueError(f"its bounds take more than {_MAX_BYTES:,} bytes")
        array = np.lib.format.read_array(io.BytesIO(raw), allow_pickle=False)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"its bounds are of type {array.dtype}")
    return array


def map_of(space: Space) -> dict[str, Any]:
    """Return the map that RLlib writes for a space; the inverse of `space_of`.

    Raises:
        DataError: RLlib has no map for it, such as for a MultiDiscrete whose numbers do not start at 0.
    """
    if isinstance(space, spaces.Box):
        low, high = _text_of(space.low), _text_of(space.high)
        return {"space": "box", "low": low, "high": high, "shape": list(space.shape), "dtype": space.dtype.str}
    if isinstance(space, spaces.Discrete):
        return {"space": "discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        if space.start.any():
            raise DataError(f"RLlib's recordings can't hold {space}: there, the numbers of a MultiDiscrete start at 0")
        return {"space": "multi-discrete", "nvec": _text_of(space.nvec), "dtype": space.dtype.str}
    if isinstance(space, spaces.MultiBinary):
        return {"space": "multi-binary", "n": space.n if isinstance(space.n, int) else list(space.shape)}
    if isinstance(space, spaces.Tuple):
        return {"space": "tuple", "spaces": [map_of(part) for part in space.spaces]}
    if isinstance(space, spaces.Dict):
        return {"space": "dict", "spaces": {str(key): map_of(part) for key, part in space.spaces.items()}}
    raise DataError(f"RLlib's recordings can't hold a {type(space).__name__} space")


def _text_of(array: NDArray[Any]) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(zlib.compress(file.getvalue())).decode()
