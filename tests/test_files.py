# SPDX-License-Identifier: Apache-2.0
"""Remote paths and globs, beside pathlib and glob on the same files; files that appear whole."""

import glob
import io
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from pyarrow import fs

from etude.errors import DataError
from etude.files import (
    RemotePath,
    expanded,
    glob_base,
    located,
    publish_at,
    relative,
    shown,
    temporary_path,
    write_atomically,
)
from etude.recordings import Recording
from etude.recordings.footers import footer

FILES = (
    "a.parquet",
    "b.txt",
    ".hidden/x.parquet",
    "runs/1/data/part-0.parquet",
    "runs/1/data/part-1.parquet",
    "runs/1/.part-2.parquet.tmp",
    "runs/2/data/part-0.parquet",
    "runs/2/notes.txt",
    "runs/deep/er/data/part-0.parquet",
    "odd [1]/x?.parquet",
)


@pytest.fixture
def tree(tmp_path):
    for i, name in enumerate(FILES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * i)
    return tmp_path


@pytest.fixture
def box(tree):
    """The same files behind a file system of fsspec's."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    for name in FILES:
        memory.pipe(f"/box/{name}", (tree / name).read_bytes())
    yield located("memory://box")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def names(paths, folder):
    return [relative(path, folder).as_posix() for path in paths]


def test_a_remote_path_answers_as_pathlib_does(tree, box):
    for remote in (box, box.listed()):
        assert isinstance(remote, RemotePath)
        for pattern in ("*", "*.parquet", "part-[01]*"):
            assert names(sorted(remote.rglob(pattern)), remote) == names(sorted(tree.rglob(pattern)), tree)
            assert names(remote.glob(pattern), remote) == names(sorted(tree.glob(pattern)), tree)
        for name in ("", "a.parquet", "runs", "runs/1", "runs/2/notes.txt", "nothing", "runs/1/data/part-1.parquet"):
            here, there = tree / name if name else tree, remote / name if name else remote
            for ask in ("exists", "is_file", "is_dir"):
                assert getattr(here, ask)() == getattr(there, ask)(), (name, ask)
            if name:
                assert (here.name, here.stem, here.suffix) == (there.name, there.stem, there.suffix)
            if here.is_file():
                assert here.stat().st_size == there.stat().st_size
                assert here.read_bytes() == there.read_bytes()
                with there.open() as file:
                    file.seek(2)
                    assert file.read() == here.read_bytes()[2:]
        assert remote / "runs" == (remote / "runs/1").parent
        assert str(remote / "runs") == "memory://box/runs"
    with pytest.raises(FileNotFoundError, match="memory://box/none: there is no such file"):
        (box / "none").stat()


@pytest.mark.parametrize(
    "pattern",
    [
        "*",
        "*.parquet",
        "runs/*",
        "runs/*/data",
        "runs/?/data/*.parquet",
        "runs/**/*.parquet",
        "**/part-0.parquet",
        "**/data",
        "runs/[2d]*/*",
        "odd [[]1]/*",
        ".h*/*",
        "runs/**",
    ],
)
def test_globs_find_what_glob_finds(tree, box, pattern):
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    for name in FILES:
        memory.pipe(f"/box/{name}", (tree / name).read_bytes())
    wanted = {p.rstrip("/") for p in glob.glob(pattern, root_dir=tree, recursive=True)} - {"runs"}
    found = expanded(f"memory://box/{pattern}")
    assert set(names(found, box)) - {"runs"} == wanted
    assert names(expanded(str(tree / pattern)), tree) == sorted(
        names(map(Path, glob.glob(str(tree / pattern), recursive=True)), tree)
    )
    sub = fs.SubTreeFileSystem(str(tree), fs.LocalFileSystem())
    assert {path.inner for path in expanded(pattern, filesystem=sub)} - {"runs"} == wanted


def test_what_is_there_by_its_name_is_no_glob(tree):
    assert expanded(str(tree / "odd [1]")) == [tree / "odd [1]"]
    assert [p.name for p in expanded(tree / "odd [1]" / "x?.parquet")] == ["x?.parquet"]
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pipe("/box/odd [1]/x", b"")
    assert [str(path) for path in expanded("memory://box/odd [1]/x")] == ["memory://box/odd [1]/x"]


def test_globs_that_find_nothing(tree):
    with pytest.raises(DataError, match=r"none\*: no file or folder matches this glob\. Correct it"):
        expanded(str(tree / "none*"))
    with pytest.raises(DataError, match=r"memory://box/none\*: no file or folder matches this glob"):
        expanded("memory://box/none*")


@pytest.mark.parametrize(
    ("pattern", "above"),
    [("a/b*/c", "a"), ("a/[bc]/**/d.csv", "a"), ("*/x", "."), ("a/b", None), ("odd [1]", None), ("odd [2]/x", ".")],
)
def test_the_folder_above_a_glob(
    pattern: str, above: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd [1]").mkdir()
    monkeypatch.chdir(tmp_path)
    assert glob_base(pattern) == (None if above is None else Path(above))
    assert glob_base(str(tmp_path / pattern)) == (None if above is None else tmp_path / above)
    assert glob_base("[" + 300 * "a" + "]") == Path()  # too long for a name


def test_file_systems_that_are_passed_in(tmp_path):
    memory = fsspec.filesystem("memory")
    for text in ("box/run", "memory://box/run", "/box/run"):
        path = located(text, filesystem=memory)
        assert (str(path), path.inner) == ("memory://box/run", "/box/run")
    assert located(str(tmp_path), filesystem=fs.LocalFileSystem()) == tmp_path
    assert located(str(tmp_path), filesystem=fsspec.filesystem("file")) == tmp_path
    assert located(f"file://{tmp_path}/a%20b") == tmp_path / "a b"
    assert located(f"file://{tmp_path}/ü b/a%20b") == tmp_path / "ü b" / "a b"
    assert located(f"local://{tmp_path}/ü b/a%20b") == tmp_path / "ü b" / "a b"
    s3 = fs.S3FileSystem(region="us-east-1", anonymous=True)
    for text in ("bucket/run", "s3://bucket/run", "s3://KEY:SECRET@bucket/run?region=x"):
        assert located(text, filesystem=s3).inner == "bucket/run"
        assert "SECRET" not in repr(located(text, filesystem=s3))
    with pytest.raises(DataError, match=r"run: `filesystem` is a str: give pyarrow's or fsspec's"):
        located("run", filesystem="s3")


def test_a_url_in_a_path():
    with pytest.raises(DataError, match=r"s3://\*\*\*@bucket/x: a pathlib\.Path can't hold a URL: give text"):
        located(Path("s3://KEY:SECRET@bucket/x"))
    with pytest.raises(DataError, match="a pathlib.Path can't hold a URL"):
        expanded(Path("memory://box/*"))


def test_remote_paths_can_be_sent_to_other_processes(box):
    sent = pickle.dumps(box.listed() / "runs/1/data/part-1.parquet")
    path = pickle.loads(sent)  # noqa: S301 - made above
    assert (str(path), path.stat().st_size) == ("memory://box/runs/1/data/part-1.parquet", 4)
    assert path.read_bytes() == b"xxxx"


def test_files_appear_whole(tmp_path):
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for folder in (tmp_path, located("memory://box")):
        write_atomically(folder / "a.json", b"1")
        write_atomically(folder / "a.json", b"22")
        aside = temporary_path(folder / "part.parquet")
        aside.write_bytes(b"333")
        assert sorted(path.name for path in folder.iterdir() if path.name[0] != ".") == ["a.json"]
        publish_at(aside, folder / "part.parquet")
        assert not aside.exists()
        assert [(p.name, p.read_bytes()) for p in sorted(folder.iterdir())] == [
            ("a.json", b"22"),
            ("part.parquet", b"333"),
        ]
        (folder / "a.json").unlink()
        (folder / "a.json").unlink(missing_ok=True)
        with pytest.raises(FileNotFoundError):
            (folder / "a.json").unlink()


def test_a_write_that_fails_leaves_what_was_there(monkeypatch):
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    path = located("memory://box") / "a.json"
    write_atomically(path, b"1")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fsspec.implementations.memory.MemoryFile, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"22")
    aside = temporary_path(path)
    aside.write_bytes(b"333")
    with pytest.raises(OSError, match="No space left"):
        publish_at(aside, path)
    assert not aside.exists()
    assert path.read_bytes() == b"1"
    assert list(memory.store) == ["/box/a.json"]


def test_a_driver_s_own_errors_are_told(monkeypatch):
    class LoginError(Exception):
        """Of a driver that knows nothing of OSError."""

    def refused(*args, **options):
        raise LoginError("no such user\nand more")

    memory = fsspec.filesystem("memory")
    path = located("memory://box/a")
    write_atomically(path, b"1")
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "_open", refused)
        with pytest.raises(OSError, match="LoginError: no such user"):
            path.read_bytes()
    monkeypatch.setattr(type(memory), "info", refused)
    with pytest.raises(DataError, match=r"memory://box/a: can't be accessed \(no such user\)\. Is the name right"):
        path.exists()


def test_a_driver_whose_files_can_not_be_closed_is_told(monkeypatch):
    class Unclosable(io.BytesIO):
        """As files of fsspec's `blockcache::file://` are."""

        def close(self):
            raise AttributeError("property 'closed' has no setter")

    memory = fsspec.filesystem("memory")
    path = located("memory://box/a.parquet")
    write_atomically(path, b"1")
    monkeypatch.setattr(type(memory), "_open", lambda *args, **options: Unclosable(b"1"))
    with pytest.raises(OSError, match="AttributeError: property 'closed'"), path.open():
        pass
    with pytest.raises(DataError, match=r"box/a\.parquet: its file system's driver fails \(AttributeError: prop.* URL"):
        footer(path)


