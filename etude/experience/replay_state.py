# SPDX-License-Identifier: Apache-2.0
"""A replay's storage as plain data and arrays, and back.

Beside the columns of the steps it holds a lane of each step, mostly one byte, and a few bytes and ``final_obs`` of each
chain. Which step follows which is found again from these: of the steps in a lane, in order of age, the first ``count``
are the oldest chain's, and so on.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.errors import CheckpointError
from etude.experience.arrays import Index
from etude.experience.replay_chains import Chains
from etude.experience.replay_storage import Storage

_NUMBERS = ("lane", "tail", "count", "t_next", "terminated", "truncated", "known", "blind")


def state_of(storage: Storage) -> dict[str, Any]:
    """The state: the columns' rows in use, copied once, and what holds for chains."""
    num, chains = storage.num_steps, storage.chains
    used = np.flatnonzero(chains.table["count"])
    table = {name: column[used] for name, column in chains.table.items()}
    lane = chains.table["lane"][: chains.used]
    return {
        "capacity": storage.capacity,
        "num_steps": num,
        "num_added": storage.num_added,
        "columns": {name: column[: storage.capacity][:num].copy() for name, column in storage.columns.items()},
        "lane": _small(lane).take(storage.chain[:num]),
        "chains": {
            "row": _small(used),
            **{name: _small(table[name]) for name in _NUMBERS},
            "open": np.array([chains.open.get(key) == c for c, key in zip(used, _keys(table), strict=True)], bool),
            "episode_id": _packed(table["episode_id"].tolist()),
            "agent_id": _coded(table["agent_id"].tolist()),
            "module_id": _coded(table["module_id"].tolist()),
            "final_obs": {name: column[used] for name, column in chains.final_obs.items()},
            "num_rows": chains.used,
            "num_lanes": chains.num_lanes,
        },
    }


def load(storage: Storage, state: Mapping[str, Any]) -> None:
    """Put a state into a storage, in place of all that it holds."""
    if state["capacity"] != storage.capacity:
        raise CheckpointError(
            f"the replay was saved with a capacity of {state['capacity']} steps, but this one has "
            f"{storage.capacity}: make it with the same."
        )
    own, num = state["chains"], int(state["num_steps"])
    counts = np.asarray(own["count"], np.int64)
    broken = {name: len(column) for name, column in [*state["columns"].items(), ("lane", state["lane"])]}
    broken = {name: length for name, length in broken.items() if length != num}
    if broken or counts.sum() != num:
        raise CheckpointError(
            f"the replay's state is broken: it is of {num} steps, but its chains are of {counts.sum()}, and other "
            f"columns of {broken}. Take another checkpoint."
        )
    storage.allocate(state["columns"], own["final_obs"])
    storage.num_steps, storage.num_added = num, int(state["num_added"])
    for name, column in storage.columns.items():
        column[:num] = state["columns"][name]
    _load_chains(storage.chains, own)
    _link(storage, np.asarray(state["lane"]), np.asarray(own["row"], np.int64))


def _load_chains(chains: Chains, own: Mapping[str, Any]) -> None:
    rows = np.asarray(own["row"], np.int64)
    chains.reserve(max(16, int(own["num_rows"])))
    chains.used, chains.num_lanes = int(own["num_rows"]), int(own["num_lanes"])
    for name in _NUMBERS:
        chains.table[name][rows] = own[name]
    chains.table["episode_id"][rows] = _unpacked(own["episode_id"])
    for name in ("agent_id", "module_id"):
        chains.table[name][rows] = _decoded(own[name])
    for name, column in chains.final_obs.items():
        column[rows] = own["final_obs"][name]
    chains.num_blind = int(np.count_nonzero(chains.table["blind"]))
    table = {name: column[rows] for name, column in chains.table.items()}
    are_open = np.asarray(own["open"], bool).tolist()
    chains.open = {key: c for c, key, is_open in zip(rows.tolist(), _keys(table), are_open, strict=True) if is_open}
    chains.free = np.flatnonzero(chains.table["count"][: chains.used] == 0).tolist()
    taken = set(chains.table["lane"][list(chains.open.values())].tolist())
    chains.free_lanes = [lane for lane in range(chains.num_lanes) if lane not in taken]
    heapq.heapify(chains.free_lanes)


