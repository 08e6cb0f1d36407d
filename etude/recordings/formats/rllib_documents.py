# SPDX-License-Identifier: Apache-2.0
"""One RLlib episode: the msgpack document of a ``SingleAgentEpisode`` or ``MultiAgentEpisode`` as flat columns."""

import dataclasses
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.recordings.formats import rllib_columns as words
from etude.recordings.formats.msgpack_numpy import Reader, unpack
from etude.recordings.formats.msgpack_templates import Path, Template
from etude.recordings.formats.rllib_spaces import space_of
from etude.spaces import Space, leaves

_OWN_BUFFERS: Final = {"observations": col.OBS, "actions": col.ACTION, "rewards": col.REWARD, "infos": col.INFO}
_SPACES: Final = {"_observation_space": col.OBS, "_action_space": col.ACTION}
_DATA_FIRST: Final = b"\x84\xa4data"  # a map of four entries, the first of which is the data
_EXTRAS: Final = "extra_model_outputs"
_SHARED: Final = ("env_t", "env_t_started", "env_t_to_agent_t", "_agent_to_module_mapping")
_PLAIN: Final = (
    "id_", "agent_id", "module_id", "multi_agent_episode_id", "is_terminated", "is_truncated", "t_started", "t",
)  # fmt: skip


@dataclasses.dataclass
class Buffer:
    """The data of one list of an episode, not yet flat."""

    data: Any = None
    """Columns by path where ``alike``, else a list of values, or one value whose arrays are whole columns."""
    alike: bool = False
    finalized: bool = False
    lookback: int = 0


@dataclasses.dataclass
class Episode:
    """A single agent's episode or a chunk of it, as it stands in the file."""

    plain: dict[str, Any]
    buffers: dict[str, Buffer]
    """By our names of their roots."""
    spaces: dict[str, bytes] = dataclasses.field(default_factory=dict)
    """The maps of the spaces by our names of the columns, not decoded."""
    env_t: NDArray[np.int64] | None = None
    """The env's clock at each observation, where several agents act."""
    notes: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """What is odd in the document but does no harm: a word for it as in `Problem.kind`, and what it is."""

    @property
    def id(self) -> str:
        """The id of the episode; the same for all agents in it."""
        return str(self.plain.get("multi_agent_episode_id") or self.plain.get("id_"))

    def flag(self, name: str) -> bool:
        """``is_terminated`` or ``is_truncated``."""
        value = self.plain.get(name, False)
        if not isinstance(value, bool | np.bool_):
            raise DataError(f"`{name}` is {str(value)[:40]!r}, not true or false")
        return bool(value)

    @property
    def t_started(self) -> int:
        """The index of its first step in the episode."""
        value = self.plain.get("t_started", 0)
        if not isinstance(value, int | np.integer) or not 0 <= value < 2**62:
            raise DataError(f"`t_started` is {str(value)[:40]!r}, not a step")
        return int(value)

    def space(self, root: str) -> Space | None:
        """The space of the observations (``obs``) or actions (``action``), where it is there."""
        data = unpack(self.spaces[root]) if root in self.spaces else None
        return None if data is None else space_of(data)


class Spaces:
    """The spaces of a recording and their leaves, looked up by root."""

    def __init__(self, obs: Space, action: Space) -> None:
        self.by_root = {col.OBS: obs, col.ACTION: action}
        self.leaves = {**leaves(obs, col.OBS), **leaves(action, col.ACTION)}
        self.names = {root: frozenset(leaves(space, root)) for root, space in self.by_root.items()}


