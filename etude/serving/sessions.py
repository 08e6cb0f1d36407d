# SPDX-License-Identifier: Apache-2.0
"""Sessions: what a server keeps of each client, with a limit on how many there are and for how long."""

import dataclasses
import secrets
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from etude.serving.protocol import SESSION, RequestError


@dataclasses.dataclass
class Session:
    """One client's episodes, one after the other."""

    id: str = dataclasses.field(default_factory=lambda: secrets.token_urlsafe(12), init=False)
    used: float = dataclasses.field(default=0.0, init=False)
    """When it was last used, in seconds of the clock."""
    is_busy: bool = dataclasses.field(default=False, init=False)
    """A request of it is being answered."""


S = TypeVar("S", bound=Session)


class Sessions(Generic[S]):
    """The sessions of a server, by id.

    Args:
        limit: The most that there may be.
        seconds: A session that was not used for so long is dropped, unless a request of it is being answered.
        dropped: Called with each session that is dropped, however that happens.
        clock: Gives the time in seconds.
    """

    def __init__(
        self, limit: int, seconds: float, dropped: Callable[[S], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit, self.seconds, self._dropped, self._clock = limit, seconds, dropped, clock
        self._by_id: dict[str, S] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, session: S) -> S:
        """Keep a session.

        Raises:
            RequestError: there are too many.
        """
        self.expire()
        if len(self._by_id) >= self.limit:
            raise RequestError(
                SESSION,
                f"can't be opened: there are {self.limit} already, the most that there may be. Close those "
                f"that have ended; one that is not used is closed after {self.seconds:g} seconds.",
                429,
            )
        session.used = self._clock()
        self._by_id[session.id] = session
        return session

    def find(self, session_id: Any) -> S:
        """The session of that id.

        Raises:
            RequestError: there is none, or it has expired, or waits for an answer.
        """
        if not isinstance(session_id, str):
            raise RequestError(SESSION, "must be the text that POST /sessions gave.")
        found = self._by_id.get(session_id)
        if found is not None and self._is_over(found):
            self.drop(found)
            found = None
        if found is None:
            raise RequestError(
                SESSION,
                f"{session_id[:50]!r} is not open: it was closed, or not used for "
                f"{self.seconds:g} seconds. Open another, with a new episode.",
                404,
            )
        if found.is_busy:
            raise RequestError(SESSION, "still waits for the answer to another request.", 409)
        return found

    def touch(self, session: S) -> None:
        """Note that a session was used."""
        session.used = self._clock()

    def drop(self, session: S) -> None:
        """Forget a session, if it is there."""
        if self._by_id.pop(session.id, None) is not None:
            self._dropped(session)

    def expire(self) -> None:
        """Drop the sessions that were not used for too long."""
        for session in [one for one in self._by_id.values() if self._is_over(one)]:
            self.drop(session)

    def clear(self) -> None:
        """Drop all."""
        for session in list(self._by_id.values()):
            self.drop(session)

    def _is_over(self, session: S) -> bool:
        return not session.is_busy and self._clock() - session.used > self.seconds
