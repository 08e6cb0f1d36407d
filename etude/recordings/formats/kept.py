# SPDX-License-Identifier: Apache-2.0
"""What was decoded last, kept for a while."""

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """Values that are dear to make, by key; those used last are kept, of so many bytes together, one at least.

    Threads that ask for the same key at one time get one value, which one of them makes. A copy in another process
    begins empty.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._values: dict[Hashable, tuple[T, int]] = {}
        self._making: dict[Hashable, threading.Lock] = {}

    def __reduce__(self) -> tuple[type["Kept[T]"], tuple[int]]:
        return type(self), (self._max_bytes,)

    def get(self, key: Hashable, make: Callable[[], tuple[T, int]]) -> T:
        """The value of ``key``; ``make`` gives it and its bytes, where it is not kept."""
        with self._lock:
            if key in self._values:
                self._values[key] = self._values.pop(key)
                return self._values[key][0]
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                if key in self._values:
                    return self._values[key][0]
            made = make()
            with self._lock:
                self._values[key] = made
                self._making.pop(key, None)
                size = sum(size for _, size in self._values.values())
                while size > self._max_bytes and len(self._values) > 1:
                    size -= self._values.pop(next(iter(self._values)))[1]
            return made[0]
