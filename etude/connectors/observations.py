# SPDX-License-Identifier: Apache-2.0
"""Connectors that stack or normalise observations, add the previous action and reward, or drop parts."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import SEPARATOR, Columns
from etude.connectors.connector import (
    PREV_ACTION,
    Inputs,
    MemoryConnector,
    ObservationMap,
    PreviousActions,
    array_column,
    column,
    observations,
    replace_obs,
    stacked_space,
    step_before,
    windows,
    with_part_columns,
    with_parts,
)
from etude.errors import CheckpointError, SettingsError
from etude.experience import Experience
from etude.experience.arrays import Array, Constant, Index, cast, clip_in_place, concat, host, where_rows
from etude.experience.experience import check_finite
from etude.settings import FloatAbove0, IntFrom1, check_arguments
from etude.spaces import (
    Space,
    channels_come_first,
    has_pixels,
    leaf_dtype,
    leaf_shape,
    leaves,
    map_leaves,
    with_channels,
    without,
)
from etude.stateful import Stateful

if TYPE_CHECKING:
    from etude.modules.module import Module


@dataclasses.dataclass(frozen=True, slots=True)
class _FrameLayout:
    """How the frames of one column are stacked; axes are counted with the batch axis in front."""

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
        at = 0 if len(shape) == 3 and channels_come_first(leaf) else len(frame) - 1
        stack = (*frame[:at], k * frame[at], *frame[at + 1 :])
        return cls(k, grows, at + 1, frame[at], stack, leaf_dtype(leaf))

    def frame(self, values: Array) -> Array:
        return values[..., None] if self.grows else values

    def apart(self, stacks: NDArray[Any]) -> NDArray[Any]:
        """A view of stacks as single frames, ``[rows, k, *frame]``, the newest last."""
        shape = stacks.shape
        parts = stacks.reshape(*shape[: self.axis], self.k, self.width, *shape[self.axis + 1 :])
        return np.moveaxis(parts, self.axis, 1)

    def repeated(self, values: Array) -> Array:
        """Stacks that hold ``values`` k times."""
        return concat([self.frame(values)] * self.k, self.axis)

    def pushed(self, before: Array, values: Array, first: Array) -> Array:
        """New stacks: those in ``before`` without their oldest frame, plus ``values``; only ``values`` where
        ``first``."""
        if not isinstance(before, np.ndarray):
            rest = before.narrow(self.axis, self.width, (self.k - 1) * self.width)
            return where_rows(first, self.repeated(values), concat([rest, self.frame(values)], self.axis))
        out: NDArray[Any] = np.empty(before.shape, before.dtype)
        # one contiguous copy, shifted by a frame; what wraps into the next row is overwritten by the new frame
        shift = self.width * math.prod(self.shape[self.axis :])
        out.reshape(-1)[: out.size - shift] = before.reshape(-1)[shift:]
        out[(*(slice(None),) * self.axis, slice(-self.width, None))] = self.frame(values)
        if first.any():
            out[first] = self.repeated(values[first])
        return out

    def stacked(self, values: NDArray[Any], newest: NDArray[Any], rows: Index, starts: Index) -> NDArray[Any]:
        """See `windows`: the frames, stacked."""
        out: NDArray[Any] = np.empty((len(rows), *self.shape), values.dtype)
        windows(self.frame(values), self.frame(newest), rows, starts, self.k, self.apart(out))
        return out


class FrameStack(MemoryConnector):
    """Stacks the last ``k`` observations of the episode, the newest last. At its start, the first one is repeated.

    Frames are joined along the last axis: ``[n]`` becomes ``[k * n]``, images ``[H, W, C]`` become ``[H, W, k * C]``.
    Scalars and ``[H, W]`` get a new last axis: ``[k]``, ``[H, W, k]``. Images ``[C, H, W]`` become ``[k * C, H, W]``;
    these are images whose last two axes, but not the first two, are equal, or, if neither are, whose first axis is
    shorter than the last. Discrete spaces become MultiDiscrete. The `action_mask` is only the newest observation's.

    Args:
        k: Number of frames, at least 1; 4 as in Mnih et al. 2015, "Human-level control through deep RL".
    """

    needs = (col.OBS,)
    state_key = "frames"

    def __init__(self, k: int = 4) -> None:
        check_arguments("FrameStack", k=(IntFrom1, k))
        super().__init__()
        self.k = k
        self.context = k - 1
        self._layouts: dict[str, _FrameLayout] = {}

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """Make each simple space k times as large along its frame axis."""
        found = leaves(obs_space, col.OBS).items()
        self._layouts = {name: _FrameLayout.of(leaf, self.k) for name, leaf in found if name != col.OBS_MASK}

        def stacked(name: str, leaf: Space) -> Space:
            if name not in self._layouts:
                return leaf
            layout = self._layouts[name]
            made = stacked_space(leaf, lambda bound: layout.repeated(np.asarray(bound)[None])[0])
            return with_channels(made, first=layout.axis == 1) if len(layout.shape) == 3 else made

        return map_leaves(obs_space, stacked, col.OBS), action_space

    def _empty(self, num_rows: int) -> Columns:
        return {name: np.zeros((num_rows, *at.shape), at.dtype) for name, at in self._layouts.items()}

    def _advance(self, inputs: Inputs, state: Columns) -> tuple[Inputs, Columns]:
        stacks = {n: at.pushed(state[n], inputs.obs[n], inputs.first) for n, at in self._layouts.items()}
        return inputs.with_obs(inputs.obs | stacks), stacks

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Gather the frames within segments."""
        starts, ends = exp.offsets[:-1], exp.offsets[1:]
        obs, final_obs = col.subtree(exp.steps, col.OBS), dict(exp.final_obs)
        for name, layout in self._layouts.items():
            values = column(exp, name, "FrameStack")
            obs[name] = layout.stacked(values, values, np.arange(exp.num_steps), np.repeat(starts, exp.lengths))
            final_obs[name] = layout.stacked(values, np.asarray(exp.final_obs[name]), ends, starts)
        return replace_obs(exp, obs, final_obs)


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
        wide = cast(batch, np.float64)
        mean = wide.mean(0)
        squares = ((wide - mean) ** 2).sum(0)
        if not isinstance(batch, np.ndarray):
            mean, squares = host(mean), host(squares)
        total, shift = self.count + rows, mean - self.mean
        self.mean = np.asarray(self.mean + shift * (rows / total))
        self.squares = np.asarray(self.squares + squares + shift * shift * (self.count * rows / total))
        self.count = total

    def deviation(self) -> NDArray[np.float64]:
        """The standard deviation; 1 before anything was seen."""
        return np.sqrt(self.squares / self.count + _EPSILON) if self.count else np.ones_like(self.mean)


