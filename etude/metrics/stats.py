# SPDX-License-Identifier: Apache-2.0
"""Running statistics, and named metrics that are logged anywhere in a run and read once per iteration."""

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from etude.errors import EtudeError
from etude.stateful import Stateful

if TYPE_CHECKING:
    import torch

Smoothing: TypeAlias = Literal["window", "ema"]
"""How metrics are smoothed: by `Window` or by `Ema`."""

By: TypeAlias = Literal["mean", "sum", "min", "max", "throughput", "lifetime", "window", "ema"]
"""How the values of a metric are reduced; see `Metrics`."""


class Window:
    """The last ``size`` values, such as the returns of the last 100 episodes.

    ``mean``, ``min`` and ``max`` are NaN if there is no value. The state holds the values, not the size.
    """

    def __init__(self, size: int = 100) -> None:
        if size < 1:
            raise ValueError(f"a window needs a size of at least 1, not {size}.")
        self.size = size
        self.values: NDArray[np.float64] = np.zeros(0)
        """float64, at most ``size`` values, oldest first. `add` replaces the array and never writes into it."""

    def add(self, values: ArrayLike) -> None:
        """Add one value, or an array of values in order."""
        self.values = np.append(self.values, np.asarray(values, np.float64))[-self.size :]

    def __len__(self) -> int:
        return len(self.values)

    def spread(self) -> tuple[float, float, float]:
        """`mean`, `min` and `max`."""
        return self.mean, self.min, self.max

    @property
    def mean(self) -> float:
        """The mean of the values."""
        return float(self.values.mean()) if len(self.values) else math.nan

    @property
    def min(self) -> float:
        """The minimum of the values."""
        return float(self.values.min()) if len(self.values) else math.nan

    @property
    def max(self) -> float:
        """The maximum of the values."""
        return float(self.values.max()) if len(self.values) else math.nan

    def state_dict(self) -> dict[str, Any]:
        """The values, for a checkpoint."""
        return {"values": self.values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; its newest ``size`` values are kept."""
        self.values = np.array(state["values"], np.float64)[-self.size :]


class Ema(Window):
    """An exponential moving average of all values, the newest with weight ``2 / (size + 1)``.

    ``min`` and ``max`` are over the last ``size`` values. The average is not biased towards an initial value: the
    weights sum to 1 from the first value on (Kingma & Ba 2015, section 3; ``adjust=True`` in pandas).
    """

    def __init__(self, size: int = 100) -> None:
        super().__init__(size)
        self._sum = self._weight = 0.0

    def add(self, values: ArrayLike) -> None:
        """Add one value, or an array of values in order."""
        super().add(values)
        new = np.asarray(values, np.float64).reshape(-1)
        left = 1 - 2 / (self.size + 1)
        weights = left ** np.arange(len(new) - 1, -1, -1)
        self._sum = self._sum * left ** len(new) + float(weights @ new)
        self._weight = self._weight * left ** len(new) + float(weights.sum())

    @property
    def mean(self) -> float:
        """The average; NaN if there is no value."""
        return self._sum / self._weight if self._weight else math.nan

    def state_dict(self) -> dict[str, Any]:
        """The last values and the average, for a checkpoint."""
        return {"values": self.values, "sum": self._sum, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; for one of a `Window`, its values are added anew."""
        self.values, self._sum, self._weight = np.zeros(0), 0.0, 0.0
        self.add(state["values"])
        if "sum" in state:
            self._sum, self._weight = float(state["sum"]), float(state["weight"])


class RunningStat(Stateful):
    """The number of values, their sum, minimum and maximum; minimum and maximum are NaN if there is no value."""

    _state = ("count", "sum", "min", "max")

    def __init__(self) -> None:
        self.count, self.sum, self.min, self.max = 0, 0.0, math.nan, math.nan

    def add(self, values: ArrayLike) -> None:
        """Add one value or an array of values."""
        new = np.asarray(values, np.float64)
        if new.size:
            least, greatest = float(new.min()), float(new.max())
            self.min = least if not self.count else float(np.minimum(self.min, least))  # min() would lose NaN
            self.max = greatest if not self.count else float(np.maximum(self.max, greatest))
            self.count, self.sum = self.count + new.size, self.sum + float(new.sum())

    def __bool__(self) -> bool:
        return self.count != 0

    @property
    def mean(self) -> float:
        """The mean of the values."""
        return self.sum / self.count if self.count else math.nan


class _Entry:
    """The statistic of one metric, and the values that have not been added to it yet."""

    def __init__(self, by: By, window: int) -> None:
        self.by, self.window = by, window
        self.waiting: list[Any] = []
        self.stat: Any = Window(window) if by == "window" else Ema(window) if by == "ema" else RunningStat()


class Metrics:
    """Metrics by name, such as ``loss/policy`` or ``red/kl``.

    | by | value | after `reduce` |
    | --- | --- | --- |
    | ``mean`` | the mean of all values | is reset |
    | ``sum`` | their sum | is reset |
    | ``min``, ``max`` | the minimum, the maximum | is reset |
    | ``throughput`` | their sum, divided by the seconds since the last `reduce` | is reset |
    | ``lifetime`` | their sum | continues |
    | ``window`` | the mean of the last ``window`` values | continues |
    | ``ema`` | their moving average, the newest with weight ``2 / (window + 1)``, see `Ema` | continues |

    Tensors stay on their device until metrics are read; then all of them are moved together.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begin = [clock()]
        self._entries: dict[str, _Entry] = {}
        self._prefix = ""

    def log(self, name: str, value: "ArrayLike | torch.Tensor", by: By = "mean", *, window: int = 100) -> None:
        """Log one value or an array of values.

        Args:
            name: The name, with slashes if it is nested.
            value: Numbers. A tensor is not copied until metrics are read: log a clone if you write into it.
            by: How the values are reduced; must be the same in each call.
            window: The number of values for ``window`` and ``ema``, at least 1.

        Raises:
            EtudeError: the value is not numeric, ``by`` is unknown, or the name was logged with another ``by``.
        """
        name = self._prefix + name
        numbers = _numbers(name, value)
        self._entry(name, by, window).waiting.append(numbers)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Log the seconds of a ``with`` block as ``phase``, by ``sum``; nothing if the block raises."""
        begin = self._clock()
        yield
        self.log(phase, self._clock() - begin, by="sum")

    def under(self, prefix: str) -> "Metrics":
        """The same metrics, with ``prefix``, such as a module's id, in front of all logged names."""
        other = copy.copy(self)
        other._prefix = f"{self._prefix}{prefix}/"
        return other

    def peek(self) -> dict[str, float]:
        """The current metrics by name, in the order in which the names were first logged.

        Names without a value since the last `reduce` are left out, except sums and throughputs, which are 0.
        """
        self._add_waiting()
        seconds = self._clock() - self._begin[0]
        figures: dict[str, float] = {}
        for name, entry in self._entries.items():
            by, stat = entry.by, entry.stat
            if by in ("sum", "lifetime"):
                figures[name] = float(stat.sum)
            elif by == "throughput":
                figures[name] = float(stat.sum / seconds) if seconds > 0 else math.nan
            elif stat:
                figures[name] = float(getattr(stat, by if by in ("min", "max") else "mean"))
        return figures

    def reduce(self) -> dict[str, float]:
        """Return the metrics as `peek` does, then reset them, except those that continue (see `Metrics`)."""
        figures = self.peek()
        self._begin[0] = self._clock()
        for entry in self._entries.values():
            if entry.by not in ("lifetime", "window", "ema"):
                entry.stat = RunningStat()
        return figures

    def state_dict(self) -> dict[str, Any]:
        """All values; plain data and arrays."""
        self._add_waiting()
        entries = {
            name: {"by": entry.by, "window": entry.window, "seen": entry.stat.state_dict()}
            for name, entry in self._entries.items()
        }
        return {"entries": entries, "seconds": self._clock() - self._begin[0]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all values by a `state_dict`."""
        self._entries.clear()
        for name, saved in state["entries"].items():
            self._entry(name, saved["by"], saved["window"]).stat.load_state_dict(saved["seen"])
        self._begin[0] = self._clock() - state["seconds"]

    def _entry(self, name: str, by: By, window: int) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            if by not in get_args(By):
                raise EtudeError(f"`{name}` can't be logged by {by!r}: there are only {', '.join(get_args(By))}.")
            if window < 1:
                raise EtudeError(f"`{name}` can't be logged over {window} values: it must be at least 1.")
            entry = self._entries[name] = _Entry(by, window)
        elif entry.by != by:
            raise EtudeError(f"`{name}` was logged by {entry.by!r} and now by {by!r}: use another name.")
        elif entry.window != window and by in ("window", "ema"):
            raise EtudeError(f"`{name}` was logged over {entry.window} values and now over {window}: use another name.")
        return entry

    def _add_waiting(self) -> None:
        """Add the waiting values to the statistics; tensors are moved to the host."""
        entries = [entry for entry in self._entries.values() if entry.waiting]
        tensors = [value for entry in entries for value in entry.waiting if not isinstance(value, float | np.ndarray)]
        moved = iter(_on_host(tensors) if tensors else ())
        for entry in entries:
            values: Any = entry.waiting
            entry.waiting = []
            if not all(isinstance(value, float) for value in values):
                values = np.hstack([v if isinstance(v, float | np.ndarray) else next(moved) for v in values])
            entry.stat.add(values)


def _numbers(name: str, value: Any) -> Any:
    """A logged value as a float, a flat float64 copy, or a detached tensor."""
    if isinstance(value, int | float):
        return float(value)
    if hasattr(value, "detach"):
        return value.detach()
    try:
        array = np.asarray(value)
    except ValueError:  # rows of unequal length
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise EtudeError(f"`{name}` is logged as a {type(value).__name__} ({value!r:.60}), but must be numeric.")
    return array.astype(np.float64).reshape(-1)


def _on_host(tensors: Sequence["torch.Tensor"]) -> list[NDArray[np.float64]]:
    """Tensors as flat arrays; those of one device are moved together."""
    import torch  # imported here, so that processes that log only plain numbers don't import it

    found: list[NDArray[np.float64]] = [np.zeros(0)] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        there = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        ends = np.cumsum([tensors[i].numel() for i in there])
        moved = torch.cat([tensors[i].reshape(-1).to(torch.float64) for i in there]).cpu().numpy()
        for i, values in zip(there, np.split(moved, ends[:-1]), strict=True):
            found[i] = values
    return found
