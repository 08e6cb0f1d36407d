# SPDX-License-Identifier: Apache-2.0
"""Experience in pieces of bounded size, cut between segments wherever that can be."""

import math
from collections.abc import Iterator

import numpy as np

from etude.experience import Experience


def first_piece(exp: Experience, room: int) -> tuple[Experience, Experience]:
    """As many leading segments as have at most ``room`` rows together, and the rest; views."""
    count = max(0, int(np.searchsorted(exp.offsets, room, side="right")) - 1)
    return exp[:count], exp[count:]


def pieces(exp: Experience, limit: int) -> Iterator[Experience]:
    """All of ``exp`` in pieces of at most ``limit`` rows; only a segment longer than that is cut. Views."""
    while exp.num_segments:
        if exp.num_steps <= limit:
            yield exp
            return
        head, rest = first_piece(exp, limit)
        if not head.num_segments:
            head, rest = exp.split(limit)
        yield head
        exp = rest


def copied(exp: Experience) -> Experience:
    """The same in memory of its own, which may be written to."""
    steps = {name: np.array(column) for name, column in exp.steps.items()}
    final_obs = {name: np.array(column) for name, column in exp.final_obs.items()}
    return Experience(steps, exp.offsets, exp.segments[:], final_obs)


def row_bytes(exp: Experience) -> int:
    """How many bytes one row of ``exp`` takes in memory as a table, at least 1."""
    columns = [*exp.steps.values(), *exp.final_obs.values()]
    return max(1, sum(math.prod(column.shape[1:]) * int(column.dtype.itemsize) for column in columns))


def continues(exp: Experience, following: Experience) -> bool:
    """Whether the first segment of ``following`` is the direct continuation of the last one of ``exp``."""
    a, b = exp.segments[-1:], following.segments[:1]
    same = a.episode_id[0] == b.episode_id[0] and a.agent_id[0] == b.agent_id[0] and a.module_id[0] == b.module_id[0]
    return bool(same and not a.done[0] and a.t_start[0] + exp.lengths[-1] == b.t_start[0])


def in_order(exp: Experience) -> Experience:
    """The same segments, those of one agent in one episode next to each other in order of time.

    Agents of episodes stand in the order in which they come first. Nothing is copied where that is so already.
    """
    segments = exp.segments
    keys = list(zip(segments.episode_id.tolist(), segments.agent_id.tolist(), strict=True))
    if len(set(keys)) == len(keys):
        return exp
    place: dict[tuple[str, str | None], int] = {}
    group = np.fromiter((place.setdefault(key, len(place)) for key in keys), np.int64, len(keys))
    order = np.lexsort((segments.t_start, group))
    return exp if (order[1:] > order[:-1]).all() else exp.select(order)
