# SPDX-License-Identifier: Apache-2.0
"""Running statistics, and figures by name that are logged anywhere in a run and read once an iteration."""

import copy
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from etude.errors import EtudeError

if TYPE_CHECKING:
    import torch

Smoothing: TypeAlias = Literal["window", "ema"]
"""How figures are smoothed: by `Window`, or by `Ema`."""

By: TypeAlias = Literal["mean", "sum", "min", "max", "throughput", "lifetime", "window", "ema"]
"""What is made of the values of a name; see `Metrics`."""


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


class RunningStat:
    """The number of values, their sum, and the least and the greatest of them; NaN while there is no value."""

    def __init__(self) -> None:
        self.count, self.sum, self.min, self.max = 0, 0.0, math.nan, math.nan

    def add(self, values: ArrayLike) -> None:
        """Take in one value or an array of them."""
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

    def state_dict(self) -> dict[str, Any]:
        """The four numbers, for a checkpoint."""
        return {"count": self.count, "sum": self.sum, "min": self.min, "max": self.max}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.sum, self.min, self.max = (float(state[name]) for name in ("sum", "min", "max"))
        self.count = operator.index(state["count"])


class _Entry:
    """What is known of one name: its statistic, and the values that were not added to it yet."""

    def __init__(self, by: By, window: int) -> None:
        self.by, self.window = by, window
        self.waiting: list[Any] = []
        self.begin()

    def begin(self) -> None:
        self.stat: Any = RunningStat()
        if self.by in ("window", "ema"):
            self.stat = Window(self.window) if self.by == "window" else Ema(self.window)

    def figure(self, seconds: float) -> float | None:
        """What is made of the values; None if there are none to make it of."""
        if not self.stat and self.by not in ("sum", "throughput", "lifetime"):
            return None
        if self.by == "throughput":
            return float(self.stat.sum / seconds) if seconds > 0 else math.nan
        reading = {"lifetime": "sum", "window": "mean", "ema": "mean"}.get(self.by, self.by)
        return float(getattr(self.stat, reading))


