# SPDX-License-Identifier: Apache-2.0
"""Files, on this machine or behind a URL: paths, globs, atomic writes and locks.

Local files are plain `pathlib.Path`s; others are `RemotePath`s in any file system that pyarrow or fsspec supports.
Credentials in a URL are passed only to the file system; they are never in messages or in `str`.
"""

import contextlib
import errno
import glob
import io
import os
import posixpath
import re
import reprlib
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath, PurePosixPath
from types import TracebackType
from typing import IO, Any, BinaryIO, Final, NamedTuple, TypeAlias, cast
from urllib.parse import quote

from etude.errors import DataError
from etude.urls import first_line, is_url, path_in, redacted, split, without_secrets

if sys.platform != "win32":
    import fcntl


# -- atomic writes -------------------------------------------------------------------------------------------------


def temporary_name(name: str) -> str:
    """The hidden name under which a small file is written before it replaces ``name``."""
    return f".{name}.tmp"


def write_atomically(path: "AnyPath", data: bytes) -> None:
    """Write a small file and replace the one at ``path`` atomically. Only one process may write it at a time.

    A local file is first written beside ``path``, always under the same hidden name, so that files of killed writers do
    not pile up.

    Raises:
        OSError: it can't be written; ``path`` is then unchanged, and no temporary file is left.
    """
    if isinstance(path, RemotePath):
        path.write_bytes(data)
        return
    aside = path.with_name(temporary_name(path.name))
    with _removed_on_failure(aside):
        aside.write_bytes(data)
        publish(aside, path)


@contextlib.contextmanager
def _removed_on_failure(path: "AnyPath") -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # on a full disk, a partial file would waste space
        raise


def publish(aside: Path, path: Path) -> None:
    """Rename a finished file within its folder, so that the file and its new name survive a power failure."""
    sync(aside)
    os.replace(aside, path)
    sync(path.parent)


def publish_new(aside: Path, path: Path) -> None:
    """Like `publish`, but raise a FileExistsError if ``path`` exists."""
    sync(aside)
    try:
        os.link(aside, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(errno.EEXIST, "there is a file already", str(path)) from None
        os.replace(aside, path)
    else:
        aside.unlink()
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or a folder's names, to the disk."""
    if os.name == "nt" and path.is_dir():  # Windows can't open folders, and journals renames itself
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- locks on folders ----------------------------------------------------------------------------------------------


class InUseError(Exception):
    """Another process holds the lock; the message names it, if it is known."""


class Lock:
    """A locked file, until `release` or the end of the process.

    On Windows, and on file systems without locks, several processes can hold it at once, and `is_sure` is False.

    Args:
        path: The file. It is created if it does not exist, and holds the process id and the host of its owner.

    Raises:
        InUseError: another process holds it.
        OSError: the file can't be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        while True:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by release
            try:
                self.is_sure = _locked(self._file)
            except BlockingIOError:
                self._file.seek(0)
                owner = self._file.read(200).decode(errors="replace").strip()
                self._file.close()
                raise InUseError(f"process {owner}" if owner else "an unknown process") from None
            if self.is_there():
                break
            self._file.close()  # its owner has just removed the file
        self._owner = os.getpid()
        self._file.truncate(0)
        self._file.write(f"{self._owner} on {socket.gethostname()}".encode())

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.release()

    def is_there(self) -> bool:
        """Whether the file is still at its path: False if it or its folder was removed or moved."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def release(self, *, keep_file: bool = False) -> None:
        """Unlock the file and remove it. Does nothing the second time, or in a forked process."""
        if self._file.closed:
            return
        with contextlib.suppress(OSError):
            if not keep_file and self.is_sure and self._owner == os.getpid() and self.is_there():
                self.path.unlink()
        self._file.close()


def _locked(file: IO[bytes]) -> bool:
    """Lock an open file; False if locks do not work here. Raises BlockingIOError if another process has it."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError):
            raise
        return False
    return True


# -- drivers: their errors and files -----------------------------------------------------------------------------------


@contextlib.contextmanager
def as_os_error() -> Iterator[None]:
    """Turn every error of a file system's driver into an OSError."""
    try:
        yield
    except (OSError, DataError):
        raise
    except NotImplementedError as error:
        raise OSError("its file system can't do this: it may be read-only") from error
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {first_line(error)}") from error


class _ArrowFile(io.RawIOBase):
    """A pyarrow file as a Python file. Reading past its end returns nothing, which readers of broken files rely on."""

    def __init__(self, file: Any) -> None:
        self._file, self._size, self._at = file, int(file.size()), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._size - self._at)
        if wanted <= 0:
            return 0
        with as_os_error():
            self._file.seek(self._at)
            count = int(self._file.readinto(memoryview(buffer)[:wanted]))
        self._at += count
        return count

    def readall(self) -> bytes:
        return self.read(max(0, self._size - self._at)) or b""  # in one read: each may be a request

    def close(self) -> None:
        super().close()
        with as_os_error():
            self._file.close()


