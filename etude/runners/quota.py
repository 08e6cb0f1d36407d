# SPDX-License-Identifier: Apache-2.0
"""Which episodes a collection of whole episodes gives out, and when it has enough."""

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from etude.envs import Arena, Turn
from etude.runners.counting import CountBy

Ints = NDArray[np.int64]

MOST_TRIES: Final = 10
"""So many episodes of an env in a row may be cut, before one that is owed is given up."""


class Quota(Protocol):
    """Counts episodes as they end."""

    @property
    def is_owed(self) -> bool:
        """Whether more is to be collected."""

    def owes(self, env: int) -> bool:
        """Whether the episode that an env begins may be given out."""

    def count(self, turn: Turn, envs: Ints, numbers: Ints) -> None:
        """Take note of a turn, with which episodes ended: ``numbers`` of ``envs``, at most one in each env."""

    def cut(self, envs: Ints, numbers: Ints) -> None:
        """Take note of episodes that were cut because their env failed."""

    def delivered(self, envs: Ints, numbers: Ints) -> NDArray[np.bool_]:
        """Which of these episodes have ended and are to be given out."""


class _Ended:
    """Episodes that ended, by env and number."""

    def __init__(self) -> None:
        self._keys: list[Ints] = []

    def add(self, envs: Ints, numbers: Ints) -> None:
        self._keys.append(envs * (1 << 32) + numbers)

    def has(self, envs: Ints, numbers: Ints) -> NDArray[np.bool_]:
        return np.isin(envs * (1 << 32) + numbers, np.concatenate([np.zeros(0, np.int64), *self._keys]))


class Dealt:
    """A number of episodes, dealt out to the envs beforehand, as evenly as can be.

    Taking the first to finish would favour short ones. An episode that was cut because the env failed is not given out,
    and another one is played in its place; but not without end, so that fewer may be given out.
    """

    def __init__(self, num_episodes: int, num_envs: int) -> None:
        self._tries = np.zeros(num_envs, np.int64)  # in a row that were cut
        self._owed = num_episodes // num_envs + (np.arange(num_envs) < num_episodes % num_envs)
        self._ended = _Ended()

    @property
    def is_owed(self) -> bool:
        """See `Quota.is_owed`."""
        return bool((self._owed > 0).any())

    def owes(self, env: int) -> bool:
        """See `Quota.owes`."""
        return bool(self._owed[env] > 0)

    def count(self, turn: Turn, envs: Ints, numbers: Ints) -> None:
        """See `Quota.count`."""
        if len(envs):
            self._tries[envs] = 0
            wanted = self._owed[envs] > 0
            self._ended.add(envs[wanted], numbers[wanted])
            self._owed[envs] -= 1

    def cut(self, envs: Ints, numbers: Ints) -> None:
        """See `Quota.cut`."""
        self._tries[envs] += 1
        given_up = envs[self._tries[envs] >= MOST_TRIES]
        self._owed[given_up] -= 1
        self._tries[given_up] = 0

    def delivered(self, envs: Ints, numbers: Ints) -> NDArray[np.bool_]:
        """See `Quota.delivered`."""
        return self._ended.has(envs, numbers)


class Whole:
    """Episodes as they end, until they have a number of steps; the running ones are kept for the next collection."""

    def __init__(self, arena: Arena, by: CountBy) -> None:
        self._env_of = arena.env_of
        self._by_clock = by == "env_steps" and any(agent is not None for agent in arena.agents)
        self.running = np.zeros(arena.num_envs, np.int64)
        """``[num_envs]``: the steps of each running episode."""
        self._wanted = self._steps = 0
        self._ended = _Ended()

    def start(self, wanted: int) -> None:
        """Collect ``wanted`` steps at least."""
        self._wanted, self._steps, self._ended = wanted, 0, _Ended()

    @property
    def is_owed(self) -> bool:
        """See `Quota.is_owed`."""
        return self._steps < self._wanted

    def owes(self, env: int) -> bool:
        """See `Quota.owes`."""
        return True

    def count(self, turn: Turn, envs: Ints, numbers: Ints) -> None:
        """See `Quota.count`."""
        of = self._env_of[turn.slots]
        if self._by_clock and turn.env_t is not None:
            np.maximum.at(self.running, of, turn.env_t)
        else:
            np.add.at(self.running, of if turn.first is None else of[~turn.first], 1)
        if len(envs):
            self.cut(envs, numbers)

    def cut(self, envs: Ints, numbers: Ints) -> None:
        """See `Quota.cut`: what they have made is given out."""
        self._ended.add(envs, numbers)
        self._steps += int(self.running[envs].sum())
        self.running[envs] = 0

    def delivered(self, envs: Ints, numbers: Ints) -> NDArray[np.bool_]:
        """See `Quota.delivered`."""
        return self._ended.has(envs, numbers)
