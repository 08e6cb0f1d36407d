# SPDX-License-Identifier: Apache-2.0
"""The units of a recording, numbered through: of one format, or of several recordings that are read as one."""

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
    """One of the recordings that are read as one."""

    format: Format
    contents: Contents

    @property
    def name(self) -> str:
        """Where it is, in words."""
        return str(self.contents.files[0]) if self.contents.files else f"a {self.format.name} in memory"


class Units:
    """The units of all ``members``, one behind the other. Can be pickled, and may be used from several threads.

    Episode ids are unique within one recording: of several, the number of the recording stands in front (``0-``,
    ``1-``).

    Args:
        members: The recordings, at least one, with the same columns.
        header: What holds for all.
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
        """Its format where that is Etude's, and it is one recording: then much is known without reading."""
        format = self.members[0].format
        return format if len(self.members) == 1 and isinstance(format, OwnFormat) else None

    def rows(self, k: int) -> int:
        """The steps of unit ``k``; reads it the first time, where nothing else tells.

        Raises:
            DataError: nothing tells, and it can't be read.
        """
        member, k_there = self._at(k)
        known = self.members[member].contents.units[k_there].rows
        if known is None and k not in self._rows:
            self.load(k, ())
        return self._rows[k] if known is None else known

    def load(
        self, k: int, columns: Sequence[str] | None = None, where: pc.Expression | None = None, *, finals: bool = True
    ) -> Experience:
        """Unit ``k``: whole segments, but for those that the disk has in pieces.

        Args:
            k: Which.
            columns: The step columns, each by its name; None is all.
            where: Only rows for which this holds. Of Etude's files, row groups that can't match are not read.
            finals: With False, what was observed after segments may be left out; that of images takes long to decode.

        Raises:
            DataError: something in it can't be read; or, of several recordings, a column has another dtype or shape
                than in another one.
        """
        exp = self._read(k, columns, where, finals, None)
        if where is None:
            self._rows[k] = exp.num_steps
        return exp

    def load_rest(self, k: int, columns: Sequence[str] | None = None) -> tuple[Experience, list[Problem]]:
        """What can be read of unit ``k``, and what is wrong with it that can't be seen in its steps, harmless or not.

        Raises:
            UnreadableError: nothing of it can be read.
        """
        problems: list[Problem] = []
        exp = self._read(k, columns, None, True, problems)
        if all(problem.harmless for problem in problems):
            self._rows[k] = exp.num_steps
        return exp, problems

    def keys(self, k: int) -> Experience:
        """What `load_rest` gives of unit ``k``, without columns."""
        return self.load_rest(k, ())[0]

    def place(self, k: int, row: int, exp: Experience | None = None) -> Place:
        """Where a row of unit ``k`` is, as its file counts; ``exp`` is the unit, if it is there already."""
        member, k_there = self._at(k)
        format, contents = self.members[member]
        exp = self.keys(k) if exp is None else exp
        if len(self.members) > 1:
            ids = exp.segments.episode_id.tolist()
            own = [episode.removeprefix(f"{member}-") for episode in ids]
            exp = Experience(exp.steps, exp.offsets, exp.segments.replace(episode_id=own), exp.final_obs)
        return format.place(contents.units[k_there], row, exp)

    def nothing(self, columns: Sequence[str]) -> Experience:
        """No rows, with these columns.

        Raises:
            DataError: no unit can be read.
        """
        if self.own is not None:
            return self.own.nothing(self.members[0].contents, columns)
        failed: DataError | None = None
        for k in range(len(self)):
            try:
                return self.load_rest(k, columns)[0][:0]
            except DataError as error:
                failed = failed or error
        raise failed or DataError(f"{self.members[0].name}: there is nothing in it.")

    def _at(self, k: int) -> tuple[int, int]:
        """The number of the recording that unit ``k`` is of, and of the unit in it."""
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
        format, contents = self.members[member]
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
        """What was read from one of several recordings, under the episode ids that it has here."""
        for name, values in exp.steps.items():
            known, own = self._described.setdefault(name, describe(values)), describe(values)
            if known != own:
                raise DataError(
                    f"{self.members[member].name}: column `{name}` is {own}, but {known} in another of the recordings "
                    "that are read as one. Read them one by one, or leave the column out with `columns=`."
                )
        ids = [f"{member}-{episode}" for episode in exp.segments.episode_id]
        return Experience(exp.steps, exp.offsets, exp.segments.replace(episode_id=ids), exp.final_obs)
