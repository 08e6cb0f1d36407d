# SPDX-License-Identifier: Apache-2.0
"""The last observations of an episode as one."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.connectors.base import Connector, Inputs, column, map_leaves, replace_obs
from etude.errors import CheckpointError
from etude.experience import Experience
from etude.settings import check_range
from etude.spaces import Space, leaf_dtype, leaf_shape, leaves

if TYPE_CHECKING:
    from etude.modules.module import Module


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """How the frames of one column lie side by side; axes are counted with the batch's in front."""

    k: int
    grows: bool
    """A frame gets a new last axis first."""
    axis: int
    width: int
    """The size of one frame along ``axis``."""
    shape: tuple[int, ...]
    """Of the whole stack, without the batch's axis."""
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, leaf: Space, k: int) -> "_Layout":
        shape = leaf_shape(leaf)
        grows = len(shape) in (0, 2)
        frame = (*shape, 1) if grows else shape
        channels_first = len(frame) == 3 and frame[0] < frame[2]
        at = 0 if channels_first and not grows else len(frame) - 1
        stack = (*frame[:at], k * frame[at], *frame[at + 1 :])
        return cls(k, grows, at + 1, frame[at], stack, leaf_dtype(leaf))

    def frame(self, values: NDArray[Any]) -> NDArray[Any]:
        return np.expand_dims(values, -1) if self.grows else values

    def part(self, first: int, last: int) -> tuple[slice, ...]:
        """The index of the frames ``first`` up to ``last`` of a batch of stacks; the newest is ``k - 1``."""
        return (*(slice(None),) * self.axis, slice(first * self.width, last * self.width))

    def repeated(self, values: NDArray[Any]) -> NDArray[Any]:
        """Stacks that hold ``values`` k times."""
        return np.concatenate([self.frame(values)] * self.k, axis=self.axis)

    def pushed(self, before: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
        """New stacks: those ``before`` without their oldest frame, and ``values``."""
        out: NDArray[Any] = np.empty(before.shape, before.dtype)
        # one straight copy, a frame to the left; what crosses the end of a row lands where the new frame comes
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
    """The last ``k`` observations of the episode as one, the newest last; at its start the first one fills the stack.

    Frames are joined along the last axis: ``[n]`` becomes ``[k * n]``, images ``[H, W, C]`` become ``[H, W, k * C]``.
    Numbers and ``[H, W]`` get a new last axis: ``[k]``, ``[H, W, k]``. Three axes of which the first is shorter than
    the last are an image ``[C, H, W]`` and become ``[k * C, H, W]``. Discrete leaves become MultiDiscrete.

    Args:
        k: How many frames, 1 or more; 4 as in Mnih et al. 2015, "Human-level control through deep RL".
    """

    needs = (col.OBS,)

    def __init__(self, k: int = 4) -> None:
        check_range("FrameStack", k=(isinstance(k, int) and k >= 1, f"a whole number of at least 1, not {k!r}"))
        self.k = k
        self.context = k - 1
        self._layouts: dict[str, _Layout] = {}
        self._all = np.zeros(0, np.int64)
        self._frames: Columns = {}
        self._lent = False
        """The stacks in ``_frames`` are also in the caller's hands, and must not be written to."""

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """Each leaf grows k times along the axis of the frames."""
        self._layouts = {name: _Layout.of(leaf, self.k) for name, leaf in leaves(obs_space, col.OBS).items()}
        return map_leaves(obs_space, lambda name, leaf: self._layouts[name].space(leaf), col.OBS), action_space

    def start(self, num_slots: int) -> None:
        """Empty stacks; each slot's first observation fills its own."""
        self._all = np.arange(num_slots)
        self._frames = {name: np.zeros((num_slots, *at.shape), at.dtype) for name, at in self._layouts.items()}
        self._lent = False

    def online(self, inputs: Inputs) -> Inputs:
        """Puts each row's observation on its slot's stack."""
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

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Looks the frames up, within segments."""
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
        """Goes on with these stacks, and as many slots."""
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
