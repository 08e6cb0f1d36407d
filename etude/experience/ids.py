# SPDX-License-Identifier: Apache-2.0
"""Ids: a column of names, stored as integer codes and a table of names like Arrow's dictionary arrays."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.experience.arrays import Index


class Ids:
    """A column of ``[n]`` names, or None for missing names. Equal names have equal codes.

    It reads like an array of strings: ``ids[i]`` is a name, ``ids == "a"`` is an array of bool, and `numpy.asarray`
    gives all names. Other array methods, such as ``astype``, work on that array. A slice, mask or index
    array gives Ids. Ids are read-only.

    Args:
        names: ``[n]`` names; or, with ``codes``, a table of different names, not all of which need be used.
        codes: int64 ``[n]``: the index of each name in the table. None: computed on first use, because that takes
            longer than most other operations on an Experience.
    """

    __slots__ = ("_held",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, names: NDArray[np.object_], codes: Index | None = None) -> None:
        self._held = names, codes  # one tuple, so that other threads never see new names with old codes

    @classmethod
    def of(cls, values: Any, num: int) -> "Ids":
        """``num`` names; a single name or None is used for all of them."""
        if isinstance(values, cls):
            return values
        if values is None or isinstance(values, str):
            return cls(np.array([values], object), np.zeros(num, np.int64))
        if len(values) != num:
            raise ValueError(f"{len(values)} ids for {num} segments: give one for each, or a single string for all.")
        names = np.empty(num, object)
        names[:] = values
        return cls(names)

    @classmethod
    def concat(cls, parts: Sequence["Ids"]) -> "Ids":
        """The names of all ``parts``, in order, as a copy, whose table is not longer than the column."""
        codes = [codes for _, codes in (part._held for part in parts) if codes is not None]
        names = parts[0]._held[0]
        is_short = len(codes) == len(parts) and len(names) <= sum(map(len, codes))
        if is_short and all(_same(part._held[0], names) for part in parts):
            return cls(names, np.concatenate(codes))
        return cls(np.concatenate([np.asarray(part) for part in parts]))

    @property
    def codes(self) -> Index:
        """int64 ``[n]``: the index of each name in `names`."""
        return self._coded()[1]

    @property
    def names(self) -> NDArray[np.object_]:
        """object ``[k]``: the table of different names, which may include None."""
        return self._coded()[0]

    def _coded(self) -> tuple[NDArray[np.object_], Index]:
        names, codes = self._held
        if codes is None:
            each = names.tolist()
            places = {name: i for i, name in enumerate(dict.fromkeys(each))}
            codes = np.fromiter(map(places.__getitem__, each), np.int64, len(each))
            names = np.array([*places], object)
            self._held = names, codes
        return names, codes

    def mapped(self, function: Callable[[Any], Any], dtype: Any) -> NDArray[Any]:
        """Apply a function to each name: ``[n]`` of ``dtype``. It is called once for each name in the table."""
        names, codes = self._held
        values = np.fromiter(map(function, names.tolist()), dtype, len(names))
        return values if codes is None else values[codes]

    def tolist(self) -> list[Any]:
        """All names. This is faster than through an array, and a replay calls it for each step that is added."""
        names, codes = self._held
        listed: list[Any] = (names if codes is None else names[codes]).tolist()
        return listed

    def __len__(self) -> int:
        names, codes = self._held
        return len(names if codes is None else codes)

    def __getitem__(self, where: Any) -> Any:
        names, codes = self._held
        if codes is None:
            some = names[where]
            return Ids(some) if isinstance(some, np.ndarray) else some
        some = codes[where]
        return Ids(names, some) if isinstance(some, np.ndarray) else names[some]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def __getattr__(self, name: str) -> Any:
        """Other attributes of an array of the names, such as ``astype`` and ``repeat``."""
        if name.startswith("__"):  # NumPy looks some of these up before it calls __array__
            raise AttributeError(name)
        return getattr(np.asarray(self), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        names, codes = self._held
        return (names if codes is None else names[codes]).astype(dtype or object, copy=bool(copy))

    def __eq__(self, other: object) -> NDArray[np.bool_]:  # type: ignore[override]  # like arrays
        names, codes = self._held
        if isinstance(other, Ids) and other._held[0] is names:
            return np.asarray(self.codes == other.codes)
        if codes is not None and len(names) <= len(codes) and (other is None or isinstance(other, str)):
            return np.asarray(names == other)[codes]
        return np.asarray(np.asarray(self) == np.asarray(other, object), bool)

    def __ne__(self, other: object) -> NDArray[np.bool_]:  # type: ignore[override]
        return ~(self == other)

    def __repr__(self) -> str:
        return str(np.asarray(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return Ids, Ids.concat([self])._held  # without names that are not used here


def _same(a: NDArray[np.object_], b: NDArray[np.object_]) -> bool:
    return a is b or (len(a) == len(b) and a.tolist() == b.tolist())
