# SPDX-License-Identifier: Apache-2.0
"""A served policy against a bare Starlette app that reads the request and answers a constant, on the same server."""

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

from benchmarks.harness import ETUDE, REQUESTS_A_SECOND, THREADS, Figure, Options, Reach, Row

BARE = "bare Starlette app"
BODY = b'{"obs":[0.1,-0.2,0.03,0.4]}'
_REQUEST = b"POST /act HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"


def rows(options: Options) -> Iterator[Row]:
    """Requests a second and the 99th percentile of their times, for clients that ask as soon as they are answered."""
    with ExitStack() as opened:
        ports = {name: opened.enter_context(_Process(code)).port for name, code in _SERVERS.items()}
        for clients in (1, 32):
            rates: dict[str, list[float]] = {name: [] for name in ports}
            worst: dict[str, list[float]] = {name: [] for name in ports}
            for port in ports.values():
                asyncio.run(_load(port, clients, options.seconds))
            for _ in range(options.rounds):
                for name, port in ports.items():
                    times, seconds = asyncio.run(_load(port, clients, 3 * options.seconds))
                    rates[name].append(len(times) / seconds)
                    worst[name].append(1e3 * statistics.quantiles(times, n=100)[98])
            what = f"serving a 2x64 policy, {clients} client{'s' * (clients > 1)}"
            own, other = Figure(ETUDE, rates[ETUDE], "etude"), Figure(BARE, rates[BARE])
            yield Row(f"{what}: requests", REQUESTS_A_SECOND, [own, other], Reach(0.45, BARE))
            own, other = Figure(ETUDE, worst[ETUDE], "etude"), Figure(BARE, worst[BARE])
            yield Row(f"{what}: 99th percentile", "ms", [own, other], Reach(2.5, BARE))


async def _load(port: int, clients: int, seconds: float) -> tuple[list[float], float]:
    """The seconds of each request, and of all of them together."""
    request, times = _REQUEST % (len(BODY), BODY), list[float]()
    begin = time.perf_counter()

    async def ask() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (sent := time.perf_counter()) < begin + seconds:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the server answered {head!r}")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
            times.append(time.perf_counter() - sent)
        writer.close()

    await asyncio.gather(*(ask() for _ in range(clients)))
    return times, time.perf_counter() - begin


class _Process:
    """A server in a process of its own."""

    def __init__(self, code: str) -> None:
        env = os.environ | dict.fromkeys(THREADS, "1")
        self._process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)

    def __enter__(self) -> "_Process":
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.communicate()


_SERVERS = {
    ETUDE: "from benchmarks.serve import serve_policy; serve_policy()",
    BARE: "from benchmarks.serve import serve_constant; serve_constant()",
}


def serve_policy() -> None:
    """Serve a policy, and print the port."""
    import gymnasium as gym
    import torch

    from etude.connectors import Pipeline
    from etude.modules import make_module
    from etude.policies import Policy
    from etude.serving import serve

    torch.set_num_threads(1)
    env, connectors = gym.make("CartPole-v1"), Pipeline(["normalize_obs"])
    spaces = (env.observation_space, env.action_space)
    module = make_module(None, *connectors.spaces(*spaces)).eval()
    policy = Policy(module, connectors, obs_space=spaces[0], action_space=spaces[1])
    serve(policy, port=0, ready=lambda url: print(url.rpartition(":")[2], flush=True))


def serve_constant() -> None:
    """Serve a constant, and print the port."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def act(request: Request) -> Response:
        await request.body()
        return Response(b'{"action":1}', media_type="application/json")

    listens = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listens.bind(("127.0.0.1", 0))
    listens.listen(1024)
    print(listens.getsockname()[1], flush=True)
    app = Starlette(routes=[Route("/act", act, methods=["POST"])])
    config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False)
    uvicorn.Server(config).run(sockets=[listens])
