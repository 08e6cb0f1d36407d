# SPDX-License-Identifier: Apache-2.0
"""Lengths: how long the segments that a runner gives out may be."""

from etude.errors import SettingsError
from etude.experience import Experience


class Lengths:
    """Cuts segments that are too long, and drops those that are too short.

    Args:
        least: Shorter segments are dropped, and counted.
        most: Longer ones are cut; None is any length.

    Raises:
        SettingsError: ``least`` is below 1, or ``most`` below ``least``.
    """

    def __init__(self, least: int = 1, most: int | None = None) -> None:
        if least < 1 or (most is not None and most < least):
            raise SettingsError(
                f"segments of {least} to {most} steps: the least must be at least 1, and the most no less."
            )
        self._least = least
        self._most = most
        self._dropped = 0

    def keep(self, exp: Experience, context: int = 0) -> Experience:
        """The segments of ``exp``, cut and dropped; pieces that go on get ``context`` rows of lookback."""
        if self._most is not None and exp.num_segments and int(exp.lengths.max()) > self._most:
            exp = exp.cut(self._most, lookback=context)
        if self._least > 1 and exp.num_segments:
            own = exp.lengths - exp.segments.lookback
            enough = own >= self._least
            self._dropped += int(own[~enough].sum())
            exp = exp if enough.all() else exp.select(enough)
        return exp

    def stats(self) -> dict[str, float]:
        """``dropped_steps`` since this was last asked; {} where none are ever dropped."""
        if self._least == 1:
            return {}
        dropped, self._dropped = self._dropped, 0
        return {"dropped_steps": dropped}
