# SPDX-License-Identifier: Apache-2.0
"""What worker processes are for: the function that makes their envs, how it gets there, and what is done there."""

import contextlib
import dataclasses
import json
import mmap
import os
import pickle
import runpy
import socket
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from etude.envs import worker_messages as messages
from etude.envs.pool_host import Host
from etude.envs.pool_memory import Memory, Plan
from etude.envs.worker_loop import NAP, Spin, hush, wait_for, work
from etude.errors import EtudeError, SpaceError

is_importing_main = False
"""The script that made the arena is being imported again, in a process that starts workers or in one of them."""


@dataclasses.dataclass(kw_only=True)
class Job:
    """What all workers of an arena have in common; goes from process to process through an open file."""

    name: str
    """What makes the envs, for errors."""
    main: dict[str, str]
    """How to import the script that the maker is defined in: its ``path`` or, as a module, its ``name``; {}: it is
    defined elsewhere."""
    argv: list[str]
    """The arguments of the arena's program, for modules that look at theirs when they are imported."""
    arena_pid: int
    num_workers: int
    envs_per_worker: int
    max_steps: int | None
    check: int | Literal["always"]
    cleanup_time: float
    pickled: bytes = b""
    """The maker."""
    make: Callable[[], Any] | None = None
    error: str = ""
    """Why there is none."""

    def write(self, fd: int) -> None:
        """Write it into an empty file."""
        kept = {name: value for name, value in vars(self).items() if name not in ("pickled", "make", "error")}
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(json.dumps(kept).encode() + b"\n" + self.pickled)

    @classmethod
    def read(cls, fd: int) -> "Job":
        """The inverse of `write`."""
        with os.fdopen(os.dup(fd), "rb") as file:
            file.seek(0)
            head, _, pickled = file.read().partition(b"\n")
        return cls(**json.loads(head), pickled=pickled)

    def load(self) -> None:
        """Have ``make``, or ``error``."""
        if self.make is not None or self.error:
            return
        sys.argv = self.argv
        try:
            if self.main:
                _import_main(**self.main)
            self.make = pickle.loads(self.pickled)  # noqa: S301  the arena's own, never data
        except BaseException:  # noqa: BLE001  told to the arena; a script that is imported may do anything
            self.error = f"a worker can't import {self.name}:\n{traceback.format_exc().rstrip()}"


def _import_main(path: str = "", name: str = "") -> None:
    """Import a script again, but not as ``__main__``, so that it defines what it defines and does nothing."""
    global is_importing_main
    is_importing_main = True
    try:
        module = types.ModuleType("__mp_main__")  # the name that multiprocessing uses, and scripts may know
        content = (
            runpy.run_path(path, run_name="__mp_main__")
            if path
            else runpy.run_module(name, run_name="__mp_main__", alter_sys=True)
        )
        module.__dict__.update(content)
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    finally:
        is_importing_main = False


def run_worker(job: Job, worker: int, arena: socket.socket) -> None:
    """Be a worker until the arena closes or is gone."""
    np.random.seed()  # else all forked workers draw the same from it
    received = messages.receive(arena)
    job.load()
    if received is None:
        return
    message, (bell_fd, arena_bell_fd) = received
    bell, arena_bell = socket.socket(fileno=bell_fd), socket.socket(fileno=arena_bell_fd)
    if job.make is None:
        messages.send(arena, {"error": job.error, "class": "EnvError"})
        return
    per = job.envs_per_worker
    host = Host(job.make, job.name, range(worker * per, (worker + 1) * per), job.max_steps, job.check)
    with contextlib.suppress(Exception):  # of envs that don't close: all is over
        try:
            memory = _begin(job, host, worker, arena, eager=message["eager"])
            if memory is not None:
                _work(host, memory, worker, bell, arena_bell, arena)
        finally:
            host.close()
            sys.stdout.flush()


def _begin(job: Job, host: Host, worker: int, arena: socket.socket, *, eager: bool) -> Memory | None:
    if eager:
        try:
            plan = host.make_all()
        except EtudeError as error:
            text, cause = str(error), error.__cause__
            if cause is not None:
                text += "\n" + "".join(traceback.format_exception(cause)).rstrip()
            name = "SpaceError" if isinstance(error, SpaceError) else "EnvError"
            messages.send(arena, {"error": text, "class": name})
            return None
        messages.send(arena, {"plan": plan.to_json()})
    received = messages.receive(arena)
    if received is None:
        return None
    message, (fd,) = received
    shared = mmap.mmap(fd, 0)
    os.close(fd)
    memory = Memory(Plan.from_json(message["plan"]), job.num_workers * job.envs_per_worker, job.num_workers, shared)
    host.attach(memory, worker)
    return memory


def _work(
    host: Host, memory: Memory, worker: int, bell: socket.socket, arena_bell: socket.socket, arena: socket.socket
) -> None:
    wait = wait_for([bell, arena])
    arena_fd = arena.fileno()

    def sleep() -> bool:
        ready = wait(NAP)
        hush(bell)
        return arena_fd not in ready  # it says nothing more: its end is closed

    def report(env: int) -> None:
        name, text = host.failures.pop(env)
        messages.send(arena, {"env": env, "class": name, "error": text[-20_000:]})

    work(
        host,
        memory,
        worker,
        arena_bell,
        spin=Spin() if hasattr(os, "sched_yield") else None,
        report=report,
        sleep=sleep,
    )
