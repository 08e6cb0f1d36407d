# SPDX-License-Identifier: Apache-2.0
"""Recordings: Experience at rest, read whole, as a stream, or as batches. Needs neither the env nor torch."""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from etude import columns as col
from etude.columns import Columns
from etude.display import table
from etude.errors import DataError, printable
from etude.experience import Experience
from etude.files import AnyPath
from etude.recordings.batches import (
    DERIVED,
    Groups,
    Prefetched,
    RowPool,
    SegmentPool,
    batches_of,
    cut_segments,
    steps_of,
)
from etude.recordings.episodes import counts_of
from etude.recordings.format import Problem, chosen
from etude.recordings.layout import Header
from etude.recordings.opening import Place, Places, opened
from etude.recordings.pieces import copied, gathered, in_order, pieces
from etude.recordings.screening import Findings, OnBad, Report, ScreenedUnits, check_mode, validate
from etude.spaces import Space

if TYPE_CHECKING:
    from etude.recordings.opening import DataLike


class Recording:
    """A recording on the disk, Etude's or another tool's; make one with `Recording.open`.

    Of Etude's, nothing but footers is read until data is asked for. Memory is bounded by a part (a row group of 65,536
    rows, or about 64 MiB where rows are large; of other tools, a file or as many rows) in all but `read`.
    """

    is_in_memory = False

    def __init__(self, path: Place, screened: ScreenedUnits) -> None:
        self.path = path
        self.notes: tuple[str, ...] = ()
        """What could not be kept, in words, where `etude.recordings.convert` has just written it."""
        self._screened = screened
        self._units = screened.units
        self._num_steps: int | None = None
        self._num_episodes: int | None = None

    @classmethod
    def open(cls, path: "DataLike", *, on_bad: "OnBad | None" = "strict", filesystem: Any = None) -> "Recording":
        """Open the recording at ``path``: a folder, or one file of it; or a table that a `Source` describes.

        A path may be a URL (``s3://bucket/run``) and a glob (``runs/*/data``); a list of any of these is read as one
        recording, whose episode ids then begin with the number of the recording in it (``0-``), unless all are files of
        one kind. A folder with several of Etude's recordings below it is read in the same way. ``filesystem`` is the
        pyarrow or fsspec file system that paths are in; None is what a URL names, or this machine.

        Etude's own recordings, RLlib's (episodes, tables, JSON), Minari's, LeRobot's, and HDF5 and NPZ files in the
        manner of D4RL are told apart by what is in them.

        ``on_bad`` says what to do with bad data (`etude.recordings.screening`): ``strict`` raises where it is read,
        ``repair`` mends what can be and leaves out the rest, ``skip`` leaves out whole segments, and `left_out` counts.
        None does not look at values. Steps that are there twice are never read as they are.

        Raises:
            DataError: there is none, it is empty or of an unknown format, a file is broken or missing, or the files do
                not belong together; the message names the file and what to do.
        """
        check_mode(on_bad)
        faults: list[Problem] | None = None if on_bad in (None, "strict") else []
        place, units = opened(path, filesystem, faults)
        has_path = not isinstance(place, Places)
        return cls(place, ScreenedUnits(units, on_bad, str(place), faults or (), has_path=has_path))

    def __reduce__(self) -> tuple[Any, ...]:
        """To worker processes goes what was found when it was opened: they open nothing again."""
        return _received, (self.path, self._screened, self._num_steps, self._num_episodes)

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def header(self) -> Header:
        """What holds for the whole."""
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
        """The id of the env that it was recorded in."""
        return self.header.env

    @property
    def meta(self) -> Mapping[str, Any]:
        """What else was kept: connectors, the module's identity, the seed."""
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
        """The rows, lookback included. Other tools' recordings may have to be decoded for it, once."""
        if self._num_steps is None:
            self._num_steps = sum(self._screened.rows(k) for k in range(len(self._units)))
        return self._num_steps

    def rows_up_to(self, most: int) -> int:
        """As `num_steps`; or, where there are more than ``most``, only the rows of the first parts that have as many.

        Counting the rows of another tool's recording may take decoding them.
        """
        if self._num_steps is not None:
            return self._num_steps
        rows = 0
        for k in range(len(self._units)):
            rows += self._screened.rows(k)
            if rows > most and k + 1 < len(self._units):
                return rows
        self._num_steps = rows
        return rows

    @property
    def num_episodes(self) -> int:
        """The distinct episode ids; reads these the first time."""
        if self._num_episodes is None:
            own = self._units.own
            if own is not None and not self.leaves_out:
                self._num_episodes = len(own.episode_ids(self._units.members[0].contents))
            else:
                loaded = (self._screened.load(k, ()) for k in range(len(self._units)))
                self._num_episodes = len({episode for exp in loaded for episode in exp.segments.episode_id.tolist()})
        return self._num_episodes

    def __repr__(self) -> str:
        counts = f"{self.num_steps:,} steps in {len(self.files)} files"
        return printable(f"Recording({reprlib.repr(str(self.path))}: {counts}, env {reprlib.repr(self.env)})")

    def _repr_html_(self) -> str:
        rows = {"path": str(self.path), "env": str(self.env), "steps": f"{self.num_steps:,}"}
        spaces = {"observations": str(self.obs_space), "actions": str(self.action_space)}
        rows |= {name: text if len(text) < 200 else f"{text[:197]}..." for name, text in spaces.items()}
        return table("Recording", {**rows, "files": f"{len(self.files):,}", "columns": ", ".join(self.columns)})

    @property
    def left_out(self) -> dict[str, int]:
        """The rows that ``on_bad`` has left out so far, by kind of fault; parts not yet read may add to it."""
        return self._screened.left_out

    @property
    def met(self) -> dict[str, int]:
        """The faults that ``on_bad`` has met so far by kind, those that could be mended included."""
        return self._screened.met

    @property
    def warnings(self) -> list[str]:
        """What was met so far that does no harm, such as copies that are read once; one text for each kind."""
        return self._screened.warnings

    @property
    def leaves_out(self) -> bool:
        """Whether ``on_bad`` leaves bad data out, so that it hangs on the columns asked for which steps are read."""
        return self._screened.mode in ("repair", "skip")

    def counts(self, k: int) -> "Findings":
        """What ``on_bad`` found in part ``k``, for `count` where it was read in another process."""
        return self._screened.counts(k)

    def count(self, k: int, counts: "Findings | None") -> None:
        """Take in what ``on_bad`` found in part ``k`` in another process; nothing is counted twice."""
        if counts is not None:
            self._screened.count(k, counts)

    def left_out_report(self) -> str:
        """What ``on_bad`` has met and left out so far, in words; empty where nothing was."""
        return self._screened.report()

    # -- reading ---------------------------------------------------------------------------------------------

    def read(self, *, columns: Sequence[str] | None = None, filter: pc.Expression | str | None = None) -> Experience:
        """The whole recording. Segments that continue others are put behind them and joined to them.

        Args:
            columns: The step columns to read, by name or root (``obs`` stands for all its parts); None is all.
            filter: Only rows for which this holds: text, such as ``"reward > 0 and t < 100"`` (see
                `etude.recordings.where.RowFilter`), or an expression such as ``pyarrow.compute.field("reward") > 0``
                over scalar columns on the disk. Row groups that can't match are not read. Rows left out cut segments.

        Raises:
            DataError: a column does not exist, or a file can't be decoded.
            SettingsError: ``filter`` is a text that can't be used.
        """
        names = self._names(columns)
        parts = self._loaded(names, filter)
        exp = gathered(parts, self.num_steps if self._units.own is not None else self._num_steps or 0)
        if exp is None:
            return self._screened.nothing(names)
        return in_order(exp).join()

    def stream(
        self, *, columns: Sequence[str] | None = None, filter: pc.Expression | str | None = None, max_rows: int = 65_536
    ) -> Iterator[Experience]:
        """The recording in order, as pieces of at most ``max_rows`` rows, in bounded memory; see `read`.

        Only segments longer than ``max_rows`` or than a row group come in pieces, each with its ``final_obs``.
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
        prefetch: int = 2,
        start: int = 0,
    ) -> Iterator[Columns]:
        """Batches of exactly ``batch_size`` steps for training, endless by default, in bounded memory.

        Every step that is not lookback comes once an epoch. A batch may hold the end of one epoch and the beginning
        of the next; only the very last batch of finite ``epochs`` may be smaller.

        Args:
            batch_size: Steps in a batch, at least 1.
            columns: Step columns by name or root; also ``next_obs``, ``terminated`` and ``truncated``. None is all
                step columns.
            shuffle: Row groups in random order, and their rows through a buffer of ``buffer_size`` rows; an epoch
                that fits in the buffer is shuffled whole. Else the order of the files.
            buffer_size: Rows in the buffer. It is memory: rows times the bytes of the columns asked for.
            seed: The order depends on this alone.
            epochs: How many times over; None is without end.
            prefetch: Blocks (of half a buffer at most) that a thread makes ahead; 0 is no thread. The thread ends
                with the iterator.
            start: The first batch to give, as if that many had been taken before: for going on after a restart.

        Raises:
            DataError: a column does not exist; or ``next_obs`` is wanted where the recording does not know it.
        """
        roots = self.columns if columns is None else list(columns)
        stored = [root for root in roots if root not in DERIVED]
        names = self._names([*stored, col.OBS] if col.NEXT_OBS in roots else stored)

        def load(k: int) -> Columns:
            try:
                return steps_of(self._screened.load(k, names, finals=col.NEXT_OBS in roots), roots)
            except DataError as error:
                where = self._units.files[0] if len(self._units.files) == 1 else f"{self.path}, part {k}"
                raise DataError(str(error) if str(self.path) in str(error) else f"{where}: {error}") from error

        num_rows = self.rows_up_to(buffer_size)
        groups = Groups(partial(map, load), len(self._units), num_rows, partial(self._num_trained, names))
        return batches_of(
            groups,
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
    ) -> Iterator[Experience]:
        """Batches of exactly ``batch_size`` steps in segments, shuffled, endless by default, in bounded memory.

        As `batches`, for losses that look along time: segments are cut to at most ``max_len`` steps, each of which
        knows what was observed after it, and come in random order, without lookback. A batch may end inside one, which
        then goes on in the next batch.
        """
        names = self._names(columns)

        def load(k: int) -> Experience:
            return cut_segments(copied(self._screened.load(k, names)), max_len)

        num_rows = self.rows_up_to(buffer_size)
        groups = Groups(partial(map, load), len(self._units), num_rows, partial(self._num_trained, names))
        return batches_of(
            groups, SegmentPool, batch_size, buffer_size=buffer_size, seed=seed, epochs=epochs, start=start
        )

    @property
    def num_parts(self) -> int:
        """The pieces that can be loaded one at a time."""
        return len(self._units)

    def part(self, k: int, columns: Sequence[str] | None = None, *, finals: bool = True) -> Experience:
        """Part ``k``, views: whole segments, but for those that the disk has in pieces.

        Args:
            k: Which.
            columns: The step columns, by name or root; None is all.
            finals: With False, what was observed after segments may be left out; that of images takes long to decode.

        Raises:
            DataError: a column does not exist, or the part can't be decoded.
        """
        return self._screened.load(k, self._names(columns), finals=finals)

    def validate(self) -> Report:
        """Look at every row and report every problem; see `etude.recordings.screening.validate`."""
        return validate(self.path)

    def info(self) -> dict[str, Any]:
        """What the recording holds, counted over every row, as JSON data; see `etude.recordings.episodes`.

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

    # -- inside ----------------------------------------------------------------------------------------------

    def _names(self, columns: Sequence[str] | None) -> list[str]:
        return chosen(self.columns, columns, str(self.path), derived=DERIVED)

    def _loaded(self, names: Sequence[str], where: pc.Expression | str | None) -> Iterator[Experience]:
        """Each part, with only the rows for which ``where`` holds."""
        clashes = None if where is None else self._screened.pass_over()
        return (self._screened.load(k, names, where, clashes) for k in range(len(self._units)))

    def _num_trained(self, names: Sequence[str]) -> int:
        """The steps that are not lookback; ``on_bad`` may leave out some for what is in the columns ``names``."""
        needed = names if self.leaves_out else ()
        return sum(int(self._screened.load(k, needed).trained().sum()) for k in range(len(self._units)))


def _received(path: Place, screened: ScreenedUnits, num_steps: int | None, num_episodes: int | None) -> Recording:
    recording = Recording(path, screened)
    recording._num_steps, recording._num_episodes = num_steps, num_episodes
    return recording


def recording_of(data: "Recording | DataLike") -> Recording:
    """``data`` itself if it is a recording; else what `Recording.open` opens there, strictly.

    Raises:
        DataError: there is none, or it can't be opened.
    """
    return data if isinstance(data, Recording) else Recording.open(data)
