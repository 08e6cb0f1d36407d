# SPDX-License-Identifier: Apache-2.0
"""Experience: a table of time steps, cut into segments. It carries data from envs to files and learners."""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from etude import columns as col
from etude.display import short, table
from etude.errors import DataError
from etude.experience import arrays
from etude.experience.arrays import Array, Index, describe
from etude.experience.ids import Ids

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

Names: TypeAlias = Ids | Sequence[str | None] | NDArray[np.object_]
Bools: TypeAlias = NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, eq=False, slots=True, repr=False)
class Segments:
    """Facts about each segment, as columns ``[num_segments]``, always on the host. Create them with `Segments.of`."""

    episode_id: Ids
    """The episode of each segment; all agents in an episode share it."""
    agent_id: Ids
    """The agent whose steps these are; None for a single, unnamed agent."""
    module_id: Ids
    """The module that acted; None for a single, unnamed module."""
    t_start: Index
    """int64: the step index in the episode of the segment's first row, lookback included."""
    lookback: Index
    """int64: the number of leading rows that are context only and never trained on."""
    terminated: Bools
    """bool: the episode ended after the last step by the env's own rules, so the value after it is 0."""
    truncated: Bools
    """bool: the episode was cut off after the last step, as by a time limit, so the value after it is bootstrapped."""
    has_final_obs: Bools
    """bool: the observation after the last step is known. If False, ``final_obs`` holds meaningless zeros."""

    def __repr__(self) -> str:
        ends = {name: int(getattr(self, name).sum()) for name in ("terminated", "truncated")}
        return short(self, f"{len(self.t_start):,} segments", episodes=len({*self.episode_id.tolist()}), **ends)

    @classmethod
    def of(
        cls,
        num: int,
        *,
        episode_id: Names | str,
        agent_id: Names | str | None = None,
        module_id: Names | str | None = None,
        t_start: ArrayLike = 0,
        lookback: ArrayLike = 0,
        terminated: ArrayLike = False,
        truncated: ArrayLike = False,
        has_final_obs: ArrayLike = True,
    ) -> "Segments":
        """Create the columns of ``num`` segments. A single value or id is used for all of them.

        Raises:
            ValueError: ids are given one by one, but not ``num`` of them.
        """
        return cls(
            episode_id=Ids.of(episode_id, num),
            agent_id=Ids.of(agent_id, num),
            module_id=Ids.of(module_id, num),
            t_start=_filled(t_start, num, np.int64),
            lookback=_filled(lookback, num, np.int64),
            terminated=_filled(terminated, num, np.bool_),
            truncated=_filled(truncated, num, np.bool_),
            has_final_obs=_filled(has_final_obs, num, np.bool_),
        )

    @classmethod
    def concat(cls, parts: Sequence["Segments"]) -> "Segments":
        """The segments of all ``parts``, in order."""
        each: Any = zip(*map(_columns, parts), strict=True)
        joined: list[Any] = [(Ids.concat if isinstance(own[0], Ids) else np.concatenate)(own) for own in each]
        return cls(*joined)

    def __len__(self) -> int:
        return len(self.episode_id)

    def __getitem__(self, where: Any) -> "Segments":
        """The segments at a slice, index array or boolean mask."""
        return Segments(*[column[where] for column in _columns(self)])

    def columns(self) -> dict[str, Any]:
        """The columns by name."""
        return dict(zip(SEGMENT_COLUMNS, _columns(self), strict=True))

    def replace(self, **columns: Any) -> "Segments":
        """The same segments with some columns replaced; see `of`."""
        return Segments.of(len(self), **{**self.columns(), **columns})

    def tracks(self) -> Index:
        """int64 ``[num_segments]``: a number for each agent in an episode, equal for equal episode and agent ids."""
        return self.episode_id.codes * len(self.agent_id.names) + self.agent_id.codes

    @property
    def done(self) -> Bools:
        """bool ``[num_segments]``: the episode ended with this segment, terminated or truncated."""
        return self.terminated | self.truncated

    def continues(self, lengths: Index) -> Bools:
        """bool ``[num_segments - 1]``: whether each segment after the first directly continues the one before it."""
        a, b = self[:-1], self[1:]
        same = (a.episode_id == b.episode_id) & (a.agent_id == b.agent_id) & (a.module_id == b.module_id)
        in_time = (a.t_start + lengths[:-1] == b.t_start) & ((b.lookback == 0) | (a.lookback == lengths[:-1]))
        return np.asarray(same & in_time & ~a.done)


