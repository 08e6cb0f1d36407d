# SPDX-License-Identifier: Apache-2.0
"""The few array operations that Experience needs, for NumPy arrays and torch tensors alike.

Torch is looked at only where a tensor is met, so that reading recordings does not import it.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = Any
"""A NumPy array or a torch tensor. What both can do has no common type, so a checker takes it for anything."""

Index: TypeAlias = NDArray[np.int64]


def take(array: Array, index: Index) -> Array:
    """The rows ``index`` of ``array``: a copy."""
    if isinstance(array, np.ndarray):
        return array.take(index, axis=0)
    import torch

    return array.index_select(0, torch.from_numpy(index).to(array.device))


def concat(arrays: Sequence[Array]) -> Array:
    """The arrays end to end along the first axis; one array alone is returned as it is."""
    if len(arrays) == 1:
        return arrays[0]
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate(arrays)
    import torch

    return torch.cat(list(arrays))


def zeros(rows: int | tuple[int, ...], like: Array) -> Array:
    """Zeros of shape ``rows`` + the shape of one row of ``like``, of its dtype and on its device."""
    shape = (*((rows,) if isinstance(rows, int) else rows), *like.shape[1:])
    if isinstance(like, np.ndarray):
        return np.full(shape, None, object) if like.dtype == object else np.zeros(shape, like.dtype)
    return like.new_zeros(shape)


def put(array: Array, index: Index, values: Array) -> None:
    """Write ``values`` to the rows ``index`` of ``array``."""
    if isinstance(array, np.ndarray):
        array[index] = values
    else:
        import torch

        array[torch.from_numpy(index).to(array.device)] = values


def ranges(starts: Index, lengths: Index) -> Index:
    """The integers of every range ``starts[i] .. starts[i] + lengths[i]``, end to end."""
    total = int(lengths.sum())
    if total == 0:
        return np.zeros(0, np.int64)
    ends = np.cumsum(lengths)
    shift: Index = np.repeat(starts - (ends - lengths), lengths)
    return np.arange(total, dtype=np.int64) + shift


def firsts(codes: Index) -> Index:
    """For each code, where the first one equal to it stands."""
    _, first, code = np.unique(codes, return_index=True, return_inverse=True)
    found: Index = first[code]
    return found


def are_alike(a: Array, b: Array) -> bool:
    """Whether both have the same dtype and shape of one row."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):  # as `describe` says, which takes long
        return bool(a.dtype == b.dtype and a.shape[1:] == b.shape[1:])
    return describe(a) == describe(b)


def describe(array: Array) -> str:
    """Dtype and shape of one row, such as ``float32[4]`` or ``int64``."""
    dtype = str(array.dtype).removeprefix("torch.")
    return dtype + (str(list(array.shape[1:])) if array.ndim > 1 else "")
