# SPDX-License-Identifier: Apache-2.0
"""The connection to a Ray cluster, which is started here if there is none; its resources; and errors in its actors."""

import contextlib
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import ray
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from etude.algorithms import ActingConfig, AlgorithmConfig, OfflineConfig
from etude.algorithms.parallel import cores_of
from etude.algorithms.ray_config import Ray
from etude.errors import EngineError
from etude.spawning import variable_set

PATIENCE = 10.0
"""The timeout in seconds for the address of a cluster."""

_HELD: dict[str, int] = {}
"""The clusters that were started here, by address, with the number of their users."""


def ensure_started(
    address: str | None = None, runtime_env: Mapping[str, Any] | None = None, num_cpus: float = 0.0
) -> bool:
    """Connect this process to a cluster, unless it is connected already.

    Args:
        address: ``auto``, ``host:port`` or ``ray://host:port``. None: the cluster in ``RAY_ADDRESS``; if that is not
            set, a cluster is started on this machine only, with one logical CPU for each real one and no dashboard. It
            ends with this process at the latest.
        runtime_env: The environment of the cluster's processes, see Ray's runtime environments.
        num_cpus: The logical CPUs needed. A cluster started here has at least as many; if there are fewer cores, its
            processes share them.

    Returns:
        Whether the cluster was started here, now or before. The caller must then call `release_cluster`.

    Raises:
        EngineError: there is no cluster at the address, or none can be started.
    """
    if ray.is_initialized():
        where = ray.get_runtime_context().gcs_address
        ignored = {"address": address not in (None, "auto", "local", where), "runtime_env": bool(runtime_env)}
        for name in [name for name, is_given in ignored.items() if is_given]:
            whose = f"`ray.{name}` is ignored, because this process is connected to the cluster at {where} already"
            warnings.warn(f"{whose}: give it to ray.init, or leave ray.init to Etude.", stacklevel=2)
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


def release_cluster() -> None:
    """Stop using a cluster, if `ensure_started` started it here; its last user ends it."""
    where = ray.get_runtime_context().gcs_address if ray.is_initialized() else ""
    if where in _HELD:
        _HELD[where] -= 1
        if not _HELD[where]:
            del _HELD[where]
            ray.shutdown()


def _init(whose: str, address: str, runtime_env: Mapping[str, Any] | None, **more: Any) -> None:
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    env = None if runtime_env is None else dict(runtime_env)
    try:
        # Warnings during the start concern Ray's internals; later ones are shown again.
        with _apart():
            ray.init(address=address, runtime_env=env, logging_level=logging.ERROR, **more)
    except (ConnectionError, OSError, RuntimeError, ValueError, SystemExit) as error:
        why = str(error).rstrip(".")
        raise EngineError(f"{whose}: {why}. {_REMEDY if address != 'local' else ''}".rstrip()) from error
    finally:
        logging.getLogger("ray").setLevel(logging.WARNING)
        if is_main and handler not in (signal.SIG_DFL, None):  # Ray replaces it
            signal.signal(signal.SIGTERM, handler)


_REMEDY = (
    "Start one (ray start --head), give another address, or give none, so that one is started here for the duration of "
    "the run. If there is one and it asks for a token, set RAY_AUTH_MODE=token here, and RAY_AUTH_TOKEN if the token "
    "is not in ~/.ray/auth_token."
)


@contextmanager
def _apart() -> Iterator[None]:
    """A context in which Ray starts processes in a process group of their own, to which this process moves meanwhile.

    Ray protects its processes from Ctrl-C, but not from a SIGTERM to the whole group, as sent by `timeout` and batch
    systems: the cluster would be gone before a run could be saved. The processes still end with this process.
    """
    if not hasattr(os, "setpgid"):
        yield
        return
    own = os.getpgrp()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, process_group=0) as leader:  # keeps the group alive
        try:
            with contextlib.suppress(PermissionError):  # the leader of a session can't leave its group
                os.setpgid(0, leader.pid)
            yield
        finally:
            with contextlib.suppress(PermissionError):
                os.setpgid(0, own)


def connection() -> str:
    """The ids of the node and the job of this process's connection to a cluster; empty if there is none."""
    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return f"{context.get_node_id()} {context.get_job_id()}"


def check_connected(home: str) -> None:
    """Check that this process still has the `connection` ``home``; Ray itself would start another cluster.

    Raises:
        EngineError: it has another connection, or none.
    """
    if connection() != home:
        raise EngineError("the connection to the Ray cluster has ended: load the last checkpoint, or start anew.")


