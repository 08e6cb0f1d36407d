# SPDX-License-Identifier: Apache-2.0
"""Recording of what an algorithm collects or plays."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from etude.algorithms.config import RecordConfig
from etude.algorithms.play import play
from etude.algorithms.results import Evaluation
from etude.connectors.pipeline import learns, state_to_json
from etude.envs import EnvLike, env_name
from etude.errors import DataError
from etude.experience import Experience
from etude.files import located
from etude.policies import Policy
from etude.runners import Runner
from etude.spaces import Spaces

if TYPE_CHECKING:
    from etude.recordings.module_writers import ModuleWriters

# Recordings need pyarrow, which acting does not, so they are imported on use.


class Recorder:
    """Records what an algorithm's modules experience, if its settings ask for it.

    Args:
        settings: Settings of the recording.
        columns: The step columns to keep.
        env: The env in which the modules act, for the recording's metadata.
        kinds: Returns the spaces of observations and actions as they are recorded, by module id.
        meta: Returns the current metadata of the recording.
    """

    def __init__(
        self,
        settings: RecordConfig,
        columns: tuple[str, ...],
        env: EnvLike | None,
        kinds: Callable[[], Mapping[str, Spaces]],
        meta: Callable[[], dict[str, Any]],
    ) -> None:
        self.settings = settings
        self.is_on = settings.path is not None
        """Whether anything is recorded."""
        self._columns, self._env, self._kinds, self._meta = columns, env, kinds, meta
        self._writers: ModuleWriters | None = None
        self._state: Mapping[str, Any] | None = None
        """The state of a loaded run's writers, or of this one's when they were closed."""

    def open(self) -> None:
        """Make the recording's folder if necessary, so that problems are raised before training.

        Raises:
            DataError: it can't be recorded to.
        """
        if self._writers is not None or self.settings.path is None:
            return
        from etude.recordings.module_writers import ModuleWriters

        own = self.settings
        self._writers = ModuleWriters(
            self.settings.path,
            self._kinds(),
            columns=self._columns,
            layout=own.layout,
            append=own.append,
            state=self._state,
            env=None if self._env is None else env_name(self._env),
            meta=self._meta(),
            compression=own.compression,
            max_rows_per_file=own.max_rows_per_file,
            max_file_size=own.max_file_size,
        )

    def take(self, parts: Mapping[str, Experience], tag: str = "") -> None:
        """Record raw experience by module id, if recording is on; ``tag`` is appended to the ids of episodes."""
        if not self.is_on:
            return
        self.open()
        assert self._writers is not None
        self._writers.take(parts, self._kinds(), tag)
        if self._writers.meta_is_due:
            self._writers.set_meta(self._meta())

    def state_dict(self) -> Any:
        """The state of the writers; all but unfinished episodes is then on disk."""
        if self._writers is None:
            return self._state
        self._writers.set_meta(self._meta())
        return self._writers.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state_dict` returned; the files are opened with the next recorded step."""
        was_open = self._writers is not None
        self.close()
        own = self._state if was_open else None
        if own is None or (state is not None and state["path"] == own["path"]):  # else of another recording
            self._state = state

    def close(self) -> None:
        """Write everything to disk.

        Raises:
            DataError: a write failed.
        """
        if self._writers is not None:
            self._writers.set_meta(self._meta())
            writers, self._writers = self._writers, None
            self._state = writers.close()


def record(
    runner: Runner,
    folder: str,
    num_episodes: int,
    kinds: Mapping[str, Spaces],
    *,
    explore: bool,
    updates: int,
    **written: Any,
) -> Evaluation:
    """Play whole episodes, write them to a recording, and close the runner.

    Args:
        runner: Plays the episodes.
        folder: The folder of the recording.
        num_episodes: Number of episodes.
        kinds: The spaces of observations and actions as they are recorded, by module id.
        explore: Sample actions; otherwise take the most likely ones.
        updates: Gradient steps that the modules had made.
        written: Arguments of `ModuleWriters`.

    Raises:
        DataError: it can't be recorded to.
    """
    from etude.recordings.module_writers import ModuleWriters

    try:
        # episodes arrive whole, so the table layout holds none back; is_run=False lets equal seeds give equal ids
        writers = ModuleWriters(folder, kinds, layout="table", is_run=False, **written)
    except BaseException:
        runner.close()
        raise
    try:
        return play(runner, num_episodes, explore=explore, updates=updates, to=lambda parts: writers.take(parts, kinds))
    finally:
        writers.close()


def seed_after(folder: str, kinds: Mapping[str, Spaces], seed: int) -> int:
    """A seed for episodes that are added to a recording: it differs from ``seed`` if the recording has episodes."""
    from etude.recordings import Recording
    from etude.recordings.module_writers import folders_of

    inner = next(iter(folders_of(kinds).values()))
    try:
        there = Recording.open(located(folder) / inner if inner else located(folder)).num_episodes
    except DataError:
        there = 0  # the writer raises if something unreadable is there
    return int(np.random.SeedSequence([seed, there]).generate_state(1)[0]) if there else seed


def learned_by_connectors(policies: Mapping[str, Policy]) -> dict[str, Any]:
    """What the connectors of policies have learned, as JSON data, by module id; only policies with such connectors."""
    return {name: state_to_json(own.connectors) for name, own in policies.items() if learns(own.connectors)}
