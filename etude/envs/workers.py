# SPDX-License-Identifier: Apache-2.0
"""Workers: how many processes or threads run the envs, and what happens when one of them is slow or fails."""

import os
from typing import ClassVar, Final, Literal

from etude.settings import FloatAbove0, FloatFrom0, IntFrom0, IntFrom1, UnitInterval, check_range, settings

DEFAULT_TIMEOUT: Final = 60.0
"""The default limit in seconds for a step in a worker process."""

RESET_FACTOR: Final = 10
"""How many times longer than a step a reset or making an env may take."""

LEAST_TO_MAKE: Final = 30.0
"""The minimum of the limit in seconds for making an env, because its process must start and import packages."""


@settings
class Workers:
    """Where the copies of an env run, how many act together, and what happens when one fails.

    Workers pay off if a step of the env takes about 100 microseconds or more; faster envs are better stepped in this
    process. Use processes, about as many as there are cores, for envs that compute. Use threads, or more processes than
    cores, for envs that wait (for a simulator or a network) and release Python's global lock meanwhile.

    Envs act as soon as they are ready, so fast envs are sampled more often than slow ones; the arena's ``stats()`` say
    how much more often. Which envs act together, and so the order of steps, then depends on timing. A run is
    repeatable bit for bit without workers, or if `min_batch` is the number of envs.
    """

    main_setting: ClassVar[str] = "num_workers"
    everyday: ClassVar[tuple[str, ...]] = ("num_workers",)

    max_steps: IntFrom1 | None = None
    """Steps after which an episode is truncated, at least 1. None: only the env itself ends an episode."""

    check: IntFrom0 | Literal["always"] = 10
    """Number of first steps that are checked more closely, at least 0. In the first steps of an env, a number outside
    the bounds of its Box logs a warning; in those of an episode, a flag that is a number is an error. Each check costs
    about 10 microseconds for each part of the observation. Shapes, dtypes, NaN, infinity, discrete values and other
    flags are checked at every step."""

    num_workers: IntFrom0 = 0
    """Processes or threads that step envs, at least 0. 0: the envs step in this process, all together."""

    envs_per_worker: IntFrom1 = 1
    """Copies of the env in each worker, at least 1: it steps them one after the other."""

    mode: Literal["process", "thread"] = "process"
    """What a worker is. Threads share one Python process: only envs that release its global lock run faster, and a
    thread that hangs can't be killed."""

    min_batch: IntFrom1 | None = None
    """How many envs must be ready before their agents act, from 1 to the number of envs. None: half of them, so that
    one half steps while the other half acts. The number of envs: all step together."""

    max_batch: int | None = None
    """Maximum number of envs whose agents act together, at least `min_batch`. If more are ready, those that made the
    fewest steps come first. None: no limit."""

    max_wait: FloatFrom0 | None = None
    """Seconds to wait for `min_batch` envs, at least 0. They count from when the first env is ready; after that, the
    envs that are ready act. None: no limit."""

    step_timeout: FloatAbove0 | Literal["auto"] | None = "auto"
    """Maximum duration of a step in seconds, above 0. A reset may take ten times as long, and so may making an
    env, which has at least 30 seconds. A worker process that takes longer is killed and restarted. A thread can't be
    killed, so the run ends. `auto`: 60 for processes, no limit for threads. None: no limit."""

    restart_failed: bool = True
    """Make an env again after it fails, and restart a worker that dies or hangs. The env's episode is truncated there;
    the step that failed is lost and counted. If False, the first failure ends the run."""

    max_restarts: IntFrom0 = 5
    """Number of times in a row that an env may fail without completing a step, at least 0. One more ends the run."""

    max_failure_rate: UnitInterval = 0.1
    """Maximum fraction of the last 1,000 steps, of all envs together, that may fail, 0 to 1. If more fail, the run
    ends."""

    cleanup_time: FloatFrom0 = 5.0
    """Seconds that workers have to close their envs before they are killed, at least 0."""

    def __post_init__(self) -> None:
        envs = self.num_workers * self.envs_per_worker
        alone = not self.num_workers  # the envs step in this process, all together
        check_range(
            "Workers",
            mode=(
                alone or self.mode == "thread" or hasattr(os, "fork"),
                "thread: processes need a system that can fork",
            ),
            min_batch=(
                alone or self.min_batch is None or self.min_batch <= envs,
                f"at most the {envs} envs there are",
            ),
            max_batch=(
                self.max_batch is None or (not alone and self.max_batch >= (self.min_batch or 1)),
                "none without workers: all envs step together" if alone else "at least min_batch, or none",
            ),
            step_timeout=(
                not alone or self.step_timeout is None or self.step_timeout == "auto",
                "auto or none without workers: steps in this process can't be stopped. Set num_workers to 1 or more",
            ),
        )

    @property
    def seconds_a_step(self) -> float | None:
        """`step_timeout` as a number; None is no limit."""
        if self.step_timeout != "auto":
            return self.step_timeout
        return DEFAULT_TIMEOUT if self.num_workers and self.mode == "process" else None
