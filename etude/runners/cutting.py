# SPDX-License-Identifier: Apache-2.0
"""What a collection has brought is cut from the logs, as Experience."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import EtudeError
from etude.experience import Experience
from etude.experience.experience import offsets_of
from etude.runners.episodes import Key
from etude.runners.faults import check_numbers
from etude.runners.track import EPISODE, SLOT, Steps, Track
from etude.runners.turn_loop import TurnLoop


def cut(loop: TurnLoop, *, keep_results: bool) -> dict[str | None, Experience]:
    """What was collected, by module id; the logs keep what is not yet answered, and the noted turns come again.

    With ``keep_results``, they also keep what episodes that are not given out have brought.
    """
    parts = {}
    tracks = loop.cast.tracks.values()
    found = [(track, *_delivered(loop, track)) for track in tracks if track.log.size]
    for track, steps, numbers in found:
        if len(steps.rows):
            parts[track.module_id] = _experience(loop, track, steps, numbers)
    for track, steps, _ in found:
        held = [part.start + np.arange(len(part.turn.slots)) for part in loop.parts if part.track is track]
        track.forget(steps, np.concatenate([np.zeros(0, np.int64), *held]), keep_results=keep_results)
    if loop.watch is not None:
        loop.watch.seats.forget()
    later = _episodes_held(loop)
    loop.book.finish([over for over in loop.overs if over not in later], later)
    loop.overs = [over for over in loop.overs if over in later]
    return parts


def as_one(parts: Mapping[str | None, Experience]) -> Experience:
    """What several modules have lived through as one Experience.

    Raises:
        EtudeError: their columns differ.
    """
    if len(parts) == 1:
        return next(iter(parts.values()))
    shapes = {tuple((n, c.dtype.str, c.shape[1:]) for n, c in sorted(exp.steps.items())) for exp in parts.values()}
    if len(shapes) > 1:
        raise EtudeError(
            f"the modules {sorted(map(str, parts))} have columns that don't go into one Experience: use "
            "collect_each, which gives one for each module."
        )
    return Experience.concat(list(parts.values()))


def _episodes_held(loop: TurnLoop) -> set[Key]:
    """The episodes of which results are kept for the next collection."""
    held: set[Key] = set()
    for part in loop.parts:
        if part.counted is not None and part.turn.episode is not None:
            envs, numbers = loop.arena.env_of[part.turn.slots[part.counted]], part.turn.episode[part.counted]
            held.update(zip(envs.tolist(), numbers.tolist(), strict=True))
    return held


def _delivered(loop: TurnLoop, track: Track) -> tuple[Steps, NDArray[np.int64]]:
    """The steps to give out, and of each segment which of its env's episodes it is of."""
    steps = track.steps()
    rows = steps.rows[steps.begins]
    slots = track.log.take(SLOT, rows)
    if EPISODE in track.log.columns:
        numbers = track.log.take(EPISODE, rows)
    else:
        numbers = loop.book.begun[slots] - steps.later - 1
    if loop.quota is None:
        return steps, numbers
    which = loop.quota.delivered(loop.arena.env_of[slots], numbers)
    return steps.select(which), numbers[which]


def _experience(loop: TurnLoop, track: Track, steps: Steps, numbers: NDArray[np.int64]) -> Experience:
    """Steps as segments, with the context that connectors need in front of those that go on."""
    columns, final_obs = track.columns_of(steps)
    lengths = np.diff(steps.last, prepend=-1)
    slots = track.log.take(SLOT, steps.rows[steps.last])
    returns = np.add.reduceat(columns[col.REWARD], steps.begins)
    clock = None
    if col.ENV_T in track.log.columns:
        clock = track.log.take(col.ENV_T, steps.answers[steps.last])
    flags, spans = track.flags_of(steps), track.spans_of(steps)
    segments = loop.book.enter(slots, numbers, lengths, returns, flags, track.module_id, spans, clock)
    exp = Experience(columns, offsets_of(lengths), segments, final_obs)
    check_numbers(exp)
    lookback = loop.cast.lookbacks[track.module_id]
    return lookback.lead(exp, slots) if lookback.context else exp
