# SPDX-License-Identifier: Apache-2.0
import os
import signal
import subprocess
import sys

import pytest

from etude import atomic


def test_a_file_is_made_and_replaced(tmp_path):
    path = tmp_path / "x.json"
    atomic.write_atomically(path, b"one")
    atomic.write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step):
    def full(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "x.json"
    atomic.write_atomically(path, b"old")
    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space left"):
        atomic.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: done.append(os.fstat(handle).st_ino) or fsync(handle))
    monkeypatch.setattr(os, "replace", lambda a, b: done.append("replace") or replace(a, b))
    atomic.write_atomically(tmp_path / "x", b"data")
    assert done == [(tmp_path / "x").stat().st_ino, "replace", tmp_path.stat().st_ino]


DIES_AT = """
import os, signal, sys
from pathlib import Path
from etude import atomic
left = int(sys.argv[2])
def dying(function):
    def call(*args):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)
    return call
for name in ("fsync", "replace", "close"):
    setattr(os, name, dying(getattr(os, name)))
atomic.write_atomically(Path(sys.argv[1]), b"new" * 9999)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_killed_before_any_step_the_file_is_whole_and_what_is_left_over_does_not_add_up(tmp_path):
    path, found = tmp_path / "x", []
    for step in range(9):
        atomic.write_atomically(path, b"old")
        code = subprocess.run([sys.executable, "-c", DIES_AT, str(path), str(step)]).returncode
        found.append(path.read_bytes()[:3])
        assert path.read_bytes() in (b"old", b"new" * 9999)
        assert len(list(tmp_path.iterdir())) <= 2
        if not code:
            break
        assert code == -signal.SIGKILL
    assert not code, "the write takes more steps than were tried"
    assert found == sorted(found, reverse=True)
    assert set(found) == {b"old", b"new"}
    atomic.write_atomically(path, b"old")
    assert list(tmp_path.iterdir()) == [path]
