# SPDX-License-Identifier: Apache-2.0
"""Detect, read and write the recordings of other tools, and read tables and files of the user's own."""

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
_SUFFIXES: Final = {suffix for kind in FORMATS for suffix in kind.suffixes}


def foreign(path: AnyPath, faults: list[Problem] | None = None) -> tuple[Format, Contents] | None:
    """Detect another tool's recording from its contents, and open it.

    Args:
        path: A folder, or one file.
        faults: If given, files and lines that can't be read are skipped, and a `Problem` is added here for each.

    Returns:
        The format and the contents; None if the format is unknown.

    Raises:
        DataError: nothing can be read; or, without ``faults``, a file can't be read or has another format than the
            first one.
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
    """Open files of one format.

    With ``faults``, files that can't be read or don't match the first one are skipped, and a `Problem` is added there
    for each.

    Raises:
        DataError: no file can be read; or, without ``faults``, one of them can't be read.
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
    """Return ``contents`` without its problems of kind ``unreadable``, which are moved to ``faults``.

    Raises:
        DataError: there is such a problem, and ``faults`` is None.
    """
    bad = [problem for problem in contents.problems if problem.kind == "unreadable"]
    if bad and faults is None:
        raise DataError(bad[0].message)
    if bad and faults is not None:
        faults += bad
        contents = dataclasses.replace(contents, problems=[one for one in contents.problems if one not in bad])
    return contents


def format_of_folder(path: AnyPath) -> type[minari.Minari] | type[lerobot.LeRobot] | None:
    """Return `Minari` or `LeRobot` if ``path`` is such a dataset, which has files of several kinds; else None."""
    return minari.Minari if minari.detect(path) else lerobot.LeRobot if lerobot.detect(path) else None


def format_of(file: AnyPath) -> type[FileFormat] | None:
    """Return the first of `FORMATS` that detects a file; None if there is none."""
    return next((kind for kind in FORMATS if file.suffix in kind.suffixes and kind.detect(file)), None)
