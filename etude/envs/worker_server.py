# SPDX-License-Identifier: Apache-2.0
"""The process that starts worker processes: it has imported what they need, and forks.

The arena's own process is not forked: it may have threads (torch's), whose locks a fork would leave locked for ever.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import NoReturn

from etude.envs import worker_messages as messages
from etude.envs.worker_job import Job, run_worker


def main() -> NoReturn:
    """Start workers as told by the socket whose number is the last argument but one, until it closes."""
    arguments = sys.argv[1:4]
    fd, job_fd, is_cold = int(arguments[1]), int(arguments[2]), len(sys.argv) > 4
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the arena's business, which closes the workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for kept in (fd, job_fd):
        os.set_inheritable(kept, False)
    server = socket.socket(fileno=fd)
    job = Job.read(job_fd)
    if not is_cold:
        job.load()
        if _num_threads() > 1:  # what was imported has started threads: forget it, and let each worker import it
            for kept in (fd, job_fd):
                os.set_inheritable(kept, True)
            os.execv(sys.executable, [sys.executable, "-P", "-c", COMMAND, *arguments, "cold"])
    _Server(server, job).run()
    os._exit(0)


COMMAND = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from etude.envs.worker_server import main; main()"
"""What Python is to run; the arguments are `sys.path`, a socket's number and that of the file with the job."""


def _num_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _lead_group(pid: int) -> None:
    """Let a worker, and what its envs start, be a process group. Parent and child do it: neither may be too late."""
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class _Server:
    def __init__(self, arena: socket.socket, job: Job) -> None:
        self._arena, self._job = arena, job
        self._workers: dict[int, int] = {}  # by process id, the worker's number
        self._children, told = os.pipe()
        for end in (self._children, told):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._end_at_once)
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def run(self) -> None:
        """Serve until the arena is gone, and the workers are."""
        poll = select.poll()
        poll.register(self._arena, select.POLLIN)
        poll.register(self._children, select.POLLIN)
        while os.getppid() == self._job.arena_pid:  # a forked child of the arena may hold the socket open
            ready = [fd for fd, _ in poll.poll(1000)]
            if self._children in ready:
                os.read(self._children, 4096)
                self._bury()
            if self._arena.fileno() in ready and not self._obey():
                break
        deadline = time.monotonic() + self._job.cleanup_time  # the workers see themselves that the arena is gone
        while self._workers and time.monotonic() < deadline:
            select.select([self._children], [], [], max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(BlockingIOError):
                os.read(self._children, 4096)
            self._bury()
        self._kill_all()
        for pid in self._workers:
            os.waitpid(pid, 0)

    def _kill_all(self) -> None:
        for pid in self._workers:
            _kill_group(pid)

    def _end_at_once(self, *_: object) -> NoReturn:
        self._kill_all()
        os._exit(1)

    def _bury(self) -> None:
        """Tell the arena which workers have ended, and how."""
        while self._workers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in self._workers:
                code = os.waitstatus_to_exitcode(status)
                if code:  # its envs were not closed: what they have started goes with it
                    _kill_group(pid)
                messages.send(self._arena, {"died": self._workers.pop(pid), "code": code})

    def _obey(self) -> bool:
        received = messages.receive(self._arena)
        if received is None:
            return False
        message, fds = received
        if "kill" in message:
            for pid, worker in self._workers.items():  # not yet buried, so that the number is its own
                if worker == message["kill"]:
                    _kill_group(pid)
            return True
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(message["start"], fds[0], server)
        os.close(fds[0])
        _lead_group(pid)
        self._workers[pid] = message["start"]
        return True

    def _become_worker(self, worker: int, fd: int, server: int) -> NoReturn:
        try:
            self._die_with(server)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            _lead_group(os.getpid())
            self._arena.close()
            run_worker(self._job, worker, socket.socket(fileno=fd))
            os._exit(0)
        finally:  # whatever happens: never go on as a second server
            os._exit(1)

    def _die_with(self, server: int) -> None:
        if self._libc is not None:
            self._libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != server:  # it was gone before that
            os._exit(1)
