# SPDX-License-Identifier: Apache-2.0
"""Where the time of a recording's way to the learner goes, layer by layer."""

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
"""Files to bytes and tables; these to Experience; prelearner and connectors; the buffer and the batches."""


@dataclasses.dataclass
class Spent:
    """What was spent on some rows."""

    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(LAYERS, 0.0))
    """By layer, of all workers together."""
    rows: int = 0
    """Steps that came out of the connectors."""
    left_out: int = 0
    """Steps that were to be trained on, but did not come out of them: too near a cut, or dropped by the prelearner."""
    bytes: int = 0
    """Read from files; as far as readers know it."""
    part: int | None = None
    """The part that it was spent on, where it is one."""
    bad: Any = None
    """What the recording found bad in the part, see `Recording.counts`."""

    def add(self, other: "Spent") -> None:
        """Take in what was spent elsewhere."""
        for layer, seconds in other.seconds.items():
            self.seconds[layer] += seconds
        self.rows += other.rows
        self.left_out += other.left_out
        self.bytes += other.bytes

    @contextmanager
    def on(self, layer: str) -> Iterator[None]:
        """Count the time of a ``with`` block."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[layer] += time.perf_counter() - begin


_loading: contextvars.ContextVar[Spent | None] = contextvars.ContextVar("_loading", default=None)


@contextmanager
def loading(spent: Spent) -> Iterator[None]:
    """Within it, `reading` counts into ``spent``; what is not reading is decoding."""
    token = _loading.set(spent)
    begin, read = time.perf_counter(), spent.seconds[READ]
    try:
        yield
    finally:
        _loading.reset(token)
        spent.seconds[DECODE] += time.perf_counter() - begin - (spent.seconds[READ] - read)


@contextmanager
def reading(num_bytes: Callable[[], int]) -> Iterator[None]:
    """Count the time of a ``with`` block, and bytes of files, as reading, where somebody asked for it.

    ``num_bytes`` is called only after the block has read them: of a file that can't be read, Arrow's metadata may end
    the process.
    """
    spent = _loading.get()
    if spent is None:
        yield
        return
    with spent.on(READ):
        yield
        spent.bytes += num_bytes()