# -- remote paths --------------------------------------------------------------------------------------------------


_OBJECT_STORES: Final = {"s3", "s3a", "gcs", "gs", "abfs", "abfss", "az", "oss"}
_BUFFER: Final = 1 << 20
_RUNS_TEMPLATES: Final = re.compile(r"(?:^|::)\s*reference(?=:)", re.IGNORECASE)
"""URLs of an index of other files, whose templates fsspec evaluates."""


class Stat(NamedTuple):
    """The size of a file."""

    st_size: int
    """In bytes."""


class Listing:
    """All files under a folder at one moment, so that questions about them need no further requests."""

    def __init__(self, sizes: dict[str, int | None]) -> None:
        self.sizes = sizes
        """Sizes by path in the file system; None for a folder."""
        self.kept: dict[str, Any] = {}
        """Data that readers cache for a file, such as its footer, by path."""


class RemotePath:
    """A file or folder, which need not exist, in a pyarrow file system. Its methods are those of `pathlib.Path`.

    Etude does not use universal_pathlib's ``UPath``, because it shows credentials in its `str`, does not accept
    pyarrow's file systems, needs another driver for S3, and sends a request for each question about a file.

    `located` creates them. Two are equal if their URLs and their paths in the file system are equal.

    Attributes:
        system: The ``pyarrow.fs.FileSystem``.
        inner: The path in it.
        listing: The result of listing this path or a folder above it, if there is one; questions are answered from it.
    """

    def __init__(self, system: Any, inner: str, url: str, listing: Listing | None = None) -> None:
        self.system, self.inner, self.listing = system, inner.rstrip("/") or inner[:1], listing
        self._url = url.rstrip("/")

    # -- names and parts -----------------------------------------------------------------------------------------------

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
        """The last suffix, with its dot."""
        return PurePosixPath(self.inner).suffix

    @property
    def suffixes(self) -> list[str]:
        """All suffixes."""
        return PurePosixPath(self.inner).suffixes

    @property
    def parent(self) -> "RemotePath":
        """The folder that contains it."""
        return RemotePath(self.system, posixpath.dirname(self.inner), posixpath.dirname(self._url))

    def relative_to(self, folder: "AnyPath") -> PurePosixPath:
        """The path relative to ``folder``; ValueError if it is not under it."""
        return PurePosixPath(self.inner).relative_to(cast(RemotePath, folder).inner)

    @property
    def is_in_object_store(self) -> bool:
        """Whether a file appears only when it is complete, so that writing it is atomic."""
        names = re.findall(r"\w+", self.system.type_name)  # fsspec's file systems may have several
        return not _OBJECT_STORES.isdisjoint(names)

    @property
    def _fsspec(self) -> Any:
        """The fsspec file system that pyarrow's wraps, if there is one."""
        return getattr(getattr(self.system, "handler", None), "fs", None)

    # -- listing and sizes ---------------------------------------------------------------------------------------------

    def listed(self) -> "RemotePath":
        """This path with a new listing of everything under it, made with one request per page.

        Raises:
            DataError: the server refuses or can't be reached.
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
        """The sizes for `Listing.sizes`."""
        from pyarrow.fs import FileType

        slash = "/" if self.inner.startswith("/") else ""  # some file systems leave it out in results
        there = [info for info in infos if info.type in (FileType.File, FileType.Directory)]
        return {slash + i.path.strip("/"): int(i.size or 0) if i.type == FileType.File else None for i in there}

    def _kind(self) -> tuple[bool, int | None]:
        """Whether the path exists, and its size if it is a file."""
        if self.listing is not None:
            return self.inner in self.listing.sizes, self.listing.sizes.get(self.inner)
        with self._asking():
            sizes = self._sizes([self.system.get_file_info(self.inner)])
        return bool(sizes), next(iter(sizes.values()), None)

    def exists(self) -> bool:
        """Whether there is a file or a folder."""
        return self._kind()[0]

    def is_file(self) -> bool:
        """Whether it is a file."""
        return self._kind()[1] is not None

    def is_dir(self) -> bool:
        """Whether it is a folder; in an object store, whether there is something under it."""
        return self._kind() == (True, None)

    def stat(self) -> Stat:
        """Its size; FileNotFoundError if it is not a file."""
        size = self._kind()[1]
        if size is None:
            raise FileNotFoundError(f"{self}: there is no such file")
        return Stat(size)

    def iterdir(self) -> Iterator["RemotePath"]:
        """The files and folders in this folder, sorted by name."""
        if self.listing is not None:
            depth = len(PurePosixPath(self.inner).parts) + 1
            yield from self._under(path for path in self.listing.sizes if len(PurePosixPath(path).parts) == depth)
            return
        with self._asking():
            here = Listing(self._sizes(self._selected(recursive=False)))
        for child in self._under(iter(here.sizes)):
            if here.sizes[child.inner] is not None:  # the contents of folders are not in this listing
                child.listing = here
            yield child

    def _under(self, paths: Iterator[str]) -> Iterator["RemotePath"]:
        start = posixpath.join(self.inner, "")
        return (self / path[len(start) :] for path in sorted(paths) if path.startswith(start))

    def rglob(self, pattern: str) -> Iterator["RemotePath"]:
        """Files and folders at any depth whose names match ``pattern``."""
        root = self if self.listing is not None else self.listed()
        assert root.listing is not None
        return root._under(path for path in root.listing.sizes if fnmatchcase(posixpath.basename(path), pattern))

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        """Files and folders in this folder whose names match ``pattern``."""
        return (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    # -- reading -------------------------------------------------------------------------------------------------------

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open the file for reading, with random access; OSError if that is not possible."""
        assert mode == "rb"
        with as_os_error():
            return cast(BinaryIO, io.BufferedReader(_ArrowFile(self.system.open_input_file(self.inner)), _BUFFER))

    def read_bytes(self) -> bytes:
        """Read the file as bytes."""
        with as_os_error(), self.system.open_input_stream(self.inner, compression=None) as file:
            return cast(bytes, file.read())

    def read_text(self, encoding: str = "utf-8") -> str:
        """Read the file as text."""
        return self.read_bytes().decode(encoding)

    # -- writing -------------------------------------------------------------------------------------------------------

    def mkdir(self, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Make the folder and its parents if they do not exist."""
        assert parents
        assert exist_ok
        with as_os_error():
            self.system.create_dir(self.inner, recursive=True)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the file."""
        with contextlib.suppress(*[FileNotFoundError] * missing_ok), as_os_error():
            if self._fsspec is None:
                self.system.delete_file(self.inner)
            elif not self._fsspec.exists(self.inner):
                raise FileNotFoundError(str(self))
            else:  # pyarrow calls ``rm``, for which `run[1]` is a glob that also matches `run1`
                self._fsspec.rm_file(self.inner)

    def rmdir(self) -> None:
        """Remove the folder, which must be empty."""
        with as_os_error():
            (self.system.delete_dir if self._fsspec is None else self._fsspec.rmdir)(self.inner)

    def rename(self, target: "RemotePath") -> None:
        """Rename the file, replacing the one at ``target``; OSError if the file system can't do that."""
        from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

        with as_os_error():
            system = self._fsspec
            if system is None:
                self.system.move(self.inner, target.inner)
            elif type(system).mv is AbstractFileSystem.mv:  # fsspec's default treats paths as globs
                system.cp_file(self.inner, target.inner)
                system.rm_file(self.inner)
            else:  # pyarrow passes an argument that fsspec's sftp does not accept
                system.mv(self.inner, target.inner)
                if system.exists(self.inner):  # webhdfs raises no error if it does not replace a file
                    raise OSError(f"{self} can't be renamed to {target}")

    def put(self, parts: Iterable[Any]) -> None:
        """Write these buffers to the file. Except in an object store, it is incomplete meanwhile."""
        with as_os_error(), self.system.open_output_stream(self.inner, compression=None) as file:
            for part in parts:
                file.write(part)

    def write_bytes(self, data: Any) -> None:
        """Write the file, replacing an existing one atomically; ``data`` is any buffer.

        Except in an object store, it is first written under a hidden name in the same folder.

        Raises:
            OSError: it can't be written; the old file is still there.
        """
        if self.is_in_object_store:
            self.put([data])
            return
        spare = self.parent / temporary_name(self.name)
        with _removed_on_failure(spare):
            spare.put([data])
            spare.rename(self)

    # -- errors --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise DataError(
                f"{self}: can't be accessed ({first_line(error)}). Is the name right, and do the credentials found "
                "here (environment, configuration files, the machine's role) allow it? Give others with `filesystem=`."
            ) from error


