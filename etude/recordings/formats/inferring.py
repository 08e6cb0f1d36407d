# SPDX-License-Identifier: Apache-2.0
"""Infer spaces and dtypes of columns."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
from gymnasium import spaces

from etude import columns as col
from etude.columns import SEPARATOR, Columns
from etude.errors import DataError
from etude.experience.table import KEYS
from etude.spaces import NamedDiscrete, NamedVector, Space, are_permuted, map_leaves, with_names

MOST_CHOICES: Final = 65_536
"""Integers from 0 to below this number are treated as choices; larger ones as numbers."""

FEW_TEXTS: Final = 16
"""Up to this many different texts are always read as names."""
_WRITTEN: Final = {
    "list": re.compile(
        r"\[(?=\D*\d)[-+\d.eE,;\s\[\]]*\]"
        r"|(array|tensor)\((?=\D*\d)([-+\d.eE,;\s\[\]()]|nan|inf)*(dtype=['\w.<>|]+)?\)"
        r"|\((?=.*\d[.eE])(?=.*[,;])([-+\d.eE,;\s()]|np\.float\d\d|nan|inf)*\)",
        re.S,
    ),
    "whole": re.compile(r"[-+]?\d+"),
    "fraction": re.compile(
        r"[-+]?(\d+[.,]\d*|[.,]\d+|\d{1,3}([,']\d{3})+(\.\d*)?|\d{1,3}([. ]\d{3})+,\d+|\d+(?=[eE]))([eE][-+]?\d+)?"
    ),
    "name": re.compile(r"(?s:.*)"),
}

Range: TypeAlias = tuple[Any, Any]
"""The smallest and the largest integer at each position of a row."""


def fits(own: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether rows of shape ``own`` hold values of shape ``wanted``: they may be flattened, but not transposed."""
    axes, others = (tuple(size for size in shape if size > 1) for shape in (own, wanted))
    return math.prod(own) == math.prod(wanted) and (axes == others or min(len(axes), len(others)) < 2)


