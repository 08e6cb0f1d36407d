# SPDX-License-Identifier: Apache-2.0
"""Python programs in processes of their own, without the seconds that imports take.

Each is forked from a process that has imported torch, gymnasium, pyarrow and Etude, and has done nothing else. Where a
test is of imports, of Python's options or of signals, Python is to be started itself.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

IMPORTS = ("torch", "gymnasium", "pyarrow.dataset", "pyarrow.parquet", "etude.cli.main", "etude.algorithms")

SETTINGS = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::DeprecationWarning:__main__"}
"""Of the environment, which all programs have in common."""


class Preloaded:
    """The process that programs are forked from, one after another; ends with the ``with`` block."""

    def __enter__(self) -> "Preloaded":
        path = os.pathsep.join([os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.server = subprocess.Popen(
            [sys.executable, "-c", "import preloaded; exec(preloaded.serve())"],
            env={**os.environ, **SETTINGS, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.communicate()

    def run(
        self,
        program: str | Path,
        *args: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Run a script, or code, as `subprocess.run` would with ``capture_output``.

        Args:
            program: The script's path, or code as of ``python -c``.
            args: What follows it on the command line.
            cwd: The folder that it works in.
            env: Its environment, in place of this process's; ``PYTHONPATH`` counts, other settings of Python do not.
            timeout: Seconds until it is killed.

        Raises:
            subprocess.TimeoutExpired: it took longer.
        """
        with tempfile.TemporaryDirectory() as folder:
            streams = [os.path.join(folder, name) for name in ("stdout", "stderr")]
            job = {
                "script": str(program) if isinstance(program, Path) else None,
                "code": program.read_text(encoding="utf-8") if isinstance(program, Path) else program,
                "args": args,
                "cwd": str(cwd or Path.cwd()),
                "env": {**(os.environ if env is None else env), **SETTINGS},
                "streams": streams,
                "timeout": timeout,
            }
            assert self.server.stdin is not None
            assert self.server.stdout is not None
            self.server.stdin.write(json.dumps(job) + "\n")
            self.server.stdin.flush()
            code = json.loads(self.server.stdout.readline())
            out, err = (Path(stream).read_text(encoding="utf-8") for stream in streams)
        if code is None:
            raise subprocess.TimeoutExpired([str(program), *args], timeout, out, err)
        return subprocess.CompletedProcess([str(program), *args], code, out, err)


def serve() -> types.CodeType:
    """Fork a process for each line of standard input, and write its exit code. Returns in the forks: what to run."""
    for name in IMPORTS:
        importlib.import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return _begin(job)
        print(json.dumps(_ended(pid, job["timeout"])), flush=True)
    sys.exit()


def _ended(pid: int, timeout: float) -> int | None:
    """The exit code of a process; None where it was killed since it took too long."""

    def kill(*_: object) -> None:
        nonlocal is_late
        is_late = True
        os.kill(pid, signal.SIGKILL)

    is_late = False
    signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, timeout)
    _, status = os.waitpid(pid, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return None if is_late else os.waitstatus_to_exitcode(status)


def _begin(job: dict[str, Any]) -> types.CodeType:
    """Make this process what a fresh one would be that is to run this program."""
    import numpy as np

    for fd, name in enumerate((os.devnull, *job["streams"])):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, fd)
        os.close(opened)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    here, script = os.path.dirname(__file__), job["script"]
    sys.path[:] = [path for path in sys.path[1:] if path != here]
    for path in reversed(job["env"].get("PYTHONPATH", "").split(os.pathsep)):
        if path and path not in sys.path:
            sys.path.insert(0, path)
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)) if script else "")
    sys.argv[:] = [script or "-c", *job["args"]]
    np.random.seed()
    main = vars(sys.modules["__main__"])
    del main["preloaded"], sys.modules["preloaded"]
    if script:
        main["__file__"] = script
    return compile(job["code"], script or "<string>", "exec", dont_inherit=True)
