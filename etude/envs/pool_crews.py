# SPDX-License-Identifier: Apache-2.0
"""Who steps the envs of a pool: this process itself, or threads of it. `pool_processes` has the third way."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from etude.envs.make import EnvLike, env_maker, env_name
from etude.envs.pool_checks import check_alike, same_object
from etude.envs.pool_host import Host
from etude.envs.pool_memory import CLOSING, TIMED, Memory, Plan
from etude.envs.pool_processes import Processes
from etude.envs.pool_turns import Infos, Ints
from etude.envs.worker_loop import NAP, Spin, bell, call, hush, wait_for, work
from etude.envs.workers import Workers
from etude.errors import EnvError


class Crew(Protocol):
    """The workers of an arena."""

    spin: Spin | None
    """How the arena waits before it sleeps."""
    infos: Infos | None
    memory: Memory
    can_restart: bool
    """Whether envs that failed can be made again."""

    def open(self) -> None:
        """Make all envs, and have ``memory``.

        Raises:
            EnvError: that fails, or the envs are not alike.
        """

    def wake(self, envs: Ints) -> None:
        """There are orders for ``envs``: let their workers see to them."""

    def wait(self, seconds: float) -> None:
        """Sleep until called, at most so long."""

    def failure(self, env: int) -> tuple[str, str]:
        """The class and the text of the error with which ``env`` failed."""

    def env_at(self, env: int) -> Any:
        """See `Arena.env_at`."""

    def has_news(self) -> bool:
        """Whether there are `deaths`."""

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


class Here:
    """No workers: orders are done when the arena waits for them."""

    spin: Spin | None = None

    def __init__(self, make: Callable[[], Any], name: str, num_envs: int, workers: Workers, *, is_given: bool) -> None:
        envs = range(num_envs)
        self.host = Host(make, name, envs, workers.max_steps, workers.check, is_given=is_given, is_here=True)
        self.infos: Infos | None = (self.host.infos, self.host.end_infos)
        self.can_restart = not is_given

    def open(self) -> None:
        """See `Crew.open`."""
        plan = self.host.make_all()
        self.memory = memory = Memory(plan, len(self.host.envs), 1)
        self.host.attach(memory)
        self._asked, self._done = memory.asked.data, memory.done.data
        self._order, self._status = memory.order.data, memory.status.data
        self._pending: list[int] = []

    def wake(self, envs: Ints) -> None:
        """See `Crew.wake`."""
        self._pending += envs.tolist()

    def wait(self, seconds: float) -> None:
        """Do all orders."""
        asked, done, order, status = self._asked, self._done, self._order, self._status
        serve = self.host.serve
        try:
            for env in self._pending:
                status[env] = serve(env, order[env])
                done[env] = asked[env]
        except BaseException:  # Ctrl-C
            self._pending = [env for env in self._pending if done[env] != asked[env]]
            raise
        self._pending.clear()

    def failure(self, env: int) -> tuple[str, str]:
        """See `Crew.failure`."""
        return self.host.failures.pop(env)

    def env_at(self, env: int) -> Any:
        """See `Arena.env_at`."""
        return self.host.env_at(env)

    def has_news(self) -> bool:
        """See `Crew.has_news`."""
        return False

    def deaths(self) -> list[tuple[int, str]]:
        """See `Crew.deaths`."""
        return []

    def kill(self, worker: int, why: str) -> None:
        """See `Crew.kill`."""

    def restart(self, worker: int) -> None:
        """See `Crew.restart`."""

    def close(self) -> None:
        """See `Crew.close`."""
        self.host.close()


class Threads:
    """Each worker is a thread of this process."""

    spin: Spin | None = None  # it would hold Python's lock
    can_restart = True

    def __init__(self, make: Callable[[], Any], name: str, workers: Workers) -> None:
        self._make, self._name, self._workers = make, name, workers
        self._per = workers.envs_per_worker
        count = workers.num_workers
        self._said: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
        self.infos: Infos | None = self._said
        self._hosts = [self._new_host(i) for i in range(count)]
        self._bells = [bell() for _ in self._hosts]
        self._hears, self._arena_bell = bell()
        self._wait = wait_for([self._hears])
        self._plans: list[Future[Plan]] = [Future() for _ in self._hosts]
        self._memory: Future[Memory | None] = Future()
        self._threads = [self._new_thread(i) for i in range(count)]
        self._why: dict[int, str] = {}
        """By worker: what ended its thread."""

    def _new_host(self, worker: int) -> Host:
        envs = range(worker * self._per, (worker + 1) * self._per)
        host = Host(self._make, self._name, envs, self._workers.max_steps, self._workers.check)
        host.infos, host.end_infos = self._said
        return host

    def _new_thread(self, worker: int) -> threading.Thread:
        return threading.Thread(target=self._run, args=(worker,), name=f"etude-worker-{worker}", daemon=True)

    def open(self) -> None:
        """See `Crew.open`."""
        for thread in self._threads:
            thread.start()
        plans = [plan.result() for plan in self._plans]
        envs = [copy.env for host in self._hosts for copy in host.copies()]
        if len({id(env) for env in envs}) < len(envs):
            raise same_object(envs[0])
        for i, plan in enumerate(plans):
            check_alike(plans[0], plan, i * self._per)
        self.memory = Memory(plans[0], len(envs), len(self._hosts))
        self.memory.words[TIMED] = self._workers.seconds_a_step is not None
        for worker in range(len(self._hosts)):
            self.memory.starts(worker)
        self._memory.set_result(self.memory)

    def _run(self, worker: int) -> None:
        host, (hears, _) = self._hosts[worker], self._bells[worker]
        if not self._memory.done():  # else this is a restart: envs are made when that is ordered
            try:
                self._plans[worker].set_result(host.make_all())
            except BaseException as error:  # noqa: BLE001  raised by `open`
                self._plans[worker].set_exception(error)
        wait = wait_for([hears])

        def sleep() -> bool:
            wait(NAP)
            hush(hears)
            return True

        memory = self._memory.result()
        try:
            if memory is not None:
                host.attach(memory, worker)
                work(host, memory, worker, self._arena_bell, spin=None, sleep=sleep)
        except BaseException as error:  # noqa: BLE001  it ends the thread, which the arena is told
            self._why[worker] = f"was ended by {type(error).__name__}: {error}"
        with contextlib.suppress(BaseException):  # of envs that don't close: all is over
            host.close()
        call(self._arena_bell)

    def wake(self, envs: Ints) -> None:
        """See `Crew.wake`."""
        for worker in set((envs // self._per).tolist()):
            if self.memory.asleep[worker]:
                call(self._bells[worker][1])

    def wait(self, seconds: float) -> None:
        """See `Crew.wait`."""
        if self._wait(seconds):
            hush(self._hears)

    def failure(self, env: int) -> tuple[str, str]:
        """See `Crew.failure`."""
        return self._hosts[env // self._per].failures.pop(env, ("EnvError", f"env {env} failed, and then its worker."))

    def env_at(self, env: int) -> Any:
        """See `Arena.env_at`."""
        return self._hosts[env // self._per].env_at(env)

    def has_news(self) -> bool:
        """See `Crew.has_news`."""
        return bool(self._why)

    def deaths(self) -> list[tuple[int, str]]:
        """See `Crew.deaths`: nothing that an env raises ends a thread, but another thread may."""
        dead = [i for i, thread in enumerate(self._threads) if i in self._why or not thread.is_alive()]
        return [(worker, self._why.pop(worker, "has ended")) for worker in dead]

    def kill(self, worker: int, why: str) -> None:
        """See `Crew.kill`."""
        raise EnvError(f"worker {worker} {why}. It is a thread, which can't be killed: use mode='process'.")

    def restart(self, worker: int) -> None:
        """See `Crew.restart`."""
        self._hosts[worker] = self._new_host(worker)
        self.memory.starts(worker)
        self._threads[worker] = self._new_thread(worker)
        self._threads[worker].start()

    def close(self) -> None:
        """See `Crew.close`. A thread that hangs is left behind."""
        if self._memory.done():
            self.memory.words[CLOSING] = 1
        else:
            self._memory.set_result(None)
        for _, rings in self._bells:
            call(rings)
        deadline = time.monotonic() + self._workers.cleanup_time
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            for end in (self._hears, self._arena_bell, *(end for ends in self._bells for end in ends)):
                end.close()


def crew_for(env: EnvLike, workers: Workers, num_envs: int | None, drop: Sequence[str] = ()) -> Crew:
    """Who steps the copies of an env; see `PoolArena`. They have none yet.

    Raises:
        EnvError: there can't be so many copies, or there.
    """
    make, is_one = env_maker(env, drop)
    if num_envs is not None and num_envs < 1:
        raise EnvError(f"num_envs must be at least 1, not {num_envs}.")
    count = workers.num_workers * workers.envs_per_worker or num_envs or 1
    if num_envs is not None and num_envs != count:
        raise EnvError(f"num_envs is {num_envs}, but there are {count} envs in the workers: leave it away.")
    if is_one and (count > 1 or workers.num_workers):
        raise EnvError(
            f"one {type(env).__name__} object can't be {count} envs, nor in a worker: give a function that makes one, "
            "or ask for one env and no workers."
        )
    if not workers.num_workers:
        return Here(make, env_name(env), count, workers, is_given=is_one)
    return (Threads if workers.mode == "thread" else Processes)(make, env_name(env), workers)
