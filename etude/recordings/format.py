# SPDX-License-Identifier: Apache-2.0
"""What a format of recordings is: how one is described, and read unit by unit."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.files import AnyPath
from etude.recordings.layout import Header
from etude.settings import nearest

MAX_ROWS: Final = 65_536
"""The steps that a unit should not exceed, unless one episode, file or row group has more."""


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
    """Nothing of a unit can be read."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """A piece of a recording that is read at one time and fits in memory. Small, and can be pickled."""

    index: int
    """Its number among the units of the recording, from 0."""
    rows: int | None = None
    """Its steps; None where only reading it tells."""
    file: AnyPath | None = None
    """The file that it lies in, where it is one."""
    row: int | None = None
    """The place of its first row in that file, from 0."""
    data: Any = None
    """What else its format needs to read it; what units have in common should be one object for all."""


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a recording holds."""

    header: Header
    """The spaces, the env's id where it is known, and what else holds for the whole, in ``meta``."""
    columns: Sequence[str]
    """The step columns, by our names where we have one."""
    units: Sequence[Unit]
    """The pieces, in order."""
    files: Sequence[AnyPath] = ()
    """The data files, in order."""
    problems: Sequence[Problem] = ()
    """What is wrong with the whole, and can't be seen in the steps."""


class Format(abc.ABC):
    """How a recording of one format is read, and where it is.

    It can be pickled, and it does not change: `read` gives the same for the same unit, in any order and in any process.
    Values, and the order of steps, are looked at for all formats alike: `etude.recordings.screening`.
    """

    name: str
    """Such as ``rllib-episodes``."""

    @abc.abstractmethod
    def describe(self) -> Contents:
        """What is there, found without reading more than must be.

        Raises:
            DataError: there is nothing, or it can't be used; the message names the file and what to do.
        """

    @abc.abstractmethod
    def read(self, unit: Unit, columns: Sequence[str], problems: list[Problem] | None = None) -> Experience:
        """A unit as whole segments. Where an episode goes on in another unit, that segment has the same
        ``episode_id``, and a later ``t_start``.

        Args:
            unit: One of those that `describe` gave.
            columns: The step columns wanted, of those that `describe` named; none, where segments alone are wanted.
            problems: Where given, rows that can't be read are left out and told there, and so is what is odd but
                harmless.

        Raises:
            DataError: nothing of it can be read; or, without ``problems``, something can't. The message names the
                file, row and column.
        """

    def place(self, unit: Unit, row: int, exp: Experience) -> Place:
        """Where row ``row`` of ``exp`` is, which is what `read` gave for ``unit``, perhaps with other columns."""
        i = int(np.searchsorted(exp.offsets, row, side="right")) - 1
        agent = exp.segments.agent_id[i]
        who = f"episode {exp.segments.episode_id[i]!r}" + (f", agent {agent!r}" if agent is not None else "")
        step = int(exp.segments.t_start[i]) + row - int(exp.offsets[i])
        file = str(unit.file or self.name)
        return Place(f"{file}, {who}, step {step}", file)


class FileFormat(Format):
    """A format of files that are told from others by what is in them.

    Args:
        files: Those of one recording, in order.
    """

    def __init__(self, files: Sequence[AnyPath]) -> None:
        self.files = list(files)

    @staticmethod
    @abc.abstractmethod
    def detect(path: AnyPath) -> bool:
        """Whether a file is of this format."""


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


def grouped(lengths: NDArray[np.int64], limit: int = MAX_ROWS) -> NDArray[np.int64]:
    """Bounds of groups of consecutive segments of at most ``limit`` rows; a longer segment is alone in its group."""
    stops = np.cumsum(lengths)
    bounds = [0]
    while bounds[-1] < len(lengths):
        before = int(stops[bounds[-1] - 1]) if bounds[-1] else 0
        bounds.append(max(int(np.searchsorted(stops, before + limit, side="right")), bounds[-1] + 1))
    return np.array(bounds, np.int64)


def cut_long(
    offsets: NDArray[np.int64], limit: int = MAX_ROWS
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Pieces of at most ``limit`` rows: the segment that each is of, its first row, and the row after its last."""
    count = -(-np.diff(offsets) // limit)
    parent = np.repeat(np.arange(len(count)), count)
    nth = np.arange(len(parent)) - np.repeat(np.cumsum(count) - count, count)
    start = offsets[:-1][parent] + nth * limit
    return parent, start, np.minimum(start + limit, offsets[1:][parent])
