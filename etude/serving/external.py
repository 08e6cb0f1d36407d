# SPDX-License-Identifier: Apache-2.0
"""ExternalEnv: an arena whose envs are clients that connect over HTTP, ask for actions and report the results."""

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
"""Seconds between two checks that the server still runs, while the run waits for clients."""


@dataclasses.dataclass(eq=False)
class _Client(Session):
    """A client's session, which occupies one slot."""

    slot: int
    phase: Literal["new", "asks", "waits", "acts"] = "new"
    """new: its next step begins an episode. asks: its step waits to be taken. waits: its step was taken and needs an
    action. acts: it has its action."""
    is_abandoned: bool = False
    """Whether the run was reset during its episode, so that its next step is answered with None."""
    answer: "Future[Any] | None" = None
    """The nested action for its last step; None tells it to begin a new episode."""


class ClientService:
    """The clients' steps and the actions for them; see `etude.serving.web.Service` for the other methods.

    The server's thread and the arena's thread may call it at the same time.

    Args:
        obs_space: The space of one observation.
        action_space: The space of one action.
        limit: Maximum number of clients.
        seconds: See `Sessions`.
        max_body: See `Service`.
        is_local: See `Service`.
    """

    def __init__(
        self, obs_space: Space, action_space: Space, limit: int, seconds: float, max_body: int, *, is_local: bool
    ) -> None:
        self.max_body, self.is_local, self.metrics = max_body, is_local, ServingMetrics()
        self._obs_space, self._action_space, self._limit = obs_space, action_space, limit
        self._changed = threading.Condition()  # its lock guards all attributes below
        self._sessions: Sessions[_Client] = Sessions(limit, seconds, self._dropped)
        self._clients: dict[int, _Client] = {}  # by slot
        self._waiting: dict[int, tuple[Step, bool]] = {}  # steps not yet taken, and whether they begin an episode
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
            client = self._sessions.add(_Client(free[0] if free else -1))  # which raises if no slot is free
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
        async with repeating(min(1.0, self._sessions.seconds), self._housekeeping):
            yield

    async def _housekeeping(self) -> None:
        with self._changed:
            self._sessions.expire()

    # -- the arena's thread ---------------------------------------------------------------------------------------

    def take(self, server: threading.Thread) -> tuple[list[int], dict[int, Step], dict[int, tuple[Step, bool]]]:
        """Take what clients have reported, and wait until there is a step.

        Returns three parts: the slots whose client disappeared during an episode; the last steps of episodes; and the
        steps that wait for an action, each with whether it begins an episode.

        Raises:
            EnvError: the server's thread has ended.
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
        """Answer the clients in these slots with nested actions."""
        with self._changed:
            for slot, action in zip(slots, actions, strict=True):
                client = self._clients[slot]
                client.phase = "acts"
                self._set(client, action)

    def abandon(self) -> None:
        """Discard all running episodes; each client is told by its next answer to begin a new one."""
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
        """Refuse the waiting requests and all later ones."""
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
    """An arena whose envs are clients: games or simulators, in any language, that ask for actions over HTTP.

    Pass it as the ``env`` of a config with the same ``num_envs``; the algorithm closes it. Clients may connect and
    leave at any time; the run waits while there are none. If a client disappears, its unfinished episode is cut. The
    page "Serve a policy" of the docs describes the protocol. The methods are those of `etude.envs.Arena`.

    Args:
        observation_space: The space of one observation.
        action_space: The space of one action.
        num_envs: Maximum number of clients at a time, at least 1.
        host: Address to listen at. The default accepts clients on this machine only.
        port: Port to listen at; 0 is any free port, which `url` shows.
        session_seconds: Seconds without a request, above 0, after which a client is dropped, unless it waits for an
            action.
        max_body: Maximum size of a request in bytes, at least 1.

    Raises:
        SettingsError: the server can't listen at the port, a package is missing, or an argument has the wrong
            type or is out of range.
        SpaceError: Etude does not support one of the spaces.
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
        leaves(action_space, col.ACTION)  # raises if the space is not supported
        self._nest = Nester(action_space, col.ACTION)
        self._turns: list[Turn] = []
        self._open: Turn | None = None
        self._is_reset = False
        self._num_lost = 0
        spaces = (observation_space, action_space)
        self._service = ClientService(*spaces, num_envs, session_seconds, max_body, is_local=host in LOCAL_HOSTS)
        self._server = WebServer(self._service, host, port)
        self.url = self._server.url
        """The URL that clients connect to."""
        self._thread = threading.Thread(target=self._server.serve, name="etude-external-env", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return short(self, self.url, num_envs=self.num_envs)

    def __reduce__(self) -> NoReturn:
        raise EnvError("an ExternalEnv can't be sent to another process: its run is of the local engine.")

    def reset(self, seed: int | None = None) -> None:
        """Discard the running episodes; each client is told by its next answer to begin a new one. ``seed`` is not
        used: clients have their own."""
        self._turns, self._open, self._is_reset = [], None, True
        self._service.abandon()

    def recv(self) -> list[Turn]:
        """See `Arena.recv`. Waits until a client reports a step."""
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
        """Make a turn of the clients' steps, by slot."""
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
        if turn is not self._open:
            raise EnvError("this turn does not wait for actions: send() takes the turn of the last recv() once.")
        self._open = None
        lists, rows = as_lists(self.kinds[0].action_space, action, col.ACTION), range(len(turn.slots))
        actions = [self._nest({name: values[row] for name, values in lists.items()}) for row in rows]
        self._service.answer(turn.slots.tolist(), actions)

    def state_dict(self) -> dict[str, Any]:
        """Say that resuming begins new episodes, because the clients have the state."""
        return {"how": "new episodes", "why": "the envs are clients of an ExternalEnv"}

    def load_state_dict(self, state: dict[str, Any]) -> str:
        return f"new episodes: {self.state_dict()['why']}"

    def env_at(self, env: int) -> None:
        """None: the envs are in other processes."""

    def info_of(self, turn: Turn, slot: int) -> None:
        """None: clients send no infos."""

    def stats(self) -> dict[str, float]:
        """``faulty_episodes``: the episodes cut since the last call because their client disappeared."""
        lost, self._num_lost = self._num_lost, 0
        return {"faulty_episodes": float(lost)}

    def close(self) -> None:
        """Stop the server, and refuse the waiting clients. The arena can't be used again."""
        self._is_reset, self._open = False, None
        self._service.shut()
        self._server.stop()
        self._thread.join()
