# SPDX-License-Identifier: Apache-2.0
"""RLlib's episode recordings: Parquet files with one column, ``item``, of msgpack documents, an episode each.

Written by RLlib with ``output_write_episodes=True``; episodes of one agent, and of many. RLlib may write an episode
several times: rows that repeat another byte by byte are read once and counted in ``header.meta["duplicates"]``.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

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
from etude.recordings.format import Contents, FileFormat, Place, Problem, Unit
from etude.recordings.formats import rllib_columns as words
from etude.recordings.formats.inferring import Range, described, inferred_space, widen, widened
from etude.recordings.formats.rllib_documents import DocumentReader, Episode, Spaces, flat, info_columns, info_names
from etude.recordings.formats.rllib_files import ParquetFiles
from etude.recordings.formats.rllib_pieces import Piece, Schema, check_clock, num_steps, piece_of, step_columns
from etude.recordings.layout import Header
from etude.spaces import Space

ITEM: Final = "item"
UNIT_BYTES: Final = 12 << 20
"""Documents of about this size make a unit: some 50,000 steps of CartPole."""
_MOST_BYTES: Final = 64 << 20
"""A row group of so many bytes is not cut: whoever reads a part of it has to decode all of it."""

At = tuple[int, int]
"""A document: its row group, and its row in that."""


def is_episodes(schema: pa.Schema) -> bool:
    """Whether a Parquet file with this schema is of this format."""
    if schema.names != [ITEM]:
        return False
    kind = schema.field(ITEM).type
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


class _Plan(NamedTuple):
    """What holds for all units."""

    parquet: ParquetFiles
    reader: DocumentReader
    spaces: Spaces
    schema: Schema


class _Unit(NamedTuple):
    documents: Sequence[At]
    plan: _Plan


class RLlibEpisodes(FileFormat):
    """A recording of RLlib's episodes."""

    name = "rllib-episodes"

    @staticmethod
    def detect(path: AnyPath) -> bool:
        """Whether a Parquet file is of this format, by its schema."""
        try:
            return path.suffix == ".parquet" and is_episodes(footers.schema_of(path))
        except DataError:
            return False

    def describe(self) -> Contents:
        """What is there. The bytes of all documents are looked at once, for those that repeat others.

        Raises:
            DataError: a file is broken or of another format, or no episode can be read.
        """
        parquet = ParquetFiles(self.files)
        for i, path in enumerate(self.files):
            if not is_episodes(parquet.schema(i)):
                names = ", ".join(parquet.schema(i).names[:8])
                raise DataError(f"{path}: is no RLlib episode recording: its columns are {names}, not `{ITEM}`.")
        copies: list[Problem] = []
        documents = list(_units_of(parquet, copies))
        if not documents:
            raise DataError(f"{self.files[0]}: holds no episodes: it has 0 rows. Record some, or give another folder.")
        plan, header = _described(parquet, documents, len(copies))
        units = [Unit(k, None, data=_Unit(own, plan)) for k, own in enumerate(documents)]
        return Contents(header, list(plan.schema), units, self.files, copies)

    # -- reading -----------------------------------------------------------------------------------------------

    def read(self, unit: Unit, columns: Sequence[str], problems: list[Problem] | None = None) -> Experience:
        """One segment for each agent's episode or chunk."""
        documents, plan = unit.data
        pieces: list[Piece] = []
        for at in documents:
            try:
                episodes = _read(plan.parquet, plan.reader, at)
                found = [_piece(plan, episode, columns, at) for episode in episodes]
            except DataError as error:
                if problems is None:
                    raise
                file, row = plan.parquet.file_of(at[0]), plan.parquet.file_row(*at)
                problems.append(Problem("unreadable", str(error), str(file), row, ITEM, 1, True))
                continue
            pieces += [piece for piece in found if piece is not None]
            if problems is not None:
                for episode, piece in zip(episodes, found, strict=True):
                    problems += _notes(plan.parquet, episode, piece, at)
        return _joined(pieces, columns, plan.schema)

    def place(self, unit: Unit, row: int, exp: Experience) -> Place:
        """Where a row is: in which document, of which agent, and which step."""
        documents, plan = unit.data
        for at in documents:
            try:
                episodes = _read(plan.parquet, plan.reader, at)
            except DataError:
                continue  # its rows are not counted
            for episode in episodes:
                num = num_steps(episode)
                if row < num:
                    words = f"{plan.parquet.place(*at)}, {_who(episode)}, step {row}"
                    return Place(words, str(plan.parquet.file_of(at[0])), plan.parquet.file_row(*at))
                row -= num
        return Place(str(self.files[0]), str(self.files[0]))


