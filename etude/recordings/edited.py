# SPDX-License-Identifier: Apache-2.0
"""What came of making a recording out of others, and what is looked at before."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from etude.errors import DataError
from etude.files import AnyPath, RemotePath, expanded, located
from etude.recordings.files import data_files
from etude.recordings.formats.custom import CustomSource
from etude.recordings.formats.source import Source
from etude.recordings.opening import Places
from etude.recordings.recording import Recording


@dataclasses.dataclass(frozen=True)
class Part:
    """A recording that was written."""

    path: str
    episodes: int
    steps: int
    """Of all agents, lookback left out."""

    def __str__(self) -> str:
        return f"{self.path}: {counted(self.episodes, 'episode')}, {counted(self.steps, 'step')}"


@dataclasses.dataclass(frozen=True)
class Edited:
    """What was written, and what was left out."""

    written: tuple[Part, ...]
    left_out_episodes: int = 0
    left_out_steps: int = 0
    notes: tuple[str, ...] = ()
    """What else is not as it was, in words."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "written": [dataclasses.asdict(part) for part in self.written],
            "left_out": {"episodes": self.left_out_episodes, "steps": self.left_out_steps},
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        out = f"{counted(self.left_out_episodes, 'episode')}, {counted(self.left_out_steps, 'step')}"
        return "\n".join([*map(str, self.written), f"left out: {out}", *self.notes])


def counted(count: int, what: str) -> str:
    """``3 episodes``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def columns_of_pass(recording: Recording, needed: Sequence[str], written: Sequence[str]) -> Sequence[str]:
    """The columns to read where ``needed`` would do, but ``written`` are written later.

    What ``on_bad`` leaves out hangs on the columns that are read: both passes must see the same.
    """
    return written if recording.leaves_out else needed


@contextmanager
def told_where(paths: Sequence[str]) -> Iterator[None]:
    """Say in an error within it that what was written until then is there."""
    try:
        yield
    except DataError as error:
        there = ", ".join(paths)
        raise DataError(f"{error} What was written until then is in {there}: remove it before trying again.") from error


def check_apart(to: Sequence[str | os.PathLike[str]], recordings: Sequence[Recording]) -> None:
    """Raise a DataError where something is to be written into the folder of something else."""
    outs = [located(path) for path in to]
    places = [place for recording in recordings for place in _places(recording.path)]
    for out in outs:
        if any(_lies_in(out, place) and _lies_in(place, out) for place in places):
            raise DataError(f"{out}: is what is to be read, to which its files would be added. Choose another folder.")
    pairs = [(out, place) for out in outs for place in places]
    pairs += [(out, other) for out in outs for other in outs if out is not other]
    for out, other in pairs:
        if _lies_in(out, other):
            raise DataError(f"{out}: lies in {other}, to which its files would belong then. Choose another folder.")


def check_free(to: Sequence[str | os.PathLike[str]]) -> None:
    """Raise a DataError where a recording is to be written to a folder that holds one."""
    for out in map(located, to):
        files = data_files(out)
        if files:
            raise DataError(
                f"{out}: holds a recording of {len(files)} files already. Choose another folder, or remove it."
            )


def _lies_in(path: AnyPath, folder: AnyPath) -> bool:
    if isinstance(path, Path) and isinstance(folder, Path):
        return path.resolve().is_relative_to(folder.resolve())
    both_remote = isinstance(path, RemotePath) and isinstance(folder, RemotePath)
    return both_remote and PurePosixPath(str(path)).is_relative_to(str(folder))


def _places(given: Any, filesystem: Any = None) -> list[AnyPath]:
    """The files and folders that a recording is read from, as far as it is read from such."""
    if isinstance(given, Places):
        return _places(given.given, given.filesystem)
    if isinstance(given, Source):
        return _places(given.data, given.filesystem)
    if isinstance(given, CustomSource):
        return _places(given.paths, given.filesystem)
    if isinstance(given, list | tuple):
        return [place for one in given for place in _places(one, filesystem)]
    return expanded(given, filesystem) if isinstance(given, str | os.PathLike | RemotePath) else []
