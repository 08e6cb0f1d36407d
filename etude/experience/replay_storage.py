# SPDX-License-Identifier: Apache-2.0
"""The steps in a replay: columns that are written round and round, and which step follows which."""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude.columns import Columns
from etude.experience.arrays import Index
from etude.experience.experience import Experience, Segments, offsets_of
from etude.experience.replay_chains import Chains, Key
from etude.experience.replay_columns import Store, check_first, check_same, write


class Added(NamedTuple):
    """Where steps were put: in ``num`` rows from ``start`` on, going on from row 0 behind the last."""

    start: int
    num: int
    unseen: list[int]
    """Rows after which nothing was seen, though the episode did not terminate."""
    seen: list[int]
    """Rows of which that was so until now. They may be among ``unseen``."""


class Storage:
    """Steps by storage row: step n of all that were ever added is in row ``n % capacity``.

    The row ``capacity`` is no step's: it stands for what follows the last step of a chain, and holds zeros.

    Args:
        capacity: How many steps are held, at most.
        path: The folder of the columns; None is memory.
    """

    def __init__(self, capacity: int, path: str | os.PathLike[str] | None) -> None:
        self.capacity = capacity
        self.num_steps = 0
        self.num_added = 0
        self.columns: Columns = {}
        index_type = np.int32 if capacity < 2**31 - 1 else np.int64
        self.after: NDArray[Any] = np.full(capacity + 1, capacity, index_type)
        """The row of the next step, by row."""
        self.before: NDArray[Any] = np.full(capacity + 1, capacity, index_type)
        """The row of the step before, by row: it may have been dropped since; see `walk_back`."""
        self.chain = np.zeros(capacity + 1, np.int32)
        """The chain that a step is of, by row."""
        self.t = np.zeros(capacity + 1, np.int32)
        """A step's index in its episode, by row."""
        self._store = Store(path)
        self.chains = Chains(self._store, {})

    @property
    def oldest(self) -> int:
        """The row of the oldest step."""
        return (self.num_added - self.num_steps) % self.capacity

    def allocate(self, steps: Mapping[str, NDArray[Any]], final_obs: Mapping[str, NDArray[Any]]) -> None:
        """Make room for columns such as these."""
        rows = self.capacity + 1
        self.columns = {
            name: self._store.column(name, (rows, *column.shape[1:]), column.dtype) for name, column in steps.items()
        }
        self.chains = Chains(self._store, final_obs)

    # -- adding -------------------------------------------------------------------------------------------------

    def add(self, exp: Experience) -> Added:
        """Store at most ``capacity`` steps, without lookback, in place of the oldest ones; see `Replay.add`."""
        if not self.columns:
            check_first(exp)
            self.allocate(exp.steps, exp.final_obs)
        check_same(exp, self.columns, self.chains.final_obs)
        start, num = self.num_added % self.capacity, exp.num_steps
        self._evict(num)
        for name, column in self.columns.items():
            write(column, start, exp.steps[name])
        unseen, seen = self._link(exp, start)
        self.num_added += num
        self.num_steps += num
        return Added(start, num, unseen, seen)

    def _evict(self, num: int) -> None:
        """Make room for ``num`` steps."""
        over = self.num_steps + num - self.capacity
        if over <= 0:
            return
        oldest = self.oldest
        self.num_steps -= over
        if over == 1:
            self.chains.drop(int(self.chain[oldest]), 1)
            return
        rows = np.arange(oldest, oldest + over) % self.capacity
        for c, count in zip(*(x.tolist() for x in np.unique(self.chain[rows], return_counts=True)), strict=True):
            self.chains.drop(c, count)

    def _link(self, exp: Experience, start: int) -> tuple[list[int], list[int]]:
        """Put the segments of ``exp``, which stand from row ``start`` on, to the chains they go on with.

        Gives `Added.unseen` and `Added.seen`.
        """
        unseen: list[int] = []
        seen: list[int] = []
        own, chains, capacity = exp.segments, self.chains, self.capacity
        keys = zip(own.episode_id.tolist(), own.agent_id.tolist(), own.module_id.tolist(), strict=True)
        ends = zip(own.terminated.tolist(), own.truncated.tolist(), own.has_final_obs.tolist(), strict=True)
        bounds, each = exp.offsets.tolist(), zip(keys, own.t_start.tolist(), ends, strict=True)
        for i, (key, t, (terminated, truncated, known)) in enumerate(each):
            length = bounds[i + 1] - bounds[i]
            head, tail = (start + bounds[i]) % capacity, (start + bounds[i + 1] - 1) % capacity
            c = self._chain_of(key, head, t, seen)
            if length == 1:
                self.chain[head], self.t[head] = c, t
            else:
                rows = np.arange(head, head + length) % capacity
                self.chain[rows] = c
                self.t[rows] = np.arange(t, t + length)
                self.after[rows[:-1]], self.before[rows[1:]] = rows[1:], rows[:-1]
            self.after[tail] = capacity
            for name, column in chains.final_obs.items():
                column[c] = exp.final_obs[name][i]
            blind = chains.extend(c, key, tail, length, terminated=terminated, truncated=truncated, known=known)
            if blind:
                unseen.append(tail)
        return unseen, seen

    def _chain_of(self, key: Key, head: int, t: int, seen: list[int]) -> int:
        """The chain that a segment goes on with, linked to the segment's first row, or a new one."""
        chains = self.chains
        c = chains.open.get(key)
        if c is None or chains.table["t_next"][c] != t:
            self.before[head] = self.capacity
            return chains.begin(key, head, t)
        last = int(chains.table["tail"][c])
        self.after[last], self.before[head] = head, last
        if chains.table["blind"][c]:
            seen.append(last)
        return c

    # -- looking ahead ------------------------------------------------------------------------------------------

    def walk(self, rows: Index, length: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """``[length, num]``: the rows of the steps from ``rows`` on, ``capacity`` behind the last; and what follows."""
        walk = np.empty((length, len(rows)), self.after.dtype)
        walk[0] = rows
        for i in range(1, length):
            self.after.take(walk[i - 1], out=walk[i], mode="clip")
        return walk, self.after.take(walk[-1])

    def walk_back(self, rows: Index, steps: Index) -> tuple[Index, Index]:
        """The rows that lie ``steps`` before ``rows``, or as far back as steps are stored; and how far that is."""
        at, gone = rows.copy(), np.zeros(len(rows), np.int64)
        for i in range(int(steps.max(initial=0))):
            before = self.before.take(at)
            is_stored = (self.chain.take(before) == self.chain.take(at)) & (self.t.take(before) == self.t.take(at) - 1)
            further = (i < steps) & (before != self.capacity) & is_stored
            if not further.any():
                break
            at[further] = before[further]
            gone += further
        return at, gone

    def segments(self, starts: Index, length: int, lookback: Index | None = None) -> Experience:
        """Segments of at most ``length`` steps from the rows ``starts`` on, and as many more as are ``lookback``."""
        most = length if lookback is None else length + int(lookback.max(initial=0))
        walk, after = self.walk(starts, most)
        walk = walk.T
        if lookback is not None:
            over = np.arange(most) >= length + lookback[:, None]
            cut = over[:, -1]
            after[cut] = walk[cut, length + lookback[cut]]
            walk[over] = self.capacity
        inside = walk != self.capacity
        lengths = np.count_nonzero(inside, axis=1)
        rows = walk[inside]
        own = self.chain.take(starts)
        ended = after == self.capacity
        table = {name: column.take(own) for name, column in self.chains.table.items()}
        segments = Segments(
            episode_id=table["episode_id"],
            agent_id=table["agent_id"],
            module_id=table["module_id"],
            t_start=self.t.take(starts).astype(np.int64),
            lookback=np.zeros(len(starts), np.int64) if lookback is None else lookback,
            terminated=ended & table["terminated"],
            truncated=ended & table["truncated"],
            has_final_obs=~ended | table["known"],
        )
        final_obs = {}
        for name, final in self.chains.final_obs.items():
            final_obs[name] = self.columns[name].take(after, axis=0)
            final_obs[name][ended] = final.take(own[ended], axis=0)
        steps = {name: column.take(rows, axis=0) for name, column in self.columns.items()}
        return Experience(steps, offsets_of(lengths), segments, final_obs)
