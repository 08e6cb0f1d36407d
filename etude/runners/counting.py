# SPDX-License-Identifier: Apache-2.0
"""Counter: how many steps were made, by the env's clock or by the agents'."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.envs import Arena, Turn

CountBy: TypeAlias = Literal["env_steps", "agent_steps"]


class Counter:
    """Counts the steps of a collection, and says which of the last are too many.

    Where an agent is alone in its env, both ways of counting are one.
    """

    def __init__(self, arena: Arena, by: CountBy) -> None:
        self._env_of = arena.env_of
        self._named = any(agent is not None for agent in arena.agents)
        self.by_clock = by == "env_steps" and self._named
        """Steps are the envs', not the agents'."""
        self._clock = np.zeros(arena.num_envs, np.int64)
        self._advance = np.zeros(arena.num_envs, np.int64)
        self.steps = 0
        """Counted in this collection."""
        self._made = 0  # by envs with named agents

    def env_steps(self, agent_steps: int, wanted: int | None) -> int:
        """The steps of envs in a collection that gave ``agent_steps``, and of which ``wanted`` steps were wanted."""
        made, self._made = self._made, 0
        if not self._named:
            return agent_steps
        return made if wanted is None or not self.by_clock else wanted

    def clear(self) -> None:
        """All envs begin new episodes."""
        self.steps = 0
        self._clock[:] = 0

    def count(self, turns: Sequence[Turn]) -> None:
        """Count what turns bring that come together."""
        if self._named:
            self._read_clocks(turns)
        if self.by_clock:
            self.steps += int(self._advance.sum())
            return
        for turn in turns:
            first = turn.first
            self.steps += len(turn.slots) - (0 if first is None else int(np.count_nonzero(first)))

    def _read_clocks(self, turns: Sequence[Turn]) -> None:
        self._advance[:] = 0
        for turn in turns:
            if turn.env_t is not None:
                envs = self._env_of[turn.slots]
                new = envs[turn.env_t == 0]
                if len(new):
                    self._clock[new] = 0
                before = self._clock.copy()
                # rows of one env show it at one moment: whichever is written last
                self._clock[envs] = np.maximum(before[envs], turn.env_t)
                self._advance += self._clock - before
        self._made += int(self._advance.sum())

    def late(self, slots: Sequence[NDArray[np.int64]], wanted: int) -> list[NDArray[np.bool_]]:
        """Of the results counted last, those that make more than ``wanted`` steps.

        Args:
            slots: The slots that they came to, in groups.
            wanted: The steps wanted.
        """
        surplus = self.steps - wanted
        if self.by_clock:
            envs = np.zeros(len(self._advance), bool)
            for env in np.flatnonzero(self._advance)[::-1]:
                if self._advance[env] <= surplus:
                    envs[env] = True
                    surplus -= int(self._advance[env])
            self._advance[~envs] = 0
            return [envs[self._env_of[group]] for group in slots]
        count = sum(map(len, slots))
        late = np.arange(count) >= count - surplus
        return np.split(late, np.cumsum([len(group) for group in slots])[:-1])

    def carry(self, count: int) -> None:
        """Begin another collection, for which the late results count, ``count`` of them."""
        self.steps = int(self._advance.sum()) if self.by_clock else count

    def cut(self, envs: NDArray[np.int64]) -> None:
        """The episodes of ``envs`` were cut: their clocks begin anew."""
        self._clock[envs] = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain data and arrays; goes into `load_state_dict`."""
        return {
            "clock": self._clock.copy(),
            "advance": self._advance.copy(),
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._clock[:], self._advance[:] = state["clock"], state["advance"]
        self.steps = state["steps"]
