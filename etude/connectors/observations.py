# SPDX-License-Identifier: Apache-2.0
"""Connectors that change observations: stacked, normalised, with the previous step, without some parts."""

import dataclasses
import math
from typing import Any

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
    ObservationMap,
    array_column,
    column,
    map_leaves,
    observations,
    replace_obs,
    with_part_columns,
    with_parts,
)
from etude.errors import CheckpointError, SettingsError
from etude.experience import Experience
from etude.experience.arrays import Array, Constant, cast, clip_in_place, concat, host, where_rows
from etude.modules.module import Module
from etude.settings import check_range
from etude.spaces import Space, leaf_dtype, leaf_shape, leaves, without
from etude.stateful import Stateful


@dataclasses.dataclass(frozen=True, slots=True)
class _FrameLayout:
    """How the frames of one column are joined; axes are counted with the batch axis in front."""

    k: int
    grows: bool
    """Whether a frame first gets a new last axis."""
    axis: int
    width: int
    """The size of one frame along ``axis``."""
    shape: tuple[int, ...]
    """Shape of the whole stack, without the batch axis."""
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, leaf: Space, k: int) -> "_FrameLayout":
        shape = leaf_shape(leaf)
        grows = len(shape) in (0, 2)
        frame = (*shape, 1) if grows else shape
        channels_first = len(frame) == 3 and frame[0] < frame[2]
        at = 0 if channels_first and not grows else len(frame) - 1
        stack = (*frame[:at], k * frame[at], *frame[at + 1 :])
        return cls(k, grows, at + 1, frame[at], stack, leaf_dtype(leaf))

    def frame(self, values: Array) -> Array:
        return values[..., None] if self.grows else values

    def part(self, first: int, last: int) -> tuple[slice, ...]:
        """The index of frames ``first`` to ``last`` (exclusive) in a batch of stacks; the newest is ``k - 1``."""
        return (*(slice(None),) * self.axis, slice(first * self.width, last * self.width))

    def repeated(self, values: Array) -> Array:
        """Stacks that hold ``values`` k times."""
        return concat([self.frame(values)] * self.k, self.axis)

    def pushed(self, before: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
        """New stacks: those in ``before`` without their oldest frame, plus ``values``."""
        out: NDArray[Any] = np.empty(before.shape, before.dtype)
        # one contiguous copy, shifted by a frame; what wraps into the next row is overwritten by the new frame
        shift = self.width * math.prod(self.shape[self.axis :])
        out.reshape(-1)[: out.size - shift] = before.reshape(-1)[shift:]
        out[self.part(self.k - 1, self.k)] = self.frame(values)
        return out

    def space(self, leaf: Space) -> Space:
        def tiled(values: Any) -> NDArray[Any]:
            stack: NDArray[Any] = self.repeated(np.asarray(values)[None])[0]
            return stack

        if isinstance(leaf, spaces.Box):
            return spaces.Box(tiled(leaf.low), tiled(leaf.high), self.shape, self.dtype.type)
        if isinstance(leaf, spaces.Discrete):
            return spaces.MultiDiscrete(tiled(leaf.n), self.dtype.type, start=tiled(leaf.start))
        if isinstance(leaf, spaces.MultiDiscrete):
            return spaces.MultiDiscrete(tiled(leaf.nvec), self.dtype.type, start=tiled(leaf.start))
        return spaces.MultiBinary(self.shape[0] if len(self.shape) == 1 else list(self.shape))


class FrameStack(Connector):
    """Stacks the last ``k`` observations of the episode, the newest last; at its start the first one fills the stack.

    Frames are joined along the last axis: ``[n]`` becomes ``[k * n]``, images ``[H, W, C]`` become ``[H, W, k * C]``.
    Scalars and ``[H, W]`` get a new last axis: ``[k]``, ``[H, W, k]``. Three axes of which the first is shorter than
    the last are an image ``[C, H, W]`` and become ``[k * C, H, W]``. Discrete leaves become MultiDiscrete.

    Args:
        k: Number of frames, at least 1; 4 as in Mnih et al. 2015, "Human-level control through deep RL".
    """

    needs = (col.OBS,)

    def __init__(self, k: int = 4) -> None:
        check_range("FrameStack", k=(isinstance(k, int) and k >= 1, f"a whole number of at least 1, not {k!r}"))
        self.k = k
        self.context = k - 1
        self._layouts: dict[str, _FrameLayout] = {}
        self._all = np.zeros(0, np.int64)
        self._frames: Columns = {}
        self._lent = False
        """Whether the caller also holds the stacks in ``_frames``, so that they must not be written to."""

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """Each leaf grows k times along its frame axis."""
        self._layouts = {name: _FrameLayout.of(leaf, self.k) for name, leaf in leaves(obs_space, col.OBS).items()}
        return map_leaves(obs_space, lambda name, leaf: self._layouts[name].space(leaf), col.OBS), action_space

    def start(self, num_slots: int) -> None:
        """Make empty stacks; each slot's first observation fills its own."""
        self._all = np.arange(num_slots)
        self._frames = FrameStack.new_state(self, num_slots)
        self._lent = False

    def online(self, inputs: Inputs) -> Inputs:
        """Push each row's observation onto its slot's stack."""
        slots, first = inputs.slots, inputs.first
        everyone = len(slots) == len(self._all) and bool((slots == self._all).all())
        starts = bool(first.any())
        if self._lent and not everyone:
            self._frames = {name: frames.copy() for name, frames in self._frames.items()}
        self._lent = everyone
        obs = {}
        for name, layout in self._layouts.items():
            frames, values = self._frames[name], inputs.obs[name]
            out = layout.pushed(frames if everyone else frames.take(slots, axis=0), values)
            if starts:
                out[first] = layout.repeated(values[first])
            if everyone:
                self._frames[name] = out
            else:
                frames[slots] = out
            obs[name] = out
        return inputs.with_obs(obs)

    def new_state(self, num_rows: int) -> Columns:
        return {name: np.zeros((num_rows, *at.shape), at.dtype) for name, at in self._layouts.items()}

    def step(self, inputs: Inputs, state: Columns) -> tuple[Inputs, Columns]:
        """Like `online`; the state is the stacks."""
        obs = {}
        for name, layout in self._layouts.items():
            values = inputs.obs[name]
            pushed = concat([state[name][layout.part(1, layout.k)], layout.frame(values)], layout.axis)
            obs[name] = where_rows(inputs.first, layout.repeated(values), pushed)
        return inputs.with_obs(obs), obs

    def offline(self, exp: Experience, module: Module | None = None) -> Experience:
        """Gather the frames within segments."""
        starts, ends = exp.offsets[:-1], exp.offsets[1:]
        start_of_row, rows = np.repeat(starts, exp.lengths), np.arange(exp.num_steps)
        obs, final_obs = {}, {}
        for name, layout in self._layouts.items():
            values = column(exp, name, "FrameStack")
            stack = np.empty((len(values), *layout.shape), values.dtype)
            final = np.empty((exp.num_segments, *layout.shape), values.dtype)
            for lag in range(self.k):
                part = layout.part(self.k - 1 - lag, self.k - lag)
                lagged = values.take(np.maximum(rows - lag, start_of_row), axis=0) if lag else values
                before_end = values.take(np.maximum(ends - lag, starts), axis=0) if lag else exp.final_obs[name]
                stack[part] = layout.frame(lagged)
                final[part] = layout.frame(np.asarray(before_end))
            obs[name], final_obs[name] = stack, final
        return replace_obs(exp, obs, final_obs)

    def state_dict(self) -> dict[str, Any]:
        """``frames``: for each column, ``[num_slots, *shape of a stack]``."""
        return {"frames": {name: frames.copy() for name, frames in self._frames.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the stacks, and as many slots."""
        here = {name: layout.shape for name, layout in self._layouts.items()}
        there = {name: np.shape(frames)[1:] for name, frames in state["frames"].items()}
        if there and here != there:
            raise CheckpointError(
                f"the stacks of frame_stack are {there} in the checkpoint, but {here} here: it is of another env, "
                f"or of another k than {self.k}."
            )
        self.start(0)
        for name, frames in state["frames"].items():
            self._frames[name] = np.array(frames, self._layouts[name].dtype)
            self._all = np.arange(len(frames))


_EPSILON = 1e-8
"""Added to the variance, so that a constant component is not divided by 0."""


class Moments(Stateful):
    """Count, mean and variance of every component of one column, over all batches seen."""

    _state = ("count", "mean", "squares")

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = 0
        self.mean = np.zeros(shape)
        self.squares = np.zeros(shape)
        """The sum of squared distances from the mean."""

    def add(self, batch: Array) -> None:
        """Add a batch ``[rows, ...]``, in float64 (Chan, Golub & LeVeque 1979, "Updating formulae ...")."""
        rows = len(batch)
        if not rows:
            return
        if isinstance(batch, np.ndarray):
            mean = batch.mean(axis=0, dtype=np.float64)
            squares = np.square(batch - mean).sum(axis=0)
        else:
            wide = cast(batch, np.float64)
            mean = host(wide.mean(0))
            squares = host((wide - wide.mean(0)).square().sum(0))
        total, shift = self.count + rows, mean - self.mean
        self.mean = np.asarray(self.mean + shift * (rows / total))
        self.squares = np.asarray(self.squares + squares + shift * shift * (self.count * rows / total))
        self.count = total

    def deviation(self) -> NDArray[np.float64]:
        """The standard deviation; 1 before anything was seen."""
        return np.sqrt(self.squares / self.count + _EPSILON) if self.count else np.ones_like(self.mean)


class NormalizeObs(ObservationMap):
    """Normalises each component of the observation to mean 0 and standard deviation 1, then clips it; gives float32.

    It changes Box leaves of float dtype; others, and an `action_mask`, are unchanged. Statistics are over all steps
    passed to `update` (without lookback), and are frozen between two updates, so that acting and learning see a step
    alike. Before the first update observations are only clipped. Put it after connectors with a memory (`FrameStack`):
    what they keep across an update would have been normalised by the older statistics.

    Args:
        clip: Largest magnitude after scaling, above 0, in standard deviations; ``inf`` for none. 10 is the value of
            ``VecNormalize`` in OpenAI Baselines, and of most PPO results.
    """

    takes_tensors = True

    def __init__(self, clip: float = 10.0) -> None:
        check_range("NormalizeObs", clip=(clip > 0, f"above 0, not {clip}"))
        self.clip = float(clip)
        self._moments: dict[str, Moments] = {}
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self._frozen: dict[str, tuple[Constant, Constant]] = {}

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """Float Boxes become float32 Boxes from ``-clip`` to ``clip``."""
        found = {n: leaf for n, leaf in leaves(obs_space, col.OBS).items() if _is_float(leaf) and n != col.OBS_MASK}
        self._moments = {name: Moments(leaf_shape(leaf)) for name, leaf in found.items()}
        # float64 observations are centred in float64: a large mean would cost digits in float32
        self._dtypes = {name: np.result_type(leaf_dtype(leaf), np.float32) for name, leaf in found.items()}
        self._freeze()

        def change(name: str, leaf: Space) -> Space:
            return spaces.Box(-self.clip, self.clip, leaf_shape(leaf), np.float32) if name in found else leaf

        return map_leaves(obs_space, change, col.OBS), action_space

    def _freeze(self) -> None:
        self._frozen = {
            name: (
                Constant(moments.mean.astype(self._dtypes[name])),
                Constant((1 / moments.deviation()).astype(self._dtypes[name])),
            )
            for name, moments in self._moments.items()
        }

    def map_rows(self, obs: Columns, rows: int) -> Columns:
        out = dict(obs)
        for name, (mean, scale) in self._frozen.items():
            values = obs[name] - mean.like(obs[name])
            values *= scale.like(values)
            out[name] = cast(clip_in_place(values, -self.clip, self.clip), np.float32)
        return out

    def update(self, exp: Experience) -> None:
        """Add the steps to the statistics.

        Raises:
            DataError: an observation is not finite; the message says where. The statistics are then unchanged.
        """
        batches = {name: array_column(exp, name, "NormalizeObs") for name in self._moments}
        if any(not math.isfinite(_sum(batch)) for batch in batches.values()):
            exp.validate(finite=(col.OBS,))
        has_lookback = bool(exp.segments.lookback.any())
        for name, batch in batches.items():
            self._moments[name].add(batch[exp.trained()] if has_lookback else batch)
        self._freeze()

    def metrics(self) -> dict[str, float]:
        """``count``: the number of steps in the statistics."""
        return {"count": float(max((moments.count for moments in self._moments.values()), default=0))}

    def state_dict(self) -> dict[str, Any]:
        """For each column: ``count``, ``mean`` and ``squares``."""
        return {name: moments.state_dict() for name, moments in self._moments.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        here = {name: moments.mean.shape for name, moments in self._moments.items()}
        there = {name: np.shape(values["mean"]) for name, values in state.items()}
        if here != there:
            raise CheckpointError(
                f"the statistics of normalize_obs are of {there}, but the observations are {here}: "
                "the checkpoint is of another env, or of other connectors before this one."
            )
        for name, values in state.items():
            self._moments[name].load_state_dict(values)
        self._freeze()


def _sum(batch: Array) -> float:
    return float(batch.sum(dtype=np.float64) if isinstance(batch, np.ndarray) else batch.double().sum())


def _is_float(leaf: Space) -> bool:
    return isinstance(leaf, spaces.Box) and leaf_dtype(leaf).kind == "f"


_REWARD = "prev_reward"


class PrevActionReward(Connector):
    """Adds the action and the reward of the previous step to the observation; zeros at the start of an episode.

    The action is what the module chose: one-hot for Discrete and MultiDiscrete, all its parts as one float32 vector. A
    Box of float vectors stays one Box: ``[obs, action, reward]``. A Dict gets the keys ``prev_action`` ``[n]`` and
    ``prev_reward`` ``[1]``. Any other space becomes a Dict of these two and ``obs``.
    """

    context = 1

    needs = (col.OBS, col.ACTION, col.REWARD)

    def __init__(self) -> None:
        self._codes = ActionCodes()
        self._vector_dtype: np.dtype[Any] | None = None
        """The dtype of the Box into which all is joined; None if the observation is a Dict."""
        self._wraps = False

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        self._codes = ActionCodes(action_space)
        width = self._codes.width
        is_vector = isinstance(obs_space, spaces.Box) and len(obs_space.shape) == 1
        self._vector_dtype = leaf_dtype(obs_space) if is_vector and leaf_dtype(obs_space).kind == "f" else None
        self._wraps = self._vector_dtype is None and not isinstance(obs_space, spaces.Dict)
        if isinstance(obs_space, spaces.Box) and self._vector_dtype is not None:
            unbounded = np.full(width + 1, np.inf, self._vector_dtype)
            low, high = np.append(obs_space.low, -unbounded), np.append(obs_space.high, unbounded)
            return spaces.Box(low, high, dtype=self._vector_dtype.type), action_space
        added = {key: spaces.Box(-np.inf, np.inf, (n,), np.float32) for key, n in ((PREV_ACTION, width), (_REWARD, 1))}
        return with_parts(obs_space, added, "PrevActionReward"), action_space

    def _extended(
        self, obs: Columns, action: Columns, reward: NDArray[Any], first: NDArray[np.bool_] | None
    ) -> Columns:
        """``obs`` with the previous step; ``first`` None means that no row begins an episode."""
        before = np.empty((len(reward), self._codes.width + 1), np.float32)
        self._codes.write(action, before)
        before[:, -1] = reward
        if first is not None and first.any():
            before[first] = 0
        return self._joined(obs, before)

    def _joined(self, obs: Columns, before: Array) -> Columns:
        """``obs`` with the vector of the previous step, float32 ``[rows, width + 1]``."""
        if self._vector_dtype is not None:
            return {col.OBS: concat([cast(obs[col.OBS], self._vector_dtype), cast(before, self._vector_dtype)], 1)}
        return with_part_columns(obs, {PREV_ACTION: before[:, :-1], _REWARD: before[:, -1:]}, wraps=self._wraps)

    def online(self, inputs: Inputs) -> Inputs:
        """Add the previous step to each row."""
        return inputs.with_obs(self._extended(inputs.obs, inputs.prev_action, inputs.prev_reward, inputs.first))

    def step(self, inputs: Inputs, state: Columns) -> tuple[Inputs, Columns]:
        """Like `online`; there is no state."""
        reward = cast(inputs.prev_reward, np.float32)[:, None]
        before = where_rows(inputs.first, 0.0, concat([self._codes(inputs.prev_action), reward], 1))
        return inputs.with_obs(self._joined(inputs.obs, before)), state

    def offline(self, exp: Experience, module: Module | None = None) -> Experience:
        """Add the previous step to each step, and the last step to ``final_obs``."""
        who = "PrevActionReward"
        action = {name: column(exp, name, who) for name in self._codes.names}
        reward = column(exp, col.REWARD, who)
        obs, final_obs = observations(exp)
        # rows are shifted by one across segments; `first` then clears the first row of each
        before = np.maximum(np.arange(exp.num_steps) - 1, 0)
        first = np.zeros(exp.num_steps, bool)
        first[exp.offsets[:-1]] = True
        last = exp.offsets[1:] - 1
        return replace_obs(
            exp,
            self._extended(obs, {n: a.take(before, axis=0) for n, a in action.items()}, reward.take(before), first),
            self._extended(final_obs, {n: a.take(last, axis=0) for n, a in action.items()}, reward.take(last), None),
        )


class Drop(ObservationMap):
    """Leaves parts of the observation out: ``drop:mission``, ``drop:info/text,direction``.

    A part that Etude can't handle (a Text space, for example) is left out as soon as the env returns it, so that
    recordings do not have it either. Any other part is recorded as usual, and left out only for the module.

    Args:
        parts: Paths in the observation's Dict space, separated by commas; keys in a path are separated by ``/``.
    """

    needs = ()
    takes_tensors = True

    def __init__(self, parts: str = "") -> None:
        self.parts = parts
        self.paths = tuple(part.strip() for part in parts.split(",") if part.strip())
        """The single paths."""
        self._columns = tuple(f"{col.OBS}{SEPARATOR}{path}" for path in self.paths)

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """The observation space without those of these parts that it still has.

        Raises:
            SettingsError: no part is given.
            SpaceError: nothing would be left.
        """
        if not self.paths:
            raise SettingsError("the connector `drop` does not say what: name a part of the observation, drop:mission.")
        return without(obs_space, self.paths), action_space

    def map_rows(self, obs: Columns, rows: int) -> Columns:
        return {name: c for name, c in obs.items() if not any(col.is_under(name, gone) for gone in self._columns)}

    def __repr__(self) -> str:
        return f"{self.name}:{self.parts}" if self.parts else self.name
