# SPDX-License-Identifier: Apache-2.0
"""Backends of an arena of workers: threads of this process, or processes that a server process forks.

The arena's own process is not forked: it may have threads (torch's), whose locks a fork would leave locked for ever. A
server of its own, not the one of multiprocessing's forkserver context, is what lets the workers end with their arena in
every case: it watches the arena's process id, kills workers that hang with all that their envs have started, imports
what makes the envs once for all workers, and is no member of the process group that a terminal's signals go to.
"""

import contextlib
import ctypes
import dataclasses
import json
import mmap
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import connection, spawn
from multiprocessing.connection import Connection
from typing import Any, Final, NoReturn, Protocol

import numpy as np

from etude.envs import workers as worker_settings
from etude.envs.buffers import CLOSING, READY, TIMED, AgentLayout, Infos, SharedBuffers, check_alike
from etude.envs.worker import NAP, EnvWorker, Spin, WakeEvent, wait_for, work
from etude.envs.workers import RESET_FACTOR, EnvLimits, Workers
from etude.errors import EnvError, EtudeError, SpaceError

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_ENDING: Final = 5.0
"""Seconds for the server process to end once the workers have; then it is killed."""


class Backend(Protocol):
    """The workers of an arena."""

    spin: Spin | None
    """How the arena waits before it sleeps."""
    infos: Infos | None

    def open(self) -> SharedBuffers:
        """Make all envs.

        Raises:
            EnvError: that fails, or the envs are not alike.
        """

    def wake(self, worker: int) -> None:
        """There are orders for a worker that sleeps."""

    def wait(self, seconds: float) -> bool:
        """Sleep until woken, at most so long; True: there may be `deaths`."""

    def env_at(self, env: int) -> Any:
        """See `Arena.env_at`."""

    def deaths(self) -> list[tuple[int, str]]:
        """The workers that have died since this was last asked, and how."""

    def kill(self, worker: int, why: str) -> None:
        """Make an end of a worker that hangs: it is among `deaths` then.

        Raises:
            EnvError: that is not possible.
        """

    def restart(self, worker: int) -> None:
        """Have a worker in place of one that died. It has no envs yet."""

    def close(self) -> None:
        """Close the envs and end the workers."""


