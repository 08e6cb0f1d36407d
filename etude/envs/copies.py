# SPDX-License-Identifier: Apache-2.0
"""CopiesArena, the base class of arenas with copies of one env; and FailurePolicy, for envs that fail."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.envs.adapters import EnvValueError
from etude.envs.arena import BoundsCheck, Ints, Turn, closed
from etude.envs.buffers import (
    BEGUN,
    BLIND,
    ENDED,
    FAILED,
    NO_SEED,
    OVER,
    SHOWN,
    WRONG,
    AgentRows,
    Infos,
    StepBuffers,
    TurnBuilder,
)
from etude.envs.workers import Workers
from etude.errors import EnvError, EtudeError, SpaceError
from etude.spaces import Space, check_choice, check_finite_value, choices_of, leaves
from etude.stateful import Stateful

if TYPE_CHECKING:
    import torch

WINDOW: Final = 1000
"""The number of latest steps that `Workers.max_failure_rate` refers to."""

ANY: Final = 1 << 62

_KINDS: Final = 10
"""The largest number of kinds of failures that are logged in full."""

_log = logging.getLogger("etude.envs")


class EnvFault(NamedTuple):
    """An env that failed, or returned an invalid value."""

    env: int
    status: int
    """The env's status bits, without those of its bad rows."""
    error: EtudeError


class ValueCheck:
    """Checks the step buffers for NaN, infinity and discrete values outside their space."""

    def __init__(self, buffers: StepBuffers) -> None:
        self._buffers = buffers
        self._is_single = buffers.layout.agents == (None,)
        self._leaves = [leaves(group.obs_space, col.OBS) for group in buffers.layout.groups]
        self._shown = _checks(buffers.shown, self._leaves)
        self._with_ended = [*self._shown, *_checks(buffers.ended, self._leaves)]

    def all(self, bits: int) -> bool:
        """Whether all values are valid. It takes a few microseconds.

        It may return False because of an env that is not ready; `faults` finds out.

        Args:
            bits: The status bits of all ready envs together. Final observations are checked only if an episode ended.
        """
        return all(is_valid() for is_valid in (self._with_ended if bits & ENDED else self._shown))

    def faults(self, envs: Ints, status: Ints) -> list[EnvFault]:
        """Find the envs that returned invalid values, and replace these values.

        Args:
            envs: The envs to check, ``[n]``.
            status: Their status bits, ``[n]``.
        """
        found = []
        for env, bits in zip(envs.tolist(), status.tolist(), strict=True):
            if bits & ENDED and (error := self.fault_of(env, is_end=True)):
                found.append(EnvFault(env, WRONG, error))
            elif bits & SHOWN and (error := self.fault_of(env, is_end=False)):
                found.append(EnvFault(env, bits | WRONG, error))
        return found

    def fault_of(self, env: int, *, is_end: bool) -> EtudeError | None:
        """What is wrong with the rows of an env that wait, or that end; the invalid value is replaced."""
        buffers, rows = self._buffers, self._buffers.rows[is_end]
        for seat, agent in enumerate(buffers.layout.seated):
            if not self._is_single and not rows.flags[env, seat]:  # a single agent has its flags in the status
                continue
            name = buffers.layout.agents[agent]
            whose = f"env {env}: " if name is None else f"env {env}, agent {name!r}: "
            reward = rows.reward[env, seat]
            if not np.isfinite(reward):
                rows.reward[env, seat] = 0.0
                return EnvError(f"{whose}`reward` is {reward}, not a finite number.")
            if rows.flags[env, seat] & BLIND:
                continue
            kind, row = buffers.layout.place(env, seat)
            for part, column in rows.obs[kind].items():
                leaf = self._leaves[kind][part]
                try:
                    check_finite_value(part, column[row])
                    check_choice(part, leaf, column[row])
                except SpaceError as error:
                    column[row] = getattr(leaf, "start", 0)
                    return SpaceError(f"{whose}{error}")
        return None


Check: TypeAlias = Callable[[], bool]
"""Whether all numbers of a column are valid. It writes its results into an array that it keeps, and looks for False in
the array's bytes, which is three times as fast as `all` for small arrays."""


def _checks(rows: AgentRows, leaves_of: Iterable[Mapping[str, Space]]) -> list[Check]:
    """The checks of all columns that may hold invalid numbers."""
    checks = [_check_of_floats(rows.reward)]
    for columns, own_leaves in zip(rows.obs, leaves_of, strict=True):
        for name, leaf in own_leaves.items():
            if columns[name].dtype.kind == "f":
                checks.append(_check_of_floats(columns[name]))
            elif (choices := choices_of(leaf)) is not None and columns[name].size:
                checks.append(_check_of_choices(columns[name], *choices))
    return checks


