# SPDX-License-Identifier: Apache-2.0
"""Profiling of data loading: the time that each layer between a recording and the learner takes."""

import contextvars
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

READ: Final = "read"
DECODE: Final = "decode"
CONNECTORS: Final = "connectors"
SHUFFLE: Final = "shuffle"
LAYERS: Final = (READ, DECODE, CONNECTORS, SHUFFLE)
"""Read files into bytes and tables; decode these to experience; prelearner and connectors; buffer and batches."""


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
    """Bytes read from files, as far as readers know them."""
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


_loading: contextvars.ContextVar[Spent | None] = contextvars.ContextVar("_loading", default=None)


@contextmanager
def loading(spent: Spent) -> Iterator[None]:
    """Inside it, `reading` counts into ``spent``; all other time counts as decoding."""
    token = _loading.set(spent)
    begin, read = time.perf_counter(), spent.seconds[READ]
    try:
        yield
    finally:
        _loading.reset(token)
        spent.seconds[DECODE] += time.perf_counter() - begin - (spent.seconds[READ] - read)


@contextmanager
def reading(num_bytes: Callable[[], int]) -> Iterator[None]:
    """Count the time of a ``with`` block, and the bytes of files, as reading, if inside `loading`.

    ``num_bytes`` is called only after the block has read them, because Arrow may end the process on the metadata of an
    unreadable file.
    """
    spent = _loading.get()
    if spent is None:
        yield
        return
    with spent.on(READ):
        yield
        spent.bytes += num_bytes()
