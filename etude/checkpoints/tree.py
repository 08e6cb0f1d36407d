# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a folder with ``checkpoint.json`` and one safetensors file, written so that one whole is always there.

The manifest names the safetensors file, its size and its SHA-256, so replacing the manifest by a rename is the one
instant at which the new checkpoint takes the old one's place.
"""

import hashlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from etude import __version__
from etude.atomic import sync, write_atomically
from etude.checkpoints.codec import Encoder, Tree, decode
from etude.errors import CheckpointError

MANIFEST = "checkpoint.json"
FORMAT = "etude-checkpoint"
VERSION = 1
_STATE_FILE = re.compile(r"state-[0-9a-f]{16}\.safetensors")


def save_tree(folder: str | os.PathLike[str], tree: Tree, *, meta: Tree = None) -> None:
    """Write ``tree`` to ``folder`` (made where it is not there), in place of the checkpoint that is there.

    The process may die at any instant: the folder then holds the old checkpoint or the new one, whole. One process at
    a time may save to a folder; others may load from it meanwhile.

    Args:
        folder: Where to; files of other names in it are left alone.
        tree: Nested dicts, lists and tuples of None, bool, int, float, str, bytes, NumPy arrays, NumPy scalars and
            torch tensors. Types, dtypes and bits are kept; tensors lose their device and gradients.
        meta: A small tree without arrays: what the checkpoint is of.

    Raises:
        CheckpointError: the tree holds something else (its path is named), or the folder can't be written.
    """
    from safetensors import SafetensorError

    folder = Path(folder)
    encoder = Encoder()
    document = {
        "format": FORMAT,
        "version": VERSION,
        "etude": __version__,
        "meta": Encoder(arrays_allowed=False).encode(meta),
        "tree": encoder.encode(tree),
    }
    state = folder / f"state-{secrets.token_hex(8)}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        document["state"] = _write_state(state, encoder.arrays)
        write_atomically(folder / MANIFEST, json.dumps(document, indent=1, allow_nan=False).encode())
        for old in folder.iterdir():
            if old != state and _STATE_FILE.fullmatch(old.name):
                old.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"can't save a checkpoint to {folder}: {error}.") from error


def load_tree(folder: str | os.PathLike[str]) -> tuple[Tree, Tree]:
    """Read ``(tree, meta)`` as `save_tree` wrote them; nothing in the files is run.

    Raises:
        CheckpointError: the folder is not a checkpoint, or it is of another version or broken.
    """
    folder = Path(folder)
    document = _read_manifest(folder)
    while True:
        try:
            arrays = _read_state(folder, document["state"])
            break
        except FileNotFoundError as error:
            newer = _read_manifest(folder)
            if newer["state"] == document["state"]:
                raise CheckpointError(
                    f"{folder / document['state']['file']} is missing, though {MANIFEST} names it. "
                    "Restore it from a copy."
                ) from error
            document = newer  # another process saved between our two looks
    return decode(document["tree"], arrays), decode(document["meta"], {})


def load_meta(folder: str | os.PathLike[str]) -> Tree:
    """Read ``meta`` alone, as `save_tree` wrote it; quick, however large the checkpoint is.

    Raises:
        CheckpointError: the folder is not a checkpoint, or it is of another version.
    """
    return decode(_read_manifest(Path(folder))["meta"], {})


def _write_state(path: Path, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """Write the arrays through to the disk; what the manifest has to say of the file."""
    from safetensors.numpy import save_file

    try:
        with open(path, "xb") as file:
            mode = os.fstat(file.fileno()).st_mode
        save_file(arrays, path)
        os.chmod(path, mode)  # safetensors makes files that only their owner can read
        with open(path, "r+b") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        sync(path.parent)  # the file's name must be on the disk before the manifest points to it
    except BaseException:
        path.unlink(missing_ok=True)  # on a full disk, half a file would make matters worse
        raise
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": digest}


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not folder.exists():
        raise CheckpointError(f"{folder} is not a checkpoint: there is no such folder.")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a checkpoint: a checkpoint is a folder, this is a file.")
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is not a checkpoint: it has no {MANIFEST}. Give the folder that a checkpoint was saved to."
        ) from None
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is broken: it is not JSON ({error}). Restore it from a copy.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{folder} is not a checkpoint: its {MANIFEST} does not say `format: {FORMAT}`.")
    version = document.get("version")
    if version != VERSION:
        raise CheckpointError(
            f"{folder} is a checkpoint of version {version}, written by Etude {document.get('etude')}; Etude "
            f"{__version__} reads version {VERSION}. Load it with the Etude that wrote it."
        )
    state = document.get("state")
    if (
        not {"meta", "tree"} <= document.keys()
        or not isinstance(state, dict)
        or not {"bytes", "sha256"} <= state.keys()
    ):
        raise CheckpointError(f"{path} is broken: it lacks `meta`, `tree` or `state`. Restore it from a copy.")
    if not _STATE_FILE.fullmatch(str(state.get("file"))):
        raise CheckpointError(
            f"{path} is broken: it names the state file {state.get('file')!r}. Restore it from a copy."
        )
    return document


def _read_state(folder: Path, state: dict[str, Any]) -> dict[str, NDArray[Any]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    path = folder / state["file"]
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {error}.") from error
    if len(data) != state["bytes"]:
        raise CheckpointError(
            f"{path} is broken: it has {len(data):,} bytes, but {MANIFEST} says {state['bytes']:,}. "
            "Restore it from a copy."
        )
    if hashlib.sha256(data).hexdigest() != state["sha256"]:
        raise CheckpointError(f"{path} is broken: its content does not match its checksum. Restore it from a copy.")
    try:
        return load(data)
    except (SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path} is broken: {error}. Restore it from a copy.") from error
