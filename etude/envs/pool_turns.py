# SPDX-License-Identifier: Apache-2.0
"""From the memory of a pool to turns: what the ready envs show, and what ended in them."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.columns import Columns
from etude.envs.arena import Turn
from etude.envs.pool_memory import BLIND, ENDED, FIRST, OVER, TAKEN, TERMINATED, TRUNCATED, Memory, Part
from etude.errors import EnvError

Infos: TypeAlias = tuple[Mapping[int, Any], Mapping[int, Any]]
"""By env, what they said beside their last rows that wait, and beside their last rows that end."""

Ints: TypeAlias = NDArray[np.int64]


class Turns:
    """Makes turns of what envs have written, and knows which slots are in an episode.

    Args:
        memory: What they write into.
        infos: Where what they say beside is; None: out of reach.
    """

    def __init__(self, memory: Memory, infos: Infos | None) -> None:
        self._memory, self._infos = memory, infos
        self._slots = memory.plan.slots(memory.num_envs)
        self._rewards = memory.reward.reshape(-1), memory.end_reward.reshape(-1)
        self._is_single = memory.plan.agents == (None,)
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
        memory = self._memory
        obs, reward = (memory.end_obs if ends else memory.obs)[0], self._rewards[ends]
        if len(envs) < memory.num_envs:
            obs = {name: column.take(envs, axis=0) for name, column in obs.items()}
            reward = reward.take(envs)
        infos = self._infos[ends] if self._infos is not None else None
        return Turn(envs, obs, reward, None, None, infos=infos)

    # -- several agents in an env -------------------------------------------------------------------------------

    def _shown_by_kind(self, envs: Ints, bits: int) -> list[Turn]:
        turns = []
        for kind, part in enumerate(self._memory.plan.parts):
            flags = self._memory.flags[envs, part.begin : part.begin + len(part.agents)]
            turn = self._of_kind(kind, part, envs, flags, bits, ends=False)
            if turn is not None:
                turn.first = (flags[flags != 0] & FIRST) != 0 if bits & FIRST else None
                turns.append(turn)
        if bits & FIRST:
            self.running[envs] |= (self._memory.flags[envs] & FIRST) != 0
        if not turns:
            raise EnvError(f"no agent waits in the envs {envs.tolist()}, though they are ready.")
        return turns

    def _ended_by_kind(self, envs: Ints, status: Ints, bits: int) -> list[Turn]:
        memory = self._memory
        turns = []
        for kind, part in enumerate(memory.plan.parts):
            flags = memory.end_flags[envs, part.begin : part.begin + len(part.agents)]
            turn = self._of_kind(kind, part, envs, flags, bits, ends=True)
            if turn is not None:
                flags = flags[flags != 0]
                turn.terminated, turn.truncated = (flags & TERMINATED) != 0, (flags & TRUNCATED) != 0
                blind = (flags & BLIND) != 0
                turn.blind = blind if blind.any() else None
                turn.waits = False
                turns.append(turn)
        self.running[envs] &= memory.end_flags[envs] == 0
        over = envs[(status & OVER) != 0]
        if len(over):
            if not turns:  # all had ended before their env
                turns.append(self._nothing())
            turns[-1].over = over
        return turns

    def _of_kind(self, kind: int, part: Part, envs: Ints, flags: Ints, bits: int, *, ends: bool) -> Turn | None:
        """The rows of ``envs`` with agents of a kind, given their flags ``[envs, agents]``; None: there is none."""
        memory, agents = self._memory, len(part.agents)
        which, seat = np.nonzero(flags)
        if not len(which):
            return None
        envs = envs[which]
        rows = envs * agents + seat
        columns = (memory.end_obs if ends else memory.obs)[kind]
        env_t, episode = (memory.end_t, memory.end_episode) if ends else (memory.env_t, memory.episode)
        turn = Turn(
            memory.num_envs * part.begin + rows,
            {name: column.take(rows, axis=0) for name, column in columns.items()},
            self._rewards[ends].take(envs * len(memory.plan.agents) + part.begin + seat),
            None,
            None,
            kind=kind,
            env_t=env_t.take(envs),
            episode=episode.take(envs),
            infos=self._infos[ends] if self._infos is not None else None,
        )
        if bits & TAKEN:
            taken = np.flatnonzero(flags[which, seat] & TAKEN)
            turn.taken = (taken, self._actions(kind, rows[taken])) if len(taken) else None
        return turn

    def _actions(self, kind: int, rows: Ints) -> Columns:
        return {name: column.take(rows, axis=0) for name, column in self._memory.action[kind].items()}

    def _nothing(self) -> Turn:
        none = np.zeros(0, np.int64)
        obs = {name: column[:0] for name, column in self._memory.obs[0].items()}
        return Turn(none, obs, np.zeros(0), None, None, waits=False, env_t=none, episode=none)
