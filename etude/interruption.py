# SPDX-License-Identifier: Apache-2.0
"""SIGINT, SIGTERM and SIGHUP: the first one saves and ends a run, the second one ends it at once."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Final, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

GRACE: Final = 4.0
"""Seconds after the first signal in which the running iteration may end by itself."""
STUCK: Final = 6.0
"""Seconds after which the run no longer waits for code that can't be interrupted."""
LIMIT: Final = 8.5
"""Seconds after which the process is ended by force, once the run is saved."""
CLOSING: Final = 8.0
"""Seconds that closing may take if there is nothing to save."""
AT_ONCE: Final = 1.0
"""Seconds that closing may take after the second signal."""
MERGED: Final = 0.05
"""Seconds in which several SIGTERMs or SIGHUPs count as one: ``timeout`` sends them to a process and its group."""
SILENCE: Final = 2.0
"""A process that sends its guard nothing for this many seconds is not alive."""
PARENT: Final = 0.25
"""Seconds between two checks of whether the parent process still exists."""
GUARD_MERGED: Final = 0.25
"""Like `MERGED`, but in the guard process."""

ALIVE: Final = 0xFE
SAVING: Final = 0xFF
"""Messages to the guard, besides signal numbers."""

KILLED: Final = (
    b"error: code of the env holds Python's lock and can't be interrupted, so the process is killed. The last saved "
    b"checkpoint remains.\n"
)

INTERRUPTED: Final = 130
"""The exit code of an interrupted run."""

_NUDGE: Final = getattr(signal, "SIGURG", None)  # ignored by default, so it is free to use
_INTERRUPTIBLE: set[CodeType] = set()


class Interrupted(KeyboardInterrupt):
    """Raised to leave the running iteration at a point where everything that is saved is consistent."""


def interruptible(function: F) -> F:
    """Mark a function that may be left at any point, because the state in checkpoints stays consistent throughout."""
    _INTERRUPTIBLE.add(function.__code__)
    return function


_is_pausing = False


def pause() -> None:
    """Leave the running iteration here if it did not end by itself within `GRACE` seconds of the first signal.

    It is called where the state in checkpoints is consistent.

    Raises:
        Interrupted: the iteration ends here.
    """
    if _is_pausing and threading.current_thread() is threading.main_thread():
        raise Interrupted


class Signals:
    """Handles the signals that end a run, while a ``with`` block lasts in the main thread.

    The first signal sets an event, and the running iteration may end by itself. If it does not, it is interrupted as
    soon as it is in an `interruptible` function, or at the next `pause`. If the code in that function can't be
    interrupted, such as a simulator in C, a thread saves the run and ends the process. If the iteration hangs anywhere
    else, in a loss for instance, the process is ended, and the last checkpoint remains. The second signal raises a
    KeyboardInterrupt, as does the first one before `conclude` is set; if closing then takes too long, the process is
    ended by force. If not even threads can run, because C code holds Python's lock, the `Guard` process kills this one.

    If SIGHUP is ignored, as under ``nohup``, it stays ignored.

    Args:
        quiet: Print nothing.
        kill: Ends the child processes before this process is ended by force.
    """

    def __init__(self, *, quiet: bool, kill: Callable[[], None]) -> None:
        self._quiet, self._kill = quiet, kill
        self.conclude: Callable[[], int] | None = None
        """Saves and reports, and returns the exit code. The watching thread calls it if the main thread is stuck."""
        self.stuck: str | None = None
        """Printed if the process is ended by force because the run hangs where it can't be saved. None: wait for it
        instead."""
        self._event = threading.Event()
        self._first_at = self._second_at = 0.0  # when the main thread received them
        self._lock = threading.Lock()  # held by the thread that concludes
        self._is_saved = self._is_taken_over = False
        self._old: dict[int, Any] = {}
        self._guard: Guard | None = None

    def is_set(self) -> bool:
        """Whether a first signal has come."""
        return self._event.is_set()

    def wait(self) -> None:
        """From now on, let the iteration and closing finish without a time limit."""
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    @contextlib.contextmanager
    def concluding(self) -> Iterator[None]:
        """A context in which the main thread saves and is not interrupted. Afterwards, it may be ended by force."""
        with self._lock:
            self._tell(SAVING)
            yield
            self._is_saved = True
            self._tell(ALIVE)

    def _tell(self, what: int) -> None:
        if self._guard is not None:
            self._guard.tell(what)

    # -- the main thread ----------------------------------------------------------------------------------------

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            return self
        numbers = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._old = {number: signal.signal(number, self._on_signal) for number in numbers}
        if _NUDGE is not None:
            self._old[_NUDGE] = signal.signal(_NUDGE, self._on_nudge)
            with contextlib.suppress(OSError):  # without a guard if no process can be started
                self._guard = Guard(self._old, self._watch)
        return self

    def __exit__(self, *error: object) -> None:
        global _is_pausing
        self.wait()
        _is_pausing = False
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.conclude is not None and not self._first_at:
            self._first_at = now
            self._event.set()
            if self._guard is None:
                self._say_how()
        elif number == signal.SIGINT or now - self._first_at > MERGED:
            self._second_at = now
            raise KeyboardInterrupt

    def _on_nudge(self, number: int, frame: FrameType | None) -> None:
        if self._is_taken_over:
            threading.Event().wait()  # the process ends soon
        if self._event.is_set() and not self._lock.locked() and _is_interruptible(frame):
            raise Interrupted

    def _say_how(self) -> None:
        if not self._quiet:
            how = "ends after this iteration" if self._guard is None else "saves and ends within 10 seconds"
            _say(f"\ninterrupted: {how}; interrupt again to end it now.\n")

    # -- the thread ---------------------------------------------------------------------------------------------

    def _watch(self, guard: "Guard") -> None:
        """Watch the main thread from the first signal on."""
        new = guard.signals(None)
        if not new:
            return
        begin, second = time.monotonic(), 0.0
        if self.conclude is not None:
            self._event.set()
            if signal.SIGINT not in new:
                time.sleep(MERGED)
                guard.signals(0.0)
            self._say_how()
        while (new := guard.signals(0.2)) is not None:
            now = time.monotonic()
            if not second and (self._second_at or new):
                second = self._second_at or now
            self._look(now - begin, now - second if second else None)

    def _look(self, seconds: float, since_second: float | None) -> None:
        """Check the main thread, given the seconds since the first signal and since the second one."""
        global _is_pausing
        if self.conclude is None:
            if seconds > CLOSING:
                _say("error: interrupted.\n")
                self._end(INTERRUPTED)
        elif since_second is not None:
            if since_second > AT_ONCE:
                _say("error: interrupted.\n")
                self._end(INTERRUPTED)
        elif self._is_saved:
            if seconds > LIMIT:
                self._end(INTERRUPTED)
        elif seconds > GRACE:
            _is_pausing = True
            if not _is_interruptible(sys._current_frames().get(threading.main_thread().ident or 0)):
                if seconds > LIMIT and self.stuck is not None and not self._lock.locked():
                    _say(f"error: {self.stuck}\n")
                    self._end(INTERRUPTED)
            elif seconds < STUCK:
                assert _NUDGE is not None
                signal.pthread_kill(threading.main_thread().ident or 0, _NUDGE)
            elif self._lock.acquire(blocking=False):
                self._is_taken_over = True
                self._tell(SAVING)
                try:
                    self._end(self.conclude())
                except Exception as error:  # noqa: BLE001  nothing else would report it
                    _say(f"error: {error}\n")
                    self._end(1)

    def _end(self, code: int) -> None:
        with contextlib.suppress(Exception):
            self._kill()
        os._exit(code)


