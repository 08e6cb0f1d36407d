# SPDX-License-Identifier: Apache-2.0
"""The chains in a replay: what holds for an agent's way through an episode, in a table with a row for each."""

import heapq
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.experience.arrays import Array
from etude.experience.replay_columns import Store

Key: TypeAlias = tuple[str, str | None, str | None]
"""The ids of episode, agent and module."""

FIELDS: dict[str, Any] = {
    "episode_id": object,
    "agent_id": object,
    "module_id": object,
    "head": np.int64,  # the storage row of the first step, as long as that is stored
    "tail": np.int64,  # that of the last
    "count": np.int64,  # stored steps; 0 where this row of the table is free
    "t_next": np.int64,  # the index in the episode of the step that would come next
    "lane": np.int64,
    "terminated": np.bool_,
    "truncated": np.bool_,
    "known": np.bool_,  # the observation after the last step was seen
    "blind": np.bool_,  # it was not, and is needed: the episode did not terminate
}


class Chains:
    """A table with a row for each chain of steps without a gap, and its ``final_obs`` beside it.

    A row is free again when the last step of its chain is gone. A chain is *open* while it can go on. Each has a
    *lane*, which no other open chain has at the same time: the lanes of all steps, in order of age, say which chain
    each is of.

    Args:
        store: Where ``final_obs`` is held.
        final_obs: One row or more of each column, for the dtypes and shapes.
    """

    def __init__(self, store: Store, final_obs: Mapping[str, Array]) -> None:
        self._store = store
        self._size = 16
        self.table: dict[str, NDArray[Any]] = {name: _column(self._size, dtype) for name, dtype in FIELDS.items()}
        self.final_obs = {
            name: store.column(f"final_{name}", (self._size, *column.shape[1:]), column.dtype)
            for name, column in final_obs.items()
        }
        self.used = 0
        """The rows of the table from this one on have never been used."""
        self.num_blind = 0
        self.open: dict[Key, int] = {}
        self.free: list[int] = []  # a heap, so that which is next depends on nothing but which are free
        self.num_lanes = 0
        self.free_lanes: list[int] = []

    def begin(self, key: Key, head: int, t: int) -> int:
        """A new chain at storage row ``head``, of no steps so far; an open one of the same key ends where it is."""
        if key in self.open:
            self._close(key)
        if self.free:
            c = heapq.heappop(self.free)
        else:
            if self.used == self._size:
                self.reserve(2 * self._size)
            c = self.used
            self.used += 1
        if self.free_lanes:
            lane = heapq.heappop(self.free_lanes)
        else:
            lane = self.num_lanes
            self.num_lanes += 1
        table = self.table
        table["episode_id"][c], table["agent_id"][c], table["module_id"][c] = key
        table["head"][c], table["t_next"][c], table["lane"][c], table["count"][c] = head, t, lane, 0
        self.open[key] = c
        return c

    def extend(
        self, c: int, key: Key, tail: int, length: int, *, terminated: bool, truncated: bool, known: bool
    ) -> bool:
        """``length`` more steps, the last of them at storage row ``tail``; gives whether the chain now ends blind."""
        table = self.table
        blind = not (known or terminated)
        self.num_blind += blind - int(table["blind"][c])
        table["tail"][c] = tail
        table["count"][c] += length
        table["t_next"][c] += length
        table["terminated"][c], table["truncated"][c] = terminated, truncated
        table["known"][c], table["blind"][c] = known, blind
        if terminated or truncated:
            self._close(key)
        return blind

    def drop(self, c: int, length: int) -> None:
        """The oldest ``length`` steps of a chain are gone."""
        table = self.table
        left = int(table["count"][c]) - length
        table["count"][c] = left
        if left:
            return
        key = (table["episode_id"][c], table["agent_id"][c], table["module_id"][c])
        if self.open.get(key) == c:
            self._close(key)
        if table["blind"][c]:
            self.num_blind -= 1
            table["blind"][c] = False
        table["episode_id"][c] = None
        heapq.heappush(self.free, c)

    def whole(self) -> NDArray[np.int64]:
        """The chains that are episodes from their first step to their end."""
        table = {name: self.table[name][: self.used] for name in ("terminated", "truncated", "count", "t_next")}
        ended = table["terminated"] | table["truncated"]
        return np.flatnonzero(ended & (table["count"] == table["t_next"]))

    def reserve(self, size: int) -> None:
        """Make room for this many chains."""
        for name, column in self.table.items():
            self.table[name] = _column(size, FIELDS[name])
            self.table[name][: self.used] = column[: self.used]
        for name, column in self.final_obs.items():
            self.final_obs[name] = self._store.column(f"final_{name}", (size, *column.shape[1:]), column.dtype)
            self.final_obs[name][: self.used] = column[: self.used]
        self._size = size

    def _close(self, key: Key) -> None:
        heapq.heappush(self.free_lanes, int(self.table["lane"][self.open.pop(key)]))


def _column(size: int, dtype: Any) -> NDArray[Any]:
    return np.full(size, None, object) if dtype is object else np.zeros(size, dtype)
