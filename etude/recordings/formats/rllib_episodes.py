# SPDX-License-Identifier: Apache-2.0
"""RLlib's episode recordings: Parquet files with one column ``item`` of msgpack documents, one per episode.

RLlib writes them with ``output_write_episodes=True``; a document is a ``SingleAgentEpisode`` or a
``MultiAgentEpisode``. RLlib may write an episode several times: rows that are byte-for-byte copies are read once and
counted in ``header.meta["duplicates"]``.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
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
from etude.recordings.action_units import ACTIONS, BY_RLLIB
from etude.recordings.format import Contents, FileFormat, Place, Problem, Unit
from etude.recordings.formats import rllib_columns as words
from etude.recordings.formats.inferring import Range, described, inferred_space, widen, widened
from etude.recordings.formats.msgpack_numpy import (
    LISTS,
    MAPS,
    MsgpackReader,
    Path,
    Template,
    decoded,
    unpack,
    well_formed,
)
from etude.recordings.formats.parquet_files import ParquetFiles
from etude.recordings.formats.rllib_columns import Schema, space_of
from etude.recordings.layout import Header
from etude.spaces import Space, leaf_shape, leaves

# -- one document ----------------------------------------------------------------------------------------------------


_OWN_BUFFERS: Final = {"observations": col.OBS, "actions": col.ACTION, "rewards": col.REWARD, "infos": col.INFO}
_SPACES: Final = {"_observation_space": col.OBS, "_action_space": col.ACTION}
_EXTRAS: Final = "extra_model_outputs"
_SHARED: Final = ("env_t", "env_t_started", "env_t_to_agent_t", "_agent_to_module_mapping")
_PLAIN: Final = (
    "id_", "agent_id", "module_id", "multi_agent_episode_id", "is_terminated", "is_truncated", "t_started", "t",
)  # fmt: skip


@dataclasses.dataclass
class Buffer:
    """One list of an episode, such as its observations, before flattening."""

    columns: Mapping[Path, NDArray[Any]] | None = None
    """The entries as columns by path, if their layout is the same."""
    raw: bytes | memoryview = b"\xc0"
    """The undecoded bytes, at first those of None: a list of values, or one value whose arrays are whole columns."""
    finalized: bool = False
    """Whether the arrays of the data are whole columns, even if the data is a list."""
    lookback: int = 0
    """The number of entries before ``t_started``."""

    @cached_property
    def data(self) -> Any:
        """The decoded data."""
        with well_formed():
            return decoded(self.raw)


@dataclasses.dataclass
class AgentEpisode:
    """A single agent's episode or a chunk of it, as stored in the file."""

    plain: dict[str, Any]
    buffers: dict[str, Buffer]
    """Buffers by the names of Etude's root columns."""
    spaces: dict[str, bytes] = dataclasses.field(default_factory=dict)
    """The undecoded maps of the spaces, by the names of Etude's columns."""
    env_t: NDArray[np.int64] | None = None
    """``[observations]``: the env's step at each observation, if several agents act."""
    notes: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """Harmless oddities of the document: their kind as in `Problem.kind`, and a description."""

    @property
    def id(self) -> str:
        """The id of the episode, which all its agents share."""
        return str(self.plain.get("multi_agent_episode_id") or self.plain.get("id_"))

    def flag(self, name: str) -> bool:
        """Return ``is_terminated`` or ``is_truncated``."""
        value = self.plain.get(name, False)
        if not isinstance(value, bool | np.bool_):
            raise DataError(f"`{name}` is {str(value)[:40]!r}, not true or false")
        return bool(value)

    @property
    def t_started(self) -> int:
        """The index of its first step in the episode."""
        self.check_start()
        return int(self.plain.get("t_started", 0))

    def check_start(self) -> None:
        """Raise a DataError if `t_started` is not the index of a step."""
        value = self.plain.get("t_started", 0)
        if not isinstance(value, int | np.integer) or not 0 <= value < 2**62:
            raise DataError(f"`t_started` is {str(value)[:40]!r}, not a step")

    def space(self, root: str) -> Space | None:
        """Return the space of the observations (``obs``) or actions (``action``), if stored."""
        data = unpack(self.spaces[root]) if root in self.spaces else None
        return None if data is None else space_of(data)