class Guard:
    """Starts the guard process (see `guard`), which receives signals even while C code holds Python's lock.

    Args:
        handlers: The signal handlers to restore in forked processes, which do not save.
        watch: A function that a thread runs until the guard is closed.
    """

    def __init__(self, handlers: dict[int, Any], watch: "Callable[[Guard], None]") -> None:
        hears, self._told = os.pipe()
        os.set_blocking(self._told, False)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(LIMIT + 0.5)],
                stdin=hears,
                stdout=subprocess.PIPE,
                process_group=0,
            )
        except OSError:
            os.close(self._told)
            raise
        finally:
            os.close(hears)
        self._handlers = handlers
        self._before = signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
        _GUARDS.append(self)
        self._thread = threading.Thread(target=watch, args=(self,), name="etude-signals", daemon=True)
        self._thread.start()

    def signals(self, timeout: float | None) -> bytes | None:
        """The numbers of new signals, after waiting ``timeout`` seconds for one; None if the guard has ended."""
        assert self._process.stdout is not None
        relay = self._process.stdout.fileno()
        if not select.select([relay], [], [], timeout)[0]:
            self.tell(ALIVE)
            return b""
        numbers = os.read(relay, 64)
        self.tell(ALIVE)
        return numbers or None

    def tell(self, what: int) -> None:
        """Tell the guard that threads can run (`ALIVE`), or that the run is saving (`SAVING`)."""
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._told, bytes([what]))

    def restore_handlers(self) -> None:
        """In a forked process: restore the default signal handlers."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def close(self) -> None:
        """End the process and the thread."""
        _GUARDS.remove(self)
        signal.set_wakeup_fd(self._before)
        self._process.kill()
        self._process.wait()
        self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        os.close(self._told)


_GUARDS: list[Guard] = []


def _in_child() -> None:
    for guard in _GUARDS:
        guard.restore_handlers()
    _GUARDS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _is_interruptible(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _INTERRUPTIBLE:
            return True
        frame = frame.f_back
    return False


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone
        os.write(2, text.encode())


def guard() -> None:
    """Run the guard process, until its parent has ended.

    It gets the parent's signals through its standard input, and forwards them to a thread of the parent, which then
    regularly reports that it is alive. If the reports stop, because C code holds Python's lock, the guard kills the
    parent: as many seconds after the first signal as its command-line argument says, or soon after the second signal,
    but not while the parent saves.
    """
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
                elif now - first > GUARD_MERGED and not second:
                    second = now
        is_due = (first and now > first + patience and not is_saving) or (second and now > second + AT_ONCE)
        if is_due and now > alive + SILENCE:
            os.kill(parent, signal.SIGKILL)
            os.write(2, KILLED)
            return


if __name__ == "__main__":
    guard()


def when_parent_ends(do: Callable[[], Any], parent: int | None = None) -> None:
    """Call ``do`` in a thread once this process has another parent than ``parent``, by default the current one.

    To end the process, ``do`` should call ``os._exit``: a normal exit would wait for other threads.
    """
    before = os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == before:
            time.sleep(PARENT)
        do()

    threading.Thread(target=watch, name="etude-parent", daemon=True).start()
