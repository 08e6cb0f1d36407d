# SPDX-License-Identifier: Apache-2.0
"""The interface of recording formats: describing a recording, and reading it unit by unit."""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.files import AnyPath
from etude.recordings.layout import Header
from etude.settings import suggestion

MAX_ROWS: Final = 65_536
"""The maximum number of steps in a unit, unless one episode, file or row group has more."""
MAX_BYTES: Final = 64 * 2**20
"""The approximate size limit of a unit in memory, in bytes, with the same exceptions."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem with a recording."""

    kind: str
    """The kind of problem, such as ``nan``, ``duplicate``, ``not_done`` or ``unreadable``."""
    message: str
    """What is wrong, where, and what to do."""
    file: str
    """The file, or the folder if it concerns the whole recording."""
    row: int | None = None
    """The row in the file, or the line of a text file, from 0. The message may count differently."""
    column: str | None = None
    """The column, by its name in the file."""
    count: int = 1
    """The number of rows affected."""
    repairable: bool = False
    """Whether the rest of the recording can be used if the affected files or rows are left out."""
    row_group: int | None = None
    """The row group in a Parquet file, from 0, if known."""
    harmless: bool = False
    """Whether it is only a warning: the recording can be read and trained on as it is."""

    def __str__(self) -> str:
        return self.message


MAPPING: Final = "mapping"
"""The kind of warnings that a table's columns may mean something else. They are logged when the table is opened."""


class UnreadableError(DataError):
    """Raised if nothing of a unit can be read."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem,)


class Place(NamedTuple):
    """The location of a step."""

    words: str
    """Text for messages."""
    file: str
    """The file, or the folder if the file is not known."""
    row: int | None = None
    """The row in the file, from 0, as in `Problem`."""
    row_group: int | None = None


def follow(obs: NDArray[Any], after: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each row's next observation equals the observation of the row after it; NaN equals NaN.

    Args:
        obs: ``[rows, ...]``: the observations.
        after: ``[rows, ...]``: the next observations.

    Returns:
        bool ``[rows - 1]``.
    """
    a, b = (values.reshape(len(values), math.prod(values.shape[1:])) for values in (after[:-1], obs[1:]))
    found: NDArray[np.bool_] = (a == b).all(axis=1)
    others = np.flatnonzero(~found)
    found[others] = ((a[others] == b[others]) | ((a[others] != a[others]) & (b[others] != b[others]))).all(axis=1)
    return found


