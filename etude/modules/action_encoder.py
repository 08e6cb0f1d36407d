# SPDX-License-Identifier: Apache-2.0
"""ActionEncoder: actions of any space as numbers that a critic can look at."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from etude.columns import ACTION
from etude.modules.encoders import Numbers, OneHot
from etude.spaces import Flattener, Space, leaves


class Scaled(nn.Module):
    """The numbers of a Box in a row: those with finite bounds are scaled to [-1, 1] and clipped, as the env clips them.

    Args:
        space: A Box of floats.
    """

    def __init__(self, space: spaces.Box) -> None:
        super().__init__()
        low, high = space.low.reshape(-1).astype(np.float64), space.high.reshape(-1).astype(np.float64)
        bounded = np.isfinite(low) & np.isfinite(high) & (low < high)
        self._shape = space.shape
        self.width = len(low)
        self.middle: Tensor
        self.scale: Tensor
        self.limit: Tensor
        with np.errstate(invalid="ignore"):  # of infinite bounds
            numbers = {
                "middle": np.where(bounded, (low + high) / 2, 0.0),
                "scale": np.where(bounded, (high - low) / 2, 1.0),
                "limit": np.where(bounded, 1.0, np.inf),
            }
        for name, values in numbers.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., *shape]`` to ``[..., width]``."""
        flat = x.reshape(*x.shape[: x.dim() - len(self._shape)], self.width).float()
        return ((flat - self.middle) / self.scale).clamp(-self.limit, self.limit)


class ActionEncoder(nn.Module):
    """All leaves of an action, one after the other: Boxes of floats scaled by their bounds, choices as ones and zeros.

    Args:
        space: What `distribution_for` handles.

    Attributes:
        width: The length of the vector.
    """

    def __init__(self, space: Space) -> None:
        super().__init__()
        self._columns_of = Flattener(space, ACTION)
        self._parts: dict[str, Scaled | OneHot | Numbers] = {
            name: _encoder_of(leaf) for name, leaf in leaves(space, ACTION).items()
        }
        self.encoders = nn.ModuleList(self._parts.values())
        self.width = sum(part.width for part in self._parts.values())

    def forward(self, action: Any) -> Tensor:
        """Actions nested as in the space, tensors ``[..., *shape]``, to ``[..., width]``."""
        columns = self._columns_of(action)
        encoded = [part(columns[name]) for name, part in self._parts.items()]
        return encoded[0] if len(encoded) == 1 else torch.cat(encoded, -1)


def _encoder_of(leaf: Space) -> Scaled | OneHot | Numbers:
    if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete):
        return OneHot(leaf)
    return Scaled(leaf) if isinstance(leaf, spaces.Box) else Numbers(leaf)
