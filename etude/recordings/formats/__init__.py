# SPDX-License-Identifier: Apache-2.0
"""The formats of other tools' recordings, one file each; no code outside this folder knows them."""

import dataclasses
from collections.abc import Sequence
from typing import Final

from etude.errors import DataError
from etude.files import AnyPath, visible_files
from etude.recordings.format import Contents, FileFormat, Format, Problem, UnreadableError
from etude.recordings.formats import d4rl, lerobot, minari, rllib_episodes, rllib_json, rllib_table

FORMATS: Final[tuple[type[FileFormat], ...]] = (
    rllib_episodes.RLlibEpisodes,
    rllib_table.RLlibTable,
    rllib_json.RLlibJson,
    d4rl.D4RLHdf5,
    d4rl.D4RLNpz,
)
"""Formats of single files; the first one that detects a file is its format."""
_SUFFIXES = (".parquet", ".json", ".jsonl", ".hdf5", ".h5", ".npz")


def foreign(path: AnyPath, faults: list[Problem] | None = None) -> tuple[Format, Contents] | None:
    """Detect another tool's recording at ``path`` from its contents; None if it is of no known format.

    Args:
        path: A folder, or one file.
        faults: If given, files and lines that can't be read are left out and named here.

    Raises:
        DataError: it can't be opened, or there are files of several formats.
    """
    of_folder = format_of_folder(path)
    if of_folder is not None:
        whole = of_folder(path)
        return whole, usable(whole.describe(), faults)
    files = [path] if path.is_file() else [file for file in visible_files(path) if file.suffix in _SUFFIXES]
    first = files[0] if files else path
    if faults is not None:  # the first file may be one of those that can't be read
        first = next((file for file in files if format_of(file)), first)
    kind = format_of(first)
    if kind is None:
        return None
    others = {file: format_of(file) for file in files if file.suffix != first.suffix}
    for file, other in others.items():
        if other not in (None, kind):
            message = f"{file}: is of another format than {first} in the same folder. Move one of them elsewhere, or "
            message += "give both in a list."
            if faults is None:
                raise DataError(message)
            faults.append(Problem("unreadable", message, str(file), count=0, repairable=True))
    return of_files(kind, [file for file in files if others.get(file, kind) is kind], faults)


def of_files(
    kind: type[FileFormat], files: Sequence[AnyPath], faults: list[Problem] | None = None
) -> tuple[FileFormat, Contents]:
    """Open files of one kind; with ``faults``, those that can't be read or don't match the first are named there.

    Raises:
        DataError: none can be read; or, without ``faults``, one of them can't.
    """
    try:
        format = kind(files)
        contents = format.describe()
    except DataError as error:
        if faults is not None and len(files) == 1 and isinstance(error, UnreadableError):
            faults.append(error.problem)
        if faults is None or len(files) == 1:
            raise
        good: list[AnyPath] = []
        for file in files:
            try:
                kind([*good[:1], file]).describe()
                good.append(file)
            except DataError as own:
                faults.append(Problem("unreadable", str(own), str(file), count=0, repairable=True))
        if not good:
            raise
        format = kind(good)
        contents = format.describe()
    return format, usable(contents, faults)


def usable(contents: Contents, faults: list[Problem] | None) -> Contents:
    """The contents, with what can't be read moved to ``faults``.

    Raises:
        DataError: something can't be read, and there are no ``faults``.
    """
    bad = [problem for problem in contents.problems if problem.kind == "unreadable"]
    if bad and faults is None:
        raise DataError(bad[0].message)
    if bad and faults is not None:
        faults += bad
        contents = dataclasses.replace(contents, problems=[one for one in contents.problems if one not in bad])
    return contents


def format_of_folder(path: AnyPath) -> type[minari.Minari] | type[lerobot.LeRobot] | None:
    """Return the format of a recording that is a folder with files of several kinds; None if it is none of these."""
    return minari.Minari if minari.detect(path) else lerobot.LeRobot if lerobot.detect(path) else None


def format_of(file: AnyPath) -> type[FileFormat] | None:
    """Return the format of a file; None if it is unknown, or a format of folders."""
    return next((kind for kind in FORMATS if kind.detect(file)), None)
