# SPDX-License-Identifier: Apache-2.0
"""Split, filter, sample and merge recordings by whole episodes, of any readable format, in bounded memory.

The data is read twice: once for the figures (statistics) of the episodes, and once to copy it. All steps of an episode
stay together, whichever agent they are of and wherever they are stored.
"""

import dataclasses
import operator
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.display import counted
from etude.errors import DataError, SettingsError
from etude.experience import Experience
from etude.experience.arrays import describe
from etude.files import AnyPath, InUseError, Lock, RemotePath, expanded, located, shown, sync
from etude.recordings.episodes import FIGURES, LENGTH, RETURN, STEPS, EpisodeTable
from etude.recordings.files import data_files
from etude.recordings.formats.custom import CustomSource
from etude.recordings.formats.source import Source
from etude.recordings.layout import shared_meta
from etude.recordings.opening import Places
from etude.recordings.recording import Recording, recording_of
from etude.recordings.where import Expression
from etude.recordings.writer import RecordingWriter
from etude.settings import IntFrom0, check_arguments

if TYPE_CHECKING:
    from etude.recordings.opening import DataLike


@dataclasses.dataclass(frozen=True)
class Part:
    """One recording that was written."""

    path: str
    episodes: int
    steps: int
    """The number of steps of all agents, without lookback."""

    def __str__(self) -> str:
        return f"{self.path}: {counted(self.episodes, 'episode')}, {counted(self.steps, 'step')}"