def _link(storage: Storage, lane: NDArray[Any], chain_rows: Index) -> None:
    """Find which steps follow each other."""
    num, capacity, table = storage.num_steps, storage.capacity, storage.chains.table
    storage.after[:] = capacity
    if not num:
        return
    age = (table["tail"][chain_rows] - storage.oldest) % capacity
    chains = chain_rows[np.lexsort((age, table["lane"][chain_rows]))]
    count, tail = table["count"][chains], table["tail"][chains]
    ends = np.cumsum(count)
    chain = np.repeat(chains, count)
    t = np.arange(num)
    t += np.repeat(table["t_next"][chains] - ends, count)
    if storage.chains.num_lanes == 1:  # each step follows the one before it: nothing to look up
        at, rest = slice(storage.oldest, storage.oldest + num), max(0, storage.oldest + num - capacity)
        following = np.arange(storage.oldest + 1, storage.oldest + 1 + num)
        following[num - rest - 1 :] -= capacity if rest else 0
        for column, values in ((storage.chain, chain), (storage.t, t), (storage.after, following)):
            column[at][: num - rest] = values[: num - rest]
            column[:rest] = values[num - rest :]
        table["head"][chains] = (ends - count + storage.oldest) % capacity
    else:
        by_lane = np.argsort(_by_age(lane, storage.oldest), kind="stable")
        rows = by_lane + storage.oldest
        rows[rows >= capacity] -= capacity
        storage.chain[rows], storage.t[rows] = chain, t
        storage.after[rows[:-1]] = rows[1:]
        table["head"][chains] = rows[ends - count]
    storage.after[tail] = capacity
    linked = np.flatnonzero(storage.after[:capacity] != capacity)
    storage.before[:] = capacity
    storage.before[storage.after[linked]] = linked


def _by_age(column: NDArray[Any], oldest: int) -> NDArray[Any]:
    return np.concatenate([column[oldest:], column[:oldest]])


def _keys(table: Mapping[str, NDArray[Any]]) -> list[tuple[Any, Any, Any]]:
    return list(zip(table["episode_id"], table["agent_id"], table["module_id"], strict=True))


def _small(values: NDArray[Any]) -> NDArray[Any]:
    """Numbers from 0 on in the smallest dtype that holds them; booleans as they are."""
    return values if values.dtype == bool else values.astype(np.min_scalar_type(int(values.max(initial=0))))


def _packed(texts: Sequence[str]) -> dict[str, Any]:
    """Strings as what all begin with, and the rest of each: the ids of a run's episodes are much alike."""
    first, last = (min(texts), max(texts)) if texts else ("", "")
    alike = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    prefix = first[:alike]
    rest = [text[len(prefix) :] for text in texts]
    data = np.frombuffer("".join(rest).encode("utf-8", "surrogatepass"), np.uint8)
    return {"prefix": prefix, "data": data, "lengths": _small(np.array([len(text) for text in rest], np.int64))}


def _unpacked(packed: Mapping[str, Any]) -> NDArray[np.object_]:
    text = np.asarray(packed["data"], np.uint8).tobytes().decode("utf-8", "surrogatepass")
    ends = np.cumsum(packed["lengths"], dtype=np.int64).tolist()
    out = np.empty(len(ends), object)
    out[:] = [packed["prefix"] + text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    return out


def _coded(names: Sequence[str | None]) -> dict[str, Any]:
    """A few different names, over and over, as numbers."""
    distinct = list(dict.fromkeys(names))
    code = {name: i for i, name in enumerate(distinct)}
    return {"names": distinct, "code": _small(np.array([code[name] for name in names], np.int64))}


def _decoded(coded: Mapping[str, Any]) -> NDArray[np.object_]:
    names = np.empty(len(coded["names"]), object)
    names[:] = coded["names"]
    return names[np.asarray(coded["code"], np.int64)]
