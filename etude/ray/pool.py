# SPDX-License-Identifier: Apache-2.0
"""A pool of runner actors, which waits for their results and replaces those that are lost."""

import contextlib
import logging
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

import ray
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from etude.algorithms.ray_config import Ray
from etude.errors import EngineError
from etude.ray.faults import cause_of, first_line, raise_from, was_lost
from etude.ray.runner_actor import RunnerActor
from etude.ray.start import check_connected, connection

_log = logging.getLogger("etude.ray")


class Request(NamedTuple):
    """A call of an actor's method whose result is still to come."""

    number: int
    """The number of the call in the pool; later ones are higher."""
    steps: int
    """The steps or episodes in the result; 0: the actor only prepares."""
    key: Any
    """The kind of result."""
    answer: Any
    """Ray's reference to the result."""


@dataclass(slots=True)
class Member:
    """One actor of a pool."""

    number: int
    life: int
    """The number of earlier actors with this number."""
    actor: Any
    requests: deque[Request] = field(default_factory=deque)
    """In the order in which the actor serves them."""
    since: float = 0.0
    """When it could start with the first of these, in seconds of `time.monotonic`."""
    pace: float | None = None
    """Seconds per requested step: a moving average."""
    is_late: bool = False
    """Whether its next result is so late that the collection does not wait for it."""
    has_begun: bool = False
    """Whether it has received the modules."""
    sent: int = -1
    """The last version of the weights that it was sent."""
    node: str = ""
    pid: int = 0


class RunnerPool:
    """Runner actors of one kind, with the requests whose results are still to come.

    Lost actors are replaced here and not by Ray's ``max_restarts``: a new actor's seed depends on its life, and it
    first needs the newest modules.

    Args:
        kind: The name of the actors in messages.
        num: The number of actors.
        num_gpus: The GPUs of each actor.
        config: A reference to the algorithm's settings, see `RunnerActor`.
        settings: The actors' other resources, and whether, and how often, lost ones are replaced.
        renewed: Called with each member that replaces a lost one.
    """

    def __init__(
        self,
        kind: str,
        num: int,
        num_gpus: float,
        config: Any,
        settings: Ray,
        renewed: Callable[[Member], None],
    ) -> None:
        self._kind, self._num_gpus, self._config, self._settings = kind, num_gpus, config, settings
        self._renewed, self._home = renewed, connection()
        self._num_requests = 0
        self.restarts = 0
        """The number of replaced actors, over the lifetime."""
        self.counts: defaultdict[str, float] = defaultdict(float)
        """Counts of what was lost since they were last cleared, by name."""
        self.has_lost_inputs = False
        """Whether an object sent to actors was lost, perhaps the weights: store it in the object store again."""
        self.members = [Member(number, 0, self._started()) for number in range(num)]

    def _started(self) -> Any:
        """A new actor."""
        own, remote = self._settings, ray.remote(RunnerActor)
        resources = dict(own.resources_per_runner or {})
        options = {"num_cpus": own.cpus_per_runner, "num_gpus": self._num_gpus, "resources": resources}
        device = "cuda" if self._num_gpus else "cpu"
        return remote.options(**options).remote(self._config, device, own.step_timeout)

    def check_connected(self) -> None:
        """Raise an EngineError if this process has lost its connection to the actors' cluster."""
        check_connected(self._home)

    def request(self, member: Member, answer: Any, *, steps: int = 0, key: Any = None) -> None:
        """Register a call; see `Request`."""
        self._num_requests += 1
        if not member.requests:
            member.since = monotonic()
        member.requests.append(Request(self._num_requests, steps, key, answer))

    def next(self, timeout: float) -> tuple[Member, Request, Any] | None:
        """The next result with its request, the oldest first. None: there was no result within ``timeout`` seconds, or
        an actor was lost.

        Raises:
            EngineError: actors were lost too often, or all of them.
            Exception: raised by an actor; a note says where.
        """
        heads = {member.requests[0].answer: member for member in self.members if member.requests}
        refs = sorted(heads, key=lambda ref: heads[ref].requests[0].number)
        ready = ray.wait(refs, num_returns=1, timeout=timeout, fetch_local=False)[0] if refs else []
        if not ready:
            return None
        member = heads[ready[0]]
        try:
            answer = ray.get(ready[0])
        except RayError as error:
            self.failed(member, error)
            return None
        return member, self._done(member), answer

    def _done(self, member: Member) -> Request:
        member.is_late, member.since = False, monotonic()
        return member.requests.popleft()

    def failed(self, member: Member, error: RayError) -> None:
        """Handle a request that failed: replace the actor if it is gone, and count what is lost.

        Raises:
            EngineError: actors were lost too often, or all of them.
            Exception: raised by the actor; a note says where.
        """
        cause = cause_of(error)
        if isinstance(cause, ObjectLostError) and member.requests and member.requests[0].steps:
            request = self._done(member)  # its result or arguments are lost, but not the actor itself
            self.counts["lost_fragments"] += 1
            if cause is error:  # its result: it has made these steps
                self.counts["lost_steps"] += request.steps
            member.sent, self.has_lost_inputs = -1, True
            _log.warning("%s: a fragment or its inputs are lost: %s", self.name(member), first_line(cause))
        elif was_lost(cause):
            self._replace(member, cause)
        else:
            raise_from(error, self.name(member))

    def _replace(self, member: Member, error: BaseException) -> None:
        ray.kill(member.actor)
        self.counts["lost_fragments"] += sum(1 for request in member.requests if request.steps)
        name, settings = self.name(member), self._settings
        _log.warning("%s was lost: %s", name, first_line(error))
        if not settings.restart_failed_runners and self._kind == "runner":
            self.members.remove(member)
            if not self.members:
                raise EngineError(
                    f"{name}, the last one, was lost: {first_line(error)} Set `ray.restart_failed_runners` to replace "
                    "lost runners."
                ) from error
            return
        if self.restarts >= settings.max_restarts:
            raise EngineError(
                f"{name} was lost, and `ray.max_restarts` ({settings.max_restarts}) is used up. The cause: "
                f"{first_line(error)} See Ray's logs of that process and node."
            ) from error
        self.restarts += 1
        self.counts["runner_restarts"] += 1
        new = Member(member.number, member.life + 1, self._started(), pace=member.pace)
        self.members[self.members.index(member)] = new
        self._renewed(new)

    def name(self, member: Member) -> str:
        """The name of a member in messages."""
        where = f" (process {member.pid} on node {member.node[:12]})" if member.pid else ""
        return f"{self._kind} {member.number}{where}"

    def kill(self) -> None:
        """End all actors at once. Does nothing the second time."""
        if connection() != self._home:  # they have ended with the cluster
            return
        members, self.members = self.members, []
        for member in members:
            for request in member.requests:  # fetched, because Ray would print each error among them in full
                if ray.wait([request.answer], timeout=0, fetch_local=False)[0]:
                    with contextlib.suppress(RayError):
                        ray.get(request.answer)
            ray.kill(member.actor)

    def close(self, patience: float) -> None:
        """Let actors close their envs, then end them. Does nothing the second time.

        Args:
            patience: Seconds to wait for that.

        Raises:
            Exception: closing an env failed; a note says where.
        """
        if connection() != self._home:
            return
        called = {member.actor.close.remote(): member for member in self.members}
        closed = ray.wait(list(called), num_returns=len(called), timeout=patience)[0] if called else []
        try:
            for ref in closed:
                try:
                    ray.get(ref)
                except RayTaskError as error:
                    raise_from(error, self.name(called[ref]))
                except RayError:
                    pass  # it has ended already
        finally:
            self.kill()
