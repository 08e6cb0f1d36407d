# SPDX-License-Identifier: Apache-2.0
"""Write to standard output and standard error, whatever reads them."""

import io
import logging
import os
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from etude.errors import EtudeError, printable_lines


def prepare() -> None:
    """Make both streams accept any text: a closed one discards it, and what can't be encoded is written as ``?``."""
    sys.stdout, sys.stderr = _usable(sys.stdout), _usable(sys.stderr)


def _usable(stream: TextIO | None) -> TextIO:
    if stream is None:  # closed by the parent process; the next file opened would get its number
        return open(os.devnull, "w", encoding="utf-8")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    return stream


def say(text: str) -> None:
    """Write a line to standard error. A closed stream is ignored, so that it does not end a run."""
    try:
        sys.stderr.write(printable_lines(text) + "\n")
    except OSError:
        _hush(sys.stderr)


def print_error(message: str) -> None:
    """Write an error to standard error, with its later lines indented."""
    say("error: " + message.replace("\n", "\n       "))


def write(text: str) -> None:
    """Write text to standard output as it is.

    Raises:
        EtudeError: it can't be written, as on a full disk. Standard output is silent from then on.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _hush(sys.stdout)
        raise EtudeError(f"can't write to standard output: {error.strerror or error}.") from error


def show(text: str) -> None:
    """Write lines to standard output; control characters, which a stranger's names may hold, are made safe."""
    write(printable_lines(text) + "\n")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def print_json(value: Mapping[str, Any]) -> None:
    """Write one JSON object as a line to standard output; NaN and infinities become null."""
    from etude.display import json_line  # not for help

    write(json_line(value) + "\n")  # escapes non-ASCII characters


def tell(found: Mapping[str, Any], words: str, *, as_json: bool) -> None:
    """Write results to standard output: as one JSON object, or in words."""
    if as_json:
        print_json(found)
    else:
        show(words)


class _Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"warning: {record.getMessage()}")


@contextmanager
def warnings_said() -> Iterator[None]:
    """Write what Etude logs as a warning or worse to standard error."""
    handler, logger = _Warnings(logging.WARNING), logging.getLogger("etude")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def hush_unread() -> bool:
    """Silence streams whose reader, such as `head`, has closed them; return whether there was one."""
    unread = [stream for stream in (sys.stdout, sys.stderr) if _is_unread(stream)]
    for stream in unread:
        _hush(stream)
    return bool(unread)


def _is_unread(stream: TextIO) -> bool:
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return bool(poll.poll(0))  # no events asked for: only errors are reported
    except (AttributeError, OSError):  # a system without poll; a stream without a file
        return False


def _hush(stream: TextIO) -> None:
    """Discard everything written from now on, and what is still buffered."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