class DocumentReader:
    """Reads documents one after another, and remembers the layout of their entries."""

    def __init__(self) -> None:
        self._templates: dict[str, Template] = {}

    def read(self, data: bytes) -> list[AgentEpisode]:
        """Return the agents' episodes in one document; there are several if several agents act.

        Raises:
            DataError: it is not such a document.
        """
        with well_formed():
            reader = MsgpackReader(data)
            if not data or not reader.next_is(MAPS):
                raise DataError("the document is not a map, as RLlib's episodes are")
            episodes = self._document(reader)
        rest = len(data) - reader.place
        if rest and episodes:
            episodes[0].notes.append(("trailing_bytes", f"{rest:,} bytes after the episode are left out"))
        return episodes

    def _document(self, reader: MsgpackReader) -> list[AgentEpisode]:
        episode = AgentEpisode({}, {})
        many: dict[str, Any] = {}
        agents: list[AgentEpisode] = []
        for key in map(str, reader.keys()):
            if key in _OWN_BUFFERS:
                episode.buffers[_OWN_BUFFERS[key]] = self._buffer(reader, _OWN_BUFFERS[key])
            elif key == _EXTRAS and reader.next_is(MAPS):
                for name in map(words.own_name, map(str, reader.keys())):
                    episode.buffers[name] = self._buffer(reader, name)
            elif key in _PLAIN:
                episode.plain[key] = reader.scalar()
            elif key in _SPACES:
                episode.spaces[_SPACES[key]] = reader.raw()
            elif key == "agent_episodes":
                agents = self._agents(reader)
            elif key in _SHARED or key.startswith("_hanging"):
                many[key] = reader.value()
            else:
                reader.skip()
        return _of_many(episode, agents, many) if "env_t_to_agent_t" in many else [episode]

    def _agents(self, reader: MsgpackReader) -> list[AgentEpisode]:
        agents = []
        for _ in range(reader.list_size()):
            if reader.list_size() != 2:
                raise DataError("`agent_episodes` does not hold pairs of an agent and its episode")
            agent = reader.scalar()
            (episode,) = self._document(reader)
            episode.plain["agent_id"] = agent
            agents.append(episode)
        return agents

    def _buffer(self, reader: MsgpackReader, name: str) -> Buffer:
        if not reader.next_is(MAPS):
            raise DataError(f"`{name}` is not a buffer with the keys data, lookback, finalized, space")
        buffer = Buffer()
        for key in reader.keys():  # noqa: SIM118 - not a dict
            if key == "data":
                start = reader.place
                if reader.next_is(LISTS):
                    buffer.columns, template = reader.entries(self._templates.get(name))
                    self._templates |= {name: template} if template else {}
                else:
                    reader.skip()
                buffer.raw = memoryview(reader.data)[start : reader.place]  # rarely decoded, so not copied
            elif key == "lookback":
                buffer.lookback = reader.scalar()
            elif key == "finalized":
                buffer.finalized = reader.scalar() is True
            else:
                reader.skip()
        if type(buffer.lookback) is not int or buffer.lookback < 0:
            raise DataError(f"`{name}` has the lookback {str(buffer.lookback)[:40]!r}")
        return buffer


def _of_many(whole: AgentEpisode, agents: list[AgentEpisode], many: dict[str, Any]) -> list[AgentEpisode]:
    """Complete the agents' episodes with what their multi-agent episode says about them.

    Raises:
        DataError: it names an agent whose steps are missing, or is not as RLlib writes it.
    """
    clocks, first = many["env_t_to_agent_t"], many.get("env_t_started", 0)
    modules = many.get("_agent_to_module_mapping") or {}
    if not isinstance(clocks, dict) or not isinstance(modules, dict) or type(first) is not int:
        raise DataError("`env_t_to_agent_t`, `_agent_to_module_mapping` or `env_t_started` is not what RLlib writes")
    hung = {
        key: set(map(str, held)) for key, held in many.items() if key.startswith("_hanging") and isinstance(held, dict)
    }
    hanging = set().union(*(names for key, names in hung.items() if "_end" in key))
    observed = {str(agent): _own_steps(buffer) for agent, buffer in clocks.items()}
    acted = [agent for agent, steps in observed.items() if steps is not None and len(steps) > 1]
    # In a chunk, the mapping also names agents that ended earlier; the steps of hanging agents are in the next chunk.
    there = {str(agent.plain["agent_id"]) for agent in agents}.union(*hung.values())
    for name in [*acted, *map(str, modules if first == 0 else ())]:
        if name not in there:
            raise DataError(f"it names agent {name[:40]!r} in its maps, but has no steps of it: they were lost")
    last = first
    for agent in agents:
        name = str(agent.plain["agent_id"])
        if (steps := observed.get(name)) is None:
            raise DataError(f"`env_t_to_agent_t` has no list for agent {name[:40]!r}")
        agent.env_t = first + steps
        last = max([last, *agent.env_t[-1:].tolist()])
        agent.plain["multi_agent_episode_id"] = whole.plain.get("id_")
        if agent.plain.get("module_id") is None:
            agent.plain["module_id"] = modules.get(agent.plain["agent_id"])
        agent.plain |= {"hanging": name in hanging, "is_whole": first == 0 and not hanging}
    if agents and first == 0 and not hanging and many.get("env_t", last) != last:
        said = f"the episode says that it ends at env_t {str(many['env_t'])[:20]}, but its agents' end at {last}"
        agents[0].notes.append(("other_t", said))
    return agents


