# SPDX-License-Identifier: Apache-2.0
"""Running statistics."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Window:
    """The last ``size`` values, such as the returns of the last 100 episodes.

    ``mean``, ``min`` and ``max`` are NaN while there is no value. The state holds the values, not the size.
    """

    def __init__(self, size: int = 100) -> None:
        if size < 1:
            raise ValueError(f"a window needs a size of at least 1, not {size}.")
        self.size = size
        self.values: NDArray[np.float64] = np.zeros(0)
        """float64, at most ``size`` of them, oldest first; replaced by `add`, never written into."""

    def add(self, values: ArrayLike) -> None:
        """Take in one value or an array of them, in their order."""
        self.values = np.append(self.values, np.asarray(values, np.float64))[-self.size :]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        """The mean of the values."""
        return float(self.values.mean()) if len(self.values) else math.nan

    @property
    def min(self) -> float:
        """The least of the values."""
        return float(self.values.min()) if len(self.values) else math.nan

    @property
    def max(self) -> float:
        """The greatest of the values."""
        return float(self.values.max()) if len(self.values) else math.nan

    def state_dict(self) -> dict[str, Any]:
        """The values, for a checkpoint."""
        return {"values": self.values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`; the newest ``size`` of its values are kept."""
        self.values = np.array(state["values"], np.float64)[-self.size :]
