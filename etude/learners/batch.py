# SPDX-License-Identifier: Apache-2.0
"""Batch: the data that a loss gets, as columns by name that are gathered only when used."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from etude import columns as col
from etude.display import short
from etude.errors import DataError
from etude.experience.arrays import Array, Index
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
        self._burn_in, self._burn_in_obs, self._final_obs = burn_in, burn_in_obs or {}, final_obs
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

    @property
    def know_next(self) -> bool:
        """Whether the observations after the sequences' last steps are there, as in a replay."""
        return self._final_obs is not None

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
        assert self._final_obs is not None
        last = torch.from_numpy(self._lengths).to(self._device)
        every = torch.arange(len(self._lengths), device=self._device)
        for name, column in padded.items():
            final = self._final_obs[name].to(column.dtype)
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
                    "A connector of the learner can add it (learner_connectors)."
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

    def encode(self, critic: TwinCritic) -> torch.Tensor:
        """Each row's observation as ``critic`` encodes it, ``[B, width]``."""
        return self._encoded(critic, col.OBS)

    def encode_next(self, critic: TwinCritic) -> torch.Tensor:
        """Like `encode`, for the observations of `forward_next`, ``[B, width]``."""
        return self._encoded(critic, col.NEXT_OBS)

    def _encoded(self, critic: TwinCritic, root: str) -> torch.Tensor:
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
        if self._sequences is not None and not self._sequences.know_next:
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
