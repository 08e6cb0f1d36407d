# SPDX-License-Identifier: Apache-2.0
"""A background thread that runs functions one after another."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

_Jobs: TypeAlias = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class BackgroundThread:
    """Runs functions one after another in a thread.

    Unlike an executor, it may be used during garbage collection, which can interrupt any call, even an executor's
    `submit`, which holds a lock that all executors share. Its thread does not keep the process from ending.

    Args:
        name: The name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: _Jobs = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Queue a function to be run after those queued before; the future gets its result or error."""
        future: Future[Any] = Future()
        self._jobs.put((future, function))
        return future

    def end(self, *, cancel: bool = False) -> None:
        """Let the thread end after all queued functions; with ``cancel``, after the one that it runs now."""
        if cancel:
            with contextlib.suppress(Empty):
                while (job := self._jobs.get_nowait()) is not None:
                    job[0].cancel()
        self._jobs.put(None)

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended, at most ``seconds``; None: without a limit."""
        self._thread.join(seconds)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # noqa: BLE001 - raised where the result is taken
                    future.set_exception(error)
            del job, future, function  # else the result would be kept in memory during the next job
