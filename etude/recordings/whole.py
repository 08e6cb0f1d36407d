# SPDX-License-Identifier: Apache-2.0
"""Whole episodes out of a recording whose segments may be pieces of them, anywhere in its files.

A first look at the keys alone says which episodes are in pieces, so that what is wrong is known before anything is
written, and so that the second look holds no more than the episodes that have begun and are not yet complete.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from etude.errors import DataError
from etude.experience import Experience
from etude.experience.experience import without_lookback
from etude.recordings.held import Assembler
from etude.recordings.recording import Recording
from etude.recordings.spans import all_of, clashes, in_time, spans_of


class Survey(NamedTuple):
    """What the segments of a recording add up to."""

    parts: dict[int, int]
    """The episodes that are not one segment from their beginning to their end, by hash of their id: their steps."""
    unfinished: int
    """How many of these are neither terminated nor truncated."""
    late: int
    """How many of these lack their first steps."""
    context: int
    """The rows of lookback that repeat no step of the recording."""
    gap: tuple[str, int, int] | None
    """An episode that lacks steps in its middle: its id, the first of these, and the first that is there again."""


def survey(recording: Recording, max_rows: int) -> Survey:
    """Look at the keys of all segments, in pieces of at most ``max_rows`` rows. Takes some 60 bytes of memory for each.

    Raises:
        DataError: an episode has several agents.
    """

    def keys() -> Iterator[Experience]:
        return recording.stream(columns=(), max_rows=max_rows)

    def episode_of(at: int) -> str:
        exp = next(itertools.islice(keys(), int(spans["part"][at]), None))
        return str(exp.segments.episode_id[int(np.searchsorted(exp.offsets, spans["row"][at], side="right")) - 1])

    agents: dict[str | None, None] = {}
    runs = []
    for k, exp in enumerate(keys()):
        agents |= dict.fromkeys(np.asarray(exp.segments.agent_id).tolist())
        runs.append(spans_of(k, exp))
    spans = all_of(runs)
    spans["key"] = spans["episode"]  # that have one agent each, or else their steps clash
    spans = in_time(spans)
    found = clashes(spans)
    for at in (*found["duplicate"].tolist(), *found["after_end"].tolist()):
        raise _several(recording, episode_of(at), list(agents))
    heads = np.flatnonzero(np.append(True, spans["key"][1:] != spans["key"][:-1])) if len(spans) else np.zeros(0, int)
    counts = np.diff(np.append(heads, len(spans)))
    is_done = np.logical_or.reduceat(spans["terminated"] | spans["truncated"], heads) if len(heads) else heads > 0
    steps = np.add.reduceat(spans["stop"] - spans["start"], heads) if len(heads) else heads
    first = spans["start"][heads]
    is_part = (counts > 1) | (first > 0) | ~is_done
    gap = found["gap"][:1]
    return Survey(
        parts=dict(zip(spans["key"][heads][is_part].tolist(), steps[is_part].tolist(), strict=True)),
        unfinished=int((~is_done).sum()),
        late=int((first > 0).sum()),
        context=int(spans["lookback"][heads].sum()),
        gap=(episode_of(gap[0]), int(spans["stop"][gap[0]]), int(spans["start"][gap[0] + 1])) if len(gap) else None,
    )


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
    assembler = Assembler(found.parts)
    for exp in recording.stream(max_rows=max_rows):
        exp = without_lookback(exp)
        keys = exp.segments.episode_id.mapped(hash, np.int64)
        is_part = np.isin(keys, list(found.parts))
        if not is_part.all():
            yield exp.select(np.flatnonzero(~is_part))
        for i in np.flatnonzero(is_part):
            whole = assembler.add(int(keys[i]), exp[int(i)])
            if whole is None:
                continue
            if whole.num_segments > 1:
                raise DataError(
                    f"{recording.path}: episode {whole.segments.episode_id[0]!r} was acted in by several modules "
                    f"({', '.join(map(repr, dict.fromkeys(whole.segments.module_id.tolist())))}), which this format "
                    "can't hold."
                )
            yield whole
