# SPDX-License-Identifier: Apache-2.0
"""Conditions on the steps of a recording, from text."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from etude.errors import SettingsError
from etude.experience import Experience
from etude.recordings.expressions import Expression, step_values


class RowFilter:
    """A condition on single steps, such as ``reward > 0 and t < 100``.

    Args:
        text: An expression over steps; see `etude.recordings.expressions.Expression`.

    Raises:
        SettingsError: it is something else, or names no column.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._expression = Expression(text, of_steps=True)
        self.names = sorted(set(self._expression.columns))
        """The columns that it looks at."""
        if not self.names:
            raise SettingsError(
                f"the filter {text[:200]!r} can't be used (it names no column). Write a condition on single steps, "
                "such as `reward > 0 and t < 100`."
            )

    def columns(self, there: Sequence[str]) -> tuple[str, ...]:
        """The step columns that it looks at, of those that are there; others are facts of the segments."""
        return tuple(name for name in self.names if name in there)

    def holds(self, exp: Experience) -> NDArray[np.bool_]:
        """bool ``[num_steps]``: the steps for which it holds.

        Raises:
            SettingsError: it names what is not there, or compares what can't be compared.
        """
        self._expression.check_names((), exp.steps)
        return self._expression(step_values(exp, self.names))

    def __call__(self, exp: Experience) -> Experience:
        """The steps for which it holds, in segments that know what was observed after each."""
        kept = self.holds(exp)
        if kept.all():
            return exp
        changes = np.flatnonzero(np.diff(kept)) + 1
        bounds = np.union1d(exp.offsets, changes)
        start, stop = bounds[:-1], bounds[1:]
        parent = np.searchsorted(exp.offsets, start, side="right") - 1
        return exp.pieces(parent, start, stop).select(kept[start])