@dataclasses.dataclass(frozen=True)
class Edited:
    """The result of editing: what was written, and how much was left out."""

    written: tuple[Part, ...]
    left_out_episodes: int = 0
    left_out_steps: int = 0
    notes: tuple[str, ...] = ()
    """Other changes, as text."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        return {
            "written": [dataclasses.asdict(part) for part in self.written],
            "left_out": {"episodes": self.left_out_episodes, "steps": self.left_out_steps},
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        out = f"{counted(self.left_out_episodes, 'episode')}, {counted(self.left_out_steps, 'step')}"
        return "\n".join([*map(str, self.written), f"left out: {out}", *self.notes])


def columns_of_pass(recording: Recording, needed: Sequence[str], written: Sequence[str]) -> Sequence[str]:
    """Return the columns to read in a first pass that needs only ``needed``, before a pass that writes ``written``.

    What ``on_bad`` leaves out depends on the columns read. If it leaves out anything, both passes must read the same.
    """
    return written if recording.leaves_out else needed


def writer_like(recording: Recording, path: AnyPath, meta: Mapping[str, Any], **changed: Any) -> RecordingWriter:
    """A writer for data like that of ``recording``, with some options ``changed``."""
    header = recording.header
    # Columns by name, because a recording may lack some parts of its spaces.
    how = {"env": header.env, "columns": recording.columns, **changed}
    return RecordingWriter(path, obs_space=header.obs_space, action_space=header.action_space, meta=meta, **how)


@contextmanager
def atomic_folders(paths: Sequence[str | os.PathLike[str]]) -> Iterator[list[AnyPath]]:
    """Yield a folder to write into for each of ``paths``, where its files appear only if everything succeeds.

    Locally, these are hidden folders, which are renamed at the end. Behind URLs, files are written in place, and are
    removed if something fails.

    Raises:
        DataError: a folder can't be written, or another process is writing it.
    """
    with ExitStack() as stack:
        yield [stack.enter_context(_written_whole(located(path))) for path in paths]


@contextmanager
def _written_whole(path: AnyPath) -> Iterator[AnyPath]:
    if isinstance(path, RemotePath):
        try:
            yield path
        except BaseException:
            for file in data_files(path):
                file.unlink(missing_ok=True)
            raise
        return
    is_there = path.is_dir()  # it may be a mount point, which can't be replaced: then files are moved into it
    aside = (path / "x" if is_there else path).with_name(f".{path.name}.tmp")
    try:
        aside.parent.mkdir(parents=True, exist_ok=True)
        with Lock(aside.with_suffix(".lock")):
            shutil.rmtree(aside, ignore_errors=True)  # left by a killed process
            try:
                aside.mkdir()
                yield aside
                for inside in (*aside.rglob("*"), aside):
                    sync(inside)
                moves = [(one, path / one.name) for one in aside.iterdir()] if is_there else [(aside, path)]
                for source, target in moves:
                    os.replace(source, target)
                sync(aside.parent)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except InUseError as owner:
        raise DataError(f"{path}: is being written already ({owner}). Wait until that has ended.") from None
    except OSError as error:
        raise DataError(f"{path}: can't be written: {error}.") from error


def check_apart(to: Sequence[str | os.PathLike[str]], recordings: Sequence[Recording]) -> None:
    """Raise a DataError if an output folder holds a recording, or is, or is inside, an input or another output."""
    outs = [located(path) for path in to]
    places = [place for recording in recordings for place in _places(recording.path)]
    for out in outs:
        if any(_lies_in(out, place) and _lies_in(place, out) for place in places):
            raise DataError(f"{out}: is also an input, to which its files would be added. Choose another folder.")
        for other in (*places, *(one for one in outs if one is not out)):
            if _lies_in(out, other):
                raise DataError(
                    f"{out}: is inside {other}, so its files would become part of that. Choose another folder."
                )
        if files := data_files(out):
            raise DataError(
                f"{out}: holds a recording of {counted(len(files), 'file')} already. Choose another folder, or "
                "remove it."
            )


def _lies_in(path: AnyPath, folder: AnyPath) -> bool:
    if isinstance(path, Path) and isinstance(folder, Path):
        return path.resolve().is_relative_to(folder.resolve())
    both_remote = isinstance(path, RemotePath) and isinstance(folder, RemotePath)
    return both_remote and PurePosixPath(str(path)).is_relative_to(str(folder))


def _places(given: Any, filesystem: Any = None) -> list[AnyPath]:
    """The files and folders that a recording is read from, if any."""
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
    """Split a recording at random into two, by whole episodes.

    Args:
        recording: The recording to split, or where it is (see `Recording.open`).
        to_train: The folder of the first part.
        to_validation: The folder of the second part.
        fraction: The first part's share of the episodes, above 0 and below 1; each part gets at least one episode.
        seed: At least 0. The split depends on it and on the order of the episodes.

    Raises:
        DataError: there are fewer than two episodes; something can't be read or written; or a folder holds a recording.
        SettingsError: ``fraction`` or ``seed`` is out of range.
    """
    check_arguments("split_recording", fraction=(float, fraction), seed=(IntFrom0, seed))
    if not 0 < fraction < 1:
        raise SettingsError(f"`fraction` is {fraction}, but must be between 0 and 1.")
    recording = recording_of(recording)
    episodes = episode_table(recording)
    count = len(episodes)
    if count < 2:
        raise DataError(f"{recording.path}: holds {counted(count, 'episode')}, which can't be split in two.")
    size = min(max(round(fraction * count), 1), count - 1)
    is_first = np.zeros(count, bool)
    is_first[np.random.default_rng(seed).permutation(count)[:size]] = True
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
    """Write the whole episodes that meet all given conditions.

    Args:
        recording: The recording to choose from, or where it is (see `Recording.open`).
        path: The folder of the new recording.
        min_return: The minimum return of an episode: the sum of rewards over all its agents.
        max_return: The maximum return.
        min_length: The minimum length of an episode: the number of steps of the agent that has most.
        max_length: The maximum length.
        where: An expression over an episode's figures, such as ``return > 100 and mean(reward) > 0.5``; see
            `etude.recordings.where.Expression`.

    Raises:
        DataError: no episode is left; something can't be read or written; or the folder holds a recording.
        SettingsError: no condition is given, or the expression is invalid.
    """
    asked = {"min_return": min_return, "max_return": max_return, "min_length": min_length, "max_length": max_length}
    how = {name: value for name, value in {"how": "filter", **asked, "where": where}.items() if value is not None}
    if len(how) < 2:
        raise SettingsError("no condition says which episodes to keep: give min_return, max_length, where, ...")
    kinds = dict.fromkeys(asked, float) | {"where": str}
    check_arguments("filter_recording", **{name: (kinds[name], how[name]) for name in how.keys() & kinds.keys()})
    expression = None if where is None else Expression(where)
    recording = recording_of(recording)
    episodes = episode_table(recording, expression)
    kept = np.ones(len(episodes), bool)
    for limit, value in asked.items():
        if value is not None:
            figure = RETURN if limit.endswith("return") else LENGTH
            if figure not in episodes.figures:
                raise DataError(f"{recording.path}: has no rewards, so its episodes have no return.")
            kept &= (operator.ge if limit.startswith("min") else operator.le)(episodes.figures[figure], value)
    if expression is not None and len(episodes):
        kept &= expression(episodes.figures)
    if not kept.any():
        raise DataError(f"{recording.path}: no episode is left of {len(episodes):,}. {_ranges(episodes)}")
    return _copied(recording, episodes, {path: kept}, how)


def sample_recording(
    recording: "Recording | DataLike",
    path: str | os.PathLike[str],
    *,
    episodes: int | None = None,
    steps: int | None = None,
    seed: int = 0,
) -> Edited:
    """Write a random sample of whole episodes, without replacement, in their stored order.

    Args:
        recording: The recording to draw from, or where it is (see `Recording.open`).
        path: The folder of the new recording.
        episodes: The number of episodes, at least 1. Give either this or ``steps``.
        steps: Sample episodes until they have at least this many steps in total, over all agents; at least 1.
        seed: At least 0. The sample depends on it and on the order of the episodes.

    Raises:
        DataError: there are not enough; something can't be read or written; or the folder holds a recording.
        SettingsError: neither or both of ``episodes`` and ``steps`` are given, or an argument is out of range.
    """
    given = {name: (int, value) for name, value in (("episodes", episodes), ("steps", steps)) if value is not None}
    check_arguments("sample_recording", seed=(IntFrom0, seed), **given)
    if (episodes is None) == (steps is None):
        raise SettingsError("give the size of the sample as `episodes` or as `steps`, one of them.")
    if (episodes if episodes is not None else steps or 0) < 1:
        raise SettingsError("`episodes` or `steps` must be at least 1.")
    recording = recording_of(recording)
    there = episode_table(recording)
    order = np.random.default_rng(seed).permutation(len(there))
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
    """Return the figures of a recording's episodes, in one pass. Memory holds a piece and a few numbers per segment.

    Raises:
        DataError: something can't be read.
        SettingsError: the expression names something that does not exist.
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
    """Write to each folder in ``to`` the episodes for which its mask is True."""
    if len(to) < (2 if how["how"] == "split" else 1):
        raise SettingsError("both parts would be written to the same folder: give two.")
    check_apart(list(to), [recording])
    meta = {**recording.meta, "edited_from": {"path": str(recording.path), "format": recording.format, **how}}
    with atomic_folders(list(to)) as folders, ExitStack() as stack:
        writers = [stack.enter_context(writer_like(recording, folder, meta)) for folder in folders]
        for exp in recording.stream():
            codes = episodes.codes(exp)
            for writer, kept in zip(writers, to.values(), strict=True):
                writer.write(exp.select(kept[codes]))
    steps = episodes.figures[STEPS]
    written = tuple(Part(str(located(path)), int(kept.sum()), int(steps[kept].sum())) for path, kept in to.items())
    others = ~np.logical_or.reduce(list(to.values()))
    return Edited(written, int(others.sum()), int(steps[others].sum()))