def fitting(leaf: Space, found: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a column with space ``leaf`` and data of dtype ``found``: the wider one, if they differ."""
    wanted = np.dtype(leaf.dtype)
    if np.can_cast(found, wanted, "safe"):
        return wanted
    return found if np.can_cast(wanted, found, "safe") else np.result_type(wanted, found)


def widened(space: Space, root: str, dtypes: Mapping[str, np.dtype[Any]]) -> Space:
    """Return ``space`` with the given dtypes of its columns.

    Raises:
        DataError: a dtype does not fit the space; the message names the column, but no file.
    """
    return map_leaves(space, lambda name, leaf: _widened(leaf, name, dtypes[name]), root)


def _widened(space: Space, root: str, dtype: np.dtype[Any]) -> Space:
    if dtype == space.dtype:
        return space
    names = space.names if isinstance(space, NamedVector) else ()
    if isinstance(space, spaces.Box):
        wide = spaces.Box(space.low.astype(dtype), space.high.astype(dtype), space.shape, dtype.type)
        return with_names(wide, names)
    if isinstance(space, spaces.MultiDiscrete) and dtype.kind in "iu":
        choices = spaces.MultiDiscrete(space.nvec.astype(dtype), dtype.type, start=space.start.astype(dtype))
        return with_names(choices, names)
    if isinstance(space, NamedDiscrete) and dtype.kind in "iu":
        return NamedDiscrete(space.names, dtype.type)
    if isinstance(space, spaces.Discrete) and dtype.kind in "iu":
        return spaces.Discrete(int(space.n), start=int(space.start), dtype=dtype.type)
    raise DataError(f"column `{root}` holds {dtype}, but its space is {space}. Correct one of them.")


def inferred_space(
    columns: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
    root: str,
    ranges: Mapping[str, Range],
    names: Mapping[str, Iterable[str]] = MappingProxyType({}),
) -> Space:
    """Infer the space of columns that come without one. All formats use these rules.

    - A scalar integer that is never negative and at most 65,535: ``Discrete``, with the largest number (including
      next observations) as its last choice.
    - Several such integers in an action: ``MultiDiscrete``, with each component sized by the same rule.
    - Text: a `NamedDiscrete` of all texts, sorted, so that it does not depend on the order of rows or files; see
      `written_numbers`.
    - A boolean: ``Discrete(2)``; several: ``MultiBinary``.
    - Several numbers that are an action mask (``obs/action_mask``): a ``Box`` from 0 to 1.
    - All other numbers: an unbounded ``Box`` of their dtype.
    - Several columns: a ``Dict``, or a ``Tuple`` if they are named 0, 1, 2 and so on.

    Args:
        columns: The dtype and row shape of each column under ``root``.
        root: ``obs`` or ``action``, or a column below them.
        ranges: The ranges of the columns for which `needs_range` holds; see `widen`.
        names: All texts in each text column.

    Raises:
        DataError: there are no columns; or a text column has more than 65,536 different texts, or holds numbers.
    """
    if not columns:
        raise DataError(f"`{root}` has no columns")
    if list(columns) != [root]:
        keys = list(dict.fromkeys(name[len(root) + 1 :].split(SEPARATOR)[0] for name in columns))
        inside = {key: {n: c for n, c in columns.items() if col.is_under(n, f"{root}{SEPARATOR}{key}")} for key in keys}
        parts = [(k, inferred_space(found, f"{root}{SEPARATOR}{k}", ranges, names)) for k, found in inside.items()]
        is_tuple = keys == [str(i) for i in range(len(keys))]
        return spaces.Tuple([part for _, part in parts]) if is_tuple else spaces.Dict(parts)
    if root in names:
        if len(sorted_names := sorted(names[root])) > MOST_CHOICES:
            raise DataError(f"`{root}` has more than {MOST_CHOICES:,} different texts, for instance {sorted_names[:3]}")
        if len(sorted_names) > FEW_TEXTS and (is_like := written_numbers(sorted_names)):
            raise DataError(
                f"`{root}` is text that {is_like}: as names, they would have no order, and a policy would refuse all "
                "others. Convert the column to numbers, or give the space: a NamedDiscrete, if they are names."
            )
        return NamedDiscrete(sorted_names)
    dtype, shape = columns[root]
    if dtype.kind == "b":
        return spaces.MultiBinary(list(shape) if len(shape) > 1 else shape[0]) if shape else spaces.Discrete(2)
    if root == col.OBS_MASK and shape:
        return spaces.Box(0, 1, shape, dtype.type)
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, dtype.type)
    if needs_range(root, dtype, shape) and root in ranges:
        low, high = ranges[root]
        if np.size(high) and np.min(low) >= 0 and np.max(high) < MOST_CHOICES:
            most = np.asarray(high, np.int64) + 1
            return spaces.MultiDiscrete(most) if shape else spaces.Discrete(int(most))
    bounds = np.iinfo(dtype)
    return spaces.Box(bounds.min, bounds.max, shape, dtype.type)


def written_numbers(texts: Iterable[str]) -> str | None:
    """Describe texts that are numbers, or lists of numbers, rather than names; None if they are names.

    Texts are numbers if most of them are written as numbers, and some of these have a fraction. Whole numbers alone may
    be names, such as codes of products, and so may tuples of them.
    """
    kinds = _kinds_of(texts)
    num, fractions, names = sum(map(len, kinds.values())), kinds["fraction"], kinds["name"]
    if 2 * len(kinds["list"]) > num:
        return f"holds lists, such as {kinds['list'][0][:40]!r}"
    if not fractions or 2 * (len(fractions) + len(kinds["whole"])) <= num:
        return None
    return f"holds numbers, such as {fractions[0][:40]!r}" + (f", but also {names[0][:40]!r}" if names else "")


def no_number(texts: Iterable[str]) -> str | None:
    """Return a text that is not written as a number where most of the others are; None if there is none."""
    kinds = _kinds_of(texts)
    numbers = len(kinds["fraction"]) + len(kinds["whole"])
    return kinds["name"][0] if 0 < len(kinds["name"]) < numbers else None


def _kinds_of(texts: Iterable[str]) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {kind: [] for kind in _WRITTEN}
    for text in texts:
        kinds[next(kind for kind, pattern in _WRITTEN.items() if pattern.fullmatch(text.strip()))].append(text)
    return kinds


def named(space: Space, root: str, names: Mapping[str, Sequence[str]]) -> Space:
    """Return ``space`` with names for the numbers in its vectors; ``names`` has them by column.

    Raises:
        DataError: a vector has these names already, in another order.
    """
    found = map_leaves(space, lambda name, leaf: with_names(leaf, names.get(name, ())), root)
    if are_permuted(space, found):
        raise DataError(
            f"the columns of `{root}` are those of {found}, but the space has them in another order: {space}. Map them "
            "in that order."
        )
    return found


def joint_space(a: Space, b: Space) -> Space | None:
    """Return the space that `inferred_space` would infer from the data behind both ``a`` and ``b``.

    Both must be results of `inferred_space`. Returns None if they differ in more than the range of their numbers.
    """
    if isinstance(a, spaces.Dict) and isinstance(b, spaces.Dict) and list(a.spaces) == list(b.spaces):
        joint = {key: joint_space(part, b.spaces[key]) for key, part in a.spaces.items()}
        parts = [(key, part) for key, part in joint.items() if part is not None]
        return spaces.Dict(parts) if len(parts) == len(joint) else None
    if isinstance(a, spaces.Tuple) and isinstance(b, spaces.Tuple) and len(a.spaces) == len(b.spaces):
        pairs = [joint_space(part, other) for part, other in zip(a.spaces, b.spaces, strict=True)]
        found = [part for part in pairs if part is not None]
        return spaces.Tuple(found) if len(found) == len(pairs) else None
    if a == b:
        return a
    if are_permuted(a, b) or (a.shape, a.dtype) != (b.shape, b.dtype):
        return None
    if isinstance(a, NamedDiscrete) or isinstance(b, NamedDiscrete):
        return None
    if isinstance(a, spaces.Discrete) and isinstance(b, spaces.Discrete) and a.start == b.start == 0:
        return max(a, b, key=lambda space: int(space.n))
    if (
        isinstance(a, spaces.MultiDiscrete)
        and isinstance(b, spaces.MultiDiscrete)
        and not (a.start.any() or b.start.any())
    ):
        wide = spaces.MultiDiscrete(np.maximum(a.nvec, b.nvec), a.dtype.type)
        return with_names(wide, a.names if isinstance(a, NamedVector) else ())
    numbers = [space for space in (a, b) if isinstance(space, spaces.Box)]
    is_choice = [isinstance(space, spaces.Discrete | spaces.MultiDiscrete) for space in (a, b)]
    return numbers[0] if len(numbers) == 1 and any(is_choice) else None


def described(columns: Columns) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Return the dtype and row shape of each column."""
    return {name: (values.dtype, values.shape[1:]) for name, values in columns.items()}


def needs_range(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    """Whether the inferred space of a column depends on the range of its numbers."""
    return dtype.kind in "iu" and (not shape or col.is_under(name, col.ACTION))


def widen(ranges: dict[str, Range], columns: Columns) -> None:
    """Extend the ranges of integer columns, for each position of a row, by more rows.

    Next observations count as observations, because some states, such as final ones, appear only there.
    """
    for own, values in columns.items():
        name = col.as_obs(own)
        if len(values) and needs_range(name, values.dtype, values.shape[1:]):
            low, high = values.min(axis=0), values.max(axis=0)
            if name in ranges:
                low, high = np.minimum(low, ranges[name][0]), np.maximum(high, ranges[name][1])
            ranges[name] = low, high


def reserved(name: str) -> bool:
    """Whether a recording uses ``name`` itself, so that no step column may have it."""
    return name in KEYS or any(col.is_under(name, root) for root in (col.FINAL_OBS, col.NEXT_OBS))