def _own_steps(buffer: Any) -> NDArray[np.int64] | None:
    """The env's steps at which an agent had an observation, from the first of the episode on; None without a list."""
    if not isinstance(buffer, dict) or not isinstance(buffer.get("data"), list):
        return None
    return np.flatnonzero([entry != "S" for entry in buffer["data"][int(buffer.get("lookback") or 0) :]])


def flat(buffer: Buffer, root: str, space: Space | None) -> Columns:
    """Flatten a buffer to columns under ``root``, without the entries before ``t_started``.

    Raises:
        DataError: it does not fit its space, or does not hold numbers.
    """
    if buffer.columns is not None and not buffer.finalized:  # if finalized, it is the list of a Tuple's columns
        columns = {"/".join((root, *path)): column for path, column in buffer.columns.items()}
        has_list = any(part.isdigit() for path in buffer.columns for part in path)
        if columns.keys() == leaves(space, root).keys() if space is not None else not has_list:
            return _without(columns, buffer.lookback)
    data = buffer.data
    if data is None or isinstance(data, bool | int | float | str | bytes):
        raise DataError(f"`{root}` has no data")
    whole = buffer.finalized or not isinstance(data, list)
    values = [data] if whole else data
    return _without(words.flat_columns(values, space, root, whole=whole), buffer.lookback)


def _without(columns: Columns, lookback: int) -> Columns:
    for name, column in columns.items():
        if column.ndim == 0 or len(column) < lookback:
            raise DataError(f"`{name}` has no entry for each step")
    return {name: column[lookback:] for name, column in columns.items()} if lookback else columns


def info_columns(buffer: Buffer | None, dropped: set[str] | None = None) -> Columns:
    """The numbers among the infos after each step that are present at every step, under ``info``.

    The names of the others are added to ``dropped``.
    """
    if buffer is None:
        return {}
    if buffer.columns is not None:
        return {"/".join((col.INFO, *p)): c[buffer.lookback + 1 :] for p, c in buffer.columns.items()}
    infos = buffer.data[buffer.lookback + 1 :] if isinstance(buffer.data, list) else []
    return _infos_of(infos, col.INFO, set() if dropped is None else dropped)


def _infos_of(infos: list[Any], root: str, dropped: set[str]) -> Columns:
    columns: Columns = {}
    for key in dict.fromkeys(key for info in infos if isinstance(info, dict) for key in info):
        name, values = f"{root}/{key}", [info.get(key) if isinstance(info, dict) else None for info in infos]
        if all(isinstance(value, dict) for value in values):
            columns |= _infos_of(values, name, dropped)
            continue
        try:
            columns[name] = words.stacked(values, name)
        except DataError:
            dropped.add(name)
    return columns


# -- one agent's episode as flat columns -----------------------------------------------------------------------------


class Piece(NamedTuple):
    """The flat columns of one agent's episode."""

    episode: AgentEpisode
    num: int
    columns: Columns
    """Observations have one more row than the others."""
    ends: tuple[bool, bool]
    """Terminated, truncated."""


