# SPDX-License-Identifier: Apache-2.0
"""RLlib's episode recordings: Parquet files with one column, ``item``, of msgpack documents, an episode each.

Written by RLlib with ``output_write_episodes=True``; episodes of one agent, and of many. RLlib may write an episode
several times: rows that repeat another byte by byte are read once and counted in ``header.meta["duplicates"]``.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError, SpaceError
from etude.experience import Experience, Segments
from etude.experience.experience import offsets_of
from etude.files import AnyPath
from etude.recordings import footers
from etude.recordings.formats import rllib_columns as words
from etude.recordings.formats.inferring import Range, described, inferred_space, widen, widened
from etude.recordings.formats.parts import Place, Problem, chosen
from etude.recordings.formats.rllib_documents import DocumentReader, Episode, Spaces, flat, info_columns, info_names
from etude.recordings.formats.rllib_files import ParquetFiles, found_files
from etude.recordings.formats.rllib_pieces import Piece, check_clock, num_steps, piece_of, step_columns
from etude.recordings.layout import Header
from etude.spaces import Space

ITEM: Final = "item"
_PART_BYTES: Final = 12 << 20
"""Documents of about this size make a part: some 50,000 steps of CartPole."""


def detect(path: AnyPath) -> bool:
    """Whether a Parquet file is of this format, by its schema."""
    try:
        return is_episodes(footers.schema_of(path))
    except DataError:
        return False


def is_episodes(schema: pa.Schema) -> bool:
    """Whether a Parquet file with this schema is of this format."""
    if schema.names != [ITEM]:
        return False
    kind = schema.field(ITEM).type
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def open_parts(paths: AnyPath | Sequence[AnyPath]) -> "RLlibEpisodes":
    """Open a recording: a folder, a file or several of them.

    Raises:
        DataError: there is none, a file is broken or of another format, or no episode can be read.
    """
    return RLlibEpisodes(found_files(paths, (".parquet",)))


class RLlibEpisodes:
    """See `etude.recordings.formats.parts.Parts`."""

    format = "rllib-episodes"

    def __init__(self, files: Sequence[AnyPath]) -> None:
        self.files = list(files)
        self._parquet = ParquetFiles(files)
        for i, path in enumerate(files):
            if not is_episodes(self._parquet.schema(i)):
                names = ", ".join(self._parquet.schema(i).names[:8])
                raise DataError(f"{path}: is no RLlib episode recording: its columns are {names}, not `{ITEM}`.")
        self._reader = DocumentReader()
        self._parts: list[list[tuple[int, int]]] = []  # the rows of each part: row group, row in it
        self._copies: list[tuple[int, int, tuple[int, int]]] = []  # row group, row, and the row that it repeats
        self._rows: dict[int, int] = {}
        self._scan()
        if not self._parts:
            raise DataError(f"{files[0]}: holds no episodes: it has 0 rows. Record some, or give another folder.")
        self._describe()

    # -- opening -----------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        """Find rows that repeat others, and cut the rest into parts."""
        seen: dict[tuple[int, int], tuple[int, int]] = {}
        size = 0
        self._parts.append([])
        for group in range(len(self._parquet.groups)):
            for row, item in enumerate(self._items(group)):
                first = seen.setdefault((len(item), hash(item)), (group, row))
                if first != (group, row):
                    self._copies.append((group, row, first))
                    continue
                if size + len(item) > _PART_BYTES and self._parts[-1]:
                    self._parts.append([])
                    size = 0
                self._parts[-1].append((group, row))
                size += len(item)
        if not self._parts[-1]:
            self._parts.pop()

    def _items(self, group: int) -> Iterator[bytes]:
        for value in self._parquet.read(group, [ITEM])[ITEM]:
            yield value.as_py() or b""

    def _describe(self) -> None:
        """Take spaces and columns from the first episode with steps that can be read."""
        error: DataError | None = None
        for place in (row for part in self._parts for row in part):
            try:
                episodes = [episode for episode in self._read(*place) if num_steps(episode)]
                if episodes:
                    self._describe_from(episodes, self._parquet.place(*place))
                    return
            except DataError as failed:
                error = error or failed
        if error is not None:
            raise error
        raise DataError(f"{self.files[0]}: holds no episode with steps. Record some, or give another folder.")

    def _describe_from(self, episodes: list[Episode], place: str) -> None:
        first, inferred = episodes[0], []
        try:
            given: dict[str, Any] = {}
            for root in (col.OBS, col.ACTION):
                spaces = [episode.space(root) for episode in episodes]
                given[root] = spaces[0]
                if any(space != spaces[0] for space in spaces):
                    raise DataError(f"its agents have different `{root}` spaces, which Etude does not read together")
                if given[root] is None:
                    given[root] = self._inferred(root)
                    inferred.append(root)
            self._spaces = Spaces(given[col.OBS], given[col.ACTION])
            infos = info_columns(first.buffers.get(col.INFO))
            columns = {**step_columns(first, self._spaces), **infos}
            leaves = self._spaces.leaves
            dtypes = {name: words.schema_dtype(name, own.dtype, leaves.get(name)) for name, own in columns.items()}
            inferred += [name for name, leaf in leaves.items() if dtypes[name] != leaf.dtype]
            given = {root: widened(space, root, dtypes) for root, space in given.items()}
            self._spaces = Spaces(given[col.OBS], given[col.ACTION])
        except (DataError, SpaceError) as error:
            raise DataError(f"{place}: {error}") from error
        self._schema = {name: (dtypes[name], column.shape[1:]) for name, column in columns.items()}
        if first.env_t is not None:
            self._schema[col.ENV_T] = (np.dtype(np.int64), ())
        self.columns = list(self._schema)
        meta: dict[str, Any] = {"format": self.format, "actions": words.ACTIONS_NOTE, "duplicates": len(self._copies)}
        dropped = sorted(info_names(first.buffers.get(col.INFO)) - set(self.columns))
        meta |= {"inferred": inferred} if inferred else {}
        meta |= {"dropped": dropped} if dropped else {}
        self.header = Header(given[col.OBS], given[col.ACTION], None, meta)

    def _inferred(self, root: str) -> Space:
        """A space from what all episodes hold, which have none."""
        columns: Columns = {}
        ranges: dict[str, Range] = {}
        for place in (row for part in self._parts for row in part):
            for episode in self._read(*place):
                if root not in episode.buffers:
                    raise DataError(f"it has no `{root}`")
                if num_steps(episode):
                    columns = flat(episode.buffers[root], root, None)
                    widen(ranges, columns)
        return inferred_space(described(columns), root, ranges)

    # -- reading -----------------------------------------------------------------------------------------------

    @property
    def num_parts(self) -> int:
        """The pieces; each holds about 12 MiB of documents, or one document."""
        return len(self._parts)

    def rows(self, k: int) -> int:
        """The steps of part ``k``; decodes it the first time."""
        if k not in self._rows:
            self._rows[k] = sum(num_steps(e) for place in self._parts[k] for e in self._read(*place))
        return self._rows[k]

    def load(self, k: int, columns: Sequence[str] | None = None) -> Experience:
        """Part ``k``: one segment for each agent's episode or chunk; see `Parts.load`."""
        exp, problems = self.load_rest(k, columns)
        bad = next((problem for problem in problems if not problem.harmless), None)
        if bad is not None:
            raise DataError(bad.message)
        return exp

    def load_rest(self, k: int, columns: Sequence[str] | None = None) -> tuple[Experience, list[Problem]]:
        """Part ``k`` without the rows that can't be read, and these; and what is odd, but does no harm."""
        names = chosen(self.columns, columns, str(self.files[0]))
        pieces: list[Piece] = []
        problems = []
        for place in self._parts[k]:
            try:
                episodes = self._read(*place)
                found = [self._piece(episode, names, place) for episode in episodes]
            except DataError as error:
                problems.append(self._unreadable(error, place))
                continue
            pieces += [piece for piece in found if piece is not None]
            for episode, piece in zip(episodes, found, strict=True):
                problems += self._notes(episode, piece, place)
        exp = self._joined(pieces, names)
        if all(problem.harmless for problem in problems):
            self._rows[k] = exp.num_steps
        return exp, problems

    def place(self, k: int, row: int) -> Place:
        """Where a row of part ``k`` is: in which document, of which agent, and which step."""
        for place in self._parts[k]:
            try:
                episodes = self._read(*place)
            except DataError:
                continue  # its rows are not counted
            for episode in episodes:
                num = num_steps(episode)
                if row < num:
                    words = f"{self._parquet.place(*place)}, {_who(episode)}, step {row}"
                    return Place(words, str(self._file(place)), self._parquet.file_row(*place))
                row -= num
        return Place(str(self.files[0]), str(self.files[0]))

    def _read(self, group: int, row: int) -> list[Episode]:
        try:
            return self._reader.read(self._parquet.read(group, [ITEM])[ITEM][row].as_py() or b"")
        except DataError as error:
            raise DataError(f"{self._parquet.place(group, row)}, column `{ITEM}`: {error}. {_REMEDY}") from error

    def _piece(self, episode: Episode, names: list[str], place: tuple[int, int]) -> Piece | None:
        """An episode's columns; None where it has no steps."""
        try:
            if not num_steps(episode):
                check_clock(episode, 0)
                return None
            return piece_of(episode, names, self._spaces, self._schema)
        except DataError as error:
            where = f"{self._parquet.place(*place)}, column `{ITEM}`, episode {episode.id!r}"
            raise DataError(f"{where}: {error}. {_REMEDY}") from error

    def _joined(self, pieces: list[Piece], names: list[str]) -> Experience:
        def column(name: str, parts: list[NDArray[Any]]) -> NDArray[Any]:
            dtype, shape = self._schema[name]
            return np.concatenate(parts) if parts else np.zeros((0, *shape), dtype)

        episodes = [piece.episode for piece in pieces]
        segments = Segments.of(
            len(pieces),
            episode_id=[episode.id for episode in episodes],
            agent_id=[_text(episode.plain.get("agent_id")) for episode in episodes],
            module_id=[_text(episode.plain.get("module_id")) for episode in episodes],
            t_start=np.array([piece.t_start for piece in pieces], np.int64),
            terminated=np.array([piece.ends[0] for piece in pieces], bool),
            truncated=np.array([piece.ends[1] for piece in pieces], bool),
        )
        return Experience(
            {name: column(name, [piece.steps[name] for piece in pieces]) for name in names},
            offsets_of(np.array([piece.num for piece in pieces], np.int64)),
            segments,
            {n: column(n, [p.final[n] for p in pieces]) for n in names if col.is_under(n, col.OBS)},
        )

    # -- problems ----------------------------------------------------------------------------------------------

    def problems(self) -> Iterator[Problem]:
        """Rows that repeat others."""
        for group, row, first in self._copies:
            what = f"repeats the episode in {self._parquet.place(*first)}, byte by byte; it is read once"
            yield self._note("duplicate", f"{what}. Nothing needs to be done", (group, row))

    def _notes(self, episode: Episode, piece: Piece | None, place: tuple[int, int]) -> Iterator[Problem]:
        """What is odd about an agent's episode, but does no harm."""
        who = _who(episode)
        for kind, what in episode.notes:
            yield self._note(kind, what, place)
        if piece is None:
            yield self._note("no_steps", f"{who} has no steps; it is left out", place)
            return
        last = piece.t_start + piece.num
        if episode.plain.get("t", last) != last:
            said = str(episode.plain["t"])[:20]
            what = f"{who} says that it ends at t {said}, but its steps go from {piece.t_start} to {last}"
            yield self._note("other_t", what, place)
        if not any(piece.ends):
            what = f"{who} is neither terminated nor truncated: it was cut off, and its last value must be estimated"
            yield self._note("not_done", what, place)
        if episode.plain.get("hanging"):
            yield self._note("hanging", f"{who} acted at the end and observed nothing more; that is left out", place)

    def _unreadable(self, error: DataError, place: tuple[int, int]) -> Problem:
        return Problem("unreadable", str(error), str(self._file(place)), self._parquet.file_row(*place), ITEM, 1, True)

    def _note(self, kind: str, what: str, place: tuple[int, int]) -> Problem:
        row, text = self._parquet.file_row(*place), f"{self._parquet.place(*place)}: {what}."
        return Problem(kind, text, str(self._file(place)), row, ITEM, 1, True, None, harmless=True)

    def _file(self, place: tuple[int, int]) -> AnyPath:
        return self.files[self._parquet.groups[place[0]][0]]


_REMEDY: Final = "Leave this row out, or write the recording again"


def _who(episode: Episode) -> str:
    agent = _text(episode.plain.get("agent_id"))
    return f"episode {episode.id!r}" + (f", agent {agent!r}" if agent is not None else "")


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