class ThreadBackend:
    """Each worker is a thread of this process."""

    spin: Spin | None = None  # it would hold Python's lock

    def __init__(self, make: Callable[[], Any], name: str, workers: Workers) -> None:
        self._make, self._name, self._settings = make, name, workers
        self._per = workers.envs_per_worker
        numbers = range(workers.num_workers)
        self._said: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
        self.infos: Infos | None = self._said
        self._workers = [self._new_worker(i) for i in numbers]
        self._events = [WakeEvent() for _ in numbers]
        self._arena_event = WakeEvent()
        self._woken = wait_for([self._arena_event.reader])
        self._layouts: list[Future[AgentLayout]] = [Future() for _ in numbers]
        self._shared: Future[SharedBuffers | None] = Future()
        self._threads = [self._new_thread(i) for i in numbers]
        self._why: dict[int, str] = {}
        """By worker: what ended its thread."""

    def _new_worker(self, number: int) -> EnvWorker:
        envs = range(number * self._per, (number + 1) * self._per)
        worker = EnvWorker(self._make, self._name, envs, self._settings)
        worker.infos, worker.end_infos = self._said
        return worker

    def _new_thread(self, number: int) -> threading.Thread:
        return threading.Thread(target=self._run, args=(number,), name=f"etude-worker-{number}", daemon=True)

    def open(self) -> SharedBuffers:
        """See `Backend.open`."""
        for thread in self._threads:
            thread.start()
        layouts = [layout.result() for layout in self._layouts]
        envs = [adapter.env for worker in self._workers for adapter in worker.adapters()]
        if len({id(env) for env in envs}) < len(envs):
            raise EnvError(f"the same {type(envs[0]).__name__} object is given each time: let a new one be made.")
        for i, layout in enumerate(layouts):
            check_alike(layouts[0], layout, i * self._per)
        shared = SharedBuffers(layouts[0], len(envs), len(self._workers))
        shared.words[TIMED] = self._settings.seconds_a_step is not None
        for number in range(len(self._workers)):
            shared.start_worker(number)
        self._shared.set_result(shared)
        return shared

    def _run(self, number: int) -> None:
        worker, event = self._workers[number], self._events[number]
        if not self._shared.done():  # else this is a restart: envs are made when that is ordered
            try:
                self._layouts[number].set_result(worker.make_all())
            except BaseException as error:  # noqa: BLE001  raised by `open`
                self._layouts[number].set_exception(error)
        woken = wait_for([event.reader])

        def sleep() -> bool:
            woken(NAP)
            event.clear()
            return True

        shared = self._shared.result()
        try:
            if shared is not None:
                work(worker, shared, number, self._arena_event, spin=None, sleep=sleep)
        except BaseException as error:  # noqa: BLE001  it ends the thread, which the arena is told
            self._why[number] = f"was ended by {type(error).__name__}: {error}"
        with contextlib.suppress(BaseException):  # of envs that don't close: all is over
            worker.close()
        self._arena_event.set()

    def wake(self, worker: int) -> None:
        """See `Backend.wake`."""
        self._events[worker].set()

    def wait(self, seconds: float) -> bool:
        """See `Backend.wait`."""
        if self._woken(seconds):
            self._arena_event.clear()
        return bool(self._why)

    def env_at(self, env: int) -> Any:
        """See `Arena.env_at`."""
        return self._workers[env // self._per].env_at(env)

    def deaths(self) -> list[tuple[int, str]]:
        """See `Backend.deaths`: nothing that an env raises ends a thread, but another thread may."""
        dead = [i for i, thread in enumerate(self._threads) if i in self._why or not thread.is_alive()]
        return [(number, self._why.pop(number, "has ended")) for number in dead]

    def kill(self, worker: int, why: str) -> None:
        """See `Backend.kill`."""
        raise EnvError(f"worker {worker} {why}. It is a thread, which can't be killed: use mode='process'.")

    def restart(self, worker: int) -> None:
        """See `Backend.restart`."""
        shared = self._shared.result()
        assert shared is not None
        self._workers[worker] = self._new_worker(worker)
        shared.start_worker(worker)
        self._threads[worker] = self._new_thread(worker)
        self._threads[worker].start()

    def close(self) -> None:
        """See `Backend.close`. A thread that hangs is left behind."""
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
    """Kill the worker processes of all arenas at once, without closing their envs: this process is about to end."""
    for backend in list(_OPEN):
        backend.kill_all()


@dataclasses.dataclass(kw_only=True)
class _WorkerJob:
    """What the server and the workers of an arena know of it. They inherit the files whose numbers are here."""

    name: str
    """What makes the envs, for errors."""
    preparation: dict[str, Any]
    """What multiprocessing needs in order to import the script that the maker is defined in, and to set `sys.argv`."""
    pickled: bytes
    """The maker."""
    limits: EnvLimits
    arena_pid: int
    num_workers: int
    envs_per_worker: int
    cleanup_time: float
    server_fd: int
    """The server's end of its connection to the arena."""
    alive_fd: int
    """A socket that is at its end when the arena is gone."""
    shared_fd: int
    """The file that the shared buffers lie in; it is empty until all envs are made."""
    arena_event: tuple[int, int]
    events: list[tuple[int, int]]
    """By worker, what wakes it."""
    layout_fds: list[int]
    """By worker, where it sends the layout of its envs' agents to, or why there is none."""

    def fds(self) -> list[int]:
        """All files that the server inherits."""
        events = [fd for ends in (self.arena_event, *self.events) for fd in ends]
        return [self.server_fd, self.alive_fd, self.shared_fd, *events, *self.layout_fds]


class ProcessBackend:
    """Each worker is a process, forked by a server process that has only imported what they need.

    What crosses at each step goes through memory that all map, which has no name and is gone with its processes. A
    worker with nothing to do blocks on a socket. The workers end when the arena closes, and when its process ends in
    whatever way.
    """

    infos: Infos | None = None

    def __init__(self, make: Callable[[], Any], name: str, workers: Workers) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False) or _is_importing_main:
            raise EnvError(
                "a worker imports your script to find what makes its envs, and the script starts workers itself. Put "
                'what it does, other than imports and definitions, under `if __name__ == "__main__":`.'
            )
        self._settings = workers
        self.spin = Spin() if hasattr(os, "sched_yield") else None
        numbers = range(workers.num_workers)
        pickled = _pickled(make, name)
        preparation = _preparation(name, needs_main=b"__main__" in pickled)
        self._pid = os.getpid()
        self._why: dict[int, str] = {}
        self._died: list[tuple[int, str]] = []
        self._running: set[int] = set()
        self._is_closed = False
        self._shared: SharedBuffers | None = None
        self._shared_fd = _nameless_file()
        self._arena_event = WakeEvent()
        self._events = [WakeEvent() for _ in numbers]
        self._alive, alive = socket.socketpair()
        self._server, server = multiprocessing.Pipe()
        layouts = [multiprocessing.Pipe(duplex=False) for _ in numbers]
        self._layouts = [reader for reader, _ in layouts]
        job = _WorkerJob(
            name=name,
            preparation=preparation,
            pickled=pickled,
            limits=EnvLimits(max_steps=workers.max_steps, check=workers.check),
            arena_pid=self._pid,
            num_workers=workers.num_workers,
            envs_per_worker=workers.envs_per_worker,
            cleanup_time=workers.cleanup_time,
            server_fd=server.fileno(),
            alive_fd=alive.fileno(),
            shared_fd=self._shared_fd,
            arena_event=_fds(self._arena_event),
            events=[_fds(event) for event in self._events],
            layout_fds=[writer.fileno() for _, writer in layouts],
        )
        try:
            self._process = _start_server(job)
        finally:
            server.close()
            alive.close()
            for _, writer in layouts:
                writer.close()
        self._wait = wait_for([self._arena_event.reader, self._server])
        _OPEN.add(self)

    def open(self) -> SharedBuffers:
        """See `Backend.open`."""
        numbers, per = range(self._settings.num_workers), self._settings.envs_per_worker
        for number in numbers:
            self._send(("start", number, None))
            self._running.add(number)
        step = self._settings.seconds_a_step
        seconds = None if step is None else max(RESET_FACTOR * step, worker_settings.LEAST_TO_MAKE)
        deadline = None if seconds is None else time.monotonic() + per * seconds
        layouts = [self._layout_of(number, deadline) for number in numbers]
        for number, layout in enumerate(layouts):
            check_alike(layouts[0], layout, number * per)
        size = SharedBuffers(layouts[0], len(numbers) * per, len(numbers)).size
        os.ftruncate(self._shared_fd, size)
        memory = mmap.mmap(self._shared_fd, size)
        self._shared = shared = SharedBuffers(layouts[0], len(numbers) * per, len(numbers), memory)
        shared.words[TIMED] = step is not None
        for number in numbers:
            shared.start_worker(number)
        shared.words[READY] = 1
        for number in numbers:
            self._events[number].set()
        return shared

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._server.send(message)
        except OSError:
            raise _no_server() from None

    def _layout_of(self, number: int, deadline: float | None) -> AgentLayout:
        reader = self._layouts[number]
        while not reader.poll():
            died = dict(self._died)  # while another was waited for
            if number in died:
                raise EnvError(f"worker {number} {died[number]} while it made its envs.")
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = connection.wait([reader, self._server], timeout)
            if not ready:
                raise EnvError(
                    f"worker {number} hung: it has not made its envs. Each may take {RESET_FACTOR} times "
                    f"`step_timeout` ({self._settings.seconds_a_step:g} s), and {worker_settings.LEAST_TO_MAKE:g} s at "
                    "least: raise that if it needs longer."
                )
            if reader not in ready:
                self._hear_server()
        try:
            message = reader.recv()
        except EOFError:
            while number not in (died := dict(self._died)):
                self._hear_server()
            raise EnvError(f"worker {number} {died[number]} while it made its envs.") from None
        if "error" in message:
            raise (SpaceError if message["is_space"] else EnvError)(message["error"])
        return AgentLayout.from_json(message)

    def restart(self, worker: int) -> None:
        """See `Backend.restart`."""
        assert self._shared is not None
        self._events[worker].clear()
        self._shared.start_worker(worker)
        self._send(("start", worker, self._shared.layout.to_json()))
        self._running.add(worker)

    def wake(self, worker: int) -> None:
        """See `Backend.wake`."""
        self._events[worker].set()

    def wait(self, seconds: float) -> bool:
        """See `Backend.wait`."""
        ready = self._wait(seconds)
        if self._arena_event.reader.fileno() in ready:
            self._arena_event.clear()
        return self._server.fileno() in ready

    def _hear_server(self) -> None:
        """Wait for the next death of a worker."""
        try:
            worker, code = self._server.recv()
        except (EOFError, OSError):
            raise _no_server() from None
        self._running.discard(worker)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        self._died.append((worker, self._why.pop(worker, how)))

    def env_at(self, env: int) -> Any:
        """See `Arena.env_at`."""
        return None

    def deaths(self) -> list[tuple[int, str]]:
        """See `Backend.deaths`."""
        while self._server.poll():
            self._hear_server()
        died, self._died = self._died, []
        return died

    def kill(self, worker: int, why: str) -> None:
        """See `Backend.kill`."""
        if worker not in self._running:
            return
        self._why[worker] = why
        self._send(("kill", worker))
        while worker in self._running:
            self._hear_server()

    def kill_all(self) -> None:
        """Kill all workers at once."""
        if os.getpid() == self._pid and self._process.poll() is None:
            self._process.terminate()

    def close(self) -> None:
        """See `Backend.close`."""
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
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may still import what the envs need
                self._process.wait(self._settings.cleanup_time + _ENDING)
        finally:
            self._process.kill()
            self._process.wait()
            ends: list[Any] = [self._alive, self._server, *self._layouts, self._arena_event, *self._events]
            for end in ends:
                end.close()
            os.close(self._shared_fd)


