# SPDX-License-Identifier: Apache-2.0
"""URLs of files: their parts, the file systems that they name, and how they are shown without credentials."""

import re
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from etude.errors import EtudeError

_QUERY: Final = re.compile(r"\?[\w.-]+=.*$", re.DOTALL)  # a `?` before anything else stands for a letter, in a glob
_USER: Final = re.compile(r"://[^/@]*:(?!\d+(?:/|$))[^@]*@|://[^/@]*@")
_CONTAINERS: Final = ("abfs", "abfss", "az", "adl")  # container@account: no secret
_NO_SECRET: Final = re.compile(r"(?:abfss?|az|adl)://([^/@:]+)(?::[^@]*)?@|(?!s3|gs|gcs)\w+://([^/@:]+)@")
_HARMLESS: Final = ("region", "scheme", "endpoint_override", "project_id")


def is_url(text: str) -> bool:
    """Whether it is a URL, such as ``s3://bucket/run``, and not a path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def redacted(text: str) -> str:
    """A path or URL as it may be shown and kept: without user, password and query."""
    if not is_url(text):
        return text
    text = _QUERY.sub("", text)
    found = _USER.search(text)
    if found is None or (text.startswith(_CONTAINERS) and ":" not in found[0][3:]):
        return text
    return f"{text[: found.start()]}://***@{text[found.end() :]}"


def without_credentials(text: str) -> str:
    """A path or URL as it may be kept and used again, with credentials from elsewhere: only what is no secret stays."""
    if not is_url(text):
        return text
    start, _, rest = redacted(text).partition("://")
    user = _NO_SECRET.match(text)
    rest = rest.removeprefix("***@")
    if user and "@" not in rest.partition("/")[0]:
        rest = f"{user[1] or user[2]}@{rest}"
    query = _QUERY.search(text)
    known = [part for part in query[0][1:].split("&") if part.partition("=")[0] in _HARMLESS] if query else []
    return f"{start}://{rest}{'?' * bool(known)}{'&'.join(known)}"


class _Parts(NamedTuple):
    root: str
    """With the query: what names the file system."""
    rest: str
    """The path in it, decoded, without the first slash."""


def _split(url: str) -> _Parts:
    query = _QUERY.search(url)
    bare = url[: query.start()] if query else url
    start, _, rest = bare.partition("://")
    authority, _, path = rest.partition("/")
    return _Parts(f"{start}://{authority}{query[0] if query else ''}", unquote(path))


def inside(url: str, name: str) -> str:
    """The URL of ``name`` in the folder at ``url``; a query stays at the end."""
    query = _QUERY.search(url)
    bare = url[: query.start()] if query else url
    return f"{bare.rstrip('/')}/{name}{query[0] if query else ''}"


def system_of(url: str, error: type[EtudeError], known: dict[str, tuple[Any, str]] | None = None) -> tuple[Any, str]:
    """The pyarrow file system that a URL names, and the path in it.

    URLs are those that pyarrow knows (``file``, ``s3``, ``gs``, ``abfs``, ``hdfs``), and those that fsspec does where
    that is installed (``memory``, ``sftp``, ``http``, ...).

    Args:
        url: The URL.
        error: What to raise.
        known: File systems that were made before by their roots, and this one from now on: many URLs share one.

    Raises:
        EtudeError: of the class ``error``: nothing here knows such URLs, or it can't be reached.
    """
    if url.lower().startswith("file:") or "::" in url:  # this machine's; and fsspec's chains, which it takes apart
        return _opened(url, url, error)
    root, rest = _split(url)
    known = {} if known is None else known
    if root not in known:
        known[root] = _opened(root, url, error)
    system, start = known[root]
    return system, f"{start.rstrip('/')}/{rest}".rstrip("/") if start else rest.rstrip("/")


def _opened(root: str, url: str, kind: type[EtudeError]) -> tuple[Any, str]:
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
    except (ImportError, ValueError, OSError, TypeError) as error:
        told = (without_secrets(first_line(e), url).rstrip(".") for e in (reason, error))
        raise kind(
            f"can't open {redacted(url)}: pyarrow says: {next(told)}; fsspec says: {next(told)}. Install "
            "fsspec and its driver for such URLs (as s3fs for s3://), correct the URL, or give a path."
        ) from None  # the first errors show the URL as it was given
    return PyFileSystem(FSSpecHandler(system)), path


def without_secrets(text: str, url: str) -> str:
    """A message about ``url`` without anything in it that `redacted` leaves out."""
    shown = redacted(url)
    text = text.replace(url, shown)
    query, user = _QUERY.search(url), _USER.search(_QUERY.sub("", url))
    hidden = [part.partition("=")[2] for part in query[0][1:].split("&")] if query else []
    hidden += user[0][3:-1].split(":") if user else []
    for part in sorted((part for part in hidden if len(part) > 2 and part not in shown), key=len, reverse=True):
        text = text.replace(part, "***").replace(unquote(part), "***")
    return text


def first_line(error: BaseException) -> str:
    """What an error says, at most 200 letters of its first line."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
