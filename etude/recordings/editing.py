# SPDX-License-Identifier: Apache-2.0
"""New recordings out of others, by whole episodes: split, filter, sample. In bounded memory, of any format.

Each goes over the data twice: once for the figures of the episodes, and once to copy. All that is recorded of an
episode stays together, whichever agent it is of and wherever it stands.
"""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError, SettingsError
from etude.recordings.edited import Edited, Part, check_apart, check_free, columns_of_pass, counted, told_where
from etude.recordings.episodes import FIGURES, LENGTH, RETURN, STEPS, EpisodeTable
from etude.recordings.recording import Recording, recording_of
from etude.recordings.where import Expression
from etude.recordings.writer import RecordingWriter

if TYPE_CHECKING:
    from etude.recordings.opening import DataLike


def split_recording(
    recording: "Recording | DataLike",
    to_train: str | os.PathLike[str],
    to_validation: str | os.PathLike[str],
    *,
    fraction: float = 0.9,
    seed: int = 0,
) -> Edited:
    """Deal whole episodes out to two recordings, at random.

    Args:
        recording: What to split, or where it is (see `Recording.open`).
        to_train: The folder of the first one.
        to_validation: The folder of the other one.
        fraction: How many of the episodes the first one gets, between 0 and 1; each gets one at least.
        seed: Who gets which hangs on this, and on the order of the episodes.

    Raises:
        DataError: there are fewer than two episodes; something can't be read or written, or is there already.
        SettingsError: ``fraction`` or ``seed`` is out of range.
    """
    if not 0 < fraction < 1:
        raise SettingsError(f"`fraction` is {fraction}, but must be between 0 and 1.")
    recording = recording_of(recording)
    episodes = _table(recording)
    count = len(episodes)
    if count < 2:
        raise DataError(f"{recording.path}: holds {counted(count, 'episode')}, which can't be split in two.")
    size = min(max(round(fraction * count), 1), count - 1)
    is_first = np.zeros(count, bool)
    is_first[_shuffled(count, seed)[:size]] = True
    how = {"how": "split", "fraction": fraction, "seed": seed}
    return _copied(recording, episodes, {to_train: is_first, to_validation: ~is_first}, how)


def filter_recording(
    recording: "Recording | DataLike",
    path: str | os.PathLike[str],
    *,
    min_return: float | None = None,
    max_return: float | None = None,
    min_length: int | None = None,
    max_length: int | None = None,
    where: str | None = None,
) -> Edited:
    """Write the whole episodes for which all that is asked for holds.

    Args:
        recording: What to choose from, or where it is (see `Recording.open`).
        path: The folder of the new recording.
        min_return: The sum of an episode's rewards, over all its agents, is at least this.
        max_return: It is at most this.
        min_length: The steps of the agent that has most are at least as many.
        max_length: They are at most as many.
        where: An expression over an episode's figures, such as ``return > 100 and mean(reward) > 0.5``; see
            `etude.recordings.where.Expression`.

    Raises:
        DataError: no episode is left, or something can't be read or written, or is there already.
        SettingsError: nothing is asked for, or the expression can't be read.
    """
    limits = {
        name: (low, high)
        for name, low, high in ((RETURN, min_return, max_return), (LENGTH, min_length, max_length))
        if low is not None or high is not None
    }
    if not limits and where is None:
        raise SettingsError("nothing is said about which episodes to keep: give min_return, max_length, where, ...")
    expression = None if where is None else Expression(where)
    recording = recording_of(recording)
    episodes = _table(recording, expression)
    kept = np.ones(len(episodes), bool)
    for name, (low, high) in limits.items():
        if name not in episodes.figures:
            raise DataError(f"{recording.path}: has no rewards, so that its episodes have no return.")
        values = episodes.figures[name]
        kept &= (values >= (-np.inf if low is None else low)) & (values <= (np.inf if high is None else high))
    if expression is not None and len(episodes):
        kept &= expression(episodes.figures)
    if not kept.any():
        raise DataError(f"{recording.path}: no episode is left of {len(episodes):,}. {_ranges(episodes)}")
    asked = {"min_return": min_return, "max_return": max_return, "min_length": min_length, "max_length": max_length}
    how = {name: value for name, value in {"how": "filter", **asked, "where": where}.items() if value is not None}
    return _copied(recording, episodes, {path: kept}, how)


