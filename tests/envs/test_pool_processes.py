# SPDX-License-Identifier: Apache-2.0
"""Worker processes: how they begin, and that they end with the process that has the arena, whatever ends it."""

import gc
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pool_envs import HANG, Knowing, Told, broken, copies_of

from etude.envs.pool import PoolArena
from etude.envs.workers import Workers
from etude.errors import EnvError, SpaceError

HERE = Path(__file__).parent


def shown(arena: PoolArena) -> Any:
    """The first observation of each env."""
    arena.reset(seed=1)
    rows: dict[int, Any] = {}
    while len(rows) < arena.num_envs:
        for turn in arena.recv():
            rows |= dict(zip(turn.slots.tolist(), turn.obs["obs"], strict=True))
            if len(rows) < arena.num_envs:
                arena.send(turn, {"action": np.zeros(len(turn.slots), np.int64)})
    return np.stack([rows[env] for env in range(arena.num_envs)])


def assert_ends(pids: list[int], seconds: float = 20) -> None:
    """Wait until these processes have ended."""
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ready, _, _ = select.select([handle], [], [], seconds)
        os.close(handle)
        assert ready, f"process {pid} goes on"


# -- the beginning --------------------------------------------------------------------------------------------------


def test_workers_are_other_processes_and_know_little() -> None:
    arena = PoolArena(Told, Workers(num_workers=3, envs_per_worker=2, min_batch=6))
    pids = shown(arena)[:, 0].astype(int)
    assert len(set(pids.tolist())) == 3
    assert os.getpid() not in pids
    assert (pids[::2] == pids[1::2]).all()
    arena.close()
    arena = PoolArena(Knowing, Workers(num_workers=3, min_batch=3))
    has_torch, num_threads, drawn = shown(arena).T
    assert not has_torch.any()
    assert (num_threads == 1).all()
    assert len(set(drawn.tolist())) == 3, "each draws its own from NumPy's global generator"
    arena.close()


def test_envs_by_name() -> None:
    for name in ("CartPole-v1", "pool_envs:Told", "gymnasium.envs.classic_control:Acrobot-v1"):
        arena = PoolArena(name, Workers(num_workers=1))
        assert len(shown(arena)) == 1
        arena.close()


def test_what_a_worker_says_when_it_can_not_make_its_envs() -> None:
    with pytest.raises(
        EnvError, match=r"(?s)pool_envs:broken fails to make an env: LookupError.*in broken\n.*simulator"
    ):
        PoolArena(broken, Workers(num_workers=2))
    with pytest.raises(EnvError, match=r"env 'pool_envs:nothing': the module has no `nothing`"):
        PoolArena("pool_envs:nothing", Workers(num_workers=1))
    with pytest.raises(EnvError, match=r"can't import the module `no_such_module`"):
        PoolArena("no_such_module:make", Workers(num_workers=1))
    with pytest.raises(EnvError, match=r"no env 'CartPol-v1' is registered .* Nearest: 'CartPole-v1'"):
        PoolArena("CartPol-v1", Workers(num_workers=1))