def _check_answers(address: str, whose: str) -> None:
    """Raise an EngineError if nothing listens; Ray itself would try for more than a minute, and end the process."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise EngineError(f"{whose}: {error}. {_REMEDY}") from error


def _modules_found() -> contextlib.AbstractContextManager[None]:
    """A context in which started processes find the same modules as this process, such as those of `module:factory`."""
    own = [path for path in sys.path if path and not path.startswith((sys.prefix, sys.base_prefix))]
    return variable_set("PYTHONPATH", os.pathsep.join(own))


def check_room(wanted: Sequence[Mapping[str, float]], *, can_grow: bool) -> None:
    """Check that a cluster has the requested resources, rather than waiting silently for them.

    Resources that others use at the moment count, because they may be released.

    Args:
        wanted: The resources by name of each process to start; each process must fit on one node.
        can_grow: Whether nodes may be added, as in an autoscaling cluster. Missing resources are then only a warning.

    Raises:
        EngineError: the cluster has less; the message names the missing resource and what to do.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    for name in sorted({name for each in wanted for name, amount in each.items() if amount > 0}):
        asked = [each.get(name, 0.0) for each in wanted]
        there = [node.get(name, 0.0) for node in nodes] or [0.0]
        if sum(asked) > sum(there) + 1e-9:
            lack = f"the cluster has {sum(there):g} {name} in all, but {sum(asked):g} are asked for"
        elif max(asked) > max(there) + 1e-9:
            lack = f"no node has more than {max(there):g} {name}, but one process asks for {max(asked):g}"
        else:
            continue
        lack += ": ask for less (fewer runners or learners, or less for each, such as cpus_per_runner)"
        if not can_grow:
            raise EngineError(f"{lack}, or use a larger cluster.")
        warnings.warn(f"{lack}, or add nodes; processes without room wait for them.", stacklevel=2)


def room() -> str:
    """A message about the free resources of the cluster."""
    there, free = cast("Any", ray.cluster_resources)(), cast("Any", ray.available_resources)()
    inner = ("node:", "object_store", "memory")
    # placement groups add resources with names such as CPU_group_0_31b4
    own = {name: n for name, n in there.items() if not name.startswith(inner) and "_group_" not in name}
    words = ", ".join(f"{free.get(name, 0.0):g} of {amount:g} {name}" for name, amount in sorted(own.items()))
    return f"The cluster has free: {words}. Processes that find no room wait."


def actors_of(config: AlgorithmConfig) -> list[dict[str, float]]:
    """The resources by name of each process that an algorithm with these settings starts; none on the local engine.

    Of the tasks that read recordings for learners, only one is counted; more run if there is room.
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
    """The resources of the process that trains, if it runs on a cluster too: its threads, workers and GPU."""
    gpu = {"GPU": 1.0} if config.compute.device.startswith("cuda") else {}
    return {"CPU": float(cores_of(config)), **gpu}


# -- errors in actors ---------------------------------------------------------------------------------------------

_LOST = (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError, ObjectLostError)
_MOST = 500  # characters of an error's text
IMPORTABLE = "Its code must be importable on every node: see `ray.runtime_env`."
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def cause_of(error: RayError) -> BaseException:
    """The error that was raised in an actor; ``error`` itself if it is Ray's own."""
    return (error.cause or error) if isinstance(error, RayTaskError) else error


def was_lost(cause: BaseException) -> bool:
    """Whether a process, a node or an object was lost; otherwise the code that ran there failed."""
    return isinstance(cause, _LOST) and not getattr(cause, "actor_init_failed", False)


def raise_from(error: RayError, where: str) -> NoReturn:
    """Raise the error from an actor, with a note that contains ``where`` and the traceback there.

    Raises:
        EngineError: the error is Ray's own, or can't be raised here.
    """
    cause = cause_of(error)
    if isinstance(cause, RayError):
        text = first_line(error)
        hint = f" {IMPORTABLE}" if "No module named" in text else ""
        raise EngineError(f"{where} can't be started or reached: {text}{hint}") from error
    if not isinstance(cause, Exception):  # such as a CancelledError
        raise EngineError(f"{where}: your code raised {type(cause).__name__}: {cause}") from error
    lines = _COLOURS.sub("", str(error)).splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("  File ")), 0)  # skips Ray's header
    cause.add_note("\n".join([f"in {where}, where this happened:", *lines[first:]]))
    raise cause from None


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for a message."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    text = " ".join(lines) or type(error).__name__
    return text if len(text) <= _MOST else f"{text[:_MOST]} ..."
