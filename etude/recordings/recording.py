# SPDX-License-Identifier: Apache-2.0
"""Read a recording as a whole, as a stream, or as training batches. Neither the env nor torch is needed."""

import dataclasses
import logging
import re
import reprlib
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
from gymnasium import spaces

from etude import columns as col
from etude.columns import Columns
from etude.display import counted, table
from etude.errors import DataError, printable
from etude.experience import Experience
from etude.files import AnyPath
from etude.recordings.action_units import ACTIONS, BY_RLLIB, before_mapping
from etude.recordings.batches import (
    DERIVED,
    Groups,
    Prefetched,
    RowPool,
    SegmentPool,
    T,
    batches_of,
    cut_segments,
    steps_of,
)
from etude.recordings.episodes import counts_of
from etude.recordings.format import Problem, choose_columns
from etude.recordings.layout import Header
from etude.recordings.opening import (
    GivenSpaces,
    check_stated,
    has_source,
    opened,
    spaced,
)
from etude.recordings.pieces import copied, gathered, in_order, pieces
from etude.recordings.screening import OnBad, Report, Screened, check_mode, validate
from etude.spaces import Space, leaves

if TYPE_CHECKING:
    from etude.recordings.opening import DataLike

_log = logging.getLogger("etude.recordings")


class Recording(Screened):
    """A recording on disk, in Etude's format or another tool's; open one with `Recording.open`.

    For Etude's format, only file footers are read until data is requested. All methods but `read` hold at most one
    part in memory: a row group of up to 65,536 rows, or about 64 MiB where rows are large. In other formats, a part
    also has at most as many rows, but at least one episode; a Parquet row group that contains it is decoded as a whole.
    """

    is_in_memory = False

    notes: tuple[str, ...] = ()
    """Notes on what could not be stored, if this recording was returned by `etude.recordings.convert`."""
    _num_steps: int | None = None
    _num_episodes: int | None = None

    @classmethod
    def open(
        cls,
        path: "DataLike",
        *,
        on_bad: OnBad | None = "strict",
        filesystem: Any = None,
        obs_space: Space | None = None,
        action_space: Space | None = None,
    ) -> "Recording":
        """Open the recording at ``path``: a folder, one of its files, or a table described by a `Source`.

        A path may be a URL (``s3://bucket/run``) or a glob (``runs/*/data``). A list of paths is read as one recording;
        its episode ids then start with the index of the recording in the list (``0-``), unless all paths are files of
        one kind. A folder that contains several of Etude's recordings is read in the same way. ``filesystem`` is the
        pyarrow or fsspec file system of the paths; by default, the URL's, or the local one.

        The format is detected from the contents: Etude's, RLlib's (episodes, tables, JSON), Minari's, LeRobot's, or
        HDF5 and NPZ files as D4RL stores them.

        ``on_bad`` says what to do with bad data (`etude.recordings.screening`): ``strict`` raises when it is read,
        ``repair`` repairs what it can and leaves out the rest, ``skip`` leaves out whole segments; `left_out` counts
        the rows. None does not check values. In every mode, duplicate steps raise an error or are left out.

        ``obs_space`` and ``action_space`` are for data that does not state its spaces: tables, HDF5 and NPZ files,
        LeRobot datasets, RLlib's tables and JSON. Without them, they are inferred from the numbers, without bounds.
        RLlib's episodes state an action space, but one may be given, too, to say in which units their actions are: the
        space before RLlib maps actions from [-1, 1] to the env's bounds, or, if RLlib did not map them, the stated one.

        Raises:
            DataError: nothing is there, it is empty or of an unknown format, a file is broken or missing, or the files
                do not belong together; or the data does not fit a given space, or states another one. The message names
                the file and what to do.
        """
        recording = cls.open_with(path, on_bad, lambda: (obs_space, action_space), filesystem)
        check_stated(recording.path, recording._units, lambda: (obs_space, action_space))
        return recording

    @classmethod
    def open_with(
        cls,
        path: "DataLike",
        on_bad: OnBad | None,
        given: GivenSpaces,
        filesystem: Any = None,
        *,
        of_env: bool = False,
    ) -> "Recording":
        """Like `open`, but the spaces are the result of ``given``, which is called only if they are needed.

        ``of_env`` says whether they are the env's. Data that states its own spaces keeps them.
        """
        check_mode(on_bad)
        faults: list[Problem] | None = None if on_bad in (None, "strict") else []
        place, units = opened(path, filesystem, faults, given, of_env=of_env)
        return cls(place, units, on_bad, faults or ())

    def with_spaces(self, given: GivenSpaces, *, of_env: bool) -> "Recording":
        """Return a recording of the same data in which inferred spaces are replaced by those of ``given``, if any.

        Returns the recording itself if there is nothing to replace. Faults found by either recording count for both.
        ``of_env`` says whether the spaces are the env's.
        """
        lacking, own = self._units.lacking, self._units.given
        found = dict(zip((col.OBS, col.ACTION), given(), strict=True)) if lacking else {}
        found = {root: found[root] for root in lacking if found[root] is not None}
        if not found:
            return self
        if has_source(self.path):  # a table, whose values are converted according to its spaces
            found |= {root: self.header.spaces[root] for root in own}
            asked, of_env = (found.get(col.OBS), found.get(col.ACTION)), of_env and col.ACTION not in own
            new = type(self).open_with(self.path, self._mode, lambda: asked, of_env=of_env)
        else:
            units = spaced(self._units.members, lacking, found, of_env=of_env)
            units.given |= own
            units.claimed |= self._units.claimed
            new = type(self)(self.path, units, self._mode, self._faults)
        new.share_findings(self)
        return new

    def set_env(self, env: str, given: GivenSpaces) -> None:
        """Set the env's id, unless the recording states one. ``given`` returns the env's spaces.

        Raises:
            DataError: the recording states other spaces than the env's.
        """
        check_stated(self.path, self._units, given, env)
        self._units.header = dataclasses.replace(self.header, env=self.env or env)

    def warn_of_mapped_actions(self) -> None:
        """Warn if actions may be those of a policy in [-1, 1], before they were mapped to the env's bounds.

        This may be so in RLlib's episodes, and in data whose first actions reach the ends of [-1, 1], but not further.
        """
        found = leaves(self.action_space, col.ACTION).values()
        boxes = [leaf for leaf in found if isinstance(leaf, spaces.Box) and leaf.is_bounded()]
        others = [box for box in boxes if not ((box.low == -1).all() and (box.high == 1).all())]
        if others and (self.meta.get(ACTIONS) == BY_RLLIB or self._look_scaled()):
            _log.warning(
                "%s: actions may be in [-1, 1], as a policy chose them, and not in the env's bounds, %s, to which they "
                "were mapped afterwards. RLlib records such actions, unless `normalize_actions` was off, and so do "
                "replay buffers of Stable-Baselines3. If none is beyond [-1, 1], write "
                "data=Recording.open(path, action_space=%s) and add the connector `rescale_action`.",
                *(self.path, others[0], _without_dtypes(before_mapping(self.action_space))),
            )

    def _look_scaled(self) -> bool:
        """Whether the action space was given, and the first actions reach the ends of [-1, 1], but not further."""
        space = self.action_space
        if col.ACTION not in self.given or not self.num_parts or not isinstance(space, spaces.Box):
            return False
        first = self.part(0, [col.ACTION]).steps[col.ACTION]
        is_from_0 = first.dtype.kind != "f" or first.min(initial=0) >= 0  # scaled actions are on both sides of 0
        return bool((space.high > 1).all() and not is_from_0 and 0.98 < abs(first).max(initial=0) <= 1)

    # -- properties ------------------------------------------------------------------------------------------

    @property
    def given(self) -> frozenset[str]:
        """Those of ``obs`` and ``action`` whose space was given rather than read from the data."""
        return self._units.given

    @property
    def header(self) -> Header:
        """The spaces, the env and the metadata of the whole recording."""
        return self._units.header

    @property
    def format(self) -> str:
        """The name of the format, such as ``etude-recording`` or ``rllib-episodes``."""
        return self._units.format

    @property
    def obs_space(self) -> Space:
        """The space of the observations as recorded."""
        return self.header.obs_space

    @property
    def action_space(self) -> Space:
        """The space of the actions as recorded."""
        return self.header.action_space

    @property
    def env(self) -> str | None:
        """The id of the env it was recorded in; None if unknown."""
        return self.header.env

    @property
    def meta(self) -> Mapping[str, Any]:
        """Other metadata, as JSON data: connectors, the module's identity, the seed."""
        return self.header.meta

    @property
    def files(self) -> list[AnyPath]:
        """The data files, in order."""
        return self._units.files

    @property
    def columns(self) -> list[str]:
        """The step columns, such as ``obs``, ``action/0`` or ``reward``."""
        return self._units.columns

    @property
    def num_steps(self) -> int:
        """The number of rows, including lookback. Other tools' recordings may have to be decoded once to count them.

        Rows that ``on_bad`` leaves out for their values are counted; ``info()["agent_steps"]`` is the number of those
        that are read.
        """
        return self.rows_up_to(sys.maxsize)

    def rows_up_to(self, most: int) -> int:
        """Like `num_steps`, but stop counting at the first part with which the count exceeds ``most``.

        Counting the rows of another tool's recording may require decoding them.
        """
        if self._num_steps is not None:
            return self._num_steps
        rows = 0
        for k in range(len(self._units)):
            rows += self._rows(k)
            if rows > most and k + 1 < len(self._units):
                return rows
        self._num_steps = rows
        return rows

    @property
    def num_episodes(self) -> int:
        """The number of distinct episode ids, counted on first access. It includes episodes that ``on_bad`` leaves out
        for their values, which ``info()["episodes"]`` does not count."""
        if self._num_episodes is None:
            loaded = (self._load(k, ()) for k in range(len(self._units)))
            self._num_episodes = len({episode for exp in loaded for episode in exp.segments.episode_id.tolist()})
        return self._num_episodes

    def __repr__(self) -> str:
        counts = f"{counted(self.num_steps, 'step')} in {counted(len(self.files), 'file')}"
        return printable(f"Recording({reprlib.repr(str(self.path))}: {counts}, env {reprlib.repr(self.env)})")

    def _repr_html_(self) -> str:
        rows = {"path": str(self.path), "env": str(self.env), "steps": f"{self.num_steps:,}"}
        spaces = {"observations": str(self.obs_space), "actions": str(self.action_space)}
        rows |= {name: text if len(text) < 200 else f"{text[:197]}..." for name, text in spaces.items()}
        return table("Recording", {**rows, "files": f"{len(self.files):,}", "columns": ", ".join(self.columns)})

    # -- reading ---------------------------------------------------------------------------------------------

    def read(
        self,
        *,
        columns: Sequence[str] | None = None,
        filter: pc.Expression | str | None = None,
        next_obs: bool = False,
    ) -> Experience:
        """Read the whole recording. Segments are sorted, and joined to the segments that they continue.

        Args:
            columns: The step columns to read, by name or root (``obs`` stands for all its parts); None is all.
            filter: Keep only rows for which this holds: a text, such as ``"reward > 0 and t < 100"`` (see
                `etude.recordings.where.RowFilter`), or an expression over stored scalar columns, such as
                ``pyarrow.compute.field("reward") > 0``. Row groups that can't match are not read, unless an expression
                goes with ``next_obs``. Removed rows cut segments.
            next_obs: Whether the next observation of each step is needed. Segments that a filter cut then have the
                observation of the row that follows as ``final_obs``. ``on_bad="repair"`` and ``"skip"`` also leave out
                the last step of a truncated episode if the observation after it is unknown.

        Raises:
            DataError: a column does not exist, or a file can't be decoded.
            SettingsError: ``filter`` is a text that is not a valid condition.
        """
        names = self._names(columns)
        parts = self._loaded(names, filter, next_obs)
        exp = gathered(parts, self.num_steps if self._units.own is not None else self._num_steps or 0)
        if exp is None:
            return self._units.nothing(names)
        return in_order(exp).join()

    def stream(
        self, *, columns: Sequence[str] | None = None, filter: pc.Expression | str | None = None, max_rows: int = 65_536
    ) -> Iterator[Experience]:
        """Iterate over the recording in order, in pieces of at most ``max_rows`` rows, in bounded memory; see `read`.

        Only segments longer than ``max_rows`` or than a row group are cut; each piece has its ``final_obs``.

        Raises:
            DataError: a column does not exist, or a file can't be decoded.
            ValueError: ``max_rows`` is less than 1.
        """
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, not {max_rows}.")
        names = self._names(columns)
        return (piece for exp in self._loaded(names, filter) for piece in pieces(copied(exp), max_rows))

    def batches(
        self,
        batch_size: int,
        *,
        columns: Sequence[str] | None = None,
        shuffle: bool = True,
        buffer_size: int = 65_536,
        seed: int = 0,
        epochs: int | None = None,
        prefetch: int = 4,
        start: int = 0,
    ) -> Generator[Columns, None, None]:
        """Iterate over training batches of exactly ``batch_size`` steps, endlessly by default, in bounded memory.

        Every step except lookback comes once per epoch. A batch may contain the end of one epoch and the start of the
        next; only the very last batch may be smaller, if ``epochs`` is given.

        Args:
            batch_size: Steps per batch, at least 1.
            columns: Step columns by name or root; also ``next_obs``, ``terminated`` and ``truncated``. None is all
                step columns.
            shuffle: Read row groups in random order and pass their rows through a buffer of ``buffer_size`` rows; an
                epoch that fits in the buffer is shuffled as a whole. If False, steps come in the order of the files.
            buffer_size: Rows in the buffer. It takes this many times the bytes of a row of the requested columns.
            seed: Random seed; equal seeds give the same order.
            epochs: Number of epochs; None is endless.
            prefetch: Blocks (of at most half a buffer) that a thread prepares ahead; 0 uses no thread. The thread ends
                with the iterator.
            start: Index of the first batch, to resume as if that many batches had been taken before.

        Raises:
            DataError: a column does not exist; or ``next_obs`` is requested but was not recorded everywhere.
            ValueError: an argument is out of range.
        """
        roots = self.columns if columns is None else [columns] if isinstance(columns, str) else list(columns)
        if not roots or prefetch < 0:
            wrong = f"`prefetch` must be at least 0, not {prefetch}" if roots else "`columns` is empty: name one"
            raise ValueError(f"{wrong}.")
        stored = [root for root in roots if root not in DERIVED]
        names = self._names([*stored, col.OBS] if col.NEXT_OBS in roots else stored)

        has_next = col.NEXT_OBS in roots

        def load(k: int) -> Columns:
            try:
                return steps_of(self._load(k, names, finals=has_next, next_obs=has_next), roots)
            except DataError as error:
                where = self._units.files[0] if len(self._units.files) == 1 else f"{self.path}, part {k}"
                raise DataError(str(error) if str(self.path) in str(error) else f"{where}: {error}") from error

        return batches_of(
            self._groups(load, names, buffer_size, has_next),
            RowPool,
            batch_size,
            shuffle=shuffle,
            buffer_size=buffer_size,
            seed=seed,
            epochs=epochs,
            start=start,
            ahead=partial(Prefetched, depth=prefetch) if prefetch else None,
        )

    def segment_batches(
        self,
        batch_size: int,
        max_len: int,
        *,
        columns: Sequence[str] | None = None,
        buffer_size: int = 65_536,
        seed: int = 0,
        epochs: int | None = None,
        start: int = 0,
    ) -> Generator[Experience, None, None]:
        """Iterate over shuffled batches of exactly ``batch_size`` steps in segments, endlessly by default.

        Like `batches`, for losses over sequences. Segments are cut to at most ``max_len`` steps, each with its final
        observation, and come in random order, without lookback. A batch may end inside a segment, which then continues
        in the next batch. The other arguments and the errors are those of `batches`.
        """
        names = self._names(columns)

        def load(k: int) -> Experience:
            return cut_segments(copied(self._load(k, names)), max_len)

        groups = self._groups(load, names, buffer_size)
        return batches_of(
            groups, SegmentPool, batch_size, buffer_size=buffer_size, seed=seed, epochs=epochs, start=start
        )

    @property
    def num_parts(self) -> int:
        """The number of parts that can be loaded one at a time."""
        return len(self._units)

    def part(
        self, k: int, columns: Sequence[str] | None = None, *, finals: bool = True, next_obs: bool = False
    ) -> Experience:
        """Load part ``k`` as views: whole segments, except those that are stored in pieces.

        Args:
            k: Index of the part, less than `num_parts`.
            columns: The step columns, by name or root; None is all.
            finals: If False, final observations may be left out; those of images take long to decode.
            next_obs: Whether the next observation of each step is needed; see `read`.

        Raises:
            DataError: a column does not exist, or the part can't be decoded.
        """
        return self._load(k, self._names(columns), finals=finals, next_obs=next_obs)

    def validate(self) -> Report:
        """Check every row and report every problem; see `etude.recordings.screening.validate`."""
        asked = [self.header.spaces[root] if root in self.given else None for root in (col.OBS, col.ACTION)]
        return validate(self.path, obs_space=asked[0], action_space=asked[1])

    def info(self) -> dict[str, Any]:
        """Return a summary of the recording as JSON data, counted over every row; see `etude.recordings.episodes`.

        Raises:
            DataError: a file can't be decoded.
        """
        header = self.header.to_json()
        return {
            "path": str(self.path),
            "format": self.format,
            "version": header["version"] if self.format == header["format"] else None,
            "env": self.env,
            **counts_of(self.stream()),
            "columns": self.columns,
            "spaces": header["spaces"],
            "meta": dict(self.meta),
            "files": len(self.files),
            "bytes": sum(path.stat().st_size for path in self.files),
        }

    # -- helpers ---------------------------------------------------------------------------------------------

    def _names(self, columns: Sequence[str] | None) -> list[str]:
        return choose_columns(self.columns, columns, str(self.path), derived=DERIVED)

    def _loaded(
        self, names: Sequence[str], where: pc.Expression | str | None, next_obs: bool = False
    ) -> Iterator[Experience]:
        """Each part, with only the rows for which ``where`` holds."""
        clashes = None if where is None else self._new_timeline()
        return (self._load(k, names, where, clashes, next_obs=next_obs) for k in range(len(self._units)))

    def _groups(
        self, load: Callable[[int], T], names: Sequence[str], buffer_size: int, next_obs: bool = False
    ) -> Groups[T]:
        """The source of batches from the parts; ``names`` are the columns that ``load`` reads."""
        rows = self.rows_up_to(buffer_size)
        return Groups(partial(map, load), len(self._units), rows, partial(self._num_trained, names, next_obs))

    def _num_trained(self, names: Sequence[str], next_obs: bool) -> int:
        """The steps except lookback; ``on_bad`` may leave some out for bad values in the columns ``names``."""
        needed = names if self.leaves_out else ()
        loaded = (self._load(k, needed, next_obs=next_obs) for k in range(len(self._units)))
        return sum(int(exp.trained().sum()) for exp in loaded)


def _without_dtypes(space: Space) -> str:
    """How to write a space in Python, with the dtype of each `Box` that is not the default."""
    return re.sub(r", (float\d+)\)", lambda found: ")" if found[1] == "float32" else f', "{found[1]}")', str(space))


def recording_of(data: "Recording | DataLike") -> Recording:
    """Return ``data`` itself if it is a recording, else open it strictly with `Recording.open`.

    Raises:
        DataError: nothing is there, or it can't be opened.
    """
    return data if isinstance(data, Recording) else Recording.open(data)
