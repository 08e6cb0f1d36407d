# SPDX-License-Identifier: Apache-2.0
import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_documents import at, places, read, replaced, write
from safetensors.numpy import load_file

from etude.checkpoints import copy_tree, load_meta, load_tree, remove_tree, replace_meta, save_tree, tree
from etude.errors import CheckpointError

STATE = {
    "module": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)},
    "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "betas": (0.9, 0.999)},
    "counters": [1, 2**70, float("inf"), None, True],
    "obs": np.zeros((0, 4), np.float32),
    "scale": np.float32(0.1),
}


def _state_file(folder):
    (path,) = folder.glob("state-*.safetensors")
    return path


def test_a_checkpoint_comes_back(tmp_path):
    folder = tmp_path / "runs" / "a"
    save_tree(folder, STATE, meta={"algorithm": "PPO", "hidden": (64, 64)})
    back, meta = load_tree(str(folder))
    assert meta == load_meta(folder) == {"algorithm": "PPO", "hidden": (64, 64)}
    assert back["optimizer"]["betas"] == (0.9, 0.999)
    assert back["counters"] == STATE["counters"]
    assert list(back["optimizer"]["state"]) == [0]
    assert torch.equal(back["module"]["w"], STATE["module"]["w"])
    assert back["module"]["b"].dtype == torch.bfloat16
    assert back["obs"].shape == (0, 4)
    assert back["scale"].dtype == np.float32
    back["module"]["w"].add_(1)  # what comes back can be written into
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".safetensors"]


def test_the_arrays_are_readable_with_safetensors_alone(tmp_path):
    save_tree(tmp_path, STATE)
    arrays = load_file(_state_file(tmp_path))
    assert np.array_equal(arrays["module/w"], STATE["module"]["w"].numpy())


def test_a_tree_without_arrays_and_an_empty_one_can_be_saved(tmp_path):
    for value in ({}, None, {"a": [1, ()]}):
        save_tree(tmp_path, value)
        assert load_tree(tmp_path) == (value, None)


def test_saving_again_replaces_and_leaves_other_files_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("mine")
    (tmp_path / "state-mine.safetensors").write_text("mine")
    for i in range(3):
        save_tree(tmp_path, {"w": np.full(3, i)})
    assert load_tree(tmp_path)[0]["w"].tolist() == [2, 2, 2]
    assert len(list(tmp_path.iterdir())) == 4


def test_an_unfit_tree_leaves_the_old_checkpoint(tmp_path):
    save_tree(tmp_path, {"w": np.ones(2)})
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CheckpointError, match="can't save `w`"):
        save_tree(tmp_path, {"w": object()})
    assert sorted(os.listdir(tmp_path)) == before


def test_a_description_that_can_not_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError("no space left on device")

    save_tree(tmp_path, STATE, meta=1)
    monkeypatch.setattr(tree, "write_atomically", refuse)
    with pytest.raises(CheckpointError, match=r"can't change the checkpoint at .*: no space left on device\."):
        replace_meta(tmp_path, 2)
    assert load_meta(tmp_path) == 1


def test_a_failed_write_leaves_the_old_checkpoint_and_no_litter(tmp_path, monkeypatch):
    save_tree(tmp_path, {"w": np.ones(2)})
    before = sorted(os.listdir(tmp_path))

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"can't save a checkpoint to .*: .*No space left on device\."):
        save_tree(tmp_path, {"w": np.zeros(2)})
    assert sorted(os.listdir(tmp_path)) == before
    assert load_tree(tmp_path)[0]["w"].tolist() == [1, 1]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"can't save a checkpoint to .*file"):
        save_tree(tmp_path / "file" / "run", {})


KILLED = """
import sys, numpy as np
from etude.checkpoints import save_tree
folder, i = sys.argv[1], int(sys.argv[2])
while True:
    i += 1
    save_tree(folder, {"i": i, "w": np.full(50_000, i), "v": np.full(7, i).astype(np.int8)}, meta=i)
    print(i, flush=True)
"""


