# SPDX-License-Identifier: Apache-2.0
"""Batch: what a loss sees of the data. Columns by name, gathered only when they are asked for."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from etude import columns as col
from etude.errors import DataError
from etude.experience.arrays import Array

if TYPE_CHECKING:
    from etude.learners.sequences import Layout
    from etude.modules import Module, Output
    from etude.modules.critics import TwinCritic


class Batch:
    """Columns of a batch as tensors: ``batch.obs``, ``batch.action``, ``batch.advantage``, ``batch["my/column"]``.

    ``obs``, ``next_obs`` and ``action`` come nested, as their spaces are. `forward` runs a module, recurrent or not, on
    the observations.

    Args:
        columns: The columns, ``[B, ...]``; looked up only when asked for.
        module: Whose spaces say how observations and actions are nested.
        layout: For a recurrent module: how the rows lie in sequences.
        size: How many rows there are; None: as many as the first column that is asked for has.
    """

    __slots__ = ("_columns", "_layout", "_module", "_size", "used")

    def __init__(
        self,
        columns: Mapping[str, torch.Tensor],
        module: "Module",
        layout: "Layout | None" = None,
        size: int | None = None,
    ) -> None:
        self._columns = columns
        self._module = module
        self._layout = layout
        self._size = size
        self.used: dict[str, torch.Tensor] = {}
        """The columns asked for so far."""

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

    @property
    def size(self) -> int:
        """How many rows there are."""
        if self._size is None:
            self._size = len(self[next(iter(self.used or self._columns))])
        return self._size

    def forward(self, module: "Module") -> "Output":
        """What ``module`` says about each row: ``dist_inputs`` ``[B, n]`` and ``value`` ``[B]``.

        A recurrent module walks along the sequences that the rows lie in, each from the state in which its first step
        was seen when it was made.
        """
        if self._layout is None:
            return module(self.obs)  # type: ignore[no-any-return]
        return self._layout.forward(module, self._obs_columns(col.OBS))

    def forward_next(self, module: "Module") -> "Output":
        """What ``module`` says about the observation after each row's reward (of n steps, their last)."""
        if self._layout is None:
            return module(self.next_obs)  # type: ignore[no-any-return]
        return self._layout.forward(module, self._obs_columns(col.OBS), self[col.STEPS_AHEAD])

    def encode(self, critic: "TwinCritic") -> torch.Tensor:
        """``[B, width]``: what ``critic`` sees in each row's observation."""
        return self._encoded(critic, col.OBS)

    def encode_next(self, critic: "TwinCritic") -> torch.Tensor:
        """``[B, width]``: the same of the observation that `forward_next` is about."""
        return self._encoded(critic, col.NEXT_OBS)

    def _encoded(self, critic: "TwinCritic", root: str) -> torch.Tensor:
        layout = self._layout
        if layout is None:
            return critic.encode(self._obs_columns(root))[0]

        def walk(obs: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> Any:
            encoded, after = critic.encode(obs, state)
            return {"encoded": encoded}, after

        ahead = self[col.STEPS_AHEAD] if root == col.NEXT_OBS else None
        start = layout.zeros(critic.initial_state())
        return layout.along(walk, self._obs_columns(col.OBS), start, ahead)["encoded"]

    def _obs_columns(self, root: str) -> dict[str, torch.Tensor]:
        parts = col.under(self._columns, root) or [root]
        return {col.OBS + part[len(root) :]: self[part] for part in parts}

    def __getattr__(self, name: str) -> Any:
        if name in (col.OBS, col.NEXT_OBS):
            return self._module.obs_from(self._obs_columns(name))
        if name == col.ACTION:
            return self._module.action_from({part: self[part] for part in col.under(self._columns, name) or [name]})
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __contains__(self, name: str) -> bool:
        return name in self._columns


class Shuffled:
    """Columns in a given order of rows, cut into minibatches. A column is gathered, once, when it is first needed.

    Args:
        columns: The columns.
        order: The rows.
        size: How many of them go into a minibatch; or into each, one after the other.
    """

    def __init__(self, columns: Mapping[str, torch.Tensor], order: torch.Tensor, size: int | list[int]) -> None:
        self.columns = columns
        self._order = order
        self._size = size
        self._parts: dict[str, tuple[torch.Tensor, ...]] = {}

    def part(self, name: str, i: int) -> torch.Tensor:
        """Minibatch i of a column."""
        if name not in self._parts:
            gathered = _learnable(self.columns[name].index_select(0, self._order))
            self._parts[name] = torch.split(gathered, self._size)
        return self._parts[name][i]


class MinibatchColumns(Mapping[str, torch.Tensor]):
    """The columns of minibatch i."""

    def __init__(self, of: Shuffled, i: int) -> None:
        self._of = of
        self._i = i

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._of.part(name, self._i)

    def __iter__(self) -> Iterator[str]:
        return iter(self._of.columns)

    def __len__(self) -> int:
        return len(self._of.columns)


def as_tensors(columns: Mapping[str, Array], device: torch.device | str) -> dict[str, torch.Tensor]:
    """Columns as tensors on ``device``, sharing memory on the CPU; columns of strings are left out."""
    tensors = {}
    for name, column in columns.items():
        if column.dtype != object:
            tensor = torch.from_numpy(column) if isinstance(column, np.ndarray) else column
            tensors[name] = _learnable(tensor.to(device))
    return tensors


def _learnable(tensor: torch.Tensor) -> torch.Tensor:
    """Networks compute in float32: a float64 column (rewards, some observations) is cast."""
    return tensor.float() if tensor.dtype == torch.float64 else tensor