def merge_recordings(recordings: "Sequence[Recording | DataLike]", path: str | os.PathLike[str]) -> Edited:
    """Write several recordings, one after the other, to a new one.

    Episodes whose id is already taken get a new id that ends with the number of their recording. Columns that are not
    in all recordings are left out. Numeric columns of different dtypes take a dtype that holds both, unless they belong
    to a space.

    Args:
        recordings: A list of recordings with equal spaces, of any format; or where they are (see `Recording.open`).
        path: The folder of the new recording.

    Raises:
        DataError: spaces or the shapes of a column differ; something can't be read or written; or the folder holds a
            recording.
        SettingsError: the list is empty or not a list.
    """
    if not isinstance(recordings, list | tuple):
        raise SettingsError(f"`recordings` is {shown(recordings)}, but must be a list of recordings or of their paths.")
    if not recordings:
        raise SettingsError("there is nothing to merge: give recordings.")
    opened = [recording_of(recording) for recording in recordings]
    for other in opened[1:]:
        remedy = f"Only recordings of equal spaces and units can be merged with {opened[0].path}."
        opened[0].header.check_alike(other.header, str(other.path), remedy)
    check_apart([path], opened)
    dtypes, left_out = _columns(opened)
    renamings, episodes = _renamings(opened, list(dtypes))
    env = opened[0].env if len({recording.env for recording in opened}) == 1 else None
    steps = 0
    with (
        atomic_folders([path]) as (folder,),
        writer_like(opened[0], folder, _meta(opened), env=env, columns=list(dtypes)) as writer,
    ):
        for recording, ids in zip(opened, renamings, strict=True):
            for exp in recording.stream(columns=list(dtypes)):
                writer.write(_fitted(exp, dtypes, ids))
                steps += int(exp.trained().sum())
    notes = [
        f"{counted(len(ids), 'episode')} of {recording.path} got new ids, because theirs were taken: "
        f"{next(iter(ids))!r} is now {next(iter(ids.values()))!r}, and so on."
        for recording, ids in zip(opened, renamings, strict=True)
        if ids
    ]
    notes += [f"left out the column `{name}`, which {where} does not have" for name, where in left_out.items()]
    if len({recording.env for recording in opened}) > 1:
        notes.append(f"the env is not stored, because it differs: {', '.join(str(r.env) for r in opened)}")
    return Edited((Part(str(located(path)), episodes, steps),), notes=tuple(notes))