def test_a_checkpoint_is_whole_whenever_its_writer_is_killed(tmp_path):
    last = 0
    for round_ in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path), str(last)], stdout=subprocess.PIPE, text=True
        ) as child:
            for _ in range(3):
                last = int(child.stdout.readline())
            for _ in range(3 + 7 * round_):  # a reader beside the writer sees a whole checkpoint, too
                _check_whole(tmp_path, last)
            child.send_signal(signal.SIGKILL)
            child.wait()
        last = _check_whole(tmp_path, last)
    save_tree(tmp_path, {"i": 0}, meta=0)
    assert len(list(tmp_path.glob("state-*"))) == 1, "what the killed writers left was not cleared away"


DIES_AT = """
import os, signal, sys, numpy as np
from etude.checkpoints import save_tree
folder, left = sys.argv[1], int(sys.argv[2])
def dying(function):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call
for name in ("fsync", "replace", "unlink"):
    setattr(os, name, dying(getattr(os, name)))
save_tree(folder, {"i": 2, "w": np.full(50_000, 2), "v": np.full(7, 2, np.int8)}, meta=2)
"""


def test_a_kill_before_any_step_of_a_save_leaves_a_whole_checkpoint(tmp_path):
    found = []
    for step in range(9):
        save_tree(tmp_path, {"i": 1, "w": np.full(50_000, 1), "v": np.full(7, 1, np.int8)}, meta=1)
        child = subprocess.run([sys.executable, "-c", DIES_AT, str(tmp_path), str(step)])
        found.append(_check_whole(tmp_path, 1))
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL
    assert child.returncode == 0, "the save takes more steps than were tried"
    assert found == sorted(found)  # old until the rename, new after it
    assert found[0] == 1
    assert len(found) >= 5


def _check_whole(folder, at_least):
    state, meta = load_tree(folder)
    assert meta == state["i"] >= at_least
    assert (state["w"] == meta).all()
    assert (state["v"] == np.full(7, meta).astype(np.int8)).all()
    return meta


def _edit(change, *, checksum=True):
    def edit(folder):
        document = read(folder)
        change(document)
        write(folder, document, checksum=checksum)

    return edit


def _deep(levels):
    node = None
    for _ in range(levels):
        node = {"$": "tuple", "items": [node]}
    return node


def _flip_a_bit(folder):
    data = bytearray(_state_file(folder).read_bytes())
    data[-1] ^= 1
    _state_file(folder).write_bytes(data)


