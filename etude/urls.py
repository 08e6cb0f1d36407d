# SPDX-License-Identifier: Apache-2.0
"""URLs of files: splitting them, and showing and storing them without credentials. Also local HTTP servers."""

import errno
import os
import re
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from etude.errors import SettingsError

_URL: Final = re.compile(r"\s*(?:[A-Za-z][\w+.-]*::?)*[A-Za-z][\w+.-]*://")  # fsspec chains: simplecache::s3://...
_MISTYPED: Final = re.compile(r"\A(\s*(?!file:)[A-Za-z][\w+.-]+:)(?:/|///+)(?=[^/].*@)", re.DOTALL | re.IGNORECASE)
_NEXT_LINK: Final = re.compile(r"::(?=[A-Za-z][\w+.-]*(?:://|::))")
_QUERY: Final = re.compile(r"\?[\w.-]+=.*$", re.DOTALL)  # any other `?` matches one character of a glob
_SECRET: Final = re.compile(r"[;#]|\?(?![./?*\[\]]|$)|\?(?=.*@)", re.DOTALL)
"""The start of params, of a fragment, or of a possible query: a ``?`` before a dot or slash is probably a glob."""
_HTTP_SECRET: Final = re.compile(r"[;#?]")  # in these URLs, ``?`` is never a glob
_CONTAINERS: Final = ("abfs", "abfss", "az", "adl")  # container@account: no secret
_LOGINS: Final = ("sftp", "ssh", "hdfs", "webhdfs", "smb")  # user@host: a login name, no token
_WITH_PORTS: Final = ("http", "https", "hdfs", "webhdfs")  # host:80/path@version: seldom with a user
_HARMLESS: Final = re.compile(r"(?:region|scheme|endpoint_override|project_id)=[\w.:/-]*")


class _Link(NamedTuple):
    """A URL, or one link of a chain of URLs."""

    start: str
    """Up to ``://``."""
    user: str | None
    """The user and the password, as written."""
    place: str
    """The host and the path, up to anything that may be a secret."""
    rest: str
    """Params, query and fragment."""
    is_clear: bool
    """False if the hidden part may belong to the path: then the URL without it may name another file."""


def _links(text: str) -> list[_Link]:
    return [_link(part) for part in _NEXT_LINK.split(text)]


def _link(text: str) -> _Link:
    start, separator, rest = text.partition("://")
    if not separator:  # such as `simplecache`
        return _Link("", None, text, "", True)
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    after = rest[len(authority) :]
    path = re.split("[?#;]", after, maxsplit=1)[0]
    user, at, _ = authority.rpartition("@")
    has_password = ":" in user if at else _has_password(start.lower(), authority)
    if has_password and "@" in after[len(path) :]:  # it may belong to the password or to the path: ambiguous
        return _Link(f"{start}://", None, "***", rest, False)
    in_path = has_password and "@" in path  # a password with a slash, or a path with an @
    end = len(authority) + path.rfind("@") if in_path else authority.rfind("@")
    is_clear = not (in_path and at)
    place = rest[end + 1 :]
    found = (_HTTP_SECRET if start.strip().lower() in ("http", "https") else _SECRET).search(place)
    hidden = place[found.start() :] if found else ""
    is_clear = is_clear and (not hidden or (_QUERY.fullmatch(hidden) is not None and "#" not in hidden))
    return _Link(f"{start}://", None if end < 0 else rest[:end], place[: len(place) - len(hidden)], hidden, is_clear)


def _has_password(scheme: str, authority: str) -> bool:
    """Whether the text before the first slash is a user and the start of a password, and not a host and port."""
    host, colon, port = authority.rpartition(":")
    if not colon or authority.endswith("]"):
        return False
    return not (port.isdigit() and ":" not in host.strip("[]") and scheme in _WITH_PORTS)


def is_url(text: str) -> bool:
    """Whether ``text`` is a URL, such as ``s3://bucket/run``, rather than a path."""
    return _URL.match(text) is not None