def test_a_driver_that_reads_only_from_the_start_or_writes_nothing_is_told(monkeypatch):
    def started(self, path, mode="rb", **options):  # as fsspec's HTTP file system does it
        if mode != "rb":
            raise NotImplementedError
        raise ValueError("The server doesn't appear to support range requests.")

    path = located("memory://box/a.parquet")
    write_atomically(path, b"1")
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "_open", started)
    with pytest.raises(DataError, match="driver fails .*range requests.*Copy the file to this machine"):
        footer(path)
    with pytest.raises(OSError, match="its file system can't do this: it may be read-only"):
        write_atomically(path, b"2")


def test_data_in_words():
    assert shown("s3://K:S@bucket/x") == "s3://***@bucket/x"
    assert shown(["a", Path("b"), "c", "d", "e"]) == "a, b, c and 2 more"
    assert shown(3) == "a int"


def test_knowing_where_files_lie_imports_no_pyarrow():
    code = "import sys, etude.files; print('pyarrow' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert out.stdout == "False\n"


def test_an_empty_path_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in ("", ["", "."]):
        with pytest.raises(DataError, match="an empty path was given: give a folder"):
            Recording.open(given)
    with pytest.raises(DataError, match="an empty path was given"):
        located("")


def test_a_path_with_a_nul_character_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds a NUL character"):
        located(f"{tmp_path}/a\0b")


def test_a_file_is_made_and_replaced(tmp_path):
    path = tmp_path / "x.json"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step):
    def full(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "x.json"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: done.append(os.fstat(handle).st_ino) or fsync(handle))
    monkeypatch.setattr(os, "replace", lambda a, b: done.append("replace") or replace(a, b))
    write_atomically(tmp_path / "x", b"data")
    assert done == [(tmp_path / "x").stat().st_ino, "replace", tmp_path.stat().st_ino]


DIES_AT = """
import os, signal, sys
from pathlib import Path
from etude.files import write_atomically
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
write_atomically(Path(sys.argv[1]), b"new" * 9999)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_killed_before_any_step_the_file_is_whole_and_what_is_left_over_does_not_add_up(tmp_path):
    path, found = tmp_path / "x", []
    for step in range(9):
        write_atomically(path, b"old")
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
    write_atomically(path, b"old")
    assert list(tmp_path.iterdir()) == [path]
