# SPDX-License-Identifier: Apache-2.0
"""Workers: how many processes or threads run the envs, and what happens when one of them is slow or fails."""

import os
from typing import ClassVar, Literal

from etude.errors import SettingsError
from etude.settings import check_range, settings


@settings
class Workers:
    """Where the copies of an env run, and how long to wait for which of them.

    Workers pay where a step of the env costs about 20 microseconds or more; below that the envs are quicker in this
    process. Processes, about as many as there are cores, are for envs that compute; threads, or more processes, for
    envs that wait (for a simulator, a network) and let go of Python's global lock meanwhile.

    Whoever is ready acts, so that envs which are quick are sampled more often than slow ones: `max_lead` limits this,
    and ``stats()`` of the arena says how far it goes. Which envs act together then depends on the clock, and so does
    the order of steps; a run is repeatable bit for bit without workers, or where `min_batch` is the number of envs.
    """

    main_setting: ClassVar[str] = "num_workers"

    num_workers: int = 0
    """Processes or threads that step envs, at least 0. 0: the envs step in this process, in lock-step."""

    envs_per_worker: int = 1
    """Copies of the env in each worker, at least 1: it steps those that were acted for one after the other."""

    mode: Literal["process", "thread", "sync"] = "process"
    """What a worker is. Threads share one Python: only envs that let go of its lock gain, and one that hangs can't be
    killed. With 0 workers it is ``sync`` whatever is said here, and ``sync`` is nothing else."""

    min_batch: int | None = None
    """How many envs must be ready before their agents act, 1 to the number of envs. None: half of them, so that one
    half steps while the other is acted for. All of them: lock-step."""

    max_batch: int | None = None
    """How many envs' agents act together at most, at least `min_batch`; those that made the fewest steps come first.
    None: all that are ready."""

    max_wait: float | None = None
    """Seconds after which fewer than `min_batch` envs must do, counted from the first that is ready; at least 0. None:
    however long it takes."""

    max_lead: int | None = None
    """How many steps an env may be ahead of the slowest one, at least 1; one that is stays ready until the others have
    caught up. None: any number."""

    max_steps: int | None = None
    """Steps after which an episode is truncated, at least 1. None: only the env itself ends it."""

    step_timeout: float | None = None
    """Seconds that a step may take, with the reset that follows an episode's last one; above 0. A worker that takes
    longer is killed and started again. None: any time. How long it takes to make an env is not limited."""

    restart_failed: bool = True
    """Make an env again that raised an error, and start a worker again that died or hung: what they lived through since
    their last episode's end is lost, and counted. Else the first failure ends the run."""

    max_restarts: int = 5
    """How often in a row, without an episode finished between, an env may fail and be made again; at least 0. Once
    more, and its error ends the run."""

    cleanup_time: float = 5.0
    """Seconds that workers have to close their envs before they are killed, at least 0."""

    check: int | Literal["always"] = 10
    """The first steps of each env whose observations, rewards and flags are checked against its spaces, at least 0:
    shape, type, bounds, NaN. Each costs some 10 microseconds a part of the observation."""

    def __post_init__(self) -> None:
        check_range(
            "Workers",
            num_workers=(self.num_workers >= 0, "at least 0"),
            envs_per_worker=(self.envs_per_worker >= 1, "at least 1"),
            min_batch=(self.min_batch is None or self.min_batch >= 1, "at least 1, or none"),
            max_batch=(
                self.max_batch is None or self.max_batch >= (self.min_batch or 1),
                "at least min_batch, or none",
            ),
            max_wait=(self.max_wait is None or self.max_wait >= 0, "at least 0, or none"),
            max_lead=(self.max_lead is None or self.max_lead >= 1, "at least 1, or none"),
            max_steps=(self.max_steps is None or self.max_steps >= 1, "at least 1, or none"),
            step_timeout=(self.step_timeout is None or self.step_timeout > 0, "above 0, or none"),
            max_restarts=(self.max_restarts >= 0, "at least 0"),
            cleanup_time=(self.cleanup_time >= 0, "at least 0"),
            check=(self.check == "always" or self.check >= 0, "at least 0, or 'always'"),
        )
        self._check_together()

    def _check_together(self) -> None:
        if self.num_workers:
            if self.mode == "sync":
                raise SettingsError(
                    f"Workers.mode is 'sync', but num_workers is {self.num_workers}: choose 'process' or 'thread', or "
                    "0 workers."
                )
            if self.mode == "process" and not hasattr(os, "fork"):
                raise SettingsError("Workers.mode 'process' needs a system that can fork: use mode='thread'.")
            num_envs = self.num_workers * self.envs_per_worker
            check_range(
                "Workers", min_batch=((self.min_batch or 1) <= num_envs, f"at most the {num_envs} envs there are")
            )
            return
        for name in ("step_timeout", "max_batch"):
            if getattr(self, name) is not None:
                why = "be interrupted" if name == "step_timeout" else "act a few at a time"
                raise SettingsError(
                    f"Workers.{name} needs workers: with num_workers=0 the envs step in this process, where they can't "
                    f"{why}. Set num_workers to 1 or more, or {name} to none."
                )
