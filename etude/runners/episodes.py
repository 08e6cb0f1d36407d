# SPDX-License-Identifier: Apache-2.0
"""Which episode each slot is in, and what finished episodes brought."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude.experience.segments import Segments


class Finished(NamedTuple):
    """Episodes that ended, in the order in which their ends were collected."""

    returns: NDArray[np.float64]
    """The sum of each episode's rewards."""
    lengths: NDArray[np.int64]
    """The steps of each episode."""


class EpisodeBook:
    """Keeps, for each slot, the running episode's id, its steps so far and its return so far.

    Ids are a prefix drawn from the runner's random stream and a running number, so they are equal for equal seeds.
    """

    def __init__(self, num_slots: int, prefix: str) -> None:
        self._prefix = prefix
        self._next = 0
        self._id = np.full(num_slots, None, object)
        self.t = np.zeros(num_slots, np.int64)
        """``[num_slots]``: the index of the next step in the running episode."""
        self._return = np.zeros(num_slots)
        self._finished: list[Finished] = []

    def abandon(self) -> None:
        """Every slot begins a new episode; the running ones never end."""
        self._id[:] = None
        self.t[:] = 0
        self._return[:] = 0

    def enter(
        self,
        slots: NDArray[np.int64],
        lengths: NDArray[np.int64],
        returns: NDArray[np.float64],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
    ) -> Segments:
        """Enter segments, grouped by slot and in order of time in each, and say whose they are."""
        count = len(slots)
        done = terminated | truncated
        continues = np.append(True, slots[1:] != slots[:-1]) & (self.t[slots] > 0)
        number = self._next + np.cumsum(~continues) - 1
        self._next += int((~continues).sum())
        ids = np.empty(count, object)
        ids[:] = [f"{self._prefix}-{i}" for i in number]
        ids[continues] = self._id[slots[continues]]
        t_start = np.where(continues, self.t[slots], 0)
        totals = returns + np.where(continues, self._return[slots], 0.0)
        ends = t_start + lengths
        if done.any():
            self._finished.append(Finished(totals[done], ends[done]))
        last = np.append(slots[1:] != slots[:-1], True)
        of = slots[last]
        self._id[of] = np.where(done[last], None, ids[last])
        self.t[of] = np.where(done[last], 0, ends[last])
        self._return[of] = np.where(done[last], 0.0, totals[last])
        return Segments.of(count, episode_id=ids, t_start=t_start, terminated=terminated, truncated=truncated)

    def take_finished(self) -> Finished:
        """The episodes that ended since this was last asked."""
        parts, self._finished = self._finished, []
        if not parts:
            return Finished(np.zeros(0), np.zeros(0, np.int64))
        return Finished(np.concatenate([p.returns for p in parts]), np.concatenate([p.lengths for p in parts]))

    def state_dict(self) -> dict[str, Any]:
        """Plain data and arrays; goes into `load_state_dict`."""
        return {
            "prefix": self._prefix,
            "next": self._next,
            "id": self._id.tolist(),
            "t": self.t.copy(),
            "return": self._return.copy(),
            "finished": [list(part) for part in self._finished],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.load_counter(state)
        self._id[:] = state["id"]
        self.t[:], self._return[:] = state["t"], state["return"]
        self._finished = [Finished(*part) for part in state["finished"]]

    def load_counter(self, state: dict[str, Any]) -> None:
        """Go on with the ids of `state_dict`, but with no episode that ran in it."""
        self._prefix, self._next = state["prefix"], state["next"]


@dataclasses.dataclass(slots=True)
class Quota:
    """How many episodes each slot still owes when whole episodes are collected.

    The episodes are dealt out to the slots beforehand: taking the first to finish would favour short ones.
    """

    owed: NDArray[np.int64]

    @classmethod
    def of(cls, num_episodes: int, num_slots: int) -> "Quota":
        """Deal ``num_episodes`` out to the slots, as evenly as can be."""
        return cls(num_episodes // num_slots + (np.arange(num_slots) < num_episodes % num_slots))

    def delivered(self, done: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """bool ``[slots, T]``: the steps that belong to owed episodes, given where episodes end."""
        return (np.cumsum(done, axis=1) - done) < self.owed[:, None]
