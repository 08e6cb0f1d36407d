# SPDX-License-Identifier: Apache-2.0
"""Where a replay holds its columns: in memory, or in files that are mapped into it."""

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from etude import columns as col
from etude.errors import DataError
from etude.experience.arrays import Array, describe
from etude.experience.experience import Experience


class Store:
    """Makes columns of zeros.

    Args:
        path: A folder, made if there is none, for a raw file a column; None is memory.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path)

    def column(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """A new column; it takes the place of the file of an older one with that name, which stays usable."""
        if self.path is None or 0 in shape:
            return np.zeros(shape, dtype)
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / f"{quote(name, safe='')}.bin"
        file.unlink(missing_ok=True)  # who has the old one mapped keeps it; to truncate it would pull it away
        return np.asarray(np.memmap(file, dtype, "w+", shape=shape))


def write(column: NDArray[Any], start: int, values: Array) -> None:
    """Write rows from ``start`` on, going on from 0 behind the last row but one, which is no step's."""
    stop, capacity = start + len(values), len(column) - 1
    if stop <= capacity:
        column[start:stop] = values
    else:
        column[start:capacity] = values[: capacity - start]
        column[: stop - capacity] = values[capacity - start :]


def check_first(exp: Experience) -> None:
    """Raise a DataError where an Experience can't be the first in a replay."""
    obs = col.under(exp.steps, col.OBS)
    if not obs or col.REWARD not in exp.steps or set(obs) != set(exp.final_obs):
        raise DataError(
            f"a replay needs observations, each with its final_obs, and `{col.REWARD}`; here are the columns "
            f"{sorted(exp.steps)} and the final_obs {sorted(exp.final_obs)}."
        )
    for name, column in exp.steps.items():
        if not isinstance(column, np.ndarray):
            raise DataError(f"column `{name}` is a {type(column).__name__}, but a replay holds NumPy: use exp.numpy().")
        if column.dtype.hasobject:
            raise DataError(
                f"column `{name}` holds objects ({column.dtype}), which a replay can't: leave it out, or make numbers "
                "of them."
            )
    for name, final in exp.final_obs.items():
        if describe(final) != describe(exp.steps[name]):
            raise DataError(f"final_obs `{name}` is {describe(final)}, but its column is {describe(exp.steps[name])}.")


def check_same(exp: Experience, columns: dict[str, NDArray[Any]], finals: dict[str, NDArray[Any]]) -> None:
    """Raise a DataError where an Experience has other columns than those that a replay holds."""
    for what, given, held in (("column", exp.steps, columns), ("final_obs", exp.final_obs, finals)):
        if given.keys() != held.keys():
            raise DataError(
                f"the replay holds {what}s {sorted(held)}, but the experience has {sorted(given)}: add experience of "
                "one kind only."
            )
        for name, column in held.items():
            new = given[name]
            if new.dtype != column.dtype or new.shape[1:] != column.shape[1:]:
                raise DataError(
                    f"the replay holds {what} `{name}` as {describe(column)}, but in the experience it is "
                    f"{describe(new)}: convert it first."
                )
