# SPDX-License-Identifier: Apache-2.0
"""The array operations that Experience needs, for NumPy arrays and torch tensors alike.

Torch is only used once there is a tensor, so that reading recordings does not import it.
"""

import functools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from etude import columns as col
from etude.columns import Columns
from etude.errors import DataError
from etude.spaces import Space, leaf_shape, leaves

if TYPE_CHECKING:
    import torch

Array: TypeAlias = Any
"""A NumPy array or a torch tensor. The two have no common type, so type checkers treat it as Any."""

Index: TypeAlias = NDArray[np.int64]


def is_array(value: Any) -> bool:
    """Whether a value is a NumPy array or a torch tensor."""
    if isinstance(value, np.ndarray):
        return True
    torch = sys.modules.get("torch")  # without it, there are no tensors
    return torch is not None and isinstance(value, torch.Tensor)


def take(array: Array, index: Index) -> Array:
    """The rows ``index`` of ``array``, as a copy."""
    if isinstance(array, np.ndarray):
        return array.take(index, axis=0)
    import torch

    return array.index_select(0, torch.from_numpy(index).to(array.device))


def library(array: Array) -> Any:
    """The module ``numpy`` or ``torch``, according to the type of ``array``: ``library(x).exp(x)``."""
    if isinstance(array, np.ndarray):
        return np
    import torch

    return torch


def concat(arrays: Sequence[Array], axis: int = 0) -> Array:
    """The arrays joined along an axis; a single array is returned as it is."""
    return arrays[0] if len(arrays) == 1 else library(arrays[0]).concatenate(arrays, axis)


def where_rows(rows: Array, values: Array, others: Array) -> Array:
    """Take ``values`` where ``rows`` is True and ``others`` elsewhere.

    Args:
        rows: bool ``[N]``.
        values: An array ``[N, ...]`` of the dtype of ``others``, or a number.
        others: An array ``[N, ...]``. It may be returned itself if no row is True.
    """
    if isinstance(others, np.ndarray) and not rows.any():
        return others
    of, at = library(others), rows.reshape(-1, *(1,) * (others.ndim - 1))
    if of is np or others.dtype not in (of.int16, of.uint16, of.uint64):
        return of.where(at, values, others)
    # ONNX runtimes have no `where` for these dtypes
    wide = values if isinstance(values, int) else values.long()
    return of.where(at, wide, others.long()).to(others.dtype)


def zeros(rows: int | tuple[int, ...], like: Array) -> Array:
    """Zeros (None for objects) of shape ``rows`` + the shape of a row of ``like``, with its dtype and device."""
    shape = (*((rows,) if isinstance(rows, int) else rows), *like.shape[1:])
    if isinstance(like, np.ndarray):
        return np.full(shape, None, object) if like.dtype == object else np.zeros(shape, like.dtype)
    return like.new_zeros(shape)


def copied(array: Array) -> Array:
    """A copy of ``array``."""
    return array.copy() if isinstance(array, np.ndarray) else array.clone()


def cast(array: Array, dtype: Any) -> Array:
    """``array`` with the NumPy dtype ``dtype``; ``array`` itself if it has that dtype."""
    return array.astype(dtype, copy=False) if isinstance(array, np.ndarray) else array.to(tensor_dtype(np.dtype(dtype)))


def clip(array: Array, low: Any, high: Any) -> Array:
    """``array`` clipped between two numbers, or two arrays of the same kind."""
    if isinstance(array, np.ndarray):
        return np.minimum(np.maximum(array, low), high)  # faster than np.clip
    return array.clamp(low, high)


def clip_in_place(array: Array, low: float, high: float) -> Array:
    """Clip ``array`` between two numbers in place, and return it."""
    if not isinstance(array, np.ndarray):
        return array.clamp_(low, high)
    np.maximum(array, low, out=array)
    return np.minimum(array, high, out=array)


def host(array: Array) -> NDArray[Any]:
    """``array`` as a NumPy array on the host. CPU tensors share their memory; others are copied."""
    if isinstance(array, np.ndarray):
        return array
    values: NDArray[Any] = array.detach().cpu().numpy()
    return values


def host_columns(columns: Mapping[str, Array]) -> dict[str, NDArray[Any]]:
    """Each column as a NumPy array, see `host`."""
    return {name: host(column) for name, column in columns.items()}


@functools.cache
def tensor_dtype(dtype: np.dtype[Any]) -> "torch.dtype":
    """The torch dtype of a NumPy dtype.

    Raises:
        TypeError: torch has no such dtype.
    """
    import torch

    return torch.from_numpy(np.empty(0, dtype)).dtype


class Constant:
    """An array for computations with NumPy arrays, and with tensors on any device.

    The array is copied to each device once.
    """

    def __init__(self, value: NDArray[Any]) -> None:
        self.value = value
        self._tensors: dict[Any, Any] = {}

    def like(self, array: Array) -> Array:
        """The value in the form of ``array``: a NumPy array, or a tensor on the same device."""
        if isinstance(array, np.ndarray):
            return self.value
        tensor = self._tensors.get(array.device)
        if tensor is None:
            import torch

            with torch.inference_mode(False):  # it may be part of a graph with gradients later
                tensor = self._tensors[array.device] = torch.from_numpy(np.array(self.value)).to(array.device)
        return tensor

    def __reduce__(self) -> Any:
        return Constant, (self.value,)  # without the tensors, as the copy may be in another process


