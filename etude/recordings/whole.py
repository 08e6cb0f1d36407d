# SPDX-License-Identifier: Apache-2.0
"""Whole episodes out of a recording whose segments may be pieces of them, anywhere in its files.

A first look at the keys alone says which episodes are in pieces, so that what is wrong is known before anything is
written, and so that the second look holds no more than the episodes that have begun and are not yet complete.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from etude.errors import DataError
from etude.experience import Experience
from etude.experience.experience import without_lookback
from etude.recordings.held import Assembler
from etude.recordings.recording import Recording


@dataclasses.dataclass(slots=True)
class Extent:
    """What is there of an episode that is not one segment from its beginning to its end."""

    runs: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """The first step of each piece, and the one after its last."""
    done: bool = False
    context: int = 0
    """Rows of lookback before the earliest piece."""

    @property
    def num_steps(self) -> int:
        """In all pieces."""
        return sum(stop - start for start, stop in self.runs)

    def gap(self) -> tuple[int, int] | None:
        """The first steps that are missing in the middle: from, and up to."""
        pairs = zip(self.runs, self.runs[1:], strict=False)
        return next(((a[1], b[0]) for a, b in pairs if a[1] < b[0]), None)


@dataclasses.dataclass
class Survey:
    """What the segments of a recording add up to."""

    parts: dict[str, Extent] = dataclasses.field(default_factory=dict)
    """The episodes that are not one segment from their beginning to their end."""

    @property
    def unfinished(self) -> int:
        """How many episodes are neither terminated nor truncated."""
        return sum(not extent.done for extent in self.parts.values())

    @property
    def late(self) -> int:
        """How many episodes lack their first steps."""
        return sum(extent.runs[0][0] > 0 for extent in self.parts.values())

    @property
    def context(self) -> int:
        """The rows of lookback that repeat no step of the recording."""
        return sum(extent.context for extent in self.parts.values())

    def gap(self) -> tuple[str, int, int] | None:
        """The first episode that lacks steps in its middle, and which; None if there is none."""
        found = ((episode, extent.gap()) for episode, extent in self.parts.items())
        return next(((episode, *gap) for episode, gap in found if gap), None)


def survey(recording: Recording, max_rows: int) -> Survey:
    """Look at the keys of all segments, in pieces of at most ``max_rows`` rows.

    Takes some 400 bytes of memory for each episode that is not one segment, and 60 for the others.

    Raises:
        DataError: an episode has several agents.
    """
    found = Survey()
    whole: set[int] = set()  # hashes, as ids take several times their memory
    agents: dict[str | None, None] = {}
    for exp in recording.stream(columns=(), max_rows=max_rows):
        segments = exp.segments
        starts, stops = segments.t_start + segments.lookback, segments.t_start + exp.lengths
        agents |= dict.fromkeys(segments.agent_id.tolist())
        rows = zip(segments.episode_id.tolist(), starts.tolist(), stops.tolist(), segments.done.tolist(),
                   segments.lookback.tolist(), strict=True)  # fmt: skip
        for episode, start, stop, done, lookback in rows:
            if hash(episode) in whole:
                raise _several(recording, episode, list(agents))
            if start == 0 and done and episode not in found.parts:
                whole.add(hash(episode))
            elif start < stop:
                extent = found.parts.setdefault(episode, Extent())
                if not extent.runs or start < min(extent.runs)[0]:
                    extent.context = lookback
                extent.runs.append((start, stop))
                extent.done |= done
    for episode, extent in found.parts.items():
        extent.runs.sort()
        for a, b in zip(extent.runs, extent.runs[1:], strict=False):
            if b[0] < a[1]:
                raise _several(recording, episode, list(agents))
    return found


def check_one_agent(recording: Recording, max_rows: int) -> int:
    """Look at the keys of all segments; gives how many rows are lookback.

    Raises:
        DataError: an episode has several agents.
    """
    context = 0
    pairs: set[tuple[int, int]] = set()  # hashes of episodes and of agents that have names
    episodes: set[int] = set()
    agents: dict[str | None, None] = {}
    for exp in recording.stream(columns=(), max_rows=max_rows):
        context += int(exp.segments.lookback.sum())
        for episode, agent in zip(exp.segments.episode_id.tolist(), exp.segments.agent_id.tolist(), strict=True):
            if agent is None:
                continue
            agents[agent] = None
            pairs.add((hash(episode), hash(agent)))
            episodes.add(hash(episode))
            if len(pairs) > len(episodes):
                raise _several(recording, episode, list(agents))
    return context


def _several(recording: Recording, episode: str, agents: list[str | None]) -> DataError:
    named = ", ".join(map(repr, agents[:4])) + (" ..." if len(agents) > 4 else "")
    return DataError(
        f"{recording.path}: episode {episode!r} has several agents ({named}), which this format can't hold: its "
        "readers take one agent. Keep Etude's format, or write one agent's steps alone."
    )


def whole_episodes(recording: Recording, found: Survey, max_rows: int) -> Iterator[Experience]:
    """All steps that are not lookback, in pieces of at most ``max_rows`` rows or of one episode: a segment an episode.

    Episodes come in the order in which they become complete. Holds the pieces of those that have begun.

    Args:
        recording: What to read.
        found: What `survey` found; no episode may lack steps in its middle.
        max_rows: The most rows that are read at a time.
    """
    assembler = Assembler({episode: extent.num_steps for episode, extent in found.parts.items()})
    for exp in recording.stream(max_rows=max_rows):
        exp = without_lookback(exp)
        partial = np.fromiter((episode in found.parts for episode in exp.segments.episode_id), bool, exp.num_segments)
        if not partial.all():
            yield exp.select(np.flatnonzero(~partial))
        for i in np.flatnonzero(partial):
            piece = exp[int(i)]
            whole = assembler.add(str(piece.segments.episode_id[0]), piece)
            if whole is None:
                continue
            if whole.num_segments > 1:
                raise DataError(
                    f"{recording.path}: episode {whole.segments.episode_id[0]!r} was acted in by several modules "
                    f"({', '.join(map(repr, dict.fromkeys(whole.segments.module_id.tolist())))}), which this format "
                    "can't hold."
                )
            yield whole
