# SPDX-License-Identifier: Apache-2.0
"""Batch: the input of a loss, columns by name that are gathered only when used. Also minibatches of Experience, which
are rows or, for recurrent modules, whole sequences, for one learner or a team."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from etude import columns as col
from etude.display import short
from etude.errors import DataError, ModuleError, SettingsError
from etude.experience import Experience
from etude.experience.arrays import Array, Index, ranges
from etude.learners.distributed import Team, dealt
from etude.modules import Module, Output
from etude.modules.critics import TwinCritic

Tensors: TypeAlias = dict[str, torch.Tensor]

Walk: TypeAlias = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]
"""Runs a network along sequences: takes columns ``obs...`` ``[B, T, ...]`` and the state before them ``[B, ...]``;
returns its outputs for each step, ``[B, T, ...]`` by name, and the state after them."""


class PaddedSequences:
    """The layout of a minibatch's rows in sequences of unequal length, and the states with which these begin.

    Args:
        lengths: Rows of each sequence, int64 ``[num]``.
        state: States before the sequences (and before the burn-in), ``[num, ...]`` by name.
        device: The device of the columns.
        burn_in: Steps that the network first processes without gradients, int64 ``[num]``; None: none.
        burn_in_obs: Columns ``obs...`` of these steps, ``[burn_in.sum(), ...]``.
        final_obs: Columns ``obs...`` ``[num, ...]``: the observation after each sequence.
    """

    def __init__(
        self,
        lengths: Index,
        state: Tensors,
        device: torch.device | str,
        burn_in: Index | None = None,
        burn_in_obs: Tensors | None = None,
        final_obs: Tensors | None = None,
    ) -> None:
        self._lengths, self._state, self._device = lengths, state, device
        self._burn_in, self._burn_in_obs, self.final_obs = burn_in, burn_in_obs or {}, final_obs
        steps = np.arange(int(lengths.max()))
        first = np.cumsum(lengths) - lengths
        # padding repeats a sequence's last row, which is a valid input of the net
        rows = first[:, None] + np.minimum(steps, lengths[:, None] - 1)
        self._shape = rows.shape
        self._rows = self._valid = None
        if rows.size > int(lengths.sum()):
            self._rows = torch.from_numpy(rows.reshape(-1)).to(device)
            self._valid = torch.from_numpy(np.flatnonzero(steps < lengths[:, None])).to(device)

    def forward(self, module: Module, obs: Mapping[str, torch.Tensor], ahead: torch.Tensor | None = None) -> Output:
        """Run ``module`` over the sequences; ``obs`` and the output are ``[n, ...]``, without padding.

        Args:
            module: A recurrent module.
            obs: Columns ``obs...``.
            ahead: int64 ``[n]``: return each row's output this many steps later, at most the one of `final_obs`.
        """

        def walk(obs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
            out = module(module.obs_from(obs), state)
            given = {"dist_inputs": out.dist_inputs, "value": out.value}
            return {name: part for name, part in given.items() if part is not None}, out.state

        found = self.along(walk, obs, self._state, ahead)
        return Output(found.get("dist_inputs"), found.get("value"), dist=module.dist)

    def zeros(self, initial: Tensors) -> Tensors:
        """The states ``[num, ...]`` if every sequence begins with ``initial``."""
        return {name: part.to(self._device).expand(len(self._lengths), *part.shape) for name, part in initial.items()}

    def along(
        self, walk: Walk, obs: Mapping[str, torch.Tensor], state: Tensors, ahead: torch.Tensor | None = None
    ) -> Tensors:
        """The outputs of ``walk`` for each row (or for the row ``ahead`` of it), ``[n, ...]`` by name.

        Args:
            walk: Runs a network along the sequences.
            obs: Columns ``obs...`` ``[n, ...]``.
            state: States before the burn-in, ``[num, ...]`` by name.
            ahead: As in `forward`.
        """
        if self._burn_in is not None:
            state = self._after_burn_in(walk, state, self._burn_in)
        padded = {name: self._padded(column) for name, column in obs.items()}
        if ahead is None:
            found, _ = walk(padded, state)
            rows = {name: part.reshape(-1, *part.shape[2:]) for name, part in found.items()}
            return rows if self._valid is None else {n: part.index_select(0, self._valid) for n, part in rows.items()}
        assert self.final_obs is not None
        last = torch.from_numpy(self._lengths).to(self._device)
        every = torch.arange(len(self._lengths), device=self._device)
        for name, column in padded.items():
            final = self.final_obs[name].to(column.dtype)
            padded[name] = torch.cat([column, final.unsqueeze(1)], 1)
            padded[name][every, last] = final
        found, _ = walk(padded, state)
        # the row of each step, now that each sequence has one more row
        rows_of = np.arange(self._shape[0])[:, None] * (self._shape[1] + 1) + np.arange(self._shape[1])
        at = torch.from_numpy(rows_of.reshape(-1)).to(self._device)
        at = (at if self._valid is None else at.index_select(0, self._valid)) + ahead
        return {name: part.reshape(-1, *part.shape[2:]).index_select(0, at) for name, part in found.items()}

    def _after_burn_in(self, walk: Walk, state: Tensors, lengths: Index) -> Tensors:
        """The states after the burn-in, without gradients; sequences with equally long burn-ins run together."""
        state = {name: column.clone() for name, column in state.items()}
        first = np.cumsum(lengths) - lengths
        for length in np.unique(lengths[lengths > 0]).tolist():
            which = np.flatnonzero(lengths == length)
            rows = torch.from_numpy((first[which, None] + np.arange(length)).reshape(-1)).to(self._device)
            own = torch.from_numpy(which).to(self._device)
            with torch.no_grad():
                obs = {n: c[rows].reshape(len(which), length, *c.shape[1:]) for n, c in self._burn_in_obs.items()}
                _, after = walk(obs, {n: c[own] for n, c in state.items()})
                for name, column in state.items():
                    column[own] = after[name].to(column.dtype)
        return state

    def _padded(self, column: torch.Tensor) -> torch.Tensor:
        rows = column if self._rows is None else column.index_select(0, self._rows)
        return rows.reshape(*self._shape, *column.shape[1:])


class Batch:
    """Columns of a batch as tensors: ``batch.obs``, ``batch.action``, ``batch.advantage``, ``batch["my/column"]``.

    ``obs``, ``next_obs`` and ``action`` are nested as in their spaces. `forward` runs a module, recurrent or not, on
    the observations.

    Args:
        columns: The columns, ``[B, ...]``; looked up only when used.
        module: The module whose spaces say how observations and actions are nested.
        sequences: For a recurrent module: the layout of the rows in sequences; None: single rows.
        size: Number of rows; None: that of the first column.
    """

    __slots__ = ("_columns", "_module", "_sequences", "size", "used")

    def __init__(
        self,
        columns: Mapping[str, torch.Tensor],
        module: Module,
        sequences: PaddedSequences | None = None,
        size: int | None = None,
    ) -> None:
        self._columns = columns
        self._module = module
        self._sequences = sequences
        self.size = len(next(iter(columns.values()), ())) if size is None else size
        """Number of rows."""
        self.used: dict[str, torch.Tensor] = {}
        """The columns used so far."""

    def __repr__(self) -> str:
        return short(self, f"{self.size:,} rows", columns=[*self._columns])

    def __getitem__(self, name: str) -> torch.Tensor:
        """A column ``[B, ...]`` by its full name."""
        if name not in self.used:
            try:
                self.used[name] = self._columns[name]
            except KeyError:
                raise DataError(
                    f"the batch has no column `{name}`; it has {', '.join(sorted(self._columns))}. "
                    "A connector of the learner can add it (learner_connectors), but not to those of `learn_from`."
                ) from None
        return self.used[name]

    def forward(self, module: Module) -> Output:
        """The output of ``module`` for each row's observation: ``dist_inputs`` ``[B, n]`` and ``value`` ``[B]``.

        A recurrent module runs along the sequences, each from its start state.
        """
        if self._sequences is None:
            return module(self._module.obs_from(self._columns_under(col.OBS)))  # type: ignore[no-any-return]
        return self._sequences.forward(module, self._columns_under(col.OBS))

    def forward_next(self, module: Module) -> Output:
        """Like `forward`, for the observation after each row's reward (with n-step returns, after the last reward)."""
        if self._sequences is None:
            return module(self.next_obs)  # type: ignore[no-any-return]
        return self._sequences.forward(module, self._columns_under(col.OBS), self._steps_ahead())

    def encode_next(self, critic: TwinCritic) -> torch.Tensor:
        """Like `encode`, for the observations of `forward_next`, ``[B, width]``."""
        return self.encode(critic, col.NEXT_OBS)

    def encode(self, critic: TwinCritic, root: str = col.OBS) -> torch.Tensor:
        """Each row's observation as ``critic`` encodes it, ``[B, width]``."""
        sequences = self._sequences
        if sequences is None:
            return critic.encode(self._columns_under(root))[0]

        def walk(obs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
            encoded, after = critic.encode(obs, state)
            return {"encoded": encoded}, after

        ahead = self._steps_ahead() if root == col.NEXT_OBS else None
        start = sequences.zeros(critic.initial_state())
        return sequences.along(walk, self._columns_under(col.OBS), start, ahead)["encoded"]

    def _steps_ahead(self) -> torch.Tensor:
        if self._sequences is not None and self._sequences.final_obs is None:
            raise DataError(
                "the next observations of a recurrent module are known only in sequences from a replay, but these were "
                "drawn otherwise: let a connector of the learner compute what the loss needs of them, as GAE does."
            )
        return self[col.STEPS_AHEAD]

    def _columns_under(self, root: str, name: str = col.OBS) -> Tensors:
        """The columns under ``root``, renamed to be under ``name``."""
        if root in self._columns:
            return {name: self[root]}
        found = {}
        for part in col.under(self._columns, root) or [root]:
            found[name + part[len(root) :]] = self[part]
        return found

    def __getattr__(self, name: str) -> Any:
        if name in (col.OBS, col.NEXT_OBS):
            return self._module.obs_from(self._columns_under(name))
        if name == col.ACTION:
            return self._module.action_from(self._columns_under(name, name))
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __contains__(self, name: str) -> bool:
        return name in self._columns


@dataclass
class RowsInOrder:
    """Columns in a given order of rows, cut into minibatches. Each column is gathered once, when it is first used."""

    columns: Mapping[str, torch.Tensor]
    """The columns, ``[rows, ...]``."""
    order: torch.Tensor
    """The rows of all minibatches, one after the other, int64."""
    sizes: list[int]
    """Number of rows in each minibatch."""
    parts: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """The columns gathered so far: a tuple of minibatches by name."""


@dataclass(eq=False, repr=False)
class MinibatchColumns(Mapping[str, torch.Tensor]):
    """The columns of minibatch ``i`` of a `RowsInOrder`."""

    rows: RowsInOrder
    i: int

    def __getitem__(self, name: str) -> torch.Tensor:
        rows = self.rows
        if name not in rows.parts:
            rows.parts[name] = torch.split(rows.columns[name].index_select(0, rows.order), rows.sizes)
        return rows.parts[name][self.i]

    def __contains__(self, name: object) -> bool:
        return name in self.rows.columns

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows.columns)

    def __len__(self) -> int:
        return len(self.rows.columns)


