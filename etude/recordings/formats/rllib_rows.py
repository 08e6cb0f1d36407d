# SPDX-License-Identifier: Apache-2.0
"""Put rows of RLlib's recordings in order of time: by their step if they have one, else by their observations."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.experience.arrays import hashes_of
from etude.recordings.format import follow
from etude.recordings.formats.arrow import flat, one_array
from etude.recordings.formats.sorting import KeyedRows

Ints = NDArray[np.int64]


# -- copies ----------------------------------------------------------------------------------------------------------


def without_copies(track: Ints, content: NDArray[np.uint64], times: Ints | None = None) -> NDArray[np.bool_]:
    """Return which rows to keep, so that none is a copy of another one: bool ``[rows]``.

    Args:
        track: The agent and episode of each row, as a number.
        content: A hash of each row.
        times: How often each row's episode is stored, if equal rows of it may be different steps: the share is kept
            that one of these episodes has. By default, equal rows are copies.
    """
    order = np.lexsort((content, track))
    is_new = np.append(True, (np.diff(track[order]) != 0) | (content[order][1:] != content[order][:-1]))
    starts = np.flatnonzero(is_new)
    count = np.diff(starts, append=len(order))
    most = np.ones(len(order), np.int64) if times is None else -(-np.repeat(count, count) // times[order])
    keep = np.empty(len(order), bool)
    keep[order] = np.arange(len(order)) - np.repeat(starts, count) < most
    return keep


def unlike_before(rows: KeyedRows) -> NDArray[np.bool_]:
    """Return where a row is not a copy of the same step of a trajectory with the same content: bool ``[rows]``.

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
    """What distinguishes steps: observations, actions, rewards and flags, and where they are empty."""
    roots = (col.OBS, col.ACTION, col.REWARD, col.TERMINATED, col.TRUNCATED)
    out: Columns = {}
    for name in (name for name in table.schema.names if any(col.is_under(name, root) for root in roots)):
        array = one_array(table[name])
        known = out[f"{name} is known"] = np.asarray(array.is_valid())
        found = flat(array.drop_null(), name, str)[name]
        out[name] = np.zeros((len(known), *found.shape[1:]), found.dtype)
        out[name][known] = found
    return out


# -- order -----------------------------------------------------------------------------------------------------------


def in_time(track: Ints, done: NDArray[np.bool_], obs: Columns, next_obs: Columns) -> tuple[Ints, Ints]:
    """Return the rows in order of time, by chaining observations, and the step of each row in this order.

    Args:
        track: The agent and episode of each row; equal ones are adjacent.
        done: Whether the episode ends with each row.
        obs: The observation of each row.
        next_obs: The next observation of each row; if both are empty, the rows of an episode are in order.
    """
    other = track[1:] != track[:-1]
    bounds = np.concatenate([[0], np.flatnonzero(other) + 1, [len(track)]])
    order, t = np.arange(len(track)), np.arange(len(track)) - np.repeat(bounds[:-1], np.diff(bounds))
    linked = np.all([follow(values, next_obs[name]) for name, values in obs.items()], axis=0)
    broken = np.flatnonzero(~other & (~linked | done[:-1])) if obs else ()
    for i in np.unique(np.searchsorted(bounds, broken, side="right") - 1).tolist():
        own = slice(int(bounds[i]), int(bounds[i + 1]))
        keys, following = (_keys_of({name: values[own] for name, values in c.items()}) for c in (obs, next_obs))
        chains = _chained(keys, following, done[own])
        order[own] = own.start + np.concatenate(chains)
        t[own] += np.repeat(np.arange(len(chains)), [len(chain) for chain in chains])  # a row is missing between chains
    return order, t


def _keys_of(columns: Columns) -> list[bytes]:
    """Return the bytes of each row over all columns."""
    parts = [np.ascontiguousarray(c).reshape(len(c), -1).view(np.uint8) for _, c in sorted(columns.items())]
    joined = np.concatenate(parts, axis=1)
    return [row.tobytes() for row in joined]


def _chained(obs: list[bytes], next_obs: list[bytes], done: NDArray[np.bool_]) -> list[list[int]]:
    """Chain the rows of one episode, so that each row's observation is the next observation of the row before.

    Of several rows with this observation, the following one in the file is taken, else the first unused one.

    Args:
        obs: The bytes of each row's observation.
        next_obs: The bytes of each row's next observation.
        done: Whether the episode ends with this row.

    Returns:
        Chains of row indices. Those that no row leads to come first, in the order of the rows.
    """
    waiting: dict[bytes, dict[int, None]] = {}
    for i, key in enumerate(obs):
        waiting.setdefault(key, {})[i] = None
    reached = {key for i, key in enumerate(next_obs) if not done[i]}
    chains: list[list[int]] = []
    for first in [*(i for i, key in enumerate(obs) if key not in reached), *range(len(obs))]:
        row: int | None = first if first in waiting[obs[first]] else None
        chain: list[int] = []
        while row is not None:
            chain.append(row)
            del waiting[obs[row]][row]
            following = {} if done[row] else waiting.get(next_obs[row], {})
            row = row + 1 if row + 1 in following else next(iter(following), None)
        if chain:
            chains.append(chain)
    return chains
