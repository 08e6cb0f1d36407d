# SPDX-License-Identifier: Apache-2.0
"""Orders: which envs of a pool have something to do, which have done it, and how long to wait for them."""

import time

import numpy as np

from etude.envs.pool_crews import Crew, Here
from etude.envs.pool_memory import ASLEEP, ENDED, GOAL, MAKE, NO_SEED, RESET, STEP
from etude.envs.pool_turns import Ints
from etude.envs.worker_loop import NAP, fence
from etude.envs.workers import Workers


class Orders:
    """Each env has at most one order that is not done, or done and not taken.

    Args:
        crew: Does them.
        workers: How long to wait.
    """

    def __init__(self, crew: Crew, workers: Workers) -> None:
        self._crew, self._memory, self._workers = crew, crew.memory, workers
        self._all = np.arange(crew.memory.num_envs)
        count = len(self._all)
        self._is_here = isinstance(crew, Here)
        self._per = count // len(crew.memory.total)
        self.min_batch = (
            count if self._is_here else min(workers.min_batch or -(-count // 2), workers.max_batch or count)
        )
        """See `Workers.min_batch`."""
        self.taken = np.zeros(count, np.int64)
        """``[num_envs]``: the running number of the last order whose outcome was taken."""
        self._num_taken = 0  # the sum of it
        self._num_asked = 0
        self._not_steps = np.zeros(count, np.int64)  # of what was taken
        self._steps_before = np.zeros(count, np.int64)  # the last reset
        self.lost = 0
        """Steps that were ordered in vain."""
        self._num_no_steps = 0  # the orders, not yet taken, that are no steps
        self._held = self._all[:0]  # envs that may step, but are too far ahead
        self._deadline: float | None = None  # for what is ready now
        self._total = crew.memory.total.data
        self._cross = fence()

    # -- ordering -----------------------------------------------------------------------------------------------

    def reset(self, seeds: Ints | None, broken: list[int]) -> None:
        """Order a reset of all envs, of which ``broken`` are made again; nothing may be pending."""
        memory = self._memory
        memory.order[:] = RESET
        memory.order[broken] = MAKE
        memory.seed[:] = NO_SEED if seeds is None else seeds
        self._steps_before = self.lifetime()
        self._not_steps[:] = self.taken
        self._num_no_steps = len(self._all)
        self._held = self._all[:0]
        self._go(self._all)

    def make(self, env: int, seed: int) -> None:
        """Order that an env is made again."""
        self._memory.order[env], self._memory.seed[env] = MAKE, seed
        self._num_no_steps += 1
        self._go(self._all[env : env + 1])

    def step(self, envs: Ints) -> None:
        """Let ``envs``, and those that were held back, step; but hold back those that are too far ahead."""
        lead = self._workers.max_lead
        if lead is not None and not self._is_here:
            envs = np.concatenate([self._held, envs])
            steps = self.steps()
            is_ahead = steps[envs] - steps.min() >= lead
            self._held, envs = envs[is_ahead], envs[~is_ahead]
        self._go(envs)

    def release(self) -> None:
        """Let those step that were held back, and are no longer too far ahead."""
        if len(self._held):
            self.step(self._all[:0])

    def _go(self, envs: Ints) -> None:
        if len(envs) == len(self._all):
            self._memory.asked += 1
        else:
            self._memory.asked[envs] += 1
        self._num_asked += len(envs)
        self._crew.wake(envs)

    # -- outcomes -----------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """The orders whose outcome was not taken."""
        return self._num_asked - self._num_taken

    def recount(self) -> None:
        """Count anew what is pending: Ctrl-C may have come between two lines."""
        self._num_asked, self._num_taken = int(self._memory.asked.sum()), int(self.taken.sum())

    def take(self, envs: Ints) -> None:
        """Take what ``envs``, which are ready, have done."""
        if len(envs) == len(self._all):
            self.taken += 1
        else:
            self.taken[envs] += 1
        self._num_taken += len(envs)
        if self._num_no_steps:
            is_step = self._memory.order[envs] == STEP
            self._not_steps[envs] += ~is_step
            self._num_no_steps -= len(envs) - int(np.count_nonzero(is_step))
            self._memory.order[envs] = STEP

    def drop(self, env: int, status: int) -> None:
        """Take what an env has done in vain: it is no step, unless some agents ended in it."""
        is_lost = not status & ENDED and self._memory.order[env] == STEP
        self._not_steps[env] += is_lost
        self.lost += int(is_lost)
        self.take(self._all[env : env + 1])

    def give_up(self, env: int) -> int:
        """Let nothing be pending of an env whose worker is dead; gives the status of what it has done nevertheless."""
        memory = self._memory
        self._held = self._held[self._held != env]
        if memory.asked[env] == self.taken[env]:
            return 0
        status = int(memory.status[env])
        if memory.done[env] == self.taken[env]:
            status = 0
            memory.done[env] = memory.asked[env]
            memory.total[env // self._per] += 1
        self.drop(env, status)
        return status

    def steps(self) -> Ints:
        """``[num_envs]``: the steps taken of each env since the reset."""
        return self.taken - self._not_steps

    def lifetime(self) -> Ints:
        """``[num_envs]``: the steps taken of each env since the arena was made."""
        return self._steps_before + self.steps()

    # -- waiting ------------------------------------------------------------------------------------------------

    def ready(self, batch: int, interval: float) -> Ints | None:
        """At least ``batch`` envs that are ready, or all that are pending, or what there is after `Workers.max_wait`.

        None: a worker has something to tell, or ``interval`` seconds are over.
        """
        if self._is_here:
            self._crew.wait(0.0)
            return self._all if self.pending == len(self._all) else self._done()
        need = min(batch, self.pending)
        goal = self._num_taken + need
        spin = self._crew.spin
        if spin is not None and sum(self._total) < goal:
            spin.begin()
            while sum(self._total) < goal and spin.goes_on():
                pass
        end = time.monotonic() + interval
        while True:
            done, now = self._done(), time.monotonic()
            if len(done) >= need or self._is_overdue(done, now):
                self._deadline = None
                return self._choose(done)
            if now >= end:
                return None
            until = end if self._deadline is None else min(end, self._deadline)
            self._sleep(need if len(done) or self._workers.max_wait is None else 1, until - now)
            if self._crew.has_news():
                return None

    def _is_overdue(self, done: Ints, now: float) -> bool:
        """Whether those that are ready have waited for others long enough."""
        max_wait = self._workers.max_wait
        if max_wait is None or not len(done):
            return False
        if self._deadline is None:
            self._deadline = now + max_wait
        return now >= self._deadline

    def _done(self) -> Ints:
        return np.flatnonzero(self._memory.done != self.taken)

    def _sleep(self, need: int, seconds: float) -> None:
        words, goal = self._memory.words, self._num_taken + need
        words[GOAL], words[ASLEEP] = goal, 1
        self._cross()
        if sum(self._total) < goal:
            self._crew.wait(min(seconds, NAP))
        words[ASLEEP] = 0

    def _choose(self, done: Ints) -> Ints:
        """At most `Workers.max_batch` of them."""
        limit = self._workers.max_batch
        if limit is None or len(done) <= limit:
            return done
        fewest = np.argsort(self.steps()[done], kind="stable")[:limit]
        return np.sort(done[fewest])
