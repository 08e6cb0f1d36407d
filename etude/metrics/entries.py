# SPDX-License-Identifier: Apache-2.0
"""What `Metrics` keeps of one name, and how values come to it."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.errors import EtudeError
from etude.metrics.window import Ema, Tally, Window

if TYPE_CHECKING:
    import torch

By: TypeAlias = Literal["mean", "sum", "min", "max", "throughput", "lifetime", "window", "ema"]
"""What is made of the values of a name; see `Metrics`."""

GOES_ON = ("lifetime", "window", "ema")
"""What does not begin anew when figures are reduced."""

_READ = {"mean": "mean", "sum": "sum", "min": "min", "max": "max", "lifetime": "sum", "window": "mean", "ema": "mean"}


class Entry:
    """One name: what waits to be moved, what is seen by readers, and what is new since the last report."""

    def __init__(self, by: By, window: int) -> None:
        self.by, self.window = by, window
        self.waiting: list[Any] = []
        self.seen, self.new = self.made(), self.made()

    def made(self) -> Any:
        """A running statistic without values."""
        if self.by in ("window", "ema"):
            return Window(self.window) if self.by == "window" else Ema(self.window)
        return Tally()

    def add(self, values: NDArray[np.float64]) -> None:
        """Take in values."""
        part = self.made()
        part.add(values)
        self._merge(part)

    def take_in(self, state: Mapping[str, Any]) -> None:
        """Take in what another was told, from the state of its statistic."""
        part = self.made()
        part.load_state_dict(state)
        self._merge(part)

    def _merge(self, part: Any) -> None:
        self.seen.merge(part)
        self.new.merge(part)

    def figure(self, seconds: float) -> float | None:
        """What is made of the values; None where there are none to make it of."""
        if not len(self.seen) and self.by not in ("sum", "throughput", "lifetime"):
            return None
        if self.by == "throughput":
            return self.seen.sum / seconds if seconds > 0 else math.nan
        value: float = getattr(self.seen, _READ[self.by])
        return value


def kept(name: str, value: Any) -> Any:
    """What of a logged value is kept until figures are read: a float, a flat float64 copy, or a tensor as it is.

    Raises:
        EtudeError: it holds no numbers.
    """
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


def kind_of(value: Any) -> Any:
    """Of what `kept` gives: its type, or the device and the dtype of a tensor."""
    return type(value) if isinstance(value, float | np.ndarray) else (value.device, value.dtype)


def on_host(runs: Sequence[Sequence["torch.Tensor"]]) -> list[NDArray[np.float64]]:
    """Runs of tensors of one device and dtype each as flat arrays; those of a device are moved together."""
    if not runs:
        return []
    import torch  # here, so that who logs plain numbers does not wait for it

    joined = [torch.cat([tensor.reshape(-1) for tensor in run]).to(torch.float64) for run in runs]
    found: list[NDArray[np.float64]] = [np.zeros(0)] * len(runs)
    for device in {values.device for values in joined}:
        there = [i for i, values in enumerate(joined) if values.device == device]
        ends = np.cumsum([len(joined[i]) for i in there])
        moved = torch.cat([joined[i] for i in there]).cpu().numpy()
        for i, values in zip(there, np.split(moved, ends[:-1]), strict=True):
            found[i] = values
    return found
