# SPDX-License-Identifier: Apache-2.0
"""New recordings out of others, by whole episodes: split, filter, sample. In bounded memory, of any format.

Each goes over the data twice: once for the figures of the episodes, and once to copy. All that is recorded of an
episode stays together, whichever agent it is of and wherever it stands.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError, SettingsError
from etude.experience import Experience
from etude.experience.arrays import describe
from etude.files import AnyPath, RemotePath, expanded, located, shown
from etude.recordings.episodes import FIGURES, LENGTH, RETURN, STEPS, EpisodeTable
from etude.recordings.files import data_files
from etude.recordings.formats.custom import CustomSource
from etude.recordings.formats.source import Source
from etude.recordings.opening import Places
from etude.recordings.recording import Recording, recording_of
from etude.recordings.where import Expression
from etude.recordings.writer import RecordingWriter
from etude.spaces import space_to_json

if TYPE_CHECKING:
    from etude.recordings.opening import DataLike


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


def columns_of_pass(recording: Recording, needed: Sequence[str], written: Sequence[str]) -> Sequence[str]:
    """The columns to read where ``needed`` would do, but ``written`` are written later.

    What ``on_bad`` leaves out hangs on the columns that are read: both passes must see the same.
    """
    return written if recording.leaves_out else needed


def writer_like(
    recording: Recording, path: str | os.PathLike[str], meta: Mapping[str, Any], **changed: Any
) -> RecordingWriter:
    """A writer of what ``recording`` holds, but for what is ``changed``."""
    header = recording.header
    # columns by name, since a recording may lack some of its spaces
    how = {"env": header.env, "columns": recording.columns, **changed}
    return RecordingWriter(path, obs_space=header.obs_space, action_space=header.action_space, meta=meta, **how)


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
    places = [place for recording in recordings for place in _places(recording.path)]
    for out in outs:
        if any(_lies_in(out, place) and _lies_in(place, out) for place in places):
            raise DataError(f"{out}: is what is to be read, to which its files would be added. Choose another folder.")
    pairs = [(out, place) for out in outs for place in places]
    pairs += [(out, other) for out in outs for other in outs if out is not other]
    for out, other in pairs:
        if _lies_in(out, other):
            raise DataError(f"{out}: lies in {other}, to which its files would belong then. Choose another folder.")


def check_free(to: Sequence[str | os.PathLike[str]]) -> None:
    """Raise a DataError where a recording is to be written to a folder that holds one."""
    for out in map(located, to):
        files = data_files(out)
        if files:
            raise DataError(
                f"{out}: holds a recording of {len(files)} files already. Choose another folder, or remove it."
            )


def _lies_in(path: AnyPath, folder: AnyPath) -> bool:
    if isinstance(path, Path) and isinstance(folder, Path):
        return path.resolve().is_relative_to(folder.resolve())
    both_remote = isinstance(path, RemotePath) and isinstance(folder, RemotePath)
    return both_remote and PurePosixPath(str(path)).is_relative_to(str(folder))


def _places(given: Any, filesystem: Any = None) -> list[AnyPath]:
    """The files and folders that a recording is read from, as far as it is read from such."""
    if isinstance(given, Places):
        return _places(given.given, given.filesystem)
    if isinstance(given, Source):
        return _places(given.data, given.filesystem)
    if isinstance(given, CustomSource):
        return _places(given.paths, given.filesystem)
    if isinstance(given, list | tuple):
        return [place for one in given for place in _places(one, filesystem)]
    return expanded(given, filesystem) if isinstance(given, str | os.PathLike | RemotePath) else []


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
    episodes = episode_table(recording)
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
    episodes = episode_table(recording, expression)
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
    there = episode_table(recording)
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


def episode_table(
    recording: Recording, where: Expression | None = None, columns: Sequence[str] | None = None
) -> EpisodeTable:
    """The episodes of a recording, in pieces: memory is bounded by these and by a row for each episode.

    Raises:
        DataError: something can't be read.
        SettingsError: the expression names what is not there.
    """
    there = recording.columns
    if where is not None:
        where.check_names([name for name in FIGURES if name != RETURN or col.REWARD in there], there)
    if columns is None:
        wanted = {*(where.columns if where is not None else ()), col.REWARD} & set(there)
        columns = columns_of_pass(recording, sorted(wanted), there)
    table = EpisodeTable(where)
    for exp in recording.stream(columns=columns):
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
        writers = [stack.enter_context(writer_like(recording, path, meta)) for path in to]
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
    renamings, episodes = _renamings(opened, list(dtypes))
    env = opened[0].env if len({recording.env for recording in opened}) == 1 else None
    steps = 0
    with (
        writer_like(opened[0], path, _meta(opened), env=env, columns=list(dtypes)) as writer,
        told_where([str(writer.path)]),
    ):
        for recording, ids in zip(opened, renamings, strict=True):
            for exp in recording.stream(columns=list(dtypes)):
                writer.write(_fitted(exp, dtypes, ids))
                steps += int(exp.trained().sum())
    notes = [
        f"{counted(len(ids), 'episode')} of {recording.path} got other ids, since theirs were there already: "
        f"{next(iter(ids))!r} is {next(iter(ids.values()))!r} now, and so on."
        for recording, ids in zip(opened, renamings, strict=True)
        if ids
    ]
    notes += [f"left out the column `{name}`, which {where} does not have" for name, where in left_out.items()]
    if len({recording.env for recording in opened}) > 1:
        notes.append(f"the env is not kept: they are of {', '.join(str(r.env) for r in opened)}")
    return Edited((Part(str(writer.path), episodes, steps),), notes=tuple(notes))


def _renamings(recordings: Sequence[Recording], columns: Sequence[str]) -> tuple[list[dict[str, str]], int]:
    """For each recording, the new ids by those that were there before; and how many episodes there are in all."""
    taken: set[str] = set()
    renamings = []
    for number, recording in enumerate(recordings, 1):
        own = dict.fromkeys(episode_table(recording, columns=columns_of_pass(recording, (), columns)).ids)
        ids = {}
        for name in own:
            if name in taken:
                new = f"{name}~{number}"
                while new in taken or new in own:
                    new += "~"
                ids[name] = new
        taken.update(ids.get(name, name) for name in own)
        renamings.append(ids)
    return renamings, len(taken)


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
