# SPDX-License-Identifier: Apache-2.0
"""ReplayDataset: the latest collections of experience, cut into samples of a fixed number of steps."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from etude import columns as col
from etude.columns import Columns
from etude.display import short
from etude.errors import DataError, SettingsError
from etude.experience import Experience
from etude.experience.arrays import check_alike, ranges
from etude.experience.experience import offsets_of

MASK = "mask"
_OWN = (MASK, col.TERMINATED, col.TRUNCATED, col.NEXT_OBS)
_LENGTH, _KNOWN = "length", "known"
Index = NDArray[np.int64]


class ReplayDataset(Dataset[dict[str, torch.Tensor]]):
    """Samples of ``num_samples`` consecutive steps, cut from the segments of the latest collections.

    A map-style torch dataset: ``dataset[i]`` is a dict of tensors ``[num_samples, ...]``. They hold the step columns of
    the experience, without strings, and

    - ``terminated``, ``truncated``: bool, True on the last step of an episode that ended so;
    - ``next_obs`` (``next_obs/...`` if observations are nested), if asked for;
    - ``mask``: bool, False on steps not to be trained on: padding, which repeats a segment's last step if the segment
      is shorter than a sample; and steps whose ``next_obs`` is asked for but unknown.

    In each segment, samples start at its first step and at every ``stride``-th step after it, until one reaches the
    segment's end. Lookback is left out.

    Args:
        num_samples: Steps in a sample, at least 1.
        stride: Steps from the start of a sample to that of the next, at least 1; None: ``num_samples``, so that each
            step is in one sample. If it is larger than ``num_samples``, the steps between are in none.
        collections: Number of collections kept, at least 1: a further one replaces the oldest as a whole.
        next_obs: Also return the observation after each step.
        seed: Seed of the order of samples in `batches`.

    Raises:
        SettingsError: a number is below 1.
    """

    def __init__(
        self,
        num_samples: int = 1,
        *,
        stride: int | None = None,
        collections: int = 1,
        next_obs: bool = False,
        seed: int | np.random.SeedSequence | None = None,
    ) -> None:
        self.num_samples, self.stride = num_samples, num_samples if stride is None else stride
        self.collections, self.next_obs = collections, next_obs
        for name in ("num_samples", "stride", "collections"):
            if getattr(self, name) < 1:
                raise SettingsError(f"`{name}` is {getattr(self, name)}, but must be at least 1.")
        self._rng = np.random.default_rng(seed)
        self._steps: Columns = {}
        self._segments: Columns = {}
        """One row per segment: its length, its final observation, and whether that is known."""
        self._counts: list[int] = []
        """Number of segments of each collection, the oldest first."""
        self._starts: Index = np.zeros(0, np.int64)
        """First row of each sample."""
        self._segment_of: Index = self._starts
        self._last: Index = self._starts
        """Last row of the segment to which each sample belongs."""
        self.has_gaps = False
        """Whether ``mask`` is False anywhere."""

    def __repr__(self) -> str:
        return short(self, f"{len(self):,} samples", num_samples=self.num_samples, collections=self.collections)

    def add(self, exp: Experience) -> None:
        """Add a collection, and drop the oldest one if there are too many.

        Raises:
            DataError: its columns differ from those of earlier ones, or have the name of a column that is added here.
        """
        steps, segments = self._table(exp.numpy())
        surplus = max(0, len(self._counts) + 1 - self.collections)
        old = sum(self._counts[:surplus])
        rows = int(self._segments[_LENGTH][:old].sum()) if old else 0
        if self._counts:
            check_alike(steps, self._steps, "column", "this collection and those before it differ")
            steps = {name: np.concatenate([c[rows:], steps[name]]) for name, c in self._steps.items()}
            segments = {name: np.concatenate([c[old:], segments[name]]) for name, c in self._segments.items()}
        self._counts = [*self._counts[surplus:], exp.num_segments]
        self._steps, self._segments = steps, segments
        self._arrange()

    def _table(self, exp: Experience) -> tuple[Columns, Columns]:
        taken = [name for name in exp.steps for own in _OWN if col.is_under(name, own)]
        if taken:
            raise DataError(f"a step column can't be called `{taken[0]}`: the dataset adds {', '.join(_OWN)} itself.")
        steps = {name: column for name, column in exp.steps.items() if column.dtype != object}
        for name in (col.TERMINATED, col.TRUNCATED):
            steps[name] = exp.at_ends(getattr(exp.segments, name))
        if exp.segments.lookback.any():
            rows = np.flatnonzero(exp.trained())
            steps = {name: column.take(rows, axis=0) for name, column in steps.items()}
        segments = {_LENGTH: exp.lengths - exp.segments.lookback, _KNOWN: exp.segments.has_final_obs}
        if self.next_obs:
            segments |= col.renamed(exp.final_obs, col.OBS, col.NEXT_OBS)
        return steps, segments

    def _arrange(self) -> None:
        """Find where samples start."""
        lengths = self._segments[_LENGTH]
        offsets = offsets_of(lengths)
        until_end = -(-np.maximum(lengths - self.num_samples, 0) // self.stride) + 1
        counts = np.minimum(until_end, -(-lengths // self.stride))
        self._segment_of = np.repeat(np.arange(len(lengths)), counts)
        nth = ranges(np.zeros(len(counts), np.int64), counts)
        self._starts = offsets[:-1][self._segment_of] + nth * self.stride
        self._last = offsets[1:][self._segment_of] - 1
        unknown = self.next_obs and not self._segments[_KNOWN].all()
        self.has_gaps = bool(unknown or (self._starts + self.num_samples - 1 > self._last).any())

    @property
    def num_steps(self) -> int:
        """Number of steps held."""
        return len(self._steps[col.TERMINATED]) if self._counts else 0

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}.")
        sample = self.gather(np.array([i % len(self)]))
        return {name: torch.from_numpy(column[0]) for name, column in sample.items()}

    def gather(self, index: Index) -> Columns:
        """Several samples at once: columns ``[len(index), num_samples, ...]`` with the names of a single one."""
        first, last, segment = (part[index, None] for part in (self._starts, self._last, self._segment_of))
        wanted = first + np.arange(self.num_samples)
        rows = np.minimum(wanted, last)
        out = {name: column.take(rows, axis=0) for name, column in self._steps.items()}
        mask = wanted <= last
        if self.next_obs:
            at_end = rows == last
            following = np.minimum(rows + 1, last)
            of = np.broadcast_to(segment, rows.shape)[at_end]
            for name in col.under(self._segments, col.NEXT_OBS):
                out[name] = self._steps[col.as_obs(name)].take(following, axis=0)
                out[name][at_end] = self._segments[name][of]
            mask &= ~at_end | self._segments[_KNOWN][segment]
        return {**out, MASK: mask}

    def batches(self, size: int | None, num: int) -> Iterator[Columns]:
        """Yield ``num`` batches of columns ``[size, num_samples, ...]``, in passes over all samples, each in a new
        order.

        A batch in which a pass ends is filled up from the next pass.

        Args:
            size: Samples in a batch, at most all; None: all.
            num: Number of batches.

        Raises:
            DataError: the dataset is empty.
        """
        count = len(self)
        if not count:
            raise DataError("there are no steps to learn from: the collections that are kept are empty.")
        size = count if size is None else min(size, count)
        left = np.zeros(0, np.int64)
        for _ in range(num):
            if len(left) < size:
                left = np.concatenate([left, self._rng.permutation(count)])
            yield self.gather(left[:size])
            left = left[size:]

    def state_dict(self) -> dict[str, Any]:
        """All data and the random stream, as plain data and arrays."""
        return {
            "steps": {name: column.copy() for name, column in self._steps.items()},
            "segments": {name: column.copy() for name, column in self._segments.items()},
            "counts": list(self._counts),
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; samples are cut by this dataset's settings."""
        self._steps, self._segments = dict(state["steps"]), dict(state["segments"])
        self._counts = list(state["counts"])
        self._rng.bit_generator.state = state["rng"]
        if self._counts:
            self._arrange()
