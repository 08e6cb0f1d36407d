# SPDX-License-Identifier: Apache-2.0
"""A recording through the writer of another tool's format: what such a format can't hold is refused, or noted."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.experience.arrays import ranges
from etude.experience.experience import offsets_of, without_lookback
from etude.recordings.formats.lerobot_writer import LeRobotWriter
from etude.recordings.formats.minari_writer import MinariWriter
from etude.recordings.formats.rllib_writers import RLlibEpisodesWriter, RLlibTableWriter
from etude.recordings.recording import Recording
from etude.recordings.whole import check_one_agent, survey, whole_episodes

MAX_ROWS: Final = 65_536
"""The most rows in memory at a time, but for episodes that are longer or not yet complete."""


class Writer(Protocol):
    """Writes Experience in another tool's format into a folder.

    Everything that it can't hold is refused when it is made; notes of what it leaves out are known at the end.
    """

    whole_episodes: bool
    """Each segment that it is given must be an episode that is done; else it may be any piece of one."""
    keeps_time: bool
    """Which step of its episode a step is stays known."""
    needs_final_obs: bool
    """It can't do without what was observed after a segment, unless the episode terminated there."""
    notes: list[str]
    """What it could not keep, in words."""

    def write(self, exp: Experience) -> None:
        """Take some segments, none of which has lookback; see `needs_final_obs`."""

    def close(self) -> None:
        """Finish all files."""


WRITERS: Final[Mapping[str, Callable[[Path, Recording, list[str], Path, int | None], Writer]]] = {
    "rllib-episodes": lambda folder, source, columns, *_: RLlibEpisodesWriter(folder, source.header, columns),
    "rllib-table": lambda folder, source, columns, *_: RLlibTableWriter(folder, source.header, columns),
    "minari": lambda folder, source, columns, path, _: MinariWriter(folder, source.header, columns, path),
    "lerobot": lambda folder, source, columns, path, fps: LeRobotWriter(folder, source.header, columns, fps, path.name),
}


def exported(recording: Recording, folder: Path, format: str, path: Path, fps: int | None = None) -> list[str]:
    """Write all of ``recording`` into the empty ``folder``, which is to become ``path``; gives notes.

    ``fps`` is for LeRobot; see `etude.recordings.convert`.

    Raises:
        DataError: something can't be read, or the format can't hold it.
    """
    if col.REWARD not in recording.columns:
        raise DataError(f"{recording.path}: has no column `{col.REWARD}`, which {format} can't do without.")
    texts = _texts(recording)
    columns = [name for name in recording.columns if name not in texts]
    notes = [f"column `{name}` holds text, which {format} has no place for: left out" for name in texts]
    try:
        writer = WRITERS[format](folder, recording, columns, path, fps)
    except DataError as error:
        raise DataError(f"{recording.path}: {error}") from error
    ends, steps = _Ends(), 0
    try:
        pieces = (
            _episodes_of(recording, writer, format, notes) if writer.whole_episodes else _steps_of(recording, notes)
        )
        for piece in pieces:
            exp = _without(piece, texts)
            exp = ends.known(exp) if writer.needs_final_obs else exp
            steps += exp.num_steps
            if exp.num_segments:
                writer.write(exp)
    finally:
        writer.close()
    if not steps:
        raise DataError(f"{recording.path}: holds no steps, so that there is nothing to convert.")
    return [*notes, *ends.notes(), *writer.notes]


def _steps_of(recording: Recording, notes: list[str]) -> Iterator[Experience]:
    """What to write of steps, wherever they stand; whether they can be is known at once."""
    context = check_one_agent(recording, MAX_ROWS)
    if context:
        notes.append(f"{context:,} rows are context only (lookback), copies of steps in the main: left out")
    return (without_lookback(exp) for exp in recording.stream(max_rows=MAX_ROWS))


def _episodes_of(recording: Recording, writer: Writer, format: str, notes: list[str]) -> Iterator[Experience]:
    """What to write of whole episodes; whether they can be is known at once."""
    found = survey(recording, MAX_ROWS)
    if found.gap:
        episode, start, stop = found.gap
        raise DataError(
            f"{recording.path}: episode {episode!r} lacks the steps {start} to {stop - 1}, but {format} holds whole "
            "episodes alone. Leave it out with `etude data filter`, or write another format."
        )
    if found.context:
        notes.append(f"{found.context:,} steps are context only (lookback) and of no episode that is there: left out")
    if found.unfinished:
        notes.append(
            f"{_are(found.unfinished)} neither terminated nor truncated: marked as truncated, since {format} "
            "holds episodes that are done"
        )
    if found.late and not writer.keeps_time:
        verb = "1 episode lacks its" if found.late == 1 else f"{found.late:,} episodes lack their"
        notes.append(f"{verb} first steps: {format} counts steps from 0")
    return (_done(exp) for exp in whole_episodes(recording, found, MAX_ROWS))


def _are(count: int) -> str:
    return "1 episode is" if count == 1 else f"{count:,} episodes are"


def _done(exp: Experience) -> Experience:
    """The same, each segment that is not done marked as truncated."""
    segments = exp.segments
    ends = segments.replace(truncated=segments.truncated | ~segments.done)
    return Experience(exp.steps, exp.offsets, ends, exp.final_obs)


def _texts(recording: Recording) -> list[str]:
    """The columns that hold strings."""
    for exp in recording.stream(max_rows=MAX_ROWS):
        return [name for name, column in exp.steps.items() if column.dtype == object]
    return []


def _without(exp: Experience, names: list[str]) -> Experience:
    if not names:
        return exp
    steps = {name: column for name, column in exp.steps.items() if name not in names}
    return Experience(steps, exp.offsets, exp.segments, exp.final_obs)


class _Ends:
    """Sees to it that what was observed after the last step of each segment stands there."""

    def __init__(self) -> None:
        self._repeated = self._left_out = 0

    def known(self, exp: Experience) -> Experience:
        """The same, but for segments after which nobody knows what was observed.

        Where the episode terminated, nothing is learned from it: the observation before stands in. Elsewhere it would
        have to be invented: the last step is left out, so that its own observation is what follows the step before.
        """
        lost = ~exp.segments.has_final_obs
        if not lost.any():
            return exp
        shorter = lost & ~exp.segments.terminated
        self._repeated += int((lost & ~shorter).sum())
        self._left_out += int(shorter.sum())
        kept = np.flatnonzero(exp.lengths > shorter)
        lengths, last = (exp.lengths - shorter)[kept], exp.offsets[1:][kept] - 1
        rows, unknown = ranges(exp.offsets[:-1][kept], lengths), lost[kept]
        final_obs = {}
        for name, column in col.subtree(exp.steps, col.OBS).items():
            final_obs[name] = column[last]
            if name in exp.final_obs:
                final_obs[name][~unknown] = exp.final_obs[name][kept][~unknown]
        segments = exp.segments[kept].replace(has_final_obs=np.ones(len(kept), bool))
        return Experience({n: c[rows] for n, c in exp.steps.items()}, offsets_of(lengths), segments, final_obs)

    def notes(self) -> list[str]:
        """What was done, in words."""
        notes = []
        if self._repeated:
            notes.append(
                f"what followed {self._repeated:,} steps at which an episode terminated is not known: the observation "
                "before stands there, from which nothing is learned"
            )
        if self._left_out:
            notes.append(
                f"what followed {self._left_out:,} steps, the last of episodes that did not terminate, is not known: "
                "these steps are left out"
            )
        return notes
