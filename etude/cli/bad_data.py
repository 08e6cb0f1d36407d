# SPDX-License-Identifier: Apache-2.0
"""Bad data, as commands that read recordings are told of it, and tell of it. Imports nothing heavy."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from etude.cli.streams import show
from etude.errors import DataError
from etude.settings import settings

if TYPE_CHECKING:
    from etude.recordings import Recording

OnBad: TypeAlias = Literal["strict", "repair", "skip"]


@settings
class BadDataOptions:
    """What commands that read recordings take."""

    on_bad: OnBad = "strict"
    """What happens to bad data, such as NaN or steps that are there twice: an error (strict), or it is mended where
    that needs no invention and else left out (repair), or left out with its segment (skip)."""


def opened(path: str | Sequence[str], on_bad: OnBad) -> "Recording":
    """The recording at ``path``, or of several of them."""
    from etude.recordings import Recording

    several = not isinstance(path, str) and len(path) > 1
    return Recording.open(path if isinstance(path, str) or several else path[0], on_bad=on_bad)


@contextmanager
def remedied(path: str | Sequence[str], on_bad: OnBad) -> Iterator[None]:
    """Say in an error within it how to go on, where some of the recording can be read."""
    try:
        yield
    except DataError as error:
        if on_bad != "strict" or "--on-bad" in str(error) or not _opens(path):
            raise
        more = "`etude data validate` lists all problems; --on-bad=skip reads the rest."
        raise DataError(f"{str(error).rstrip('.')}. {more}") from error


def _opens(path: str | Sequence[str]) -> bool:
    try:
        opened(path, "skip")
    except DataError:
        return False
    return True


def say(recordings: Sequence["Recording"]) -> None:
    """Print what was bad in them, where something was."""
    for report in (recording.left_out_report() for recording in recordings):
        if report:
            show(str(report))


def as_json(recordings: Sequence["Recording"]) -> dict[str, Any]:
    """What was bad in them, by kind: how often it was met, and the rows left out; and warnings."""
    met, left_out = Counter[str](), Counter[str]()
    for recording in recordings:
        met.update(recording.met)
        left_out.update(recording.left_out)
    warnings = [warning for recording in recordings for warning in recording.warnings]
    return {"bad": {"met": dict(met), "left_out_rows": dict(left_out)}, "warnings": warnings}
