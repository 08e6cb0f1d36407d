# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a folder with ``checkpoint.json`` and one safetensors file, written so that one whole is always there.

The manifest names the safetensors file, its size and the checksums of what is in it, so replacing the manifest is the
one instant at which the new checkpoint takes the old one's place.
"""

import json
import re
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

from etude import __version__
from etude.checkpoints.arrays import Arrays, write_arrays
from etude.checkpoints.codec import Encoder, Tree, decode
from etude.checkpoints.folders import MANIFEST, Folder, Where, folder_at
from etude.checkpoints.upgrades import UPGRADES, VERSION
from etude.errors import CheckpointError

FORMAT = "etude-checkpoint"
_STATE_FILE = re.compile(r"state-[0-9a-f]{16}\.safetensors")
_FACTS = ({"file", "bytes", "header", "crc32"}, {"file", "bytes", "sha256"})

Choose: TypeAlias = Callable[[Sequence[str]], Collection[str]]
"""Given the names at the top of a tree, those that are wanted."""


def save_tree(folder: Where, tree: Tree, *, meta: Tree = None) -> None:
    """Write ``tree`` to ``folder`` (made where it is not there), in place of the checkpoint that is there.

    The process may die at any instant: the folder then holds the old checkpoint or the new one, whole. One process at
    a time may save to a folder; others may load from it meanwhile.

    Args:
        folder: Where to: a path, or a URL that pyarrow or fsspec know; files of other names in it are left alone.
        tree: Nested dicts, lists and tuples of None, bool, int, float, str, bytes, NumPy arrays, NumPy scalars and
            torch tensors. Types, dtypes and bits are kept; tensors lose their device and gradients.
        meta: A small tree without arrays: what the checkpoint is of.

    Raises:
        CheckpointError: the tree holds something else (its path is named), or the folder can't be written.
    """
    encoder = Encoder()
    document = {
        "format": FORMAT,
        "version": VERSION,
        "etude": __version__,
        "meta": Encoder(arrays_allowed=False).encode(meta),
        "tree": encoder.encode(tree),
    }
    at = folder_at(folder)
    state = f"state-{secrets.token_hex(8)}.safetensors"
    try:
        at.make()
        document["state"] = write_arrays(at, state, encoder.arrays)
        at.replace(MANIFEST, json.dumps(document, indent=1, allow_nan=False).encode())
        _remove_states(at, but=state)
    except OSError as error:
        raise CheckpointError(f"can't save a checkpoint to {at}: {error}.") from error


def load_tree(folder: Where, choose: Choose | None = None) -> tuple[Tree, Tree]:
    """Read ``(tree, meta)`` as `save_tree` wrote them; nothing in the files is run.

    Args:
        folder: A path or a URL.
        choose: Where the tree is a dict, which of its items to read; the arrays of others are not touched. All if None.

    Raises:
        CheckpointError: the folder is not a checkpoint, or it is of a newer version or broken.
    """
    at = folder_at(folder)
    document = _read_manifest(at)
    while True:
        try:
            return _read_tree(at, document, choose), decode(document["meta"], {})
        except FileNotFoundError as error:
            newer = _read_manifest(at)
            if newer["state"] == document["state"]:
                raise CheckpointError(
                    f"{at}/{document['state']['file']} is missing, though {MANIFEST} names it. Restore it from a copy."
                ) from error
            document = newer  # another process saved between our two looks
        except OSError as error:
            raise CheckpointError(f"can't read {document['state']['file']} of {at}: {error}.") from error


def load_meta(folder: Where) -> Tree:
    """Read ``meta`` alone, as `save_tree` wrote it; quick, however large the checkpoint is.

    Raises:
        CheckpointError: the folder is not a checkpoint, or it is of a newer version.
    """
    return decode(_read_manifest(folder_at(folder))["meta"], {})


def remove_tree(folder: Where) -> None:
    """Remove a checkpoint, if it is there, and the folder, if there is nothing else in it.

    Its manifest goes first: whenever the process dies, what is left is no checkpoint, and never half of one.

    Raises:
        CheckpointError: it can't be removed.
    """
    at = folder_at(folder)
    try:
        at.remove(MANIFEST)
        _remove_states(at, but="")
        at.remove_itself()
    except OSError as error:
        raise CheckpointError(f"can't remove the checkpoint {at}: {error}.") from error


def _remove_states(at: Folder, but: str) -> None:
    for name in at.names():
        if name != but and _STATE_FILE.fullmatch(name):
            at.remove(name)


def _read_tree(at: Folder, document: dict[str, Any], choose: Choose | None) -> Tree:
    tree, state = document["tree"], document["state"]
    if choose is not None and isinstance(tree, dict):
        wanted = set(choose(list(tree)))
        tree = {name: part for name, part in tree.items() if name in wanted}
    with at.open(state["file"]) as file:
        return decode(tree, Arrays(file, state, f"{at}/{state['file']}"))


def _read_manifest(at: Folder) -> dict[str, Any]:
    path = f"{at}/{MANIFEST}"
    try:
        with at.open(MANIFEST) as file:
            document = json.loads(file.read())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{at} is not a checkpoint: {_what_is_there(at)}") from None
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is broken: it is not JSON ({error}). Restore it from a copy.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{at} is not a checkpoint: its {MANIFEST} does not say `format: {FORMAT}`.")
    version = document.get("version")
    if not isinstance(version, int) or (version != VERSION and version not in UPGRADES):
        raise CheckpointError(
            f"{at} is a checkpoint of version {version}, written by Etude {document.get('etude')}; Etude "
            f"{__version__} reads versions {min(UPGRADES)} to {VERSION}. Load it with an Etude that reads it: one of "
            "the version that wrote it, or later."
        )
    state = document.get("state")
    if (
        not {"meta", "tree"} <= document.keys()
        or not isinstance(state, dict)
        or not any(f <= state.keys() for f in _FACTS)
    ):
        raise CheckpointError(f"{path} is broken: it lacks `meta`, `tree` or `state`. Restore it from a copy.")
    if not _STATE_FILE.fullmatch(str(state.get("file"))):
        raise CheckpointError(
            f"{path} is broken: it names the state file {state.get('file')!r}. Restore it from a copy."
        )
    return _upgraded(document, version, path)


def _upgraded(document: dict[str, Any], version: int, path: str) -> dict[str, Any]:
    for old in range(version, VERSION):
        try:
            document = UPGRADES[old](document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is broken: it says that it is of version {old}, but is not laid out so "
                f"({type(error).__name__}: {error}). Restore it from a copy."
            ) from error
    return document


def _what_is_there(at: Folder) -> str:
    kind = at.kind()
    if kind is None:
        return "there is no such folder."
    if kind == "file":
        return "a checkpoint is a folder, this is a file."
    return f"it has no {MANIFEST}. Give the folder that a checkpoint was saved to."
