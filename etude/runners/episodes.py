# SPDX-License-Identifier: Apache-2.0
"""Which episode each slot is in, and what finished episodes brought."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.envs import Turn
from etude.experience import Segments

Key: TypeAlias = tuple[int, int]
"""An env, and which of its episodes."""


class Episode(NamedTuple):
    """An episode of one running copy of an env."""

    id: str
    """As in ``episode_id``; unlike any other's."""
    env: int
    """Which copy of the env, from 0."""
    number: int
    """Which of that copy's episodes, from 0."""


class Finished(NamedTuple):
    """Episodes that ended, in the order in which their ends were collected."""

    returns: NDArray[np.float64]
    """The sum of each episode's rewards, over all agents."""
    lengths: NDArray[np.int64]
    """The steps of each episode: the env's, where there are several agents."""
    agent_returns: dict[str, NDArray[np.float64]]
    """The returns of each agent, by its name, in the episodes that it was in; {} where agents have no names."""
    module_returns: dict[str, NDArray[np.float64]]
    """Likewise by module: the mean over its agents in each episode."""
    durations: NDArray[np.float64]
    """Seconds from each episode's first observation to its last, those left out in which nothing was collected."""
    envs: NDArray[np.int64]
    """Which copy of the env each was in."""
    numbers: NDArray[np.int64]
    """Which of that copy's episodes each was."""
    custom: dict[str, NDArray[np.float64]] = {}  # noqa: RUF012  never written to
    """What callbacks logged, by name: a figure for each episode in which they did."""
    histograms: dict[str, NDArray[np.float64]] = {}  # noqa: RUF012
    """Values that they logged to see how they are spread, all together."""
    media: dict[str, bytes] = {}  # noqa: RUF012
    """Pictures (PNG) and clips (GIF) that they logged, the newest of each name."""


class _Ended(NamedTuple):
    """One agent's part in an episode that ended for it."""

    agent: str | None
    module: str | None
    total: float
    length: int
    began: float
    ended: float


