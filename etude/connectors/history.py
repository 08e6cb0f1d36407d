# SPDX-License-Identifier: Apache-2.0
"""Connectors that add an episode's history to the observation: the return to go, and the last steps with a mask."""

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from gymnasium import spaces

from etude import columns as col
from etude.columns import SEPARATOR, Columns
from etude.connectors.connector import (
    PREV_ACTION,
    Inputs,
    MemoryConnector,
    PreviousActions,
    column,
    observations,
    replace_obs,
    stacked_space,
    step_before,
    windows,
    with_part_columns,
    with_parts,
)
from etude.errors import SettingsError, SpaceError
from etude.experience import Experience, returns
from etude.experience.arrays import Array, cast, concat, where_rows
from etude.experience.experience import without_lookback
from etude.settings import FloatAbove0, IntFrom1, check_arguments
from etude.spaces import Space, leaf_dtype, leaf_shape, leaves, map_leaves

if TYPE_CHECKING:
    from etude.modules.module import Module

RETURN_TO_GO: Final = "return_to_go"
T: Final = "t"
ATTENTION_MASK: Final = "attention_mask"
"""The parts of an observation that connectors in this file add, beside `PREV_ACTION`."""


_LEFT = "left"


class EpisodePiece(NamedTuple):
    """The rewards of a segment that is not a whole episode, without its lookback."""

    start: int
    """``t`` of its first row."""
    stop: int
    """``t`` after its last row."""
    total: float
    """The sum of its rewards."""
    done: bool
    """Whether the episode ends with it."""


