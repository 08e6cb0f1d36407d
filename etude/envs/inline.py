# SPDX-License-Identifier: Apache-2.0
"""InlineArena: copies of an env in this process, stepped one after the other."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from etude.envs import env_state
from etude.envs.arena import Ints, turn_from_state, turn_to_state
from etude.envs.buffers import NO_SEED, StepBuffers
from etude.envs.copies import CopiesArena
from etude.envs.registry import EnvLike, env_maker, env_name, single_env_error
from etude.envs.worker import EnvWorker
from etude.envs.workers import Workers
from etude.errors import EnvError, EtudeError


class InlineArena(CopiesArena):
    """Copies of an env in this process, all of which step at each turn. See `CopiesArena`.

    Args:
        env: A registered id, ``module:factory`` or ``module:id``, a function or class that makes an env, or, for one
            copy, an env object. The env may be a Gymnasium, PettingZoo or `MultiAgentEnv` env.
        num_envs: The number of copies, at least 1.
        limits: Only its settings about steps, checks and failures are used.
        drop: See `make_arena`.

    Raises:
        EnvError: an env can't be made, or the envs are not alike.
        SpaceError: Etude can't handle a space.
    """

    def __init__(
        self, env: EnvLike, num_envs: int = 1, limits: Workers | None = None, *, drop: Sequence[str] = ()
    ) -> None:
        limits = Workers() if limits is None else limits
        if num_envs < 1:
            raise EnvError(f"num_envs must be at least 1, not {num_envs}.")
        make, is_given = env_maker(env, drop)
        if is_given and num_envs > 1:
            raise single_env_error(env, num_envs)
        self._worker = EnvWorker(
            make, env_name(env), range(num_envs), limits, is_users_env=is_given, in_callers_thread=True
        )
        try:
            buffers = StepBuffers(self._worker.make_all(), num_envs)
            self._worker.attach(buffers)
            infos = self._worker.infos, self._worker.end_infos
            super().__init__(buffers, infos, limits, can_restart=not is_given)
        except BaseException:
            self._worker.close()
            raise
        self._can_restart = not is_given
        self._status = buffers.status.data  # faster than the array, for one number
        self._begins: dict[int, tuple[int | None, bool]] = {}  # envs to reset: their seeds, and if made again
        self._is_step_due = False
        self._next = 0  # the env that steps next, as Ctrl-C may interrupt a round

    # -- running envs -------------------------------------------------------------------------------------------

    def _begin(self, envs: Ints, seeds: Ints) -> None:
        for env, seed in zip(envs.tolist(), seeds.tolist(), strict=True):
            self._begins[env] = None if seed == NO_SEED else seed, env in self._broken

    def _step(self, envs: Ints) -> None:
        self._is_step_due = True

    def _ready(self, batch: int | None = None) -> tuple[Ints, Ints, int]:
        status, bits = self._status, 0
        if self._is_step_due:
            step, begin = self._worker.step, self._next
            for env in range(begin, self.num_envs):
                self._next = env
                status[env] = done = step(env)
                bits |= done
            self._is_step_due, self._next = False, 0
            if not begin:
                return self._all, self._buffers.status, bits
        for env, (seed, make) in list(self._begins.items()):
            status[env] = self._worker.begin(env, seed, make=make)
            del self._begins[env]
        return self._all, self._buffers.status, int(np.bitwise_or.reduce(self._buffers.status))

    def _is_pending(self) -> bool:
        return self._is_step_due or bool(self._begins)

    def _failure(self, env: int) -> EtudeError:
        return self._worker.failures.pop(env)

    def _close(self) -> None:
        self._worker.close()

    def env_at(self, env: int) -> Any:
        """See `Arena.env_at`."""
        return self._worker.env_at(env)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """See `Arena.state_dict`."""
        if self._error is not None:
            return {"how": "new episodes", "why": str(self._error)}
        turns, worker = self.recv(), self._worker
        for adapter in worker.adapters():
            adapter.infos = None  # they may hold anything, and have already been passed on
        return env_state.capture_env(worker.adapters()) | {
            "turns": [turn_to_state(turn) for turn in turns],
            "shown": self._shown.copy(),
            "waiting": [worker.waiting[env] for env in worker.envs],
            "episode": self._buffers.shown.episode.copy(),
            "running": self._turn_builder.running.copy(),
            "seeds": self._seeds.state_dict(),
            "agents": list(self.agents),
        }

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """See `Arena.load_state_dict`."""
        if state["how"] == "new episodes":
            return f"new episodes: {state['why']}"
        if state.get("agents", self.agents) != list(self.agents):
            return "new episodes: the env has other agents, or in another order: make `possible_agents` a fixed list"
        worker = self._worker
        self.reset()  # creates the envs' attributes, into which the state is restored
        self.recv()
        try:
            env_state.restore_env(worker.adapters(), state)
        except env_state.CannotRestoreError as error:
            if self._can_restart:
                self._broken.update(worker.envs)  # their state may be half restored
            self.reset()
            return f"new episodes: {error}"
        self._turns = [turn_from_state(turn) for turn in state["turns"]]
        self._open = [turn for turn in self._turns if turn.waits]
        worker.waiting = dict(zip(worker.envs, map(list, state["waiting"]), strict=True))
        self._buffers.shown.episode[:], self._turn_builder.running[:] = state["episode"], state["running"]
        self._seeds.load_state_dict(state["seeds"])
        return str(state["how"])