class EpisodeBook:
    """Keeps, for each slot, the running episode's steps and return so far, and gives episodes their ids.

    An id is a prefix drawn from the runner's random stream, the env and the number of its episode: equal for equal
    seeds.
    """

    def __init__(self, prefix: str, env_of: NDArray[np.int64], agents: list[str | None]) -> None:
        self._prefix = prefix
        self._env_of = env_of
        self._agents = agents
        self.named = any(agent is not None for agent in agents)
        """Agents have names: several may share an env."""
        num_slots = len(agents)
        self.begun = np.zeros(num_slots, np.int64)
        """``[num_slots]``: the episodes that were begun."""
        self.t = np.zeros(num_slots, np.int64)
        """``[num_slots]``: the index of the next step in the running episode."""
        self._return = np.zeros(num_slots)
        self._began = np.zeros(num_slots)
        self._entered: list[tuple[NDArray[Any], ...]] = []
        self._number = np.zeros(int(env_of.max(initial=0)) + 1, np.int64)
        self._ended: dict[Key, list[_Ended]] = {}
        self._finished: list[tuple[Key, list[_Ended]]] = []
        self._plain: list[tuple[NDArray[Any], ...]] = []  # likewise, where agents have no names

    def episode(self, env: int, number: int) -> Episode:
        """The ``number``-th episode of an env."""
        return Episode(f"{self._prefix}-{env}-{number}", env, number)

    def begin(self, turn: Turn) -> None:
        """Take note of the episodes that a turn begins."""
        assert turn.first is not None
        if turn.episode is None:
            self.begun[turn.slots] += turn.first
        else:
            np.maximum.at(self._number, self._env_of[turn.slots[turn.first]], turn.episode[turn.first])

    def running(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The envs of ``slots``, which are in an episode, and which of their episodes that is."""
        envs, at = np.unique(self._env_of[slots], return_index=True)
        return envs, self._number[envs] if self.named else self.begun[slots[at]] - 1

    def number_of(self, env: int) -> int:
        """Which of its episodes an env with named agents is in."""
        return int(self._number[env])

    def ends(self, turn: Turn) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The envs whose episode a turn ends for all agents, and which of their episodes that is."""
        if self.named:
            envs = np.zeros(0, np.int64) if turn.over is None else turn.over
            return envs, self._number[envs]
        flags = [flag for flag in (turn.terminated, turn.truncated) if flag is not None]
        if not flags:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        slots = turn.slots[np.logical_or.reduce(flags)]
        return self._env_of[slots], self.begun[slots] - 1

    def enter(
        self,
        slots: NDArray[np.int64],
        numbers: NDArray[np.int64],
        lengths: NDArray[np.int64],
        returns: NDArray[np.float64],
        flags: Mapping[str, NDArray[np.bool_]],
        module_id: str | None,
        spans: tuple[NDArray[np.float64], NDArray[np.float64]],
        clock: NDArray[np.int64] | None = None,
    ) -> Segments:
        """Enter segments, grouped by slot and in order of time in each, and say whose they are.

        Args:
            slots: The slot of each segment.
            numbers: Which of its env's episodes it is of.
            lengths: Its steps.
            returns: The sum of its rewards.
            flags: ``terminated``, ``truncated``, ``has_final_obs``; ``first`` where it begins its episode, and
                ``failed`` where that was cut because its env failed, and so counts as no finished episode.
            module_id: What acted.
            spans: When its first observation was shown, and its last: seconds of collecting.
            clock: The env's steps at its end; None where they are the slot's own.
        """
        new, done = flags["first"], flags[col.TERMINATED] | flags[col.TRUNCATED]
        t_start = np.where(new, 0, self.t[slots])
        totals = returns + np.where(new, 0.0, self._return[slots])
        ends = t_start + lengths
        last = np.append(slots[1:] != slots[:-1], True) & ~done
        began = np.where(new, spans[0], self._began[slots])
        self._entered.append((slots[last], ends[last], totals[last], began[last]))
        ended, finished = (totals, ends if clock is None else clock, began, spans[1]), done & ~flags["failed"]
        self._end(slots[finished], numbers[finished], module_id, *(column[finished] for column in ended))
        envs = self._env_of[slots]
        ids = np.empty(len(slots), object)
        ids[:] = [f"{self._prefix}-{env}-{n}" for env, n in zip(envs.tolist(), numbers.tolist(), strict=True)]
        agents = None
        if self.named:
            agents = np.empty(len(slots), object)
            agents[:] = [self._agents[slot] for slot in slots.tolist()]
        return Segments.of(
            len(slots),
            episode_id=ids,
            agent_id=agents,
            module_id=module_id,
            t_start=t_start,
            terminated=flags[col.TERMINATED],
            truncated=flags[col.TRUNCATED],
            has_final_obs=flags["has_final_obs"],
        )

    def _end(
        self, slots: NDArray[np.int64], numbers: NDArray[np.int64], module_id: str | None, *columns: NDArray[Any]
    ) -> None:
        """Take note of what ended; the columns are those of `_Ended`, in its order."""
        envs = self._env_of[slots]
        if not self.named:
            totals, lengths, began, ended = columns
            self._plain.append((totals, lengths, ended - began, envs, numbers))
            return
        keys = zip(envs.tolist(), numbers.tolist(), strict=True)
        for slot, key, *values in zip(slots.tolist(), keys, *(column.tolist() for column in columns), strict=True):
            self._ended.setdefault(key, []).append(_Ended(self._agents[slot], module_id, *values))

    def finish(self, overs: Iterable[Key], later: Collection[Key]) -> None:
        """All segments of a collection are entered.

        Args:
            overs: Episodes of named agents that have ended for all of them.
            later: Those of which something is still to be entered.
        """
        # only now: an earlier episode of a slot may have been another module's
        for slots, t, totals, began in self._entered:
            self.t[slots], self._return[slots], self._began[slots] = t, totals, began
        self._entered.clear()
        self._finished += [(key, self._ended.pop(key)) for key in overs if key in self._ended]
        # what ended for some agents, and then broke off for the others, counts for nothing
        self._ended = {
            key: ended for key, ended in self._ended.items() if key in later or key[1] == self._number[key[0]]
        }

    def abandon(self) -> None:
        """All running episodes end here, and count for nothing."""
        self._ended.clear()
        self._entered.clear()

    def finished(self) -> set[Key]:
        """The episodes that `take_finished` gives next."""
        plain = [zip(part[-2].tolist(), part[-1].tolist(), strict=True) for part in self._plain]
        return {*(key for key, _ in self._finished), *(key for keys in plain for key in keys)}

    def take_finished(self) -> Finished:
        """The episodes that ended since this was last asked."""
        if not self.named:
            none, number = np.zeros(0), np.zeros(0, np.int64)
            plain, self._plain = [(none, number, none, number, number), *self._plain], []
            returns, lengths, *others = (np.concatenate(columns) for columns in zip(*plain, strict=True))
            durations, envs, numbers = others
            return Finished(returns, lengths, {}, {}, durations, envs, numbers)
        keys, episodes = [key for key, _ in self._finished], [parts for _, parts in self._finished]
        self._finished = []
        by_agent: dict[str, list[float]] = {}
        by_module: dict[str, list[float]] = {}
        for parts in episodes:
            own: dict[str, list[float]] = {}
            for part in parts:
                if part.agent is not None:
                    by_agent.setdefault(part.agent, []).append(part.total)
                if part.module is not None:
                    own.setdefault(part.module, []).append(part.total)
            for module, totals in own.items():
                by_module.setdefault(module, []).append(sum(totals) / len(totals))
        return Finished(
            np.array([sum(part.total for part in parts) for parts in episodes], np.float64),
            np.array([max(part.length for part in parts) for parts in episodes], np.int64),
            {name: np.array(values) for name, values in sorted(by_agent.items())},
            {name: np.array(values) for name, values in sorted(by_module.items())},
            np.array([max(p.ended for p in parts) - min(p.began for p in parts) for parts in episodes], np.float64),
            np.array([env for env, _ in keys], np.int64),
            np.array([number for _, number in keys], np.int64),
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain data and arrays; goes into `load_state_dict`."""
        return {
            "prefix": self._prefix,
            "begun": self.begun.copy(),
            "number": self._number.copy(),
            "t": self.t.copy(),
            "return": self._return.copy(),
            "began": self._began.copy(),
            "ended": [[*key, [list(part) for part in parts]] for key, parts in self._ended.items()],
            "finished": [[*key, [list(part) for part in parts]] for key, parts in self._finished],
            "plain": [list(part) for part in self._plain],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._prefix = state["prefix"]
        self.begun[:], self._number[:], self.t[:] = state["begun"], state["number"], state["t"]
        self._return[:], self._began[:] = state["return"], state["began"]
        self._ended = {(env, number): [_Ended(*part) for part in parts] for env, number, parts in state["ended"]}
        self._finished = [((env, n), [_Ended(*part) for part in parts]) for env, n, parts in state["finished"]]
        self._plain = [tuple(columns) for columns in state["plain"]]

    def renew(self, prefix: str) -> None:
        """Count episodes from 0 again, as envs that are new do, and give them other ids than before."""
        self._prefix = prefix
        self.begun[:] = self._number[:] = 0
