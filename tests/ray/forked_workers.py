# SPDX-License-Identifier: Apache-2.0
"""Worker processes of Ray without the seconds that imports take.

Ray starts Python for each actor, which then imports Ray, torch and Etude: 5 s of CPU time. The session's cluster runs
this file in place of Ray's own ``setup_worker.py``. The first such process starts a server that has imported all this,
and has done nothing else. Each worker is forked from it. The server ends with its raylet.

Clusters that scripts and commands start have Ray's own workers.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys

IMPORTS = ("torch", "pyarrow.dataset", "pyarrow.parquet", "ray", "etude.ray.runner_actor", "etude.ray.learners")
# Not ray.data: it draws a random id while it is imported, and then all forks would go on with the same ids.

OWN = ("--language=", "--serialized-runtime-env-context=")
"""Arguments that are for Ray's ``setup_worker.py``, and not for the worker."""


def ask(argv: list[str]) -> None:
    """Ask the server for a worker, as the process that Ray has started to become one."""
    taken = {word.partition("=")[0]: word.partition("=")[2] for word in argv if word.startswith(OWN)}
    context = json.loads(taken.get("--serialized-runtime-env-context", "{}"))
    if context.get("command_prefix") or context.get("override_worker_entrypoint"):  # Ray's own does what these ask for
        setup = os.path.join(os.path.dirname(argv[0]), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, setup, *argv])
    path = os.path.join(os.environ["FORKED_WORKERS"], f"{os.environ['RAY_RAYLET_PID']}-{os.environ['RAY_JOB_ID']}")
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(path):
            # In this environment: Ray reads much of it while it is imported.
            server = subprocess.Popen([sys.executable, __file__, path], stdout=subprocess.PIPE, start_new_session=True)
            assert server.stdout is not None
            assert server.stdout.read(1) == b"."  # it listens
    job = {
        "argv": [word for word in argv if not word.startswith(OWN)],
        "env": {**os.environ, **context.get("env_vars", {})},
        "cwd": os.getcwd(),
    }
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        socket.send_fds(client, [json.dumps(job).encode()], [0, 1, 2])


def serve(path: str) -> None:
    """Fork a worker for each message, until the raylet has ended."""
    import importlib
    import selectors

    for name in IMPORTS:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers
    raylet = os.pidfd_open(int(os.environ["RAY_RAYLET_PID"]))
    with socket.socket(socket.AF_UNIX) as server, selectors.DefaultSelector() as ready:
        server.bind(path)
        server.listen(64)
        ready.register(server, selectors.EVENT_READ)
        ready.register(raylet, selectors.EVENT_READ)
        os.write(1, b".")
        while all(key.fd != raylet for key, _ in ready.select()):
            connection, _ = server.accept()
            with connection:
                message, fds, _, _ = socket.recv_fds(connection, 2**20, 3, socket.MSG_WAITALL)
            if os.fork() == 0:
                break
            for fd in fds:
                os.close(fd)
        else:
            return
    os.close(raylet)
    become(message, fds)


def become(message: bytes, fds: list[int]) -> None:
    """Be what a fresh process would be with these arguments, environment and streams."""
    import runpy

    import numpy as np

    job = json.loads(message)
    os.setpgid(0, 0)  # Ray ends the whole group of a worker
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    sys.argv[:] = job["argv"]
    np.random.seed()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        del sys.path[0]  # this folder
        serve(sys.argv[1])
    else:
        ask(sys.argv[1:])
