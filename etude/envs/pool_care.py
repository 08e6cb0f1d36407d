# SPDX-License-Identifier: Apache-2.0
"""What becomes of envs that fail and workers that die or hang: how often they may, and what is counted."""

import logging
import time
from typing import Final

import numpy as np

from etude.envs.pool_crews import Crew
from etude.envs.pool_memory import MAKE, OVER
from etude.envs.pool_turns import Ints
from etude.envs.worker_loop import NAP
from etude.envs.workers import Workers
from etude.errors import EnvError, EtudeError, SpaceError

LOOK: Final = 0.02
"""Seconds after which an arena that is busy looks after its workers."""

_log = logging.getLogger("etude.envs")


class Care:
    """Counts failures, and says when it is enough."""

    def __init__(self, crew: Crew, workers: Workers) -> None:
        self._crew, self._workers, self._memory = crew, workers, crew.memory
        self._per = crew.memory.num_envs // len(crew.memory.total)
        self._in_a_row = np.zeros(crew.memory.num_envs, np.int64)  # failures since an episode was finished
        self._is_clear = True  # there are none
        self._told: set[str] = set()  # errors that were shown in full
        self.restarts = 0
        """Envs or workers that were to begin again, since this was last set to 0."""
        timeout = workers.step_timeout
        self.interval = NAP if timeout is None else min(NAP, timeout / 4)
        """Seconds after which an arena that sleeps looks after its workers, though nobody called."""

    def envs_of(self, worker: int) -> range:
        """Those that it steps."""
        return range(worker * self._per, (worker + 1) * self._per)

    def finished(self, envs: Ints, status: Ints) -> None:
        """Note which of ``envs`` have finished an episode."""
        if not self._is_clear:
            self._in_a_row[envs[(status & OVER) != 0]] = 0
            self._is_clear = not self._in_a_row.any()

    def forget(self) -> None:
        """Count failures in a row anew."""
        self._in_a_row[:] = 0
        self._is_clear = True

    def env_failed(self, env: int, *, is_wrong: bool) -> EtudeError | None:
        """Note that ``env`` failed: None, and it may begin again; else the error that ends the run."""
        class_name, text = self._crew.failure(env)
        if is_wrong:
            return SpaceError(text) if class_name == "SpaceError" else EnvError(text)
        return self._note([env], text)

    def worker_died(self, worker: int, how: str) -> EtudeError | None:
        """Note that a worker died: None, and it may begin again; else the error that ends the run."""
        env = int(self._memory.current[worker])
        if env < 0:
            return self._note(list(self.envs_of(worker)), f"worker {worker} {how}, between steps.")
        doing = ("a step", "a reset", "the making")[self._memory.order[env]]
        return self._note([env], f"worker {worker} {how}, in {doing} of env {env}.")

    def _note(self, envs: list[int], text: str) -> EtudeError | None:
        self._is_clear = False
        self._in_a_row[envs] += 1
        times = int(self._in_a_row[envs].max())
        if not (self._workers.restart_failed and self._crew.can_restart):
            return EnvError(text)
        if times > self._workers.max_restarts:
            return EnvError(f"{times} failures without a finished episode between (see Workers.max_restarts): {text}")
        self.restarts += 1
        first, _, rest = text.strip().partition("\n")
        last = rest.rpartition("\n")[2]
        if rest and last in self._told:  # its traceback was shown
            text = f"{first} {last}"
        self._told.add(last)
        _log.warning("%s%sIt begins again.", text.strip(), "\n" if "\n" in text.strip() else " ")
        return None

    def look_for_hung(self) -> None:
        """Kill the workers that have been about one step for too long.

        Raises:
            EnvError: they can't be killed.
        """
        timeout, memory, now = self._workers.step_timeout, self._memory, time.monotonic()
        if timeout is None:
            return
        for worker, env in enumerate(memory.current.tolist()):
            if env >= 0 and memory.order[env] != MAKE and now - memory.began[worker] > timeout:
                self._crew.kill(worker, f"hung: it made no step in {timeout:g} seconds (step_timeout)")
