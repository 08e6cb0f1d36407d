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
from etude.experience.arrow import KEYS
from etude.recordings.batches import DERIVED, Source, batches_of, steps_of
from etude.recordings.faults import fault_of, lost_files
from etude.recordings.files import DataFile, find_files, open_file
from etude.recordings.manifest import Header, Manifest
from etude.recordings.pieces import continues, copied, gathered, in_order, pieces
from etude.recordings.segment_batches import cut_segments, segment_batches_of
from etude.settings import nearest
from etude.spaces import Space

if TYPE_CHECKING:
    from etude.recordings.validate import Report


class Recording:
    """A recording on the disk; make one with `Recording.open`.

    Nothing but footers is read until data is asked for. Memory is bounded by a row group (65,536 rows, or about
    64 MiB where rows are large) in all but `read`.
    """

    def __init__(self, path: Path, header: Header, files: Sequence[DataFile]) -> None:
        self.path = path
        self.header = header
        self._files = tuple(files)
        self._groups = [(file, group) for file in self._files for group in range(file.num_groups)]
        self._num_episodes: int | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Recording":
        """Open the recording at ``path``: a folder, or one Parquet file of it.

        Raises:
            DataError: there is none, it is empty or of another format, a file is broken or missing, or the files do
                not belong together; the message names the file and what to do.
        """
        path = Path(path)
        files = [open_file(file) for file in find_files(path)]
        manifest = Manifest.read(path) if path.is_dir() else None
        header = manifest.header if manifest else next((file.header for file in files if file.header), None)
        for file in files:
            fault = fault_of(file, files[0], header)
            if fault:
                raise DataError(fault.message)
        assert header is not None  # a file without one is a fault
        if manifest:
            for lost in lost_files(path, manifest, files):
                raise DataError(lost.message)
        return cls(path, header, files)

    # -- what it is ------------------------------------------------------------------------------------------

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
        return [file.path for file in self._files]

    @property
    def columns(self) -> list[str]:
        """The step columns, such as ``obs``, ``action/0`` or ``reward``."""
        names = self._files[0].schema.names
        return [name for name in names if name not in KEYS and not col.is_under(name, col.FINAL_OBS)]

    @property
    def num_steps(self) -> int:
        """The rows, lookback included."""
        return sum(file.num_rows for file in self._files)

    @property
    def num_episodes(self) -> int:
        """The distinct episode ids; reads that one column the first time."""
        if self._num_episodes is None:
            ids: set[str] = set()
            for file, group in self._groups:
                column = file.read_group(group, [col.EPISODE_ID], None)[col.EPISODE_ID]
                ids.update(column.unique().to_pylist())
            self._num_episodes = len(ids)
        return self._num_episodes

    def __repr__(self) -> str:
        return f"Recording({str(self.path)!r}: {self.num_steps:,} steps in {len(self._files)} files, env {self.env!r})"

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
        parts = (self._load(k, names, filter) for k in range(len(self._groups)))
        exp = gathered(parts, self.num_steps)
        if exp is None:
            return Experience.from_table(self._files[0].schema.empty_table().select(names))
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
        groups = (copied(self._load(k, names, filter)) for k in range(len(self._groups)))
        return (piece for exp in groups for piece in pieces(exp, max_rows))

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
                raise DataError(f"{self._groups[k][0].path}: {error}") from error

        source = Source(load, len(self._groups), self.num_steps, self._num_trained)
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

        source = Source(load, len(self._groups), self.num_steps, self._num_trained)
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
        for root in columns or ():
            if not col.under(self.columns, root):
                near = nearest(root, [*self.columns, *DERIVED])
                raise DataError(
                    f"{self.path}: there is no column `{root}`; there are {', '.join(self.columns)}."
                    + (f" Nearest: `{near}`." if near else "")
                )
        return self._files[0].names_for(columns)

    def _load(self, k: int, names: Sequence[str], where: pc.Expression | None) -> Experience:
        """Row group k of the recording, whose last segment knows what follows it even in the next row group."""
        file, group = self._groups[k]
        exp = file.load(group, names, where)
        segments = exp.segments
        if not exp.num_segments or segments.has_final_obs[-1] or segments.done[-1] or not exp.final_obs:
            return exp
        if k + 1 < len(self._groups):
            next_file, next_group = self._groups[k + 1]
            following = next_file.first_row(next_group, names)
            if following.num_segments and continues(exp, following):
                segments.has_final_obs[-1] = True
                for name, values in exp.final_obs.items():
                    values[-1] = following.steps[name][0]
        return exp

    def _num_trained(self) -> int:
        """The steps that are not lookback."""
        names = self._names(())
        return sum(int(self._load(k, names, None).trained().sum()) for k in range(len(self._groups)))
