# SPDX-License-Identifier: Apache-2.0
"""One thread for everything: tests run beside other work, and two thread pools make each other crawl. Seeds. An S3
server."""

import importlib.util
import itertools
import logging
import multiprocessing
import os
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
import threadpoolctl
import torch
from preloaded import Preloaded
from pyarrow import fs

if " " in tempfile.gettempdir():  # torch.compile can't compile there
    _compiled = tempfile.TemporaryDirectory(dir="/tmp")
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=_compiled.name, TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS="0")
_cache = tempfile.TemporaryDirectory()
os.environ["ETUDE_CACHE"] = _cache.name
torch.set_num_threads(1)
threadpoolctl.threadpool_limits(1)
hypothesis.settings.register_profile("etude", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("etude")

_RECURSION_LIMIT = sys.getrecursionlimit()
_found = importlib.util.find_spec("ray")
if _found is None or _found.origin is None:
    sys.modules["ray"] = None  # type: ignore[assignment]  # and the folder tests/ray, which pytest lets one import, is not it


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that hold none of the tests to run are not even imported: those of the ray engine, or all others."""
    ray, which = Path(__file__).parent / "ray", config.option.markexpr
    if collection_path == ray:
        return True if "not cluster" in which else None
    if which != "cluster" or collection_path.suffix != ".py" or ray in collection_path.parents:
        return None
    return None if "mark.cluster" in collection_path.read_text(encoding="utf-8") else True


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test draws without a seed of its own, and how deep it may recurse, is the same whatever ran before it."""
    sys.setrecursionlimit(_RECURSION_LIMIT)  # which torch.compile raises
    draws = random.Random(request.node.nodeid)
    random.seed(draws.getrandbits(32))
    np.random.seed(draws.getrandbits(32))
    torch.manual_seed(draws.getrandbits(32))
    monkeypatch.setattr(np.random.bit_generator, "randbits", draws.getrandbits)  # what unseeded generators begin with


@pytest.fixture(scope="session")
def preloaded() -> Iterator[Preloaded]:
    """Runs Python programs in processes of their own."""
    with Preloaded() as server:
        yield server


@pytest.fixture
def forked_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that load data are forked from one that has imported what they import, and has done nothing else.

    For tests of what such processes do. One of how they are started is
    ``test_data_pipeline.py::test_the_order_depends_on_the_seed_alone``.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(["torch", "pyarrow.dataset", "etude.algorithms"])
    real = multiprocessing.get_context
    monkeypatch.setattr(multiprocessing, "get_context", lambda how=None: forked if how == "spawn" else real(how))


# -- a real S3 server on this machine, for recordings that lie in a bucket -------------------------------------------

_COUNT = itertools.count()


class S3(NamedTuple):
    """A bucket of a server."""

    url: str
    """``s3://bucket``; the environment holds the credentials and the server's address."""
    address: str
    """Of the server: host and port."""
    system: fs.FileSystem
    """With credentials of its own."""
    requests: list[str]
    """What the server was asked for since it was last cleared: ``GET /bucket/key``."""


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r"(GET|HEAD|PUT|POST|DELETE) \S+", record.getMessage())
        if found:
            self.lines.append(found[0])


@pytest.fixture(scope="session")
def s3_server() -> Iterator[tuple[str, list[str]]]:
    """A server in a thread of this process, on a free port; it ends with the tests, however they end."""
    server_of = pytest.importorskip("moto.server")
    log, logger = _Log(), logging.getLogger("werkzeug")
    logger.handlers[:], logger.propagate = [log], False
    logger.setLevel(logging.INFO)
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=True)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"{host}:{port}", log.lines
    finally:
        server.stop()


@pytest.fixture
def s3(s3_server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> S3:
    """A new bucket."""
    address, requests = s3_server
    settings: dict[str, Any] = {
        "AWS_ACCESS_KEY_ID": "some-key",
        "AWS_SECRET_ACCESS_KEY": "some-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{address}",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    system = fs.S3FileSystem(
        access_key="k",
        secret_key="s",
        endpoint_override=address,
        scheme="http",
        region="us-east-1",
        allow_bucket_creation=True,
        allow_bucket_deletion=True,
    )
    name = f"bucket-{next(_COUNT)}"
    system.create_dir(name)
    requests.clear()
    return S3(f"s3://{name}", address, system, requests)
