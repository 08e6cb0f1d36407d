# SPDX-License-Identifier: Apache-2.0
"""What an algorithm lives through or plays, kept as a recording."""

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

# Recordings need pyarrow, which acting does not: they are imported where they are used.


class Recorder:
    """Keeps what an algorithm's modules live through, where its settings ask for it.

    Args:
        settings: Of the recording.
        columns: The columns of steps that are kept.
        env: Where the modules act, for the recording's header.
        kinds: Gives the spaces of observations and actions as they are recorded, by module id.
        meta: Gives what else is kept in the recording's header, as it is now.
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
        """Where a loaded run stood, or this one when it was closed."""

    def open(self) -> None:
        """Make the files' folder, if it is not there yet, so that what is wrong with it is told before training.

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
        """Record raw experience by module id, where that is wanted; ``tag`` is put behind the ids of episodes."""
        if not self.is_on:
            return
        self.open()
        assert self._writers is not None
        self._writers.take(parts, self._kinds(), tag)
        if self._writers.meta_is_due:
            self._writers.set_meta(self._meta())

    def state_dict(self) -> Any:
        """Where it stands; all but unfinished episodes is on the disk then."""
        if self._writers is None:
            return self._state
        self._writers.set_meta(self._meta())
        return self._writers.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from `state_dict`, when there is next something to record."""
        was_open = self._writers is not None
        self.close()
        own = self._state if was_open else None
        if own is None or (state is not None and state["path"] == own["path"]):  # else it is of another recording
            self._state = state

    def close(self) -> None:
        """Put everything on the disk.

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
        runner: Plays.
        folder: Of the recording.
        num_episodes: How many.
        kinds: The spaces of observations and actions as they are recorded, by module id.
        explore: Draw actions; else take the most likely ones.
        updates: The gradient steps that made the modules.
        written: As `ModuleWriters` takes them.

    Raises:
        DataError: it can't be recorded to.
    """
    from etude.recordings.module_writers import ModuleWriters

    try:
        # whole episodes come, so that none need be held; and equal seeds give equal ids
        writers = ModuleWriters(folder, kinds, layout="table", is_run=False, **written)
    except BaseException:
        runner.close()
        raise
    try:
        return play(runner, num_episodes, explore=explore, updates=updates, to=lambda parts: writers.take(parts, kinds))
    finally:
        writers.close()


def seed_after(folder: str, kinds: Mapping[str, Spaces], seed: int) -> int:
    """A seed for episodes that are added to a recording: another than ``seed`` where some are there already."""
    from etude.recordings import Recording
    from etude.recordings.module_writers import folders_of

    inner = next(iter(folders_of(kinds).values()))
    try:
        there = Recording.open(located(folder) / inner if inner else located(folder)).num_episodes
    except DataError:
        there = 0  # if something is there that can't be read, the writer says so
    return int(np.random.SeedSequence([seed, there]).generate_state(1)[0]) if there else seed


def learned_by_connectors(policies: Mapping[str, Policy]) -> dict[str, Any]:
    """What the connectors of policies have learned, as JSON data, by module id; of those that learn."""
    return {name: state_to_json(own.connectors) for name, own in policies.items() if learns(own.connectors)}