def not_finite(array: Array) -> Index:
    """The indices of rows with NaN or infinity. If a tensor has none, only one bool is copied to the host."""
    if not isinstance(array, np.ndarray):
        if not array.is_floating_point() or bool(array.detach().sum().isfinite()):
            return np.zeros(0, np.int64)
        array = host(array)
    if array.dtype.kind != "f" or not len(array):
        return np.zeros(0, np.int64)
    with np.errstate(invalid="ignore", over="ignore"):
        if np.isfinite(array.sum()):
            return np.zeros(0, np.int64)
    return np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(axis=1))


def ranges(starts: Index, lengths: Index) -> Index:
    """The integers of all ranges ``starts[i] .. starts[i] + lengths[i] - 1``, joined."""
    total = int(lengths.sum())
    if total == 0:
        return np.zeros(0, np.int64)
    ends = np.cumsum(lengths)
    shift: Index = np.repeat(starts - (ends - lengths), lengths)
    return np.arange(total, dtype=np.int64) + shift


def firsts(codes: Index) -> Index:
    """For each code, the index of the first code equal to it."""
    _, first, code = np.unique(codes, return_index=True, return_inverse=True)
    found: Index = first[code]
    return found


def hashes_of(columns: Mapping[str, NDArray[Any]]) -> NDArray[np.uint64]:
    """Hash the bytes of each row over all columns: uint64 ``[rows]``; equal rows have equal hashes."""
    out = np.zeros(len(next(iter(columns.values()))), np.uint64)
    for column in columns.values():
        words = words_of(column).astype(np.uint64)
        factors = np.random.default_rng(0).integers(1, 2**63, words.shape[1], np.uint64) * np.uint64(2) + np.uint64(1)
        out = out * np.uint64(0x9E3779B97F4A7C15) + (words * factors).sum(axis=1, dtype=np.uint64)
    return out


def words_of(column: NDArray[Any]) -> NDArray[Any]:
    """View each row of numbers as unsigned integers ``[rows, words]``, as large as divide its bytes (8, 4 or 1)."""
    if not column.size:
        return np.zeros((len(column), 0), np.uint8)
    flat = np.ascontiguousarray(column).reshape(len(column), -1)
    width = flat.shape[1] * flat.itemsize
    return flat.view(np.uint64 if width % 8 == 0 else np.uint32 if width % 4 == 0 else np.uint8)


def are_alike(a: Array, b: Array) -> bool:
    """Whether two arrays have the same dtype and row shape."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):  # much faster than `describe`
        return bool(a.dtype == b.dtype and a.shape[1:] == b.shape[1:])
    return describe(a) == describe(b)


def check_alike(given: Mapping[str, Array], held: Mapping[str, Array], what: str, where: str) -> None:
    """Raise a DataError unless the columns ``given`` have the names, dtypes and row shapes of those ``held``.

    The message begins with ``where``; ``what`` is the kind of column.
    """
    if others := sorted(given.keys() ^ held.keys()):
        raise DataError(f"{where}: only one of them has {what} {', '.join(f'`{name}`' for name in others)}.")
    for name, column in given.items():
        if not are_alike(column, held[name]):
            raise DataError(
                f"{where}: {what} `{name}` is {describe(column)}, not {describe(held[name])}. Convert it first."
            )


def check_scalars(columns: Mapping[str, Array], whose: str) -> None:
    """Raise a DataError unless the columns in `col.SCALARS` are one-dimensional: others would be broadcast in losses.

    Args:
        columns: Columns by name.
        whose: What holds the columns, for the message.
    """
    for name in col.SCALARS:
        if name in columns and np.ndim(columns[name]) != 1:
            shape = tuple(columns[name].shape[1:])
            how = f", such as {name}[:, 0]" if shape == (1,) else ""
            raise DataError(
                f"the column `{name}` of {whose} has rows of shape {shape}, but must hold one number for each step: "
                f"give an array [rows]{how}."
            )


def describe(array: Array) -> str:
    """The dtype and shape of one row, such as ``float32[4]`` or ``int64``."""
    dtype = str(array.dtype).removeprefix("torch.")
    return dtype + (str(list(array.shape[1:])) if array.ndim > 1 else "")


class ActionCodes:
    """Encodes actions as vectors ``[rows, width]``: choices one-hot, other actions flattened; all columns concatenated.

    Args:
        action_space: The action space.
    """

    def __init__(self, action_space: Space) -> None:
        found = leaves(action_space, col.ACTION)
        self._sizes = {name: math.prod(leaf_shape(leaf)) for name, leaf in found.items()}
        self._choices: dict[str, tuple[Constant, Constant]] = {}
        """For each column of choices: the position and the value of the number that each one-hot component encodes."""
        self.names = list(found)
        """The names of the columns."""
        self.width = 0
        """Size of the vector."""
        for name, leaf in found.items():
            width = self._sizes[name]
            if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete):
                counts = np.reshape(leaf.n if isinstance(leaf, spaces.Discrete) else leaf.nvec, -1)
                of = np.repeat(np.arange(len(counts)), counts)
                choice = ranges(np.reshape(leaf.start, -1).astype(np.int64), counts.astype(np.int64))
                self._choices[name], width = (Constant(of), Constant(choice)), len(of)
            self.width += width

    def __call__(self, action: Columns) -> Array:
        """Encode actions, float32 ``[rows, width]``; as a tensor if they are tensors."""
        parts = []
        for name, size in self._sizes.items():
            part = action[name].reshape(action[name].shape[0], size)
            if name in self._choices:
                of, choice = self._choices[name]
                part = (part if size == 1 else part[:, of.like(part)]) == choice.like(part)
            parts.append(cast(part, np.float32))
        return concat(parts, 1)
