# SPDX-License-Identifier: Apache-2.0
"""A recording that all runners write at once, each its own files."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.envs import env_name
from etude.errors import DataError
from etude.experience import Experience
from etude.files import Lock, located
from etude.recordings.files import data_files
from etude.recordings.module_writers import Kind, ModuleWriters, folders_of
from etude.recordings.writer import ROW_GROUP_ROWS, claimed
from etude.urls import is_url

if TYPE_CHECKING:
    from etude.algorithms.acting import ActingAlgorithm


@dataclasses.dataclass(frozen=True, slots=True)
class RecordJob:
    """What runners record, and where."""

    path: str
    """The folder, as every node of the cluster finds it."""
    kinds: dict[str, Kind]
    """The spaces of each module."""
    options: dict[str, Any]
    """More for `ModuleWriters`."""
    tag: str
    """Put behind the ids of episodes, which others there may have."""


class RunnerRecorder:
    """Writes what one runner lives through.

    Args:
        job: What.
        number: Which runner this is.
        life: How often one has begun before as this runner: each has a file series of its own, so that none writes over
            the files of another.
    """

    def __init__(self, job: RecordJob, number: int, life: int) -> None:
        self._job = job
        prefix = f"runner{number}-{life}"
        self._writers = ModuleWriters(job.path, job.kinds, append=True, prefix=prefix, **job.options)
        self._taken = 0

    def take(self, parts: Mapping[str, Experience], meta: Mapping[str, Any] | None) -> None:
        """Record raw experience by module id; ``meta`` is kept with it from now on."""
        if meta is not None:
            self._writers.set_meta(meta)
        self._writers.take(parts, self._job.kinds, self._job.tag)
        self._taken += sum(exp.num_steps - int(exp.segments.lookback.sum()) for exp in parts.values())

    @property
    def unwritten(self) -> int:
        """Steps that were taken, and would be lost with this process."""
        return self._taken - self._writers.num_steps

    def flush(self) -> None:
        """Put on the disk what was taken, but for unfinished episodes that are held."""
        self._writers.state_dict()

    def close(self) -> None:
        """Put everything on the disk."""
        self._writers.close()


class SharedRecording:
    """The side of who acts by the runners: looks that the recording can be written, and keeps other runs away.

    Args:
        algorithm: What it is of.
        goes_on: It was begun by this run, before it was loaded.
    """

    def __init__(self, algorithm: "ActingAlgorithm[Any]", *, goes_on: bool) -> None:
        own, env = algorithm.config.record, algorithm.config.env
        assert own.path is not None
        assert env is not None
        self._algorithm = algorithm
        self._rows = 0
        self.meta = self._new_meta()
        """What is kept with the data."""
        self.version = 0
        """Of `meta`."""
        self.path = own.path if is_url(own.path) else os.path.abspath(own.path)
        self._options: dict[str, Any] = {
            "columns": algorithm.recorded,
            "layout": own.layout,
            "env": env_name(env),
            "compression": own.compression,
            "max_rows_per_file": own.max_rows_per_file,
            "max_file_size": own.max_file_size,
        }
        self._lock = self._claimed()
        self._check(append=own.append or goes_on)
        there = sum(len(data_files(folder)) for folder in self._folders())
        self._tag = f"+{there}" if there else ""

    def job(self) -> RecordJob:
        """What runners are to do."""
        return RecordJob(self.path, self._algorithm.recorded_spaces(), self._options | {"meta": self.meta}, self._tag)

    def count(self, rows: int) -> None:
        """So many more rows are recorded: now and then, there is a new `meta`."""
        self._rows += rows
        if self._rows >= ROW_GROUP_ROWS:
            self._rows = 0
            self.meta, self.version = self._new_meta(), self.version + 1

    def finish(self) -> None:
        """Let other runs record here."""
        if self._lock is not None:
            self._lock.release()

    def _claimed(self) -> Lock | None:
        """The lock against other runs whose runners record here; runners of one run have different prefixes."""
        root = located(self.path)
        if not isinstance(root, Path):
            return None
        try:
            root.mkdir(parents=True, exist_ok=True)
            return claimed(root, "runners")
        except OSError as error:
            raise DataError(f"{root}: can't write a recording here: {error}.") from error

    def _new_meta(self) -> dict[str, Any]:
        return self._algorithm.recording_meta(explore=True, seed=self._algorithm.config.seed)

    def _folders(self) -> list[Any]:
        root = located(self.path)
        folders = set(folders_of(self._algorithm.recorded_spaces()).values())
        return [root / folder if folder else root for folder in folders]

    def _check(self, *, append: bool) -> None:
        """Raise a DataError where there is a recording that nothing can be added to."""
        kinds = self._algorithm.recorded_spaces()
        ModuleWriters(self.path, kinds, append=append, **self._options, meta=self.meta).close()
