# SPDX-License-Identifier: Apache-2.0
"""A recording that all runners write together, each to its own files."""

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
    """The folder, at a path that all nodes share."""
    kinds: dict[str, Kind]
    """The spaces of each module, by module id."""
    options: dict[str, Any]
    """Further arguments of `ModuleWriters`."""
    tag: str
    """A suffix for episode ids, as other runs in the folder may use the same ones."""


class RunnerRecorder:
    """Writes the experience of one runner.

    Args:
        job: What to record, and where.
        number: The number of the runner.
        life: How many runners with this number began before. Each has its own series of files, so that none overwrites
            the files of another.
    """

    def __init__(self, job: RecordJob, number: int, life: int) -> None:
        self._job = job
        prefix = f"runner{number}-{life}"
        self._writers = ModuleWriters(job.path, job.kinds, append=True, prefix=prefix, **job.options)
        self._taken = 0

    def take(self, parts: Mapping[str, Experience], meta: Mapping[str, Any] | None) -> None:
        """Record raw experience by module id; ``meta`` is stored with it from now on."""
        if meta is not None:
            self._writers.set_meta(meta)
        self._writers.take(parts, self._job.kinds, self._job.tag)
        self._taken += sum(exp.num_steps - int(exp.segments.lookback.sum()) for exp in parts.values())

    @property
    def unwritten(self) -> int:
        """The steps that would be lost with this process."""
        return self._taken - self._writers.num_steps

    def flush(self) -> None:
        """Write the steps so far to disk, except unfinished episodes that are held."""
        self._writers.state_dict()

    def close(self) -> None:
        """Write everything to disk."""
        self._writers.close()


class SharedRecording:
    """The driver's side of the recording: checks that it can be written, and keeps other runs out.

    Args:
        algorithm: The algorithm that is recorded.
        goes_on: Whether this run began the recording before it was loaded.
    """

    def __init__(self, algorithm: "ActingAlgorithm[Any]", *, goes_on: bool) -> None:
        own, env = algorithm.config.record, algorithm.config.env
        assert own.path is not None
        assert env is not None
        self._algorithm = algorithm
        self._rows = 0
        self.meta = self._new_meta()
        """The metadata stored with the data."""
        self.version = 0
        """The version of `meta`."""
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
        """The runners' job."""
        return RecordJob(self.path, self._algorithm.recorded_spaces(), self._options | {"meta": self.meta}, self._tag)

    def count(self, rows: int) -> None:
        """Count newly recorded rows; now and then, this renews `meta`."""
        self._rows += rows
        if self._rows >= ROW_GROUP_ROWS:
            self._rows = 0
            self.meta, self.version = self._new_meta(), self.version + 1

    def finish(self) -> None:
        """Release the folder for other runs."""
        if self._lock is not None:
            self._lock.release()

    def _claimed(self) -> Lock | None:
        """The lock against other runs with runners; the runners of one run use different prefixes."""
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
        """Raise a DataError if there is a recording to which nothing can be appended."""
        kinds = self._algorithm.recorded_spaces()
        ModuleWriters(self.path, kinds, append=append, **self._options, meta=self.meta).close()
