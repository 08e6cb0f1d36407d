# SPDX-License-Identifier: Apache-2.0
"""Worker processes, from the side of their arena."""

import contextlib
import json
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from etude.envs import worker_job
from etude.envs import worker_messages as messages
from etude.envs import workers as worker_settings
from etude.envs.pool_checks import check_alike
from etude.envs.pool_memory import CLOSING, TIMED, Memory, Plan
from etude.envs.pool_turns import Infos, Ints
from etude.envs.worker_job import Job
from etude.envs.worker_loop import Spin, bell, call, fence, hush, wait_for
from etude.envs.worker_server import COMMAND
from etude.envs.workers import RESET_FACTOR, Workers
from etude.errors import EnvError, EtudeError, SpaceError

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_ENDING: Final = 5.0
"""Seconds for the process that starts workers to end once they have; then it is killed."""
_OPEN: "weakref.WeakSet[Processes]" = weakref.WeakSet()


def kill_workers() -> None:
    """Kill the worker processes of all arenas at once, without closing their envs: this process is about to end."""
    for processes in list(_OPEN):
        processes.kill_all()


def error_of(class_name: str, text: str) -> EtudeError:
    """An error that crossed from a worker."""
    return SpaceError(text) if class_name == "SpaceError" else EnvError(text)


