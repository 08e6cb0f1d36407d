# SPDX-License-Identifier: Apache-2.0
"""Experience in pieces of bounded size, cut between segments wherever that can be."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from etude.experience import Experience, Segments
from etude.experience.arrays import firsts


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
    return Experience(steps, exp.offsets.copy(), Segments.concat([exp.segments]), final_obs)


def gathered(parts: Iterable[Experience], expected_rows: int) -> Experience | None:
    """All ``parts``, about ``expected_rows`` rows together, in memory of its own; None where there are none.

    As `Experience.concat`, but each part may go as soon as it is copied, which halves the memory.
    """
    steps: dict[str, NDArray[Any]] = {}
    rows = 0
    heads = []
    for part in parts:
        if not part.num_segments:
            continue
        for name, column in part.steps.items():
            if name not in steps:
                steps[name] = np.empty((expected_rows, *column.shape[1:]), np.asarray(column).dtype)
            held = steps[name]
            if rows + part.num_steps > len(held):  # little by little, and in place where the system can do that
                held.resize((rows + max(part.num_steps, rows // 8), *held.shape[1:]), refcheck=False)
            held[rows : rows + part.num_steps] = column
        rows += part.num_steps
        heads.append(Experience({}, part.offsets, part.segments, part.final_obs))
    if not heads:
        return None
    whole = Experience.concat(heads) if len(heads) > 1 else heads[0]
    if any(rows < len(column) // 2 for column in steps.values()):
        steps = {name: column[:rows].copy() for name, column in steps.items()}
    return Experience(
        {name: column[:rows] for name, column in steps.items()}, whole.offsets, whole.segments, whole.final_obs
    )


def filtered(exp: Experience, where: pc.Expression, names: Sequence[str]) -> Experience:
    """Some columns of the rows for which an expression over columns holds; rows that are left out cut segments."""
    kept = Experience.from_table(exp.to_table().filter(where))
    final_obs = {name: column for name, column in kept.final_obs.items() if name in names}
    return Experience({name: kept.steps[name] for name in names}, kept.offsets, kept.segments, final_obs)


def row_bytes(exp: Experience) -> int:
    """How many bytes one row of ``exp`` takes in memory as a table, at least 1."""
    columns = [*exp.steps.values(), *exp.final_obs.values()]
    size: int = sum(math.prod(column.shape[1:]) * int(column.dtype.itemsize) for column in columns)
    return max(1, size)


def continues(exp: Experience, following: Experience) -> bool:
    """Whether the first segment of ``following`` is the direct continuation of the last one of ``exp``."""
    a, b = exp.segments[-1:], following.segments[:1]
    same = a.episode_id[0] == b.episode_id[0] and a.agent_id[0] == b.agent_id[0] and a.module_id[0] == b.module_id[0]
    return bool(same and not a.done[0] and a.t_start[0] + exp.lengths[-1] == b.t_start[0])


def in_order(exp: Experience, *, by_episode: bool = False) -> Experience:
    """The same segments, those of one agent in one episode next to each other in order of time.

    Agents of episodes stand in the order in which they come first; with ``by_episode``, so do episodes. Nothing is
    copied where that is so already.
    """
    segments = exp.segments
    keys = [segments.t_start, firsts(segments.tracks())]
    order = np.lexsort([*keys, firsts(segments.episode_id.codes)] if by_episode else keys)
    return exp if (order[1:] > order[:-1]).all() else exp.select(order)
