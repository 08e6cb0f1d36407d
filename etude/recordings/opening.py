# SPDX-License-Identifier: Apache-2.0
"""From a path to the parts of the recording there, whoever wrote it."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from etude.recordings.files import data_files
from etude.recordings.formats import open_foreign
from etude.recordings.formats.parts import Parts
from etude.recordings.manifest import HEADER_KEY, MANIFEST
from etude.recordings.own import OwnParts

if TYPE_CHECKING:
    from etude.recordings.formats.source import Source


def opened(path: "str | os.PathLike[str] | Source") -> tuple[Path, Parts]:
    """Where a recording is, and its parts.

    Raises:
        DataError: there is none, or it can't be opened.
    """
    if not isinstance(path, str | os.PathLike):
        from etude.recordings.formats import table

        return Path(str(path)), table.open_parts(path)
    path = Path(path)
    foreign = None if not path.exists() or is_own(path) else open_foreign(path)
    return path, OwnParts(path) if foreign is None else foreign


def is_own(path: Path) -> bool:
    """Whether there is a file in Etude's own format at ``path``, or one that says it was."""
    if (path / MANIFEST).exists():
        return True
    files = [path] if path.is_file() else data_files(path)
    return any(_has_header(file) for file in files[:1] if file.suffix == ".parquet")


def _has_header(file: Path) -> bool:
    try:
        return HEADER_KEY in (pq.read_schema(file).metadata or {})
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return True  # whatever it was: Etude's own reader says what is wrong with it
