# SPDX-License-Identifier: Apache-2.0
"""Errors in actors: whether a process was lost, and raising them here."""

import re
from typing import NoReturn

from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from etude.errors import EngineError

_LOST = (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError, ObjectLostError)
_MOST = 500  # characters of an error's text
_UNFOUND = "No module named"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def cause_of(error: RayError) -> BaseException:
    """The error that was raised in an actor; ``error`` itself if it is Ray's own."""
    return error.cause if isinstance(error, RayTaskError) else error


def was_lost(cause: BaseException) -> bool:
    """Whether a process, a node or an object was lost; otherwise the code that ran there failed."""
    return isinstance(cause, _LOST) and not getattr(cause, "actor_init_failed", False)


def raise_from(error: RayError, where: str) -> NoReturn:
    """Raise the error from an actor, with a note that contains ``where`` and the traceback there.

    Raises:
        EngineError: the error is Ray's own, or can't be raised here.
    """
    cause = error.cause if isinstance(error, RayTaskError) else None
    if not isinstance(cause, Exception) or isinstance(cause, RayError):
        if cause is not None and not isinstance(cause, Exception):  # such as a CancelledError
            raise EngineError(f"{where}: your code raised {type(cause).__name__}: {cause}") from error
        text = first_line(error)
        hint = " Its code must be importable on every node: see `ray.runtime_env`." if _UNFOUND in text else ""
        raise EngineError(f"{where} can't be started or reached: {text}{hint}") from error
    lines = _COLOURS.sub("", str(error)).splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("  File ")), 0)  # skips Ray's header
    cause.add_note("\n".join([f"in {where}, where this happened:", *lines[first:]]))
    raise cause from None


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for a message."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    text = " ".join(lines) or type(error).__name__
    return text if len(text) <= _MOST else f"{text[:_MOST]} ..."
