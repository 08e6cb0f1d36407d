# SPDX-License-Identifier: Apache-2.0
"""Backends of an arena of workers: threads of this process, or processes forked by a server process.

The arena's own process is not forked, because it may have threads (torch's) whose locks a fork would leave locked. The
server is used in place of multiprocessing's forkserver so that the workers always end with their arena: it watches the
arena's process id, kills workers that hang together with everything that their envs have started, imports the envs'
module once for all workers, and is outside the process group that receives a terminal's signals.
"""

import contextlib
import ctypes
import dataclasses
import mmap
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, Final, NoReturn

import numpy as np

from etude import spawning
from etude.envs import workers as worker_settings
from etude.envs.buffers import CLOSING, READY, TIMED, AgentLayout, Infos, SharedBuffers, check_alike, same_object
from etude.envs.worker import MAX_SLEEP, EnvWorker, Spin, WakeEvent, envs_of, wait_for, work
from etude.envs.workers import RESET_FACTOR, Workers
from etude.errors import EnvError, EtudeError

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_ENDING: Final = 5.0
"""Seconds for the server process to end after the workers; then it is killed."""


class _Backend:
    """The part of a backend that threads and processes have in common."""

    def __init__(self, workers: Workers) -> None:
        self._settings, self._envs_per_worker = workers, workers.envs_per_worker
        self._numbers = range(workers.num_workers)
        self._arena_event = WakeEvent()
        self._events = [WakeEvent() for _ in self._numbers]
        self._why: dict[int, str] = {}  # by worker: how it ended, if this is known

    def _share(self, layouts: list[AgentLayout], fd: int | None = None) -> SharedBuffers:
        """Make the step buffers for envs with these layouts (one per worker), and mark all workers as starting.

        Args:
            layouts: The layout of each worker's envs.
            fd: The empty file that is to hold the buffers; None: they are in memory of this process.

        Raises:
            EnvError: the envs are not alike.
        """
        for number, layout in enumerate(layouts):
            check_alike(layouts[0], layout, number * self._envs_per_worker)
        sizes = layouts[0], len(layouts) * self._envs_per_worker, len(layouts)
        shared = SharedBuffers(*sizes)
        if fd is not None:
            os.ftruncate(fd, shared.size)
            shared = SharedBuffers(*sizes, mmap.mmap(fd, shared.size))
        shared.words[TIMED] = self._settings.seconds_a_step is not None
        for number in self._numbers:
            shared.start_worker(number)
        shared.words[READY] = 1
        return shared

    def wake(self, worker: int) -> None:
        """Wake a sleeping worker, because it has orders."""
        self._events[worker].set()


