# SPDX-License-Identifier: Apache-2.0
"""The page that shows recordings: served to browsers on this machine, or saved as one file."""

import base64
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from etude.errors import DataError, EtudeError, SettingsError
from etude.files import RemotePath, located, write_atomically
from etude.urls import is_this_machine, port_error
from etude.viewer.views import RecordingView, compare_column

_EMBEDDED: Final = "/*ANSWERS*/ null"
"""The placeholder in ``page.html`` that a saved page replaces with the answers to all its requests."""
MAX_PAGE_BYTES: Final = 64 * 2**20
"""Once a saved page is larger than this, no more episodes and images are added to it."""

Request = Mapping[str, str]


def _answer(views: Sequence[RecordingView], name: str, query: Request) -> Any:
    """The answer to a request of the page: JSON data, or the bytes of a PNG.

    Args:
        views: The recordings.
        name: The name of the request, the part of the URL after ``/api/``.
        query: Its parameters.

    Raises:
        SettingsError: the request is unknown, or a parameter is missing or invalid.
        DataError: the requested data doesn't exist or can't be read.
    """

    def view() -> RecordingView:
        number = int(query["recording"])
        if number not in range(len(views)):
            raise SettingsError(f"there is no recording {number}: they are numbered from 0 to {len(views) - 1}.")
        return views[number]

    try:
        match name:
            case "recordings":
                return [view.summary() for view in views]
            case "column":
                return compare_column(views, query["name"])
            case "episodes":
                is_descending = query.get("descending") == "1"
                return view().list(query.get("where", ""), query.get("sort", ""), is_descending)
            case "episode":
                return view().episode(query["id"])
            case "frame":
                return view().frame(query["id"], int(query["agent"]), query["column"], int(query["t"]))
    except (KeyError, ValueError, IndexError, OSError) as error:  # a file may have been deleted
        raise SettingsError(f"/api/{name} can't answer {dict(query)!r}: {error}.") from error
    raise SettingsError(f"there is nothing at /api/{name}.")


def _page(answers: Mapping[str, Any] | None) -> str:
    text = (resources.files("etude.viewer") / "page.html").read_text(encoding="utf-8")
    if answers is None:
        return text
    data = json.dumps(answers, allow_nan=False, ensure_ascii=False)
    return text.replace(_EMBEDDED, data.replace("<", "\\u003c"))  # text in the data must not end the script


def save_page(
    views: Sequence[RecordingView],
    path: str | os.PathLike[str] | RemotePath,
    *,
    where: str = "",
    max_episodes: int = 20,
) -> list[str]:
    """Write the page of ``views`` to a single self-contained HTML file.

    Args:
        views: The recordings, at least one.
        path: The file to write. It is written atomically.
        where: List only the episodes for which this expression holds; empty lists all.
        max_episodes: The number of episodes per recording, at least 0, that the page can show step by step: the first
            ones of the list. There are fewer if the page would become larger than about 64 MiB.

    Returns:
        Notes on what was left out of the page, one text per recording; empty if nothing was.

    Raises:
        DataError: something can't be read, or the file can't be written.
        SettingsError: ``where`` is not a valid expression over episodes.
    """
    size, notes = 0, list[str]()
    answers: dict[str, Any] = {}

    def put(name: str, query: Request) -> Any:
        nonlocal size
        answer = _answer(views, name, query)
        stored = "data:image/png;base64," + base64.b64encode(answer).decode() if isinstance(answer, bytes) else answer
        answers[_key(name, query)] = stored
        size += len(stored) if isinstance(stored, str) else len(json.dumps(stored))
        return answer

    for summary in put("recordings", {}):
        for name in ("return", "length", *(name for name in summary["columns"] if name not in summary["images"])):
            if name != "return" or summary["return"] is not None:
                put("column", {"name": name})
    for k, view in enumerate(views):
        listed = view.list(where)
        answers[_key("episodes", {"recording": str(k), "where": "", "sort": "", "descending": ""})] = listed
        size += len(json.dumps(listed))
        ids = listed["episode_id"][:max_episodes]
        for count, episode_id in enumerate(ids):
            if size > MAX_PAGE_BYTES:
                notes.append(
                    f"{view.recording.path}: the page has only {count} episodes step by step; more would make it too "
                    "large."
                )
                break
            query = {"recording": str(k), "id": episode_id}
            for agent, one in enumerate(put("episode", query)["agents"]):
                for column in view.images:
                    for t in range(one["frames"]):
                        if size <= MAX_PAGE_BYTES:
                            put("frame", {**query, "agent": str(agent), "column": column, "t": str(t)})
        else:
            if len(ids) < listed["found"]:
                notes.append(
                    f"{view.recording.path}: the page has {len(ids)} of {listed['found']:,} episodes step by step."
                )
    to = located(path)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(to, _page(answers).encode())
    except OSError as error:
        raise DataError(f"{path}: can't be written: {error}.") from error
    return notes


def _key(name: str, query: Request) -> str:
    return json.dumps([name, *query.values()], separators=(",", ":"), ensure_ascii=False)


class PageServer:
    """Serves the page of some recordings, to browsers on this machine only.

    Args:
        views: The recordings, at least one.
        port: The port to listen on; 0 chooses a free one.

    Raises:
        SettingsError: the port is taken or can't be used.
    """

    def __init__(self, views: Sequence[RecordingView], port: int = 0) -> None:
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                if not is_this_machine(self.headers.get("Host", "")):
                    # A page of another site sent it, under a host name that resolves to this machine (DNS rebinding).
                    self._send(403, "text/plain", b"This page can only be opened on this machine.")
                elif parts.path == "/":
                    self._send(200, "text/html; charset=utf-8", _page(None).encode())
                elif parts.path.startswith("/api/"):
                    self._answer(parts.path.removeprefix("/api/"), dict(parse_qsl(parts.query, True)))
                else:
                    self._send(404, "text/plain", b"Not found.")

            def _answer(self, name: str, query: Request) -> None:
                try:
                    with lock:
                        answer = _answer(views, name, query)
                except EtudeError as error:
                    self._send(400, "application/json", json.dumps({"error": str(error)}).encode())
                    return
                if isinstance(answer, bytes):
                    self._send(200, "image/png", answer)
                else:
                    self._send(200, "application/json", json.dumps(answer, allow_nan=False).encode())

            def _send(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class QuietServer(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # the browser has closed the connection

        try:
            self._server = QuietServer(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:
            raise port_error(f"port {port}", error) from error
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"
        """The address of the page."""

    def serve(self) -> None:
        """Answer requests until interrupted, or until `running` ends."""
        self._server.serve_forever(0.1)

    @contextmanager
    def running(self) -> Iterator["PageServer"]:
        """Answer requests in a background thread during a ``with`` block, then close the server."""
        thread = threading.Thread(target=self.serve, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self.close()

    def close(self) -> None:
        """Release the port."""
        self._server.server_close()
