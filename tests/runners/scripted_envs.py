# SPDX-License-Identifier: Apache-2.0
"""An env with agents that come and go by a script of random numbers, and a plain record of what each of them did."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from etude.columns import Columns
from etude.spaces import leaf_dtype, leaf_shape, leaves

SPACES: list[tuple[Any, Any]] = [
    (spaces.Box(-1, 1e6, (4,)), spaces.Discrete(5)),
    (
        spaces.Dict({"who": spaces.Box(-1, 1e6, (3,), np.float64), "k": spaces.Box(-1, 10**6, (), np.int64)}),
        spaces.Box(np.float32([-2, 1]), np.float32([6, 3])),
    ),
]
"""Of each kind of agent."""


class Key(NamedTuple):
    env: int
    episode: int
    """Which of the env's."""
    agent: int


class Row(NamedTuple):
    key: Key
    k: int
    """The steps that the agent has made in the episode."""
    env_t: int
    first: bool = False
    terminated: bool = False
    truncated: bool = False
    blind: bool = False

    @property
    def ends(self) -> bool:
        return self.terminated or self.truncated


def reward_of(key: Key, k: int) -> float:
    """What an agent's step ``k`` in an episode earns: quarters, whose sums are exact."""
    return (7 * key.env + 3 * key.episode + 5 * key.agent + 2 * k) % 11 - 4 + k % 4 / 4


def obs_of(kind: int, rows: Sequence[Row]) -> Columns:
    """What agents are shown; nonsense where it is nothing."""
    columns: Columns = {}
    for name, leaf in leaves(SPACES[kind][0], "obs").items():
        part = slice(3, 4) if name == "obs/k" else slice(3 if name == "obs/who" else 4)
        nonsense = np.full(part.stop - (part.start or 0), np.nan if leaf_dtype(leaf).kind == "f" else -9)
        values = [nonsense if row.blind else [*row.key, row.k][part] for row in rows]
        columns[name] = np.array(values, leaf_dtype(leaf)).reshape(len(rows), *leaf_shape(leaf))
    return columns


def who(columns: Columns, row: int) -> tuple[Key, int]:
    """Whose observation it is, and before which step, or after all."""
    if "obs" in columns:
        *key, k = columns["obs"][row].astype(int).tolist()
        return Key(*key), k
    return Key(*columns["obs/who"][row].astype(int).tolist()), int(columns["obs/k"][row])


@dataclasses.dataclass
class Life:
    """What an agent did in an episode, and what became of it."""

    clock: list[int] = dataclasses.field(default_factory=list)
    """The env's, at each observation that was acted on."""
    actions: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """By column, as they were sent, or else taken."""
    stamps: list[Any] = dataclasses.field(default_factory=list)
    """What `ScriptedArena.stamp` gave with each action."""
    results: int = 0
    """How many of its steps brought a result that was shown."""
    end: Row | None = None
    is_cut: bool = False
    """Its env failed: it ends, truncated, with the last result."""
    void: bool = False
    """It was abandoned: what was not collected by then never is."""


@dataclasses.dataclass(frozen=True)
class Chances:
    """Of what happens in an env at a step, and of how its arena tells it."""

    over: float = 0.08
    """The episode is over for all."""
    end: float = 0.08
    """An agent ends."""
    blind: float = 0.3
    """An end comes without an observation."""
    here: float = 0.6
    """An agent is there from the beginning."""
    appear: float = 0.2
    turn: float = 0.6
    """It is an agent's turn; else it is not shown anything."""
    fail: float = 0.0
    """The env fails instead of its step."""
    taken: float = 0.0
    """Another action than the one sent was taken."""
    ready: float = 0.5
    """An env is ready; at least one is. 1: lock-step."""
    at_once: float = 0.5
    """A new episode is shown together with the end of the last."""
    mixed: float = 0.0
    """Ends are told among rows that wait, as in Gymnasium's vector envs with ``NEXT_STEP``."""
    split: float = 0.2
    """Rows of a kind are told in two turns."""


class ScriptedEnv:
    """One env. Its plain attributes are its state."""

    def __init__(self, number: int, num_agents: int, chances: Chances) -> None:
        self.number, self._num_agents, self._chances = number, num_agents, chances
        self.rng = np.random.default_rng(0)
        self.episode, self.env_t = -1, 0
        self.due = True
        """It must be reset."""
        self.inside: dict[int, int] = {}
        """The steps made by each agent that has begun and not ended."""
        self.away: list[int] = []

    def happens(self, what: str) -> bool:
        return bool(self.rng.random() < getattr(self._chances, what))

    def reset(self) -> list[Row]:
        self.episode, self.env_t, self.due = self.episode + 1, 0, False
        self.inside, self.away = {}, list(range(self._num_agents))
        here = [agent for agent in self.away if self.happens("here")] or [int(self.rng.choice(self.away))]
        return [self._appear(agent) for agent in here]

    def step(self) -> list[Row]:
        self.env_t += 1
        over, rows = self.happens("over"), []
        for agent in list(self.inside):
            if over or self.happens("end"):
                rows.append(self._end(agent))
            elif self.happens("turn"):
                rows.append(self._go_on(agent))
        if not over:
            rows += [self._appear(agent) for agent in list(self.away) if self.happens("appear")]
        if not over and all(row.ends for row in rows):  # then somebody must wait, or the episode is over
            if self.inside:
                rows.append(self._go_on(int(self.rng.choice(list(self.inside)))))
            elif self.away and self.happens("turn"):
                rows.append(self._appear(int(self.rng.choice(self.away))))
        self.due = all(row.ends for row in rows)
        return rows

    def _row(self, agent: int, k: int, *flags: bool) -> Row:
        return Row(Key(self.number, self.episode, agent), k, self.env_t, *flags)

    def _appear(self, agent: int) -> Row:
        self.away.remove(agent)
        self.inside[agent] = 0
        return self._row(agent, 0, True)

    def _go_on(self, agent: int) -> Row:
        self.inside[agent] += 1
        return self._row(agent, self.inside[agent])

    def _end(self, agent: int) -> Row:
        terminated = bool(self.rng.random() < 0.5)
        truncated = not terminated or bool(self.rng.random() < 0.1)
        return self._row(agent, self.inside.pop(agent) + 1, False, terminated, truncated, self.happens("blind"))

    def state_dict(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name[0] != "_" and name != "rng"}
        return copy.deepcopy(state | {"inside": list(self.inside.items()), "rng": self.rng.bit_generator.state})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update({name: value for name, value in state.items() if name != "rng"})
        self.inside = dict(state["inside"])
        self.rng.bit_generator.state = state["rng"]
