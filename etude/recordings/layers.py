# SPDX-License-Identifier: Apache-2.0
"""Profiling of data loading: the time that each layer between a recording and the learner takes."""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

LOAD: Final = "load"
CONNECTORS: Final = "connectors"
SHUFFLE: Final = "shuffle"
LAYERS: Final = (LOAD, CONNECTORS, SHUFFLE)
"""Read and decode files to experience; prelearner and connectors; buffer and batches."""


@dataclasses.dataclass
class Spent:
    """Time, rows and bytes spent on loading."""

    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(LAYERS, 0.0))
    """Seconds by layer, summed over all workers."""
    rows: int = 0
    """The number of steps that came out of the connectors."""
    left_out: int = 0
    """The number of trainable steps that the connectors lost: too close to a cut, or dropped by the prelearner."""
    bytes: int = 0
    """Bytes of experience that were loaded from files, as they are in memory."""
    part: int | None = None
    """The index of the part, if it is about a single one."""
    bad: Any = None
    """The bad data found in the part; see `Recording.counts`."""

    def add(self, other: "Spent") -> None:
        """Add what was spent elsewhere."""
        for layer, seconds in other.seconds.items():
            self.seconds[layer] += seconds
        self.rows += other.rows
        self.left_out += other.left_out
        self.bytes += other.bytes

    @contextmanager
    def on(self, layer: str) -> Iterator[None]:
        """Count the time of a ``with`` block for a layer."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[layer] += time.perf_counter() - begin