# -- describing ------------------------------------------------------------------------------------------------


def _units_of(parquet: ParquetFiles, copies: list[Problem]) -> Iterator[list[At]]:
    """The documents in units, without those that repeat others, which are told in ``copies``."""
    seen: dict[tuple[int, int], At] = {}
    unit: list[At] = []
    size = 0
    for group in range(len(parquet.groups)):
        items = parquet.read(group, [ITEM])[ITEM]
        is_whole = items.nbytes <= _MOST_BYTES
        if unit and size + items.nbytes > UNIT_BYTES:
            yield unit
            unit, size = [], 0
        for row, value in enumerate(items):
            item = value.as_py() or b""
            first = seen.setdefault((len(item), hash(item)), (group, row))
            if first != (group, row):
                what = f"repeats the episode in {parquet.place(*first)}, byte by byte; it is read once"
                copies.append(_note(parquet, "duplicate", f"{what}. Nothing needs to be done", (group, row)))
                continue
            if unit and not is_whole and size + len(item) > UNIT_BYTES:
                yield unit
                unit, size = [], 0
            unit.append((group, row))
            size += len(item)
    if unit:
        yield unit


def _described(parquet: ParquetFiles, units: Sequence[Sequence[At]], num_copies: int) -> tuple[_Plan, Header]:
    """Spaces and columns from the first episode with steps that can be read."""
    error: DataError | None = None
    reader = DocumentReader()
    for at in (at for unit in units for at in unit):
        try:
            episodes = [episode for episode in _read(parquet, reader, at) if num_steps(episode)]
        except DataError as failed:
            error = error or failed
            continue
        if not episodes:
            continue
        try:
            return _described_from(parquet, units, reader, episodes, num_copies)
        except (DataError, SpaceError) as failed:
            raise DataError(f"{parquet.place(*at)}: {failed}") from failed
    raise error or DataError(f"{parquet.paths[0]}: holds no episode with steps. Record some, or give another folder.")


def _described_from(
    parquet: ParquetFiles,
    units: Sequence[Sequence[At]],
    reader: DocumentReader,
    episodes: list[Episode],
    num_copies: int,
) -> tuple[_Plan, Header]:
    first, inferred, given = episodes[0], list[str](), dict[str, Any]()
    for root in (col.OBS, col.ACTION):
        found = [episode.space(root) for episode in episodes]
        given[root] = found[0]
        if any(space != found[0] for space in found):
            raise DataError(f"its agents have different `{root}` spaces, which Etude does not read together")
        if given[root] is None:
            given[root] = _inferred(parquet, units, reader, root)
            inferred.append(root)
    spaces = Spaces(given[col.OBS], given[col.ACTION])
    columns = {**step_columns(first, spaces), **info_columns(first.buffers.get(col.INFO))}
    leaves = spaces.leaves
    dtypes = {name: words.schema_dtype(name, own.dtype, leaves.get(name)) for name, own in columns.items()}
    inferred += [name for name, leaf in leaves.items() if dtypes[name] != leaf.dtype]
    given = {root: widened(space, root, dtypes) for root, space in given.items()}
    spaces = Spaces(given[col.OBS], given[col.ACTION])
    schema = {name: (dtypes[name], column.shape[1:]) for name, column in columns.items()}
    if first.env_t is not None:
        schema[col.ENV_T] = (np.dtype(np.int64), ())
    meta: dict[str, Any] = {"format": RLlibEpisodes.name, "actions": words.ACTIONS_NOTE, "duplicates": num_copies}
    dropped = sorted(info_names(first.buffers.get(col.INFO)) - set(schema))
    meta |= {"inferred": inferred} if inferred else {}
    meta |= {"dropped": dropped} if dropped else {}
    return _Plan(parquet, reader, spaces, schema), Header(given[col.OBS], given[col.ACTION], None, meta)


