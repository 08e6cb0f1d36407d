# SPDX-License-Identifier: Apache-2.0
"""Rollout: the observations that slots gave to one policy and its actions, and their conversion to Experience."""

import copy
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.connectors import Inputs
from etude.connectors.pipeline import check_takes_tensors
from etude.envs import Turn
from etude.errors import DataError, EnvError, EtudeError, ModuleError
from etude.experience import Experience, Segments, arrays
from etude.experience.arrays import host_columns, not_finite, ranges
from etude.experience.experience import check_finite, offsets_of
from etude.experience.ids import Ids
from etude.modules import Actor
from etude.modules.acting import as_tensor
from etude.modules.actors import tensor_actor
from etude.policies import Policy
from etude.runners.episodes import EpisodeTracker
from etude.runners.limits import Limit
from etude.spaces import leaf_dtype, leaf_shape, leaves

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SLOT = "slot"
BLIND = "blind"
_FIRST = "first"
_EPISODE = "episode"  # the episode's number, in rows that begin one
_GIVEN = "given"  # the step was returned, and is kept as context for later ones
_FLAGS = (BLIND, _FIRST, _GIVEN, col.TERMINATED, col.TRUNCATED)
_HIDDEN = frozenset((SLOT, _EPISODE, *_FLAGS))
_ORDER = {col.OBS: 0, col.ACTION: 1, col.REWARD: 2}  # 3: the others follow in the order of writing, and last `logp`


class Rows:
    """Columns ``[capacity, ...]`` that grow as needed, filled up to ``size``.

    Flags are False unless they are written. Any other column is created by its first write, as a NumPy array or a
    tensor like the values written.
    """

    def __init__(self, capacity: int = 256) -> None:
        self.columns: Columns = {name: np.zeros(capacity, bool) for name in _FLAGS}
        self.names: list[str] = []
        """The columns of Experience among these, in the order of Experience."""
        self.obs_names: list[str] = []
        """The columns of observations among those."""
        self.size = 0
        self._capacity = capacity

    def append(self, count: int, values: Mapping[str, NDArray[Any]]) -> int:
        """Add ``count`` rows; return the index of the first. Columns not given are undefined, except flags."""
        start = self.size
        self.size = stop = start + count
        if stop > self._capacity:
            self._capacity = max(stop, 2 * self._capacity)
            for name, column in self.columns.items():
                self.columns[name] = arrays.zeros(self._capacity, column)
                self.columns[name][: len(column)] = column
        self.write(slice(start, stop), values)
        return start

    def write(self, rows: slice | Ints, values: Mapping[str, NDArray[Any]]) -> None:
        """Write columns of some rows."""
        columns = self.columns
        for name, value in values.items():
            if name not in columns:
                self._add(name, value)
            columns[name][rows] = value

    def _add(self, name: str, value: NDArray[Any]) -> None:
        """Add a column for rows like those of ``value``."""
        self.columns[name] = arrays.zeros(self._capacity, value)
        if name not in _HIDDEN:
            self.names.append(name)
            self.obs_names += [name] if col.is_under(name, col.OBS) else []
            self.names.sort(key=lambda name: (_ORDER.get(name.partition(col.SEPARATOR)[0], 3), name == col.LOGP))

    def keep(self, rows: Ints) -> None:
        """Keep only ``rows``, in this order."""
        for column in self.columns.values():
            column[: len(rows)] = arrays.take(column, rows)
            if column.dtype == bool:
                column[len(rows) : self.size] = False
        self.size = len(rows)


class _Sorted(NamedTuple):
    """All rows of a rollout, sorted by slot and then by time: columns ``[n]``. An index of them is called a place."""

    order: Ints
    """The row's index in `Rows`."""
    slot: Ints
    t: Ints
    """The row's index in its episode."""
    number: Ints
    """The number of its episode."""
    done: Bools
    """Whether its episode ends with the row."""
    is_open: Bools
    """Whether the row is a step with a known result that was not returned yet."""
    context: Ints
    """The place of the first row that connectors need to compute the observation of the row."""


