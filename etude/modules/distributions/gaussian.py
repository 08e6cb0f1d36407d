# SPDX-License-Identifier: Apache-2.0
"""Distributions over Box actions; the inputs are means, then logarithms of standard deviations."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional as F

from etude.columns import Columns
from etude.errors import SpaceError
from etude.modules.distributions.base import Distribution, Floats

LOG_STD_RANGE = (-20.0, 2.0)
"""Where a squashed Gaussian's log standard deviations are clamped (Haarnoja et al. 2018, their published code)."""

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_EDGE = 1.0 - 1e-6  # tanh of about 7.25: closer to 1 float32 can't tell the arguments apart


def _normal_logp(mean: Tensor, log_std: Tensor, value: Tensor) -> Tensor:
    scaled = (value - mean) * torch.exp(-log_std)
    return -(0.5 * scaled.square() + log_std).sum(-1) - mean.shape[-1] * _HALF_LOG_2PI


def _normal_entropy(log_std: Tensor) -> Tensor:
    return log_std.sum(-1) + log_std.shape[-1] * (0.5 + _HALF_LOG_2PI)


def _normal_kl(p_mean: Tensor, p_log_std: Tensor, q_mean: Tensor, q_log_std: Tensor) -> Tensor:
    change = q_log_std - p_log_std
    shift = (p_mean - q_mean) * torch.exp(-q_log_std)
    return (change + 0.5 * (torch.exp(-2.0 * change) + shift.square() - 1.0)).sum(-1)


def _size(space: spaces.Box, root: str) -> int:
    if np.dtype(space.dtype).kind != "f":
        raise SpaceError(
            f"`{root}` is a Box of {np.dtype(space.dtype)}: no distribution is made for whole-numbered Boxes. Use a "
            "Discrete or MultiDiscrete space, or a Box of float32 and round in the env."
        )
    return int(np.prod(space.shape))


