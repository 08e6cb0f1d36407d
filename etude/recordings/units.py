# SPDX-License-Identifier: Apache-2.0
"""The units of one recording, or of several recordings that are read as one, under a common numbering."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc

from etude.errors import DataError
from etude.experience import Experience
from etude.experience.arrays import describe
from etude.files import AnyPath
from etude.recordings.format import Contents, Format, Place, Problem, UnreadableError
from etude.recordings.layout import Header
from etude.recordings.own import OwnFormat
from etude.recordings.pieces import filtered


class Described(NamedTuple):
    """A recording among those that are read as one."""

    format: Format
    contents: Contents
    path: AnyPath | None = None
    """Its folder or file; None if it was given as several files, or an object describes it."""

    @property
    def name(self) -> str:
        """Where it is, for messages."""
        return str(self.contents.files[0]) if self.contents.files else f"a {self.format.name} in memory"


class Units:
    """The units of all ``members``, one after another. Can be pickled and is thread-safe.

    Episode ids are unique within one recording. If there are several, each id is prefixed with the index of its
    recording (``0-``, ``1-``).

    Args:
        members: The recordings, at least one, with the same columns.
        header: The header of the whole.
    """

    def __init__(self, members: Sequence[Described], header: Header) -> None:
        self.members, self.header = tuple(members), header
        names = list(dict.fromkeys(member.format.name for member in members))
        self.format = names[0] if len(names) == 1 else "joined"
        self.files: list[AnyPath] = [file for member in members for file in member.contents.files]
        self.columns = list(members[0].contents.columns)
        self.problems: list[Problem] = [problem for member in members for problem in member.contents.problems]
        self._starts = np.cumsum([0, *(len(member.contents.units) for member in members)])
        self._rows: dict[int, int] = {}
        self._described: dict[str, str] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def own(self) -> OwnFormat | None:
        """The format if this is a single recording in Etude's format, of which much is known without reading."""
        format = self.members[0].format
        return format if len(self.members) == 1 and isinstance(format, OwnFormat) else None

    def rows(self, k: int) -> int:
        """Return the number of steps of unit ``k``; reads it the first time if that is not known otherwise.

        Raises:
            DataError: it is not known, and the unit can't be read.
        """
        member, k_there = self._at(k)
        known = self.members[member].contents.units[k_there].rows
        if known is None and k not in self._rows:
            self.load(k, ())
        return self._rows[k] if known is None else known

    def load(
        self, k: int, columns: Sequence[str] | None = None, where: pc.Expression | None = None, *, finals: bool = True
    ) -> Experience:
        """Load unit ``k``: whole segments, except those that are stored in pieces.

        Args:
            k: Index of the unit.
            columns: Full names of the step columns; None is all.
            where: Keep only rows for which this holds. Row groups of Etude's files that can't match are not read.
            finals: If False, final observations may be left out; those of images take long to decode.

        Raises:
            DataError: something in it can't be read; or a column has another dtype or shape than in another of several
                recordings.
        """
        exp = self._read(k, columns, where, finals, None)
        if where is None:
            self._rows[k] = exp.num_steps
        return exp

    def load_rest(self, k: int, columns: Sequence[str] | None = None) -> tuple[Experience, list[Problem]]:
        """Load what is readable of unit ``k``; also returns problems that do not show in its steps, harmless or not.

        Raises:
            UnreadableError: nothing of it can be read.
        """
        problems: list[Problem] = []
        exp = self._read(k, columns, None, True, problems)
        if all(problem.harmless for problem in problems):
            self._rows[k] = exp.num_steps
        return exp, problems

    def keys(self, k: int) -> Experience:
        """Like `load_rest`, but without columns and problems."""
        return self.load_rest(k, ())[0]

    def place(self, k: int, row: int, exp: Experience | None = None) -> Place:
        """Locate a row of unit ``k`` in its file; ``exp`` is the unit, if it is loaded already."""
        member, k_there = self._at(k)
        format, contents, _ = self.members[member]
        exp = self.keys(k) if exp is None else exp
        if len(self.members) > 1:
            ids = exp.segments.episode_id.tolist()
            own = [episode.removeprefix(f"{member}-") for episode in ids]
            exp = exp.with_segments(episode_id=own)
        return format.place(contents.units[k_there], row, exp)

    def nothing(self, columns: Sequence[str]) -> Experience:
        """Return an experience of zero rows with these columns.

        Raises:
            DataError: no unit can be read.
        """
        failed: DataError | None = None
        for k in range(len(self)):
            try:
                return self.load_rest(k, columns)[0][:0]
            except DataError as error:
                failed = failed or error
        raise failed or DataError(f"{self.members[0].name}: there is nothing in it.")

    def _at(self, k: int) -> tuple[int, int]:
        """The index of the recording that contains unit ``k``, and of the unit in it."""
        member = int(np.searchsorted(self._starts, k, side="right")) - 1
        return member, k - int(self._starts[member])

    def _read(
        self,
        k: int,
        columns: Sequence[str] | None,
        where: pc.Expression | None,
        finals: bool,
        problems: list[Problem] | None,
    ) -> Experience:
        member, k_there = self._at(k)
        format, contents, _ = self.members[member]
        unit, names = contents.units[k_there], self.columns if columns is None else columns
        try:
            if isinstance(format, OwnFormat):
                exp = format.read(unit, names, problems, where=where, finals=finals)
            elif where is None:
                exp = format.read(unit, names, problems)
            else:
                exp = filtered(format.read(unit, self.columns, problems), where, names)
            return exp if len(self.members) == 1 else self._adopted(member, exp)
        except UnreadableError:
            raise
        except DataError as error:
            if problems is None:
                raise
            file = str(unit.file or (contents.files[0] if contents.files else format.name))
            problem = Problem("unreadable", str(error), file, unit.row, count=unit.rows or 0, repairable=True)
            raise UnreadableError(problem) from error

    def _adopted(self, member: int, exp: Experience) -> Experience:
        """Give what was read from one of several recordings the episode ids that it has here."""
        for name, values in exp.steps.items():
            known, own = self._described.setdefault(name, describe(values)), describe(values)
            if known != own:
                raise DataError(
                    f"{self.members[member].name}: column `{name}` is {own}, but {known} in another of the recordings "
                    "that are read as one. Read them one by one, or leave the column out with `columns=`."
                )
        return exp.with_segments(episode_id=[f"{member}-{episode}" for episode in exp.segments.episode_id])
