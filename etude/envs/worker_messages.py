# SPDX-License-Identifier: Apache-2.0
"""Messages between an arena, its workers and the process that starts them: JSON, with open files beside it."""

import json
import socket
from typing import Any

_MAX_FDS = 8


def send(to: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> bool:
    """Send a message and open files with it; False: nobody is there to take it."""
    data = json.dumps(message).encode()
    header = len(data).to_bytes(4, "little")
    try:
        if fds:
            socket.send_fds(to, [header], fds)
        else:
            to.sendall(header)
        to.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def receive(end: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and the files that came with it; waits for it. None: nobody is at the other end any more."""
    try:
        first, fds, *_ = socket.recv_fds(end, 4, _MAX_FDS)
        header = first + _exactly(end, 4 - len(first)) if first else b""
        data = _exactly(end, int.from_bytes(header, "little")) if len(header) == 4 else b""
    except ConnectionResetError:
        return None
    return (json.loads(data), fds) if data else None


def _exactly(end: socket.socket, count: int) -> bytes:
    parts = []
    while count > 0:
        part = end.recv(min(count, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
