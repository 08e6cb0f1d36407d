# SPDX-License-Identifier: Apache-2.0
"""What an algorithm lives through while it trains, kept as a recording."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from etude.envs import env_name
from etude.errors import SettingsError
from etude.experience import Experience
from etude.settings import settings

if TYPE_CHECKING:
    from etude.algorithms.base import Algorithm
    from etude.recordings.module_writers import ModuleWriters


@settings
class RecordConfig:
    """Whether and how the steps of training are recorded."""

    main_setting: ClassVar[str] = "path"

    path: str | None = None
    """The folder of the recording; none records nothing. Where modules have different spaces, each has a folder of its
    name there."""

    layout: Literal["episodes", "table"] = "episodes"
    """`episodes`: written when they end, each as a whole; unfinished ones are held in memory, up to 256 MiB. `table`:
    steps are written as they come."""

    compression: str | Mapping[str, str] | None = None
    """A codec for all columns, such as `zstd:3`, or codecs by column: `obs/camera=zstd:3,obs=lz4`. None: LZ4 for
    numbers, Zstandard for images."""

    max_rows_per_file: int = 1_048_576
    """A file holds at most this many steps."""

    max_file_size: int = 268_435_456
    """A file is closed once it has this many bytes."""

    append: bool = False
    """Add to the recording that is there, with other ids of episodes; else one that is there is an error. A resumed run
    always goes on with its own."""

    def __post_init__(self) -> None:
        for name in ("max_rows_per_file", "max_file_size"):
            if getattr(self, name) < 1:
                raise SettingsError(f"`record.{name}` is {getattr(self, name)}, but must be at least 1.")
        if self.compression is not None:
            from etude.recordings.compression import codecs  # needs pyarrow, which acting does not

            codecs(self.compression)


class Recorder:
    """Keeps what an algorithm's modules live through, where its settings ask for it.

    Args:
        settings: Of the algorithm.
    """

    def __init__(self, settings: RecordConfig) -> None:
        self.settings = settings
        self.is_on = settings.path is not None
        """Whether anything is recorded."""
        self._writers: ModuleWriters | None = None
        self._state: Mapping[str, Any] | None = None
        """Where a loaded run stood, or this one when it was closed."""

    def open(self, algorithm: "Algorithm[Any]") -> None:
        """Make the files' folder, if it is not there yet, so that what is wrong with it is told before training.

        Raises:
            DataError: it can't be recorded to.
        """
        if self._writers is not None or self.settings.path is None:
            return
        from etude.algorithms.recording import kinds_of
        from etude.recordings.module_writers import ModuleWriters

        own, env = self.settings, algorithm.config.env
        self._writers = ModuleWriters(
            self.settings.path,
            kinds_of(algorithm),
            columns=algorithm.recorded,
            layout=own.layout,
            append=own.append,
            state=self._state,
            env=None if env is None else env_name(env),
            meta=_meta(algorithm),
            compression=own.compression,
            max_rows_per_file=own.max_rows_per_file,
            max_file_size=own.max_file_size,
        )

    def take(self, algorithm: "Algorithm[Any]", parts: Mapping[str, Experience], tag: str = "") -> None:
        """Record raw experience by module id, where that is wanted; ``tag`` is put behind the ids of episodes."""
        if not self.is_on:
            return
        from etude.algorithms.recording import kinds_of

        self.open(algorithm)
        assert self._writers is not None
        self._writers.take(parts, kinds_of(algorithm), tag)
        if self._writers.meta_is_due:
            self._set_meta(algorithm)

    def _set_meta(self, algorithm: "Algorithm[Any]") -> None:
        if self._writers is not None:
            self._writers.set_meta(_meta(algorithm))

    def state_dict(self, algorithm: "Algorithm[Any]") -> Any:
        """Where it stands; all but unfinished episodes is on the disk then."""
        if self._writers is None:
            return self._state
        self._set_meta(algorithm)
        return self._writers.state_dict()

    def load_state_dict(self, algorithm: "Algorithm[Any]", state: Mapping[str, Any] | None) -> None:
        """Go on from `state_dict`, when there is next something to record."""
        was_open = self._writers is not None
        self.close(algorithm)
        own = self._state if was_open else None
        if own is None or (state is not None and state["path"] == own["path"]):  # else it is of another recording
            self._state = state

    def close(self, algorithm: "Algorithm[Any]") -> None:
        """Put everything on the disk.

        Raises:
            DataError: a write failed.
        """
        if self._writers is not None:
            self._set_meta(algorithm)
            writers, self._writers = self._writers, None
            self._state = writers.close()


def _meta(algorithm: "Algorithm[Any]") -> dict[str, Any]:
    from etude.algorithms.recording import meta_of

    # what acts in training explores; what only learns from data acts in evaluations
    return meta_of(algorithm, explore=hasattr(algorithm.config, "num_envs"), seed=algorithm.config.seed)
