# SPDX-License-Identifier: Apache-2.0
"""From what a user gives (a path, a URL, a glob, a list of them) to the files and folders that are meant."""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from etude.errors import DataError
from etude.filesystems import AnyPath, RemotePath
from etude.urls import is_url, path_in, redacted, system_of

Systems = dict[str, tuple[Any, str]]


def located(where: Any, filesystem: Any = None, known: Systems | None = None) -> AnyPath:
    """The file or folder at a path or URL; it need not be there.

    Args:
        where: A path, a URL, or what this function gave before.
        filesystem: A file system of pyarrow's or fsspec's that ``where`` is in; None is what the URL names, or this
            machine. With it, ``s3://bucket/run`` and ``bucket/run`` are the same.
        known: See `etude.urls.system_of`.

    Raises:
        DataError: the path is empty, nothing here knows such URLs, or ``filesystem`` is none.
    """
    if isinstance(where, RemotePath):
        return where
    text = os.fspath(where)
    if not text and filesystem is None:
        raise DataError("an empty path was given: give a folder, a file or a URL; `.` is the current folder.")
    if filesystem is None and not is_url(text):
        if not isinstance(where, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]", text) and not Path(text).exists():
            raise DataError(f"{redacted(text.replace(':/', '://', 1))}: a pathlib.Path can't hold a URL: give text.")
        return Path(text)
    from pyarrow.fs import LocalFileSystem

    if filesystem is None:
        system, path = system_of(text, DataError, known)
        url = redacted(text)
    else:
        system, path, url = _given(filesystem, text)
    return Path(path) if isinstance(system, LocalFileSystem) else RemotePath(system, path, url)


def absolute(where: Any) -> Any:
    """The same paths, or lists of them, so that they are found from another folder, too; what is none, as it is."""
    if isinstance(where, list | tuple):
        return [absolute(one) for one in where]
    if not isinstance(where, str | Path) or not os.fspath(where) or is_url(os.fspath(where)):
        return where
    return type(where)(os.path.abspath(where))


def _given(filesystem: Any, text: str) -> tuple[Any, str, str]:
    """A file system that was passed in, as one of pyarrow's; the path in it, and how to show that."""
    from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem

    shown = redacted(text)
    bare = path_in(text)
    if isinstance(filesystem, FileSystem):
        kind = filesystem.type_name
        return filesystem, bare, shown if is_url(text) else f"{kind.removeprefix('py::fsspec+')}://{bare.lstrip('/')}"
    if not callable(getattr(filesystem, "_strip_protocol", None)):
        raise DataError(
            f"{shown}: `filesystem` is a {type(filesystem).__name__}; give a pyarrow.fs.FileSystem, or one of "
            "fsspec's file systems."
        )
    system = PyFileSystem(FSSpecHandler(filesystem))
    if type(filesystem).__name__ == "LocalFileSystem":
        from pyarrow.fs import LocalFileSystem

        system = LocalFileSystem()
    protocol = filesystem.protocol if isinstance(filesystem.protocol, str) else filesystem.protocol[0]
    url = shown if is_url(text) else f"{protocol}://{bare.lstrip('/')}"
    return system, str(filesystem._strip_protocol(bare if not is_url(text) else f"{protocol}://{bare}")), url


def expanded(where: Any, filesystem: Any = None, known: Systems | None = None) -> list[AnyPath]:
    """The files and folders that a path, URL or glob stands for, in the order of their names.

    In a glob, ``*``, ``?`` and ``[...]`` stand for letters of one name, and ``**`` for folders at any depth. What is
    there under exactly this name is no glob.

    Raises:
        DataError: nothing fits a glob; and see `located`.
    """
    text = None if isinstance(where, RemotePath) else os.fspath(where)
    if text is None or not glob.has_magic(path_in(text)):
        return [located(where, filesystem, known)]
    if filesystem is None and not is_url(text):
        if os.path.lexists(text):
            return [Path(text)]
        found: Sequence[AnyPath] = [Path(path) for path in sorted(glob.glob(text, recursive=True))]
    else:
        place = located(text, filesystem, known)
        if isinstance(place, Path):
            return expanded(str(place))
        found = [place] if "*" not in text and place.exists() else _globbed(place)
    if not found:
        located(where, filesystem)  # may know better what is wrong
        raise DataError(f"{redacted(text)}: no file or folder fits this glob. Correct it, or give a folder.")
    return list(found)


def _globbed(place: RemotePath) -> list[AnyPath]:
    names: list[str] = []
    base = place
    while glob.has_magic(base.inner):
        names.insert(0, base.name)
        base = base.parent
    return [path for path in _fitting(base.listed() if "**" in names else base, names) if path.exists()]


def _fitting(base: RemotePath, names: Sequence[str]) -> Iterator[RemotePath]:
    """What is under ``base`` and whose names, level by level, fit ``names``."""
    if not names:
        yield base
        return
    first, *rest = names
    if first == "**":
        below = (p for p in base.rglob("*") if (p.is_dir() or not rest) and not _is_hidden(p, base))
        for path in (*([base] if rest else []), *below):
            yield from _fitting(path, rest)
    elif not glob.has_magic(first):
        yield from _fitting(base / first, rest)
    else:
        for path in base.iterdir():
            hidden = path.name.startswith(".") and not first.startswith(".")
            if fnmatchcase(path.name, first) and not hidden and (not rest or path.is_dir()):
                yield from _fitting(path, rest)


def _is_hidden(path: RemotePath, base: RemotePath) -> bool:
    return any(part.startswith(".") for part in path.relative_to(base).parts)


def shown(data: Any) -> str:
    """What a user gave, in words that may be shown and kept: three of many names at most, and no credentials."""
    if isinstance(data, str | os.PathLike):
        return redacted(os.fspath(data))
    if isinstance(data, list | tuple) and data:
        more = f" and {len(data) - 3} more" if len(data) > 3 else ""
        return ", ".join(map(shown, data[:3])) + more
    return str(data) if isinstance(data, RemotePath) else f"a {type(data).__name__}"
