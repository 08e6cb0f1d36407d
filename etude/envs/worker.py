# SPDX-License-Identifier: Apache-2.0
"""EnvWorker: steps copies of an env and writes their rows into step buffers; and the main loop of a worker."""

import contextlib
import os
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from etude.envs import adapters
from etude.envs.adapters import FLAGS, NUMBERS, OFF_POLICY_ACTION, AgentStep, EnvAdapter, EnvValueError, GymAdapter
from etude.envs.buffers import (
    ASLEEP,
    BEGUN,
    BLIND,
    CLOSING,
    ENDED,
    FAILED,
    FIRST,
    GOAL,
    MAKE,
    NO_SEED,
    OVER,
    RESET,
    SHOWN,
    STEP,
    TAKEN,
    TERMINATED,
    TIMED,
    TRUNCATED,
    UNHELD,
    WRONG,
    AgentLayout,
    AgentView,
    SharedBuffers,
    StepBuffers,
    check_alike,
    same_object,
)
from etude.envs.multi_agent import ManyAgentsAdapter, adapt_env
from etude.envs.workers import Workers
from etude.errors import EnvError, EtudeError, SpaceError
from etude.spaces import check_value

MAX_YIELDS: Final = 300
"""How many times to yield the core before sleeping. Waking up takes at least 0.1 ms. With this value, sixteen CartPoles
in two workers on two cores make 125,000 steps a second; with a third of it 110,000; with three times as much, hardly
more."""

MAX_SLEEP: Final = 1.0
"""The longest sleep in seconds. A sleeper that nobody wakes checks for work after that time."""


_ALWAYS = 1 << 62
_HERE = os.path.dirname(__file__)