class Rollout:
    """Acts with one policy for any slots, and stores a row for each of their observations.

    A row holds an observation, the result of the slot's previous action, and the module's outputs. A step is a row
    together with the reward in the slot's next row.

    Args:
        policy: The policy that acts.
        module_id: The name of its module; None for a single, unnamed module.
        num_slots: The number of slots in the arena.
    """

    def __init__(self, policy: Policy, module_id: str | None, num_slots: int) -> None:
        self.module = module = policy.module
        self.connectors = connectors = policy.connectors
        self.module_id = module_id
        self._module_ids = Ids.of(module_id, num_slots)
        self.rows = Rows()
        self.pending = 0
        """The index of the first row that has not been acted on; all later rows haven't either."""
        self._acted = 0  # first row that was acted on in this collection
        self._actors: dict[bool, Actor] = {}
        self._actor: Actor | None = None
        self._nowhere = np.zeros(num_slots, bool)
        self._t = np.zeros(num_slots, np.int64)  # by slot: index of its first row in the episode
        self._number = np.zeros(num_slots, np.int64)  # by slot: number of the episode of its first row
        self._memory: Columns = {
            name: np.zeros((num_slots, *value.shape), value.dtype) for name, value in module.initial_state().items()
        }
        self._prev: Columns = {}
        self._actions = leaves(module.action_space, col.ACTION)
        if connectors.observes:
            for name, leaf in self._actions.items():
                self._prev[name] = np.zeros((num_slots, *leaf_shape(leaf)), leaf_dtype(leaf))
        connectors.start(num_slots)

    def start(self, rng: np.random.Generator, explore: bool) -> None:
        """Prepare to act."""
        if explore not in self._actors:
            self._actors[explore] = self._make_actor(explore)
        if self.module.training:
            self.module.eval()  # no dropout while acting; the learner switches back to training mode
        self._actor = self._actors[explore]
        self._actor.start(rng, len(self._nowhere))

    def _make_actor(self, explore: bool) -> Actor:
        return self.module.actor(explore=explore)

    def clear(self) -> None:
        """Drop all rows, because every slot begins a new episode."""
        self.rows.keep(np.zeros(0, np.int64))
        self.pending = self._acted = 0

    # -- a turn -------------------------------------------------------------------------------------------------

    def note(self, turn: Turn) -> int:
        """Store the rows of a turn, all of which are for this module; return the first's distance from `pending`."""
        values = {SLOT: turn.slots, col.REWARD: turn.reward, **turn.obs}
        if turn.first is not None:
            values[_FIRST] = turn.first
            if turn.episode is not None:
                values[_EPISODE] = turn.episode
        if turn.terminated is not None:
            values[col.TERMINATED] = turn.terminated
        if turn.truncated is not None:
            values[col.TRUNCATED] = turn.truncated
        if turn.blind is not None:
            values[BLIND] = turn.blind
        if turn.env_t is not None:
            values[col.ENV_T] = turn.env_t
        start = self.rows.append(len(turn.slots), values)
        if turn.taken is not None:
            self._correct(turn.slots[turn.taken[0]], self.connectors.unact(turn.taken[1]), start)
        return start - self.pending

    def _correct(self, slots: Ints, action: Columns, before: int) -> None:
        """Write the actions that were really taken into the last row of each of ``slots`` before row ``before``."""
        columns, rows = self.rows.columns, self._last_rows(slots, before)
        there = rows >= 0
        rows = rows[there]
        for name, column in action.items():
            columns[name][rows] = column[there]
            if self._prev:
                self._prev[name][slots] = column
        self._write_logp(rows[rows < self._acted])

    def _last_rows(self, slots: Ints, before: int) -> Ints:
        """The last row of each of ``slots`` before row ``before``; -1 if there is none."""
        row_of = np.full(len(self._nowhere), -1)
        if before:
            row_of[self.rows.columns[SLOT][:before]] = np.arange(before)  # a slot's last row wins
        return row_of[slots]

    def act(self, turn: Turn, start: int, times: dict[str, float]) -> Columns:
        """The actions for the env in a turn, given what `note` returned; ``times`` adds up the seconds by phase."""
        assert self._actor is not None
        begin = perf_counter()
        seen = turn.obs
        if self.connectors.observes:
            seen = self._seen(turn)
            shown = perf_counter()
            times["observe"] += shown - begin
            begin = shown
        start += self.pending
        rows, state = slice(start, start + len(turn.slots)), self._state_in(turn) if self._memory else None
        action, extras = self._actor.step(seen, state, ends=turn.done if self.module.mask is not None else None)
        if state is not None:
            for name, column in self._memory.items():
                column[turn.slots] = extras.pop(f"{col.STATE_OUT}/{name}")
            self.rows.write(rows, state)
        for name, column in self._prev.items():
            column[turn.slots] = action[name]
        self.rows.write(rows, action | extras)
        acted = perf_counter()
        times["infer"] += acted - begin
        if self.connectors.acts:
            action = self.connectors.act(action)
            times["act"] += perf_counter() - acted
        return action

    def _seen(self, turn: Turn) -> Columns:
        """The module's inputs from a turn, after the connectors."""
        slots, first, reward = turn.slots, turn.first, turn.reward
        prev = {name: column[slots] for name, column in self._prev.items()}
        if first is None:
            first = self._nowhere[: len(slots)]
        elif first.any():
            reward = np.where(first, 0.0, reward)
            for column in prev.values():
                column[first] = 0
        return self.connectors.online(Inputs(slots, turn.obs, first, prev, reward)).obs

    def _state_in(self, turn: Turn) -> Columns:
        state = col.prefixed({name: arrays.take(c, turn.slots) for name, c in self._memory.items()}, col.STATE_IN)
        if turn.first is not None and turn.first.any():
            for column in state.values():
                column[turn.first] = 0  # as in `Module.initial_state`
        return state

    def fail(self, slots: Ints) -> None:
        """Truncate the running episodes of ``slots``, whose env failed, at their last observation."""
        columns, last = self.rows.columns, self._last_rows(slots, self.rows.size)
        last = last[last >= 0]
        columns[col.TRUNCATED][last] |= ~columns[col.TERMINATED][last]

    # -- cutting ------------------------------------------------------------------------------------------------

    def cut(self, limit: Limit, late: Sequence[Ints], tracker: EpisodeTracker) -> Experience | None:
        """The steps with known results, as segments; None if there are none. Rows needed later are kept.

        Args:
            limit: Selects the episodes to return, if only whole episodes are returned.
            late: The rows whose results belong to the next collection, by their distance from `pending`.
            tracker: Provides the ids of episodes.
        """
        if not self.rows.size:
            return None
        columns, acted = self.rows.columns, slice(self._acted, self.pending)
        done = columns[col.TERMINATED][acted] | columns[col.TRUNCATED][acted]
        self._write_logp(self._acted + np.flatnonzero(~done) if done.any() else acted)
        rows = self._sorted()
        returned = rows.is_open
        if late:
            is_late = np.isin(rows.order[1:], self.pending + np.concatenate(late))
            returned = returned & ~np.append(is_late, False)
        edges = np.flatnonzero(np.diff(returned, prepend=False))
        begins, ends = edges[::2], edges[1::2]  # no segment holds two episodes, as an episode's last row is no step
        if limit.by_episode:
            which = limit.delivers(tracker.env_of[rows.slot[begins]], rows.number[begins])
            begins, ends = begins[which], ends[which]
        exp = self._experience(rows, begins, ends, tracker) if len(begins) else None
        self._keep_needed(rows, ranges(begins, ends - begins))
        return exp

    def _sorted(self) -> _Sorted:
        columns, n = self.rows.columns, self.rows.size
        slots = columns[SLOT][:n]
        order = np.argsort(slots.astype(np.uint16) if len(self._nowhere) < 1 << 16 else slots, kind="stable")
        slot, first, place = slots[order], columns[_FIRST][order], np.arange(n)
        done = (columns[col.TERMINATED][:n] | columns[col.TRUNCATED][:n])[order]
        is_start = first | (np.diff(slot, prepend=-1) != 0)
        start = np.maximum.accumulate(np.where(is_start, place, 0))  # of the row's episode, as far as it is here
        is_whole = first[start]  # of other episodes, the first rows were returned earlier and dropped
        t, number = place - start + np.where(is_whole, 0, self._t[slot]), self._number[slot]
        if is_whole.any():
            number = np.where(is_whole, columns[_EPISODE][order[start]], number)
        is_open = ~(np.append(is_start[1:], True) | done | columns[_GIVEN][order])
        context = np.maximum(start, place - self.connectors.context)
        return _Sorted(order, slot, t, number, done, is_open, context)

    def _keep_needed(self, rows: _Sorted, returned: Ints) -> None:
        """Keep the newest rows, steps that were not returned, the ends of their episodes, and their context."""
        order, slot, is_open = rows.order, rows.slot, rows.is_open
        is_open[returned] = False
        keep = is_open | (order >= self.pending) | ((np.diff(slot, append=-1) != 0) & ~rows.done)
        keep[1:] |= is_open[:-1]
        if self.connectors.context:
            self.rows.columns[_GIVEN][order[returned]] = True
            kept = np.flatnonzero(keep)
            oldest = kept[(np.diff(slot[kept], prepend=-1) != 0) & ~rows.done[kept]]
            keep[ranges(rows.context[oldest], oldest - rows.context[oldest])] = True
        kept = np.flatnonzero(keep)
        oldest = kept[np.diff(slot[kept], prepend=-1) != 0]  # in each slot
        self._t[slot[oldest]], self._number[slot[oldest]] = rows.t[oldest], rows.number[oldest]
        # All dropped rows are before `pending`, where the next collection begins; those kept there have their `logp`.
        self._acted = self.pending = self.pending - (len(order) - len(kept))
        self.rows.keep(np.sort(order[kept]))

    def _experience(self, rows: _Sorted, begins: Ints, ends: Ints, tracker: EpisodeTracker) -> Experience:
        columns, starts = self.rows.columns, rows.context[begins]
        places = ranges(starts, ends - starts)
        seen, answers, last = rows.order[places], rows.order[places + 1], rows.order[ends]
        steps = {name: arrays.take(columns[name], answers if name == col.REWARD else seen) for name in self.rows.names}
        final_obs, blind = {}, columns[BLIND][last]
        for name in self.rows.obs_names:
            final_obs[name] = arrays.take(columns[name], last)
            if blind.any():
                final_obs[name][blind] = 0
        slots = rows.slot[starts]
        episode_id, agent_id = tracker.ids(slots, rows.number[starts])
        segments = Segments(
            episode_id=episode_id,
            agent_id=agent_id,
            module_id=self._module_ids[slots],
            t_start=rows.t[starts],
            lookback=begins - starts,
            terminated=columns[col.TERMINATED][last],
            truncated=columns[col.TRUNCATED][last],
            has_final_obs=~blind,
        )
        exp = Experience(steps, offsets_of(ends - starts), segments, final_obs)
        try:
            check_finite(exp, (col.OBS, col.REWARD, col.DIST_INPUTS, col.VALUE))
        except DataError as error:
            raise _named(error, exp.numpy()) from error
        return exp

    def nothing(self) -> Experience:
        """An Experience with all columns, but without steps."""
        steps = {name: self.rows.columns[name][:0] for name in self.rows.names}
        final_obs = {name: steps[name] for name in self.rows.obs_names}
        return Experience(steps, np.zeros(1, np.int64), Segments.of(0, episode_id=[]), final_obs)

    def _write_logp(self, rows: Any) -> None:
        """Compute the log-probabilities of actions from the recorded ``dist_inputs``."""
        is_empty = not len(rows) if isinstance(rows, np.ndarray) else rows.start >= rows.stop
        if self._actor is None or is_empty:
            return
        columns = self.rows.columns
        inputs = columns.get(col.DIST_INPUTS)
        action = {name: columns[name][rows] for name in self._actions}
        logp = self._actor.logp(None if inputs is None else inputs[rows], action)
        if logp is not None:
            self.rows.write(rows, {col.LOGP: logp})

    def check_chosen(self, error: EtudeError) -> None:
        """Raise an error that names the module if an env failed because of NaN or infinity from the module.

        Raises:
            ModuleError: the module's ``dist_inputs`` are not finite.
        """
        inputs = self.rows.columns.get(col.DIST_INPUTS)
        if inputs is not None and len(not_finite(inputs[: self.rows.size])):
            raise ModuleError(
                f"the module returned `{col.DIST_INPUTS}` that is not finite, and the env failed on the resulting "
                f"action: the module's weights may have diverged ({error})"
            ) from error

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The rows, the connectors and the memory of slots: plain data and arrays."""
        rows = {name: column[: self.rows.size].copy() for name, column in self.rows.columns.items()}
        connectors = self.connectors.state_dict()
        return {"rows": rows, "pending": self.pending, "connectors": connectors, **copy.deepcopy(self._per_slot())}

    def _per_slot(self) -> dict[str, Columns]:
        return {"first_rows": {"t": self._t, "number": self._number}, "memory": self._memory, "prev": self._prev}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict` of the same number of slots; ValueError if its columns are invalid."""
        self.connectors.load_state_dict(state["connectors"])
        sizes = {len(column) for column in state["rows"].values()}
        if len(sizes) > 1 or any(column.dtype.kind not in "biuf" for column in state["rows"].values()):
            raise ValueError("the rows of a module are not columns of numbers of one length")
        self.rows = Rows()
        self.rows.append(max(sizes, default=0), state["rows"])
        self.pending = self._acted = min(max(0, int(state["pending"])), self.rows.size)
        for name, columns in self._per_slot().items():
            for key, column in columns.items():
                column[...] = state[name][key]


