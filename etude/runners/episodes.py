# SPDX-License-Identifier: Apache-2.0
"""Tracks running episodes, and collects the returns and lengths of finished ones."""

import copy
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.envs import Arena, Turn
from etude.experience.ids import Ids
from etude.stateful import Stateful

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Key: TypeAlias = tuple[int, int]
"""The index of an env copy, and the index of an episode in it."""

_NO_INTS: Ints = np.zeros(0, np.int64)
_ID = "{}-{}-{}".format  # an episode's id: the prefix, the index of the env, the index of the episode in it
_OWN_ID = re.compile(
    r"(?:\d+-)*"  # the place of its recording, if several are read as one
    r"[0-9a-f]{16}-(\d+)-(\d+)"
    r"(?:@\d+)?"  # the updates, in the recording of an evaluation
    r"(?:~\d+~*)*"  # what merging adds to an id that is taken
)


class Episode(NamedTuple):
    """An episode of one env copy."""

    id: str
    """The ``episode_id``; unique."""
    env: int
    """The index of the env copy, from 0; None for a recorded episode that was not made by Etude's envs."""
    number: int
    """The index of the episode in that copy, from 0; None as for ``env``."""

    @classmethod
    def recorded(cls, episode_id: str) -> "Episode":
        """An episode of a recording."""
        own = _OWN_ID.fullmatch(episode_id)
        if own is None:
            return cls(episode_id, None, None)  # type: ignore[arg-type]  # so that computing with it is an error
        return cls(episode_id, int(own[1]), int(own[2]))


class Finished(NamedTuple):
    """Finished episodes, in the order in which their ends were collected."""

    returns: Floats
    """The return of each episode, summed over all agents."""
    lengths: Ints
    """The length of each episode; in env steps, if there are several agents."""
    agent_returns: dict[str, Floats]
    """The returns of each agent, by name, in the episodes in which it acted or got a reward, even 0; {} if agents have
    no names."""
    module_returns: dict[str, Floats]
    """The same by module: the mean over its agents in each episode."""
    durations: Floats
    """Seconds from each episode's first observation to its last, without the time between collections."""
    envs: Ints
    """The env copy of each episode."""
    numbers: Ints
    """The index of each episode in its copy."""
    custom: dict[str, Floats] = {}  # noqa: RUF012  never written to
    """Numbers that callbacks logged, by name: one for each episode with such a number."""
    histograms: dict[str, Floats] = {}  # noqa: RUF012
    """Values that callbacks logged for histograms, of all episodes."""
    media: dict[str, bytes] = {}  # noqa: RUF012
    """Images (PNG) and clips (GIF) that callbacks logged, the newest for each name."""


class _Ends(NamedTuple):
    """Episodes that ended together: columns ``[n]``."""

    envs: Ints
    numbers: Ints
    returns: Floats
    lengths: Ints
    durations: Floats
    agents: list[list[list[Any]]]
    """For each episode, the name, the module and the return of each of its agents; empty if agents have no names."""

    def select(self, which: NDArray[np.bool_]) -> "_Ends":
        agents = [own for own, yes in zip(self.agents, which, strict=True) if yes] if self.agents else []
        return _Ends._make([*(column[which] for column in self[:5]), agents])


