# SPDX-License-Identifier: Apache-2.0
"""Connectors that add an episode's history to the observation: the return to go, and the last steps with a mask."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import SEPARATOR, Columns
from etude.connectors.connector import (
    PREV_ACTION,
    ActionCodes,
    Connector,
    Inputs,
    column,
    map_leaves,
    observations,
    replace_obs,
    with_part_columns,
    with_parts,
)
from etude.errors import CheckpointError, SettingsError, SpaceError
from etude.experience import Experience, returns
from etude.experience.arrays import Array, Index, cast, concat, where_rows
from etude.modules.module import Module
from etude.settings import check_range
from etude.spaces import Space, leaf_dtype, leaf_shape, leaves

RETURN_TO_GO: Final = "return_to_go"
T: Final = "t"
ATTENTION_MASK: Final = "attention_mask"
"""The parts of an observation that connectors in this file add, beside `PREV_ACTION`."""


_LEFT = "left"


class EpisodePiece(NamedTuple):
    """The rewards of a segment that is not a whole episode."""

    start: int
    """``t`` of its first row."""
    stop: int
    """``t`` after its last row."""
    total: float
    """The sum of its rewards."""
    sums: tuple[float, ...]
    """Partial sums of its first rewards, from 0 rewards up to its lookback: rows that an earlier piece may have,
    too."""
    done: bool
    """Whether the episode ends with it."""


class ReturnToGo(Connector):
    """Adds the return to go as the part ``return_to_go`` of the observation, float32 ``[1]``.

    While acting it starts at ``target`` and decreases by each step's reward. In a recording it is the sum of rewards
    from the step to the end of the episode (Chen et al. 2021, "Decision Transformer"). An observation that is not a
    Dict becomes the part ``obs``.

    `update` must be given all segments of a recording before the first is learned from. If an episode is in pieces, it
    remembers the rewards of each, so that the return after a piece is known. If an episode lacks steps or its end in
    the recording, the returns of earlier steps are unknown: their segments become lookback, which is not learned from.

    Args:
        target: Target return while acting, in units of reward; None: that of the best recorded episode.
        scale: Divisor of returns, above 0; None: the largest magnitude of a recorded episode's return.
    """

    needs = (col.OBS, col.REWARD)
    hindsight = True

    def __init__(self, target: float | None = None, scale: float | None = None) -> None:
        check_range("ReturnToGo", scale=(scale is None or scale > 0, f"above 0, not {scale}"))
        self.target, self.scale = target, scale
        self._wraps = False
        self._left = np.zeros(0)
        self._pieces: dict[tuple[str, str | None], list[EpisodePiece]] = {}
        """Pieces by episode and agent, in order of time."""
        self._best: float | None = None
        self._largest = 0.0

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """A Dict with the part ``return_to_go``."""
        self._wraps = not isinstance(obs_space, spaces.Dict)
        added = {RETURN_TO_GO: spaces.Box(-np.inf, np.inf, (1,), np.float32)}
        return with_parts(obs_space, added, "ReturnToGo"), action_space

    def start(self, num_slots: int) -> None:
        """Make slots that have not begun an episode yet."""
        self._left = np.zeros(num_slots)

    def _added(self, obs: Columns, left: Array) -> Columns:
        scaled = cast(left / self._divisor(), np.float32)[:, None]
        return with_part_columns(obs, {RETURN_TO_GO: scaled}, wraps=self._wraps)

    def _divisor(self) -> float:
        return (self._largest or 1.0) if self.scale is None else self.scale

    def online(self, inputs: Inputs) -> Inputs:
        """Add the target where an episode begins, else the previous return to go minus the last reward.

        Raises:
            SettingsError: there is no target, and nothing was learned from a recording.
        """
        inputs, after = self.step(inputs, {_LEFT: self._left[inputs.slots]})
        self._left[inputs.slots] = after[_LEFT]
        return inputs

    def new_state(self, num_rows: int) -> Columns:
        return {_LEFT: np.zeros(num_rows)}

    def step(self, inputs: Inputs, state: Columns) -> tuple[Inputs, Columns]:
        """Like `online`; the state is the return to go, in units of reward."""
        target = self._best if self.target is None else self.target
        if target is None:
            raise SettingsError("there is no return to aim at: set a target, or learn from a recording first.")
        left = where_rows(inputs.first, float(target), state[_LEFT] - inputs.prev_reward)
        return inputs.with_obs(self._added(inputs.obs, left)), {_LEFT: left}

    def offline(self, exp: Experience, module: Module | None = None) -> Experience:
        """Add the return from each step on; segments for which it is unknown become lookback."""
        reward = column(exp, col.REWARD, "ReturnToGo").astype(np.float64)
        after = np.zeros(exp.num_segments)
        names = _names(exp)
        for i in np.flatnonzero(~exp.segments.done).tolist():
            after[i] = self._after(names[i], int(exp.segments.t_start[i] + exp.lengths[i]))
        unknown = np.isnan(after)
        after[unknown] = 0.0
        left = returns.discounted_returns(reward, after, exp.offsets, 1.0)
        obs, final_obs = observations(exp)
        exp = replace_obs(exp, self._added(obs, left), self._added(final_obs, after))
        if not unknown.any():
            return exp
        return exp.with_segments(lookback=np.where(unknown, exp.lengths, exp.segments.lookback))

    def update(self, exp: Experience) -> None:
        """Add the rewards of each segment to what is known."""
        segments, lengths = exp.segments, exp.lengths
        reward = column(exp, col.REWARD, "ReturnToGo").astype(np.float64)
        sums = np.concatenate([np.zeros(1), np.cumsum(reward)])
        begins, stops = exp.offsets[:-1], segments.t_start + lengths
        totals = sums[exp.offsets[1:]] - sums[begins]
        whole = segments.done & (segments.t_start == 0)
        for total in totals[whole].tolist():
            self._note(total)
        names = _names(exp)
        for i in np.flatnonzero(~whole & (lengths > 0)).tolist():
            first = sums[begins[i] : begins[i] + min(segments.lookback[i], lengths[i]) + 1] - sums[begins[i]]
            own = EpisodePiece(
                int(segments.t_start[i]),
                int(stops[i]),
                float(totals[i]),
                tuple(first.tolist()),
                bool(segments.done[i]),
            )
            pieces = self._pieces.setdefault(names[i], [])
            pieces.append(own)
            pieces.sort()
            if pieces[0].start == 0 and not np.isnan(rest := self._after(names[i], pieces[0].stop)):
                self._note(pieces[0].total + rest)

    def _note(self, total: float) -> None:
        """Add the return of a whole episode."""
        self._best = total if self._best is None else max(self._best, total)
        self._largest = max(self._largest, abs(total))

    def _after(self, name: tuple[str, str | None], stop: int) -> float:
        """The rewards of an agent in its episode from step ``stop`` to the end; NaN if unknown."""
        earned = 0.0
        for piece in self._pieces.get(name, ()):
            if piece.stop > stop:
                known = stop - piece.start  # rows that were counted already
                if not 0 <= known < len(piece.sums):
                    return np.nan
                earned += piece.total - piece.sums[known]
                stop = piece.stop
            if piece.done and piece.stop == stop:
                return earned
        return np.nan

    def metrics(self) -> dict[str, float]:
        """``target``, if there is one, and ``scale``."""
        target = self._best if self.target is None else self.target
        return ({} if target is None else {"target": float(target)}) | {"scale": self._divisor()}

    def state_dict(self) -> dict[str, Any]:
        """``left``: the return to go of each slot; ``returns``: the best and the largest; ``pieces`` of episodes."""
        return {
            "left": self._left.copy(),
            "returns": [] if self._best is None else [self._best, self._largest],
            "pieces": [[*name, [list(piece) for piece in pieces]] for name, pieces in self._pieces.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, except a target and scale that were given."""
        self._left = np.array(state["left"], np.float64)
        self._best, self._largest = state["returns"] or (None, 0.0)
        self._pieces = {
            (episode, agent): [
                EpisodePiece(int(start), int(stop), float(total), tuple(map(float, sums)), bool(done))
                for start, stop, total, sums, done in pieces
            ]
            for episode, agent, pieces in state["pieces"]
        }


