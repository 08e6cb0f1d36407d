# SPDX-License-Identifier: Apache-2.0
"""Pulse: how long a runner at work has made no turn, which tells that its envs hang."""

from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError


@dataclass(slots=True)
class Pulse:
    """What was last heard of a runner's turns. Its actor answers ``turns()`` while it works."""

    turns: int | None = None
    """None: it has not answered yet. Below 0: it has nothing to do that could hang."""
    moved: float = 0.0
    """When it was last seen to make turns."""
    _ping: Any = None
    _asked: float = 0.0

    def ask(self, actor: Any, now: float) -> None:
        """Ask how many turns it has made, unless it was asked and has not answered. Does not wait."""
        if self._ping is None:
            self._ping, self._asked = actor.turns.remote(), now

    def still_for(self, actor: Any, since: float, now: float) -> float:
        """Seconds without a turn that are known of, of the work that it could begin at ``since``; asks it again.

        One that does not answer, as an env holds Python's lock, has made none. An answer is as old as its question:
        where nobody asked for long, it tells nothing of the time since.
        """
        known = now
        if self._ping is not None and ray.wait([self._ping], timeout=0)[0]:
            try:
                turns = ray.get(self._ping)
            except RayError:
                return 0.0  # its end is seen where its answer is waited for
            self._ping, known = None, self._asked
            if turns != self.turns or turns < 0:
                self.turns, self.moved = turns, now
        self.ask(actor, now)
        return known - max(self.moved, since)


def hung(limit: float) -> str:
    """What is said of one that was still for longer."""
    return f"no env made a step, or was made, for {limit:g} s (`ray.step_timeout`)."
