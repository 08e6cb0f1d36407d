# SPDX-License-Identifier: Apache-2.0
"""CPU threads of torch and BLAS: how many to use, and restoring the process's own number afterwards. Also the memory
that a process keeps between gradient steps."""

import ctypes
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar

import threadpoolctl
import torch

T = TypeVar("T")

ThreadsLike: TypeAlias = int | Literal["auto"]
"""A number of threads, or ``auto`` for as many as turn out to be fastest."""

SMALL: Final = 2**24
"""Gradient steps with fewer multiplications in the forward pass (parameters times rows) always use one thread."""

_WARM, _TIMED, _ROUNDS = 1, 2, 4  # warm-up and timed steps per number of threads in a round; rounds
_GAIN = 1.1  # more threads are used only if they are faster by this factor
_LATE = 1.5  # if steps are slower than with one thread by this factor, other processes use the cores
_LOOK = 64  # steps between two checks for slow steps
_WINDOW = 0.2  # seconds needed to measure the load of other processes


def for_acting(threads: ThreadsLike) -> int:
    """The number of threads for everything except gradient steps."""
    return 1 if threads == "auto" else threads


# -- setting the number of threads ----------------------------------------------------------------------------------


class _Depth(threading.local):
    now = 0


_lock = threading.Lock()
_depth = _Depth()  # of `held`, in each Python thread: torch keeps a number for each of them
_inside = 0  # Python threads within `held`
_own = _base = 0  # numbers of torch threads: the process's own, and the one that the outermost `held` restores
_limits: Any = None


@functools.lru_cache(maxsize=1)
def _controller(num_modules: int) -> threadpoolctl.ThreadpoolController:
    """The loaded BLAS libraries. Finding them takes 2 ms, so it is done again only after modules were imported."""
    return threadpoolctl.ThreadpoolController()


def _enter() -> int:
    global _inside, _own, _base, _limits
    with _lock:
        if not _inside:
            _own = _base = torch.get_num_threads()
            # BLAS threads together with torch's slow both down; NumPy's matrices here are too small to benefit
            _limits = _controller(len(sys.modules)).limit(limits=1, user_api="blas")
        _inside += 1
        return _base


def _leave() -> None:
    global _inside, _limits
    with _lock:
        _inside -= 1
        if not _inside:
            _limits.restore_original_limits()
            _limits = None


@contextmanager
def held(num: int) -> Iterator[None]:
    """A context in which torch uses ``num`` threads and BLAS one; afterwards the previous numbers are restored.

    Blocks may be nested, and several Python threads may use them at the same time.
    """
    outermost = not _depth.now
    before = _enter() if outermost else torch.get_num_threads()
    _depth.now += 1
    try:
        _set(num)
        yield
    finally:
        _depth.now -= 1
        _set(before)
        if outermost:
            _leave()


def hold(num: int) -> None:
    """Like `held`, until the process ends."""
    global _base
    _enter()
    _base = num
    _set(num)


def own_threads() -> int:
    """The process's own number of torch threads, even within `held`."""
    return _own if _inside else torch.get_num_threads()


def _set(num: int) -> None:
    if torch.get_num_threads() != num:
        torch.set_num_threads(num)


# -- usable cores -----------------------------------------------------------------------------------------------------


