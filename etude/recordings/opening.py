# SPDX-License-Identifier: Apache-2.0
"""From what a user gives to the parts of the recording there, of any format."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from etude.errors import DataError
from etude.files import AnyPath, RemotePath, Systems, expanded, shown
from etude.recordings import footers
from etude.recordings.files import data_files, has_own_columns, recordings_in
from etude.recordings.formats import Opener, open_files, open_foreign, opener_of
from etude.recordings.formats.parts import Parts, Problem
from etude.recordings.joined import JoinedParts
from etude.recordings.layout import HEADER_KEY
from etude.recordings.manifest import MANIFEST
from etude.recordings.own import open_own

if TYPE_CHECKING:
    from etude.recordings.formats.custom import CustomSource
    from etude.recordings.formats.source import Source

    One: TypeAlias = str | os.PathLike[str] | RemotePath | Source | CustomSource | Parts
    DataLike: TypeAlias = One | "Places" | Sequence[One]
    """What `Recording.open` takes: a path, a URL, a glob, a `Source`, or a list of these."""

_AT_ONCE: Final = 24


@dataclasses.dataclass(frozen=True)
class Places:
    """What a recording was opened from that is more than one path: a list, a glob, or a `Source`. Opens it again."""

    given: Any
    filesystem: Any = None

    def __str__(self) -> str:
        """In words, without credentials."""
        return shown(self.given)

    def __repr__(self) -> str:
        return f"Places({shown(self.given)!r})"


Place: TypeAlias = AnyPath | Places
"""Where a recording is: its folder or file, or what it was opened from where that is more."""


@dataclasses.dataclass(frozen=True)
class Found:
    """One recording that was found, not yet opened."""

    path: AnyPath | None
    """Its folder, or its first file; None where it is described by an object."""
    files: tuple[AnyPath, ...] | None
    """The files of it that were given one by one; None: all under `path`."""
    open: Callable[[], Parts]


def opened(given: "DataLike", filesystem: Any = None, faults: list[Problem] | None = None) -> tuple[Place, Parts]:
    """Where a recording is, and its parts. With ``faults``, files that can't be used are left out and named there.

    Raises:
        DataError: there is none, or it can't be opened; or there are several that do not go together.
    """
    try:
        recordings = found(given, filesystem, faults)
        parts = [recording.open() for recording in recordings]
    except OSError as error:
        raise DataError(f"{shown(given)}: can't be read ({error.strerror or error}).") from error
    return place_of(given, filesystem, recordings), parts[0] if len(parts) == 1 else JoinedParts(parts)


def place_of(given: "DataLike", filesystem: Any, recordings: Sequence[Found]) -> Place:
    """Where the recordings that were found are."""
    if isinstance(given, Places):
        return given
    path = recordings[0].path
    alone = len(recordings) == 1 and len(recordings[0].files or ()) < 2
    is_path = isinstance(given, str | os.PathLike | RemotePath)
    return path if path is not None and alone and is_path else Places(given, filesystem)


def found(given: "DataLike", filesystem: Any = None, faults: list[Problem] | None = None) -> list[Found]:
    """The recordings that a path, a list and so on stand for; files given one by one are together one of each kind.

    Raises:
        DataError: there is nothing that could be one.
    """
    if isinstance(given, Places):
        return found(given.given, given.filesystem, faults)
    several = isinstance(given, list | tuple)
    if several and not given:
        raise DataError("an empty list was given: there is nothing to open. Give paths, URLs or globs.")
    known: Systems = {}
    places: list[Any] = []
    for one in given if several else [given]:  # type: ignore[union-attr]
        is_path = isinstance(one, str | os.PathLike | RemotePath)
        places += expanded(one, filesystem, known) if is_path else [one]
    places = _listed(places)
    if len(places) == 1:
        return _of_path(places[0], faults) if isinstance(places[0], AnyPath) else [_of_object(places[0])]
    files = dict.fromkeys(place for place in places if isinstance(place, AnyPath) and not place.is_dir())
    of_files = {
        one.path: one for one in _of_files(list(files), faults)
    }  # by the first of them: that is its place in the list
    out: list[Found] = []
    for place in places:
        if not isinstance(place, AnyPath):
            out.append(_of_object(place))
        elif place in of_files:
            out.append(of_files.pop(place))
        elif place not in files:
            out += _of_path(place, faults)
    return out


def _listed(places: Sequence[Any]) -> list[Any]:
    """The same, with all that is behind URLs asked for once, several at a time."""

    def listed(place: Any) -> Any:
        return place.listed() if isinstance(place, RemotePath) and place.listing is None else place

    if len(places) == 1:
        return [listed(places[0].listed() if isinstance(places[0], RemotePath) else places[0])]
    if not any(isinstance(place, RemotePath) for place in places):
        return list(places)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(listed, places))


def _of_object(given: Any) -> Found:
    """What is no path: a description of files or of a table, or parts that a user wrote."""
    from etude.recordings.formats import custom, source, table

    if isinstance(given, custom.CustomSource):
        return Found(None, None, lambda: custom.open_parts(given))
    if isinstance(given, source.Source):
        return Found(None, None, lambda: table.open_parts(given))
    if all(hasattr(given, name) for name in ("num_parts", "load", "header")):
        return Found(None, None, lambda: given)
    raise DataError(
        f"can't open {shown(given)} as a recording: give a path, a URL, a glob, or a list of them; or a Source, which "
        "takes tables in memory too. An Experience must be written first, with a RecordingWriter."
    )


def _of_path(path: AnyPath, faults: list[Problem] | None) -> list[Found]:
    """The recording at a path; several where it is a folder with recordings of Etude's below it."""
    if path.exists() and not is_own(path):
        parts = open_foreign(path, faults)
        if parts is not None:
            return [Found(path, None, lambda: parts)]
    folders = list(recordings_in(path)) if path.is_dir() else []
    return [Found(folder, None, partial(open_own, folder, None, faults)) for folder in folders or [path]]


def _of_files(files: Sequence[AnyPath], faults: list[Problem] | None) -> Iterable[Found]:
    """Files that were given one by one, those of a kind together, in the order of the first of each."""
    list(footers.footers([file for file in files if file.suffix == ".parquet" and isinstance(file, RemotePath)]))
    kinds: dict[Opener | None, list[AnyPath]] = {}
    for file in files:
        opener = None if not file.exists() or is_own(file) else opener_of(file)
        kinds.setdefault(opener, []).append(file)
    for opener, alike in kinds.items():
        if opener is None:
            yield Found(alike[0], tuple(alike), partial(open_own, alike[0], alike, faults))
        else:
            yield Found(alike[0], tuple(alike), partial(open_files, opener, alike, faults))


def is_own(path: AnyPath) -> bool:
    """Whether there is a file in Etude's own format at ``path``, or one that says it was."""
    if (path / MANIFEST).exists():
        return True
    files = [file for file in ([path] if path.is_file() else data_files(path)) if file.suffix == ".parquet"]
    is_first_broken = False
    for k, footer in enumerate(footers.footers(files)):
        if isinstance(footer, DataError):
            is_first_broken |= k == 0
        elif HEADER_KEY in (footer.metadata or {}) or has_own_columns(footer.schema.to_arrow_schema().names):
            return True
    return is_first_broken  # whatever it was: Etude's own reader says what is wrong with it
