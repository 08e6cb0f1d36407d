# SPDX-License-Identifier: Apache-2.0
"""Step buffers: flat columns into which env workers write rows, and from which turns are built."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.envs.adapters import EnvAdapter, EnvValueError
from etude.envs.arena import Ints, Kind, Turn
from etude.errors import EnvError, EtudeError, SpaceError
from etude.spaces import (
    Flattener,
    Nester,
    Space,
    check_form,
    check_value,
    leaf_dtype,
    leaf_shape,
    leaves,
    space_from_json,
    space_to_json,
)

# Orders to an env.
STEP: Final = 0
RESET: Final = 1
MAKE: Final = 2
"""Make the env again, and reset it."""

# Bits of an env's status after an order, and of the flags of its rows.
SHOWN: Final = 1
"""Agents wait for actions."""
ENDED: Final = 2
"""Agents ended."""
FIRST: Final = 4
"""Some of the waiting agents are at the start of their episodes."""
TAKEN: Final = 8
"""The env took another action than the one sent; the action columns now hold it."""
OVER: Final = 16
"""The episode ended for all agents."""
FAILED: Final = 32
"""The env raised an error."""
WRONG: Final = 64
"""The env broke its contract."""
TERMINATED: Final = 128
"""How the agent ended: in its row's flags, and in the env's status if it is the only agent."""
TRUNCATED: Final = 256
BLIND: Final = 512
"""The env gave no observation for the row; in the row's flags."""
BEGUN: Final = 1024
"""The env was reset or made, which does not count as a step."""
UNHELD: Final = 2048
"""Agents that never acted in the episode, which is over, got rewards."""

# Words from the arena to all its workers, by index.
CLOSING: Final = 0
ASLEEP: Final = 1
"""Whether the arena sleeps, and must be woken when the `GOAL` is reached."""
GOAL: Final = 2
"""The total number of done orders, since the arena was made, at which a worker wakes the arena."""
TIMED: Final = 3
"""Whether workers store the time at which they begin an order."""
READY: Final = 4
"""Whether workers may begin, because everything that they read has been written."""

NO_SEED: Final = -1

_ALIGNED = 64
_MAX_TEXT: Final = 20_000


class AgentGroup(NamedTuple):
    """The agents of an env that have equal spaces; in an arena, a `Kind` of slots."""

    obs_space: Space
    action_space: Space
    agents: tuple[int, ...]
    """Their indices in `EnvAdapter.agents`."""
    begin: int
    """The seat of the first agent; the others follow."""


class AgentLayout:
    """The agents of each copy of an env, their order and their slots.

    Agents are ordered by group, so that in arrays ``[num_envs, num_agents]`` the agents of a group are adjacent. An
    agent's place in this order is its seat.

    Raises:
        SpaceError: Etude can't handle a space.
    """

    def __init__(
        self, agents: Sequence[str | None], obs_spaces: Sequence[Space], action_spaces: Sequence[Space]
    ) -> None:
        self.agents = tuple(agents)
        self.obs_spaces, self.action_spaces = tuple(obs_spaces), tuple(action_spaces)
        kinds: list[tuple[Space, Space, list[int]]] = []
        for i, spaces in enumerate(zip(obs_spaces, action_spaces, strict=True)):
            for *of_kind, members in kinds:
                if tuple(of_kind) == spaces:
                    members.append(i)
                    break
            else:
                kinds.append((*spaces, [i]))
        self.groups: list[AgentGroup] = []
        begin = 0
        for obs_space, action_space, members in kinds:
            leaves(obs_space, col.OBS)
            leaves(action_space, col.ACTION)
            self.groups.append(AgentGroup(obs_space, action_space, tuple(members), begin))
            begin += len(members)
        self.seated = [agent for group in self.groups for agent in group.agents]

    @classmethod
    def of(cls, adapter: EnvAdapter) -> "AgentLayout":
        """The layout of envs with the agents and spaces of ``adapter``."""
        return cls(adapter.agents, adapter.obs_spaces, adapter.action_spaces)

    def to_json(self) -> dict[str, Any]:
        """The layout as plain data, for `from_json`."""
        spaces = [[space_to_json(space) for space in some] for some in (self.obs_spaces, self.action_spaces)]
        return {"agents": list(self.agents), "spaces": spaces}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "AgentLayout":
        """The inverse of `to_json`."""
        return cls(data["agents"], *([space_from_json(space) for space in some] for some in data["spaces"]))

    def kinds(self, num_envs: int) -> tuple[Kind, ...]:
        """The kinds of slots of ``num_envs`` copies."""
        return tuple(
            Kind(p.obs_space, p.action_space, range(num_envs * p.begin, num_envs * (p.begin + len(p.agents))))
            for p in self.groups
        )

    def place(self, env: int, seat: int) -> tuple[int, int]:
        """The kind of an agent, and its row among the agents of its kind."""
        kind = next(k for k, group in enumerate(self.groups) if seat < group.begin + len(group.agents))
        return kind, env * len(self.groups[kind].agents) + seat - self.groups[kind].begin

    def slots(self, num_envs: int) -> NDArray[np.int64]:
        """``[num_envs, num_agents]``: the slot of each agent, by seat."""
        envs = np.arange(num_envs)[:, None]
        return np.concatenate(
            [num_envs * p.begin + envs * len(p.agents) + np.arange(len(p.agents)) for p in self.groups], axis=1
        )