def _check_of_floats(column: NDArray[Any]) -> Check:
    flat, finite = column.reshape(-1), np.ones(column.size, bool)

    def are_finite() -> bool:
        np.isfinite(flat, finite)
        return b"\0" not in finite.tobytes()

    return are_finite


def _check_of_choices(column: NDArray[Any], start: NDArray[Any], count: NDArray[Any]) -> Check:
    unsigned = np.dtype(f"u{column.dtype.itemsize}")
    start, top, inside = start.astype(column.dtype), (count - 1).astype(unsigned), np.ones(column.shape, bool)

    def are_choices() -> bool:
        np.less_equal((column - start).view(unsigned), top, inside)  # unsigned, numbers below ``start`` are too large
        return b"\0" not in inside.tobytes()

    return are_choices


class CopiesArena:
    """Copies of an env, each running its own episodes. See `Arena` for the methods.

    Env ``i`` is first seeded with 31 bits of ``SeedSequence(seed).spawn(num_envs)[i]``. When it is made again for the
    n-th time, the seed comes from ``SeedSequence(seed, spawn_key=(i, n))``, so that the failure is not repeated. An
    env's seeds do not depend on the number of workers.

    ``stats()`` always has ``faulty_episodes``, the number cut because an env failed; ``restarts`` of envs and workers;
    and ``lost_steps``, the env steps whose results were lost. If some envs make more steps than others, it also has
    the steps of each: ``steps/env_3`` and so on.

    A turn's ``infos`` are by env, from its last step or reset; infos in worker processes are not available.
    """

    device: "torch.device | None" = None

    def __init__(self, buffers: StepBuffers, infos: Infos | None, workers: Workers, *, can_restart: bool) -> None:
        self._buffers = buffers
        self.num_envs = count = buffers.num_envs
        self.kinds = buffers.layout.kinds(count)
        self._turn_builder = TurnBuilder(buffers, infos)
        slots = self._turn_builder.slots
        self.num_slots = slots.size
        self.env_of: NDArray[np.int64] = np.zeros(slots.size, np.int64)
        self.env_of[slots] = np.arange(count)[:, None]
        names = np.empty(slots.size, object)
        names[slots] = [buffers.layout.agents[agent] for agent in buffers.layout.seated]
        self.agents: list[str | None] = names.tolist()
        self._values = ValueCheck(buffers)
        self._bounds = BoundsCheck(self.kinds, self.env_of, self.agents, workers.check)
        self._steps = np.zeros(count, np.int64)  # by env, since the arena was made
        self._failures = FailurePolicy(workers, self._steps, can_restart=can_restart)
        self._seeds = EnvSeeds(count)
        self._all = self.env_of if slots.size == count else np.arange(count)
        self._counted = np.zeros(count, np.int64)  # the steps at the last `stats`
        self._broken: set[int] = set()  # envs that must be made again before their next episode
        self._turns: list[Turn] = []  # returned by the last recv
        self._open: list[Turn] = []  # those of them that wait for actions
        self._shown = self._all[:0]  # the envs in them
        self._early_turns: list[Turn] = []  # ends in envs that failed afterwards, for the next recv
        self._cut: list[Ints] = []  # slots whose episodes were cut, for the next recv
        self._faulty = self._lost_reported = 0
        self._error: EtudeError | None = _not_reset()
        self._is_closed = False

    # -- methods of the subclasses, which run the envs ----------------------------------------------------------

    def _is_pending(self) -> bool:
        """Whether any env has an order that it has not done, or whose result was not taken."""
        raise NotImplementedError

    def _begin(self, envs: Ints, seeds: Ints) -> None:
        """Order ``envs`` to begin episodes, and to make those in `_broken` again first. Seeds may be `NO_SEED`."""
        raise NotImplementedError

    def _step(self, envs: Ints) -> None:
        """Order ``envs`` to make a step with the actions in the buffers."""
        raise NotImplementedError

    def _ready(self, batch: int | None = None) -> tuple[Ints, Ints, int]:
        """Wait for ``batch`` envs that have done their orders; return them, their statuses, and all status bits."""
        raise NotImplementedError

    def _take(self, envs: Ints, *, any_reset: bool) -> None:
        """Note that the results of ``envs`` were taken; ``any_reset``: some of them may have been reset or made."""

    def _failure(self, env: int) -> EtudeError:
        """The error with which ``env`` failed."""
        raise NotImplementedError

    def _close(self) -> None:
        """Close the envs."""
        raise NotImplementedError

    # -- methods of `Arena` -------------------------------------------------------------------------------------

    def reset(self, seed: int | None = None) -> None:
        """See `Arena.reset`. Envs that are in the middle of a step finish it first."""
        if self._is_closed:
            raise closed()
        self._error = _not_reset()
        while self._is_pending():
            envs, status, bits = self._ready(self.num_envs)
            has_failed = (status & FAILED) != 0
            self._fail(self._errors_of(envs[has_failed]))
            self._count(envs[~has_failed], status[~has_failed], bits)
        self._turns, self._open, self._early_turns, self._cut = [], [], [], []
        self._failures.reset_counts()
        # With a seed, episodes are counted from 0 again; otherwise the count continues.
        episode = self._buffers.shown.episode
        episode[:] = 0 if seed is not None else episode + self._turn_builder.running.any(axis=1)
        self._turn_builder.running[:] = False
        self._begin(self._all, np.full(self.num_envs, NO_SEED) if seed is None else self._seeds.start(seed))
        self._broken.clear()
        self._error = None

    def recv(self) -> list[Turn]:
        """See `Arena.recv`. It returns the same turns until every turn that waits has been sent its actions."""
        if self._open:
            return self._turns
        if self._error is not None:
            raise self._error
        try:
            envs, status, bits = self._gather()
        except EtudeError as error:
            self._error = error
            raise
        self._count(envs, status, bits)
        turns, self._early_turns = self._early_turns, []
        num_early = len(turns)
        if bits & ENDED:
            rows = np.flatnonzero(status & ENDED)
            turns += self._turn_builder.ended(envs[rows], status[rows], bits)
        self._open = self._turn_builder.shown(envs, status, bits)
        turns += self._open
        if self._cut:
            turns[num_early].lost = np.concatenate(self._cut)
            self._cut = []
        if not self._bounds.is_over:
            self._bounds.look_at(turns)
        self._turns, self._shown = turns, envs
        return turns

    def send(self, turn: Turn, action: Columns) -> None:
        """See `Arena.send`."""
        if self._is_closed:
            raise closed()
        still_open = [one for one in self._open if one is not turn]
        if len(still_open) == len(self._open):
            raise EnvError(
                "this turn does not wait for actions: send() accepts each waiting turn of the last recv() once."
            )
        rows = turn.slots - self.kinds[turn.kind].slots.start if turn.kind else turn.slots
        for name, column in self._buffers.action[turn.kind].items():
            column[rows] = action[name]
        self._open = still_open
        if not still_open:
            self._step(self._shown)

    def info_of(self, turn: Turn, slot: int) -> dict[str, Any] | None:
        """See `Arena.info_of`."""
        if turn.infos is None:
            return None
        infos, name = turn.infos.get(int(self.env_of[slot])) or {}, self.agents[slot]
        return infos if name is None else next((info for agent, info in infos.items() if str(agent) == name), {})

    def stats(self) -> dict[str, float]:
        """See `Arena.stats`."""
        failures = self._failures
        made, self._counted = self._steps - self._counted, self._steps.copy()
        stats = {"faulty_episodes": float(self._faulty), "restarts": float(failures.restarts)}
        stats["lost_steps"] = float(failures.lost_steps - self._lost_reported)
        self._faulty, failures.restarts, self._lost_reported = 0, 0, failures.lost_steps
        if made.max() > 1.1 * made.min() + 1:
            stats |= {f"steps/env_{env}": float(count) for env, count in enumerate(made)}
        return stats

    def close(self) -> None:
        """See `Arena.close`. An env object of the user is not closed."""
        if not self._is_closed:
            self._failures.log_summary()
        self._is_closed, self._error, self._open = True, closed(), []
        self._close()

    # -- envs that fail -----------------------------------------------------------------------------------------

    def _gather(self) -> tuple[Ints, Ints, int]:
        """Like `_ready`, but also makes failed envs again, and waits for them."""
        while True:
            envs, status, bits = self._ready()
            if bits & FAILED:
                self._fail(self._errors_of(envs[(status & FAILED) != 0]))
            elif not self._values.all(bits):
                self._fail(self._values.faults(envs, status))
            if not self._broken:
                return envs, status, bits
            broken = sorted(self._broken)
            self._begin(np.array(broken), np.array([self._seeds.next_seed(env) for env in broken]))
            self._broken.clear()

    def _count(self, envs: Ints, status: Ints, bits: int) -> None:
        """Take the results of ``envs``, and count their steps; ``bits`` are all their status bits together."""
        self._take(envs, any_reset=bool(bits & BEGUN))
        if bits & BEGUN:
            self._steps[envs] += (status & BEGUN) == 0
        else:
            count_up(self._steps, envs)

    def _errors_of(self, envs: Ints) -> list[EnvFault]:
        faults = []
        for env in envs.tolist():
            bits = int(self._buffers.status[env])
            if bits & ENDED and self._values.fault_of(env, is_end=True) is not None:
                bits &= ~(ENDED | OVER)  # as if it had failed before these rows
            faults.append(EnvFault(env, bits, self._failure(env)))
        return faults

    def _fail(self, faults: Sequence[EnvFault]) -> None:
        """Mark envs that failed or returned invalid values to be made again; or raise the error that ends the run."""
        self._take(np.array([fault.env for fault in faults], np.int64), any_reset=True)
        ending: EtudeError | None = None
        for fault in faults:
            self._break(fault.env, fault.status, was_step=not fault.status & BEGUN)
            if ending is None:  # the first error that ends the run is raised; all of these envs must be made again
                ending = self._failures.record_env_failure(fault)
        if ending is not None:
            raise ending

    def _break(self, env: int, bits: int, was_step: bool) -> None:
        """Mark ``env`` to be made again. Rows of agents that had ended before the failure are kept.

        Args:
            env: The env.
            bits: Its status bits, without those of bad rows.
            was_step: Whether it failed in a step, which is lost if no agent had ended.
        """
        builder = self._turn_builder
        is_cut = builder.running[env].any() and not bits & OVER
        if bits & ENDED:
            self._early_turns += builder.ended(np.array([env]), np.array([bits]), bits)
            self._steps[env] += 1
        elif was_step:
            self._failures.lost_steps += 1
        if is_cut:
            builder.running[env] = False
            self._cut.append(builder.slots[env])
            self._faulty += 1
            self._buffers.shown.episode[env] += 1
        self._broken.add(env)


