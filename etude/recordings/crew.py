# SPDX-License-Identifier: Apache-2.0
"""Workers that load parts of a recording ahead, in threads or processes."""

import multiprocessing
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, Generic, Literal, TypeVar

from etude.errors import EtudeError, SettingsError

R = TypeVar("R")

WorkerKind = Literal["threads", "processes"]


class Crew(Generic[R]):
    """Does a job for one number after the other, several at a time, and gives what comes out in order.

    Args:
        job: What is done; for processes, it must be possible to send it to them.
        num_workers: How many; 0: no others, in the caller's thread.
        kind: Threads share memory, and wait for each other where a job holds the interpreter. Processes take a third of
            a second to start, and send what they have made through a pipe.

    Raises:
        SettingsError: ``job`` can't be sent to processes.
    """

    def __init__(self, job: Callable[[int], R], num_workers: int, kind: WorkerKind) -> None:
        self._job = job
        self._ahead = num_workers
        self._executor: Executor | None = None
        self.close: Callable[[], Any] = lambda: None
        """Ends the workers; those of a crew that is forgotten end, too."""
        if not num_workers:
            return
        if kind == "threads":
            self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="etude-loader")
        else:
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(
                num_workers, mp_context=context, initializer=_begin, initargs=(_sendable(job),)
            )
            self._job = _do
        self.close = weakref.finalize(self, self._executor.shutdown, wait=True, cancel_futures=True)

    def done(self, numbers: Iterable[int]) -> Iterator[R]:
        """What comes of each number, in their order; as many as there are workers, and one more, are held ahead."""
        if self._executor is None:
            for number in numbers:  # not map: a StopIteration of the job would end it as if there were no more numbers
                yield self._job(number)
            return
        pending: deque[Future[R]] = deque()
        try:
            for number in numbers:
                pending.append(self._executor.submit(self._job, number))
                if len(pending) > self._ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenExecutor as error:
            raise EtudeError(
                "a worker process that loads data has died: it was killed, perhaps for want of memory (then take fewer "
                "num_workers), or it crashed. The run can go on from its last checkpoint."
            ) from error
        finally:
            for future in pending:
                future.cancel()


def _sendable(job: Callable[[int], R]) -> bytes:
    from multiprocessing.reduction import ForkingPickler

    try:
        return bytes(ForkingPickler.dumps(job))
    except Exception as error:
        raise SettingsError(
            f"num_workers are processes, to which this can't be sent: {error}. Define functions and classes at the top "
            "of a module, or take worker_kind='threads'."
        ) from error


_own_job: Callable[[int], Any] | None = None


def _begin(job: bytes) -> None:
    """In a worker process: take the job of the process that started it, and end with that."""
    import pickle

    global _own_job
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # to the whole group: the parent saves, and ends its workers
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()  # even if it is killed
    _own_job = pickle.loads(job)  # noqa: S301 - from the process that started this one, not from a file


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _do(number: int) -> Any:
    assert _own_job is not None
    return _own_job(number)