AnyPath: TypeAlias = Path | RemotePath
"""A local or remote file or folder."""


# -- paths, URLs and globs -----------------------------------------------------------------------------------------


Systems = dict[str, tuple[Any, str]]
"""Open file systems, with the path of their root, by the part of a URL that names them."""


def located(where: Any, filesystem: Any = None, known: Systems | None = None) -> AnyPath:
    """The file or folder at a path or URL; it need not exist.

    Args:
        where: A path, a URL, or a result of this function.
        filesystem: The pyarrow or fsspec file system that contains ``where``; None means the one that the URL names, or
            this machine. If given, ``s3://bucket/run`` and ``bucket/run`` are the same.
        known: See `system_of`.

    Raises:
        DataError: the path is empty or holds a NUL character, neither pyarrow nor fsspec knows such URLs, or
            ``filesystem`` is of another type.
    """
    if isinstance(where, RemotePath):
        return where
    try:
        text = os.fspath(where)
    except TypeError:
        raise DataError(f"a file or folder is named by its path or URL, not by {reprlib.repr(where)}.") from None
    if not text and filesystem is None:
        raise DataError("an empty path was given: give a folder, a file or a URL; `.` is the current folder.")
    if "\0" in text:
        raise DataError(f"{text!r} holds a NUL character, which no path can: give another name.")
    if filesystem is None and not is_url(text):
        if not isinstance(where, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]", text) and not Path(text).exists():
            raise DataError(f"{redacted(text.replace(':/', '://', 1))}: a pathlib.Path can't hold a URL: give text.")
        return Path(text)
    from pyarrow.fs import LocalFileSystem

    if filesystem is None:
        system, path = system_of(text, known)
        url = redacted(text)
    else:
        system, path, url = _given(filesystem, text)
    return Path(path) if isinstance(system, LocalFileSystem) else RemotePath(system, path, url)


