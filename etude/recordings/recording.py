# SPDX-License-Identifier: Apache-2.0
"""Recordings: Experience at rest, read whole, as a stream, or as batches. Needs neither the env nor torch."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.experience import Experience
from etude.recordings.batches import DERIVED, Rows, batches_of, steps_of
from etude.recordings.formats.parts import Parts, chosen
from etude.recordings.manifest import Header
from etude.recordings.opening import opened
from etude.recordings.own import OwnParts
from etude.recordings.pieces import copied, gathered, in_order, pieces
from etude.recordings.segment_batches import cut_segments, segment_batches_of
from etude.spaces import Space

if TYPE_CHECKING:
    from etude.recordings.formats.source import Source
    from etude.recordings.validate import Report


class Recording:
    """A recording on the disk, Etude's or another tool's; make one with `Recording.open`.

    Of Etude's, nothing but footers is read until data is asked for. Memory is bounded by a part (a row group of 65,536
    rows, or about 64 MiB where rows are large; of other tools, a file or as many rows) in all but `read`.
    """

    def __init__(self, path: Path, parts: Parts) -> None:
        self.path = path
        self._parts = parts
        self._num_steps: int | None = None
        self._num_episodes: int | None = None

    @classmethod
    def open(cls, path: "str | os.PathLike[str] | Source") -> "Recording":
        """Open the recording at ``path``: a folder, or one file of it; or a table that a `Source` describes.

        Etude's own recordings, RLlib's (episodes, tables, JSON), Minari's, and HDF5 and NPZ files in the manner of D4RL
        are told apart by what is in them.

        Raises:
            DataError: there is none, it is empty or of an unknown format, a file is broken or missing, or the files do
                not belong together; the message names the file and what to do.
        """
        return cls(*opened(path))

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def header(self) -> Header:
        """What holds for the whole."""
        return self._parts.header

    @property
    def format(self) -> str:
        """The name of the format, such as ``etude-recording`` or ``rllib-episodes``."""
        return self._parts.format

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
    def files(self) -> list[Path]:
        """The data files, in order."""
        return self._parts.files

    @property
    def columns(self) -> list[str]:
        """The step columns, such as ``obs``, ``action/0`` or ``reward``."""
        return self._parts.columns

    @property
    def num_steps(self) -> int:
        """The rows, lookback included. Other tools' recordings may have to be decoded for it, once."""
        if self._num_steps is None:
            self._num_steps = sum(self._parts.rows(k) for k in range(self._parts.num_parts))
        return self._num_steps

    @property
    def num_episodes(self) -> int:
        """The distinct episode ids; reads these the first time."""
        if self._num_episodes is None:
            if isinstance(self._parts, OwnParts):
                self._num_episodes = len(self._parts.episode_ids())
            else:
                loaded = (self._parts.load(k, ()) for k in range(self._parts.num_parts))
                self._num_episodes = len({episode for exp in loaded for episode in exp.segments.episode_id.tolist()})
        return self._num_episodes

    def __repr__(self) -> str:
        return f"Recording({str(self.path)!r}: {self.num_steps:,} steps in {len(self.files)} files, env {self.env!r})"

    # -- reading ---------------------------------------------------------------------------------------------

    def read(self, *, columns: Sequence[str] | None = None, filter: pc.Expression | None = None) -> Experience:
        """The whole recording. Segments that continue others are put behind them and joined to them.

        Args:
            columns: The step columns to read, by name or root (``obs`` stands for all its parts); None is all.
            filter: Only rows for which this holds, such as ``pyarrow.compute.field("reward") > 0``; it may name any
                scalar column on the disk, and row groups that can't match are not read. Rows left out cut segments.

        Raises:
            DataError: a column does not exist, or a file can't be decoded.
        """
        names = self._names(columns)
        exp = gathered((self._load(k, names, filter) for k in range(self._parts.num_parts)), self.num_steps)
        if exp is None:
            return self._nothing(names)
        return in_order(exp).join()

    def stream(
        self, *, columns: Sequence[str] | None = None, filter: pc.Expression | None = None, max_rows: int = 65_536
    ) -> Iterator[Experience]:
        """The recording in order, as pieces of at most ``max_rows`` rows, in bounded memory; see `read`.

        Only segments longer than ``max_rows`` or than a row group come in pieces, each with its ``final_obs``.
        """
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, not {max_rows}.")
        names = self._names(columns)
        parts = (copied(self._load(k, names, filter)) for k in range(self._parts.num_parts))
        return (piece for exp in parts for piece in pieces(exp, max_rows))

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
                return steps_of(self._load(k, names, None), roots)
            except DataError as error:
                where = self._parts.files[0] if len(self._parts.files) == 1 else f"{self.path}, part {k}"
                raise DataError(str(error) if str(self.path) in str(error) else f"{where}: {error}") from error

        source = Rows(load, self._parts.num_parts, self.num_steps, self._num_trained)
        return batches_of(
            source,
            batch_size,
            shuffle=shuffle,
            buffer_size=buffer_size,
            seed=seed,
            epochs=epochs,
            prefetch=prefetch,
            start=start,
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
            return cut_segments(copied(self._load(k, names, None)), max_len)

        source = Rows(load, self._parts.num_parts, self.num_steps, self._num_trained)
        return segment_batches_of(source, batch_size, buffer_size=buffer_size, seed=seed, epochs=epochs, start=start)

    def validate(self) -> "Report":
        """Look at every row and report every problem; see `etude.recordings.validate`."""
        from etude.recordings.validate import validate

        return validate(self.path)

    def info(self) -> dict[str, Any]:
        """What the recording holds, counted over every row; see `etude.recordings.info`."""
        from etude.recordings.info import info

        return info(self)

    # -- inside ----------------------------------------------------------------------------------------------

    def _names(self, columns: Sequence[str] | None) -> list[str]:
        return chosen(self.columns, columns, str(self.path), derived=DERIVED)

    def _load(self, k: int, names: Sequence[str], where: pc.Expression | None) -> Experience:
        """Part k, with only the rows for which ``where`` holds."""
        if isinstance(self._parts, OwnParts):
            return self._parts.load(k, names, where)
        if where is None:
            return self._parts.load(k, names)
        kept = Experience.from_table(self._parts.load(k).to_table().filter(where))
        steps = {name: kept.steps[name] for name in names}
        final_obs = {name: column for name, column in kept.final_obs.items() if name in names}
        return Experience(steps, kept.offsets, kept.segments, final_obs)

    def _nothing(self, names: Sequence[str]) -> Experience:
        return self._parts.nothing(names) if isinstance(self._parts, OwnParts) else self._parts.load(0, names)[:0]

    def _num_trained(self) -> int:
        """The steps that are not lookback."""
        return sum(int(self._load(k, (), None).trained().sum()) for k in range(self._parts.num_parts))