def sample_recording(
    recording: "Recording | DataLike",
    path: str | os.PathLike[str],
    *,
    episodes: int | None = None,
    steps: int | None = None,
    seed: int = 0,
) -> Edited:
    """Write whole episodes that are drawn at random, none twice, in the order in which they stand.

    Args:
        recording: What to draw from, or where it is (see `Recording.open`).
        path: The folder of the new recording.
        episodes: How many; or
        steps: as many as have at least so many steps together, of all agents.
        seed: Which are drawn hangs on this, and on the order of the episodes.

    Raises:
        DataError: there are not as many; or something can't be read or written, or is there already.
        SettingsError: neither or both are given, or one is below 1.
    """
    if (episodes is None) == (steps is None):
        raise SettingsError("say how much to draw: `episodes` or `steps`, one of them.")
    if (episodes if episodes is not None else steps or 0) < 1:
        raise SettingsError("`episodes` or `steps` must be at least 1.")
    recording = recording_of(recording)
    there = _table(recording)
    order = _shuffled(len(there), seed)
    summed = np.cumsum(there.figures[STEPS][order])
    count = episodes if episodes is not None else int(np.searchsorted(summed, steps or 0)) + 1
    if count > len(there):
        raise DataError(
            f"{recording.path}: holds {counted(len(there), 'episode')} with {counted(there.num_steps, 'step')}, fewer "
            f"than {counted(episodes, 'episode') if episodes is not None else counted(steps or 0, 'step')}."
        )
    kept = np.zeros(len(there), bool)
    kept[order[:count]] = True
    asked = {"episodes": episodes} if episodes is not None else {"steps": steps}
    return _copied(recording, there, {path: kept}, {"how": "sample", **asked, "seed": seed})


def _table(recording: Recording, where: Expression | None = None) -> EpisodeTable:
    """The episodes of a recording, in pieces: memory is bounded by these and by a row for each episode.

    Raises:
        DataError: something can't be read.
        SettingsError: the expression names what is not there.
    """
    there = recording.columns
    if where is not None:
        where.check_names([name for name in FIGURES if name != RETURN or col.REWARD in there], there)
    wanted = {*(where.columns if where is not None else ()), col.REWARD} & set(there)
    table = EpisodeTable(where)
    for exp in recording.stream(columns=columns_of_pass(recording, sorted(wanted), there)):
        table.add(exp)
    return table


def _shuffled(count: int, seed: int) -> NDArray[np.int64]:
    if seed < 0:
        raise SettingsError(f"`seed` is {seed}, but must be at least 0.")
    return np.random.default_rng(seed).permutation(count)


def _ranges(episodes: EpisodeTable) -> str:
    if not len(episodes):
        return "It holds none."
    spans = [
        f"{name}s go from {episodes.figures[name].min():,.6g} to {episodes.figures[name].max():,.6g}"
        for name in (RETURN, LENGTH)
        if name in episodes.figures
    ]
    return f"Their {', and their '.join(spans)}."


def _copied(
    recording: Recording,
    episodes: EpisodeTable,
    to: Mapping[str | os.PathLike[str], NDArray[np.bool_]],
    how: Mapping[str, Any],
) -> Edited:
    """Write the episodes that each of ``to`` is True for to its folder."""
    if len(to) < (2 if how["how"] == "split" else 1):
        raise SettingsError("both parts were to be written to one folder: give two.")
    check_apart(list(to), [recording])
    check_free(list(to))
    meta = {**recording.meta, "edited_from": {"path": str(recording.path), "format": recording.format, **how}}
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                RecordingWriter(
                    path,
                    obs_space=recording.obs_space,
                    action_space=recording.action_space,
                    env=recording.env,
                    meta=meta,
                    columns=recording.columns,
                )
            )
            for path in to
        ]
        with told_where([str(writer.path) for writer in writers]):
            for exp in recording.stream():
                codes = episodes.codes(exp)
                for writer, kept in zip(writers, to.values(), strict=True):
                    writer.write(exp.select(kept[codes]))
    steps = episodes.figures[STEPS]
    written = tuple(
        Part(str(writer.path), int(kept.sum()), int(steps[kept].sum()))
        for writer, kept in zip(writers, to.values(), strict=True)
    )
    others = ~np.logical_or.reduce(list(to.values()))
    return Edited(written, int(others.sum()), int(steps[others].sum()))
