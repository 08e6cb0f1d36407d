# SPDX-License-Identifier: Apache-2.0
"""Rows of a table or of fragments, put in order and cut into segments."""

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from etude.columns import Columns
from etude.experience import Segments
from etude.experience.experience import offsets_of
from etude.recordings.formats.rllib_rows import chained, keys_of, linked

Index = NDArray[np.int64]
Naming = Callable[[int], tuple[str, str | None, str | None]]


@dataclasses.dataclass
class Rows:
    """Rows of some episodes, those of one next to each other, and how they become segments."""

    code: Index
    """``[rows]``: the episode (and agent) of each row, as a number."""
    t: Index
    """``[rows]``: the step of each row in its episode."""
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    order: Index = dataclasses.field(init=False)
    """``[kept]``: the rows in the order of the segments."""
    offsets: Index = dataclasses.field(init=False)
    """``[segments + 1]``: where each segment begins in ``order``."""
    t_start: Index = dataclasses.field(init=False)
    """``[segments]``."""
    repeated: int = 0
    """How many rows were left out because others are the same."""

    def __post_init__(self) -> None:
        self.order = np.arange(len(self.code))
        self._cut(self._borders())

    @property
    def done(self) -> NDArray[np.bool_]:
        """The episode ends with this row."""
        return self.terminated | self.truncated

    @property
    def in_order(self) -> bool:
        """All rows are kept as they stand."""
        return len(self.order) == len(self.code) and bool((self.order[1:] > self.order[:-1]).all())

    def _borders(self) -> NDArray[np.bool_]:
        """bool ``[rows - 1]``: a segment ends between this row and the next one."""
        return np.asarray((self.code[1:] != self.code[:-1]) | self.done[:-1], bool)

    def _cut(self, borders: NDArray[np.bool_]) -> None:
        starts = np.flatnonzero(np.append(True, borders)) if len(self.code) else np.zeros(0, np.int64)
        self.offsets = np.append(starts, len(self.code)).astype(np.int64)
        self.t_start = self.t[starts]

    def one_step_each(self, first: int, before: int) -> None:
        """Every row becomes a segment of its own, named by its row in the file."""
        self.code = before + first + np.arange(len(self.code))
        self.t = np.zeros(len(self.code), np.int64)
        self._cut(np.ones(max(0, len(self.code) - 1), bool))

    def cut_where_time_jumps(self) -> None:
        """Cut segments where a step does not follow the one before it."""
        self._cut(self._borders() | (self.t[1:] != self.t[:-1] + 1))


def in_time(rows: Rows, obs: Columns, next_obs: Columns, suspect: set[int]) -> None:
    """Put rows without a step number in order of time, as observations chain, and number their steps.

    Args:
        rows: The rows; what it says of their order is set.
        obs: What each row begins with.
        next_obs: What was observed after it.
        suspect: The codes of episodes of which rows may be there twice.
    """
    border = rows.code[1:] != rows.code[:-1]
    starts = np.flatnonzero(np.append(True, border))
    stops = np.append(starts[1:], len(rows.code))
    broken = ~border & (~linked(obs, next_obs) | rows.done[:-1])
    bad = np.unique(np.searchsorted(starts, np.flatnonzero(broken), side="right") - 1)
    ill = {*bad.tolist(), *(i for i, start in enumerate(starts) if int(rows.code[start]) in suspect)}
    if not ill:
        rows.t = np.arange(len(rows.code)) - np.repeat(starts, stops - starts)
        rows.offsets = np.append(starts, len(rows.code)).astype(np.int64)
        rows.t_start = np.zeros(len(starts), np.int64)
        return
    order: list[Index] = []
    t_start: list[int] = []
    for i, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        chains = _chains(rows, obs, next_obs, start, stop, suspect) if i in ill else [np.arange(start, stop)]
        t = 0
        for chain in chains:
            order.append(chain)
            t_start.append(t)
            t += len(chain) + 1  # a row at least is missing between chains
    rows.order = np.concatenate(order)
    rows.offsets = offsets_of(np.array([len(chain) for chain in order], np.int64))
    rows.t_start = np.array(t_start, np.int64)


def _chains(rows: Rows, obs: Columns, next_obs: Columns, start: int, stop: int, suspect: set[int]) -> list[Index]:
    keys = keys_of({name: column[start:stop] for name, column in obs.items()})
    following = keys_of({name: next_obs[name][start:stop] for name in obs})
    done = rows.done[start:stop]
    index = np.arange(start, stop)
    if int(rows.code[start]) in suspect:
        first: dict[tuple[bytes, bytes], int] = {}
        for i, key in enumerate(zip(keys, following, strict=True)):
            first.setdefault(key, i)
        kept = sorted(first.values())
        rows.repeated += len(keys) - len(kept)
        keys, following, done, index = [keys[i] for i in kept], [following[i] for i in kept], done[kept], index[kept]
    return [index[chain] for chain in chained(keys, following, done)]


def segments_of(rows: Rows, naming: Naming, has_next_obs: bool) -> Segments:
    """The segments that rows were cut into; ``naming`` gives the episode, agent and module of a code."""
    last = rows.order[rows.offsets[1:] - 1]
    names = [naming(code) for code in rows.code[last].tolist()]
    return Segments.of(
        len(names),
        episode_id=[episode for episode, _, _ in names],
        agent_id=[agent for _, agent, _ in names],
        module_id=[module for _, _, module in names],
        t_start=rows.t_start,
        terminated=rows.terminated[last],
        truncated=rows.truncated[last],
        has_final_obs=has_next_obs,
    )
