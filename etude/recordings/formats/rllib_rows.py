# SPDX-License-Identifier: Apache-2.0
"""Join rows of RLlib's recordings to episodes: by their step if they have one, else by their observations.

A run is a range of adjacent rows of one episode in one row group. Runs are found once, from the columns that identify
episodes; all runs of an episode are then read together.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.experience import Segments
from etude.experience.arrays import hashes_of, words_of
from etude.experience.experience import offsets_of
from etude.recordings.formats.arrow import flat, one_array
from etude.recordings.formats.sorting import KeyedRows

Ints = NDArray[np.int64]


class Run(NamedTuple):
    """Rows ``start:stop`` of a row group."""

    group: int
    start: int
    stop: int
    done: bool
    """Whether the episode ends with the last row."""
    t: int
    """The step of the first row, if the rows have one; else 0."""


def runs_of(group: int, codes: Ints, done: NDArray[np.bool_], t: Ints | None) -> list[tuple[int, Run]]:
    """Find the runs of one row group, each with the code of its episode.

    Args:
        group: Index of the row group.
        codes: int64 ``[rows]``: the episode of each row.
        done: bool ``[rows]``: whether the episode ends with this row.
        t: int64 ``[rows]``: the step of each row, or None.
    """
    if not len(codes):
        return []
    new = np.append(True, (codes[1:] != codes[:-1]) | done[:-1])
    if t is not None:
        new[1:] |= t[1:] != t[:-1] + 1
    starts = np.flatnonzero(new)
    stops = np.append(starts[1:], len(codes))
    first = np.zeros(len(starts), np.int64) if t is None else t[starts]
    rows = zip(codes[starts].tolist(), starts.tolist(), stops.tolist(), done[stops - 1].tolist(), first.tolist(),
               strict=True)  # fmt: skip
    return [(code, Run(group, start, stop, ends, at)) for code, start, stop, ends, at in rows]


def without_copies(runs: list[Run], has_t: bool) -> tuple[list[Run], list[Run], bool]:
    """Return an episode's runs in order of time, runs that copy others, and whether the former may still have copies.

    If rows have steps, rows of an earlier step are copies. If not, an episode that ends several times seems to be
    stored several times; the caller must compare the rows.
    """
    if has_t:
        kept: list[Run] = []
        copies: list[Run] = []
        for run in sorted(runs, key=lambda run: run.t):
            stop = kept[-1].t + kept[-1].stop - kept[-1].start if kept else 0
            if kept and run.t + run.stop - run.start <= stop:
                copies.append(run)
            elif kept and run.t < stop:
                copies.append(run._replace(stop=run.start + stop - run.t, done=False))
                kept.append(run._replace(start=run.start + stop - run.t, t=stop))
            else:
                kept.append(run)
        return kept, copies, False
    rounds = rounds_of(runs)
    if len(rounds) > 1 and all(part[-1].done for part in rounds):
        return rounds[0], [run for part in rounds[1:] for run in part], False
    return runs, [], sum(run.done for run in runs) > 1 or len(rounds) > 1


def rounds_of(runs: list[Run]) -> list[list[Run]]:
    """Split runs after each end of the episode; several parts if it was written several times, or rows are mixed."""
    rounds: list[list[Run]] = [[]]
    for run in runs:
        rounds[-1].append(run)
        if run.done:
            rounds.append([])
    return [part for part in rounds if part]


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
        content = hashes_of(_contents(rows.table.take(pa.array(twice))))
        order = np.lexsort((content, rows.when[twice], rows.track[twice]))
        alike = np.ones(len(twice) - 1, bool)
        for key in (rows.track[twice], rows.when[twice], content):
            alike &= key[order][1:] == key[order][:-1]
        keep[twice[order[1:][alike]]] = False
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


def linked(obs: Columns, next_obs: Columns) -> NDArray[np.bool_]:
    """bool ``[rows - 1]``: where a row's next observation equals the next row's observation, byte by byte."""
    num = len(next(iter(obs.values())))
    out = np.ones(max(0, num - 1), bool)
    for name, column in obs.items():
        a, b = words_of(next_obs[name][:-1]), words_of(column[1:])
        out &= (a == b).all(axis=1)
    return out


def keys_of(columns: Columns) -> list[bytes]:
    """Return the bytes of each row over all columns."""
    parts = [np.ascontiguousarray(c).reshape(len(c), -1).view(np.uint8) for c in columns.values()]
    joined = np.concatenate(parts, axis=1)
    return [row.tobytes() for row in joined]


def chained(obs: list[bytes], next_obs: list[bytes], done: NDArray[np.bool_]) -> list[list[int]]:
    """Chain the rows of one episode, so that each row's observation is the next observation of the row before.

    Args:
        obs: The bytes of each row's observation.
        next_obs: The bytes of each row's next observation.
        done: Whether the episode ends with this row.

    Returns:
        Chains of row indices. Those that no row leads to come first, in the order of the rows.
    """
    waiting: dict[bytes, list[int]] = {}
    for row in range(len(obs) - 1, -1, -1):
        waiting.setdefault(obs[row], []).append(row)
    reached = {key for row, key in enumerate(next_obs) if not done[row]}
    used = np.zeros(len(obs), bool)
    chains: list[list[int]] = []
    for row in [*(r for r in range(len(obs)) if obs[r] not in reached), *range(len(obs))]:
        if used[row]:
            continue
        chain = [row]
        used[row] = True
        while not done[chain[-1]]:
            following = _next(chain[-1], waiting.get(next_obs[chain[-1]], []), used)
            if following is None:
                break
            chain.append(following)
            used[following] = True
        chains.append(chain)
    return chains


def _next(row: int, candidates: list[int], used: NDArray[np.bool_]) -> int | None:
    """The following row in the file if it fits, else the first unused one of those that fit."""
    while candidates and used[candidates[-1]]:
        candidates.pop()
    if not candidates:
        return None
    return row + 1 if row + 1 in candidates[-8:] and not used[row + 1] else candidates[-1]


# -- sort rows and cut them into segments ----------------------------------------------------------------------------


Naming = Callable[[int], tuple[str, str | None, str | None]]


@dataclasses.dataclass
class SegmentedRows:
    """Rows of some episodes, grouped by episode, and the segments they form."""

    code: Ints
    """``[rows]``: the code of each row's episode (and agent)."""
    t: Ints
    """``[rows]``: the step of each row in its episode."""
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    order: Ints = dataclasses.field(init=False)
    """``[kept]``: the rows in the order of the segments."""
    offsets: Ints = dataclasses.field(init=False)
    """``[segments + 1]``: the bounds of segments in ``order``."""
    t_start: Ints = dataclasses.field(init=False)
    """``[segments]``: the first step of each segment."""
    repeated: int = 0
    """The number of rows that were left out as copies."""

    def __post_init__(self) -> None:
        self.order = np.arange(len(self.code))
        self._cut(self._borders())

    @property
    def done(self) -> NDArray[np.bool_]:
        """Whether the episode ends with each row."""
        return self.terminated | self.truncated

    @property
    def in_order(self) -> bool:
        """Whether all rows are kept in their original order."""
        return len(self.order) == len(self.code) and bool((self.order[1:] > self.order[:-1]).all())

    def _borders(self) -> NDArray[np.bool_]:
        """bool ``[rows - 1]``: whether a segment ends between a row and the next."""
        return np.asarray((self.code[1:] != self.code[:-1]) | self.done[:-1], bool)

    def _cut(self, borders: NDArray[np.bool_]) -> None:
        starts = np.flatnonzero(np.append(True, borders)) if len(self.code) else np.zeros(0, np.int64)
        self.offsets = np.append(starts, len(self.code)).astype(np.int64)
        self.t_start = self.t[starts]

    def one_step_each(self, first: int, before: int) -> None:
        """Make every row a segment of its own, named by its row in the file."""
        self.code = before + first + np.arange(len(self.code))
        self.t = np.zeros(len(self.code), np.int64)
        self._cut(np.ones(max(0, len(self.code) - 1), bool))

    def cut_where_time_jumps(self) -> None:
        """Cut segments where a step does not follow the one before."""
        self._cut(self._borders() | (self.t[1:] != self.t[:-1] + 1))


def in_time(rows: SegmentedRows, obs: Columns, next_obs: Columns, suspect: set[int]) -> None:
    """Sort rows without a step number in order of time, by chaining observations, and number their steps.

    Args:
        rows: The rows, whose order is set in place.
        obs: The observation of each row.
        next_obs: The next observation of each row.
        suspect: The codes of episodes that may contain copies of rows.
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
    order: list[Ints] = []
    t_start: list[int] = []
    for i, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        chains = _chains(rows, obs, next_obs, start, stop, suspect) if i in ill else [np.arange(start, stop)]
        t = 0
        for chain in chains:
            order.append(chain)
            t_start.append(t)
            t += len(chain) + 1  # at least one row is missing between chains
    rows.order = np.concatenate(order)
    rows.offsets = offsets_of(np.array([len(chain) for chain in order], np.int64))
    rows.t_start = np.array(t_start, np.int64)


def _chains(
    rows: SegmentedRows, obs: Columns, next_obs: Columns, start: int, stop: int, suspect: set[int]
) -> list[Ints]:
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


def segments_of(rows: SegmentedRows, naming: Naming, has_next_obs: bool) -> Segments:
    """Return the segments of the rows; ``naming`` returns the episode, agent and module of a code."""
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
