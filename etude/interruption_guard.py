# SPDX-License-Identifier: Apache-2.0
"""A process beside one that trains, run as a script: it hears the same signals, through its standard input.

It tells them to a thread of the other process, which says from then on that it is alive. If it falls silent, as C code
holds Python's lock, this process ends the other one: as many seconds after the first signal as its argument says, or
soon after the second; but not while that saves.
"""

import os
import select
import signal
import sys
import time

ALIVE, SAVING = 0xFE, 0xFF
SILENCE = 2.0
"""Seconds in which a process that is alive says so."""
AT_ONCE = 1.0
"""Seconds that one that is silent may take to end after the second signal."""
MERGED = 0.25
"""Seconds after the first signal in which others are taken for the same."""

MESSAGE = (
    b"error: code of the env holds Python's lock and can't be interrupted, so that the process is killed. What was "
    b"saved last stays.\n"
)


def main() -> None:
    """Serve until the other process has ended."""
    parent, patience = os.getppid(), float(sys.argv[1])
    ending = {int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)}
    first = second = alive = 0.0
    is_saving = False
    while os.getppid() == parent:
        heard = b""
        if select.select([0], [], [], 0.2 if first else 1.0)[0]:
            heard = os.read(0, 64)
            if not heard:
                return
        now = time.monotonic()
        for byte in heard:
            if byte in (ALIVE, SAVING):
                alive, is_saving = now, byte == SAVING
            elif byte in ending:
                os.write(1, bytes([byte]))
                if not first:
                    first = now
                elif now - first > MERGED and not second:
                    second = now
        is_due = (first and now > first + patience and not is_saving) or (second and now > second + AT_ONCE)
        if is_due and now > alive + SILENCE:
            os.kill(parent, signal.SIGKILL)
            os.write(2, MESSAGE)
            return


if __name__ == "__main__":
    main()