def as_tensors(columns: Mapping[str, Array], device: torch.device | str) -> Tensors:
    """Columns as tensors on ``device``, sharing memory on the CPU; columns of text, times or objects are left out.

    float64 (rewards, some observations) becomes float32, in which networks compute.
    """
    tensors = {}
    for name, column in columns.items():
        if not isinstance(column, np.ndarray) or column.dtype.kind not in "OSUMmV":
            given = torch.from_numpy(np.ascontiguousarray(column)) if isinstance(column, np.ndarray) else column
            tensor = given.to(device)
            tensors[name] = tensor.float() if tensor.dtype == torch.float64 else tensor
    return tensors


# -- minibatches ------------------------------------------------------------------------------------------------------


class Sequences(NamedTuple):
    """Pieces of segments, as consecutive rows. Without a recurrent module, each row is a sequence."""

    starts: Index
    """First row of each, int64 ``[num]``."""
    lengths: Index
    """Rows of each, at least 1, int64 ``[num]``."""
    burn_in: Index
    """Rows before each that are processed first, without gradients, int64 ``[num]``."""

    @classmethod
    def rows(cls, exp: Experience) -> "Sequences":
        """The steps of ``exp`` as single rows, without lookback."""
        starts = np.flatnonzero(exp.trained())
        return cls(starts, np.ones_like(starts), np.zeros_like(starts))

    @classmethod
    def cut(cls, exp: Experience, max_len: int, burn_in: int = 0, context: int = 0) -> "Sequences":
        """The steps of ``exp`` in sequences of at most ``max_len``, from the first step of each segment.

        Lookback is used only for burn-in, as the state at the first step after it was recorded. If connectors need
        ``context`` earlier steps, the first ``context`` steps of a segment that continues an episode are not used for
        burn-in either: what the connectors return for them is not what the module saw.
        """
        begin = exp.offsets[:-1] + exp.segments.lookback
        total = exp.offsets[1:] - begin
        pieces = -(-total // max_len)
        nth = ranges(np.zeros(len(pieces), np.int64), pieces)
        starts = np.repeat(begin, pieces) + nth * max_len
        lengths = np.minimum(max_len, np.repeat(begin + total, pieces) - starts)
        unseen = np.where(exp.segments.t_start > 0, np.minimum(context, exp.segments.lookback), 0)
        return cls(starts, lengths, np.minimum(burn_in, starts - np.repeat(exp.offsets[:-1] + unseen, pieces)))

    @classmethod
    def whole(cls, exp: Experience) -> "Sequences":
        """The segments of ``exp`` as whole sequences, with their lookback as burn-in."""
        lookback = exp.segments.lookback
        return cls(exp.offsets[:-1] + lookback, exp.lengths - lookback, lookback)

    def take(self, which: Index) -> "Sequences":
        """The sequences at these indices, in this order."""
        return Sequences(self.starts[which], self.lengths[which], self.burn_in[which])


def minibatches(
    exp: Experience,
    module: Module,
    device: torch.device,
    *,
    minibatch_size: int | None = None,
    num_minibatches: int | None = None,
    epochs: int = 1,
    rng: np.random.Generator | None = None,
    sparse: int = 1,
    max_seq_len: int = 32,
    burn_in: int = 0,
    context: int = 0,
    sequence_start: Literal["stored", "zeros"] = "stored",
    team: Team | None = None,
) -> Iterator[Batch]:
    """Batches of the steps of ``exp``, without lookback; for a recurrent module, of whole sequences.

    A sequence goes into the minibatch that its first row would be in if minibatches had exactly ``minibatch_size``
    rows. If their number is given, or in a team, sequences are dealt like cards; see `dealt`.

    Args:
        exp: The experience.
        module: The module to which observations, actions and states belong.
        device: The device of the batches.
        minibatch_size: Approximate number of rows in a minibatch. Give this or ``num_minibatches``.
        num_minibatches: Number of minibatches in an epoch.
        epochs: Number of passes over the steps.
        rng: Shuffles each epoch; None keeps the order.
        sparse: Use only every ``sparse``-th step or sequence.
        max_seq_len: See `ModuleLearner.update`, as for the next two.
        burn_in: Steps before each sequence.
        context: See `Sequences.cut`.
        sequence_start: State with which a sequence begins.
        team: Minibatches are formed of the steps of the whole team. A batch is empty if only others have rows of it.

    Raises:
        SettingsError: both or neither of ``minibatch_size`` and ``num_minibatches`` is given, or it is below 1.
    """
    if (minibatch_size is None) == (num_minibatches is None) or (minibatch_size or num_minibatches or 0) < 1:
        raise SettingsError(
            f"minibatch_size is {minibatch_size} and num_minibatches {num_minibatches}: give one of them, at least 1."
        )
    columns = as_tensors(exp.steps, device)
    sequences = Sequences.cut(exp, max_seq_len, burn_in, context) if module.recurrent else Sequences.rows(exp)
    if sparse > 1:
        sequences = sequences.take(np.arange(0, len(sequences.starts), sparse))
    num_rows = int(sequences.lengths.sum())
    owned, rank = [len(sequences.starts)], 0
    if team is not None:
        every = team.gathered((len(sequences.starts), num_rows))
        owned, num_rows, rank = [number for number, _ in every], sum(rows for _, rows in every), team.rank
    for _ in range(epochs):
        order = sequences if rng is None else sequences.take(rng.permutation(len(sequences.starts)))
        if minibatch_size is not None and team is None:
            counts = np.bincount((np.cumsum(order.lengths) - order.lengths) // minibatch_size)
            sizes = counts[counts > 0].tolist()
        else:
            count = num_minibatches or min(sum(owned), -(-num_rows // minibatch_size))  # type: ignore[operator]
            which, sizes = dealt(count, owned, rank)
            order = order.take(which)
        yield from _batches(columns, order, sizes, module, device, stored=sequence_start == "stored")


def batch_from(given: Mapping[str, Array] | Experience, module: Module, device: torch.device) -> Batch:
    """One batch of columns ``[B, ...]``, or of all steps of Experience.

    For a recurrent module, each segment of the Experience is a sequence. It begins with the state that was recorded for
    its first step, or with the initial state if none was. Its lookback is processed first, without gradients.

    Raises:
        ModuleError: the module is recurrent, and the columns are of single steps, which have no order in time.
    """
    if not module.recurrent:
        return Batch(as_tensors(given.trained_steps() if isinstance(given, Experience) else given, device), module)
    if not isinstance(given, Experience):
        raise ModuleError(
            f"{type(module.net).__name__} is recurrent, and can't learn from batches of single steps, which "
            "have no order in time. Take a network without a memory here, or give batches of Experience."
        )
    if not given.num_steps:
        return Batch({}, module, size=0)
    exp = given.select(given.lengths > given.segments.lookback)
    columns, final_obs = as_tensors(exp.steps, device), as_tensors(exp.final_obs, device)
    stored = all(f"{col.STATE_IN}{col.SEPARATOR}{name}" in exp.steps for name in module.initial_state())
    sequences = Sequences.whole(exp)
    counts = [len(sequences.starts)]
    (batch,) = _batches(columns, sequences, counts, module, device, stored=stored, final_obs=final_obs)
    return batch


def _batches(
    columns: Mapping[str, torch.Tensor],
    sequences: Sequences,
    counts: list[int],
    module: Module,
    device: torch.device,
    *,
    stored: bool,
    final_obs: dict[str, torch.Tensor] | None = None,
) -> Iterator[Batch]:
    """Batches of sequences in the given order, ``counts[i]`` in each; a count of 0 gives a batch without rows.

    Args:
        columns: The columns that the sequences' rows refer to.
        sequences: The sequences of all batches, one after the other.
        counts: Number of sequences in each batch.
        module: See `minibatches`.
        device: The device of the columns.
        stored: Whether sequences begin with their recorded states or with the initial one.
        final_obs: Columns ``obs...`` ``[num, ...]``: the observation after each sequence.

    Raises:
        DataError: the columns do not hold the module's state.
    """
    if not module.recurrent:
        rows = RowsInOrder(columns, torch.from_numpy(sequences.starts).to(device), counts)
        for i, size in enumerate(counts):
            yield Batch(MinibatchColumns(rows, i), module, size=size)
        return
    starts, lengths, burn_in = sequences
    bounds = np.cumsum([0, *counts])
    sizes = _sums(lengths, bounds)
    rows = RowsInOrder(columns, torch.from_numpy(ranges(starts, lengths)).to(device), sizes)
    first = RowsInOrder(columns, torch.from_numpy(starts - burn_in).to(device), counts)
    burned_rows = torch.from_numpy(ranges(starts - burn_in, burn_in)).to(device)
    before = RowsInOrder(columns, burned_rows, _sums(burn_in, bounds))
    for i, size in enumerate(sizes):
        if not size:
            yield Batch({}, module, size=0)
            continue
        own = slice(bounds[i], bounds[i + 1])
        if stored:
            state = module.state_from(MinibatchColumns(first, i))
        else:
            initial = module.initial_state().items()
            state = {name: torch.zeros(counts[i], *zeros.shape, device=device) for name, zeros in initial}
        walked: dict[str, torch.Tensor] = {}
        if burn_in[own].any():
            burned = MinibatchColumns(before, i)
            walked = {name: burned[name] for name in col.under(columns, col.OBS)}
        padded = PaddedSequences(lengths[own], state, device, burn_in[own] if walked else None, walked, final_obs)
        yield Batch(MinibatchColumns(rows, i), module, padded, size)


def _sums(numbers: Index, bounds: Index) -> list[int]:
    """The sums of ``numbers[bounds[i]:bounds[i + 1]]``, for all i."""
    totals = np.append(0, np.cumsum(numbers))
    return np.diff(totals[bounds]).tolist()  # type: ignore[no-any-return]