def count_up(counts: Ints, envs: Ints) -> None:
    """Add 1 to the counts of ``envs``."""
    if len(envs) == len(counts):
        counts += 1  # much faster than with an index
    else:
        counts[envs] += 1


def _not_reset() -> EnvError:
    return EnvError("the arena was not reset: call reset() before recv().")


class EnvSeeds(Stateful):
    """The seeds of the envs; see `CopiesArena` for how they are derived."""

    _state = ("entropy", "made_again")

    def __init__(self, num_envs: int) -> None:
        self.entropy = str(np.random.SeedSequence().entropy)  # a text, as it may be too large for a number in a file
        self.made_again = np.zeros(num_envs, np.int64)

    def start(self, seed: int) -> Ints:
        """Set the run's seed, and return the first seed of each env, int64 ``[num_envs]``."""
        self.entropy = str(seed)
        self.made_again[:] = 0
        return np.array([self._of(env) for env in range(len(self.made_again))])

    def next_seed(self, env: int) -> int:
        """The next seed of ``env``, for making it again."""
        self.made_again[env] += 1
        return self._of(env, int(self.made_again[env]))

    def _of(self, *key: int) -> int:
        return int(np.random.SeedSequence(int(self.entropy), spawn_key=key).generate_state(1)[0] >> 1)