class TensorRollout(Rollout):
    """A rollout in an arena of tensors: observations, actions and the Experience stay on their device.

    Slots, flags and rewards are NumPy arrays; rewards are copied to the device with the Experience.

    Args:
        policy: The policy that acts.
        module_id: The name of its module; None for a single, unnamed module.
        num_slots: The number of slots in the arena.
        device: The device of the tensors.

    Raises:
        SettingsError: a connector can't work on tensors.
        ModuleError: the module is on another device.
    """

    def __init__(self, policy: Policy, module_id: str | None, num_slots: int, device: torch.device) -> None:
        self._device = device
        check_takes_tensors(policy.connectors)
        super().__init__(policy, module_id, num_slots)
        for columns in (self._memory, self._prev):
            for name, column in columns.items():
                columns[name] = as_tensor(column).to(device)  # type: ignore[assignment]
        self._actors[True] = self._make_actor(True)

    def _make_actor(self, explore: bool) -> Actor:
        return tensor_actor(self.module, self._device, explore=explore)

    def _experience(self, *args: Any) -> Experience:
        return super()._experience(*args).to(self._device)

    def nothing(self) -> Experience:
        return super().nothing().to(self._device)

    def state_dict(self) -> dict[str, Any]:
        """See `Rollout.state_dict`; without rows, as episodes of tensors can't be resumed (see `Arena.state_dict`)."""
        per_slot = {name: host_columns(columns) for name, columns in self._per_slot().items()}
        return {"rows": {}, "pending": 0, "connectors": self.connectors.state_dict(), **copy.deepcopy(per_slot)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.connectors.load_state_dict(state["connectors"])


def _named(error: DataError, exp: Experience) -> EnvError | ModuleError:
    """The error for numbers that are not finite: a ModuleError if the module gave them for observations that are."""
    seen = np.ones(exp.num_steps, bool)
    for column in col.subtree(exp.steps, col.OBS).values():
        if column.dtype.kind == "f":
            seen &= np.isfinite(column).reshape(len(column), -1).all(axis=1)
    for name in (col.DIST_INPUTS, col.VALUE):
        given = exp.steps.get(name, np.zeros(exp.num_steps))
        if (seen & ~np.isfinite(given).reshape(len(given), -1).all(axis=1)).any():
            return ModuleError(
                f"the module returned `{name}` that is not finite for observations that are: its weights may have "
                f"diverged, or a connector gave it such numbers ({error})"
            )
    return EnvError(f"the env returned numbers that are not finite: {error}")
