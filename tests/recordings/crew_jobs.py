# SPDX-License-Identifier: Apache-2.0
"""What the workers of a crew do. Their processes import this file, so it imports little."""

import os
import signal

from etude.errors import DataError


def square(number: int) -> int:
    return number * number


def fails_at_5(number: int) -> int:
    if number == 5:
        raise DataError("part 5 is broken")
    return number


def dies_at_5(number: int) -> int:
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return number
