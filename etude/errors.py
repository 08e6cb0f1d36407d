# SPDX-License-Identifier: Apache-2.0
"""The errors that Etude raises. Each message says what was wrong, where, and what to do next."""

import re
import traceback
from typing import Final

_BOUNDS: Final = re.compile(r"Box\(\[[^()]*\]")
"""Bounds of a Box, which NumPy pads with spaces and breaks into lines."""


def printable(text: str) -> str:
    """Text from a file, made safe to print: control characters, line breaks and invisible characters are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """A text of several lines, each made safe to print by `printable`; bounds of Boxes are shown without padding."""
    text = _BOUNDS.sub(lambda found: " ".join(found[0].split()), text)
    return "\n".join(map(printable, text.split("\n")))


def described(error: BaseException) -> str:
    """The type and the message of another package's error; if it has no message, where it was raised."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the error's own code
        text = ""
    if text:
        return f"{type(error).__name__}: {text}"
    raised = traceback.extract_tb(error.__traceback__)[-1:]
    return type(error).__name__ + "".join(f" in {at.filename}, line {at.lineno}: `{at.line}`" for at in raised)


def how_to_install(extra: str) -> str:
    """The command that installs the dependencies of an optional feature, for a message."""
    return f"pip install '.[{extra}]' in the clone of Etude, which is on no package index yet"


class EtudeError(Exception):
    """Base class of all errors of Etude. The text is safe to print, whatever names it contains."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class SettingsError(EtudeError):
    """A setting is unknown, ill-typed or out of range; the message names it and the nearest right name."""


class SpaceError(EtudeError):
    """A value does not fit its space, or a space is of a kind that Etude can't handle."""


class ModuleError(EtudeError):
    """A module (a user's network) can't be made, or breaks its contract."""


class EnvError(EtudeError):
    """An environment can't be made, or breaks its contract."""


class DataError(EtudeError):
    """Experience or a recording is broken; the message names the file, row and column, if known."""


class CheckpointError(EtudeError):
    """A folder is not a checkpoint, or can't be loaded."""


class EngineError(EtudeError):
    """A remote runner or learner can't be started or reached, or failed too often."""


class UnknownNameError(EtudeError, AttributeError):
    """An object has no attribute of that name; the message names the nearest one."""
