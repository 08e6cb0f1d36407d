# SPDX-License-Identifier: Apache-2.0
"""Checkpoints behind URLs."""

import os
from pathlib import Path

import fsspec
import numpy as np
import pytest
from pyarrow import fs

from etude.checkpoints import copy_tree, folder_at, load_meta, load_tree, remove_tree, save_tree, tree
from etude.checkpoints.codec import Arrays, write_arrays
from etude.errors import CheckpointError
from etude.files import RemotePath, located, names_in, write_atomically
from etude.urls import inside


@pytest.fixture(params=["memory", "file", "path"])
def where(request, tmp_path):
    if request.param == "memory":
        memory = fsspec.filesystem("memory")
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]
        return "memory://bucket/runs/a"
    return f"file://{tmp_path}/runs/a" if request.param == "file" else str(tmp_path / "runs/a")


def test_a_checkpoint_is_saved_read_replaced_and_removed(where):
    for i in range(3):
        save_tree(where, {"w": np.full((2, 3), i), "i": i}, meta={"i": i})
        found, meta = load_tree(where)
        assert found["w"].tolist() == [[i] * 3] * 2
        assert meta == load_meta(where) == {"i": i}
        assert len(names_in(folder_at(where))) == 2  # the old state is gone
    remove_tree(where)
    remove_tree(where)
    assert not folder_at(where).exists()
    with pytest.raises(CheckpointError, match="runs/a is not a checkpoint: there is no such folder"):
        load_tree(where)


@pytest.mark.parametrize("name", ["a[1]", "a?", "*"])
def test_a_folder_named_like_a_glob_is_that_folder_only(where, name):
    other, folder = f"{where}1", inside(os.path.dirname(where), name)
    folder = folder.replace("?", "%3F") if "://" in folder else folder
    save_tree(other, {"i": -1})
    for i in range(2):
        save_tree(folder, {"i": i})
        assert load_tree(folder)[0] == {"i": i}
        assert len(names_in(folder_at(folder))) == 2
    remove_tree(folder)
    assert not folder_at(folder).exists()
    assert load_tree(other)[0] == {"i": -1}


def test_items_of_a_tree_are_chosen_by_name(where):
    save_tree(where, {"a": np.ones(3), "b": {"c": 1}, "d": 2})
    asked = []

    def choose(names):
        asked.extend(names)
        return ["b", "d"]

    assert load_tree(where, choose)[0] == {"b": {"c": 1}, "d": 2}
    assert asked == ["a", "b", "d"]


def test_other_files_are_left_alone(where):
    save_tree(where, {"i": 1})
    write_atomically(folder_at(where) / "metrics.jsonl", b"mine")
    remove_tree(where)
    assert names_in(folder_at(where)) == ["metrics.jsonl"]
    with pytest.raises(CheckpointError, match=r"it has no checkpoint\.json"):
        load_tree(where)
    with pytest.raises(CheckpointError, match="a checkpoint is a folder, this is a file"):
        load_tree(inside(where, "metrics.jsonl"))


def test_a_state_that_is_missing_is_named(where):
    save_tree(where, {"w": np.ones(2)})
    folder = folder_at(where)
    (state,) = [name for name in names_in(folder) if name.startswith("state-")]
    (folder / state).unlink()
    with pytest.raises(CheckpointError, match=r"state-\w+\.safetensors is missing, though checkpoint\.json names it"):
        load_tree(where)


def test_a_writer_that_dies_leaves_the_old_checkpoint(where, monkeypatch):
    """The data comes first, and the manifest, which says which data it is, last."""
    save_tree(where, {"i": 1, "w": np.full(9, 1)})

    class KilledError(BaseException):
        pass

    def killed(*args, **options):
        raise KilledError

    for step in ("write_arrays", "_replace_manifest", "_remove_states"):
        with monkeypatch.context() as patch:
            patch.setattr(tree, step, killed)
            with pytest.raises(KilledError):
                save_tree(where, {"i": 2, "w": np.full(9, 2)})
        found, _ = load_tree(where)
        assert (found["w"] == found["i"]).all()
        assert found["i"] == (2 if step == "_remove_states" else 1)
    save_tree(where, {"i": 3})
    assert len(names_in(folder_at(where))) == 2


