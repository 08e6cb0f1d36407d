# SPDX-License-Identifier: Apache-2.0
"""What the envs of a pool and their arena tell each other: flat columns in one piece of memory, shared or not."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.envs.arena import Kind
from etude.envs.copies import Copy
from etude.spaces import Space, leaf_dtype, leaf_shape, leaves, space_from_json, space_to_json

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

# What an arena says to all its workers.
CLOSING: Final = 0
ASLEEP: Final = 1
"""The arena waits to be woken ..."""
GOAL: Final = 2
"""... when the envs have done so many orders, since it was made."""
TIMED: Final = 3
"""It wants to know when a worker began with what it does."""

NO_SEED: Final = -1

_ALIGNED = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """The agents of one kind in each env: they have equal spaces."""

    obs_space: Space
    action_space: Space
    agents: tuple[int, ...]
    """Indices in `Copy.agents`."""
    begin: int
    """The seat of the first of them; the others sit behind it."""


class Plan:
    """Who is in each copy of an env, and which slot is whose.

    Agents are seated by kind: in rows of ``[num_envs, num_agents]``, those of a kind stand next to each other.

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
        self.parts: list[Part] = []
        begin = 0
        for obs_space, action_space, members in kinds:
            leaves(obs_space, col.OBS)
            leaves(action_space, col.ACTION)
            self.parts.append(Part(obs_space, action_space, tuple(members), begin))
            begin += len(members)
        self.seated = [agent for part in self.parts for agent in part.agents]

    @classmethod
    def of(cls, copy: Copy) -> "Plan":
        """The plan of an arena whose envs are like ``copy``."""
        return cls(copy.agents, copy.obs_spaces, copy.action_spaces)

    def to_json(self) -> dict[str, Any]:
        """As plain data, for `from_json`."""
        spaces = [[space_to_json(space) for space in some] for some in (self.obs_spaces, self.action_spaces)]
        return {"agents": list(self.agents), "spaces": spaces}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Plan":
        """The inverse of `to_json`."""
        return cls(data["agents"], *([space_from_json(space) for space in some] for some in data["spaces"]))

    def kinds(self, num_envs: int) -> tuple[Kind, ...]:
        """The kinds of slots where there are ``num_envs`` copies."""
        return tuple(
            Kind(p.obs_space, p.action_space, range(num_envs * p.begin, num_envs * (p.begin + len(p.agents))))
            for p in self.parts
        )

    def slots(self, num_envs: int) -> NDArray[np.int64]:
        """``[num_envs, num_agents]``: the slot of each env's each seat."""
        envs = np.arange(num_envs)[:, None]
        return np.concatenate(
            [num_envs * p.begin + envs * len(p.agents) + np.arange(len(p.agents)) for p in self.parts], axis=1
        )


class Memory:
    """All that crosses between the arena and its envs. Each column has exactly one writer.

    Args:
        plan: Whose it is.
        num_envs: Copies of the env.
        num_workers: How many step them.
        buffer: Where it lies, `size` bytes of zeros; None: in memory of its own.
    """

    def __init__(self, plan: Plan, num_envs: int, num_workers: int, buffer: Any = None) -> None:
        self.plan, self.num_envs = plan, num_envs
        place = _Place(buffer)
        per_env, agents = (num_envs,), (num_envs, len(plan.agents))
        # The arena writes these, and its envs' workers read them.
        self.words = place.take((4,), np.int64)
        self.asked = place.take(per_env, np.int64)
        """The running number of the last order."""
        self.order = place.take(per_env, np.int64)
        self.seed = place.take(per_env, np.int64)
        # A worker writes these, and the arena reads them.
        self.total = place.take((num_workers,), np.int64)
        """The orders that the worker's envs have done: the sum of their ``done``."""
        self.asleep = place.take((num_workers,), np.int64)
        """The worker waits to be woken."""
        self.current = place.take((num_workers,), np.int64)
        """The env that the worker is about, -1 is none."""
        self.doing = place.take((num_workers,), np.int64)
        """What it does with that env: `STEP`, `RESET` (also after an episode's last step) or `MAKE`."""
        self.began = place.take((num_workers,), np.float64)
        """When it began with that, by the clock of ``time.monotonic``."""
        self.done = place.take(per_env, np.int64)
        """The running number of the last order that was done."""
        self.status = place.take(per_env, np.int64)
        self.episode = place.take(per_env, np.int64)
        """The running episode's number; the arena writes it between orders."""
        self.env_t = place.take(per_env, np.int64)
        self.end_episode = place.take(per_env, np.int64)
        self.end_t = place.take(per_env, np.int64)
        self.flags = place.take(agents, np.int64)
        """Of rows that wait; 0 is no row."""
        self.reward = place.take(agents, np.float64)
        self.end_flags = place.take(agents, np.int64)
        """Of rows that end."""
        self.end_reward = place.take(agents, np.float64)
        self.obs = [_columns(place, part.obs_space, col.OBS, num_envs * len(part.agents)) for part in plan.parts]
        self.end_obs = [_columns(place, part.obs_space, col.OBS, num_envs * len(part.agents)) for part in plan.parts]
        self.action = [
            _columns(place, part.action_space, col.ACTION, num_envs * len(part.agents)) for part in plan.parts
        ]
        self.size = place.size

    def starts(self, worker: int) -> None:
        """Note that a worker starts now: until it says something else, it makes its first env."""
        self.asleep[worker], self.doing[worker], self.began[worker] = 0, MAKE, time.monotonic()
        self.current[worker] = worker * (self.num_envs // len(self.current))

    @classmethod
    def size_of(cls, plan: Plan, num_envs: int, num_workers: int) -> int:
        """The bytes that it takes."""
        return cls(plan, num_envs, num_workers).size  # zeros that nobody touches cost nothing


def _columns(place: "_Place", space: Space, root: str, rows: int) -> Columns:
    return {name: place.take((rows, *leaf_shape(leaf)), leaf_dtype(leaf)) for name, leaf in leaves(space, root).items()}


class _Place:
    """Gives out arrays that lie one behind the other in a buffer; without one, arrays of their own."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self.size = 0

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """The next array."""
        dtype = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        begin = self.size
        self.size += -(-count * dtype.itemsize // _ALIGNED) * _ALIGNED
        if self._buffer is None:
            return np.zeros(shape, dtype)
        return np.frombuffer(self._buffer, dtype, count, begin).reshape(shape)
