# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a folder with the manifest ``checkpoint.json`` and one safetensors file, replaced atomically.

The manifest names the safetensors file, its size and the checksums of its contents, so that replacing the manifest
switches to the new checkpoint in a single step. It also contains a checksum of its own content.
"""

import contextlib
import errno
import json
import os
import re
import reprlib
import secrets
import shutil
import stat
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from etude import __version__
from etude.checkpoints.codec import MANIFEST, Arrays, Encoder, Tree, decode, write_arrays
from etude.errors import CheckpointError, DataError
from etude.files import AnyPath, RemotePath, located, names_in, put, sync, temporary_name, write_atomically

FORMAT = "etude-checkpoint"
VERSION = 5
"""Version of the layout of the manifest and its states. Lower versions were written before the first release."""
_STATE_FILE = re.compile(r"state-[0-9a-f]{16}\.safetensors")
_SPARE = temporary_name(MANIFEST)

_BLOCK = 1 << 24  # bytes that are copied at a time
_FAILED = (OSError, DataError)  # raised by files and file systems

Where: TypeAlias = str | os.PathLike[str]
"""A path, or a URL such as ``s3://bucket/run``."""

Choose: TypeAlias = Callable[[Sequence[str]], Collection[str]]
"""Selects names among those at the top of a tree."""


def folder_at(where: Where) -> AnyPath:
    """Return the folder at a path or a URL; it need not exist.

    Raises:
        CheckpointError: it is not a path, or such URLs are not supported.
    """
    if not isinstance(where, str | os.PathLike) or isinstance(os.fspath(where), bytes):
        raise CheckpointError(
            f"a checkpoint is named by the path of its folder, or its URL, not by {reprlib.repr(where)}."
        )
    try:
        return located(where)
    except DataError as error:
        raise CheckpointError(str(error)) from None


def _open(path: AnyPath) -> BinaryIO:
    if isinstance(path, Path) and not stat.S_ISREG(path.stat().st_mode):  # a pipe returns bytes forever, or none
        raise OSError(errno.EINVAL, "it is not a regular file")
    return path.open("rb")


def save_tree(folder: Where, tree: Tree, *, meta: Tree = None) -> None:
    """Write ``tree`` to ``folder``, which is created if necessary; replaces any checkpoint there.

    If the process dies, the folder contains either the old checkpoint or the new one, complete. Only one process at a
    time may save to a folder; others may load from it meanwhile.

    Args:
        folder: A path, or a URL that pyarrow or fsspec support; other files in it are left alone.
        tree: Nested dicts, lists and tuples of None, bool, int, float, str, bytes, NumPy arrays, NumPy scalars and
            torch tensors. Types, dtypes and bits are preserved; tensors lose their device and gradients.
        meta: A small tree without arrays that describes the checkpoint.

    Raises:
        CheckpointError: the tree contains something else (the message names its path), or the folder can't be written.
    """
    encoder = Encoder()
    at = folder_at(folder)
    try:
        document = {
            "format": FORMAT,
            "version": VERSION,
            "etude": __version__,
            "meta": Encoder(arrays_allowed=False).encode(meta),
            "tree": encoder.encode(tree),
        }
        state = f"state-{secrets.token_hex(8)}.safetensors"
        at.mkdir(parents=True, exist_ok=True)
        _finish_replacing(at)
        document["state"] = write_arrays(at / state, encoder.arrays)
        document["crc32"] = _checksum(document)
        _replace_manifest(at, json.dumps(document, indent=1, allow_nan=False).encode())
        _remove_states(at, but=state)
    except _FAILED as error:
        raise CheckpointError(f"can't save a checkpoint to {at}: {error}.") from error
    except RecursionError as error:
        raise CheckpointError(f"can't save a checkpoint to {at}: its content is nested too deeply.") from error


def copy_tree(folder: Where, to: Where) -> None:
    """Copy the checkpoint in ``folder`` to the folder ``to``; replaces any checkpoint there.

    If both are on one local disk, the file of arrays is hard-linked rather than copied.

    Raises:
        CheckpointError: there is no checkpoint, or the copy can't be written.
    """
    source, target = folder_at(folder), folder_at(to)
    state = _read_manifest(source)["state"]["file"]
    _, manifest, _ = _whole_manifest(source)
    try:
        target.mkdir(parents=True, exist_ok=True)
        _finish_replacing(target)
        _copy(source / state, target / state)
        _replace_manifest(target, manifest)
        _remove_states(target, but=state)
    except _FAILED as error:
        raise CheckpointError(f"can't copy the checkpoint {source} to {target}: {error}.") from error


