# SPDX-License-Identifier: Apache-2.0
"""What some parts can do beyond `etude.recordings.formats.parts.Parts`, and what stands in for it where they can't."""

from collections.abc import Iterable, Sequence

import numpy as np

from etude.experience import Experience
from etude.recordings.formats.parts import Parts, Place, Problem


def load_rest(parts: Parts, k: int, columns: Sequence[str] | None) -> tuple[Experience, list[Problem]]:
    """What can be read of a part, and what is wrong with it that can't be seen in its steps, harmless or not.

    Formats that can read a part in pieces, or that have something to say of it, have such a method.

    Raises:
        DataError: nothing of it can be read; an `UnreadableError` where the format knows more.
    """
    rest = getattr(parts, "load_rest", None)
    if rest is None:
        return parts.load(k, columns), []
    found: tuple[Experience, list[Problem]] = rest(k, columns)
    return found


def keys_of(parts: Parts, k: int) -> Experience:
    """The segments of a part without columns, but as they are with them.

    Raises:
        DataError: nothing of it can be read.
    """
    keys = getattr(parts, "keys", None)
    found: Experience = load_rest(parts, k, ())[0] if keys is None else keys(k)
    return found


def problems_of(parts: Parts) -> Iterable[Problem]:
    """What is wrong with the whole; see `Parts.problems`."""
    problems = getattr(parts, "problems", None)
    found: Iterable[Problem] = () if problems is None else problems()
    return found


def place_of(parts: Parts, k: int, row: int, exp: Experience | None = None) -> Place:
    """Where a row of a part is: as its file counts, where the format tells it; ``exp`` is the part, loaded."""
    place = getattr(parts, "place", None)
    if place is not None:
        found: Place = place(k, row)
        return found
    file = str(parts.files[0]) if len(parts.files) == 1 else f"part {k} of {parts.num_parts}"
    if exp is None:
        return Place(f"{file}, row {row}" if parts.num_parts == 1 else f"{file}, part {k}, row {row}", file)
    i = int(np.searchsorted(exp.offsets, row, side="right")) - 1
    agent = exp.segments.agent_id[i]
    who = f"episode {exp.segments.episode_id[i]!r}" + (f", agent {agent!r}" if agent is not None else "")
    return Place(f"{file}, {who}, step {int(exp.segments.t_start[i]) + row - int(exp.offsets[i])}", file)
