# SPDX-License-Identifier: Apache-2.0
"""``recording.json``, which recordings of format 1 have beside their files. Nothing writes it any more."""

import errno
import reprlib
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from etude.errors import DataError
from etude.files import AnyPath
from etude.recordings.layout import Header, loads

MANIFEST: Final = "recording.json"
_LONGEST_NAME: Final = 255


class Manifest(NamedTuple):
    """What ``recording.json`` says."""

    header: Header
    rows: dict[str, int]
    """The rows of each data file, by its path relative to the folder."""


def read_manifest(folder: AnyPath) -> Manifest | None:
    """``recording.json`` of ``folder``, or None if there is none.

    Raises:
        DataError: it is there, but is not valid.
    """
    path = folder / MANIFEST
    try:
        if isinstance(path, Path) and path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is no regular file")  # a pipe or a device, which has no end
        data = loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(
            f"{path}: can't be read as JSON ({error}). Each Parquet file carries the same header: move {MANIFEST} away "
            "to read the recording without it."
        ) from error
    header = Header.from_json(data, path)
    files = data.get("files", {})
    if not isinstance(files, dict) or not all(
        isinstance(f, dict) and type(f.get("rows")) is int for f in files.values()
    ):
        raise DataError(f"{path}: `files` is not a list of files with their rows. Move {MANIFEST} away to go on.")
    for name in files:
        parts = name.split("/")
        is_odd = not name or "\0" in name or "\\" in name or max(map(len, parts)) > _LONGEST_NAME
        if is_odd or PurePosixPath(name).is_absolute() or ".." in parts:
            raise DataError(
                f"{path}: `files` lists {reprlib.repr(name)}, which is no file below this folder. Restore it from a "
                f"copy, or move {MANIFEST} away to go on."
            )
    return Manifest(header, {name: facts["rows"] for name, facts in files.items()})