class Processes:
    """Each worker is a process, started by one that has only imported what they need.

    What crosses at each step goes through memory that all map, which has no name and is gone with its processes. Who
    waits sleeps on a socket. The workers end when the arena closes, and when its process ends in whatever way.
    """

    can_restart = True
    infos: Infos | None = None

    def __init__(self, make: Callable[[], Any], name: str, workers: Workers) -> None:
        if worker_job.is_importing_main:
            raise EnvError(
                "a worker imports your script to find what makes its envs, and the script starts workers itself. Put "
                'what it does, other than imports and definitions, under `if __name__ == "__main__":`.'
            )
        self._workers = workers
        self.spin = Spin() if hasattr(os, "sched_yield") else None
        count = workers.num_workers
        job = Job(
            name=name,
            main={},
            argv=sys.argv,
            arena_pid=os.getpid(),
            num_workers=count,
            envs_per_worker=workers.envs_per_worker,
            max_steps=workers.max_steps,
            check=workers.check,
            cleanup_time=workers.cleanup_time,
            pickled=_pickled(make, name),
        )
        if b"__main__" in job.pickled:
            job.main = _main_of(name)
        self._pid = os.getpid()
        self._memory_fd = -1
        self._bells = [bell() for _ in range(count)]
        self._hears, self._arena_bell = bell()
        self._failures: dict[int, tuple[str, str]] = {}
        self._died: list[tuple[int, str]] = []
        self._why: dict[int, str] = {}
        self._alive: set[int] = set()
        self._cross = fence()
        self._ends: dict[int, socket.socket] = {}
        """By worker: where to talk to it."""
        self._server, self._process = _start_server(job)
        _OPEN.add(self)

    # -- the beginning ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """See `Crew.open`."""
        workers = range(self._workers.num_workers)
        for worker in workers:
            self._start(worker, eager=True)
        step = self._workers.seconds_a_step
        seconds = None if step is None else max(RESET_FACTOR * step, worker_settings.LEAST_TO_MAKE)
        deadline = None if seconds is None else time.monotonic() + self._workers.envs_per_worker * seconds
        plans = [self._plan_of(worker, deadline) for worker in workers]
        for worker, plan in enumerate(plans):
            check_alike(plans[0], plan, worker * self._workers.envs_per_worker)
        count, plan = len(workers), plans[0]
        num_envs = count * self._workers.envs_per_worker
        size = Memory.size_of(plan, num_envs, count)
        self._memory_fd = _nameless_file()
        os.ftruncate(self._memory_fd, size)
        self.memory = Memory(plan, num_envs, count, mmap.mmap(self._memory_fd, size))
        self.memory.words[TIMED] = self._workers.seconds_a_step is not None
        for worker in workers:
            self.memory.starts(worker)
            self._send_memory(worker)
        self._listen()

    def _start(self, worker: int, *, eager: bool) -> None:
        mine, its = socket.socketpair()
        if not messages.send(self._server, {"start": worker}, [its.fileno()]):
            raise _no_server()
        its.close()
        self._ends[worker] = mine
        self._alive.add(worker)
        messages.send(mine, {"eager": eager}, [self._bells[worker][0].fileno(), self._arena_bell.fileno()])

    def _plan_of(self, worker: int, deadline: float | None) -> Plan:
        end = self._ends[worker]
        if deadline is not None and not wait_for([end])(max(0.0, deadline - time.monotonic())):
            raise EnvError(
                f"worker {worker} hung: it has not made its envs. Each may take {RESET_FACTOR} times `step_timeout` "
                f"({self._workers.seconds_a_step:g} s), and {worker_settings.LEAST_TO_MAKE:g} s at least: raise that "
                "if it needs longer."
            )
        received = messages.receive(end)
        if received is None:
            while not self._died:
                self._hear_server()
            raise EnvError(f"worker {worker} {self._died[0][1]} while it made its envs.")
        message, _ = received
        if "error" in message:
            raise error_of(message["class"], message["error"])
        return Plan.from_json(message["plan"])

    def _send_memory(self, worker: int) -> None:
        messages.send(self._ends[worker], {"plan": self.memory.plan.to_json()}, [self._memory_fd])

    def restart(self, worker: int) -> None:
        """See `Crew.restart`."""
        self._ends.pop(worker).close()
        for env in range(worker * self._workers.envs_per_worker, (worker + 1) * self._workers.envs_per_worker):
            self._failures.pop(env, None)
        hush(self._bells[worker][0])
        self.memory.starts(worker)
        self._start(worker, eager=False)
        self._send_memory(worker)
        self._listen()

    # -- between ------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._speakers = {end.fileno(): worker for worker, end in self._ends.items() if worker in self._alive}
        self._wait = wait_for([self._hears, self._server, *(self._ends[w] for w in self._speakers.values())])

    def wake(self, envs: Ints) -> None:
        """See `Crew.wake`."""
        self._cross()
        asleep = self.memory.asleep.data
        for worker in set((envs // self._workers.envs_per_worker).tolist()):
            if asleep[worker]:
                call(self._bells[worker][1])

    def wait(self, seconds: float) -> None:
        """See `Crew.wait`."""
        for fd in self._wait(seconds):
            if fd == self._hears.fileno():
                hush(self._hears)
            elif fd == self._server.fileno():
                self._hear_server()
            else:
                self._hear(self._speakers[fd])

    def _hear(self, worker: int) -> None:
        received = messages.receive(self._ends[worker])
        if received is None:  # the process that started it tells how it ended
            self._alive.discard(worker)
            self._listen()
            return
        message, _ = received
        if "env" in message:
            self._failures[message["env"]] = (message["class"], message["error"])
        else:
            self._why[worker] = message["error"]

    def _hear_server(self) -> None:
        received = messages.receive(self._server)
        if received is None:
            raise _no_server()
        message, _ = received
        worker, code = message["died"], message["code"]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        self._died.append((worker, self._why.pop(worker, how)))

    def failure(self, env: int) -> tuple[str, str]:
        """See `Crew.failure`."""
        worker = env // self._workers.envs_per_worker
        while env not in self._failures and worker in self._alive:  # it was sent before the env was said to have failed
            self._hear(worker)
        return self._failures.pop(env, ("EnvError", f"env {env} failed, and then its worker."))

    def env_at(self, env: int) -> Any:
        """See `Arena.env_at`."""
        return None

    def has_news(self) -> bool:
        """See `Crew.has_news`."""
        return bool(self._died)

    def deaths(self) -> list[tuple[int, str]]:
        """See `Crew.deaths`."""
        died, self._died = self._died, []
        return died

    def kill(self, worker: int, why: str) -> None:
        """See `Crew.kill`."""
        self._why[worker] = why
        messages.send(self._server, {"kill": worker})
        while all(worker != dead for dead, _ in self._died):
            self._hear_server()

    # -- the end ------------------------------------------------------------------------------------------------

    def kill_all(self) -> None:
        """Kill all workers at once."""
        if os.getpid() == self._pid and self._process.poll() is None:
            self._process.terminate()

    def close(self) -> None:
        """See `Crew.close`."""
        if os.getpid() != self._pid or self._process.returncode is not None:
            return
        try:
            if self._memory_fd >= 0:
                self.memory.words[CLOSING] = 1
            for end in self._ends.values():
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_WR)
            for _, rings in self._bells:
                call(rings)
            self._server.shutdown(socket.SHUT_WR)  # it waits for the workers, but not for long
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may still import what the envs need
                self._process.wait(self._workers.cleanup_time + _ENDING)
        finally:
            self._process.kill()
            self._process.wait()
            bells = (end for ends in (*self._bells, (self._hears, self._arena_bell)) for end in ends)
            for end in (self._server, *self._ends.values(), *bells):
                end.close()
            if self._memory_fd >= 0:
                os.close(self._memory_fd)


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


def _main_of(name: str) -> dict[str, str]:
    """How a worker can import the script that ``name`` is in."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return {"name": spec.name}
    if path is None or not os.path.exists(path):
        raise EnvError(
            f"{name} is defined in an interactive session, where a worker process can't find it: put it into a module "
            "(a .py file) and import it, or use threads: Workers(mode='thread')."
        )
    return {"path": os.path.abspath(path)}


def _start_server(job: Job) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    mine, its = socket.socketpair()
    file = _nameless_file()
    try:
        job.write(file)
        fds = (its.fileno(), file)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited, until it can ignore Ctrl-C
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", COMMAND, json.dumps([str(path) for path in sys.path]), *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                process_group=0,  # a signal to the group of this process does not end its workers before it can save
                env=dict.fromkeys(_THREADS, "1") | os.environ,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    finally:
        its.close()
        os.close(file)
    return mine, process


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("etude")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