class EnvWorker:
    """Steps some copies of an env.

    Args:
        make: Makes one env object.
        name: The name of ``make`` in errors.
        envs: The numbers of this worker's copies.
        limits: The maximum length of episodes, and for how many first steps flags must be booleans.
        is_users_env: Whether ``make`` returns an env object of the user, who closes it.
        in_callers_thread: Whether the envs step in the thread that uses the arena. A KeyboardInterrupt is then a
            Ctrl-C, and not an error of the env.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        name: str,
        envs: Sequence[int],
        limits: Workers,
        *,
        is_users_env: bool = False,
        in_callers_thread: bool = False,
    ) -> None:
        self.envs = envs
        self.failures: dict[int, EtudeError] = {}
        """The errors of envs that failed, by env."""
        self.infos: dict[int, Any] = {}
        """By env: the infos of its latest observations that wait for actions."""
        self.end_infos: dict[int, Any] = {}
        """By env: the infos of its latest final observations."""
        self.waiting: dict[int, list[int]] = {env: [] for env in envs}
        """By env: the numbers of the agents that wait for actions."""
        self._make_env, self._name = make, name
        self._is_users_env, self._in_callers_thread = is_users_env, in_callers_thread
        self._max_steps = limits.max_steps
        self._last_step = _ALWAYS if limits.max_steps is None else limits.max_steps
        self._check = _ALWAYS if limits.check == "always" else limits.check
        self._adapters: dict[int, GymAdapter | ManyAgentsAdapter] = {}
        self._ended = 0

    # -- making and closing envs --------------------------------------------------------------------------------

    def make_all(self) -> AgentLayout:
        """Make all envs, and return their layout.

        Raises:
            EnvError: an env can't be made, or the envs are not alike.
            SpaceError: Etude can't handle a space.
        """
        try:
            layouts = [AgentLayout.of(self._make(env)) for env in self.envs]
        except EtudeError:
            raise
        except BaseException as error:
            if self._is_interrupt(error):
                raise
            raise adapters.make_error(self._name, error) from error
        for env, layout in zip(self.envs, layouts, strict=True):
            check_alike(layouts[0], layout, env)
        return layouts[0]

    def _make(self, env: int) -> GymAdapter | ManyAgentsAdapter:
        old = self._adapters.pop(env, None)
        if old is not None and not self._is_users_env:
            self._close_one(old, quiet=True)  # its failure was already reported
        adapter = adapt_env(self._make_env())
        if not isinstance(adapter, GymAdapter):
            adapter.max_steps = self._max_steps
        if any(adapter.env is other.env for other in self._adapters.values()):
            raise same_object(adapter.env)
        self._adapters[env] = adapter
        return adapter

    def _is_interrupt(self, error: BaseException) -> bool:
        """Whether an error is a Ctrl-C, which is raised unchanged, rather than an error of the env."""
        return self._in_callers_thread and isinstance(error, KeyboardInterrupt)

    def attach(self, buffers: StepBuffers, note_reset: Callable[[], None] | None = None) -> None:
        """Set the buffers that `step` and `begin` write to.

        Args:
            buffers: The step buffers.
            note_reset: Called before each reset that follows an episode or the making of an env.
        """
        self._buffers, self._layout, self._note_reset = buffers, buffers.layout, note_reset
        layout, shown, ended = buffers.layout, buffers.shown, buffers.ended
        self._seat = {agent: seat for seat, agent in enumerate(layout.seated)}
        views = [
            AgentView(group, i, *columns)
            for group, *columns in zip(layout.groups, shown.obs, ended.obs, buffers.action, strict=True)
            for i in range(len(group.agents))
        ]
        self._views = [views[self._seat[agent]] for agent in range(len(layout.agents))]
        self._view = views[0]  # the only one if there is one agent
        # Memory views read and write one number faster than arrays.
        self._reward: Any = shown.reward.reshape(-1).data
        self._end_reward: Any = ended.reward.reshape(-1).data
        self._flags: Any = shown.flags.reshape(-1).data
        self._end_flags: Any = ended.flags.reshape(-1).data
        self._env_t, self._end_t = shown.env_t.data, ended.env_t.data
        self._episode, self._end_episode = shown.episode.data, ended.episode.data
        self._has_ends = dict.fromkeys(self.envs, True)  # a worker that died may have left some

    def close(self) -> None:
        """Close all envs. If closing one of them fails, a warning is logged, because nothing is lost."""
        opened, self._adapters = list(self._adapters.values()), {}
        if self._is_users_env:
            return
        with contextlib.ExitStack() as stack:
            for adapter in reversed(opened):
                stack.callback(self._close_one, adapter)

    def _close_one(self, adapter: GymAdapter | ManyAgentsAdapter, *, quiet: bool = False) -> None:
        try:
            adapter.close()
        except BaseException as error:
            if self._is_interrupt(error):
                raise
            if not quiet:
                adapters.warn_of_closing(self._name, error)

    def adapters(self) -> list[EnvAdapter]:
        """The adapters of all envs, in the order of their numbers."""
        return [self._adapters[env] for env in self.envs]

    def env_at(self, env: int) -> Any:
        """The object of ``env``; None while it is being made again."""
        adapter = self._adapters.get(env)
        return None if adapter is None else adapter.env

    # -- steps and resets ---------------------------------------------------------------------------------------

    def step(self, env: int) -> int:
        """Step ``env`` with the actions in the buffers, write its rows, and return its status bits."""
        try:
            adapter = self._adapters[env]
            return self._step_gym(env, adapter) if type(adapter) is GymAdapter else self._step(env, adapter)
        except BaseException as error:
            if self._is_interrupt(error):
                raise
            adapter = self._adapters[env]
            return self._failed(env, "a reset" if adapter.over else "a step", error)

    def begin(self, env: int, seed: int | None, *, make: bool = False) -> int:
        """Reset ``env``, write its rows, and return its status bits.

        Args:
            env: The number of the env.
            seed: The seed of the reset; None: none.
            make: Whether to make the env again first.
        """
        try:
            adapter = self._make(env) if make else self._adapters[env]
            if make:
                check_alike(self._layout, AgentLayout.of(adapter), env)
                if self._note_reset is not None:
                    self._note_reset()
            status = BEGUN | self._reset(env, adapter, seed)
            if env == 0 and type(adapter) is GymAdapter:  # the others are alike
                adapters.warn_of_masks(adapter.env, adapter.obs_spaces[0], self.infos[env])
            return status
        except BaseException as error:
            if self._is_interrupt(error):
                raise
            return BEGUN | self._failed(env, "a reset" if env in self._adapters else "being made", error)

    def _failed(self, env: int, doing: str, error: BaseException) -> int:
        """Store the error of ``env`` in `failures`, and return the env's status bits.

        Args:
            env: The number of the env.
            doing: What it failed in, for the message.
            error: The error that it raised.
        """
        ended, self._ended = self._ended, 0
        if adapters.unpacked_wrongly(error):
            error = adapters.old_api(self._adapters[env].env, f"unpacking what it returned failed ({error})")
        if isinstance(error, EtudeError):
            kind = next((kind for kind in (SpaceError, EnvValueError) if isinstance(error, kind)), EnvError)
            self.failures[env] = kind(f"env {env}: {error}")
            return ended | FAILED | WRONG
        self.failures[env] = EnvError(f"env {env} failed in {doing}:\n{_formatted(error)}")
        return ended | FAILED

    def _begin_next(self, env: int, adapter: GymAdapter | ManyAgentsAdapter, ended: int) -> int:
        """Reset an env whose episode is over, and return its status bits; ``ended`` are those of its last rows."""
        self._ended = ended  # these bits are set even if the reset fails
        if self._note_reset is not None:
            self._note_reset()
        status = self._reset(env, adapter, None)
        self._ended = 0
        return status | ended

    def _reset(self, env: int, adapter: GymAdapter | ManyAgentsAdapter, seed: int | None) -> int:
        if type(adapter) is GymAdapter:
            return self._reset_gym(env, adapter, seed)
        rows = adapter.reset(seed)
        self.infos[env] = adapter.infos
        return self._write(env, adapter, rows)

    # -- one agent, without rows --------------------------------------------------------------------------------

    def _reset_gym(self, env: int, adapter: GymAdapter, seed: int | None) -> int:
        obs, self.infos[env] = adapters.reset_env(adapter.env, seed)
        adapter.env_t, adapter.over = 0, False
        view = self._view
        view.show(env, obs)
        self._reward[env] = 0.0
        return SHOWN | FIRST

    def _step_gym(self, env: int, adapter: GymAdapter) -> int:
        view = self._view
        result = adapter.env.step(view.read(env))
        try:
            obs, reward, terminated, truncated, infos = result
        except (TypeError, ValueError):
            raise adapters.bad_step_error(adapter.env, result) from None
        adapter.env_t = t = adapter.env_t + 1
        if reward.__class__ not in NUMBERS:
            adapters.check_reward(reward)
        if terminated.__class__ not in FLAGS or truncated.__class__ not in FLAGS:
            adapters.check_flags(terminated, truncated, allow_numbers=t > self._check)
        if not (terminated or truncated) and t < self._last_step:
            view.show(env, obs)
            self._reward[env] = reward
            self.infos[env] = infos
            return SHOWN | self._taken_in(infos, env, view) if infos else SHOWN
        adapter.over = True
        view.end(env, obs)
        self._end_reward[env] = reward
        cut = not terminated and t >= self._last_step
        flags = (TERMINATED if terminated else 0) | (TRUNCATED if truncated or cut else 0)
        self.end_infos[env] = infos
        taken = self._taken_in(infos, env, view) if infos else 0
        return self._begin_next(env, adapter, ENDED | OVER | flags | taken)

    def _step(self, env: int, adapter: ManyAgentsAdapter) -> int:
        views = self._views
        if self._has_ends[env]:
            self._buffers.ended.flags[env] = 0
            self._has_ends[env] = False
        self._end_episode[env] = self._episode[env]
        try:
            rows = adapter.step({agent: views[agent].read(env) for agent in self.waiting[env]})
        except Exception:
            if adapter.ends:
                self._end_t[env] = adapter.env_t
                self._ended = self._write(env, adapter, adapter.ends)
            raise
        if self._max_steps is not None and adapter.env_t >= self._max_steps and not adapter.over:
            rows = adapter.truncate(rows)
        self._end_t[env] = adapter.env_t
        self.infos[env] = self.end_infos[env] = adapter.infos
        status = self._write(env, adapter, rows)
        if not adapter.over:
            return status
        status |= OVER | self._write_unacted_reward(env, adapter.unacted_reward())
        self._episode[env] += 1
        return self._begin_next(env, adapter, status)

    # -- rows ---------------------------------------------------------------------------------------------------

    def _write(self, env: int, adapter: ManyAgentsAdapter, rows: Iterable[AgentStep]) -> int:
        status = 0
        waiting = []
        self._buffers.shown.flags[env] = 0
        first_seat = env * len(self._views)
        try:
            for agent, obs, reward, terminated, truncated, first, taken in rows:
                view, seat = self._views[agent], first_seat + self._seat[agent]
                flags = SHOWN if taken is None else SHOWN | self._store_taken(env, view, taken)
                if obs is None:
                    flags |= BLIND
                if terminated or truncated:
                    flags |= (TERMINATED if terminated else 0) | (TRUNCATED if truncated else 0)
                    if obs is not None:
                        view.end(env, obs)
                    self._end_reward[seat] = reward
                    self._end_flags[seat] = flags
                    self._has_ends[env] = True
                    status |= ENDED | flags & TAKEN
                else:
                    flags |= FIRST if first else 0
                    view.show(env, obs)
                    self._reward[seat] = reward
                    self._flags[seat] = flags
                    waiting.append(agent)
                    status |= flags
        except SpaceError as error:
            raise SpaceError(f"agent {self._layout.agents[agent]!r}: {error}") from None
        self._env_t[env] = adapter.env_t
        self.waiting[env] = waiting
        return status

    def _write_unacted_reward(self, env: int, rewards: dict[int, float]) -> int:
        if not rewards:
            return 0
        self._buffers.unacted_reward[env] = np.nan
        for agent, reward in rewards.items():
            self._buffers.unacted_reward[env, self._seat[agent]] = reward
        return UNHELD

    def _taken_in(self, info: Any, env: int, view: AgentView) -> int:
        if info.__class__ is not dict:
            adapters.check_info(info)
        return self._store_taken(env, view, info.get(OFF_POLICY_ACTION))

    def _store_taken(self, env: int, view: AgentView, action: Any) -> int:
        if action is None:
            return 0
        check_value(view.action_space, action, OFF_POLICY_ACTION)
        view.keep(env, action)
        return TAKEN


def envs_of(worker: int, per_worker: int) -> range:
    """The numbers of a worker's envs."""
    return range(worker * per_worker, (worker + 1) * per_worker)


