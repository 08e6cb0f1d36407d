# SPDX-License-Identifier: Apache-2.0
"""The connection to a cluster. One is started here only where none is there."""

import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import ray

from etude.algorithms import ActingConfig, AlgorithmConfig, OfflineConfig
from etude.algorithms.parallel import cores_of
from etude.algorithms.ray_config import Ray
from etude.errors import EngineError

PATIENCE = 10.0
"""Seconds within which a cluster's address must answer."""

_HELD: dict[str, int] = {}
"""Clusters that were started here, by address, with the number of those who use them."""


def ensure_started(
    address: str | None = None, runtime_env: Mapping[str, Any] | None = None, num_cpus: float = 0.0
) -> bool:
    """Connect this process to a cluster, unless it is connected already.

    Args:
        address: ``auto``, ``host:port`` or ``ray://host:port``. None: the cluster that ``RAY_ADDRESS`` names; else one
            is started on this machine alone, with a logical CPU for each of its own, and no dashboard. It ends with
            this process at the latest, however that ends.
        runtime_env: What the processes of the cluster find, see Ray's runtime environments.
        num_cpus: Logical CPUs that are wanted. One that is started here has as many at least: on few cores, its
            processes share them.

    Returns:
        Whether the cluster was started here, now or before: the caller gives it back by `let_go`.

    Raises:
        EngineError: there is no cluster at the address, or none can be started.
    """
    if ray.is_initialized():
        where = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", "local", where):
            warnings.warn(
                f"`ray.address` {address!r} is left out, since this process is connected to the cluster at {where} "
                "already: end that connection first, by ray.shutdown().",
                stacklevel=2,
            )
        if runtime_env:
            warnings.warn(
                "`ray.runtime_env` is left out, since this process is connected to a cluster already: give it to "
                "ray.init(runtime_env=...), or leave ray.init to Etude.",
                stacklevel=2,
            )
        if where in _HELD:
            _HELD[where] += 1
        return where in _HELD
    wanted = address or os.environ.get("RAY_ADDRESS") or "local"
    if wanted == "local":
        with _modules_found():
            cpus = max(os.cpu_count() or 1, math.ceil(num_cpus))
            whose = "no Ray cluster can be started on this machine"
            _init(whose, wanted, runtime_env, include_dashboard=False, num_cpus=cpus)
        _HELD[ray.get_runtime_context().gcs_address] = 1
        return True
    source = "" if address else ", which the environment variable RAY_ADDRESS names"
    whose = f"there is no Ray cluster at {wanted!r}{source}"
    _check_answers(wanted, whose)
    _init(whose, wanted, runtime_env)
    return False


def let_go() -> None:
    """Give back a cluster that `ensure_started` started here; the last one who does so ends it."""
    where = ray.get_runtime_context().gcs_address if ray.is_initialized() else ""
    if where in _HELD:
        _HELD[where] -= 1
        if not _HELD[where]:
            del _HELD[where]
            ray.shutdown()


def _init(whose: str, address: str, runtime_env: Mapping[str, Any] | None, **more: Any) -> None:
    handlers = _handlers()
    env = None if runtime_env is None else dict(runtime_env)
    try:
        # Warnings of the start concern Ray's own affairs; what comes later is heard again.
        with _apart():
            ray.init(address=address, runtime_env=env, logging_level=logging.ERROR, **more)
    except (ConnectionError, OSError, RuntimeError, ValueError, SystemExit) as error:
        why = str(error).rstrip(".")
        raise EngineError(f"{whose}: {why}. {_REMEDY if address != 'local' else ''}".rstrip()) from error
    finally:
        logging.getLogger("ray").setLevel(logging.WARNING)
        for number, handler in handlers.items():  # Ray takes SIGTERM for itself
            if handler not in (signal.SIG_DFL, None):
                signal.signal(number, handler)


_REMEDY = (
    "Start one (ray start --head), give another address, or give none, and one is started here for as long as the run "
    "lasts. If it is there and asks for a token, set RAY_AUTH_MODE=token here, and RAY_AUTH_TOKEN where no "
    "~/.ray/auth_token holds it."
)


@contextmanager
def _apart() -> Iterator[None]:
    """Let what Ray starts within it be in a process group of its own, by moving this process there for as long.

    Ray keeps Ctrl-C from its processes, but not a SIGTERM to the whole group, as `timeout` and batch systems send it:
    then the cluster would be gone before a run could save. They end with this process, however it ends, as before.
    """
    if not hasattr(os, "setpgid"):
        yield
        return
    own = os.getpgrp()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, process_group=0) as leader:  # a group needs a process
        try:
            with contextlib.suppress(PermissionError):  # the leader of a session can't leave its group
                os.setpgid(0, leader.pid)
            yield
        finally:
            with contextlib.suppress(PermissionError):
                os.setpgid(0, own)


