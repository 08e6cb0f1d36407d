# SPDX-License-Identifier: Apache-2.0
"""The HTTP layer: the ASGI app (Starlette) of a service, its metrics and sessions, and the server that runs it."""

import asyncio
import bisect
import contextlib
import dataclasses
import itertools
import logging
import secrets
import socket
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from etude.errors import EtudeError, SettingsError, how_to_install
from etude.serving.protocol import CONTENT_TYPE, JSON, MSGPACK, SESSION, RequestError, decode, encode
from etude.urls import is_this_machine, port_error

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_log = logging.getLogger("etude.serving")

GRACE: Final = 5
"""Seconds that running requests have to finish when the server stops."""
PROMETHEUS: Final = "text/plain; version=0.0.4"
"""Content type of the answer to GET /metrics."""
KEEP_ALIVE: Final = 75
"""Seconds after which an idle connection is closed."""


class Service(Protocol):
    """The handlers of requests. A RequestError is answered with its status, any other EtudeError with 500."""

    max_body: int
    """Maximum size of a request's body in bytes."""
    is_local: bool
    """Whether to refuse requests whose Host header names another machine, which stops DNS rebinding by web pages."""
    metrics: "ServingMetrics"

    def about(self) -> dict[str, Any]:
        """Answer GET /policies: the policies by name, with their spaces."""

    def gauges(self) -> Mapping[str, float]:
        """Current values of the gauges, by name, for `ServingMetrics.text`."""

    def open(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Answer POST /sessions."""

    async def act(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Answer POST /act."""

    def close(self, session_id: str) -> dict[str, Any]:
        """Answer DELETE /sessions/{session}."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """A context that must be active while requests are answered."""


def make_app(service: Service) -> "Starlette":
    """Make the ASGI app of a service.

    Raises:
        SettingsError: a package is missing.
    """
    try:
        import uvicorn  # noqa: F401
        from starlette.applications import Starlette
        from starlette.responses import Response
        from starlette.routing import Route
    except ImportError as error:
        raise SettingsError(
            f"serving takes the packages starlette and uvicorn ({error}): {how_to_install('serve')}."
        ) from error

    def route(path: str, method: str, work: Callable[..., str | dict[str, Any] | Awaitable[dict[str, Any]]]) -> Route:
        """A route that answers requests with ``work``, called with the body's fields and the path's parameters."""
        label = path.split("/")[1]

        async def answered(request: "Request") -> "Response":
            begin = time.perf_counter()
            kind = request.headers.get(CONTENT_TYPE, "").partition(";")[0].strip().lower()
            try:
                if service.is_local and not is_this_machine(host := request.headers.get("Host", "")):
                    problem = f"is {host[:100]!r}, but this server accepts requests of its own machine only."
                    raise RequestError("Host", problem, 403)
                found = work(decode(await _body(request, service.max_body), kind), **request.path_params)
                answer = found if isinstance(found, str | dict) else await found
                body, status = answer.encode() if isinstance(answer, str) else encode(answer, kind), 200
            except asyncio.CancelledError:  # the server is stopping, and this request has taken longer than GRACE
                status, answer = 503, {"error": "the server has ended."}
                body = encode(answer, kind)
            except Exception as error:  # noqa: BLE001  such as one from a user's own network
                status, answer = _failure(error, path)
                body = encode(answer, kind)
            service.metrics.count("etude_requests_total", path=label, status=str(status))
            if label == "act":
                service.metrics.observe("etude_act_seconds", time.perf_counter() - begin)
            is_text = isinstance(answer, str)
            return Response(body, status, media_type=PROMETHEUS if is_text else MSGPACK if kind == MSGPACK else JSON)

        return Route(path, answered, methods=[method])

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async with service.running():
            yield

    routes = [
        route("/act", "POST", service.act),
        route("/sessions", "POST", service.open),
        route("/sessions/{session_id}", "DELETE", lambda fields, session_id: service.close(session_id)),
        route("/policies", "GET", lambda fields: service.about()),
        route("/health", "GET", lambda fields: {"status": "ok"}),
        route("/metrics", "GET", lambda fields: service.metrics.text(service.gauges())),
    ]
    listed = ", ".join(f"{method} {one.path}" for one in routes for method in sorted({*(one.methods or ())} - {"HEAD"}))

    def no_route(request: "Request", error: Exception) -> "Response":
        """Answer a request whose path (404) or method (405) has no route."""
        field, status = ("method", 405) if getattr(error, "status_code", 404) == 405 else ("path", 404)
        asked = f"{request.method} {request.url.path[:100]}"
        service.metrics.count("etude_requests_total", path="other", status=str(status))
        words = f"`{field}`: there is no {asked}; there are {listed}."
        return Response(encode({"error": words, "field": field}, JSON), status, media_type=JSON)

    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: no_route, 405: no_route})
    app.router.redirect_slashes = False  # answer "/health/" with 404: not every client follows redirects
    return app


def _failure(error: Exception, path: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the answer for a request that raised ``error``; unexpected errors are logged."""
    from starlette.requests import ClientDisconnect

    if isinstance(error, RequestError):
        return error.status, {"error": str(error), "field": error.field}
    if isinstance(error, EtudeError):
        return 500, {"error": str(error)}
    if isinstance(error, ClientDisconnect):
        return 499, {"error": "the client has gone."}
    _log.error("a request to %s failed:\n%s", path, "".join(traceback.format_exception(error)))
    return 500, {"error": "the server failed; its log says how."}


async def _body(request: "Request", most: int) -> bytes:
    """Read a request's body.

    Raises:
        RequestError: it has more than ``most`` bytes.
    """
    parts, size = list[bytes](), 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > most:
            raise RequestError("body", f"has more than {most:,} bytes, the maximum of this server.", 413)
    return b"".join(parts)


class ServingMetrics:
    """Counters, histograms and gauges in Prometheus's format."""

    KINDS: Final[Mapping[str, tuple[str, str]]] = {
        "etude_requests_total": ("counter", "Requests answered, by path and status."),
        "etude_act_seconds": ("histogram", "Seconds from a request to act to its answer."),
        "etude_batch_rows": ("histogram", "Observations in one call of a policy."),
        "etude_episodes_total": ("counter", "Episodes, by outcome: ended, recorded, dropped."),
        "etude_reloads_total": ("counter", "Checkpoints found while serving, by whether they were loaded."),
        "etude_sessions": ("gauge", "Open sessions."),
        "etude_checkpoint_time_seconds": ("gauge", "When the checkpoint was saved, in seconds since 1970."),
        "etude_checkpoint_env_steps": ("gauge", "Env steps of the training run at the checkpoint."),
    }
    BOUNDS: Final[Mapping[str, tuple[float, ...]]] = {
        "etude_act_seconds": (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0),
        "etude_batch_rows": (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024),
    }

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, float]] = {name: {} for name in self.KINDS}
        self._buckets = {name: [0] * (len(bounds) + 1) for name, bounds in self.BOUNDS.items()}
        self._sums = dict.fromkeys(self.BOUNDS, 0.0)

    def count(self, name: str, **labels: str) -> None:
        """Add 1 to a counter with these labels."""
        of = ",".join(f'{label}="{value}"' for label, value in labels.items())
        counts = self._counts[name]
        counts[of] = counts.get(of, 0) + 1

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        self._buckets[name][bisect.bisect_left(self.BOUNDS[name], value)] += 1
        self._sums[name] += value

    def text(self, gauges: Mapping[str, float]) -> str:
        """Return all metrics in Prometheus's text format; ``gauges`` has the values of the gauges by name."""
        lines = []
        for name, (kind, about) in self.KINDS.items():
            values = [f"{name}{{{of}}} {value!r}" for of, value in self._counts[name].items()]
            if name in gauges:
                values = [f"{name} {gauges[name]!r}"]
            elif name in self.BOUNDS:
                bounds = [*(f"{bound:g}" for bound in self.BOUNDS[name]), "+Inf"]
                sums = list(itertools.accumulate(self._buckets[name]))
                values = [f'{name}_bucket{{le="{le}"}} {count}' for le, count in zip(bounds, sums, strict=True)]
                values += [f"{name}_sum {self._sums[name]!r}", f"{name}_count {sums[-1]}"]
            if values:
                lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *values]
        return "\n".join(lines) + "\n"


