# SPDX-License-Identifier: Apache-2.0
"""Several writers in one folder, and folders that go away: all that was taken is kept, or somebody is told."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from some_recording import ACTION, OBS, numbered, record

import etude.files
import etude.recordings.writer
from etude.errors import DataError
from etude.files import Lock
from etude.recordings import Recording, RecordingWriter, convert, validate

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no locks")

CHILD = """
import sys
sys.path.insert(0, sys.argv[2])
from some_recording import ACTION, OBS, numbered
from etude.recordings import RecordingWriter, writer
writer.ROW_GROUP_ROWS = 4
writer = RecordingWriter(sys.argv[1], obs_space=OBS, action_space=ACTION, prefix=sys.argv[3], append=True)
writer.write(numbered([20], first=100))
writer.flush()
writer.write(numbered([30], first=101))
while not list(writer.path.glob(".*.tmp")):
    pass
print("ready", flush=True)
sys.stdin.readline()
writer.close()
"""


class Child:
    """A process with a writer at work, which has an unfinished file."""

    def __init__(self, folder: Path, prefix: str = "part") -> None:
        command = [sys.executable, "-c", CHILD, str(folder), str(Path(__file__).parent), prefix]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def end(self, number: int | None = None) -> None:
        if number is not None:
            self.process.send_signal(number)
        self.process.communicate("\n", timeout=60)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    one = Child(tmp_path)
    yield one
    one.process.kill()
    one.process.communicate(timeout=60)


def writer_at(folder: Path, **options: object) -> RecordingWriter:
    return RecordingWriter(folder, obs_space=OBS, action_space=ACTION, **options)  # type: ignore[arg-type]


def episodes(folder: Path) -> list[str]:
    assert validate(folder).ok, str(validate(folder))
    return sorted(set(Recording.open(folder).read().segments.episode_id))


def unfinished(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.suffix == ".tmp"]


def wait_for_unfinished(folder: Path, count: int) -> None:
    end = time.monotonic() + 60
    while len(unfinished(folder)) < count:
        assert time.monotonic() < end


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that all that is written begins a file at once."""
    monkeypatch.setattr(etude.recordings.writer, "ROW_GROUP_ROWS", 4)


@pytest.mark.parametrize(
    ("one", "other"), [("part-a", "part"), ("part", "part-a"), ("part", "part-00001"), ("x", "xx")]
)
def test_writers_with_different_prefixes_keep_all(tmp_path: Path, one: str, other: str) -> None:
    first = writer_at(tmp_path, prefix=one)
    first.write(numbered([5]))
    wait_for_unfinished(tmp_path, 1)
    with writer_at(tmp_path, prefix=other, append=True) as second:
        second.write(numbered([6], first=1))
        second.flush()
        first.write(numbered([7], first=2))
        first.flush()
        second.write(numbered([8], first=3))
    first.close()
    assert episodes(tmp_path) == ["e0", "e1", "e2", "e3"]
    assert Recording.open(tmp_path).num_steps == 26
    assert unfinished(tmp_path) == []
    listed = validate(tmp_path).files
    assert listed == len(list(tmp_path.glob("*.parquet"))) == 3


def test_many_writers_at_once_keep_all_and_what_is_lost_is_told(tmp_path: Path) -> None:
    def work(k: int) -> None:
        with writer_at(tmp_path, prefix=f"w{k}", append=True) as writer:
            for i in range(5):
                writer.write(numbered([3], first=10 * k + i))
                writer.flush()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(episodes(tmp_path)) == 30
    (tmp_path / "w3-00002.parquet").unlink()
    with pytest.raises(DataError, match=r"w3-00002\.parquet: is not there, but when w3-00003\.parquet was written"):
        Recording.open(tmp_path)
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".parquet"] == []


def test_a_second_writer_of_one_prefix_is_told_who_is_at_work(tmp_path: Path) -> None:
    with writer_at(tmp_path) as first:
        first.write(numbered([5]))
        for append in (False, True):
            with pytest.raises(DataError, match=rf"another writer is using .* \(process {os.getpid()} on .*prefix"):
                writer_at(tmp_path, append=append)
    with writer_at(tmp_path, append=True) as second:
        second.write(numbered([6], first=1))
    assert episodes(tmp_path) == ["e0", "e1"]


def test_a_writer_of_another_process_is_not_disturbed(tmp_path: Path, child: Child) -> None:
    with pytest.raises(DataError, match=rf"\(process {child.process.pid} on "):
        writer_at(tmp_path, append=True)
    with writer_at(tmp_path, append=True, prefix="other") as writer:
        writer.write(numbered([6]))
    assert len(unfinished(tmp_path)) == 1
    child.end()
    assert episodes(tmp_path) == ["e0", "e100", "e101"]