def redacted(text: str) -> str:
    """A path or URL that is safe to show: without user, password, params, query and fragment."""
    text = _MISTYPED.sub(r"\1//", text)  # also with one slash or three, a password may follow
    if not is_url(text):
        return text
    shown = []
    for start, user, place, _, _ in _links(text):
        is_container = start.removesuffix("://") in _CONTAINERS and ":" not in (user or "")
        shown.append(f"{start}{'' if user is None else f'{user}@' if is_container else '***@'}{place}")
    return "::".join(shown)


def without_credentials(text: str) -> str:
    """A path or URL that is safe to store, to be used later with credentials from elsewhere."""
    if not is_url(text):
        return text
    kept = []
    for start, user, place, rest, _ in _links(text):
        scheme, (name, colon, _) = start.removesuffix("://"), (user or "").partition(":")
        stays = name and (scheme in _CONTAINERS or (scheme in _LOGINS and not colon))
        known = [part for part in rest[1:].split("&") if _HARMLESS.fullmatch(part)] if rest[:1] == "?" else []
        kept.append(f"{start}{f'{name}@' if stays else ''}{place}{'?' * bool(known)}{'&'.join(known)}")
    return "::".join(kept)


def can_be_kept(text: str) -> bool:
    """Whether `without_credentials` certainly names the same file.

    This is not certain if a URL has a fragment, params, a query without values, or more than one ``@``: these may be
    secrets, or belong to the path. In a path, write these characters as ``%23``, ``%3B``, ``%3F`` and ``%40``.
    """
    return not is_url(text) or all(link.is_clear for link in _links(text))


def path_in(text: str) -> str:
    """The path that a URL names in a given file system: ``bucket/run`` for ``s3://user@bucket/run?region=x``.

    A text that is not a URL is returned as it is.
    """
    if not is_url(text):
        return text
    link = _links(text)[-1]
    return link.place + _without_query(link.rest)[0]


def split(url: str) -> tuple[str, str]:
    """The part of a URL that names the file system, with the query, and the decoded path without its first slash."""
    bare, query = _without_query(url)
    start, _, rest = bare.partition("://")
    authority, _, path = rest.partition("/")
    return f"{start}://{authority}{query}", unquote(path)


def _without_query(url: str) -> tuple[str, str]:
    found = _QUERY.search(url)
    return (url[: found.start()], found[0]) if found else (url, "")


def inside(where: str | os.PathLike[str], name: str) -> str:
    """The path or URL of ``name`` in the folder ``where``; the query stays at the end."""
    url = os.fspath(where)
    if not is_url(url):
        return str(Path(url) / name)
    bare, query = _without_query(url)
    return f"{bare.rstrip('/')}/{name}{query}"


def without_secrets(text: str, url: str) -> str:
    """A message about ``url`` with everything that `redacted` leaves out replaced by ``***``."""
    shown = redacted(url)
    text = text.replace(url, shown).replace(repr(url)[1:-1], shown)
    links = _links(url) if is_url(url) else []
    hidden = [part for link in links for part in ((link.user or "").partition(":") + tuple(link.rest[1:].split("&")))]
    pieces = {piece for part in hidden for piece in (part, part.partition("=")[2], *re.split("[:@/?#;&=]", part))}
    written = {way(piece) for piece in pieces for way in (str, unquote, lambda piece: quote(piece, safe=""))}
    for piece in sorted(written, key=len, reverse=True):
        if len(piece) > 2 and piece not in shown:
            text = text.replace(piece, "***")
    return text


def first_line(error: BaseException, length: int | None = 200) -> str:
    """The first line of an error's message, at most ``length`` characters of it."""
    return (str(error).splitlines() or [type(error).__name__])[0][:length]


# -- local HTTP servers -----------------------------------------------------------------------------------------------

LOCAL_HOSTS: Final = ("localhost", "127.0.0.1", "::1")


def is_this_machine(host: str) -> bool:
    """Whether the ``Host`` header of an HTTP request, with or without a port, is a name of the local machine."""
    name, _, port = host.rpartition(":")
    return (name if port.isdigit() else host).strip("[]").lower() in LOCAL_HOSTS


def port_error(port: str, error: Exception) -> SettingsError:
    """The error for a port that can't be listened on; ``port`` describes it."""
    what = "is taken" if getattr(error, "errno", None) == errno.EADDRINUSE else f"can't be used ({error})"
    return SettingsError(f"{port} {what}: choose another `port` (--port), or 0 for any free port.")