# -- sessions ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Session:
    """A client's session: its episodes, one after the other."""

    id: str = dataclasses.field(default_factory=lambda: secrets.token_urlsafe(12), init=False)
    used: float = dataclasses.field(default=0.0, init=False)
    """When it was last used, in seconds of the clock of `Sessions`."""
    is_busy: bool = dataclasses.field(default=False, init=False)
    """Whether one of its requests is being answered."""


S = TypeVar("S", bound=Session)


class Sessions(Generic[S]):
    """The open sessions of a server, by id.

    Args:
        limit: Maximum number of open sessions.
        seconds: Seconds after which an unused session is dropped, unless one of its requests is being answered.
        dropped: Called with each session that is dropped, whatever the reason.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, limit: int, seconds: float, dropped: Callable[[S], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit, self.seconds, self._dropped, self._clock = limit, seconds, dropped, clock
        self._by_id: dict[str, S] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, session: S) -> S:
        """Add a session.

        Raises:
            RequestError: ``limit`` sessions are open already.
        """
        self.expire()
        if len(self._by_id) >= self.limit:
            raise RequestError(
                SESSION,
                f"can't be opened: {self.limit} sessions are open, which is the maximum. Close those that have ended; "
                f"an unused one is closed after {self.seconds:g} seconds.",
                429,
            )
        session.used = self._clock()
        self._by_id[session.id] = session
        return session

    def find(self, session_id: Any) -> S:
        """Return the open session with this id.

        Raises:
            RequestError: there is none, it has expired, or another of its requests is still being answered.
        """
        if not isinstance(session_id, str):
            raise RequestError(SESSION, "must be the text that POST /sessions gave.")
        found = self._by_id.get(session_id)
        if found is not None and self._is_over(found):
            self.drop(found)
            found = None
        if found is None:
            raise RequestError(
                SESSION,
                f"{session_id[:50]!r} is not open: it was closed, or not used for "
                f"{self.seconds:g} seconds. Open another, with a new episode.",
                404,
            )
        if found.is_busy:
            raise RequestError(SESSION, "still waits for the answer to another request.", 409)
        return found

    def touch(self, session: S) -> None:
        """Set a session's last use to now."""
        session.used = self._clock()

    def drop(self, session: S) -> None:
        """Remove a session, if it is still open."""
        if self._by_id.pop(session.id, None) is not None:
            self._dropped(session)

    def expire(self) -> None:
        """Drop the sessions that have been unused for too long."""
        for session in [one for one in self._by_id.values() if self._is_over(one)]:
            self.drop(session)

    def clear(self) -> None:
        """Drop all sessions."""
        for session in list(self._by_id.values()):
            self.drop(session)

    def _is_over(self, session: S) -> bool:
        return not session.is_busy and self._clock() - session.used > self.seconds