class Metrics:
    """Figures by name, such as ``loss/policy`` or ``red/kl``.

    | by | gives | after `reduce` |
    | --- | --- | --- |
    | ``mean`` | the mean of all values | begins anew |
    | ``sum`` | their sum | begins anew |
    | ``min``, ``max`` | the least, the greatest | begins anew |
    | ``throughput`` | their sum, by the seconds since the last `reduce` | begins anew |
    | ``lifetime`` | their sum | goes on |
    | ``window`` | the mean of the last ``window`` of them | goes on |
    | ``ema`` | their moving average, the newest with weight ``2 / (window + 1)``, see `Ema` | goes on |

    Tensors stay on their device until figures are read, and then all of them are moved at once.

    Args:
        clock: Gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begin = [clock()]
        self._entries: dict[str, _Entry] = {}
        self._prefix = ""

    def log(self, name: str, value: "ArrayLike | torch.Tensor", by: By = "mean", *, window: int = 100) -> None:
        """Take in one value or an array of them.

        Args:
            name: With slashes if it is nested.
            value: Numbers. A tensor is not copied before figures are read: log a clone if you write into it.
            by: What is made of the values; the same each time.
            window: Of ``window`` and ``ema``: over how many values, at least 1.

        Raises:
            EtudeError: the value is not made of numbers, ``by`` is unknown, or the name was logged with another ``by``.
        """
        name = self._prefix + name
        numbers = _numbers(name, value)
        self._entry(name, by, window).waiting.append(numbers)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Log the seconds of a ``with`` block as ``phase``, by ``sum``; nothing if it raises."""
        begin = self._clock()
        yield
        self.log(phase, self._clock() - begin, by="sum")

    def under(self, prefix: str) -> "Metrics":
        """The same metrics, logged with names below ``prefix``, such as a module's id."""
        other = copy.copy(self)
        other._prefix = f"{self._prefix}{prefix}/"
        return other

    def peek(self) -> dict[str, float]:
        """The figures now, by name, in the order in which the names were first logged.

        Names without a value since the last `reduce` are left out; sums and throughputs are 0 then.
        """
        self._add_waiting()
        seconds = self._clock() - self._begin[0]
        found = {name: entry.figure(seconds) for name, entry in self._entries.items()}
        return {name: figure for name, figure in found.items() if figure is not None}

    def reduce(self) -> dict[str, float]:
        """The figures as `peek` gives them; then everything begins anew that does not go on over the lifetime."""
        figures = self.peek()
        self._begin[0] = self._clock()
        for entry in self._entries.values():
            if entry.by not in ("lifetime", "window", "ema"):
                entry.begin()
        return figures

    def state_dict(self) -> dict[str, Any]:
        """All that was taken in; plain data and arrays."""
        self._add_waiting()
        entries = {
            name: {"by": entry.by, "window": entry.window, "seen": entry.stat.state_dict()}
            for name, entry in self._entries.items()
        }
        return {"entries": entries, "seconds": self._clock() - self._begin[0]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, in place of what was taken in here."""
        self._entries.clear()
        for name, saved in state["entries"].items():
            self._entry(name, saved["by"], saved["window"]).stat.load_state_dict(saved["seen"])
        self._begin[0] = self._clock() - state["seconds"]

    def _entry(self, name: str, by: By, window: int) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            if by not in get_args(By):
                raise EtudeError(f"`{name}` is to be logged by {by!r}, but there are only {', '.join(get_args(By))}.")
            if window < 1:
                raise EtudeError(f"`{name}` is to be logged over {window} values, but it must be at least 1.")
            entry = self._entries[name] = _Entry(by, window)
        elif entry.by != by:
            raise EtudeError(f"`{name}` was logged by {entry.by!r} and now by {by!r}: take another name.")
        elif entry.window != window and by in ("window", "ema"):
            raise EtudeError(
                f"`{name}` was logged over {entry.window} values and now over {window}: take another name."
            )
        return entry

    def _add_waiting(self) -> None:
        """Add what waits to the statistics, moved to the host if it is not there."""
        runs = []
        for entry in self._entries.values():
            runs += [(entry, kind, list(run)) for kind, run in groupby(entry.waiting, _kind)]
            entry.waiting = []
        moved = iter(_on_host([run for _, kind, run in runs if isinstance(kind, tuple)]))
        for entry, kind, run in runs:
            entry.stat.add(next(moved) if isinstance(kind, tuple) else np.hstack(run))


def _numbers(name: str, value: Any) -> Any:
    """A logged value as a float, a flat float64 copy, or the tensor without its graph."""
    if isinstance(value, int | float):
        return float(value)
    if hasattr(value, "detach"):
        return value.detach()
    try:
        array = np.asarray(value)
    except ValueError:  # rows of unequal length
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise EtudeError(
            f"`{name}` is logged as a {type(value).__name__} ({value!r:.60}), but must be made of numbers."
        )
    return array.astype(np.float64).reshape(-1)


def _kind(value: Any) -> Any:
    """The type of a value, or the device and the dtype of a tensor."""
    return type(value) if isinstance(value, float | np.ndarray) else (value.device, value.dtype)


def _on_host(runs: Sequence[Sequence["torch.Tensor"]]) -> list[NDArray[np.float64]]:
    """Lists of tensors, of one device and dtype each, as flat arrays; those of a device are moved together."""
    if not runs:
        return []
    import torch  # here, so that a process that logs plain numbers does not import it

    joined = [torch.cat([tensor.reshape(-1) for tensor in run]).to(torch.float64) for run in runs]
    found: list[NDArray[np.float64]] = [np.zeros(0)] * len(runs)
    for device in {values.device for values in joined}:
        there = [i for i, values in enumerate(joined) if values.device == device]
        ends = np.cumsum([len(joined[i]) for i in there])
        moved = torch.cat([joined[i] for i in there]).cpu().numpy()
        for i, values in zip(there, np.split(moved, ends[:-1]), strict=True):
            found[i] = values
    return found