def absolute_path(path: AnyPath) -> AnyPath:
    """Make a local path absolute, so that it stays valid if an env changes the current folder."""
    return path.absolute() if isinstance(path, Path) else path


def system_of(url: str, known: Systems | None = None) -> tuple[Any, str]:
    """The pyarrow file system that a URL names, and the path in it.

    pyarrow opens ``file``, ``s3``, ``gs``, ``abfs`` and ``hdfs``; fsspec opens others, such as ``sftp``.

    Args:
        url: The URL.
        known: Open file systems; the one opened for this URL is added, so that many URLs share it.

    Raises:
        DataError: neither of them supports such URLs, the server can't be reached, or it is a ``reference`` URL.
    """
    if _RUNS_TEMPLATES.search(url):
        raise DataError(
            f"{redacted(url)}: `reference` URLs are not opened, as they may run code: give the files' own URLs, or a "
            "file system as `filesystem=`."
        )
    if url.lower().startswith(("file:", "local:")):  # local; may contain spaces and accents
        url = f"file:{url.partition(':')[2]}"
        return _opened(quote(url, safe="%/:?#[]@!$&'()*+,;=~*{}|"), url)
    if "::" in url:  # a chain of URLs, which fsspec splits
        return _opened(url, url)
    root, rest = split(url)
    known = {} if known is None else known
    if root not in known:
        known[root] = _opened(root, url)
    system, start = known[root]
    return system, f"{start.rstrip('/')}/{rest}".rstrip("/") if start else rest.rstrip("/")


def _opened(root: str, url: str) -> tuple[Any, str]:
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem

    try:
        system, path = FileSystem.from_uri(root)
        return system, path
    except (ArrowException, OSError) as error:
        reason = error
    try:
        import fsspec.core  # type: ignore[import-untyped]

        system, path = fsspec.core.url_to_fs(root)
    except Exception as error:  # noqa: BLE001  drivers raise anything, such as zipfile.BadZipFile
        told = (without_secrets(first_line(e, None), url)[:200].rstrip(".") for e in (reason, error))
        raise DataError(
            f"can't open {redacted(url)}: pyarrow says: {next(told)}; fsspec says: {next(told)}. Install "
            "fsspec's driver for such URLs (as s3fs for s3://), correct the URL, or give a path."
        ) from None  # the first errors show the URL as it was given
    return PyFileSystem(FSSpecHandler(system)), path