class DocumentReader:
    """Reads documents one after the other, and remembers what their entries look like."""

    def __init__(self) -> None:
        self._templates: dict[str, Template] = {}
        self._tails: dict[str, tuple[bytes, int, bool]] = {}  # what stood after the data, and what it says

    def read(self, data: bytes) -> list[Episode]:
        """The agents' episodes in one document; several where several agents act.

        Raises:
            DataError: it is not such a document.
        """
        reader = Reader(data)
        if not reader.next_is_map():
            raise DataError("the document is not a map, as RLlib's episodes are")
        episodes = self._document(reader)
        rest = len(data) - reader.place
        if rest and episodes:
            episodes[0].notes.append(("trailing_bytes", f"{rest:,} bytes stand behind the episode; they are left out"))
        return episodes

    def _document(self, reader: Reader) -> list[Episode]:
        episode = Episode({}, {})
        many: dict[str, Any] = {}
        agents: list[Episode] = []
        for _ in range(reader.map_size()):
            key = str(reader.key())
            if key in _OWN_BUFFERS:
                episode.buffers[_OWN_BUFFERS[key]] = self._buffer(reader, _OWN_BUFFERS[key])
            elif key == _EXTRAS and reader.next_is_map():
                for _ in range(reader.map_size()):
                    name = words.own_name(str(reader.key()))
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
        if "env_t_to_agent_t" not in many:
            return [episode]
        return _of_many(episode, agents, many)

    def _agents(self, reader: Reader) -> list[Episode]:
        agents = []
        for _ in range(reader.list_size()):
            if reader.list_size() != 2:
                raise DataError("`agent_episodes` does not hold pairs of an agent and its episode")
            agent = reader.key()
            (episode,) = self._document(reader)
            episode.plain["agent_id"] = agent
            agents.append(episode)
        return agents

    def _buffer(self, reader: Reader, name: str) -> Buffer:
        buffer = Buffer()
        if reader.passes(_DATA_FIRST):
            self._data(reader, name, buffer)
            raw, lookback, finalized = self._tails.get(name, (None, 0, False))
            if raw is not None and reader.passes(raw):
                buffer.lookback, buffer.finalized = lookback, finalized
            else:
                start = reader.place
                self._entries_of(reader, name, buffer, 3)
                raw = reader.data[start : reader.place]
                if b"\xa4data" not in raw:
                    self._tails[name] = (raw, buffer.lookback, buffer.finalized)
        elif reader.next_is_map():
            self._entries_of(reader, name, buffer, reader.map_size())
        else:
            raise DataError(f"`{name}` is no buffer with the keys data, lookback, finalized, space")
        if buffer.finalized and buffer.alike:  # a Tuple's list of whole columns, taken for a list of entries
            buffer.data, buffer.alike = _unrolled(buffer.data), False
        return buffer

    def _entries_of(self, reader: Reader, name: str, buffer: Buffer, num: int) -> None:
        for _ in range(num):
            key = reader.key()
            if key == "data":
                self._data(reader, name, buffer)
            elif key == "lookback":
                buffer.lookback = reader.scalar()
            elif key == "finalized":
                buffer.finalized = reader.scalar() is True
            else:
                reader.skip()
        if type(buffer.lookback) is not int or buffer.lookback < 0:
            raise DataError(f"`{name}` has the lookback {str(buffer.lookback)[:40]!r}")

    def _data(self, reader: Reader, name: str, buffer: Buffer) -> None:
        if not reader.next_is_list():
            buffer.data, buffer.alike = reader.value(), False
            return
        data, template = reader.entries(self._templates.get(name))
        buffer.data, buffer.alike = data, isinstance(data, dict)
        if template is not None:
            self._templates[name] = template


def _of_many(whole: Episode, agents: list[Episode], many: dict[str, Any]) -> list[Episode]:
    """The agents' episodes with what the episode that they share says of them."""
    clocks, first = many["env_t_to_agent_t"], many.get("env_t_started", 0)
    modules = many.get("_agent_to_module_mapping") or {}
    hanging = sorted({str(a) for key, held in many.items() if "_end" in key and isinstance(held, dict) for a in held})
    if not isinstance(clocks, dict) or not isinstance(modules, dict) or type(first) is not int:
        raise DataError("`env_t_to_agent_t`, `_agent_to_module_mapping` or `env_t_started` is not what RLlib writes")
    _check_all_there(clocks, modules, {str(a.plain["agent_id"]) for a in agents}, many, is_whole=first == 0)
    for agent in agents:
        name = agent.plain["agent_id"]
        buffer = clocks.get(name)
        if not isinstance(buffer, dict) or not isinstance(buffer.get("data"), list):
            raise DataError(f"`env_t_to_agent_t` has no list for agent {str(name)[:40]!r}")
        entries = buffer["data"][int(buffer.get("lookback") or 0) :]
        agent.env_t = first + np.flatnonzero([entry != "S" for entry in entries])
        agent.plain["multi_agent_episode_id"] = whole.plain.get("id_")
        if agent.plain.get("module_id") is None:
            agent.plain["module_id"] = modules.get(name)
        agent.plain["hanging"] = str(name) in hanging
        agent.plain["is_whole"] = first == 0 and not hanging
    last = max(
        (int(agent.env_t[-1]) for agent in agents if agent.env_t is not None and len(agent.env_t)), default=first
    )
    if agents and first == 0 and not hanging and many.get("env_t", last) != last:
        said = str(many["env_t"])[:20]
        agents[0].notes.append(
            ("other_t", f"the episode says that it ends at env_t {said}, but its agents' end at {last}")
        )
    return agents