def _renamings(recordings: Sequence[Recording], columns: Sequence[str]) -> tuple[list[dict[str, str]], int]:
    """For each recording, a mapping from taken ids to new ones; and the number of episodes in total."""
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


def _columns(recordings: Sequence[Recording]) -> tuple[dict[str, np.dtype[Any]], dict[str, str]]:
    """The dtypes of the columns that all recordings have; and for each other column, a recording that lacks it."""
    everyone = dict.fromkeys(name for recording in recordings for name in recording.columns)
    lacking = {name: next((str(r.path) for r in recordings if name not in r.columns), None) for name in everyone}
    common = [name for name, where in lacking.items() if where is None]
    dtypes: dict[str, np.dtype[Any]] = {}
    first: dict[str, NDArray[Any]] = {}
    for recording in recordings:
        exp = next(recording.stream(columns=common), None)
        if exp is None:
            raise DataError(f"{recording.path}: holds no steps: there is nothing to merge.")
        for name in common:
            column = np.asarray(exp.steps[name])
            known, like = dtypes.setdefault(name, column.dtype), first.setdefault(name, column[:0].copy())
            if describe(column) == describe(like):
                continue
            is_number = column.dtype.kind in "biuf" and known.kind in "biuf"
            is_of_a_space = col.is_under(name, col.OBS) or col.is_under(name, col.ACTION)
            if not is_number or column.shape[1:] != like.shape[1:] or is_of_a_space:
                raise DataError(
                    f"{recording.path}: column `{name}` is {describe(column)}, but {describe(like)} in "
                    f"{recordings[0].path}. Convert one of them."
                )
            dtypes[name] = np.result_type(known, column.dtype)
    return dtypes, {name: where for name, where in lacking.items() if where is not None}


def _fitted(exp: Experience, dtypes: Mapping[str, np.dtype[Any]], ids: Mapping[str, str]) -> Experience:
    if ids:
        exp = exp.with_segments(episode_id=[ids.get(name, name) for name in exp.segments.episode_id])
    return exp.with_steps(**{name: _as_dtype(name, exp.steps[name], dtype) for name, dtype in dtypes.items()})


def _as_dtype(name: str, values: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The values of a column as a dtype.

    Raises:
        DataError: they are whole numbers that it can't hold.
    """
    column = np.asarray(values)
    fitted = column.astype(dtype, copy=False)
    if column.dtype.kind in "iu" and dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            changed = np.flatnonzero(fitted.astype(column.dtype) != column)
        if len(changed):
            raise DataError(
                f"column `{name}` holds the whole number {column.reshape(-1)[changed[0]]}, which {dtype} can't hold, "
                "the dtype that the recordings share. Convert one of them, so that both have whole numbers of one kind."
            )
    return fitted


def _meta(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Merge metadata: entries that all have in common, and the others for each recording."""
    metas = [recording.meta for recording in recordings]
    same, rest = shared_meta(metas)
    if names := set.intersection(*(set(meta.get("inferred") or ()) for meta in metas)):
        same.setdefault("inferred", sorted(names))
    each = [
        {"path": str(recording.path), "format": recording.format, "env": recording.env, "meta": meta}
        for recording, meta in zip(recordings, rest, strict=True)
    ]
    return {**same, "merged_from": each}