def absolute(where: Any) -> Any:
    """Make local paths, or lists of them, absolute. URLs and everything else stay as they are."""
    if isinstance(where, list | tuple):
        return [absolute(one) for one in where]
    if not isinstance(where, str | Path) or not os.fspath(where) or is_url(os.fspath(where)):
        return where
    return type(where)(os.path.abspath(where))


def _given(filesystem: Any, text: str) -> tuple[Any, str, str]:
    """A user's file system as one of pyarrow's, the path in it, and the URL to show."""
    from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem

    bare = path_in(text)
    if isinstance(filesystem, FileSystem):
        system, inner, protocol = filesystem, bare, filesystem.type_name.removeprefix("py::fsspec+")
    elif callable(getattr(filesystem, "_strip_protocol", None)):
        protocol = filesystem.protocol if isinstance(filesystem.protocol, str) else filesystem.protocol[0]
        is_local = type(filesystem).__name__ == "LocalFileSystem"
        system = LocalFileSystem() if is_local else PyFileSystem(FSSpecHandler(filesystem))
        inner = str(filesystem._strip_protocol(f"{protocol}://{bare}" if is_url(text) else bare))
    else:
        raise DataError(f"{redacted(text)}: `filesystem` is a {type(filesystem).__name__}: give pyarrow's or fsspec's.")
    return system, inner, redacted(text) if is_url(text) else f"{protocol}://{bare.lstrip('/')}"


class LocalPath(type(Path())):  # type: ignore[misc]
    """A path on this machine that becomes absolute when pickled, as other processes may run in another folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalPath, (os.path.abspath(self),)


def expanded(where: Any, filesystem: Any = None, known: Systems | None = None) -> list[AnyPath]:
    """The files and folders that a path, URL or glob names, sorted by name.

    In a glob, ``*``, ``?`` and ``[...]`` match characters of one name, and ``**`` matches folders at any depth. If a
    file has exactly this name, it is that file.

    Raises:
        DataError: nothing matches the glob; and see `located`.
    """
    text = None if isinstance(where, RemotePath) else os.fspath(where)
    if text is None or not glob.has_magic(path_in(text)):
        place = located(where, filesystem, known)
        return [LocalPath(place) if isinstance(place, Path) else place]
    if filesystem is None and not is_url(text):
        if os.path.lexists(text):
            return [LocalPath(text)]
        found: Sequence[AnyPath] = in_order(map(LocalPath, glob.glob(text, recursive=True)))
    else:
        place = located(text, filesystem, known)
        if isinstance(place, Path):
            return expanded(str(place))
        found = [place] if "*" not in text and place.exists() else _globbed(place)
    if not found:
        located(where, filesystem)  # may raise a more specific error
        raise DataError(f"{redacted(text)}: no file or folder matches this glob. Correct it, or give a folder.")
    return list(found)


def glob_base(where: Any, filesystem: Any = None, known: Systems | None = None) -> AnyPath | None:
    """The folder above the first name with a wildcard; None if ``where`` is not a glob."""
    text = None if isinstance(where, RemotePath) else os.fspath(where)
    if text is None or not glob.has_magic(path_in(text)):
        return None
    place = located(where, filesystem, known)
    if os.path.lexists(place) if isinstance(place, Path) else "*" not in text and place.exists():
        return None
    while glob.has_magic(place.inner if isinstance(place, RemotePath) else str(place)):
        place = place.parent
    return place


def _globbed(place: RemotePath) -> list[AnyPath]:
    names: list[str] = []
    base = place
    while glob.has_magic(base.inner):
        names.insert(0, base.name)
        base = base.parent
    return in_order(path for path in _fitting(base.listed() if "**" in names else base, names) if path.exists())


def _fitting(base: RemotePath, names: Sequence[str]) -> Iterator[RemotePath]:
    """The paths under ``base`` whose names match ``names``, level by level."""
    if not names:
        yield base
        return
    first, *rest = names
    if first == "**":
        below = (
            path
            for path in base.rglob("*")
            if (path.is_dir() or not rest) and not any(part[0] == "." for part in path.relative_to(base).parts)
        )
        for path in (*([base] if rest else []), *below):
            yield from _fitting(path, rest)
    elif not glob.has_magic(first):
        yield from _fitting(base / first, rest)
    else:
        for path in base.iterdir():
            hidden = path.name.startswith(".") and not first.startswith(".")
            if fnmatchcase(path.name, first) and not hidden and (not rest or path.is_dir()):
                yield from _fitting(path, rest)


def shown(data: Any) -> str:
    """A path, or a list of paths, as text for messages: at most three names, without credentials."""
    if isinstance(data, str | os.PathLike):
        return redacted(os.fspath(data))
    if isinstance(data, list | tuple) and data:
        more = f" and {len(data) - 3} more" if len(data) > 3 else ""
        return ", ".join(map(shown, data[:3])) + more
    name = type(data).__name__
    return str(data) if isinstance(data, RemotePath) else f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


# -- functions for local and remote paths --------------------------------------------------------------------------


def relative(path: AnyPath, folder: AnyPath) -> PurePath:
    """The path relative to ``folder``; ValueError if it is not under it."""
    return cast(PurePath, cast(Any, path).relative_to(folder))


def visible_files(folder: AnyPath, pattern: str = "*") -> list[AnyPath]:
    """The files below ``folder`` whose names match ``pattern``, `in_order`.

    A file is left out if its name, or that of a folder between, begins with ``.`` or ``_``.
    """
    found: list[Any] = [path for path in folder.rglob(pattern) if path.is_file()]
    return in_order(path for path in found if not any(part[0] in "._" for part in relative(path, folder).parts))


def in_order(paths: Iterable[AnyPath]) -> list[AnyPath]:
    """Sort paths folder by folder, with the numbers in names by size: ``log-2`` comes before ``log-10``."""

    def key(path: AnyPath) -> tuple[Any, ...]:
        parts = (re.split(r"(\d+)", part) for part in re.split(r"[/\\]", str(path)))
        return tuple([int(word) if k % 2 else word for k, word in enumerate(words)] for words in parts), str(path)

    return sorted(paths, key=key)


def arrow_path(path: AnyPath) -> tuple[Any, Any]:
    """A path and its file system (None for this machine) for pyarrow's functions.

    Local paths are made absolute, because pyarrow would take a relative one such as ``s3:/x`` for a URL.
    """
    return (path.inner, path.system) if isinstance(path, RemotePath) else (path.absolute(), None)


def input_stream(path: AnyPath) -> Any:
    """A pyarrow stream of a file's bytes, decompressed if its name has the suffix of a compressed file."""
    import pyarrow as pa

    return path.system.open_input_stream(path.inner) if isinstance(path, RemotePath) else pa.input_stream(str(path))