@pytest.mark.parametrize("prefix", ["part", "other"])
def test_what_a_killed_writer_left_unfinished_is_removed_by_the_next(tmp_path: Path, child: Child, prefix: str) -> None:
    child.end(signal.SIGKILL)
    assert len(unfinished(tmp_path)) == 1
    with writer_at(tmp_path, append=True, prefix=prefix) as writer:
        writer.write(numbered([6]))
    assert unfinished(tmp_path) == []
    assert episodes(tmp_path) == ["e0", "e100"]


def test_without_locks_both_keep_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etude.files, "_locked", lambda *_, **__: False)
    first, second = writer_at(tmp_path), writer_at(tmp_path)
    for i, writer in enumerate((first, second)):
        writer.write(numbered([5], first=i))
    wait_for_unfinished(tmp_path, 2)
    third = writer_at(tmp_path)
    for i, writer in enumerate((third, second, first)):
        writer.write(numbered([5], first=10 + i))
        writer.flush()
        writer.close()
    assert episodes(tmp_path) == ["e0", "e1", "e10", "e11", "e12"]


def test_two_writers_behind_a_url_keep_all() -> None:
    where = "memory://two-writers/r"
    first, second = (RecordingWriter(where, obs_space=OBS, action_space=ACTION) for _ in range(2))
    for i, writer in enumerate((first, second, first)):
        writer.write(numbered([4], first=i))
        writer.flush()
    first.close()
    second.close()
    assert Recording.open(where).num_episodes == 3


@pytest.mark.parametrize("format", ["minari", "rllib-episodes"])
def test_a_conversion_does_not_disturb_another_one(tmp_path: Path, format: str) -> None:
    record(tmp_path / "r", numbered([4, 5]))
    (tmp_path / ".out-v0.tmp").mkdir()
    (tmp_path / ".out-v0.tmp" / "half").write_bytes(b"a file")
    with Lock(tmp_path / ".out-v0.lock"), pytest.raises(DataError, match="is being written already"):
        convert(Recording.open(tmp_path / "r"), tmp_path / "out-v0", format)
    assert (tmp_path / ".out-v0.tmp" / "half").read_bytes() == b"a file"
    assert convert(Recording.open(tmp_path / "r"), tmp_path / "out-v0", format).num_steps == 9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-v0", "r"]


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def move(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def make_anew(folder: Path) -> None:
    remove(folder)
    folder.mkdir()


def abandon_episodes(folder: Path) -> None:
    remove(folder)
    record(folder, numbered([3]))


@pytest.mark.parametrize("happens", [remove, move, make_anew, abandon_episodes])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_folder_that_goes_away_is_an_error_at_the_next_write(
    tmp_path: Path, happens: object, has_begun: bool
) -> None:
    folder = tmp_path / "r"
    writer = writer_at(folder)
    writer.write(numbered([5]))
    if has_begun:
        wait_for_unfinished(folder, 1)
    else:
        writer.flush()
    happens(folder)  # type: ignore[operator]
    before = sorted(tmp_path.rglob("*"))
    for work in (lambda: writer.write(numbered([5], first=1)), writer.flush, writer.close):
        with pytest.raises(DataError, match=r"r: .*(removed or moved|writing failed)"):
            work()
    if happens is not move:
        assert sorted(tmp_path.rglob("*")) == before
    if happens is abandon_episodes:
        np.testing.assert_array_equal(Recording.open(folder).read().steps["obs"], numbered([3]).steps["obs"])


def test_a_folder_that_goes_away_before_the_end_is_an_error_of_close(tmp_path: Path) -> None:
    writer = writer_at(tmp_path / "r")
    writer.write(numbered([5]))
    writer.flush()
    remove(tmp_path / "r")
    with pytest.raises(DataError, match="removed or moved"):
        writer.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_takes_nothing_from_its_parent(tmp_path: Path) -> None:
    writer = writer_at(tmp_path)
    writer.write(numbered([5]))
    writer.flush()
    child = os.fork()
    if not child:
        writer.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(DataError, match="another writer is using"):
        writer_at(tmp_path, append=True)
    writer.write(numbered([6], first=1))
    writer.close()
    assert episodes(tmp_path) == ["e0", "e1"]


def test_files_that_go_away_behind_a_url_are_an_error_of_the_next_file() -> None:
    system = pytest.importorskip("fsspec").filesystem("memory")
    where = "memory://gone/r"
    writer = RecordingWriter(where, obs_space=OBS, action_space=ACTION)
    writer.write(numbered([5]))
    writer.flush()
    system.rm("/gone/r", recursive=True)
    writer.write(numbered([6], first=1))
    for work in (writer.flush, writer.close):
        with pytest.raises(DataError, match="part-00000.parquet in it, was removed or moved"):
            work()


@pytest.mark.parametrize("prefix", ["", ".a", "_a", "a/b", "a\\b", "a\nb", "a\0b", "a" * 101])
def test_a_prefix_that_makes_no_file_names_is_refused_at_once(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix is"):
        writer_at(tmp_path, prefix=prefix)
    assert list(tmp_path.iterdir()) == []
