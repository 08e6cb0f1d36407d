# SPDX-License-Identifier: Apache-2.0
"""Replay: a buffer of the latest steps, from which batches of steps or segments are sampled."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from etude import columns as col
from etude.columns import Columns
from etude.display import short
from etude.errors import CheckpointError, DataError, SettingsError
from etude.experience.arrays import Index, check_scalars
from etude.experience.experience import Experience, Segments, offsets_of, without_lookback
from etude.experience.priorities import Priorities, Prioritized, checked
from etude.experience.trajectories import TrajectoryStore


class Replay:
    """A replay buffer: the last ``capacity`` steps of any number of agents, envs and episodes.

    Steps are added as Experience, in pieces of any length; the pieces of an episode are joined again. When the buffer
    is full, new steps replace the oldest ones. Next observations are not stored, but looked up when a step is sampled;
    ``final_obs`` is stored once per episode.

    A step is not stored if its episode did not terminate and the observation after it is unknown, since there is no
    value to bootstrap from. Its observation becomes the final observation of the steps before it.

    Args:
        capacity: The maximum number of steps, at least 1. The first `add` allocates the columns for all of them, with
            16 more bytes per step (20.3 with priorities).
        n_step: The maximum number of rewards that `sample` sums, at least 1.
        gamma: The discount factor, 0 to 1.
        priorities: Settings of prioritized sampling; None samples uniformly.
        path: A folder for the columns, as memory-mapped raw files; None stores them in memory. The files are scratch
            space, which a new Replay overwrites. To save the contents, use `state_dict`.
        seed: The seed for sampling; None is a random one.

    Raises:
        SettingsError: a setting is out of range.
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
            raise SettingsError(f"gamma is {gamma}, but a discount factor is from 0 to 1.")
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
        """The exponent of the importance weights in `sample`, 0 to 1. Set it to anneal it."""
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
        """The number of stored steps."""
        return self._stored.num_steps

    @property
    def num_added(self) -> int:
        """The number of steps ever added; a step's ``index`` is the number added before it."""
        return self._stored.num_added

    def can_sample(self, batch_size: int) -> bool:
        """Whether at least ``batch_size`` steps are stored."""
        return self.num_steps >= batch_size

    # -- adding -------------------------------------------------------------------------------------------------

    def add(self, exp: Experience) -> None:
        """Store steps, dropping the oldest ones if there is no room.

        If a segment's ``t_start`` follows the last segment with the same episode, agent and module, it continues that
        one. Lookback rows are not stored, because they were added before. Give segments that did not terminate
        their ``final_obs``: without it, the last step is not stored.

        Raises:
            DataError: the columns differ from those of earlier steps, or can't be stored.
        """
        if not self.num_added:
            self._check_names(exp)
        exp = without_blind(without_lookback(exp))
        while (num := exp.num_steps) > self.capacity:
            first, exp = exp.split(self.capacity)
            self._add(first)
        if num:
            self._add(exp)

    def _check_names(self, exp: Experience) -> None:
        check_scalars(exp.steps, "the experience")
        own = [col.TERMINATED, col.DISCOUNT, "index", *([col.WEIGHT] if self._prioritized is not None else [])]
        if taken := [*col.under(exp.steps, col.NEXT_OBS), *(name for name in own if name in exp.steps)]:
            raise DataError(
                f"a replay can't store the column `{taken[0]}`: its batches have another one of this name. Rename it."
            )

    def _add(self, exp: Experience) -> None:
        added = self._stored.add(exp)
        if self._prioritized is not None:
            self._prioritized.add(*added)

    # -- sampling steps -----------------------------------------------------------------------------------------

    def sample(self, batch_size: int) -> Columns:
        """Sample steps with replacement: uniformly, or by priority, with one step from each equal share of their sum.

        The rewards of up to ``n_step`` steps are summed, until the episode ends or no further step is stored. The
        observation after them is the next one, or the final one if the episode ended or has not continued yet.

        Returns:
            Columns ``[batch_size, ...]``: the added columns, and

            - ``reward``: float32, ``sum_i gamma ** i * reward[t + i]`` over the k steps (the raw reward if k is 1);
            - ``next_obs`` or ``next_obs/...``: the observation after the k steps; meaningless where ``terminated``;
            - ``terminated``: bool, the episode ended with these steps by the env's own rules;
            - ``discount``: float32, ``gamma ** k``, 0 where ``terminated``: the factor for the value of ``next_obs``;
            - ``index``: int64, for `update_priorities`: the number of steps added before this one;
            - ``weight``, with priorities: float32, ``(num * probability) ** -beta`` divided by the batch's maximum.

        Raises:
            DataError: no steps are stored.
        """
        self._check_steps()
        stored, weight = self._stored, None
        if self._prioritized is None:
            index = self._any_steps(batch_size)
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

    def _check_steps(self) -> None:
        if not self.num_steps:
            raise DataError(
                "there is no step to draw: none is stored. Add some first; a step that does not terminate its episode "
                "needs an observation after it, in the next step or as final_obs."
            )

    def _any_steps(self, num: int) -> Index:
        """Indices of stored steps, uniform to within 2 ** -53; ``rng.integers`` would take four times as long."""
        drawn: Index = (self._rng.random(num) * self.num_steps).astype(np.int64)
        return drawn + (self.num_added - self.num_steps)

    def _look_ahead(self, rows: Index, batch: Columns) -> None:
        """Add the columns that follow from later steps."""
        stored = self._stored
        reward = stored.columns[col.REWARD]
        if self.n_step == 1:
            after = stored.after.take(rows)
            batch[col.REWARD] = reward.take(rows, axis=0).astype(np.float32)
            discount = np.full(len(rows), self.gamma, np.float32)
        else:
            walk, after = stored.walk(rows, self.n_step)
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
            batch[col.moved(name, col.OBS, col.NEXT_OBS)] = following
        batch[col.TERMINATED], batch[col.DISCOUNT] = terminated, discount

    def places(self, index: Index) -> Segments:
        """The ids and times of stored steps, as ``num`` segments of one step that neither terminated nor truncated.

        Args:
            index: int64 ``[num]``, as just returned by `sample`.
        """
        return self._stored.places(index % self.capacity)

    def steps_ahead(self, index: Index) -> Index:
        """The number of rewards that `sample` sums for each of some stored steps, int64 ``[num]``; see `places`."""
        walk, _ = self._stored.walk(index % self.capacity, self.n_step)
        steps: Index = np.sum(walk != self.capacity, axis=0)
        return steps

    def update_priorities(self, index: ArrayLike, priority: ArrayLike) -> None:
        """Set the priorities of steps, such as absolute TD errors.

        Steps that are no longer stored are ignored.

        Args:
            index: int64 ``[num]``, as returned by `sample`; if a step occurs twice, its last priority counts.
            priority: ``[num]``, finite and at least 0.

        Raises:
            DataError: the replay has no priorities, or an index or priority is invalid.
        """
        prioritized = self._with_priorities()
        which, given = checked(index, priority, self.num_added)
        stored = which >= self.num_added - self.num_steps
        prioritized.update(which[stored] % self.capacity, given[stored])

    # -- sampling segments --------------------------------------------------------------------------------------

    def sample_sequences(self, num: int, length: int, lookback: int = 0) -> Experience:
        """Sample segments of ``length`` steps.

        Each segment is placed around a step sampled uniformly from all stored ones; the position of that step in the
        segment is uniform, too. The first and last steps of an episode therefore occur about half as often as others.
        Segments are shorter at an episode's start and end, and at gaps in the stored steps. They contain the columns as
        they were added; the first row of ``state_in/...`` in a segment is its initial recurrent state.

        Args:
            num: The number of segments.
            length: The maximum number of steps in a segment, at least 1.
            lookback: The number of steps before these to include as context, as far as they are stored.

        Raises:
            DataError: no steps are stored.
            ValueError: ``length`` is less than 1.
        """
        if length < 1:
            raise ValueError(f"a sequence needs a length of at least 1, not {length}.")
        self._check_steps()
        drawn = self._any_steps(num) % self.capacity
        starts, _ = self._stored.walk_back(drawn, (self._rng.random(num) * length).astype(np.int64))
        context = np.zeros(num, np.int64)
        if lookback:
            starts, context = self._stored.walk_back(starts, context + lookback)
        return self._stored.segments(starts, length, context)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The stored steps and all state that sampling depends on: copies of arrays, and plain data."""
        state: dict[str, Any] = {"storage": self._stored.state_dict(), "rng": self._rng.bit_generator.state}
        if self._prioritized is not None:
            state["priorities"] = self._prioritized.state_dict(self.num_steps)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`: the next samples are bit for bit the same. The arrays are copied.

        Raises:
            CheckpointError: the state has another capacity, its arrays are inconsistent, only one of the two has
                priorities, or the state was saved with a priority alpha of 0 and this replay has another.
        """
        if ("priorities" in state) != (self._prioritized is not None):
            there, here = ("with", "without") if "priorities" in state else ("without", "with")
            raise CheckpointError(
                f"the replay was saved {there} priorities, but this one is {here} priorities: make it the same way."
            )
        self._stored.load_state_dict(state["storage"])
        self._rng.bit_generator.state = state["rng"]
        if self._prioritized is not None:
            self._prioritized.load_state_dict(state["priorities"])


def without_blind(exp: Experience) -> Experience:
    """Remove the last step of each segment that did not terminate and whose final observation is unknown.

    The observation of that step becomes the final observation of the segment.
    """
    which = ~(exp.segments.has_final_obs | exp.segments.terminated)
    if not which.any():
        return exp
    last = exp.offsets[1:] - 1
    rows = np.ones(exp.num_steps, bool)
    rows[last[which]] = False
    final_obs = {}
    for name, final in exp.final_obs.items():
        final_obs[name] = np.where(which.reshape(-1, *[1] * (final.ndim - 1)), exp.steps[name][last], final)
    lengths = exp.lengths - which
    steps = {name: column[rows] for name, column in exp.steps.items()}
    segments = exp.segments.replace(
        has_final_obs=exp.segments.has_final_obs | which,
        truncated=exp.segments.truncated & ~which,
        lookback=np.minimum(exp.segments.lookback, lengths),
    )
    some = lengths > 0
    return Experience(steps, offsets_of(lengths[some]), segments[some], {n: f[some] for n, f in final_obs.items()})
