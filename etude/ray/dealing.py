# SPDX-License-Identifier: Apache-2.0
"""Who makes which part of a collection that the learner waits for, and whom it does not wait for."""

import math
from collections.abc import Iterator, Sequence
from statistics import median
from time import monotonic
from typing import Final

from etude.ray.members import Member

DEPTH: Final = 2
"""Fragments that a runner is asked for at once, so that it need not wait for the next order."""
LATE: Final = 3.0
"""How many times as long as others a runner may take."""
PARTS: Final = 4
"""Fragments, at most, that a runner's share of a collection is cut into: quicker ones take over some of others."""
WORTH: Final = 0.005
"""Seconds of a collection for each fragment in it, at least: to ask for one and to take it in takes the process that
learns about 1 ms."""
_SLACK = 0.1  # seconds that are never late, where they come unforeseen
_FORESEEN = 0.02  # likewise, where a runner has always been slow


def size_for(members: Sequence[Member], whole: int, num_runners: int) -> int:
    """The steps of a fragment, where no one has set them."""
    share = whole / num_runners
    paces = [member.pace for member in members if member.pace]
    parts = min(PARTS, max(1, round(median(paces) * share / (num_runners * WORTH)))) if paces else PARTS
    return math.ceil(share / parts)


def deal(members: Sequence[Member], whole: int, left: int, size: int) -> Iterator[tuple[Member, int]]:
    """Say what to ask of whom, so that together with what is on its way, ``left`` steps come.

    Ask before the next is said. Runners that can't be expected to make a fragment while this collection lasts are asked
    for one, too, on which nobody counts.

    Args:
        members: All runners.
        whole: The steps of the whole collection.
        left: Those of it that have not come.
        size: The steps of a fragment.
    """
    ready = [member for member in members if member.has_begun]
    slow = _slow(ready, whole, size)
    for member in slow:
        if not member.asks:
            member.is_late = True
            yield member, size
    able = [member for member in ready if member not in slow and not member.is_late]
    for depth in range(DEPTH):
        for member in able:
            owed = left - sum(ask.steps for other in members if not other.is_late for ask in other.asks)
            if owed <= 0:
                return
            if len(member.asks) <= depth:
                yield member, min(size, owed)


def _slow(members: Sequence[Member], whole: int, size: int) -> list[Member]:
    """Those that take several times as long for a fragment as all together for the collection."""
    paces = [member.pace for member in members if member.pace]
    if len(paces) < 2:
        return []
    lasts = whole / sum(1 / pace for pace in paces)
    return [member for member in members if member.pace and member.pace * size > LATE * lasts + _FORESEEN]


def find_late(members: Sequence[Member]) -> None:
    """Where a runner has nothing to do, wait no more for those that take several times as long as they all do."""
    paces = [member.pace for member in members if member.pace]
    if not paces or all(member.asks for member in members if member.has_begun):
        return
    usual, now = median(paces), monotonic()
    for member in members:
        if member.asks and member.asks[0].steps and not member.is_late:
            member.is_late = now - member.since > LATE * usual * member.asks[0].steps + _SLACK