def test_modules_see_the_arguments_of_the_program(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "arguing_env.py").write_text(
        "import sys\nfrom pool_envs import Told\n\nassert sys.argv == ['program', '--fast'], sys.argv\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["program", "--fast"])
    PoolArena("arguing_env:Told", Workers(num_workers=1)).close()


def test_spaces_that_can_not_be_handled() -> None:
    with pytest.raises(SpaceError, match=r"`obs` is a Text space"):
        PoolArena("test_pool_processes:make_talker", Workers(num_workers=1))


def make_talker() -> Any:
    from gymnasium import spaces

    env = Told()
    env.observation_space = spaces.Text(5)  # type: ignore[assignment]
    return env


def test_what_can_not_be_sent_to_a_process() -> None:
    with pytest.raises(EnvError, match=r"<lambda> can't be sent .*'module:function'.* Workers\(mode='thread'\)"):
        PoolArena(lambda: Told(), Workers(num_workers=1))
    arena = PoolArena(lambda: Told(), Workers(num_workers=1, mode="thread"))
    assert shown(arena)[0, 0] == os.getpid()
    arena.close()


# -- the end --------------------------------------------------------------------------------------------------------


class Closing(Told):
    """Leaves a line in a file when it is closed."""

    def __init__(self, path: str, *, hangs: bool = False, fails: bool = False) -> None:
        super().__init__()
        self.path, self.hangs, self.fails = path, hangs, fails

    def close(self) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("closed\n")
        if self.fails:
            raise RuntimeError("stuck")
        while self.hangs:
            signal.pause()


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_close_closes_the_envs(tmp_path: Path, mode: Any) -> None:
    path = tmp_path / "closed"
    arena = PoolArena(partial(Closing, str(path)), Workers(num_workers=2, envs_per_worker=2, mode=mode, min_batch=4))
    pids = shown(arena)[:, 0].astype(int).tolist()
    arena.close()
    assert path.read_text() == "closed\n" * 4
    arena.close()
    if mode == "process":
        assert_ends(pids, 0)
    with pytest.raises(EnvError, match=r"the arena is closed"):
        arena.recv()
    with pytest.raises(EnvError, match=r"the arena is closed"):
        arena.reset()


@pytest.mark.parametrize("mode", ["sync", "thread", "process"])
def test_all_envs_are_closed_though_they_can_not_be(
    tmp_path: Path, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "closed"
    workers = Workers() if mode == "sync" else Workers(num_workers=1, envs_per_worker=3, mode=mode)
    arena = copies_of(partial(Closing, str(path), fails=True), workers, 3)
    arena.close()
    assert path.read_text() == "closed\n" * 3
    if mode != "process":  # there, the warnings are on the process's own stderr
        assert [r.getMessage() for r in caplog.records] == [
            "functools:partial fails to close an env: RuntimeError: stuck"
        ] * 3


def test_who_does_not_close_in_time_is_killed(tmp_path: Path) -> None:
    make = partial(Closing, str(tmp_path / "closed"), hangs=True)
    arena = PoolArena(make, Workers(num_workers=2, cleanup_time=0.1))
    pids = shown(arena)[:, 0].astype(int).tolist()
    arena.close()
    assert_ends(pids, 0)


def test_close_in_the_middle_of_a_step() -> None:
    arena = PoolArena(Told, Workers(num_workers=2, cleanup_time=0.1))
    pids = shown(arena)[:, 0].astype(int).tolist()
    for turn in arena.recv():
        arena.send(turn, {"action": np.full(len(turn.slots), HANG)})
    arena.close()
    assert_ends(pids, 0)


def test_an_arena_that_is_dropped_is_closed() -> None:
    arena = PoolArena(Told, Workers(num_workers=2))
    pids = shown(arena)[:, 0].astype(int).tolist()
    del arena
    assert_ends(pids, 0)


def test_no_file_and_no_shared_memory_stays_open() -> None:
    def open_files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def named_memory() -> int:
        return Path("/proc/self/maps").read_text(encoding="utf-8").count("/dev/shm")

    PoolArena(Told, Workers(num_workers=2)).close()
    before, memory = open_files(), named_memory()
    for mode in ("process", "thread"):
        arena = PoolArena(Told, Workers(num_workers=2, mode=mode))  # type: ignore[arg-type]
        shown(arena)
        assert named_memory() == memory
        arena.close()
    with pytest.raises(EnvError):
        PoolArena(broken, Workers(num_workers=2))
    del arena
    assert open_files() <= before


SCRIPT = """
import os, signal, sys
import numpy as np
from etude.envs.pool import PoolArena
from etude.envs.workers import Workers
from pool_envs import Told, HANG

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored where the tests run in the background
    arena = PoolArena(Told, Workers(num_workers=2, min_batch=2, cleanup_time=0.5))
    arena.reset(seed=1)
    (turn,) = arena.recv()
    how = sys.argv[1]
    if how == "with a child":
        arena.send(turn, {"action": np.array([0, HANG])})
        is_child = os.fork() == 0
    if how != "with a child" or is_child:
        print(*turn.obs["obs"][:, 0].astype(int), arena._backend._process.pid, flush=True)
    if how == "in a step":
        arena.send(turn, {"action": np.array([0, HANG])})
        arena.recv()
    if how == "between steps":
        signal.pause()
    if how == "by an error":
        raise RuntimeError("enough")
    if how == "with a child":
        if is_child:
            for end in (1, 2):
                os.close(end)
            os.read(0, 1)  # and has all open meanwhile that the arena has
            os._exit(0)
        signal.pause()
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(how: str, text: str = SCRIPT) -> "subprocess.Popen[str]":
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(text))
        process = subprocess.Popen(
            [sys.executable, str(path), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=300)


def pids_of(process: "subprocess.Popen[str]") -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


@pytest.mark.parametrize("how", ["in a step", "between steps", "with a child"])
def test_workers_die_with_a_killed_parent(script: Any, how: str) -> None:
    process = script(how)
    pids = pids_of(process)
    assert len(pids) == 3
    process.kill()
    assert_ends(pids)


@pytest.mark.parametrize("how", ["in a step", "between steps"])
def test_ctrl_c_ends_all_without_a_word_from_the_workers(script: Any, how: str) -> None:
    process = script(how)
    pids = pids_of(process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert out == ""
    assert err.count("Traceback") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert_ends(pids, 0)


@pytest.mark.parametrize("how", ["by an error", "by its end"])
def test_workers_end_with_the_script(script: Any, how: str) -> None:
    process = script(how)
    pids = pids_of(process)
    _, err = process.communicate(timeout=300)
    assert err.count("Traceback") == (how == "by an error")
    assert "leaked" not in err
    assert_ends(pids, 0)


def test_when_what_starts_workers_is_killed_they_die_and_that_is_told() -> None:
    arena = PoolArena(Told, Workers(num_workers=2, min_batch=2))
    pids = shown(arena)[:, 0].astype(int).tolist()
    os.kill(arena._backend._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    assert_ends(pids)
    (turn,) = arena.recv()
    arena.send(turn, {"action": np.zeros(2, np.int64)})
    with pytest.raises(EnvError, match=r"the process that starts the workers has ended, and the workers with it"):
        arena.recv()
    arena.close()


# -- envs that are defined in scripts -------------------------------------------------------------------------------

OWN = """
import sys
import numpy as np
from etude.envs.pool import PoolArena
from etude.envs.workers import Workers
from pool_envs import Told

class Own(Told):
    pass

def main():
    arena = PoolArena(Own, Workers(num_workers=2, min_batch=2))
    arena.reset(seed=1)
    print(len(arena.recv()[0].slots))
    arena.close()

"""


def test_an_env_that_is_defined_in_the_script(script: Any) -> None:
    process = script("", OWN + 'if __name__ == "__main__":\n    main()\n')
    out, err = process.communicate(timeout=300)
    assert (out, err) == ("2\n", "")


def test_a_script_that_does_not_guard_what_it_does(script: Any) -> None:
    process = script("", OWN + "main()\n")
    out, err = process.communicate(timeout=300)
    assert out == ""
    assert "the script starts workers itself" in err
    assert 'under `if __name__ == "__main__":`' in err


def test_an_env_that_is_defined_in_an_interactive_session() -> None:
    text = OWN + "main()\n"
    process = subprocess.run(
        [sys.executable, "-"],
        input=text,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
    )
    assert "__main__:Own is defined in an interactive session" in process.stderr
    assert "Workers(mode='thread')" in process.stderr


def test_a_module_that_starts_threads_is_imported_by_each_worker(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "threading_env.py").write_text(
        textwrap.dedent("""
            import os, threading
            from pool_envs import Knowing

            threading.Thread(target=threading.Event().wait, daemon=True).start()
            importer = os.getpid()

            class Threaded(Knowing):
                def reset(self, **kwargs):
                    obs, info = super().reset(**kwargs)
                    obs[0] = importer == os.getpid()
                    return obs, info
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    arena = PoolArena("threading_env:Threaded", Workers(num_workers=2, min_batch=2))
    is_own, num_threads, _ = shown(arena).T
    assert is_own.all()
    assert (num_threads == 2).all()
    arena.close()
    import threading_env  # type: ignore[import-not-found]

    arena = PoolArena(threading_env.Threaded, Workers(num_workers=2, min_batch=2))
    is_own, num_threads, _ = shown(arena).T
    assert is_own.all()
    assert (num_threads == 2).all()
    arena.close()