class EpisodeTracker(Stateful):
    """Tracks the running episode of each slot, assigns episode ids, and collects finished episodes.

    An id consists of a prefix from the runner's random stream, the index of the env and the index of the episode in it,
    so that equal seeds give equal ids.

    Args:
        prefix: The prefix of the ids.
        arena: The arena in which the episodes run.
    """

    _state = ("prefix", "t", "total", "began", "inside", "module_of", "number", "clock", "results", "advance", "moves")

    def __init__(self, prefix: str, arena: Arena) -> None:
        self.prefix = prefix
        self.env_of = arena.env_of
        self.agents = arena.agents
        self._agent_ids = Ids.of(arena.agents, arena.num_slots)
        self.named = any(agent is not None for agent in arena.agents)
        """Whether agents have names, so that several may share an env."""
        slots, envs = arena.num_slots, arena.num_envs
        self.t: Ints = np.zeros(slots, np.int64)
        """``[num_slots]``: the steps with results in the running episode, or in the last one."""
        self.total = np.zeros(slots)
        """``[num_slots]``: the sum of the rewards of these steps."""
        self.began = np.zeros(slots)
        """``[num_slots]``: when the episode began, in seconds of collecting."""
        self.inside = np.zeros(slots, bool)
        """``[num_slots]``: whether the slot has had a row in its env's running episode, if agents have names."""
        self.module_of: list[str | None] = [None] * slots
        """The module that acts for each slot."""
        self.choose: Callable[[int, int], str | None] = lambda slot, number: self.module_of[slot]
        """Called with a slot and an episode's index; returns the module that acts. `PolicyMapping` sets it."""
        self.number: Ints = np.full(envs, -1)
        """``[num_envs]``: the index of each env's running episode; -1 before the first."""
        self.clock: Ints = np.zeros(envs, np.int64)
        """``[num_envs]``: the env steps in the running episode, if agents have names."""
        self.results: Ints = np.zeros(envs, np.int64)
        """``[num_envs]``: the steps of all agents in that episode."""
        self.advance: Ints = np.zeros(envs, np.int64)
        """``[num_envs]``: the increase of ``clock`` with the newest turns."""
        self.moves = 0
        """The sum of ``advance`` over turns, since it was last set to 0."""
        self._slots_of = [np.flatnonzero(arena.env_of == env) for env in range(envs)]
        self._ended: list[_Ends] = []  # ended, but not yet finished: see `finish` and `finish_except`
        self._newest = 0  # index of the first of these that ended with the newest turns
        self._finished: list[_Ends] = []

    # -- a turn -------------------------------------------------------------------------------------------------

    def next_turns(self) -> None:
        """Begin to process a new list of turns."""
        self._newest = len(self._ended)
        if self.named:
            self.advance[:] = 0

    def note(self, turn: Turn, at: float) -> tuple[Ints, Ints]:
        """Process a turn, which came at ``at`` seconds of collecting. If it begins episodes, its ``episode`` is set.

        Returns:
            The envs whose episode it ends for all agents, and the indices of these episodes.
        """
        slots, first, done = turn.slots, turn.first, turn.done
        is_all = slots is self.env_of  # every slot, in order: indices are not needed, and would cost more than the sums
        if is_all:
            self.t += 1
            self.total += turn.reward
        else:
            self.t[slots] += 1
            self.total[slots] += turn.reward
        if turn.env_t is not None:
            self._follow_env(turn)
        if first is not None and len(rows := first.nonzero()[0]):
            begun = rows if is_all else slots[rows]
            self.t[begun], self.total[begun], self.began[begun] = 0, 0.0, at
            if turn.episode is None:
                self.number[begun if is_all else self.env_of[begun]] += 1
                turn.episode = self.number.copy() if is_all else self.number[self.env_of[slots]]
        if self.named:
            return self._end_for_agents(turn, at)
        if done is None or not len(rows := done.nonzero()[0]):
            return _NO_INTS, _NO_INTS
        ended = rows if is_all else slots[rows]
        envs = ended if is_all else self.env_of[ended]
        numbers = self.number.take(envs)
        total, t, began = self.total.take(ended), self.t.take(ended), self.began.take(ended)
        self._ended.append(_Ends(envs, numbers, total, t, at - began, []))
        return envs, numbers

    def _follow_env(self, turn: Turn) -> None:
        """Process a turn of envs whose agents have names."""
        assert turn.env_t is not None
        envs, first = self.env_of[turn.slots], turn.first
        if first is not None and first.any():
            self.inside[turn.slots[first]] = True
            if turn.episode is not None:
                before = self.number.copy()
                np.maximum.at(self.number, envs[first], turn.episode[first])
                begun = self.number > before
                self.results[begun] = 0
                self.clock[begun] = 0  # the first row may come after steps in which nobody acted
        self.results += np.bincount(envs if first is None else envs[~first], minlength=len(self.results))
        self.clock[envs[turn.env_t == 0]] = 0
        before = self.clock.copy()
        # all rows of one env have the same env_t, so it does not matter which is written last
        self.clock[envs] = np.maximum(before[envs], turn.env_t)
        moved = self.clock - before
        self.advance += moved
        self.moves += int(moved.sum())

    def _end_for_agents(self, turn: Turn, at: float) -> tuple[Ints, Ints]:
        """End the episodes of the envs ``over``. What the tracker knows of their slots holds until their next rows."""
        if (over := turn.over) is None:
            return _NO_INTS, _NO_INTS
        if turn.unacted_reward is not None:
            idle = np.flatnonzero(~np.isnan(turn.unacted_reward))
            self.t[idle], self.total[idle], self.began[idle], self.inside[idle] = 0, turn.unacted_reward[idle], at, True
            for slot in idle.tolist():
                self.module_of[slot] = self.choose(slot, int(self.number[self.env_of[slot]]))
        slots = [own[self.inside[own]] for own in (self._slots_of[env] for env in over.tolist())]
        there = np.array([len(own) > 0 for own in slots])
        if there.any():
            envs, slots = over[there], [own for own in slots if len(own)]
            agents = [[[self.agents[s], self.module_of[s], float(self.total[s])] for s in own] for own in slots]
            returns = np.array([self.total[own].sum() for own in slots])
            durations = at - np.array([self.began[own].min() for own in slots])
            self._ended.append(_Ends(envs, self.number[envs], returns, self.clock[envs], durations, agents))
            self.inside[np.concatenate(slots)] = False
        return over, self.number[over]

    def running(self, slots: Ints) -> tuple[Ints, Ints]:
        """The envs of ``slots``, and the indices of their running episodes."""
        envs = np.unique(self.env_of[slots])
        return envs, self.number[envs]

    def cut(self, envs: Ints) -> None:
        """Drop the running episodes of these envs, which failed."""
        self.inside[np.isin(self.env_of, envs)] = False
        self.clock[envs] = 0

    def abandon(self) -> None:
        """Drop all running episodes."""
        self.inside[:] = False
        self._ended.clear()
        self.clock[:] = self.advance[:] = 0

    # -- results ------------------------------------------------------------------------------------------------

    def steps_of(self, envs: Ints, *, by_clock: bool) -> int:
        """The steps of these envs, or of all their agents, in the running episode or the one that just ended."""
        if not self.named:
            return int(self.t[envs].sum())
        return int((self.clock if by_clock else self.results)[envs].sum())

    def episode(self, env: int, number: int) -> Episode:
        """The ``number``-th episode of an env."""
        return Episode(_ID(self.prefix, env, number), env, number)

    def ids(self, slots: Ints, numbers: Ints) -> tuple[Ids, Ids]:
        """The episode ids and agent ids of ``slots``, whose episodes have the indices ``numbers``."""
        envs, names = self.env_of[slots].tolist(), np.empty(len(slots), object)
        names[:] = list(map(_ID, itertools.repeat(self.prefix), envs, numbers.tolist()))
        return Ids(names), self._agent_ids[slots]

    def finish(self, delivers: Callable[[Ints, Ints], NDArray[np.bool_]]) -> None:
        """Finish the episodes that have ended and that ``delivers`` selects (see `Limit.delivers`); drop the others."""
        if self._ended:
            ends = _joined(self._ended)
            self._finished.append(ends.select(delivers(ends.envs, ends.numbers)))
        self._ended, self._newest = [], 0

    def finish_except(self, late: NDArray[np.bool_]) -> None:
        """Finish the episodes that have ended, except those that ended in the envs ``late`` with the newest turns."""
        newest = self._ended[self._newest :]
        self._finished += self._ended[: self._newest]
        self._ended, self._newest = [], 0
        for ends in newest:
            is_late = late[ends.envs]
            if is_late.any():
                self._ended.append(ends.select(is_late))
                ends = ends.select(~is_late)
            self._finished.append(ends)

    def finished(self) -> set[Key]:
        """The episodes that `take_finished` returns next."""
        return {key for ends in self._finished for key in zip(ends.envs.tolist(), ends.numbers.tolist(), strict=True)}

    def take_finished(self) -> Finished:
        """The episodes finished since the last call."""
        none = _Ends(_NO_INTS, _NO_INTS, np.zeros(0), _NO_INTS, np.zeros(0), [])
        given, self._finished = _joined([none, *self._finished]), []
        envs, numbers, returns, lengths, durations, ended = given
        by_agent: dict[str, list[float]] = {}
        by_module: dict[str, list[float]] = {}
        for parts in ended:
            own: dict[str, list[float]] = {}
            for agent, module, total in parts:
                if agent is not None:
                    by_agent.setdefault(agent, []).append(total)
                if module is not None:
                    own.setdefault(module, []).append(total)
            for module, totals in own.items():
                by_module.setdefault(module, []).append(sum(totals) / len(totals))
        agents, modules = (
            {name: np.array(values) for name, values in sorted(by.items())} for by in (by_agent, by_module)
        )
        return Finished(returns, lengths, agents, modules, durations, envs, numbers)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data and arrays, for `load_state_dict`."""
        ends = {"ended": self._ended, "finished": self._finished}
        plain = {name: [list(copy.deepcopy(one)) for one in given] for name, given in ends.items()}
        return super().state_dict() | plain | {"newest": self._newest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        super().load_state_dict(state)
        self._ended, self._finished = (list(map(_Ends._make, state[name])) for name in ("ended", "finished"))
        self._newest = state["newest"]

    def renew(self, prefix: str) -> None:
        """Count episodes from 0 again, for new envs, with other ids than before."""
        self.prefix = prefix
        self.number[:] = -1


def _joined(parts: Sequence[_Ends]) -> _Ends:
    *columns, agents = zip(*parts, strict=True)
    return _Ends._make([*map(np.concatenate, columns), list(itertools.chain(*agents))])
