# SPDX-License-Identifier: Apache-2.0
"""ExternalEnv: an arena whose envs are clients that connect over HTTP, ask for actions and report what they bring."""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.display import short
from etude.envs import Kind, Turn
from etude.errors import EnvError
from etude.serving.protocol import SESSION, RequestError, Step, as_lists, check_fields, read_step
from etude.serving.web import ServingMetrics, Session, Sessions, WebServer, repeating
from etude.settings import FloatAbove0, IntFrom1, Port, check_arguments
from etude.spaces import Nester, Space, leaf_dtype, leaf_shape, leaves, space_to_json
from etude.urls import LOCAL_HOSTS

if TYPE_CHECKING:
    import torch

_POLL: Final = 1.0
"""Seconds after which a run that waits for clients sees whether there is a server still."""


@dataclasses.dataclass(eq=False)
class _Client(Session):
    """A client, which is one slot."""

    slot: int
    phase: Literal["new", "asks", "waits", "acts"] = "new"
    """It is to begin an episode; its step was not taken yet; it was, and is to be answered; it has its action."""
    is_abandoned: bool = False
    """It acts in an episode that the run is no longer interested in."""
    answer: "Future[Any] | None" = None
    """The nested action; None where the episode is to begin anew."""


class ClientService:
    """What clients have said, and what they are answered; see `etude.serving.web.Service`. For two threads.

    Args:
        obs_space: Of one observation.
        action_space: Of one action.
        limit: The most clients.
        seconds: See `Sessions`.
        max_body: See `Service`.
        is_local: See `Service`.
    """

    def __init__(
        self, obs_space: Space, action_space: Space, limit: int, seconds: float, max_body: int, *, is_local: bool
    ) -> None:
        self.max_body, self.is_local, self.metrics = max_body, is_local, ServingMetrics()
        self._obs_space, self._action_space, self._limit = obs_space, action_space, limit
        self._changed = threading.Condition()  # its lock is for all that follows
        self._sessions: Sessions[_Client] = Sessions(limit, seconds, self._dropped)
        self._clients: dict[int, _Client] = {}  # by slot
        self._waiting: dict[int, tuple[Step, bool]] = {}  # steps that were not taken, and if they begin an episode
        self._ended: dict[int, Step] = {}
        self._lost: list[int] = []
        self._is_shut = False

    # -- requests, in the server's thread -------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        spaces = {"obs_space": space_to_json(self._obs_space), "action_space": space_to_json(self._action_space)}
        return {"policies": {"main": {**spaces, "needs_session": True, "needs_reward": True}}}

    def gauges(self) -> dict[str, float]:
        return {"etude_sessions": len(self._sessions)}

    def open(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        check_fields(fields, ())
        with self._changed:
            if self._is_shut:
                raise _ended()
            self._sessions.expire()
            free = [slot for slot in range(self._limit) if slot not in self._clients]
            client = self._sessions.add(_Client(free[0] if free else -1))  # which refuses where none is free
            self._clients[client.slot] = client
            return {SESSION: client.id, "seconds": self._sessions.seconds}

    def close(self, session_id: str) -> dict[str, Any]:
        with self._changed:
            self._sessions.drop(self._sessions.find(session_id))
            return {SESSION: session_id}

    async def act(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        if fields.get(SESSION) is None:
            raise RequestError(SESSION, "is missing: open one by POST /sessions.")
        with self._changed:
            if self._is_shut:
                raise _ended()
            client = self._sessions.find(fields[SESSION])
            is_first = client.phase == "new"
            step = read_step(fields, self._obs_space, is_first=is_first, needs_reward=True)
            self._sessions.touch(client)
            if client.is_abandoned or step.done:
                if not client.is_abandoned:
                    self._ended[client.slot] = step
                    self._changed.notify()
                client.phase, client.is_abandoned = "new", False
                return {col.ACTION: None}
            client.phase, client.is_busy = "asks", True
            client.answer = answer = Future[Any]()
            self._waiting[client.slot] = step, is_first
            self._changed.notify()
        try:
            return {col.ACTION: await asyncio.wrap_future(answer)}
        finally:
            with self._changed:
                client.is_busy = False
                self._sessions.touch(client)

    def _dropped(self, client: _Client) -> None:
        del self._clients[client.slot]
        if client.phase == "acts" and not client.is_abandoned:
            self._lost.append(client.slot)
            self.metrics.count("etude_episodes_total", how="dropped")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with repeating(min(1.0, self._sessions.seconds), self._look_after):
            yield

    async def _look_after(self) -> None:
        with self._changed:
            self._sessions.expire()

    # -- the arena's thread ---------------------------------------------------------------------------------------

    def take(self, server: threading.Thread) -> tuple[list[int], dict[int, Step], dict[int, tuple[Step, bool]]]:
        """What has come: slots whose client has vanished in an episode, ends, and steps that wait for an action.

        Waits until there is an end or a step.

        Raises:
            EnvError: the thread of the server has ended.
        """
        with self._changed:
            while not (self._ended or self._waiting):
                self._changed.wait(_POLL)
                if not server.is_alive():
                    raise EnvError("the server of this ExternalEnv has ended: make another.")
            found = self._lost, self._ended, self._waiting
            self._lost, self._ended, self._waiting = [], {}, {}
            for slot in found[2]:
                self._clients[slot].phase = "waits"
            return found

    def answer(self, slots: Sequence[int], actions: Sequence[Any]) -> None:
        """Give clients their actions."""
        with self._changed:
            for slot, action in zip(slots, actions, strict=True):
                client = self._clients[slot]
                client.phase = "acts"
                self._set(client, action)

    def abandon(self) -> None:
        """Let all episodes that run begin anew."""
        with self._changed:
            self._lost, self._ended = [], {}
            for client in self._clients.values():
                if client.phase == "acts":
                    client.is_abandoned = True
                elif client.phase == "waits" or not self._waiting.get(client.slot, (None, True))[1]:
                    self._waiting.pop(client.slot, None)
                    client.phase = "new"
                    self._set(client, None)

    def shut(self) -> None:
        """Refuse the requests that wait, and all later ones."""
        with self._changed:
            self._is_shut = True
            for client in self._clients.values():
                if client.phase in ("asks", "waits"):
                    client.phase = "new"
                    self._set(client, _ended())

    def _set(self, client: _Client, result: Any) -> None:
        answer = client.answer
        assert answer is not None
        if not answer.set_running_or_notify_cancel():
            return  # the server has cancelled it
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)


def _ended() -> RequestError:
    return RequestError(SESSION, "belongs to a run that has ended.", 410)


class ExternalEnv:
    """An arena whose envs are clients: a game or a simulator, in any language, that asks for actions over HTTP.

    It is given as the ``env`` of a config, whose ``num_envs`` is the same, and is closed with the algorithm. Clients
    may connect and leave at any time; the run waits while there is none. The unfinished episode of a client that
    vanishes is cut. The page "Serve a policy" of the docs has the protocol. The methods are those of
    `etude.envs.Arena`.

    Args:
        observation_space: Of one observation.
        action_space: Of one action.
        num_envs: The most clients at one time, at least 1.
        host: The address to listen at; the default is for this machine alone.
        port: To listen at; 0 is any that is free: `url` has it.
        session_seconds: A client from which nothing has come for so long, though it had its action, has vanished.
        max_body: The most bytes of a request.

    Raises:
        SettingsError: the port can't be listened at, a package is missing, or an argument has the wrong
            type or is out of range.
        SpaceError: a space is of a kind that Etude can't handle.
    """

    device: "torch.device | None" = None

    def __init__(
        self,
        observation_space: Space,
        action_space: Space,
        *,
        num_envs: int = 1,
        host: str = "127.0.0.1",
        port: int = 0,
        session_seconds: float = 60.0,
        max_body: int = 16 * 2**20,
    ) -> None:
        check_arguments(
            "ExternalEnv",
            num_envs=(IntFrom1, num_envs),
            host=(str, host),
            port=(Port, port),
            session_seconds=(FloatAbove0, session_seconds),
            max_body=(IntFrom1, max_body),
        )
        self.kinds = (Kind(observation_space, action_space, range(num_envs)),)
        self.num_slots = self.num_envs = num_envs
        self.env_of: NDArray[np.int64] = np.arange(num_envs)
        self.agents: list[str | None] = [None] * num_envs
        parts = leaves(observation_space, col.OBS)
        self._nothing: Columns = {n: np.zeros((1, *leaf_shape(leaf)), leaf_dtype(leaf)) for n, leaf in parts.items()}
        leaves(action_space, col.ACTION)  # raises where it can't be handled
        self._nest = Nester(action_space, col.ACTION)
        self._turns: list[Turn] = []
        self._open: Turn | None = None
        self._is_reset = False
        self._num_lost = 0
        spaces = (observation_space, action_space)
        self._service = ClientService(*spaces, num_envs, session_seconds, max_body, is_local=host in LOCAL_HOSTS)
        self._server = WebServer(self._service, host, port)
        self.url = self._server.url
        """Where clients connect."""
        self._thread = threading.Thread(target=self._server.serve, name="etude-external-env", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return short(self, self.url, num_envs=self.num_envs)

    def __reduce__(self) -> NoReturn:
        raise EnvError("an ExternalEnv can't be sent to another process: its run is of the local engine.")

    def reset(self, seed: int | None = None) -> None:
        """Let clients begin new episodes; those in the middle of one are told with their next answer. Seeds are
        theirs."""
        self._turns, self._open, self._is_reset = [], None, True
        self._service.abandon()

    def recv(self) -> list[Turn]:
        """See `Arena.recv`. Waits for a client, however long that takes."""
        if self._open is not None:
            return self._turns
        if not self._is_reset:
            raise EnvError("the arena was not reset, or is closed: call reset() before recv().")
        lost, ended, waiting = self._service.take(self._thread)
        self._turns = []
        if ended:
            self._turns.append(self._turn(ended))
            self._turns[0].terminated = np.array([step.terminated for step in ended.values()])
            self._turns[0].truncated = np.array([step.truncated for step in ended.values()])
            self._turns[0].waits = False
        if waiting:
            self._open = self._turn({slot: step for slot, (step, _) in waiting.items()})
            self._open.first = np.array([is_first for _, is_first in waiting.values()])
            self._turns.append(self._open)
        if lost:
            self._turns[0].lost = np.array(lost)
            self._num_lost += len(lost)
        return self._turns

    def _turn(self, steps: Mapping[int, Step]) -> Turn:
        """What clients show, by slot."""
        obs = [self._nothing if step.obs is None else step.obs for step in steps.values()]
        blind = np.array([step.obs is None for step in steps.values()])
        return Turn(
            np.array(list(steps)),
            {name: np.concatenate([row[name] for row in obs]) for name in self._nothing},
            np.array([step.reward or 0.0 for step in steps.values()]),
            None,
            None,
            blind=blind if blind.any() else None,
        )

    def send(self, turn: Turn, action: Columns) -> None:
        """See `Arena.send`."""
        if turn is not self._open:
            raise EnvError("this turn does not wait for actions: send() takes the turn of the last recv() once.")
        self._open = None
        lists, rows = as_lists(self.kinds[0].action_space, action, col.ACTION), range(len(turn.slots))
        actions = [self._nest({name: values[row] for name, values in lists.items()}) for row in rows]
        self._service.answer(turn.slots.tolist(), actions)

    def state_dict(self) -> dict[str, Any]:
        """See `Arena.state_dict`: clients have the state."""
        return {"how": "new episodes", "why": "the envs are clients of an ExternalEnv"}

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """See `Arena.load_state_dict`."""
        return f"new episodes: {self.state_dict()['why']}"

    def env_at(self, env: int) -> None:
        """See `Arena.env_at`: they live elsewhere."""

    def info_of(self, turn: Turn, slot: int) -> None:
        """See `Arena.info_of`: clients send none."""

    def stats(self) -> dict[str, float]:
        """``faulty_episodes``: how many were cut since this was last asked, as their client has vanished."""
        lost, self._num_lost = self._num_lost, 0
        return {"faulty_episodes": float(lost)}

    def close(self) -> None:
        """End the server; clients that wait are refused. It can't be used again."""
        self._is_reset, self._open = False, None
        self._service.shut()
        self._server.stop()
        self._thread.join()
