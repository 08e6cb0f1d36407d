# SPDX-License-Identifier: Apache-2.0
"""PoolArena: copies of an env in processes, in threads or here, each of which shows when it is ready what it has."""

import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.columns import Columns
from etude.envs import pool_state, snapshot
from etude.envs.arena import Turn
from etude.envs.make import EnvLike
from etude.envs.pool_care import LOOK, Care
from etude.envs.pool_crews import Here, crew_for
from etude.envs.pool_finite import Fault, Finite
from etude.envs.pool_memory import ENDED, FAILED, WRONG
from etude.envs.pool_orders import Orders
from etude.envs.pool_seeds import Seeds
from etude.envs.pool_turns import Ints, Turns
from etude.envs.workers import Workers
from etude.errors import EnvError, EtudeError


class PoolArena:
    """Copies of an env, each in an episode of its own; whichever are ready are acted for. See `Arena` for the methods.

    An env is stepped as soon as all its agents that wait were acted for, and reset as soon as its episode is over: the
    end and the beginning come in one `recv`, in two turns. How envs are seeded is in `Seeds`: an env's seed does not
    depend on the number of workers.

    Where envs are unevenly fast, the fast ones give more of the steps than their share (see `Workers.max_lead`):
    ``stats()`` then has ``steps/env_3`` and so on. It always has ``faulty_episodes``, which were cut because the env
    failed; ``restarts``, of envs and of workers; and ``lost_steps``, the env steps whose results were lost with them.

    ``infos`` of a turn are by env, as its last step or reset gave them; worker processes keep theirs to themselves.

    Args:
        env: A registered id, ``module:factory`` or ``module:id``, a function or class that makes an env, or, for one
            copy without workers, an env. The env may be Gymnasium's, PettingZoo's or one for many agents (`copy_of`).
        workers: Where the copies run.
        num_envs: How many copies; needed only where there are no workers, and 1 there by default.
        drop: See `make_arena`.

    Raises:
        EnvError: an env can't be made, what makes it can't be sent to a worker, or the envs are not alike.
        SpaceError: a space is of a kind that Etude can't handle.
    """

    def __init__(
        self,
        env: EnvLike,
        workers: Workers | None = None,
        num_envs: int | None = None,
        *,
        drop: Sequence[str] = (),
    ) -> None:
        workers = Workers() if workers is None else workers
        self._crew = crew = crew_for(env, workers, num_envs, drop)
        try:
            crew.open()
        except BaseException:
            crew.close()
            raise
        self._close = crew.close if isinstance(crew, Here) else weakref.finalize(self, crew.close)
        self._memory = memory = crew.memory
        self.num_envs = count = memory.num_envs
        self.kinds = memory.plan.kinds(count)
        slots = memory.plan.slots(count)
        self.num_slots = slots.size
        self.env_of: NDArray[np.int64] = np.zeros(slots.size, np.int64)
        self.env_of[slots] = np.arange(count)[:, None]
        self.agents: list[str | None] = [None] * slots.size
        for row in slots:
            for slot, agent in zip(row, memory.plan.seated, strict=True):
                self.agents[slot] = memory.plan.agents[agent]
        self._made = Turns(memory, crew.infos)
        self._orders = Orders(crew, workers)
        self._care = Care(crew, workers, self._orders)
        self._seeds = Seeds(count)
        self._counted = np.zeros(count, np.int64)  # the steps that stats told of
        self._broken: set[int] = set()  # envs that must be made again before they are anything else
        self._turns: list[Turn] = []  # given by recv
        self._open: list[Turn] = []  # of these, the ones that wait for an answer
        self._shown = np.zeros(0, np.int64)  # the envs that they are of
        self._early: list[Turn] = []  # ends in envs that broke thereafter, for the next recv
        self._lost: list[Ints] = []  # slots that broke off, for the next recv
        self._finite = Finite(memory)
        self._faulty = self._lost_told = 0
        self._looked = time.monotonic()
        self._error: EtudeError | None = _not_reset()
        self._is_closed = False

    # -- an arena -----------------------------------------------------------------------------------------------

    def reset(self, seed: int | None = None) -> None:
        """See `Arena.reset`. Envs that are in the middle of a step finish it first."""
        if self._is_closed:
            raise _closed()
        self._error = _not_reset()
        self._orders.recount()
        while self._orders.pending:
            envs = self._ready(self.num_envs)
            has_failed = (self._memory.status[envs] & FAILED) != 0
            self._orders.take(envs[~has_failed])
            self._fail(envs[has_failed])
        self._turns, self._open, self._early, self._lost = [], [], [], []
        self._care.forget()
        self._memory.episode += self._made.running.any(axis=1)
        self._made.running[:] = False
        self._counted -= self._orders.steps()  # those that were not told of are still to be
        self._orders.reset(None if seed is None else self._seeds.start(seed), list(self._broken))
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
        self._orders.take(envs)
        turns, self._early = self._early, []
        if bits & ENDED:
            rows = np.flatnonzero(status & ENDED)
            turns += self._made.ended(envs[rows], status[rows], bits)
        self._open = self._made.shown(envs, status, bits)
        turns += self._open
        if self._lost:
            turns[0].lost = np.concatenate(self._lost)
            self._lost = []
        self._orders.release()
        self._turns, self._shown = turns, envs
        return turns

    def send(self, turn: Turn, action: Columns) -> None:
        """See `Arena.send`."""
        still_open = [one for one in self._open if one is not turn]
        if len(still_open) == len(self._open):
            raise EnvError("this turn waits for no answer: send() takes each turn of the last recv() that waits, once.")
        rows = turn.slots - self.kinds[turn.kind].slots.start if turn.kind else turn.slots
        for name, column in self._memory.action[turn.kind].items():
            column[rows] = action[name]
        self._open = still_open
        if not still_open:
            self._orders.step(self._shown)

    def env_at(self, env: int) -> Any | None:
        """See `Arena.env_at`."""
        return self._crew.env_at(env)

    def info_of(self, turn: Turn, slot: int) -> dict[str, Any] | None:
        """See `Arena.info_of`."""
        if turn.infos is None:
            return None
        said, name = turn.infos.get(int(self.env_of[slot])) or {}, self.agents[slot]
        return said if name is None else next((info for agent, info in said.items() if str(agent) == name), {})

    def stats(self) -> dict[str, float]:
        """See `Arena.stats`."""
        steps = self._orders.steps()
        made, self._counted = steps - self._counted, steps
        stats = {"faulty_episodes": float(self._faulty), "restarts": float(self._care.restarts)}
        stats["lost_steps"] = float(self._orders.lost - self._lost_told)
        self._faulty, self._care.restarts, self._lost_told = 0, 0, self._orders.lost
        if made.max() > 1.1 * made.min() + 1:
            stats |= {f"steps/env_{env}": float(count) for env, count in enumerate(made)}
        return stats

    def close(self) -> None:
        """See `Arena.close`. An env that was given ready-made is left to its giver."""
        if not self._is_closed:
            self._care.sum_up()
        self._is_closed, self._error, self._open = True, _closed(), []
        self._close()

    # -- envs that fail -----------------------------------------------------------------------------------------

    def _gather(self) -> tuple[Ints, Ints, int]:
        """Envs that have something to show, their statuses, and all the bits in these."""
        while True:
            envs = self._ready(self._orders.min_batch)
            status = self._memory.status[envs]
            bits = int(np.bitwise_or.reduce(status))
            if bits & FAILED:
                self._fail(envs[(status & FAILED) != 0])
            elif not self._finite.all(bits):
                self._refuse(self._finite.faults(envs, status))
            if not self._broken:
                return envs, status, bits
            for env in self._broken:
                self._orders.make(env, self._seeds.again(env))
            self._broken.clear()

    def _ready(self, batch: int) -> Ints:
        while True:
            if time.monotonic() - self._looked > LOOK:
                self._look_after_workers()
            envs = self._orders.ready(batch, self._care.interval)
            if envs is not None:
                return envs
            self._looked = 0.0

    def _look_after_workers(self) -> None:
        self._looked = time.monotonic()
        self._crew.wait(0.0)
        self._care.look_for_hung()
        for worker, how in self._crew.deaths():
            error = self._care.worker_died(worker, how)
            for env in self._care.envs_of(worker):
                self._break(env, self._orders.give_up(env))
            self._crew.restart(worker)
            if error is not None:
                raise error

    def _fail(self, envs: Ints) -> None:
        for env in envs.tolist():
            bits = int(self._memory.status[env])
            self._orders.drop(env, bits)
            self._break(env, bits)
            error = self._care.env_failed(env, is_wrong=bool(bits & WRONG))
            if error is not None:
                raise error

    def _refuse(self, faults: Sequence[Fault]) -> None:
        """Let envs begin again that gave NaN or infinity."""
        for env, bits, error in faults:
            self._orders.drop(env, bits)
            self._break(env, bits)
            ending = self._care.gave_wrong(env, error, is_value=True)
            if ending is not None:
                raise ending

    def _break(self, env: int, bits: int) -> None:
        """Note that ``env`` must be made again, and what it had come to."""
        if bits & ENDED:
            self._early += self._made.ended(np.array([env]), np.array([bits]), bits)
        lost = self._made.lose(env)
        if len(lost):
            self._lost.append(lost)
            self._faulty += 1
            self._memory.episode[env] += 1
        self._broken.add(env)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """See `Arena.state_dict`: only envs without workers can be asked for theirs."""
        if not isinstance(self._crew, Here):
            return {"how": "new episodes", "why": "the envs run in workers, whose state is not kept"}
        if self._error is not None:
            return {"how": "new episodes", "why": str(self._error)}
        turns, host = self.recv(), self._crew.host
        return pool_state.capture(host.copies()) | {
            "turns": [pool_state.turn_to_state(turn) for turn in turns],
            "shown": self._shown.copy(),
            "waiting": [host.waiting(env) for env in host.envs],
            "episode": self._memory.episode.copy(),
            "running": self._made.running.copy(),
            "seeds": self._seeds.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """See `Arena.load_state_dict`."""
        if state["how"] == "new episodes":
            return f"new episodes: {state['why']}"
        if not isinstance(self._crew, Here):
            return "new episodes: the envs ran without workers, and have some now"
        host = self._crew.host
        self.reset()  # makes the envs' own attributes, for the state to be put into
        self.recv()
        try:
            snapshot.restore_env(host.copies(), state)
        except snapshot.CannotRestoreError as error:
            if self._crew.can_restart:
                self._broken.update(host.envs)  # half of the state may be in them
            self.reset()
            return f"new episodes: {error}"
        self._turns = [pool_state.turn_from_state(turn) for turn in state["turns"]]
        self._open = [turn for turn in self._turns if turn.waits]
        self._shown = np.array(state["shown"], np.int64)
        for env, waiting in zip(host.envs, state["waiting"], strict=True):
            host.waiting(env)[:] = waiting
        self._memory.episode[:], self._made.running[:] = state["episode"], state["running"]
        self._seeds.load_state_dict(state["seeds"])
        return str(state["how"])


def _not_reset() -> EnvError:
    return EnvError("the arena was not reset: call reset() before recv().")


def _closed() -> EnvError:
    return EnvError("the arena is closed.")
