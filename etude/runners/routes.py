# SPDX-License-Identifier: Apache-2.0
"""Routes: which module acts for which slot."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.columns import Columns
from etude.envs import Arena, Turn
from etude.errors import EtudeError
from etude.runners.episodes import Episode, EpisodeBook
from etude.runners.track import Track

ModuleOf: TypeAlias = Callable[[Any, Episode], str]
"""``module_of(agent_id, episode)``: which module acts for an agent in an episode."""


@dataclasses.dataclass(slots=True)
class Part:
    """The rows of a turn that one module acts for."""

    track: Track
    turn: Turn
    """These rows only."""
    whole: Turn
    """The turn that they are of."""
    nth: int
    """Which of the turns that came together it is of."""
    rows: NDArray[np.int64] | None = None
    """Which of the whole turn's they are; None is all."""
    start: int = 0
    """The first one's number in the log."""
    counted: NDArray[np.bool_] | None = None
    """Rows whose results count for the running collection, or, once it is cut, for the next. None: all but ``first``"""

    def counted_rows(self) -> NDArray[np.int64]:
        """The rows whose results count."""
        if self.counted is not None:
            return np.flatnonzero(self.counted)
        return np.arange(len(self.turn.slots)) if self.turn.first is None else np.flatnonzero(~self.turn.first)


class Routes:
    """Asks ``module_of`` when an agent begins an episode, and keeps to it until the next.

    Args:
        tracks: By module id; where it is one alone, it acts for all and nobody is asked.
        module_of: See `ModuleOf`. None: each agent has the module of its own name.
        arena: Whose slots they are.
        book: Which episodes they are in.

    Raises:
        EtudeError: several modules, but no ``module_of``, and agents without a module of their name; or one module for
            agents with different spaces.
    """

    def __init__(
        self, tracks: Mapping[str | None, Track], module_of: ModuleOf | None, arena: Arena, book: EpisodeBook
    ) -> None:
        self._tracks = list(tracks.values())
        self._index = {module_id: i for i, module_id in enumerate(tracks)}
        self._only = self._tracks[0] if len(self._tracks) == 1 and module_of is None else None
        strangers = sorted({str(agent) for agent in arena.agents if agent not in self._index})
        if self._only is None and module_of is None and strangers:
            raise EtudeError(
                f"there are the modules {_names(self._index)}, but none for {strangers}: say which module acts for an "
                "agent, as module_of=lambda agent, episode: ..., or name modules as the agents."
            )
        self._module_of = module_of if module_of is not None else (lambda agent, episode: agent)
        self._arena = arena
        self._book = book
        self._of = np.zeros(arena.num_slots, np.int64)
        self._kind_of: dict[int, int] = {}
        if self._only is not None:
            for kind, (_, _, slots) in enumerate(arena.kinds):
                self._fits(0, kind, arena.agents[slots[0]])

    def parts(self, turn: Turn, nth: int) -> list[Part]:
        """The ``nth`` of the turns that came together, module by module."""
        if self._only is not None:
            return [Part(self._only, turn, turn, nth)]
        if turn.first is not None:
            self._choose(turn, np.flatnonzero(turn.first))
        of = self._of[turn.slots]
        if len(of) and (of == of[0]).all():
            return [Part(self._tracks[of[0]], turn, turn, nth)]
        parts = []
        for i, track in enumerate(self._tracks):
            rows = (of == i).nonzero()[0]
            if len(rows):
                parts.append(Part(track, rows_of(turn, rows), turn, nth, rows))
        return parts

    def _choose(self, turn: Turn, rows: NDArray[np.int64]) -> None:
        for row in rows.tolist():
            slot = int(turn.slots[row])
            agent, env = self._arena.agents[slot], int(self._arena.env_of[slot])
            number = int(self._book.begun[slot]) - 1 if turn.episode is None else int(turn.episode[row])
            module_id = self._module_of(agent, self._book.episode(env, number))
            if module_id not in self._index:
                raise EtudeError(
                    f"module_of gave {module_id!r} for agent {agent!r}, but there is no such module: there are "
                    f"{_names(self._index)}."
                )
            index = self._index[module_id]
            self._fits(index, turn.kind, agent)
            self._of[slot] = index

    def _fits(self, index: int, kind: int, agent: str | None) -> None:
        """Raise an error where a module is to act for agents with different spaces."""
        if self._kind_of.setdefault(index, kind) == kind:
            return
        its, other = self._arena.kinds[kind], self._arena.kinds[self._kind_of[index]]
        module_id = self._tracks[index].module_id
        raise EtudeError(
            f"the {'only module' if module_id is None else f'module {module_id!r}'} is to act for agent {agent!r} with "
            f"the spaces {its.obs_space} and {its.action_space}, but acts for others with {other.obs_space} and "
            f"{other.action_space}: agents with different spaces need different modules."
        )

    def state_of(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Which parts of turns whose they are, and what counts in them."""
        return [
            {"track": self._tracks.index(part.track)}
            | {name: getattr(part, name) for name in ("nth", "rows", "counted")}
            for part in parts
        ]

    def load_parts(self, state: Sequence[Mapping[str, Any]], turns: Sequence[Turn]) -> list[Part]:
        """The parts of `state_of`, of the same turns."""
        parts = []
        for each in state:
            whole, rows, counted = turns[each["nth"]], each["rows"], each["counted"]
            rows = None if rows is None else np.asarray(rows, np.int64).reshape(-1)
            turn = whole if rows is None else rows_of(whole, rows)
            counted = None if counted is None else np.asarray(counted, bool).reshape(len(turn.slots))
            parts.append(Part(self._tracks[each["track"]], turn, whole, each["nth"], rows, 0, counted))
        return parts

    def state_dict(self) -> dict[str, Any]:
        """Who acts for whom now."""
        return {"of": self._of.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._of[:] = state["of"]


def rows_of(turn: Turn, rows: NDArray[np.int64]) -> Turn:
    """Some rows of a turn, as a turn; what is not of rows is left out."""

    def some(column: NDArray[Any] | None) -> Any:
        return None if column is None else column.take(rows, axis=0)

    taken = None
    if turn.taken is not None:
        there = np.isin(turn.taken[0], rows)
        if there.any():
            columns: Columns = {name: column[there] for name, column in turn.taken[1].items()}
            taken = (np.searchsorted(rows, turn.taken[0][there]), columns)
    return Turn(
        turn.slots.take(rows),
        {name: column.take(rows, axis=0) for name, column in turn.obs.items()},
        turn.reward.take(rows),
        some(turn.terminated),
        some(turn.truncated),
        some(turn.first),
        turn.kind,
        turn.waits,
        some(turn.blind),
        taken,
        some(turn.env_t),
        some(turn.episode),
    )


def _names(index: Mapping[str | None, int]) -> list[str]:
    return sorted(str(name) for name in index)