class FailurePolicy:
    """Counts failures of envs, decides when there are too many, and logs warnings.

    Args:
        workers: The limits on failures.
        steps: ``[num_envs]``: the steps of each env since the arena was made, written by the arena.
        can_restart: Whether envs that failed can be made again.
    """

    def __init__(self, workers: Workers, steps: Ints, *, can_restart: bool) -> None:
        self._workers, self.steps = workers, steps
        num_envs = len(steps)
        self._may_restart = workers.restart_failed and can_restart
        self._in_a_row = np.zeros(num_envs, np.int64)  # by env: its consecutive failures without a step in between
        self._steps_at_failure = np.full(num_envs, -1)  # by env: its number of steps at its last failure
        self._furthest = 0  # the most steps of an env between two failures
        self._broke_at = -1  # steps, since its previous failure, of the env that broke its contract last
        self._times_broken = np.zeros(num_envs, np.int64)  # by env: how often in a row at this step
        self._broke_with: EtudeError | None = None  # the first error at this step
        self._recent: deque[int] = deque()  # for each failure within the window, the attempts before it
        self._num_failures = 0
        self._failures_at_warning = 0  # the number of failures at the last warning
        self._logged_kinds: set[str] = set()  # the kinds of failures that were logged in full
        self.restarts = 0
        """The number of restarts of envs and workers; the arena resets it to 0."""
        self.lost_steps = 0
        """The number of steps whose results were lost, counted by the arena."""

    def reset_counts(self) -> None:
        """Reset the counts that end a run: consecutive failures, broken contracts and recent failures."""
        self._in_a_row[:] = 0
        self._broke_at = -1
        self._recent.clear()

    def record_env_failure(self, fault: EnvFault) -> EtudeError | None:
        """Count a failure of one env; returns None if it may begin again, or else the error that ends the run.

        If an env breaks its contract (`WRONG`) at the same step each time, restarting is useless. The run therefore
        ends if no env has got further without failing, and all envs broke it at the same step, together more than
        `Workers.max_restarts` times in a row, or this env alone did. One failure of one env is not enough: episodes
        of equal length that now and then end in a wrong value fail at the same step, too. An error that is not about a
        value (a wrong number of results, for instance), and a reward or a flag that is wrong from the first step on,
        end the run at once.
        """
        env, bits, error = fault
        if not bits & WRONG:  # no warning before the first step: if it never works, the run ends with the error
            return self.record([env], error, quiet=not self.steps.any())
        steps = self.steps - self._steps_at_failure.clip(0)  # by env, since its last failure
        k = int(steps[env])
        if not self._may_restart or int(steps.max()) > k or self._furthest > k:
            return self.record([env], error)
        is_value = isinstance(error, SpaceError) or (isinstance(error, EnvValueError) and k > 0) or not bits & FAILED
        if not is_value:
            return error
        if self._broke_at != k:
            self._broke_at, self._broke_with, self._times_broken[:] = k, error, 0
        self._times_broken[env] += 1
        self._count([env])
        most, times = self._workers.max_restarts, self._times_broken
        if times[env] > most or (times.all() and times.sum() > most):
            often = f"{times.sum()} times in a row, each time {k} steps after it began again (see Workers.max_restarts)"
            first = self._broke_with or error
            return type(first)(f"{often}: {first}") if k else first
        if k:
            self._warn(str(error).strip())
        return None

    def record(self, envs: list[int], error: EtudeError, *, most: int = ANY, quiet: bool = False) -> EtudeError | None:
        """Count a failure of ``envs``; returns None if they may begin again, or else the error that ends the run.

        Args:
            envs: The envs that failed together.
            error: The error they failed with.
            most: A limit on consecutive failures in addition to `Workers.max_restarts`.
            quiet: Whether to log no warning.
        """
        if not self._may_restart:
            return error
        self._count(envs)
        times, own = int(self._in_a_row[envs].max()), self._workers
        why = ""
        if times > min(own.max_restarts, most):
            why = f"{times} failures without a step in between (see Workers.max_restarts)"
        elif len(self._recent) > own.max_failure_rate * WINDOW:
            within = self._attempts() - self._recent[0]
            why = f"{len(self._recent)} of the last {within:,} steps failed (see Workers.max_failure_rate)"
        if why:
            return type(error)(f"{why}: {error}")
        if not quiet:
            self._warn(str(error).strip())
        return None

    def _count(self, envs: list[int]) -> None:
        steps = self.steps[envs]
        self._furthest = max(self._furthest, int((steps - self._steps_at_failure[envs].clip(0)).max()))
        self._in_a_row[envs] = np.where(steps == self._steps_at_failure[envs], self._in_a_row[envs] + 1, 1)
        self._steps_at_failure[envs] = steps
        self._recent.append(self._attempts())
        self._num_failures += 1
        self.restarts += 1
        while self._attempts() - self._recent[0] > WINDOW:
            self._recent.popleft()

    def _attempts(self) -> int:
        """The number of steps and failures."""
        return int(self.steps.sum()) + self._num_failures

    def _warn(self, text: str) -> None:
        """Log the first failure of each kind in full; for others, a summary each time there are ten times as many."""
        first, _, rest = text.partition("\n")
        kind = "".join(c for c in first + rest.rpartition("\n")[2].partition(":")[0] if not c.isdigit())
        if kind not in self._logged_kinds and len(self._logged_kinds) < _KINDS:
            self._logged_kinds.add(kind)
            _log.warning("%s%sIt is restarted.", text, "\n" if rest else " ")
            self._failures_at_warning = max(self._failures_at_warning, 1)
        elif self._num_failures >= 10 * self._failures_at_warning:
            self.log_summary()

    def log_summary(self) -> None:
        """Log the numbers of failures and lost steps, unless nothing has failed since the last such message."""
        if self._num_failures > max(1, self._failures_at_warning):
            self._failures_at_warning = self._num_failures
            _log.warning(
                "the envs have failed %s times in %s steps and were made again; %s steps were lost.",
                f"{self._num_failures:,}",
                f"{int(self.steps.sum()):,}",
                f"{self.lost_steps:,}",
            )