def check_alike(layout: AgentLayout, other: AgentLayout, env: int) -> None:
    """Raise an EnvError if env number ``env`` has other agents or spaces than the first env."""
    mine, its = ((p.agents, p.obs_spaces, p.action_spaces) for p in (layout, other))
    for what, one, two in zip(("agents", "observation spaces", "action spaces"), mine, its, strict=True):
        if one != two:
            raise EnvError(
                f"the envs of a pool must be alike, but env {env} has the {what} {two}, and the others {one}."
            )


def same_object(env: Any) -> EnvError:
    """The error for a function that returns the same ``env`` again."""
    return EnvError(f"the same {type(env).__name__} object was returned for several envs: make a new one in each call.")


Take: TypeAlias = Callable[[tuple[int, ...], Any], NDArray[Any]]
"""Allocates an array of zeros of a shape and dtype."""


class AgentRows:
    """The newest rows of all copies of an env: those that wait for actions, or those that end."""

    def __init__(self, layout: AgentLayout, num_envs: int, take: Take) -> None:
        self.episode = take((num_envs,), np.int64)
        """The number of the episode; that of waiting rows is written by the arena, only while the env makes no step."""
        self.env_t = take((num_envs,), np.int64)
        self.flags = take((num_envs, len(layout.agents)), np.int64)
        """0 means no row."""
        self.reward = take((num_envs, len(layout.agents)), np.float64)
        self.obs = [_columns(p.obs_space, col.OBS, num_envs * len(p.agents), take) for p in layout.groups]


def _columns(space: Space, root: str, rows: int, take: Take) -> Columns:
    return {name: take((rows, *leaf_shape(leaf)), leaf_dtype(leaf)) for name, leaf in leaves(space, root).items()}


class StepBuffers:
    """The rows, final rows and actions of all copies of an env, as flat columns.

    Args:
        layout: The agents of each env.
        num_envs: The number of copies.
        take: Allocates the arrays.
    """

    def __init__(self, layout: AgentLayout, num_envs: int, take: Take = np.zeros) -> None:
        self.layout, self.num_envs = layout, num_envs
        self.status = take((num_envs,), np.int64)
        """The bits of each env's last order."""
        self.shown, self.ended = AgentRows(layout, num_envs, take), AgentRows(layout, num_envs, take)
        self.rows = (self.shown, self.ended)
        self.unacted_reward = take((num_envs, len(layout.agents)), np.float64)
        """The rewards of agents that never acted in the last episode, NaN for others; valid only with `UNHELD`."""
        self.action = [_columns(p.action_space, col.ACTION, num_envs * len(p.agents), take) for p in layout.groups]


