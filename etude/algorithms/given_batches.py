# SPDX-License-Identifier: Apache-2.0
"""Batches that users make: looked at before a network meets them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from etude import columns as col
from etude.errors import DataError
from etude.experience import Experience
from etude.modules import Module
from etude.spaces import Space, leaf_dtype, leaf_shape, leaves


def check_batch(batch: Any, module: Module) -> None:
    """Look at a batch of columns, or at Experience.

    Raises:
        DataError: it is neither; a column of observations or actions is missing, or is not what the module's spaces
            say; columns are of different lengths, or have no rows.
    """
    columns = batch.steps if isinstance(batch, Experience) else batch
    if not isinstance(columns, Mapping):
        raise DataError(f"a batch is {_kind(batch)}: give a mapping of columns by name, or Experience.")
    for name, column in columns.items():
        if not isinstance(column, np.ndarray | torch.Tensor):
            raise DataError(f"column `{name}` of a batch is {_kind(column)}: give a NumPy array or a tensor.")
    lengths = {name: len(column) for name, column in columns.items() if column.ndim}
    if len(lengths) < len(columns) or len(set(lengths.values())) != 1 or not next(iter(lengths.values())):
        raise DataError(f"the columns of a batch must have equally many rows, at least one; they have {lengths}.")
    for root, space in ((col.OBS, module.obs_space), (col.ACTION, module.action_space)):
        for name, leaf in leaves(space, root).items():
            if name not in columns:
                raise DataError(f"a batch has no column `{name}`; it has {', '.join(columns)}.")
            _check_column(name, columns[name], leaf)


def _check_column(name: str, column: Any, leaf: Space) -> None:
    wanted = leaf_shape(leaf)
    if tuple(column.shape[1:]) != wanted:
        raise DataError(f"column `{name}` of a batch has rows of shape {tuple(column.shape[1:])}, wanted are {wanted}.")
    if leaf_dtype(leaf).kind == "f":
        return
    is_float = column.dtype.is_floating_point if isinstance(column, torch.Tensor) else column.dtype.kind == "f"
    if is_float:
        raise DataError(f"column `{name}` of a batch is {column.dtype}, but {leaf} has whole numbers.")
    if isinstance(leaf, spaces.Discrete):
        low, high = int(leaf.start), int(leaf.start + leaf.n) - 1
        least, most = int(column.min()), int(column.max())
        if least < low or most > high:
            raise DataError(f"column `{name}` of a batch goes from {least} to {most}, but {leaf} from {low} to {high}.")


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
