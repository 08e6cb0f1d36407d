# SPDX-License-Identifier: Apache-2.0
"""Metrics: figures by name, logged where they arise, read when they are wanted, merged from where they were logged."""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from etude.errors import EtudeError
from etude.metrics.entries import GOES_ON, By, Entry, kept, kind_of, on_host

if TYPE_CHECKING:
    import torch


class Delta(NamedTuple):
    """What one `Metrics` took in since its last report: plain data and arrays, to be merged into another, once."""

    source: str
    """Who reports; another one for each `Metrics` that is made."""
    number: int
    """Of the report, counted from 1."""
    entries: dict[str, dict[str, Any]]
    """By name, each with ``by``, ``window`` and the ``state`` of what is new."""


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
        self._begin = clock()
        self._entries: dict[str, Entry] = {}
        self._source, self._taken = uuid.uuid4().hex, 0
        self._merged: dict[str, int] = {}

    # -- logging ------------------------------------------------------------------------------------------------

    def log(self, name: str, value: "ArrayLike | torch.Tensor", by: By = "mean", *, window: int = 100) -> None:
        """Take in one value or an array of them.

        Args:
            name: With slashes where it is nested.
            value: Numbers. A tensor is not copied before figures are read: log a clone of one that is written into.
            by: What is made of the values; the same each time.
            window: Of ``window`` and ``ema``: over how many values, at least 1.

        Raises:
            EtudeError: the value is not made of numbers, ``by`` is unknown, or the name was logged by another.
        """
        taken = kept(name, value)
        self._entry(name, by, window).waiting.append(taken)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Log the seconds of a ``with`` block as ``phase``, by ``sum``; nothing where it raises."""
        begin = self._clock()
        yield
        self.log(phase, self._clock() - begin, by="sum")

    def under(self, prefix: str) -> "Under":
        """What logs names below ``prefix``, a module's id for instance."""
        return Under(self, prefix)

    # -- reading ------------------------------------------------------------------------------------------------

    def peek(self) -> dict[str, float]:
        """The figures now, by name, in the order in which the names were first logged.

        What had no value since the last `reduce` is left out; sums and throughputs are 0 then.
        """
        self._settle()
        seconds = self._clock() - self._begin
        found = {name: entry.figure(seconds) for name, entry in self._entries.items()}
        return {name: figure for name, figure in found.items() if figure is not None}

    def reduce(self) -> dict[str, float]:
        """The figures as `peek` gives them; then all begins anew that does not go on over the lifetime."""
        figures = self.peek()
        self._begin = self._clock()
        for entry in self._entries.values():
            if entry.by not in GOES_ON:
                entry.seen = entry.made()
        return figures

    # -- merging ------------------------------------------------------------------------------------------------

    def take(self) -> Delta:
        """What is new since the last `take`, whether it was read meanwhile or not, for the `merge` of another."""
        self._settle()
        self._taken += 1
        entries = {
            name: {"by": entry.by, "window": entry.window, "state": entry.new.state_dict()}
            for name, entry in self._entries.items()
            if len(entry.new)
        }
        for entry in self._entries.values():
            entry.new = entry.made()
        return Delta(self._source, self._taken, entries)

    def merge(self, deltas: Iterable[Delta]) -> None:
        """Take in what others took in, as if it had been logged here, in the order of ``deltas``.

        Those of one source must come in their order; ones that got lost may be missing.

        Raises:
            EtudeError: one was merged before, or a name is logged by another here. Nothing is merged then.
        """
        deltas = list(deltas)
        merged = dict(self._merged)
        known = {name: (entry.by, entry.window) for name, entry in self._entries.items()}
        for delta in deltas:
            if delta.number <= (last := merged.get(delta.source, 0)):
                raise EtudeError(
                    f"report {delta.number} of {delta.source} can't be merged after its report {last}: it would count "
                    "twice. Merge each take() once, in their order."
                )
            merged[delta.source] = delta.number
            for name, entry in delta.entries.items():
                kind = (entry["by"], entry["window"])
                _check_same(name, known.setdefault(name, kind), kind)
        self._settle()
        self._merged = merged
        for delta in deltas:
            for name, entry in delta.entries.items():
                self._entry(name, entry["by"], entry["window"]).take_in(entry["state"])

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that was taken in; plain data and arrays."""
        self._settle()
        entries = {
            name: {
                "by": entry.by,
                "window": entry.window,
                "seen": entry.seen.state_dict(),
                "new": entry.new.state_dict(),
            }
            for name, entry in self._entries.items()
        }
        return {"entries": entries, "merged": dict(self._merged), "seconds": self._clock() - self._begin}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, in place of what was taken in here. It reports as another source."""
        self._entries = {}
        for name, saved in state["entries"].items():
            entry = self._entry(name, saved["by"], saved["window"])
            entry.seen.load_state_dict(saved["seen"])
            entry.new.load_state_dict(saved["new"])
        self._merged = dict(state["merged"])
        self._begin = self._clock() - state["seconds"]
        self._source, self._taken = uuid.uuid4().hex, 0

    # -- inside -------------------------------------------------------------------------------------------------

    def _entry(self, name: str, by: By, window: int) -> Entry:
        entry = self._entries.get(name)
        if entry is not None:
            _check_same(name, (entry.by, entry.window), (by, window))
            return entry
        if by not in get_args(By):
            raise EtudeError(f"`{name}` is to be logged by {by!r}, but there are only {', '.join(get_args(By))}.")
        if window < 1:
            raise EtudeError(f"`{name}` is to be logged over {window} values, but it must be at least 1.")
        entry = self._entries[name] = Entry(by, window)
        return entry

    def _settle(self) -> None:
        """Take in what waits, moved to the host where it is not there."""
        runs = []
        for entry in self._entries.values():
            runs += [(entry, kind, list(run)) for kind, run in groupby(entry.waiting, kind_of)]
            entry.waiting = []
        moved = iter(on_host([run for _, kind, run in runs if isinstance(kind, tuple)]))
        for entry, kind, run in runs:
            entry.add(next(moved) if isinstance(kind, tuple) else np.hstack(run))


class Under:
    """The names of a `Metrics` below a prefix."""

    def __init__(self, metrics: Metrics, prefix: str) -> None:
        self._metrics, self._prefix = metrics, prefix

    def log(self, name: str, value: "ArrayLike | torch.Tensor", by: By = "mean", *, window: int = 100) -> None:
        """Take in values, as `Metrics.log`."""
        self._metrics.log(f"{self._prefix}/{name}", value, by, window=window)

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Log the seconds of a ``with`` block, as `Metrics.timed`."""
        return self._metrics.timed(f"{self._prefix}/{phase}")

    def under(self, prefix: str) -> "Under":
        """What logs names below both prefixes."""
        return Under(self._metrics, f"{self._prefix}/{prefix}")


def _check_same(name: str, known: tuple[By, int], now: tuple[By, int]) -> None:
    """Refuse a name that is known as something else: by another, or over a window of another size."""
    if known[0] != now[0]:
        raise EtudeError(f"`{name}` was logged by {known[0]!r} and now by {now[0]!r}: take another name.")
    if known[1] != now[1] and now[0] in ("window", "ema"):
        raise EtudeError(f"`{name}` was logged over {known[1]} values and now over {now[1]}: take another name.")
