# SPDX-License-Identifier: Apache-2.0
"""CopiesArena: what arenas of copies of one env have in common, and what happens when an env fails."""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude.columns import Columns
from etude.envs.arena import BoundsCheck, Ints, Turn
from etude.envs.buffers import BEGUN, BLIND, ENDED, FAILED, NO_SEED, SHOWN, WRONG, Infos, StepBuffers, TurnBuilder
from etude.envs.workers import Workers
from etude.errors import EnvError, EtudeError, SpaceError
from etude.spaces import check_finite_value
from etude.stateful import Stateful

if TYPE_CHECKING:
    import torch

WINDOW: Final = 1000
"""The steps over which `Workers.max_failure_rate` is taken."""

ANY: Final = 1 << 62

_KINDS: Final = 10
"""How many kinds of failures are shown in full."""

_log = logging.getLogger("etude.envs")


class EnvFault(NamedTuple):
    """An env that gave something else than a finite number."""

    env: int
    status: int
    """What remains of its status, as bits, without the rows that are concerned."""
    error: EtudeError


class FiniteCheck:
    """Checks observations and rewards in the step buffers."""

    def __init__(self, buffers: StepBuffers) -> None:
        self._buffers = buffers
        self._is_single = buffers.layout.agents == (None,)
        self._shown = _floats(buffers.obs, buffers.reward)
        self._ended = _floats(buffers.end_obs, buffers.end_reward)

    def all(self, bits: int) -> bool:
        """Whether all numbers are finite; a few microseconds. False may come of an env that is not ready yet.

        Args:
            bits: In the statuses of the envs that are ready. Ends are looked at only where there are some.
        """
        return _all_finite(self._shown) and (not bits & ENDED or _all_finite(self._ended))

    def faults(self, envs: Ints, status: Ints) -> list[EnvFault]:
        """Those of ``envs``, with their statuses, that gave something else."""
        found = []
        for env, bits in zip(envs.tolist(), status.tolist(), strict=True):
            if bits & ENDED and (error := self._fault_of(env, is_end=True)):
                found.append(EnvFault(env, WRONG, error))
            elif bits & SHOWN and (error := self._fault_of(env, is_end=False)):
                found.append(EnvFault(env, bits | WRONG, error))
        return found

    def _fault_of(self, env: int, *, is_end: bool) -> EtudeError | None:
        buffers = self._buffers
        flags, rewards, obs = (
            (buffers.end_flags, buffers.end_reward, buffers.end_obs)
            if is_end
            else (buffers.flags, buffers.reward, buffers.obs)
        )
        for seat, agent in enumerate(buffers.layout.seated):
            if not self._is_single and not flags[env, seat]:  # one agent alone has its flags in the status
                continue
            name = buffers.layout.agents[agent]
            whose = f"env {env}: " if name is None else f"env {env}, agent {name!r}: "
            reward = rewards[env, seat]
            if not np.isfinite(reward):
                rewards[env, seat] = 0.0
                return EnvError(f"{whose}`reward` is {reward}, not a finite number.")
            if flags[env, seat] & BLIND:
                continue
            kind, row = buffers.layout.place(env, seat)
            for part, column in obs[kind].items():
                try:
                    check_finite_value(part, column[row])
                except SpaceError as error:
                    column[row] = 0
                    return SpaceError(f"{whose}{error}")
        return None


