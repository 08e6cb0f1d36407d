# SPDX-License-Identifier: Apache-2.0
"""What a worker does, be it a process or a thread: wait for orders, have them done, say so."""

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from etude.envs.pool_host import Host
from etude.envs.pool_memory import ASLEEP, CLOSING, FAILED, GOAL, TIMED, Memory

TIMES: Final = 300
"""How often to give way before one sleeps: for a tenth of a millisecond or more. Sixteen CartPoles in two workers on
two cores make 125,000 steps a second so, 110,000 with a third of it, and hardly more with three times as much."""

NAP: Final = 1.0
"""Seconds after which who sleeps looks round, though nobody woke it."""


def bell() -> tuple[socket.socket, socket.socket]:
    """Who holds the first end can wait to be called by whoever holds the second; what goes through means nothing."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return ends


def call(end: socket.socket) -> None:
    """Wake who is at the other end of a bell, now or when it next waits."""
    try:
        end.send(b"!")
    except (BlockingIOError, BrokenPipeError, ConnectionResetError):  # full of calls already, or nobody is there
        return


def hush(end: socket.socket) -> None:
    """Forget the calls until now."""
    try:
        end.recv(65536)
    except BlockingIOError:
        return


def fence() -> Callable[[], None]:
    """A function for one thread: what it wrote before is seen by other processors before it reads anything after.

    Who is about to sleep says so and then looks for work once more; who has work leaves it and then looks who sleeps.
    Without a fence between, each may miss the other.
    """
    lock = threading.Lock()
    lock.acquire()

    def cross() -> None:
        lock.release()  # in this order: no processor lets a read after an acquire pass a write before a release
        lock.acquire()

    return cross


class Spin:
    """Looking for something to do, and giving way to others between, for a while before one sleeps.

    That is quicker than to be woken, as long as all who have something to do give way: so it is left for a tenth of a
    second when another program kept the core for its whole share. Never to give way would keep the envs from theirs.
    """

    def __init__(self) -> None:
        self._left = 0
        self._now = self._rest = 0.0

    def begin(self) -> None:
        """There is nothing to do from now on."""
        self._now = time.perf_counter()
        self._left = TIMES if self._now > self._rest else 0

    def goes_on(self) -> bool:
        """Give way, and then look again; False: sleep instead."""
        if not self._left:
            return False
        self._left -= 1
        os.sched_yield()
        now = time.perf_counter()
        if now - self._now > 1e-3:
            self._left, self._rest = 0, now + 0.1
        self._now = now
        return True


def wait_for(ends: Sequence[socket.socket]) -> Callable[[float], list[int]]:
    """A function that waits, at most so many seconds, until some of ``ends`` have something to say: their numbers."""
    fds = [end.fileno() for end in ends]
    if not hasattr(select, "poll"):
        return lambda seconds: select.select(fds, [], [], seconds)[0]
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return lambda seconds: [fd for fd, _ in poll.poll(max(0.0, seconds * 1e3))]


def work(
    host: Host,
    memory: Memory,
    worker: int,
    arena_bell: socket.socket,
    *,
    spin: Spin | None,
    report: Callable[[int], None] | None = None,
    sleep: Callable[[], bool],
) -> None:
    """Serve orders until the arena closes, or ``sleep`` says that it is gone.

    Args:
        host: Steps the envs.
        memory: Where the orders are.
        worker: Which worker this is.
        arena_bell: Where to call the arena.
        spin: None for threads, which would hold the lock that others need.
        report: Tells the arena why an env failed.
        sleep: Sleeps until this worker is called; False: the arena is gone.
    """
    words, asked, done = memory.words.data, memory.asked.data, memory.done.data  # quicker than arrays, for one number
    order, status = memory.order.data, memory.status.data
    total, asleep, current = memory.total.data, memory.asleep.data, memory.current.data
    doing = memory.doing.data
    cross = fence()
    closing: int = CLOSING
    began: Any = memory.began.data if words[TIMED] else None
    num_done = total[worker]
    was_idle = False
    while not words[closing]:
        served = False
        for env in host.envs:
            number = asked[env]
            if number == done[env]:
                continue
            doing[worker] = order[env]
            if began is not None:
                began[worker] = time.monotonic()
            current[worker] = env
            bits = host.serve(env, order[env])
            if bits & FAILED and report is not None:
                report(env)
            status[env] = bits
            done[env] = number
            num_done += 1
            total[worker] = num_done
            cross()
            if words[ASLEEP] and sum(total) >= words[GOAL]:
                call(arena_bell)
            served = True
            if words[closing]:
                return
        if served:
            was_idle = False
            continue
        if not was_idle:
            current[worker] = -1
            was_idle = True
            if spin is not None:
                spin.begin()
        if spin is not None and spin.goes_on():
            continue
        asleep[worker] = 1
        cross()
        is_idle = all(asked[env] == done[env] for env in host.envs) and not words[closing]
        if is_idle and not sleep():
            return
        asleep[worker] = 0