def piece_of(episode: AgentEpisode, names: Sequence[str], header: Header, schema: Schema) -> Piece:
    """Return the columns ``names`` of an episode, in the dtypes and shapes of the recording.

    Raises:
        DataError: a column is missing, has another length than the actions, or other shapes or numbers.
    """
    num = num_steps(episode)
    check_clock(episode, num)
    found = step_columns(episode, header, {name.split(col.SEPARATOR)[0] for name in names})
    if any(col.is_under(name, col.INFO) for name in names):
        found |= info_columns(episode.buffers.get(col.INFO))
    if episode.env_t is not None:
        found[col.ENV_T] = episode.env_t[:num]
    columns: Columns = {}
    for name in names:
        dtype, shape = schema[name]
        column, wanted = found.get(name), num + col.is_under(name, col.OBS)
        if col.is_under(name, col.INFO) and (column is None or column.shape != (num, *shape)):
            column = np.full((num, *shape), np.nan, dtype)
        if column is None:
            raise DataError(f"it has no `{name}`, which other episodes have; read without that column")
        if len(column) != wanted:
            raise DataError(f"`{name}` has {len(column)} entries, but with {num} actions it needs {wanted}")
        columns[name] = words.cast(column, dtype, shape, name)
    episode.check_start()
    return Piece(episode, num, columns, (episode.flag("is_terminated"), episode.flag("is_truncated")))


def check_clock(episode: AgentEpisode, num: int) -> None:
    """Raise a DataError if the multi-agent episode lists more or fewer observations of the agent than there are."""
    if episode.plain.get("is_whole"):
        told, there = 0 if episode.env_t is None else len(episode.env_t), num + 1
        if told != there and (num or told > 1):
            raise DataError(f"`env_t_to_agent_t` lists {told} observations, but there are {there}: some were lost")


def num_steps(episode: AgentEpisode) -> int:
    """Return the number of steps of an episode, which is the number of its actions."""
    buffer = episode.buffers.get(col.ACTION)
    if buffer is None:
        raise DataError("it has no `actions`")
    if buffer.columns and not buffer.finalized:
        return max(0, len(next(iter(buffer.columns.values()))) - buffer.lookback)
    data: Any = buffer.data
    whole = buffer.finalized or not isinstance(data, list)
    while whole and isinstance(data, dict | list | tuple) and len(data):
        data = next(iter(data.values())) if isinstance(data, dict) else data[0]
    if not isinstance(data, list | np.ndarray) or (isinstance(data, np.ndarray) and data.ndim == 0):
        raise DataError("its `actions` are not a list")
    return max(0, len(data) - buffer.lookback)


def step_columns(episode: AgentEpisode, header: Header, roots: set[str] | None = None) -> Columns:
    """Return the columns of all buffers but the infos; observations have one more row than the rest."""
    for root in (col.OBS, col.ACTION, col.REWARD):
        if root not in episode.buffers:
            raise DataError(f"it has no `{root}`")
    columns: Columns = {}
    for root, buffer in episode.buffers.items():
        if root != col.INFO and (roots is None or root in roots or root.split(col.SEPARATOR)[0] in roots):
            columns |= flat(buffer, root, header.spaces.get(root))
    for name, leaf in header.leaves().items():
        if name in columns and columns[name].shape[1:] != leaf_shape(leaf):
            found = list(columns[name].shape[1:])
            raise DataError(f"`{name}` has the shape {found} at each step, but its space is {leaf}")
    return columns


# -- the recording ---------------------------------------------------------------------------------------------------


ITEM: Final = "item"
UNIT_BYTES: Final = 12 << 20
"""The approximate size of the documents in a unit: some 50,000 steps of CartPole."""
_MOST_BYTES: Final = 64 << 20
"""Row groups larger than this are cut into units, although each must then decode the whole group."""

At = tuple[int, int]
"""The location of a document: the index of its row group, and its row in it."""


def is_episodes(schema: pa.Schema) -> bool:
    """Return whether a Parquet file with this schema is of this format."""
    if schema.names != [ITEM]:
        return False
    kind = schema.field(ITEM).type
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