def connection() -> str:
    """Which cluster this process is connected to, and as what; empty where it is to none."""
    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return f"{context.get_node_id()} {context.get_job_id()}"


def check_connected(home: str) -> None:
    """See that this process still has the `connection` ``home``: Ray itself would start another cluster.

    Raises:
        EngineError: it has another, or none.
    """
    if connection() != home:
        raise EngineError(
            "the connection to the Ray cluster has ended (by ray.shutdown()?), and runners and learners with it: load "
            "the last checkpoint, or make the algorithm anew."
        )


def _handlers() -> dict[int, Any]:
    is_main = threading.current_thread() is threading.main_thread()
    return {signal.SIGTERM: signal.getsignal(signal.SIGTERM)} if is_main else {}


def _check_answers(address: str, whose: str) -> None:
    """Raise an EngineError where nothing listens: Ray itself would try for more than a minute, and end the process."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise EngineError(f"{whose}: {error}. {_REMEDY}") from error


@contextmanager
def _modules_found() -> Iterator[None]:
    """Let processes that are started within it find the modules that this one finds, `module:factory` among them."""
    own = [path for path in sys.path if path and not path.startswith((sys.prefix, sys.base_prefix))]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(own)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def check_room(wanted: Sequence[Mapping[str, float]], *, can_grow: bool) -> None:
    """See that a cluster has what is asked of it, rather than wait for it in silence.

    What others use at the moment counts as there: they may give it back.

    Args:
        wanted: The resources by name of each process that is to run: each must find its own on one node.
        can_grow: Nodes may come yet, as in a cluster that scales itself: what lacks is a warning then, and no error.

    Raises:
        EngineError: it has less; the message names what lacks, and what to do.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    for name in sorted({name for each in wanted for name, amount in each.items() if amount > 0}):
        total = sum(each.get(name, 0.0) for each in wanted)
        there = sum(node.get(name, 0.0) for node in nodes)
        most = max(each.get(name, 0.0) for each in wanted)
        largest = max((node.get(name, 0.0) for node in nodes), default=0.0)
        if total > there + 1e-9:
            lack = f"the cluster has {there:g} {name} in all, but {total:g} are asked for"
        elif most > largest + 1e-9:
            lack = f"no node has more than {largest:g} {name}, but one process asks for {most:g}"
        else:
            continue
        _tell(f"{lack}: ask for less (fewer runners or learners, or less for each, such as cpus_per_runner)", can_grow)


def room() -> str:
    """What is free of the cluster, in words."""
    there, free = cast("Any", ray.cluster_resources)(), cast("Any", ray.available_resources)()
    inner = ("node:", "object_store", "memory")
    # placement groups have resources of their own, by names such as CPU_group_0_31b4
    own = {name: n for name, n in there.items() if not name.startswith(inner) and "_group_" not in name}
    words = ", ".join(f"{free.get(name, 0.0):g} of {amount:g} {name}" for name, amount in sorted(own.items()))
    return f"Free are {words}: what finds no room waits for it."


def _tell(lack: str, can_grow: bool) -> None:
    if not can_grow:
        raise EngineError(f"{lack}, or use a larger cluster.")
    warnings.warn(f"{lack}, or add nodes; what has no room waits until there are some.", stacklevel=3)


def actors_of(config: AlgorithmConfig) -> list[dict[str, float]]:
    """The resources by name of each process that an algorithm with these settings starts; none on the local engine.

    Of the tasks that read recordings for learners, one: there may be more, as far as there is room.
    """
    if config.engine == "local":
        return []
    engine = Ray() if config.engine == "ray" else config.engine
    runner = {"CPU": engine.cpus_per_runner, "GPU": engine.gpus_per_runner, **(engine.resources_per_runner or {})}
    learner = {"CPU": engine.cpus_per_learner, "GPU": engine.gpus_per_learner}
    evaluates = (
        config.env is not None and isinstance(config, ActingConfig | OfflineConfig) and config.evaluation.interval
    )
    wanted = [runner] * (engine.num_runners if isinstance(config, ActingConfig) else 0)
    wanted += [{**runner, "GPU": 0.0}] * (engine.num_evaluation_runners if evaluates else 0)
    wanted += [learner] * engine.num_learners
    if isinstance(config, OfflineConfig) and config.data is not None and engine.num_learners:
        wanted += [{"CPU": engine.data.num_cpus}]
    return [bundle for each in wanted if (bundle := {name: amount for name, amount in each.items() if amount > 0})]


def driver_of(config: AlgorithmConfig) -> dict[str, float]:
    """The resources of the process that trains, where a cluster runs it, too: its threads, workers and GPU."""
    gpu = {"GPU": 1.0} if config.compute.device.startswith("cuda") else {}
    return {"CPU": float(cores_of(config)), **gpu}
