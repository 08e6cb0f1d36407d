# SPDX-License-Identifier: Apache-2.0
"""The HTTP side: an ASGI app on Starlette for a service, its metrics, and the uvicorn server that runs it."""

import asyncio
import bisect
import contextlib
import errno
import itertools
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

from etude.errors import EtudeError, SettingsError, how_to_install
from etude.serving.protocol import CONTENT_TYPE, JSON, MSGPACK, RequestError, decode, encode

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

LOCAL: Final = ("localhost", "127.0.0.1", "[::1]", "::1")
GRACE: Final = 5
"""Seconds that requests may take to end when the server is stopped."""
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


def check_packages() -> None:
    """Raise a SettingsError where a package is missing."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise SettingsError(
            f"serving takes the packages starlette and uvicorn ({error}): {how_to_install('serve')}."
        ) from error


def make_app(service: Service) -> "Starlette":
    """The ASGI app of a service.

    Raises:
        SettingsError: a package is missing.
    """
    check_packages()
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route

    async def answered(
        request: "Request", work: Callable[[Mapping[str, Any]], dict[str, Any] | Awaitable[dict[str, Any]]]
    ) -> "Response":
        begin = time.perf_counter()
        kind = request.headers.get(CONTENT_TYPE, "").partition(";")[0].strip().lower()
        try:
            if service.is_local:
                _check_host(request.headers.get("Host", ""))
            found = work(decode(await _body(request, service.max_body), kind))
            answer, status = found if isinstance(found, dict) else await found, 200
        except RequestError as error:
            answer, status = {"error": str(error), "field": error.field}, error.status
        except EtudeError as error:
            answer, status = {"error": str(error)}, 500
        except ClientDisconnect:
            answer, status = {"error": "the client has gone."}, 499
        path = request.scope["path"].split("/", 2)[1]
        service.metrics.count("etude_requests_total", path=path, status=str(status))
        if path == "act":
            service.metrics.observe("etude_act_seconds", time.perf_counter() - begin)
        kind = MSGPACK if kind == MSGPACK else JSON
        return Response(encode(answer, kind), status, media_type=kind)

    async def health(request: "Request") -> "Response":
        return await answered(request, lambda _: {"status": "ok"})

    async def policies(request: "Request") -> "Response":
        return await answered(request, lambda _: service.about())

    async def metrics(request: "Request") -> "Response":
        return PlainTextResponse(service.metrics.text(service.gauges()), media_type="text/plain; version=0.0.4")

    async def sessions(request: "Request") -> "Response":
        return await answered(request, service.open)

    async def closed(request: "Request") -> "Response":
        return await answered(request, lambda _: service.close(request.path_params["session"]))

    async def act(request: "Request") -> "Response":
        return await answered(request, service.act)

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async with service.running():
            yield

    return Starlette(
        routes=[
            Route("/act", act, methods=["POST"]),
            Route("/sessions", sessions, methods=["POST"]),
            Route("/sessions/{session}", closed, methods=["DELETE"]),
            Route("/policies", policies),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        lifespan=lifespan,
    )


async def _body(request: "Request", most: int) -> bytes:
    """The body, as far as it is no larger than allowed."""
    parts, size = list[bytes](), 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > most:
            raise RequestError("body", f"has more than {most:,} bytes, the most that this server takes.", 413)
    return b"".join(parts)


def _check_host(host: str) -> None:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if name not in LOCAL:
        raise RequestError("Host", f"is {host[:100]!r}, but this server is for its own machine alone.", 403)


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
        # With its protocol named: asyncio sends small answers at once only then (TCP_NODELAY).
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            if os.name == "posix":
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(1024)
        except (OSError, OverflowError) as error:
            self._socket.close()
            what = "is taken" if getattr(error, "errno", None) == errno.EADDRINUSE else f"can't be used ({error})"
            raise SettingsError(f"port {port} of {host} {what}: give another with --port, or 0 for any.") from error
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


async def repeat(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    """Do some work every so many seconds, until cancelled."""
    while True:
        await asyncio.sleep(seconds)
        await work()