class ReturnToGo(MemoryConnector):
    """Adds the return to go as the part ``return_to_go`` of the observation, float32 ``[1]``.

    While acting, it starts at ``target`` and decreases by each step's reward. In a recording, it is the sum of rewards
    from the step to the end of the episode (Chen et al. 2021, "Decision Transformer"). An observation that is not a
    Dict becomes the part ``obs``.

    `update` must be called with all segments of a recording before `offline`. It remembers the rewards of episodes that
    are stored in pieces, so that the return after each piece is known. If the recording lacks an episode's end or some
    of its steps, the returns of earlier steps are unknown: their segments become lookback, which is not trained on.

    Args:
        target: Target return while acting, in units of reward; None: the return of the best recorded episode.
        scale: Divisor of returns, above 0; None: the largest magnitude of a recorded episode's return.
    """

    needs = (col.OBS, col.REWARD)
    hindsight = True

    def __init__(self, target: float | None = None, scale: float | None = None) -> None:
        given = {"target": (float, target), "scale": (FloatAbove0, scale)}
        check_arguments("ReturnToGo", **{name: pair for name, pair in given.items() if pair[1] is not None})
        super().__init__()
        self.target, self.scale = target, scale
        self._wraps = False
        self.start(0)
        self._pieces: dict[tuple[str, str | None], list[EpisodePiece]] = {}
        """Pieces by episode and agent, in order of time."""
        self._best: float | None = None
        self._largest = 0.0

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """A Dict with the part ``return_to_go``."""
        self._wraps = not isinstance(obs_space, spaces.Dict)
        added = {RETURN_TO_GO: spaces.Box(-np.inf, np.inf, (1,), np.float32)}
        return with_parts(obs_space, added, "ReturnToGo"), action_space

    def _added(self, obs: Columns, left: Array) -> Columns:
        scaled = cast(left / self._divisor(), np.float32)[:, None]
        return with_part_columns(obs, {RETURN_TO_GO: scaled}, wraps=self._wraps)

    def _divisor(self) -> float:
        return (self._largest or 1.0) if self.scale is None else self.scale

    def _empty(self, num_rows: int) -> Columns:
        return {_LEFT: np.zeros(num_rows)}

    def _advance(self, inputs: Inputs, state: Columns) -> tuple[Inputs, Columns]:
        """Add the target where an episode begins, else the previous return to go minus the last reward.

        Raises:
            SettingsError: there is no target, and nothing was learned from a recording.
        """
        target = self._best if self.target is None else self.target
        if target is None:
            raise SettingsError("there is no target return: set `target`, or train on a recording first.")
        left = where_rows(inputs.first, float(target), state[_LEFT] - inputs.prev_reward)
        return inputs.with_obs(self._added(inputs.obs, left)), {_LEFT: left}

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
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
        """Remember the rewards of each segment."""
        exp = without_lookback(exp)  # earlier pieces have these rows
        segments, stops = exp.segments, exp.segments.t_start + exp.lengths
        reward = column(exp, col.REWARD, "ReturnToGo").astype(np.float64)
        totals = np.diff(np.concatenate([np.zeros(1), np.cumsum(reward)])[exp.offsets])
        whole = segments.done & (segments.t_start == 0)
        for total in totals[whole].tolist():
            self._note(total)
        names = _names(exp)
        for i in np.flatnonzero(~whole).tolist():
            pieces = self._pieces.setdefault(names[i], [])
            own = int(segments.t_start[i]), int(stops[i]), float(totals[i]), bool(segments.done[i])
            pieces.append(EpisodePiece(*own))
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
            if piece.start == stop:
                earned, stop = earned + piece.total, piece.stop
            if piece.done and piece.stop == stop:
                return earned
        return np.nan

    def metrics(self) -> dict[str, float]:
        """``target``, if there is one, and ``scale``."""
        target = self._best if self.target is None else self.target
        return ({} if target is None else {"target": float(target)}) | {"scale": self._divisor()}

    def state_dict(self) -> dict[str, Any]:
        """``left``: the return to go of each slot; ``returns``: the best, and the largest magnitude; ``pieces``."""
        return {
            _LEFT: self._kept[_LEFT].copy(),
            "returns": [] if self._best is None else [self._best, self._largest],
            "pieces": [[*name, [list(piece) for piece in pieces]] for name, pieces in self._pieces.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. A ``target`` or ``scale`` that was given is not changed."""
        super().load_state_dict({self.state_key: {_LEFT: state[_LEFT]}})
        self._best, self._largest = state["returns"] or (None, 0.0)
        self._pieces = {
            (episode, agent): [EpisodePiece(int(a), int(b), float(total), bool(done)) for a, b, total, done in pieces]
            for episode, agent, pieces in state["pieces"]
        }


def _names(exp: Experience) -> list[tuple[str, str | None]]:
    """The episode and the agent of each segment."""
    return list(zip(exp.segments.episode_id.tolist(), exp.segments.agent_id.tolist(), strict=True))


class History(PreviousActions, MemoryConnector):
    """Shows the module the last ``k`` steps, the newest last, with the action before each and a padding mask.

    The observation becomes a Dict. Each of its parts gets an axis of steps in front, ``[k, *shape]`` (Discrete becomes
    MultiDiscrete); an observation that is not a Dict becomes the part ``obs``. The `action_mask` is only the
    newest step's. These parts are added:

    - ``prev_action``, float32 ``[k, width]``: the action before each step; choices one-hot, zeros before the first step
      of the episode;
    - ``t``, int64 ``[k]``: the index of each step in its episode;
    - ``attention_mask``, int8 ``[k]``: 1 for steps of the episode, 0 for padding before its start, which repeats the
      first observation.

    Args:
        k: Number of steps, at least 1.
    """

    needs = (col.OBS, col.ACTION)
    state_key = "windows"

    def __init__(self, k: int = 20) -> None:
        check_arguments("History", k=(IntFrom1, k))
        super().__init__()
        self.k = k
        self.context = k  # not k - 1: the oldest step also needs the action before it
        self._wraps = False
        self._forms: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        """The shape and dtype of a single step of each remembered column."""

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """A Dict with the steps of each part, ``prev_action``, ``t`` and ``attention_mask``."""
        k, width = self.k, self._set_codes(action_space)
        self._wraps = not isinstance(obs_space, spaces.Dict)
        added: dict[str, Space] = {
            PREV_ACTION: spaces.Box(-np.inf, np.inf, (k, width), np.float32),
            T: spaces.Box(0, np.iinfo(np.int64).max, (k,), np.int64),
            ATTENTION_MASK: spaces.MultiBinary(k),
        }
        whole = with_parts(obs_space, added, "History")
        assert isinstance(whole, spaces.Dict)
        own = with_parts(obs_space, {}, "History")
        self._forms = {name: (leaf_shape(leaf), leaf_dtype(leaf)) for name, leaf in leaves(own, col.OBS).items()}
        self._forms.pop(col.OBS_MASK, None)
        self._forms[_column(PREV_ACTION)] = ((width,), np.dtype(np.float32))
        self._forms[_column(T)] = ((), np.dtype(np.int64))
        stacked = map_leaves(own, lambda name, leaf: over_steps(leaf, k) if name != col.OBS_MASK else leaf, col.OBS)
        assert isinstance(stacked, spaces.Dict)
        return spaces.Dict([*stacked.spaces.items(), *((key, whole[key]) for key in added)]), action_space

    def _steps(self, obs: Columns, action: Columns, first: Array, t: Array) -> Columns:
        """A single step of each remembered column, ``[rows, ...]``, and the columns that are not stacked."""
        before = where_rows(first, 0.0, self._codes(action))
        return with_part_columns(obs, {PREV_ACTION: before, T: t}, wraps=self._wraps)

    def _empty(self, num_rows: int) -> Columns:
        zeros = {name: np.zeros((num_rows, self.k, *shape), dtype) for name, (shape, dtype) in self._forms.items()}
        return zeros | {_column(ATTENTION_MASK): np.zeros((num_rows, self.k), np.int8)}

    def _advance(self, inputs: Inputs, state: Columns) -> tuple[Inputs, Columns]:
        first, mask = inputs.first, _column(ATTENTION_MASK)
        t = where_rows(first, 0, state[_column(T)][:, -1] + 1)
        out, after = self._steps(inputs.obs, inputs.prev_action, first, t), {}
        for name in self._forms:
            step = out[name][:, None]
            after[name] = out[name] = concat([where_rows(first, step, state[name][:, 1:]), step], 1)
        there = cast(t[:, None] >= 0, np.int8)
        after[mask] = out[mask] = concat([where_rows(first, 0, state[mask][:, 1:]), there], 1)
        return inputs.with_obs(out), after

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Gather the windows within segments."""
        obs, final_obs = observations(exp)
        before, last, first = step_before(exp, self._codes.names, "History")
        starts, ends, never = exp.offsets[:-1], exp.offsets[1:], np.zeros(exp.num_segments, bool)
        steps = self._steps(obs, before, first, exp.t())
        final = self._steps(final_obs, last, never, exp.segments.t_start + exp.lengths)
        start_of_row, rows = np.repeat(starts, exp.lengths), np.arange(exp.num_steps)
        for name in self._forms:
            values = steps[name]
            steps[name] = windows(values, values, rows, start_of_row, self.k)
            final[name] = windows(values, final[name], ends, starts, self.k)
        lags = np.arange(self.k)[::-1]
        steps[_column(ATTENTION_MASK)] = (rows[:, None] - lags >= start_of_row[:, None]).astype(np.int8)
        final[_column(ATTENTION_MASK)] = (ends[:, None] - lags >= starts[:, None]).astype(np.int8)
        return replace_obs(exp, steps, final)


def _column(key: str) -> str:
    return f"{col.OBS}{SEPARATOR}{key}"


def over_steps(leaf: Space, k: int) -> Space:
    """The space of ``k`` values of a simple space."""
    return stacked_space(leaf, lambda bound: np.stack([bound] * k))


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
    raise SpaceError(f"{leaf} is of a single step: the network needs `history` as the last connector before it.")
