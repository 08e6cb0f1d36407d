# SPDX-License-Identifier: Apache-2.0
"""Replay: the latest steps, to be drawn from again and again."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from etude import columns as col
from etude.columns import Columns
from etude.display import short
from etude.errors import CheckpointError, DataError, SettingsError
from etude.experience.arrays import Index
from etude.experience.experience import Experience, without_lookback
from etude.experience.priorities import Priorities, Prioritized, checked
from etude.experience.trajectories import TrajectoryStore


class Replay:
    """The last ``capacity`` steps of any number of agents, envs and episodes.

    Steps come as Experience, in pieces of any length; the pieces of an episode are put together again. When it is full,
    the steps that were added first make room, one for one. Only raw columns are held: what follows a step is looked up
    when it is drawn, and ``final_obs`` is held once an episode.

    A step after which nothing was seen, though its episode did not terminate, has no value to bootstrap from: `sample`
    never draws it, and shortens n-step sums that would end there. `num_blind` says how many there are.

    Args:
        capacity: How many steps are held, at most. Columns are allocated for all of them by the first `add`; beside
            them, 12 bytes a step (16.3 with priorities).
        n_step: How many rewards `sample` sums, at most.
        gamma: The discount, from 0 to 1.
        priorities: How to draw by priorities; None draws uniformly.
        path: A folder for the columns, a raw file each, mapped into memory; None holds them in memory. The files are
            working memory and not a record: a new Replay replaces them, and what it knows of them is in `state_dict`.
        seed: Of the draws; None is a random one.

    Raises:
        SettingsError: a setting is out of its range.
    """

    def __init__(
        self,
        capacity: int,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        priorities: Priorities | None = None,
        path: str | os.PathLike[str] | None = None,
        seed: int | None = None,
    ) -> None:
        for name, value in (("capacity", capacity), ("n_step", n_step)):
            if value < 1:
                raise SettingsError(f"{name} is {value}, but a replay needs at least 1.")
        if not 0 <= gamma <= 1:
            raise SettingsError(f"gamma is {gamma}, but a discount is from 0 to 1.")
        self.capacity = capacity
        self.n_step = n_step
        self.gamma = gamma
        self.priorities = priorities
        self._rng = np.random.default_rng(seed)
        self._discounts = np.float64(gamma) ** np.arange(n_step + 1)
        self._stored = TrajectoryStore(capacity, path)
        self._prioritized = None if priorities is None else Prioritized(priorities, capacity)

    def __repr__(self) -> str:
        return short(self, f"{self.num_steps:,} of {self.capacity:,} steps", n_step=self.n_step, gamma=self.gamma)

    @property
    def beta(self) -> float:
        """How much the weights of `sample` make up for priorities, from 0 to 1; to be set by who anneals it."""
        return self._with_priorities().beta

    @beta.setter
    def beta(self, beta: float) -> None:
        self._with_priorities().beta = beta

    def _with_priorities(self) -> Prioritized:
        if self._prioritized is None:
            raise DataError("this replay draws uniformly: make it with priorities=Priorities() to draw by them.")
        return self._prioritized

    @property
    def num_steps(self) -> int:
        """The steps that are stored."""
        return self._stored.num_steps

    @property
    def num_added(self) -> int:
        """The steps that were ever added; a step's ``index`` is how many were added before it."""
        return self._stored.num_added

    @property
    def num_blind(self) -> int:
        """The stored steps that `sample` never draws: what followed them was not seen, and it would be needed."""
        return self._stored.num_blind

    def can_sample(self, batch_size: int) -> bool:
        """Whether there are at least ``batch_size`` steps to draw from."""
        return self.num_steps - self.num_blind >= batch_size

    # -- adding -------------------------------------------------------------------------------------------------

    def add(self, exp: Experience) -> None:
        """Store steps, and drop as many of the oldest as there is no room for.

        A segment goes on where the one of the same episode, agent and module ended that was added before it, if its
        ``t_start`` says so. Lookback rows are not stored: they came before.

        Raises:
            DataError: the columns are not those of the steps before, or can't be held.
        """
        exp = without_lookback(exp)
        while (num := exp.num_steps) > self.capacity:
            first, exp = exp.split(self.capacity)
            self._add(first)
        if num:
            self._add(exp)

    def _add(self, exp: Experience) -> None:
        added = self._stored.add(exp)
        if self._prioritized is not None:
            self._prioritized.add(*added)

    # -- drawing steps ------------------------------------------------------------------------------------------

    def sample(self, batch_size: int) -> Columns:
        """Draw steps, with replacement: uniformly, or by priorities, one from each of equal shares of their sum.

        The rewards of up to ``n_step`` steps are summed, until the episode ends or is not known any further. The
        observation after them is the next one, or the final one if the episode ended or was not continued yet.

        Returns:
            Columns ``[batch_size, ...]``: those that were added, and

            - ``reward``: float32, ``sum_i gamma ** i * reward[t + i]`` over the k steps summed (raw where k is 1);
            - ``next_obs`` or ``next_obs/...``: what was observed after them; means nothing where ``terminated``;
            - ``terminated``: bool, the episode ended with them by its own rules;
            - ``discount``: float32, ``gamma ** k``, 0 where ``terminated``: the factor of the value of ``next_obs``;
            - ``index``: int64, for `update_priorities`: how many steps were added before this one;
            - ``weight``, with priorities: float32, ``(num * probability) ** -beta`` over the greatest in the batch.

        Raises:
            DataError: no step can be drawn.
        """
        if not self.can_sample(1):
            raise DataError(
                f"there is no step to draw: {self.num_steps} are stored, and of {self.num_blind} of them what followed "
                "was not seen. Add steps first; can_sample says whether there are enough."
            )
        stored, weight = self._stored, None
        if self._prioritized is None:
            index = self._draw(batch_size)
            rows = index % self.capacity
        else:
            rows, weight = self._prioritized.draw(batch_size, self._rng)
            first = stored.num_added - stored.num_steps
            index = first + (rows - first) % self.capacity
        batch = {name: column.take(rows, axis=0) for name, column in stored.columns.items() if name != col.REWARD}
        self._look_ahead(rows, batch)
        batch["index"] = index
        if weight is not None:
            batch[col.WEIGHT] = weight
        return batch

    def _draw(self, num: int) -> Index:
        """Indices of steps that have something to bootstrap from, or need nothing; uniformly."""
        stored = self._stored
        index = self._any_steps(num)
        while stored.num_blind:
            rows = index % self.capacity
            blind = stored.table["blind"].take(stored.trajectory.take(rows))
            again = np.flatnonzero(blind & (stored.after.take(rows) == self.capacity))
            if not len(again):
                break
            index[again] = self._any_steps(len(again))
        return index

    def _any_steps(self, num: int) -> Index:
        """Indices of stored steps, uniformly but for a share of 2 ** -53; ``rng.integers`` takes four times as long."""
        drawn: Index = (self._rng.random(num) * self.num_steps).astype(np.int64)
        return drawn + (self.num_added - self.num_steps)

    def _look_ahead(self, rows: Index, batch: Columns) -> None:
        """Add what the steps at ``rows`` led to."""
        stored = self._stored
        reward = stored.columns[col.REWARD]
        if self.n_step == 1:
            after = stored.after.take(rows)
            batch[col.REWARD] = reward.take(rows, axis=0).astype(np.float32)
            discount = np.full(len(rows), self.gamma, np.float32)
        else:
            walk, after = stored.walk(rows, self.n_step)
            if stored.num_blind:
                self._stop_before_blind(rows, walk, after)
            steps = np.sum(walk != self.capacity, axis=0)
            batch[col.REWARD] = (self._discounts[:-1] @ reward.take(walk)).astype(np.float32)
            discount = self._discounts.take(steps).astype(np.float32)
        ends = (after == self.capacity).nonzero()[0]
        own = stored.trajectory.take(rows.take(ends))
        terminated = np.zeros(len(rows), bool)
        terminated[ends] = stored.table[col.TERMINATED].take(own)
        discount[terminated] = 0.0
        for name, final in stored.final_obs.items():
            following = stored.columns[name].take(after, axis=0)
            following[ends] = final.take(own, axis=0)
            batch[col.NEXT_OBS + name[len(col.OBS) :]] = following
        batch[col.TERMINATED], batch["discount"] = terminated, discount

    def _stop_before_blind(self, rows: Index, walk: NDArray[Any], after: NDArray[Any]) -> None:
        """Take the last steps of trajectories that end blind out of walks, and let them be what follows."""
        stored = self._stored
        own = stored.trajectory.take(rows)
        tail = stored.table["tail"].take(own)
        found = (walk == tail) & stored.table["blind"].take(own)
        walks = np.flatnonzero(found.any(axis=0))
        walk[found] = self.capacity
        after[walks] = tail[walks]

    def update_priorities(self, index: ArrayLike, priority: ArrayLike) -> None:
        """Set priorities, such as absolute TD errors, of steps.

        Steps that are no longer stored, and those counted by `num_blind`, are ignored.

        Args:
            index: int64 ``[num]``, as `sample` gave them; of steps given twice, the last counts.
            priority: ``[num]``, finite, from 0 on.

        Raises:
            DataError: the replay has no priorities, or they or the index can't be.
        """
        prioritized = self._with_priorities()
        which, given = checked(index, priority, self.num_added)
        stored = which >= self.num_added - self.num_steps
        prioritized.update(which[stored] % self.capacity, given[stored])

    # -- drawing segments ---------------------------------------------------------------------------------------

    def sample_sequences(self, num: int, length: int, lookback: int = 0) -> Experience:
        """Draw segments of ``length`` steps.

        A step is drawn uniformly from all, and so is its place in the segment: the first and the last steps of an
        episode are drawn about half as often as others, but not less. Segments are shorter at an episode's start and
        end, and where no further step is stored. They hold the columns as they were added, among them
        ``state_in/...``, whose first row in a segment is the state to begin with.

        Args:
            num: How many.
            length: Steps of a segment, at least 1.
            lookback: Steps before these that a segment has, too, as far as they are stored.

        Raises:
            DataError: no steps are stored.
        """
        if length < 1:
            raise ValueError(f"a sequence needs a length of at least 1, not {length}.")
        if not self.num_steps:
            raise DataError("there is no step to draw: none is stored. Add some first.")
        drawn = self._any_steps(num) % self.capacity
        starts, _ = self._stored.walk_back(drawn, (self._rng.random(num) * length).astype(np.int64))
        context = np.zeros(num, np.int64)
        if lookback:
            starts, context = self._stored.walk_back(starts, context + lookback)
        return self._stored.segments(starts, length, context)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that is stored and what draws depend on: arrays of the steps stored, copied once, and plain data."""
        state: dict[str, Any] = {"storage": self._stored.state_dict(), "rng": self._rng.bit_generator.state}
        if self._prioritized is not None:
            state["priorities"] = self._prioritized.state_dict(self.num_steps)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`: the next draws are the same, bit for bit. The columns are copied into this replay's.

        Raises:
            CheckpointError: the state is of another capacity, of broken columns, or one of the two has priorities and
                the other has not.
        """
        if ("priorities" in state) != (self._prioritized is not None):
            there, here = ("", "out") if "priorities" in state else ("out", "")
            raise CheckpointError(
                f"the replay was saved with{there} priorities, but this one is with{here}: make it as that one was."
            )
        self._stored.load_state_dict(state["storage"])
        self._rng.bit_generator.state = state["rng"]
        if self._prioritized is not None:
            self._prioritized.load_state_dict(state["priorities"])