def _check_all_there(
    clocks: dict[Any, Any], modules: dict[Any, Any], there: set[str], many: dict[str, Any], *, is_whole: bool
) -> None:
    """Raise a DataError where the episode's own maps name an agent whose steps are not there.

    In a chunk, `_agent_to_module_mapping` also names agents that ended before, and the ``_hanging`` maps name those
    whose steps are in the next chunk.
    """
    hung = [held for key, held in many.items() if key.startswith("_hanging") and isinstance(held, dict)]
    hanging = {str(agent) for held in hung for agent in held}
    acted = [agent for agent, buffer in clocks.items() if len(_own_entries(buffer)) > 1]
    for agent in [*acted, *(modules if is_whole else ())]:
        if str(agent) not in there | hanging:
            raise DataError(f"it names agent {str(agent)[:40]!r} in its maps, but has no steps of it: they were lost")


def _own_entries(buffer: Any) -> list[Any]:
    """The env's steps at which an agent observed something, by its own clock; see `Episode.env_t`."""
    if not isinstance(buffer, dict) or not isinstance(buffer.get("data"), list):
        return []
    return [entry for entry in buffer["data"][int(buffer.get("lookback") or 0) :] if entry != "S"]


def _unrolled(columns: dict[Path, NDArray[Any]]) -> list[Any]:
    """The entries of a list that was read as columns, as values again."""
    if list(columns) == [()]:
        return list(columns[()])
    keys = list(dict.fromkeys(path[0] for path in columns))
    parts = {key: _unrolled({p[1:]: c for p, c in columns.items() if p[0] == key}) for key in keys}
    num = len(next(iter(parts.values())))
    if keys == [str(i) for i in range(len(keys))]:
        return [[parts[key][i] for key in keys] for i in range(num)]
    return [{key: parts[key][i] for key in keys} for i in range(num)]


def flat(buffer: Buffer, root: str, spaces: Spaces | None) -> Columns:
    """A buffer as flat columns under ``root``, without the entries before ``t_started``.

    Raises:
        DataError: it does not fit its space, or holds no numbers.
    """
    space = spaces.by_root.get(root) if spaces else None
    if buffer.alike:
        columns = {"/".join((root, *path)): column for path, column in buffer.data.items()}
        if (space is None and not _has_list(columns)) or (spaces and columns.keys() == spaces.names.get(root)):
            return _without(columns, buffer.lookback)
        data: Any = _unrolled(buffer.data)
    else:
        data = buffer.data
    if data is None or isinstance(data, bool | int | float | str | bytes):
        raise DataError(f"`{root}` has no data")
    whole = buffer.finalized or not isinstance(data, list)
    make = words.flat_whole if whole else words.flat_entries
    return _without(make(data, space, root), buffer.lookback)


def _has_list(columns: Columns) -> bool:
    return any(part.isdigit() for name in columns for part in name.split(col.SEPARATOR)[1:])


def _without(columns: Columns, lookback: int) -> Columns:
    for name, column in columns.items():
        if column.ndim == 0 or len(column) < lookback:
            raise DataError(f"`{name}` has no entry for each step")
    return {name: column[lookback:] for name, column in columns.items()} if lookback else columns


def info_columns(buffer: Buffer | None) -> Columns:
    """The numbers among the infos after each step that are there at every step, under ``info``."""
    if buffer is None:
        return {}
    if buffer.alike:
        return {"/".join((col.INFO, *p)): c[buffer.lookback + 1 :] for p, c in buffer.data.items()}
    if not isinstance(buffer.data, list):
        return {}
    return _infos_of(buffer.data[buffer.lookback + 1 :], col.INFO)


def _infos_of(infos: list[Any], root: str) -> Columns:
    if not infos or not all(isinstance(info, dict) for info in infos):
        return {}
    columns: Columns = {}
    for key in infos[0]:
        values = [info.get(key) for info in infos]
        name = f"{root}/{key}"
        if isinstance(values[0], dict):
            columns |= _infos_of(values, name)
            continue
        try:
            columns[name] = words.stacked(values, name)
        except DataError:
            continue
    return columns


def info_names(buffer: Buffer | None) -> set[str]:
    """The names of all infos after the steps, whatever they hold."""
    if buffer is None or buffer.alike or not isinstance(buffer.data, list):
        return set(info_columns(buffer))
    own = [info for info in buffer.data[buffer.lookback + 1 :] if isinstance(info, dict)]
    return {f"{col.INFO}/{key}" for info in own for key in info}
