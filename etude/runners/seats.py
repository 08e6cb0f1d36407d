# SPDX-License-Identifier: Apache-2.0
"""Seats: what is known, for callbacks, of the agents that sit in the slots of a runner."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.envs import Arena, Turn
from etude.runners.routes import Part
from etude.runners.track import BLIND, SLOT, Track
from etude.spaces import Nester

_STATE = ("steps", "returns", "rewards", "terminated", "truncated", "_track_of", "_env_t")


class Seats:
    """Keeps figures by slot, without a loop over slots; what slots are shown and do is looked up in the logs if asked.

    All arrays are ``[num_slots]``, of the running episode of each slot, or of its last one.

    Args:
        arena: Whose slots they are.
        tracks: By module id.
    """

    def __init__(self, arena: Arena, tracks: Mapping[str | None, Track]) -> None:
        self._arena = arena
        self._tracks = list(tracks.values())
        self._index = {id(track): i for i, track in enumerate(self._tracks)}
        num_slots = arena.num_slots
        self.steps = np.zeros(num_slots, np.int64)
        """Those whose results came."""
        self.returns = np.zeros(num_slots)
        """What they brought in all."""
        self.rewards = np.zeros(num_slots)
        """What the last of them brought."""
        self.terminated = np.zeros(num_slots, bool)
        self.truncated = np.zeros(num_slots, bool)
        self._rows = np.full(num_slots, -1)  # in its track's log: what is shown; -1 is nowhere
        self._before = np.full(num_slots, -1)  # and the row before, with what was done
        self._track_of = np.zeros(num_slots, np.int64)
        self._env_t = np.zeros(arena.num_envs, np.int64)
        self._turns: list[Turn] = []  # of the newest moment
        self._is_past = False  # that moment
        self._kind_of = {slot: i for i, kind in enumerate(arena.kinds) for slot in kind.slots}
        self._nest_obs = [Nester(kind.obs_space, col.OBS) for kind in arena.kinds]
        self._nest_action = [Nester(track.module.action_space, col.ACTION) for track in self._tracks]

    # -- a turn -------------------------------------------------------------------------------------------------

    def begin(self, env: int, slot: int) -> None:
        """A new episode begins in an env, with a slot of it."""
        self._env_t[env] = self.steps[slot] = 0

    def note(self, turn: Turn, parts: Sequence[Part]) -> None:
        """Take note of a turn that is in the logs."""
        if self._is_past:
            self._turns, self._is_past = [], False
        self._turns.append(turn)
        for part in parts:
            self._note(part)

    def _note(self, part: Part) -> None:
        turn = part.turn
        slots, first = turn.slots, turn.first
        self._before[slots] = self._rows[slots]
        self._rows[slots] = np.arange(part.start, part.start + len(slots))
        self.terminated[slots] = False if turn.terminated is None else turn.terminated
        self.truncated[slots] = False if turn.truncated is None else turn.truncated
        self.rewards[slots] = turn.reward
        if turn.env_t is not None:
            self._env_t[self._arena.env_of[slots]] = turn.env_t
        if first is None or not first.any():
            self.steps[slots] += 1
            self.returns[slots] += turn.reward
            return
        begun = slots[first]
        self.rewards[begun] = 0.0
        self.steps[slots] += 1
        self.returns[slots] += self.rewards[slots]
        self.steps[begun], self.returns[begun] = 0, 0.0
        self._before[begun] = -1
        self._track_of[begun] = self._index[id(part.track)]

    def all_noted(self) -> None:
        """Other turns will be of another moment."""
        self._is_past = True

    def forget(self) -> None:
        """The logs have been cut: nothing is where it was."""
        self._rows[:] = -1
        self._before[:] = -1

    def find(self) -> None:
        """Find again in the logs what is shown."""
        for i, track in enumerate(self._tracks):
            if track.log.size:
                slots = track.log.columns[SLOT][: track.log.size]
                mine = np.flatnonzero(self._track_of[slots] == i)
                self._rows[slots[mine]] = mine  # where a slot has several rows, the last one counts

    # -- what is asked for --------------------------------------------------------------------------------------

    def t(self, env: int) -> int:
        """The steps that an env made in its running episode."""
        return int(self._env_t[env] if self._arena.agents[0] is not None else self.steps[env])

    def module_id(self, slot: int) -> str | None:
        """What acts for a slot."""
        return self._track(slot).module_id

    def obs(self, slot: int) -> Any:
        """What a slot is shown, as its env gave it."""
        row, columns = int(self._rows[slot]), self._track(slot).log.columns
        if row < 0 or (BLIND in columns and columns[BLIND][row]):
            return None
        nest = self._nest_obs[self._kind_of[slot]]
        return nest({name: columns[name][row].copy() for name in col.under(columns, col.OBS)})

    def action(self, slot: int) -> Any:
        """What was done before, as its module chose it."""
        row, columns = int(self._before[slot]), self._track(slot).log.columns
        if row < 0:
            return None
        nest = self._nest_action[self._track_of[slot]]
        return nest({name: columns[name][row].copy() for name in col.under(columns, col.ACTION)})

    def info(self, slot: int) -> Any:
        """What the env said beside."""
        if self._rows[slot] < 0:
            return None
        for turn in reversed(self._turns):
            if slot in turn.slots:
                return self._arena.info_of(turn, slot)
        return {}

    def _track(self, slot: int) -> Track:
        return self._tracks[int(self._track_of[slot])]

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All but what `find` finds."""
        return {name: getattr(self, name).copy() for name in _STATE}

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from `state_dict`."""
        for name in _STATE:
            getattr(self, name)[:] = state[name]
