# SPDX-License-Identifier: Apache-2.0
"""Encoders: from the columns of an observation to one vector of float32 numbers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from etude.columns import ACTION_MASK, OBS, OBS_MASK
from etude.errors import ModuleError, SettingsError
from etude.spaces import Space, leaf_shape, leaves

Conv: TypeAlias = tuple[int, int, int]
"""One convolution: channels, kernel size, stride."""

NATURE_CONV: tuple[Conv, ...] = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""For images of at least 36 pixels a side: Mnih et al. 2015 (Nature 518), methods."""
SMALL_CONV: tuple[Conv, ...] = ((16, 3, 1), (32, 3, 1))
"""For smaller images (grid worlds)."""

_SMALLEST_IMAGE = 5  # pixels a side: below, SMALL_CONV does not fit and the numbers go in as they are


def orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> None:
    """Orthogonal weights times ``gain`` and zero biases, in place (Huang et al. 2022, detail 2 of 37)."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


class Numbers(nn.Module):
    """The numbers of a Box or MultiBinary, in a row, as float32; uint8 is divided by 255."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self._axes = len(leaf_shape(space))
        self._scale = 1.0 / 255.0 if isinstance(space, spaces.Box) and space.dtype == np.uint8 else None
        self.width = math.prod(leaf_shape(space))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., *shape]`` to ``[..., width]``."""
        if self._axes == 1 and x.dtype == torch.float32:
            return x
        x = x.reshape(*x.shape[: x.dim() - self._axes], self.width).float()
        return x if self._scale is None else x * self._scale

    def write(self, x: NDArray[Any], out: NDArray[np.float32]) -> None:
        """The same in NumPy: ``[N, *shape]`` into ``out`` of ``[N, width]``."""
        if self._scale is None:
            out[...] = x.reshape(out.shape)
        else:
            np.multiply(x.reshape(out.shape), np.float32(self._scale), out=out)


class OneHot(nn.Module):
    """A Discrete or MultiDiscrete as ones and zeros, one choice after the other."""

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete) -> None:
        super().__init__()
        self._axes = len(leaf_shape(space))
        sizes = np.atleast_1d(space.n if isinstance(space, spaces.Discrete) else space.nvec).reshape(-1)
        self._shift = (np.cumsum(sizes) - sizes - np.reshape(space.start, -1)).astype(np.int64)
        self.shift: Tensor
        self.register_buffer("shift", torch.from_numpy(self._shift), persistent=False)
        self.width = int(sizes.sum())

    def forward(self, x: Tensor) -> Tensor:
        """``[..., *shape]`` to ``[..., width]``."""
        lead = x.shape[: x.dim() - self._axes]
        index = x.reshape(*lead, len(self._shift)).long() + self.shift
        return torch.zeros(*lead, self.width, device=x.device).scatter_(-1, index, 1.0)

    def write(self, x: NDArray[Any], out: NDArray[np.float32]) -> None:
        """The same in NumPy: ``[N, *shape]`` into ``out`` of ``[N, width]``."""
        index = x.reshape(len(x), len(self._shift)) + self._shift
        out[...] = 0.0
        out[np.arange(len(x))[:, None], index] = 1.0


class Image(nn.Module):
    """Convolutions and one linear layer over a Box of three axes; uint8 is divided by 255.

    The channels are the last axis, or the first where that is shorter.
    """

    def __init__(self, space: spaces.Box, conv: Sequence[Conv] | None, width: int) -> None:
        super().__init__()
        shape = space.shape
        self._channels_first = shape[0] < shape[2]
        channels, *size = shape if self._channels_first else (shape[2], *shape[:2])
        self._scale = 1.0 / 255.0 if space.dtype == np.uint8 else None
        self.width = width
        parts: list[nn.Module] = []
        for out, kernel, stride in conv or (NATURE_CONV if min(size) >= 36 else SMALL_CONV):
            if min(size) < kernel:
                raise SettingsError(
                    f"`conv`: a kernel of {kernel} does not fit on the {size[0]} x {size[1]} pixels that it gets, for "
                    f"images of {shape}. Use smaller kernels or strides, or None for a default that fits."
                )
            layer = nn.Conv2d(channels, out, kernel, stride)
            orthogonal(layer, math.sqrt(2))
            parts += [layer, nn.ReLU()]
            channels, size = out, [(pixels - kernel) // stride + 1 for pixels in size]
        last = nn.Linear(channels * size[0] * size[1], width)
        orthogonal(last, math.sqrt(2))
        self.layers = nn.Sequential(*parts, nn.Flatten(), last, nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H, W, C]`` or ``[..., C, H, W]`` to ``[..., width]``."""
        lead, x = x.shape[:-3], x.reshape(-1, *x.shape[-3:])
        if not self._channels_first:
            x = x.permute(0, 3, 1, 2)
        x = x.float() if self._scale is None else x.float() * self._scale
        encoded: Tensor = self.layers(x)
        return encoded.reshape(*lead, self.width)


def is_image(leaf: Space) -> bool:
    """Whether convolutions are used for a simple space: a Box of three axes, at least 5 pixels a side."""
    if not isinstance(leaf, spaces.Box) or len(leaf.shape) != 3:
        return False
    height, width = leaf.shape[1:] if leaf.shape[0] < leaf.shape[2] else leaf.shape[:2]
    return min(height, width) >= _SMALLEST_IMAGE


class Encoder(nn.Module):
    """All leaves of an observation but its `action_mask`, encoded one by one and concatenated.

    Attributes:
        width: The length of the vector.
        parts: The encoder of each leaf by column name.
        vector: No leaf is an image.
    """

    def __init__(self, obs_space: Space, conv: Sequence[Conv] | None, conv_width: int) -> None:
        super().__init__()
        self.parts: dict[str, Numbers | OneHot | Image] = {}
        for name, leaf in leaves(obs_space, OBS).items():
            if name == OBS_MASK:
                continue  # it says what is allowed, not how things stand
            if is_image(leaf):
                assert isinstance(leaf, spaces.Box)
                self.parts[name] = Image(leaf, conv, conv_width)
            elif isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete):
                self.parts[name] = OneHot(leaf)
            else:
                self.parts[name] = Numbers(leaf)
        if not self.parts:
            raise ModuleError(
                f"the observation is its {ACTION_MASK!r} and nothing else: the network has nothing to see. Put an "
                "observation beside the mask, if only a constant one."
            )
        self.encoders = nn.ModuleList(self.parts.values())
        self.width = sum(part.width for part in self.parts.values())
        self.vector = not any(isinstance(part, Image) for part in self.parts.values())

    def forward(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Columns ``[..., *shape]`` to ``[..., width]``."""
        encoded = [part(columns[name]) for name, part in self.parts.items()]
        return encoded[0] if len(encoded) == 1 else torch.cat(encoded, -1)
