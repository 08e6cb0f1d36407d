# SPDX-License-Identifier: Apache-2.0
"""Where files lie: on this machine, or in any file system that pyarrow or fsspec know.

Files of this machine are plain `pathlib.Path`; others are a `RemotePath`, which has those of a Path's methods that
readers and writers use. Credentials inside a URL reach the file system and nothing else: no message, no `str`.
"""

import contextlib
import io
import posixpath
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, NamedTuple, TypeAlias, cast

from etude.drivers import Bytes, as_os_error
from etude.errors import DataError
from etude.urls import first_line

_OBJECT_STORES: Final = ("s3", "s3a", "gcs", "gs", "abfs", "abfss", "az", "oss")
_BUFFER: Final = 1 << 20


def is_object_store(system: Any) -> bool:
    """Whether a pyarrow file system shows a file once it is whole, and replaces it at a stroke when it is written."""
    return not set(re.findall(r"\w+", system.type_name)).isdisjoint(_OBJECT_STORES)  # fsspec's may have several names


def move(system: Any, source: str, target: str) -> None:
    """Rename a file of a pyarrow file system, in place of the one that may be at ``target``.

    Raises:
        OSError: that is not possible there.
    """
    with as_os_error():
        inner = _of_fsspec(system)
        if inner is None:
            system.move(source, target)
        elif _copies_to_move(type(inner)):
            inner.cp_file(source, target)
            inner.rm_file(source)
        else:  # pyarrow passes an argument on that fsspec's sftp does not take
            inner.mv(source, target)
            if inner.exists(source):  # webhdfs says nothing where it does not replace a file
                raise OSError(f"{source} can't be renamed to {target}")


def remove(system: Any, path: str, *, is_folder: bool = False) -> None:
    """Remove a file, or an empty folder, of a pyarrow file system.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: that is not possible there.
    """
    with as_os_error():
        inner = _of_fsspec(system)
        if inner is None:
            (system.delete_dir if is_folder else system.delete_file)(path)
        elif is_folder:
            inner.rmdir(path)
        elif not inner.exists(path):
            raise FileNotFoundError(path)
        else:  # ``rm``, which pyarrow calls, takes `run[1]` for a glob, and removes what is in `run1`
            inner.rm_file(path)


def _of_fsspec(system: Any) -> Any:
    return getattr(getattr(system, "handler", None), "fs", None)


def _copies_to_move(kind: type) -> bool:
    """Whether ``mv`` is fsspec's own, which takes paths for globs."""
    from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

    return kind.mv is AbstractFileSystem.mv  # type: ignore[attr-defined]


class Stat(NamedTuple):
    """What is known of a file."""

    st_size: int
    """Its bytes."""


class Listing:
    """All that is under a folder at one moment: who looks around in it asks the server nothing more."""

    def __init__(self, sizes: dict[str, int | None]) -> None:
        self.sizes = sizes
        """By path inside of the file system; None for a folder."""
        self.kept: dict[str, Any] = {}
        """What a reader wants to keep of a file that it may be asked for again, by path."""


