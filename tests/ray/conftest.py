# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of this machine alone, for all tests that don't harm it."""

import os
from collections.abc import Iterator

import pytest

ray = pytest.importorskip("ray", reason="the ray engine needs Ray: pip install 'etude[ray]'")


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Started once; actors are given one thread each, and find the tests' own modules."""
    paths = os.pathsep.join(
        os.path.join(os.path.dirname(os.path.dirname(__file__)), name) for name in ("envs", "runners", "algorithms", "ray")
    )
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=300 * 1024 * 1024,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()