def load_tree(folder: Where, choose: Choose | None = None) -> tuple[Tree, Tree]:
    """Read ``(tree, meta)`` as written by `save_tree`; nothing in the files is executed.

    Args:
        folder: A path or a URL.
        choose: If the tree is a dict, selects the items to read; the arrays of others are not read. None is all.

    Raises:
        CheckpointError: the folder is not a checkpoint, or the checkpoint is broken or of another version.
    """
    at = folder_at(folder)
    document = _read_manifest(at)
    while True:
        try:
            return _read_tree(at, document, choose), _decoded(document["meta"], {}, at)
        except FileNotFoundError as error:
            newer = _read_manifest(at)
            if newer["state"] == document["state"]:
                raise CheckpointError(
                    f"{at}/{document['state']['file']} is missing, though {MANIFEST} names it. Restore it from a copy."
                ) from error
            document = newer  # another process saved in the meantime
        except _FAILED as error:
            raise CheckpointError(f"can't read {document['state']['file']} of {at}: {error}.") from error


def load_meta(folder: Where) -> Tree:
    """Read only ``meta`` as written by `save_tree`; fast, however large the checkpoint is.

    Raises:
        CheckpointError: the folder is not a checkpoint, or the checkpoint is broken or of another version.
    """
    at = folder_at(folder)
    return _decoded(_read_manifest(at)["meta"], {}, at)


def replace_meta(folder: Where, meta: Tree) -> None:
    """Replace only ``meta`` of a checkpoint, as atomically as `save_tree`.

    Raises:
        CheckpointError: the folder is not a checkpoint, or the checkpoint is broken or of another version; or it can't
            be written.
    """
    at = folder_at(folder)
    document = _read_manifest(at) | {"meta": Encoder(arrays_allowed=False).encode(meta)}
    document["crc32"] = _checksum(document)
    try:
        _finish_replacing(at)
        _replace_manifest(at, json.dumps(document, indent=1, allow_nan=False).encode())
    except _FAILED as error:
        raise CheckpointError(f"can't change the checkpoint at {at}: {error}.") from error


def state_name(folder: Where) -> str:
    """Return the name of the file with the checkpoint's arrays, which changes with each save.

    Raises:
        CheckpointError: the folder is not a checkpoint, or the checkpoint is broken or of another version.
    """
    return str(_read_manifest(folder_at(folder))["state"]["file"])


def remove_tree(folder: Where) -> None:
    """Remove a checkpoint, if it exists; and its folder, if that is then empty.

    The manifest is removed first: if the process dies, what is left is not taken for a checkpoint.

    Raises:
        CheckpointError: it can't be removed.
    """
    at = folder_at(folder)
    try:
        (at / MANIFEST).unlink(missing_ok=True)
        if isinstance(at, RemotePath):
            (at / _SPARE).unlink(missing_ok=True)
        _remove_states(at, but="")
        if not names_in(at):
            with contextlib.suppress(OSError):  # it does not exist, or is the current folder
                at.rmdir()
    except _FAILED as error:
        raise CheckpointError(f"can't remove the checkpoint {at}: {error}.") from error


def _copy(source: AnyPath, target: AnyPath) -> None:
    """Link a file under a second name, or copy it if that is not possible."""
    if isinstance(source, RemotePath) or isinstance(target, RemotePath):
        with source.open("rb") as file:
            put(target, iter(lambda: file.read(_BLOCK), b""))
        return
    if target.exists() and target.samefile(source):
        return
    try:
        os.link(source, target)
    except OSError:  # on another disk, or one without hard links
        try:
            shutil.copyfile(source, target)
            sync(target)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
    sync(target.parent)


def _replace_manifest(at: AnyPath, data: bytes) -> None:
    """Replace the manifest.

    At any time, either the old or the new manifest is complete; the new one perhaps only as the spare file.
    """
    if not isinstance(at, RemotePath) or at.is_in_object_store:
        write_atomically(at / MANIFEST, data)
        return
    spare = at / _SPARE
    spare.put([data])
    try:
        spare.rename(at / MANIFEST)
    except OSError:  # the file system can't replace files by renaming, and may have begun to
        spare.put([data])
        (at / MANIFEST).put([data])
        spare.unlink(missing_ok=True)