class NormalizeObs(ObservationMap):
    """Normalises each component of the observation to mean 0 and standard deviation 1, then clips it; gives float32.

    It changes Boxes of floats and integers. Images of integers, the `action_mask` and all other spaces are unchanged.
    Statistics are over all steps passed to `update` (without lookback), and are frozen between two updates, so that
    acting and learning see the same values. Before the first update, observations are only clipped. Put it after
    connectors with memory, such as `FrameStack`. Otherwise, they would mix observations normalised before and after an
    update.

    Args:
        clip: Largest magnitude after scaling, above 0, in standard deviations; ``inf`` for none. 10 is the value of
            ``VecNormalize`` in OpenAI Baselines, and of most PPO results.
    """

    takes_tensors = True

    def __init__(self, clip: float = 10.0) -> None:
        check_arguments("NormalizeObs", clip=(FloatAbove0, clip))
        self.clip = float(clip)
        self._moments: dict[str, Moments] = {}
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self._frozen: dict[str, tuple[Constant, Constant]] = {}

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """Boxes that it changes become float32 Boxes from ``-clip`` to ``clip``."""
        found = {
            name: leaf
            for name, leaf in leaves(obs_space, col.OBS).items()
            if isinstance(leaf, spaces.Box)
            and name != col.OBS_MASK
            and (leaf_dtype(leaf).kind == "f" or (leaf_dtype(leaf).kind in "iu" and not has_pixels(leaf)))
        }
        self._moments = {name: Moments(leaf_shape(leaf)) for name, leaf in found.items()}
        # float64 observations are centred in float64: a large mean would cost digits in float32
        self._dtypes = {name: np.result_type(leaf_dtype(leaf), np.float32) for name, leaf in found.items()}
        self._freeze()

        def change(name: str, leaf: Space) -> Space:
            if name not in found:
                return leaf
            made = spaces.Box(-self.clip, self.clip, leaf_shape(leaf), np.float32)
            return with_channels(made, first=channels_come_first(leaf)) if len(leaf_shape(leaf)) == 3 else made

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
        final_obs = {name: exp.final_obs[name] for name in batches if name in exp.final_obs}
        check_finite(Experience(batches, exp.offsets, exp.segments, final_obs), (col.OBS,))
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
                "the checkpoint is of another env, of other connectors before this one, or of an older Etude, "
                "which left integers as they are."
            )
        for name, values in state.items():
            self._moments[name].load_state_dict(values)
        self._freeze()