def _forge(folder):
    path = _state_file(folder)
    path.write_bytes((56).to_bytes(8, "little") + b"\xff" * 56)
    header = zlib.crc32(path.read_bytes())
    _edit(lambda d: d["state"].update(bytes=64, header=header))(folder)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda f: (f / "checkpoint.json").unlink(),
            r"is not a checkpoint: it has no checkpoint\.json\. Give the folder",
        ),
        (lambda f: (f / "checkpoint.json").write_text('{"format'), r"checkpoint\.json is broken: it is not JSON"),
        (lambda f: (f / "checkpoint.json").write_bytes(b"\xff\xfe\xff"), r"checkpoint\.json is broken: it is not JSON"),
        (lambda f: (f / "checkpoint.json").write_text("[]"), "is not a checkpoint: .* does not say `format: etude-ch"),
        (
            _edit(lambda d: d.update(version=9, etude="7.0")),
            r"of version 9, written by Etude 7\.0; Etude .* reads version 5\. Load it with an Etude of the",
        ),
        *(
            (
                _edit(lambda d, version=version: d.update(version=version, etude="0.1.0"), checksum=checksum),
                rf"of version {version}, written by Etude 0\.1\.0; Etude .* from before the first release",
            )
            for version in (1, 4)
            for checksum in (True, False)
        ),
        (_edit(lambda d: d.update(version="4")), r"of version 4, written by .* Load it with an Etude of the version"),
        (_edit(lambda d: d.update(version=None)), "of version None, written by"),
        (_edit(lambda d: d.pop("state")), "is broken: its `meta`, its `tree` or the .* `state`"),
        (_edit(lambda d: d.pop("tree")), "is broken: its `meta`, its `tree` or the .* `state`"),
        (_edit(lambda d: d["state"].update(file="../../etc/passwd")), "is broken: .* `state` file"),
        (lambda f: _state_file(f).unlink(), r"state-.*\.safetensors is missing, though checkpoint\.json names it"),
        (lambda f: os.truncate(_state_file(f), 50), r"state-.* has 50 bytes, but checkpoint\.json says \d+"),
        (
            _edit(lambda d: d["tree"].update(scale=1.0), checksum=False),
            r"checkpoint\.json is broken: its content does not match its checksum\. Restore it from a copy",
        ),
        (_edit(lambda d: d.pop("crc32")), r"checkpoint\.json is broken: its content does not match its checksum"),
        (_edit(lambda d: d["state"].update(crc32=[1])), "is broken: .* `state` file is missing or wrong"),
        (_edit(lambda d: d["state"].update(bytes="9")), "is broken: .* `state` file is missing or wrong"),
        (
            lambda f: (f / "checkpoint.json").write_text('{"format": "etude-checkpoint", "version": NaN}'),
            "of version nan, written by",
        ),
        (
            lambda f: (f / "checkpoint.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000),
            r"checkpoint\.json is broken: it is not JSON \(maximum recursion",
        ),
        (_edit(lambda d: d.update(meta=_deep(400))), "is broken: it is nested too deeply"),
        (_flip_a_bit, "state-.* is broken: its content does not match its checksum. Restore it from a copy"),
        (_forge, r"state-.* is broken: .*header"),
        (_edit(lambda d: d["tree"]["module"].update(w={"$": "tensor", "name": "x"})), "the checkpoint is broken at"),
    ],
)
def test_a_broken_checkpoint_is_named(tmp_path, harm, message):
    save_tree(tmp_path, STATE)
    harm(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_tree(tmp_path)


def test_every_part_of_the_document_is_in_its_checksum(tmp_path):
    save_tree(tmp_path, STATE, meta={"lr": 3e-4})
    document = read(tmp_path)
    for place in places(document):
        node = at(document, place)
        other = {bool: lambda x: not x, int: lambda x: x + 1, float: lambda x: x + 1, str: lambda x: x + "x"}.get(
            type(node), lambda x: 1 if x is None else None
        )(node)
        write(tmp_path, replaced(document, place, other), checksum=False)
        with pytest.raises(CheckpointError):
            load_meta(tmp_path)
    write(tmp_path, document, checksum=False)  # laid out in another way
    assert load_meta(tmp_path) == {"lr": 3e-4}


def test_what_is_nested_too_deeply_is_not_saved(tmp_path):
    save_tree(tmp_path, {"i": 1})
    deep = 1
    for _ in range(5000):
        deep = [deep]
    for tree_, meta in ((deep, None), (1, deep)):
        with pytest.raises(CheckpointError, match="nested too deeply"):
            save_tree(tmp_path, tree_, meta=meta)
    assert load_tree(tmp_path)[0] == {"i": 1}


def test_numbers_that_are_not_finite_are_valid_json(tmp_path):
    save_tree(tmp_path, {"x": [float("nan"), float("inf")]}, meta={"x": float("nan"), "y": np.float64("-inf")})
    text = (tmp_path / "checkpoint.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(name))
    state, meta = load_tree(tmp_path)
    assert np.isnan([state["x"][0], meta["x"]]).all()
    assert meta["y"] == -np.inf


@pytest.mark.parametrize("node", [
    {"$": "tensor", "name": "counters", "dtype": "_dynamo", "shape": [1]},
    {"$": "tensor", "name": "b", "dtype": "load", "shape": [1]},
    {"$": "tensor", "name": "b", "dtype": ["bfloat16"], "shape": [1]},
    {"$": "tensor", "name": "empty", "dtype": "bfloat16", "shape": [2**40]},
    {"$": "array", "name": "b", "dtype": "O", "shape": [1]},
    {"$": "array", "name": "empty", "dtype": "<f8", "shape": [2**40]},
    {"$": "array", "name": "b", "dtype": [["a", "<f4"]], "shape": [1]},
    {"$": "scalar", "dtype": "O", "hex": "00" * 8},
    {"$": ["tuple"], "items": []},
    {"$": "tuple"},
    {"$": "dict", "items": [[[], 1]]},
    {"$": "float", "hex": "00"},
    {"$": "objects", "items": [1, 2], "shape": [3]},
])  # fmt: skip
def test_a_node_that_is_none_of_ours_is_named_and_imports_nothing(tmp_path, node):
    save_tree(tmp_path, {"b": np.zeros(2, np.uint8), "empty": np.zeros(0, np.uint8), "x": 0})
    document = read(tmp_path)
    write(tmp_path, replaced(document, ("tree", "x"), node))
    known = set(sys.modules)
    with pytest.raises(CheckpointError, match="broken"):
        load_tree(tmp_path)
    assert set(sys.modules) == known


def test_a_copy_is_a_checkpoint_of_its_own(tmp_path):
    save_tree(tmp_path / "a", {"w": np.arange(5)}, meta=1)
    copy_tree(tmp_path / "a", tmp_path / "b")
    copy_tree(tmp_path / "a", tmp_path / "b")
    assert os.path.samefile(_state_file(tmp_path / "a"), _state_file(tmp_path / "b"))
    save_tree(tmp_path / "a", {"w": np.arange(9)}, meta=2)
    assert load_tree(tmp_path / "b")[0]["w"].tolist() == [0, 1, 2, 3, 4]
    copy_tree(tmp_path / "a", tmp_path / "b")
    assert load_tree(tmp_path / "b")[0]["w"].tolist() == list(range(9))
    assert len(list((tmp_path / "b").iterdir())) == 2
    remove_tree(tmp_path / "a")
    assert load_meta(tmp_path / "b") == 2
    with pytest.raises(CheckpointError, match="a is not a checkpoint: there is no such folder"):
        copy_tree(tmp_path / "a", tmp_path / "c")


def test_a_folder_of_several_runs_says_so(tmp_path):
    for name in ("seed-2", "seed-1"):
        save_tree(tmp_path / name, {})
    with pytest.raises(CheckpointError, match=r"it has several runs\. Give one of them, such as .*/seed-1"):
        load_tree(tmp_path)


def test_only_the_description_is_replaced(tmp_path):
    save_tree(tmp_path / "a", {"w": np.arange(5)}, meta={"score": None})
    copy_tree(tmp_path / "a", tmp_path / "b")
    state = _state_file(tmp_path / "a").name
    replace_meta(tmp_path / "a", {"score": 1.5})
    assert load_tree(tmp_path / "a")[1] == {"score": 1.5}
    assert load_tree(tmp_path / "a")[0]["w"].tolist() == [0, 1, 2, 3, 4]
    assert _state_file(tmp_path / "a").name == state
    assert load_meta(tmp_path / "b") == {"score": None}
    with pytest.raises(CheckpointError, match="c is not a checkpoint: there is no such folder"):
        replace_meta(tmp_path / "c", None)


def test_a_copy_where_files_can_have_one_name_only(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(18, "Invalid cross-device link")

    save_tree(tmp_path / "a", {"w": np.arange(5)})
    monkeypatch.setattr(os, "link", refuse)
    copy_tree(tmp_path / "a", tmp_path / "b")
    assert not os.path.samefile(_state_file(tmp_path / "a"), _state_file(tmp_path / "b"))
    assert load_tree(tmp_path / "b")[0]["w"].tolist() == [0, 1, 2, 3, 4]


def test_a_path_that_is_no_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere is not a checkpoint: there is no such folder"):
        load_tree(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="a checkpoint is a folder, this is a file"):
        load_tree(tmp_path / "file")


def test_nothing_here_imports_torch_or_pickle():
    code = (
        "import sys, tempfile, numpy as np\nfrom etude.checkpoints import load_tree, save_tree\n"
        "folder = tempfile.mkdtemp()\nsave_tree(folder, {'a': np.ones(3)})\nload_tree(folder)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "pickle" not in Path(tree.__file__).read_text(encoding="utf-8").replace("free of pickle", "")
