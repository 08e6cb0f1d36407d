# SPDX-License-Identifier: Apache-2.0
"""Checkpoints behind URLs."""

import os

import fsspec
import numpy as np
import pytest
from pyarrow import fs

from etude.checkpoints import load_meta, load_tree, remove_tree, save_tree
from etude.checkpoints.arrays import Arrays, write_arrays
from etude.checkpoints.folders import LocalFolder, RemoteFolder, folder_at, inside
from etude.errors import CheckpointError


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
        tree, meta = load_tree(where)
        assert tree["w"].tolist() == [[i] * 3] * 2
        assert meta == load_meta(where) == {"i": i}
        assert len(folder_at(where).names()) == 2  # the old state is gone
    remove_tree(where)
    remove_tree(where)
    assert folder_at(where).kind() is None
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
        assert len(folder_at(folder).names()) == 2
    remove_tree(folder)
    assert folder_at(folder).kind() is None
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
    folder_at(where).replace("metrics.jsonl", b"mine")
    remove_tree(where)
    assert folder_at(where).names() == ["metrics.jsonl"]
    with pytest.raises(CheckpointError, match=r"it has no checkpoint\.json"):
        load_tree(where)
    with pytest.raises(CheckpointError, match="a checkpoint is a folder, this is a file"):
        load_tree(inside(where, "metrics.jsonl"))


def test_a_state_that_is_missing_is_named(where):
    save_tree(where, {"w": np.ones(2)})
    folder = folder_at(where)
    (state,) = [name for name in folder.names() if name.startswith("state-")]
    folder.remove(state)
    with pytest.raises(CheckpointError, match=r"state-\w+\.safetensors is missing, though checkpoint\.json names it"):
        load_tree(where)


def test_a_writer_that_dies_leaves_the_old_checkpoint(where, monkeypatch):
    """The data comes first, and the manifest, which says which data it is, last."""
    save_tree(where, {"i": 1, "w": np.full(9, 1)})
    kind = type(folder_at(where))

    class KilledError(BaseException):
        pass

    def killed(*args):
        raise KilledError

    for step in ("write", "replace", "remove"):
        with monkeypatch.context() as patch:
            patch.setattr(kind, step, killed)
            with pytest.raises(KilledError):
                save_tree(where, {"i": 2, "w": np.full(9, 2)})
        tree, _ = load_tree(where)
        assert (tree["w"] == tree["i"]).all()
        assert tree["i"] == (2 if step == "remove" else 1)
    save_tree(where, {"i": 3})
    assert len(folder_at(where).names()) == 2


def test_a_failed_write_behind_a_url_is_named_and_leaves_nothing(where, monkeypatch):
    save_tree(where, {"i": 1})
    before = folder_at(where).names()
    if isinstance(folder_at(where), LocalFolder):
        monkeypatch.setattr(os, "fsync", _full)
    else:
        monkeypatch.setattr(fsspec.implementations.memory.MemoryFile, "write", _full)
    with pytest.raises(CheckpointError, match=r"can't save a checkpoint to .*runs/a: .*No space left"):
        save_tree(where, {"w": np.ones(3)})
    assert folder_at(where).names() == before
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
    assert isinstance(folder, LocalFolder)
    assert folder.path == tmp_path / "a b"
    assert folder_at(tmp_path).path == tmp_path
    assert isinstance(folder_at("relative/path"), LocalFolder)


def test_paths_inside():
    assert inside("s3://bucket/run/", "a") == "s3://bucket/run/a"
    assert inside("runs", "a") == os.path.join("runs", "a")


def test_a_file_system_of_pyarrow_s_own(tmp_path):
    folder = RemoteFolder(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "bucket/a", "sub://bucket/a")
    assert folder.kind() is None
    assert folder.names() == []
    folder.make()
    assert folder.kind() == "folder"
    state = write_arrays(folder, "x", {"w": np.arange(3)})
    with folder.open("x") as file:
        assert Arrays(file, state, "x")["w"].tolist() == [0, 1, 2]
    with pytest.raises(FileNotFoundError):
        folder.open("y")
    folder.remove_itself()  # not while there is something in it
    assert folder.names() == ["x"]
    folder.remove("x")
    folder.remove("x")
    folder.remove_itself()
    assert folder.kind() is None
