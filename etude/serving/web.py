# SPDX-License-Identifier: Apache-2.0
"""The HTTP side: an ASGI app on Starlette for a service, its metrics and sessions, and the server that runs it."""

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
"""Seconds that requests may take to end when the server is stopped."""
PROMETHEUS: Final = "text/plain; version=0.0.4"
"""The type of metrics."""
KEEP_ALIVE: Final = 75
"""Seconds after which a connection that is not used is closed."""


class Service(Protocol):
    """What answers requests. A RequestError becomes its status, any other EtudeError 500."""

    max_body: int
    """The most bytes of a request's body."""
    is_local: bool
    """Only requests that name this machine as their host are answered: no page of another name that leads here."""
    metrics: "ServingMetrics"

    def about(self) -> dict[str, Any]:
        """Answer GET /policies: what there is to act with, and its spaces."""

    def gauges(self) -> Mapping[str, float]:
        """What `ServingMetrics.text` takes."""

    def open(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Answer POST /sessions."""

    async def act(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Answer POST /act."""

    def close(self, session_id: str) -> dict[str, Any]:
        """Answer DELETE /sessions/{session}."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """A context in which requests are answered."""


def make_app(service: Service) -> "Starlette":
    """The ASGI app of a service.

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
        """Answers requests by ``work``, which takes the fields, and by name what stands in the path."""
        label = path.split("/")[1]

        async def answered(request: "Request") -> "Response":
            begin = time.perf_counter()
            kind = request.headers.get(CONTENT_TYPE, "").partition(";")[0].strip().lower()
            try:
                if service.is_local and not is_this_machine(host := request.headers.get("Host", "")):
                    raise RequestError("Host", f"is {host[:100]!r}, but this server is for its own machine alone.", 403)
                found = work(decode(await _body(request, service.max_body), kind), **request.path_params)
                answer = found if isinstance(found, str | dict) else await found
                body, status = answer.encode() if isinstance(answer, str) else encode(answer, kind), 200
            except asyncio.CancelledError:  # the server ends, and this request has taken longer than GRACE
                status, answer = 503, {"error": "the server has ended."}
                body = encode(answer, kind)
            except Exception as error:  # noqa: BLE001  such as one of a user's own network
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
        """The answer where no route has the path (404), or where it has another method (405)."""
        field, status = ("method", 405) if getattr(error, "status_code", 404) == 405 else ("path", 404)
        asked = f"{request.method} {request.url.path[:100]}"
        service.metrics.count("etude_requests_total", path="other", status=str(status))
        words = f"`{field}`: there is no {asked}; there are {listed}."
        return Response(encode({"error": words, "field": field}, JSON), status, media_type=JSON)

    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: no_route, 405: no_route})
    app.router.redirect_slashes = False  # "/health/" has no route: a client that follows no redirect is told so
    return app


def _failure(error: Exception, path: str) -> tuple[int, dict[str, Any]]:
    """The status and the answer for a request to ``path`` that failed."""
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
    """The body, as far as it is no larger than allowed."""
    parts, size = list[bytes](), 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > most:
            raise RequestError("body", f"has more than {most:,} bytes, the most that this server takes.", 413)
    return b"".join(parts)


class ServingMetrics:
    """Counts and histograms, as Prometheus reads them."""

    KINDS: Final[Mapping[str, tuple[str, str]]] = {
        "etude_requests_total": ("counter", "Requests answered, by path and status."),
        "etude_act_seconds": ("histogram", "Seconds from a request to act to its answer."),
        "etude_batch_rows": ("histogram", "Observations in one call of a policy."),
        "etude_episodes_total": ("counter", "Episodes, by how they ended for the server: ended, recorded, dropped."),
        "etude_reloads_total": ("counter", "Checkpoints that were found while serving, by whether they were taken."),
        "etude_sessions": ("gauge", "Sessions that are open."),
        "etude_checkpoint_time_seconds": ("gauge", "When the checkpoint was saved, in seconds since 1970."),
        "etude_checkpoint_env_steps": ("gauge", "The steps of envs that the checkpoint was trained with."),
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
        """Count one more."""
        of = ",".join(f'{label}="{value}"' for label, value in labels.items())
        counts = self._counts[name]
        counts[of] = counts.get(of, 0) + 1

    def observe(self, name: str, value: float) -> None:
        """Take a value into a histogram."""
        self._buckets[name][bisect.bisect_left(self.BOUNDS[name], value)] += 1
        self._sums[name] += value

    def text(self, gauges: Mapping[str, float]) -> str:
        """All of them in Prometheus's text format, and ``gauges`` by name."""
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
    """One client's episodes, one after the other."""

    id: str = dataclasses.field(default_factory=lambda: secrets.token_urlsafe(12), init=False)
    used: float = dataclasses.field(default=0.0, init=False)
    """When it was last used, in seconds of the clock."""
    is_busy: bool = dataclasses.field(default=False, init=False)
    """A request of it is being answered."""


S = TypeVar("S", bound=Session)


class Sessions(Generic[S]):
    """The sessions of a server, by id.

    Args:
        limit: The most that there may be.
        seconds: A session that was not used for so long is dropped, unless a request of it is being answered.
        dropped: Called with each session that is dropped, however that happens.
        clock: Gives the time in seconds.
    """

    def __init__(
        self, limit: int, seconds: float, dropped: Callable[[S], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit, self.seconds, self._dropped, self._clock = limit, seconds, dropped, clock
        self._by_id: dict[str, S] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, session: S) -> S:
        """Keep a session.

        Raises:
            RequestError: there are too many.
        """
        self.expire()
        if len(self._by_id) >= self.limit:
            raise RequestError(
                SESSION,
                f"can't be opened: there are {self.limit} already, the most that there may be. Close those "
                f"that have ended; one that is not used is closed after {self.seconds:g} seconds.",
                429,
            )
        session.used = self._clock()
        self._by_id[session.id] = session
        return session

    def find(self, session_id: Any) -> S:
        """The session of that id.

        Raises:
            RequestError: there is none, or it has expired, or waits for an answer.
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
        """Note that a session was used."""
        session.used = self._clock()

    def drop(self, session: S) -> None:
        """Forget a session, if it is there."""
        if self._by_id.pop(session.id, None) is not None:
            self._dropped(session)

    def expire(self) -> None:
        """Drop the sessions that were not used for too long."""
        for session in [one for one in self._by_id.values() if self._is_over(one)]:
            self.drop(session)

    def clear(self) -> None:
        """Drop all."""
        for session in list(self._by_id.values()):
            self.drop(session)

    def _is_over(self, session: S) -> bool:
        return not session.is_busy and self._clock() - session.used > self.seconds


# -- the server -------------------------------------------------------------------------------------------------------


class WebServer:
    """Serves an app over HTTP; `url` is where.

    Args:
        service: What answers.
        host: The address to listen at, of this machine; ``0.0.0.0`` is all of its addresses.
        port: To listen at; 0 is any that is free.

    Raises:
        SettingsError: the address can't be listened at, or a package is missing.
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
        # With its protocol named: asyncio sends small answers at once only then (TCP_NODELAY).
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
        """Answer until SIGINT or SIGTERM, which are raised again when all is closed, or until `stop`."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """End `serve`, once the running requests are answered."""
        self._server.should_exit = True

    @contextlib.contextmanager
    def running(self) -> Iterator["WebServer"]:
        """Answer in a thread while the context lasts."""
        thread = threading.Thread(target=self.serve, name="etude-server", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.stop()
            thread.join()


@contextlib.asynccontextmanager
async def repeating(seconds: float, work: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Do some work every so many seconds while the context lasts."""

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
