# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of this machine alone, for all tests that don't harm it. Without Ray, all files here are skipped."""

import importlib.util
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


class WithoutRay(pytest.Module):
    """A file of tests that is not imported."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip("the ray engine needs Ray: pip install 'etude[ray]'", allow_module_level=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these are a suite of their own."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("cluster")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Files here import Ray at the top."""
    if importlib.util.find_spec("ray") is not None:
        return None
    return WithoutRay.from_parent(parent, path=module_path)  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Started once in each process of pytest; actors are given one thread each, and find the tests' own modules."""
    import ray
    from ray._private import ray_constants

    import etude

    handler = signal.getsignal(signal.SIGTERM)
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets:  # the path of a socket has 107 characters at most
        with pytest.MonkeyPatch.context() as patch:
            # What is started finds these in its environment: as a runtime_env they cost a process more for each actor.
            folders = [TESTS / name for name in ("envs", "runners", "algorithms", "ray")]
            paths = [*map(str, folders), str(Path(etude.__file__).parents[1])]
            patch.setenv("PYTHONPATH", os.pathsep.join(paths))
            patch.setenv("OMP_NUM_THREADS", "1")
            if hasattr(os, "pidfd_open"):
                patch.setenv("FORKED_WORKERS", sockets)
                patch.setenv("RAY_prestart_worker_first_driver", "0")  # those are of no job: a server more
                forked = Path(__file__).with_name("forked_workers.py")  # joined to Ray's own folder, it stays the same
                patch.setattr(ray_constants, "SETUP_WORKER_FILENAME", str(forked))
            ray.init(
                address="local",
                num_cpus=8,
                num_gpus=1,  # which is only counted
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=300 * 1024 * 1024,
            )
        signal.signal(signal.SIGTERM, handler)  # Ray takes it for itself
        yield
        ray.shutdown()
