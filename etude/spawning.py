# SPDX-License-Identifier: Apache-2.0
"""Fresh Python processes that are sent a job: nothing is forked, and a terminal's signals do not reach them."""

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
from collections.abc import Mapping, Sequence
from multiprocessing import spawn
from typing import Any

_PACKAGE = "main_of_package"
"""The ``package.__main__`` that is to be imported for what a job needs of it."""

_is_importing_main = False
"""The script that sent the job is being imported again, in the process that it was sent to."""


def command(module: str, function: str) -> list[str]:
    """What runs a function in a fresh process; the arguments after it are `sys.path` as JSON and the job's file."""
    code = f"import sys, json; sys.path[:] = json.loads(sys.argv[1]); from {module} import {function}; {function}()"
    return [sys.executable, "-P", "-c", code]


def start(
    words: Sequence[str], job: Any, *, fds: Sequence[int] = (), env: Mapping[str, str] | None = None, **more: Any
) -> "subprocess.Popen[bytes]":
    """Start a process with a process group of its own, in which SIGINT is blocked until it unblocks it.

    Args:
        words: A `command`.
        job: What `received` gives there.
        fds: Files that it inherits.
        env: Its environment variables; None: those of this process.
        more: See `subprocess.Popen`.
    """
    with open(nameless_file(), "w+b") as file:
        pickle.dump(job, file)
        file.flush()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return subprocess.Popen(
                [*words, json.dumps([str(path) for path in sys.path]), str(file.fileno())],
                pass_fds=(file.fileno(), *fds),
                stdin=subprocess.DEVNULL,
                process_group=0,  # a signal to the group of this process does not end it before it can save
                env=env,
                **more,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def received() -> tuple[int, Any]:
    """In the process: the number of the file with the job, and the job."""
    number = int(sys.argv[2])
    with open(number, "rb", closefd=False) as file:
        file.seek(0)
        return number, pickle.load(file)  # noqa: S301  from the process that started this one, never data


def nameless_file() -> int:
    """The number of a new file that has no name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("etude")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# -- what the script of the user defines ------------------------------------------------------------------------------


def is_importing_main() -> bool:
    """Whether this is a process that was sent something, and imports the script that sent it."""
    return _is_importing_main or bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def is_interactive() -> bool:
    """Whether what `__main__` defines can't be found by other processes: it is no file."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is None and (path is None or not os.path.exists(path))


def preparation(*, needs_main: bool) -> dict[str, Any]:
    """What `unpickled` needs to import the script, if what is sent is defined in it, and to set `sys.argv`."""
    wanted = ("sys_argv", "init_main_from_name", "init_main_from_path") if needs_main else ("sys_argv",)
    data = {key: value for key, value in spawn.get_preparation_data("etude").items() if key in wanted}
    main_name = data.get("init_main_from_name", "")
    if main_name.endswith("__main__"):  # which multiprocessing takes for nobody's
        of_package = main_name.endswith(".__main__")
        path = getattr(sys.modules["__main__"], "__file__", None)
        data = {"sys_argv": sys.argv} | ({_PACKAGE: main_name} if of_package else {"init_main_from_path": path})
    return data


def unpickled(preparation: Mapping[str, Any], pickled: bytes) -> Any:
    """What was sent; the script is imported first where that is needed. Only for what one's own process pickled."""
    global _is_importing_main
    _is_importing_main = True
    try:
        given = dict(preparation)
        package = given.pop(_PACKAGE, None)
        spawn.prepare(given)
        if package is not None:
            main = types.ModuleType("__mp_main__")
            main.__dict__.update(runpy.run_module(package, run_name="__mp_main__", alter_sys=True))
            sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        return pickle.loads(pickled)  # noqa: S301  from the process that started this one, never data
    finally:
        _is_importing_main = False
