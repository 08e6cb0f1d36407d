# SPDX-License-Identifier: Apache-2.0
"""Clock: the seconds of collecting."""

from time import perf_counter


class Clock:
    """Runs while a runner collects, and stands still between collections."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Until now, or until the running collection began."""
        self._epoch: float | None = None  # when a collection runs: when all had begun, were there no pauses

    def now(self) -> float:
        """Seconds of collecting until now."""
        return self.seconds if self._epoch is None else perf_counter() - self._epoch

    def start(self) -> None:
        """A collection begins."""
        self._epoch = perf_counter() - self.seconds

    def stop(self) -> None:
        """It has ended; one that was broken off counts for nothing."""
        self.seconds, self._epoch = self.now(), None

    def set(self, seconds: float) -> None:
        """Stand still at ``seconds``."""
        self.seconds, self._epoch = seconds, None