def input_file(path: AnyPath, *, mapped: bool = False) -> Any:
    """A pyarrow file with random access; a local one is mapped into memory if ``mapped``."""
    import pyarrow as pa

    if isinstance(path, RemotePath):
        return path.system.open_input_file(path.inner)
    return (pa.memory_map if mapped else pa.OSFile)(os.fspath(path))


def put(path: AnyPath, parts: Iterable[Any]) -> None:
    """Write a new file from buffers, flushed to the disk if it is local; on failure, nothing is left of it."""
    if isinstance(path, RemotePath):
        with _removed_on_failure(path):
            path.put(parts)
        return
    with open(path, "xb") as file, _removed_on_failure(path):  # "x": an existing file is not replaced
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
        sync(path.parent)  # the file's name must be on the disk before anything points to it


def names_in(folder: AnyPath) -> list[str]:
    """The sorted names of the files and folders in a folder; empty if it does not exist."""
    is_there = isinstance(folder, RemotePath) or folder.is_dir()
    return sorted(path.name for path in folder.iterdir()) if is_there else []


def temporary_path(path: AnyPath) -> Path:
    """A new local path at which to write a large file before `publish_at` moves it to ``path``.

    It is beside ``path`` if that is local. No two writers get the same path.
    """
    if isinstance(path, Path):
        return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    handle, name = tempfile.mkstemp(prefix="etude-", suffix=f"-{path.name}")
    os.close(handle)
    return Path(name)


def publish_at(aside: Path, path: AnyPath) -> None:
    """Put the finished file ``aside`` (see `temporary_path`) at ``path`` atomically.

    Raises:
        FileExistsError: ``path`` is local and exists; ``aside`` is still there.
        OSError: it can't be written.
    """
    if isinstance(path, Path):
        publish_new(aside, path)
        return
    import pyarrow as pa

    try:
        with pa.memory_map(str(aside)) as file:
            path.write_bytes(file.read_buffer())
    finally:
        aside.unlink()
