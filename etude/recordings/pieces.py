# SPDX-License-Identifier: Apache-2.0
"""Split experience into pieces of bounded size, cut between segments wherever possible."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from etude.errors import DataError
from etude.experience import Experience, Segments
from etude.experience.arrays import Index, firsts, where_rows, zeros
from etude.urls import first_line


def first_piece(exp: Experience, room: int) -> tuple[Experience, Experience]:
    """Split off the leading segments that have at most ``room`` rows together; returns them and the rest, as views."""
    count = max(0, int(np.searchsorted(exp.offsets, room, side="right")) - 1)
    return exp[:count], exp[count:]


def pieces(exp: Experience, limit: int) -> Iterator[Experience]:
    """Yield ``exp`` in pieces of at most ``limit`` rows, as views; only segments longer than that are cut."""
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
    """Return a writable copy."""
    steps = {name: np.array(column) for name, column in exp.steps.items()}
    final_obs = {name: np.array(column) for name, column in exp.final_obs.items()}
    return Experience(steps, exp.offsets.copy(), Segments.concat([exp.segments]), final_obs)


def gathered(parts: Iterable[Experience], expected_rows: int) -> Experience | None:
    """Concatenate ``parts``, which have about ``expected_rows`` rows in total; None if there are none.

    Like `Experience.concat`, but each part can be freed as soon as it is copied, which halves the memory.
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
            if rows + part.num_steps > len(held):  # in small steps, and in place if the system can
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


def cut_where(exp: Experience, kept: NDArray[np.bool_]) -> tuple[Experience, Index, Index, Index]:
    """Cut ``exp`` where a mask of its steps changes.

    Returns:
        All pieces, each with the observation after it; and for each piece, int64 ``[pieces]``: the first row, the row
        after the last, and the index of the segment that it was cut from.
    """
    bounds = np.union1d(exp.offsets, np.flatnonzero(np.diff(kept)) + 1)
    start, stop = bounds[:-1], bounds[1:]
    parent = np.searchsorted(exp.offsets, start, side="right") - 1
    return exp.pieces(parent, start, stop), start, stop, parent


def with_known_finals(exp: Experience, known: NDArray[np.bool_]) -> Experience:
    """Return ``exp`` with the final observations of only the segments in the mask ``known``."""
    finals = {name: where_rows(~known, zeros(len(known), final), final) for name, final in exp.final_obs.items()}
    return Experience(exp.steps, exp.offsets, exp.segments.replace(has_final_obs=known), finals)


_ROW: Final = "etude/row"


def filtered(exp: Experience, where: pc.Expression, names: Sequence[str], *, looks_ahead: bool = False) -> Experience:
    """Return the columns ``names`` of the rows for which ``where`` holds; removed rows cut segments.

    Only with ``looks_ahead``, a segment that ends where a row was removed has the observation of that row.

    Raises:
        DataError: ``where`` can't be applied.
    """
    table = exp.to_table()
    try:
        chosen = table.append_column(_ROW, pa.array(np.arange(table.num_rows))).filter(where)
    except (pa.ArrowException, TypeError) as error:
        raise DataError(f"the filter {where!r} can't be applied: {first_line(error)}.") from error
    if not looks_ahead:
        return Experience.from_table(chosen.drop_columns(_ROW)).only(names)
    kept = np.zeros(table.num_rows, bool)
    kept[chosen[_ROW]] = True
    found, start, _, _ = cut_where(exp, kept)
    return found.select(kept[start]).only(names)


def row_bytes(exp: Experience) -> int:
    """The bytes that one row of ``exp`` takes in memory as a table, at least 1."""
    columns = [*exp.steps.values(), *exp.final_obs.values()]
    size: int = sum(math.prod(column.shape[1:]) * int(column.dtype.itemsize) for column in columns)
    return max(1, size)


def continues(exp: Experience, following: Experience) -> bool:
    """Whether the first segment of ``following`` directly continues the last segment of ``exp``."""
    a, b = exp.segments[-1:], following.segments[:1]
    same = a.episode_id[0] == b.episode_id[0] and a.agent_id[0] == b.agent_id[0] and a.module_id[0] == b.module_id[0]
    return bool(same and not a.done[0] and a.t_start[0] + exp.lengths[-1] == b.t_start[0])


def in_order(exp: Experience, *, by_episode: bool = False) -> Experience:
    """Sort segments so that those of one agent in one episode are adjacent and in order of time.

    Agents keep the order of their first appearance; with ``by_episode``, so do episodes. Nothing is copied if the
    segments are sorted already.
    """
    segments = exp.segments
    keys = [segments.t_start, firsts(segments.tracks())]
    order = np.lexsort([*keys, firsts(segments.episode_id.codes)] if by_episode else keys)
    return exp if (order[1:] > order[:-1]).all() else exp.select(order)