class RemotePath:
    """A file or folder of a pyarrow file system, there or not; like a `pathlib.Path` where that has the same name.

    Made by `etude.places.located`. Two are equal where their URLs and their paths in the file system are.

    Attributes:
        system: The ``pyarrow.fs.FileSystem``.
        inner: The path in it.
        listing: What was listed at or above this path, if anything was; then it alone is asked what is there.
    """

    def __init__(self, system: Any, inner: str, url: str, listing: Listing | None = None) -> None:
        self.system, self.inner, self.listing = system, inner.rstrip("/") or inner[:1], listing
        self._url = url.rstrip("/")

    # -- its name ---------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """The URL, without credentials."""
        return self._url

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and (self._url, self.inner) == (other._url, other.inner)

    def __hash__(self) -> int:
        return hash((self._url, self.inner))

    def __lt__(self, other: "RemotePath") -> bool:
        return self._url.split("/") < other._url.split("/")  # as paths are ordered: part by part

    def __truediv__(self, name: object) -> "RemotePath":
        more = str(name).strip("/")
        return RemotePath(self.system, posixpath.join(self.inner, more), f"{self._url}/{more}", self.listing)

    @property
    def name(self) -> str:
        """The last part."""
        return posixpath.basename(self.inner)

    @property
    def stem(self) -> str:
        """The last part without its suffix."""
        return PurePosixPath(self.inner).stem

    @property
    def suffix(self) -> str:
        """From the last dot on."""
        return PurePosixPath(self.inner).suffix

    @property
    def suffixes(self) -> list[str]:
        """All of them."""
        return PurePosixPath(self.inner).suffixes

    @property
    def parent(self) -> "RemotePath":
        """The folder that it is in."""
        return RemotePath(self.system, posixpath.dirname(self.inner), posixpath.dirname(self._url))

    def relative_to(self, folder: "AnyPath") -> PurePosixPath:
        """The path from ``folder`` on; ValueError where it is not under it."""
        return PurePosixPath(self.inner).relative_to(cast(RemotePath, folder).inner)

    def as_posix(self) -> str:
        """The same as `str`."""
        return self._url

    # -- what is there ----------------------------------------------------------------------------------------

    def listed(self) -> "RemotePath":
        """This path, with all that is under it listed now, once.

        Raises:
            DataError: the server refuses, or can't be reached.
        """
        with self._asking():
            info = self.system.get_file_info(self.inner)
            sizes = self._sizes([info])
            if None in sizes.values():
                sizes |= self._sizes(self._selected(recursive=True))
        return RemotePath(self.system, self.inner, self._url, Listing(sizes))

    def _selected(self, *, recursive: bool) -> list[Any]:
        from pyarrow.fs import FileSelector

        return list(self.system.get_file_info(FileSelector(self.inner, recursive=recursive, allow_not_found=True)))

    def _sizes(self, infos: list[Any]) -> dict[str, int | None]:
        from pyarrow.fs import FileType

        kinds = {FileType.File: False, FileType.Directory: True}
        own = [(self._inner_of(info.path), info) for info in infos if info.type in kinds]
        return {path: None if kinds[info.type] else int(info.size or 0) for path, info in own}

    def _inner_of(self, path: str) -> str:
        """A path as the file system tells it, written as this one is: some leave out the first slash."""
        slash = "/" if self.inner.startswith("/") else ""
        return slash + path.strip("/")

    def _kind(self) -> tuple[bool, int | None]:
        """Whether there is something, and its size where that is a file."""
        if self.listing is not None:
            return self.inner in self.listing.sizes, self.listing.sizes.get(self.inner)
        with self._asking():
            sizes = self._sizes([self.system.get_file_info(self.inner)])
        return bool(sizes), next(iter(sizes.values()), None)

    def exists(self) -> bool:
        """Whether there is something."""
        return self._kind()[0]

    def is_file(self) -> bool:
        """Whether it is a file."""
        return self._kind()[1] is not None

    def is_dir(self) -> bool:
        """Whether it is a folder; in an object store, whether there is something under it."""
        return self._kind() == (True, None)

    def stat(self) -> Stat:
        """Its size; FileNotFoundError where it is no file."""
        size = self._kind()[1]
        if size is None:
            raise FileNotFoundError(f"{self}: there is no such file")
        return Stat(size)

    def iterdir(self) -> Iterator["RemotePath"]:
        """What is in the folder, in the order of names."""
        if self.listing is not None:
            depth = len(PurePosixPath(self.inner).parts) + 1
            yield from self._under(path for path in self.listing.sizes if len(PurePosixPath(path).parts) == depth)
            return
        with self._asking():
            here = Listing(self._sizes(self._selected(recursive=False)))
        for child in self._under(iter(here.sizes)):
            if here.sizes[child.inner] is not None:  # of what is in folders, nothing was asked
                child.listing = here
            yield child

    def _under(self, paths: Iterator[str]) -> Iterator["RemotePath"]:
        start = posixpath.join(self.inner, "")
        return (self / path[len(start) :] for path in sorted(paths) if path.startswith(start))

    def rglob(self, pattern: str) -> Iterator["RemotePath"]:
        """Files and folders at any depth whose names fit ``pattern``."""
        root = self if self.listing is not None else self.listed()
        assert root.listing is not None
        return root._under(path for path in root.listing.sizes if fnmatchcase(posixpath.basename(path), pattern))

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        """Files and folders in this one whose names fit ``pattern``."""
        return (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    # -- reading ----------------------------------------------------------------------------------------------

    def open(self, mode: str = "rb") -> BinaryIO:
        """The file, to be read from anywhere in it; OSError where that is not possible."""
        assert mode == "rb"
        with as_os_error():
            return cast(BinaryIO, io.BufferedReader(Bytes(self.system.open_input_file(self.inner)), _BUFFER))

    def read_bytes(self) -> bytes:
        """All of the file."""
        with as_os_error(), self.system.open_input_stream(self.inner, compression=None) as file:
            return cast(bytes, file.read())

    def read_text(self, encoding: str = "utf-8") -> str:
        """All of the file."""
        return self.read_bytes().decode(encoding)

    # -- writing ----------------------------------------------------------------------------------------------

    def mkdir(self, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make the folder and those above it, where they are not there."""
        assert parents
        assert exist_ok
        with as_os_error():
            self.system.create_dir(self.inner, recursive=True)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the file."""
        with contextlib.suppress(*[FileNotFoundError] * missing_ok), as_os_error():
            remove(self.system, self.inner)

    def write_bytes(self, data: Any) -> None:
        """Put a file here, in place of the one that is there, at one stroke; ``data`` is any buffer.

        An object store shows an object once it is whole. Elsewhere, it is written beside this path under a hidden name
        first.

        Raises:
            OSError: it can't be written; what was there before is there still.
        """
        whole = is_object_store(self.system)
        target = self.inner if whole else posixpath.join(posixpath.dirname(self.inner), f".{self.name}.tmp")
        with as_os_error():
            try:
                with self.system.open_output_stream(target, compression=None) as file:
                    file.write(data)
                if not whole:
                    move(self.system, target, self.inner)
            except BaseException:
                if not whole:
                    with contextlib.suppress(Exception):
                        remove(self.system, target)
                raise

    # -- errors -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise DataError(
                f"{self}: can't be looked at ({first_line(error)}). Is the name right, and do the credentials found "
                "here (environment, configuration files, the machine's role) allow it? Give others with `filesystem=`."
            ) from error


AnyPath: TypeAlias = Path | RemotePath
"""A file or folder, wherever it lies."""
