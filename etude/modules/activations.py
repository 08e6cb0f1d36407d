# SPDX-License-Identifier: Apache-2.0
"""Activation functions, each in torch and in NumPy."""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import nn

Floats: TypeAlias = NDArray[np.float32]


class Activation(NamedTuple):
    """One activation function: a maker of its torch module, and the same in place on a NumPy array."""

    torch: Callable[[], nn.Module]
    in_place: Callable[[Floats], object] | None
    """None: the identity."""


def _tanh(x: Floats) -> None:
    np.tanh(x, out=x)


def _relu(x: Floats) -> None:
    np.maximum(x, 0.0, out=x)


def _silu(x: Floats) -> None:
    # x * sigmoid(x), by tanh: exp would overflow
    half = 0.5 * x
    x *= 0.5 + 0.5 * np.tanh(half)


def _gelu(x: Floats) -> None:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)
    x *= 0.5 + 0.5 * np.tanh(inner)


def _elu(x: Floats) -> None:
    below = np.expm1(np.minimum(x, 0.0))
    np.maximum(x, below, out=x)


ACTIVATIONS: dict[str, Activation] = {
    "tanh": Activation(nn.Tanh, _tanh),
    "relu": Activation(nn.ReLU, _relu),
    "silu": Activation(nn.SiLU, _silu),
    "gelu": Activation(lambda: nn.GELU(approximate="tanh"), _gelu),
    "elu": Activation(nn.ELU, _elu),
    "linear": Activation(nn.Identity, None),
}