def not_chained(
    place: Callable[[int], Place], name: str, obs: NDArray[Any], after: NDArray[Any], offsets: NDArray[np.int64]
) -> Iterator[Problem]:
    """Yield a warning if next observations differ from the observations of the steps that follow.

    Only the next observation of a segment's last step is used; all others are those of the following rows.

    Args:
        place: Locates a row.
        name: The column of the observations.
        obs: ``[rows, ...]``: the observations.
        after: ``[rows, ...]``: the next observations.
        offsets: ``[segments + 1]``: the bounds of the segments.
    """
    other = ~follow(obs, after)
    other[offsets[1:-1] - 1] = False
    rows = np.flatnonzero(other)
    if not len(rows):
        return
    where, count, next_name = place(int(rows[0])), len(rows), col.moved(name, col.OBS, col.NEXT_OBS)
    text = (
        f"{where.words}: `{next_name}` is not the `{name}` of the step that follows (steps like it: {count:,}). The "
        "latter is used. If the rows are not in order of time, map `t`. If an episode ends there, map the flag that "
        "says so; files of arrays have it as `timeouts`. Otherwise leave out `next_obs`."
    )
    yield Problem("not_chained", text, where.file, where.row, next_name, count, True, harmless=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """A piece of a recording that is read at once and fits in memory. Small, and can be pickled."""

    index: int
    """Its index among the units of the recording, from 0."""
    rows: int | None = None
    """The number of steps; None if it is unknown before reading."""
    file: AnyPath | None = None
    """The file that contains it, if it is a single one."""
    row: int | None = None
    """The index of its first row in that file, from 0."""
    data: Any = None
    """Other data that its format needs to read it; data that units share should be one object for all."""


@dataclasses.dataclass(frozen=True)
class Contents:
    """The contents of a recording, as `Format.describe` returns them."""

    header: Header
    """The spaces, the env's id if known, and other metadata of the whole recording in ``meta``."""
    columns: Sequence[str]
    """The names of the step columns, by Etude's names where it has one."""
    units: Sequence[Unit]
    """The pieces, in order."""
    files: Sequence[AnyPath] = ()
    """The data files, in order."""
    problems: Sequence[Problem] = ()
    """Problems with the whole recording that do not show in the steps."""


class Format(abc.ABC):
    """A recording in one format: where it is, and how to read it.

    It can be pickled and does not change: `read` returns the same for the same unit, in any order and any process.
    Values and the order of steps are checked for all formats alike, by `etude.recordings.screening`.
    """

    name: str
    """The name of the format, such as ``rllib-episodes``."""

    @abc.abstractmethod
    def describe(self) -> Contents:
        """Return the contents, reading no more than necessary.

        Raises:
            DataError: nothing is there, or it can't be used; the message names the file and what to do.
        """

    @abc.abstractmethod
    def read(self, unit: Unit, columns: Sequence[str], problems: list[Problem] | None = None) -> Experience:
        """Read a unit as whole segments.

        If an episode continues in another unit, its segment there has the same ``episode_id`` and a later ``t_start``.

        Args:
            unit: One of those that `describe` returned.
            columns: The step columns to read, among those that `describe` named; empty for the segments only.
            problems: If given, unreadable rows are left out and added to it, and so are harmless oddities.

        Raises:
            DataError: nothing of it can be read; or, without ``problems``, something can't. The message names the
                file, row and column.
        """

    def place(self, unit: Unit, row: int, exp: Experience) -> Place:
        """Locate row ``row`` of ``exp``, which `read` returned for ``unit``, perhaps with other columns."""
        i = int(np.searchsorted(exp.offsets, row, side="right")) - 1
        agent = exp.segments.agent_id[i]
        who = f"episode {exp.segments.episode_id[i]!r}" + (f", agent {agent!r}" if agent is not None else "")
        step = int(exp.segments.t_start[i]) + row - int(exp.offsets[i])
        file = str(unit.file or self.name)
        return Place(f"{file}, {who}, step {step}", file)


class FileFormat(Format):
    """A format of files that is detected from their contents.

    Args:
        files: The files of one recording, in order.
    """

    suffixes: tuple[str, ...]
    """What the names of its files end with; other files are not asked for in `detect`."""

    def __init__(self, files: Sequence[AnyPath]) -> None:
        self.files = list(files)

    @staticmethod
    @abc.abstractmethod
    def detect(path: AnyPath) -> bool:
        """Return whether a file with one of the `suffixes` has this format."""


def choose_columns(
    columns: Sequence[str], wanted: Sequence[str] | None, where: str, derived: Sequence[str] = ()
) -> list[str]:
    """Return the step columns among ``columns`` that ``wanted`` names, by name or root; None is all.

    ``derived`` are names that are not step columns, but that the message may suggest or explain.

    Raises:
        DataError: a name matches no column.
    """
    if wanted is None:
        return list(columns)
    wanted = [wanted] if isinstance(wanted, str) else wanted
    for root in wanted:
        if not col.under(columns, root):
            hint = suggestion(root, [*columns, *derived])
            if f"extra/{root}" in columns:
                hint = f' The table has `{root}`, but it is not mapped: columns={{"{root}": "{root}"}}.'
            if root in derived:
                hint = f" `Recording.batches` gives `{root}`; of an Experience, see `next_obs()` and `segments`."
            raise DataError(f"{where}: there is no column `{root}`; there are {', '.join(columns)}.{hint}")
    return [name for name in columns if any(col.is_under(name, root) for root in wanted)]


def most_rows(row_bytes: float) -> int:
    """Return the maximum number of rows of this size (in bytes) in a unit, at least 1."""
    return max(1, min(MAX_ROWS, int(MAX_BYTES // max(1, row_bytes))))


def grouped(lengths: NDArray[np.int64], limit: int = MAX_ROWS) -> NDArray[np.int64]:
    """Bounds of groups of consecutive segments of at most ``limit`` rows; a longer segment is its own group."""
    stops = np.cumsum(lengths)
    bounds = [0]
    while bounds[-1] < len(lengths):
        before = int(stops[bounds[-1] - 1]) if bounds[-1] else 0
        bounds.append(max(int(np.searchsorted(stops, before + limit, side="right")), bounds[-1] + 1))
    return np.array(bounds, np.int64)


def cut_long(
    offsets: NDArray[np.int64], limit: int = MAX_ROWS
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut segments into pieces of at most ``limit`` rows.

    Returns:
        The segment, the first row, and the row after the last of each piece, ``[pieces]`` each.
    """
    count = -(-np.diff(offsets) // limit)
    parent = np.repeat(np.arange(len(count)), count)
    nth = np.arange(len(parent)) - np.repeat(np.cumsum(count) - count, count)
    start = offsets[:-1][parent] + nth * limit
    return parent, start, np.minimum(start + limit, offsets[1:][parent])


def lost_rows(path: AnyPath, said: Mapping[str, Any], found: Mapping[str, int]) -> list[Problem]:
    """Problems for counts in a dataset's metadata, in the file ``path``, that differ from the counts ``found``."""
    return [
        Problem(
            "lost_rows",
            f"{path}: {name} is {said[name]:,}, but {count:,} are there. Was it copied in part? Restore it.",
            str(path),
            repairable=True,
        )
        for name, count in found.items()
        if isinstance(said.get(name), int) and said[name] != count
    ]