class SharedBuffers(StepBuffers):
    """Step buffers that an arena and its workers share, with the arena's orders.

    Each column has exactly one writer.

    Args:
        layout: The agents of each env.
        num_envs: The number of copies.
        num_workers: The number of workers.
        buffer: The memory of the columns, `size` bytes of zeros; None: newly allocated memory.
    """

    def __init__(self, layout: AgentLayout, num_envs: int, num_workers: int, buffer: Any = None) -> None:
        self._buffer = buffer
        self.size = 0
        take = self._take
        super().__init__(layout, num_envs, take)
        per_env = (num_envs,)
        # The arena writes these, and its workers read them.
        self.words = take((5,), np.int64)
        self.asked = take(per_env, np.int64)
        """The number of the last order."""
        self.order = take(per_env, np.int64)
        self.seed = take(per_env, np.int64)
        # A worker writes these, and the arena reads them.
        self.total = take((num_workers,), np.int64)
        """The number of orders that the worker has done: the sum of its envs' ``done``."""
        self.asleep = take((num_workers,), np.int64)
        """Whether the worker waits to be woken."""
        self.current = take((num_workers,), np.int64)
        """The env that the worker is busy with; -1 if none."""
        self.doing = take((num_workers,), np.int64)
        """What the worker does with that env: `STEP`, `RESET` (also after an episode's last step) or `MAKE`."""
        self.began = take((num_workers,), np.float64)
        """When it began, in seconds of ``time.monotonic``."""
        self.done = take(per_env, np.int64)
        """The number of the last order that was done."""
        self._failure = take((num_envs, _MAX_TEXT), np.uint8)  # pages that are never written take no memory

    def _take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """The next array in the buffer."""
        count, begin = int(np.prod(shape, dtype=np.int64)), self.size
        self.size += -(-count * np.dtype(dtype).itemsize // _ALIGNED) * _ALIGNED
        if self._buffer is None:
            return np.zeros(shape, dtype)
        return np.frombuffer(self._buffer, dtype, count, begin).reshape(shape)

    def start_worker(self, worker: int) -> None:
        """Note that a worker starts now; its first task is to make its first env."""
        self.asleep[worker], self.doing[worker], self.began[worker] = 0, MAKE, time.monotonic()
        self.current[worker] = worker * (self.num_envs // len(self.current))

    def set_failure(self, env: int, error: EtudeError) -> None:
        """Store the error with which an env failed, for the arena; a long text keeps only its end."""
        text = str(error).encode(errors="replace")[1 - _MAX_TEXT :]
        data = next((mark for mark, kind in _FAILURES.items() if isinstance(error, kind)), b"E") + text
        self._failure[env, : len(data)] = np.frombuffer(data, np.uint8)
        self._failure[env, len(data) :] = 0

    def failure(self, env: int) -> EtudeError:
        """The error stored by `set_failure`."""
        data = self._failure[env].tobytes().rstrip(b"\0")
        return _FAILURES.get(data[:1], EnvError)(data[1:].decode(errors="ignore"))


_FAILURES: Final[Mapping[bytes, type[EtudeError]]] = {b"S": SpaceError, b"V": EnvValueError}
"""The errors of `StepBuffers.failure`, by the byte that stands for them; any other is an EnvError, ``E``."""


class AgentView:
    """One agent's observations and actions in all envs: row ``env * stride + offset`` of its group's columns.

    ``show``, ``end`` and ``keep`` take the env and a value; they raise a SpaceError if its shape or dtype does not fit
    the space.
    """

    def __init__(self, group: AgentGroup, index: int, obs: Columns, end_obs: Columns, action: Columns) -> None:
        self.action_space = action_space = group.action_space
        obs, end_obs, action = (
            {name: column[index :: len(group.agents)] for name, column in columns.items()}
            for columns in (obs, end_obs, action)
        )
        self.show = _writer(group.obs_space, col.OBS, obs)
        self.end = _writer(group.obs_space, col.OBS, end_obs)
        self.keep = _writer(action_space, col.ACTION, action)
        self.read = _reader(action_space, action)


def _writer(space: Space, root: str, columns: Columns) -> Callable[[int, Any], None]:
    flatten = Flattener(space, root)
    writers = [(name, _leaf_writer(name, leaf, columns[name])) for name, leaf in flatten.leaves.items()]
    if root in columns:  # not nested
        return writers[0][1]

    def write(row: int, value: Any) -> None:
        try:
            parts = flatten(value)
        except (KeyError, IndexError, TypeError):
            check_value(space, value, root)
            raise
        for name, write_leaf in writers:
            write_leaf(row, parts[name])

    return write


def _leaf_writer(name: str, leaf: Space, column: NDArray[Any]) -> Callable[[int, Any], None]:
    shape, dtype, array = leaf_shape(leaf), column.dtype, np.ndarray
    dtypes, scalars = {dtype}, set[type]()  # known to fit, whatever the numbers

    def always_fits(array: NDArray[Any]) -> bool:
        return dtype.kind not in "iu" or bool(np.can_cast(array.dtype, dtype))

    def write(row: int, value: Any) -> None:
        cls = value.__class__
        if cls is array:
            if value.shape != shape or (value.dtype is not dtype and value.dtype not in dtypes):
                check_form(name, leaf, value)
                if always_fits(value):
                    dtypes.add(value.dtype)
        elif cls not in scalars:
            is_scalar = isinstance(value, int | float | np.generic)
            value = np.asarray(value)
            check_form(name, leaf, value)
            if is_scalar and always_fits(value):
                scalars.add(cls)
        column[row] = value

    return write


def _reader(space: Space, columns: Columns) -> Callable[[int], Any]:
    """A function that reads an env's action. It is a copy: the env may keep it, but the columns are overwritten."""
    nest, column = Nester(space, col.ACTION), columns.get(col.ACTION)
    if column is None:
        return lambda row: nest({name: column[row].copy() for name, column in columns.items()})
    if isinstance(space, Box) and column.ndim == 1:
        return lambda row: np.asarray(column[row])  # a 0-d array, like the space's own samples
    return column.__getitem__ if column.ndim == 1 else lambda row: column[row].copy()  # a NumPy scalar is a copy


Infos: TypeAlias = tuple[Mapping[int, Any], Mapping[int, Any]]
"""By env, the infos with their last rows that wait, and the infos with their last rows that end."""


class TurnBuilder:
    """Builds turns from step buffers, and tracks which slots are in an episode.

    Args:
        buffers: The buffers that the envs write.
        infos: The envs' infos; None: not available.
    """

    def __init__(self, buffers: StepBuffers, infos: Infos | None) -> None:
        self._buffers, self._infos = buffers, infos
        self.slots = buffers.layout.slots(buffers.num_envs)
        """``[num_envs, num_agents]``: the slot of each agent, by seat."""
        self._rewards = [rows.reward.reshape(-1) for rows in buffers.rows]
        self._is_single = buffers.layout.agents == (None,)
        self.running = np.zeros(self.slots.shape, bool)
        """``[num_envs, num_agents]``: the seats whose agents are in an episode, bool."""

    def shown(self, envs: Ints, status: Ints, bits: int) -> list[Turn]:
        """The turns of agents that wait in ``envs``, all of which have some; ``bits`` are all status bits together."""
        if not self._is_single:
            return self._shown_by_kind(envs, bits)
        turn = self._of_single(envs, ends=False)
        if bits & FIRST:
            turn.first = (status & FIRST) != 0
            self.running[envs] = True
        if bits & TAKEN:
            turn.taken = self._taken_of_single(envs, (status & (TAKEN | ENDED)) == TAKEN)
        return [turn]

    def ended(self, envs: Ints, status: Ints, bits: int) -> list[Turn]:
        """The turns of agents that ended in ``envs``, all of which have some; ``bits`` are all status bits together."""
        if not self._is_single:
            return self._ended_by_kind(envs, status, bits)
        turn = self._of_single(envs, ends=True)
        turn.terminated, turn.truncated, turn.waits = (status & TERMINATED) != 0, (status & TRUNCATED) != 0, False
        if bits & TAKEN:
            turn.taken = self._taken_of_single(envs, (status & TAKEN) != 0)
        self.running[envs] = False
        return [turn]

    def _taken_of_single(self, envs: Ints, where: NDArray[np.bool_]) -> tuple[Ints, Columns] | None:
        rows = np.flatnonzero(where)
        return (rows, self._actions(0, envs[rows])) if len(rows) else None

    def _of_single(self, envs: Ints, *, ends: bool) -> Turn:
        buffers = self._buffers
        obs, reward = buffers.rows[ends].obs[0], self._rewards[ends]
        if len(envs) < buffers.num_envs:
            obs = {name: column.take(envs, axis=0) for name, column in obs.items()}
            reward = reward.take(envs)
        infos = self._infos[ends] if self._infos is not None else None
        return Turn(envs, obs, reward, None, None, infos=infos)

    # -- several agents in an env -------------------------------------------------------------------------------

    def _shown_by_kind(self, envs: Ints, bits: int) -> list[Turn]:
        turns = []
        for turn, flags in self._by_kind(envs, bits, ends=False):
            turn.first = (flags & FIRST) != 0 if bits & FIRST else None
            turns.append(turn)
        if bits & FIRST:
            self.running[envs] |= (self._buffers.shown.flags[envs] & FIRST) != 0
        if not turns:
            raise EnvError(f"no agent waits in the envs {envs.tolist()}, although they are ready.")
        return turns

    def _ended_by_kind(self, envs: Ints, status: Ints, bits: int) -> list[Turn]:
        turns = []
        for turn, flags in self._by_kind(envs, bits, ends=True):
            turn.terminated, turn.truncated = (flags & TERMINATED) != 0, (flags & TRUNCATED) != 0
            blind = (flags & BLIND) != 0
            turn.blind = blind if blind.any() else None
            turn.waits = False
            turns.append(turn)
        self.running[envs] &= self._buffers.ended.flags[envs] == 0
        over = envs[(status & OVER) != 0]
        if len(over):
            if not turns:  # all agents had ended before their env
                turns.append(self._nothing())
            turns[-1].over = over
            if (unacted_reward := envs[(status & UNHELD) != 0]).size:
                rewards = turns[-1].unacted_reward = np.full(self.slots.size, np.nan)
                rewards[self.slots[unacted_reward]] = self._buffers.unacted_reward[unacted_reward]
        return turns

    def _by_kind(self, envs: Ints, bits: int, *, ends: bool) -> Iterator[tuple[Turn, Ints]]:
        """The rows of ``envs``, with their flags, for each kind that has any."""
        buffers = self._buffers
        newest = buffers.rows[ends]
        infos = self._infos[ends] if self._infos is not None else None
        for kind, group in enumerate(buffers.layout.groups):
            agents = len(group.agents)
            which, seat = np.nonzero(newest.flags[envs, group.begin : group.begin + agents])
            if not len(which):
                continue
            of = envs[which]
            flags, rows = newest.flags[of, group.begin + seat], of * agents + seat
            turn = Turn(
                buffers.num_envs * group.begin + rows,
                {name: column.take(rows, axis=0) for name, column in newest.obs[kind].items()},
                self._rewards[ends].take(of * len(buffers.layout.agents) + group.begin + seat),
                None,
                None,
                kind=kind,
                env_t=newest.env_t.take(of),
                episode=newest.episode.take(of),
                infos=infos,
            )
            if bits & TAKEN:
                taken = np.flatnonzero(flags & TAKEN)
                turn.taken = (taken, self._actions(kind, rows[taken])) if len(taken) else None
            yield turn, flags

    def _actions(self, kind: int, rows: Ints) -> Columns:
        return {name: column.take(rows, axis=0) for name, column in self._buffers.action[kind].items()}

    def _nothing(self) -> Turn:
        none = np.zeros(0, np.int64)
        obs = {name: column[:0] for name, column in self._buffers.shown.obs[0].items()}
        return Turn(none, obs, np.zeros(0), None, None, waits=False, env_t=none, episode=none)
