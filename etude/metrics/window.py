# SPDX-License-Identifier: Apache-2.0
"""Running statistics."""

import math
import operator
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Smoothing: TypeAlias = Literal["window", "ema"]
"""How figures are smoothed: by `Window`, or by `Ema`."""


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

    def merge(self, later: "Window") -> None:
        """Take in the values of another window of this size, as if they had come after these."""
        self.values = np.append(self.values, later.values)[-self.size :]

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


class Ema(Window):
    """An exponential moving average of all values, the newest with weight ``2 / (size + 1)``.

    ``min`` and ``max`` are of the last ``size`` values. The average is not drawn towards any starting value: the
    weights sum to 1 from the first value on (Kingma & Ba 2015, section 3; what pandas calls ``adjust=True``).
    """

    def __init__(self, size: int = 100) -> None:
        super().__init__(size)
        self._sum = self._weight = 0.0

    def add(self, values: ArrayLike) -> None:
        """Take in one value or an array of them, in their order."""
        super().add(values)
        new = np.asarray(values, np.float64).reshape(-1)
        left = 1 - 2 / (self.size + 1)
        weights = left ** np.arange(len(new) - 1, -1, -1)
        self._sum = self._sum * left ** len(new) + float(weights @ new)
        self._weight = self._weight * left ** len(new) + float(weights.sum())

    def merge(self, later: Window) -> None:
        """Take in another moving average of this size, as if its values had come after these."""
        assert isinstance(later, Ema)
        super().merge(later)
        # n values weigh 1 + left + ... + left^(n-1) = (1 - left^n) / (1 - left), which gives left^n
        faded = 1 - later._weight * 2 / (self.size + 1)
        self._sum = self._sum * faded + later._sum
        self._weight = self._weight * faded + later._weight

    @property
    def mean(self) -> float:
        """The average; NaN while there is no value."""
        return self._sum / self._weight if self._weight else math.nan

    def state_dict(self) -> dict[str, Any]:
        """The last values and the average, for a checkpoint."""
        return {"values": self.values, "sum": self._sum, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`; from that of a `Window`, as if its values had just come."""
        super().load_state_dict({"values": np.zeros(0)})
        self._sum = self._weight = 0.0
        if "sum" not in state:
            self.add(state["values"])
            return
        super().load_state_dict(state)
        self._sum, self._weight = float(state["sum"]), float(state["weight"])


class Tally:
    """How many values there were, their sum, and the least and the greatest of them.

    ``mean``, ``min`` and ``max`` are NaN while there is no value.
    """

    def __init__(self) -> None:
        self._count, self.sum, self._min, self._max = 0, 0.0, math.inf, -math.inf

    def add(self, values: ArrayLike) -> None:
        """Take in one value or an array of them."""
        new = np.asarray(values, np.float64)
        if new.size:
            self._extend(new.size, float(new.sum()), float(new.min()), float(new.max()))

    def merge(self, other: "Tally") -> None:
        """Take in the values of another tally."""
        self._extend(other._count, other.sum, other._min, other._max)

    def _extend(self, count: int, total: float, least: float, greatest: float) -> None:
        self._count += count
        self.sum += total
        if least < self._min or math.isnan(least):  # min() and max() lose NaN
            self._min = least
        if greatest > self._max or math.isnan(greatest):
            self._max = greatest

    def __len__(self) -> int:
        return self._count

    @property
    def mean(self) -> float:
        """The mean of the values."""
        return self.sum / self._count if self._count else math.nan

    @property
    def min(self) -> float:
        """The least of the values."""
        return self._min if self._count else math.nan

    @property
    def max(self) -> float:
        """The greatest of the values."""
        return self._max if self._count else math.nan

    def state_dict(self) -> dict[str, Any]:
        """The four numbers, for a checkpoint."""
        return {"count": self._count, "sum": self.sum, "min": self._min, "max": self._max}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.sum, self._min, self._max = (float(state[name]) for name in ("sum", "min", "max"))
        self._count = operator.index(state["count"])
