# SPDX-License-Identifier: Apache-2.0
"""Other tools' recordings: only this folder knows their formats, one file each."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from etude.errors import DataError
from etude.files import AnyPath, relative
from etude.recordings.formats import hdf5, lerobot, minari, npz, rllib_episodes, rllib_json, rllib_table
from etude.recordings.formats.parts import Parts, Problem

Opener: TypeAlias = Callable[[Sequence[AnyPath]], Parts]

_OF_FILES: tuple[tuple[Callable[[AnyPath], bool], Opener], ...] = (
    (rllib_episodes.detect, rllib_episodes.open_parts),
    (rllib_table.detect, rllib_table.open_parts),
    (rllib_json.detect, rllib_json.open_parts),
    (hdf5.detect, hdf5.open_parts),
    (npz.detect, npz.open_parts),
)
_SUFFIXES = (".parquet", ".json", ".jsonl", ".hdf5", ".h5", ".npz")


def open_foreign(path: AnyPath, faults: list[Problem] | None = None) -> Parts | None:
    """Another tool's recording at ``path``, told by what is in it; None where it is none that is known.

    Args:
        path: A folder, or one file.
        faults: Where given, files and lines that can't be read are left out and named here.

    Raises:
        DataError: it can't be opened, or there are files of several formats.
    """
    if minari.detect(path):
        return minari.open_parts(path)
    if lerobot.detect(path):
        return lerobot.open_parts(path)
    found: list[Any] = [path] if path.is_file() else [p for p in path.rglob("*") if _is_data(p, path)]
    files = sorted(found)
    first = files[0] if files else path
    if faults is not None:  # the first may be one of those that can't be read
        first = next((file for file in files if opener_of(file)), first)
    opener = opener_of(first)
    if opener is None:
        return None
    others = {file: opener_of(file) for file in files if file.suffix != first.suffix}
    for file, other in others.items():
        if other not in (None, opener):
            message = f"{file}: is of another format than {first}, with which it lies. Put one of them elsewhere, or "
            message += "give both in a list."
            if faults is None:
                raise DataError(message)
            faults.append(Problem("unreadable", message, str(file), count=0, repairable=True))
    return open_files(opener, [file for file in files if others.get(file, opener) is opener], faults)


def open_files(opener: Opener, files: Sequence[AnyPath], faults: list[Problem] | None = None) -> Parts:
    """Open files of one kind; with ``faults``, those that can't be read or don't go with the first are named there.

    Raises:
        DataError: none can be read; or, without ``faults``, one can't.
    """
    if faults is not None and opener is rllib_json.open_parts:
        return rllib_json.open_parts(files, faults)
    try:
        return opener(files)
    except DataError as error:
        if faults is None or len(files) == 1:
            raise
        good: list[AnyPath] = []
        for file in files:
            try:
                opener([*good[:1], file])
                good.append(file)
            except DataError as own:
                faults.append(Problem("unreadable", str(own), str(file), count=0, repairable=True))
        if not good:
            raise error
        return opener(good)


def opener_of(file: AnyPath) -> Opener | None:
    """What opens files such as this one; None where it is of no kind that is known, or of one that is a folder."""
    return next((open_parts for detect, open_parts in _OF_FILES if detect(file)), None)


def _is_data(path: AnyPath, folder: AnyPath) -> bool:
    return path.suffix in _SUFFIXES and not any(part[0] in "._" for part in relative(path, folder).parts)
