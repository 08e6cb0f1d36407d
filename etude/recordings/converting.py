# SPDX-License-Identifier: Apache-2.0
"""Convert any readable recording to Etude's format or another tool's."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.display import counted
from etude.errors import DataError, SettingsError
from etude.experience import Experience, Segments
from etude.experience.arrays import Index, where_rows
from etude.experience.experience import without_lookback
from etude.files import RemotePath
from etude.recordings.action_units import AS_THE_ENV_GOT
from etude.recordings.editing import atomic_folders, check_apart, columns_of_pass, episode_table, writer_like
from etude.recordings.episodes import STEPS, Assembler, EpisodeTable
from etude.recordings.formats.lerobot_writer import LeRobotWriter
from etude.recordings.formats.minari_writer import MinariWriter
from etude.recordings.formats.rllib_writers import RLlibEpisodesWriter, RLlibTableWriter
from etude.recordings.pieces import pieces
from etude.recordings.recording import Recording, recording_of
from etude.recordings.repair import without
from etude.recordings.writer import ROW_GROUP_ROWS
from etude.settings import check_arguments, suggestion
from etude.spaces import NamedDiscrete
from etude.urls import is_url, redacted

if TYPE_CHECKING:
    from etude.recordings.opening import DataLike


def episodes_of_one_agent(recording: Recording) -> EpisodeTable:
    """Return the figures of all episodes.

    Raises:
        DataError: an episode has several agents.
    """
    episodes = episode_table(recording, columns=columns_of_pass(recording, (), recording.columns))
    several = np.flatnonzero(episodes.figures["agents"] > 1)
    if len(several):
        named = ", ".join(map(repr, episodes.agents[:4])) + (" ..." if len(episodes.agents) > 4 else "")
        raise DataError(
            f"{recording.path}: episode {episodes.ids[several[0]]!r} has several agents ({named}), which this format "
            "can't hold: its readers expect a single agent. Keep Etude's format, or first "
            "write the steps of one agent, Recording.stream(filter=\"agent_id == 'left'\"), with a RecordingWriter."
        )
    return episodes


def whole_episodes(recording: Recording, episodes: EpisodeTable, format: str, notes: list[str]) -> Iterator[Experience]:
    """Iterate over all steps except lookback, in pieces of at most `MAX_ROWS` rows or one episode.

    Each episode is one segment. Episodes come in the order in which they become complete; pieces of incomplete ones are
    held in memory.

    Args:
        recording: The recording to read.
        episodes: The figures of its episodes.
        format: The name of the format that they are written in, for messages.
        notes: What is left out is noted here.

    Raises:
        DataError: an episode lacks steps in its middle, or has steps of several modules.
    """
    steps = episodes.figures[STEPS]
    assembler = Assembler(lengths=dict(zip(map(hash, episodes.ids), steps.tolist(), strict=True)))
    for exp in _trained(recording, notes):
        is_whole = exp.lengths == steps[episodes.codes(exp)]
        if is_whole.any():
            yield exp.select(is_whole)
        for whole in assembler.add(exp.select(~is_whole)):
            if whole.num_segments > 1:
                raise _not_whole(recording, whole.segments, whole.lengths, format)
            yield whole


def _not_whole(recording: Recording, parts: Segments, lengths: Index, format: str) -> DataError:
    """The error for an episode that is not a single segment."""
    gaps = np.flatnonzero(parts.t_start[1:] > parts.t_start[:-1] + lengths[:-1])
    what = f"has steps of several modules ({', '.join(map(repr, dict.fromkeys(parts.module_id.tolist())))})"
    if len(gaps):
        at = gaps[0]
        what = f"lacks the steps {parts.t_start[at] + lengths[at]} to {parts.t_start[at + 1] - 1}"
    return DataError(
        f"{recording.path}: episode {parts.episode_id[0]!r} {what}, but {format} can only hold whole episodes of one "
        "module. Leave it out with `etude data filter`, or write another format."
    )


def _trained(recording: Recording, notes: list[str]) -> Iterator[Experience]:
    """Yield pieces of all steps except lookback."""
    context = 0
    for exp in recording.stream(max_rows=MAX_ROWS):
        context += int(exp.segments.lookback.sum())
        yield without_lookback(exp)
    if context:
        notes.append(f"{context:,} rows are context only (lookback), mostly copies of other steps: left out")


MAX_ROWS: Final = 65_536
"""The maximum number of rows in memory, except for episodes that are longer or not yet complete."""


class Writer(Protocol):
    """Writes experience in another tool's format into a folder.

    Creating it raises for anything that the format can't hold; its notes are complete after `close`.
    """

    whole_episodes: bool
    """Whether each segment must be a complete, finished episode; if False, it may be any piece of one."""
    keeps_time: bool
    """Whether the format stores the time step of each step in its episode."""
    needs_final_obs: bool
    """Whether each segment must have its final observation, unless the episode terminated there."""
    notes: list[str]
    """What could not be kept, as text."""

    def write(self, exp: Experience) -> None:
        """Write some segments, which must not have lookback; see `needs_final_obs`."""

    def close(self) -> None:
        """Finish all files."""


WRITERS: Final[Mapping[str, Callable[[Path, Recording, list[str], Path, int | None], Writer]]] = {
    "rllib-episodes": lambda folder, source, columns, *_: RLlibEpisodesWriter(folder, source.header, columns),
    "rllib-table": lambda folder, source, columns, *_: RLlibTableWriter(folder, source.header, columns),
    "minari": lambda folder, source, columns, path, _: MinariWriter(folder, source.header, columns, path),
    "lerobot": lambda folder, source, columns, path, fps: LeRobotWriter(folder, source.header, columns, fps, path.name),
}


def exported(recording: Recording, folder: Path, format: str, path: Path, fps: int | None = None) -> list[str]:
    """Write all of ``recording`` into the empty ``folder``, which will be moved to ``path``; returns notes.

    ``fps`` is for LeRobot; see `etude.recordings.convert`.

    Raises:
        DataError: something can't be read, or the format can't hold it.
    """
    if col.REWARD not in recording.columns:
        raise DataError(f"{recording.path}: has no column `{col.REWARD}`, which {format} requires.")
    texts = _texts(recording)
    columns = [name for name in recording.columns if name not in texts]
    notes = [f"column `{name}` holds text, which {format} has no place for: left out" for name in texts]
    named = [name for name, leaf in recording.header.leaves().items() if isinstance(leaf, NamedDiscrete)]
    notes += [
        f"the names of `{name}`'s choices have no place in {format}: numbers" for name in named if format != "lerobot"
    ]
    if (units := recording.header.units) != AS_THE_ENV_GOT:
        notes.append(f"actions are written in {recording.action_space}, and {format} can't say that they are {units}")
    try:
        writer = WRITERS[format](folder, recording, columns, path, fps)
    except DataError as error:
        raise DataError(f"{recording.path}: {error}") from error
    changed, steps = Counter[str](), 0
    try:
        for piece in _pieces_of(recording, writer, format, notes):
            exp = piece.only([name for name in piece.steps if name not in texts])
            exp = _with_known_ends(exp, changed) if writer.needs_final_obs else exp
            steps += exp.num_steps
            if exp.num_segments:
                writer.write(exp)
    finally:
        writer.close()
    if not steps:
        raise nothing_in(recording)
    ends = [f"the final observation of {count:,} {what}" for what, count in changed.items() if count]
    return [*notes, *ends, *writer.notes]


def _pieces_of(recording: Recording, writer: Writer, format: str, notes: list[str]) -> Iterator[Experience]:
    """Yield the pieces to write; raises a DataError before the first one if an episode has several agents."""
    episodes = episodes_of_one_agent(recording)
    if not writer.whole_episodes:
        yield from _trained(recording, notes)
        return
    if unfinished := int((~episodes.figures["done"]).sum()):
        notes.append(
            f"{counted(unfinished, 'episode')} {'is' if unfinished == 1 else 'are'} neither terminated nor truncated: "
            f"marked as truncated, since {format} holds episodes that are done"
        )
    late = 0
    for exp in whole_episodes(recording, episodes, format, notes):
        late += int((exp.segments.t_start > 0).sum())
        yield exp.with_segments(truncated=exp.segments.truncated | ~exp.segments.done)
    if late and not writer.keeps_time:
        verb = "1 episode lacks its" if late == 1 else f"{late:,} episodes lack their"
        notes.append(f"{verb} first steps: {format} counts steps from 0")


def _texts(recording: Recording) -> list[str]:
    """The columns that hold strings."""
    for exp in recording.stream(max_rows=MAX_ROWS):
        return [name for name, column in exp.steps.items() if column.dtype == object]
    return []


def _with_known_ends(exp: Experience, changed: Counter[str]) -> Experience:
    """Return ``exp`` such that every segment has a final observation, and count the segments that are changed.

    If the episode terminated, nothing is learned from the final observation, so the one before is repeated. Otherwise,
    it would have to be invented, so the last step is dropped, and its observation becomes the final one.
    """
    lost = ~exp.segments.has_final_obs
    if not lost.any():
        return exp
    shorter = lost & ~exp.segments.terminated
    changed[_REPEATED] += int((lost & ~shorter).sum())
    changed[_LEFT_OUT] += int(shorter.sum())
    exp = Experience(exp.steps, exp.offsets, exp.segments, {**_last_obs(exp), **exp.final_obs})
    exp = without(exp, exp.at_ends(shorter), ())
    repeated, known = _last_obs(exp), exp.segments.has_final_obs
    final_obs = {name: where_rows(known, final, repeated[name]) for name, final in exp.final_obs.items()}
    return Experience(exp.steps, exp.offsets, exp.segments.replace(has_final_obs=np.ones(len(exp), bool)), final_obs)


_REPEATED: Final = "terminated segment(s) is unknown: the observation before is repeated, from which nothing is learned"
_LEFT_OUT: Final = "segment(s) that did not terminate is unknown: their last steps are left out"


def _last_obs(exp: Experience) -> dict[str, NDArray[Any]]:
    """The observation of the last step of each segment, by column."""
    return {name: column[exp.offsets[1:] - 1] for name, column in col.subtree(exp.steps, col.OBS).items()}


FORMATS: Final = ("etude", *WRITERS)


_FILES: Final = (".csv", ".tsv", ".json", ".jsonl", ".npz", ".hdf5", ".h5", ".arrow", ".feather")


def convert(
    recording: "Recording | DataLike", path: str | os.PathLike[str], format: str = "etude", *, fps: int | None = None
) -> Recording:
    """Write all of ``recording`` to a new recording at ``path``, a piece at a time, and return the new one.

    Args:
        recording: A recording of any readable format, or where it is (see `Recording.open`).
        path: A folder that does not exist or is empty. Its files appear only once everything has been written.
        format: ``etude``; ``rllib-episodes`` or ``rllib-table``, which RLlib reads; ``lerobot``; or ``minari``, where
            the folder must be named like a dataset, such as ``cartpole-v0``. The ``notes`` of the returned recording
            list what the format could not hold.
        fps: Steps per second, at least 1, for ``lerobot`` only, which stores a time with each step. None uses that of
            the converted LeRobot dataset, or 30.

    Raises:
        DataError: something can't be read; ``path`` is not empty, or is inside what is read; there is nothing to write;
            or the format can't hold the data, such as several agents, incomplete episodes, or one of the spaces.
        SettingsError: the format is unknown; ``path`` is named like a file of another kind, such as ``x.csv``; or
            ``fps`` is less than 1, or given for another format.
    """
    check_arguments("convert", format=(str, format), fps=(int | None, fps))
    if format not in FORMATS:
        known = f"known are {', '.join(FORMATS)}.{suggestion(format, FORMATS)}"
        raise SettingsError(f"format is {format!r}; {known}")
    if fps is not None and (format != "lerobot" or fps < 1):
        raise SettingsError(f"fps is {fps} for the format {format}; it must be at least 1, and is for lerobot only.")
    kind = os.path.splitext(str(path).rstrip("/"))[1].lower()
    if kind in _FILES:
        raise SettingsError(
            f"{redacted(str(path))}: is named like a {kind} file, but a folder is written. Choose a name without "
            f"`{kind}`; what pandas.read_parquet reads from the folder can be written as any file."
        )
    recording = recording_of(recording)
    if format != "etude":
        return _for_others(recording, path, format, fps)
    check_apart([path], [recording])
    # Like `stream`, but without copies: the writer copies.
    found = (piece for k in range(recording.num_parts) for piece in pieces(recording.part(k), ROW_GROUP_ROWS))
    first = next(found, None)
    if first is None:
        raise nothing_in(recording)
    meta = {"converted_from": {"path": str(recording.path), "format": recording.format}, **recording.meta}
    with atomic_folders([path]) as (folder,), writer_like(recording, folder, meta) as writer:
        writer.write(first)
        for exp in found:
            writer.write(exp)
    return Recording.open(path)


def _for_others(recording: Recording, where: str | os.PathLike[str], format: str, fps: int | None) -> Recording:
    """Write another tool's format, which must be in a local folder."""
    if isinstance(where, RemotePath) or is_url(os.fspath(where)):
        raise DataError(
            f"{redacted(str(where))}: {format} can only be written to a local folder. Write it to one, and copy that."
        )
    check_apart([where], [recording])
    path = Path(where)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DataError(f"{path}: already exists and is not empty. Choose another folder, or remove it.")
    with atomic_folders([path]) as (folder,):
        assert isinstance(folder, Path)
        notes = exported(recording, folder, format, path, fps)
    written = Recording.open(path)
    dropped = written.meta.get("dropped", {})  # RLlib's formats give no reasons
    for name in dropped:
        why = f": {dropped[name]}" if isinstance(dropped, dict) else ""
        notes.append(f"column `{name}` is written, but Etude does not read it{why}")
    written.notes = tuple(notes)
    return written


def nothing_in(recording: Recording) -> DataError:
    """The error for a recording without steps, with what ``on_bad`` left out."""
    why = f" All were left out: {recording.left_out_report()}" if recording.left_out_report() else ""
    return DataError(f"{recording.path}: holds no steps: there is nothing to convert.{why}")
