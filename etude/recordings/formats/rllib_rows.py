# SPDX-License-Identifier: Apache-2.0
"""Rows of a table put together as episodes: by their step where it is there, else by their observations.

A run is a range of rows, next to each other in one row group, of one episode. Runs are found once, from the columns
that tell of episodes; all of an episode's runs are then read together.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude.columns import Columns

Index = NDArray[np.int64]


class Run(NamedTuple):
    """Rows ``start:stop`` of a row group."""

    group: int
    start: int
    stop: int
    done: bool
    """The episode ends with the last row."""
    t: int
    """The step of the first row, where rows say so; else 0."""


def runs_of(group: int, codes: Index, done: NDArray[np.bool_], t: Index | None) -> list[tuple[int, Run]]:
    """The runs of one row group, each with the code of its episode.

    Args:
        group: The row group.
        codes: int64 ``[rows]``: the episode of each row.
        done: bool ``[rows]``: the episode ends with this row.
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
    """An episode's runs in order of time, those that repeat others, and whether rows may be there twice among them.

    With steps, rows of a step that is there already are repeats. Without, an episode that ends several times seems to
    be there several times: whether its rows say so too is for the caller to see.
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
    """Runs up to each end of the episode; several where it was written several times, or where rows are mixed."""
    rounds: list[list[Run]] = [[]]
    for run in runs:
        rounds[-1].append(run)
        if run.done:
            rounds.append([])
    return [part for part in rounds if part]


def hashes_of(columns: Columns) -> NDArray[np.uint64]:
    """uint64 ``[rows]``: a number for the bytes of each row of all columns; equal rows have equal ones."""
    out = np.zeros(len(next(iter(columns.values()))), np.uint64)
    for column in columns.values():
        words = _raw(column).astype(np.uint64)
        factors = np.random.default_rng(0).integers(1, 2**63, words.shape[1], np.uint64) * np.uint64(2) + np.uint64(1)
        out = out * np.uint64(0x9E3779B97F4A7C15) + (words * factors).sum(axis=1, dtype=np.uint64)
    return out


def linked(obs: Columns, next_obs: Columns) -> NDArray[np.bool_]:
    """bool ``[rows - 1]``: what was observed after each row is, byte by byte, what the next row begins with."""
    num = len(next(iter(obs.values())))
    out = np.ones(max(0, num - 1), bool)
    for name, column in obs.items():
        a, b = _raw(next_obs[name][:-1]), _raw(column[1:])
        out &= (a == b).all(axis=1)
    return out


def _raw(column: NDArray[Any]) -> NDArray[Any]:
    """The bytes of each row, as whole words where they fit."""
    if not column.size:
        return np.zeros((len(column), 0), np.uint8)
    flat = np.ascontiguousarray(column).reshape(len(column), -1)
    width = flat.shape[1] * flat.itemsize
    return flat.view(np.uint64 if width % 8 == 0 else np.uint32 if width % 4 == 0 else np.uint8)


def keys_of(columns: Columns) -> list[bytes]:
    """The bytes of each row of all columns together."""
    parts = [np.ascontiguousarray(c).reshape(len(c), -1).view(np.uint8) for c in columns.values()]
    joined = np.concatenate(parts, axis=1)
    return [row.tobytes() for row in joined]


def chained(obs: list[bytes], next_obs: list[bytes], done: NDArray[np.bool_]) -> list[list[int]]:
    """The rows of one episode as chains, each row beginning with what was observed after the one before it.

    Args:
        obs: The bytes of what each row begins with.
        next_obs: The bytes of what was observed after it.
        done: The episode ends with this row.

    Returns:
        Chains of row numbers. Those that nothing leads to come first, in the order of the rows.
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
    """The row after ``row`` in the file where it is among those that fit, else the first of them not yet used."""
    while candidates and used[candidates[-1]]:
        candidates.pop()
    if not candidates:
        return None
    return row + 1 if row + 1 in candidates[-8:] and not used[row + 1] else candidates[-1]