def _formatted(error: BaseException) -> str:
    """Format an error with its traceback, without the leading frames of this package."""
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename.startswith(_HERE):
        at = at.tb_next
    return "".join(traceback.format_exception(type(error), error, at)).rstrip()


# -- the loop -------------------------------------------------------------------------------------------------------


class WakeEvent:
    """An event between two processes or threads: one waits on ``reader``, the other calls `set`.

    It can be pickled for a process that inherits its file descriptors; both then share the event.

    Args:
        fds: The file descriptors of an event that another process made; None: a new event.
    """

    def __init__(self, fds: Sequence[int] | None = None) -> None:
        ends = socket.socketpair() if fds is None else [socket.socket(fileno=fd) for fd in fds]
        self.reader, self.writer = ends
        for end in ends:
            end.setblocking(False)

    def fds(self) -> list[int]:
        """Its file descriptors."""
        return [self.reader.fileno(), self.writer.fileno()]

    def __reduce__(self) -> tuple[Any, ...]:
        return WakeEvent, (self.fds(),)

    def set(self) -> None:
        """Wake the side that waits. If it is not waiting, its next wait returns at once."""
        try:
            self.writer.send(b"!")
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):  # already set, or the other side is gone
            return

    def clear(self) -> None:
        """Reset the event."""
        try:
            self.reader.recv(65536)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close both ends."""
        self.reader.close()
        self.writer.close()


def fence() -> Callable[[], None]:
    """Return a function that is a memory fence for one thread.

    The thread's writes before the call become visible to other processors before its reads after the call. The side
    that is about to sleep sets a flag and then checks for work again; the other side writes work and then checks the
    flag. Without a fence in between, each could miss what the other wrote.
    """
    lock = threading.Lock()
    lock.acquire()

    def cross() -> None:
        lock.release()  # in this order: a read after an acquire can't overtake a write before a release
        lock.acquire()

    return cross


class Spin:
    """Polls for work for a short time before going to sleep, and yields the core between two checks.

    Polling is faster than being woken, as long as every process with work gets a core. It is therefore suspended for
    0.1 s after a yield took more than 1 ms, because another process then used the core. Without yielding, the envs
    would not get the core.
    """

    def __init__(self) -> None:
        self._left = 0
        self._now = self._rest = 0.0

    def begin(self) -> None:
        """Start waiting."""
        self._now = time.perf_counter()
        self._left = MAX_YIELDS if self._now > self._rest else 0

    def yield_core(self) -> bool:
        """Yield the core. Returns True to check for work again, or False to sleep."""
        if not self._left:
            return False
        self._left -= 1
        os.sched_yield()
        now = time.perf_counter()
        if now - self._now > 1e-3:
            self._left, self._rest = 0, now + 0.1
        self._now = now
        return True


def wait_for(ends: Sequence[Any]) -> Callable[[float], list[int]]:
    """Return a function that waits until some of ``ends`` (sockets or file descriptors) are readable.

    The function takes the longest wait in seconds, and returns the file descriptors that are readable.
    """
    fds = [end if isinstance(end, int) else end.fileno() for end in ends]
    if not hasattr(select, "poll"):
        return lambda seconds: select.select(fds, [], [], seconds)[0]
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return lambda seconds: [fd for fd, _ in poll.poll(max(0.0, seconds * 1e3))]


def work(
    worker: EnvWorker,
    buffers: SharedBuffers,
    number: int,
    arena_event: WakeEvent,
    *,
    spin: Spin | None,
    sleep: Callable[[], bool],
) -> None:
    """The main loop of a worker: execute orders until the arena closes or ``sleep`` returns False.

    Args:
        worker: Steps the envs.
        buffers: Contains the orders.
        number: The number of this worker.
        arena_event: Wakes the arena.
        spin: How to poll before sleeping; None for threads, which would hold Python's lock meanwhile.
        sleep: Sleeps until this worker is woken; returns False if the arena is gone.
    """
    # Memory views read and write one number faster than arrays.
    words, asked, done = buffers.words.data, buffers.asked.data, buffers.done.data
    order, seed, status = buffers.order.data, buffers.seed.data, buffers.status.data
    total, asleep, current = buffers.total.data, buffers.asleep.data, buffers.current.data
    doing = buffers.doing.data
    began_at: Any = buffers.began.data
    cross = fence()
    closing: int = CLOSING
    is_timed = words[TIMED]
    num_done = total[number]
    was_idle = False

    def note_reset() -> None:
        doing[number], began_at[number] = RESET, time.monotonic()

    worker.attach(buffers, note_reset)
    while not words[closing]:
        served = False
        for env in worker.envs:
            index = asked[env]
            if index == done[env]:
                continue
            what = doing[number] = order[env]
            if is_timed:
                began_at[number] = time.monotonic()
            current[number] = env
            if what == STEP:
                bits = worker.step(env)
            else:
                bits = worker.begin(env, None if seed[env] == NO_SEED else seed[env], make=what == MAKE)
            if bits & FAILED:
                buffers.set_failure(env, worker.failures.pop(env))
            status[env] = bits
            done[env] = index
            num_done += 1
            total[number] = num_done
            cross()
            if words[ASLEEP] and sum(total) >= words[GOAL]:
                arena_event.set()
            served = True
            if words[closing]:
                return
        if served:
            was_idle = False
            continue
        if not was_idle:
            current[number] = -1
            was_idle = True
            if spin is not None:
                spin.begin()
        if spin is not None and spin.yield_core():
            continue
        asleep[number] = 1
        cross()
        is_idle = all(asked[env] == done[env] for env in worker.envs) and not words[closing]
        if is_idle and not sleep():
            return
        asleep[number] = 0
