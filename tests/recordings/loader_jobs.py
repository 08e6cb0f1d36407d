# SPDX-License-Identifier: Apache-2.0
"""What the workers of a crew do. Their processes import this file, so it imports little."""

import os
import signal
import threading

from etude.errors import DataError


def square(number: int) -> int:
    return number * number


def blocked_signals(_: int) -> list[int]:
    return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))


def fails_at_5(number: int) -> int:
    if number == 5:
        raise DataError("part 5 is broken")
    return number


class TwoWordsError(Exception):
    """Can be pickled, but not read again, as it needs two arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


class LockedError(Exception):
    """Can't be pickled."""

    def __init__(self) -> None:
        super().__init__("no key")
        self.lock = threading.Lock()


def fails_in_two_words(number: int) -> int:
    raise TwoWordsError("out", "of order")


def fails_locked(number: int) -> int:
    raise LockedError


def dies_at_5(number: int) -> int:
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return number