def _remove_states(at: AnyPath, but: str) -> None:
    for name in names_in(at):
        if name != but and _STATE_FILE.fullmatch(name):
            (at / name).unlink(missing_ok=True)


def has_manifest(folder: Where) -> bool:
    """Return whether a folder contains a checkpoint, complete or broken."""
    at = folder_at(folder)
    names = names_in(at)
    return MANIFEST in names or (isinstance(at, RemotePath) and _SPARE in names)


def _finish_replacing(at: AnyPath) -> None:
    """Finish replacing the manifest if a process died before it was done and left the new one as the spare file."""
    if isinstance(at, RemotePath) and _SPARE in names_in(at):
        with contextlib.suppress(CheckpointError):
            name, data, _ = _whole_manifest(at)
            if name == _SPARE:
                (at / MANIFEST).put([data])


def _whole_manifest(at: AnyPath) -> tuple[str, bytes, dict[str, Any]]:
    """Return the manifest: the name under which it is complete, its bytes and its content."""
    try:
        return MANIFEST, *_parsed(at, MANIFEST)
    except CheckpointError as error:
        if isinstance(at, RemotePath):
            with contextlib.suppress(CheckpointError):
                return _SPARE, *_parsed(at, _SPARE)
        raise error


def _read_tree(at: AnyPath, document: dict[str, Any], choose: Choose | None) -> Tree:
    tree, state = document["tree"], document["state"]
    if choose is not None and isinstance(tree, dict):
        wanted = set(choose(list(tree)))
        tree = {name: part for name, part in tree.items() if name in wanted}
    with _open(at / state["file"]) as file:
        return _decoded(tree, Arrays(file, state, f"{at}/{state['file']}"), at)


def _decoded(data: Any, arrays: Mapping[str, Any], at: AnyPath) -> Tree:
    try:
        return decode(data, arrays)
    except RecursionError as error:
        raise _broken(f"{at}/{MANIFEST}", "it is nested too deeply") from error


def _checksum(document: dict[str, Any]) -> int:
    """The checksum of everything in a manifest but the checksum, independent of its layout."""
    content = {name: value for name, value in document.items() if name != "crc32"}
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


def _parsed(at: AnyPath, name: str) -> tuple[bytes, dict[str, Any]]:
    """Return the bytes and the content of a manifest whose checksum is right.

    Raises:
        CheckpointError: it does not exist, is broken, or is another kind of file.
    """
    path = f"{at}/{name}"
    try:
        try:
            with _open(at / name) as file:
                text = file.read()
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{at} is not a checkpoint: {_what_is_there(at)}") from None
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise CheckpointError(f"{at} is not a checkpoint: its {MANIFEST} does not say `format: {FORMAT}`.")
        if document.get("version") == VERSION and document.get("crc32") != _checksum(document):
            raise _broken(path, "its content does not match its checksum")
    except _FAILED as error:
        raise CheckpointError(f"can't read {path}: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"it is not JSON ({error})") from error
    return text, document


def _read_manifest(at: AnyPath) -> dict[str, Any]:
    path = f"{at}/{MANIFEST}"
    _, _, document = _whole_manifest(at)
    if document.get("version") != VERSION:
        raise CheckpointError(
            f"{at} is a checkpoint of version {document.get('version')}, written by Etude {document.get('etude')}; "
            f"Etude {__version__} reads version {VERSION}. Load it with an Etude of the version that wrote it, or "
            "later; versions 1 to 4 are from before the first release, and are no longer read."
        )
    try:
        state = document["state"]
        numbers = (state["bytes"], state["header"], *state["crc32"].values())
        is_whole = {"meta", "tree"} <= document.keys() and all(type(number) is int for number in numbers)
        is_whole = is_whole and _STATE_FILE.fullmatch(state["file"]) is not None
    except (KeyError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        raise _broken(path, "its `meta`, its `tree` or the description of its `state` file is missing or wrong")
    return document


def _broken(path: str, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is broken: {what}. Restore it from a copy.")


def _what_is_there(at: AnyPath) -> str:
    if at.is_dir():
        if several := [name for name in names_in(at) if name.startswith(("seed-", "trial-"))]:
            return f"it has several runs. Give one of them, such as {at / min(several)}."
        return f"it has no {MANIFEST}. Give the folder that a checkpoint was saved to."
    return "a checkpoint is a folder, this is a file." if at.exists() else "there is no such folder."