_REWARD = "prev_reward"


class PrevActionReward(PreviousActions):
    """Adds the action and the reward of the previous step to the observation; zeros at the start of an episode.

    The action is the module's, as one float32 vector: Discrete and MultiDiscrete parts are one-hot, other parts flat. A
    Box of float vectors stays one Box: ``[obs, action, reward]``. A Dict gets the keys ``prev_action`` ``[n]`` and
    ``prev_reward`` ``[1]``. Any other space becomes a Dict of these two and ``obs``.
    """

    context = 1

    needs = (col.OBS, col.ACTION, col.REWARD)

    def __init__(self) -> None:
        super().__init__()
        self._vector_dtype: np.dtype[Any] | None = None
        """The dtype of the Box into which everything is joined; None if the result is a Dict."""
        self._wraps = False

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        width = self._set_codes(action_space)
        is_vector = isinstance(obs_space, spaces.Box) and len(obs_space.shape) == 1
        self._vector_dtype = leaf_dtype(obs_space) if is_vector and leaf_dtype(obs_space).kind == "f" else None
        self._wraps = self._vector_dtype is None and not isinstance(obs_space, spaces.Dict)
        if isinstance(obs_space, spaces.Box) and self._vector_dtype is not None:
            unbounded = np.full(width + 1, np.inf, self._vector_dtype)
            low, high = np.append(obs_space.low, -unbounded), np.append(obs_space.high, unbounded)
            return spaces.Box(low, high, dtype=self._vector_dtype.type), action_space
        added = {key: spaces.Box(-np.inf, np.inf, (n,), np.float32) for key, n in ((PREV_ACTION, width), (_REWARD, 1))}
        return with_parts(obs_space, added, "PrevActionReward"), action_space

    def _extended(self, obs: Columns, action: Columns, reward: Array, first: Array) -> Columns:
        """``obs`` with the previous step, float32 ``[rows, width + 1]``; zeros where ``first``."""
        before = concat([self._codes(action), cast(reward, np.float32)[:, None]], 1)
        before = where_rows(first, 0.0, before)
        if self._vector_dtype is not None:
            return {col.OBS: concat([cast(obs[col.OBS], self._vector_dtype), cast(before, self._vector_dtype)], 1)}
        return with_part_columns(obs, {PREV_ACTION: before[:, :-1], _REWARD: before[:, -1:]}, wraps=self._wraps)

    def online(self, inputs: Inputs) -> Inputs:
        """Add the previous step to each row."""
        return inputs.with_obs(self._extended(inputs.obs, inputs.prev_action, inputs.prev_reward, inputs.first))

    def step(self, inputs: Inputs, state: Columns) -> tuple[Inputs, Columns]:
        """Like `online`, also for tensors; there is no state."""
        return self.online(inputs), state

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Add the previous step to each step, and the last step to ``final_obs``."""
        obs, final_obs = observations(exp)
        before, last, first = step_before(exp, (*self._codes.names, col.REWARD), "PrevActionReward")
        never = np.zeros(exp.num_segments, bool)
        return replace_obs(
            exp,
            self._extended(obs, before, before[col.REWARD], first),
            self._extended(final_obs, last, last[col.REWARD], never),
        )


class Drop(ObservationMap):
    """Leaves out parts of the observation: ``drop:mission``, ``drop:info/text,direction``.

    A part that Etude can't handle, such as a Text space, is left out of recordings as well. Any other part is recorded
    as usual, and left out only for the module.

    Args:
        parts: Paths in the observation's Dict space, separated by commas; keys in a path are separated by ``/``.
    """

    needs = ()
    takes_tensors = True

    def __init__(self, parts: str = "") -> None:
        self.parts = parts
        self.paths = tuple(part.strip() for part in parts.split(",") if part.strip())
        """The paths one by one."""
        self._columns = tuple(f"{col.OBS}{SEPARATOR}{path}" for path in self.paths)

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """Remove the parts from the observation space, as far as it has them.

        Raises:
            SettingsError: no part is given.
            SpaceError: nothing would be left.
        """
        if not self.paths:
            raise SettingsError("the connector `drop` needs the name of a part of the observation, as in drop:mission.")
        return without(obs_space, self.paths), action_space

    def map_rows(self, obs: Columns, rows: int) -> Columns:
        return {name: c for name, c in obs.items() if not any(col.is_under(name, gone) for gone in self._columns)}

    def __repr__(self) -> str:
        return f"{self.name}:{self.parts}" if self.parts else self.name