def _names(exp: Experience) -> list[tuple[str, str | None]]:
    """The episode and the agent of each segment."""
    return list(zip(exp.segments.episode_id.tolist(), exp.segments.agent_id.tolist(), strict=True))


class History(Connector):
    """The last ``k`` steps of the episode, the newest last, with the action before each, and a padding mask.

    The observation becomes a Dict. Each of its parts gets an axis of steps in front, ``[k, *shape]`` (Discrete becomes
    MultiDiscrete); an observation that is not a Dict becomes the part ``obs``. An `action_mask` stays that of the
    newest step. Added are

    - ``prev_action``, float32 ``[k, width]``: the action before each step; choices one-hot, zeros before the first step
      of the episode;
    - ``t``, int64 ``[k]``: the index of each step in its episode;
    - ``attention_mask``, int8 ``[k]``: 1 for steps of the episode, 0 for padding before its start, which repeats the
      first observation.

    Args:
        k: Number of steps, at least 1.
    """

    needs = (col.OBS, col.ACTION)

    def __init__(self, k: int = 20) -> None:
        check_range("History", k=(isinstance(k, int) and k >= 1, f"a whole number of at least 1, not {k!r}"))
        self.k = k
        self.context = k  # the action before the oldest step
        self._codes = ActionCodes()
        self._wraps = False
        self._forms: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        """The shape and dtype of a single step of each remembered column."""
        self._windows: Columns = {}

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """A Dict with the steps of each part, ``prev_action``, ``t`` and ``attention_mask``."""
        self._codes, k = ActionCodes(action_space), self.k
        self._wraps = not isinstance(obs_space, spaces.Dict)
        added: dict[str, Space] = {
            PREV_ACTION: spaces.Box(-np.inf, np.inf, (k, self._codes.width), np.float32),
            T: spaces.Box(0, np.iinfo(np.int64).max, (k,), np.int64),
            ATTENTION_MASK: spaces.MultiBinary(k),
        }
        whole = with_parts(obs_space, added, "History")
        assert isinstance(whole, spaces.Dict)
        own = with_parts(obs_space, {}, "History")
        self._forms = {
            name: (leaf_shape(leaf), leaf_dtype(leaf)) for name, leaf in leaves(own, col.OBS).items() if _is_kept(name)
        }
        self._forms[_column(PREV_ACTION)] = ((self._codes.width,), np.dtype(np.float32))
        self._forms[_column(T)] = ((), np.dtype(np.int64))
        stacked = map_leaves(own, lambda name, leaf: over_steps(leaf, k) if _is_kept(name) else leaf, col.OBS)
        assert isinstance(stacked, spaces.Dict)
        return spaces.Dict([*stacked.spaces.items(), *((key, whole[key]) for key in added)]), action_space

    def start(self, num_slots: int) -> None:
        """Make slots that have not begun an episode yet."""
        self._windows = History.new_state(self, num_slots)

    def _steps(self, obs: Columns, action: Columns, first: NDArray[np.bool_], t: NDArray[Any]) -> Columns:
        """A single step of each remembered column, ``[rows, ...]``, and the columns that stay unchanged."""
        before = np.zeros((len(first), self._codes.width), np.float32)
        self._codes.write(action, before)
        before[first] = 0
        return with_part_columns(obs, {PREV_ACTION: before, T: t}, wraps=self._wraps)

    def online(self, inputs: Inputs) -> Inputs:
        """Append each row's step to its slot's window."""
        slots, first = inputs.slots, inputs.first
        t = np.where(first, 0, self._windows[_column(T)][slots, -1] + 1)
        steps = self._steps(inputs.obs, inputs.prev_action, first, t)
        steps[_column(ATTENTION_MASK)] = np.ones(len(slots), np.int8)
        out = {}
        for name, step in steps.items():
            if name not in self._windows:
                out[name] = step
                continue
            window = np.empty((len(slots), self.k, *step.shape[1:]), self._windows[name].dtype)
            window[:, :-1] = self._windows[name][slots, 1:]
            if first.any():
                window[first, :-1] = 0 if name == _column(ATTENTION_MASK) else step[first, None]
            window[:, -1] = step
            self._windows[name][slots] = window
            out[name] = window
        return inputs.with_obs(out)

    def new_state(self, num_rows: int) -> Columns:
        zeros = {name: np.zeros((num_rows, self.k, *shape), dtype) for name, (shape, dtype) in self._forms.items()}
        return zeros | {_column(ATTENTION_MASK): np.zeros((num_rows, self.k), np.int8)}

    def step(self, inputs: Inputs, state: Columns) -> tuple[Inputs, Columns]:
        """Like `online`; the state is the windows."""
        first, mask = inputs.first, _column(ATTENTION_MASK)
        t = where_rows(first, 0, state[_column(T)][:, -1] + 1)
        before = where_rows(first, 0.0, self._codes(inputs.prev_action))
        out = with_part_columns(inputs.obs, {PREV_ACTION: before, T: t}, wraps=self._wraps)
        after = {}
        for name in self._forms:
            step = out[name][:, None]
            after[name] = out[name] = where_rows(
                first, concat([step] * self.k, 1), concat([state[name][:, 1:], step], 1)
            )
        there = cast(t[:, None] >= 0, np.int8)
        after[mask] = out[mask] = concat([where_rows(first, 0, state[mask][:, 1:]), there], 1)
        return inputs.with_obs(out), after

    def offline(self, exp: Experience, module: Module | None = None) -> Experience:
        """Gather the windows within segments."""
        action = {name: column(exp, name, "History") for name in self._codes.names}
        obs, final_obs = observations(exp)
        starts, ends = exp.offsets[:-1], exp.offsets[1:]
        first = np.zeros(exp.num_steps, bool)
        first[starts[exp.lengths > 0]] = True
        before = np.maximum(np.arange(exp.num_steps) - 1, 0)
        steps = self._steps(obs, {name: values.take(before, axis=0) for name, values in action.items()}, first, exp.t())
        last = {name: values.take(ends - 1, axis=0) for name, values in action.items()}
        nowhere = np.zeros(exp.num_segments, bool)
        final = self._steps(final_obs, last, nowhere, exp.segments.t_start + exp.lengths)
        start_of_row, rows = np.repeat(starts, exp.lengths), np.arange(exp.num_steps)
        for name in self._forms:
            window = windows(steps[name], start_of_row, self.k)
            ended = np.empty((exp.num_segments, self.k, *window.shape[2:]), window.dtype)
            for lag in range(1, self.k):
                ended[:, self.k - 1 - lag] = steps[name].take(np.maximum(ends - lag, starts), axis=0)
            ended[:, -1] = final[name]
            steps[name], final[name] = window, ended
        lags = np.arange(self.k)[::-1]
        steps[_column(ATTENTION_MASK)] = (rows[:, None] - lags >= start_of_row[:, None]).astype(np.int8)
        final[_column(ATTENTION_MASK)] = (ends[:, None] - lags >= starts[:, None]).astype(np.int8)
        return replace_obs(exp, steps, final)

    def state_dict(self) -> dict[str, Any]:
        """``windows``: for each column, ``[num_slots, k, *shape]``."""
        return {"windows": {name: window.copy() for name, window in self._windows.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the windows, and as many slots."""
        given: Mapping[str, Any] = state["windows"]
        here = {name: (self.k, *shape) for name, (shape, _) in self._forms.items()}
        here[_column(ATTENTION_MASK)] = (self.k,)
        there = {name: np.shape(window)[1:] for name, window in given.items()}
        if there and here != there:
            raise CheckpointError(
                f"the steps of history are {there} in the checkpoint, but {here} here: it is of another env, or of "
                f"another k than {self.k}."
            )
        self.start(max((len(window) for window in given.values()), default=0))
        for name, window in given.items():
            self._windows[name][...] = window


def windows(values: NDArray[Any], start_of_row: Index, k: int) -> NDArray[Any]:
    """The last ``k`` of ``values`` up to each row, none from before ``start_of_row`` ``[rows]``: ``[rows, k, ...]``.

    Missing values before the start repeat the value at the start.
    """
    out: NDArray[Any] = np.empty((len(values), k, *values.shape[1:]), values.dtype)
    rows = np.arange(len(values))
    for lag in range(k):
        out[:, k - 1 - lag] = values.take(np.maximum(rows - lag, start_of_row), axis=0) if lag else values
    return out


def _column(key: str) -> str:
    return f"{col.OBS}{SEPARATOR}{key}"


def _is_kept(name: str) -> bool:
    return name != col.OBS_MASK


def over_steps(leaf: Space, k: int) -> Space:
    """The space of ``k`` values of a simple space."""
    if isinstance(leaf, spaces.Box):
        return spaces.Box(np.stack([leaf.low] * k), np.stack([leaf.high] * k), dtype=leaf_dtype(leaf).type)
    if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete):
        sizes = leaf.n if isinstance(leaf, spaces.Discrete) else leaf.nvec
        dtype: Any = leaf_dtype(leaf).type
        return spaces.MultiDiscrete(np.stack([sizes] * k), dtype, start=np.stack([leaf.start] * k))
    return spaces.MultiBinary([k, *leaf_shape(leaf)])


def one_step(leaf: Space) -> Space:
    """The space of a single value of a space from `over_steps`.

    Raises:
        SpaceError: it is not such a space.
    """
    if isinstance(leaf, spaces.Box) and leaf.shape:
        return spaces.Box(leaf.low[0], leaf.high[0], leaf.shape[1:], leaf_dtype(leaf).type)
    if isinstance(leaf, spaces.MultiDiscrete) and leaf.nvec.ndim == 1:
        return spaces.Discrete(leaf.nvec[0], start=leaf.start[0])
    if isinstance(leaf, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(leaf.nvec[0], leaf_dtype(leaf).type, start=leaf.start[0])
    if isinstance(leaf, spaces.MultiBinary):
        return spaces.MultiBinary(leaf.shape[1] if len(leaf.shape) == 2 else list(leaf.shape[1:]))
    raise SpaceError(f"{leaf} is not of several steps: History, which the network needs, does not stand before it.")