def _fds(event: WakeEvent) -> tuple[int, int]:
    return event.reader.fileno(), event.writer.fileno()


def _no_server() -> EnvError:
    return EnvError(
        "the process that starts workers has ended, and the workers with it: it was killed, or what it wrote to stderr "
        "says why."
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


def _preparation(name: str, *, needs_main: bool) -> dict[str, Any]:
    """What `multiprocessing.spawn.prepare` does in a worker; the script is imported only where that is needed."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if needs_main and getattr(main, "__spec__", None) is None and (path is None or not os.path.exists(path)):
        raise EnvError(
            f"{name} is defined in an interactive session, where a worker process can't find it: put it into a module "
            "(a .py file) and import it, or use threads: Workers(mode='thread')."
        )
    wanted = ("sys_argv", "init_main_from_name", "init_main_from_path") if needs_main else ("sys_argv",)
    data = {key: value for key, value in spawn.get_preparation_data(name).items() if key in wanted}
    main_name = data.get("init_main_from_name", "")
    if main_name.endswith("__main__"):  # which multiprocessing takes for nobody's
        of_package = main_name.endswith(".__main__")
        data = {"sys_argv": sys.argv} | ({_PACKAGE: main_name} if of_package else {"init_main_from_path": path})
    return data


def _start_server(job: _WorkerJob) -> "subprocess.Popen[bytes]":
    with open(_nameless_file(), "w+b") as file:
        pickle.dump(job, file)
        file.flush()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited, until it can ignore Ctrl-C
        try:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    _COMMAND,
                    json.dumps([str(path) for path in sys.path]),
                    str(file.fileno()),
                ],
                pass_fds=(file.fileno(), *job.fds()),
                stdin=subprocess.DEVNULL,
                process_group=0,  # a signal to the group of this process does not end its workers before it can save
                env=dict.fromkeys(_THREADS, "1") | os.environ,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("etude")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# -- processes: the side of the server and the workers --------------------------------------------------------------


_PACKAGE = "main_of_package"
"""The ``package.__main__`` that is to be imported for what the maker needs of it."""

_COMMAND = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from etude.envs.backends import serve; serve()"
"""What Python is to run; the arguments are `sys.path` and the number of the file with the job."""

_is_importing_main = False
"""The script that made the arena is being imported again, in a server or a worker."""

_FORK = multiprocessing.get_context("fork") if hasattr(os, "fork") else None


def serve() -> NoReturn:
    """Be the server of an arena: start and kill workers as told, until the arena is gone."""
    arguments = sys.argv[1:3]
    job_fd, is_cold = int(arguments[1]), len(sys.argv) > 3
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the arena's business, which closes the workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with open(job_fd, "rb", closefd=False) as file:
        file.seek(0)
        job: _WorkerJob = pickle.load(file)  # noqa: S301  the arena's own, never data
    for fd in (job_fd, *job.fds()):
        os.set_inheritable(fd, False)
    maker = None if is_cold else _load(job)
    if (
        not is_cold and _num_threads() > 1
    ):  # what was imported has started threads: forget it, and let each worker import it
        for fd in (job_fd, *job.fds()):
            os.set_inheritable(fd, True)
        os.execv(sys.executable, [sys.executable, "-P", "-c", _COMMAND, *arguments, "cold"])
    _Server(job, maker).run()
    os._exit(0)


def _num_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _load(job: _WorkerJob) -> Callable[[], Any] | str:
    """What makes the envs, or why it can't be imported."""
    global _is_importing_main
    _is_importing_main = True
    try:
        package = job.preparation.pop(_PACKAGE, None)
        spawn.prepare(job.preparation)
        if package is not None:
            main = types.ModuleType("__mp_main__")
            main.__dict__.update(runpy.run_module(package, run_name="__mp_main__", alter_sys=True))
            sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        make: Callable[[], Any] = pickle.loads(job.pickled)  # noqa: S301  the arena's own, never data
        return make
    except BaseException:  # noqa: BLE001  told to the arena; a script that is imported may do anything
        return f"a worker can't import {job.name}:\n{traceback.format_exc().rstrip()}"
    finally:
        _is_importing_main = False


class _Server:
    def __init__(self, job: _WorkerJob, maker: Callable[[], Any] | str | None) -> None:
        self._job, self._maker = job, maker
        self._arena: Connection[Any, Any] = Connection(job.server_fd)
        self._workers: dict[int, Any] = {}
        signal.signal(signal.SIGTERM, self._end_at_once)
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def run(self) -> None:
        """Serve until the arena is gone, and the workers are."""
        while os.getppid() == self._job.arena_pid:  # a forked child of the arena may hold the connection open
            if self._arena in self._wait(1.0, self._arena) and not self._obey():
                break
        deadline = time.monotonic() + self._job.cleanup_time  # the workers see themselves that the arena is gone
        while self._workers and time.monotonic() < deadline:
            self._wait(max(0.0, deadline - time.monotonic()))
        self._kill_all()
        for process in self._workers.values():
            process.join()

    def _wait(self, seconds: float, *others: Any) -> list[Any]:
        """Wait for ``others`` or the end of a worker, and tell the arena which workers have ended, and how."""
        ready = connection.wait([*others, *(process.sentinel for process in self._workers.values())], seconds)
        for worker, process in list(self._workers.items()):
            code = process.exitcode
            if code is not None:
                if code:  # its envs were not closed: what they have started goes with it
                    _kill_group(process.pid)
                del self._workers[worker]
                with contextlib.suppress(OSError):
                    self._arena.send((worker, code))
        return ready

    def _obey(self) -> bool:
        try:
            what, *worker_and_layout = self._arena.recv()
        except (EOFError, OSError):
            return False
        if what == "end":
            return False
        if what == "kill":
            if (process := self._workers.get(worker_and_layout[0])) is not None:
                _kill_group(process.pid)
            return True
        assert _FORK is not None
        worker, layout = worker_and_layout
        process = _FORK.Process(target=self._be_worker, args=(worker, layout, os.getpid()))
        process.start()
        assert process.pid is not None
        _lead_group(process.pid)
        self._workers[worker] = process
        if layout is None:
            os.close(self._job.layout_fds[worker])
        return True

    def _kill_all(self) -> None:
        for process in self._workers.values():
            _kill_group(process.pid)

    def _end_at_once(self, *_: object) -> NoReturn:
        self._kill_all()
        os._exit(1)

    def _be_worker(self, worker: int, layout: Any, server: int) -> NoReturn:
        try:
            if self._libc is not None:
                self._libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the server
            if os.getppid() != server:  # it was gone before that
                os._exit(1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _lead_group(os.getpid())
            os.close(self._job.server_fd)
            for fd in self._job.layout_fds[worker + 1 :] if layout is None else ():
                os.close(fd)  # else nobody sees when the workers that they are of have ended
            make = _load(self._job) if self._maker is None else self._maker
            _run_worker(self._job, make, worker, layout)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            raise
        finally:  # whatever happens: never go on as a second server
            os._exit(1)


def _lead_group(pid: int) -> None:
    """Let a worker, and what its envs start, be a process group. Parent and child do it: neither may be too late."""
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _run_worker(job: _WorkerJob, make: Callable[[], Any] | str, number: int, layout: Any) -> None:
    """Be a worker until the arena closes or is gone. With a ``layout``, it is one in place of another that died."""
    np.random.seed()  # else all forked workers draw the same from it
    event, arena_event = _event(job.events[number]), _event(job.arena_event)
    wait = wait_for([event.reader, job.alive_fd])

    def sleep() -> bool:
        ready = wait(NAP)
        event.clear()
        return job.alive_fd not in ready  # nothing is ever sent: it is at its end

    with contextlib.ExitStack() as stack:
        stack.callback(sys.stdout.flush)
        if isinstance(make, str):
            _tell(job, number, {"error": make, "is_space": False})
            return
        envs = range(number * job.envs_per_worker, (number + 1) * job.envs_per_worker)
        worker = EnvWorker(make, job.name, envs, job.limits)
        stack.enter_context(contextlib.suppress(BaseException))  # of envs that don't close: all is over
        stack.callback(worker.close)
        if layout is None:
            try:
                layout = worker.make_all().to_json()
            except EtudeError as error:
                text, cause = str(error), error.__cause__
                if cause is not None:
                    text += "\n" + "".join(traceback.format_exception(cause)).rstrip()
                _tell(job, number, {"error": text, "is_space": isinstance(error, SpaceError)})
                return
            _tell(job, number, layout)
        while not (size := os.fstat(job.shared_fd).st_size):
            if not sleep():
                return
        num_envs = job.num_workers * job.envs_per_worker
        memory = mmap.mmap(job.shared_fd, size)
        shared = SharedBuffers(AgentLayout.from_json(layout), num_envs, job.num_workers, memory)
        while not shared.words[READY]:
            if not sleep():
                return
        spin = Spin() if hasattr(os, "sched_yield") else None
        work(worker, shared, number, arena_event, spin=spin, sleep=sleep)


def _event(fds: tuple[int, int]) -> WakeEvent:
    reader, writer = (socket.socket(fileno=fd) for fd in fds)
    return WakeEvent((reader, writer))


def _tell(job: _WorkerJob, number: int, message: dict[str, Any]) -> None:
    """Send the arena the layout of a worker's envs, or why there is none."""
    with Connection(job.layout_fds[number], readable=False) as to_arena:
        to_arena.send(message)
