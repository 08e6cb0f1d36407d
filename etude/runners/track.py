# SPDX-License-Identifier: Apache-2.0
"""Track: one module in a runner: how it acts, and the log of what was lived through with it."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.connectors import Inputs, Pipeline
from etude.envs import Turn
from etude.experience import Experience, Segments
from etude.modules import Actor, Module
from etude.runners.log import Log
from etude.spaces import leaf_dtype, leaf_shape, leaves

SLOT = "slot"
FIRST = "first"
EPISODE = "episode"
BLIND = "blind"
AT = "at"  # seconds of collecting until the row came
_SILENT = "silent"  # the row brings no result of a step
_FAILED = "failed"  # the env failed after this row, which ends the episode
_FINISHED = "finished"
_SEEN = "module/"  # what the module saw, where connectors changed it
_HIDDEN = frozenset((SLOT, FIRST, EPISODE, AT, _SILENT, BLIND, _FAILED, _FINISHED, col.TERMINATED, col.TRUNCATED))
_ORDER = {name: i for i, name in enumerate((col.OBS, col.ACTION, col.REWARD))}  # others behind them, as written


class Steps(NamedTuple):
    """Rows of a log that are steps, a slot's after another's and in order of time, and the rows that answer them."""

    rows: NDArray[np.int64]
    answers: NDArray[np.int64]
    last: NDArray[np.int64]
    """Where, in these, each segment ends."""
    later: NDArray[np.int64]
    """``[segments]``: how many episodes of the slot begin after the one that the segment is of."""

    @property
    def begins(self) -> NDArray[np.int64]:
        """Where each segment begins."""
        return np.append(0, self.last[:-1] + 1) if len(self.last) else self.last

    def select(self, which: NDArray[np.bool_]) -> "Steps":
        """Only some of the segments."""
        lengths = np.diff(self.last, prepend=-1)
        steps = np.repeat(which, lengths)
        return Steps(self.rows[steps], self.answers[steps], np.cumsum(lengths[which]) - 1, self.later[which])


class Track:
    """Acts with one module for any slots, and keeps a row of each turn that one of them has.

    A row holds what the slot showed, what its last action brought, and what the module did about it: so a step is a
    row with what the slot's next row brings.
    """

    def __init__(self, module: Module, connectors: Pipeline, module_id: str | None, num_slots: int) -> None:
        self.module = module
        self.connectors = connectors
        self.module_id = module_id
        self.log = Log()
        self._actors: dict[bool, Actor] = {}
        self._actor: Actor | None = None
        self._explore = True
        self._nowhere = np.zeros(num_slots, bool)
        self._state: Columns = {
            name: np.zeros((num_slots, *value.shape), value.dtype) for name, value in module.initial_state().items()
        }
        self._prev: Columns = {}
        if connectors.observes:
            for name, leaf in leaves(module.action_space, col.ACTION).items():
                self._prev[name] = np.zeros((num_slots, *leaf_shape(leaf)), leaf_dtype(leaf))
        connectors.start(num_slots)

    def start(self, rng: np.random.Generator, explore: bool) -> None:
        """Be ready to act."""
        if explore not in self._actors:
            self._actors[explore] = self.module.actor(explore=explore)
        self.module.eval()  # nothing is dropped out while acting; the learner goes back to training mode
        self._explore, self._actor = explore, self._actors[explore]
        self._actor.start(rng, len(self._nowhere))

    # -- a turn -------------------------------------------------------------------------------------------------

    def note(self, turn: Turn, at: float, silent: NDArray[np.bool_] | None = None) -> int:
        """Keep what a turn shows, and give the number of its first row.

        Args:
            turn: All its rows are this module's.
            at: When it came: seconds of collecting until then.
            silent: The rows that bring no result of a step, beside those that are ``first``. None is none.
        """
        log = self.log
        values = {SLOT: turn.slots, col.REWARD: turn.reward, AT: np.asarray(at), **turn.obs}
        if turn.first is not None:
            values[FIRST] = turn.first
        if silent is not None:
            values[_SILENT] = silent
        if turn.terminated is not None:
            values[col.TERMINATED] = turn.terminated
        if turn.truncated is not None:
            values[col.TRUNCATED] = turn.truncated
        if turn.blind is not None:
            values[BLIND] = turn.blind
        if turn.env_t is not None and turn.episode is not None:
            values[col.ENV_T], values[EPISODE] = turn.env_t, turn.episode
        start = log.append(len(turn.slots), values)
        if turn.taken is not None:
            self._correct(turn.slots[turn.taken[0]], self.connectors.unact(turn.taken[1]), start)
        return start

    def _correct(self, slots: NDArray[np.int64], action: Columns, before: int) -> None:
        """Write the actions that were really taken into the last row of each of ``slots`` before a row of the log."""
        columns = self.log.columns
        row_of = np.full(len(self._nowhere), -1)
        row_of[columns[SLOT][:before]] = np.arange(before)  # of a slot's rows, the last one stays
        there = row_of[slots] >= 0
        rows = row_of[slots[there]]
        for name, column in action.items():
            columns[name][rows] = column[there]
            if self._prev:
                self._prev[name][slots] = column
        if _FINISHED in columns and col.LOGP in columns:
            again = rows[columns[_FINISHED][rows]]
            columns[col.LOGP][again] = self._added(again)[col.LOGP]

    def seen(self, turn: Turn) -> Columns:
        """What the module is shown of a turn: behind the connectors."""
        slots, first, reward = turn.slots, turn.first, turn.reward
        prev = {name: column[slots] for name, column in self._prev.items()}
        if first is None:
            first = self._nowhere[: len(slots)]
        elif first.any():
            reward = np.where(first, 0.0, reward)
            for column in prev.values():
                column[first] = 0
        return self.connectors.online(Inputs(slots, turn.obs, first, prev, reward)).obs

    def act(self, turn: Turn, start: int, seen: Columns) -> Columns:
        """What the module does about a turn whose rows in the log begin at ``start``."""
        assert self._actor is not None
        rows = slice(start, start + len(turn.slots))
        state = self._state_in(turn) if self._state else None
        done = [flag for flag in (turn.terminated, turn.truncated) if flag is not None]
        ends = np.logical_or.reduce(done) if done and self.module.mask is not None else None
        action, extras = self._actor.step(seen, state, ends=ends)
        if state is not None:
            for name, column in self._state.items():
                column[turn.slots] = extras.pop(f"{col.STATE_OUT}/{name}")
            self.log.write(rows, state)
        if self.connectors.observes:
            self.log.write(rows, {_SEEN + name: column for name, column in seen.items()})
            for name, column in self._prev.items():
                column[turn.slots] = action[name]
        self.log.write(rows, action | extras)
        return action

    def _state_in(self, turn: Turn) -> Columns:
        state = {f"{col.STATE_IN}/{name}": column.take(turn.slots, axis=0) for name, column in self._state.items()}
        if turn.first is not None and turn.first.any():
            initial = self.module.initial_state()
            for name, column in state.items():
                column[turn.first] = initial[name.removeprefix(f"{col.STATE_IN}/")]
        return state

    def silence(self, rows: NDArray[np.int64]) -> None:
        """Let rows bring no result: they come again."""
        self.log.flag(_SILENT)[rows] = True

    def cut(self, slots: NDArray[np.int64]) -> None:
        """Truncate the running episodes of ``slots``, whose env failed, at what they were shown last."""
        log, n = self.log, self.log.size
        slot = log.columns.get(SLOT, np.zeros(0, np.int64))[:n]
        for failed in slots:
            last = np.flatnonzero(slot == failed)[-1:]
            if not self._ended(last).any():
                log.flag(col.TRUNCATED)[last] = log.flag(_FAILED)[last] = True

    def _ended(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self.log.flag(col.TERMINATED)[rows] | self.log.flag(col.TRUNCATED)[rows]

    # -- cutting ------------------------------------------------------------------------------------------------

    def steps(self) -> Steps:
        """The steps whose results have come."""
        log, n = self.log, self.log.size
        if not n:
            nothing = np.zeros(0, np.int64)
            return Steps(nothing, nothing, nothing, nothing)
        slots = log.columns[SLOT][:n]
        order = np.argsort(slots.astype(np.uint16) if len(self._nowhere) < 1 << 16 else slots, kind="stable")
        slot, first = slots[order], log.flag(FIRST)[order]
        goes_on = slot[1:] == slot[:-1]
        is_step = np.zeros(n, bool)
        np.logical_and(goes_on, ~(first | log.flag(_SILENT)[order])[1:], out=is_step[:-1])
        is_step &= ~self._ended(order)
        index = np.flatnonzero(is_step)
        last = np.flatnonzero(np.append(index[1:] != index[:-1] + 1, True)) if len(index) else index
        begun = np.cumsum(first)
        slot_ends = np.append(np.flatnonzero(~goes_on), n - 1)  # of each slot, the last row in this order
        after = begun[slot_ends][np.searchsorted(slot_ends, index[last])] - begun[index[last]]
        return Steps(order[index], order[index + 1], last, after)

    def finish(self, rows: NDArray[np.int64]) -> Columns:
        """The columns that are cheaper to compute for all rows at once than turn by turn.

        Where a row was finished by an earlier collection, with the weights that acted, that stays.
        """
        columns, added = self.log.columns, self._added(rows)
        if _FINISHED in columns:
            before = np.flatnonzero(columns[_FINISHED][rows])
            if len(before):
                for name, values in added.items():
                    values[before] = columns[name][rows[before]]
        return added

    def _added(self, rows: NDArray[np.int64]) -> Columns:
        assert self._actor is not None
        columns, take = self.log.columns, self.log.take
        seen = [name for name in columns if name.startswith(_SEEN)] or col.under(columns, col.OBS)
        return self._actor.finish(
            {name.removeprefix(_SEEN): take(name, rows) for name in seen},
            {name: take(name, rows) for name in (col.DIST_INPUTS, col.VALUE) if name in columns},
            {name: take(name, rows) for name in col.under(columns, col.ACTION)},
        )

    def columns_of(self, steps: Steps) -> tuple[Columns, Columns]:
        """The columns of steps, in the order of Experience, and what the slots showed after each segment."""
        log, columns = self.log, self.log.columns
        added = self.finish(steps.rows)
        names = [name for name in columns if name not in _HIDDEN and not name.startswith(_SEEN) and name not in added]
        names.sort(key=lambda name: _ORDER.get(name.partition(col.SEPARATOR)[0], len(_ORDER)))
        taken = {name: log.take(name, steps.answers if name == col.REWARD else steps.rows) for name in names}
        ends = steps.answers[steps.last]
        final_obs = {name: log.take(name, ends) for name in col.under(columns, col.OBS)}
        if BLIND in columns:
            for values in final_obs.values():
                values[columns[BLIND][ends]] = 0
        return {**taken, **added}, final_obs

    def nothing(self) -> Experience:
        """No steps, with all columns."""
        none = np.zeros(0, np.int64)
        columns, final_obs = self.columns_of(Steps(none, none, none, none))
        return Experience(columns, np.zeros(1, np.int64), Segments.of(0, episode_id=[]), final_obs)

    def flags_of(self, steps: Steps) -> dict[str, NDArray[np.bool_]]:
        """``terminated``, ``truncated``, ``has_final_obs``, ``first`` and ``failed`` of each segment."""
        log, ends = self.log, steps.answers[steps.last]
        return {
            col.TERMINATED: log.flag(col.TERMINATED)[ends],
            col.TRUNCATED: log.flag(col.TRUNCATED)[ends],
            "has_final_obs": ~log.flag(BLIND)[ends],
            FIRST: log.flag(FIRST)[steps.rows[steps.begins]],
            "failed": log.flag(_FAILED)[ends],
        }

    def spans_of(self, steps: Steps) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """When the first observation of each segment was shown, and its last: seconds of collecting."""
        return self.log.take(AT, steps.rows[steps.begins]), self.log.take(AT, steps.answers[steps.last])

    def forget(self, steps: Steps, held: NDArray[np.int64], *, keep_results: bool = False) -> None:
        """Drop the rows of steps that were given out, rows that will come again (``held``), and rows of no more use.

        With ``keep_results``, what the rows that stay have brought was not given out either.
        """
        log, n = self.log, self.log.size
        keep = np.ones(n, bool)
        keep[steps.answers[steps.last] if keep_results else self._ended(np.arange(n))] = False
        keep[steps.rows] = False
        keep[held] = False
        rows = np.flatnonzero(keep)
        if not len(rows):
            log.keep(rows)
            return
        added = self.finish(rows)
        log.keep(rows)
        yes = np.ones(len(rows), bool)
        log.write(slice(0, len(rows)), {**added, _FINISHED: yes})
        if not keep_results:
            log.write(slice(0, len(rows)), {_SILENT: yes})

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The log, the connectors and what slots remember: plain data and arrays."""
        return {
            "log": self.log.state_dict(),
            "size": self.log.size,
            "connectors": self.connectors.state_dict(),
            "state": {name: column.copy() for name, column in self._state.items()},
            "prev": {name: column.copy() for name, column in self._prev.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict` of as many slots."""
        self.connectors.load_state_dict(state["connectors"])
        self.log.load_state_dict(state["log"], state["size"])
        for own, stored in ((self._state, state["state"]), (self._prev, state["prev"])):
            for name, column in own.items():
                column[:] = stored[name]

    def clear(self) -> None:
        """Forget what was not delivered."""
        self.log.keep(np.zeros(0, np.int64))
