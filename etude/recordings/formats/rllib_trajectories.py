# SPDX-License-Identifier: Apache-2.0
"""Which rows of RLlib's batches belong together: one agent's in one episode, over many lines."""

import numpy as np
from numpy.typing import NDArray

from etude.errors import DataError
from etude.recordings.formats.rllib_batches import Batch, flags, integers

Index = NDArray[np.int64]


class Trajectories:
    """The trajectories found so far, each with a number, its code, and the steps of it that were seen."""

    def __init__(self) -> None:
        self.names: list[tuple[str, str | None, str | None]] = []
        """The episode, agent and module of each code."""
        self.repeated = 0
        """Rows that were seen before."""
        self._codes: dict[tuple[str, int, str | None], int] = {}
        # By code, ranges of steps, and what they hold as numbers.
        self._seen: list[list[tuple[int, int, list[NDArray[np.uint64]]]]] = []
        self._lives: dict[tuple[str, int, str | None], int] = {}  # how often an id without steps ended

    def rows_of(self, batch: Batch, content: NDArray[np.uint64], place: str) -> tuple[Index, Index, NDArray[np.bool_]]:
        """The code and step of each row of a batch, and whether it is seen for the first time.

        A row of a step that was seen before, but that holds something else, counts as new: both can't be right, and
        the reader of the episodes looks for steps that are there twice.

        Args:
            batch: The rows.
            content: ``[rows]``: numbers that are equal for rows of equal content.
            place: A name for rows that have none: each stretch up to an end is an episode of its own.

        Raises:
            DataError: a key column has other rows than the rewards, or holds no integers.
        """
        done = np.logical_or(*flags(batch).values())
        episodes, agents, t = (integers(batch, name) for name in ("eps_id", "agent_index", "t"))
        if agents is None:
            agents = np.zeros(batch.num, np.int64)
        if episodes is None:
            number = np.cumsum(done) - done
            episodes = np.array([f"{place}-{batch.policy or 0}-{n}" for n in number.tolist()], object)
            t = None
        if t is not None and len(t) and not 0 <= int(t.min()) <= int(t.max()) < 2**62:
            odd = int(t.min()) if t.min() < 0 else int(t.max())
            raise DataError(f"`t` is {odd} in one row; steps count from 0")
        new = np.ones(batch.num, bool)
        new[1:] = (episodes[1:] != episodes[:-1]) | (agents[1:] != agents[:-1]) | done[:-1]
        if t is not None:
            new[1:] |= t[1:] != t[:-1] + 1
        code, steps, keep = np.zeros(batch.num, np.int64), np.zeros(batch.num, np.int64), np.ones(batch.num, bool)
        starts = np.flatnonzero(new)
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), batch.num], strict=True):
            key = (str(episodes[start]), int(agents[start]), batch.policy)
            own = self._code_of(key, t is not None)
            first = int(t[start]) if t is not None else self._seen[own][-1][1] if self._seen[own] else 0
            code[start:stop] = own
            steps[start:stop] = np.arange(first, first + stop - start)
            keep[start:stop] = self._unseen(own, first, content[start:stop])
            if t is None and done[stop - 1]:
                self._lives[key] = self._lives.get(key, 0) + 1
        self.repeated += int((~keep).sum())
        return code, steps, keep

    def _code_of(self, key: tuple[str, int, str | None], has_t: bool) -> int:
        life = 0 if has_t else self._lives.get(key, 0)
        episode, agent, policy = key
        named = f"{episode}-{life}" if life else episode
        code = self._codes.setdefault((named, agent, policy), len(self._codes))
        if code == len(self.names):
            is_many = policy is not None or agent != 0
            self.names.append((named, str(agent) if is_many else None, policy))
            self._seen.append([])
        return code

    def _unseen(self, code: int, start: int, content: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """bool ``[rows]``: which of these steps were not seen before with this content; now they all are."""
        stop, unseen = start + len(content), np.ones(len(content), bool)
        seen = self._seen[code]
        for a, b, known in seen:
            low, high = max(a, start), min(b, stop)
            if low < high:
                same = np.concatenate(known)[low - a : high - a] == content[low - start : high - start]
                unseen[low - start : high - start] &= ~same
        if seen and seen[-1][1] == start:
            seen[-1][2].append(content)
            seen[-1] = (seen[-1][0], stop, seen[-1][2])
        else:
            seen.append((start, stop, [content]))
        return unseen
