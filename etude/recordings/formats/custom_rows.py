# SPDX-License-Identifier: Apache-2.0
"""Raw rows for a function of the user's: whole files as bytes, or lines of text; in parts of bounded size."""

import os
from collections.abc import Iterator, Sequence
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from etude.errors import DataError
from etude.files import AnyPath, RemotePath, Systems, expanded

Raw = TypeVar("Raw", bytes, str)
Together = Literal["file", "folder", "line"]
Place = str | os.PathLike[str] | RemotePath
Paths = Place | Sequence[Place]


_BLOCK: Final = 2**20


class RawRow(NamedTuple, Generic[Raw]):
    """What a function of the user's gets: a file, or a line of one."""

    path: str
    """The file."""
    data: Raw
    """The bytes of the file; or the line, as text without its end."""
    number: int
    """The line in its file, from 0; 0 where the row is a file."""


class Span(NamedTuple):
    """Bytes ``start:stop`` of a file; of a text, the lines that begin there."""

    file: AnyPath
    start: int
    stop: int


def parts_of(units: Sequence[Sequence[Span]], budget: int, *, cut: bool) -> list[list[Sequence[Span]]]:
    """Units put into parts of about ``budget`` bytes, one unit at least; with ``cut``, a unit may be in several."""
    parts: list[list[Sequence[Span]]] = [[]]
    size = 0
    for unit in units:
        for piece in _cut(unit, budget) if cut else [unit]:
            own = sum(span.stop - span.start for span in piece)
            if parts[-1] and size + own > budget:
                parts.append([])
                size = 0
            parts[-1].append(piece)
            size += own
    return parts


def _cut(unit: Sequence[Span], budget: int) -> Iterator[Sequence[Span]]:
    for span in unit:
        for start in range(span.start, max(span.stop, span.start + 1), budget):
            yield [Span(span.file, start, min(start + budget, span.stop))]


def spans_of(files: Sequence[AnyPath], together: Together) -> list[list[Span]]:
    """The files as units: each alone, or those of one folder, in the order given."""
    units: dict[AnyPath, list[Span]] = {}
    for file in files:
        try:
            span = Span(file, 0, file.stat().st_size)
        except OSError as error:
            raise _unreadable(file, error) from error
        units.setdefault(file.parent if together == "folder" else file, []).append(span)
    return list(units.values())


def binary_rows(unit: Sequence[Span]) -> Iterator[Sequence[RawRow[bytes]]]:
    """The files of a unit, all at once."""
    rows = []
    for span in unit:
        try:
            rows.append(RawRow(str(span.file), span.file.read_bytes(), 0))
        except OSError as error:
            raise _unreadable(span.file, error) from error
    yield rows


class LineCounts:
    """How many lines begin before a byte of a text; what was counted once is kept."""

    def __init__(self) -> None:
        self._ends: dict[AnyPath, tuple[int, ...]] = {}  # the ends of lines in the first 0, 1, 2, ... blocks

    def before(self, span: Span) -> int:
        """The lines that begin before ``span``."""
        if not span.start:
            return 0
        blocks, rest = divmod(span.start, _BLOCK)
        counts = list(self._ends.get(span.file, (0,)))
        with span.file.open("rb") as file:
            file.seek((len(counts) - 1) * _BLOCK)
            while len(counts) <= blocks:
                counts.append(counts[-1] + file.read(_BLOCK).count(b"\n"))
            self._ends[span.file] = tuple(counts)
            file.seek(blocks * _BLOCK)
            count = counts[blocks] + file.read(rest).count(b"\n")
            file.seek(span.start - 1)
            return count if file.read(1) == b"\n" else count + 1


def text_rows(unit: Sequence[Span], together: Together, counts: LineCounts) -> Iterator[Sequence[RawRow[bytes]]]:
    """The lines of a unit, not yet decoded: each alone, or all of a file at once; empty files are left out."""
    for span in unit:
        if together == "line":
            yield from ([row] for row in _lines(span, counts))
        elif span.stop:
            yield list(_lines(span, counts))


def _lines(span: Span, counts: LineCounts) -> Iterator[RawRow[bytes]]:
    """The lines that begin in a span; their numbers are counted from the file's beginning."""
    try:
        number = counts.before(span)
        with span.file.open("rb") as file:
            if span.start:
                file.seek(span.start - 1)
                file.readline()  # the rest of a line that began before; at least its end
            while file.tell() < span.stop:
                line = file.readline()
                if not line:
                    return
                yield RawRow(str(span.file), line.removesuffix(b"\n").removesuffix(b"\r"), number)
                number += 1
    except OSError as error:
        raise _unreadable(span.file, error) from error


def decoded(row: RawRow[bytes]) -> RawRow[str]:
    """A line as text.

    Raises:
        DataError: it is not UTF-8.
    """
    try:
        return RawRow(row.path, row.data.decode(), row.number)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{row.path}, row {row.number}: is not UTF-8 text (byte {error.start} of the line is "
            f"{row.data[error.start]:#04x}). Write it anew in UTF-8; or read the file as bytes, with read_binary."
        ) from error


def _unreadable(file: AnyPath, error: OSError) -> DataError:
    return DataError(f"{file}: can't be read ({error.strerror or error}). Restore it, or leave it out.")


def names_of(path: Any) -> list[str]:
    """The names that a path is made of."""
    return str(path).replace(os.sep, "/").split("/")


def common(paths: Sequence[list[str]]) -> int:
    """How many names all paths begin with."""
    first, last = min(paths), max(paths)
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def files_of(paths: Paths, filesystem: Any) -> list[AnyPath]:
    """The files meant, in the order given, those of a folder by their full paths.

    Raises:
        DataError: there are none.
    """
    files: dict[AnyPath, None] = {}
    known: Systems = {}
    for given in [paths] if isinstance(paths, str | os.PathLike | RemotePath) else paths:
        for place in expanded(given, filesystem, known):
            found = [place] if place.is_file() else _inside(place)
            if not found:
                raise DataError(f"{place}: there is no file here. Give a file, a folder, a glob, or a list of these.")
            files.update(dict.fromkeys(found))
    return list(files)


def _inside(folder: AnyPath) -> list[AnyPath]:
    found: list[Any] = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in found if not any(part[0] in "._" for part in path.relative_to(folder).parts)]
