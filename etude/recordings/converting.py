# SPDX-License-Identifier: Apache-2.0
"""From any recording that can be read to one of Etude's, or to another tool's format."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from etude.errors import DataError, SettingsError
from etude.files import InUseError, Lock, RemotePath, sync
from etude.recordings.edited import check_apart, check_free
from etude.recordings.exporting import WRITERS, exported
from etude.recordings.pieces import pieces
from etude.recordings.recording import Recording, recording_of
from etude.recordings.writer import ROW_GROUP_ROWS, RecordingWriter
from etude.settings import nearest
from etude.urls import is_url, redacted

if TYPE_CHECKING:
    from etude.recordings.opening import DataLike

FORMATS: Final = ("etude", *WRITERS)


def convert(
    recording: "Recording | DataLike", path: str | os.PathLike[str], format: str = "etude", *, fps: int | None = None
) -> Recording:
    """Write all of ``recording``, a piece at a time, to a new one at ``path``; gives that one.

    Args:
        recording: What to write: one of any kind that can be read, or where it is (see `Recording.open`).
        path: A folder, which must not hold anything yet. Another tool's format appears there whole or not at all; of
            Etude's own, each file.
        format: ``etude``; ``rllib-episodes`` or ``rllib-table``, which RLlib reads; ``lerobot``; or ``minari``, where
            the folder's name must be that of a dataset, such as ``cartpole-v0``. What such a format has no place for is
            said in the ``notes`` of the recording that is given.
        fps: Steps a second, at least 1, for ``lerobot`` alone, which keeps a time with each step. None is that of the
            LeRobot dataset that is converted, or 30.

    Raises:
        DataError: something can't be read, there is something already, nothing to write, or what the format can't
            hold: several agents, episodes that lack steps, a space; or ``path`` lies in what is read.
        SettingsError: the format is unknown; or ``fps`` is no such number, or not for this format.
    """
    if format not in FORMATS:
        near = nearest(format, FORMATS)
        hint = f" Nearest: `{near}`." if near else ""
        raise SettingsError(f"format is {format!r}; known are {', '.join(FORMATS)}.{hint}")
    if fps is not None and (format != "lerobot" or fps < 1):
        raise SettingsError(f"fps is {fps} for the format {format}; give a number of at least 1, for lerobot alone.")
    recording = recording_of(recording)
    if format != "etude":
        return _for_others(recording, path, format, fps)
    check_apart([path], [recording])
    check_free([path])
    # As `stream` gives them, but not copied: the writer does that.
    found = (piece for k in range(recording.num_parts) for piece in pieces(recording.part(k), ROW_GROUP_ROWS))
    first = next(found, None)
    if first is None:
        raise DataError(f"{recording.path}: holds no steps, so that there is nothing to convert.")
    meta = {"converted_from": {"path": str(recording.path), "format": recording.format}, **recording.meta}
    with RecordingWriter(
        path,
        obs_space=recording.obs_space,
        action_space=recording.action_space,
        env=recording.env,
        meta=meta,
        columns=recording.columns,  # which may lack some of the spaces
    ) as writer:
        writer.write(first)
        for exp in found:
            writer.write(exp)
    return Recording.open(path)


def _for_others(recording: Recording, where: str | os.PathLike[str], format: str, fps: int | None) -> Recording:
    """Write another tool's format beside its folder, and then all of it to its name at one stroke."""
    if isinstance(where, RemotePath) or is_url(os.fspath(where)):
        raise DataError(
            f"{redacted(str(where))}: {format} is written to local folders alone. Write it to one, and copy that."
        )
    check_apart([where], [recording])
    path = Path(where)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DataError(f"{path}: is there already, and is not empty. Choose another folder, or remove it.")
    aside = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = Lock(path.with_name(f".{path.name}.lock"))
    except OSError as error:
        raise DataError(f"{path}: can't be written: {error}.") from error
    except InUseError as owner:
        raise DataError(f"{path}: is being written already ({owner}). Wait until that has ended.") from None
    try:
        shutil.rmtree(aside, ignore_errors=True)  # what a killed writer left
        aside.mkdir()
        notes = exported(recording, aside, format, path, fps)
        for inside in (*aside.rglob("*"), aside):
            sync(inside)
        if path.exists():
            path.rmdir()
        os.replace(aside, path)
        sync(path.parent)
    except OSError as error:
        raise DataError(f"{path}: can't be written: {error}.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        lock.release()
    written = Recording.open(path)
    written.notes = tuple(notes)
    return written
