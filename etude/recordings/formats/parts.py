# SPDX-License-Identifier: Apache-2.0
"""What every reader of another tool's recordings offers: pieces that are loaded one at a time."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.files import AnyPath
from etude.recordings.layout import Header
from etude.settings import nearest

MAX_ROWS: Final = 65_536
"""The steps that a part should not exceed, unless one episode, file or row group has more."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One fault of a recording."""

    kind: str
    """A word for it, such as ``nan``, ``duplicate``, ``not_done`` or ``unreadable``."""
    message: str
    """What is wrong, where, and what to do."""
    file: str
    """The file, or the folder where it is about the whole."""
    row: int | None = None
    """The row in the file, or the line of a text file, as users count it in the message; from 0 here."""
    column: str | None = None
    """The column, as the file names it."""
    count: int = 1
    """How many rows are concerned."""
    repairable: bool = False
    """Whether the rest of the recording can be used with the files or rows concerned left out."""
    row_group: int | None = None
    """The row group in a Parquet file, from 0, where it is known."""
    harmless: bool = False
    """It is only a warning: the recording can be read and trained on as it is."""

    def __str__(self) -> str:
        return self.message


class UnreadableError(DataError):
    """Nothing of a part can be read."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem,)


class Place(NamedTuple):
    """Where a step is."""

    words: str
    """For messages."""
    file: str
    """The file, or the folder where it is not known."""
    row: int | None = None
    """The row in the file, from 0, as in `Problem`."""
    row_group: int | None = None


class Parts(Protocol):
    """A recording, opened: its parts become Experience one at a time.

    Parts may have more methods; `etude.recordings.tolerance` says which, and what stands in for them.
    """

    @property
    def format(self) -> str:
        """The name of the format, such as ``rllib-episodes``."""

    @property
    def header(self) -> Header:
        """The spaces, the env's id where it is known, and what else holds for the whole, in ``meta``."""

    @property
    def files(self) -> list[AnyPath]:
        """The data files, in order."""

    @property
    def columns(self) -> list[str]:
        """The step columns, by our names where we have one."""

    @property
    def num_parts(self) -> int:
        """The pieces; each fits in memory."""

    def rows(self, k: int) -> int:
        """The steps of part ``k``; may have to decode it the first time."""

    def load(self, k: int, columns: Sequence[str] | None = None) -> Experience:
        """Part ``k``: whole segments; ``columns`` are names or roots, None is all.

        Raises:
            DataError: something in it can't be read; the message names the file, row and column.
        """

    def problems(self) -> Iterator[Problem]:
        """What is wrong that can't be seen in the steps, as far as it is known without reading them.

        Values, and the order of steps, are looked at for all formats alike: `etude.recordings.screening`.
        """


def chosen(columns: Sequence[str], wanted: Sequence[str] | None, where: str, derived: Sequence[str] = ()) -> list[str]:
    """The step columns among ``columns`` that ``wanted`` names, by name or root; None is all.

    ``derived`` are no columns of steps; they could be meant by a wrong name, or asked for in the wrong place.

    Raises:
        DataError: a name stands for no column.
    """
    if wanted is None:
        return list(columns)
    for root in wanted:
        if not col.under(columns, root):
            near = nearest(root, [*columns, *derived])
            hint = f" Nearest: `{near}`." if near else ""
            if root in derived:
                hint = f" `Recording.batches` gives `{root}`; of an Experience, see `next_obs()` and `segments`."
            raise DataError(f"{where}: there is no column `{root}`; there are {', '.join(columns)}.{hint}")
    return [name for name in columns if any(col.is_under(name, root) for root in wanted)]
