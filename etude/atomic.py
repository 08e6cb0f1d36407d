# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole or not at all, whenever the process is killed or the power is cut."""

import contextlib
import errno
import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Put a file at ``path``, in place of the one that is there, at one stroke; one writer of ``path`` at a time.

    It is written beside ``path`` under a hidden name, always the same one: what a killed writer left there is used
    again by the next, and never adds up.

    Raises:
        OSError: it can't be written; ``path`` is then as it was, and nothing is left beside it.
    """
    aside = path.with_name(f".{path.name}.tmp")
    try:
        aside.write_bytes(data)
        publish(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def publish(aside: Path, path: Path) -> None:
    """Rename a finished file of the same folder to its real name, so that it and its name survive a power cut."""
    sync(aside)
    os.replace(aside, path)
    sync(path.parent)


def publish_new(aside: Path, path: Path) -> None:
    """As `publish`, but never in place of another file: raises a FileExistsError where there is one."""
    sync(aside)
    try:
        os.link(aside, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(errno.EEXIST, "there is a file already", str(path)) from None
        os.replace(aside, path)
    else:
        aside.unlink()
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or a folder's names, to the disk."""
    if os.name == "nt" and path.is_dir():  # Windows can't open folders, and journals renames itself
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
