# SPDX-License-Identifier: Apache-2.0
"""What happened in the step before, as a part of the observation."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import SEPARATOR, Columns
from etude.connectors.base import Connector, Inputs, column, replace_obs
from etude.errors import SpaceError
from etude.experience import Experience
from etude.spaces import Space, leaf_dtype, leaf_shape, leaves

if TYPE_CHECKING:
    from etude.modules.module import Module

_ACTION, _REWARD = "prev_action", "prev_reward"


@dataclasses.dataclass(frozen=True, slots=True)
class _Code:
    """How one action column becomes numbers: one-hot where ``values`` are given, else as it is, flattened."""

    width: int
    """How many numbers."""
    components: int
    """How many components the action has."""
    values: NDArray[np.int64] | None = None
    """``[width]``: the choice that each number stands for."""
    source: NDArray[np.int64] | None = None
    """``[width]``: which component of the action that is."""

    @classmethod
    def of(cls, leaf: Space) -> "_Code":
        if isinstance(leaf, spaces.Discrete):
            sizes, starts = np.array([leaf.n]), np.array([leaf.start])
        elif isinstance(leaf, spaces.MultiDiscrete):
            sizes, starts = leaf.nvec.reshape(-1).astype(np.int64), leaf.start.reshape(-1).astype(np.int64)
        else:
            size = int(np.prod(leaf_shape(leaf)))
            return cls(size, size)
        values = np.concatenate([start + np.arange(size) for size, start in zip(sizes, starts, strict=True)])
        return cls(len(values), len(sizes), values, np.repeat(np.arange(len(sizes)), sizes))

    def __call__(self, action: NDArray[Any]) -> NDArray[Any]:
        """``[rows, ...]`` to ``[rows, width]``."""
        flat = action.reshape(len(action), self.components)
        if self.values is None or self.source is None:
            return flat
        chosen = flat if self.components == 1 else flat.take(self.source, axis=1)
        hot: NDArray[np.bool_] = np.equal(chosen, self.values)
        return hot


class PrevActionReward(Connector):
    """The action and the reward of the step before, as a part of the observation; zeros at the start of an episode.

    The action is what the module chose: one-hot for Discrete and MultiDiscrete, all its parts as one float32 vector.
    A Box of float vectors stays one Box: ``[obs, action, reward]``. A Dict gains the keys ``prev_action`` ``[n]`` and
    ``prev_reward`` ``[1]``. Any other space becomes a Dict of these two and ``obs``.
    """

    context = 1

    needs = (col.OBS, col.ACTION, col.REWARD)

    def __init__(self) -> None:
        self._codes: dict[str, _Code] = {}
        self._width = 0
        self._vector_dtype: np.dtype[Any] | None = None
        """Of the one Box that all is joined into; None where the observation is a Dict."""
        self._wraps = False

    def spaces(self, obs_space: Space, action_space: Space) -> tuple[Space, Space]:
        """See the class."""
        self._codes = {name: _Code.of(leaf) for name, leaf in leaves(action_space, col.ACTION).items()}
        self._width = sum(code.width for code in self._codes.values())
        is_vector = isinstance(obs_space, spaces.Box) and len(obs_space.shape) == 1
        self._vector_dtype = leaf_dtype(obs_space) if is_vector and leaf_dtype(obs_space).kind == "f" else None
        self._wraps = self._vector_dtype is None and not isinstance(obs_space, spaces.Dict)
        if isinstance(obs_space, spaces.Box) and self._vector_dtype is not None:
            unbounded = np.full(self._width + 1, np.inf, self._vector_dtype)
            low, high = np.append(obs_space.low, -unbounded), np.append(obs_space.high, unbounded)
            return spaces.Box(low, high, dtype=self._vector_dtype.type), action_space
        parts = dict(obs_space.spaces) if isinstance(obs_space, spaces.Dict) else {col.OBS: obs_space}
        for key, width in ((_ACTION, self._width), (_REWARD, 1)):
            if key in parts:
                raise SpaceError(
                    f"PrevActionReward adds the key {key!r}, but the observation has it: rename the env's."
                )
            parts[key] = spaces.Box(-np.inf, np.inf, (width,), np.float32)
        return spaces.Dict(list(parts.items())), action_space

    def _extended(
        self, obs: Columns, action: Columns, reward: NDArray[Any], first: NDArray[np.bool_] | None
    ) -> Columns:
        """``obs`` with the step before; ``first`` None is no row."""
        before = np.empty((len(reward), self._width + 1), np.float32)
        at = 0
        for name, code in self._codes.items():
            before[:, at : at + code.width] = code(action[name])
            at += code.width
        before[:, at] = reward
        if first is not None and first.any():
            before[first] = 0
        if self._vector_dtype is not None:
            return {col.OBS: np.concatenate([obs[col.OBS], before], axis=1, dtype=self._vector_dtype)}
        out = col.renamed(obs, col.OBS, f"{col.OBS}{SEPARATOR}{col.OBS}") if self._wraps else dict(obs)
        out[f"{col.OBS}{SEPARATOR}{_ACTION}"] = before[:, :-1]
        out[f"{col.OBS}{SEPARATOR}{_REWARD}"] = before[:, -1:]
        return out

    def online(self, inputs: Inputs) -> Inputs:
        """Adds the step before to each row."""
        return inputs.with_obs(self._extended(inputs.obs, inputs.prev_action, inputs.prev_reward, inputs.first))

    def offline(self, exp: Experience, module: "Module | None" = None) -> Experience:
        """Adds the step before to each step, and the last step to ``final_obs``."""
        who = "PrevActionReward"
        action = {name: column(exp, name, who) for name in self._codes}
        reward = column(exp, col.REWARD, who)
        obs = {name: column(exp, name, who) for name in exp.final_obs}
        final_obs = {name: np.asarray(final) for name, final in exp.final_obs.items()}
        # rows are shifted by one over the borders of segments, where `first` then clears them
        before = np.maximum(np.arange(exp.num_steps) - 1, 0)
        first = np.zeros(exp.num_steps, bool)
        first[exp.offsets[:-1]] = True
        last = exp.offsets[1:] - 1
        return replace_obs(
            exp,
            self._extended(obs, {n: a.take(before, axis=0) for n, a in action.items()}, reward.take(before), first),
            self._extended(final_obs, {n: a.take(last, axis=0) for n, a in action.items()}, reward.take(last), None),
        )
