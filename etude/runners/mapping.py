# SPDX-License-Identifier: Apache-2.0
"""PolicyMapping: which module acts for which slot."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.envs import Arena, Turn
from etude.errors import EtudeError
from etude.runners.episodes import Episode, EpisodeTracker
from etude.runners.rollout import Rollout

Ints: TypeAlias = NDArray[np.int64]

ModuleOf: TypeAlias = Callable[[Any, Episode], str]
"""``module_of(agent_id, episode)`` returns the id of the module that acts for an agent in an episode."""


@dataclasses.dataclass(slots=True)
class Share:
    """The rows of a turn that one module acts for."""

    rollout: Rollout
    turn: Turn
    """The turn, with these rows only."""
    whole: Turn
    """The whole turn."""
    nth: int
    """The index of the turn in the list that `Arena.recv` returned."""
    rows: Ints | None = None
    """The indices of the rows in the whole turn; None: all."""
    start: int = 0
    """The number of rows in the rollout between `Rollout.pending` and the first of these rows."""
    results: Ints | None = None
    """The rows whose results count for the running collection, or, once it is cut, for the next. None: all except rows
    that begin an episode."""

    def new_results(self) -> Ints:
        """The rows whose results count."""
        if self.results is not None:
            return self.results
        first = self.turn.first
        return np.arange(len(self.turn.slots)) if first is None else np.flatnonzero(~first)


class PolicyMapping:
    """Maps slots to modules: calls ``module_of`` when an agent begins an episode, and keeps the module until its end.

    Args:
        rollouts: The rollouts by module id. A single module acts for all slots, and ``module_of`` may then be None.
        module_of: See `ModuleOf`. None: each agent has the module of its own name.
        arena: The arena of the slots.
        tracker: The episodes of the slots.

    Raises:
        EtudeError: there are several modules without ``module_of``, and no module with the name of some agent; or one
            module must act for agents with different spaces.
    """

    def __init__(
        self,
        rollouts: Mapping[str | None, Rollout],
        module_of: ModuleOf | None,
        arena: Arena,
        tracker: EpisodeTracker,
    ) -> None:
        self._rollouts = list(rollouts.values())
        self._index = {module_id: i for i, module_id in enumerate(rollouts)}
        self._only = self._rollouts[0] if len(self._rollouts) == 1 and module_of is None else None
        strangers = sorted({str(agent) for agent in arena.agents if agent not in self._index})
        if self._only is None and module_of is None and strangers:
            whom = "the env's agent, which has no name" if set(arena.agents) == {None} else strangers
            raise EtudeError(
                f"there are the modules {_names(self._index)}, but none for {whom}: set which module acts for an "
                "agent, as module_of=lambda agent, episode: ..., give the modules the names of the agents, or leave "
                "`modules` out."
            )
        self._module_of = module_of if module_of is not None else (lambda agent, episode: agent)
        self._arena = arena
        self._tracker = tracker
        self._of = np.zeros(arena.num_slots, np.int64)
        self._kind_of: dict[int, int] = {}
        tracker.choose = self._module_for
        if self._only is not None:
            tracker.module_of = [self._only.module_id] * arena.num_slots
            for kind, (_, _, slots) in enumerate(arena.kinds):
                self._check_spaces(0, kind, arena.agents[slots[0]])

    def split(self, turn: Turn, nth: int) -> list[Share]:
        """Split a turn, the ``nth`` that `Arena.recv` returned, into the rows of each module."""
        if self._only is not None:
            return [Share(self._only, turn, turn, nth)]
        if turn.first is not None and turn.first.any():
            self._choose(turn, np.flatnonzero(turn.first))
        of = self._of[turn.slots]
        if len(of) and (of == of[0]).all():
            return [Share(self._rollouts[of[0]], turn, turn, nth)]
        shares = []
        for i, rollout in enumerate(self._rollouts):
            rows = (of == i).nonzero()[0]
            if len(rows):
                shares.append(Share(rollout, turn.select(rows), turn, nth, rows))
        return shares

    def _choose(self, turn: Turn, rows: Ints) -> None:
        assert turn.episode is not None  # the tracker has set it, if not the arena
        for row in rows.tolist():
            slot = int(turn.slots[row])
            module_id = self._module_for(slot, int(turn.episode[row]))
            index = self._index[module_id]
            self._check_spaces(index, turn.kind, self._arena.agents[slot])
            self._of[slot] = index
            self._tracker.module_of[slot] = module_id

    def _module_for(self, slot: int, number: int) -> str | None:
        """The module that acts for a slot in its env's episode of this index."""
        if self._only is not None:
            return self._only.module_id
        agent, env = self._arena.agents[slot], int(self._arena.env_of[slot])
        module_id = self._module_of(agent, self._tracker.episode(env, number))
        if module_id not in self._index:
            raise EtudeError(
                f"module_of returned {module_id!r} for agent {agent!r}, but there is no such module: there are "
                f"{_names(self._index)}."
            )
        return module_id

    def _check_spaces(self, index: int, kind: int, agent: str | None) -> None:
        """Raise an EtudeError if a module must act for agents with different spaces."""
        if self._kind_of.setdefault(index, kind) == kind:
            return
        its, other = self._arena.kinds[kind], self._arena.kinds[self._kind_of[index]]
        module_id = self._rollouts[index].module_id
        raise EtudeError(
            f"the {'only module' if module_id is None else f'module {module_id!r}'} must act for agent {agent!r} with "
            f"the spaces {its.obs_space} and {its.action_space}, but acts for others with {other.obs_space} and "
            f"{other.action_space}: agents with different spaces need different modules."
        )

    def state_of(self, shares: Sequence[Share]) -> dict[str, Any]:
        """The current mapping, and the modules of ``shares``; plain data and arrays."""
        rows = [
            {"rollout": self._rollouts.index(share.rollout)}
            | {"start": share.rollout.pending + share.start}
            | {name: getattr(share, name) for name in ("nth", "rows", "results")}
            for share in shares
        ]
        return {"of": self._of.copy(), "shares": rows}

    def load_state(self, state: Mapping[str, Any], turns: Sequence[Turn]) -> list[Share]:
        """Restore the mapping of `state_of`, and return its shares for the same turns."""
        self._of[:] = state["of"]
        shares = []
        for each in state["shares"]:
            whole = turns[each["nth"]]
            rows, results = (None if each[name] is None else np.ravel(each[name]) for name in ("rows", "results"))
            turn = whole if rows is None else whole.select(rows)
            rollout = self._rollouts[each["rollout"]]
            shares.append(Share(rollout, turn, whole, each["nth"], rows, int(each["start"]) - rollout.pending, results))
        return shares


def _names(index: Mapping[str | None, int]) -> list[str]:
    return sorted(str(name) for name in index)
