# SPDX-License-Identifier: Apache-2.0
"""Step buffers: flat columns that env workers write what agents are shown into, and from which turns are made."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.envs.adapters import EnvAdapter
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

# What is ordered of an env.
STEP: Final = 0
RESET: Final = 1
MAKE: Final = 2
"""Make it again, and reset it."""

# What an env has done with that, and bits of what its rows are.
SHOWN: Final = 1
"""It shows something to agents that wait."""
ENDED: Final = 2
"""Agents ended."""
FIRST: Final = 4
"""Of those that wait, some are at the beginning."""
TAKEN: Final = 8
"""An action was taken that is not the one sent: the column of actions holds it now."""
OVER: Final = 16
"""Its episode ended for all agents."""
FAILED: Final = 32
"""An error was raised."""
WRONG: Final = 64
"""The error is that the env breaks its contract."""
TERMINATED: Final = 128
"""How the agent ended: a bit of its row, and of its env's status where it is alone."""
TRUNCATED: Final = 256
BLIND: Final = 512
"""The env never gave the row's observation: a bit of the row."""
BEGUN: Final = 1024
"""It was reset or made, which is no step."""

# What an arena says to all its workers.
CLOSING: Final = 0
ASLEEP: Final = 1
"""The arena waits to be woken ..."""
GOAL: Final = 2
"""... when the envs have done so many orders, since it was made."""
TIMED: Final = 3
"""It wants to know when a worker began with what it does."""
READY: Final = 4
"""Workers may begin: all that they read is written."""

NO_SEED: Final = -1

_ALIGNED = 64
_MAX_TEXT: Final = 20_000


class AgentGroup(NamedTuple):
    """The agents of an env that have equal spaces; a `Kind` of slots."""

    obs_space: Space
    action_space: Space
    agents: tuple[int, ...]
    """Indices in `EnvAdapter.agents`."""
    begin: int
    """The seat of the first of them; the others follow it."""


class AgentLayout:
    """The agents of each copy of an env, and their slots.

    Agents are ordered by group: in arrays ``[num_envs, num_agents]``, those of a group stand next to each other. An
    agent's place in this order is its seat.

    Raises:
        SpaceError: a space is of a kind that Etude can't handle.
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
        """The layout of an arena whose envs are like that of ``adapter``."""
        return cls(adapter.agents, adapter.obs_spaces, adapter.action_spaces)

    def to_json(self) -> dict[str, Any]:
        """As plain data, for `from_json`."""
        spaces = [[space_to_json(space) for space in some] for some in (self.obs_spaces, self.action_spaces)]
        return {"agents": list(self.agents), "spaces": spaces}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "AgentLayout":
        """The inverse of `to_json`."""
        return cls(data["agents"], *([space_from_json(space) for space in some] for some in data["spaces"]))

    def kinds(self, num_envs: int) -> tuple[Kind, ...]:
        """The kinds of slots where there are ``num_envs`` copies."""
        return tuple(
            Kind(p.obs_space, p.action_space, range(num_envs * p.begin, num_envs * (p.begin + len(p.agents))))
            for p in self.groups
        )

    def place(self, env: int, seat: int) -> tuple[int, int]:
        """The kind of an agent, and its row among those of its kind."""
        kind = next(k for k, group in enumerate(self.groups) if seat < group.begin + len(group.agents))
        return kind, env * len(self.groups[kind].agents) + seat - self.groups[kind].begin

    def slots(self, num_envs: int) -> NDArray[np.int64]:
        """``[num_envs, num_agents]``: the slot of each agent, by seat."""
        envs = np.arange(num_envs)[:, None]
        return np.concatenate(
            [num_envs * p.begin + envs * len(p.agents) + np.arange(len(p.agents)) for p in self.groups], axis=1
        )


def check_alike(layout: AgentLayout, other: AgentLayout, env: int) -> None:
    """Raise an EnvError where env number ``env`` has other agents or spaces than those before it."""
    mine, its = ((p.agents, p.obs_spaces, p.action_spaces) for p in (layout, other))
    for what, one, two in zip(("agents", "observation spaces", "action spaces"), mine, its, strict=True):
        if one != two:
            raise EnvError(f"the envs of a pool must be alike, but env {env} has the {what} {two}, and others {one}.")


def same_object(env: Any) -> EnvError:
    """The error for what makes ``env`` again and again."""
    return EnvError(f"the same {type(env).__name__} object is given each time: let a new one be made.")


class StepBuffers:
    """What envs show, end with and are acted on with, for all copies of an env.

    Args:
        layout: Their agents.
        num_envs: Copies of the env.
        take: Gives memory for an array of zeros.
    """

    def __init__(
        self, layout: AgentLayout, num_envs: int, take: Callable[[tuple[int, ...], Any], NDArray[Any]] = np.zeros
    ) -> None:
        self.layout, self.num_envs = layout, num_envs
        per_env, agents = (num_envs,), (num_envs, len(layout.agents))
        self.status = take(per_env, np.int64)
        """What each env has done last, as bits."""
        self.episode = take(per_env, np.int64)
        """The running episode's number; the arena writes it while no step is under way."""
        self.env_t = take(per_env, np.int64)
        self.end_episode = take(per_env, np.int64)
        self.end_t = take(per_env, np.int64)
        self.flags = take(agents, np.int64)
        """Of rows that wait; 0 is no row."""
        self.reward = take(agents, np.float64)
        self.end_flags = take(agents, np.int64)
        """Of rows that end."""
        self.end_reward = take(agents, np.float64)

        def columns(space: Space, root: str, rows: int) -> Columns:
            parts = leaves(space, root)
            return {name: take((rows, *leaf_shape(leaf)), leaf_dtype(leaf)) for name, leaf in parts.items()}

        rows = [(group, num_envs * len(group.agents)) for group in layout.groups]
        self.obs = [columns(group.obs_space, col.OBS, count) for group, count in rows]
        self.end_obs = [columns(group.obs_space, col.OBS, count) for group, count in rows]
        self.action = [columns(group.action_space, col.ACTION, count) for group, count in rows]


