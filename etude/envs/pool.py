# SPDX-License-Identifier: Apache-2.0
"""PoolArena: copies of an env in worker processes or threads, which act as soon as they are ready."""

import time
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from etude.display import short
from etude.envs import workers as worker_settings
from etude.envs.arena import Ints
from etude.envs.backends import ProcessBackend, ThreadBackend
from etude.envs.buffers import ASLEEP, GOAL, MAKE, RESET, STEP
from etude.envs.copies import ANY, CopiesArena, count_up
from etude.envs.registry import EnvLike, env_maker, env_name, single_env_error
from etude.envs.worker import MAX_SLEEP, envs_of, fence
from etude.envs.workers import RESET_FACTOR, Workers
from etude.errors import EnvError, EtudeError

LOOK: Final = 0.02
"""Seconds between two checks of the workers while the arena is busy."""


class PoolArena(CopiesArena):
    """Copies of an env in workers; `recv` returns those that are ready. See `CopiesArena`.

    An env steps as soon as all its waiting agents have actions, and is reset as soon as its episode is over: the end
    and the next beginning come in one `recv`, as two turns. If envs differ in speed, the fast ones make more of the
    steps.

    Args:
        env: A registered id, ``module:factory`` or ``module:id``, or a function or class that makes an env. The env may
            be a Gymnasium, PettingZoo or `MultiAgentEnv` env.
        workers: Where the copies run; at least one worker.
        drop: See `make_arena`.

    Raises:
        EnvError: an env can't be made, the function can't be sent to a worker, or the envs are not alike.
        SpaceError: Etude can't handle a space.
    """

    def __init__(self, env: EnvLike, workers: Workers, *, drop: Sequence[str] = ()) -> None:
        if not workers.num_workers:
            raise EnvError("a PoolArena needs at least one worker: set num_workers, or use make_arena().")
        make, is_one = env_maker(env, drop)
        if is_one:
            raise single_env_error(env, workers.num_workers * workers.envs_per_worker)
        kind: type[ThreadBackend | ProcessBackend] = ThreadBackend if workers.mode == "thread" else ProcessBackend
        self._backend = kind(make, env_name(env), workers)
        try:
            self._shared = shared = self._backend.open()
        except BaseException:
            self._backend.close()
            raise
        self._close_backend = weakref.finalize(self, self._backend.close)
        super().__init__(shared, self._backend.infos, workers, can_restart=True)
        self._taken = np.zeros(shared.num_envs, np.int64)  # the number of each env's last order whose result was taken
        self._workers = workers
        self._per = workers.envs_per_worker
        self._min_batch = min(workers.min_batch or -(-self.num_envs // 2), workers.max_batch or self.num_envs)
        timeout = workers.seconds_a_step
        self._interval = MAX_SLEEP if timeout is None else min(MAX_SLEEP, timeout / 4)  # between checks of the workers
        self._looked = time.monotonic()
        self._hung: set[int] = set()  # workers that were killed because they hung
        # Each env has at most one order that is not done, or whose result was not taken.
        self._num_taken = self._num_asked = 0
        self._deadline: float | None = None  # until which the envs that are ready wait for others
        self._total = shared.total.data
        self._cross = fence()

    def __repr__(self) -> str:
        return short(self, num_envs=self.num_envs, num_workers=self._workers.num_workers, mode=self._workers.mode)

    # -- orders -------------------------------------------------------------------------------------------------

    def _begin(self, envs: Ints, seeds: Ints) -> None:
        shared = self._shared
        shared.order[envs] = RESET
        shared.order[list(self._broken)] = MAKE
        shared.seed[envs] = seeds
        self._step(envs)

    def _step(self, envs: Ints) -> None:
        """Send the orders of ``envs``: a step, unless another one is set."""
        count_up(self._shared.asked, envs)
        self._num_asked += len(envs)
        self._cross()
        asleep = self._shared.asleep.data
        for worker in set((envs // self._per).tolist()):
            if asleep[worker]:
                self._backend.wake(worker)

    def _is_pending(self) -> bool:
        # Counted again, as Ctrl-C may have interrupted an update of these numbers.
        self._num_asked, self._num_taken = int(self._shared.asked.sum()), int(self._taken.sum())
        return self._num_asked > self._num_taken

    def _take(self, envs: Ints, *, any_reset: bool) -> None:
        count_up(self._taken, envs)
        self._num_taken += len(envs)
        if any_reset:
            self._shared.order[envs] = STEP

    def _give_up(self, env: int) -> tuple[int, bool]:
        """Cancel the order of an env whose worker is dead.

        Returns:
            The env's status bits if it has done the order, or else 0; and whether the order was a step.
        """
        shared = self._shared
        if shared.asked[env] == self._taken[env]:  # it had no order
            return 0, False
        bits, is_step = int(shared.status[env]), bool(shared.order[env] == STEP)
        if shared.done[env] == self._taken[env]:
            bits = 0
            shared.done[env] = shared.asked[env]
            shared.total[env // self._per] += 1
        self._take(self._all[env : env + 1], any_reset=True)
        return bits, is_step

    def _failure(self, env: int) -> EtudeError:
        return self._shared.failure(env)

    # -- waiting ------------------------------------------------------------------------------------------------

    def _ready(self, batch: int | None = None) -> tuple[Ints, Ints, int]:
        batch = self._min_batch if batch is None else batch
        while True:
            if time.monotonic() - self._looked > LOOK:
                self._look_after_workers()
            envs = self._wait(batch)
            if envs is not None:
                status = self._shared.status[envs]
                return envs, status, int(np.bitwise_or.reduce(status))
            self._looked = 0.0

    def _wait(self, batch: int) -> Ints | None:
        """At least ``batch`` ready envs, all pending ones, or those that are ready after `Workers.max_wait`.

        None: it is time to check the workers.
        """
        need = min(batch, self._num_asked - self._num_taken)
        goal = self._num_taken + need
        spin = self._backend.spin
        if spin is not None and sum(self._total) < goal:
            spin.begin()
            while sum(self._total) < goal and spin.yield_core():
                pass
        end = time.monotonic() + self._interval
        while True:
            done, now = self._done(), time.monotonic()
            if len(done) >= need or self._is_overdue(done, now):
                self._deadline = None
                return self._choose(done)
            if now >= end:
                return None
            until = end if self._deadline is None else min(end, self._deadline)
            if self._sleep(need if len(done) or self._workers.max_wait is None else 1, until - now):
                return None

    def _done(self) -> Ints:
        return np.flatnonzero(self._shared.done != self._taken)

    def _is_overdue(self, done: Ints, now: float) -> bool:
        """Whether the ready envs have waited for others long enough."""
        max_wait = self._workers.max_wait
        if max_wait is None or not len(done):
            return False
        if self._deadline is None:
            self._deadline = now + max_wait
        return now >= self._deadline

    def _sleep(self, need: int, seconds: float) -> bool:
        """Sleep until ``need`` envs are ready, for at most ``seconds``; True if a worker has died."""
        words, goal = self._shared.words, self._num_taken + need
        words[GOAL], words[ASLEEP] = goal, 1
        self._cross()
        has_died = sum(self._total) < goal and self._backend.wait(min(seconds, MAX_SLEEP))
        words[ASLEEP] = 0
        return has_died

    def _choose(self, done: Ints) -> Ints:
        """At most `Workers.max_batch` of the ready envs."""
        limit = self._workers.max_batch
        if limit is None or len(done) <= limit:
            return done
        fewest = np.argsort(self._steps[done], kind="stable")[:limit]
        return np.sort(done[fewest])

    # -- workers that die or hang -------------------------------------------------------------------------------

    def _look_after_workers(self) -> None:
        self._looked = time.monotonic()
        self._kill_hung()
        ending: EtudeError | None = None
        for worker, how in self._backend.deaths():
            if ending is None:
                ending = self._note_death(worker, how)
            for env in envs_of(worker, self._per):
                self._break(env, *self._give_up(env))
            self._backend.restart(worker)
        if ending is not None:
            raise ending

    def _note_death(self, worker: int, how: str) -> EtudeError | None:
        """Note a worker's death. None: the worker may restart; otherwise the error that ends the run."""
        env = int(self._shared.current[worker])
        if env < 0:
            error = EnvError(f"worker {worker} {how}, between steps.")
            return self._failures.record(list(envs_of(worker, self._per)), error)
        doing = ("a step", "a reset", "the making")[self._shared.doing[worker]]
        may_hang_always = worker in self._hung and not self._steps.any()
        self._hung.discard(worker)
        error = EnvError(f"worker {worker} {how}, in {doing} of env {env}.")
        return self._failures.record([env], error, most=1 if may_hang_always else ANY)

    def _kill_hung(self) -> None:
        """Kill the workers that have spent too long on one order.

        Raises:
            EnvError: they can't be killed.
        """
        timeout, shared, now = self._workers.seconds_a_step, self._shared, time.monotonic()
        if timeout is None:
            return
        for worker, env in enumerate(shared.current.tolist()):
            doing = shared.doing[worker]
            limit = timeout if doing == STEP else RESET_FACTOR * timeout
            if doing == MAKE:
                limit = max(limit, worker_settings.LEAST_TO_MAKE)
            if env >= 0 and now - shared.began[worker] > limit:
                self._hung.add(worker)
                self._backend.kill(worker, f"hung: it took more than {limit:g} seconds (see Workers.step_timeout)")

    # -- the rest of an arena -----------------------------------------------------------------------------------

    def env_at(self, env: int) -> Any:
        """See `Arena.env_at`."""
        return self._backend.env_at(env)

    def _close(self) -> None:
        self._close_backend()

    def state_dict(self) -> dict[str, Any]:
        """See `Arena.state_dict`: the state of envs in workers is not captured."""
        return {"how": "new episodes", "why": "the envs run in workers, whose state is not kept"}

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """See `Arena.load_state_dict`."""
        why = state["why"] if state["how"] == "new episodes" else "the envs ran without workers, but have workers now"
        return f"new episodes: {why}"