class RLlibEpisodes(FileFormat):
    """A recording of RLlib's episodes; `describe` finds what all of them share.

    Raises:
        DataError: a file is broken or of another format.
    """

    name = "rllib-episodes"
    suffixes = (".parquet",)
    header: Header
    schema: Schema

    @staticmethod
    def detect(path: AnyPath) -> bool:
        """Return whether a Parquet file is of this format, by its schema."""
        try:
            return is_episodes(footers.schema_of(path))
        except DataError:
            return False

    def __init__(self, files: Sequence[AnyPath]) -> None:
        super().__init__(files)
        self.parquet = ParquetFiles(files)
        self._reader = DocumentReader()
        for i, path in enumerate(files):
            if not is_episodes(self.parquet.schema(i)):
                names = ", ".join(self.parquet.schema(i).names[:8])
                raise DataError(f"{path}: is not an RLlib episode recording: its columns are {names}, not `{ITEM}`.")

    def describe(self) -> Contents:
        """Return the contents. The bytes of all documents are read once, to find copies.

        Raises:
            DataError: no episode can be read.
        """
        copies: list[Problem] = []
        documents = list(self._units(copies))
        if not documents:
            raise DataError(f"{self.files[0]}: holds no episodes: it has 0 rows. Record some, or give another folder.")
        self._describe(list(itertools.chain(*documents)), len(copies))
        units = [Unit(k, None, data=own) for k, own in enumerate(documents)]
        return Contents(self.header, list(self.schema), units, self.files, copies)

    def _units(self, copies: list[Problem]) -> Iterator[list[At]]:
        """Yield the documents in units, without copies, which are added to ``copies``."""
        seen: dict[tuple[int, int], At] = {}
        unit: list[At] = []
        size = 0
        for group in range(len(self.parquet.groups)):
            items = self.parquet.read(group, [ITEM])[ITEM]
            is_large = items.nbytes > _MOST_BYTES
            for row, value in enumerate(items):
                item = value.as_py() or b""
                first = seen.setdefault((len(item), hash(item)), (group, row))
                if first != (group, row):
                    what = f"repeats the episode in {self.parquet.place(*first).words}, byte by byte; it is read once"
                    copies.append(self.parquet.note("duplicate", f"{what}. Nothing needs to be done", group, row, ITEM))
                    continue
                may_cut = unit and (is_large or unit[-1][0] != group)
                if may_cut and size + (len(item) if is_large else items.nbytes) > UNIT_BYTES:
                    yield unit
                    unit, size = [], 0
                unit.append((group, row))
                size += len(item)
        if unit:
            yield unit

    def _describe(self, documents: Sequence[At], num_copies: int) -> None:
        """Find spaces and columns from the first readable episode with steps."""
        error: DataError | None = None
        for at in documents:
            try:
                episodes = [episode for episode in self._episodes(at) if num_steps(episode)]
            except DataError as failed:
                error = error or failed
                continue
            if not episodes:
                continue
            try:
                return self._describe_from(episodes, documents, num_copies)
            except (DataError, SpaceError) as failed:
                raise DataError(f"{self.parquet.place(*at).words}: {failed}") from failed
        where = self.files[0]
        raise error or DataError(f"{where}: holds no episode with steps. Record some, or give another folder.")

    def _describe_from(self, episodes: list[AgentEpisode], documents: Sequence[At], num_copies: int) -> None:
        first, inferred, given = episodes[0], list[str](), dict[str, Any]()
        for root in (col.OBS, col.ACTION):
            found = [episode.space(root) for episode in episodes]
            given[root] = found[0]
            if any(space != found[0] for space in found):
                raise DataError(f"its agents have different `{root}` spaces, which Etude can't read together")
            if given[root] is None:
                given[root] = self._inferred(documents, root)
                inferred.append(root)
        said = Header(given[col.OBS], given[col.ACTION])
        dropped = set[str]()
        columns = step_columns(first, said) | info_columns(first.buffers.get(col.INFO), dropped)
        known = said.leaves()
        dtypes = {name: words.schema_dtype(name, own.dtype, known.get(name)) for name, own in columns.items()}
        inferred += [name for name, leaf in known.items() if dtypes[name] != leaf.dtype]
        self.schema = {name: (dtypes[name], column.shape[1:]) for name, column in columns.items()}
        if first.env_t is not None:
            self.schema = {**self.schema, col.ENV_T: (np.dtype(np.int64), ())}
        meta: dict[str, Any] = {"format": RLlibEpisodes.name, ACTIONS: BY_RLLIB, "duplicates": num_copies}
        meta |= {"inferred": inferred} if inferred else {}
        meta |= {"dropped": sorted(dropped)} if dropped else {}
        obs, action = (widened(space, root, dtypes) for root, space in given.items())
        self.header = Header(obs, action, None, meta)

    def _inferred(self, documents: Sequence[At], root: str) -> Space:
        """Infer a space from the data of all episodes, if they store none."""
        columns: Columns = {}
        ranges: dict[str, Range] = {}
        for episode in (episode for at in documents for episode in self._episodes(at)):
            if root not in episode.buffers:
                raise DataError(f"it has no `{root}`")
            if num_steps(episode):
                columns = flat(episode.buffers[root], root, None)
                widen(ranges, columns)
        return inferred_space(described(columns), root, ranges)

    def _episodes(self, at: At) -> list[AgentEpisode]:
        """Return the agents' episodes in a document."""
        group, row = at
        try:
            return self._reader.read(self.parquet.read(group, [ITEM])[ITEM][row].as_py() or b"")
        except DataError as error:
            raise DataError(f"{self.parquet.place(*at).words}, column `{ITEM}`: {error}. {_REMEDY}") from error

    def _piece(self, episode: AgentEpisode, names: Sequence[str], at: At) -> Piece | None:
        """Return an episode's columns; None if it has no steps."""
        try:
            if not num_steps(episode):
                check_clock(episode, 0)
                return None
            return piece_of(episode, names, self.header, self.schema)
        except DataError as error:
            where = f"{self.parquet.place(*at).words}, column `{ITEM}`, episode {episode.id!r}"
            raise DataError(f"{where}: {error}. {_REMEDY}") from error

    def read(self, unit: Unit, columns: Sequence[str], problems: list[Problem] | None = None) -> Experience:
        """Read one segment for each agent's episode or chunk."""
        documents: Sequence[At] = unit.data
        pieces: list[Piece] = []
        for at in documents:
            try:
                episodes = self._episodes(at)
                found = [self._piece(episode, columns, at) for episode in episodes]
            except DataError as error:
                if problems is None:
                    raise
                _, file, row, _ = self.parquet.place(*at)
                problems.append(Problem("unreadable", str(error), file, row, ITEM, 1, True))
                continue
            pieces += [piece for piece in found if piece is not None]
            if problems is not None:
                for episode, piece in zip(episodes, found, strict=True):
                    problems += [self.parquet.note(kind, what, *at, ITEM) for kind, what in _notes(episode, piece)]
        return _joined(pieces, columns, self.schema)

    def place(self, unit: Unit, row: int, exp: Experience) -> Place:
        """Locate a row: its document, agent, and step."""
        for at in unit.data:
            try:
                episodes = self._episodes(at)
            except DataError:
                continue  # such rows are not counted
            for episode in episodes:
                num = num_steps(episode)
                if row < num:
                    place = self.parquet.place(*at)
                    return place._replace(words=f"{place.words}, {_who(episode)}, step {row}")
                row -= num
        return Place(str(self.files[0]), str(self.files[0]))


