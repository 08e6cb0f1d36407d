# SPDX-License-Identifier: Apache-2.0
"""Start fresh Python processes and send each a job. They are not forked, and a terminal's signals do not reach them."""

import json
import multiprocessing
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import spawn
from typing import Any

_PACKAGE_MAIN = "main_of_package"
"""The key in `preparation` of the module name ``package.__main__``, for ``python -m package``."""

_SAFE_PATH = "PYTHONSAFEPATH"
"""The environment variable that acts as Python's option ``-P``."""

_is_importing_main = False
"""Whether this process is importing the script that sent its job, to find what the script defines."""


def command(module: str, function: str) -> list[str]:
    """Return the command line that runs a function in a fresh process.

    Two arguments must follow it, which `start` adds: `sys.path` as JSON, and the descriptor of the job's file.
    """
    code = f"import sys, json; sys.path[:] = json.loads(sys.argv[1]); from {module} import {function}; {function}()"
    return [sys.executable, "-P", "-c", code]


def start(
    words: Sequence[str], job: Any, *, fds: Sequence[int] = (), env: Mapping[str, str] | None = None, **more: Any
) -> "subprocess.Popen[bytes]":
    """Start a process in its own process group. It starts with SIGINT blocked.

    Args:
        words: The command line, from `command`.
        job: The object, which is pickled, that `receive_job` returns in the process.
        fds: The file descriptors that it inherits.
        env: Its environment variables; None: those of this process.
        more: Other arguments of `subprocess.Popen`.
    """
    with open(unnamed_file(), "w+b") as file:
        pickle.dump(job, file)
        file.flush()
        with interrupts_blocked():
            return subprocess.Popen(
                [*words, json.dumps([str(path) for path in sys.path]), str(file.fileno())],
                pass_fds=(file.fileno(), *fds),
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in the terminal must not end it before it can save
                env=env,
                **more,
            )


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """A context in which new processes start with SIGINT blocked: Ctrl-C can't end them before they are set up."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def receive_job() -> tuple[int, Any]:
    """Read the job, in a process that `start` started; returns the descriptor of its file, and the job."""
    number = int(sys.argv[2])
    with open(number, "rb", closefd=False) as file:
        file.seek(0)
        return number, pickle.load(file)  # noqa: S301  from the process that started this one, never data


def unnamed_file() -> int:
    """Create a file without a name, and return its descriptor. The system deletes it with its last descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("etude")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@contextmanager
def variable_set(name: str, value: str) -> Iterator[None]:
    """A context in which an environment variable has this value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def no_current_folder() -> AbstractContextManager[None]:
    """A context in which processes that multiprocessing starts import nothing from the current folder.

    Python puts that folder in front of its own modules for ``python -c``, which is how multiprocessing starts them.
    They get the `sys.path` of this process as soon as they receive their first job.
    """
    return variable_set(_SAFE_PATH, "1")


# -- objects that the user's script defines ---------------------------------------------------------------------------


def is_importing_main() -> bool:
    """Whether this process is importing the script of the process that started it."""
    return _is_importing_main or bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def is_interactive() -> bool:
    """Whether `__main__` is an interactive session, not a file, so that other processes can't import it."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is None and (path is None or not os.path.exists(path))


def preparation(*, needs_main: bool) -> dict[str, Any]:
    """Return what `unpickle` needs in the other process to set `sys.argv` and, if asked, to import the script.

    Args:
        needs_main: Whether the pickled object refers to the script, so that it must be imported.
    """
    wanted = ("sys_argv", "init_main_from_name", "init_main_from_path") if needs_main else ("sys_argv",)
    data = {key: value for key, value in spawn.get_preparation_data("etude").items() if key in wanted}
    main_name = data.get("init_main_from_name", "")
    if main_name.endswith("__main__"):  # multiprocessing would not import it
        of_package = main_name.endswith(".__main__")
        path = getattr(sys.modules["__main__"], "__file__", None)
        data = {"sys_argv": sys.argv} | ({_PACKAGE_MAIN: main_name} if of_package else {"init_main_from_path": path})
    return data


def unpickle(preparation: Mapping[str, Any], pickled: bytes) -> Any:
    """Unpickle an object from the process that started this one, after importing its script if needed.

    It must never be called with data from elsewhere, because unpickling runs code.

    Args:
        preparation: The result of `preparation` in that process.
        pickled: The pickled object.
    """
    global _is_importing_main
    _is_importing_main = True
    try:
        data = dict(preparation)
        package = data.pop(_PACKAGE_MAIN, None)
        spawn.prepare(data)
        if package is not None:
            main = types.ModuleType("__mp_main__")
            main.__dict__.update(runpy.run_module(package, run_name="__mp_main__", alter_sys=True))
            sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        return pickle.loads(pickled)  # noqa: S301  from the process that started this one, never data
    finally:
        _is_importing_main = False
