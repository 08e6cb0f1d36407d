# SPDX-License-Identifier: Apache-2.0
"""What the way to the learner begins with: parts, of a recording, or of experience in memory."""

from collections.abc import Sequence
from typing import Any, Protocol

from etude.experience import Experience
from etude.recordings.pieces import pieces

PIECE_ROWS = 65_536
"""Experience in memory is prepared in pieces of so many rows at most, or of one segment."""


class Parted(Protocol):
    """What a pipeline begins with: a recording, or what was read of one."""

    is_in_memory: bool

    @property
    def columns(self) -> list[str]:
        """The step columns."""

    @property
    def num_parts(self) -> int:
        """The parts."""

    def part(self, k: int, columns: Sequence[str] | None = None) -> Experience:
        """Part ``k``: whole segments; see `Recording.part`."""

    def counts(self, k: int) -> Any:
        """What was found bad in part ``k``, to be told where it is counted."""

    def count(self, k: int, counts: Any) -> None:
        """Take in what was found bad in part ``k``, perhaps in another process; nothing is counted twice."""


class InMemory:
    """Experience in memory, as parts of bounded size."""

    is_in_memory = True

    def __init__(self, exp: Experience, max_rows: int = PIECE_ROWS) -> None:
        self.columns = list(exp.steps)
        self._pieces = list(pieces(exp, max_rows))

    @property
    def num_parts(self) -> int:
        """The pieces."""
        return len(self._pieces)

    def part(self, k: int, columns: Sequence[str] | None = None) -> Experience:
        """Piece ``k``, with all that was read."""
        return self._pieces[k]

    def counts(self, k: int) -> None:
        """Nothing: it was counted when it was read."""

    def count(self, k: int, counts: None) -> None:
        """Nothing to do."""
