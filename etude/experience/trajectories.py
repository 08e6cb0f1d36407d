# SPDX-License-Identifier: Apache-2.0
"""The storage of a replay: columns that are overwritten as a ring, and the trajectories that their steps belong to.

A trajectory is a gapless sequence of steps of one agent in one episode. It is open as long as it can be continued.
"""

import contextlib
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import CheckpointError, DataError, SettingsError
from etude.experience.arrays import Array, Index, check_alike
from etude.experience.experience import Experience, Segments, check_final_obs, offsets_of

_log = logging.getLogger("etude.experience")

Key: TypeAlias = tuple[str, str | None, str | None]
"""The ids of the episode, the agent and the module."""

_TABLE: dict[str, Any] = {
    "episode_id": object,
    "agent_id": object,
    "module_id": object,
    "tail": np.int64,  # row of the last step
    "count": np.int64,  # number of stored steps; 0 if this row of the table is free
    "t_next": np.int64,  # index in the episode of the next step
    "terminated": np.bool_,
    "truncated": np.bool_,
    "known": np.bool_,  # the observation after the last step is stored
}


_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""The files in which Linux states how much memory a container may use."""


def _memory() -> int | None:
    """The bytes of memory of this machine or, if it has less, of this container; None: unknown on this system."""
    try:
        found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, ValueError, OSError):
        return None
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            found.append(int(Path(path).read_text()))
    return min(found)


def _check_room(sizes: Mapping[str, int], rows: int) -> None:
    """Raise a SettingsError if columns of these sizes (in bytes) exceed the memory; warn if two copies of them do."""
    memory = _memory()
    if memory is None:
        return
    if (total := sum(sizes.values())) > memory:
        largest = max(sizes, key=lambda name: sizes[name])
        fits = int(0.5 * memory / total * rows)
        raise SettingsError(
            f"a replay of {rows - 1:,} steps takes {total / 2**30:.1f} GiB here ({sizes[largest] / 2**30:.1f} of it "
            f"for `{largest}`), but this machine has {memory / 2**30:.1f} GiB of memory. Choose a smaller `capacity` "
            f"(`replay.capacity` of an algorithm): {fits:,} steps take half of the memory."
        )
    if 2 * total > memory:
        _log.warning(
            "A replay of %s steps takes %.1f GiB here, more than half of the %.1f GiB of memory. A checkpoint copies "
            "it, so saving may run out of memory once it is full. Choose a smaller `replay.capacity`.",
            *(f"{rows - 1:,}", total / 2**30, memory / 2**30),
        )


def _with_floats_of(exp: Experience, columns: Columns, final_obs: Columns) -> Experience:
    """Convert float columns to the stored dtypes, which may differ, as those of a recording and an env do."""

    def cast(own: Columns, held: Columns) -> Columns:
        floats = [n for n, v in own.items() if isinstance(v, np.ndarray) and v.dtype.kind == "f" and n in held]
        alike = {n: own[n].astype(held[n].dtype, copy=False) for n in floats if held[n].dtype.kind == "f"}
        return {**own, **alike}

    return Experience(cast(exp.steps, columns), exp.offsets, exp.segments, cast(exp.final_obs, final_obs))


class TrajectoryStore:
    """Steps by row: the n-th step ever added is in row ``n % capacity``.

    The extra row ``capacity``, all zeros, belongs to no step; it follows the last step of each trajectory.

    Args:
        capacity: The maximum number of steps.
        path: A folder for the columns, as memory-mapped raw files; None stores them in memory.
    """

    def __init__(self, capacity: int, path: str | os.PathLike[str] | None) -> None:
        self.capacity = capacity
        self.num_steps = self.num_added = 0
        self.columns: Columns = {}
        index_type = np.int32 if capacity < 2**31 - 1 else np.int64
        self.after: NDArray[Any] = np.full(capacity + 1, capacity, index_type)
        """By row: the row of the next step."""
        self.before: NDArray[Any] = np.full(capacity + 1, capacity, index_type)
        """By row: the row of the previous step, if that is still stored; see `walk_back`."""
        self.trajectory = np.zeros(capacity + 1, np.int32)
        """By row: the trajectory of the step."""
        self.t = np.zeros(capacity + 1, np.int32)
        """By row: the step's index in its episode."""
        self.table: dict[str, NDArray[Any]] = {name: np.zeros(0, dtype) for name, dtype in _TABLE.items()}
        """The table of trajectories, one row each; see `_TABLE`."""
        self.final_obs: Columns = {}
        """The observation after the last step of each trajectory."""
        self._path = None if path is None else Path(path)
        self._open: dict[Key, int] = {}
        self._free: list[int] = []
        self._used = 0  # rows of the table from here on were never used

    @property
    def oldest(self) -> int:
        """The row of the oldest step."""
        return (self.num_added - self.num_steps) % self.capacity

    def _column(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """A new column of zeros. It replaces the file of an older column with that name, which stays usable."""
        if self._path is None or 0 in shape:
            return np.zeros(shape, dtype)
        self._path.mkdir(parents=True, exist_ok=True)
        file = self._path / f"{quote(name, safe='')}.bin"
        file.unlink(missing_ok=True)  # not truncated, as processes may still have the old file mapped
        return np.asarray(np.memmap(file, dtype, "w+", shape=shape))

    def _allocate(self, steps: Mapping[str, Array], final_obs: Mapping[str, Array], num: int = 0) -> None:
        """Allocate columns like these, and room for ``num`` trajectories; everything stored is dropped."""
        rows = self.capacity + 1
        if self._path is None:
            _check_room({name: rows * x.dtype.itemsize * math.prod(x.shape[1:]) for name, x in steps.items()}, rows)
        self.columns = {name: self._column(name, (rows, *x.shape[1:]), x.dtype) for name, x in steps.items()}
        self.table = {name: np.zeros(0, dtype) for name, dtype in _TABLE.items()}
        self.final_obs = {name: x[:0] for name, x in final_obs.items()}
        self._open, self._free, self._used = {}, [], 0
        self._resize(max(16, num))

    def _resize(self, size: int) -> None:
        """Make room for ``size`` trajectories."""
        for name, old in self.table.items():
            self.table[name] = np.full(size, None) if old.dtype == object else np.zeros(size, old.dtype)
            self.table[name][: self._used] = old[: self._used]
        for name, old in self.final_obs.items():
            self.final_obs[name] = self._column(f"final_{name}", (size, *old.shape[1:]), old.dtype)
            self.final_obs[name][: self._used] = old[: self._used]

    # -- adding -------------------------------------------------------------------------------------------------

    def add(self, exp: Experience) -> tuple[int, int]:
        """Store at most ``capacity`` steps, without lookback, replacing the oldest ones; see `Replay.add`.

        Returns:
            The first row and the number of rows; after the last row of the storage, they go on at row 0.
        """
        if not self.columns:
            _check_first(exp)
            self._allocate(exp.steps, exp.final_obs)
        exp = _with_floats_of(exp, self.columns, self.final_obs)
        check_alike(exp.steps, self.columns, "column", "the new steps and those in the replay differ")
        check_alike(exp.final_obs, self.final_obs, "final_obs", "the new steps and those in the replay differ")
        start, num = self.num_added % self.capacity, exp.num_steps
        self._evict(num)
        fits = min(num, self.capacity - start)
        for name, column in self.columns.items():
            values = exp.steps[name]
            column[start : start + fits] = values[:fits]
            if fits < num:
                column[: num - fits] = values[fits:]
        self._link(exp, start)
        self.num_added += num
        self.num_steps += num
        return start, num

    def _evict(self, num: int) -> None:
        """Make room for ``num`` steps."""
        over = self.num_steps + num - self.capacity
        if over <= 0:
            return
        oldest = self.oldest
        self.num_steps -= over
        if over == 1:
            self._drop(int(self.trajectory[oldest]), 1)
            return
        rows = np.arange(oldest, oldest + over) % self.capacity
        for k, count in zip(*(x.tolist() for x in np.unique(self.trajectory[rows], return_counts=True)), strict=True):
            self._drop(k, count)

    def _drop(self, k: int, num: int) -> None:
        """Remove the oldest ``num`` steps of a trajectory."""
        table = self.table
        left = int(table["count"][k]) - num
        table["count"][k] = left
        if left:
            return
        key = (table["episode_id"][k], table["agent_id"][k], table["module_id"][k])
        if self._open.get(key) == k:
            del self._open[key]
        table["episode_id"][k] = None
        self._free.append(k)

    def _link(self, exp: Experience, start: int) -> None:
        """Attach the segments of ``exp``, whose steps are in the rows from ``start`` on, to trajectories."""
        own, capacity = exp.segments, self.capacity
        keys = zip(own.episode_id.tolist(), own.agent_id.tolist(), own.module_id.tolist(), strict=True)
        ends = zip(own.terminated.tolist(), own.truncated.tolist(), own.has_final_obs.tolist(), strict=True)
        bounds, each = exp.offsets.tolist(), zip(keys, own.t_start.tolist(), ends, strict=True)
        for i, (key, t, (terminated, truncated, known)) in enumerate(each):
            length = bounds[i + 1] - bounds[i]
            head, tail = (start + bounds[i]) % capacity, (start + bounds[i + 1] - 1) % capacity
            found = self._open.get(key)
            if found is None or self.table["t_next"][found] != t:
                k = self._begin(key)
            else:
                k = found
                last = int(self.table["tail"][k])
                self.after[last], self.before[head] = head, last
            if length == 1:
                self.trajectory[head], self.t[head] = k, t
            else:
                rows = np.arange(head, head + length) % capacity
                self.trajectory[rows] = k
                self.t[rows] = np.arange(t, t + length)
                self.after[rows[:-1]], self.before[rows[1:]] = rows[1:], rows[:-1]
            self.after[tail] = capacity
            for name, column in self.final_obs.items():
                column[k] = exp.final_obs[name][i]
            table = self.table
            table["tail"][k], table["t_next"][k] = tail, t + length
            table["count"][k] += length
            table["terminated"][k], table["truncated"][k] = terminated, truncated
            table["known"][k] = known
            if terminated or truncated:
                del self._open[key]

    def _begin(self, key: Key) -> int:
        """Create an empty trajectory; an open one with the same key is closed."""
        if self._free:
            k = self._free.pop()
        else:
            k = self._used
            if k == len(self.table["count"]):
                self._resize(2 * k)
            self._used += 1
        self.table["episode_id"][k], self.table["agent_id"][k], self.table["module_id"][k] = key
        self._open[key] = k
        return k

    # -- reading ------------------------------------------------------------------------------------------------

    def walk(self, rows: Index, length: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Follow trajectories forwards for ``length`` steps, beginning with ``rows``.

        Returns:
            The rows of the steps, ``[length, num]``, and the rows after them, ``[num]``. After the last step of a
            trajectory, rows are ``capacity``.
        """
        walk = np.empty((length, len(rows)), self.after.dtype)
        walk[0] = rows
        for i in range(1, length):
            self.after.take(walk[i - 1], out=walk[i], mode="clip")
        return walk, self.after.take(walk[-1])

    def walk_back(self, rows: Index, steps: Index) -> tuple[Index, Index]:
        """Follow trajectories backwards from ``rows`` by ``steps``, or as far as steps are stored.

        Returns:
            The rows reached, and the number of steps gone back, ``[num]`` each.
        """
        own = self.trajectory.take(rows)
        oldest = self.table["t_next"].take(own) - self.table["count"].take(own)
        gone = np.minimum(steps, self.t.take(rows) - oldest)
        order = np.argsort(gone)
        at, hops = rows[order], np.arange(gone.max(initial=0))
        for first in np.searchsorted(gone[order], hops, side="right").tolist():  # those from here on go further
            at[first:] = self.before.take(at[first:])
        found = np.empty_like(at)
        found[order] = at
        return found, gone

    def segments(self, starts: Index, length: int, lookback: Index) -> Experience:
        """Segments that start at ``starts``: ``lookback`` steps of context and at most ``length`` more."""
        most = length + int(lookback.max(initial=0))
        walk, after = self.walk(starts, most)
        walk = walk.T
        if most > length:
            over = np.arange(most) >= length + lookback[:, None]
            cut = over[:, -1]
            after[cut] = walk[cut, length + lookback[cut]]
            walk[over] = self.capacity
        inside = walk != self.capacity
        rows = walk[inside]
        own = self.trajectory.take(starts)
        ended = after == self.capacity
        table = {name: self.table[name].take(own) for name in ("terminated", "truncated", "known")}
        segments = self.places(starts).replace(
            lookback=lookback,
            terminated=ended & table["terminated"],
            truncated=ended & table["truncated"],
            has_final_obs=~ended | table["known"],
        )
        final_obs = {}
        for name, final in self.final_obs.items():
            final_obs[name] = self.columns[name].take(after, axis=0)
            final_obs[name][ended] = final.take(own[ended], axis=0)
        steps = {name: column.take(rows, axis=0) for name, column in self.columns.items()}
        return Experience(steps, offsets_of(np.count_nonzero(inside, axis=1)), segments, final_obs)

    def places(self, rows: Index) -> Segments:
        """The names and times of segments that start at ``rows``."""
        own = self.trajectory.take(rows)
        names = {name: self.table[name].take(own) for name in ("episode_id", "agent_id", "module_id")}
        return Segments.of(len(rows), **names, t_start=self.t.take(rows).astype(np.int64))

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Copies of the used rows, the trajectory of each step and the table of trajectories."""
        num, used = self.num_steps, np.flatnonzero(self.table["count"])
        number = np.zeros(self._used + 1, np.min_scalar_type(len(used)))
        number[used] = np.arange(len(used))
        table = {name: column[used] for name, column in self.table.items()}
        is_open = np.zeros(self._used + 1, bool)
        is_open[list(self._open.values())] = True
        return {
            "capacity": self.capacity,
            "num_steps": num,
            "num_added": self.num_added,
            "columns": {name: column[:num].copy() for name, column in self.columns.items()},
            "trajectory": number.take(self.trajectory[:num]),
            "table": table | {"open": is_open[used]},
            "final_obs": {name: column[used] for name, column in self.final_obs.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`, replacing everything that is stored.

        Raises:
            CheckpointError: the state has another capacity, or its arrays are inconsistent.
        """
        if state["capacity"] != self.capacity:
            raise CheckpointError(
                f"the replay was saved with a capacity of {state['capacity']} steps, but this one has "
                f"{self.capacity}: make it with the same one."
            )
        num, trajectory = int(state["num_steps"]), np.asarray(state["trajectory"], np.int32)
        table = {name: np.asarray(column) for name, column in state["table"].items()}
        count, t_next = table["count"].astype(np.int64), table["t_next"].astype(np.int64)
        lengths = {name: len(column) for name, column in [*state["columns"].items(), ("trajectory", trajectory)]}
        broken = {name: length for name, length in lengths.items() if length != num}
        if broken or not np.array_equal(np.bincount(trajectory, minlength=len(count)), count):
            raise CheckpointError(
                f"the replay's state is broken: it has {num} steps, but its trajectories have {count.sum()}, and "
                f"other columns {broken}. Use another checkpoint."
            )
        self._allocate(state["columns"], state["final_obs"], len(count))
        self.num_steps, self.num_added, self._used = num, int(state["num_added"]), len(count)
        for name, column in self.columns.items():
            column[:num] = state["columns"][name]
        for name, column in self.final_obs.items():
            column[: self._used] = state["final_obs"][name]
        for name, column in self.table.items():
            column[: self._used] = table[name]
        keys = zip(*(table[name].tolist() for name in ("episode_id", "agent_id", "module_id")), strict=True)
        self._open = {key: k for k, key in enumerate(keys) if table["open"][k]}
        # each step of a trajectory, in order of age, must follow the previous one
        by_age = np.arange(self.oldest, self.oldest + num) % self.capacity
        order = np.argsort(trajectory[by_age], kind="stable")
        rows, ends = by_age[order], np.cumsum(count)
        self.trajectory[rows] = np.repeat(np.arange(len(count)), count)
        self.t[rows] = np.arange(num) + np.repeat(t_next - ends, count)
        self.after[rows[:-1]], self.before[rows[1:]] = rows[1:], rows[:-1]
        self.after[rows[ends - 1]] = self.capacity


def _check_first(exp: Experience) -> None:
    """Raise a DataError if an Experience is unsuitable as the first in a replay."""
    if not col.under(exp.steps, col.OBS) or col.REWARD not in exp.steps:
        raise DataError(
            f"a replay needs observations and `{col.REWARD}`, but there are the columns {sorted(exp.steps)}."
        )
    check_final_obs(exp)
    for name, column in exp.steps.items():
        if not isinstance(column, np.ndarray):
            raise DataError(f"column `{name}` is a {type(column).__name__}, but a replay holds NumPy: use exp.numpy().")
        if column.dtype.hasobject:
            raise DataError(
                f"column `{name}` holds objects ({column.dtype}), which a replay can't store: leave it out, or convert "
                "it to numbers."
            )
