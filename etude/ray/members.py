# SPDX-License-Identifier: Apache-2.0
"""A runner of a cluster as the process that learns sees it: what it was asked for, and how it does."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from etude.experience import Experience
from etude.ray.pulse import Pulse
from etude.ray.runner_actor import Report


@dataclass(slots=True)
class Ask:
    """What a runner was asked for, and where the answer will be."""

    number: int
    steps: int
    """0: no fragment, but to be ready."""
    key: Any
    """Of what kind the fragment is to be."""
    report: Any
    """A reference."""
    parts: Any = None
    """A reference; None where it is no fragment."""


@dataclass(slots=True)
class Member:
    """One runner."""

    number: int
    life: int
    actor: Any
    asks: deque[Ask] = field(default_factory=deque)
    has_begun: bool = False
    is_late: bool = False
    """Nobody waits for what it was asked for."""
    sent: tuple[int, int, int] = (-1, -1, 0)
    """The versions of weights, of news, and of what is kept with a recording, that it was sent last."""
    pace: float | None = None
    """Seconds that it takes for a step that it is asked for, in the mean of late."""
    since: float = 0.0
    """When it could begin with what is the first of ``asks`` now."""
    pulse: Pulse = field(default_factory=Pulse)
    unwritten: int = 0
    """Steps that it has given and that are to be recorded, but are not in a finished file yet."""
    node: str = ""
    pid: int = 0


class Fragment(NamedTuple):
    """What a runner has made."""

    number: int
    """Of the asking: later ones are higher."""
    runner: int
    life: int
    key: Any
    report: Report
    parts: dict[str | None, Experience]