def usable_cores() -> int:
    """The number of cores that this process may use, by CPU affinity and control-group quota; at least 1."""
    return max(1, math.floor(min(len(_affinity()), _quota()) + 0.01))


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _quota(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> float:
    """The number of cores that the control groups (version 1 or 2) allow; infinity if there is no limit."""
    least = math.inf
    for line in _lines(groups):
        _, controllers, path = line.split(":", 2)
        of_version_1 = "cpu" in controllers.split(",")
        if controllers and not of_version_1:
            continue
        base = root / controllers if of_version_1 else root
        for folder in [base / path.lstrip("/"), *(base / path.lstrip("/")).parents]:
            if not folder.is_relative_to(root):
                break
            if of_version_1:
                texts = [*_lines(folder / "cpu.cfs_quota_us"), *_lines(folder / "cpu.cfs_period_us")]
            else:
                texts = " ".join(_lines(folder / "cpu.max")).split()
            if len(texts) == 2 and texts[0].isdigit() and int(texts[1]) > 0:
                least = min(least, int(texts[0]) / int(texts[1]))
    return least


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


class Load:
    """Measures how many of the usable cores other processes keep busy, since the object was created."""

    def __init__(self) -> None:
        self._begin = _busy()

    @property
    def is_known(self) -> bool:
        """Whether enough time has passed for a measurement."""
        return self._begin is None or time.perf_counter() - self._begin[0] >= _WINDOW

    def free_cores(self) -> int:
        """The cores that other processes left free in that time, at least 1; all cores if that is unknown."""
        others, now = 0.0, _busy()
        if self._begin is not None and now is not None and self.is_known:
            seconds, busy, own = (b - a for a, b in zip(self._begin, now, strict=True))
            others = (busy - own) / seconds
        return max(1, min(usable_cores(), math.floor(len(_affinity()) - max(0.0, others) + 0.3)))


def _busy() -> tuple[float, float, float] | None:
    """The time, the busy seconds of the usable cores, and those of this process; None if unknown."""
    cores = {f"cpu{number}" for number in _affinity()}
    try:
        ticks = os.sysconf("SC_CLK_TCK")
        counts = [line.split() for line in _lines(Path("/proc/stat"))]
        # user, nice, system, idle, waiting for disks, interrupts (2), time taken by other virtual machines
        busy = [sum(map(int, (*f[1:4], *f[6:9]))) for f in counts if f and f[0] in cores]
    except (ValueError, OSError, AttributeError):
        return None
    own = os.times()
    return (time.perf_counter(), sum(busy) / ticks, own.user + own.system) if busy else None


# -- choosing the number of threads -------------------------------------------------------------------------------


class StepThreads:
    """The threads of a learner's gradient steps.

    With ``auto``, small steps use one thread (see `SMALL`). For larger ones, the first steps are timed with 1, 2, 4 and
    more threads, up to the number of free cores and torch's own setting; the smallest number that is about as fast as
    the best is used. If steps later become slower than with one thread, because other processes need the cores, the
    timing is repeated.

    Args:
        threads: A number, or ``auto``.
    """

    def __init__(self, threads: ThreadsLike) -> None:
        self.num = for_acting(threads)
        """The current number of threads of a gradient step."""
        self.is_settled = threads != "auto"
        """Whether the number is decided, so that the next step need not be timed."""
        self._is_auto = not self.is_settled
        self._load = Load()
        self._candidates: list[int] = []  # the numbers of threads that are tried
        self._times: dict[int, list[float]] = {}  # seconds a row
        self._alone = math.inf  # seconds a row of one thread; infinite if unknown
        self._seconds = 0.0  # total of the steps since the last check for slow steps
        self._rows = self._steps = 0

    def state_dict(self) -> dict[str, Any]:
        """The measured ``num`` and ``alone``, the seconds per row with one thread; {} if not measured yet."""
        if not (self._is_auto and self.is_settled):
            return {}
        return {"num": self.num, "alone": None if math.isinf(self._alone) else self._alone}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the measured number of threads, if there are that many free cores."""
        if self._is_auto and state and state["num"] <= self._most():
            self._take(int(state["num"]))
            self._alone = math.inf if state["alone"] is None else float(state["alone"])

    def _most(self) -> int:
        return min(self._load.free_cores(), own_threads())

    @property
    def is_one(self) -> bool:
        """Whether it is one thread and will not change."""
        return self.is_settled and self.num == 1

    def step(self, make: Callable[..., T], batch: Any, work: int, *, again: bool = True) -> T:
        """Make a gradient step, timing it if needed. Must be called within ``held(self.num)``.

        Args:
            make: The function that makes the step.
            batch: The argument of ``make``, with ``batch.size`` rows.
            work: The approximate number of multiplications in its forward pass.
            again: Whether steps may be timed again later.
        """
        if not self.is_settled and not self._candidates:
            if work < SMALL or self._most() == 1:
                self._take(1)
            elif self._load.is_known:
                self._begin()
        if self._candidates:
            return self._tried(make, batch)
        if self.num == 1:
            return make(batch)
        begin = time.perf_counter()
        made = make(batch)
        if again and not math.isinf(self._alone):
            self._note(time.perf_counter() - begin, batch.size)
        return made

    def _begin(self) -> None:
        most = self._most()
        self._candidates = [num for num in (2**k for k in range(most.bit_length())) if num < most] + [most]
        self._times, self._steps = {num: [] for num in self._candidates}, 0

    def _tried(self, make: Callable[..., T], batch: Any) -> T:
        turn, nth = divmod(self._steps, _WARM + _TIMED)
        self.num = self._candidates[turn % len(self._candidates)]
        _set(self.num)
        begin = time.perf_counter()
        made = make(batch)
        if nth >= _WARM and batch.size:
            self._times[self.num].append((time.perf_counter() - begin) / batch.size)
        self._steps += 1
        if self._steps == (_WARM + _TIMED) * len(self._candidates) * _ROUNDS:
            times = {num: min(found, default=math.inf) for num, found in self._times.items()}
            self._take(next(num for num, seconds in times.items() if seconds <= _GAIN * min(times.values())))
            self._alone = times[1]
        return made

    def _take(self, num: int) -> None:
        self.num, self.is_settled, self._candidates, self._alone = num, True, [], math.inf
        self._seconds, self._rows, self._steps = 0.0, 0, 0
        if _depth.now:
            _set(num)

    def _note(self, seconds: float, rows: int) -> None:
        self._seconds, self._rows, self._steps = self._seconds + seconds, self._rows + rows, self._steps + 1
        if self._steps < _LOOK:
            return
        if self._seconds > _LATE * self._alone * self._rows:
            self._take(1)
            self._load, self.is_settled = Load(), False
        self._seconds, self._rows, self._steps = 0.0, 0, 0


# -- the memory of the process --------------------------------------------------------------------------------------

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


@functools.cache
def keep_freed_memory() -> None:
    """Let this process keep up to 64 MiB of freed memory for its next gradient step.

    By default, Linux's C library (glibc) returns free memory at the end of its heap to the system; a step on the CPU
    that needs it again spends up to a tenth of its time on that. The limits set here are the highest that glibc itself
    adapts to. On other systems, or if ``MALLOC_TRIM_THRESHOLD_`` is set in the environment, this does nothing.
    """
    if sys.platform != "linux" or "MALLOC_TRIM_THRESHOLD_" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 2**26)
        mallopt(_MMAP_THRESHOLD, 2**25)
