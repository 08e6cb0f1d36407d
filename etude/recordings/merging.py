# SPDX-License-Identifier: Apache-2.0
"""Several recordings made one."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from etude import columns as col
from etude.errors import DataError, SettingsError
from etude.experience import Experience
from etude.experience.arrays import describe
from etude.files import shown
from etude.recordings.edited import Edited, Part, check_apart, check_free, columns_of_pass, counted, told_where
from etude.recordings.episodes import EpisodeTable
from etude.recordings.recording import Recording, recording_of
from etude.recordings.writer import RecordingWriter
from etude.spaces import space_to_json

if TYPE_CHECKING:
    from etude.recordings.opening import DataLike


def merge_recordings(recordings: "Sequence[Recording | DataLike]", path: str | os.PathLike[str]) -> Edited:
    """Write all of several recordings, one after the other, to a new one.

    Episodes whose ids were there before get others, with the recording's number behind them. Columns that are not in
    all recordings are left out; other columns of numbers that differ in type are made of the type that holds both.

    Args:
        recordings: Of equal spaces, of any format; or where they are (see `Recording.open`).
        path: The folder of the new recording.

    Raises:
        DataError: spaces differ, or a column has other shapes; something can't be read or written, or is there already.
        SettingsError: there are none, or they are not a list.
    """
    if not isinstance(recordings, list | tuple):
        raise SettingsError(f"`recordings` is {shown(recordings)}, but must be a list of recordings or of their paths.")
    if not recordings:
        raise SettingsError("there is nothing to merge: give recordings.")
    opened = [recording_of(recording) for recording in recordings]
    _check_spaces(opened)
    check_apart([path], opened)
    check_free([path])
    dtypes, left_out = _columns(opened)
    names = _Names()
    renamings = [names.of(recording, i + 1, list(dtypes)) for i, recording in enumerate(opened)]
    envs = {recording.env for recording in opened}
    first = opened[0]
    written: list[int] = []
    with (
        RecordingWriter(
            path,
            obs_space=first.obs_space,
            action_space=first.action_space,
            env=envs.pop() if len(envs) == 1 else None,
            meta=_meta(opened),
            columns=list(dtypes),
        ) as writer,
        told_where([str(writer.path)]),
    ):
        for recording, renamed in zip(opened, renamings, strict=True):
            for exp in recording.stream(columns=list(dtypes)):
                writer.write(_fitted(exp, dtypes, renamed.ids))
                written.append(int(exp.trained().sum()))
    notes = [
        f"{counted(len(renamed.ids), 'episode')} of {recording.path} got other ids, since theirs were there already: "
        f"{next(iter(renamed.ids.items()))[0]!r} is {next(iter(renamed.ids.values()))!r} now, and so on."
        for recording, renamed in zip(opened, renamings, strict=True)
        if renamed.ids
    ]
    notes += [f"left out the column `{name}`, which {where} does not have" for name, where in left_out.items()]
    if len({recording.env for recording in opened}) > 1:
        notes.append(f"the env is not kept: they are of {', '.join(str(r.env) for r in opened)}")
    total = sum(renamed.episodes for renamed in renamings)
    return Edited((Part(str(writer.path), total, sum(written)),), notes=tuple(notes))


@dataclasses.dataclass(frozen=True)
class _Renamed:
    episodes: int
    """In the recording."""
    ids: Mapping[str, str]
    """New ids by those that were there before."""


class _Names:
    """The ids of all episodes until now."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def of(self, recording: Recording, number: int, columns: Sequence[str]) -> _Renamed:
        """What is to be renamed in the next recording, of which these ``columns`` are written."""
        table = EpisodeTable()
        for exp in recording.stream(columns=columns_of_pass(recording, (), columns)):
            table.add(exp)
        own = dict.fromkeys(table.ids)
        ids = {}
        for name in own:
            if name in self._taken:
                new = f"{name}~{number}"
                while new in self._taken or new in own:
                    new += "~"
                ids[name] = new
        self._taken.update(ids.get(name, name) for name in own)
        return _Renamed(len(own), ids)


def _check_spaces(recordings: Sequence[Recording]) -> None:
    first = recordings[0]
    for other in recordings[1:]:
        for what, a, b in (
            ("obs", first.obs_space, other.obs_space),
            ("action", first.action_space, other.action_space),
        ):
            if space_to_json(a) != space_to_json(b):
                raise DataError(
                    f"{other.path}: its `{what}` space is {b}, but that of {first.path} is {a}. Only recordings of "
                    "equal spaces can be merged."
                )


def _columns(recordings: Sequence[Recording]) -> tuple[dict[str, np.dtype[Any]], dict[str, str]]:
    """The dtypes of the columns that all have; and for each other column, a recording that does not have it."""
    everyone = dict.fromkeys(name for recording in recordings for name in recording.columns)
    lacking = {name: next((str(r.path) for r in recordings if name not in r.columns), None) for name in everyone}
    common = [name for name, where in lacking.items() if where is None]
    dtypes: dict[str, np.dtype[Any]] = {}
    shapes: dict[str, str] = {}
    for recording in recordings:
        exp = next(recording.stream(columns=common), None)
        if exp is None:
            raise DataError(f"{recording.path}: holds no steps, so that there is nothing to merge.")
        for name in common:
            column = np.asarray(exp.steps[name])
            known = dtypes.setdefault(name, column.dtype)
            shape = shapes.setdefault(name, describe(column))
            if describe(column) == shape:
                continue
            is_number = column.dtype.kind in "biuf" and known.kind in "biuf"
            if not is_number or column.shape[1:] != _shape(shape) or _is_of_a_space(name):
                raise DataError(
                    f"{recording.path}: column `{name}` is {describe(column)}, but {shape} in {recordings[0].path}. "
                    "Convert one of them."
                )
            dtypes[name] = np.result_type(known, column.dtype)
    return dtypes, {name: where for name, where in lacking.items() if where is not None}


def _shape(described: str) -> tuple[int, ...]:
    inside = described.partition("[")[2].rstrip("]")
    return tuple(int(size) for size in inside.split(",")) if inside else ()


def _is_of_a_space(name: str) -> bool:
    return col.is_under(name, col.OBS) or col.is_under(name, col.ACTION)


def _fitted(exp: Experience, dtypes: Mapping[str, np.dtype[Any]], ids: Mapping[str, str]) -> Experience:
    segments = exp.segments
    if ids:
        segments = segments.replace(episode_id=[ids.get(name, name) for name in segments.episode_id])
    steps = {name: np.asarray(exp.steps[name]).astype(dtype, copy=False) for name, dtype in dtypes.items()}
    return Experience(steps, exp.offsets, segments, exp.final_obs)


def _meta(recordings: Sequence[Recording]) -> dict[str, Any]:
    """What all say alike, and of each what it says else."""
    first = recordings[0].meta
    alike = {name: value for name, value in first.items() if all(r.meta.get(name) == value for r in recordings[1:])}
    each = [
        {
            "path": str(recording.path),
            "format": recording.format,
            "env": recording.env,
            "meta": {name: value for name, value in recording.meta.items() if name not in alike},
        }
        for recording in recordings
    ]
    return {**alike, "merged_from": each}