class SharedBuffers(StepBuffers):
    """Step buffers between an arena and its workers, with the orders of one to the other.

    Each column has exactly one writer.

    Args:
        layout: The agents of each env.
        num_envs: Copies of the env.
        num_workers: How many step them.
        buffer: Where the columns lie, `size` bytes of zeros; None: in memory of their own.
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
        """The running number of the last order."""
        self.order = take(per_env, np.int64)
        self.seed = take(per_env, np.int64)
        # A worker writes these, and the arena reads them.
        self.total = take((num_workers,), np.int64)
        """The orders that the worker's envs have done: the sum of their ``done``."""
        self.asleep = take((num_workers,), np.int64)
        """The worker waits to be woken."""
        self.current = take((num_workers,), np.int64)
        """The env that the worker is about, -1 is none."""
        self.doing = take((num_workers,), np.int64)
        """What it does with that env: `STEP`, `RESET` (also after an episode's last step) or `MAKE`."""
        self.began = take((num_workers,), np.float64)
        """When it began with that, by the clock of ``time.monotonic``."""
        self.done = take(per_env, np.int64)
        """The running number of the last order that was done."""
        self._failure = take((num_envs, _MAX_TEXT), np.uint8)  # pages that nobody writes take no memory

    def _take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """The next array: they lie one behind the other in the buffer."""
        count, begin = int(np.prod(shape, dtype=np.int64)), self.size
        self.size += -(-count * np.dtype(dtype).itemsize // _ALIGNED) * _ALIGNED
        if self._buffer is None:
            return np.zeros(shape, dtype)
        return np.frombuffer(self._buffer, dtype, count, begin).reshape(shape)

    def start_worker(self, worker: int) -> None:
        """Note that a worker starts now: until it says something else, it makes its first env."""
        self.asleep[worker], self.doing[worker], self.began[worker] = 0, MAKE, time.monotonic()
        self.current[worker] = worker * (self.num_envs // len(self.current))

    def set_failure(self, env: int, error: EtudeError) -> None:
        """Leave the error with which an env failed to the arena; of a long one, the end."""
        text = str(error).encode(errors="replace")[1 - _MAX_TEXT :]
        data = (b"S" if isinstance(error, SpaceError) else b"E") + text
        self._failure[env, : len(data)] = np.frombuffer(data, np.uint8)
        self._failure[env, len(data) :] = 0

    def failure(self, env: int) -> EtudeError:
        """The error that `set_failure` left."""
        data = self._failure[env].tobytes().rstrip(b"\0")
        return (SpaceError if data[:1] == b"S" else EnvError)(data[1:].decode(errors="ignore"))


class AgentView:
    """One agent's observations and actions in all envs: row ``env * stride + offset`` of its group's columns.

    ``show``, ``end`` and ``keep`` take the env and a value; they raise a SpaceError where its shape or dtype does not
    fit the space.
    """

    def __init__(self, group: AgentGroup, index: int, obs: Columns, end_obs: Columns, action: Columns) -> None:
        self.obs_space, self.action_space = obs_space, action_space = group.obs_space, group.action_space
        own = slice(index, None, len(group.agents))
        flatten_action = Flattener(action_space, col.ACTION)
        self.show = _writer(obs_space, col.OBS, {name: column[own] for name, column in obs.items()})
        self.end = _writer(obs_space, col.OBS, {name: column[own] for name, column in end_obs.items()})
        actions = {name: column[own] for name, column in action.items()}
        self.keep = _writer(action_space, col.ACTION, actions)
        self.read = _reader(flatten_action, Nester(action_space, col.ACTION), actions)


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
    dtypes, scalars = {dtype}, set[type]()  # that were found to fit

    def write(row: int, value: Any) -> None:
        cls = value.__class__
        if cls is array:
            if value.shape != shape or (value.dtype is not dtype and value.dtype not in dtypes):
                check_form(name, leaf, value)
                dtypes.add(value.dtype)
        elif cls not in scalars:
            is_scalar = isinstance(value, int | float | np.generic)
            value = np.asarray(value)
            check_form(name, leaf, value)
            if is_scalar:
                scalars.add(cls)
        column[row] = value

    return write


def _reader(flatten: Flattener, nest: Nester, columns: Columns) -> Callable[[int], Any]:
    """Actions are copied: an env may keep them, and the columns are written over."""
    if col.ACTION in columns:
        column = columns[col.ACTION]
        if not leaf_shape(flatten.leaves[col.ACTION]):
            return column.__getitem__  # a NumPy number, which nobody can write over
        return lambda row: column[row].copy()
    return lambda row: nest({name: _own(column[row]) for name, column in columns.items()})


def _own(value: NDArray[Any]) -> Any:
    return value.copy() if value.ndim else value


Infos: TypeAlias = tuple[Mapping[int, Any], Mapping[int, Any]]
"""By env, what they said beside their last rows that wait, and beside their last rows that end."""


class TurnBuilder:
    """Makes turns of what envs have written, and knows which slots are in an episode.

    Args:
        buffers: What they write into.
        infos: Their infos; None: not available.
    """

    def __init__(self, buffers: StepBuffers, infos: Infos | None) -> None:
        self._buffers, self._infos = buffers, infos
        self._slots = buffers.layout.slots(buffers.num_envs)
        self._rewards = buffers.reward.reshape(-1), buffers.end_reward.reshape(-1)
        self._is_single = buffers.layout.agents == (None,)
        self.running = np.zeros(self._slots.shape, bool)
        """``[num_envs, num_agents]``: the seats whose agents are in an episode."""

    def lose(self, env: int) -> Ints:
        """The slots whose episodes break off with their env's."""
        slots: Ints = self._slots[env, self.running[env]]
        self.running[env] = False
        return slots

    def shown(self, envs: Ints, status: Ints, bits: int) -> list[Turn]:
        """What ``envs`` show, each of which shows something; ``bits`` are in one or the other's status."""
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
        """The ends of agents in ``envs``, each of which has some; ``bits`` are in one or the other's status."""
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
        obs, reward = (buffers.end_obs if ends else buffers.obs)[0], self._rewards[ends]
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
            self.running[envs] |= (self._buffers.flags[envs] & FIRST) != 0
        if not turns:
            raise EnvError(f"no agent waits in the envs {envs.tolist()}, though they are ready.")
        return turns

    def _ended_by_kind(self, envs: Ints, status: Ints, bits: int) -> list[Turn]:
        turns = []
        for turn, flags in self._by_kind(envs, bits, ends=True):
            turn.terminated, turn.truncated = (flags & TERMINATED) != 0, (flags & TRUNCATED) != 0
            blind = (flags & BLIND) != 0
            turn.blind = blind if blind.any() else None
            turn.waits = False
            turns.append(turn)
        self.running[envs] &= self._buffers.end_flags[envs] == 0
        over = envs[(status & OVER) != 0]
        if len(over):
            if not turns:  # all had ended before their env
                turns.append(self._nothing())
            turns[-1].over = over
        return turns

    def _by_kind(self, envs: Ints, bits: int, *, ends: bool) -> Iterator[tuple[Turn, Ints]]:
        """The rows of ``envs``, with their flags, for each kind of which there are agents."""
        buffers = self._buffers
        all_flags, env_t, episode, obs = (
            (buffers.end_flags, buffers.end_t, buffers.end_episode, buffers.end_obs)
            if ends
            else (buffers.flags, buffers.env_t, buffers.episode, buffers.obs)
        )
        infos = self._infos[ends] if self._infos is not None else None
        for kind, group in enumerate(buffers.layout.groups):
            agents = len(group.agents)
            which, seat = np.nonzero(all_flags[envs, group.begin : group.begin + agents])
            if not len(which):
                continue
            of = envs[which]
            flags, rows = all_flags[of, group.begin + seat], of * agents + seat
            turn = Turn(
                buffers.num_envs * group.begin + rows,
                {name: column.take(rows, axis=0) for name, column in obs[kind].items()},
                self._rewards[ends].take(of * len(buffers.layout.agents) + group.begin + seat),
                None,
                None,
                kind=kind,
                env_t=env_t.take(of),
                episode=episode.take(of),
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
        obs = {name: column[:0] for name, column in self._buffers.obs[0].items()}
        return Turn(none, obs, np.zeros(0), None, None, waits=False, env_t=none, episode=none)
