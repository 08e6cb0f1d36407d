# SPDX-License-Identifier: Apache-2.0
"""Host: steps the envs of one worker, or of the arena's own process, and writes what they show into memory."""

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from etude import columns as col
from etude.envs.copies import TAKEN as TAKEN_INFO
from etude.envs.copies import Copy, GymCopy, Row, copy_of
from etude.envs.pool_checks import (
    NUMBERS,
    check_alike,
    check_flags,
    check_reward,
    not_five,
    old_api,
    reset_env,
    same_object,
    unpacked_wrongly,
)
from etude.envs.pool_memory import (
    BLIND,
    ENDED,
    FAILED,
    FIRST,
    MAKE,
    NO_SEED,
    OVER,
    RESET,
    SHOWN,
    STEP,
    TAKEN,
    TERMINATED,
    TRUNCATED,
    WRONG,
    Memory,
    Plan,
)
from etude.envs.pool_ports import Port
from etude.errors import EnvError, EtudeError, SpaceError, described
from etude.spaces import check_value

_ALWAYS = 1 << 62
_HERE = os.path.dirname(__file__)


class Host:
    """Steps some envs of a pool.

    Args:
        make: Makes one env object.
        name: What that is called in errors.
        envs: Which of the pool's they are.
        max_steps: See `Workers.max_steps`.
        check: See `Workers.check`.
        is_given: What ``make`` gives was made by somebody else, who will close it.
        is_here: The envs step in the thread that uses the arena: a KeyboardInterrupt is somebody's Ctrl-C.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        name: str,
        envs: Sequence[int],
        max_steps: int | None,
        check: int | Literal["always"],
        *,
        is_given: bool = False,
        is_here: bool = False,
    ) -> None:
        self.envs = envs
        self.failures: dict[int, tuple[str, str]] = {}
        """Of envs that failed: the name of the error's class and the text to show."""
        self.infos: dict[int, Any] = {}
        """What each env said beside its last rows that wait."""
        self.end_infos: dict[int, Any] = {}
        """What each env said beside its last rows that end."""
        self._make_env, self._name, self._is_given, self._is_here = make, name, is_given, is_here
        self._max_steps = max_steps
        self._check = _ALWAYS if check == "always" else check
        self._copies: dict[int, Copy] = {}
        self._unchecked = dict.fromkeys(envs, 0)
        self._ended = 0

    # -- the beginning and the end ------------------------------------------------------------------------------

    def make_all(self) -> Plan:
        """Make all envs, and say who is in them.

        Raises:
            EnvError: one can't be made, or they are not alike.
            SpaceError: a space is of a kind that Etude can't handle.
        """
        try:
            plans = [Plan.of(self._make(env)) for env in self.envs]
        except EtudeError:
            raise
        except BaseException as error:
            if self._passes(error):
                raise
            raise EnvError(f"{self._name} fails to make an env: {described(error)}") from error
        for env, plan in zip(self.envs, plans, strict=True):
            check_alike(plans[0], plan, env)
        return plans[0]

    def _make(self, env: int) -> Copy:
        old = self._copies.pop(env, None)
        if old is not None and not self._is_given:
            _close_failed(old)
        copy = copy_of(self._make_env())
        if any(copy.env is other.env for other in self._copies.values()):
            raise same_object(copy.env)
        self._copies[env] = copy
        self._unchecked[env] = self._check
        return copy

    def _passes(self, error: BaseException) -> bool:
        """Whether an error is not the env's."""
        return self._is_here and isinstance(error, KeyboardInterrupt)

    def attach(self, memory: Memory, worker: int = 0) -> None:
        """Write into ``memory`` from now on, as this worker."""
        self._memory, self._plan, self._worker = memory, memory.plan, worker
        self._seat = {agent: seat for seat, agent in enumerate(memory.plan.seated)}
        self._waiting: dict[int, list[int]] = {env: [] for env in self.envs}
        self._ports: list[Port] = []
        for part, obs, end_obs, action in zip(
            memory.plan.parts, memory.obs, memory.end_obs, memory.action, strict=True
        ):
            self._ports += [
                Port(part.obs_space, part.action_space, obs, end_obs, action, len(part.agents), i)
                for i in range(len(part.agents))
            ]
        self._port_of = [self._ports[self._seat[agent]] for agent in range(len(memory.plan.agents))]
        self._port = self._ports[0]  # the only one where there is one agent
        # Quicker than arrays, for one number.
        self._reward: Any = memory.reward.reshape(-1).data
        self._end_reward: Any = memory.end_reward.reshape(-1).data
        self._flags: Any = memory.flags.reshape(-1).data
        self._end_flags: Any = memory.end_flags.reshape(-1).data
        self._env_t, self._end_t = memory.env_t.data, memory.end_t.data
        self._episode, self._end_episode = memory.episode.data, memory.end_episode.data
        self._has_ends = dict.fromkeys(self.envs, False)

    def close(self) -> None:
        """Close all envs, also when one of them can't be.

        Raises:
            Exception: one can't be closed.
        """
        copies, self._copies = list(self._copies.values()), {}
        if self._is_given:
            return
        with contextlib.ExitStack() as stack:
            for copy in reversed(copies):
                stack.callback(copy.close)

    def copies(self) -> list[Copy]:
        """Those there are, in order."""
        return [self._copies[env] for env in self.envs]

    def env_at(self, env: int) -> Any:
        """The object of ``env``; None while it is made again."""
        copy = self._copies.get(env)
        return None if copy is None else copy.env

    def waiting(self, env: int) -> list[int]:
        """The agents of ``env`` that wait for actions; may be set."""
        return self._waiting[env]

    # -- orders -------------------------------------------------------------------------------------------------

    def serve(self, env: int, order: int) -> int:
        """Do what is ordered of ``env``: write its rows, and give its status."""
        try:
            if order == STEP:
                copy = self._copies[env]
                return self._step_gym(env, copy) if type(copy) is GymCopy else self._step(env, copy)
            copy = self._make(env) if order == MAKE else self._copies[env]
            if order == MAKE:
                check_alike(self._plan, Plan.of(copy), env)
                self._now_resets()
            seed = int(self._memory.seed[env])
            return self._reset(env, copy, None if seed == NO_SEED else seed)
        except BaseException as error:
            if self._passes(error):
                raise
            return self._take_ended() | self._failed(env, order, error)

    def _failed(self, env: int, order: int, error: BaseException) -> int:
        """The status of an env that raised an error, which is kept to be told."""
        if unpacked_wrongly(error):
            error = old_api(self._copies[env].env, f"unpacking what it returned failed ({error})")
        if isinstance(error, EtudeError):
            name = "SpaceError" if isinstance(error, SpaceError) else "EnvError"
            self.failures[env] = (name, f"env {env}: {error}")
            return FAILED | WRONG
        is_made, is_over = env in self._copies, self._copies[env].over if env in self._copies else False
        doing = "being made" if not is_made else "a step" if order == STEP and not is_over else "a reset"
        self.failures[env] = ("EnvError", f"env {env} failed in {doing}:\n{_text(error)}")
        return FAILED

    def _take_ended(self) -> int:
        ended, self._ended = self._ended, 0
        return ended

    def _begin_next(self, env: int, copy: Copy, ended: int) -> int:
        """Reset an env whose episode is over, after rows that ``ended`` describes."""
        self._ended = ended  # true whether or not the reset fails
        self._now_resets()
        status = self._reset(env, copy, None)
        return status | self._take_ended()

    def _now_resets(self) -> None:
        self._memory.doing[self._worker], self._memory.began[self._worker] = RESET, time.monotonic()

    def _reset(self, env: int, copy: Copy, seed: int | None) -> int:
        if type(copy) is GymCopy:
            return self._reset_gym(env, copy, seed)
        rows = copy.reset(seed)
        self.infos[env] = copy.infos
        return self._write(env, copy, rows)

    # -- one agent, without rows --------------------------------------------------------------------------------

    def _reset_gym(self, env: int, copy: GymCopy, seed: int | None) -> int:
        obs, self.infos[env] = reset_env(copy.env, seed)
        copy.env_t, copy.over = 0, False
        port = self._port
        if self._unchecked[env]:
            self._unchecked[env] -= 1
            check_value(port.obs_space, obs, col.OBS)
        port.show(env, obs)
        self._reward[env] = 0.0
        return SHOWN | FIRST

    def _step_gym(self, env: int, copy: GymCopy) -> int:
        port = self._port
        given = copy.env.step(port.read(env))
        try:
            obs, reward, terminated, truncated, infos = given
        except (TypeError, ValueError):
            raise not_five(copy.env, given) from None
        copy.env_t = t = copy.env_t + 1
        if reward.__class__ not in NUMBERS:
            check_reward(reward)
        if self._unchecked[env]:
            check_flags(terminated, truncated)
            self._unchecked[env] -= 1
            check_value(port.obs_space, obs, col.OBS)
        if not (terminated or truncated) and t != self._max_steps:
            port.show(env, obs)
            self._reward[env] = reward
            self.infos[env] = infos
            return SHOWN | self._keep_taken(env, port, infos.get(TAKEN_INFO)) if infos else SHOWN
        copy.over, copy.infos = True, infos
        port.end(env, obs)
        self._end_reward[env] = reward
        cut = not terminated and t == self._max_steps
        flags = (TERMINATED if terminated else 0) | (TRUNCATED if truncated or cut else 0)
        self.end_infos[env] = infos
        taken = self._keep_taken(env, port, infos.get(TAKEN_INFO)) if infos else 0
        return self._begin_next(env, copy, ENDED | OVER | flags | taken)

    def _step(self, env: int, copy: Copy) -> int:
        ports = self._port_of
        rows = copy.step({agent: ports[agent].read(env) for agent in self._waiting[env]})
        if self._max_steps is not None and copy.env_t >= self._max_steps and not copy.over:
            rows = copy.truncate(rows)
        if self._has_ends[env]:
            self._memory.end_flags[env] = 0
            self._has_ends[env] = False
        self._end_t[env] = copy.env_t
        self._end_episode[env] = self._episode[env]
        self.infos[env] = self.end_infos[env] = copy.infos
        status = self._write(env, copy, rows)
        if not copy.over:
            return status
        self._episode[env] += 1
        return self._begin_next(env, copy, status | OVER)

    # -- rows ---------------------------------------------------------------------------------------------------

    def _write(self, env: int, copy: Copy, rows: Iterable[Row]) -> int:
        status = 0
        waiting = []
        self._memory.flags[env] = 0
        first_seat, unchecked = env * len(self._port_of), self._unchecked[env]
        for row in rows:
            port, seat = self._port_of[row.agent], first_seat + self._seat[row.agent]
            flags = SHOWN if row.taken is None else SHOWN | self._keep_taken(env, port, row.taken)
            if row.obs is None:
                flags |= BLIND
            elif unchecked:
                check_value(port.obs_space, row.obs, col.OBS)
            if row.terminated or row.truncated:
                flags |= (TERMINATED if row.terminated else 0) | (TRUNCATED if row.truncated else 0)
                if row.obs is not None:
                    port.end(env, row.obs)
                self._end_reward[seat] = row.reward
                self._end_flags[seat] = flags
                self._has_ends[env] = True
                status |= ENDED | flags & TAKEN
            else:
                flags |= FIRST if row.first else 0
                port.show(env, row.obs)
                self._reward[seat] = row.reward
                self._flags[seat] = flags
                waiting.append(row.agent)
                status |= flags
        self._env_t[env] = copy.env_t
        self._waiting[env] = waiting
        self._unchecked[env] -= self._unchecked[env] > 0
        if not waiting and not copy.over:
            raise EnvError(
                f"no agent of {type(copy.env).__name__} waits for an action, though its episode is not over."
            )
        return status

    def _keep_taken(self, env: int, port: "Port", action: Any) -> int:
        if action is None:
            return 0
        check_value(port.action_space, action, TAKEN_INFO)
        port.keep(env, action)
        return TAKEN


def _close_failed(copy: Copy) -> None:
    try:
        copy.close()
    except Exception:  # noqa: BLE001  it failed before, and that was told
        return


def _text(error: BaseException) -> str:
    """An error with its traceback, from where it leaves this package."""
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename.startswith(_HERE):
        at = at.tb_next
    return "".join(traceback.format_exception(type(error), error, at)).rstrip()
