# SPDX-License-Identifier: Apache-2.0
"""Experience: a table of time steps, cut into segments. The one type between env, disk and gradient."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.experience import arrays, check, minibatches, padding
from etude.experience.arrays import Array, Index
from etude.experience.segments import Segments

if TYPE_CHECKING:
    import pyarrow as pa
    import torch


class Experience:
    """Columns of steps, cut into segments: consecutive steps of one agent in one episode.

    ``len(exp)`` counts segments, and ``exp[i]`` is segment i as an Experience: a view.

    Args:
        steps: The columns, each ``[num_steps, ...]`` and of one dtype; NumPy arrays, or torch tensors.
        offsets: int64 ``[num_segments + 1]``; segment i is the rows ``offsets[i]:offsets[i + 1]``, at least one.
        segments: What holds for whole segments.
        final_obs: For each observation column, ``[num_segments, ...]``: the observation after the last step.

    Nothing is checked here, so that making one is cheap; `validate` checks everything.
    """

    __slots__ = ("final_obs", "offsets", "segments", "steps")

    def __init__(
        self,
        steps: Mapping[str, Array],
        offsets: Index,
        segments: Segments,
        final_obs: Mapping[str, Array],
    ) -> None:
        self.steps = dict(steps)
        self.offsets = offsets
        self.segments = segments
        self.final_obs = dict(final_obs)

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """The number of rows, lookback included."""
        return int(self.offsets[-1])

    @property
    def num_segments(self) -> int:
        """The number of segments."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Index:
        """int64 ``[num_segments]``: the steps of each segment, lookback included."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return self.num_segments

    def __repr__(self) -> str:
        shown = [f"{name} {arrays.describe(column)}" for name, column in self.steps.items()]
        ends = f"terminated {int(self.segments.terminated.sum()):,}, truncated {int(self.segments.truncated.sum()):,}"
        return f"Experience({self.num_segments:,} segments, {self.num_steps:,} steps: {', '.join(shown)}; {ends})"

    def returns(self) -> NDArray[np.float64]:
        """float64 ``[num_segments]``: the sum of each segment's rewards, lookback left out."""
        rewards = self.steps[col.REWARD]
        if not isinstance(rewards, np.ndarray):
            rewards = rewards.cpu().numpy()
        if not self.num_segments:
            return np.zeros(0)
        return np.add.reduceat(np.where(self.trained(), rewards.astype(np.float64), 0.0), self.offsets[:-1])

    # -- columns that follow from others ----------------------------------------------------------------------

    def segment_of_step(self) -> Index:
        """int64 ``[num_steps]``: the segment that each step belongs to."""
        return np.repeat(np.arange(self.num_segments), self.lengths)

    def t(self) -> Index:
        """int64 ``[num_steps]``: each step's index in its episode."""
        return np.arange(self.num_steps) + np.repeat(self.segments.t_start - self.offsets[:-1], self.lengths)

    def trained(self) -> NDArray[np.bool_]:
        """bool ``[num_steps]``: False on lookback rows."""
        mask = np.ones(self.num_steps, bool)
        if self.segments.lookback.any():
            mask[arrays.ranges(self.offsets[:-1], self.segments.lookback)] = False
        return mask

    def trained_steps(self) -> dict[str, Array]:
        """The columns of steps without lookback rows."""
        if not self.segments.lookback.any():
            return self.steps
        rows = np.flatnonzero(self.trained())
        return {name: column[rows] for name, column in self.steps.items()}

    def at_ends(self, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """bool ``[num_steps]``: a flag of each segment put on its last step, False elsewhere."""
        out = np.zeros(self.num_steps, bool)
        out[self.offsets[1:][flags] - 1] = True
        return out

    def next_obs(self) -> dict[str, Array]:
        """The observation after each step, by observation column: ``obs`` shifted, ``final_obs`` at segment ends.

        The last row of a segment whose ``has_final_obs`` is False holds zeros that mean nothing.
        """
        out = {}
        for name, final in self.final_obs.items():
            obs = self.steps[name]
            following = arrays.zeros(len(obs), obs)
            following[:-1] = obs[1:]
            arrays.put(following, self.offsets[1:] - 1, final)
            out[name] = following
        return out

    def with_steps(self, **steps: Array) -> "Experience":
        """The same Experience with columns added or replaced; everything else is shared."""
        return Experience({**self.steps, **steps}, self.offsets, self.segments, self.final_obs)

    # -- parts ------------------------------------------------------------------------------------------------

    def __getitem__(self, which: int | slice) -> "Experience":
        """One segment, or a slice of them with step 1: a view."""
        if isinstance(which, slice):
            start, stop, stride = which.indices(self.num_segments)
            if stride != 1:
                raise IndexError(f"a slice of segments takes step 1, not {stride}; use select for other orders.")
            stop = max(start, stop)
        else:
            if not -self.num_segments <= which < self.num_segments:
                raise IndexError(f"segment {which} of {self.num_segments}.")
            start = which % self.num_segments
            stop = start + 1
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return Experience(
            {name: column[first:last] for name, column in self.steps.items()},
            self.offsets[start : stop + 1] - first,
            self.segments[start:stop],
            {name: column[start:stop] for name, column in self.final_obs.items()},
        )

    def __iter__(self) -> Iterator["Experience"]:
        return (self[i] for i in range(self.num_segments))

    def select(
        self,
        where: NDArray[np.bool_] | NDArray[np.integer[Any]] | Sequence[int] | slice | None = None,
        *,
        episode_id: str | None = None,
        agent_id: str | None = None,
        module_id: str | None = None,
    ) -> "Experience":
        """Some segments, in the order asked: a view where they stand next to each other, else a copy.

        Args:
            where: A boolean mask, indices or a slice over segments; None is all of them.
            episode_id: Keep only segments of this episode; likewise ``agent_id`` and ``module_id``.
        """
        index = np.arange(self.num_segments) if where is None else np.arange(self.num_segments)[where]
        for name, wanted in ((col.EPISODE_ID, episode_id), (col.AGENT_ID, agent_id), (col.MODULE_ID, module_id)):
            if wanted is not None:
                index = index[np.asarray(getattr(self.segments, name)[index] == wanted, bool)]
        if len(index) == 0:
            return self[0:0]
        if (np.diff(index) == 1).all():
            return self[int(index[0]) : int(index[-1]) + 1]
        lengths = self.lengths[index]
        rows = arrays.ranges(self.offsets[:-1][index], lengths)
        return Experience(
            {name: arrays.take(column, rows) for name, column in self.steps.items()},
            offsets_of(lengths),
            self.segments[index],
            {name: arrays.take(column, index) for name, column in self.final_obs.items()},
        )

    def episodes(self) -> Iterator["Experience"]:
        """Each episode, in the order in which their first segments stand: all its agents' segments.

        Views where an episode's segments stand next to each other, as they do for one agent.
        """
        ids, first, episode = np.unique(self.segments.episode_id.astype(str), return_index=True, return_inverse=True)
        order = np.argsort(episode, kind="stable")
        bounds = np.append(0, np.cumsum(np.bincount(episode, minlength=len(ids))))
        yield from (self.select(order[bounds[i] : bounds[i + 1]]) for i in np.argsort(first))

    def cut(self, max_len: int, *, lookback: int = 0) -> "Experience":
        """The same steps in segments of at most ``max_len``; without lookback, the columns are shared.

        Args:
            max_len: The longest segment allowed, its lookback left out where ``lookback`` is given.
            lookback: Give each further piece this many of the steps before it as context; these rows are copied.
        """
        if max_len < 1:
            raise ValueError(f"max_len must be at least 1, not {max_len}.")
        pieces = -(-self.lengths // max_len)
        parent = np.repeat(np.arange(self.num_segments), pieces)
        nth = np.arange(len(parent)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        start = self.offsets[:-1][parent] + nth * max_len
        stop = np.minimum(start + max_len, self.offsets[1:][parent])
        return self.pieces(parent, start, stop, lookback)

    def split(self, at: int) -> tuple["Experience", "Experience"]:
        """The first ``at`` steps and the rest; a segment that straddles the border is cut. Views."""
        if not 0 <= at <= self.num_steps:
            raise ValueError(f"can't split {self.num_steps} steps at {at}.")
        parent = np.arange(self.num_segments)
        start, stop = self.offsets[:-1], self.offsets[1:]
        straddling = np.flatnonzero((start < at) & (at < stop))
        if len(straddling):
            i = int(straddling[0])
            parent = np.insert(parent, i, i)
            start, stop = np.insert(start, i + 1, at), np.insert(stop, i, at)
        both = self.pieces(parent, start, stop)
        border = int(np.searchsorted(both.offsets, at))
        return both[:border], both[border:]

    def pieces(self, parent: Index, start: Index, stop: Index, lookback: int = 0) -> "Experience":
        """Segments ``start[i]:stop[i]`` of rows, each inside segment ``parent[i]``; together they cover all rows.

        Each knows what was observed after it; see `cut` for ``lookback``.
        """
        own = self.segments[parent]
        first_row = self.offsets[:-1][parent]
        context = np.minimum(start - first_row, lookback)
        is_last = stop == self.offsets[1:][parent]
        segments = own.replace(
            t_start=own.t_start + (start - first_row) - context,
            lookback=context + np.clip(own.lookback - (start - first_row), 0, stop - start),
            terminated=own.terminated & is_last,
            truncated=own.truncated & is_last,
            has_final_obs=own.has_final_obs | ~is_last,
        )
        final_obs = {}
        for name, final in self.final_obs.items():
            values = arrays.zeros(len(parent), final)
            arrays.put(values, np.flatnonzero(is_last), arrays.take(final, parent[is_last]))
            arrays.put(values, np.flatnonzero(~is_last), arrays.take(self.steps[name], stop[~is_last]))
            final_obs[name] = values
        lengths = stop - start + context
        steps = self.steps
        if context.any():
            rows = arrays.ranges(start - context, lengths)
            steps = {name: arrays.take(column, rows) for name, column in steps.items()}
        return Experience(steps, offsets_of(lengths), segments, final_obs)

    # -- together ---------------------------------------------------------------------------------------------

    @staticmethod
    def concat(parts: Sequence["Experience"]) -> "Experience":
        """All segments of ``parts``, in order. Segments stay as they are; see `join`.

        Raises:
            DataError: the parts have different columns, or columns of different dtypes or shapes.
        """
        if not parts:
            raise DataError("can't concat nothing: an Experience knows its columns only from its parts.")
        names, finals = set(parts[0].steps), set(parts[0].final_obs)
        for i, part in enumerate(parts):
            for what, has, wanted in (("column", set(part.steps), names), ("final_obs", set(part.final_obs), finals)):
                if has != wanted:
                    raise DataError(
                        f"can't concat: part {i} has other {what}s than part 0: {sorted(has ^ wanted)} "
                        "stand in only one of them."
                    )
            for what, own, first in (
                ("column", part.steps, parts[0].steps),
                ("final_obs", part.final_obs, parts[0].final_obs),
            ):
                for name, column in own.items():
                    found, expected = arrays.describe(column), arrays.describe(first[name])
                    if found != expected:
                        raise DataError(
                            f"can't concat: {what} `{name}` is {found} in part {i}, but {expected} in part 0. "
                            "Convert one of them."
                        )
        starts = np.cumsum([0, *(part.num_steps for part in parts)])
        return Experience(
            {name: arrays.concat([part.steps[name] for part in parts]) for name in parts[0].steps},
            np.concatenate([[0], *(part.offsets[1:] + s for part, s in zip(parts, starts, strict=False))]).astype(
                np.int64
            ),
            Segments.concat([part.segments for part in parts]),
            {name: arrays.concat([part.final_obs[name] for part in parts]) for name in parts[0].final_obs},
        )

    def join(self) -> "Experience":
        """The same steps, with segments that directly continue the one before them joined to it: undoes `cut`."""
        if self.num_segments < 2:
            return self
        starts = np.flatnonzero(np.append(True, ~self.segments.continues(self.lengths)))
        if len(starts) == self.num_segments:
            return self
        ends = np.append(starts[1:], self.num_segments) - 1
        last = self.segments[ends]
        segments = self.segments[starts].replace(
            terminated=last.terminated,
            truncated=last.truncated,
            has_final_obs=last.has_final_obs,
            lookback=np.add.reduceat(self.segments.lookback, starts),
        )
        offsets = np.append(self.offsets[starts], self.offsets[-1])
        return Experience(
            self.steps, offsets, segments, {n: arrays.take(column, ends) for n, column in self.final_obs.items()}
        )

    # -- to the learner -----------------------------------------------------------------------------------------

    def pad(self, max_len: int | None = None) -> "padding.Padded":
        """Segments as rows of ``[B, T, ...]`` columns with a mask; see `etude.experience.padding`."""
        return padding.pad(self, max_len)

    def minibatches(
        self,
        size: int,
        *,
        shuffle: bool = True,
        epochs: int = 1,
        rng: np.random.Generator | None = None,
        names: Sequence[str] | None = None,
    ) -> Iterator[dict[str, Array]]:
        """Columns of ``size`` steps at a time; every step that is not lookback once an epoch."""
        return minibatches.minibatches(self, size, shuffle=shuffle, epochs=epochs, rng=rng, names=names)

    def to(self, device: "torch.device | str") -> "Experience":
        """The same Experience with its columns as torch tensors on ``device``: the one door from NumPy to torch.

        On the CPU, tensors share the arrays' memory. Offsets and segments stay in NumPy on the host.
        Columns of strings can't be tensors and are left out.
        """
        import torch

        def move(column: Array) -> "torch.Tensor":
            tensor = torch.from_numpy(np.ascontiguousarray(column)) if isinstance(column, np.ndarray) else column
            return tensor.to(device)

        def moved(columns: dict[str, Array]) -> dict[str, Array]:
            return {name: move(column) for name, column in columns.items() if column.dtype != object}

        return Experience(moved(self.steps), self.offsets, self.segments, moved(self.final_obs))

    def numpy(self) -> "Experience":
        """The same Experience with NumPy columns; tensors on the CPU share their memory."""

        def move(column: Array) -> Array:
            return column if isinstance(column, np.ndarray) else column.detach().cpu().numpy()

        return Experience(
            {name: move(column) for name, column in self.steps.items()},
            self.offsets,
            self.segments,
            {name: move(column) for name, column in self.final_obs.items()},
        )

    # -- at rest and in order -----------------------------------------------------------------------------------

    def to_table(self) -> "pa.Table":
        """A row a step, as recordings keep it; see `etude.experience.arrow`."""
        from etude.experience import arrow

        return arrow.to_table(self)

    @staticmethod
    def from_table(table: "pa.Table") -> "Experience":
        """The inverse of `to_table`, bit for bit."""
        from etude.experience import arrow

        return arrow.from_table(table)

    def validate(self, *, finite: Sequence[str] = (col.OBS, col.ACTION, col.REWARD)) -> None:
        """Raise a DataError that names the first segment and column that break a rule of Experience.

        Args:
            finite: Roots of the columns that must hold finite numbers only (``final_obs`` goes with ``obs``).
        """
        check.validate(self, finite)


def offsets_of(lengths: Index) -> Index:
    """int64 ``[num_segments + 1]``: the offsets of segments of these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
