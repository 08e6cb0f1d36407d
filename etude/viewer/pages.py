# SPDX-License-Identifier: Apache-2.0
"""The page of some recordings: served to a browser on this machine, or saved whole as one file."""

import base64
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from etude.errors import EtudeError, SettingsError
from etude.files import RemotePath, located, replace
from etude.urls import is_this_machine, port_error
from etude.viewer.views import RecordingView, compared

_EMBEDDED: Final = "/*ANSWERS*/ null"
"""Stands in the page where a saved one has the answers to what it asks."""
MAX_PAGE_BYTES: Final = 64 * 2**20
"""A saved page holds no more episodes when it is as large as this."""

Request = Mapping[str, str]


class _Answers:
    """What the page may ask for, by name. Each answer is JSON data, or the bytes of a PNG."""

    def __init__(self, views: Sequence[RecordingView]) -> None:
        self._views = views
        self._known: Mapping[str, Callable[[Request], Any]] = {
            "recordings": lambda _: [view.summary() for view in views],
            "column": lambda asked: compared(views, asked["name"]),
            "episodes": lambda asked: self._view(asked).list(
                asked.get("where", ""), asked.get("sort", ""), asked.get("descending") == "1"
            ),
            "episode": lambda asked: self._view(asked).episode(asked["id"]),
            "frame": lambda asked: self._view(asked).frame(
                asked["id"], int(asked["agent"]), asked["column"], int(asked["t"])
            ),
        }

    def __call__(self, name: str, asked: Request) -> Any:
        """The answer.

        Raises:
            SettingsError: there is no such question, or it lacks something.
            DataError: what it asks for is not there or can't be read.
        """
        if name not in self._known:
            raise SettingsError(f"there is nothing at /api/{name}.")
        try:
            return self._known[name](asked)
        except (KeyError, ValueError, IndexError, OSError) as error:  # a file may have gone
            raise SettingsError(f"/api/{name} can't answer {dict(asked)!r}: {error}.") from error

    def _view(self, asked: Request) -> RecordingView:
        return self._views[int(asked["recording"])]


def _page(answers: Mapping[str, Any] | None) -> str:
    text = (resources.files("etude.viewer") / "page.html").read_text(encoding="utf-8")
    if answers is None:
        return text
    data = json.dumps(answers, allow_nan=False, ensure_ascii=False)
    return text.replace(_EMBEDDED, data.replace("<", "\\u003c"))  # so that no text in it ends the script


def save_page(
    views: Sequence[RecordingView],
    path: str | os.PathLike[str] | RemotePath,
    *,
    where: str = "",
    max_episodes: int = 20,
) -> list[str]:
    """Write the page of ``views`` as one file that needs nothing else.

    Args:
        views: The recordings, at least one.
        path: The file, which appears whole or not at all.
        where: Only episodes for which this expression holds are in the lists.
        max_episodes: How many episodes of each recording can be stepped through: the first ones of the list, at least
            0, and fewer where the page would be larger than 64 MiB.

    Returns:
        What is not in it, in words.

    Raises:
        DataError: something can't be read, or the file can't be written.
        SettingsError: ``where`` can't be used.
    """
    ask, size, notes = _Answers(views), 0, list[str]()
    answers: dict[str, Any] = {}

    def put(name: str, asked: Request) -> Any:
        nonlocal size
        answer = ask(name, asked)
        kept = "data:image/png;base64," + base64.b64encode(answer).decode() if isinstance(answer, bytes) else answer
        answers[_key(name, asked)] = kept
        size += len(kept) if isinstance(kept, str) else len(json.dumps(kept))
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
                    f"{view.recording.path}: only {count} episodes are there step by step; more would take too much."
                )
                break
            asked = {"recording": str(k), "id": episode_id}
            for agent, one in enumerate(put("episode", asked)["agents"]):
                for column in view.images:
                    for t in range(one["frames"]):
                        if size <= MAX_PAGE_BYTES:
                            put("frame", {**asked, "agent": str(agent), "column": column, "t": str(t)})
        else:
            if len(ids) < listed["found"]:
                notes.append(
                    f"{view.recording.path}: {len(ids)} of {listed['found']:,} episodes are there step by step."
                )
    replace(located(path), _page(answers).encode())
    return notes


def _key(name: str, asked: Request) -> str:
    return json.dumps([name, *asked.values()], separators=(",", ":"), ensure_ascii=False)


class PageServer:
    """Serves the page of some recordings to browsers on this machine alone.

    Args:
        views: The recordings, at least one.
        port: To listen at; 0 is any that is free.

    Raises:
        SettingsError: the port is taken, or may not be used.
    """

    def __init__(self, views: Sequence[RecordingView], port: int = 0) -> None:
        answers, turn = _Answers(views), threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                if not is_this_machine(self.headers.get("Host", "")):
                    # It is from a page elsewhere, whose name was made to lead here.
                    self._send(403, "text/plain", b"This page is for this machine alone.")
                elif parts.path == "/":
                    self._send(200, "text/html; charset=utf-8", _page(None).encode())
                elif parts.path.startswith("/api/"):
                    self._answer(parts.path.removeprefix("/api/"), dict(parse_qsl(parts.query, True)))
                else:
                    self._send(404, "text/plain", b"There is nothing here.")

            def _answer(self, name: str, asked: Request) -> None:
                try:
                    with turn:
                        answer = answers(name, asked)
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

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a browser that has left

        try:
            self._server = Quiet(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:
            raise port_error(f"port {port}", error) from error
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"
        """Where the page is."""

    def serve(self) -> None:
        """Answer until interrupted, or until `running` ends."""
        self._server.serve_forever(0.1)

    @contextmanager
    def running(self) -> Iterator["PageServer"]:
        """Answer in a thread while the context lasts."""
        thread = threading.Thread(target=self.serve, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self.close()

    def close(self) -> None:
        """Give the port back."""
        self._server.server_close()