def test_a_failed_write_behind_a_url_is_named_and_leaves_nothing(where, monkeypatch):
    save_tree(where, {"i": 1})
    before = names_in(folder_at(where))
    if not isinstance(folder_at(where), RemotePath):
        monkeypatch.setattr(os, "fsync", _full)
    else:
        monkeypatch.setattr(fsspec.implementations.memory.MemoryFile, "write", _full)
    with pytest.raises(CheckpointError, match=r"can't save a checkpoint to .*runs/a: .*No space left"):
        save_tree(where, {"w": np.ones(3)})
    assert names_in(folder_at(where)) == before
    assert load_tree(where)[0] == {"i": 1}


def _full(*args):
    raise OSError(28, "No space left on device")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_pipes_and_devices_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "checkpoint.json")
    for load in (load_tree, load_meta):
        with pytest.raises(CheckpointError, match=r"can't read .*checkpoint\.json"):
            load(tmp_path)
    save_tree(tmp_path / "a", {"w": np.ones(3)})
    (state,) = (tmp_path / "a").glob("state-*")
    state.unlink()
    state.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"can't read state-"):
        load_tree(tmp_path / "a")


@pytest.mark.parametrize("given", [None, 5, b"runs/a", ""])
def test_what_is_no_path_is_named(given):
    for function in (load_tree, load_meta, lambda path: save_tree(path, {})):
        with pytest.raises(CheckpointError, match="path"):
            function(given)


def test_urls_that_nobody_knows():
    with pytest.raises(CheckpointError, match="can't open nosuch://a/b: pyarrow says: .*; fsspec says: .*Install"):
        load_tree("nosuch://a/b")
    with pytest.raises(CheckpointError, match="can't open nosuch://a/b"):
        save_tree("nosuch://a/b", {})


def test_file_urls_are_this_machine_s_folders(tmp_path):
    folder = folder_at(f"file://{tmp_path}/a%20b")
    assert folder == tmp_path / "a b"
    assert folder_at(tmp_path) == tmp_path
    assert folder_at("relative/path") == Path("relative/path")


def test_paths_inside():
    assert inside("s3://bucket/run/", "a") == "s3://bucket/run/a"
    assert inside("runs", "a") == os.path.join("runs", "a")


def test_a_file_system_of_pyarrow_s_own(tmp_path):
    folder = RemotePath(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "bucket/a", "sub://bucket/a")
    assert not folder.exists()
    assert names_in(folder) == []
    folder.mkdir()
    assert folder.is_dir()
    state = write_arrays(folder / "x", {"w": np.arange(3)})
    with (folder / "x").open() as file:
        assert Arrays(file, state, "x")["w"].tolist() == [0, 1, 2]
    with pytest.raises(FileNotFoundError):
        (folder / "y").open()
    assert names_in(folder) == ["x"]
    (folder / "x").unlink()
    (folder / "x").unlink(missing_ok=True)
    folder.rmdir()
    assert not folder.exists()


def test_an_object_store_is_asked_for_little(s3, tmp_path):
    """No more requests than these; a manifest is written once, as no one sees half an object."""
    where = f"{s3.url}/run"
    for most, call in (
        (11, lambda: save_tree(where, {"w": np.ones(9)})),
        (14, lambda: save_tree(where, {"w": np.ones(9)})),
        (4, lambda: load_tree(where)),
        (2, lambda: load_meta(where)),
        (6, lambda: copy_tree(where, tmp_path / "copy")),
        (12, lambda: remove_tree(where)),
    ):
        s3.requests.clear()
        call()
        assert len(s3.requests) <= most, s3.requests


@pytest.mark.parametrize(
    ("protocol", "expected"),
    [
        (("s3", "s3a"), True),
        (("gs", "gcs"), True),
        (("abfs", "az", "abfss"), True),
        (("sftp", "ssh"), False),
        ("memory", False),
    ],
)
def test_object_stores_are_known_whichever_library_reads_them(protocol, expected, monkeypatch):
    """s3fs, gcsfs and adlfs have several names; a file is written to them at one stroke, and copied nowhere."""
    kind = type(
        "Store",
        (fsspec.implementations.memory.MemoryFileSystem,),
        {"protocol": protocol, "store": {}, "pseudo_dirs": [""]},
    )
    path = located("bucket/a.json", filesystem=kind(skip_instance_cache=True))
    assert path.is_in_object_store is expected
    moved = []
    monkeypatch.setattr(RemotePath, "rename", lambda self, target: moved.append(self))
    write_atomically(path, b"{}")
    assert bool(moved) is not expected
