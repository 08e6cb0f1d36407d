# SPDX-License-Identifier: Apache-2.0
"""Batch: what a loss sees of the data. Columns by name, gathered only when they are asked for."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.experience import arrays
from etude.experience.arrays import Array

if TYPE_CHECKING:
    from etude.modules import Module


class Batch:
    """Some rows of columns, as tensors: ``batch.obs``, ``batch.action``, ``batch.advantage``, ``batch["my/column"]``.

    ``obs``, ``next_obs`` and ``action`` come nested, as their spaces are. float64 comes as float32.

    Args:
        source: The columns, NumPy or torch.
        rows: The rows of this batch; None is all.
        module: Whose spaces say how observations and actions are nested.
        device: Where the tensors go.
    """

    def __init__(
        self,
        source: Mapping[str, Array],
        rows: NDArray[np.int64] | None,
        module: "Module",
        device: torch.device | str = "cpu",
    ) -> None:
        self._source = source
        self._rows = rows
        self._module = module
        self._device = device
        self._cache: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        """A column ``[B, ...]`` by its full name."""
        found = self._cache.get(name)
        if found is None:
            try:
                column = self._source[name]
            except KeyError:
                raise DataError(
                    f"the batch has no column `{name}`; it has {', '.join(sorted(self._source))}. "
                    "A connector of the learner can add it (learner_connectors)."
                ) from None
            found = self._cache[name] = self._tensor(column)
        return found

    def _tensor(self, column: Array) -> torch.Tensor:
        rows = column if self._rows is None else arrays.take(column, self._rows)
        tensor = torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows
        dtype = torch.float32 if tensor.dtype == torch.float64 else None
        return tensor.to(self._device, dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in (col.OBS, col.NEXT_OBS):
            names = col.under(self._source, name)
            return self._module.obs_from({col.OBS + n[len(name) :]: self[n] for n in names or [name]})
        if name == col.ACTION:
            return self._module.action_from({n: self[n] for n in col.under(self._source, name) or [name]})
        return self[name]

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def __len__(self) -> int:
        return len(self._rows) if self._rows is not None else len(next(iter(self._source.values())))

    @property
    def used(self) -> dict[str, torch.Tensor]:
        """The columns asked for so far."""
        return self._cache