def _floats(obs: Iterable[dict[str, NDArray[Any]]], reward: NDArray[Any]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Each column of floats, flat, and where to note which are finite."""
    columns = [reward, *(column for of_kind in obs for column in of_kind.values() if column.dtype.kind == "f")]
    return [(column.reshape(-1), np.ones(column.size, bool)) for column in columns]


def _all_finite(columns: list[tuple[NDArray[Any], NDArray[Any]]]) -> bool:
    for column, finite in columns:
        np.isfinite(column, finite)
        if b"\0" in finite.tobytes():  # a third of the time that `all` takes where there are few
            return False
    return True


class CopiesArena:
    """Copies of an env, each in an episode of its own. See `Arena` for the methods.

    Env ``i`` is first seeded with that of ``SeedSequence(seed).spawn(num_envs)[i]``, as 31 bits. Made again for the
    n-th time, it gets that of ``SeedSequence(seed, spawn_key=(i, n))``, so that it does not meet again what broke it.
    An env's seed does not depend on the number of workers.

    ``stats()`` always has ``faulty_episodes``, which were cut because the env failed; ``restarts``, of envs and of
    workers; and ``lost_steps``, the env steps whose results were lost with them. Where some envs make more steps than
    others, it has ``steps/env_3`` and so on.

    ``infos`` of a turn are by env, as its last step or reset gave them; worker processes keep theirs to themselves.
    """

    device: "torch.device | None" = None

    def __init__(self, buffers: StepBuffers, infos: Infos | None, workers: Workers, *, can_restart: bool) -> None:
        self._buffers = buffers
        self.num_envs = count = buffers.num_envs
        self.kinds = buffers.layout.kinds(count)
        slots = buffers.layout.slots(count)
        self.num_slots = slots.size
        self.env_of: NDArray[np.int64] = np.zeros(slots.size, np.int64)
        self.env_of[slots] = np.arange(count)[:, None]
        names = np.empty(slots.size, object)
        names[slots] = [buffers.layout.agents[agent] for agent in buffers.layout.seated]
        self.agents: list[str | None] = names.tolist()
        self._made = TurnBuilder(buffers, infos)
        self._finite = FiniteCheck(buffers)
        self._bounds = BoundsCheck(self.kinds, self.env_of, self.agents, workers.check)
        self._steps = np.zeros(count, np.int64)  # of each env, since the arena was made
        self._failures = FailurePolicy(workers, self._steps, can_restart=can_restart)
        self._seeds = EnvSeeds(count)
        self._all = self.env_of if slots.size == count else np.arange(count)
        self._counted = np.zeros(count, np.int64)  # the steps that stats told of
        self._broken: set[int] = set()  # envs that must be made again before they are anything else
        self._turns: list[Turn] = []  # given by recv
        self._open: list[Turn] = []  # of these, the ones that wait for an answer
        self._shown = self._all[:0]  # the envs that they are of
        self._early: list[Turn] = []  # ends in envs that broke thereafter, for the next recv
        self._cut: list[Ints] = []  # slots whose episodes were cut, for the next recv
        self._faulty = self._lost_told = 0
        self._error: EtudeError | None = _not_reset()
        self._is_closed = False

    # -- what a subclass does: run envs -------------------------------------------------------------------------

    def _is_pending(self) -> bool:
        """Whether envs are to do something, or have done it and it was not taken."""
        raise NotImplementedError

    def _begin(self, envs: Ints, seeds: Ints) -> None:
        """Let ``envs`` begin episodes, and have those that are `_broken` made again; a seed may be `NO_SEED`."""
        raise NotImplementedError

    def _step(self, envs: Ints) -> None:
        """Let ``envs`` make a step with the actions in the buffers."""
        raise NotImplementedError

    def _ready(self, batch: int | None = None) -> tuple[Ints, Ints, int]:
        """Envs that have done what they were to do, their statuses, and all the bits in these; waits for ``batch``."""
        raise NotImplementedError

    def _take(self, envs: Ints, bits: int) -> None:
        """Note that what ``envs`` have done is dealt with; ``bits`` are in one or the other's status."""

    def _failure(self, env: int) -> EtudeError:
        """The error with which ``env`` failed."""
        raise NotImplementedError

    def _close(self) -> None:
        """Close the envs."""
        raise NotImplementedError

    # -- an arena -----------------------------------------------------------------------------------------------

    def reset(self, seed: int | None = None) -> None:
        """See `Arena.reset`. Envs that are in the middle of a step finish it first."""
        if self._is_closed:
            raise _closed()
        self._error = _not_reset()
        while self._is_pending():
            envs, status, _ = self._ready(self.num_envs)
            has_failed = (status & FAILED) != 0
            self._fail(self._errors_of(envs[has_failed]))
            self._count(envs[~has_failed], status[~has_failed])
        self._turns, self._open, self._early, self._cut = [], [], [], []
        self._failures.forget()
        self._buffers.episode += self._made.running.any(axis=1)
        self._made.running[:] = False
        self._begin(self._all, np.full(self.num_envs, NO_SEED) if seed is None else self._seeds.start(seed))
        self._broken.clear()
        self._error = None

    def recv(self) -> list[Turn]:
        """See `Arena.recv`. It gives the same again until all turns that wait are answered."""
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
        turns, self._early = self._early, []
        num_early = len(turns)
        if bits & ENDED:
            rows = np.flatnonzero(status & ENDED)
            turns += self._made.ended(envs[rows], status[rows], bits)
        self._open = self._made.shown(envs, status, bits)
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
        still_open = [one for one in self._open if one is not turn]
        if len(still_open) == len(self._open):
            raise EnvError("this turn waits for no answer: send() takes each turn of the last recv() that waits, once.")
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
        said, name = turn.infos.get(int(self.env_of[slot])) or {}, self.agents[slot]
        return said if name is None else next((info for agent, info in said.items() if str(agent) == name), {})

    def stats(self) -> dict[str, float]:
        """See `Arena.stats`."""
        failures = self._failures
        made, self._counted = self._steps - self._counted, self._steps.copy()
        stats = {"faulty_episodes": float(self._faulty), "restarts": float(failures.restarts)}
        stats["lost_steps"] = float(failures.lost_steps - self._lost_told)
        self._faulty, failures.restarts, self._lost_told = 0, 0, failures.lost_steps
        if made.max() > 1.1 * made.min() + 1:
            stats |= {f"steps/env_{env}": float(count) for env, count in enumerate(made)}
        return stats

    def close(self) -> None:
        """See `Arena.close`. An env that was given ready-made is left to its giver."""
        if not self._is_closed:
            self._failures.sum_up()
        self._is_closed, self._error, self._open = True, _closed(), []
        self._close()

    # -- envs that fail -----------------------------------------------------------------------------------------

    def _gather(self) -> tuple[Ints, Ints, int]:
        """As `_ready`, but none of the envs has failed."""
        while True:
            envs, status, bits = self._ready()
            if bits & FAILED:
                self._fail(self._errors_of(envs[(status & FAILED) != 0]))
            elif not self._finite.all(bits):
                self._fail(self._finite.faults(envs, status))
            if not self._broken:
                return envs, status, bits
            broken = sorted(self._broken)
            self._begin(np.array(broken), np.array([self._seeds.again(env) for env in broken]))
            self._broken.clear()

    def _count(self, envs: Ints, status: Ints, bits: int = BEGUN) -> None:
        """Note what ``envs`` have done; ``bits`` are in one or the other's status."""
        self._take(envs, bits)
        if bits & BEGUN:
            self._steps[envs] += (status & BEGUN) == 0
        elif len(envs) < self.num_envs:
            self._steps[envs] += 1
        else:
            self._steps += 1

    def _errors_of(self, envs: Ints) -> list[EnvFault]:
        return [EnvFault(env, int(self._buffers.status[env]), self._failure(env)) for env in envs.tolist()]

    def _fail(self, faults: Sequence[EnvFault]) -> None:
        """Let envs begin again that failed, or gave NaN or infinity; or raise the error that ends the run."""
        self._take(np.array([fault.env for fault in faults], np.int64), BEGUN)
        ending: EtudeError | None = None
        for fault in faults:
            self._break(fault.env, fault.status)
            if ending is None:  # the first that ends the run is told of; the others are made again with it
                ending = self._failures.env_failed(fault)
        if ending is not None:
            raise ending

    def _break(self, env: int, bits: int) -> None:
        """Note that ``env`` must be made again, and what it had come to: the ends of agents, or nothing."""
        if bits & ENDED:
            self._early += self._made.ended(np.array([env]), np.array([bits]), bits)
            self._steps[env] += 1
        elif not bits & BEGUN:
            self._failures.lost_steps += 1
        lost = self._made.lose(env)
        if len(lost):
            self._cut.append(lost)
            self._faulty += 1
            self._buffers.episode[env] += 1
        self._broken.add(env)


def _not_reset() -> EnvError:
    return EnvError("the arena was not reset: call reset() before recv().")


def _closed() -> EnvError:
    return EnvError("the arena is closed.")


class EnvSeeds(Stateful):
    """The seeds of envs, as `CopiesArena` says."""

    _state = ("entropy", "made_again")

    def __init__(self, num_envs: int) -> None:
        self.entropy = str(np.random.SeedSequence().entropy)  # as text: it may be larger than a file's numbers
        self.made_again = np.zeros(num_envs, np.int64)

    def start(self, seed: int) -> Ints:
        """``[num_envs]``: the seeds of all envs."""
        self.entropy = str(seed)
        self.made_again[:] = 0
        return np.array([self._of(env) for env in range(len(self.made_again))])

    def again(self, env: int) -> int:
        """The seed of ``env`` that is made again."""
        self.made_again[env] += 1
        return self._of(env, int(self.made_again[env]))

    def _of(self, *key: int) -> int:
        return int(np.random.SeedSequence(int(self.entropy), spawn_key=key).generate_state(1)[0] >> 1)


class FailurePolicy:
    """Counts failures, says when there are too many, and warns of them.

    Args:
        workers: How many failures are allowed.
        steps: ``[num_envs]``: the steps of each env since the arena was made, written by the arena.
        can_restart: Whether envs that failed can be made again.
    """

    def __init__(self, workers: Workers, steps: Ints, *, can_restart: bool) -> None:
        self._workers, self.steps = workers, steps
        num_envs = len(steps)
        self._may_restart = workers.restart_failed and can_restart
        self._in_a_row = np.zeros(num_envs, np.int64)  # failures of an env, without a step of it between
        self._steps_then = np.full(num_envs, -1)  # the steps of an env at its last failure
        self._furthest = 0  # the most steps that an env has made between two failures
        self._wrong_at = np.full(num_envs, -1)  # the steps before an env broke its contract
        self._wrong: dict[int, EtudeError] = {}  # how it did
        self._recent: deque[int] = deque()  # of the failures in the last steps: the steps and failures before
        self._count_all = 0
        self._warned = 0  # how many there were at the last warning
        self._told: set[str] = set()  # kinds of failures that were shown in full
        self.restarts = 0
        """Envs or workers that were to begin again, since this was last set to 0."""
        self.lost_steps = 0
        """Steps that were made in vain; the arena counts them."""

    def forget(self) -> None:
        """Count failures anew."""
        self._in_a_row[:] = 0
        self._wrong_at[:] = -1
        self._recent.clear()

    def env_failed(self, fault: EnvFault) -> EtudeError | None:
        """Note that an env failed: None, and it may begin again; else the error that ends the run.

        Where it broke its contract, the run ends if that is the rule: no env has got further before it failed, and all
        have failed in the same step, or this one twice. Once is enough if it is not only a value that is wrong.
        """
        env, bits, error = fault
        if not bits & WRONG:  # it may never begin: then that is said
            return self.note([env], error, quiet=not self.steps.any())
        steps = self.steps - self._steps_then.clip(0)  # of each env, since its last failure
        k = int(steps[env])
        if not self._may_restart or int(steps.max()) > k or self._furthest > k:
            return self.note([env], error)
        is_value = isinstance(error, SpaceError) or not bits & FAILED
        is_rule = not is_value or self._wrong_at[env] == k or self._workers.max_restarts == 0
        self._wrong_at[env], self._wrong[env] = k, error
        self._count([env])
        if len(steps) > 1 and (self._wrong_at == k).all():
            return self._wrong[0]
        return error if is_rule else None

    def note(self, envs: list[int], error: EtudeError, *, most: int = ANY, quiet: bool = False) -> EtudeError | None:
        """Count a failure of ``envs``: None, and they may begin again; else the error that ends the run.

        Args:
            envs: Which.
            error: How they failed.
            most: How many failures in a row there may be, beside `Workers.max_restarts`.
            quiet: Warn of nothing.
        """
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
        steps = self.steps[envs]
        self._furthest = max(self._furthest, int((steps - self._steps_then[envs].clip(0)).max()))
        self._in_a_row[envs] = np.where(steps == self._steps_then[envs], self._in_a_row[envs] + 1, 1)
        self._steps_then[envs] = steps
        self._recent.append(self._attempts())
        self._count_all += 1
        self.restarts += 1
        while self._attempts() - self._recent[0] > WINDOW:
            self._recent.popleft()

    def _attempts(self) -> int:
        """The steps that were made, and the failures."""
        return int(self.steps.sum()) + self._count_all

    def _warn(self, text: str) -> None:
        """Tell of the first failure of each kind in full; of the others, each time that there are ten times as many."""
        first, _, rest = text.partition("\n")
        kind = "".join(c for c in first + rest.rpartition("\n")[2].partition(":")[0] if not c.isdigit())
        if kind not in self._told and len(self._told) < _KINDS:
            self._told.add(kind)
            _log.warning("%s%sIt begins again.", text, "\n" if rest else " ")
            self._warned = max(self._warned, 1)
        elif self._count_all >= 10 * self._warned:
            self.sum_up()

    def sum_up(self) -> None:
        """Warn of how much was lost until now, unless that was said after the last failure."""
        if self._count_all > max(1, self._warned):
            self._warned = self._count_all
            _log.warning(
                "the envs have failed %s times in %s steps, and were made again: %s steps were lost.",
                f"{self._count_all:,}",
                f"{int(self.steps.sum()):,}",
                f"{self.lost_steps:,}",
            )
