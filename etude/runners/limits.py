# SPDX-License-Identifier: Apache-2.0
"""Limits of a collection: a number of steps, a number of episodes, or whole episodes with a number of steps."""

from abc import ABC, abstractmethod
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.envs import Turn
from etude.errors import SettingsError
from etude.experience import Experience
from etude.runners.episodes import EpisodeTracker

Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

CountBy: TypeAlias = Literal["env_steps", "agent_steps"]

MOST_TRIES: Final = 10
"""The number of episodes in a row that an env may fail in, before one of its requested episodes is given up."""


class Limit(ABC):
    """Decides when a collection is complete, and which results or episodes it returns. One is made per collection."""

    by_episode = True
    """Whether only finished episodes are returned; otherwise, all steps with known results."""
    is_open = True
    """Whether the collection is incomplete."""
    _chosen: Ints = np.zeros(0, np.int64)  # the episodes to return, by `_keys`

    @abstractmethod
    def count(self, turn: Turn, envs: Ints, numbers: Ints) -> None:
        """Count a turn, which ends the episodes ``numbers`` of ``envs``, at most one per env."""

    @abstractmethod
    def cut(self, envs: Ints, numbers: Ints) -> None:
        """Count episodes that were cut because their env failed."""

    def follows(self, env: int) -> bool:
        """Whether the episode that an env now begins may be returned."""
        return True

    def late(self, slots: Ints) -> Bools:
        """``[n]``: which of the newest results, given by slot, exceed the limit. Call it for one turn after the other,
        beginning with the last."""
        return np.zeros(len(slots), bool)

    def choose(self, envs: Ints, numbers: Ints) -> None:
        """Mark these episodes to be returned."""
        self._chosen = np.append(self._chosen, _keys(envs, numbers))

    def delivers(self, envs: Ints, numbers: Ints) -> Bools:
        """``[n]``: which of these episodes are returned, whether they have ended or not."""
        return np.isin(_keys(envs, numbers), self._chosen)


def _keys(envs: Ints, numbers: Ints) -> Ints:
    return envs * (1 << 32) + numbers


class StepLimit(Limit):
    """A number of env steps, or of agent steps. With one agent per env, these are the same.

    Args:
        tracker: Counts the steps of envs.
        by: Which steps to count if several agents share an env.
        wanted: The number of steps.
        late: The number of results that the last collection left over, which count for this one.
    """

    by_episode = False

    def __init__(self, tracker: EpisodeTracker, by: CountBy, wanted: int, late: int = 0) -> None:
        self._tracker, self.wanted = tracker, wanted
        self._by_clock = by == "env_steps" and tracker.named
        self.steps = int(tracker.advance.sum()) if self._by_clock else late
        self._before = self.steps - tracker.moves
        self.is_open = self.steps < wanted
        self._surplus: int | None = None  # late steps that `late` has not found yet; None until it is called
        self.late_envs: Bools = np.zeros(len(tracker.number), bool)
        """``[num_envs]``: the envs with late results, as far as `late` was asked for them."""

    def count(self, turn: Turn, envs: Ints, numbers: Ints) -> None:
        if self._by_clock:
            self.steps = self._before + self._tracker.moves
        else:
            self.steps += len(turn.slots) - (0 if turn.first is None else int(np.count_nonzero(turn.first)))
        self.is_open = self.steps < self.wanted

    def late(self, slots: Ints) -> Bools:
        envs = self._tracker.env_of[slots]
        if self._surplus is None:
            self._surplus = surplus = self.steps - self.wanted
            advance = self._tracker.advance
            for env in np.flatnonzero(advance)[::-1] if self._by_clock else ():
                if advance[env] <= surplus:
                    self.late_envs[env] = True
                    surplus -= int(advance[env])
            advance[~self.late_envs] = 0
        if self._by_clock:
            return self.late_envs[envs]
        late = np.arange(len(slots)) >= len(slots) - self._surplus
        self._surplus -= int(np.count_nonzero(late))
        self.late_envs[envs[late]] = True
        return late

    def cut(self, envs: Ints, numbers: Ints) -> None:
        """Do nothing: the steps of cut episodes are counted already."""


class EpisodeLimit(Limit):
    """A number of episodes, assigned to the envs in advance, as evenly as possible.

    Taking the first episodes to finish would favour short ones. An episode that was cut because its env failed is not
    returned, and is played again, at most `MOST_TRIES` times in a row; then fewer episodes are returned.
    """

    def __init__(self, num_episodes: int, num_envs: int) -> None:
        self._tries = np.zeros(num_envs, np.int64)  # episodes in a row that were cut
        self._owed = num_episodes // num_envs + (np.arange(num_envs) < num_episodes % num_envs)

    def follows(self, env: int) -> bool:
        return bool(self._owed[env] > 0)

    def count(self, turn: Turn, envs: Ints, numbers: Ints) -> None:
        if len(envs):
            self._tries[envs] = 0
            wanted = self._owed[envs] > 0
            self.choose(envs[wanted], numbers[wanted])
            self._owe_less(envs)

    def cut(self, envs: Ints, numbers: Ints) -> None:
        self._tries[envs] += 1
        given_up = envs[self._tries[envs] >= MOST_TRIES]
        self._owe_less(given_up)
        self._tries[given_up] = 0

    def _owe_less(self, envs: Ints) -> None:
        self._owed[envs] -= 1
        self.is_open = bool((self._owed > 0).any())


class WholeEpisodeLimit(Limit):
    """Episodes as they end, until they have ``wanted`` steps together. Running ones stay for the next collection."""

    def __init__(self, tracker: EpisodeTracker, by: CountBy, wanted: int) -> None:
        self._tracker = tracker
        self._by_clock = by == "env_steps" and tracker.named
        self._missing = wanted

    def count(self, turn: Turn, envs: Ints, numbers: Ints) -> None:
        if len(envs):
            self._add(envs, numbers)

    def cut(self, envs: Ints, numbers: Ints) -> None:
        """See `Limit.cut`: the steps of cut episodes are returned."""
        self._add(envs, numbers)

    def _add(self, envs: Ints, numbers: Ints) -> None:
        self.choose(envs, numbers)
        self._missing -= self._tracker.steps_of(envs, by_clock=self._by_clock)
        self.is_open = self._missing > 0


class Lengths:
    """Cuts segments that are too long, and drops those that are too short.

    Args:
        least: Segments with fewer steps are dropped and counted.
        most: Segments with more steps are cut; None: they never are.

    Raises:
        SettingsError: ``least`` is below 1, or ``most`` below ``least``.
    """

    def __init__(self, least: int = 1, most: int | None = None) -> None:
        if least < 1 or (most is not None and most < least):
            raise SettingsError(
                f"segments of {least} to {most} steps: the minimum must be at least 1, and not above the maximum."
            )
        self._least = least
        self._most = most
        self._dropped = 0

    def keep(self, exp: Experience, context: int = 0) -> Experience:
        """Cut long segments of ``exp`` and drop short ones. Pieces after a cut get ``context`` rows of lookback."""
        if self._most is not None and exp.num_segments and int(exp.lengths.max()) > self._most:
            exp = exp.cut(self._most, lookback=context)
        if self._least > 1 and exp.num_segments:
            own = exp.lengths - exp.segments.lookback
            enough = own >= self._least
            self._dropped += int(own[~enough].sum())
            exp = exp if enough.all() else exp.select(enough)
        return exp

    def stats(self) -> dict[str, float]:
        """``dropped_steps`` since the last call; {} if segments are never dropped."""
        if self._least == 1:
            return {}
        dropped, self._dropped = self._dropped, 0
        return {"dropped_steps": dropped}