def _joined(pieces: list[Piece], names: Sequence[str], schema: Schema) -> Experience:
    def column(name: str, rows: slice) -> NDArray[Any]:
        dtype, shape = schema[name]
        return np.concatenate([piece.columns[name][rows] for piece in pieces] or [np.zeros((0, *shape), dtype)])

    episodes, obs = [piece.episode for piece in pieces], col.under(names, col.OBS)
    segments = Segments.of(
        len(pieces),
        episode_id=[episode.id for episode in episodes],
        agent_id=[_text(episode.plain.get("agent_id")) for episode in episodes],
        module_id=[_text(episode.plain.get("module_id")) for episode in episodes],
        t_start=np.array([episode.t_started for episode in episodes], np.int64),
        terminated=np.array([piece.ends[0] for piece in pieces], bool),
        truncated=np.array([piece.ends[1] for piece in pieces], bool),
    )
    return Experience(
        {name: column(name, slice(-1 if name in obs else None)) for name in names},
        offsets_of(np.array([piece.num for piece in pieces], np.int64)),
        segments,
        {name: column(name, slice(-1, None)) for name in obs},
    )


# -- problems --------------------------------------------------------------------------------------------------


def _notes(episode: AgentEpisode, piece: Piece | None) -> Iterator[tuple[str, str]]:
    """Yield the harmless oddities of an agent's episode: their kind, and a description."""
    yield from episode.notes
    who = _who(episode)
    if piece is None:
        yield "no_steps", f"{who} has no steps; it is left out"
        return
    first, last = episode.t_started, episode.t_started + piece.num
    if episode.plain.get("t", last) != last:
        said = str(episode.plain["t"])[:20]
        yield "other_t", f"{who} states that it ends at t {said}, but its steps go from {first} to {last}"
    if episode.plain.get("hanging"):
        yield "hanging", f"{who} has a last action without a next observation; the action is left out"


_REMEDY: Final = "Leave this row out, or write the recording again"


def _who(episode: AgentEpisode) -> str:
    agent = _text(episode.plain.get("agent_id"))
    return f"episode {episode.id!r}" + (f", agent {agent!r}" if agent is not None else "")


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