def _inferred(parquet: ParquetFiles, units: Sequence[Sequence[At]], reader: DocumentReader, root: str) -> Space:
    """A space from what all episodes hold, which have none."""
    columns: Columns = {}
    ranges: dict[str, Range] = {}
    for at in (at for unit in units for at in unit):
        for episode in _read(parquet, reader, at):
            if root not in episode.buffers:
                raise DataError(f"it has no `{root}`")
            if num_steps(episode):
                columns = flat(episode.buffers[root], root, None)
                widen(ranges, columns)
    return inferred_space(described(columns), root, ranges)


# -- reading ---------------------------------------------------------------------------------------------------


def _read(parquet: ParquetFiles, reader: DocumentReader, at: At) -> list[Episode]:
    group, row = at
    try:
        return reader.read(parquet.read(group, [ITEM])[ITEM][row].as_py() or b"")
    except DataError as error:
        raise DataError(f"{parquet.place(group, row)}, column `{ITEM}`: {error}. {_REMEDY}") from error


def _piece(plan: _Plan, episode: Episode, names: Sequence[str], at: At) -> Piece | None:
    """An episode's columns; None where it has no steps."""
    try:
        if not num_steps(episode):
            check_clock(episode, 0)
            return None
        return piece_of(episode, names, plan.spaces, plan.schema)
    except DataError as error:
        where = f"{plan.parquet.place(*at)}, column `{ITEM}`, episode {episode.id!r}"
        raise DataError(f"{where}: {error}. {_REMEDY}") from error


def _joined(pieces: list[Piece], names: Sequence[str], schema: Schema) -> Experience:
    def column(name: str, parts: list[NDArray[Any]]) -> NDArray[Any]:
        dtype, shape = schema[name]
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


# -- problems --------------------------------------------------------------------------------------------------


def _notes(parquet: ParquetFiles, episode: Episode, piece: Piece | None, at: At) -> Iterator[Problem]:
    """What is odd about an agent's episode, but does no harm."""
    who = _who(episode)
    for kind, what in episode.notes:
        yield _note(parquet, kind, what, at)
    if piece is None:
        yield _note(parquet, "no_steps", f"{who} has no steps; it is left out", at)
        return
    last = piece.t_start + piece.num
    if episode.plain.get("t", last) != last:
        said = str(episode.plain["t"])[:20]
        what = f"{who} says that it ends at t {said}, but its steps go from {piece.t_start} to {last}"
        yield _note(parquet, "other_t", what, at)
    if not any(piece.ends):
        what = f"{who} is neither terminated nor truncated: it was cut off, and its last value must be estimated"
        yield _note(parquet, "not_done", what, at)
    if episode.plain.get("hanging"):
        yield _note(parquet, "hanging", f"{who} acted at the end and observed nothing more; that is left out", at)


def _note(parquet: ParquetFiles, kind: str, what: str, at: At) -> Problem:
    row, text = parquet.file_row(*at), f"{parquet.place(*at)}: {what}."
    return Problem(kind, text, str(parquet.file_of(at[0])), row, ITEM, 1, True, None, harmless=True)


_REMEDY: Final = "Leave this row out, or write the recording again"


def _who(episode: Episode) -> str:
    agent = _text(episode.plain.get("agent_id"))
    return f"episode {episode.id!r}" + (f", agent {agent!r}" if agent is not None else "")


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