# -- the server -------------------------------------------------------------------------------------------------------


class WebServer:
    """Serves an app over HTTP at `url`. It listens at once; `serve` or `running` answers the requests.

    Args:
        service: Handles the requests.
        host: Address of this machine to listen at; ``0.0.0.0`` is all of its addresses.
        port: Port to listen at; 0 is any free port.

    Raises:
        SettingsError: the server can't listen at the address, or a package is missing.
    """

    def __init__(self, service: Service, host: str, port: int) -> None:
        app = make_app(service)
        import uvicorn

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        try:
            listening = socket.create_server((host, port), family=family, backlog=1024, dualstack_ipv6=is_dual)
        except (OSError, OverflowError) as error:
            raise port_error(f"port {port} of {host}", error) from error
        # asyncio sends small answers at once (TCP_NODELAY) only on sockets that name their protocol.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, listening.detach())
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"
        self._server: uvicorn.Server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="on",
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=GRACE,
            )
        )

    def serve(self) -> None:
        """Answer requests until SIGINT, SIGTERM or `stop`. A signal is raised again after everything is closed."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """End `serve` after the running requests are answered."""
        self._server.should_exit = True

    @contextlib.contextmanager
    def running(self) -> Iterator["WebServer"]:
        """Answer requests in a thread while the context is active."""
        thread = threading.Thread(target=self.serve, name="etude-server", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.stop()
            thread.join()


@contextlib.asynccontextmanager
async def repeating(seconds: float, work: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Call ``work`` every ``seconds`` while the context is active."""

    async def repeat() -> None:
        while True:
            await asyncio.sleep(seconds)
            await work()

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
