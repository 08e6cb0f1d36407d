# SPDX-License-Identifier: Apache-2.0
"""Observations brought to mean 0 and deviation 1 by running statistics."""

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

_EPSILON = 1e-8
"""Added to the variance, so that a component that never changes is not divided by 0."""


class Moments:
    """Count, mean and variance of every component of one column, over all batches seen."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = 0
        self.mean = np.zeros(shape)
        self.squares = np.zeros(shape)
        """The sum of squared distances from the mean."""

    def add(self, batch: NDArray[Any]) -> None:
        """Merge in ``[rows, ...]``, in float64 (Chan, Golub & LeVeque 1979, "Updating formulae ...")."""
        rows = len(batch)
        if not rows:
            return
        mean = batch.mean(axis=0, dtype=np.float64)
        squares = np.square(batch - mean).sum(axis=0)
        total, shift = self.count + rows, mean - self.mean
        self.mean = self.mean + shift * (rows / total)
        self.squares = self.squares + squares + shift * shift * (self.count * rows / total)
        self.count = total

    def deviation(self) -> NDArray[np.float64]:
        """The standard deviation; 1 before anything was seen."""
        return np.sqrt(self.squares / self.count + _EPSILON) if self.count else np.ones_like(self.mean)


class NormalizeObs(Connector):
    """Brings each component of the observation to mean 0 and deviation 1, then clips it; the result is float32.

    Works on Box leaves of float dtype; others pass as they are, and so does an `action_mask`. Statistics are over all
    steps given to `update` (lookback left out), and stay frozen between two updates, so that a step is seen alike when
    acting and learning. Before the first update only the clipping works. Put it behind connectors that remember
    (`FrameStack`): what these hold over an update would have been normalised by the older statistics.

    Args:
        clip: The largest magnitude that passes, in standard deviations; ``inf`` for none. 10 is what the
            ``VecNormalize`` of OpenAI Baselines takes, and most PPO results with it.
    """

    needs = (col.OBS,)

    def __init__(self, clip: float = 10.0) -> None:
        check_range("NormalizeObs", clip=(clip > 0, f"above 0, not {clip}"))
        self.clip = float(clip)
        self._moments: dict[str, Moments] = {}
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self._frozen: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """Float Boxes become float32 Boxes from ``-clip`` to ``clip``."""
        found = {n: leaf for n, leaf in leaves(obs_space, col.OBS).items() if _is_float(leaf) and n != col.OBS_MASK}
        self._moments = {name: Moments(leaf_shape(leaf)) for name, leaf in found.items()}
        # float64 observations are centred in float64: a far-off mean would eat their digits in float32
        self._dtypes = {name: np.result_type(leaf_dtype(leaf), np.float32) for name, leaf in found.items()}
        self._freeze()

        def change(name: str, leaf: Space) -> Space:
            return spaces.Box(-self.clip, self.clip, leaf_shape(leaf), np.float32) if name in found else leaf

        return map_leaves(obs_space, change, col.OBS), action_space

    def _freeze(self) -> None:
        self._frozen = {
            name: (moments.mean.astype(self._dtypes[name]), (1 / moments.deviation()).astype(self._dtypes[name]))
            for name, moments in self._moments.items()
        }

    def _normalized(self, obs: Columns) -> Columns:
        out = dict(obs)
        for name, (mean, scale) in self._frozen.items():
            values = obs[name] - mean
            values *= scale
            np.maximum(values, -self.clip, out=values)
            np.minimum(values, self.clip, out=values)
            out[name] = values.astype(np.float32, copy=False)
        return out

    def online(self, inputs: Inputs) -> Inputs:
        """Normalises the rows."""
        return inputs.with_obs(self._normalized(inputs.obs))

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Normalises all steps and ``final_obs``."""
        obs = {name: column(exp, name, "NormalizeObs") for name in [*self._frozen, *exp.final_obs]}
        final_obs = {name: np.asarray(final) for name, final in exp.final_obs.items()}
        return replace_obs(exp, self._normalized(obs), self._normalized(final_obs))

    def update(self, exp: Experience) -> None:
        """Takes the steps into the statistics.

        Raises:
            DataError: an observation is not finite; the message says where. The statistics stay as they were.
        """
        batches = {name: column(exp, name, "NormalizeObs") for name in self._moments}
        if any(not np.isfinite(batch.sum(dtype=np.float64)) for batch in batches.values()):
            exp.validate(finite=(col.OBS,))
        has_lookback = bool(exp.segments.lookback.any())
        for name, batch in batches.items():
            self._moments[name].add(batch[exp.trained()] if has_lookback else batch)
        self._freeze()

    def metrics(self) -> dict[str, float]:
        """``count``: the steps that the statistics are over."""
        return {"count": float(max((moments.count for moments in self._moments.values()), default=0))}

    def state_dict(self) -> dict[str, Any]:
        """For each column: ``count``, ``mean`` and ``squares``."""
        return {
            name: {"count": moments.count, "mean": moments.mean.copy(), "squares": moments.squares.copy()}
            for name, moments in self._moments.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from these statistics."""
        here = {name: moments.mean.shape for name, moments in self._moments.items()}
        there = {name: np.shape(values["mean"]) for name, values in state.items()}
        if here != there:
            raise CheckpointError(
                f"the statistics of normalize_obs are of {there}, but the observations are {here}: "
                "the checkpoint is of another env, or of other connectors before this one."
            )
        for name, values in state.items():
            moments = self._moments[name]
            moments.count = int(values["count"])
            moments.mean = np.array(values["mean"], np.float64)
            moments.squares = np.array(values["squares"], np.float64)
        self._freeze()


def _is_float(leaf: Space) -> bool:
    return isinstance(leaf, spaces.Box) and leaf_dtype(leaf).kind == "f"