class DiagGaussian(Distribution):
    """Independent normal numbers of a Box of any shape. Inputs: all means, then all log standard deviations.

    The action is what was drawn: it is not held inside the Box's bounds (an env gets it through a connector that clips
    or rescales).
    """

    def __init__(self, space: spaces.Box, root: str) -> None:
        self._size = size = _size(space, root)
        super().__init__(space, root, num_inputs=2 * size, num_noise=size, log_std=range(size, 2 * size))
        self._name = root
        self._shape = space.shape
        self._dtype = np.dtype(space.dtype)

    def noise(self, rng: np.random.Generator, rows: tuple[int, ...]) -> Floats:
        """Standard normal noise ``[*rows, size]``."""
        return rng.standard_normal((*rows, self._size), dtype=np.float32)

    def act(self, inputs: Floats, noise: Floats | None) -> Columns:
        """The actions ``[N, *shape]``; `Distribution.act`."""
        mean = inputs[:, : self._size]
        if noise is None:
            action = mean.copy()
        else:
            action = np.exp(inputs[:, self._size :])
            action *= noise
            action += mean
        return {self._name: action.reshape(len(inputs), *self._shape).astype(self._dtype, copy=False)}

    def logp(self, inputs: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        """The log-density; `Distribution.logp`."""
        mean, log_std = inputs.chunk(2, -1)
        return _normal_logp(mean, log_std, action[self._name].reshape(mean.shape).to(mean.dtype))

    def entropy(self, inputs: Tensor) -> Tensor:
        """The differential entropy; `Distribution.entropy`."""
        return _normal_entropy(inputs.chunk(2, -1)[1])

    def kl(self, p_inputs: Tensor, q_inputs: Tensor) -> Tensor:
        """KL(p || q); `Distribution.kl`."""
        return _normal_kl(*p_inputs.chunk(2, -1), *q_inputs.chunk(2, -1))

    def rsample(self, inputs: Tensor, noise: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Actions ``[..., *shape]`` by column and their log-density ``[...]``, both differentiable in ``inputs``.

        Args:
            inputs: ``[..., 2 * size]``.
            noise: ``[..., size]`` standard normal numbers.
        """
        mean, log_std = inputs.chunk(2, -1)
        drawn = mean + torch.exp(log_std) * noise
        return {self._name: drawn.reshape(*drawn.shape[:-1], *self._shape)}, _normal_logp(mean, log_std, drawn)


class SquashedGaussian(Distribution):
    """Normal numbers u through tanh, scaled to a Box's bounds: low + (high - low) (tanh(u) + 1) / 2.

    Inputs: all means of u, then all log standard deviations of u, clamped to `LOG_STD_RANGE`. The density follows
    Haarnoja et al. 2018 (arXiv 1801.01290), appendix C, with log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), which
    is exact where tanh(u) rounds to 1. The entropy has no closed form and is integrated by Gauss-Hermite quadrature;
    the divergence is that of the normal numbers, as tanh is a bijection.

    Raises:
        SpaceError: a bound is infinite.
    """

    def __init__(self, space: spaces.Box, root: str) -> None:
        self._size = size = _size(space, root)
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            raise SpaceError(
                f"`{root}` is {space}: a squashed Gaussian needs finite bounds. Give the env's action space finite "
                "bounds, or don't squash."
            )
        super().__init__(space, root, num_inputs=2 * size, num_noise=size, log_std=range(size, 2 * size))
        self._name = root
        self._shape = space.shape
        self._low, self._high = space.low, space.high
        low, high = space.low.reshape(-1).astype(np.float64), space.high.reshape(-1).astype(np.float64)
        self._middle, self._half = (low + high) / 2, (high - low) / 2
        nodes, weights = np.polynomial.hermite_e.hermegauss(32)
        self._nodes, self._weights = nodes.reshape(-1, 1), weights / weights.sum()

    def noise(self, rng: np.random.Generator, rows: tuple[int, ...]) -> Floats:
        """Standard normal noise ``[*rows, size]``."""
        return rng.standard_normal((*rows, self._size), dtype=np.float32)

    def act(self, inputs: Floats, noise: Floats | None) -> Columns:
        """The actions ``[N, *shape]``, inside the bounds; `Distribution.act`."""
        drawn: Floats = inputs[:, : self._size]
        if noise is not None:
            drawn = drawn + np.exp(inputs[:, self._size :].clip(*LOG_STD_RANGE)) * noise
        action = (self._middle + self._half * np.tanh(drawn)).reshape(len(inputs), *self._shape)
        return {self._name: np.clip(action.astype(self._low.dtype), self._low, self._high)}

    def _parts(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = inputs.chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD_RANGE)

    def _log_slope(self, drawn: Tensor) -> Tensor:
        """log |d action / d u|, for each number."""
        half = torch.as_tensor(self._half, dtype=drawn.dtype, device=drawn.device)
        return torch.log(half) + 2.0 * (math.log(2.0) - drawn - F.softplus(-2.0 * drawn))

    def logp(self, inputs: Tensor, action: Mapping[str, Tensor]) -> Tensor:
        """The log-density; actions at a bound count as just inside; `Distribution.logp`."""
        mean, log_std = self._parts(inputs)
        middle, half = (torch.as_tensor(x, device=inputs.device) for x in (self._middle, self._half))
        scaled = (action[self._name].reshape(mean.shape).double() - middle) / half
        drawn = torch.atanh(scaled.clamp(-_EDGE, _EDGE)).to(mean.dtype)
        return _normal_logp(mean, log_std, drawn) - self._log_slope(drawn).sum(-1)

    def entropy(self, inputs: Tensor) -> Tensor:
        """The differential entropy H(u) + E[log |d action / d u|]; `Distribution.entropy`."""
        mean, log_std = self._parts(inputs)
        nodes, weights = (
            torch.as_tensor(x, dtype=mean.dtype, device=mean.device) for x in (self._nodes, self._weights)
        )
        drawn = mean.unsqueeze(-2) + torch.exp(log_std).unsqueeze(-2) * nodes
        return _normal_entropy(log_std) + torch.einsum("...kd,k->...", self._log_slope(drawn), weights)

    def kl(self, p_inputs: Tensor, q_inputs: Tensor) -> Tensor:
        """KL(p || q); `Distribution.kl`."""
        return _normal_kl(*self._parts(p_inputs), *self._parts(q_inputs))

    def rsample(self, inputs: Tensor, noise: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Actions ``[..., *shape]`` by column and their log-density ``[...]``, both differentiable in ``inputs``.

        Args:
            inputs: ``[..., 2 * size]``.
            noise: ``[..., size]`` standard normal numbers.
        """
        mean, log_std = self._parts(inputs)
        drawn = mean + torch.exp(log_std) * noise
        middle, half = (torch.as_tensor(x, dtype=mean.dtype, device=mean.device) for x in (self._middle, self._half))
        action = (middle + half * torch.tanh(drawn)).reshape(*drawn.shape[:-1], *self._shape)
        return {self._name: action}, _normal_logp(mean, log_std, drawn) - self._log_slope(drawn).sum(-1)