SEGMENT_COLUMNS = tuple(field.name for field in dataclasses.fields(Segments))
_columns: Any = operator.attrgetter(*SEGMENT_COLUMNS)


def _filled(values: ArrayLike, num: int, dtype: Any) -> NDArray[Any]:
    array = np.asarray(values, dtype)
    return np.full(num, array, dtype) if array.ndim == 0 else array


class Experience:
    """Columns of steps, cut into segments: consecutive steps of one agent in one episode.

    ``len(exp)`` is the number of segments, and ``exp[i]`` is segment i as an Experience (a view).

    Args:
        steps: The columns, each ``[num_steps, ...]``; NumPy arrays or torch tensors.
        offsets: int64 ``[num_segments + 1]``; segment i is the rows ``offsets[i]:offsets[i + 1]``, at least one.
        segments: The facts about each segment.
        final_obs: For each observation column, ``[num_segments, ...]``: the observation after the last step.

    To be cheap, the constructor checks nothing; `validate` checks everything.
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

    # -- size and summary ------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """The number of rows, including lookback."""
        return int(self.offsets[-1])

    @property
    def num_segments(self) -> int:
        """The number of segments."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Index:
        """int64 ``[num_segments]``: the number of rows of each segment, including lookback."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return self.num_segments

    def __repr__(self) -> str:
        shown = [f"{name} {describe(column)}" for name, column in self.steps.items()]
        if len(shown) > 6:
            shown[5:] = [f"and {len(shown) - 5} more columns"]
        ends = f"terminated {int(self.segments.terminated.sum()):,}, truncated {int(self.segments.truncated.sum()):,}"
        return f"Experience({self.num_segments:,} segments, {self.num_steps:,} steps: {', '.join(shown)}; {ends})"

    def _repr_html_(self) -> str:
        columns = [[name, describe(column)] for name, column in self.steps.items()]
        ends = f"terminated {int(self.segments.terminated.sum()):,}, truncated {int(self.segments.truncated.sum()):,}"
        title = f"Experience: {self.num_segments:,} segments, {self.num_steps:,} steps; {ends}"
        return table(title, columns)

    def returns(self) -> NDArray[np.float64]:
        """float64 ``[num_segments]``: the sum of each segment's rewards, without lookback.

        Raises:
            DataError: there are no rewards.
        """
        if col.REWARD not in self.steps:
            raise DataError(f"there is no column `{col.REWARD}`, so there are no returns; there are {[*self.steps]}.")
        rewards = arrays.host(self.steps[col.REWARD])
        if not self.num_segments:
            return np.zeros(0)
        return np.add.reduceat(np.where(self.trained(), rewards.astype(np.float64), 0.0), self.offsets[:-1])

    # -- derived columns --------------------------------------------------------------------------------------

    def segment_of_step(self) -> Index:
        """int64 ``[num_steps]``: the index of each step's segment."""
        return np.repeat(np.arange(self.num_segments), self.lengths)

    def t(self) -> Index:
        """int64 ``[num_steps]``: each step's index in its episode."""
        return np.arange(self.num_steps) + np.repeat(self.segments.t_start - self.offsets[:-1], self.lengths)

    def trained(self) -> NDArray[np.bool_]:
        """bool ``[num_steps]``: True except on lookback rows."""
        mask = np.ones(self.num_steps, bool)
        if self.segments.lookback.any():
            mask[arrays.ranges(self.offsets[:-1], self.segments.lookback)] = False
        return mask

    def trained_steps(self) -> dict[str, Array]:
        """The step columns without lookback rows."""
        if not self.segments.lookback.any():
            return self.steps
        rows = np.flatnonzero(self.trained())
        return {name: column[rows] for name, column in self.steps.items()}

    def at_ends(self, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """bool ``[num_steps]``: each segment's flag on its last step, False elsewhere."""
        out = np.zeros(self.num_steps, bool)
        out[self.offsets[1:][flags] - 1] = True
        return out

    def next_obs(self) -> dict[str, Array]:
        """The observation after each step, by observation column: ``obs`` shifted, ``final_obs`` at segment ends.

        If ``has_final_obs`` is False, the last row of the segment holds meaningless zeros.
        """
        out = {}
        for name, final in self.final_obs.items():
            obs = self.steps[name]
            following = arrays.zeros(len(obs), obs)
            following[:-1] = obs[1:]
            following[self.offsets[1:] - 1] = final
            out[name] = following
        return out

    def with_steps(self, **steps: Array) -> "Experience":
        """The same Experience with some columns added or replaced; everything else is shared."""
        return Experience({**self.steps, **steps}, self.offsets, self.segments, self.final_obs)

    def with_segments(self, **columns: Any) -> "Experience":
        """The same Experience with some columns of its segments replaced; see `Segments.replace`."""
        return Experience(self.steps, self.offsets, self.segments.replace(**columns), self.final_obs)

    def only(self, names: Collection[str]) -> "Experience":
        """The same segments with only these columns, in this order, and their final observations."""
        final_obs = {name: column for name, column in self.final_obs.items() if name in names}
        return Experience({name: self.steps[name] for name in names}, self.offsets, self.segments, final_obs)

    # -- selecting and cutting --------------------------------------------------------------------------------

    def __getitem__(self, which: int | slice) -> "Experience":
        """One segment, or a slice of segments with step 1, as a view.

        Raises:
            IndexError: there is no such segment, or the slice has another step.
            TypeError: ``which`` is neither an integer nor a slice.
        """
        if isinstance(which, slice):
            start, stop, stride = which.indices(self.num_segments)
            if stride != 1:
                raise IndexError(f"a slice of segments must have step 1, not {stride}; use select for other orders.")
            stop = max(start, stop)
        elif not hasattr(which, "__index__") or np.ndim(which):
            raise TypeError(
                f"segments are numbered, not {which!r}: a column is experience.steps['obs'], and several segments are "
                "experience.select(mask or indices)."
            )
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
        episode_id: str | Iterable[str] | None = None,
        agent_id: str | Iterable[str] | None = None,
        module_id: str | Iterable[str] | None = None,
    ) -> "Experience":
        """Some segments, in the given order: a view if they are adjacent, otherwise a copy.

        Args:
            where: A boolean mask, indices or a slice of segments; None means all.
            episode_id: Keep only segments of this episode, or of these episodes. ``agent_id`` and ``module_id`` work
                the same way.

        Raises:
            DataError: an id is not a string.
        """
        index = np.arange(self.num_segments) if where is None else np.atleast_1d(np.arange(self.num_segments)[where])
        for name, wanted in ((col.EPISODE_ID, episode_id), (col.AGENT_ID, agent_id), (col.MODULE_ID, module_id)):
            if wanted is not None:
                index = index[_is_one_of(getattr(self.segments, name)[index], name, wanted)]
        if len(index) == 0:
            return self[0:0]
        if (np.diff(index) == 1).all():
            return self[int(index[0]) : int(index[-1]) + 1]
        return self._taken(index, self.offsets[:-1][index], self.lengths[index], self.segments[index])

    def _taken(self, which: Index, starts: Index, lengths: Index, segments: Segments) -> "Experience":
        """Copy ``lengths[i]`` rows from row ``starts[i]`` on, for each i, up to the end of segment ``which[i]``."""
        rows = arrays.ranges(starts, lengths)
        return Experience(
            {name: arrays.take(column, rows) for name, column in self.steps.items()},
            offsets_of(lengths),
            segments,
            {name: arrays.take(column, which) for name, column in self.final_obs.items()},
        )

    def without_first(self, counts: Index) -> "Experience":
        """The Experience without the first ``counts[i]`` rows of each segment i; empty segments are dropped."""
        counts = np.clip(counts, 0, self.lengths)
        if not counts.any():
            return self
        kept = np.flatnonzero(self.lengths > counts)
        own, counts = self.segments[kept], counts[kept]
        segments = own.replace(t_start=own.t_start + counts, lookback=np.maximum(own.lookback - counts, 0))
        return self._taken(kept, self.offsets[kept] + counts, self.lengths[kept] - counts, segments)

    def episodes(self) -> Iterator["Experience"]:
        """Each episode with the segments of all its agents, in the order of the episodes' first segments.

        These are views if an episode's segments are adjacent, as with a single agent.
        """
        first = arrays.firsts(self.segments.episode_id.codes)
        order = np.argsort(first, kind="stable")
        bounds = np.flatnonzero(np.diff(first[order], prepend=-1, append=-1))
        yield from (self.select(order[a:b]) for a, b in itertools.pairwise(bounds))

    def cut(self, max_len: int, *, lookback: int = 0) -> "Experience":
        """Cut the segments into pieces of at most ``max_len`` steps. Without lookback, the columns are shared.

        Args:
            max_len: The maximum number of steps in a piece, at least 1, not counting ``lookback``.
            lookback: The number of preceding steps that each piece after the first gets as context.

        Raises:
            ValueError: an argument is out of range.
        """
        if max_len < 1 or lookback < 0:
            raise ValueError(f"max_len must be at least 1, not {max_len}, and lookback at least 0, not {lookback}.")
        pieces = -(-self.lengths // max_len)
        parent = np.repeat(np.arange(self.num_segments), pieces)
        nth = np.arange(len(parent)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        start = self.offsets[:-1][parent] + nth * max_len
        stop = np.minimum(start + max_len, self.offsets[1:][parent])
        return self.pieces(parent, start, stop, lookback)

    def split(self, at: int) -> tuple["Experience", "Experience"]:
        """Split into the first ``at`` steps and the rest, both as views. A segment across the border is cut.

        Raises:
            ValueError: ``at`` is not between 0 and `num_steps`.
        """
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
        """Segments of the rows ``start[i]:stop[i]``, each inside segment ``parent[i]``; together they cover all rows.

        Each has the observation after it as ``final_obs``; see `cut` for ``lookback``.
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
            values[is_last] = arrays.take(final, parent[is_last])
            values[~is_last] = arrays.take(self.steps[name], stop[~is_last])
            final_obs[name] = values
        lengths = stop - start + context
        steps = self.steps
        if context.any():
            rows = arrays.ranges(start - context, lengths)
            steps = {name: arrays.take(column, rows) for name, column in steps.items()}
        return Experience(steps, offsets_of(lengths), segments, final_obs)

    # -- joining ----------------------------------------------------------------------------------------------

    @staticmethod
    def concat(parts: Sequence["Experience"]) -> "Experience":
        """All segments of ``parts``, in order. Segments are not joined; see `join`.

        Raises:
            DataError: the parts have different columns, or columns of different dtypes or shapes.
        """
        if not parts:
            raise DataError("can't concatenate an empty list of Experience: give at least one.")
        for i, part in enumerate(parts):
            where = f"can't concat part {i} with part 0"
            arrays.check_alike(part.steps, parts[0].steps, "column", where)
            arrays.check_alike(part.final_obs, parts[0].final_obs, "final_obs", where)
        return Experience(
            {name: arrays.concat([part.steps[name] for part in parts]) for name in parts[0].steps},
            offsets_of(np.concatenate([part.lengths for part in parts])),
            Segments.concat([part.segments for part in parts]),
            {name: arrays.concat([part.final_obs[name] for part in parts]) for name in parts[0].final_obs},
        )

    def join(self) -> "Experience":
        """Join each segment to the one before if it directly continues that one; the inverse of `cut`."""
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

    # -- minibatches and devices --------------------------------------------------------------------------------

    def minibatches(
        self,
        size: int,
        *,
        shuffle: bool = True,
        epochs: int = 1,
        rng: np.random.Generator | None = None,
        names: Sequence[str] | None = None,
    ) -> Iterator[dict[str, Array]]:
        """Iterate over minibatches of ``size`` steps; the last one of an epoch may be smaller.

        Every step except lookback occurs once per epoch.

        Args:
            size: Steps in a minibatch, at least 1.
            shuffle: Use a new random order in each epoch; otherwise keep the order.
            epochs: The number of passes over the steps.
            rng: The random generator for the order; None creates one with a random seed.
            names: The columns to include; None means all.

        Raises:
            ValueError: ``size`` or ``epochs`` is out of range.
        """
        if size < 1 or epochs < 0:
            raise ValueError(f"size must be at least 1, not {size}, and epochs at least 0, not {epochs}.")
        columns = {name: self.steps[name] for name in (self.steps if names is None else names)}
        rows = np.flatnonzero(self.trained())
        rng = rng if rng is not None or not shuffle else np.random.default_rng()
        for _ in range(epochs):
            order = rng.permutation(rows) if shuffle and rng is not None else rows
            for start in range(0, len(order), size):
                index = order[start : start + size]
                yield {name: arrays.take(column, index) for name, column in columns.items()}

    def to(self, device: "torch.device | str") -> "Experience":
        """The same Experience with its columns as torch tensors on ``device``.

        On the CPU, tensors share the arrays' memory. Offsets and segments stay in NumPy on the host.
        Columns of strings can't be tensors and are dropped.
        """
        import torch

        def move(column: Array) -> "torch.Tensor":
            tensor = torch.from_numpy(np.ascontiguousarray(column)) if isinstance(column, np.ndarray) else column
            return tensor.to(device)

        return self._moved(move, lambda column: column.dtype != object)

    def numpy(self) -> "Experience":
        """The same Experience with NumPy columns; tensors on the CPU share their memory."""
        if all(
            isinstance(column, np.ndarray) for columns in (self.steps, self.final_obs) for column in columns.values()
        ):
            return self
        return self._moved(arrays.host)

    def _moved(self, move: Callable[[Array], Array], which: Callable[[Array], bool] = lambda _: True) -> "Experience":
        steps, final_obs = (
            {name: move(column) for name, column in columns.items() if which(column)}
            for columns in (self.steps, self.final_obs)
        )
        return Experience(steps, self.offsets, self.segments, final_obs)

    # -- tables and checks --------------------------------------------------------------------------------------

    def to_table(self) -> "pa.Table":
        """An Arrow table with one row per step, as in recordings; see `etude.experience.table`."""
        from etude.experience.table import to_table

        exp = self.numpy()
        return to_table(exp.steps, exp.offsets, exp.segments.columns(), exp.final_obs)

    @staticmethod
    def from_table(table: "pa.Table") -> "Experience":
        """The exact inverse of `to_table`.

        Segments are cut where a filter removed rows; a piece whose end is missing has no ``final_obs``.

        Raises:
            DataError: a key column is missing, or a column has a type that `to_table` never writes.
        """
        from etude.experience.table import from_table

        steps, offsets, segments, final_obs = from_table(table)
        return Experience(steps, offsets, Segments.of(len(offsets) - 1, **segments), final_obs)

    def validate(self, *, finite: Sequence[str] = (col.OBS, col.ACTION, col.REWARD)) -> None:
        """Check all rules of Experience.

        Args:
            finite: Roots of the columns that may hold only finite numbers; ``obs`` includes ``final_obs``.

        Raises:
            DataError: a rule is broken; the message names the first segment and column.
        """
        _check_offsets(self.offsets)
        _check_lengths(self)
        arrays.check_scalars(self.steps, "the experience")
        _check_segments(self)
        check_final_obs(self)
        check_finite(self, finite)


def offsets_of(lengths: Index) -> Index:
    """int64 ``[num_segments + 1]``: the offsets of segments of these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def without_lookback(exp: Experience) -> Experience:
    """The Experience without context rows, and without segments that have no other rows."""
    lookback = exp.segments.lookback
    return exp.without_first(lookback) if lookback.any() else exp


def _check_offsets(offsets: Index) -> None:
    if offsets.dtype != np.int64 or offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0:
        raise DataError(f"offsets must be int64, one-dimensional and start at 0: {offsets[:8]} ({offsets.dtype}).")
    falling = np.flatnonzero(np.diff(offsets) <= 0)
    if len(falling):
        i = int(falling[0])
        raise DataError(
            f"segment {i}: offsets do not increase ({offsets[i]} to {offsets[i + 1]}); it needs at least one step."
        )


def _check_lengths(exp: Experience) -> None:
    steps = {f"column `{name}`": column for name, column in exp.steps.items()}
    segments = {f"segments.{name}": column for name, column in exp.segments.columns().items()}
    final_obs = {f"final_obs `{name}`": column for name, column in exp.final_obs.items()}
    for columns, num, what in ((steps, exp.num_steps, "steps"), (segments | final_obs, exp.num_segments, "segments")):
        for name, column in columns.items():
            if len(column) != num:
                raise DataError(f"{name} has {len(column)} rows, but the offsets are those of {num} {what}.")


def check_final_obs(exp: Experience) -> None:
    """Raise a DataError unless each observation column has a ``final_obs`` like it."""
    arrays.check_alike(exp.final_obs, col.subtree(exp.steps, col.OBS), "column", "final_obs and observations differ")


def _check_segments(exp: Experience) -> None:
    segments = exp.segments
    ids = segments.episode_id
    wrong = np.flatnonzero(~ids.mapped(lambda name: isinstance(name, str), bool))
    if len(wrong):
        raise DataError(f"segment {wrong[0]}: episode_id is {ids[wrong[0]]!r}, not a string.")
    bad = np.flatnonzero((segments.lookback < 0) | (segments.lookback > exp.lengths))
    if len(bad := np.union1d(bad, impossible_times(exp))):
        i = int(bad[0])
        raise DataError(
            f"segment {i} (episode {segments.episode_id[i]!r}): lookback {segments.lookback[i]} or t_start "
            f"{segments.t_start[i]} is impossible with {exp.lengths[i]} steps."
        )


def impossible_times(exp: Experience) -> Index:
    """The indices of segments with a ``t`` below 0 or above the maximum of int64."""
    start = exp.segments.t_start
    return np.flatnonzero((start < 0) | (start > np.iinfo(np.int64).max - exp.lengths))


def check_finite(exp: Experience, finite: Sequence[str]) -> None:
    """Raise a DataError for the first number that is not finite in columns under the roots ``finite``."""
    for name, column in exp.steps.items():
        if name.partition(col.SEPARATOR)[0] in finite and len(rows := arrays.not_finite(column)):
            row = int(rows[0])
            raise DataError(f"column `{name}` holds {_shown(column, row)} at {_located(exp, row)}.")
    if col.OBS in finite:
        for name, final in exp.final_obs.items():
            known = np.flatnonzero(exp.segments.has_final_obs)
            if len(rows := arrays.not_finite(final[known])):
                i = int(known[rows[0]])
                raise DataError(
                    f"final_obs `{name}` holds {_shown(final, i)} in segment {i} "
                    f"(episode {exp.segments.episode_id[i]!r})."
                )


def _is_one_of(ids: Ids, name: str, wanted: str | Iterable[str]) -> NDArray[np.bool_]:
    """Whether each of ``ids`` is ``wanted`` or among them."""
    names = {wanted} if isinstance(wanted, str) or not isinstance(wanted, Iterable) else {*wanted}
    for one in names:
        if not isinstance(one, str):
            raise DataError(f"`{name}` is {one!r}, but ids are strings, such as '0'.")
    return ids.mapped(names.__contains__, bool)


def _shown(column: Array, row: int) -> str:
    value = arrays.host(column[row : row + 1])[0]
    values = np.reshape(value, -1)
    at = int(np.argmax(~np.isfinite(values)))
    return f"{values[at]}" + (f" in component {at}" if np.ndim(value) else "")


def _located(exp: Experience, row: int) -> str:
    """The segment, episode and step of a row, for a message."""
    i = int(np.searchsorted(exp.offsets, row, side="right")) - 1
    t = int(exp.segments.t_start[i]) + row - int(exp.offsets[i])
    agent = exp.segments.agent_id[i]
    return f"segment {i} (episode {exp.segments.episode_id[i]!r}{f', agent {agent!r}' if agent else ''}), t {t}"
