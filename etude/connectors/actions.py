# SPDX-License-Identifier: Apache-2.0
"""Connectors that change actions on their way from module to env."""

import numpy as np
from gymnasium import spaces

from etude import columns as col
from etude.columns import Columns
from etude.connectors.connector import Connector
from etude.errors import SpaceError
from etude.experience.arrays import Array, Constant, clip
from etude.spaces import Space, leaf_dtype, leaves, map_leaves


class BoundedActions(Connector):
    """Base class of connectors that change the parts of an action that are bounded Boxes of floats."""

    takes_tensors = True

    def __init__(self) -> None:
        self.bounds: dict[str, tuple[Constant, Constant]] = {}
        """Lower and upper bounds of each part that is changed, by column name."""

    def act(self, action: Columns) -> Columns:
        return {n: self._bounded(a, *self._bounds_of(n, a)) if n in self.bounds else a for n, a in action.items()}

    def _bounds_of(self, name: str, action: Array) -> tuple[Array, Array]:
        low, high = self.bounds[name]
        return low.like(action), high.like(action)

    def _bounded(self, action: Array, low: Array, high: Array) -> Array:
        raise NotImplementedError


def _float_boxes(space: Space) -> dict[str, spaces.Box]:
    found = leaves(space, col.ACTION).items()
    return {name: leaf for name, leaf in found if isinstance(leaf, spaces.Box) and leaf_dtype(leaf).kind == "f"}


def _bounds(box: spaces.Box) -> tuple[Constant, Constant]:
    return Constant(box.low), Constant(box.high)


class ClipAction(BoundedActions):
    """Clips actions to the bounds of the env's float Boxes; other actions are unchanged."""

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """Return the spaces unchanged."""
        boxes = _float_boxes(action_space).items()
        self.bounds = {n: _bounds(box) for n, box in boxes if box.bounded_below.any() or box.bounded_above.any()}
        return obs_space, action_space

    def _bounded(self, action: Array, low: Array, high: Array) -> Array:
        return clip(action, low, high)


class RescaleAction(BoundedActions):
    """Rescales the module's actions from [-1, 1] to the bounds of the env's float Boxes.

    Values outside [-1, 1] are clipped. Other actions are unchanged.
    """

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """Replace float Boxes in the action space by Boxes from -1 to 1.

        Raises:
            SpaceError: one of them is unbounded.
        """
        boxes = _float_boxes(action_space)
        for name, box in boxes.items():
            if not box.is_bounded():
                raise SpaceError(
                    f"RescaleAction can't stretch [-1, 1] to `{name}`, which is not bounded on all sides: {box}. "
                    "Bound it in the env, or leave the connector out."
                )
        self.bounds = {name: _bounds(box) for name, box in boxes.items()}

        def change(name: str, leaf: Space) -> Space:
            box = boxes.get(name)
            return leaf if box is None else spaces.Box(-1.0, 1.0, box.shape, leaf_dtype(box).type)

        return obs_space, map_leaves(action_space, change, col.ACTION)

    def _bounded(self, action: Array, low: Array, high: Array) -> Array:
        share = (clip(action, -1, 1) + 1) * 0.5
        # a weighted mean is exact at both ends and can't overflow; rounding may still exceed a bound in between
        return clip(low * (1 - share) + high * share, low, high)

    @property
    def log_scale(self) -> float:
        """The change in an action's log-density by `unact`: the sum of ``log((high - low) / 2)`` over its components
        whose bounds differ."""
        halves = (0.5 * (high.value.astype(np.float64) - low.value) for low, high in self.bounds.values())
        return float(sum(np.log(half[half > 0]).sum() for half in halves))

    def unact(self, action: Columns) -> Columns:
        """Rescale the env's actions to [-1, 1]; 0 where the bounds coincide."""
        out = dict(action)
        for name in self.bounds:
            low, high = self._bounds_of(name, action[name])
            is_wide = high > low
            out[name] = (2 * (action[name] - low) / (high - low + ~is_wide) - 1) * is_wide
        return out
