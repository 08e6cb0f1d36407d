# SPDX-License-Identifier: Apache-2.0
"""What becomes of envs that fail and workers that die or hang: how often they may, and what is said of it."""

import logging
import time
from collections import deque
from typing import Final

import numpy as np

from etude.envs import workers as worker_settings
from etude.envs.pool_crews import Crew
from etude.envs.pool_memory import MAKE, STEP
from etude.envs.pool_orders import Orders
from etude.envs.worker_loop import NAP
from etude.envs.workers import RESET_FACTOR, Workers
from etude.errors import EnvError, EtudeError, SpaceError

LOOK: Final = 0.02
"""Seconds after which an arena that is busy looks after its workers."""

WINDOW: Final = 1000
"""The steps over which `Workers.max_failure_rate` is taken."""

_ANY: Final = 1 << 62

_KINDS: Final = 10
"""So many kinds of failures are shown in full."""

_log = logging.getLogger("etude.envs")


class Care:
    """Counts failures, says when it is enough, and warns of them."""

    def __init__(self, crew: Crew, workers: Workers, orders: Orders) -> None:
        self._crew, self._workers, self._orders, self._memory = crew, workers, orders, crew.memory
        self._per = crew.memory.num_envs // len(crew.memory.total)
        self._in_a_row = np.zeros(crew.memory.num_envs, np.int64)  # failures of an env, without a step of it between
        self._steps_then = np.full(crew.memory.num_envs, -1)  # the steps of an env at its last failure
        self._furthest = 0  # the most steps that an env has made between two failures
        self._wrong_at = np.full(crew.memory.num_envs, -1)  # the steps before an env broke its contract
        self._wrong: dict[int, EtudeError] = {}  # how it did
        self._recent: deque[int] = deque()  # of the failures in the last steps: the steps and failures before
        self._failures = 0
        self._warned = 0  # how many there were at the last warning
        self._hung: set[int] = set()  # workers that were killed for it
        self._told: set[str] = set()  # kinds of failures that were shown in full
        self.restarts = 0
        """Envs or workers that were to begin again, since this was last set to 0."""
        timeout = workers.seconds_a_step
        self.interval = NAP if timeout is None else min(NAP, timeout / 4)
        """Seconds after which an arena that sleeps looks after its workers, though nobody called."""

    def envs_of(self, worker: int) -> range:
        """Those that it steps."""
        return range(worker * self._per, (worker + 1) * self._per)

    def forget(self) -> None:
        """Count failures anew."""
        self._in_a_row[:] = 0
        self._wrong_at[:] = -1
        self._recent.clear()

    # -- failures -----------------------------------------------------------------------------------------------

    def env_failed(self, env: int, *, is_wrong: bool) -> EtudeError | None:
        """Note that ``env`` failed: None, and it may begin again; else the error that ends the run.

        Args:
            env: Which.
            is_wrong: It broke its contract.
        """
        class_name, text = self._crew.failure(env)
        error = SpaceError(text) if class_name == "SpaceError" else EnvError(text)
        if is_wrong:
            return self.gave_wrong(env, error, is_value=isinstance(error, SpaceError))
        return self._note(
            [env], error, quiet=not self._orders.lifetime().any()
        )  # it may never begin: then that is said

    def gave_wrong(self, env: int, error: EtudeError, *, is_value: bool) -> EtudeError | None:
        """Note that ``env`` broke its contract, see `env_failed`.

        The run ends if that is the rule: no env has got further before it failed, and all have failed in the same step,
        or this one twice. Once is enough if it is not only a value that is wrong (``is_value``).
        """
        lifetime = self._orders.lifetime()
        steps = lifetime - self._steps_then.clip(0)  # of each env, since its last failure
        k = int(steps[env])
        if not self._may_restart or int(steps.max()) > k or self._furthest > k:
            return self._note([env], error)
        is_rule = not is_value or self._wrong_at[env] == k or self._workers.max_restarts == 0
        self._wrong_at[env], self._wrong[env] = k, error
        self._count([env])
        if len(steps) > 1 and (self._wrong_at == k).all():
            return self._wrong[0]
        return error if is_rule else None

    def worker_died(self, worker: int, how: str) -> EtudeError | None:
        """Note that a worker died: None, and it may begin again; else the error that ends the run."""
        env = int(self._memory.current[worker])
        if env < 0:
            return self._note(list(self.envs_of(worker)), EnvError(f"worker {worker} {how}, between steps."))
        doing = ("a step", "a reset", "the making")[self._memory.doing[worker]]
        may_hang_always = worker in self._hung and not self._orders.lifetime().any()
        self._hung.discard(worker)
        most = 1 if may_hang_always else _ANY
        return self._note([env], EnvError(f"worker {worker} {how}, in {doing} of env {env}."), most=most)

    @property
    def _may_restart(self) -> bool:
        return self._workers.restart_failed and self._crew.can_restart

    def _note(self, envs: list[int], error: EtudeError, *, most: int = _ANY, quiet: bool = False) -> EtudeError | None:
        """Count a failure of ``envs``, which is the last if there were ``most`` in a row before; warn, if not quiet."""
        if not self._may_restart:
            return error
        self._count(envs)
        times, own = int(self._in_a_row[envs].max()), self._workers
        why = ""
        if times > min(own.max_restarts, most):
            why = f"{times} failures without a step between (see Workers.max_restarts)"
        elif len(self._recent) > own.max_failure_rate * WINDOW:
            within = self._attempts() - self._recent[0]
            why = f"{len(self._recent)} of the last {within:,} steps failed (see Workers.max_failure_rate)"
        if why:
            return type(error)(f"{why}: {error}")
        if not quiet:
            self._warn(str(error).strip())
        return None

    def _count(self, envs: list[int]) -> None:
        steps = self._orders.lifetime()[envs]
        self._furthest = max(self._furthest, int((steps - self._steps_then[envs].clip(0)).max()))
        self._in_a_row[envs] = np.where(steps == self._steps_then[envs], self._in_a_row[envs] + 1, 1)
        self._steps_then[envs] = steps
        self._recent.append(self._attempts())
        self._failures += 1
        self.restarts += 1
        while self._attempts() - self._recent[0] > WINDOW:
            self._recent.popleft()

    def _attempts(self) -> int:
        """The steps that were made, and the failures."""
        return int(self._orders.lifetime().sum()) + self._failures

    def look_for_hung(self) -> None:
        """Kill the workers that have been about one order for too long.

        Raises:
            EnvError: they can't be killed.
        """
        timeout, memory, now = self._workers.seconds_a_step, self._memory, time.monotonic()
        if timeout is None:
            return
        for worker, env in enumerate(memory.current.tolist()):
            doing = memory.doing[worker]
            limit = timeout if doing == STEP else RESET_FACTOR * timeout
            if doing == MAKE:
                limit = max(limit, worker_settings.LEAST_TO_MAKE)
            if env >= 0 and now - memory.began[worker] > limit:
                what = ("made no step", "was not reset", "made no env")[doing]
                of = "step_timeout" if doing == STEP else f"{RESET_FACTOR} times step_timeout"
                of += f", or {limit:g}" if limit > RESET_FACTOR * timeout else ""
                self._hung.add(worker)
                self._crew.kill(worker, f"hung: it {what} in {limit:g} seconds ({of})")

    # -- warnings -----------------------------------------------------------------------------------------------

    def _warn(self, text: str) -> None:
        """Tell of the first failure of each kind in full; of the others, each time that there are ten times as many."""
        first, _, rest = text.partition("\n")
        kind = "".join(c for c in first + rest.rpartition("\n")[2].partition(":")[0] if not c.isdigit())
        if kind not in self._told and len(self._told) < _KINDS:
            self._told.add(kind)
            _log.warning("%s%sIt begins again.", text, "\n" if rest else " ")
            self._warned = max(self._warned, 1)
        elif self._failures >= 10 * self._warned:
            self.sum_up()

    def sum_up(self) -> None:
        """Warn of how much was lost until now, unless that was said after the last failure."""
        if self._failures > max(1, self._warned):
            self._warned = self._failures
            steps, lost = int(self._orders.lifetime().sum()), self._orders.lost
            _log.warning(
                "the envs have failed %s times in %s steps, and were made again: %s steps were lost.",
                f"{self._failures:,}",
                f"{steps:,}",
                f"{lost:,}",
            )