class ThreadBackend(_Backend):
    """Each worker is a thread of this process."""

    spin: Spin | None = None  # polling would hold Python's lock
    """How the arena polls before it sleeps; None: it sleeps at once."""

    def __init__(self, make: Callable[[], Any], name: str, workers: Workers) -> None:
        super().__init__(workers)
        self._make, self._name = make, name
        self._worker_infos: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
        self.infos: Infos | None = self._worker_infos
        self._workers = [self._new_worker(i) for i in self._numbers]
        self._woken = wait_for([self._arena_event.reader])
        self._layouts: list[Future[AgentLayout]] = [Future() for _ in self._numbers]
        self._shared: Future[SharedBuffers | None] = Future()
        self._threads = [self._new_thread(i) for i in self._numbers]

    def _new_worker(self, number: int) -> EnvWorker:
        worker = EnvWorker(self._make, self._name, envs_of(number, self._envs_per_worker), self._settings)
        worker.infos, worker.end_infos = self._worker_infos
        return worker

    def _new_thread(self, number: int) -> threading.Thread:
        return threading.Thread(target=self._run, args=(number,), name=f"etude-worker-{number}", daemon=True)

    def open(self) -> SharedBuffers:
        """Make all envs.

        Raises:
            EnvError: an env can't be made, or the envs are not alike.
        """
        for thread in self._threads:
            thread.start()
        layouts = [layout.result() for layout in self._layouts]
        envs = [adapter.env for worker in self._workers for adapter in worker.adapters()]
        if len({id(env) for env in envs}) < len(envs):
            raise same_object(envs[0])
        shared = self._share(layouts)
        self._shared.set_result(shared)
        return shared

    def _run(self, number: int) -> None:
        worker, event = self._workers[number], self._events[number]
        if not self._shared.done():  # otherwise this is a restart, and orders to make the envs follow
            try:
                self._layouts[number].set_result(worker.make_all())
            except BaseException as error:  # noqa: BLE001  raised by `open`
                self._layouts[number].set_exception(error)
        woken = wait_for([event.reader])

        def sleep() -> bool:
            woken(MAX_SLEEP)
            event.clear()
            return True

        shared = self._shared.result()
        try:
            if shared is not None:
                work(worker, shared, number, self._arena_event, spin=None, sleep=sleep)
        except BaseException as error:  # noqa: BLE001  it ends the thread; `deaths` reports it
            self._why[number] = f"was ended by {type(error).__name__}: {error}"
        with contextlib.suppress(BaseException):  # errors in closing don't matter any more
            worker.close()
        self._arena_event.set()

    def wait(self, seconds: float) -> bool:
        """Sleep until woken, for at most ``seconds``. Returns True if there may be `deaths`."""
        if self._woken(seconds):
            self._arena_event.clear()
        return bool(self._why)

    def env_at(self, env: int) -> Any:
        """See `Arena.env_at`."""
        return self._workers[env // self._envs_per_worker].env_at(env)

    def deaths(self) -> list[tuple[int, str]]:
        """The numbers of the workers that have died since the last call, each with a text that says how.

        Errors of an env don't end a thread, but another thread may end it.
        """
        dead = [i for i, thread in enumerate(self._threads) if i in self._why or not thread.is_alive()]
        return [(number, self._why.pop(number, "has ended")) for number in dead]

    def kill(self, worker: int, why: str) -> None:
        """Raise an error, because a thread that hangs can't be killed.

        Raises:
            EnvError: always.
        """
        raise EnvError(f"worker {worker} {why}. It is a thread, which can't be killed: use mode='process'.")

    def restart(self, worker: int) -> None:
        """Start a worker in place of one that died. It has no envs yet."""
        shared = self._shared.result()
        assert shared is not None
        self._workers[worker] = self._new_worker(worker)
        shared.start_worker(worker)
        self._threads[worker] = self._new_thread(worker)
        self._threads[worker].start()

    def close(self) -> None:
        """Close the envs and end the workers. A thread that hangs is abandoned."""
        if not self._shared.done():
            self._shared.set_result(None)
        elif (shared := self._shared.result()) is not None:
            shared.words[CLOSING] = 1
        for event in self._events:
            event.set()
        deadline = time.monotonic() + self._settings.cleanup_time
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            for event in (self._arena_event, *self._events):
                event.close()


# -- processes: the side of the arena -------------------------------------------------------------------------------


_OPEN: "weakref.WeakSet[ProcessBackend]" = weakref.WeakSet()


def kill_workers() -> None:
    """Kill the worker processes of all arenas without closing their envs, because this process is about to end."""
    for backend in list(_OPEN):
        backend.kill_all()


@dataclasses.dataclass(kw_only=True)
class _WorkerJob:
    """What the server and the workers know about their arena. They inherit the file descriptors in it."""

    name: str
    """The name of the function that makes envs, for errors."""
    preparation: dict[str, Any]
    """What multiprocessing needs in order to import the script that defines this function, and to set `sys.argv`."""
    pickled: bytes
    """The pickled function that makes envs."""
    workers: Workers
    arena_pid: int
    server_fd: int
    """The server's end of its connection to the arena."""
    alive_fd: int
    """A socket that reaches its end when the arena is gone."""
    shared_fd: int
    """The file of the shared buffers; it is empty until all envs are made."""
    arena_event: WakeEvent
    events: list[WakeEvent]
    """The event that wakes each worker."""

    def fds(self) -> list[int]:
        """All file descriptors that the server inherits."""
        events = [fd for event in (self.arena_event, *self.events) for fd in event.fds()]
        return [self.server_fd, self.alive_fd, self.shared_fd, *events]


class ProcessBackend(_Backend):
    """Each worker is a process, forked by a server process that has only imported what the workers need.

    The data of each step is in memory that all of them map; it has no name and is freed with its processes. A worker
    with nothing to do blocks on a socket. The workers end when the arena closes or its process ends, however that
    happens. Methods without a docstring are described in `ThreadBackend`.
    """

    infos: Infos | None = None

    def __init__(self, make: Callable[[], Any], name: str, workers: Workers) -> None:
        if spawning.is_importing_main():
            raise EnvError(
                "a worker imports your script to find the function that makes its envs, and the script starts workers "
                'itself. Put everything except imports and definitions under `if __name__ == "__main__":`.'
            )
        pickled = _pickled(make, name)
        needs_main = b"__main__" in pickled
        if needs_main and spawning.is_interactive():
            raise EnvError(
                f"{name} is defined in an interactive session, where a worker process can't find it: put it in a "
                "module (a .py file) and import it, or use threads: Workers(mode='thread')."
            )
        preparation = spawning.preparation(needs_main=needs_main)
        super().__init__(workers)
        self.spin = _spin()
        self._pid = os.getpid()
        self._layouts: dict[int, AgentLayout] = {}
        self._dead_workers: list[tuple[int, str]] = []
        self._running: set[int] = set()
        self._is_closed = False
        self._shared: SharedBuffers | None = None
        self._shared_fd = spawning.unnamed_file()
        self._alive, alive = socket.socketpair()
        self._server, server = multiprocessing.Pipe()
        job = _WorkerJob(
            name=name,
            preparation=preparation,
            pickled=pickled,
            workers=workers,
            arena_pid=self._pid,
            server_fd=server.fileno(),
            alive_fd=alive.fileno(),
            shared_fd=self._shared_fd,
            arena_event=self._arena_event,
            events=self._events,
        )
        with server, alive:
            env = dict.fromkeys(_THREADS, "1") | os.environ
            self._process = spawning.start(_COMMAND, job, fds=job.fds(), env=env)
        self._wait = wait_for([self._arena_event.reader, self._server])
        _OPEN.add(self)

    def open(self) -> SharedBuffers:
        for number in self._numbers:
            self._start(number, None)
        step = self._settings.seconds_a_step
        seconds = None if step is None else max(RESET_FACTOR * step, worker_settings.LEAST_TO_MAKE)
        deadline = None if seconds is None else time.monotonic() + self._envs_per_worker * seconds
        while waits_for := [number for number in self._numbers if number not in self._layouts]:
            if not self._server.poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise EnvError(
                    f"worker {waits_for[0]} hung: it has not made its envs, each of which may take {seconds:g} seconds "
                    "(see Workers.step_timeout)."
                )
            self._receive()
            for number, how in self._dead_workers:
                raise EnvError(f"worker {number} {how} while it made its envs.")
        self._shared = self._share([self._layouts[number] for number in self._numbers], self._shared_fd)
        for event in self._events:
            event.set()
        return self._shared

    def _start(self, worker: int, layout: AgentLayout | None) -> None:
        self._send(("start", worker, None if layout is None else layout.to_json()))
        self._running.add(worker)

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._server.send(message)
        except OSError:
            raise _no_server() from None

    def restart(self, worker: int) -> None:
        assert self._shared is not None
        self._events[worker].clear()
        self._shared.start_worker(worker)
        self._start(worker, self._shared.layout)

    def wait(self, seconds: float) -> bool:
        ready = self._wait(seconds)
        if self._arena_event.reader.fileno() in ready:
            self._arena_event.clear()
        return self._server.fileno() in ready

    def _receive(self) -> None:
        """Receive the next message of the server: a worker's layout, or the death of a worker.

        Raises:
            EnvError: its envs can't be made, or the server has ended.
        """
        try:
            worker, message = self._server.recv()
        except (EOFError, OSError):
            raise _no_server() from None
        if isinstance(message, int):
            self._running.discard(worker)
            how = f"was killed by {signal.Signals(-message).name}" if message < 0 else f"exited with code {message}"
            self._dead_workers.append((worker, self._why.pop(worker, how)))
        elif isinstance(message, EtudeError):
            raise message
        else:
            self._layouts[worker] = AgentLayout.from_json(message)

    def env_at(self, env: int) -> Any:
        return None

    def deaths(self) -> list[tuple[int, str]]:
        while self._server.poll():
            self._receive()
        died, self._dead_workers = self._dead_workers, []
        return died

    def kill(self, worker: int, why: str) -> None:
        """Kill a worker that hangs; it is then among `deaths`."""
        if worker not in self._running:
            return
        self._why[worker] = why
        self._send(("kill", worker))
        while worker in self._running:
            self._receive()

    def kill_all(self) -> None:
        """Kill all workers at once."""
        if os.getpid() == self._pid and self._process.poll() is None:
            self._process.terminate()

    def close(self) -> None:
        if os.getpid() != self._pid or self._is_closed:
            return
        self._is_closed = True
        try:
            if self._shared is not None:
                self._shared.words[CLOSING] = 1
            self._alive.shutdown(socket.SHUT_RDWR)  # a forked child of this process may hold it open
            for event in self._events:
                event.set()
            with contextlib.suppress(OSError):
                self._server.send(("end",))
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may still be importing the envs' packages
                self._process.wait(self._settings.cleanup_time + _ENDING)
        finally:
            self._process.kill()
            self._process.wait()
            ends: list[Any] = [self._alive, self._server, self._arena_event, *self._events]
            for end in ends:
                end.close()
            os.close(self._shared_fd)


def _no_server() -> EnvError:
    return EnvError(
        "the process that starts the workers has ended, and the workers with it. Its output on stderr says why, unless "
        "it was killed."
    )


def _pickled(make: Callable[[], Any], name: str) -> bytes:
    try:
        return pickle.dumps(make)
    except Exception as error:
        raise EnvError(
            f"{name} can't be sent to a worker process ({type(error).__name__}: {error}). Give the env as a function "
            "defined at the top of a module, as 'module:function' or as a registered id; or use threads: "
            "Workers(mode='thread')."
        ) from error


# -- processes: the side of the server and the workers --------------------------------------------------------------


_COMMAND = spawning.command("etude.envs.backends", "serve")

_FORK = multiprocessing.get_context("fork") if hasattr(os, "fork") else None


def serve() -> NoReturn:
    """The main function of the server: start and kill workers on the arena's orders, until the arena is gone."""
    arguments, is_cold = sys.argv[1:3], len(sys.argv) > 3  # before `sys.argv` becomes that of the script
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the arena handles Ctrl-C and closes the workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    job_fd, job = spawning.receive_job()
    for fd in (job_fd, *job.fds()):
        os.set_inheritable(fd, False)
    maker = None if is_cold else _load(job)
    # If the imports have started threads, forking is unsafe: start again, and let each worker import them itself.
    if not is_cold and _num_threads() > 1:
        for fd in (job_fd, *job.fds()):
            os.set_inheritable(fd, True)
        os.execv(sys.executable, [*_COMMAND, *arguments, "cold"])
    _Server(job, maker).run()
    os._exit(0)


def _num_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _load(job: _WorkerJob) -> Callable[[], Any] | str:
    """Import the function that makes envs; returns a text that says why if it can't be imported."""
    try:
        make: Callable[[], Any] = spawning.unpickle(job.preparation, job.pickled)
        return make
    except BaseException:  # noqa: BLE001  sent to the arena; importing a script may raise anything
        return f"a worker can't import {job.name}:\n{traceback.format_exc().rstrip()}"


class _Server:
    def __init__(self, job: _WorkerJob, maker: Callable[[], Any] | str | None) -> None:
        self._job, self._maker = job, maker
        self._arena: Connection[Any, Any] = Connection(job.server_fd)
        # By number: the process of the worker, and the connection on which it sends its layout.
        self._workers: dict[int, tuple[Any, Connection[Any, Any]]] = {}
        signal.signal(signal.SIGTERM, self._exit_at_once)
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def run(self) -> None:
        """Serve until the arena and the workers are gone."""
        while os.getppid() == self._job.arena_pid:  # a forked child of the arena may hold the connection open
            if self._arena in self._wait(1.0, self._arena) and not self._execute_order():
                break
        # The workers notice by themselves that the arena is gone.
        deadline = time.monotonic() + self._job.workers.cleanup_time
        while self._workers and time.monotonic() < deadline:
            self._wait(max(0.0, deadline - time.monotonic()))
        self._kill_all()
        for process, _ in self._workers.values():
            process.join()

    def _wait(self, seconds: float, *others: Any) -> list[Any]:
        """Wait for ``others``, the layout of a worker or the end of a worker; report the latter two to the arena.

        Args:
            seconds: The longest wait.
            others: Further connections to wait for.

        Returns:
            What is ready, including those of ``others``.
        """
        ends = [end for process, layout in self._workers.values() for end in (process.sentinel, layout)]
        ready = connection.wait([*others, *(end for end in ends if not getattr(end, "closed", False))], seconds)
        for worker, (process, layout) in list(self._workers.items()):
            code = process.exitcode  # read first, so that its layout is reported before its end
            with contextlib.suppress(OSError):
                if not layout.closed and layout.poll():
                    with layout, contextlib.suppress(EOFError):
                        self._arena.send((worker, layout.recv()))
            if code is not None:
                if code:  # its envs were not closed: also kill what they have started
                    _kill_group(process.pid)
                layout.close()
                del self._workers[worker]
                with contextlib.suppress(OSError):
                    self._arena.send((worker, code))
        return ready

    def _execute_order(self) -> bool:
        try:
            what, *worker_and_layout = self._arena.recv()
        except (EOFError, OSError):
            return False
        if what == "end":
            return False
        worker = worker_and_layout[0]
        if what == "kill":
            if worker in self._workers:
                _kill_group(self._workers[worker][0].pid)
            return True
        assert _FORK is not None
        reader, writer = _FORK.Pipe(duplex=False)
        with writer:
            process = _FORK.Process(target=self._worker_main, args=(*worker_and_layout, writer, os.getpid()))
            process.start()
        assert process.pid is not None
        _lead_group(process.pid)
        self._workers[worker] = process, reader
        return True

    def _kill_all(self) -> None:
        for process, _ in self._workers.values():
            _kill_group(process.pid)

    def _exit_at_once(self, *_: object) -> NoReturn:
        self._kill_all()
        os._exit(1)

    def _worker_main(self, worker: int, layout: Any, to_server: "Connection[Any, Any]", server: int) -> NoReturn:
        try:
            if self._libc is not None:
                self._libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the server
            if os.getppid() != server:  # the server ended before that call
                os._exit(1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _lead_group(os.getpid())
            os.close(self._job.server_fd)
            make = _load(self._job) if self._maker is None else self._maker
            _run_worker(self._job, make, worker, layout, to_server)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            raise
        finally:  # never continue as a second server
            os._exit(1)


def _lead_group(pid: int) -> None:
    """Put a worker, and everything its envs start, into a new process group.

    The parent and the child both call it, so that it has happened when either goes on.
    """
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _run_worker(
    job: _WorkerJob, make: Callable[[], Any] | str, number: int, layout: Any, to_server: "Connection[Any, Any]"
) -> None:
    """Run a worker until the arena closes or is gone. If ``layout`` is not None, it replaces a worker that died."""
    np.random.seed()  # otherwise all forked workers would draw the same numbers
    event, per = job.events[number], job.workers.envs_per_worker
    wait = wait_for([event.reader, job.alive_fd])

    def sleep() -> bool:
        ready = wait(MAX_SLEEP)
        event.clear()
        return job.alive_fd not in ready  # nothing is ever sent, so it becomes readable only when the arena is gone

    with contextlib.ExitStack() as stack:
        stack.callback(sys.stdout.flush)
        if isinstance(make, str):
            to_server.send(EnvError(make))
            return
        worker = EnvWorker(make, job.name, envs_of(number, per), job.workers)
        stack.enter_context(contextlib.suppress(BaseException))  # errors in closing don't matter any more
        stack.callback(worker.close)
        if layout is None:
            try:
                layout = worker.make_all().to_json()
            except EtudeError as error:
                cause = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ is not None else ""
                to_server.send(type(error)(f"{error}\n{cause}".rstrip()))
                return
            to_server.send(layout)
        to_server.close()
        while not (size := os.fstat(job.shared_fd).st_size):
            if not sleep():
                return
        memory, num_workers = mmap.mmap(job.shared_fd, size), job.workers.num_workers
        shared = SharedBuffers(AgentLayout.from_json(layout), num_workers * per, num_workers, memory)
        while not shared.words[READY]:
            if not sleep():
                return
        work(worker, shared, number, job.arena_event, spin=_spin(), sleep=sleep)


def _spin() -> Spin | None:
    return Spin() if hasattr(os, "sched_yield") else None
