# SPDX-License-Identifier: Apache-2.0
"""One line of RLlib's JSON recordings: a ``SampleBatch``, a ``MultiAgentBatch``, or a single step, as columns."""

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.recordings.formats.packed import PACKED, unpack
from etude.recordings.formats.rllib_columns import flat_entries, flat_whole, numbers, own_name

ENDS: Final = ("terminateds", "truncateds", "dones")
KEYS: Final = ("eps_id", "agent_index", "t")
_OWN: Final = {"obs": col.OBS, "new_obs": col.NEXT_OBS, "actions": col.ACTION, "rewards": col.REWARD}
_REQUIRED: Final = ("obs", "actions", "rewards")
_LEFT_OUT: Final = ("type", "count", "infos", *KEYS, *ENDS)


class Batch(NamedTuple):
    """Rows of one policy on one line, as the line has them."""

    policy: str | None
    columns: dict[str, Any]
    num: int


def batches_of(line: bytes) -> list[Batch]:
    """The batches on one line.

    Raises:
        DataError: it is not JSON, or not of RLlib's layouts.
    """
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not whole JSON ({str(error)[:100]}): the line was cut off or overwritten") from error
    if not isinstance(data, dict):
        raise DataError("is not a JSON object, as RLlib's batches and steps are")
    if data.get("type") == "MultiAgentBatch" or "policy_batches" in data:
        policies = data.get("policy_batches")
        if not isinstance(policies, dict):
            raise DataError("is a MultiAgentBatch without `policy_batches`")
        named = [(None if policy == "default_policy" else str(policy), batch) for policy, batch in policies.items()]
        return [_batch(policy, batch) for policy, batch in named]
    if data.get("type") not in (None, "SampleBatch"):
        raise DataError(f"is of the type {str(data['type'])[:40]!r}, not SampleBatch or MultiAgentBatch")
    if data.get("type") is None and not isinstance(data.get("rewards"), list | str):
        return [_batch(None, {name: [value] for name, value in data.items()})]
    return [_batch(None, data)]


def _batch(policy: str | None, columns: Any) -> Batch:
    if not isinstance(columns, dict):
        raise DataError("holds a batch that is not an object of columns")
    missing = [name for name in _REQUIRED if name not in columns]
    if missing:
        raise DataError(f"has no column `{missing[0]}`; it has {', '.join(list(columns)[:20])}")
    if not any(name in columns for name in ENDS):
        raise DataError("has no `terminateds`, `truncateds` or `dones`, one of which tells where episodes end")
    rewards = column(columns["rewards"], col.REWARD)[col.REWARD]
    if rewards.ndim != 1:
        raise DataError(f"`rewards` has the shape {list(rewards.shape)}, not one number a step")
    return Batch(policy, columns, len(rewards))


def roots(columns: Mapping[str, Any]) -> dict[str, str]:
    """The names of a batch's columns that become step columns, and ours."""
    return {name: _OWN.get(name) or own_name(name) for name in columns if name not in _LEFT_OUT}


def column(value: Any, root: str) -> Columns:
    """A column of a batch, plain or packed, as flat columns ``[rows, ...]`` under ``root``.

    Raises:
        DataError: it holds no numbers, or rows of different shapes.
    """
    if isinstance(value, str):
        if not value.startswith(PACKED):
            raise DataError(f"`{root}` is the text {value[:24]!r}, neither a list nor a packed array")
        return flat_whole(unpack(value), None, root)
    if not isinstance(value, list):
        raise DataError(f"`{root}` is neither a list nor a packed array")
    try:
        return flat_entries([_unpacked(v) for v in value], None, root)
    except DataError:
        parts = value[0] if value and isinstance(value[0], list) else []
        if not parts or not all(isinstance(v, list) and len(v) == len(parts) for v in value):
            raise
        tuples = [column([v[i] for v in value], f"{root}/{i}") for i in range(len(parts))]
        return {name: part for columns in tuples for name, part in columns.items()}


def _unpacked(value: Any) -> Any:
    return unpack(value) if isinstance(value, str) and value.startswith(PACKED) else value


def flags(batch: Batch) -> dict[str, NDArray[np.bool_]]:
    """``terminated`` and ``truncated`` of each row; ``dones`` count as terminated."""
    found = {name: _vector(batch, name).astype(bool) for name in ENDS if name in batch.columns}
    nothing = np.zeros(batch.num, bool)
    ended = found.get("terminateds", found.get("dones", nothing) & ~found.get("truncateds", nothing))
    return {"terminated": ended, "truncated": found.get("truncateds", nothing)}


def integers(batch: Batch, name: str) -> NDArray[Any] | None:
    """A key column: the integers of ``t`` or ``agent_index``, or the names in ``eps_id``, if it is there."""
    if name not in batch.columns:
        return None
    value = batch.columns[name]
    if isinstance(value, list) and name == "eps_id":
        if len(value) != batch.num:
            raise DataError(f"`{name}` has {len(value)} entries for {batch.num} rewards")
        return np.array([str(v) for v in value], object)
    return _vector(batch, name)


def _vector(batch: Batch, name: str) -> NDArray[Any]:
    columns = column(batch.columns[name], name)
    values = numbers(columns.get(name, []), name)
    if values.shape != (batch.num,):
        raise DataError(f"`{name}` has the shape {list(values.shape)} for {batch.num} rewards")
    if name not in ENDS and values.dtype.kind not in "iu":
        raise DataError(f"`{name}` holds {values.dtype}, not integers")
    return values


def is_float32(values: NDArray[Any]) -> bool:
    """Whether numbers read from text are those of float32, all of them."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(((values.astype(np.float32) == values) | np.isnan(values)).all())
