# SPDX-License-Identifier: Apache-2.0
"""What came of making a recording out of others, and what is looked at before."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etude.errors import DataError
from etude.places import located
from etude.recordings.recording import Recording


@dataclasses.dataclass(frozen=True)
class Part:
    """A recording that was written."""

    path: str
    episodes: int
    steps: int
    """Of all agents, lookback left out."""

    def __str__(self) -> str:
        return f"{self.path}: {counted(self.episodes, 'episode')}, {counted(self.steps, 'step')}"


@dataclasses.dataclass(frozen=True)
class Edited:
    """What was written, and what was left out."""

    written: tuple[Part, ...]
    left_out_episodes: int = 0
    left_out_steps: int = 0
    notes: tuple[str, ...] = ()
    """What else is not as it was, in words."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "written": [dataclasses.asdict(part) for part in self.written],
            "left_out": {"episodes": self.left_out_episodes, "steps": self.left_out_steps},
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        out = f"{counted(self.left_out_episodes, 'episode')}, {counted(self.left_out_steps, 'step')}"
        return "\n".join([*map(str, self.written), f"left out: {out}", *self.notes])


def counted(count: int, what: str) -> str:
    """``3 episodes``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


@contextmanager
def told_where(paths: Sequence[str]) -> Iterator[None]:
    """Say in an error within it that what was written until then is there."""
    try:
        yield
    except DataError as error:
        there = ", ".join(paths)
        raise DataError(f"{error} What was written until then is in {there}: remove it before trying again.") from error


def check_apart(to: Sequence[str | os.PathLike[str]], recordings: Sequence[Recording]) -> None:
    """Raise a DataError where something is to be written into the folder of something else."""
    outs = [located(path) for path in to]
    pairs = [(out, recording.path) for out in outs for recording in recordings]
    pairs += [(out, other) for out in outs for other in outs if out is not other]
    for out, other in pairs:
        if not (isinstance(out, Path) and isinstance(other, Path)):
            continue
        if out.resolve().is_relative_to(other.resolve()):
            raise DataError(f"{out}: lies in {other}, to which its files would belong then. Choose another folder.")
