# SPDX-License-Identifier: Apache-2.0
"""From NumPy to torch without a copy."""

from typing import Any

import torch
from numpy.typing import NDArray


def as_tensor(column: NDArray[Any]) -> torch.Tensor:
    """A tensor that shares the array's memory, or a copy where torch would not share it."""
    if not column.flags.writeable or any(stride < 0 for stride in column.strides):
        column = column.copy()
    return torch.from_numpy(column)
